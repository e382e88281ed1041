/* Tests the block formats that share scales, beyond int8's tests. Every code and rounding is compared with references
 * in double that know no bit patterns. Stochastic rounding is judged by enumerating the random bits. Worst cases are
 * those that the headers state. torchao's maps and codes are rebuilt from their definition. The bytes must be the same
 * on every instruction set and through the public interface. Only --all enumerates everything; the other runs, of which
 * --short is the shortest, sample by fixed strides. Over 500 lines because the formats share codecs, inputs and
 * layout. */

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "ref/fixture.h"
#include "ref/nan_neighbours.h"
#include "tables/tables.h"
#include "vec/scalar.h"

#include "formats/dyn4.h"
#include "formats/dyn8.h"
#include "formats/fp8.h"
#include "formats/fp8_e5m2.h"
#include "formats/fp8_lamb16.h"
#include "formats/int4.h"
#include "formats/int6.h"

/* ---- Codecs: one element with a given scale, by the functions of the headers on one lane ------------------------- */

#define NEAREST 0x8000u

static int overflows; /* codes of n < 8 bits that are not -2^(n-1) .. 2^n - 1 */

/* The code as it is stored. A code of 4 or 6 bits may have had a sign. */
#define CODEC(fn, bits)                                                                \
    static uint32_t fn##_code_of(float x, float scale, uint32_t random, int nonneg)    \
    {                                                                                  \
        uint32_t s = to_bits(scale), code;                                             \
        if (nonneg) code = fn##_code(fn##_stash(x, 1), fn##_inverse(s, 1), random, 1); \
        else code = fn##_code(fn##_stash(x, 0), fn##_inverse(s, 0), random, 0);        \
        if (bits < 8 && code + (1u << (bits - 1)) >= 3u << (bits - 1)) overflows++;    \
        return bits < 8 ? code & ((1u << bits) - 1) : code;                            \
    }                                                                                  \
    static float fn##_value_of(uint32_t code, float scale, int nonneg)                 \
    {                                                                                  \
        return nonneg ? fn##_value(code, scale, 1) : fn##_value(code, scale, 0);       \
    }
#define BLOCK_SCALE(fn)                                                                                           \
    static float fn##_scale_of(float largest, int nonneg)                                                         \
    {                                                                                                             \
        return from_bits(nonneg ? fn##_scale(fn##_stash(largest, 1), 1) : fn##_scale(fn##_stash(largest, 0), 0)); \
    }
/* clang-format off */
CODEC(int4, 4) CODEC(int6, 6) CODEC(fp8, 8) CODEC(fp8_e5m2, 8) CODEC(dyn8, 8) CODEC(dyn4, 4) CODEC(fp8_lamb16, 8)
BLOCK_SCALE(int4) BLOCK_SCALE(int6) BLOCK_SCALE(fp8) BLOCK_SCALE(fp8_e5m2) BLOCK_SCALE(dyn8) BLOCK_SCALE(dyn4)
    /* clang-format on */

    enum {
        INT4,
        INT6,
        FP8,
        E5M2,
        DYN8,
        DYN4,
        LAMB16,
        CODECS
    };
static const struct codec {
    const char *name;
    int format, levels, low_first; /* low_first: even elements have the low bits */
    uint32_t (*code)(float x, float scale, uint32_t random, int nonneg);
    float (*value)(uint32_t code, float scale, int nonneg);
    float (*scale)(float largest, int nonneg);
} codecs[CODECS] = {
    {"int4", HSTEP_FORMAT_int4, 16, 1, int4_code_of, int4_value_of, int4_scale_of},
    {"int6", HSTEP_FORMAT_int6, 64, 1, int6_code_of, int6_value_of, int6_scale_of},
    {"fp8", HSTEP_FORMAT_fp8, 256, 0, fp8_code_of, fp8_value_of, fp8_scale_of},
    {"fp8-e5m2", HSTEP_FORMAT_fp8_e5m2, 256, 0, fp8_e5m2_code_of, fp8_e5m2_value_of, fp8_e5m2_scale_of},
    {"dyn8", HSTEP_FORMAT_dyn8, 256, 0, dyn8_code_of, dyn8_value_of, dyn8_scale_of},
    {"dyn4", HSTEP_FORMAT_dyn4, 16, 0, dyn4_code_of, dyn4_value_of, dyn4_scale_of},
    {"fp8-lamb16", HSTEP_FORMAT_fp8_lamb16, 256, 0, fp8_lamb16_code_of, fp8_lamb16_value_of, NULL},
};

static struct source source = {20};
static uint32_t random32(void) { return (uint32_t)(next64(&source) >> 32); }
static float random_mantissa(void) { return 1.0f + (float)(random32() >> 9) * 0x1p-23f; }

/* Largest magnitudes of blocks: ordinary ones, and both ends of fp32. */
static float some_largest(int i)
{
    static const int exponents[] = {-4, 0, 3, -20, -60, -100, -125, -126, 30, 61, 100};
    int choice = i % 12;
    return choice == 11 ? 0x1p-126f : ldexpf(random_mantissa(), exponents[choice]);
}

/* Returns a value of any size up to `largest`, which itself occurs, as do zeros. It has either sign unless nonneg. */
static float some_value(float largest, int nonneg)
{
    uint32_t r = random32(), kind = r % 16;
    float t = (float)(random32() >> 8) * 0x1p-24f;
    if (kind < 5) t = ldexpf(random_mantissa(), -1 - (int)(random32() % 12));
    if (kind == 5) t = ldexpf(random_mantissa(), -1 - (int)(random32() % 60));
    if (kind == 6) t = ldexpf(random_mantissa(), -1 - (int)(random32() % 160));
    if (kind == 7) t = (float)(random32() % 129) / 128.0f;
    if (r >> 8 & 127) t *= 1.0f;
    else t = r >> 15 & 1 ? 1.0f : 0.0f;
    return !nonneg && r >> 31 ? -(largest * t) : largest * t;
}

static float some_scale(const struct codec *c, int nonneg, int i)
{
    return c->scale ? c->scale(some_largest(i), nonneg) : ldexpf(random_mantissa(), -(i % 24));
}

/* ---- References -------------------------------------------------------------------------------------------------- */

/* Returns the number that an 8-bit float stands for, by its definition. */
static double float8(uint32_t magnitude, int e5m2)
{
    int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    int exponent = (int)(magnitude >> mantissa), fraction = (int)(magnitude & ((1u << mantissa) - 1));
    return exponent ? ldexp(1 + ldexp(fraction, -mantissa), exponent - bias) : ldexp(fraction, 1 - bias - mantissa);
}
static uint32_t float8_top(int e5m2) { return e5m2 ? 0x7b : 0x7e; }

/* Rounds to nearest, ties to even, and saturates. Tries every number. */
static uint32_t float8_nearest_even(double x, int e5m2)
{
    uint32_t best = 0;
    for (uint32_t c = 1; c <= float8_top(e5m2); c++) {
        double new = fabs(float8(c, e5m2) - x), old = fabs(float8(best, e5m2) - x);
        if (new < old || (new == old &&c % 2 == 0)) best = c;
    }
    return best;
}

/* Returns entry i of torch.linspace(0.1, 1, n): from the nearer end, each with one rounding (double holds the
 * product). */
static float part_edge(int i, int n)
{
    float step = (1.0f - 0.1f) / (float)(n - 1);
    if (i < n / 2) return (float)((double)0.1f + (double)step * i);
    return (float)(1.0 - (double)step * (n - 1 - i));
}

static int ascending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Builds the dynamic map (Dettmers et al. 2022, without zero padding) as torchao does. */
static void dynamic_map(int nonneg, int decades, int bits, float *map)
{
    int n = 0;
    for (int j = 0; j < decades; j++) {
        int edges = (1 << (j + bits - 1 - decades + nonneg)) + 1;
        float power = (float)pow(10, j - decades + 1);
        for (int k = 0; k + 1 < edges; k++) {
            float centre = (part_edge(k, edges) + part_edge(k + 1, edges)) / 2.0f;
            map[n++] = power * centre;
            if (!nonneg) map[n++] = -(power * centre);
        }
    }
    map[n++] = 0.0f;
    map[n++] = 1.0f;
    if (n != 1 << bits) exit(1);
    qsort(map, (size_t)n, sizeof *map, ascending);
}

/* [8 bits or 4][nonneg] */
static float maps[2][2][256];
static void make_maps(void)
{
    for (int nonneg = 0; nonneg < 2; nonneg++) dynamic_map(nonneg, 7, 8, maps[0][nonneg]);
    dynamic_map(0, 3, 4, maps[1][0]);
    for (int c = 0; c < 16; c++) maps[1][1][c] = (float)(c + 1) / 16.0f;
}

/* Finds a code as torchao does. n = x / S; it takes the largest entry not above n, or from halfway on the next one. */
static uint32_t map_code(const float *map, int levels, float n)
{
    int c = 0;
    for (int step = levels / 2; step; step /= 2)
        if (n >= map[c + step]) c += step;
    int up = c + 1 < levels ? c + 1 : c;
    return (uint32_t)(n - map[c] >= (map[up] - map[c]) * 0.5f ? up : c);
}

/* Maps x to octaves above 1, linear within each, so that floats with m mantissa bits are multiples of 2^-m. */
static double octaves(double x)
{
    int exponent = ilogb(x);
    return exponent + (ldexp(x, -exponent) - 1);
}
static double from_octaves(double y) { return ldexp(1 + (y - floor(y)), (int)floor(y)); }

/* int4 and int6. Second moments: the code of the edge, and codes in an octave below it and above. */
static const struct narrow {
    int edge, below, above;
} narrow[] = {[INT4] = {6, 2, 4}, [INT6] = {32, 8, 16}};
/* Returns the root that the smallest code stands for. */
static double narrow_least(int codec, double scale)
{
    return from_octaves(octaves(scale) - (double)narrow[codec].edge / narrow[codec].below);
}

/* Returns the place of x among the codes of int4 or int6, in double. On this scale codes have equal steps. */
static double narrow_place(int codec, double x, double scale, int nonneg)
{
    const struct narrow *n = &narrow[codec];
    double a = fabs(x) / scale;
    if (!nonneg) return codec == INT6 ? 2 * x / scale : copysign(fmin(a * (a * (3.7 * a - 10.05) + 13.4), 7), x);
    double above = x > 0 ? octaves(sqrt(x)) - octaves(scale) : -1000;
    return fmax(n->edge + above * (above < 0 ? n->below : n->above), 0);
}
static double narrow_code_place(int codec, uint32_t code, int nonneg)
{
    int levels = codecs[codec].levels;
    return nonneg || (int)code < levels / 2 ? code : (double)code - levels;
}

/* ---- Codes and values -------------------------------------------------------------------------------------------- */

/* Returns 1 for codes that no value is stored as: beyond a clip, not finite, or without a number. */
static int unused_code(int codec, int nonneg, uint32_t code)
{
    uint32_t magnitude = nonneg ? code : code & 0x7f;
    switch (codec) {
    case INT4:
    case INT6: return !nonneg && (int)code == codecs[codec].levels / 2;
    case FP8: return magnitude > float8_top(0) || code == 0x80;
    case E5M2: return magnitude > float8_top(1) || code == 0x80;
    case LAMB16: return nonneg ? magnitude > float8_top(1) : float8(magnitude, 0) > 15 || code == 0x80;
    default: return 0;
    }
}

/* Returns the number of a code by the format's definition, as fp32. */
static float defined_value(int codec, int nonneg, uint32_t code, float scale)
{
    double s = (double)scale, n, root;
    switch (codec) {
    case INT4:
    case INT6:
        n = narrow_code_place(codec, code, nonneg);
        if (!nonneg) return codec == INT6 ? (float)(n / 2 * s) : (float)((double)(float)(n / (14 - fabs(n))) * s);
        n -= narrow[codec].edge;
        root = from_octaves(octaves(s) + n / (n < 0 ? narrow[codec].below : narrow[codec].above));
        return (float)(root * root);
    case DYN8: return maps[0][nonneg][code] * scale;
    case DYN4: return maps[1][nonneg][code] * scale;
    }
    if (nonneg) return (float)(float8(code, codec != FP8) * s);
    double magnitude = float8(code & 0x7f, codec == E5M2);
    return (float)((code & 0x80 ? -magnitude : magnitude) * s);
}

static void test_values(void)
{
    for (int f = 0; f < CODECS; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (int i = 0; i < 240; i++) {
                const struct codec *c = &codecs[f];
                float scale = some_scale(c, nonneg, i);
                for (uint32_t code = 0; code < (uint32_t)c->levels; code++) {
                    if (f != LAMB16 && unused_code(f, nonneg, code) && code) continue;
                    float x = c->value(code, scale, nonneg), expected = defined_value(f, nonneg, code, scale);
                    CHECK(x == expected, "%s, nonneg %d: code %u with scale %a decodes to %a, not %a", c->name, nonneg,
                          code, scale, x, expected);
                }
            }
}

static void test_round_trips(void)
{
    for (int f = 0; f < CODECS; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++) {
            const struct codec *c = &codecs[f];
            int used = 0;
            for (int i = 0; i < 240; i++) {
                float scale = some_scale(c, nonneg, i);
                for (uint32_t code = 0; code < (uint32_t)c->levels; code++) {
                    if (unused_code(f, nonneg, code)) continue;
                    float x = c->value(code, scale, nonneg);
                    /* LAMB16 cuts v at 10. A decoded fp32 subnormal has lost bits. */
                    if ((f == LAMB16 && nonneg && x > 10.0f) || (fabsf(x) < 0x1p-126f && x != 0.0f)) continue;
                    uint32_t again = c->code(x, scale, NEAREST, nonneg);
                    used++;
                    CHECK(again == code, "%s, nonneg %d, scale %a: code %u decodes to %a, which is code %u", c->name,
                          nonneg, scale, code, x, again);
                }
                CHECK(to_bits(c->value(0, 0.0f, nonneg)) == 0, "%s, nonneg %d: zero bytes decode to %a", c->name,
                      nonneg, c->value(0, 0.0f, nonneg));
            }
            CHECK(used >= 240 * c->levels / 3, "%s, nonneg %d: only %d codes were tried", c->name, nonneg, used);
        }
}

/* A block's own scale. Its largest value gets a code. In int4 and int6, writing back what was read changes
 * nothing. */
static void test_scales(void)
{
    for (int f = 0; f < LAMB16; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (int i = 0; i < 20000; i++) {
                const struct codec *c = &codecs[f];
                float largest = i % 5 ? some_largest(i / 5) : from_bits(random32() % 0x7e000000u + 0x00800000u);
                float scale = c->scale(largest, nonneg);
                for (uint32_t r = 0; r < 65536; r += 13107) {
                    uint32_t code = c->code(largest, scale, r, nonneg);
                    CHECK(code < (uint32_t)c->levels && !unused_code(f, nonneg, code),
                          "%s, nonneg %d: largest %a, random %u: "
                          "code %u",
                          c->name, nonneg, largest, r, code);
                    /* torchao's scales begin at 1e-12. */
                    float value = c->value(code, scale, nonneg);
                    CHECK(value > 0.5f * largest || (f >= DYN8 && largest < 1e-12f), "%s, nonneg %d: %a became %a",
                          c->name, nonneg, largest, value);
                }
                if (f == INT4 || f == INT6) {
                    float top = c->value((uint32_t)c->levels / (nonneg ? 1 : 2) - 1, scale, nonneg);
                    float again = f == INT4 && !nonneg ? scale : c->scale(top, nonneg);
                    CHECK(again == scale, "%s: scale %a, rewritten %a", c->name, scale, again);
                    CHECK(!(to_bits(scale) & 0xffff), "%s: scale %a is no BF16 number", c->name, scale);
                }
                float under = from_bits(random32() % 0x00800000u);
                if (f < DYN8)
                    for (int sign = 0; sign < 2 - nonneg; sign++) {
                        uint32_t code = c->code(sign ? -under : under, 0, random32() >> 16, nonneg);
                        CHECK(c->scale(under, nonneg) == 0 && to_bits(c->value(code, 0, nonneg)) == 0,
                              "%s, nonneg %d: a block of %a is not zero", c->name, nonneg, under);
                        CHECK(code == 0, "%s, nonneg %d: code %u in a block of %a", c->name, nonneg, code, under);
                    }
                else
                    CHECK(c->scale(under, nonneg) == 1e-12f, "%s: scale %a of a block of zeros", c->name,
                          c->scale(under, nonneg));
            }
    CHECK(!overflows, "%d codes did not fit into their bits", overflows);
    CHECK(fp8_lamb16_code_of(-0x1p-128f, 1.0f, 0, 0) == 0x80 && to_bits(fp8_lamb16_value_of(0x80, 1.0f, 0)) == 0,
          "fp8-lamb16: the published -0 is read as +0");
    CHECK(dyn4_value_of(dyn4_code_of(0, 1e-12f, 0, 1), 1e-12f, 1) == 0.0625f * 1e-12f, "dyn4 has no zero");
    CHECK(dyn8_value_of(dyn8_code_of(0, 1e-12f, 0, 1), 1e-12f, 1) == 0.0f, "dyn8 has a zero");
}

/* fp8: the product with the rounded reciprocal reaches the top code and never exceeds it, for every significand. */
static void test_fp8_top(void)
{
    for (int e5m2 = 0; e5m2 < 2; e5m2++) {
        const struct codec *c = &codecs[e5m2 ? E5M2 : FP8];
        float top = e5m2 ? 57344.0f : 448.0f;
        for (uint32_t u = 0; u < 1u << 23; u += BY_LENGTH(61, 7, 1)) {
            float largest = from_bits(0x3f800000 + u), scale = c->scale(largest, 0), t = largest * (1.0f / scale);
            CHECK(t <= top && t > top * (1 - 0x1p-21f), "%s: %a scales to %a", c->name, largest, t);
        }
    }
}

/* ---- Rounding ---------------------------------------------------------------------------------------------------- */

static void test_nearest(void)
{
    int tries = BY_LENGTH(20000, 50000, 200000);
    for (int f = INT4; f <= INT6; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (int i = 0; i < tries; i++) {
                float largest = some_largest(i % 6), x = some_value(largest, nonneg),
                      scale = codecs[f].scale(largest, nonneg);
                uint32_t code = codecs[f].code(x, scale, NEAREST, nonneg);
                double place = narrow_place(f, (double)x, (double)scale, nonneg);
                CHECK(fabs(place - narrow_code_place(f, code, nonneg)) < 0.5 + 0x1p-16,
                      "%s, nonneg %d: %a with scale %a is at %g, its code at %g", codecs[f].name, nonneg, x, scale,
                      place, narrow_code_place(f, code, nonneg));
            }
    /* int4's cubic against the values themselves: it changes codes within 0.0022 of the middle between two. */
    for (int k = 0; k < 7; k++) {
        double middle = (k / (14.0 - k) + (k + 1) / (13.0 - k)) / 2;
        CHECK(narrow_place(INT4, middle - 0.0022, 1, 0) < k + 0.5 &&
                  narrow_place(INT4, middle + 0.0022, 1, 0) > k + 0.5,
              "int4: %g is at %g", middle, narrow_place(INT4, middle, 1, 0));
    }
    for (int e5m2 = 0; e5m2 < 2; e5m2++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (int i = 0; i < tries / 10; i++) {
                const struct codec *c = &codecs[e5m2 ? E5M2 : FP8];
                float largest = some_largest(i % 6), x = some_value(largest, nonneg), scale = c->scale(largest, nonneg);
                uint32_t code = c->code(x, scale, NEAREST, nonneg), magnitude = code & 0x7f;
                double t = fabs((double)x) / (double)scale, error = fabs(float8(magnitude, e5m2) - t);
                double best = fabs(float8(float8_nearest_even(t, e5m2), e5m2) - t), step = float8(1, e5m2);
                if (nonneg && x > 0 && t < step) best = step - t;
                /* To within 2^-16 of a step, which is less than a quarter of t or the smallest. */
                CHECK(error <= best + fmax(t / 4, step) * 0x1p-16,
                      "%s, nonneg %d: %a with scale %a, t %g, became code %u", c->name, nonneg, x, scale, t, code);
                CHECK((code >> 7) == (uint32_t)(!nonneg && x < 0 && magnitude), "%s: the sign of %a is in code %u",
                      c->name, x, code);
            }
}

/* LAMB16 and torchao: the code itself is prescribed. */
static void check_lamb16(float x, float scale, int nonneg)
{
    float t = nonneg ? fminf(x, 10.0f) / scale : fminf(fabsf(x) / scale, 15.0f);
    uint32_t expected = float8_nearest_even((double)t, nonneg) | (!nonneg && signbit(x) ? 0x80 : 0);
    uint32_t code = fp8_lamb16_code_of(x, scale, random32() & 0xffff, nonneg);
    CHECK(code == expected, "fp8-lamb16, nonneg %d: %a with scale %a became code %02x, should be %02x", nonneg, x,
          scale, code, expected);
}

static void test_lamb16(void)
{
    for (int nonneg = 0; nonneg < 2; nonneg++) {
        /* Around every border between neighbours, at scale 1 and others. */
        for (uint32_t c = 0; c < float8_top(nonneg); c++)
            for (int s = 0; s < 8; s++) {
                float scale = s ? ldexpf(random_mantissa(), -s) : 1.0f;
                float border = (float)((float8(c, nonneg) + float8(c + 1, nonneg)) / 2) * scale;
                for (int beside = -2; beside <= 2; beside++) {
                    float x = from_bits(to_bits(border) + (uint32_t)beside);
                    check_lamb16(x, scale, nonneg);
                    if (!nonneg) check_lamb16(-x, scale, 0);
                }
            }
        for (int i = 0; i < 20000; i++)
            check_lamb16(some_value(20.0f, nonneg), some_scale(&codecs[LAMB16], nonneg, i), nonneg);
    }
    CHECK(fp8_lamb16_code_of(10.0f, 1e-6f, 0, 1) == 0x7b, "v / s of 1e7 does not saturate");
    CHECK(fp8_lamb16_code_of(7.0f * 0x1p-18f, 1.0f, 0, 1) == 2 && fp8_lamb16_code_of(0x1p-18f, 1.0f, 0, 1) == 0,
          "v below the smallest e5m2 number is published as zero");
    CHECK(fp8_lamb16_norm(-2.0f, 0) == 2.0f && fp8_lamb16_norm(5.0f, 1) == sqrtf(10.0f),
          "the norm's values are not cut");
    CHECK(fp8_lamb16_tensor_scale(3.0, 6.0) == (float)0.500001 && fp8_lamb16_tensor_scale(0.0, 7.0) == 1e-6f,
          "the scale");
}

static void test_dynamic_maps(void)
{
    /* torchao's 4-bit map, and the ends of its 8-bit ones. */
    static const uint32_t four[16] = {0xbf633333, 0xbf29999a, 0xbee00000, 0xbe599999, 0xbd9eb852, 0xbd051eb9,
                                      0xbbb43958, 0,          0x3bb43958, 0x3d051eb9, 0x3d9eb852, 0x3e599999,
                                      0x3ee00000, 0x3f29999a, 0x3f633333, 0x3f800000};
    static const struct {
        int nonneg, code;
        uint32_t bits;
    } eight[] = {
        {0, 0, 0xbf7e3333},   {0, 1, 0xbf7a999a},   {0, 3, 0xbf736666},   {0, 127, 0},
        {0, 252, 0x3f770000}, {0, 254, 0x3f7e3333}, {0, 255, 0x3f800000}, {1, 0, 0},
        {1, 1, 0x34ae7baa},   {1, 2, 0x35500998},   {1, 3, 0x360e9b38},   {1, 253, 0x3f7d4ccc},
        {1, 254, 0x3f7f199a}, {1, 255, 0x3f800000},
    };
    for (int c = 0; c < 16; c++)
        CHECK(to_bits(maps[1][0][c]) == four[c] && to_bits(hstep_dyn4_signed[c]) == four[c],
              "entry %d of the 4-bit map", c);
    for (size_t i = 0; i < COUNT(eight); i++)
        CHECK(to_bits(maps[0][eight[i].nonneg][eight[i].code]) == eight[i].bits,
              "entry %d, nonneg %d, of the 8-bit map: %a", eight[i].code, eight[i].nonneg,
              maps[0][eight[i].nonneg][eight[i].code]);
    for (int nonneg = 0; nonneg < 2; nonneg++)
        for (int c = 0; c < 256; c++) {
            const float *table = nonneg ? hstep_dyn8_unsigned : hstep_dyn8_signed;
            CHECK(to_bits(table[c]) == to_bits(maps[0][nonneg][c]), "entry %d, nonneg %d: %a, rebuilt %a", c, nonneg,
                  table[c], maps[0][nonneg][c]);
            /* The closed form, within the roundings of the construction. */
            int place = nonneg ? c : abs(c - 127), decade = 0, parts = 1 + nonneg;
            for (; place >= 2 * parts - nonneg && decade < 6; parts *= 2) decade++;
            double closed = pow(10, decade - 6) * (0.1 + 0.9 * (place - (parts - nonneg) + 0.5) / parts);
            if (place == 0) closed = 0;
            if (c == 255) closed = 1;
            CHECK(fabs(closed - fabs((double)table[c])) <= closed * 0x1p-22,
                  "entry %d, nonneg %d: %.9g, closed form %.9g", c, nonneg, table[c], closed);
        }
}

static void check_map_code(int four, int nonneg, float x, float scale)
{
    const struct codec *c = &codecs[four ? DYN4 : DYN8];
    uint32_t expected = map_code(maps[four][nonneg], c->levels, x / scale);
    if (!four && nonneg && x > 0 && expected == 0) expected = 1;
    uint32_t code = c->code(x, scale, random32() & 0xffff, nonneg);
    float value = c->value(code, scale, nonneg), product = maps[four][nonneg][code] * scale;
    CHECK(code == expected, "%s, nonneg %d: %a with scale %a became code %u, should be %u", c->name, nonneg, x, scale,
          code, expected);
    CHECK(value == product, "%s, nonneg %d: code %u with scale %a decodes to %a, not %a", c->name, nonneg, code, scale,
          value, product);
}

/* Compares with an independent search: at and beside every entry and border, and anywhere else. */
static void test_dynamic_codes(void)
{
    for (int four = 0; four < 2; four++)
        for (int nonneg = 0; nonneg < 2; nonneg++) {
            const float *map = maps[four][nonneg];
            int levels = four ? 16 : 256;
            for (int c = 0; c + 1 < levels; c++)
                for (int beside = -3; beside <= 3; beside++) {
                    float border = (float)(((double)map[c] + (double)map[c + 1]) / 2);
                    float x = from_bits(to_bits(border) + (uint32_t)beside),
                          y = from_bits(to_bits(map[c]) + (uint32_t)beside);
                    check_map_code(four, nonneg, x, 1.0f);
                    if (map[c] != 0.0f) check_map_code(four, nonneg, y, 1.0f);
                    float scale = ldexpf(random_mantissa(), (int)(random32() % 60) - 30);
                    check_map_code(four, nonneg, x * scale, scale);
                }
            for (int i = 0; i < BY_LENGTH(50000, 100000, 500000); i++) {
                float scale = fmaxf(some_largest(i), 1e-12f);
                check_map_code(four, nonneg, some_value(scale, nonneg), scale);
            }
            /* Every fp32 number in [-1, 1], or a sample of them. */
            for (uint64_t u = 0; u <= 0x3f800000; u += BY_LENGTH(7919, 509, 61)) {
                check_map_code(four, nonneg, from_bits((uint32_t)u), 1.0f);
                if (!nonneg) check_map_code(four, 0, from_bits((uint32_t)u | 0x80000000u), 1.0f);
            }
        }
}

/* Checks the mean over all random words. It is exact where codes are linear in the rounded value. */
static void test_unbiased(void)
{
    for (int i = 0; i < BY_LENGTH(24, 50, 200); i++) {
        int nonneg = i % 2;
        float largest = some_largest(i % 6), x = some_value(largest, nonneg);
        float scale;
        double sum;
        for (int f = INT4; f <= INT6; f++) {
            const struct codec *c = &codecs[f];
            scale = c->scale(largest, nonneg);
            double place = narrow_place(f, (double)x, (double)scale, nonneg);
            sum = 0;
            for (uint32_t r = 0; r < 65536; r++) sum += narrow_code_place(f, c->code(x, scale, r, nonneg), nonneg);
            /* int6 draws 15 bits for a second moment. */
            CHECK(fabs(sum / 65536 - place) < 0x1.2p-16, "%s, nonneg %d: %a with scale %a, at %.9g, has mean %.9g",
                  c->name, nonneg, x, scale, place, sum / 65536);
        }
        for (int e5m2 = 0; e5m2 < 2; e5m2++) {
            const struct codec *c = &codecs[e5m2 ? E5M2 : FP8];
            scale = c->scale(largest, nonneg);
            double t = fabs((double)x) / (double)scale, low = float8(float8_top(e5m2), e5m2), high = 0;
            sum = 0;
            for (uint32_t r = 0; r < 65536; r++) {
                double y = float8(c->code(x, scale, r, nonneg) & 0x7f, e5m2);
                sum += y;
                low = y < low ? y : low;
                high = y > high ? y : high;
            }
            double step = float8(1, e5m2), mean = sum / 65536;
            if (nonneg && x > 0 && t < step) t = step;
            double unit = high - low > step ? high - low : step;
            CHECK(fabs(mean - t) <= unit * 0x1p-15 + t * 0x1p-22,
                  "%s, nonneg %d: %a with scale %a, t %.9g, has mean %.9g", c->name, nonneg, x, scale, t, mean);
            CHECK(high - low <= step || high <= low * (e5m2 ? 1.25 : 1.125) * (1 + 1e-12), "%s: t %g became %g and %g",
                  c->name, t, low, high);
        }
    }
}

/* ---- Bounds ------------------------------------------------------------------------------------------------------ */

/* Returns the largest error that the format's header states for a value of a block of scale s. */
static double stated_bound(int codec, int nonneg, int stochastic, double x, double s)
{
    double a = fabs(x), grow = 1 + 0x1p-19, decade = 1;
    switch (codec) {
    case FP8: return fmax(a / 16, s / 1024) * (stochastic ? 2 : 1) * grow;
    case E5M2: return fmax(a / 8, s * 0x1p-17) * (stochastic ? 2 : 1) * grow;
    case DYN8:
        if (nonneg && a <= 1e-7 * s) return 3.25e-7 * s * (1 + 0x1p-15);
        for (int k = 0; k <= 6; k++, decade /= 10)
            if (a > decade / 10 * s || k == 6)
                return (nonneg ? 0.225 : 0.45) * s * decade / (1 << (6 - k)) * (1 + 0x1p-15);
        return 0;
    case DYN4: return (nonneg ? (a >= s / 16 ? s / 32 : s / 16) : 0.1125 * s) * (1 + 0x1p-15);
    case INT6: return (stochastic ? s / 2 : s / 4) * (1 + 0x1p-15);
    default: return stochastic ? s / 4 : 0.1272 * s;
    }
}

static void test_bounds(void)
{
    double worst[CODECS][2] = {{0}};
    for (int f = 0; f < LAMB16; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (int i = 0; i < BY_LENGTH(40000, 100000, 400000); i++) {
                const struct codec *c = &codecs[f];
                float largest = some_largest(i % 5), x = some_value(largest, nonneg), s = c->scale(largest, nonneg);
                int stochastic = f < DYN8 && i / 5 % 2;
                float y = c->value(c->code(x, s, stochastic ? random32() & 0xffff : NEAREST, nonneg), s, nonneg);
                double error = fabs((double)y - (double)x),
                       bound = stated_bound(f, nonneg, stochastic, (double)x, (double)s);
                if ((f == INT4 || f == INT6) && nonneg) {
                    double root = fmax(sqrt((double)x), narrow_least(f, (double)s));
                    error = fabs(sqrt((double)y) - root);
                    bound = root / (root < (double)s ? narrow[f].below : narrow[f].above) / (stochastic ? 1 : 2) *
                            (1 + 0x1p-15);
                }
                if ((f == FP8 || f == E5M2) && nonneg && x > 0) {
                    double least = (double)s * float8(1, f == E5M2);
                    CHECK((double)y == least || (double)x >= least * (1 - 0x1p-19), "%s: %a became %a", c->name, x, y);
                    bound = fmax(bound, least - (double)x);
                }
                /* Below the smallest normal number fp32 itself is coarse. */
                bound += 0x1p-149;
                if (error / bound > worst[f][nonneg]) worst[f][nonneg] = error / bound;
                CHECK(error <= bound, "%s, nonneg %d, scale %a: %a became %a, off by %g, stated %g", c->name, nonneg, s,
                      x, y, error, bound);
            }
    /* A bound that no error comes near does not test anything. */
    for (int f = 0; f < LAMB16; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            CHECK(worst[f][nonneg] > 0.75, "%s, nonneg %d: errors stay below %g of the stated bound", codecs[f].name,
                  nonneg, worst[f][nonneg]);
}

/* Bounds of every block format of the library, rounded to nearest, through the public interface. An element's error is
 * at most `relative` of itself plus `part` of its block's largest, by role. `zeros`: a positive second moment may
 * become zero. A format of formats.def needs a row here. Bounds are near those of the header, because a bound that no
 * element comes near tests nothing. */
static const struct kept {
    const char *format;
    struct {
        double relative, part;
    } role[2]; /* signed, second moments */
    int zeros;
    const char *reason;
} kept[] = {
    {"int8", {{0, 8.1e-3}, {0x1p-4, 0x1p-21}}, 0, "roots in steps of 1/127; floats of 4 or 5 bits"},
    {"int4", {{0, 0.13}, {0.57, 1.5e-3}}, 0, "steps of 1/7 at the largest; roots in half octaves"},
    {"int6", {{0, 0.0163}, {0x1.1p-3, 3.4e-4}}, 0, "steps of 1/31; roots of 3 or 4 bits"},
    {"fp8", {{0x1.01p-4, 2.2e-6}, {0x1.01p-4, 9e-6}}, 0, "3 bits of mantissa"},
    {"fp8-e5m2", {{0x1.01p-3, 1.4e-10}, {0x1.01p-3, 5.7e-10}}, 0, "2 bits of mantissa"},
    {"dyn8", {{0, 7.1e-3}, {0, 3.6e-3}}, 0, "0.9 / 64 or 0.9 / 128 between the largest codes"},
    {"dyn4", {{0, 0.113}, {0, 0.063}}, 0, "0.225 between the largest codes; from 1/16 up"},
    {"fp8-lamb16", {{0, 1}, {0x1.01p-3, 2.8e-8}}, 1, "the published scale cuts off first moments"},
};

static void test_kept(void)
{
    enum { ROWS = 16, COLUMNS = 512, N = ROWS * COLUMNS };
    static float in[N], out[N];
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        halfstep_format_info info = format_info(row);
        if (!is_block_format(&info)) continue;
        const struct kept *k = NULL;
        for (size_t i = 0; i < COUNT(kept); i++)
            if (!strcmp(kept[i].format, info.name)) k = &kept[i];
        CHECK(k, "kept[] of tests/core/test_block_formats.c has no bound for '%s' (docs/adding.md)", info.name);
        for (int nonneg = 0; k && nonneg < 2; nonneg++) {
            if (!(info.roles & (nonneg ? HALFSTEP_ROLE_NONNEG : HALFSTEP_ROLE_SIGNED))) continue;
            double worst = 0;
            int zeros = 0, block = info.block < N ? info.block : N;
            for (int round = 0; round < BY_LENGTH(8, 20, 80); round++) {
                struct one t;
                one_new(&t, text_of(nonneg ? "adamw/f32/f32+%s" : "lion/f32/%s", info.name), 2, ROWS, COLUMNS, "f32");
                /* Three magnitudes. No format's scale is at the end of its range there. */
                for (int i = 0; i < N; i++) in[i] = some_value(some_largest(i / block % 3), nonneg);
                one_write(&t, STATE + nonneg, in);
                one_read(&t, STATE + nonneg, out);
                one_close(&t);
                for (int first = 0; first < N; first += block) {
                    double most = 0;
                    for (int i = first; i < first + block; i++) most = fmax(most, fabs((double)in[i]));
                    for (int i = first; i < first + block; i++) {
                        double x = fabs((double)in[i]), off = fabs((double)out[i] - (double)in[i]);
                        double allowed = k->role[nonneg].relative * x + k->role[nonneg].part * most + 0x1p-149;
                        worst = fmax(worst, off / allowed);
                        zeros += nonneg && x > 0 && out[i] == 0;
                        CHECK(off <= allowed,
                              "%s, nonneg %d: %a in a block of %a became %a: off by %g, and %g is stated (%s)",
                              info.name, nonneg, in[i], most, out[i], off, allowed, k->reason);
                    }
                }
            }
            CHECK(worst > 0.75, "%s, nonneg %d: errors stay below %g of the stated bound", info.name, nonneg, worst);
            CHECK(!zeros == !(nonneg && k->zeros), "%s: %d positive second moments became zero", info.name, zeros);
        }
    }
}

/* I-25, I-34: positive values stay positive for all random bits. LAMB16's published form is the counter-check. */
static void test_positive(void)
{
    for (int f = 0; f < CODECS; f++) {
        int zeros = 0;
        for (int i = 0; i < 200000; i++) {
            const struct codec *c = &codecs[f];
            float largest = i % 3 ? some_largest(i / 3) : 1.0f;
            float s = c->scale ? c->scale(largest, 1) : 1e-6f, x = some_value(largest, 1);
            if (i % 7 == 0) x = from_bits(1 + random32() % 0x00800000u);
            if (!(x > 0)) continue;
            static const uint32_t words[] = {0, 1, NEAREST - 1, NEAREST, 65535};
            for (size_t r = 0; r < COUNT(words); r++) {
                uint32_t code = c->code(x, s, words[r], 1);
                float y = c->value(code, s, 1);
                /* The smallest codes of a tiny block fall below fp32 itself. */
                if (y == 0.0f && !(c->value(1, s, 1) == 0.0f && code)) zeros++;
            }
        }
        if (f == LAMB16) CHECK(zeros > 0, "fp8-lamb16 has no zeros, so the check tells nothing");
        else CHECK(!zeros, "%s: %d positive second moments became zero", codecs[f].name, zeros);
    }
}

/* ---- Instruction sets, layouts, the public interface ------------------------------------------------------------- */

/* Returns the first bit of element i. Codes of less than a byte begin at the lowest bit, or with the high nibble. */
static int64_t bit_of(const struct codec *c, int64_t i)
{
    return (c->levels == 16 && !c->low_first ? i ^ 1 : i) * hstep_formats[c->format].code_bits;
}
static uint32_t packed_code(const struct codec *c, const uint8_t *code, int64_t i)
{
    int64_t bit = bit_of(c, i), last = bit + hstep_formats[c->format].code_bits - 1;
    return ((code[bit / 8] | (uint32_t)code[last / 8] << 8) >> bit % 8) & (uint32_t)(c->levels - 1);
}
static void pack_code(const struct codec *c, uint8_t *code, int64_t i, uint32_t value)
{
    int64_t bit = bit_of(c, i), last = bit + hstep_formats[c->format].code_bits - 1;
    code[bit / 8] |= (uint8_t)(value << bit % 8);
    if (last / 8 > bit / 8) code[last / 8] |= (uint8_t)(value << bit % 8 >> 8);
}
static float stored_scale(const struct codec *c, const uint8_t *extra, int64_t block)
{
    uint32_t u = 0;
    int bytes = hstep_formats[c->format].scale_bits / 8;
    memcpy((char *)&u + 4 - bytes, extra + block * bytes, (size_t)bytes);
    return from_bits(u);
}
static void store_scale(const struct codec *c, uint8_t *extra, int64_t block, float scale)
{
    uint32_t u = to_bits(scale);
    int bytes = hstep_formats[c->format].scale_bits / 8;
    memcpy(extra + block * bytes, (char *)&u + 4 - bytes, (size_t)bytes);
}

/* Encodes n elements of x with the functions of one lane. Blocks start at the first element; the last may be short. */
static void expected_bytes(const struct codec *c, int nonneg, const float *x, const uint16_t *random, int64_t n,
                           float scale, uint8_t *code, uint8_t *extra)
{
    int64_t block = c->scale ? hstep_formats[c->format].block : n;
    memset(code, 0, (size_t)((n * hstep_formats[c->format].code_bits + 7) / 8));
    for (int64_t first = 0; first < n; first += block) {
        int64_t end = first + block < n ? first + block : n;
        float largest = 0;
        for (int64_t i = first; i < end; i++) largest = fmaxf(largest, fabsf(x[i]));
        if (c->scale) scale = c->scale(largest, nonneg);
        store_scale(c, extra, first / block, scale);
        for (int64_t i = first; i < end; i++)
            pack_code(c, code, i, c->code(x[i], scale, random ? random[i] : NEAREST, nonneg));
        /* Half a byte left over holds the code of zero. */
        if (end == n && n % 2 && c->levels == 16) pack_code(c, code, n, c->code(0.0f, scale, NEAREST, nonneg));
    }
}

static void test_tiles(const struct hstep_kernels *k)
{
    HSTEP_ALIGNED float plain[HSTEP_TILE], x[HSTEP_TILE];
    HSTEP_ALIGNED uint8_t code[HSTEP_TILE * 4], extra[HSTEP_TILE * 2], expected[HSTEP_TILE], scales[HSTEP_TILE];
    HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS];
    uint16_t random[HSTEP_TILE];
    for (int f = 0; f < CODECS; f++)
        for (int nonneg = 0; nonneg < 2; nonneg++)
            for (int i = 0; i < BY_LENGTH(300, 1000, 3000); i++) {
                const struct codec *c = &codecs[f];
                const struct hstep_format *format = &hstep_formats[c->format];
                const struct hstep_format_kernels *kernels = &k->format[c->format];
                int64_t unit = c->scale ? format->block : 32,
                        n = unit * (1 + random32() % (uint32_t)(HSTEP_TILE / unit));
                float scale = c->scale ? 0.0f : some_scale(c, nonneg, i), largest = some_largest(i);
                memset(plain, 0, sizeof plain);
                for (int64_t j = 0; j < n; j++) {
                    if (j % 32 == 0 && random32() % 2) largest = some_largest((int)(random32() % 12));
                    plain[j] = random32() % 9 && i % 11 ? some_value(largest, nonneg) : 0.0f;
                    random[j] = (uint16_t)random32();
                }
                for (int64_t j = 0; j < n / 2; j++) words[j] = random[2 * j] | (uint32_t)random[2 * j + 1] << 16;
                expected_bytes(c, nonneg, plain, random, n, scale, expected, scales);
                if (!c->scale) memcpy(extra, &scale, 4);
                size_t code_bytes = (size_t)(n * format->code_bits / 8);
                size_t scale_bytes = c->scale ? (size_t)(n / unit * format->scale_bits / 8) : 4;
                k->from_plain(plain, x, n);
                kernels->encode[nonneg](x, (char *)code, (char *)extra, words, n, 1, 1.0f);
                CHECK(!memcmp(code, expected, code_bytes), "%s, nonneg %d, %d elements on %s: other codes", c->name,
                      nonneg, (int)n, k->name);
                CHECK(!memcmp(extra, scales, scale_bytes), "%s, nonneg %d on %s: other scales", c->name, nonneg,
                      k->name);

                /* Any bytes, with scales that a block may have. */
                for (size_t j = 0; j < code_bytes; j++) code[j] = (uint8_t)random32();
                for (int64_t b = 0; c->scale && b < n / unit; b++)
                    store_scale(c, extra, b,
                                random32() % 8 ? c->scale(some_largest((int)(random32() % 12)), nonneg) : 0.0f);
                kernels->decode[nonneg](x, (const char *)code, (const char *)extra, n);
                k->to_plain(x, plain, n);
                for (int64_t j = 0; j < n; j++) {
                    float s = stored_scale(c, extra, c->scale ? j / unit : 0);
                    float value = c->value(packed_code(c, code, j), s, nonneg);
                    CHECK(to_bits(value) == to_bits(plain[j]),
                          "%s, nonneg %d on %s: code %u with scale %a decodes to %a, not "
                          "%a",
                          c->name, nonneg, k->name, packed_code(c, code, j), s, plain[j], value);
                }
                if (c->scale) continue;
                HSTEP_ALIGNED float squares[HSTEP_TILE];
                for (int64_t j = 0; j < n; j++) plain[j] = some_value(20.0f, nonneg);
                k->from_plain(plain, x, n);
                kernels->norm[nonneg](x, squares, n);
                k->to_plain(squares, x, n);
                for (int64_t j = 0; j < n; j++)
                    CHECK(x[j] == fminf(fabsf(plain[j]), sqrtf(10.0f)), "%s: %a counts as %a", c->name, plain[j], x[j]);
            }
}

/* Layouts as docs/formats.md gives them: codes of a row packed from its first byte, blocks within rows; or both
 * flat. */
static void test_slots(void)
{
    static const struct {
        int64_t rows, row_length;
    } shapes[] = {{3, 256}, {5, 200}, {7, 129}, {2, 640}, {128, 48}, {96, 64}, {256, 33}, {4, 1056}};
    for (int f = 0; f < CODECS; f++)
        for (size_t shape = 0; shape < COUNT(shapes); shape++)
            for (int nonneg = 0; nonneg < 2; nonneg++) {
                const struct codec *c = &codecs[f];
                const struct hstep_format *format = &hstep_formats[c->format];
                int64_t rows = shapes[shape].rows, row_length = shapes[shape].row_length, n = rows * row_length;
                struct one t;
                one_new(&t, text_of("adamw/f32/%s", c->name), 2, rows, row_length, "f32");
                int slot = STATE + nonneg;
                halfstep_slot_info info = slot_info(t.o, 0, slot);
                int eligible = format->geometry == HALFSTEP_GEOMETRY_TENSOR ||
                               (format->geometry == HALFSTEP_GEOMETRY_FLAT ? n >= 4096 && n % format->block == 0
                                                                           : row_length >= format->block);
                CHECK(info.fell_back == !eligible, "%s, %d x %d: fell back %d", c->name, (int)rows, (int)row_length,
                      info.fell_back);
                if (!eligible) {
                    one_close(&t);
                    continue;
                }
                float *x = zeroed((size_t)n * 4), *back = zeroed((size_t)n * 4), scale = 0;
                for (int64_t i = 0; i < n; i++) x[i] = some_value(i / 100 % 3 ? 1.0f : 1e-4f, nonneg);
                one_write(&t, slot, x);
                one_read(&t, slot, back);
                int by_row = format->geometry == HALFSTEP_GEOMETRY_ROWS;
                int64_t runs = by_row ? rows : 1, length = n / runs;
                int64_t code_run = (length * format->code_bits + 7) / 8;
                int64_t scales = c->scale ? (length + format->block - 1) / format->block : 1;
                int64_t scale_run = scales * format->scale_bits / 8;
                CHECK((int64_t)info.code_bytes == runs * code_run && (int64_t)info.extra_bytes == runs * scale_run,
                      "%s, %d x %d: %d + %d bytes", c->name, (int)rows, (int)row_length, (int)info.code_bytes,
                      (int)info.extra_bytes);
                uint8_t *code = zeroed((size_t)code_run), *extra = zeroed((size_t)scale_run);
                if (!c->scale) {
                    double sum = 0;
                    for (int64_t i = 0; i < n; i++) sum += fmin((double)x[i] * (double)x[i], 10.0);
                    scale = stored_scale(c, info.extra, 0);
                    CHECK(fabs((double)scale / (sqrt(sum) / (double)n + 1e-6) - 1) < 1e-6, "%s: scale %a", c->name,
                          scale);
                }
                for (int64_t run = 0; run < runs; run++) {
                    expected_bytes(c, nonneg, x + run * length, NULL, length, scale, code, extra);
                    CHECK(!memcmp(code, (char *)info.code + run * code_run, (size_t)code_run),
                          "%s, nonneg %d, %d x %d: codes of run %d", c->name, nonneg, (int)rows, (int)row_length,
                          (int)run);
                    CHECK(!memcmp(extra, (char *)info.extra + run * scale_run, (size_t)scale_run),
                          "%s, nonneg %d, %d x %d: scales of run %d", c->name, nonneg, (int)rows, (int)row_length,
                          (int)run);
                    for (int64_t i = 0; i < length; i++) {
                        float s = c->scale ? stored_scale(c, extra, i / format->block) : scale;
                        float value = c->value(packed_code(c, code, i), s, nonneg);
                        CHECK(to_bits(value) == to_bits(back[run * length + i]),
                              "%s, nonneg %d: element %d of run %d is read "
                              "as %a",
                              c->name, nonneg, (int)i, (int)run, (double)back[run * length + i]);
                    }
                }
                free(x);
                free(back);
                free(code);
                free(extra);
                one_close(&t);
            }
}

/* No bit of a NaN reaches its neighbours, on any instruction set. */
static void test_neighbours(void)
{
    static struct neighbours other;
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        const halfstep_format_info format = format_info(row);
        int first = 1;
        for (int32_t isa = 0; is_block_format(&format) && isa < halfstep_isa_count(); isa++) {
            if (!halfstep_isa_available(isa)) continue;
            MUST(halfstep_set_isa(halfstep_isa_name(isa)));
            for (int fused = 0; fused < 2; fused++, first = 0)
                check_neighbours(format.name, fused, halfstep_isa_name(isa), first, &other);
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_maps();

    TEST("values of codes") test_values();
    TEST("every code, and back") test_round_trips();
    TEST("scales") test_scales();
    TEST("fp8: the largest of a block") test_fp8_top();
    TEST("to nearest") test_nearest();
    TEST("fp8-lamb16: the published codes") test_lamb16();
    TEST("dynamic maps, rebuilt") test_dynamic_maps();
    TEST("dynamic codes, searched") test_dynamic_codes();
    TEST("every random word") test_unbiased();
    TEST("worst cases as stated") test_bounds();
    TEST("every block format keeps what is stated of it") test_kept();
    TEST("positive second moments") test_positive();
    TEST("neighbours of NaNs") test_neighbours();
    for (int i = 0; i < hstep_isa_count(); i++) {
        char title[64];
        if (!hstep_isa_available(i)) continue;
        snprintf(title, sizeof title, "%s: tiles", hstep_isa_name(i));
        TEST(title) {
            test_tiles(hstep_isa_kernels(i));
            test_close_group();
        }
    }
    TEST("slots") test_slots();
    return test_done();
}
