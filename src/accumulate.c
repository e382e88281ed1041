/* Sums of gradients outside a step, and the bare stochastic rounding. */
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "optimizer.h"

struct accumulation {
    const halfstep_optimizer *o;
    const struct hstep_tensor *t;
    const struct hstep_chunk *chunks;
    int format, gradient_format;
    char *accumulator;
    const char *gradient;
    float scale;
    struct hstep_key stream;
};

/* n elements from `element` on, whose first is number `lead` of its group. */
static void accumulate_tile(const struct accumulation *a, int64_t element, uint64_t index, int64_t n)
{
    const struct hstep_kernels *kernels = a->o->kernels;
    HSTEP_ALIGNED char sum[HSTEP_TILE * 4] = {0}, term[HSTEP_TILE * 4] = {0};
    HSTEP_ALIGNED float x[HSTEP_TILE], y[HSTEP_TILE];
    HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS];
    int64_t lead = (int64_t)(index % HSTEP_GROUP), padded = (lead + n + HSTEP_GROUP - 1) / HSTEP_GROUP * HSTEP_GROUP;
    int64_t size = hstep_formats[a->format].code_bits / 8, term_size = hstep_formats[a->gradient_format].code_bits / 8;
    memcpy(sum + lead * size, a->accumulator + element * size, (size_t)(n * size));
    memcpy(term + lead * term_size, a->gradient + element * term_size, (size_t)(n * term_size));
    kernels->format[a->format].decode[0](x, sum, NULL, padded);
    kernels->format[a->gradient_format].decode[0](y, term, NULL, padded);
    kernels->accumulate(x, y, a->scale, padded);
    if (hstep_formats[a->format].stochastic)
        hstep_fill_words(a->o, &a->stream, index - (uint64_t)lead, words, padded);
    else
        memset(words, 0, sizeof words);
    kernels->format[a->format].encode[0](x, sum, NULL, words, padded, 0, 1.0f);
    memcpy(a->accumulator + element * size, sum + lead * size, (size_t)(n * size));
}

static void accumulate_task(void *argument, int64_t i)
{
    const struct accumulation *a = argument;
    const struct hstep_chunk *c = &a->chunks[i];
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t run = c->run; run < c->run + c->runs; run++) {
        int64_t element = run * a->t->run_length + c->offset, left = c->length;
        uint64_t index = a->t->index0 + (uint64_t)(run * a->t->index_stride) + (uint64_t)c->offset;
        while (left > 0) {
            int64_t n = HSTEP_TILE - (int64_t)(index % HSTEP_GROUP);
            if (n > left) n = left;
            accumulate_tile(a, element, index, n);
            element += n;
            index += (uint64_t)n;
            left -= n;
        }
    }
    hstep_fp_leave(fp);
}

/* Where the handle is not settled yet, which is not ours to do, the tensor is cut for this once. */
static int run_accumulation(struct accumulation *a)
{
    struct hstep_tensor t = *a->t;
    struct hstep_chunk *chunks = NULL;
    a->chunks = a->o->chunks + t.first_chunk;
    if (!a->o->settled) {
        hstep_lay_out(a->o, &t);
        t.chunks = hstep_cut_tensor(&t, 0, NULL);
        chunks = malloc((size_t)(t.chunks + 1) * sizeof *chunks);
        if (!chunks) return hstep_fail(a->o, HALFSTEP_ERROR_MEMORY, "no memory for the plan of tensor '%s'", t.name);
        hstep_cut_tensor(&t, 0, chunks);
        a->chunks = chunks;
        a->t = &t;
    }
    hstep_run(a->o, accumulate_task, a, t.chunks);
    free(chunks);
    return HALFSTEP_OK;
}

static int accumulate(halfstep_optimizer *o, int32_t tensor, void *accumulator, const char *format, const void *gradient,
                      const char *gradient_format, double scale)
{
    int error = hstep_check_tensor(o, tensor);
    if (error) return error;
    struct hstep_tensor *t = &o->tensors[tensor];
    struct accumulation a = {.o = o, .t = t, .accumulator = accumulator, .gradient = gradient, .scale = (float)scale};
    a.format = halfstep_format_find(format);
    a.gradient_format = halfstep_format_find(gradient_format);
    if (a.format < 0 || a.gradient_format < 0)
        return hstep_fail(o, HALFSTEP_ERROR_NAME, "no format is called '%s'", a.format < 0 ? format : gradient_format);
    /* A stochastic half would saturate, and hide from the scan of the step that it overflowed. */
    int hides = hstep_formats[a.format].stochastic && !strcmp(hstep_formats[a.format].code_dtype, "F16");
    if (hstep_formats[a.format].block || hstep_formats[a.format].extra_bits || hides)
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "'%s' cannot accumulate gradients", format);
    if (!(hstep_formats[a.gradient_format].roles & HALFSTEP_ROLE_GRADIENT))
        return hstep_fail(o, HALFSTEP_ERROR_UNSUPPORTED, "'%s' cannot store gradients", gradient_format);
    if (!(scale >= -1e30 && scale <= 1e30)) return hstep_fail(o, HALFSTEP_ERROR_RANGE, "scale = %g is out of range", scale);
    if (t->n_rows && t->n_columns && (!accumulator || !gradient))
        return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "tensor '%s': NULL accumulator or gradient", t->name);
    /* Every update counts in both counters, an accumulation in one: their difference numbers the accumulations. */
    int generator = hstep_generator_id(o->generator);
    a.stream = hstep_key_write(generator, o->seed, t->id,
                               generator == HSTEP_GENERATOR_LATTICE ? t->writes - t->state_steps : t->writes,
                               HALFSTEP_SLOT_GRADIENT);
    if ((error = run_accumulation(&a))) return error;
    if (hstep_formats[a.format].stochastic) t->writes++;
    return HALFSTEP_OK;
}

int halfstep_accumulate(halfstep_optimizer *o, int32_t tensor, void *accumulator, const char *format, const void *gradient,
                        const char *gradient_format, double scale)
{
    if (!o || !format || !gradient_format) return HALFSTEP_ERROR_ARGUMENT;
    struct hstep_fp fp = hstep_fp_enter();
    int result = accumulate(o, tensor, accumulator, format, gradient, gradient_format, scale);
    hstep_fp_leave(fp);
    return result;
}

int halfstep_bf16_stochastic(const float *in, uint16_t *out, size_t n, const uint32_t *words)
{
    if (n && (!in || !out || !words)) return HALFSTEP_ERROR_ARGUMENT;
    const struct hstep_kernels *kernels = hstep_isa_kernels(hstep_isa_find(halfstep_isa()));
    struct hstep_fp fp = hstep_fp_enter();
    for (size_t i = 0; i < n; i += HSTEP_TILE) {
        HSTEP_ALIGNED float plain[HSTEP_TILE] = {0}, x[HSTEP_TILE];
        HSTEP_ALIGNED uint16_t codes[HSTEP_TILE];
        HSTEP_ALIGNED uint32_t random[HSTEP_TILE_WORDS] = {0};
        size_t count = n - i < HSTEP_TILE ? n - i : HSTEP_TILE;
        memcpy(plain, in + i, count * 4);
        memcpy(random, words + i / 2, (count + 1) / 2 * 4);
        kernels->from_plain(plain, x, HSTEP_TILE);
        kernels->format[HSTEP_FORMAT_bf16_sr].encode[0](x, (char *)codes, NULL, random, HSTEP_TILE, 0, 1.0f);
        memcpy(out + i, codes, count * 2);
    }
    hstep_fp_leave(fp);
    return HALFSTEP_OK;
}
