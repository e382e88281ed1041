/* Handles, groups and tensors: arguments are checked here, so that a step has nothing left to refuse but gradients.
 * Over 500 lines because the public functions with their checks are many and share nothing worth a second file. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "grid.h"
#include "optimizer.h"
#include "structs.h"
#include "threads.h"

int32_t halfstep_version(void)
{
    return HALFSTEP_VERSION_MAJOR * 10000 + HALFSTEP_VERSION_MINOR * 100 + HALFSTEP_VERSION_PATCH;
}

int32_t halfstep_abi(void) { return HALFSTEP_ABI; }

const char *halfstep_strerror(int code)
{
    switch (code) {
    case HALFSTEP_OK: return "ok";
    case HALFSTEP_ERROR_ARGUMENT: return "invalid argument";
    case HALFSTEP_ERROR_NAME: return "unknown name";
    case HALFSTEP_ERROR_RANGE: return "value out of range";
    case HALFSTEP_ERROR_SHAPE: return "invalid shape";
    case HALFSTEP_ERROR_DUPLICATE: return "duplicate tensor id";
    case HALFSTEP_ERROR_ORDER: return "call out of order";
    case HALFSTEP_ERROR_UNSUPPORTED: return "unsupported combination";
    case HALFSTEP_ERROR_MEMORY: return "out of memory";
    case HALFSTEP_ERROR_FORMAT: return "malformed file";
    case HALFSTEP_ERROR_MISMATCH: return "file belongs to another configuration";
    case HALFSTEP_ERROR_IO: return "input or output failed";
    case HALFSTEP_NONFINITE: return "step refused: gradient not finite";
    default: return "unknown error";
    }
}

/* Several threads may fail in step_tensor at once, so each has a sentence of its own: of which handle, and what. */
static _Thread_local struct {
    uint64_t serial;
    char text[HSTEP_DETAIL_BYTES];
} own_detail;

/* Between the handle, for threads that did not fail themselves, and a text. The detail is not part of what a const handle
 * promises to keep. */
static void copy_detail(const halfstep_optimizer *const_o, char *text, int out)
{
    halfstep_optimizer *o = (halfstep_optimizer *)const_o;
    while (atomic_flag_test_and_set(&o->detail_lock)) hstep_yield();
    memcpy(out ? text : o->detail, out ? o->detail : text, HSTEP_DETAIL_BYTES);
    atomic_flag_clear(&o->detail_lock);
}

int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...)
{
    char text[HSTEP_DETAIL_BYTES] = "";
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    own_detail.serial = o->serial;
    memcpy(own_detail.text, text, sizeof text);
    copy_detail(o, text, 0);
    return code;
}

const char *halfstep_error_detail(const halfstep_optimizer *o)
{
    static _Thread_local char shown[HSTEP_DETAIL_BYTES];
    if (!o) return "";
    if (own_detail.serial == o->serial) return own_detail.text;
    copy_detail(o, shown, 1);
    return shown;
}

/* ---- Instruction sets and threads ---- */

static atomic_int chosen_isa = -1;

static int isa_in_use(void)
{
    int chosen = atomic_load(&chosen_isa);
    return chosen >= 0 ? chosen : hstep_isa_best();
}

int32_t halfstep_isa_count(void) { return hstep_isa_count(); }
const char *halfstep_isa_name(int32_t index)
{
    return index < 0 || index >= hstep_isa_count() ? NULL : hstep_isa_name(index);
}
int32_t halfstep_isa_available(int32_t index)
{
    return index >= 0 && index < hstep_isa_count() && hstep_isa_available(index);
}
const char *halfstep_isa_warning(void) { return hstep_isa_warning(); }
const char *halfstep_isa(void) { return hstep_isa_name(isa_in_use()); }
int halfstep_set_isa(const char *name)
{
    int isa = -1;
    if (name) {
        isa = hstep_isa_find(name);
        if (isa < 0) return HALFSTEP_ERROR_NAME;
        if (!hstep_isa_available(isa)) return HALFSTEP_ERROR_UNSUPPORTED;
    }
    atomic_store(&chosen_isa, isa);
    return HALFSTEP_OK;
}

void halfstep_cpu_features(char *text, size_t size)
{
    if (text && size) hstep_cpu_features(text, size);
}

int32_t halfstep_default_threads(void) { return hstep_default_threads(); }

/* ---- Handles ---- */

int halfstep_create(const halfstep_options *given, halfstep_optimizer **optimizer)
{
    static atomic_uint_least64_t serial;
    halfstep_options options = {0};
    if (!optimizer) return HALFSTEP_ERROR_ARGUMENT;
    *optimizer = NULL;
    if (given && !hstep_take_struct(&options, sizeof options, given)) return HALFSTEP_ERROR_ARGUMENT;
    if (options.threads < 0 || options.threads > 1024) return HALFSTEP_ERROR_RANGE;
    halfstep_optimizer *o = calloc(1, sizeof *o);
    if (!o) return HALFSTEP_ERROR_MEMORY;
    o->kernels = hstep_isa_kernels(isa_in_use());
    o->threads = options.threads;
    o->seed = options.seed;
    o->run = options.run;
    o->host = options.host;
    o->serial = atomic_fetch_add(&serial, 1) + 1;
    o->gradient_scale = 1.0;
    atomic_init(&o->skipped, 0);
    atomic_init(&o->nonfinite_tensor, -1);
    atomic_flag_clear(&o->detail_lock);
    atomic_flag_clear(&o->workspace_lock);
    *optimizer = o;
    return HALFSTEP_OK;
}

int halfstep_set_threads(halfstep_optimizer *o, int32_t threads)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    if (threads < 0 || threads > 1024) return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%d threads: 0 .. 1024", (int)threads);
    o->threads = threads;
    return HALFSTEP_OK;
}

void halfstep_destroy(halfstep_optimizer *o)
{
    if (!o) return;
    for (int i = 0; i < o->n_tensors; i++) free(o->tensors[i].name);
    free(o->tensors);
    free(o->groups);
    free(o->chunks);
    free(o->updates);
    free(o->statistics);
    hstep_free(o->workspace);
    hstep_free(o->memory);
    free(o);
}

/* Room for one more element; on failure the array is as it was. */
static int grow(void **array, int count, int *capacity, size_t size)
{
    if (count < *capacity) return HALFSTEP_OK;
    int wanted = *capacity ? *capacity * 2 : 8;
    if (wanted <= count) return HALFSTEP_ERROR_MEMORY;
    void *larger = realloc(*array, (size_t)wanted * size);
    if (!larger) return HALFSTEP_ERROR_MEMORY;
    *array = larger;
    *capacity = wanted;
    return HALFSTEP_OK;
}

/* ---- Groups ---- */

int halfstep_add_group(halfstep_optimizer *o, const char *recipe, int32_t *group)
{
    if (!o || !recipe || !group) return HALFSTEP_ERROR_ARGUMENT;
    if (o->settled) return hstep_fail(o, HALFSTEP_ERROR_ORDER, "groups must be added before the states exist");
    struct hstep_group g = {0};
    char detail[HSTEP_DETAIL_BYTES];
    int error = hstep_recipe_parse(recipe, &g.recipe, detail, sizeof detail);
    if (error) return hstep_fail(o, error, "%s", detail);
    for (int i = 0; i < HSTEP_GROUP_HYPERS; i++) g.hyper[i] = hstep_rule_hyper(g.recipe.rule, i).initial;
    for (int i = 0; i < hstep_rule_hypers(g.recipe.rule); i++) g.own[i] = hstep_rules[g.recipe.rule].hyper[i].initial;
    g.first_lr = g.hyper[HSTEP_LR];
    g.decay = hstep_choice_find("decay", hstep_rules[g.recipe.rule].decay);
    if (grow((void **)&o->groups, o->n_groups, &o->capacity_groups, sizeof g))
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "no memory for another group");
    o->groups[o->n_groups] = g;
    *group = o->n_groups++;
    return HALFSTEP_OK;
}

static int check_group(const halfstep_optimizer *o, int32_t group)
{
    if (group >= 0 && group < o->n_groups) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "there is no group %d (%d exist)", (int)group, o->n_groups);
}

int32_t halfstep_group_count(const halfstep_optimizer *o) { return o ? o->n_groups : 0; }

int halfstep_get_group_recipe(const halfstep_optimizer *o, int32_t group, char *text, size_t size)
{
    if (!o || !text) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_group(o, group);
    if (!error && (error = hstep_recipe_text(&o->groups[group].recipe, text, size)))
        return hstep_fail(o, error, "%llu bytes are too few for a recipe",
                          (unsigned long long)size);
    return error;
}

/* Row among common and own hyper-parameters, or -1. */
static int find_hyper(int rule, const char *name)
{
    for (int i = 0; i < HSTEP_COMMON_HYPERS + (rule < 0 ? 0 : hstep_rule_hypers(rule)); i++)
        if (!strcmp(i < HSTEP_COMMON_HYPERS ? hstep_common_hypers[i].name : hstep_rule_hyper(rule, i).name, name)) return i;
    return -1;
}

double hstep_state_beta(const struct hstep_group *group, int state)
{
    const char *beta = hstep_rules[group->recipe.rule].state[state].beta;
    return beta ? group->own[find_hyper(group->recipe.rule, beta) - HSTEP_COMMON_HYPERS] : 1.0;
}

static int check_bounds(const halfstep_optimizer *o, const struct hstep_hyper *hyper, double value)
{
    int above = hyper->exclusive ? !(value < hyper->maximum) : !(value <= hyper->maximum);
    if (value >= hyper->minimum && !above) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%s = %g is not in [%g, %g%c", hyper->name, value, hyper->minimum,
                      hyper->maximum, hyper->exclusive ? ')' : ']');
}

int hstep_state_needed(const struct hstep_group *group, int state)
{
    const char *unless = hstep_rules[group->recipe.rule].state[state].unless;
    return !unless || group->own[find_hyper(group->recipe.rule, unless) - HSTEP_COMMON_HYPERS] != 0.0;
}

int64_t hstep_blocks_per_row(const struct hstep_tensor *t, int format)
{
    int block = format < 0 || hstep_formats[format].geometry != HALFSTEP_GEOMETRY_ROWS ? 0 : hstep_formats[format].block;
    return block ? (t->n_columns + block - 1) / block : 0;
}

int hstep_unit_of(int format)
{
    const struct hstep_format *f = &hstep_formats[format];
    return f->geometry != HALFSTEP_GEOMETRY_TENSOR && f->block > HSTEP_GROUP ? f->block : HSTEP_GROUP;
}

int64_t hstep_code_offset(const struct hstep_tensor *t, int format, int64_t element)
{
    const struct hstep_format *f = &hstep_formats[format];
    if (f->code_bits >= 8 || f->geometry == HALFSTEP_GEOMETRY_FLAT) return element * f->code_bits / 8;
    int64_t row = element / t->n_columns, column = element % t->n_columns;
    return row * ((t->n_columns * f->code_bits + 7) / 8) + column * f->code_bits / 8;
}

int64_t hstep_extra_offset(const struct hstep_tensor *t, int format, int64_t element)
{
    const struct hstep_format *f = &hstep_formats[format];
    if (!f->block) return element * f->extra_bits / 8;
    if (f->geometry == HALFSTEP_GEOMETRY_TENSOR) return 0;
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT) return element / f->block * f->scale_bits / 8;
    int64_t row = element / t->n_columns, column = element % t->n_columns;
    return (row * hstep_blocks_per_row(t, format) + column / f->block) * f->scale_bits / 8;
}

int hstep_plain_format(int format)
{
    if (!hstep_formats[format].extra_bits) return format;
    /* The first row that stores the same codes and nothing beside them. */
    for (int i = 0; i < HSTEP_FORMATS; i++)
        if (!hstep_formats[i].extra_bits && !strcmp(hstep_formats[i].code_dtype, hstep_formats[format].code_dtype)) return i;
    return format;
}

static void size_slot(const struct hstep_tensor *t, struct hstep_slot *slot)
{
    if (slot->format < 0) return;
    slot->code_bytes = hstep_code_bytes(slot->format, t->n_rows, t->n_columns);
    slot->extra_bytes = hstep_extra_bytes(slot->format, t->n_rows, t->n_columns);
}

/* Whether the part held here can be cut into the blocks of a format. */
static int check_blocks(const halfstep_optimizer *o, const char *name, const struct hstep_tensor *t, int format)
{
    const struct hstep_format *f = &hstep_formats[format];
    int64_t end = t->first_column + t->n_columns, block = f->block;
    if (f->geometry == HALFSTEP_GEOMETRY_ROWS &&
        (t->first_column % block || (end % block && end != t->row_length)))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': columns %lld + %lld do not fall on blocks of %d ('%s' states)", name,
                          (long long)t->first_column, (long long)t->n_columns, f->block, f->name);
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT &&
        (t->n_columns != t->row_length || t->first_row * t->row_length % block || t->n_rows * t->row_length % block))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': rows %lld + %lld of %lld do not fall on blocks of %d flattened elements ('%s' states)",
                          name, (long long)t->first_row, (long long)t->n_rows, (long long)t->row_length, f->block, f->name);
    return HALFSTEP_OK;
}

/* The formats of a tensor's states under the group's hyper-parameters. */
static int choose_states(const halfstep_optimizer *o, const struct hstep_group *g, const char *name, struct hstep_tensor *t)
{
    int flat = 0, longest = 0, error;
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_STATE + i];
        *slot = (struct hstep_slot){.format = HSTEP_FORMAT_NONE, .grid = 1.0f};
        if (i >= hstep_rule_states(g->recipe.rule) || !hstep_state_needed(g, i) ||
            !hstep_state_of_shape(g->recipe.rule, i, t->ndim, t->rows, t->row_length))
            continue;
        slot->format = hstep_eligible_format(g->recipe.state[i], g->recipe.weight, t->ndim, t->rows, t->row_length);
        slot->fell_back = slot->format != g->recipe.state[i];
        slot->nonneg = hstep_rules[g->recipe.rule].state[i].role == HALFSTEP_ROLE_NONNEG;
        slot->root = slot->nonneg ? hstep_formats[slot->format].root : 0;
        size_slot(t, slot);
        const struct hstep_format *f = &hstep_formats[slot->format];
        if (!f->block || f->geometry == HALFSTEP_GEOMETRY_TENSOR) continue;
        if ((error = check_blocks(o, name, t, slot->format))) return error;
        flat |= f->geometry == HALFSTEP_GEOMETRY_FLAT ? 1 : 2;
        if (f->block > longest) longest = f->block;
    }
    if (flat == 3 && t->row_length % longest)
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s': states in blocks of rows and of the flattened tensor need rows of whole blocks", name);
    return HALFSTEP_OK;
}

/* dry: only tells whether it could. */
static int set_group_hyper(halfstep_optimizer *o, struct hstep_group *g, int index, double value, int dry)
{
    if (index < HSTEP_COMMON_HYPERS) {
        if (dry) return HALFSTEP_OK;
        g->hyper[index] = value;
        if (index == HSTEP_LR && !g->lr_was_set) {
            g->first_lr = value;
            g->lr_was_set = 1;
        }
        return HALFSTEP_OK;
    }
    struct hstep_group changed = *g;
    changed.own[index - HSTEP_COMMON_HYPERS] = value;
    int other_states = 0;
    for (int i = 0; i < hstep_rule_states(g->recipe.rule); i++)
        other_states |= hstep_state_needed(&changed, i) != hstep_state_needed(g, i);
    if (other_states && o->settled)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "%s cannot go from or to 0 once the states exist",
                          hstep_rule_hyper(g->recipe.rule, index).name);
    /* All tensors of the group can follow, or nothing changes. */
    for (int pass = 0; other_states && pass < (dry ? 1 : 2); pass++)
        for (int i = 0; i < o->n_tensors; i++) {
            struct hstep_tensor *t = &o->tensors[i], trial = *t;
            if (t->group != (int)(g - o->groups)) continue;
            int error = choose_states(o, &changed, t->name, pass ? t : &trial);
            if (error) return error;
        }
    if (!dry) *g = changed;
    return HALFSTEP_OK;
}

static int set_hyper(halfstep_optimizer *o, int32_t group, const char *name, double value)
{
    int error;
    if (group != HALFSTEP_ALL_GROUPS) {
        if ((error = check_group(o, group))) return error;
        struct hstep_group *g = &o->groups[group];
        int index = find_hyper(g->recipe.rule, name);
        if (index < 0)
            return hstep_fail(o, HALFSTEP_ERROR_NAME, "%s has no hyper-parameter '%s'", hstep_rules[g->recipe.rule].name,
                              name);
        if (index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "%s belongs to the optimizer, not to a group", name);
        struct hstep_hyper hyper = hstep_rule_hyper(g->recipe.rule, index);
        if ((error = check_bounds(o, &hyper, value))) return error;
        return set_group_hyper(o, g, index, value, 0);
    }
    int index = find_hyper(-1, name);
    if (index == HSTEP_GRADIENT_SCALE || index == HSTEP_CLIP_NORM) {
        if ((error = check_bounds(o, &hstep_common_hypers[index], value))) return error;
        *(index == HSTEP_GRADIENT_SCALE ? &o->gradient_scale : &o->clip_norm) = value;
        return HALFSTEP_OK;
    }
    /* All groups or none: bounds and order are tried on every group first. */
    int found = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < o->n_groups; i++) {
            struct hstep_group *g = &o->groups[i];
            index = find_hyper(g->recipe.rule, name);
            if (index < 0) continue;
            found = 1;
            struct hstep_hyper hyper = hstep_rule_hyper(g->recipe.rule, index);
            if ((error = check_bounds(o, &hyper, value)) || (error = set_group_hyper(o, g, index, value, !pass))) return error;
        }
    if (!found) return hstep_fail(o, HALFSTEP_ERROR_NAME, "no group has a hyper-parameter '%s'", name);
    return HALFSTEP_OK;
}

int halfstep_set_hyper(halfstep_optimizer *o, int32_t group, const char *name, double value)
{
    if (!o || !name) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = set_hyper(o, group, name, value);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_get_hyper(const halfstep_optimizer *o, int32_t group, const char *name, double *value)
{
    if (!o || !name || !value) return HALFSTEP_ERROR_ARGUMENT;
    if (group == HALFSTEP_ALL_GROUPS) {
        int index = find_hyper(-1, name);
        if (index == HSTEP_GRADIENT_SCALE)
            *value = o->gradient_scale;
        else if (index == HSTEP_CLIP_NORM)
            *value = o->clip_norm;
        else
            return hstep_fail(o, HALFSTEP_ERROR_NAME, "the optimizer has no hyper-parameter '%s'", name);
        return HALFSTEP_OK;
    }
    int error = check_group(o, group);
    if (error) return error;
    const struct hstep_group *g = &o->groups[group];
    int index = find_hyper(g->recipe.rule, name);
    if (index < 0 || (index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS))
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "%s has no hyper-parameter '%s'", hstep_rules[g->recipe.rule].name, name);
    if (index >= HSTEP_COMMON_HYPERS)
        *value = g->own[index - HSTEP_COMMON_HYPERS];
    else if (index == HSTEP_REFERENCE_LR && g->hyper[index] == 0.0)
        *value = g->first_lr;
    else
        *value = g->hyper[index];
    return HALFSTEP_OK;
}

/* Where a choice is kept; NULL if it does not exist at that level. */
static int *choice_place(halfstep_optimizer *o, int32_t group, const char *choice)
{
    if (group == HALFSTEP_ALL_GROUPS)
        return !strcmp(choice, "scan") ? &o->scan
               : !strcmp(choice, "clip") ? &o->clip
               : !strcmp(choice, "missing") ? &o->missing
               : !strcmp(choice, "generator") ? &o->generator
                                              : NULL;
    return !strcmp(choice, "decay") ? &o->groups[group].decay
           : !strcmp(choice, "schedule") ? &o->groups[group].schedule
                                         : NULL;
}

int halfstep_set_choice(halfstep_optimizer *o, int32_t group, const char *choice, const char *value)
{
    if (!o || !choice || !value) return HALFSTEP_ERROR_ARGUMENT;
    int error;
    if (group != HALFSTEP_ALL_GROUPS && (error = check_group(o, group))) return error;
    if (!halfstep_choice_value(choice, 0)) return hstep_fail(o, HALFSTEP_ERROR_NAME, "there is no choice '%s'", choice);
    int *place = choice_place(o, group, choice), found = hstep_choice_find(choice, value);
    if (found < 0) return hstep_fail(o, HALFSTEP_ERROR_NAME, "'%s' is no value of '%s'", value, choice);
    if (place) {
        *place = found;
        return HALFSTEP_OK;
    }
    if (group != HALFSTEP_ALL_GROUPS)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "'%s' belongs to the optimizer, not to a group", choice);
    for (int i = 0; i < o->n_groups; i++) *choice_place(o, i, choice) = found;
    return HALFSTEP_OK;
}

const char *halfstep_get_choice(const halfstep_optimizer *o, int32_t group, const char *choice)
{
    if (!o || !choice || (group != HALFSTEP_ALL_GROUPS && (group < 0 || group >= o->n_groups))) return NULL;
    const int *place = choice_place((halfstep_optimizer *)o, group, choice);
    return place ? halfstep_choice_value(choice, *place) : NULL;
}

int halfstep_current_lr(const halfstep_optimizer *o, int32_t group, double *lr)
{
    if (!o || !lr) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_group(o, group);
    if (error) return error;
    struct hstep_fp fp = hstep_fp_enter();
    *lr = hstep_group_lr(&o->groups[group]);
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}

/* ---- Tensors ---- */

/* Keeps index space, bytes of any format and their sums within int64. */
#define MAX_ELEMENTS ((int64_t)1 << 52)

static int check_shape(const halfstep_optimizer *o, const halfstep_tensor *d, struct hstep_tensor *t)
{
    if (d->ndim < 0 || d->rows < 0 || d->row_length < 0 || d->row_length > MAX_ELEMENTS ||
        d->rows > MAX_ELEMENTS / (d->row_length + 31))
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE, "tensor '%s': %lld rows of %lld elements are no shape", d->name,
                          (long long)d->rows, (long long)d->row_length);
    if (d->ndim <= 1 && d->row_length != 1 && !(d->rows == 1 && d->row_length >= 4096) && d->rows && d->row_length)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE,
                          "tensor '%s': %d dimension%s need n rows of length 1, or one row of at least 4096", d->name,
                          (int)d->ndim, d->ndim == 1 ? "" : "s");
    t->first_row = d->first_row;
    t->n_rows = d->n_rows;
    t->first_column = d->first_column;
    t->n_columns = d->n_columns;
    if (!d->first_row && !d->n_rows && !d->first_column && !d->n_columns) {
        t->n_rows = d->rows;
        t->n_columns = d->row_length;
    }
    if (t->first_row < 0 || t->n_rows < 0 || t->first_row > d->rows || t->n_rows > d->rows - t->first_row)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE, "tensor '%s': rows %lld + %lld are not within its %lld rows", d->name,
                          (long long)t->first_row, (long long)t->n_rows, (long long)d->rows);
    if (t->first_column < 0 || t->n_columns < 0 || t->first_column > d->row_length ||
        t->n_columns > d->row_length - t->first_column)
        return hstep_fail(o, HALFSTEP_ERROR_SHAPE, "tensor '%s': columns %lld + %lld are not within its rows of %lld",
                          d->name, (long long)t->first_column, (long long)t->n_columns, (long long)d->row_length);
    return HALFSTEP_OK;
}

static int choose_formats(const halfstep_optimizer *o, const halfstep_tensor *d, struct hstep_tensor *t)
{
    int gradient = halfstep_format_find(d->gradient);
    if (gradient < 0)
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "tensor '%s': no gradient format is called '%s'", d->name,
                          d->gradient ? d->gradient : "(null)");
    int raw = hstep_rules[o->groups[t->group].recipe.rule].kind == HSTEP_RAW_GRADIENT;
    if (!(hstep_formats[gradient].roles & (HALFSTEP_ROLE_GRADIENT | (raw ? HALFSTEP_ROLE_WEIGHT : 0))))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': '%s' cannot store gradients", d->name, d->gradient);
    t->slot[HALFSTEP_SLOT_WEIGHT].format = o->groups[t->group].recipe.weight;
    t->slot[HALFSTEP_SLOT_GRADIENT].format = gradient;
    size_slot(t, &t->slot[HALFSTEP_SLOT_WEIGHT]);
    size_slot(t, &t->slot[HALFSTEP_SLOT_GRADIENT]);
    return choose_states(o, &o->groups[t->group], d->name, t);
}

static int add_tensor(halfstep_optimizer *o, const halfstep_tensor *d, int32_t *index)
{
    if (!d->name || !*d->name) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "a tensor needs a name");
    if (o->settled)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': tensors must be added before the states exist", d->name);
    struct hstep_tensor t = {.group = d->group, .ndim = d->ndim, .rows = d->rows, .row_length = d->row_length};
    int error = check_group(o, d->group);
    if (error || (error = check_shape(o, d, &t)) || (error = choose_formats(o, d, &t))) return error;
    t.id = d->id ? d->id : hstep_hash_name(d->name);
    for (int i = 0; i < o->n_tensors; i++)
        if (o->tensors[i].id == t.id)
            return hstep_fail(o, HALFSTEP_ERROR_DUPLICATE, "tensors '%s' and '%s' have one id, %016llx: they would share "
                              "their random bits", o->tensors[i].name, d->name, (unsigned long long)t.id);

    if (hstep_is_matrix(o->groups[t.group].recipe.rule, t.ndim, t.rows, t.row_length) &&
        t.n_rows && t.n_columns && (t.n_rows != t.rows || t.n_columns != t.row_length))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s': %s steps matrices whole, not %lld x %lld of %lld x %lld",
                          d->name, hstep_rules[o->groups[t.group].recipe.rule].name, (long long)t.n_rows,
                          (long long)t.n_columns, (long long)t.rows, (long long)t.row_length);

    size_t length = strlen(d->name) + 1;
    if (grow((void **)&o->tensors, o->n_tensors, &o->capacity_tensors, sizeof t) || !(t.name = malloc(length)))
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "no memory for tensor '%s'", d->name);
    memcpy(t.name, d->name, length);
    o->tensors[o->n_tensors] = t;
    *index = o->n_tensors++;
    return HALFSTEP_OK;
}

int halfstep_add_tensor(halfstep_optimizer *o, const halfstep_tensor *given, int32_t *index)
{
    halfstep_tensor d = {0};
    if (!o || !given || !index || !hstep_take_struct(&d, sizeof d, given) || d.reserved) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = add_tensor(o, &d, index);
    hstep_fp_leave(fp);
    return result;
}

uint64_t halfstep_name_id(const char *name) { return name ? hstep_hash_name(name) : 0; }

int32_t halfstep_tensor_count(const halfstep_optimizer *o) { return o ? o->n_tensors : 0; }

int halfstep_get_tensor(const halfstep_optimizer *o, int32_t index, halfstep_tensor *d)
{
    if (!o || !d) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, index);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[index];
    halfstep_tensor ours = {.group = t->group, .name = t->name, .id = t->id, .ndim = t->ndim,
                            .rows = t->rows, .row_length = t->row_length, .first_row = t->first_row, .n_rows = t->n_rows,
                            .first_column = t->first_column, .n_columns = t->n_columns,
                            .gradient = hstep_formats[t->slot[HALFSTEP_SLOT_GRADIENT].format].name};
    return hstep_give_struct(d, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

int32_t halfstep_tensor_find(const halfstep_optimizer *o, const char *name)
{
    for (int i = 0; o && name && i < o->n_tensors; i++)
        if (!strcmp(o->tensors[i].name, name)) return i;
    return -1;
}

/* ---- What happened ---- */

/* Updates count on from what is set: so that no counter comes round to 0, where a bias correction would divide by it. */
static int check_count(const halfstep_optimizer *o, const char *of, const char *name, uint64_t count)
{
    if (count <= HALFSTEP_MAX_COUNT) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%s%s = %llu is no count", of, name, (unsigned long long)count);
}

uint64_t halfstep_skipped_steps(const halfstep_optimizer *o) { return o ? atomic_load(&o->skipped) : 0; }

int halfstep_set_skipped_steps(halfstep_optimizer *o, uint64_t skipped)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_count(o, "", "skipped steps", skipped);
    if (!error) atomic_store(&o->skipped, skipped);
    return error;
}

const char *halfstep_nonfinite_tensor(const halfstep_optimizer *o)
{
    int tensor = o ? atomic_load(&o->nonfinite_tensor) : -1;
    return tensor < 0 ? "" : o->tensors[tensor].name;
}

double halfstep_gradient_norm(const halfstep_optimizer *o) { return o ? o->gradient_norm : 0.0; }

int halfstep_set_gradient_norm(halfstep_optimizer *o, double norm)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    if (!(norm >= 0.0 && norm < INFINITY)) return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%g is no gradient norm", norm);
    o->gradient_norm = o->round_norm = norm;
    return HALFSTEP_OK;
}

int hstep_check_tensor(const halfstep_optimizer *o, int32_t tensor)
{
    if (tensor >= 0 && tensor < o->n_tensors) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "there is no tensor %d (%d exist)", (int)tensor, o->n_tensors);
}

int halfstep_get_counters(const halfstep_optimizer *o, int32_t tensor, halfstep_counters *c)
{
    if (!o || !c) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    halfstep_counters ours = {.id = t->id, .state_steps = t->state_steps, .full_steps = t->full_steps, .writes = t->writes};
    return hstep_give_struct(c, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

/* The host's copy, rounded to nearest whatever mode the caller is in. */
static void show_step(const struct hstep_tensor *t)
{
    struct hstep_fp fp = hstep_fp_enter();
    if (t->step) *t->step = (float)t->state_steps;
    hstep_fp_leave(fp);
}

int halfstep_set_counters(halfstep_optimizer *o, int32_t tensor, const halfstep_counters *given)
{
    halfstep_counters counters = {0}, *c = &counters;
    if (!o || !given || !hstep_take_struct(c, sizeof *c, given)) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    char of[HSTEP_DETAIL_BYTES];
    snprintf(of, sizeof of, "tensor '%s': ", o->tensors[tensor].name);
    if ((error = check_count(o, of, "state_steps", c->state_steps)) ||
        (error = check_count(o, of, "full_steps", c->full_steps)) || (error = check_count(o, of, "writes", c->writes)))
        return error;
    for (int i = 0; c->id && i < o->n_tensors; i++)
        if (i != tensor && o->tensors[i].id == c->id)
            return hstep_fail(o, HALFSTEP_ERROR_DUPLICATE, "tensor '%s' already has id %016llx", o->tensors[i].name,
                              (unsigned long long)c->id);
    struct hstep_tensor *t = &o->tensors[tensor];
    if (c->id) t->id = c->id;
    t->state_steps = c->state_steps;
    show_step(t);
    t->full_steps = c->full_steps;
    t->writes = c->writes;
    return HALFSTEP_OK;
}

int halfstep_bind_step(halfstep_optimizer *o, int32_t tensor, float *step)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    t->step = step;
    show_step(t);
    return HALFSTEP_OK;
}

int halfstep_bind_grid(halfstep_optimizer *o, int32_t tensor, int32_t slot, double *grid)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    if (slot < HALFSTEP_SLOT_STATE || slot >= HSTEP_SLOTS || !t->slot[slot].root)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': slot %d has no grid", t->name, (int)slot);
    t->slot[slot].shown = grid;
    hstep_set_grid(&t->slot[slot], t->slot[slot].grid);
    return HALFSTEP_OK;
}

/* Its row among those of the rule, or -1. */
static int find_scalar(const struct hstep_rule *rule, int count, const char *name)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(rule->scalar[i].name, name)) return i;
    return -1;
}

/* The slot whose grid goes by this name, "STATE.grid", or NULL. */
static struct hstep_slot *find_grid(struct hstep_tensor *t, const struct hstep_rule *rule, const char *name)
{
    for (int i = 0; i < HALFSTEP_MAX_STATES && rule->state[i].name; i++) {
        size_t length = strlen(rule->state[i].name);
        struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_STATE + i];
        if (slot->root && !strncmp(name, rule->state[i].name, length) && !strcmp(name + length, ".grid")) return slot;
    }
    return NULL;
}

static int fail_scalar(const halfstep_optimizer *o, int32_t tensor, const char *name)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    return hstep_fail(o, HALFSTEP_ERROR_NAME, "tensor '%s': %s keeps no '%s'", t->name,
                      hstep_rules[o->groups[t->group].recipe.rule].name, name);
}

int halfstep_get_scalar(const halfstep_optimizer *o, int32_t tensor, const char *name, double *value)
{
    if (!o || !name || !value) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    int number = o->groups[t->group].recipe.rule, row = find_scalar(&hstep_rules[number], hstep_rule_scalars(number), name);
    const struct hstep_slot *slot = find_grid(t, &hstep_rules[number], name);
    if (row < 0 && !slot) return fail_scalar(o, tensor, name);
    *value = slot ? (double)slot->grid : t->scalar[row];
    return HALFSTEP_OK;
}

int halfstep_set_scalar(halfstep_optimizer *o, int32_t tensor, const char *name, double value)
{
    if (!o || !name) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    int number = o->groups[t->group].recipe.rule, row = find_scalar(&hstep_rules[number], hstep_rule_scalars(number), name);
    struct hstep_slot *slot = find_grid(t, &hstep_rules[number], name);
    if (row < 0 && !slot) return fail_scalar(o, tensor, name);
    if (slot) {
        if (!hstep_is_grid(value))
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': %s = %.9g is no fp32 number in [%g, 1]", t->name, name, value,
                              (double)HSTEP_GRID_LEAST);
        hstep_set_grid(slot, (float)value);
        return HALFSTEP_OK;
    }
    const struct hstep_scalar *scalar = &hstep_rules[number].scalar[row];
    if (!(value >= scalar->minimum && value <= scalar->maximum))
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': %s = %g is not in [%g, %g]", t->name, name, value,
                          scalar->minimum, scalar->maximum);
    t->scalar[row] = value;
    return HALFSTEP_OK;
}

int halfstep_get_group_steps(const halfstep_optimizer *o, int32_t group, uint64_t *steps)
{
    if (!o || !steps) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_group(o, group);
    if (!error) *steps = o->groups[group].steps;
    return error;
}

int halfstep_set_group_steps(halfstep_optimizer *o, int32_t group, uint64_t steps)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_group(o, group);
    if (!error && !(error = check_count(o, "", "group steps", steps))) o->groups[group].steps = steps;
    return error;
}

uint64_t halfstep_get_seed(const halfstep_optimizer *o) { return o ? o->seed : 0; }

int halfstep_set_seed(halfstep_optimizer *o, uint64_t seed)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    o->seed = seed;
    return HALFSTEP_OK;
}

int halfstep_memory(const halfstep_optimizer *o, uint64_t *weights, uint64_t *gradients, uint64_t *weight_extras,
                    uint64_t *states, int32_t *fell_back)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    uint64_t sum[4] = {0};
    int32_t fallen = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        const struct hstep_slot *slot = o->tensors[i].slot;
        int fell = 0;
        sum[0] += slot[HALFSTEP_SLOT_WEIGHT].code_bytes;
        sum[1] += slot[HALFSTEP_SLOT_GRADIENT].code_bytes;
        sum[2] += slot[HALFSTEP_SLOT_WEIGHT].extra_bytes;
        for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) {
            sum[3] += slot[s].code_bytes + slot[s].extra_bytes;
            fell |= slot[s].fell_back;
        }
        fallen += fell;
    }
    sum[3] += o->workspace_bytes;
    if (weights) *weights = sum[0];
    if (gradients) *gradients = sum[1];
    if (weight_extras) *weight_extras = sum[2];
    if (states) *states = sum[3];
    if (fell_back) *fell_back = fallen;
    return HALFSTEP_OK;
}

/* ---- Tools of the trade ---- */

int halfstep_schedule_factor(const char *name, uint64_t step, double warmup_steps, double total_steps,
                             double final_fraction, double decay_start, double power, double *factor)
{
    if (!name || !factor) return HALFSTEP_ERROR_ARGUMENT;
    int kind = hstep_choice_find("schedule", name);
    if (kind < 0) return HALFSTEP_ERROR_NAME;
    const double values[] = {warmup_steps, total_steps, final_fraction, decay_start, power};
    const int rows[] = {HSTEP_WARMUP_STEPS, HSTEP_TOTAL_STEPS, HSTEP_FINAL_FRACTION, HSTEP_DECAY_START, HSTEP_POWER};
    for (int i = 0; i < 5; i++)
        if (!(values[i] >= hstep_common_hypers[rows[i]].minimum && values[i] <= hstep_common_hypers[rows[i]].maximum))
            return HALFSTEP_ERROR_RANGE;
    struct hstep_schedule schedule = {.kind = kind, .warmup = (uint64_t)warmup_steps, .total = (uint64_t)total_steps,
                                      .final = final_fraction, .decay_start = decay_start, .power = power};
    struct hstep_fp fp = hstep_fp_enter();
    *factor = hstep_schedule_factor(&schedule, step);
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}

int halfstep_random_words(const char *generator, uint64_t seed, uint64_t id, uint64_t write, int32_t slot, uint64_t first,
                          uint32_t *out, size_t n)
{
    if (!generator || (n && !out)) return HALFSTEP_ERROR_ARGUMENT;
    int row = hstep_choice_find("generator", generator);
    if (row < 0) return HALFSTEP_ERROR_NAME;
    struct hstep_key key = hstep_key_write(hstep_generator_id(row), seed, id, write, (uint32_t)slot);
    hstep_random_words(hstep_generator_id(row), &key, first, n, out);
    return HALFSTEP_OK;
}
