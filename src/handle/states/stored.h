/* Slots of states in storage. */
#ifndef HSTEP_STORED_H
#define HSTEP_STORED_H

#include "handle/optimizer.h"

/* Tells whether some bytes of a slot are in storage, apart from codes of the weight. The next two functions read and
 * write values of such a slot. */
int hstep_is_stored(const halfstep_optimizer *o, int tensor, int slot);
int hstep_read_stored(const halfstep_optimizer *o, int tensor, const struct hstep_access *a, float *out);
int hstep_write_stored(halfstep_optimizer *o, int tensor, const struct hstep_access *a, const float *in);

#endif
