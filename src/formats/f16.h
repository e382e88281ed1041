/* IEEE half, to nearest even; 2 bytes an element. The relative error is at most 2^-11 from 2^-14 on. Below, the error
 * is at most 2^-25.
 *
 * A weight or state saturates at 65504. A gradient, written by an accumulation, overflows to infinity instead. The scan
 * of the next step finds it, so that saturation hides nothing. A state that rounds to zero is stored as +0. The format
 * is not for second moments, because values up to 2^-25, the square of 1.7e-4, become zero. */
#ifndef HSTEP_F16_H
#define HSTEP_F16_H

#include "formats/f16_round.h"

#define f16_ROW "f16", "IEEE half, to nearest", ELEMENTS, F16, NONE, \
    roles = WEIGHT | GRADIENT | SIGNED, stochastic = 0

V_OP void f16_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    (void)extra;
    vp_load_f16(code + 2 * i, e, o);
}

V_OP void f16_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)extra, (void)words;
    if (state) {
        /* The smallest number that does not round to zero. */
        vf smallest = v_set(0x1.000002p-25f), zero = v_set(0.0f);
        hstep_f16_saturate(&e, &o);
        e = v_select(v_lt(v_abs(e), smallest), zero, e);
        o = v_select(v_lt(v_abs(o), smallest), zero, o);
    }
    vp_store_f16(code + 2 * i, e, o);
}

V_OP void f16_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    (void)extra, (void)words;
    vf e = v_sub(we, de), o = v_sub(wo, d_o);
    hstep_f16_saturate(&e, &o);
    vp_store_f16(code + 2 * i, e, o);
}

#endif
