/* BF16 with stochastic rounding; 2 bytes an element. Rounding is unbiased: it goes away from zero with probability
 * exactly (dropped half) / 65536. A representable value therefore never changes. The error is below one unit in the
 * last place, 2^-7 relative. Values saturate at 0x7F7F. A state below 2^-126 is stored as +0. */
#ifndef HSTEP_BF16_SR_H
#define HSTEP_BF16_SR_H

#include "formats/bf16.h"

#define bf16_sr_ROW "bf16-sr", "BF16, stochastic rounding", ELEMENTS, BF16, NONE, \
    roles = WEIGHT | SIGNED | NONNEG, stochastic = 1

V_OP void bf16_sr_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    bf16_decode(code, extra, i, e, o);
}

V_OP void bf16_sr_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)extra;
    vi re, ro;
    hstep_bf16_stochastic(e, o, state, words, &re, &ro);
    if (state)
        vp_store_hi16_normal(code + 2 * i, re, ro);
    else
        vp_store_hi16(code + 2 * i, re, ro);
}

APPLY_BY_ENCODING(bf16_sr)

#endif
