/* The forward and backward pass of the language model. Over 500 lines because the backward pass mirrors the forward
 * pass phase by phase and shares its buffers.
 *
 * Each phase is one batch of independent tasks: a block of rows (positions), one head of one sequence, or a tile of a
 * weight's gradient. Blocks have fixed sizes, and each product inside a task runs on one thread. So no sum depends on
 * the number of threads. */
#include "trainer/models/llama_internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/process/limits.h"

#include "common/text.h"
#include "trainer/products/rows.h"

enum { BLOCK = 128, ATTENTION_ROWS = 64, TILE = 64, COLUMNS = 64, MOST_THREADS = 1024 };

__attribute__((format(printf, 2, 3))) static int fail(struct lm *m, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(m->error, sizeof m->error, format, arguments);
    va_end(arguments);
    return -1;
}

const char *lm_error(const struct lm *m) { return m->error; }

int lm_threads(const struct lm *m) { return parallel_threads(m->team.pool); }

size_t lm_gradient_peak_bytes(const struct lm *m) { return m->gradient_bytes; }

size_t lm_activation_bytes(const struct lm *m) { return m->arena_bytes - m->gradient_bytes + m->converted_bytes; }

/* ---- memory ---- */

/* layout() runs twice: with base NULL to add up the size, then to hand out the memory. Sizes are doubles, because they
 * may exceed any integer. A gap of 7 cache lines keeps buffers from sharing cache sets. */
struct arena {
    char *base;
    double used;
};

static void *carve(struct arena *a, double elements, size_t size)
{
    void *p = a->base ? a->base + (size_t)a->used : NULL;
    a->used += ceil(elements * (double)size / 64.0) * 64.0 + 7 * 64.0;
    return p;
}

static double larger(double a, double b) { return a > b ? a : b; }

static void layout(struct lm *m, struct arena *a)
{
    const struct lm_config *c = &m->config;
    const struct lm_options *o = &m->options;
    size_t s = lm_dtype_bytes(o->compute), g = lm_dtype_bytes(o->gradients);
    double w = c->width, f = c->intermediate, t = c->context, rows = (double)o->batch * t, d = w / c->heads;
    double blocks = ceil(rows / BLOCK);

    m->cosine = carve(a, t * d / 2, sizeof(float));
    m->sine = carve(a, t * d / 2, sizeof(float));
    for (int i = 0; i < 3; i++) m->gains[i] = carve(a, w, sizeof(float));
    if (!o->batch) return;

    for (int i = 0; i < lm_threads(m); i++) {
        struct scratch *k = &m->scratch[i];
        k->wide = carve(a, BLOCK * larger(2 * w, larger(f, c->vocab)), sizeof(float));
        k->narrow = carve(a, BLOCK * w, sizeof(float));
        k->stored = carve(a, BLOCK * w, s);
        k->stored2 = carve(a, BLOCK * f, s);
        k->scores = carve(a, ATTENTION_ROWS * (t + ROW_LANES), sizeof(float));
        k->p = carve(a, ATTENTION_ROWS * (t + ROW_LANES), s);
        if (!o->training) continue;
        k->dscores = carve(a, ATTENTION_ROWS * (t + ROW_LANES), sizeof(float));
        k->dp = carve(a, ATTENTION_ROWS * (t + ROW_LANES), s);
        k->dk = carve(a, t * d, sizeof(float));
        k->dv = carve(a, t * d, sizeof(float));
        k->dq = carve(a, ATTENTION_ROWS * d, sizeof(float));
    }
    for (int i = 0; i < (o->training ? c->depth : 1); i++) {
        struct layer *l = &m->layers[i];
        l->x = carve(a, rows * w, sizeof(float));
        l->mid = carve(a, rows * w, sizeof(float));
        l->in_r = carve(a, rows, sizeof(float));
        l->post_r = carve(a, rows, sizeof(float));
        l->qkv = carve(a, rows * 3 * w, s);
        l->o = carve(a, rows * w, s);
        l->softmax = carve(a, rows * c->heads, sizeof *l->softmax);
        l->gate = carve(a, rows * f, s);
        l->up = carve(a, rows * f, s);
    }
    m->final_r = carve(a, rows, sizeof(float));
    m->block_loss = carve(a, blocks, sizeof(double));
    if (!o->training) return;
    m->layers[c->depth].x = carve(a, rows * w, sizeof(float));
    m->kept_tokens = carve(a, o->batch * (t + 1), 1);
    m->dlogits = carve(a, rows * c->vocab, s);
    m->dx = carve(a, rows * w, sizeof(float));
    m->dx_mlp = carve(a, rows * w, s);
    m->dx_attention = carve(a, rows * w, s);
    m->dout = carve(a, rows * w, s);
    m->hidden = carve(a, rows * w, s);
    m->activated = carve(a, rows * f, s);
    double before = a->used;
    m->partial = carve(a, blocks * w, sizeof(float));
    if (o->release) m->region = carve(a, larger(c->vocab * w, larger(3 * w * f, 4 * w * w)), g);
    m->gradient_bytes = (size_t)(a->used - before);
}

static void fill_rotations(struct lm *m)
{
    int half = m->config.width / m->config.heads / 2;
    for (int i = 0; i < half; i++) {
        double frequency = exact_exp(-exact_log(m->config.rope_theta) * i / half);
        for (int t = 0; t < m->config.context; t++) {
            double sine, cosine;
            exact_sincos(t * frequency, &sine, &cosine);
            m->cosine[(size_t)t * (size_t)half + (size_t)i] = (float)cosine;
            m->sine[(size_t)t * (size_t)half + (size_t)i] = (float)sine;
        }
    }
}

struct lm *lm_create(const struct lm_config *config, const struct lm_options *options, char *error, size_t error_bytes)
{
    struct lm_config c = *config;
    const struct lm_options *o = options;
    if (lm_config_check(&c, error, error_bytes)) return NULL;
    const char *wrong = NULL;
    if (o->batch < 0 || o->batch > 1 << 20) wrong = "batch is not in 0..1048576";
    else if (o->training && !o->batch) wrong = "training needs a batch of at least 1";
    else if (o->compute != LM_F32 && o->compute != LM_BF16) wrong = "the type of matrix products must be f32 or bf16";
    else if (o->gradients < LM_F32 || o->gradients > LM_F16) wrong = "gradients must be f32, bf16 or f16";
    else if (o->threads < 0 || o->threads > MOST_THREADS) wrong = "threads is not in 0..1024";
    struct lm *m = wrong ? NULL : calloc(1, sizeof *m);
    if (!m) {
        snprintf(error, error_bytes, "%s", wrong ? wrong : "out of memory");
        return NULL;
    }
    m->config = c;
    m->options = *o;
    m->count = lm_tensor_count(&c);
    if (team_open(&m->team, o->threads, error, error_bytes) != 0) goto failed;
    m->scratch = calloc((size_t)lm_threads(m), sizeof *m->scratch);
    m->layers = calloc((size_t)c.depth + 1, sizeof *m->layers);
    if (!m->scratch || !m->layers) {
        no_memory(error, error_bytes);
        goto failed;
    }
    struct arena arena = {NULL, 0};
    layout(m, &arena);
    double most = fmin((double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE), hstep_memory_limit(""));
    struct rlimit limit;
    const int limited =
        getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && (double)limit.rlim_cur < most;
    if (limited) most = (double)limit.rlim_cur;
    m->arena = arena.used < most ? aligned_alloc(64, (size_t)arena.used) : NULL;
    if (!m->arena) {
        snprintf(error, error_bytes,
                 "out of memory: a batch of %d x %d of this model needs %.3g GiB of activations; this process may have "
                 "%.3g GiB in all%s; choose a smaller batch or context",
                 o->batch, c.context, arena.used * 0x1p-30, most * 0x1p-30, limited ? " (ulimit -v)" : "");
        goto failed;
    }
    m->arena_bytes = (size_t)arena.used;
    arena = (struct arena){m->arena, 0};
    layout(m, &arena);
    fill_rotations(m);
    return m;
failed:
    lm_destroy(m);
    return NULL;
}

void lm_destroy(struct lm *m)
{
    if (!m) return;
    lm_cache_free(m);
    team_close(&m->team);
    free(m->scratch);
    free(m->layers);
    free(m->converted);
    free(m->arena);
    free(m);
}

/* ---- pieces ---- */

static void *at(const void *base, int type, int64_t index)
{
    return (char *)(uintptr_t)base + (size_t)index * lm_dtype_bytes(type);
}

/* C[rows, columns] (+)= A[rows, inner] B[inner, columns] */
static void multiply(struct lm *m, int thread, int64_t rows, int64_t columns, int64_t inner, struct operand a,
                     struct operand b, struct product c)
{
    team_multiply(&m->team, thread, m->options.compute, rows, columns, inner, a, b, c);
}

/* y[n, out] = x[n, in] W^T for W [out, in] */
static void forward_product(struct lm *m, int thread, int64_t n, int64_t out, int64_t in, const void *x, int64_t x_row,
                            const void *weight, void *y, int y_type, int64_t y_row)
{
    multiply(m, thread, n, out, in, (struct operand){x, x_row, 1}, (struct operand){weight, 1, in},
             (struct product){y, y_row, y_type, 0});
}

/* dx[n, in] (+)= dy[n, out] W */
static void backward_product(struct lm *m, int thread, int64_t n, int64_t out, int64_t in, const void *dy,
                             int64_t dy_row, const void *weight, void *dx, int dx_type, int accumulate)
{
    multiply(m, thread, n, in, out, (struct operand){dy, dy_row, 1}, (struct operand){weight, in, 1},
             (struct product){dx, in, dx_type, accumulate});
}

static int run_with(struct lm *m, int64_t tasks, void (*task)(void *, int64_t, int), void *arg)
{
    const char *failure = team_run(&m->team, tasks, task, arg);
    return failure ? fail(m, "%s", failure) : 0;
}

static int run(struct lm *m, int64_t tasks, void (*task)(void *, int64_t, int)) { return run_with(m, tasks, task, m); }

static int64_t blocks(const struct lm *m) { return (m->rows + BLOCK - 1) / BLOCK; }

/* Returns the number of rows in a block, and sets `*first` to the first of them. */
static int64_t block_rows(const struct lm *m, int64_t block, int64_t *first)
{
    *first = block * BLOCK;
    return m->rows - *first < BLOCK ? m->rows - *first : BLOCK;
}

/* ---- weights into the matrix-product type ---- */

struct conversion {
    struct lm *model;
    const struct lm_weight *weight[PER_LAYER];
    void *out[PER_LAYER];
    int64_t rows[PER_LAYER], row_length[PER_LAYER];
    int count;
};

/* Returns the number of rows that one task converts. */
static int64_t stretch(int64_t row_length)
{
    enum { ELEMENTS = 16384 };
    return row_length < ELEMENTS ? ELEMENTS / row_length : 1;
}

static int64_t stretches(const struct conversion *c, int i)
{
    int64_t each = stretch(c->row_length[i]);
    return (c->rows[i] + each - 1) / each;
}

static void convert_row(void *out, int to, const void *in, int from, int n)
{
    enum { PIECE = 1024 }; /* whole blocks of a packed row */
    float values[PIECE];
    if (to == LM_F32) row_load(out, in, from, n);
    else if (from == LM_F32) row_store(out, to, in, n);
    else
        for (int at = 0; at < n; at += PIECE) {
            int piece = n - at < PIECE ? n - at : PIECE;
            row_load(values, (const char *)in + lm_row_bytes(from, at), from, piece);
            row_store((char *)out + lm_row_bytes(to, at), to, values, piece);
        }
}

static void convert_task(void *arg, int64_t task, int thread)
{
    (void)thread;
    const struct conversion *c = arg;
    int i = 0;
    while (task >= stretches(c, i)) task -= stretches(c, i++);
    const int from = c->weight[i]->dtype, to = c->model->options.compute;
    const int64_t n = c->row_length[i], each = stretch(n);
    const size_t in = lm_row_bytes(from, n), out = lm_row_bytes(to, n);
    for (int64_t row = task * each; row < c->rows[i] && row < (task + 1) * each; row++)
        convert_row((char *)c->out[i] + (size_t)row * out, to, (const char *)c->weight[i]->data + (size_t)row * in,
                    from, (int)n);
}

static size_t converted_bytes(const struct conversion *c, int i)
{
    size_t bytes = (size_t)c->rows[i] * lm_row_bytes(c->model->options.compute, c->row_length[i]);
    return (bytes + 63) / 64 * 64;
}

/* Sets use[i] to the data of tensor first + i in the matrix-product type. Matrices stored in another type are converted
 * into scratch memory. Norms are not converted. */
static int convert(struct lm *m, const struct lm_weight *weights, int first, int count, const void **use)
{
    struct conversion c = {.model = m};
    size_t needed = 0;
    int64_t tasks = 0;
    for (int i = 0; i < count; i++) {
        struct lm_tensor info;
        lm_tensor_info(&m->config, first + i, &info);
        use[i] = weights[first + i].data;
        if (info.ndim == 1 || weights[first + i].dtype == m->options.compute) continue;
        c.weight[c.count] = &weights[first + i];
        c.rows[c.count] = info.rows;
        c.row_length[c.count] = info.row_length;
        needed += converted_bytes(&c, c.count);
        tasks += stretches(&c, c.count++);
    }
    if (needed > m->converted_bytes) {
        free(m->converted);
        m->converted_bytes = 0;
        m->converted = aligned_alloc(64, needed);
        if (!m->converted) return fail(m, "out of memory for one layer's converted weights (%zu bytes)", needed);
        m->converted_bytes = needed;
    }
    char *next = m->converted;
    int k = 0;
    for (int i = 0; i < count; i++) {
        if (k == c.count || c.weight[k] != &weights[first + i]) continue;
        use[i] = c.out[k] = next;
        next += converted_bytes(&c, k++);
    }
    return run_with(m, tasks, convert_task, &c);
}

static int use_layer(struct lm *m, const struct lm_weight *weights, int layer)
{
    int first = 1 + layer * PER_LAYER;
    m->layer = layer;
    row_load(m->gains[0], weights[first + IN_NORM].data, weights[first + IN_NORM].dtype, m->config.width);
    row_load(m->gains[1], weights[first + POST_NORM].data, weights[first + POST_NORM].dtype, m->config.width);
    return convert(m, weights, first, PER_LAYER, m->matrix);
}

static int use_head(struct lm *m, const struct lm_weight *weights)
{
    row_load(m->gains[2], weights[m->count - 2].data, weights[m->count - 2].dtype, m->config.width);
    return convert(m, weights, m->count - 1, 1, &m->head);
}

/* ---- forward ---- */

static struct layer *layer_in_work(struct lm *m) { return &m->layers[m->keep ? m->layer : 0]; }

static float *residual_after(struct lm *m, int layer) { return m->layers[m->keep ? layer + 1 : 0].x; }

static void embed_task(void *arg, int64_t task, int thread)
{
    (void)thread;
    struct lm *m = arg;
    int64_t first, n = block_rows(m, task, &first), w = m->config.width;
    for (int64_t r = first; r < first + n; r++) {
        uint8_t token = m->tokens[r / m->length * (m->length + 1) + r % m->length];
        row_load(m->layers[0].x + r * w, (const char *)m->embedding.data + token * lm_row_bytes(m->embedding.dtype, w),
                 m->embedding.dtype, (int)w);
    }
}

static void qkv_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct layer *l = layer_in_work(m);
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, heads = m->config.heads, half = w / heads / 2;
    int64_t first, n = block_rows(m, task, &first);
    for (int64_t r = 0; r < n; r++) {
        l->in_r[first + r] = row_norm(at(k->stored, type, r * w), type, l->x + (first + r) * w, m->gains[0],
                                      (float)m->config.rms_norm_eps, w);
    }
    float *q = k->wide, *key = k->wide + (int64_t)BLOCK * w;
    forward_product(m, thread, n, w, w, k->stored, w, m->matrix[Q], q, LM_F32, w);
    forward_product(m, thread, n, w, w, k->stored, w, m->matrix[K], key, LM_F32, w);
    forward_product(m, thread, n, w, w, k->stored, w, m->matrix[V], at(l->qkv, type, first * 3 * w + 2 * w), type,
                    3 * w);
    for (int64_t r = 0; r < n; r++) {
        int64_t position = (first + r) % m->length;
        const float *cosine = m->cosine + position * half, *sine = m->sine + position * half;
        row_rotate(at(l->qkv, type, (first + r) * 3 * w), type, q + r * w, cosine, sine, 1.0f, heads, half);
        row_rotate(at(l->qkv, type, (first + r) * 3 * w + w), type, key + r * w, cosine, sine, 1.0f, heads, half);
    }
}

/* Returns the length of a row of scores, which the row functions need as a multiple of ROW_LANES. */
static int64_t score_row(int64_t end) { return (end + ROW_LANES - 1) / ROW_LANES * ROW_LANES; }

/* scores[n, end] = a[n, d] b[end, d]^T; a and b are one head's columns of wider rows */
static void scores_product(struct lm *m, int thread, int64_t n, int64_t end, const void *a, int64_t a_row,
                           const void *b, int64_t b_row, float *scores)
{
    int64_t d = m->config.width / m->config.heads;
    multiply(m, thread, n, end, d, (struct operand){a, a_row, 1}, (struct operand){b, 1, b_row},
             (struct product){scores, score_row(end), LM_F32, 0});
}

static void attention_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct layer *l = layer_in_work(m);
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, d = w / m->config.heads, length = m->length;
    int64_t first = task / m->config.heads * length, head = task % m->config.heads;
    float scale = 1.0f / sqrtf((float)d);
    struct row_softmax *kept = l->softmax + task * length;
    const void *q = at(l->qkv, type, first * 3 * w + head * d), *key = at(q, type, w), *v = at(q, type, 2 * w);
    for (int begin = 0; begin < length; begin += ATTENTION_ROWS) {
        int n = length - begin < ATTENTION_ROWS ? length - begin : ATTENTION_ROWS, end = begin + n;
        scores_product(m, thread, n, end, at(q, type, (int64_t)begin * 3 * w), 3 * w, key, 3 * w, k->scores);
        for (int r = 0; r < n; r++) {
            int64_t row = r * score_row(end);
            row_softmax(at(k->p, type, row), type, k->scores + row, &kept[begin + r], scale, begin + r + 1, end);
        }
        multiply(m, thread, n, d, end, (struct operand){k->p, score_row(end), 1}, (struct operand){v, 3 * w, 1},
                 (struct product){at(l->o, type, (first + begin) * w + head * d), w, type, 0});
    }
}

static void mlp_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct layer *l = layer_in_work(m);
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, f = m->config.intermediate;
    int64_t first, n = block_rows(m, task, &first);
    float *out = residual_after(m, m->layer);

    forward_product(m, thread, n, w, w, at(l->o, type, first * w), w, m->matrix[O], k->narrow, LM_F32, w);
    for (int64_t r = 0; r < n; r++) {
        float *mid = l->mid + (first + r) * w;
        row_add(mid, l->x + (first + r) * w, k->narrow + r * w, w);
        l->post_r[first + r] =
            row_norm(at(k->stored, type, r * w), type, mid, m->gains[1], (float)m->config.rms_norm_eps, w);
    }
    forward_product(m, thread, n, f, w, k->stored, w, m->matrix[GATE], at(l->gate, type, first * f), type, f);
    forward_product(m, thread, n, f, w, k->stored, w, m->matrix[UP], at(l->up, type, first * f), type, f);
    row_swiglu(k->stored2, at(l->gate, type, first * f), at(l->up, type, first * f), type, (int)(n * f));
    forward_product(m, thread, n, w, f, k->stored2, f, m->matrix[DOWN], k->narrow, LM_F32, w);
    for (int64_t r = 0; r < n; r++) row_add(out + (first + r) * w, l->mid + (first + r) * w, k->narrow + r * w, w);
}

static void head_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, vocab = m->config.vocab;
    int64_t first, n = block_rows(m, task, &first);
    const float *x = residual_after(m, m->config.depth - 1);
    for (int64_t r = 0; r < n; r++) {
        m->final_r[first + r] = row_norm(at(k->stored, type, r * w), type, x + (first + r) * w, m->gains[2],
                                         (float)m->config.rms_norm_eps, w);
    }
    forward_product(m, thread, n, vocab, w, k->stored, w, m->head, k->wide, LM_F32, vocab);
    double loss = 0;
    for (int64_t r = 0; r < n; r++) {
        int64_t row = first + r;
        int target = m->tokens[row / m->length * (m->length + 1) + row % m->length + 1];
        loss += row_cross_entropy(k->wide + r * vocab, target, 1.0f / (float)m->rows, vocab);
        if (m->keep) row_store(at(m->dlogits, type, row * vocab), type, k->wide + r * vocab, vocab);
    }
    m->block_loss[task] = loss;
}

static double forward(struct lm *m, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length,
                      int keep)
{
    m->ready = 0;
    m->error[0] = 0;
    if (batch < 1 || batch > m->options.batch) return fail(m, "batch %d is not in 1..%d", batch, m->options.batch);
    if (length < 1 || length > m->config.context)
        return fail(m, "length %d is not in 1..%d", length, m->config.context);
    if (keep && !m->options.training) return fail(m, "this model was not created for training");
    m->batch = batch;
    m->length = length;
    m->keep = keep;
    m->rows = (int64_t)batch * length;
    m->embedding = weights[0];
    m->tokens = tokens;
    if (keep) m->tokens = memcpy(m->kept_tokens, tokens, (size_t)batch * ((size_t)length + 1));

    if (run(m, blocks(m), embed_task)) return -1;
    for (int layer = 0; layer < m->config.depth; layer++) {
        if (use_layer(m, weights, layer)) return -1;
        if (run(m, blocks(m), qkv_task)) return -1;
        if (run(m, (int64_t)batch * m->config.heads, attention_task)) return -1;
        if (run(m, blocks(m), mlp_task)) return -1;
    }
    if (use_head(m, weights) || run(m, blocks(m), head_task)) return -1;
    double loss = 0;
    for (int64_t i = 0; i < blocks(m); i++) loss += m->block_loss[i];
    m->ready = keep;
    return loss / (double)m->rows;
}

double lm_forward(struct lm *m, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length)
{
    return forward(m, weights, tokens, batch, length, 1);
}

double lm_eval(struct lm *m, const struct lm_weight *weights, const uint8_t *tokens, int batch, int length)
{
    return forward(m, weights, tokens, batch, length, 0);
}

/* ---- gradients of weights ---- */

/* One gradient: dW[out, in] = dy^T x, summed over all rows. */
struct outer {
    int tensor;
    const void *dy, *x;
    int64_t dy_row, x_row, out, in;
    void *gradient;
};

struct group {
    struct lm *model;
    struct outer outer[4];
    int count;
};

static void outer_task(void *arg, int64_t task, int thread)
{
    struct group *g = arg;
    struct lm *m = g->model;
    const struct outer *o = g->outer;
    while (task >= (o->out + TILE - 1) / TILE) {
        task -= (o->out + TILE - 1) / TILE;
        o++;
    }
    int64_t begin = task * TILE, n = o->out - begin < TILE ? o->out - begin : TILE;
    int type = m->options.gradients;
    float *sum = type == LM_F32 ? (float *)o->gradient + begin * o->in : m->scratch[thread].wide;
    multiply(m, thread, n, o->in, m->rows, (struct operand){at(o->dy, m->options.compute, begin), 1, o->dy_row},
             (struct operand){o->x, o->x_row, 1}, (struct product){sum, o->in, LM_F32, 0});
    if (type == LM_F32) return;
    for (int64_t r = 0; r < n; r++)
        row_store(at(o->gradient, type, (begin + r) * o->in), type, sum + r * o->in, (int)o->in);
}

static void add_outer(struct group *g, int tensor, const void *dy, int64_t dy_row, int64_t out, const void *x,
                      int64_t in)
{
    g->outer[g->count++] = (struct outer){tensor, dy, x, dy_row, in, out, in, NULL};
}

/* Returns where to write the gradient of a tensor: the caller's buffer or, with release, `offset` elements into
 * region. */
static void *destination(struct lm *m, const struct lm_sink *sink, int tensor, int64_t offset)
{
    return m->options.release ? at(m->region, m->options.gradients, offset) : sink->buffers[tensor];
}

static int hand_out_group(struct lm *m, const struct lm_sink *sink, struct group *g)
{
    int64_t offset = 0, tasks = 0;
    g->model = m;
    for (int i = 0; i < g->count; i++) {
        struct outer *o = &g->outer[i];
        o->gradient = destination(m, sink, o->tensor, offset);
        offset += o->out * o->in;
        tasks += (o->out + TILE - 1) / TILE;
    }
    if (run_with(m, tasks, outer_task, g)) return -1;
    for (int i = 0; m->options.release && i < g->count; i++)
        sink->on_gradient(sink->arg, g->outer[i].tensor, g->outer[i].gradient);
    return 0;
}

/* Adds up the blocks' shares of a norm's gradient, from first to last, and passes the sum on. */
static void hand_out_norm(struct lm *m, const struct lm_sink *sink, int tensor)
{
    int w = m->config.width;
    for (int64_t i = 1; i < blocks(m); i++) row_add_to(m->partial, m->partial + i * w, w);
    void *out = destination(m, sink, tensor, 0);
    row_store(out, m->options.gradients, m->partial, w);
    if (m->options.release) sink->on_gradient(sink->arg, tensor, out);
}

struct embedding_sum {
    struct lm *model;
    void *gradient;
};

/* Computes some columns of the embedding's gradient. Rows are added in order. */
static void embedding_task(void *arg, int64_t task, int thread)
{
    struct embedding_sum *e = arg;
    struct lm *m = e->model;
    int64_t w = m->config.width, begin = task * COLUMNS, n = w - begin < COLUMNS ? w - begin : COLUMNS;
    float *sum = m->scratch[thread].wide;
    memset(sum, 0, (size_t)m->config.vocab * (size_t)n * sizeof *sum);
    for (int64_t r = 0; r < m->rows; r++) {
        uint8_t token = m->tokens[r / m->length * (m->length + 1) + r % m->length];
        row_add_to(sum + token * n, m->dx + r * w + begin, (int)n);
    }
    for (int64_t v = 0; v < m->config.vocab; v++)
        row_store(at(e->gradient, m->options.gradients, v * w + begin), m->options.gradients, sum + v * n, (int)n);
}

/* ---- backward ---- */

/* Computes the norm's output again, into `hidden`. Adds the gradient of its input to dx, and the block's share of its
 * gain's gradient to `partial`. */
static void norm_backward(struct lm *m, int64_t block, const float *x, const float *r, const float *gain,
                          const float *dout)
{
    int type = m->options.compute, w = m->config.width;
    int64_t first, n = block_rows(m, block, &first);
    float *share = m->partial + block * w;
    memset(share, 0, (size_t)w * sizeof *share);
    for (int64_t i = first; i < first + n; i++) {
        row_norm_again(at(m->hidden, type, i * w), type, x + i * w, gain, r[i], w);
        row_norm_backward(m->dx + i * w, share, dout + (i - first) * w, x + i * w, gain, r[i], w);
    }
}

static void head_backward_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, vocab = m->config.vocab;
    int64_t first, n = block_rows(m, task, &first);
    backward_product(m, thread, n, vocab, w, at(m->dlogits, type, first * vocab), vocab, m->head, k->narrow, LM_F32, 0);
    memset(m->dx + first * w, 0, (size_t)(n * w) * sizeof *m->dx);
    norm_backward(m, task, m->layers[m->config.depth].x, m->final_r, m->gains[2], k->narrow);
}

static void store_rows(void *out, int type, const float *in, int64_t first, int64_t n, int w)
{
    for (int64_t i = first; i < first + n; i++) row_store(at(out, type, i * w), type, in + i * w, w);
}

static void mlp_backward_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct layer *l = &m->layers[m->layer];
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, f = m->config.intermediate;
    int64_t first, n = block_rows(m, task, &first);

    store_rows(m->dx_mlp, type, m->dx, first, n, w);
    backward_product(m, thread, n, w, f, at(m->dx_mlp, type, first * w), w, m->matrix[DOWN], k->wide, LM_F32, 0);
    row_swiglu_backward(at(m->activated, type, first * f), at(l->gate, type, first * f), at(l->up, type, first * f),
                        k->wide, type, (int)(n * f));
    backward_product(m, thread, n, f, w, at(l->gate, type, first * f), f, m->matrix[GATE], k->narrow, LM_F32, 0);
    backward_product(m, thread, n, f, w, at(l->up, type, first * f), f, m->matrix[UP], k->narrow, LM_F32, 1);
    norm_backward(m, task, l->mid, l->post_r, m->gains[1], k->narrow);

    store_rows(m->dx_attention, type, m->dx, first, n, w);
    backward_product(m, thread, n, w, w, at(m->dx_attention, type, first * w), w, m->matrix[O],
                     at(m->dout, type, first * w), type, 0);
}

static void attention_backward_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct layer *l = &m->layers[m->layer];
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width, d = w / m->config.heads, half = d / 2, length = m->length;
    int64_t first = task / m->config.heads * length, head = task % m->config.heads;
    float scale = 1.0f / sqrtf((float)d);
    struct row_softmax *kept = l->softmax + task * length;
    void *q = at(l->qkv, type, first * 3 * w + head * d), *key = at(q, type, w), *v = at(q, type, 2 * w);
    memset(k->dk, 0, (size_t)length * (size_t)d * sizeof *k->dk);
    memset(k->dv, 0, (size_t)length * (size_t)d * sizeof *k->dv);
    for (int begin = 0; begin < length; begin += ATTENTION_ROWS) {
        int n = length - begin < ATTENTION_ROWS ? length - begin : ATTENTION_ROWS, end = begin + n;
        void *q_rows = at(q, type, (int64_t)begin * 3 * w);
        const void *dout = at(m->dout, type, (first + begin) * w + head * d);
        scores_product(m, thread, n, end, q_rows, 3 * w, key, 3 * w, k->scores);
        scores_product(m, thread, n, end, dout, w, v, 3 * w, k->dscores);
        for (int r = 0; r < n; r++) {
            int64_t row = r * score_row(end);
            row_softmax_backward(at(k->p, type, row), at(k->dp, type, row), type, k->scores + row, k->dscores + row,
                                 &kept[begin + r], scale, begin + r + 1, end);
        }
        int64_t scores = score_row(end);
        multiply(m, thread, n, d, end, (struct operand){k->dp, scores, 1}, (struct operand){key, 3 * w, 1},
                 (struct product){k->dq, d, LM_F32, 0});
        multiply(m, thread, end, d, n, (struct operand){k->dp, 1, scores}, (struct operand){q_rows, 3 * w, 1},
                 (struct product){k->dk, d, LM_F32, 1});
        multiply(m, thread, end, d, n, (struct operand){k->p, 1, scores}, (struct operand){dout, w, 1},
                 (struct product){k->dv, d, LM_F32, 1});
        for (int r = 0; r < n; r++) {
            int64_t angle = (int64_t)(begin + r) * half;
            row_rotate(at(q_rows, type, (int64_t)r * 3 * w), type, k->dq + (int64_t)r * d, m->cosine + angle,
                       m->sine + angle, -1.0f, 1, half);
        }
    }
    for (int64_t t = 0; t < length; t++) {
        row_rotate(at(key, type, t * 3 * w), type, k->dk + t * d, m->cosine + t * half, m->sine + t * half, -1.0f, 1,
                   half);
        row_store(at(v, type, t * 3 * w), type, k->dv + t * d, d);
    }
}

static void qkv_backward_task(void *arg, int64_t task, int thread)
{
    struct lm *m = arg;
    struct layer *l = &m->layers[m->layer];
    struct scratch *k = &m->scratch[thread];
    int type = m->options.compute, w = m->config.width;
    int64_t first, n = block_rows(m, task, &first);
    for (int part = 0; part < 3; part++)
        backward_product(m, thread, n, w, w, at(l->qkv, type, first * 3 * w + part * w), 3 * w, m->matrix[Q + part],
                         k->narrow, LM_F32, part > 0);
    norm_backward(m, task, l->x, l->in_r, m->gains[0], k->narrow);
}

static void scale_dlogits(struct lm *m, float factor)
{
    int type = m->options.compute, vocab = m->config.vocab;
    float *row = m->scratch[0].wide;
    for (int64_t r = 0; r < m->rows; r++) {
        row_load(row, at(m->dlogits, type, r * vocab), type, vocab);
        row_scale(row, factor, vocab);
        row_store(at(m->dlogits, type, r * vocab), type, row, vocab);
    }
}

/* All uses of a layer's weights come before their gradients are passed on, because the receiver may overwrite them. */
static int layer_backward(struct lm *m, const struct lm_weight *weights, int layer, const struct lm_sink *sink)
{
    int type = m->options.compute, first = 1 + layer * PER_LAYER;
    int64_t w = m->config.width, f = m->config.intermediate;
    struct layer *l = &m->layers[layer];
    if (use_layer(m, weights, layer)) return -1;

    if (run(m, blocks(m), mlp_backward_task)) return -1;
    struct group mlp = {0};
    add_outer(&mlp, first + DOWN, m->dx_mlp, w, w, m->activated, f);
    add_outer(&mlp, first + GATE, l->gate, f, f, m->hidden, w);
    add_outer(&mlp, first + UP, l->up, f, f, m->hidden, w);
    if (hand_out_group(m, sink, &mlp)) return -1;
    hand_out_norm(m, sink, first + POST_NORM);

    if (run(m, (int64_t)m->batch * m->config.heads, attention_backward_task)) return -1;
    if (run(m, blocks(m), qkv_backward_task)) return -1;
    struct group attention = {0};
    add_outer(&attention, first + O, m->dx_attention, w, w, l->o, w);
    for (int part = 0; part < 3; part++)
        add_outer(&attention, first + Q + part, at(l->qkv, type, part * w), 3 * w, w, m->hidden, w);
    if (hand_out_group(m, sink, &attention)) return -1;
    hand_out_norm(m, sink, first + IN_NORM);
    return 0;
}

int lm_backward(struct lm *m, const struct lm_weight *weights, double scale, const struct lm_sink *sink)
{
    if (!m->ready) return fail(m, "lm_backward() needs an lm_forward() before it");
    m->ready = 0;
    if (scale != 1.0) scale_dlogits(m, (float)scale);

    if (use_head(m, weights) || run(m, blocks(m), head_backward_task)) return -1;
    struct group head = {0};
    add_outer(&head, m->count - 1, m->dlogits, m->config.vocab, m->config.vocab, m->hidden, m->config.width);
    if (hand_out_group(m, sink, &head)) return -1;
    hand_out_norm(m, sink, m->count - 2);

    for (int layer = m->config.depth - 1; layer >= 0; layer--)
        if (layer_backward(m, weights, layer, sink)) return -1;

    struct embedding_sum embedding = {m, destination(m, sink, 0, 0)};
    if (run_with(m, (m->config.width + COLUMNS - 1) / COLUMNS, embedding_task, &embedding)) return -1;
    if (m->options.release) sink->on_gradient(sink->arg, 0, embedding.gradient);
    return 0;
}
