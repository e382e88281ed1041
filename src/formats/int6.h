/* 6-bit codes, four in three bytes, from the lowest bit up; 0.8125 bytes an element. Blocks of 32 elements of a row
 * share one BF16 scale s. There are two codes, by role:
 *
 *   signed x: -31 .. 31 in two's complement, linear
 *     s = BF16 up of max |x| * (2 / 31), at least 2^-126
 *     code = floor((round(131072 (x (1 / s))) + r) / 65536)      decode: x = code / 2 * s
 *
 *   non-negative x: a window of 64 floats on a fixed grid of sqrt(x), 0 .. 63
 *
 *     Codes 32 .. 63 are the floats of 4 mantissa bits from the edge s up, two octaves. Codes 0 .. 31 are those of 3
 *     mantissa bits below the edge, four octaves. d = (pattern of sqrt x) - (pattern of s).
 *
 *     code = max(0, 32 + floor(((d < 0 ? floor(d / 2) : d) + 16 floor(r / 2) + 8) / 2^19))
 *     decode: y = float of pattern s + 2^19 k, or s + 2^20 k for k = code - 32 < 0; x = y y
 *     s: pattern of sqrt(max x) - 8 - 31 * 2^19, up to a multiple of 2^20
 *
 * "BF16 up" rounds up. All codes are then in range, and a block that is read and written keeps its scale and its codes:
 * the signed values are exact in fp32. The 16 random bits of this element are r; to nearest, r is 2^15. With random
 * bits x is unbiased if signed, and y if not. A block whose maximum is below 2^-126 is all zero, with scale 0. In any
 * other block no second moment decodes below the square of the smallest code. This is 1/54 to 1/62 of the block's
 * largest root, and only shortens a step. Second moments are stored on a grid that decays with them (int8.h, grid.h).
 *
 * Reasons. The format is for Muon, whose products lift the noise of its momentum to full length where the momentum is
 * small (docs/results.md). Linear codes have no bias, and need neither a root nor a table. On recorded gradients, codes
 * of a softsign, which are denser near zero, had 6 % less noise in Muon's momentum and 20 % less in AdamW's updates.
 *
 * Worst case if signed: |error of x| <= s/4 to nearest, s/2 stochastic, times 1 + 2^-15; s <= max |x| (2 / 31) (1 +
 * 2^-7). If non-negative: below 2^-4 of y above the edge, 2^-3 below it, half that to nearest, from the smallest code
 * up. */
#ifndef HSTEP_INT6_H
#define HSTEP_INT6_H

#include "vec/root_code.h"

#define int6_ROW "int6", "6-bit codes, BF16 scale per 32", ROWS, U8, BF16, \
    roles = SIGNED | NONNEG, code_bits = 6, block = 32, stochastic = 1, root = 2

/* Returns a block's scale as a pattern. */
V_OP vi int6_scale(vf maximum, const int nonneg)
{
    if (nonneg) return hstep_edge(maximum, (1u << 20) - 8 - (31u << 19), 0xfff00000, 58u << 23);
    vi up = vi_and(vi_add(v_bits(v_mul(maximum, v_set(2.0f / 31.0f))), vi_set(0xffff)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_max(up, vi_set(0x00800000)));
}

/* Returns 1 / s for signed states. For second moments it returns the edge, or one out of reach if all are zero. */
V_OP vf int6_inverse(vi scale, const int nonneg)
{
    if (nonneg) return hstep_reached_edge(scale);
    return hstep_inverse(v_from_bits(scale), 1.0f, 0x1p125f);
}

V_OP vf int6_stash(vf x, const int nonneg) { return nonneg ? v_sqrt(x) : x; }

/* A second moment's code is made times 2^19. This is added to the draw, eight times the random bits, of which these
 * count. */
#define INT6_DRAWN 0x7fff0u
#define INT6_BASE ((32u << 19) + 8)

/* Returns a signed state's code times 2^16, with its dropped part, in the low 22 bits. The sum has 17 bits behind the
 * point. A NaN becomes the largest code. */
V_OP vi int6_rounded(vf stashed, vf inverse, vi random)
{
    vf y = v_max(v_min(v_mul(stashed, inverse), v_set(15.5f)), v_set(-15.5f));
    return vi_add(v_bits(v_add(y, v_set(96.0f))), random);
}

V_OP vi int6_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    if (!nonneg) return vi_and(vi_shr(int6_rounded(stashed, inverse, random), 16), vi_set(63));
    vi position = hstep_position(stashed, inverse, vi_shl(random, 3), INT6_DRAWN, INT6_BASE);
    return vi_shr(vi_max(position, vi_set(0)), 19);
}

/* Returns a signed state from its code in the low bits of a number's significand, where the code's lowest bit counts
 * 1/2. `zero` is the number with code 0. */
V_OP vf int6_signed(vi code, vf scale, const float zero)
{
    return v_mul(v_sub(v_from_bits(vi_xor(code, v_bits(v_set(zero)))), v_set(zero)), scale);
}

/* Returns a second moment from its code times 2^19. A scale of 0 becomes 32 of the steps below the edge, so that code 0
 * decodes as 0. */
V_OP vf int6_square(vi scaled, vf scale)
{
    vi steps = vi_sub(scaled, vi_set(32u << 19)), edge = vi_max(v_bits(scale), vi_set(32u << 20));
    vf y = v_from_bits(vi_add(edge, vi_min(steps, vi_add(steps, steps))));
    return v_mul(y, y);
}

/* Numbers whose significands end with 16, in steps of 1/2 at bit 0 and at bit 6: code 0 with its highest bit
 * inverted. */
#define INT6_EVEN (0x1p22f + 16)
#define INT6_ODD (0x1p16f + 16)

V_OP vf int6_value(vi code, vf scale, const int nonneg)
{
    return nonneg ? int6_square(vi_shl(code, 19), scale) : int6_signed(code, scale, INT6_EVEN);
}

V_OP void int6_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    (void)nonneg;
    vi pairs = vi_load_u12(code, i);
    *e = vi_and(pairs, vi_set(63));
    *o = vi_shr(pairs, 6);
}

/* Does int6_load() and int6_value() for a pair. The odd element's code stays at its place. */
#define int6_DECODE HSTEP_PAIR(PAIRED)
V_OP void int6_decode_pair(const char *code, int64_t i, vf scale, vf *e, vf *o, const int nonneg)
{
    vi pairs = vi_load_u12(code, i), low = vi_and(pairs, vi_set(63)), high = vi_and(pairs, vi_set(63 << 6));
    if (nonneg) {
        *e = int6_square(vi_shl(low, 19), scale);
        *o = int6_square(vi_shl(high, 13), scale);
    } else {
        *e = int6_signed(low, scale, INT6_EVEN);
        *o = int6_signed(high, scale, INT6_ODD);
    }
}

V_OP void int6_store(char *code, int64_t i, vi e, vi o) { vi_store_u12(code, i, vi_or(e, vi_shl(o, 6))); }

/* Does int6_code() and int6_store() for a pair. The odd element's code is shifted straight to its place. */
#define int6_ENCODE HSTEP_PAIR(PAIRED)
V_OP void int6_encode_pair(char *code, int64_t i, vf e, vf o, vf inverse, vi words, const int nonneg)
{
    const vi low = vi_set(63), high = vi_set(63 << 6);
    vi ce, co, pairs;
    if (nonneg) {
        hstep_positions(e, o, inverse, words, 3, INT6_DRAWN, INT6_BASE, &ce, &co);
        pairs = vi_or(vi_shr(vi_max(ce, vi_set(0)), 19), vi_and(vi_shr(vi_max(co, vi_set(0)), 13), high));
    } else {
        ce = int6_rounded(e, inverse, vi_and(words, vi_set(0xffff)));
        co = int6_rounded(o, inverse, vi_shr(words, 16));
        pairs = vi_or(vi_and(vi_shr(ce, 16), low), vi_and(vi_shr(co, 10), high));
    }
    vi_store_u12(code, i, pairs);
}

#endif
