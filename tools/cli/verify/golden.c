/* Over 500 lines because the problem, its layouts and the hashing share one description of the tensors. */
#define HALFSTEP_ADVANCED
#include "cli/verify/golden.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/patterns.h"
#include "common/hash.h"

/* ---- The list of cases ------------------------------------------------------------------------------------------- */

struct list {
    struct golden_case *item;
    int n, capacity;
};

static int append(struct list *list, const struct golden_case *c)
{
    for (int i = 0; i < list->n; i++)
        if (!strcmp(list->item[i].recipe, c->recipe) && !strcmp(list->item[i].gradients, c->gradients) &&
            !strcmp(list->item[i].generator, c->generator))
            return 0;
    if (list->n == list->capacity) {
        int wanted = list->capacity ? 2 * list->capacity : 256;
        struct golden_case *larger = realloc(list->item, (size_t)wanted * sizeof *larger);
        if (!larger) return -1;
        list->item = larger;
        list->capacity = wanted;
    }
    list->item[list->n++] = *c;
    return 0;
}

/* A case follows from names alone, never from a row's position or from the number of rows. So a new rule or format adds
 * cases, and the promised ones stay. */

/* Returns the name of the format in a row if it serves a role, otherwise NULL. */
static const char *serving(int32_t role, int32_t row)
{
    halfstep_format_info info = {.struct_size = sizeof info};
    return halfstep_get_format_info(row, &info) == HALFSTEP_OK && (info.roles & role) ? info.name : NULL;
}

/* The gradient formats and generators that a recipe is combined with. */
enum depth {
    ONCE,    /* f32 and bf16 gradients; only bf16 for the recipes of bf16_only */
    MIXED,   /* f32 and bf16 gradients */
    THOROUGH /* those with every generator; with default states also the other gradient formats */
};

/* Recipes, or ends of recipes, whose cases of depth ONCE have bf16 gradients only. The list never grows, because new
 * rules and formats have both. */
static const char *const bf16_only[] = {
    "adam/f32/bf16",    "lion/f32/bf16",          "adan/f32/bf16",         "radam/f32/bf16",    "ranger/f32/bf16",
    "rmsprop/f32/bf16", "compass/f32/bf16",       "lpfadamw/f32/bf16",     "lamb/f32/bf16",     "stableadamw/f32/bf16",
    "lamb16/f32/f32",   "adamw-delayed/f32/bf16", "schedulefree/f32/bf16", "/f32+bf16+bf16-sr",
};

/* States of adamw in different formats, found by the first format. The list never grows, because mixture() makes the
 * mixture of a new format. */
static const char *const mixtures[] = {
    "f32+bf16+bf16-sr",           "bf16+bf16-sr+bf16-ecc8",   "bf16-sr+bf16-ecc8+bf16-ecc16",
    "bf16-kahan+bf16-ecc16+int8", "bf16-ecc8+int8+int4",      "bf16-ecc16+int4+fp8",
    "f16+fp8+fp8-e5m2",           "f16-sr+fp8-e5m2+dyn8",     "f16-kahan+dyn8+dyn4",
    "f16-ecc8+dyn4+fp8-lamb16",   "f16-ecc16+fp8-lamb16+f32", "int8+f32+bf16",
    "int4+bf16+bf16-sr",          "fp8+bf16-sr+bf16-ecc8",    "fp8-e5m2+bf16-ecc8+bf16-ecc16",
    "dyn8+bf16-ecc16+int8",       "dyn4+int8+int4",           "fp8-lamb16+int4+fp8",
};

static int is_bf16_only(const char *recipe)
{
    size_t length = strlen(recipe);
    for (size_t i = 0; i < sizeof bf16_only / sizeof bf16_only[0]; i++) {
        size_t end = strlen(bf16_only[i]);
        if (length >= end && (length == end || bf16_only[i][0] == '/') && !strcmp(recipe + length - end, bf16_only[i]))
            return 1;
    }
    return 0;
}

static void mixture(char *states, size_t size, int32_t row, const char *format)
{
    size_t length = strlen(format);
    for (size_t i = 0; i < sizeof mixtures / sizeof mixtures[0]; i++)
        if (!strncmp(mixtures[i], format, length) && mixtures[i][length] == '+') {
            snprintf(states, size, "%s", mixtures[i]);
            return;
        }
    /* Mixes the format with a block format. A format that cannot be the first state is that of one second moment
     * only. */
    if (serving(HALFSTEP_ROLE_SIGNED, row))
        snprintf(states, size, "%s+int8+%s", format, serving(HALFSTEP_ROLE_NONNEG, row) ? format : "f32");
    else snprintf(states, size, "bf16-sr+%s+int8", format);
}

/* Adds the cases of a recipe, if it exists. `defaults` is the recipe with its default states in full. uniform: all
 * states have one format. `special` is "", or the end of the cases' names. */
static int add_recipe(struct list *list, const char *recipe, const char *defaults, enum depth depth, int uniform,
                      const char *special)
{
    struct golden_case c = {.large = 0};
    int result = halfstep_recipe_full(recipe, c.recipe, sizeof c.recipe);
    /* Not every format serves every role, so some recipes do not exist. */
    if (result == HALFSTEP_ERROR_UNSUPPORTED) return 0;
    if (result != HALFSTEP_OK) return -1;
    int by_default = !strcmp(c.recipe, defaults);
    size_t length = strlen(c.recipe);
    snprintf(c.recipe + length, sizeof c.recipe - length, "%s", special);
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        c.gradients = serving(HALFSTEP_ROLE_GRADIENT, row);
        if (!c.gradients) continue;
        int f32 = !strcmp(c.gradients, "f32"), bf16 = !strcmp(c.gradients, "bf16");
        if (!f32 && !bf16 && !(by_default && depth == THOROUGH)) continue;
        if (depth == ONCE && !bf16 && is_bf16_only(c.recipe)) continue;
        for (int32_t g = 0; (c.generator = halfstep_choice_value("generator", g)); g++) {
            if (g && !(depth == THOROUGH && (bf16 || by_default))) continue;
            c.large = uniform && bf16;
            if (append(list, &c)) return -1;
        }
    }
    return 0;
}

/* Adds the cases of a rule. adamw stands for all rules, so it gets every weight format with every state format, alike
 * and mixed. Another rule gets every weight format, and every state format with two of these. */
static int add_rule(struct list *list, const halfstep_rule_info *rule)
{
    int all = !strcmp(rule->name, "adamw");
    for (int32_t w = 0; w < halfstep_format_count(); w++) {
        char prefix[64], recipe[GOLDEN_RECIPE], defaults[GOLDEN_RECIPE], states[80];
        const char *weight = serving(HALFSTEP_ROLE_WEIGHT, w);
        if (!weight) continue;
        int f32 = !strcmp(weight, "f32");
        snprintf(prefix, sizeof prefix, "%s/%s", rule->name, weight);
        if (halfstep_recipe_full(prefix, defaults, sizeof defaults) != HALFSTEP_OK) return -1;
        if (add_recipe(list, prefix, defaults, all || f32 ? THOROUGH : MIXED, 1, "")) return -1;
        if (!all && !f32 && strcmp(weight, "bf16-sr")) continue;
        for (int32_t row = 0; rule->states && row < halfstep_format_count(); row++) {
            const char *format = serving(rule->state_role[0] | (all ? HALFSTEP_ROLE_NONNEG : 0), row);
            if (!format) continue;
            snprintf(recipe, sizeof recipe, "%s/%s", prefix, format);
            if (add_recipe(list, recipe, defaults, all ? MIXED : ONCE, 1, "")) return -1;
            mixture(states, sizeof states, row, format);
            snprintf(recipe, sizeof recipe, "%s/%s", prefix, states);
            if (all && add_recipe(list, recipe, defaults, ONCE, 0, "")) return -1;
        }
    }
    return 0;
}

/* Adds the cautious cases of a rule, or those of cautious decay. Every rule gets a recipe whose kernels work in the
 * order of memory (f32) and one whose kernels work on pairs (int8). A cautious adamw gets every weight format and every
 * state format. */
static int add_cautious(struct list *list, const halfstep_rule_info *rule, const char *kind)
{
    int all = !strcmp(rule->name, "adamw") && !strcmp(kind, GOLDEN_CAUTIOUS);
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        const char *weight = serving(HALFSTEP_ROLE_WEIGHT, row), *state = serving(rule->state_role[0], row);
        int plain = weight && !strcmp(weight, "f32"), int8 = state && !strcmp(state, "int8");
        char recipe[GOLDEN_RECIPE];
        snprintf(recipe, sizeof recipe, "%s/%s", rule->name, weight ? weight : "");
        if (weight && (all || plain) && add_recipe(list, recipe, "", MIXED, plain, kind)) return -1;
        snprintf(recipe, sizeof recipe, "%s/bf16-sr/%s", rule->name, state ? state : "");
        if (state && (all || int8) && add_recipe(list, recipe, "", ONCE, int8, kind)) return -1;
    }
    return 0;
}

/* Adds the cases with stacks of a rule of matrices: f32 weights, and every state format with bf16-sr weights. Split
 * matrices get f32 and int8. */
static int add_stacks(struct list *list, const halfstep_rule_info *rule)
{
    char recipe[GOLDEN_RECIPE];
    snprintf(recipe, sizeof recipe, "%s/f32", rule->name);
    if (add_recipe(list, recipe, "", ONCE, 0, GOLDEN_STACKS) || add_recipe(list, recipe, "", ONCE, 0, GOLDEN_SPLITS))
        return -1;
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        const char *state = serving(rule->state_role[0], row);
        snprintf(recipe, sizeof recipe, "%s/bf16-sr/%s", rule->name, state ? state : "");
        if (state && add_recipe(list, recipe, "", ONCE, 0, GOLDEN_STACKS)) return -1;
        if (state && !strcmp(state, "int8") && add_recipe(list, recipe, "", ONCE, 0, GOLDEN_SPLITS)) return -1;
    }
    return 0;
}

/* Adds the cases of the hyper-parameters whose values have names: one recipe with each value but the first. */
static int add_words(struct list *list, int32_t row, const halfstep_rule_info *rule)
{
    halfstep_hyper_info info = {.struct_size = sizeof info};
    for (int32_t i = 0; halfstep_get_hyper_info(row, i, &info) == HALFSTEP_OK; i++) {
        const char *word;
        for (int32_t v = 1; (word = halfstep_choice_value(info.name, v)); v++) {
            char special[64], recipe[GOLDEN_RECIPE];
            snprintf(special, sizeof special, ":%s=%s", info.name, word);
            snprintf(recipe, sizeof recipe, "%s/f32", rule->name);
            if (add_recipe(list, recipe, "", ONCE, 0, special)) return -1;
        }
    }
    return 0;
}

struct golden_case *golden_cases(int *n)
{
    struct list list = {0};
    for (int32_t row = 0; row < halfstep_rule_count(); row++) {
        halfstep_rule_info rule = {.struct_size = sizeof rule};
        if (halfstep_get_rule_info(row, &rule) != HALFSTEP_OK || add_rule(&list, &rule) ||
            (rule.cautious && add_cautious(&list, &rule, GOLDEN_CAUTIOUS)) ||
            (rule.cautious_decay && add_cautious(&list, &rule, GOLDEN_CAUTIOUS_DECAY)) ||
            (rule.matrix && add_stacks(&list, &rule)) || add_words(&list, row, &rule)) {
            free(list.item);
            return NULL;
        }
    }
    *n = list.n;
    return list.item;
}

int golden_expected(const char *list, const struct golden_case *c, uint64_t *hash)
{
    char key[GOLDEN_RECIPE + 64];
    int length = snprintf(key, sizeof key, "%s %s %s ", c->recipe, c->gradients, c->generator);
    for (const char *line = list; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, key, (size_t)length)) continue;
        return sscanf(line + length, "%16" SCNx64, hash) == 1;
    }
    return 0;
}

/* ---- The problem ------------------------------------------------------------------------------------------------- */

/* Every row length that a kernel treats differently, with a few rows each. Tensors of group 1 keep whole rows, because
 * the group centralizes. */
static const struct shape {
    const char *name;
    int group, ndim;
    int64_t rows, row_length;
    int large; /* 1: only in problems with large tensors; 2: only with formats of geometry FLAT; 3: only with stacks;
                  4: only with split matrices */
    int64_t matrix_rows, split[4];
} shapes[] = {
    {"scalar", 0, 0, 1, 1, 0, 0, {0}},
    {"vector", 0, 1, 61, 1, 0, 0, {0}},
    {"empty", 0, 2, 0, 40, 0, 0, {0}},
    {"column", 0, 2, 37, 1, 0, 0, {0}},
    {"rows.7", 1, 2, 13, 7, 0, 0, {0}},
    {"rows.9", 2, 2, 11, 9, 0, 0, {0}},
    {"rows.32", 1, 2, 5, 32, 0, 0, {0}},
    {"rows.33", 0, 2, 9, 33, 0, 0, {0}},
    {"rows.64", 2, 2, 6, 64, 0, 0, {0}},
    {"rows.96", 1, 2, 4, 96, 0, 0, {0}},
    {"rows.256", 2, 2, 3, 256, 0, 0, {0}},
    {"rows.300", 1, 4, 5, 300, 0, 0, {0}},
    {"rows.301", 0, 3, 2, 301, 0, 0, {0}},
    {"rows.1000", 0, 2, 2, 1000, 0, 0, {0}},
    {"flat", 2, 1, 1, 4100, 0, 0, {0}},
    {"large.rows", 0, 3, 24, 2999, 1, 0, {0}},
    {"large.flat", 2, 1, 1, 70001, 1, 0, {0}},
    /* consists of whole blocks, for formats of geometry FLAT */
    {"blocks", 0, 2, 16, 512, 2, 0, {0}},
    /* matrices that begin within a group, short rows, more than one block of 64 rows; only the last one consists of
     * whole blocks for formats of geometry FLAT */
    {"stack.33", 0, 3, 4 * 9, 33, 3, 9, {0}},
    {"stack.7", 1, 3, 6 * 5, 7, 3, 5, {0}},
    {"stack.64", 2, 3, 3 * 69, 64, 3, 69, {0}},
    {"stack.512", 0, 4, 4 * 8, 512, 3, 8, {0}},
    /* one matrix, and a stack of them, whose largest block stands between or first */
    {"split.33", 0, 2, 24, 33, 4, 24, {5, 12, 7}},
    {"split.64", 2, 3, 3 * 80, 64, 4, 80, {66, 14}},
};
/* ALWAYS: the number of shapes before the one for formats of geometry FLAT. */
enum { SHAPES = sizeof shapes / sizeof shapes[0], ALWAYS = SHAPES - 7, GROUPS = 3, STEPS = 9 };

enum { NONFINITE_STEP = 5, ACCUMULATE_STEP = 7 };

static int shape_of(const char *name)
{
    for (int i = 0; i < SHAPES; i++)
        if (!strcmp(shapes[i].name, name)) return i;
    return -1;
}

static uint64_t random_at(int tensor, int step, int64_t element)
{
    return hstep_pattern_word((uint64_t)(step + 1), (uint64_t)tensor, element);
}

static float weight_at(int tensor, int64_t element)
{
    uint64_t r = random_at(tensor, -1, element);
    uint32_t bits = hstep_pattern(r);
    /* Some weights are the largest finite numbers, because rounding must not take them to infinity. None are in the
     * group with l2 decay, which would square them. */
    if (!strcmp(shapes[tensor].name, "rows.33") && r % 61 == 7) bits = (bits & 0x80000000u) | 0x7f7fffff;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Returns 1 if the tensor has no gradient in this step. */
static int silent(int tensor, int step)
{
    if (shapes[tensor].large == 1) return step != 2 && step != 6;
    if (!strcmp(shapes[tensor].name, "rows.96")) return step < 3; /* its first gradient comes late */
    return tensor == (step * 5 + 4) % ALWAYS;
}

/* Writes a whole gradient in its own format. */
static void make_gradient(int tensor, int step, const char *format, void *out)
{
    int64_t n = shapes[tensor].rows * shapes[tensor].row_length;
    int f32 = !strcmp(format, "f32"), half = !strcmp(format, "f16");
    for (int64_t i = 0; i < n; i++) {
        uint64_t r = random_at(tensor, step, i);
        int zero = (i / 32 + step) % 11 == 0; /* some blocks have no gradient, and other ones in the next step */
        int bad = step == NONFINITE_STEP && i == n - 1 && !strcmp(shapes[tensor].name, "rows.300");
        uint32_t bits = bad ? 0x7fc00000u : zero ? 0 : hstep_pattern(r);
        uint16_t code = (uint16_t)(bits >> 16);
        if (half) code = bad ? 0x7e00 : zero ? 0 : hstep_half_pattern(r);
        if (f32) memcpy((char *)out + 4 * i, &bits, 4);
        else memcpy((char *)out + 2 * i, &code, 2);
    }
}

/* ---- The steps, in one handle or in several ---------------------------------------------------------------------- */

struct rectangle {
    int64_t first_row, n_rows, first_column, n_columns;
};

struct run {
    const struct golden_case *c;
    int parts, by_columns;
    int flat;     /* the recipe has a format of geometry FLAT; the shape for such formats is not cut by columns */
    int matrix;   /* the rule steps matrices, which are not cut at all; stacks of them are cut between matrices */
    int matrices; /* shape.large of the stacks or splits that the problem has, else 0 */
    int64_t element_bytes; /* of a gradient */
    halfstep_optimizer *optimizer[GOLDEN_MAX_PARTS];
    int tensors;
    int shape[SHAPES]; /* the shape of each tensor; `weight` and `gradient` are indexed by tensor as well */
    struct rectangle held[GOLDEN_MAX_PARTS][SHAPES];
    void *weight[GOLDEN_MAX_PARTS][SHAPES];
    void *gradient[GOLDEN_MAX_PARTS][SHAPES];
    void *accumulator[GOLDEN_MAX_PARTS];
    int64_t *statistics[GOLDEN_MAX_PARTS];
    char *states[GOLDEN_MAX_PARTS]; /* memory of the caller for the states, or NULL */
    int states_bound;
    const struct golden_layout *layout;
    const char *device;
    char *error;
    size_t error_bytes;
};

__attribute__((format(printf, 2, 3))) static int complain(struct run *r, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int used = snprintf(r->error, r->error_bytes, "%s with %s gradients: ", r->c->recipe, r->c->gradients);
    if (used >= 0 && (size_t)used < r->error_bytes)
        vsnprintf(r->error + used, r->error_bytes - (size_t)used, format, arguments);
    va_end(arguments);
    return -1;
}

static int check(struct run *r, int part, int result, const char *what)
{
    if (result == HALFSTEP_OK) return 0;
    const char *detail = halfstep_error_detail(r->optimizer[part]);
    return complain(r, "%s: %s (%s)", what, halfstep_strerror(result), detail);
}

static int exists(const struct run *r, int tensor)
{
    const int large = shapes[tensor].large;
    return large >= 3 ? r->matrices == large : large == 2 ? r->flat : r->c->large || !large;
}

/* Returns 1 if the recipe has the format. Compares whole names, because one name may be part of another. */
static int recipe_has(const char *recipe, const char *format)
{
    size_t length = strlen(format);
    for (const char *part = recipe; *(part += strcspn(part, "/+"));)
        if (!strncmp(++part, format, length) && strchr("/+:", part[length])) return 1;
    return 0;
}

/* Returns the length of the longest block of the recipe that fits into a row, or 1 if none does. Column cuts must not
 * split it. */
static int block_of(const char *recipe, int64_t row_length)
{
    int block = 1;
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        halfstep_format_info info = {.struct_size = sizeof info};
        if (halfstep_get_format_info(row, &info) == HALFSTEP_OK && info.geometry != HALFSTEP_GEOMETRY_FLAT &&
            info.geometry != HALFSTEP_GEOMETRY_TENSOR && info.block > block && info.block <= row_length &&
            recipe_has(recipe, info.name))
            block = info.block;
    }
    return block;
}

static int has_flat(const char *recipe)
{
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        halfstep_format_info info = {.struct_size = sizeof info};
        if (halfstep_get_format_info(row, &info) == HALFSTEP_OK && info.geometry == HALFSTEP_GEOMETRY_FLAT &&
            recipe_has(recipe, info.name))
            return 1;
    }
    return 0;
}

/* Returns where a part begins, as a multiple of `multiple`. The cuts are uneven: each part is larger than the one
 * before. */
static int64_t cut(int64_t n, int part, int parts, int64_t multiple)
{
    if (part == 0) return 0;
    if (part == parts) return n;
    int64_t at = n * part * part / (parts * parts - 1);
    at = at / multiple * multiple;
    return at < n ? at : n;
}

/* Returns the same for the rows of a tensor, whose matrices are not cut. */
static int64_t cut_rows(const struct shape *s, int part, int parts)
{
    int64_t row = cut(s->rows, part, parts, s->matrix_rows && !s->split[0] ? s->matrix_rows : 1);
    if (!s->split[0]) return row;
    int64_t start = row / s->matrix_rows * s->matrix_rows;
    for (int i = 0; start + s->split[i] <= row && s->split[i]; i++) start += s->split[i];
    return start;
}

static void place_parts(struct run *r)
{
    for (int t = 0; t < SHAPES; t++)
        for (int p = 0; p < r->parts; p++) {
            const struct shape *s = &shapes[t];
            struct rectangle *h = &r->held[p][t];
            *h = (struct rectangle){0, s->rows, 0, s->row_length};
            int whole = (r->by_columns && (s->group == 1 || s->large >= 2)) ||
                        (r->matrix && !s->matrix_rows && s->ndim >= 2 && s->rows > 1 && s->row_length > 1);
            if (whole) {
                if (p) h->n_rows = 0;
            } else if (r->by_columns) {
                int64_t multiple = block_of(r->c->recipe, s->row_length);
                h->first_column = cut(s->row_length, p, r->parts, multiple);
                h->n_columns = cut(s->row_length, p + 1, r->parts, multiple) - h->first_column;
            } else {
                h->first_row = cut_rows(s, p, r->parts);
                h->n_rows = cut_rows(s, p + 1, r->parts) - h->first_row;
            }
        }
}

/* Copies a rectangle between a whole tensor and a dense part of it, in the direction of to_part. `width` is the bytes
 * of an element. */
static void move_part(const struct shape *s, const struct rectangle *h, void *whole, void *part, int64_t width,
                      int to_part)
{
    for (int64_t row = 0; row < h->n_rows; row++) {
        char *w = (char *)whole + ((h->first_row + row) * s->row_length + h->first_column) * width;
        char *p = (char *)part + row * h->n_columns * width;
        if (to_part) memcpy(p, w, (size_t)(h->n_columns * width));
        else memcpy(w, p, (size_t)(h->n_columns * width));
    }
}

static void *zeros(int64_t bytes) { return calloc(1, (size_t)(bytes ? bytes : 1)); }

/* Returns zeroed memory where the part is stepped: on its device, or on the host if it has none. Returns NULL without
 * memory. */
static void *device_zeros(struct run *r, int part, int64_t bytes)
{
    void *here = zeros(bytes), *memory = NULL;
    if (!r->device || !here) return here;
    if (!halfstep_device_allocate(r->optimizer[part], (uint64_t)bytes + 64, &memory) &&
        halfstep_device_copy(r->optimizer[part], memory, here, (uint64_t)bytes)) {
        halfstep_device_release(r->optimizer[part], memory);
        memory = NULL;
    }
    free(here);
    return memory;
}

static void device_free(struct run *r, int part, void *memory)
{
    if (r->device) halfstep_device_release(r->optimizer[part], memory);
    else free(memory);
}

/* Returns a copy of a part's device memory, to be freed by the caller. Returns the memory itself if there is no device,
 * and NULL without memory. */
static void *from_device(struct run *r, int part, void *memory, int64_t bytes)
{
    if (!r->device || !memory) return memory;
    void *here = zeros(bytes);
    if (here && halfstep_device_copy(r->optimizer[part], here, memory, (uint64_t)bytes)) {
        free(here);
        here = NULL;
    }
    return here;
}

static int has_hyper(int32_t rule, const char *name)
{
    halfstep_hyper_info info = {.struct_size = sizeof info};
    for (int32_t i = 0; halfstep_get_hyper_info(rule, i, &info) == HALFSTEP_OK; i++)
        if (!strcmp(info.name, name)) return 1;
    return 0;
}

static int add_groups(struct run *r, int part)
{
    static const struct {
        int group;
        const char *name, *choice;
        double value;
    } settings[] = {
        {0, "decay", "decoupled", 0},
        {0, "schedule", "cosine", 0},
        {0, "lr", NULL, 0.01},
        {0, "weight_decay", NULL, 0.1},
        {0, "warmup_steps", NULL, 3},
        {0, "total_steps", NULL, 12},
        {0, "final_fraction", NULL, 0.1},
        {0, "momentum", NULL, 0.9},
        {0, "dampening", NULL, 0.25},
        {0, "exact", NULL, 1},
        /* Relative steps, scaled by the largest numbers, would end in NaN, whose bits are not promised. */
        {0, "scale_parameter", NULL, 0},
        {1, "decay", "l2", 0},
        {1, "weight_decay", NULL, 0.01},
        {1, "maximize", NULL, 1},
        {1, "centralize", NULL, 0.75},
        {1, "momentum", NULL, 0.875},
        {1, "nesterov", NULL, 1},
        {1, "beta1", NULL, 0.8},
        {1, "beta2", NULL, 0.95},
        {1, "exact", NULL, 1},
        /* The groups have different learning rates, so each has an estimate of its own. */
        {1, "d_group", NULL, 1},
        {2, "decay", "fully-decoupled", 0},
        {2, "schedule", "inverse-power", 0},
        {2, "lr", NULL, 0.003},
        {2, "reference_lr", NULL, 0.01},
        {2, "weight_decay", NULL, 0.001},
        {2, "warmup_steps", NULL, 4},
        {2, "exact", NULL, 1},
        {2, "d_group", NULL, 2},
    };
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(r->c->recipe, "/"), r->c->recipe);
    int32_t rule = halfstep_rule_find(name), index;
    halfstep_optimizer *o = r->optimizer[part];
    char recipe[GOLDEN_RECIPE];
    snprintf(recipe, sizeof recipe, "%.*s", (int)strcspn(r->c->recipe, ":"), r->c->recipe);
    for (int g = 0; g < GROUPS; g++)
        if (check(r, part, halfstep_add_group(o, recipe, &index), "halfstep_add_group")) return -1;
    if (strstr(r->c->recipe, GOLDEN_CAUTIOUS) &&
        check(r, part, halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "cautious", 1), "cautious"))
        return -1;
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        if (settings[i].choice) {
            if (check(r, part, halfstep_set_choice(o, settings[i].group, settings[i].name, settings[i].choice),
                      settings[i].name))
                return -1;
        } else if (has_hyper(rule, settings[i].name)) {
            if (check(r, part, halfstep_set_hyper(o, settings[i].group, settings[i].name, settings[i].value),
                      settings[i].name))
                return -1;
        }
    }
    char choice[GOLDEN_RECIPE];
    const char *special = strchr(r->c->recipe, ':'), *word = special ? strchr(special, '=') : NULL;
    if (word) {
        snprintf(choice, sizeof choice, "%.*s", (int)(word - special - 1), special + 1);
        if (check(r, part, halfstep_set_choice(o, HALFSTEP_ALL_GROUPS, choice, word + 1), choice)) return -1;
    }
    return 0;
}

static int place_states(struct run *r, int part)
{
    halfstep_optimizer *o = r->optimizer[part];
    uint64_t bytes;
    if (r->layout->place) return check(r, part, r->layout->place(o), "place");
    if (!r->states_bound) return check(r, part, halfstep_allocate_states(o), "halfstep_allocate_states");
    if (check(r, part, halfstep_state_bytes(o, &bytes), "halfstep_state_bytes")) return -1;
    r->states[part] = device_zeros(r, part, (int64_t)bytes + 64);
    if (!r->states[part]) return complain(r, "out of memory");
    return check(r, part, halfstep_bind_states(o, r->states[part] + (64 - (uintptr_t)r->states[part] % 64), bytes),
                 "halfstep_bind_states");
}

static int add_tensors(struct run *r, int part)
{
    halfstep_optimizer *o = r->optimizer[part];
    int32_t index, tensors = 0;
    for (int t = 0; t < SHAPES; t++) {
        if (!exists(r, t)) continue;
        r->shape[tensors++] = t;
        const struct shape *s = &shapes[t];
        const struct rectangle *h = &r->held[part][t];
        halfstep_tensor d = {.struct_size = sizeof d,
                             .group = s->group,
                             .name = s->name,
                             .ndim = s->ndim,
                             .may_be_empty = 1,
                             .rows = s->rows,
                             .row_length = s->row_length,
                             .matrix_rows = s->matrix_rows,
                             .gradient = r->c->gradients};
        if (r->parts > 1) {
            d.first_row = h->first_row;
            d.n_rows = h->n_rows;
            d.first_column = h->first_column;
            d.n_columns = h->n_columns;
        }
        memcpy(d.split, s->split, sizeof s->split);
        if (check(r, part, halfstep_add_tensor(o, &d, &index), "halfstep_add_tensor")) return -1;
    }
    if (place_states(r, part)) return -1;
    const halfstep_call call = {.struct_size = sizeof call};
    r->statistics[part] = zeros(halfstep_statistics_count(o, &call) * (int64_t)sizeof(int64_t));
    if (!r->statistics[part]) return complain(r, "out of memory");
    r->tensors = tensors;
    for (int32_t i = 0; i < tensors; i++) {
        int t = r->shape[i];
        const struct rectangle *h = &r->held[part][t];
        halfstep_slot_info info = {.struct_size = sizeof info};
        if (check(r, part, halfstep_get_slot_info(o, i, HALFSTEP_SLOT_WEIGHT, &info), "halfstep_get_slot_info"))
            return -1;
        int64_t n = h->n_rows * h->n_columns;
        float *values = zeros(n * 4);
        r->weight[part][i] = device_zeros(r, part, (int64_t)info.code_bytes);
        r->gradient[part][i] = device_zeros(r, part, n * r->element_bytes);
        if (t == shape_of("rows.1000")) r->accumulator[part] = device_zeros(r, part, n * 2);
        int lacking = !values || !r->weight[part][i] || !r->gradient[part][i];
        for (int64_t j = 0; !lacking && j < n; j++)
            values[j] = weight_at(t, (h->first_row + j / h->n_columns) * shapes[t].row_length + h->first_column +
                                         j % h->n_columns);
        int result = lacking
                         ? HALFSTEP_ERROR_MEMORY
                         : halfstep_write_slot(o, i, HALFSTEP_SLOT_WEIGHT, r->weight[part][i], 0, h->n_rows, values);
        free(values);
        if (check(r, part, result, "halfstep_write_slot")) return -1;
    }
    return 0;
}

static int set_step(struct run *r, int part, int step)
{
    const double clip[STEPS] = {0, 0, 0, 0.5, 0.5, 0.5, 0, 1e9, 2}, scale[STEPS] = {1, 1, 0.25, 1, 3, 1, 1, 1, 1};
    halfstep_optimizer *o = r->optimizer[part];
    return check(r, part, halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "clip_norm", clip[step]), "clip_norm") ||
           check(r, part, halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "gradient_scale", scale[step]),
                 "gradient_scale") ||
           check(r, part, halfstep_set_hyper(o, 0, "weight_decay", step == 4 ? 0 : 0.1), "weight_decay") ||
           check(r, part, halfstep_set_hyper(o, 1, "lr", step == 6 ? 0 : 0.001 * (1 + step % 3)), "lr");
}

static int accumulate(struct run *r, int tensor)
{
    /* A tensor and its shape have the same number here, because shapes that a problem may lack come last. */
    for (int p = 0; p < r->parts; p++)
        for (int i = 0; i < 2; i++)
            if (check(r, p,
                      halfstep_accumulate(r->optimizer[p], tensor, r->accumulator[p], "bf16-sr", r->gradient[p][tensor],
                                          r->c->gradients, i ? 0.3 : 1.0),
                      "halfstep_accumulate"))
                return -1;
    return 0;
}

static int make_step(struct run *r, int step)
{
    const void *gradients[GOLDEN_MAX_PARTS][SHAPES];
    for (int i = 0; i < r->tensors; i++) {
        int t = r->shape[i];
        for (int p = 0; p < r->parts; p++) gradients[p][i] = silent(t, step) ? NULL : r->gradient[p][i];
        if (silent(t, step)) continue;
        void *whole = zeros(shapes[t].rows * shapes[t].row_length * r->element_bytes);
        if (!whole) return complain(r, "out of memory");
        make_gradient(t, step, r->c->gradients, whole);
        int lacking = 0;
        for (int p = 0; p < r->parts; p++) {
            const struct rectangle *h = &r->held[p][t];
            const int64_t bytes = h->n_rows * h->n_columns * r->element_bytes;
            void *here = r->device ? zeros(bytes) : r->gradient[p][i];
            lacking |= !here;
            if (here) move_part(&shapes[t], h, whole, here, r->element_bytes, 1);
            if (!r->device) continue;
            lacking |= here && halfstep_device_copy(r->optimizer[p], r->gradient[p][i], here, (uint64_t)bytes);
            free(here);
        }
        free(whole);
        if (lacking) return complain(r, "out of memory");
    }
    if (step == ACCUMULATE_STEP && accumulate(r, shape_of("rows.1000"))) return -1;
    for (int p = 0; p < r->parts; p++)
        if (set_step(r, p, step)) return -1;
    int expected = step == NONFINITE_STEP ? HALFSTEP_NONFINITE : HALFSTEP_OK, result;
    halfstep_call call[GOLDEN_MAX_PARTS];
    for (int p = 0; p < r->parts; p++) {
        call[p] = (halfstep_call){.struct_size = sizeof call[p], .weights = r->weight[p], .gradients = gradients[p]};
        if (r->layout->before) r->layout->before(r->optimizer[p], &call[p]);
    }
    if (r->parts == 1) {
        result = halfstep_run(r->optimizer[0], &call[0]);
        if (!result && expected) result = halfstep_synchronize(r->optimizer[0]);
        if (r->layout->after) r->layout->after(r->optimizer[0], &call[0]);
        return result == expected ? 0 : complain(r, "step %d: %s", step, halfstep_strerror(result));
    }
    for (int p = 0; p < r->parts; p++) call[p].statistics = r->statistics[p];
    int64_t n = halfstep_statistics_count(r->optimizer[0], call), sums = halfstep_norms_offset(r->optimizer[0], call);
    for (int p = 0; p < r->parts; p++) {
        if (check(r, p, halfstep_run_begin(r->optimizer[p], &call[p]), "halfstep_run_begin")) return -1;
        for (int64_t i = 0; p && i < n; i++) r->statistics[0][i] += r->statistics[p][i];
    }
    for (int p = 0; p < r->parts; p++) {
        if (p) memcpy(r->statistics[p], r->statistics[0], (size_t)sums * sizeof(int64_t));
        if (check(r, p, halfstep_run_norms(r->optimizer[p], &call[p]), "halfstep_run_norms")) return -1;
        for (int64_t i = sums; p && i < n; i++) r->statistics[0][i] += r->statistics[p][i];
    }
    for (int p = 0; p < r->parts; p++) {
        call[p].statistics = r->statistics[0];
        result = halfstep_run_finish(r->optimizer[p], &call[p]);
        if (!result && expected) result = halfstep_synchronize(r->optimizer[p]);
        if (r->layout->after) r->layout->after(r->optimizer[p], &call[p]);
        if (result != expected) return complain(r, "step %d, part %d: %s", step, p, halfstep_strerror(result));
    }
    return 0;
}

/* ---- Hashing, of parts put together as one handle would hold them ------------------------------------------------ */

/* Hashes one plane of a tensor, put together from all parts. It has `bits` for every `block` elements of a row. Rows
 * are in whole bytes. */
static int hash_plane(struct run *r, int t, void *const *planes, int64_t bits, int64_t block, uint64_t *hash)
{
    struct shape s = shapes[t];
    s.row_length = ((s.row_length + block - 1) / block * bits + 7) / 8;
    int64_t bytes = s.rows * s.row_length;
    char *whole = zeros(bytes);
    if (!whole) return complain(r, "out of memory");
    for (int p = 0; p < r->parts; p++) {
        struct rectangle h = r->held[p][t];
        h.n_columns = ((h.n_columns + block - 1) / block * bits + 7) / 8;
        h.first_column = h.first_column / block * bits / 8;
        void *here = from_device(r, p, planes[p], h.n_rows * h.n_columns);
        if (here) move_part(&s, &h, whole, here, 1, 0);
        if (here != planes[p]) free(here);
    }
    *hash = hash_bytes(*hash, whole, (size_t)bytes);
    free(whole);
    return 0;
}

static int hash_bytes_of(struct run *r, int p, void *plane, int64_t bytes, uint64_t *hash)
{
    void *here = from_device(r, p, plane, bytes);
    if (!here) return complain(r, "out of memory");
    *hash = hash_bytes(*hash, here, (size_t)bytes);
    if (here != plane) free(here);
    return 0;
}

/* Hashes a vector over rows or columns. Those of the parts follow one another, because parts are cut between
 * matrices. */
static int hash_vector(struct run *r, void *const *code, const struct rectangle *pieces, int64_t rows, int64_t columns,
                       uint64_t *hash)
{
    const struct shape s = {.rows = rows, .row_length = columns};
    char *whole = zeros(rows * columns * 4);
    if (!whole) return complain(r, "out of memory");
    for (int p = 0; p < r->parts; p++) {
        void *here = from_device(r, p, code[p], pieces[p].n_rows * columns * 4);
        if (here) move_part(&s, &pieces[p], whole, here, 4, 0);
        if (here != code[p]) free(here);
    }
    *hash = hash_bytes(*hash, whole, (size_t)(rows * columns * 4));
    free(whole);
    return 0;
}

static int hash_slot(struct run *r, int tensor, int slot, uint64_t *hash)
{
    int t = r->shape[tensor];
    struct rectangle pieces[GOLDEN_MAX_PARTS] = {{0, 0, 0, 0}};
    int64_t rows = 0, vector = 0; /* columns of what stores a vector */
    void *code[GOLDEN_MAX_PARTS] = {0}, *extra[GOLDEN_MAX_PARTS] = {0};
    halfstep_format_info format = {.struct_size = sizeof format};
    for (int p = 0; p < r->parts; p++) {
        halfstep_slot_info info = {.struct_size = sizeof info};
        if (check(r, p, halfstep_get_slot_info(r->optimizer[p], tensor, slot, &info), "halfstep_get_slot_info"))
            return -1;
        if (info.format < 0) return 0;
        if (check(r, p, halfstep_get_format_info(info.format, &format), "halfstep_get_format_info")) return -1;
        code[p] = slot == HALFSTEP_SLOT_WEIGHT ? r->weight[p][tensor] : info.code;
        extra[p] = info.extra;
        const struct rectangle *h = &r->held[p][t];
        if (h->n_rows > 0 && h->n_columns > 0 && info.rows * info.columns != h->n_rows * h->n_columns)
            vector = info.columns;
        if (vector) pieces[p] = (struct rectangle){rows, info.rows, 0, info.columns};
        rows += info.rows;
    }
    if (vector) return hash_vector(r, code, pieces, rows, vector, hash);
    if (format.geometry == HALFSTEP_GEOMETRY_PACKED) {
        const int block = format.block, bits = block * format.code_bits + 8 * format.scale_bytes;
        if (hash_plane(r, t, code, bits, block, hash)) return -1;
        return format.extra_bits ? hash_plane(r, t, extra, block * format.extra_bits, block, hash) : 0;
    }
    if (hash_plane(r, t, code, format.code_bits, 1, hash)) return -1;
    if (format.block && format.geometry == HALFSTEP_GEOMETRY_TENSOR) {
        for (int p = 0; p < r->parts; p++)
            if (r->held[p][t].n_rows && r->held[p][t].n_columns)
                return hash_bytes_of(r, p, extra[p], format.scale_bytes, hash);
        return 0;
    }
    if (format.block) return hash_plane(r, t, extra, 8 * format.scale_bytes, format.block, hash);
    return format.extra_bits ? hash_plane(r, t, extra, format.extra_bits, 1, hash) : 0;
}

/* Returns 1 if part p has elements of tensor t. */
static int has_elements(const struct run *r, int p, int t)
{
    const struct rectangle *h = &r->held[p][r->shape[t]];
    return h->n_rows > 0 && h->n_columns > 0;
}

/* Hashes scalar number `place` of a tensor, or grid number `place` if is_grid. All parts must have the same value. With
 * `matrix`, only the part that has the whole tensor knows it. */
static int hash_scalar(struct run *r, int t, int is_grid, int place, int matrix, uint64_t *hash)
{
    uint32_t first = 0, bits;
    int knows = 0, known = 0;
    while (matrix && knows < r->parts && !has_elements(r, knows, t)) knows++;
    for (int p = 0; p < r->parts; p++) {
        halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR, .index = t};
        if (matrix && knows < r->parts && !has_elements(r, p, t)) continue;
        if (check(r, p, halfstep_get_record(r->optimizer[p], &record), "halfstep_get_record")) return -1;
        /* Column cuts may change the last bit of a norm in double. */
        float rounded = (float)(is_grid ? record.grid : record.scalar)[place];
        memcpy(&bits, &rounded, sizeof bits);
        if (!known++) first = bits;
        if (bits != first)
            return complain(r, "part %d and an earlier part differ in %s %d", p, is_grid ? "grid" : "scalar", place);
    }
    *hash = hash_word(*hash, first);
    return 0;
}

/* Fails if a slot of a tensor holds a NaN, whose bits are not promised. */
static int has_numbers(struct run *r, int t, int slot)
{
    halfstep_slot_info info = {.struct_size = sizeof info};
    if (check(r, 0, halfstep_get_slot_info(r->optimizer[0], t, slot, &info), "halfstep_get_slot_info")) return -1;
    const int64_t n = info.rows * info.columns;
    if (info.format < 0 || !n) return 0;
    float *values = zeros(n * (int64_t)sizeof *values);
    if (!values) return complain(r, "out of memory");
    int result = check(r, 0, halfstep_read_slot(r->optimizer[0], t, slot, r->weight[0][t], 0, info.rows, values),
                       "halfstep_read_slot");
    int64_t i = 0;
    while (!result && i < n && values[i] == values[i]) i++;
    if (!result && i < n)
        result = complain(r, "slot %d of '%s' ends in a NaN at element %" PRId64, slot, shapes[r->shape[t]].name, i);
    free(values);
    return result;
}

/* Fails if any weight or state holds a NaN. Looks at cases in one part only, because shards have the same bits. */
static int all_are_numbers(struct run *r, int32_t states)
{
    for (int t = 0; r->parts == 1 && t < r->tensors; t++)
        for (int s = HALFSTEP_SLOT_WEIGHT; s < HALFSTEP_SLOT_STATE + states; s++)
            if (s != HALFSTEP_SLOT_GRADIENT && has_numbers(r, t, s)) return -1;
    return 0;
}

static int hash_all(struct run *r, uint64_t *result)
{
    uint64_t hash = HASH_START;
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(r->c->recipe, "/"), r->c->recipe);
    if (halfstep_get_rule_info(halfstep_rule_find(name), &rule) != HALFSTEP_OK)
        return complain(r, "unknown rule '%s'", name);
    for (int t = 0; t < r->tensors; t++) {
        if (hash_slot(r, t, HALFSTEP_SLOT_WEIGHT, &hash)) return -1;
        for (int s = 0; s < rule.states; s++)
            if (hash_slot(r, t, HALFSTEP_SLOT_STATE + s, &hash)) return -1;
        halfstep_record c = {.struct_size = sizeof c, .kind = HALFSTEP_RECORD_TENSOR, .index = t}, other = c;
        for (int p = 0; p < r->parts; p++) {
            if (check(r, p, halfstep_get_record(r->optimizer[p], p ? &other : &c), "halfstep_get_record")) return -1;
            if (p && (c.id != other.id || c.state_steps != other.state_steps || c.full_steps != other.full_steps ||
                      c.writes != other.writes))
                return complain(r, "parts 0 and %d have different counters", p);
        }
        hash = hash_word(hash_word(hash_word(hash, c.state_steps), c.full_steps), c.writes);
        for (int i = 0; i < rule.scalars; i++)
            if (hash_scalar(r, t, 0, i, rule.matrix, &hash)) return -1;
        for (int s = 0; s < rule.states; s++) {
            halfstep_slot_info slot = {.struct_size = sizeof slot};
            if (check(r, 0, halfstep_get_slot_info(r->optimizer[0], t, HALFSTEP_SLOT_STATE + s, &slot), "slot"))
                return -1;
            if (slot.grid && hash_scalar(r, t, 1, s, rule.matrix, &hash)) return -1;
        }
    }
    if (hash_plane(r, shape_of("rows.1000"), r->accumulator, 16, 1, &hash)) return -1;
    *result = hash_finish(hash_word(hash, halfstep_skipped_steps(r->optimizer[0])));
    return all_are_numbers(r, rule.states);
}

static int compute(struct run *r, const struct golden_layout *layout, uint64_t *hash)
{
    for (int p = 0; p < r->parts; p++) {
        halfstep_options options = {.struct_size = sizeof options,
                                    .threads = layout->threads,
                                    .seed = UINT64_C(0x0123456789abcdef),
                                    .run = layout->run,
                                    .host = layout->host,
                                    .device = layout->device};
        if (check(r, p, halfstep_create(&options, &r->optimizer[p]), "halfstep_create")) return -1;
        if (check(r, p, halfstep_set_choice(r->optimizer[p], HALFSTEP_ALL_GROUPS, "generator", r->c->generator),
                  "generator"))
            return -1;
        if (add_groups(r, p) || add_tensors(r, p)) return -1;
    }
    for (int step = 0; step < STEPS; step++)
        if (make_step(r, step)) return -1;
    for (int p = 0; layout->end && p < r->parts; p++)
        if (check(r, p, layout->end(r->optimizer[p]), "end")) return -1;
    return hash_all(r, hash);
}

int golden_run(const struct golden_case *c, const struct golden_layout *layout, uint64_t *hash, char *error,
               size_t error_bytes)
{
    halfstep_format_info format = {.struct_size = sizeof format};
    struct run *r = calloc(1, sizeof *r);
    if (!r || halfstep_get_format_info(halfstep_format_find(c->gradients), &format) != HALFSTEP_OK) {
        snprintf(error, error_bytes, "%s", r ? "unknown gradient format" : "out of memory");
        free(r);
        return -1;
    }
    r->c = c;
    r->parts = layout->parts > 1 ? layout->parts : 1;
    r->by_columns = layout->by_columns;
    r->states_bound = layout->states_bound;
    r->layout = layout;
    r->device = layout->device && strcmp(layout->device, "cpu") ? layout->device : NULL;
    char name[32];
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    snprintf(name, sizeof name, "%.*s", (int)strcspn(c->recipe, "/"), c->recipe);
    halfstep_get_rule_info(halfstep_rule_find(name), &rule);
    r->matrix = rule.matrix;
    r->flat = has_flat(c->recipe);
    r->matrices = strstr(c->recipe, GOLDEN_STACKS) ? 3 : strstr(c->recipe, GOLDEN_SPLITS) ? 4 : 0;
    r->element_bytes = format.code_bits / 8;
    r->error = error;
    r->error_bytes = error_bytes;
    int result = -1;
    if (r->parts > GOLDEN_MAX_PARTS) {
        complain(r, "too many parts; at most %d are possible", GOLDEN_MAX_PARTS);
    } else {
        place_parts(r);
        result = compute(r, layout, hash);
    }
    for (int p = 0; p < GOLDEN_MAX_PARTS; p++) {
        device_free(r, p, r->accumulator[p]);
        free(r->statistics[p]);
        device_free(r, p, r->states[p]);
        for (int t = 0; t < SHAPES; t++) {
            device_free(r, p, r->weight[p][t]);
            device_free(r, p, r->gradient[p][t]);
        }
        halfstep_destroy(r->optimizer[p]);
    }
    free(r);
    return result;
}
