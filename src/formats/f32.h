/* fp32: 4 bytes an element, exact. A state below 2^-126 in magnitude is stored as +0. */
#ifndef HSTEP_F32_H
#define HSTEP_F32_H

#include "formats/bf16_round.h"

#define f32_ROW "f32", "fp32", ELEMENTS, F32, NONE, \
    roles = WEIGHT | GRADIENT | SIGNED | NONNEG, stochastic = 0

V_OP void f32_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    (void)extra;
    vp_load_f32(code + 4 * i, e, o);
}

V_OP void f32_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)extra, (void)words;
    if (state) {
        e = v_from_bits(hstep_flush(v_bits(e)));
        o = v_from_bits(hstep_flush(v_bits(o)));
    }
    vp_store_f32(code + 4 * i, e, o);
}

APPLY_BY_ENCODING(f32)

#endif
