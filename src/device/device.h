/* The interface between the handle and a machine (host/, cuda/, and others). The handle calls a device only through
 * this table. It reads nothing that a device has written before it has waited for the device.
 *
 * Entries may return before their work is done. The work of one handle is done in the order of the calls. An entry
 * reads its arguments, and the arrays of pointers among them, before it returns. The memory that these pointers name is
 * the device's own and stays in place until the next wait. Every entry returns HALFSTEP_OK, or the code of an error
 * that left nothing half done. */
#ifndef HSTEP_DEVICE_H
#define HSTEP_DEVICE_H

#include "tables/call.h"

/* A matrix between the two passes of its step, as far as the handle knows it without reading the device's memory. */
struct hstep_matrix {
    int tensor;
    int64_t rows, columns;
    const float *k; /* constants of its transformation (transforms.def), from the present hyper-parameters */
};

/* The arguments of accumulate(): a sum of gradients outside a step. */
struct hstep_accumulation {
    const struct hstep_context *context;
    const struct hstep_tensor *tensor; /* read before the call returns, as are its chunks */
    const struct hstep_chunk *chunks;
    int generator, format, gradient_format;
    char *accumulator;
    const char *gradient;
    float scale;
    struct hstep_key strand;
};

/* The arguments of read(), write() and saturated(): elements first .. end - 1 of a slot, whose codes are at `data`. */
struct hstep_access {
    const struct hstep_context *context;
    const struct hstep_tensor *tensor; /* read before the call returns */
    int slot;
    void *data;
    int64_t first, end;
};

struct hstep_device {
    const char *name;
    /* The device works in the memory of the process. The handle then reads and writes tensors and groups in place. */
    int shared;
    /* A step returns before it is done. Tensors, groups and the ledger in the device's memory are then ahead of the
     * handle's own, until the handle fetches them. Such a device has read all that it needs of the process's memory
     * when a call returns. Callers may pass it only its own memory (owns()). */
    int asynchronous;

    /* For a device that has several of its kind, or streams. The entries from here to why() are NULL for others. name:
     * the part of the device's option after the colon, or "". close() waits for all work and frees what open() has
     * made. */
    int (*open)(struct hstep_context *c, const char *name, void *stream);
    void (*close)(struct hstep_context *c);
    /* Moves to another stream. Work of later calls is queued there and runs after that of earlier calls. */
    int (*follow)(const struct hstep_context *c, void *stream);
    /* Returns 1 while the stream is captured: work is only recorded, to be done later and maybe more than once. Nothing
     * can be waited for then. */
    int (*records)(const struct hstep_context *c);
    /* Checks that n addresses are memory of this device. Returns the index of the first that is not, with ARGUMENT or
     * another error in *error, or n if all are. NULL is not checked. */
    int (*owns)(const struct hstep_context *c, const void *const *memory, int n, int *error);
    /* Fills in all that can be found out about the device of that name. If it is not usable, why() tells the reason. */
    void (*inform)(const char *name, halfstep_device_info *info);
    /* Returns a line that says for which devices there is code, without asking any. */
    const char *(*code)(void);
    /* Returns the text of the error that an entry has just returned to this thread, or NULL. */
    const char *(*why)(void);

    /* For a device whose code a driver loads or compiles, NULL for others. Such code must show the bits of this library
     * before it touches memory of a caller (handle/devices/device_check.c). trusted() returns 1 if it has shown them, 0
     * if it must be checked, or an error. `fused` is a fused row; -1 means all other code. trust() remembers that a
     * check has passed. */
    int (*trusted)(const struct hstep_context *c, int fused);
    void (*trust)(const struct hstep_context *c, int fused);

    /* Makes room for calls about the tensors of a plan, once it is known, so that a step allocates nothing. May be
     * NULL. */
    int (*settle)(const struct hstep_context *c, const struct hstep_plan *plan);

    /* Allocates memory, aligned to 64 bytes. */
    int (*allocate)(const struct hstep_context *c, uint64_t bytes, void **memory);
    /* Waits for all work and frees the memory. NULL is allowed. */
    void (*release)(const struct hstep_context *c, void *memory);
    int (*zero)(const struct hstep_context *c, void *memory, uint64_t bytes);
    /* Touches the memory of states before it is zeroed for the first time, from the threads that will step them. NULL
     * if all memory is equally near. */
    void (*touch)(const struct hstep_context *c, const struct hstep_plan *plan);
    /* Copies between the device's memory and the process's, in either direction, or within the device's. */
    int (*copy)(const struct hstep_context *c, void *to, const void *from, uint64_t bytes);
    /* Waits until all work is done. After an error none of it is under way any more. */
    int (*wait)(const struct hstep_context *c);

    /* find_fused() returns the device's fused row for a tensor and a way of updates, or -1. workspace() returns how
     * many floats a matrix or its vectors need. Both have their result at once. */
    int (*find_fused)(const struct hstep_context *c, const struct hstep_tensor *t, enum hstep_way way);
    size_t (*workspace)(const struct hstep_tensor *t);

    /* Adds to statistics that are zero: squares of the gradients, if they are clipped, and flags of gradients that are
     * not finite or too large. */
    int (*scan)(const struct hstep_call *call);
    /* Computes the verdict and the updates from statistics and hyper-parameters. The updates of a refused step are
     * skipped. */
    int (*decide)(const struct hstep_call *call);
    /* Adds the sums of n tensors from `first` on to the statistics. */
    int (*sum)(const struct hstep_call *call, int first, int n);
    /* Prepares the updates of n tensors again, from their sums and for the matrix of the call. */
    int (*decide_sums)(const struct hstep_call *call, int first, int n);
    /* For a matrix with vectors over rows and columns: sums the rule's values of its elements over both, computes the
     * pair's new vectors from these sums, and prepares the tensor's update again. */
    int (*cross)(const struct hstep_call *call, int tensor, int pair);
    /* Carries within n sums of limbs, one after another, so that callers can add them up. */
    int (*carry)(const struct hstep_context *c, int64_t *limbs, int64_t n);
    /* Makes one pass over n tensors from `first` on. UPDATE leaves out matrices. Other passes are for one matrix. */
    int (*update)(const struct hstep_call *call, int first, int n, enum hstep_pass pass);
    /* Applies the transformation of the rule's row, between the two passes of a matrix. */
    int (*transform)(const struct hstep_call *call, const struct hstep_matrix *m);
    /* Advances the counters, scalars and grids of updated tensors, the squares of the round and the steps of groups. */
    int (*count)(const struct hstep_call *call);
    /* Ends a round of release. Computes verdict->norm from the limbs of its squares, in call->statistics or, if NULL,
     * the device's own, and counts the groups' steps. */
    int (*end_round)(const struct hstep_call *call);

    int (*accumulate)(const struct hstep_accumulation *a);
    /* `out` and `in` are fp32 values in the process's memory. read() has written `out` when it returns. */
    int (*read)(const struct hstep_access *a, float *out);
    int (*write)(const struct hstep_access *a, const float *in);
    /* Counts the 16-bit weights at the end of their format's range. *count is written when it returns. */
    int (*saturated)(const struct hstep_access *a, uint64_t *count);
};

#endif
