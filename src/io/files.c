/* The operating system as POSIX has it. A port to another system rewrites this file and store/engine.c. It has
 * over 500 lines, so that nothing else needs a port. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/files.h"

/* The most bytes of one transfer. Linux allows at most 0x7ffff000. Smaller pieces also keep address arithmetic far from
 * SSIZE_MAX. */
#define HSTEP_PIECE ((size_t)1 << 30)

struct hstep_file {
    int fd;
    char path[]; /* for error texts */
};

/* Returns the text of an error number. The GNU C library has a strerror_r of its own. */
static const char *error_text(int number, char *text, size_t size)
{
#ifdef __GLIBC__
    return strerror_r(number, text, size);
#else
    return strerror_r(number, text, size) ? "unknown error" : text;
#endif
}

/* Writes where a link leads to. Returns 1, or 0 if the path is no link. */
static int read_link(const char *path, char *target, size_t size)
{
    ssize_t length = readlink(path, target, size - 1);
    if (length < 0) return 0;
    target[length] = 0;
    return 1;
}

const char *hstep_reason(const char *path, char *text, size_t size)
{
    char target[512];
    struct stat status;
    const int number = errno;
    /* The system's own words for a link to nothing are "No such file" or "File exists". */
    if ((number != ENOENT && number != EEXIST) || !stat(path, &status) || !read_link(path, target, sizeof target))
        return error_text(number, text, size);
    snprintf(text, size, "it is a link to %s, which does not exist", target);
    return text;
}

int hstep_fail_system(hstep_error *error, const char *what, const char *path)
{
    char text[600];
    const int number = errno;
    error->not_found = number == ENOENT || number == ENOTDIR;
    return io_fail(error, number == ENOMEM ? HALFSTEP_ERROR_MEMORY : HALFSTEP_ERROR_IO, "cannot %s %s: %s", what, path,
                   hstep_reason(path, text, sizeof text));
}

static int open_retrying(const char *path, int flags, mode_t mode)
{
    int fd;
    do fd = open(path, flags | O_CLOEXEC, mode);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Closes a descriptor, without a second try: Linux closes it even when it reports EINTR, and another thread may have
 * the number by then. */
static int close_once(int fd) { return close(fd) && errno != EINTR ? -1 : 0; }

static int sync_retrying(int fd)
{
    int result;
    do result = fsync(fd);
    while (result && errno == EINTR);
    return result;
}

/* ---- Files ------------------------------------------------------------------------------------------------------- */

static int wrap_descriptor(hstep_file **file, int fd, const char *path, hstep_error *error)
{
    size_t bytes = strlen(path) + 1;
    hstep_file *made = malloc(sizeof *made + bytes);
    if (!made) {
        close_once(fd);
        return io_fail_memory(error);
    }
    made->fd = fd;
    memcpy(made->path, path, bytes);
    *file = made;
    return HALFSTEP_OK;
}

int hstep_open_file(hstep_file **file, const char *path, uint64_t *bytes, hstep_error *error)
{
    *file = NULL;
    /* Without O_NONBLOCK, opening a pipe would wait for its other end. */
    int fd = open_retrying(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) return hstep_fail_system(error, "open", path);
    struct stat status;
    int code = wrap_descriptor(file, fd, path, error);
    if (code) return code;
    if (fstat(fd, &status)) code = hstep_fail_system(error, "inspect", path);
    else if (!S_ISREG(status.st_mode))
        code = io_fail(error, HALFSTEP_ERROR_IO, "%s is %s, not a regular file", path,
                       S_ISDIR(status.st_mode) ? "a directory" : "a device or a pipe");
    else *bytes = (uint64_t)status.st_size;
    if (code) {
        hstep_close(*file);
        *file = NULL;
    }
    return code;
}

int hstep_create_file(hstep_file **file, const char *path, const char *shown, unsigned mode, hstep_error *error)
{
    *file = NULL;
    int fd = open_retrying(path, O_WRONLY | O_CREAT | O_EXCL, (mode_t)mode);
    if (fd < 0) return hstep_fail_system(error, "create", shown);
    int code = wrap_descriptor(file, fd, shown, error);
    if (code) unlink(path);
    return code;
}

int hstep_file_bytes(const hstep_file *file, uint64_t *bytes, hstep_error *error)
{
    struct stat status;
    if (fstat(file->fd, &status)) return hstep_fail_system(error, "inspect", file->path);
    *bytes = (uint64_t)status.st_size;
    return HALFSTEP_OK;
}

const char *hstep_file_path(const hstep_file *file) { return file->path; }

int hstep_read_at(const hstep_file *file, uint64_t offset, void *data, size_t bytes, hstep_error *error)
{
    char *next = data;
    while (bytes) {
        ssize_t got = pread(file->fd, next, bytes < HSTEP_PIECE ? bytes : HSTEP_PIECE, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return hstep_fail_system(error, "read", file->path);
        if (got == 0)
            return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s ends at byte %llu, while it is being read", file->path,
                           (unsigned long long)offset);
        next += got;
        offset += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return HALFSTEP_OK;
}

int hstep_write(hstep_file *file, const void *data, uint64_t bytes, hstep_error *error)
{
    const char *next = data;
    while (bytes) {
        ssize_t put = write(file->fd, next, bytes < HSTEP_PIECE ? (size_t)bytes : HSTEP_PIECE);
        if (put < 0 && errno == EINTR) continue;
        if (put == 0) errno = EIO;
        if (put <= 0) return hstep_fail_system(error, "write", file->path);
        next += put;
        bytes -= (uint64_t)put;
    }
    return HALFSTEP_OK;
}

int hstep_sync(hstep_file *file, hstep_error *error)
{
    /* A failure is final: after a failed fsync the kernel may drop the dirty pages and report success the next time. */
    return sync_retrying(file->fd) ? hstep_fail_system(error, "sync", file->path) : HALFSTEP_OK;
}

void hstep_close(hstep_file *file)
{
    if (file) close_once(file->fd);
    free(file);
}

int hstep_close_written(hstep_file *file, int code, hstep_error *error)
{
    if (close_once(file->fd) && !code) code = hstep_fail_system(error, "close", file->path);
    free(file);
    return code;
}

int hstep_read_whole(const char *path, uint64_t limit, char **data, size_t *bytes, hstep_error *error)
{
    hstep_file *file;
    uint64_t length = 0;
    *data = NULL;
    int code = hstep_open_file(&file, path, &length, error);
    if (code) return code;
    if (length > limit)
        code = io_fail(error, HALFSTEP_ERROR_FORMAT, "%s has %llu bytes, more than the %llu allowed", path,
                       (unsigned long long)length, (unsigned long long)limit);
    else if (!(*data = malloc((size_t)length + 1))) code = io_fail_memory(error);
    else code = hstep_read_at(file, 0, *data, (size_t)length, error);
    hstep_close(file);
    if (code) {
        free(*data);
        *data = NULL;
        return code;
    }
    (*data)[length] = 0;
    *bytes = (size_t)length;
    return HALFSTEP_OK;
}

/* ---- Replacing a file -------------------------------------------------------------------------------------------- */

/* Follows links, also to a file that is not there yet. The caller frees the path. Returns NULL when memory is short. */
static char *follow_links(const char *path)
{
    enum { MOST = 40 };
    char target[4096], *at = hstep_copy(path);
    for (int links = 0; at && links < MOST && read_link(at, target, sizeof target); links++) {
        char *folder = hstep_parent_path(at), *next = NULL;
        if (folder) next = target[0] == '/' ? hstep_copy(target) : hstep_join_path(folder, target);
        free(folder);
        free(at);
        at = next;
    }
    return at;
}

int hstep_begin_replacement(hstep_replacement *replacement, const char *path, const char *prefix, hstep_error *error)
{
    struct stat status;
    int exists = !stat(path, &status), code;

    memset(replacement, 0, sizeof *replacement);
    if (!exists && errno != ENOENT) return hstep_fail_system(error, "inspect", path);
    if (exists && S_ISDIR(status.st_mode)) {
        errno = EISDIR;
        return hstep_fail_system(error, "write", path);
    }
    /* Renaming onto a symbolic link would replace the link, not the file it leads to. */
    char *target = follow_links(path), *temporary = NULL;
    if (!target) return io_fail_memory(error);
    hstep_file *file = NULL;
    if (exists && !S_ISREG(status.st_mode)) {
        int fd = open_retrying(path, O_WRONLY | O_NOCTTY, 0);
        code = fd < 0 ? hstep_fail_system(error, "open", path) : wrap_descriptor(&file, fd, path, error);
    } else {
        char *parent = hstep_parent_path(target);
        temporary = parent ? hstep_temporary_path(parent, prefix) : NULL;
        free(parent);
        /* The file begins with no right that the old one does not have, but for its owner. Then it gets the mode of the
         * old one. A file system that refuses that has one mode for all files. */
        code = temporary
                   ? hstep_create_file(&file, temporary, path, exists ? (status.st_mode & 0777) | S_IWUSR : 0666, error)
                   : io_fail_memory(error);
        if (!code && exists) (void)fchmod(file->fd, status.st_mode & 07777);
    }
    if (!code) {
        *replacement = (hstep_replacement){file, target, temporary};
        return HALFSTEP_OK;
    }
    if (file) unlink(temporary);
    hstep_close(file);
    free(temporary);
    free(target);
    return code;
}

int hstep_finish_replacement(hstep_replacement *replacement, int code, int sync, int *renamed, hstep_error *error)
{
    const char *temporary = replacement->temporary, *target = replacement->target;
    char *parent = temporary ? hstep_parent_path(target) : NULL;
    *renamed = 0;
    if (!code && temporary && !parent) code = io_fail_memory(error);
    if (!code && temporary && sync) code = hstep_sync(replacement->file, error);
    code = hstep_close_written(replacement->file, code, error);
    if (!code && temporary) {
        code = hstep_rename(temporary, target, target, error);
        *renamed = !code;
    }
    if (*renamed && sync && (code = hstep_sync_directory(parent, error)))
        io_fail(error, code, "%s is in place, but may not survive a loss of power: its directory cannot be synced",
                target);
    if (temporary && !*renamed) unlink(temporary);
    free(parent);
    free(replacement->temporary);
    free(replacement->target);
    return code;
}

int hstep_replace_file(const char *path, const char *prefix, const void *data, uint64_t bytes, int sync, int *renamed,
                       hstep_error *error)
{
    hstep_replacement replacement;
    *renamed = 0;
    int code = hstep_begin_replacement(&replacement, path, prefix, error);
    if (code) return code;
    code = hstep_write(replacement.file, data, bytes, error);
    return hstep_finish_replacement(&replacement, code, sync, renamed, error);
}

/* ---- Directories ------------------------------------------------------------------------------------------------- */

char *hstep_join_path(const char *directory, const char *name)
{
    size_t length = strlen(directory);
    return hstep_format("%s%s%s", directory, length && directory[length - 1] != '/' ? "/" : "", name);
}

char *hstep_parent_path(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    while (end && path[end - 1] != '/') end--;
    while (end > 1 && path[end - 1] == '/') end--;
    if (!end) return hstep_copy(".");
    return hstep_format("%.*s", (int)(end < INT_MAX ? end : INT_MAX), path);
}

char *hstep_temporary_path(const char *directory, const char *prefix)
{
    static _Atomic unsigned counter;
    char name[128];
    struct stat status;
    for (;;) {
        snprintf(name, sizeof name, "%s%ld-%u", prefix, (long)getpid(), atomic_fetch_add(&counter, 1));
        char *path = hstep_join_path(directory, name);
        /* A killed process with the same number may have left its temporary here. */
        if (!path || lstat(path, &status)) return path;
        free(path);
    }
}

int hstep_make_directory(const char *path, int *created, hstep_error *error)
{
    struct stat status;
    *created = !mkdir(path, 0777);
    const int number = errno, exists = !*created && !stat(path, &status);
    /* A read-only or automatic mount may refuse to make a directory that is there by other errors than EEXIST. */
    if (*created || (exists && S_ISDIR(status.st_mode))) return HALFSTEP_OK;
    errno = exists && number == EEXIST ? ENOTDIR : number;
    return hstep_fail_system(error, "create directory", path);
}

int hstep_sync_directory(const char *path, hstep_error *error)
{
    int fd = open_retrying(path, O_RDONLY | O_DIRECTORY, 0);
    /* A directory that this process may write but not read cannot be opened for a sync. */
    if (fd < 0 && errno == EACCES) return HALFSTEP_OK;
    if (fd < 0) return hstep_fail_system(error, "open directory", path);
    int code = HALFSTEP_OK;
    /* Some network file systems cannot sync a directory and report one of these errors. They order renames
     * themselves. */
    if (sync_retrying(fd) && errno != EINVAL && errno != ENOTSUP)
        code = hstep_fail_system(error, "sync directory", path);
    close_once(fd);
    return code;
}

int hstep_sync_parent(const char *path, hstep_error *error)
{
    char *parent = hstep_parent_path(path);
    int code = parent ? hstep_sync_directory(parent, error) : io_fail_memory(error);
    free(parent);
    return code;
}

static int compare_names(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

void hstep_free_names(char **names, size_t count)
{
    for (size_t i = 0; i < count; i++) free(names[i]);
    free(names);
}

int hstep_list_directory(const char *path, char ***names, size_t *count, hstep_error *error)
{
    size_t capacity = 0, found = 0;
    char **list = NULL;
    int code = HALFSTEP_OK;
    *names = NULL;
    *count = 0;
    DIR *stream = opendir(path);
    if (!stream) return hstep_fail_system(error, "list", path);
    for (;;) {
        errno = 0;
        struct dirent *entry = readdir(stream);
        if (!entry) {
            if (errno) code = hstep_fail_system(error, "list", path);
            break;
        }
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (!io_grow((void **)&list, found, &capacity, sizeof *list) || !(list[found] = hstep_copy(entry->d_name))) {
            code = io_fail_memory(error);
            break;
        }
        found++;
    }
    closedir(stream);
    if (code) {
        hstep_free_names(list, found);
        return code;
    }
    if (found) qsort(list, found, sizeof *list, compare_names);
    *names = list;
    *count = found;
    return HALFSTEP_OK;
}

int hstep_rename(const char *from, const char *to, const char *shown, hstep_error *error)
{
    if (!rename(from, to)) return HALFSTEP_OK;
    return hstep_fail_system(error, "rename a temporary file to", shown);
}

int hstep_remove_file(const char *path, hstep_error *error)
{
    return unlink(path) && errno != ENOENT ? hstep_fail_system(error, "remove", path) : HALFSTEP_OK;
}

int hstep_remove_directory(const char *path, hstep_error *error)
{
    return rmdir(path) && errno != ENOENT ? hstep_fail_system(error, "remove", path) : HALFSTEP_OK;
}

int hstep_identify(const char *path, uint64_t id[2])
{
    struct stat status;
    if (stat(path, &status)) return 0;
    id[0] = (uint64_t)status.st_dev;
    id[1] = (uint64_t)status.st_ino;
    return 1;
}

hstep_kind hstep_kind_of(const char *path)
{
    struct stat status;
    if (lstat(path, &status)) return errno == ENOENT || errno == ENOTDIR ? HSTEP_KIND_NOTHING : HSTEP_KIND_UNKNOWN;
    return S_ISREG(status.st_mode)   ? HSTEP_KIND_FILE
           : S_ISDIR(status.st_mode) ? HSTEP_KIND_DIRECTORY
           : S_ISLNK(status.st_mode) ? HSTEP_KIND_LINK
                                     : HSTEP_KIND_OTHER;
}

int hstep_is_protected(const char *path)
{
    struct stat status;
    /* The mode counts too, because the superuser may write where nobody may. */
    return !stat(path, &status) && (!(status.st_mode & S_IWUSR) || access(path, W_OK | X_OK));
}

int hstep_same_file(const char *a, const char *b)
{
    struct stat first, second;
    return !stat(a, &first) && !stat(b, &second) && first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

int hstep_link(const char *base, const char *inner, const char *name, const char *prefix, hstep_error *error)
{
    char *relative = hstep_join_path(inner, name);
    char *source = relative ? hstep_join_path(base, relative) : NULL;
    char *path = hstep_join_path(base, name);
    char *temporary = hstep_temporary_path(base, prefix);
    int code = HALFSTEP_OK;
    if (!source || !path || !temporary) {
        code = io_fail_memory(error);
    } else if (link(source, temporary) && symlink(relative, temporary)) {
        code = hstep_fail_system(error, "make a link at", path);
    } else {
        code = hstep_rename(temporary, path, path, error);
        /* If both are names of one file, the rename does nothing and leaves the temporary. */
        unlink(temporary);
    }
    free(relative);
    free(source);
    free(path);
    free(temporary);
    return code;
}

/* ---- Locks ------------------------------------------------------------------------------------------------------- */

int hstep_lock_directory(hstep_file **lock, const char *path, int mode, int *busy, hstep_error *error)
{
    *lock = NULL;
    *busy = 0;
    int result, fd = open_retrying(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return hstep_fail_system(error, "open directory", path);
    do result = flock(fd, (mode == HSTEP_LOCK_SHARED ? LOCK_SH : LOCK_EX) | LOCK_NB);
    while (result && errno == EINTR);
    *busy = result && errno == EWOULDBLOCK;
    if (!*busy) return wrap_descriptor(lock, fd, path, error);
    close_once(fd);
    return io_fail(error, HALFSTEP_ERROR_IO, "%s is in use by another process", path);
}

void hstep_unlock_directory(hstep_file *lock)
{
    /* Unlocks explicitly, because a child that was forked meanwhile shares the lock and would keep it. */
    if (lock) flock(lock->fd, LOCK_UN);
    hstep_close(lock);
}

void hstep_call_once(void (*function)(void))
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, function);
}
