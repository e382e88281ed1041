/* Converts between the states of all ranks and one optimizer with every tensor whole. Saves, hashes and loads use the
 * whole one, so that they are the same as with one process. */
#include <stdlib.h>
#include <string.h>

#include "trainer/ranks/ranks.h"

int ranks_make_whole(struct run *run, int with_states, struct holding *whole)
{
    /* A run with nothing but an optimizer, which reports its errors through `run`. */
    struct run other = {.config = run->config,
                        .result = run->result,
                        .error = run->error,
                        .error_bytes = run->error_bytes,
                        .shape = run->shape,
                        .tensors = run->tensors,
                        .adds_up = run->adds_up,
                        .ranks = 1,
                        .threads = run->threads};
    *whole = (struct holding){&run->shape, NULL, run->weights, run->tensors};
    int status = run_create_optimizer(&other);
    if (!status) status = run_add_tensors(&other);
    if (!status && with_states && halfstep_allocate_states(other.optimizer) != HALFSTEP_OK)
        status = run_fail_in(run, other.optimizer);
    if (status) halfstep_destroy(other.optimizer);
    else whole->optimizer = other.optimizer;
    return status;
}

/* The codes or the extra plane of one slot: of the own rows, and of the whole tensor. All rows have equal size. */
struct plane {
    void *own, *whole;
    uint64_t bytes; /* of the whole tensor */
};

typedef int plane_visitor(struct run *run, int tensor, const struct plane *plane);

static int each_plane(struct run *run, const struct holding *whole, plane_visitor *visit)
{
    for (int i = 0; i < run->tensors; i++) {
        for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
            const halfstep_slot_info own = slot_info(run->optimizer, i, slot),
                                     all = slot_info(whole->optimizer, i, slot);
            if (slot == HALFSTEP_SLOT_GRADIENT || own.format < 0) continue;
            const struct plane codes = {own.code, all.code, all.code_bytes},
                               extra = {own.extra, all.extra, all.extra_bytes};
            int status = slot != HALFSTEP_SLOT_WEIGHT && codes.bytes ? visit(run, i, &codes) : 0;
            if (!status && extra.bytes) status = visit(run, i, &extra);
            if (status) return status;
        }
    }
    return 0;
}

static uint64_t part_of(const struct run *run, int tensor, const struct plane *plane, int64_t rows)
{
    const struct lm_tensor info = run_tensor(run, tensor);
    return plane->bytes * (uint64_t)rows / (uint64_t)info.rows;
}

static int collect_plane(struct run *run, int tensor, const struct plane *plane)
{
    for (int rank = 0; rank < run->ranks; rank++) {
        struct rows rows = ranks_rows(run, tensor, rank);
        uint64_t bytes = part_of(run, tensor, plane, rows.n);
        char *there = run->rank == 0 ? (char *)plane->whole + part_of(run, tensor, plane, rows.first) : NULL;
        int bad = 0;
        if (!bytes) continue;
        if (rank == 0 && run->rank == 0) memcpy(there, plane->own, bytes);
        else if (run->rank == 0) bad = run->dist->receive(there, bytes, rank, 0);
        else if (run->rank == rank) bad = run->dist->send(plane->own, bytes, 0, 0);
        if (bad) return run_fail(run, "%s", run->dist->error());
    }
    return ranks_wait(run);
}

static int take_plane(struct run *run, int tensor, const struct plane *plane)
{
    struct rows rows = ranks_rows(run, tensor, run->rank);
    memcpy(plane->own, (const char *)plane->whole + part_of(run, tensor, plane, rows.first),
           part_of(run, tensor, plane, rows.n));
    return 0;
}

/* Copies records of one kind. */
static int copy_records(const halfstep_optimizer *from, halfstep_optimizer *to, int32_t kind, int32_t n)
{
    int code = HALFSTEP_OK;
    for (int32_t i = 0; i < n && !code; i++) {
        halfstep_record record = {.struct_size = sizeof record, .kind = kind, .index = i};
        code = halfstep_get_record(from, &record);
        if (!code) code = halfstep_set_record(to, &record);
    }
    return code;
}

/* Copies the records of tensors to `to`, or takes part in it if that is NULL. Counters are the same on every rank.
 * Scalars and grids of a tensor come from the first rank that has rows of it. */
static int collect_records(struct run *run, halfstep_optimizer *to)
{
    enum { SCALARS = HALFSTEP_MAX_SCALARS + HALFSTEP_MAX_STATES };
    double *values = calloc((size_t)run->tensors * SCALARS, sizeof *values);
    int status = values ? 0 : run_fail(run, "out of memory");
    halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR};
    for (record.index = 0; record.index < run->tensors && !status; record.index++) {
        int first = 0;
        while (ranks_rows(run, record.index, first).n == 0) first++;
        if (first != run->rank) continue;
        halfstep_get_record(run->optimizer, &record);
        memcpy(&values[record.index * SCALARS], record.scalar, sizeof record.scalar);
        memcpy(&values[record.index * SCALARS + HALFSTEP_MAX_SCALARS], record.grid, sizeof record.grid);
    }
    if (!status) status = ranks_share_numbers(run, values, (size_t)run->tensors * SCALARS);
    for (record.index = 0; record.index < run->tensors && to && !status; record.index++) {
        halfstep_get_record(run->optimizer, &record);
        memcpy(record.scalar, &values[record.index * SCALARS], sizeof record.scalar);
        memcpy(record.grid, &values[record.index * SCALARS + HALFSTEP_MAX_SCALARS], sizeof record.grid);
        if (halfstep_set_record(to, &record) != HALFSTEP_OK) status = run_fail_in(run, to);
    }
    free(values);
    return status;
}

/* Copies what belongs to no tensor. */
static int copy_counts(struct run *run, const halfstep_optimizer *from, halfstep_optimizer *to)
{
    halfstep_record record = {.struct_size = sizeof record}, seed = record;
    int code = halfstep_get_record(from, &record);
    if (!code) code = halfstep_get_record(to, &seed);
    record.seed = seed.seed;
    if (!code) code = halfstep_set_record(to, &record);
    if (!code) code = copy_records(from, to, HALFSTEP_RECORD_GROUP, halfstep_group_count(from));
    /* The gradient scale is a hyper-parameter that may change in each step. */
    double scale = 1;
    if (!code) code = halfstep_get_hyper(from, HALFSTEP_ALL_GROUPS, "gradient_scale", &scale);
    if (!code) code = halfstep_set_hyper(to, HALFSTEP_ALL_GROUPS, "gradient_scale", scale);
    return code == HALFSTEP_OK ? 0 : run_fail_in(run, to);
}

int ranks_collect(struct run *run, struct holding *whole)
{
    *whole = run->holding;
    if (!run->dist) return 0;
    *whole = (struct holding){0};
    int status = run->rank == 0 ? ranks_make_whole(run, 1, whole) : 0;
    /* The other ranks wait in each_plane() until this rank aborts the job. */
    if (status) return status;
    struct holding sizes = *whole;
    if (run->rank != 0) sizes.optimizer = run->whole;
    status = each_plane(run, &sizes, collect_plane);
    if (!status) status = collect_records(run, whole->optimizer);
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
    int status = each_plane(run, whole, take_plane);
    if (!status && copy_records(whole->optimizer, run->optimizer, HALFSTEP_RECORD_TENSOR, run->tensors) != HALFSTEP_OK)
        status = run_fail_in(run, run->optimizer);
    return status ? status : copy_counts(run, whole->optimizer, run->optimizer);
}
