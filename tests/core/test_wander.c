/* Measures how far stored values wander from exact ones under the generator "lattice", compared with independent words,
 * in steps of the library. Also tests what lattices must not cost: each word is uniform, elements are unrelated, and
 * there is no bias where a state feeds on itself.
 *
 *   test_wander             Lattices alone.
 *   test_wander --all       Also the runs in steps, of 1200 each.
 *   test_wander STEPS       The same with as many steps; docs/random.md quotes 12000.
 *
 * Errors are counted in ulp of BF16 between 1 and 2, those of packed weights as parts of the weights. Seeds are fixed,
 * so a pass stays a pass.
 * Not for an emulator. */
#define HALFSTEP_ADVANCED

#include "base/rng.h"
#include "ref/fixture.h"

enum { ELEMENTS = 4096, COLUMNS = 256, ROWS = ELEMENTS / COLUMNS, PERIODS = 300 };
static const double ulp = 0x1p-7;
static int steps = 1200;

/* ---- Uniform at each step ---------------------------------------------------------------------------------------- */

static void test_uniform(void)
{
    TEST("lattice: for every write, each half of a mixer word gives each word once") {
        static unsigned char seen[2][65536];
        for (uint32_t t = 0; t < 256; t++) {
            struct hstep_key key = hstep_key_lattice(1, 2, 512 + t, 3);
            memset(seen, 0, sizeof seen);
            int twice = 0;
            for (uint32_t h = 0; h < 65536; h++) {
                uint32_t word = hstep_lattice_word(&key, h | (65535 - h) << 16);
                twice += seen[0][word & 65535]++ + seen[1][word >> 16]++;
            }
            CHECK(!twice, "write %u: %d words come twice", (unsigned)t, twice);
        }
    }
    TEST("lattice: in 256 writes the high byte takes every value, the low byte none but its own") {
        int bad = 0;
        for (uint32_t h = 0; h < 65536; h++) {
            unsigned char seen[256] = {0};
            for (uint32_t t = 0; t < 256; t++) {
                struct hstep_key key = {.factor = 0, .offset = 0};
                key.factor = (1 + (t << 9)) & 65535;
                key.offset = t << 8;
                uint32_t word = hstep_lattice_word(&key, h) & 65535;
                bad += seen[word >> 8]++ || (word & 255) != (h & 255);
            }
        }
        CHECK(!bad, "%d words are where they should not be", bad);
    }
}

/* ---- Elements of one step ---------------------------------------------------------------------------------------- */

enum { WIDE = 1 << 18, TRANSFORM = 1 << 19 };

/* Transforms n = 2^k complex numbers in place. */
static void fourier(double *re, double *im, int n)
{
    for (int i = 1, j = 0; i < n; i++) {
        int bit = n >> 1;
        for (; j & bit; bit >>= 1) j ^= bit;
        j ^= bit;
        if (i >= j) continue;
        double r = re[i], s = im[i];
        re[i] = re[j], im[i] = im[j];
        re[j] = r, im[j] = s;
    }
    static double cosine[TRANSFORM / 2], sine[TRANSFORM / 2];
    for (int i = 0; i < n / 2; i++) {
        cosine[i] = cos(6.283185307179586 * i / n);
        sine[i] = sin(6.283185307179586 * i / n);
    }
    for (int length = 2; length <= n; length <<= 1)
        for (int begin = 0; begin < n; begin += length)
            for (int i = 0; i < length / 2; i++) {
                int a = begin + i, b = a + length / 2, k = i * (n / length);
                double r = re[b] * cosine[k] + im[b] * sine[k], s = im[b] * cosine[k] - re[b] * sine[k];
                re[b] = re[a] - r, im[b] = im[a] - s;
                re[a] += r, im[a] += s;
            }
}

static double wide[WIDE];

/* Takes the words of write t as numbers of mean 0 and variance 1, element by element. */
static void take_words(uint64_t seed, uint64_t t)
{
    static uint32_t words[WIDE / 2];
    MUST(halfstep_random_words("lattice", seed, halfstep_name_id("w"), t, WEIGHT, 0, words, WIDE / 2));
    double deviation = sqrt((65536.0 * 65536.0 - 1) / 12);
    for (int i = 0; i < WIDE; i++) wide[i] = ((double)(words[i / 2] >> 16 * (i % 2) & 65535) - 32767.5) / deviation;
}

static void test_elements(void)
{
    static const uint64_t writes[] = {0, 1, 100, 128, 255, 300, 70000};
    TEST("lattice: elements of one step are uncorrelated at every distance up to 65,536") {
        static double re[TRANSFORM], im[TRANSFORM];
        for (size_t k = 0; k < COUNT(writes); k++) {
            take_words(k, writes[k]);
            memset(re, 0, sizeof re);
            memset(im, 0, sizeof im);
            memcpy(re, wide, sizeof wide);
            fourier(re, im, TRANSFORM);
            for (int i = 0; i < TRANSFORM; i++) re[i] = (re[i] * re[i] + im[i] * im[i]) / TRANSFORM, im[i] = 0;
            fourier(re, im, TRANSFORM);
            double worst = 0, squares = 0;
            int where = 0, n = 65536;
            for (int d = 1; d <= n; d++) {
                double z = re[d] / sqrt(WIDE - d);
                squares += z * z;
                if (fabs(z) > worst) worst = fabs(z), where = d;
            }
            double spread = (squares / n - 1) / sqrt(2.0 / n);
            CHECK(fabs(re[0] / WIDE - 1) < 0.01, "write %d: variance %g", (int)writes[k], re[0] / WIDE);
            CHECK(worst < 6, "write %d: r = %.2f standard errors at distance %d", (int)writes[k], worst, where);
            CHECK(fabs(spread) < 6, "write %d: correlations scatter by %.2f standard errors too much", (int)writes[k],
                  spread);
        }
    }
    TEST("lattice: sums over rows and columns of one step scatter as independent ones") {
        enum { SIDE = 512 };
        for (size_t k = 0; k < COUNT(writes); k++) {
            take_words(100 + k, writes[k]);
            static double sums[2][SIDE];
            memset(sums, 0, sizeof sums);
            for (int i = 0; i < WIDE; i++) sums[0][i / SIDE] += wide[i], sums[1][i % SIDE] += wide[i];
            for (int which = 0; which < 2; which++) {
                double squares = 0, worst = 0;
                for (int i = 0; i < SIDE; i++) {
                    double z = sums[which][i] / sqrt(SIDE);
                    squares += z * z;
                    worst = fmax(worst, fabs(z));
                }
                double spread = (squares / SIDE - 1) / sqrt(2.0 / SIDE);
                CHECK(fabs(spread) < 5 && worst < 5.5,
                      "write %d, %s: spread %.2f standard errors, largest %.2f deviations", (int)writes[k],
                      which ? "columns" : "rows", spread, worst);
            }
        }
    }
}

/* ---- Which write a slot's words are of --------------------------------------------------------------------------- */

static void open_with(struct one *t, const char *recipe, const char *generator)
{
    one_open(t, recipe, 2, ROWS, COLUMNS, "f32");
    MUST(halfstep_set_choice(t->o, ALL_GROUPS, "generator", generator));
}

/* Rounds x to BF16 as write number `write` of a slot does. */
static void round_all(const float *x, uint16_t *out, uint64_t write, int slot)
{
    uint32_t words[ELEMENTS / 2];
    MUST(halfstep_random_words("lattice", 42, halfstep_name_id("w"), write, slot, 0, words, ELEMENTS / 2));
    MUST(halfstep_bf16_stochastic(x, out, ELEMENTS, words));
}

static void test_counts(void)
{
    TEST("lattice: weights go by full steps, states by their steps, accumulators by their own count") {
        struct one t;
        static float w[ELEMENTS], m[ELEMENTS], a[ELEMENTS], next[ELEMENTS], g[ELEMENTS];
        static uint16_t sum[ELEMENTS], expected[ELEMENTS];
        struct source s = {1};
        open_with(&t, "sgd/bf16-sr/bf16-sr", "lattice");
        one_hyper(&t, "lr", 0x1p-6);
        one_hyper(&t, "momentum", 0.5);
        one_hyper(&t, "weight_decay", 0);
        one_start(&t);
        one_fill(&t, WEIGHT, 1.5f);
        uint64_t full = 0, state = 0, accumulations = 0;
        int wrong[3] = {0};
        for (int k = 0; k < 700; k++) {
            for (int i = 0; i < ELEMENTS; i++) g[i] = (float)next_unit(&s) - 0.5f;
            one_write(&t, GRADIENT, g);
            one_read(&t, WEIGHT, w);
            one_read(&t, STATE, m);
            const void *gradients[1] = {t.gradient};
            if (k % 5 == 1) { /* into an accumulator */
                for (int i = 0; i < ELEMENTS; i++) {
                    a[i] = from_bits((uint32_t)sum[i] << 16);
                    next[i] = a[i] + 0.25f * g[i];
                }
                MUST(halfstep_accumulate(t.o, 0, sum, "bf16-sr", t.gradient, "f32", 0.25));
                round_all(next, expected, accumulations++, GRADIENT);
                wrong[2] += memcmp(sum, expected, sizeof sum) != 0;
                continue;
            }
            int micro = k % 3 == 0;
            if (micro) {
                MUST(accumulate_states(t.o, gradients));
            } else {
                MUST(one_step(&t));
            }
            for (int i = 0; i < ELEMENTS; i++) next[i] = 0.5f * m[i] + g[i];
            round_all(next, expected, state++, STATE);
            one_read(&t, STATE, m);
            int differ = 0;
            for (int i = 0; i < ELEMENTS; i++) differ += to_bits(m[i]) >> 16 != expected[i];
            wrong[1] += differ != 0;
            if (!micro) {
                for (int i = 0; i < ELEMENTS; i++) next[i] = w[i] - 0x1p-6f * next[i];
                round_all(next, expected, full++, WEIGHT);
                wrong[0] += memcmp(t.weight, expected, sizeof expected) != 0;
            }
        }
        CHECK(full > 256 && state > full && accumulations > 100, "%d, %d and %d writes", (int)full, (int)state,
              (int)accumulations);
        CHECK(!wrong[0], "%d of %d steps round weights otherwise", wrong[0], (int)full);
        CHECK(!wrong[1], "%d of %d steps round states otherwise", wrong[1], (int)state);
        CHECK(!wrong[2], "%d of %d accumulations round otherwise", wrong[2], (int)accumulations);
        one_close(&t);
    }
}

/* ---- Signals from outside ---------------------------------------------------------------------------------------- */

/* A pool of gradients in ulp. Signals are made of it without arithmetic in every step. */
static float pool[PERIODS][ELEMENTS];

enum { CONSTANT, AUTOREGRESSIVE, NOISE };

/* Returns the mean square of stored - exact, in ulp squared, after steps of the library with the signal. It is taken at
 * several times in the second half. The signal is a kind or, with period > 0, the first so many gradients of the pool,
 * by turns. */
static double wander(const char *generator, int kind, int period)
{
    struct one t;
    static float g[ELEMENTS], slow[ELEMENTS];
    static double exact[ELEMENTS];
    struct source s = {77};
    double squares = 0;
    int looked = 0;
    open_with(&t, "sgd/bf16-sr", generator);
    one_hyper(&t, "lr", ulp);
    one_hyper(&t, "momentum", 0);
    one_hyper(&t, "weight_decay", 0);
    one_start(&t);
    /* Starts in the middle of an octave of 128 ulp. A constant signal has one direction. */
    double begin = kind == CONSTANT && !period ? 1.3 : 1.5;
    one_fill(&t, WEIGHT, (float)begin);
    begin = one_mean(&t, WEIGHT);
    for (int i = 0; i < ELEMENTS; i++) exact[i] = 0, slow[i] = 0;
    int every = period ? period * (steps / 8 / period + 1) : steps / 8, n = 8 * every;
    for (int k = 0; k < n; k++) {
        const void *gradients[1] = {g};
        void *weights[1] = {t.weight};
        if (period) {
            gradients[0] = pool[k % period];
        } else {
            const float *fresh = pool[next64(&s) % PERIODS];
            int from = (int)(next64(&s) % ELEMENTS);
            double from_pool = kind == NOISE ? 1 : 0.1 * sqrt(1 - 0.81) / 0.3;
            for (int i = 0; i < ELEMENTS; i++) {
                if (kind == CONSTANT) g[i] = -0.01f;
                else if (kind == NOISE) g[i] = fresh[(i + from) % ELEMENTS];
                else g[i] = slow[i] = 0.9f * slow[i] + (float)from_pool * fresh[(i + from) % ELEMENTS];
                exact[i] -= (double)g[i];
            }
        }
        MUST(halfstep_step(t.o, weights, gradients));
        if ((k + 1) % every || k + 1 < n / 2) continue;
        one_read(&t, WEIGHT, t.room);
        double mean = 0, square = 0;
        for (int i = 0; i < ELEMENTS; i++) {
            double error = ((double)t.room[i] - begin) / ulp - exact[i];
            mean += error / ELEMENTS;
            square += error * error / ELEMENTS;
        }
        squares += square - mean * mean;
        looked++;
    }
    one_close(&t);
    return squares / looked;
}

static void test_wander(void)
{
    struct source s = {5};
    TEST("stored values wander less than with independent words: constant, AR(1), noise") {
        static const char *const names[] = {"a constant 0.01 ulp", "AR(0.9) of 0.1 ulp", "noise of 0.3 ulp"};
        for (int p = 0; p < PERIODS; p++)
            for (int i = 0; i < ELEMENTS; i++) pool[p][i] = (float)(0.3 * next_normal(&s));
        for (int kind = CONSTANT; kind <= NOISE; kind++) {
            double independent = sqrt(wander("mixer", kind, 0)), lattice = sqrt(wander("lattice", kind, 0));
            CHECK(lattice <= 1.05 * independent, "%s: %.2f ulp, independent %.2f", names[kind], lattice, independent);
            printf("     %s: %.2f ulp, independent %.2f\n", names[kind], lattice, independent);
        }
    }
    TEST("stored values wander less than with independent words: every period from 2 to 300") {
        double worst = 0, product = 0;
        int where = 0;
        for (int period = 2; period <= PERIODS; period++) {
            /* Gradients have mean 0, because otherwise it would be the constant signal too. The last gradient takes the
             * sum back. */
            for (int p = 0; p < period; p++)
                for (int i = 0; i < ELEMENTS; i++) pool[p][i] = (float)(next_unit(&s) - 0.5);
            for (int i = 0; i < ELEMENTS; i++) {
                double sum = 0;
                for (int p = 0; p < period; p++) sum += (double)pool[p][i];
                for (int p = 0; p < period; p++) pool[p][i] = (float)((double)pool[p][i] - sum / period);
            }
            double ratio = sqrt(wander("lattice", NOISE, period) / wander("mixer", NOISE, period));
            CHECK(ratio <= 1.05, "period %d: %.3f of independent words", period, ratio);
            if (ratio > worst) worst = ratio, where = period;
            product += log(ratio);
        }
        printf("     worst %.3f of independent words, at period %d; mean %.3f\n", worst, where,
               exp(product / (PERIODS - 1)));
    }
    TEST("sums of gradients wander less than with independent words") {
        static uint16_t sum[ELEMENTS];
        static float g[ELEMENTS];
        double square[2];
        for (int which = 0; which < 2; which++) {
            struct one t;
            open_with(&t, "sgd/f32", which ? "mixer" : "lattice");
            one_start(&t);
            for (int i = 0; i < ELEMENTS; i++) sum[i] = 0x3f80 + 16, g[i] = 0.1f;
            for (int k = 0; k < 500; k++) MUST(halfstep_accumulate(t.o, 0, sum, "bf16-sr", g, "f32", ulp));
            square[which] = 0;
            for (int i = 0; i < ELEMENTS; i++) {
                double error = (double)(sum[i] - 0x3f80 - 16) - 50;
                square[which] += error * error / ELEMENTS;
            }
            one_close(&t);
        }
        CHECK(square[0] < 0.5 * square[1], "%.2f ulp, independent %.2f", sqrt(square[0]), sqrt(square[1]));
        printf("     a constant 0.1 ulp, 500 times: %.2f ulp, independent %.2f\n", sqrt(square[0]), sqrt(square[1]));
    }
}

/* ---- Weights in packed blocks ------------------------------------------------------------------------------------ */

/* Each format with bounds on its wander: over its own under independent words, and over bf16-sr's. */
static const struct {
    const char *format;
    double of_independent, of_bf16;
} packed[] = {{"int8-ecc4", 0.9, 0.6}, {"int8-sr", 0.9, 2.6}};

/* Returns the rms of stored - exact over the rms of the weights, as of a layer. It makes 1000 steps of 0.0005 of that
 * rms, whose signs last for some steps. */
static double layer_wander(const char *format, const char *generator)
{
    struct one t;
    static float g[ELEMENTS];
    static double exact[ELEMENTS];
    struct source s = {78};
    open_with(&t, text_of("sgd/%s", format), generator);
    one_hyper(&t, "lr", 1e-5);
    one_hyper(&t, "momentum", 0);
    one_hyper(&t, "weight_decay", 0);
    one_start(&t);
    for (int i = 0; i < ELEMENTS; i++) t.room[i] = (float)(0.02 * next_normal(&s)), g[i] = 0;
    one_write(&t, WEIGHT, t.room);
    one_read(&t, WEIGHT, t.room);
    for (int i = 0; i < ELEMENTS; i++) exact[i] = (double)t.room[i];
    for (int k = 0; k < 1000; k++) {
        const void *gradients[1] = {g};
        void *weights[1] = {t.weight};
        const float *fresh = pool[next64(&s) % PERIODS];
        int from = (int)(next64(&s) % ELEMENTS);
        for (int i = 0; i < ELEMENTS; i++) {
            g[i] = 0.9f * g[i] + fresh[(i + from) % ELEMENTS];
            exact[i] -= 1e-5 * (double)g[i];
        }
        MUST(halfstep_step(t.o, weights, gradients));
    }
    one_read(&t, WEIGHT, t.room);
    double error = 0, size = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        error += ((double)t.room[i] - exact[i]) * ((double)t.room[i] - exact[i]);
        size += exact[i] * exact[i];
    }
    one_close(&t);
    return sqrt(error / size);
}

static void test_packed(void)
{
    TEST("packed weights wander less than with independent words, int8-ecc4 half as far as bf16-sr") {
        struct source s = {6};
        for (int p = 0; p < PERIODS; p++)
            for (int i = 0; i < ELEMENTS; i++) pool[p][i] = (float)(0.1 * next_normal(&s));
        double bf16 = layer_wander("bf16-sr", "lattice");
        for (size_t f = 0; f < COUNT(packed); f++) {
            const char *name = packed[f].format;
            double lattice = layer_wander(name, "lattice"), independent = layer_wander(name, "mixer");
            printf("     %-9s %.3f %%, independent %.3f %%, bf16-sr %.3f %%\n", name, 100 * lattice, 100 * independent,
                   100 * bf16);
            CHECK(lattice <= packed[f].of_independent * independent, "%s: %.3f of independent words", name,
                  lattice / independent);
            CHECK(lattice <= packed[f].of_bf16 * bf16, "%s: %.3f of bf16-sr", name, lattice / bf16);
        }
    }
}

/* ---- States that feed on themselves ------------------------------------------------------------------------------ */

/* A word is uniform, but not if a stored value remembers earlier words of its lattice. */
static void test_feedback(void)
{
    TEST("a BF16 second moment that decays to half keeps its mean, and scatters less than with independent words") {
        const double beta = (double)0.999f, start = 255 * 0x1p-7;
        const int decays = 692;
        double scatter[2];
        for (int which = 0; which < 2; which++) {
            struct one t;
            one_open(&t, "adamw/f32/bf16-sr", 2, 64, 1024, "f32");
            MUST(halfstep_set_choice(t.o, ALL_GROUPS, "generator", which ? "mixer" : "lattice"));
            one_hyper(&t, "beta2", 0.999);
            one_start(&t);
            one_fill(&t, STATE + 1, (float)start);
            one_steps(&t, decays);
            double v = start * pow(beta, decays), mean = 0, square = 0;
            one_read(&t, STATE + 1, t.room);
            for (int64_t i = 0; i < t.n; i++) {
                double ratio = (double)t.room[i] / v;
                mean += ratio / (double)t.n;
                square += ratio * ratio / (double)t.n;
            }
            scatter[which] = sqrt(square - mean * mean);
            CHECK(fabs(mean - 1) < 0.005, "%s: %.4f of the exact value", which ? "mixer" : "lattice", mean);
            printf("     %s: mean %.4f of the exact value, relative scatter %.4f\n", which ? "mixer" : "lattice", mean,
                   scatter[which]);
            one_close(&t);
        }
        CHECK(scatter[0] < 0.6 * scatter[1], "scatter %.4f, independent %.4f", scatter[0], scatter[1]);
    }
}

/* Decay through several changes of scale. A scale that changes rounds its 32 weights once more. */
static void test_weight_decay(void)
{
    /* Bounds on the bias of the mean, and on the scatter over that of independent words. */
    static const struct {
        const char *format;
        double bias, scatter;
    } rows[] = {{"bf16-sr", 0.01, 0.4}, {"int8-sr", 0.015, 0.6}, {"int8-ecc4", 0.001, 0.3}};
    const double kept = 1 - (double)1e-4f;
    const int decays = 10000;
    TEST("weights that decay to a third keep their mean, and scatter less than with independent words") {
        for (size_t f = 0; f < COUNT(rows); f++) {
            double scatter[2];
            for (int which = 0; which < 2; which++) {
                struct one t;
                static double start[ELEMENTS];
                struct source s = {79};
                open_with(&t, text_of("sgd/%s", rows[f].format), which ? "mixer" : "lattice");
                one_hyper(&t, "lr", 1e-4);
                one_hyper(&t, "momentum", 0);
                one_hyper(&t, "weight_decay", 1);
                one_start(&t);
                for (int i = 0; i < ELEMENTS; i++) t.room[i] = (float)next_normal(&s);
                one_write(&t, WEIGHT, t.room);
                one_read(&t, WEIGHT, t.room);
                for (int i = 0; i < ELEMENTS; i++) start[i] = (double)t.room[i];
                one_steps(&t, decays);
                one_read(&t, WEIGHT, t.room);
                double along = 0, size = 0, square = 0;
                for (int i = 0; i < ELEMENTS; i++) {
                    double expected = start[i] * pow(kept, decays), error = (double)t.room[i] - expected;
                    along += error * expected;
                    size += expected * expected;
                    square += error * error;
                }
                scatter[which] = sqrt(square / size);
                double noise = 4 * scatter[which] / sqrt(ELEMENTS);
                CHECK(fabs(along / size) < rows[f].bias + noise, "%s, %s: %.4f of the exact value", rows[f].format,
                      which ? "mixer" : "lattice", 1 + along / size);
                printf("     %-9s %-7s mean %.4f of the exact value, relative scatter %.4f\n", rows[f].format,
                       which ? "mixer" : "lattice", 1 + along / size, scatter[which]);
                one_close(&t);
            }
            CHECK(scatter[0] < rows[f].scatter * scatter[1], "%s: scatter %.4f, independent %.4f", rows[f].format,
                  scatter[0], scatter[1]);
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    int given = atoi(test_filter);
    if (given) test_filter = "";
    if (given >= 600) steps = given;
    test_uniform();
    test_elements();
    test_counts();
    if (test_length == TEST_ALL || given) test_wander();
    test_packed();
    test_feedback();
    test_weight_decay();
    return test_done();
}
