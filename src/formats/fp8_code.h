/* fp32 to and from 8-bit floats of 4 or 5 exponent bits, by patterns, for every format that stores them. A code's
 * magnitude is exponent << mantissa | mantissa bits. Below the smallest normal number its value is magnitude * smallest
 * / 2^mantissa. Codes of infinities and NaNs are never written. They would decode as the finite numbers that their
 * fields give.
 *
 * Subnormal codes are handled without fp32 subnormals and without a select. Of two candidates the right one is the
 * larger pattern when encoding, and the smaller value when decoding. */
#ifndef HSTEP_FP8_CODE_H
#define HSTEP_FP8_CODE_H

#include "formats/common.h"

struct hstep_fp8 { int mantissa, bias; float smallest, largest; }; /* smallest normal, largest finite */
#define HSTEP_E4M3 ((const struct hstep_fp8){3, 7, 0x1p-6f, 448.0f})
#define HSTEP_E5M2 ((const struct hstep_fp8){2, 15, 0x1p-14f, 57344.0f})

/* Returns the magnitude of t's code. Requires 0 <= t <= largest. random: 16 random bits, or 2^15 for nearest (ties away
 * from zero). The sum t + smallest has a fixed exponent, so its mantissa counts in equal steps. The octave that it adds
 * is taken off again. A value within seven units of the last place of fp32 beside a code becomes that code, with any
 * random bits. */
V_OP vi hstep_fp8_code(vf t, vi random, const struct hstep_fp8 f)
{
    const int shift = 23 - f.mantissa;
    vi fixed = vi_sub(v_bits(v_add(t, v_set(f.smallest))), vi_set(1u << 23));
    vi rounded = vi_add(vi_max(v_bits(t), fixed), vi_add(vi_shl(random, shift - 16), vi_set(1u << (shift - 17))));
    return vi_sub(vi_shr(rounded, shift), vi_set((uint32_t)(127 - f.bias) << f.mantissa));
}

/* Returns the code's magnitude rounded to nearest, ties to even, and saturated, as conversion instructions do. Below
 * the smallest normal number it adds a number whose unit in the last place is a subnormal step, which rounds by
 * itself. */
V_OP vi hstep_fp8_nearest_even(vf t, const struct hstep_fp8 f)
{
    const int shift = 23 - f.mantissa;
    vi u = v_bits(v_min(t, v_set(f.largest)));
    vi half = vi_add(vi_and(vi_shr(u, shift), vi_set(1)), vi_set((1u << (shift - 1)) - 1));
    vi normal = vi_sub(vi_shr(vi_add(u, half), shift), vi_set((uint32_t)(127 - f.bias) << f.mantissa));
    vf unit = v_set(f.smallest * (float)(1 << shift));
    vi subnormal = vi_sub(v_bits(v_add(t, unit)), v_bits(unit));
    return vi_select(v_lt(t, v_set(f.smallest)), subnormal, normal);
}

V_OP vf hstep_fp8_value(vi magnitude, const struct hstep_fp8 f)
{
    vi base = vi_set((uint32_t)(127 - f.bias) << 23);
    vf normal = v_from_bits(vi_add(vi_shl(magnitude, 23 - f.mantissa), base));
    return v_min(normal, v_sub(v_add(normal, normal), v_set(f.smallest)));
}

V_OP vf hstep_fp8_signed_value(vi code, vf scale, const struct hstep_fp8 f)
{
    vf magnitude = v_mul(hstep_fp8_value(vi_and(code, vi_set(0x7f)), f), scale);
    return v_from_bits(vi_or(v_bits(magnitude), vi_shl(vi_and(code, vi_set(0x80)), 24)));
}

/* ---- Blocks scaled by their maximum: fp8 and fp8-e5m2 ----
 *
 * Returns the scale of signed states: s = max / largest, one unit in the last place up. |x| * fl(1 / s) then rounds to
 * `largest` at most. The scale is never subnormal. */
V_OP vi hstep_fp8_scale(vf maximum, const struct hstep_fp8 f)
{
    vi up = vi_add(v_bits(v_div(maximum, v_set(f.largest))), vi_set(1));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_max(up, vi_set(0x00800000)));
}

/* Returns the scale of second moments, a power of two. Their grid of floats then stays in place, whatever the largest
 * does (int8.h). The largest number has the mantissa 1.75, and up to seven units more count as that. */
V_OP vi hstep_fp8_octave(vf maximum, const struct hstep_fp8 f)
{
    vi top = vi_and(vi_add(v_bits(maximum), vi_set(0x1ffff8)), vi_set(0xff800000));
    vi scale = vi_sub(top, vi_sub(v_bits(v_set(f.largest)), vi_set(0x3fe00000)));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_max(scale, vi_set(0x00800000)));
}

V_OP vi hstep_fp8_block_code(vf x, vf inverse, vi random, const int nonneg, const struct hstep_fp8 f)
{
    if (nonneg) {
        /* The least code: 1 if x is positive, but 0 in a block of scale 0. */
        vi least = vi_min(v_bits(x), vi_min(v_bits(inverse), vi_set(1)));
        return vi_max(hstep_fp8_code(v_mul(x, inverse), random, f), least);
    }
    vi magnitude = hstep_fp8_code(v_mul(v_abs(x), inverse), random, f);
    /* Bit 7 of -magnitude is set unless the magnitude is 0, so there are no negative zeros. */
    vi sign = vi_and(vi_shr(v_bits(x), 24), vi_and(vi_sub(vi_set(0), magnitude), vi_set(0x80)));
    return vi_or(magnitude, sign);
}

/* Defines the functions of a format of such blocks. */
#define FP8_BLOCKS(fn, f)                                                                                       \
    V_OP vi fn##_scale(vf maximum, const int nonneg)                                                            \
    {                                                                                                           \
        return nonneg ? hstep_fp8_octave(maximum, f) : hstep_fp8_scale(maximum, f);                             \
    }                                                                                                           \
    V_OP vf fn##_inverse(vi scale, const int nonneg)                                                            \
    {                                                                                                           \
        (void)nonneg;                                                                                           \
        return v_div0(v_set(1.0f), v_from_bits(scale));                                                         \
    }                                                                                                           \
    STASH_AS_IS(fn)                                                                                             \
    V_OP vi fn##_code(vf stashed, vf inverse, vi random, const int nonneg)                                      \
    {                                                                                                           \
        return hstep_fp8_block_code(stashed, inverse, random, nonneg, f);                                       \
    }                                                                                                           \
    V_OP vf fn##_value(vi code, vf scale, const int nonneg)                                                     \
    {                                                                                                           \
        return nonneg ? v_mul(hstep_fp8_value(code, f), scale) : hstep_fp8_signed_value(code, scale, f);        \
    }                                                                                                           \
    CODES_ARE_BYTES(fn)

#endif
