/* The cases that a device is checked with: groups and tensors of small handles, and their numbers. */
#ifndef HSTEP_DEVICE_CASES_H
#define HSTEP_DEVICE_CASES_H

#include "handle/optimizer.h"

/* Describes every rule with every weight format, in turns with every state format, and adamw with each of these. Rules
 * of matrices, whose kernels are many launches, have every fourth weight format. */
int hstep_describe_general(halfstep_optimizer *o, int part);
/* Describes the rule and states of a tensor with every weight format, gradient format and mode of decay, in shapes that
 * consist of whole tiles. */
int hstep_describe_fused(halfstep_optimizer *o, const halfstep_optimizer *asking, int tensor, int part);
/* Lets some tensors and groups have made steps already, as after a checkpoint, so that few steps show late ones. */
int hstep_age_cases(halfstep_optimizer *o);

/* Sets what hyper-parameters change from step to step: clipping, the gradients' scale, learning rates and decay. */
void hstep_set_case_step(halfstep_optimizer *o, int step);

/* Writes the numbers of a weight or a gradient, of 2 or 4 bytes each. Every eleventh block of 32 of a gradient is zero.
 * Some weights of every fourth tensor are the largest finite numbers, unless l2 decay or sums over the tensor would
 * square them. */
void hstep_fill_case(char *data, const halfstep_optimizer *o, int tensor, int slot, uint64_t seed);

#endif
