/* The inside of a handle. Its files: optimizer.c and tensors.c (arguments), states/forecast.c (what they take), plan.c
 * (chunks and arrays of a step), slots.c and storage.c (memory), ready.c, step.c and ahead.c (steps), sync.c (devices),
 * records.c (what a checkpoint keeps), accumulate.c, checks.c, device_check.c and device_cases.c. */
#ifndef HSTEP_OPTIMIZER_H
#define HSTEP_OPTIMIZER_H

#include <stdatomic.h>
#include <string.h>

#include "base/process/detail.h"
#include "device/device.h"

/* The part of a tensor that never reaches a device. */
struct hstep_label {
    char *name;
    halfstep_record_places places; /* addresses of the host's copies of the record */
    int norms_made;                /* 1: halfstep_run_norms() has made this tensor's sums for the next finish */
};

/* Tensors are in lists by hashes of their ids, and in others by hashes of their names. There are as many lists of
 * each kind as links. Link k has the first tensor of list k, and the tensor that follows tensor k in its list. -1: no
 * tensor. */
enum { HSTEP_BY_ID, HSTEP_BY_NAME, HSTEP_KEYS };

struct hstep_links {
    int first[HSTEP_KEYS], next[HSTEP_KEYS];
};

struct halfstep_optimizer {
    const struct hstep_device *device;
    char ordinal[24]; /* the part of the device's option after the colon */
    int checking;     /* 1: belongs to the check of a device (device_check.c), which does not check again */
    struct hstep_context context;
    uint64_t seed;
    int generator;                    /* row of the choice */
    int scan, clip, missing_gradient; /* HSTEP_SCAN_*, HSTEP_CLIP_*, HSTEP_MISSING_* */
    double gradient_scale, clip_norm;

    struct hstep_group *groups;
    struct hstep_tensor *tensors;
    struct hstep_label *labels; /* one for each tensor */
    struct hstep_links *links;  /* room for as many tensors as capacity_links, which is a power of two */
    int has_bound_copies;       /* 1: some label has a place for the host's copies */
    int n_groups, n_tensors, capacity_groups, capacity_tensors, capacity_labels, capacity_links;
    /* Set when the handle is settled: */
    int settled;
    struct hstep_plan plan;
    struct hstep_chunk *chunks; /* the plan's chunks and tasks, in memory of the process */
    int64_t *tasks;
    struct hstep_verdict *verdict; /* of calls about all tensors, in memory of the device */
    int sums;                      /* their number in all tensors */
    /* Numbers of tensors: stepped as matrices, with vectors, with totals in their rule, of which only a part is
     * here. */
    int matrices, factored, totals, parts;
    int states_placed;             /* 1: the states, or some of them, have been given memory */
    int slots_bound;               /* 1: all slots have their memory */
    int norms_made;                /* 1: halfstep_run_norms() has made the sums of all tensors for the next finish */
    int scalars_unshared;          /* 1: tensors with totals may differ in their scalars, which were set or are new */
    void *memory;                  /* the states' memory if the library has allocated it, or NULL */
    struct hstep_storage *storage; /* of the states, in place of memory, or NULL */
    _Atomic(struct hstep_results *) results; /* of steps in advance; NULL before the first */
    uint64_t redone_steps;
    uint64_t workspace_bytes;
    atomic_flag workspace_lock;

    /* For asynchronous devices (sync.c). */
    atomic_int device_ahead;        /* 1: steps were submitted since the last fetch */
    int captured;                   /* 1: a step was captured, and a graph may make it again at any time */
    int changed_first, changed_end; /* range of the tensors that were changed since they were sent */
    int counts_changed;             /* 1: steps of groups, or counts of the ledger, were changed since they were sent */
    struct hstep_group *sent;       /* groups as they were last sent */
    struct hstep_group *fetched;    /* buffer for groups that are fetched */
    double sent_scale;
    uint64_t refusals, refusals_seen, refusals_told; /* refusals in the ledger; those that nonfinite_tensor tells of;
                                                        those that halfstep_synchronize() has reported */
    int offender, in_round, too_large;
    void *single_scratch; /* scratch of calls about single tensors, one for each tensor, in memory of the device */
    atomic_flag sync_lock;

    /* Addresses, in memory of the device, at which hyper-parameters are bound, or NULL. */
    const double **lr_place; /* one for each group */
    const double *scale_place;
    double *lr_set, scale_set; /* values from before the binding, for devices that keep no copy of their own */

    double round_norm; /* norm of the round before, for clipping in release */
    double gradient_norm;
    atomic_uint_least64_t skipped;
    atomic_int nonfinite_tensor, gradient_too_large;
    uint64_t serial; /* unique among all handles of the process */
    atomic_flag detail_lock;
    char detail[HSTEP_DETAIL_BYTES];
};

/* The device of handles made from now on. Tests put another one in place of the host. */
extern const struct hstep_device *hstep_default_device;
extern const struct hstep_device hstep_cuda_device;

/* Does what halfstep_create() does. checking: the device is not checked. */
int hstep_create(const halfstep_options *given, int checking, halfstep_optimizer **optimizer);

/* Checks code of the handle's device, unless it is trusted already (device_check.c): the fused row of a tensor, or with
 * -1 all code that is not fused. Returns DEVICE if a bit differs from the processor's, ORDER while the handle's stream
 * is captured, or the error of a call. */
int hstep_check_device(const halfstep_optimizer *o, int tensor);
/* Checks all fused rows of the handle's tensors. */
int hstep_check_fused(const halfstep_optimizer *o);

/* Returns the device that halfstep_options.device names, or NULL with the text of NAME if there is none. Points *rest
 * behind the colon of the name. */
const struct hstep_device *hstep_find_device(const char *name, const char **rest);

/* Sets the error text of the handle and the thread, and returns the code. o is NULL in a call without a handle. */
int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Returns from a public function if one of its arguments is NULL. The handle is called o in the code. */
#define HSTEP_NEED(o, pointer)                                                        \
    do {                                                                              \
        if (!(pointer))                                                               \
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "%s: %s is NULL", __func__, \
                              strcmp(#pointer, "o") ? #pointer : "optimizer");        \
    } while (0)
/* Fails with ARGUMENT, because a structure of the caller cannot be taken. */
int hstep_fail_struct(const halfstep_optimizer *o, const char *function, const void *structure);

/* Fails with MEMORY, because `what` needs so many bytes. */
int hstep_fail_memory(const halfstep_optimizer *o, uint64_t bytes, const char *what, ...)
    __attribute__((format(printf, 3, 4)));
/* Adds a name to a list of names in an error text. */
void hstep_add_name(char names[HSTEP_DETAIL_BYTES], const char *name);
/* Lists the formats with one of the roles. */
void hstep_list_formats(char names[HSTEP_DETAIL_BYTES], int roles);

/* Returns NONFINITE with the text of a refused step. The gradient of `tensor` is too large if too_large is set,
 * otherwise not finite. If tensor is -1, the norm is not finite. */
int hstep_fail_gradient(const halfstep_optimizer *o, int tensor, int too_large);
/* Fail with ARGUMENT unless there is such a tensor or group. */
int hstep_check_tensor(const halfstep_optimizer *o, int32_t tensor);
int hstep_check_group(const halfstep_optimizer *o, int32_t group);
/* Waits for the device and returns `error`, or the wait's own error if `error` is 0. Waits after an error too, because
 * earlier work may still write to memory of the caller. */
int hstep_wait(const halfstep_optimizer *o, int error);
/* Returns `error`. Sets the device's own error text if it has one. */
int hstep_why(const halfstep_optimizer *o, int error);

/* Returns ARGUMENT unless memory may be the device's. The caller then gets the text from the device (hstep_why). */
int hstep_check_owned(const halfstep_optimizer *o, const void *memory);

/* Fetches what steps have changed into the handle, and waits for it. This function and those up to hstep_send_at_once()
 * act on asynchronous devices only, and do nothing for others (sync.c). */
int hstep_fetch(const halfstep_optimizer *o);
/* Mark tensors, or counts of groups and of the ledger, as changed. They must have been fetched before the change. On
 * every device, results of steps in advance of these tensors are forgotten. */
void hstep_changed(halfstep_optimizer *o, int first, int n);
void hstep_counts_changed(halfstep_optimizer *o);
/* Send to the device what was changed: before a step, or at once if a captured graph may make steps. */
int hstep_send(halfstep_optimizer *o);
int hstep_send_at_once(halfstep_optimizer *o);
/* Copies bound hyper-parameters from their addresses, on every device. */
int hstep_send_bound(halfstep_optimizer *o);
/* Allocate and free what asynchronous devices need for a handle: in halfstep_create(), in hstep_settle() and in
 * halfstep_destroy(). */
int hstep_open_sync(halfstep_optimizer *o);
int hstep_settle_sync(halfstep_optimizer *o);
void hstep_close_sync(halfstep_optimizer *o);

#define HSTEP_MAX_SINGLE_STATISTICS (HSTEP_STATISTICS_HEAD + 1 + HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS)

/* Statistics and a verdict of one tensor. Each call has its own, so that several threads may each step one tensor. */
struct hstep_single_scratch {
    int64_t statistics[HSTEP_MAX_SINGLE_STATISTICS];
    struct hstep_verdict verdict;
};

/* Points *scratch to memory of the device for a call about one tensor. If the device shares the process's memory,
 * leaves *scratch as it is. On an asynchronous device the handle keeps one for each tensor. On others it is allocated
 * for this call only, and hstep_leave_scratch() releases it. */
int hstep_take_scratch(halfstep_optimizer *o, int tensor, struct hstep_single_scratch **scratch);
void hstep_leave_scratch(halfstep_optimizer *o, struct hstep_single_scratch *scratch);

/* Fails with RANGE if a schedule that falls has no length, or one that leaves no room for its warm-up. group: -1 in a
 * call without a handle. */
int hstep_check_schedule(const halfstep_optimizer *o, int group, int schedule, double warmup, double total);

/* Makes room in an array for one more than count elements. After a failure the array is unchanged. */
int hstep_grow(void **array, int count, int *capacity, size_t size);

/* Returns the tensor with this id, or -1. */
int hstep_find_id(const halfstep_optimizer *o, uint64_t id);
/* Gives a tensor another id. */
void hstep_change_id(halfstep_optimizer *o, int tensor, uint64_t id);

/* Makes a group of a recipe with default hyper-parameters. */
int hstep_make_group(const halfstep_optimizer *o, const char *recipe, struct hstep_group *g);
/* Checks a description, and makes the tensor that it describes in a group: its shape, part and formats. */
int hstep_make_tensor(const halfstep_optimizer *o, const struct hstep_group *g, const halfstep_tensor *d,
                      struct hstep_tensor *t);
/* Adds the bytes of a tensor to sums: of weights, gradients, the weights' extra streams, and states. */
enum { HSTEP_WEIGHTS, HSTEP_GRADIENTS, HSTEP_WEIGHT_EXTRAS, HSTEP_STATES, HSTEP_BYTES };
void hstep_add_bytes(const struct hstep_tensor *t, uint64_t sum[HSTEP_BYTES]);
/* Chooses the formats of a tensor's states under the group's hyper-parameters. */
int hstep_choose_states(const halfstep_optimizer *o, const struct hstep_group *g, const char *name,
                        struct hstep_tensor *t);

/* Gives all tensors that share totals the same scalars: those of the tensor whose first scalar is largest. Tensors must
 * have been fetched. */
void hstep_share_scalars(halfstep_optimizer *o);

/* Allocates the part of a plan that a handle needs before it is settled, or without tensors. */
int hstep_first_plan(halfstep_optimizer *o);
/* Settles the handle: makes its chunk lists, finds fused kernels and allocates the arrays of a step. Afterwards no
 * group or tensor can be added. */
int hstep_settle(halfstep_optimizer *o);
/* Frees what hstep_settle() has allocated, and the statistics of hstep_first_plan(). */
void hstep_release_plan(halfstep_optimizer *o);
/* Returns how many floats of workspace a laid out tensor needs on a device. */
size_t hstep_workspace_floats(const struct hstep_device *device, const struct hstep_tensor *t);
/* Fails with ORDER if some slot of n tensors that stores something has no memory. */
int hstep_check_bound(const halfstep_optimizer *o, int first_tensor, int n);
/* Writes the host's copies of the records of n tensors. */
void hstep_show(const halfstep_optimizer *o, int first, int n);

/* A call about all tensors or one: what the device is told, and the handle. */
struct hstep_request {
    halfstep_optimizer *o;
    struct hstep_call call;
    int *norms_made; /* 1: the call between begin and finish has made the sums */
    const halfstep_ahead *ahead;
};

/* The parts of a step: the three that processes make together, or all of it in one call. */
enum hstep_part { HSTEP_PART_BEGIN, HSTEP_PART_NORMS, HSTEP_PART_FINISH, HSTEP_PART_ALL };

/* Fails if the call cannot be made. The device has not been asked for anything by then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_part part);

/* Make the sums of n tensors, or their sums and their update (step.c). made: 1 if there are sums already. */
int hstep_sum_tensors(const struct hstep_request *s, int first, int n);
int hstep_step_tensors(const struct hstep_request *s, int first, int n, int made);

/* The following functions are for steps in advance (ahead.c). The first makes one, for a request about one tensor, with
 * statistics as scratch. */
int hstep_step_in_advance(const struct hstep_request *s, int64_t *statistics);
/* Fails if a call may not have `ahead`. */
int hstep_check_ahead(const halfstep_optimizer *o, const halfstep_call *call, enum hstep_part part);
/* Scans gradients except those of results, whose squares it adds. */
int hstep_scan_rest(const struct hstep_request *s);
/* Between decide and count: the first function points the request to the results that stand, and to where new weights
 * go. The second restores the updates, and forgets all results of the request's tensors. */
int hstep_use_results(struct hstep_request *s);
void hstep_end_results(const struct hstep_request *s);
/* Forgets the results of n tensors, because something that they were made of changes. */
void hstep_forget_results(halfstep_optimizer *o, int first, int n);
void hstep_close_results(halfstep_optimizer *o);

/* Cuts all tensors of a settled handle into chunks again, after their piece_rows have changed (plan.c). */
int hstep_cut_again(halfstep_optimizer *o);
/* Fails with ARGUMENT unless the tensor has such a slot (slots.c). */
int hstep_check_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot);
/* Writes the first error codes of a packed weight (slots.c). */
int hstep_spread_errors(const halfstep_optimizer *o, const struct hstep_tensor *t);

/* Returns a tensor as it is once the handle is settled (storage.c). */
struct hstep_tensor hstep_laid_out(const halfstep_optimizer *o, int tensor);
/* Returns the rows of a piece of a laid out tensor, or 0 if the tensor is one piece. piece_bytes 0: the default. */
int64_t hstep_piece_rows(const struct hstep_tensor *t, uint64_t piece_bytes);
/* Returns the number of pieces of so many rows. */
int64_t hstep_count_pieces(const struct hstep_tensor *t, int64_t rows);
/* Describes the piece of some rows. Rows that are not all rows belong to a tensor that may be cut. */
halfstep_piece hstep_describe(const struct hstep_tensor *t, int tensor, int64_t first_row, int64_t n_rows, int weights);
/* Returns the bytes of memory that a piece of so many bytes takes. */
uint64_t hstep_piece_space(uint64_t bytes);
/* Returns the memory of pieces that is enough, by the space of the largest piece and of all. */
uint64_t hstep_least_memory(uint64_t largest, uint64_t all, uint64_t piece_bytes);

/* The following functions are for states in storage (storage.c). The first brings the pieces of a call into memory one
 * after another, and makes the sums or the updates of their tensors. */
int hstep_walk(const struct hstep_request *s, int sums_only);
/* Fails with ORDER if the storage has failed since it was bound. Succeeds without storage. */
int hstep_check_storage(const halfstep_optimizer *o);
/* Fails like hstep_check_storage(), or if the storage refuses a step. Nothing has changed then. */
int hstep_begin_storage(const halfstep_optimizer *o);
/* Keeps the counters as they are, for hstep_commit(). Does nothing without storage. */
void hstep_keep_counts(halfstep_optimizer *o);
/* Flushes the storage, if there is one. After a failure puts the counters back. */
int hstep_commit(halfstep_optimizer *o, void *const *weights);
/* Tells whether some bytes of a slot are in storage, apart from codes of the weight. The next two functions read and
 * write values of such a slot. */
int hstep_is_stored(const halfstep_optimizer *o, int tensor, int slot);
int hstep_read_stored(const halfstep_optimizer *o, int tensor, const struct hstep_access *a, float *out);
int hstep_write_stored(halfstep_optimizer *o, int tensor, const struct hstep_access *a, const float *in);
void hstep_close_storage(halfstep_optimizer *o);

#endif
