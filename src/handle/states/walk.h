/* Pieces of states in memory, and the steps that work on them. */
#ifndef HSTEP_WALK_H
#define HSTEP_WALK_H

#include "handle/states/storage.h"
#include "handle/step/step.h"

/* Brings the pieces of a call into memory one after another, and makes the sums or the updates of their tensors. */
int hstep_walk(const struct hstep_request *s, int sums_only);
/* Keeps the counters as they are, for hstep_commit(). Does nothing without storage. */
void hstep_keep_counts(halfstep_optimizer *o);
/* Flushes the storage, if there is one. After a failure puts the counters back. */
int hstep_commit(halfstep_optimizer *o, void *const *weights);
/* Tells whether some bytes of a slot are in storage, apart from codes of the weight. The next two functions read and
 * write values of such a slot. */
int hstep_is_stored(const halfstep_optimizer *o, int tensor, int slot);
int hstep_read_stored(const halfstep_optimizer *o, int tensor, const struct hstep_access *a, float *out);
int hstep_write_stored(halfstep_optimizer *o, int tensor, const struct hstep_access *a, const float *in);

#endif
