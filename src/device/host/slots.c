/* Reads slots into fp32 values in order and writes them back, tile by tile. Large weights are shared out among the
 * threads of a step. */
#include <math.h>
#include <string.h>

#include "base/grid.h"
#include "decide/prepare.h"
#include "device/host/host.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "tables/layout.h"

static int64_t padded(int format, int64_t n)
{
    int64_t grain = hstep_grain_of(format);
    return (n + grain - 1) / grain * grain;
}

/* Copies one piece between a slot and scratch memory. out: 1 copies to the slot. */
static void move_piece(const struct hstep_tensor *t, const struct hstep_slot *s, char *code,
                       const struct hstep_portion *p, char *code_scratch, char *extra_scratch, int out)
{
    char *mine = code + hstep_code_offset(t, s->format, p->element);
    memcpy(out ? mine : code_scratch, out ? code_scratch : mine, hstep_code_bytes(s->format, 1, p->n));
    if (!s->extra_bytes) return;
    mine = s->extra + hstep_extra_offset(t, s->format, p->element);
    memcpy(out ? mine : extra_scratch, out ? extra_scratch : mine, hstep_extra_bytes(s->format, 1, p->n));
}

/* The elements of one access, cut into tasks of `each` elements. */
struct moves {
    const struct hstep_access *access;
    float *out;
    const float *in;
    int64_t each;
};

/* Returns the access of one task. */
static struct hstep_access part_of(const struct moves *m, int64_t task)
{
    struct hstep_access part = *m->access;
    part.first += task * m->each;
    if (part.end > part.first + m->each) part.end = part.first + m->each;
    return part;
}

/* Runs `task` over an access, on several threads if that is worth it. States in blocks are not cut, because a cut may
 * go through a block. */
static void share_out(const struct hstep_access *a, float *out, const float *in, halfstep_task task)
{
    const struct hstep_format *f = &hstep_formats[a->tensor->slot[a->slot].format];
    struct moves m = {a, out, in, a->end - a->first};
    if (!m.each) return;
    if (f->geometry == HALFSTEP_GEOMETRY_PACKED)
        m.each = (HSTEP_CHUNK + a->tensor->n_columns - 1) / a->tensor->n_columns * a->tensor->n_columns;
    else if (!f->block) m.each = HSTEP_CHUNK;
    const int64_t n = (a->end - a->first + m.each - 1) / m.each;
    if (n > 1) hstep_run(a->context, task, &m, n);
    else task(&m, 0);
}

static void read_task(void *argument, int64_t number)
{
    const struct moves *m = argument;
    const struct hstep_access part = part_of(m, number), *a = &part;
    float *out = m->out + (a->first - m->access->first);
    const struct hstep_kernels *kernels = a->context->kernels;
    const struct hstep_tensor *t = a->tensor;
    const struct hstep_slot *s = &t->slot[a->slot];
    const struct hstep_fp fp = hstep_fp_enter();
    HSTEP_ALIGNED char code[HSTEP_TILE * 4] = {0}, extra[HSTEP_TILE * 2] = {0};
    HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE];
    struct hstep_portion p = {0};
    while (hstep_next_portion(t, s->format, a->first, a->end, &p)) {
        int64_t n = padded(s->format, p.n);
        move_piece(t, s, a->data, &p, code, extra, 0);
        kernels->format[s->format].decode[s->nonneg](x, code, extra, n);
        if (s->root) kernels->scale(x, s->grid, n);
        kernels->to_plain(x, plain, n);
        memcpy(out + (p.element + p.skip - a->first), plain + p.skip, (size_t)(p.n - p.skip) * 4);
    }
    hstep_fp_leave(fp);
}

int hstep_host_read(const struct hstep_access *a, float *out)
{
    share_out(a, out, NULL, read_task);
    return HALFSTEP_OK;
}

/* Returns the scale that a state with one scale for the whole tensor has with the new values. */
static float scale_of(const struct hstep_access *a, const float *in)
{
    const struct hstep_kernels *kernels = a->context->kernels;
    const struct hstep_tensor *t = a->tensor;
    const struct hstep_slot *s = &t->slot[a->slot];
    int64_t n = a->end - a->first;
    HSTEP_ALIGNED float plain[HSTEP_TILE], x[HSTEP_TILE], y[HSTEP_TILE];
    double sum = 0.0;
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        double sums[16];
        uint32_t largest;
        memset(plain, 0, sizeof plain);
        memcpy(plain, in + i, (size_t)(n - i < HSTEP_TILE ? n - i : HSTEP_TILE) * 4);
        kernels->from_plain(plain, x, HSTEP_TILE);
        kernels->format[s->format].norm[s->nonneg](x, y, HSTEP_TILE);
        kernels->to_plain(y, plain, HSTEP_TILE);
        kernels->format[HSTEP_FORMAT_f32].squares((const char *)plain, HSTEP_TILE, sums, &largest);
        sum += hstep_tree_sum(sums);
    }
    return hstep_tensor_scale(s->format, sqrt(sum), (double)t->rows * (double)t->row_length);
}

static void write_task(void *argument, int64_t number)
{
    const struct moves *m = argument;
    const struct hstep_access part = part_of(m, number), *a = &part;
    const float *in = m->in + (a->first - m->access->first);
    const struct hstep_kernels *kernels = a->context->kernels;
    const struct hstep_tensor *t = a->tensor;
    const struct hstep_slot *s = &t->slot[a->slot];
    const struct hstep_format *f = &hstep_formats[s->format];
    const struct hstep_fp fp = hstep_fp_enter();
    int one_scale = f->geometry == HALFSTEP_GEOMETRY_TENSOR && a->end > a->first;
    float scale = one_scale ? scale_of(a, in) : 0.0f;
    HSTEP_ALIGNED char code[HSTEP_TILE * 4], extra[HSTEP_TILE * 2];
    HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE], nothing[HSTEP_TILE] = {0};
    HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS];
    /* A random number of one half of the range makes stochastic formats round to nearest. */
    for (int i = 0; i < HSTEP_TILE_WORDS; i++) words[i] = 0x80008000u;
    const float onto = hstep_onto_grid(s->grid, s->root);
    struct hstep_portion p = {0};
    while (hstep_next_portion(t, s->format, a->first, a->end, &p)) {
        memset(plain, 0, sizeof plain);
        memcpy(plain, in + (p.element - a->first), (size_t)p.n * 4);
        /* -0 becomes 0, because codes of second moments have no sign bit. */
        for (int i = 0; i < p.n && s->nonneg; i++) plain[i] = fabsf(plain[i]);
        if (one_scale) memcpy(extra, &scale, 4);
        kernels->from_plain(plain, x, padded(s->format, p.n));
        /* A weight is written as a step with a change of 0 writes it, so that it saturates. Formats with a second
         * plane or a scale are encoded instead, because a step would start from what is stored now. */
        if (a->slot == HALFSTEP_SLOT_WEIGHT && !f->extra_bits && !f->block)
            kernels->format[s->format].apply(x, nothing, code, extra, words, padded(s->format, p.n));
        else
            kernels->format[s->format].encode[s->nonneg](x, code, extra, words, padded(s->format, p.n),
                                                         a->slot >= HALFSTEP_SLOT_STATE, onto);
        move_piece(t, s, a->data, &p, code, extra, 1);
    }
    hstep_fp_leave(fp);
}

int hstep_host_write(const struct hstep_access *a, const float *in)
{
    share_out(a, NULL, in, write_task);
    return HALFSTEP_OK;
}

int hstep_host_saturated(const struct hstep_access *a, uint64_t *count)
{
    const struct hstep_format *f = &hstep_formats[a->tensor->slot[a->slot].format];
    const uint16_t largest = !strcmp(f->code_dtype, "F16") ? 0x7bff : 0x7f7f, *code = a->data;
    uint64_t sum = 0;
    for (int64_t i = a->first; i < a->end; i++) sum += (code[i] & 0x7fff) == largest;
    *count = sum;
    return HALFSTEP_OK;
}
