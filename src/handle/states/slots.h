/* Slots of a tensor. */
#ifndef HSTEP_SLOTS_H
#define HSTEP_SLOTS_H

#include "handle/optimizer.h"

/* Fails with ARGUMENT unless the tensor has such a slot. */
int hstep_check_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot);
/* Writes the first error codes of a packed weight. */
int hstep_spread_errors(const halfstep_optimizer *o, const struct hstep_tensor *t);

/* Returns the name of a slot in error texts. */
const char *hstep_slot_name(const halfstep_optimizer *o, int tensor, int slot);
/* Fails with ORDER if some slot of n tensors that stores something has no memory. */
int hstep_check_bound(const halfstep_optimizer *o, int first_tensor, int n);

#endif
