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

/* Whether arithmetic on halves of lanes costs no more than on whole ones. */
#ifndef HSTEP_HALVES
#define HSTEP_HALVES 1
#endif

#endif
