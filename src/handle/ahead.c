/* Steps in advance. A tensor is stepped as soon as its gradient is there, into memory of its own, as if all gradients
 * were finite and nothing were clipped. The step that follows compares the constants that it decides with those of the
 * result. They hold all that an update depends on beside the bytes of weight, gradient and states: factors, keys of
 * random words, grids. If they are equal, the result is what the step would compute. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "handle/optimizer.h"
#include "tables/layout.h"

/* What is remembered of the result of one tensor. */
struct hstep_result {
    int there;        /* 1: there is a result */
    int scan, summed; /* how the gradient was scanned */
    double gradient_scale;
    void *weight, *states;              /* where the result is */
    struct hstep_update update;         /* the constants that it was made with */
    int64_t squares[HSTEP_EXACT_LIMBS]; /* of the gradient, if summed */
};

/* Returns why a tensor cannot be stepped in advance, or NULL. */
static const char *obstacle(const halfstep_optimizer *o, const struct hstep_tensor *t)
{
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    if (!o->device->advance) return "the device is not the processor";
    if (o->storage) return "its states are in storage";
    if (rule->totals) return "its rule needs sums over all tensors";
    if (t->matrix || t->pairs) return "its rule steps matrices";
    if (rule->norms) return "its rule needs sums over the tensor";
    if (t->cautious) return "its group is cautious";
    if (t->sums) return "a state has one scale for the whole tensor";
    return NULL;
}

static int check_advance(const halfstep_optimizer *o, int32_t tensor)
{
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    if (!o->settled)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "the states have no memory yet; bind or allocate them first");
    const char *why = obstacle(o, &o->tensors[tensor]);
    return why ? hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                            "tensor '%s' cannot be stepped in advance, because %s; step it without `ahead`",
                            o->labels[tensor].name, why)
               : HALFSTEP_OK;
}

int halfstep_ahead_bytes(const halfstep_optimizer *o, int32_t tensor, uint64_t *bytes)
{
    if (!o || !bytes) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_advance(o, tensor);
    if (!error) *bytes = hstep_place_ahead(&o->tensors[tensor], NULL, NULL);
    return error;
}

uint64_t halfstep_redone_steps(const halfstep_optimizer *o) { return o ? o->redone : 0; }

void hstep_forget_results(halfstep_optimizer *o, int first, int n)
{
    if (!atomic_load(&o->results)) return;
    for (int i = first; i < first + n; i++) {
        if (o->labels[i].result) o->labels[i].result->there = 0;
        o->tensors[i].ahead = NULL;
    }
}

void hstep_free_results(halfstep_optimizer *o)
{
    for (int i = 0; i < o->n_tensors; i++) free(o->labels[i].result);
    free(o->ahead_weights);
}

/* ---- A step in advance ---- */

int hstep_step_ahead(struct hstep_request *s, const halfstep_ahead *ahead, struct hstep_single_scratch *scratch)
{
    halfstep_optimizer *o = s->o;
    struct hstep_call *c = &s->call;
    const int tensor = c->first;
    int error = check_advance(o, tensor);
    if (error || (error = hstep_check_ready(s, HSTEP_PART_FINISH))) return error;
    if (!ahead->states || (uintptr_t)ahead->states % 64 || (!ahead->weight && !c->micro) || !c->gradients[0])
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "tensor '%s': a step in advance needs a gradient, memory for the new weight, and memory for "
                          "the new states that is aligned to 64 bytes",
                          o->labels[tensor].name);
    struct hstep_result *r = o->labels[tensor].result;
    if (!r && !(r = o->labels[tensor].result = calloc(1, sizeof *r)))
        return hstep_fail_memory(o, sizeof *r, "a step in advance of tensor '%s'", o->labels[tensor].name);
    atomic_store(&o->results, 1);
    r->there = 0;

    /* Statistics and verdict are those that the tensor would have in a step of all tensors. */
    void *const before = c->micro ? NULL : c->weights[0], *const after = ahead->weight;
    c->single = 0;
    c->weights = c->micro ? NULL : &after;
    c->weights_before = c->micro ? NULL : &before;
    c->statistics = scratch->statistics;
    memset(scratch->statistics, 0, sizeof scratch->statistics);
    if ((error = o->device->scan(c))) return error;
    r->summed = hstep_is_clipped(c);
    memcpy(r->squares, scratch->statistics, sizeof r->squares);
    c->clip_norm = 0.0;
    if ((error = o->device->decide(c))) return error;
    if (c->verdict->refused || c->verdict->offenders)
        return hstep_fail_gradient(o, c->verdict->offender, c->verdict->too_large);

    struct hstep_tensor copy;
    hstep_place_ahead(&o->tensors[tensor], ahead->states, &copy);
    c->plan.tensors = (struct hstep_tensor *)((uintptr_t)&copy - (uintptr_t)tensor * sizeof copy);
    if ((error = o->device->advance(c))) return error;
    r->update = c->plan.updates[tensor];
    r->scan = c->scan;
    r->gradient_scale = c->gradient_scale;
    r->weight = ahead->weight;
    r->states = ahead->states;
    r->there = 1;
    return HALFSTEP_OK;
}

/* ---- A step that takes results ---- */

int hstep_find_results(struct hstep_request *s, const halfstep_ahead *ahead)
{
    halfstep_optimizer *o = s->o;
    struct hstep_call *c = &s->call;
    if (!ahead) {
        hstep_forget_results(o, 0, o->n_tensors);
        return HALFSTEP_OK;
    }
    if (!o->device->adopt || o->storage)
        return hstep_fail(
            o, HALFSTEP_ERROR_UNSUPPORTED,
            "only a handle on the processor with states in memory steps in advance; call without `ahead`");
    if (!o->ahead_weights && !(o->ahead_weights = calloc((size_t)o->n_tensors + 1, sizeof *o->ahead_weights)))
        return hstep_fail_memory(o, (uint64_t)o->n_tensors * sizeof *o->ahead_weights, "the weights of a step");
    for (int i = 0; i < c->n; i++) {
        const struct hstep_result *r = o->labels[i].result;
        const int same = r && r->there && ahead[i].states && ahead[i].states == r->states && c->gradients[i] &&
                         (c->micro || ahead[i].weight == r->weight) && r->scan == c->scan &&
                         r->summed == hstep_is_clipped(c) && r->gradient_scale == c->gradient_scale;
        o->tensors[i].ahead = same ? ahead[i].states : NULL;
        if (c->weights) o->ahead_weights[i] = ahead[i].weight ? ahead[i].weight : c->weights[i];
    }
    c->weights_before = c->weights;
    if (c->weights) c->weights = o->ahead_weights;
    return HALFSTEP_OK;
}

void hstep_add_squares(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    if (c->single || !hstep_is_clipped(c) || !atomic_load(&o->results)) return;
    for (int i = c->first; i < c->first + c->n; i++)
        for (int k = 0; k < HSTEP_EXACT_LIMBS && o->tensors[i].ahead; k++)
            c->statistics[k] += o->labels[i].result->squares[k];
    hstep_exact_normalize(c->statistics);
}

int hstep_take_results(const struct hstep_request *s)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    int redone = 0;
    if (!o->device->adopt || c->single || c->verdict->refused) return HALFSTEP_OK;
    if (!atomic_load(&o->results) && !c->weights_before) return HALFSTEP_OK;
    for (int i = c->first; i < c->first + c->n; i++) {
        const struct hstep_result *r = o->labels[i].result;
        const struct hstep_update *u = &c->plan.updates[i];
        struct hstep_tensor *t = &o->tensors[i];
        if (!r || !r->there) continue;
        if (u->skip || memcmp(u, &r->update, sizeof *u)) t->ahead = NULL;
        redone |= !u->skip && !t->ahead;
    }
    o->redone += (uint64_t)redone;
    return o->device->adopt(c);
}
