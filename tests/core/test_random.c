/* Tests the random words of stochastic rounding: their exact bits, and statistics quick enough for every run. Seeds are
 * fixed, so a pass stays a pass. tests/core/random_stats.sh is the long version. */
#include <math.h>
#include <stdint.h>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "test.h"

/* docs/random.md quotes a run with larger ones. */
#ifndef WORDS_SHIFT
#define WORDS_SHIFT 18
#endif
#ifndef SEGMENT_SAMPLES
#define SEGMENT_SAMPLES 768
#endif

enum { WORDS = 1 << WORDS_SHIFT };

/* The four ways in which words lie next to each other in a training run. */
enum { ELEMENTS, WRITES, TENSORS, SLOTS, KINDS };
static const char *const kind_name[KINDS] = {"elements", "writes", "tensors", "slots"};

/* Writes of a lattice are related within 256 of them by design. Independent ones are from different 256. */
static uint64_t nth_write(int generator, uint64_t n)
{
    return generator == HSTEP_GENERATOR_LATTICE ? 257 * n + 100 : n;
}

static uint32_t word_at(int generator, struct hstep_key key, uint64_t pair)
{
    uint32_t word;
    hstep_random_words(generator, &key, pair, 1, &word);
    return word;
}

static void fill(int generator, int kind, uint64_t seed, uint32_t *out)
{
    uint64_t id = hstep_hash_name("layers.0.weight");
    struct hstep_key key = hstep_key_write(generator, seed, id, nth_write(generator, 0), 0);
    char name[48];
    switch (kind) {
    case ELEMENTS: hstep_random_words(generator, &key, 0, WORDS, out); break;
    case WRITES:
        for (int j = 0; j < WORDS; j++)
            out[j] =
                word_at(generator, hstep_key_write(generator, seed, id, nth_write(generator, (uint64_t)j), 1), 777);
        break;
    case TENSORS:
        for (int j = 0; j < WORDS; j++) {
            snprintf(name, sizeof name, "layers.%d.mlp.weight", j);
            out[j] = word_at(generator,
                             hstep_key_write(generator, seed, hstep_hash_name(name), nth_write(generator, 3), 1), 777);
        }
        break;
    default:
        for (int j = 0; j < WORDS; j++)
            out[j] = word_at(generator, hstep_key_write(generator, seed, id, nth_write(generator, 5), (uint32_t)j % 8),
                             (uint64_t)j / 8);
        break;
    }
}

/* A deviation in standard errors that no test of this file should show by chance: fewer than 10^5 values are judged. */
#define LIMIT 6.0

static uint32_t words[WORDS];

static void test_definition(void)
{
    TEST("philox: published vectors") {
        /* Random123, kat_vectors. */
        static const struct {
            int rounds;
            uint32_t ctr[4], key[2], out[4];
        } known[] = {{7, {0, 0, 0, 0}, {0, 0}, {0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48}},
                     {7, {~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662}},
                     {7,
                      {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
                      {0xA4093822, 0x299F31D0},
                      {0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A}},
                     {10, {0, 0, 0, 0}, {0, 0}, {0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}},
                     {10, {~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}},
                     {10,
                      {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344},
                      {0xA4093822, 0x299F31D0},
                      {0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}}};
        for (size_t k = 0; k < COUNT(known); k++) {
            uint32_t out[4];
            hstep_philox4x32(out, known[k].ctr, known[k].key, known[k].rounds);
            CHECK(memcmp(out, known[k].out, sizeof out) == 0, "vector %d: %08X %08X %08X %08X", (int)k, out[0], out[1],
                  out[2], out[3]);
        }
    }
    TEST("generators: names and pinned ids") {
        CHECK(hstep_generator_find("philox7") == 1 && hstep_generator_find("mixer") == 2 &&
                  hstep_generator_find("lattice") == 3,
              "an id has changed");
        CHECK(hstep_generator_find("Philox7") == 0 && hstep_generator_find("") == 0, "a wrong name is found");
        for (int row = 0; row < HSTEP_GENERATOR_COUNT; row++) {
            int id = hstep_generator_id(row);
            CHECK(id > 0 && hstep_generator_find(hstep_generator_name(id)) == id, "row %d", row);
            CHECK(hstep_generator_title(id) && hstep_generator_title(id)[0], "row %d has no title", row);
        }
        CHECK(hstep_generator_id(HSTEP_GENERATOR_COUNT) == 0 && !hstep_generator_name(0), "a row outside the table");
    }
    TEST("generators: pinned words") {
        /* Computed by a second implementation, in Python integers, from the text of docs/random.md. */
        static const uint32_t known[][8] = {
            {0x03430178, 0x40E64372, 0x4F20E757, 0x538C4D29, 0x92AC4D14, 0x9E06C8C7, 0x2D6141EB, 0x86A6AEC3},
            {0x48225031, 0x87D43CBD, 0xB397101E, 0xBE1F247F, 0x5EEEB6E7, 0xE6167050, 0x3A6CB248, 0x8245101D},
            {0xA7020CFF, 0x71B9C47F, 0xE5BAE460, 0x96734194, 0x39FF1766, 0x6A9E1E0D, 0x2725FCAF, 0x17DDA336}};
        static const uint64_t pairs[8] = {0, 1, 2, 3, 32767, 32768, 0x123456789, UINT64_MAX >> 1};
        for (int generator = 1; generator <= 3; generator++) {
            struct hstep_key key =
                hstep_key_write(generator, 0x0123456789ABCDEFu, hstep_hash_name("model.embed"), 0x89ABCDEF012345u, 200);
            for (int k = 0; k < 8; k++) {
                uint32_t word = word_at(generator, key, pairs[k]);
                CHECK(word == known[generator - 1][k], "%s pair %llu: 0x%08X", hstep_generator_name(generator),
                      (unsigned long long)pairs[k], (unsigned)word);
            }
        }
        CHECK(hstep_hash_name("model.embed") == 0x347A060D2A4A16A0u, "hash 0x%016llX",
              (unsigned long long)hstep_hash_name("model.embed"));
        CHECK(hstep_hash_name("") == 0xF52A15E9A9B5E89Bu, "hash of the empty name 0x%016llX",
              (unsigned long long)hstep_hash_name(""));
    }
    TEST("generators: any part of a strand equals the whole") {
        for (int row = 0; row < HSTEP_GENERATOR_COUNT; row++) {
            int generator = hstep_generator_id(row);
            struct hstep_key key = hstep_key_write(generator, 5, 6, 7, 8);
            uint64_t base = (uint64_t)1 << 33;
            static uint32_t part[40000];
            hstep_random_words(generator, &key, base, WORDS, words);
            for (int k = 0; k < 300; k++) {
                uint32_t first = (uint32_t)k * 811u % 200000u, n = k % 3 ? (uint32_t)k : 40000;
                hstep_random_words(generator, &key, base + first, n, part);
                CHECK(memcmp(part, words + first, n * sizeof part[0]) == 0, "%s: pairs %u .. + %u differ",
                      hstep_generator_name(generator), first, n);
            }
        }
    }
    TEST("generators: the kernels of every instruction set give the same words") {
        for (int isa = 0; isa < hstep_isa_count(); isa++) {
            const struct hstep_kernels *kernels = hstep_isa_kernels(isa);
            for (int row = 0; kernels && row < HSTEP_GENERATOR_COUNT; row++)
                for (uint64_t k = 0; k < 600; k++) {
                    static _Alignas(64) uint32_t got[HSTEP_TILE_WORDS], wanted[HSTEP_TILE_WORDS];
                    int generator = hstep_generator_id(row), n = 16 * (1 + (int)k % 8);
                    uint64_t first = k << 35 | (k * 592 % (HSTEP_SEGMENT_WORDS - HSTEP_TILE_WORDS));
                    struct hstep_key key = hstep_key_write(generator, k, 6, k, 8);
                    kernels->random[row](&key, first, got, n);
                    hstep_random_words(generator, &key, first, (size_t)n, wanted);
                    CHECK(memcmp(got, wanted, (size_t)n * sizeof *got) == 0, "%s: %s, write %d", hstep_isa_name(isa),
                          hstep_generator_name(generator), (int)k);
                }
        }
    }
    TEST("strands: no two alike") {
        enum { STREAMS = 1 << 15 };
        static uint64_t start[STREAMS];
        for (int row = 0; row < HSTEP_GENERATOR_COUNT; row++) {
            int generator = hstep_generator_id(row), n = 0;
            for (uint64_t seed = 0; seed < 4; seed++)
                for (uint64_t id = 1; id <= 16; id++)
                    for (uint64_t write = 0; write < 32; write++)
                        for (uint32_t slot = 0; slot < 16; slot++) {
                            struct hstep_key key = hstep_key_write(generator, seed, id, write, slot);
                            uint32_t two[2];
                            hstep_random_words(generator, &key, 0, 2, two);
                            start[n++] = (uint64_t)two[0] << 32 | two[1];
                        }
            /* An open-addressing set. 64-bit values of independent strands coincide with probability 3e-11. */
            static uint64_t set[2 * STREAMS];
            memset(set, 0, sizeof set);
            int equal = 0;
            for (int k = 0; k < n; k++) {
                uint64_t at = start[k] % (2 * STREAMS);
                while (set[at] && set[at] != start[k]) at = (at + 1) % (2 * STREAMS);
                equal += set[at] == start[k];
                set[at] = start[k];
            }
            CHECK(equal == 0, "%s: %d of %d strands begin alike", hstep_generator_name(generator), equal, n);
        }
        struct hstep_key a = hstep_key_strand(1, 2, (uint64_t)1 << 32, 3), b = hstep_key_strand(1, 2, 0, 3),
                         c = hstep_key_strand(1, 2, (uint64_t)1 << 55, 3);
        CHECK(memcmp(&a, &b, sizeof a) && memcmp(&b, &c, sizeof b) && memcmp(&a, &c, sizeof a),
              "high bits of the write counter do not reach the key");
    }
}

/* Returns a chi-square of `degrees` as a standard normal deviate (Wilson and Hilferty). */
static double chi_square_deviate(double chi_square, double degrees)
{
    double v = 2 / (9 * degrees);
    return (cbrt(chi_square / degrees) - (1 - v)) / sqrt(v);
}

static void test_bytes(int generator, int kind)
{
    for (int byte = 0; byte < 4; byte++) {
        static int count[256];
        memset(count, 0, sizeof count);
        for (int j = 0; j < WORDS; j++) count[words[j] >> 8 * byte & 255]++;
        double chi_square = 0, expected = WORDS / 256.0;
        for (int k = 0; k < 256; k++) chi_square += (count[k] - expected) * (count[k] - expected) / expected;
        double z = chi_square_deviate(chi_square, 255);
        CHECK(fabs(z) < LIMIT, "%s along %s: byte %d has chi-square %.1f at 255 degrees",
              hstep_generator_name(generator), kind_name[kind], byte, chi_square);
    }
}

/* r^ of the halves at a lag, in standard errors. which: low-low, high-high, low-high, high-low. */
static double correlation(const uint32_t *w, int n, int lag, int which)
{
    double sum = 0, variance = (65536.0 * 65536.0 - 1) / 12;
    int shift_a = which & 1 ? 16 : 0, shift_b = which == 1 || which == 2 ? 16 : 0;
    for (int j = 0; j + lag < n; j++)
        sum += ((double)(w[j] >> shift_a & 65535) - 32767.5) * ((double)(w[j + lag] >> shift_b & 65535) - 32767.5);
    return sum / variance / sqrt(n - lag);
}

static void test_correlations(int generator, int kind)
{
    static const int lags[] = {1,  2,   3,   4,   5,    7,    8,    15,    16,    17,    31,    32,
                               64, 100, 128, 256, 1000, 1024, 4096, 16384, 32767, 32768, 32769, 65536};
    double z = correlation(words, WORDS, 0, 2);
    CHECK(fabs(z) < 5, "%s along %s: halves of one word, r = %.2f standard errors", hstep_generator_name(generator),
          kind_name[kind], z);
    for (size_t k = 0; k < COUNT(lags); k++)
        for (int which = 0; which < 4; which++) {
            z = correlation(words, WORDS, lags[k], which);
            CHECK(fabs(z) < 5, "%s along %s: lag %d, halves %d, r = %.2f / sqrt(n)", hstep_generator_name(generator),
                  kind_name[kind], lags[k], which, z);
        }
}

/* Counts how often adding the random half carries into the kept half. The share must be f / 65536. */
static void test_bias(int generator, int kind)
{
    static const uint32_t ladder[] = {1,    2,     3,     5,     16,    64,    100,   255,   256,   257,  1024,
                                      4096, 10000, 16384, 32767, 32768, 32769, 49152, 65280, 65500, 65535};
    for (size_t k = 0; k < COUNT(ladder); k++)
        for (int half = 0; half < 2; half++) {
            int up = 0;
            for (int j = 0; j < WORDS; j++) up += ((words[j] >> 16 * half & 65535) + ladder[k]) >> 16;
            double p = ladder[k] / 65536.0, mean = WORDS * p, error = sqrt(WORDS * p * (1 - p));
            CHECK(fabs(up - mean) < 5 * error + 1,
                  "%s along %s: f = %u, half %d rounded up %d times, expected %.0f +- %.0f",
                  hstep_generator_name(generator), kind_name[kind], ladder[k], half, up, mean, error);
        }
    /* Counts neighbours that both carry at small f, because large values must not come in pairs. */
    int together = 0;
    for (int j = 0; j + 1 < WORDS; j++)
        for (int half = 0; half < 2; half++) {
            uint32_t a = words[j] >> 16 * half & 65535, b = (half ? words[j + 1] : words[j] >> 16) & 65535;
            together += a >= 65536 - 1024 && b >= 65536 - 1024;
        }
    double mean = 2.0 * (WORDS - 1) / 4096;
    CHECK(fabs(together - mean) < 5 * sqrt(mean), "%s along %s: %d neighbours both round up at f = 1024, expected %.0f",
          hstep_generator_name(generator), kind_name[kind], together, mean);
}

/* Compares every bit of a word with every bit of the word `lag` later. */
static void test_bit_pairs(int generator, int kind, int lag, int n)
{
    double worst = 0;
    for (int turn = 0; turn < 32; turn++) {
        int equal[32] = {0};
        for (int j = 0; j < n; j++) {
            uint32_t b = words[j + lag], x = words[j] ^ (turn ? b >> turn | b << (32 - turn) : b);
            for (int k = 0; k < 32; k++) equal[k] += x >> k & 1;
        }
        for (int k = 0; k < 32; k++) {
            double z = (equal[k] - n / 2.0) / sqrt(n / 4.0);
            if (fabs(z) > fabs(worst)) worst = z;
        }
    }
    CHECK(fabs(worst) < LIMIT, "%s along %s: two bits at lag %d agree by %.2f standard errors",
          hstep_generator_name(generator), kind_name[kind], lag, worst);
}

/* Compares all pairs of positions in a segment over many segment keys. This is the worst case of a mixer whose index
 * has 15 bits. */
static void test_segment_lags(void)
{
    /* Every sample of a lag has a key of its own. Otherwise the last lags, with few positions, would count some
     * twice. */
    enum { KEYS = 1 << 16, SAMPLES = SEGMENT_SAMPLES };
    _Static_assert(SAMPLES <= KEYS, "more samples than keys");
    static struct hstep_key keys[KEYS];
    struct hstep_key strand = hstep_key_strand(11, 12, 13, 14);
    for (int j = 0; j < KEYS; j++) keys[j] = hstep_key_segment(&strand, (uint64_t)j);
    double variance = (65536.0 * 65536.0 - 1) / 12, worst = 0, squares = 0;
    int worst_lag = 0, judged = 0;
    for (uint32_t lag = 1; lag < HSTEP_SEGMENT_WORDS; lag++) {
        double sum[4] = {0};
        for (uint32_t j = 0; j < SAMPLES; j++) {
            uint32_t i = (j * 2654435761u + lag * 40503u) % (HSTEP_SEGMENT_WORDS - lag);
            const struct hstep_key *key = &keys[(j + lag * 31) % KEYS];
            uint32_t a = hstep_mixer_word(key, i), b = hstep_mixer_word(key, i + lag);
            double a0 = (a & 65535) - 32767.5, a1 = (a >> 16) - 32767.5, b0 = (b & 65535) - 32767.5,
                   b1 = (b >> 16) - 32767.5;
            sum[0] += a0 * b0;
            sum[1] += a1 * b1;
            sum[2] += a0 * b1;
            sum[3] += a1 * b0;
        }
        for (int k = 0; k < 4; k++) {
            double z = sum[k] / variance / sqrt(SAMPLES);
            squares += z * z;
            judged++;
            if (fabs(z) > worst) worst = fabs(z), worst_lag = (int)lag;
        }
    }
    double spread = (squares / judged - 1) / sqrt(2.0 / judged);
    CHECK(worst < LIMIT, "mixer: r = %.2f standard errors at lag %d of a segment", worst, worst_lag);
    CHECK(fabs(spread) < LIMIT, "mixer: correlations within a segment scatter by %.2f standard errors too much",
          spread);
}

/* Flipping any input bit must flip each output bit half of the time. For a lattice's write counter this holds from bit
 * 8 on. */
static void test_avalanche(int generator)
{
    enum { TRIALS = 512 };
    int shift = generator == HSTEP_GENERATOR_LATTICE ? HSTEP_LATTICE_SHIFT : 0;
    for (int bit = 0; bit < 64 + 64 + 56 + 8; bit++) {
        if (bit - 128 + shift == 63) continue; /* counts end below */
        int flips[32] = {0}, total = 0;
        for (int j = 0; j < TRIALS; j++) {
            uint64_t seed = (uint64_t)j * 3, id = (uint64_t)j * 7 + 1, write = (uint64_t)j * 5 << shift;
            uint32_t slot = (uint32_t)j % 200, pair = (uint32_t)j * 97;
            uint32_t before = word_at(generator, hstep_key_write(generator, seed, id, write, slot), pair);
            if (bit < 64) seed ^= (uint64_t)1 << bit;
            else if (bit < 128) id ^= (uint64_t)1 << (bit - 64);
            else if (bit < 184) write ^= (uint64_t)1 << (bit - 128 + shift);
            else slot ^= 1u << (bit - 184);
            uint32_t change = before ^ word_at(generator, hstep_key_write(generator, seed, id, write, slot), pair);
            for (int k = 0; k < 32; k++) {
                flips[k] += change >> k & 1;
                total += change >> k & 1;
            }
        }
        double z = (total - 16.0 * TRIALS) / sqrt(8.0 * TRIALS);
        CHECK(fabs(z) < LIMIT, "%s: input bit %d flips %d of %d output bits", hstep_generator_name(generator), bit,
              total, 32 * TRIALS);
        for (int k = 0; k < 32; k++) {
            z = (flips[k] - TRIALS / 2.0) / sqrt(TRIALS / 4.0);
            CHECK(fabs(z) < LIMIT, "%s: input bit %d flips output bit %d in %d of %d trials",
                  hstep_generator_name(generator), bit, k, flips[k], TRIALS);
        }
    }
}

static void test_names(void)
{
    TEST("tensor ids: names that differ little have unrelated ids") {
        enum { NAMES = 50000 };
        static uint64_t set[4 * NAMES];
        memset(set, 0, sizeof set);
        int equal = 0, low = 0;
        for (int j = 0; j < NAMES; j++) {
            char name[64], other[64];
            snprintf(name, sizeof name, "model.layers.%d.%s", j / 10, &"a\0b\0c\0d\0e\0f\0g\0h\0i\0j"[j % 10 * 2]);
            snprintf(other, sizeof other, "model.layers.%d.%c", j / 10, 'a' + (j + 1) % 10);
            uint64_t h = hstep_hash_name(name), at = h % (4 * NAMES), change = h ^ hstep_hash_name(other);
            while (set[at] && set[at] != h) at = (at + 1) % (4 * NAMES);
            equal += set[at] == h;
            set[at] = h;
            int flips = 0;
            for (; change; change &= change - 1) flips++;
            low += flips < 10;
        }
        CHECK(equal == 0, "%d of %d names share an id", equal, NAMES);
        EQUAL(low, 0);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_definition();
    test_names();
    for (int row = 0; row < HSTEP_GENERATOR_COUNT; row++) {
        int generator = hstep_generator_id(row);
        static char name[KINDS][80], avalanche[80];
        static const int bit_lags[] = {1, 2, 3, 4, 16, 1024};
        for (int kind = 0; kind < KINDS; kind++) {
            snprintf(name[kind], sizeof name[kind], "%s along %s: bytes, correlations, bias",
                     hstep_generator_name(generator), kind_name[kind]);
            TEST(name[kind]) {
                fill(generator, kind, 42, words);
                test_bytes(generator, kind);
                test_correlations(generator, kind);
                test_bias(generator, kind);
                for (size_t k = 0; k < COUNT(bit_lags); k++) test_bit_pairs(generator, kind, bit_lags[k], WORDS / 8);
            }
        }
        snprintf(avalanche, sizeof avalanche, "%s: avalanche of seed, tensor, write, slot",
                 hstep_generator_name(generator));
        TEST(avalanche) test_avalanche(generator);
    }
    TEST("mixer: all 32,767 lags of a segment") test_segment_lags();
    return test_done();
}
