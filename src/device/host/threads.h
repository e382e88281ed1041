/* The library's own thread pool: process-global, started on first use, fresh in the child after fork(). */
#ifndef HSTEP_THREADS_H
#define HSTEP_THREADS_H

#include <stdint.h>

#define HSTEP_MAX_THREADS 1024

/* Calls task(arg, i) once for every i in 0 .. n - 1 on at most `threads` threads, the caller's among them, and returns
 * when all are done. Thread t begins with the t-th contiguous share, then takes from the far end of the others'. A call
 * that finds the pool busy (another handle's step, or a task that calls this itself) runs its tasks inline, one by one;
 * so tasks may not wait for each other. Threads that cannot be had are done without. Nothing is allocated once the pool
 * has run with that many threads. A task must not fork a child that then returns from it.
 *
 * On machines of several NUMA nodes the pool's threads are kept on nodes in the order of their shares, so that equal
 * runs touch the same memory from the same node; HALFSTEP_PIN=0 never does so, and 1 always. */
void hstep_run_tasks(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n);
/* The same, and every thread goes through its share from the end to the begin: what a run before it has left in the
 * thread's caches comes first. */
void hstep_run_tasks_backwards(int threads, void (*task)(void *arg, int64_t i), void *arg, int64_t n);

/* HALFSTEP_THREADS, else the first number of OMP_NUM_THREADS, else the processors this process may use; at most
 * HSTEP_MAX_THREADS. A malformed variable counts as not set. */
int hstep_default_threads(void);

/* Ends the threads; the next run starts new ones. Runs by itself when the library is unloaded or the process exits.
 * Does nothing while a run is under way. */
void hstep_pool_shutdown(void);

#endif
