/* Groups and tensors as a device gets them: plain values and places in its own memory. An array of these can be copied
 * to the device as it is. Names and other labels for people are in handle/optimizer.h. */
#ifndef HSTEP_TENSOR_H
#define HSTEP_TENSOR_H

#include "base/rng.h"
#include "tables/tables.h"

#define HSTEP_SLOTS (2 + HALFSTEP_MAX_STATES)
/* Elements are worked on in cells of this size. Random words and chunks are counted in them. */
#define HSTEP_CELL 32
/* Elements decoded at once: a whole number of cells, and of blocks of every format. */
#define HSTEP_TILE 256

struct hstep_slot {
    int format;    /* HSTEP_FORMAT_NONE: nothing is stored */
    int nonneg;    /* a state of role NONNEG, which holds nothing negative */
    int fell_back; /* 1: another format replaces the recipe's block format, for which the tensor is too small */
    int precise;   /* 1: the state's own `precise` format replaces the recipe's */
    int root;      /* root of the format's row for a second moment on a grid (base/grid.h), else 0 */
    float grid;    /* of the stored value; 1 if root is 0 */
    char *code, *extra;
    uint64_t code_bytes, extra_bytes;
    int extent; /* HALFSTEP_EXTENT_* */
};

/* What an update asks of fused kernels. ADJUSTED: l2 decay or row means change the gradient first. COMPARED: the
 * gradient or the weight is compared with the change, because the group or its decay is cautious. */
enum hstep_way { HSTEP_WAY_PLAIN, HSTEP_WAY_ADJUSTED, HSTEP_WAY_COMPARED, HSTEP_WAYS };

struct hstep_tensor {
    uint64_t id;
    int group, rule, ndim;
    int64_t rows, row_length, first_row, n_rows, first_column, n_columns;
    /* The matrices are blocks of rows whose numbers of rows repeat after pattern_rows rows (layout.h). Rules without
     * matrices have one block of all rows. */
    int64_t pattern_rows, block_end[HALFSTEP_MAX_SPLIT]; /* where each block of the pattern ends, in rows */
    int blocks;                                          /* of one pattern */
    int64_t matrices;     /* number of matrices held here; 1 unless the tensor is stepped as matrices */
    int64_t first_matrix; /* number in the whole tensor of the first matrix held here; 0 unless there are matrices */
    /* The part held here consists of `tracks` tracks of `track_length` elements, dense in memory one after another.
     * Track r starts at element index0 + r * index_stride of the space that indexes random bits and blocks. */
    int64_t tracks, track_length, index_stride;
    uint64_t index0;
    /* Elements are worked on in grains of 32, or of the longest block of a state. If rows are dense in index space, a
     * grain starts at a multiple of its length there. Otherwise it starts at such a column. */
    int grain, dense;
    int matrix;   /* stepped as matrices */
    int pairs;    /* of vectors over rows and columns */
    int cautious; /* its group is cautious; the last sum then counts the elements that agree */
    int slots;    /* slots of its rule, stored or not, with at least one state; an optional vector only if stored */
    int fused[HSTEP_WAYS]; /* the device's fused kernel for exactly these formats, by the way of the update, or -1 */
    int share;             /* the first of the tensors that share its sums of TOTALS; its own number without such */
    int first_alike;       /* the first tensor of the same group that is stored alike */
    struct hstep_slot slot[HSTEP_SLOTS];
    uint64_t state_steps, full_steps, writes;
    double scalar[HSTEP_MAX_NAMED_SCALARS];
    int64_t first_chunk, chunks;
    int64_t piece_rows; /* 0, or rows of a piece of its states in storage. No chunk crosses the end of a piece */
    /* Sums over the tensor that come before its update (hstep_sum_of_state()). Their limbs start at number `first_sum`
     * among those of all tensors. */
    int sums, first_sum;
};

/* The fields that callers set come first, in HSTEP_GROUP_SET_BYTES. The steps, which a device counts, come last,
 * because handle/devices/sync.c sends the fields without the steps. */
struct hstep_group {
    struct hstep_recipe recipe;
    double hyper[HSTEP_GROUP_HYPERS], own[HSTEP_MAX_OWN_HYPERS];
    double first_lr; /* lr as first set: the default reference of fully decoupled decay */
    int lr_was_set;
    int decay, schedule, decay_schedule;
    uint64_t steps;
};

#define HSTEP_GROUP_SET_BYTES offsetof(struct hstep_group, steps)
_Static_assert(HSTEP_GROUP_SET_BYTES + sizeof(uint64_t) == sizeof(struct hstep_group), "the steps stand last");

/* Returns the role of the state in a slot, or 0 for the weight and the gradient. */
HSTEP_INLINE int hstep_slot_role(const struct hstep_tensor *t, int slot)
{
    return slot < HALFSTEP_SLOT_STATE ? 0 : hstep_rules[t->rule].state[slot - HALFSTEP_SLOT_STATE].role;
}

/* Returns true if a format has one scale for the whole tensor. NONE has not. */
HSTEP_INLINE int hstep_has_one_scale(int format)
{
    return format >= 0 && hstep_formats[format].geometry == HALFSTEP_GEOMETRY_TENSOR;
}

/* Returns the number of a state's sum, if it has one, which is also the number of sums before it. A tensor has the sums
 * of its rule, then one for each state that has one scale, then the count of elements that agree. */
HSTEP_INLINE int hstep_sum_of_state(const struct hstep_tensor *t, int slot)
{
    int sum = hstep_rules[t->rule].norms;
    for (int s = HALFSTEP_SLOT_STATE; s < slot; s++) sum += hstep_has_one_scale(t->slot[s].format);
    return sum;
}

/* The part of one tensor that one thread handles: whole tracks, or a part of one track. */
struct hstep_chunk {
    int tensor;
    int64_t track, tracks, offset, length; /* length: elements of each track, from offset */
    int64_t task;                          /* the task that handles it, alone or with adjacent chunks */
};

/* Elements of a chunk: enough to hide the cost of a task, few enough to share among many threads. The segments of the
 * mixer are multiples of it. */
#define HSTEP_CHUNK ((int64_t)32768)
/* The fixed cost of a chunk, in elements. Small tensors are joined until their task costs about as much as a full
 * chunk. */
#define HSTEP_CHUNK_COST ((int64_t)512)

/* The constants of one update of one tensor, computed once per step. */
struct hstep_update {
    float k[HSTEP_MAX_SCALARS];
    float gradient_scale, l2;
    double centralize;       /* fraction of the row mean taken from the raw gradient, or 0 */
    int mode;                /* of the rule function */
    uint32_t stochastic;     /* bit per slot */
    uint32_t weight_to_slot; /* bit per slot: the weight is copied there before the update */
    uint32_t slot_to_weight; /* bit per slot: the slot is copied to the weight after it */
    int skip, fused;
    enum hstep_way way;   /* of fused kernels */
    int zero_lr;          /* 1: lr is 0, so weights do not change, even infinite ones */
    int micro;            /* only states are written */
    float cautious;       /* 0, or the factor of elements that agree with their gradient */
    float decay;          /* factor of the weight then, apart from k[] */
    float cautious_decay; /* 0, or the factor of weights that the update alone does not move away from 0 */
    int64_t every;        /* every so many-th element is summed for TOTALS; below 2: all */
    int of_its_own;       /* 1: the constants depend on this tensor; no other may take them over */
    double scalar[HSTEP_MAX_NAMED_SCALARS]; /* after the update */
    float scale[HSTEP_SLOTS];               /* after the update, of states with one scale */
    float grid[HSTEP_SLOTS];                /* after the update, of slots that have one */
    float onto[HSTEP_SLOTS];                /* factor before coding: hstep_onto_grid() of `grid` */
    int generator;                          /* row of the generator of the strands' words */
    struct hstep_key strand[HSTEP_SLOTS];   /* of stochastic slots */
};

/* Returns true if a tensor takes part in the sums of a step. A skipped tensor does not. With lr 0 a tensor takes no
 * part in totals. */
HSTEP_INLINE int hstep_is_summed(const struct hstep_tensor *t, const struct hstep_update *u)
{
    return t->sums && !u->skip && !(u->zero_lr && hstep_rules[t->rule].totals);
}

#endif
