/* Pieces of states in memory, and the steps that work on them. */
#ifndef HSTEP_WALK_H
#define HSTEP_WALK_H

#include "handle/states/storage.h"
#include "handle/step/step.h"

/* Gives the slots of a tensor the addresses of a piece at p->place. An address may lie outside of any array. */
void hstep_give_addresses(struct hstep_tensor *t, const struct hstep_stored_piece *p);
/* Copies the codes of the weight to the end of a piece. */
void hstep_copy_weight(const halfstep_optimizer *o, const struct hstep_stored_piece *p, const void *weight);
/* Brings a piece into memory and keeps it there until another is needed, so that reading and writing in small parts
 * costs no more than in large ones. */
int hstep_hold(const halfstep_optimizer *o, int64_t number);

/* Brings the pieces of a call into memory one after another, and makes the sums or the updates of their tensors. */
int hstep_walk(const struct hstep_request *s, int sums_only);
/* Keeps the counters as they are, for hstep_commit(). Does nothing without storage. */
void hstep_keep_counts(halfstep_optimizer *o);
/* Flushes the storage, if there is one. After a failure puts the counters back. */
int hstep_commit(halfstep_optimizer *o, void *const *weights);

#endif
