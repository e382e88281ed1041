/* Matrices as muon needs them: the layout that product.h works on, and the Newton-Schulz iteration. */
#ifndef HSTEP_MATRIX_H
#define HSTEP_MATRIX_H

#include <stddef.h>
#include <stdint.h>

/* Shape of the tile that one kernel call works on: strips of so many rows of the left matrix, panels of so many columns of
 * the right one. Both are stored along the inner dimension, in pieces of one row's or column's width, padded with zeros. */
#define HSTEP_STRIP 12
#define HSTEP_PANEL 32

/* The constants k[] of a tensor that muon steps as a matrix (rules/muon.h). The new weight is w - (SCALE * O + DECAY * w) with
 * O from hstep_newton_schulz() by A, B, C, STEPS and EPS. */
enum {
    MUON_OLD, MUON_NEW, MUON_GRADIENT, MUON_BUFFER, MUON_SCALE, MUON_DECAY, MUON_A, MUON_B, MUON_C, MUON_STEPS, MUON_EPS
};

struct halfstep_optimizer;

/* In floats. */
size_t hstep_matrix_workspace(int64_t rows, int64_t cols);

/* Replaces u, rows x cols and dense, by its orthogonalization after so many steps:
 *
 *   X = u / max(|u|, eps), transposed if rows > cols;  X = (a I + b G + c G G) X with G = X X^T;  u = X, transposed back
 *
 * coefficients: a, b, c. |u| is the root of the sum of squares. Same bits with any threads and instruction set: products and
 * sums in fp32 in the order of the inner index, the norm from an exact sum. No address need be aligned; the workspace is
 * fastest on 64 bytes. u has to be finite. */
void hstep_newton_schulz(const struct halfstep_optimizer *o, float *u, int64_t rows, int64_t cols, const float *coefficients,
                         int steps, float eps, float *workspace);

#endif
