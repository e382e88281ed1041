/* A format for tests/house/new_rows_test.sh: linear 8-bit codes in blocks of 64. The scale has 3 bits after the
 * leading one in one byte (F8_E4M3), as in NVFP4. For states of about 2^-2 to 2^14. The error is below the scale,
 * which is below 1.2 max |x| / 127. */
#ifndef HSTEP_NV8_FORMAT_H
#define HSTEP_NV8_FORMAT_H

#define nv8_ROW \
    "nv8", "E4M3 scale", ROWS, I8, F8_E4M3, roles = SIGNED | NONNEG, code_bits = 8, block = 64, stochastic = 1, root = 0

V_OP vi nv8_scale(vf maximum, const int nonneg)
{
    vf step = v_max(v_mul(maximum, v_set(nonneg ? 1.0f / 254.0f : 1.0f / 126.0f)), v_set(0x1p-6f));
    vi up = vi_and(vi_add(v_bits(v_min(step, v_set(448.0f))), vi_set(0xfffff)), vi_set(0xfff00000));
    return vi_select(v_eq(maximum, v_set(0.0f)), vi_set(0), up);
}

/* Returns the factor of the codes. One division per block. */
V_OP vf nv8_inverse(vi scale, const int nonneg)
{
    (void)nonneg;
    return v_div0(v_set(65536.0f), v_from_bits(scale));
}

/* Returns the value to keep in fp32 until the block's scale is known. */
V_OP vf nv8_stash(vf x, const int nonneg)
{
    (void)nonneg;
    return x;
}

V_OP vi nv8_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    (void)nonneg;
    return vi_sra(vi_add(v_round(v_mul(stashed, inverse)), random), 16);
}

V_OP vf nv8_value(vi code, vf scale, const int nonneg)
{
    (void)nonneg;
    return v_mul(v_from_int(code), scale);
}

V_OP void nv8_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    if (nonneg) vp_load_u8(code + i, e, o);
    else vp_load_s8(code + i, e, o);
}

V_OP void nv8_store(char *code, int64_t i, vi e, vi o) { vp_store_8(code + i, e, o); }

#endif
