/* Sums of gradients outside a step, and stochastic rounding by itself. */
#include <string.h>

#include "base/process/detail.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"

static void accumulate_tile(const struct hstep_accumulation *a, struct hstep_stretch s)
{
    const struct hstep_kernels *kernels = a->context->kernels;
    HSTEP_ALIGNED char sum[HSTEP_TILE * 4] = {0}, term[HSTEP_TILE * 4] = {0};
    HSTEP_ALIGNED float x[HSTEP_TILE], y[HSTEP_TILE];
    HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS];
    int64_t lead = (int64_t)(s.index % HSTEP_CELL), padded = (lead + s.n + HSTEP_CELL - 1) / HSTEP_CELL * HSTEP_CELL;
    int64_t size = hstep_formats[a->format].code_bits / 8, term_size = hstep_formats[a->gradient_format].code_bits / 8;
    memcpy(sum + lead * size, a->accumulator + s.element * size, (size_t)(s.n * size));
    memcpy(term + lead * term_size, a->gradient + s.element * term_size, (size_t)(s.n * term_size));
    kernels->format[a->format].decode[0](x, sum, NULL, padded);
    kernels->format[a->gradient_format].decode[0](y, term, NULL, padded);
    kernels->accumulate(x, y, a->scale, padded);
    if (hstep_formats[a->format].stochastic)
        hstep_fill_words(kernels, a->generator, &a->strand, s.index - (uint64_t)lead, words, padded);
    else memset(words, 0, sizeof words);
    kernels->format[a->format].encode[0](x, sum, NULL, words, padded, 0, 1.0f);
    memcpy(a->accumulator + s.element * size, sum + lead * size, (size_t)(s.n * size));
}

static void accumulate_task(void *argument, int64_t i)
{
    const struct hstep_accumulation *a = argument;
    const struct hstep_chunk *c = &a->chunks[i];
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t track = c->track; track < c->track + c->tracks; track++) {
        struct hstep_stretch s = hstep_stretch_of(a->tensor, c, track);
        while (s.n > 0) accumulate_tile(a, hstep_take(&s, HSTEP_TILE - (int64_t)(s.index % HSTEP_CELL)));
    }
    hstep_fp_leave(fp);
}

int hstep_host_accumulate(const struct hstep_accumulation *a)
{
    hstep_run(a->context, accumulate_task, (void *)(uintptr_t)a, a->tensor->chunks);
    return HALFSTEP_OK;
}

int halfstep_bf16_stochastic(const float *in, uint16_t *out, size_t n, const uint32_t *words)
{
    if (n && (!in || !out || !words))
        return hstep_fail_alone(HALFSTEP_ERROR_ARGUMENT, "%s: %s is NULL", __func__,
                                !in    ? "in"
                                : !out ? "out"
                                       : "words");
    const struct hstep_kernels *kernels = hstep_isa_in_use();
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
