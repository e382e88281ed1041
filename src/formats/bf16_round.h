/* fp32 to BF16 by integer arithmetic, for every format that stores BF16. A result is the fp32 pattern whose high half
 * is the code; the low half is rubbish, for vp_store_hi16() ignores it, unless hstep_bf16_clear() follows.
 *
 * NaN becomes the quiet NaN of its sign, an infinity stays, a finite value never becomes one: it saturates at 0x7F7F.
 * Only magnitudes from 0x7F7F0000 up can need that, so one test per pair of vectors decides for all its lanes. */
#ifndef HSTEP_BF16_ROUND_H
#define HSTEP_BF16_ROUND_H

/* States: magnitudes below 2^-126 become +0. Takes and gives fp32 patterns. */
V_OP vi hstep_flush(vi u)
{
    return vi_select(vi_eq(vi_and(u, vi_set(0x7f800000)), vi_set(0)), vi_set(0), u);
}

V_OP vi hstep_bf16_clear(vi r) { return vi_and(r, vi_set(0xffff0000)); }

/* `add` is what rounding adds: the half unit (and one more if the kept part is odd) or 16 random bits. */
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

/* Whether some lane may need the exact way: those from 2^127 up. One OR over both vectors tells for less than a maximum
 * does, but rises for pairs such as (2, 1) too, for which the exact way gives the same bits, only slower. States and
 * residuals are hardly ever that large; weights of norms and embeddings are. */
#ifndef hstep_bf16_special /* an instruction set may have a way of its own (vec/README.md) */
V_OP int hstep_bf16_special(vi ue, vi uo, const int small)
{
    if (small) return vm_any(vi_eq(vi_andnot(vi_or(ue, uo), vi_set(0x7f000000)), vi_set(0)));
    vi limit = vi_set(0x7fffffff);
    return vm_any(vi_gt(vi_max(vi_and(ue, limit), vi_and(uo, limit)), vi_set(0x7effffff)));
}
#endif

/* To nearest, ties to even. small: as for hstep_bf16_special(). */
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

/* Stochastic: away from zero with probability (low half) / 65536. One word serves both elements of a lane. */
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

/* A weight and its error code as one pattern. A code below zero beside a weight of +-0 comes from no number: it is left
 * where a program has zeroed the weight (a mask, an initialization), and the sum would be a NaN. It counts as 0. */
V_OP vi hstep_bf16_ecc(vi weight, vi code)
{
    vi magnitude = vi_and(weight, vi_set(0x7fffffff));
    return vi_add(weight, vi_max(code, vi_sub(vi_set(0), magnitude)));
}

#endif
