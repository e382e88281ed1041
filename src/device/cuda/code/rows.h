/* Makes the rows of a transformed matrix alike (decide/rows.h), phase by phase. The limbs of the two sums stand where
 * the transformation had its second matrix. */
#ifndef HSTEP_CUDA_ROWS_H
#define HSTEP_CUDA_ROWS_H

#include "decide/rows.h"
#include "device/cuda/code/matrix.h"

/* Renews the number of each row, a row by each warp, and adds up the squares before and after the division. */
CUDA_DEVICE void renew_rows(struct exchange *e, const struct hstep_rows *r, const float *u, int64_t n, int64_t columns,
                            int64_t *limbs)
{
    for (int64_t row = warp_of_grid(); row < n; row += warps_of_grid()) {
        double squares = 0.0;
        for (int64_t i = 0; i < columns; i += HSTEP_TILE)
            squares += chunk_squares(e, u + row * columns + i, columns - i);
        if (lane_of_thread()) continue;
        hstep_rows_renew(r, row, squares, columns);
        const double inverse = hstep_rows_inverse(r, row), divided = squares * inverse * inverse;
        if (!is_finite(divided)) continue;
        add_shared(limbs, squares);
        add_shared(limbs + HSTEP_EXACT_LIMBS, divided);
    }
}

/* Multiplies each row by its factor, a chunk of 256 columns by each warp, because roots in double are slow. */
CUDA_DEVICE void multiply_rows(double *factor, const struct hstep_rows *r, float *u, int64_t n, int64_t columns,
                               const int64_t *limbs)
{
    if (CUDA_THREAD == 0)
        *factor =
            hstep_rows_factor(r, hstep_exact_round(limbs), hstep_exact_round(limbs + HSTEP_EXACT_LIMBS), n, columns);
    CUDA_BARRIER();
    const int64_t chunks = (columns + HSTEP_TILE - 1) / HSTEP_TILE;
    for (int64_t i = warp_of_grid(); i < n * chunks; i += warps_of_grid()) {
        const int64_t row = i / chunks, first = i % chunks * HSTEP_TILE, end = least(first + HSTEP_TILE, columns);
        const float mine = (float)(hstep_rows_inverse(r, row) * *factor);
        for (int64_t j = first + lane_of_thread(); j < end; j += LANES) u[row * columns + j] *= mine;
    }
}

CUDA_KERNEL void halfstep_cuda_rows(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED union matrix_scratch scratch;
    const struct hstep_tensor *t = &call.plan.tensors[what.tensor];
    const struct hstep_rows r = hstep_rows_of(&call, what.tensor);
    const int64_t n = hstep_matrix_rows(t, call.matrix), columns = t->row_length;
    float *u = call.plan.workspace;
    int64_t *limbs = (int64_t *)(void *)(u + hstep_cuda_parts(n, columns).next);
    if (!hstep_is_transformed(t, &call.plan.updates[what.tensor])) return;
    switch (what.pass) {
    case HSTEP_CUDA_CLEAR_SUMS:
        if (CUDA_BLOCK == 0 && CUDA_THREAD < 2 * HSTEP_EXACT_LIMBS) limbs[CUDA_THREAD] = 0;
        break;
    case HSTEP_CUDA_RENEW_ROWS: renew_rows(&scratch.e[warp_of_thread()], &r, u, n, columns, limbs); break;
    case HSTEP_CUDA_MULTIPLY_ROWS: multiply_rows(&scratch.norm, &r, u, n, columns, limbs); break;
    default: break;
    }
}

#endif
