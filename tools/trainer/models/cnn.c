/* The forward and backward pass of the network.
 *
 * A convolution is one matrix product of its unfolded input. Row (channel, ky, kx) of the unfolded matrix holds the
 * values under that element of the kernel, for every output position, image after image. The positions lie along the
 * rows, so no lane of the product is padding (20 and 50 channels would be padded to 32 and 64). The products run at the
 * processor's peak, which oneDNN's convolutions do not reach with so few channels. Only a few images are unfolded at a
 * time, so that the matrix stays in the second-level cache.
 *
 * A step is two batches of tasks. First come slices of images: forward and backward, down to the gradients of both
 * convolutions. Then come tiles of the fully connected layers' gradients, which sum over the whole batch, and the sums
 * over the slices. */
#include "trainer/models/cnn.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"
#include "trainer/products/conv.h"
#include "trainer/products/rows.h"
#include "trainer/products/team.h"
#include "trainer/models/llama.h"

enum { SLICE = 32, CHUNK = 2, TILE = 64, SUM_TASKS = 8, MOST_THREADS = 1024 };
enum { W1, B1, W2, B2, W3, B3, W4, B4 };
enum { TAPS = CONV_TAPS };

/* The memory of one thread. "Stored" values are in the matrix-product type, other floats are fp32. */
struct scratch {
    void *pixels;             /* stored: normalised images of a chunk */
    void *col1, *col2;        /* stored: unfolded inputs of a chunk */
    void *a1;                 /* stored: output of the first layer, [SLICE, channels1, plane1] */
    int32_t *where1, *where2; /* positions of both layers' maxima in the whole slice, as conv_pool() writes them */
    float *y1, *y2;           /* outputs of the convolutions, replaced by their gradients in the backward pass */
    void *dy1, *dy2;          /* stored: the same gradients; y1 and y2 themselves if products are fp32 */
    float *dcol2;
    float *da1;  /* gradient of the first layer's output, one image */
    float *wide; /* [SLICE, flat], [SLICE, hidden] or a tile of fc1's gradient */
    float *logits;
    float *row;
};

struct cnn {
    struct cnn_config config;
    struct cnn_options options;
    int in1, out1, in2, out2, last; /* sides of the planes: 28, 24, 12, 8, 4 */
    int plane1, plane2;             /* values of one channel after each pooling: 12*12, 4*4 */
    int flat;                       /* values of all channels after the second pooling */
    int slices;                     /* number of slices in the largest batch */
    struct team team;
    struct scratch *scratch;
    void *arena;
    size_t arena_bytes;

    float *weights[CNN_TENSORS];
    const void *product[CNN_TENSORS]; /* matrices in the matrix-product type */
    void *converted[CNN_TENSORS];
    void *flats;            /* stored, [image, flat] */
    void *hidden, *dhidden; /* stored, [image, hidden] */
    void *dlogits;          /* stored, [image, classes] */
    float *partial;         /* [slice]: gradients of both convolutions */
    double *slice_loss;
    int *slice_correct;
    float normal[256]; /* normalised value of each pixel value */

    const struct cnn_batch *batch; /* of the call in progress */
    int backward;
    float factor;
    void *const *gradients;
    int gradient_type;
    char error[256];
};

/* ---- memory ---- */

struct arena {
    char *base;
    size_t used;
};

static void *carve(struct arena *a, int64_t elements, size_t size)
{
    void *p = a->base ? a->base + a->used : NULL;
    /* A gap of 7 cache lines keeps buffers from sharing cache sets. */
    a->used += ((size_t)elements * size + 63) / 64 * 64 + 7 * 64;
    return p;
}

static int64_t partial_size(const struct cnn *m)
{
    return (int64_t)m->config.channels1 * (TAPS + 1) + (int64_t)m->config.channels2 * (m->config.channels1 * TAPS + 1);
}

static void layout(struct cnn *m, struct arena *a)
{
    const struct cnn_config *c = &m->config;
    size_t s = lm_dtype_bytes(m->options.compute);
    int stored = m->options.compute != LM_F32;
    int64_t n = m->options.batch, c1 = c->channels1, c2 = c->channels2;
    int64_t positions1 = (int64_t)CHUNK * m->out1 * m->out1, positions2 = (int64_t)CHUNK * m->out2 * m->out2;
    int64_t widest = m->flat > c->hidden ? m->flat : c->hidden;
    for (int i = 0; i < CNN_TENSORS; i++) {
        struct cnn_tensor info;
        cnn_tensor_info(c, i, &info);
        m->weights[i] = carve(a, info.rows * info.row_length, sizeof(float));
        if (stored && i % 2 == 0) m->converted[i] = carve(a, info.rows * info.row_length, s);
        m->product[i] = stored ? m->converted[i] : m->weights[i];
    }
    for (int i = 0; i < parallel_threads(m->team.pool); i++) {
        struct scratch *k = &m->scratch[i];
        k->pixels = carve(a, (int64_t)CHUNK * m->in1 * m->in1, s);
        k->col1 = carve(a, TAPS * positions1, s);
        k->y1 = carve(a, c1 * positions1, sizeof(float));
        k->dy1 = stored ? carve(a, c1 * positions1, s) : k->y1;
        k->a1 = carve(a, SLICE * c1 * m->plane1, s);
        k->where1 = carve(a, SLICE * c1 * m->plane1, sizeof(int32_t));
        k->where2 = carve(a, (int64_t)SLICE * m->flat, sizeof(int32_t));
        k->col2 = carve(a, c1 * TAPS * positions2, s);
        k->y2 = carve(a, c2 * positions2, sizeof(float));
        k->dy2 = stored ? carve(a, c2 * positions2, s) : k->y2;
        k->dcol2 = carve(a, c1 * TAPS * positions2, sizeof(float));
        k->da1 = carve(a, c1 * m->plane1, sizeof(float));
        k->wide = carve(a, (SLICE > TILE ? SLICE : TILE) * widest, sizeof(float));
        k->logits = carve(a, SLICE * c->classes, sizeof(float));
        k->row = carve(a, widest, sizeof(float));
    }
    m->flats = carve(a, n * m->flat, s);
    m->hidden = carve(a, n * c->hidden, s);
    m->dhidden = carve(a, n * c->hidden, s);
    m->dlogits = carve(a, n * c->classes, s);
    m->partial = carve(a, m->slices * partial_size(m), sizeof(float));
    m->slice_loss = carve(a, m->slices, sizeof(double));
    m->slice_correct = carve(a, m->slices, sizeof(int));
}

struct cnn *cnn_create(const struct cnn_config *config, const struct cnn_options *options, char *error,
                       size_t error_bytes)
{
    struct cnn_config c = *config;
    if (cnn_config_check(&c, error, error_bytes)) return NULL;
    const char *wrong = NULL;
    if (options->batch < 1 || options->batch > 1 << 20) wrong = "batch is not in 1..1048576";
    else if (options->compute != LM_F32 && options->compute != LM_BF16)
        wrong = "the type of matrix products must be f32 or bf16";
    else if (options->threads < 0 || options->threads > MOST_THREADS) wrong = "threads is not in 0..1024";
    struct cnn *m = wrong ? NULL : calloc(1, sizeof *m);
    if (!m) {
        snprintf(error, error_bytes, "%s", wrong ? wrong : "out of memory");
        return NULL;
    }
    m->config = c;
    m->options = *options;
    m->in1 = c.side;
    m->out1 = m->in1 - CONV_KERNEL + 1;
    m->in2 = m->out1 / 2;
    m->out2 = m->in2 - CONV_KERNEL + 1;
    m->last = m->out2 / 2;
    m->plane1 = m->in2 * m->in2;
    m->plane2 = m->last * m->last;
    m->flat = c.channels2 * m->plane2;
    m->slices = (options->batch + SLICE - 1) / SLICE;
    for (int i = 0; i < 256; i++) m->normal[i] = (float)((i / 255.0 - 0.1307) / 0.3081);
    if (team_open(&m->team, options->threads, error, error_bytes) != 0) goto failed;
    m->scratch = calloc((size_t)parallel_threads(m->team.pool), sizeof *m->scratch);
    if (!m->scratch) {
        no_memory(error, error_bytes);
        goto failed;
    }
    struct arena arena = {NULL, 0};
    layout(m, &arena);
    m->arena_bytes = arena.used;
    m->arena = aligned_alloc(64, arena.used);
    if (!m->arena) {
        snprintf(error, error_bytes, "out of memory: a batch of %d images needs %.3g GiB; choose a smaller batch",
                 options->batch, (double)arena.used * 0x1p-30);
        goto failed;
    }
    memset(m->arena, 0, arena.used);
    arena = (struct arena){m->arena, 0};
    layout(m, &arena);
    return m;
failed:
    cnn_destroy(m);
    return NULL;
}

void cnn_destroy(struct cnn *m)
{
    if (!m) return;
    team_close(&m->team);
    free(m->scratch);
    free(m->arena);
    free(m);
}

float *cnn_weights(struct cnn *m, int tensor) { return m->weights[tensor]; }

size_t cnn_activation_bytes(const struct cnn *m) { return m->arena_bytes; }

const char *cnn_error(const struct cnn *m) { return m->error; }

/* ---- pieces ---- */

static void *at(const struct cnn *m, const void *base, int64_t index)
{
    return (char *)(uintptr_t)base + (size_t)index * lm_dtype_bytes(m->options.compute);
}

/* C[rows, columns] (+)= A[rows, inner] B[inner, columns]; A and B have two strides each */
static void product(struct cnn *m, int thread, int64_t rows, int64_t columns, int64_t inner, const void *a,
                    int64_t a_row, int64_t a_column, const void *b, int64_t b_row, int64_t b_column, float *c,
                    int accumulate)
{
    team_multiply(&m->team, thread, m->options.compute, rows, columns, inner, (struct operand){a, a_row, a_column},
                  (struct operand){b, b_row, b_column}, (struct product){c, columns, LM_F32, accumulate});
}

/* Unfolds images first .. first + n - 1 of the batch for the first convolution, side by side. */
static void unfold_pixels(struct cnn *m, struct scratch *k, int first, int n)
{
    size_t pixels = (size_t)m->in1 * (size_t)m->in1, positions = (size_t)m->out1 * (size_t)m->out1;
    size_t size = lm_dtype_bytes(m->options.compute);
    float values[256];
    for (int i = 0; i < n; i++) {
        const uint8_t *image = m->batch->images + m->batch->order[first + i] * pixels;
        for (size_t p = 0; p < pixels; p += 256) {
            size_t piece = pixels - p < 256 ? pixels - p : 256;
            for (size_t j = 0; j < piece; j++) values[j] = m->normal[image[p + j]];
            row_store((char *)k->pixels + p * size, m->options.compute, values, (int)piece);
        }
        conv_unfold((char *)k->col1 + (size_t)i * positions * size, (size_t)n * positions, k->pixels, 1, m->in1, size);
    }
}

/* Unfolds the first layer's outputs of images from .. from + n - 1 of the slice for the second convolution. */
static void unfold_first(struct cnn *m, struct scratch *k, int from, int n)
{
    size_t image = (size_t)(m->config.channels1 * m->plane1), positions = (size_t)m->out2 * (size_t)m->out2;
    size_t size = lm_dtype_bytes(m->options.compute);
    for (int i = 0; i < n; i++)
        conv_unfold((char *)k->col2 + (size_t)i * positions * size, (size_t)n * positions,
                    (const char *)k->a1 + (size_t)(from + i) * image * size, m->config.channels1, m->in2, size);
}

/* ---- forward ---- */

/* Runs both convolutions with pooling over images from .. from + n - 1 of the slice that begins at image `first`. */
static void convolve(struct cnn *m, int thread, int first, int from, int n)
{
    struct scratch *k = &m->scratch[thread];
    int c1 = m->config.channels1, c2 = m->config.channels2, type = m->options.compute;
    int64_t p1 = (int64_t)m->out1 * m->out1, p2 = (int64_t)m->out2 * m->out2;
    unfold_pixels(m, k, first + from, n);
    product(m, thread, c1, n * p1, TAPS, m->product[W1], TAPS, 1, k->col1, n * p1, 1, k->y1, 0);
    for (int i = 0; i < n; i++)
        for (int c = 0; c < c1; c++) {
            int64_t to = ((int64_t)(from + i) * c1 + c) * m->plane1;
            conv_pool(k->row, k->where1 + to, k->y1 + (c * n + i) * p1, m->weights[B1][c], m->in2);
            row_store(at(m, k->a1, to), type, k->row, m->plane1);
        }
    unfold_first(m, k, from, n);
    product(m, thread, c2, n * p2, c1 * TAPS, m->product[W2], c1 * TAPS, 1, k->col2, n * p2, 1, k->y2, 0);
    for (int i = 0; i < n; i++) {
        int32_t *where = k->where2 + (int64_t)(from + i) * m->flat;
        for (int c = 0; c < c2; c++)
            conv_pool(k->row + c * m->plane2, where + c * m->plane2, k->y2 + (c * n + i) * p2, m->weights[B2][c],
                      m->last);
        row_store(at(m, m->flats, (int64_t)(first + from + i) * m->flat), type, k->row, m->flat);
    }
}

static void classify(struct cnn *m, int thread, int slice, int first, int n)
{
    struct scratch *k = &m->scratch[thread];
    int hidden = m->config.hidden, classes = m->config.classes, correct = 0;
    double loss = 0;
    product(m, thread, n, hidden, m->flat, at(m, m->flats, (int64_t)first * m->flat), m->flat, 1, m->product[W3], 1,
            m->flat, k->wide, 0);
    for (int i = 0; i < n; i++) {
        float *row = k->wide + (int64_t)i * hidden;
        for (int j = 0; j < hidden; j++) {
            float value = row[j] + m->weights[B3][j];
            row[j] = value < 0 ? 0 : value;
        }
        row_store(at(m, m->hidden, (int64_t)(first + i) * hidden), m->options.compute, row, hidden);
    }
    product(m, thread, n, classes, hidden, at(m, m->hidden, (int64_t)first * hidden), hidden, 1, m->product[W4], 1,
            hidden, k->logits, 0);
    for (int i = 0; i < n; i++) {
        float *row = k->logits + (int64_t)i * classes;
        int label = m->batch->labels[m->batch->order[first + i]], best = 0;
        row_add_to(row, m->weights[B4], classes);
        for (int j = 1; j < classes; j++)
            if (row[j] > row[best]) best = j;
        correct += best == label;
        loss += row_cross_entropy(row, label, m->factor, classes);
        row_store(at(m, m->dlogits, (int64_t)(first + i) * classes), m->options.compute, row, classes);
    }
    m->slice_loss[slice] = loss;
    m->slice_correct[slice] = correct;
}

/* ---- backward ---- */

/* Runs convolve() backward over the same images. dflat: gradients of its output. Adds the gradients of weights and
 * biases to `partial`. */
static void convolve_backward(struct cnn *m, int thread, int first, int from, int n, const float *dflat, float *partial)
{
    struct scratch *k = &m->scratch[thread];
    int c1 = m->config.channels1, c2 = m->config.channels2, type = m->options.compute, taps2 = c1 * TAPS;
    int64_t p1 = (int64_t)m->out1 * m->out1, p2 = (int64_t)m->out2 * m->out2;
    float *dw1 = partial, *db1 = dw1 + c1 * TAPS, *dw2 = db1 + c1, *db2 = dw2 + (int64_t)c2 * taps2;
    for (int i = 0; i < n; i++)
        for (int c = 0; c < c2; c++) {
            const int32_t *where = k->where2 + (int64_t)(from + i) * m->flat + c * m->plane2;
            db2[c] +=
                conv_unpool(k->y2 + (c * n + i) * p2, dflat + (int64_t)i * m->flat + c * m->plane2, where, m->last);
        }
    if (type != LM_F32) row_store(k->dy2, type, k->y2, (int)(c2 * n * p2));
    unfold_first(m, k, from, n);
    product(m, thread, c2, taps2, n * p2, k->dy2, n * p2, 1, k->col2, 1, n * p2, dw2, 1);
    product(m, thread, taps2, n * p2, c2, m->product[W2], 1, taps2, k->dy2, n * p2, 1, k->dcol2, 0);
    for (int i = 0; i < n; i++) {
        conv_fold(k->da1, k->dcol2 + i * p2, (size_t)(n * p2), c1, m->in2);
        for (int c = 0; c < c1; c++) {
            const int32_t *where = k->where1 + ((int64_t)(from + i) * c1 + c) * m->plane1;
            db1[c] += conv_unpool(k->y1 + (c * n + i) * p1, k->da1 + (int64_t)c * m->plane1, where, m->in2);
        }
    }
    if (type != LM_F32) row_store(k->dy1, type, k->y1, (int)(c1 * n * p1));
    unfold_pixels(m, k, first + from, n);
    product(m, thread, c1, TAPS, n * p1, k->dy1, n * p1, 1, k->col1, 1, n * p1, dw1, 1);
}

static void slice_backward(struct cnn *m, int thread, int slice, int first, int n)
{
    struct scratch *k = &m->scratch[thread];
    int hidden = m->config.hidden, classes = m->config.classes, type = m->options.compute;
    product(m, thread, n, hidden, classes, at(m, m->dlogits, (int64_t)first * classes), classes, 1, m->product[W4],
            hidden, 1, k->wide, 0);
    for (int i = 0; i < n; i++) {
        float *row = k->wide + (int64_t)i * hidden;
        row_load(k->row, at(m, m->hidden, (int64_t)(first + i) * hidden), type, hidden);
        for (int j = 0; j < hidden; j++) row[j] = k->row[j] <= 0 ? 0 : row[j];
        row_store(at(m, m->dhidden, (int64_t)(first + i) * hidden), type, row, hidden);
    }
    product(m, thread, n, m->flat, hidden, at(m, m->dhidden, (int64_t)first * hidden), hidden, 1, m->product[W3],
            m->flat, 1, k->wide, 0);
    float *partial = m->partial + slice * partial_size(m);
    memset(partial, 0, (size_t)partial_size(m) * sizeof *partial);
    for (int i = 0; i < n; i += CHUNK)
        convolve_backward(m, thread, first, i, n - i < CHUNK ? n - i : CHUNK, k->wide + (int64_t)i * m->flat, partial);
}

static void slice_task(void *arg, int64_t slice, int thread)
{
    struct cnn *m = arg;
    int first = (int)slice * SLICE, n = m->batch->n - first < SLICE ? m->batch->n - first : SLICE;
    for (int i = 0; i < n; i += CHUNK) convolve(m, thread, first, i, n - i < CHUNK ? n - i : CHUNK);
    classify(m, thread, (int)slice, first, n);
    if (m->backward) slice_backward(m, thread, (int)slice, first, n);
}

/* Stores values first .. first + n - 1 of a tensor's gradient. */
static void put(const struct cnn *m, int tensor, int64_t first, const float *values, int64_t n)
{
    row_store((char *)m->gradients[tensor] + (size_t)first * lm_dtype_bytes(m->gradient_type), m->gradient_type, values,
              (int)n);
}

/* Computes rows first .. first + n - 1 of the gradients of a fully connected layer's weight and bias: sums over all
 * images i of dout[i] in[i] and of dout[i]. */
static void connected_gradient(struct cnn *m, int thread, int tensor, const void *dout, int outputs, const void *in,
                               int inputs, int first, int n)
{
    struct scratch *k = &m->scratch[thread];
    float bias[TILE] = {0};
    product(m, thread, n, inputs, m->batch->n, at(m, dout, first), 1, outputs, in, inputs, 1, k->wide, 0);
    put(m, tensor, (int64_t)first * inputs, k->wide, (int64_t)n * inputs);
    for (int i = 0; i < m->batch->n; i++) {
        row_load(k->row, at(m, dout, (int64_t)i * outputs + first), m->options.compute, n);
        row_add_to(bias, k->row, n);
    }
    put(m, tensor + 1, first, bias, n);
}

/* Adds up one part of the convolutions' gradients over the slices, into the first slice, and stores it. */
static void sum_task(struct cnn *m, int part)
{
    int64_t size = partial_size(m), begin = size * part / SUM_TASKS, end = size * (part + 1) / SUM_TASKS, start = 0;
    for (int s = 1; s * SLICE < m->batch->n; s++)
        row_add_to(m->partial + begin, m->partial + s * size + begin, (int)(end - begin));
    for (int tensor = W1; tensor <= B2; tensor++) {
        struct cnn_tensor info;
        cnn_tensor_info(&m->config, tensor, &info);
        int64_t n = info.rows * info.row_length, from = begin > start ? begin : start,
                to = end < start + n ? end : start + n;
        if (from < to) put(m, tensor, from - start, m->partial + from, to - from);
        start += n;
    }
}

static void gradient_task(void *arg, int64_t task, int thread)
{
    struct cnn *m = arg;
    int hidden = m->config.hidden, classes = m->config.classes, tiles3 = (hidden + TILE - 1) / TILE;
    int tiles4 = (classes + TILE - 1) / TILE, first;
    if (task < tiles3) {
        first = (int)task * TILE;
        connected_gradient(m, thread, W3, m->dhidden, hidden, m->flats, m->flat, first,
                           hidden - first < TILE ? hidden - first : TILE);
    } else if (task < tiles3 + tiles4) {
        first = ((int)task - tiles3) * TILE;
        connected_gradient(m, thread, W4, m->dlogits, classes, m->hidden, hidden, first,
                           classes - first < TILE ? classes - first : TILE);
    } else {
        sum_task(m, (int)task - tiles3 - tiles4);
    }
}

static void convert_task(void *arg, int64_t tensor, int thread)
{
    struct cnn *m = arg;
    struct cnn_tensor info;
    (void)thread;
    cnn_tensor_info(&m->config, (int)tensor, &info);
    if (m->converted[tensor])
        row_store(m->converted[tensor], m->options.compute, m->weights[tensor], (int)(info.rows * info.row_length));
}

static int run(struct cnn *m, const struct cnn_batch *batch, struct cnn_score *score)
{
    if (batch->n < 1 || batch->n > m->options.batch) {
        snprintf(m->error, sizeof m->error, "batch of %d images is not in 1..%d", batch->n, m->options.batch);
        return -1;
    }
    int slices = (batch->n + SLICE - 1) / SLICE;
    int tiles = (m->config.hidden + TILE - 1) / TILE + (m->config.classes + TILE - 1) / TILE;
    m->batch = batch;
    if (m->options.compute != LM_F32) team_run(&m->team, CNN_TENSORS, convert_task, m);
    const char *failure = team_run(&m->team, slices, slice_task, m);
    if (!failure && m->backward) failure = team_run(&m->team, tiles + SUM_TASKS, gradient_task, m);
    if (failure) {
        snprintf(m->error, sizeof m->error, "%s", failure);
        return -1;
    }
    *score = (struct cnn_score){0, 0};
    for (int s = 0; s < slices; s++) {
        score->loss += m->slice_loss[s];
        score->correct += m->slice_correct[s];
    }
    score->loss /= batch->n;
    return 0;
}

int cnn_eval(struct cnn *m, const struct cnn_batch *batch, struct cnn_score *score)
{
    m->backward = 0;
    m->factor = 1;
    return run(m, batch, score);
}

int cnn_train(struct cnn *m, const struct cnn_batch *batch, double scale, void *const *gradients, int type,
              struct cnn_score *score)
{
    m->backward = 1;
    m->factor = (float)(scale / batch->n);
    m->gradients = gradients;
    m->gradient_type = type;
    return run(m, batch, score);
}
