/* The seam between bookkeeping (core/) and machines (host/, and whatever comes beside it). core/ calls a device only
 * through this table, and reads nothing that a device has written before it has waited for it.
 *
 * Entries may return before their work is done; the work of one handle is done in the order of the calls. What a call
 * is given by value or in an array of pointers is read before it returns; everything that these point to lies in the
 * device's memory and stays where it is until the next wait. All return HALFSTEP_OK, or the code of an error that left
 * nothing half done. */
#ifndef HSTEP_DEVICE_H
#define HSTEP_DEVICE_H

#include <math.h>

#include "exact.h"
#include "tensor.h"

/* How a handle wants its work run. */
struct hstep_context {
    const struct hstep_kernels *kernels; /* of the instruction set that was chosen */
    int threads;                         /* 0: hstep_default_threads() */
    halfstep_run_tasks run;              /* the caller's own threads, or NULL */
    void *host;
    struct hstep_link *link; /* what open() has made, or NULL */
};

/* What steps of a late device are told in its own memory, and leave there until somebody asks. */
struct hstep_ledger {
    double gradient_scale; /* in place of the call's own */
    double round_norm;     /* likewise; of the last round */
    double norm;           /* of the last step that computed one, or of the last round */
    uint64_t skipped;      /* steps, or single tensors, because of their gradients */
    uint64_t refusals;     /* calls that NONFINITE is to be said of */
    int offender;          /* of the last of these the first tensor, or -1: a norm was not finite, */
    int in_round;          /* that of a round; */
    int too_large;         /* the offender's gradient was finite */
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
    struct hstep_ledger *ledger; /* of late devices, else NULL */
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
    int generator; /* row */
    int scan, clip;
    double gradient_scale, clip_norm, round_norm;
    int first, n, single, micro;
    void *const *weights; /* NULL in micro-steps */
    const void *const *gradients;
    const struct hstep_tensor *tensors; /* the handle's own, of which a device may read what settling made of them */
    int64_t *statistics;
    struct hstep_verdict *verdict; /* in the memory of the device */
};

enum hstep_pass { HSTEP_PASS_UPDATE, HSTEP_PASS_DIRECTION, HSTEP_PASS_CHANGE, HSTEP_PASS_SUMS };

/* A matrix between the two passes of its step, as core/ knows it without looking into the device's memory. */
struct hstep_matrix {
    int tensor;
    int64_t rows, columns;
    const float *k; /* of its transformation (transforms.def), as hyper-parameters are now */
};

/* A sum of gradients outside of a step. */
struct hstep_accumulation {
    const struct hstep_context *context;
    const struct hstep_tensor *tensor; /* read before the call returns, as are its chunks */
    const struct hstep_chunk *chunks;
    int generator, format, gradient_format;
    char *accumulator;
    const char *gradient;
    float scale;
    struct hstep_key stream;
};

/* Elements first .. end - 1 of a slot; data: of weights and gradients, which are not bound. */
struct hstep_access {
    const struct hstep_context *context;
    const struct hstep_tensor *tensor; /* read before the call returns */
    int slot;
    void *data;
    int64_t first, end;
};

struct hstep_device {
    const char *name;
    /* The memory of the device is that of the process: core/ then reads and writes tensors and groups in place. */
    int shared;
    /* A step on it returns before it is done, and is told of when somebody asks: until core/ has fetched them, tensors,
     * groups and ledger in its memory are ahead of core's own. What such a device reads of the process's memory it has
     * read when a call returns. Its own pointers are all that it takes of callers (owns()). */
    int late;

    /* A device that has several of its kind, or streams; else NULL, as are those down to why(). name: of the options,
     * after its colon, or "". close() ends what open() has begun, after all that is still to be done. */
    int (*open)(struct hstep_context *c, const char *name, void *stream);
    void (*close)(struct hstep_context *c);
    /* Work asked for from now on goes to this stream, after what was asked for before. */
    int (*follow)(const struct hstep_context *c, void *stream);
    /* 1 while work is only recorded, to be done later and more than once: nothing can be waited for then. */
    int (*records)(const struct hstep_context *c);
    /* The first of n places that is no memory of this device, with ARGUMENT or another error in *error; n: there is
     * none. NULL is no place. */
    int (*owns)(const struct hstep_context *c, const void *const *memory, int n, int *error);
    /* As much as there is to tell of the device of that name; why() is for one that is not usable. */
    void (*inform)(const char *name, halfstep_device_info *info);
    /* A sentence for the error that an entry has just returned to this thread, or NULL. */
    const char *(*why)(void);

    /* Room for calls about the tensors of a plan, once it is known: a step allocates nothing. Or NULL. */
    int (*settle)(const struct hstep_context *c, const struct hstep_plan *plan);

    /* Aligned to 64 bytes. */
    int (*allocate)(const struct hstep_context *c, uint64_t bytes, void **memory);
    /* NULL is fine; after all that is still to be done. */
    void (*release)(const struct hstep_context *c, void *memory);
    int (*zero)(const struct hstep_context *c, void *memory, uint64_t bytes);
    /* Before states, which have their places, are zeroed for the first time: touches them from where they will be
     * stepped. NULL where all memory is equally near. */
    void (*touch)(const struct hstep_context *c, const struct hstep_plan *plan);
    /* Between the device's memory and that of the process, in either direction, or within the device's. */
    int (*copy)(const struct hstep_context *c, void *to, const void *from, uint64_t bytes);
    /* Until all that was asked for is done; after an error nothing of it is on its way any more. */
    int (*wait)(const struct hstep_context *c);

    /* The device's fused row for a tensor, or -1; adjusted: for gradients that l2 decay is added to, or a mean taken
     * from, and for all of a cautious one. Floats of workspace that a matrix or its vectors need. At once. */
    int (*find_fused)(const struct hstep_context *c, const struct hstep_tensor *t, int adjusted);
    size_t (*workspace)(const struct hstep_tensor *t);

    /* Statistics from zero: squares of the gradients where they are clipped, flags of those that are not finite or too
     * large. */
    int (*scan)(const struct hstep_call *call);
    /* From statistics and hyper-parameters to the verdict and the updates; those of a refused step are skipped. */
    int (*decide)(const struct hstep_call *call);
    /* Adds the sums of n tensors from `first` on to the statistics. */
    int (*sum)(const struct hstep_call *call, int first, int n);
    /* The updates of n tensors again, from their sums. */
    int (*decide_sums)(const struct hstep_call *call, int first, int n);
    /* Of a matrix with vectors over rows and columns: sums over both of what the rule makes of its elements, the new
     * vectors of the pair from them, and the tensor's update again. */
    int (*cross)(const struct hstep_call *call, int tensor, int pair);
    /* n sums of limbs one after another, carried, as callers add them up. */
    int (*carry)(const struct hstep_context *c, int64_t *limbs, int64_t n);
    /* One pass over n tensors from `first` on. UPDATE leaves out matrices, the others are for a matrix alone. */
    int (*update)(const struct hstep_call *call, int first, int n, enum hstep_pass pass);
    /* The transformation of the rule's row between the two passes of a matrix. */
    int (*transform)(const struct hstep_call *call, const struct hstep_matrix *m);
    /* Counters, scalars, grids and the squares of the round, of tensors that were updated; steps of groups. */
    int (*count)(const struct hstep_call *call);
    /* Ends a round of release by the limbs of its squares (statistics, or its own): verdict->norm, groups counted. */
    int (*end_round)(const struct hstep_call *call);

    int (*accumulate)(const struct hstep_accumulation *a);
    /* Values in fp32, in the process's memory; out is written when it returns. */
    int (*read)(const struct hstep_access *a, float *out);
    int (*write)(const struct hstep_access *a, const float *in);
    /* How many 16-bit weights are at the end of their format's range. When it returns. */
    int (*saturated)(const struct hstep_access *a, uint64_t *count);
};

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

/* The least magnitude of an element that a gradient is refused for. Those that are clipped by their own norm end below
 * clip_norm, so only NaN and infinities can offend, and a weight that is followed may be as large as it likes. */
HSTEP_INLINE double hstep_gradient_limit(const struct hstep_call *call, int raw)
{
    double scale = hstep_gradient_scale(call);
    return raw || hstep_is_clipped_by_own_norm(call) ? (double)INFINITY
                                                     : HSTEP_GRADIENT_LIMIT / (scale > 0.0 ? scale : 1.0);
}

#endif
