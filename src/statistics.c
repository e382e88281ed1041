/* What is read before a step: sums of squares with one value whatever the cut (docs/numerics.md 4), non-finite
 * gradients, and row means. */
#include "statistics.h"

#include <math.h>
#include <string.h>

#include "dispatch.h"

struct scan {
    const halfstep_optimizer *o;
    const void *const *gradients; /* of the tensors from `first_tensor` on */
    int first_tensor;
    int64_t first_chunk;
    int clipped;
    int64_t *squares;             /* limbs, or NULL */
    int64_t *flags;               /* per tensor from `first_tensor` on, or NULL */
};

void hstep_merge_squares(int64_t *to, int64_t *from)
{
    /* Carried first, a task adds less than 2^32 to a limb however many squares it has summed. */
    hstep_exact_normalize(from);
    for (int i = 0; i < HSTEP_EXACT_LIMBS; i++)
        if (from[i]) __atomic_fetch_add(&to[i], from[i], __ATOMIC_RELAXED);
}

static int64_t element_bytes(const struct hstep_slot *slot) { return hstep_formats[slot->format].code_bits / 8; }

const char *hstep_whole_groups(const struct hstep_slot *slot, const char *code, int64_t *n, char *room)
{
    if (*n % HSTEP_GROUP == 0) return code;
    int64_t padded = (*n + HSTEP_GROUP - 1) / HSTEP_GROUP * HSTEP_GROUP, bytes = element_bytes(slot);
    memcpy(room, code, (size_t)(*n * bytes));
    memset(room + *n * bytes, 0, (size_t)((padded - *n) * bytes));
    *n = padded;
    return room;
}

static uint32_t scan_stretch(const struct scan *s, const struct hstep_tensor *t, const char *code, uint64_t index, int64_t n,
                             int64_t *squares)
{
    const struct hstep_slot *slot = &t->slot[HALFSTEP_SLOT_GRADIENT];
    const struct hstep_kernels *kernels = s->o->kernels;
    const struct hstep_format_kernels *format = &kernels->format[hstep_plain_format(slot->format)];
    HSTEP_ALIGNED char room[HSTEP_TILE * 4];
    uint32_t largest = 0, m;
    if (!squares) {
        int64_t whole = n / HSTEP_GROUP * HSTEP_GROUP, rest = n - whole;
        if (whole) largest = format->maximum(code, whole);
        if (rest) {
            code = hstep_whole_groups(slot, code + whole * element_bytes(slot), &rest, room);
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
            const char *tile = hstep_whole_groups(slot, code + i * element_bytes(slot), &padded, room);
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
        format->squares(hstep_whole_groups(slot, code, &padded, room), padded, sums, &m);
        if (m > largest) largest = m;
        /* Chunks that are not finite are left out, and no others, so that no cut matters then either. */
        if (m < 0x7f800000u) hstep_exact_add(squares, hstep_tree_sum(sums));
        code += count * element_bytes(slot);
        index += (uint64_t)count;
        n -= count;
    }
    return largest;
}

/* A chunk of 256 columns belongs to the task that holds its first element, and is read whole across the task's end. */
void hstep_scan_bounds(const struct hstep_tensor *t, uint64_t start, int64_t *offset, int64_t *length)
{
    int64_t row = t->index_stride, ends[2] = {*offset, *offset + *length};
    if (row < HSTEP_GROUP) return;
    for (int i = 0; i < 2; i++) {
        if (ends[i] == 0 || ends[i] == t->run_length) continue;
        int64_t column = (int64_t)((start + (uint64_t)ends[i]) % (uint64_t)row), over = column % HSTEP_TILE;
        if (!over) continue;
        int64_t up = HSTEP_TILE - over;
        if (up > row - column) up = row - column;
        ends[i] += up < t->run_length - ends[i] ? up : t->run_length - ends[i];
    }
    *offset = ends[0];
    *length = ends[1] - ends[0];
}

/* The bound on an effective gradient: its square has to stay within fp32. */
#define GRADIENT_LIMIT 0x1p62

static double threshold(const struct scan *s, int raw)
{
    /* A weight that is followed may be as large as it likes. Gradients that are clipped by their own norm end below clip_norm,
     * so only NaN and infinities can offend. */
    double scale = s->o->gradient_scale;
    return raw || s->clipped ? INFINITY : GRADIENT_LIMIT / (scale > 0.0 ? scale : 1.0);
}

static void scan_task(void *argument, int64_t i)
{
    const struct scan *s = argument;
    const struct hstep_chunk *c = &s->o->chunks[s->first_chunk + i];
    const struct hstep_tensor *t = &s->o->tensors[c->tensor];
    const char *gradient = s->gradients[c->tensor - s->first_tensor];
    if (!gradient) return;
    struct hstep_fp fp = hstep_fp_enter();
    int64_t squares[HSTEP_EXACT_LIMBS] = {0};
    uint32_t largest = 0;
    int raw = hstep_rules[s->o->groups[t->group].recipe.rule].kind == HSTEP_RAW_GRADIENT, summed = s->squares && !raw;
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        uint64_t start = t->index0 + (uint64_t)(run * t->index_stride);
        int64_t offset = c->offset, length = c->length;
        if (summed) hstep_scan_bounds(t, start, &offset, &length);
        const char *code = gradient + (run * t->run_length + offset) * element_bytes(&t->slot[HALFSTEP_SLOT_GRADIENT]);
        uint32_t m = scan_stretch(s, t, code, start + (uint64_t)offset, length, summed ? squares : NULL);
        if (m > largest) largest = m;
    }
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    if (s->flags && !((double)magnitude < threshold(s, raw)))
        __atomic_store_n(&s->flags[c->tensor - s->first_tensor], 1, __ATOMIC_RELAXED);
    if (summed) hstep_merge_squares(s->squares, squares);
    hstep_fp_leave(fp);
}

void hstep_scan_tensors(const halfstep_optimizer *o, int first, int n, const void *const *gradients, int clipped,
                        int64_t *squares, int64_t *flags)
{
    struct scan s = {o, gradients, first, 0, clipped, squares, flags};
    if (!n || (!squares && !flags)) return;
    s.first_chunk = o->tensors[first].first_chunk;
    int64_t end = o->tensors[first + n - 1].first_chunk + o->tensors[first + n - 1].chunks;
    hstep_run(o, scan_task, &s, end - s.first_chunk);
}

double hstep_row_mean(const halfstep_optimizer *o, const struct hstep_slot *slot, const char *code, int64_t n)
{
    HSTEP_ALIGNED char room[HSTEP_TILE * 4];
    int64_t total[HSTEP_EXACT_LIMBS] = {0};
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        int64_t count = n - i < HSTEP_TILE ? n - i : HSTEP_TILE;
        double sums[16];
        const char *tile = hstep_whole_groups(slot, code + i * element_bytes(slot), &count, room);
        o->kernels->format[slot->format].sums(tile, count, sums);
        hstep_exact_add(total, hstep_tree_sum(sums));
    }
    return hstep_exact_round(total) / (double)n;
}
