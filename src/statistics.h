#ifndef HSTEP_STATISTICS_H
#define HSTEP_STATISTICS_H

#include "optimizer.h"

/* Adds the squares of the gradients of n tensors from `first` on to the limbs (NULL: no norm is wanted), and sets the flag of
 * every tensor whose gradient is not finite (NULL: nobody asks), or too large unless it is going to be clipped by its own
 * norm. gradients and flags count from `first`. */
void hstep_scan_tensors(const halfstep_optimizer *o, int first, int n, const void *const *gradients, int clipped,
                        int64_t *squares, int64_t *flags);

/* Carries in `from` and adds it, safe against other threads that do the same. 2^31 merges fit. */
void hstep_merge_squares(int64_t *to, int64_t *from);

/* A chunk of 256 columns belongs to the task that holds its first element: widens or narrows a stretch of a run, which begins
 * at index `start`, to the chunks that are its own. */
void hstep_scan_bounds(const struct hstep_tensor *t, uint64_t start, int64_t *offset, int64_t *length);

/* Mean of a whole row of a raw gradient, by the same chunks and exact sum as norms. */
double hstep_row_mean(const halfstep_optimizer *o, const struct hstep_slot *slot, const char *code, int64_t n);

/* Up to a tile of elements, padded with zeros in `room` (HSTEP_TILE * 4 bytes) if they are no whole groups, and *n with
 * them; returns where they are. */
const char *hstep_whole_groups(const struct hstep_slot *slot, const char *code, int64_t *n, char *room);

#endif
