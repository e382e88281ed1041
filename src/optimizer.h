/* The inside of a handle, shared by halfstep.c (arguments), slots.c (memory) and step.c (steps). */
#ifndef HSTEP_OPTIMIZER_H
#define HSTEP_OPTIMIZER_H

#include <stdatomic.h>

#include "exact.h"
#include "kernels.h"
#include "schedule.h"

struct hstep_slot {
    int format, nonneg, fell_back; /* format: HSTEP_FORMAT_NONE where nothing is stored */
    char *code, *extra;
    uint64_t code_bytes, extra_bytes;
};

struct hstep_tensor {
    char *name;
    uint64_t id;
    int group, ndim;
    int64_t rows, row_length, first_row, n_rows, first_column, n_columns;
    /* The part held here as `runs` stretches of `run_length` elements, dense in memory one after another; run r starts at
     * element index0 + r * index_stride of the space that random bits and blocks are indexed by. */
    int64_t runs, run_length, index_stride;
    uint64_t index0;
    struct hstep_slot slot[HSTEP_SLOTS];
    const struct hstep_fused_row *fused; /* the row of fused.def that fits, or NULL */
    uint64_t state_steps, full_steps, writes;
    int64_t first_chunk, chunks;
};

struct hstep_group {
    struct hstep_recipe recipe;
    double hyper[HSTEP_GROUP_HYPERS], own[HSTEP_MAX_OWN_HYPERS];
    double first_lr; /* lr as first set: the default reference of fully decoupled decay */
    int lr_was_set;
    int decay, schedule;
    uint64_t steps;
};

/* A stretch of one tensor that one task handles: whole runs, or a part of one. */
struct hstep_chunk {
    int tensor;
    int64_t run, runs, offset, length; /* length: elements of each run, from offset */
};

/* What one update of one tensor needs, worked out once per step. */
struct hstep_update {
    float k[HSTEP_MAX_SCALARS];
    float gradient_scale, l2;
    double centralize;     /* times the row mean of the raw gradient, or 0 */
    int clamp;
    uint32_t stochastic;   /* bit per slot */
    int skip, fused;
    int still;             /* lr is 0: weights are left alone, whatever 0 times an infinite weight would be */
};

/* Statistics of a step: the limbs of the sum of squares, then for each tensor whether it is not finite. */
#define HSTEP_STATISTICS_HEAD HSTEP_EXACT_LIMBS

struct halfstep_optimizer {
    const struct hstep_kernels *kernels;
    int threads;
    uint64_t seed;
    halfstep_run_tasks run;
    void *host;
    int generator; /* row */
    int scan, clip;
    double gradient_scale, clip_norm;

    struct hstep_group *groups;
    struct hstep_tensor *tensors;
    int n_groups, n_tensors, capacity_groups, capacity_tensors;
    /* Once it is settled what exists: */
    int settled;
    struct hstep_chunk *chunks;
    int64_t n_chunks;
    struct hstep_update *updates;
    int64_t *statistics;
    void *memory; /* the library's own, or NULL */

    /* Clipping in release: squares of the round that runs now, norm of the one before. */
    int64_t round_squares[HSTEP_EXACT_LIMBS];
    double round_norm;

    double gradient_norm;
    atomic_uint_least64_t skipped;
    atomic_int nonfinite_tensor;
    atomic_flag detail_lock;
    char detail[256];
};

/* Sets the detail sentence and returns the code. */
int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Chunk lists, fused rows and per-step arrays; afterwards no group or tensor can be added. */
int hstep_settle(halfstep_optimizer *o);
/* Errors with ORDER if some slot that stores something has no memory. */
int hstep_check_bound(const halfstep_optimizer *o, int first_tensor, int n);

int64_t hstep_blocks_per_row(const struct hstep_tensor *t, int format);

/* n tasks on the host's threads or the pool. */
void hstep_run(const halfstep_optimizer *o, halfstep_task task, void *argument, int64_t n);

/* Random words of n elements, a multiple of 32, from element `index`, a multiple of 32. */
void hstep_fill_words(const halfstep_optimizer *o, const struct hstep_key *stream, uint64_t index, uint32_t *words,
                      int64_t n);

void *hstep_allocate(size_t bytes);
void hstep_free(void *memory);

/* From a group's hyper-parameters to the constants of its rule. */
void hstep_prepare_rule(const struct hstep_group *group, double lr, double decay, uint64_t t, float *k);
/* The group's lr at its next step. */
double hstep_group_lr(const struct hstep_group *group);
/* The decay rate of a state; and 1 where these hyper-parameters need it at all (sgd without momentum does not). */
double hstep_state_beta(const struct hstep_group *group, int state);
int hstep_state_needed(const struct hstep_group *group, int state);

#endif
