/* Tests steps that must not change a bit: without gradients, with a change of zero, refused for one gradient.
 * docs/differences.md lists the defects of other optimizers (I-1, I-2 ...). Each test passes here and fails with the
 * peer's way, which runs beside it as a counter-check where that is cheap. Runs are short unless --all is given.
 * Not for an emulator. */
#define HALFSTEP_ADVANCED

#include "images.h"

/* Three tensors under one recipe: a scalar, a matrix, a vector. Each bad tensor has neighbours. empty_step: the
 * optimizer is stepped before it has tensors. */
enum { TENSORS = 3 };
struct three {
    halfstep_optimizer *o;
    void *weight[TENSORS], *gradient[TENSORS];
    int64_t n[TENSORS];
    int element;
};
static const char *const names[TENSORS] = {"first", "middle", "last"};

static void three_open(struct three *t, const char *recipe, const char *gradient, const char *scan, int empty_step)
{
    static const int64_t shape[TENSORS][2] = {{1, 1}, {7, 300}, {70, 1}};
    struct source s = {37};
    t->o = new_optimizer(recipe, 1, 42);
    if (empty_step) EXPECT(halfstep_step(t->o, NULL, NULL), ORDER);
    if (empty_step) EXPECT(end_round(t->o), ORDER);
    MUST(halfstep_set_choice(t->o, ALL_GROUPS, "scan", scan));
    for (int i = 0; i < TENSORS; i++)
        ADD_TENSOR(t->o, .name = names[i], .ndim = i == 1 ? 2 : i / 2, .rows = shape[i][0], .row_length = shape[i][1],
                   .gradient = gradient);
    MUST(halfstep_allocate_states(t->o));
    t->element = strcmp(gradient, "f32") ? 2 : 4;
    for (int i = 0; i < TENSORS; i++) {
        t->n[i] = shape[i][0] * shape[i][1];
        t->weight[i] = zeroed((size_t)t->n[i] * 4);
        t->gradient[i] = zeroed((size_t)t->n[i] * 4);
        float *values = zeroed((size_t)t->n[i] * 4);
        for (int64_t j = 0; j < t->n[i]; j++) values[j] = (float)next_normal(&s);
        MUST(halfstep_write_slot(t->o, i, WEIGHT, t->weight[i], 0, shape[i][0], values));
        MUST(halfstep_write_slot(t->o, i, GRADIENT, t->gradient[i], 0, shape[i][0], values));
        free(values);
    }
}

static void three_close(struct three *t)
{
    halfstep_destroy(t->o);
    for (int i = 0; i < TENSORS; i++) free(t->weight[i]), free(t->gradient[i]);
}

static int step_all(struct three *t, int release)
{
    const void *gradients[TENSORS] = {t->gradient[0], t->gradient[1], t->gradient[2]};
    if (!release) return halfstep_step(t->o, t->weight, gradients);
    int worst = OK;
    for (int i = 0; i < TENSORS; i++) {
        int result = step_tensor(t->o, i, t->weight[i], gradients[i]);
        if (result) worst = result;
    }
    MUST(end_round(t->o));
    return worst;
}

/* ---- I-3, I-4: calls without gradients --------------------------------------------------------------------------- */

static void three_gradients(struct three *t, int step)
{
    for (int i = 0; i < TENSORS; i++)
        for (int64_t j = 0; j < t->n[i]; j++) ((float *)t->gradient[i])[j] = normal(step, 1000 * i + j);
}

static int models_differ(struct three *a, struct three *b)
{
    int differ = 0;
    for (int i = 0; i < TENSORS; i++) {
        struct image x = take(a->o, i, a->weight[i], WHOLE);
        differ |= !still(b->o, i, b->weight[i], x);
    }
    return differ;
}

/* Writes a recipe of 16-bit weights, some with a residual, and the rule's default states. */
static void rule_recipe(int32_t rule, char recipe[64])
{
    halfstep_rule_info info = rule_info(rule);
    snprintf(recipe, 64, "%s/%s", info.name, rule % 2 ? "bf16-sr" : "bf16-kahan");
}

static void test_empty_calls(void)
{
    TEST("I-3 a step of an empty optimizer decides nothing, on any instruction set") {
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            char recipe[64];
            struct three plain, after;
            rule_recipe(rule, recipe);
            MUST(halfstep_set_isa("scalar"));
            three_open(&plain, recipe, "f32", "scan", 0);
            for (int k = 0; k < 5; k++) {
                three_gradients(&plain, k);
                MUST(step_all(&plain, 0));
            }
            for (int32_t isa = 0; isa < halfstep_isa_count(); isa++) {
                if (!halfstep_isa_available(isa)) continue;
                MUST(halfstep_set_isa(halfstep_isa_name(isa)));
                three_open(&after, recipe, "f32", "scan", 1);
                for (int k = 0; k < 5; k++) {
                    three_gradients(&after, k);
                    MUST(step_all(&after, 0));
                }
                CHECK(!models_differ(&plain, &after), "%s: an empty step changed what follows on %s", recipe,
                      halfstep_isa_name(isa));
                three_close(&after);
            }
            MUST(halfstep_set_isa(NULL));
            three_close(&plain);
        }
    }
    TEST("I-4 in gradient release a stray step without gradients changes no bit, then or later, under every rule") {
        const void *const none[TENSORS] = {NULL, NULL, NULL};
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            char recipe[64];
            struct three plain, stray;
            if (rule_info(rule).totals) continue; /* it is not released */
            rule_recipe(rule, recipe);
            three_open(&plain, recipe, "f32", "scan", 0);
            three_open(&stray, recipe, "f32", "scan", 0);
            for (int k = 0; k < 6; k++) {
                struct image before = take(stray.o, 1, stray.weight[1], WHOLE);
                halfstep_record c = counters_of(stray.o, 1);
                MUST(halfstep_step(stray.o, stray.weight, none));
                halfstep_record d = counters_of(stray.o, 1);
                CHECK(!memcmp(&c, &d, sizeof c), "%s: a step without gradients is counted", recipe);
                CHECK(still(stray.o, 1, stray.weight[1], before), "%s: a step without gradients changed something",
                      recipe);
                three_gradients(&plain, k);
                three_gradients(&stray, k);
                for (int i = TENSORS - 1; i >= 0; i--) {
                    MUST(step_tensor(plain.o, i, plain.weight[i], plain.gradient[i]));
                    MUST(step_tensor(stray.o, i, stray.weight[i], stray.gradient[i]));
                    if (i) MUST(halfstep_step(stray.o, stray.weight, none));
                }
                MUST(end_round(plain.o));
                MUST(end_round(stray.o));
            }
            CHECK(!models_differ(&plain, &stray), "%s: stray steps changed later ones", recipe);
            three_close(&plain);
            three_close(&stray);
        }
    }
}

/* ---- Steps that must not change a bit ---------------------------------------------------------------------------- */

/* Sets weights of all kinds and, with raw_extra, random residuals that no encoder makes. */
static void set_any_weights(struct one *t, struct source *s, int raw_extra)
{
    for (int64_t i = 0; i < t->n; i++) {
        uint32_t bits = (uint32_t)next64(s);
        if ((bits & 0x7f800000) == 0x7f800000) bits &= 0xbfffffff;
        t->room[i] = from_bits(i % 16 == 0   ? 0x80000000u
                               : i % 16 == 1 ? bits & 0x807fffff
                               : i % 16 == 2 ? 0x7f7fffff
                                             : bits);
    }
    one_write(t, WEIGHT, t->room);
    halfstep_slot_info info = slot_info(t->o, 0, WEIGHT);
    if (!raw_extra || !info.extra) return;
    for (uint64_t i = 0; i < info.extra_bytes; i++) ((unsigned char *)info.extra)[i] = (unsigned char)next64(s);
    /* Residuals are finite, and weights are not at the end of the range. */
    halfstep_format_info format = format_info(info.format);
    if (format.block) return;
    int half = !strcmp(format.code_dtype, "F16"), code = !strcmp(format.extra_dtype, "I16");
    uint16_t exponent = half ? 0x7c00 : 0x7f80, end = half ? 0x7800 : 0x7f00;
    for (int64_t i = 0; i < t->n; i++) {
        uint16_t *w = (uint16_t *)t->weight + i, *c = (uint16_t *)info.extra + i;
        if ((*w & exponent) >= end || (*w & 0x7fff) == 0)
            *w = half ? 0x3c00 : 0x3f80; /* below zero: NaN of the other sign */
        if (info.extra_bytes < 2 * (uint64_t)t->n) continue;
        if (!code && (*c & exponent) >= end) *c = 0x3b80;
        /* A half and 16 bits have three bits more than fp32 can represent. */
        if (code && half) *c &= 0xfff8;
    }
}

/* Returns 1 if `steps` steps with random gradients or zeros leave weights and residuals as they are. */
static int moves_nothing(struct one *t, struct source *s, int steps, int random)
{
    struct image before = take(t->o, 0, t->weight, WEIGHT_ONLY);
    for (int k = 0; k < steps; k++) {
        for (int64_t i = 0; random && i < t->n; i++) t->room[i] = (float)next_normal(s);
        if (random) one_write(t, GRADIENT, t->room);
        MUST(one_step(t));
    }
    return still(t->o, 0, t->weight, before);
}

static void test_nothing(void)
{
    struct one t;
    TEST("lr 0 changes no weight bit, under every rule, weight format and decay mode") {
        struct source s = {29};
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++)
            for (int32_t row = 0; row < halfstep_format_count(); row++)
                for (int k = 0; halfstep_choice_value("decay", k); k++) {
                    const char *format = format_for(row, HALFSTEP_ROLE_WEIGHT),
                               *decay = halfstep_choice_value("decay", k);
                    if (!format || (!strcmp(decay, "cautious") && !rule_info(rule).cautious_decay)) continue;
                    const char *recipe = text_of("%s/%s", rule_info(rule).name, format);
                    one_open(&t, recipe, 2, 5, 70, "f32");
                    one_hyper(&t, "lr", 1e-3);
                    one_hyper(&t, "lr", 0);
                    one_hyper(&t, "weight_decay", 0.1);
                    MUST(halfstep_set_choice(t.o, 0, "decay", decay));
                    one_start(&t);
                    set_any_weights(&t, &s, 0);
                    CHECK(moves_nothing(&t, &s, 5, 1), "%s, %s: the weights changed", recipe, decay);
                    one_close(&t);
                }
    }
    TEST("a change of exactly zero leaves weight and residual untouched") {
        struct source s = {31};
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *format = format_for(row, HALFSTEP_ROLE_WEIGHT);
            if (!format) continue;
            one_with(&t, text_of("adamw/%s", format), 2, 5, 70, "bf16", 0.1, 0);
            set_any_weights(&t, &s, 1);
            CHECK(moves_nothing(&t, &s, 20, 0), "%s: the weights changed", format);
            one_close(&t);
        }
    }
}

/* ---- Gradients that are not finite ------------------------------------------------------------------------------- */

static uint32_t put_bad(struct three *t, int tensor, int64_t at, uint32_t bits)
{
    uint32_t old = 0;
    uint16_t code = (uint16_t)(bits >> 16);
    char *place = (char *)t->gradient[tensor] + at * t->element;
    memcpy(&old, place, (size_t)t->element);
    memcpy(place, t->element == 4 ? (void *)&bits : (void *)&code, (size_t)t->element);
    return old;
}

static void test_nonfinite_mode(const char *recipe, const char *gradient, int mode)
{
    static const char *const modes[] = {"scan", "per-tensor", "scan"};
    static const uint32_t bad[] = {0x7fc00000, 0xffff0000, 0x7f800000, 0xff800000, 0x5e800000, 0x7f810000};
    struct three t;
    uint64_t skipped = 0;
    three_open(&t, recipe, gradient, modes[mode], 0);
    for (int k = 0; k < 2; k++) MUST(step_all(&t, mode == 2));
    for (int i = 0; i < TENSORS; i++)
        for (int place = 0; place < 3; place++)
            for (int b = 0; b < 6; b++) {
                struct image before[TENSORS];
                halfstep_record count[TENSORS], now;
                int64_t at = place == 0 ? 0 : place == 1 ? t.n[i] / 2 : t.n[i] - 1;
                uint32_t old = put_bad(&t, i, at, bad[b]);
                for (int j = 0; j < TENSORS; j++) {
                    before[j] = take(t.o, j, t.weight[j], WHOLE);
                    count[j] = counters_of(t.o, j);
                }
                uint64_t round = 0, round_after = 0;
                MUST(get_group_steps(t.o, 0, &round));
                int result = step_all(&t, mode == 2);
                skipped++;
                CHECK(result == HALFSTEP_NONFINITE, "%s: %08x in %s gives %d", recipe, bad[b], names[i], result);
                CHECK(halfstep_skipped_steps(t.o) == skipped, "%s: %d skipped steps counted", recipe,
                      (int)halfstep_skipped_steps(t.o));
                CHECK(!strcmp(halfstep_nonfinite_tensor(t.o, NULL), names[i]), "%s: '%s' is named, '%s' was meant",
                      recipe, halfstep_nonfinite_tensor(t.o, NULL), names[i]);
                CHECK(strstr(halfstep_error_detail(t.o), names[i]), "the detail does not name %s", names[i]);
                MUST(get_group_steps(t.o, 0, &round_after));
                CHECK(round_after == round + (mode != 0), "%s: the group counts %d after %d", modes[mode],
                      (int)round_after, (int)round);
                for (int j = 0; j < TENSORS; j++) {
                    now = counters_of(t.o, j);
                    int same = still(t.o, j, t.weight[j], before[j]) & !memcmp(&now, &count[j], sizeof now);
                    CHECK(same == (mode == 0 || j == i), "%s, %s%s: bad %s %s %s", recipe, modes[mode],
                          mode == 2 ? ", release" : "", names[i], same ? "held back" : "changed", names[j]);
                }
                put_bad(&t, i, at, t.element == 4 ? old : old << 16);
            }
    CHECK(step_all(&t, mode == 2) == OK, "%s: sound gradients are refused afterwards", recipe);
    three_close(&t);
}

static void test_nonfinite(void)
{
    static const char *const recipes[] = {"adamw/f32/f32",   "adamw/bf16-sr/int8",  "lion/bf16-kahan",
                                          "sgd/bf16-ecc8",   "adam/bf16-ecc16",     "adan/f16-sr/fp8",
                                          "ranger/f16-ecc8", "lamb/f16-kahan/int4", "lamb16/f16-ecc16"};
    static const char *const titles[] = {"refuses the whole step", "holds back its tensor (per-tensor)",
                                         "holds back its tensor (release)"};
    for (int mode = 0; mode < 3; mode++) {
        char name[96];
        snprintf(name, sizeof name, "a gradient that is not finite %s and is named", titles[mode]);
        TEST(name) {
            for (size_t r = 0; r < COUNT(recipes); r++) {
                test_nonfinite_mode(recipes[r], "f32", mode);
                test_nonfinite_mode(recipes[r], "bf16", mode);
            }
        }
        test_close_group();
    }
    TEST("a gradient of 2^61 is stepped, 2^62 is not, and the scale counts") {
        struct one t;
        one_new(&t, "adamw/f32/f32", 2, 3, 50, "f32");
        one_fill(&t, GRADIENT, 0x1.fffffep61f);
        CHECK(one_step(&t) == OK, "2^62 (1 - 2^-24) was refused");
        one_fill(&t, GRADIENT, 0x1p62f);
        CHECK(one_step(&t) == HALFSTEP_NONFINITE, "2^62 was stepped");
        MUST(halfstep_set_hyper(t.o, ALL_GROUPS, "gradient_scale", 0x1p-8));
        CHECK(one_step(&t) == OK, "2^62 / 256 was refused");
        MUST(halfstep_set_hyper(t.o, ALL_GROUPS, "gradient_scale", 0x1p8));
        one_fill(&t, GRADIENT, 0x1p54f);
        CHECK(one_step(&t) == HALFSTEP_NONFINITE, "2^54 * 256 was stepped");
        one_close(&t);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_empty_calls();
    test_nothing();
    test_nonfinite();
    return test_done();
}
