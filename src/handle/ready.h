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

/* Steps a tensor in advance: ahead.c. */
int hstep_step_ahead(struct hstep_request *s, const halfstep_ahead *ahead, struct hstep_single_scratch *scratch);
/* Prepares a step that may take results: notes which ones are at hand, and chooses where new weights go. */
int hstep_find_results(struct hstep_request *s, const halfstep_ahead *ahead);
/* Adds the squares of the results that are at hand to the statistics of a scan. */
void hstep_add_squares(const struct hstep_request *s);
/* After the decision: lets stand the results that equal it, and copies what has to be copied. */
int hstep_take_results(const struct hstep_request *s);

/* Fails if the call cannot be made. The device has not been asked for anything by then. */
int hstep_check_ready(const struct hstep_request *s, enum hstep_part part);

#endif
