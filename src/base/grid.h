/* The grid of block codes of second moments (docs/formats.md). A state v is stored as v / grid. Every write multiplies
 * the grid by the beta by which the state decays. A pure decay then changes no code and rounds nothing. Only the amount
 * that a gradient adds is rounded. On a fixed grid, thousands of small roundings would make the stored value wander.
 *
 * Any positive grid gives right values, if all parts of a tensor agree on it. The grid follows beta as the kernels have
 * it, rounded to fp32, because this keeps a decayed value on its code. All roundings of one step together move the
 * value by at most five units in the last place of fp32, and codes ignore seven. Factors of 4 keep the grid near 1.
 * They move stored values by whole octaves, and their roots too, so that only scales change. */
#ifndef HSTEP_GRID_H
#define HSTEP_GRID_H

#include <math.h>

#include "base/inline.h"

#define HSTEP_GRID_LEAST 0.25f

/* Returns the grid after a write that decays the state by beta, 0 .. 1. */
HSTEP_INLINE float hstep_next_grid(float grid, double beta)
{
    double next = (double)grid * (double)(float)beta;
    /* A beta that is 0 in fp32 keeps nothing of the state, so any grid will do. */
    if (next == 0.0) return 1.0f;
    while (next < (double)HSTEP_GRID_LEAST) next *= 4.0;
    return (float)next;
}

/* Returns the factor by which values are multiplied before they are coded. Codes are of the value (root 1) or of its
 * square root (root 2). With root 0 there is no grid, and the factor is 1. */
HSTEP_INLINE float hstep_onto_grid(float grid, int root)
{
    if (!root) return 1.0f;
    return (float)(1.0 / (root == 2 ? sqrt((double)grid) : (double)grid));
}

/* Returns true if steps can produce this grid. */
HSTEP_INLINE int hstep_is_grid(double grid)
{
    return grid >= (double)HSTEP_GRID_LEAST && grid <= 1.0 && (double)(float)grid == grid;
}

#endif
