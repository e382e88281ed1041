/* Shared by the files of one training run: build.c builds a run, loop.c trains, save.c and resume.c save and load its
 * checkpoints. */
#ifndef HALFSTEP_RUN_INTERNAL_H
#define HALFSTEP_RUN_INTERNAL_H

#include "halfstep.h"

#include "common/log.h"
#include "common/tree.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/run_lock.h"
#include "trainer/run/run.h"

enum { NORM_PIECE = 1 << 16 };

/* The part of a run that only several processes use (ranks.h). */
struct rows;
struct ranks {
    struct rows *rows; /* [tensor * ranks + rank] */
    struct tree_node *node;
    int *node_rank;
    struct tree_merge *merge;
    int nodes;           /* of all ranks, in rank order */
    int64_t *own_offset; /* [tensor]: its place in a buffer of own rows; last, the buffer's length */
    float *received;     /* [foreign node]: the node's sums for the own rows, in the layout of own_offset */
    void **sums;         /* [node]: the sums of one tensor's own rows */
    int whole_tensors;   /* matrices are not split between ranks */
    int two_sums;        /* a step needs a second sum over the ranks, for the rule's statistics */
    int64_t *row_offset; /* [tensor]: its first row among the rows of all tensors */
    double *row_squares;
};

/* Everything that belongs to one run. */
struct run {
    const struct run_config *config;
    const struct run_data *data;
    struct progress *progress;
    struct run_result *result;
    char *error;
    size_t error_bytes;

    struct lm_config shape;
    struct lm *model;
    halfstep_optimizer *optimizer;
    struct holding holding;
    int32_t decayed, plain; /* groups: with and without weight decay */
    int32_t ends;           /* the group of embedding and head: `decayed`, or a group of AdamW */
    int32_t rule;           /* index of the rule in the library's table */
    int tensors, threads, gradient_dtype;
    int adds_up;     /* micro-steps add their gradients up in buffers, and the step reads the sums */
    int by_tree;     /* ... in the order of a tree, see tree.c */
    int hands_out;   /* the model hands out one tensor's gradient at a time and keeps none */
    int has_average; /* the rule evaluates an average of the weights that it trains */
    unsigned char *weight_memory, *gradient_memory;
    void **weights, **gradients; /* weights of whole tensors; gradients of the own rows */
    void **own_weights;          /* the own rows of each tensor in `weights` */
    struct lm_weight *model_weights;
    uint8_t *tokens;
    float *scratch; /* room for NORM_PIECE values or one row, whichever is longer */
    struct log *log;

    int64_t step;         /* steps done */
    int64_t micro_step;   /* the current one of the step */
    double squares;       /* sum of squares of this step's gradients, loss scale included */
    double released_norm; /* gradient norm of the previous step, which --clip uses with --release */
    int skipped_now, skips_in_a_row, skip_warned, log_lost;
    int gradient_failed;
    double started, optimizer_seconds, trained_seconds;
    int64_t saved_step; /* -1: not saved yet */
    uint64_t sequence;  /* of the last checkpoint that this run has saved or resumed; 0: none */
    int unread;         /* the last save succeeded, but reading it back failed */
    uint64_t unread_step;
    int directory_shared; /* the directory holds checkpoints of other runs */
    struct run_lock *lock;

    struct dist *dist; /* NULL: a single process, rank 0 of 1 */
    int rank, ranks;
    struct ranks parts;
    halfstep_optimizer *whole; /* whole tensors without states, for sizes only. NULL: a single process */
    double *losses;            /* one loss per micro-step, then one number per rank */
    int signal;                /* the signal that any rank has received; all ranks know it */
    char offender[96];         /* name of the tensor whose gradient was not finite */

    struct tree tree;
    halfstep_optimizer *adder; /* has every tensor whole, and adds up their gradients */
    float *tree_memory;        /* tree.slots buffers of tree_offset[tensors] values */
    int64_t *tree_offset;      /* where each tensor begins in a buffer; the last entry is the length of a buffer */
};

/* Writes the error text. Returns 1, the exit status of a failed run. */
__attribute__((format(printf, 2, 3))) int run_fail(struct run *run, const char *format, ...);
/* Interprets the result of a call that may refuse gradients. Refused gradients give a warning and count as success. */
int run_judge(struct run *run, int code);
/* Counts the steps in a row whose gradients were refused. Returns 0, or 1 with an error text if they are too many. */
int run_count_skip(struct run *run);
/* Fills in the members of the result that both models have. */
void run_fill_common(struct run *run);
/* Does the same with the text of the optimizer's last error. */
int run_fail_in(struct run *run, const halfstep_optimizer *optimizer);
/* Returns the description of a tensor of the language model. */
struct lm_tensor run_tensor(const struct run *run, int tensor);
/* Sets a hyper-parameter. Returns 0, or an exit status with an error text that names `option`. */
int run_set_hyper(struct run *run, int32_t group, const char *name, double value, const char *option);
/* Creates the optimizer with its groups, hyper-parameters and choices, but without tensors. */
int run_create_optimizer(struct run *run);
/* Allocates one block of zeroed memory for a slot of all tensors. Each tensor begins at a multiple of 64 bytes, and the
 * first one `stagger` bytes into the block. Blocks need different staggers, because equal offsets modulo a power of two
 * cost speed. Sets `*bytes` to the size of the tensors without padding. */
int run_allocate(struct run *run, int32_t slot, size_t stagger, unsigned char **memory, void **pointers,
                 uint64_t *bytes);
/* Adds the rows of each tensor that this rank steps. */
int run_add_tensors(struct run *run);
int run_build(struct run *run);
/* Micro-steps added up along a tree. run_tree_open() allocates the buffers, run_tree_take() adds one gradient, and
 * run_tree_slot() returns a tensor's place in a buffer. */
int run_tree_open(struct run *run);
int run_tree_take(struct run *run, int tensor, const void *gradient);
float *run_tree_slot(const struct run *run, int slot, int tensor);
void run_tree_close(struct run *run);
void run_dismantle(struct run *run);
/* Sets the first weights: random ones, or those of --init. */
int run_initialize(struct run *run);
/* Locks the checkpoint directory for this run. Fails early if a later save or log would fail: files of other runs,
 * output paths that are also inputs, no permission to write. Does nothing on other ranks than 0. */
int run_open_directory(struct run *run);
int run_resume(struct run *run);
int run_open_log(struct run *run);
/* Prints a note on stderr and adds it to the result's notes, unless the run has had the same note before. */
void run_tell(struct run *run, const char *note);
/* Makes all ranks return the same status with the same error text: that of the first rank that failed. Collective. */
int run_agree(struct run *run, int status);
/* Saves a checkpoint and reads it back to verify it. Collective. */
int run_save(struct run *run);

/* outcome.c. Returns the weights to evaluate with: the stored weights, or fp32 copies of the average if the rule
 * keeps one. The caller frees `*copies`. Returns NULL after an error. Collective. */
const struct lm_weight *run_eval_weights(struct run *run, void **copies);
/* Returns the mean loss of the last steps in the history, those before a resume included. NaN without any step. */
double run_mean_loss(const struct run_history *history);
/* Sets job_received of the result to the bytes that all ranks have received so far. Collective. */
int run_count_traffic(struct run *run);
int run_fill_result(struct run *run);
/* Fills in the result of a run that diverged. The losses are NaN. A comparison reports it. */
void run_fill_diverged(struct run *run);

#endif
