/* Sums over whole tensors before their update. A first pass runs the rule of the update and stores nothing. The value
 * of a sum does not depend on how the tensor is cut, as for gradient norms (statistics.c). Chunks of at most 256
 * columns, starting at multiples of 256, are summed in double and added exactly. Rows shorter than 32 are added element
 * by element. */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* Computes the values to be summed for one tile, as the update will see them, x[j][0 .. n) in the order of elements. */
static void values_of(const struct hstep_work *w, const struct hstep_places *places, float (*x)[HSTEP_TILE], int64_t n)
{
    const struct hstep_kernels *kernels = w->context->kernels;
    const struct hstep_tensor *t = w->t;
    struct hstep_tile tile;
    HSTEP_ALIGNED float values[HSTEP_MAX_SUMS][HSTEP_TILE];
    float *out[HSTEP_MAX_SUMS];
    for (int j = 0; j < HSTEP_MAX_SUMS; j++) out[j] = values[j];
    hstep_load(w, places, &tile, n);
    hstep_run_function(w, &tile, out, n);
    for (int s = HALFSTEP_SLOT_STATE; w->pair < 0 && s < t->slots; s++)
        if (hstep_has_one_scale(t->slot[s].format))
            kernels->format[t->slot[s].format].norm[t->slot[s].nonneg](tile.state[s - HALFSTEP_SLOT_STATE],
                                                                       out[hstep_sum_of_state(t, s)], n);
    if (w->pair < 0 && t->cautious) kernels->agreement(tile.change, tile.gradient, out[t->sums - 1], n);
    for (int j = 0; j < (w->pair < 0 ? t->sums : 1); j++) kernels->to_plain(out[j], x[j], n);
}

int64_t hstep_values(const struct hstep_work *w, struct hstep_stretch s, float (*x)[HSTEP_TILE])
{
    int64_t lead = hstep_grain_lead(w->t, s.element, s.index), grain = w->t->grain,
            n = (lead + s.n + grain - 1) / grain * grain;
    struct hstep_places places;
    struct hstep_scratch scratch;
    if (!lead && n == s.n) {
        hstep_place(w, s.element, &places);
    } else {
        struct hstep_fragment part[HSTEP_TILE / HSTEP_CELL];
        int parts = 0;
        while (s.n > 0) part[parts++] = hstep_take_grain(w, &s);
        hstep_gather(w, part, parts, &scratch, &places);
    }
    values_of(w, &places, x, n);
    return lead;
}

/* Keeps only the values of every `every`-th element of the whole tensor, and sets the others to 0. x[0] is the value of
 * element `number`. */
static void keep_every(float *x, uint64_t number, int64_t count, uint64_t every)
{
    uint64_t next = (every - number % every) % every;
    for (uint64_t i = 0; i < (uint64_t)count; i++) {
        if (i == next) next += every;
        else x[i] = 0.0f;
    }
}

/* Adds the sums of a stretch within one chunk of columns to the limbs. */
static void add_chunk(const struct hstep_work *w, struct hstep_stretch s, int64_t *limbs)
{
    HSTEP_ALIGNED float x[HSTEP_MAX_SUMS][HSTEP_TILE];
    int64_t lead = hstep_values(w, s, x), n = (lead + s.n + HSTEP_CELL - 1) / HSTEP_CELL * HSTEP_CELL;
    const struct hstep_format_kernels *f32 = &w->context->kernels->format[HSTEP_FORMAT_f32];
    for (int j = 0; j < w->t->sums; j++) {
        int64_t *sum = limbs + (int64_t)j * HSTEP_EXACT_LIMBS, every = hstep_every(w, j);
        const int squared = hstep_is_squared(w->t, j);
        if (every > 1) keep_every(x[j] + lead, hstep_number_of(w->t, s.element), s.n, (uint64_t)every);
        /* Values that are not finite are left out, because the limbs cannot hold them. The rule's own bounds keep all
         * others finite. */
        if (hstep_is_summed_singly(w->t)) {
            for (int64_t i = lead; i < lead + s.n; i++)
                if (isfinite(x[j][i])) hstep_exact_add(sum, (double)x[j][i] * (squared ? (double)x[j][i] : 1.0));
            continue;
        }
        double sums[16], total;
        uint32_t largest = 0;
        memset(x[j], 0, (size_t)lead * 4);
        memset(x[j] + lead + s.n, 0, (size_t)(n - lead - s.n) * 4);
        if (squared) f32->squares((const char *)x[j], n, sums, &largest);
        else f32->sums((const char *)x[j], n, sums);
        total = hstep_tree_sum(sums);
        if (largest < 0x7f800000u && isfinite(total)) hstep_exact_add(sum, total);
    }
}

/* Takes whole chunks of columns from the front of a stretch and adds their sums by a fused kernel. Returns 0 if the
 * stretch does not begin with such chunks, or if the fused kernel cannot serve it. */
static int add_fused(const struct hstep_work *w, struct hstep_stretch *s, int64_t *limbs)
{
    enum { MOST = 32 };
    static const struct hstep_key none[HSTEP_SLOTS];
    double sums[MOST][HSTEP_MAX_NORMS];
    const int64_t row = w->t->index_stride;
    if (!w->u->fused || hstep_is_by_rows(w) || hstep_rules[w->t->rule].totals || hstep_is_summed_singly(w->t)) return 0;
    const int64_t column = (int64_t)(s->index % (uint64_t)row);
    /* If rows consist of whole chunks, the stretch may go on into the next row. */
    int64_t n = s->n < row - column || row % HSTEP_TILE == 0 ? s->n : row - column;
    if (n > MOST * HSTEP_TILE) n = MOST * HSTEP_TILE;
    if (n % HSTEP_CELL) n -= n % HSTEP_TILE;
    if (!n || column % HSTEP_TILE || hstep_grain_lead(w->t, s->element, s->index)) return 0;
    const struct hstep_stretch whole = hstep_take(s, n);
    struct hstep_fused f = hstep_fused_start(w);
    f.key = none;
    hstep_fused_place(w, &whole, &f);
    if (w->t->cautious) {
        hstep_exact_add(limbs, (double)w->context->kernels->fused_agreement(&f, hstep_fused_row(w->t, w->u)));
        return 1;
    }
    w->context->kernels->fused_sums(&f, hstep_fused_row(w->t, w->u), sums[0]);
    for (int64_t i = 0; i * HSTEP_TILE < n; i++)
        for (int j = 0; j < w->t->sums; j++) hstep_exact_add(limbs + (int64_t)j * HSTEP_EXACT_LIMBS, sums[i][j]);
    return 1;
}

static void sum_chunk(const struct hstep_call *call, const struct hstep_chunk *c)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    if (!hstep_is_summed(t, &call->plan.updates[c->tensor])) return;
    int64_t limbs[HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS] = {0}, mean_of = -1;
    struct hstep_work w;
    hstep_work_start(call, c->tensor, HSTEP_PASS_SUMS, -1, &w);
    const int by_rows = hstep_is_by_rows(&w);
    for (int64_t track = c->track; track < c->track + c->tracks; track++) {
        struct hstep_stretch s = hstep_summed_of(t, c, track);
        while (s.n > 0) {
            if (add_fused(&w, &s, limbs)) continue;
            const struct hstep_stretch one = hstep_take_summed(t, &s, by_rows);
            const int64_t row_start = one.element - one.element % t->n_columns;
            if (by_rows && row_start != mean_of) w.mean = hstep_centralized(&w, mean_of = row_start);
            add_chunk(&w, one, limbs);
        }
    }
    int64_t *total = call->statistics + hstep_sum_offset(call, c->tensor);
    for (int64_t j = 0; j < t->sums; j++)
        hstep_merge_squares(total + j * HSTEP_EXACT_LIMBS, limbs + j * HSTEP_EXACT_LIMBS);
}

static void sum_task(void *argument, int64_t i)
{
    const struct hstep_slate *b = argument;
    struct hstep_span span = hstep_task_span(b, i);
    struct hstep_fp fp = hstep_fp_enter();
    for (const struct hstep_chunk *c = span.first; c < span.end; c++) sum_chunk(b->call, c);
    hstep_fp_leave(fp);
}

int hstep_host_sum(const struct hstep_call *call, int first, int n)
{
    hstep_run_slate(call, HSTEP_PASS_SUMS, first, n, 1, sum_task);
    return HALFSTEP_OK;
}
