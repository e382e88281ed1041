#include "common/paths.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __APPLE__
#include <mach-o/dyld.h>
#endif

enum { PATH_BYTES = 4096 };

/* Identifies a file: the file itself if it exists, otherwise its folder and its name in the folder. */
struct identity {
    int exists;
    struct stat status; /* of the file, or of the folder if the file does not exist */
    const char *name;
};

/* Returns 0, or -1 if the path is too long, or if neither the file nor its folder exists. */
static int identify(const char *path, struct identity *out)
{
    out->exists = stat(path, &out->status) == 0;
    if (out->exists) return 0;
    char folder[PATH_BYTES];
    const char *slash = strrchr(path, '/');
    out->name = slash ? slash + 1 : path;
    size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    if (n >= sizeof folder) return -1;
    memcpy(folder, path, n);
    strcpy(folder + n, ".");
    return stat(folder, &out->status);
}

static int same(const struct identity *a, const struct identity *b)
{
    if (a->exists != b->exists || a->status.st_dev != b->status.st_dev || a->status.st_ino != b->status.st_ino)
        return 0;
    if (!a->exists) return strcmp(a->name, b->name) == 0;
    return S_ISREG(a->status.st_mode) || S_ISBLK(a->status.st_mode);
}

/* Returns 1 if the folder holds the file that `file` identifies. with_checkpoints: looks also into folders called
 * checkpoint-* in it. */
static int holds(const char *folder, const struct identity *file, int with_checkpoints)
{
    DIR *stream = opendir(folder);
    if (!stream) return 0;
    struct dirent *entry;
    int found = 0;
    while (!found && (entry = readdir(stream)) != NULL) {
        char path[PATH_BYTES];
        struct identity inner;
        if (entry->d_name[0] == '.' && (!entry->d_name[1] || strcmp(entry->d_name, "..") == 0)) continue;
        if (snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) >= (int)sizeof path) continue;
        if (identify(path, &inner) != 0 || !inner.exists) continue;
        found = same(file, &inner);
        if (!found && with_checkpoints && S_ISDIR(inner.status.st_mode) &&
            strncmp(entry->d_name, "checkpoint-", 11) == 0)
            found = holds(path, file, 0);
    }
    closedir(stream);
    return found;
}

/* Returns the real path of the deepest part of `path` that exists, to be freed. Returns NULL if there is none. */
static char *real_part(const char *path)
{
    char *part = path[0] ? strdup(path) : NULL, *found = NULL;
    while (part && !(found = realpath(part, NULL))) {
        size_t n = strlen(part);
        while (n > 1 && part[n - 1] == '/') n--;
        while (n && part[n - 1] != '/') n--;
        if (!n && strcmp(part, ".") == 0) break;
        if (n) part[n == 1 ? 1 : n - 1] = 0;
        else strcpy(part, ".");
    }
    free(part);
    return found;
}

int paths_outside(struct named_path input, const struct named_path *outputs, int n_outputs, char *error,
                  size_t error_bytes)
{
    struct stat status;
    int found = 0;
    if (!input.path || stat(input.path, &status) != 0 || !S_ISDIR(status.st_mode)) return 0;
    char *folder = realpath(input.path, NULL);
    size_t n = folder ? strlen(folder) : 0;
    if (n == 1) n = 0; /* every path begins with the root */
    for (int o = 0; o < n_outputs && folder && !found; o++) {
        char *place = outputs[o].path ? real_part(outputs[o].path) : NULL;
        found = place && strncmp(place, folder, n) == 0 && (place[n] == '/' || !place[n]);
        free(place);
        if (found)
            snprintf(error, error_bytes, "%s %s lies in %s, a folder of %s, and would be read as one of its files",
                     outputs[o].what, outputs[o].path, input.path, input.what);
    }
    free(folder);
    return found ? 2 : 0;
}

int paths_check(const struct named_path *inputs, int n_inputs, const struct named_path *outputs, int n_outputs,
                char *error, size_t error_bytes)
{
    for (int o = 0; o < n_outputs; o++) {
        struct identity output, other;
        if (!outputs[o].path || identify(outputs[o].path, &output) != 0) continue;
        for (int i = 0; i < n_inputs; i++) {
            if (!inputs[i].path || identify(inputs[i].path, &other) != 0) continue;
            int inside = other.exists && S_ISDIR(other.status.st_mode);
            if (!(inside ? output.exists && holds(inputs[i].path, &output, 1) : same(&output, &other))) continue;
            snprintf(error, error_bytes, "%s would overwrite %s, %s %s", outputs[o].what, outputs[o].path,
                     inside ? "a file of" : "which is", inputs[i].what);
            return 2;
        }
        for (int i = 0; i < o; i++) {
            if (!outputs[i].path || identify(outputs[i].path, &other) != 0 || !same(&output, &other)) continue;
            snprintf(error, error_bytes, "%s and %s are the same file, %s", outputs[i].what, outputs[o].what,
                     outputs[o].path);
            return 2;
        }
    }
    return 0;
}

int paths_program(char *path, size_t path_bytes)
{
#ifdef __APPLE__
    uint32_t bytes = (uint32_t)path_bytes;
    return _NSGetExecutablePath(path, &bytes);
#else
    ssize_t n = readlink("/proc/self/exe", path, path_bytes - 1);
    if (n <= 0 || (size_t)n == path_bytes - 1) return -1;
    path[n] = 0;
    return 0;
#endif
}
