/* The rows of formats and rules as data, and recipes parsed against them. */
#ifndef HSTEP_TABLES_H
#define HSTEP_TABLES_H

#include "base/api.h"
#include "rules/rule.h"
#include "rules/transforms.h"

/* Row numbers, in the order of the .def files. */
enum {
#define FORMAT(id, fn) HSTEP_FORMAT_##fn,
#include "formats/formats.def"
#undef FORMAT
    HSTEP_FORMATS
};
#define HSTEP_FORMAT_NONE (-1)

enum {
#define RULE(id, rule) HSTEP_RULE_##rule,
#include "rules/rules.def"
#undef RULE
    HSTEP_RULES
};

#define HSTEP_MAX_OWN_HYPERS 12

struct hstep_format {
    int id;
    const char *name, *title;
    int roles, code_bits, extra_bits, block, scale_bits, geometry, stochastic; /* block: elements per scale, or 0 */
    int root; /* of the grid of second moments, or 0 (formats.h) */
    const char *code_dtype, *extra_dtype;
};

/* A title of a switch, which is 0 or 1, begins with "0:" or "1:" and what that value does; bindings take it for true or
 * false. Other titles never begin so. */
struct hstep_hyper {
    const char *name, *title;
    double initial, minimum, maximum;
    int exclusive; /* the maximum itself is too large */
};

/* A double that a rule keeps for each tensor, and the bounds of what its updates leave there, which a checkpoint may
 * not leave either. */
struct hstep_scalar {
    const char *name;
    double minimum, maximum;
};

/* Names of states are torch's where torch has them. */
struct hstep_state {
    const char *name;
    int role;
    /* The hyper-parameter that each update multiplies the state by before it adds what is new: the grid of second
     * moments goes by it (base/grid.h). NULL where none does, as of a maximum. Of role WEIGHT: the hyper-parameter b by
     * which the weights to evaluate are w + (1 - 1/b) (state - w), or NULL. */
    const char *beta;
    const char *unless; /* the hyper-parameter that makes the state needless by being 0, or NULL */
    int extent;         /* HALFSTEP_EXTENT_* */
    /* While this hyper-parameter is not 0, the state is a largest value so far, or is subtracted from one of its size.
     * Errors of coarse codes would not average out in it, so that `precise` stands in for a block format. */
    const char *precise_while;
    int precise;
};

/* What a rule needs beyond one pass over independent elements. */
enum { HSTEP_ELEMENTWISE, HSTEP_RAW_GRADIENT, HSTEP_MATRIX, HSTEP_FACTORED };

/* The row of a rule (rules/row.h). */
struct hstep_rule {
    int id; /* pinned: files store it */
    const char *name;
    int kind, norms, totals, pairs, transform; /* of its SHAPE; totals: the sums are over all tensors */
    int decay_constant;       /* the coefficient of the weight among the constants, where it is known */
    const char *not_cautious; /* why no group of it is cautious, as the end of a sentence, or NULL */
    const char *label;        /* the name as a class of a binding has it: an identifier */
    const char *title;
    double lr, weight_decay; /* initial values */
    const char *decay;       /* the initial decay mode */
    const char *formats; /* default formats of the states, as in a recipe. NULL: f32 for f32 weights, else bf16-sr */
    const char *keeps;   /* the state in which micro-steps gather the gradient. NULL: they would lose it */
    const char *share;   /* of TOTALS: sums are over tensors with one number in this hyper-parameter */
    struct hstep_state state[HALFSTEP_MAX_STATES + 1]; /* up to the first without a name, as the two below */
    struct hstep_hyper hyper[HSTEP_MAX_OWN_HYPERS + 1];
    struct hstep_scalar scalar[HSTEP_MAX_NAMED_SCALARS + 1];
};

extern HSTEP_TABLE const struct hstep_format hstep_formats[HSTEP_FORMATS];
extern HSTEP_TABLE const struct hstep_rule hstep_rules[HSTEP_RULES];
int hstep_rule_states(int rule);
int hstep_rule_hypers(int rule); /* the rule's own */
int hstep_rule_scalars(int rule);
/* The row of a state, or -1; NULL is no state. */
int hstep_rule_state(int rule, const char *name);
/* Row `index` of those of the rule, the common ones first, with the rule's initial value. */
struct hstep_hyper hstep_rule_hyper(int rule, int index);

/* Row among common and own hyper-parameters, or -1; rule -1: the common ones alone. */
int hstep_find_hyper(int rule, const char *name);

/* Hyper-parameters that every rule has, in the order of struct hstep_group's values. */
enum {
    HSTEP_LR,
    HSTEP_WEIGHT_DECAY,
    HSTEP_REFERENCE_LR,
    HSTEP_MAXIMIZE,
    HSTEP_CENTRALIZE,
    HSTEP_CAUTIOUS,
    HSTEP_WARMUP_STEPS,
    HSTEP_TOTAL_STEPS,
    HSTEP_FINAL_FRACTION,
    HSTEP_DECAY_START,
    HSTEP_POWER,
    HSTEP_GROUP_HYPERS,
    HSTEP_GRADIENT_SCALE = HSTEP_GROUP_HYPERS,
    HSTEP_CLIP_NORM,
    HSTEP_COMMON_HYPERS
};
extern HSTEP_TABLE const struct hstep_hyper hstep_common_hypers[HSTEP_COMMON_HYPERS];

enum { HSTEP_DECAY_L2, HSTEP_DECAY_DECOUPLED, HSTEP_DECAY_FULLY, HSTEP_DECAY_PROXIMAL, HSTEP_DECAYS };
enum { HSTEP_SCAN_ALL, HSTEP_SCAN_TENSOR, HSTEP_SCAN_NONE };
enum { HSTEP_CLIP_DELAYED, HSTEP_CLIP_TENSOR };
enum { HSTEP_MISSING_SKIP, HSTEP_MISSING_ERROR };

enum {
    HSTEP_CHOICE_DECAY,
    HSTEP_CHOICE_SCHEDULE,
    HSTEP_CHOICE_SCAN,
    HSTEP_CHOICE_CLIP,
    HSTEP_CHOICE_GENERATOR,
    HSTEP_CHOICES
};

struct hstep_recipe {
    int rule, weight, state[HALFSTEP_MAX_STATES];
};

/* Rows by names of that many characters, or -1. */
int hstep_find_rule(const char *text, size_t length);
int hstep_find_format(const char *text, size_t length);

/* Of recipe.c. HALFSTEP_OK, or an error with a sentence in detail[size]. */
int hstep_recipe_parse(const char *text, struct hstep_recipe *recipe, char *detail, size_t size);
/* Of recipe.c too: the full form; errors with RANGE where size is too small. */
int hstep_recipe_text(const struct hstep_recipe *recipe, char *text, size_t size);

/* What a block format becomes for a tensor that it cannot serve. */
int hstep_eligible_format(int format, int weight_format, int ndim, int64_t rows, int64_t row_length);
/* Whether a tensor of that shape is stepped as a matrix, and whether it has a state at all: second moments serve the
 * rest. */
int hstep_is_matrix(int rule, int ndim, int64_t rows, int64_t row_length);
int hstep_pairs(int rule, int ndim, int64_t rows, int64_t row_length); /* of vectors that a matrix has */
/* The rows and columns of a state of that extent. */
HSTEP_INLINE void hstep_extend(int extent, int64_t *rows, int64_t *columns)
{
    if (extent == HALFSTEP_EXTENT_ROWS) *columns = 1;
    if (extent == HALFSTEP_EXTENT_COLUMNS) *rows = 1;
}
int hstep_state_of_shape(int rule, int state, int ndim, int64_t rows, int64_t row_length);
/* Whether a format can store a state of that role. */
int hstep_format_serves(int format, int role);
/* Bytes of n_rows x n_columns elements and of their second stream. */
uint64_t hstep_code_bytes(int format, int64_t n_rows, int64_t n_columns);
uint64_t hstep_extra_bytes(int format, int64_t n_rows, int64_t n_columns);

/* Elements from the start of one row to the start of the next in the space that random bits and blocks are indexed
 * by. */
int64_t hstep_row_stride(int64_t row_length);

int hstep_choice_find(const char *choice, const char *value);

#endif
