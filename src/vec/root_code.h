/* What codes of roots are made by, and what an instruction set may say about it (vec/README.md). */
#ifndef HSTEP_ROOT_CODE_H
#define HSTEP_ROOT_CODE_H

/* round(sqrt(max(a, 0))) + r, of which callers use the bits from 16 up; a below 2^46, r below 2^16. */
V_OP vi hstep_root_and(vf a, vi r) { return vi_add(v_round(v_sqrt(v_max(a, v_set(0.0f)))), r); }

/* The same of a pair; an instruction set may have a way of its own to the bits that are used. */
#ifndef hstep_roots_and
V_OP void hstep_roots_and(vf e, vf o, vi re, vi ro, vi *ce, vi *co)
{
    *ce = hstep_root_and(e, re);
    *co = hstep_root_and(o, ro);
}
#endif

/* Signed codes as bytes: bits 16 to 23 of ce and co, at most 127, negated where e and o have their sign. Likewise. */
#ifndef hstep_store_signed
V_OP void hstep_store_signed(char *code, vi ce, vi co, vf e, vf o)
{
    vi signs = vi_join16(vi_shr(v_bits(e), 16), v_bits(o));
    vh_store_s8(code, vi_negate16(vi_join16(vi_shr(ce, 16), co), signs));
}
#endif

/* Codes of 0 to 255 by their distance to 128, twice that below it, times 2^18. Likewise. */
#ifndef hstep_load_distances
V_OP void hstep_load_distances(const char *code, vi *e, vi *o)
{
    vi steps = vi_add16(vh_load_u8(code), vi_set(0xff80ff80)), twice = vi_min16(steps, vi_add16(steps, steps));
    *e = vi_shl(twice, 18);
    *o = vi_shl(vi_and(twice, vi_set(0xffff0000)), 2);
}
#endif

#endif
