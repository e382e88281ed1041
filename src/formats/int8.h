/* 8-bit codes of a root, one BF16 scale per 32 elements of a row; 1.0625 bytes an element. Two codes, by role:
 *
 *   signed x: codes linear in sqrt |x|, -127 .. 127
 *     s = BF16 up of sqrt(max |x|) / 127      T = round(sqrt |x| * (65536 / s)), with the sign of x
 *     code = floor((T + r) / 65536)           decode: y = code * s, x = y |y|
 *   non-negative x: sqrt(x) as a float of 3 exponent and 5 mantissa bits, 0 .. 255
 *     s = BF16 up of sqrt(max x) / 252        t = sqrt(x) * (1 / s), at most 252
 *     code = max(0, floor((pattern of t + 4 r) / 2^18) - 127 * 32)
 *     decode: y = (float of pattern (code + 127 * 32) * 2^18) * s, x = y y
 *
 * "BF16 up" enlarges by 2^-21 and rounds up, which keeps every code in range without a clamp. r is this element's 16 random
 * bits (so y is unbiased), or 2^15 for nearest; codes are chosen against the stored scale, so its rounding costs no
 * accuracy. A block whose maximum is below 2^-126 is all zero, with scale 0. Otherwise no second moment decodes below
 * (s)^2, a zero one included: too large by less than 1/252 of the block's largest root, which only shortens a step.
 *
 * Why two: a second moment is written stochastically and wanders by a quarter of (step / value) in squared relative terms.
 * Linear codes of the root, 2.5 of them at 1/100 of the maximum, made updates there 15 % too large; steps of 1.6 to 3.1 %
 * of the value itself, down to 1/252 of the maximum, make it 1 %, and need no second root. Further down it must not reach,
 * or noise in v meets an exact m. First moments are not divided by, so the largest matter most there.
 * Worst case: signed |error of y| <= s/2 to nearest, < s stochastic, s <= sqrt(max |x|) / 127 * (1 + 2^-7); non-negative
 * below 2^-5 of y, from y = s up. */
#ifndef HSTEP_INT8_H
#define HSTEP_INT8_H

#define INT8_FLOAT_SHIFT 18
#define INT8_FLOAT_BASE (127u << 5)

/* From the largest stashed magnitude of a block to its scale, as the fp32 pattern of a BF16 number. */
V_OP vi int8_scale(vf maximum, const int nonneg)
{
    vf step = nonneg ? v_mul(maximum, v_set(1.0f / 252.0f)) : v_mul(v_sqrt(maximum), v_set(1.0f / 127.0f));
    vi up = vi_and(vi_add(v_bits(step), vi_set(0x10007)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(nonneg ? 0x1p-63f : 0x1p-126f)), vi_set(0), up);
}

V_OP vf int8_inverse(vi scale, const int nonneg) { return v_div0(v_set(nonneg ? 1.0f : 65536.0f), v_from_bits(scale)); }

/* What is kept of a new value until its block's scale is known: the root of a second moment (which the rule has just
 * computed), a signed value as it is. */
V_OP vf int8_stash(vf x, const int nonneg) { return nonneg ? v_sqrt(x) : x; }

V_OP vi int8_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    if (nonneg) {
        vi rounded = vi_add(v_bits(v_mul(stashed, inverse)), vi_shl(random, INT8_FLOAT_SHIFT - 16));
        return vi_max(vi_sub(vi_shr(rounded, INT8_FLOAT_SHIFT), vi_set(INT8_FLOAT_BASE)), vi_set(0));
    }
    vi sign = vi_and(v_bits(stashed), vi_set(0x80000000));
    vf scaled = v_mul(v_sqrt(v_abs(stashed)), inverse);
    return vi_sra(vi_add(v_round(v_from_bits(vi_or(v_bits(scaled), sign))), random), 16);
}

V_OP vf int8_value(vi code, vf scale, const int nonneg)
{
    if (nonneg) {
        vf y = v_mul(v_from_bits(vi_shl(vi_add(code, vi_set(INT8_FLOAT_BASE)), INT8_FLOAT_SHIFT)), scale);
        return v_mul(y, y);
    }
    vf y = v_mul(v_from_int(code), scale);
    return v_mul(y, v_abs(y));
}

V_OP void int8_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    if (nonneg)
        vp_load_u8(code + i, e, o);
    else
        vp_load_s8(code + i, e, o);
}

V_OP void int8_store(char *code, int64_t i, vi e, vi o) { vp_store_8(code + i, e, o); }

#endif
