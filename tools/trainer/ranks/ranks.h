/* One training run as several processes (tools/trainer/ranks/dist.h). The run is data parallel, and the ranks share out
 * the states (ZeRO-1).
 *
 * Each rank computes the gradients of a range of micro-steps and adds them up to its nodes of the tree (tree.h). It has
 * the states of a share of all rows. During the last micro-step the other ranks send it their nodes for these rows. It
 * adds the nodes up, steps its rows, and sends the new weights to all. A rule that needs whole matrices gets whole
 * tensors. The ranks agree on numbers by integer sums, so that every number is the same as with one process.
 *
 * Collective means that every rank makes the call. Functions return 0, or 1 with the error text of the run. In a single
 * process they do that process's work, or nothing. */
#ifndef HALFSTEP_RANKS_H
#define HALFSTEP_RANKS_H

#include "trainer/ranks/dist.h"
#include "trainer/run/internal.h"

struct rows {
    int64_t first, n;
};

/* Makes all ranks return the same status. Returns 0, or the exit status of the first rank that failed, with its error
 * text. Collective. */
int ranks_agree(struct dist *dist, int status, char *error, size_t error_bytes);
/* Compares options, data and program with rank 0. Returns 0, or the exit status with an error text that names the first
 * rank that differs. Collective. */
int ranks_compare(struct dist *dist, const struct run_config *config, const struct run_data *data, char *error,
                  size_t error_bytes);

/* Returns the number of threads of this rank. By default the ranks of a machine share its processors. */
int ranks_threads(const struct run_config *config);
/* Fails for options that do not work with several processes. Returns 0, or 2 with an error text. */
int ranks_check(struct run *run);
/* Decides which rank has which rows. Requires the optimizer's groups; its tensors are added afterwards. */
int ranks_open(struct run *run);
void ranks_close(struct run *run);
struct rows ranks_rows(const struct run *run, int tensor, int rank);
/* Returns the first own row of a tensor in a buffer of the whole tensor, whose rows have this type. */
void *ranks_own(const struct run *run, int tensor, void *whole, int dtype);

/* The exchange of gradients: ranks_begin_exchange() before the last micro-step of this rank, ranks_exchange() for each
 * finished tensor, ranks_finish_exchange() at the end. Afterwards run->gradients has the own rows' sums. */
int ranks_begin_exchange(struct run *run);
int ranks_exchange(struct run *run, int tensor);
int ranks_finish_exchange(struct run *run);
/* Steps the own rows and hands out the new weights. Sets `*code` to the result that halfstep_step() would have had in a
 * single process. Collective. */
int ranks_step(struct run *run, int *code);
/* Computes the sum of squares of the step's gradients: by row, then over the rows in order. Collective. */
int ranks_sum_of_squares(struct run *run, double *squares);
/* Copies each rank's own rows of run->weights to all ranks. Collective. */
int ranks_hand_out(struct run *run);
/* Starts to copy each rank's own rows of one fp32 tensor to all ranks. ranks_wait() completes it. Collective. */
int ranks_hand_out_floats(struct run *run, int tensor, float *whole);
int ranks_wait(struct run *run);
/* Combines numbers of which each was set by one rank and is 0 on all others. Collective. */
int ranks_share_numbers(struct run *run, double *numbers, size_t n);
/* Combines the losses of all micro-steps. Sets run->signal if any rank has received a signal. Collective. */
int ranks_share_losses(struct run *run, double *losses);

/* Builds the whole optimizer on rank 0, in memory of its own, which ranks_drop() frees. With a single process it is the
 * run's own optimizer. Collective. */
int ranks_collect(struct run *run, struct holding *whole);
void ranks_drop(struct run *run, struct holding *whole);
/* ranks_make_whole() builds an optimizer of whole tensors. ranks_take_own() copies its own rows into the run's. */
int ranks_make_whole(struct run *run, int with_states, struct holding *whole);
int ranks_take_own(struct run *run, const struct holding *whole);

#endif
