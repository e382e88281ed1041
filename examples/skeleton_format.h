/* Copy this to src/formats/NAME.h and rename. Add FORMAT(id, NAME) to src/formats/formats.def and an include to
 * src/formats/formats.h, which explains the row below (docs/adding.md).
 *
 * Say here what the byte layout, the rounding and the worst-case error are. This example is a block format with linear
 * 8-bit codes. The code of x is floor((round(x * 65536 / s) + r) / 65536), where r is the element's 16 random bits
 * (2^15 for rounding to nearest). It is decoded as code * s. The scale s is max |x| / 127 of the block, rounded up to
 * BF16. The error is at most s/2 to nearest, and below s with stochastic rounding. The format has no place in the
 * library, because linear codes of a second moment round small elements to zero.
 *
 * An element format has three functions instead: NAME_decode, NAME_encode and NAME_apply. See src/formats/bf16_sr.h. */
#ifndef HSTEP_SKELETON_FORMAT_H
#define HSTEP_SKELETON_FORMAT_H

/* clang-format off */
#define skeleton_ROW "skeleton", "linear 8-bit codes, BF16 scale per 32", ROWS, I8, BF16, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 32, stochastic = 1, root = 1
/* clang-format on */

/* Returns the scale of each block (one per lane) from its largest stashed magnitude. The scale is an fp32 pattern whose
 * low half is zero. */
V_OP vi skeleton_scale(vf maximum, const int nonneg)
{
    vf step = v_mul(maximum, v_set(nonneg ? 1.0f / 255.0f : 1.0f / 127.0f));
    vi up = vi_and(vi_add(v_bits(step), vi_set(0x10007)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(0x1p-119f)), vi_set(0), up);
}

/* Returns the factor from stashed values to codes. There is one division per block. */
V_OP vf skeleton_inverse(vi scale, const int nonneg)
{
    (void)nonneg;
    return v_div0(v_set(65536.0f), v_from_bits(scale));
}

/* Returns what is kept of x in fp32 until the scale of its block is known. */
V_OP vf skeleton_stash(vf x, const int nonneg)
{
    (void)nonneg;
    return x;
}

V_OP vi skeleton_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    (void)nonneg;
    return vi_sra(vi_add(v_round(v_mul(stashed, inverse)), random), 16);
}

V_OP vf skeleton_value(vi code, vf scale, const int nonneg)
{
    (void)nonneg;
    return v_mul(v_from_int(code), scale);
}

V_OP void skeleton_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    if (nonneg) vp_load_u8(code + i, e, o);
    else vp_load_s8(code + i, e, o);
}

V_OP void skeleton_store(char *code, int64_t i, vi e, vi o) { vp_store_8(code + i, e, o); }

#endif
