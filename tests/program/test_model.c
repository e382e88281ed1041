/* Tests the language model and the text loader of the trainer. The model is judged against a second, plain
 * implementation in double precision below. Compared are its loss and, by central differences of that loss, every
 * tensor's gradient. Over 500 lines because that second implementation and the helpers serve all groups. */
#include <math.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "scratch.h"
#include "test.h"
#include "trainer/data/data.h"
#include "trainer/products/matmul.h"
#include "trainer/products/parallel.h"
#include "trainer/products/rows.h"
#include "trainer/models/llama.h"

static char error[256];

static double uniform(uint64_t seed, uint64_t i) { return (double)(hash_counters(seed, i, 77, 0) >> 11) * 0x1p-53; }

static void *need(void *p)
{
    if (!p) {
        printf("out of memory\n");
        exit(1);
    }
    return p;
}

/* ---- weights of a test model ---- */

struct weights {
    struct lm_config config;
    int count;
    struct lm_tensor *info;
    float **values; /* fp32 */
    void **stored;  /* the same in the stored type */
    struct lm_weight *list;
};

static int64_t elements(const struct weights *w, int i) { return w->info[i].rows * w->info[i].row_length; }

/* std > 0 replaces the initial deviation, so that attention and SwiGLU are far from linear. */
static struct weights make_weights(struct lm_config config, int dtype, double std, uint64_t seed)
{
    struct weights w = {.config = config};
    if (lm_config_check(&w.config, error, sizeof error)) {
        printf("%s\n", error);
        exit(1);
    }
    w.count = lm_tensor_count(&w.config);
    w.info = need(calloc((size_t)w.count, sizeof *w.info));
    w.values = need(calloc((size_t)w.count, sizeof *w.values));
    w.stored = need(calloc((size_t)w.count, sizeof *w.stored));
    w.list = need(calloc((size_t)w.count, sizeof *w.list));
    for (int i = 0; i < w.count; i++) {
        lm_tensor_info(&w.config, i, &w.info[i]);
        int64_t n = elements(&w, i);
        w.values[i] = need(malloc((size_t)n * sizeof(float)));
        w.stored[i] = need(malloc((size_t)n * lm_dtype_bytes(dtype)));
        lm_init_tensor(&w.config, i, seed, w.values[i]);
        for (int64_t k = 0; k < n && std > 0; k++) {
            if (w.info[i].init_std > 0) w.values[i][k] *= (float)(std / w.info[i].init_std);
            else w.values[i][k] = (float)(0.5 + uniform(seed + (uint64_t)i, (uint64_t)k));
        }
        row_store(w.stored[i], dtype, w.values[i], (int)n);
        row_load(w.values[i], w.stored[i], dtype, (int)n);
        w.list[i] = (struct lm_weight){w.stored[i], dtype};
    }
    return w;
}

static void free_weights(struct weights *w)
{
    for (int i = 0; i < w->count; i++) {
        free(w->values[i]);
        free(w->stored[i]);
    }
    free(w->info);
    free(w->values);
    free(w->stored);
    free(w->list);
}

static void **make_buffers(const struct weights *w)
{
    void **buffers = need(calloc((size_t)w->count, sizeof *buffers));
    for (int i = 0; i < w->count; i++) buffers[i] = need(calloc((size_t)elements(w, i), sizeof(float)));
    return buffers;
}

static void free_buffers(const struct weights *w, void **buffers)
{
    for (int i = 0; i < w->count; i++) free(buffers[i]);
    free(buffers);
}

static void make_tokens(uint8_t *tokens, int n, uint64_t seed)
{
    for (int i = 0; i < n; i++) tokens[i] = (uint8_t)(hash_counters(seed, (uint64_t)i, 5, 0) % 256);
}

static struct lm *make_model(const struct lm_config *config, struct lm_options options)
{
    struct lm *m = lm_create(config, &options, error, sizeof error);
    if (m) return m;
    printf("%s\n", error);
    exit(1);
}

/* Makes a model that is trained on so many sequences, with two threads. */
static struct lm *make_trained(const struct lm_config *config, int batch, int compute)
{
    return make_model(config, (struct lm_options){.batch = batch, .training = 1, .compute = compute, .threads = 2});
}

/* Writes all gradients of the last forward pass to buffers. Returns 0, or -1 without such a pass. */
static int backward(struct lm *m, const struct weights *w, double scale, void **buffers)
{
    return lm_backward(m, w->list, scale, &(struct lm_sink){.buffers = buffers});
}

/* ---- the plain implementation ---- */

static void plain_norm(double *out, const double *x, const double *gain, int w)
{
    double sum = 0;
    for (int i = 0; i < w; i++) sum += x[i] * x[i];
    for (int i = 0; i < w; i++) out[i] = x[i] / sqrt(sum / w + 1e-5) * gain[i];
}

static void plain_matrix(double *out, const double *weight, const double *x, int rows, int columns)
{
    for (int i = 0; i < rows; i++) {
        out[i] = 0;
        for (int j = 0; j < columns; j++) out[i] += weight[i * columns + j] * x[j];
    }
}

static void plain_rotate(double *head, int position, int d)
{
    for (int i = 0; i < d / 2; i++) {
        double angle = position * pow(10000.0, -2.0 * i / d), a = head[i], b = head[i + d / 2];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + d / 2] = b * cos(angle) + a * sin(angle);
    }
}

enum { MOST_WIDTH = 256, MOST_LENGTH = 160 };

/* Returns the mean loss. If logits is set, also writes the logits after the last position. */
static double plain_loss(const struct lm_config *c, double *const *weights, const uint8_t *tokens, int batch,
                         int length, double *logits_out)
{
    static double x[MOST_LENGTH][MOST_WIDTH], q[MOST_LENGTH][MOST_WIDTH], k[MOST_LENGTH][MOST_WIDTH],
        v[MOST_LENGTH][MOST_WIDTH];
    double hidden[MOST_WIDTH], out[MOST_WIDTH], gate[4 * MOST_WIDTH], up[4 * MOST_WIDTH], logits[256], total = 0;
    int w = c->width, f = c->intermediate, d = w / c->heads, count = lm_tensor_count(c);
    for (int b = 0; b < batch; b++) {
        const uint8_t *sequence = tokens + b * (length + 1);
        for (int t = 0; t < length; t++)
            for (int i = 0; i < w; i++) x[t][i] = weights[0][sequence[t] * w + i];
        for (int layer = 0; layer < c->depth; layer++) {
            double *const *l = weights + 1 + 9 * layer;
            for (int t = 0; t < length; t++) {
                plain_norm(hidden, x[t], l[0], w);
                plain_matrix(q[t], l[1], hidden, w, w);
                plain_matrix(k[t], l[2], hidden, w, w);
                plain_matrix(v[t], l[3], hidden, w, w);
                for (int h = 0; h < c->heads; h++) {
                    plain_rotate(q[t] + h * d, t, d);
                    plain_rotate(k[t] + h * d, t, d);
                }
            }
            for (int t = 0; t < length; t++) {
                for (int h = 0; h < c->heads; h++) {
                    double p[MOST_LENGTH], sum = 0;
                    for (int s = 0; s <= t; s++) {
                        p[s] = 0;
                        for (int i = 0; i < d; i++) p[s] += q[t][h * d + i] * k[s][h * d + i];
                        p[s] = exp(p[s] / sqrt(d));
                        sum += p[s];
                    }
                    for (int i = 0; i < d; i++) {
                        out[h * d + i] = 0;
                        for (int s = 0; s <= t; s++) out[h * d + i] += p[s] / sum * v[s][h * d + i];
                    }
                }
                plain_matrix(hidden, l[4], out, w, w);
                for (int i = 0; i < w; i++) x[t][i] += hidden[i];
                plain_norm(hidden, x[t], l[5], w);
                plain_matrix(gate, l[6], hidden, f, w);
                plain_matrix(up, l[7], hidden, f, w);
                for (int i = 0; i < f; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
                plain_matrix(hidden, l[8], gate, w, f);
                for (int i = 0; i < w; i++) x[t][i] += hidden[i];
            }
        }
        for (int t = 0; t < length; t++) {
            plain_norm(hidden, x[t], weights[count - 2], w);
            plain_matrix(logits, weights[count - 1], hidden, 256, w);
            double sum = 0;
            for (int i = 0; i < 256; i++) sum += exp(logits[i]);
            total += log(sum) - logits[sequence[t + 1]];
        }
    }
    if (logits_out) memcpy(logits_out, logits, sizeof logits);
    return total / (batch * length);
}

static double **widen(const struct weights *w)
{
    double **wide = need(calloc((size_t)w->count, sizeof *wide));
    for (int i = 0; i < w->count; i++) {
        wide[i] = need(malloc((size_t)elements(w, i) * sizeof(double)));
        for (int64_t k = 0; k < elements(w, i); k++) wide[i][k] = w->values[i][k];
    }
    return wide;
}

/* ---- tests ---- */

static const struct lm_config tiny = {.width = 24, .depth = 2, .heads = 3, .context = 16, .intermediate = 40};

static void test_loss(void)
{
    /* Longer than one block of attention rows, and not a multiple of any block. */
    const struct {
        struct lm_config config;
        int batch, length;
    } cases[] = {
        {tiny, 2, 7},
        {tiny, 1, 1},
        {{.width = 64, .depth = 2, .heads = 2, .context = 150}, 2, 150},
        {{.width = 32, .depth = 1, .heads = 1, .context = 130}, 3, 129},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        int batch = cases[i].batch, length = cases[i].length;
        struct weights w = make_weights(cases[i].config, LM_F32, 0.15, 3);
        double **wide = widen(&w);
        uint8_t *tokens = need(malloc((size_t)batch * ((size_t)length + 1)));
        make_tokens(tokens, batch * (length + 1), 9);
        double expected = plain_loss(&w.config, wide, tokens, batch, length, NULL);
        struct lm *m = make_trained(&cases[i].config, batch, LM_F32);
        double forward = lm_forward(m, w.list, tokens, batch, length), eval = lm_eval(m, w.list, tokens, batch, length);
        CHECK(fabs(forward - expected) < 2e-6 * expected, "case %zu: loss %.9g, plain double %.9g", i, forward,
              expected);
        CHECK(forward == eval, "case %zu: forward %.17g, eval %.17g", i, forward, eval);
        lm_destroy(m);
        free(tokens);
        free_buffers(&w, (void **)wide);
        free_weights(&w);
    }
}

static void test_gradients(void)
{
    enum { BATCH = 2, LENGTH = 70 };
    const struct lm_config shape = {.width = 16, .depth = 2, .heads = 2, .context = LENGTH, .intermediate = 24};
    struct weights w = make_weights(shape, LM_F32, 0.3, 4);
    double **wide = widen(&w);
    void **gradients = make_buffers(&w);
    uint8_t tokens[BATCH * (LENGTH + 1)];
    make_tokens(tokens, sizeof tokens, 10);
    struct lm *m = make_trained(&shape, BATCH, LM_F32);
    lm_forward(m, w.list, tokens, BATCH, LENGTH);
    CHECK(backward(m, &w, 1.0, gradients) == 0, "%s", lm_error(m));
    CHECK(backward(m, &w, 1.0, gradients) == -1, "two backwards from one forward");
    for (int i = 0; i < w.count; i++) {
        const float *gradient = gradients[i];
        int64_t n = elements(&w, i);
        double norm = 0, difference = 0, measured = 0;
        for (int64_t k = 0; k < n; k++) norm += (double)gradient[k] * gradient[k];
        norm = sqrt(norm);
        CHECK(norm > 1e-4, "%s: gradient norm %g is too small to judge", w.info[i].name, norm);
        /* Perturbs some single elements, then a random direction through all of them. */
        for (int64_t trial = 0; trial < 12; trial++) {
            int64_t k = (int64_t)(hash_counters(1, (uint64_t)i, (uint64_t)trial, 0) % (uint64_t)n);
            if (i == 0) k = tokens[trial] * w.config.width + k % w.config.width;
            double old = wide[i][k], h = 1e-4;
            wide[i][k] = old + h;
            double above = plain_loss(&w.config, wide, tokens, BATCH, LENGTH, NULL);
            wide[i][k] = old - h;
            double below = plain_loss(&w.config, wide, tokens, BATCH, LENGTH, NULL);
            wide[i][k] = old;
            double slope = (above - below) / (2 * h);
            CHECK(fabs(slope - (double)gradient[k]) < 1e-4 * norm / sqrt((double)n) + 1e-5 * fabs(slope) + 1e-8,
                  "%s element %lld: gradient %.8g, central difference %.8g", w.info[i].name, (long long)k, gradient[k],
                  slope);
        }
        for (int side = -1; side <= 1; side += 2) {
            for (int64_t k = 0; k < n; k++)
                wide[i][k] = (double)w.values[i][k] + side * 1e-5 * (uniform(20 + (uint64_t)i, (uint64_t)k) - 0.5);
            difference += side * plain_loss(&w.config, wide, tokens, BATCH, LENGTH, NULL);
        }
        for (int64_t k = 0; k < n; k++) {
            measured += (double)gradient[k] * (uniform(20 + (uint64_t)i, (uint64_t)k) - 0.5);
            wide[i][k] = w.values[i][k];
        }
        difference /= 2e-5;
        CHECK(fabs(difference - measured) < 2e-5 * norm,
              "%s along a random direction: gradient %.8g, central difference %.8g", w.info[i].name, measured,
              difference);
    }
    lm_destroy(m);
    free_buffers(&w, gradients);
    free_buffers(&w, (void **)wide);
    free_weights(&w);
}

struct receiver {
    const struct weights *w;
    void **buffers;
    int dtype, next, wrong_order, poison;
};

/* Keeps the gradient, then ruins the weight, which the model must not read again. */
static void receive(void *arg, int tensor, const void *gradient)
{
    struct receiver *r = arg;
    size_t n = (size_t)elements(r->w, tensor);
    memcpy(r->buffers[tensor], gradient, n * lm_dtype_bytes(r->dtype));
    if (r->poison) memset(r->w->stored[tensor], 0xFF, n * lm_dtype_bytes(r->w->list[tensor].dtype));
    if ((r->next == 0 && tensor != r->w->count - 1) || (r->next == r->w->count - 1 && tensor != 0)) r->wrong_order = 1;
    r->next++;
}

static void test_release(void)
{
    const struct lm_config shape = {.width = 96, .depth = 2, .heads = 4, .context = 33};
    uint8_t tokens[5 * 34];
    make_tokens(tokens, sizeof tokens, 11);
    for (int dtype = LM_F32; dtype <= LM_F16; dtype++) {
        for (int compute = LM_F32; compute <= LM_BF16; compute++) {
            for (int stored = LM_F32; stored <= LM_F16; stored++) {
                struct weights w = make_weights(shape, stored, 0.1, 5);
                void **once = make_buffers(&w), **released = make_buffers(&w);
                struct lm_options options = {
                    .batch = 5, .training = 1, .compute = compute, .gradients = dtype, .threads = 2};
                struct lm *m = make_model(&shape, options);
                lm_forward(m, w.list, tokens, 5, 33);
                CHECK(backward(m, &w, 4.0, once) == 0, "%s", lm_error(m));
                lm_destroy(m);
                options.release = 1;
                m = make_model(&shape, options);
                struct receiver r = {.w = &w, .buffers = released, .dtype = dtype, .poison = 1};
                lm_forward(m, w.list, tokens, 5, 33);
                CHECK(lm_backward(m, w.list, 4.0, &(struct lm_sink){.on_gradient = receive, .arg = &r}) == 0, "%s",
                      lm_error(m));
                CHECK(r.next == w.count && !r.wrong_order, "%d of %d gradients, order wrong: %d", r.next, w.count,
                      r.wrong_order);
                int64_t layer = 0;
                for (int i = 1; i <= 9; i++) layer += elements(&w, i);
                if (layer < elements(&w, 0)) layer = elements(&w, 0);
                CHECK(lm_gradient_peak_bytes(m) <= (size_t)layer * lm_dtype_bytes(dtype) + 4096,
                      "%zu bytes of gradients, a layer has %lld elements", lm_gradient_peak_bytes(m), (long long)layer);
                for (int i = 0; i < w.count; i++)
                    CHECK(!memcmp(once[i], released[i], (size_t)elements(&w, i) * lm_dtype_bytes(dtype)),
                          "%s: gradients %d compute %d stored %d differ between release and all at once",
                          w.info[i].name, dtype, compute, stored);
                lm_destroy(m);
                free_buffers(&w, once);
                free_buffers(&w, released);
                free_weights(&w);
            }
        }
    }
}

/* Replaces the matrices of an fp32 model by numbers that packed blocks can hold, and returns these weights packed. The
 * caller frees their data. */
static struct lm_weight *pack_weights(const struct weights *w)
{
    struct lm_weight *list = need(malloc((size_t)w->count * sizeof *list));
    memcpy(list, w->list, (size_t)w->count * sizeof *list);
    for (int i = 0; i < w->count; i++) {
        const int64_t rows = w->info[i].rows, n = w->info[i].row_length;
        float *values = w->stored[i];
        if (w->info[i].ndim == 1) continue;
        unsigned char *at = need(calloc((size_t)rows, lm_row_bytes(LM_PACKED, n)));
        list[i] = (struct lm_weight){at, LM_PACKED};
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = 0; k < n; k++, values++) {
                const float scale = ldexpf(1.0f + (float)(k / ROW_BLOCK) * 0x1p-7f, -7 - (int)(row % 3));
                if (k % ROW_BLOCK == 0) {
                    row_store(at, LM_BF16, &scale, 1);
                    at += ROW_BLOCK_BYTES;
                }
                const float code = fmaxf(fminf(rintf(*values / scale), 127.0f), -127.0f);
                at[k % ROW_BLOCK - ROW_BLOCK] = (unsigned char)(int)code;
                *values = code * scale;
            }
    }
    return list;
}

/* Packed weights give the bits of the same numbers in fp32. Rows end within a block. */
static void test_packed(void)
{
    const struct lm_config shape = {.width = 40, .depth = 2, .heads = 4, .context = 20, .intermediate = 72};
    struct weights w = make_weights(shape, LM_F32, 0.2, 15);
    struct lm_weight *packed = pack_weights(&w), *const plain = w.list;
    uint8_t tokens[3 * 21], said[2][30];
    make_tokens(tokens, sizeof tokens, 16);
    for (int compute = LM_F32; compute <= LM_BF16; compute++) {
        void **gradients[2];
        double loss[2];
        for (int i = 0; i < 2; i++) {
            struct lm *m = make_trained(&shape, 3, compute);
            w.list = i ? packed : plain;
            gradients[i] = make_buffers(&w);
            loss[i] = lm_forward(m, w.list, tokens, 3, 20);
            CHECK(backward(m, &w, 1.0, gradients[i]) == 0, "%s", lm_error(m));
            CHECK(lm_generate(m, w.list, tokens, 5, 0.8, 1, said[i], sizeof said[i]) == 0, "%s", lm_error(m));
            lm_destroy(m);
        }
        CHECK(loss[0] == loss[1], "loss %.9g, %.9g packed", loss[0], loss[1]);
        CHECK(!memcmp(said[0], said[1], sizeof said[0]), "packed weights say other bytes");
        for (int i = 0; i < w.count; i++)
            CHECK(!memcmp(gradients[0][i], gradients[1][i], (size_t)elements(&w, i) * sizeof(float)),
                  "%s: gradients differ", w.info[i].name);
        free_buffers(&w, gradients[0]);
        free_buffers(&w, gradients[1]);
    }
    for (int i = 0; i < w.count; i++)
        if (packed[i].dtype == LM_PACKED) free((void *)(uintptr_t)packed[i].data);
    free(packed);
    w.list = plain;
    free_weights(&w);
}

/* Gradient types are roundings of the fp32 gradient; a power-of-two scale is exact. */
static void test_gradient_types(void)
{
    const struct lm_config shape = {.width = 64, .depth = 1, .heads = 2, .context = 20};
    struct weights w = make_weights(shape, LM_F32, 0.2, 6);
    uint8_t tokens[3 * 21];
    make_tokens(tokens, sizeof tokens, 12);
    void **buffers[4];
    for (int i = 0; i < 4; i++) {
        buffers[i] = make_buffers(&w);
        struct lm *m =
            make_model(&shape, (struct lm_options){.batch = 3, .training = 1, .gradients = i % 3, .threads = 1});
        lm_forward(m, w.list, tokens, 3, 20);
        backward(m, &w, i == 3 ? 1024.0 : 1.0, buffers[i]);
        lm_destroy(m);
    }
    for (int i = 0; i < w.count; i++) {
        const float *exact = buffers[0][i], *scaled = buffers[3][i];
        const uint16_t *bf16 = buffers[1][i], *f16 = buffers[2][i];
        for (int64_t k = 0; k < elements(&w, i); k++) {
            float b, h;
            row_load(&b, &bf16[k], LM_BF16, 1);
            row_load(&h, &f16[k], LM_F16, 1);
            CHECK(fabsf(b - exact[k]) <= fabsf(exact[k]) * 0x1p-8f, "%s[%lld]: %g as bf16 %g", w.info[i].name,
                  (long long)k, exact[k], b);
            CHECK(fabsf(h - exact[k]) <= fabsf(exact[k]) * 0x1p-11f + 0x1p-25f, "%s[%lld]: %g as f16 %g",
                  w.info[i].name, (long long)k, exact[k], h);
            CHECK(scaled[k] == exact[k] * 1024.0f, "%s[%lld]: %g scaled by 1024 is %g", w.info[i].name, (long long)k,
                  exact[k], scaled[k]);
        }
    }
    for (int i = 0; i < 4; i++) free_buffers(&w, buffers[i]);
    free_weights(&w);
}

static void test_determinism(void)
{
    const struct lm_config shape = {.width = 128, .depth = 2, .heads = 4, .context = 65};
    uint8_t tokens[6 * 66];
    make_tokens(tokens, sizeof tokens, 13);
    const int threads[] = {2, 2, 1, 3, 8};
    for (int compute = LM_F32; compute <= LM_BF16; compute++) {
        struct weights w = make_weights(shape, LM_BF16, 0.1, 7);
        void **first = make_buffers(&w), **again = make_buffers(&w);
        double loss = 0;
        for (int k = 0; k < 5; k++) {
            struct lm *m = make_model(
                &shape, (struct lm_options){.batch = 8, .training = 1, .compute = compute, .threads = threads[k]});
            EQUAL(lm_threads(m), threads[k]);
            double got = lm_forward(m, w.list, tokens, 6, 65);
            if (!k) loss = got;
            CHECK(got == loss, "compute %d, %d threads: loss %.17g, first %.17g", compute, threads[k], got, loss);
            backward(m, &w, 1.0, k ? again : first);
            for (int i = 0; k && i < w.count; i++)
                CHECK(!memcmp(first[i], again[i], (size_t)elements(&w, i) * sizeof(float)),
                      "compute %d, %d threads: %s differs", compute, threads[k], w.info[i].name);
            lm_destroy(m);
        }
        free_buffers(&w, first);
        free_buffers(&w, again);
        free_weights(&w);
    }
}

static void test_bf16(void)
{
    const struct lm_config shape = {.width = 128, .depth = 3, .heads = 4, .context = 64};
    struct weights w = make_weights(shape, LM_F32, 0, 8);
    uint8_t tokens[4 * 65];
    make_tokens(tokens, sizeof tokens, 14);
    void **exact = make_buffers(&w), **rounded = make_buffers(&w);
    double loss[2];
    for (int compute = LM_F32; compute <= LM_BF16; compute++) {
        struct lm *m = make_trained(&shape, 4, compute);
        loss[compute] = lm_forward(m, w.list, tokens, 4, 64);
        backward(m, &w, 1.0, compute ? rounded : exact);
        lm_destroy(m);
    }
    CHECK(fabs(loss[0] - loss[1]) < 0.005 && loss[0] != loss[1], "loss %.9g in f32, %.9g in bf16", loss[0], loss[1]);
    for (int i = 0; i < w.count; i++) {
        const float *a = exact[i], *b = rounded[i];
        double ab = 0, aa = 0, bb = 0;
        for (int64_t k = 0; k < elements(&w, i); k++) {
            ab += (double)a[k] * b[k];
            aa += (double)a[k] * a[k];
            bb += (double)b[k] * b[k];
        }
        CHECK(ab / sqrt(aa * bb) > 0.995, "%s: cosine of bf16 and f32 gradients %g", w.info[i].name,
              ab / sqrt(aa * bb));
    }
    free_buffers(&w, exact);
    free_buffers(&w, rounded);
    free_weights(&w);
}

static const char text[] =
    "In a village of La Mancha, the name of which I have no desire to call to mind, there lived "
    "not long since one of those gentlemen that keep a lance in the lance-rack, an old buckler, a "
    "lean hack, and a greyhound for coursing.";

/* Adam on one batch, then the model must say it by heart. */
static void test_overfit(void)
{
    enum { LENGTH = 48, BATCH = 4, STEPS = 120 };
    const struct lm_config shape = {.width = 64, .depth = 2, .heads = 4, .context = LENGTH};
    struct weights w = make_weights(shape, LM_F32, 0, 9);
    void **gradients = make_buffers(&w), **moment = make_buffers(&w), **square = make_buffers(&w);
    uint8_t tokens[BATCH * (LENGTH + 1)];
    memcpy(tokens, text, sizeof tokens);
    struct lm *m = make_trained(&shape, BATCH, LM_BF16);
    double loss = 0, first = 0, power1 = 1, power2 = 1;
    for (int step = 0; step < STEPS; step++) {
        loss = lm_forward(m, w.list, tokens, BATCH, LENGTH);
        if (!step) first = loss;
        backward(m, &w, 1.0, gradients);
        power1 *= 0.9;
        power2 *= 0.95;
        for (int i = 0; i < w.count; i++) {
            float *x = w.stored[i], *g = gradients[i], *a = moment[i], *b = square[i];
            for (int64_t k = 0; k < elements(&w, i); k++) {
                a[k] = 0.9f * a[k] + 0.1f * g[k];
                b[k] = 0.95f * b[k] + 0.05f * g[k] * g[k];
                x[k] -= 0.005f * (a[k] / (float)(1 - power1)) / (sqrtf(b[k] / (float)(1 - power2)) + 1e-8f);
            }
        }
    }
    CHECK(first > 5 && first < 6, "loss of an untrained model: %g", first);
    CHECK(loss < 0.1, "loss after %d steps on one batch: %g", STEPS, loss);
    uint8_t said[LENGTH - 12];
    CHECK(lm_generate(m, w.list, tokens, 12, 0, 1, said, sizeof said) == 0, "%s", lm_error(m));
    CHECK(!memcmp(said, tokens + 12, sizeof said), "memorized text came out as \"%.*s\"", (int)sizeof said,
          (char *)said);
    lm_destroy(m);
    free_buffers(&w, gradients);
    free_buffers(&w, moment);
    free_buffers(&w, square);
    free_weights(&w);
}

static void test_generate(void)
{
    enum { N = 90 };
    struct weights w = make_weights(tiny, LM_BF16, 0.4, 10);
    double **wide = widen(&w);
    struct lm *m = make_model(&tiny, (struct lm_options){.threads = 2}),
              *single = make_model(&tiny, (struct lm_options){.threads = 1});
    uint8_t a[N], b[N];
    const uint8_t *prompt = (const uint8_t *)"Call me";
    CHECK(lm_generate(m, w.list, prompt, 7, 0.8, 42, a, N) == 0, "%s", lm_error(m));
    CHECK(lm_generate(single, w.list, prompt, 7, 0.8, 42, b, N) == 0, "%s", lm_error(single));
    CHECK(!memcmp(a, b, N), "the same seed gave other bytes");
    lm_generate(m, w.list, prompt, 7, 0.8, 43, b, N);
    CHECK(memcmp(a, b, N), "another seed gave the same bytes");
    lm_generate(m, w.list, prompt, 7, 0, 1, a, N);
    lm_generate(m, w.list, prompt, 7, 0, 2, b, N);
    CHECK(!memcmp(a, b, N), "temperature 0 depends on the seed");
    lm_generate(m, w.list, prompt, 7, 0, 2, b, 10);
    CHECK(!memcmp(a, b, 10), "temperature 0 depends on the number of bytes");
    /* Returns the likeliest next byte by the plain implementation, over the window, which starts over from half. */
    uint8_t all[7 + N + 1] = "Call me";
    memcpy(all + 7, a, N);
    for (int i = 0, start = 0; i < 40; i++) {
        if (7 + i - start > 16) start = 7 + i - 8;
        double logits[256];
        plain_loss(&w.config, wide, all + start, 1, 7 + i - start, logits);
        int best = 0;
        for (int k = 1; k < 256; k++)
            if (logits[k] > logits[best]) best = k;
        CHECK(best == a[i], "byte %d: %d, by the plain implementation %d", i, a[i], best);
    }
    /* Odd prompts. */
    uint8_t lengthy[100];
    make_tokens(lengthy, sizeof lengthy, 3);
    CHECK(lm_generate(m, w.list, NULL, 0, 0, 1, a, N) == 0, "%s", lm_error(m));
    lm_generate(m, w.list, (const uint8_t *)"\n", 1, 0, 1, b, N);
    CHECK(!memcmp(a, b, N), "an empty prompt is not a newline");
    CHECK(lm_generate(m, w.list, lengthy, sizeof lengthy, 0, 1, a, N) == 0, "%s", lm_error(m));
    CHECK(lm_generate(m, w.list, lengthy, sizeof lengthy, 0, 1, a, 0) == 0, "%s", lm_error(m));
    CHECK(lm_generate(m, w.list, prompt, 7, -1, 1, a, N) == -1 && strstr(lm_error(m), "temperature"), "\"%s\"",
          lm_error(m));
    CHECK(lm_generate(m, w.list, prompt, 7, NAN, 1, a, N) == -1, "a temperature of NaN is accepted");
    lm_destroy(m);
    lm_destroy(single);
    free_buffers(&w, (void **)wide);
    free_weights(&w);
}

static void expect_error(struct lm_config config, struct lm_options options, const char *word)
{
    error[0] = 0;
    struct lm *m = lm_create(&config, &options, error, sizeof error);
    CHECK(!m, "accepted, expected an error about \"%s\"", word);
    CHECK(strstr(error, word) && !strchr(error, '\n'), "\"%s\" does not speak of \"%s\"", error, word);
    lm_destroy(m);
}

static const struct lm_options train = {.batch = 2, .training = 1, .threads = 1};

static void refuse_shape(int width, int depth, int heads, int context, const char *word)
{
    expect_error((struct lm_config){.width = width, .depth = depth, .heads = heads, .context = context}, train, word);
}

static void test_shapes(void)
{
    refuse_shape(30, 1, 4, 8, "multiple");
    refuse_shape(12, 1, 4, 8, "odd");
    refuse_shape(0, 1, 4, 8, "width");
    refuse_shape(-8, 1, 4, 8, "width");
    refuse_shape(16, 0, 4, 8, "depth");
    refuse_shape(16, 1, 0, 8, "heads");
    refuse_shape(16, 1, 32, 8, "heads");
    refuse_shape(16, 1, 4, 0, "context");
    refuse_shape(1 << 30, 1, 4, 8, "width");
    expect_error((struct lm_config){.vocab = 50000, .width = 16, .depth = 1, .heads = 4, .context = 8}, train, "256");
    expect_error((struct lm_config){.width = 65536, .depth = 1024, .heads = 4, .context = 1048576},
                 (struct lm_options){.batch = 1 << 20, .training = 1, .threads = 1}, "GiB");
    expect_error(tiny, (struct lm_options){.batch = -1, .threads = 1}, "batch");
    expect_error(tiny, (struct lm_options){.batch = 0, .training = 1, .threads = 1}, "batch");
    expect_error(tiny, (struct lm_options){.batch = 1, .compute = LM_F16, .threads = 1}, "f32 or bf16");
    expect_error(tiny, (struct lm_options){.batch = 1, .gradients = 9, .threads = 1}, "gradients");
    expect_error(tiny, (struct lm_options){.batch = 1, .threads = -1}, "threads");

    struct weights w = make_weights(tiny, LM_F32, 0, 1);
    struct lm *m = make_model(&tiny, (struct lm_options){.batch = 2, .threads = 1});
    uint8_t tokens[64] = {0};
    CHECK(lm_eval(m, w.list, tokens, 3, 8) < 0 && strstr(lm_error(m), "batch"), "\"%s\"", lm_error(m));
    CHECK(lm_eval(m, w.list, tokens, 1, 17) < 0 && strstr(lm_error(m), "length"), "\"%s\"", lm_error(m));
    CHECK(lm_forward(m, w.list, tokens, 1, 8) < 0 && strstr(lm_error(m), "training"), "\"%s\"", lm_error(m));
    CHECK(lm_backward(m, w.list, 1, &(struct lm_sink){0}) == -1, "backward without forward");
    lm_destroy(m);

    int64_t sum = 0;
    const char *expected[] = {"model.embed_tokens.weight",
                              "model.layers.0.input_layernorm.weight",
                              "model.layers.0.self_attn.q_proj.weight",
                              "model.layers.0.self_attn.k_proj.weight",
                              "model.layers.0.self_attn.v_proj.weight",
                              "model.layers.0.self_attn.o_proj.weight",
                              "model.layers.0.post_attention_layernorm.weight",
                              "model.layers.0.mlp.gate_proj.weight",
                              "model.layers.0.mlp.up_proj.weight",
                              "model.layers.0.mlp.down_proj.weight"};
    for (int i = 0; i < w.count; i++) sum += elements(&w, i);
    for (int i = 0; i < 10; i++)
        CHECK(!strcmp(w.info[i].name, expected[i]), "tensor %d is %s, not %s", i, w.info[i].name, expected[i]);
    CHECK(!strcmp(w.info[w.count - 2].name, "model.norm.weight") && !strcmp(w.info[w.count - 1].name, "lm_head.weight"),
          "last tensors");
    EQUAL(sum, lm_parameter_count(&w.config));
    struct lm_config default_size = {.width = 256, .depth = 1, .heads = 4, .context = 8};
    CHECK(lm_config_check(&default_size, error, sizeof error) == 0 && default_size.intermediate == 704,
          "intermediate size %d of width 256", default_size.intermediate);
    char json[2048];
    int n = lm_config_json(&w.config, "bfloat16", json, sizeof json);
    CHECK(n == (int)strlen(json) && strstr(json, "\"hidden_size\": 24") && strstr(json, "\"rope_theta\": 10000.0"),
          "config.json: %s", json);
    CHECK(lm_config_json(&w.config, "bfloat16", json, 100) == -1, "config.json in 100 bytes");
    free_weights(&w);
}

static void test_initial(void)
{
    struct lm_config shape = {.width = 128, .depth = 4, .heads = 4, .context = 8};
    struct weights w = make_weights(shape, LM_F32, 0, 1);
    uint64_t hash = 0;
    for (int i = 0; i < w.count; i++) {
        double sum = 0, square = 0, fourth = 0, n = (double)elements(&w, i), s = w.info[i].init_std;
        for (int64_t k = 0; k < elements(&w, i); k++) {
            double x = w.values[i][k];
            uint32_t bits;
            memcpy(&bits, &w.values[i][k], sizeof bits);
            hash = (hash ^ bits) * UINT64_C(0x100000001B3);
            sum += x;
            square += x * x;
            fourth += x * x * x * x;
        }
        if (s == 0) {
            CHECK(sum == n && square == n, "%s does not start at 1", w.info[i].name);
            continue;
        }
        CHECK(fabs(sum / n) < 5 * s / sqrt(n), "%s: mean %g", w.info[i].name, sum / n);
        CHECK(fabs(square / n / (s * s) - 1) < 5 * sqrt(2 / n), "%s: variance %g of the wanted", w.info[i].name,
              square / n / (s * s));
        CHECK(fabs(fourth / n / (s * s * s * s) - 3) < 5 * sqrt(96 / n), "%s: fourth moment %g", w.info[i].name,
              fourth / n / (s * s * s * s));
    }
    CHECK(fabs(w.info[5].init_std - 0.02 / sqrt(8)) < 1e-12, "deviation of o_proj %g", w.info[5].init_std);
    /* The result is the same on every machine; this is the first machine's. */
    CHECK(hash == UINT64_C(0x7F7E1E8B35B34791), "initial weights hash to 0x%016llX", (unsigned long long)hash);
    free_weights(&w);
}

/* Compares conversions with the definition: the stored value nearest to x, ties to the even code. */
static void test_rows(void)
{
    for (int type = LM_BF16; type <= LM_F16; type++) {
        for (uint32_t code = 0; code < 0x10000; code++) {
            uint16_t in = (uint16_t)code, out;
            float x;
            row_load(&x, &in, type, 1);
            row_store(&out, type, &x, 1);
            int is_nan = type == LM_BF16 ? (code & 0x7FFF) > 0x7F80 : (code & 0x7FFF) > 0x7C00;
            CHECK(is_nan ? isnan(x) : out == in, "type %d code %04X comes back as %04X", type, in, out);
            uint16_t next = (uint16_t)(code + 1);
            float y;
            row_load(&y, &next, type, 1);
            if (is_nan || !isfinite(y) || (code & 0x7FFF) == 0x7FFF) continue;
            float middle = (float)(((double)x + (double)y) / 2), near_x = nextafterf(middle, x),
                  near_y = nextafterf(middle, y);
            row_store(&out, type, &middle, 1);
            CHECK(out == (code & 1 ? next : in), "type %d: tie after %04X rounds to %04X", type, in, out);
            row_store(&out, type, &near_x, 1);
            CHECK(out == in, "type %d: below the tie after %04X rounds to %04X", type, in, out);
            row_store(&out, type, &near_y, 1);
            CHECK(out == next, "type %d: above the tie after %04X rounds to %04X", type, in, out);
        }
        float large = 3.4e38f, infinite = INFINITY;
        uint16_t out;
        row_store(&out, type, &large, 1);
        CHECK(out == (type == LM_BF16 ? 0x7F7F : 0x7BFF), "type %d: 3.4e38 is stored as %04X", type, out);
        row_store(&out, type, &infinite, 1);
        CHECK(out == (type == LM_BF16 ? 0x7F80 : 0x7C00), "type %d: Inf is stored as %04X", type, out);
    }
    for (int i = -8700; i < 8800; i++) {
        float p[ROW_LANES], ds[ROW_LANES], row[ROW_LANES] = {(float)i * 0.01f}, zero[ROW_LANES] = {0}, x;
        row_softmax_backward(p, ds, LM_F32, row, zero, &(struct row_softmax){0.0f, 1.0f}, 1.0f, 1, 1);
        x = p[0];
        CHECK(fabs((double)x / exp((double)((float)i * 0.01f)) - 1) < 2.5e-7, "exp(%g) = %g", i * 0.01, x);
    }
    for (int i = 1; i < 20000; i++) {
        double x = i * 0.0371, s, c;
        exact_sincos(x * 1000, &s, &c);
        CHECK(fabs(s - sin(x * 1000)) < 1e-14 && fabs(c - cos(x * 1000)) < 1e-14, "sin and cos of %g", x * 1000);
        CHECK(fabs(exact_log(x) - log(x)) <= 1e-15 * (1 + fabs(log(x))), "log(%g)", x);
        CHECK(fabs(exact_exp(x - 371) / exp(x - 371) - 1) < 1e-15, "exp(%g)", x - 371);
    }
}

/* All transpositions, odd sizes, accumulation, both types. */
static void test_matmul(void)
{
    struct matmul *context = matmul_create(error, sizeof error);
    CHECK(context, "%s", error);
    if (!context) return;
    enum { SIZE = 4096 };
    static float a[SIZE], b[SIZE], c[SIZE];
    static uint16_t stored_a[SIZE], stored_b[SIZE];
    for (int i = 0; i < SIZE; i++) {
        a[i] = (float)uniform(1, (uint64_t)i) - 0.5f;
        b[i] = (float)uniform(2, (uint64_t)i) - 0.5f;
    }
    row_store(stored_a, LM_BF16, a, SIZE);
    row_store(stored_b, LM_BF16, b, SIZE);
    row_load(a, stored_a, LM_BF16, SIZE);
    row_load(b, stored_b, LM_BF16, SIZE);
    for (int trial = 0; trial < 256; trial++) {
        uint64_t h = hash_counters(3, (uint64_t)trial, 0, 0);
        struct matmul_shape s = {
            .m = 1 + (int64_t)(h % 40), .n = 1 + (int64_t)(h / 64 % 40), .k = 1 + (int64_t)(h / 4096 % 40)};
        int ta = trial & 1, tb = trial >> 1 & 1, gap = trial >> 5 & 3;
        s.type = trial >> 2 & 1 ? LM_BF16 : LM_F32;
        s.accumulate = trial >> 3 & 1;
        s.c_type = !s.accumulate && s.type == LM_BF16 && trial >> 4 & 1 ? LM_BF16 : LM_F32;
        s.a_row = ta ? 1 : s.k + gap;
        s.a_column = ta ? s.m + gap : 1;
        s.b_row = tb ? 1 : s.n + gap;
        s.b_column = tb ? s.k + gap : 1;
        s.c_row = s.n + gap;
        for (int i = 0; i < SIZE; i++) c[i] = 2.0f;
        CHECK(matmul_run(context, &s, s.type ? (void *)stored_a : a, s.type ? (void *)stored_b : b, c) == 0, "%s",
              matmul_error(context));
        for (int64_t i = 0; i < s.m; i++) {
            for (int64_t j = 0; j < s.n; j++) {
                double sum = s.accumulate ? 2.0 : 0.0;
                for (int64_t k = 0; k < s.k; k++)
                    sum += (double)a[i * s.a_row + k * s.a_column] * (double)b[k * s.b_row + j * s.b_column];
                float got = c[i * s.c_row + j];
                if (s.c_type == LM_BF16) row_load(&got, (uint16_t *)c + i * s.c_row + j, LM_BF16, 1);
                CHECK(fabs((double)got - sum) < (s.c_type == LM_BF16 ? fabs(sum) * 0x1p-8 + 1e-4 : 1e-5),
                      "trial %d [%lld,%lld,%lld]: C[%lld,%lld] = %g, expected %g", trial, (long long)s.m,
                      (long long)s.n, (long long)s.k, (long long)i, (long long)j, got, sum);
            }
            for (int64_t j = s.n; j < s.c_row && s.c_type == LM_F32; j++)
                CHECK(c[i * s.c_row + j] == 2.0f, "trial %d wrote between the rows of C", trial);
        }
    }
    /* More shapes than are kept, so that dropped ones come again. */
    for (int64_t m = 1; m <= 400; m++) {
        struct matmul_shape s = {
            .m = m, .n = 1, .k = 1, .a_row = 1, .a_column = 1, .b_row = 1, .b_column = 1, .c_row = 1};
        CHECK(matmul_run(context, &s, a, b, c) == 0 && c[m - 1] == a[m - 1] * b[0], "%lld rows: %g %s", (long long)m,
              (double)c[m - 1], matmul_error(context));
    }
    struct matmul_shape wrong = {
        .m = -1, .n = 1, .k = 1, .a_row = 1, .a_column = 1, .b_row = 1, .b_column = 1, .c_row = 1};
    for (int type = LM_F32; type <= LM_F16; type++) {
        static const char *const called[] = {[LM_F32] = "f32", [LM_BF16] = "bf16", [LM_F16] = "f16"};
        char expected[64];
        wrong.type = type;
        snprintf(expected, sizeof expected, "oneDNN cannot multiply %s matrices [-1, 1] x [1, 1]", called[type]);
        CHECK(matmul_run(context, &wrong, a, b, c) == -1 && strstr(matmul_error(context), expected), "%s: %s",
              called[type], matmul_error(context));
    }
    matmul_destroy(context);
}

/* Tells oneDNN that the processor has no BF16 products. The same group runs in a process of its own. */
static void test_matmul_widened(void)
{
    fflush(NULL);
    pid_t child = fork();
    if (!child) {
        setenv("ONEDNN_MAX_CPU_ISA", "SSE41", 1);
        setenv("DNNL_MAX_CPU_ISA", "SSE41", 1);
        execl("/proc/self/exe", test_program, "matrix products", (char *)NULL);
        _exit(127);
    }
    CHECK(test_child_status(child) == 0, "the child failed");
}

struct tally {
    unsigned char count[1000];
};

static void tally_task(void *arg, int64_t task, int thread)
{
    struct tally *t = arg;
    t->count[task]++;
    (void)thread;
}

static void test_parallel(void)
{
    const int threads[] = {1, 2, 7};
    for (int i = 0; i < 3; i++) {
        struct parallel *pool = parallel_create(threads[i]);
        CHECK(pool && parallel_threads(pool) == threads[i], "%d threads", threads[i]);
        for (int round = 0; pool && round < 3000; round++) {
            struct tally t = {{0}};
            int n = round % 37, wrong = 0;
            if (round % 500 == 0) n = 1000;
            parallel_run(pool, n, tally_task, &t);
            for (int k = 0; k < 1000; k++) wrong += t.count[k] != (k < n);
            CHECK(!wrong, "%d threads, %d tasks: %d of them not run once", threads[i], n, wrong);
        }
        parallel_destroy(pool);
    }
}

/* ---- files ---- */

static char path[320];

static const char *write_file(const char *name, const void *bytes, size_t n)
{
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    put_file(path, bytes, n);
    return path;
}

static size_t pack(uint8_t *out, size_t room, const void *bytes, size_t n)
{
    z_stream stream = {0};
    deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
    stream.next_in = (Bytef *)(uintptr_t)bytes;
    stream.avail_in = (uInt)n;
    stream.next_out = out;
    stream.avail_out = (uInt)room;
    if (deflate(&stream, Z_FINISH) != Z_STREAM_END) exit(1);
    deflateEnd(&stream);
    return room - stream.avail_out;
}

static void expect_load(const char *name, const void *bytes, size_t n, const void *content, size_t content_n)
{
    struct data_file file;
    error[0] = 0;
    int status = data_load(write_file(name, bytes, n), &file, error, sizeof error);
    CHECK(!status, "%s", error);
    CHECK(!status && file.n == content_n && !memcmp(file.bytes, content, content_n),
          "%s: %zu bytes instead of %zu, or others", name, file.n, content_n);
    data_free(&file);
    unlink(path);
}

static void expect_refusal(const char *load_path, const char *word)
{
    struct data_file file;
    error[0] = 0;
    int status = data_load(load_path, &file, error, sizeof error);
    CHECK(status == -1 && !file.bytes && !file.n, "%s was accepted", load_path);
    CHECK(strstr(error, load_path) && strstr(error, word) && !strchr(error, '\n'), "\"%s\" does not name \"%s\"", error,
          word);
    data_free(&file);
}

static void test_load(void)
{
    enum { N = 300000 };
    uint8_t *bytes = need(malloc(N)), *packed = need(malloc(2 * N + 1000)), *zeros = need(calloc(1, 40 * N));
    for (int i = 0; i < N; i++) bytes[i] = (uint8_t)(hash_counters(1, (uint64_t)i, 0, 0) % 7 * 11 + 'A');
    expect_load("plain", bytes, N, bytes, N);
    expect_load("one", "x", 1, "x", 1);
    size_t n = pack(packed, 2 * N, bytes, N);
    expect_load("gzip", packed, n, bytes, N);
    size_t both = n + pack(packed + n, 1000, text, sizeof text);
    memcpy(zeros, bytes, N);
    memcpy(zeros + N, text, sizeof text);
    expect_load("two-members", packed, both, zeros, N + sizeof text);
    memset(packed + both, 0, 100);
    expect_load("padded", packed, both + 100, zeros, N + sizeof text);
    memset(zeros, 0, N + sizeof text);
    size_t small = pack(packed, 2 * N, zeros, 40 * N);
    expect_load("thousandfold", packed, small, zeros, 40 * N);

    n = pack(packed, 2 * N, bytes, N);
    for (size_t cut = 2; cut < n; cut += cut < 40 ? 1 : 7777)
        expect_refusal(write_file("truncated", packed, cut), "gzip");
    expect_refusal(write_file("truncated", packed, n - 1), "truncated");
    packed[n / 2] ^= 0x10;
    expect_refusal(write_file("corrupt", packed, n), "corrupt");
    packed[n / 2] ^= 0x10;
    packed[n - 6] ^= 1;
    expect_refusal(write_file("checksum", packed, n), "corrupt");
    packed[n - 6] ^= 1;
    memcpy(packed + n, "rubbish", 7);
    expect_refusal(write_file("rubbish-after", packed, n + 7), "corrupt");
    static const struct {
        const char *bytes, *name;
        size_t n;
    } others[] = {{"BZh91AY&SY\1", "is bzip2 data", 11},
                  {"\xFD"
                   "7zXZ\0\0",
                   "is xz data", 7},
                  {"\x28\xB5\x2F\xFD\1", "is zstd data", 5},
                  {"\x5D\x2A\x4D\x18\1", "is zstd or lz4 data", 5},
                  {"PK\3\4\1", "is a zip archive", 5},
                  {"PAR1PAR1", "is Parquet data", 8},
                  {"\xFF\xFF\xFF\xFF\x70\0\0\0\x10\0\0\0\0\0\x0A\0", "is Arrow data", 16},
                  {"\xFE\xFF\0x", "is UTF-16 text", 4}};
    for (size_t i = 0; i < COUNT(others); i++) {
        expect_refusal(write_file("other", others[i].bytes, others[i].n), others[i].name);
        /* What gzip holds is judged, too. */
        expect_refusal(write_file("inside.gz", packed, pack(packed, 100, others[i].bytes, others[i].n)),
                       others[i].name);
        memset(zeros, 'a', 2);
        memcpy(zeros + 2, others[i].bytes, others[i].n);
        expect_load("not at its place", zeros, 2 + others[i].n, zeros, 2 + others[i].n);
    }
    memset(zeros, 'a', 300);
    memcpy(zeros + 257, "ustar", 5);
    expect_refusal(write_file("tar", zeros, 300), "is a tar archive");
    expect_refusal(write_file("empty", "", 0), "empty");
    expect_refusal(write_file("empty.gz", packed, pack(packed, 100, "", 0)), "empty");
    snprintf(path, sizeof path, "%s/missing", scratch);
    expect_refusal(path, "No such file");
    expect_refusal(scratch, "directory");
    if (geteuid()) {
        chmod(write_file("unreadable", "x", 1), 0);
        expect_refusal(path, "ermission");
    }
    free(bytes);
    free(packed);
    free(zeros);
}

static void test_windows(void)
{
    uint8_t bytes[1000], windows[8 * 33], again[8 * 33];
    for (int i = 0; i < 1000; i++) bytes[i] = (uint8_t)(i * 37 % 251);
    struct data_file file = {bytes, 1000};
    struct data_part train, validation;
    data_split(&file, &train, &validation);
    CHECK(train.bytes == bytes && train.n == 900 && validation.bytes == bytes + 900 && validation.n == 100,
          "split %zu + %zu", train.n, validation.n);

    struct data_part exact = {bytes, 34}, one_less = {bytes, 33};
    CHECK(data_check(&exact, 32, "x", error, sizeof error) == 0, "%s", error);
    CHECK(data_check(&one_less, 32, "training part of corpus.txt", error, sizeof error) == -1 &&
              strstr(error, "corpus.txt") && strstr(error, "34"),
          "\"%s\"", error);

    data_batch(&train, 7, 3, 1, 8, 32, windows);
    data_batch(&train, 7, 3, 1, 8, 32, again);
    CHECK(!memcmp(windows, again, sizeof windows), "the same batch twice");
    for (int i = 0; i < 8; i++) {
        size_t start = data_window(&train, 7, 3, 1, (uint64_t)i, 32);
        CHECK(start + 33 <= train.n && !memcmp(windows + i * 33, bytes + start, 33), "window %d starts at %zu", i,
              start);
    }
    int differ = 0;
    for (int i = 0; i < 4; i++) {
        data_batch(&train, 7 + (i == 0), 3 + (uint64_t)(i == 1), 1 + (uint64_t)(i == 2), 8, 32, again);
        differ += memcmp(windows, again, sizeof windows) != 0;
    }
    EQUAL(differ, 3);

    /* Every start is possible and about equally likely. */
    int count[868] = {0};
    for (uint64_t i = 0; i < 86800; i++) count[data_window(&train, 1, i, 0, 0, 32)]++;
    double chi = 0;
    for (int i = 0; i < 868; i++) chi += (count[i] - 100.0) * (count[i] - 100.0) / 100.0;
    CHECK(fabs(chi - 867) < 5 * sqrt(2 * 867), "chi-square of window starts %g, expected 867", chi);

    size_t windows_n = data_eval_count(&validation, 32, 0);
    CHECK(windows_n == 3 && data_eval_count(&validation, 32, 2) == 2 && data_eval_count(&exact, 32, 0) == 1,
          "%zu evaluation windows", windows_n);
    for (size_t i = 0; i < windows_n; i++) {
        uint8_t window[33];
        data_eval_window(&validation, i, windows_n, 32, window);
        size_t start = i == 2 ? 67 : i == 1 ? 33 : 0;
        CHECK(!memcmp(window, bytes + 900 + start, 33), "evaluation window %zu", i);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch("model");
    TEST("row functions") test_rows();
    TEST("parallel tasks") test_parallel();
    TEST("matrix products") test_matmul();
    TEST("matrix product widened") test_matmul_widened();
    TEST("loss against plain double precision") test_loss();
    TEST("gradients against central differences") test_gradients();
    TEST("gradient types and scale") test_gradient_types();
    TEST("release gives the bits of all-at-once and reads no weight late") test_release();
    TEST("packed weights") test_packed();
    TEST("same bits twice and on any number of threads") test_determinism();
    TEST("bf16 products stay close to f32") test_bf16();
    TEST("overfits one batch and recites it") test_overfit();
    TEST("generation") test_generate();
    TEST("initial weights") test_initial();
    TEST("shapes, names, impossible requests") test_shapes();
    TEST("loading text") test_load();
    TEST("windows") test_windows();
    return test_done();
}
