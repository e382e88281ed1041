/* One call of handle/step.c, and whether it may begin. */
#ifndef HSTEP_READY_H
#define HSTEP_READY_H

#include "handle/optimizer.h"

/* All tensors, or one, beside what the device is told of them. */
struct hstep_request {
    halfstep_optimizer *o;
    struct hstep_call call;
    int *norms_made; /* by the call between begin and finish */
};

/* Which part of a step a call makes: one of the three of a step that processes share, or all of it. */
enum hstep_part { HSTEP_PART_BEGIN, HSTEP_PART_NORMS, HSTEP_PART_FINISH, HSTEP_PART_ALL };

/* What stands against it, as a sentence; nothing has been asked of the device then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_part part);

#endif
