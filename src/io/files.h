/* What halfstep_io asks of the operating system, but for store/engine.h. files.c implements it for POSIX.
 *
 * Error texts name the path and include the system's message. Calls interrupted by a signal are resumed. */
#ifndef HALFSTEP_IO_FILES_H
#define HALFSTEP_IO_FILES_H

#include "io/text.h"

/* Returns the text of errno, or says that the path is a link to nothing. The text may be in `text`. */
const char *hstep_reason(const char *path, char *text, size_t size);
/* Fails with this text: "cannot WHAT PATH: ...". */
int hstep_fail_system(hstep_error *error, const char *what, const char *path);

/* ---- Files ------------------------------------------------------------------------------------------------------- */

typedef struct hstep_file hstep_file;

/* Opens a regular file for reading. Refuses anything else, such as a directory or a pipe, without waiting for it. */
int hstep_open_file(hstep_file **file, const char *path, uint64_t *bytes, hstep_error *error);
/* Creates a file that must not exist yet, with a mode that the umask restricts. Error texts call it `shown`, because
 * users know nothing of temporary names. */
int hstep_create_file(hstep_file **file, const char *path, const char *shown, unsigned mode, hstep_error *error);
int hstep_file_bytes(const hstep_file *file, uint64_t *bytes, hstep_error *error);
const char *hstep_file_path(const hstep_file *file);
/* Read or write all of the bytes, or fail. */
int hstep_read_at(const hstep_file *file, uint64_t offset, void *data, size_t bytes, hstep_error *error);
int hstep_write(hstep_file *file, const void *data, uint64_t bytes, hstep_error *error);
int hstep_sync(hstep_file *file, hstep_error *error);
/* Closes and frees a file that was read, or that nobody will use. NULL is allowed. */
void hstep_close(hstep_file *file);
/* Closes and frees a file that was written with the result `code`. Returns code, or a failure to close if that is OK,
 * because a failed close is a failed write. */
int hstep_close_written(hstep_file *file, int code, hstep_error *error);

/* Reads a whole file of at most `limit` bytes. The caller frees *data, which ends with a zero byte after its *bytes
 * bytes. */
int hstep_read_whole(const char *path, uint64_t limit, char **data, size_t *bytes, hstep_error *error);

/* ---- Replacing a file -------------------------------------------------------------------------------------------- */

/* A replacement of a file. The new contents go to a temporary file in the same directory. Until finish has renamed it,
 * the path holds what it held before. */
typedef struct hstep_replacement {
    hstep_file *file;
    char *target;
    char *temporary; /* NULL: the target is not a regular file and is written in place */
} hstep_replacement;

int hstep_begin_replacement(hstep_replacement *replacement, const char *path, const char *prefix, hstep_error *error);
/* Gives the new contents their name, unless writing them failed with `code`, and frees the replacement. On failure
 * *renamed is 1 if the new contents are in place all the same, because only the last sync failed. */
int hstep_finish_replacement(hstep_replacement *replacement, int code, int sync, int *renamed, hstep_error *error);
/* Does both for contents in memory. */
int hstep_replace_file(const char *path, const char *prefix, const void *data, uint64_t bytes, int sync, int *renamed,
                       hstep_error *error);

/* ---- Directories ------------------------------------------------------------------------------------------------- */

char *hstep_join_path(const char *directory, const char *name);
/* Returns the directory that holds path, for the caller to free, or NULL when memory is short. */
char *hstep_parent_path(const char *path);
/* Returns a path whose name starts with prefix and that nobody else uses at this time on this machine, for the caller
 * to free. Returns NULL when memory is short. */
char *hstep_temporary_path(const char *directory, const char *prefix);

/* Makes a directory. *created is 0 if it was there already. */
int hstep_make_directory(const char *path, int *created, hstep_error *error);
int hstep_sync_directory(const char *path, hstep_error *error);
/* Syncs the parent of a new directory, because without that a loss of power can lose the directory. */
int hstep_sync_parent(const char *path, hstep_error *error);
/* Lists the names in a directory, sorted by bytes. hstep_free_names() frees them. */
int hstep_list_directory(const char *path, char ***names, size_t *count, hstep_error *error);
void hstep_free_names(char **names, size_t count);
/* Renames a file. Error texts call the new name `shown`. */
int hstep_rename(const char *from, const char *to, const char *shown, hstep_error *error);
/* Removes a file, or a link but not what it leads to. Succeeds if there is nothing. */
int hstep_remove_file(const char *path, hstep_error *error);
/* Removes an empty directory. Succeeds if there is none. */
int hstep_remove_directory(const char *path, hstep_error *error);

/* Writes two numbers that tell a directory from every other one that there is now. Returns 0 if the system refuses. */
int hstep_identify(const char *path, uint64_t id[2]);

/* What lies at a path, without following links. UNKNOWN: the system refuses to say. */
typedef enum hstep_kind {
    HSTEP_KIND_NOTHING,
    HSTEP_KIND_FILE,
    HSTEP_KIND_DIRECTORY,
    HSTEP_KIND_LINK,
    HSTEP_KIND_OTHER,
    HSTEP_KIND_UNKNOWN
} hstep_kind;
hstep_kind hstep_kind_of(const char *path);
/* Returns 1 if somebody has protected a directory: its mode forbids its owner to change it, or this process may not
 * change it. */
int hstep_is_protected(const char *path);

/* Makes base/name another name of base/inner/name, and replaces what is at base/name. Makes a hard link, or a relative
 * symbolic link if the file system has no hard links. */
int hstep_link(const char *base, const char *inner, const char *name, const char *prefix, hstep_error *error);
/* Returns 1 if two paths name one file. */
int hstep_same_file(const char *a, const char *b);

/* ---- Locks ------------------------------------------------------------------------------------------------------- */

/* A lock on a directory is an open file. It ends with the process if not before. */
enum { HSTEP_LOCK_SHARED, HSTEP_LOCK_EXCLUSIVE };

/* Locks a directory without waiting. If somebody else holds the lock, sets *busy to 1 and fails. Succeeds on a file
 * system without locks. */
int hstep_lock_directory(hstep_file **lock, const char *path, int mode, int *busy, hstep_error *error);
void hstep_unlock_directory(hstep_file *lock); /* NULL is allowed */

/* Calls `function` once per process, whatever the number of threads. Every call must give the same function. It builds
 * the one table that halfstep_io computes at run time. */
void hstep_call_once(void (*function)(void));

#endif
