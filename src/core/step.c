/* One step over all tensors: statistics, sums, decision, update, in calls to the device. All, one tensor, halves and
 * micro-steps are the same steps, with a public face each. Over 500 lines because of these: one place for what is
 * checked, in which order, before anything changes. */
#include "core/layout.h"
#include "core/lock.h"
#include "core/optimizer.h"
#include "core/prepare.h"
#include "dispatch.h"

/* ---- What a call is about ---- */

/* All tensors, or one, beside what the device is told of them. */
struct span {
    halfstep_optimizer *o;
    struct hstep_call call;
    int *norms_made; /* by the call between begin and finish */
};

static struct span span_of(halfstep_optimizer *o, int first, int n, int micro, const void *const *gradients)
{
    struct hstep_plan plan = o->plan;
    /* Of a handle without tensors, which may never settle. */
    if (!o->settled) {
        plan.groups = o->groups;
        plan.n_groups = o->n_groups;
    }
    return (struct span){
        .o = o,
        .call = {.context = &o->context,
                 .plan = plan,
                 .seed = o->seed,
                 .generator = o->generator,
                 .scan = o->scan,
                 .clip = o->clip,
                 .gradient_scale = o->gradient_scale,
                 .clip_norm = o->clip_norm,
                 .round_norm = o->round_norm,
                 .first = first,
                 .n = n,
                 .micro = micro,
                 .gradients = gradients},
    };
}

/* The sums of tensors of a handle, settled or not. */
static int64_t count_sums(const halfstep_optimizer *o, int first, int n)
{
    int64_t sums = 0;
    if (o->settled && (!o->sums || n == o->n_tensors)) return o->sums;
    for (int i = first; i < first + n && o->settled; i++) sums += o->tensors[i].sums;
    for (int i = first; i < first + n && !o->settled; i++) {
        struct hstep_tensor t = o->tensors[i];
        hstep_lay_out(&t);
        sums += t.sums;
    }
    return sums;
}

/* Numbers in the statistics: of sums alone, and all. */
static int64_t sums_count(const struct span *s)
{
    return count_sums(s->o, s->call.first, s->call.n) * HSTEP_EXACT_LIMBS;
}
static int64_t statistics_count(const struct span *s) { return hstep_sums_offset(s->call.n) + sums_count(s); }

#define MAX_SINGLE_STATISTICS (HSTEP_STATISTICS_HEAD + 1 + HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS)

/* ---- Checks ---- */

/* What steps look for in every tensor, and hardly ever find, is counted when the handle is settled or remembered: a
 * thousand small tensors would pay for each look. */
static int check_ready(const struct span *s)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    if (!o->settled) {
        if (o->n_tensors) return hstep_fail(o, HALFSTEP_ERROR_ORDER, "the states have no memory yet");
        return HALFSTEP_OK;
    }
    int error = o->bound ? HALFSTEP_OK : hstep_check_bound(o, c->first, c->n);
    if (error) return error;
    if (!c->single && !o->bound) o->bound = 1;
    const struct hstep_tensor *t = &o->tensors[c->first];
    for (int i = 0; c->weights && i < c->n; i++)
        if (!c->weights[i] && c->gradients[i] && t[i].runs)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': a gradient, but NULL weights",
                              o->labels[c->first + i].name);
    for (int i = 0; o->missing == HSTEP_MISSING_ERROR && i < c->n; i++)
        if (!c->gradients[i])
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has no gradient", o->labels[c->first + i].name);
    return HALFSTEP_OK;
}

/* What one call does all by itself must not depend on the elements of a tensor that other processes hold. */
static int check_alone(const struct span *s)
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
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s' is a part of one, and %s: step it by begin and finish", o->labels[i].name,
                              what);
    }
    return HALFSTEP_OK;
}

/* Sums over a tensor can be made by the way only where all of it is. */
static int check_norms(const struct span *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    for (int i = c->first; o->parts && !*s->norms_made && i < c->first + c->n; i++)
        if (c->gradients[i - c->first] && hstep_needs_sums(&o->tensors[i], c->micro) && !hstep_is_whole(&o->tensors[i]))
            return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s' is a part of one: %s() comes before finish",
                              o->labels[i].name, c->single ? "halfstep_step_tensor_norms" : "halfstep_step_norms");
    return HALFSTEP_OK;
}

/* Micro-steps keep the gradient only where a state does. */
static int check_accumulates(const struct span *s)
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
                              "tensor '%s': %s%s%s keeps no gradient, micro-steps would lose it", o->labels[i].name,
                              rule->name, state < 0 ? "" : " without ", state < 0 ? "" : rule->state[state].unless);
        if (g->decay == HSTEP_DECAY_L2 && g->hyper[HSTEP_WEIGHT_DECAY] != 0.0)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s': with micro-steps l2 decay would reach only the last gradient of a step",
                              o->labels[i].name);
        if (hstep_needs_sums(t, 1) && !hstep_is_whole(t))
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s' is a part of one, and a scale of its states a sum over all",
                              o->labels[i].name);
    }
    return HALFSTEP_OK;
}

/* Why constants cannot be worked out. */
static int check_preparable(const struct span *s)
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
    }
    return HALFSTEP_OK;
}

/* ---- Memory of the device ---- */

/* Tensors of a span, and groups where all are stepped, to a device with memory of its own; or what it made of them. */
static int hand_over(const struct span *s, int back)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    if (o->device->shared) return HALFSTEP_OK;
    struct hstep_tensor *ours = o->tensors + c->first, *theirs = c->plan.tensors + c->first;
    uint64_t bytes = (uint64_t)c->n * sizeof *ours, group_bytes = (uint64_t)o->n_groups * sizeof *o->groups;
    int error = o->device->copy(&o->context, back ? ours : theirs, back ? theirs : ours, bytes);
    if (!error && !(back && c->single))
        error = o->device->copy(&o->context, back ? o->groups : c->plan.groups, back ? c->plan.groups : o->groups,
                                group_bytes);
    return error;
}

/* Waits, and tells what was decided. */
static int wait_for_verdict(const struct span *s, struct hstep_verdict *verdict)
{
    const halfstep_optimizer *o = s->o;
    int error = hand_over(s, 1);
    if (!error) error = o->device->copy(&o->context, verdict, s->call.verdict, sizeof *verdict);
    return hstep_wait(o, error);
}

/* ---- Steps ---- */

static int begin(const struct span *s)
{
    const struct hstep_call *c = &s->call;
    *s->norms_made = 0;
    int error = s->o->device->zero(c->context, c->statistics, (uint64_t)statistics_count(s) * sizeof *c->statistics);
    return error ? error : s->o->device->scan(c);
}

static int zero_sums(const struct span *s)
{
    const struct hstep_call *c = &s->call;
    int64_t count = sums_count(s);
    if (!count) return HALFSTEP_OK;
    return s->o->device->zero(c->context, c->statistics + hstep_sums_offset(c->n),
                              (uint64_t)count * sizeof *c->statistics);
}

/* What finish will refuse is skipped, and needs no sums. */
static int norms(const struct span *s)
{
    const struct hstep_device *device = s->o->device;
    const struct hstep_call *c = &s->call;
    int64_t count = sums_count(s);
    int error;
    if (!count) return HALFSTEP_OK;
    if ((error = device->decide(c)) || (error = zero_sums(s)) || (error = device->sum(c, c->first, c->n)) ||
        (error = device->carry(c->context, c->statistics + hstep_sums_offset(c->n), count / HSTEP_EXACT_LIMBS)))
        return error;
    *s->norms_made = 1;
    return HALFSTEP_OK;
}

/* Three passes: the direction into the workspace, its transformation, the change of the weight. */
static int update_matrix(const struct span *s, int tensor)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    if (!c->gradients[tensor - c->first] || !o->tensors[tensor].runs) return HALFSTEP_OK;
    /* Only calls of halfstep_step_tensor() on other threads can meet here. */
    hstep_lock(&o->workspace_lock);
    int error = o->device->update(c, tensor, 1, HSTEP_PASS_DIRECTION);
    if (!error && !c->micro && !(error = o->device->transform(c, tensor)))
        error = o->device->update(c, tensor, 1, HSTEP_PASS_CHANGE);
    hstep_unlock(&o->workspace_lock);
    return error;
}

static int update_tensors(const struct span *s, int first, int n)
{
    const halfstep_optimizer *o = s->o;
    int matrices = 0, error;
    for (int i = first; o->matrices && i < first + n; i++) matrices += o->tensors[i].matrix;
    if (matrices < n && (error = o->device->update(&s->call, first, n, HSTEP_PASS_UPDATE))) return error;
    for (int i = first; matrices && i < first + n; i++)
        if (o->tensors[i].matrix && (error = update_matrix(s, i))) return error;
    return HALFSTEP_OK;
}

/* Tensors that a second pass should still find in the cache are handled together. */
#define BATCH_ELEMENTS ((int64_t)1 << 18)

/* Updates of everything that is prepared. With rules of two passes, their sums come first, unless they are made. From
 * the last tensor on, whose gradient the scan has left in the caches. */
static int update_all(const struct span *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    int error;
    if (!o->sums) return update_tensors(s, c->first, c->n);
    for (int end = c->first + c->n, first = end; end > c->first; end = first) {
        int64_t elements = 0;
        int sums = 0;
        while (first > c->first && (first == end || elements < BATCH_ELEMENTS)) {
            first--;
            elements += o->tensors[first].n_rows * o->tensors[first].n_columns;
            sums |= c->gradients[first - c->first] && hstep_needs_sums(&o->tensors[first], c->micro);
        }
        if ((sums && !*s->norms_made && (error = o->device->sum(c, first, end - first))) ||
            (sums && (error = o->device->decide_sums(c, first, end - first))) ||
            (error = update_tensors(s, first, end - first)))
            return error;
    }
    return HALFSTEP_OK;
}

/* What a refused step, or a tensor that was left out, is told as. */
static int refuse(const struct span *s, const struct hstep_verdict *v)
{
    halfstep_optimizer *o = s->o;
    atomic_fetch_add(&o->skipped, v->refused ? 1 : (uint64_t)v->offenders);
    atomic_store(&o->nonfinite_tensor, v->offender);
    if (!v->offenders) return hstep_fail(o, HALFSTEP_NONFINITE, "the norm of the gradients is not finite");
    return hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is not finite", o->labels[v->offender].name);
}

/* The decision and the update. weights are NULL in a micro-step. */
static int finish(const struct span *s)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    struct hstep_verdict verdict;
    int error;
    if ((error = o->device->decide(c)) || (!*s->norms_made && (error = zero_sums(s))) || (error = update_all(s)) ||
        (error = o->device->count(c)))
        return hstep_wait(o, error);
    if ((error = wait_for_verdict(s, &verdict))) return error;
    *s->norms_made = 0;
    hstep_show(o, c->first, c->n);
    if (!verdict.refused && !c->micro && !c->single) o->gradient_norm = verdict.norm;
    return verdict.refused || verdict.offenders ? refuse(s, &verdict) : HALFSTEP_OK;
}

/* What a call does with its span. ALONE is all of it. */
enum call { BEGIN, NORMS, FINISH, ALONE };

/* statistics: written by BEGIN and NORMS, read by FINISH. own: room of the device for as many. */
static int make(struct span *s, enum call call, int64_t *statistics, int64_t *own)
{
    const halfstep_optimizer *o = s->o;
    int error = check_ready(s);
    if (error || (error = check_accumulates(s)) || (call != BEGIN && (error = check_preparable(s))) ||
        (call == FINISH && (error = check_norms(s))) || (call == ALONE && (error = check_alone(s))))
        return error;
    s->call.statistics = call == BEGIN || call == NORMS ? statistics : own;
    error = hand_over(s, 0);
    if (!error && call == FINISH)
        error = o->device->copy(&o->context, own, statistics, (uint64_t)statistics_count(s) * sizeof *own);
    if (!error && (call == BEGIN || call == ALONE)) error = begin(s);
    if (!error && call == NORMS) error = norms(s);
    return error || call == BEGIN || call == NORMS ? hstep_wait(o, error) : finish(s);
}

/* ---- The public faces: arguments, and the floating-point environment of what is computed here ---- */

int64_t halfstep_norms_offset(const halfstep_optimizer *o) { return o ? hstep_sums_offset(o->n_tensors) : 0; }

int64_t halfstep_statistics_count(const halfstep_optimizer *o)
{
    if (!o) return 0;
    return hstep_sums_offset(o->n_tensors) + count_sums(o, 0, o->n_tensors) * HSTEP_EXACT_LIMBS;
}

int64_t halfstep_tensor_norms_offset(void) { return hstep_sums_offset(1); }

int64_t halfstep_tensor_statistics_count(const halfstep_optimizer *o, int32_t tensor)
{
    if (!o || tensor < 0 || tensor >= o->n_tensors) return 0;
    return hstep_sums_offset(1) + count_sums(o, tensor, 1) * HSTEP_EXACT_LIMBS;
}

static int call_all(halfstep_optimizer *o, enum call call, int micro, void *const *weights,
                    const void *const *gradients, const int64_t *statistics)
{
    if (!o || (call != ALONE && !statistics) || (o->n_tensors && (!gradients || (!weights && !micro && call != BEGIN))))
        return HALFSTEP_ERROR_ARGUMENT;
    struct span s = span_of(o, 0, o->n_tensors, micro, gradients);
    s.norms_made = &o->norms_made;
    s.call.weights = weights;
    s.call.verdict = o->verdict;
    struct hstep_fp fp = hstep_fp_enter();
    int result = make(&s, call, (int64_t *)(uintptr_t)statistics, o->plan.statistics);
    hstep_fp_leave(fp);
    return result;
}

/* Statistics and a verdict of one tensor, so that several threads may each step one. */
struct room {
    int64_t statistics[MAX_SINGLE_STATISTICS];
    struct hstep_verdict verdict;
};

static int call_one(halfstep_optimizer *o, enum call call, int micro, int32_t tensor, void *weight,
                    const void *gradient, const int64_t *statistics)
{
    if (!o || (call != ALONE && !statistics)) return HALFSTEP_ERROR_ARGUMENT;
    int result = hstep_check_tensor(o, tensor);
    if (result) return result;
    struct room here, *room = &here;
    if (!o->device->shared && (result = o->device->allocate(&o->context, sizeof *room, (void **)&room)))
        return hstep_fail(o, result, "no memory for a step of tensor '%s'", o->labels[tensor].name);
    struct span s = span_of(o, tensor, 1, micro, &gradient);
    s.norms_made = &o->labels[tensor].norms_made;
    s.call.single = 1;
    s.call.weights = micro || call == BEGIN ? NULL : &weight;
    s.call.verdict = &room->verdict;
    struct hstep_fp fp = hstep_fp_enter();
    result = make(&s, call, (int64_t *)(uintptr_t)statistics, room->statistics);
    hstep_fp_leave(fp);
    if (room != &here) o->device->release(room);
    return result;
}

int halfstep_step_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    return call_all(o, BEGIN, 0, NULL, gradients, statistics);
}

int halfstep_step_norms(halfstep_optimizer *o, void *const *weights, const void *const *gradients, int64_t *statistics)
{
    return call_all(o, NORMS, 0, weights, gradients, statistics);
}

int halfstep_step_finish(halfstep_optimizer *o, void *const *weights, const void *const *gradients,
                         const int64_t *statistics)
{
    return call_all(o, FINISH, 0, weights, gradients, statistics);
}

int halfstep_step(halfstep_optimizer *o, void *const *weights, const void *const *gradients)
{
    return call_all(o, ALONE, 0, weights, gradients, NULL);
}

int halfstep_step_tensor_begin(halfstep_optimizer *o, int32_t tensor, const void *gradient, int64_t *statistics)
{
    return call_one(o, BEGIN, 0, tensor, NULL, gradient, statistics);
}

int halfstep_step_tensor_norms(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient,
                               int64_t *statistics)
{
    return call_one(o, NORMS, 0, tensor, weight, gradient, statistics);
}

int halfstep_step_tensor_finish(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient,
                                const int64_t *statistics)
{
    return call_one(o, FINISH, 0, tensor, weight, gradient, statistics);
}

int halfstep_step_tensor(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient)
{
    return call_one(o, ALONE, 0, tensor, weight, gradient, NULL);
}

int halfstep_accumulate_states(halfstep_optimizer *o, const void *const *gradients)
{
    return call_all(o, ALONE, 1, NULL, gradients, NULL);
}

int halfstep_accumulate_states_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    return call_all(o, BEGIN, 1, NULL, gradients, statistics);
}

int halfstep_accumulate_states_finish(halfstep_optimizer *o, const void *const *gradients, const int64_t *statistics)
{
    return call_all(o, FINISH, 1, NULL, gradients, statistics);
}

int halfstep_accumulate_states_tensor(halfstep_optimizer *o, int32_t tensor, const void *gradient)
{
    return call_one(o, ALONE, 1, tensor, NULL, gradient, NULL);
}

int halfstep_accumulate_states_tensor_begin(halfstep_optimizer *o, int32_t tensor, const void *gradient,
                                            int64_t *statistics)
{
    return call_one(o, BEGIN, 1, tensor, NULL, gradient, statistics);
}

int halfstep_accumulate_states_tensor_finish(halfstep_optimizer *o, int32_t tensor, const void *gradient,
                                             const int64_t *statistics)
{
    return call_one(o, FINISH, 1, tensor, NULL, gradient, statistics);
}

/* ---- Rounds of release ---- */

/* statistics: limbs of the squares of all parts; NULL: the handle's own. */
static int end_round(halfstep_optimizer *o, const int64_t *statistics)
{
    struct hstep_verdict verdict;
    struct span s = span_of(o, 0, 0, 0, NULL);
    s.call.statistics = (int64_t *)(uintptr_t)statistics;
    s.call.verdict = o->verdict;
    struct hstep_fp fp = hstep_fp_enter();
    int error = hand_over(&s, 0);
    if (!error) error = o->device->end_round(&s.call);
    error = error ? hstep_wait(o, error) : wait_for_verdict(&s, &verdict);
    hstep_fp_leave(fp);
    if (error) return error;
    if (verdict.refused) return hstep_fail(o, HALFSTEP_NONFINITE, "the norm of the round is not finite");
    o->gradient_norm = o->round_norm = verdict.norm;
    return HALFSTEP_OK;
}

int halfstep_end_round(halfstep_optimizer *o)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    for (int i = 0; i < o->n_tensors && o->clip_norm > 0.0; i++)
        if (!hstep_is_whole(&o->tensors[i]))
            return hstep_fail(
                o, HALFSTEP_ERROR_UNSUPPORTED,
                "tensor '%s' is a part of one, and the norm of the round needs all of it: end the round by "
                "begin and finish",
                o->labels[i].name);
    return end_round(o, NULL);
}

int64_t halfstep_round_statistics_count(void) { return HSTEP_EXACT_LIMBS; }

int halfstep_end_round_begin(halfstep_optimizer *o, int64_t *statistics)
{
    if (!o || !statistics) return HALFSTEP_ERROR_ARGUMENT;
    int error = o->device->copy(&o->context, statistics, o->plan.round_squares, HSTEP_EXACT_LIMBS * sizeof *statistics);
    if (!error) error = o->device->carry(&o->context, statistics, 1);
    return hstep_wait(o, error);
}

int halfstep_end_round_finish(halfstep_optimizer *o, const int64_t *statistics)
{
    return !o || !statistics ? HALFSTEP_ERROR_ARGUMENT : end_round(o, statistics);
}
