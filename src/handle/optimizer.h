/* The inside of a handle. This folder has the arguments, checks.c, and plan.c (chunks and arrays of a step). Inner
 * folders have `step`, the memory and records of `states`, and what `devices` need beside. */
#ifndef HSTEP_OPTIMIZER_H
#define HSTEP_OPTIMIZER_H

#include <stdatomic.h>

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
    int checking;     /* 1: belongs to the check of a device (devices/device_check.c), which does not check again */
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

    /* For asynchronous devices (devices/sync.c). */
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

/* Fails with RANGE if a schedule that falls has no length, or one that leaves no room for its warm-up. group: -1 in a
 * call without a handle. */
int hstep_check_schedule(const halfstep_optimizer *o, int group, int schedule, double warmup, double total);

#endif
