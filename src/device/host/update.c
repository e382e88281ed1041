/* Updates chunks of tensors, tile by tile or by a fused kernel. */
#include <string.h>

#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* ---- Tiles ---- */

/* Copies n stored elements of one slot over those of another of the same format. */
static void copy_slot(const struct hstep_work *w, const struct hstep_places *places, int to, int from, int64_t n)
{
    const int format = w->format[from];
    memcpy(places->code[to], places->code[from], hstep_code_bytes(format, 1, n));
    if (hstep_formats[format].extra_bits)
        memcpy(places->extra[to], places->extra[from], hstep_extra_bytes(format, 1, n));
}

static void encode_state(const struct hstep_work *w, const struct hstep_places *places, int s, const float *x,
                         const uint32_t *words, int64_t n)
{
    float scale = w->u->scale[s];
    char *extra = hstep_has_one_scale(w->format[s]) ? (char *)&scale : places->extra[s];
    w->context->kernels->format[w->format[s]].encode[w->t->slot[s].nonneg](x, places->code[s], extra, words, n, 1,
                                                                           w->u->onto[s]);
}

/* Updates n elements, whole grains and at most a tile, at the given addresses. */
static void run_tile(const struct hstep_work *w, const struct hstep_places *places, uint32_t (*words)[HSTEP_TILE_WORDS],
                     int64_t n)
{
    const struct hstep_format_kernels *format = w->context->kernels->format;
    const struct hstep_update *u = w->u;
    struct hstep_tile tile;
    float old[HALFSTEP_MAX_STATES][HSTEP_TILE] HSTEP_ALIGNED;
    hstep_load(w, places, &tile, n);
    for (int s = HALFSTEP_SLOT_STATE; s < w->t->slots; s++)
        if (w->format[s] >= 0 && hstep_slot_role(w->t, s) == HALFSTEP_ROLE_WEIGHT)
            memcpy(old[s - HALFSTEP_SLOT_STATE], tile.state[s - HALFSTEP_SLOT_STATE], (size_t)n * 4);
    hstep_run_function(w, &tile, NULL, n);
    if (w->t->cautious && w->function == HSTEP_FUNCTION_RULE)
        w->context->kernels->cautious(tile.change, tile.gradient, tile.weight, u->cautious, u->decay, n);
    if (hstep_decays_cautiously(w)) w->context->kernels->decay(tile.change, tile.weight, u->cautious_decay, n);
    for (int s = HALFSTEP_SLOT_STATE; s < w->t->slots; s++)
        if (hstep_writes(w, s) && hstep_source_of(w, s) != s) copy_slot(w, places, s, HALFSTEP_SLOT_WEIGHT, n);
    if (hstep_writes(w, HALFSTEP_SLOT_WEIGHT))
        format[w->format[0]].apply(tile.weight, tile.change, places->code[0], places->extra[0], words[0], n);
    if (hstep_writes(w, HSTEP_SLOT_WORK))
        format[HSTEP_FORMAT_f32].encode[0](tile.change, places->code[HSTEP_SLOT_WORK], NULL, words[0], n, 0, 1.0f);
    for (int s = HALFSTEP_SLOT_STATE; s < w->t->slots; s++) {
        float *state = tile.state[s - HALFSTEP_SLOT_STATE];
        if (!hstep_writes(w, s)) continue;
        if (hstep_slot_role(w->t, s) != HALFSTEP_ROLE_WEIGHT) {
            encode_state(w, places, s, state, words[s], n);
        } else if (!u->zero_lr) {
            format[w->format[s]].apply(old[s - HALFSTEP_SLOT_STATE], state, places->code[s], places->extra[s], words[s],
                                       n);
            if (u->slot_to_weight >> s & 1) copy_slot(w, places, HALFSTEP_SLOT_WEIGHT, s, n);
        }
    }
}

/* Fills in the random words of n elements from element `index` on, for the slots that use them. */
static void fill_words(const struct hstep_work *w, uint64_t index, int64_t n, uint32_t (*words)[HSTEP_TILE_WORDS],
                       int64_t from)
{
    for (int s = 0; s < w->t->slots; s++)
        if (w->u->stochastic >> s & 1)
            hstep_fill_words(w->context->kernels, w->u->generator, &w->u->strand[s], index, words[s] + from / 2, n);
}

/* Fills in the word that rounds to nearest, for the slots that use no random words. */
static void default_words(const struct hstep_work *w, uint32_t (*words)[HSTEP_TILE_WORDS], int64_t n)
{
    int64_t count = (n < HSTEP_TILE ? n : HSTEP_TILE) / 2;
    for (int s = 0; s < w->t->slots; s++)
        if (!(w->u->stochastic >> s & 1))
            for (int64_t i = 0; i < count; i++) words[s][i] = 0x80008000u;
}

static void update_tiles(const struct hstep_work *w, struct hstep_stretch s)
{
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words, s.n);
    while (s.n > 0) {
        const struct hstep_stretch one = hstep_take(&s, HSTEP_TILE);
        struct hstep_places places;
        hstep_place(w, one.element, &places);
        fill_words(w, one.index, one.n, words, 0);
        run_tile(w, &places, words, one.n);
    }
}

static void update_fused(const struct hstep_work *w, struct hstep_stretch s)
{
    struct hstep_key keys[HSTEP_SLOTS];
    struct hstep_fused f = hstep_fused_start(w);
    f.key = keys;
    memset(keys, 0, sizeof keys);
    while (s.n > 0) {
        const struct hstep_stretch one = hstep_take(&s, HSTEP_SEGMENT - (int64_t)(s.index % (uint64_t)HSTEP_SEGMENT));
        hstep_fused_place(w, &one, &f);
        for (int slot = 0; slot < w->t->slots; slot++)
            if (w->u->stochastic >> slot & 1)
                keys[slot] = hstep_key_segment(&w->u->strand[slot], one.index / (uint64_t)HSTEP_SEGMENT);
        w->context->kernels->fused(&f, hstep_fused_row(w->t, w->u));
    }
}

/* ---- Chunks ---- */

struct staging {
    int n;
    struct hstep_fragment part[HSTEP_TILE / HSTEP_CELL];
};

/* Updates the staged fragments as one tile. */
static void flush_staging(const struct hstep_work *w, struct staging *st)
{
    if (!st->n) return;
    const int grain = w->t->grain;
    struct hstep_scratch scratch;
    struct hstep_places places;
    HSTEP_ALIGNED uint32_t words[HSTEP_SLOTS][HSTEP_TILE_WORDS];
    default_words(w, words, (int64_t)st->n * grain);
    hstep_gather(w, st->part, st->n, &scratch, &places);
    for (int i = 0; i < st->n; i++)
        fill_words(w, st->part[i].held.index - (uint64_t)st->part[i].lead, grain, words, (int64_t)i * grain);
    run_tile(w, &places, words, (int64_t)st->n * grain);
    hstep_scatter(w, st->part, st->n, &scratch);
    st->n = 0;
}

static void stage(const struct hstep_work *w, struct staging *st, struct hstep_fragment part)
{
    st->part[st->n] = part;
    if (++st->n == HSTEP_TILE / w->t->grain) flush_staging(w, st);
}

static void update_stretch(const struct hstep_work *w, struct staging *st, struct hstep_stretch s)
{
    if (hstep_grain_lead(w->t, s.element, s.index)) stage(w, st, hstep_take_grain(w, &s));
    const struct hstep_stretch whole = hstep_take(&s, s.n / w->t->grain * w->t->grain);
    if (whole.n && w->u->fused) update_fused(w, whole);
    else if (whole.n) update_tiles(w, whole);
    if (s.n) stage(w, st, (struct hstep_fragment){s, 0});
}

/* Updates a stretch row by row, each with the mean of its gradient. */
static void update_rows(struct hstep_work *w, struct staging *st, struct hstep_stretch s)
{
    while (s.n > 0) {
        const int64_t column = s.element % w->t->n_columns;
        w->mean = hstep_centralized(w, s.element - column);
        update_stretch(w, st, hstep_take(&s, w->t->n_columns - column));
        flush_staging(w, st);
    }
}

static void copy_bytes(char *to, const char *from, struct hstep_bytes bytes)
{
    memcpy(to + bytes.first, from + bytes.first, (size_t)bytes.n);
}

/* Copies the bytes of a chunk from where they are before the update. */
static void bring_chunk(const struct hstep_call *call, const struct hstep_chunk *c)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const struct hstep_origin *from = &call->origins[c->tensor - call->first];
    if (from->weight)
        copy_bytes(call->weights[c->tensor - call->first], from->weight,
                   hstep_chunk_bytes(t, c, HALFSTEP_SLOT_WEIGHT, 0));
    for (int s = 0; from->states && s < t->slots; s++) {
        const struct hstep_slot *slot = &t->slot[s], *other = &from->states->slot[s];
        if (slot->format < 0 || s == HALFSTEP_SLOT_GRADIENT) continue;
        if (s >= HALFSTEP_SLOT_STATE) copy_bytes(slot->code, other->code, hstep_chunk_bytes(t, c, s, 0));
        if (slot->extra_bytes) copy_bytes(slot->extra, other->extra, hstep_chunk_bytes(t, c, s, 1));
    }
}

static void update_chunk(const struct hstep_slate *b, const struct hstep_chunk *c)
{
    const struct hstep_tensor *t = &b->call->plan.tensors[c->tensor];
    if (b->call->origins && b->pass == HSTEP_PASS_UPDATE) bring_chunk(b->call, c);
    if (!hstep_is_updated(t, &b->call->plan.updates[c->tensor], b->pass)) return;
    struct hstep_work w;
    struct staging st;
    hstep_work_start(b->call, c->tensor, b->pass, -1, &w);
    st.n = 0;
    for (int64_t track = c->track; track < c->track + c->tracks; track++)
        if (hstep_is_by_rows(&w)) update_rows(&w, &st, hstep_stretch_of(t, c, track));
        else update_stretch(&w, &st, hstep_stretch_of(t, c, track));
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
    hstep_run_slate(call, pass, first, n, !n || !call->plan.tensors[first].sums, update_task);
    return HALFSTEP_OK;
}
