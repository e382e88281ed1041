/* The optimizer of all ranks as one that has every tensor whole: what is saved, hashed and read back is that of one
 * process. */
#include <stdlib.h>
#include <string.h>

#include "trainer/ranks/train_ranks.h"

enum { SCALARS = 4 + HALFSTEP_MAX_STATES };

int ranks_make_whole(struct run *run, int with_states, struct holding *whole)
{
    /* A run that has nothing but an optimizer; its errors are this run's. */
    struct run other = {.config = run->config,
                        .result = run->result,
                        .error = run->error,
                        .error_bytes = run->error_bytes,
                        .shape = run->shape,
                        .tensors = run->tensors,
                        .adds_up = run->adds_up,
                        .ranks = 1,
                        .threads = run->threads};
    *whole = (struct holding){&run->shape, NULL, run->weights, run->tensors, 2, run->rule};
    int status = run_create_optimizer(&other);
    if (!status) status = run_add_tensors(&other);
    if (!status && with_states && halfstep_allocate_states(other.optimizer) != HALFSTEP_OK)
        status = run_fail(run, "%s", halfstep_error_detail(other.optimizer));
    if (status) halfstep_destroy(other.optimizer);
    else whole->optimizer = other.optimizer;
    return status;
}

/* A stream of bytes of one slot: here, and of the whole. Its rows are of equal size. */
struct stream {
    void *own, *whole;
    uint64_t bytes; /* of the whole */
};

typedef int stream_visitor(struct run *run, int tensor, const struct stream *stream);

static int each_stream(struct run *run, const struct holding *whole, stream_visitor *visit)
{
    for (int i = 0; i < run->tensors; i++) {
        for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
            halfstep_slot_info own = {.struct_size = sizeof own}, all = own, *sizes = &all;
            if (slot == HALFSTEP_SLOT_GRADIENT ||
                halfstep_get_slot_info(run->optimizer, i, slot, &own) != HALFSTEP_OK || own.format < 0)
                continue;
            if (halfstep_get_slot_info(whole->optimizer, i, slot, sizes) != HALFSTEP_OK)
                return run_fail(run, "%s", halfstep_error_detail(whole->optimizer));
            const struct stream codes = {own.code, all.code, all.code_bytes},
                                extra = {own.extra, all.extra, all.extra_bytes};
            int status = slot != HALFSTEP_SLOT_WEIGHT && codes.bytes ? visit(run, i, &codes) : 0;
            if (!status && extra.bytes) status = visit(run, i, &extra);
            if (status) return status;
        }
    }
    return 0;
}

static uint64_t part_of(const struct run *run, int tensor, const struct stream *stream, int64_t rows)
{
    struct lm_tensor info;
    lm_tensor_info(&run->shape, tensor, &info);
    return stream->bytes * (uint64_t)rows / (uint64_t)info.rows;
}

static int collect_stream(struct run *run, int tensor, const struct stream *stream)
{
    for (int rank = 0; rank < run->ranks; rank++) {
        struct rows rows = ranks_rows(run, tensor, rank);
        uint64_t bytes = part_of(run, tensor, stream, rows.n);
        char *there = run->rank == 0 ? (char *)stream->whole + part_of(run, tensor, stream, rows.first) : NULL;
        int bad = 0;
        if (!bytes) continue;
        if (rank == 0 && run->rank == 0) memcpy(there, stream->own, bytes);
        else if (run->rank == 0) bad = run->dist->receive(there, bytes, rank, 0);
        else if (run->rank == rank) bad = run->dist->send(stream->own, bytes, 0, 0);
        if (bad) return run_fail(run, "%s", run->dist->error());
    }
    return ranks_wait(run);
}

static int take_stream(struct run *run, int tensor, const struct stream *stream)
{
    struct rows rows = ranks_rows(run, tensor, run->rank);
    memcpy(stream->own, (const char *)stream->whole + part_of(run, tensor, stream, rows.first),
           part_of(run, tensor, stream, rows.n));
    return 0;
}

/* The names of what is kept of a tensor as numbers. */
static int list_scalars(struct run *run, int tensor, char names[SCALARS][80])
{
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    int n = 0;
    halfstep_get_rule_info(run->rule, &rule);
    for (int k = 0; k < rule.scalars; k++) snprintf(names[n++], sizeof names[0], "%s", rule.scalar_name[k]);
    for (int k = 0; k < rule.states; k++) {
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        if (halfstep_get_slot_info(run->optimizer, tensor, HALFSTEP_SLOT_STATE + k, &slot) == HALFSTEP_OK && slot.grid)
            snprintf(names[n++], sizeof names[0], "%s.grid", slot.name);
    }
    return n;
}

/* Numbers of tensors: those of the first rank that has rows of it. */
static int copy_scalars(struct run *run, halfstep_optimizer *to)
{
    double *values = calloc((size_t)run->tensors * SCALARS, sizeof *values);
    char names[SCALARS][80];
    int status = values ? 0 : run_fail(run, "out of memory");
    for (int i = 0; i < run->tensors && !status; i++) {
        int first = 0, n = list_scalars(run, i, names);
        while (ranks_rows(run, i, first).n == 0) first++;
        for (int k = 0; k < n && first == run->rank; k++)
            halfstep_get_scalar(run->optimizer, i, names[k], &values[i * SCALARS + k]);
    }
    if (!status) status = ranks_share_numbers(run, values, (size_t)run->tensors * SCALARS);
    for (int i = 0; i < run->tensors && to && !status; i++) {
        int n = list_scalars(run, i, names);
        for (int k = 0; k < n && !status; k++)
            if (halfstep_set_scalar(to, i, names[k], values[i * SCALARS + k]) != HALFSTEP_OK)
                status = run_fail(run, "%s", halfstep_error_detail(to));
    }
    free(values);
    return status;
}

/* What belongs to no row. */
static int copy_counts(struct run *run, const halfstep_optimizer *from, halfstep_optimizer *to)
{
    int code = halfstep_set_skipped_steps(to, halfstep_skipped_steps(from));
    if (!code) code = halfstep_set_gradient_norm(to, halfstep_gradient_norm(from));
    for (int32_t g = 0; g < halfstep_group_count(from) && !code; g++) {
        uint64_t steps;
        code = halfstep_get_group_steps(from, g, &steps);
        if (!code) code = halfstep_set_group_steps(to, g, steps);
    }
    for (int i = 0; i < run->tensors && !code; i++) {
        halfstep_counters counters = {.struct_size = sizeof counters};
        code = halfstep_get_counters(from, i, &counters);
        if (!code) code = halfstep_set_counters(to, i, &counters);
    }
    /* The schedule's place, which is set for each step. */
    double scale = 1;
    if (!code) code = halfstep_get_hyper(from, HALFSTEP_ALL_GROUPS, "gradient_scale", &scale);
    if (!code) code = halfstep_set_hyper(to, HALFSTEP_ALL_GROUPS, "gradient_scale", scale);
    return code == HALFSTEP_OK ? 0 : run_fail(run, "%s", halfstep_error_detail(to));
}

int ranks_collect(struct run *run, struct holding *whole)
{
    *whole = run->holding;
    if (!run->dist) return 0;
    *whole = (struct holding){0};
    int status = run->rank == 0 ? ranks_make_whole(run, 1, whole) : 0;
    /* The others would wait for ever. */
    if (status) return status;
    struct holding sizes = *whole;
    if (run->rank != 0) sizes.optimizer = run->whole;
    status = each_stream(run, &sizes, collect_stream);
    if (!status) status = copy_scalars(run, whole->optimizer);
    if (!status && whole->optimizer) status = copy_counts(run, run->optimizer, whole->optimizer);
    return status;
}

void ranks_drop(struct run *run, struct holding *whole)
{
    if (whole->optimizer && whole->optimizer != run->optimizer) halfstep_destroy(whole->optimizer);
    whole->optimizer = NULL;
}

int ranks_take_own(struct run *run, const struct holding *whole)
{
    int status = each_stream(run, whole, take_stream);
    char names[SCALARS][80];
    for (int i = 0; i < run->tensors && !status; i++) {
        int n = list_scalars(run, i, names);
        for (int k = 0; k < n && !status; k++) {
            double value;
            if (halfstep_get_scalar(whole->optimizer, i, names[k], &value) != HALFSTEP_OK ||
                halfstep_set_scalar(run->optimizer, i, names[k], value) != HALFSTEP_OK)
                status = run_fail(run, "%s", halfstep_error_detail(run->optimizer));
        }
    }
    return status ? status : copy_counts(run, whole->optimizer, run->optimizer);
}
