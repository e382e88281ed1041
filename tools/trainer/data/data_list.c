/* Several files and folders as one text. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/text.h"
#include "trainer/data/data.h"

enum { LINE = 700 };

/* Collects problems in one error text: as many as fit, and the number of the others. */
struct problems {
    char *error;
    size_t bytes, used;
    int n, more;
    int no_memory;
};

static void complain(struct problems *p, const char *path, const char *what)
{
    size_t limit = p->bytes < LINE ? p->bytes : LINE;
    if (p->n && p->used + strlen(path) + strlen(what) + sizeof "; :  and 2147483647 more" > limit) {
        p->more++;
        return;
    }
    int n =
        snprintf(p->error + p->used, p->bytes - p->used, "%s%s%s%s", p->n ? "; " : "", path, path[0] ? ": " : "", what);
    p->used += n > 0 ? (size_t)n : 0;
    if (p->used >= p->bytes) p->used = p->bytes ? p->bytes - 1 : 0;
    p->n++;
}

static int judge(const struct problems *p)
{
    if (p->no_memory) snprintf(p->error, p->bytes, "out of memory");
    else if (p->more) snprintf(p->error + p->used, p->bytes - p->used, " and %d more", p->more);
    return p->n || p->no_memory ? -1 : 0;
}

static void add_file(struct data_list *list, struct problems *p, const char *path, int named)
{
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 16;
        void *grown = realloc(list->file, capacity * sizeof *list->file);
        if (!grown) {
            p->no_memory = 1;
            return;
        }
        list->file = grown;
        list->capacity = capacity;
    }
    char *copy = strdup(path);
    if (!copy) p->no_memory = 1;
    else list->file[list->n].path = copy, list->file[list->n++].named = named;
}

static int by_bytes(const struct dirent **a, const struct dirent **b) { return strcmp((*a)->d_name, (*b)->d_name); }

static int is_shown(const struct dirent *entry) { return entry->d_name[0] != '.'; }

static void walk(struct data_list *list, struct problems *p, const char *folder);

static void take(struct data_list *list, struct problems *p, const char *path)
{
    struct stat status;
    int bad = lstat(path, &status) != 0, link = !bad && S_ISLNK(status.st_mode);
    if (link) bad = stat(path, &status) != 0;
    if (bad) complain(p, path, strerror(errno));
    else if (S_ISDIR(status.st_mode) && !link) walk(list, p, path);
    else if (!S_ISREG(status.st_mode) || status.st_size == 0) return;
    else if (access(path, R_OK) != 0) complain(p, path, strerror(errno));
    else add_file(list, p, path, 0);
}

static void walk(struct data_list *list, struct problems *p, const char *folder)
{
    struct dirent **entry;
    const char *slash = folder[strlen(folder) - 1] == '/' ? "" : "/";
    int n = scandir(folder, &entry, is_shown, by_bytes);
    if (n < 0 && errno == ENOMEM) p->no_memory = 1;
    else if (n < 0) complain(p, folder, strerror(errno));
    for (int i = 0; i < n; i++) {
        hstep_buffer path = {0};
        hstep_append_format(&path, "%s%s%s", folder, slash, entry[i]->d_name);
        p->no_memory |= path.failed;
        if (!p->no_memory) take(list, p, path.data);
        text_free(&path);
        free(entry[i]);
    }
    if (n >= 0) free(entry);
}

static void expand(const char *const *names, int n, struct data_list *out, struct problems *p)
{
    *out = (struct data_list){0};
    for (int i = 0; i < n && !p->no_memory; i++) {
        struct stat status;
        size_t before = out->n;
        int problems = p->n + p->more;
        if (stat(names[i], &status) != 0) {
            complain(p, names[i], strerror(errno));
        } else if (!S_ISDIR(status.st_mode)) {
            if (S_ISREG(status.st_mode) && access(names[i], R_OK) != 0) complain(p, names[i], strerror(errno));
            else add_file(out, p, names[i], 1);
        } else {
            walk(out, p, names[i]);
            if (out->n == before && p->n + p->more == problems && !p->no_memory)
                complain(p, names[i], "is a folder without a file to read");
        }
    }
}

int data_list(const char *const *names, int n, struct data_list *out, char *error, size_t error_bytes)
{
    struct problems p = {error, error_bytes, 0, 0, 0, 0};
    expand(names, n, out, &p);
    if (judge(&p) == 0) return 0;
    data_list_free(out);
    return -1;
}

void data_list_free(struct data_list *list)
{
    for (size_t i = 0; i < list->n; i++) free(list->file[i].path);
    free(list->file);
    *list = (struct data_list){0};
}

int data_load_all(const char *const *names, int n, struct data_file *out, size_t *files, char *error,
                  size_t error_bytes)
{
    struct problems p = {error, error_bytes, 0, 0, 0, 0};
    struct data_list list;
    size_t capacity = 0;
    *out = (struct data_file){0};
    expand(names, n, &list, &p);
    /* If a file is missing, the others are not read. */
    int reading = judge(&p) == 0;
    for (size_t i = 0; i < list.n && reading; i++) {
        char why[600];
        size_t before = out->n;
        if (data_append(list.file[i].path, out, &capacity, why, sizeof why) != 0) complain(&p, "", why);
        else if (out->n == before && list.file[i].named) complain(&p, list.file[i].path, "is empty");
    }
    *files = list.n;
    data_list_free(&list);
    if (!reading || judge(&p) != 0) {
        data_free(out);
        return -1;
    }
    return 0;
}
