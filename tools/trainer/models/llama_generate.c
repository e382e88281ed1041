/* Generates text one byte at a time with cached keys and values. Computes in fp32 from the stored weights with this
 * program's own loops, so that the bytes are the same on every machine. */
#include "trainer/models/llama_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"
#include "trainer/products/rows.h"

struct cache {
    float *keys, *values; /* [depth, context, width] */
    float *x, *hidden, *q, *out, *gate, *up, *activated, *logits, *row;
    float *scores; /* [heads, context + ROW_LANES] */
    double *p;
};

enum { MATRIX_ROWS = 32 };

void lm_cache_free(struct lm *m)
{
    if (!m->cache) return;
    free(m->cache->keys);
    free(m->cache);
    m->cache = NULL;
}

static int create_cache(struct lm *m)
{
    if (m->cache) return 0;
    size_t w = (size_t)m->config.width, f = (size_t)m->config.intermediate, v = (size_t)m->config.vocab;
    size_t t = (size_t)m->config.context, kept = (size_t)m->config.depth * t * w;
    size_t widest = w > f ? w : f;
    if (widest < v) widest = v;
    size_t floats = 2 * kept + 9 * widest + (size_t)m->config.heads * (t + ROW_LANES);
    struct cache *c = calloc(1, sizeof *c + v * sizeof *c->p);
    float *next = c ? malloc(floats * sizeof *next) : NULL;
    if (!next) {
        free(c);
        snprintf(m->error, sizeof m->error, "out of memory for generation");
        return -1;
    }
    float **parts[] = {&c->x, &c->hidden, &c->q, &c->out, &c->gate, &c->up, &c->activated, &c->logits, &c->row};
    c->p = (double *)(c + 1);
    c->keys = next;
    c->values = next += kept;
    next += kept;
    for (int i = 0; i < COUNT_OF(parts); i++, next += widest) *parts[i] = next;
    c->scores = next;
    m->cache = c;
    return 0;
}

struct vector_product {
    const struct lm_weight *weight;
    const float *x;
    float *y;
    int rows, row_length;
};

static void vector_task(void *arg, int64_t task, int thread)
{
    (void)thread;
    const struct vector_product *p = arg;
    int64_t begin = task * MATRIX_ROWS, end = begin + MATRIX_ROWS < p->rows ? begin + MATRIX_ROWS : p->rows;
    size_t size = lm_row_bytes(p->weight->dtype, p->row_length);
    for (int64_t i = begin; i < end; i++)
        p->y[i] = row_dot((const char *)p->weight->data + (size_t)i * size, p->weight->dtype, p->x, p->row_length);
}

/* y = W x */
static void multiply(struct lm *m, const struct lm_weight *weight, const float *x, float *y, int rows, int row_length)
{
    struct vector_product p = {weight, x, y, rows, row_length};
    parallel_run(m->team.pool, (rows + MATRIX_ROWS - 1) / MATRIX_ROWS, vector_task, &p);
}

static void norm(struct lm *m, const struct lm_weight *gain, const float *x, float *out)
{
    row_load(m->cache->row, gain->data, gain->dtype, m->config.width);
    row_norm(out, LM_F32, x, m->cache->row, (float)m->config.rms_norm_eps, m->config.width);
}

struct attention {
    struct lm *model;
    const float *keys, *values;
    int position;
};

static void attend_task(void *arg, int64_t head, int thread)
{
    (void)thread;
    const struct attention *a = arg;
    struct lm *m = a->model;
    struct cache *c = m->cache;
    int w = m->config.width, d = w / m->config.heads;
    float *scores = c->scores + head * (m->config.context + ROW_LANES), *out = c->out + head * d;
    for (int t = 0; t <= a->position; t++)
        scores[t] = row_dot(a->keys + (int64_t)t * w + head * d, LM_F32, c->q + head * d, d);
    struct row_softmax kept;
    row_softmax(scores, LM_F32, scores, &kept, 1.0f / sqrtf((float)d), a->position + 1, a->position + 1);
    memset(out, 0, (size_t)d * sizeof *out);
    for (int t = 0; t <= a->position; t++) {
        const float *value = a->values + (int64_t)t * w + head * d;
        for (int i = 0; i < d; i++) out[i] += scores[t] * value[i];
    }
}

/* Processes the byte at a position. Leaves the logits of the next byte in the cache. */
static void advance(struct lm *m, const struct lm_weight *weights, uint8_t token, int position)
{
    struct cache *c = m->cache;
    int w = m->config.width, f = m->config.intermediate, heads = m->config.heads, half = w / heads / 2;
    const float *cosine = m->cosine + (int64_t)position * half, *sine = m->sine + (int64_t)position * half;
    row_load(c->x, (const char *)weights[0].data + token * lm_row_bytes(weights[0].dtype, w), weights[0].dtype, w);
    for (int layer = 0; layer < m->config.depth; layer++) {
        const struct lm_weight *l = weights + 1 + layer * PER_LAYER;
        int64_t first = (int64_t)layer * m->config.context * w;
        float *key = c->keys + first + (int64_t)position * w, *value = c->values + first + (int64_t)position * w;
        norm(m, &l[IN_NORM], c->x, c->hidden);
        multiply(m, &l[Q], c->hidden, c->q, w, w);
        multiply(m, &l[K], c->hidden, key, w, w);
        multiply(m, &l[V], c->hidden, value, w, w);
        row_rotate(c->q, LM_F32, c->q, cosine, sine, 1.0f, heads, half);
        row_rotate(key, LM_F32, key, cosine, sine, 1.0f, heads, half);
        struct attention attention = {m, c->keys + first, c->values + first, position};
        parallel_run(m->team.pool, heads, attend_task, &attention);
        multiply(m, &l[O], c->out, c->hidden, w, w);
        row_add_to(c->x, c->hidden, w);
        norm(m, &l[POST_NORM], c->x, c->hidden);
        multiply(m, &l[GATE], c->hidden, c->gate, f, w);
        multiply(m, &l[UP], c->hidden, c->up, f, w);
        row_swiglu(c->activated, c->gate, c->up, LM_F32, f);
        multiply(m, &l[DOWN], c->activated, c->hidden, w, f);
        row_add_to(c->x, c->hidden, w);
    }
    norm(m, &weights[m->count - 2], c->x, c->hidden);
    multiply(m, &weights[m->count - 1], c->hidden, c->logits, m->config.vocab, w);
}

static uint8_t choose(const struct lm *m, double temperature, uint64_t seed, uint64_t index)
{
    const float *logits = m->cache->logits;
    double *p = m->cache->p;
    int n = m->config.vocab, best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    if (temperature == 0) return (uint8_t)best;
    double sum = 0;
    for (int i = 0; i < n; i++) sum += p[i] = exact_exp(((double)logits[i] - (double)logits[best]) / temperature);
    double aim = (double)(hash_counters(seed, index, 0, 0) >> 11) * 0x1p-53 * sum;
    for (int i = 0; i < n; i++) {
        aim -= p[i];
        if (aim < 0) return (uint8_t)i;
    }
    return (uint8_t)best;
}

int lm_generate(struct lm *m, const struct lm_weight *weights, const uint8_t *prompt, size_t prompt_bytes,
                double temperature, uint64_t seed, uint8_t *out, size_t n)
{
    m->error[0] = 0;
    if (!(temperature >= 0 && temperature <= 1e6)) {
        snprintf(m->error, sizeof m->error, "temperature %g is not in 0..1000000", temperature);
        return -1;
    }
    if (create_cache(m)) return -1;
    size_t context = (size_t)m->config.context, half = context > 1 ? context / 2 : 1, position = 0;
    static const uint8_t newline[] = "\n";
    if (!prompt_bytes) {
        prompt = newline;
        prompt_bytes = 1;
    }
    /* A full context starts over with its last half. Cached keys and values of that half cannot be kept, because they
     * depend on bytes before it. */
    size_t begin = prompt_bytes > context ? prompt_bytes - half : 0;
    for (size_t i = begin; i < prompt_bytes; i++) advance(m, weights, prompt[i], (int)position++);
    for (size_t i = 0; i < n; i++) {
        out[i] = choose(m, temperature, seed, i);
        if (i + 1 == n) break;
        if (position < context) {
            advance(m, weights, out[i], (int)position++);
            continue;
        }
        position = 0;
        size_t total = prompt_bytes + i + 1;
        for (size_t k = total > half ? total - half : 0; k < total; k++)
            advance(m, weights, k < prompt_bytes ? prompt[k] : out[k - prompt_bytes], (int)position++);
    }
    return 0;
}
