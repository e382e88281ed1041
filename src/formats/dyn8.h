/* The 8-bit dynamic maps of torchao's optimizers, bit for bit, for exchange of states with them; 1.016 bytes an
 * element. Blocks of 256 elements of the flattened tensor share one fp32 scale.
 *
 *   S = max(max |x|, 1e-12)    n = x / S    code = nearest entry of the map, ties up    decode: x = map[code] * S
 *
 * The maps (dyn_map.h) are 0, 1 and seven decades of n. The decade from 0.1 to 1 has 64 signed or 128 unsigned steps,
 * and each further down has half as many. Rounding is always to nearest, as in torchao. One thing differs: a positive
 * second moment gets at least code 1 (3.25e-7 S). With torchao it decodes as zero below 1.6e-7 S, and the updates of
 * such an element grow a thousandfold. The signed map lacks -1, so a block's most negative element may shrink by 0.7 %.
 * Memory of zeros (codes and scale) decodes to +0.
 *
 * Worst case, to within 2^-15: |error of x| <= 0.45 S 10^-k / 2^(6-k) for 10^-(k+1) S < |x| <= 10^-k S, k = 0 .. 6.
 * This is 3.5 % of x in the middle of the first decade, 41 % in the last. A non-negative x has half of that, and
 * 3.25e-7 S from 1e-7 S down. */
#ifndef HSTEP_DYN8_H
#define HSTEP_DYN8_H

#include "formats/dyn_map.h"

#define dyn8_ROW "dyn8", "8-bit dynamic map, fp32 scale per 256 flat", FLAT, U8, F32, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 256, stochastic = 0, root = 0

V_OP vi dyn8_scale(vf maximum, const int nonneg)
{
    (void)nonneg;
    return hstep_dyn_scale(maximum);
}

DIVIDE_BY_SCALE(dyn8)
STASH_AS_IS(dyn8)

V_OP vi dyn8_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    (void)random;
    const float *map = nonneg ? hstep_dyn8_unsigned : hstep_dyn8_signed;
    vf n = v_div(stashed, inverse);
    vi below = nonneg ? hstep_dyn_below(n, 7, 2) : hstep_dyn_signed_below(n, 7);
    vi code = hstep_dyn_nearest(n, below, v_gather(map, below), v_gather(map + 1, below));
    return nonneg ? vi_max(code, vi_min(v_bits(stashed), vi_set(1))) : code;
}

V_OP vf dyn8_value(vi code, vf scale, const int nonneg)
{
    vf n = v_gather(nonneg ? hstep_dyn8_unsigned : hstep_dyn8_signed, code);
    return v_add(v_mul(n, scale), v_set(0.0f));
}

CODES_ARE_BYTES(dyn8)

#endif
