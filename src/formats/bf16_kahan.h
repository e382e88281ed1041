/* BF16 weight and a BF16 residual c; 4 bytes an element. The number meant is weight + c.
 *
 * A change d is first taken from the residual, c32 = c - d, which keeps it to the residual's precision. Then weight' =
 * nearest(weight + c32) and c' = stochastic(c32 + (weight - weight')). Stochastic rounding lets changes below the
 * residual's last place accumulate; Kahan 1965 assumes that the residual holds them. A change of exactly zero leaves
 * both parts as they are. The error of the pair is below 2^-16 of the weight. */
#ifndef HSTEP_BF16_KAHAN_H
#define HSTEP_BF16_KAHAN_H

#include "formats/bf16.h"

#define bf16_kahan_ROW "bf16-kahan", "BF16 + BF16 residual (Kahan), residual SR", ELEMENTS, BF16, BF16, \
    roles = WEIGHT | SIGNED, stochastic = 1

V_OP void bf16_kahan_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    vf ce, co;
    bf16_decode(code, NULL, i, e, o);
    bf16_decode(extra, NULL, i, &ce, &co);
    *e = v_add(*e, ce);
    *o = v_add(*o, co);
}

/* Returns the residuals as stored patterns. Beside a saturated weight they are cut instead of rounded, so that the pair
 * stays finite. */
V_OP void bf16_kahan_residual(vi we, vi wo, vf ce, vf co, vi words, vi *re, vi *ro)
{
    hstep_bf16_stochastic(ce, co, 1, words, re, ro);
    if (__builtin_expect(hstep_bf16_special(we, wo, 0), 0)) {
        vi limit = vi_set(0x7fffffff), largest = vi_set(0x7f7f0000);
        *re = vi_select(vi_eq(vi_and(we, limit), largest), v_bits(ce), *re);
        *ro = vi_select(vi_eq(vi_and(wo, limit), largest), v_bits(co), *ro);
    }
}

V_OP void bf16_kahan_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    vi we, wo, re, ro;
    if (state) {
        e = v_from_bits(hstep_flush(v_bits(e)));
        o = v_from_bits(hstep_flush(v_bits(o)));
    }
    hstep_bf16_nearest(e, o, state, &we, &wo);
    we = hstep_bf16_clear(we);
    wo = hstep_bf16_clear(wo);
    bf16_kahan_residual(we, wo, v_sub(e, v_from_bits(we)), v_sub(o, v_from_bits(wo)), words, &re, &ro);
    vp_store_hi16(code + 2 * i, we, wo);
    vp_store_hi16(extra + 2 * i, re, ro);
}

V_OP void bf16_kahan_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    (void)we, (void)wo;
    vi we1, wo1, ce1, co1, we2, wo2, ce2, co2;
    vp_load_hi16(code + 2 * i, &we1, &wo1);
    vp_load_hi16(extra + 2 * i, &ce1, &co1);
    vf ce = v_sub(v_from_bits(ce1), de), co = v_sub(v_from_bits(co1), d_o);
    vf e = v_add(v_from_bits(we1), ce), o = v_add(v_from_bits(wo1), co);
    /* Numbers below 2^127 never saturate, nor do their sums with what rounding left. So one test serves all three
     * roundings. */
    int special = hstep_bf16_special(v_bits(e), v_bits(o), 0) | hstep_bf16_special(v_bits(ce), v_bits(co), 1);
    if (__builtin_expect(special, 0)) {
        hstep_bf16_nearest(e, o, 0, &we2, &wo2);
        we2 = hstep_bf16_clear(we2);
        wo2 = hstep_bf16_clear(wo2);
        ce = v_add(ce, v_sub(v_from_bits(we1), v_from_bits(we2)));
        co = v_add(co, v_sub(v_from_bits(wo1), v_from_bits(wo2)));
        bf16_kahan_residual(we2, wo2, ce, co, words, &ce2, &co2);
    } else {
        we2 = hstep_bf16_clear(vi_add(v_bits(e), hstep_bf16_half(v_bits(e))));
        wo2 = hstep_bf16_clear(vi_add(v_bits(o), hstep_bf16_half(v_bits(o))));
        ce = v_add(ce, v_sub(v_from_bits(we1), v_from_bits(we2)));
        co = v_add(co, v_sub(v_from_bits(wo1), v_from_bits(wo2)));
        ce2 = vi_add(v_bits(ce), vi_and(words, vi_set(0xffff)));
        co2 = vi_add(v_bits(co), vi_shr(words, 16));
    }
    /* A change of 0 keeps both parts. Otherwise a residual that was rounded up to half a unit would move the weight. */
    vm same_e = v_eq(de, v_set(0.0f)), same_o = v_eq(d_o, v_set(0.0f));
    vp_store_hi16(code + 2 * i, vi_select(same_e, we1, we2), vi_select(same_o, wo1, wo2));
    vp_store_hi16(extra + 2 * i, vi_select(same_e, ce1, ce2), vi_select(same_o, co1, co2));
}

#endif
