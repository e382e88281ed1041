/* The product of matrices, for kernels.c. One call adds k terms to every element of a tile:
 *
 *   static void product_tile(float *c, const float *a, const float *b, int64_t k)
 *
 *   c[i * 32 + j] = ((c[i * 32 + j] + a[i] * b[j]) + a[12 + i] * b[32 + j]) + ...
 *
 * The product c has 12 rows of 32 columns. For each term, a has 12 elements of one column of the left matrix. And b has
 * 32 elements of one row of the right matrix (panels, device/host/matrix.c). The number k of terms may be 0. No
 * address need be aligned.
 *
 * Every element is one chain of fp32 products and sums in the order of k. Its bits therefore do not depend on the
 * blocks of registers that the tile is cut into. A sum can also be stored and continued later. Chains of different
 * elements run side by side. There are so many because they hide the latency of addition. */
#ifndef HSTEP_PRODUCT_H
#define HSTEP_PRODUCT_H

#include "kernels/kernels.h"

/* Registers hold the accumulators, a row of b, an element of a and a product. Measured on one Zen 4 core, in cache: 117
 * GFLOP/s with 16 lanes, 112 with 8, 28 with 1. The core's peak is 32 operations a clock. With 16 lanes, two vectors to
 * a row halve the loads of a, but run at 79 GFLOP/s. Alternating products and sums share the 512-bit pipes best. */
#if VL == 16
#define PRODUCT_ROWS 12
#define PRODUCT_VECTORS 1
#elif VL == 8
#define PRODUCT_ROWS 6
#define PRODUCT_VECTORS 2
#elif VL == 4
#define PRODUCT_ROWS 6
#define PRODUCT_VECTORS 4
#else
#define PRODUCT_ROWS 4
#define PRODUCT_VECTORS 4
#endif

V_OP void product_block(float *c, const float *a, const float *b, int64_t k)
{
    vf sum[PRODUCT_ROWS][PRODUCT_VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < PRODUCT_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PRODUCT_VECTORS; j++) sum[i][j] = v_loadu(c + i * HSTEP_PANEL + j * VL);
    for (; k > 0; k--, a += HSTEP_STRIP, b += HSTEP_PANEL) {
        vf row[PRODUCT_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < PRODUCT_VECTORS; j++) row[j] = v_loadu(b + j * VL);
#pragma GCC unroll 12
        for (int i = 0; i < PRODUCT_ROWS; i++) {
            vf x = v_set(a[i]);
#pragma GCC unroll 4
            for (int j = 0; j < PRODUCT_VECTORS; j++) sum[i][j] = v_add(sum[i][j], v_mul(x, row[j]));
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < PRODUCT_ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < PRODUCT_VECTORS; j++) v_storeu(c + i * HSTEP_PANEL + j * VL, sum[i][j]);
}

static void product_tile(float *c, const float *a, const float *b, int64_t k)
{
    for (int i = 0; i < HSTEP_STRIP; i += PRODUCT_ROWS)
        for (int j = 0; j < HSTEP_PANEL; j += PRODUCT_VECTORS * VL)
            product_block(c + i * HSTEP_PANEL + j, a + i, b + j, k);
}

#endif
