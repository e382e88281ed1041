/* 4-bit codes, two a byte (the even element in the low nibble); 0.5625 bytes an element. Blocks of 32 elements of a row
 * share one BF16 scale s. There are two codes, by role:
 *
 *   signed x: -7 .. 7 in two's complement, nearly linear in the softsign of x / s
 *     s = BF16 up of max |x|          a = |x| * (1 / s), y = a (a (3.7 a - 10.05) + 13.4), at most 7
 *     code = floor((round(65536 y) + r) / 65536), with the sign of x      decode: x = code / (14 - |code|) * s
 *
 *   non-negative x: a window of 16 floats on a fixed grid of sqrt(x), 0 .. 15
 *
 *     Codes 6 .. 15 are the floats of 2 mantissa bits from the edge s up, two and a half octaves. Codes 0 .. 5 are
 *     those of one mantissa bit below the edge, three octaves. d = (pattern of sqrt x) - (pattern of s).
 *
 *     code = max(0, 6 + floor(((d < 0 ? floor(d / 2) : d) + 32 r + 16) / 2^21))
 *     decode: y = float of pattern s + 2^21 k, or s + 2^22 k for k = code - 6 < 0; x = y y
 *     s: pattern of sqrt(max x) - 15, up to a multiple of 2^22 if it is more than half of one above it, else down,
 *     - 4 * 2^22
 *
 * "BF16 up" rounds up, so a block that is read and written keeps its scale. The 16 random bits of this element are r;
 * to nearest, r is 2^15. A block whose maximum is below 2^-126 is all zero, with scale 0. In any other block no second
 * moment decodes below the square of the smallest code. That code is 1/27 to 1/40 of the block's largest root. Such a
 * value is too large, which only shortens a step. For a second moment, x is the stored value: the moment divided by the
 * state's grid, which decays with it (grid.h, int8.h).
 *
 * Reasons (docs/results.md). Against exact Adam's, updates were 0.32 off in rms with real gradients.
 * With linear codes of the root they were 0.36 off, and 0.51 with dynamic maps. Second moments on a grid of floats stay
 * representable when the scale moves, so only the amount that a step adds is rounded (int8.h). Their window must not
 * reach far below what 4 bits of m resolve. First moments have a scale that follows their maximum, and are rounded
 * stochastically too. To nearest, most of a gradient's tenth part is lost at first (+0.016 nat after 100 steps, now
 * 0.00). The cubic changes codes within 0.0022 s of the middle between two values and spares a division.
 *
 * Worst case if signed: |error of x| <= 0.1272 s to nearest, s/25 near zero, < s/4 stochastic. If non-negative: below
 * 1/4 of y above the edge, 1/2 below it, half that to nearest, from the smallest code up. */
#ifndef HSTEP_INT4_H
#define HSTEP_INT4_H

#include "vec/root_code.h"

#define int4_ROW "int4", "4-bit codes, BF16 scale per 32", ROWS, U8, BF16, \
    roles = SIGNED | NONNEG, code_bits = 4, block = 32, stochastic = 1, root = 2

/* Values by nibble. Code 8 is never written and counts as -7. */
V_TABLE float int4_signed[16] = {
    0.0f,        1 / 13.0f,  2 / 12.0f,  3 / 11.0f, 4 / 10.0f,  5 / 9.0f,   6 / 8.0f,   7 / 7.0f,
    -7 / 7.0f,   -7 / 7.0f,  -6 / 8.0f,  -5 / 9.0f, -4 / 10.0f, -3 / 11.0f, -2 / 12.0f, -1 / 13.0f,
};

/* Returns a block's scale as a pattern. A signed scale is at most the largest BF16 number. */
V_OP vi int4_scale(vf maximum, const int nonneg)
{
    if (nonneg) return hstep_edge(maximum, (1u << 21) - 16 - (4u << 22), 0xffc00000, 57u << 23);
    vi up = vi_and(vi_add(v_bits(maximum), vi_set(0xffff)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_min(up, vi_set(0x7f7f0000)));
}

/* Returns 1 / s for signed states. For second moments it returns the edge, or one out of reach if all are zero. */
V_OP vf int4_inverse(vi scale, const int nonneg)
{
    if (nonneg) return hstep_reached_edge(scale);
    return hstep_inverse(v_from_bits(scale), 1.0f, 0x1p127f);
}

V_OP vf int4_stash(vf x, const int nonneg) { return nonneg ? v_sqrt(x) : x; }

/* A second moment's code is made times 2^21. This is added to the draw, 32 times the random bits, of which these
 * count. */
#define INT4_DRAWN 0x1fffe0u
#define INT4_BASE ((6u << 21) + 16)

/* Returns a signed state's code times 2^16, with its dropped part. */
V_OP vi int4_rounded(vf stashed, vf inverse, vi random)
{
    vi sign = vi_and(v_bits(stashed), vi_set(0x80000000));
    vf a = v_mul(v_abs(stashed), inverse);
    /* All factors are times 2^16, which changes no bit. */
    vf y = v_mul(a, v_add(v_mul(a, v_sub(v_mul(a, v_set(0x1p16f * 3.7f)), v_set(0x1p16f * 10.05f))),
                          v_set(0x1p16f * 13.4f)));
    vf scaled = v_min(y, v_set(0x1p16f * 7.0f));
    return vi_add(v_round(v_from_bits(vi_or(v_bits(scaled), sign))), random);
}

V_OP vi int4_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    if (!nonneg) return vi_sra(int4_rounded(stashed, inverse, random), 16);
    vi position = hstep_position(stashed, inverse, vi_shl(random, 5), INT4_DRAWN, INT4_BASE);
    return vi_shr(vi_max(position, vi_set(0)), 21);
}

/* Returns the edge of a block of second moments. A scale of 0 becomes 6 of the steps below it, so that code 0 decodes
 * as 0. */
V_OP vi int4_edge(vf scale) { return vi_max(v_bits(scale), vi_set(6u << 22)); }

/* Returns the pattern of a second moment's root. Steps below the edge are twice as long. */
V_OP vi int4_unsquared(vi code, vi edge)
{
    vi steps = vi_shl(vi_sub(code, vi_set(6)), 21);
    return vi_add(edge, vi_min(steps, vi_add(steps, steps)));
}

V_OP vf int4_square(vi root) { return v_mul(v_from_bits(root), v_from_bits(root)); }

V_OP vf int4_value(vi code, vf scale, const int nonneg)
{
    if (nonneg) return int4_square(int4_unsquared(code, int4_edge(scale)));
    return v_mul(v_lookup16(int4_signed, code), scale);
}

V_OP void int4_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    (void)nonneg;
    vi bytes = vi_load_u8(code + i / 2);
    *e = vi_and(bytes, vi_set(15));
    *o = vi_shr(bytes, 4);
}

/* Does int4_load() and int4_value() for a pair, if an instruction set has hstep_int4_roots(), which does
 * int4_unsquared() for a pair. */
#ifdef hstep_int4_roots
#define int4_DECODE HSTEP_PAIR(PAIRED)
V_OP void int4_decode_pair(const char *code, int64_t i, vf scale, vf *e, vf *o, const int nonneg)
{
    vi ce, co;
    if (nonneg) {
        hstep_int4_roots(code + i / 2, int4_edge(scale), &ce, &co);
        *e = int4_square(ce);
        *o = int4_square(co);
        return;
    }
    int4_load(code, i, &ce, &co, nonneg);
    *e = int4_value(ce, scale, nonneg);
    *o = int4_value(co, scale, nonneg);
}
#endif

V_OP void int4_store(char *code, int64_t i, vi e, vi o)
{
    vi_store_u8(code + i / 2, vi_or(vi_and(e, vi_set(15)), vi_shl(o, 4)));
}

/* Does int4_code() and int4_store() for a pair. The odd element's code is shifted straight to the high nibble. */
#define int4_ENCODE HSTEP_PAIR(PAIRED)
V_OP void int4_encode_pair(char *code, int64_t i, vf e, vf o, vf inverse, vi words, const int nonneg)
{
    const vi low = vi_set(15), high = vi_set(15 << 4);
    vi ce, co, bytes;
    if (nonneg) {
        hstep_positions(e, o, inverse, words, 5, INT4_DRAWN, INT4_BASE, &ce, &co);
        bytes = vi_or(vi_shr(vi_max(ce, vi_set(0)), 21), vi_and(vi_shr(vi_max(co, vi_set(0)), 17), high));
    } else {
        ce = int4_rounded(e, inverse, vi_and(words, vi_set(0xffff)));
        co = int4_rounded(o, inverse, vi_shr(words, 16));
        bytes = vi_or(vi_and(vi_shr(ce, 16), low), vi_and(vi_shr(co, 12), high));
    }
    vi_store_u8(code + i / 2, bytes);
}

#endif
