/* Handles and groups, and what callers may ask of devices. Arguments are checked here, so that a step has nothing left
 * to refuse but gradients. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/process/environment.h"
#include "base/lock.h"
#include "base/schedule.h"
#include "base/structs.h"
#include "decide/prepare.h"
#include "handle/optimizer.h"
#include "kernels/dispatch.h"

int32_t halfstep_version(void)
{
    return HALFSTEP_VERSION_MAJOR * 10000 + HALFSTEP_VERSION_MINOR * 100 + HALFSTEP_VERSION_PATCH;
}

int32_t halfstep_abi(void) { return HALFSTEP_ABI; }

/* ---- Handles ---- */

int halfstep_create(const halfstep_options *given, halfstep_optimizer **optimizer)
{
    return hstep_create(given, 0, optimizer);
}

/* Reads our environment variables. Fails with NAME if one is malformed. */
static int check_environment(const halfstep_optimizer *o)
{
    char text[HSTEP_DETAIL_BYTES];
    const char *wrong = hstep_read_environment(text, sizeof text) ? text : hstep_isa_warning();
    return wrong ? hstep_fail(o, HALFSTEP_ERROR_NAME, "%s", wrong) : HALFSTEP_OK;
}

int hstep_create(const halfstep_options *given, int checking, halfstep_optimizer **optimizer)
{
    static atomic_uint_least64_t serial;
    halfstep_options options = {0};
    if (!optimizer) return HALFSTEP_ERROR_ARGUMENT;
    *optimizer = NULL;
    if (given && !hstep_take_struct(&options, sizeof options, given)) return HALFSTEP_ERROR_ARGUMENT;
    if (options.threads < 0 || options.threads > 1024) return HALFSTEP_ERROR_RANGE;
    const char *rest = "";
    const struct hstep_device *device = hstep_find_device(options.device, &rest);
    if (!device) return HALFSTEP_ERROR_NAME;
    if (options.stream && !device->open) return HALFSTEP_ERROR_ARGUMENT;
    halfstep_optimizer *o = calloc(1, sizeof *o);
    if (!o) return HALFSTEP_ERROR_MEMORY;
    o->device = device;
    snprintf(o->ordinal, sizeof o->ordinal, "%s", rest);
    o->checking = checking;
    o->context.kernels = hstep_isa_in_use();
    o->context.threads = options.threads ? options.threads : halfstep_default_threads();
    o->seed = options.seed;
    o->context.run = options.run;
    o->context.host = options.host;
    o->gradient_scale = 1.0;
    atomic_init(&o->skipped, 0);
    atomic_init(&o->nonfinite_tensor, -1);
    atomic_init(&o->gradient_too_large, 0);
    atomic_flag_clear(&o->detail_lock);
    atomic_flag_clear(&o->workspace_lock);
    atomic_flag_clear(&o->sync_lock);
    atomic_init(&o->device_ahead, 0);
    atomic_init(&o->results, NULL);
    /* The caller of a failed call gets no handle. As long as the serial is 0, halfstep_error_detail(NULL) finds the
     * text. */
    int error = check_environment(o);
    if (!error && device->open) error = hstep_why(o, device->open(&o->context, rest, options.stream));
    if (!error) error = hstep_why(o, hstep_first_plan(o));
    if (!error) error = hstep_why(o, hstep_open_sync(o));
    if (!error && device->trusted && !checking) error = hstep_check_device(o, -1);
    if (error) {
        halfstep_destroy(o);
        return error;
    }
    o->serial = atomic_fetch_add(&serial, 1) + 1;
    *optimizer = o;
    return HALFSTEP_OK;
}

int halfstep_set_threads(halfstep_optimizer *o, int32_t threads)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    if (threads < 0 || threads > 1024)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "threads = %d is not in [0, 1024]", (int)threads);
    o->context.threads = threads ? threads : halfstep_default_threads();
    return HALFSTEP_OK;
}

void halfstep_destroy(halfstep_optimizer *o)
{
    if (!o) return;
    hstep_close_storage(o);
    hstep_close_results(o);
    hstep_release_plan(o);
    hstep_close_sync(o);
    o->device->release(&o->context, o->plan.round_squares);
    o->device->release(&o->context, o->verdict);
    o->device->release(&o->context, o->memory);
    if (o->device->close) o->device->close(&o->context);
    for (int i = 0; i < o->n_tensors; i++) free(o->labels[i].name);
    free(o->labels);
    free(o->links);
    free(o->tensors);
    free(o->groups);
    free(o);
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
    if (hstep_grow((void **)&o->groups, o->n_groups, &o->capacity_groups, sizeof g))
        return hstep_fail_memory(o, sizeof g, "another group");
    o->groups[o->n_groups] = g;
    *group = o->n_groups++;
    return HALFSTEP_OK;
}

int32_t halfstep_group_count(const halfstep_optimizer *o) { return o ? o->n_groups : 0; }

int halfstep_get_group_recipe(const halfstep_optimizer *o, int32_t group, char *text, size_t size)
{
    if (!o || !text) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_group(o, group);
    if (!error && (error = hstep_recipe_text(&o->groups[group].recipe, text, size)))
        return hstep_fail(o, error, "buffer of %llu bytes is too small for the recipe; 64 are enough",
                          (unsigned long long)size);
    return error;
}

static int check_bounds(const halfstep_optimizer *o, const struct hstep_hyper *hyper, double value)
{
    int above = hyper->exclusive ? !(value < hyper->maximum) : !(value <= hyper->maximum);
    if (value >= hyper->minimum && !above && hyper->words[0] && value != floor(value))
        return hstep_fail(
            o, HALFSTEP_ERROR_RANGE,
            "%s = %g is not a whole number; its values are 0 to %g, or their names (halfstep_set_choice())",
            hyper->name, value, hyper->maximum);
    if (value >= hyper->minimum && !above) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%s = %g is not in [%g, %g%c", hyper->name, value, hyper->minimum,
                      hyper->maximum, hyper->exclusive ? ')' : ']');
}

/* Sets a hyper-parameter of one group. With only_check, changes nothing and returns the error that setting it would
 * give. */
static int set_group_hyper(halfstep_optimizer *o, struct hstep_group *g, int index, double value, int only_check)
{
    if (index == HSTEP_CAUTIOUS && (value != 0.0) != (g->hyper[index] != 0.0)) {
        const struct hstep_rule *rule = &hstep_rules[g->recipe.rule];
        if (value != 0.0 && rule->not_cautious)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "%s cannot be cautious: %s", rule->name,
                              rule->not_cautious);
        if (o->settled)
            return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                              "'cautious' cannot be switched on or off once the states exist; set it before");
    }
    if (index < HSTEP_COMMON_HYPERS) {
        if (only_check) return HALFSTEP_OK;
        g->hyper[index] = value;
        if (index == HSTEP_LR && !g->lr_was_set) {
            g->first_lr = value;
            g->lr_was_set = 1;
        }
        return HALFSTEP_OK;
    }
    const char *share = hstep_rules[g->recipe.rule].share, *name = hstep_rule_hyper(g->recipe.rule, index).name;
    if (share && o->settled && !strcmp(name, share) && value != g->own[index - HSTEP_COMMON_HYPERS])
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "'%s' cannot change once the states exist; set it before", name);
    struct hstep_group changed = *g;
    changed.own[index - HSTEP_COMMON_HYPERS] = value;
    int other_states = 0;
    for (int i = 0; i < hstep_rule_states(g->recipe.rule); i++)
        other_states |= hstep_state_needed(&changed, i) != hstep_state_needed(g, i);
    if (other_states && o->settled)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                          "'%s' cannot change from or to 0 once the states exist; set it before", name);
    /* Choose the states of all tensors on trial first, so that either all of them change or nothing does. */
    for (int pass = 0; other_states && pass < (only_check ? 1 : 2); pass++)
        for (int i = 0; i < o->n_tensors; i++) {
            struct hstep_tensor *t = &o->tensors[i], trial = *t;
            if (t->group != (int)(g - o->groups)) continue;
            int error = hstep_choose_states(o, &changed, o->labels[i].name, pass ? t : &trial);
            if (error) return error;
        }
    if (!only_check) *g = changed;
    return HALFSTEP_OK;
}

static int set_hyper(halfstep_optimizer *o, int32_t group, const char *name, double value)
{
    int error;
    if (group != HALFSTEP_ALL_GROUPS) {
        if ((error = hstep_check_group(o, group))) return error;
        struct hstep_group *g = &o->groups[group];
        int index = hstep_find_hyper(g->recipe.rule, name);
        if (index < 0)
            return hstep_fail(o, HALFSTEP_ERROR_NAME, "%s has no hyper-parameter '%s'",
                              hstep_rules[g->recipe.rule].name, name);
        if (index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                              "'%s' belongs to the optimizer, not to a group; set it for HALFSTEP_ALL_GROUPS", name);
        struct hstep_hyper hyper = hstep_rule_hyper(g->recipe.rule, index);
        if ((error = check_bounds(o, &hyper, value))) return error;
        return set_group_hyper(o, g, index, value, 0);
    }
    int index = hstep_find_hyper(-1, name);
    if (index == HSTEP_GRADIENT_SCALE || index == HSTEP_CLIP_NORM) {
        if ((error = check_bounds(o, &hstep_common_hypers[index], value))) return error;
        *(index == HSTEP_GRADIENT_SCALE ? &o->gradient_scale : &o->clip_norm) = value;
        return HALFSTEP_OK;
    }
    /* Check bounds and order in every group first, so that either all groups change or none. */
    int found = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < o->n_groups; i++) {
            struct hstep_group *g = &o->groups[i];
            index = hstep_find_hyper(g->recipe.rule, name);
            if (index < 0) continue;
            found = 1;
            struct hstep_hyper hyper = hstep_rule_hyper(g->recipe.rule, index);
            if ((error = check_bounds(o, &hyper, value)) || (error = set_group_hyper(o, g, index, value, !pass)))
                return error;
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
    return result ? result : hstep_send_at_once(o);
}

int halfstep_get_hyper(const halfstep_optimizer *o, int32_t group, const char *name, double *value)
{
    if (!o || !name || !value) return HALFSTEP_ERROR_ARGUMENT;
    if (group == HALFSTEP_ALL_GROUPS) {
        int index = hstep_find_hyper(-1, name);
        if (index == HSTEP_GRADIENT_SCALE) *value = o->gradient_scale;
        else if (index == HSTEP_CLIP_NORM) *value = o->clip_norm;
        else return hstep_fail(o, HALFSTEP_ERROR_NAME, "the optimizer has no hyper-parameter '%s'", name);
        return HALFSTEP_OK;
    }
    int error = hstep_check_group(o, group);
    if (error) return error;
    const struct hstep_group *g = &o->groups[group];
    int index = hstep_find_hyper(g->recipe.rule, name);
    if (index < 0 || (index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS))
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "%s has no hyper-parameter '%s'", hstep_rules[g->recipe.rule].name,
                          name);
    if (index >= HSTEP_COMMON_HYPERS) *value = g->own[index - HSTEP_COMMON_HYPERS];
    else if (index == HSTEP_REFERENCE_LR && g->hyper[index] == 0.0) *value = g->first_lr;
    else *value = g->hyper[index];
    return HALFSTEP_OK;
}

/* Returns the address of a choice's value, or NULL if the choice does not exist for a group, or for the optimizer. */
static int *choice_place(halfstep_optimizer *o, int32_t group, const char *choice)
{
    struct hstep_group *g = group == HALFSTEP_ALL_GROUPS ? NULL : &o->groups[group];
    switch (hstep_find_choice(choice)) {
    case HSTEP_CHOICE_DECAY: return g ? &g->decay : NULL;
    case HSTEP_CHOICE_SCHEDULE: return g ? &g->schedule : NULL;
    case HSTEP_CHOICE_DECAY_SCHEDULE: return g ? &g->decay_schedule : NULL;
    case HSTEP_CHOICE_SCAN: return g ? NULL : &o->scan;
    case HSTEP_CHOICE_GENERATOR: return g ? NULL : &o->generator;
    case HSTEP_CHOICE_CLIP: return g ? NULL : &o->clip;
    case HSTEP_CHOICE_MISSING: return g ? NULL : &o->missing_gradient;
    case HSTEP_CHOICES: break;
    }
    return NULL;
}

/* Fails if a group, or one of all groups, cannot have this decay mode. */
static int check_decay(const halfstep_optimizer *o, int32_t group, int decay)
{
    const int all = group == HALFSTEP_ALL_GROUPS, end = all ? o->n_groups : group + 1;
    for (int i = all ? 0 : group; decay == HSTEP_DECAY_CAUTIOUS && i < end; i++) {
        const struct hstep_rule *rule = &hstep_rules[o->groups[i].recipe.rule];
        if (rule->no_cautious_decay)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "the decay of %s cannot be cautious: %s; choose another decay", rule->name,
                              rule->no_cautious_decay);
    }
    return HALFSTEP_OK;
}

int halfstep_set_choice(halfstep_optimizer *o, int32_t group, const char *choice, const char *value)
{
    if (!o || !choice || !value) return HALFSTEP_ERROR_ARGUMENT;
    int error;
    if (group != HALFSTEP_ALL_GROUPS && (error = hstep_check_group(o, group))) return error;
    int is_hyper = hstep_find_choice(choice) == HSTEP_CHOICES;
    if (is_hyper && !halfstep_choice_value(choice, 0)) {
        char known[HSTEP_DETAIL_BYTES] = "";
        for (int i = 0; i < HSTEP_CHOICES; i++) hstep_add_name(known, hstep_choices[i]);
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "unknown choice '%s'; known: %s", choice, known);
    }
    int found = hstep_choice_find(choice, value);
    if (found < 0) {
        char known[HSTEP_DETAIL_BYTES] = "";
        for (int i = 0; halfstep_choice_value(choice, i); i++) hstep_add_name(known, halfstep_choice_value(choice, i));
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "unknown value '%s' of '%s'; known: %s", value, choice, known);
    }
    if (is_hyper) return halfstep_set_hyper(o, group, choice, found);
    int *place = choice_place(o, group, choice);
    if (hstep_find_choice(choice) == HSTEP_CHOICE_DECAY && (error = check_decay(o, group, found))) return error;
    if (place) {
        *place = found;
        return HALFSTEP_OK;
    }
    if (group != HALFSTEP_ALL_GROUPS)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "'%s' belongs to the optimizer, not to a group; set it for HALFSTEP_ALL_GROUPS", choice);
    for (int i = 0; i < o->n_groups; i++) *choice_place(o, i, choice) = found;
    return HALFSTEP_OK;
}

const char *halfstep_get_choice(const halfstep_optimizer *o, int32_t group, const char *choice)
{
    if (!o || !choice || (group != HALFSTEP_ALL_GROUPS && (group < 0 || group >= o->n_groups))) return NULL;
    double value;
    if (hstep_find_choice(choice) == HSTEP_CHOICES && halfstep_choice_value(choice, 0))
        return halfstep_get_hyper(o, group, choice, &value) ? NULL : halfstep_choice_value(choice, (int32_t)value);
    const int *place = choice_place((halfstep_optimizer *)o, group, choice);
    return place ? halfstep_choice_value(choice, *place) : NULL;
}

int halfstep_current_lr(const halfstep_optimizer *o, int32_t group, double *lr)
{
    if (!o || !lr) return HALFSTEP_ERROR_ARGUMENT;
    int error = hstep_check_group(o, group);
    if (error || (error = hstep_fetch(o))) return error;
    struct hstep_fp fp = hstep_fp_enter();
    *lr = hstep_group_lr(&o->groups[group]);
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}

/* ---- Schedules and random words without a handle ---- */

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
    struct hstep_schedule schedule = {.kind = kind,
                                      .warmup = (uint64_t)warmup_steps,
                                      .total = (uint64_t)total_steps,
                                      .final = final_fraction,
                                      .decay_start = decay_start,
                                      .power = power};
    struct hstep_fp fp = hstep_fp_enter();
    *factor = hstep_schedule_factor(&schedule, step);
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}

int halfstep_random_words(const char *generator, uint64_t seed, uint64_t id, uint64_t write, int32_t slot,
                          uint64_t first, uint32_t *out, size_t n)
{
    if (!generator || (n && !out)) return HALFSTEP_ERROR_ARGUMENT;
    int row = hstep_choice_find("generator", generator);
    if (row < 0) return HALFSTEP_ERROR_NAME;
    struct hstep_key key = hstep_key_write(hstep_generator_id(row), seed, id, write, (uint32_t)slot);
    hstep_random_words(hstep_generator_id(row), &key, first, n, out);
    return HALFSTEP_OK;
}

/* ---- Devices: names, information, streams, memory ---- */

const struct hstep_device *hstep_find_device(const char *name, const char **rest)
{
    const struct hstep_device *const devices[] = {hstep_default_device, &hstep_cuda_device};
    if (!name || !*name || !strcmp(name, "cpu")) return hstep_default_device;
    for (size_t i = 1; i < sizeof devices / sizeof *devices; i++) {
        size_t length = strlen(devices[i]->name);
        if (strncmp(name, devices[i]->name, length) || (name[length] && name[length] != ':')) continue;
        *rest = name + length + (name[length] == ':');
        return name[length] && !**rest ? NULL : devices[i];
    }
    return NULL;
}

int halfstep_set_stream(halfstep_optimizer *o, void *stream)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    if (o->device->follow) return hstep_why(o, o->device->follow(&o->context, stream));
    return stream ? hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "the %s has no streams", o->device->name) : HALFSTEP_OK;
}

int halfstep_get_device_info(const char *device, halfstep_device_info *info)
{
    const char *rest = "";
    halfstep_device_info ours = {.name = "", .code = ""};
    const struct hstep_device *found = hstep_find_device(device, &rest);
    if (!info) return HALFSTEP_ERROR_ARGUMENT;
    if (!found || !found->inform) return HALFSTEP_ERROR_NAME;
    found->inform(rest, &ours);
    if (!ours.usable) {
        halfstep_optimizer nobody = {.device = found};
        hstep_why(&nobody, HALFSTEP_ERROR_DEVICE);
    }
    return hstep_give_struct(info, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

const char *halfstep_device_code(void) { return hstep_cuda_device.code(); }

int halfstep_device_allocate(const halfstep_optimizer *o, uint64_t bytes, void **memory)
{
    if (!o || !memory) return HALFSTEP_ERROR_ARGUMENT;
    *memory = NULL;
    int error = o->device->allocate(&o->context, bytes, memory);
    if (error == HALFSTEP_ERROR_MEMORY) return hstep_fail_memory(o, bytes, "the call");
    return hstep_why(o, error);
}

void halfstep_device_release(const halfstep_optimizer *o, void *memory)
{
    if (o && memory) o->device->release(&o->context, memory);
}

int halfstep_device_copy(const halfstep_optimizer *o, void *to, const void *from, uint64_t bytes)
{
    if (!o || (bytes && (!to || !from))) return HALFSTEP_ERROR_ARGUMENT;
    return bytes ? hstep_wait(o, o->device->copy(&o->context, to, from, bytes)) : HALFSTEP_OK;
}
