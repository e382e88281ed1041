/* The check of a device before it touches memory of the caller. */
#ifndef HSTEP_DEVICE_CHECK_H
#define HSTEP_DEVICE_CHECK_H

#include "handle/optimizer.h"

/* Steps small cases on the handle's device and on the processor, and compares the bits. The cases have memory of their
 * own: 16 MB at most on either side. `tensor` is one of the handle, whose fused row is checked; -1: all code that is
 * not fused. Returns DEVICE if a bit differs, or the error of a call. Does nothing if the device is trusted already.
 * Fails with ORDER while the handle's stream is captured. */
int hstep_check_device(const halfstep_optimizer *o, int tensor);
/* Makes the check of all fused rows of the handle. */
int hstep_check_fused(const halfstep_optimizer *o);

#endif
