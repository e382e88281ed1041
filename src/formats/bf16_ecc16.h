/* BF16 weight and a signed 16-bit error code e; 4 bytes an element. Together they are exactly fp32:
 *
 *   e = signed low half of the pattern u      weight = (u - e) >> 16      decode: (weight << 16) + e
 *
 * Arithmetic is modulo 2^32. Every pattern but NaN therefore comes back, even if its weight alone rounds to infinity. A
 * NaN becomes the quiet one of its sign, with e = 0. */
#ifndef HSTEP_BF16_ECC16_H
#define HSTEP_BF16_ECC16_H

#include "formats/bf16_round.h"

#define bf16_ecc16_ROW "bf16-ecc16", "BF16 + 16-bit error code: all of fp32", ELEMENTS, BF16, I16, \
    roles = WEIGHT | SIGNED | NONNEG, stochastic = 0

V_OP void bf16_ecc16_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    vi we, wo, ce, co;
    vp_load_hi16(code + 2 * i, &we, &wo);
    vp_load_s16(extra + 2 * i, &ce, &co);
    *e = v_from_bits(hstep_bf16_ecc(we, ce));
    *o = v_from_bits(hstep_bf16_ecc(wo, co));
}

V_OP vi hstep_ecc16_quiet(vi u)
{
    vi quiet = vi_or(vi_and(u, vi_set(0x80000000)), vi_set(0x7fc00000));
    return vi_select(vi_gt(vi_and(u, vi_set(0x7fffffff)), vi_set(0x7f800000)), quiet, u);
}

V_OP void bf16_ecc16_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)words;
    vi ue = hstep_ecc16_quiet(v_bits(e)), uo = hstep_ecc16_quiet(v_bits(o));
    if (state) ue = hstep_flush(ue), uo = hstep_flush(uo);
    vi ce = vi_sra(vi_shl(ue, 16), 16), co = vi_sra(vi_shl(uo, 16), 16);
    vp_store_hi16(code + 2 * i, vi_sub(ue, ce), vi_sub(uo, co));
    vp_store_16(extra + 2 * i, ce, co);
}

APPLY_BY_ENCODING(bf16_ecc16)

#endif
