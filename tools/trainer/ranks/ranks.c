#define HALFSTEP_ADVANCED
#include "trainer/ranks/ranks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/process/limits.h"

#include "common/interrupt.h"

static int dist_fail(struct run *run) { return run_fail(run, "%s", run->dist->error()); }

/* ---- Rows of each rank
 * -------------------------------------------------------------------------------------------- */

int ranks_threads(const struct run_config *config)
{
    if (config->threads) return (int)config->threads;
    int threads = halfstep_default_threads();
    const char *asked = getenv("HALFSTEP_THREADS"), *asked_of_all = getenv("OMP_NUM_THREADS");
    if (!config->dist || (asked && *asked) || (asked_of_all && *asked_of_all)) return threads;
    /* If a launcher has bound each process to processors of its own, the library's default is a share already. A
     * container's quota is for all of them. */
    const double all = fmin((double)sysconf(_SC_NPROCESSORS_ONLN), ceil(hstep_processor_quota("")));
    int share = (int)all / config->dist->local_ranks;
    if (share < 1) share = 1;
    return threads < share ? threads : share;
}

int ranks_check(struct run *run)
{
    const struct run_config *c = run->config;
    if (!run->dist) return 0;
    if (c->micro_steps < run->ranks)
        run_fail(run, "--micro-steps %lld cannot be shared out among %d processes: it must be at least their number",
                 (long long)c->micro_steps, run->ranks);
    else if (c->release)
        run_fail(
            run,
            "--release: does not work with several processes, which each have the gradients of some micro-steps only");
    else if (strcmp(c->accumulator, "tree") != 0)
        run_fail(run, "--accumulator %s: does not work with several processes; use --accumulator tree", c->accumulator);
    else return 0;
    return 2;
}

struct rows ranks_rows(const struct run *run, int tensor, int rank)
{
    if (run->dist) return run->parts.rows[tensor * run->ranks + rank];
    const struct lm_tensor info = run_tensor(run, tensor);
    return (struct rows){0, info.rows};
}

void *ranks_own(const struct run *run, int tensor, void *whole, int dtype)
{
    const struct lm_tensor info = run_tensor(run, tensor);
    return (char *)whole + (size_t)ranks_rows(run, tensor, run->rank).first * lm_row_bytes(dtype, info.row_length);
}

/* Finds out if the recipe needs whole matrices or a second sum over the ranks. Rules of whole matrices need whole
 * matrices, and so do states that are not per element. Rules of two passes need the second sum. Formats with one scale
 * for a tensor need both. */
static void judge_recipe(struct run *run)
{
    struct ranks *p = &run->parts;
    const halfstep_rule_info rule = rule_info(run->rule);
    p->whole_tensors = rule.matrix;
    p->two_sums = rule.two_pass;
    for (int i = 0; i < rule.states; i++) p->whole_tensors |= rule.state_extent[i] != HALFSTEP_EXTENT_ELEMENTS;
    for (int i = 0; i < run->tensors; i++) {
        for (int32_t slot = HALFSTEP_SLOT_STATE; slot < HALFSTEP_SLOT_STATE + rule.states; slot++) {
            halfstep_format_info format = format_info(slot_info(run->whole, i, slot).format);
            if (format.block && format.geometry == HALFSTEP_GEOMETRY_TENSOR) p->whole_tensors = p->two_sums = 1;
        }
    }
}

/* Returns the number of rows that a rank's share is a multiple of, so that no block of any format is split. */
static int64_t row_step(int64_t row_length)
{
    enum { LONGEST_BLOCK = 256 };
    int64_t step = LONGEST_BLOCK;
    while (step > 1 && row_length % 2 == 0) {
        row_length /= 2;
        step /= 2;
    }
    return step;
}

/* Splits the elements of all tensors, one after the other, into shares of about the same length. */
static void share_rows(struct run *run)
{
    int64_t all = lm_parameter_count(&run->shape), before = 0;
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor info = run_tensor(run, i);
        int whole = run->parts.whole_tensors && info.ndim >= 2;
        int64_t step = whole ? info.rows : row_step(info.row_length), done = 0;
        for (int rank = 0; rank < run->ranks; rank++) {
            double end = (double)all * (rank + 1) / run->ranks - (double)before;
            int64_t row = (int64_t)(end / (double)info.row_length / (double)step + 0.5) * step;
            if (row > info.rows || rank + 1 == run->ranks) row = info.rows;
            if (row < done) row = done;
            run->parts.rows[i * run->ranks + rank] = (struct rows){done, row - done};
            done = row;
        }
        before += info.rows * info.row_length;
    }
}

static int list_nodes(struct run *run)
{
    struct ranks *p = &run->parts;
    int capacity = 0;
    for (int rank = 0; rank < run->ranks; rank++) {
        struct tree tree;
        int64_t leaves = run->config->micro_steps, first = tree_first_leaf(leaves, run->ranks, rank);
        if (tree_plan(&tree, leaves, first, tree_first_leaf(leaves, run->ranks, rank + 1) - first) != 0)
            return run_fail(run, "out of memory");
        capacity += tree.nodes;
        struct tree_node *node = realloc(p->node, (size_t)capacity * sizeof *node);
        if (node) p->node = node;
        int *node_rank = realloc(p->node_rank, (size_t)capacity * sizeof *node_rank);
        if (node_rank) p->node_rank = node_rank;
        for (int k = 0; node && node_rank && k < tree.nodes; k++) {
            p->node[p->nodes] = tree.node[k];
            p->node_rank[p->nodes++] = rank;
        }
        tree_free(&tree);
        if (!node || !node_rank) return run_fail(run, "out of memory");
    }
    p->merge = calloc((size_t)capacity, sizeof *p->merge);
    p->sums = calloc((size_t)capacity, sizeof *p->sums);
    if (!p->merge || !p->sums) return run_fail(run, "out of memory");
    tree_join(run->config->micro_steps, p->node, p->nodes, p->merge);
    return 0;
}

int ranks_open(struct run *run)
{
    struct ranks *p = &run->parts;
    size_t n = (size_t)run->tensors;
    p->row_offset = calloc(n + 1, sizeof *p->row_offset);
    if (!p->row_offset) return run_fail(run, "out of memory");
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor info = run_tensor(run, i);
        p->row_offset[i + 1] = p->row_offset[i] + info.rows;
    }
    p->row_squares = calloc((size_t)p->row_offset[n], sizeof *p->row_squares);
    if (!p->row_squares) return run_fail(run, "out of memory");
    if (!run->dist) return 0;
    p->rows = calloc(n * (size_t)run->ranks, sizeof *p->rows);
    p->own_offset = calloc(n + 1, sizeof *p->own_offset);
    if (!p->rows || !p->own_offset) return run_fail(run, "out of memory");
    struct holding whole;
    int status = ranks_make_whole(run, 0, &whole);
    if (status) return status;
    run->whole = whole.optimizer;
    judge_recipe(run);
    share_rows(run);
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor info = run_tensor(run, i);
        p->own_offset[i + 1] = p->own_offset[i] + (ranks_rows(run, i, run->rank).n * info.row_length + 15) / 16 * 16;
    }
    int foreign = 0;
    status = list_nodes(run);
    if (status) return status;
    for (int k = 0; k < p->nodes; k++) foreign += p->node_rank[k] != run->rank;
    size_t bytes = (size_t)foreign * (size_t)p->own_offset[n] * sizeof *p->received;
    p->received = aligned_alloc(64, bytes ? bytes : 64);
    return p->received ? 0 : run_fail(run, "out of memory: %zu bytes", bytes);
}

void ranks_close(struct run *run)
{
    struct ranks *p = &run->parts;
    free(p->rows);
    free(p->node);
    free(p->node_rank);
    free(p->merge);
    free(p->own_offset);
    free(p->received);
    free(p->sums);
    free(p->row_offset);
    free(p->row_squares);
}

/* ---- Gradients --------------------------------------------------------------------------------------------------- */

/* Returns the sums of a node for the own rows: in the tree of this rank, or in `received`. */
static float *node_sum(struct run *run, int tensor, int node)
{
    struct ranks *p = &run->parts;
    if (p->node_rank[node] == run->rank)
        return ranks_own(run, tensor, run_tree_slot(run, p->node[node].slot, tensor), LM_F32);
    int foreign = 0;
    for (int k = 0; k < node; k++) foreign += p->node_rank[k] != run->rank;
    return p->received + foreign * p->own_offset[run->tensors] + p->own_offset[tensor];
}

static size_t row_bytes(const struct run *run, int tensor)
{
    const struct lm_tensor info = run_tensor(run, tensor);
    return (size_t)info.row_length * sizeof(float);
}

int ranks_begin_exchange(struct run *run)
{
    struct ranks *p = &run->parts;
    for (int i = 0; run->dist && i < run->tensors; i++) {
        size_t bytes = (size_t)ranks_rows(run, i, run->rank).n * row_bytes(run, i);
        for (int k = 0; bytes && k < p->nodes; k++)
            if (p->node_rank[k] != run->rank && run->dist->receive(node_sum(run, i, k), bytes, p->node_rank[k], i) != 0)
                return dist_fail(run);
    }
    return 0;
}

int ranks_exchange(struct run *run, int tensor)
{
    for (int k = 0; k < run->tree.nodes; k++) {
        char *sum = (char *)run_tree_slot(run, run->tree.node[k].slot, tensor);
        for (int rank = 0; rank < run->ranks; rank++) {
            struct rows rows = ranks_rows(run, tensor, rank);
            size_t each = row_bytes(run, tensor);
            if (rank != run->rank && rows.n &&
                run->dist->send(sum + (size_t)rows.first * each, (size_t)rows.n * each, rank, tensor) != 0)
                return dist_fail(run);
        }
    }
    return run->dist->progress() == 0 ? 0 : dist_fail(run);
}

int ranks_finish_exchange(struct run *run)
{
    struct ranks *p = &run->parts;
    if (!run->dist) return 0;
    if (run->dist->wait() != 0) return dist_fail(run);
    for (int i = 0; i < run->tensors; i++) {
        for (int k = 0; k < p->nodes; k++) p->sums[k] = node_sum(run, i, k);
        for (int m = 0; ranks_rows(run, i, run->rank).n && m + 1 < p->nodes; m++)
            if (halfstep_accumulate(run->optimizer, i, p->sums[p->merge[m].into], "f32", p->sums[p->merge[m].from],
                                    "f32", 1) != HALFSTEP_OK)
                return run_fail_in(run, run->optimizer);
        run->gradients[i] = p->sums[0];
    }
    return 0;
}

int ranks_sum_of_squares(struct run *run, double *squares)
{
    struct ranks *p = &run->parts;
    size_t rows = (size_t)p->row_offset[run->tensors];
    memset(p->row_squares, 0, rows * sizeof *p->row_squares);
    for (int i = 0; i < run->tensors; i++) {
        struct rows own = ranks_rows(run, i, run->rank);
        const struct lm_tensor info = run_tensor(run, i);
        const float *gradient = run->gradients[i];
        for (int64_t row = 0; row < own.n; row++) {
            double sum = 0;
            for (int64_t k = 0; k < info.row_length; k++, gradient++) sum += (double)*gradient * (double)*gradient;
            p->row_squares[p->row_offset[i] + own.first + row] = sum;
        }
    }
    if (ranks_share_numbers(run, p->row_squares, rows) != 0) return 1;
    *squares = 0;
    for (size_t i = 0; i < rows; i++) *squares += p->row_squares[i];
    return 0;
}

/* ---- Agreement --------------------------------------------------------------------------------------------------- */

int ranks_share_numbers(struct run *run, double *numbers, size_t n)
{
    if (!run->dist) return 0;
    int64_t *bits = malloc((n ? n : 1) * sizeof *bits);
    if (!bits) return run_fail(run, "out of memory");
    /* One rank holds each number and all others hold 0. An integer sum over the ranks gives every rank the number's
     * bits. */
    memcpy(bits, numbers, n * sizeof *bits);
    int bad = run->dist->sum(bits, n);
    memcpy(numbers, bits, n * sizeof *bits);
    free(bits);
    return bad ? dist_fail(run) : 0;
}

int ranks_share_losses(struct run *run, double *losses)
{
    size_t n = (size_t)run->config->micro_steps;
    if (!run->dist) return 0;
    for (int rank = 0; rank < run->ranks; rank++) losses[n + (size_t)rank] = 0;
    losses[n + (size_t)run->rank] = interrupt_pending();
    if (ranks_share_numbers(run, losses, n + (size_t)run->ranks) != 0) return 1;
    for (int rank = 0; rank < run->ranks && !run->signal; rank++) run->signal = (int)losses[n + (size_t)rank];
    return 0;
}

int ranks_hand_out(struct run *run)
{
    if (!run->dist) return 0;
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor info = run_tensor(run, i);
        size_t each = lm_row_bytes(run->model_weights[i].dtype, info.row_length);
        for (int rank = 0; rank < run->ranks; rank++) {
            struct rows rows = ranks_rows(run, i, rank);
            if (rows.n &&
                run->dist->share((char *)run->weights[i] + (size_t)rows.first * each, (size_t)rows.n * each, rank) != 0)
                return dist_fail(run);
        }
    }
    return ranks_wait(run);
}

int ranks_hand_out_floats(struct run *run, int tensor, float *whole)
{
    size_t each = row_bytes(run, tensor);
    for (int rank = 0; run->dist && rank < run->ranks; rank++) {
        struct rows rows = ranks_rows(run, tensor, rank);
        if (rows.n && run->dist->share((char *)whole + (size_t)rows.first * each, (size_t)rows.n * each, rank) != 0)
            return dist_fail(run);
    }
    return 0;
}

int ranks_wait(struct run *run) { return !run->dist || run->dist->wait() == 0 ? 0 : dist_fail(run); }

/* Finds the first tensor whose gradient was not finite. Each rank knows only its own rows. */
static int name_offender(struct run *run)
{
    int64_t *places = calloc((size_t)run->ranks, sizeof *places), first = 0;
    if (!places) return run_fail(run, "out of memory");
    int32_t index = halfstep_tensor_find(run->optimizer, halfstep_nonfinite_tensor(run->optimizer, NULL));
    places[run->rank] = index + 1;
    int bad = run->dist->sum(places, (size_t)run->ranks);
    for (int rank = 0; rank < run->ranks; rank++)
        if (places[rank] && (!first || places[rank] < first)) first = places[rank];
    free(places);
    if (bad) return dist_fail(run);
    struct lm_tensor info;
    if (first && lm_tensor_info(&run->shape, (int)first - 1, &info) == 0)
        snprintf(run->offender, sizeof run->offender, "%s", info.name);
    return 0;
}

int ranks_step(struct run *run, int *code)
{
    halfstep_optimizer *o = run->optimizer;
    const void *const *gradients = (const void *const *)run->gradients;
    if (!run->dist) {
        *code = halfstep_step(o, run->own_weights, gradients);
        return 0;
    }
    halfstep_call call = {.struct_size = sizeof call, .weights = run->own_weights, .gradients = gradients};
    size_t n = (size_t)halfstep_statistics_count(o, &call), offset = (size_t)halfstep_norms_offset(o, &call);
    call.statistics = calloc(n + 1, sizeof *call.statistics);
    if (!call.statistics) return run_fail(run, "out of memory");
    int bad = 0;
    *code = halfstep_run_begin(o, &call);
    if (*code == HALFSTEP_OK) bad = run->dist->sum(call.statistics, n);
    if (*code == HALFSTEP_OK && !bad && run->parts.two_sums) {
        *code = halfstep_run_norms(o, &call);
        if (*code == HALFSTEP_OK) bad = run->dist->sum(call.statistics + offset, n - offset);
    }
    if (*code == HALFSTEP_OK && !bad) *code = halfstep_run_finish(o, &call);
    free(call.statistics);
    if (bad) return dist_fail(run);
    if (*code == HALFSTEP_NONFINITE && name_offender(run) != 0) return 1;
    return *code == HALFSTEP_OK || *code == HALFSTEP_NONFINITE ? ranks_hand_out(run) : 0;
}
