/* BF16, the high half of fp32, rounded to nearest even; 2 bytes an element. The relative error is at most 2^-9 for
 * normal numbers. Values saturate at 0x7F7F. A state below 2^-126 is stored as +0. */
#ifndef HSTEP_BF16_H
#define HSTEP_BF16_H

#include "formats/bf16_round.h"

#define bf16_ROW "bf16", "BF16, to nearest", ELEMENTS, BF16, NONE, \
    roles = WEIGHT | GRADIENT | SIGNED | NONNEG, stochastic = 0

V_OP void bf16_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    (void)extra;
    vi ue, uo;
    vp_load_hi16(code + 2 * i, &ue, &uo);
    *e = v_from_bits(ue);
    *o = v_from_bits(uo);
}

V_OP void bf16_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)extra, (void)words;
    vi re, ro;
    hstep_bf16_nearest(e, o, state, &re, &ro);
    if (state)
        vp_store_hi16_normal(code + 2 * i, re, ro);
    else
        vp_store_hi16(code + 2 * i, re, ro);
}

APPLY_BY_ENCODING(bf16)

#endif
