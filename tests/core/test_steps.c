/* Tests steps of more than one pass and states of more than one kind. These are optimizer accumulation, sums over
 * tensors, averages of weights, copies of weights as states, and blocks that do not follow rows. Over 500 lines because
 * each kind has a small reference of its own. */
#define HALFSTEP_ADVANCED

#include "ref/fixture.h"

/* Makes a tensor with random weights. sgd and rmsprop get momentum, because they keep no gradient without it. */
static void open_random(struct one *t, const char *recipe, int ndim, int64_t rows, int64_t row_length,
                        const char *gradients)
{
    struct source s = {77};
    one_open(t, recipe, ndim, rows, row_length, gradients);
    if (!strncmp(recipe, "sgd/", 4) || !strncmp(recipe, "rmsprop/", 8)) one_hyper(t, "momentum", 0.9);
    MUST(halfstep_set_choice(t->o, 0, "decay", "decoupled"));
    one_start(t);
    for (int64_t i = 0; i < t->n; i++) t->room[i] = (float)next_normal(&s);
    one_write(t, WEIGHT, t->room);
}

static void random_gradient(struct one *t, uint64_t seed)
{
    struct source s = {seed};
    for (int64_t i = 0; i < t->n; i++) t->room[i] = (float)(0.01 * next_normal(&s));
    one_write(t, GRADIENT, t->room);
}

static int micro_step(struct one *t)
{
    const void *gradients[1] = {t->gradient};
    return accumulate_states(t->o, gradients);
}

static int same_slot(struct one *a, struct one *b, int slot)
{
    halfstep_slot_info x = {.struct_size = sizeof x}, y = {.struct_size = sizeof y};
    if (slot == WEIGHT && memcmp(a->weight, b->weight, a->weight_bytes)) return 0;
    if (halfstep_get_slot_info(a->o, 0, slot, &x) != OK || x.format < 0) return 1;
    y = slot_info(b->o, 0, slot);
    return (!x.code || !memcmp(x.code, y.code, x.code_bytes)) && (!x.extra || !memcmp(x.extra, y.extra, x.extra_bytes));
}

static int same_states(struct one *a, struct one *b)
{
    for (int slot = STATE; slot < STATE + HALFSTEP_MAX_STATES; slot++)
        if (!same_slot(a, b, slot)) return 0;
    return 1;
}

/* ---- Optimizer accumulation -------------------------------------------------------------------------------------- */

/* A step with lr 0 moves no weight, so it must leave the states that a micro-step leaves. */
static void micro_steps_of(const char *rule, const char *formats)
{
    struct one a, b;
    const char *recipe = text_of("%s/%s", rule, formats);
    open_random(&a, recipe, 2, 6, 300, "bf16");
    open_random(&b, recipe, 2, 6, 300, "bf16");
    void *before = zeroed(a.weight_bytes);
    memcpy(before, a.weight, a.weight_bytes);
    for (uint64_t i = 0; i < 3; i++) {
        random_gradient(&a, i);
        random_gradient(&b, i);
        EXPECT(micro_step(&a), OK);
        one_hyper(&b, "lr", 0);
        EXPECT(one_step(&b), OK);
    }
    CHECK(!memcmp(before, a.weight, a.weight_bytes), "%s: a micro-step moved a weight", recipe);
    for (int slot = STATE; slot < STATE + rule_info(halfstep_rule_find(rule)).states; slot++)
        if (rule_info(halfstep_rule_find(rule)).state_role[slot - STATE] != HALFSTEP_ROLE_WEIGHT)
            CHECK(same_slot(&a, &b, slot), "%s: slot %d differs", recipe, slot);
    halfstep_record c = counters_of(a.o, 0);
    CHECK(c.state_steps == 3 && c.full_steps == 0 && c.writes == 3, "%s: counters", recipe);
    uint64_t steps;
    MUST(get_group_steps(a.o, 0, &steps));
    CHECK(steps == 0, "%s: the schedule went on", recipe);
    /* The step that follows moves the weights. */
    EXPECT(one_step(&a), OK);
    CHECK(memcmp(before, a.weight, a.weight_bytes), "%s: the step after micro-steps moved nothing", recipe);
    free(before);
    one_close(&a);
    one_close(&b);
}

static void test_micro_steps(void)
{
    static const char *const formats[] = {"f32", "bf16-sr/int8", "bf16-kahan", "f32/int4", "bf16-ecc8/fp8-lamb16"};
    TEST("micro-steps leave the states that steps of lr 0 leave, and the weights alone") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++)
            for (size_t i = 0; rule_info(row).accumulates && i < COUNT(formats); i++)
                micro_steps_of(rule_info(row).name, formats[i]);
    }
    TEST("a rule that would lose micro-gradients says so, and changes nothing") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            struct one t;
            const char *rule = rule_info(row).name;
            one_open(&t, rule, 2, 4, 64, "f32");
            MUST(halfstep_set_choice(t.o, 0, "decay", "decoupled"));
            one_start(&t);
            random_gradient(&t, 1);
            int keeps = rule_info(row).accumulates && strcmp(rule, "sgd") && strcmp(rule, "rmsprop");
            EXPECT(micro_step(&t), keeps ? OK : UNSUPPORTED);
            CHECK(keeps || strstr(halfstep_error_detail(t.o), rule), "'%s' does not name %s",
                  halfstep_error_detail(t.o), rule);
            EXPECT(accumulate_states_tensor(t.o, 0, t.gradient), keeps ? OK : UNSUPPORTED);
            halfstep_record c = counters_of(t.o, 0);
            CHECK(c.state_steps == (keeps ? 2 : 0), "%s: %d state steps", rule, (int)c.state_steps);
            one_close(&t);
        }
    }
    TEST("l2 decay and micro-steps exclude each other") {
        struct one t;
        one_new(&t, "adam", 2, 4, 64, "f32");
        random_gradient(&t, 1);
        EXPECT(micro_step(&t), OK);
        one_hyper(&t, "weight_decay", 0.1);
        EXPECT_NAMED(t.o, micro_step(&t), UNSUPPORTED, "l2");
        one_close(&t);
    }
    TEST("a micro-gradient that is not finite changes nothing") {
        struct one a, b;
        open_random(&a, "adamw/bf16-sr/int8", 2, 4, 64, "f32");
        open_random(&b, "adamw/bf16-sr/int8", 2, 4, 64, "f32");
        random_gradient(&a, 1);
        MUST(micro_step(&a));
        random_gradient(&b, 1);
        MUST(micro_step(&b));
        ((float *)a.gradient)[100] = NAN;
        EXPECT(micro_step(&a), HALFSTEP_NONFINITE);
        CHECK(same_states(&a, &b) && halfstep_skipped_steps(a.o) == 1, "something changed");
        one_close(&a);
        one_close(&b);
    }
}

/* ---- Sums over tensors ------------------------------------------------------------------------------------------- */

static void test_sums(void)
{
    TEST("a part of a tensor needs its sums from all parts") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            if (!rule_info(row).two_pass || rule_info(row).matrix) continue;
            float weight[3 * 64] = {0}, gradient[3 * 64] = {0};
            void *weights[1] = {weight};
            const void *gradients[1] = {gradient};
            halfstep_optimizer *o = new_optimizer(rule_info(row).name, 0, 0);
            ADD_TENSOR(o, .name = "part", .ndim = 2, .rows = 9, .row_length = 64, .first_row = 3, .n_rows = 3,
                       .n_columns = 64, .gradient = "f32");
            MUST(halfstep_allocate_states(o));
            EXPECT_NAMED(o, halfstep_step(o, weights, gradients), UNSUPPORTED, "'part'");
            EXPECT(step_tensor(o, 0, weight, gradient), UNSUPPORTED);
            int64_t *statistics = zeroed((size_t)statistics_count(o) * 8);
            EXPECT(step_begin(o, gradients, statistics), OK);
            EXPECT(step_finish(o, weights, gradients, statistics), ORDER);
            EXPECT(step_norms(o, weights, gradients, statistics), OK);
            EXPECT(step_finish(o, weights, gradients, statistics), OK);
            free(statistics);
            halfstep_destroy(o);
        }
    }
    TEST("sums of many chunks are carried before ranks add them up") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            struct one t;
            if (!rule_info(row).two_pass || rule_info(row).matrix) continue;
            open_random(&t, rule_info(row).name, 2, 512, 512, "f32");
            random_gradient(&t, 1);
            void *weights[1] = {t.weight};
            const void *gradients[1] = {t.gradient};
            const int64_t count = statistics_count(t.o), first = norms_offset(t.o);
            int64_t *all = zeroed((size_t)count * 8), *single = zeroed((size_t)count * 8), limbs = 0;
            MUST(step_begin(t.o, gradients, all));
            MUST(step_norms(t.o, weights, gradients, all));
            if (!rule_info(row).totals) {
                MUST(step_tensor_begin(t.o, 0, t.gradient, single));
                MUST(step_tensor_norms(t.o, 0, t.weight, t.gradient, single));
            }
            for (int64_t i = first; i < count; i++) {
                const int top = (i - first) % 68 == 67;
                CHECK(top || (all[i] >> 32 == 0 && single[i] >> 32 == 0), "%s: limb %d is %lld, of one tensor %lld",
                      rule_info(row).name, (int)(i - first), (long long)all[i], (long long)single[i]);
                limbs += all[i] != 0;
            }
            CHECK(limbs, "%s: all sums are 0", rule_info(row).name);
            free(all);
            free(single);
            one_close(&t);
        }
    }
    TEST("scalars are told and set by name") {
        struct one t;
        double norm = 0, ratio = 0, exact = 0;
        one_new(&t, "lamb", 2, 4, 64, "f32");
        one_fill(&t, WEIGHT, 0.5f);
        random_gradient(&t, 3);
        EXPECT(get_scalar(t.o, 0, "trust_ratio", &ratio), OK);
        EQUAL(ratio, 0);
        MUST(one_step(&t));
        exact = sqrt(256 * 0.25);
        MUST(get_scalar(t.o, 0, "weight_norm", &norm));
        MUST(get_scalar(t.o, 0, "trust_ratio", &ratio));
        CHECK(fabs(norm - exact) < 1e-12 && ratio > 0, "norm %g, ratio %g", norm, ratio);
        EXPECT(set_scalar(t.o, 0, "weight_norm", 2.5), OK);
        MUST(get_scalar(t.o, 0, "weight_norm", &norm));
        EQUAL(norm, 2.5);
        EXPECT(set_scalar(t.o, 0, "weight_norm", NAN), RANGE);
        EXPECT(get_scalar(t.o, 0, "momentum", &norm), NAME);
        EXPECT(get_scalar(t.o, 1, "weight_norm", &norm), ARGUMENT);
        one_close(&t);
    }
}

/* ---- Copies of weights ------------------------------------------------------------------------------------------- */

static void test_copies(void)
{
    TEST("ranger's weights are its slow weights after every k-th step, bit for bit") {
        static const char *const formats[] = {"f32", "bf16-sr", "bf16-kahan", "bf16-ecc8", "f16-kahan"};
        for (size_t i = 0; i < COUNT(formats); i++) {
            struct one t;
            const char *recipe = text_of("ranger/%s", formats[i]);
            open_random(&t, recipe, 2, 5, 77, "f32");
            one_hyper(&t, "k", 3);
            halfstep_slot_info slow = slot_info(t.o, 0, STATE + 2);
            halfstep_slot_info weight = slot_info(t.o, 0, WEIGHT);
            for (int step = 1; step <= 7; step++) {
                random_gradient(&t, (uint64_t)step);
                MUST(one_step(&t));
                int same = !memcmp(slow.code, t.weight, t.weight_bytes) &&
                           (!slow.extra || !memcmp(slow.extra, weight.extra, slow.extra_bytes));
                CHECK(same == (step % 3 == 0), "%s: after step %d they are %s", recipe, step,
                      same ? "equal" : "different");
            }
            one_close(&t);
        }
    }
    TEST("ema follows weights with a residual at full precision") {
        static const char *const live_formats[] = {"bf16-kahan", "bf16-ecc8", "f16-ecc16", "bf16-sr", "f32"};
        for (size_t i = 0; i < COUNT(live_formats); i++) {
            struct one live, average;
            const char *recipe = text_of("adamw/%s", live_formats[i]);
            open_random(&live, recipe, 2, 5, 77, "f32");
            one_open(&average, "ema/f32", 2, 5, 77, live_formats[i]);
            one_hyper(&average, "beta", 0.75);
            one_start(&average);
            halfstep_slot_info info = slot_info(live.o, 0, WEIGHT);
            const void *gradients[1] = {live.weight};
            void *weights[1] = {average.weight};
            if (info.extra_bytes) {
                EXPECT(halfstep_step(average.o, weights, gradients), ORDER);
                EXPECT(halfstep_bind_slot(average.o, 0, GRADIENT, NULL, info.extra), OK);
            }
            float *w = zeroed((size_t)live.n * 4), *a = zeroed((size_t)live.n * 4),
                  *wanted = zeroed((size_t)live.n * 4);
            for (int step = 0; step < 4; step++) {
                random_gradient(&live, (uint64_t)step);
                MUST(one_step(&live));
                EXPECT(halfstep_step(average.o, weights, gradients), OK);
                one_read(&live, WEIGHT, w);
                one_read(&average, WEIGHT, a);
                for (int64_t j = 0; j < live.n; j++) {
                    wanted[j] = step ? wanted[j] + 0.25f * (w[j] - wanted[j]) : w[j];
                    CHECK(fabsf(a[j] - wanted[j]) <= 2e-7f * fabsf(wanted[j]), "%s, step %d: %g, expected %g", recipe,
                          step, (double)a[j], (double)wanted[j]);
                }
            }
            free(w);
            free(a);
            free(wanted);
            one_close(&live);
            one_close(&average);
        }
    }
    TEST("the weights to evaluate are schedule-free's average, and the weights of other rules") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            struct one t;
            open_random(&t, rule_info(row).name, 2, 5, 300, "f32");
            float *w = zeroed((size_t)t.n * 4), *x = zeroed((size_t)t.n * 4), *z = zeroed((size_t)t.n * 4);
            one_read(&t, WEIGHT, w);
            MUST(halfstep_read_average(t.o, 0, t.weight, 0, 5, x));
            CHECK(!memcmp(w, x, (size_t)t.n * 4), "%s: before the first step", rule_info(row).name);
            for (int step = 0; step < 3; step++) {
                random_gradient(&t, (uint64_t)step);
                MUST(one_step(&t));
            }
            one_read(&t, WEIGHT, w);
            MUST(halfstep_read_average(t.o, 0, t.weight, 0, 5, x));
            if (!rule_info(row).average) {
                CHECK(!memcmp(w, x, (size_t)t.n * 4), "%s averages nothing", rule_info(row).name);
            } else {
                one_read(&t, STATE + 1, z);
                int differ = 0;
                for (int64_t i = 0; i < t.n; i++) {
                    float wanted = w[i] + (float)(1 - 1 / 0.9) * (z[i] - w[i]);
                    CHECK(fabsf(wanted - x[i]) <= 1e-6f * fabsf(wanted), "%g, expected %g", (double)x[i],
                          (double)wanted);
                    differ += x[i] != w[i];
                }
                CHECK(differ > t.n / 2, "the average is the weight");
            }
            free(w);
            free(x);
            free(z);
            one_close(&t);
        }
    }
}

/* ---- Blocks and shapes ------------------------------------------------------------------------------------------- */

static int add(const char *recipe, int64_t rows, int64_t row_length, int64_t first_row, int64_t n_rows,
               int64_t first_column, int64_t n_columns, int *fell_back)
{
    int32_t index, fell = 0;
    halfstep_optimizer *o = new_optimizer(recipe, 0, 0);
    halfstep_tensor d = {.struct_size = sizeof d,
                         .name = "tensor",
                         .ndim = 2,
                         .rows = rows,
                         .row_length = row_length,
                         .first_row = first_row,
                         .n_rows = n_rows,
                         .first_column = first_column,
                         .n_columns = n_columns,
                         .gradient = "f32"};
    int result = halfstep_add_tensor(o, &d, &index);
    CHECK(result == OK || strstr(halfstep_error_detail(o), "'tensor'"), "'%s'", halfstep_error_detail(o));
    if (result == OK) MUST(halfstep_memory(o, NULL, NULL, NULL, NULL, &fell));
    if (fell_back) *fell_back = fell;
    halfstep_destroy(o);
    return result;
}

static void test_blocks(void)
{
    int fell;
    TEST("formats of flat blocks: whole blocks only, and shards on their borders") {
        EXPECT(add("adamw/f32/dyn8", 16, 256, 0, 0, 0, 0, &fell), OK);
        CHECK(!fell, "4096 elements in whole blocks fell back");
        EXPECT(add("adamw/f32/dyn8", 15, 256, 0, 0, 0, 0, &fell), OK);
        CHECK(fell, "fewer than 4096 elements did not fall back");
        EXPECT(add("adamw/f32/dyn8", 67, 100, 0, 0, 0, 0, &fell), OK);
        CHECK(fell, "6700 elements are no whole blocks");
        EXPECT(add("adamw/f32/dyn4", 128, 100, 32, 64, 0, 100, &fell), OK);
        CHECK(!fell, "rows of 100, 128 of them");
        EXPECT(add("adamw/f32/dyn4", 128, 100, 31, 65, 0, 100, NULL), SHAPE);
        EXPECT(add("adamw/f32/dyn4", 128, 100, 0, 128, 0, 50, NULL), SHAPE);
        EXPECT(add("adamw/f32/int8+dyn8", 64, 256, 0, 0, 0, 0, NULL), OK);
        EXPECT(add("adamw/f32/int8+dyn8", 256, 100, 0, 0, 0, 0, NULL), UNSUPPORTED);
    }
    TEST("columns are cut between blocks of every length") {
        EXPECT(add("adamw/f32/fp8", 4, 512, 0, 4, 0, 256, NULL), OK);
        EXPECT(add("adamw/f32/fp8", 4, 512, 0, 4, 0, 96, NULL), SHAPE);
        EXPECT(add("adamw/f32/int4", 4, 512, 0, 4, 96, 32, NULL), OK);
        EXPECT(add("adamw/f32/int4", 4, 512, 0, 4, 90, 32, NULL), SHAPE);
        EXPECT(add("muon", 4, 512, 0, 2, 0, 512, NULL), UNSUPPORTED);
    }
    TEST("rows of an odd number of 4-bit codes stay apart") {
        struct one t;
        float values[7 * 65], back[7 * 65], one_row[65];
        one_new(&t, "adamw/f32/int4", 2, 7, 65, "f32");
        for (int i = 0; i < 7 * 65; i++) values[i] = (float)(i % 65 + 1) * (i / 65 % 2 ? -1.0f : 1.0f);
        one_write(&t, STATE, values);
        one_read(&t, STATE, back);
        for (int i = 0; i < 7 * 65; i++)
            CHECK(fabsf(back[i] - values[i]) <= 0.35f * 65.0f, "element %d: %g of %g", i, (double)back[i],
                  (double)values[i]);
        for (int i = 0; i < 65; i++) one_row[i] = 0;
        MUST(halfstep_write_slot(t.o, 0, STATE, NULL, 3, 1, one_row));
        float again[7 * 65];
        one_read(&t, STATE, again);
        for (int i = 0; i < 7 * 65; i++)
            CHECK(again[i] == (i / 65 == 3 ? 0.0f : back[i]), "element %d: %g, was %g", i, (double)again[i],
                  (double)back[i]);
        one_close(&t);
    }
    TEST("a scale of a whole tensor, or of flat blocks, is not written in pieces") {
        struct one t;
        float *values = zeroed(128 * 100 * 4);
        one_new(&t, "adamw/f32/fp8-lamb16+dyn4", 2, 128, 100, "f32");
        for (int i = 0; i < 12800; i++) values[i] = 1e-3f;
        EXPECT(halfstep_write_slot(t.o, 0, 2, NULL, 0, 64, values), RANGE);
        EXPECT(halfstep_write_slot(t.o, 0, 2, NULL, 0, 128, values), OK);
        EXPECT(halfstep_write_slot(t.o, 0, 3, NULL, 0, 31, values), RANGE);
        EXPECT(halfstep_write_slot(t.o, 0, 3, NULL, 32, 32, values), OK);
        one_close(&t);
        free(values);
    }
}

/* ---- Calls in odd orders and odd places -------------------------------------------------------------------------- */

/* Makes a handle with one or two tensors in f32. It holds the rows from first_row on. */
struct handle {
    halfstep_optimizer *o;
    void *weight[2], *gradient[2]; /* of floats */
    int64_t *statistics;
    int64_t elements[2];
};

static void handle_open(struct handle *h, const char *recipe, int tensors, const int64_t *rows, int64_t row_length,
                        int part, int parts)
{
    memset(h, 0, sizeof *h);
    h->o = new_optimizer(recipe, 1, 42);
    for (int i = 0; i < tensors; i++) {
        ADD_TENSOR(h->o, .name = i ? "second" : "first", .ndim = 2, .rows = rows[i], .row_length = row_length,
                   .first_row = rows[i] / parts * part, .n_rows = rows[i] / parts, .n_columns = row_length,
                   .gradient = "f32");
        h->elements[i] = rows[i] / parts * row_length;
        float *weight = h->weight[i] = zeroed((size_t)h->elements[i] * 4);
        float *gradient = h->gradient[i] = zeroed((size_t)h->elements[i] * 4);
        for (int64_t j = 0; j < h->elements[i]; j++) {
            weight[j] = 0.5f;
            gradient[j] = 0.001f * (float)((part * h->elements[i] + j) % 97);
        }
    }
    h->statistics = zeroed((size_t)statistics_count(h->o) * 8);
}

static void handle_close(struct handle *h)
{
    halfstep_destroy(h->o);
    free(h->statistics);
    for (int i = 0; i < 2; i++) {
        free(h->weight[i]);
        free(h->gradient[i]);
    }
}

static float *floats(void *memory) { return memory; }
static void *const *weights_of(struct handle *h) { return h->weight; }
static const void *const *gradients_of(struct handle *h) { return (const void *const *)h->gradient; }

static void test_orders(void)
{
    static const int64_t four[1] = {4};
    TEST("before the states exist, statistics have their length, and an accumulation refuses NULL") {
        struct handle h;
        handle_open(&h, "lamb/f32/fp8-lamb16", 1, four, 64, 0, 1);
        int64_t before = statistics_count(h.o);
        EXPECT(halfstep_accumulate(h.o, 0, NULL, "f32", h.gradient[0], "f32", 1), ARGUMENT);
        EXPECT(halfstep_accumulate(h.o, 0, h.weight[0], "f32", NULL, "f32", 1), ARGUMENT);
        MUST(halfstep_allocate_states(h.o));
        CHECK(before == statistics_count(h.o) && before - norms_offset(h.o) == 4 * 68, "%lld, then %lld",
              (long long)before, (long long)statistics_count(h.o));
        handle_close(&h);
    }
    TEST("sums are made anew for every finish, and not taken from norms that failed") {
        struct handle twice, steps, part;
        handle_open(&twice, "lamb", 1, four, 64, 0, 1);
        handle_open(&steps, "lamb", 1, four, 64, 0, 1);
        MUST(halfstep_allocate_states(twice.o));
        MUST(halfstep_allocate_states(steps.o));
        MUST(step_begin(twice.o, gradients_of(&twice), twice.statistics));
        MUST(step_norms(twice.o, weights_of(&twice), gradients_of(&twice), twice.statistics));
        for (int i = 0; i < 2; i++) {
            MUST(step_finish(twice.o, weights_of(&twice), gradients_of(&twice), twice.statistics));
            MUST(halfstep_step(steps.o, weights_of(&steps), gradients_of(&steps)));
            CHECK(!memcmp(twice.weight[0], steps.weight[0], 4 * 256), "finish %d", i + 1);
        }
        handle_close(&twice);
        handle_close(&steps);
        handle_open(&part, "stableadamw", 1, four, 64, 0, 2);
        MUST(halfstep_allocate_states(part.o));
        MUST(halfstep_set_choice(part.o, 0, "decay", "fully-decoupled"));
        MUST(halfstep_set_hyper(part.o, 0, "lr", 0));
        MUST(step_begin(part.o, gradients_of(&part), part.statistics));
        EXPECT(step_norms(part.o, weights_of(&part), gradients_of(&part), part.statistics), RANGE);
        MUST(halfstep_set_hyper(part.o, 0, "weight_decay", 0));
        EXPECT(step_finish(part.o, weights_of(&part), gradients_of(&part), part.statistics), ORDER);
        handle_close(&part);
    }
    TEST("micro-steps of parts need no sums of rules, tensor by tensor or all at once") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            if (!rule_info(row).two_pass || !rule_info(row).accumulates) continue;
            struct handle all, single;
            const char *recipe = text_of("%s/f32/f32", rule_info(row).name);
            handle_open(&all, recipe, 1, four, 64, 1, 2);
            handle_open(&single, recipe, 1, four, 64, 1, 2);
            MUST(halfstep_allocate_states(all.o));
            MUST(halfstep_allocate_states(single.o));
            int64_t *statistics = zeroed((size_t)statistics_count(all.o) * 8);
            EXPECT(accumulate_states_begin(all.o, gradients_of(&all), statistics), OK);
            EXPECT(accumulate_states_finish(all.o, gradients_of(&all), statistics), OK);
            EXPECT(accumulate_states_tensor_begin(single.o, 0, single.gradient[0], statistics), OK);
            EXPECT(accumulate_states_tensor_finish(single.o, 0, single.gradient[0], statistics), OK);
            free(statistics);
            float a[128], b[128];
            MUST(halfstep_read_slot(all.o, 0, STATE, NULL, 0, 2, a));
            MUST(halfstep_read_slot(single.o, 0, STATE, NULL, 0, 2, b));
            CHECK(!memcmp(a, b, sizeof a) && a[1] != 0, "%s: first moments differ, or are zero", recipe);
            handle_close(&all);
            handle_close(&single);
        }
    }
    TEST("a process without tensors makes the steps of the others, and none alone") {
        uint64_t steps = 0;
        int64_t statistics[512] = {0};
        halfstep_optimizer *o = new_optimizer("adamw", 0, 0);
        MUST(halfstep_allocate_states(o));
        EXPECT_NAMED(o, halfstep_step(o, NULL, NULL), ORDER, "no tensor to step");
        EXPECT_NAMED(o, end_round(o), ORDER, "no tensor to step");
        EXPECT(step_begin(o, NULL, statistics), OK);
        EXPECT(step_norms(o, NULL, NULL, statistics), OK);
        EXPECT(step_finish(o, NULL, NULL, statistics), OK);
        EXPECT(end_round_begin(o, statistics), OK);
        EXPECT(end_round_finish(o, statistics), OK);
        MUST(get_group_steps(o, 0, &steps));
        EQUAL(steps, 2);
        halfstep_destroy(o);
    }
}

static void test_large_gradients(void)
{
    static const int64_t four[1] = {4};
    TEST("where gradients are not clipped by their own norm, too large a one is refused") {
        static const char *const clips[] = {"delayed", "per-tensor"};
        for (int mode = 0; mode < 4; mode++) {
            struct handle h;
            handle_open(&h, "adamw", 1, four, 64, 0, 1);
            MUST(halfstep_allocate_states(h.o));
            MUST(halfstep_set_hyper(h.o, ALL_GROUPS, "clip_norm", 1));
            MUST(halfstep_set_choice(h.o, ALL_GROUPS, "clip", clips[mode % 2]));
            floats(h.gradient[0])[7] = 1e30f;
            int result = mode < 2 ? step_tensor(h.o, 0, h.weight[0], h.gradient[0])
                                  : accumulate_states_tensor(h.o, 0, h.gradient[0]);
            CHECK(result == (mode == 1 ? OK : HALFSTEP_NONFINITE), "%s, %s: %d", clips[mode % 2],
                  mode < 2 ? "step" : "micro-step", result);
            EXPECT(accumulate_states(h.o, gradients_of(&h)), HALFSTEP_NONFINITE);
            float v[256];
            MUST(halfstep_read_slot(h.o, 0, STATE + 1, NULL, 0, 4, v));
            CHECK(isfinite(v[7]), "the second moment is %g", (double)v[7]);
            handle_close(&h);
        }
    }
    TEST("what a refused tensor leaves in the norm does not depend on the cut") {
        static const int64_t rows[2] = {1200, 4};
        struct handle whole, part[2];
        handle_open(&whole, "sgd", 2, rows, 64, 0, 1);
        for (int p = 0; p < 2; p++) handle_open(&part[p], "sgd", 2, rows, 64, p, 2);
        for (int i = 0; i < 3; i++) {
            struct handle *h = i ? &part[i - 1] : &whole;
            MUST(halfstep_allocate_states(h->o));
            MUST(halfstep_set_hyper(h->o, ALL_GROUPS, "clip_norm", 0.1));
            MUST(halfstep_set_hyper(h->o, 0, "lr", 10));
            MUST(halfstep_set_choice(h->o, ALL_GROUPS, "scan", "per-tensor"));
        }
        /* In the second half of what is one task of the whole, and in the second part. */
        floats(whole.gradient[0])[700 * 64 + 5] = floats(part[1].gradient[0])[100 * 64 + 5] = NAN;
        EXPECT(halfstep_step(whole.o, weights_of(&whole), gradients_of(&whole)), HALFSTEP_NONFINITE);
        for (int p = 0; p < 2; p++) MUST(step_begin(part[p].o, gradients_of(&part[p]), part[p].statistics));
        for (int64_t i = 0; i < statistics_count(whole.o); i++) part[0].statistics[i] += part[1].statistics[i];
        for (int p = 0; p < 2; p++)
            EXPECT(step_finish(part[p].o, weights_of(&part[p]), gradients_of(&part[p]), part[0].statistics),
                   HALFSTEP_NONFINITE);
        EQUAL(halfstep_gradient_norm(whole.o), halfstep_gradient_norm(part[0].o));
        const float *other = whole.weight[1];
        CHECK(!memcmp(other + 128, part[1].weight[1], 4 * 128) && other[1] != 0.5f, "the other tensor");
        handle_close(&whole);
        for (int p = 0; p < 2; p++) handle_close(&part[p]);
    }
    TEST("an infinite weight has no place in a sum, however short its row") {
        for (int64_t row_length = 7; row_length < 100; row_length += 57) {
            struct one t;
            double norm;
            one_new(&t, "lamb", 2, 4, row_length, "f32");
            one_hyper(&t, "max_weight_norm", 0);
            one_fill(&t, WEIGHT, 0.5f);
            random_gradient(&t, 3);
            ((float *)t.weight)[2] = INFINITY;
            MUST(one_step(&t));
            MUST(get_scalar(t.o, 0, "weight_norm", &norm));
            CHECK(norm > 0 && norm < 10, "rows of %d: %g", (int)row_length, norm);
            one_close(&t);
        }
    }
}

static void test_missing(void)
{
    TEST("a tensor without a gradient is left alone, or refused where the caller asks for that") {
        struct one a;
        open_random(&a, "adamw/bf16-sr", 2, 4, 64, "f32");
        void *before = zeroed(a.weight_bytes), *weights[1] = {a.weight};
        const void *none[1] = {NULL};
        memcpy(before, a.weight, a.weight_bytes);
        EXPECT(halfstep_step(a.o, weights, none), OK);
        EXPECT(halfstep_set_choice(a.o, ALL_GROUPS, "missing", "error"), OK);
        EXPECT_NAMED(a.o, halfstep_step(a.o, weights, none), ARGUMENT, "'w'");
        CHECK(!memcmp(before, a.weight, a.weight_bytes), "the weight changed");
        free(before);
        one_close(&a);
    }
}

/* ---- I-10: micro-steps ------------------------------------------------------------------------------------------- */

static void test_micro_counts(void)
{
    TEST("I-10 lookahead counts full steps, also where the accumulation count shares a factor with k") {
        static const int counts[][2] = {{6, 4}, {6, 3}, {2, 4}, {6, 1}};
        for (int c = 0; c < 4; c++) {
            struct one t;
            int k = counts[c][0], micro = counts[c][1], wrong = 0;
            one_open(&t, "ranger/f32", 2, 1, 64, "f32");
            one_hyper(&t, "k", k);
            one_hyper(&t, "lr", 1e-2);
            one_start(&t);
            one_fill(&t, WEIGHT, 1);
            double slow = 1;
            for (int full = 1; full <= 3 * k; full++) {
                const void *gradients[1] = {t.gradient};
                one_fill(&t, GRADIENT, 1);
                for (int i = 1; i < micro; i++) MUST(accumulate_states(t.o, gradients));
                MUST(one_step(&t));
                double now = one_mean(&t, STATE + 2);
                CHECK((now != slow) == (full % k == 0), "k %d, %d gradients a step: the slow weights %s in step %d", k,
                      micro, now != slow ? "moved" : "stayed", full);
                CHECK(full % k || now == one_mean(&t, WEIGHT), "the fast weights are not the slow ones");
                slow = now;
                /* The peer counts every gradient. */
                wrong += (full % k == 0) != (full * micro % k == 0);
            }
            CHECK((wrong > 0) == (micro > 1 || k == 2), "the counter-check agrees (%d gradients a step, k %d)", micro,
                  k);
            one_close(&t);
        }
    }
}

/* ---- I-7, I-8, I-9, and counters --------------------------------------------------------------------------------- */

static void test_counters(void)
{
    TEST("I-7 a first gradient that comes late is debiased by the tensor's own step count") {
        halfstep_optimizer *o = new_optimizer("adamw/f32/f32", 1, 0);
        float w[2][64] = {{0}}, g[2][64];
        MUST(halfstep_set_hyper(o, 0, "lr", 0.5));
        MUST(halfstep_set_hyper(o, 0, "weight_decay", 0));
        for (int i = 0; i < 2; i++)
            ADD_TENSOR(o, .name = i ? "late" : "early", .ndim = 2, .rows = 1, .row_length = 64, .gradient = "f32");
        MUST(halfstep_allocate_states(o));
        for (int i = 0; i < 64; i++) g[0][i] = 1, g[1][i] = -3;
        void *weights[2] = {w[0], w[1]};
        const void *gradients[2] = {g[0], NULL};
        for (int k = 0; k < 1000; k++) MUST(halfstep_step(o, weights, gradients));
        CHECK(w[1][0] == 0, "a NULL gradient moved its tensor");
        gradients[1] = g[1];
        MUST(halfstep_step(o, weights, gradients));
        CHECK(fabsf(w[1][63] - 0.5f) < 1e-5f, "the late tensor moved by %g, not by lr = 0.5", w[1][63]);
        halfstep_record c = counters_of(o, 1);
        CHECK(c.state_steps == 1 && c.full_steps == 1, "the late tensor counts %d", (int)c.state_steps);
        /* Counter-check: the peers use the group's count for both corrections. Same numbers. */
        double peer = 0.5 * (0.1 / (1 - pow(0.9, 1001))) / (sqrt(0.001) / sqrt(1 - pow(0.999, 1001)));
        CHECK(fabs(peer - 0.5) > 0.3, "the counter-check agrees");
        halfstep_destroy(o);
    }
    TEST("I-9 lr * decay = 1 decays all, and scalars are stepped under every weight format") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *format = format_for(row, HALFSTEP_ROLE_WEIGHT);
            if (!format) continue;
            struct one t;
            const char *recipe = text_of("adamw/%s", format);
            one_with(&t, recipe, 2, 2, 40, "f32", 0.5, 2);
            one_fill(&t, WEIGHT, 3.0f);
            MUST(one_step(&t));
            CHECK(one_mean(&t, WEIGHT) == 0, "%s: full decay leaves %g", format, one_mean(&t, WEIGHT));
            one_close(&t);
            one_with(&t, recipe, 0, 1, 1, "f32", 0.5, 0);
            one_fill(&t, GRADIENT, 1.0f);
            MUST(one_step(&t));
            CHECK(fabs(one_mean(&t, WEIGHT) + 0.5) < 0.004, "%s: the scalar is %g", format, one_mean(&t, WEIGHT));
            one_close(&t);
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_micro_steps();
    test_sums();
    test_copies();
    test_blocks();
    test_missing();
    test_orders();
    test_large_gradients();
    test_micro_counts();
    test_counters();
    return test_done();
}
