/* fp32 to IEEE half, for every format that stores halves. A half has 11 significant bits from 2^-14 on and is a
 * multiple of 2^-24 below. As fp32 patterns, 2^-14 is 0x38800000, and the largest half, 65504, is 0x477FE000. A half in
 * between has its low 13 bits clear.
 *
 * Stochastic rounding, here and in f16_ecc8.h: u is the unit of the result at x, the distance of its neighbours in the
 * target format. T is |x| / u * 2^16 as an integer (to nearest even), and r the element's 16 random bits. The result is
 * u * floor((T + r) / 2^16). Rounding goes away from zero with probability exactly (dropped part) while at most 16 bits
 * are dropped, for halves from 2^-17 up. Further down the probability is rounded to a multiple of 2^-16. The mean is
 * then off by at most 2^-17 u = 2^-41, and values up to 2^-41 become zero. A representable value never changes.
 *
 * NaN stays a NaN of its sign, an infinity stays, and a finite value saturates. Lanes outside 2^-14 .. 65504 take the
 * exact way. One test per pair of vectors decides. */
#ifndef HSTEP_F16_ROUND_H
#define HSTEP_F16_ROUND_H

#include "formats/common.h"

V_OP vi hstep_f16_magnitude(vi u) { return vi_and(u, vi_set(0x7fffffff)); }
V_OP vi hstep_f16_sign(vi u) { return vi_and(u, vi_set(0x80000000)); }

/* Returns the lanes whose magnitude is below 2^-14. */
V_OP vm hstep_f16_tiny(vi magnitude) { return vi_gt(vi_set(0x38800000), magnitude); }

/* Returns true if some lane is beyond the largest half. */
V_OP int hstep_f16_beyond(vi ue, vi uo)
{
    return vm_any(vi_gt(vi_max(hstep_f16_magnitude(ue), hstep_f16_magnitude(uo)), vi_set(0x477fe000)));
}

/* Returns true if some lane is outside 2^-14 .. 65504. Smaller magnitudes wrap to the top of the signed range. */
V_OP int hstep_f16_special(vi ue, vi uo)
{
    vi shift = vi_set(0x80000000 - 0x38800000);
    vi m = vi_max(vi_add(hstep_f16_magnitude(ue), shift), vi_add(hstep_f16_magnitude(uo), shift));
    return vm_any(vi_gt(m, vi_set(0x477fe000 + (0x80000000 - 0x38800000))));
}

/* Limits finite values to the largest half, and returns others as they are. */
V_OP vi hstep_f16_limit(vi u)
{
    vi magnitude = hstep_f16_magnitude(u);
    vi limited = vi_select(vi_gt(magnitude, vi_set(0x7f7fffff)), magnitude, vi_min(magnitude, vi_set(0x477fe000)));
    return vi_or(hstep_f16_sign(u), limited);
}

V_OP void hstep_f16_saturate(vf *e, vf *o)
{
    vi ue = v_bits(*e), uo = v_bits(*o);
    if (__builtin_expect(hstep_f16_beyond(ue, uo), 0)) {
        *e = v_from_bits(hstep_f16_limit(ue));
        *o = v_from_bits(hstep_f16_limit(uo));
    }
}

/* Returns x with -0 replaced by +0, for states. */
V_OP vf hstep_f16_positive_zero(vf x) { return v_select(v_eq(x, v_set(0.0f)), v_set(0.0f), x); }

/* Rounds to the nearest half, ties to even, as an fp32 number. Requires a saturated x. e is the exponent of x, but at
 * least -14. Adding 2^(e + 13) drops the bits below the half's last place. Infinities and NaN pass through it. */
V_OP vf hstep_f16_nearest(vf x)
{
    vi magnitude = hstep_f16_magnitude(v_bits(x));
    vi exponent = vi_and(vi_max(magnitude, vi_set(0x38800000)), vi_set(0x7f800000));
    vf shift = v_from_bits(vi_add(exponent, vi_set(13 << 23)));
    vi rounded = v_bits(v_sub(v_add(v_from_bits(magnitude), shift), shift));
    return v_from_bits(vi_or(hstep_f16_sign(v_bits(x)), rounded));
}

V_OP vi hstep_f16_stochastic_exact(vi u, vi r)
{
    vi magnitude = hstep_f16_magnitude(u);
    vi normal = vi_and(vi_add(magnitude, vi_shr(r, 3)), vi_set(0xffffe000));
    normal = vi_select(vi_gt(magnitude, vi_set(0x7f7fffff)), magnitude, vi_min(normal, vi_set(0x477fe000)));
    vi t = v_round(v_mul(v_from_bits(vi_min(magnitude, vi_set(0x38800000))), v_set(0x1p40f)));
    vi tiny = v_bits(v_mul(v_from_int(vi_shr(vi_add(t, r), 16)), v_set(0x1p-24f)));
    return vi_or(hstep_f16_sign(u), vi_select(hstep_f16_tiny(magnitude), tiny, normal));
}

/* Rounds a pair stochastically to halves, as fp32 numbers. One word serves both elements of a lane. */
V_OP void hstep_f16_stochastic(vf e, vf o, vi words, vf *re, vf *ro)
{
    vi ue = v_bits(e), uo = v_bits(o);
    if (__builtin_expect(hstep_f16_special(ue, uo), 0)) {
        *re = v_from_bits(hstep_f16_stochastic_exact(ue, vi_and(words, vi_set(0xffff))));
        *ro = v_from_bits(hstep_f16_stochastic_exact(uo, vi_shr(words, 16)));
        return;
    }
    vi keep = vi_set(0xffffe000);
    *re = v_from_bits(vi_and(vi_add(ue, vi_and(vi_shr(words, 3), vi_set(0x1fff))), keep));
    *ro = v_from_bits(vi_and(vi_add(uo, vi_shr(words, 19)), keep));
}

/* Returns the fp32 number of a half with an error code. The error code e continues a half's magnitude code W = 0 ..
 * 0x7BFF below its last place. With n bits of error code, p = W 2^n + e. It is the pattern of a float with the half's
 * exponents and 10 + n bits of mantissa. The argument `normal` is p as an fp32 pattern, which is right from 2^-14 on.
 * Below, p counts `unit`. */
V_OP vf hstep_f16_extended(vi code, vi p, vi normal, float unit)
{
    vi tiny = v_bits(v_mul(v_from_int(p), v_set(unit)));
    vi half = vi_and(code, vi_set(0x7fff));
    vi magnitude = vi_select(hstep_f16_tiny(normal), tiny, normal);
    vi special = vi_add(vi_shl(half, 13), vi_set(0x70000000));
    magnitude = vi_select(vi_gt(half, vi_set(0x7bff)), special, magnitude);
    return v_from_bits(vi_or(hstep_f16_sign(code), magnitude));
}

/* Returns the half's code from W and the number it was made of. A state's zero becomes +0. */
V_OP vi hstep_f16_signed_code(vi half, vi p, vi u, const int state)
{
    vi sign = vi_shr(hstep_f16_sign(u), 16);
    if (state) sign = vi_select(vi_eq(p, vi_set(0)), p, sign);
    return vi_or(half, sign);
}

#endif
