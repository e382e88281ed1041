#include "tables/tables.h"

#include <string.h>

#include "base/rng.h"
#include "base/scale.h"
#include "base/schedule.h"
#include "rules/transforms.h"
#include "tables/tensor.h"
#ifndef VL /* a device has its own vocabulary */
#include "vec/scalar.h"
#endif

#include "formats/formats.h"
#include "rules/rules.h"

enum {
    ROWS = HALFSTEP_GEOMETRY_ROWS,
    FLAT = HALFSTEP_GEOMETRY_FLAT,
    TENSOR = HALFSTEP_GEOMETRY_TENSOR,
    PACKED = HALFSTEP_GEOMETRY_PACKED
};

/* Checks of rows, for what the kernels, the staging tiles and the offsets of planes assume. A wrong row does not
 * compile, and the message names it. */
#define ROLES (WEIGHT | GRADIENT | SIGNED | NONNEG)
#define ROW(condition, name, text) _Static_assert(condition, name ": " text);
#define FORMAT_IS_RIGHT(id, fn, name, title, kind, code, extra, ...)                                               \
    enum { FORMAT_ID_##id##_OF_ONE_ROW };                                                                          \
    ROW((id) > 0, name, "ids count from 1")                                                                        \
    ROW((fn##_roles & ROLES) == fn##_roles && fn##_roles != 0, name, "roles are WEIGHT, GRADIENT, SIGNED, NONNEG") \
    ROW(sizeof name > 1 && sizeof name <= 24, name, "names have 1 to 23 characters")                               \
    ROW(fn##_stochastic == 0 || fn##_stochastic == 1, name, "stochastic is 0 or 1")                                \
    IF_ELEMENT(fn, ELEMENTS_ARE_RIGHT(fn, name))                                                                   \
    IF_PACKED(fn, PACKED_IS_RIGHT(fn, name, HSTEP_BITS_##code, HSTEP_BITS_##extra))                                \
    IF_BLOCK(fn, BLOCKS_ARE_RIGHT(fn, name, HSTEP_BITS_##code))                                                    \
    IF_LARGEST(fn, SIZE_IS_RIGHT(fn, name))                                                                        \
    IF_TENSOR(fn, TENSOR_IS_RIGHT(fn, name))
#define ELEMENTS_ARE_RIGHT(fn, name)                                                                       \
    ROW(fn##_code_bits == 16 || fn##_code_bits == 32, name, "codes of single elements have 16 or 32 bits") \
    ROW(fn##_extra_bits == 0 || fn##_extra_bits == 8 || fn##_extra_bits == 16, name,                       \
        "a second plane has 8 or 16 bits")                                                                 \
    ROW(!(fn##_roles & GRADIENT) || fn##_extra_bits == 0, name, "gradients have no second plane")
#define PACKED_IS_RIGHT(fn, name, stored_bits, error_bits)                                            \
    ROW((int)fn##_roles == (int)WEIGHT, name, "packed formats are for weights")                       \
    ROW(stored_bits == 8, name, "packed codes are stored in bytes")                                   \
    ROW((fn##_extra_bits == 0 && error_bits == 0) || (fn##_extra_bits == 4 && error_bits == 8), name, \
        "error codes of a packed format have 4 bits, in bytes")                                       \
    ROW(fn##_steps >= 1 && fn##_steps <= 16, name, "a scale of a packed format has 1 to 16 steps")    \
    ROW(fn##_stochastic == 1, name, "packed formats are written with random bits")
#define BLOCKS_ARE_RIGHT(fn, name, stored_bits)                                                  \
    ROW(!(fn##_roles & (WEIGHT | GRADIENT)), name, "blocks store neither weights nor gradients") \
    ROW(fn##_code_bits == 8 || fn##_code_bits == 6 || fn##_code_bits == 4, name,                 \
        "codes in blocks have 8, 6 or 4 bits")                                                   \
    ROW(stored_bits == 8, name, "codes in blocks are stored in bytes")                           \
    ROW(fn##_root >= 0 && fn##_root <= 2, name, "the root of a grid is 0, 1 or 2")
#define SIZE_IS_RIGHT(fn, name)                                                                                      \
    ROW(fn##_block % HSTEP_CELL == 0 && fn##_block > 0 && HSTEP_TILE % (fn##_block > 0 ? fn##_block : 1) == 0, name, \
        "blocks have 32, 64, 128 or 256 elements")
#define TENSOR_IS_RIGHT(fn, name)                                                        \
    ROW(fn##_block == 1 << 30, name, "the block of a whole tensor has 1 << 30 elements") \
    ROW(fn##_scale_bits == 32, name, "the scale of a whole tensor is an F32")            \
    ROW(fn##_root == 0, name, "the scale of a whole tensor knows no grid")
#define FORMAT(id, fn) FORMAT_ROW(FORMAT_IS_RIGHT, id, fn, fn##_ROW)
#include "formats/formats.def"
#undef FORMAT
#undef ROLES

/* clang-format off */
HSTEP_TABLE const struct hstep_format hstep_formats[HSTEP_FORMATS] = {
#define FORMAT_ENTRY(id_, fn, name_, title_, kind, code, extra, ...)                                                \
    {.id = id_, .name = name_, .title = title_, .roles = fn##_roles, .code_bits = fn##_code_bits,                   \
     .extra_bits = fn##_extra_bits, .block = fn##_block, .scale_bits = fn##_scale_bits, .geometry = fn##_geometry,  \
     .stochastic = fn##_stochastic, .root = fn##_root, .code_dtype = #code,                                         \
     .extra_dtype = HSTEP_BITS_##extra ? #extra : NULL},
#define FORMAT(id, fn) FORMAT_ROW(FORMAT_ENTRY, id, fn, fn##_ROW)
#include "formats/formats.def"
#undef FORMAT
};
/* clang-format on */

/* The same checks for the rows of rules. */
#define ANY_NAME(name, ...) sizeof name
#define NAME_SIZE(rule) HSTEP_OF_ROW(rule, ANY_NAME)
#define CAUTION_CAUTIOUS(decay) (int)(decay)
#define CAUTION_NOT_CAUTIOUS(reason) -1
#define CAUTION_CAUTIOUS_DECAY(reason) -1
#define CAUTION_WORD(name, shape, parts, caution, ...) CAUTION_##caution
#define RULE(id, rule)                                                                                                 \
    enum { RULE_ID_##id##_OF_ONE_ROW };                                                                                \
    ROW((id) > 0, #rule, "ids count from 1")                                                                           \
    ROW(NAME_SIZE(rule) > 1 && NAME_SIZE(rule) <= 24, #rule, "names have 1 to 23 characters")                          \
    ROW((int)rule##_states <= HALFSTEP_MAX_STATES, #rule, "more states than HALFSTEP_MAX_STATES")                      \
    ROW((int)rule##_hypers <= HSTEP_MAX_OWN_HYPERS, #rule, "more hyper-parameters than HSTEP_MAX_OWN_HYPERS")          \
    ROW((int)rule##_scalars <= HSTEP_MAX_NAMED_SCALARS, #rule, "more scalars than HSTEP_MAX_NAMED_SCALARS")            \
    ROW((int)rule##_constants <= HSTEP_MAX_SCALARS, #rule, "more constants than HSTEP_MAX_SCALARS")                    \
    ROW(HSTEP_SUMS(rule) <= HSTEP_MAX_NORMS, #rule, "more sums than HSTEP_MAX_NORMS")                                  \
    ROW((int)rule##_vectors == 9 * HSTEP_PAIRS(rule), #rule,                                                           \
        "FACTORED(n, ...) has n states over rows and n over columns")                                                  \
    ROW((int)rule##_kept <= HSTEP_IS_MATRIX(rule), #rule, "only MATRIX may have an OPTIONAL state over rows, and one") \
    ROW(HSTEP_OF_ROW(rule, CAUTION_WORD) < (int)rule##_constants, #rule, "CAUTIOUS names a constant of another rule")  \
    ROW(HSTEP_OF_ROW(rule, CAUTION_WORD) < 0 || !HSTEP_SUMS(rule), #rule,                                              \
        "CAUTIOUS is for rules whose update no sum comes before")
#include "rules/rules.def"
#undef RULE

#define KIND_ELEMENTWISE HSTEP_ELEMENTWISE
#define KIND_NORMS(n) HSTEP_ELEMENTWISE
#define KIND_TOTALS(n) HSTEP_ELEMENTWISE
#define KIND_RAW_GRADIENT HSTEP_RAW_GRADIENT
#define KIND_MATRIX(transformation) HSTEP_MATRIX, .transform = HSTEP_TRANSFORM_##transformation
#define KIND_FACTORED(pairs, n) HSTEP_FACTORED
#define MEMBERS_CAUTIOUS(decay) .decay_constant = decay
#define MEMBERS_NOT_CAUTIOUS(reason) .not_cautious = reason, .no_cautious_decay = reason
#define MEMBERS_CAUTIOUS_DECAY(reason) .not_cautious = reason
#define RULE_MEMBERS(name_, shape, parts, caution, ...) \
    .name = name_, .kind = KIND_##shape, MEMBERS_##caution, __VA_ARGS__,
#define STATE_MEMBERS(role_, name_, ...) \
    {.name = name_, .role = HSTEP_ROLE_OF_##role_, .extent = HSTEP_EXTENT_OF_##role_, __VA_ARGS__},
#define OPTIONAL_MEMBERS(unless_, role_, name_, ...) \
    {.name = name_, .role = HSTEP_ROLE_OF_##role_, .extent = HSTEP_EXTENT_OF_##role_, .unless = unless_, __VA_ARGS__},
#define HYPER_MEMBERS(name_, title_, ...) {.name = #name_, .title = title_, __VA_ARGS__},
#define SCALAR_MEMBERS(name_, ...) {.name = #name_, __VA_ARGS__},
HSTEP_TABLE const struct hstep_rule hstep_rules[HSTEP_RULES] = {
#define RULE(id_, rule)                                                                                              \
    {.id = id_,                                                                                                      \
     .norms = HSTEP_SUMS(rule),                                                                                      \
     .totals = HSTEP_IS_TOTALS(rule),                                                                                \
     .pairs = HSTEP_PAIRS(rule),                                                                                     \
     HSTEP_OF_ROW(rule, RULE_MEMBERS).state = {rule##_ROW(HSTEP_NOTHING, STATE_MEMBERS, OPTIONAL_MEMBERS,            \
                                                          HSTEP_NOTHING, HSTEP_NOTHING){.name = NULL}},              \
     .hyper = {rule##_ROW(HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HYPER_MEMBERS, HSTEP_NOTHING){.name = NULL}}, \
     .scalar = {                                                                                                     \
         rule##_ROW(HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, SCALAR_MEMBERS){.name = NULL}}},
#include "rules/rules.def"
#undef RULE
};

int hstep_rule_states(int rule)
{
    int n = 0;
    while (hstep_rules[rule].state[n].name) n++;
    return n;
}

int hstep_rule_hypers(int rule)
{
    int n = 0;
    while (hstep_rules[rule].hyper[n].name) n++;
    return n;
}

int hstep_rule_scalars(int rule)
{
    int n = 0;
    while (hstep_rules[rule].scalar[n].name) n++;
    return n;
}

int hstep_rule_state(int rule, const char *name)
{
    for (int i = 0; name && hstep_rules[rule].state[i].name; i++)
        if (!strcmp(hstep_rules[rule].state[i].name, name)) return i;
    return -1;
}

struct hstep_hyper hstep_rule_hyper(int rule, int index)
{
    if (index >= HSTEP_COMMON_HYPERS) return hstep_rules[rule].hyper[index - HSTEP_COMMON_HYPERS];
    struct hstep_hyper hyper = hstep_common_hypers[index];
    if (index == HSTEP_LR) hyper.initial = hstep_rules[rule].lr;
    if (index == HSTEP_WEIGHT_DECAY) hyper.initial = hstep_rules[rule].weight_decay;
    return hyper;
}

#define COMMON(name_, title_, initial_, minimum_, maximum_) \
    {.name = name_, .title = title_, .initial = initial_, .minimum = minimum_, .maximum = maximum_}
HSTEP_TABLE const struct hstep_hyper hstep_common_hypers[HSTEP_COMMON_HYPERS] = {
    [HSTEP_LR] = COMMON("lr", "learning rate", 1e-3, 0.0, 1e6),
    [HSTEP_WEIGHT_DECAY] = COMMON("weight_decay", "coefficient of the decay mode", 0.0, 0.0, 1e6),
    [HSTEP_REFERENCE_LR] =
        COMMON("reference_lr", "lr at which fully decoupled decay is weight_decay; 0: lr as first set", 0.0, 0.0, 1e6),
    [HSTEP_MAXIMIZE] = COMMON("maximize", "1: ascend", 0.0, 0.0, 1.0),
    [HSTEP_CENTRALIZE] = COMMON("centralize", "fraction of the row mean taken from the gradient", 0.0, 0.0, 1.0),
    [HSTEP_CAUTIOUS] =
        COMMON("cautious", "1: no element moves against its gradient (Liang et al. 2024)", 0.0, 0.0, 1.0),
    [HSTEP_WARMUP_STEPS] = COMMON("warmup_steps", "steps of linear warm-up (preheat) of the schedule", 0.0, 0.0, 1e15),
    [HSTEP_TOTAL_STEPS] = COMMON("total_steps", "length of the schedule", 0.0, 0.0, 1e15),
    [HSTEP_FINAL_FRACTION] = COMMON("final_fraction", "fraction of lr at the end of the schedule", 0.0, 0.0, 1.0),
    [HSTEP_FINAL_DECAY_FRACTION] =
        COMMON("final_decay_fraction", "fraction of weight_decay at the end of decay_schedule", 0.0, 0.0, 1.0),
    [HSTEP_DECAY_START] = COMMON("decay_start", "fraction of total_steps at which wsd begins to fall", 0.8, 0.0, 1.0),
    [HSTEP_POWER] = COMMON("power", "exponent of inverse-power", -0.5, -16.0, 0.0),
    [HSTEP_GRADIENT_SCALE] = COMMON("gradient_scale", "gradients are multiplied by it first", 1.0, 0.0, 1e30),
    [HSTEP_CLIP_NORM] = COMMON("clip_norm", "largest global gradient norm; 0: no clipping", 0.0, 0.0, 1e15),
};
#undef COMMON

int hstep_find_hyper(int rule, const char *name)
{
    for (int i = 0; i < HSTEP_COMMON_HYPERS + (rule < 0 ? 0 : hstep_rule_hypers(rule)); i++)
        if (!strcmp(i < HSTEP_COMMON_HYPERS ? hstep_common_hypers[i].name : hstep_rule_hyper(rule, i).name, name))
            return i;
    return -1;
}

HSTEP_TABLE const char *const hstep_choices[HSTEP_CHOICES] = {
    [HSTEP_CHOICE_DECAY] = "decay",         [HSTEP_CHOICE_SCHEDULE] = "schedule",
    [HSTEP_CHOICE_SCAN] = "scan",           [HSTEP_CHOICE_DECAY_SCHEDULE] = "decay_schedule",
    [HSTEP_CHOICE_GENERATOR] = "generator", [HSTEP_CHOICE_CLIP] = "clip",
    [HSTEP_CHOICE_MISSING] = "missing",
};

enum hstep_choice hstep_find_choice(const char *name)
{
    int i = 0;
    while (i < HSTEP_CHOICES && strcmp(hstep_choices[i], name)) i++;
    return (enum hstep_choice)i;
}

static HSTEP_TABLE const char *const decays[HSTEP_DECAYS + 1] = {"l2", "decoupled", "fully-decoupled", "proximal",
                                                                 "cautious"};
static HSTEP_TABLE const char *const scans[] = {"scan", "per-tensor", "known-finite", NULL};
static HSTEP_TABLE const char *const clips[] = {"delayed", "per-tensor", NULL};
static HSTEP_TABLE const char *const missings[] = {"skip", "error", NULL};

const char *halfstep_choice_value(const char *choice, int32_t index)
{
    const char *const *values = NULL;
    if (!choice || index < 0) return NULL;
    switch (hstep_find_choice(choice)) {
    case HSTEP_CHOICE_DECAY: values = decays; break;
    case HSTEP_CHOICE_SCHEDULE:
    case HSTEP_CHOICE_DECAY_SCHEDULE: return hstep_schedule_name(index);
    case HSTEP_CHOICE_SCAN: values = scans; break;
    case HSTEP_CHOICE_GENERATOR: return hstep_generator_name(hstep_generator_id(index));
    case HSTEP_CHOICE_CLIP: values = clips; break;
    case HSTEP_CHOICE_MISSING: values = missings; break;
    case HSTEP_CHOICES: break;
    }
    for (int rule = 0; !values && rule < HSTEP_RULES; rule++) {
        int hyper = hstep_find_hyper(rule, choice) - HSTEP_COMMON_HYPERS;
        if (hyper >= 0 && hstep_rules[rule].hyper[hyper].words[0]) values = hstep_rules[rule].hyper[hyper].words;
    }
    for (int i = 0; values && values[i]; i++)
        if (i == index) return values[i];
    return NULL;
}

int hstep_choice_find(const char *choice, const char *value)
{
    const char *name;
    for (int i = 0; value && (name = halfstep_choice_value(choice, i)); i++)
        if (!strcmp(name, value)) return i;
    return -1;
}

static int find_part(const char *const *names, size_t stride, int n, const char *text, size_t length)
{
    for (int i = 0; i < n; i++) {
        const char *name = *(const char *const *)((const char *)names + stride * (size_t)i);
        if (strlen(name) == length && !memcmp(name, text, length)) return i;
    }
    return -1;
}

int hstep_find_rule(const char *text, size_t length)
{
    return find_part(&hstep_rules[0].name, sizeof hstep_rules[0], HSTEP_RULES, text, length);
}

int hstep_find_format(const char *text, size_t length)
{
    return find_part(&hstep_formats[0].name, sizeof hstep_formats[0], HSTEP_FORMATS, text, length);
}

int hstep_has_matrices(int rule)
{
    return hstep_rules[rule].kind == HSTEP_MATRIX || hstep_rules[rule].kind == HSTEP_FACTORED;
}

static int has_matrix_shape(int ndim, int64_t rows, int64_t row_length)
{
    return ndim >= 2 && rows > 1 && row_length > 1;
}

int hstep_is_matrix(int rule, int ndim, int64_t rows, int64_t row_length)
{
    return hstep_rules[rule].kind == HSTEP_MATRIX && has_matrix_shape(ndim, rows, row_length);
}

int hstep_pairs(int rule, int ndim, int64_t rows, int64_t row_length)
{
    return has_matrix_shape(ndim, rows, row_length) ? hstep_rules[rule].pairs : 0;
}

int hstep_state_of_shape(int rule, int state, int ndim, int64_t rows, int64_t row_length)
{
    const struct hstep_state *s = &hstep_rules[rule].state[state];
    int special = hstep_is_matrix(rule, ndim, rows, row_length) || hstep_pairs(rule, ndim, rows, row_length);
    return s->extent != HALFSTEP_EXTENT_ELEMENTS ? special : !special || s->role != NONNEG;
}

int hstep_format_serves(int format, int role)
{
    const struct hstep_format *f = &hstep_formats[format];
    /* A state that holds gradients needs either sign and no blocks, where a larger neighbour would set its scale. */
    return role == GRADIENT ? (f->roles & SIGNED) && !f->block : (f->roles & role) != 0;
}

int hstep_is_by_row(int format)
{
    const struct hstep_format *f = &hstep_formats[format];
    return f->block && (f->geometry == ROWS || f->geometry == PACKED);
}

int64_t hstep_row_stride(int64_t row_length) { return row_length < 32 ? row_length : (row_length + 31) / 32 * 32; }

int hstep_eligible_format(int format, int weight_format, int ndim, int64_t rows, int64_t row_length,
                          int64_t common_rows)
{
    if (format < 0 || !hstep_formats[format].block) return format;
    const struct hstep_format *f = &hstep_formats[format];
    int eligible = 1, one_row = ndim <= 1 && rows == 1 && row_length >= 4096;
    const struct hstep_format *weight = &hstep_formats[weight_format];
    /* Rows of packed weights are padded to whole blocks, those of flattened tensors are not. */
    const int padded =
        weight->geometry == PACKED && ndim >= 2 && row_length >= weight->block && row_length % weight->block;
    if (f->geometry == FLAT)
        eligible = rows * row_length >= 4096 && common_rows * row_length % f->block == 0 && !padded;
    if (f->geometry == ROWS) eligible = (ndim >= 2 || one_row) && row_length >= f->block;
    if (f->geometry == PACKED) eligible = ndim >= 2 && row_length >= f->block;
    if (eligible) return format;
    if (f->geometry == PACKED) return f->extra_bits ? HSTEP_FORMAT_bf16_ecc8 : HSTEP_FORMAT_bf16_sr;
    return weight_format == HSTEP_FORMAT_f32 ? HSTEP_FORMAT_f32 : HSTEP_FORMAT_bf16_sr;
}

static int64_t blocks_of(const struct hstep_format *f, int64_t n) { return (n + f->block - 1) / f->block; }

uint64_t hstep_code_bytes(int format, int64_t n_rows, int64_t n_columns)
{
    const struct hstep_format *f = &hstep_formats[format];
    if (f->geometry == PACKED) return (uint64_t)(n_rows * blocks_of(f, n_columns) * hstep_packed_bytes(f));
    /* Bits are left over only at the end of a row, or of everything. */
    if (f->geometry == FLAT) return ((uint64_t)n_rows * (uint64_t)n_columns * (uint64_t)f->code_bits + 7) / 8;
    return (uint64_t)n_rows * (((uint64_t)n_columns * (uint64_t)f->code_bits + 7) / 8);
}

uint64_t hstep_extra_bytes(int format, int64_t n_rows, int64_t n_columns)
{
    const struct hstep_format *f = &hstep_formats[format];
    uint64_t elements = (uint64_t)n_rows * (uint64_t)n_columns, block = (uint64_t)f->block;
    if (!f->block) return elements * (uint64_t)f->extra_bits / 8;
    if (f->geometry == PACKED)
        return (uint64_t)n_rows * (uint64_t)blocks_of(f, n_columns) * block * (uint64_t)f->extra_bits / 8;
    uint64_t scales = f->geometry == TENSOR ? elements != 0
                      : f->geometry == FLAT ? (elements + block - 1) / block
                                            : (uint64_t)n_rows * (uint64_t)blocks_of(f, n_columns);
    return scales * (uint64_t)f->scale_bits / 8;
}
