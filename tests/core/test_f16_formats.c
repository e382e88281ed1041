/* Tests the formats over IEEE half against a reference in double that does not know bit patterns. Covered are all
 * codes, stochastic rounding by enumeration, whole binades and special values. The bits must be the same on every
 * instruction set. Saturated weights are counted. Only --all enumerates everything; the other runs, of which --short is
 * the shortest, sample by fixed strides. Over 500 lines because the formats share tiles, reference and format table. */

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "ref/fixture.h"
#include "tables/tables.h"

/* bits: of the error code, or 0. */
static const struct half_format {
    const char *name;
    int format, bits, stochastic, residual;
} formats[] = {{"f16", HSTEP_FORMAT_f16, 0, 0, 0},
               {"f16-sr", HSTEP_FORMAT_f16_sr, 0, 1, 0},
               {"f16-kahan", HSTEP_FORMAT_f16_kahan, 0, 1, 1},
               {"f16-ecc8", HSTEP_FORMAT_f16_ecc8, 8, 1, 0},
               {"f16-ecc16", HSTEP_FORMAT_f16_ecc16, 16, 0, 0}};
enum { FORMATS = COUNT(formats) };

/* ---- Tiles of a kernel table, elements in order ------------------------------------------------------------------ */

struct stored {
    HSTEP_ALIGNED uint16_t code[HSTEP_TILE];
    HSTEP_ALIGNED int8_t extra[2 * HSTEP_TILE];
};

static const struct hstep_kernels *best(void) { return hstep_isa_kernels(hstep_isa_best()); }

static void encode(const struct hstep_kernels *k, int format, const float *in, struct stored *s, const uint32_t *words,
                   int state)
{
    HSTEP_ALIGNED float plain[HSTEP_TILE], x[HSTEP_TILE];
    HSTEP_ALIGNED uint32_t random[HSTEP_TILE_WORDS];
    memcpy(plain, in, sizeof plain);
    memcpy(random, words, sizeof random);
    k->from_plain(plain, x, HSTEP_TILE);
    k->format[format].encode[0](x, (char *)s->code, (char *)s->extra, random, HSTEP_TILE, state, 1.0f);
}

static void decode(const struct hstep_kernels *k, int format, const struct stored *s, float *out)
{
    HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE];
    k->format[format].decode[0](x, (const char *)s->code, (const char *)s->extra, HSTEP_TILE);
    k->to_plain(x, plain, HSTEP_TILE);
    memcpy(out, plain, sizeof plain);
}

static void apply(const struct hstep_kernels *k, int format, struct stored *s, const float *change,
                  const uint32_t *words)
{
    HSTEP_ALIGNED float x[HSTEP_TILE], plain[HSTEP_TILE], d[HSTEP_TILE];
    HSTEP_ALIGNED uint32_t random[HSTEP_TILE_WORDS];
    memcpy(plain, change, sizeof plain);
    memcpy(random, words, sizeof random);
    k->from_plain(plain, d, HSTEP_TILE);
    k->format[format].decode[0](x, (const char *)s->code, (const char *)s->extra, HSTEP_TILE);
    k->format[format].apply(x, d, (char *)s->code, (char *)s->extra, random, HSTEP_TILE);
}

static int extra_of(const struct half_format *f, const struct stored *s, int i)
{
    int16_t wide;
    if (f->bits == 8) return s->extra[i];
    if (!f->bits && !f->residual) return 0;
    memcpy(&wide, s->extra + 2 * i, 2);
    return wide;
}

static void set_extra(const struct half_format *f, struct stored *s, int i, int value)
{
    int16_t wide = (int16_t)value;
    if (f->bits == 8) s->extra[i] = (int8_t)value;
    else memcpy(s->extra + 2 * i, &wide, 2);
}

/* Random words that round to nearest, ties away, as halfstep_write_slot() does. random_words() makes others for each
 * tile. */
static uint32_t half_words[HSTEP_TILE_WORDS];
static void random_words(struct source *s, uint32_t *words)
{
    for (int i = 0; i < HSTEP_TILE_WORDS; i++) words[i] = (uint32_t)(next64(s) >> 32);
}

/* ---- The reference ----------------------------------------------------------------------------------------------- */

static double half_value(int code)
{
    int exponent = code >> 10 & 31, mantissa = code & 1023;
    double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                      : ldexp(mantissa, -24);
    return code & 0x8000 ? -magnitude : magnitude;
}

/* Returns a weight plus its error code: 2^bits-ths of the way to the neighbour on the code's side. */
static double pair_value(int code, int extra, int bits)
{
    double weight = fabs(half_value(code & 0x7fff)), other = weight;
    if (extra > 0) other = (code & 0x7fff) == 0x7bff ? 65536 : half_value((code & 0x7fff) + 1);
    if (extra < 0) other = half_value((code & 0x7fff) - 1);
    double magnitude = weight + fabs(ldexp(extra, -bits)) * (other - weight);
    return code & 0x8000 ? -magnitude : magnitude;
}

/* Rounds a finite x stochastically, by the definition of f16_round.h: code and error code of so many bits. */
static void stochastic(double x, uint32_t r, int bits, int *code, int *extra)
{
    int exponent;
    double magnitude = fabs(x);
    frexp(magnitude, &exponent);
    exponent = magnitude == 0 || exponent - 1 < -14 ? -14 : exponent - 1;
    double t = rint(ldexp(magnitude, 10 + bits - exponent + 16));
    int64_t p = (int64_t)floor((t + r) / 65536) + ((int64_t)(exponent + 14) << (10 + bits));
    int64_t largest = ((int64_t)0x7bff << bits) + (bits ? (1 << (bits - 1)) - 1 : 0);
    if (p > largest) p = largest;
    *code = (int)((p + (bits ? 1 << (bits - 1) : 0)) >> bits);
    *extra = (int)(p - ((int64_t)*code << bits));
    if (signbit(x)) *code |= 0x8000;
}

/* ---- Codes ------------------------------------------------------------------------------------------------------- */

static void test_codes(void)
{
    TEST("all 65,536 halves decode to what they mean and come back, in every format") {
        struct source s = {1};
        for (int f = 0; f < FORMATS; f++)
            for (int base = 0; base < 65536; base += HSTEP_TILE) {
                struct stored in, out;
                float x[HSTEP_TILE], zero[HSTEP_TILE] = {0};
                uint32_t words[HSTEP_TILE_WORDS];
                memset(&in, 0, sizeof in);
                memset(&out, 0x5a, sizeof out);
                for (int i = 0; i < HSTEP_TILE; i++) in.code[i] = (uint16_t)(base + i);
                random_words(&s, words);
                decode(best(), formats[f].format, &in, x);
                encode(best(), formats[f].format, x, &out, words, 0);
                struct stored still = in;
                apply(best(), formats[f].format, &still, zero, words);
                for (int i = 0; i < HSTEP_TILE; i++) {
                    double value = half_value(base + i);
                    int code = base + i, back = out.code[i], extra = extra_of(&formats[f], &out, i);
                    if (isnan(value)) {
                        CHECK(isnan(x[i]) && isnan(half_value(back)) && (back ^ code) < 0x8000 &&
                                  isnan(half_value(still.code[i])),
                              "%s: NaN %04x became %04x", formats[f].name, code, back);
                        CHECK(extra == 0, "%s: NaN %04x has extra %d", formats[f].name, code, extra);
                        continue;
                    }
                    /* The sum of -0 and a residual of +0 is +0. */
                    if (formats[f].residual && value == 0) back |= code, value += x[i];
                    CHECK(to_bits(x[i]) == to_bits((float)value), "%s: %04x decodes to %a, expected %a",
                          formats[f].name, code, x[i], value);
                    CHECK(back == code && extra == 0, "%s: %04x came back as %04x, %d", formats[f].name, code, back,
                          extra);
                    CHECK(still.code[i] == code && extra_of(&formats[f], &still, i) == 0,
                          "%s: no change made %04x to %04x, %d", formats[f].name, code, still.code[i],
                          extra_of(&formats[f], &still, i));
                }
            }
    }
    TEST("f16-ecc8: every pair means what the reference says, grows with its pattern, and no random bits move it") {
        const struct half_format *f = &formats[3];
        struct source s = {2};
        for (int sign = 0; sign < 0x10000; sign += 0x8000) {
            double before = -1;
            for (int half = 0; half < 0x7c00; half++) {
                struct stored in, out;
                float x[HSTEP_TILE];
                uint32_t words[HSTEP_TILE_WORDS];
                /* Both ends of every binade, and some between. */
                if (half > 1100 && (half + 1) % 1024 > 1 && half % BY_LENGTH(37, 7, 1)) continue;
                random_words(&s, words);
                for (int i = 0; i < 256; i++) {
                    /* A zero weight has no neighbour below. */
                    int e = half ? i - 128 : i / 2;
                    in.code[i] = (uint16_t)(half | sign);
                    set_extra(f, &in, i, e);
                }
                decode(best(), f->format, &in, x);
                encode(best(), f->format, x, &out, words, 0);
                for (int i = 0; i < 256; i++) {
                    double value = pair_value(in.code[i], in.extra[i], 8);
                    CHECK(to_bits(x[i]) == to_bits((float)value) && (double)(float)value == value,
                          "%04x, %d is %a, expected %a", in.code[i], in.extra[i], x[i], value);
                    CHECK(half == 0 || fabs((double)x[i]) > before, "%04x, %d is %a, after %a", in.code[i], in.extra[i],
                          x[i], before);
                    before = fabs((double)x[i]);
                    CHECK(out.code[i] == in.code[i] && out.extra[i] == in.extra[i], "%04x, %d came back as %04x, %d",
                          in.code[i], in.extra[i], out.code[i], out.extra[i]);
                }
            }
        }
    }
}

/* ---- Stochastic rounding ----------------------------------------------------------------------------------------- */

/* Judges one fp32 pattern with all 65,536 random half words. */
static void enumerate(const struct half_format *f, uint32_t bits)
{
    static uint32_t words[32768];
    static int ready;
    float in[HSTEP_TILE];
    struct stored out;
    double x = from_bits(bits);
    /* The result goes up once, at the first r that carries. */
    int low_code, low_extra, high_code, high_extra, exponent;
    for (; ready < 32768; ready++) words[ready] = (uint32_t)(2 * ready) | (uint32_t)(2 * ready + 1) << 16;
    frexp(x, &exponent);
    exponent = x == 0 || exponent - 1 < -14 ? -14 : exponent - 1;
    double t = rint(ldexp(fabs(x), 10 + f->bits - exponent + 16));
    uint32_t away = (uint32_t)(t - 65536 * floor(t / 65536));
    stochastic(x, 0, f->bits, &low_code, &low_extra);
    stochastic(x, 65535, f->bits, &high_code, &high_extra);
    for (int i = 0; i < HSTEP_TILE; i++) in[i] = from_bits(bits);
    uint32_t ups = 0, wrong = 0, first_wrong = 0;
    for (uint32_t base = 0; base < 65536; base += HSTEP_TILE) {
        encode(best(), f->format, in, &out, words + base / 2, 0);
        for (int i = 0; i < HSTEP_TILE; i++) {
            int up = base + (uint32_t)i >= 65536 - away;
            ups += (uint32_t)up;
            if (out.code[i] == (up ? high_code : low_code) &&
                (!f->bits || out.extra[i] == (up ? high_extra : low_extra)))
                continue;
            if (!wrong++) first_wrong = base + (uint32_t)i;
        }
    }
    CHECK(!wrong, "%s: %08x was rounded wrongly %u times, first with %04x", f->name, bits, wrong, first_wrong);
    EQUAL(ups, away);
}

static void test_stochastic(void)
{
    TEST("f16-sr goes away with probability exactly the dropped part, for all dropped patterns of 13 to 16 bits") {
        /* Runs over exponent and kept mantissa bits. The first two, of both signs, get all patterns. */
        static const struct {
            int exponent;
            uint32_t kept;
            int stride;
        } rows[] = {{0, 0, 1},       {-14, 0x3ff, 1},  {-6, 0x155, 61}, {15, 0x3fe, 61},
                    {-15, 0x101, 3}, {-16, 0x0ff, 13}, {-17, 0, 29},    {-17, 0x7f, 251}};
        for (size_t k = 0; k < COUNT(rows); k++) {
            int dropped = rows[k].exponent < -14 ? 13 - 14 - rows[k].exponent : 13;
            uint32_t kept = rows[k].kept << 13 >> dropped << dropped, n = (uint32_t)1 << dropped;
            uint32_t stride = BY_LENGTH(n / 16 - 1, (uint32_t)rows[k].stride * 4 + 1, (uint32_t)rows[k].stride);
            for (uint32_t low = 0; low < n; low = low + stride < n || low == n - 1 ? low + stride : n - 1) {
                uint32_t bits = (uint32_t)(rows[k].exponent + 127) << 23 | kept | low;
                enumerate(&formats[1], bits);
                if (k < 2 && (low & 7) == 5) enumerate(&formats[1], bits | 0x80000000u);
            }
        }
    }
    TEST("f16-sr below 2^-17: the probability to 2^-16, and nothing from at most 2^-41") {
        struct source s = {3};
        for (int exponent = -149; exponent < -17; exponent++)
            for (int round = 0; round < (exponent < -45 ? BY_LENGTH(1, 2, 2) : BY_LENGTH(1, 6, 30)); round++) {
                float x = (float)ldexp((round & 1 ? -1 : 1) * (round < 2 ? 1 : 1 + next_unit(&s)), exponent);
                enumerate(&formats[1], to_bits(x));
            }
        enumerate(&formats[1], to_bits(0x1p-41f));
        enumerate(&formats[1], to_bits(0x1.000002p-41f));
    }
    TEST("f16-ecc8 rounds its 19 bits by the same definition: all patterns of 5 to 16 dropped bits, samples of more") {
        struct source s = {4};
        static const uint32_t kept[] = {0, 0x3ffff, 0x20080, 0x15555};
        for (int exponent = -40; exponent < 16; exponent++) {
            int dropped = exponent < -14 ? 5 - 14 - exponent : 5;
            uint32_t n = dropped < 16 ? (uint32_t)1 << dropped : 65536;
            uint32_t stride = BY_LENGTH(n / 4 + 1, dropped > 5 ? n / 30 + 1 : 1, dropped > 7 ? n / 60 + 1 : 1);
            for (size_t k = 0; k < 4; k++)
                for (uint32_t low = 0; low < n; low += stride) {
                    uint32_t mantissa = (uint32_t)(next64(&s) & 0x7fffff);
                    if (dropped < 23) mantissa = kept[k] << 5 >> dropped << dropped | low;
                    if (exponent == 15 && k == 1) mantissa = 0x7fe000 - 1 - low; /* other tests judge saturation */
                    enumerate(&formats[3], (uint32_t)(exponent + 127) << 23 | mantissa | (k & 1 ? 0x80000000u : 0));
                }
        }
    }
}

/* ---- Errors over whole binades ----------------------------------------------------------------------------------- */

/* Returns the error that a format's header allows for a number in its range, rounded to nearest or not. */
static double allowed(const struct half_format *f, double magnitude, int nearest)
{
    double normal = fmax(magnitude, 0x1p-14), share = nearest ? 0.5 : 1;
    if (f->residual)
        return fmax(ldexp(magnitude, -22), 0x1p-35) * share + ldexp(magnitude, -24); /* and fp32's in the sum */
    if (f->bits == 16) return magnitude >= 0x1p-17 ? 0 : 0x1p-41;
    int exponent;
    frexp(normal, &exponent);
    return ldexp(f->stochastic ? share : 0.5, exponent - 1 - 10 - f->bits);
}

static void judge_binade(const struct half_format *f, int exponent, struct source *s, double *worst)
{
    float in[HSTEP_TILE], out[HSTEP_TILE], again[HSTEP_TILE];
    struct stored stored, second;
    uint32_t words[HSTEP_TILE_WORDS], stride = BY_LENGTH(251, 29, exponent == 0 || exponent == -15 ? 1 : 7);
    /* The range is from half a unit below the binade to half a unit above. */
    uint32_t at = (uint32_t)((exponent + 127) << 23) - 0x4000, end = at + 0x808000;
    if (end > 0x477fefff) end = 0x477fe000 + (f->bits ? 0xf80 : 1);
    int nearest = f->bits == 16 || !f->stochastic;
    while (at < end) {
        for (int i = 0; i < HSTEP_TILE; i++, at += at + stride < end ? stride : 1)
            in[i] = from_bits((at < end ? at : end - 1) | (i & 1 ? 0x80000000u : 0));
        random_words(s, words);
        encode(best(), f->format, in, &stored, words, 0);
        decode(best(), f->format, &stored, out);
        random_words(s, words);
        second = stored;
        encode(best(), f->format, out, &second, words, 0);
        decode(best(), f->format, &second, again);
        for (int i = 0; i < HSTEP_TILE; i++) {
            double error = fabs((double)out[i] - in[i]), limit = allowed(f, fabs((double)in[i]), nearest);
            if (limit > 0) *worst = fmax(*worst, error / limit);
            CHECK(error <= limit, "%s: %a came back as %a (%04x, %d)", f->name, in[i], out[i], stored.code[i],
                  extra_of(f, &stored, i));
            /* A weight and its residual are no number of one format. Their sum is rounded to fp32. */
            CHECK(f->residual || (to_bits(out[i]) == to_bits(again[i]) && second.code[i] == stored.code[i] &&
                                  extra_of(f, &second, i) == extra_of(f, &stored, i)),
                  "%s: %a is %04x, %d; written again %04x, %d", f->name, in[i], stored.code[i], extra_of(f, &stored, i),
                  second.code[i], extra_of(f, &second, i));
            if (f->bits) {
                CHECK((double)out[i] == pair_value(stored.code[i], extra_of(f, &stored, i), f->bits),
                      "%s: %04x, %d decodes to %a", f->name, stored.code[i], extra_of(f, &stored, i), out[i]);
                /* Without its error code, the weight is the number rounded to nearest. */
                double unit = ldexp(1, (int)fmax(floor(log2(fabs((double)out[i]) + 0x1p-60)), -14) - 10);
                CHECK(fabs(half_value(stored.code[i]) - out[i]) <= unit / 2, "%s: the weight of %a is %04x", f->name,
                      out[i], stored.code[i]);
            }
            if (f->residual)
                CHECK(fabs(half_value(stored.code[i]) - in[i]) <= allowed(&formats[0], fabs((double)in[i]), 1),
                      "the weight of %a is %04x", in[i], stored.code[i]);
        }
    }
}

static void test_errors(void)
{
    for (int f = 0; f < FORMATS; f++) {
        static char name[FORMATS][80];
        snprintf(name[f], sizeof name[f], "%s: whole binades stay within the error that its header states",
                 formats[f].name);
        TEST(name[f]) {
            static const int binades[] = {-30, -25, -24, -18, -17, -16, -15, -14, -13, -1, 0, 14, 15};
            struct source s = {5};
            double worst = 0;
            for (size_t k = 0; k < COUNT(binades); k++) judge_binade(&formats[f], binades[k], &s, &worst);
            printf("     %-9s at most %.4f of the error allowed\n", formats[f].name, worst);
        }
    }
    TEST("to nearest, as slots are written: ties to even without random bits, away with them") {
        for (int half = 0; half < 0x7bff; half++) {
            float in[HSTEP_TILE] = {0};
            struct stored out;
            double low = half_value(half), high = half_value(half + 1), middle = (low + high) / 2;
            in[0] = (float)middle;
            in[1] = nextafterf(in[0], 0);
            in[2] = nextafterf(in[0], INFINITY);
            in[3] = -in[0];
            encode(best(), HSTEP_FORMAT_f16, in, &out, half_words, 0);
            int even = half + (half & 1);
            CHECK(out.code[0] == even && out.code[1] == half && out.code[2] == half + 1 &&
                      out.code[3] == (even | 0x8000),
                  "f16 around %a: %04x %04x %04x %04x", middle, out.code[0], out.code[1], out.code[2], out.code[3]);
            encode(best(), HSTEP_FORMAT_f16_sr, in, &out, half_words, 0);
            /* Below 2^-17 the neighbours of the middle in fp32 are closer than the resolution of the probability. */
            int exact = half >= 128;
            CHECK(out.code[0] == half + 1 && (!exact || out.code[1] == half) && out.code[2] == half + 1,
                  "f16-sr around %a: %04x %04x %04x", middle, out.code[0], out.code[1], out.code[2]);
        }
    }
}

/* ---- Special values ---------------------------------------------------------------------------------------------- */

/* Writes x as weight (0), as state (1) or by a change from 0 (2). */
static struct stored written(const struct half_format *f, float x, int how, uint32_t word, float *back)
{
    float in[HSTEP_TILE], out[HSTEP_TILE];
    uint32_t words[HSTEP_TILE_WORDS];
    struct stored s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < HSTEP_TILE; i++) in[i] = how == 2 ? -x : x;
    for (int i = 0; i < HSTEP_TILE_WORDS; i++) words[i] = word;
    if (how == 2) apply(best(), f->format, &s, in, words);
    else encode(best(), f->format, in, &s, words, how);
    decode(best(), f->format, &s, out);
    *back = out[0];
    return s;
}

static void test_special(void)
{
    static const uint32_t word[] = {0, 0xffffffffu, 0x80008000u};
    TEST("NaN keeps its sign, infinities stay, finite values saturate; only an f16 gradient overflows") {
        for (int f = 0; f < FORMATS; f++)
            for (int how = 0; how < 3; how++)
                for (int k = 0; k < 3; k++)
                    for (int sign = 0; sign < 2; sign++) {
                        const struct half_format *format = &formats[f];
                        uint32_t top = sign ? 0x80000000u : 0;
                        int code = sign ? 0x8000 : 0;
                        static const uint32_t finite[] = {0x477fe001, 0x477fefff, 0x477ff000, 0x477fffff,
                                                          0x47800000, 0x4b000000, 0x7f7fffff};
                        float back;
                        struct stored s = written(format, from_bits(0x7fc00000 | top), how, word[k], &back);
                        CHECK(isnan(back) && isnan(half_value(s.code[0])) && extra_of(format, &s, 0) == 0 &&
                                  (how == 2 || (s.code[0] & 0x8000) == code),
                              "%s (%d): NaN became %04x", format->name, how, s.code[0]);
                        s = written(format, from_bits(0x7f800000 | top), how, word[k], &back);
                        CHECK(s.code[0] == (0x7c00 | code) && extra_of(format, &s, 0) == 0 && isinf(back),
                              "%s (%d): infinity became %04x, %d", format->name, how, s.code[0],
                              extra_of(format, &s, 0));
                        for (size_t j = 0; j < COUNT(finite); j++) {
                            int gradient = f == 0 && how == 0, overflows = gradient && finite[j] >= 0x477ff000;
                            s = written(format, from_bits(finite[j] | top), how, word[k], &back);
                            CHECK(s.code[0] == ((overflows ? 0x7c00 : 0x7bff) | code), "%s (%d): %a became %04x",
                                  format->name, how, from_bits(finite[j] | top), s.code[0]);
                            CHECK(overflows || (fabsf(back) >= 65504 && fabsf(back) <= 65536), "%s (%d): %a became %a",
                                  format->name, how, from_bits(finite[j] | top), back);
                        }
                        s = written(format, from_bits(0x7f7fffff | top), how, word[k], &back);
                        int largest = format->bits == 8 ? 127 : format->bits == 16 ? 0x7ff8 : 0;
                        CHECK(format->residual || extra_of(format, &s, 0) == largest,
                              "%s (%d): the largest number has error code %d", format->name, how,
                              extra_of(format, &s, 0));
                    }
    }
    TEST("states: what rounds to zero is +0, the smallest half stays, zero bytes are +0") {
        for (int f = 0; f < FORMATS; f++) {
            float back, out[HSTEP_TILE];
            struct stored zero;
            memset(&zero, 0, sizeof zero);
            decode(best(), formats[f].format, &zero, out);
            CHECK(to_bits(out[0]) == 0, "%s: zero bytes decode to %a", formats[f].name, out[0]);
            static const float lost[] = {-0.0f, -0x1p-149f, -0x1p-128f, 0x1p-126f, -0x1p-60f};
            static const float kept[] = {0x1p-24f, -0x1p-24f, -1.5f};
            for (int k = 0; k < 5; k++) {
                struct stored s = written(&formats[f], lost[k], 1, word[1], &back);
                CHECK(to_bits(back) == 0 && s.code[0] == 0 && extra_of(&formats[f], &s, 0) == 0,
                      "%s: the state %a became %a (%04x)", formats[f].name, lost[k], back, s.code[0]);
            }
            for (int k = 0; k < 3; k++) {
                written(&formats[f], kept[k], 1, word[1], &back);
                CHECK(back == kept[k], "%s: the state %a became %a", formats[f].name, kept[k], back);
            }
            struct stored s = written(&formats[f], -0x1p-25f, 1, word[1], &back);
            CHECK(f != 0 || (to_bits(back) == 0 && s.code[0] == 0), "f16: the state -2^-25 became %a (%04x)", back,
                  s.code[0]);
            s = written(&formats[f], -0.0f, 0, word[1], &back);
            CHECK((formats[f].residual || to_bits(back) == 0x80000000u) && s.code[0] == 0x8000,
                  "%s: the weight -0 became %a", formats[f].name, back);
        }
    }
    TEST("f16-kahan comes back from the end of its range at once") {
        float back, change[HSTEP_TILE];
        struct stored s = written(&formats[2], 1e6f, 0, word[2], &back);
        for (int i = 0; i < HSTEP_TILE; i++) change[i] = 1000;
        apply(best(), HSTEP_FORMAT_f16_kahan, &s, change, half_words);
        decode(best(), HSTEP_FORMAT_f16_kahan, &s, change);
        CHECK(fabsf(change[0] - (back - 1000)) < 0.1f && back <= 65536, "%a minus 1000 is %a", back, change[0]);
    }
}

/* ---- Instruction sets -------------------------------------------------------------------------------------------- */

static int same_value(float a, float b) { return to_bits(a) == to_bits(b) || (isnan(a) && isnan(b)); }

/* Returns any bits, or numbers around the range of a half, or its ends. */
static float any_value(struct source *s)
{
    static const uint32_t ends[] = {0,          1,          0x007fffff, 0x00800000, 0x2b000000, 0x2b800000, 0x32ffffff,
                                    0x33000000, 0x33000001, 0x33800000, 0x36ffffff, 0x37000000, 0x387fffff, 0x38800000,
                                    0x3f800000, 0x477fdfff, 0x477fe000, 0x477fefff, 0x477ff000, 0x47800000, 0x4e800000,
                                    0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000};
    uint64_t r = next64(s);
    if (r % 8 == 0) return from_bits(ends[(r >> 8) % (COUNT(ends))] | (uint32_t)(r >> 32 & 0x80000000u));
    if (r % 8 < 3) return from_bits((uint32_t)(r >> 32));
    return from_bits((uint32_t)(r >> 32 & 0x807fffffu) | (uint32_t)(80 + r / 8 % 68) << 23);
}

static void compare_stored(const struct half_format *f, const char *isa, const char *what, const struct stored *a,
                           const struct stored *b)
{
    for (int i = 0; i < HSTEP_TILE; i++) {
        int nan = isnan(half_value(a->code[i])) && isnan(half_value(b->code[i]));
        CHECK(nan || a->code[i] == b->code[i], "%s on %s, %s: %04x, expected %04x", f->name, isa, what, b->code[i],
              a->code[i]);
        int ea = extra_of(f, a, i), eb = extra_of(f, b, i);
        nan = f->residual && isnan(half_value(ea & 0xffff)) && isnan(half_value(eb & 0xffff));
        CHECK(nan || ea == eb, "%s on %s, %s: extra %d, expected %d", f->name, isa, what, eb, ea);
    }
}

static void test_isas(void)
{
    TEST("every instruction set gives the bits of the scalar one, for any values, codes, changes and words") {
        const struct hstep_kernels *scalar = hstep_isa_kernels(hstep_isa_find("scalar"));
        for (int isa = 0; isa < hstep_isa_count(); isa++) {
            const struct hstep_kernels *k = hstep_isa_kernels(isa);
            if (!k || k == scalar) continue;
            struct source s = {7};
            for (int f = 0; f < FORMATS; f++)
                for (int round = 0; round < BY_LENGTH(100, 1000, 4000); round++) {
                    const struct half_format *format = &formats[f];
                    float in[HSTEP_TILE], a[HSTEP_TILE], b[HSTEP_TILE];
                    uint32_t words[HSTEP_TILE_WORDS];
                    struct stored x, y;
                    memset(&x, 0, sizeof x);
                    y = x;
                    for (int i = 0; i < HSTEP_TILE; i++)
                        in[i] = round & 1 ? any_value(&s) : (float)(0.05 * next_normal(&s));
                    random_words(&s, words);
                    encode(scalar, format->format, in, &x, words, round >> 1 & 1);
                    encode(k, format->format, in, &y, words, round >> 1 & 1);
                    compare_stored(format, hstep_isa_name(isa), "encoded", &x, &y);
                    if (round & 4)
                        for (int i = 0; i < HSTEP_TILE; i++) {
                            uint64_t r = next64(&s);
                            x.code[i] = (uint16_t)r;
                            set_extra(format, &x, i, (int)(r >> 16 & 0xffff));
                        }
                    y = x;
                    decode(scalar, format->format, &x, a);
                    decode(k, format->format, &y, b);
                    for (int i = 0; i < HSTEP_TILE; i++)
                        CHECK(same_value(a[i], b[i]), "%s on %s: %04x, %d decodes to %a, expected %a", format->name,
                              hstep_isa_name(isa), x.code[i], extra_of(format, &x, i), b[i], a[i]);
                    for (int i = 0; i < HSTEP_TILE; i++)
                        in[i] = i % 5 ? (round & 8 ? any_value(&s) : in[i] * 1e-3f) : 0;
                    random_words(&s, words);
                    apply(scalar, format->format, &x, in, words);
                    apply(k, format->format, &y, in, words);
                    compare_stored(format, hstep_isa_name(isa), "applied", &x, &y);
                }
        }
    }
}

/* ---- The count of saturated weights ------------------------------------------------------------------------------ */

static void test_saturated(void)
{
    TEST("halfstep_saturated counts the weights at either end, of any 16-bit format and in a shard") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            enum { ROWS = 5, COLUMNS = 333, HELD = 3, FIRST = 288, N = HELD * FIRST };
            halfstep_format_info info = format_info(row);
            if (!(info.roles & HALFSTEP_ROLE_WEIGHT)) continue;
            static float values[N];
            static char weight[N * 4];
            char recipe[64];
            int32_t tensor;
            uint64_t count = 77;
            snprintf(recipe, sizeof recipe, "sgd/%s", info.name);
            halfstep_optimizer *o = new_optimizer(recipe, 0, 0);
            tensor = ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = ROWS, .row_length = COLUMNS, .first_row = 1,
                                .n_rows = HELD, .n_columns = FIRST, .gradient = "f32");
            MUST(halfstep_allocate_states(o));
            double largest = info.code_bits != 16 ? 1e30 : !strcmp(info.code_dtype, "F16") ? 65504 : 0x1.fep127;
            for (int i = 0; i < N; i++) values[i] = (float)(i % 7 ? 1 : i % 2 ? -largest : largest);
            MUST(halfstep_write_slot(o, tensor, WEIGHT, weight, 0, HELD, values));
            MUST(halfstep_saturated(o, tensor, weight, &count));
            uint64_t expected = info.code_bits == 16 ? (N + 6) / 7 : 0;
            CHECK(count == expected, "%s: %llu saturated, expected %llu", info.name, (unsigned long long)count,
                  (unsigned long long)expected);
            CHECK(halfstep_saturated(NULL, tensor, weight, &count) == ARGUMENT &&
                      halfstep_saturated(o, tensor, weight, NULL) == ARGUMENT &&
                      halfstep_saturated(o, tensor, NULL, &count) == ARGUMENT &&
                      halfstep_saturated(o, -1, weight, &count) == ARGUMENT &&
                      halfstep_saturated(o, 1, weight, &count) == ARGUMENT && count == expected,
                  "%s: a wrong argument passes", info.name);
            halfstep_destroy(o);
        }
    }
    TEST("a step that leaves the range of a half saturates the weight, and the count tells") {
        for (int f = 0; f < FORMATS; f++) {
            struct one t;
            uint64_t count;
            float in[64], out[64];
            one_open(&t, text_of("sgd/%s", formats[f].name), 2, 2, 32, "f32");
            one_hyper(&t, "lr", 1);
            one_start(&t);
            one_fill(&t, WEIGHT, 60000);
            for (int i = 0; i < 64; i++) in[i] = i % 4 ? 1.0f : i % 8 ? 1e9f : -1e9f;
            one_write(&t, GRADIENT, in);
            MUST(halfstep_saturated(t.o, 0, t.weight, &count));
            CHECK(count == 0, "%s: %d saturated before the step", formats[f].name, (int)count);
            MUST(one_step(&t));
            MUST(halfstep_saturated(t.o, 0, t.weight, &count));
            one_read(&t, WEIGHT, out);
            CHECK(count == 16, "%s: %d saturated, expected 16", formats[f].name, (int)count);
            CHECK(out[0] >= 65504 && out[0] <= 65536 && out[4] == -out[0], "%s: %a and %a", formats[f].name, out[0],
                  out[4]);
            one_close(&t);
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    for (int i = 0; i < HSTEP_TILE_WORDS; i++) half_words[i] = 0x80008000u;
    TEST("every format over IEEE half is judged here") {
        for (int row = 0; row < HSTEP_FORMATS; row++) {
            int judged = strcmp(hstep_formats[row].code_dtype, "F16") != 0;
            for (int f = 0; f < FORMATS; f++) judged |= formats[f].format == row;
            CHECK(judged, "formats[] of tests/core/test_f16_formats.c lacks '%s' (docs/adding.md)",
                  hstep_formats[row].name);
        }
    }
    test_codes();
    test_stochastic();
    test_errors();
    test_special();
    test_isas();
    test_saturated();
    return test_done();
}
