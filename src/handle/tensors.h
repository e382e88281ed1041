/* Groups and tensors: making them, their ids, bytes, formats and scalars. */
#ifndef HSTEP_TENSORS_H
#define HSTEP_TENSORS_H

#include "handle/optimizer.h"

/* Returns the tensor with this id, or -1. */
int hstep_find_id(const halfstep_optimizer *o, uint64_t id);
/* Gives a tensor another id. */
void hstep_change_id(halfstep_optimizer *o, int tensor, uint64_t id);

/* Makes a group of a recipe with default hyper-parameters. */
int hstep_make_group(const halfstep_optimizer *o, const char *recipe, struct hstep_group *g);
/* Checks a description, and makes the tensor that it describes in a group: its shape, part and formats. */
int hstep_make_tensor(const halfstep_optimizer *o, const struct hstep_group *g, const halfstep_tensor *d,
                      struct hstep_tensor *t);
/* Adds the bytes of a tensor to sums: of weights, gradients, the weights' extra planes, and states. */
enum { HSTEP_WEIGHTS, HSTEP_GRADIENTS, HSTEP_WEIGHT_EXTRAS, HSTEP_STATES, HSTEP_BYTES };
void hstep_add_bytes(const struct hstep_tensor *t, uint64_t sum[HSTEP_BYTES]);
/* Chooses the formats of a tensor's states under the group's hyper-parameters. */
int hstep_choose_states(const halfstep_optimizer *o, const struct hstep_group *g, const char *name,
                        struct hstep_tensor *t);

/* Gives all tensors that share totals the same scalars: those of the tensor whose first scalar is largest. Tensors must
 * have been fetched. */
void hstep_share_scalars(halfstep_optimizer *o);

#endif
