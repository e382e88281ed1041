/* The rows of transforms.def, and the places of their constants in k[]. */
#ifndef HSTEP_TRANSFORMS_H
#define HSTEP_TRANSFORMS_H

#include <stdint.h>

#include "rules/coefficients.h"

enum {
    HSTEP_NO_TRANSFORM,
#define TRANSFORM(name, ...) HSTEP_TRANSFORM_##name,
#include "rules/transforms.def"
#undef TRANSFORM
    HSTEP_TRANSFORMS
};

#define TRANSFORM(name, ...) enum { __VA_ARGS__, name##_constants };
#include "rules/transforms.def"
#undef TRANSFORM

/* Returns the coefficients a, b, c of an iteration, counted from 0. k: the constants of newton_schulz. */
HSTEP_INLINE const float *hstep_newton_schulz_triple(const float *k, int step)
{
    const struct hstep_coefficients *row = &hstep_coefficients[(int)k[newton_schulz_row]];
    if (!row->triples) return &k[newton_schulz_a];
    return row->triple[step < row->triples ? step : row->triples - 1];
}

/* Returns 1 if the Gram form saves products: if one side is more than 1.5 times the other. */
HSTEP_INLINE int hstep_newton_schulz_long(int64_t rows, int64_t columns)
{
    return 2 * rows > 3 * columns || 2 * columns > 3 * rows;
}

/* Returns 1 if a matrix is iterated in the Gram form. */
HSTEP_INLINE int hstep_newton_schulz_is_gram(const float *k, int64_t rows, int64_t columns)
{
    return k[newton_schulz_form] != 0.0f && hstep_newton_schulz_long(rows, columns);
}

/* The most that one stretch of the Gram form may multiply small singular values by. The error of a stretch grows with
 * the square of it. */
#define HSTEP_GROWTH_F32 1024.0f /* 2^20 times an error of 2^-24 */
#define HSTEP_GROWTH_F16 48.0f   /* for products in FP16, whose error is 2^-11 */

/* Returns the end of the stretch that begins with iteration `start`: the iterations of a stretch are made with one Gram
 * matrix. In the standard form each iteration is a stretch. In the Gram form, stretches follow from the coefficients
 * alone: a stretch goes on while the product of its |a| is within `growth`. */
HSTEP_INLINE int hstep_newton_schulz_stretch(const float *k, int64_t rows, int64_t columns, float growth, int start)
{
    const int steps = (int)k[newton_schulz_steps], is_gram = hstep_newton_schulz_is_gram(k, rows, columns);
    float product = 1.0f;
    int step = start;
    for (; step < steps; step++) {
        const float a = hstep_newton_schulz_triple(k, step)[0];
        product *= a < 0.0f ? -a : a;
        if (step > start && (!is_gram || product > growth)) break;
    }
    return step;
}

#endif
