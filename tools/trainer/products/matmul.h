/* Matrix products through oneDNN, each on one thread. Callers split the work into tasks themselves, so that the bits of
 * a result do not depend on the number of threads. Primitives are kept and reused by shape. */
#ifndef HALFSTEP_MATMUL_H
#define HALFSTEP_MATMUL_H

#include <stddef.h>
#include <stdint.h>

/* A context, one per thread. matmul_create() returns NULL with an error text if oneDNN cannot be used. */
struct matmul;
struct matmul *matmul_create(char *error, size_t error_bytes);
void matmul_destroy(struct matmul *context);

/* C[m, n] = A[m, k] B[k, n], or C += A B. Element (i, j) of a matrix lies at i * row + j * column elements, and one of
 * the two strides is 1. A transposed operand has its strides exchanged. C has contiguous rows. Types are those of enum
 * lm_dtype; A and B have the same type. Sums are in fp32; accumulate needs an fp32 C. Processors without BF16 products
 * compute in fp32 from the same values. */
struct matmul_shape {
    int64_t m, n, k;
    int64_t a_row, a_column, b_row, b_column, c_row;
    int type, c_type, accumulate;
};

/* Computes a product. Returns 0, or -1 with the reason in matmul_error(). */
int matmul_run(struct matmul *context, const struct matmul_shape *shape, const void *a, const void *b, void *c);
const char *matmul_error(const struct matmul *context);

#endif
