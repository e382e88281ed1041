/* Elements are handled in grains: 32 elements of index space, or whole blocks if a state has longer ones. Whole grains
 * are updated in place. The partial grains at the ends of a track are copied into scratch memory and padded with zeros.
 * Scratch memory collects as many of them as it holds and is then handled like any other tile. */
#include "device/host/tile.h"

#include <string.h>

#include "base/squares.h"
#include "tables/layout.h"

/* ---- Slates ---- */

void hstep_run_slate(const struct hstep_call *call, enum hstep_pass pass, int first, int n, int backward,
                     halfstep_task task)
{
    if (!n) return;
    const struct hstep_chunk *chunks = call->plan.chunks;
    const struct hstep_tensor *t = &call->plan.tensors[first], *last = t + n - 1;
    struct hstep_slate b = {call, pass, t->first_chunk, last->first_chunk + last->chunks, 0};
    if (hstep_is_for_matrix(pass)) {
        b.first = hstep_matrix_chunk(t, chunks, call->matrix);
        b.end = hstep_matrix_chunk(t, chunks, call->matrix + 1);
    }
    const struct hstep_context *c = call->context;
    if (c->end_chunk && b.first < c->first_chunk) b.first = c->first_chunk;
    if (c->end_chunk && b.end > c->end_chunk) b.end = c->end_chunk;
    if (b.first >= b.end) return;
    b.task = chunks[b.first].task;
    (backward ? hstep_run_backwards : hstep_run)(call->context, task, &b, chunks[b.end - 1].task - b.task + 1);
}

/* Returns the chunks of a task that belong to the slate. A task at either end of a slate may also have chunks of other
 * tensors. */
struct hstep_span hstep_task_span(const struct hstep_slate *b, int64_t i)
{
    const struct hstep_plan *plan = &b->call->plan;
    int64_t first = plan->tasks[b->task + i], end = plan->tasks[b->task + i + 1];
    return (struct hstep_span){plan->chunks + (first < b->first ? b->first : first),
                               plan->chunks + (end > b->end ? b->end : end)};
}

struct hstep_bytes hstep_chunk_bytes(const struct hstep_tensor *t, const struct hstep_chunk *c, int slot, int extra)
{
    int64_t (*const offset)(const struct hstep_tensor *, int, int64_t) = extra ? hstep_extra_offset : hstep_code_offset;
    const struct hstep_slot *s = &t->slot[slot];
    const int64_t first = c->track * t->track_length + c->offset,
                  end = first + (c->tracks - 1) * t->track_length + c->length, start = offset(t, s->format, first);
    const int64_t all = (int64_t)(extra ? s->extra_bytes : s->code_bytes);
    return (struct hstep_bytes){start, (end == t->tracks * t->track_length ? all : offset(t, s->format, end)) - start};
}

/* ---- First touch ---- */

enum { PAGE = 4096 };

static void touch_bytes(char *plane, struct hstep_bytes bytes)
{
    for (int64_t i = 0; i < bytes.n; i += PAGE) *(volatile char *)(plane + bytes.first + i) = 0;
}

/* Touches the planes of each state for one chunk. */
static void touch_chunk(const struct hstep_tensor *t, const struct hstep_chunk *c)
{
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (slot->format < 0 || s == HALFSTEP_SLOT_GRADIENT || slot->extent != HALFSTEP_EXTENT_ELEMENTS) continue;
        if (s >= HALFSTEP_SLOT_STATE && slot->code) touch_bytes(slot->code, hstep_chunk_bytes(t, c, s, 0));
        if (slot->extra_bytes && slot->extra) touch_bytes(slot->extra, hstep_chunk_bytes(t, c, s, 1));
    }
}

static void touch_task(void *argument, int64_t i)
{
    struct hstep_span span = hstep_task_span(argument, i);
    const struct hstep_slate *b = argument;
    for (const struct hstep_chunk *c = span.first; c < span.end; c++) touch_chunk(&b->call->plan.tensors[c->tensor], c);
}

/* Touches states from the threads that will step them. The system places a page near the thread that writes to it
 * first. */
void hstep_host_touch(const struct hstep_context *c, const struct hstep_plan *plan)
{
    struct hstep_call call = {.context = c, .plan = *plan};
    hstep_run_slate(&call, HSTEP_PASS_UPDATE, 0, plan->n_tensors, 0, touch_task);
}

/* ---- Places ---- */

/* Returns the slot after s: those of the rule, then WORK. */
static int next_slot(const struct hstep_work *w, int s) { return s + 1 == w->t->slots ? HSTEP_SLOT_WORK : s + 1; }

/* Writes the numbers that n elements from `element` on have in a vector over rows or columns. Those of rows are
 * multiplied by the factor of their matrix. */
static void expand_vector(const struct hstep_work *w, int s, int64_t element, int64_t n, float *out)
{
    const float *vector = (const float *)(void *)w->code[s];
    int64_t columns = w->t->n_columns, row = element / columns, column = element % columns;
    const float *factors = hstep_extent_of(w, s) == HALFSTEP_EXTENT_ROWS ? hstep_factors_of(w, s) : NULL;
    for (int64_t done = 0, some; done < n; done += some, column = 0, row++) {
        const int64_t matrix = hstep_matrix_of(w->t, row);
        some = columns - column < n - done ? columns - column : n - done;
        if (factors) {
            const float number = vector[row] * factors[matrix];
            for (int64_t i = 0; i < some; i++) out[done + i] = number;
        } else {
            memcpy(out + done, vector + matrix * columns + column, (size_t)some * sizeof *out);
        }
    }
}

void hstep_place(const struct hstep_work *w, int64_t element, struct hstep_places *places)
{
    int64_t left = w->t->n_rows * w->t->n_columns - element;
    int vectors = 0;
    for (int s = 0; s < HSTEP_WORK_SLOTS; s = next_slot(w, s)) {
        places->code[s] = places->extra[s] = NULL;
        if (w->format[s] < 0) continue;
        if (hstep_extent_of(w, s) != HALFSTEP_EXTENT_ELEMENTS) {
            places->code[s] = (char *)places->vector[vectors];
            expand_vector(w, s, element, left < HSTEP_TILE ? left : HSTEP_TILE, places->vector[vectors++]);
            continue;
        }
        if (!element) {
            places->code[s] = w->code[s];
            places->extra[s] = w->extra[s];
            continue;
        }
        places->code[s] = w->code[s] + hstep_code_offset(w->t, w->format[s], element);
        if (w->extra[s]) places->extra[s] = w->extra[s] + hstep_extra_offset(w->t, w->format[s], element);
    }
}

struct hstep_fragment hstep_take_grain(const struct hstep_work *w, struct hstep_stretch *s)
{
    const int64_t lead = hstep_grain_lead(w->t, s->element, s->index);
    return (struct hstep_fragment){hstep_take(s, w->t->grain - lead), lead};
}

/* Moves the held elements of fragments between one slot and scratch memory. out: 1 moves to the slot. */
static void move_parts(const struct hstep_work *w, const struct hstep_fragment *part, int n, int s, char *code,
                       char *extra, int out)
{
    const struct hstep_format *f = &hstep_formats[w->format[s]];
    for (int i = 0; i < n; i++) {
        int64_t at = (int64_t)i * w->t->grain + part[i].lead, element = part[i].held.element, count = part[i].held.n;
        char *mine = code + hstep_code_bytes(w->format[s], 1, at),
             *theirs = w->code[s] + hstep_code_offset(w->t, w->format[s], element);
        memcpy(out ? theirs : mine, out ? mine : theirs, hstep_code_bytes(w->format[s], 1, count));
        if (!w->extra[s]) continue;
        mine = extra + (hstep_is_of_states(f) ? at / f->block * f->scale_bits : at * f->extra_bits) / 8;
        theirs = w->extra[s] + hstep_extra_offset(w->t, w->format[s], element);
        memcpy(out ? theirs : mine, out ? mine : theirs, hstep_extra_bytes(w->format[s], 1, count));
    }
}

void hstep_gather(const struct hstep_work *w, const struct hstep_fragment *part, int n, struct hstep_scratch *scratch,
                  struct hstep_places *places)
{
    for (int s = 0; s < HSTEP_WORK_SLOTS; s = next_slot(w, s)) {
        places->code[s] = scratch->code[s];
        places->extra[s] = scratch->extra[s];
        if (w->format[s] < 0) continue;
        memset(scratch->code[s], 0, (size_t)(n * w->t->grain) * 4);
        memset(scratch->extra[s], 0, (size_t)(n * w->t->grain) * 2);
        if (hstep_extent_of(w, s) != HALFSTEP_EXTENT_ELEMENTS) {
            for (int i = 0; i < n; i++)
                expand_vector(w, s, part[i].held.element, part[i].held.n,
                              (float *)(void *)scratch->code[s] + (int64_t)i * w->t->grain + part[i].lead);
            continue;
        }
        move_parts(w, part, n, s, scratch->code[s], scratch->extra[s], 0);
    }
}

void hstep_scatter(const struct hstep_work *w, const struct hstep_fragment *part, int n, struct hstep_scratch *scratch)
{
    for (int s = 0; s < HSTEP_WORK_SLOTS; s = next_slot(w, s)) {
        if (!hstep_writes(w, s)) continue;
        struct hstep_work one = *w;
        /* The scale of a whole tensor is written once, after its update. */
        if (hstep_has_one_scale(w->format[s])) one.extra[s] = NULL;
        move_parts(&one, part, n, s, scratch->code[s], scratch->extra[s], 1);
    }
}

/* ---- Tiles ---- */

struct hstep_fused hstep_fused_start(const struct hstep_work *w)
{
    struct hstep_fused f = {.k = w->u->k,
                            .gradient_scale = w->u->gradient_scale,
                            .mean = w->mean,
                            .l2 = w->u->l2,
                            .weight_to_slot = w->u->weight_to_slot,
                            .slot_to_weight = w->u->slot_to_weight,
                            .cautious = w->u->cautious,
                            .decay = w->u->decay,
                            .cautious_decay = w->u->cautious_decay};
    memcpy(f.onto, w->u->onto, sizeof f.onto);
    for (int s = w->t->slots; s < HSTEP_SLOTS; s++) f.format[s] = HSTEP_FORMAT_NONE;
    for (int s = 0; s < w->t->slots; s++) {
        f.format[s] = w->format[s];
        f.grid[s] = w->t->slot[s].grid;
        if (w->t->slot[s].nonneg) f.nonneg |= 1u << s;
        if (w->format[s] >= 0 && hstep_slot_role(w->t, s) == HALFSTEP_ROLE_WEIGHT) f.as_weight |= 1u << s;
    }
    return f;
}

void hstep_fused_place(const struct hstep_work *w, const struct hstep_stretch *s, struct hstep_fused *f)
{
    struct hstep_places places;
    f->index = s->index;
    f->n = s->n;
    hstep_place(w, s->element, &places);
    memcpy(f->code, places.code, sizeof f->code);
    memcpy(f->extra, places.extra, sizeof f->extra);
}

void hstep_fill_words(const struct hstep_kernels *kernels, int generator, const struct hstep_key *strand,
                      uint64_t index, uint32_t *words, int64_t n)
{
    /* Only the mixer's keys change at segments, but cutting there is right for every generator. */
    while (n > 0) {
        uint64_t pair = index / 2;
        int64_t left = (int64_t)(HSTEP_SEGMENT_WORDS - (pair & (HSTEP_SEGMENT_WORDS - 1)));
        int64_t count = n / 2 < left ? n / 2 : left;
        kernels->random[generator](strand, pair, words, count);
        words += count;
        index += 2 * (uint64_t)count;
        n -= 2 * count;
    }
}

void hstep_load(const struct hstep_work *w, const struct hstep_places *places, struct hstep_tile *tile, int64_t n)
{
    const struct hstep_kernels *kernels = w->context->kernels;
    if (w->format[HALFSTEP_SLOT_WEIGHT] >= 0)
        kernels->format[w->format[0]].decode[0](tile->weight, places->code[0], places->extra[0], n);
    else memset(tile->weight, 0, (size_t)n * 4);
    if (w->format[HALFSTEP_SLOT_GRADIENT] >= 0) {
        kernels->format[w->format[1]].decode[0](tile->gradient, places->code[1], places->extra[1], n);
        kernels->gradient(tile->gradient, tile->weight, w->u->gradient_scale, w->mean, w->u->l2, n);
    } else if (w->pass == HSTEP_PASS_CHANGE) { /* the transformed direction stands in for the gradient */
        kernels->format[HSTEP_FORMAT_f32].decode[0](tile->gradient, places->code[HSTEP_SLOT_WORK], NULL, n);
    }
    for (int i = 0; i < w->t->slots - HALFSTEP_SLOT_STATE; i++) {
        int s = HALFSTEP_SLOT_STATE + i, from = hstep_source_of(w, s);
        tile->state[i] = tile->states[i];
        if (w->format[s] >= 0)
            kernels->format[w->format[s]].decode[w->t->slot[s].nonneg](tile->states[i], places->code[from],
                                                                       places->extra[from], n);
        else memset(tile->states[i], 0, (size_t)n * 4);
        if (w->format[s] >= 0 && w->t->slot[s].root) kernels->scale(tile->states[i], w->t->slot[s].grid, n);
    }
}

void hstep_run_function(const struct hstep_work *w, struct hstep_tile *tile, float *const *out, int64_t n)
{
    const struct hstep_kernels *kernels = w->context->kernels;
    const float *k = w->u->k, *weight = tile->weight, *gradient = tile->gradient;
    const int rule = w->t->rule, mode = w->mode;
    switch (w->function) {
    case HSTEP_FUNCTION_RULE: kernels->rule[rule][mode](k, weight, gradient, tile->change, tile->state, n); break;
    case HSTEP_FUNCTION_NORMS: kernels->norms[rule][mode](k, weight, gradient, out, tile->state, n); break;
    case HSTEP_FUNCTION_CROSS:
        kernels->factored[rule][w->pair].cross[mode](k, weight, gradient, out[0], tile->state, n);
        break;
    case HSTEP_FUNCTION_DIRECTION:
        kernels->matrix[rule].direction[mode](k, gradient, tile->change, tile->state, n);
        break;
    case HSTEP_FUNCTION_CHANGE: kernels->matrix[rule].change(k, weight, gradient, tile->change, n); break;
    }
}

double hstep_chunk_squares(const struct hstep_kernels *kernels, const float *x, int64_t n)
{
    HSTEP_ALIGNED float chunk[HSTEP_TILE] = {0};
    double sums[16];
    uint32_t maximum;
    memcpy(chunk, x, (size_t)n * sizeof *chunk);
    kernels->format[HSTEP_FORMAT_f32].squares((const char *)chunk, (n + HSTEP_CELL - 1) / HSTEP_CELL * HSTEP_CELL, sums,
                                              &maximum);
    return hstep_tree_sum(sums);
}
