/* The check of a device before its first use. */
#ifndef HSTEP_DEVICE_CHECK_H
#define HSTEP_DEVICE_CHECK_H

#include "handle/optimizer.h"

/* Checks code of the handle's device, unless it is trusted already: the fused row of a tensor, or with -1 all code that
 * is not fused. Returns DEVICE if a bit differs from the processor's, ORDER while the handle's stream is captured, or
 * the error of a call. */
int hstep_check_device(const halfstep_optimizer *o, int tensor);
/* Checks all fused rows of the handle's tensors. */
int hstep_check_fused(const halfstep_optimizer *o);

#endif
