/* Compares every op of the vector vocabulary on every instruction set of this processor with the scalar header. The
 * scalar header is compared with definitions written a second way. Then tests which instruction set is chosen, and the
 * floating-point environment. Inputs are fixed: a failure repeats on every run. Over 500 lines because every op has a
 * second definition. */
#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/dispatch.h"
#include "test.h"
#include "test_vec.h"

#define ALIGNED __attribute__((aligned(64)))
#define N 32768

/* A row that was not compiled leaves its symbol NULL. */
#define ISA(name, processor, flags) extern const struct vec_unit vec_unit_##name __attribute__((weak));
#include "vec/isas.def"
#undef ISA
static const struct vec_unit *const units[] = {
#define ISA(name, processor, flags) &vec_unit_##name,
#include "vec/isas.def"
#undef ISA
};

static uint64_t random_state;
static uint32_t random_word(void)
{
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, 4);
    return x;
}
static int is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

/* Each also with the other sign. */
static const uint32_t special[] = {
    0x00000000, 0x00000001, 0x00000002, 0x00000003, 0x003fffff, 0x00400000, 0x007ffffe, 0x007fffff, /* subnormals */
    0x00800000, 0x00800001, 0x00ffffff, 0x01000000, 0x1fffffff, 0x20000000, 0x33000000, 0x33800000, /* tiny */
    0x387fffff, 0x38800000, 0x3effffff, 0x3f000000, 0x3f000001, 0x3f7fffff, 0x3f800000, 0x3f800001, /* around 1 */
    0x3fc00000, 0x40000000, 0x40200000, 0x40400000, 0x477fefff, 0x477ff000, 0x4affffff, 0x4b000000, /* 2^23 */
    0x4b7fffff, 0x4b800000, 0x4effffff, 0x4f000000, 0x5f000000, 0x7effffff, 0x7f000000, 0x7f7effff, /* 2^31 .. */
    0x7f7f0000, 0x7f7ffffe, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fffffff, /* Inf, NaN */
};
#define SPECIALS (2 * (int)(COUNT(special)))
static uint32_t special_at(int i) { return special[i / 2 % (SPECIALS / 2)] ^ (i & 1 ? 0x80000000u : 0); }

/* ---- Inputs of three operands ---- */

static const char *const set_names[] = {"special values", "random bits", "near one", "sparse", "halves"};
#define SETS ((int)(COUNT(set_names)))

/* Makes the inputs. Returns their number, at most N and a multiple of 256. */
static int64_t make_set(int set, uint32_t *a, uint32_t *b, uint32_t *c)
{
    random_state = (uint64_t)set + 1;
    if (set == 0) {
        int64_t n = (int64_t)SPECIALS * SPECIALS;
        for (int64_t i = 0; i < n; i++) {
            a[i] = special_at((int)(i / SPECIALS));
            b[i] = special_at((int)(i % SPECIALS));
            c[i] = special_at((int)(random_word() % SPECIALS));
        }
        return n;
    }
    for (int64_t i = 0; i < N; i++) {
        uint32_t *const at[3] = {a + i, b + i, c + i};
        for (int j = 0; j < 3; j++) {
            uint32_t r = random_word();
            switch (set) {
            case 1: /* any */ *at[j] = r; break;
            case 2: /* exponents -4 .. 3, for cancellation and rounding */
                *at[j] = (r & 0x81ffffffu) + 0x3d800000u;
                break;
            case 3: /* lanes mostly equal: a mask with one lane set, or none */
                *at[j] = j == 0 && r % 24 == 0 ? (r & 1 ? 0x3f800000u : 0xbf800000u) : 0;
                break;
            default: /* integers and halves */ *at[j] = bits_of((float)((int32_t)r >> (r & 31)) * 0.5f);
            }
        }
    }
    return N;
}

_Static_assert(SPECIALS *SPECIALS <= N && SPECIALS * SPECIALS % 256 == 0, "the special pairs do not fit");

static void test_lanes(const struct vec_unit *scalar, const struct vec_unit *unit)
{
    static ALIGNED uint32_t a[N], b[N], c[N], expected[N], got[N];
    for (int set = 0; set < SETS; set++) {
        int64_t n = make_set(set, a, b, c);
        for (int op = 0; scalar->lane[op].name; op++) {
            const struct vec_lane *s = scalar->lane + op, *u = unit->lane + op;
            static ALIGNED uint32_t small[N];
            const uint32_t *first = a;
            if (s->kind == SMALL) {
                for (int64_t i = 0; i < n; i++)
                    small[i] = (a[i] & 0x7fffffffu) < 0x4f000000u ? a[i] : a[i] & 0xbfffffffu;
                first = small;
            }
            s->run(first, b, c, expected, n);
            memset(got, 0x5a, sizeof got);
            u->run(first, b, c, got, n);
            if (!memcmp(expected, got, (size_t)n * 4)) continue;
            for (int64_t i = 0; i < n; i++) {
                if (expected[i] == got[i]) continue;
                if (s->kind == FLOAT && is_nan_bits(expected[i]) && is_nan_bits(got[i])) continue;
                CHECK(0, "%s (%s, %d): a %08x b %08x c %08x: scalar %08x, %s %08x", s->name, set_names[set], (int)i,
                      first[i], b[i], c[i], expected[i], unit->name, got[i]);
            }
        }
    }
}

/* ---- Memory ---- */

/* One readable page between two others. An access outside a group at the page's edge is a fault. */
static char *guarded_page(size_t *bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *p = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page, page, PROT_READ | PROT_WRITE)) return NULL;
    *bytes = page;
    return p + page;
}

/* Two of them: one for the scalar unit's writes, one for the unit under test. */
static char *page[2];
static size_t page_bytes;

static void check_load(const struct vec_load *s, const struct vec_load *u, const char *p)
{
    ALIGNED uint32_t expected[2][16], got[2][16];
    s->run(p, expected[0], expected[1]);
    u->run(p, got[0], got[1]);
    if (!memcmp(expected, got, sizeof got)) return;
    for (int i = 0; i < 32; i++)
        CHECK(expected[i % 2][i / 2] == got[i % 2][i / 2],
              "%s: element %d at address %d modulo 64: scalar %08x, got %08x", s->name, i, (int)((uintptr_t)p % 64),
              expected[i % 2][i / 2], got[i % 2][i / 2]);
}

static void test_loads(const struct vec_unit *scalar, const struct vec_unit *unit)
{
    random_state = 100;
    for (int op = 0; scalar->load[op].name; op++) {
        const struct vec_load *s = scalar->load + op, *u = unit->load + op;
        size_t size = 32 * (size_t)s->bytes;
        for (size_t i = 0; i < page_bytes; i++) page[0][i] = (char)random_word();
        for (size_t offset = 0; offset <= 64; offset++) {
            check_load(s, u, page[0] + offset);
            check_load(s, u, page[0] + page_bytes - size - offset);
        }
        /* Every code in even and in odd elements; every pair of bytes. */
        for (uint32_t first = 0; first < 65536 && s->bytes < 4; first += 16) {
            ALIGNED uint16_t codes[32];
            ALIGNED uint8_t bytes[32];
            for (uint32_t i = 0; i < 16; i++) {
                codes[2 * i] = (uint16_t)(first + i);
                codes[2 * i + 1] = (uint16_t)((first + i) * 40503u + 12345u);
                bytes[2 * i] = (uint8_t)(first + i);
                bytes[2 * i + 1] = (uint8_t)((first + i) >> 8);
            }
            check_load(s, u, s->bytes == 2 ? (const char *)codes : (const char *)bytes);
        }
        for (int first = 0; first < SPECIALS && s->bytes == 4; first += 32) {
            ALIGNED uint32_t patterns[32];
            for (int i = 0; i < 32; i++) patterns[i] = special_at(first + i);
            check_load(s, u, (const char *)patterns);
        }
    }
}

static int wrong_store(const struct vec_store *s, const char *expected, const char *got, const uint32_t *e,
                       const uint32_t *o)
{
    for (int i = 0; i < 32; i++)
        if (memcmp(expected + i * s->bytes, got + i * s->bytes, (size_t)s->bytes)) {
            uint32_t x = 0, y = 0, from = i % 2 ? o[i / 2] : e[i / 2];
            memcpy(&x, expected + i * s->bytes, (size_t)s->bytes);
            memcpy(&y, got + i * s->bytes, (size_t)s->bytes);
            CHECK(0, "%s: element %d of pattern %08x: scalar %0*x, got %0*x", s->name, i, from, 2 * s->bytes, x,
                  2 * s->bytes, y);
            return 1;
        }
    return 0;
}

/* In the open, values only. */
static void check_store(const struct vec_store *s, const struct vec_store *u, const uint32_t *e, const uint32_t *o)
{
    ALIGNED char expected[128] = {0}, got[128] = {0};
    s->run(expected, e, o);
    u->run(got, e, o);
    if (memcmp(expected, got, sizeof got)) wrong_store(s, expected, got, e, o);
}

/* The whole page must come out the same, because nothing beside the group may be written. */
static void check_store_at(const struct vec_store *s, const struct vec_store *u, size_t offset)
{
    ALIGNED uint32_t e[16], o[16];
    for (int i = 0; i < 16; i++) e[i] = random_word(), o[i] = random_word();
    for (size_t i = 0; i < page_bytes; i++) page[0][i] = (char)(i * 73 + 41);
    memcpy(page[1], page[0], page_bytes);
    s->run(page[0] + offset, e, o);
    u->run(page[1] + offset, e, o);
    if (!memcmp(page[0], page[1], page_bytes) || wrong_store(s, page[0] + offset, page[1] + offset, e, o)) return;
    for (size_t i = 0; i < page_bytes; i++)
        CHECK(page[0][i] == page[1][i], "%s at offset %d wrote byte %d, outside its %d", s->name, (int)offset,
              (int)i - (int)offset, 32 * s->bytes);
}

static void test_stores(const struct vec_unit *scalar, const struct vec_unit *unit)
{
    random_state = 200;
    for (int op = 0; scalar->store[op].name; op++) {
        const struct vec_store *s = scalar->store + op, *u = unit->store + op;
        for (size_t offset = 0; offset <= 64; offset++) {
            check_store_at(s, u, offset);
            check_store_at(s, u, page_bytes - 32 * (size_t)s->bytes - offset);
        }
        ALIGNED uint32_t e[16], o[16];
        /* Every half in either place, the rest of the word random; bytes: every pair. */
        for (uint32_t first = 0; first < 65536; first += 16) {
            for (uint32_t i = 0; i < 16; i++) {
                e[i] = (first + i) << 16 | (random_word() & 0xffff);
                o[i] = ((first + i) * 40503u + 12345u) << 16 | (random_word() & 0xffff);
            }
            check_store(s, u, e, o);
            for (uint32_t i = 0; i < 16; i++) {
                e[i] = (random_word() & 0xffff0000u) | (first + i);
                o[i] = (random_word() & 0xffffff00u) | (first + i) >> 8;
            }
            check_store(s, u, e, o);
        }
        for (int first = 0; first < SPECIALS; first += 32) {
            for (int i = 0; i < 16; i++) e[i] = special_at(first + 2 * i), o[i] = special_at(first + 2 * i + 1);
            check_store(s, u, e, o);
        }
    }
}

static const struct vec_load *find_load(const struct vec_unit *unit, const char *name)
{
    const struct vec_load *op = unit->load;
    while (op->name && strcmp(op->name, name)) op++;
    return op;
}
static const struct vec_store *find_store(const struct vec_unit *unit, const char *name)
{
    const struct vec_store *op = unit->store;
    while (op->name && strcmp(op->name, name)) op++;
    return op;
}

/* Calls check with every upper half of a float together with chosen lower halves. These cover the three mantissa bits
 * that a half still keeps. They lie around the tie and the ends of the thirteen bits that it drops. */
static void each_float_for_half(void (*check)(const void *context, const uint32_t *e, const uint32_t *o),
                                const void *context)
{
    static const uint16_t ends[] = {0, 1, 0x0ffe, 0x0fff, 0x1000, 0x1001, 0x1ffe, 0x1fff};
    ALIGNED uint32_t e[16], o[16];
    random_state = 300;
    for (uint32_t upper = 0; upper < 65536; upper++) {
        int n = 0;
        for (uint32_t kept = 0; kept < 8; kept++)
            for (int i = 0; i < 8; i++) {
                uint32_t x = upper << 16 | kept << 13 | ends[i];
                if (n % 2) o[n / 2] = x;
                else e[n / 2] = x;
                if (++n < 32) continue;
                check(context, e, o);
                n = 0;
            }
        for (int i = 0; i < 16; i++)
            e[i] = upper << 16 | (random_word() & 0xffff), o[i] = e[i] ^ (random_word() & 0xffff);
        check(context, e, o);
    }
}

/* Ties between subnormal halves lie elsewhere. Calls check with every midpoint between neighbours, and the floats
 * beside it. */
static void each_tie_of_halves(const struct vec_unit *scalar,
                               void (*check)(const void *context, const uint32_t *e, const uint32_t *o),
                               const void *context)
{
    ALIGNED uint32_t e[16], o[16], value[2][16];
    const struct vec_load *decode = find_load(scalar, "vp_load_f16");
    for (uint32_t first = 0; first < 0x7c00; first += 16) {
        ALIGNED uint16_t codes[32];
        for (uint32_t i = 0; i < 16; i++)
            codes[2 * i] = (uint16_t)(first + i), codes[2 * i + 1] = (uint16_t)(first + i + 1);
        decode->run((const char *)codes, value[0], value[1]);
        for (int beside = -1; beside <= 1; beside++) {
            for (int i = 0; i < 16; i++) {
                /* Above the last finite half its own unit counts on. */
                float low = float_of(value[0][i]),
                      high = first + (uint32_t)i == 0x7bff ? 65536.0f : float_of(value[1][i]);
                e[i] = bits_of((low + high) * 0.5f) + (uint32_t)beside;
                o[i] = e[i] | 0x80000000u;
            }
            check(context, e, o);
        }
    }
}

struct store_pair {
    const struct vec_store *s, *u;
};
static void check_half_store(const void *context, const uint32_t *e, const uint32_t *o)
{
    const struct store_pair *pair = context;
    check_store(pair->s, pair->u, e, o);
}

static void test_halves(const struct vec_unit *scalar, const struct vec_unit *unit)
{
    struct store_pair pair = {find_store(scalar, "vp_store_f16"), find_store(unit, "vp_store_f16")};
    each_float_for_half(check_half_store, &pair);
    each_tie_of_halves(scalar, check_half_store, &pair);
}

/* ---- Sums ---- */

static void test_sums(const struct vec_unit *scalar, const struct vec_unit *unit)
{
    static ALIGNED uint32_t a[N], b[N], c[N];
    for (int set = 0; set < SETS; set++) {
        int64_t n = make_set(set, a, b, c) / 32;
        for (int op = 0; scalar->sum[op].name; op++)
            for (int64_t from = 0; from < n;) {
                int64_t groups = 1 + (from * 7 + set) % 19;
                if (groups > n - from) groups = n - from;
                double expected[16], got[18] = {1.5, [17] = 1.5};
                scalar->sum[op].run(a + 32 * from, b + 32 * from, groups, expected);
                unit->sum[op].run(a + 32 * from, b + 32 * from, groups, got + 1);
                for (int i = 0; i < 16; i++)
                    CHECK(!memcmp(expected + i, got + 1 + i, 8) ||
                              (expected[i] != expected[i] && got[1 + i] != got[1 + i]),
                          "%s (%s), accumulator %d after groups %d to %d: scalar %a, %s %a", scalar->sum[op].name,
                          set_names[set], i, (int)from, (int)(from + groups), expected[i], unit->name, got[1 + i]);
                CHECK(got[0] == 1.5 && got[17] == 1.5, "va_store wrote outside its 16");
                from += groups;
            }
    }
}

/* ---- The scalar header itself ---- */

static double half_value(uint32_t h)
{
    int exponent = (int)(h >> 10 & 31), mantissa = (int)(h & 1023);
    double magnitude = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* To nearest by the division of doubles, which is exact here. */
static uint32_t half_nearest(uint32_t u)
{
    uint32_t sign = u >> 16 & 0x8000;
    double x = fabs((double)float_of(u));
    if (is_nan_bits(u)) return sign | 0x7e00 | (u >> 13 & 0x1ff);
    if (x >= 65520.0) return sign | 0x7c00;
    int exponent = -14;
    if (x >= 0x1p-14) exponent = ilogb(x);
    return sign | ((uint32_t)(exponent + 14) * 1024 + (uint32_t)rint(ldexp(x, 10 - exponent)));
}

static void check_scalar_store(const void *context, const uint32_t *e, const uint32_t *o)
{
    const struct vec_store *s = context;
    uint16_t codes[32];
    s->run((char *)codes, e, o);
    for (int i = 0; i < 32; i++) {
        uint32_t x = i % 2 ? o[i / 2] : e[i / 2];
        CHECK(codes[i] == half_nearest(x), "float %08x to half: %04x, should be %04x", x, codes[i], half_nearest(x));
    }
}

static const struct vec_lane *find_lane(const struct vec_unit *unit, const char *name)
{
    const struct vec_lane *op = unit->lane;
    while (op->name && strcmp(op->name, name)) op++;
    return op;
}

static uint32_t one_lane(const struct vec_unit *unit, const char *name, uint32_t x, uint32_t y)
{
    ALIGNED uint32_t a[256], b[256], c[256] = {0}, out[256];
    for (int i = 0; i < 256; i++) a[i] = x, b[i] = y;
    find_lane(unit, name)->run(a, b, c, out, 256);
    return out[7];
}

static void test_definitions(const struct vec_unit *scalar)
{
    static const struct {
        const char *op;
        uint32_t a, b, result;
    } table[] = {
        {"v_div0", 0x3f800000, 0x80000000, 0x00000000},
        {"v_div0", 0x7fc00000, 0x00000000, 0x00000000},
        {"v_div0", 0x3f800000, 0x40000000, 0x3f000000},
        {"v_div0", 0x80000000, 0x3f800000, 0x80000000},
        {"v_min", 0x00000000, 0x80000000, 0x80000000},
        {"v_min", 0x80000000, 0x00000000, 0x00000000},
        {"v_min", 0x7fc00000, 0x3f800000, 0x3f800000},
        {"v_min", 0x3f800000, 0x7fc00001, 0x7fc00001},
        {"v_min", 0x3f800000, 0x40000000, 0x3f800000},
        {"v_max", 0x3f800000, 0x40000000, 0x40000000},
        {"v_max", 0x00000000, 0x80000000, 0x80000000},
        {"v_max", 0x80000000, 0x00000000, 0x00000000},
        {"v_max", 0x7fc00000, 0x3f800000, 0x3f800000},
        {"v_max", 0x3f800000, 0x7fc00001, 0x7fc00001},
        {"v_sign", 0x80000000, 0, 0x00000000},
        {"v_sign", 0xffc00000, 0, 0x00000000},
        {"v_sign", 0x80000001, 0, 0xbf800000},
        {"v_sign", 0x7f800000, 0, 0x3f800000},
        {"v_sqrt", 0x80000000, 0, 0x80000000},
        {"v_sqrt", 0x00000002, 0, 0x1a800000},
        {"v_round", 0x3f000000, 0, 0},
        {"v_round", 0x3fc00000, 0, 2},
        {"v_round", 0xc0200000, 0, 0xfffffffe},
        {"v_round", 0xcf000000 - 1, 0, 0x80000080},
        {"v_from_int", 0x01000001, 0, 0x4b800000},
        {"v_from_int", 0x01000003, 0, 0x4b800002},
        {"v_from_int", 0xffffffff, 0, 0xbf800000},
        {"vi_mulhi", 0xffffffff, 0xffffffff, 0xfffffffe},
        {"vi_mulhi", 0x80000000, 0x00000006, 3},
        {"vi_mul", 0xffffffff, 0xffffffff, 1},
        {"vi_mul16", 0xffff8003, 0xffff0007, 0x00018015},
        {"vi_add16", 0xffff8003, 0x0002fffe, 0x00018001},
        {"vi_gt", 0x00000000, 0xffffffff, 1},
        {"vi_gt", 0x80000000, 0x7fffffff, 0},
        {"vi_max", 0x80000000, 0x7fffffff, 0x7fffffff},
        {"vi_min", 0xffffffff, 0x00000000, 0xffffffff},
        {"vi_andnot", 0x0ff0ff00, 0xffffffff, 0xf00f00ff},
        {"vi_sra by 31", 0x80000000, 0, 0xffffffff},
        {"vi_shr by 31", 0x80000000, 0, 1},
        {"vi_shl by 31", 0x00000003, 0, 0x80000000},
        {"v_mul", 0x00800000, 0x3f000000, 0x00400000},
        {"v_add", 0x00000001, 0x00000001, 0x00000002},
        {"v_gt", 0x7fc00000, 0, 0},
        {"v_eq", 0x80000000, 0x00000000, 1},
        {"v_lt", 0x80000001, 0x00000000, 1},
    };
    for (size_t i = 0; i < COUNT(table); i++) {
        uint32_t got = one_lane(scalar, table[i].op, table[i].a, table[i].b);
        CHECK(got == table[i].result, "%s(%08x, %08x) = %08x, should be %08x", table[i].op, table[i].a, table[i].b, got,
              table[i].result);
    }
    static ALIGNED uint32_t a[N], b[N], c[N], out[N];
    int64_t n = make_set(1, a, b, c);
    find_lane(scalar, "v_gather")->run(a, b, c, out, n);
    for (int64_t i = 0; i < n; i++)
        CHECK(out[i] == b[i / 256 * 256 + (a[i] & 255)], "v_gather, element %d, of index %d: %08x", (int)i,
              (int)(a[i] & 255), out[i]);
    find_lane(scalar, "v_lookup16")->run(a, b, c, out, n);
    for (int64_t i = 0; i < n; i++)
        CHECK(out[i] == b[i / 16 * 16 + (a[i] & 15)], "v_lookup16, element %d, of index %d: %08x", (int)i,
              (int)(a[i] & 15), out[i]);
    for (uint32_t first = 0; first < 0x10000; first += 32) {
        ALIGNED uint16_t words[32], stored[32];
        ALIGNED uint32_t half[2][16];
        for (uint32_t i = 0; i < 32; i++) words[i] = (uint16_t)(first + i);
        find_load(scalar, "vi_load_u16")->run((const char *)words, half[0], half[1]);
        for (uint32_t i = 0; i < 32; i++) {
            CHECK(half[i / 16][i % 16] == first + i, "vi_load_u16 of %04x: %08x", first + i, half[i / 16][i % 16]);
            half[i / 16][i % 16] |= 0xa5c30000u;
        }
        find_store(scalar, "vi_store_u16")->run((char *)stored, half[0], half[1]);
        CHECK(!memcmp(words, stored, sizeof words), "vi_store_u16 of codes from %04x", first);
    }
    for (uint32_t first = 0; first < 256; first += 32) {
        ALIGNED uint8_t bytes[32], stored[32];
        ALIGNED uint32_t half[2][16];
        for (uint32_t i = 0; i < 32; i++) bytes[i] = (uint8_t)(first + i);
        find_load(scalar, "vi_load_u8")->run((const char *)bytes, half[0], half[1]);
        for (uint32_t i = 0; i < 32; i++) {
            CHECK(half[i / 16][i % 16] == first + i, "vi_load_u8 of %02x: %08x", first + i, half[i / 16][i % 16]);
            half[i / 16][i % 16] |= 0xa5c30100u;
        }
        find_store(scalar, "vi_store_u8")->run((char *)stored, half[0], half[1]);
        CHECK(!memcmp(bytes, stored, sizeof bytes), "vi_store_u8 of bytes from %02x", first);
    }
    for (uint32_t first = 0; first < 4096; first += 16) {
        ALIGNED uint8_t bytes[32] = {0}, stored[32] = {0};
        ALIGNED uint32_t field[2][16];
        for (uint32_t bit = 0; bit < 16 * 12; bit++)
            bytes[8 + bit / 8] |= (uint8_t)(((first + bit / 12) >> bit % 12 & 1) << bit % 8);
        find_load(scalar, "vi_load_u12")->run((const char *)bytes, field[0], field[1]);
        for (uint32_t i = 0; i < 16; i++)
            CHECK(field[1][i] == first + i, "vi_load_u12 of %03x: %08x", first + i, field[1][i]);
        find_store(scalar, "vi_store_u12")->run((char *)stored, field[1], field[1]);
        CHECK(!memcmp(bytes + 8, stored + 8, 24), "vi_store_u12 of fields from %03x", first);
    }

    const struct vec_load *decode = find_load(scalar, "vp_load_f16");
    for (uint32_t first = 0; first < 65536; first += 32) {
        ALIGNED uint16_t codes[32];
        ALIGNED uint32_t out[2][16];
        for (uint32_t i = 0; i < 32; i++) codes[i] = (uint16_t)(first + i);
        decode->run((const char *)codes, out[0], out[1]);
        for (uint32_t i = 0; i < 32; i++) {
            uint32_t h = first + i, x = out[i % 2][i / 2], sign = (h & 0x8000) << 16;
            uint32_t expected = (h & 0x7fff) < 0x7c00    ? bits_of((float)half_value(h))
                                : (h & 0x7fff) == 0x7c00 ? sign | 0x7f800000u
                                                         : sign | 0x7fc00000u | (h & 0x3ff) << 13;
            CHECK(x == expected, "half %04x: %08x, should be %08x", h, x, expected);
        }
    }
    const struct vec_store *encode = find_store(scalar, "vp_store_f16");
    each_float_for_half(check_scalar_store, encode);
    each_tie_of_halves(scalar, check_scalar_store, encode);
}

/* ---- Which instruction set ---- */

/* Checks, in a process of its own because the choice is made once, that row `isa` is chosen, with a warning or
 * without. A choice with a warning is not the last one. */
static int chosen(const char *value, int isa, int warning)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (value) setenv("HALFSTEP_ISA", value, 1);
        else unsetenv("HALFSTEP_ISA");
        int best = hstep_isa_best(), warned = hstep_isa_warning() != NULL;
        setenv("HALFSTEP_ISA", "scalar", 1);
        const int later = warning ? hstep_isa_find("scalar") : best;
        test_leave(best == isa && warned == warning && hstep_isa_best() == later && !hstep_isa_warning() ? 0 : 1);
    }
    return test_child_status(child) == 0;
}

static void test_choice(void)
{
    int last = 0;
    EQUAL(hstep_isa_count(), (int)(COUNT(units)));
    for (int i = 0; i < hstep_isa_count(); i++) {
        const char *name = hstep_isa_name(i);
        CHECK(hstep_isa_find(name) == i, "row %d, %s, is found as row %d", i, name, hstep_isa_find(name));
        CHECK(!hstep_isa_kernels(i) == !hstep_isa_available(i), "%s: kernels and availability disagree", name);
        CHECK(units[i] || !hstep_isa_available(i), "%s is available, but no unit of this test was compiled for it",
              name);
        if (hstep_isa_available(i)) last = i;
    }
    CHECK(hstep_isa_available(hstep_isa_find("scalar")), "scalar is not available");
    CHECK(hstep_isa_find("") == -1 && hstep_isa_find("avx") == -1 && hstep_isa_find(NULL) == -1,
          "found what is no row");
    for (int i = -1; i <= hstep_isa_count(); i += hstep_isa_count() + 1)
        CHECK(!hstep_isa_name(i) && !hstep_isa_available(i) && !hstep_isa_kernels(i), "row %d exists", i);

    CHECK(chosen(NULL, last, 0), "without HALFSTEP_ISA, not row %d", last);
    CHECK(chosen("", last, 0), "with HALFSTEP_ISA empty, not row %d", last);
    CHECK(chosen("no-such", last, 1), "with an unknown HALFSTEP_ISA, not row %d and a warning", last);
    for (int i = 0; i < hstep_isa_count(); i++) {
        int available = hstep_isa_available(i);
        CHECK(chosen(hstep_isa_name(i), available ? i : last, !available), "HALFSTEP_ISA=%s was not followed",
              hstep_isa_name(i));
    }

    char text[512], cut[512];
    hstep_cpu_features(text, sizeof text);
    printf("     processor features: %s\n", text);
    for (size_t n = 1; n <= strlen(text) + 1; n++) {
        memset(cut, 'x', sizeof cut);
        hstep_cpu_features(cut, n);
        size_t length = strlen(cut);
        CHECK(length < n && !strncmp(text, cut, length) && (text[length] == ' ' || !text[length] || !length),
              "features cut to %d bytes: '%s'", (int)n, cut);
        for (size_t i = n; i < sizeof cut; i++) CHECK(cut[i] == 'x', "features wrote byte %d of %d", (int)i, (int)n);
    }
}

/* ---- Floating-point environment ---- */

/* Volatile on both sides, so that no compiler moves the arithmetic across a change of the environment. */
static volatile float one = 1.0f, minus_one = -1.0f, three = 3.0f, four = 4.0f, half = 0.5f,
                      smallest_normal = 0x1p-126f;
static volatile float result[4];

static int available(const char *name) { return hstep_isa_available(hstep_isa_find(name)); }

static void test_environment(void)
{
    static const struct {
        const char *name;
        int mode;
        uint32_t third, minus_third;
    } modes[] = {
        {"upward", FE_UPWARD, 0x3eaaaaab, 0xbeaaaaaa},
        {"downward", FE_DOWNWARD, 0x3eaaaaaa, 0xbeaaaaab},
        {"toward zero", FE_TOWARDZERO, 0x3eaaaaaa, 0xbeaaaaaa},
    };
    for (int i = 0; i < 3; i++) {
        fesetround(modes[i].mode);
        struct hstep_fp fp = hstep_fp_enter();
        result[0] = one / three;
        result[1] = minus_one / three;
        hstep_fp_leave(fp);
        result[2] = one / three;
        result[3] = minus_one / three;
        int mode = fegetround();
        fesetround(FE_TONEAREST);
        CHECK(bits_of(result[0]) == 0x3eaaaaab && bits_of(result[1]) == 0xbeaaaaab,
              "%s: inside, 1/3 and -1/3 are %08x %08x", modes[i].name, bits_of(result[0]), bits_of(result[1]));
        CHECK(mode == modes[i].mode && bits_of(result[2]) == modes[i].third &&
                  bits_of(result[3]) == modes[i].minus_third,
              "%s is not restored: %08x %08x", modes[i].name, bits_of(result[2]), bits_of(result[3]));
    }

    /* Sets the control word of a host that flushes subnormals: FTZ and DAZ of x86, FZ of AArch64. */
    uint64_t flush = available("neon") ? 1u << 24 : available("avx2") ? 0x8040u : 0;
    if (!flush) return;
    struct hstep_fp saved = hstep_fp_enter(), flushing = {saved.saved | flush};
    hstep_fp_leave(flushing);
    result[0] = smallest_normal * half;
    struct hstep_fp fp = hstep_fp_enter();
    result[1] = smallest_normal * half;
    result[2] = result[1] * four;
    hstep_fp_leave(fp);
    result[3] = smallest_normal * half;
    hstep_fp_leave(saved);
    CHECK(bits_of(result[0]) == 0 && bits_of(result[3]) == 0,
          "the host's flushing is not on, or not restored: %08x %08x", bits_of(result[0]), bits_of(result[3]));
    CHECK(bits_of(result[1]) == 0x00400000 && bits_of(result[2]) == 0x01000000, "subnormal inside: %08x, times 4: %08x",
          bits_of(result[1]), bits_of(result[2]));
    result[0] = smallest_normal * half;
    CHECK(bits_of(result[0]) == 0x00400000, "flushing stayed on: %08x", bits_of(result[0]));
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    page[0] = guarded_page(&page_bytes);
    page[1] = guarded_page(&page_bytes);
    if (!page[0] || !page[1]) {
        printf("no memory for the guarded pages\n");
        return 1;
    }

    TEST("choice of the instruction set") test_choice();
    TEST("floating-point environment") test_environment();

    const struct vec_unit *scalar = units[hstep_isa_find("scalar")];
    TEST("scalar: definitions") test_definitions(scalar);

    static const struct {
        const char *name;
        void (*run)(const struct vec_unit *scalar, const struct vec_unit *unit);
    } groups[] = {{"lanes", test_lanes},
                  {"loads", test_loads},
                  {"stores", test_stores},
                  {"halves", test_halves},
                  {"sums", test_sums}};
    char tested[256] = "scalar", skipped[256] = "";
    for (int i = 0; i < hstep_isa_count(); i++) {
        const struct vec_unit *unit = units[i];
        const char *name = hstep_isa_name(i);
        if (unit == scalar) continue;
        char *list = hstep_isa_available(i) && unit ? tested : skipped;
        snprintf(list + strlen(list), sizeof tested - strlen(list), "%s%s", *list ? " " : "", name);
        if (list == skipped) continue;
        for (size_t g = 0; g < COUNT(groups); g++) {
            char title[64];
            snprintf(title, sizeof title, "%s: %s", name, groups[g].name);
            TEST(title) {
                EQUAL_TEXT(unit->name, name);
                groups[g].run(scalar, unit);
                test_close_group();
            }
        }
    }
    printf("tested: %s; not available here: %s\n", tested, *skipped ? skipped : "none");
    return test_done();
}
