/* One step over all tensors: statistics, sums, decision, update. Each is one batch of independent tasks. Over 500 lines because all,
 * one tensor, halves and micro-steps are the same steps over a span, with a public face each. */
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

void hstep_lay_out(const halfstep_optimizer *o, struct hstep_tensor *t)
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

int64_t hstep_cut_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out)
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
        hstep_lay_out(o, t);
        n_chunks += hstep_cut_tensor(t, i, NULL);
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
        t->chunks = hstep_cut_tensor(t, i, chunks + n_chunks);
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

/* ---- What a call is about ---- */

/* All tensors, or one. Their statistics: limbs of the sum of squares, a flag for each, limbs of the sums over each. */
struct span {
    int first, n, single, micro;
    int *norms_made; /* by the call between begin and finish */
};

static struct span all_of(halfstep_optimizer *o, int micro)
{
    return (struct span){0, o->n_tensors, 0, micro, &o->norms_made};
}

static struct span one_of(halfstep_optimizer *o, int tensor, int micro)
{
    return (struct span){tensor, 1, 1, micro, &o->tensors[tensor].norms_made};
}

#define MAX_SINGLE_STATISTICS (HSTEP_STATISTICS_HEAD + 1 + HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS)

static int64_t norms_offset(const struct span *s) { return HSTEP_STATISTICS_HEAD + s->n; }

static int64_t statistics_count(const halfstep_optimizer *o, const struct span *s)
{
    int64_t sums = 0;
    for (int i = s->first; i < s->first + s->n; i++) sums += o->settled ? o->tensors[i].sums : count_sums(o, &o->tensors[i]);
    return norms_offset(s) + sums * HSTEP_EXACT_LIMBS;
}

static int64_t *flags_of(int64_t *statistics) { return statistics + HSTEP_STATISTICS_HEAD; }

static int64_t *sums_of(const halfstep_optimizer *o, const struct span *s, int64_t *statistics, int tensor)
{
    int64_t before = o->tensors[tensor].first_sum - o->tensors[s->first].first_sum;
    return statistics + norms_offset(s) + before * HSTEP_EXACT_LIMBS;
}

/* From the first sum on. */
static int64_t sum_limbs(const halfstep_optimizer *o, const struct span *s)
{
    return statistics_count(o, s) - norms_offset(s);
}

static int is_whole(const struct hstep_tensor *t) { return t->n_rows == t->rows && t->n_columns == t->row_length; }

/* A micro-step has no use for the sums of the rule: they decide how far the weight goes. */
static int needs_sums(const halfstep_optimizer *o, const struct hstep_tensor *t, int micro)
{
    return t->sums > (micro ? hstep_rules[o->groups[t->group].recipe.rule].norms : 0);
}

static int is_clipped(const halfstep_optimizer *o, const struct span *s) { return !s->micro && o->clip_norm > 0.0; }

/* Whether the gradients end below clip_norm, whatever they were. */
static int is_clipped_by_own_norm(const halfstep_optimizer *o, const struct span *s)
{
    return is_clipped(o, s) && (!s->single || o->clip == HSTEP_CLIP_TENSOR);
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

/* The norm that the gradients are clipped by, 0 where they are not. */
static double clipping_norm(const halfstep_optimizer *o, const struct span *s, const int64_t *statistics)
{
    if (!is_clipped(o, s)) return 0.0;
    return is_clipped_by_own_norm(o, s) ? norm_of(o, statistics) : o->round_norm;
}

/* ---- Preparing ---- */

/* Tensors of one group that have made as many steps share their constants, of which only the first pays for the powers, unless
 * these have come from the tensor itself. */
static int prepare_all(halfstep_optimizer *o, const struct span *s, double clip, const void *const *gradients,
                       const int64_t *flags)
{
    int last = -1;
    for (int i = s->first; i < s->first + s->n; i++) {
        struct hstep_update *u = &o->updates[i];
        const struct hstep_tensor *t = &o->tensors[i], *before = last < 0 ? NULL : &o->tensors[last];
        if (!gradients[i - s->first] || flags[i - s->first]) {
            u->skip = 1;
            continue;
        }
        int same = before && !o->updates[last].own && before->group == t->group &&
                   before->state_steps == t->state_steps && before->full_steps == t->full_steps;
        int error = hstep_prepare_update(o, i, clip, s->micro, NULL, same ? &o->updates[last] : NULL, u);
        if (error) return error;
        last = i;
    }
    return HALFSTEP_OK;
}

/* The second preparation of one tensor, from its sums. */
static int prepare_again(halfstep_optimizer *o, int tensor, double clip, int micro, const int64_t *limbs)
{
    double norms[HSTEP_MAX_SUMS];
    for (int j = 0; j < o->tensors[tensor].sums; j++)
        norms[j] = sqrt(hstep_exact_round(limbs + (int64_t)j * HSTEP_EXACT_LIMBS));
    return hstep_prepare_update(o, tensor, clip, micro, norms, NULL, &o->updates[tensor]);
}

/* Tensors that a second pass should still find in the cache are handled together. */
#define BATCH_ELEMENTS ((int64_t)1 << 18)

/* Updates of everything that is prepared. With rules of two passes, their sums come first, unless they are made. */
static int update_all(halfstep_optimizer *o, const struct span *s, double clip, void *const *weights,
                      const void *const *gradients, int64_t *statistics)
{
    for (int first = s->first, end; first < s->first + s->n; first = end) {
        int64_t elements = 0;
        int sums = 0, at = first - s->first;
        for (end = first; end < s->first + s->n && (end == first || !o->sums || elements < BATCH_ELEMENTS); end++) {
            elements += o->tensors[end].n_rows * o->tensors[end].n_columns;
            sums |= !o->updates[end].skip && needs_sums(o, &o->tensors[end], s->micro);
        }
        if (sums && !*s->norms_made)
            hstep_sum_tensors(o, first, end - first, o->updates + first, weights ? weights + at : NULL, gradients + at,
                              sums_of(o, s, statistics, first));
        for (int i = first; sums && i < end; i++) {
            if (o->updates[i].skip || !needs_sums(o, &o->tensors[i], s->micro)) continue;
            int error = prepare_again(o, i, clip, s->micro, sums_of(o, s, statistics, i));
            if (error) return error;
        }
        hstep_update_tensors(o, first, end - first, o->updates + first, weights ? weights + at : NULL, gradients + at);
    }
    return HALFSTEP_OK;
}

/* ---- Checks ---- */

static int check_ready(const halfstep_optimizer *o, const struct span *s, void *const *weights, const void *const *gradients)
{
    if (!o->settled) {
        if (o->n_tensors) return hstep_fail(o, HALFSTEP_ERROR_ORDER, "the states have no memory yet");
        return HALFSTEP_OK;
    }
    int error = hstep_check_bound(o, s->first, s->n);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[s->first];
    for (int i = 0; weights && i < s->n; i++)
        if (!weights[i] && gradients[i] && t[i].runs)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': a gradient, but NULL weights", t[i].name);
    for (int i = 0; o->missing == HSTEP_MISSING_ERROR && i < s->n; i++)
        if (!gradients[i]) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has no gradient", t[i].name);
    return HALFSTEP_OK;
}

/* What one call does all by itself must not depend on the elements of a tensor that other processes hold. */
static int check_alone(const halfstep_optimizer *o, const struct span *s, const void *const *gradients)
{
    for (int i = s->first; i < s->first + s->n; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        if (!gradients[i - s->first] || is_whole(t)) continue;
        const char *what = needs_sums(o, t, s->micro)    ? "its update needs sums over all of it"
                           : is_clipped(o, s)            ? "clipping needs the norm of all of it"
                           : o->scan != HSTEP_SCAN_NONE ? "the scan has to see all of it"
                                                        : NULL;
        if (what)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s' is a part of one, and %s: step it by begin and finish", t->name, what);
    }
    return HALFSTEP_OK;
}

/* Sums over a tensor can be made by the way only where all of it is. */
static int check_norms(const halfstep_optimizer *o, const struct span *s, const void *const *gradients)
{
    for (int i = s->first; !*s->norms_made && i < s->first + s->n; i++)
        if (gradients[i - s->first] && needs_sums(o, &o->tensors[i], s->micro) && !is_whole(&o->tensors[i]))
            return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s' is a part of one: %s() comes before finish",
                              o->tensors[i].name, s->single ? "halfstep_step_tensor_norms" : "halfstep_step_norms");
    return HALFSTEP_OK;
}

/* Micro-steps keep the gradient only where a state does. */
static int check_accumulates(const halfstep_optimizer *o, const struct span *s, const void *const *gradients)
{
    for (int i = s->first; s->micro && i < s->first + s->n; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        const struct hstep_group *g = &o->groups[t->group];
        const struct hstep_rule *rule = &hstep_rules[g->recipe.rule];
        int state = hstep_rule_state(g->recipe.rule, rule->keeps);
        if (!gradients[i - s->first]) continue;
        if (state < 0 || !hstep_state_needed(g, state))
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s': %s%s%s keeps no gradient, micro-steps would lose it", t->name, rule->name,
                              state < 0 ? "" : " without ", state < 0 ? "" : rule->state[state].unless);
        if (g->decay == HSTEP_DECAY_L2 && g->hyper[HSTEP_WEIGHT_DECAY] != 0.0)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s': with micro-steps l2 decay would reach only the last gradient of a step", t->name);
        if (needs_sums(o, t, 1) && !is_whole(t))
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s' is a part of one, and a scale of its states a sum over all", t->name);
    }
    return HALFSTEP_OK;
}

/* ---- Steps ---- */

static void begin(halfstep_optimizer *o, const struct span *s, const void *const *gradients, int64_t *statistics)
{
    *s->norms_made = 0;
    memset(statistics, 0, (size_t)statistics_count(o, s) * sizeof *statistics);
    hstep_scan_tensors(o, s->first, s->n, gradients, is_clipped_by_own_norm(o, s), is_clipped(o, s) ? statistics : NULL,
                       o->scan == HSTEP_SCAN_NONE ? NULL : flags_of(statistics));
    hstep_exact_normalize(statistics);
}

/* How many tensors the flags refuse; names the first. */
static int offenders_of(halfstep_optimizer *o, const struct span *s, const int64_t *flags)
{
    int offenders = 0;
    for (int i = 0; i < s->n; i++) {
        if (!flags[i]) continue;
        if (!offenders++) {
            atomic_store(&o->nonfinite_tensor, s->first + i);
            hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is not finite", o->tensors[s->first + i].name);
        }
    }
    return offenders;
}

static int refuses(const halfstep_optimizer *o, int offenders, double norm)
{
    return (offenders && o->scan != HSTEP_SCAN_TENSOR) || !(norm < INFINITY);
}

static int norms(halfstep_optimizer *o, const struct span *s, void *const *weights, const void *const *gradients,
                 int64_t *statistics)
{
    int error, offenders = 0;
    if (!sum_limbs(o, s)) return HALFSTEP_OK;
    for (int i = 0; i < s->n; i++) offenders |= flags_of(statistics)[i] != 0;
    double norm = clipping_norm(o, s, statistics);
    memset(statistics + norms_offset(s), 0, (size_t)sum_limbs(o, s) * sizeof *statistics);
    /* What finish will refuse needs no sums. */
    if (!refuses(o, offenders, norm)) {
        if ((error = prepare_all(o, s, clip_factor(o, norm), gradients, flags_of(statistics)))) return error;
        hstep_sum_tensors(o, s->first, s->n, o->updates + s->first, weights, gradients, statistics + norms_offset(s));
        for (int64_t i = norms_offset(s); i < statistics_count(o, s); i += HSTEP_EXACT_LIMBS)
            hstep_exact_normalize(statistics + i);
    }
    *s->norms_made = 1;
    return HALFSTEP_OK;
}

/* Parts that share a tensor agree on its squares; the one with the first element puts them into the round, so that a sum over
 * all of them counts every tensor once. */
static void add_to_round(halfstep_optimizer *o, const struct hstep_tensor *t, int64_t *squares)
{
    if (is_whole(t) || (!t->first_row && !t->first_column && t->runs)) hstep_merge_squares(o->round_squares, squares);
}

/* The decision and the update. weights are NULL in a micro-step. */
static int finish(halfstep_optimizer *o, const struct span *s, void *const *weights, const void *const *gradients,
                  int64_t *statistics)
{
    int64_t *flags = flags_of(statistics);
    int error, offenders = offenders_of(o, s, flags);
    double norm = clipping_norm(o, s, statistics), clip = s->micro ? 1.0 : clip_factor(o, norm);
    if (refuses(o, offenders, norm)) {
        *s->norms_made = 0;
        atomic_fetch_add(&o->skipped, 1);
        if (offenders) return HALFSTEP_NONFINITE;
        atomic_store(&o->nonfinite_tensor, -1);
        return hstep_fail(o, HALFSTEP_NONFINITE, "the norm of the gradients is not finite");
    }
    if ((error = prepare_all(o, s, clip, gradients, flags))) return error;
    if (!*s->norms_made) memset(statistics + norms_offset(s), 0, (size_t)sum_limbs(o, s) * sizeof *statistics);
    if ((error = update_all(o, s, clip, weights, gradients, statistics))) return error;
    *s->norms_made = 0;
    for (int i = s->first; i < s->first + s->n; i++) {
        if (o->updates[i].skip) continue;
        hstep_count_update(&o->tensors[i], &o->updates[i]);
        if (s->single && is_clipped(o, s)) add_to_round(o, &o->tensors[i], statistics);
    }
    atomic_fetch_add(&o->skipped, (uint64_t)offenders);
    if (!s->micro && !s->single) {
        o->gradient_norm = norm;
        for (int i = 0; i < o->n_groups; i++) o->groups[i].steps++;
    }
    return offenders ? HALFSTEP_NONFINITE : HALFSTEP_OK;
}

/* What a call does with its span. ALONE is all of it. */
enum call { BEGIN, NORMS, FINISH, ALONE };

/* statistics: written by BEGIN and NORMS, read by FINISH. own: room for as many. */
static int make(halfstep_optimizer *o, const struct span *s, enum call call, void *const *weights,
                const void *const *gradients, int64_t *statistics, int64_t *own)
{
    int error = check_ready(o, s, weights, gradients);
    if (error || (error = check_accumulates(o, s, gradients))) return error;
    switch (call) {
    case BEGIN:
        begin(o, s, gradients, statistics);
        return HALFSTEP_OK;
    case NORMS:
        return norms(o, s, weights, gradients, statistics);
    case FINISH:
        if ((error = check_norms(o, s, gradients))) return error;
        memcpy(own, statistics, (size_t)statistics_count(o, s) * sizeof *own);
        return finish(o, s, weights, gradients, own);
    default:
        if ((error = check_alone(o, s, gradients))) return error;
        begin(o, s, gradients, own);
        return finish(o, s, weights, gradients, own);
    }
}

/* ---- The public faces: arguments, and the floating-point environment for what is computed on the caller's thread ---- */

int64_t halfstep_norms_offset(const halfstep_optimizer *o) { return o ? HSTEP_STATISTICS_HEAD + o->n_tensors : 0; }

int64_t halfstep_statistics_count(const halfstep_optimizer *o)
{
    struct span s = {.n = o ? o->n_tensors : 0};
    return o ? statistics_count(o, &s) : 0;
}

int64_t halfstep_tensor_norms_offset(void) { return HSTEP_STATISTICS_HEAD + 1; }

int64_t halfstep_tensor_statistics_count(const halfstep_optimizer *o, int32_t tensor)
{
    struct span s = {.first = tensor, .n = 1};
    return !o || tensor < 0 || tensor >= o->n_tensors ? 0 : statistics_count(o, &s);
}

static int call_all(halfstep_optimizer *o, enum call call, int micro, void *const *weights, const void *const *gradients,
                    const int64_t *statistics)
{
    if (!o || (call != ALONE && !statistics) ||
        (o->n_tensors && (!gradients || (!weights && !micro && call != BEGIN))))
        return HALFSTEP_ERROR_ARGUMENT;
    int64_t none[HSTEP_STATISTICS_HEAD];
    struct span s = all_of(o, micro);
    struct hstep_fp fp = hstep_fp_enter();
    int result = make(o, &s, call, weights, gradients, (int64_t *)(uintptr_t)statistics, o->n_tensors ? o->statistics : none);
    hstep_fp_leave(fp);
    return result;
}

static int call_one(halfstep_optimizer *o, enum call call, int micro, int32_t tensor, void *weight, const void *gradient,
                    const int64_t *statistics)
{
    if (!o || (call != ALONE && !statistics)) return HALFSTEP_ERROR_ARGUMENT;
    int result = hstep_check_tensor(o, tensor);
    if (result) return result;
    int64_t own[MAX_SINGLE_STATISTICS];
    struct span s = one_of(o, tensor, micro);
    struct hstep_fp fp = hstep_fp_enter();
    result = make(o, &s, call, micro || call == BEGIN ? NULL : &weight, &gradient, (int64_t *)(uintptr_t)statistics, own);
    hstep_fp_leave(fp);
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

static int end_round(halfstep_optimizer *o, const int64_t *squares)
{
    struct hstep_fp fp = hstep_fp_enter();
    double norm = o->clip_norm > 0.0 ? norm_of(o, squares) : 0.0;
    int result = norm < INFINITY ? HALFSTEP_OK : hstep_fail(o, HALFSTEP_NONFINITE, "the norm of the round is not finite");
    if (!result) {
        o->gradient_norm = o->round_norm = norm;
        memset(o->round_squares, 0, sizeof o->round_squares);
        for (int i = 0; i < o->n_groups; i++) o->groups[i].steps++;
    }
    hstep_fp_leave(fp);
    return result;
}

int halfstep_end_round(halfstep_optimizer *o)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    for (int i = 0; i < o->n_tensors && o->clip_norm > 0.0; i++)
        if (!is_whole(&o->tensors[i]))
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                              "tensor '%s' is a part of one, and the norm of the round needs all of it: end the round by "
                              "begin and finish", o->tensors[i].name);
    return end_round(o, o->round_squares);
}

int64_t halfstep_round_statistics_count(void) { return HSTEP_EXACT_LIMBS; }

int halfstep_end_round_begin(halfstep_optimizer *o, int64_t *statistics)
{
    if (!o || !statistics) return HALFSTEP_ERROR_ARGUMENT;
    memcpy(statistics, o->round_squares, sizeof o->round_squares);
    hstep_exact_normalize(statistics);
    return HALFSTEP_OK;
}

int halfstep_end_round_finish(halfstep_optimizer *o, const int64_t *statistics)
{
    return !o || !statistics ? HALFSTEP_ERROR_ARGUMENT : end_round(o, statistics);
}
