/* One training run as several processes (tools/trainer/ranks/dist.h): data parallel with the states shared out
 * (ZeRO-1).
 *
 * Each rank computes the gradients of a range of the micro-steps and adds up its nodes of their tree (tree.h). Each has
 * the states of a stretch of all rows: the nodes of those rows are sent to it while the last of the gradients are
 * computed, it adds them up, steps its rows, and hands them out. Where a rule needs whole matrices, a stretch has whole
 * tensors. What is agreed on, is sums of integers; so every number is that of one process.
 *
 * Collective means that every rank makes the call. Functions return 0, or 1 with the error line of the run. Of a run
 * that is alone they are what one process does, or nothing. */
#ifndef HALFSTEP_TRAIN_RANKS_H
#define HALFSTEP_TRAIN_RANKS_H

#include "trainer/ranks/dist.h"
#include "trainer/run/train_internal.h"

struct rows {
    int64_t first, n;
};

/* Between ranks, before anything is built: 0, or the exit status that all of them end with, and the line that the first
 * rank is to print. Collective. */
int ranks_agree(struct dist *dist, int status, char *error, size_t error_bytes);
/* Whether all were started with the same options, data and program; a rank that was not is named. Collective. */
int ranks_compare(struct dist *dist, const struct run_config *config, const struct run_data *data, char *error,
                  size_t error_bytes);

/* Processors of the machine are shared by its ranks. */
int ranks_threads(const struct run_config *config);
/* What cannot be done by several: the exit status and its line. */
int ranks_check(struct run *run);
/* Which rows are whose; the optimizer's groups are there, its tensors are not. */
int ranks_open(struct run *run);
void ranks_close(struct run *run);
struct rows ranks_rows(const struct run *run, int tensor, int rank);
/* The first own row of a tensor in a buffer of the whole, whose elements have this size. */
void *ranks_own(const struct run *run, int tensor, void *whole, size_t element_bytes);

/* The way of the gradients: before the last micro-step of this rank, for each tensor that is done, and after all. Then
 * run->gradients are those of the own rows. */
int ranks_begin_exchange(struct run *run);
int ranks_exchange(struct run *run, int tensor);
int ranks_finish_exchange(struct run *run);
/* Collective. *code is what halfstep_step() would have returned. */
int ranks_step(struct run *run, int *code);
/* Squares of the step's gradients, row by row and then in the order of rows. Collective. */
int ranks_sum_of_squares(struct run *run, double *squares);
/* Hands out the own rows of run->weights. Collective. */
int ranks_hand_out(struct run *run);
/* Elements of 4 bytes of a buffer with all rows of a tensor, likewise; ranks_wait() ends it. */
int ranks_hand_out_floats(struct run *run, int tensor, float *whole);
int ranks_wait(struct run *run);
/* Numbers of which each rank has set its own and left the others 0. Collective. */
int ranks_share_numbers(struct run *run, double *numbers, size_t n);
/* losses of all micro-steps; run->signal is what any rank has been sent. Collective. */
int ranks_share_losses(struct run *run, double *losses);

/* The whole optimizer on the first rank, with memory of its own; destroyed by ranks_drop(). Alone, and then only, it
 * is the run's own. Collective. */
int ranks_collect(struct run *run, struct holding *whole);
void ranks_drop(struct run *run, struct holding *whole);
/* An optimizer of whole tensors, and the own rows of one. */
int ranks_make_whole(struct run *run, int with_states, struct holding *whole);
int ranks_take_own(struct run *run, const struct holding *whole);

#endif
