/* Work on states in storage. A walk brings pieces into memory, has the step work on them there, and writes them back.
 * Functions about slots bring one piece at a time. While a piece is in memory, the slots of its tensor have addresses
 * such that offsets in the whole tensor lead into the piece. */
#include "handle/states/walk.h"

#include "base/lock.h"
#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/states/slots.h"
#include "handle/step/ahead.h"
#include "tables/layout.h"

/* ---- One piece in memory ---- */

/* Gives the slots of a tensor the addresses of a piece at p->place. An address may lie outside of any array. */
static void give_addresses(struct hstep_tensor *t, const struct hstep_stored_piece *p)
{
    const halfstep_piece d = hstep_describe(t, p->tensor, p->first_row, p->n_rows, 0);
    const int64_t element = p->first_row * t->n_columns;
    for (struct hstep_cursor c = {0}; hstep_next_plane(t, &c);) {
        const int format = t->slot[c.slot].format;
        const int64_t less = !element  ? 0
                             : c.extra ? hstep_extra_offset(t, format, element)
                                       : hstep_code_offset(t, format, element);
        const uint64_t offset = hstep_range_of(&d, c.slot, c.extra).offset;
        *c.place = (char *)((uintptr_t)p->place + (uintptr_t)offset - (uintptr_t)less);
    }
}

/* Copies the codes of the weight to the end of a piece. */
static void copy_weight(const halfstep_optimizer *o, const struct hstep_stored_piece *p, const void *weight)
{
    const struct hstep_tensor *t = &o->tensors[p->tensor];
    const int64_t element = p->first_row * t->n_columns, format = t->slot[HALFSTEP_SLOT_WEIGHT].format;
    if (!p->weight_bytes || !weight) return;
    const int64_t offset = element ? hstep_code_offset(t, (int)format, element) : 0;
    memcpy(p->place + p->state_bytes, (const char *)weight + offset, (size_t)p->weight_bytes);
}

/* Begins to read a piece to p->place. whole: with its weight. A piece that stays is always read whole. */
static int begin_read(struct hstep_storage *st, struct hstep_stored_piece *p, int whole)
{
    const uint64_t bytes = p->state_bytes + (whole || p->resident ? p->weight_bytes : 0);
    if (p->loaded || !bytes) return HALFSTEP_OK;
    p->loaded = p->resident;
    return st->table.read(st->table.host, p - st->pieces, p->place, bytes);
}

static int begin_write(struct hstep_storage *st, const struct hstep_stored_piece *p)
{
    const uint64_t bytes = p->state_bytes + p->weight_bytes;
    return bytes ? st->table.write(st->table.host, p - st->pieces, p->place, bytes) : HALFSTEP_OK;
}

/* Writes the held piece if it was changed. */
static int put_back(const halfstep_optimizer *o)
{
    struct hstep_storage *st = o->storage;
    const int writes = st->held >= 0 && st->dirty;
    int error = writes ? begin_write(st, &st->pieces[st->held]) : HALFSTEP_OK;
    if (!error && writes) error = st->table.wait(st->table.host);
    if (error) return hstep_fail_storage(o, error, 1);
    st->held = -1;
    st->dirty = 0;
    return HALFSTEP_OK;
}

/* Brings a piece into memory and keeps it there until another is needed, so that reading and writing in small parts
 * costs no more than in large ones. */
static int hold(const halfstep_optimizer *o, int64_t number)
{
    struct hstep_storage *st = o->storage;
    struct hstep_stored_piece *p = &st->pieces[number];
    if (st->held == number) return HALFSTEP_OK;
    int error = put_back(o);
    if (error) return error;
    if (!p->resident) p->place = st->buffer[0];
    error = begin_read(st, p, 1);
    if (!error) error = st->table.wait(st->table.host);
    if (error) {
        p->loaded = 0;
        return hstep_fail_storage(o, error, 0);
    }
    st->held = number;
    return HALFSTEP_OK;
}

/* ---- The walk ---- */

/* SUM makes sums of pieces and writes nothing. STEP makes sums, if need be, and updates. UPDATE has sums already. */
struct visit {
    int64_t bundle;
    enum { SUM, STEP, UPDATE } what;
};

struct walk {
    const struct hstep_request *s;
    struct hstep_storage *st;
    int64_t first; /* bundle */
    int sums_only, made;
};

/* Tells whether a visit works on a piece. */
static int is_active(const struct walk *w, const struct hstep_stored_piece *p)
{
    const struct hstep_call *c = &w->s->call;
    const struct hstep_update *u = &c->plan.updates[p->tensor];
    if (p->tensor < c->first || p->tensor >= c->first + c->n) return 0;
    return w->sums_only ? hstep_is_summed(&c->plan.tensors[p->tensor], u) : !u->skip;
}

static int is_active_bundle(const struct walk *w, int64_t bundle)
{
    const struct hstep_bundle *r = &w->st->bundles[bundle];
    for (int64_t i = r->first; i < r->end; i++)
        if (is_active(w, &w->st->pieces[i])) return 1;
    return 0;
}

static int tensor_of(const struct walk *w, int64_t bundle)
{
    return w->st->pieces[w->st->bundles[bundle].first].tensor;
}

/* Tells whether a bundle belongs to a tensor that is cut and needs its sums before its first update. */
static int is_summed_first(const struct walk *w, int64_t bundle)
{
    const struct hstep_tensor *t = &w->s->o->tensors[tensor_of(w, bundle)];
    return !w->made && t->piece_rows && hstep_needs_sums(t, w->s->call.micro);
}

/* Moves to the next visit, from the last bundle to the first. Returns 0 if none is left. */
static int next_visit(const struct walk *w, struct visit *v)
{
    int64_t i = v->bundle - 1;
    const int tensor = v->bundle < w->st->n_bundles ? tensor_of(w, v->bundle) : -1;
    const int within = i >= w->first && tensor >= 0 && w->s->o->tensors[tensor].piece_rows && tensor_of(w, i) == tensor;
    if (within && !w->sums_only) {
        v->bundle = i;
        return 1;
    }
    if (v->what == SUM && !w->sums_only) {
        v->bundle = w->st->pieces[w->st->first_piece[tensor + 1] - 1].bundle;
        v->what = UPDATE;
        return 1;
    }
    while (i >= w->first && !is_active_bundle(w, i)) i--;
    if (i < w->first) return 0;
    v->bundle = i;
    v->what = w->sums_only || is_summed_first(w, i) ? SUM : w->made ? UPDATE : STEP;
    return 1;
}

static int begin_reads(const struct walk *w, const struct visit *v, char *place)
{
    const struct hstep_bundle *r = &w->st->bundles[v->bundle];
    for (struct hstep_stored_piece *p = w->st->pieces + r->first; p < w->st->pieces + r->end; p++) {
        int error = HALFSTEP_OK;
        if (!p->resident) p->place = place;
        place += p->resident ? 0 : hstep_space_of(p);
        if (is_active(w, p) && (error = begin_read(w->st, p, w->s->call.micro))) return error;
    }
    return HALFSTEP_OK;
}

static int begin_writes(const struct walk *w, const struct visit *v)
{
    const struct hstep_bundle *r = &w->st->bundles[v->bundle];
    for (const struct hstep_stored_piece *p = w->st->pieces + r->first; p < w->st->pieces + r->end && v->what != SUM;
         p++) {
        int error = HALFSTEP_OK;
        if (is_active(w, p) && (error = begin_write(w->st, p))) return error;
    }
    return HALFSTEP_OK;
}

/* Completes a piece after its update: with the scales, which are decided before, and with the weight. */
static void complete(const struct walk *w, const struct hstep_stored_piece *p)
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
    const struct hstep_bundle *r = &st->bundles[v->bundle];
    struct hstep_request s = *w->s;
    int first = st->pieces[r->first].tensor, end = st->pieces[r->end - 1].tensor + 1;
    if (first < s.call.first) first = s.call.first;
    if (end > s.call.first + s.call.n) end = s.call.first + s.call.n;
    struct hstep_context context = *s.call.context;
    context.first_chunk = st->pieces[r->first].first_chunk;
    context.end_chunk = st->pieces[r->end - 1].end_chunk;
    s.call.context = &context;
    for (int64_t i = r->first; i < r->end; i++)
        if (is_active(w, &st->pieces[i])) give_addresses(&s.o->tensors[st->pieces[i].tensor], &st->pieces[i]);
    int error = v->what == SUM ? hstep_sum_tensors(&s, first, end - first)
                               : hstep_step_tensors(&s, first, end - first, v->what == UPDATE);
    for (int64_t i = r->first; i < r->end && v->what != SUM && !error; i++)
        if (is_active(w, &st->pieces[i])) complete(w, &st->pieces[i]);
    hstep_clear_addresses(s.o, first, end - first);
    return error;
}

static int walk(const struct walk *w)
{
    const halfstep_storage *table = &w->st->table;
    struct visit now = {w->st->pieces[w->st->first_piece[w->s->call.first + w->s->call.n] - 1].bundle + 1, STEP},
                 before;
    int written = 0;
    /* Bundles above those of the call are not of its tensors, so none of them is cut and goes on in the first. */
    int more = next_visit(w, &now);
    if (!more) return HALFSTEP_OK;
    int error = begin_reads(w, &now, w->st->buffer[0]);
    if (!error) error = table->wait(table->host);
    for (int turn = 1; more && !error; turn = (turn + 1) % HSTEP_BUFFERS) {
        struct visit next = now;
        more = next_visit(w, &next);
        if (written) error = begin_writes(w, &before);
        if (!error && more) error = begin_reads(w, &next, w->st->buffer[turn]);
        if (!error) error = work(w, &now);
        if (!error) error = table->wait(table->host);
        written = 1;
        before = now;
        now = next;
    }
    if (!error) error = begin_writes(w, &before);
    return error ? error : table->wait(table->host);
}

int hstep_walk(const struct hstep_request *s, int sums_only)
{
    halfstep_optimizer *o = s->o;
    struct hstep_storage *st = o->storage;
    if (!s->call.n) return HALFSTEP_OK;
    hstep_lock(&st->lock);
    struct walk w = {.s = s,
                     .st = st,
                     .first = st->pieces[st->first_piece[s->call.first]].bundle,
                     .sums_only = sums_only,
                     .made = *s->norms_made || (o->totals && !s->call.micro)};
    /* A call that has waited for another one may find that it has failed. */
    int error = hstep_check_storage(o);
    if (!error) error = put_back(o);
    if (!error && (error = walk(&w))) error = hstep_fail_storage(o, error, 1);
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
    error = atomic_load(&st->broken) ? error : hstep_fail_storage(o, error, 1);
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
static int initialize(const halfstep_optimizer *o, const struct hstep_stored_piece *p, void *const *weights)
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
        struct hstep_stored_piece *p = &st->pieces[i];
        if (!p->resident) p->place = st->buffer[i % 2];
        if ((error = initialize(o, p, weights))) return error;
        error = st->table.wait(st->table.host);
        if (!error) error = begin_write(st, p);
        if (error) return hstep_fail_storage(o, error, 1);
        p->loaded = p->resident;
    }
    if ((error = st->table.wait(st->table.host))) return hstep_fail_storage(o, error, 1);
    for (int i = 0; i < o->n_tensors; i++)
        for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) o->tensors[i].slot[s].grid = 1.0f;
    hstep_show(o, 0, o->n_tensors);
    hstep_keep_counts(o);
    return hstep_commit(o, weights);
}

/* ---- Reading and writing slots and bytes ---- */

int hstep_is_stored(const halfstep_optimizer *o, int tensor, int slot)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    return o->storage && (hstep_keeps(t, slot, 0) || hstep_keeps(t, slot, 1));
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
        const int64_t of_a_piece = t->piece_rows * t->n_columns, end = (a->first / of_a_piece + 1) * of_a_piece;
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

/* One plane of a tensor. */
struct plane {
    int tensor, slot, extra;
    uint64_t bytes;
};

static int check_bytes(const halfstep_optimizer *o, const struct plane *plane, uint64_t first, uint64_t bytes,
                       const void *data)
{
    const struct hstep_slot *s = &o->tensors[plane->tensor].slot[plane->slot];
    const char *name = o->labels[plane->tensor].name;
    const int codes = plane->slot < HALFSTEP_SLOT_STATE && !plane->extra,
              stored = plane->slot == HALFSTEP_SLOT_WEIGHT && o->storage && o->storage->table.weights;
    if (codes && !stored)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': the codes of a %s are the caller's", name,
                          plane->slot == HALFSTEP_SLOT_WEIGHT ? "weight outside of storage" : "gradient");
    if (first > plane->bytes || bytes > plane->bytes - first)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': bytes %llu + %llu (first + number) are not among %llu",
                          name, (unsigned long long)first, (unsigned long long)bytes, (unsigned long long)plane->bytes);
    if (!bytes) return HALFSTEP_OK;
    if (!data) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL data", name);
    if (stored || hstep_is_stored(o, plane->tensor, plane->slot)) return hstep_check_storage(o);
    if (!(plane->extra ? s->extra : s->code))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': slot %d has no memory yet", name, plane->slot);
    return HALFSTEP_OK;
}

/* Finds how much of a plane from byte `first` on lies in one piece, at most *bytes, and brings that piece into
 * memory. */
static int find_bytes(const halfstep_optimizer *o, const struct plane *plane, uint64_t first, uint64_t *bytes,
                      char **place)
{
    const int64_t start = o->storage->first_piece[plane->tensor], end = o->storage->first_piece[plane->tensor + 1];
    const halfstep_piece one = hstep_describe_bound(o, start);
    const uint64_t each = hstep_range_of(&one, plane->slot, plane->extra).bytes;
    /* All pieces but the last have as many rows, and their planes as many bytes. */
    int64_t number = start + (int64_t)(first / each);
    if (number >= end) number = end - 1;
    const uint64_t within = first - (uint64_t)(number - start) * each;
    const int error = hold(o, number);
    if (error) return error;
    const struct hstep_stored_piece *p = &o->storage->pieces[number];
    const halfstep_piece d = hstep_describe_bound(o, number);
    if (number + 1 < end && *bytes > each - within) *bytes = each - within;
    *place = p->place + hstep_range_of(&d, plane->slot, plane->extra).offset + within;
    return HALFSTEP_OK;
}

static int move_bytes(const halfstep_optimizer *o, int32_t tensor, int32_t slot, int32_t extra, uint64_t first,
                      uint64_t bytes, char *data, int writes)
{
    int error = hstep_check_slot(o, tensor, slot);
    if (error) return error;
    if (extra < 0 || extra > 1)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "extra = %d; allowed: 0 (codes), 1 (the extra plane)", extra);
    const struct hstep_slot *s = &o->tensors[tensor].slot[slot];
    const struct plane plane = {tensor, slot, extra, extra ? s->extra_bytes : s->code_bytes};
    if ((error = check_bytes(o, &plane, first, bytes, data)) || !bytes) return error;
    if (!o->storage || slot == HALFSTEP_SLOT_GRADIENT) {
        char *ours = (extra ? s->extra : s->code) + first;
        return hstep_wait(o, o->device->copy(&o->context, writes ? ours : data, writes ? data : ours, bytes));
    }
    for (uint64_t some; bytes; first += some, data += some, bytes -= some) {
        char *place;
        some = bytes;
        if ((error = find_bytes(o, &plane, first, &some, &place))) return error;
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
