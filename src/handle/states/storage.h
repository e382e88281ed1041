/* States in storage. */
#ifndef HSTEP_STORAGE_H
#define HSTEP_STORAGE_H

#include "handle/step/step.h"

/* Some bytes of a piece. */
struct hstep_range {
    uint64_t offset, bytes;
};
/* Returns where a piece has the codes of a slot, or its extra stream. */
struct hstep_range hstep_range_of(const halfstep_piece *p, int slot, int extra);
/* Describes the piece of some rows. Rows that are not all rows belong to a tensor that may be cut. */
halfstep_piece hstep_describe(const struct hstep_tensor *t, int tensor, int64_t first_row, int64_t n_rows, int weights);

/* Brings the pieces of a call into memory one after another, and makes the sums or the updates of their tensors. */
int hstep_walk(const struct hstep_request *s, int sums_only);
/* Fails with ORDER if the storage has failed since it was bound. Succeeds without storage. */
int hstep_check_storage(const halfstep_optimizer *o);
/* Fails like hstep_check_storage(), or if the storage refuses a step. Nothing has changed then. */
int hstep_begin_storage(const halfstep_optimizer *o);
/* Keeps the counters as they are, for hstep_commit(). Does nothing without storage. */
void hstep_keep_counts(halfstep_optimizer *o);
/* Flushes the storage, if there is one. After a failure puts the counters back. */
int hstep_commit(halfstep_optimizer *o, void *const *weights);
/* Tells whether some bytes of a slot are in storage, apart from codes of the weight. The next two functions read and
 * write values of such a slot. */
int hstep_is_stored(const halfstep_optimizer *o, int tensor, int slot);
int hstep_read_stored(const halfstep_optimizer *o, int tensor, const struct hstep_access *a, float *out);
int hstep_write_stored(halfstep_optimizer *o, int tensor, const struct hstep_access *a, const float *in);
void hstep_close_storage(halfstep_optimizer *o);

#endif
