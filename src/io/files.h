/* Everything halfstep_io asks of the operating system; implemented for POSIX in files.c, and nowhere else.
 *
 * Failures name the path and say what the system said. Calls interrupted by a signal are resumed. */
#ifndef HALFSTEP_IO_FILES_H
#define HALFSTEP_IO_FILES_H

#include "io/text.h"

/* ---- Files ------------------------------------------------------------------------------------------------------- */

typedef struct hstep_file hstep_file;

/* Opens a regular file for reading; anything else (a directory, a pipe) is refused, without waiting for it. */
int hstep_open_file(hstep_file **file, const char *path, uint64_t *bytes, hstep_error *error);
/* Creates a file that must not exist yet. Error texts call it `shown`: users know nothing of temporary names. */
int hstep_create_file(hstep_file **file, const char *path, const char *shown, hstep_error *error);
int hstep_file_bytes(const hstep_file *file, uint64_t *bytes, hstep_error *error);
const char *hstep_file_path(const hstep_file *file);
/* All of the bytes, or a failure. */
int hstep_read_at(const hstep_file *file, uint64_t offset, void *data, size_t bytes, hstep_error *error);
int hstep_write(hstep_file *file, const void *data, uint64_t bytes, hstep_error *error);
int hstep_sync(hstep_file *file, hstep_error *error);
/* Frees file in every case; NULL is fine. A failed close of a written file is a failed write. */
int hstep_close(hstep_file *file, hstep_error *error);

/* Reads a whole small file into memory that the caller frees, with a zero byte behind its end. */
int hstep_read_whole(const char *path, uint64_t limit, char **data, size_t *bytes, hstep_error *error);

/* ---- Replacing a file -------------------------------------------------------------------------------------------- */

/* The new contents are written to a temporary file in the same directory; until finish has renamed it, the path holds
 * what it held before. */
typedef struct hstep_replacement {
    hstep_file *file;
    char *target;
    char *temporary; /* NULL: the target is not a regular file and is written in place */
} hstep_replacement;

int hstep_begin_replacement(hstep_replacement *replacement, const char *path, const char *prefix, hstep_error *error);
/* On failure *renamed tells whether the new contents are in place all the same (only the last sync failed). */
int hstep_finish_replacement(hstep_replacement *replacement, int sync, int *renamed, hstep_error *error);
void hstep_cancel_replacement(hstep_replacement *replacement);

/* ---- Directories ------------------------------------------------------------------------------------------------- */

char *hstep_join_path(const char *directory, const char *name);
/* The directory that holds path. */
char *hstep_parent_path(const char *path);
/* A name that starts with prefix and is used by nobody else at this time on this machine. */
char *hstep_temporary_path(const char *directory, const char *prefix);

/* *created is 0 if it was there already. */
int hstep_make_directory(const char *path, int *created, hstep_error *error);
int hstep_sync_directory(const char *path, hstep_error *error);
/* The names in a directory, sorted by bytes; hstep_free_names frees them. */
int hstep_list_directory(const char *path, char ***names, size_t *count, hstep_error *error);
void hstep_free_names(char **names, size_t count);
/* Error texts call the new name `shown`. */
int hstep_rename(const char *from, const char *to, const char *shown, hstep_error *error);
/* A file or a link, not what a link points to. What does not exist counts as removed. */
int hstep_remove_file(const char *path, hstep_error *error);
/* An empty directory. */
int hstep_remove_directory(const char *path, hstep_error *error);

/* What lies at a path, links not followed. Unknown: the system refuses to say. */
typedef enum hstep_kind {
    HSTEP_KIND_NOTHING,
    HSTEP_KIND_FILE,
    HSTEP_KIND_DIRECTORY,
    HSTEP_KIND_LINK,
    HSTEP_KIND_OTHER,
    HSTEP_KIND_UNKNOWN
} hstep_kind;
hstep_kind hstep_kind_of(const char *path);
/* Whether the owner of a directory may not change it, or this process may not: somebody has protected it. */
int hstep_is_protected(const char *path);

/* Makes `path` another name of directory/name, replacing what is there: a hard link, or a relative symbolic link where
 * the file system has none. `base` is the directory that holds both `path` and the directory called `inner`. */
int hstep_link(const char *base, const char *inner, const char *name, const char *prefix, hstep_error *error);
/* Whether two paths name one file. */
int hstep_same_file(const char *a, const char *b);

/* ---- Locks ------------------------------------------------------------------------------------------------------- */

/* A lock on a directory, which ends with the process if not before. */
typedef struct hstep_lock hstep_lock;

enum { HSTEP_LOCK_SHARED, HSTEP_LOCK_EXCLUSIVE };

/* Never waits: *busy = 1 (and a failure) when somebody else holds it. A file system without locks counts as locked. */
int hstep_lock_directory(hstep_lock **lock, const char *path, int mode, int *busy, hstep_error *error);
void hstep_unlock_directory(hstep_lock *lock); /* NULL is fine */

/* Builds the one table that halfstep_io computes at run time: calls `function` once per process, whatever the number of
 * threads. Always to be given the same function. */
void hstep_call_once(void (*function)(void));

#endif
