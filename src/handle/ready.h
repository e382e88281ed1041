/* A call of step.c, and the checks before it. */
#ifndef HSTEP_READY_H
#define HSTEP_READY_H

#include "handle/optimizer.h"

/* A call about all tensors or one: what the device is told, and the handle. */
struct hstep_request {
    halfstep_optimizer *o;
    struct hstep_call call;
    int *norms_made; /* 1: the call between begin and finish has made the sums */
};

/* The parts of a step: the three that processes make together, or all of it in one call. */
enum hstep_part { HSTEP_PART_BEGIN, HSTEP_PART_NORMS, HSTEP_PART_FINISH, HSTEP_PART_ALL };

/* Fails if the call cannot be made. The device has not been asked for anything by then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_part part);

#endif
