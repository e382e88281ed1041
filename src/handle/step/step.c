/* Steps: statistics, sums, decision and update, as calls to the device. The caller's halfstep_call chooses between all
 * tensors and one, and makes a whole step, a part of one or a micro-step. Over 500 lines because all stages of a step
 * work on one request. */
#include "base/lock.h"
#include "base/structs.h"
#include "decide/pass.h"
#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/plan.h"
#include "handle/states/walk.h"
#include "handle/step/ahead.h"
#include "handle/step/ready.h"
#include "handle/tensors.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* ---- Requests ---- */

static struct hstep_request request_of(halfstep_optimizer *o, int first, int n, int micro, const void *const *gradients)
{
    if (o->device->shared) hstep_send_bound(o);
    return (struct hstep_request){
        .o = o,
        .call = {.context = &o->context,
                 .plan = o->plan,
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
                 .gradients = gradients,
                 .tensors = o->tensors},
    };
}

/* Returns the number of sums of n tensors, whether or not the handle is settled. */
static int64_t count_sums(const halfstep_optimizer *o, int first, int n)
{
    int64_t sums = 0;
    if (o->settled && (!o->sums || n == o->n_tensors)) return o->sums;
    for (int i = first; i < first + n; i++) sums += o->settled ? o->tensors[i].sums : hstep_laid_out(o, i).sums;
    return sums;
}

/* Returns how many integers the statistics of n tensors have. */
static int64_t count_statistics(const halfstep_optimizer *o, int first, int n)
{
    return hstep_sums_offset(n) + count_sums(o, first, n) * HSTEP_EXACT_LIMBS;
}

/* Returns the bytes of a request's statistics. */
static uint64_t statistics_bytes(const struct hstep_request *s)
{
    return (uint64_t)count_statistics(s->o, s->call.first, s->call.n) * sizeof(int64_t);
}

/* ---- Memory of the device ---- */

/* Copies the request's tensors to the device, or back if from_device is set. Copies the groups too, except back from a
 * step of one tensor. Does nothing if the device shares the process's memory. */
static int hand_over(const struct hstep_request *s, int from_device)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    if (o->device->shared) return HALFSTEP_OK;
    struct hstep_tensor *ours = o->tensors + c->first, *theirs = c->plan.tensors + c->first;
    uint64_t bytes = (uint64_t)c->n * sizeof *ours, group_bytes = (uint64_t)o->n_groups * sizeof *o->groups;
    int error = o->device->copy(&o->context, from_device ? ours : theirs, from_device ? theirs : ours, bytes);
    if (!error && !(from_device && c->single))
        error = o->device->copy(&o->context, from_device ? o->groups : c->plan.groups,
                                from_device ? c->plan.groups : o->groups, group_bytes);
    return error;
}

/* Copies the tensors and the verdict back from the device, and waits for them. */
static int wait_for_verdict(const struct hstep_request *s, struct hstep_verdict *verdict)
{
    const halfstep_optimizer *o = s->o;
    int error = hand_over(s, 1);
    if (!error) error = o->device->copy(&o->context, verdict, s->call.verdict, sizeof *verdict);
    return hstep_wait(o, error);
}

/* ---- Steps ---- */

static int begin(const struct hstep_request *s)
{
    const struct hstep_call *c = &s->call;
    *s->norms_made = 0;
    int error = s->o->device->zero(c->context, c->statistics, statistics_bytes(s));
    return error ? error : hstep_scan_rest(s);
}

static int zero_sums(const struct hstep_request *s)
{
    const struct hstep_call *c = &s->call;
    const int64_t first = hstep_sums_offset(c->n);
    const uint64_t bytes = statistics_bytes(s) - (uint64_t)first * sizeof *c->statistics;
    return bytes ? s->o->device->zero(c->context, c->statistics + first, bytes) : HALFSTEP_OK;
}

/* Makes the sums of matrices with vectors, which need new vectors. Puts the old vectors back afterwards,
 * because a step that is not finished must not change them. update_factored() makes the new ones again. */
static int sum_factored(const struct hstep_request *s, int tensor)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *vector[] = {hstep_vector_of(t, 0, HALFSTEP_EXTENT_ROWS),
                                         hstep_vector_of(t, 0, HALFSTEP_EXTENT_COLUMNS)};
    float *aside = c->plan.workspace + o->device->workspace(t);
    float *const place[] = {aside, aside + t->n_rows};
    int error = HALFSTEP_OK;
    hstep_lock(&o->workspace_lock);
    for (int i = 0; !error && i < 2; i++)
        error = o->device->copy(c->context, place[i], vector[i]->code, vector[i]->code_bytes);
    if (!error && !(error = o->device->cross(c, tensor, 0))) error = o->device->sum(c, tensor, 1);
    for (int i = 0; !error && i < 2; i++)
        error = o->device->copy(c->context, vector[i]->code, place[i], vector[i]->code_bytes);
    hstep_unlock(&o->workspace_lock);
    return error;
}

int hstep_sum_tensors(const struct hstep_request *s, int first, int n)
{
    const struct hstep_tensor *tensors = s->o->tensors;
    int error = HALFSTEP_OK;
    for (int i = first, end; !error && i < first + n; i = end) {
        for (end = i + 1; end < first + n && !tensors[i].pairs && !tensors[end].pairs; end++) {
        }
        if (!tensors[i].pairs) error = s->o->device->sum(&s->call, i, end - i);
        else if (tensors[i].tracks && s->call.gradients[i - s->call.first]) error = sum_factored(s, i);
    }
    return error;
}

/* Makes the sums of all tensors of the call. */
static int sum_all(const struct hstep_request *s)
{
    return s->o->storage ? hstep_walk(s, 1) : hstep_sum_tensors(s, s->call.first, s->call.n);
}

/* Makes the sums for finish. Decides first, so that a step which finish will refuse makes no sums. */
static int norms(const struct hstep_request *s)
{
    const struct hstep_device *device = s->o->device;
    const struct hstep_call *c = &s->call;
    const int64_t sums = count_sums(s->o, c->first, c->n);
    if (!sums || c->micro) return HALFSTEP_OK;
    int error = device->decide(c);
    if (!error) error = zero_sums(s);
    if (!error) error = sum_all(s);
    if (!error) error = device->carry(c->context, c->statistics + hstep_sums_offset(c->n), sums);
    if (!error) *s->norms_made = 1;
    return error;
}

static int transform(const halfstep_optimizer *o, const struct hstep_call *call, int tensor)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    const int64_t rows = hstep_matrix_rows(t, call->matrix);
    const struct hstep_own own = {.rows = rows, .row_length = t->row_length, .matrix = 1};
    int own_asked = 0;
    struct hstep_prepare p = {.own = &own, .own_was_asked = &own_asked};
    float k[HSTEP_MAX_SCALARS];
    hstep_prepare_rule(&o->groups[t->group], &p, k);
    const struct hstep_matrix m = {tensor, rows, t->row_length, k};
    return o->device->transform(call, &m);
}

/* Updates each matrix of a tensor in three passes: the direction into the workspace, its transformation, the change of
 * the weight. If matrices differ in their rows, makes the constants anew for each. */
static int update_matrices(const struct hstep_request *s, int tensor)
{
    halfstep_optimizer *o = s->o;
    struct hstep_call c = s->call;
    int error = HALFSTEP_OK;
    if (!c.gradients[tensor - c.first] || !o->tensors[tensor].tracks) return HALFSTEP_OK;
    /* Only calls about single tensors, on several threads, can compete for the workspace. */
    hstep_lock(&o->workspace_lock);
    for (c.matrix = 0; !error && c.matrix < o->tensors[tensor].matrices; c.matrix++) {
        if (o->tensors[tensor].blocks > 1 && (error = o->device->decide_sums(&c, tensor, 1))) break;
        error = o->device->update(&c, tensor, 1, HSTEP_PASS_DIRECTION);
        if (!error && !c.micro && !(error = transform(o, &c, tensor)))
            error = o->device->update(&c, tensor, 1, HSTEP_PASS_CHANGE);
    }
    hstep_unlock(&o->workspace_lock);
    return error;
}

/* Updates a matrix with vectors: makes the vectors, the sums that need them, and the update. */
static int update_factored(const struct hstep_request *s, int tensor)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    const struct hstep_tensor *t = &o->tensors[tensor];
    int error = HALFSTEP_OK;
    if (!c->gradients[tensor - c->first]) return HALFSTEP_OK;
    /* A part without elements has only its constants and scalars to renew, from the sums of norms(). */
    if (!t->tracks) return hstep_needs_sums(t, 0) ? o->device->decide_sums(c, tensor, 1) : HALFSTEP_OK;
    hstep_lock(&o->workspace_lock);
    for (int pair = 0; !error && pair < t->pairs; pair++) {
        error = o->device->cross(c, tensor, pair);
        if (error || pair || !hstep_needs_sums(t, 0)) continue;
        if (!*s->norms_made) error = o->device->sum(c, tensor, 1);
        if (!error) error = o->device->decide_sums(c, tensor, 1);
    }
    if (!error) error = o->device->update(c, tensor, 1, HSTEP_PASS_UPDATE);
    hstep_unlock(&o->workspace_lock);
    return error;
}

static int update_tensors(const struct hstep_request *s, int first, int n)
{
    const halfstep_optimizer *o = s->o;
    if (o->tensors[first].pairs) return update_factored(s, first);
    int matrices = 0, error;
    for (int i = first; o->matrices && i < first + n; i++) matrices += o->tensors[i].matrix;
    if (matrices < n && (error = o->device->update(&s->call, first, n, HSTEP_PASS_UPDATE))) return error;
    for (int i = first; matrices && i < first + n; i++)
        if (o->tensors[i].matrix && (error = update_matrices(s, i))) return error;
    return HALFSTEP_OK;
}

/* About the number of elements that a second pass still finds in the cache. */
#define BATCH_ELEMENTS ((int64_t)1 << 18)

/* Returns the first of the tensors before `end` that are updated together. A matrix with vectors is updated alone. */
static int start_of_slate(const struct hstep_request *s, int end)
{
    const halfstep_optimizer *o = s->o;
    int first = end;
    int64_t elements = 0;
    do {
        first--;
        elements += o->tensors[first].n_rows * o->tensors[first].n_columns;
    } while (first > s->call.first && !o->tensors[first].pairs && !o->tensors[first - 1].pairs &&
             (!o->sums || elements < BATCH_ELEMENTS));
    return first;
}

int hstep_step_tensors(const struct hstep_request *s, int first, int n, int made)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    const int totals = o->totals && !c->micro;
    int error = HALFSTEP_OK, sums = 0;
    for (int i = first; o->sums && i < first + n && !o->tensors[i].pairs; i++)
        sums |= c->gradients[i - c->first] && hstep_needs_sums(&o->tensors[i], c->micro);
    if (sums && !made) error = o->device->sum(c, first, n);
    if (!error && sums && !totals) error = o->device->decide_sums(c, first, n);
    return error ? error : update_tensors(s, first, n);
}

/* Updates all tensors of the call. For rules of two passes makes the sums first, unless they are made. Begins with the
 * last tensor, whose gradient the scan has left in the caches. */
static int update_all(const struct hstep_request *s)
{
    const halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    int error = HALFSTEP_OK, totals = o->totals && !c->micro, made = *s->norms_made || totals;
    if (!c->n) return HALFSTEP_OK;
    if (totals && !*s->norms_made) error = sum_all(s);
    if (!error && totals) error = o->device->decide_sums(c, c->first, c->n);
    if (error) return error;
    if (o->storage) return hstep_walk(s, 0);
    if (!o->sums && !o->factored) return update_tensors(s, c->first, c->n);
    for (int end = c->first + c->n, first; !error && end > c->first; end = first) {
        first = start_of_slate(s, end);
        error = hstep_step_tensors(s, first, end - first, made);
    }
    return error;
}

/* Counts a refused step, or refused tensors, and returns the error. */
static int refuse(const struct hstep_request *s, const struct hstep_verdict *v)
{
    halfstep_optimizer *o = s->o;
    atomic_fetch_add(&o->skipped, v->refused ? 1 : (uint64_t)v->offenders);
    atomic_store(&o->nonfinite_tensor, v->offender);
    atomic_store(&o->gradient_too_large, v->too_large);
    return hstep_fail_gradient(o, v->offender, v->too_large);
}

/* Submits the decision, sums, updates and counters to the device. weights are NULL in a micro-step. */
static int submit(const struct hstep_request *given)
{
    const struct hstep_device *device = given->o->device;
    struct hstep_request s = *given;
    int error = device->decide(&s.call);
    if (!error && !*s.norms_made) error = zero_sums(&s);
    if (!error) error = hstep_use_results(&s);
    if (!error) error = update_all(&s);
    hstep_end_results(&s);
    return error ? error : device->count(&s.call);
}

static int finish(const struct hstep_request *s)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_call *c = &s->call;
    struct hstep_verdict verdict;
    if (!c->single) hstep_keep_counts(o);
    int error = submit(s), flushed;
    if (error) return hstep_wait(o, error);
    if ((error = wait_for_verdict(s, &verdict))) return error;
    *s->norms_made = 0;
    hstep_show(o, c->first, c->n);
    if (!verdict.refused && !c->micro && !c->single) o->gradient_norm = verdict.norm;
    if (verdict.refused || verdict.offenders) error = refuse(s, &verdict);
    flushed = verdict.refused || c->single ? HALFSTEP_OK : hstep_commit(o, c->weights);
    return flushed ? flushed : error;
}

/* Makes a part of a step on an asynchronous device, which works on `scratch`. The caller's statistics may be memory of
 * the device or of the process. For those of the process it waits. */
static int make_asynchronously(struct hstep_request *s, enum hstep_part part, int64_t *statistics, int64_t *scratch)
{
    halfstep_optimizer *o = s->o;
    const struct hstep_device *device = o->device;
    const uint64_t bytes = statistics_bytes(s);
    int error = hstep_send(o);
    if (error) return error;
    s->call.statistics = scratch;
    if (part != HSTEP_PART_BEGIN) atomic_store(&o->device_ahead, 1);
    if (device->records && device->records(&o->context)) o->captured = 1;
    error = hstep_send_bound(o);
    if (!error && (part == HSTEP_PART_NORMS || part == HSTEP_PART_FINISH))
        error = device->copy(&o->context, scratch, statistics, bytes);
    if (!error && (part == HSTEP_PART_BEGIN || part == HSTEP_PART_ALL)) error = begin(s);
    if (!error && part == HSTEP_PART_NORMS) error = norms(s);
    if (part == HSTEP_PART_BEGIN || part == HSTEP_PART_NORMS) {
        if (!error) error = device->copy(&o->context, statistics, scratch, bytes);
        return error || hstep_check_owned(o, statistics) ? hstep_wait(o, error) : HALFSTEP_OK;
    }
    if (!error) error = submit(s);
    *s->norms_made = 0;
    return hstep_why(o, error);
}

/* Makes a part of a step. HSTEP_PART_BEGIN and HSTEP_PART_NORMS write statistics, HSTEP_PART_FINISH reads them. scratch
 * is memory of the device for as many integers. */
static int make(struct hstep_request *s, enum hstep_part part, int64_t *statistics, int64_t *scratch)
{
    const halfstep_optimizer *o = s->o;
    int error = hstep_check_ready(s, part);
    if (error || (o->scalars_unshared && (error = hstep_fetch(o)))) return error;
    hstep_share_scalars(s->o);
    if (o->device->asynchronous) return make_asynchronously(s, part, statistics, scratch);
    s->call.statistics = part == HSTEP_PART_BEGIN || part == HSTEP_PART_NORMS ? statistics : scratch;
    error = hand_over(s, 0);
    if (!error && part == HSTEP_PART_FINISH)
        error = o->device->copy(&o->context, scratch, statistics, statistics_bytes(s));
    if (!error && (part == HSTEP_PART_BEGIN || part == HSTEP_PART_ALL)) error = begin(s);
    if (!error && part == HSTEP_PART_NORMS) error = norms(s);
    return error || part == HSTEP_PART_BEGIN || part == HSTEP_PART_NORMS ? hstep_wait(o, error) : finish(s);
}

/* Fails if the call has no arrays that it reads. */
static int check_arrays(const halfstep_optimizer *o, const halfstep_call *call, enum hstep_part part)
{
    const int reads_weights = !call->micro && part != HSTEP_PART_BEGIN;
    if (!o->n_tensors || (call->gradients && (call->weights || !reads_weights))) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "the array of %s is NULL; give an array of pointers, one for %s",
                      call->gradients ? "weights" : "gradients",
                      call->kind == HALFSTEP_CALL_TENSOR ? "the tensor" : "each tensor");
}

/* ---- Calls about all tensors, and about one, in the floating-point environment of the library ---- */

static int run_all(halfstep_optimizer *o, const halfstep_call *call, enum hstep_part part)
{
    const int error = check_arrays(o, call, part);
    if (error) return error;
    struct hstep_request s = request_of(o, 0, o->n_tensors, call->micro, call->gradients);
    s.norms_made = &o->norms_made;
    s.call.weights = call->micro || part == HSTEP_PART_BEGIN ? NULL : call->weights;
    s.call.verdict = o->verdict;
    s.ahead = part == HSTEP_PART_NORMS ? NULL : call->ahead;
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, make(&s, part, call->statistics, o->plan.statistics));
}

static int run_one(halfstep_optimizer *o, const halfstep_call *call, enum hstep_part part)
{
    const int tensor = call->tensor;
    int result = hstep_check_tensor(o, tensor);
    if (result || (result = check_arrays(o, call, part))) return result;
    struct hstep_single_scratch here, *scratch = &here;
    if ((result = hstep_take_scratch(o, tensor, &scratch)))
        return result == HALFSTEP_ERROR_MEMORY
                   ? hstep_fail_memory(o, sizeof here, "a step of tensor '%s'", o->labels[tensor].name)
                   : hstep_why(o, result);
    struct hstep_request s = request_of(o, tensor, 1, call->micro, call->gradients);
    s.norms_made = &o->labels[tensor].norms_made;
    s.call.single = 1;
    s.call.weights = call->micro || part == HSTEP_PART_BEGIN ? NULL : call->weights;
    s.call.verdict = &scratch->verdict;
    struct hstep_fp fp = hstep_fp_enter();
    s.ahead = call->ahead;
    result = s.ahead ? hstep_step_in_advance(&s, scratch->statistics)
                     : make(&s, part, call->statistics, scratch->statistics);
    hstep_fp_leave(fp);
    hstep_leave_scratch(o, scratch);
    return result;
}

/* ---- Rounds of release ---- */

static int end_round_asynchronously(halfstep_optimizer *o, struct hstep_request *s, const int64_t *statistics)
{
    int error = hstep_send(o);
    if (error) return error;
    s->call.verdict = o->verdict;
    atomic_store(&o->device_ahead, 1);
    if (statistics) {
        s->call.statistics = o->plan.statistics;
        error = o->device->copy(&o->context, o->plan.statistics, statistics, HSTEP_EXACT_LIMBS * sizeof *statistics);
    }
    return hstep_why(o, error ? error : o->device->end_round(&s->call));
}

/* Ends a round. statistics are the limbs of the squares of all parts, or NULL for the handle's own. */
static int end_round(halfstep_optimizer *o, int64_t *statistics)
{
    struct hstep_verdict verdict;
    struct hstep_request s = request_of(o, 0, 0, 0, NULL);
    if (o->device->asynchronous) return end_round_asynchronously(o, &s, statistics);
    s.call.statistics = statistics;
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

static int begin_round(halfstep_optimizer *o, int64_t *statistics)
{
    const uint64_t bytes = HSTEP_EXACT_LIMBS * sizeof *statistics;
    int64_t *limbs = o->device->asynchronous ? o->plan.statistics : statistics;
    int error = o->device->copy(&o->context, limbs, o->plan.round_squares, bytes);
    if (!error) error = o->device->carry(&o->context, limbs, 1);
    if (!error && limbs != statistics) error = o->device->copy(&o->context, statistics, limbs, bytes);
    return hstep_wait(o, error);
}

static int run_round(halfstep_optimizer *o, const halfstep_call *call, enum hstep_part part)
{
    int error = hstep_begin_storage(o);
    if (error) return error;
    if (part == HSTEP_PART_BEGIN) return begin_round(o, call->statistics);
    if (part == HSTEP_PART_NORMS) return HALFSTEP_OK;
    for (int i = 0; i < o->n_tensors && o->clip_norm > 0.0 && part == HSTEP_PART_ALL; i++)
        if (!hstep_is_whole(&o->tensors[i]))
            return hstep_fail(
                o, HALFSTEP_ERROR_UNSUPPORTED,
                "only a part of tensor '%s' is here, and the norm of the round needs all of it; end the round "
                "by halfstep_run_begin() and halfstep_run_finish()",
                o->labels[i].name);
    hstep_keep_counts(o);
    error = end_round(o, call->statistics);
    return error ? error : hstep_commit(o, call->weights);
}

/* ---- Public functions ---- */

/* Fails if there is nothing to step yet. A handle without tensors takes part in steps that are made in parts, because
 * others may have some. */
static int check_settled(const halfstep_optimizer *o, enum hstep_part part)
{
    if (!o->n_tensors && (!o->settled || part == HSTEP_PART_ALL))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "there is no tensor to step; add one before the states exist");
    if (o->settled) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ORDER, "the states have no memory yet; bind or allocate them first");
}

int halfstep_step(halfstep_optimizer *o, void *const *weights, const void *const *gradients)
{
    const halfstep_call call = {.weights = weights, .gradients = gradients};
    HSTEP_NEED(o, o);
    const int error = check_settled(o, HSTEP_PART_ALL);
    return error ? error : run_all(o, &call, HSTEP_PART_ALL);
}

/* Copies the caller's call and fails with ARGUMENT if it is invalid. Error texts name `function`. */
static int take_call(const char *function, const halfstep_optimizer *o, const halfstep_call *given, halfstep_call *call)
{
    if (!o || !given)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "%s: %s is NULL", function, o ? "call" : "optimizer");
    if (!hstep_take_struct(call, sizeof *call, given)) return hstep_fail_struct(o, function, given);
    if (call->kind < HALFSTEP_CALL_STEP || call->kind > HALFSTEP_CALL_ROUND)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "call: unknown kind %d; known: 0 (step), 1 (tensor), 2 (round)",
                          (int)call->kind);
    if (call->micro < 0 || call->micro > 1 || (call->micro && call->kind == HALFSTEP_CALL_ROUND))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "call: micro = %d; allowed: 0, and 1 unless the call ends a round", (int)call->micro);
    if (call->tensor && call->kind != HALFSTEP_CALL_TENSOR)
        return hstep_fail(
            o, HALFSTEP_ERROR_ARGUMENT,
            "call: tensor = %d, but kind is %d, which is not about one tensor; set kind too, or tensor = 0",
            (int)call->tensor, (int)call->kind);
    if (call->gradients && call->kind == HALFSTEP_CALL_ROUND)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "call: the end of a round reads no gradients; set gradients to NULL, or another kind");
    return HALFSTEP_OK;
}

static int run(const char *function, halfstep_optimizer *o, const halfstep_call *given, enum hstep_part part)
{
    halfstep_call call = {0};
    int error = take_call(function, o, given, &call);
    if (error || (error = check_settled(o, part))) return error;
    if ((part == HSTEP_PART_ALL) != !call.statistics)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          call.statistics ? "call: statistics must be NULL for halfstep_run()"
                                          : "call: statistics must not be NULL for begin, norms and finish");
    if ((error = hstep_check_ahead(o, &call, part))) return error;
    return call.kind == HALFSTEP_CALL_STEP     ? run_all(o, &call, part)
           : call.kind == HALFSTEP_CALL_TENSOR ? run_one(o, &call, part)
                                               : run_round(o, &call, part);
}

int halfstep_run(halfstep_optimizer *o, const halfstep_call *call) { return run(__func__, o, call, HSTEP_PART_ALL); }

int halfstep_run_begin(halfstep_optimizer *o, const halfstep_call *call)
{
    return run(__func__, o, call, HSTEP_PART_BEGIN);
}

int halfstep_run_norms(halfstep_optimizer *o, const halfstep_call *call)
{
    return run(__func__, o, call, HSTEP_PART_NORMS);
}

int halfstep_run_finish(halfstep_optimizer *o, const halfstep_call *call)
{
    return run(__func__, o, call, HSTEP_PART_FINISH);
}

int64_t halfstep_statistics_count(const halfstep_optimizer *o, const halfstep_call *given)
{
    halfstep_call call = {0};
    if (!given || !hstep_take_struct(&call, sizeof call, given)) return 0;
    if (call.kind == HALFSTEP_CALL_ROUND) return HSTEP_EXACT_LIMBS;
    if (take_call(__func__, o, given, &call)) return 0;
    const int all = call.kind == HALFSTEP_CALL_STEP, first = all ? 0 : call.tensor, n = all ? o->n_tensors : 1;
    if (!all && hstep_check_tensor(o, first)) return 0;
    return count_statistics(o, first, n);
}

int64_t halfstep_norms_offset(const halfstep_optimizer *o, const halfstep_call *given)
{
    halfstep_call call = {0};
    if (take_call(__func__, o, given, &call)) return 0;
    return call.kind == HALFSTEP_CALL_ROUND ? HSTEP_EXACT_LIMBS
                                            : hstep_sums_offset(call.kind == HALFSTEP_CALL_STEP ? o->n_tensors : 1);
}
