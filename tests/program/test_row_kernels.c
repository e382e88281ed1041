/* Tests what the trainer's models do between matrix products (trainer/products/rows.h). Every function on every
 * instruction set is compared with its definition in double, and with the scalar one's bits. */
#define HALFSTEP_ADVANCED
#include <math.h>
#include <stdint.h>

#include "halfstep.h"
#include "test.h"
#include "trainer/products/row_kernels.h"
#include "trainer/models/llama.h"

enum { MOST = 208, ROOM = MOST + 2 * ROW_LANES };

/* A function's inputs and outputs: four rows in fp32, three that are stored. Everything is compared, also what lies
 * behind a row. */
struct rows {
    float wide[4][ROOM];
    union {
        float f[ROOM];
        uint16_t h[ROOM];
    } stored[3];
    float result;
    struct row_softmax kept;
};

static float value(uint64_t seed, int row, int i, double spread)
{
    double u = (double)(hash_counters(seed, (uint64_t)row, (uint64_t)i, 5) >> 11) * 0x1p-53;
    return (float)((2 * u - 1) * spread);
}

static void fill(struct rows *r, uint64_t seed, int type, double spread)
{
    memset(r, 0, sizeof *r);
    const struct row_kernels *scalar = row_kernels_of("scalar");
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < ROOM; i++) r->wide[k][i] = value(seed, k, i, spread);
    for (int k = 0; k < 3; k++) {
        float row[ROOM];
        for (int i = 0; i < ROOM; i++) row[i] = value(seed, 4 + k, i, spread);
        scalar->store(r->stored[k].f, type, row, ROOM);
    }
    r->kept = (struct row_softmax){value(seed, 9, 0, 2), 0.37f};
}

/* One signature for all functions: n values, of which some functions take fewer as valid. */
#define ROW(name, parameters, arguments) CALL_##name,
#define ROW_FLOAT ROW
enum call {
#include "trainer/products/rows.def"
    CALLS
};
#undef ROW
#define ROW(name, parameters, arguments) #name,
static const char *const names[] = {
#include "trainer/products/rows.def"
};
#undef ROW
#undef ROW_FLOAT

static void call(const struct row_kernels *k, enum call which, struct rows *r, int type, int n)
{
    float *a = r->wide[0], *b = r->wide[1], *c = r->wide[2], *d = r->wide[3];
    void *s = r->stored[0].f, *t = r->stored[1].f, *u = r->stored[2].f;
    int half = n / 4 ? n / 4 : 1, heads = n / 4 ? 2 : 1, valid = 1 + n * 2 / 3;
    if (valid > n) valid = n;
    switch (which) {
    case CALL_load: k->load(a, s, type, n); break;
    case CALL_store: k->store(s, type, a, n); break;
    case CALL_add: k->add(a, b, c, n); break;
    case CALL_add_to: k->add_to(a, b, n); break;
    case CALL_scale: k->scale(a, 0.3f, n); break;
    case CALL_dot: r->result = k->dot(s, type, a, n); break;
    case CALL_norm: r->result = k->norm(s, type, a, b, 1e-5f, n); break;
    case CALL_norm_again: k->norm_again(s, type, a, b, 0.7f, n); break;
    case CALL_norm_backward: k->norm_backward(a, b, c, d, r->stored[0].f, 0.7f, n); break;
    case CALL_rotate: k->rotate(s, type, a, b, c, -1.0f, heads, half); break;
    case CALL_swiglu: k->swiglu(s, t, u, type, n); break;
    case CALL_swiglu_backward: k->swiglu_backward(s, t, u, a, type, n); break;
    case CALL_softmax: k->softmax(s, type, a, &r->kept, 0.3f, valid, n); break;
    case CALL_softmax_backward: k->softmax_backward(s, t, type, a, b, &r->kept, 0.3f, valid, n); break;
    case CALL_cross_entropy: r->result = k->cross_entropy(a, n / 2, 0.25f, n); break;
    case CALLS: break;
    }
}

static const char *const types[] = {"f32", "bf16", "f16"};

static int takes(enum call which, int type)
{
    /* norm_backward is given its gain in a stored row, as fp32. */
    return type == LM_F32 || which != CALL_norm_backward;
}

/* Uses only the sizes that users of a row may have, and values that never end in NaN. */
static void test_same_bits(void)
{
    static struct rows expected, got;
    const struct row_kernels *scalar = row_kernels_of("scalar");
    int others = 0;
    for (int isa = 0; isa < halfstep_isa_count(); isa++) {
        const struct row_kernels *kernels = row_kernels_of(halfstep_isa_name(isa));
        if (!kernels || kernels == scalar || !halfstep_isa_available(isa)) continue;
        others++;
        for (enum call which = 0; which < CALLS; which++)
            for (int type = LM_F32; type <= LM_F16; type++) {
                if (!takes(which, type)) continue;
                for (int n = 1; n <= MOST; n += n < 70 ? 1 : 23) {
                    double spread = n % 3 == 0 ? 90.0 : n % 3 == 1 ? 2.0 : 1e-4;
                    fill(&expected, (uint64_t)n, type, spread);
                    got = expected;
                    call(scalar, which, &expected, type, n);
                    call(kernels, which, &got, type, n);
                    CHECK(!memcmp(&expected, &got, sizeof got),
                          "%s of %d values in %s on %s has other bits than on scalar", names[which], n, types[type],
                          halfstep_isa_name(isa));
                }
            }
    }
    printf("     %d instruction sets beside scalar\n", others);
}

static double stored(const struct rows *r, int row, int type, int i)
{
    float x;
    row_load(&x, type == LM_F32 ? (const void *)&r->stored[row].f[i] : (const void *)&r->stored[row].h[i], type, 1);
    return (double)x;
}

static int near(double x, double expected, int type, double scale)
{
    double unit = type == LM_F32 ? 0x1p-19 : type == LM_BF16 ? 0x1p-8 : 0x1p-10;
    return fabs(x - expected) <= unit * (fabs(expected) + scale);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void test_definitions(void)
{
    static struct rows before, r;
    for (int isa = 0; isa < halfstep_isa_count(); isa++) {
        const struct row_kernels *k = row_kernels_of(halfstep_isa_name(isa));
        if (!k || !halfstep_isa_available(isa)) continue;
        for (int type = LM_F32; type <= LM_F16; type++)
            for (int n = 1; n <= 100; n += 11) {
                const char *on = halfstep_isa_name(isa);
                fill(&before, 1000 + (uint64_t)n, type, 2.0);
                int valid = n - n / 3;

                r = before;
                double square = 0;
                for (int i = 0; i < n; i++) square += (double)before.wide[0][i] * (double)before.wide[0][i];
                double rate = 1 / sqrt(square / n + 1e-5);
                float got_rate = k->norm(r.stored[0].f, type, r.wide[0], r.wide[1], 1e-5f, n);
                CHECK(near((double)got_rate, rate, LM_F32, 0), "norm of %d on %s: %g, not %g", n, on, got_rate, rate);
                for (int i = 0; i < n; i++) {
                    double x = (double)before.wide[0][i] * rate * (double)before.wide[1][i];
                    CHECK(near(stored(&r, 0, type, i), x, type, 1e-6),
                          "norm of %d in %s on %s: element %d is %g, not %g", n, types[type], on, i,
                          stored(&r, 0, type, i), x);
                }

                /* x in row 3, d(out) in row 2, the gain in row 0: added to row 1 and, in fp32, to a stored row. */
                r = before;
                double along = 0;
                for (int i = 0; i < n; i++)
                    along += (double)before.wide[2][i] * (double)before.wide[0][i] * (double)before.wide[3][i];
                if (type == LM_F32)
                    k->norm_backward(r.wide[1], r.stored[0].f, r.wide[2], r.wide[3], r.wide[0], got_rate, n);
                for (int i = 0; i < n && type == LM_F32; i++) {
                    double d = (double)before.wide[2][i], x = (double)before.wide[3][i];
                    double dx = d * (double)before.wide[0][i] * rate - x * along * rate * rate * rate / n;
                    double dgain = d * x * rate;
                    CHECK(near((double)r.wide[1][i], (double)before.wide[1][i] + dx, LM_F32, 40) &&
                              near((double)r.stored[0].f[i], (double)before.stored[0].f[i] + dgain, LM_F32, 40),
                          "norm backward of %d on %s: element %d", n, on, i);
                }

                r = before;
                k->swiglu(r.stored[0].f, r.stored[1].f, r.stored[2].f, type, n);
                for (int i = 0; i < n; i++) {
                    double g = stored(&before, 1, type, i), x = g * sigmoid(g) * stored(&before, 2, type, i);
                    CHECK(near(stored(&r, 0, type, i), x, type, 1e-6),
                          "swiglu of %d in %s on %s: element %d is %g, not %g", n, types[type], on, i,
                          stored(&r, 0, type, i), x);
                }

                r = before;
                k->swiglu_backward(r.stored[0].f, r.stored[1].f, r.stored[2].f, r.wide[0], type, n);
                for (int i = 0; i < n; i++) {
                    double g = stored(&before, 1, type, i), u = stored(&before, 2, type, i),
                           d = (double)before.wide[0][i];
                    double s = sigmoid(g), dgate = d * u * (s + g * s * (1 - s));
                    CHECK(near(stored(&r, 0, type, i), g * s * u, type, 1e-6) &&
                              near(stored(&r, 2, type, i), d * g * s, type, 1e-6) &&
                              near(stored(&r, 1, type, i), dgate, type, fabs(d * u)),
                          "swiglu backward of %d in %s on %s: element %d", n, types[type], on, i);
                }

                r = before;
                double sum = 0, mean = 0;
                for (int i = 0; i < valid; i++) sum += exp(0.3 * (double)before.wide[0][i]);
                for (int i = 0; i < valid; i++)
                    mean += exp(0.3 * (double)before.wide[0][i]) / sum * (double)before.wide[1][i];
                k->softmax(r.stored[0].f, type, r.wide[0], &r.kept, 0.3f, valid, n);
                memcpy(r.wide[0], before.wide[0], sizeof r.wide[0]);
                k->softmax_backward(r.stored[1].f, r.stored[2].f, type, r.wide[0], r.wide[1], &r.kept, 0.3f, valid, n);
                for (int i = 0; i < n; i++) {
                    double p = i < valid ? exp(0.3 * (double)before.wide[0][i]) / sum : 0;
                    double ds = p * ((double)before.wide[1][i] - mean) * 0.3;
                    CHECK(near(stored(&r, 0, type, i), p, type, 0) &&
                              stored(&r, 1, type, i) == stored(&r, 0, type, i) &&
                              near(stored(&r, 2, type, i), ds, type, 1e-6),
                          "softmax of %d of %d in %s on %s: element %d is %g and %g, not %g and %g", valid, n,
                          types[type], on, i, stored(&r, 0, type, i), stored(&r, 2, type, i), p, ds);
                }

                r = before;
                int half = n, target = n / 2;
                k->rotate(r.wide[3], LM_F32, r.wide[0], r.wide[1], r.wide[2], 1.0f, 1, half);
                for (int i = 0; i < half; i++) {
                    double x = (double)before.wide[0][i], y = (double)before.wide[0][half + i];
                    double c = (double)before.wide[1][i], s = (double)before.wide[2][i];
                    CHECK(near((double)r.wide[3][i], x * c - y * s, LM_F32, 4) &&
                              near((double)r.wide[3][half + i], y * c + x * s, LM_F32, 4),
                          "rotation of %d on %s: pair %d", n, on, i);
                }

                r = before;
                sum = 0;
                for (int i = 0; i < n; i++) sum += exp((double)before.wide[0][i]);
                double loss = log(sum) - (double)before.wide[0][target];
                float got = k->cross_entropy(r.wide[0], target, 0.5f, n);
                CHECK(near((double)got, loss, LM_F32, 1), "cross entropy of %d on %s: %g, not %g", n, on, got, loss);
                for (int i = 0; i < n; i++) {
                    double x = 0.5 * (exp((double)before.wide[0][i]) / sum - (i == target));
                    CHECK(near((double)r.wide[0][i], x, LM_F32, 1), "its gradient, element %d", i);
                }
            }
    }
}

/* Compares stored values with those of one at a time, for all codes and for all halves between them. */
static void test_stored(void)
{
    for (int isa = 0; isa < halfstep_isa_count(); isa++) {
        const struct row_kernels *k = row_kernels_of(halfstep_isa_name(isa)), *scalar = row_kernels_of("scalar");
        if (!k || !halfstep_isa_available(isa)) continue;
        for (int type = LM_BF16; type <= LM_F16; type++)
            for (uint32_t first = 0; first < 0x10000; first += 64) {
                uint16_t codes[64], back[64], expected[64];
                float x[64], y[64];
                for (uint32_t i = 0; i < 64; i++) codes[i] = (uint16_t)(first + i);
                k->load(x, codes, type, 64);
                scalar->load(y, codes, type, 64);
                CHECK(!memcmp(x, y, sizeof x), "%s codes from %04x are read otherwise on %s", types[type], first,
                      halfstep_isa_name(isa));
                for (int i = 0; i < 64; i++) {
                    uint32_t bits = (uint32_t)hash_counters(first, (uint64_t)i, 1, 2);
                    if (i % 2) memcpy(&x[i], &bits, sizeof bits);
                }
                k->store(back, type, x, 64);
                for (int i = 0; i < 64; i++) scalar->store(&expected[i], type, &x[i], 1);
                CHECK(!memcmp(back, expected, sizeof back), "%s from %04x is stored otherwise on %s", types[type],
                      first, halfstep_isa_name(isa));
            }
    }
}

/* Loads packed rows of every length, and compares products with those of the same numbers in fp32. */
static void test_packed(void)
{
    for (int isa = 0; isa < halfstep_isa_count(); isa++) {
        const struct row_kernels *k = row_kernels_of(halfstep_isa_name(isa));
        if (!k || !halfstep_isa_available(isa)) continue;
        for (int n = 1; n <= MOST; n++) {
            unsigned char row[(MOST / ROW_BLOCK + 1) * ROW_BLOCK_BYTES] = {0};
            float expected[MOST], x[MOST], got[MOST + 1];
            for (int i = 0; i < n; i++) {
                unsigned char *block = row + i / ROW_BLOCK * ROW_BLOCK_BYTES;
                const uint16_t scale = (uint16_t)(0x3b81 + 0x95 * (i / ROW_BLOCK));
                const int code = (i * 89 + n) % 255 - 127;
                uint32_t bits = (uint32_t)scale << 16;
                memcpy(block, &scale, sizeof scale);
                block[2 + i % ROW_BLOCK] = (unsigned char)code;
                memcpy(&expected[i], &bits, sizeof bits);
                expected[i] *= (float)code;
                x[i] = value((uint64_t)n, 0, i, 2.0);
            }
            got[n] = 7.0f;
            k->load(got, row, LM_PACKED, n);
            CHECK(!memcmp(got, expected, (size_t)n * sizeof *got) && got[n] == 7.0f, "%d packed values on %s", n,
                  halfstep_isa_name(isa));
            CHECK(k->dot(row, LM_PACKED, x, n) == k->dot(expected, LM_F32, x, n), "product of %d packed values on %s",
                  n, halfstep_isa_name(isa));
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    TEST("definitions") test_definitions();
    TEST("the same bits on every instruction set") test_same_bits();
    TEST("stored values") test_stored();
    TEST("packed weights") test_packed();
    return test_done();
}
