/* The work of an update: constants of a step, then chunks of tensors, tile by tile or through a fused kernel.
 *
 * Elements are taken in units of 32 of index space, or in whole blocks where a state has longer ones. Whole units are worked
 * on in place; what is left over at the ends of a run is copied, padded with zeros, into a staging tile, which collects
 * as many units as it holds before it is worked on like any other. Over 500 lines because every way through a chunk shares
 * the geometry and the staging. */
#include "update.h"

#include <math.h>
#include <string.h>

#include "dispatch.h"
#include "grid.h"
#include "matrix.h"
#include "statistics.h"
#include "step.h"
#include "threads.h"

int hstep_use_fused = 1;

/* ---- Preparing ---- */

static int decay_of(const halfstep_optimizer *o, const struct hstep_tensor *t, double *lr, double *decay, double *l2)
{
    const struct hstep_group *g = &o->groups[t->group];
    double weight_decay = g->hyper[HSTEP_WEIGHT_DECAY], reference;
    *decay = *l2 = 0.0;
    if (weight_decay == 0.0) return HALFSTEP_OK;
    switch (g->decay) {
    case HSTEP_DECAY_L2:
        *l2 = weight_decay;
        break;
    case HSTEP_DECAY_DECOUPLED:
        *decay = *lr * weight_decay;
        break;
    case HSTEP_DECAY_FULLY:
        reference = g->hyper[HSTEP_REFERENCE_LR] != 0.0 ? g->hyper[HSTEP_REFERENCE_LR] : g->first_lr;
        if (reference == 0.0)
            return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': fully-decoupled decay needs a reference_lr above 0",
                              t->name);
        *decay = *lr / reference * weight_decay;
        break;
    case HSTEP_DECAY_PROXIMAL:
        /* (w - lr u) / (1 + lr wd) = w - (lr u + lr wd w) / (1 + lr wd). */
        *decay = *lr * weight_decay / (1.0 + *lr * weight_decay);
        *lr /= 1.0 + *lr * weight_decay;
        break;
    }
    return HALFSTEP_OK;
}

/* The role of the state in a slot; 0 for the weight and the gradient. */
static int state_role(const halfstep_optimizer *o, const struct hstep_tensor *t, int slot)
{
    if (slot < HALFSTEP_SLOT_STATE) return 0;
    return hstep_rules[o->groups[t->group].recipe.rule].state[slot - HALFSTEP_SLOT_STATE].role;
}

int hstep_prepare_update(const halfstep_optimizer *o, int index, double clip, int micro, const double *norms,
                         const struct hstep_update *same, struct hstep_update *u)
{
    const struct hstep_tensor *t = &o->tensors[index];
    const struct hstep_group *g = &o->groups[t->group];
    const struct hstep_rule *rule = &hstep_rules[g->recipe.rule];
    const double *hyper = g->hyper;
    /* 1 where there are none, so that no mean over the tensor is 0 / 0. */
    double elements = t->rows && t->row_length ? (double)t->rows * (double)t->row_length : 1.0;
    double base = hstep_group_lr(g), lr = base, decay, l2;
    memset(u, 0, sizeof *u);
    int error = decay_of(o, t, &lr, &decay, &l2);
    if (error) return error;
    u->micro = micro;
    if (rule->kind == HSTEP_RAW_GRADIENT) {
        u->gradient_scale = 1.0f;
    } else {
        double sign = hyper[HSTEP_MAXIMIZE] != 0.0 ? -1.0 : 1.0, scale = sign * o->gradient_scale * clip;
        u->gradient_scale = (float)scale;
        u->l2 = (float)l2;
        if (hyper[HSTEP_CENTRALIZE] != 0.0 && t->ndim >= 2 && t->row_length > 1) {
            if (t->n_columns != t->row_length)
                return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': centralize needs whole rows", t->name);
            if (t->unit > HSTEP_GROUP && t->dense && t->row_length % t->unit)
                return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': centralize needs blocks that end with rows",
                                  t->name);
            u->centralize = hyper[HSTEP_CENTRALIZE] * scale;
        }
    }
    struct hstep_own own = {.id = t->id, .rows = t->rows, .row_length = t->row_length, .elements = elements,
                            .matrix = t->matrix, .scalar = u->scalar};
    struct hstep_prepare p = {.lr = lr, .decay = decay, .t = t->state_steps + 1, .full = t->full_steps + 1, .norm = norms,
                              .own = &own, .looked = &u->own};
    memcpy(u->scalar, t->scalar, sizeof u->scalar);
    if (same)
        memcpy(u->k, same->k, sizeof u->k);
    else
        hstep_prepare_rule(g, &p, u->k);
    int sum = rule->norms;
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (slot->format < 0) continue;
        const struct hstep_format *f = &hstep_formats[slot->format];
        if (norms && o->kernels->format[slot->format].tensor_scale)
            u->scale[s] = o->kernels->format[slot->format].tensor_scale(norms[sum++], elements);
        if (state_role(o, t, s) == HALFSTEP_ROLE_WEIGHT) {
            if (!t->full_steps) u->first |= 1u << s;
            if ((same ? same->copy : (uint32_t)p.copy) && !u->copy) u->copy = 1u << s;
        }
        if (s >= HALFSTEP_SLOT_STATE && rule->state[s - HALFSTEP_SLOT_STATE].unless) u->mode |= RULE_OPTION;
        /* Not with one scale for a tensor, which is there to show what its authors published. */
        if (f->block && f->geometry != HALFSTEP_GEOMETRY_TENSOR) u->mode |= RULE_CLAMP;
        if (slot->root) u->grid[s] = hstep_next_grid(slot->grid, hstep_state_beta(g, s - HALFSTEP_SLOT_STATE));
        u->onto[s] = hstep_onto_grid(u->grid[s], slot->root);
        if (f->stochastic && s != HALFSTEP_SLOT_GRADIENT) u->stochastic |= 1u << s;
    }
    u->still = base == 0.0;
    u->fused = hstep_use_fused && t->fused && l2 == 0.0 && u->centralize == 0.0 && !u->still && !micro &&
               (!u->stochastic || hstep_generator_id(o->generator) != HSTEP_GENERATOR_PHILOX7);
    return HALFSTEP_OK;
}

/* ---- Words ---- */

/* Lattices are for what is stored finely. A rounding that is uniform by itself is not so given the stored value, which
 * remembers earlier words: in block codes, whose steps are no small part of a value, that would bias the states that feed on
 * themselves. They keep independent words. */
static struct hstep_key slot_stream(const halfstep_optimizer *o, const struct hstep_tensor *t, int s)
{
    if (hstep_generator_id(o->generator) != HSTEP_GENERATOR_LATTICE || hstep_formats[t->slot[s].format].block)
        return hstep_key_stream(o->seed, t->id, t->writes, (uint32_t)s);
    int weight = s == HALFSTEP_SLOT_WEIGHT || state_role(o, t, s) == HALFSTEP_ROLE_WEIGHT;
    return hstep_key_lattice(o->seed, t->id, weight ? t->full_steps : t->state_steps, (uint32_t)s);
}

/* ---- Places ---- */

void hstep_fill_words(const halfstep_optimizer *o, const struct hstep_key *stream, uint64_t index, uint32_t *words,
                      int64_t n)
{
    /* Only the mixer's keys change at segments, but cutting there is right for every generator. */
    while (n > 0) {
        uint64_t pair = index / 2;
        int64_t left = (int64_t)(HSTEP_SEGMENT_WORDS - (pair & (HSTEP_SEGMENT_WORDS - 1)));
        int64_t count = n / 2 < left ? n / 2 : left;
        o->kernels->random[o->generator](stream, pair, words, count);
        words += count;
        index += 2 * (uint64_t)count;
        n -= 2 * count;
    }
}

void hstep_run_batch(const struct hstep_batch *b, int n, halfstep_task task)
{
    const struct hstep_tensor *t = &b->o->tensors[b->first], *last = t + n - 1;
    hstep_run(b->o, task, (void *)(uintptr_t)b, last->first_chunk + last->chunks - t->first_chunk);
}

const struct hstep_chunk *hstep_batch_chunk(const struct hstep_batch *b, int64_t i)
{
    return &b->o->chunks[b->o->tensors[b->first].first_chunk + i];
}

const struct hstep_update *hstep_batch_update(const struct hstep_batch *b, int tensor)
{
    return &b->updates[tensor - b->first];
}

struct hstep_work hstep_work_start(const struct hstep_batch *b, int tensor)
{
    const halfstep_optimizer *o = b->o;
    const struct hstep_tensor *t = &o->tensors[tensor];
    const struct hstep_update *u = hstep_batch_update(b, tensor);
    enum hstep_pass pass = b->pass;
    struct hstep_work w = {.o = o, .t = t, .u = u, .pass = pass};
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        w.format[s] = t->slot[s].format;
        w.code[s] = t->slot[s].code;
        w.extra[s] = t->slot[s].extra_bytes ? t->slot[s].extra : NULL;
        if (u->stochastic >> s & 1) w.stream[s] = slot_stream(o, t, s);
        /* The matrix passes share out the slots between them; a micro-step leaves out copies of the weight. */
        if ((pass == HSTEP_PASS_DIRECTION && s == HALFSTEP_SLOT_WEIGHT && u->l2 == 0.0f) ||
            (pass == HSTEP_PASS_CHANGE && s != HALFSTEP_SLOT_WEIGHT) ||
            (u->micro && (s == HALFSTEP_SLOT_WEIGHT || state_role(o, t, s) == HALFSTEP_ROLE_WEIGHT)))
            w.format[s] = HSTEP_FORMAT_NONE;
    }
    w.code[HALFSTEP_SLOT_WEIGHT] = b->weights ? b->weights[tensor - b->first] : NULL;
    w.code[HALFSTEP_SLOT_GRADIENT] = (char *)(uintptr_t)b->gradients[tensor - b->first];
    w.format[HSTEP_SLOT_WORK] = HSTEP_FORMAT_NONE;
    if (pass == HSTEP_PASS_DIRECTION || pass == HSTEP_PASS_CHANGE) {
        w.format[HSTEP_SLOT_WORK] = HSTEP_FORMAT_f32;
        w.code[HSTEP_SLOT_WORK] = (char *)o->workspace;
    }
    return w;
}

int64_t hstep_unit_lead(const struct hstep_tensor *t, int64_t element, uint64_t index)
{
    if (t->unit == HSTEP_GROUP) return (int64_t)(index % HSTEP_GROUP);
    if (t->dense) return (int64_t)(index % (uint64_t)t->unit);
    return (t->first_column + element % t->n_columns) % t->unit;
}

void hstep_place(const struct hstep_work *w, int64_t element, struct hstep_places *places)
{
    for (int s = 0; s < HSTEP_WORK_SLOTS; s++) {
        places->code[s] = places->extra[s] = NULL;
        if (w->format[s] < 0) continue;
        places->code[s] = w->code[s] + hstep_code_offset(w->t, w->format[s], element);
        if (w->extra[s]) places->extra[s] = w->extra[s] + hstep_extra_offset(w->t, w->format[s], element);
    }
}

/* Moves the held elements of parts between one slot and its room. */
static void move_parts(const struct hstep_work *w, const struct hstep_part *part, int n, int s, char *code, char *extra,
                       int out)
{
    const struct hstep_format *f = &hstep_formats[w->format[s]];
    for (int i = 0; i < n; i++) {
        int64_t at = (int64_t)i * w->t->unit + part[i].lead, element = part[i].element, count = part[i].count;
        char *mine = code + at * f->code_bits / 8, *theirs = w->code[s] + hstep_code_offset(w->t, w->format[s], element);
        memcpy(out ? theirs : mine, out ? mine : theirs, hstep_code_bytes(w->format[s], 1, count));
        if (!w->extra[s]) continue;
        mine = extra + (f->block ? at / f->block * f->scale_bits : at * f->extra_bits) / 8;
        theirs = w->extra[s] + hstep_extra_offset(w->t, w->format[s], element);
        memcpy(out ? theirs : mine, out ? mine : theirs, hstep_extra_bytes(w->format[s], 1, count));
    }
}

void hstep_gather(const struct hstep_work *w, const struct hstep_part *part, int n, struct hstep_room *room,
                  struct hstep_places *places)
{
    for (int s = 0; s < HSTEP_WORK_SLOTS; s++) {
        places->code[s] = room->code[s];
        places->extra[s] = room->extra[s];
        if (w->format[s] < 0) continue;
        memset(room->code[s], 0, sizeof room->code[s]);
        memset(room->extra[s], 0, sizeof room->extra[s]);
        move_parts(w, part, n, s, room->code[s], room->extra[s], 0);
    }
}

/* What a pass has written, back from the room. */
static void scatter(const struct hstep_work *w, const struct hstep_part *part, int n, struct hstep_room *room)
{
    for (int s = 0; s < HSTEP_WORK_SLOTS; s++) {
        if (w->format[s] < 0 || s == HALFSTEP_SLOT_GRADIENT) continue;
        if (w->pass == HSTEP_PASS_DIRECTION ? s == HALFSTEP_SLOT_WEIGHT : s == HSTEP_SLOT_WORK) continue;
        struct hstep_work one = *w;
        /* The scale of a whole tensor is written once, after its update. */
        if (hstep_formats[w->format[s]].geometry == HALFSTEP_GEOMETRY_TENSOR) one.extra[s] = NULL;
        move_parts(&one, part, n, s, room->code[s], room->extra[s], 1);
    }
}

/* ---- Tiles ---- */

void hstep_load(const struct hstep_work *w, const struct hstep_places *places, struct hstep_tile *tile, int64_t n)
{
    const struct hstep_kernels *kernels = w->o->kernels;
    if (w->format[HALFSTEP_SLOT_WEIGHT] >= 0)
        kernels->format[w->format[0]].decode[0](tile->weight, places->code[0], places->extra[0], n);
    else
        memset(tile->weight, 0, (size_t)n * 4);
    if (w->format[HALFSTEP_SLOT_GRADIENT] >= 0) {
        kernels->format[w->format[1]].decode[0](tile->gradient, places->code[1], places->extra[1], n);
        kernels->gradient(tile->gradient, tile->weight, w->u->gradient_scale, w->mean, w->u->l2, n);
    }
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        int s = HALFSTEP_SLOT_STATE + i, from = w->u->first >> s & 1 ? HALFSTEP_SLOT_WEIGHT : s;
        tile->state[i] = tile->states[i];
        if (w->format[s] >= 0)
            kernels->format[w->format[s]].decode[w->t->slot[s].nonneg](tile->states[i], places->code[from],
                                                                       places->extra[from], n);
        else
            memset(tile->states[i], 0, (size_t)n * 4);
        if (w->format[s] >= 0 && w->t->slot[s].root) kernels->scale(tile->states[i], w->t->slot[s].grid, n);
    }
}

/* Copies n stored elements of one slot over those of another of the same format. */
static void copy_slot(const struct hstep_work *w, const struct hstep_places *places, int to, int from, int64_t n)
{
    const struct hstep_format *f = &hstep_formats[w->format[from]];
    memcpy(places->code[to], places->code[from], (size_t)(n * f->code_bits / 8));
    if (f->extra_bits) memcpy(places->extra[to], places->extra[from], (size_t)(n * f->extra_bits / 8));
}

static void encode_state(const struct hstep_work *w, const struct hstep_places *places, int s, const float *x,
                         const uint32_t *words, int64_t n)
{
    float scale = w->u->scale[s];
    char *extra = hstep_formats[w->format[s]].geometry == HALFSTEP_GEOMETRY_TENSOR ? (char *)&scale : places->extra[s];
    w->o->kernels->format[w->format[s]].encode[w->t->slot[s].nonneg](x, places->code[s], extra, words, n, 1, w->u->onto[s]);
}

/* n elements (whole units, at most a tile) at the given places. */
static void run_tile(const struct hstep_work *w, const struct hstep_places *places, uint32_t (*words)[HSTEP_TILE_WORDS],
                     int64_t n)
{
    const struct hstep_kernels *kernels = w->o->kernels;
    const struct hstep_update *u = w->u;
    int rule = w->o->groups[w->t->group].recipe.rule;
    struct hstep_tile tile;
    hstep_load(w, places, &tile, n);
    if (w->pass == HSTEP_PASS_CHANGE) {
        kernels->format[HSTEP_FORMAT_f32].decode[0](tile.gradient, places->code[HSTEP_SLOT_WORK], NULL, n);
        kernels->matrix[rule].change(u->k, tile.weight, tile.gradient, tile.change, n);
        kernels->format[w->format[0]].apply(tile.weight, tile.change, places->code[0], places->extra[0], words[0], n);
        return;
    }
    float old[HALFSTEP_MAX_STATES][HSTEP_TILE] HSTEP_ALIGNED;
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        int s = HALFSTEP_SLOT_STATE + i;
        if (w->format[s] >= 0 && state_role(w->o, w->t, s) == HALFSTEP_ROLE_WEIGHT)
            memcpy(old[i], tile.states[i], (size_t)n * 4);
    }
    if (w->pass == HSTEP_PASS_DIRECTION) {
        kernels->matrix[rule].direction[u->mode & RULE_CLAMP](u->k, tile.gradient, tile.change, tile.state, n);
        kernels->format[HSTEP_FORMAT_f32].encode[0](tile.change, places->code[HSTEP_SLOT_WORK], NULL, words[0], n, 0, 1.0f);
    } else {
        kernels->rule[rule][u->mode](u->k, tile.weight, tile.gradient, tile.change, tile.state, n);
        for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++)
            if (u->first >> s & 1 && w->format[s] >= 0) copy_slot(w, places, s, HALFSTEP_SLOT_WEIGHT, n);
        if (!u->still && !u->micro)
            kernels->format[w->format[0]].apply(tile.weight, tile.change, places->code[0], places->extra[0], words[0], n);
    }
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        int s = HALFSTEP_SLOT_STATE + i;
        if (w->format[s] < 0) continue;
        if (state_role(w->o, w->t, s) != HALFSTEP_ROLE_WEIGHT) {
            encode_state(w, places, s, tile.states[i], words[s], n);
        } else if (!u->still) {
            kernels->format[w->format[s]].apply(old[i], tile.states[i], places->code[s], places->extra[s], words[s], n);
            if (u->copy >> s & 1) copy_slot(w, places, HALFSTEP_SLOT_WEIGHT, s, n);
        }
    }
}

static void default_words(const struct hstep_work *w, uint32_t (*words)[HSTEP_TILE_WORDS])
{
    for (int s = 0; s < HSTEP_SLOTS; s++)
        if (!(w->u->stochastic >> s & 1))
            for (int i = 0; i < HSTEP_TILE_WORDS; i++) words[s][i] = 0x80008000u;
}

static void update_tiles(const struct hstep_work *w, int64_t element, uint64_t index, int64_t n)
{
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words);
    while (n > 0) {
        int64_t count = n < HSTEP_TILE ? n : HSTEP_TILE;
        struct hstep_places places;
        hstep_place(w, element, &places);
        for (int s = 0; s < HSTEP_SLOTS; s++)
            if (w->u->stochastic >> s & 1) hstep_fill_words(w->o, &w->stream[s], index, words[s], count);
        run_tile(w, &places, words, count);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

static void update_fused(const struct hstep_work *w, int64_t element, uint64_t index, int64_t n)
{
    const int second = HALFSTEP_SLOT_STATE + 1;
    while (n > 0) {
        struct hstep_key keys[HSTEP_SLOTS];
        struct hstep_places places;
        int64_t count = HSTEP_SEGMENT - (int64_t)(index % (uint64_t)HSTEP_SEGMENT);
        if (count > n) count = n;
        struct hstep_fused f = {.index = index, .n = count, .k = w->u->k, .gradient_scale = w->u->gradient_scale,
                                .grid = w->t->slot[second].grid, .onto_grid = w->u->onto[second], .key = keys};
        hstep_place(w, element, &places);
        memcpy(f.code, places.code, sizeof f.code);
        memcpy(f.extra, places.extra, sizeof f.extra);
        memset(keys, 0, sizeof keys);
        for (int s = 0; s < HSTEP_SLOTS; s++)
            if (w->u->stochastic >> s & 1)
                keys[s] = hstep_key_segment(&w->stream[s], index / (uint64_t)HSTEP_SEGMENT);
        w->t->fused->step(&f);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

/* ---- Chunks ---- */

struct staging {
    int n;
    struct hstep_part part[HSTEP_TILE / HSTEP_GROUP];
};

static void flush_staging(const struct hstep_work *w, struct staging *st)
{
    if (!st->n) return;
    struct hstep_room room;
    struct hstep_places places;
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words);
    hstep_gather(w, st->part, st->n, &room, &places);
    for (int s = 0; s < HSTEP_SLOTS; s++)
        if (w->u->stochastic >> s & 1)
            for (int i = 0; i < st->n; i++)
                hstep_fill_words(w->o, &w->stream[s], st->part[i].index, words[s] + i * w->t->unit / 2, w->t->unit);
    run_tile(w, &places, words, (int64_t)st->n * w->t->unit);
    scatter(w, st->part, st->n, &room);
    st->n = 0;
}

static void stage(const struct hstep_work *w, struct staging *st, int64_t element, uint64_t index, int64_t lead, int64_t n)
{
    st->part[st->n] = (struct hstep_part){element, index - (uint64_t)lead, (int)lead, (int)n};
    if (++st->n == HSTEP_TILE / w->t->unit) flush_staging(w, st);
}

static void update_stretch(const struct hstep_work *w, struct staging *st, int64_t element, uint64_t index, int64_t n)
{
    int64_t unit = w->t->unit, lead = hstep_unit_lead(w->t, element, index);
    if (lead) {
        int64_t count = unit - lead < n ? unit - lead : n;
        stage(w, st, element, index, lead, count);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
    int64_t whole = n / unit * unit;
    if (whole) {
        if (w->u->fused)
            update_fused(w, element, index, whole);
        else
            update_tiles(w, element, index, whole);
    }
    if (n > whole) stage(w, st, element + whole, index + (uint64_t)whole, 0, n - whole);
}

float hstep_centralized(const struct hstep_work *w, int64_t row_start)
{
    const struct hstep_slot *slot = &w->t->slot[HALFSTEP_SLOT_GRADIENT];
    const char *row = w->code[HALFSTEP_SLOT_GRADIENT] + hstep_code_offset(w->t, slot->format, row_start);
    return (float)(w->u->centralize * hstep_row_mean(w->o, slot, row, w->t->n_columns));
}

/* Every row has a mean of its own, so rows that touch in memory are taken apart again. */
static void update_rows(struct hstep_work *w, struct staging *st, int64_t element, uint64_t index, int64_t n)
{
    while (n > 0) {
        int64_t column = element % w->t->n_columns, count = w->t->n_columns - column;
        if (count > n) count = n;
        w->mean = hstep_centralized(w, element - column);
        update_stretch(w, st, element, index, count);
        flush_staging(w, st);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

static void update_task(void *argument, int64_t i)
{
    const struct hstep_batch *b = argument;
    const struct hstep_chunk *c = hstep_batch_chunk(b, i);
    const struct hstep_tensor *t = &b->o->tensors[c->tensor];
    if (hstep_batch_update(b, c->tensor)->skip || (t->matrix && b->pass == HSTEP_PASS_UPDATE)) return;
    struct hstep_fp fp = hstep_fp_enter();
    struct hstep_work w = hstep_work_start(b, c->tensor);
    struct staging st = {0};
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        int64_t element = run * t->run_length + c->offset;
        uint64_t index = t->index0 + (uint64_t)(run * t->index_stride) + (uint64_t)c->offset;
        if (w.u->centralize != 0.0 && w.format[HALFSTEP_SLOT_GRADIENT] >= 0)
            update_rows(&w, &st, element, index, c->length);
        else
            update_stretch(&w, &st, element, index, c->length);
    }
    flush_staging(&w, &st);
    hstep_fp_leave(fp);
}

static void run_pass(const halfstep_optimizer *o, int first, int n, const struct hstep_update *updates,
                     void *const *weights, const void *const *gradients, enum hstep_pass pass)
{
    struct hstep_batch b = {o, first, updates, weights, gradients, pass, NULL};
    hstep_run_batch(&b, n, update_task);
}

/* Three batches: the direction into the workspace, its transformation, the change of the weight. */
static void update_matrix(halfstep_optimizer *o, int tensor, const struct hstep_update *u, void *const *weight,
                          const void *const *gradient)
{
    const struct hstep_tensor *t = &o->tensors[tensor];
    if (u->skip || !t->runs) return;
    /* Only calls of halfstep_step_tensor() on other threads can meet here. */
    while (atomic_flag_test_and_set(&o->workspace_lock)) hstep_yield();
    run_pass(o, tensor, 1, u, weight, gradient, HSTEP_PASS_DIRECTION);
    if (!u->micro && !u->still) {
        struct hstep_fp fp = hstep_fp_enter();
        hstep_newton_schulz(o, o->workspace, t->rows, t->row_length, &u->k[MUON_A], (int)u->k[MUON_STEPS], u->k[MUON_EPS],
                            o->workspace + t->rows * t->row_length);
        hstep_fp_leave(fp);
        run_pass(o, tensor, 1, u, weight, gradient, HSTEP_PASS_CHANGE);
    }
    atomic_flag_clear(&o->workspace_lock);
}

void hstep_update_tensors(halfstep_optimizer *o, int first, int n, const struct hstep_update *updates, void *const *weights,
                          const void *const *gradients)
{
    int matrices = 0;
    for (int i = 0; i < n; i++) matrices += o->tensors[first + i].matrix;
    if (matrices < n) run_pass(o, first, n, updates, weights, gradients, HSTEP_PASS_UPDATE);
    for (int i = 0; matrices && i < n; i++)
        if (o->tensors[first + i].matrix)
            update_matrix(o, first + i, updates + i, weights ? weights + i : NULL, gradients + i);
}

void hstep_count_update(struct hstep_tensor *t, const struct hstep_update *u)
{
    t->state_steps++;
    if (t->step) *t->step = (float)t->state_steps;
    t->writes++;
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++)
        if (t->slot[s].format >= 0 && t->slot[s].extra_bytes &&
            hstep_formats[t->slot[s].format].geometry == HALFSTEP_GEOMETRY_TENSOR)
            memcpy(t->slot[s].extra, &u->scale[s], 4);
    for (int s = HALFSTEP_SLOT_STATE; s < HSTEP_SLOTS; s++)
        if (t->slot[s].root) hstep_set_grid(&t->slot[s], u->grid[s]);
    if (u->micro) return;
    t->full_steps++;
    memcpy(t->scalar, u->scalar, sizeof t->scalar);
}
