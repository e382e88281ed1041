/* The Newton-Schulz iteration. */
#ifndef HSTEP_TRANSFORM_H
#define HSTEP_TRANSFORM_H

#include <stddef.h>
#include <stdint.h>

#include "matrix.h"

struct hstep_context;

/* In floats. */
size_t hstep_matrix_workspace(int64_t rows, int64_t cols);

/* Replaces u, rows x cols and dense, by its orthogonalization after so many steps:
 *
 *   X = u / max(|u|, eps), transposed if rows > cols;  X = (a I + b G + c G G) X with G = X X^T;  u = X, transposed back
 *
 * coefficients: a, b, c. |u| is the root of the sum of squares. Same bits with any threads and instruction set: products and
 * sums in fp32 in the order of the inner index, the norm from an exact sum. No address need be aligned; the workspace is
 * fastest on 64 bytes. u has to be finite. */
void hstep_newton_schulz(const struct hstep_context *c, float *u, int64_t rows, int64_t cols, const float *coefficients,
                         int steps, float eps, float *workspace);

#endif
