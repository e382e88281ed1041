/* Reads gradients before a step: sums of squares whose value does not depend on how the tensor is cut (docs/numerics.md
 * 4), gradients that are not finite, and row means. */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

static int64_t element_bytes(const struct hstep_slot *slot) { return hstep_formats[slot->format].code_bits / 8; }

/* Returns the address of *n elements, at most a tile, as whole cells. If *n is no multiple of a cell, they are copied
 * to `scratch` (HSTEP_TILE * 4 bytes), padded with zeros, and counted in *n. */
static const char *whole_groups(const struct hstep_slot *slot, const char *code, int64_t *n, char *scratch)
{
    if (*n % HSTEP_CELL == 0) return code;
    int64_t padded = (*n + HSTEP_CELL - 1) / HSTEP_CELL * HSTEP_CELL, bytes = element_bytes(slot);
    memcpy(scratch, code, (size_t)(*n * bytes));
    memset(scratch + *n * bytes, 0, (size_t)((padded - *n) * bytes));
    *n = padded;
    return scratch;
}

static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

enum { PAGE = 4096, LINE = 64, LINES = 8 };

/* Returns the largest magnitude of whole cells. Processors do not prefetch across the end of a page, so a loop that
 * mostly reads would stall there. The loop therefore prefetches the first lines of the next page while it reads this
 * one. */
static uint32_t scan_pages(const struct hstep_format_kernels *format, const char *code, int64_t n, int64_t bytes)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i += PAGE / bytes) {
        int64_t count = n - i < PAGE / bytes ? n - i : PAGE / bytes;
        /* A number, because the address may be behind the array. */
        uintptr_t next = (uintptr_t)(code + i * bytes) + PAGE;
        for (int line = 0; count * bytes == PAGE && line < LINES; line++)
            __builtin_prefetch((const char *)(next + (uintptr_t)(line * LINE)));
        largest = larger(largest, format->maximum(code + i * bytes, count));
    }
    return largest;
}

static uint32_t scan_stretch(const struct hstep_format_kernels *format, const struct hstep_slot *slot, const char *code,
                             int64_t n)
{
    HSTEP_ALIGNED char scratch[HSTEP_TILE * 4];
    int64_t whole = n / HSTEP_CELL * HSTEP_CELL, rest = n - whole;
    uint32_t largest = scan_pages(format, code, whole, element_bytes(slot));
    if (!rest) return largest;
    code = whole_groups(slot, code + whole * element_bytes(slot), &rest, scratch);
    return larger(largest, format->maximum(code, rest));
}

static uint32_t scan_and_sum(const struct hstep_kernels *kernels, const struct hstep_format_kernels *format,
                             const struct hstep_tensor *t, const char *gradient, struct hstep_stretch s,
                             int64_t *squares)
{
    const struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_GRADIENT];
    HSTEP_ALIGNED char scratch[HSTEP_TILE * 4];
    uint32_t largest = 0, m;
    while (s.n > 0) {
        const struct hstep_stretch one = hstep_take_summed(t, &s, 0);
        int64_t padded = one.n;
        const char *code = whole_groups(slot, gradient + one.element * element_bytes(slot), &padded, scratch);
        if (hstep_is_summed_singly(t)) {
            HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE];
            m = format->maximum(code, padded);
            format->decode[0](x, code, NULL, padded);
            kernels->to_plain(x, plain, padded);
            for (int64_t j = 0; j < one.n; j++)
                if (isfinite(plain[j])) hstep_exact_add(squares, (double)plain[j] * (double)plain[j]);
        } else {
            double sums[16];
            format->squares(code, padded, sums, &m);
            /* Only chunks that are not finite are left out, so that the cut does not matter then either. */
            if (m < 0x7f800000u) hstep_exact_add(squares, hstep_tree_sum(sums));
        }
        largest = larger(largest, m);
    }
    return largest;
}

/* Flags the gradient of a chunk if the scan refuses it. Adds to the squares if the scan sums them. */
static void scan_chunk(const struct hstep_call *call, const struct hstep_chunk *c, int64_t *squares)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_GRADIENT];
    const char *gradient = call->gradients[c->tensor - call->first];
    if (!gradient) return;
    const struct hstep_scan scan = hstep_scan_of(call, t);
    const struct hstep_kernels *kernels = call->context->kernels;
    const struct hstep_format_kernels *format = &kernels->format[scan.format];
    uint32_t largest = 0;
    for (int64_t track = c->track; track < c->track + c->tracks; track++) {
        const struct hstep_stretch s = hstep_stretch_of(t, c, track);
        const char *code = gradient + s.element * element_bytes(slot);
        uint32_t m = scan.summed ? scan_and_sum(kernels, format, t, gradient, hstep_summed_of(t, c, track), squares)
                                 : scan_stretch(format, slot, code, s.n);
        largest = larger(largest, m);
    }
    const int64_t flag = hstep_flag_of(call, &scan, largest);
    if (flag)
        __atomic_fetch_or(&call->statistics[hstep_flags_offset() + c->tensor - call->first], flag, __ATOMIC_RELAXED);
}

static void scan_task(void *argument, int64_t i)
{
    const struct hstep_call *call = ((const struct hstep_slate *)argument)->call;
    struct hstep_span span = hstep_task_span(argument, i);
    struct hstep_fp fp = hstep_fp_enter();
    int64_t squares[HSTEP_EXACT_LIMBS];
    int summed = hstep_is_clipped(call);
    if (summed) memset(squares, 0, sizeof squares);
    for (const struct hstep_chunk *c = span.first; c < span.end; c++) scan_chunk(call, c, summed ? squares : NULL);
    if (summed) hstep_merge_squares(call->statistics, squares);
    hstep_fp_leave(fp);
}

int hstep_host_scan(const struct hstep_call *call)
{
    if (hstep_is_scanned(call)) hstep_run_slate(call, HSTEP_PASS_SUMS, call->first, call->n, 0, scan_task);
    hstep_exact_normalize(call->statistics);
    return HALFSTEP_OK;
}

/* Returns the mean of a whole row of a raw gradient. Uses the same chunks and exact sum as norms.c. */
static double row_mean(const struct hstep_kernels *kernels, const struct hstep_slot *slot, const char *code, int64_t n)
{
    HSTEP_ALIGNED char scratch[HSTEP_TILE * 4];
    int64_t total[HSTEP_EXACT_LIMBS] = {0};
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        int64_t count = n - i < HSTEP_TILE ? n - i : HSTEP_TILE;
        double sums[16];
        const char *tile = whole_groups(slot, code + i * element_bytes(slot), &count, scratch);
        kernels->format[slot->format].sums(tile, count, sums);
        hstep_exact_add(total, hstep_tree_sum(sums));
    }
    return hstep_exact_round(total) / (double)n;
}

float hstep_centralized(const struct hstep_work *w, int64_t row_start)
{
    const struct hstep_slot *slot = &w->t->slot[HALFSTEP_SLOT_GRADIENT];
    const char *row = w->code[HALFSTEP_SLOT_GRADIENT] + hstep_code_offset(w->t, slot->format, row_start);
    return (float)(w->u->centralize * row_mean(w->context->kernels, slot, row, w->t->n_columns));
}
