/* What a step does with its statistics: whether it goes on, by what the gradients are clipped, what every update is
 * made with, and what it has counted when it is done. From plain values to plain values, in the memory of the
 * device. */
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

/* The norm that the gradients are clipped by, 0 where they are not. */
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
    /* A bound scale that is not finite is how a host that does not wait has a step refused: a loss scaler's verdict. */
    v->refused = (v->offenders && call->scan != HSTEP_SCAN_TENSOR) || !(v->norm < INFINITY) ||
                 !(fabs(hstep_gradient_scale(call)) < INFINITY);
    v->clip = clip_factor(call, v->norm);
}

/* Tensors of one group that have made as many steps share their constants, of which only the first pays for the powers,
 * unless these have come from the tensor itself. */
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
        u->means = 0;
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

/* Number j of what is summed over all tensors that have `share` as the first of them. */
static double total_of(const struct hstep_call *call, int share, int j)
{
    int64_t limbs[HSTEP_EXACT_LIMBS] = {0};
    for (int i = call->first; i < call->first + call->n; i++)
        if (call->plan.tensors[i].share == share)
            hstep_exact_merge(limbs, call->statistics + hstep_sum_offset(call, i) + (int64_t)j * HSTEP_EXACT_LIMBS);
    return hstep_exact_round(limbs);
}

/* totals: of its rule where that asks for them, or NULL: worked out here. */
static void prepare_again(const struct hstep_call *call, int tensor, const double *totals)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    double sums[HSTEP_MAX_SUMS];
    const int64_t *limbs = call->statistics + hstep_sum_offset(call, tensor);
    for (int j = 0; j < t->sums; j++) {
        const int64_t *sum = limbs + (int64_t)j * HSTEP_EXACT_LIMBS;
        if (!hstep_is_squared(t, j)) sums[j] = totals ? totals[j] : total_of(call, t->share, j);
        else if (t->cautious && j == t->sums - 1) sums[j] = hstep_exact_round(sum); /* a count */
        else sums[j] = sqrt(hstep_exact_round(sum));
    }
    hstep_prepare_update(call, tensor, call->verdict->clip, sums, NULL, &call->plan.updates[tensor]);
}

int hstep_decide_sums(const struct hstep_call *call, int first, int n)
{
    double totals[HSTEP_MAX_NORMS] = {0};
    int of = -1; /* the share that these are of */
    for (int i = first; i < first + n; i++) {
        const struct hstep_tensor *t = &call->plan.tensors[i];
        const int skip = call->plan.updates[i].skip, all = hstep_rules[t->rule].totals && !call->verdict->refused;
        if ((skip && !all) || !hstep_needs_sums(t, call->micro)) continue;
        if (all && of != t->share) {
            of = t->share;
            for (int j = 0; j < hstep_rules[t->rule].norms; j++) totals[j] = total_of(call, of, j);
        }
        prepare_again(call, i, totals);
        call->plan.updates[i].skip = skip; /* what it shares goes on all the same */
    }
    return HALFSTEP_OK;
}

int hstep_decide_mean(const struct hstep_call *call, int tensor, int pair, double mean)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    struct hstep_update *u = &call->plan.updates[tensor];
    u->mean[pair] = mean;
    u->means = pair + 1;
    if (pair && hstep_needs_sums(t, call->micro)) prepare_again(call, tensor, NULL);
    else hstep_prepare_update(call, tensor, call->verdict->clip, NULL, NULL, u);
    return HALFSTEP_OK;
}

static void count_update(struct hstep_tensor *t, const struct hstep_update *u)
{
    t->state_steps++;
    t->writes++;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) {
        struct hstep_slot *slot = &t->slot[s];
        if (slot->extra_bytes && hstep_has_one_scale(slot->format)) memcpy(slot->extra, &u->scale[s], 4);
        if (slot->root) slot->grid = u->grid[s];
    }
    if (u->micro) return;
    t->full_steps++;
    memcpy(t->scalar, u->scalar, sizeof t->scalar);
}

/* Numbers that a tensor without an update shares with others go on. */
static void count_shared(const struct hstep_call *call, int tensor)
{
    struct hstep_tensor *t = &call->plan.tensors[tensor];
    if (hstep_rules[t->rule].totals && !call->micro)
        memcpy(t->scalar, call->plan.updates[tensor].scalar, sizeof t->scalar);
}

/* Parts that share a tensor agree on its squares; the one with the first element puts them into the round, so that a
 * sum over all of them counts every tensor once. */
static void add_to_round(const struct hstep_call *call, const struct hstep_tensor *t)
{
    if (hstep_is_whole(t) || (!t->first_row && !t->first_column && t->runs))
        hstep_merge_squares(call->plan.round_squares, call->statistics);
}

static void count_groups(const struct hstep_call *call)
{
    for (int i = 0; i < call->plan.n_groups; i++) call->plan.groups[i].steps++;
}

/* What the caller of an asynchronous device will be told. */
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
