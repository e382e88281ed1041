/* Steps in advance. A call about one tensor makes its next step in memory of the caller. The step of all tensors then
 * compares the constants that it decides with those of the result. */
#include <stdlib.h>
#include <string.h>

#include "decide/pass.h"
#include "handle/checks.h"
#include "handle/plan.h"
#include "handle/states/storage.h"
#include "handle/step/ahead.h"
#include "handle/step/ready.h"

/* A result of a step in advance: where it is, and what it was made of apart from the constants of its update. */
struct result {
    int made; /* 1: there is one */
    halfstep_ahead place;
    const void *weight, *gradient;
    struct hstep_scan scan; /* what was looked for in the gradient; nothing was found */
    int64_t squares[HSTEP_EXACT_LIMBS];
};

/* Arrays with an element for each tensor. */
struct hstep_results {
    struct result *result;
    struct hstep_tensor *tensors; /* with addresses in the caller's memory */
    struct hstep_update *updates; /* that made the results */
    /* Of the step that uses them: */
    const void **gradients; /* that are left to scan */
    void **weights;         /* where the new weights go */
    struct hstep_origin *origins;
};

/* In hstep_update.skip: the result stands, so the tensor is not stepped again. */
enum { STANDS = 2 };

/* ---- Memory ---- */

static struct hstep_results *results_of(const halfstep_optimizer *o) { return atomic_load(&o->results); }

static void free_results(struct hstep_results *r)
{
    free(r->result);
    free(r->tensors);
    free(r->updates);
    free(r->gradients);
    free(r->weights);
    free(r->origins);
    free(r);
}

void hstep_close_results(halfstep_optimizer *o)
{
    if (results_of(o)) free_results(results_of(o));
}

/* Returns the results of a handle, which the first call makes, or NULL if memory is short. */
static struct hstep_results *open_results(halfstep_optimizer *o)
{
    struct hstep_results *r = results_of(o), *before = NULL;
    const size_t n = (size_t)o->n_tensors;
    if (r || !(r = calloc(1, sizeof *r))) return r;
    r->result = calloc(n, sizeof *r->result);
    r->tensors = calloc(n, sizeof *r->tensors);
    r->updates = calloc(n, sizeof *r->updates);
    r->gradients = calloc(n, sizeof *r->gradients);
    r->weights = calloc(n, sizeof *r->weights);
    r->origins = calloc(n, sizeof *r->origins);
    const int whole = r->result && r->tensors && r->updates && r->gradients && r->weights && r->origins;
    if (whole && atomic_compare_exchange_strong(&o->results, &before, r)) return r;
    free_results(r); /* memory is short, or another thread was first */
    return before;
}

void hstep_forget_results(halfstep_optimizer *o, int first, int n)
{
    struct hstep_results *r = results_of(o);
    for (int i = first; r && i < first + n; i++) r->result[i].made = 0;
}

/* ---- What can be stepped in advance ---- */

static int check_device(const halfstep_optimizer *o)
{
    if (o->device->shared && !o->device->asynchronous && !o->storage) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "nothing can be stepped in advance %s; call without `ahead`",
                      o->storage ? "while the states are in a storage" : "on a device other than the processor");
}

static int check_tensor(const halfstep_optimizer *o, int tensor, const struct hstep_tensor *t)
{
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    const char *why = t->matrix || t->pairs ? "its rule steps matrices"
                      : rule->totals        ? "its rule needs sums over all tensors"
                      : rule->norms         ? "its rule needs sums over the tensor"
                      : t->cautious         ? "its group is cautious"
                      : t->sums             ? "a state has one scale for the tensor"
                                            : NULL;
    if (!why) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                      "tensor '%s' cannot be stepped in advance, because %s; step it without `ahead`",
                      o->labels[tensor].name, why);
}

int halfstep_ahead_bytes(const halfstep_optimizer *o, int32_t tensor, uint64_t *bytes)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, bytes);
    *bytes = 0;
    int error = hstep_check_tensor(o, tensor);
    if (error || (error = check_device(o))) return error;
    const struct hstep_tensor t = hstep_laid_out(o, tensor);
    if ((error = check_tensor(o, tensor, &t))) return error;
    *bytes = hstep_describe(&t, tensor, 0, t.n_rows, 0).state_bytes;
    return HALFSTEP_OK;
}

uint64_t halfstep_redone_steps(const halfstep_optimizer *o) { return o ? o->redone_steps : 0; }

/* ---- Making a result ---- */

/* Fails if the caller has given no place for a result, or no gradient. */
static int check_place(const struct hstep_request *s, uint64_t bytes)
{
    const struct hstep_call *c = &s->call;
    const char *name = s->o->labels[c->first].name;
    if (!c->gradients[0])
        return hstep_fail(s->o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has no gradient for a step in advance", name);
    if (!s->ahead->states || (!s->ahead->weight && !c->micro))
        return hstep_fail(s->o, HALFSTEP_ERROR_ARGUMENT, "ahead: NULL memory for a result of tensor '%s'", name);
    if (bytes && (uintptr_t)s->ahead->states % 64)
        return hstep_fail(s->o, HALFSTEP_ERROR_ARGUMENT, "ahead: the states of tensor '%s' are not aligned to 64 bytes",
                          name);
    return HALFSTEP_OK;
}

/* Points the slots of a tensor into the memory of its result. */
static void place_planes(struct hstep_tensor *t, const halfstep_piece *p, char *memory)
{
    for (struct hstep_cursor c = {0}; hstep_next_plane(t, &c);)
        *c.place = memory + hstep_range_of(p, c.slot, c.extra).offset;
}

int hstep_step_in_advance(const struct hstep_request *s, int64_t *statistics)
{
    halfstep_optimizer *o = s->o;
    const int i = s->call.first;
    const struct hstep_tensor *t = &o->tensors[i];
    int error = check_device(o);
    if (!error) error = hstep_check_ready(s, HSTEP_PART_NORMS);
    if (!error) error = check_tensor(o, i, t);
    const halfstep_piece planes = hstep_describe(t, i, 0, t->n_rows, 0); /* a result is laid out as a piece */
    if (!error) error = check_place(s, planes.state_bytes);
    if (error) return error;
    struct hstep_results *all = open_results(o);
    if (!all) return hstep_fail_memory(o, (uint64_t)o->n_tensors * sizeof *all->tensors, "results of steps in advance");
    struct result *r = &all->result[i];
    /* The call is a step of all tensors as far as this one is concerned. */
    struct hstep_call c = s->call;
    c.single = 0;
    c.statistics = statistics;
    c.plan.tensors = all->tensors;
    c.plan.updates = all->updates;
    all->tensors[i] = *t;
    r->made = 0;
    memset(statistics, 0, (size_t)hstep_sums_offset(1) * sizeof *statistics);
    if ((error = o->device->scan(&c))) return error;
    const int64_t flag = statistics[hstep_flags_offset()];
    if (flag) return hstep_fail_gradient(o, i, !hstep_is_nonfinite(flag));
    hstep_prepare_update(&c, i, 1.0, NULL, NULL, &all->updates[i]);
    place_planes(&all->tensors[i], &planes, s->ahead->states);
    void *weight = c.micro ? NULL : s->ahead->weight;
    const struct hstep_origin origin = {c.micro ? NULL : s->call.weights[0], t};
    c.weights = c.micro ? NULL : &weight;
    c.origins = &origin;
    if ((error = o->device->update(&c, i, 1, HSTEP_PASS_UPDATE))) return error;
    r->place = *s->ahead;
    r->weight = origin.weight;
    r->gradient = c.gradients[0];
    r->scan = hstep_scan_of(&c, t);
    if (!hstep_is_scanned(&c)) r->scan.format = HSTEP_FORMAT_NONE;
    memcpy(r->squares, statistics, sizeof r->squares);
    r->made = 1;
    return HALFSTEP_OK;
}

/* ---- Using results ---- */

int hstep_check_ahead(const halfstep_optimizer *o, const halfstep_call *call, enum hstep_part part)
{
    if (!call->ahead) return HALFSTEP_OK;
    if (call->kind == HALFSTEP_CALL_ROUND || (call->kind == HALFSTEP_CALL_TENSOR && part != HSTEP_PART_ALL))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "call: ahead must be NULL for %s",
                          call->kind == HALFSTEP_CALL_ROUND ? "a round" : "the parts of a call about one tensor");
    return check_device(o);
}

/* Returns the result of a tensor, if the caller still has it and it was made of the same gradient. */
static const struct result *result_at_hand(const struct hstep_request *s, int i)
{
    const struct hstep_results *all = results_of(s->o);
    const struct result *r = all && s->ahead ? &all->result[i] : NULL;
    if (!r || !r->made || r->gradient != s->call.gradients[i] || r->place.states != s->ahead[i].states ||
        (!s->call.micro && r->place.weight != s->ahead[i].weight))
        return NULL;
    return r;
}

/* Tells whether the scan of a call would find what a result's scan has found. */
static int is_scanned(const struct hstep_call *c, const struct hstep_tensor *t, const struct result *r)
{
    const struct hstep_scan scan = hstep_scan_of(c, t);
    if (!hstep_is_scanned(c)) return r->scan.format == HSTEP_FORMAT_NONE;
    return scan.format == r->scan.format && scan.summed == r->scan.summed && scan.limit == r->scan.limit;
}

int hstep_scan_rest(const struct hstep_request *s)
{
    struct hstep_call c = s->call;
    struct hstep_results *all = results_of(s->o);
    for (int i = 0; all && s->ahead && i < c.n; i++) {
        const struct result *r = result_at_hand(s, i);
        if (r && !is_scanned(&c, &s->o->tensors[i], r)) r = NULL;
        if (r) hstep_exact_merge(c.statistics, r->squares);
        all->gradients[i] = r ? NULL : s->call.gradients[i];
        c.gradients = all->gradients;
    }
    return s->o->device->scan(&c);
}

/* Decides where the bytes of a tensor come from. Marks its update if its result stands. Returns 1 if it is made again
 * although its result was at hand. */
static int use_result(const struct hstep_request *s, struct hstep_results *all, int i)
{
    const struct hstep_call *c = &s->call;
    struct hstep_update *u = &c->plan.updates[i];
    const struct result *r = u->skip ? NULL : result_at_hand(s, i);
    all->origins[i] = (struct hstep_origin){NULL, NULL};
    all->weights[i] = c->micro ? NULL : c->weights[i];
    if (!c->micro && !s->ahead[i].weight) return 0;
    if (r && (c->micro || r->weight == c->weights[i]) && !memcmp(u, &all->updates[i], sizeof *u)) {
        all->origins[i].states = &all->tensors[i];
        u->skip = STANDS;
        return 0;
    }
    if (!c->micro && c->weights[i]) {
        all->weights[i] = s->ahead[i].weight;
        all->origins[i].weight = c->weights[i];
    }
    return r != NULL;
}

int hstep_use_results(struct hstep_request *s)
{
    halfstep_optimizer *o = s->o;
    struct hstep_call *c = &s->call;
    if (!s->ahead || !c->n) return HALFSTEP_OK;
    struct hstep_results *all = open_results(o);
    if (!all) return hstep_fail_memory(o, (uint64_t)o->n_tensors * sizeof *all->tensors, "results of steps in advance");
    int redone = 0, error = HALFSTEP_OK;
    for (int i = 0; !error && i < c->n; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        struct hstep_origin *from = &all->origins[i];
        redone |= use_result(s, all, i);
        if (!from->weight || !(t->sums || t->matrix || t->pairs)) continue;
        /* Passes before the update read this weight. */
        error = o->device->copy(c->context, all->weights[i], from->weight, t->slot[HALFSTEP_SLOT_WEIGHT].code_bytes);
        from->weight = NULL;
    }
    o->redone_steps += (uint64_t)redone;
    c->origins = all->origins;
    if (!c->micro) c->weights = all->weights;
    return error;
}

void hstep_end_results(const struct hstep_request *s)
{
    for (int i = 0; s->ahead && i < s->call.n; i++)
        if (s->call.plan.updates[i].skip == STANDS) s->call.plan.updates[i].skip = 0;
    hstep_forget_results(s->o, s->call.first, s->call.n);
}
