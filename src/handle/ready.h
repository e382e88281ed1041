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

/* Which public call it is: one of the three of a step that processes share, or the one that makes all of it. */
enum hstep_call_kind { HSTEP_CALL_BEGIN, HSTEP_CALL_NORMS, HSTEP_CALL_FINISH, HSTEP_CALL_ALONE };

/* What stands against it, as a sentence; nothing has been asked of the device then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_call_kind kind);

#endif
