/* What is read before a step: sums of squares with one value whatever the cut (docs/numerics.md 4), non-finite
 * gradients, and row means. */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

/* The main stream of a format alone, as a format: what the scan of a gradient slot reads. */
static int plain_format(int format)
{
    if (!hstep_formats[format].extra_bits) return format;
    /* The first row that stores the same codes and nothing beside them. */
    for (int i = 0; i < HSTEP_FORMATS; i++)
        if (!hstep_formats[i].extra_bits && !strcmp(hstep_formats[i].code_dtype, hstep_formats[format].code_dtype))
            return i;
    return format;
}

static int64_t element_bytes(const struct hstep_slot *slot) { return hstep_formats[slot->format].code_bits / 8; }

/* Up to a tile of elements, padded with zeros in `scratch` (HSTEP_TILE * 4 bytes) if they are no whole groups, and *n
 * with them; returns where they are. */
static const char *whole_groups(const struct hstep_slot *slot, const char *code, int64_t *n, char *scratch)
{
    if (*n % HSTEP_GROUP == 0) return code;
    int64_t padded = (*n + HSTEP_GROUP - 1) / HSTEP_GROUP * HSTEP_GROUP, bytes = element_bytes(slot);
    memcpy(scratch, code, (size_t)(*n * bytes));
    memset(scratch + *n * bytes, 0, (size_t)((padded - *n) * bytes));
    *n = padded;
    return scratch;
}

enum { PAGE = 4096, LINE = 64, LINES = 8 };

/* The largest magnitude of whole groups. Processors do not fetch ahead across the end of a page, where a loop that does
 * little else than read would stand still: the first lines of the next page are asked for a page before. */
static uint32_t scan_pages(const struct hstep_format_kernels *format, const char *code, int64_t n, int64_t bytes)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i += PAGE / bytes) {
        int64_t count = n - i < PAGE / bytes ? n - i : PAGE / bytes;
        uintptr_t next = (uintptr_t)(code + i * bytes) + PAGE; /* a number, for it may lie behind the array */
        for (int line = 0; count * bytes == PAGE && line < LINES; line++)
            __builtin_prefetch((const char *)(next + (uintptr_t)(line * LINE)));
        uint32_t m = format->maximum(code + i * bytes, count);
        if (m > largest) largest = m;
    }
    return largest;
}

static uint32_t scan_stretch(const struct hstep_kernels *kernels, const struct hstep_tensor *t, const char *code,
                             uint64_t index, int64_t n, int64_t *squares)
{
    const struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_GRADIENT];
    const struct hstep_format_kernels *format = &kernels->format[plain_format(slot->format)];
    HSTEP_ALIGNED char scratch[HSTEP_TILE * 4];
    uint32_t largest = 0, m;
    if (!squares) {
        int64_t whole = n / HSTEP_GROUP * HSTEP_GROUP, rest = n - whole;
        largest = scan_pages(format, code, whole, element_bytes(slot));
        if (rest) {
            code = whole_groups(slot, code + whole * element_bytes(slot), &rest, scratch);
            m = format->maximum(code, rest);
            if (m > largest) largest = m;
        }
        return largest;
    }
    int64_t row = t->index_stride;
    if (row < HSTEP_GROUP) {
        /* Rows too short to be a chunk: every element is added exactly, so no cut of the rows can matter. */
        for (int64_t i = 0; i < n; i += HSTEP_TILE) {
            HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE];
            int64_t count = n - i < HSTEP_TILE ? n - i : HSTEP_TILE, padded = count;
            const char *tile = whole_groups(slot, code + i * element_bytes(slot), &padded, scratch);
            m = format->maximum(tile, padded);
            if (m > largest) largest = m;
            format->decode[0](x, tile, NULL, padded);
            kernels->to_plain(x, plain, padded);
            for (int64_t j = 0; j < count; j++)
                if (isfinite(plain[j])) hstep_exact_add(squares, (double)plain[j] * (double)plain[j]);
        }
        return largest;
    }
    while (n > 0) {
        int64_t column = (int64_t)(index % (uint64_t)row), count = HSTEP_TILE - column % HSTEP_TILE;
        double sums[16];
        if (count > row - column) count = row - column;
        if (count > n) count = n;
        int64_t padded = count;
        format->squares(whole_groups(slot, code, &padded, scratch), padded, sums, &m);
        if (m > largest) largest = m;
        /* Chunks that are not finite are left out, and no others, so that no cut matters then either. */
        if (m < 0x7f800000u) hstep_exact_add(squares, hstep_tree_sum(sums));
        code += count * element_bytes(slot);
        index += (uint64_t)count;
        n -= count;
    }
    return largest;
}

/* Adds to the squares where they are wanted. */
static void scan_chunk(const struct hstep_call *call, const struct hstep_chunk *c, int64_t *squares)
{
    const struct hstep_tensor *t = &call->plan.tensors[c->tensor];
    const char *gradient = call->gradients[c->tensor - call->first];
    if (!gradient) return;
    uint32_t largest = 0;
    int raw = hstep_rules[t->rule].kind == HSTEP_RAW_GRADIENT, summed = squares && !raw;
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        uint64_t start = t->index0 + (uint64_t)(run * t->index_stride);
        int64_t offset = c->offset, length = c->length;
        if (summed) hstep_scan_bounds(t, start, &offset, &length);
        const char *code = gradient + (run * t->run_length + offset) * element_bytes(&t->slot[HALFSTEP_SLOT_GRADIENT]);
        uint32_t m =
            scan_stretch(call->context->kernels, t, code, start + (uint64_t)offset, length, summed ? squares : NULL);
        if (m > largest) largest = m;
    }
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    if (call->scan != HSTEP_SCAN_NONE && !((double)magnitude < hstep_gradient_limit(call, raw)))
        __atomic_fetch_or(&call->statistics[hstep_flags_offset() + c->tensor - call->first],
                          isfinite(magnitude) ? HSTEP_FLAG_TOO_LARGE : HSTEP_FLAG_NONFINITE, __ATOMIC_RELAXED);
}

static void scan_task(void *argument, int64_t i)
{
    const struct hstep_call *call = ((const struct hstep_batch *)argument)->call;
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
    if (call->scan != HSTEP_SCAN_NONE || hstep_is_clipped(call))
        hstep_run_batch(call, HSTEP_PASS_SUMS, call->first, call->n, 0, scan_task);
    hstep_exact_normalize(call->statistics);
    return HALFSTEP_OK;
}

/* Mean of a whole row of a raw gradient, by the same chunks and exact sum as norms. */
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
    return (float)(w->u->centralize * row_mean(w->kernels, slot, row, w->t->n_columns));
}
