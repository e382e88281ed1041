/* Steps in advance. */
#ifndef HSTEP_AHEAD_H
#define HSTEP_AHEAD_H

#include "handle/step/step.h"

/* Makes a step in advance, for a request about one tensor, with statistics as scratch. */
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

#endif
