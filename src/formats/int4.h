/* 4-bit codes, two a byte (the even element in the low nibble); 0.5625 bytes an element. 32 elements of a row share one
 * BF16 scale s. There are two codes, by role:
 *
 *   signed x: -7 .. 7 in two's complement, nearly linear in the softsign of x / s
 *     s = BF16 up of max |x|          a = |x| * (1 / s), y = a (a (3.7 a - 10.05) + 13.4), at most 7
 *     code = floor((round(65536 y) + r) / 65536), with the sign of x      decode: x = code / (14 - |code|) * s
 *   non-negative x: a window of 16 floats on a fixed grid of sqrt(x), 0 .. 15
 *     codes 6 .. 15 are the floats of 2 mantissa bits from the edge s up, two and a half octaves; codes 0 .. 5 those of
 *     one mantissa bit below it, three octaves. With d = (pattern of sqrt x) - (pattern of s):
 *     code = max(0, 6 + floor(((d < 0 ? floor(d / 2) : d) + 32 r + 16) / 2^21))
 *     decode: y = float of pattern s + 2^21 k, or s + 2^22 k for k = code - 6 < 0; x = y y
 *     s: pattern of sqrt(max x) - 15, up to a multiple of 2^22 if it is more than half of one above it, else down,
 *     - 4 * 2^22
 *
 * "BF16 up" rounds up, so a block that is read and written keeps its scale. r is this element's 16 random bits, or 2^15
 * for nearest. A block whose maximum is below 2^-126 is all zero, with scale 0. In any other block no second moment
 * decodes below the square of the smallest code, which is 1/27 to 1/40 of the block's largest root. Such a value is too
 * large, which only shortens a step. x is the stored value of a second moment: it is divided by the state's grid, which
 * decays with it (grid.h, int8.h).
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

#define int4_ROW "int4", "4-bit codes, BF16 scale per 32", ROWS, U8, BF16, \
    roles = SIGNED | NONNEG, code_bits = 4, block = 32, stochastic = 1, root = 2

/* Values by nibble. Code 8 is never written and counts as -7. */
V_TABLE float int4_signed[16] = {
    0.0f,        1 / 13.0f,  2 / 12.0f,  3 / 11.0f, 4 / 10.0f,  5 / 9.0f,   6 / 8.0f,   7 / 7.0f,
    -7 / 7.0f,   -7 / 7.0f,  -6 / 8.0f,  -5 / 9.0f, -4 / 10.0f, -3 / 11.0f, -2 / 12.0f, -1 / 13.0f,
};

/* Returns a block's scale as a pattern. The window ends at 2^-73, because a quarter of its square is still above zero.
 * A signed scale is at most the largest BF16 number. */
V_OP vi int4_scale(vf maximum, const int nonneg)
{
    if (nonneg) {
        vi edge = vi_and(vi_add(v_bits(maximum), vi_set((1u << 21) - 16 - (4u << 22))), vi_set(0xffc00000));
        return vi_select(v_lt(maximum, v_set(0x1p-63f)), vi_set(0), vi_max(edge, vi_set(57u << 23)));
    }
    vi up = vi_and(vi_add(v_bits(maximum), vi_set(0xffff)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(0x1p-126f)), vi_set(0), vi_min(up, vi_set(0x7f7f0000)));
}

/* Returns 1 / s for signed states. For second moments it returns the edge, or one out of reach if all are zero. */
V_OP vf int4_inverse(vi scale, const int nonneg)
{
    if (nonneg) return v_from_bits(vi_select(vi_eq(scale, vi_set(0)), vi_set(0x7f000000), scale));
    return v_div0(v_set(1.0f), v_from_bits(scale));
}

V_OP vf int4_stash(vf x, const int nonneg) { return nonneg ? v_sqrt(x) : x; }

/* Returns a code with its dropped part: times 2^21 and at least 0 for a second moment, times 2^16 for a signed state.
 * draw is the random bits of a signed state. For a second moment it is 32 times them, and other bits of it do not
 * matter. */
V_OP vi int4_position(vf stashed, vf inverse, vi draw, const int nonneg)
{
    if (nonneg) {
        /* Below the edge it is floor((floor(d / 2) + 32 r + 16) / 2^21). The maximum finds the way: d / 2 > d below
         * zero. */
        vi d = vi_sub(v_bits(stashed), v_bits(inverse)), fine = vi_max(d, vi_sra(d, 1));
        vi part = vi_or(vi_and(draw, vi_set(0x1fffe0)), vi_set((6u << 21) + 16));
        return vi_max(vi_add(fine, part), vi_set(0));
    }
    vi sign = vi_and(v_bits(stashed), vi_set(0x80000000));
    vf a = v_mul(v_abs(stashed), inverse);
    /* All factors are times 2^16, which changes no bit. */
    vf y = v_mul(a, v_add(v_mul(a, v_sub(v_mul(a, v_set(0x1p16f * 3.7f)), v_set(0x1p16f * 10.05f))),
                          v_set(0x1p16f * 13.4f)));
    vf scaled = v_min(y, v_set(0x1p16f * 7.0f));
    return vi_add(v_round(v_from_bits(vi_or(v_bits(scaled), sign))), draw);
}

V_OP vi int4_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    if (nonneg) return vi_shr(int4_position(stashed, inverse, vi_shl(random, 5), 1), 21);
    return vi_sra(int4_position(stashed, inverse, random, 0), 16);
}

V_OP vf int4_value(vi code, vf scale, const int nonneg)
{
    if (!nonneg) return v_mul(v_lookup16(int4_signed, code), scale);
    /* Steps below the edge are twice as long. A scale of 0 becomes 6 of those, so that code 0 decodes as 0. */
    vi steps = vi_shl(vi_sub(code, vi_set(6)), 21), edge = vi_max(v_bits(scale), vi_set(6u << 22));
    vf y = v_from_bits(vi_add(edge, vi_min(steps, vi_add(steps, steps))));
    return v_mul(y, y);
}

V_OP void int4_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    (void)nonneg;
    vi bytes = vi_load_u8(code + i / 2);
    *e = vi_and(bytes, vi_set(15));
    *o = vi_shr(bytes, 4);
}

V_OP void int4_store(char *code, int64_t i, vi e, vi o)
{
    vi_store_u8(code + i / 2, vi_or(vi_and(e, vi_set(15)), vi_shl(o, 4)));
}

/* Does int4_code() and int4_store() for a pair. The odd element's code is shifted straight to the high nibble. */
#define int4_ENCODE HSTEP_PAIR(PAIRED)
V_OP void int4_encode_pair(char *code, int64_t i, vf e, vf o, vf inverse, vi words, const int nonneg)
{
    const vi low = vi_set(15), high = vi_set(15 << 4);
    vi bytes;
    if (nonneg) {
        vi ce = int4_position(e, inverse, vi_shl(words, 5), 1), co = int4_position(o, inverse, vi_shr(words, 11), 1);
        bytes = vi_or(vi_shr(ce, 21), vi_and(vi_shr(co, 17), high));
    } else {
        vi ce = int4_position(e, inverse, vi_and(words, vi_set(0xffff)), 0);
        vi co = int4_position(o, inverse, vi_shr(words, 16), 0);
        bytes = vi_or(vi_and(vi_shr(ce, 16), low), vi_and(vi_shr(co, 12), high));
    }
    vi_store_u8(code + i / 2, bytes);
}

#endif
