/* What one call to a device is about, as plain values: the handle's tensors and groups in the device's memory, what the
 * call covers, and where the numbers of its statistics stand. The functions say what a pass over them is to do. */
#ifndef HSTEP_CALL_H
#define HSTEP_CALL_H

#include <math.h>

#include "base/exact.h"
#include "tables/tensor.h"

/* How a handle wants its work run. */
struct hstep_context {
    const struct hstep_kernels *kernels; /* of the instruction set that was chosen */
    int threads;                         /* 0: hstep_default_threads() */
    halfstep_run_tasks run;              /* the caller's own threads, or NULL */
    void *host;
    struct hstep_link *link; /* what open() has made, or NULL */
};

/* What steps of an asynchronous device are told in its own memory, and leave there until somebody asks. */
struct hstep_ledger {
    double gradient_scale; /* in place of the call's own */
    double round_norm;     /* of the last round, in place of the call's own */
    double norm;           /* of the last step that computed one, or of the last round */
    uint64_t skipped;      /* steps, or single tensors, that were left out because of their gradients */
    uint64_t refusals;     /* calls whose callers are to get NONFINITE */
    /* Of the last refusal: */
    int offender;  /* the first tensor with a bad gradient; -1: a norm was not finite */
    int in_round;  /* that norm was of a round */
    int too_large; /* the offender's gradient was finite */
};

/* Everything that steps of one handle share, in the memory of the device. */
struct hstep_plan {
    struct hstep_tensor *tensors;
    struct hstep_group *groups;
    int n_tensors, n_groups;
    const struct hstep_chunk *chunks;
    const int64_t *tasks; /* the first chunk of each, and at the end the number of chunks */
    struct hstep_update *updates;
    int64_t *statistics;         /* of steps whose caller keeps none */
    float *workspace;            /* for matrices, the largest of which it fits; one at a time */
    int64_t *round_squares;      /* limbs of the squares of a round of release so far */
    struct hstep_ledger *ledger; /* of asynchronous devices, else NULL */
};

/* What decide() has found. */
struct hstep_verdict {
    int refused;   /* nothing is updated, */
    int offenders; /* so many tensors because of their gradients, of which */
    int offender;  /* this is the first, or -1 */
    int too_large; /* whose gradient is finite, but too large */
    double norm;   /* that the gradients are clipped by, 0 where they are not */
    double clip;   /* what they are multiplied by */
};

/* What one public call is about: all tensors, or one. weights, gradients and statistics count from tensor `first`. */
struct hstep_call {
    const struct hstep_context *context;
    struct hstep_plan plan;
    uint64_t seed;
    int generator;  /* row */
    int scan, clip; /* HSTEP_SCAN_*, HSTEP_CLIP_* */
    double gradient_scale, clip_norm, round_norm;
    int first, n;
    int single;           /* one tensor is stepped by itself */
    int micro;            /* the gradients go into the states, and weights are left alone */
    void *const *weights; /* NULL in micro-steps */
    const void *const *gradients;
    const struct hstep_tensor *tensors; /* the handle's own, of which a device may read what settling made of them */
    int64_t *statistics;
    struct hstep_verdict *verdict; /* in the memory of the device */
};

enum hstep_pass { HSTEP_PASS_UPDATE, HSTEP_PASS_DIRECTION, HSTEP_PASS_CHANGE, HSTEP_PASS_SUMS };

/* Statistics of a step: the limbs of the sum of squares, then for each tensor whether it is not finite, then the limbs
 * of the sums over single tensors. */
#define HSTEP_STATISTICS_HEAD HSTEP_EXACT_LIMBS
#define HSTEP_MAX_SUMS (HSTEP_MAX_NORMS + HALFSTEP_MAX_STATES)

/* What a tensor's flag counts: gradients that are not finite in its low half, and in the high half those that are
 * finite but HSTEP_GRADIENT_LIMIT or more, whose squares would leave fp32. */
#define HSTEP_FLAG_NONFINITE ((int64_t)1)
#define HSTEP_FLAG_TOO_LARGE ((int64_t)1 << 32)
#define HSTEP_GRADIENT_LIMIT 0x1p62

HSTEP_INLINE int hstep_is_nonfinite(int64_t flag) { return (uint32_t)flag != 0; }

/* Places in call->statistics, in numbers. hstep_sum_offset() is for devices: it looks into their plan. */
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

/* A micro-step has no use for the sums of the rule: they decide how far the weight goes. */
HSTEP_INLINE int hstep_needs_sums(const struct hstep_tensor *t, int micro)
{
    return t->sums > (micro ? hstep_rules[t->rule].norms + t->cautious : 0);
}

/* What gradients are multiplied by before anything else. */
HSTEP_INLINE double hstep_gradient_scale(const struct hstep_call *call)
{
    return call->plan.ledger ? call->plan.ledger->gradient_scale : call->gradient_scale;
}

HSTEP_INLINE int hstep_is_clipped(const struct hstep_call *call) { return !call->micro && call->clip_norm > 0.0; }

/* Whether the gradients end below clip_norm, whatever they were. */
HSTEP_INLINE int hstep_is_clipped_by_own_norm(const struct hstep_call *call)
{
    return hstep_is_clipped(call) && (!call->single || call->clip == HSTEP_CLIP_TENSOR);
}

#endif
