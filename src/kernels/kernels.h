/* The table of kernels that kernels.c emits once per instruction set, and what its functions share with their callers.
 *
 * A tile is up to 256 elements, a whole number of groups of 32. Tile functions work on fp32 scratch whose order is
 * private to the instruction set (vec/README.md); only whole slots, statistics and single values leave it. `nonneg`
 * says that a state is never negative, `words` holds one random word per pair of elements. */
#ifndef HSTEP_KERNELS_H
#define HSTEP_KERNELS_H

#include <stdint.h>

#include "kernels/fused.def"
#include "base/rng.h"
#include "rules/rule.h"
#include "tables/tensor.h"

#define HSTEP_TILE_WORDS (HSTEP_TILE / 2)
/* One key of the mixer serves this many elements. */
#define HSTEP_SEGMENT (2 * (int64_t)HSTEP_SEGMENT_WORDS)

/* Shape of the tile that one call of a product's kernel works on: strips of so many rows of the left matrix, panels of
 * so many columns of the right one. Both are stored along the inner dimension, in pieces of one row's or column's
 * width, padded with zeros. */
#define HSTEP_STRIP 12
#define HSTEP_PANEL 32

#define HSTEP_ALIGNED __attribute__((aligned(64)))

/* What a fused step needs: n elements, a multiple of 32 within one segment, from element `index`, a multiple of 32.
 * Arrays are by slot, as are bits. */
struct hstep_fused {
    int format[HSTEP_SLOTS];
    char *code[HSTEP_SLOTS], *extra[HSTEP_SLOTS];
    uint64_t index;
    int64_t n;
    const float *k; /* the rule's constants */
    float gradient_scale, mean,
        l2; /* as gradient() below takes them; the last two are 0 unless the row is one for that */
    float grid[HSTEP_SLOTS], onto[HSTEP_SLOTS]; /* what is stored, and what is coded, is multiplied by (grid.h) */
    uint32_t nonneg, as_weight;                 /* second moments; states that are stored as the weight is, */
    uint32_t weight_to_slot, slot_to_weight;    /* and what struct hstep_update says of them */
    float cautious, decay;                      /* likewise */
    const struct hstep_key *key;                /* segment keys of the mixer */
};

/* The gradient of a row of fused.def that takes all. */
#define HSTEP_FORMAT_any (-2)

/* The format of a state in a row of fused.def, by its role; one of weights goes by the weight's. block: whether `first`
 * has blocks, which a state of gradients has not: it then has the default of states beside such gradients. */
HSTEP_INLINE int hstep_fused_format(const int role, const int gradient, const int first, const int second,
                                    const int block)
{
    if (role == HALFSTEP_ROLE_NONNEG) return second;
    if (role == HALFSTEP_ROLE_GRADIENT && block)
        return gradient == HSTEP_FORMAT_f32 ? HSTEP_FORMAT_f32 : HSTEP_FORMAT_bf16_sr;
    return first;
}

/* Rows of fused.def, and variants of a rule: bit i says that its i-th conditional state is stored. */
enum {
#define FUSED_ROW(...) +1
    HSTEP_FUSED_ROWS = 0 HSTEP_FUSED_RECIPES(FUSED_ROW, ),
#undef FUSED_ROW
    HSTEP_FUSED_VARIANTS = 4,
    HSTEP_FUSED_STATES = 4 /* rules with more take tiles */
};

/* Of one storage format. NULL where it does not apply: block formats hold no weights and no gradients. */
struct hstep_format_kernels {
    void (*decode[2])(float *x, const char *code, const char *extra, int64_t n); /* by nonneg, as is encode */
    /* What is coded of second moments with a grid is multiplied by `onto` (grid.h); decode gives what is stored. */
    void (*encode[2])(const float *x, char *code, char *extra, const uint32_t *words, int64_t n, int state, float onto);
    void (*apply)(const float *w, const float *d, char *code, char *extra, const uint32_t *words, int64_t n);
    /* Largest magnitude as an fp32 pattern (NaN sorts above infinity); n is any multiple of 32. */
    uint32_t (*maximum)(const char *code, int64_t n);
    /* 16 partial sums in double of the squares, of the values: n <= 256. Combined by hstep_tree_sum(). */
    void (*squares)(const char *code, int64_t n, double *sums, uint32_t *maximum);
    void (*sums)(const char *code, int64_t n, double *sums);
    /* Of formats with one scale for a tensor, NULL for others: the values whose squares make the scale (by nonneg),
     * which encode then finds in extra. */
    void (*norm[2])(const float *x, float *out, int64_t n);
};

struct hstep_matrix_kernels {
    void (*direction[2])(const float *k, const float *g, float *u, float *const *s, int64_t n); /* by RULE_CLAMP */
    void (*change)(const float *k, const float *w, const float *u, float *d, int64_t n);
};

/* Of one pair of vectors: the value of each element, by RULE_CLAMP, and the new vector in the place of the old. */
struct hstep_factored_kernels {
    void (*cross[2])(const float *k, const float *w, const float *g, float *x, float *const *s, int64_t n);
    void (*vector)(const float *k, float *vector, const float *mean, int64_t n);
};

struct hstep_kernels {
    const char *name;
    int lanes;
    struct hstep_format_kernels format[HSTEP_FORMATS];
    void (*rule[HSTEP_RULES][RULE_MODES])(const float *k, const float *w, const float *g, float *d, float *const *s,
                                          int64_t n);
    /* Two-pass rules: new states and the values that are summed, or their squares; by RULE_CLAMP. */
    void (*norms[HSTEP_RULES][2])(const float *k, const float *w, const float *g, float *const *x, float *const *s,
                                  int64_t n);
    struct hstep_matrix_kernels matrix[HSTEP_RULES];
    struct hstep_factored_kernels factored[HSTEP_RULES][HSTEP_MAX_PAIRS];
    void (*product)(float *c, const float *a, const float *b, int64_t k); /* product.h */
    /* g = g * scale - mean + l2 * w */
    void (*gradient)(float *g, const float *w, float scale, float mean, float l2, int64_t n);
    /* x = 1 where an update agrees with the gradient, else 0; and the cautious change that is made of an update */
    void (*agreement)(const float *update, const float *g, float *x, int64_t n);
    void (*cautious)(float *d, const float *g, const float *w, float scale, float decay, int64_t n);
    /* g += scale * x */
    void (*accumulate)(float *g, const float *x, float scale, int64_t n);
    /* x *= factor */
    void (*scale)(float *x, float factor, int64_t n);
    /* Scratch to elements in order, and back, for reading and writing slots. */
    void (*to_plain)(const float *x, float *plain, int64_t n);
    void (*from_plain)(const float *plain, float *x, int64_t n);
    /* n words (a multiple of 16) from pair `first` (a multiple of 16), within one segment for the mixer and the
     * lattice; by generator row. */
    void (*random[HSTEP_GENERATOR_COUNT])(const struct hstep_key *stream, uint64_t first, uint32_t *words, int64_t n);
    /* The number of a fused step of a rule by row of fused.def and variant, or -1; the step itself; and what comes
     * before it: for rules of two passes sums, HSTEP_MAX_NORMS for each 256 elements, for cautious steps how many
     * elements agree. NULL where there are no such steps. */
    int (*find_fused)(int rule, int row, int variant);
    void (*fused)(const struct hstep_fused *a, int step);
    void (*fused_sums)(const struct hstep_fused *a, int step, double *sums);
    int64_t (*fused_agreement)(const struct hstep_fused *a, int step);
};

/* The one order in which 16 partial sums are added. */
HSTEP_INLINE double hstep_tree_sum(const double *s)
{
    double t[8];
    for (int i = 0; i < 8; i++) t[i] = s[i] + s[i + 8];
    for (int i = 0; i < 4; i++) t[i] = t[i] + t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

#endif
