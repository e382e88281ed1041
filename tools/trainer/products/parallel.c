#include "trainer/products/parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/interrupt.h"
#include "halfstep.h"

/* About 10 microseconds. The next phase of a step often comes sooner than a sleeping thread wakes. */
enum { SPINS = 4000 };

struct worker {
    struct parallel *pool;
    int thread;
    pthread_t handle;
};

struct parallel {
    int threads, started;
    struct worker *workers;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    atomic_uint generation; /* counts calls; written under the lock, read without it while spinning */
    atomic_int busy;        /* workers that have not finished the current call */
    atomic_int quit;
    atomic_llong next;
    int64_t tasks;
    void (*run)(void *, int64_t, int);
    void *arg;
};

static void take_tasks(struct parallel *pool, int thread)
{
    for (;;) {
        int64_t task = atomic_fetch_add(&pool->next, 1);
        if (task >= pool->tasks) return;
        pool->run(pool->arg, task, thread);
    }
}

static void *work(void *arg)
{
    struct worker *worker = arg;
    struct parallel *pool = worker->pool;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load(&pool->generation) == seen; i++) {
        }
        if (atomic_load(&pool->generation) == seen) {
            pthread_mutex_lock(&pool->lock);
            while (atomic_load(&pool->generation) == seen) pthread_cond_wait(&pool->work, &pool->lock);
            pthread_mutex_unlock(&pool->lock);
        }
        seen = atomic_load(&pool->generation);
        if (atomic_load(&pool->quit)) return NULL;
        take_tasks(pool, worker->thread);
        if (atomic_fetch_sub(&pool->busy, 1) == 1) {
            pthread_mutex_lock(&pool->lock);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static void announce(struct parallel *pool)
{
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->generation, 1);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

struct parallel *parallel_create(int threads)
{
    struct parallel *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->threads = threads > 0 ? threads : halfstep_default_threads();
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    pool->workers = calloc((size_t)pool->threads, sizeof *pool->workers);
    /* Workers block the signals from their start on. */
    sigset_t signals, before;
    interrupt_signals(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, &before);
    for (int i = 1; pool->workers && i < pool->threads; i++) {
        struct worker *worker = &pool->workers[i];
        worker->pool = pool;
        worker->thread = i;
        if (pthread_create(&worker->handle, NULL, work, worker)) break;
        pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!pool->workers || pool->started != pool->threads - 1) {
        parallel_destroy(pool);
        return NULL;
    }
    return pool;
}

void parallel_destroy(struct parallel *pool)
{
    if (!pool) return;
    atomic_store(&pool->quit, 1);
    announce(pool);
    for (int i = 1; i <= pool->started; i++) pthread_join(pool->workers[i].handle, NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int parallel_threads(const struct parallel *pool) { return pool->threads; }

void parallel_run(struct parallel *pool, int64_t tasks, void (*run)(void *, int64_t, int), void *arg)
{
    if (pool->threads == 1 || tasks < 2) {
        for (int64_t i = 0; i < tasks; i++) run(arg, i, 0);
        return;
    }
    pool->run = run;
    pool->arg = arg;
    pool->tasks = tasks;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->busy, pool->threads - 1);
    announce(pool);
    take_tasks(pool, 0);
    for (int i = 0; i < SPINS && atomic_load(&pool->busy); i++) {
    }
    if (atomic_load(&pool->busy)) {
        pthread_mutex_lock(&pool->lock);
        while (atomic_load(&pool->busy)) pthread_cond_wait(&pool->done, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
    }
}
