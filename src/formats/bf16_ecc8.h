/* BF16 weight and a signed 8-bit error code e; 3 bytes an element. Together they are the fp32 pattern rounded
 * stochastically to its upper 24 bits (16 of significand). The split loses nothing:
 *
 *   u = 24-bit pattern << 8      e = signed byte of bits 8..15      weight = (u - (e << 8)) >> 16
 *
 * The weight alone is u rounded half away from zero. Decoding gives (weight << 16) + (e << 8). The error is below 2^-15
 * relative, and unbiased. A finite value saturates at weight 0x7F7F, e = 127. NaN keeps its sign, with e = 0. */
#ifndef HSTEP_BF16_ECC8_H
#define HSTEP_BF16_ECC8_H

#include "formats/bf16_round.h"

#define bf16_ecc8_ROW "bf16-ecc8", "BF16 + 8-bit error code: 24 bits of fp32, SR", ELEMENTS, BF16, I8, \
    roles = WEIGHT | SIGNED | NONNEG, stochastic = 1

V_OP void bf16_ecc8_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    vi we, wo, ce, co;
    vp_load_hi16(code + 2 * i, &we, &wo);
    vp_load_s8(extra + i, &ce, &co);
    *e = v_from_bits(hstep_bf16_ecc(we, vi_shl(ce, 8)));
    *o = v_from_bits(hstep_bf16_ecc(wo, vi_shl(co, 8)));
}

V_OP vi hstep_ecc8_special(vi u, vi rounded)
{
    vi magnitude = vi_and(u, vi_set(0x7fffffff)), sign = vi_and(u, vi_set(0x80000000));
    vi limit = vi_or(sign, vi_set(0x7f7f7f00));
    vi rounded_magnitude = vi_and(rounded, vi_set(0x7fffffff));
    vi r = vi_select(vi_gt(rounded_magnitude, vi_set(0x7f7f7f00)), limit, rounded);
    r = vi_select(vi_eq(magnitude, vi_set(0x7f800000)), u, r);
    return vi_select(vi_gt(magnitude, vi_set(0x7f800000)), vi_or(sign, vi_set(0x7fc00000)), r);
}

V_OP void bf16_ecc8_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    vi ue = v_bits(e), uo = v_bits(o), mask = vi_set(0xffffff00);
    vi re = vi_and(vi_add(ue, vi_and(vi_shr(words, 8), vi_set(0xff))), mask);
    vi ro = vi_and(vi_add(uo, vi_shr(words, 24)), mask);
    if (__builtin_expect(hstep_bf16_special(ue, uo, state), 0)) {
        re = hstep_ecc8_special(ue, re);
        ro = hstep_ecc8_special(uo, ro);
    }
    if (state) re = hstep_flush(re), ro = hstep_flush(ro);
    vi ce = vi_sra(vi_shl(re, 16), 24), co = vi_sra(vi_shl(ro, 16), 24);
    vp_store_hi16(code + 2 * i, vi_sub(re, vi_shl(ce, 8)), vi_sub(ro, vi_shl(co, 8)));
    vp_store_8(extra + i, ce, co);
}

APPLY_BY_ENCODING(bf16_ecc8)

#endif
