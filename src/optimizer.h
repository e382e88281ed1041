/* The inside of a handle, shared by halfstep.c (arguments), slots.c (memory), step.c (steps) and update.c (their work). */
#ifndef HSTEP_OPTIMIZER_H
#define HSTEP_OPTIMIZER_H

#include <stdatomic.h>

#include "exact.h"
#include "kernels.h"
#include "schedule.h"

struct hstep_slot {
    int format, nonneg, fell_back; /* format: HSTEP_FORMAT_NONE where nothing is stored */
    int root;   /* 0, or of a second moment on a decaying grid (grid.h): that of formats.def */
    float grid; /* of what is stored now; 1 where root is 0. Changed by hstep_set_grid() */
    double *shown; /* the host's copy of grid, or NULL */
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
    /* Elements are worked on in units: 32, or the longest block of a state. A unit starts at a multiple of its length in
     * index space where rows are dense in it, else at such a column. */
    int unit, dense;
    int matrix; /* stepped as a matrix */
    struct hstep_slot slot[HSTEP_SLOTS];
    const struct hstep_fused_row *fused; /* the row of fused.def that fits, or NULL */
    uint64_t state_steps, full_steps, writes;
    float *step; /* the host's copy of state_steps, or NULL */
    double scalar[HSTEP_MAX_NAMED_SCALARS];
    int64_t first_chunk, chunks;
    /* Sums over the tensor that come before its update: those of the rule, then one for each state whose scale is one. Their
     * limbs start at number `first_sum` of those of all tensors. */
    int sums, first_sum;
    int norms_made; /* by halfstep_step_tensor_norms(), for the next finish */
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
    int mode;              /* of the rule function */
    uint32_t stochastic;   /* bit per slot */
    uint32_t first;        /* bit per slot: a copy of the weight is made before the update, */
    uint32_t copy;         /* and the weight made a copy of the slot after it */
    int skip, fused;
    int still;             /* lr is 0: weights are left alone, whatever 0 times an infinite weight would be */
    int micro;             /* only states are written */
    int own;               /* the constants come from the tensor itself: no other may take them over */
    double scalar[HSTEP_MAX_NAMED_SCALARS]; /* of after the update */
    float scale[HSTEP_SLOTS];               /* of states that have one for the whole tensor, after the update */
    float grid[HSTEP_SLOTS];                /* after the update, of slots that have one */
    float onto[HSTEP_SLOTS];                /* what is coded is multiplied by: hstep_onto_grid() of it */
};

#define HSTEP_DETAIL_BYTES 256

/* Statistics of a step: the limbs of the sum of squares, then for each tensor whether it is not finite, then the limbs of the
 * sums over single tensors. */
#define HSTEP_STATISTICS_HEAD HSTEP_EXACT_LIMBS
#define HSTEP_MAX_SUMS (HSTEP_MAX_NORMS + HALFSTEP_MAX_STATES)

struct halfstep_optimizer {
    const struct hstep_kernels *kernels;
    int threads;
    uint64_t seed;
    halfstep_run_tasks run;
    void *host;
    int generator; /* row */
    int scan, clip, missing;
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
    int sums;            /* of all tensors */
    int norms_made;      /* by halfstep_step_norms(), for the next finish */
    void *memory;        /* the library's own, or NULL */
    /* For matrices, the largest of which it fits; one at a time. */
    float *workspace;
    uint64_t workspace_bytes;
    atomic_flag workspace_lock;

    /* Clipping in release: squares of the round that runs now, norm of the one before. */
    int64_t round_squares[HSTEP_EXACT_LIMBS];
    double round_norm;

    double gradient_norm;
    atomic_uint_least64_t skipped;
    atomic_int nonfinite_tensor;
    uint64_t serial; /* among all handles of the process */
    atomic_flag detail_lock;
    char detail[HSTEP_DETAIL_BYTES];
};

/* Sets the detail sentence and returns the code. */
int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Errors with ARGUMENT unless there is such a tensor. */
int hstep_check_tensor(const halfstep_optimizer *o, int32_t tensor);

/* Runs, index space, unit and sums of a tensor whose slots are chosen. */
void hstep_lay_out(const halfstep_optimizer *o, struct hstep_tensor *t);
/* How many chunks a laid out tensor has, with `index` as its number; written where out is not NULL. */
int64_t hstep_cut_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out);
/* Chunk lists, fused rows and per-step arrays; afterwards no group or tensor can be added. */
int hstep_settle(halfstep_optimizer *o);
/* Errors with ORDER if some slot that stores something has no memory. */
int hstep_check_bound(const halfstep_optimizer *o, int first_tensor, int n);

int64_t hstep_blocks_per_row(const struct hstep_tensor *t, int format);
/* The grid of a slot that has one, and the host's copy. */
static inline void hstep_set_grid(struct hstep_slot *slot, float grid)
{
    slot->grid = grid;
    if (slot->shown) *slot->shown = (double)grid;
}

/* What is worked on as a whole: groups of 32 elements, or blocks where they are longer. */
int hstep_unit_of(int format);
/* Bytes from the start of a stream to an element held here; for block formats, the first of a block. */
int64_t hstep_code_offset(const struct hstep_tensor *t, int format, int64_t element);
int64_t hstep_extra_offset(const struct hstep_tensor *t, int format, int64_t element);
/* The main stream alone, as a format: what the scan of a gradient slot reads. */
int hstep_plain_format(int format);

/* n tasks on the host's threads or the pool. */
void hstep_run(const halfstep_optimizer *o, halfstep_task task, void *argument, int64_t n);

/* Random words of n elements, a multiple of 32, from element `index`, a multiple of 32. */
void hstep_fill_words(const halfstep_optimizer *o, const struct hstep_key *stream, uint64_t index, uint32_t *words,
                      int64_t n);

void *hstep_allocate(size_t bytes);
void hstep_free(void *memory);

/* From a group's hyper-parameters, with the rest of p filled in by the caller, to the constants of its rule. */
void hstep_prepare_rule(const struct hstep_group *group, struct hstep_prepare *p, float *k);
/* The group's lr at its next step. */
double hstep_group_lr(const struct hstep_group *group);
/* What a write leaves of a state: 1 of one that has no decay rate, such as a maximum. */
double hstep_state_beta(const struct hstep_group *group, int state);
/* 1 where these hyper-parameters need it at all (sgd without momentum does not). */
int hstep_state_needed(const struct hstep_group *group, int state);

#endif
