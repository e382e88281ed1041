/* The multi-compiled file: once per row of vec/isas.def, with HSTEP_VEC_HEADER naming the vocabulary and HSTEP_ISA the
 * table's suffix. Rules and formats are inlined here in two ways, tile by tile (any combination) and fused in registers
 * (the rows of fused.def), from the same functions. Over 500 lines because everything here must be seen by the compiler at
 * once for each instruction set. */
#include "kernels.h"

#include HSTEP_VEC_HEADER

#define HSTEP_INCLUDE_FORMATS
#include "formats/formats.def"
#undef HSTEP_INCLUDE_FORMATS
#define HSTEP_INCLUDE_RULES
#include "rules/rules.def"
#undef HSTEP_INCLUDE_RULES

#define PAIR (2 * VL)
#define PAIRS (16 / VL) /* in a group of 32 */

/* Switches on constants: every caller is inlined with a constant format or rule, so only one case is left. */

V_OP void load_any(const int format, const int nonneg, const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)    \
    case HSTEP_FORMAT_##fn:                  \
        fn##_decode(code, extra, i, e, o);   \
        break;
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, sr)     \
    case HSTEP_FORMAT_##fn: {                                                \
        uint16_t scale;                                                      \
        vi ce, co;                                                           \
        memcpy(&scale, extra + i / block * 2, 2);                            \
        vf s = v_from_bits(vi_set((uint32_t)scale << 16));                   \
        fn##_load(code, i, &ce, &co, nonneg);                                \
        *e = fn##_value(ce, s, nonneg);                                      \
        *o = fn##_value(co, s, nonneg);                                      \
        break;                                                               \
    }
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        *e = *o = v_set(0.0f);
    }
}

V_OP void store_any(const int format, char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)                      \
    case HSTEP_FORMAT_##fn:                                    \
        fn##_encode(code, extra, i, e, o, words, state);       \
        break;
#define BLOCK_FORMAT(id, name, fn, ...)
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        break;
    }
}

V_OP void apply_any(const int format, char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    /* -0 would turn a weight of -0 into +0: a change of nothing must change nothing. */
    de = v_add(de, v_set(0.0f));
    d_o = v_add(d_o, v_set(0.0f));
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)                         \
    case HSTEP_FORMAT_##fn:                                       \
        fn##_apply(code, extra, i, we, wo, de, d_o, words);       \
        break;
#define BLOCK_FORMAT(id, name, fn, ...)
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        break;
    }
}

V_OP vf stash_any(const int format, vf x, const int nonneg)
{
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, ...) \
    case HSTEP_FORMAT_##fn:             \
        return fn##_stash(x, nonneg);
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        return x;
    }
}

V_OP int is_block(const int format)
{
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, ...) case HSTEP_FORMAT_##fn:
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
        return 1;
    default:
        return 0;
    }
}

/* Codes of n stashed elements (n <= 512) whose blocks have the given maxima (patterns; room for 16). */
V_OP void encode_blocks(const int format, const int nonneg, const float *stash, uint32_t *maxima, char *code, char *extra,
                        const uint32_t *words, int64_t n)
{
    HSTEP_ALIGNED uint32_t scales[16];
    HSTEP_ALIGNED float inverses[16];
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, sr)                           \
    case HSTEP_FORMAT_##fn:                                                                        \
        for (int b = 0; b < 16; b += VL) {                                                         \
            vi scale = fn##_scale(v_from_bits(vi_load(maxima + b)), nonneg);                       \
            vi_store(scales + b, scale);                                                           \
            v_store(inverses + b, fn##_inverse(scale, nonneg));                                    \
        }                                                                                          \
        for (int64_t b = 0; b * block < n; b++) {                                                  \
            uint16_t scale = (uint16_t)(scales[b] >> 16);                                          \
            vf inverse = v_set(inverses[b]);                                                       \
            memcpy(extra + 2 * b, &scale, 2);                                                      \
            for (int64_t i = b * block; i < (b + 1) * block; i += PAIR) {                          \
                vi w = vi_load(words + i / 2);                                                     \
                vi ce = fn##_code(v_load(stash + i), inverse, vi_and(w, vi_set(0xffff)), nonneg);  \
                vi co = fn##_code(v_load(stash + i + VL), inverse, vi_shr(w, 16), nonneg);         \
                fn##_store(code, i, ce, co);                                                       \
            }                                                                                      \
        }                                                                                          \
        break;
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        break;
    }
}

/* One row of lane maxima per group of stashed elements; block_maxima() takes 16 rows down to 16 maxima. */
V_OP void group_maximum(const float *x, uint32_t *row)
{
    vi m = vi_set(0);
    for (int i = 0; i < HSTEP_GROUP; i += VL) m = vi_max(m, v_bits(v_abs(v_load(x + i))));
    vi_store(row, m);
}

V_OP void block_maxima(uint32_t (*rows)[VL], int64_t used, uint32_t *maxima)
{
    for (int64_t b = used; b < 16; b++) vi_store(rows[b], vi_set(0));
    for (int b = 0; b < 16; b += VL) vi_store(maxima + b, vi_hmax_rows(rows[b]));
}

/* ---- Tile functions ---- */

V_OP void decode_tile(const int format, const int nonneg, float *x, const char *code, const char *extra, int64_t n)
{
    for (int64_t i = 0; i < n; i += PAIR) {
        vf e, o;
        load_any(format, nonneg, code, extra, i, &e, &o);
        v_store(x + i, e);
        v_store(x + i + VL, o);
    }
}

V_OP void encode_tile(const int format, const int nonneg, const float *x, char *code, char *extra, const uint32_t *words,
                      int64_t n, const int state)
{
    if (!is_block(format)) {
        for (int64_t i = 0; i < n; i += PAIR)
            store_any(format, code, extra, i, v_load(x + i), v_load(x + i + VL), vi_load(words + i / 2), state);
        return;
    }
    HSTEP_ALIGNED float stash[HSTEP_TILE];
    HSTEP_ALIGNED uint32_t rows[16][VL], maxima[16];
    for (int64_t i = 0; i < n; i += VL) v_store(stash + i, stash_any(format, v_load(x + i), nonneg));
    for (int64_t b = 0; b * HSTEP_GROUP < n; b++) group_maximum(stash + b * HSTEP_GROUP, rows[b]);
    block_maxima(rows, n / HSTEP_GROUP, maxima);
    encode_blocks(format, nonneg, stash, maxima, code, extra, words, n);
}

#define TILE_FUNCTIONS(fn, nonneg)                                                                                 \
    static void decode_##fn##_##nonneg(float *x, const char *code, const char *extra, int64_t n)                   \
    {                                                                                                              \
        decode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, n);                                                 \
    }                                                                                                              \
    static void encode_##fn##_##nonneg(const float *x, char *code, char *extra, const uint32_t *words, int64_t n,  \
                                       int state)                                                                  \
    {                                                                                                              \
        if (state)                                                                                                 \
            encode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, words, n, 1);                                   \
        else                                                                                                       \
            encode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, words, n, 0);                                   \
    }
#define ELEMENT_FORMAT(id, name, fn, ...)                                                                         \
    TILE_FUNCTIONS(fn, 0)                                                                                         \
    static void apply_##fn(const float *w, const float *d, char *code, char *extra, const uint32_t *words,        \
                           int64_t n)                                                                             \
    {                                                                                                             \
        for (int64_t i = 0; i < n; i += PAIR)                                                                     \
            apply_any(HSTEP_FORMAT_##fn, code, extra, i, v_load(w + i), v_load(w + i + VL), v_load(d + i),        \
                      v_load(d + i + VL), vi_load(words + i / 2));                                                \
    }
#define BLOCK_FORMAT(id, name, fn, ...) TILE_FUNCTIONS(fn, 0) TILE_FUNCTIONS(fn, 1)
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT

/* How many states a row has: the length of a list with one entry each. */
#define STATE(...) 0
#define STATES(...) (int)sizeof((char[]){__VA_ARGS__})
#define HYPERS(...)

V_OP void rule_tile(vf (*rule)(const vf *, vf, vf, vf *, int), const int states, const int clamp, const float *k,
                    const float *w, const float *g, float *d, float *const *s, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) {
        vf sv[HALFSTEP_MAX_STATES];
        for (int j = 0; j < states; j++) sv[j] = v_load(s[j] + i);
        v_store(d + i, rule(kv, v_load(w + i), v_load(g + i), sv, clamp));
        for (int j = 0; j < states; j++) v_store(s[j] + i, sv[j]);
    }
}

#define RULE(id, name, fn, title, lr, wd, decay, states, hypers)                                                    \
    static void rule_##id##_free(const float *k, const float *w, const float *g, float *d, float *const *s,         \
                                 int64_t n)                                                                         \
    {                                                                                                               \
        rule_tile(fn##_rule, states, 0, k, w, g, d, s, n);                                                          \
    }                                                                                                               \
    static void rule_##id##_clamped(const float *k, const float *w, const float *g, float *d, float *const *s,      \
                                    int64_t n)                                                                      \
    {                                                                                                               \
        rule_tile(fn##_rule, states, 1, k, w, g, d, s, n);                                                          \
    }
#include "rules/rules.def"
#undef RULE

static void gradient_tile(float *g, const float *w, float scale, float mean, float l2, int64_t n)
{
    vf s = v_set(scale), c = v_set(mean), l = v_set(l2);
    for (int64_t i = 0; i < n; i += VL) {
        vf x = v_mul(v_load(g + i), s);
        if (mean != 0.0f) x = v_sub(x, c);
        if (l2 != 0.0f) x = v_add(x, v_mul(l, v_load(w + i)));
        v_store(g + i, x);
    }
}

static void accumulate_tile(float *g, const float *x, float scale, int64_t n)
{
    vf s = v_set(scale);
    for (int64_t i = 0; i < n; i += VL) v_store(g + i, v_add(v_load(g + i), v_mul(v_load(x + i), s)));
}

V_OP uint32_t maximum_of(const int format, const char *code, int64_t n)
{
    vi m = vi_set(0), limit = vi_set(0x7fffffff);
    for (int64_t i = 0; i < n; i += PAIR) {
        vf e, o;
        load_any(format, 0, code, NULL, i, &e, &o);
        m = vi_max(m, vi_max(vi_and(v_bits(e), limit), vi_and(v_bits(o), limit)));
    }
    return (uint32_t)vi_hmax(m);
}

V_OP void squares_of(const int format, const char *code, int64_t n, double *sums, uint32_t *maximum)
{
    va a = va_zero();
    vi m = vi_set(0), limit = vi_set(0x7fffffff);
    for (int64_t i = 0; i < n; i += HSTEP_GROUP)
        for (int part = 0; part < PAIRS; part++) {
            vf e, o;
            load_any(format, 0, code, NULL, i + part * PAIR, &e, &o);
            va_add_product(&a, part, e, e);
            va_add_product(&a, part, o, o);
            m = vi_max(m, vi_max(vi_and(v_bits(e), limit), vi_and(v_bits(o), limit)));
        }
    *maximum = (uint32_t)vi_hmax(m);
    va_store(a, sums);
}

V_OP void sums_of(const int format, const char *code, int64_t n, double *sums)
{
    va a = va_zero();
    for (int64_t i = 0; i < n; i += HSTEP_GROUP)
        for (int part = 0; part < PAIRS; part++) {
            vf e, o;
            load_any(format, 0, code, NULL, i + part * PAIR, &e, &o);
            va_add(&a, part, e);
            va_add(&a, part, o);
        }
    va_store(a, sums);
}

#define ELEMENT_FORMAT(id, name, fn, ...)                                                              \
    static uint32_t maximum_##fn(const char *code, int64_t n)                                          \
    {                                                                                                  \
        return maximum_of(HSTEP_FORMAT_##fn, code, n);                                                 \
    }                                                                                                  \
    static void squares_##fn(const char *code, int64_t n, double *sums, uint32_t *maximum)             \
    {                                                                                                  \
        squares_of(HSTEP_FORMAT_##fn, code, n, sums, maximum);                                         \
    }                                                                                                  \
    static void sums_##fn(const char *code, int64_t n, double *sums)                                   \
    {                                                                                                  \
        sums_of(HSTEP_FORMAT_##fn, code, n, sums);                                                     \
    }
#define BLOCK_FORMAT(id, name, fn, ...)
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT

static void to_plain(const float *x, float *plain, int64_t n)
{
    for (int64_t i = 0; i < n; i += PAIR) vp_store_f32(plain + i, v_load(x + i), v_load(x + i + VL));
}

static void from_plain(const float *plain, float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += PAIR) {
        vf e, o;
        vp_load_f32(plain + i, &e, &o);
        v_store(x + i, e);
        v_store(x + i + VL, o);
    }
}

/* ---- Random words ---- */

/* hstep_mixer_word() on VL consecutive words; `x` runs on by VL steps per call. */
V_OP vi mixer_start(const struct hstep_key *key, uint64_t pair)
{
    uint32_t first = (uint32_t)pair & (HSTEP_SEGMENT_WORDS - 1);
    return vi_add(vi_set(key->k[0]), vi_mul(vi_add(vi_set(first), vi_iota()), vi_set(HSTEP_MIXER_STEP)));
}

V_OP vi mixer_next(vi *x, vi k1)
{
    vi y = *x;
    *x = vi_add(y, vi_set(HSTEP_MIXER_STEP * VL));
    y = vi_xor(y, vi_shr(y, 16));
    y = vi_mul(y, vi_set(HSTEP_MIXER_MUL1));
    y = vi_xor(y, vi_xor(vi_shr(y, 15), k1));
    y = vi_mul(y, vi_set(HSTEP_MIXER_MUL2));
    return vi_xor(y, vi_shr(y, 16));
}

static void random_MIXER(const struct hstep_key *stream, uint64_t first, uint32_t *words, int64_t n)
{
    struct hstep_key key = hstep_key_segment(stream, first >> HSTEP_SEGMENT_SHIFT);
    vi x = mixer_start(&key, first), k1 = vi_set(key.k[1]);
    for (int64_t i = 0; i < n; i += VL) vi_store(words + i, mixer_next(&x, k1));
}

static void random_PHILOX7(const struct hstep_key *stream, uint64_t first, uint32_t *words, int64_t n)
{
    uint64_t block = first >> 2;
    if (VL == 1 || (uint32_t)block > UINT32_MAX - HSTEP_TILE) {
        for (int64_t i = 0; i < n; i += 4) hstep_philox_block(stream, block + (uint64_t)i / 4, words + i);
        return;
    }
    /* VL blocks side by side, one per lane. */
    for (int64_t i = 0; i < n; i += 4 * VL) {
        vi a = vi_add(vi_set((uint32_t)block + (uint32_t)(i / 4)), vi_iota()), b = vi_set((uint32_t)(block >> 32));
        vi c = vi_set(stream->k[2]), d = vi_set(stream->k[3]);
        uint32_t k = stream->k[0], l = stream->k[1];
        for (int round = 0; round < 7; round++) {
            vi p = vi_mul(vi_set(0xD2511F53u), a), p_high = vi_mulhi(vi_set(0xD2511F53u), a);
            vi q = vi_mul(vi_set(0xCD9E8D57u), c), q_high = vi_mulhi(vi_set(0xCD9E8D57u), c);
            a = vi_xor(vi_xor(q_high, b), vi_set(k));
            b = q;
            c = vi_xor(vi_xor(p_high, d), vi_set(l));
            d = p;
            k += 0x9E3779B9u;
            l += 0xBB67AE85u;
        }
        HSTEP_ALIGNED uint32_t lanes[4][VL];
        vi_store(lanes[0], a);
        vi_store(lanes[1], b);
        vi_store(lanes[2], c);
        vi_store(lanes[3], d);
        int64_t blocks = (n - i) / 4 < VL ? (n - i) / 4 : VL;
        for (int64_t j = 0; j < blocks; j++)
            for (int w = 0; w < 4; w++) words[i + 4 * j + w] = lanes[w][j];
    }
}

/* ---- Fused steps ---- */

/* Sixteen blocks: the maxima of a stretch fill one vector of the widest instruction set. */
#define FUSED_TILE 512

/* One state on its way through a fused loop. */
struct fused_state {
    char *code, *extra;
    vi x, k1, largest; /* of its random words; of the group's stashed magnitudes */
    float *stash;
};

/* Format and role are constants at every call, and calls are written out instead of looped over: a loop that the compiler
 * leaves rolled would turn the switches on formats into real ones. */
V_OP void fused_load(const struct fused_state *s, const int format, const int nonneg, const int plain, int64_t i, vf *e,
                     vf *o)
{
    if (format == HSTEP_FORMAT_NONE) {
        *e = *o = v_set(0.0f);
    } else if (plain) {
        *e = v_loadu(s->code + 4 * i);
        *o = v_loadu(s->code + 4 * (i + VL));
    } else {
        load_any(format, nonneg, s->code, s->extra, i, e, o);
    }
}

V_OP void fused_store(struct fused_state *s, const int format, const int nonneg, const int plain, int64_t i, int64_t r, vf e,
                      vf o)
{
    if (format == HSTEP_FORMAT_NONE) return;
    if (plain) {
        v_storeu(s->code + 4 * i, v_from_bits(hstep_flush(v_bits(e))));
        v_storeu(s->code + 4 * (i + VL), v_from_bits(hstep_flush(v_bits(o))));
    } else if (is_block(format)) {
        e = stash_any(format, e, nonneg);
        o = stash_any(format, o, nonneg);
        v_store(s->stash + r, e);
        v_store(s->stash + r + VL, o);
        if (!nonneg) e = v_abs(e), o = v_abs(o);
        s->largest = vi_max(s->largest, vi_max(v_bits(e), v_bits(o)));
    } else {
        store_any(format, s->code, s->extra, i, e, o, mixer_next(&s->x, s->k1), 1);
    }
}

V_OP void fused_encode(struct fused_state *s, const int format, const int nonneg, int random, uint32_t (*rows)[VL],
                       int64_t t, int64_t n)
{
    if (!is_block(format)) return;
    HSTEP_ALIGNED uint32_t words[FUSED_TILE / 2], maxima[16];
    if (random)
        for (int64_t i = 0; i < n / 2; i += VL) vi_store(words + i, mixer_next(&s->x, s->k1));
    else
        for (int64_t i = 0; i < n / 2; i += VL) vi_store(words + i, vi_set(0x80008000));
    block_maxima(rows, n / HSTEP_GROUP, maxima);
    encode_blocks(format, nonneg, s->stash, maxima, s->code + t, s->extra + t / HSTEP_GROUP * 2, words, n);
}

V_OP struct fused_state fused_start(const struct hstep_fused *a, int slot, float *stash)
{
    struct fused_state s = {.code = a->code[slot], .extra = a->extra[slot], .stash = stash};
    s.x = mixer_start(&a->key[slot], a->index / 2);
    s.k1 = vi_set(a->key[slot].k[1]);
    s.largest = vi_set(0);
    return s;
}

V_OP void fused_step(const struct hstep_fused *a, vf (*rule)(const vf *, vf, vf, vf *, int), const int weight,
                     const int gradient, const int s0, const int s1)
{
    const int clamp = is_block(s0) || is_block(s1);
    /* No 16-bit neighbour asks for pairs: elements stay in memory order and need no shuffles. */
    const int plain = weight == HSTEP_FORMAT_f32 && gradient == HSTEP_FORMAT_f32 && s0 == HSTEP_FORMAT_f32 &&
                      (s1 == HSTEP_FORMAT_f32 || s1 == HSTEP_FORMAT_NONE);
    HSTEP_ALIGNED float stash0[FUSED_TILE], stash1[FUSED_TILE];
    HSTEP_ALIGNED uint32_t rows0[16][VL], rows1[16][VL];
    struct fused_state w = fused_start(a, HALFSTEP_SLOT_WEIGHT, NULL), g = fused_start(a, HALFSTEP_SLOT_GRADIENT, NULL);
    struct fused_state p = fused_start(a, HALFSTEP_SLOT_STATE, stash0), q = fused_start(a, HALFSTEP_SLOT_STATE + 1, stash1);
    const uint32_t stochastic = a->stochastic;
    const int64_t total = a->n;
    vf k[HSTEP_MAX_SCALARS], scale = v_set(a->gradient_scale);
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);

    for (int64_t t = 0; t < total; t += FUSED_TILE) {
        int64_t n = total - t < FUSED_TILE ? total - t : FUSED_TILE;
        for (int64_t b = 0; b < n / HSTEP_GROUP; b++) {
            p.largest = q.largest = vi_set(0);
            for (int part = 0; part < PAIRS; part++) {
                int64_t r = b * HSTEP_GROUP + part * PAIR, i = t + r;
                vf we, wo, ge, go, se[HALFSTEP_MAX_STATES], so[HALFSTEP_MAX_STATES];
                fused_load(&w, weight, 0, plain, i, &we, &wo);
                fused_load(&g, gradient, 0, plain, i, &ge, &go);
                fused_load(&p, s0, 0, plain, i, &se[0], &so[0]);
                fused_load(&q, s1, 1, plain, i, &se[1], &so[1]);
                vf de = rule(k, we, v_mul(ge, scale), se, clamp), d_o = rule(k, wo, v_mul(go, scale), so, clamp);
                if (plain) {
                    v_storeu(w.code + 4 * i, v_sub(we, v_add(de, v_set(0.0f))));
                    v_storeu(w.code + 4 * (i + VL), v_sub(wo, v_add(d_o, v_set(0.0f))));
                } else {
                    apply_any(weight, w.code, w.extra, i, we, wo, de, d_o, mixer_next(&w.x, w.k1));
                }
                fused_store(&p, s0, 0, plain, i, r, se[0], so[0]);
                fused_store(&q, s1, 1, plain, i, r, se[1], so[1]);
            }
            if (is_block(s0)) vi_store(rows0[b], p.largest);
            if (is_block(s1)) vi_store(rows1[b], q.largest);
        }
        fused_encode(&p, s0, 0, stochastic >> HALFSTEP_SLOT_STATE & 1, rows0, t, n);
        fused_encode(&q, s1, 1, stochastic >> (HALFSTEP_SLOT_STATE + 1) & 1, rows1, t, n);
    }
}

/* In a fused row the first state is signed and the second, if there is one, a second moment. */
#if VL > 1
#define HSTEP_FORMAT_none HSTEP_FORMAT_NONE
#define FUSED(fn, weight, gradient, s0, s1)                                                                       \
    static void fused_##fn##_##weight##_##gradient##_##s0##_##s1(const struct hstep_fused *a)                     \
    {                                                                                                             \
        fused_step(a, fn##_rule, HSTEP_FORMAT_##weight, HSTEP_FORMAT_##gradient, HSTEP_FORMAT_##s0,               \
                   HSTEP_FORMAT_##s1);                                                                            \
    }
#include "fused.def"
#undef FUSED
#endif

static const struct hstep_fused_row fused_rows[] = {
#if VL > 1
#define FUSED(fn, weight, gradient, s0, s1)                                                        \
    {#fn, HSTEP_FORMAT_##weight, HSTEP_FORMAT_##gradient, {HSTEP_FORMAT_##s0, HSTEP_FORMAT_##s1}, \
     fused_##fn##_##weight##_##gradient##_##s0##_##s1},
#include "fused.def"
#undef FUSED
#endif
    {NULL, 0, 0, {0, 0}, NULL},
};

#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

const struct hstep_kernels CONCATENATE(hstep_kernels_, HSTEP_ISA) = {
    .name = HSTEP_VEC_NAME,
    .lanes = VL,
    .format = {
#define ELEMENT_FORMAT(id, name, fn, ...)                                                                          \
    [HSTEP_FORMAT_##fn] = {{decode_##fn##_0, decode_##fn##_0}, {encode_##fn##_0, encode_##fn##_0}, apply_##fn,     \
                           maximum_##fn, squares_##fn, sums_##fn},
#define BLOCK_FORMAT(id, name, fn, ...)                                                                            \
    [HSTEP_FORMAT_##fn] = {.decode = {decode_##fn##_0, decode_##fn##_1}, .encode = {encode_##fn##_0, encode_##fn##_1}},
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    },
    .rule = {
#define RULE(id, ...) [HSTEP_RULE_ROW_##id] = {rule_##id##_free, rule_##id##_clamped},
#include "rules/rules.def"
#undef RULE
    },
    .gradient = gradient_tile,
    .accumulate = accumulate_tile,
    .to_plain = to_plain,
    .from_plain = from_plain,
    .random = {
#define GENERATOR(constant, id, name, title) random_##constant,
        HSTEP_GENERATORS(GENERATOR)
#undef GENERATOR
    },
    .fused = fused_rows,
    .fused_rows = sizeof fused_rows / sizeof *fused_rows - 1,
};
