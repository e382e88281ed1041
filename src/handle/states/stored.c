/* Reading and writing slots in storage, and the bytes of slots wherever they are. */
#include "handle/states/stored.h"

#include "handle/checks.h"
#include "handle/states/slots.h"
#include "handle/states/walk.h"
#include "handle/step/ahead.h"
#include "tables/layout.h"

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
    const int error = hstep_hold(o, number);
    if (error) return error;
    hstep_give_addresses(t, &st->pieces[number]);
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
        if (a->slot == HALFSTEP_SLOT_WEIGHT) hstep_copy_weight(o, &o->storage->pieces[o->storage->held], a->data);
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
    const int64_t start = o->storage->first_piece[stream->tensor], end = o->storage->first_piece[stream->tensor + 1];
    const halfstep_piece one = hstep_describe_bound(o, start);
    const uint64_t each = hstep_range_of(&one, stream->slot, stream->extra).bytes;
    /* All pieces but the last have as many rows, and their streams as many bytes. */
    int64_t number = start + (int64_t)(first / each);
    if (number >= end) number = end - 1;
    const uint64_t within = first - (uint64_t)(number - start) * each;
    const int error = hstep_hold(o, number);
    if (error) return error;
    const struct hstep_stored_piece *p = &o->storage->pieces[number];
    const halfstep_piece d = hstep_describe_bound(o, number);
    if (number + 1 < end && *bytes > each - within) *bytes = each - within;
    *place = p->place + hstep_range_of(&d, stream->slot, stream->extra).offset + within;
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
