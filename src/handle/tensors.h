/* Ids, formats and scalars of a handle's tensors. */
#ifndef HSTEP_TENSORS_H
#define HSTEP_TENSORS_H

#include "handle/optimizer.h"

/* Returns the tensor with this id, or -1. */
int hstep_find_id(const halfstep_optimizer *o, uint64_t id);
/* Gives a tensor another id. */
void hstep_change_id(halfstep_optimizer *o, int tensor, uint64_t id);

/* Chooses the formats of a tensor's states under the group's hyper-parameters. */
int hstep_choose_states(const halfstep_optimizer *o, const struct hstep_group *g, const char *name,
                        struct hstep_tensor *t);

/* Gives all tensors that share totals the same scalars: those of the tensor whose first scalar is largest. Tensors must
 * have been fetched. */
void hstep_share_scalars(halfstep_optimizer *o);

#endif
