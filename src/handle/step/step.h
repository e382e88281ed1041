/* What the stages of a step share. */
#ifndef HSTEP_STEP_H
#define HSTEP_STEP_H

#include "handle/optimizer.h"

/* A call about all tensors or one: what the device is told, and the handle. */
struct hstep_request {
    halfstep_optimizer *o;
    struct hstep_call call;
    int *norms_made; /* 1: the call between begin and finish has made the sums */
    const halfstep_ahead *ahead;
};

/* The parts of a step: the three that processes make together, or all of it in one call. */
enum hstep_part { HSTEP_PART_BEGIN, HSTEP_PART_NORMS, HSTEP_PART_FINISH, HSTEP_PART_ALL };

/* Make the sums of n tensors, or their sums and their update. made: 1 if there are sums already. */
int hstep_sum_tensors(const struct hstep_request *s, int first, int n);
int hstep_step_tensors(const struct hstep_request *s, int first, int n, int made);

#endif
