/* IEEE half weight and residual, a half too; 4 bytes an element. The number meant is weight + residual / 2048.
 *
 * A change d is first taken from the residual, c = residual / 2048 - d. Then weight' = nearest(weight + c) and
 * residual' = stochastic(2048 (c + (weight - weight'))), by f16_round.h. A change of exactly zero leaves both parts as
 * they are.
 *
 * A residual is at most half a unit of the weight, so 2048 times that has the weight's own exponent. Both keep 11 bits,
 * and the pair 22, wherever a half is normal. An unscaled residual would be a multiple of 2^-24. Rms errors after
 * 20,000 random steps of 1e-5 of the weight, relative to the weight:
 *
 *   weight              1        0.02     1e-3     1e-4
 *   unscaled residual   1.0e-5   1.7e-4   2.6e-3   9.2e-3
 *   BF16 residual       8e-5 to 1e-4
 *   scaled residual     1.0e-5   1.3e-5   1.0e-5   1.9e-5
 *   fp32 weight         5e-6
 *
 * The error of the pair is below 2^-22 of the weight from 2^-13 on, and below 2^-35 further down. Weight and residual
 * saturate at 65504, so the pair does at 65536. Beside a weight that is not finite the residual is 0. A state's zeros
 * are stored as +0. */
#ifndef HSTEP_F16_KAHAN_H
#define HSTEP_F16_KAHAN_H

#include "formats/f16_round.h"

#define f16_kahan_ROW "f16-kahan", "IEEE half + residual (Kahan), residual SR", ELEMENTS, F16, F16, \
    roles = WEIGHT | SIGNED, stochastic = 1

V_OP void f16_kahan_decode(const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    vf ce, co, scale = v_set(0x1p-11f);
    vp_load_f16(code + 2 * i, e, o);
    vp_load_f16(extra + 2 * i, &ce, &co);
    *e = v_add(*e, v_mul(ce, scale));
    *o = v_add(*o, v_mul(co, scale));
}

/* Limits the unscaled residual beside a saturated weight. Returns 0 if the weight is not finite, where Inf - Inf is a
 * NaN. */
V_OP vf hstep_f16_kahan_rest(vf weight, vf c)
{
    vf largest = v_set(65504.0f / 2048.0f);
    c = v_max(v_min(c, largest), v_neg(largest));
    return v_select(vi_gt(hstep_f16_magnitude(v_bits(weight)), vi_set(0x7f7fffff)), v_set(0.0f), c);
}

/* Computes the residuals to store beside these weights. */
V_OP void hstep_f16_kahan_residual(vf we, vf wo, vf ce, vf co, vi words, vf *re, vf *ro)
{
    vf scale = v_set(2048.0f);
    vi largest = vi_max(hstep_f16_magnitude(v_bits(we)), hstep_f16_magnitude(v_bits(wo)));
    if (__builtin_expect(vm_any(vi_gt(largest, vi_set(0x477fdfff))), 0)) {
        ce = hstep_f16_kahan_rest(we, ce);
        co = hstep_f16_kahan_rest(wo, co);
    }
    hstep_f16_stochastic(v_mul(ce, scale), v_mul(co, scale), words, re, ro);
}

V_OP void f16_kahan_encode(char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    vf se = e, so = o, we, wo, re, ro;
    hstep_f16_saturate(&se, &so);
    we = hstep_f16_nearest(se);
    wo = hstep_f16_nearest(so);
    hstep_f16_kahan_residual(we, wo, v_sub(e, we), v_sub(o, wo), words, &re, &ro);
    if (state) {
        we = hstep_f16_positive_zero(we);
        wo = hstep_f16_positive_zero(wo);
        re = hstep_f16_positive_zero(re);
        ro = hstep_f16_positive_zero(ro);
    }
    vp_store_f16(code + 2 * i, we, wo);
    vp_store_f16(extra + 2 * i, re, ro);
}

V_OP void f16_kahan_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    (void)we, (void)wo;
    vf we1, wo1, ce1, co1, ce2, co2, scale = v_set(0x1p-11f), zero = v_set(0.0f);
    vp_load_f16(code + 2 * i, &we1, &wo1);
    vp_load_f16(extra + 2 * i, &ce1, &co1);
    vf ce = v_sub(v_mul(ce1, scale), de), co = v_sub(v_mul(co1, scale), d_o);
    vf we2 = v_add(we1, ce), wo2 = v_add(wo1, co);
    hstep_f16_saturate(&we2, &wo2);
    we2 = hstep_f16_nearest(we2);
    wo2 = hstep_f16_nearest(wo2);
    ce = v_add(ce, v_sub(we1, we2));
    co = v_add(co, v_sub(wo1, wo2));
    hstep_f16_kahan_residual(we2, wo2, ce, co, words, &ce2, &co2);
    /* A change of 0 keeps both parts. Otherwise a residual that was rounded up to half a unit would move the weight. */
    vm same_e = v_eq(de, zero), same_o = v_eq(d_o, zero);
    vp_store_f16(code + 2 * i, v_select(same_e, we1, we2), v_select(same_o, wo1, wo2));
    vp_store_f16(extra + 2 * i, v_select(same_e, ce1, ce2), v_select(same_o, co1, co2));
}

#endif
