/* Settling: turns groups and tensors into the arrays that steps need, once. */
#include <stdlib.h>

#include "handle/checks.h"
#include "handle/devices/device_check.h"
#include "handle/devices/sync.h"
#include "handle/plan.h"
#include "tables/layout.h"

static int allocate(const halfstep_optimizer *o, uint64_t bytes, void *place)
{
    return bytes ? o->device->allocate(&o->context, bytes, (void **)place) : HALFSTEP_OK;
}

/* Writes to *place where the device finds an array of the handle: the array itself if memory is shared, otherwise new
 * memory of the device. */
static int place_array(const halfstep_optimizer *o, void *ours, uint64_t bytes, void *place)
{
    if (!o->device->shared) return allocate(o, bytes, place);
    *(void **)place = ours;
    return HALFSTEP_OK;
}

int hstep_first_plan(halfstep_optimizer *o)
{
    uint64_t limbs = HSTEP_EXACT_LIMBS * sizeof(int64_t);
    int error = allocate(o, limbs, &o->plan.round_squares);
    if (!error) error = allocate(o, limbs, &o->plan.statistics);
    if (!error) error = allocate(o, sizeof *o->verdict, &o->verdict);
    return error ? error : o->device->zero(&o->context, o->plan.round_squares, limbs);
}

/* Tells whether updates of two tensors with equally many steps differ only in random words, grids and scalars.
 * hstep_repeat_update() relies on it. */
static int are_alike(const struct hstep_tensor *a, const struct hstep_tensor *b)
{
    int alike = a->group == b->group && !memcmp(a->fused, b->fused, sizeof a->fused) && a->matrix == b->matrix &&
                a->pairs == b->pairs && (a->ndim >= 2 && a->row_length > 1) == (b->ndim >= 2 && b->row_length > 1);
    for (int s = 0; alike && s < HSTEP_SLOTS; s++)
        alike = a->slot[s].format == b->slot[s].format && a->slot[s].root == b->slot[s].root;
    return alike;
}

/* Returns the first tensor that shares totals with tensor i, or i. The search is short, because usually all share. */
static int find_share(const halfstep_optimizer *o, int i)
{
    const struct hstep_rule *rule = &hstep_rules[o->tensors[i].rule];
    if (!rule->totals) return i;
    int number = hstep_find_hyper(o->tensors[i].rule, rule->share) - HSTEP_COMMON_HYPERS, first = 0;
    double value = o->groups[o->tensors[i].group].own[number];
    while (first < i &&
           (o->tensors[first].rule != o->tensors[i].rule || o->groups[o->tensors[first].group].own[number] != value))
        first++;
    return first;
}

size_t hstep_workspace_floats(const struct hstep_device *device, const struct hstep_tensor *t)
{
    if (!(t->matrix || t->pairs) || !t->tracks) return 0;
    /* halfstep_run_norms() puts the vectors aside. */
    return device->workspace(t) + (t->pairs ? (size_t)(t->n_rows + t->matrices * t->row_length) : 0);
}

struct hstep_tensor hstep_laid_out(const halfstep_optimizer *o, int tensor)
{
    struct hstep_tensor t = o->tensors[tensor];
    if (o->settled) return t;
    t.cautious = o->groups[t.group].hyper[HSTEP_CAUTIOUS] != 0.0;
    hstep_lay_out(&t);
    return t;
}

static void lay_out_all(halfstep_optimizer *o, int64_t *n_chunks, size_t *workspace)
{
    *n_chunks = 0;
    *workspace = 0;
    o->sums = o->matrices = o->factored = o->totals = o->parts = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        struct hstep_tensor *t = &o->tensors[i];
        *t = hstep_laid_out(o, i);
        t->first_chunk = *n_chunks;
        t->chunks = hstep_cut_tensor(t, i, NULL);
        *n_chunks += t->chunks;
        t->first_sum = o->sums;
        o->sums += t->sums;
        o->matrices += t->matrix;
        o->factored += t->pairs > 0;
        o->totals += hstep_rules[t->rule].totals;
        t->share = find_share(o, i);
        o->parts += !hstep_is_whole(t);
        for (int way = 0; way < HSTEP_WAYS; way++)
            t->fused[way] = o->device->find_fused(&o->context, t, (enum hstep_way)way);
        t->first_alike = i && are_alike(t - 1, t) ? t[-1].first_alike : i;
        const size_t floats = hstep_workspace_floats(o->device, t);
        if (floats > *workspace) *workspace = floats;
    }
}

int hstep_settle(halfstep_optimizer *o)
{
    if (o->settled) return HALFSTEP_OK;
    const struct hstep_device *device = o->device;
    int64_t n_chunks;
    size_t workspace;
    lay_out_all(o, &n_chunks, &workspace);
    int error = hstep_check_fused(o);
    if (error) return error;
    struct hstep_plan plan = o->plan;
    plan.n_tensors = o->n_tensors;
    plan.n_groups = o->n_groups;
    plan.chunks = NULL;
    plan.tasks = NULL;
    plan.statistics = NULL;
    int64_t statistics_count = hstep_sums_offset(o->n_tensors) + (int64_t)o->sums * HSTEP_EXACT_LIMBS;
    uint64_t chunk_bytes = (uint64_t)(n_chunks + 1) * sizeof *o->chunks, count = (uint64_t)o->n_tensors + 1,
             task_bytes = (uint64_t)(n_chunks + 1) * sizeof *o->tasks;
    o->chunks = malloc((size_t)chunk_bytes);
    o->tasks = malloc((size_t)task_bytes);
    error = o->chunks && o->tasks ? hstep_settle_sync(o) : HALFSTEP_ERROR_MEMORY;
    for (int i = 0; !error && i < o->n_tensors; i++)
        hstep_cut_tensor(&o->tensors[i], i, o->chunks + o->tensors[i].first_chunk);
    if (!error) task_bytes = ((uint64_t)hstep_join_chunks(o->chunks, n_chunks, o->tasks) + 1) * sizeof *o->tasks;
    if (!error) error = place_array(o, o->chunks, chunk_bytes, &plan.chunks);
    if (!error) error = place_array(o, o->tasks, task_bytes, &plan.tasks);
    if (!error) error = place_array(o, o->tensors, count * sizeof *o->tensors, &plan.tensors);
    if (!error) error = place_array(o, o->groups, ((uint64_t)o->n_groups + 1) * sizeof *o->groups, &plan.groups);
    if (!error) error = allocate(o, count * sizeof *plan.updates, &plan.updates);
    if (!error) error = device->zero(&o->context, plan.updates, count * sizeof *plan.updates);
    if (!error) error = allocate(o, (uint64_t)statistics_count * sizeof *plan.statistics, &plan.statistics);
    if (!error) error = allocate(o, workspace * sizeof *plan.workspace, &plan.workspace);
    if (!error && !device->shared) {
        error = device->copy(&o->context, (void *)(uintptr_t)plan.chunks, o->chunks, chunk_bytes);
        if (!error) error = device->copy(&o->context, (void *)(uintptr_t)plan.tasks, o->tasks, task_bytes);
    }
    if (!error && device->settle) error = device->settle(&o->context, &plan);
    if (error) {
        int64_t *first = o->plan.statistics;
        o->plan = plan;
        hstep_release_plan(o);
        o->plan = (struct hstep_plan){.statistics = first, .round_squares = plan.round_squares, .ledger = plan.ledger};
        if (error != HALFSTEP_ERROR_MEMORY) return hstep_why(o, error);
        uint64_t bytes = chunk_bytes + task_bytes + count * sizeof *plan.updates +
                         (uint64_t)statistics_count * sizeof *plan.statistics + workspace * sizeof *plan.workspace;
        return hstep_fail_memory(o, bytes, "the plan of %d tensors", o->n_tensors);
    }
    device->release(&o->context, o->plan.statistics);
    o->plan = plan;
    o->scalars_unshared = o->totals > 0;
    o->workspace_bytes = workspace * sizeof *plan.workspace;
    o->settled = 1;
    return HALFSTEP_OK;
}

int hstep_cut_again(halfstep_optimizer *o)
{
    int64_t n_chunks = 0;
    for (int i = 0; i < o->n_tensors; i++) n_chunks += hstep_cut_tensor(&o->tensors[i], i, NULL);
    struct hstep_chunk *chunks = malloc((size_t)(n_chunks + 1) * sizeof *chunks);
    int64_t *tasks = malloc((size_t)(n_chunks + 1) * sizeof *tasks);
    if (!chunks || !tasks) {
        free(chunks);
        free(tasks);
        return hstep_fail_memory(o, (uint64_t)(n_chunks + 1) * (sizeof *chunks + sizeof *tasks),
                                 "the plan of %d tensors", o->n_tensors);
    }
    for (int64_t i = 0, n = 0; i < o->n_tensors; n += o->tensors[i++].chunks) {
        o->tensors[i].first_chunk = n;
        o->tensors[i].chunks = hstep_cut_tensor(&o->tensors[i], (int)i, chunks + n);
    }
    hstep_join_chunks(chunks, n_chunks, tasks);
    free(o->chunks);
    free(o->tasks);
    o->plan.chunks = o->chunks = chunks;
    o->plan.tasks = o->tasks = tasks;
    return HALFSTEP_OK;
}

void hstep_release_plan(halfstep_optimizer *o)
{
    struct hstep_plan *plan = &o->plan;
    if (!o->device->shared) {
        o->device->release(&o->context, (void *)(uintptr_t)plan->chunks);
        o->device->release(&o->context, (void *)(uintptr_t)plan->tasks);
        o->device->release(&o->context, plan->tensors);
        o->device->release(&o->context, plan->groups);
    }
    o->device->release(&o->context, plan->updates);
    o->device->release(&o->context, plan->statistics);
    o->device->release(&o->context, plan->workspace);
    free(o->chunks);
    free(o->tasks);
    o->chunks = NULL;
    o->tasks = NULL;
}
