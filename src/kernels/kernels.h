/* The table of kernels that kernels.c emits once per instruction set, and what its functions share with their callers.
 *
 * A tile is up to 256 elements, a whole number of cells of 32. Tile functions work on fp32 scratch memory in an order
 * that is private to the instruction set (vec/README.md). Only whole slots, statistics and single values leave it.
 * `nonneg` says that a state is never negative. `words` holds one random word per pair of elements. */
#ifndef HSTEP_KERNELS_H
#define HSTEP_KERNELS_H

#include <stdint.h>

#include "kernels/fused.def"
#include "base/rng.h"
#include "rules/rule.h"
#include "tables/tensor.h"

#define HSTEP_TILE_WORDS (HSTEP_TILE / 2)
/* One key of the mixer serves a segment of this many elements. */
#define HSTEP_SEGMENT (2 * (int64_t)HSTEP_SEGMENT_WORDS)

/* Shape of the tile that one call of product() works on. It is a strip of HSTEP_STRIP rows of the left matrix and a
 * panel of HSTEP_PANEL columns of the right one. Both are stored along the inner dimension. Each step holds one column
 * of the strip or one row of the panel, padded with zeros. */
#define HSTEP_STRIP 12
#define HSTEP_PANEL 32

#define HSTEP_ALIGNED __attribute__((aligned(64)))

/* The arguments of a fused step on n elements, a multiple of 32 within one segment. They start at element `index`, a
 * multiple of 32. Arrays and bit masks are indexed by slot. */
struct hstep_fused {
    int format[HSTEP_SLOTS];
    char *code[HSTEP_SLOTS], *extra[HSTEP_SLOTS];
    uint64_t index;
    int64_t n;
    const float *k; /* the rule's constants */
    float gradient_scale, mean,
        l2; /* as gradient() takes them; mean and l2 are 0 unless the row can adjust gradients */
    float grid[HSTEP_SLOTS], onto[HSTEP_SLOTS]; /* factors of stored values and of values to be coded (grid.h) */
    uint32_t nonneg, as_weight;                 /* masks: second moments; states that are stored as the weight is */
    uint32_t weight_to_slot, slot_to_weight;    /* masks, as in struct hstep_update */
    float cautious, decay, cautious_decay;      /* as in struct hstep_update */
    const struct hstep_key *key;                /* segment keys of the mixer */
};

/* The gradient format of a row of fused.def that takes any gradient. */
#define HSTEP_FORMAT_any (-2)

/* Returns the format of a state in a row of fused.def, by its role. Callers handle role WEIGHT themselves: such a state
 * has the weight's format. If `first` has blocks (block), states of role GRADIENT have the default format beside such
 * gradients instead. */
HSTEP_INLINE int hstep_fused_format(const int role, const int gradient, const int first, const int second,
                                    const int block)
{
    if (role == HALFSTEP_ROLE_NONNEG) return second;
    if (role == HALFSTEP_ROLE_GRADIENT && block)
        return gradient == HSTEP_FORMAT_f32 ? HSTEP_FORMAT_f32 : HSTEP_FORMAT_bf16_sr;
    return first;
}

/* The number of rows of fused.def, and of variants of a rule. Bit i of a variant says that the rule's i-th conditional
 * state is stored. */
enum {
#define FUSED_ROW(...) +1
    HSTEP_FUSED_ROWS = 0 HSTEP_FUSED_RECIPES(FUSED_ROW, ),
#undef FUSED_ROW
    HSTEP_FUSED_VARIANTS = 4,
    HSTEP_FUSED_STATES = 4 /* rules with more states take the tile path */
};

/* The kernels of one storage format. NULL if one does not apply: block formats hold no weights and no gradients, packed
 * formats only weights. */
struct hstep_format_kernels {
    void (*decode[2])(float *x, const char *code, const char *extra, int64_t n); /* indexed by nonneg, as is encode */
    /* `onto` (grid.h) multiplies the values of a second moment with a grid before they are coded. decode() returns the
     * values as stored, without the grid. */
    void (*encode[2])(const float *x, char *code, char *extra, const uint32_t *words, int64_t n, int state, float onto);
    void (*apply)(const float *w, const float *d, char *code, char *extra, const uint32_t *words, int64_t n);
    /* Returns the largest magnitude as an fp32 pattern, where NaN sorts above infinity. n is a multiple of 32. */
    uint32_t (*maximum)(const char *code, int64_t n);
    /* squares() writes 16 partial sums of the squares, in double, and the largest magnitude. sums() writes those of the
     * values. n <= 256. hstep_tree_sum() combines the partial sums. */
    void (*squares)(const char *code, int64_t n, double *sums, uint32_t *maximum);
    void (*sums)(const char *code, int64_t n, double *sums);
    /* Writes the values whose squares make the scale of a format with one scale for a tensor, by nonneg. encode() then
     * reads the scale from `extra`. NULL for other formats. */
    void (*norm[2])(const float *x, float *out, int64_t n);
};

struct hstep_matrix_kernels {
    void (*direction[2])(const float *k, const float *g, float *u, float *const *s, int64_t n); /* by RULE_CLAMP */
    void (*change)(const float *k, const float *w, const float *u, float *d, int64_t n);
};

/* The kernels of one pair of vectors. cross() gives the value of each element, by RULE_CLAMP. vector() replaces the old
 * vector by the new one. */
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
    /* For two-pass rules: replaces the states and gives the values that are summed, or whose squares are. By
     * RULE_CLAMP. */
    void (*norms[HSTEP_RULES][2])(const float *k, const float *w, const float *g, float *const *x, float *const *s,
                                  int64_t n);
    struct hstep_matrix_kernels matrix[HSTEP_RULES];
    struct hstep_factored_kernels factored[HSTEP_RULES][HSTEP_MAX_PAIRS];
    void (*product)(float *c, const float *a, const float *b, int64_t k); /* product.h */
    /* g = g * scale - mean + l2 * w */
    void (*gradient)(float *g, const float *w, float scale, float mean, float l2, int64_t n);
    /* agreement() sets x to 1 where an update agrees with the gradient, else to 0. cautious() turns an update into the
     * cautious change. decay() adds cautious decay to an update. */
    void (*agreement)(const float *update, const float *g, float *x, int64_t n);
    void (*cautious)(float *d, const float *g, const float *w, float scale, float decay, int64_t n);
    void (*decay)(float *d, const float *w, float decay, int64_t n);
    /* g += scale * x */
    void (*accumulate)(float *g, const float *x, float scale, int64_t n);
    /* x *= factor */
    void (*scale)(float *x, float factor, int64_t n);
    /* Copies scratch memory to elements in order, and back. For reading and writing slots. */
    void (*to_plain)(const float *x, float *plain, int64_t n);
    void (*from_plain)(const float *plain, float *x, int64_t n);
    /* Writes n random words from pair `first` on, both multiples of 16. For the mixer and the lattice they lie within
     * one segment. Indexed by generator row. */
    void (*random[HSTEP_GENERATOR_COUNT])(const struct hstep_key *strand, uint64_t first, uint32_t *words, int64_t n);
    /* Fused steps, all NULL where VL is 1:
     *
     *   find_fused()        returns the number of a rule's step for a row of fused.def and a variant, or -1
     *   fused()             makes the step
     *   fused_sums()        makes the sums of two-pass rules before it, HSTEP_MAX_NORMS for each 256 elements
     *   fused_agreement()   returns how many elements agree, for cautious steps */
    int (*find_fused)(int rule, int row, int variant);
    void (*fused)(const struct hstep_fused *a, int step);
    void (*fused_sums)(const struct hstep_fused *a, int step, double *sums);
    int64_t (*fused_agreement)(const struct hstep_fused *a, int step);
};

/* Adds 16 partial sums in the one order that all kernels use. */
HSTEP_INLINE double hstep_tree_sum(const double *s)
{
    double t[8];
    for (int i = 0; i < 8; i++) t[i] = s[i] + s[i + 8];
    for (int i = 0; i < 4; i++) t[i] = t[i] + t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

#endif
