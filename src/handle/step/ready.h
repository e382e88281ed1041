/* The checks before a step. */
#ifndef HSTEP_READY_H
#define HSTEP_READY_H

#include "handle/step/step.h"

/* Fails if the call cannot be made. The device has not been asked for anything by then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_part part);

#endif
