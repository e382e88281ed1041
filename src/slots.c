/* Where states live, and reading and writing slots as fp32. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "grid.h"
#include "optimizer.h"
#include "structs.h"
#include "threads.h"

static int check_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot)
{
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    int states = hstep_rule_states(o->groups[o->tensors[tensor].group].recipe.rule);
    if (slot < 0 || slot >= HALFSTEP_SLOT_STATE + states)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s' has no slot %d", o->tensors[tensor].name, (int)slot);
    return HALFSTEP_OK;
}

static const char *slot_name(const halfstep_optimizer *o, int tensor, int slot)
{
    if (slot == HALFSTEP_SLOT_WEIGHT) return "weight";
    if (slot == HALFSTEP_SLOT_GRADIENT) return "gradient";
    return hstep_rules[o->groups[o->tensors[tensor].group].recipe.rule].state[slot - HALFSTEP_SLOT_STATE].name;
}

int halfstep_get_slot_info(const halfstep_optimizer *o, int32_t tensor, int32_t slot, halfstep_slot_info *info)
{
    if (!o || !info) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_slot(o, tensor, slot);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    halfstep_slot_info ours = {.format = s->format, .name = slot_name(o, tensor, slot),
                               .code_bytes = s->code_bytes, .extra_bytes = s->extra_bytes,
                               .blocks_per_row = hstep_blocks_per_row(t, s->format), .fell_back = s->fell_back,
                               .grid = s->root != 0,
                               .code = s->code, .extra = s->extra};
    return hstep_give_struct(info, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

/* Calls back for every stream that the optimizer stores beside weights and gradients, in the order of its layout. */
static void each_stream(halfstep_optimizer *o, void (*visit)(void *arg, char **place, uint64_t bytes), void *arg)
{
    for (int i = 0; i < o->n_tensors; i++)
        for (int s = 0; s < HSTEP_SLOTS; s++) {
            struct hstep_slot *slot = &o->tensors[i].slot[s];
            if (s >= HALFSTEP_SLOT_STATE && slot->code_bytes) visit(arg, &slot->code, slot->code_bytes);
            if (s != HALFSTEP_SLOT_GRADIENT && slot->extra_bytes) visit(arg, &slot->extra, slot->extra_bytes);
        }
}

struct layout {
    char *base;
    uint64_t offset;
};

static void place_stream(void *arg, char **place, uint64_t bytes)
{
    struct layout *layout = arg;
    if (layout->base) *place = layout->base + layout->offset;
    uint64_t room = (bytes + 63) / 64 * 64;
    /* Streams at exact power-of-two distances fight for the same cache sets and halve the speed. */
    if (bytes >= 1 << 20) room += 4096 + 64;
    /* All of them may be more than a number holds; no memory is as large. */
    layout->offset = layout->offset > UINT64_MAX - room ? UINT64_MAX : layout->offset + room;
}

int halfstep_state_bytes(halfstep_optimizer *o, uint64_t *bytes)
{
    if (!o || !bytes) return HALFSTEP_ERROR_ARGUMENT;
    struct layout layout = {NULL, 0};
    each_stream(o, place_stream, &layout);
    *bytes = layout.offset;
    return HALFSTEP_OK;
}

struct zeroing {
    char *memory;
    uint64_t bytes;
};

#define ZERO_PIECE ((uint64_t)4 << 20)

/* By all threads, so that a page comes to lie near the thread that will step it. */
static void zero_piece(void *arg, int64_t i)
{
    struct zeroing *z = arg;
    uint64_t start = (uint64_t)i * ZERO_PIECE, rest = z->bytes - start;
    memset(z->memory + start, 0, rest < ZERO_PIECE ? rest : ZERO_PIECE);
}

static void place_all(halfstep_optimizer *o, void *memory, uint64_t bytes)
{
    struct layout layout = {memory, 0};
    struct zeroing zeroing = {memory, bytes};
    each_stream(o, place_stream, &layout);
    hstep_run(o, zero_piece, &zeroing, (int64_t)((bytes + ZERO_PIECE - 1) / ZERO_PIECE));
    for (int i = 0; i < o->n_tensors; i++)
        for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++) hstep_set_grid(&o->tensors[i].slot[s], 1.0f);
}

int halfstep_bind_states(halfstep_optimizer *o, void *memory, uint64_t bytes)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    uint64_t needed;
    halfstep_state_bytes(o, &needed);
    if (needed && !memory) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "the states need memory");
    if ((uintptr_t)memory % 64) return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "memory for states must be 64-byte aligned");
    if (bytes < needed)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "the states need %llu bytes, %llu were given",
                          (unsigned long long)needed, (unsigned long long)bytes);
    int error = hstep_settle(o);
    if (error) return error;
    place_all(o, memory, needed);
    hstep_free(o->memory);
    o->memory = NULL;
    return HALFSTEP_OK;
}

int halfstep_allocate_states(halfstep_optimizer *o)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    uint64_t bytes;
    halfstep_state_bytes(o, &bytes);
    if (bytes > SIZE_MAX / 2)
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "the states need %llu bytes", (unsigned long long)bytes);
    void *memory = hstep_allocate((size_t)bytes);
    if (!memory) return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "no memory for %llu bytes of states", (unsigned long long)bytes);
    int error = hstep_settle(o);
    if (error) {
        hstep_free(memory);
        return error;
    }
    place_all(o, memory, bytes);
    hstep_free(o->memory);
    o->memory = memory;
    return HALFSTEP_OK;
}

int halfstep_bind_slot(halfstep_optimizer *o, int32_t tensor, int32_t slot, void *code, void *extra)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_slot(o, tensor, slot);
    if (error) return error;
    struct hstep_slot *s = &o->tensors[tensor].slot[slot];
    const char *name = o->tensors[tensor].name;
    if (slot < HALFSTEP_SLOT_STATE && code)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': weights and gradients are given at each step", name);
    if ((slot >= HALFSTEP_SLOT_STATE && s->code_bytes && !code) || (s->extra_bytes && !extra))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': %s needs memory", name, slot_name(o, tensor, slot));
    if ((error = hstep_settle(o))) return error;
    s->code = code;
    s->extra = extra;
    return HALFSTEP_OK;
}

int hstep_check_bound(const halfstep_optimizer *o, int first, int n)
{
    for (int i = first; i < first + n; i++)
        for (int s = 0; s < HSTEP_SLOTS; s++) {
            const struct hstep_slot *slot = &o->tensors[i].slot[s];
            if ((s >= HALFSTEP_SLOT_STATE && slot->code_bytes && !slot->code) || (slot->extra_bytes && !slot->extra))
                return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': %s has no memory yet", o->tensors[i].name,
                                  slot_name(o, i, s));
        }
    return HALFSTEP_OK;
}

/* ---- Reading and writing ---- */

/* A piece of up to a tile of elements, which begins where a block does: its elements, and how many of the first are not
 * asked for. */
struct piece {
    int64_t element;
    int n, skip;
};

static int64_t padded(int format, int64_t n)
{
    int64_t unit = hstep_unit_of(format);
    return (n + unit - 1) / unit * unit;
}

/* Between a slot and room for one tile. */
static void move_piece(const struct hstep_tensor *t, const struct hstep_slot *s, char *code, const struct piece *p,
                       char *code_room, char *extra_room, int out)
{
    char *mine = code + hstep_code_offset(t, s->format, p->element);
    memcpy(out ? mine : code_room, out ? code_room : mine, hstep_code_bytes(s->format, 1, p->n));
    if (!s->extra_bytes) return;
    mine = s->extra + hstep_extra_offset(t, s->format, p->element);
    memcpy(out ? mine : extra_room, out ? extra_room : mine, hstep_extra_bytes(s->format, 1, p->n));
}

/* The elements of a piece, in order. code is read only. */
static void decode_piece(const halfstep_optimizer *o, const struct hstep_tensor *t, const struct hstep_slot *s,
                         const void *code, const struct piece *p, float *plain)
{
    HSTEP_ALIGNED char code_room[HSTEP_TILE * 4] = {0}, extra_room[HSTEP_TILE * 2] = {0};
    HSTEP_ALIGNED float x[HSTEP_TILE];
    move_piece(t, s, (char *)(uintptr_t)code, p, code_room, extra_room, 0);
    o->kernels->format[s->format].decode[s->nonneg](x, code_room, extra_room, padded(s->format, p->n));
    if (s->root) o->kernels->scale(x, s->grid, padded(s->format, p->n));
    o->kernels->to_plain(x, plain, padded(s->format, p->n));
}

static int check_rows(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data, int64_t first_row,
                      int64_t n_rows, const void *values)
{
    int error = check_slot(o, tensor, slot);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    if (first_row < 0 || n_rows < 0 || first_row > t->n_rows || n_rows > t->n_rows - first_row)
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': rows %lld + %lld are not among the %lld held here", t->name,
                          (long long)first_row, (long long)n_rows, (long long)t->n_rows);
    if (s->format < 0)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': %s stores nothing", t->name, slot_name(o, tensor, slot));
    if (!n_rows || !t->n_columns) return HALFSTEP_OK;
    if (!values || (slot < HALFSTEP_SLOT_STATE && !data))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL data", t->name);
    if ((slot >= HALFSTEP_SLOT_STATE && !s->code) || (s->extra_bytes && !s->extra))
        return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': %s has no memory yet", t->name, slot_name(o, tensor, slot));
    return HALFSTEP_OK;
}

/* Pieces in order, up to element `end`: along each row for blocks of rows, else straight through memory. */
static int next_piece(const struct hstep_tensor *t, int format, int64_t first, int64_t end, struct piece *p)
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

static int read_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data, int64_t first_row,
                     int64_t n_rows, float *out)
{
    int error = check_rows(o, tensor, slot, data, first_row, n_rows, out);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    HSTEP_ALIGNED float plain[HSTEP_TILE];
    int64_t first = first_row * t->n_columns, end = (first_row + n_rows) * t->n_columns;
    struct piece p = {0};
    while (next_piece(t, s->format, first, end, &p)) {
        decode_piece(o, t, s, slot < HALFSTEP_SLOT_STATE ? data : s->code, &p, plain);
        memcpy(out + (p.element + p.skip - first), plain + p.skip, (size_t)(p.n - p.skip) * 4);
    }
    return HALFSTEP_OK;
}

static int check_values(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const float *in, int64_t n)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_slot *s = &t->slot[slot];
    int block = hstep_formats[s->format].block;
    for (int64_t i = 0; i < n && (block || s->nonneg); i++) {
        uint32_t bits;
        memcpy(&bits, in + i, 4);
        if ((bits & 0x7fffffff) >= 0x7f800000)
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': element %lld of %s is not finite", t->name, (long long)i,
                              slot_name(o, tensor, slot));
        if (s->nonneg && in[i] < 0.0f)
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': element %lld of %s is negative", t->name, (long long)i,
                              slot_name(o, tensor, slot));
    }
    return HALFSTEP_OK;
}

/* The scale of a state that has one for the whole tensor, from its new values. */
static float tensor_scale(const halfstep_optimizer *o, const struct hstep_tensor *t, const struct hstep_slot *s,
                          const float *in, int64_t n)
{
    const struct hstep_kernels *kernels = o->kernels;
    HSTEP_ALIGNED float plain[HSTEP_TILE], x[HSTEP_TILE], y[HSTEP_TILE];
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        double sums[16];
        uint32_t largest;
        memset(plain, 0, sizeof plain);
        memcpy(plain, in + i, (size_t)(n - i < HSTEP_TILE ? n - i : HSTEP_TILE) * 4);
        kernels->from_plain(plain, x, HSTEP_TILE);
        kernels->format[s->format].norm[s->nonneg](x, y, HSTEP_TILE);
        kernels->to_plain(y, plain, HSTEP_TILE);
        kernels->format[HSTEP_FORMAT_f32].squares((const char *)plain, HSTEP_TILE, sums, &largest);
        sum += hstep_tree_sum(sums);
    }
    return kernels->format[s->format].tensor_scale(sqrt(sum), (double)t->rows * (double)t->row_length);
}

static int write_slot(halfstep_optimizer *o, int32_t tensor, int32_t slot, void *data, int64_t first_row, int64_t n_rows,
                      const float *in)
{
    int error = check_rows(o, tensor, slot, data, first_row, n_rows, in);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    struct hstep_slot *s = &t->slot[slot];
    const struct hstep_format *f = &hstep_formats[s->format];
    int64_t first = first_row * t->n_columns, end = (first_row + n_rows) * t->n_columns, whole = t->n_rows * t->n_columns;
    if ((error = check_values(o, tensor, slot, in, end - first))) return error;
    if (f->geometry == HALFSTEP_GEOMETRY_FLAT && (first % f->block || (end % f->block && end != whole)))
        return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': rows %lld + %lld are not whole blocks of %d ('%s')", t->name,
                          (long long)first_row, (long long)n_rows, f->block, f->name);
    float scale = 0.0f;
    int one_scale = f->geometry == HALFSTEP_GEOMETRY_TENSOR && whole;
    if (one_scale) {
        if (end - first != whole || t->n_rows != t->rows || t->n_columns != t->row_length)
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': '%s' has one scale, so all of %s is written at once",
                              t->name, f->name, slot_name(o, tensor, slot));
        scale = tensor_scale(o, t, s, in, whole);
    }
    HSTEP_ALIGNED char code[HSTEP_TILE * 4], extra[HSTEP_TILE * 2];
    HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE], nothing[HSTEP_TILE] = {0};
    HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS];
    /* The random number that is half of everything: stochastic formats round to nearest with it. */
    for (int i = 0; i < HSTEP_TILE_WORDS; i++) words[i] = 0x80008000u;
    const float onto = hstep_onto_grid(s->grid, s->root);
    struct piece p = {0};
    while (next_piece(t, s->format, first, end, &p)) {
        memset(plain, 0, sizeof plain);
        memcpy(plain, in + (p.element - first), (size_t)p.n * 4);
        /* A second moment of -0 is one of 0, and its sign bit is not for the codes. */
        for (int i = 0; i < p.n && s->nonneg; i++) plain[i] = fabsf(plain[i]);
        if (one_scale) memcpy(extra, &scale, 4);
        o->kernels->from_plain(plain, x, padded(s->format, p.n));
        /* A weight is written as a step writes it, minus nothing, so that it saturates; with a second stream that would start
         * from what is there. */
        if (slot == HALFSTEP_SLOT_WEIGHT && !f->extra_bits)
            o->kernels->format[s->format].apply(x, nothing, code, extra, words, padded(s->format, p.n));
        else
            o->kernels->format[s->format].encode[s->nonneg](x, code, extra, words, padded(s->format, p.n),
                                                            slot >= HALFSTEP_SLOT_STATE, onto);
        move_piece(t, s, slot < HALFSTEP_SLOT_STATE ? data : s->code, &p, code, extra, 1);
    }
    return HALFSTEP_OK;
}

static int read_average(const halfstep_optimizer *o, int32_t tensor, const void *weight, int64_t first_row, int64_t n_rows,
                        float *out)
{
    int error = read_slot(o, tensor, HALFSTEP_SLOT_WEIGHT, weight, first_row, n_rows, out);
    if (error) return error;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_group *g = &o->groups[t->group];
    for (int i = 0; i < hstep_rule_states(g->recipe.rule) && t->full_steps; i++) {
        const struct hstep_state *state = &hstep_rules[g->recipe.rule].state[i];
        if (state->role != HALFSTEP_ROLE_WEIGHT || !state->beta) continue;
        float part = (float)(1.0 - 1.0 / hstep_state_beta(g, i));
        HSTEP_ALIGNED float other[HSTEP_TILE];
        const struct hstep_slot *s = &t->slot[HALFSTEP_SLOT_STATE + i];
        int64_t first = first_row * t->n_columns, end = (first_row + n_rows) * t->n_columns;
        if (first < end && !s->code)
            return hstep_fail(o, HALFSTEP_ERROR_ORDER, "tensor '%s': %s has no memory yet", t->name, state->name);
        struct piece p = {0};
        while (next_piece(t, s->format, first, end, &p)) {
            decode_piece(o, t, s, s->code, &p, other);
            for (int j = 0; j < p.n; j++) {
                float *w = &out[p.element - first + j];
                *w = *w + part * (other[j] - *w);
            }
        }
    }
    return HALFSTEP_OK;
}

/* The public faces. */

int halfstep_read_slot(const halfstep_optimizer *o, int32_t tensor, int32_t slot, const void *data, int64_t first_row,
                       int64_t n_rows, float *out)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = read_slot(o, tensor, slot, data, first_row, n_rows, out);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_write_slot(halfstep_optimizer *o, int32_t tensor, int32_t slot, void *data, int64_t first_row, int64_t n_rows,
                        const float *in)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = write_slot(o, tensor, slot, data, first_row, n_rows, in);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_read_average(const halfstep_optimizer *o, int32_t tensor, const void *weight, int64_t first_row, int64_t n_rows,
                          float *out)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = read_average(o, tensor, weight, first_row, n_rows, out);
    hstep_fp_leave(fp);
    return result;
}
