/* Memory of states, and reading and writing slots as fp32. */
#include <stdlib.h>
#include <string.h>

#include "base/structs.h"
#include "decide/prepare.h"
#include "handle/checks.h"
#include "handle/devices/sync.h"
#include "handle/plan.h"
#include "handle/states/slots.h"
#include "handle/states/walk.h"
#include "handle/step/ahead.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

int hstep_check_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot)
{
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    int states = hstep_rule_states(o->tensors[tensor].rule);
    if (slot < 0 || slot >= HALFSTEP_SLOT_STATE + states)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has no slot %d", o->labels[tensor].name, (int)slot);
    return HALFSTEP_OK;
}

const char *hstep_slot_name(const halfstep_optimizer *o, int tensor, int slot)
{
    if (slot == HALFSTEP_SLOT_WEIGHT) return "weight";
    if (slot == HALFSTEP_SLOT_GRADIENT) return "gradient";
    return hstep_rules[o->tensors[tensor].rule].state[slot - HALFSTEP_SLOT_STATE].name;
}

/* Writes the rows and columns of what a slot stores for the part held here. */
static void shape_of(const struct hstep_tensor *t, int slot, int64_t *rows, int64_t *columns)
{
    *rows = t->n_rows;
    *columns = t->n_columns;
    hstep_extend(t, t->slot[slot].extent, rows, columns);
}

int halfstep_get_slot_info(const halfstep_optimizer *o, int32_t tensor, int32_t slot, halfstep_slot_info *info)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, info);
    int error = hstep_check_slot(o, tensor, slot);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    halfstep_slot_info ours = {.format = s->format,
                               .name = hstep_slot_name(o, tensor, slot),
                               .code_bytes = s->code_bytes,
                               .extra_bytes = s->extra_bytes,
                               .blocks_per_row = hstep_blocks_per_row(t, s->format),
                               .fell_back = s->fell_back,
                               .grid = s->root != 0,
                               .code = s->code,
                               .extra = s->extra,
                               .precise = s->precise};
    shape_of(t, slot, &ours.rows, &ours.columns);
    return hstep_give_struct(info, &ours, sizeof ours) ? HALFSTEP_OK : hstep_fail_struct(o, __func__, info);
}

/* Places the planes of all tensors one after another from `base` on, unless that is NULL. Returns the bytes that they
 * take. */
static uint64_t place_planes(halfstep_optimizer *o, char *base)
{
    uint64_t offset = 0;
    for (int i = 0; i < o->n_tensors; i++)
        for (struct hstep_cursor c = {0}; hstep_next_plane(&o->tensors[i], &c);) {
            if (base) *c.place = base + offset;
            uint64_t space = (c.bytes + 63) / 64 * 64;
            /* Planes at exact power-of-two distances compete for the same cache sets, which halves the speed. */
            if (c.bytes >= 1 << 20) space += 4096 + 64;
            /* The sum may not fit the type. No memory is that large. */
            offset = offset > UINT64_MAX - space ? UINT64_MAX : offset + space;
        }
    return offset;
}

int halfstep_state_bytes(halfstep_optimizer *o, uint64_t *bytes)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, bytes);
    *bytes = place_planes(o, NULL);
    return HALFSTEP_OK;
}

/* Fails unless memory is the device's. The error text begins with `whose`. */
static int check_owned(const halfstep_optimizer *o, const void *memory, const char *whose)
{
    int error = hstep_check_owned(o, memory);
    return error ? hstep_fail(o, error, "%s: %s", whose, o->device->why()) : HALFSTEP_OK;
}

/* Rows after which the first error codes repeat. */
enum { ERROR_ROWS = 256 };

/* Returns byte number `place` of the error codes that a packed weight begins with. */
static unsigned char first_errors(uint64_t place)
{
    place *= 0x9e3779b1;
    return (unsigned char)(((place ^ place >> 15) * 0x2c1b3c6d & 0xffffffff) >> 24);
}

/* Writes the first error codes of a packed weight. Codes alone do not say where in its step a weight lies. If all error
 * codes began at 0, in the middle of a step, a model that computes with codes would see nothing of updates until a
 * weight has moved half a step. They begin spread over the step instead, so that the mean of many codes follows from
 * the first update on. They are the same for every cut of the tensor. */
int hstep_spread_errors(const halfstep_optimizer *o, const struct hstep_tensor *t)
{
    const struct hstep_slot *s = &t->slot[HALFSTEP_SLOT_WEIGHT];
    if (hstep_formats[s->format].geometry != HALFSTEP_GEOMETRY_PACKED || !s->extra_bytes) return HALFSTEP_OK;
    const int64_t width = (int64_t)s->extra_bytes / t->n_rows, first = t->first_column / 2;
    const int64_t whole = (int64_t)hstep_extra_bytes(s->format, 1, t->row_length);
    const int64_t used = (t->n_columns + 1) / 2, some = t->n_rows < ERROR_ROWS ? t->n_rows : ERROR_ROWS;
    unsigned char *rows = calloc((size_t)some, (size_t)width);
    if (!rows)
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "out of memory for %lld bytes of first error codes",
                          (long long)(some * width));
    int error = HALFSTEP_OK;
    for (int64_t row = 0; row < some; row++)
        for (int64_t i = 0; i < used; i++) {
            const int64_t at = (t->first_row + row) % ERROR_ROWS * whole + first + i;
            rows[row * width + i] = first_errors((uint64_t)at) & (i == used - 1 && t->n_columns % 2 ? 15 : 255);
        }
    for (int64_t row = 0; row < t->n_rows && !error; row += some) {
        const int64_t n = t->n_rows - row < some ? t->n_rows - row : some;
        error = o->device->copy(&o->context, s->extra + row * width, rows, (uint64_t)(n * width));
    }
    if (!error) error = hstep_wait(o, HALFSTEP_OK);
    free(rows);
    return error;
}

static int place_all(halfstep_optimizer *o, void *memory, uint64_t bytes)
{
    if (o->device->touch && o->n_tensors) {
        place_planes(o, memory);
        o->device->touch(&o->context, &o->plan);
    }
    int error = hstep_fetch(o);
    if (error || (error = hstep_wait(o, o->device->zero(&o->context, memory, bytes)))) return error;
    hstep_changed(o, 0, o->n_tensors);
    place_planes(o, memory);
    for (int i = 0; i < o->n_tensors; i++)
        for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) o->tensors[i].slot[s].grid = 1.0f;
    for (int i = 0; i < o->n_tensors; i++)
        if ((error = hstep_spread_errors(o, &o->tensors[i]))) return error;
    hstep_show(o, 0, o->n_tensors);
    return HALFSTEP_OK;
}

/* Fails if the states are in storage. */
static int check_in_memory(const halfstep_optimizer *o)
{
    return o->storage ? hstep_fail(o, HALFSTEP_ERROR_ORDER,
                                   "the states are in storage; end that first by halfstep_bind_storage() with NULL")
                      : HALFSTEP_OK;
}

/* Fails if the states are in storage, or have memory, because initial values would be lost on steps that have
 * counted. */
static int check_unplaced(const halfstep_optimizer *o)
{
    int error = check_in_memory(o);
    if (error) return error;
    return o->states_placed
               ? hstep_fail(o, HALFSTEP_ERROR_ORDER,
                            "the states have memory already, and a second call would set them to their initial values; "
                            "make a new optimizer to begin anew")
               : HALFSTEP_OK;
}

int halfstep_bind_states(halfstep_optimizer *o, void *memory, uint64_t bytes)
{
    HSTEP_NEED(o, o);
    const uint64_t needed = place_planes(o, NULL);
    int error = check_unplaced(o);
    if (error) return error;
    if (needed && !memory) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "memory for the states is NULL");
    if ((uintptr_t)memory % 64)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "memory for the states must be aligned to 64 bytes");
    if (bytes < needed)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "the states need %llu bytes, %llu were given",
                          (unsigned long long)needed, (unsigned long long)bytes);
    if (needed) error = check_owned(o, memory, "memory for states");
    if (!error) error = hstep_settle(o);
    if (!error) error = place_all(o, memory, needed);
    if (!error) o->states_placed = 1;
    return error;
}

int halfstep_allocate_states(halfstep_optimizer *o)
{
    HSTEP_NEED(o, o);
    const uint64_t bytes = place_planes(o, NULL);
    int error = check_unplaced(o);
    if (error) return error;
    if (bytes > SIZE_MAX / 2)
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "the states need %llu bytes, more than a process can have",
                          (unsigned long long)bytes);
    void *memory;
    error = o->device->allocate(&o->context, bytes, &memory);
    if (error == HALFSTEP_ERROR_MEMORY)
        return hstep_fail(o, error,
                          "out of memory: the states need %llu bytes; free some, or choose smaller formats "
                          "('halfstep plan' forecasts them)",
                          (unsigned long long)bytes);
    if (error) return hstep_why(o, error);
    error = hstep_settle(o);
    if (!error) error = place_all(o, memory, bytes);
    if (error) {
        o->device->release(&o->context, memory);
        return error;
    }
    o->memory = memory;
    o->states_placed = 1;
    return HALFSTEP_OK;
}

int halfstep_bind_slot(halfstep_optimizer *o, int32_t tensor, int32_t slot, void *code, void *extra)
{
    HSTEP_NEED(o, o);
    int error = hstep_check_slot(o, tensor, slot);
    if (error) return error;
    struct hstep_slot *s = &o->tensors[tensor].slot[slot];
    const char *name = o->labels[tensor].name;
    if (slot != HALFSTEP_SLOT_GRADIENT && (error = check_in_memory(o))) return error;
    if (slot < HALFSTEP_SLOT_STATE && code)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT,
                          "tensor '%s': weights and gradients cannot be bound; pass them to each step", name);
    if ((slot >= HALFSTEP_SLOT_STATE && s->code_bytes && !code) || (s->extra_bytes && !extra))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': memory for %s is NULL", name,
                          hstep_slot_name(o, tensor, slot));
    /* Nothing is read or written at the address of a slot without bytes. */
    if (code && s->code_bytes) error = check_owned(o, code, name);
    if (!error && extra && s->extra_bytes) error = check_owned(o, extra, name);
    if (!error) error = hstep_settle(o);
    if (!error) error = hstep_fetch(o);
    if (error) return error;
    hstep_changed(o, tensor, 1);
    s->code = code;
    s->extra = extra;
    if (slot != HALFSTEP_SLOT_GRADIENT && (code || extra)) o->states_placed = 1;
    return HALFSTEP_OK;
}

/* Errors with ORDER, because a slot has no memory yet. */
static int fail_unbound(const halfstep_optimizer *o, int tensor, const char *slot)
{
    return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': %s has no memory yet; bind or allocate the states first",
                      o->labels[tensor].name, slot);
}

int hstep_check_bound(const halfstep_optimizer *o, int first, int n)
{
    for (int i = first; i < first + n; i++)
        for (int s = 0; s < HSTEP_SLOTS; s++) {
            const struct hstep_slot *slot = &o->tensors[i].slot[s];
            if (o->storage && s != HALFSTEP_SLOT_GRADIENT) continue;
            if ((s >= HALFSTEP_SLOT_STATE && slot->code_bytes && !slot->code) || (slot->extra_bytes && !slot->extra))
                return fail_unbound(o, i, hstep_slot_name(o, i, s));
        }
    return HALFSTEP_OK;
}

/* ---- Reading and writing ---- */

static int check_rows(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data, int64_t first_row,
                      int64_t n_rows, const void *values)
{
    int error = hstep_check_slot(o, tensor, slot);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    int64_t rows, columns;
    shape_of(t, slot, &rows, &columns);
    if (first_row < 0 || n_rows < 0 || first_row > rows || n_rows > rows - first_row)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE,
                          "tensor '%s': rows %lld + %lld (first + number) are not among the %lld held here",
                          o->labels[tensor].name, (long long)first_row, (long long)n_rows, (long long)rows);
    if (s->format < 0)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': %s stores nothing", o->labels[tensor].name,
                          hstep_slot_name(o, tensor, slot));
    if (!n_rows || !columns) return HALFSTEP_OK;
    if (!values || (slot < HALFSTEP_SLOT_STATE && !data))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL data", o->labels[tensor].name);
    if (hstep_is_stored(o, tensor, slot)) return hstep_check_storage(o);
    if ((slot >= HALFSTEP_SLOT_STATE && !s->code) || (s->extra_bytes && !s->extra))
        return fail_unbound(o, tensor, hstep_slot_name(o, tensor, slot));
    return HALFSTEP_OK;
}

static struct hstep_access access_of(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data,
                                     int64_t first_row, int64_t n_rows)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    void *place = slot < HALFSTEP_SLOT_STATE ? (void *)(uintptr_t)data : t->slot[slot].code;
    int64_t rows, columns;
    shape_of(t, slot, &rows, &columns);
    return (struct hstep_access){&o->context, t, slot, place, first_row * columns, (first_row + n_rows) * columns};
}

static int read_elements(const halfstep_optimizer *o, int32_t tensor, const struct hstep_access *a, float *out)
{
    if (hstep_is_stored(o, tensor, a->slot)) return hstep_read_stored(o, tensor, a, out);
    return hstep_why(o, o->device->read(a, out));
}

static int read_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data, int64_t first_row,
                     int64_t n_rows, float *out)
{
    int error = check_rows(o, tensor, slot, data, first_row, n_rows, out);
    if (error || (error = hstep_fetch(o))) return error;
    struct hstep_access a = access_of(o, tensor, slot, data, first_row, n_rows);
    if (slot < HALFSTEP_SLOT_STATE && a.end > a.first && (error = check_owned(o, data, o->labels[tensor].name)))
        return error;
    return read_elements(o, tensor, &a, out);
}

static int check_values(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const float *in, int64_t n)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    const int block = slot >= HALFSTEP_SLOT_STATE && hstep_formats[s->format].block;
    for (int64_t i = 0; i < n && (block || s->nonneg); i++) {
        uint32_t bits;
        memcpy(&bits, in + i, 4);
        if ((bits & 0x7fffffff) >= 0x7f800000)
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': element %lld of %s is not finite",
                              o->labels[tensor].name, (long long)i, hstep_slot_name(o, tensor, slot));
        if (s->nonneg && in[i] < 0.0f)
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': element %lld of %s is negative",
                              o->labels[tensor].name, (long long)i, hstep_slot_name(o, tensor, slot));
    }
    return HALFSTEP_OK;
}

static int write_slot(halfstep_optimizer *o, int32_t tensor, int32_t slot, void *data, int64_t first_row,
                      int64_t n_rows, const float *in)
{
    int error = check_rows(o, tensor, slot, data, first_row, n_rows, in);
    if (error || (error = hstep_fetch(o))) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_format *f = &hstep_formats[t->slot[slot].format];
    struct hstep_access a = access_of(o, tensor, slot, data, first_row, n_rows);
    int64_t first = a.first, end = a.end, whole = t->n_rows * t->n_columns; /* used only for formats that vectors never
                                                                               have */
    if ((error = check_values(o, tensor, slot, in, end - first))) return error;
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT && (first % f->block || (end % f->block && end != whole)))
        return hstep_fail(o, HALFSTEP_ERROR_RANGE,
                          "tensor '%s': rows %lld + %lld (first + number) are not whole blocks of %d elements ('%s')",
                          o->labels[tensor].name, (long long)first_row, (long long)n_rows, f->block, f->name);
    if (f->geometry == HALFSTEP_GEOMETRY_TENSOR && whole && (end - first != whole || !hstep_is_whole(t)))
        return hstep_fail(o, HALFSTEP_ERROR_RANGE,
                          "tensor '%s': '%s' has one scale, so all of %s must be written at once",
                          o->labels[tensor].name, f->name, hstep_slot_name(o, tensor, slot));
    if (slot < HALFSTEP_SLOT_STATE && end > first && (error = check_owned(o, data, o->labels[tensor].name)))
        return error;
    hstep_forget_results(o, tensor, 1);
    if (hstep_is_stored(o, tensor, slot)) return hstep_write_stored(o, tensor, &a, in);
    return hstep_wait(o, o->device->write(&a, in));
}

static int read_average(const halfstep_optimizer *o, int32_t tensor, const void *weight, int64_t first_row,
                        int64_t n_rows, float *out)
{
    int error = read_slot(o, tensor, HALFSTEP_SLOT_WEIGHT, weight, first_row, n_rows, out);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_group *g = &o->groups[t->group];
    for (int i = 0; i < hstep_rule_states(t->rule) && t->full_steps; i++) {
        const struct hstep_state *state = &hstep_rules[t->rule].state[i];
        if (state->role != HALFSTEP_ROLE_WEIGHT || !state->beta) continue;
        float part = (float)(1.0 - 1.0 / hstep_state_beta(g, i));
        float other[HSTEP_TILE];
        struct hstep_access all = access_of(o, tensor, HALFSTEP_SLOT_STATE + i, NULL, first_row, n_rows), a = all;
        if (all.first < all.end && !a.data && !o->storage) return fail_unbound(o, tensor, state->name);
        for (a.first = all.first; a.first < all.end; a.first = a.end) {
            a.end = all.end - a.first > HSTEP_TILE ? a.first + HSTEP_TILE : all.end;
            if ((error = read_elements(o, tensor, &a, other))) return error;
            for (int64_t j = 0; j < a.end - a.first; j++) {
                float *w = &out[a.first - all.first + j];
                *w = *w + part * (other[j] - *w);
            }
        }
    }
    return HALFSTEP_OK;
}

/* Public functions. */

int halfstep_read_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data, int64_t first_row,
                       int64_t n_rows, float *out)
{
    HSTEP_NEED(o, o);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, read_slot(o, tensor, slot, data, first_row, n_rows, out));
}

int halfstep_write_slot(halfstep_optimizer *o, int32_t tensor, int32_t slot, void *data, int64_t first_row,
                        int64_t n_rows, const float *in)
{
    HSTEP_NEED(o, o);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, write_slot(o, tensor, slot, data, first_row, n_rows, in));
}

/* Reads the weights of all tensors into `values`, or writes them. Checks all of them before the first is moved. */
static int move_weights(halfstep_optimizer *o, void *const *weights, float *const *values, int writes)
{
    int error = HALFSTEP_OK;
    if (!o->n_tensors)
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "there is no tensor that has a weight; add one first");
    for (int moves = 0; moves < 2; moves++)
        for (int i = 0; i < o->n_tensors && !error; i++) {
            const struct hstep_tensor *t = &o->tensors[i];
            if (!t->n_rows || !t->n_columns) continue;
            if (!moves) error = check_rows(o, i, HALFSTEP_SLOT_WEIGHT, weights[i], 0, t->n_rows, values[i]);
            else if (writes) error = write_slot(o, i, HALFSTEP_SLOT_WEIGHT, weights[i], 0, t->n_rows, values[i]);
            else error = read_slot(o, i, HALFSTEP_SLOT_WEIGHT, weights[i], 0, t->n_rows, values[i]);
            if (!moves && !error) error = check_owned(o, weights[i], o->labels[i].name);
        }
    return error;
}

int halfstep_read_weights(const halfstep_optimizer *o, void *const *weights, float *const *out)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, weights);
    HSTEP_NEED(o, out);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, move_weights((halfstep_optimizer *)(uintptr_t)o, weights, out, 0)); /* it only reads */
}

int halfstep_write_weights(halfstep_optimizer *o, void *const *weights, float *const *in)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, weights);
    HSTEP_NEED(o, in);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, move_weights(o, weights, in, 1));
}

int halfstep_read_average(const halfstep_optimizer *o, int32_t tensor, const void *weight, int64_t first_row,
                          int64_t n_rows, float *out)
{
    HSTEP_NEED(o, o);
    struct hstep_fp fp = hstep_fp_enter();
    return hstep_fp_return(fp, read_average(o, tensor, weight, first_row, n_rows, out));
}

int halfstep_saturated(const halfstep_optimizer *o, int32_t tensor, const void *data, uint64_t *count)
{
    HSTEP_NEED(o, o);
    HSTEP_NEED(o, count);
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    struct hstep_access a = access_of(o, tensor, HALFSTEP_SLOT_WEIGHT, data, 0, t->n_rows);
    if (a.end && !data)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL weights", o->labels[tensor].name);
    *count = 0;
    if (hstep_formats[t->slot[HALFSTEP_SLOT_WEIGHT].format].code_bits != 16 || !a.end) return HALFSTEP_OK;
    if ((error = check_owned(o, data, o->labels[tensor].name))) return error;
    return hstep_why(o, o->device->saturated(&a, count));
}
