/* The operating system's part of the file of states, as POSIX has it. A port rewrites this file and files.c. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/files.h"
#include "io/store/engine.h"

/* A transfer is cut into stretches of at most HSTEP_STRETCH bytes, which the threads take in turn from all
 * transfers. */
enum { THREADS = 4, TRANSFERS = 64 };

typedef struct transfer {
    char *memory; /* NULL: this place is free */
    uint64_t offset, bytes, taken, ended;
    hstep_sums *sums, found; /* sums: NULL for a transfer without them */
    int writes;
} transfer;

enum { ENDED = -1, CHANGED = -2 };

struct hstep_engine {
    int fd;
    int nameless;           /* 1: the file had no name when it was opened */
    pid_t owner;            /* a child of it has no threads and must not write */
    char *path, *temporary; /* temporary: its name until it is published, then NULL */
    pthread_mutex_t lock;
    pthread_cond_t work, end;
    pthread_t threads[THREADS];
    int thread_count, is_ending;
    int busy, next;             /* transfers under way; the one that the next stretch is taken from */
    int failed, failed_writing; /* the first failure: its errno, or one of the numbers below */
    uint64_t failed_at;
    transfer transfers[TRANSFERS];
};

/* ---- Transfers --------------------------------------------------------------------------------------------------- */

/* Turns the page cache on or off, where the system has a choice. */
static void set_direct(int fd, int direct)
{
#ifdef O_DIRECT
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0) fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT);
#else
    (void)fd;
    (void)direct;
#endif
}

/* Makes one stretch of a transfer. Returns 0, an errno, or ENDED if the file ends before. */
static int move(hstep_engine *e, int writes, uint64_t offset, char *memory, size_t bytes)
{
    int refused = 0;
    while (bytes) {
        ssize_t n = writes ? pwrite(e->fd, memory, bytes, (off_t)offset) : pread(e->fd, memory, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        /* A file system may take O_DIRECT, but not such a transfer. */
        const int is_refused = n < 0 && errno == EINVAL && !refused++;
        if (n < 0 && !is_refused) return errno;
        if (n == 0) return writes ? EIO : ENDED;
        /* What follows a transfer that was cut short need not be aligned. */
        if (is_refused || n % HSTEP_PAGE) set_direct(e->fd, 0);
        if (is_refused) continue;
        memory += n;
        offset += (uint64_t)n;
        bytes -= (size_t)n;
    }
    return 0;
}

/* Adds up the sums of a transfer that was made. Returns CHANGED if what was read is not what was written. */
static int compare_sums(transfer *t)
{
    if (!t->sums) return 0;
    if (!t->writes)
        return t->found.all != (t->bytes == t->sums->head_bytes ? t->sums->head : t->sums->all) ? CHANGED : 0;
    t->sums->all += t->found.all;
    t->sums->head += t->found.head;
    return 0;
}

/* Takes the next stretch of any transfer and makes it. Returns 0 if there is none. The engine is locked before and
 * after. */
static int move_one(hstep_engine *e)
{
    transfer *t = NULL;
    for (int i = 0; i < TRANSFERS && !t; i++) {
        transfer *next = &e->transfers[e->next];
        e->next = (e->next + 1) % TRANSFERS;
        if (next->memory && next->taken < next->bytes) t = next;
    }
    if (!t) return 0;
    const uint64_t at = t->taken, left = t->bytes - at;
    const size_t bytes = left < HSTEP_STRETCH ? (size_t)left : HSTEP_STRETCH;
    t->taken += bytes;
    int problem = 0;
    hstep_sums stretch = {.head_bytes = t->sums && t->writes ? t->sums->head_bytes : 0};
    if (!e->failed) {
        pthread_mutex_unlock(&e->lock);
        if (t->sums && t->writes) hstep_add_stretch(&stretch, t->memory + at, at, bytes);
        problem = move(e, t->writes, t->offset + at, t->memory + at, bytes);
        if (t->sums && !t->writes && !problem) hstep_add_stretch(&stretch, t->memory + at, at, bytes);
        pthread_mutex_lock(&e->lock);
    }
    t->ended += bytes;
    t->found.all += stretch.all;
    t->found.head += stretch.head;
    if (!problem && !e->failed && t->ended == t->bytes) problem = compare_sums(t);
    if (problem && !e->failed) {
        e->failed = problem;
        e->failed_writing = t->writes;
        e->failed_at = t->offset + (problem == CHANGED ? 0 : at);
    }
    if (t->ended == t->bytes) {
        t->memory = NULL;
        e->busy--;
        pthread_cond_broadcast(&e->end);
    }
    return 1;
}

static void *serve(void *argument)
{
    hstep_engine *e = argument;
    pthread_mutex_lock(&e->lock);
    while (!e->is_ending)
        if (!move_one(e)) pthread_cond_wait(&e->work, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* Starts the threads. Without any, begin and wait make the transfers. */
static void start_threads(hstep_engine *e)
{
    while (e->thread_count < THREADS && !pthread_create(&e->threads[e->thread_count], NULL, serve, e))
        e->thread_count++;
}

int hstep_engine_begin(hstep_engine *e, int writes, uint64_t offset, void *memory, uint64_t bytes, hstep_sums *sums,
                       hstep_error *error)
{
    if (getpid() != e->owner)
        return io_fail(error, HALFSTEP_ERROR_ORDER,
                       "%s belongs to the process that opened it, not to its child; open another file here", e->path);
    if (!bytes) return HALFSTEP_OK;
    pthread_mutex_lock(&e->lock);
    while (e->busy == TRANSFERS)
        if (!move_one(e)) pthread_cond_wait(&e->end, &e->lock);
    transfer *t = e->transfers;
    while (t->memory) t++;
    *t = (transfer){.memory = memory, .offset = offset, .bytes = bytes, .sums = sums, .writes = writes};
    e->busy++;
    pthread_cond_broadcast(&e->work);
    pthread_mutex_unlock(&e->lock);
    return HALFSTEP_OK;
}

static void wait_all(hstep_engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (e->busy)
        if (e->thread_count || !move_one(e)) pthread_cond_wait(&e->end, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

int hstep_engine_check(const hstep_engine *e, uint64_t bytes, hstep_error *error)
{
    struct stat status;
    if (fstat(e->fd, &status)) return HALFSTEP_OK; /* transfers will tell */
    if (!e->nameless && !status.st_nlink)
        return io_fail(error, HALFSTEP_ERROR_ORDER, "%s was deleted while it was in use", e->path);
    if ((uint64_t)status.st_size != bytes)
        return io_fail(error, HALFSTEP_ERROR_ORDER,
                       "%s has %llu bytes instead of %llu: it was changed while it was in use", e->path,
                       ull((uint64_t)status.st_size), ull(bytes));
    return HALFSTEP_OK;
}

int hstep_engine_wait(hstep_engine *e, int *lost, hstep_error *error)
{
    if (getpid() == e->owner) wait_all(e);
    const int problem = e->failed;
    if (!problem) return HALFSTEP_OK;
    e->failed = 0;
    *lost |= e->failed_writing;
    if (problem == CHANGED)
        return io_fail(error, HALFSTEP_ERROR_FORMAT,
                       "%s does not give back what was written from byte %llu on: the bytes have another sum", e->path,
                       ull(e->failed_at));
    if (problem == ENDED)
        return io_fail(error, HALFSTEP_ERROR_FORMAT, "%s ends before byte %llu; it was cut short", e->path,
                       ull(e->failed_at));
    errno = problem;
    return hstep_fail_system(error, e->failed_writing ? "write" : "read", e->path);
}

int hstep_engine_sync(hstep_engine *e, hstep_error *error)
{
    int result;
#ifdef __APPLE__
    do result = fcntl(e->fd, F_FULLFSYNC);
#else
    do result = fdatasync(e->fd);
#endif
    while (result && errno == EINTR);
    return result ? hstep_fail_system(error, "sync", e->path) : HALFSTEP_OK;
}

/* ---- Opening and closing ----------------------------------------------------------------------------------------- */

static int open_descriptor(const char *path, int flags)
{
    int fd;
    do fd = open(path, flags | O_RDWR | O_CLOEXEC, 0666);
    while (fd < 0 && errno == EINTR);
    return fd;
}

static void destroy(hstep_engine *e)
{
    if (e->fd >= 0) {
        /* Unlocks explicitly, because a child that was forked meanwhile shares the lock and would keep it. */
        if (getpid() == e->owner) flock(e->fd, LOCK_UN);
        close(e->fd);
    }
    free(e->path);
    free(e->temporary);
    free(e);
}

static int make_engine(hstep_engine **engine, const char *path, hstep_error *error)
{
    hstep_engine *e = calloc(1, sizeof *e);
    *engine = NULL;
    if (!e) return io_fail_memory(error);
    e->fd = -1;
    e->owner = getpid();
    e->path = hstep_copy(path);
    if (!e->path) {
        free(e);
        return io_fail_memory(error);
    }
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->work, NULL);
    pthread_cond_init(&e->end, NULL);
    *engine = e;
    return HALFSTEP_OK;
}

/* Locks the file that is open, and checks that `name` still leads to it. */
static int lock_file(hstep_engine *e, const char *name, hstep_error *error)
{
    struct stat here, there;
    int result;
    do result = flock(e->fd, LOCK_EX | LOCK_NB);
    while (result && errno == EINTR);
    if (result && errno == EWOULDBLOCK)
        return io_fail(error, HALFSTEP_ERROR_IO,
                       "%s is in use, by another process or by a store of this one; close that first", e->path);
    if (fstat(e->fd, &here)) return hstep_fail_system(error, "inspect", e->path);
    if (!S_ISREG(here.st_mode))
        return io_fail(error, HALFSTEP_ERROR_IO, "%s is %s, not a regular file", e->path,
                       S_ISDIR(here.st_mode) ? "a directory" : "a device or a pipe");
    if (stat(name, &there) || here.st_dev != there.st_dev || here.st_ino != there.st_ino)
        return io_fail(error, HALFSTEP_ERROR_IO, "another process is making or moving %s; try again", e->path);
    e->nameless = !here.st_nlink;
    return HALFSTEP_OK;
}

/* Begins to serve transfers of the file, which is open and locked. Returns the engine. */
static hstep_engine *begin_serving(hstep_engine *e, int buffered)
{
    if (!buffered) set_direct(e->fd, 1);
    start_threads(e);
    return e;
}

int hstep_engine_open(hstep_engine **engine, const char *path, int buffered, hstep_error *error)
{
    hstep_engine *e;
    int code = make_engine(&e, path, error);
    *engine = NULL;
    if (code) return code;
    e->fd = open_descriptor(path, O_NONBLOCK);
    code = e->fd < 0 ? hstep_fail_system(error, "open", path) : lock_file(e, path, error);
    if (code) {
        destroy(e);
        return code;
    }
    *engine = begin_serving(e, buffered);
    return HALFSTEP_OK;
}

static int reserve(const hstep_engine *e, uint64_t bytes, hstep_error *error)
{
    int problem;
    /* What an ended creation left may be longer. */
    do problem = ftruncate(e->fd, 0) ? errno : 0;
    while (problem == EINTR);
    if (!problem && bytes > INT64_MAX) problem = EFBIG;
    if (!problem) do {
#ifdef __APPLE__
            problem = ENOTSUP;
#else
            problem = posix_fallocate(e->fd, 0, (off_t)bytes);
#endif
            /* Without reservations, a full disk fails a later write. */
            if (problem == ENOTSUP || problem == ENOSYS) problem = ftruncate(e->fd, (off_t)bytes) ? errno : 0;
        } while (problem == EINTR);
    if (!problem) return HALFSTEP_OK;
    char what[64];
    snprintf(what, sizeof what, "reserve %llu bytes for", ull(bytes));
    errno = problem;
    return hstep_fail_system(error, what, e->path);
}

int hstep_engine_create(hstep_engine **engine, const char *path, uint64_t bytes, int buffered, hstep_error *error)
{
    hstep_engine *e;
    struct stat status;
    *engine = NULL;
    if (!lstat(path, &status))
        return stat(path, &status)
                   ? hstep_fail_system(error, "create", path)
                   : io_fail(error, HALFSTEP_ERROR_IO, "%s exists already; open it, or remove it to begin anew", path);
    int code = make_engine(&e, path, error);
    if (code) return code;
    char *name = hstep_format("%s.new", path);
    if (!name) code = io_fail_memory(error);
    else e->fd = open_descriptor(name, O_CREAT | O_NOFOLLOW);
    if (!code && e->fd < 0) code = hstep_fail_system(error, "create", path);
    if (!code) code = lock_file(e, name, error);
    if (code) {
        free(name);
        destroy(e);
        return code;
    }
    e->temporary = name;
    code = reserve(e, bytes, error);
    if (code) {
        hstep_engine_close(e);
        return code;
    }
    *engine = begin_serving(e, buffered);
    return HALFSTEP_OK;
}

int hstep_engine_publish(hstep_engine *e, hstep_error *error)
{
    char *folder = hstep_parent_path(e->path);
    int code = folder ? HALFSTEP_OK : io_fail_memory(error);
    /* A link fails where the path exists by now, which a renaming would replace. */
    if (!code && link(e->temporary, e->path)) {
        struct stat status;
        if (errno == EEXIST || !lstat(e->path, &status) || rename(e->temporary, e->path))
            code = hstep_fail_system(error, "create", e->path);
    } else if (!code) {
        unlink(e->temporary);
    }
    if (!code) {
        free(e->temporary);
        e->temporary = NULL;
        code = hstep_sync_directory(folder, error);
        /* A creation that failed leaves nothing behind. */
        if (code) unlink(e->path);
    }
    free(folder);
    return code;
}

void hstep_engine_close(hstep_engine *e)
{
    if (!e) return;
    if (getpid() == e->owner) {
        wait_all(e);
        pthread_mutex_lock(&e->lock);
        e->is_ending = 1;
        pthread_cond_broadcast(&e->work);
        pthread_mutex_unlock(&e->lock);
        for (int i = 0; i < e->thread_count; i++) pthread_join(e->threads[i], NULL);
        pthread_mutex_destroy(&e->lock);
        pthread_cond_destroy(&e->work);
        pthread_cond_destroy(&e->end);
        if (e->temporary) unlink(e->temporary);
    }
    destroy(e);
}
