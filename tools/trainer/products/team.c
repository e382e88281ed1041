#include "trainer/products/team.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/text.h"

int team_open(struct team *team, int threads, char *error, size_t error_bytes)
{
    team->pool = parallel_create(threads);
    if (!team->pool) {
        snprintf(error, error_bytes, "cannot start %d threads", threads);
        return -1;
    }
    int n = parallel_threads(team->pool);
    team->matmul = calloc((size_t)n, sizeof *team->matmul);
    if (!team->matmul) return -no_memory(error, error_bytes);
    for (int i = 0; i < n; i++)
        if (!(team->matmul[i] = matmul_create(error, error_bytes))) return -1;
    return 0;
}

void team_close(struct team *team)
{
    for (int i = 0; team->matmul && i < parallel_threads(team->pool); i++) matmul_destroy(team->matmul[i]);
    parallel_destroy(team->pool);
    free(team->matmul);
}

const char *team_run(struct team *team, int64_t tasks, void (*run)(void *, int64_t, int), void *arg)
{
    parallel_run(team->pool, tasks, run, arg);
    int failed = atomic_exchange(&team->failed, 0);
    return failed ? matmul_error(team->matmul[failed - 1]) : NULL;
}

void team_multiply(struct team *team, int thread, int type, int64_t m, int64_t n, int64_t k, struct operand a,
                   struct operand b, struct product c)
{
    const struct matmul_shape shape = {.m = m,
                                       .n = n,
                                       .k = k,
                                       .a_row = a.row,
                                       .a_column = a.column,
                                       .b_row = b.row,
                                       .b_column = b.column,
                                       .c_row = c.row,
                                       .type = type,
                                       .c_type = c.type,
                                       .accumulate = c.accumulate};
    if (matmul_run(team->matmul[thread], &shape, a.data, b.data, c.data)) atomic_store(&team->failed, thread + 1);
}
