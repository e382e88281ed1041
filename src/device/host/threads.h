/* The library's own thread pool. There is one for the process. It starts on first use, and a child of fork() gets a new
 * one. */
#ifndef HSTEP_THREADS_H
#define HSTEP_THREADS_H

#include <stdint.h>

#define HSTEP_MAX_THREADS 1024

/* Calls task(arg, i) once for every i in 0 .. n - 1 and returns when all are done. Uses at most `threads` threads,
 * including the caller's. Thread t begins with the t-th contiguous share, then takes from the far end of the others'.
 *
 * If the pool is busy, with another handle's step or because a task calls this itself, the tasks run one by one on the
 * caller's thread. Tasks may therefore not wait for each other. Threads that cannot be created are done without.
 * Nothing is allocated once the pool has run with that many threads. A task must not fork a child that then returns
 * from it.
 *
 * On machines with several NUMA nodes the threads of the pool are pinned to nodes in the order of their shares. Equal
 * runs then touch the same memory from the same node. HALFSTEP_PIN=0 turns this off, and HALFSTEP_PIN=1 turns it on
 * everywhere. It is read when an optimizer is created. */
void hstep_run_tasks(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n);
/* Does the same, but every thread goes through its share from the end to the begin. It then first meets the data that
 * an earlier run has left in its caches. */
void hstep_run_tasks_backwards(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n);

/* Returns HALFSTEP_THREADS, else the first number of OMP_NUM_THREADS, else the number of processors that this process
 * may use. A container's quota of processors counts, rounded up. The result is at most HSTEP_MAX_THREADS. A variable
 * that is 0 or malformed counts as not set. */
int hstep_default_threads(void);

/* Ends the threads. The next run starts new ones. Is called when the library is unloaded or the process exits. Does
 * nothing while a run is under way. */
void hstep_pool_shutdown(void);

#endif
