#ifndef _WIN32
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#endif
#include "device/host/threads.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/process/environment.h"
#include "base/process/limits.h"
#include "base/lock.h"
#include "device/host/host.h"
#include "device/host/nodes.h"

/* What the operating system provides: a lock, two conditions, threads. Windows needs a few lines of its own. */
#ifdef _WIN32

#include <windows.h>

typedef HANDLE os_thread;
typedef SRWLOCK os_lock;
typedef CONDITION_VARIABLE os_condition;
#define OS_LOCK_INITIAL SRWLOCK_INIT
#define OS_CONDITION_INITIAL CONDITION_VARIABLE_INIT
#define OS_THREAD_MAIN DWORD WINAPI
#define OS_THREAD_RESULT 0

static void os_acquire(os_lock *lock) { AcquireSRWLockExclusive(lock); }
static void os_release(os_lock *lock) { ReleaseSRWLockExclusive(lock); }
static void os_wait(os_condition *condition, os_lock *lock) { SleepConditionVariableSRW(condition, lock, INFINITE, 0); }
static void os_wake_all(os_condition *condition) { WakeAllConditionVariable(condition); }
static void os_join(os_thread thread)
{
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}
static int os_start(os_thread *thread, DWORD(WINAPI *main)(void *), void *arg)
{
    *thread = CreateThread(NULL, 0, main, arg, 0, NULL);
    return *thread != NULL;
}
static int os_processors(void)
{
    DWORD_PTR process, system;
    int count = 0;
    if (!GetProcessAffinityMask(GetCurrentProcess(), &process, &system)) return 1;
    for (; process; process &= process - 1) count++;
    return count;
}

#else

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

typedef pthread_t os_thread;
typedef pthread_mutex_t os_lock;
typedef pthread_cond_t os_condition;
#define OS_LOCK_INITIAL PTHREAD_MUTEX_INITIALIZER
#define OS_CONDITION_INITIAL PTHREAD_COND_INITIALIZER
#define OS_THREAD_MAIN void *
#define OS_THREAD_RESULT NULL

static void os_acquire(os_lock *lock) { pthread_mutex_lock(lock); }
static void os_release(os_lock *lock) { pthread_mutex_unlock(lock); }
static void os_wait(os_condition *condition, os_lock *lock) { pthread_cond_wait(condition, lock); }
static void os_wake_all(os_condition *condition) { pthread_cond_broadcast(condition); }
static void os_join(os_thread thread) { pthread_join(thread, NULL); }

/* Starts a thread with all signals blocked, because the host's signal handlers must not run on threads of the
 * library. */
static int os_start(os_thread *thread, void *(*main)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0;
}
static int os_processors(void)
{
    /* The process may use more processors than a cpu_set_t can name, or the system does not say which. */
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    const double quota = hstep_processor_quota("");
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) processors = CPU_COUNT(&set);
#endif
    /* Rounded up, because a thread on a part of a processor still does a part of the work. */
    if (quota < (double)processors) processors = (long)quota + (quota > (double)(long)quota);
    return processors > HSTEP_MAX_THREADS ? HSTEP_MAX_THREADS : (int)processors;
}

#endif

#ifdef __linux__

static void os_read_nodes(struct hstep_nodes *nodes)
{
    unsigned char allowed[HSTEP_MAX_PROCESSORS];
    cpu_set_t set;
    nodes->nodes = 0;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return;
    for (int i = 0; i < HSTEP_MAX_PROCESSORS; i++) allowed[i] = i < CPU_SETSIZE && CPU_ISSET(i, &set);
    hstep_read_nodes(hstep_node_folder, allowed, nodes);
}
/* Pins the thread to all processors of a node that the process may use, so that the system can still choose among
 * them. */
static void os_pin(os_thread thread, const struct hstep_nodes *nodes, int node)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int i = 0; i < nodes->count; i++)
        if (nodes->node[i] == node) CPU_SET(nodes->processor[i], &set);
    pthread_setaffinity_np(thread, sizeof set, &set);
}

#else

/* Not implemented: Windows and macOS spread threads over nodes by themselves. */
static void os_read_nodes(struct hstep_nodes *nodes) { nodes->nodes = 0; }
static void os_pin(os_thread thread, const struct hstep_nodes *nodes, int node)
{
    (void)thread;
    (void)nodes;
    (void)node;
}

#endif

/* How long a thread polls before it sleeps: some tens of microseconds, the gap between the phases of one step. The
 * yields make polling harmless if there are more threads than processors. */
enum { SPIN_TURNS = 64, SPIN_LOOKS = 32 };

/* The gate holds the number of the run, whether workers may still enter it, and how many are inside. A worker that
 * wakes late finds it closed and sleeps again. A run therefore never waits for a thread that has done nothing for
 * it. */
#define GATE_INSIDE 0xFFFFu
#define GATE_OPEN 0x10000u
#define GATE_QUIT 0x20000u
#define GATE_NUMBER_SHIFT 18

/* The rest of one thread's share, with its begin in the low half and its end in the high half. The owner takes from the
 * begin and others take from the end. A backward run does the opposite. */
struct share {
    _Alignas(64) _Atomic uint64_t range;
};

static struct {
    _Atomic uint64_t gate;
    atomic_int busy;     /* set during a run or a shutdown, which alone may touch members without an atomic type */
    atomic_int sleeping; /* workers in wait_for_run, or about to enter its wait */
    atomic_int caller_sleeps;
    atomic_int threads; /* of the present run, the caller included */
    os_lock lock;
    os_condition run, done;
    int started;
    int refused; /* a thread could not be created, so no more are started */
    int registered;
    void (*task)(void *, int64_t);
    void *arg;
    int backward;
    int64_t n, unit; /* `unit` consecutive tasks are taken at once, so that 32 bits hold the ends of a share */
    int pinned; /* this many threads, the caller included, are spread over nodes; 0: not decided; -1: none is pinned */
    struct hstep_nodes nodes;
    os_thread thread[HSTEP_MAX_THREADS];
    struct share share[HSTEP_MAX_THREADS];
} pool = {.lock = OS_LOCK_INITIAL, .run = OS_CONDITION_INITIAL, .done = OS_CONDITION_INITIAL};

static void run_unit(uint32_t unit)
{
    int64_t i = unit * pool.unit, end = pool.n - i < pool.unit ? pool.n : i + pool.unit;
    for (; i < end; i++) pool.task(pool.arg, i);
}

/* Takes one unit of a share. Returns 0 if the share is empty. */
static int take(struct share *share, int from_begin, uint32_t *unit)
{
    uint64_t range = atomic_load_explicit(&share->range, memory_order_relaxed);
    for (;;) {
        uint32_t begin = (uint32_t)range, end = (uint32_t)(range >> 32);
        if (begin == end) return 0;
        uint64_t left = from_begin ? range + 1 : range - ((uint64_t)1 << 32);
        if (atomic_compare_exchange_weak_explicit(&share->range, &range, left, memory_order_relaxed,
                                                  memory_order_relaxed)) {
            *unit = from_begin ? begin : end - 1;
            return 1;
        }
    }
}

/* Does a thread's own share, then helps with the shares of the others. */
static void work(int self, int threads)
{
    uint32_t unit;
    int forward = !pool.backward;
    while (take(&pool.share[self], forward, &unit)) run_unit(unit);
    for (int k = 1; k < threads; k++) {
        struct share *other = &pool.share[(self + k) % threads];
        while (take(other, !forward, &unit)) run_unit(unit);
    }
}

/* Waits until the gate no longer has the number `seen`, or until workers have to quit. Returns the gate. */
static uint64_t wait_for_run(uint64_t seen)
{
    uint64_t gate;
    for (int turn = 0; turn < SPIN_TURNS; turn++) {
        for (int look = 0; look < SPIN_LOOKS; look++) {
            gate = atomic_load_explicit(&pool.gate, memory_order_acquire);
            if (gate >> GATE_NUMBER_SHIFT != seen || gate & GATE_QUIT) return gate;
        }
        hstep_yield();
    }
    os_acquire(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    for (;;) {
        gate = atomic_load(&pool.gate);
        if (gate >> GATE_NUMBER_SHIFT != seen || gate & GATE_QUIT) break;
        os_wait(&pool.run, &pool.lock);
    }
    atomic_fetch_sub(&pool.sleeping, 1);
    os_release(&pool.lock);
    return gate;
}

static OS_THREAD_MAIN worker_main(void *arg)
{
    int self = (int)(intptr_t)arg;
    uint64_t seen = 0;
    for (;;) {
        uint64_t gate = wait_for_run(seen);
        if (gate & GATE_QUIT) return OS_THREAD_RESULT;
        int entered = 0;
        while (gate & GATE_OPEN && self < atomic_load_explicit(&pool.threads, memory_order_relaxed) && !entered)
            entered = atomic_compare_exchange_weak_explicit(&pool.gate, &gate, gate + 1, memory_order_acquire,
                                                            memory_order_acquire);
        seen = gate >> GATE_NUMBER_SHIFT;
        if (!entered) continue;
        work(self, atomic_load_explicit(&pool.threads, memory_order_relaxed));
        gate = atomic_fetch_sub(&pool.gate, 1);
        if ((gate & (GATE_INSIDE | GATE_OPEN)) == 1 && atomic_load(&pool.caller_sleeps)) {
            os_acquire(&pool.lock);
            os_wake_all(&pool.done);
            os_release(&pool.lock);
        }
    }
}

static void wake_workers(void)
{
    if (atomic_load(&pool.sleeping) == 0) return;
    os_acquire(&pool.lock);
    os_wake_all(&pool.run);
    os_release(&pool.lock);
}

static void wait_for_workers(void)
{
    for (int turn = 0; turn < SPIN_TURNS; turn++) {
        for (int look = 0; look < SPIN_LOOKS; look++)
            if (!(atomic_load_explicit(&pool.gate, memory_order_acquire) & GATE_INSIDE)) return;
        hstep_yield();
    }
    os_acquire(&pool.lock);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.gate) & GATE_INSIDE) os_wait(&pool.done, &pool.lock);
    atomic_store(&pool.caller_sleeps, 0);
    os_release(&pool.lock);
}

static int try_acquire_pool(void)
{
    int idle = 0;
    return atomic_compare_exchange_strong_explicit(&pool.busy, &idle, 1, memory_order_acquire, memory_order_relaxed);
}

static void release_pool(void) { atomic_store_explicit(&pool.busy, 0, memory_order_release); }

#ifndef _WIN32
static void before_fork(void) { os_acquire(&pool.lock); }
static void after_fork_parent(void) { os_release(&pool.lock); }

/* Resets the pool in the child of a fork(). The child has only the thread that forked, so what other threads held or
 * did is forgotten. */
static void after_fork_child(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.run, NULL);
    pthread_cond_init(&pool.done, NULL);
    atomic_store(&pool.gate, 0);
    atomic_store(&pool.sleeping, 0);
    atomic_store(&pool.caller_sleeps, 0);
    pool.started = 0;
    pool.refused = 0;
    pool.pinned = 0;
    release_pool();
}
#endif

/* Pins workers on machines with several nodes. The share of a thread is the same stretch of every tensor in every run,
 * so the states of that stretch lie in its node's memory (hstep_host_touch()). The caller's thread is left alone. */
static void pin_workers(void)
{
    int threads = pool.started + 1;
    if (pool.pinned < 0 || pool.pinned == threads) return;
    if (!pool.pinned) os_read_nodes(&pool.nodes);
    pool.pinned = hstep_is_pinned(&pool.nodes, hstep_setting(HSTEP_SET_PIN)) ? threads : -1;
    for (int t = 1; t < pool.pinned; t++)
        os_pin(pool.thread[t - 1], &pool.nodes, hstep_node_of_thread(&pool.nodes, t, threads));
}

/* Starts missing workers. They are numbered from 1, and the caller is thread 0. Returns the number of threads, the
 * caller included. */
static int start_workers(int threads)
{
#ifndef _WIN32
    if (!pool.registered) {
        if (pthread_atfork(before_fork, after_fork_parent, after_fork_child) != 0) return 1;
        pool.registered = 1;
    }
#endif
    while (pool.started < threads - 1 && !pool.refused) {
        if (os_start(&pool.thread[pool.started], worker_main, (void *)(intptr_t)(pool.started + 1))) pool.started++;
        else pool.refused = 1;
    }
    pin_workers();
    return pool.started < threads - 1 ? pool.started + 1 : threads;
}

static void run_tasks(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n, int backward)
{
    if (threads > HSTEP_MAX_THREADS) threads = HSTEP_MAX_THREADS;
    if (threads > n) threads = (int)n;
    if (threads > 1 && try_acquire_pool()) {
        threads = start_workers(threads);
        if (threads > 1) {
            pool.task = task;
            pool.arg = arg;
            pool.n = n;
            pool.backward = backward;
            pool.unit = 1 + (n >> 31);
            uint64_t units = (uint64_t)((n - 1) / pool.unit + 1);
            for (int t = 0; t < threads; t++) {
                uint64_t begin = units * (uint64_t)t / (uint64_t)threads;
                uint64_t end = units * (uint64_t)(t + 1) / (uint64_t)threads;
                atomic_store_explicit(&pool.share[t].range, end << 32 | begin, memory_order_relaxed);
            }
            atomic_store_explicit(&pool.threads, threads, memory_order_relaxed);
            uint64_t number = (atomic_load(&pool.gate) >> GATE_NUMBER_SHIFT) + 1;
            atomic_store(&pool.gate, number << GATE_NUMBER_SHIFT | GATE_OPEN);
            wake_workers();
            work(0, threads);
            atomic_fetch_and(&pool.gate, ~(uint64_t)GATE_OPEN);
            wait_for_workers();
            release_pool();
            return;
        }
        release_pool();
    }
    for (int64_t i = 0; i < n; i++) task(arg, backward ? n - 1 - i : i);
}

void hstep_run_tasks(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n)
{
    run_tasks(threads, task, arg, n, 0);
}

void hstep_run_tasks_backwards(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n)
{
    run_tasks(threads, task, arg, n, 1);
}

void hstep_pool_shutdown(void)
{
    if (!try_acquire_pool()) return;
    atomic_fetch_or(&pool.gate, GATE_QUIT);
    wake_workers();
    for (int t = 0; t < pool.started; t++) os_join(pool.thread[t]);
    pool.started = 0;
    pool.refused = 0;
    pool.pinned = 0;
    atomic_store(&pool.gate, 0);
    release_pool();
}

#ifndef _WIN32
/* Left out on Windows, where it would join threads while it holds the loader's lock. Threads need that lock to end. */
__attribute__((destructor)) static void at_unload(void) { hstep_pool_shutdown(); }
#endif

int hstep_default_threads(void)
{
    char text[128];
    hstep_read_environment(text, sizeof text);
    int threads = hstep_setting(HSTEP_SET_THREADS);
    const char *others = threads > 0 ? NULL : getenv("OMP_NUM_THREADS");
    if (others) threads = hstep_parse_number(others, HSTEP_MAX_THREADS, ',');
    if (threads <= 0) threads = os_processors();
    return threads > HSTEP_MAX_THREADS ? HSTEP_MAX_THREADS : threads > 0 ? threads : 1;
}

int32_t halfstep_default_threads(void) { return hstep_default_threads(); }

void hstep_run(const struct hstep_context *c, halfstep_task task, void *argument, int64_t n)
{
    if (c->run) c->run(c->host, task, argument, n);
    else run_tasks(c->threads, task, argument, n, 0);
}

struct backward_run {
    halfstep_task task;
    void *argument;
    int64_t n;
};

static void backward_task(void *argument, int64_t i)
{
    const struct backward_run *r = argument;
    r->task(r->argument, r->n - 1 - i);
}

void hstep_run_backwards(const struct hstep_context *c, halfstep_task task, void *argument, int64_t n)
{
    struct backward_run r = {task, argument, n};
    if (c->run) c->run(c->host, backward_task, &r, n);
    else run_tasks(c->threads, task, argument, n, 1);
}
