/* What the tasks of the host share: a batch over chunks, and tiles: whole units in place, or parts of units in
 * scratch memory. */
#ifndef HSTEP_TILE_H
#define HSTEP_TILE_H

#include "decide/pass.h"
#include "device/host/host.h"
#include "kernels/kernels.h"

/* Up to a tile of elements in fp32 scratch. */
struct hstep_tile {
    HSTEP_ALIGNED float weight[HSTEP_TILE];
    HSTEP_ALIGNED float gradient[HSTEP_TILE];
    HSTEP_ALIGNED float change[HSTEP_TILE];
    HSTEP_ALIGNED float states[HALFSTEP_MAX_STATES][HSTEP_TILE];
    float *state[HALFSTEP_MAX_STATES];
};

/* Places of one tile in every slot. Of a vector over rows or columns it is a copy, one number for each element. */
struct hstep_places {
    char *code[HSTEP_WORK_SLOTS], *extra[HSTEP_WORK_SLOTS];
    HSTEP_ALIGNED float vector[2 * HSTEP_MAX_PAIRS][HSTEP_TILE];
};

/* Units of which only a part is held here. */
struct hstep_scratch {
    HSTEP_ALIGNED char code[HSTEP_WORK_SLOTS][HSTEP_TILE * 4];
    HSTEP_ALIGNED char extra[HSTEP_WORK_SLOTS][HSTEP_TILE * 2];
};

/* A stretch within one unit, and how far into it that begins. */
struct hstep_fragment {
    struct hstep_stretch held;
    int64_t lead;
};

/* What all tasks of one pass over some tensors share: chunks first .. end - 1, the first of which is of task `task`. */
struct hstep_batch {
    const struct hstep_call *call;
    enum hstep_pass pass;
    int64_t first, end, task;
};

/* The chunks of one task, from `first` to before `end`. */
struct hstep_span {
    const struct hstep_chunk *first, *end;
};

/* A pass over n tensors from `first` on: the task is called with the batch as its argument. Each pass goes the other
 * way than the one before it, so that what was read last, which caches still hold, is read again first: scans forwards,
 * sums backwards, updates forwards where there were sums and else backwards. Chunks know nothing of each other: no bit
 * depends on their order. */
void hstep_run_batch(const struct hstep_call *call, enum hstep_pass pass, int first, int n, int backward,
                     halfstep_task task);
/* Of call number i of a task. */
struct hstep_span hstep_task_span(const struct hstep_batch *b, int64_t i);
/* Places in the slots themselves, for whole units. */
void hstep_place(const struct hstep_work *w, int64_t element, struct hstep_places *places);
/* Takes what a stretch has of the unit that it begins in. */
struct hstep_fragment hstep_take_unit(const struct hstep_work *w, struct hstep_stretch *s);
/* Copies fragments of units to scratch memory, which is zero elsewhere; and what a pass has written, back from it. */
void hstep_gather(const struct hstep_work *w, const struct hstep_fragment *part, int n, struct hstep_scratch *scratch,
                  struct hstep_places *places);
void hstep_scatter(const struct hstep_work *w, const struct hstep_fragment *part, int n, struct hstep_scratch *scratch);
/* Weight, effective gradient and states of n elements. */
void hstep_load(const struct hstep_work *w, const struct hstep_places *places, struct hstep_tile *tile, int64_t n);
/* The pass's function of the rule on n elements; out: of its norms or cross. */
void hstep_run_function(const struct hstep_work *w, struct hstep_tile *tile, float *const *out, int64_t n);
/* What is summed of a stretch, up to a tile with what its first unit has before it, in order from x[j][lead] on;
 * returns lead. */
int64_t hstep_values(const struct hstep_work *w, struct hstep_stretch s, float (*x)[HSTEP_TILE]);
/* What fused steps of the tensor have in common; their words are still to be said. */
struct hstep_fused hstep_fused_start(const struct hstep_work *w);
/* The place of a stretch in it. */
void hstep_fused_place(const struct hstep_work *w, const struct hstep_stretch *s, struct hstep_fused *f);
/* Random words of n elements, a multiple of 32, from element `index`, a multiple of 32. generator: its row. */
void hstep_fill_words(const struct hstep_kernels *kernels, int generator, const struct hstep_key *stream,
                      uint64_t index, uint32_t *words, int64_t n);
/* Of statistics.c: mean of a row of the raw gradient, times what the group takes of it. */
float hstep_centralized(const struct hstep_work *w, int64_t row_start);

#endif
