/* How kernels are called: halfstep_cuda_NAME(struct hstep_call call, struct hstep_cuda_what what); accumulate, read,
 * write and saturated take a struct hstep_accumulation or hstep_access in place of the call. All that these point to is
 * memory of the device; context, and tensors of a call, are NULL. Kernels of one handle run one after another, in the
 * order of their launches. For C and C++. */
#ifndef HSTEP_CUDA_KERNELS_H
#define HSTEP_CUDA_KERNELS_H

#include <stdint.h>

#include "decide/pass.h"
#include "device/device.h"

/* Of every block. */
#define HSTEP_CUDA_THREADS 256

enum hstep_cuda_shape { HSTEP_CUDA_GRID, HSTEP_CUDA_ONE };

enum {
#define KERNEL(name, shape) HSTEP_CUDA_##name,
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#include "device/cuda/code/kernels.def"
    HSTEP_CUDA_KERNELS,
    HSTEP_CUDA_FUSED = HSTEP_CUDA_saturated + 1 /* from here on */
};

/* Rules with more states are the general kernel's. */
#define HSTEP_CUDA_FUSED_STATES 4

/* Entries that are several launches, one for each of these: the transformation of a matrix, */
enum hstep_cuda_transform {
    HSTEP_CUDA_CLEAR,
    HSTEP_CUDA_SQUARES,    /* of the matrix, into limbs */
    HSTEP_CUDA_DIVIDE,     /* by its norm: X, or its transpose where that is wider */
    HSTEP_CUDA_GRAM,       /* G = X X' */
    HSTEP_CUDA_POLYNOMIAL, /* P = a I + b G + c G G */
    HSTEP_CUDA_NEXT,       /* P X, at the other place of X */
    HSTEP_CUDA_BACK,       /* X to the place of the matrix */
    HSTEP_CUDA_NARROW,     /* DIVIDE to BF16, for other products than these, */
    HSTEP_CUDA_WIDEN       /* and back from there */
};

/* and the vectors of a matrix. */
enum hstep_cuda_cross { HSTEP_CUDA_ROWS, HSTEP_CUDA_COLUMNS, HSTEP_CUDA_VECTORS, HSTEP_CUDA_MEAN };

struct hstep_cuda_what {
    int first, n, pass; /* of sum, decide_sums and update, as the entry has them; pass of transform and cross: which */
    int tensor, pair;   /* of cross and transform */
    int place;          /* of transform: of X, 0 or 1 */
    uint64_t bytes;     /* of what `to` or `from` points to */
    void *to;           /* limbs (carry), fp32 values (read), a uint64_t that starts from 0 (saturated) */
    const void *from;   /* fp32 values (write) */
};

/* Where the parts of a matrix are in the workspace after the matrix itself, in floats, each on a line of 64 bytes. */
struct hstep_cuda_parts {
    int64_t gram, polynomial; /* least(rows, columns)^2 */
    int64_t next;             /* the second place of X; of X in BF16, both */
    int64_t limbs;            /* of the sum of squares */
    int64_t factors;          /* 1 and 0 */
    int64_t end;
};

HSTEP_INLINE struct hstep_cuda_parts hstep_cuda_parts(int64_t rows, int64_t columns)
{
    const int64_t least = rows < columns ? rows : columns, line = 16, square = (least * least + line - 1) / line * line,
                  all = (rows * columns + line - 1) / line * line, panel = 32;
    struct hstep_cuda_parts p;
    p.gram = all;
    p.polynomial = p.gram + square;
    p.next = p.polynomial + square;
    /* The host's panels would fit as well: tests run its entries in the place of kernels. */
    p.limbs = p.next + ((rows + panel) * (columns + panel) + line - 1) / line * line;
    p.factors = p.limbs + (2 * HSTEP_EXACT_LIMBS + line - 1) / line * line;
    p.end = p.factors + line;
    return p;
}

/* The second place of X in BF16, counted from the first. */
HSTEP_INLINE int64_t hstep_cuda_bf16_place(int64_t rows, int64_t columns) { return (rows * columns + 7) / 8 * 8; }

/* Where the sums of a matrix with vectors are, in doubles: over rows; over columns, for each 64 rows, added to the
 * first; of each 256 columns of each row; limbs of two sums. */
struct hstep_cuda_sums {
    int64_t blocks, chunks; /* of rows, and of 256 columns */
    int64_t columns, parts, limbs, end;
};

HSTEP_INLINE struct hstep_cuda_sums hstep_cuda_sums(int64_t rows, int64_t columns)
{
    struct hstep_cuda_sums s;
    s.blocks = (rows + HSTEP_CROSS_ROWS - 1) / HSTEP_CROSS_ROWS;
    s.chunks = (columns + HSTEP_TILE - 1) / HSTEP_TILE;
    s.columns = rows;
    s.parts = s.columns + s.blocks * columns;
    s.limbs = s.parts + rows * s.chunks;
    s.end = s.limbs + 2 * HSTEP_EXACT_LIMBS;
    return s;
}

/* Floats that a matrix, its transformation and its vectors are worked on in. */
HSTEP_INLINE uint64_t hstep_cuda_workspace(const struct hstep_tensor *t)
{
    if (t->matrix) return (uint64_t)hstep_cuda_parts(t->rows, t->row_length).end;
    return 2 * (uint64_t)hstep_cuda_sums(t->rows, t->row_length).end;
}

#endif
