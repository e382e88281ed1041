/* The inside of a handle, shared by optimizer.c and tensors.c (arguments), plan.c (what exists), slots.c (memory),
 * step.c (steps), records.c (what a checkpoint keeps) and accumulate.c. */
#ifndef HSTEP_OPTIMIZER_H
#define HSTEP_OPTIMIZER_H

#include <stdatomic.h>

#include "device/device.h"

/* What belongs to a tensor and never reaches a device. */
struct hstep_label {
    char *name;
    halfstep_record_places places; /* of the host's copies */
    int norms_made;                /* by halfstep_run_norms() of this tensor, for the next finish */
};

#define HSTEP_DETAIL_BYTES 256

struct halfstep_optimizer {
    const struct hstep_device *device;
    struct hstep_context context;
    uint64_t seed;
    int generator;                    /* row */
    int scan, clip, missing_gradient; /* HSTEP_SCAN_*, HSTEP_CLIP_*, HSTEP_MISSING_* */
    double gradient_scale, clip_norm;

    struct hstep_group *groups;
    struct hstep_tensor *tensors;
    struct hstep_label *labels; /* one for each tensor */
    int has_bound_copies;       /* some label has a place for the host's copies */
    int n_groups, n_tensors, capacity_groups, capacity_tensors, capacity_labels;
    /* Once it is settled what exists: */
    int settled;
    struct hstep_plan plan;
    struct hstep_chunk *chunks; /* as the plan has them */
    int64_t *tasks;
    struct hstep_verdict *verdict; /* of calls about all tensors, in the memory of the device */
    int sums;                      /* of all tensors */
    /* How many are stepped as matrices, have vectors, a rule with sums over all tensors, are parts of one. */
    int matrices, factored, totals, parts;
    int slots_bound;      /* all slots have their memory */
    int norms_made;       /* by halfstep_run_norms() of all tensors, for the next finish */
    int scalars_unshared; /* those of rules with totals were set, or are new, since tensors last had one set of them */
    void *memory;         /* the library's own, or NULL */
    uint64_t workspace_bytes;
    atomic_flag workspace_lock;

    /* Of asynchronous devices (sync.c). */
    atomic_int device_ahead;        /* steps were asked for since the last fetch */
    int captured;                   /* a step was recorded, and may be made again at any time */
    int changed_first, changed_end; /* tensors that were changed since they were sent */
    int counts_changed;             /* also steps of groups, or what the ledger counts */
    struct hstep_group *sent;       /* groups as they were sent, */
    struct hstep_group *fetched;    /* and as they are fetched */
    double sent_scale;
    uint64_t refusals, refusals_seen, refusals_told; /* as the ledger has them */
    int offender, in_round, too_large;
    void *single_scratch; /* of calls about single tensors, one for each, in the memory of the device */
    atomic_flag sync_lock;

    /* Where hyper-parameters are read in the memory of the device, or NULL. */
    const double **lr_place; /* by group */
    const double *scale_place;
    double *lr_set, scale_set; /* what was set before, of devices that have no copy of their own */

    double round_norm; /* clipping in release: of the round before */
    double gradient_norm;
    atomic_uint_least64_t skipped;
    atomic_int nonfinite_tensor, gradient_too_large;
    uint64_t serial; /* among all handles of the process */
    atomic_flag detail_lock;
    char detail[HSTEP_DETAIL_BYTES];
};

/* The device of handles made from now on: tests put another in the place of the host. */
extern const struct hstep_device *hstep_default_device;
extern const struct hstep_device hstep_cuda_device;

/* What halfstep_options.device names; NULL: nothing does. rest: what follows the colon. */
const struct hstep_device *hstep_find_device(const char *name, const char **rest);

/* Sets the detail sentence and returns the code. */
int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* NONFINITE, with the sentence of a step that was refused for the gradient of a tensor, which is too large or not
 * finite; tensor -1: the norm was not finite. */
int hstep_fail_gradient(const halfstep_optimizer *o, int tensor, int too_large);
/* Errors with ARGUMENT unless there is such a tensor, such a group. */
int hstep_check_tensor(const halfstep_optimizer *o, int32_t tensor);
int hstep_check_group(const halfstep_optimizer *o, int32_t group);
/* Waits for the device, after an error too: what was asked for before it may still be on its way to memory of the
 * caller's. Returns the error, or the wait's own. */
int hstep_wait(const halfstep_optimizer *o, int error);
/* Returns the error, with the device's own sentence where it has one. */
int hstep_why(const halfstep_optimizer *o, int error);

/* ARGUMENT, with the device's sentence to come, unless its memory can be there. */
int hstep_check_owned(const halfstep_optimizer *o, const void *memory);

/* Of asynchronous devices, and nothing to do for others (sync.c). What steps have come to, into the handle; waits. */
int hstep_fetch(const halfstep_optimizer *o);
/* Tensors were changed, which were fetched before; counts of groups or of the ledger likewise. */
void hstep_changed(halfstep_optimizer *o, int first, int n);
void hstep_counts_changed(halfstep_optimizer *o);
/* What was changed, to the device: before a step, or at once where a graph may step. */
int hstep_send(halfstep_optimizer *o);
int hstep_send_at_once(halfstep_optimizer *o);
/* Hyper-parameters from their places; of every device. */
int hstep_send_bound(halfstep_optimizer *o);
/* What these devices keep for it: from halfstep_create() on, from hstep_settle() on, and until halfstep_destroy(). */
int hstep_open_sync(halfstep_optimizer *o);
int hstep_settle_sync(halfstep_optimizer *o);
void hstep_close_sync(halfstep_optimizer *o);

#define HSTEP_MAX_SINGLE_STATISTICS (HSTEP_STATISTICS_HEAD + 1 + HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS)

/* Statistics and a verdict of one tensor, so that several threads may each step one. */
struct hstep_single_scratch {
    int64_t statistics[HSTEP_MAX_SINGLE_STATISTICS];
    struct hstep_verdict verdict;
};

/* Leaves *scratch as it is where the process's memory is the device's; else the scratch of one tensor, of all that
 * asynchronous devices keep, or of this call alone. */
int hstep_take_scratch(halfstep_optimizer *o, int tensor, struct hstep_single_scratch **scratch);
void hstep_leave_scratch(halfstep_optimizer *o, struct hstep_single_scratch *scratch);

/* Grows an array to hold one more element; on failure it is as it was. */
int hstep_grow(void **array, int count, int *capacity, size_t size);

/* The formats of a tensor's states under the group's hyper-parameters. */
int hstep_choose_states(const halfstep_optimizer *o, const struct hstep_group *g, const char *name,
                        struct hstep_tensor *t);

/* Gives tensors that share totals one set of scalars: those of the tensor whose first scalar is largest. What the
 * device has was fetched. */
void hstep_share_scalars(halfstep_optimizer *o);

/* What a handle without tensors steps with. */
int hstep_first_plan(halfstep_optimizer *o);
/* Chunk lists, fused rows and per-step arrays; afterwards no group or tensor can be added. */
int hstep_settle(halfstep_optimizer *o);
/* Frees what hstep_settle() and halfstep_create() have allocated on the device. */
void hstep_release_plan(halfstep_optimizer *o);
/* Errors with ORDER if some slot that stores something has no memory. */
int hstep_check_bound(const halfstep_optimizer *o, int first_tensor, int n);
/* Writes the host's copies of counters, scalars and grids of n tensors. */
void hstep_show(const halfstep_optimizer *o, int first, int n);

#endif
