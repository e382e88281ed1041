/* The seam between the handle and machines (host/, cuda/, and whatever comes beside them). The handle calls a device
 * only through this table. It reads nothing that a device has written before it has waited for the device.
 *
 * Entries may return before their work is done; the work of one handle is done in the order of the calls. What a call
 * is given by value or in an array of pointers is read before it returns; everything that these point to lies in the
 * device's memory and stays where it is until the next wait. All return HALFSTEP_OK, or the code of an error that left
 * nothing half done. */
#ifndef HSTEP_DEVICE_H
#define HSTEP_DEVICE_H

#include "tables/call.h"

/* A matrix between the two passes of its step, as the handle knows it without looking into the device's memory. */
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
    /* The memory of the device is that of the process: the handle then reads and writes tensors and groups in place. */
    int shared;
    /* A step on it returns before it is done, and is told of when somebody asks: until the handle has fetched them,
     * tensors, groups and ledger in its memory are ahead of the handle's own. What such a device reads of the process's
     * memory it has read when a call returns. Its own pointers are all that it takes of callers (owns()). */
    int asynchronous;

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

#endif
