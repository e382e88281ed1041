/* Tests packed weights (docs/formats.md) against a reference that works in double and in integers: bytes after steps,
 * scales that stay and scales that are replaced, values that are not numbers, shapes that fall back. test_golden.c
 * covers instruction sets, shards and rules. */

#include "ref/fixture.h"

static const struct packed_format {
    const char *name, *fallback;
    int steps;
} formats[] = {{"int8-sr", "bf16-sr", 1}, {"int8-ecc4", "bf16-ecc8", 16}};
enum { FORMATS = COUNT(formats), BLOCK = 32, BYTES = 34 };

/* ---- The reference ----------------------------------------------------------------------------------------------- */

/* One block as stored: a scale and integers, in units of scale / steps. */
struct block {
    float scale;
    int position[BLOCK];
};

static struct block stored_block(const struct one *t, const struct packed_format *f, int64_t number)
{
    const char *bytes = (const char *)t->weight + number * BYTES;
    const char *errors = f->steps > 1 ? (const char *)slot_info(t->o, 0, WEIGHT).extra + number * BLOCK / 2 : NULL;
    struct block b;
    uint16_t scale;
    memcpy(&scale, bytes, 2);
    b.scale = from_bits((uint32_t)scale << 16);
    for (int i = 0; i < BLOCK; i++) {
        b.position[i] = ((const signed char *)bytes)[2 + i] * f->steps;
        if (!errors) continue;
        const int nibble = (unsigned char)errors[i / 2] >> i % 2 * 4 & 15;
        b.position[i] += (i % 2 ? -1 : 1) * (nibble < 8 ? nibble : nibble - 16);
    }
    return b;
}

static double value_of(const struct packed_format *f, const struct block *b, int i)
{
    return (double)b->position[i] * (double)b->scale / f->steps;
}

/* Returns floor(n / 65536). */
static int whole_part(int64_t n) { return (int)(n >= 0 ? n / 65536 : -((65535 - n) / 65536)); }

/* Returns BF16 up of a number that is not negative. */
static float bf16_up(float x) { return from_bits((to_bits(x) + 0xffff) & 0xffff0000u); }

/* Stores values on a new scale. */
static void replace(const struct packed_format *f, struct block *b, const float *x, const uint16_t *random)
{
    float most = 0;
    for (int i = 0; i < BLOCK; i++) most = fmaxf(most, fabsf(x[i]));
    b->scale = bf16_up(most * (float)(1.06 / 127));
    for (int i = 0; i < BLOCK; i++) {
        const float over = 65536.0f * (float)f->steps / b->scale, placed = x[i] * over;
        b->position[i] = whole_part((int64_t)nearbyint((double)placed) + random[i]);
    }
}

/* Subtracts changes. Returns 1 if the scale was replaced. */
static int subtract(const struct packed_format *f, struct block *b, const float *change, const uint16_t *random)
{
    int64_t moved[BLOCK], most = 0;
    float x[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const float over = b->scale == 0 ? 0 : 65536.0f * (float)f->steps / b->scale, part = change[i] * over;
        moved[i] = (int64_t)b->position[i] * 65536 - (int64_t)nearbyint(fmin(fmax((double)part, -0x1p28), 0x1p28));
        if (llabs(moved[i]) > most) most = llabs(moved[i]);
        x[i] = (float)value_of(f, b, i) - change[i];
    }
    if (most < (int64_t)101 * f->steps * 65536 || most > (int64_t)127 * f->steps * 65536) {
        replace(f, b, x, random);
        return 1;
    }
    for (int i = 0; i < BLOCK; i++) b->position[i] = whole_part(moved[i] + random[i]);
    return 0;
}

static int same_block(const struct block *a, const struct block *b)
{
    return to_bits(a->scale) == to_bits(b->scale) && !memcmp(a->position, b->position, sizeof a->position);
}

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

/* Opens sgd, whose change is lr times the gradient. lr is 1. */
static void open_sgd(struct one *t, const struct packed_format *f, int64_t rows, int64_t row_length)
{
    one_with(t, text_of("sgd/%s", f->name), 2, rows, row_length, "f32", 1, 0);
}

/* Writes the random bits of the weight's elements in a write, counted from 0, of rows that are `stride` apart. */
static void random_of(const struct one *t, uint64_t write, int64_t n, uint16_t *random)
{
    SIZED(halfstep_tensor, d);
    MUST(halfstep_get_tensor(t->o, 0, &d));
    MUST(halfstep_random_words("lattice", 42, d.id, write, WEIGHT, 0, (uint32_t *)(void *)random, (size_t)n / 2));
}

static void follow_reference(const struct packed_format *f, int64_t row_length, double size)
{
    enum { ROWS = 6, STEPS = 40, MOST = ROWS * 320 };
    const int64_t blocks = (row_length + BLOCK - 1) / BLOCK;
    static _Alignas(4) uint16_t random[MOST];
    struct source s = {(uint64_t)row_length};
    struct block expected[MOST / BLOCK];
    struct one t;
    int replaced = 0;
    open_sgd(&t, f, ROWS, row_length);
    for (int64_t i = 0; i < t.n; i++) t.room[i] = (float)(0.02 * next_normal(&s));
    one_write(&t, WEIGHT, t.room);
    for (int64_t b = 0; b < ROWS * blocks; b++) {
        float x[BLOCK] = {0};
        uint16_t half[BLOCK];
        for (int i = 0; i < BLOCK; i++) half[i] = 0x8000;
        for (int64_t i = 0; i < BLOCK && b % blocks * BLOCK + i < row_length; i++)
            x[i] = t.room[b / blocks * row_length + b % blocks * BLOCK + i];
        replace(f, &expected[b], x, half);
        const struct block now = stored_block(&t, f, b);
        CHECK(same_block(&now, &expected[b]), "%s: block %d is written otherwise", f->name, (int)b);
    }
    for (int step = 0; step < STEPS; step++) {
        /* Every tenth step is large, so that scales have to change. */
        for (int64_t i = 0; i < t.n; i++) t.room[i] = (float)(size * (step % 10 == 9 ? 1000 : 1) * next_normal(&s));
        one_write(&t, GRADIENT, t.room);
        random_of(&t, (uint64_t)step, ROWS * blocks * BLOCK, random);
        MUST(one_step(&t));
        for (int64_t b = 0; b < ROWS * blocks; b++) {
            float change[BLOCK] = {0};
            for (int64_t i = 0; i < BLOCK && b % blocks * BLOCK + i < row_length; i++)
                change[i] = t.room[b / blocks * row_length + b % blocks * BLOCK + i];
            replaced += subtract(f, &expected[b], change, random + b * BLOCK);
            const struct block now = stored_block(&t, f, b);
            CHECK(same_block(&now, &expected[b]), "%s, rows of %d: block %d differs after step %d", f->name,
                  (int)row_length, (int)b, step);
        }
    }
    CHECK(size < 1e-5 || replaced > 10, "%s: only %d scales were replaced, so the test tells little", f->name,
          replaced);
    one_read(&t, WEIGHT, t.room);
    for (int64_t i = 0; i < t.n; i++) {
        const int64_t row = i / row_length, column = i % row_length;
        const double value = value_of(f, &expected[row * blocks + column / BLOCK], (int)(column % BLOCK));
        CHECK((double)t.room[i] == value, "%s: element %d is read as %g, not %g", f->name, (int)i, t.room[i], value);
    }
    one_close(&t);
}

static void test_steps(void)
{
    TEST("packed weights have the bytes that docs/formats.md defines, step by step") {
        for (int f = 0; f < FORMATS; f++) {
            follow_reference(&formats[f], 64, 1e-4);
            follow_reference(&formats[f], 300, 1e-3);
            follow_reference(&formats[f], 33, 1e-7);
        }
    }
    TEST("packed weights: writing a value is to nearest, within half a step") {
        for (int f = 0; f < FORMATS; f++) {
            struct source s = {5};
            struct one t;
            float in[8 * 96];
            open_sgd(&t, &formats[f], 8, 96);
            for (int i = 0; i < t.n; i++) in[i] = (float)(ldexp(1, i / 96 * 20 - 70) * next_normal(&s));
            one_write(&t, WEIGHT, in);
            one_read(&t, WEIGHT, t.room);
            double worst = 0;
            for (int i = 0; i < t.n; i++) {
                const struct block b = stored_block(&t, &formats[f], i / BLOCK);
                worst = fmax(worst, fabs((double)t.room[i] - (double)in[i]) / ((double)b.scale / formats[f].steps));
            }
            CHECK(worst <= 0.5 + 0x1p-15 && worst > 0.45, "%s: %g steps off", formats[f].name, worst);
            one_close(&t);
        }
    }
}

/* ---- Scales ------------------------------------------------------------------------------------------------------ */

static void test_scales(void)
{
    TEST("packed weights: a change of zero changes no bit, whatever steps came before") {
        for (int f = 0; f < FORMATS; f++) {
            struct source s = {7};
            struct one t;
            open_sgd(&t, &formats[f], 16, 96);
            for (int i = 0; i < t.n; i++) t.room[i] = (float)(0.02 * next_normal(&s));
            one_write(&t, WEIGHT, t.room);
            for (int round = 0; round < BY_LENGTH(20, 60, 400); round++) {
                /* Shrinking blocks come near the lower bound of a scale, growing ones near the upper. */
                one_read(&t, WEIGHT, t.room);
                for (int i = 0; i < t.n; i++) t.room[i] *= (float)((i / 96 % 2 ? 0.02 : -0.02) * next_unit(&s));
                one_write(&t, GRADIENT, t.room);
                MUST(one_step(&t));
                struct block before[16 * 3], after;
                for (int b = 0; b < 16 * 3; b++) before[b] = stored_block(&t, &formats[f], b);
                one_fill(&t, GRADIENT, 0);
                MUST(one_step(&t));
                for (int b = 0; b < 16 * 3; b++) {
                    after = stored_block(&t, &formats[f], b);
                    CHECK(same_block(&before[b], &after), "%s: block %d moved by nothing", formats[f].name, b);
                }
            }
            one_close(&t);
        }
    }
    TEST("packed weights: small steps leave scales alone, and a block that shrinks or grows gets new ones") {
        for (int f = 0; f < FORMATS; f++) {
            struct source s = {9};
            struct one t;
            int changes = 0;
            float scale[64];
            open_sgd(&t, &formats[f], 64, 32);
            for (int i = 0; i < t.n; i++) t.room[i] = (float)(0.02 * next_normal(&s));
            one_write(&t, WEIGHT, t.room);
            for (int b = 0; b < 64; b++) scale[b] = stored_block(&t, &formats[f], b).scale;
            for (int step = 0; step < 200; step++) {
                for (int i = 0; i < t.n; i++) t.room[i] = (float)(1e-5 * next_normal(&s));
                one_write(&t, GRADIENT, t.room);
                MUST(one_step(&t));
                for (int b = 0; b < 64; b++) {
                    const float now = stored_block(&t, &formats[f], b).scale;
                    changes += now != scale[b];
                    scale[b] = now;
                }
            }
            CHECK(changes <= 6, "%s: %d of 12,800 scales changed", formats[f].name, changes);
            /* Halves the weights of even blocks and doubles those of odd ones, ten times. */
            for (int k = 0; k < 10; k++) {
                one_read(&t, WEIGHT, t.room);
                for (int i = 0; i < t.n; i++) t.room[i] *= i / 32 % 2 ? -1.0f : 0.5f;
                one_write(&t, GRADIENT, t.room);
                MUST(one_step(&t));
            }
            for (int b = 0; b < 64; b++) {
                const double part = (double)stored_block(&t, &formats[f], b).scale / (double)scale[b];
                CHECK(b % 2 ? part > 700 && part < 1500 : part > 1 / 1500.0 && part < 1 / 700.0,
                      "%s: the scale of block %d is %g of what it was", formats[f].name, b, part);
            }
            one_close(&t);
        }
    }
    TEST("packed weights: a block of zeros wakes up, and one that becomes zero sleeps") {
        for (int f = 0; f < FORMATS; f++) {
            struct one t;
            open_sgd(&t, &formats[f], 2, 40);
            one_fill(&t, GRADIENT, 0);
            MUST(one_step(&t));
            CHECK(one_mean(&t, WEIGHT) == 0, "%s: zero bytes are not 0", formats[f].name);
            for (int i = 0; i < t.n; i++) t.room[i] = i % 40 == 35 ? -3e-5f : 0;
            one_write(&t, GRADIENT, t.room);
            MUST(one_step(&t));
            one_read(&t, WEIGHT, t.room);
            for (int i = 0; i < t.n; i++)
                CHECK(i % 40 == 35 ? fabsf(t.room[i] / 3e-5f - 1) < 0.01f : t.room[i] == 0, "%s: element %d is %g",
                      formats[f].name, i, t.room[i]);
            one_write(&t, GRADIENT, t.room);
            MUST(one_step(&t));
            CHECK(one_mean(&t, WEIGHT) == 0 && stored_block(&t, &formats[f], 1).scale == 0, "%s: it does not end at 0",
                  formats[f].name);
            one_close(&t);
        }
    }
}

/* ---- The ends of the range --------------------------------------------------------------------------------------- */

static void test_ends(void)
{
    TEST("packed weights saturate at 2^127, and vanish below 2^-99") {
        for (int f = 0; f < FORMATS; f++) {
            struct one t;
            open_sgd(&t, &formats[f], 2, 64);
            for (int i = 0; i < t.n; i++)
                t.room[i] = i < 32 ? (i % 2 ? -0x1.fffffep127f : 0x1p120f) : i < 64 ? 0x1.8p-100f : 0x1p-99f;
            one_write(&t, WEIGHT, t.room);
            one_read(&t, WEIGHT, t.room);
            for (int i = 0; i < t.n; i++) {
                const double expected = i < 32 ? (i % 2 ? -0x1p127 : 0x1p120) : i < 64 ? 0 : 0x1p-99;
                CHECK(fabs((double)t.room[i] - expected) <= 0.006 * (i < 32 ? 0x1p127 : fabs(expected)),
                      "%s: element %d is %a", formats[f].name, i, t.room[i]);
            }
            one_fill(&t, GRADIENT, 0x1p61f);
            one_steps(&t, 3);
            one_read(&t, WEIGHT, t.room);
            for (int i = 0; i < 32; i++) CHECK(isfinite(t.room[i]), "%s: %a", formats[f].name, t.room[i]);
            one_close(&t);
        }
    }
    TEST("packed weights: a value that is not finite marks its block, and no other") {
        static const float bad[] = {NAN, INFINITY, -INFINITY};
        for (int f = 0; f < FORMATS; f++)
            for (size_t k = 0; k < COUNT(bad); k++) {
                struct one t;
                one_with(&t, text_of("adamw/%s", formats[f].name), 2, 2, 96, "f32", 1e-3, 0);
                MUST(halfstep_set_choice(t.o, ALL_GROUPS, "scan", "known-finite"));
                one_fill(&t, WEIGHT, 0.5f);
                for (int i = 0; i < t.n; i++) t.room[i] = i == 40 ? bad[k] : 1;
                one_write(&t, GRADIENT, t.room);
                one_steps(&t, 2);
                one_read(&t, WEIGHT, t.room);
                for (int i = 0; i < t.n; i++)
                    CHECK(isfinite(t.room[i]) == (i / 32 != 1), "%s: element %d is %g beside a %g", formats[f].name, i,
                          t.room[i], bad[k]);
                const struct block b = stored_block(&t, &formats[f], 1);
                int codes = 0;
                for (int i = 0; i < BLOCK; i++) codes |= b.position[i];
                CHECK(to_bits(b.scale) == 0x7fc00000 && !codes, "%s: the marked block has the scale %08x",
                      formats[f].name, to_bits(b.scale));
                one_close(&t);
            }
    }
}

/* ---- Shapes ------------------------------------------------------------------------------------------------------ */

static void test_shapes(void)
{
    TEST("packed weights: vectors and short rows fall back, and all bytes are as forecast") {
        static const struct {
            int ndim;
            int64_t rows, row_length;
            int packed;
        } shapes[] = {{2, 3, 32, 1},  {2, 3, 33, 1}, {3, 4, 300, 1}, {2, 9, 31, 0},
                      {1, 100, 1, 0}, {0, 1, 1, 0},  {1, 1, 4096, 0}};
        for (int f = 0; f < FORMATS; f++)
            for (size_t k = 0; k < COUNT(shapes); k++) {
                const char *recipe = text_of("adamw/%s/int8", formats[f].name);
                uint64_t weight, extra, states;
                struct one t;
                one_new(&t, recipe, shapes[k].ndim, shapes[k].rows, shapes[k].row_length, "bf16");
                const halfstep_slot_info info = slot_info(t.o, 0, WEIGHT);
                const char *name = format_info(info.format).name;
                CHECK(!strcmp(name, shapes[k].packed ? formats[f].name : formats[f].fallback) &&
                          info.fell_back == !shapes[k].packed,
                      "%s, shape %d: '%s'", recipe, (int)k, name);
                MUST(halfstep_recipe_bytes(recipe, shapes[k].ndim, shapes[k].rows, shapes[k].row_length, &weight,
                                           &extra, &states));
                CHECK(weight == info.code_bytes && extra == info.extra_bytes,
                      "%s, shape %d: %d + %d bytes, %d + %d told", recipe, (int)k, (int)info.code_bytes,
                      (int)info.extra_bytes, (int)weight, (int)extra);
                if (shapes[k].packed) {
                    const uint64_t blocks = (uint64_t)(shapes[k].rows * ((shapes[k].row_length + 31) / 32));
                    CHECK(weight == 34 * blocks && extra == (formats[f].steps > 1 ? 16 * blocks : 0), "%s: %d + %d",
                          recipe, (int)weight, (int)extra);
                }
                one_close(&t);
            }
    }
    TEST("packed weights: error codes begin spread over their range, alike in every part") {
        enum { ROWS = 300, COLUMNS = 77, WIDTH = 48 };
        const halfstep_tensor whole = {.struct_size = sizeof whole,
                                       .name = "w",
                                       .gradient = "bf16",
                                       .ndim = 2,
                                       .rows = ROWS,
                                       .row_length = COLUMNS};
        halfstep_tensor part = whole;
        part.first_row = 50;
        part.n_rows = 200;
        part.first_column = 32;
        part.n_columns = COLUMNS - 32;
        halfstep_optimizer *all = optimizer_of("sgd/int8-ecc4", &whole), *some = optimizer_of("sgd/int8-ecc4", &part);
        const unsigned char *errors = slot_info(all, 0, WEIGHT).extra, *theirs = slot_info(some, 0, WEIGHT).extra;
        int count[16] = {0};
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < 2 * WIDTH; i++) {
                const int code = errors[row * WIDTH + i / 2] >> i % 2 * 4 & 15;
                CHECK(i < COLUMNS || !code, "row %d, column %d has the error code %d", row, i, code);
                if (i < COLUMNS) count[code]++;
            }
        for (int code = 0; code < 16; code++)
            CHECK(abs(count[code] - ROWS * COLUMNS / 16) < 120, "%d begin with error code %d", count[code], code);
        for (int row = 0; row < 200; row++)
            CHECK(!memcmp(errors + (row + 50) * WIDTH + 16, theirs + row * 32, 32), "row %d differs in a part", row);
        halfstep_destroy(all);
        halfstep_destroy(some);
    }
    TEST("packed weights: what cannot be is refused by name") {
        halfstep_optimizer *o = new_optimizer("adamw/int8-ecc4", 1, 0);
        const halfstep_tensor part = {.struct_size = sizeof part,
                                      .name = "w",
                                      .gradient = "bf16",
                                      .ndim = 2,
                                      .rows = 4,
                                      .row_length = 128,
                                      .n_rows = 4,
                                      .first_column = 16,
                                      .n_columns = 64};
        const halfstep_tensor gradient = {.struct_size = sizeof gradient,
                                          .name = "w",
                                          .gradient = "int8-sr",
                                          .ndim = 2,
                                          .rows = 4,
                                          .row_length = 128};
        int32_t index;
        EXPECT_NAMED(o, halfstep_add_tensor(o, &part, &index), HALFSTEP_ERROR_SHAPE, "blocks of 32 ('int8-ecc4')");
        EXPECT_NAMED(o, halfstep_add_tensor(o, &gradient, &index), UNSUPPORTED, "cannot store gradients");
        halfstep_destroy(o);
        o = new_optimizer("ema/f32", 1, 0);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &gradient, &index), UNSUPPORTED, "give it decoded weights");
        halfstep_destroy(o);
        char text[64];
        EXPECT(halfstep_recipe_full("adamw/f32/int8-sr", text, sizeof text), UNSUPPORTED);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    TEST("every packed format is judged here") {
        int judged = 0;
        for (int32_t row = 0; row < halfstep_format_count(); row++)
            judged += format_info(row).geometry == HALFSTEP_GEOMETRY_PACKED;
        CHECK(judged == FORMATS, "formats[] of tests/core/test_packed.c lacks one of %d (docs/adding.md)", judged);
    }
    test_steps();
    test_scales();
    test_ends();
    test_shapes();
    return test_done();
}
