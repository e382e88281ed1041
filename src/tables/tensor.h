/* What a device is told of groups and tensors: plain values and places in its own memory, so that an array of these can
 * be copied there as it is. Names, and whatever else only people ask for, are labels (handle/optimizer.h). */
#ifndef HSTEP_TENSOR_H
#define HSTEP_TENSOR_H

#include "base/rng.h"
#include "tables/tables.h"

#define HSTEP_SLOTS (2 + HALFSTEP_MAX_STATES)
/* Elements are worked on in groups of so many; random words and chunks are counted in them. */
#define HSTEP_GROUP 32
/* What is decoded at once: a whole number of groups, and of blocks of every format. */
#define HSTEP_TILE 256

struct hstep_slot {
    int format;    /* HSTEP_FORMAT_NONE where nothing is stored */
    int nonneg;    /* a state of role NONNEG, which holds nothing negative */
    int fell_back; /* the tensor is too small for the recipe's block format, and has another */
    int precise;   /* the format is the state's own (precise), in place of the recipe's */
    int root;      /* 0, or of a second moment on a decaying grid (base/grid.h): that of the format's row */
    float grid;    /* of what is stored now; 1 where root is 0 */
    char *code, *extra;
    uint64_t code_bytes, extra_bytes;
    int extent; /* HALFSTEP_EXTENT_* */
};

struct hstep_tensor {
    uint64_t id;
    int group, rule, ndim;
    int64_t rows, row_length, first_row, n_rows, first_column, n_columns;
    /* The part held here as `runs` stretches of `run_length` elements, dense in memory one after another; run r starts
     * at element index0 + r * index_stride of the space that random bits and blocks are indexed by. */
    int64_t runs, run_length, index_stride;
    uint64_t index0;
    /* Elements are worked on in units: 32, or the longest block of a state. A unit starts at a multiple of its length
     * in index space where rows are dense in it, else at such a column. */
    int unit, dense;
    int matrix;   /* stepped as a matrix */
    int pairs;    /* of vectors over rows and columns */
    int cautious; /* its group is, and the last of its sums is how many elements agree */
    int slots;    /* that its rule has, stored or not, and at least one state */
    int fused;    /* the device's row for just these formats, or -1, */
    int adjusted; /* and for updates that change the gradient before the rule sees it, or compare it with the change */
    int share;    /* the first of the tensors that have its sums of TOTALS with it; its own number without such */
    int first_alike; /* the first of the tensors up to this one that are of one group and stored alike */
    struct hstep_slot slot[HSTEP_SLOTS];
    uint64_t state_steps, full_steps, writes;
    double scalar[HSTEP_MAX_NAMED_SCALARS];
    int64_t first_chunk, chunks;
    /* Sums over the tensor that come before its update (hstep_sum_of_state()). Their limbs start at number `first_sum`
     * of those of all tensors. */
    int sums, first_sum;
};

/* What callers set stands first, in HSTEP_GROUP_SET_BYTES; the steps, which a device counts, stand last: handle/sync.c
 * sends the one without the other. */
struct hstep_group {
    struct hstep_recipe recipe;
    double hyper[HSTEP_GROUP_HYPERS], own[HSTEP_MAX_OWN_HYPERS];
    double first_lr; /* lr as first set: the default reference of fully decoupled decay */
    int lr_was_set;
    int decay, schedule;
    uint64_t steps;
};

#define HSTEP_GROUP_SET_BYTES offsetof(struct hstep_group, steps)
_Static_assert(HSTEP_GROUP_SET_BYTES + sizeof(uint64_t) == sizeof(struct hstep_group), "the steps stand last");

/* The role of the state in a slot; 0 for the weight and the gradient. */
HSTEP_INLINE int hstep_slot_role(const struct hstep_tensor *t, int slot)
{
    return slot < HALFSTEP_SLOT_STATE ? 0 : hstep_rules[t->rule].state[slot - HALFSTEP_SLOT_STATE].role;
}

/* Whether a format has one scale for the whole tensor; NONE has not. */
HSTEP_INLINE int hstep_has_one_scale(int format)
{
    return format >= 0 && hstep_formats[format].geometry == HALFSTEP_GEOMETRY_TENSOR;
}

/* A tensor's sums are those of its rule, one for each state that has one scale, and how many elements agree. The number
 * of a state's, if it has one: so many come before it. */
HSTEP_INLINE int hstep_sum_of_state(const struct hstep_tensor *t, int slot)
{
    int sum = hstep_rules[t->rule].norms;
    for (int s = HALFSTEP_SLOT_STATE; s < slot; s++) sum += hstep_has_one_scale(t->slot[s].format);
    return sum;
}

/* A stretch of one tensor that one thread handles: whole runs, or a part of one. */
struct hstep_chunk {
    int tensor;
    int64_t run, runs, offset, length; /* length: elements of each run, from offset */
    int64_t task;                      /* that handles it, alone or with those beside it */
};

/* Elements of a chunk: enough to hide a task's cost, few enough to share among many threads. It divides the segments of
 * the mixer. */
#define HSTEP_CHUNK ((int64_t)32768)
/* What a chunk of a few elements costs, in elements: so many small tensors make one task that it is about a chunk. */
#define HSTEP_CHUNK_COST ((int64_t)512)

/* What one update of one tensor needs, worked out once per step. */
struct hstep_update {
    float k[HSTEP_MAX_SCALARS];
    float gradient_scale, l2;
    double centralize;       /* times the row mean of the raw gradient, or 0 */
    int mode;                /* of the rule function */
    uint32_t stochastic;     /* bit per slot */
    uint32_t weight_to_slot; /* bit per slot: a copy of the weight is made before the update, */
    uint32_t slot_to_weight; /* and the weight made a copy of the slot after it */
    int skip, fused;
    int adjusted;                 /* l2, centralize or cautious */
    int zero_lr;                  /* lr is 0: weights are left alone, whatever 0 times an infinite weight would be */
    int micro;                    /* only states are written */
    float cautious;               /* 0, or what elements that agree with their gradient are scaled by, and */
    float decay;                  /* what the weight is then, apart from k[] */
    int64_t every;                /* so many-th elements of the whole tensor are summed for TOTALS; below 2: all */
    int of_its_own;               /* the constants come from the tensor itself: no other may take them over */
    double mean[HSTEP_MAX_PAIRS]; /* over the new vectors of rows, `means` of them so far */
    int means;
    double scalar[HSTEP_MAX_NAMED_SCALARS]; /* of after the update */
    float scale[HSTEP_SLOTS];               /* of states that have one for the whole tensor, after the update */
    float grid[HSTEP_SLOTS];                /* after the update, of slots that have one */
    float onto[HSTEP_SLOTS];                /* what is coded is multiplied by: hstep_onto_grid() of it */
    int generator;                          /* the row of what makes the words of streams */
    struct hstep_key stream[HSTEP_SLOTS];   /* of slots that are stochastic */
};

/* Whether a tensor has a part in the sums of a step: not where it is left out, and not in totals where it stays. */
HSTEP_INLINE int hstep_is_summed(const struct hstep_tensor *t, const struct hstep_update *u)
{
    return t->sums && !u->skip && !(u->zero_lr && hstep_rules[t->rule].totals);
}

#endif
