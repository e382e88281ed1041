#include "trainer/files/run_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/paths.h"
#include "common/text.h"

/* A name that no file of a checkpoint can have. */
#define LOCK_NAME "/.halfstep-train.lock"

struct run_lock {
    int fd, made_directory;
    char *directory, *path;
};

static void forget(struct run_lock *lock)
{
    if (lock->fd >= 0) close(lock->fd);
    if (lock->made_directory) rmdir(lock->directory);
    free(lock->directory);
    free(lock->path);
    free(lock);
}

/* Syncs the directory above. Until then a crash may lose a new directory. */
static int sync_parent(const char *directory)
{
    size_t n = strlen(directory);
    char *parent = malloc(n + 4);
    if (!parent) return -1;
    snprintf(parent, n + 4, "%s/..", directory);
    int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC), bad = fd < 0;
    free(parent);
    /* A directory that this process may write but not read cannot be opened for a sync. */
    if (bad) return errno == EACCES ? 0 : -1;
    /* Some network file systems cannot sync directories and report these errors. */
    bad = fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP;
    close(fd);
    return bad ? -1 : 0;
}

static int make_directory(struct run_lock *lock, const char *directory, char *error, size_t error_bytes)
{
    struct stat status;
    char why[1024];
    lock->made_directory = mkdir(directory, 0777) == 0;
    int number = errno;
    if (lock->made_directory) {
        if (sync_parent(directory) == 0) return 0;
        snprintf(error, error_bytes, "cannot sync the directory above %s: %s", directory, strerror(errno));
        return -1;
    }
    /* A read-only or automatic mount may refuse to make a directory that is there by other errors than EEXIST. */
    if (stat(directory, &status) == 0 && S_ISDIR(status.st_mode)) return 0;
    errno = number;
    snprintf(error, error_bytes, "cannot create directory %s: %s", directory, paths_reason(directory, why, sizeof why));
    return -1;
}

static void name_holder(const struct run_lock *lock, char *error, size_t error_bytes)
{
    char holder[256] = "";
    ssize_t n = pread(lock->fd, holder, sizeof holder - 1, 0);
    holder[n > 0 ? n : 0] = 0;
    holder[strcspn(holder, "\n")] = 0;
    for (char *c = holder; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    snprintf(error, error_bytes, "%s: another run is training there%s%s", lock->directory, holder[0] ? ": " : "",
             holder);
}

/* Opens and locks the lock file. Its last holder may remove it between our open and our lock. Our lock is then on a
 * file without a name, and the next run would lock another file. So the name is checked, and the attempt repeated. */
static int take(struct run_lock *lock, char *error, size_t error_bytes)
{
    for (;;) {
        struct stat mine, named = {0};
        lock->fd = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (lock->fd < 0) {
            snprintf(error, error_bytes, "cannot create %s: %s", lock->path, strerror(errno));
            return -1;
        }
        int result;
        do result = flock(lock->fd, LOCK_EX | LOCK_NB);
        while (result != 0 && errno == EINTR);
        if (result != 0 && errno == EWOULDBLOCK) {
            name_holder(lock, error, error_bytes);
            return -1;
        }
        if (result != 0)
            snprintf(error, error_bytes,
                     "note: the file system of %s has no locks (%s): make sure that no other run uses the directory",
                     lock->directory, strerror(errno));
        if (fstat(lock->fd, &mine) != 0 || (stat(lock->path, &named) != 0 && errno != ENOENT)) {
            snprintf(error, error_bytes, "cannot inspect %s: %s", lock->path, strerror(errno));
            return -1;
        }
        if (mine.st_dev == named.st_dev && mine.st_ino == named.st_ino) return 0;
        close(lock->fd);
    }
}

struct run_lock *run_lock_take(const char *directory, char *error, size_t error_bytes)
{
    struct run_lock *lock = calloc(1, sizeof *lock);
    size_t n = strlen(directory) + sizeof LOCK_NAME;
    error[0] = 0;
    if (lock) {
        lock->fd = -1;
        lock->directory = strdup(directory);
        lock->path = malloc(n);
    }
    if (!lock || !lock->directory || !lock->path) {
        no_memory(error, error_bytes);
        if (lock) forget(lock);
        return NULL;
    }
    snprintf(lock->path, n, "%s%s", directory, LOCK_NAME);
    if (make_directory(lock, directory, error, error_bytes) != 0 || take(lock, error, error_bytes) != 0) {
        forget(lock);
        return NULL;
    }
    char host[128] = "?", line[256];
    gethostname(host, sizeof host - 1);
    int length = snprintf(line, sizeof line, "process %ld on %s\n", (long)getpid(), host);
    /* Only people read this line; the lock does not depend on it. */
    int told = ftruncate(lock->fd, 0) == 0 && pwrite(lock->fd, line, (size_t)length, 0) == length;
    (void)told;
    return lock;
}

void run_lock_release(struct run_lock *lock)
{
    if (!lock) return;
    unlink(lock->path);
    forget(lock);
}
