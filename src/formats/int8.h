/* 8-bit codes, a window of floats for each block, one BF16 scale per 32 elements of a row; 1.0625 bytes an element. The scale is
 * the edge s of the window: finer floats begin there, coarser ones end. Two windows, by role, in fp32 patterns:
 *
 *   signed x: codes -127 .. 127, of |x| with the sign of x
 *     codes 64 .. 127 are the floats of 5 mantissa bits from s up, two octaves; codes 48 .. 63 those of 4 in the octave below it,
 *     codes 1 .. 47 those of 2 in 12 octaves more. With d = (pattern of |x|) - (pattern of s):
 *     code = max(0, 64 + floor((max(d, floor(d / 2), floor(d / 8) - 3 * 2^20) + 4 r) / 2^18))
 *     decode: float of pattern s + min(k, 2 k, 8 k + 3 * 2^23), k = 2^18 (code - 64); code 0 is 0
 *     s: pattern of max |x| - 63 * 2^18, up to a multiple of 2^21
 *   non-negative x: codes 0 .. 255 of sqrt(x)
 *     codes 128 .. 255 are the floats of 5 mantissa bits from s up, four octaves; codes 0 .. 127 those of 4 mantissa bits below it,
 *     eight octaves. With d = (pattern of sqrt x) - (pattern of s):
 *     code = max(0, 128 + floor(((d < 0 ? floor(d / 2) : d) + 16 floor(r / 4) + 8) / 2^18))
 *     decode: y = float of pattern s + 2^18 k, or s + 2^19 k for k = code - 128 < 0; x = y y
 *     s: pattern of sqrt(max x) - 7 - 127 * 2^18, up to a multiple of 2^19
 *
 * r is this element's 16 random bits, or 2^15 for nearest. A float's pattern is linear in it within an octave, so x is unbiased if
 * signed (but below code 1, 2^-14.5 of the block's largest), and its root if not. A block whose maximum is below 2^-100
 * (second moments: 2^-126) is all zero, with scale 0. Otherwise no second moment decodes below the square of the smallest code, a
 * zero one included: 2^-11 to 2^-12 of the block's largest root, which only shortens a step. Here x is what is stored of a second
 * moment: it is divided by the state's grid, which decays with it (grid.h). Up to seven units in the last place beside a code are
 * that code, with any r, and the largest code's value asks for the same s again: so a pure decay, rounded in fp32 at each step,
 * changes nothing.
 *
 * Why floats: codes that are linear, or linear in the root, of a scale that follows the block's maximum round all 32 elements again
 * whenever that moves, and know elements far below the largest to a code or two: one that rounding doubles makes an update twice
 * too large. On a grid of floats a stored value stays representable whatever the scale says, only what the step adds is rounded,
 * and its relative error has a bound over 15 octaves. Most of the bits are near the top, where most of what a block
 * does is done. The scale tells where the window begins (docs/results.md,
 * lab/int4_trials.c).
 * Worst case: signed |error of x| < 2^-5 of x above the edge, 2^-4 in the octave below, then 2^-2, half of that to nearest;
 * non-negative below 2^-5 of y above the edge, 2^-4 below it. */
#ifndef HSTEP_INT8_H
#define HSTEP_INT8_H

/* From the largest magnitude of a block (of roots for second moments) to its scale, as the fp32 pattern of a BF16 number.
 * Signed windows end above 2^-120; those of second moments at 2^-73, a quarter of whose square, which the grid may make of it, is
 * still above zero. */
V_OP vi int8_scale(vf maximum, const int nonneg)
{
    if (nonneg) {
        vi edge = vi_and(vi_add(v_bits(maximum), vi_set((1u << 19) - 8 - (127u << 18))), vi_set(0xfff80000));
        return vi_select(v_lt(maximum, v_set(0x1p-63f)), vi_set(0), vi_max(edge, vi_set(62u << 23)));
    }
    vi edge = vi_and(vi_add(v_bits(maximum), vi_set((1u << 21) - 1 - (63u << 18))), vi_set(0xffe00000));
    return vi_select(v_lt(maximum, v_set(0x1p-100f)), vi_set(0), edge);
}

/* The edge itself, since codes need no arithmetic on floats; out of reach where all are zero. */
V_OP vf int8_inverse(vi scale, const int nonneg)
{
    (void)nonneg;
    return v_from_bits(vi_select(vi_eq(scale, vi_set(0)), vi_set(0x7f000000), scale));
}

/* What is kept of a new value until its block's scale is known: of a second moment its root, which the rule has just computed. */
V_OP vf int8_stash(vf x, const int nonneg)
{
    return nonneg ? v_sqrt(x) : x;
}

V_OP vi int8_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    if (nonneg) {
        /* A coarse step is floor((floor(d / 2) + q) / 2^18), and d / 2 > d below zero. */
        vi d = vi_sub(v_bits(stashed), v_bits(inverse)), fine = vi_max(d, vi_sra(d, 1));
        vi q = vi_add(vi_and(vi_shl(random, 2), vi_set(0x3fff0)), vi_set((128u << 18) + 8));
        return vi_max(vi_sra(vi_add(fine, q), 18), vi_set(0));
    }
    /* Steps are longer below: the largest of the three lines. */
    vi d = vi_sub(v_bits(v_abs(stashed)), v_bits(inverse));
    vi line = vi_max(vi_max(d, vi_sra(d, 1)), vi_sub(vi_sra(d, 3), vi_set(3u << 20)));
    vi magnitude = vi_max(vi_sra(vi_add(line, vi_add(vi_shl(random, 2), vi_set(64u << 18))), 18), vi_set(0));
    vi sign = vi_sra(v_bits(stashed), 31);
    return vi_sub(vi_xor(magnitude, sign), sign);
}

V_OP vf int8_value(vi code, vf scale, const int nonneg)
{
    if (nonneg) {
        /* Steps below the edge are twice as long. A scale of 0 becomes 128 of those, for code 0 to come out as 0. */
        vi steps = vi_shl(vi_sub(code, vi_set(128)), 18), edge = vi_max(v_bits(scale), vi_set(128u << 19));
        vf y = v_from_bits(vi_add(edge, vi_min(steps, vi_add(steps, steps))));
        return v_mul(y, y);
    }
    vi sign = vi_sra(code, 31), magnitude = vi_sub(vi_xor(code, sign), sign);
    vi k = vi_shl(vi_sub(magnitude, vi_set(64)), 18);
    vi steps = vi_min(vi_min(k, vi_add(k, k)), vi_add(vi_shl(k, 3), vi_set(3u << 23)));
    /* No window that begins where floats end, whatever a file says. */
    vi pattern = vi_add(vi_max(v_bits(scale), vi_set(64u << 21)), steps);
    pattern = vi_select(vi_eq(magnitude, vi_set(0)), vi_set(0), pattern);
    return v_from_bits(vi_or(pattern, vi_and(sign, vi_set(0x80000000))));
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
