/* The work of an update: chunks of tensors, tile by tile or through a fused kernel. */
#include <string.h>

#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* ---- Tiles ---- */

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
    w->kernels->format[w->format[s]].encode[w->t->slot[s].nonneg](x, places->code[s], extra, words, n, 1,
                                                                  w->u->onto[s]);
}

/* n elements (whole units, at most a tile) at the given places. */
static void run_tile(const struct hstep_work *w, const struct hstep_places *places, uint32_t (*words)[HSTEP_TILE_WORDS],
                     int64_t n)
{
    const struct hstep_kernels *kernels = w->kernels;
    const struct hstep_update *u = w->u;
    int rule = w->t->rule;
    struct hstep_tile tile;
    hstep_load(w, places, &tile, n);
    if (w->pass == HSTEP_PASS_CHANGE) {
        kernels->format[HSTEP_FORMAT_f32].decode[0](tile.gradient, places->code[HSTEP_SLOT_WORK], NULL, n);
        kernels->matrix[rule].change(u->k, tile.weight, tile.gradient, tile.change, n);
        kernels->format[w->format[0]].apply(tile.weight, tile.change, places->code[0], places->extra[0], words[0], n);
        return;
    }
    float old[HALFSTEP_MAX_STATES][HSTEP_TILE] HSTEP_ALIGNED;
    for (int i = 0; i < w->t->slots - HALFSTEP_SLOT_STATE; i++) {
        int s = HALFSTEP_SLOT_STATE + i;
        if (w->format[s] >= 0 && hstep_slot_role(w->t, s) == HALFSTEP_ROLE_WEIGHT)
            memcpy(old[i], tile.states[i], (size_t)n * 4);
    }
    if (w->pass == HSTEP_PASS_DIRECTION) {
        kernels->matrix[rule].direction[u->mode & RULE_CLAMP](u->k, tile.gradient, tile.change, tile.state, n);
        kernels->format[HSTEP_FORMAT_f32].encode[0](tile.change, places->code[HSTEP_SLOT_WORK], NULL, words[0], n, 0,
                                                    1.0f);
    } else {
        kernels->rule[rule][u->mode](u->k, tile.weight, tile.gradient, tile.change, tile.state, n);
        if (w->t->cautious) kernels->cautious(tile.change, tile.gradient, tile.weight, u->cautious, u->decay, n);
        for (int s = HALFSTEP_SLOT_STATE; s < w->t->slots; s++)
            if (u->weight_to_slot >> s & 1 && w->format[s] >= 0) copy_slot(w, places, s, HALFSTEP_SLOT_WEIGHT, n);
        if (!u->zero_lr && !u->micro)
            kernels->format[w->format[0]].apply(tile.weight, tile.change, places->code[0], places->extra[0], words[0],
                                                n);
    }
    for (int i = 0; i < w->t->slots - HALFSTEP_SLOT_STATE; i++) {
        int s = HALFSTEP_SLOT_STATE + i;
        if (w->format[s] < 0 || w->t->slot[s].extent != HALFSTEP_EXTENT_ELEMENTS) continue;
        if (hstep_slot_role(w->t, s) != HALFSTEP_ROLE_WEIGHT) {
            encode_state(w, places, s, tile.states[i], words[s], n);
        } else if (!u->zero_lr) {
            kernels->format[w->format[s]].apply(old[i], tile.states[i], places->code[s], places->extra[s], words[s], n);
            if (u->slot_to_weight >> s & 1) copy_slot(w, places, HALFSTEP_SLOT_WEIGHT, s, n);
        }
    }
}

static void default_words(const struct hstep_work *w, uint32_t (*words)[HSTEP_TILE_WORDS], int64_t n)
{
    int64_t count = (n < HSTEP_TILE ? n : HSTEP_TILE) / 2;
    for (int s = 0; s < w->t->slots; s++)
        if (!(w->u->stochastic >> s & 1))
            for (int64_t i = 0; i < count; i++) words[s][i] = 0x80008000u;
}

static void update_tiles(const struct hstep_work *w, int64_t element, uint64_t index, int64_t n)
{
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words, n);
    while (n > 0) {
        int64_t count = n < HSTEP_TILE ? n : HSTEP_TILE;
        struct hstep_places places;
        hstep_place(w, element, &places);
        for (int s = 0; s < w->t->slots; s++)
            if (w->u->stochastic >> s & 1)
                hstep_fill_words(w->kernels, w->u->generator, &w->u->stream[s], index, words[s], count);
        run_tile(w, &places, words, count);
        element += count;
        index += (uint64_t)count;
        n -= count;
    }
}

static void update_fused(const struct hstep_work *w, int64_t element, uint64_t index, int64_t n)
{
    struct hstep_key keys[HSTEP_SLOTS];
    struct hstep_fused f = hstep_fused_start(w);
    f.key = keys;
    memset(keys, 0, sizeof keys);
    while (n > 0) {
        struct hstep_places places;
        f.index = index;
        f.n = HSTEP_SEGMENT - (int64_t)(index % (uint64_t)HSTEP_SEGMENT);
        if (f.n > n) f.n = n;
        hstep_place(w, element, &places);
        memcpy(f.code, places.code, sizeof f.code);
        memcpy(f.extra, places.extra, sizeof f.extra);
        for (int s = 0; s < w->t->slots; s++)
            if (w->u->stochastic >> s & 1)
                keys[s] = hstep_key_segment(&w->u->stream[s], index / (uint64_t)HSTEP_SEGMENT);
        w->kernels->fused(&f, hstep_fused_of(w));
        element += f.n;
        index += (uint64_t)f.n;
        n -= f.n;
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
    struct hstep_scratch scratch;
    struct hstep_places places;
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words, (int64_t)st->n * w->t->unit);
    hstep_gather(w, st->part, st->n, &scratch, &places);
    for (int s = 0; s < w->t->slots; s++)
        if (w->u->stochastic >> s & 1)
            for (int i = 0; i < st->n; i++)
                hstep_fill_words(w->kernels, w->u->generator, &w->u->stream[s], st->part[i].index,
                                 words[s] + i * w->t->unit / 2, w->t->unit);
    run_tile(w, &places, words, (int64_t)st->n * w->t->unit);
    hstep_scatter(w, st->part, st->n, &scratch);
    st->n = 0;
}

static void stage(const struct hstep_work *w, struct staging *st, int64_t element, uint64_t index, int64_t lead,
                  int64_t n)
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
        if (w->u->fused) update_fused(w, element, index, whole);
        else update_tiles(w, element, index, whole);
    }
    if (n > whole) stage(w, st, element + whole, index + (uint64_t)whole, 0, n - whole);
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

static void update_chunk(const struct hstep_batch *b, const struct hstep_chunk *c)
{
    const struct hstep_tensor *t = &b->call->plan.tensors[c->tensor];
    const struct hstep_update *u = &b->call->plan.updates[c->tensor];
    if (u->skip || (t->matrix && b->pass == HSTEP_PASS_UPDATE) || (u->zero_lr && b->pass == HSTEP_PASS_CHANGE)) return;
    struct hstep_work w = hstep_work_start(b, c->tensor);
    struct staging st;
    st.n = 0;
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        int64_t element = run * t->run_length + c->offset;
        uint64_t index = t->index0 + (uint64_t)(run * t->index_stride) + (uint64_t)c->offset;
        if (w.u->centralize != 0.0 && w.format[HALFSTEP_SLOT_GRADIENT] >= 0)
            update_rows(&w, &st, element, index, c->length);
        else update_stretch(&w, &st, element, index, c->length);
    }
    flush_staging(&w, &st);
}

static void update_task(void *argument, int64_t i)
{
    struct hstep_span span = hstep_task_span(argument, i);
    struct hstep_fp fp = hstep_fp_enter();
    for (const struct hstep_chunk *c = span.first; c < span.end; c++) update_chunk(argument, c);
    hstep_fp_leave(fp);
}

int hstep_host_update(const struct hstep_call *call, int first, int n, enum hstep_pass pass)
{
    hstep_run_batch(call, pass, first, n, !n || !call->plan.tensors[first].sums, update_task);
    return HALFSTEP_OK;
}
