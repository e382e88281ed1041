/* Threads that compute matrix products, each with a context of its own. */
#ifndef HALFSTEP_TEAM_H
#define HALFSTEP_TEAM_H

#include <stdatomic.h>

#include "trainer/products/matmul.h"
#include "trainer/products/parallel.h"

struct team {
    struct parallel *pool;
    struct matmul **matmul;
    atomic_int failed; /* 1 + the thread whose product has failed */
};

/* Starts the threads, as parallel_create() does. Returns 0, or -1 with an error text. team_close() is needed in either
 * case. */
int team_open(struct team *team, int threads, char *error, size_t error_bytes);
void team_close(struct team *team);
/* Runs tasks, as parallel_run() does. Returns NULL, or the reason for which a product has failed. */
const char *team_run(struct team *team, int64_t tasks, void (*run)(void *arg, int64_t task, int thread), void *arg);

struct operand {
    const void *data;
    int64_t row, column; /* strides */
};
struct product {
    void *data;
    int64_t row;
    int type, accumulate;
};
/* Computes C[m, n] (+)= A[m, k] B[k, n] on a thread of the team, within a task. A and B have values of `type`. */
void team_multiply(struct team *team, int thread, int type, int64_t m, int64_t n, int64_t k, struct operand a,
                   struct operand b, struct product c);

#endif
