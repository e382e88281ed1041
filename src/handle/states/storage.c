/* States in storage: how they are cut into pieces, the memory of pieces, and errors of the storage. */
#include <stdlib.h>

#include "base/lock.h"
#include "base/structs.h"
#include "handle/checks.h"
#include "handle/plan.h"
#include "handle/states/storage.h"
#include "tables/layout.h"

enum { PAGE = 4096 };
#define DEFAULT_PIECE_BYTES ((uint64_t)16 << 20)

/* ---- Pieces ---- */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }
static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t padded(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

halfstep_piece hstep_describe(const struct hstep_tensor *t, int tensor, int64_t first_row, int64_t n_rows, int weights)
{
    halfstep_piece p = {.tensor = tensor, .first_row = first_row, .n_rows = n_rows};
    const int whole = n_rows == t->n_rows;
    for (struct hstep_cursor c = {0}; hstep_next_plane(t, &c);) {
        const int format = t->slot[c.slot].format;
        const uint64_t bytes = whole     ? c.bytes
                               : c.extra ? hstep_extra_bytes(format, n_rows, t->n_columns)
                                         : hstep_code_bytes(format, n_rows, t->n_columns);
        *(c.extra ? &p.slot[c.slot].extra_offset : &p.slot[c.slot].code_offset) = p.state_bytes;
        *(c.extra ? &p.slot[c.slot].extra_bytes : &p.slot[c.slot].code_bytes) = bytes;
        p.state_bytes += padded(bytes, 64);
    }
    const struct hstep_slot *weight = &t->slot[HALFSTEP_SLOT_WEIGHT];
    if (weights) p.weight_bytes = whole ? weight->code_bytes : hstep_code_bytes(weight->format, n_rows, t->n_columns);
    return p;
}

struct hstep_range hstep_range_of(const halfstep_piece *p, int slot, int extra)
{
    if (extra) return (struct hstep_range){p->slot[slot].extra_offset, p->slot[slot].extra_bytes};
    if (slot == HALFSTEP_SLOT_WEIGHT) return (struct hstep_range){p->state_bytes, p->weight_bytes};
    return (struct hstep_range){p->slot[slot].code_offset, p->slot[slot].code_bytes};
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
 * (hstep_summed_of()). Cuts at tiles also spare partial grains, so they are preferred anyway. */
int64_t hstep_piece_rows(const struct hstep_tensor *t, uint64_t piece_bytes)
{
    const int64_t tile = rows_of_multiple(t, HSTEP_TILE);
    int64_t unit = 1;
    uint64_t bytes = 0;
    if (!piece_bytes) piece_bytes = DEFAULT_PIECE_BYTES;
    if (t->matrix || t->pairs || t->n_rows < 2 || !t->n_columns) return 0;
    for (struct hstep_cursor c = {0}; hstep_next_plane(t, &c);) bytes += c.bytes;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (slot->format < 0) continue;
        if (slot->extent != HALFSTEP_EXTENT_ELEMENTS || hstep_has_one_scale(slot->format)) return 0;
        if (hstep_formats[slot->format].geometry == HALFSTEP_GEOMETRY_FLAT && hstep_formats[slot->format].block) {
            const int64_t elements = t->sums ? HSTEP_TILE : t->grain;
            if (t->first_row * t->n_columns % elements) return 0;
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

halfstep_piece hstep_describe_bound(const halfstep_optimizer *o, int64_t number)
{
    const struct hstep_stored_piece *p = &o->storage->pieces[number];
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
    if (o->storage) p = hstep_describe_bound(o, number);
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

uint64_t hstep_space_of(const struct hstep_stored_piece *p)
{
    return hstep_piece_space(p->state_bytes + p->weight_bytes);
}

uint64_t hstep_least_memory(uint64_t largest, uint64_t all, uint64_t piece_bytes)
{
    return least(HSTEP_BUFFERS * most(largest, piece_bytes ? piece_bytes : DEFAULT_PIECE_BYTES), all);
}

/* ---- Binding ---- */

void hstep_close_storage(halfstep_optimizer *o)
{
    struct hstep_storage *st = o->storage;
    if (!st) return;
    o->device->release(&o->context, st->memory);
    free(st->pieces);
    free(st->bundles);
    free(st->first_piece);
    free(st->tensors);
    free(st->groups);
    free(st);
    o->storage = NULL;
}

/* Lists the pieces of all tensors. */
static void list_pieces(const halfstep_optimizer *o, struct hstep_storage *st)
{
    struct hstep_stored_piece *p = st->pieces;
    for (int i = 0; i < o->n_tensors; i++) {
        const struct hstep_tensor *t = &o->tensors[i];
        const int64_t n = hstep_count_pieces(t, t->piece_rows);
        st->first_piece[i] = p - st->pieces;
        for (int64_t j = 0; j < n; j++, p++) {
            const int64_t first = j * t->piece_rows, rows = j + 1 < n ? t->piece_rows : t->n_rows - first;
            const halfstep_piece d = hstep_describe(t, i, first, rows, st->table.weights);
            *p = (struct hstep_stored_piece){
                .tensor = i,
                .first_row = first,
                .n_rows = rows,
                .first_chunk = hstep_chunk_from(t, o->chunks, first * t->n_columns),
                .end_chunk = j + 1 < n ? hstep_chunk_from(t, o->chunks, (first + rows) * t->n_columns)
                                       : t->first_chunk + t->chunks,
                .state_bytes = d.state_bytes,
                .weight_bytes = d.weight_bytes};
        }
    }
    st->first_piece[o->n_tensors] = p - st->pieces;
}

/* Returns 1 if a piece has a bundle of its own. */
static int is_alone(const halfstep_optimizer *o, const struct hstep_stored_piece *p)
{
    return o->tensors[p->tensor].piece_rows || o->tensors[p->tensor].pairs;
}

/* Joins pieces to bundles of at most `limit` bytes, or of one piece. */
static void list_bundles(const halfstep_optimizer *o, struct hstep_storage *st, uint64_t limit)
{
    st->n_bundles = 0;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        struct hstep_stored_piece *p = &st->pieces[i];
        struct hstep_bundle *r = &st->bundles[st->n_bundles];
        if (!i || is_alone(o, p) || is_alone(o, p - 1) || r[-1].bytes + hstep_space_of(p) > limit)
            *r = (struct hstep_bundle){i, i, 0}, st->n_bundles++;
        else r--;
        p->bundle = r - st->bundles;
        r->end = i + 1;
        r->bytes += hstep_space_of(p);
    }
}

/* Divides the memory among three buffers, and pieces that stay. */
static int place_pieces(const halfstep_optimizer *o, struct hstep_storage *st)
{
    const uint64_t piece_bytes = st->table.piece_bytes ? st->table.piece_bytes : DEFAULT_PIECE_BYTES;
    uint64_t largest = 0, all = 0, buffer = 0;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        largest = most(largest, hstep_space_of(&st->pieces[i]));
        all += hstep_space_of(&st->pieces[i]);
    }
    const uint64_t memory = st->table.memory ? st->table.memory : hstep_least_memory(largest, all, piece_bytes);
    if (memory < all && memory < HSTEP_BUFFERS * largest)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE,
                          "memory of %llu bytes is too little for the storage; three pieces need %llu, all %llu",
                          (unsigned long long)memory, (unsigned long long)(HSTEP_BUFFERS * largest),
                          (unsigned long long)all);
    list_bundles(o, st, least(piece_bytes, memory / HSTEP_BUFFERS));
    for (int64_t i = 0; i < st->n_bundles && memory < all; i++) buffer = most(buffer, st->bundles[i].bytes);
    uint64_t left = memory - HSTEP_BUFFERS * buffer, used = PAGE + HSTEP_BUFFERS * buffer;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        struct hstep_stored_piece *p = &st->pieces[i];
        p->resident = hstep_space_of(p) <= left;
        if (!p->resident) continue;
        left -= hstep_space_of(p);
        used += hstep_space_of(p);
    }
    const int error = o->device->allocate(&o->context, used, &st->memory);
    if (error) return hstep_fail_memory(o, used, "pieces of states in storage");
    char *place = (char *)padded((uint64_t)(uintptr_t)st->memory, PAGE);
    for (int i = 0; i < HSTEP_BUFFERS; i++, place += buffer) st->buffer[i] = place;
    for (int64_t i = 0; i < st->n_pieces; i++) {
        if (!st->pieces[i].resident) continue;
        st->pieces[i].place = place;
        place += hstep_space_of(&st->pieces[i]);
    }
    return HALFSTEP_OK;
}

void hstep_clear_addresses(halfstep_optimizer *o, int first, int n)
{
    for (int i = first; i < first + n; i++)
        for (struct hstep_cursor c = {0}; hstep_next_plane(&o->tensors[i], &c);) *c.place = NULL;
}

/* Makes the list of pieces for a settled handle whose tensors have their piece_rows. */
static int open_storage(const halfstep_optimizer *o, struct hstep_storage *st)
{
    const size_t count = (size_t)o->n_tensors + 1;
    for (int i = 0; i < o->n_tensors; i++) st->n_pieces += hstep_count_pieces(&o->tensors[i], o->tensors[i].piece_rows);
    st->pieces = calloc((size_t)st->n_pieces + 1, sizeof *st->pieces);
    st->bundles = calloc((size_t)st->n_pieces + 1, sizeof *st->bundles);
    st->first_piece = calloc(count, sizeof *st->first_piece);
    st->tensors = calloc(count, sizeof *st->tensors);
    st->groups = calloc((size_t)o->n_groups + 1, sizeof *st->groups);
    if (!st->pieces || !st->bundles || !st->first_piece || !st->tensors || !st->groups)
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
    hstep_clear_addresses(o, 0, o->n_tensors);
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

int hstep_fail_storage(const halfstep_optimizer *o, int code, int changed)
{
    struct hstep_storage *st = o->storage;
    code = fail_by_storage(o, code);
    st->table.wait(st->table.host);
    st->held = -1;
    st->dirty = 0;
    if (changed) atomic_store(&st->broken, 1);
    return code;
}
