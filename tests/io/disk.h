/* A disk that fails, and the sources of halfstep_io over it. System calls and allocations fail, and losses of power
 * are simulated: the sources are compiled into the test, with the calls that can fail replaced, so that every one of
 * them can fail there once. A scratch folder, files and texts for the tests of it. */
#ifndef HALFSTEP_TESTS_DISK_H
#define HALFSTEP_TESTS_DISK_H
#ifndef HALFSTEP_ADVANCED
#define HALFSTEP_ADVANCED
#endif
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "halfstep_io.h"
#include "messages.h"
#include "scratch.h"

/* ---- A disk that fails ------------------------------------------------------------------------------------------- */

enum { MODE_NONE, MODE_ONCE, MODE_DEAD };

/* MODE_ONCE: call number fault_at fails. MODE_DEAD: it and all later ones fail, as if the process had been killed. */
static struct {
    int mode, number;
    long at, calls, failures;
} fault;
/* A directory on a disk that is gone. Every call on it or below it fails. Empty: none. */
static char gone[512];

/* What a loss of power may undo: contents not yet synced, and names not yet synced in their directory. */
typedef struct unsynced_name {
    ino_t directory;
    char from[512], to[512]; /* a rename, or (from empty) a creation of the name `to` */
    char backup[512];        /* a link to what the rename replaced */
} unsynced_name;
static struct {
    int on;
    ino_t dirty[256];
    size_t dirty_count;
    unsynced_name names[256];
    size_t name_count;
    char backups[256];
    unsigned backup_number;
} power;

static int refuse(void)
{
    long call = fault.calls++;
    if (fault.mode == MODE_NONE || call < fault.at || (fault.mode == MODE_ONCE && call > fault.at)) return 0;
    fault.failures++;
    errno = fault.number;
    return 1;
}

static int is_gone(const char *path)
{
    size_t length = strlen(gone);
    if (!length || strncmp(path, gone, length) || (path[length] && path[length] != '/')) return 0;
    errno = EIO;
    return 1;
}

static ino_t inode_of(const char *path)
{
    struct stat status;
    return stat(path, &status) ? 0 : status.st_ino;
}

static ino_t parent_inode(const char *path)
{
    char parent[512];
    snprintf(parent, sizeof parent, "%s", path);
    char *slash = strrchr(parent, '/');
    if (slash) *slash = 0;
    return inode_of(slash ? parent : ".");
}

static void mark_dirty(int fd)
{
    struct stat status;
    if (!power.on || fstat(fd, &status)) return;
    for (size_t i = 0; i < power.dirty_count; i++)
        if (power.dirty[i] == status.st_ino) return;
    if (power.dirty_count < 256) power.dirty[power.dirty_count++] = status.st_ino;
}

static void mark_synced(int fd)
{
    struct stat status;
    if (!power.on || fstat(fd, &status)) return;
    size_t kept = 0;
    for (size_t i = 0; i < power.dirty_count; i++)
        if (power.dirty[i] != status.st_ino) power.dirty[kept++] = power.dirty[i];
    power.dirty_count = kept;
    kept = 0;
    for (size_t i = 0; i < power.name_count; i++)
        if (power.names[i].directory != status.st_ino) power.names[kept++] = power.names[i];
        else if (power.names[i].backup[0]) unlink(power.names[i].backup);
    power.name_count = kept;
}

static void note_name(const char *from, const char *to)
{
    if (!power.on || power.name_count == 256) return;
    unsynced_name *name = &power.names[power.name_count++];
    memset(name, 0, sizeof *name);
    name->directory = parent_inode(to);
    snprintf(name->from, sizeof name->from, "%s", from);
    snprintf(name->to, sizeof name->to, "%s", to);
    if (*from && !access(to, F_OK)) {
        snprintf(name->backup, sizeof name->backup, "%s/%u", power.backups, power.backup_number++);
        if (link(to, name->backup)) name->backup[0] = 0;
    }
}

/* The number of a write that takes nothing and says so, as no disk should; 0: none. */
static long writes, write_stops_at;

static ssize_t faulty_write(int fd, const void *data, size_t bytes)
{
    if (++writes == write_stops_at) return 0;
    if (refuse()) {
        /* A full disk takes a part first. */
        if (fault.mode == MODE_ONCE && bytes > 1 && write(fd, data, bytes / 2) < 0) return -1;
        errno = fault.number;
        return -1;
    }
    mark_dirty(fd);
    /* Writes in parts and is interrupted now and then, as the system may do. */
    static unsigned turn;
    if (++turn % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    return write(fd, data, turn % 3 == 1 && bytes > 3 ? bytes - 3 : bytes);
}

static int faulty_fsync(int fd)
{
    if (refuse()) return -1;
    static unsigned turn;
    if (++turn % 3 == 0) {
        errno = EINTR;
        return -1;
    }
    mark_synced(fd);
    return fsync(fd);
}

/* Reading has a count of its own: 0, no read fails. */
static long reads, read_fails_at, read_ends_at;
static ssize_t faulty_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (++reads == read_ends_at) return 0;
    if (reads != read_fails_at) return pread(fd, data, bytes, offset);
    errno = EIO;
    return -1;
}

static int no_folder_opens; /* 1: folders may be written and not read */
static int faulty_open(const char *path, int flags, mode_t mode)
{
    if (is_gone(path)) return -1;
    if (no_folder_opens && flags & O_DIRECTORY) {
        errno = EACCES;
        return -1;
    }
    if (flags & O_CREAT) {
        if (refuse()) return -1;
        note_name("", path);
    }
    int fd = open(path, flags, mode);
    if (fd >= 0 && flags & O_CREAT) mark_dirty(fd);
    return fd;
}

static int faulty_rename(const char *from, const char *to)
{
    if (is_gone(from) || is_gone(to) || refuse()) return -1;
    note_name(from, to);
    return rename(from, to);
}

static int faulty_close(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    int result = close(fd);
    /* Closing a file that was only read cannot lose anything. */
    return (flags & O_ACCMODE) != O_RDONLY && refuse() ? -1 : result;
}

static int faulty_link(const char *from, const char *to) { return refuse() ? -1 : link(from, to); }
static int faulty_symlink(const char *from, const char *to) { return refuse() ? -1 : symlink(from, to); }
/* What a directory gets that is there already; 0: the system's own answer. */
static int mkdir_says;
static int faulty_mkdir(const char *path, mode_t mode)
{
    const int bad = refuse() ? -1 : mkdir(path, mode);
    if (bad && errno == EEXIST && mkdir_says) errno = mkdir_says;
    return bad;
}
static int faulty_unlink(const char *path) { return is_gone(path) || refuse() ? -1 : unlink(path); }
static int faulty_rmdir(const char *path) { return is_gone(path) || refuse() ? -1 : rmdir(path); }
static int faulty_stat(const char *path, struct stat *status) { return is_gone(path) ? -1 : stat(path, status); }
static int faulty_lstat(const char *path, struct stat *status) { return is_gone(path) ? -1 : lstat(path, status); }
static DIR *faulty_opendir(const char *path) { return is_gone(path) ? NULL : opendir(path); }
static int modes_are_fixed; /* 1: the file system refuses to change a mode */
static int faulty_fchmod(int fd, mode_t mode)
{
    if (refuse()) return -1;
    if (!modes_are_fixed) return fchmod(fd, mode);
    errno = EPERM;
    return -1;
}

#define pread(fd, data, bytes, offset) faulty_pread(fd, data, bytes, offset)
#define write(fd, data, bytes) faulty_write(fd, data, bytes)
#define fsync(fd) faulty_fsync(fd)
#define open(path, flags, mode) faulty_open(path, flags, mode)
#define rename(from, to) faulty_rename(from, to)
#define close(fd) faulty_close(fd)
#define link(from, to) faulty_link(from, to)
#define symlink(from, to) faulty_symlink(from, to)
#define mkdir(path, mode) faulty_mkdir(path, mode)
#define unlink(path) faulty_unlink(path)
#define rmdir(path) faulty_rmdir(path)
#define fchmod(fd, mode) faulty_fchmod(fd, mode)
#define stat(path, status) faulty_stat(path, status)
#define lstat(path, status) faulty_lstat(path, status)
#define opendir(path) faulty_opendir(path)
#include "faults/allocations.h"
#include "io/checkpoint/directory.c"
#include "io/checkpoint/open.c"
#include "io/checkpoint/save.c"
#include "io/files.c"
#include "io/json.c"
#include "io/numbers.c"
#include "io/safetensors.c"
#undef write
#undef fsync
#undef open
#undef rename
#undef close
#undef link
#undef symlink
#undef mkdir
#undef unlink
#undef rmdir
#undef fchmod
#undef malloc
#undef calloc
#undef realloc
#undef free
#undef stat
#undef lstat
#undef opendir

/* ---- Scratch ----------------------------------------------------------------------------------------------------- */

/* Returns the path of a name in the scratch directory. The same name always gives the same pointer. */
static const char *at(const char *name)
{
    static struct {
        char name[64], path[512];
    } known[96];
    size_t i = 0;
    while (i < COUNT(known) && known[i].name[0] && strcmp(known[i].name, name)) i++;
    if (i == COUNT(known)) {
        printf("FAIL more than %zu names\n", COUNT(known));
        exit(1);
    }
    snprintf(known[i].name, sizeof known[i].name, "%s", name);
    snprintf(known[i].path, sizeof known[i].path, "%s/%s", scratch, name);
    return known[i].path;
}

static char *get_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    char *data = malloc(1 << 22);
    *bytes = file && data ? fread(data, 1, 1 << 22, file) : 0;
    if (file) fclose(file);
    return data;
}

/* Returns 1 if a file holds exactly this text. */
static int holds(const char *path, const char *text)
{
    size_t bytes;
    char *data = get_file(path, &bytes);
    int same = bytes == strlen(text) && !memcmp(data, text, bytes);
    free(data);
    return same;
}

static void make_link(const char *target, const char *path)
{
    if (symlink(target, path)) FAIL("symlink %s: %s", path, strerror(errno));
}

/* Chooses the call that fails, and counts calls and failures from 0. */
static void set_fault(int mode, int number, long call)
{
    fault.mode = mode;
    fault.number = number;
    fault.at = call;
    fault.calls = fault.failures = 0;
}

/* Checks how many entries of a folder begin with `prefix`. */
#define ENTRIES(dir, prefix, count) \
    CHECK(count_entries(dir, prefix) == (count), "%d entries %s*: %s", count_entries(dir, prefix), prefix, message)

/* Makes the scratch folder, and one beside it for what a loss of power may undo. */
static void make_disk(void)
{
    make_scratch("io");
    snprintf(power.backups, sizeof power.backups, "%.200s/backups", scratch);
    mkdir(power.backups, 0777);
}

#endif
