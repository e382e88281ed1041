#include "tables.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "rng.h"
#include "schedule.h"

enum {
    WEIGHT = HALFSTEP_ROLE_WEIGHT,
    GRADIENT = HALFSTEP_ROLE_GRADIENT,
    SIGNED = HALFSTEP_ROLE_SIGNED,
    NONNEG = HALFSTEP_ROLE_NONNEG
};

const struct hstep_format hstep_formats[HSTEP_FORMATS] = {
#define ELEMENT_FORMAT(id, name, fn, title, roles, bits, dtype, extra_bits, extra_dtype, sr) \
    {id, name, title, roles, bits, extra_bits, 0, sr, dtype, extra_dtype},
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, sr) \
    {id, name, title, roles, bits, 0, block, sr, dtype, "BF16"},
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
};

const struct hstep_rule hstep_rules[HSTEP_RULES] = {
#define STATE(name, role, beta, unless) {name, role, beta, unless}
#define HYPER(name, title, initial, minimum, maximum, exclusive) {name, title, initial, minimum, maximum, exclusive}
#define STATES(...) {__VA_ARGS__}
#define HYPERS(...) {__VA_ARGS__}
#define RULE(id, name, fn, title, lr, wd, decay, states, hypers) {id, name, #fn, title, lr, wd, decay, states, hypers},
#include "rules/rules.def"
#undef RULE
#undef STATES
#undef HYPERS
#undef STATE
#undef HYPER
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

struct hstep_hyper hstep_rule_hyper(int rule, int index)
{
    if (index >= HSTEP_COMMON_HYPERS) return hstep_rules[rule].hyper[index - HSTEP_COMMON_HYPERS];
    struct hstep_hyper hyper = hstep_common_hypers[index];
    if (index == HSTEP_LR) hyper.initial = hstep_rules[rule].lr;
    if (index == HSTEP_WEIGHT_DECAY) hyper.initial = hstep_rules[rule].weight_decay;
    return hyper;
}

const struct hstep_hyper hstep_common_hypers[HSTEP_COMMON_HYPERS] = {
    [HSTEP_LR] = {"lr", "learning rate", 1e-3, 0.0, 1e6, 0},
    [HSTEP_WEIGHT_DECAY] = {"weight_decay", "coefficient of the decay mode", 0.0, 0.0, 1e6, 0},
    [HSTEP_REFERENCE_LR] = {"reference_lr", "lr at which fully decoupled decay is weight_decay; 0: lr as first set", 0.0,
                            0.0, 1e6, 0},
    [HSTEP_MAXIMIZE] = {"maximize", "1: ascend", 0.0, 0.0, 1.0, 0},
    [HSTEP_CENTRALIZE] = {"centralize", "fraction of the row mean taken from the gradient", 0.0, 0.0, 1.0, 0},
    [HSTEP_WARMUP_STEPS] = {"warmup_steps", "steps of linear warm-up (preheat) of the schedule", 0.0, 0.0, 1e15, 0},
    [HSTEP_TOTAL_STEPS] = {"total_steps", "length of the schedule", 0.0, 0.0, 1e15, 0},
    [HSTEP_FINAL_FRACTION] = {"final_fraction", "of lr, at the end of the schedule", 0.0, 0.0, 1.0, 0},
    [HSTEP_DECAY_START] = {"decay_start", "fraction of total_steps at which wsd begins to fall", 0.8, 0.0, 1.0, 0},
    [HSTEP_POWER] = {"power", "exponent of inverse-power", -0.5, -16.0, 0.0, 0},
    [HSTEP_GRADIENT_SCALE] = {"gradient_scale", "gradients are multiplied by it first", 1.0, 0.0, 1e30, 0},
    [HSTEP_CLIP_NORM] = {"clip_norm", "largest global gradient norm; 0: no clipping", 0.0, 0.0, 1e15, 0},
};

static const char *const decays[HSTEP_DECAYS + 1] = {"l2", "decoupled", "fully-decoupled"};
static const char *const scans[] = {"scan", "per-tensor", "known-finite", NULL};
static const char *const clips[] = {"delayed", "per-tensor", NULL};

const char *halfstep_choice_value(const char *choice, int32_t index)
{
    if (!choice || index < 0) return NULL;
    if (!strcmp(choice, "schedule")) return hstep_schedule_name(index);
    if (!strcmp(choice, "generator")) return hstep_generator_name(hstep_generator_id(index));
    const char *const *values = !strcmp(choice, "decay") ? decays
                                : !strcmp(choice, "scan") ? scans
                                : !strcmp(choice, "clip") ? clips
                                                          : NULL;
    if (!values) return NULL;
    for (int i = 0; values[i]; i++)
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

static int find_rule(const char *text, size_t length)
{
    return find_part(&hstep_rules[0].name, sizeof hstep_rules[0], HSTEP_RULES, text, length);
}

static int find_format(const char *text, size_t length)
{
    return find_part(&hstep_formats[0].name, sizeof hstep_formats[0], HSTEP_FORMATS, text, length);
}

static int fail(int code, char *detail, size_t size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    if (size) vsnprintf(detail, size, format, arguments);
    va_end(arguments);
    return code;
}

int hstep_recipe_parse(const char *text, struct hstep_recipe *recipe, char *detail, size_t size)
{
    size_t length = strcspn(text, "/");
    recipe->rule = find_rule(text, length);
    if (recipe->rule < 0)
        return fail(HALFSTEP_ERROR_NAME, detail, size, "recipe '%s': no rule is called '%.*s'", text, (int)length, text);
    int states = hstep_rule_states(recipe->rule);
    const char *part = text + length;

    recipe->weight = HSTEP_FORMAT_f32;
    if (*part) {
        part++;
        length = strcspn(part, "/");
        recipe->weight = find_format(part, length);
        if (recipe->weight < 0)
            return fail(HALFSTEP_ERROR_NAME, detail, size, "recipe '%s': no format is called '%.*s'", text, (int)length,
                        part);
        if (!(hstep_formats[recipe->weight].roles & HALFSTEP_ROLE_WEIGHT))
            return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size, "recipe '%s': '%s' cannot store weights", text,
                        hstep_formats[recipe->weight].name);
        part += length;
    }

    for (int i = 0; i < HALFSTEP_MAX_STATES; i++)
        recipe->state[i] = i >= states                            ? HSTEP_FORMAT_NONE
                           : recipe->weight == HSTEP_FORMAT_f32   ? HSTEP_FORMAT_f32
                                                                  : HSTEP_FORMAT_bf16_sr;
    if (!*part) return HALFSTEP_OK;
    part++;
    int given = 0;
    for (;; part++) {
        length = strcspn(part, "+/");
        int format = find_format(part, length);
        if (format < 0)
            return fail(HALFSTEP_ERROR_NAME, detail, size, "recipe '%s': no format is called '%.*s'", text, (int)length,
                        part);
        if (given >= states)
            return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size, "recipe '%s': %s has %d state%s", text,
                        hstep_rules[recipe->rule].name, states, states == 1 ? "" : "s");
        recipe->state[given++] = format;
        part += length;
        if (*part != '+') break;
    }
    if (*part)
        return fail(HALFSTEP_ERROR_NAME, detail, size, "recipe '%s': nothing may follow the state formats", text);
    if (given == 1)
        for (int i = 1; i < states; i++) recipe->state[i] = recipe->state[0];
    else if (given != states)
        return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size,
                    "recipe '%s': give one state format, or one for each of the %d states of %s", text, states,
                    hstep_rules[recipe->rule].name);
    for (int i = 0; i < states; i++)
        if (!(hstep_formats[recipe->state[i]].roles & hstep_rules[recipe->rule].state[i].role))
            return fail(HALFSTEP_ERROR_UNSUPPORTED, detail, size, "recipe '%s': '%s' cannot store %s", text,
                        hstep_formats[recipe->state[i]].name, hstep_rules[recipe->rule].state[i].name);
    return HALFSTEP_OK;
}

int halfstep_recipe_full(const char *recipe, char *text, size_t size)
{
    struct hstep_recipe r;
    char full[160];
    if (!recipe || !text) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_recipe_parse(recipe, &r, NULL, 0);
    if (error) return error;
    int n = snprintf(full, sizeof full, "%s/%s", hstep_rules[r.rule].name, hstep_formats[r.weight].name);
    int states = hstep_rule_states(r.rule), same = 1;
    for (int i = 1; i < states; i++) same &= r.state[i] == r.state[0];
    for (int i = 0; i < (same && states ? 1 : states); i++)
        n += snprintf(full + n, sizeof full - (size_t)n, "%c%s", i ? '+' : '/', hstep_formats[r.state[i]].name);
    if ((size_t)n >= size) return HALFSTEP_ERROR_RANGE;
    memcpy(text, full, (size_t)n + 1);
    return HALFSTEP_OK;
}

int64_t hstep_row_stride(int64_t row_length)
{
    return row_length < 32 ? row_length : (row_length + 31) / 32 * 32;
}

int hstep_eligible_format(int format, int weight_format, int ndim, int64_t rows, int64_t row_length)
{
    if (format < 0 || !hstep_formats[format].block) return format;
    int one_row = ndim <= 1 && rows == 1 && row_length >= 4096;
    if ((ndim >= 2 || one_row) && row_length >= hstep_formats[format].block) return format;
    return weight_format == HSTEP_FORMAT_f32 ? HSTEP_FORMAT_f32 : HSTEP_FORMAT_bf16_sr;
}

static uint64_t format_bytes(int format, int64_t rows, int64_t row_length, int extra)
{
    const struct hstep_format *f = &hstep_formats[format];
    if (extra && f->block) return (uint64_t)rows * (uint64_t)((row_length + f->block - 1) / f->block) * 2;
    return (uint64_t)rows * (uint64_t)row_length * (uint64_t)(extra ? f->extra_bits : f->code_bits) / 8;
}

int halfstep_recipe_bytes(const char *recipe, int32_t ndim, int64_t rows, int64_t row_length, uint64_t *weight,
                          uint64_t *weight_extra, uint64_t *states)
{
    struct hstep_recipe r;
    if (!recipe) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_recipe_parse(recipe, &r, NULL, 0);
    if (error) return error;
    if (rows < 0 || row_length < 0 || (row_length && rows > (INT64_MAX >> 6) / row_length)) return HALFSTEP_ERROR_SHAPE;
    if (weight) *weight = format_bytes(r.weight, rows, row_length, 0);
    if (weight_extra) *weight_extra = format_bytes(r.weight, rows, row_length, 1);
    if (!states) return HALFSTEP_OK;
    *states = 0;
    for (int i = 0; i < hstep_rule_states(r.rule); i++) {
        int format = hstep_eligible_format(r.state[i], r.weight, ndim, rows, row_length);
        *states += format_bytes(format, rows, row_length, 0) + format_bytes(format, rows, row_length, 1);
    }
    return HALFSTEP_OK;
}

int32_t halfstep_rule_count(void) { return HSTEP_RULES; }
int32_t halfstep_format_count(void) { return HSTEP_FORMATS; }
int32_t halfstep_rule_find(const char *name) { return name ? find_rule(name, strlen(name)) : -1; }
int32_t halfstep_format_find(const char *name) { return name ? find_format(name, strlen(name)) : -1; }

int halfstep_get_rule_info(int32_t row, halfstep_rule_info *info)
{
    if (!info || info->struct_size != sizeof *info || row < 0 || row >= HSTEP_RULES) return HALFSTEP_ERROR_ARGUMENT;
    const struct hstep_rule *rule = &hstep_rules[row];
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
    info->id = rule->id;
    info->name = rule->name;
    info->title = rule->title;
    info->decay = rule->decay;
    info->states = hstep_rule_states(row);
    for (int i = 0; i < info->states; i++) {
        info->state_role[i] = rule->state[i].role;
        info->state_name[i] = rule->state[i].name;
    }
    info->hypers = HSTEP_COMMON_HYPERS + hstep_rule_hypers(row);
    return HALFSTEP_OK;
}

int halfstep_get_format_info(int32_t row, halfstep_format_info *info)
{
    if (!info || info->struct_size != sizeof *info || row < 0 || row >= HSTEP_FORMATS) return HALFSTEP_ERROR_ARGUMENT;
    const struct hstep_format *format = &hstep_formats[row];
    *info = (halfstep_format_info){
        .struct_size = sizeof *info, .id = format->id, .name = format->name, .title = format->title,
        .roles = format->roles, .code_bits = format->code_bits, .extra_bits = format->extra_bits,
        .block = format->block, .scale_bytes = format->block ? 2 : 0, .stochastic = format->stochastic,
        .code_dtype = format->code_dtype, .extra_dtype = format->extra_dtype};
    return HALFSTEP_OK;
}

int halfstep_get_hyper_info(int32_t rule, int32_t index, halfstep_hyper_info *info)
{
    if (!info || info->struct_size != sizeof *info || rule < 0 || rule >= HSTEP_RULES || index < 0 ||
        index >= HSTEP_COMMON_HYPERS + hstep_rule_hypers(rule))
        return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_hyper hyper = hstep_rule_hyper(rule, index);
    *info = (halfstep_hyper_info){
        .struct_size = sizeof *info, .name = hyper.name, .title = hyper.title, .initial = hyper.initial,
        .minimum = hyper.minimum, .maximum = hyper.maximum, .exclusive_maximum = hyper.exclusive,
        .per_optimizer = index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS};
    return HALFSTEP_OK;
}
