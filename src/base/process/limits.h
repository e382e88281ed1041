/* Reads the limits that a container sets on the process: those of Linux's control groups, versions 1 and 2. For the
 * library and the program. */
#ifndef HSTEP_LIMITS_H
#define HSTEP_LIMITS_H

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Where a limit stands. One in two files is the first number divided by the second; version 2 has both in one file. */
struct hstep_limit {
    const char *controller;             /* folder of version 1 */
    const char *file;                   /* of version 2 */
    const char *old_file, *old_divisor; /* of version 1; the divisor may be NULL */
};

/* Returns the number, or the quotient of two, that a file begins with. Returns infinity if there is none, or if it is
 * negative, which means no limit. */
static inline double hstep_read_limit(const char *root, const char *folder, const char *group, const char *name)
{
    char path[4096];
    double number = -1, divisor = 1;
    const int length = snprintf(path, sizeof path, "%s/sys/fs/cgroup%s%s/%s", root, folder, group, name);
    FILE *file = length < (int)sizeof path ? fopen(path, "r") : NULL;
    if (!file) return INFINITY;
    const int found = fscanf(file, "%lf %lf", &number, &divisor);
    fclose(file);
    return found < 1 || number < 0 || !(divisor > 0) ? INFINITY : number / divisor;
}

/* Tells whether a list of words, separated by commas, has this one. */
static inline int hstep_has_word(const char *list, const char *word)
{
    const size_t length = strlen(word);
    for (; *list; list += *list == ',') {
        const size_t n = strcspn(list, ",");
        if (n == length && !strncmp(list, word, n)) return 1;
        list += n;
    }
    return 0;
}

/* Returns the least limit of the process's own group and the groups above it, or infinity. root: "", or a folder that
 * stands for "/". A container may see its group as the topmost one, under a path that it cannot see. */
static inline double hstep_find_limit(const char *root, const struct hstep_limit *limit)
{
    char path[4096], text[8192], folder[64];
    double least = INFINITY;
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *list = fopen(path, "r");
    const size_t bytes = list ? fread(text, 1, sizeof text - 1, list) : 0;
    if (list) fclose(list);
    text[bytes] = 0;
    /* A line is number:controllers:group. Version 2 has no controllers. */
    for (char *line = text, *next; *line; line = next) {
        const size_t length = strcspn(line, "\n");
        next = line + length + (line[length] == '\n');
        line[length] = 0;
        char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        const int is_new = !*++controllers;
        if (!is_new && !hstep_has_word(controllers, limit->controller)) continue;
        snprintf(folder, sizeof folder, "/%s", is_new ? "" : limit->controller);
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = 0;
            double value = hstep_read_limit(root, folder, group, is_new ? limit->file : limit->old_file);
            if (!is_new && limit->old_divisor) value /= hstep_read_limit(root, folder, group, limit->old_divisor);
            if (value < least) least = value;
        }
    }
    return least;
}

/* Return how many processors' time the process may use, and bytes of memory. Infinity: there is no such limit. */
static inline double hstep_processor_quota(const char *root)
{
    static const struct hstep_limit limit = {"cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"};
    return hstep_find_limit(root, &limit);
}

static inline double hstep_memory_limit(const char *root)
{
    static const struct hstep_limit limit = {"memory", "memory.max", "memory.limit_in_bytes", NULL};
    return hstep_find_limit(root, &limit);
}

#endif
