/* Decisions from the statistics of a step: whether it goes on, and how the gradients are clipped. Also the constants of
 * every update, and what is counted at the end. All functions work on plain values in the memory of the device. */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "decide/pass.h"

static double norm_of(const struct hstep_call *call, const int64_t *squares)
{
    return sqrt(hstep_exact_round(squares)) * hstep_gradient_scale(call);
}

static double clip_factor(const struct hstep_call *call, double norm)
{
    double factor = call->clip_norm / (norm + 1e-6);
    return hstep_is_clipped(call) && factor < 1.0 ? factor : 1.0;
}

/* Returns the norm that the gradients are clipped by, or 0 if they are not clipped. That is their own norm, or the norm
 * of the round before this one. */
static double clipping_norm(const struct hstep_call *call)
{
    if (!hstep_is_clipped(call)) return 0.0;
    if (hstep_is_clipped_by_own_norm(call)) return norm_of(call, call->statistics);
    double before = call->plan.ledger ? call->plan.ledger->round_norm : call->round_norm;
    return before > 0.0 ? before : norm_of(call, call->statistics); /* no round has had a norm yet */
}

void hstep_judge(const struct hstep_call *call)
{
    struct hstep_verdict *v = call->verdict;
    const int64_t *flags = call->statistics + hstep_flags_offset();
    *v = (struct hstep_verdict){.offender = -1, .norm = clipping_norm(call)};
    for (int i = 0; i < call->n; i++)
        if (flags[i] && !v->offenders++) {
            v->offender = call->first + i;
            v->too_large = !hstep_is_nonfinite(flags[i]);
        }
    /* A gradient scale that is not finite refuses the step. A host that does not wait for the device passes a loss
     * scaler's refusal in this way. */
    v->refused = (v->offenders && call->scan != HSTEP_SCAN_TENSOR) || !(v->norm < INFINITY) ||
                 !(fabs(hstep_gradient_scale(call)) < INFINITY);
    v->clip = clip_factor(call, v->norm);
}

/* Prepares the updates of n tensors from `first` on. Consecutive tensors of one group with equal step counts share
 * their constants, so that only the first pays for the powers. Constants that come from the tensor itself are not
 * shared. */
void hstep_decide_tensors(const struct hstep_call *call, int first, int n)
{
    const struct hstep_tensor *tensors = call->plan.tensors;
    struct hstep_update *updates = call->plan.updates;
    const int64_t *flags = call->statistics + hstep_flags_offset();
    int last = -1;
    for (int i = first; i < first + n; i++) {
        struct hstep_update *u = &updates[i];
        const struct hstep_tensor *t = &tensors[i], *before = last < 0 ? NULL : &tensors[last];
        if (call->verdict->refused || !call->gradients[i - call->first] || flags[i - call->first]) {
            u->skip = 1;
            continue;
        }
        int same = before && !updates[last].of_its_own && before->group == t->group &&
                   before->state_steps == t->state_steps && before->full_steps == t->full_steps;
        if (same && before->first_alike == t->first_alike) hstep_repeat_update(call, i, before, &updates[last], u);
        else hstep_prepare_update(call, i, call->verdict->clip, NULL, same ? &updates[last] : NULL, u);
        last = i;
    }
}

int hstep_decide(const struct hstep_call *call)
{
    hstep_judge(call);
    hstep_decide_tensors(call, call->first, call->n);
    return HALFSTEP_OK;
}

/* Returns sum number j over all tensors that have this `share`. Adds up a few limbs at a time, because a GPU's threads
 * have little memory of their own. */
static double total_of(const struct hstep_call *call, int share, int j)
{
    enum { AT_ONCE = 4 };
    _Static_assert(HSTEP_EXACT_LIMBS % AT_ONCE == 0, "all limbs are taken");
    struct hstep_exact_rounding total = {{0}, {0}};
    for (int k = 0; k < HSTEP_EXACT_LIMBS; k += AT_ONCE) {
        int64_t limb[AT_ONCE] = {0};
        for (int i = call->first; i < call->first + call->n; i++) {
            if (call->plan.tensors[i].share != share) continue;
            const int64_t *limbs = call->statistics + hstep_sum_offset(call, i) + (int64_t)j * HSTEP_EXACT_LIMBS + k;
            for (int n = 0; n < AT_ONCE; n++) limb[n] += limbs[n];
        }
        for (int n = 0; n < AT_ONCE; n++) hstep_exact_next(&total, k + n, limb[n]);
    }
    return hstep_exact_end(&total);
}

/* Prepares the update of a tensor again, now with its sums if it has any, and for the matrix of the call. *of is the
 * share whose totals stand in `sums`. */
static void prepare_again(const struct hstep_call *call, int tensor, double *sums, int *of)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const int known = *of == t->share, summed = hstep_needs_sums(t, call->micro);
    const int64_t *limbs = call->statistics + hstep_sum_offset(call, tensor);
    for (int j = 0; summed && j < t->sums; j++) {
        const int64_t *sum = limbs + (int64_t)j * HSTEP_EXACT_LIMBS;
        if (!hstep_is_squared(t, j)) sums[j] = known ? sums[j] : total_of(call, t->share, j);
        else if (t->cautious && j == t->sums - 1)
            sums[j] = hstep_exact_round(sum); /* the last sum of a cautious tensor is a count */
        else sums[j] = sqrt(hstep_exact_round(sum));
    }
    *of = hstep_rules[t->rule].totals ? t->share : -1;
    hstep_prepare_update(call, tensor, call->verdict->clip, summed ? sums : NULL, NULL, &call->plan.updates[tensor]);
}

int hstep_decide_sums_in(const struct hstep_call *call, int first, int n, double *sums)
{
    int of = -1; /* the share whose totals stand in `sums` */
    for (int i = first; i < first + n; i++) {
        const struct hstep_tensor *t = &call->plan.tensors[i];
        const int skip = call->plan.updates[i].skip, all = hstep_rules[t->rule].totals && !call->verdict->refused;
        if ((skip && !all) || (!hstep_needs_sums(t, call->micro) && t->blocks < 2)) continue;
        prepare_again(call, i, sums, &of);
        /* A skipped tensor stays skipped. Only the numbers that it shares are updated. */
        call->plan.updates[i].skip = skip;
    }
    return HALFSTEP_OK;
}

int hstep_decide_sums(const struct hstep_call *call, int first, int n)
{
    double sums[HSTEP_MAX_SUMS];
    return hstep_decide_sums_in(call, first, n, sums);
}

/* Advances the counters, scalars, scales and grids of a tensor after its update. */
static void count_update(struct hstep_tensor *t, const struct hstep_update *u)
{
    t->state_steps++;
    t->writes++;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) {
        struct hstep_slot *slot = &t->slot[s];
        /* Storage has got the scale with its piece, and the slot has no address. */
        if (slot->extra && slot->extra_bytes && hstep_has_one_scale(slot->format)) memcpy(slot->extra, &u->scale[s], 4);
        if (slot->root) slot->grid = u->grid[s];
    }
    if (u->micro) return;
    t->full_steps++;
    memcpy(t->scalar, u->scalar, sizeof t->scalar);
}

/* Updates the numbers that a tensor shares with others (TOTALS) if it has no update of its own. */
static void count_shared(const struct hstep_call *call, int tensor)
{
    struct hstep_tensor *t = &call->plan.tensors[tensor];
    if (hstep_rules[t->rule].totals && !call->micro)
        memcpy(t->scalar, call->plan.updates[tensor].scalar, sizeof t->scalar);
}

/* Adds the squares of a tensor to the round. Every process that holds a part of the tensor has the squares of all of
 * it. Only the part with the first element adds them, so that a sum over the processes counts every tensor once. */
static void add_to_round(const struct hstep_call *call, const struct hstep_tensor *t)
{
    if (hstep_is_whole(t) || (!t->first_row && !t->first_column && t->tracks))
        hstep_merge_squares(call->plan.round_squares, call->statistics);
}

static void count_groups(const struct hstep_call *call)
{
    for (int i = 0; i < call->plan.n_groups; i++) call->plan.groups[i].steps++;
}

/* Enters the verdict into the ledger, where the caller of an asynchronous device finds it later. */
static void enter(const struct hstep_call *call)
{
    struct hstep_ledger *l = call->plan.ledger;
    const struct hstep_verdict *v = call->verdict;
    if (!v->refused && !call->micro && !call->single) l->norm = v->norm;
    if (!v->refused && !v->offenders) return;
    l->skipped += v->refused ? 1 : (uint64_t)v->offenders;
    l->refusals++;
    l->offender = v->offender;
    l->too_large = v->too_large;
    l->in_round = 0;
}

void hstep_count_tensors(const struct hstep_call *call, int first, int n)
{
    for (int i = first; i < first + n; i++) {
        if (call->plan.updates[i].skip) {
            if (!call->verdict->refused) count_shared(call, i);
            continue;
        }
        count_update(&call->plan.tensors[i], &call->plan.updates[i]);
        if (call->single && hstep_is_clipped(call)) add_to_round(call, &call->plan.tensors[i]);
    }
}

void hstep_count_step(const struct hstep_call *call)
{
    if (call->plan.ledger) enter(call);
    if (!call->verdict->refused && !call->micro && !call->single) count_groups(call);
}

int hstep_count(const struct hstep_call *call)
{
    hstep_count_tensors(call, call->first, call->n);
    hstep_count_step(call);
    return HALFSTEP_OK;
}

int hstep_end_round(const struct hstep_call *call)
{
    const int64_t *squares = call->statistics ? call->statistics : call->plan.round_squares;
    struct hstep_verdict *v = call->verdict;
    *v = (struct hstep_verdict){.offender = -1, .norm = call->clip_norm > 0.0 ? norm_of(call, squares) : 0.0};
    v->refused = !(v->norm < INFINITY);
    struct hstep_ledger *l = call->plan.ledger;
    if (l && v->refused) {
        l->refusals++;
        l->offender = -1;
        l->too_large = 0;
        l->in_round = 1;
    }
    if (v->refused) return HALFSTEP_OK;
    if (l) l->norm = l->round_norm = v->norm;
    memset(call->plan.round_squares, 0, HSTEP_EXACT_LIMBS * sizeof *squares);
    count_groups(call);
    return HALFSTEP_OK;
}
