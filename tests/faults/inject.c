/* Makes calls into the C library fail on purpose. calls.def lists the calls. There are two ways to compile this file.
 *
 * HSTEP_FAULTS_PRELOAD makes a library for LD_PRELOAD, which stands before the C library. It finds the calling module
 * by the return address; for calls through the C library, by the stack. The environment says what to do:
 *   HSTEP_FAULT=NAME:ERROR:K[+][:WHO]   as inject_arm().
 *   HSTEP_FAULT_LOG=FILE                writes one line per call: number, name, caller's module, chain of callers,
 *                                       descriptor, result, paths. The result of a failure made here is "struck".
 *   HSTEP_FAULT_UNTIL_EXIT=1            ignores all calls after exit(), because gcov's counters are written then.
 *
 * Otherwise the file is linked into a program, with the linker's --wrap of free and of every name in calls.def. It then
 * sees only calls of the objects linked with it, and all of them count as "ours". This way is fast, works with
 * sanitizers, and counts the live blocks. The program says what to do, or the environment, as above, if
 * HSTEP_FAULTS_ENVIRONMENT is defined.
 *
 * Over 500 lines because each call is written once for both ways. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "inject.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KINDS(X) X(MEMORY) X(THREADS) X(FILES) X(STREAMS)
enum kind {
#define X(name) name,
    KINDS(X)
#undef X
};
static const char *const kind_names[] = {
#define X(name) #name,
    KINDS(X)
#undef X
};
#define WHO(X) X(any) X(ours) X(jansson) X(onednn) X(zlib) X(openmp) X(python) X(libc) X(other)
enum who {
#define X(name) WHO_##name,
    WHO(X)
#undef X
};
static const char *const who_names[] = {
#define X(name) #name,
    WHO(X)
#undef X
};

#define CALL(kind, name, result, parameters, arguments, said, failed, errors) #name,
#define CALL_BY_HAND(kind, name, errors) #name,
const char *const inject_names[INJECT_CALLS + 1] = {
#include "calls.def"
};
#undef CALL
#undef CALL_BY_HAND
#define CALL(kind, name, result, parameters, arguments, said, failed, errors) errors,
#define CALL_BY_HAND(kind, name, errors) errors,
const char *const inject_errors[INJECT_CALLS + 1] = {
#include "calls.def"
};
#undef CALL
#undef CALL_BY_HAND
#define CALL(kind, name, result, parameters, arguments, said, failed, errors) kind,
#define CALL_BY_HAND(kind, name, errors) kind,
static const unsigned char kinds[INJECT_CALLS] = {
#include "calls.def"
};
#undef CALL
#undef CALL_BY_HAND

/* Kinds of failure that are no errno values. */
enum { SHORT = 10001, KILL };
static const struct {
    const char *name;
    int number;
} errors[] = {{"ENOMEM", ENOMEM}, {"EAGAIN", EAGAIN}, {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EINTR", EINTR},
              {"EMFILE", EMFILE}, {"ENOLCK", ENOLCK}, {"EACCES", EACCES}, {"SHORT", SHORT},   {"KILL", KILL}};

/* EINTR is returned at most so often, because signals do not interrupt a call for ever. */
enum { INTERRUPTIONS = 3 };

static struct {
    atomic_int armed;
    int call, kind, error, from_on, who; /* -1: any */
    uint64_t at;
    _Atomic uint64_t seen, struck;
    atomic_int polish;
} plan;

static atomic_int recording, held;
static int recording_who;
static int log_fd = -1;
static _Atomic uint64_t counts[INJECT_CALLS];

/* ---- Who calls --------------------------------------------------------------------------------------------------- */

#ifdef HSTEP_FAULTS_PRELOAD
#define HSTEP_FAULTS_ENVIRONMENT 1
static _Thread_local int inside;

/* oneDNN is the program's only library in C++, so libstdc++ counts as oneDNN. Walking the stack for each `new` would
 * take most of the time. */
static enum who classify(const char *file)
{
    static const struct {
        const char *part;
        enum who who;
    } table[] = {{"libhalfstep", WHO_ours}, {"libjansson", WHO_jansson}, {"libdnnl", WHO_onednn},
                 {"libz.", WHO_zlib},       {"libgomp", WHO_openmp},     {"python", WHO_python},
                 {"libc.", WHO_libc},       {"libstdc++", WHO_onednn},   {"ld-linux", WHO_libc},
                 {"libm.", WHO_libc},       {"libgcc_s", WHO_libc},      {"halfstep", WHO_ours}};
    const char *slash = strrchr(file, '/');
    file = slash ? slash + 1 : file;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strstr(file, table[i].part)) return table[i].who;
    return WHO_other;
}

/* Returns the module of an address. Cached, because dladdr() takes a lock and searches, and a program calls from few
 * places. */
static enum who module_of(void *address)
{
    static _Atomic uint64_t cache[4096];
    uint64_t key = (uint64_t)(uintptr_t)address << 4;
    size_t slot = (size_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 52);
    uint64_t found = atomic_load_explicit(&cache[slot], memory_order_relaxed);
    if (found >> 4 == key >> 4 && found) return (enum who)(found & 15);
    Dl_info info;
    enum who who = dladdr(address, &info) && info.dli_fname ? classify(info.dli_fname) : WHO_other;
    atomic_store_explicit(&cache[slot], key | who, memory_order_relaxed);
    return who;
}

static int look_through = 1; /* walk the stack where the C library calls itself */

static enum who caller_of(void *address)
{
    enum who who = module_of(address);
    if (who != WHO_libc || !look_through || inside) return who;
    void *frames[24];
    inside = 1;
    int count = backtrace(frames, 24);
    inside = 0;
    int i = 0;
    while (i < count && frames[i] != address) i++;
    for (; i < count; i++)
        if ((who = module_of(frames[i])) != WHO_libc) return who;
    return WHO_libc;
}
#endif

/* Returns a hash of the chain of callers. It is the same in every run. */
static uint64_t chain_of(void *address)
{
    void *frames[9];
    uint64_t hash = 0;
    int count = backtrace(frames, 9), i = 0;
    while (i < count && frames[i] != address) i++;
    for (int last = i + 5; i < count && i < last; i++) {
        uint64_t place = (uint64_t)(uintptr_t)frames[i];
        Dl_info info;
        if (dladdr(frames[i], &info) && info.dli_fbase) place -= (uint64_t)(uintptr_t)info.dli_fbase;
        hash = (hash ^ place) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return hash;
}

#ifdef HSTEP_FAULTS_ENVIRONMENT
/* Returns 1 if the injector is already inside. Its own calls come back to it only if it stands before the whole C
 * library. */
static int step_inside(void)
{
#ifdef HSTEP_FAULTS_PRELOAD
    if (inside) return 1;
    inside = 1;
#endif
    return 0;
}

static void step_outside(void)
{
#ifdef HSTEP_FAULTS_PRELOAD
    inside = 0;
#endif
}
#endif

/* ---- Judging a call ---------------------------------------------------------------------------------------------- */

enum { MAX_PLACES = 4096 };
static struct {
    uint64_t chain, number;
} places[INJECT_CALLS][MAX_PLACES];
static size_t place_counts[INJECT_CALLS];
static pthread_mutex_t places_lock = PTHREAD_MUTEX_INITIALIZER;

static void note_place(enum inject_call call, uint64_t number, uint64_t chain)
{
    pthread_mutex_lock(&places_lock);
    size_t i = 0;
    while (i < place_counts[call] && places[call][i].chain != chain) i++;
    if (i == place_counts[call] && i < MAX_PLACES) {
        places[call][i].chain = chain;
        places[call][i].number = number;
        place_counts[call]++;
    }
    pthread_mutex_unlock(&places_lock);
}

/* A call in progress. */
struct call {
    enum inject_call call;
    enum who who;
    uint64_t chain;
    int error;
};

static int planned(enum inject_call call, enum who who)
{
    if (!atomic_load_explicit(&plan.armed, memory_order_acquire)) return 0;
    if ((plan.call >= 0 && plan.call != (int)call) || (plan.kind >= 0 && plan.kind != kinds[call])) return 0;
    if (plan.who != WHO_any && plan.who != (int)who) return 0;
    uint64_t number = 1 + atomic_fetch_add(&plan.seen, 1);
    if (number < plan.at || (number > plan.at && !plan.from_on)) return 0;
    if (plan.error == EINTR && number >= plan.at + INTERRUPTIONS) return 0;
    atomic_fetch_add(&plan.struck, 1);
    if (plan.error == KILL) kill(getpid(), SIGKILL);
    return plan.error;
}

#ifdef HSTEP_FAULTS_ENVIRONMENT
static atomic_int until_exit;

static void rest(void) { inject_hold(1); }
#endif

static struct call strike(enum inject_call call, void *from)
{
    struct call made = {.call = call, .who = WHO_ours};
    if (atomic_load_explicit(&held, memory_order_relaxed)) return made;
#ifdef HSTEP_FAULTS_PRELOAD
    if (inside || (log_fd < 0 && !atomic_load(&recording) && !atomic_load(&plan.armed))) return made;
    made.who = caller_of(from);
    inside = 1;
#endif
#ifdef HSTEP_FAULTS_ENVIRONMENT
    /* Registered late rather than at the start, because exit() calls the last registered function first. */
    if (made.who == WHO_ours && atomic_exchange(&until_exit, 0)) atexit(rest);
#endif
    int before = errno;
    int noted = atomic_load(&recording) && (recording_who == WHO_any || recording_who == (int)made.who);
    if (noted || log_fd >= 0) made.chain = chain_of(from);
    if (noted) note_place(call, 1 + atomic_fetch_add(&counts[call], 1), made.chain);
    made.error = planned(call, made.who);
#ifdef HSTEP_FAULTS_PRELOAD
    inside = 0;
#endif
    errno = made.error && made.error < SHORT ? made.error : before;
    return made;
}

static void said(const struct call *call, const char *path, const char *second, int fd, long result)
{
    if (log_fd < 0 || atomic_load_explicit(&held, memory_order_relaxed)) return;
#ifdef HSTEP_FAULTS_ENVIRONMENT
    static _Atomic uint64_t log_number;
    if (step_inside()) return;
    char line[1400], outcome[24];
    int before = errno;
    snprintf(outcome, sizeof outcome, call->error ? "struck" : "%ld", result);
    int bytes =
        snprintf(line, sizeof line, "%llu\t%s\t%s\t%016llx\t%d\t%s\t%s\t%s\n",
                 (unsigned long long)atomic_fetch_add(&log_number, 1), inject_names[call->call], who_names[call->who],
                 (unsigned long long)call->chain, fd, outcome, path ? path : "", second ? second : "");
    if (bytes > 0 && (size_t)bytes < sizeof line) syscall(SYS_write, log_fd, line, (size_t)bytes);
    errno = before;
    step_outside();
#else
    (void)call, (void)path, (void)second, (void)fd, (void)result;
#endif
}

static int who_of(const char *name)
{
    for (int i = 0; i < (int)(sizeof who_names / sizeof *who_names); i++)
        if (!strcmp(name, who_names[i])) return i;
    return -1;
}

int inject_arm(const char *fault)
{
    atomic_store(&plan.armed, 0);
    atomic_store(&plan.polish, fault && !strcmp(fault, "POLISH"));
    if (!fault) return 1;
    atomic_store(&plan.seen, 0);
    atomic_store(&plan.struck, 0);
    if (atomic_load(&plan.polish)) return 1;
    char text[128], *end, *rest = text;
    if (strlen(fault) >= sizeof text) return 0;
    strcpy(text, fault);
    const char *name = strsep(&rest, ":"), *error = strsep(&rest, ":"), *number = strsep(&rest, ":"), *who = rest;
    if (!name || !error || !number) return 0;
    plan.call = plan.kind = -1;
    for (int i = 0; i < INJECT_CALLS; i++)
        if (!strcmp(name, inject_names[i])) plan.call = i;
    for (int i = 0; i < (int)(sizeof kind_names / sizeof *kind_names); i++)
        if (!strcmp(name, kind_names[i])) plan.kind = i;
    plan.error = 0;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(error, errors[i].name)) plan.error = errors[i].number;
    plan.at = strtoull(number, &end, 10);
    plan.from_on = *end == '+';
    plan.who = who ? who_of(who) : WHO_any;
    if ((plan.call < 0 && plan.kind < 0) || !plan.error || !plan.at || plan.who < 0 || end[plan.from_on]) return 0;
    atomic_store_explicit(&plan.armed, 1, memory_order_release);
    return 1;
}

void inject_hold(int on) { atomic_fetch_add(&held, on ? 1 : -1); }

uint64_t inject_struck(void) { return atomic_load(&plan.struck); }

int inject_record(const char *who)
{
    atomic_store(&recording, 0);
    if (!who) return 1;
    if ((recording_who = who_of(who)) < 0) return 0;
    memset(place_counts, 0, sizeof place_counts);
    for (int i = 0; i < INJECT_CALLS; i++) atomic_store(&counts[i], 0);
    atomic_store(&recording, 1);
    return 1;
}

uint64_t inject_count(enum inject_call call) { return atomic_load(&counts[call]); }

size_t inject_places(enum inject_call call, uint64_t *numbers, size_t capacity)
{
    for (size_t i = 0; i < place_counts[call] && i < capacity; i++) numbers[i] = places[call][i].number;
    return place_counts[call];
}

/* ---- The calls --------------------------------------------------------------------------------------------------- */

#ifdef HSTEP_FAULTS_PRELOAD
#define DEFINED(name) name
#define REAL(name) real_##name
/* dlsym() itself allocates, so allocators use the C library's internal names. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t),
    *__libc_memalign(size_t, size_t);
#define real_malloc __libc_malloc
#define real_calloc __libc_calloc
#define real_realloc __libc_realloc
#define real_aligned_alloc __libc_memalign
#define DECLARE_REAL(result, name, parameters) static result(*pointer_##name) parameters;
#define FIND_REAL(name)                                                           \
    do {                                                                          \
        if (!pointer_##name) *(void **)&pointer_##name = dlsym(RTLD_NEXT, #name); \
    } while (0)
#define CALL_REAL(name, arguments) (pointer_##name) arguments
#define live_add(memory) ((void)(memory))
#define live_remove(memory) ((void)(memory))
uint64_t inject_live_blocks(void) { return 0; }
#else
#define DEFINED(name) __wrap_##name
#define REAL(name) __real_##name
#define DECLARE_REAL(result, name, parameters) extern result __real_##name parameters;
#define FIND_REAL(name) ((void)0)
#define CALL_REAL(name, arguments) __real_##name arguments
extern void *__real_malloc(size_t), *__real_calloc(size_t, size_t), *__real_realloc(void *, size_t),
    *__real_aligned_alloc(size_t, size_t);
extern void __real_free(void *);

/* A hash set of live blocks with linear probing. Removal moves later entries up, so a search may stop at a hole. */
enum { LIVE_SLOTS = 1 << 16 };
static void *live[LIVE_SLOTS];
static uint64_t live_count;
static pthread_mutex_t live_lock = PTHREAD_MUTEX_INITIALIZER;

static size_t home_slot(const void *memory)
{
    return (size_t)(((uint64_t)(uintptr_t)memory * UINT64_C(0x9e3779b97f4a7c15)) >> 48);
}

static void live_add(void *memory)
{
    if (!memory) return;
    pthread_mutex_lock(&live_lock);
    if (live_count < LIVE_SLOTS / 2) {
        size_t i = home_slot(memory);
        while (live[i]) i = (i + 1) % LIVE_SLOTS;
        live[i] = memory;
        live_count++;
    }
    pthread_mutex_unlock(&live_lock);
}

static void live_remove(const void *memory)
{
    if (!memory) return;
    pthread_mutex_lock(&live_lock);
    size_t i = home_slot(memory);
    while (live[i] && live[i] != memory) i = (i + 1) % LIVE_SLOTS;
    if (live[i]) {
        live_count--;
        live[i] = NULL;
        for (size_t j = (i + 1) % LIVE_SLOTS; live[j]; j = (j + 1) % LIVE_SLOTS) {
            size_t home = home_slot(live[j]);
            if ((j > i && (home <= i || home > j)) || (j < i && home <= i && home > j)) {
                live[i] = live[j];
                live[j] = NULL;
                i = j;
            }
        }
    }
    pthread_mutex_unlock(&live_lock);
}

uint64_t inject_live_blocks(void) { return live_count; }

void __wrap_free(void *memory);
void __wrap_free(void *memory)
{
    live_remove(memory);
    __real_free(memory);
}
#endif

#define CALLER __builtin_extract_return_addr(__builtin_return_address(0))

static int spoil(FILE *file)
{
    file->_flags |= _IO_ERR_SEEN;
    return 0;
}

void *DEFINED(malloc)(size_t bytes);
void *DEFINED(malloc)(size_t bytes)
{
    struct call call = strike(INJECT_malloc, CALLER);
    void *memory = call.error ? NULL : REAL(malloc)(bytes);
    live_add(memory);
    said(&call, NULL, NULL, -1, (long)bytes);
    return memory;
}

void *DEFINED(calloc)(size_t count, size_t bytes);
void *DEFINED(calloc)(size_t count, size_t bytes)
{
    struct call call = strike(INJECT_calloc, CALLER);
    void *memory = call.error ? NULL : REAL(calloc)(count, bytes);
    live_add(memory);
    said(&call, NULL, NULL, -1, (long)(count * bytes));
    return memory;
}

void *DEFINED(realloc)(void *old, size_t bytes);
void *DEFINED(realloc)(void *old, size_t bytes)
{
    struct call call = strike(INJECT_realloc, CALLER);
    if (call.error) {
        said(&call, NULL, NULL, -1, (long)bytes);
        return NULL;
    }
    live_remove(old);
    void *memory = REAL(realloc)(old, bytes);
    live_add(memory);
    said(&call, NULL, NULL, -1, (long)bytes);
    return memory;
}

void *DEFINED(aligned_alloc)(size_t alignment, size_t bytes);
void *DEFINED(aligned_alloc)(size_t alignment, size_t bytes)
{
    struct call call = strike(INJECT_aligned_alloc, CALLER);
    void *memory = call.error ? NULL : REAL(aligned_alloc)(alignment, bytes);
    live_add(memory);
    said(&call, NULL, NULL, -1, (long)bytes);
    return memory;
}

int DEFINED(posix_memalign)(void **memory, size_t alignment, size_t bytes);
int DEFINED(posix_memalign)(void **memory, size_t alignment, size_t bytes)
{
    struct call call = strike(INJECT_posix_memalign, CALLER);
    void *made = call.error ? NULL : REAL(aligned_alloc)(alignment, bytes);
    live_add(made);
    said(&call, NULL, NULL, -1, (long)bytes);
    if (!made) return ENOMEM;
    *memory = made;
    return 0;
}

char *DEFINED(strdup)(const char *text);
char *DEFINED(strdup)(const char *text)
{
    struct call call = strike(INJECT_strdup, CALLER);
    size_t bytes = strlen(text) + 1;
    char *copy = call.error ? NULL : REAL(malloc)(bytes);
    live_add(copy);
    said(&call, NULL, NULL, -1, (long)bytes);
    return copy ? memcpy(copy, text, bytes) : NULL;
}

/* Returns the error of a call that only polishes, if the fault is POLISH: a mode, a link, a sync of a folder. Some
 * network file systems also say of a folder that it cannot be made, but not that it is there. */
static int unpolished(enum inject_call call, const char *path, const char *second, int fd)
{
    (void)second;
    if (!atomic_load_explicit(&plan.polish, memory_order_acquire)) return 0;
    int error = 0, before = errno;
    struct stat status;
    inject_hold(1);
    if (call == INJECT_fchmod || call == INJECT_chmod || call == INJECT_link || call == INJECT_symlink) error = EPERM;
    if (call == INJECT_fsync && !fstat(fd, &status) && S_ISDIR(status.st_mode)) error = EINVAL;
    if (call == INJECT_mkdir && !stat(path, &status)) error = EACCES;
    inject_hold(0);
    errno = error ? error : before;
    if (error) atomic_fetch_add(&plan.struck, 1);
    return error;
}

#define UNPOLISHED(...) unpolished(__VA_ARGS__)
#define CALL(kind, name, result, parameters, arguments, said_of_it, failed, errors) \
    DECLARE_REAL(result, name, parameters)                                          \
    result DEFINED(name) parameters;                                                \
    result DEFINED(name) parameters                                                 \
    {                                                                               \
        FIND_REAL(name);                                                            \
        struct call call = strike(INJECT_##name, CALLER);                           \
        if (!call.error) call.error = UNPOLISHED(INJECT_##name, UNPACK said_of_it); \
        int error = call.error;                                                     \
        if (error) {                                                                \
            SAY(said_of_it, 0);                                                     \
            return failed;                                                          \
        }                                                                           \
        result got = CALL_REAL(name, arguments);                                    \
        SAY(said_of_it, (long)got);                                                 \
        return got;                                                                 \
    }
#define SAY(said_of_it, got) SAY_MORE(UNPACK said_of_it, got)
#define UNPACK(...) __VA_ARGS__
#define SAY_MORE(...) said(&call, __VA_ARGS__)
#define CALL_BY_HAND(kind, name, errors)
#include "calls.def"

DECLARE_REAL(int, open, (const char *path, int flags, ...))
int DEFINED(open)(const char *path, int flags, ...);
int DEFINED(open)(const char *path, int flags, ...)
{
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    FIND_REAL(open);
    struct call call = strike(INJECT_open, CALLER);
    int fd = call.error ? -1 : CALL_REAL(open, (path, flags, mode));
    said(&call, path, flags & (O_WRONLY | O_RDWR) ? flags & O_CREAT ? "create" : "write" : "read", fd, fd);
    return fd;
}

/* Returns half the bytes for SHORT. A transfer of one byte cannot be short. */
static size_t shortened(const struct call *call, size_t bytes)
{
    return call->error == SHORT && bytes > 1 ? bytes / 2 : bytes;
}

DECLARE_REAL(ssize_t, read, (int fd, void *data, size_t bytes))
ssize_t DEFINED(read)(int fd, void *data, size_t bytes);
ssize_t DEFINED(read)(int fd, void *data, size_t bytes)
{
    FIND_REAL(read);
    struct call call = strike(INJECT_read, CALLER);
    ssize_t got = call.error && call.error != SHORT ? -1 : CALL_REAL(read, (fd, data, shortened(&call, bytes)));
    said(&call, NULL, NULL, fd, got);
    return got;
}

DECLARE_REAL(ssize_t, pread, (int fd, void *data, size_t bytes, off_t offset))
ssize_t DEFINED(pread)(int fd, void *data, size_t bytes, off_t offset);
ssize_t DEFINED(pread)(int fd, void *data, size_t bytes, off_t offset)
{
    FIND_REAL(pread);
    struct call call = strike(INJECT_pread, CALLER);
    ssize_t got =
        call.error && call.error != SHORT ? -1 : CALL_REAL(pread, (fd, data, shortened(&call, bytes), offset));
    said(&call, NULL, NULL, fd, got);
    return got;
}

DECLARE_REAL(ssize_t, write, (int fd, const void *data, size_t bytes))
ssize_t DEFINED(write)(int fd, const void *data, size_t bytes);
ssize_t DEFINED(write)(int fd, const void *data, size_t bytes)
{
    FIND_REAL(write);
    if (fd == STDERR_FILENO) return CALL_REAL(write, (fd, data, bytes));
    struct call call = strike(INJECT_write, CALLER);
    ssize_t put = call.error && call.error != SHORT ? -1 : CALL_REAL(write, (fd, data, shortened(&call, bytes)));
    said(&call, NULL, NULL, fd, put);
    return put;
}

DECLARE_REAL(ssize_t, pwrite, (int fd, const void *data, size_t bytes, off_t offset))
ssize_t DEFINED(pwrite)(int fd, const void *data, size_t bytes, off_t offset);
ssize_t DEFINED(pwrite)(int fd, const void *data, size_t bytes, off_t offset)
{
    FIND_REAL(pwrite);
    struct call call = strike(INJECT_pwrite, CALLER);
    ssize_t put =
        call.error && call.error != SHORT ? -1 : CALL_REAL(pwrite, (fd, data, shortened(&call, bytes), offset));
    said(&call, NULL, NULL, fd, put);
    return put;
}

/* Always closes, because Linux closes the descriptor even if close() fails. */
DECLARE_REAL(int, close, (int fd))
int DEFINED(close)(int fd);
int DEFINED(close)(int fd)
{
    FIND_REAL(close);
    struct call call = strike(INJECT_close, CALLER);
    int number = errno, result = CALL_REAL(close, (fd));
    said(&call, NULL, NULL, fd, result);
    if (!call.error) return result;
    errno = number;
    return -1;
}

/* Returns the error if the call on a stream must fail, and sets the stream's error flag. Calls on stderr never fail,
 * because there is no place left to report such an error. */
static int stream_fails(enum inject_call which, FILE *file, void *from)
{
    if (file == stderr) return 0;
    struct call call = strike(which, from);
    said(&call, NULL, NULL, file ? fileno(file) : -1, 0);
    if (call.error && file) spoil(file);
    return call.error;
}

DECLARE_REAL(size_t, fwrite, (const void *data, size_t size, size_t count, FILE *file))
size_t DEFINED(fwrite)(const void *data, size_t size, size_t count, FILE *file);
size_t DEFINED(fwrite)(const void *data, size_t size, size_t count, FILE *file)
{
    FIND_REAL(fwrite);
    return stream_fails(INJECT_fwrite, file, CALLER) ? 0 : CALL_REAL(fwrite, (data, size, count, file));
}

DECLARE_REAL(int, vfprintf, (FILE * file, const char *format, va_list arguments))
int DEFINED(vfprintf)(FILE *file, const char *format, va_list arguments);
int DEFINED(vfprintf)(FILE *file, const char *format, va_list arguments)
{
    FIND_REAL(vfprintf);
    return stream_fails(INJECT_vfprintf, file, CALLER) ? -1 : CALL_REAL(vfprintf, (file, format, arguments));
}

int DEFINED(fprintf)(FILE *file, const char *format, ...);
int DEFINED(fprintf)(FILE *file, const char *format, ...)
{
    FIND_REAL(vfprintf);
    if (stream_fails(INJECT_fprintf, file, CALLER)) return -1;
    va_list arguments;
    va_start(arguments, format);
    int result = CALL_REAL(vfprintf, (file, format, arguments));
    va_end(arguments);
    return result;
}

int DEFINED(printf)(const char *format, ...);
int DEFINED(printf)(const char *format, ...)
{
    FIND_REAL(vfprintf);
    if (stream_fails(INJECT_printf, stdout, CALLER)) return -1;
    va_list arguments;
    va_start(arguments, format);
    int result = CALL_REAL(vfprintf, (stdout, format, arguments));
    va_end(arguments);
    return result;
}

#define WRITES(name, parameters, arguments, file)                                            \
    DECLARE_REAL(int, name, parameters)                                                      \
    int DEFINED(name) parameters;                                                            \
    int DEFINED(name) parameters                                                             \
    {                                                                                        \
        FIND_REAL(name);                                                                     \
        return stream_fails(INJECT_##name, file, CALLER) ? EOF : CALL_REAL(name, arguments); \
    }
#undef putc
#undef putchar
WRITES(fputs, (const char *text, FILE *file), (text, file), file)
WRITES(puts, (const char *text), (text), stdout)
WRITES(fputc, (int c, FILE *file), (c, file), file)
WRITES(putc, (int c, FILE *file), (c, file), file)
WRITES(putchar, (int c), (c), stdout)
WRITES(fflush, (FILE * file), (file), file)

DECLARE_REAL(int, fclose, (FILE * file))
int DEFINED(fclose)(FILE *file);
int DEFINED(fclose)(FILE *file)
{
    FIND_REAL(fclose);
    int error = stream_fails(INJECT_fclose, file, CALLER), result = CALL_REAL(fclose, (file));
    if (!error) return result;
    errno = error;
    return EOF;
}

#ifdef HSTEP_FAULTS_PRELOAD
/* With a 64-bit off_t these are the same functions. Other programs were compiled to call these names. */
int open64(const char *path, int flags, ...) __attribute__((alias("open")));
ssize_t pread64(int fd, void *data, size_t bytes, off_t offset) __attribute__((alias("pread")));
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset) __attribute__((alias("pwrite")));
int posix_fallocate64(int fd, off_t offset, off_t bytes) __attribute__((alias("posix_fallocate")));
FILE *fopen64(const char *path, const char *mode) __attribute__((alias("fopen")));
int ftruncate64(int fd, off_t bytes) __attribute__((alias("ftruncate")));
#endif

#ifdef HSTEP_FAULTS_ENVIRONMENT
__attribute__((constructor)) static void begin(void)
{
    void *frames[2];
    step_inside();
    backtrace(frames, 2); /* loads the unwinder, which allocates */
    step_outside();
    const char *path = getenv("HSTEP_FAULT_LOG"), *fault = getenv("HSTEP_FAULT");
    if (path) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
        log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 200);
        syscall(SYS_close, fd);
    }
    if (fault && !inject_arm(fault)) {
        static const char text[] = "faults: HSTEP_FAULT is neither NAME:ERROR:K[+][:WHO] nor POLISH\n";
        syscall(SYS_write, 2, text, sizeof text - 1);
        _exit(99);
    }
    until_exit = getenv("HSTEP_FAULT_UNTIL_EXIT") != NULL;
    /* Processes that this one starts run without faults. */
    unsetenv("HSTEP_FAULT");
    unsetenv("HSTEP_FAULT_LOG");
}
#endif
