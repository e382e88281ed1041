/* What one update of tensors is made of: constants (prepare), tiles (load, rule, store) and the tasks that walk over chunks. */
#ifndef HSTEP_UPDATE_H
#define HSTEP_UPDATE_H

#include "optimizer.h"

/* Beside the slots of a tensor, fp32 elements of the workspace: the direction of a matrix step. */
enum { HSTEP_SLOT_WORK = HSTEP_SLOTS, HSTEP_WORK_SLOTS };

enum hstep_pass { HSTEP_PASS_UPDATE, HSTEP_PASS_DIRECTION, HSTEP_PASS_CHANGE, HSTEP_PASS_SUMS };

/* What a task carries from unit to unit. */
struct hstep_work {
    const halfstep_optimizer *o;
    const struct hstep_tensor *t;
    const struct hstep_update *u;
    enum hstep_pass pass;
    int format[HSTEP_WORK_SLOTS]; /* of the slots that this pass touches, else HSTEP_FORMAT_NONE */
    char *code[HSTEP_WORK_SLOTS], *extra[HSTEP_WORK_SLOTS]; /* of the whole part held here */
    struct hstep_key stream[HSTEP_SLOTS];
    float mean; /* taken from the scaled gradient */
};

/* Up to a tile of elements in fp32 scratch. */
struct hstep_tile {
    HSTEP_ALIGNED float weight[HSTEP_TILE];
    HSTEP_ALIGNED float gradient[HSTEP_TILE];
    HSTEP_ALIGNED float change[HSTEP_TILE];
    HSTEP_ALIGNED float states[HALFSTEP_MAX_STATES][HSTEP_TILE];
    float *state[HALFSTEP_MAX_STATES];
};

/* Places of one tile in every slot. */
struct hstep_places {
    char *code[HSTEP_WORK_SLOTS], *extra[HSTEP_WORK_SLOTS];
};

/* Room for units of which only a part is held here. */
struct hstep_room {
    HSTEP_ALIGNED char code[HSTEP_WORK_SLOTS][HSTEP_TILE * 4];
    HSTEP_ALIGNED char extra[HSTEP_WORK_SLOTS][HSTEP_TILE * 2];
};

/* A stretch of elements within one unit: the first held here, and what comes before it in the unit. */
struct hstep_part {
    int64_t element;
    uint64_t index; /* of the unit's first element, held or not */
    int lead, count;
};

/* What all tasks of one pass over tensors from `first` on share; updates, weights and gradients count from there. */
struct hstep_batch {
    const halfstep_optimizer *o;
    int first;
    const struct hstep_update *updates;
    void *const *weights; /* NULL in micro-steps */
    const void *const *gradients;
    enum hstep_pass pass;
    int64_t *limbs; /* HSTEP_PASS_SUMS: of all sums from the first of tensor `first` on */
};

/* The task, with the batch as its argument, for every chunk of n tensors. */
void hstep_run_batch(const struct hstep_batch *b, int n, halfstep_task task);
const struct hstep_chunk *hstep_batch_chunk(const struct hstep_batch *b, int64_t i);
const struct hstep_update *hstep_batch_update(const struct hstep_batch *b, int tensor);
struct hstep_work hstep_work_start(const struct hstep_batch *b, int tensor);
/* How far into its unit an element lies. */
int64_t hstep_unit_lead(const struct hstep_tensor *t, int64_t element, uint64_t index);
/* Places in the slots themselves, for whole units. */
void hstep_place(const struct hstep_work *w, int64_t element, struct hstep_places *places);
/* Copies parts of units to the room, which is zero elsewhere, or back. */
void hstep_gather(const struct hstep_work *w, const struct hstep_part *part, int n, struct hstep_room *room,
                  struct hstep_places *places);
/* Weight, effective gradient and states of n elements. */
void hstep_load(const struct hstep_work *w, const struct hstep_places *places, struct hstep_tile *tile, int64_t n);
/* Mean of a row, times what the group takes of it. */
float hstep_centralized(const struct hstep_work *w, int64_t row_start);

/* same: the update of a tensor with the same group and step counts, whose constants are taken over, or NULL; they must not be
 * its own. norms: roots of
 * the tensor's sums, or NULL before they are known. */
int hstep_prepare_update(const halfstep_optimizer *o, int index, double clip, int micro, const double *norms,
                         const struct hstep_update *same, struct hstep_update *u);

/* Updates n tensors from `first` on; updates, weights and gradients count from there. */
void hstep_update_tensors(halfstep_optimizer *o, int first, int n, const struct hstep_update *updates, void *const *weights,
                          const void *const *gradients);
/* Counters, scalars and scales of after an update. */
void hstep_count_update(struct hstep_tensor *t, const struct hstep_update *u);

/* Adds the sums of n tensors from `first` on to limbs, which belong to the first sum of tensor `first`. */
void hstep_sum_tensors(halfstep_optimizer *o, int first, int n, const struct hstep_update *updates, void *const *weights,
                       const void *const *gradients, int64_t *limbs);

/* Elements of a chunk: enough to hide a task's cost, few enough to share among many threads. It divides the segments of
 * the mixer. */
#define HSTEP_CHUNK ((int64_t)32768)

#endif
