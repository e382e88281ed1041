/* What the host's tasks share: slates over chunks, and tiles. A tile is whole grains in place, or partial grains in
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

/* Addresses of one tile in every slot. For a vector over rows or columns it is a copy, with one number for each
 * element. */
struct hstep_places {
    char *code[HSTEP_WORK_SLOTS], *extra[HSTEP_WORK_SLOTS];
    HSTEP_ALIGNED float vector[2 * HSTEP_MAX_PAIRS][HSTEP_TILE];
};

/* Scratch memory for grains of which only a part is held here. */
struct hstep_scratch {
    HSTEP_ALIGNED char code[HSTEP_WORK_SLOTS][HSTEP_TILE * 4];
    HSTEP_ALIGNED char extra[HSTEP_WORK_SLOTS][HSTEP_TILE * 2];
};

/* A stretch within one grain. lead: how far into the grain it begins. */
struct hstep_fragment {
    struct hstep_stretch held;
    int64_t lead;
};

/* What all tasks of one pass over some tensors share: chunks first .. end - 1. `task` is the task of the first
 * chunk. */
struct hstep_slate {
    const struct hstep_call *call;
    enum hstep_pass pass;
    int64_t first, end, task;
};

/* The chunks of one task, from `first` to before `end`. */
struct hstep_span {
    const struct hstep_chunk *first, *end;
};

/* Makes a pass over n tensors from `first` on. Calls the task with the slate as its argument. Each pass goes in the
 * opposite direction of the pass before it, because caches hold what was read last. Scans go forwards and sums
 * backwards. Updates go forwards after sums, otherwise backwards. No bit depends on the order of chunks, because they
 * are independent. */
void hstep_run_slate(const struct hstep_call *call, enum hstep_pass pass, int first, int n, int backward,
                     halfstep_task task);
/* Returns the chunks of call number i of a task. */
struct hstep_span hstep_task_span(const struct hstep_slate *b, int64_t i);
/* Some bytes of a plane. */
struct hstep_bytes {
    int64_t first, n;
};
/* Returns the bytes of a slot's codes, or of its extra plane, that belong to a chunk: up to those of the next chunk,
 * or to the end. */
struct hstep_bytes hstep_chunk_bytes(const struct hstep_tensor *t, const struct hstep_chunk *c, int slot, int extra);
/* Sets the addresses of whole grains in the slots themselves. */
void hstep_place(const struct hstep_work *w, int64_t element, struct hstep_places *places);
/* Takes the part of a stretch that lies in its first grain. */
struct hstep_fragment hstep_take_grain(const struct hstep_work *w, struct hstep_stretch *s);
/* hstep_gather() copies fragments of grains to scratch memory and sets the rest of it to zero. hstep_scatter() copies
 * what a pass has written back to the slots. */
void hstep_gather(const struct hstep_work *w, const struct hstep_fragment *part, int n, struct hstep_scratch *scratch,
                  struct hstep_places *places);
void hstep_scatter(const struct hstep_work *w, const struct hstep_fragment *part, int n, struct hstep_scratch *scratch);
/* Decodes the weight, the effective gradient and the states of n elements. */
void hstep_load(const struct hstep_work *w, const struct hstep_places *places, struct hstep_tile *tile, int64_t n);
/* Runs the pass's function of the rule on n elements. `out` receives the values of norms or cross. */
void hstep_run_function(const struct hstep_work *w, struct hstep_tile *tile, float *const *out, int64_t n);
/* Computes the values that are summed over a stretch, in order from x[j][lead] on. Returns lead, how far into its first
 * grain the stretch begins. The stretch and the lead must fit a tile. */
int64_t hstep_values(const struct hstep_work *w, struct hstep_stretch s, float (*x)[HSTEP_TILE]);
/* Returns the arguments that fused steps of the tensor have in common. The caller adds their random words. */
struct hstep_fused hstep_fused_start(const struct hstep_work *w);
/* Sets the addresses of a stretch in the arguments. */
void hstep_fused_place(const struct hstep_work *w, const struct hstep_stretch *s, struct hstep_fused *f);
/* Writes the random words of n elements from element `index` on, both multiples of 32. generator: its row. */
void hstep_fill_words(const struct hstep_kernels *kernels, int generator, const struct hstep_key *strand,
                      uint64_t index, uint32_t *words, int64_t n);
/* Returns the sum of the squares of n fp32 numbers, at most 256, as all sums of squares add a chunk (docs/numerics.md
 * 4). */
double hstep_chunk_squares(const struct hstep_kernels *kernels, const float *x, int64_t n);
/* Returns the mean of a row of the raw gradient, times u->centralize. row_start: its first element. In statistics.c. */
float hstep_centralized(const struct hstep_work *w, int64_t row_start);

#endif
