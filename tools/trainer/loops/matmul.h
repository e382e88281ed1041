/* Matrix products through oneDNN, each on one thread: callers cut the work into tasks themselves, so that the bits of a
 * result do not depend on how many threads there are. Primitives are kept and reused by shape. */
#ifndef HALFSTEP_MATMUL_H
#define HALFSTEP_MATMUL_H

#include <stddef.h>
#include <stdint.h>

/* One per thread. NULL and one line in error when oneDNN cannot be used. */
struct matmul;
struct matmul *matmul_create(char *error, size_t error_bytes);
void matmul_destroy(struct matmul *context);

/* C[m, n] = A[m, k] B[k, n], or C += A B. Element (i, j) of a matrix lies at i * rows + j * columns elements: a
 * transposed operand has its strides exchanged; one of the two strides is 1. C has contiguous rows. Types are those of
 * enum lm_dtype, A and B of one type, sums in fp32; accumulate needs an fp32 C. Where the processor has no BF16
 * products they are computed in fp32 from the same values. */
struct matmul_shape {
    int64_t m, n, k;
    int64_t a_row, a_column, b_row, b_column, c_row;
    int type, c_type, accumulate;
};

/* 0, or -1 with the reason in matmul_error. */
int matmul_run(struct matmul *context, const struct matmul_shape *shape, const void *a, const void *b, void *c);
const char *matmul_error(const struct matmul *context);

#endif
