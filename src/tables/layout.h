/* Where the elements of a tensor lie: units, runs, chunks and offsets. Integers only; devices compile layout.c too. */
#ifndef HSTEP_LAYOUT_H
#define HSTEP_LAYOUT_H

#include "tables/tensor.h"

/* Runs, index space, unit, kind and sums of a tensor whose slots are chosen, and of which it is known whether its group
 * is cautious. */
void hstep_lay_out(struct hstep_tensor *t);
/* How many chunks a laid out tensor has, with `index` as its number; written where out is not NULL. */
int64_t hstep_cut_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out);
/* Makes tasks of chunks: how many. tasks: for n + 1 numbers, the first chunk of each and at the end n. */
int64_t hstep_join_chunks(struct hstep_chunk *chunks, int64_t n, int64_t *tasks);

int64_t hstep_blocks_per_row(const struct hstep_tensor *t, int format);
/* What is worked on as a whole: groups of 32 elements, or blocks where they are longer. */
int hstep_unit_of(int format);
/* Bytes from the start of a stream to an element held here; for block formats, the first of a block. */
int64_t hstep_code_offset(const struct hstep_tensor *t, int format, int64_t element);
int64_t hstep_extra_offset(const struct hstep_tensor *t, int format, int64_t element);

/* The number that an element held here has in the whole tensor, row by row. */
uint64_t hstep_number_of(const struct hstep_tensor *t, int64_t element);
/* How far into its unit an element lies. */
int64_t hstep_unit_lead(const struct hstep_tensor *t, int64_t element, uint64_t index);

/* Elements that follow each other in memory and in index space. */
struct hstep_stretch {
    int64_t element;
    uint64_t index;
    int64_t n;
};

/* What a chunk has of a run. */
HSTEP_INLINE struct hstep_stretch hstep_stretch_of(const struct hstep_tensor *t, const struct hstep_chunk *c,
                                                   int64_t run)
{
    const struct hstep_stretch s = {run * t->run_length + c->offset,
                                    t->index0 + (uint64_t)(run * t->index_stride) + (uint64_t)c->offset, c->length};
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

/* A row of a tensor that is held whole. */
struct hstep_stretch hstep_row_of(const struct hstep_tensor *t, int64_t row);
/* Whether elements are added to sums one by one, and exactly: in rows too short for chunks, so that no cut of them
 * matters. Others are summed in chunks of at most 256 columns, from multiples of 256 on. */
HSTEP_INLINE int hstep_is_summed_singly(const struct hstep_tensor *t) { return t->index_stride < HSTEP_GROUP; }
/* What is summed of a run with a chunk: the chunks of columns whose first element it holds. */
struct hstep_stretch hstep_summed_of(const struct hstep_tensor *t, const struct hstep_chunk *c, int64_t run);
/* Takes what is summed at once: of one chunk of columns; by_rows: and of one row. */
HSTEP_INLINE struct hstep_stretch hstep_take_summed(const struct hstep_tensor *t, struct hstep_stretch *s, int by_rows)
{
    const int64_t row = t->index_stride;
    int64_t n = HSTEP_TILE;
    if (hstep_is_summed_singly(t)) {
        n -= hstep_unit_lead(t, s->element, s->index);
    } else {
        const int64_t column = (int64_t)(s->index % (uint64_t)row);
        n -= column % HSTEP_TILE;
        if (n > row - column) n = row - column;
    }
    if (by_rows && n > t->n_columns - s->element % t->n_columns) n = t->n_columns - s->element % t->n_columns;
    return hstep_take(s, n);
}

/* A piece of up to a tile of elements, which begins where a block does: its elements, and how many of the first are not
 * asked for. */
struct hstep_piece {
    int64_t element;
    int n, skip;
};

/* The next piece before element `end`, from a zeroed one: along each row for blocks of rows, else straight through
 * memory. 0: none is left. */
int hstep_next_piece(const struct hstep_tensor *t, int format, int64_t first, int64_t end, struct hstep_piece *p);

#endif
