/* fp32 to and from 8-bit floats of 4 or 5 exponent bits, by patterns, for every format that stores them. A code's
 * magnitude is exponent << mantissa | mantissa bits; its value below the smallest normal number is magnitude * smallest
 * / 2^mantissa. Codes of infinities and NaNs are never written, and would decode as the finite numbers their fields
 * say.
 *
 * Both subnormal ways avoid arithmetic with fp32 subnormals, and need no select: the right one of two candidates is the
 * larger pattern when encoding, the smaller value when decoding. */
#ifndef HSTEP_FP8_CODE_H
#define HSTEP_FP8_CODE_H

struct hstep_fp8 { int mantissa, bias; float smallest, largest; }; /* smallest normal, largest finite */
#define HSTEP_E4M3 ((const struct hstep_fp8){3, 7, 0x1p-6f, 448.0f})
#define HSTEP_E5M2 ((const struct hstep_fp8){2, 15, 0x1p-14f, 57344.0f})

/* Magnitudes of 0 <= t <= largest. r: 16 random bits, or 2^15 for nearest (ties away from zero). The sum t + smallest
 * has a fixed exponent, so its mantissa counts in equal steps; the octave that it adds is taken off again. What is
 * within seven units of the last place of fp32 beside a code is that code, with any r. */
V_OP vi hstep_fp8_code(vf t, vi random, const struct hstep_fp8 f)
{
    const int shift = 23 - f.mantissa;
    vi fixed = vi_sub(v_bits(v_add(t, v_set(f.smallest))), vi_set(1u << 23));
    vi rounded = vi_add(vi_max(v_bits(t), fixed), vi_add(vi_shl(random, shift - 16), vi_set(1u << (shift - 17))));
    return vi_sub(vi_shr(rounded, shift), vi_set((uint32_t)(127 - f.bias) << f.mantissa));
}

/* To nearest, ties to even, saturating: what conversion instructions give. Adding a number whose unit in the last place
 * is a subnormal step rounds by itself. */
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
 * Of signed states s = max / largest, one unit in the last place up, so that |x| * fl(1 / s) rounds to `largest` at
 * most; never subnormal. */
V_OP vi hstep_fp8_scale(vf maximum, const struct hstep_fp8 f)
{
    vi up = vi_add(v_bits(v_div(maximum, v_set(f.largest))), vi_set(1));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_max(up, vi_set(0x00800000)));
}

/* Of second moments, a power of two: their grid of floats stays where it is, whatever the largest does (int8.h). The
 * largest number has 1.75 for its mantissa, and up to seven units more count as that. */
V_OP vi hstep_fp8_octave(vf maximum, const struct hstep_fp8 f)
{
    vi top = vi_and(vi_add(v_bits(maximum), vi_set(0x1ffff8)), vi_set(0xff800000));
    vi scale = vi_sub(top, vi_sub(v_bits(v_set(f.largest)), vi_set(0x3fe00000)));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_max(scale, vi_set(0x00800000)));
}

V_OP vf hstep_fp8_inverse(vi scale) { return v_div0(v_set(1.0f), v_from_bits(scale)); }

V_OP vi hstep_fp8_block_code(vf x, vf inverse, vi random, const int nonneg, const struct hstep_fp8 f)
{
    if (nonneg) {
        /* 1 where x is positive, 0 in a block of scale 0. */
        vi least = vi_min(v_bits(x), vi_min(v_bits(inverse), vi_set(1)));
        return vi_max(hstep_fp8_code(v_mul(x, inverse), random, f), least);
    }
    vi magnitude = hstep_fp8_code(v_mul(v_abs(x), inverse), random, f);
    /* Bit 7 of -magnitude is set unless that is 0: no negative zeros. */
    vi sign = vi_and(vi_shr(v_bits(x), 24), vi_and(vi_sub(vi_set(0), magnitude), vi_set(0x80)));
    return vi_or(magnitude, sign);
}

#endif
