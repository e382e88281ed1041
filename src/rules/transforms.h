/* The rows of transforms.def, and the places of their constants in k[]. */
#ifndef HSTEP_TRANSFORMS_H
#define HSTEP_TRANSFORMS_H

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

#endif
