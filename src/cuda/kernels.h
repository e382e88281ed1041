/* How kernels are called: halfstep_cuda_NAME(struct hstep_call call, struct hstep_cuda_what what); accumulate, read,
 * write and saturated take a struct hstep_accumulation or hstep_access in place of the call. All that these point to is
 * memory of the device, the context is NULL. Kernels of one handle run one after another, in the order of their
 * launches. For C and C++. */
#ifndef HSTEP_CUDA_KERNELS_H
#define HSTEP_CUDA_KERNELS_H

#include <stdint.h>

#include "device.h"

/* Of every block. */
#define HSTEP_CUDA_THREADS 256

enum hstep_cuda_shape { HSTEP_CUDA_GRID, HSTEP_CUDA_ONE };

enum {
#define KERNEL(name, shape) HSTEP_CUDA_##name,
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#include "cuda/kernels.def"
    HSTEP_CUDA_KERNELS
};

struct hstep_cuda_what {
    int first, n, pass; /* of sum, decide_sums and update, as the entry has them */
    int tensor, pair;   /* of cross and transform */
    uint64_t bytes;     /* of what `to` or `from` points to */
    void *to;           /* limbs (carry), fp32 values (read), a uint64_t that starts from 0 (saturated) */
    const void *from;   /* fp32 values (write) */
};

/* Floats that a matrix, its transformation and its vectors are worked on in, by whatever kernels. */
static inline uint64_t hstep_cuda_workspace(const struct hstep_tensor *t)
{
    uint64_t rows = (uint64_t)t->rows, columns = (uint64_t)t->row_length, least = rows < columns ? rows : columns,
             most = rows < columns ? columns : rows;
    if (t->matrix) return rows * columns + 2 * (least * least + 16) + (most + 64) * (least + 64);
    return 2 * (rows + (rows + 63) / 64 * columns);
}

#endif
