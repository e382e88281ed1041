/* Runs independent numbered tasks on a few threads that sleep between calls. The trainer does not use OpenMP, because
 * OpenMP's threads keep spinning after a parallel region, on the cores that the optimizer's step needs next. */
#ifndef HALFSTEP_PARALLEL_H
#define HALFSTEP_PARALLEL_H

#include <stdint.h>

struct parallel;

/* Starts the threads; 0: halfstep_default_threads(). Returns NULL if threads cannot be started. */
struct parallel *parallel_create(int threads);
void parallel_destroy(struct parallel *pool);
int parallel_threads(const struct parallel *pool);

/* Calls run(arg, task, thread) once for every task in 0 .. tasks - 1, in no fixed order. `thread` is the number of the
 * thread that runs the task (0 .. threads - 1), for scratch memory. Returns when all are done. Tasks must not call
 * it. */
void parallel_run(struct parallel *pool, int64_t tasks, void (*run)(void *arg, int64_t task, int thread), void *arg);

#endif
