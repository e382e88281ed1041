/* Products of matrices of 16 bits by cuBLAS, which is found at run time as the driver is. torch brings it, and so does
 * a toolkit. Sums are in fp32. Their order, and so the last bits, depend on the version of cuBLAS and on the GPU. */
#ifndef HSTEP_CUDA_BLAS_H
#define HSTEP_CUDA_BLAS_H

#include <stddef.h>
#include <stdint.h>

struct hstep_gpu;
struct hstep_blas;

/* A matrix by columns, in the GPU's memory, with `stride` elements from column to column. If `turned` is set, its
 * transpose is used. */
struct hstep_operand {
    void *x;
    int64_t stride;
    int turned;
};

/* Opens cuBLAS. Both functions need the GPU's context to be current, and the stream must not be captured during the
 * first. Returns NULL if no cuBLAS works with this driver, or if there is no memory for it. */
struct hstep_blas *hstep_blas_open(struct hstep_gpu *g);
void hstep_blas_close(struct hstep_blas *b);

/* Sets the stream of the calls that follow. */
int hstep_blas_follow(struct hstep_blas *b, void *stream);

/* The types of all matrices of a product, as cuBLAS numbers them. */
enum { HSTEP_BLAS_F16 = 2, HSTEP_BLAS_BF16 = 14 };

/* Computes c = alpha * left * right + beta * c, with c of rows x columns and left of rows x inner. alpha and beta are
 * read from the GPU's memory when the product is made. */
int hstep_blas_multiply(struct hstep_blas *b, int type, struct hstep_operand c, struct hstep_operand left,
                        struct hstep_operand right, int64_t rows, int64_t columns, int64_t inner, const float *alpha,
                        const float *beta);
/* Copies n elements of 16 bits. */
int hstep_blas_copy(struct hstep_blas *b, void *to, const void *from, int64_t n);

#endif
