/* IEEE half with stochastic rounding (f16_round.h defines it); 2 bytes an element. From 2^-17 on rounding is unbiased:
 * away from zero with probability exactly the dropped part. Below, the probability is a multiple of 2^-16, and the mean
 * may be 2^-41 off. A representable value never changes. The error is below one unit: 2^-10 relative from 2^-14 on,
 * 2^-24 below. Values saturate at 65504, also as accumulated gradients. A state that rounds to zero is stored as +0. */
#ifndef HSTEP_F16_SR_H
#define HSTEP_F16_SR_H

#include "formats/f16_round.h"

#define f16_sr_ROW "f16-sr", "IEEE half, stochastic rounding", ELEMENTS, F16, NONE, \
    roles = WEIGHT | SIGNED, stochastic = 1

V_OP void f16_sr_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    (void)extra;
    vp_load_f16(code + 2 * i, e, o);
}

V_OP void f16_sr_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)extra;
    hstep_f16_stochastic(e, o, words, &e, &o);
    if (state) {
        e = hstep_f16_positive_zero(e);
        o = hstep_f16_positive_zero(o);
    }
    vp_store_f16(code + 2 * i, e, o);
}

APPLY_BY_ENCODING(f16_sr)

#endif
