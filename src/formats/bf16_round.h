/* fp32 to BF16 by integer arithmetic, for every format that stores BF16. A result is the fp32 pattern whose high half
 * is the code. Its low half is undefined, because vp_store_hi16() ignores it. hstep_bf16_clear() clears it.
 *
 * NaN becomes the quiet NaN of its sign. An infinity stays. A finite value never becomes one: it saturates at 0x7F7F.
 * Only magnitudes from 0x7F7F0000 up can need that, so one test per pair of vectors decides for all its lanes. */
#ifndef HSTEP_BF16_ROUND_H
#define HSTEP_BF16_ROUND_H

#include "formats/common.h"

/* Returns a pattern with magnitudes below 2^-126 replaced by +0. States are flushed so. */
V_OP vi hstep_flush(vi u)
{
    return vi_select(vi_eq(vi_and(u, vi_set(0x7f800000)), vi_set(0)), vi_set(0), u);
}

V_OP vi hstep_bf16_clear(vi r) { return vi_and(r, vi_set(0xffff0000)); }

/* Rounds a pattern, special cases included. The term `add` is what rounding adds. To nearest it is the half unit, and
 * one more if the kept part is odd. Else it is 16 random bits. */
V_OP vi hstep_bf16_exact(vi u, vi add)
{
    vi magnitude = vi_and(u, vi_set(0x7fffffff)), sign = vi_and(u, vi_set(0x80000000));
    vi r = hstep_bf16_clear(vi_add(u, add));
    vm overflow = vi_gt(vi_and(vi_add(magnitude, add), vi_set(0xffff0000)), vi_set(0x7f7f0000));
    vm overflow_sign = vi_gt(vi_set(0), vi_add(magnitude, add));
    r = vi_select(overflow, vi_or(sign, vi_set(0x7f7f0000)), r);
    r = vi_select(overflow_sign, vi_or(sign, vi_set(0x7f7f0000)), r);
    r = vi_select(vi_eq(magnitude, vi_set(0x7f800000)), u, r);
    return vi_select(vi_gt(magnitude, vi_set(0x7f800000)),
                     vi_or(vi_and(u, vi_set(0xffff0000)), vi_set(0x00400000)), r);
}

/* Returns true if some lane may need the exact way, which is for magnitudes from 2^127 up. With `small` it takes one OR
 * over both vectors, which is cheaper than a maximum. The OR is also true for pairs such as (2, 1), for which the exact
 * way gives the same bits, only slower. States and residuals are hardly ever that large. Weights of norms and
 * embeddings are. */
#ifndef hstep_bf16_special /* an instruction set may have its own version (vec/README.md) */
V_OP int hstep_bf16_special(vi ue, vi uo, const int small)
{
    if (small) return vm_any(vi_eq(vi_andnot(vi_or(ue, uo), vi_set(0x7f000000)), vi_set(0)));
    vi limit = vi_set(0x7fffffff);
    return vm_any(vi_gt(vi_max(vi_and(ue, limit), vi_and(uo, limit)), vi_set(0x7effffff)));
}
#endif

/* Round to nearest, ties to even: the term to add, then the rounding of a pair. small: as for hstep_bf16_special(). */
V_OP vi hstep_bf16_half(vi u) { return vi_add(vi_and(vi_shr(u, 16), vi_set(1)), vi_set(0x7fff)); }

V_OP void hstep_bf16_nearest(vf e, vf o, const int small, vi *re, vi *ro)
{
    vi ue = v_bits(e), uo = v_bits(o);
    if (__builtin_expect(hstep_bf16_special(ue, uo, small), 0)) {
        *re = hstep_bf16_exact(ue, hstep_bf16_half(ue));
        *ro = hstep_bf16_exact(uo, hstep_bf16_half(uo));
        return;
    }
    *re = vi_add(ue, hstep_bf16_half(ue));
    *ro = vi_add(uo, hstep_bf16_half(uo));
}

/* Rounds a pair stochastically, away from zero with probability (low half) / 65536. One word serves both elements of a
 * lane. */
V_OP void hstep_bf16_stochastic(vf e, vf o, const int small, vi words, vi *re, vi *ro)
{
    vi ue = v_bits(e), uo = v_bits(o), add_e = vi_and(words, vi_set(0xffff)), add_o = vi_shr(words, 16);
    if (__builtin_expect(hstep_bf16_special(ue, uo, small), 0)) {
        *re = hstep_bf16_exact(ue, add_e);
        *ro = hstep_bf16_exact(uo, add_o);
        return;
    }
    *re = vi_add(ue, add_e);
    *ro = vi_add(uo, add_o);
}

/* Returns a weight and its error code as one pattern. A code below zero beside a weight of +-0 counts as 0. It encodes
 * no number: it is left if a program has zeroed the weight (a mask, an initialization), and the sum would be a NaN. */
V_OP vi hstep_bf16_ecc(vi weight, vi code)
{
    vi magnitude = vi_and(weight, vi_set(0x7fffffff));
    return vi_add(weight, vi_max(code, vi_sub(vi_set(0), magnitude)));
}

#endif
