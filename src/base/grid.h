/* The grid that block codes of second moments lie on (docs/formats.md): a state v is stored as v / grid, and the grid
 * decays with it, by the beta of every write. A pure decay then changes no code and rounds nothing; only what a
 * gradient adds is rounded, where on a grid that stands thousands of small roundings would make the stored value
 * wander.
 *
 * Any positive numbers that all parts of a tensor agree on would give right values. That these follow beta as the
 * kernels have it, rounded to fp32, is what keeps a decayed value on its code: all roundings of one step together move
 * it by at most five units in the last place of fp32, and codes take seven as nothing. Powers of 4 keep the grid near
 * 1: whatever is stored then moves by whole octaves, also of the root, and scales alone change. */
#ifndef HSTEP_GRID_H
#define HSTEP_GRID_H

#include <math.h>

#include "base/inline.h"

#define HSTEP_GRID_LEAST 0.25f

/* After a write that decays the state by beta, 0 .. 1. */
HSTEP_INLINE float hstep_next_grid(float grid, double beta)
{
    double next = (double)grid * (double)(float)beta;
    /* A beta that fp32 takes for 0 keeps nothing of the state: any grid will do. */
    if (next == 0.0) return 1.0f;
    while (next < (double)HSTEP_GRID_LEAST) next *= 4.0;
    return (float)next;
}

/* What is coded is multiplied by: codes are of the value (root 1) or of its square root (root 2); root 0: there is no
 * grid. */
HSTEP_INLINE float hstep_onto_grid(float grid, int root)
{
    if (!root) return 1.0f;
    return (float)(1.0 / (root == 2 ? sqrt((double)grid) : (double)grid));
}

/* Whether steps can leave it there. */
HSTEP_INLINE int hstep_is_grid(double grid)
{
    return grid >= (double)HSTEP_GRID_LEAST && grid <= 1.0 && (double)(float)grid == grid;
}

#endif
