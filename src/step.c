/* One step over all tensors: statistics, decision, update. Each is one batch of independent tasks; a task handles a
 * chunk, tile by tile or through a fused kernel, and never waits for another.
 *
 * Elements are taken in groups of 32 of index space. Whole groups are worked on in place; what is left over at the ends of
 * a run is copied, padded with zeros, into a staging tile, which collects up to eight such groups before it is worked on
 * like any other. Over 500 lines because the three batches share the geometry and the staging. */
#include "step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "optimizer.h"
#include "statistics.h"
#include "threads.h"

int hstep_use_fused = 1;

/* Elements of a chunk: enough to hide a task's cost, few enough to share among many threads. It divides the segments of
 * the mixer. */
#define CHUNK ((int64_t)32768)

void hstep_run(const halfstep_optimizer *o, halfstep_task task, void *argument, int64_t n)
{
    if (o->run)
        o->run(o->host, task, argument, n);
    else
        hstep_run_tasks(o->threads ? o->threads : hstep_default_threads(), task, argument, n);
}

/* ---- Settling ---- */

static int64_t chunk_tensor(const struct hstep_tensor *t, int index, struct hstep_chunk *out)
{
    int64_t n = 0;
    if (!t->runs) return 0;
    if (t->run_length < CHUNK) {
        int64_t per_chunk = CHUNK / t->run_length;
        for (int64_t run = 0; run < t->runs; run += per_chunk, n++)
            if (out)
                out[n] = (struct hstep_chunk){index, run, t->runs - run < per_chunk ? t->runs - run : per_chunk, 0,
                                              t->run_length};
        return n;
    }
    for (int64_t run = 0; run < t->runs; run++) {
        /* Cuts at multiples of CHUNK in index space, so that a chunk lies within one segment of random words. */
        int64_t start = (int64_t)((t->index0 + (uint64_t)(run * t->index_stride)) % (uint64_t)CHUNK);
        for (int64_t offset = 0; offset < t->run_length; n++) {
            int64_t length = CHUNK - (start + offset) % CHUNK;
            if (length > t->run_length - offset) length = t->run_length - offset;
            if (out) out[n] = (struct hstep_chunk){index, run, 1, offset, length};
            offset += length;
        }
    }
    return n;
}

static const struct hstep_fused_row *find_fused(const halfstep_optimizer *o, const struct hstep_tensor *t)
{
    const char *kernel = hstep_rules[o->groups[t->group].recipe.rule].kernel;
    for (int i = 0; i < o->kernels->fused_rows; i++) {
        const struct hstep_fused_row *row = &o->kernels->fused[i];
        if (!strcmp(row->rule, kernel) && row->weight == t->slot[HALFSTEP_SLOT_WEIGHT].format &&
            row->gradient == t->slot[HALFSTEP_SLOT_GRADIENT].format &&
            row->state[0] == t->slot[HALFSTEP_SLOT_STATE].format && row->state[1] == t->slot[HALFSTEP_SLOT_STATE + 1].format)
            return row;
    }
    return NULL;
}

int hstep_settle(halfstep_optimizer *o)
{
    if (o->settled) return HALFSTEP_OK;
    int64_t n_chunks = 0;
    for (int i = 0; i < o->n_tensors; i++) n_chunks += chunk_tensor(&o->tensors[i], i, NULL);
    struct hstep_chunk *chunks = malloc((size_t)(n_chunks + 1) * sizeof *chunks);
    struct hstep_update *updates = calloc((size_t)o->n_tensors + 1, sizeof *updates);
    int64_t *statistics = malloc((size_t)halfstep_statistics_count(o) * sizeof *statistics);
    if (!chunks || !updates || !statistics) {
        free(chunks);
        free(updates);
        free(statistics);
        return hstep_fail(o, HALFSTEP_ERROR_MEMORY, "no memory for the plan of %d tensors", o->n_tensors);
    }
    n_chunks = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        struct hstep_tensor *t = &o->tensors[i];
        t->first_chunk = n_chunks;
        t->chunks = chunk_tensor(t, i, chunks + n_chunks);
        n_chunks += t->chunks;
        t->fused = find_fused(o, t);
    }
    o->chunks = chunks;
    o->n_chunks = n_chunks;
    o->updates = updates;
    o->statistics = statistics;
    o->settled = 1;
    return HALFSTEP_OK;
}

/* ---- Norm and clipping ---- */

static double norm_of(const halfstep_optimizer *o, const int64_t *squares)
{
    return sqrt(hstep_exact_round(squares)) * o->gradient_scale;
}

static double clip_factor(const halfstep_optimizer *o, double norm)
{
    double factor = o->clip_norm / (norm + 1e-6);
    return o->clip_norm > 0.0 && factor < 1.0 ? factor : 1.0;
}

/* ---- Preparing ---- */

/* same: the update of a tensor with the same group and step count, whose constants are taken over, or NULL. */
static int prepare_update(const halfstep_optimizer *o, int index, double clip, const struct hstep_update *same,
                          struct hstep_update *u)
{
    const struct hstep_tensor *t = &o->tensors[index];
    const struct hstep_group *g = &o->groups[t->group];
    const double *hyper = g->hyper;
    double lr = hstep_group_lr(g), decay = 0.0, l2 = 0.0;
    memset(u, 0, sizeof *u);
    if (hyper[HSTEP_WEIGHT_DECAY] != 0.0) {
        if (g->decay == HSTEP_DECAY_L2) {
            l2 = hyper[HSTEP_WEIGHT_DECAY];
        } else if (g->decay == HSTEP_DECAY_DECOUPLED) {
            decay = lr * hyper[HSTEP_WEIGHT_DECAY];
        } else {
            double reference = hyper[HSTEP_REFERENCE_LR] != 0.0 ? hyper[HSTEP_REFERENCE_LR] : g->first_lr;
            if (reference == 0.0)
                return hstep_fail(o, HALFSTEP_ERROR_RANGE, "tensor '%s': fully-decoupled decay needs a reference_lr above 0",
                                  t->name);
            decay = lr / reference * hyper[HSTEP_WEIGHT_DECAY];
        }
    }
    double sign = hyper[HSTEP_MAXIMIZE] != 0.0 ? -1.0 : 1.0, scale = sign * o->gradient_scale * clip;
    u->gradient_scale = (float)scale;
    u->l2 = (float)l2;
    if (hyper[HSTEP_CENTRALIZE] != 0.0 && t->ndim >= 2 && t->row_length > 1) {
        if (t->n_columns != t->row_length)
            return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "tensor '%s': centralize needs whole rows", t->name);
        u->centralize = hyper[HSTEP_CENTRALIZE] * scale;
    }
    if (same)
        memcpy(u->k, same->k, sizeof u->k);
    else
        hstep_prepare_rule(g, lr, decay, t->state_steps + 1, u->k);
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &t->slot[s];
        if (slot->format < 0 || !hstep_formats[slot->format].stochastic) continue;
        /* Nearest block codes follow a fast state well; a slow one they would never let fall. */
        int nearest = hstep_formats[slot->format].block && !slot->nonneg &&
                      1.0 - hstep_state_beta(g, s - HALFSTEP_SLOT_STATE) >= 0x1p-6;
        if (!nearest) u->stochastic |= 1u << s;
        u->clamp |= hstep_formats[slot->format].block != 0;
    }
    u->still = lr == 0.0;
    u->fused = hstep_use_fused && t->fused && l2 == 0.0 && u->centralize == 0.0 && !u->still &&
               (!u->stochastic || hstep_generator_id(o->generator) == HSTEP_GENERATOR_MIXER);
    return HALFSTEP_OK;
}

/* Tensors of one group that have made as many steps share their constants; only the first pays for the powers. */
static int prepare_all(halfstep_optimizer *o, double clip, const void *const *gradients, const int64_t *flags)
{
    int last = -1;
    for (int i = 0; i < o->n_tensors; i++) {
        struct hstep_update *u = &o->updates[i];
        const struct hstep_tensor *t = &o->tensors[i], *before = last < 0 ? NULL : &o->tensors[last];
        if (!gradients[i] || (flags && flags[i])) {
            u->skip = 1;
            continue;
        }
        int same = before && before->group == t->group && before->state_steps == t->state_steps;
        int error = prepare_update(o, i, clip, same ? &o->updates[last] : NULL, u);
        if (error) return error;
        last = i;
    }
    return HALFSTEP_OK;
}

/* ---- Updating ---- */

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

/* What a task carries from group to group. */
struct work {
    const halfstep_optimizer *o;
    const struct hstep_tensor *t;
    const struct hstep_update *u;
    char *code[HSTEP_SLOTS], *extra[HSTEP_SLOTS]; /* of the whole part held here */
    struct hstep_key stream[HSTEP_SLOTS];
    float mean; /* taken from the scaled gradient */
};

/* n elements (whole groups, at most a tile) at the given places. */
static void run_tile(const struct work *w, char *const *code, char *const *extra, uint32_t (*words)[HSTEP_TILE_WORDS],
                     int64_t n)
{
    const struct hstep_kernels *kernels = w->o->kernels;
    const struct hstep_tensor *t = w->t;
    const struct hstep_update *u = w->u;
    HSTEP_ALIGNED float weight[HSTEP_TILE], gradient[HSTEP_TILE], change[HSTEP_TILE];
    HSTEP_ALIGNED float states[HALFSTEP_MAX_STATES][HSTEP_TILE];
    float *state[HALFSTEP_MAX_STATES];
    int rule = w->o->groups[t->group].recipe.rule;
    kernels->format[t->slot[0].format].decode[0](weight, code[0], extra[0], n);
    kernels->format[t->slot[1].format].decode[0](gradient, code[1], NULL, n);
    kernels->gradient(gradient, weight, u->gradient_scale, w->mean, u->l2, n);
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        const struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_STATE + i];
        state[i] = states[i];
        if (slot->format >= 0)
            kernels->format[slot->format].decode[slot->nonneg](states[i], code[2 + i], extra[2 + i], n);
        else
            memset(states[i], 0, (size_t)n * 4);
    }
    kernels->rule[rule][u->clamp](u->k, weight, gradient, change, state, n);
    if (!u->still) kernels->format[t->slot[0].format].apply(weight, change, code[0], extra[0], words[0], n);
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        const struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_STATE + i];
        if (slot->format >= 0)
            kernels->format[slot->format].encode[slot->nonneg](states[i], code[2 + i], extra[2 + i], words[2 + i], n, 1);
    }
}

static void default_words(const struct work *w, uint32_t (*words)[HSTEP_TILE_WORDS])
{
    for (int s = 0; s < HSTEP_SLOTS; s++)
        if (!(w->u->stochastic >> s & 1))
            for (int i = 0; i < HSTEP_TILE_WORDS; i++) words[s][i] = 0x80008000u;
}

/* Bytes from the start of a stream to an element, and to the scale of its block. */
static int64_t code_offset(const struct hstep_slot *slot, int64_t element)
{
    return element * hstep_formats[slot->format].code_bits / 8;
}

static int64_t extra_offset(const struct hstep_tensor *t, const struct hstep_slot *slot, int64_t element)
{
    const struct hstep_format *f = &hstep_formats[slot->format];
    if (!f->block) return element * f->extra_bits / 8;
    int64_t row = element / t->n_columns, column = element % t->n_columns;
    return (row * hstep_blocks_per_row(t, slot->format) + column / f->block) * 2;
}

static void slot_pointers(const struct work *w, int64_t element, char **code, char **extra)
{
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        const struct hstep_slot *slot = &w->t->slot[s];
        code[s] = extra[s] = NULL;
        if (slot->format < 0) continue;
        code[s] = w->code[s] + code_offset(slot, element);
        if (w->extra[s]) extra[s] = w->extra[s] + extra_offset(w->t, slot, element);
    }
}

static void update_tiles(const struct work *w, int64_t element, uint64_t index, int64_t n)
{
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words);
    while (n > 0) {
        int64_t count = n < HSTEP_TILE ? n : HSTEP_TILE;
        char *code[HSTEP_SLOTS], *extra[HSTEP_SLOTS];
        slot_pointers(w, element, code, extra);
        for (int s = 0; s < HSTEP_SLOTS; s++)
            if (w->u->stochastic >> s & 1) hstep_fill_words(w->o, &w->stream[s], index, words[s], count);
        run_tile(w, code, extra, words, count);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

static void update_fused(const struct work *w, int64_t element, uint64_t index, int64_t n)
{
    while (n > 0) {
        struct hstep_key keys[HSTEP_SLOTS];
        int64_t count = HSTEP_SEGMENT - (int64_t)(index % (uint64_t)HSTEP_SEGMENT);
        if (count > n) count = n;
        struct hstep_fused f = {.index = index, .n = count, .k = w->u->k, .gradient_scale = w->u->gradient_scale,
                                .stochastic = w->u->stochastic, .key = keys};
        slot_pointers(w, element, f.code, f.extra);
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

/* Groups of which only a part is held here, gathered from wherever they lie. */
#define STAGED (HSTEP_TILE / HSTEP_GROUP)

struct staging {
    int n;
    struct {
        int64_t element;
        uint64_t index; /* of the group's first element, held or not */
        int lead, count;
    } group[STAGED];
};

/* Moves the held elements of every staged group between the slot and the staging tile. */
static void move_staged(const struct work *w, const struct staging *st, int s, char *code, char *extra, int out)
{
    const struct hstep_slot *slot = &w->t->slot[s];
    const struct hstep_format *f = &hstep_formats[slot->format];
    for (int i = 0; i < st->n; i++) {
        int64_t at = i * HSTEP_GROUP + st->group[i].lead, element = st->group[i].element, n = st->group[i].count;
        char *mine = code + at * f->code_bits / 8, *theirs = w->code[s] + code_offset(slot, element);
        if (out)
            memcpy(theirs, mine, (size_t)(n * f->code_bits / 8));
        else
            memcpy(mine, theirs, (size_t)(n * f->code_bits / 8));
        if (!w->extra[s]) continue;
        size_t bytes = f->block ? 2 : (size_t)(n * f->extra_bits / 8);
        mine = extra + (f->block ? i * 2 : at * f->extra_bits / 8);
        theirs = w->extra[s] + extra_offset(w->t, slot, element);
        if (out)
            memcpy(theirs, mine, bytes);
        else
            memcpy(mine, theirs, bytes);
    }
}

static void flush_staging(const struct work *w, struct staging *st)
{
    if (!st->n) return;
    HSTEP_ALIGNED char codes[HSTEP_SLOTS][HSTEP_TILE * 4], extras[HSTEP_SLOTS][HSTEP_TILE * 2];
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    char *code[HSTEP_SLOTS], *extra[HSTEP_SLOTS];
    default_words(w, words);
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        code[s] = codes[s];
        extra[s] = extras[s];
        if (w->t->slot[s].format < 0) continue;
        memset(codes[s], 0, sizeof codes[s]);
        memset(extras[s], 0, sizeof extras[s]);
        move_staged(w, st, s, code[s], extra[s], 0);
        if (w->u->stochastic >> s & 1)
            for (int i = 0; i < st->n; i++)
                hstep_fill_words(w->o, &w->stream[s], st->group[i].index, words[s] + i * HSTEP_GROUP / 2, HSTEP_GROUP);
    }
    run_tile(w, code, extra, words, st->n * HSTEP_GROUP);
    for (int s = 0; s < HSTEP_SLOTS; s++)
        if (s != HALFSTEP_SLOT_GRADIENT && w->t->slot[s].format >= 0) move_staged(w, st, s, code[s], extra[s], 1);
    st->n = 0;
}

static void stage(const struct work *w, struct staging *st, int64_t element, uint64_t index, int64_t n)
{
    int lead = (int)(index % HSTEP_GROUP);
    st->group[st->n].element = element;
    st->group[st->n].index = index - (uint64_t)lead;
    st->group[st->n].lead = lead;
    st->group[st->n].count = (int)n;
    if (++st->n == STAGED) flush_staging(w, st);
}

static void update_stretch(const struct work *w, struct staging *st, int64_t element, uint64_t index, int64_t n)
{
    int64_t lead = (int64_t)(-index % HSTEP_GROUP);
    if (lead > n) lead = n;
    if (lead) {
        stage(w, st, element, index, lead);
        element += lead;
        index += (uint64_t)lead;
        n -= lead;
    }
    int64_t whole = n / HSTEP_GROUP * HSTEP_GROUP;
    if (whole) {
        if (w->u->fused)
            update_fused(w, element, index, whole);
        else
            update_tiles(w, element, index, whole);
    }
    if (n > whole) stage(w, st, element + whole, index + (uint64_t)whole, n - whole);
}

/* Every row has a mean of its own, so rows that touch in memory are taken apart again. */
static void update_rows(struct work *w, struct staging *st, int64_t element, uint64_t index, int64_t n)
{
    while (n > 0) {
        int64_t column = element % w->t->n_columns, count = w->t->n_columns - column;
        if (count > n) count = n;
        const struct hstep_slot *slot = &w->t->slot[HALFSTEP_SLOT_GRADIENT];
        const char *row = w->code[HALFSTEP_SLOT_GRADIENT] + code_offset(slot, element - column);
        w->mean = (float)(w->u->centralize * hstep_row_mean(w->o, slot, row, w->t->n_columns));
        update_stretch(w, st, element, index, count);
        flush_staging(w, st);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

struct update {
    const halfstep_optimizer *o;
    const struct hstep_update *updates; /* of the tensors from `first_tensor` on, as are the following */
    void *const *weights;
    const void *const *gradients;
    int first_tensor;
    int64_t first_chunk;
};

static void update_task(void *argument, int64_t i)
{
    const struct update *a = argument;
    const struct hstep_chunk *c = &a->o->chunks[a->first_chunk + i];
    const struct hstep_tensor *t = &a->o->tensors[c->tensor];
    int at = c->tensor - a->first_tensor;
    if (a->updates[at].skip) return;
    struct hstep_fp fp = hstep_fp_enter();
    struct work w = {.o = a->o, .t = t, .u = &a->updates[at]};
    struct staging st = {0};
    for (int s = 0; s < HSTEP_SLOTS; s++) {
        w.code[s] = t->slot[s].code;
        w.extra[s] = t->slot[s].extra_bytes ? t->slot[s].extra : NULL;
        if (w.u->stochastic >> s & 1) w.stream[s] = hstep_key_stream(a->o->seed, t->id, t->writes, (uint32_t)s);
    }
    w.code[HALFSTEP_SLOT_WEIGHT] = a->weights[at];
    w.code[HALFSTEP_SLOT_GRADIENT] = (char *)(uintptr_t)a->gradients[at];
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        int64_t element = run * t->run_length + c->offset;
        uint64_t index = t->index0 + (uint64_t)(run * t->index_stride) + (uint64_t)c->offset;
        if (w.u->centralize != 0.0)
            update_rows(&w, &st, element, index, c->length);
        else
            update_stretch(&w, &st, element, index, c->length);
    }
    flush_staging(&w, &st);
    hstep_fp_leave(fp);
}

static void update_tensors(const halfstep_optimizer *o, int first, int n, const struct hstep_update *updates,
                           void *const *weights, const void *const *gradients)
{
    if (!n) return;
    struct update a = {o, updates, weights, gradients, first, o->tensors[first].first_chunk};
    int64_t end = o->tensors[first + n - 1].first_chunk + o->tensors[first + n - 1].chunks;
    hstep_run(o, update_task, &a, end - a.first_chunk);
}

/* ---- Steps ---- */

static int check_ready(const halfstep_optimizer *o, int first, int n, void *const *weights, const void *const *gradients)
{
    if (!o->settled) {
        if (o->n_tensors) return hstep_fail(o, HALFSTEP_ERROR_ORDER, "the states have no memory yet");
        return HALFSTEP_OK;
    }
    int error = hstep_check_bound(o, first, n);
    if (error) return error;
    for (int i = 0; weights && i < n; i++)
        if (!weights[i] && gradients[i] && o->tensors[first + i].runs)
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': a gradient, but NULL weights", o->tensors[first + i].name);
    return HALFSTEP_OK;
}

static void count_update(struct hstep_tensor *t)
{
    t->state_steps++;
    t->full_steps++;
    t->writes++;
}

static int step_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    int error = check_ready(o, 0, o->n_tensors, NULL, NULL);
    if (error) return error;
    memset(statistics, 0, (size_t)halfstep_statistics_count(o) * sizeof *statistics);
    if (!o->n_tensors) return HALFSTEP_OK;
    hstep_scan_tensors(o, 0, o->n_tensors, gradients, o->clip_norm > 0.0 ? statistics : NULL,
                       o->scan == HSTEP_SCAN_NONE ? NULL : statistics + HSTEP_STATISTICS_HEAD);
    hstep_exact_normalize(statistics);
    return HALFSTEP_OK;
}

static int step_finish(halfstep_optimizer *o, void *const *weights, const void *const *gradients,
                       const int64_t *statistics)
{
    int error = check_ready(o, 0, o->n_tensors, weights, gradients);
    if (error) return error;
    const int64_t *flags = statistics + HSTEP_STATISTICS_HEAD;
    int offenders = 0;
    for (int i = 0; i < o->n_tensors; i++) {
        if (!flags[i]) continue;
        if (!offenders++) {
            atomic_store(&o->nonfinite_tensor, i);
            hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is not finite", o->tensors[i].name);
        }
    }
    if (offenders && o->scan != HSTEP_SCAN_TENSOR) {
        atomic_fetch_add(&o->skipped, 1);
        return HALFSTEP_NONFINITE;
    }
    double norm = o->clip_norm > 0.0 ? norm_of(o, statistics) : 0.0;
    if (o->n_tensors && (error = prepare_all(o, clip_factor(o, norm), gradients, offenders ? flags : NULL))) return error;
    o->gradient_norm = norm;
    update_tensors(o, 0, o->n_tensors, o->updates, weights, gradients);
    for (int i = 0; i < o->n_tensors; i++)
        if (!o->updates[i].skip) count_update(&o->tensors[i]);
    for (int i = 0; i < o->n_groups; i++) o->groups[i].steps++;
    atomic_fetch_add(&o->skipped, (uint64_t)offenders);
    return offenders ? HALFSTEP_NONFINITE : HALFSTEP_OK;
}

static int step_tensor(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient)
{
    int error = check_ready(o, tensor, 1, &weight, &gradient);
    if (error || !gradient) return error;
    int64_t squares[HSTEP_EXACT_LIMBS] = {0}, flag = 0;
    hstep_scan_tensors(o, tensor, 1, &gradient, o->clip_norm > 0.0 ? squares : NULL, o->scan == HSTEP_SCAN_NONE ? NULL : &flag);
    if (flag) {
        atomic_fetch_add(&o->skipped, 1);
        atomic_store(&o->nonfinite_tensor, tensor);
        return hstep_fail(o, HALFSTEP_NONFINITE, "the gradient of tensor '%s' is not finite", o->tensors[tensor].name);
    }
    double norm = o->round_norm;
    if (o->clip == HSTEP_CLIP_TENSOR && o->clip_norm > 0.0) norm = norm_of(o, squares);
    struct hstep_update update;
    if ((error = prepare_update(o, tensor, clip_factor(o, norm), NULL, &update))) return error;
    update_tensors(o, tensor, 1, &update, &weight, &gradient);
    hstep_exact_normalize(squares);
    hstep_merge_squares(o->round_squares, squares);
    count_update(&o->tensors[tensor]);
    return HALFSTEP_OK;
}

/* The public faces: arguments, and the floating-point environment for what is computed on the caller's thread. */

int64_t halfstep_statistics_count(const halfstep_optimizer *o) { return o ? HSTEP_STATISTICS_HEAD + o->n_tensors : 0; }

int halfstep_step_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    if (!o || !statistics || (!gradients && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = step_begin(o, gradients, statistics);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_step_finish(halfstep_optimizer *o, void *const *weights, const void *const *gradients,
                         const int64_t *statistics)
{
    if (!o || !statistics || ((!weights || !gradients) && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = step_finish(o, weights, gradients, statistics);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_step(halfstep_optimizer *o, void *const *weights, const void *const *gradients)
{
    if (!o || ((!weights || !gradients) && o->n_tensors)) return HALFSTEP_ERROR_ARGUMENT;
    int error = check_ready(o, 0, o->n_tensors, weights, gradients);
    if (error) return error;
    int64_t none[HSTEP_STATISTICS_HEAD];
    int64_t *statistics = o->n_tensors ? o->statistics : none;
    if ((error = halfstep_step_begin(o, gradients, statistics))) return error;
    return halfstep_step_finish(o, weights, gradients, statistics);
}

int halfstep_step_tensor(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    if (tensor < 0 || tensor >= o->n_tensors)
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "there is no tensor %d (%d exist)", (int)tensor, o->n_tensors);
    struct hstep_fp fp = hstep_fp_enter();
    int result = step_tensor(o, tensor, weight, gradient);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_end_round(halfstep_optimizer *o)
{
    if (!o) return HALFSTEP_ERROR_ARGUMENT;
    o->round_norm = o->clip_norm > 0.0 ? norm_of(o, o->round_squares) : 0.0;
    o->gradient_norm = o->round_norm;
    memset(o->round_squares, 0, sizeof o->round_squares);
    for (int i = 0; i < o->n_groups; i++) o->groups[i].steps++;
    return HALFSTEP_OK;
}
