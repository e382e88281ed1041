/* Handles and groups. Arguments are checked here, so that a step has nothing left to refuse but gradients. */
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
#include "handle/checks.h"
#include "handle/devices/device_check.h"
#include "handle/devices/sync.h"
#include "handle/plan.h"
#include "handle/states/storage.h"
#include "handle/step/ahead.h"
#include "handle/tensors.h"
#include "kernels/dispatch.h"

int32_t halfstep_version(void)
{
    return HALFSTEP_VERSION_MAJOR * 10000 + HALFSTEP_VERSION_MINOR * 100 + HALFSTEP_VERSION_PATCH;
}

int32_t halfstep_abi(void) { return HALFSTEP_ABI; }

/* ---- Handles ---- */

int halfstep_create(const halfstep_options *given, halfstep_optimizer **optimizer)
{
    HSTEP_NEED(NULL, optimizer);
    return hstep_create(given, 0, optimizer);
}

/* Reads our environment variables. Fails with NAME if one is malformed. */
static int check_environment(const halfstep_optimizer *o)
{
    char text[HSTEP_DETAIL_BYTES];
    const char *wrong = hstep_read_environment(text, sizeof text) ? text : hstep_isa_warning();
    return wrong ? hstep_fail(o, HALFSTEP_ERROR_NAME, "%s", wrong) : HALFSTEP_OK;
}

static int fail_threads(const halfstep_optimizer *o, int32_t threads)
{
    return hstep_fail(o, HALFSTEP_ERROR_RANGE, "threads = %d is not in [0, 1024]", (int)threads);
}

int hstep_create(const halfstep_options *given, int checking, halfstep_optimizer **optimizer)
{
    static atomic_uint_least64_t serial;
    halfstep_options options = {0};
    *optimizer = NULL;
    if (given && !hstep_take_struct(&options, sizeof options, given))
        return hstep_fail_struct(NULL, "halfstep_create", given);
    if (options.threads < 0 || options.threads > 1024) return fail_threads(NULL, options.threads);
    if (options.host && !options.run)
        return hstep_fail(NULL, HALFSTEP_ERROR_ARGUMENT, "options: host is the first argument of run, which is NULL");
    const char *rest = "";
    const struct hstep_device *device = hstep_find_device(options.device, &rest);
    if (!device) return HALFSTEP_ERROR_NAME;
    if (options.stream && !device->open)
        return hstep_fail(NULL, HALFSTEP_ERROR_ARGUMENT, "options: the %s has no streams; set device too, or no stream",
                          device->name);
    halfstep_optimizer *o = calloc(1, sizeof *o);
    if (!o) return hstep_fail_memory(NULL, sizeof *o, "an optimizer");
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
    hstep_fail(o, HALFSTEP_OK, "%s", ""); /* the text of before is about another failure */
    int error = check_environment(o);
    if (!error && device->open) error = hstep_why(o, device->open(&o->context, rest, options.stream));
    if (!error) error = hstep_why(o, hstep_first_plan(o));
    if (!error) error = hstep_why(o, hstep_open_sync(o));
    if (!error && device->trusted && !checking) error = hstep_check_device(o, -1);
    if (error) {
        if (!*halfstep_error_detail(o)) hstep_fail(o, error, "%s", halfstep_strerror(error));
        halfstep_destroy(o);
        return error;
    }
    o->serial = atomic_fetch_add(&serial, 1) + 1;
    *optimizer = o;
    return HALFSTEP_OK;
}

int halfstep_set_threads(halfstep_optimizer *o, int32_t threads)
{
    HSTEP_NEED(o, o);
    if (threads < 0 || threads > 1024) return fail_threads(o, threads);
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

int hstep_make_group(const halfstep_optimizer *o, const char *recipe, struct hstep_group *g)
{
    char detail[HSTEP_DETAIL_BYTES];
    memset(g, 0, sizeof *g);
    const int error = hstep_recipe_parse(recipe, &g->recipe, detail, sizeof detail);
    if (error) return hstep_fail(o, error, "%s", detail);
    const int rule = g->recipe.rule;
    for (int i = 0; i < HSTEP_GROUP_HYPERS; i++) g->hyper[i] = hstep_rule_hyper(rule, i).initial;
    for (int i = 0; i < hstep_rule_hypers(rule); i++) g->own[i] = hstep_rules[rule].hyper[i].initial;
    g->first_lr = g->hyper[HSTEP_LR];
    g->decay = hstep_choice_find("decay", hstep_rules[rule].decay);
    return HALFSTEP_OK;
}

int halfstep_add_group(halfstep_optimizer *o, const char *recipe, int32_t *group)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, recipe);
    HSTEP_NEED(o, group);
    if (o->settled) return hstep_fail(o, HALFSTEP_ERROR_ORDER, "groups must be added before the states exist");
    if (o->lr_place)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "groups must be added before the lr of one is bound to an address");
    struct hstep_group g;
    const int error = hstep_make_group(o, recipe, &g);
    if (error) return error;
    if (hstep_grow((void **)&o->groups, o->n_groups, &o->capacity_groups, sizeof g))
        return hstep_fail_memory(o, sizeof g, "another group");
    o->groups[o->n_groups] = g;
    *group = o->n_groups++;
    return HALFSTEP_OK;
}

int32_t halfstep_group_count(const halfstep_optimizer *o) { return o ? o->n_groups : 0; }

int halfstep_get_group_recipe(const halfstep_optimizer *o, int32_t group, char *text, size_t size)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, text);
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

/* Errors with NAME, because a choice has no such value. */
static int fail_value(const halfstep_optimizer *o, const char *choice, const char *value)
{
    char known[HSTEP_DETAIL_BYTES] = "";
    for (int i = 0; halfstep_choice_value(choice, i); i++) hstep_add_name(known, halfstep_choice_value(choice, i));
    return hstep_fail(o, HALFSTEP_ERROR_NAME, "unknown value '%s' of '%s'; known: %s", value, choice, known);
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

static int is_of_optimizer(int index) { return index >= HSTEP_GROUP_HYPERS && index < HSTEP_COMMON_HYPERS; }

/* Errors with ARGUMENT, because a hyper-parameter or choice is the optimizer's and a group was given. */
static int fail_of_optimizer(const halfstep_optimizer *o, const char *name)
{
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                      "'%s' belongs to the optimizer, not to a group; give HALFSTEP_ALL_GROUPS as the group", name);
}

/* Errors with ORDER, because something is set for all groups and there is none. */
static int fail_no_group(const halfstep_optimizer *o, const char *name)
{
    return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                      "there is no group yet that could take '%s'; set it after halfstep_add_group()", name);
}

/* Finds a hyper-parameter of a group, and writes its row to *index. Lists those that there are if it is unknown. */
static int find_hyper(const halfstep_optimizer *o, int32_t group, const char *name, int *index)
{
    int error = hstep_check_group(o, group);
    if (error) return error;
    const int rule = o->groups[group].recipe.rule;
    *index = hstep_find_hyper(rule, name);
    if (is_of_optimizer(*index)) return fail_of_optimizer(o, name);
    if (*index >= 0) return HALFSTEP_OK;
    char known[HSTEP_DETAIL_BYTES] = "";
    const int count = HSTEP_COMMON_HYPERS + hstep_rule_hypers(rule);
    for (int i = 0; i < count; i++) { /* its own first */
        const int row = (i + HSTEP_COMMON_HYPERS) % count;
        if (!is_of_optimizer(row)) hstep_add_name(known, hstep_rule_hyper(rule, row).name);
    }
    return hstep_fail(o, HALFSTEP_ERROR_NAME, "%s has no hyper-parameter '%s'; it has: %s", hstep_rules[rule].name,
                      name, known);
}

static int set_hyper(halfstep_optimizer *o, int32_t group, const char *name, double value)
{
    int error, index;
    if (group != HALFSTEP_ALL_GROUPS) {
        if ((error = find_hyper(o, group, name, &index))) return error;
        struct hstep_group *g = &o->groups[group];
        struct hstep_hyper hyper = hstep_rule_hyper(g->recipe.rule, index);
        if ((error = check_bounds(o, &hyper, value))) return error;
        return set_group_hyper(o, g, index, value, 0);
    }
    index = hstep_find_hyper(-1, name);
    if (is_of_optimizer(index)) {
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
            error = check_bounds(o, &hyper, value);
            if (!error) error = set_group_hyper(o, g, index, value, !pass);
            if (error) return error;
        }
    if (found) return HALFSTEP_OK;
    if (!o->n_groups) return fail_no_group(o, name);
    return hstep_fail(o, HALFSTEP_ERROR_NAME,
                      "no group has a hyper-parameter '%s'; set it for one group to see what that has", name);
}

int halfstep_set_hyper(halfstep_optimizer *o, int32_t group, const char *name, double value)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, name);
    struct hstep_fp fp = hstep_fp_enter();
    int result = set_hyper(o, group, name, value);
    hstep_fp_leave(fp);
    return result ? result : hstep_send_at_once(o);
}

int halfstep_get_hyper(const halfstep_optimizer *o, int32_t group, const char *name, double *value)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, name);
    HSTEP_NEED(o, value);
    if (group == HALFSTEP_ALL_GROUPS) {
        int row = hstep_find_hyper(-1, name);
        if (row == HSTEP_GRADIENT_SCALE) *value = o->gradient_scale;
        else if (row == HSTEP_CLIP_NORM) *value = o->clip_norm;
        else
            return hstep_fail(o, HALFSTEP_ERROR_NAME,
                              "the optimizer has no hyper-parameter '%s'; it has: %s, %s; others belong to a group",
                              name, hstep_common_hypers[HSTEP_GRADIENT_SCALE].name,
                              hstep_common_hypers[HSTEP_CLIP_NORM].name);
        return HALFSTEP_OK;
    }
    int index, error = find_hyper(o, group, name, &index);
    if (error) return error;
    const struct hstep_group *g = &o->groups[group];
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
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, choice);
    HSTEP_NEED(o, value);
    int error;
    if (group != HALFSTEP_ALL_GROUPS && (error = hstep_check_group(o, group))) return error;
    int is_hyper = hstep_find_choice(choice) == HSTEP_CHOICES;
    if (is_hyper && !halfstep_choice_value(choice, 0)) {
        char known[HSTEP_DETAIL_BYTES] = "";
        for (int i = 0; i < HSTEP_CHOICES; i++) hstep_add_name(known, hstep_choices[i]);
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "unknown choice '%s'; known: %s", choice, known);
    }
    int found = hstep_choice_find(choice, value);
    if (found < 0) return fail_value(o, choice, value);
    if (is_hyper) return halfstep_set_hyper(o, group, choice, found);
    int *place = choice_place(o, group, choice);
    if (hstep_find_choice(choice) == HSTEP_CHOICE_DECAY && (error = check_decay(o, group, found))) return error;
    if (place) {
        *place = found;
        return HALFSTEP_OK;
    }
    if (group != HALFSTEP_ALL_GROUPS) return fail_of_optimizer(o, choice);
    if (!o->n_groups) return fail_no_group(o, choice);
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
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, lr);
    int error = hstep_check_group(o, group);
    if (error || (error = hstep_fetch(o))) return error;
    const struct hstep_group *g = &o->groups[group];
    error = hstep_check_schedule(o, group, g->schedule, g->hyper[HSTEP_WARMUP_STEPS], g->hyper[HSTEP_TOTAL_STEPS]);
    if (error) return error;
    struct hstep_fp fp = hstep_fp_enter();
    *lr = hstep_group_lr(g);
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}

/* ---- Schedules and random words without a handle ---- */

int hstep_check_schedule(const halfstep_optimizer *o, int group, int schedule, double warmup, double total)
{
    char of[32] = "";
    if (!hstep_schedule_falls(schedule) || (total > 0.0 && warmup <= total)) return HALFSTEP_OK;
    if (group >= 0) snprintf(of, sizeof of, "group %d: ", group);
    if (total > 0.0)
        return hstep_fail(
            o, HALFSTEP_ERROR_RANGE,
            "%swarmup_steps = %g is above total_steps = %g, so the rate would never rise to lr; set fewer "
            "warmup_steps or more total_steps",
            of, warmup, total);
    return hstep_fail(o, HALFSTEP_ERROR_RANGE, "%sthe schedule %s needs a length; set total_steps, or choose constant",
                      of, hstep_schedule_name(schedule));
}

int halfstep_schedule_factor(const char *name, uint64_t step, double warmup_steps, double total_steps,
                             double final_fraction, double decay_start, double power, double *factor)
{
    HSTEP_NEED(NULL, name);
    HSTEP_NEED(NULL, factor);
    int kind = hstep_choice_find("schedule", name);
    if (kind < 0) return fail_value(NULL, "schedule", name);
    const double values[] = {warmup_steps, total_steps, final_fraction, decay_start, power};
    const int rows[] = {HSTEP_WARMUP_STEPS, HSTEP_TOTAL_STEPS, HSTEP_FINAL_FRACTION, HSTEP_DECAY_START, HSTEP_POWER};
    int error;
    for (int i = 0; i < 5; i++)
        if ((error = check_bounds(NULL, &hstep_common_hypers[rows[i]], values[i]))) return error;
    if ((error = hstep_check_schedule(NULL, -1, kind, warmup_steps, total_steps))) return error;
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
    HSTEP_NEED(NULL, generator);
    if (n) HSTEP_NEED(NULL, out);
    int row = hstep_choice_find("generator", generator);
    if (row < 0) return fail_value(NULL, "generator", generator);
    struct hstep_key key = hstep_key_write(hstep_generator_id(row), seed, id, write, (uint32_t)slot);
    hstep_random_words(hstep_generator_id(row), &key, first, n, out);
    return HALFSTEP_OK;
}
