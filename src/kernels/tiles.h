/* Tile functions: loops over up to 256 elements in fp32 scratch memory, for any format with any rule. For kernels.c. */
#ifndef HSTEP_TILES_H
#define HSTEP_TILES_H

#include "kernels/packed.h"

#include "rules/rules.h"

/* ---- Scales of blocks ---- */

/* A full tile of fused.h has 512 elements. It gets a loop of constant length, which compilers turn into few vectors. */
V_OP void store_scales(const int scale, const int64_t block, char *extra, const uint32_t *scales, int64_t n)
{
    if (n == 512)
        for (int64_t b = 0; b < 512 / block; b++) hstep_scale_store(scale, extra, b, scales[b]);
    else
        for (int64_t b = 0; b * block < n; b++) hstep_scale_store(scale, extra, b, scales[b]);
}

V_OP void load_scales(const int scale, const int64_t block, const char *extra, float *scales, int64_t n)
{
    if (n == 512 && block <= 512) {
        uint32_t patterns[16];
        for (int64_t b = 0; b < 512 / block; b++) patterns[b] = hstep_scale_load(scale, extra, b);
        memcpy(scales, patterns, (size_t)(512 / block) * 4);
    } else {
        for (int64_t b = 0; b * block < n; b++) {
            uint32_t pattern = hstep_scale_load(scale, extra, b);
            memcpy(scales + b, &pattern, 4);
        }
    }
}

/* Stores the scales of n elements, at most 512, and writes the inverses that values are multiplied by. maxima: one for
 * each cell. A block has one or more cells. The maxima are overwritten by those of the blocks. */
V_OP void scales_of_blocks(vi (*scale_of)(vf, int), vf (*inverse_of)(vi, int), const int scale, const int block,
                           const int nonneg, uint32_t *maxima, char *extra, float *inverses, int64_t n)
{
    HSTEP_ALIGNED uint32_t scales[16];
    if (block > HSTEP_CELL)
        for (int64_t b = 0; b * block < n; b++) {
            uint32_t largest = 0;
            for (int j = 0; j < block / HSTEP_CELL; j++)
                if (maxima[b * (block / HSTEP_CELL) + j] > largest) largest = maxima[b * (block / HSTEP_CELL) + j];
            maxima[b] = largest;
        }
    for (int b = 0; b < 16; b += VL) {
        vi patterns = scale_of(block_maximum_of(vi_load(maxima + b)), nonneg);
        vi_store(scales + b, patterns);
        v_store(inverses + b, inverse_of(patterns, nonneg));
    }
    store_scales(scale, block, extra, scales, n);
}

/* Stores the scales of the blocks, except that a format with one scale for a tensor reads it. The arrays `maxima` and
 * `inverses` have room for 16. Block b has inverses[b]. */
V_OP void encode_scales(const int format, const int nonneg, uint32_t *maxima, char *extra, float *inverses, int64_t n)
{
    switch (format) {
#define FORMAT(id, fn)                                                                                              \
    IF_LARGEST(fn, FORMAT_CASE(fn) scales_of_blocks(fn##_scale, fn##_inverse, fn##_scale_dtype, fn##_block, nonneg, \
                                                    maxima, extra, inverses, n);                                    \
               break;)                                                                                              \
    IF_TENSOR(fn, FORMAT_CASE(fn) /* the caller has set it */                                                       \
              v_store(inverses, fn##_inverse(vi_set(hstep_scale_load(fn##_scale_dtype, extra, 0)), nonneg));        \
              break;)
#include "formats/formats.def"
#undef FORMAT
    default: break;
    }
}

/* Reduces 16 rows of lane maxima, one row per cell, to 16 maxima. Rows from `used` on count as 0. */
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

V_OP void encode_tile(const int format, const int nonneg, const float *x, char *code, char *extra,
                      const uint32_t *words, int64_t n, const int state, float onto)
{
    if (columns_of(format).steps) {
        for (int64_t b = 0; b < n; b += HSTEP_PACKED_BLOCK) {
            vf weights[2 * PAIRS];
            vi drawn[PAIRS];
            for (int j = 0; j < 2 * PAIRS; j++) weights[j] = v_load(x + b + j * VL);
            for (int j = 0; j < PAIRS; j++) drawn[j] = vi_load(words + (b + j * PAIR) / 2);
            replace_block(format, code + code_place(columns_of(format), b), extra + extra_place(columns_of(format), b),
                          weights, drawn);
        }
        return;
    }
    if (!is_block(format)) {
        for (int64_t i = 0; i < n; i += PAIR)
            store_any(format, code, extra, i, v_load(x + i), v_load(x + i + VL), vi_load(words + i / 2), state);
        return;
    }
    HSTEP_ALIGNED float stash[HSTEP_TILE], inverses[16];
    HSTEP_ALIGNED uint32_t rows[16][VL], maxima[16];
    for (int64_t b = 0; b * HSTEP_CELL < n; b++) {
        vi largest = vi_set(0);
        for (int64_t i = b * HSTEP_CELL; i < (b + 1) * HSTEP_CELL; i += VL) {
            vf stashed = stash_any(format, v_load(x + i), nonneg);
            if (has_grid(format, nonneg)) stashed = onto_grid(columns_of(format).root, stashed, v_set(onto));
            v_store(stash + i, stashed);
            largest = vi_max(largest, magnitude_of(v_load(x + i), stashed, has_grid(format, nonneg)));
        }
        vi_store(rows[b], largest);
    }
    block_maxima(rows, n / HSTEP_CELL, maxima);
    encode_scales(format, nonneg, maxima, extra, inverses, n);
    for (int64_t i = 0; i < n; i += PAIR)
        encode_codes(format, nonneg, stash, inverses, code, i, vi_load(words + i / 2));
}

#define TILE_FUNCTIONS(fn, nonneg)                                                                                \
    static void decode_##fn##_##nonneg(float *x, const char *code, const char *extra, int64_t n)                  \
    {                                                                                                             \
        decode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, n);                                                \
    }                                                                                                             \
    static void encode_##fn##_##nonneg(const float *x, char *code, char *extra, const uint32_t *words, int64_t n, \
                                       int state, float onto)                                                     \
    {                                                                                                             \
        if (state) encode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, words, n, 1, onto);                     \
        else encode_tile(HSTEP_FORMAT_##fn, nonneg, x, code, extra, words, n, 0, onto);                           \
    }
/* Computes the values whose squares are summed for a tensor's scale. */
#define NORM_FUNCTION(fn, nonneg)                                                               \
    static void norm_##fn##_##nonneg(const float *x, float *out, int64_t n)                     \
    {                                                                                           \
        for (int64_t i = 0; i < n; i += VL) v_store(out + i, fn##_norm(v_load(x + i), nonneg)); \
    }
#define APPLY_FUNCTION(fn)                                                                                            \
    static void apply_##fn(const float *w, const float *d, char *code, char *extra, const uint32_t *words, int64_t n) \
    {                                                                                                                 \
        for (int64_t i = 0; i < n; i += PAIR)                                                                         \
            apply_any(HSTEP_FORMAT_##fn, code, extra, i, v_load(w + i), v_load(w + i + VL), v_load(d + i),            \
                      v_load(d + i + VL), vi_load(words + i / 2));                                                    \
    }
#define APPLY_PACKED(fn)                                                                                              \
    static void apply_##fn(const float *w, const float *d, char *code, char *extra, const uint32_t *words, int64_t n) \
    {                                                                                                                 \
        (void)w;                                                                                                      \
        packed_apply(HSTEP_FORMAT_##fn, d, code, extra, words, n);                                                    \
    }
#define FORMAT(id, fn)                  \
    TILE_FUNCTIONS(fn, 0)               \
    IF_BLOCK(fn, TILE_FUNCTIONS(fn, 1)) \
    IF_ELEMENT(fn, APPLY_FUNCTION(fn))  \
    IF_PACKED(fn, APPLY_PACKED(fn))     \
    IF_TENSOR(fn, NORM_FUNCTION(fn, 0) NORM_FUNCTION(fn, 1))
#include "formats/formats.def"
#undef FORMAT

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

V_OP void norms_tile(void (*norms)(const vf *, vf, vf, vf *, vf *, int), const int states, const int count,
                     const int mode, const float *k, const float *w, const float *g, float *const *x, float *const *s,
                     int64_t n)
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

/* direction_tile() computes the direction of a matrix step. change_tile() computes the change from the transformed
 * direction. */
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

V_OP void change_tile(vf (*change)(const vf *, vf, vf), const float *k, const float *w, const float *u, float *d,
                      int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) v_store(d + i, change(kv, v_load(w + i), v_load(u + i)));
}

/* cross_tile() computes the values that are averaged over rows and columns. vector_tile() computes a new vector from
 * these means. */
V_OP void cross_tile(vf (*cross)(const vf *, vf, vf, vf *, int, int), const int states, const int pair, const int mode,
                     const float *k, const float *w, const float *g, float *x, float *const *s, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) {
        vf sv[HALFSTEP_MAX_STATES];
        for (int j = 0; j < states; j++) sv[j] = v_load(s[j] + i);
        v_store(x + i, cross(kv, v_load(w + i), v_load(g + i), sv, mode, pair));
    }
}

V_OP void vector_tile(vf (*vector)(const vf *, vf, vf, int), const int pair, const float *k, float *x,
                      const float *mean, int64_t n)
{
    vf kv[HSTEP_MAX_SCALARS];
    for (int j = 0; j < HSTEP_MAX_SCALARS; j++) kv[j] = v_set(k[j]);
    for (int64_t i = 0; i < n; i += VL) v_store(x + i, vector(kv, v_load(x + i), v_load(mean + i), pair));
}

/* Defines rule_lion_0 to rule_lion_3 for rule lion, by mode, and so on for each rule. */
#define RULE_FUNCTION(name, mode)                                                                               \
    static void rule_##name##_##mode(const float *k, const float *w, const float *g, float *d, float *const *s, \
                                     int64_t n)                                                                 \
    {                                                                                                           \
        rule_tile(name##_rule, name##_states, mode, k, w, g, d, s, n);                                          \
    }
#define RULE(id, name) RULE_FUNCTION(name, 0) RULE_FUNCTION(name, 1) RULE_FUNCTION(name, 2) RULE_FUNCTION(name, 3)
#include "rules/rules.def"
#undef RULE

/* Defines norms_lamb_0 and norms_lamb_1 for rule lamb, by mode, and so on for each rule with sums. */
#define NORMS_FUNCTION(name, count, mode)                                                              \
    static void norms_##name##_##mode(const float *k, const float *w, const float *g, float *const *x, \
                                      float *const *s, int64_t n)                                      \
    {                                                                                                  \
        norms_tile(name##_norms, name##_states, count, mode, k, w, g, x, s, n);                        \
    }
#define NORMS_FUNCTIONS(name, count) NORMS_FUNCTION(name, count, 0) NORMS_FUNCTION(name, count, 1)
#define RULE(id, name) HSTEP_IF(HSTEP_SUMS(name), NORMS_FUNCTIONS, name, HSTEP_SUMS(name))
#include "rules/rules.def"
#undef RULE

/* Defines cross_came_0_0 and cross_came_0_1 for pair 0 of rule came, by mode, and vector_came_0. The same for pair
 * 1. */
#define CROSS_FUNCTION(name, pair, mode)                                                                 \
    static void cross_##name##_##pair##_##mode(const float *k, const float *w, const float *g, float *x, \
                                               float *const *s, int64_t n)                               \
    {                                                                                                    \
        cross_tile(name##_cross, name##_states, pair, mode, k, w, g, x, s, n);                           \
    }
#define CROSS_FUNCTIONS(name, pair)                                                            \
    CROSS_FUNCTION(name, pair, 0)                                                              \
    CROSS_FUNCTION(name, pair, 1)                                                              \
    static void vector_##name##_##pair(const float *k, float *x, const float *mean, int64_t n) \
    {                                                                                          \
        vector_tile(name##_vector, pair, k, x, mean, n);                                       \
    }
#define FACTORED_FUNCTIONS_1(name) CROSS_FUNCTIONS(name, 0)
#define FACTORED_FUNCTIONS_2(name) CROSS_FUNCTIONS(name, 0) CROSS_FUNCTIONS(name, 1)
#define FACTORED_FUNCTIONS(name, pairs) FACTORED_FUNCTIONS_##pairs(name)
#define RULE(id, name) HSTEP_IF(HSTEP_PAIRS(name), FACTORED_FUNCTIONS, name, HSTEP_PAIRS(name))
#include "rules/rules.def"
#undef RULE

/* Defines direction_muon_0 and direction_muon_1 for rule muon, by mode, and change_muon. */
#define DIRECTION_FUNCTION(name, mode)                                                                          \
    static void direction_##name##_##mode(const float *k, const float *g, float *u, float *const *s, int64_t n) \
    {                                                                                                           \
        direction_tile(name##_direction, mode, k, g, u, s, n);                                                  \
    }
#define MATRIX_FUNCTIONS(name)                                                                     \
    DIRECTION_FUNCTION(name, 0)                                                                    \
    DIRECTION_FUNCTION(name, 1)                                                                    \
    static void change_##name(const float *k, const float *w, const float *u, float *d, int64_t n) \
    {                                                                                              \
        change_tile(name##_change, k, w, u, d, n);                                                 \
    }
#define RULE(id, name) HSTEP_IF(HSTEP_IS_MATRIX(name), MATRIX_FUNCTIONS, name)
#include "rules/rules.def"
#undef RULE

static void gradient_tile(float *g, const float *w, float scale, float mean, float l2, int64_t n)
{
    const struct gradient_terms terms = gradient_terms(scale, mean, l2);
    for (int64_t i = 0; i < n; i += VL)
        v_store(g + i, effective_gradient(terms, v_load(g + i), terms.decayed ? v_load(w + i) : v_set(0.0f)));
}

/* Sets x to 1 where the update agrees with the gradient, else to 0. */
static void agreement_tile(const float *update, const float *g, float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i += VL)
        v_store(x + i, v_select(agrees(v_load(update + i), v_load(g + i)), v_set(1.0f), v_set(0.0f)));
}

static void cautious_tile(float *d, const float *g, const float *w, float scale, float decay, int64_t n)
{
    for (int64_t i = 0; i < n; i += VL)
        v_store(d + i, cautious_change(v_load(d + i), v_load(g + i), v_load(w + i), v_set(scale), v_set(decay)));
}

static void decay_tile(float *d, const float *w, float decay, int64_t n)
{
    for (int64_t i = 0; i < n; i += VL) v_store(d + i, decay_change(v_load(d + i), v_load(w + i), v_set(decay)));
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
    for (int64_t i = 0; i < n; i += HSTEP_CELL)
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
    for (int64_t i = 0; i < n; i += HSTEP_CELL)
        for (int part = 0; part < PAIRS; part++) {
            vf e, o;
            load_any(format, 0, code, NULL, i + part * PAIR, &e, &o);
            va_add(&a, part, e);
            va_add(&a, part, o);
        }
    va_store(a, sums);
}

#define STATISTICS_FUNCTIONS(fn)                                                                                 \
    static uint32_t maximum_##fn(const char *code, int64_t n) { return maximum_of(HSTEP_FORMAT_##fn, code, n); } \
    static void squares_##fn(const char *code, int64_t n, double *sums, uint32_t *maximum)                       \
    {                                                                                                            \
        squares_of(HSTEP_FORMAT_##fn, code, n, sums, maximum);                                                   \
    }                                                                                                            \
    static void sums_##fn(const char *code, int64_t n, double *sums) { sums_of(HSTEP_FORMAT_##fn, code, n, sums); }
#define FORMAT(id, fn) IF_ELEMENT(fn, STATISTICS_FUNCTIONS(fn))
#include "formats/formats.def"
#undef FORMAT

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

static void random_LATTICE(const struct hstep_key *strand, uint64_t first, uint32_t *words, int64_t n)
{
    struct hstep_key key = hstep_key_segment(strand, first >> HSTEP_SEGMENT_SHIFT);
    vi x = mixer_start(&key, first), k1 = vi_set(key.k[1]), factor = vi_set(key.factor), offset = vi_set(key.offset);
    for (int64_t i = 0; i < n; i += VL) vi_store(words + i, lattice_of(mixer_next(&x, k1), factor, offset));
}

static void random_MIXER(const struct hstep_key *strand, uint64_t first, uint32_t *words, int64_t n)
{
    struct hstep_key key = hstep_key_segment(strand, first >> HSTEP_SEGMENT_SHIFT);
    vi x = mixer_start(&key, first), k1 = vi_set(key.k[1]);
    for (int64_t i = 0; i < n; i += VL) vi_store(words + i, mixer_next(&x, k1));
}

static void random_PHILOX7(const struct hstep_key *strand, uint64_t first, uint32_t *words, int64_t n)
{
    uint64_t block = first >> 2;
    if (VL == 1 || (uint32_t)block > UINT32_MAX - HSTEP_TILE) {
        for (int64_t i = 0; i < n; i += 4) hstep_philox_block(strand, block + (uint64_t)i / 4, words + i);
        return;
    }
    /* Computes VL blocks side by side, one per lane. */
    for (int64_t i = 0; i < n; i += 4 * VL) {
        vi a = vi_add(vi_set((uint32_t)block + (uint32_t)(i / 4)), vi_iota()), b = vi_set((uint32_t)(block >> 32));
        vi c = vi_set(strand->k[2]), d = vi_set(strand->k[3]);
        uint32_t k = strand->k[0], l = strand->k[1];
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

#endif
