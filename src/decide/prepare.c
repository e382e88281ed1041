/* Computes the constants of a step, in double, by the prepare function of each rule. */
#include "decide/pass.h"

#include <math.h>
#include <string.h>

#include "base/grid.h"
#include "base/scale.h"
#include "base/schedule.h"
#ifndef VL /* a device brings its own vocabulary */
#include "vec/scalar.h"
#endif

#include "formats/formats.h"

#include "rules/rules.h"

static HSTEP_TABLE void (*const prepares[HSTEP_RULES])(float *, struct hstep_prepare *) = {
#define RULE(id, rule) [HSTEP_RULE_##rule] = rule##_prepare,
#include "rules/rules.def"
#undef RULE
};

void hstep_prepare_rule(const struct hstep_group *group, struct hstep_prepare *p, float *k)
{
    p->hyper = group->own;
    for (int i = 0; i < HSTEP_MAX_SCALARS; i++) k[i] = 0.0f;
    prepares[group->recipe.rule](k, p);
}

float hstep_factor_of(const struct hstep_group *group, double mean, int pair)
{
    switch (group->recipe.rule) {
#define FACTOR_CASE(name) \
    case HSTEP_RULE_##name: return (float)name##_factor(group->own, mean, pair);
#define RULE(id, name) HSTEP_IF(HSTEP_PAIRS(name), FACTOR_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: return 0.0f;
    }
}

float hstep_tensor_scale(int format, double norm, double elements)
{
    switch (format) {
#define FORMAT(id, fn) IF_TENSOR(fn, FORMAT_CASE(fn) return fn##_tensor_scale(norm, elements);)
#include "formats/formats.def"
#undef FORMAT
    default: return 0.0f;
    }
}

/* Returns a schedule's factor for the next step. warmup and final: rows of hyper-parameters. warmup -1: none. */
static double factor_of(const struct hstep_group *group, int kind, int warmup, int final)
{
    struct hstep_schedule schedule = {
        .kind = kind,
        .warmup = warmup < 0 ? 0 : (uint64_t)group->hyper[warmup],
        .total = (uint64_t)group->hyper[HSTEP_TOTAL_STEPS],
        .final = group->hyper[final],
        .decay_start = group->hyper[HSTEP_DECAY_START],
        .power = group->hyper[HSTEP_POWER],
    };
    return hstep_schedule_factor(&schedule, group->steps);
}

double hstep_group_lr(const struct hstep_group *group)
{
    return group->hyper[HSTEP_LR] * factor_of(group, group->schedule, HSTEP_WARMUP_STEPS, HSTEP_FINAL_FRACTION);
}

double hstep_group_decay(const struct hstep_group *group)
{
    return group->hyper[HSTEP_WEIGHT_DECAY] * factor_of(group, group->decay_schedule, -1, HSTEP_FINAL_DECAY_FRACTION);
}

double hstep_state_beta(const struct hstep_group *group, int state)
{
    int rule = group->recipe.rule;
    const char *beta = hstep_rules[rule].state[state].beta;
    return beta ? group->own[hstep_find_hyper(rule, beta) - HSTEP_COMMON_HYPERS] : 1.0;
}

double hstep_state_option(const struct hstep_group *group, int state)
{
    int rule = group->recipe.rule;
    const char *unless = hstep_rules[rule].state[state].unless;
    return unless ? group->own[hstep_find_hyper(rule, unless) - HSTEP_COMMON_HYPERS] : 1.0;
}

int hstep_state_needed(const struct hstep_group *group, int state) { return hstep_state_option(group, state) != 0.0; }

/* ---- One update ---- */

HSTEP_TABLE int hstep_use_fused = 1;

double hstep_reference_lr(const struct hstep_group *g)
{
    return g->hyper[HSTEP_REFERENCE_LR] != 0.0 ? g->hyper[HSTEP_REFERENCE_LR] : g->first_lr;
}

int hstep_is_preparable(const struct hstep_group *g)
{
    return g->hyper[HSTEP_CENTRALIZE] == 0.0 && g->decay != HSTEP_DECAY_FULLY;
}

static int is_centralized(const struct hstep_group *g, const struct hstep_tensor *t)
{
    return hstep_rules[t->rule].kind != HSTEP_RAW_GRADIENT && g->hyper[HSTEP_CENTRALIZE] != 0.0 && t->ndim >= 2 &&
           t->row_length > 1;
}

const char *hstep_unpreparable(const struct hstep_group *g, const struct hstep_tensor *t, int *code)
{
    *code = HALFSTEP_ERROR_RANGE;
    if (g->decay == HSTEP_DECAY_FULLY && g->hyper[HSTEP_WEIGHT_DECAY] != 0.0 && hstep_reference_lr(g) == 0.0)
        return "fully-decoupled decay needs a reference_lr above 0; set it, because the first lr was 0";
    *code = HALFSTEP_ERROR_UNSUPPORTED;
    if (!is_centralized(g, t)) return NULL;
    if (t->n_columns != t->row_length)
        return "centralize needs whole rows; set it to 0 or split the tensor between rows";
    if (t->grain > HSTEP_CELL && t->dense && t->row_length % t->grain)
        return "centralize needs blocks that end with rows; set it to 0 or store the states in another format";
    return NULL;
}

static void decay_of(const struct hstep_group *g, double *lr, double *decay, double *l2)
{
    double weight_decay = hstep_group_decay(g);
    *decay = *l2 = 0.0;
    if (weight_decay == 0.0) return;
    switch (g->decay) {
    case HSTEP_DECAY_L2: *l2 = weight_decay; break;
    case HSTEP_DECAY_DECOUPLED:
    case HSTEP_DECAY_CAUTIOUS: *decay = *lr * weight_decay; break;
    case HSTEP_DECAY_FULLY: *decay = *lr / hstep_reference_lr(g) * weight_decay; break;
    case HSTEP_DECAY_PROXIMAL:
        /* (w - lr u) / (1 + lr wd) = w - (lr u + lr wd w) / (1 + lr wd). */
        *decay = *lr * weight_decay / (1.0 + *lr * weight_decay);
        *lr /= 1.0 + *lr * weight_decay;
        break;
    }
}

/* Returns the key of a slot's random words. Only finely stored values take lattice words. Rounding by a lattice is
 * uniform by itself, but not given the stored value, because that depends on earlier words. The steps of block codes
 * are no small part of a value, so this would bias states that feed on themselves. Block codes therefore have
 * independent words. */
static struct hstep_key slot_strand(uint64_t seed, int generator, const struct hstep_tensor *t, int s)
{
    const struct hstep_format *f = &hstep_formats[t->slot[s].format];
    if (generator != HSTEP_GENERATOR_LATTICE || hstep_is_of_states(f))
        return hstep_key_strand(seed, t->id, t->writes, (uint32_t)s);
    int weight = s == HALFSTEP_SLOT_WEIGHT || hstep_slot_role(t, s) == HALFSTEP_ROLE_WEIGHT;
    return hstep_key_lattice(seed, t->id, weight ? t->full_steps : t->state_steps, (uint32_t)s);
}

/* Returns the scale that gives the elements a mean factor of 1, where those that do not agree count as 0. The mean is
 * bounded below as in c_adamw. */
static float cautious_scale(double count, double elements)
{
    double mean = count / elements;
    return (float)(1.0 / (mean > 1e-3 ? mean : 1e-3));
}

void hstep_repeat_update(const struct hstep_call *call, int tensor, const struct hstep_tensor *before,
                         const struct hstep_update *same, struct hstep_update *u)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const int generator = hstep_generator_id(call->generator);
    *u = *same;
    memcpy(u->scalar, t->scalar, sizeof u->scalar);
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (slot->root && slot->grid != before->slot[s].grid) {
            const struct hstep_group *g = &call->plan.groups[t->group];
            u->grid[s] = hstep_next_grid(slot->grid, hstep_state_beta(g, s - HALFSTEP_SLOT_STATE));
            u->onto[s] = hstep_onto_grid(u->grid[s], slot->root);
        }
        if (u->stochastic >> s & 1) u->strand[s] = slot_strand(call->seed, generator, t, s);
    }
}

void hstep_prepare_update(const struct hstep_call *call, int tensor, double clip, const double *norms,
                          const struct hstep_update *same, struct hstep_update *u)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const struct hstep_group *g = &call->plan.groups[t->group];
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    /* 1 for an empty tensor, so that no mean over it is 0 / 0. */
    double elements = t->rows && t->row_length ? (double)t->rows * (double)t->row_length : 1.0;
    double base = hstep_group_lr(g), lr = base, decay, l2;
    memset(u, 0, sizeof *u);
    decay_of(g, &lr, &decay, &l2);
    u->micro = call->micro;
    if (rule->kind == HSTEP_RAW_GRADIENT) {
        u->gradient_scale = 1.0f;
    } else {
        double sign = g->hyper[HSTEP_MAXIMIZE] != 0.0 ? -1.0 : 1.0, scale = sign * hstep_gradient_scale(call) * clip;
        u->gradient_scale = (float)scale;
        u->l2 = (float)l2;
        if (is_centralized(g, t)) u->centralize = g->hyper[HSTEP_CENTRALIZE] * scale;
    }
    struct hstep_own own = {.id = t->id,
                            .rows = t->matrix ? hstep_matrix_rows(t, call->matrix) : t->pattern_rows,
                            .row_length = t->row_length,
                            .elements = elements,
                            .matrix = t->matrix || t->pairs,
                            .scalar = u->scalar};
    const struct hstep_group *first = rule->totals ? &call->plan.groups[call->plan.tensors[t->share].group] : g;
    const struct hstep_shared shared = {.hyper = first->own, .t = first->steps + 1};
    struct hstep_prepare p = {.lr = lr,
                              .decay = g->decay == HSTEP_DECAY_CAUTIOUS ? 0.0 : decay,
                              .t = t->state_steps + 1,
                              .full = t->full_steps + 1,
                              .norm = rule->totals ? NULL : norms,
                              .total = rule->totals ? norms : NULL,
                              .shared = rule->totals ? &shared : NULL,
                              .own = &own,
                              .own_was_asked = &u->of_its_own};
    memcpy(u->scalar, t->scalar, sizeof u->scalar);
    if (same) memcpy(u->k, same->k, sizeof u->k);
    else hstep_prepare_rule(g, &p, u->k);
    u->every = same ? same->every : p.every;
    if (g->decay == HSTEP_DECAY_CAUTIOUS) u->cautious_decay = (float)decay;
    if (t->cautious) {
        /* Decay takes no part in the comparison and the scaling, so it goes to u->decay. */
        float *place = &u->k[hstep_rules[t->rule].decay_constant];
        u->decay = same ? same->decay : *place;
        *place = 0.0f;
        u->cautious = cautious_scale(norms ? norms[t->sums - 1] : elements, elements);
    }
    const int generator = hstep_generator_id(call->generator);
    u->generator = call->generator;
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (slot->format < 0) continue;
        const struct hstep_format *f = &hstep_formats[slot->format];
        if (norms && hstep_has_one_scale(slot->format))
            u->scale[s] = hstep_tensor_scale(slot->format, norms[hstep_sum_of_state(t, s)], elements);
        if (hstep_slot_role(t, s) == HALFSTEP_ROLE_WEIGHT) {
            if (!t->full_steps) u->weight_to_slot |= 1u << s;
            if ((same ? same->slot_to_weight : (uint32_t)p.copies_state) && !u->slot_to_weight)
                u->slot_to_weight = 1u << s;
        }
        if (s >= HALFSTEP_SLOT_STATE && rule->state[s - HALFSTEP_SLOT_STATE].unless) u->mode |= RULE_OPTION;
        /* A format with one scale for a tensor is left out, because it exists to reproduce its authors' results. */
        if (hstep_is_of_states(f) && !hstep_has_one_scale(slot->format)) u->mode |= RULE_CLAMP;
        if (slot->root) u->grid[s] = hstep_next_grid(slot->grid, hstep_state_beta(g, s - HALFSTEP_SLOT_STATE));
        u->onto[s] = hstep_onto_grid(u->grid[s], slot->root);
        if (f->stochastic && s != HALFSTEP_SLOT_GRADIENT) {
            u->stochastic |= 1u << s;
            u->strand[s] = slot_strand(call->seed, generator, t, s);
        }
    }
    u->zero_lr = base == 0.0;
    u->way = t->cautious || u->cautious_decay != 0.0f ? HSTEP_WAY_COMPARED
             : l2 != 0.0 || u->centralize != 0.0      ? HSTEP_WAY_ADJUSTED
                                                      : HSTEP_WAY_PLAIN;
    u->fused = hstep_use_fused && hstep_fused_row(t, u) >= 0 && !u->zero_lr && !u->micro &&
               (!u->stochastic || generator != HSTEP_GENERATOR_PHILOX7);
}
