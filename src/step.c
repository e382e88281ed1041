/* One step over all tensors: statistics, sums, decision, update. Each is one batch of independent tasks. */
#include "step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "matrix.h"
#include "statistics.h"
#include "threads.h"
#include "update.h"

void hstep_run(const halfstep_optimizer *o, halfstep_task task, void *argument, int64_t n)
{
    if (o->run)
        o->run(o->host, task, argument, n);
    else
        hstep_run_tasks(o->threads ? o->threads : hstep_default_threads(), task, argument, n);
}

/* ---- Settling ---- */

static int count_sums(const halfstep_optimizer *o, const struct hstep_tensor *t)
{
    int sums = hstep_rules[o->groups[t->group].recipe.rule].norms;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++)
        sums += t->slot[s].format >= 0 && o->kernels->format[t->slot[s].format].tensor_scale != NULL;
    return sums;
}

static void lay_out(const halfstep_optimizer *o, struct hstep_tensor *t)
{
    int64_t stride = hstep_row_stride(t->row_length), rows = t->n_rows, columns = t->n_columns;
    t->unit = HSTEP_GROUP;
    int flat = 0;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) {
        if (t->slot[s].format < 0) continue;
        int unit = hstep_unit_of(t->slot[s].format);
        if (unit > t->unit) t->unit = unit;
        flat |= hstep_formats[t->slot[s].format].geometry == HALFSTEP_GEOMETRY_FLAT;
    }
    t->index0 = (uint64_t)t->first_row * (uint64_t)stride + (uint64_t)t->first_column;
    t->index_stride = stride;
    /* Rows that follow each other in index space as they do in memory are one run. */
    t->dense = columns == stride && (t->unit == HSTEP_GROUP || t->row_length % t->unit == 0);
    if (flat) {
        t->dense = 1;
        t->index0 = (uint64_t)t->first_row * (uint64_t)t->row_length;
        t->index_stride = hstep_row_stride(t->rows * t->row_length);
    }
    t->runs = t->dense ? 1 : rows;
    t->run_length = t->dense ? rows * columns : columns;
    if (!rows || !columns) t->runs = t->run_length = 0;
    t->matrix = hstep_is_matrix(o->groups[t->group].recipe.rule, t->ndim, t->rows, t->row_length);
    t->sums = count_sums(o, t);
}

static int64_t chunk_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out)
{
    int64_t n = 0;
    if (!t->runs) return 0;
    if (t->run_length < HSTEP_CHUNK) {
        int64_t per_chunk = HSTEP_CHUNK / t->run_length;
        for (int64_t run = 0; run < t->runs; run += per_chunk, n++)
            if (out)
                out[n] = (struct hstep_chunk){index, run, t->runs - run < per_chunk ? t->runs - run : per_chunk, 0,
                                              t->run_length};
        return n;
    }
    for (int64_t run = 0; run < t->runs; run++) {
        /* Cuts at multiples of a chunk, in index space where units start there, which also keeps a chunk within one segment
         * of random words; else in columns. */
        uint64_t first = t->dense || t->unit == HSTEP_GROUP ? t->index0 + (uint64_t)(run * t->index_stride)
                                                            : (uint64_t)t->first_column;
        int64_t start = (int64_t)(first % (uint64_t)HSTEP_CHUNK);
        for (int64_t offset = 0; offset < t->run_length; n++) {
            int64_t length = HSTEP_CHUNK - (start + offset) % HSTEP_CHUNK;
            if (length > t->run_length - offset) length = t->run_length - offset;
            if (out) out[n] = (struct hstep_chunk){index, run, 1, offset, length};
            offset += length;
        }
    }
    return n;
}

static const struct hstep_fused_row *find_fused(const halfstep_optimizer *o, const struct hstep_tensor *t)
{
    const struct hstep_rule *rule = &hstep_rules[o->groups[t->group].recipe.rule];
    for (int s = HALFSTEP_SLOT_STATE + 2; s < HSTEP_SLOTS; s++)
        if (t->slot[s].format >= 0) return NULL;
    if (t->sums || rule->kind != HSTEP_ELEMENTWISE) return NULL;
    for (int i = 0; i < o->kernels->fused_rows; i++) {
        const struct hstep_fused_row *row = &o->kernels->fused[i];
        if (!strcmp(row->rule, rule->kernel) && row->weight == t->slot[HALFSTEP_SLOT_WEIGHT].format &&
            row->gradient == t->slot[HALFSTEP_SLOT_GRADIENT].format &&
            row->state[0] == t->slot[HALFSTEP_SLOT_STATE].format && row->state[1] == t->slot[HALFSTEP_SLOT_STATE + 1].format)
            return row;
    }
    return NULL;
}

int hstep_settle(halfstep_optimizer *o)
{
    if (o->settled) return HALFSTEP_OK;
    int64_t n_chunks = 0;
    size_t workspace = 0;
    o->sums = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        struct hstep_tensor *t = &o->tensors[i];
        lay_out(o, t);
        n_chunks += chunk_tensor(t, i, NULL);
        t->first_sum = o->sums;
        o->sums += t->sums;
        size_t floats = t->matrix && t->runs ? hstep_matrix_workspace(t->rows, t->row_length) +
                                               (size_t)(t->rows * t->row_length) : 0;
        if (floats > workspace) workspace = floats;
    }
    struct hstep_chunk *chunks = malloc((size_t)(n_chunks + 1) * sizeof *chunks);
    struct hstep_update *updates = calloc((size_t)o->n_tensors + 1, sizeof *updates);
    int64_t *statistics = malloc((size_t)halfstep_statistics_count(o) * sizeof *statistics);
    float *room = workspace ? hstep_allocate(workspace * sizeof *room) : NULL;
    if (!chunks || !updates || !statistics || (workspace && !room)) {
        free(chunks);
        free(updates);
        free(statistics);
        hstep_free(room);
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "no memory for the plan of %d tensors", o->n_tensors);
    }
    n_chunks = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        struct hstep_tensor *t = &o->tensors[i];
        t->first_chunk = n_chunks;
        t->chunks = chunk_tensor(t, i, chunks + n_chunks);
        n_chunks += t->chunks;
        t->fused = find_fused(o, t);
    }
    o->chunks = chunks;
    o->n_chunks = n_chunks;
    o->updates = updates;
    o->statistics = statistics;
    o->workspace = room;
    o->workspace_bytes = workspace * sizeof *room;
    o->settled = 1;
    return HALFSTEP_OK;
}

/* ---- Norm and clipping ---- */

static double norm_of(const halfstep_optimizer *o, const int64_t *squares)
{
    return sqrt(hstep_exact_round(squares)) * o->gradient_scale;
}

static double clip_factor(const halfstep_optimizer *o, double norm)
{
    double factor = o->clip_norm / (norm + 1e-6);
    return o->clip_norm > 0.0 && factor < 1.0 ? factor : 1.0;
}

/* ---- Preparing ---- */

/* Tensors of one group that have made as many steps share their constants; only the first pays for the powers. Rules that
 * look at the tensor are prepared for each. */
static int prepare_all(halfstep_optimizer *o, double clip, int micro, const void *const *gradients, const int64_t *flags)
{
    int last = -1;
    for (int i = 0; i < o->n_tensors; i++) {
        struct hstep_update *u = &o->updates[i];
        const struct hstep_tensor *t = &o->tensors[i], *before = last < 0 ? NULL : &o->tensors[last];
        if (!gradients[i] || (flags && flags[i])) {
            u->skip = 1;
            continue;
        }
        const struct hstep_rule *rule = &hstep_rules[o->groups[t->group].recipe.rule];
        int alone = rule->norms || rule->scalar[0] || rule->kind == HSTEP_MATRIX;
        int same = !alone && before && before->group == t->group && before->state_steps == t->state_steps &&
                   before->full_steps == t->full_steps;
        int error = hstep_prepare_update(o, i, clip, micro, NULL, same ? &o->updates[last] : NULL, u);
        if (error) return error;
        last = i;
    }
    return HALFSTEP_OK;
}

/* The second preparation of one tensor, from its sums. */
static int prepare_again(halfstep_optimizer *o, int tensor, double clip, int micro, const int64_t *limbs,
                         struct hstep_update *u)
{
    double norms[HSTEP_MAX_SUMS];
    for (int j = 0; j < o->tensors[tensor].sums; j++)
        norms[j] = sqrt(hstep_exact_round(limbs + (int64_t)j * HSTEP_EXACT_LIMBS));
    return hstep_prepare_update(o, tensor, clip, micro, norms, NULL, u);
}

static int is_whole(const struct hstep_tensor *t) { return t->n_rows == t->rows && t->n_columns == t->row_length; }

static int64_t *sums_of(int64_t *statistics, const halfstep_optimizer *o, int tensor)
{
    return statistics + halfstep_norms_offset(o) + (int64_t)o->tensors[tensor].first_sum * HSTEP_EXACT_LIMBS;
}

static void clear_sums(const halfstep_optimizer *o, int64_t *statistics)
{
    memset(statistics + halfstep_norms_offset(o), 0, (size_t)o->sums * HSTEP_EXACT_LIMBS * sizeof *statistics);
}

/* A micro-step has no use for the sums of the rule: they decide how far the weight goes. */
static int needs_sums(const halfstep_optimizer *o, const struct hstep_tensor *t, int micro)
{
    return t->sums > (micro ? hstep_rules[o->groups[t->group].recipe.rule].norms : 0);
}

/* Tensors that a second pass should still find in the cache are handled together. */
#define BATCH_ELEMENTS ((int64_t)1 << 18)

/* Updates of everything that is prepared. With rules of two passes, their sums come first, unless they are made. */
static int update_all(halfstep_optimizer *o, double clip, int micro, void *const *weights, const void *const *gradients,
                      int64_t *statistics)
{
    for (int first = 0, end; first < o->n_tensors; first = end) {
        int64_t elements = 0;
        int sums = 0;
        for (end = first; end < o->n_tensors && (end == first || !o->sums || elements < BATCH_ELEMENTS); end++) {
            elements += o->tensors[end].n_rows * o->tensors[end].n_columns;
            sums |= !o->updates[end].skip && needs_sums(o, &o->tensors[end], micro);
        }
        if (sums && !o->norms_are_made)
            hstep_sum_tensors(o, first, end - first, o->updates + first, weights ? weights + first : NULL, gradients + first,
                              sums_of(statistics, o, first));
        for (int i = first; sums && i < end; i++) {
            if (o->updates[i].skip || !needs_sums(o, &o->tensors[i], micro)) continue;
            int error = prepare_again(o, i, clip, micro, sums_of(statistics, o, i), &o->updates[i]);
            if (error) return error;
        }
        hstep_update_tensors(o, first, end - first, o->updates + first, weights ? weights + first : NULL, gradients + first);
    }
    return HALFSTEP_OK;
}

/* ---- Steps ---- */

static int check_ready(const halfstep_optimizer *o, int first, int n, void *const *weights, const void *const *gradients)
{
    if (!o->settled) {
        if (o->n_tensors) return hstep_fail(o, HALFSTEP_ERROR_ORDER, "the states have no memory yet");
        return HALFSTEP_OK;
    }
    int error = hstep_check_bound(o, first, n);
    if (error) return error;
    for (int i = 0; weights && i < n; i++)
        if (!weights[i] && gradients[i] && o->tensors[first + i].runs)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': a gradient, but NULL weights",
                              o->tensors[first + i].name);
    for (int i = 0; o->missing == HSTEP_MISSING_ERROR && i < n; i++)
        if (!gradients[i])
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has no gradient", o->tensors[first + i].name);
    return HALFSTEP_OK;
}

static int step_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    int error = check_ready(o, 0, o->n_tensors, NULL, gradients);
    if (error) return error;
    o->norms_are_made = 0;
    memset(statistics, 0, (size_t)halfstep_statistics_count(o) * sizeof *statistics);
    if (!o->n_tensors) return HALFSTEP_OK;
    int clipped = o->clip_norm > 0.0;
    hstep_scan_tensors(o, 0, o->n_tensors, gradients, clipped, clipped ? statistics : NULL,
                       o->scan == HSTEP_SCAN_NONE ? NULL : statistics + HSTEP_STATISTICS_HEAD);
    hstep_exact_normalize(statistics);
    return HALFSTEP_OK;
}

/* How many tensors the flags refuse; names the first. */
static int offenders_of(halfstep_optimizer *o, const int64_t *flags)
{
    int offenders = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        if (!flags[i]) continue;
        if (!offenders++) {
            atomic_store(&o->nonfinite_tensor, i);
            hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is not finite", o->tensors[i].name);
        }
    }
    return offenders;
}

static int step_norms(halfstep_optimizer *o, void *const *weights, const void *const *gradients, int64_t *statistics)
{
    int error = check_ready(o, 0, o->n_tensors, weights, gradients);
    if (error || !o->sums) return error;
    const int64_t *flags = statistics + HSTEP_STATISTICS_HEAD;
    int offenders = 0;
    for (int i = 0; i < o->n_tensors; i++) offenders |= flags[i] != 0;
    /* finish will refuse. */
    int refused = offenders && o->scan != HSTEP_SCAN_TENSOR;
    double clip = clip_factor(o, norm_of(o, statistics));
    if (!refused && (error = prepare_all(o, clip, 0, gradients, offenders ? flags : NULL))) return error;
    clear_sums(o, statistics);
    if (!refused) hstep_sum_tensors(o, 0, o->n_tensors, o->updates, weights, gradients, statistics + halfstep_norms_offset(o));
    for (int i = 0; i < o->sums; i++)
        hstep_exact_normalize(statistics + halfstep_norms_offset(o) + (int64_t)i * HSTEP_EXACT_LIMBS);
    o->norms_are_made = 1;
    return HALFSTEP_OK;
}

/* What finish and micro-steps share; the latter have no weights. */
static int complete(halfstep_optimizer *o, int micro, void *const *weights, const void *const *gradients, int64_t *statistics)
{
    const int64_t *flags = statistics + HSTEP_STATISTICS_HEAD;
    int error, offenders = offenders_of(o, flags);
    if (offenders && o->scan != HSTEP_SCAN_TENSOR) {
        o->norms_are_made = 0;
        atomic_fetch_add(&o->skipped, 1);
        return HALFSTEP_NONFINITE;
    }
    double norm = o->clip_norm > 0.0 && !micro ? norm_of(o, statistics) : 0.0, clip = micro ? 1.0 : clip_factor(o, norm);
    if (o->n_tensors && (error = prepare_all(o, clip, micro, gradients, offenders ? flags : NULL))) return error;
    if (!o->norms_are_made) clear_sums(o, statistics);
    if ((error = update_all(o, clip, micro, weights, gradients, statistics))) return error;
    o->norms_are_made = 0;
    for (int i = 0; i < o->n_tensors; i++)
        if (!o->updates[i].skip) hstep_count_update(&o->tensors[i], &o->updates[i]);
    atomic_fetch_add(&o->skipped, (uint64_t)offenders);
    if (!micro) {
        o->gradient_norm = norm;
        for (int i = 0; i < o->n_groups; i++) o->groups[i].steps++;
    }
    return offenders ? HALFSTEP_NONFINITE : HALFSTEP_OK;
}

static int step_finish(halfstep_optimizer *o, void *const *weights, const void *const *gradients, int64_t *statistics)
{
    int error = check_ready(o, 0, o->n_tensors, weights, gradients);
    if (error) return error;
    for (int i = 0; !o->norms_are_made && i < o->n_tensors; i++)
        if (gradients[i] && o->tensors[i].sums && !is_whole(&o->tensors[i]))
            return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                              "tensor '%s' is a part of one: halfstep_step_norms() comes before finish",
                              o->tensors[i].name);
    return complete(o, 0, weights, gradients, statistics);
}

/* Micro-steps keep the gradient only where a state does. */
static int check_accumulates(const halfstep_optimizer *o, int tensor)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_group *g = &o->groups[t->group];
    const struct hstep_rule *rule = &hstep_rules[g->recipe.rule];
    int state = hstep_rule_state(g->recipe.rule, rule->keeps);
    if (state < 0 || !hstep_state_needed(g, state))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': %s%s%s keeps no gradient, micro-steps would lose it",
                          t->name, rule->name, state < 0 ? "" : " without ",
                          state < 0 ? "" : rule->state[state].unless);
    if (g->decay == HSTEP_DECAY_L2 && g->hyper[HSTEP_WEIGHT_DECAY] != 0.0)
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s': with micro-steps l2 decay would reach only the last gradient of a step", t->name);
    if (needs_sums(o, t, 1) && !is_whole(t))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "tensor '%s' is a part of one, and a scale of its states a sum over all",
                          t->name);
    return HALFSTEP_OK;
}

static int accumulate_states(halfstep_optimizer *o, const void *const *gradients)
{
    int error = check_ready(o, 0, o->n_tensors, NULL, gradients);
    if (error) return error;
    if (!o->n_tensors) return HALFSTEP_OK;
    for (int i = 0; i < o->n_tensors; i++)
        if (gradients[i] && (error = check_accumulates(o, i))) return error;
    o->norms_are_made = 0;
    memset(o->statistics, 0, (size_t)halfstep_statistics_count(o) * sizeof *o->statistics);
    hstep_scan_tensors(o, 0, o->n_tensors, gradients, 0, NULL,
                       o->scan == HSTEP_SCAN_NONE ? NULL : o->statistics + HSTEP_STATISTICS_HEAD);
    return complete(o, 1, NULL, gradients, o->statistics);
}

/* One tensor, as soon as its gradient exists; weight is NULL in a micro-step. */
static int step_tensor(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient, int micro)
{
    struct hstep_tensor *t = &o->tensors[tensor];
    int error = check_ready(o, tensor, 1, micro ? NULL : &weight, &gradient), clipped = !micro && o->clip_norm > 0.0;
    if (error || !gradient) return error;
    if (micro && (error = check_accumulates(o, tensor))) return error;
    if (!micro && t->sums && !is_whole(t))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s' is a part of one, and its update needs sums over all",
                          t->name);
    int64_t squares[HSTEP_EXACT_LIMBS] = {0}, flag = 0;
    int own = clipped && o->clip == HSTEP_CLIP_TENSOR;
    hstep_scan_tensors(o, tensor, 1, &gradient, own, clipped ? squares : NULL, o->scan == HSTEP_SCAN_NONE ? NULL : &flag);
    if (flag) {
        atomic_fetch_add(&o->skipped, 1);
        atomic_store(&o->nonfinite_tensor, tensor);
        return hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is not finite", t->name);
    }
    double norm = own ? norm_of(o, squares) : o->round_norm, clip = micro ? 1.0 : clip_factor(o, norm);
    struct hstep_update update;
    if ((error = hstep_prepare_update(o, tensor, clip, micro, NULL, NULL, &update))) return error;
    if (needs_sums(o, t, micro)) {
        int64_t limbs[HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS] = {0};
        hstep_sum_tensors(o, tensor, 1, &update, micro ? NULL : &weight, &gradient, limbs);
        if ((error = prepare_again(o, tensor, clip, micro, limbs, &update))) return error;
    }
    hstep_update_tensors(o, tensor, 1, &update, micro ? NULL : &weight, &gradient);
    hstep_exact_normalize(squares);
    hstep_merge_squares(o->round_squares, squares);
    hstep_count_update(t, &update);
    return HALFSTEP_OK;
}

/* The public faces: arguments, and the floating-point environment for what is computed on the caller's thread. */

int64_t halfstep_norms_offset(const halfstep_optimizer *o) { return o ? HSTEP_STATISTICS_HEAD + o->n_tensors : 0; }

int64_t halfstep_statistics_count(const halfstep_optimizer *o)
{
    if (!o) return 0;
    int64_t sums = o->settled ? o->sums : 0;
    for (int i = 0; !o->settled && i < o->n_tensors; i++) sums += count_sums(o, &o->tensors[i]);
    return halfstep_norms_offset(o) + sums * HSTEP_EXACT_LIMBS;
}

int halfstep_step_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    if (!o || !statistics || (!gradients && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = step_begin(o, gradients, statistics);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_step_norms(halfstep_optimizer *o, void *const *weights, const void *const *gradients, int64_t *statistics)
{
    if (!o || !statistics || ((!weights || !gradients) && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = step_norms(o, weights, gradients, statistics);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_step_finish(halfstep_optimizer *o, void *const *weights, const void *const *gradients,
                         const int64_t *statistics)
{
    if (!o || !statistics || ((!weights || !gradients) && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    /* The caller's statistics are read only; sums that are still to be made go to the handle's own. */
    int64_t *own = o->statistics;
    if (o->settled && statistics != own)
        memcpy(own, statistics, (size_t)halfstep_statistics_count(o) * sizeof *own);
    int result = step_finish(o, weights, gradients, o->settled ? own : (int64_t *)(uintptr_t)statistics);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_step(halfstep_optimizer *o, void *const *weights, const void *const *gradients)
{
    if (!o || ((!weights || !gradients) && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_ready(o, 0, o->n_tensors, weights, gradients);
    if (error) return error;
    int64_t none[HSTEP_STATISTICS_HEAD];
    int64_t *statistics = o->n_tensors ? o->statistics : none;
    if ((error = halfstep_step_begin(o, gradients, statistics))) return error;
    return halfstep_step_finish(o, weights, gradients, statistics);
}

static int step_one(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient, int micro)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    int result = hstep_check_tensor(o, tensor);
    if (result) return result;
    struct hstep_fp fp = hstep_fp_enter();
    result = step_tensor(o, tensor, weight, gradient, micro);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_step_tensor(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient)
{
    return step_one(o, tensor, weight, gradient, 0);
}

int halfstep_accumulate_states(halfstep_optimizer *o, const void *const *gradients)
{
    if (!o || (!gradients && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = accumulate_states(o, gradients);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_accumulate_states_tensor(halfstep_optimizer *o, int32_t tensor, const void *gradient)
{
    return step_one(o, tensor, NULL, gradient, 1);
}

int halfstep_end_round(halfstep_optimizer *o)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    o->round_norm = o->clip_norm > 0.0 ? norm_of(o, o->round_squares) : 0.0;
    o->gradient_norm = o->round_norm;
    memset(o->round_squares, 0, sizeof o->round_squares);
    for (int i = 0; i < o->n_groups; i++) o->groups[i].steps++;
    return HALFSTEP_OK;
}
