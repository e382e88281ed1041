/* Between the files of one training run: train_build.c makes it, train_resume.c takes it out of a checkpoint and puts
 * it back, train.c runs it. */
#ifndef HALFSTEP_TRAIN_INTERNAL_H
#define HALFSTEP_TRAIN_INTERNAL_H

#include "halfstep.h"

#include "common/log.h"
#include "common/tree.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/run_lock.h"
#include "trainer/run/train.h"

enum { NORM_PIECE = 1 << 16 };

/* What a run as several processes has: train_ranks.h. */
struct rows;
struct ranks {
    struct rows *rows; /* [tensor * ranks + rank] */
    struct tree_node *node;
    int *node_rank;
    struct tree_merge *merge;
    int nodes;           /* of all ranks, in their order */
    int64_t *own_offset; /* of each tensor among the elements of this rank's rows; the last is their number */
    float *received;     /* own elements of each node of another rank */
    void **sums;         /* of the nodes, for one tensor */
    int whole_tensors;   /* matrices are not cut */
    int two_sums;        /* a step has sums over tensors beside those over gradients */
    int64_t *row_offset; /* of each tensor among all rows */
    double *row_squares;
};

/* Everything a run owns while it runs. */
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
    int32_t decayed, plain; /* groups */
    int32_t rule;           /* row of the rule */
    int tensors, threads, gradient_dtype;
    int adds_up;     /* gradients of micro-steps are added up in the buffers that the step reads */
    int by_tree;     /* and along a tree, see train_tree.c */
    int streams;     /* the model hands out gradients tensor by tensor and keeps none */
    int has_average; /* what the rule trains is not what it evaluates */
    unsigned char *weight_memory, *gradient_memory;
    void **weights, **gradients; /* whole weights; gradients of the own rows */
    void **own_weights;          /* where the own rows begin */
    struct lm_weight *model_weights;
    uint8_t *tokens;
    float *scratch; /* NORM_PIECE values, or a row */
    struct log *log;

    int64_t step;         /* done */
    int64_t micro_step;   /* of the step under way */
    double squares;       /* of this step's gradients, before loss scale is taken out */
    double released_norm; /* of the step before: what --clip goes by with --release */
    int skipped_now, skips_in_a_row, skip_told, log_lost;
    int stream_failed;
    double started, optimizer_seconds, trained_seconds;
    int64_t saved_step; /* -1: never */
    uint64_t sequence;  /* of the last checkpoint that this run has saved or resumed; 0: none */
    int unread;         /* the last one was saved and could not be read back */
    uint64_t unread_step;
    int directory_shared; /* the directory holds checkpoints that are not this run's */
    struct run_lock *lock;

    struct dist *dist; /* NULL: alone, which is rank 0 of 1 */
    int rank, ranks;
    struct ranks parts;
    halfstep_optimizer *whole; /* has no states, but every tensor whole: for sizes. NULL: alone */
    double *losses;            /* of the micro-steps of a step, and one number of each rank */
    int signal;                /* that all ranks know of */
    char offender[96];         /* the tensor whose gradient was not finite */

    struct tree tree;
    halfstep_optimizer *adder; /* has every tensor whole, and adds up their gradients */
    float *tree_memory;        /* tree.slots times the elements of all tensors */
    int64_t *tree_offset;      /* of each tensor in a slot; the last is the size of a slot, in elements */
};

/* Writes the error line; 1, the exit status that goes with it. */
__attribute__((format(printf, 2, 3))) int run_fail(struct run *run, const char *format, ...);
/* What the gradient was that the last step was refused for, as the end of "is ...". */
const char *run_refused(const struct run *run);
/* 0, or an exit status with its line. `option` is what the error calls it. */
int run_set_hyper(struct run *run, int32_t group, const char *name, double value, const char *option);
/* The optimizer with its groups, hyper-parameters and choices, without tensors. */
int run_create_optimizer(struct run *run);
/* One piece of memory for a slot of every tensor; each starts on 64 bytes, and the whole not where the other begins,
 * since equal distances modulo a power of two cost speed. */
int run_allocate(struct run *run, int32_t slot, size_t stagger, unsigned char **memory, void **pointers,
                 uint64_t *bytes);
/* The parts of tensors that this run steps. */
int run_add_tensors(struct run *run);
int run_build(struct run *run);
/* Every option that a checkpoint keeps, by its row and its value as text. Stops at the first non-zero result; -1 when
 * memory is out. */
typedef int run_option_visitor(void *context, const struct option *option, const char *value);
int run_each_option(const struct run_config *config, run_option_visitor *visit, void *context);
/* Where micro-steps are added up along a tree: its buffers, and what takes one gradient. */
int run_tree_open(struct run *run);
int run_tree_take(struct run *run, int tensor, const void *gradient);
float *run_tree_slot(const struct run *run, int slot, int tensor);
void run_tree_close(struct run *run);
void run_dismantle(struct run *run);
/* First weights: random, or those of --init. */
int run_initialize(struct run *run);
/* Takes the directory for this run, and tries what could refuse the results later. */
int run_open_directory(struct run *run);
int run_resume(struct run *run);
int run_open_log(struct run *run);
/* What is worth telling beside what succeeds: on stderr, once, and in the results. */
void run_tell(struct run *run, const char *note);
/* With several processes: the status that all of them go by, and its line. A failure is then known to all. */
int run_agree(struct run *run, int status);
/* Saves, and reads back what was saved. With several processes all of them do. */
int run_save(struct run *run);

/* train_outcome.c. The weights that speak: those stored, or fp32 copies of what the rule holds to be better ones;
 * `copies` is the caller's to free. NULL after an error. With several processes all make these calls. */
const struct lm_weight *run_speaking_weights(struct run *run, void **copies);
/* Of the last steps that are in the history, resumed or not. */
double run_mean_loss(const struct run_history *history);
/* Bytes that all processes have received in this run so far. */
int run_count_traffic(struct run *run);
int run_fill_result(struct run *run);

#endif
