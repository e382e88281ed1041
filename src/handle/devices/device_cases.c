#include "handle/devices/device_cases.h"

#include <stdio.h>
#include <string.h>

#include "base/patterns.h"
#include "base/scale.h"
#include "tables/layout.h"

/* ---- Groups and tensors ---- */

struct shape {
    int ndim;
    int64_t rows, row_length;
};

static const char *format_serving(int32_t role, int32_t row)
{
    halfstep_format_info info = {.struct_size = sizeof info};
    return !halfstep_get_format_info(row, &info) && (info.roles & role) ? info.name : NULL;
}

/* Returns the n-th gradient format, and begins anew after the last. */
static const char *gradient_format(int n)
{
    int count = 0;
    for (int32_t row = 0; row < halfstep_format_count(); row++)
        count += format_serving(HALFSTEP_ROLE_GRADIENT, row) != NULL;
    n %= count;
    for (int32_t row = 0;; row++)
        if (format_serving(HALFSTEP_ROLE_GRADIENT, row) && !n--) return format_serving(HALFSTEP_ROLE_GRADIENT, row);
}

static int is_switch(const halfstep_hyper_info *hyper)
{
    return hyper->title[1] == ':' && (hyper->title[0] == '0' || hyper->title[0] == '1');
}

/* Returns another value than the initial one. Numbers of steps may be large. */
static double other_value(const halfstep_hyper_info *hyper)
{
    return hyper->initial != 0 ? hyper->initial / 2 : hyper->maximum > 1e6 ? 3 : 0.3;
}

/* Gives case number n its own mixture of hyper-parameters and choices. A rule that refuses one keeps its default. */
static void set_options(halfstep_optimizer *o, int32_t group, int n)
{
    const struct {
        const char *name;
        double value;
    } common[] = {{"lr", 0.01},
                  {"weight_decay", 0.005},
                  {"reference_lr", n % 3 ? 0.02 : 0.0},
                  {"warmup_steps", 2},
                  {"total_steps", n % 4 ? 12 : 4},
                  {"final_fraction", 0.25},
                  {"final_decay_fraction", 0.5},
                  {"decay_start", 0.25},
                  {"power", -0.75},
                  {"maximize", n % 5 == 1},
                  {"cautious", n % 6 == 3},
                  {"centralize", n % 7 == 2 ? 0.5 : 0.0}};
    const int rule = o->groups[group].recipe.rule;
    for (size_t i = 0; i < sizeof common / sizeof *common; i++)
        halfstep_set_hyper(o, group, common[i].name, common[i].value);
    for (int i = HSTEP_COMMON_HYPERS; i < HSTEP_COMMON_HYPERS + hstep_rule_hypers(rule); i++) {
        halfstep_hyper_info hyper = {.struct_size = sizeof hyper};
        if (halfstep_get_hyper_info(rule, i, &hyper)) continue;
        const int named = halfstep_choice_value(hyper.name, 0) != NULL;
        if (named) halfstep_set_hyper(o, group, hyper.name, (n + i) % (int)(hyper.maximum + 1));
        else if (is_switch(&hyper)) halfstep_set_hyper(o, group, hyper.name, (n >> 1) % 2);
        else if ((n ^ n >> 2) % 2) halfstep_set_hyper(o, group, hyper.name, other_value(&hyper));
    }
    if (hstep_rules[rule].share) halfstep_set_hyper(o, group, hstep_rules[rule].share, group);
    /* Products of matrices by a vendor's library have bits of their own. */
    halfstep_set_hyper(o, group, "exact", 1);
    halfstep_set_choice(o, group, "decay", halfstep_choice_value("decay", n % 4));
    /* No fused kernel has cautious decay. */
    if (n % 9 == 8) halfstep_set_choice(o, group, "decay", "cautious");
    halfstep_set_choice(o, group, "decay_schedule", halfstep_choice_value("decay_schedule", n % 3 ? 0 : n / 3 % 5));
    halfstep_set_choice(o, group, "schedule", halfstep_choice_value("schedule", n % 5));
}

void hstep_set_case_step(halfstep_optimizer *o, int step)
{
    static const double clip_norm[] = {2, 2, 0, 0.5, 1e9}, scale[] = {0.75, 1, 0.25, 3, 0.75};
    const int n = step % (int)(sizeof scale / sizeof *scale);
    halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "clip_norm", clip_norm[n]);
    halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "gradient_scale", scale[n]);
    for (int32_t g = 0; g < o->n_groups; g++) {
        halfstep_set_hyper(o, g, "lr", step && (step + g) % 4 == 2 ? 0 : 0.005 * (1 + (step + g) % 3));
        halfstep_set_hyper(o, g, "weight_decay", (step + g) % 5 == 3 ? 0 : 0.005);
    }
}

int hstep_age_cases(halfstep_optimizer *o)
{
    int error = HALFSTEP_OK;
    for (int i = 1; !error && i < o->n_tensors; i += 2) {
        halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR, .index = i};
        error = halfstep_get_record(o, &record);
        record.state_steps = record.full_steps = record.writes = i % 4 == 1 ? 5 : 1001;
        if (!error) error = halfstep_set_record(o, &record);
    }
    for (int g = 1; !error && g < o->n_groups; g += 3) {
        halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_GROUP, .index = g, .steps = 6};
        error = halfstep_set_record(o, &record);
    }
    return error;
}

/* Adds a tensor of a case. Where `part` is set and the rule allows it, the rows are a part of a far larger tensor. They
 * begin before an element at which random words get another key, or at which a number of an element needs 33 bits. */
static int add_tensor(halfstep_optimizer *o, int32_t group, struct shape s, const char *gradient, int part)
{
    char recipe[64], name[128];
    const int64_t matrix = s.ndim == 3 ? s.rows / 3 : 0;
    int32_t index;
    int error = halfstep_get_group_recipe(o, group, recipe, sizeof recipe);
    if (error) return error;
    snprintf(name, sizeof name, "%s, %lld x %lld, %s gradients, case %d", recipe, (long long)s.rows,
             (long long)s.row_length, gradient, (int)halfstep_tensor_count(o));
    halfstep_tensor t = {.struct_size = sizeof t,
                         .group = group,
                         .name = name,
                         .ndim = s.ndim,
                         .rows = s.rows,
                         .row_length = s.row_length,
                         .matrix_rows = matrix, /* a stack of three, for rules of matrices */
                         .split = {matrix > 3 ? matrix - 2 : 0, matrix > 3 ? 2 : 0},
                         .gradient = gradient},
                    whole = t;
    if (part && s.rows > 1) {
        const int64_t segment = (int64_t)1 << (halfstep_tensor_count(o) % 2 ? 16 : 32);
        t.first_row = segment / hstep_row_stride(s.row_length) - s.rows / 2;
        t.rows = t.first_row + s.rows;
        t.n_rows = s.rows;
        t.n_columns = s.row_length;
        if (!halfstep_add_tensor(o, &t, &index)) return HALFSTEP_OK;
    }
    return halfstep_add_tensor(o, &whole, &index);
}

/* Adds a group if its recipe exists. *group is -1 if it does not. */
static int add_group(halfstep_optimizer *o, int32_t *group, const char *rule, const char *weight, const char *states)
{
    char recipe[160];
    snprintf(recipe, sizeof recipe, "%s/%s%s%s", rule, weight, *states ? "/" : "", states);
    *group = -1;
    int error = halfstep_add_group(o, recipe, group);
    if (!error) set_options(o, *group, *group);
    return error == HALFSTEP_ERROR_UNSUPPORTED ? HALFSTEP_OK : error;
}

static int has_flat_format(const halfstep_optimizer *o, int32_t group)
{
    char recipe[64];
    halfstep_format_info info = {.struct_size = sizeof info};
    if (halfstep_get_group_recipe(o, group, recipe, sizeof recipe)) return 0;
    for (int32_t row = 0; !halfstep_get_format_info(row, &info); row++)
        if (info.geometry == HALFSTEP_GEOMETRY_FLAT && strstr(recipe, info.name)) return 1;
    return 0;
}

/* Adds tensors in the group: one of a shape that rows and blocks do not fit, and one with long rows. Formats of
 * geometry FLAT also get one that consists of whole blocks. Rules of matrices get a vector, a tall matrix, a
 * stack, and one whose matrices are split. */
static int add_general(halfstep_optimizer *o, int32_t group, int part, int matrices)
{
    static const struct shape odd[] = {{0, 1, 1},  {1, 61, 1}, {2, 37, 1}, {2, 13, 7},
                                       {2, 11, 9}, {2, 5, 32}, {2, 9, 33}, {3, 2, 301}},
                              wide[] = {{2, 3, 256}, {4, 5, 300}, {2, 2, 1000}, {1, 1, 4100}, {2, 6, 64}},
                              blocks = {2, 16, 256}, vector = {1, 1, 4100}, tall = {2, 70, 5}, stack = {3, 9, 33},
                              split = {3, 21, 33};
    if (group < 0) return HALFSTEP_OK;
    int error = add_tensor(o, group, odd[group % 8], gradient_format(group), part);
    if (!error) error = add_tensor(o, group, wide[group % 5], gradient_format(group + 1), part);
    if (!error && has_flat_format(o, group)) error = add_tensor(o, group, blocks, gradient_format(group), part);
    if (!error && matrices) error = add_tensor(o, group, vector, gradient_format(group + 1), part);
    if (!error && matrices) error = add_tensor(o, group, tall, gradient_format(group), part);
    if (!error && matrices) error = add_tensor(o, group, stack, gradient_format(group + 1), 0);
    if (!error && matrices) error = add_tensor(o, group, split, gradient_format(group), 0);
    return error;
}

int hstep_describe_general(halfstep_optimizer *o, int part)
{
    const int32_t formats = halfstep_format_count();
    int32_t group;
    int error = HALFSTEP_OK;
    for (int32_t r = 0; !error && r < halfstep_rule_count(); r++) {
        halfstep_rule_info rule = {.struct_size = sizeof rule};
        if ((error = halfstep_get_rule_info(r, &rule))) return error;
        int matrices = rule.matrix;
        for (int i = 0; i < rule.states; i++) matrices |= rule.state_extent[i] != HALFSTEP_EXTENT_ELEMENTS;
        for (int32_t w = 0; !error && w < formats; w++) {
            const char *weight = format_serving(HALFSTEP_ROLE_WEIGHT, w);
            if (!weight || (matrices && w % 4)) continue;
            group = -1;
            for (int32_t i = 0; !error && rule.states && group < 0 && i < formats; i++)
                error = add_group(o, &group, rule.name, weight, format_serving(~0, (r + w + i) % formats));
            if (!error && group < 0) error = add_group(o, &group, rule.name, weight, "");
            if (!error) error = add_general(o, group, part, matrices);
        }
    }
    for (int32_t s = 0; !error && s < formats; s++) {
        char mixed[64];
        snprintf(mixed, sizeof mixed, "bf16-sr+%s", format_serving(~0, s));
        for (int second = 0; !error && second < 2; second++)
            if (!(error = add_group(o, &group, "adamw", "bf16-sr", second ? mixed : format_serving(~0, s))))
                error = add_general(o, group, part, 0);
    }
    return error;
}

/* Leaves the format of the states that are moments in a list with one format for each state. States of other roles then
 * have the formats that follow from the weights, as every recipe with the same fused kernel has them. */
static void name_moments(char *states, int32_t r)
{
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    const int32_t moments = HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG;
    const char *at = states;
    if (halfstep_get_rule_info(r, &rule)) return;
    for (int i = 0; i < rule.states; i++) {
        const size_t length = strcspn(at, "+");
        if (rule.state_role[i] & moments) {
            memmove(states, at, length);
            states[length] = 0;
            return;
        }
        at += length + (at[length] == '+');
    }
}

int hstep_describe_fused(halfstep_optimizer *o, const halfstep_optimizer *asking, int tensor, int part)
{
    static const struct shape shapes[] = {{2, 4, 512}, {2, 3, 256}, {1, 1, 4096}, {3, 2, 1024}};
    char recipe[64];
    int error = halfstep_get_group_recipe(asking, asking->tensors[tensor].group, recipe, sizeof recipe);
    char *weight = strchr(recipe, '/'), *states = weight ? strchr(weight + 1, '/') : NULL;
    if (weight) *weight = 0;
    if (states) name_moments(states + 1, asking->groups[asking->tensors[tensor].group].recipe.rule);
    for (int32_t w = 0; !error && w < halfstep_format_count(); w++)
        for (int decay = 0; !error && decay < 4 && format_serving(HALFSTEP_ROLE_WEIGHT, w); decay++) {
            int32_t group;
            error = add_group(o, &group, recipe, format_serving(HALFSTEP_ROLE_WEIGHT, w), states ? states + 1 : "");
            for (int g = 0; !error && group >= 0 && g < 3; g++)
                error = add_tensor(o, group, shapes[(decay + g) % 4], gradient_format(g), part);
        }
    return error;
}

/* ---- Values ---- */

/* Fills a packed weight: scales and codes of any size, and 0 beyond the end of a row. */
static void fill_packed(char *data, const struct hstep_tensor *t, const struct hstep_format *f, uint64_t seed,
                        int largest)
{
    const int64_t blocks = hstep_blocks_per_row(t, t->slot[HALFSTEP_SLOT_WEIGHT].format);
    for (int64_t b = 0; b < t->n_rows * blocks; b++, data += hstep_packed_bytes(f)) {
        const uint64_t r = hstep_pattern_word(seed, t->id, b);
        const uint32_t scale = largest && b % 7 == 3 ? 0x7b800000 : hstep_pattern(r) & 0x7fffffff;
        hstep_scale_store(HSTEP_SCALE_BF16, data, 0, scale);
        for (int64_t i = 0; i < f->block; i++) {
            const int code = (int)(hstep_mix(r + (uint64_t)i) % 255) - 127;
            data[f->scale_bits / 8 + i] = (char)(b % blocks * f->block + i < t->n_columns ? code : 0);
        }
    }
}

void hstep_fill_case(char *data, const halfstep_optimizer *o, int tensor, int slot, uint64_t seed)
{
    const int64_t n = o->tensors[tensor].n_rows * o->tensors[tensor].n_columns;
    const struct hstep_slot *s = &o->tensors[tensor].slot[slot];
    halfstep_format_info format = {.struct_size = sizeof format};
    halfstep_get_format_info(s->format, &format);
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    halfstep_get_rule_info(o->tensors[tensor].rule, &rule);
    const int half = !strncmp(format.code_dtype, "F16", 3),
              largest = slot == HALFSTEP_SLOT_WEIGHT && tensor % 4 == 0 && !rule.two_pass &&
                        strcmp(halfstep_get_choice(o, o->tensors[tensor].group, "decay"), "l2") != 0;
    if (format.geometry == HALFSTEP_GEOMETRY_PACKED) {
        fill_packed(data, &o->tensors[tensor], &hstep_formats[s->format], seed, largest);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const uint64_t r = hstep_pattern_word(seed, (uint64_t)tensor, i);
        const uint32_t zero = slot == HALFSTEP_SLOT_GRADIENT && (i / 32 + (int64_t)seed) % 11 == 0;
        uint32_t bits = zero ? 0 : hstep_pattern(r);
        uint16_t code = half ? zero ? 0 : hstep_half_pattern(r) : (uint16_t)(bits >> 16);
        if (largest && i % 61 == 7) {
            bits = (bits & 0x80000000) | 0x7f7fffff;
            code = (uint16_t)((code & 0x8000) | (half ? 0x7bff : 0x7f7f));
        }
        if (format.code_bits == 32) memcpy(data + 4 * i, &bits, 4);
        else memcpy(data + 2 * i, &code, 2);
    }
}
