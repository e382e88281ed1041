/* Tests options that change what a rule keeps, or what a step depends on. They are one estimate of the learning rate
 * for many tensors, states that blocks cannot hold, first moments and a learning rate that falls. Others are the
 * reference of fully decoupled decay, its schedule, and what a refused gradient is reported as.
 *
 * Over 500 lines because the options share the tensors that they are tried on. */

#include "ref/fixture.h"

/* ---- Prodigy ----------------------------------------------------------------------------------------------------- */

enum { ROWS = 16, COLUMNS = 64, N = ROWS * COLUMNS, MOST = 3 };

/* Tensors x, y ... are pulled to goals of 1, -1 .... Each is in a group of its own. */
struct pulled {
    halfstep_optimizer *o;
    int n;
    float weight[MOST][N], gradient[MOST][N], goal[MOST][N];
    int idle[MOST]; /* without a gradient */
};

static void pulled_open(struct pulled *p, int n, const char *recipe, double lr)
{
    static const char *const names[MOST] = {"x", "y", "z"};
    struct source s = {5};
    memset(p, 0, sizeof *p);
    p->n = n;
    MUST(halfstep_create(NULL, &p->o));
    for (int i = 0; i < n; i++) {
        int32_t group;
        MUST(halfstep_add_group(p->o, recipe, &group));
        MUST(halfstep_set_hyper(p->o, group, "lr", lr));
        ADD_TENSOR(p->o, .group = group, .name = names[i], .ndim = 2, .rows = ROWS, .row_length = COLUMNS,
                   .gradient = "f32");
        for (int j = 0; j < N; j++) p->goal[i][j] = (float)next_normal(&s);
    }
    MUST(halfstep_allocate_states(p->o));
}

static void pull(struct pulled *p, float scale, const void *gradients[MOST], void *weights[MOST])
{
    for (int i = 0; i < p->n; i++) {
        for (int j = 0; j < N; j++) p->gradient[i][j] = scale * (p->weight[i][j] - p->goal[i][j]);
        gradients[i] = p->idle[i] ? NULL : p->gradient[i];
        weights[i] = p->weight[i];
    }
}

static int pulled_step(struct pulled *p, float scale)
{
    const void *gradients[MOST];
    void *weights[MOST];
    pull(p, scale, gradients, weights);
    return halfstep_step(p->o, weights, gradients);
}

static double number(const struct pulled *p, int i, const char *name)
{
    double value;
    MUST(get_scalar(p->o, i, name, &value));
    return value;
}

/* Returns the root mean square of the distance that is left. */
static double left(const struct pulled *p, int i)
{
    double sum = 0;
    for (int j = 0; j < N; j++) {
        double apart = (double)p->weight[i][j] - (double)p->goal[i][j];
        sum += apart * apart;
    }
    return sqrt(sum / N);
}

enum { FROZEN, RATE_ZERO, MISSES };

/* y joins after 40 steps, or misses every second gradient. It arrives all the same, and has x's numbers at any time. */
static void late(const char *recipe, int how)
{
    struct pulled p;
    pulled_open(&p, 2, recipe, 1);
    for (int step = 0; step < 160; step++) {
        int waits = how == MISSES ? step % 2 : step < 40;
        p.idle[1] = how != RATE_ZERO && waits;
        if (how == RATE_ZERO) MUST(halfstep_set_hyper(p.o, 1, "lr", waits ? 0 : 1));
        EXPECT(pulled_step(&p, 1), OK);
        for (int i = 0; i < 3; i++) {
            static const char *const names[] = {"d", "d_max", "d_numerator"};
            CHECK(number(&p, 0, names[i]) == number(&p, 1, names[i]), "%s, way %d, step %d: %s is %g and %g", recipe,
                  how, step, names[i], number(&p, 0, names[i]), number(&p, 1, names[i]));
        }
    }
    CHECK(left(&p, 0) < 0.05 && left(&p, 1) < 0.05, "%s, way %d: %g and %g of the way are left", recipe, how,
          left(&p, 0), left(&p, 1));
    CHECK(number(&p, 0, "d") > 0.05 && number(&p, 0, "d") < 5, "%s, way %d: d is %g", recipe, how, number(&p, 0, "d"));
    halfstep_destroy(p.o);
}

/* A step with rates of 0, or with gradients of 0: d, its bound and the weights stay, and it is no beginning. */
static void test_idle_steps(void)
{
    TEST("prodigy: a step of lr 0, or of zero gradients, changes no d and does not count as begun") {
        for (int safe = 0; safe < 2; safe++) {
            struct pulled a, b;
            pulled_open(&a, 2, "prodigy/f32/f32", 1);
            pulled_open(&b, 2, "prodigy/f32/f32", 1);
            MUST(halfstep_set_hyper(a.o, ALL_GROUPS, "safeguard_warmup", safe));
            MUST(halfstep_set_hyper(b.o, ALL_GROUPS, "safeguard_warmup", safe));
            for (int step = 0; step < 20; step++) {
                MUST(halfstep_set_hyper(a.o, ALL_GROUPS, "lr", step < 10 ? 0 : 1));
                EXPECT(pulled_step(&a, step < 10 ? 1 : 0), OK);
                CHECK(number(&a, 0, "d") == 0 && left(&a, 0) == left(&b, 0), "step %d begins", step);
            }
            for (int step = 0; step < 40; step++) {
                EXPECT(pulled_step(&a, 1), OK);
                EXPECT(pulled_step(&b, 1), OK);
            }
            CHECK(number(&a, 0, "d") == number(&b, 0, "d") && !memcmp(a.weight, b.weight, sizeof a.weight),
                  "idle steps before the first one matter: d %g and %g", number(&a, 0, "d"), number(&b, 0, "d"));
            /* In the middle d stays where it is, also where it was on its way to its bound. */
            MUST(halfstep_set_hyper(a.o, ALL_GROUPS, "growth_rate", 1.01));
            MUST(set_scalar(a.o, 0, "d_max", 10 * number(&a, 0, "d")));
            double d = number(&a, 0, "d");
            EXPECT(pulled_step(&a, 0), OK);
            EQUAL(number(&a, 0, "d"), d);
            halfstep_destroy(a.o);
            halfstep_destroy(b.o);
        }
    }
}

/* ---- A schedule of the weight decay ------------------------------------------------------------------------------ */

static void test_decay_schedule(void)
{
    enum { STEPS = 10 };
    int schedules = 0;
    while (halfstep_choice_value("schedule", schedules)) schedules++;
    TEST("a schedule of the weight decay is the weight decay set before each step, for every rule and schedule") {
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            const char *schedule = halfstep_choice_value("schedule", rule % schedules);
            const char *decays[] = {rule_info(rule).decay, "fully-decoupled"};
            struct source s = {(uint64_t)rule + 1};
            struct one t[2];
            float gradient[24 * 40], after[2][24 * 40];
            for (int k = 0; k < 2; k++) {
                one_open(&t[k], text_of("%s/f32", rule_info(rule).name), 2, 24, 40, "f32");
                MUST(halfstep_set_choice(t[k].o, 0, "decay", decays[rule % 2]));
                one_hyper(&t[k], "lr", 1e-2);
                one_hyper(&t[k], "reference_lr", 2e-2);
                one_hyper(&t[k], "weight_decay", 0.3);
                one_hyper(&t[k], "warmup_steps", 2); /* of lr alone */
                one_start(&t[k]);
                one_write(&t[k], WEIGHT, memset(after[k], 63, sizeof after[k]));
            }
            MUST(halfstep_set_choice(t[0].o, 0, "decay_schedule", schedule));
            one_hyper(&t[0], "total_steps", 8);
            one_hyper(&t[0], "final_decay_fraction", 0.25);
            for (uint64_t step = 0; step < STEPS; step++) {
                double factor;
                MUST(halfstep_schedule_factor(schedule, step, 0, 8, 0.25, 0.8, -0.5, &factor));
                one_hyper(&t[1], "weight_decay", 0.3 * factor);
                for (int64_t i = 0; i < t[0].n; i++) gradient[i] = (float)next_normal(&s);
                for (int k = 0; k < 2; k++) {
                    one_write(&t[k], GRADIENT, gradient);
                    MUST(one_step(&t[k]));
                    one_read(&t[k], WEIGHT, after[k]);
                }
                CHECK(!memcmp(after[0], after[1], sizeof after[0]), "%s, %s: step %d", rule_info(rule).name, schedule,
                      (int)step);
            }
            one_close(&t[0]);
            one_close(&t[1]);
        }
    }
}

static void test_rates(void)
{
    TEST("prodigy: two rates above 0 are refused, unless groups have another d_group") {
        struct pulled p;
        pulled_open(&p, 3, "prodigy/f32/f32", 1);
        MUST(halfstep_set_hyper(p.o, 1, "lr", 0.5));
        MUST(halfstep_set_hyper(p.o, 2, "lr", 0));
        EXPECT_NAMED(p.o, pulled_step(&p, 1), RANGE, "d_group");
        CHECK(number(&p, 0, "d") == 0, "a refused step begins");
        EXPECT(halfstep_set_hyper(p.o, 1, "d_group", 7), ORDER);
        MUST(halfstep_set_hyper(p.o, 1, "lr", 1));
        EXPECT(pulled_step(&p, 1), OK);
        halfstep_destroy(p.o);
        /* Separately, each does what it does alone. */
        struct pulled alone;
        halfstep_optimizer *o;
        void *weights[MOST];
        const void *gradients[MOST];
        pulled_open(&p, 2, "prodigy/f32/f32", 1);
        pulled_open(&alone, 2, "prodigy/f32/f32", 1);
        MUST(halfstep_create(NULL, &o));
        for (int i = 0; i < 2; i++) {
            int32_t group;
            MUST(halfstep_add_group(o, "prodigy/f32/f32", &group));
            MUST(halfstep_set_hyper(o, group, "lr", i ? 0.5 : 1));
            MUST(halfstep_set_hyper(o, group, "d_group", 3 + i));
            ADD_TENSOR(o, .group = group, .name = i ? "y" : "x", .ndim = 2, .rows = ROWS, .row_length = COLUMNS,
                       .gradient = "f32");
        }
        MUST(halfstep_allocate_states(o));
        alone.idle[0] = 1;
        MUST(halfstep_set_hyper(alone.o, ALL_GROUPS, "lr", 0.5));
        for (int step = 0; step < 60; step++) {
            pull(&p, 1, gradients, weights);
            EXPECT(halfstep_step(o, weights, gradients), OK);
            EXPECT(pulled_step(&alone, 1), OK);
        }
        CHECK(!memcmp(p.weight[1], alone.weight[1], sizeof p.weight[1]), "a d_group of its own is not its own");
        halfstep_destroy(o);
        halfstep_destroy(p.o);
        halfstep_destroy(alone.o);
    }
}

/* Numbers that are set for a tensor alone, as from states of another package. */
static void test_numbers_of_one(void)
{
    TEST("prodigy: of numbers that differ by tensor the set with the largest d is everybody's") {
        struct pulled p;
        pulled_open(&p, 3, "prodigy/f32/f32", 1);
        halfstep_record record = record_of(p.o, HALFSTEP_RECORD_TENSOR, 1);
        MUST(set_scalar(p.o, 0, "d", 1e-4));
        *record_place(p.o, &record, "d") = 0.25;
        *record_place(p.o, &record, "d_max") = 0.5;
        *record_place(p.o, &record, "d_numerator") = -3;
        MUST(halfstep_set_record(p.o, &record));
        for (int i = 0; i < 3; i++)
            CHECK(number(&p, i, "d") == 0.25 && number(&p, i, "d_max") == 0.5 && number(&p, i, "d_numerator") == -3,
                  "tensor %d has %g, %g, %g", i, number(&p, i, "d"), number(&p, i, "d_max"),
                  number(&p, i, "d_numerator"));
        halfstep_destroy(p.o);
    }
}

/* Two handles whose caller adds up their sums act as one, also while one of them has no gradient. */
static void test_two_handles(void)
{
    TEST("prodigy: handles whose sums are added up have one d") {
        struct pulled whole, part[2];
        pulled_open(&whole, 2, "prodigy/f32/f32", 1);
        for (int k = 0; k < 2; k++) {
            pulled_open(&part[k], 2, "prodigy/f32/f32", 1);
            part[k].idle[!k] = 1;
        }
        int64_t count = statistics_count(whole.o), offset = norms_offset(whole.o),
                head = 3 * round_statistics_count(whole.o);
        int64_t *statistics[2] = {zeroed((size_t)count * 8), zeroed((size_t)count * 8)};
        for (int step = 0; step < 80; step++) {
            whole.idle[1] = part[1].idle[1] = step < 30;
            EXPECT(pulled_step(&whole, 1), OK);
            const void *gradients[2][MOST];
            void *weights[2][MOST];
            for (int k = 0; k < 2; k++) {
                pull(&part[k], 1, gradients[k], weights[k]);
                EXPECT(step_begin(part[k].o, gradients[k], statistics[k]), OK);
                EXPECT(step_norms(part[k].o, weights[k], gradients[k], statistics[k]), OK);
            }
            int64_t each = tensor_statistics_count(whole.o, 0) - tensor_norms_offset(whole.o);
            for (int64_t j = 0; j < head; j++) {
                int64_t sum = 0;
                for (int k = 0; k < 2; k++)
                    for (int i = 0; i < 2; i++) {
                        sum += statistics[k][offset + i * each + j];
                        statistics[k][offset + i * each + j] = 0;
                    }
                statistics[0][offset + j] = statistics[1][offset + j] = sum;
            }
            for (int k = 0; k < 2; k++) EXPECT(step_finish(part[k].o, weights[k], gradients[k], statistics[k]), OK);
            CHECK(number(&whole, 0, "d") == number(&part[0], 0, "d") &&
                      number(&whole, 0, "d") == number(&part[1], 1, "d"),
                  "step %d: d is %g, and %g and %g of two handles", step, number(&whole, 0, "d"),
                  number(&part[0], 0, "d"), number(&part[1], 1, "d"));
        }
        CHECK(!memcmp(whole.weight[0], part[0].weight[0], sizeof whole.weight[0]) &&
                  !memcmp(whole.weight[1], part[1].weight[1], sizeof whole.weight[1]),
              "weights of two handles are not those of one");
        for (int k = 0; k < 2; k++) {
            free(statistics[k]);
            halfstep_destroy(part[k].o);
        }
        halfstep_destroy(whole.o);
    }
}

static void test_prodigy(void)
{
    TEST("prodigy: a tensor that starts late, had lr 0 or misses gradients has everybody's d and arrives") {
        for (int how = FROZEN; how <= MISSES; how++) {
            late("prodigy/f32/f32", how);
            late("prodigy/f32/int8", how);
        }
    }
    test_idle_steps();
    test_decay_schedule();
    test_rates();
    test_numbers_of_one();
    test_two_handles();
}

/* ---- States that blocks cannot hold ------------------------------------------------------------------------------ */

static double mean_step(const char *rule, const char *states, const char *option, double noise, int steps,
                        double *largest)
{
    struct one t;
    struct source s = {9};
    static float size[8 * 128], before[8 * 128], after[8 * 128];
    one_open(&t, text_of("%s/f32/%s", rule, states), 2, 8, 128, "f32");
    one_hyper(&t, "lr", 1e-4);
    if (*option) one_hyper(&t, option, 1);
    one_hyper(&t, "weight_decay", 0);
    if (!strcmp(rule, "adamw")) one_hyper(&t, "beta2", 0.99);
    one_start(&t);
    for (int i = 0; i < 1024; i++) size[i] = (float)(0.01 * exp(next_normal(&s)));
    *largest = 0;
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i < 1024; i++) t.room[i] = size[i] * (float)(1 + noise * next_normal(&s));
        one_write(&t, GRADIENT, t.room);
        if (step == steps / 2) one_read(&t, WEIGHT, before);
        one_read(&t, WEIGHT, t.room);
        MUST(one_step(&t));
        one_read(&t, WEIGHT, after);
        for (int i = 0; i < 1024 && step > 5; i++)
            *largest = fmax(*largest, fabs((double)after[i] - (double)t.room[i]));
    }
    double sum = 0;
    for (int i = 0; i < 1024; i++) sum += (double)before[i] - (double)after[i];
    one_close(&t);
    return sum / 1024;
}

/* Takes every block format of a role, under every option of every rule that has such states. */
static void test_precise(void)
{
    TEST("a largest value, and what is subtracted, are in no blocks while their option is on") {
        int found = 0;
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            halfstep_rule_info info = rule_info(row);
            for (int32_t f = 0; f < halfstep_format_count(); f++) {
                halfstep_format_info format = format_info(f);
                for (int on = 0; on < 2; on++)
                    for (int32_t i = 0; is_block_format(&format) && i < info.states; i++) {
                        struct one t;
                        if (!info.precise_if[i]) continue;
                        const char *recipe = text_of("%s/bf16-sr/%s", info.name, format.name);
                        one_open(&t, recipe, 2, 16, 256, "f32");
                        one_hyper(&t, info.precise_if[i], on);
                        one_start(&t);
                        halfstep_slot_info slot = slot_info(t.o, 0, STATE + i);
                        int32_t want = on ? halfstep_format_find(info.precise_format[i]) : f;
                        if (slot.format >= 0)
                            CHECK(slot.format == want && slot.precise == on && !slot.fell_back,
                                  "%s, %s %d: %s has format %d", recipe, info.precise_if[i], on, info.state_name[i],
                                  (int)slot.format);
                        found += on;
                        one_close(&t);
                    }
            }
        }
        CHECK(found >= 6 * 7, "%d such states", found);
    }
    TEST("amsgrad beside block states steps as in fp32") {
        static const char *const formats[] = {"int8", "int6", "int4", "fp8", "fp8-e5m2", "dyn8"};
        double largest, fp32 = mean_step("adamw", "f32", "amsgrad", 0.3, 600, &largest) /
                               mean_step("adamw", "f32", "", 0.3, 600, &largest);
        for (size_t i = 0; i < COUNT(formats); i++) {
            double ratio = mean_step("adamw", formats[i], "amsgrad", 0.3, 600, &largest) /
                           mean_step("adamw", formats[i], "", 0.3, 600, &largest);
            CHECK(fabs(ratio / fp32 - 1) < 0.04, "%s: %g of the steps without amsgrad, in fp32 %g", formats[i], ratio,
                  fp32);
        }
    }
    TEST("centered rmsprop in block states steps as in fp32") {
        static const char *const formats[] = {"int8", "int6", "int4", "fp8", "fp8-e5m2", "dyn8"};
        for (double noise = 0.1; noise < 4; noise *= 30) {
            double most, fp32 = mean_step("rmsprop", "f32", "centered", noise, 200, &most), largest;
            for (size_t i = 0; i < COUNT(formats); i++) {
                double step = mean_step("rmsprop", formats[i], "centered", noise, 200, &largest);
                CHECK(fabs(step / fp32 - 1) < 0.02 && largest < 1.1 * most,
                      "%s, noise %g: steps are %g of fp32's, the largest %g", formats[i], noise, step / fp32,
                      largest / most);
            }
        }
    }
}

/* ---- Adafactor --------------------------------------------------------------------------------------------------- */

static void test_adafactor(void)
{
    TEST("adafactor: a lr that fell acts at once on steps with a first moment, but for those published") {
        static const char *const recipes[] = {"adafactor/f32/f32", "adafactor/f32/int8",
                                              "adafactor/bf16-ecc16/bf16-sr"};
        for (size_t r = 0; r < COUNT(recipes); r++)
            for (int published = 0; published < 2; published++) {
                struct one t;
                struct source s = {3};
                double moved[2];
                one_open(&t, recipes[r], 2, 16, 64, "f32");
                one_hyper(&t, "beta1", 0.9);
                one_hyper(&t, "published", published);
                one_hyper(&t, "weight_decay", 0);
                one_start(&t);
                one_fill(&t, WEIGHT, 1);
                for (int step = 0; step < 31; step++) {
                    if (step >= 29) moved[step - 29] = one_mean(&t, WEIGHT);
                    if (step == 30) one_hyper(&t, "lr", 1e-5);
                    for (int64_t i = 0; i < t.n; i++) t.room[i] = (float)(1 + 0.1 * next_normal(&s));
                    one_write(&t, GRADIENT, t.room);
                    MUST(one_step(&t));
                }
                double last = moved[1] - one_mean(&t, WEIGHT), ratio = last / (moved[0] - moved[1]);
                CHECK(published ? ratio > 0.5 : ratio < 2e-3, "%s, published %d: lr fell to 1e-3, the step to %g",
                      recipes[r], published, ratio);
                one_close(&t);
            }
    }
}

/* ---- Fully decoupled decay --------------------------------------------------------------------------------------- */

static void test_reference(void)
{
    TEST("fully decoupled decay wants a reference that can be meant, and is at most the weight") {
        static const struct {
            double first, lr, reference, decay;
            int refused;
        } cases[] = {{1e-3, 1e-3, 0, 0.1, 0},  {1e-3, 5e-3, 0, 0.1, 0},     {1e-8, 1e-3, 0, 0.1, 1},
                     {1e-8, 1e-3, 0, 1e-6, 1}, {0, 1e-3, 0, 1e-6, 1},       {1e-8, 1e-3, 1e-3, 0.1, 0},
                     {0, 1e-3, 1e-3, 0.1, 0},  {1e-3, 2e-2, 1e-3, 0.01, 0}, {1e-3, 1e-3, 1e-3, 1.5, 1},
                     {1e-3, 1e-3, 1e-3, 1, 0}, {1e-3, 2e-3, 1e-3, 0.6, 1},  {1e-8, 1e-3, 0, 0, 0}};
        for (size_t i = 0; i < COUNT(cases); i++) {
            static const char *const recipes[] = {"adamw/f32/f32", "lion/bf16-sr/int8", "sgd/f32"};
            for (size_t r = 0; r < COUNT(recipes); r++) {
                struct one t;
                one_open(&t, recipes[r], 2, 2, 32, "f32");
                MUST(halfstep_set_choice(t.o, 0, "decay", "fully-decoupled"));
                one_hyper(&t, "lr", cases[i].first);
                one_hyper(&t, "lr", cases[i].lr);
                one_hyper(&t, "reference_lr", cases[i].reference);
                one_hyper(&t, "weight_decay", cases[i].decay);
                one_start(&t);
                one_fill(&t, WEIGHT, 1);
                int code = one_step(&t);
                if (cases[i].refused) {
                    EXPECT(code, RANGE);
                    NAMES(t.o, "reference_lr");
                    CHECK(one_mean(&t, WEIGHT) == 1, "a refused step moves weights");
                } else {
                    EXPECT(code, OK);
                    double want = 1 - cases[i].lr / (cases[i].reference > 0 ? cases[i].reference : cases[i].first) *
                                          cases[i].decay;
                    CHECK(fabs(one_mean(&t, WEIGHT) - want) < 4e-3, "%s, case %d: weights are %g, should be %g",
                          recipes[r], (int)i, one_mean(&t, WEIGHT), want);
                }
                one_close(&t);
            }
        }
    }
}

/* ---- Gradients that are too large -------------------------------------------------------------------------------- */

static void test_too_large(void)
{
    TEST("a refused gradient is told to be not finite, or too large") {
        static const char *const gradients[] = {"f32", "bf16"};
        for (int format = 0; format < 2; format++)
            for (int scan = 0; scan < 2; scan++)
                for (int bad = 0; bad < 4; bad++) {
                    static const float values[] = {1e19f, INFINITY, NAN, 1e19f};
                    struct one t;
                    one_open(&t, "adamw/f32/f32", 2, 3, 300, gradients[format]);
                    MUST(halfstep_set_choice(t.o, ALL_GROUPS, "scan", scan ? "per-tensor" : "scan"));
                    one_start(&t);
                    for (int64_t i = 0; i < t.n; i++) t.room[i] = 1;
                    t.room[7] = values[bad];
                    if (bad == 3) t.room[800] = NAN; /* which counts for more */
                    one_write(&t, GRADIENT, t.room);
                    EXPECT(one_step(&t), HALFSTEP_NONFINITE);
                    const char *detail = halfstep_error_detail(t.o);
                    int32_t too_large;
                    halfstep_nonfinite_tensor(t.o, &too_large);
                    CHECK(too_large == !bad && !strstr(detail, "not finite") == !bad && strstr(detail, "'w'"),
                          "value %g: '%s'", values[bad], detail);
                    one_fill(&t, GRADIENT, 1);
                    EXPECT(one_step(&t), OK);
                    one_close(&t);
                }
    }
}

/* ---- Values with names ------------------------------------------------------------------------------------------- */

static void test_words(void)
{
    TEST("a hyper-parameter whose values have names is a choice") {
        halfstep_optimizer *o;
        int32_t group[3];
        double value;
        const char *word;
        MUST(halfstep_create(NULL, &o));
        MUST(halfstep_add_group(o, "muon/f32", &group[0]));
        EXPECT(halfstep_add_group(o, "adamw/f32", &group[1]), OK);
        MUST(halfstep_add_group(o, "muon/bf16-sr/int8", &group[2]));
        CHECK(!strcmp(halfstep_get_choice(o, group[0], "ns_coefficients"), "given"), "not the first at first");
        for (int32_t i = 0; (word = halfstep_choice_value("ns_coefficients", i)); i++) {
            MUST(halfstep_set_choice(o, group[0], "ns_coefficients", word));
            MUST(halfstep_get_hyper(o, group[0], "ns_coefficients", &value));
            EQUAL((int)value, i);
            MUST(halfstep_set_hyper(o, group[2], "ns_coefficients", i));
            CHECK(!strcmp(halfstep_get_choice(o, group[2], "ns_coefficients"), word), "%s", word);
            EXPECT(halfstep_set_hyper(o, group[2], "ns_coefficients", i + 4), HALFSTEP_ERROR_RANGE);
            EXPECT(halfstep_set_hyper(o, group[2], "ns_coefficients", i + 0.5), HALFSTEP_ERROR_RANGE);
        }
        MUST(halfstep_set_choice(o, ALL_GROUPS, "ns_coefficients", "dion"));
        for (int i = 0; i < 3; i += 2)
            CHECK(!strcmp(halfstep_get_choice(o, group[i], "ns_coefficients"), "dion"), "group %d", i);
        CHECK(!halfstep_get_choice(o, group[1], "ns_coefficients"), "adamw has it");
        EXPECT(halfstep_set_choice(o, group[1], "ns_coefficients", "dion"), HALFSTEP_ERROR_NAME);
        EXPECT(halfstep_set_choice(o, group[0], "ns_coefficients", "jordan"), HALFSTEP_ERROR_NAME);
        CHECK(strstr(halfstep_error_detail(o), "'jordan' of 'ns_coefficients'; known: given, polar-express"), "'%s'",
              halfstep_error_detail(o));
        EXPECT(halfstep_set_choice(o, group[0], "ns_steps", "5"), HALFSTEP_ERROR_NAME);
        halfstep_destroy(o);
    }
    TEST("a list of coefficients has a least number of iterations") {
        static float taken[3][N];
        static const double steps[] = {1, 5, 6};
        for (int k = 0; k < 3; k++) {
            struct one t;
            struct source s = {3};
            one_open(&t, "muon/f32/f32", 2, ROWS, COLUMNS, "f32");
            one_hyper(&t, "ns_steps", steps[k]);
            MUST(halfstep_set_choice(t.o, 0, "ns_coefficients", "dion"));
            one_start(&t);
            for (int64_t i = 0; i < t.n; i++) t.room[i] = (float)next_normal(&s);
            one_write(&t, GRADIENT, t.room);
            EXPECT(one_step(&t), OK);
            one_read(&t, WEIGHT, taken[k]);
            one_close(&t);
        }
        CHECK(!memcmp(taken[0], taken[1], sizeof taken[0]), "one iteration is not five");
        CHECK(memcmp(taken[1], taken[2], sizeof taken[0]), "five iterations are six");
    }
}

/* ---- I-13: centralizing ------------------------------------------------------------------------------------------ */

static void test_centralizing(void)
{
    TEST("I-13 centralizing leaves scalars and vectors alone, and takes the mean of a row where there is one") {
        for (int ndim = 0; ndim <= 2; ndim++) {
            double mean[2];
            for (int centralize = 0; centralize < 2; centralize++) {
                struct one t;
                one_open(&t, "sgd/f32", ndim, ndim == 2 ? 4 : ndim ? 64 : 1, ndim == 2 ? 16 : 1, "f32");
                one_hyper(&t, "lr", 1);
                one_hyper(&t, "centralize", centralize);
                one_start(&t);
                for (int64_t i = 0; i < t.n; i++) t.room[i] = (float)(i % 16) - 3;
                one_write(&t, GRADIENT, t.room);
                MUST(one_step(&t));
                mean[centralize] = one_mean(&t, WEIGHT);
                one_close(&t);
            }
            CHECK(ndim == 2 ? fabs(mean[0] + 4.5) < 1e-6 && fabs(mean[1]) < 1e-6 : mean[0] == mean[1],
                  "%d dimensions: %g, %g", ndim, mean[0], mean[1]);
        }
    }
}

/* ---- I-39: learning rates of groups ------------------------------------------------------------------------------ */

static void test_groups(void)
{
    TEST("I-8, I-39 each group has its own lr, schedule and reference, whatever the order of calls") {
        static const double rates[] = {1e-3, 1e-1, 3e-2};
        halfstep_optimizer *o = new_optimizer("adamw/f32", 1, 0);
        int32_t group = 0;
        float w[3][32], g[32] = {0};
        for (int i = 0; i < 3; i++) {
            if (i) MUST(halfstep_add_group(o, "adamw/f32", &group));
            ADD_TENSOR(o, .group = group, .name = (const char *const[]){"first", "middle", "last"}[i], .ndim = 2,
                       .rows = 1, .row_length = 32, .gradient = "f32");
        }
        MUST(halfstep_allocate_states(o));
        for (int i = 2; i >= 0; i--) {
            MUST(halfstep_set_hyper(o, i, "lr", rates[i]));
            MUST(halfstep_set_hyper(o, i, "weight_decay", 0x1p-10));
            MUST(halfstep_set_choice(o, i, "decay", "fully-decoupled"));
            MUST(halfstep_set_choice(o, i, "schedule", "cosine"));
            MUST(halfstep_set_hyper(o, i, "total_steps", 100));
            for (int j = 0; j < 32; j++) w[i][j] = 1;
        }
        void *weights[3] = {w[0], w[1], w[2]};
        const void *gradients[3] = {g, g, g};
        double left = 1;
        for (int k = 0; k < 60; k++) {
            double factor;
            MUST(halfstep_schedule_factor("cosine", (uint64_t)k, 0, 100, 0, 0, 0, &factor));
            left *= 1 - factor * 0x1p-10;
            for (int i = 0; i < 3; i++) {
                double lr;
                MUST(halfstep_current_lr(o, i, &lr));
                CHECK(lr == rates[i] * factor, "group %d has lr %g in step %d, expected %g", i, lr, k,
                      rates[i] * factor);
            }
            MUST(halfstep_step(o, weights, gradients));
            for (int i = 0; k == 0 && i < 3; i++) CHECK(w[i][0] == 1 - 0x1p-10f, "group %d is at %.9g", i, w[i][0]);
        }
        /* If the constructor's lr were the reference, decay would be 1, 100 and 30 times that. */
        for (int i = 0; i < 3; i++)
            CHECK(fabs((double)w[i][5] - left) < 1e-5, "group %d is at %g, expected %g", i, w[i][5], left);
        for (int i = 0; i < 3; i++) {
            MUST(halfstep_set_choice(o, i, "schedule", "constant"));
            MUST(halfstep_set_hyper(o, i, "lr", rates[i] / 2));
            for (int j = 0; j < 32; j++) w[i][j] = 1;
        }
        MUST(halfstep_step(o, weights, gradients));
        for (int i = 0; i < 3; i++) CHECK(w[i][0] == 1 - 0x1p-11f, "half the lr: group %d is at %.9g", i, w[i][0]);
        halfstep_destroy(o);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_prodigy();
    test_precise();
    test_adafactor();
    test_reference();
    test_too_large();
    test_words();
    test_centralizing();
    test_groups();
    return test_done();
}
