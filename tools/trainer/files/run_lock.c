#include "trainer/files/run_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/text.h"
#include "io/files.h"

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
    hstep_error failure = hstep_make_error(error, error_bytes);
    for (;;) {
        struct stat mine, named = {0};
        lock->fd = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
        if (lock->fd < 0) return hstep_fail_system(&failure, "create", lock->path);
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
        if (fstat(lock->fd, &mine) != 0 || (stat(lock->path, &named) != 0 && errno != ENOENT))
            return hstep_fail_system(&failure, "inspect", lock->path);
        if (mine.st_dev == named.st_dev && mine.st_ino == named.st_ino) return 0;
        close(lock->fd);
    }
}

struct run_lock *run_lock_take(const char *directory, char *error, size_t error_bytes)
{
    struct run_lock *lock = calloc(1, sizeof *lock);
    size_t n = strlen(directory) + sizeof LOCK_NAME;
    hstep_error failure = hstep_make_error(error, error_bytes);
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
    int bad = hstep_make_directory(directory, &lock->made_directory, &failure);
    if (!bad && lock->made_directory) bad = hstep_sync_parent(directory, &failure);
    if (bad || take(lock, error, error_bytes) != 0) {
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
