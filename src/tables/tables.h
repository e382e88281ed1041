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

#define HSTEP_MAX_OWN_HYPERS 16
#define HSTEP_MAX_WORDS 8

struct hstep_format {
    int id;
    const char *name, *title;
    int roles, code_bits, extra_bits, block, scale_bits, geometry, stochastic; /* block: elements per scale, or 0 */
    int root; /* of the grid of second moments, or 0 (formats.h) */
    const char *code_dtype, *extra_dtype;
};

/* The title of a switch, which is 0 or 1, begins with "0:" or "1:" and says what that value does. Bindings then make it
 * a boolean. No other title begins like this. */
struct hstep_hyper {
    const char *name, *title;
    double initial, minimum, maximum;
    int exclusive;                      /* the maximum itself is too large */
    const char *words[HSTEP_MAX_WORDS]; /* names of the values 0, 1 ..., if they have names: another choice */
};

/* A double that a rule keeps for each tensor. Its updates leave it within these bounds, and a checkpoint must do so
 * too. */
struct hstep_scalar {
    const char *name;
    double minimum, maximum;
};

/* Names of states are torch's where torch has them. */
struct hstep_state {
    const char *name;
    int role;
    /* The hyper-parameter by which each update multiplies the state before it adds anything. The grid of second moments
     * follows it (base/grid.h). NULL if there is none, as for a maximum. For role WEIGHT it is the hyper-parameter b,
     * or NULL: the weights to evaluate are w + (1 - 1/b) (state - w). */
    const char *beta;
    const char *unless; /* the state is needless while this hyper-parameter is 0; or NULL */
    int extent;         /* HALFSTEP_EXTENT_* */
    /* While this hyper-parameter is not 0, the state is a largest value so far, or is subtracted from one of its size.
     * Errors of coarse codes would not average out in it. So the format `precise` replaces a block format. */
    const char *precise_while;
    int precise;
    /* Formats with fewer bits an element end measurably behind fp32's. `coarse` is a verb with how far, and what to
     * take. 0: no format is known to. */
    int fewest_bits;
    const char *coarse;
};

/* What a rule needs beyond one pass over independent elements. */
enum { HSTEP_ELEMENTWISE, HSTEP_RAW_GRADIENT, HSTEP_MATRIX, HSTEP_FACTORED };

/* The row of a rule (rules/row.h). */
struct hstep_rule {
    int id; /* pinned: files store it */
    const char *name;
    int kind, norms, totals, pairs, transform; /* of its SHAPE; totals: sums are over all tensors */
    int decay_constant;                        /* place of the weight's coefficient in k[], if known */
    const char *not_cautious;                  /* why no group may be cautious, as the end of a sentence, or NULL */
    const char *no_cautious_decay;             /* the same for the decay mode "cautious" */
    const char *label;                         /* class name in bindings, an identifier */
    const char *title;
    double lr, weight_decay;                           /* initial values */
    const char *decay;                                 /* the initial decay mode */
    const char *formats;                               /* as in a recipe. NULL: f32 for f32 weights, else bf16-sr */
    const char *keeps;                                 /* the state that gathers micro-steps' gradients, or NULL */
    const char *share;                                 /* TOTALS sums over tensors that agree in this hyper-parameter */
    struct hstep_state state[HALFSTEP_MAX_STATES + 1]; /* ends with a nameless entry, as the two below */
    struct hstep_hyper hyper[HSTEP_MAX_OWN_HYPERS + 1];
    struct hstep_scalar scalar[HSTEP_MAX_NAMED_SCALARS + 1];
};

extern HSTEP_TABLE const struct hstep_format hstep_formats[HSTEP_FORMATS];
/* Returns true if a format stores states in blocks. Their second plane has scales. */
HSTEP_INLINE int hstep_is_of_states(const struct hstep_format *f)
{
    return f->block && !(f->roles & HALFSTEP_ROLE_WEIGHT);
}
/* Returns the bytes of a packed block: its scale and its codes. */
HSTEP_INLINE int64_t hstep_packed_bytes(const struct hstep_format *f)
{
    return (f->block * f->code_bits + f->scale_bits) / 8;
}
extern HSTEP_TABLE const struct hstep_rule hstep_rules[HSTEP_RULES];
int hstep_rule_states(int rule);
int hstep_rule_hypers(int rule); /* the rule's own */
int hstep_rule_scalars(int rule);
/* Returns the row of a state, or -1 if it is unknown or name is NULL. */
int hstep_rule_state(int rule, const char *name);
/* Returns hyper-parameter `index` of a rule, counted from the common ones, with the rule's initial value. */
struct hstep_hyper hstep_rule_hyper(int rule, int index);

/* Returns the row among common and own hyper-parameters, or -1 if the name is unknown. Rule -1 has the common ones
 * alone. */
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
    HSTEP_FINAL_DECAY_FRACTION,
    HSTEP_DECAY_START,
    HSTEP_POWER,
    HSTEP_GROUP_HYPERS,
    HSTEP_GRADIENT_SCALE = HSTEP_GROUP_HYPERS,
    HSTEP_CLIP_NORM,
    HSTEP_COMMON_HYPERS
};
extern HSTEP_TABLE const struct hstep_hyper hstep_common_hypers[HSTEP_COMMON_HYPERS];

enum {
    HSTEP_DECAY_L2,
    HSTEP_DECAY_DECOUPLED,
    HSTEP_DECAY_FULLY,
    HSTEP_DECAY_PROXIMAL,
    HSTEP_DECAY_CAUTIOUS,
    HSTEP_DECAYS
};
enum { HSTEP_SCAN_ALL, HSTEP_SCAN_TENSOR, HSTEP_SCAN_NONE };
enum { HSTEP_CLIP_DELAYED, HSTEP_CLIP_TENSOR };
enum { HSTEP_MISSING_SKIP, HSTEP_MISSING_ERROR };

/* The choices of groups, and after them those of the optimizer. */
enum hstep_choice {
    HSTEP_CHOICE_DECAY,
    HSTEP_CHOICE_SCHEDULE,
    HSTEP_CHOICE_DECAY_SCHEDULE,
    HSTEP_CHOICE_SCAN,
    HSTEP_CHOICE_GENERATOR,
    HSTEP_CHOICE_CLIP,
    HSTEP_CHOICE_MISSING,
    HSTEP_CHOICES
};
extern HSTEP_TABLE const char *const hstep_choices[HSTEP_CHOICES];
/* Returns the row of a choice, or HSTEP_CHOICES if the name is unknown. */
enum hstep_choice hstep_find_choice(const char *name);

struct hstep_recipe {
    int rule, weight, state[HALFSTEP_MAX_STATES];
};

/* Return the row of a name of that many characters, or -1 if it is unknown. */
int hstep_find_rule(const char *text, size_t length);
int hstep_find_format(const char *text, size_t length);

/* Parses a recipe (recipe.c). Returns HALFSTEP_OK, or an error with its text in detail[size]. */
int hstep_recipe_parse(const char *text, struct hstep_recipe *recipe, char *detail, size_t size);
/* Writes a recipe in full (recipe.c). Returns HALFSTEP_ERROR_RANGE if size is too small. */
int hstep_recipe_text(const struct hstep_recipe *recipe, char *text, size_t size);

/* Returns the format itself, or the format that replaces it for a tensor that a block format cannot serve. Blocks of a
 * flattened tensor end with matrices; common_rows divides the rows of each. */
int hstep_eligible_format(int format, int weight_format, int ndim, int64_t rows, int64_t row_length,
                          int64_t common_rows);
/* Returns true if the rule steps matrices, by a transformation or by vectors over rows and columns. */
int hstep_has_matrices(int rule);
/* The first returns true if a tensor is stepped as matrices of that shape. hstep_state_of_shape() returns true if such
 * a tensor has the state; second moments serve only tensors that are no matrices. `rows` are those of one matrix. */
int hstep_is_matrix(int rule, int ndim, int64_t rows, int64_t row_length);
int hstep_pairs(int rule, int ndim, int64_t rows, int64_t row_length); /* pairs of vectors that a matrix has */
int hstep_state_of_shape(int rule, int state, int ndim, int64_t rows, int64_t row_length);
/* Returns true if the blocks of a format are stretches of a row. */
int hstep_is_by_row(int format);
/* Returns true if a format can store a state of that role. */
int hstep_format_serves(int format, int role);
/* Return the bytes of n_rows x n_columns elements, and of their second plane. */
uint64_t hstep_code_bytes(int format, int64_t n_rows, int64_t n_columns);
uint64_t hstep_extra_bytes(int format, int64_t n_rows, int64_t n_columns);

/* Returns the number of elements from the start of one row to the start of the next, in the space that indexes random
 * bits and blocks. */
int64_t hstep_row_stride(int64_t row_length);

/* Returns the number of a choice's value, or -1 if it is unknown. */
int hstep_choice_find(const char *choice, const char *value);

#endif
