/* Weights in packed blocks: 32 codes of a row, and before them the BF16 scale that they share, in 34 bytes. So one
 * plane holds all that a model needs. A code counts steps of the scale. A format with an error code counts finer
 * steps, and its second plane has what the codes leave out.
 *
 *   T = round(2^16 (weight - change) / step)      position = floor((T + r) / 2^16), r the 16 random bits
 *
 * A scale s is kept while the largest |weight - change| of its block is 101 s to 127 s, T being taken from the stored
 * position. It is replaced by BF16 up of (1.06 / 127) of that largest weight. A scale that followed each step would
 * ratchet: the largest weight rounds down, the scale falls, and 32 weights are rounded again. Both bounds are whole
 * codes, because no rounding leads across one: a change of 0 therefore changes no bit.
 *
 * Weights saturate at 2^127, so that none decodes to infinity. A block whose weights are all below 2^-99 becomes zero.
 * A block with a weight that is not finite gets the scale NaN and the codes 0: a NaN cannot be stored by itself, and
 * must not be lost. */
#ifndef HSTEP_PACKED_H
#define HSTEP_PACKED_H

enum { HSTEP_PACKED_BLOCK = 32, HSTEP_PACKED_BYTES = 34, HSTEP_PACKED_SCALE = 2 };

/* Returns the address of the scale of element i, and behind it those of its block's codes. */
V_OP const char *hstep_packed_block(const char *code, int64_t i)
{
    return code + i / HSTEP_PACKED_BLOCK * HSTEP_PACKED_BYTES;
}

/* Returns a weight from its position, in units of a step. */
V_OP vf hstep_packed_value(vi position, vf unit) { return v_mul(v_from_int(position), unit); }

/* Returns 2^16 times a position less the change. `factor` is 2^16 over the step. A NaN, or a change that no scale could
 * be kept with, leaves the bounds of hstep_packed_kept(). */
V_OP vi hstep_packed_moved(vi position, vf change, vf factor)
{
    const vf most = v_set(0x1p28f), moved = v_max(v_min(v_mul(change, factor), most), v_neg(most));
    return vi_sub(vi_shl(position, 16), v_round(moved));
}

V_OP vi hstep_packed_magnitude(vi moved) { return vi_max(moved, vi_sub(vi_set(0), moved)); }

/* Returns lanes of which one must be set if the scale is kept, and lanes of which none may be. `largest` is of the
 * magnitudes of a block. */
V_OP vm hstep_packed_reaches(vi largest, const int steps)
{
    return vi_gt(largest, vi_set((uint32_t)((101 * steps << 16) - 1)));
}
V_OP vm hstep_packed_exceeds(vi largest, const int steps)
{
    return vi_gt(largest, vi_set((uint32_t)(127 * steps << 16)));
}

/* Returns a new scale as a pattern, from the pattern of the largest magnitude. */
V_OP vi hstep_packed_scale(vi largest)
{
    const vf maximum = v_from_bits(vi_min(largest, vi_set(0x7f000000)));
    vi up = vi_and(vi_add(v_bits(v_mul(maximum, v_set((float)(1.06 / 127.0)))), vi_set(0xffff)), vi_set(0xffff0000));
    up = vi_select(v_lt(maximum, v_set(0x1p-99f)), vi_set(0), up);
    return vi_select(vi_gt(largest, vi_set(0x7f7fffff)), vi_set(0x7fc00000), up);
}

/* Returns the unit of a position, and 2^16 over it, from a scale. */
V_OP vf hstep_packed_unit(vf scale, const int steps) { return v_mul(scale, v_set(1.0f / (float)steps)); }
V_OP vf hstep_packed_factor(vf scale, const int steps) { return v_div0(v_set(0x1p16f * (float)steps), scale); }

/* Returns 2^16 times the position of a weight on a new scale. All positions are 0 if the scale is 0 or NaN. */
V_OP vi hstep_packed_placed(vf weight, vi scale, vf factor)
{
    const vm holds = vi_gt(vi_set(0x7f800000), scale);
    const vf most = v_set(0x1p127f), held = v_max(v_min(weight, most), v_neg(most));
    const vi placed = v_round(v_select(holds, v_mul(held, factor), v_set(0.0f)));
    return vi_select(holds, placed, vi_set(0));
}

/* Returns positions from 2^16 times a position of even elements, or of odd ones. */
V_OP vi hstep_packed_even(vi placed, vi words) { return vi_sra(vi_add(placed, vi_and(words, vi_set(0xffff))), 16); }
V_OP vi hstep_packed_odd(vi placed, vi words) { return vi_sra(vi_add(placed, vi_shr(words, 16)), 16); }

#endif
