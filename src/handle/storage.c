/* States in storage. A walk brings pieces into memory, has the step work on them there, and writes them back. While a
 * piece is in memory, the slots of its tensor have addresses such that offsets in the whole tensor lead into the piece.
 * Over 500 lines because pieces, their memory and the walk have one set of invariants. */
#include <stdlib.h>

#include "base/lock.h"
#include "base/structs.h"
#include "handle/optimizer.h"
#include "tables/layout.h"

enum { PAGE = 4096, BUFFERS = 3 };
#define DEFAULT_PIECE_BYTES ((uint64_t)16 << 20)

struct piece {
    int tensor;
    int resident; /* 1: stays at `place` */
    int loaded;   /* 1: the memory of a resident piece holds its value */
    int64_t first_row, n_rows, first_chunk, end_chunk, round;
    uint64_t state_bytes, weight_bytes;
    char *place;
};

/* Pieces that follow one another and are worked on together. All pieces of a tensor that is not cut are in one round.
 * Those of a tensor that is cut, and a tensor with pairs of vectors, have rounds of their own. */
struct round {
    int64_t first, end;
    uint64_t bytes; /* of the pieces with their padding */
};

struct hstep_storage {
    halfstep_storage table;
    struct piece *pieces;
    struct round *rounds;
    int64_t *first_piece; /* of each tensor, and the end */
    int64_t n_pieces, n_rounds;
    void *memory;
    char *buffer[BUFFERS];
    int64_t held; /* the piece that functions about slots have in memory, or -1 */
    int dirty;    /* 1: they have changed it */
    atomic_int broken;
    atomic_flag lock;
    /* Counters as they were before a step: */
    struct hstep_tensor *tensors;
    struct hstep_group *groups;
    double gradient_norm, round_norm;
    uint_least64_t skipped;
};

/* ---- Pieces ---- */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t padded(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

/* Tells whether the codes of a slot, or its extra stream, are among the streams of a piece. */
static int has_stream(const struct hstep_slot *slot, int s, int extra)
{
    return extra ? s != HALFSTEP_SLOT_GRADIENT && slot->extra_bytes : s >= HALFSTEP_SLOT_STATE && slot->code_bytes;
}

/* Returns the number of an element's row, or of the first row of a piece, as elements. */
static int64_t start_of(const struct hstep_tensor *t, int64_t first_row) { return first_row * t->n_columns; }

halfstep_piece hstep_describe(const struct hstep_tensor *t, int tensor, int64_t first_row, int64_t n_rows, int weights)
{
    halfstep_piece p = {.tensor = tensor, .first_row = first_row, .n_rows = n_rows};
    const int whole = n_rows == t->n_rows;
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (has_stream(slot, s, 0)) {
            p.slot[s].code_offset = p.state_bytes;
            p.slot[s].code_bytes = whole ? slot->code_bytes : hstep_code_bytes(slot->format, n_rows, t->n_columns);
            p.state_bytes += padded(p.slot[s].code_bytes, 64);
        }
        if (has_stream(slot, s, 1)) {
            p.slot[s].extra_offset = p.state_bytes;
            p.slot[s].extra_bytes = whole ? slot->extra_bytes : hstep_extra_bytes(slot->format, n_rows, t->n_columns);
            p.state_bytes += padded(p.slot[s].extra_bytes, 64);
        }
    }
    const struct hstep_slot *weight = &t->slot[HALFSTEP_SLOT_WEIGHT];
    if (weights) p.weight_bytes = whole ? weight->code_bytes : hstep_code_bytes(weight->format, n_rows, t->n_columns);
    return p;
}

/* Returns how many rows, at least, end on a multiple of n elements. */
static int64_t rows_of_multiple(const struct hstep_tensor *t, int64_t n)
{
    int64_t a = n, b = t->n_columns;
    while (b) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return n / a;
}

/* States in blocks of the flattened tensor are cut where a block begins, and with sums where a tile of the sum begins
 * (hstep_summed_of()). Cuts at tiles also spare partial units, so they are preferred anyway. */
int64_t hstep_piece_rows(const struct hstep_tensor *t, uint64_t piece_bytes)
{
    const int64_t tile = rows_of_multiple(t, HSTEP_TILE);
    int64_t unit = 1;
    uint64_t bytes = 0;
    if (!piece_bytes) piece_bytes = DEFAULT_PIECE_BYTES;
    if (t->matrix || t->pairs || t->n_rows < 2 || !t->n_columns) return 0;
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (has_stream(slot, s, 0)) bytes += slot->code_bytes;
        if (has_stream(slot, s, 1)) bytes += slot->extra_bytes;
        if (slot->format < 0 || s < HALFSTEP_SLOT_STATE) continue;
        if (slot->extent != HALFSTEP_EXTENT_ELEMENTS || hstep_has_one_scale(slot->format)) return 0;
        if (hstep_formats[slot->format].geometry == HALFSTEP_GEOMETRY_FLAT && hstep_formats[slot->format].block) {
            const int64_t elements = t->sums ? HSTEP_TILE : t->unit;
            if (start_of(t, t->first_row) % elements) return 0;
            unit = rows_of_multiple(t, elements);
        }
    }
    if (bytes <= piece_bytes) return 0;
    const uint64_t row = (bytes + (uint64_t)t->n_rows - 1) / (uint64_t)t->n_rows;
    int64_t rows = (int64_t)(piece_bytes / row);
    if (rows >= tile) unit = tile;
    rows = rows < unit ? unit : rows / unit * unit;
    return rows < t->n_rows ? rows : 0;
}

struct hstep_tensor hstep_laid_out(const halfstep_optimizer *o, int tensor)
{
    struct hstep_tensor t = o->tensors[tensor];
    if (o->settled) return t;
    t.cautious = o->groups[t.group].hyper[HSTEP_CAUTIOUS] != 0.0;
    hstep_lay_out(&t);
    return t;
}

int64_t hstep_count_pieces(const struct hstep_tensor *t, int64_t rows)
{
    return rows ? (t->n_rows + rows - 1) / rows : 1;
}

int64_t halfstep_piece_count(const halfstep_optimizer *o)
{
    int64_t n = 0;
    if (!o) return 0;
    if (o->storage) return o->storage->n_pieces;
    for (int i = 0; i < o->n_tensors; i++) {
        const struct hstep_tensor t = hstep_laid_out(o, i);
        n += hstep_count_pieces(&t, hstep_piece_rows(&t, 0));
    }
    return n;
}

static halfstep_piece describe_bound(const halfstep_optimizer *o, int64_t number)
{
    const struct piece *p = &o->storage->pieces[number];
    return hstep_describe(&o->tensors[p->tensor], p->tensor, p->first_row, p->n_rows, o->storage->table.weights);
}

int halfstep_get_piece(const halfstep_optimizer *o, int64_t number, halfstep_piece *info)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, info);
    const int64_t count = halfstep_piece_count(o);
    if (number < 0 || number >= count)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "no piece %lld; there are %lld", (long long)number,
                          (long long)count);
    halfstep_piece p = {0};
    if (o->storage) p = describe_bound(o, number);
    for (int i = 0; i < o->n_tensors && !o->storage; i++) {
        const struct hstep_tensor t = hstep_laid_out(o, i);
        const int64_t rows = hstep_piece_rows(&t, 0), n = hstep_count_pieces(&t, rows), first = number * rows;
        if (number < n) {
            p = hstep_describe(&t, i, first, rows && rows < t.n_rows - first ? rows : t.n_rows - first, 1);
            break;
        }
        number -= n;
    }
    return hstep_give_struct(info, &p, sizeof p) ? HALFSTEP_OK : hstep_fail_struct(o, __func__, info);
}

uint64_t hstep_piece_space(uint64_t bytes) { return padded(bytes, PAGE); }

static uint64_t space_of(const struct piece *p) { return hstep_piece_space(p->state_bytes + p->weight_bytes); }

uint64_t hstep_least_memory(uint64_t largest, uint64_t all, uint64_t piece_bytes)
{
    return least(BUFFERS * most(largest, piece_bytes ? piece_bytes : DEFAULT_PIECE_BYTES), all);
}

/* ---- Binding ---- */

void hstep_close_storage(halfstep_optimizer *o)
{
    struct hstep_storage *st = o->storage;
    if (!st) return;
    o->device->release(&o->context, st->memory);
    free(st->pieces);
    free(st->rounds);
    free(st->first_piece);
    free(st->tensors);
    free(st->groups);
    free(st);
    o->storage = NULL;
}

/* Lists the pieces of all tensors. */
static void list_pieces(const halfstep_optimizer *o, struct hstep_storage *st)
{
    struct piece *p = st->pieces;
    for (int i = 0; i < o->n_tensors; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        const int64_t n = hstep_count_pieces(t, t->piece_rows);
        st->first_piece[i] = p - st->pieces;
        for (int64_t j = 0; j < n; j++, p++) {
            const int64_t first = j * t->piece_rows, rows = j + 1 < n ? t->piece_rows : t->n_rows - first;
            const halfstep_piece d = hstep_describe(t, i, first, rows, st->table.weights);
            *p = (struct piece){.tensor = i,
                                .first_row = first,
                                .n_rows = rows,
                                .first_chunk = hstep_chunk_from(t, o->chunks, start_of(t, first)),
                                .end_chunk = j + 1 < n ? hstep_chunk_from(t, o->chunks, start_of(t, first + rows))
                                                       : t->first_chunk + t->chunks,
                                .state_bytes = d.state_bytes,
                                .weight_bytes = d.weight_bytes};
        }
    }
    st->first_piece[o->n_tensors] = p - st->pieces;
}

/* Returns 1 if a piece has a round of its own. */
static int is_alone(const halfstep_optimizer *o, const struct piece *p)
{
    return o->tensors[p->tensor].piece_rows || o->tensors[p->tensor].pairs;
}

/* Joins pieces to rounds of at most `limit` bytes, or of one piece. */
static void list_rounds(const halfstep_optimizer *o, struct hstep_storage *st, uint64_t limit)
{
    st->n_rounds = 0;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        struct piece *p = &st->pieces[i];
        struct round *r = &st->rounds[st->n_rounds];
        if (!i || is_alone(o, p) || is_alone(o, p - 1) || r[-1].bytes + space_of(p) > limit)
            *r = (struct round){i, i, 0}, st->n_rounds++;
        else r--;
        p->round = r - st->rounds;
        r->end = i + 1;
        r->bytes += space_of(p);
    }
}

/* Divides the memory among three buffers, and pieces that stay. */
static int place_pieces(const halfstep_optimizer *o, struct hstep_storage *st)
{
    const uint64_t piece_bytes = st->table.piece_bytes ? st->table.piece_bytes : DEFAULT_PIECE_BYTES;
    uint64_t largest = 0, all = 0, buffer = 0;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        largest = most(largest, space_of(&st->pieces[i]));
        all += space_of(&st->pieces[i]);
    }
    const uint64_t memory = st->table.memory ? st->table.memory : hstep_least_memory(largest, all, piece_bytes);
    if (memory < all && memory < BUFFERS * largest)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE,
                          "memory of %llu bytes is too little for the storage; three pieces need %llu, all %llu",
                          (unsigned long long)memory, (unsigned long long)(BUFFERS * largest), (unsigned long long)all);
    list_rounds(o, st, least(piece_bytes, memory / BUFFERS));
    for (int64_t i = 0; i < st->n_rounds && memory < all; i++) buffer = most(buffer, st->rounds[i].bytes);
    uint64_t left = memory - BUFFERS * buffer, used = PAGE + BUFFERS * buffer;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        struct piece *p = &st->pieces[i];
        p->resident = space_of(p) <= left;
        if (!p->resident) continue;
        left -= space_of(p);
        used += space_of(p);
    }
    const int error = o->device->allocate(&o->context, used, &st->memory);
    if (error) return hstep_fail_memory(o, used, "pieces of states in storage");
    char *place = (char *)padded((uint64_t)(uintptr_t)st->memory, PAGE);
    for (int i = 0; i < BUFFERS; i++, place += buffer) st->buffer[i] = place;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        if (!st->pieces[i].resident) continue;
        st->pieces[i].place = place;
        place += space_of(&st->pieces[i]);
    }
    return HALFSTEP_OK;
}

/* Takes the addresses from all streams that are in pieces. */
static void clear_addresses(halfstep_optimizer *o, int first, int n)
{
    for (int i = first; i < first + n; i++)
        for (int s = 0; s < HSTEP_SLOTS; s++) {
            o->tensors[i].slot[s].code = NULL;
            if (s != HALFSTEP_SLOT_GRADIENT) o->tensors[i].slot[s].extra = NULL;
        }
}

/* Makes the list of pieces for a settled handle whose tensors have their piece_rows. */
static int open_storage(const halfstep_optimizer *o, struct hstep_storage *st)
{
    const size_t count = (size_t)o->n_tensors + 1;
    for (int i = 0; i < o->n_tensors; i++) st->n_pieces += hstep_count_pieces(&o->tensors[i], o->tensors[i].piece_rows);
    st->pieces = calloc((size_t)st->n_pieces + 1, sizeof *st->pieces);
    st->rounds = calloc((size_t)st->n_pieces + 1, sizeof *st->rounds);
    st->first_piece = calloc(count, sizeof *st->first_piece);
    st->tensors = calloc(count, sizeof *st->tensors);
    st->groups = calloc((size_t)o->n_groups + 1, sizeof *st->groups);
    if (!st->pieces || !st->rounds || !st->first_piece || !st->tensors || !st->groups)
        return hstep_fail_memory(o, (uint64_t)st->n_pieces * sizeof *st->pieces, "the list of %lld pieces",
                                 (long long)st->n_pieces);
    list_pieces(o, st);
    return place_pieces(o, st);
}

/* Sets the rows of all pieces, and cuts the chunks so that they end with pieces. */
static int cut_pieces(halfstep_optimizer *o, uint64_t piece_bytes)
{
    for (int i = 0; i < o->n_tensors; i++) {
        const struct hstep_tensor t = hstep_laid_out(o, i);
        o->tensors[i].piece_rows = hstep_piece_rows(&t, piece_bytes);
    }
    return o->settled ? hstep_cut_again(o) : hstep_settle(o);
}

static int bind(halfstep_optimizer *o, const halfstep_storage *table)
{
    const int was_broken = o->storage && atomic_load(&o->storage->broken);
    if (!o->device->shared || o->device->asynchronous)
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED,
                          "states in storage are stepped by the processor alone; create the handle without a device");
    if (table && (!table->read || !table->write || !table->wait || !table->flush))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "storage: read, write, wait and flush must not be NULL");
    struct hstep_storage *st = table ? calloc(1, sizeof *st) : NULL, *before = o->storage;
    if (table && !st) return hstep_fail_memory(o, sizeof *st, "a storage");
    int error = HALFSTEP_OK;
    if (st) {
        st->table = *table;
        st->held = -1;
        atomic_flag_clear(&st->lock);
        if (!(error = cut_pieces(o, table->piece_bytes))) error = open_storage(o, st);
    }
    o->storage = error ? st : before;
    hstep_close_storage(o);
    o->storage = error ? before : st;
    /* Chunks must end with the pieces of the storage that stays. */
    if (error && before && cut_pieces(o, before->table.piece_bytes)) atomic_store(&before->broken, 1);
    if (error) return error;
    o->device->release(&o->context, o->memory);
    o->memory = NULL;
    o->slots_bound = o->states_placed = 0;
    clear_addresses(o, 0, o->n_tensors);
    if (!was_broken || !o->plan.round_squares) return HALFSTEP_OK;
    /* At the last flush the round had no squares. */
    return o->device->zero(&o->context, o->plan.round_squares, HSTEP_EXACT_LIMBS * sizeof *o->plan.round_squares);
}

int halfstep_bind_storage(halfstep_optimizer *o, const halfstep_storage *storage)
{
    halfstep_storage table = {0};
    HSTEP_NEED(o, o);
    if (storage && !hstep_take_struct(&table, sizeof table, storage)) return hstep_fail_struct(o, __func__, storage);
    return bind(o, storage ? &table : NULL);
}

/* ---- Errors ---- */

int hstep_check_storage(const halfstep_optimizer *o)
{
    if (!o->storage || !atomic_load(&o->storage->broken)) return HALFSTEP_OK;
    return hstep_fail(o, HALFSTEP_ERROR_ORDER,
                      "the storage of the states has failed; bind it again, and restore weights and records from it");
}

/* Fails with the code and the text of the storage. */
static int fail_by_storage(const halfstep_optimizer *o, int code)
{
    const halfstep_storage *table = &o->storage->table;
    const char *why = table->why ? table->why(table->host) : NULL;
    if (code > 0 || code == HALFSTEP_NONFINITE) code = HALFSTEP_ERROR_IO;
    return hstep_fail(o, code, "%s", why && *why ? why : "the storage of the states has failed");
}

int hstep_begin_storage(const halfstep_optimizer *o)
{
    struct hstep_storage *st = o->storage;
    int error = hstep_check_storage(o);
    if (error || !st || !st->table.begin) return error;
    hstep_lock(&st->lock);
    if ((error = st->table.begin(st->table.host))) error = fail_by_storage(o, error);
    hstep_unlock(&st->lock);
    return error;
}

/* Fails like fail_by_storage(). Waits for all that is under way. changed: 1 if a step or a write may be half done. */
static int fail(const halfstep_optimizer *o, int code, int changed)
{
    struct hstep_storage *st = o->storage;
    code = fail_by_storage(o, code);
    st->table.wait(st->table.host);
    st->held = -1;
    st->dirty = 0;
    if (changed) atomic_store(&st->broken, 1);
    return code;
}

/* ---- One piece in memory ---- */

/* Returns `place` less an offset. The result may lie outside of any array. */
static char *biased(char *place, uint64_t offset, int64_t less)
{
    return (char *)((uintptr_t)place + (uintptr_t)offset - (uintptr_t)less);
}

/* Gives the slots of a tensor the addresses of a piece at p->place. */
static void give_addresses(struct hstep_tensor *t, const struct piece *p)
{
    const halfstep_piece d = hstep_describe(t, p->tensor, p->first_row, p->n_rows, 0);
    const int64_t element = start_of(t, p->first_row);
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        struct hstep_slot *slot = &t->slot[s];
        if (has_stream(slot, s, 0))
            slot->code =
                biased(p->place, d.slot[s].code_offset, element ? hstep_code_offset(t, slot->format, element) : 0);
        if (has_stream(slot, s, 1))
            slot->extra =
                biased(p->place, d.slot[s].extra_offset, element ? hstep_extra_offset(t, slot->format, element) : 0);
    }
}

/* Copies the codes of the weight to the end of a piece. */
static void copy_weight(const halfstep_optimizer *o, const struct piece *p, const void *weight)
{
    const struct hstep_tensor *t = &o->tensors[p->tensor];
    const int64_t element = start_of(t, p->first_row), format = t->slot[HALFSTEP_SLOT_WEIGHT].format;
    if (!p->weight_bytes || !weight) return;
    const int64_t offset = element ? hstep_code_offset(t, (int)format, element) : 0;
    memcpy(p->place + p->state_bytes, (const char *)weight + offset, (size_t)p->weight_bytes);
}

/* Begins to read a piece to p->place. whole: with its weight. A piece that stays is always read whole. */
static int begin_read(struct hstep_storage *st, struct piece *p, int whole)
{
    const uint64_t bytes = p->state_bytes + (whole || p->resident ? p->weight_bytes : 0);
    if (p->loaded || !bytes) return HALFSTEP_OK;
    p->loaded = p->resident;
    return st->table.read(st->table.host, p - st->pieces, p->place, bytes);
}

static int begin_write(struct hstep_storage *st, const struct piece *p)
{
    const uint64_t bytes = p->state_bytes + p->weight_bytes;
    return bytes ? st->table.write(st->table.host, p - st->pieces, p->place, bytes) : HALFSTEP_OK;
}

/* Writes the held piece if it was changed. */
static int put_back(const halfstep_optimizer *o)
{
    struct hstep_storage *st = o->storage;
    int error;
    if (st->held >= 0 && st->dirty &&
        ((error = begin_write(st, &st->pieces[st->held])) || (error = st->table.wait(st->table.host))))
        return fail(o, error, 1);
    st->held = -1;
    st->dirty = 0;
    return HALFSTEP_OK;
}

/* Brings a piece into memory and keeps it there until another is needed, so that reading and writing in small parts
 * costs no more than in large ones. */
static int hold(const halfstep_optimizer *o, int64_t number)
{
    struct hstep_storage *st = o->storage;
    struct piece *p = &st->pieces[number];
    int error;
    if (st->held == number) return HALFSTEP_OK;
    if ((error = put_back(o))) return error;
    if (!p->resident) p->place = st->buffer[0];
    if ((error = begin_read(st, p, 1)) || (error = st->table.wait(st->table.host))) {
        p->loaded = 0;
        return fail(o, error, 0);
    }
    st->held = number;
    return HALFSTEP_OK;
}

/* ---- The walk ---- */

/* SUM makes sums of pieces and writes nothing. STEP makes sums, if need be, and updates. UPDATE has sums already. */
struct visit {
    int64_t round;
    enum { SUM, STEP, UPDATE } what;
};

struct walk {
    const struct hstep_request *s;
    struct hstep_storage *st;
    int64_t first; /* round */
    int sums_only, made;
};

/* Tells whether a visit works on a piece. */
static int is_active(const struct walk *w, const struct piece *p)
{
    const struct hstep_call *c = &w->s->call;
    const struct hstep_update *u = &c->plan.updates[p->tensor];
    if (p->tensor < c->first || p->tensor >= c->first + c->n) return 0;
    return w->sums_only ? hstep_is_summed(&c->plan.tensors[p->tensor], u) : !u->skip;
}

static int is_active_round(const struct walk *w, int64_t round)
{
    const struct round *r = &w->st->rounds[round];
    for (int64_t i = r->first; i < r->end; i++)
        if (is_active(w, &w->st->pieces[i])) return 1;
    return 0;
}

static int tensor_of(const struct walk *w, int64_t round) { return w->st->pieces[w->st->rounds[round].first].tensor; }

/* Tells whether a round belongs to a tensor that is cut and needs its sums before its first update. */
static int is_summed_first(const struct walk *w, int64_t round)
{
    const struct hstep_tensor *t = &w->s->o->tensors[tensor_of(w, round)];
    return !w->made && t->piece_rows && hstep_needs_sums(t, w->s->call.micro);
}

/* Moves to the next visit, from the last round to the first. Returns 0 if none is left. */
static int next_visit(const struct walk *w, struct visit *v)
{
    int64_t i = v->round - 1;
    const int tensor = v->round < w->st->n_rounds ? tensor_of(w, v->round) : -1;
    const int within = i >= w->first && tensor >= 0 && w->s->o->tensors[tensor].piece_rows && tensor_of(w, i) == tensor;
    if (within && !w->sums_only) {
        v->round = i;
        return 1;
    }
    if (v->what == SUM && !w->sums_only) {
        v->round = w->st->pieces[w->st->first_piece[tensor + 1] - 1].round;
        v->what = UPDATE;
        return 1;
    }
    while (i >= w->first && !is_active_round(w, i)) i--;
    if (i < w->first) return 0;
    v->round = i;
    v->what = w->sums_only || is_summed_first(w, i) ? SUM : w->made ? UPDATE : STEP;
    return 1;
}

static int begin_reads(const struct walk *w, const struct visit *v, char *place)
{
    const struct round *r = &w->st->rounds[v->round];
    for (struct piece *p = w->st->pieces + r->first; p < w->st->pieces + r->end; p++) {
        int error = HALFSTEP_OK;
        if (!p->resident) p->place = place;
        place += p->resident ? 0 : space_of(p);
        if (is_active(w, p) && (error = begin_read(w->st, p, w->s->call.micro))) return error;
    }
    return HALFSTEP_OK;
}

static int begin_writes(const struct walk *w, const struct visit *v)
{
    const struct round *r = &w->st->rounds[v->round];
    for (const struct piece *p = w->st->pieces + r->first; p < w->st->pieces + r->end && v->what != SUM; p++) {
        int error = HALFSTEP_OK;
        if (is_active(w, p) && (error = begin_write(w->st, p))) return error;
    }
    return HALFSTEP_OK;
}

/* Completes a piece after its update: with the scales, which are decided before, and with the weight. */
static void complete(const struct walk *w, const struct piece *p)
{
    const struct hstep_call *c = &w->s->call;
    const struct hstep_tensor *t = &c->plan.tensors[p->tensor];
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++)
        if (t->slot[s].extra_bytes && hstep_has_one_scale(t->slot[s].format))
            memcpy(t->slot[s].extra, &c->plan.updates[p->tensor].scale[s], sizeof(float));
    if (c->weights) copy_weight(w->s->o, p, c->weights[p->tensor - c->first]);
}

static int work(const struct walk *w, const struct visit *v)
{
    struct hstep_storage *st = w->st;
    const struct round *r = &st->rounds[v->round];
    struct hstep_request s = *w->s;
    const int64_t first = most((uint64_t)s.call.first, (uint64_t)st->pieces[r->first].tensor),
                  end = least((uint64_t)(s.call.first + s.call.n), (uint64_t)st->pieces[r->end - 1].tensor + 1);
    struct hstep_context context = *s.call.context;
    context.first_chunk = st->pieces[r->first].first_chunk;
    context.end_chunk = st->pieces[r->end - 1].end_chunk;
    s.call.context = &context;
    for (int64_t i = r->first; i < r->end; i++)
        if (is_active(w, &st->pieces[i])) give_addresses(&s.o->tensors[st->pieces[i].tensor], &st->pieces[i]);
    int error = v->what == SUM ? hstep_sum_tensors(&s, (int)first, (int)(end - first))
                               : hstep_step_tensors(&s, (int)first, (int)(end - first), v->what == UPDATE);
    for (int64_t i = r->first; i < r->end && v->what != SUM && !error; i++)
        if (is_active(w, &st->pieces[i])) complete(w, &st->pieces[i]);
    clear_addresses(s.o, (int)first, (int)(end - first));
    return error;
}

static int walk(const struct walk *w)
{
    const halfstep_storage *table = &w->st->table;
    struct visit now = {w->st->pieces[w->st->first_piece[w->s->call.first + w->s->call.n] - 1].round + 1, STEP}, before;
    int error, written = 0;
    /* Rounds above those of the call are not of its tensors, so none of them is cut and goes on in the first. */
    int more = next_visit(w, &now);
    if (!more) return HALFSTEP_OK;
    if ((error = begin_reads(w, &now, w->st->buffer[0])) || (error = table->wait(table->host))) return error;
    for (int turn = 1; more; turn = (turn + 1) % BUFFERS) {
        struct visit next = now;
        more = next_visit(w, &next);
        if ((written && (error = begin_writes(w, &before))) ||
            (more && (error = begin_reads(w, &next, w->st->buffer[turn]))) || (error = work(w, &now)) ||
            (error = table->wait(table->host)))
            return error;
        written = 1;
        before = now;
        now = next;
    }
    if ((error = begin_writes(w, &before))) return error;
    return table->wait(table->host);
}

int hstep_walk(const struct hstep_request *s, int sums_only)
{
    halfstep_optimizer *o = s->o;
    struct hstep_storage *st = o->storage;
    if (!s->call.n) return HALFSTEP_OK;
    hstep_lock(&st->lock);
    struct walk w = {.s = s,
                     .st = st,
                     .first = st->pieces[st->first_piece[s->call.first]].round,
                     .sums_only = sums_only,
                     .made = *s->norms_made || (o->totals && !s->call.micro)};
    /* A call that has waited for another one may find that it has failed. */
    int error = hstep_check_storage(o);
    if (!error && !(error = put_back(o)) && (error = walk(&w))) error = fail(o, error, 1);
    hstep_unlock(&st->lock);
    return error;
}

/* ---- Commits ---- */

void hstep_keep_counts(halfstep_optimizer *o)
{
    struct hstep_storage *st = o->storage;
    if (!st) return;
    memcpy(st->tensors, o->tensors, (size_t)o->n_tensors * sizeof *o->tensors);
    memcpy(st->groups, o->groups, (size_t)o->n_groups * sizeof *o->groups);
    st->gradient_norm = o->gradient_norm;
    st->round_norm = o->round_norm;
    st->skipped = atomic_load(&o->skipped);
}

int hstep_commit(halfstep_optimizer *o, void *const *weights)
{
    struct hstep_storage *st = o->storage;
    int error = st ? put_back(o) : HALFSTEP_OK;
    if (!st || (!error && !(error = st->table.flush(st->table.host, weights)))) return HALFSTEP_OK;
    error = atomic_load(&st->broken) ? error : fail(o, error, 1);
    memcpy(o->tensors, st->tensors, (size_t)o->n_tensors * sizeof *o->tensors);
    memcpy(o->groups, st->groups, (size_t)o->n_groups * sizeof *o->groups);
    o->gradient_norm = st->gradient_norm;
    o->round_norm = st->round_norm;
    atomic_store(&o->skipped, st->skipped);
    hstep_show(o, 0, o->n_tensors);
    return error;
}

int halfstep_flush(halfstep_optimizer *o, void *const *weights)
{
    HSTEP_NEED(o, o);
    const int error = hstep_begin_storage(o);
    if (error) return error;
    hstep_keep_counts(o);
    return hstep_commit(o, weights);
}

/* Writes the initial value of a piece to p->place. */
static int initialize(const halfstep_optimizer *o, const struct piece *p, void *const *weights)
{
    struct hstep_tensor t = o->tensors[p->tensor];
    const halfstep_piece d = hstep_describe(&t, p->tensor, p->first_row, p->n_rows, 0);
    memset(p->place, 0, (size_t)(p->state_bytes + p->weight_bytes));
    t.first_row += p->first_row;
    t.n_rows = p->n_rows;
    t.slot[HALFSTEP_SLOT_WEIGHT].extra = p->place + d.slot[HALFSTEP_SLOT_WEIGHT].extra_offset;
    t.slot[HALFSTEP_SLOT_WEIGHT].extra_bytes = d.slot[HALFSTEP_SLOT_WEIGHT].extra_bytes;
    if (p->weight_bytes) copy_weight(o, p, weights[p->tensor]);
    return t.n_rows ? hstep_spread_errors(o, &t) : HALFSTEP_OK;
}

int halfstep_write_initial(halfstep_optimizer *o, void *const *weights)
{
    HSTEP_NEED(o, o);
    struct hstep_storage *st = o->storage;
    int error = hstep_check_storage(o);
    if (error) return error;
    if (!st)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "there is no storage; bind it first by halfstep_bind_storage()");
    for (int64_t i = 0; i < st->n_pieces; i++)
        if (st->pieces[i].weight_bytes && (!weights || !weights[st->pieces[i].tensor]))
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL weights, which the storage keeps",
                              o->labels[st->pieces[i].tensor].name);
    st->held = -1;
    st->dirty = 0;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        struct piece *p = &st->pieces[i];
        if (!p->resident) p->place = st->buffer[i % 2];
        if ((error = initialize(o, p, weights))) return error;
        if ((error = st->table.wait(st->table.host)) || (error = begin_write(st, p))) return fail(o, error, 1);
        p->loaded = p->resident;
    }
    if ((error = st->table.wait(st->table.host))) return fail(o, error, 1);
    for (int i = 0; i < o->n_tensors; i++)
        for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) o->tensors[i].slot[s].grid = 1.0f;
    hstep_show(o, 0, o->n_tensors);
    hstep_keep_counts(o);
    return hstep_commit(o, weights);
}

/* ---- Reading and writing slots and bytes ---- */

int hstep_is_stored(const halfstep_optimizer *o, int tensor, int slot)
{
    const struct hstep_slot *s = &o->tensors[tensor].slot[slot];
    return o->storage && (has_stream(s, slot, 0) || has_stream(s, slot, 1));
}

/* Brings the piece with element a->first into memory. Writes to *part the access to those elements that are in it, by
 * way of *t. Elements of a vector all count as elements of the one piece. */
static int take_part(const halfstep_optimizer *o, int tensor, const struct hstep_access *a, struct hstep_tensor *t,
                     struct hstep_access *part)
{
    const struct hstep_storage *st = o->storage;
    int64_t number = st->first_piece[tensor];
    *t = o->tensors[tensor];
    *part = *a;
    if (t->piece_rows) {
        const int64_t of_a_piece = start_of(t, t->piece_rows), end = (a->first / of_a_piece + 1) * of_a_piece;
        number += a->first / of_a_piece;
        if (part->end > end) part->end = end;
    }
    const int error = hold(o, number);
    if (error) return error;
    give_addresses(t, &st->pieces[number]);
    part->tensor = t;
    if (a->slot >= HALFSTEP_SLOT_STATE) part->data = t->slot[a->slot].code;
    return HALFSTEP_OK;
}

int hstep_read_stored(const halfstep_optimizer *o, int tensor, const struct hstep_access *a, float *out)
{
    struct hstep_access left = *a, part;
    struct hstep_tensor t;
    int error = HALFSTEP_OK;
    for (; left.first < left.end && !error; left.first = part.end)
        if (!(error = take_part(o, tensor, &left, &t, &part)))
            error = hstep_why(o, o->device->read(&part, out + (left.first - a->first)));
    return error;
}

int hstep_write_stored(halfstep_optimizer *o, int tensor, const struct hstep_access *a, const float *in)
{
    struct hstep_access left = *a, part;
    struct hstep_tensor t;
    int error = HALFSTEP_OK;
    for (; left.first < left.end && !error; left.first = part.end) {
        if ((error = take_part(o, tensor, &left, &t, &part))) return error;
        o->storage->dirty = 1;
        error = hstep_why(o, o->device->write(&part, in + (left.first - a->first)));
        if (a->slot == HALFSTEP_SLOT_WEIGHT) copy_weight(o, &o->storage->pieces[o->storage->held], a->data);
    }
    return error;
}

/* One stream of a tensor. */
struct stream {
    int tensor, slot, extra;
    uint64_t bytes;
};

static int check_bytes(const halfstep_optimizer *o, const struct stream *stream, uint64_t first, uint64_t bytes,
                       const void *data)
{
    const struct hstep_slot *s = &o->tensors[stream->tensor].slot[stream->slot];
    const char *name = o->labels[stream->tensor].name;
    const int codes = stream->slot < HALFSTEP_SLOT_STATE && !stream->extra,
              stored = stream->slot == HALFSTEP_SLOT_WEIGHT && o->storage && o->storage->table.weights;
    if (codes && !stored)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': the codes of a %s are the caller's", name,
                          stream->slot == HALFSTEP_SLOT_WEIGHT ? "weight outside of storage" : "gradient");
    if (first > stream->bytes || bytes > stream->bytes - first)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': bytes %llu + %llu (first + number) are not among %llu",
                          name, (unsigned long long)first, (unsigned long long)bytes,
                          (unsigned long long)stream->bytes);
    if (!bytes) return HALFSTEP_OK;
    if (!data) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL data", name);
    if (stored || hstep_is_stored(o, stream->tensor, stream->slot)) return hstep_check_storage(o);
    if (!(stream->extra ? s->extra : s->code))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': slot %d has no memory yet", name, stream->slot);
    return HALFSTEP_OK;
}

/* Finds how much of a stream from byte `first` on lies in one piece, at most *bytes, and brings that piece into
 * memory. */
static int find_bytes(const halfstep_optimizer *o, const struct stream *stream, uint64_t first, uint64_t *bytes,
                      char **place)
{
    const struct hstep_tensor *t = &o->tensors[stream->tensor];
    const int64_t start = o->storage->first_piece[stream->tensor], end = o->storage->first_piece[stream->tensor + 1];
    const halfstep_piece one = describe_bound(o, start);
    const uint64_t each = stream->extra                          ? one.slot[stream->slot].extra_bytes
                          : stream->slot == HALFSTEP_SLOT_WEIGHT ? one.weight_bytes
                                                                 : one.slot[stream->slot].code_bytes;
    /* All pieces but the last have as many rows, and their streams as many bytes. */
    int64_t number = start + (int64_t)(first / each);
    if (number >= end) number = end - 1;
    const uint64_t within = first - (uint64_t)(number - start) * each;
    const int error = hold(o, number);
    if (error) return error;
    const struct piece *p = &o->storage->pieces[number];
    const halfstep_piece d = hstep_describe(t, stream->tensor, p->first_row, p->n_rows, o->storage->table.weights);
    const uint64_t offset = stream->extra                          ? d.slot[stream->slot].extra_offset
                            : stream->slot == HALFSTEP_SLOT_WEIGHT ? d.state_bytes
                                                                   : d.slot[stream->slot].code_offset;
    if (number + 1 < end) *bytes = least(*bytes, each - within);
    *place = p->place + offset + within;
    return HALFSTEP_OK;
}

static int move_bytes(const halfstep_optimizer *o, int32_t tensor, int32_t slot, int32_t extra, uint64_t first,
                      uint64_t bytes, char *data, int writes)
{
    int error = hstep_check_slot(o, tensor, slot);
    if (error) return error;
    if (extra < 0 || extra > 1)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "extra = %d; allowed: 0 (codes), 1 (the extra stream)", extra);
    const struct hstep_slot *s = &o->tensors[tensor].slot[slot];
    const struct stream stream = {tensor, slot, extra, extra ? s->extra_bytes : s->code_bytes};
    if ((error = check_bytes(o, &stream, first, bytes, data)) || !bytes) return error;
    if (!o->storage || slot == HALFSTEP_SLOT_GRADIENT) {
        char *ours = (extra ? s->extra : s->code) + first;
        return hstep_wait(o, o->device->copy(&o->context, writes ? ours : data, writes ? data : ours, bytes));
    }
    for (uint64_t some; bytes; first += some, data += some, bytes -= some) {
        char *place;
        some = bytes;
        if ((error = find_bytes(o, &stream, first, &some, &place))) return error;
        memcpy(writes ? place : data, writes ? data : place, (size_t)some);
        o->storage->dirty |= writes;
    }
    return HALFSTEP_OK;
}

int halfstep_read_bytes(const halfstep_optimizer *o, int32_t tensor, int32_t slot, int32_t extra, uint64_t first,
                        uint64_t bytes, void *out)
{
    HSTEP_NEED(o, o);
    return move_bytes(o, tensor, slot, extra, first, bytes, out, 0);
}

int halfstep_write_bytes(halfstep_optimizer *o, int32_t tensor, int32_t slot, int32_t extra, uint64_t first,
                         uint64_t bytes, const void *in)
{
    HSTEP_NEED(o, o);
    int error = move_bytes(o, tensor, slot, extra, first, bytes, (char *)(uintptr_t)in, 1);
    if (!error) hstep_forget_results(o, tensor, 1);
    return error;
}
