/* The arrays that steps need. */
#ifndef HSTEP_PLAN_H
#define HSTEP_PLAN_H

#include "handle/optimizer.h"

/* Allocates the part of a plan that a handle needs before it is settled, or without tensors. */
int hstep_first_plan(halfstep_optimizer *o);
/* Settles the handle: makes its chunk lists, finds fused kernels and allocates the arrays of a step. Afterwards no
 * group or tensor can be added. */
int hstep_settle(halfstep_optimizer *o);
/* Frees what hstep_settle() has allocated, and the statistics of hstep_first_plan(). */
void hstep_release_plan(halfstep_optimizer *o);
/* Cuts all tensors of a settled handle into chunks again, after their piece_rows have changed. */
int hstep_cut_again(halfstep_optimizer *o);
/* Returns how many floats of workspace a laid out tensor needs on a device. */
size_t hstep_workspace_floats(const struct hstep_device *device, const struct hstep_tensor *t);
/* Returns a tensor as it is once the handle is settled. */
struct hstep_tensor hstep_laid_out(const halfstep_optimizer *o, int tensor);

#endif
