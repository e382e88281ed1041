/* 8-bit codes of a root; 1.0625 bytes an element. 32 elements of a row share one BF16 scale s. There are two codes, by
 * role:
 *
 *   signed x: codes linear in sqrt |x|, -127 .. 127
 *     s = BF16 up of sqrt(max |x|) / 127      a = max(0, |x| (65536 / s) (65536 / s) - r (65536 - r))
 *     code = floor((round(sqrt a) + r) / 65536), with the sign of x      decode: y = code * s, x = y |y|
 *
 *   non-negative x: a window of 256 floats on a fixed grid of sqrt(x), 0 .. 255
 *
 *     Codes 128 .. 255 are the floats of 5 mantissa bits from the edge s up, four octaves. Codes 0 .. 127 are those of
 *     4 mantissa bits below the edge, eight octaves. d = (pattern of sqrt x) - (pattern of s).
 *
 *     code = max(0, 128 + floor(((d < 0 ? floor(d / 2) : d) + 16 floor(r / 4) + 8) / 2^18))
 *     decode: y = float of pattern s + 2^18 k, or s + 2^19 k for k = code - 128 < 0; x = y y
 *     s: pattern of sqrt(max x) - 7 - 127 * 2^18, up to a multiple of 2^19
 *
 * "BF16 up" enlarges by 2^-21 and rounds up, so that every code is in range without a clamp. The 16 random bits of this
 * element are r; to nearest, r is 2^15. With random bits x is unbiased if signed, and y if not. Codes are chosen
 * against the stored scale, so its rounding costs no accuracy. A block whose maximum is below 2^-126 is all zero, with
 * scale 0. In any other block no second moment decodes below the square of the smallest code, not even a zero. This is
 * 2^-11 to 2^-12 of the block's largest root, which only shortens a step.
 *
 * For a second moment, x is the stored value: the moment divided by the state's grid, which decays with it (grid.h).
 * Values up to seven units in the last place beside a code become that code, with any r. The largest code's value asks
 * for the same s again. So a pure decay, rounded in fp32 at each step, changes nothing.
 *
 * Reasons for two codes. A second moment is written stochastically. It wanders by a quarter of (step / value) in
 * squared relative terms, so its codes are floats. It wanders most if its scale follows the maximum, because every
 * change of the scale rounds all 32 elements again. On a grid of floats a stored value stays representable under any
 * scale. Only the amount that the step adds is rounded. The scale tells where the window begins (docs/results.md).
 * Nothing is divided by first moments, so the largest matter most. They are unbiased themselves,
 * not their roots. With unbiased roots and a tenth of a gradient at a time, small elements would grow: those of a
 * ten-thousandth of their block's largest would come out twice as large.
 *
 * Worst case if signed: |error of y| < 0.71 s to nearest (of x between k^2 and (k + 1)^2), < s stochastic. Here s <=
 * sqrt(max |x|) / 127 * (1 + 2^-7). If non-negative: below 2^-5 of y above the edge, 2^-4 below it. */
#ifndef HSTEP_INT8_H
#define HSTEP_INT8_H

#include "vec/root_code.h"

#define int8_ROW "int8", "8-bit root codes, BF16 scale per 32", ROWS, I8, BF16, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 32, stochastic = 1, root = 2

/* Returns a block's scale, as the fp32 pattern of a BF16 number. Takes the largest magnitude, or the largest root for
 * second moments. */
V_OP vi int8_scale(vf maximum, const int nonneg)
{
    if (nonneg) return hstep_edge(maximum, (1u << 19) - 8 - (127u << 18), 0xfff80000, 62u << 23);
    vf step = v_mul(v_sqrt(maximum), v_set(1.0f / 127.0f));
    vi up = vi_and(vi_add(v_bits(step), vi_set(0x10007)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), up);
}

/* Returns 65536 / s for signed states. The codes of second moments need no arithmetic on floats. For them it returns
 * the edge, or one out of reach if all are zero. */
V_OP vf int8_inverse(vi scale, const int nonneg)
{
    if (nonneg) return hstep_reached_edge(scale);
    return hstep_inverse(v_from_bits(scale), 65536.0f, 0x1p58f);
}

/* Returns the form of a new value that is kept until its block's scale is known. For a second moment it is the root,
 * which the rule has just computed. */
V_OP vf int8_stash(vf x, const int nonneg)
{
    return nonneg ? v_sqrt(x) : x;
}

/* A second moment's code is made times 2^18. It may be below zero. This is added to the draw, four times the random
 * bits, of which these count. */
#define INT8_DRAWN 0x3fff0u
#define INT8_BASE ((128u << 18) + 8)

V_OP vi int8_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    if (nonneg) {
        vi position = hstep_position(stashed, inverse, vi_shl(random, 2), INT8_DRAWN, INT8_BASE);
        return vi_max(vi_sra(position, 18), vi_set(0));
    }
    vi magnitude = vi_shr(hstep_root_and(hstep_radicand(stashed, inverse, random), random), 16);
    vi sign = vi_sra(v_bits(stashed), 31);
    return vi_sub(vi_xor(magnitude, sign), sign);
}

/* Returns a second moment from its distance to the edge, in steps of 2^18. A scale of 0 becomes 128 steps of twice that
 * length, so that code 0 decodes as 0. */
V_OP vf int8_square(vi distance, vf scale)
{
    vf y = v_from_bits(vi_add(vi_max(v_bits(scale), vi_set(128u << 19)), distance));
    return v_mul(y, y);
}

V_OP vf int8_value(vi code, vf scale, const int nonneg)
{
    if (nonneg) {
        /* Steps below the edge are twice as long. */
        vi steps = vi_shl(vi_sub(code, vi_set(128)), 18);
        return int8_square(vi_min(steps, vi_add(steps, steps)), scale);
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

/* Does int8_load() and int8_value() for a pair, in halves of lanes as far as values fit. */
#define int8_DECODE HSTEP_PAIR(PAIRED)
V_OP void int8_decode_pair(const char *code, int64_t i, vf scale, vf *e, vf *o, const int nonneg)
{
    vi ce, co;
    if (nonneg) {
        hstep_load_distances(code + i, &ce, &co);
        *e = int8_square(ce, scale);
        *o = int8_square(co, scale);
        return;
    }
    int8_load(code, i, &ce, &co, nonneg);
    *e = int8_value(ce, scale, nonneg);
    *o = int8_value(co, scale, nonneg);
}

V_OP void int8_store(char *code, int64_t i, vi e, vi o) { vp_store_8(code + i, e, o); }

/* Does int8_code() and int8_store() for a pair, in halves of lanes as soon as codes fit them. */
#define int8_ENCODE HSTEP_PAIR(PAIRED)
V_OP void int8_encode_pair(char *code, int64_t i, vf e, vf o, vf inverse, vi words, const int nonneg)
{
    vi ce, co;
    if (nonneg) {
        hstep_positions(e, o, inverse, words, 2, INT8_DRAWN, INT8_BASE, &ce, &co);
        vh_store_u8(code + i, vi_join16(vi_sra(ce, 18), vi_sra(co, 2)));
        return;
    }
    hstep_root_codes(e, o, inverse, words, &ce, &co);
    hstep_store_signed(code + i, ce, co, e, o);
}

#endif
