/* IEEE half weight and a signed 8-bit error code e; 3 bytes an element. Together they are a float with the half's
 * exponents and 18 bits of mantissa. p is its pattern without the sign. The split loses nothing:
 *
 *   e = signed low byte of p      W = (p - e) >> 8      weight = W with the sign      decode: p = 256 W + e
 *
 * So e counts 256ths of the distance from the weight to its neighbour on the side of e, away from zero if e is
 * positive. Just below a power of two that is the smaller distance. p is written stochastically (f16_round.h; its unit
 * is 2^-8 of the half's). This is unbiased. The error is below 2^-18 relative from 2^-14 on, and below 2^-32 further
 * down. From 2^-25 down the probability is a multiple of 2^-16. The weight alone is the number rounded half away from
 * zero. A finite value saturates at 0x7BFF, e = 127 (65519.9). NaN keeps its sign, with e = 0. A state that rounds to
 * zero is stored as +0. */
#ifndef HSTEP_F16_ECC8_H
#define HSTEP_F16_ECC8_H

#include "formats/f16_round.h"

#define f16_ecc8_ROW "f16-ecc8", "IEEE half + 8-bit error code, SR", ELEMENTS, F16, I8, \
    roles = WEIGHT | SIGNED, stochastic = 1

V_OP vf hstep_f16_ecc8_value(vi code, vi e)
{
    vi p = vi_add(vi_shl(vi_and(code, vi_set(0x7fff)), 8), e);
    return hstep_f16_extended(code, p, vi_add(vi_shl(p, 5), vi_set(0x38000000)), 0x1p-32f);
}

V_OP void f16_ecc8_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    vi we, wo, ce, co;
    vp_load_s16(code + 2 * i, &we, &wo);
    vp_load_s8(extra + i, &ce, &co);
    *e = hstep_f16_ecc8_value(we, ce);
    *o = hstep_f16_ecc8_value(wo, co);
}

/* Returns p from an fp32 pattern and 16 random bits. Requires a magnitude of 2^-14 .. 65504. */
V_OP vi hstep_f16_ecc8_normal(vi u, vi r)
{
    return vi_sub(vi_shr(vi_add(hstep_f16_magnitude(u), vi_shr(r, 11)), 5), vi_set(0x38000000 >> 5));
}

V_OP vi hstep_f16_ecc8_exact(vi u, vi r)
{
    vi magnitude = hstep_f16_magnitude(u);
    vi normal = vi_min(hstep_f16_ecc8_normal(u, r), vi_set(0x7bff7f));
    normal = vi_select(vi_gt(magnitude, vi_set(0x7f7fffff)), vi_set(0x7c0000), normal);
    normal = vi_select(vi_gt(magnitude, vi_set(0x7f800000)), vi_set(0x7e0000), normal);
    /* The whole part and the fraction are separate, because 18 + 16 bits do not fit into one integer. */
    vf t = v_mul(v_from_bits(vi_min(magnitude, vi_set(0x38800000))), v_set(0x1p32f));
    vi whole = v_round(t), rest = v_round(v_mul(v_sub(t, v_from_int(whole)), v_set(0x1p16f)));
    vi tiny = vi_add(whole, vi_sra(vi_add(rest, r), 16));
    return vi_select(hstep_f16_tiny(magnitude), tiny, normal);
}

V_OP void f16_ecc8_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    vi ue = v_bits(e), uo = v_bits(o), re = vi_and(words, vi_set(0xffff)), ro = vi_shr(words, 16), pe, po;
    if (__builtin_expect(hstep_f16_special(ue, uo), 0)) {
        pe = hstep_f16_ecc8_exact(ue, re);
        po = hstep_f16_ecc8_exact(uo, ro);
    } else {
        pe = hstep_f16_ecc8_normal(ue, re);
        po = hstep_f16_ecc8_normal(uo, ro);
    }
    vi we = vi_shr(vi_add(pe, vi_set(128)), 8), wo = vi_shr(vi_add(po, vi_set(128)), 8);
    vp_store_16(code + 2 * i, hstep_f16_signed_code(we, pe, ue, state), hstep_f16_signed_code(wo, po, uo, state));
    vp_store_8(extra + i, pe, po);
}

APPLY_BY_ENCODING(f16_ecc8)

#endif
