/* What a handle and its device tell each other. */
#ifndef HSTEP_SYNC_H
#define HSTEP_SYNC_H

#include "handle/optimizer.h"

/* Returns the device that halfstep_options.device names, or NULL with the text of NAME if there is none. Points *rest
 * behind the colon of the name. */
const struct hstep_device *hstep_find_device(const char *name, const char **rest);

/* Fetches what steps have changed into the handle, and waits for it. This function and those up to hstep_send_at_once()
 * act on asynchronous devices only, and do nothing for others. */
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

/* Writes the host's copies of the records of n tensors. */
void hstep_show(const halfstep_optimizer *o, int first, int n);

#endif
