/* How kernels are called: halfstep_cuda_NAME(struct hstep_call call, struct hstep_cuda_what what). accumulate, read,
 * write and saturated take a struct hstep_accumulation or hstep_access in place of the call. All pointers in these are
 * to memory of the device, but `context`, and `tensors` of a call, are NULL. Kernels of one handle run one after
 * another, in the order of their launches. For C and C++. */
#ifndef HSTEP_CUDA_KERNELS_H
#define HSTEP_CUDA_KERNELS_H

#include <stdint.h>

#include "decide/pass.h"
#include "device/device.h"
#include "rules/transforms.h"

/* Threads of every block. */
#define HSTEP_CUDA_THREADS 256

enum hstep_cuda_shape { HSTEP_CUDA_GRID, HSTEP_CUDA_ONE };

enum {
#define KERNEL(name, shape) HSTEP_CUDA_##name,
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#include "device/cuda/code/kernels.def"
    HSTEP_CUDA_KERNELS,
    HSTEP_CUDA_FUSED = HSTEP_CUDA_saturated + 1 /* the fused kernels, from here on */
};

/* Rules with more states go through the general kernel. */
#define HSTEP_CUDA_FUSED_STATES 4

/* Phases of a transformation, in one launch each. */
enum hstep_cuda_transform {
    HSTEP_CUDA_CLEAR,
    HSTEP_CUDA_SQUARES,    /* adds those of the matrix to the limbs */
    HSTEP_CUDA_DIVIDE,     /* divides by the norm; X is the result, or its transpose where that is wider */
    HSTEP_CUDA_GRAM,       /* G = X X' */
    HSTEP_CUDA_POLYNOMIAL, /* P = a I + b G + c G G. It is also Q in the first iteration of a stretch */
    HSTEP_CUDA_GATHER,     /* Q = P Q, into another square */
    HSTEP_CUDA_FOLLOW,     /* P G, into the spare square */
    HSTEP_CUDA_FOLLOWED,   /* G = P times the spare square */
    HSTEP_CUDA_NEXT,       /* Q X, into the other place of X */
    HSTEP_CUDA_BACK,       /* copies X to the place of the matrix */
    HSTEP_CUDA_NARROW,     /* as DIVIDE, but to 16 bits, for products by cuBLAS: BF16, or FP16 in the Gram form */
    HSTEP_CUDA_LINEAR,     /* P = a I + b G in FP16 */
    HSTEP_CUDA_WIDEN       /* back from 16 bits */
};

/* Phases of making the rows of a transformed matrix alike (decide/rows.h), in one launch each. */
enum hstep_cuda_rows {
    HSTEP_CUDA_CLEAR_SUMS,
    HSTEP_CUDA_RENEW_ROWS, /* the state over rows, and the sums of squares before and after the division */
    HSTEP_CUDA_MULTIPLY_ROWS
};

/* Phases of the vectors of matrices, in one launch each. */
enum hstep_cuda_cross {
    HSTEP_CUDA_ROWS,
    HSTEP_CUDA_COLUMNS,
    HSTEP_CUDA_VECTORS,
    HSTEP_CUDA_FACTORS /* the factor of each matrix, from its new vector of rows */
};

struct hstep_cuda_what {
    int first, n,
        pass; /* for sum, decide_sums and update, as the entry has them; for transform, rows, cross: the phase */
    int tensor, pair; /* for cross, transform and rows */
    int place;        /* for transform: 1 if X is in its second place */
    /* For transform, n is the number of the iteration. `pair` counts the iterations of its stretch that follow. `first`
     * is 1 in the first of a stretch. */
    uint64_t bytes;   /* at `to` or `from` */
    void *to;         /* limbs (carry), fp32 values (read), a uint64_t that starts from 0 (saturated) */
    const void *from; /* fp32 values (write) */
};

/* Places of the parts of a matrix in the workspace, in floats. The matrix itself stands first. Each part starts on a
 * line of 64 bytes. */
struct hstep_cuda_parts {
    int64_t gram, polynomial; /* least(rows, columns)^2 */
    int64_t next;             /* the second place of X, both places of X in 16 bits, or two squares */
    int64_t limbs;            /* of the sum of squares */
    int64_t factors;          /* 1, 0, and HSTEP_MAX_TRIPLES coefficients a, b, c */
    int64_t end;
};

HSTEP_INLINE struct hstep_cuda_parts hstep_cuda_parts(int64_t rows, int64_t columns)
{
    const int64_t least = rows < columns ? rows : columns, line = 16, square = (least * least + line - 1) / line * line,
                  all = (rows * columns + line - 1) / line * line, panel = 32;
    const int64_t longer = rows < columns ? columns : rows,
                  most = hstep_newton_schulz_long(rows, columns) && longer < 2 * least ? 2 * least : longer;
    struct hstep_cuda_parts p;
    p.gram = all;
    p.polynomial = p.gram + square;
    p.next = p.polynomial + square;
    /* Large enough for the host's panels too, because tests run its entries in place of kernels. */
    p.limbs = p.next + ((least + panel) * (most + panel) + line - 1) / line * line;
    p.factors = p.limbs + (2 * HSTEP_EXACT_LIMBS + line - 1) / line * line;
    p.end = p.factors + 2 * line;
    return p;
}

/* Returns the square of a role in an iteration. Three squares take turns, so that no product replaces its factor: Q
 * after the iteration, P, which is Q in the first iteration of a stretch, and a spare one, which is Q before the
 * iteration. After the last iteration Q is square 0, which is outside of both places of X. left: iterations of the
 * stretch that follow. */
enum hstep_cuda_role { HSTEP_CUDA_Q, HSTEP_CUDA_SPARE, HSTEP_CUDA_P };
HSTEP_INLINE int hstep_cuda_square(int left, int is_first, enum hstep_cuda_role role)
{
    return (left + (is_first && role == HSTEP_CUDA_P ? 0 : (int)role)) % 3;
}

/* Returns the place of a square in fp32, and in 16 bits. The latter is counted in elements of 16 bits, and G is at the
 * place of the Gram matrix. */
HSTEP_INLINE int64_t hstep_cuda_square_place(const struct hstep_cuda_parts *p, int square)
{
    return square ? p->next + (square - 1) * (p->polynomial - p->gram) : p->polynomial;
}
HSTEP_INLINE int64_t hstep_cuda_narrow_square(const struct hstep_cuda_parts *p, int square)
{
    return 2 * (square < 2 ? p->polynomial : p->gram) + (square ? p->polynomial - p->gram : 0);
}

/* Returns the second place of X in 16 bits, counted from the first in elements. */
HSTEP_INLINE int64_t hstep_cuda_narrow_place(int64_t rows, int64_t columns) { return (rows * columns + 7) / 8 * 8; }

/* Places of the sums of matrices with vectors, in doubles, after the factors. Sums over rows stand first. Then come
 * sums over columns within each 64 rows of a matrix: the first blocks of all matrices, where the totals end, then the
 * second blocks. Last come sums of each 256 columns of each row. Sums of each 256 numbers of a new vector of rows take
 * the same place later. */
struct hstep_cuda_sums {
    int64_t blocks, chunks, pieces; /* counts: blocks of rows, chunks of 256 columns and of 256 rows of the largest
                                       matrix. Smaller matrices leave places empty */
    int64_t columns, parts, end;
};

HSTEP_INLINE struct hstep_cuda_sums hstep_cuda_sums(const struct hstep_tensor *t)
{
    struct hstep_cuda_sums s;
    const int64_t rows = hstep_most_rows(t);
    s.blocks = (rows + HSTEP_CROSS_ROWS - 1) / HSTEP_CROSS_ROWS;
    s.chunks = (t->row_length + HSTEP_TILE - 1) / HSTEP_TILE;
    s.pieces = (rows + HSTEP_TILE - 1) / HSTEP_TILE;
    s.columns = t->n_rows;
    s.parts = s.columns + s.blocks * t->matrices * t->row_length;
    s.end = s.parts + t->n_rows * s.chunks;
    return s;
}

/* Returns the floats that a matrix and its transformation, or the vectors of all matrices, need. A smaller matrix of
 * the Gram form may need more than a larger one. */
HSTEP_INLINE uint64_t hstep_cuda_workspace(const struct hstep_tensor *t)
{
    uint64_t most = 0;
    if (!t->matrix) return (uint64_t)hstep_factor_floats(t) + 2 * (uint64_t)hstep_cuda_sums(t).end;
    for (int i = 0; i < t->blocks; i++) {
        const uint64_t floats = (uint64_t)hstep_cuda_parts(hstep_matrix_rows(t, i), t->row_length).end;
        if (floats > most) most = floats;
    }
    return most;
}

#endif
