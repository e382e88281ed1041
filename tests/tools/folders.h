/* Functions for folders that tests and fuzz targets make and remove. */
#ifndef HALFSTEP_TESTS_FOLDERS_H
#define HALFSTEP_TESTS_FOLDERS_H

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Removes a folder with its contents. Does not follow links. */
__attribute__((unused)) static void remove_tree(const char *path)
{
    char inner[1024];
    DIR *stream = opendir(path);
    for (struct dirent *entry; stream && (entry = readdir(stream));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%.700s/%s", path, entry->d_name);
        if (unlink(inner)) remove_tree(inner);
    }
    if (stream) closedir(stream);
    rmdir(path);
}

/* Returns the number of a folder's entries that begin with `prefix`, or -1 if there is no folder. */
__attribute__((unused)) static int count_entries(const char *path, const char *prefix)
{
    int count = 0;
    DIR *stream = opendir(path);
    if (!stream) return -1;
    struct dirent *entry;
    while ((entry = readdir(stream)))
        count += strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..") &&
                 !strncmp(entry->d_name, prefix, strlen(prefix));
    closedir(stream);
    return count;
}

/* Returns the path of a name in a folder, valid for the next few calls. */
__attribute__((unused)) static const char *path_in(const char *folder, const char *name)
{
    static char paths[8][600];
    static unsigned turn;
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

#endif
