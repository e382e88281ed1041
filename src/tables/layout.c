/* Computes where the elements of a tensor lie. No function here reads an element. */
#include "tables/layout.h"

int hstep_grain_of(int format)
{
    const struct hstep_format *f = &hstep_formats[format];
    return f->geometry != HALFSTEP_GEOMETRY_TENSOR && f->block > HSTEP_CELL ? f->block : HSTEP_CELL;
}

int64_t hstep_blocks_per_row(const struct hstep_tensor *t, int format)
{
    if (format < 0 || !hstep_is_by_row(format)) return 0;
    return (t->n_columns + hstep_formats[format].block - 1) / hstep_formats[format].block;
}

/* Returns the number of the block of an element, for a format with blocks of rows. */
static int64_t block_number(const struct hstep_tensor *t, const struct hstep_format *f, int64_t element)
{
    const int64_t row = element / t->n_columns, column = element % t->n_columns;
    return row * ((t->n_columns + f->block - 1) / f->block) + column / f->block;
}

int64_t hstep_code_offset(const struct hstep_tensor *t, int format, int64_t element)
{
    const struct hstep_format *f = &hstep_formats[format];
    const int packed = f->geometry == HALFSTEP_GEOMETRY_PACKED;
    if ((f->code_bits >= 8 && !packed) || f->geometry == HALFSTEP_GEOMETRY_FLAT) return element * f->code_bits / 8;
    if (packed) return block_number(t, f, element) * hstep_packed_bytes(f);
    int64_t row = element / t->n_columns, column = element % t->n_columns;
    return row * ((t->n_columns * f->code_bits + 7) / 8) + column * f->code_bits / 8;
}

int64_t hstep_extra_offset(const struct hstep_tensor *t, int format, int64_t element)
{
    const struct hstep_format *f = &hstep_formats[format];
    if (!f->block) return element * f->extra_bits / 8;
    if (f->geometry == HALFSTEP_GEOMETRY_TENSOR) return 0;
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT) return element / f->block * f->scale_bits / 8;
    const int64_t number = block_number(t, f, element);
    return number * (f->geometry == HALFSTEP_GEOMETRY_PACKED ? f->block * f->extra_bits : f->scale_bits) / 8;
}

uint64_t hstep_number_of(const struct hstep_tensor *t, int64_t element)
{
    int64_t row = t->first_row + element / t->n_columns, column = t->first_column + element % t->n_columns;
    return (uint64_t)(row * t->row_length + column);
}

const char *hstep_divide(struct hstep_tensor *t, const halfstep_tensor *d)
{
    const int64_t rows = d->matrix_rows ? d->matrix_rows : d->rows;
    int64_t sum = 0;
    int n = 0;
    if (rows < 0 || (rows && d->rows % rows)) return "matrix_rows";
    for (; n < HALFSTEP_MAX_SPLIT && d->split[n]; n++) {
        if (d->split[n] < 2 || d->split[n] > rows - sum) return "split";
        sum += d->split[n];
    }
    for (int i = n; i < HALFSTEP_MAX_SPLIT; i++)
        if (d->split[i]) return "split";
    if (n && sum != rows) return "split";
    const int matrices = hstep_has_matrices(t->rule);
    t->pattern_rows = t->block_end[0] = matrices ? rows : d->rows;
    t->blocks = matrices && n ? n : 1;
    for (int i = 0; i < t->blocks && t->blocks > 1; i++) t->block_end[i] = d->split[i] + (i ? t->block_end[i - 1] : 0);
    return NULL;
}

int64_t hstep_common_rows(const struct hstep_tensor *t)
{
    int64_t common = t->pattern_rows;
    for (int i = 0; i < t->blocks; i++)
        for (int64_t rest = t->block_end[i], next; rest; rest = next) {
            next = common % rest;
            common = rest;
        }
    return common;
}

int64_t hstep_most_rows(const struct hstep_tensor *t)
{
    int64_t most = 0;
    for (int i = 0; i < t->blocks; i++) {
        const int64_t rows = t->block_end[i] - (i ? t->block_end[i - 1] : 0);
        if (rows > most) most = rows;
    }
    return most;
}

void hstep_extend(const struct hstep_tensor *t, int extent, int64_t *rows, int64_t *columns)
{
    if (extent == HALFSTEP_EXTENT_ROWS) *columns = 1;
    if (extent == HALFSTEP_EXTENT_COLUMNS)
        *rows = hstep_matrix_in_whole(t, t->first_row + t->n_rows) - hstep_matrix_in_whole(t, t->first_row);
}

/* Returns 1 for an optional vector, which the functions of the rule do not get. */
static int is_kept(int rule, int state)
{
    const struct hstep_state *s = &hstep_rules[rule].state[state];
    return s->unless && s->extent != HALFSTEP_EXTENT_ELEMENTS;
}

void hstep_lay_out(struct hstep_tensor *t)
{
    int64_t stride = hstep_row_stride(t->row_length), rows = t->n_rows, columns = t->n_columns;
    t->grain = HSTEP_CELL;
    int flat = 0;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) {
        if (t->slot[s].format < 0) continue;
        int grain = hstep_grain_of(t->slot[s].format);
        if (grain > t->grain) t->grain = grain;
        flat |= hstep_formats[t->slot[s].format].geometry == HALFSTEP_GEOMETRY_FLAT;
    }
    t->index0 = (uint64_t)t->first_row * (uint64_t)stride + (uint64_t)t->first_column;
    t->index_stride = stride;
    /* Rows that are consecutive in index space and contiguous in memory form one track. */
    t->dense = columns == stride && (t->grain == HSTEP_CELL || t->row_length % t->grain == 0);
    if (flat) {
        t->dense = 1;
        t->index0 = (uint64_t)t->first_row * (uint64_t)t->row_length;
        t->index_stride = hstep_row_stride(t->rows * t->row_length);
    }
    t->tracks = t->dense ? 1 : rows;
    t->track_length = t->dense ? rows * columns : columns;
    if (!rows || !columns) t->tracks = t->track_length = 0;
    t->matrix = hstep_is_matrix(t->rule, t->ndim, t->pattern_rows, t->row_length);
    /* Loops over slots do not see an optional vector that is not stored. C has no empty arrays, so kernels of a rule
     * without states get a list of one empty state. */
    int states = hstep_rule_states(t->rule);
    if (states && is_kept(t->rule, states - 1) && t->slot[HALFSTEP_SLOT_STATE + states - 1].format < 0) states--;
    t->slots = HALFSTEP_SLOT_STATE + (states > 0 ? states : 1);
    t->pairs = hstep_pairs(t->rule, t->ndim, t->pattern_rows, t->row_length);
    t->matrices = 1;
    t->first_matrix = 0;
    if (t->matrix || t->pairs) {
        t->first_matrix = hstep_matrix_in_whole(t, t->first_row);
        t->matrices = hstep_matrix_in_whole(t, t->first_row + rows) - t->first_matrix;
    }
    t->sums = hstep_sum_of_state(t, HSTEP_SLOTS) + t->cautious;
}

/* Cuts elements from .. to - 1 of each of n_tracks tracks. Writes the chunks to out, if that is not NULL. */
static int64_t cut_tracks(const struct hstep_tensor *t, int index, int64_t first_track, int64_t n_tracks, int64_t from,
                          int64_t to, struct hstep_chunk *out)
{
    int64_t n = 0, length = to - from;
    if (length < HSTEP_CHUNK) {
        int64_t per_chunk = HSTEP_CHUNK / length;
        for (int64_t track = 0; track < n_tracks; track += per_chunk, n++)
            if (out)
                out[n] = (struct hstep_chunk){index,
                                              first_track + track,
                                              n_tracks - track < per_chunk ? n_tracks - track : per_chunk,
                                              from,
                                              length,
                                              0};
        return n;
    }
    for (int64_t track = first_track; track < first_track + n_tracks; track++) {
        /* Cuts at multiples of a chunk. If grains start at multiples in index space, cuts lie there too. This also
         * keeps a chunk within one segment of random words. Otherwise cuts lie in columns. */
        uint64_t first = t->dense || t->grain == HSTEP_CELL ? t->index0 + (uint64_t)(track * t->index_stride)
                                                            : (uint64_t)t->first_column;
        int64_t start = (int64_t)(first % (uint64_t)HSTEP_CHUNK);
        for (int64_t offset = from; offset < to; n++) {
            int64_t some = HSTEP_CHUNK - (start + offset) % HSTEP_CHUNK;
            if (some > to - offset) some = to - offset;
            if (out) out[n] = (struct hstep_chunk){index, track, 1, offset, some, 0};
            offset += some;
        }
    }
    return n;
}

int64_t hstep_cut_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out)
{
    int64_t n = 0;
    if (!t->tracks) return 0;
    if (!t->matrix && !t->piece_rows) return cut_tracks(t, index, 0, t->tracks, 0, t->track_length, out);
    /* Matrices and pieces begin with chunks of their own. */
    for (int64_t i = 0, start = 0, rows; start < t->n_rows; i++, start += rows) {
        rows = t->matrix ? hstep_matrix_rows(t, i) : t->piece_rows;
        if (rows > t->n_rows - start) rows = t->n_rows - start;
        const int64_t from = start * t->n_columns;
        struct hstep_chunk *place = out ? out + n : NULL;
        n += t->dense ? cut_tracks(t, index, 0, 1, from, from + rows * t->n_columns, place)
                      : cut_tracks(t, index, start, rows, 0, t->track_length, place);
    }
    return n;
}

int64_t hstep_join_chunks(struct hstep_chunk *chunks, int64_t n, int64_t *tasks)
{
    int64_t left = 0, count = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t cost = chunks[i].tracks * chunks[i].length + HSTEP_CHUNK_COST;
        if (cost > left) {
            tasks[count++] = i;
            left = HSTEP_CHUNK;
        }
        left -= cost;
        chunks[i].task = count - 1;
    }
    tasks[count] = n;
    return count;
}

int64_t hstep_grain_lead(const struct hstep_tensor *t, int64_t element, uint64_t index)
{
    if (t->grain == HSTEP_CELL) return (int64_t)(index % HSTEP_CELL);
    if (t->dense) return (int64_t)(index % (uint64_t)t->grain);
    return (t->first_column + element % t->n_columns) % t->grain;
}

struct hstep_stretch hstep_row_of(const struct hstep_tensor *t, int64_t row)
{
    const int64_t element = row * t->row_length, from = t->dense ? element : row * t->index_stride;
    return (struct hstep_stretch){element, t->index0 + (uint64_t)from, t->row_length};
}

/* A tile of columns is read as a whole, even beyond the end of the chunk that holds its first element. */
struct hstep_stretch hstep_summed_of(const struct hstep_tensor *t, const struct hstep_chunk *c, int64_t track)
{
    const uint64_t start = t->index0 + (uint64_t)(track * t->index_stride);
    int64_t row = t->index_stride, ends[2] = {c->offset, c->offset + c->length};
    for (int i = 0; i < 2; i++) {
        if (hstep_is_summed_singly(t) || ends[i] == 0 || ends[i] == t->track_length) continue;
        int64_t column = (int64_t)((start + (uint64_t)ends[i]) % (uint64_t)row), over = column % HSTEP_TILE;
        if (!over) continue;
        int64_t up = HSTEP_TILE - over;
        if (up > row - column) up = row - column;
        ends[i] += up < t->track_length - ends[i] ? up : t->track_length - ends[i];
    }
    return (struct hstep_stretch){track * t->track_length + ends[0], start + (uint64_t)ends[0], ends[1] - ends[0]};
}

int hstep_next_portion(const struct hstep_tensor *t, int format, int64_t first, int64_t end, struct hstep_portion *p)
{
    const struct hstep_format *f = &hstep_formats[format];
    p->element = p->n ? p->element + p->n : first;
    p->skip = 0;
    if (p->element >= end) return 0;
    int64_t n = end - p->element;
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT) {
        p->skip = (int)(p->element % f->block);
        p->element -= p->skip;
        n += p->skip;
    } else if (f->block && n > t->n_columns - p->element % t->n_columns) {
        n = t->n_columns - p->element % t->n_columns;
    }
    p->n = n > HSTEP_TILE ? HSTEP_TILE : (int)n;
    return 1;
}
