/* Checks before anything of a step is done. States, gradients and weights must be there, and the step must not depend
 * on elements of a tensor that other processes hold. */
#include "decide/prepare.h"
#include "handle/checks.h"
#include "handle/states/slots.h"
#include "handle/states/storage.h"
#include "handle/step/ready.h"

/* Fails unless states, weights and gradients have their memory. Conditions that nearly always hold are counted when the
 * handle is settled, or remembered. Checking them in each of a thousand small tensors would cost time. */
static int check_bound(const struct hstep_request *s)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    int error = o->slots_bound ? HALFSTEP_OK : hstep_check_bound(o, c->first, c->n);
    if (error) return error;
    if (!c->single && !o->slots_bound) o->slots_bound = 1;
    const struct hstep_tensor *t = &o->tensors[c->first];
    for (int i = 0; c->weights && i < c->n; i++)
        if (!c->weights[i] && c->gradients[i] && t[i].tracks)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has a gradient but NULL weights",
                              o->labels[c->first + i].name);
    for (int i = 0; o->missing_gradient == HSTEP_MISSING_ERROR && i < c->n; i++)
        if (!c->gradients[i])
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                              "tensor '%s' has no gradient; the choice missing = error requires one",
                              o->labels[c->first + i].name);
    return HALFSTEP_OK;
}

/* Fails if a step in one call depends on elements of a tensor that other processes hold. */
static int check_alone(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    for (int i = c->first; o->parts && i < c->first + c->n; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        if (!c->gradients[i - c->first] || hstep_is_whole(t)) continue;
        const char *what = hstep_needs_sums(t, c->micro) ? "its update needs sums over all of it"
                           : hstep_is_clipped(c)         ? "clipping needs the norm of all of it"
                           : o->scan != HSTEP_SCAN_NONE  ? "the scan has to see all of it"
                                                         : NULL;
        if (what)
            return hstep_fail(
                o, HALFSTEP_ERROR_UNSUPPORTED,
                "only a part of tensor '%s' is here, and %s; step it by halfstep_run_begin() and halfstep_run_finish()",
                o->labels[i].name, what);
    }
    return HALFSTEP_OK;
}

/* Fails if finish has to make sums over a tensor of which only a part is here. */
static int check_norms(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    for (int i = c->first; o->parts && !*s->norms_made && i < c->first + c->n; i++)
        if (c->gradients[i - c->first] && hstep_needs_sums(&o->tensors[i], c->micro) && !hstep_is_whole(&o->tensors[i]))
            return hstep_fail(
                o, HALFSTEP_ERROR_ORDER,
                "only a part of tensor '%s' is here; call halfstep_run_norms() before halfstep_run_finish()",
                o->labels[i].name);
    return HALFSTEP_OK;
}

/* Fails if a tensor cannot take micro-steps. A state must keep the gradient. Not supported are l2 decay, vectors, and
 * sums over a tensor of which only a part is here. */
static int check_accumulates(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    for (int i = c->first; c->micro && i < c->first + c->n; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        const struct hstep_group *g = &o->groups[t->group];
        const struct hstep_rule *rule = &hstep_rules[g->recipe.rule];
        int state = hstep_rule_state(g->recipe.rule, rule->keeps);
        if (!c->gradients[i - c->first]) continue;
        if (state < 0 || !hstep_state_needed(g, state))
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s': %s%s%s has no state that keeps a gradient, so micro-steps would lose it",
                              o->labels[i].name, rule->name, state < 0 ? "" : " without ",
                              state < 0 ? "" : rule->state[state].unless);
        if (g->decay == HSTEP_DECAY_L2 && g->hyper[HSTEP_WEIGHT_DECAY] != 0.0)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s': with micro-steps l2 decay would reach only the last gradient of a step; "
                              "choose another decay",
                              o->labels[i].name);
        if (t->pairs)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': %s cannot make micro-steps of matrices",
                              o->labels[i].name, rule->name);
        if (hstep_needs_sums(t, 1) && !hstep_is_whole(t))
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "only a part of tensor '%s' is here, and a scale of its states is a sum over all of it",
                              o->labels[i].name);
    }
    return HALFSTEP_OK;
}

/* Fails if one tensor is to be stepped alone and its rule needs sums over all tensors. */
static int check_single(const struct hstep_request *s)
{
    const struct hstep_call *c = &s->call;
    const struct hstep_rule *rule = c->single ? &hstep_rules[s->o->tensors[c->first].rule] : NULL;
    if (!rule || !rule->totals || c->micro) return HALFSTEP_OK;
    return hstep_fail(s->o, HALFSTEP_ERROR_UNSUPPORTED,
                      "tensor '%s': %s needs sums over all tensors first; step all tensors in one call",
                      s->o->labels[c->first].name, rule->name);
}

/* Fails if groups that share one estimate of lr have different lr, other than 0. */
static int check_rates(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    for (int i = 0; o->totals && i < o->n_groups; i++) {
        const struct hstep_group *g = &o->groups[i], *other = o->groups;
        const struct hstep_rule *rule = &hstep_rules[g->recipe.rule];
        int number = rule->totals ? hstep_find_hyper(g->recipe.rule, rule->share) - HSTEP_COMMON_HYPERS : 0;
        double lr = rule->totals ? hstep_group_lr(g) : 0.0;
        if (lr == 0.0) continue;
        while (other->recipe.rule != g->recipe.rule || other->own[number] != g->own[number] ||
               hstep_group_lr(other) == 0.0)
            other++;
        if (hstep_group_lr(other) != lr)
            return hstep_fail(
                o, HALFSTEP_ERROR_RANGE,
                "%s: groups %d and %d share one estimate of lr, so their lr must be equal or 0, not %g and "
                "%g; to estimate each by itself, give one another %s",
                rule->name, (int)(other - o->groups), i, hstep_group_lr(other), lr, rule->share);
    }
    return HALFSTEP_OK;
}

/* Fails if the schedule of a group has no length, or one that leaves no room for its warm-up. */
static int check_schedules(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    int error = HALFSTEP_OK;
    for (int i = 0; i < o->n_groups && !error; i++) {
        const struct hstep_group *g = &o->groups[i];
        const double total = g->hyper[HSTEP_TOTAL_STEPS];
        error = hstep_check_schedule(o, i, g->schedule, g->hyper[HSTEP_WARMUP_STEPS], total);
        if (!error) error = hstep_check_schedule(o, i, g->decay_schedule, 0.0, total);
    }
    return error;
}

/* Fails if the reference lr of fully-decoupled decay must be wrong. Either decay takes more than the whole weight in a
 * step. Or lr is far above a reference that the caller never set, which was the start of a warm-up. */
#define MOST_ABOVE_FIRST_LR 10.0

static int check_decay(const struct hstep_request *s, const struct hstep_group *g, const char *tensor)
{
    double lr = hstep_group_lr(g), reference = hstep_reference_lr(g), decay = hstep_group_decay(g);
    if (g->decay != HSTEP_DECAY_FULLY || decay == 0.0 || reference == 0.0) return HALFSTEP_OK;
    if (lr / reference * decay > 1.0)
        return hstep_fail(
            s->o, HALFSTEP_ERROR_RANGE,
            "tensor '%s': fully-decoupled decay of lr / reference_lr * weight_decay = %g / %g * %g = %g is "
            "above 1; set reference_lr to the lr for which weight_decay is chosen",
            tensor, lr, reference, decay, lr / reference * decay);
    if (g->hyper[HSTEP_REFERENCE_LR] == 0.0 && lr > MOST_ABOVE_FIRST_LR * reference)
        return hstep_fail(
            s->o, HALFSTEP_ERROR_RANGE,
            "tensor '%s': fully-decoupled decay refers to the lr as first set, %g, which is too small for "
            "lr = %g; set reference_lr to the lr for which weight_decay is chosen",
            tensor, reference, lr);
    return HALFSTEP_OK;
}

/* Fails if the constants of a tensor's update cannot be computed. */
static int check_preparable(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    int preparable = 1;
    for (int i = 0; i < o->n_groups; i++) preparable &= hstep_is_preparable(&o->groups[i]);
    for (int i = c->first; !preparable && i < c->first + c->n; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        int code;
        const char *why = c->gradients[i - c->first] ? hstep_unpreparable(&o->groups[t->group], t, &code) : NULL;
        if (why) return hstep_fail(o, code, "tensor '%s': %s", o->labels[i].name, why);
        if (c->gradients[i - c->first] && (code = check_decay(s, &o->groups[t->group], o->labels[i].name))) return code;
    }
    return HALFSTEP_OK;
}

/* Fails if weights or gradients are not memory of a device that takes only its own. */
static int check_memory(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    for (int weights = 0; o->device->owns && weights < (c->weights ? 2 : 1); weights++) {
        const void *const *memory = weights ? (const void *const *)c->weights : c->gradients;
        for (int i = 0, error = HALFSTEP_OK; i < c->n; i++, error = HALFSTEP_OK) {
            i += o->device->owns(&o->context, memory + i, c->n - i, &error);
            if (i == c->n || !c->gradients[i] || !o->tensors[c->first + i].tracks) continue;
            return hstep_fail(o, error, "the %s of tensor '%s': %s", weights ? "weights" : "gradient",
                              o->labels[c->first + i].name, o->device->why());
        }
    }
    return HALFSTEP_OK;
}

int hstep_check_ready(const struct hstep_request *s, enum hstep_part part)
{
    int error = hstep_begin_storage(s->o);
    if (!error) error = check_bound(s);
    if (!error) error = check_accumulates(s);
    if (!error) error = check_single(s);
    if (!error && part != HSTEP_PART_BEGIN) error = check_schedules(s);
    if (!error && part != HSTEP_PART_BEGIN) error = check_rates(s);
    if (!error && part != HSTEP_PART_BEGIN) error = check_preparable(s);
    if (!error && part == HSTEP_PART_FINISH) error = check_norms(s);
    if (!error && part == HSTEP_PART_ALL) error = check_alone(s);
    return error ? error : check_memory(s);
}
