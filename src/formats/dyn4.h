/* The 4-bit dynamic map of torchao's optimizers, bit for bit, for exchange of states with them; 0.531 bytes an element.
 * A byte has two codes, the even element's in the high nibble. Blocks of 128 elements of the flattened tensor share one
 * fp32 scale.
 *
 *   S = max(max |x|, 1e-12)    n = x / S    code = nearest entry of the map, ties up    decode: x = map[code] * S
 *   signed: 16 entries from -0.8875 to 1, 0 among them (dyn_map.h)     non-negative: (code + 1) / 16, so no zero
 *
 * Rounding is always to nearest, as in torchao. The map lacks -1, so a block's most negative element may shrink by 11
 * %. A zero second moment decodes as S / 16, in a block of zeros too (6.25e-14). Memory of zeros (codes and scale)
 * decodes to +0. Worst case, to within 2^-15: signed |error of x| <= 0.1125 S; non-negative <= S / 32 from S / 16 up, S
 * / 16 below. */
#ifndef HSTEP_DYN4_H
#define HSTEP_DYN4_H

#include "formats/dyn_map.h"

#define dyn4_ROW "dyn4", "4-bit dynamic map, fp32 scale per 128 flat", FLAT, U8, F32, \
    roles = SIGNED | NONNEG, code_bits = 4, block = 128, stochastic = 0, root = 0

V_OP vi dyn4_scale(vf maximum, const int nonneg)
{
    (void)nonneg;
    return hstep_dyn_scale(maximum);
}

DIVIDE_BY_SCALE(dyn4)
STASH_AS_IS(dyn4)

V_OP vf dyn4_map(vi code, const int nonneg)
{
    if (nonneg) return v_mul(v_from_int(vi_add(code, vi_set(1))), v_set(0x1p-4f));
    return v_lookup16(hstep_dyn4_signed, code);
}

/* Does the work of hstep_dyn_below() for borders at 16 n - 1/2. */
V_OP vi dyn4_unsigned_below(vf n)
{
    vf count = v_sub(v_mul(v_min(n, v_set(1.0f)), v_set(16.0f)), v_set(1.25f));
    return vi_max(v_round(count), vi_set(0));
}

V_OP vi dyn4_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    (void)random;
    vf n = v_div(stashed, inverse);
    vi below = nonneg ? dyn4_unsigned_below(n) : hstep_dyn_signed_below(n, 3);
    return hstep_dyn_nearest(n, below, dyn4_map(below, nonneg), dyn4_map(vi_add(below, vi_set(1)), nonneg));
}

V_OP vf dyn4_value(vi code, vf scale, const int nonneg)
{
    return v_add(v_mul(dyn4_map(code, nonneg), scale), v_set(0.0f));
}

V_OP void dyn4_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)
{
    (void)nonneg;
    vi bytes = vi_load_u8(code + i / 2);
    *e = vi_shr(bytes, 4);
    *o = vi_and(bytes, vi_set(15));
}

V_OP void dyn4_store(char *code, int64_t i, vi e, vi o) { vi_store_u8(code + i / 2, vi_or(vi_shl(e, 4), o)); }

#endif
