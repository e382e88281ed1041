/* One call to a device, as plain values: the handle's tensors and groups in the device's memory, what the call covers,
 * and where its statistics stand. The functions say what a pass over the tensors has to do. */
#ifndef HSTEP_CALL_H
#define HSTEP_CALL_H

#include <math.h>

#include "base/exact.h"
#include "tables/tensor.h"

/* How a handle's work is run. */
struct hstep_context {
    const struct hstep_kernels *kernels; /* of the chosen instruction set */
    int threads;
    halfstep_run_tasks run; /* the caller's own threads, or NULL */
    void *host;
    struct hstep_link *link; /* made by open(), or NULL */
    /* The chunks that a pass is restricted to, because only their states are in memory. end_chunk 0: it is not. Only
     * devices of shared memory are asked for that. */
    int64_t first_chunk, end_chunk;
};

/* Numbers that steps of an asynchronous device read and write in its own memory. They stay there until somebody
 * asks. */
struct hstep_ledger {
    double gradient_scale; /* replaces the call's own */
    double round_norm;     /* of the last round; replaces the call's own */
    double norm;           /* of the last step that computed one, or of the last round */
    uint64_t skipped;      /* steps, or single tensors, skipped because of their gradients */
    uint64_t refusals;     /* calls that return NONFINITE */
    /* Of the last refusal: */
    int offender;  /* the first tensor with a bad gradient; -1: a norm was not finite */
    int in_round;  /* 1: that norm was of a round */
    int too_large; /* 1: the offender's gradient was finite, but too large */
};

/* Everything that the steps of one handle share, in the memory of the device. */
struct hstep_plan {
    struct hstep_tensor *tensors;
    struct hstep_group *groups;
    int n_tensors, n_groups;
    const struct hstep_chunk *chunks;
    const int64_t *tasks; /* the first chunk of each task, then the number of chunks */
    struct hstep_update *updates;
    int64_t *statistics;         /* for steps whose caller provides none */
    float *workspace;            /* for one matrix at a time; fits the largest */
    int64_t *round_squares;      /* limbs of the sum of squares of a round of release so far */
    struct hstep_ledger *ledger; /* of asynchronous devices, else NULL */
};

/* The result of decide(). */
struct hstep_verdict {
    int refused;   /* 1: nothing is updated */
    int offenders; /* number of tensors that their gradients keep from an update */
    int offender;  /* the first of these, or -1 */
    int too_large; /* 1: its gradient is finite, but too large */
    double norm;   /* by which the gradients are clipped; 0: not clipped */
    double clip;   /* factor of the gradients */
};

/* Where the bytes of a tensor come from before an update: its weight, and a tensor with the addresses of its states and
 * of what is stored beside its weight. NULL: they are in place. */
struct hstep_origin {
    const void *weight;
    const struct hstep_tensor *states;
};

/* One public call, for all tensors or for one. weights, gradients, origins and statistics count from tensor
 * `first`. */
struct hstep_call {
    const struct hstep_context *context;
    struct hstep_plan plan;
    uint64_t seed;
    int generator;  /* row of the generator */
    int scan, clip; /* HSTEP_SCAN_*, HSTEP_CLIP_* */
    double gradient_scale, clip_norm, round_norm;
    int first, n;
    int single;           /* 1: one tensor is stepped by itself */
    int micro;            /* 1: a micro-step: gradients go into the states, weights do not change */
    int64_t matrix;       /* of passes over one matrix: its number among those held here */
    void *const *weights; /* NULL in micro-steps */
    const void *const *gradients;
    const struct hstep_origin *origins; /* copied from in an UPDATE, or NULL. Devices of shared memory alone get it */
    const struct hstep_tensor *tensors; /* the handle's own; a device may read what settling filled in */
    int64_t *statistics;
    struct hstep_verdict *verdict; /* in the memory of the device */
};

enum hstep_pass { HSTEP_PASS_UPDATE, HSTEP_PASS_DIRECTION, HSTEP_PASS_CHANGE, HSTEP_PASS_SUMS };

/* Returns 1 if the pass is over one matrix, call->matrix, whose elements are in the workspace. */
HSTEP_INLINE int hstep_is_for_matrix(enum hstep_pass pass)
{
    return pass == HSTEP_PASS_DIRECTION || pass == HSTEP_PASS_CHANGE;
}

/* Statistics of a step are the limbs of the sum of squares, one flag for each tensor, and the limbs of the sums over
 * single tensors. */
#define HSTEP_STATISTICS_HEAD HSTEP_EXACT_LIMBS
#define HSTEP_MAX_SUMS (HSTEP_MAX_NORMS + HALFSTEP_MAX_STATES)

/* A tensor's flag counts bad gradients. The low half counts those that are not finite. The high half counts finite ones
 * of HSTEP_GRADIENT_LIMIT or more, whose squares would leave fp32. */
#define HSTEP_FLAG_NONFINITE ((int64_t)1)
#define HSTEP_FLAG_TOO_LARGE ((int64_t)1 << 32)
#define HSTEP_GRADIENT_LIMIT 0x1p62

HSTEP_INLINE int hstep_is_nonfinite(int64_t flag) { return (uint32_t)flag != 0; }

/* Return where the flags, the sums of all tensors and the sums of one tensor begin in call->statistics, counted in
 * numbers. Only devices may call hstep_sum_offset(), because it reads their plan. */
HSTEP_INLINE int64_t hstep_flags_offset(void) { return HSTEP_STATISTICS_HEAD; }
HSTEP_INLINE int64_t hstep_sums_offset(int n_tensors) { return HSTEP_STATISTICS_HEAD + n_tensors; }

HSTEP_INLINE int64_t hstep_sum_offset(const struct hstep_call *call, int tensor)
{
    const struct hstep_tensor *tensors = call->plan.tensors;
    int before = tensors[tensor].first_sum - tensors[call->first].first_sum;
    return hstep_sums_offset(call->n) + (int64_t)before * HSTEP_EXACT_LIMBS;
}

HSTEP_INLINE int hstep_is_whole(const struct hstep_tensor *t)
{
    return t->n_rows == t->rows && t->n_columns == t->row_length;
}

/* Returns true if a step needs sums over the tensor. A micro-step needs neither the rule's sums nor the count of
 * a cautious group, because these only decide how far the weight moves. */
HSTEP_INLINE int hstep_needs_sums(const struct hstep_tensor *t, int micro)
{
    return t->sums > (micro ? hstep_rules[t->rule].norms + t->cautious : 0);
}

/* Returns the factor of the gradients, which is applied before anything else. */
HSTEP_INLINE double hstep_gradient_scale(const struct hstep_call *call)
{
    return call->plan.ledger ? call->plan.ledger->gradient_scale : call->gradient_scale;
}

HSTEP_INLINE int hstep_is_clipped(const struct hstep_call *call) { return !call->micro && call->clip_norm > 0.0; }

/* Returns true if the gradients are clipped by their own norm. They then end below clip_norm, whatever they were. */
HSTEP_INLINE int hstep_is_clipped_by_own_norm(const struct hstep_call *call)
{
    return hstep_is_clipped(call) && (!call->single || call->clip == HSTEP_CLIP_TENSOR);
}

#endif
