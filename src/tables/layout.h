/* Grains, tracks, chunks and offsets: where the elements of a tensor lie. Integers only. Devices compile layout.c
 * too. */
#ifndef HSTEP_LAYOUT_H
#define HSTEP_LAYOUT_H

#include "tables/tensor.h"

/* Fills in a tensor's tracks, index space, grain, kind and sums. Its slots and `cautious` must be set. */
void hstep_lay_out(struct hstep_tensor *t);
/* Returns the number of chunks of a laid out tensor. Writes them to `out` if that is not NULL, with tensor number
 * `index`. */
int64_t hstep_cut_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out);
/* Completes a description: a tensor of at most one dimension has rows of length 1 where none is given. */
HSTEP_INLINE void hstep_complete(halfstep_tensor *description)
{
    if (description->ndim <= 1 && !description->row_length) description->row_length = 1;
}
/* Takes the rows of matrices from a description, for a tensor whose rule is set. Returns NULL, or the name of the field
 * that is not valid. */
const char *hstep_divide(struct hstep_tensor *t, const halfstep_tensor *description);
/* Returns a number of rows that divides the rows of each matrix. */
int64_t hstep_common_rows(const struct hstep_tensor *t);
/* Returns the rows of the largest matrix of the whole tensor. */
int64_t hstep_most_rows(const struct hstep_tensor *t);
/* Changes *rows and *columns of the part held here to those of a state with that extent. */
void hstep_extend(const struct hstep_tensor *t, int extent, int64_t *rows, int64_t *columns);

/* Returns the number of the matrix that a row of the whole tensor lies in. */
HSTEP_INLINE int64_t hstep_matrix_in_whole(const struct hstep_tensor *t, int64_t row)
{
    const int64_t rest = row % t->pattern_rows;
    int block = 0;
    while (rest >= t->block_end[block]) block++;
    return row / t->pattern_rows * t->blocks + block;
}

/* The following functions count matrices and rows from the first held here. hstep_matrix_start() also takes the number
 * after the last matrix. Matrices of equal rows need fewer divisions. */
HSTEP_INLINE int64_t hstep_matrix_of(const struct hstep_tensor *t, int64_t row)
{
    if (t->matrices < 2) return 0;
    if (t->blocks < 2) return row / t->pattern_rows;
    return hstep_matrix_in_whole(t, t->first_row + row) - t->first_matrix;
}

HSTEP_INLINE int64_t hstep_matrix_start(const struct hstep_tensor *t, int64_t matrix)
{
    if (t->blocks < 2) return matrix * t->pattern_rows;
    const int64_t number = t->first_matrix + matrix, block = number % t->blocks;
    return number / t->blocks * t->pattern_rows + (block ? t->block_end[block - 1] : 0) - t->first_row;
}

HSTEP_INLINE int64_t hstep_matrix_rows(const struct hstep_tensor *t, int64_t matrix)
{
    if (t->blocks < 2) return t->pattern_rows;
    const int64_t block = (t->first_matrix + matrix) % t->blocks;
    return t->block_end[block] - (block ? t->block_end[block - 1] : 0);
}

/* Returns the first chunk that begins with an element or a later one, or the end of the tensor's chunks. */
HSTEP_INLINE int64_t hstep_chunk_from(const struct hstep_tensor *t, const struct hstep_chunk *chunks, int64_t element)
{
    int64_t low = t->first_chunk, high = low + t->chunks;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (chunks[middle].track * t->track_length + chunks[middle].offset < element) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* Returns the first chunk of a matrix, or the end of the tensor's chunks for the number after the last matrix. Every
 * matrix begins with a chunk of its own. */
HSTEP_INLINE int64_t hstep_matrix_chunk(const struct hstep_tensor *t, const struct hstep_chunk *chunks, int64_t matrix)
{
    return hstep_chunk_from(t, chunks, hstep_matrix_start(t, matrix) * t->row_length);
}

/* Joins n chunks to tasks and returns the number of tasks. `tasks` has room for n + 1 numbers. It receives the first
 * chunk of each task, then n. */
int64_t hstep_join_chunks(struct hstep_chunk *chunks, int64_t n, int64_t *tasks);

int64_t hstep_blocks_per_row(const struct hstep_tensor *t, int format);
/* Returns the number of elements that are worked on as a whole: a cell of 32, or a block if that is longer. */
int hstep_grain_of(int format);
/* Returns the bytes from the start of a plane to an element held here. For block formats, it must be a block's
 * first. */
int64_t hstep_code_offset(const struct hstep_tensor *t, int format, int64_t element);
int64_t hstep_extra_offset(const struct hstep_tensor *t, int format, int64_t element);

/* Tells whether an optimizer keeps the codes of a slot, or with `extra` its extra plane. It keeps neither the codes of
 * the weight nor the gradient, which are the caller's. */
HSTEP_INLINE int hstep_keeps(const struct hstep_tensor *t, int slot, int extra)
{
    const struct hstep_slot *s = &t->slot[slot];
    return extra ? slot != HALFSTEP_SLOT_GRADIENT && s->extra_bytes : slot >= HALFSTEP_SLOT_STATE && s->code_bytes;
}

/* A plane that an optimizer keeps: the codes of a slot or its extra plane. */
struct hstep_cursor {
    int slot, extra;
    char **place; /* where the slot has its address; only for callers that may change the tensor */
    uint64_t bytes;
};

/* Moves to the next plane that an optimizer keeps for a tensor. The first call takes a zeroed cursor. The extra plane
 * of the weight comes first, then codes and extra plane of each state. Returns 0 if none is left. */
HSTEP_INLINE int hstep_next_plane(const struct hstep_tensor *t, struct hstep_cursor *c)
{
    do {
        c->slot += c->extra;
        c->extra = !c->extra;
        if (c->slot == HSTEP_SLOTS) return 0;
    } while (!hstep_keeps(t, c->slot, c->extra));
    struct hstep_slot *s = (struct hstep_slot *)(uintptr_t)&t->slot[c->slot];
    c->place = c->extra ? &s->extra : &s->code;
    c->bytes = c->extra ? s->extra_bytes : s->code_bytes;
    return 1;
}

/* Returns the number of an element held here in the whole tensor, counted row by row. */
uint64_t hstep_number_of(const struct hstep_tensor *t, int64_t element);
/* Returns how far into its grain an element lies. */
int64_t hstep_grain_lead(const struct hstep_tensor *t, int64_t element, uint64_t index);

/* Elements that are consecutive in memory and in index space. */
struct hstep_stretch {
    int64_t element;
    uint64_t index;
    int64_t n;
};

/* Returns the part of a track that a chunk holds. */
HSTEP_INLINE struct hstep_stretch hstep_stretch_of(const struct hstep_tensor *t, const struct hstep_chunk *c,
                                                   int64_t track)
{
    const struct hstep_stretch s = {track * t->track_length + c->offset,
                                    t->index0 + (uint64_t)(track * t->index_stride) + (uint64_t)c->offset, c->length};
    return s;
}

/* Takes up to n elements from the front of a stretch. */
HSTEP_INLINE struct hstep_stretch hstep_take(struct hstep_stretch *s, int64_t n)
{
    struct hstep_stretch first = *s;
    if (first.n > n) first.n = n;
    s->element += first.n;
    s->index += (uint64_t)first.n;
    s->n -= first.n;
    return first;
}

/* Returns a row of a tensor that is held whole. */
struct hstep_stretch hstep_row_of(const struct hstep_tensor *t, int64_t row);
/* Returns true if elements are added to sums one by one, and exactly. Rows too short for chunks are summed so, which
 * makes every cut of them equal. Others are summed in tiles of at most 256 columns, from multiples of 256 on. */
HSTEP_INLINE int hstep_is_summed_singly(const struct hstep_tensor *t) { return t->index_stride < HSTEP_CELL; }
/* Returns the part of a track that is summed with a chunk: the tiles of columns whose first element the chunk holds. */
struct hstep_stretch hstep_summed_of(const struct hstep_tensor *t, const struct hstep_chunk *c, int64_t track);
/* Takes the elements that are summed at once: within one tile of columns, and with by_rows within one row. */
HSTEP_INLINE struct hstep_stretch hstep_take_summed(const struct hstep_tensor *t, struct hstep_stretch *s, int by_rows)
{
    const int64_t row = t->index_stride;
    int64_t n = HSTEP_TILE;
    if (hstep_is_summed_singly(t)) {
        n -= hstep_grain_lead(t, s->element, s->index);
    } else {
        const int64_t column = (int64_t)(s->index % (uint64_t)row);
        n -= column % HSTEP_TILE;
        if (n > row - column) n = row - column;
    }
    if (by_rows && n > t->n_columns - s->element % t->n_columns) n = t->n_columns - s->element % t->n_columns;
    return hstep_take(s, n);
}

/* A portion of up to a tile of elements, which begins at the start of a block. The first `skip` elements were not asked
 * for. */
struct hstep_portion {
    int64_t element;
    int n, skip;
};

/* Finds the next portion before element `end`. The first call takes a zeroed *p. For blocks of rows, portions go along
 * each row, otherwise straight through memory. Returns 0 if none is left. */
int hstep_next_portion(const struct hstep_tensor *t, int format, int64_t first, int64_t end, struct hstep_portion *p);

#endif
