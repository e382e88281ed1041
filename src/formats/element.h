/* What element formats share. */
#ifndef HSTEP_ELEMENT_H
#define HSTEP_ELEMENT_H

/* Defines NAME_apply() of a format that keeps nothing of what rounding takes: it encodes the weight less the change. */
#define APPLY_BY_ENCODING(fn)                                                                                   \
    V_OP void fn##_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)             \
    {                                                                                                           \
        fn##_encode(code, extra, i, v_sub(we, de), v_sub(wo, d_o), words, 0);                                   \
    }

#endif
