/* Compares 4-bit codes for Adam's moments. Codes are tables of levels, or windows on a grid of floats. A new code is a
 * line of make_levels() or a spec on the command line. `int8` and `int4` compute what the library computes.
 * lab/int4_trials.sh builds and runs it.
 *
 *   int4_trials open TEXT SPEC...      compares the update with that of fp32 Adam, on given gradients: those recorded
 *                                      while a small language model trains on TEXT, and synthetic ones. Stored states
 *                                      feed the next step.
 *   int4_trials train TEXT SEEDS SPEC...  trains that model with each spec; prints losses minus fp32 Adam's, paired by
 *                                      seed
 *
 * Environment: WIDTH 64, DEPTH 2, STEPS 400, LR 2e-3 of the model; VERBOSE: a line for each tensor; QUICK: without
 * falls.
 *
 * SPEC = M+V[+OPTION...]; M, V = CODE[-sr|-near][@BLOCK[.SCALE]] or f32
 *   CODE    m: softsign root uniform fp4 cube dyn int4 int8
 *           v: lin quad p15 f22 f22s f31 sq31 sq40 logR dyn int4 int8
 *           (dyn: torchao's 4-bit maps; logR: logarithmic, R = range of the root; sqXX: levels of v)
 *           v: wMaA[lLcC][nN]: a window of N (16) neighbours among the floats with M bits of mantissa, which moves by A
 *           of them; the lowest L have C bits (A a multiple of 2^(M - C)); vw...: the same of v instead of its root
 *   BLOCK   elements that share a scale, 32 by default
 *   SCALE   bf16 (rounded up), f32, e8 (power of two; also the byte of a window), g1 g2 g3 (power of two and 1 .. 3
 *           bits)
 *   OPTION  noclamp: without |m| <= C sqrt(v)
 *           norm, normq: m is stored as m / sqrt(v), with the new or with the stored v
 *           factor: v is coded relative to row mean x column mean / mean in fp32
 *
 * Columns of `open` are means over the recorded tensors and over all but the first fifth of the steps; max is the
 * largest of all tensors and steps:
 *   err = |u' - u| / |u|; cos; rms = |u'| / |u|; max = largest |u'| over largest |u|
 *   wcos, move: cosine and regression slope of the movement summed over 50 steps (noise averages out, bias stays)
 *   <1/3 ...: that slope for elements of this size relative to the largest of 32
 * Synthetic gradients are 0.3 + normal, with one change each: log-normal element scales (sigma 1, 2); one element of 32
 * that is 300 times larger; 95 % of rows without gradient; heavy tails over time. The columns "fall" show the mean
 * |u'| / |u| long after gradients fell tenfold or a hundredfold, in a whole block or in 31 of its 32 elements.
 *
 * Over 500 lines because codecs, recorder, synthetic streams and trainer share everything and serve nothing else. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/models/llama.h"

#define MUST(x)                                                                  \
    do {                                                                         \
        if (!(x)) {                                                              \
            fprintf(stderr, "int4_trials: %s:%d: %s\n", __FILE__, __LINE__, #x); \
            exit(1);                                                             \
        }                                                                        \
    } while (0)

static void *zeroed(size_t n)
{
    void *p = calloc(n ? n : 1, 1);
    MUST(p);
    return p;
}

static uint32_t bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static float from_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

static inline uint32_t hash32(uint32_t x)
{
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    return x ^ x >> 15;
}

static uint64_t next64(uint64_t *s)
{
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static double uniform01(uint64_t *s) { return ((double)(next64(s) >> 11) + 0.5) * 0x1p-53; }

static double normal(uint64_t *s)
{
    double a = uniform01(s), b = uniform01(s);
    return sqrt(-2 * log(a)) * cos(6.283185307179586 * b);
}

/* ---- codes ------------------------------------------------------------------------------------------------------- */

enum { EXACT, TABLE, INT8, WINDOW, INT4 };
enum { SCALE_BF16, SCALE_F32, SCALE_E8, SCALE_G1, SCALE_G2, SCALE_G3 };

/* Levels ascend, in units of the block's scale (of m, or of the root of v). The code of element x is the number of
 * indices j >= 1 with x >= from[j] + U wide[j]. U is uniform for stochastic codes, which interpolate linearly in x, or
 * in x^2 if `square` is set. For nearest codes U is 1/2. */
struct map {
    int kind, nonneg, stochastic, square, block, scale, count, mantissa, align, low, coarse;
    float level[16], from[16], wide[16];
};

static int make_levels(struct map *q, const char *code)
{
    float half[8] = {0};
    int n = 16;
    if (q->nonneg) {
        for (int k = 0; k < 16; k++) {
            double y = (k + 1) / 16.0;
            if (!strcmp(code, "lin")) q->level[k] = (float)y;
            else if (!strcmp(code, "quad")) q->level[k] = (float)(y * y);
            else if (!strcmp(code, "p15")) q->level[k] = (float)(y * sqrt(y));
            else if (!strcmp(code, "f22")) q->level[k] = (float)((4 + k % 4) * (1 << k / 4) / 56.0);
            else if (!strcmp(code, "f22s"))
                q->level[k] = (float)((k == 0 ? 0.5 : k < 4 ? k : (4 + k % 4) * (1 << (k / 4 - 1))) / 28.0);
            else if (!strcmp(code, "f31")) q->level[k] = (float)((2 + k % 2) * (1 << k / 2) / 384.0);
            else if (!strcmp(code, "sq31"))
                q->level[k] = (float)sqrt((2 + k % 2) * (1 << k / 2) / 384.0), q->square = 1;
            else if (!strcmp(code, "sq40")) q->level[k] = (float)sqrt(ldexp(1, k - 15)), q->square = 1;
            else if (!strcmp(code, "dyn")) q->level[k] = (float)sqrt(y), q->square = 1;
            else if (!strncmp(code, "log", 3)) q->level[k] = (float)pow(atof(code + 3), (k - 15) / 15.0);
            else return 0;
        }
        if (!strcmp(code, "dyn")) q->stochastic = 0;
    } else if (!strcmp(code, "dyn")) {
        static const float dyn[16] = {-.8875f, -.6625f, -.4375f, -.2125f, -.0775f, -.0325f, -.0055f, 0,
                                      .0055f,  .0325f,  .0775f,  .2125f,  .4375f,  .6625f,  .8875f,  1};
        memcpy(q->level, dyn, sizeof dyn);
    } else {
        static const float fp4[8] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (int k = 0; k < 8; k++) {
            double y = k / 7.0;
            if (!strcmp(code, "softsign")) half[k] = (float)(y / (2 - y));
            else if (!strcmp(code, "root")) half[k] = (float)(y * y);
            else if (!strcmp(code, "cube")) half[k] = (float)(y * sqrt(y));
            else if (!strcmp(code, "uniform")) half[k] = (float)y;
            else if (!strcmp(code, "fp4")) half[k] = fp4[k] / 12;
            else return 0;
        }
        n = 15;
        for (int k = 0; k < 15; k++) q->level[k] = k < 7 ? -half[7 - k] : half[k - 7];
    }
    q->count = n;
    for (int j = 1; j < n; j++) {
        float a = q->level[j - 1], b = q->level[j];
        q->from[j] = q->square ? a * a : a;
        q->wide[j] = q->square ? b * b - a * a : b - a;
    }
    return 1;
}

static int make_map(struct map *q, const char *text, int nonneg)
{
    char code[64];
    memset(q, 0, sizeof *q);
    snprintf(code, sizeof code, "%s", text);
    q->nonneg = nonneg;
    q->stochastic = nonneg;
    q->block = 32;
    char *at = strchr(code, '@');
    if (at) {
        *at = 0;
        q->block = atoi(at + 1);
        if (strstr(at + 1, ".f32")) q->scale = SCALE_F32;
        if (strstr(at + 1, ".e8")) q->scale = SCALE_E8;
        if (strstr(at + 1, ".g")) q->scale = SCALE_E8 + atoi(strstr(at + 1, ".g") + 2);
        if (q->block < 2 || q->block > 256) return 0;
    }
    char *how = strrchr(code, '-');
    int forced = how && !strcmp(how, "-sr") ? 1 : how && !strcmp(how, "-near") ? 0 : -1;
    if (forced >= 0) *how = 0;
    if (!strcmp(code, "f32")) return 1;
    q->kind = TABLE;
    if (!strcmp(code, "int8")) q->kind = INT8;
    else if (!strcmp(code, "int4"))
        q->kind = INT4, q->block = nonneg ? 16 : 32, q->scale = nonneg ? SCALE_E8 : SCALE_BF16;
    else if (nonneg && sscanf(code + (*code == 'v'), "w%da%dl%dc%d", &q->mantissa, &q->align, &q->low, &q->coarse) >= 2)
        q->kind = WINDOW, q->square = *code == 'v', q->count = strchr(code, 'n') ? atoi(strchr(code, 'n') + 1) : 16;
    else if (!make_levels(q, code)) return 0;
    if (forced >= 0) q->stochastic = forced;
    return 1;
}

static float round_scale(float max, int kind)
{
    if (!(max >= 0x1p-126f)) return 0;
    if (kind == SCALE_F32) return max;
    uint32_t u = bits(max);
    uint32_t keep = kind == SCALE_BF16 ? 0xffff0000u : 0xff800000u;
    if (kind > SCALE_E8) keep = ~(0x7fffffu >> (kind - SCALE_E8));
    return from_bits((u + ~keep) & keep);
}

/* Does what src/formats/int8.h does, on one block. x holds m or the root of v. */
static void int8_block(const struct map *q, float *x, int n, float max, uint32_t seed)
{
    float top = q->nonneg ? max * (1.0f / 252.0f) : sqrtf(max) * (1.0f / 127.0f);
    float s = round_scale(top, SCALE_BF16), inverse = s > 0 ? 1 / s : 0;
    for (int i = 0; i < n; i++) {
        uint32_t r = q->stochastic ? hash32(seed + (uint32_t)i) >> 16 : 0x8000;
        if (q->nonneg) {
            int code = (int)((bits(x[i] * inverse) + (r << 2)) >> 18) - 4064;
            x[i] = from_bits((uint32_t)((code > 0 ? code : 0) + 4064) << 18) * s;
            if (s == 0) x[i] = 0;
        } else {
            float t = copysignf(sqrtf(fabsf(x[i])) * inverse * 65536, x[i]);
            float y = (float)(((int)lrintf(t) + (int)r) >> 16) * s;
            x[i] = y * fabsf(y);
        }
    }
}

/* Stores a block as neighbouring numbers of a fixed grid, the floats with a few bits of mantissa. The scale only says
 * where the window begins, so that a new scale does not round the numbers again. */
static void window_block(const struct map *q, float *x, int n, float max, uint32_t seed)
{
    int fine = 23 - q->mantissa, coarse = 23 - q->coarse, low = q->low;
    int top = (int)((bits(q->square ? max * max : max) + (1u << fine) - 1) >> fine);
    int edge = (top + q->align) / q->align * q->align - q->count + low; /* the first fine code */
    uint32_t edge_bits = (uint32_t)edge << fine;
    int coarse_edge = (int)(edge_bits >> coarse);
    for (int i = 0; i < n; i++) {
        uint32_t r = q->stochastic ? hash32(seed + (uint32_t)i) >> 16 : 0x8000;
        float y = q->square ? x[i] * x[i] : x[i];
        int code = low + (bits(y) >= edge_bits ? (int)((bits(y) + (r << (fine - 16))) >> fine) - edge
                                               : (int)((bits(y) + (r << (coarse - 16))) >> coarse) - coarse_edge);
        code = code < 0 ? 0 : code > q->count - 1 ? q->count - 1 : code;
        y = from_bits(code >= low ? (uint32_t)(code - low + edge) << fine
                                  : (uint32_t)(code - low + coarse_edge) << coarse);
        x[i] = max < 0x1p-63f ? 0 : q->square ? sqrtf(y) : y;
    }
}

/* Stores a block in the best codes as a kernel would, without tables or divisions per element. */
static void int4_block(const struct map *q, float *x, int n, float max, uint32_t seed)
{
    static const float level[8] = {0, 1 / 13.f, 2 / 12.f, 3 / 11.f, 4 / 10.f, 5 / 9.f, 6 / 8.f, 1};
    if (q->nonneg) {
        int scale = max < 0x1p-63f ? 0 : (int)((bits(max) + 0x1fffff) >> 22) - 127;
        int edge = (scale + 123) << 22;
        MUST(scale >= 0 && scale < 256);
        for (int i = 0; i < n; i++) {
            int r = (int)(hash32(seed + (uint32_t)i) >> 16), d = (int)bits(x[i]) - edge;
            int code = (d < 0 ? (d + (r << 6)) >> 22 : (d + (r << 5)) >> 21) + 6;
            code = code < 0 ? 0 : code;
            MUST(scale == 0 || code < 16);
            int k = code - 6;
            x[i] = scale == 0 ? 0 : from_bits((uint32_t)(edge + ((k + (k < 0 ? k : 0)) * (1 << 21))));
        }
        return;
    }
    float s = round_scale(max, SCALE_BF16), inverse = s > 0 ? 1 / s : 0;
    for (int i = 0; i < n; i++) {
        float a = fabsf(x[i]) * inverse, y = fminf(a * (a * (a * 3.7f - 10.05f) + 13.4f), 7);
        uint32_t r = q->stochastic ? hash32(seed + (uint32_t)i) >> 16 : 0x8000;
        int code = ((int)lrintf(copysignf(y * 65536, x[i])) + (int)r) >> 16;
        MUST(code >= -7 && code <= 7);
        x[i] = copysignf(level[code < 0 ? -code : code] * s, (float)code);
        if (code == 0) x[i] = 0;
    }
}

/* Replaces x (m, or the root of v) by what is decoded after storing it. */
static void store(const struct map *q, float *x, int rows, int cols, uint32_t seed)
{
    if (q->kind == EXACT) return;
    for (int row = 0; row < rows; row++)
        for (int col = 0; col < cols; col += q->block) {
            float *b = x + (size_t)row * (size_t)cols + col, max = 0, u[256];
            int code[256], n = cols - col < q->block ? cols - col : q->block;
            uint32_t salt = hash32(seed + (uint32_t)(row * cols + col)) & ~255u;
            for (int i = 0; i < n; i++) max = fabsf(b[i]) > max ? fabsf(b[i]) : max;
            if (q->kind == INT8) {
                int8_block(q, b, n, max, salt);
                continue;
            }
            if (q->kind == INT4) {
                int4_block(q, b, n, max, salt);
                continue;
            }
            if (q->kind == WINDOW) {
                window_block(q, b, n, max, salt);
                continue;
            }
            float s = round_scale(max, q->scale), inverse = s > 0 ? 1 / s : 0;
            for (int i = 0; i < n; i++) {
                u[i] = q->stochastic ? ((float)(hash32(salt + (uint32_t)i) >> 16) + 0.5f) * 0x1p-16f : 0.5f;
                b[i] *= inverse;
                if (q->square) b[i] *= b[i];
                code[i] = 0;
            }
            for (int j = 1; j < q->count; j++) {
                float from = q->from[j], wide = q->wide[j];
                for (int i = 0; i < n; i++) code[i] += b[i] >= from + u[i] * wide;
            }
            for (int i = 0; i < n; i++) b[i] = q->level[code[i]] * s;
        }
}

/* ---- Adam -------------------------------------------------------------------------------------------------------- */

static const double BETA1 = 0.9, BETA2 = 0.999;

struct spec {
    const char *text;
    struct map m, v;
    int noclamp, norm, normq, factor;
};

static struct spec parse(const char *text)
{
    struct spec s = {.text = text};
    char copy[256], *save = NULL;
    snprintf(copy, sizeof copy, "%s", text);
    char *m = strtok_r(copy, "+", &save), *v = strtok_r(NULL, "+", &save);
    if (!m || !v || !make_map(&s.m, m, 0) || !make_map(&s.v, v, 1)) {
        fprintf(stderr, "int4_trials: invalid spec %s\n", text);
        exit(1);
    }
    for (char *o; (o = strtok_r(NULL, "+", &save));) {
        s.noclamp |= !strcmp(o, "noclamp");
        s.norm |= !strcmp(o, "norm") || !strcmp(o, "normq");
        s.normq |= !strcmp(o, "normq");
        s.factor |= !strcmp(o, "factor");
    }
    return s;
}

/* Returns the bytes per element of both states. */
static double spec_bytes(const struct spec *s)
{
    const struct map *q[2] = {&s->m, &s->v};
    double sum = 0;
    for (int i = 0; i < 2; i++) {
        double scale = q[i]->scale == SCALE_BF16 ? 2 : q[i]->scale == SCALE_F32 ? 4 : 1;
        sum += q[i]->kind == EXACT ? 4 : (q[i]->kind == INT8 ? 1 : 0.5) + scale / q[i]->block;
    }
    return sum;
}

struct adam {
    const struct spec *spec;
    int rows, cols;
    float *m, *root, *row, *col; /* decoded states; factors of the root */
};

static struct adam adam_new(const struct spec *spec, int rows, int cols)
{
    size_t n = (size_t)rows * (size_t)cols;
    struct adam a = {
        spec, rows, cols, zeroed(n * 4), zeroed(n * 4), zeroed((size_t)rows * 4), zeroed((size_t)cols * 4)};
    return a;
}

static void adam_free(struct adam *a)
{
    free(a->m);
    free(a->root);
    free(a->row);
    free(a->col);
}

/* Computes row and column factors of the root of v. Their squared product is row mean x column mean / mean of v, a
 * rank-1 model of v. */
static void find_factors(struct adam *a)
{
    double total = 0, *col = zeroed((size_t)a->cols * 8);
    for (int r = 0; r < a->rows; r++) {
        double sum = 0;
        for (int c = 0; c < a->cols; c++) {
            double y = a->root[r * a->cols + c], v = y * y;
            sum += v;
            col[c] += v;
        }
        total += sum;
        a->row[r] = (float)sqrt(sum / a->cols);
    }
    double mean = total / a->rows / a->cols;
    for (int c = 0; c < a->cols; c++) a->col[c] = mean > 0 ? (float)sqrt(col[c] / a->rows / mean) : 0;
    free(col);
}

/* Makes step t, counted from 1. Sets u to the normalised update. */
static void adam_step(struct adam *a, const float *g, float *u, int t, double eps, uint32_t seed)
{
    const struct spec *s = a->spec;
    size_t n = (size_t)a->rows * (size_t)a->cols;
    double rho = BETA1 * BETA1 / BETA2;
    float bound = (float)sqrt((1 - BETA1) * (1 - BETA1) / (1 - BETA2) * (1 - pow(rho, t)) / (1 - rho));
    float correct1 = (float)(1 / (1 - pow(BETA1, t))), correct2 = (float)(1 / sqrt(1 - pow(BETA2, t))), e = (float)eps;
    int clamp = !s->noclamp && (s->m.kind != EXACT || s->v.kind != EXACT);
    const float b1 = (float)BETA1, n1 = (float)(1 - BETA1), b2 = (float)BETA2, n2 = (float)(1 - BETA2);
    uint32_t salt = hash32(seed ^ hash32((uint32_t)t));
    for (size_t i = 0; i < n; i++) {
        float y = a->root[i], m = a->m[i];
        if (s->norm) m *= y;
        m = b1 * m + n1 * g[i];
        float root = sqrtf(b2 * (y * y) + n2 * g[i] * g[i]);
        if (clamp) m = fminf(fmaxf(m, -bound * root), bound * root);
        float down = root * correct2 + e;
        u[i] = down > 0 ? m * correct1 / down : 0;
        a->root[i] = root;
        a->m[i] = s->norm && !s->normq ? root > 0 ? m / root : 0 : m;
    }
    if (s->factor) {
        find_factors(a);
        for (int r = 0; r < a->rows; r++)
            for (int c = 0; c < a->cols; c++) {
                float f = a->row[r] * a->col[c];
                a->root[r * a->cols + c] = f > 0 ? a->root[r * a->cols + c] / f : 0;
            }
    }
    store(&s->v, a->root, a->rows, a->cols, salt);
    if (s->factor)
        for (int r = 0; r < a->rows; r++)
            for (int c = 0; c < a->cols; c++) a->root[r * a->cols + c] *= a->row[r] * a->col[c];
    if (s->normq)
        for (size_t i = 0; i < n; i++) a->m[i] = a->root[i] > 0 ? a->m[i] / a->root[i] : 0;
    store(&s->m, a->m, a->rows, a->cols, salt + 0x5bd1e995u);
}

/* ---- the model and its text -------------------------------------------------------------------------------------- */

static uint8_t *text;
static size_t text_bytes;

static void read_text(const char *path)
{
    FILE *f = fopen(path, "rb");
    MUST(f && fseek(f, 0, SEEK_END) == 0);
    text_bytes = (size_t)ftell(f);
    rewind(f);
    text = zeroed(text_bytes);
    MUST(fread(text, 1, text_bytes, f) == text_bytes && text_bytes > 100000);
    fclose(f);
}

enum { BATCH = 8, LENGTH = 64 };
static int model_width = 64, model_depth = 2, train_steps = 400, eval_batches = 24;
static double train_lr = 2e-3, train_decay = 0.1;

struct model {
    struct lm_config config;
    struct lm *lm;
    int count, rows[64], cols[64];
    int64_t total;
    float *weight[64], *gradient[64];
    struct lm_weight view[64];
    int ndim[64];
};

static void model_open(struct model *w, uint64_t seed)
{
    char error[256];
    memset(w, 0, sizeof *w);
    w->config =
        (struct lm_config){.width = model_width, .depth = model_depth, .heads = model_width / 32, .context = LENGTH};
    MUST(lm_config_check(&w->config, error, sizeof error) == 0);
    struct lm_options o = {.batch = BATCH, .training = 1, .compute = LM_BF16, .gradients = LM_F32, .threads = 1};
    MUST((w->lm = lm_create(&w->config, &o, error, sizeof error)));
    w->count = lm_tensor_count(&w->config);
    MUST(w->count <= 64);
    for (int i = 0; i < w->count; i++) {
        struct lm_tensor d;
        MUST(lm_tensor_info(&w->config, i, &d) == 0);
        w->ndim[i] = d.ndim;
        w->rows[i] = (int)d.rows;
        w->cols[i] = (int)d.row_length;
        size_t n = (size_t)(d.rows * d.row_length);
        w->total += (int64_t)n;
        w->weight[i] = zeroed(n * 4);
        w->gradient[i] = zeroed(n * 4);
        w->view[i] = (struct lm_weight){w->weight[i], LM_F32};
        lm_init_tensor(&w->config, i, seed, w->weight[i]);
    }
}

static void model_close(struct model *w)
{
    for (int i = 0; i < w->count; i++) {
        free(w->weight[i]);
        free(w->gradient[i]);
    }
    lm_destroy(w->lm);
}

static void pick(uint8_t *tokens, uint64_t *s, size_t from, size_t to)
{
    for (int b = 0; b < BATCH; b++)
        memcpy(tokens + b * (LENGTH + 1), text + from + next64(s) % (to - from - LENGTH - 1), LENGTH + 1);
}

static double model_eval(struct model *w)
{
    uint8_t tokens[BATCH * (LENGTH + 1)];
    uint64_t s = 99;
    double sum = 0;
    for (int i = 0; i < eval_batches; i++) {
        pick(tokens, &s, text_bytes / 10 * 9, text_bytes);
        sum += lm_eval(w->lm, w->view, tokens, BATCH, LENGTH);
    }
    return sum / eval_batches;
}

/* Trains in fp32 weights; 1-D tensors keep fp32 states. Calls on_gradient after each backward pass, with clipped
 * gradients. Returns the validation loss, and in `*late` the mean training loss of the last tenth. */
static double model_train(const struct spec *spec, uint64_t seed, double *late,
                          void (*on_gradient)(const struct model *, int))
{
    static struct spec exact;
    exact = parse("f32+f32");
    struct model w;
    model_open(&w, seed);
    struct adam a[64];
    size_t most = 0;
    for (int i = 0; i < w.count; i++) {
        a[i] = adam_new(w.ndim[i] == 2 ? spec : &exact, w.rows[i], w.cols[i]);
        size_t n = (size_t)w.rows[i] * (size_t)w.cols[i];
        if (n > most) most = n;
    }
    float *u = zeroed(most * 4);
    uint8_t tokens[BATCH * (LENGTH + 1)];
    uint64_t s = seed * 1000003;
    *late = 0;
    for (int t = 1; t <= train_steps; t++) {
        pick(tokens, &s, 0, text_bytes / 10 * 9);
        double loss = lm_forward(w.lm, w.view, tokens, BATCH, LENGTH), square = 0;
        MUST(loss == loss);
        if (t > train_steps - train_steps / 10) *late += loss / (train_steps / 10);
        struct lm_sink sink = {.buffers = (void *const *)w.gradient};
        MUST(lm_backward(w.lm, w.view, 1, &sink) == 0);
        for (int i = 0; i < w.count; i++)
            for (int k = 0; k < w.rows[i] * w.cols[i]; k++)
                square += (double)w.gradient[i][k] * (double)w.gradient[i][k];
        float clip = (float)fmin(1, 1 / (sqrt(square) + 1e-6));
        double warm = t < train_steps / 20 ? (double)t / (train_steps / 20) : 1;
        float lr = (float)(train_lr * warm * (0.1 + 0.45 * (1 + cos(3.141592653589793 * t / train_steps))));
        for (int i = 0; i < w.count; i++)
            for (int k = 0; k < w.rows[i] * w.cols[i]; k++) w.gradient[i][k] *= clip;
        if (on_gradient) on_gradient(&w, t);
        for (int i = 0; i < w.count; i++) {
            adam_step(&a[i], w.gradient[i], u, t, 1e-8, (uint32_t)seed * 64 + (uint32_t)i);
            float decay = w.ndim[i] == 2 ? (float)train_decay : 0;
            for (int k = 0; k < w.rows[i] * w.cols[i]; k++) w.weight[i][k] -= lr * (u[k] + decay * w.weight[i][k]);
        }
    }
    double loss = model_eval(&w);
    for (int i = 0; i < w.count; i++) adam_free(&a[i]);
    free(u);
    model_close(&w);
    return loss;
}

/* ---- streams of gradients ---------------------------------------------------------------------------------------- */

enum { MAX_STREAMS = 32 };

struct stream {
    char name[96];
    int rows, cols, steps;
    double eps;
    float *g; /* [steps, rows, cols] */
};

static struct stream streams[MAX_STREAMS];
static int stream_count, recorded;

static struct stream *new_stream(const char *name, int rows, int cols, int steps)
{
    MUST(stream_count < MAX_STREAMS);
    struct stream *s = &streams[stream_count++];
    snprintf(s->name, sizeof s->name, "%s", name);
    s->rows = rows;
    s->cols = cols;
    s->steps = steps;
    s->eps = 1e-12;
    s->g = zeroed((size_t)rows * (size_t)cols * (size_t)steps * 4);
    return s;
}

static int kept_tensor[MAX_STREAMS], kept_row[MAX_STREAMS];

static void record(const struct model *w, int t)
{
    if (t == 1) {
        for (int i = 0; i < w->count; i++) {
            struct lm_tensor d;
            MUST(lm_tensor_info(&w->config, i, &d) == 0);
            if (d.ndim != 2) continue;
            static const char *const wanted[] = {"embed",         "0.self_attn.q", "0.self_attn.v", "0.mlp.gate",
                                                 "1.self_attn.o", "1.mlp.down",    "head"};
            int keep = 0;
            for (int k = 0; k < 7; k++) keep |= strstr(d.name, wanted[k]) != NULL;
            if (!keep) continue;
            int from = d.rows == 256 ? 96 : 0; /* letters */
            int rows = (int)d.rows - from < 48 ? (int)d.rows - from : 48;
            kept_tensor[stream_count] = i;
            kept_row[stream_count] = from;
            new_stream(d.name, rows, (int)d.row_length, train_steps);
        }
        recorded = stream_count;
    }
    for (int k = 0; k < recorded; k++) {
        struct stream *s = &streams[k];
        size_t n = (size_t)s->rows * (size_t)s->cols, skip = (size_t)kept_row[k] * (size_t)s->cols;
        memcpy(s->g + n * (size_t)(t - 1), w->gradient[kept_tensor[k]] + skip, n * 4);
    }
}

/* Makes synthetic gradients: 0.3 + noise, times a scale for each element, times a factor that depends on the step. */
static void synthesize(void)
{
    enum { ROWS = 24, COLS = 64, STEPS = 1200 };
    static const char *const names[] = {"equal scales",     "log-normal 1",    "log-normal 1.5",      "log-normal 2",
                                        "one element 300x", "sparse rows 5 %", "sparse elements 3 %", "heavy tails"};
    for (int k = 0; k < 8; k++) {
        struct stream *s = new_stream(names[k], ROWS, COLS, STEPS);
        uint64_t seed = 1000 + (uint64_t)k;
        int n = ROWS * COLS;
        double *scale = zeroed((size_t)n * 8);
        static const double sigma[] = {0, 1, 1.5, 2};
        for (int i = 0; i < n; i++)
            scale[i] = 1e-3 * (k < 4 ? exp(sigma[k] * normal(&seed)) : k == 4 && i % 32 == 5 ? 300 : 1);
        for (int t = 0; t < STEPS; t++)
            for (int i = 0; i < n; i++) {
                double z = normal(&seed), g = (0.3 + z) * scale[i];
                if (k == 5 && hash32((uint32_t)(t * ROWS + i / COLS)) % 20) g = 0;
                if (k == 6 && uniform01(&seed) > 0.03) g = 0;
                if (k == 7) g *= exp(1.5 * normal(&seed));
                s->g[(size_t)t * (size_t)n + (size_t)i] = (float)g;
            }
        free(scale);
    }
}

struct fidelity {
    double err, cosine, rms, largest, exact_largest, window_cosine, move, small[4];
};

static struct fidelity measure(const struct spec *spec, const struct stream *s)
{
    enum { WINDOW = 50 };
    static struct spec exact;
    exact = parse("f32+f32");
    int n = s->rows * s->cols;
    struct adam a = adam_new(&exact, s->rows, s->cols), b = adam_new(spec, s->rows, s->cols);
    float *u = zeroed((size_t)n * 4), *w = zeroed((size_t)n * 4);
    double *su = zeroed((size_t)n * 8), *sw = zeroed((size_t)n * 8), *g2 = zeroed((size_t)n * 8);
    double uu = 0, uw = 0, ww = 0, ee = 0, wuu = 0, wuw = 0, www = 0, bin_uu[4] = {0}, bin_uw[4] = {0};
    struct fidelity f = {0};
    int *bin = zeroed((size_t)n * sizeof *bin);
    for (int t = 0; t < s->steps; t++)
        for (int i = 0; i < n; i++) {
            double g = s->g[(size_t)t * (size_t)n + (size_t)i];
            g2[i] += g * g;
        }
    for (int r = 0; r < s->rows; r++)
        for (int c = 0; c < s->cols; c++) {
            double max = 0;
            for (int k = c / 32 * 32; k < s->cols && k < c / 32 * 32 + 32; k++) max = fmax(max, g2[r * s->cols + k]);
            double ratio = max > 0 ? sqrt(g2[r * s->cols + c] / max) : 1;
            bin[r * s->cols + c] = ratio >= 0.3 ? 0 : ratio >= 0.1 ? 1 : ratio >= 0.03 ? 2 : 3;
        }
    for (int t = 1; t <= s->steps; t++) {
        const float *g = s->g + (size_t)(t - 1) * (size_t)n;
        adam_step(&a, g, u, t, s->eps, 1);
        adam_step(&b, g, w, t, s->eps, 12345);
        for (int i = 0; i < n; i++) {
            f.largest = fmax(f.largest, fabs((double)w[i]));
            f.exact_largest = fmax(f.exact_largest, fabs((double)u[i]));
        }
        if (t <= s->steps / 5) continue;
        for (int i = 0; i < n; i++) {
            double x = u[i], y = w[i];
            uu += x * x;
            uw += x * y;
            ww += y * y;
            ee += (x - y) * (x - y);
            su[i] += x;
            sw[i] += y;
        }
        if (t % WINDOW) continue;
        for (int i = 0; i < n; i++) {
            wuu += su[i] * su[i];
            wuw += su[i] * sw[i];
            www += sw[i] * sw[i];
            bin_uu[bin[i]] += su[i] * su[i];
            bin_uw[bin[i]] += su[i] * sw[i];
            su[i] = sw[i] = 0;
        }
    }
    f.err = sqrt(ee / uu);
    f.cosine = uw / sqrt(uu * ww);
    f.rms = sqrt(ww / uu);
    f.window_cosine = wuw / sqrt(wuu * www);
    f.move = wuw / wuu;
    for (int k = 0; k < 4; k++) f.small[k] = bin_uu[k] > 0 ? bin_uw[k] / bin_uu[k] : NAN;
    adam_free(&a);
    adam_free(&b);
    free(u);
    free(w);
    free(su);
    free(sw);
    free(g2);
    free(bin);
    return f;
}

/* Returns the mean |update| long after gradients fell by `factor`, in the elements that fell, divided by that of fp32.
 * tests/test_defects.c does the same. */
static double fallen(const struct spec *spec, double factor, int keep)
{
    enum { ROWS = 24, COLS = 32, N = ROWS * COLS, BEFORE = 1000, LAST = 400 };
    static struct spec exact;
    exact = parse("f32+f32");
    int after = factor < 50 ? 7000 : 12000;
    uint64_t seed = 23;
    struct adam a = adam_new(&exact, ROWS, COLS), b = adam_new(spec, ROWS, COLS);
    float g[N], u[N], w[N];
    double sum_u = 0, sum_w = 0;
    for (int t = 1; t <= BEFORE + after; t++) {
        for (int i = 0; i < N; i++) {
            /* Sums of uniforms are ten times cheaper than logarithms, and normal enough. */
            uint64_t z = next64(&seed);
            uint64_t four = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
            double x = (double)four / 65536 - 2;
            g[i] = (float)(x * 1.7320508 * (t <= BEFORE || (keep && i % 32 == 0) ? 1 : 1 / factor));
        }
        adam_step(&a, g, u, t, 1e-8, 1);
        adam_step(&b, g, w, t, 1e-8, 2);
        if (t <= BEFORE + after - LAST) continue;
        for (int i = 0; i < N; i++) {
            if (keep && i % 32 == 0) continue;
            sum_u += fabs((double)u[i]);
            sum_w += fabs((double)w[i]);
        }
    }
    adam_free(&a);
    adam_free(&b);
    return sum_w / sum_u;
}

static void run_open(int count, char **specs)
{
    enum { LOG_NORMAL_1 = 1, LOG_NORMAL_2 = 3, ONE_LARGE = 4, SPARSE_ROWS = 5, HEAVY = 7 };
    double late;
    struct spec exact = parse("f32+f32");
    double loss = model_train(&exact, 1, &late, record);
    fprintf(stderr, "int4_trials: recorded %d tensors, %d steps, validation loss %.3f\n", recorded, train_steps, loss);
    synthesize();
    printf("| states | B | err | cos | rms | max | wcos | move | <1/3 | <1/10 | <1/30 "
           "| log-normal 1: err | max | log-normal 2: err | max | one 300x: max | sparse rows: rms | heavy tails: err "
           "| fall 10 | 31 of 32 | fall 100 | 31 of 32 |\n|---");
    for (int k = 0; k < 21; k++) printf("|---:");
    printf("|\n");
    for (int k = 0; k < count; k++) {
        struct spec s = parse(specs[k]);
        struct fidelity real = {0}, f[MAX_STREAMS];
        double bins[4] = {0}, bin_count[4] = {0};
        for (int i = 0; i < stream_count; i++) f[i] = measure(&s, &streams[i]);
        for (int i = 0; i < recorded; i++) {
            if (getenv("VERBOSE"))
                fprintf(stderr, "    %-44s err %.3f rms %.3f max %.2f move %.3f, %.2f %.2f %.2f\n", streams[i].name,
                        f[i].err, f[i].rms, f[i].largest / f[i].exact_largest, f[i].move, f[i].small[1], f[i].small[2],
                        f[i].small[3]);
            real.err += f[i].err / recorded;
            real.cosine += f[i].cosine / recorded;
            real.rms += f[i].rms / recorded;
            real.window_cosine += f[i].window_cosine / recorded;
            real.move += f[i].move / recorded;
            real.largest = fmax(real.largest, f[i].largest / f[i].exact_largest);
            for (int j = 0; j < 4; j++)
                if (f[i].small[j] == f[i].small[j]) bins[j] += f[i].small[j], bin_count[j]++;
        }
        const struct fidelity *y = f + recorded;
        printf("| `%s` | %.4f | %.3f | %.4f | %.3f | %.2f | %.4f | %.3f ", s.text, spec_bytes(&s), real.err,
               real.cosine, real.rms, real.largest, real.window_cosine, real.move);
        for (int j = 1; j < 4; j++) printf("| %.2f ", bins[j] / bin_count[j]);
        for (int j = LOG_NORMAL_1; j <= LOG_NORMAL_2; j += LOG_NORMAL_2 - LOG_NORMAL_1)
            printf("| %.3f | %.2f ", y[j].err, y[j].largest / y[j].exact_largest);
        printf("| %.2f | %.3f | %.3f ", y[ONE_LARGE].largest / y[ONE_LARGE].exact_largest, y[SPARSE_ROWS].rms,
               y[HEAVY].err);
        for (int j = 0; j < 4; j++)
            if (getenv("QUICK")) printf("| ");
            else printf("| %.3f ", fallen(&s, j < 2 ? 10 : 100, j & 1));
        printf("|\n");
        fflush(stdout);
    }
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

static void run_train(int seeds, int count, char **specs)
{
    double *exact = zeroed((size_t)seeds * 16);
    struct spec f32 = parse("f32+f32");
    MUST(seeds >= 2);
    printf("| states | B | val loss | - fp32 | train loss, last tenth, - fp32 |\n|---|---:|---:|---:|---:|\n");
    for (int k = -1; k < count; k++) {
        struct spec s = k < 0 ? f32 : parse(specs[k]);
        double sum[3] = {0}, squares[2] = {0};
        for (int i = 0; i < seeds; i++) {
            double late, loss = model_train(&s, 100 + (uint64_t)i, &late, NULL);
            if (k < 0) exact[2 * i] = loss, exact[2 * i + 1] = late;
            double d[2] = {loss - exact[2 * i], late - exact[2 * i + 1]};
            sum[2] += loss;
            for (int j = 0; j < 2; j++) sum[j] += d[j], squares[j] += d[j] * d[j];
        }
        double error[2];
        for (int j = 0; j < 2; j++)
            error[j] = sqrt(fmax(0, squares[j] - sum[j] * sum[j] / seeds) / (seeds - 1) / seeds);
        printf("| `%s` | %.4f | %.4f | %+.4f ± %.4f | %+.4f ± %.4f |\n", s.text, spec_bytes(&s), sum[2] / seeds,
               sum[0] / seeds, error[0], sum[1] / seeds, error[1]);
        fflush(stdout);
    }
    free(exact);
}

static double from_environment(const char *name, double value)
{
    const char *t = getenv(name);
    return t ? atof(t) : value;
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        fprintf(stderr, "usage: int4_trials open TEXT SPEC... | train TEXT SEEDS SPEC...\n");
        return 2;
    }
    model_width = (int)from_environment("WIDTH", model_width);
    model_depth = (int)from_environment("DEPTH", model_depth);
    train_steps = (int)from_environment("STEPS", train_steps);
    train_lr = from_environment("LR", train_lr);
    read_text(argv[2]);
    if (!strcmp(argv[1], "open")) run_open(argc - 3, argv + 3);
    else run_train(atoi(argv[3]), argc - 4, argv + 4);
    return 0;
}
