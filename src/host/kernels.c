/* The multi-compiled file: once per row of vec/isas.def, with HSTEP_VEC_HEADER naming the vocabulary and HSTEP_ISA the
 * table's suffix. Rules and formats are inlined here in two ways, tile by tile (any combination) and fused in registers
 * (the rows of fused.def), from the same functions. Over 500 lines because everything here must be seen by the compiler at
 * once for each instruction set. */
#include "host/kernels.h"
#include "scale.h"

/* Scheduling before registers are given out, which gcc leaves off for x86, gains up to 7 % where roots and quotients of long
 * loops overlap. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("schedule-insns", "sched-pressure")
#endif

#include HSTEP_VEC_HEADER

#define HSTEP_INCLUDE_FORMATS
#include "formats/formats.def"
#undef HSTEP_INCLUDE_FORMATS
#define HSTEP_INCLUDE_RULES
#include "rules/rules.def"
#undef HSTEP_INCLUDE_RULES

#include "product.h"

#define PAIR (2 * VL)
#define PAIRS (16 / VL) /* in a group of 32 */

/* Switches on constants: every caller is inlined with a constant format or rule, so only one case is left. */

/* Of formats.def; block: elements that share a scale, 0 for element formats. */
struct columns { int bits, block, scale, stochastic, root; };

V_OP struct columns columns_of(const int format)
{
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, title, roles, dtype, extra, sr) \
    case HSTEP_FORMAT_##fn:                                          \
        return (struct columns){HSTEP_BITS_##dtype, 0, 0, sr, 0};
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, scale, geometry, sr, root) \
    case HSTEP_FORMAT_##fn:                                                                     \
        return (struct columns){bits, block, HSTEP_SCALE_##scale, sr, root};
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        return (struct columns){0, 0, 0, 0, 0};
    }
}

V_OP int is_block(const int format) { return columns_of(format).block != 0; }

/* Whether a state lies on a grid that decays with it. */
V_OP int has_grid(const int format, const int nonneg) { return nonneg && columns_of(format).root != 0; }

/* Elements i .. i + PAIR - 1 of a block format, which share a scale. */
V_OP void load_scaled(const int format, const int nonneg, const char *code, vf scale, int64_t i, vf *e, vf *o)
{
    vi ce, co;
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, ...)         \
    case HSTEP_FORMAT_##fn:                     \
        fn##_load(code, i, &ce, &co, nonneg);   \
        *e = fn##_value(ce, scale, nonneg);     \
        *o = fn##_value(co, scale, nonneg);     \
        break;
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        *e = *o = v_set(0.0f);
    }
}

V_OP void load_any(const int format, const int nonneg, const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    const struct columns c = columns_of(format);
    if (c.block) {
        load_scaled(format, nonneg, code, v_from_bits(vi_set(hstep_scale_load(c.scale, extra, i / c.block))), i, e, o);
        return;
    }
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)    \
    case HSTEP_FORMAT_##fn:                  \
        fn##_decode(code, extra, i, e, o);   \
        break;
#define BLOCK_FORMAT(id, name, fn, ...)
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

/* What is stashed of a second moment, on its grid. It ends where the largest code of a block, which may be rounded up, still
 * decodes to a finite number. */
V_OP vf onto_grid(const int format, vf stashed, vf factor)
{
    return v_min(v_mul(stashed, factor), v_set(columns_of(format).root == 2 ? 0x1.6a09e6p63f : 0x1p127f));
}

/* What a block's maximum is taken over: signed values themselves, of others what is stashed. */
V_OP vi magnitude_of(vf x, vf stashed, const int nonneg) { return v_bits(nonneg ? stashed : v_abs(x)); }

/* Scales of n elements (at most 512) from the maxima of their groups, of which a block has one or more. */
#define SCALES_ROWS(fn, nonneg, block, scale)                                                                      \
    if (block > HSTEP_GROUP)                                                                                       \
        for (int64_t b = 0; b * block < n; b++) {                                                                  \
            uint32_t largest = 0;                                                                                  \
            for (int j = 0; j < block / HSTEP_GROUP; j++)                                                          \
                if (maxima[b * (block / HSTEP_GROUP) + j] > largest) largest = maxima[b * (block / HSTEP_GROUP) + j]; \
            maxima[b] = largest;                                                                                   \
        }                                                                                                          \
    for (int b = 0; b < 16; b += VL) {                                                                             \
        vi patterns = fn##_scale(v_from_bits(vi_load(maxima + b)), nonneg);                                        \
        vi_store(scales + b, patterns);                                                                            \
        v_store(inverses + b, fn##_inverse(patterns, nonneg));                                                     \
    }                                                                                                              \
    for (int64_t b = 0; b * block < n; b++) hstep_scale_store(HSTEP_SCALE_##scale, extra, b, scales[b]);
#define SCALES_FLAT SCALES_ROWS
/* The scale is given. */
#define SCALES_TENSOR(fn, nonneg, block, scale)                                                                    \
    (void)maxima, (void)scales, (void)n;                                                                           \
    v_store(inverses, fn##_inverse(vi_set(hstep_scale_load(HSTEP_SCALE_##scale, extra, 0)), nonneg));

/* maxima and inverses have room for 16; inverses[b] belongs to block b. */
V_OP void encode_scales(const int format, const int nonneg, uint32_t *maxima, char *extra, float *inverses, int64_t n)
{
    HSTEP_ALIGNED uint32_t scales[16];
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, scale, geometry, ...) \
    case HSTEP_FORMAT_##fn: {                                                              \
        SCALES_##geometry(fn, nonneg, block, scale)                                        \
        break;                                                                             \
    }
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        break;
    }
}

/* Codes of stashed elements i .. i + PAIR - 1. */
V_OP void encode_codes(const int format, const int nonneg, const float *stash, const float *inverses, char *code, int64_t i,
                       vi words)
{
    switch (format) {
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, ...)                              \
    case HSTEP_FORMAT_##fn: {                                                                          \
        vf inverse = v_set(inverses[i / (block)]);                                                     \
        vi ce = fn##_code(v_load(stash + i), inverse, vi_and(words, vi_set(0xffff)), nonneg);          \
        vi co = fn##_code(v_load(stash + i + VL), inverse, vi_shr(words, 16), nonneg);                 \
        fn##_store(code, i, ce, co);                                                                   \
        break;                                                                                         \
    }
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    default:
        break;
    }
}

/* One row of lane maxima per group; this takes 16 rows down to 16 maxima. */
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
                      int64_t n, const int state, float onto)
{
    if (!is_block(format)) {
        for (int64_t i = 0; i < n; i += PAIR)
            store_any(format, code, extra, i, v_load(x + i), v_load(x + i + VL), vi_load(words + i / 2), state);
        return;
    }
    HSTEP_ALIGNED float stash[HSTEP_TILE], inverses[16];
    HSTEP_ALIGNED uint32_t rows[16][VL], maxima[16];
    for (int64_t b = 0; b * HSTEP_GROUP < n; b++) {
        vi largest = vi_set(0);
        for (int64_t i = b * HSTEP_GROUP; i < (b + 1) * HSTEP_GROUP; i += VL) {
            vf stashed = stash_any(format, v_load(x + i), nonneg);
            if (has_grid(format, nonneg)) stashed = onto_grid(format, stashed, v_set(onto));
            v_store(stash + i, stashed);
            largest = vi_max(largest, magnitude_of(v_load(x + i), stashed, nonneg));
        }
        vi_store(rows[b], largest);
    }
    block_maxima(rows, n / HSTEP_GROUP, maxima);
    encode_scales(format, nonneg, maxima, extra, inverses, n);
    for (int64_t i = 0; i < n; i += PAIR) encode_codes(format, nonneg, stash, inverses, code, i, vi_load(words + i / 2));
}

#define TILE_FUNCTIONS(fn, nonneg)                                                                                 \
    static void decode_##fn##_##nonneg(float *x, const char *code, const char *extra, int64_t n)                   \
    {                                                                                                              \
        decode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, n);                                                 \
    }                                                                                                              \
    static void encode_##fn##_##nonneg(const float *x, char *code, char *extra, const uint32_t *words, int64_t n,  \
                                       int state, float onto)                                                      \
    {                                                                                                              \
        if (state)                                                                                                 \
            encode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, words, n, 1, onto);                             \
        else                                                                                                       \
            encode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, words, n, 0, onto);                             \
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

/* Formats whose scale is a sum over the tensor: the values whose squares are summed, and the scale. */
#define NORM_ROWS(fn)
#define NORM_FLAT(fn)
#define NORM_TENSOR(fn)                                                                                           \
    static void norm_##fn##_0(const float *x, float *out, int64_t n)                                              \
    {                                                                                                             \
        for (int64_t i = 0; i < n; i += VL) v_store(out + i, fn##_norm(v_load(x + i), 0));                        \
    }                                                                                                             \
    static void norm_##fn##_1(const float *x, float *out, int64_t n)                                              \
    {                                                                                                             \
        for (int64_t i = 0; i < n; i += VL) v_store(out + i, fn##_norm(v_load(x + i), 1));                        \
    }
#define ELEMENT_FORMAT(id, name, fn, ...)
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, scale, geometry, ...) NORM_##geometry(fn)
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT

/* How many states a row has: the length of a list with one entry each. */
#define STATE(...) 0
#define STATES(...) (int)sizeof((char[]){__VA_ARGS__})
#define HYPERS(...)
#define SCALARS(...)

V_OP void rule_tile(vf (*rule)(const vf *, vf, vf, vf *, int), const int states, const int mode, const float *k,
                    const float *w, const float *g, float *d, float *const *s, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) {
        vf sv[HALFSTEP_MAX_STATES];
        for (int j = 0; j < states; j++) sv[j] = v_load(s[j] + i);
        v_store(d + i, rule(kv, v_load(w + i), v_load(g + i), sv, mode));
        for (int j = 0; j < states; j++) v_store(s[j] + i, sv[j]);
    }
}

V_OP void norms_tile(void (*norms)(const vf *, vf, vf, vf *, vf *, int), const int states, const int count, const int mode,
                     const float *k, const float *w, const float *g, float *const *x, float *const *s, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) {
        vf sv[HALFSTEP_MAX_STATES], xv[HSTEP_MAX_NORMS];
        for (int j = 0; j < states; j++) sv[j] = v_load(s[j] + i);
        norms(kv, v_load(w + i), v_load(g + i), sv, xv, mode);
        for (int j = 0; j < states; j++) v_store(s[j] + i, sv[j]);
        for (int j = 0; j < count; j++) v_store(x[j] + i, xv[j]);
    }
}

/* The direction of a matrix step, in the order of elements, and the change that the transformed one makes. */
V_OP void direction_tile(vf (*direction)(const vf *, vf, vf *, int), const int mode, const float *k, const float *g,
                         float *u, float *const *s, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) {
        vf sv[HALFSTEP_MAX_STATES] = {v_load(s[0] + i)};
        v_store(u + i, direction(kv, v_load(g + i), sv, mode));
        v_store(s[0] + i, sv[0]);
    }
}

V_OP void change_tile(vf (*change)(const vf *, vf, vf), const float *k, const float *w, const float *u, float *d, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) v_store(d + i, change(kv, v_load(w + i), v_load(u + i)));
}

#define RULE_FUNCTION(id, fn, states, mode)                                                                         \
    static void rule_##id##_##mode(const float *k, const float *w, const float *g, float *d, float *const *s,       \
                                   int64_t n)                                                                       \
    {                                                                                                               \
        rule_tile(fn##_rule, states, mode, k, w, g, d, s, n);                                                       \
    }
#define RULE(id, name, fn, label, title, lr, wd, decay, states, ...)                                                       \
    RULE_FUNCTION(id, fn, states, 0) RULE_FUNCTION(id, fn, states, 1) RULE_FUNCTION(id, fn, states, 2)              \
    RULE_FUNCTION(id, fn, states, 3)
#include "rules/rules.def"
#undef RULE

#define NO_NORMS(id, fn, states)
#define NORMS_1(id, fn, states) NORMS_FUNCTION(id, fn, states, 1, 0) NORMS_FUNCTION(id, fn, states, 1, 1)
#define NORMS_2(id, fn, states) NORMS_FUNCTION(id, fn, states, 2, 0) NORMS_FUNCTION(id, fn, states, 2, 1)
#define NORMS_FUNCTION(id, fn, states, count, mode)                                                                 \
    static void norms_##id##_##mode(const float *k, const float *w, const float *g, float *const *x,                \
                                    float *const *s, int64_t n)                                                     \
    {                                                                                                               \
        norms_tile(fn##_norms, states, count, mode, k, w, g, x, s, n);                                              \
    }
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, ...) norms(id, fn, (states))
#include "rules/rules.def"
#undef RULE
#undef NO_NORMS
#undef NORMS_1
#undef NORMS_2

#define ELEMENTWISE(id, fn)
#define RAW_GRADIENT(id, fn)
#define MATRIX(id, fn)                                                                                              \
    static void direction_##id##_0(const float *k, const float *g, float *u, float *const *s, int64_t n)            \
    {                                                                                                               \
        direction_tile(fn##_direction, 0, k, g, u, s, n);                                                           \
    }                                                                                                               \
    static void direction_##id##_1(const float *k, const float *g, float *u, float *const *s, int64_t n)            \
    {                                                                                                               \
        direction_tile(fn##_direction, 1, k, g, u, s, n);                                                           \
    }                                                                                                               \
    static void change_##id(const float *k, const float *w, const float *u, float *d, int64_t n)                    \
    {                                                                                                               \
        change_tile(fn##_change, k, w, u, d, n);                                                                    \
    }
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind) kind(id, fn)
#include "rules/rules.def"
#undef RULE
#undef ELEMENTWISE
#undef RAW_GRADIENT
#undef MATRIX

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

static void scale_tile(float *x, float factor, int64_t n)
{
    vf f = v_set(factor);
    for (int64_t i = 0; i < n; i += VL) v_store(x + i, v_mul(v_load(x + i), f));
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

/* hstep_lattice_word() of VL mixer words. */
V_OP vi lattice_of(vi h, vi factor, vi offset) { return vi_add16(vi_mul16(h, factor), offset); }

static void random_LATTICE(const struct hstep_key *stream, uint64_t first, uint32_t *words, int64_t n)
{
    struct hstep_key key = hstep_key_segment(stream, first >> HSTEP_SEGMENT_SHIFT);
    vi x = mixer_start(&key, first), k1 = vi_set(key.k[1]), factor = vi_set(key.factor), offset = vi_set(key.offset);
    for (int64_t i = 0; i < n; i += VL) vi_store(words + i, lattice_of(mixer_next(&x, k1), factor, offset));
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

/* Sixteen groups: their maxima fill one vector of the widest instruction set. */
#define FUSED_TILE 512

/* What a block format needs for a tile; scales are the stored ones as fp32, so that a loop reads them at no cost. */
struct fused_room {
    HSTEP_ALIGNED float stash[FUSED_TILE];
    HSTEP_ALIGNED float scales[16];
    HSTEP_ALIGNED float inverses[16];
    HSTEP_ALIGNED uint32_t maxima[16][VL];
};

/* One slot on its way through a fused loop. */
struct fused_slot {
    char *code, *extra;
    vi x, k1, factor, offset; /* of its random words */
    vi largest;               /* of the group's magnitudes */
    vf grid, onto;            /* of a second moment */
    struct fused_room *room;
};

V_OP struct fused_slot fused_start(const struct hstep_fused *a, int slot, struct fused_room *room)
{
    struct fused_slot s = {.code = a->code[slot], .extra = a->extra[slot], .room = room};
    s.x = mixer_start(&a->key[slot], a->index / 2);
    s.k1 = vi_set(a->key[slot].k[1]);
    s.factor = vi_set(a->key[slot].factor);
    s.offset = vi_set(a->key[slot].offset);
    s.largest = vi_set(0);
    s.grid = v_set(a->grid);
    s.onto = v_set(a->onto_grid);
    return s;
}

/* Words of an element format. Block codes take the mixer's as they are, and do not pay for factor and offset. */
V_OP vi fused_words(struct fused_slot *s) { return lattice_of(mixer_next(&s->x, s->k1), s->factor, s->offset); }

/* Format and role are constants at every call, and calls are written out instead of looped over: a loop that the compiler
 * leaves rolled would turn the switches on formats into real ones. Element i is the r-th of its tile. */
V_OP void fused_load(const struct fused_slot *s, const int format, const int nonneg, const int plain, int64_t i, int64_t r,
                     vf *e, vf *o)
{
    if (format == HSTEP_FORMAT_NONE) {
        *e = *o = v_set(0.0f);
    } else if (plain) {
        *e = v_loadu(s->code + 4 * i);
        *o = v_loadu(s->code + 4 * (i + VL));
    } else if (is_block(format)) {
        load_scaled(format, nonneg, s->code, v_set(s->room->scales[r / columns_of(format).block]), i, e, o);
        if (has_grid(format, nonneg)) *e = v_mul(*e, s->grid), *o = v_mul(*o, s->grid);
    } else {
        load_any(format, nonneg, s->code, s->extra, i, e, o);
    }
}

V_OP void fused_store(struct fused_slot *s, const int format, const int nonneg, const int plain, int64_t i, int64_t r, vf e,
                      vf o)
{
    if (format == HSTEP_FORMAT_NONE) return;
    if (plain) {
        v_storeu(s->code + 4 * i, v_from_bits(hstep_flush(v_bits(e))));
        v_storeu(s->code + 4 * (i + VL), v_from_bits(hstep_flush(v_bits(o))));
    } else if (is_block(format)) {
        vf stashed_e = stash_any(format, e, nonneg), stashed_o = stash_any(format, o, nonneg);
        if (has_grid(format, nonneg)) {
            stashed_e = onto_grid(format, stashed_e, s->onto);
            stashed_o = onto_grid(format, stashed_o, s->onto);
        }
        v_store(s->room->stash + r, stashed_e);
        v_store(s->room->stash + r + VL, stashed_o);
        vi larger = vi_max(magnitude_of(e, stashed_e, nonneg), magnitude_of(o, stashed_o, nonneg));
        s->largest = r % HSTEP_GROUP ? vi_max(s->largest, larger) : larger;
        vi_store(s->room->maxima[r / HSTEP_GROUP], s->largest);
    } else {
        store_any(format, s->code, s->extra, i, e, o, fused_words(s), 1);
    }
}

V_OP char *fused_extra(const struct fused_slot *s, const int format, int64_t t)
{
    const struct columns c = columns_of(format);
    return s->extra + t / c.block * hstep_scale_bytes(c.scale);
}

/* Scales of the n elements from t on, before a tile. */
V_OP void fused_read_scales(const struct fused_slot *s, const int format, int64_t t, int64_t n)
{
    const struct columns c = columns_of(format);
    if (!c.block) return;
    for (int64_t b = 0; b * c.block < n; b++) {
        uint32_t scale = hstep_scale_load(c.scale, fused_extra(s, format, t), b);
        memcpy(&s->room->scales[b], &scale, 4);
    }
}

/* And after it. */
V_OP void fused_write_scales(const struct fused_slot *s, const int format, const int nonneg, int64_t t, int64_t n)
{
    HSTEP_ALIGNED uint32_t maxima[16];
    if (!is_block(format)) return;
    block_maxima(s->room->maxima, n / HSTEP_GROUP, maxima);
    encode_scales(format, nonneg, maxima, fused_extra(s, format, t), s->room->inverses, n);
}

/* Codes of both states in one loop: one often waits for roots that the other does not need. */
V_OP void fused_codes(struct fused_slot *p, struct fused_slot *q, const int s0, const int s1, int64_t t, int64_t n)
{
    const struct columns c0 = columns_of(s0), c1 = columns_of(s1);
    const vi half = vi_set(0x80008000);
    for (int64_t i = 0; i < n; i += PAIR) {
        if (c0.block)
            encode_codes(s0, 0, p->room->stash, p->room->inverses, p->code + t * c0.bits / 8, i,
                         c0.stochastic ? mixer_next(&p->x, p->k1) : half);
        if (c1.block)
            encode_codes(s1, 1, q->room->stash, q->room->inverses, q->code + t * c1.bits / 8, i,
                         c1.stochastic ? mixer_next(&q->x, q->k1) : half);
    }
}

V_OP void fused_step(const struct hstep_fused *a, vf (*rule)(const vf *, vf, vf, vf *, int), const int weight,
                     const int gradient, const int s0, const int s1)
{
    const int mode = is_block(s0) || is_block(s1) ? RULE_CLAMP : 0;
    /* No 16-bit neighbour asks for pairs: elements stay in memory order and need no shuffles. */
    const int plain = weight == HSTEP_FORMAT_f32 && gradient == HSTEP_FORMAT_f32 && s0 == HSTEP_FORMAT_f32 &&
                      (s1 == HSTEP_FORMAT_f32 || s1 == HSTEP_FORMAT_NONE);
    /* Block codes are decoded one turn ahead: processors look for independent work within about half a turn. */
    const int early = is_block(s0) || is_block(s1);
    struct fused_room room0, room1;
    struct fused_slot w = fused_start(a, HALFSTEP_SLOT_WEIGHT, NULL), g = fused_start(a, HALFSTEP_SLOT_GRADIENT, NULL);
    struct fused_slot p = fused_start(a, HALFSTEP_SLOT_STATE, &room0), q = fused_start(a, HALFSTEP_SLOT_STATE + 1, &room1);
    const int64_t total = a->n;
    vf k[HSTEP_MAX_SCALARS], scale = v_set(a->gradient_scale);
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) k[j] = v_set(a->k[j]);

    for (int64_t t = 0; t < total; t += FUSED_TILE) {
        int64_t n = total - t < FUSED_TILE ? total - t : FUSED_TILE;
        fused_read_scales(&p, s0, t, n);
        fused_read_scales(&q, s1, t, n);
        vf next_e[2], next_o[2];
        if (early) {
            fused_load(&p, s0, 0, plain, t, 0, &next_e[0], &next_o[0]);
            fused_load(&q, s1, 1, plain, t, 0, &next_e[1], &next_o[1]);
        }
        for (int64_t b = 0; b < n; b += HSTEP_GROUP)
            for (int64_t r = b; r < b + HSTEP_GROUP; r += PAIR) {
                int64_t i = t + r, at = !early ? r : r + PAIR < n ? r + PAIR : r;
                vf we, wo, ge, go, se[HALFSTEP_MAX_STATES], so[HALFSTEP_MAX_STATES];
                fused_load(&w, weight, 0, plain, i, r, &we, &wo);
                fused_load(&g, gradient, 0, plain, i, r, &ge, &go);
                if (early) se[0] = next_e[0], so[0] = next_o[0], se[1] = next_e[1], so[1] = next_o[1];
                fused_load(&p, s0, 0, plain, t + at, at, &next_e[0], &next_o[0]);
                fused_load(&q, s1, 1, plain, t + at, at, &next_e[1], &next_o[1]);
                if (!early) se[0] = next_e[0], so[0] = next_o[0], se[1] = next_e[1], so[1] = next_o[1];
                vf de = rule(k, we, v_mul(ge, scale), se, mode), d_o = rule(k, wo, v_mul(go, scale), so, mode);
                if (plain) {
                    v_storeu(w.code + 4 * i, v_sub(we, v_add(de, v_set(0.0f))));
                    v_storeu(w.code + 4 * (i + VL), v_sub(wo, v_add(d_o, v_set(0.0f))));
                } else {
                    apply_any(weight, w.code, w.extra, i, we, wo, de, d_o, fused_words(&w));
                }
                fused_store(&p, s0, 0, plain, i, r, se[0], so[0]);
                fused_store(&q, s1, 1, plain, i, r, se[1], so[1]);
            }
        fused_write_scales(&p, s0, 0, t, n);
        fused_write_scales(&q, s1, 1, t, n);
        fused_codes(&p, &q, s0, s1, t, n);
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
    [HSTEP_FORMAT_##fn] = {.decode = {decode_##fn##_0, decode_##fn##_0}, .encode = {encode_##fn##_0, encode_##fn##_0}, \
                           .apply = apply_##fn, .maximum = maximum_##fn, .squares = squares_##fn, .sums = sums_##fn},
#define SCALE_ROWS(fn)
#define SCALE_FLAT(fn)
#define SCALE_TENSOR(fn) .norm = {norm_##fn##_0, norm_##fn##_1}
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, scale, geometry, ...)                         \
    [HSTEP_FORMAT_##fn] = {.decode = {decode_##fn##_0, decode_##fn##_1}, .encode = {encode_##fn##_0, encode_##fn##_1}, \
                           SCALE_##geometry(fn)},
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    },
    .rule = {
#define RULE(id, ...) [HSTEP_RULE_ROW_##id] = {rule_##id##_0, rule_##id##_1, rule_##id##_2, rule_##id##_3},
#include "rules/rules.def"
#undef RULE
    },
    .norms = {
#define NO_NORMS(id)
#define NORMS_1(id) [HSTEP_RULE_ROW_##id] = {norms_##id##_0, norms_##id##_1},
#define NORMS_2(id) [HSTEP_RULE_ROW_##id] = {norms_##id##_0, norms_##id##_1},
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, ...) norms(id)
#include "rules/rules.def"
#undef RULE
    },
    .matrix = {
#define ELEMENTWISE(id)
#define RAW_GRADIENT(id)
#define MATRIX(id) [HSTEP_RULE_ROW_##id] = {{direction_##id##_0, direction_##id##_1}, change_##id},
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind) kind(id)
#include "rules/rules.def"
#undef RULE
    },
    .product = product_tile,
    .gradient = gradient_tile,
    .accumulate = accumulate_tile,
    .scale = scale_tile,
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
