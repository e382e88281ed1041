/* Tests the digit network and its drawn digits. The network is judged against a second, plain implementation in double
 * precision below. Compared are its loss and, by central differences of that loss, the gradient of every tensor. */
#include <math.h>
#include <stdint.h>

#include "test.h"
#include "trainer/data/digits.h"
#include "trainer/products/conv.h"
#include "trainer/products/rows.h"
#include "trainer/models/cnn.h"
#include "trainer/models/llama.h"

static char error[256];

static void *need(void *p)
{
    if (!p) {
        printf("%s\n", error[0] ? error : "out of memory");
        exit(1);
    }
    return p;
}

static double uniform(uint64_t seed, uint64_t i) { return (double)(hash_counters(seed, i, 99, 0) >> 11) * 0x1p-53; }

/* ---- images and weights ---- */

enum { IMAGES = 40 };

static struct {
    uint8_t images[IMAGES * 28 * 28], labels[IMAGES];
    uint32_t order[IMAGES];
} set;

static struct cnn_batch make_batch(int side, int classes, int n)
{
    for (int i = 0; i < IMAGES; i++) {
        set.labels[i] = (uint8_t)(uniform(1, (uint64_t)i) * classes);
        set.order[i] = (uint32_t)(i * 7 % IMAGES);
        for (int p = 0; p < side * side; p++) {
            double u = uniform(2, (uint64_t)(i * side * side + p));
            set.images[i * side * side + p] = (uint8_t)(u < 0.6 ? 0 : 255 * u);
        }
    }
    return (struct cnn_batch){set.images, set.labels, set.order, n};
}

static int64_t elements(const struct cnn_config *c, int tensor)
{
    struct cnn_tensor info;
    return cnn_tensor_info(c, tensor, &info) == 0 ? info.rows * info.row_length : 0;
}

struct weights {
    double *value[CNN_TENSORS];
};

static struct weights make_weights(const struct cnn_config *c)
{
    struct weights w;
    for (int i = 0; i < CNN_TENSORS; i++) {
        int64_t n = elements(c, i);
        float *first = need(malloc((size_t)n * sizeof *first));
        w.value[i] = need(malloc((size_t)n * sizeof(double)));
        cnn_init_tensor(c, i, 5, first);
        for (int64_t k = 0; k < n; k++) w.value[i][k] = first[k];
        free(first);
    }
    return w;
}

static void free_weights(struct weights *w)
{
    for (int i = 0; i < CNN_TENSORS; i++) free(w->value[i]);
}

/* ---- the plain implementation ---- */

enum { MOST = 64 * 28 * 28 };

/* Computes out[channels][side / 2][side / 2] from in[inputs][side + 4][side + 4]. */
static void plain_layer(double *out, const double *in, int inputs, int channels, int side, const double *weight,
                        const double *bias)
{
    for (int c = 0; c < channels; c++)
        for (int y = 0; y < side; y += 2)
            for (int x = 0; x < side; x += 2) {
                double most = -1e300;
                for (int at = 0; at < 4; at++) {
                    double sum = bias[c];
                    for (int i = 0; i < inputs; i++)
                        for (int k = 0; k < CONV_TAPS; k++)
                            sum += weight[(c * inputs + i) * CONV_TAPS + k] *
                                   in[(i * (side + 4) + y + at / 2 + k / 5) * (side + 4) + x + at % 2 + k % 5];
                    most = fmax(most, sum);
                }
                out[(c * (side / 2) + y / 2) * (side / 2) + x / 2] = fmax(most, 0);
            }
}

static void plain_connected(double *out, const double *in, int inputs, int outputs, const double *weight,
                            const double *bias)
{
    for (int i = 0; i < outputs; i++) {
        out[i] = bias[i];
        for (int j = 0; j < inputs; j++) out[i] += weight[i * inputs + j] * in[j];
    }
}

static double plain_loss(const struct cnn_config *c, const struct weights *w, const struct cnn_batch *batch,
                         int *correct)
{
    static double pixels[MOST], first[MOST], second[MOST], hidden[MOST], logits[256];
    int side = c->side - 4, flat = (side / 2 - 4) / 2;
    double loss = 0;
    flat *= flat * c->channels2;
    *correct = 0;
    for (int i = 0; i < batch->n; i++) {
        const uint8_t *image = batch->images + batch->order[i] * (uint32_t)(c->side * c->side);
        int label = batch->labels[batch->order[i]], best = 0;
        for (int p = 0; p < c->side * c->side; p++) pixels[p] = (image[p] / 255.0 - 0.1307) / 0.3081;
        plain_layer(first, pixels, 1, c->channels1, side, w->value[0], w->value[1]);
        plain_layer(second, first, c->channels1, c->channels2, side / 2 - 4, w->value[2], w->value[3]);
        plain_connected(hidden, second, flat, c->hidden, w->value[4], w->value[5]);
        for (int k = 0; k < c->hidden; k++) hidden[k] = fmax(hidden[k], 0);
        plain_connected(logits, hidden, c->hidden, c->classes, w->value[6], w->value[7]);
        double sum = 0;
        for (int k = 0; k < c->classes; k++) {
            if (logits[k] > logits[best]) best = k;
            sum += exp(logits[k]);
        }
        loss += log(sum) - logits[label];
        *correct += best == label;
    }
    return loss / batch->n;
}

/* ---- the network on the same weights ---- */

struct gradients {
    float *value[CNN_TENSORS];
};

static void **make_buffers(const struct cnn_config *c, struct gradients *g)
{
    static void *list[CNN_TENSORS];
    for (int i = 0; i < CNN_TENSORS; i++) list[i] = g->value[i] = need(calloc((size_t)elements(c, i), sizeof(float)));
    return list;
}

static void free_gradients(struct gradients *g)
{
    for (int i = 0; i < CNN_TENSORS; i++) free(g->value[i]);
}

static struct cnn_score run(const struct cnn_config *c, const struct weights *w, const struct cnn_batch *batch,
                            int compute, int threads, int type, double scale, void *const *buffers)
{
    struct cnn_options options = {.batch = IMAGES, .compute = compute, .threads = threads};
    struct cnn *m = need(cnn_create(c, &options, error, sizeof error));
    struct cnn_score score, again;
    for (int i = 0; i < CNN_TENSORS; i++)
        for (int64_t k = 0; k < elements(c, i); k++) cnn_weights(m, i)[k] = (float)w->value[i][k];
    CHECK(cnn_train(m, batch, scale, buffers, type, &score) == 0, "%s", cnn_error(m));
    CHECK(cnn_eval(m, batch, &again) == 0 && again.loss == score.loss && again.correct == score.correct,
          "the same weights: loss %.9g while training, %.9g in a test", score.loss, again.loss);
    cnn_destroy(m);
    return score;
}

/* Compares every `stride`th value of each tensor. */
static void check_gradients(struct cnn_config c, int n, int stride)
{
    cnn_config_check(&c, error, sizeof error);
    struct cnn_batch batch = make_batch(c.side, c.classes, n);
    struct weights w = make_weights(&c);
    struct gradients g, biased;
    int correct, other;
    double wanted = plain_loss(&c, &w, &batch, &correct), h = 1e-6;
    struct cnn_score score = run(&c, &w, &batch, LM_F32, 2, LM_F32, 1, make_buffers(&c, &g));
    CHECK(fabs(score.loss - wanted) < 1e-5, "loss %.9g, in double %.9g", score.loss, wanted);
    EQUAL(score.correct, correct);
    for (int k = 0; k < c.classes; k++) {
        int labels = 0;
        for (int i = 0; i < n; i++) labels += batch.labels[batch.order[i]] == k;
        w.value[CNN_TENSORS - 1][k] += 100;
        score = run(&c, &w, &batch, LM_F32, 1, LM_F32, 1, make_buffers(&c, &biased));
        free_gradients(&biased);
        w.value[CNN_TENSORS - 1][k] -= 100;
        CHECK(score.correct == labels, "all taken for %d: %d right, not %d", k, score.correct, labels);
    }
    for (int i = 0; i < CNN_TENSORS; i++) {
        struct cnn_tensor info;
        double largest = 0, worst = 0;
        cnn_tensor_info(&c, i, &info);
        for (int64_t k = 0; k < elements(&c, i); k++) largest = fmax(largest, fabs((double)g.value[i][k]));
        CHECK(largest > 1e-4, "%s has no gradient", info.name);
        for (int64_t k = i; k < elements(&c, i); k += elements(&c, i) < stride ? 1 : stride) {
            double kept = w.value[i][k];
            w.value[i][k] = kept + h;
            double above = plain_loss(&c, &w, &batch, &other);
            w.value[i][k] = kept - h;
            double slope = (above - plain_loss(&c, &w, &batch, &other)) / (2 * h);
            w.value[i][k] = kept;
            worst = fmax(worst, fabs(slope - (double)g.value[i][k]));
        }
        CHECK(worst < 1e-3 * largest + 1e-7, "%s: off by %.3g, largest gradient %.3g", info.name, worst, largest);
    }
    free_gradients(&g);
    free_weights(&w);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    const struct cnn_config tiny = {.side = 16, .channels1 = 3, .channels2 = 4, .hidden = 6, .classes = 5};

    TEST("the shape of MNIST's network") {
        struct cnn_config c = {0};
        struct cnn_tensor info;
        CHECK(cnn_config_check(&c, error, sizeof error) == 0 && cnn_parameter_count(&c) == 431080, "%lld parameters",
              (long long)cnn_parameter_count(&c));
        static const struct {
            const char *name;
            int ndim;
            int64_t rows, length;
            double inputs;
        } wanted[] = {{"conv1.weight", 4, 20, 25, 25},   {"conv1.bias", 1, 20, 1, 25},
                      {"conv2.weight", 4, 50, 500, 500}, {"conv2.bias", 1, 50, 1, 500},
                      {"fc1.weight", 2, 500, 800, 800},  {"fc1.bias", 1, 500, 1, 800},
                      {"fc2.weight", 2, 10, 500, 500},   {"fc2.bias", 1, 10, 1, 500}};
        for (int i = 0; i < CNN_TENSORS; i++) {
            int64_t n = elements(&c, i);
            float *values = need(malloc((size_t)n * sizeof *values));
            double low = 1, high = -1, squares = 0;
            cnn_tensor_info(&c, i, &info);
            CHECK(strcmp(info.name, wanted[i].name) == 0 && info.ndim == wanted[i].ndim &&
                      info.rows == wanted[i].rows && info.row_length == wanted[i].length,
                  "tensor %d is %s", i, info.name);
            double bound = 1 / sqrt(wanted[i].inputs);
            cnn_init_tensor(&c, i, 3, values);
            for (int64_t k = 0; k < n; k++) {
                low = fmin(low, values[k]);
                high = fmax(high, values[k]);
                squares += (double)values[k] * values[k];
            }
            CHECK(low >= -bound && high <= bound && high - low > bound, "%s from %g to %g, bound %g", info.name, low,
                  high, bound);
            if (n > 1000)
                CHECK(fabs(squares / (double)n / (bound * bound) - 1.0 / 3) < 0.02, "%s: mean square %g of %g",
                      info.name, squares / (double)n, bound * bound);
            free(values);
        }
        CHECK(cnn_tensor_info(&c, CNN_TENSORS, &info) != 0, "there is a ninth tensor");
        static const int sides[] = {8, 15, 27, 30, 5000, -4};
        for (size_t i = 0; i < COUNT(sides); i++) {
            c = (struct cnn_config){.side = sides[i]};
            CHECK(cnn_config_check(&c, error, sizeof error) != 0 && error[0], "images of %d are fine", sides[i]);
        }
    }

    TEST("loss and gradients against finite differences") {
        check_gradients(tiny, 35, 3);
        check_gradients((struct cnn_config){.side = 28, .channels1 = 2, .channels2 = 3, .hidden = 7}, 3, 5);
    }

    TEST("threads, gradient formats, scale and compute types") {
        struct cnn_config c = tiny;
        struct gradients one, three, f16, bf16, rough;
        cnn_config_check(&c, error, sizeof error);
        struct cnn_batch batch = make_batch(c.side, c.classes, 39);
        struct weights w = make_weights(&c);
        struct cnn_score a = run(&c, &w, &batch, LM_F32, 1, LM_F32, 1, make_buffers(&c, &one));
        struct cnn_score b = run(&c, &w, &batch, LM_F32, 3, LM_F32, 1, make_buffers(&c, &three));
        struct cnn_score d = run(&c, &w, &batch, LM_BF16, 2, LM_F32, 1, make_buffers(&c, &rough));
        run(&c, &w, &batch, LM_F32, 2, LM_BF16, 1, make_buffers(&c, &bf16));
        run(&c, &w, &batch, LM_F32, 2, LM_F16, 1024, make_buffers(&c, &f16));
        CHECK(a.loss == b.loss && a.correct == b.correct, "1 thread: %.9g, 3: %.9g", a.loss, b.loss);
        CHECK(d.loss != a.loss && fabs(d.loss - a.loss) < 0.02, "bf16 products: loss %.9g, f32 %.9g", d.loss, a.loss);
        for (int i = 0; i < CNN_TENSORS; i++) {
            size_t n = (size_t)elements(&c, i);
            double dot = 0, norms[2] = {0};
            uint16_t *stored = need(malloc(n * sizeof *stored));
            CHECK(memcmp(one.value[i], three.value[i], n * sizeof(float)) == 0, "tensor %d depends on the threads", i);
            row_store(stored, LM_BF16, one.value[i], (int)n);
            CHECK(memcmp(stored, bf16.value[i], n * sizeof *stored) == 0, "tensor %d in bf16", i);
            for (size_t k = 0; k < n; k++) {
                dot += (double)one.value[i][k] * rough.value[i][k];
                norms[0] += (double)one.value[i][k] * one.value[i][k];
                norms[1] += (double)rough.value[i][k] * rough.value[i][k];
                one.value[i][k] *= 1024;
            }
            dot /= sqrt(norms[0] * norms[1]);
            CHECK(dot > 0.99, "tensor %d with bf16 products: cosine %g", i, dot);
            row_store(stored, LM_F16, one.value[i], (int)n);
            CHECK(memcmp(stored, f16.value[i], n * sizeof *stored) == 0, "tensor %d in f16 at scale 1024", i);
            free(stored);
        }
        struct gradients *all[] = {&one, &three, &f16, &bf16, &rough};
        for (size_t i = 0; i < COUNT(all); i++) free_gradients(all[i]);
        free_weights(&w);
        struct cnn_options options = {.batch = 4, .threads = 1};
        struct cnn *m = need(cnn_create(&c, &options, error, sizeof error));
        CHECK(cnn_eval(m, &batch, &a) != 0 && cnn_error(m)[0], "39 images where 4 were announced");
        cnn_destroy(m);
    }

    TEST("pooling, value by value") {
        enum { MOST_SIDE = 13 };
        enum { OUT = MOST_SIDE * MOST_SIDE };
        float in[4 * OUT], out[OUT], din[4 * OUT], dout[OUT];
        int32_t where[OUT];
        for (int side = 1; side <= MOST_SIDE; side++) {
            double sum = 0;
            /* Few different values, so that many are equal. */
            for (int i = 0; i < 4 * side * side; i++)
                in[i] = (float)floor(8 * uniform(3, (uint64_t)(side * 1000 + i))) - 4;
            for (int i = 0; i < side * side; i++) dout[i] = (float)(i + 1);
            conv_pool(out, where, in, 0.5f, side);
            float bias = conv_unpool(din, dout, where, side);
            for (int y = 0; y < side; y++)
                for (int x = 0; x < side; x++) {
                    const int corner = 2 * y * 2 * side + 2 * x, lower = corner + 2 * side;
                    const int at[4] = {corner, corner + 1, lower, lower + 1};
                    int best = 0, i = y * side + x;
                    for (int k = 1; k < 4; k++)
                        if (in[at[k]] > in[at[best]]) best = k;
                    float value = in[at[best]] + 0.5f;
                    CHECK(out[i] == (value > 0 ? value : 0), "side %d (%d, %d): %g", side, y, x, out[i]);
                    CHECK(where[i] == (value > 0 ? best : 4), "side %d (%d, %d): from %d, not %d", side, y, x, where[i],
                          best);
                    for (int k = 0; k < 4; k++)
                        CHECK(din[at[k]] == (value > 0 && k == best ? dout[i] : 0), "side %d (%d, %d): back to %d",
                              side, y, x, k);
                    if (value > 0) sum += dout[i];
                }
            CHECK(bias == (float)sum, "side %d: gradient of the bias %g, not %g", side, bias, sum);
            for (int i = 0; i < 4 * side * side; i++) in[i] = NAN;
            conv_pool(out, where, in, 0, side);
            CHECK(isnan(out[0]) && isnan(out[side * side - 1]), "side %d: NaN is lost", side);
        }
    }

    TEST("drawn digits") {
        enum { N = 2000, PIXELS = DIGITS_SIDE * DIGITS_SIDE };
        struct image_set train, test, again;
        need(digits_render(4, 0, N, &train) == 0 ? &train : NULL);
        need(digits_render(4, 1, N, &test) == 0 ? &test : NULL);
        need(digits_render(4, 0, N / 2, &again) == 0 ? &again : NULL);
        CHECK(memcmp(train.images, again.images, N / 2 * PIXELS) == 0 && memcmp(train.labels, again.labels, N / 2) == 0,
              "the same seed, other images");
        CHECK(memcmp(train.images, test.images, PIXELS) != 0 && memcmp(train.labels, test.labels, N) != 0,
              "both parts are the same");
        static double mean[IMAGE_CLASSES][PIXELS];
        int count[IMAGE_CLASSES] = {0}, right = 0;
        for (int i = 0; i < N; i++) {
            int ink = 0;
            count[train.labels[i]]++;
            for (int p = 0; p < PIXELS; p++) {
                mean[train.labels[i]][p] += train.images[i * PIXELS + p];
                ink += train.images[i * PIXELS + p] > 128;
            }
            CHECK(ink > 8 && ink < PIXELS / 2, "image %d has %d pixels of ink", i, ink);
        }
        for (int d = 0; d < IMAGE_CLASSES; d++)
            CHECK(count[d] > N / 14 && count[d] < N / 7, "%d of %d are %d", count[d], N, d);
        for (int i = 0; i < N; i++) {
            double least = 1e300;
            int best = 0;
            for (int d = 0; d < IMAGE_CLASSES; d++) {
                double distance = 0;
                for (int p = 0; p < PIXELS; p++) {
                    double difference = test.images[i * PIXELS + p] - mean[d][p] / count[d];
                    distance += difference * difference;
                }
                if (distance < least) least = distance, best = d;
            }
            right += best == test.labels[i];
        }
        /* Labels belong to images, and yet a mean image does not solve the task. */
        CHECK(right > N / 2 && right < N * 9 / 10, "nearest mean image: %d of %d", right, N);
        image_set_free(&train);
        image_set_free(&test);
        image_set_free(&again);
    }

    return test_done();
}
