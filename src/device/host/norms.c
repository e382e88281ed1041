/* Sums over whole tensors that come before their update: a first pass with the rule of the update that stores nothing.
 * The sums have one value whatever the cut, as gradient norms have (statistics.c): chunks of at most 256 columns,
 * starting at multiples of 256, are summed in double and added exactly; rows shorter than 32 are added element by
 * element. */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* What the update will see in one tile: values to be summed, x[j][0 .. n) in the order of elements. */
static void values_of(const struct hstep_work *w, int pair, const struct hstep_places *places, float (*x)[HSTEP_TILE],
                      int64_t n)
{
    const struct hstep_kernels *kernels = w->kernels;
    int rule = w->t->rule, count = hstep_rules[rule].norms;
    struct hstep_tile tile;
    HSTEP_ALIGNED float scratch[HSTEP_MAX_SUMS][HSTEP_TILE];
    float *out[HSTEP_MAX_SUMS];
    for (int j = 0; j < HSTEP_MAX_SUMS; j++) out[j] = scratch[j];
    hstep_load(w, places, &tile, n);
    if (pair >= 0) {
        kernels->factored[rule][pair].cross[w->u->mode & RULE_CLAMP](w->u->k, tile.weight, tile.gradient, scratch[0],
                                                                     tile.state, n);
        kernels->to_plain(scratch[0], x[0], n);
        return;
    }
    if (w->t->matrix)
        kernels->matrix[rule].direction[w->u->mode & RULE_CLAMP](w->u->k, tile.gradient, tile.change, tile.state, n);
    else if (count)
        kernels->norms[rule][w->u->mode & RULE_CLAMP](w->u->k, tile.weight, tile.gradient, out, tile.state, n);
    else kernels->rule[rule][w->u->mode](w->u->k, tile.weight, tile.gradient, tile.change, tile.state, n);
    for (int i = 0; i < w->t->slots - HALFSTEP_SLOT_STATE; i++) {
        const struct hstep_slot *slot = &w->t->slot[HALFSTEP_SLOT_STATE + i];
        if (slot->format >= 0 && hstep_formats[slot->format].geometry == HALFSTEP_GEOMETRY_TENSOR)
            kernels->format[slot->format].norm[slot->nonneg](tile.states[i], scratch[count++], n);
    }
    if (w->t->cautious) kernels->agreement(tile.change, tile.gradient, scratch[count++], n);
    for (int j = 0; j < count; j++) kernels->to_plain(scratch[j], x[j], n);
}

int64_t hstep_values(const struct hstep_work *w, int pair, int64_t element, uint64_t index, int64_t count,
                     float (*x)[HSTEP_TILE])
{
    int64_t lead = hstep_unit_lead(w->t, element, index), unit = w->t->unit;
    int64_t n = (lead + count + unit - 1) / unit * unit;
    struct hstep_places places;
    struct hstep_scratch scratch;
    struct hstep_part part[HSTEP_TILE / HSTEP_GROUP];
    if (!lead && n == count) {
        hstep_place(w, element, &places);
    } else {
        int parts = 0;
        for (int64_t done = 0; done < count; parts++) {
            int64_t skip = parts ? 0 : lead, some = unit - skip < count - done ? unit - skip : count - done;
            part[parts] = (struct hstep_part){element + done, 0, (int)skip, (int)some};
            done += some;
        }
        hstep_gather(w, part, parts, &scratch, &places);
    }
    values_of(w, pair, &places, x, n);
    return lead;
}

/* Of `count` values, the first of which is that of element `number` of the whole tensor, only those of every so many-th
 * element stay. */
static void thin_out(float *x, uint64_t number, int64_t count, uint64_t every)
{
    uint64_t next = (every - number % every) % every;
    for (uint64_t i = 0; i < (uint64_t)count; i++) {
        if (i == next) next += every;
        else x[i] = 0.0f;
    }
}

/* `count` elements from `element` on, all in one chunk of columns. */
static void add_chunk(const struct hstep_work *w, int64_t element, uint64_t index, int64_t count, int singly,
                      int64_t *limbs)
{
    HSTEP_ALIGNED float x[HSTEP_MAX_SUMS][HSTEP_TILE];
    int64_t lead = hstep_values(w, -1, element, index, count, x),
            n = (lead + count + HSTEP_GROUP - 1) / HSTEP_GROUP * HSTEP_GROUP;
    const struct hstep_rule *rule = &hstep_rules[w->t->rule];
    for (int j = 0; j < w->t->sums; j++) {
        int64_t *sum = limbs + (int64_t)j * HSTEP_EXACT_LIMBS;
        int squared = !rule->totals || j >= rule->norms;
        if (!squared && w->u->every > 1)
            thin_out(x[j] + lead, hstep_number_of(w->t, element), count, (uint64_t)w->u->every);
        /* What is not finite has no place in the limbs; the rule's own bounds keep the rest finite. */
        if (singly) {
            for (int64_t i = lead; i < lead + count; i++)
                if (isfinite(x[j][i])) hstep_exact_add(sum, (double)x[j][i] * (squared ? (double)x[j][i] : 1.0));
            continue;
        }
        double sums[16], total;
        uint32_t largest = 0;
        memset(x[j], 0, (size_t)lead * 4);
        memset(x[j] + lead + count, 0, (size_t)(n - lead - count) * 4);
        if (squared) w->kernels->format[HSTEP_FORMAT_f32].squares((const char *)x[j], n, sums, &largest);
        else w->kernels->format[HSTEP_FORMAT_f32].sums((const char *)x[j], n, sums);
        total = hstep_tree_sum(sums);
        if (largest < 0x7f800000u && isfinite(total)) hstep_exact_add(sum, total);
    }
}

/* Chunks from `element` on, one after another, whole units each: as many elements as were added, or 0. */
static int64_t add_fused(const struct hstep_work *w, int64_t element, uint64_t index, int64_t n, int64_t *limbs)
{
    enum { MOST = 32 };
    double sums[MOST][HSTEP_MAX_NORMS];
    static const struct hstep_key none[HSTEP_SLOTS];
    struct hstep_places places;
    if (!w->u->fused || w->u->centralize != 0.0 || hstep_rules[w->t->rule].totals ||
        hstep_unit_lead(w->t, element, index))
        return 0;
    if (n > MOST * HSTEP_TILE) n = MOST * HSTEP_TILE;
    if (n % HSTEP_GROUP) n -= n % HSTEP_TILE;
    if (!n) return 0;
    struct hstep_fused f = hstep_fused_start(w);
    f.n = n;
    f.index = index;
    f.key = none;
    hstep_place(w, element, &places);
    memcpy(f.code, places.code, sizeof f.code);
    memcpy(f.extra, places.extra, sizeof f.extra);
    if (w->t->cautious) {
        hstep_exact_add(limbs, (double)w->kernels->fused_agreement(&f, hstep_fused_of(w)));
        return n;
    }
    w->kernels->fused_sums(&f, hstep_fused_of(w), sums[0]);
    for (int64_t i = 0; i * HSTEP_TILE < n; i++)
        for (int j = 0; j < w->t->sums; j++) hstep_exact_add(limbs + (int64_t)j * HSTEP_EXACT_LIMBS, sums[i][j]);
    return n;
}

static void sum_chunk(const struct hstep_batch *b, const struct hstep_chunk *c)
{
    const struct hstep_tensor *t = &b->call->plan.tensors[c->tensor];
    if (!t->sums || !hstep_is_summed(t, &b->call->plan.updates[c->tensor])) return;
    int64_t limbs[HSTEP_MAX_SUMS * HSTEP_EXACT_LIMBS] = {0};
    struct hstep_work w = hstep_work_start(b, c->tensor);
    int64_t row = t->index_stride, mean_of = -1;
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        uint64_t start = t->index0 + (uint64_t)(run * t->index_stride);
        int64_t offset = c->offset, length = c->length;
        hstep_scan_bounds(t, start, &offset, &length);
        while (length > 0) {
            int64_t element = run * t->run_length + offset, count = HSTEP_TILE;
            uint64_t index = start + (uint64_t)offset;
            int singly = row < HSTEP_GROUP;
            if (singly) {
                count = HSTEP_TILE - hstep_unit_lead(t, element, index);
            } else {
                int64_t column = (int64_t)(index % (uint64_t)row), stretch = row - column;
                /* Chunks of rows that consist of whole ones go on in the next row. */
                if (stretch > length || row % HSTEP_TILE == 0) stretch = length;
                int64_t added = column % HSTEP_TILE ? 0 : add_fused(&w, element, index, stretch, limbs);
                if (added) {
                    offset += added;
                    length -= added;
                    continue;
                }
                count -= column % HSTEP_TILE;
                if (count > row - column) count = row - column;
            }
            if (w.u->centralize != 0.0) {
                int64_t left = t->n_columns - element % t->n_columns, row_start = element - element % t->n_columns;
                if (count > left) count = left;
                if (row_start != mean_of) w.mean = hstep_centralized(&w, row_start);
                mean_of = row_start;
            }
            if (count > length) count = length;
            add_chunk(&w, element, index, count, singly, limbs);
            offset += count;
            length -= count;
        }
    }
    int64_t *total = b->call->statistics + hstep_sum_offset(b->call, c->tensor);
    for (int64_t j = 0; j < t->sums; j++)
        hstep_merge_squares(total + j * HSTEP_EXACT_LIMBS, limbs + j * HSTEP_EXACT_LIMBS);
}

static void sum_task(void *argument, int64_t i)
{
    struct hstep_span span = hstep_task_span(argument, i);
    struct hstep_fp fp = hstep_fp_enter();
    for (const struct hstep_chunk *c = span.first; c < span.end; c++) sum_chunk(argument, c);
    hstep_fp_leave(fp);
}

int hstep_host_sum(const struct hstep_call *call, int first, int n)
{
    hstep_run_batch(call, HSTEP_PASS_SUMS, first, n, 1, sum_task);
    return HALFSTEP_OK;
}
