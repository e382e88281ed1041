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

/* What a call does of its request; ALONE is all of it. */
enum hstep_part { HSTEP_BEGIN, HSTEP_NORMS, HSTEP_FINISH, HSTEP_ALONE };

/* What stands against it, as a sentence; nothing has been asked of the device then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_part part);

#endif
