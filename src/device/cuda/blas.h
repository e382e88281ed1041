/* Products of BF16 matrices by cuBLAS, which is found as the driver is: torch brings it, and a toolkit. Sums are in
 * fp32; their order, and so the last bits, are cuBLAS's own and the GPU's. */
#ifndef HSTEP_CUDA_BLAS_H
#define HSTEP_CUDA_BLAS_H

#include <stddef.h>
#include <stdint.h>

struct hstep_gpu;
struct hstep_blas;

/* By columns, in the GPU's memory: `stride` elements between columns, and taken as its transpose if `turned`. */
struct hstep_operand {
    void *x;
    int64_t stride;
    int turned;
};

/* Opened and closed in the GPU's context; not opened while the stream is captured. NULL where there is no cuBLAS that
 * this driver takes, or no memory for it. */
struct hstep_blas *hstep_blas_open(struct hstep_gpu *g);
void hstep_blas_close(struct hstep_blas *b);

/* The stream of the calls that follow. */
int hstep_blas_follow(struct hstep_blas *b, void *stream);

/* c = alpha a b + beta c: c of rows x columns, a of rows x inner. alpha and beta are read from the GPU's memory, when
 * the product is made. */
int hstep_blas_multiply(struct hstep_blas *b, struct hstep_operand c, struct hstep_operand left,
                        struct hstep_operand right, int64_t rows, int64_t columns, int64_t inner, const float *alpha,
                        const float *beta);
/* n elements. */
int hstep_blas_copy(struct hstep_blas *b, void *to, const void *from, int64_t n);

#endif
