/* Copy this to src/formats/NAME.h, rename, add FORMAT(id, NAME) to src/formats/formats.def and an include to
 * src/formats/formats.h, which says what the row below means (docs/adding.md).
 *
 * Say here the byte layout, the rounding and the worst-case error. This one is a block format: 8-bit linear codes, code
 * = floor((round(x * 65536 / s) + r) / 65536) with r the element's 16 random bits (2^15 for nearest), decode code * s,
 * s = BF16, rounded up, of max |x| / 127. Error at most s/2 to nearest, below s stochastic. It has no place in the
 * library: linear codes of a second moment round small elements to zero.
 *
 * An element format has three functions instead, NAME_decode, NAME_encode and NAME_apply: see src/formats/bf16_sr.h. */
#ifndef HSTEP_SKELETON_FORMAT_H
#define HSTEP_SKELETON_FORMAT_H

/* clang-format off */
#define skeleton_ROW "skeleton", "linear 8-bit codes, BF16 scale per 32", ROWS, I8, BF16, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 32, stochastic = 1, root = 1
/* clang-format on */

/* From the largest stashed magnitude of each block (one per lane) to its scale, an fp32 pattern with the low half
 * zero. */
V_OP vi skeleton_scale(vf maximum, const int nonneg)
{
    vf step = v_mul(maximum, v_set(nonneg ? 1.0f / 255.0f : 1.0f / 127.0f));
    vi up = vi_and(vi_add(v_bits(step), vi_set(0x10007)), vi_set(0xffff0000));
    return vi_select(v_lt(maximum, v_set(0x1p-119f)), vi_set(0), up);
}

/* What the codes are multiplied by; one division per block. */
V_OP vf skeleton_inverse(vi scale, const int nonneg)
{
    (void)nonneg;
    return v_div0(v_set(65536.0f), v_from_bits(scale));
}

/* What is kept in fp32 until the block's scale is known. */
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
