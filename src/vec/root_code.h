/* The operations behind codes of square roots. An instruction set may define its own version of some
 * (vec/README.md). */
#ifndef HSTEP_ROOT_CODE_H
#define HSTEP_ROOT_CODE_H

/* Returns round(sqrt(max(a, 0))) + r. Callers use bits 16 and up. Requires a < 2^46 and r < 2^16. */
V_OP vi hstep_root_and(vf a, vi r) { return vi_add(v_round(v_sqrt(v_max(a, v_set(0.0f)))), r); }

/* Returns a power of two over a scale, or +0 if the scale is 0. The scale is a BF16 number, 0 or 2^-126 to `most`. An
 * instruction set may have its own version. */
#ifndef hstep_inverse
V_OP vf hstep_inverse(vf scale, const float power, const float most)
{
    (void)most;
    return v_div0(v_set(power), scale);
}
#endif

/* Returns the edge of a block of second moments, as a pattern, from its largest root. `added` moves the root down by
 * the codes above the edge, and `mask` leaves multiples of a step. It is 0 if all roots are below 2^-63. The smallest
 * edge is `least`, with which the window ends at 2^-73: a quarter of its square is still above zero. */
V_OP vi hstep_edge(vf maximum, const uint32_t added, const uint32_t mask, const uint32_t least)
{
    vi edge = vi_and(vi_add(v_bits(maximum), vi_set(added)), vi_set(mask));
    return vi_select(v_lt(maximum, v_set(0x1p-63f)), vi_set(0), vi_max(edge, vi_set(least)));
}

/* Returns the edge that codes are made from: one out of reach if all second moments of a block are zero. */
V_OP vf hstep_reached_edge(vi scale)
{
    return v_from_bits(vi_select(vi_eq(scale, vi_set(0)), vi_set(0x7f000000), scale));
}

/* Returns the number whose root is a signed state's code, times 2^32. Below zero it counts as zero. */
V_OP vf hstep_radicand(vf x, vf inverse, vi random)
{
    /* With u = r / 2^16 the code is floor(sqrt(x / s^2 - u (1 - u)) + u). It is k + 1 instead of k with a probability
     * that rises evenly from 0 to 1 while x / s^2 goes from k^2 to (k + 1)^2. */
    vf draw = v_from_int(random), apart = v_mul(draw, v_sub(v_set(65536.0f), draw));
    /* Multiplies twice, because the square of the inverse may leave fp32. */
    return v_sub(v_mul(v_mul(v_abs(x), inverse), inverse), apart);
}

/* Returns the codes of a pair, times 2^16, with their dropped parts but without their signs. An instruction set's own
 * version must be right in bits 16 to 22 only. */
#ifndef hstep_root_codes
V_OP void hstep_root_codes(vf e, vf o, vf inverse, vi words, vi *ce, vi *co)
{
    vi re = vi_and(words, vi_set(0xffff)), ro = vi_shr(words, 16);
    *ce = hstep_root_and(hstep_radicand(e, inverse, re), re);
    *co = hstep_root_and(hstep_radicand(o, inverse, ro), ro);
}
#endif

/* Returns a second moment's code with its dropped part: base + the distance of the root to the edge + the draw. Only
 * the mask's bits of the draw count. Distances below the edge are halved. hstep_positions() does it for a pair, whose
 * draws are the random bits times 2^shift, and whose lanes have one edge. An instruction set may have its own version
 * of that. */
V_OP vi hstep_position(vf root, vf edge, vi draw, const uint32_t mask, const uint32_t base)
{
    /* Below the edge it is floor(d / 2). The maximum finds the way: d / 2 > d below zero. */
    vi d = vi_sub(v_bits(root), v_bits(edge)), fine = vi_max(d, vi_sra(d, 1));
    return vi_add(fine, vi_or(vi_and(draw, vi_set(mask)), vi_set(base)));
}
#ifndef hstep_positions
V_OP void hstep_positions(vf e, vf o, vf edge, vi words, const int shift, const uint32_t mask, const uint32_t base,
                          vi *pe, vi *po)
{
    *pe = hstep_position(e, edge, vi_shl(words, shift), mask, base);
    *po = hstep_position(o, edge, vi_shr(words, 16 - shift), mask, base);
}
#endif

/* Stores signed codes as bytes. A code is bits 16 to 22 of ce or co, at most 127. It is negated if e or o is negative.
 * An instruction set may have its own version. */
#ifndef hstep_store_signed
V_OP void hstep_store_signed(char *code, vi ce, vi co, vf e, vf o)
{
    vi signs = vi_join16(vi_shr(v_bits(e), 16), v_bits(o));
    vh_store_s8(code, vi_negate16(vi_join16(vi_shr(ce, 16), co), signs));
}
#endif

/* Loads codes of 0 to 255 as their distance to 128, times 2^18. Distances below 128 are doubled. An instruction set may
 * have its own version. */
#ifndef hstep_load_distances
V_OP void hstep_load_distances(const char *code, vi *e, vi *o)
{
    vi steps = vi_add16(vh_load_u8(code), vi_set(0xff80ff80)), twice = vi_min16(steps, vi_add16(steps, steps));
    *e = vi_shl(twice, 18);
    *o = vi_shl(vi_and(twice, vi_set(0xffff0000)), 2);
}
#endif

#endif
