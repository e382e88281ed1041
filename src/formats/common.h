/* Functions that several formats have in the same form. */
#ifndef HSTEP_COMMON_H
#define HSTEP_COMMON_H

/* Defines NAME_apply() of an element format that keeps nothing of what rounding takes: it encodes the weight less the
 * change. */
#define APPLY_BY_ENCODING(fn)                                                                                   \
    V_OP void fn##_apply(char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)             \
    {                                                                                                           \
        fn##_encode(code, extra, i, v_sub(we, de), v_sub(wo, d_o), words, 0);                                   \
    }

/* Defines NAME_stash() of a block format that keeps a new value as it is until the block's scale is known. */
#define STASH_AS_IS(fn)                             \
    V_OP vf fn##_stash(vf x, const int nonneg)      \
    {                                               \
        (void)nonneg;                               \
        return x;                                   \
    }

/* Defines NAME_inverse() of a block format that divides by the scale instead of multiplying by a reciprocal. */
#define DIVIDE_BY_SCALE(fn)                             \
    V_OP vf fn##_inverse(vi scale, const int nonneg)    \
    {                                                   \
        (void)nonneg;                                   \
        return v_from_bits(scale);                      \
    }

/* Defines NAME_load() and NAME_store() of a block format whose codes are unsigned bytes. */
#define CODES_ARE_BYTES(fn)                                                             \
    V_OP void fn##_load(const char *code, int64_t i, vi *e, vi *o, const int nonneg)    \
    {                                                                                   \
        (void)nonneg;                                                                   \
        vp_load_u8(code + i, e, o);                                                     \
    }                                                                                   \
    V_OP void fn##_store(char *code, int64_t i, vi e, vi o) { vp_store_8(code + i, e, o); }

#endif
