/* The operations behind codes of square roots. An instruction set may define its own version of some
 * (vec/README.md). */
#ifndef HSTEP_ROOT_CODE_H
#define HSTEP_ROOT_CODE_H

/* Returns round(sqrt(max(a, 0))) + r. Callers use bits 16 and up. Requires a < 2^46 and r < 2^16. */
V_OP vi hstep_root_and(vf a, vi r) { return vi_add(v_round(v_sqrt(v_max(a, v_set(0.0f)))), r); }

/* Applies hstep_root_and() to a pair. An instruction set's own version must be right in bits 16 and up only. */
#ifndef hstep_roots_and
V_OP void hstep_roots_and(vf e, vf o, vi re, vi ro, vi *ce, vi *co)
{
    *ce = hstep_root_and(e, re);
    *co = hstep_root_and(o, ro);
}
#endif

/* Stores signed codes as bytes. A code is bits 16 to 23 of ce or co, at most 127. It is negated if e or o is negative.
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
