/* IEEE half weight and a signed 16-bit error code e; 4 bytes an element. It is f16_ecc8.h with 26 bits of mantissa, to
 * nearest even:
 *
 *   e = signed low half of p      W = (p + 0x8000) >> 16      weight = W with the sign      decode: p = 65536 W + e
 *
 * The pair is exactly fp32 from 2^-17 up to 65520 - 2^-8. Below, it is a multiple of 2^-40 with an error of at most
 * 2^-41. A finite value saturates at that upper end (0x7BFF, e = 0x7FF8). NaN keeps its sign, with e = 0. A state that
 * rounds to zero is stored as +0. */
#ifndef HSTEP_F16_ECC16_H
#define HSTEP_F16_ECC16_H

#include "formats/f16_round.h"

#define f16_ecc16_ROW "f16-ecc16", "IEEE half + 16-bit error code", ELEMENTS, F16, I16, \
    roles = WEIGHT | SIGNED, stochastic = 0

V_OP vf hstep_f16_ecc16_value(vi code, vi e)
{
    vi p = vi_add(vi_shl(vi_and(code, vi_set(0x7fff)), 16), e);
    return hstep_f16_extended(code, p, vi_add(vi_sra(p, 3), vi_set(0x38000000)), 0x1p-40f);
}

V_OP void f16_ecc16_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    vi we, wo, ce, co;
    vp_load_s16(code + 2 * i, &we, &wo);
    vp_load_s16(extra + 2 * i, &ce, &co);
    *e = hstep_f16_ecc16_value(we, ce);
    *o = hstep_f16_ecc16_value(wo, co);
}

V_OP vi hstep_f16_ecc16_normal(vi u) { return vi_shl(vi_sub(hstep_f16_magnitude(u), vi_set(0x38000000)), 3); }

V_OP vi hstep_f16_ecc16_exact(vi u)
{
    vi magnitude = hstep_f16_magnitude(u);
    vi normal = hstep_f16_ecc16_normal(vi_min(magnitude, vi_set(0x477fefff)));
    normal = vi_select(vi_gt(magnitude, vi_set(0x7f7fffff)), vi_set(0x7c000000), normal);
    normal = vi_select(vi_gt(magnitude, vi_set(0x7f800000)), vi_set(0x7e000000), normal);
    vi tiny = v_round(v_mul(v_from_bits(vi_min(magnitude, vi_set(0x38800000))), v_set(0x1p40f)));
    return vi_select(hstep_f16_tiny(magnitude), tiny, normal);
}

V_OP void f16_ecc16_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    (void)words;
    vi ue = v_bits(e), uo = v_bits(o), pe, po;
    if (__builtin_expect(hstep_f16_special(ue, uo), 0)) {
        pe = hstep_f16_ecc16_exact(ue);
        po = hstep_f16_ecc16_exact(uo);
    } else {
        pe = hstep_f16_ecc16_normal(ue);
        po = hstep_f16_ecc16_normal(uo);
    }
    vi we = vi_shr(vi_add(pe, vi_set(0x8000)), 16), wo = vi_shr(vi_add(po, vi_set(0x8000)), 16);
    vp_store_16(code + 2 * i, hstep_f16_signed_code(we, pe, ue, state), hstep_f16_signed_code(wo, po, uo, state));
    vp_store_16(extra + 2 * i, pe, po);
}

V_OP void f16_ecc16_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    (void)words;
    f16_ecc16_encode(code, extra, i, v_sub(we, de), v_sub(wo, d_o), words, 0);
}

#endif
