/* Defects of other optimizers (optimi: I-1..I-10, torchastic: I-11..I-13, adamw_bfloat16: I-14..I-19, LAMB16:
 * I-20..I-24, torchao: I-25..I-31, flashoptim: I-32..I-40, llm.c: I-41, I-42), as in test_traps.c, which has those of
 * arithmetic on weights and second moments; here are those of rules, of LAMB16's states, of checkpoints and of
 * replicas. Each passes here and fails on the peer's way, which runs beside as a counter-check where it is cheap. Over
 * 500 lines because every defect needs its own small experiment. Runs are short unless --all is given. */
#include <math.h>

#include "ref/fixture.h"
#include "test.h"

/* Normal numbers for step k, element i: a long table, read from another place at each step. */
enum { TABLE = 1 << 20 };
static float normal(int64_t k, int64_t i)
{
    static float *table;
    if (!table) {
        struct source s = {41};
        table = zeroed(TABLE * sizeof *table);
        for (int j = 0; j < TABLE; j++) table[j] = (float)next_normal(&s);
    }
    return table[(k * 104729 + i) & (TABLE - 1)];
}

static void set_gradient(struct one *t, int step, double scale)
{
    for (int64_t i = 0; i < t->n; i++) t->room[i] = (float)(scale * (double)normal(step, i));
    one_write(t, HALFSTEP_SLOT_GRADIENT, t->room);
}

static void set_weights(struct one *t, double scale)
{
    for (int64_t i = 0; i < t->n; i++) t->room[i] = (float)(scale * (double)normal(7919, i));
    one_write(t, HALFSTEP_SLOT_WEIGHT, t->room);
}

/* ---- All that a tensor stores ------------------------------------------------------------------------------------ */

/* The bytes of each stream in turn, into an image or back: weights (whose codes are the caller's), residuals, states,
 * scales. Without an image only their number. */
static size_t each_stream(halfstep_optimizer *o, int32_t tensor, void *weight, unsigned char *image, int restore)
{
    size_t at = 0;
    for (int slot = 0; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
        halfstep_slot_info info = {.struct_size = sizeof info};
        if (slot == HALFSTEP_SLOT_GRADIENT || halfstep_get_slot_info(o, tensor, slot, &info) != HALFSTEP_OK ||
            info.format < 0)
            continue;
        void *stream[2] = {slot ? info.code : weight, info.extra};
        uint64_t bytes[2] = {info.code_bytes, info.extra_bytes};
        for (int k = 0; k < 2; k++) {
            if (!bytes[k]) continue;
            if (image) memcpy(restore ? stream[k] : image + at, restore ? image + at : stream[k], (size_t)bytes[k]);
            at += (size_t)bytes[k];
        }
    }
    return at;
}

struct image {
    unsigned char *bytes;
    size_t size;
};

static struct image take(halfstep_optimizer *o, int32_t tensor, void *weight)
{
    struct image image = {NULL, each_stream(o, tensor, weight, NULL, 0)};
    image.bytes = zeroed(image.size);
    each_stream(o, tensor, weight, image.bytes, 0);
    return image;
}

static int same_bits(struct image a, struct image b) { return a.size == b.size && !memcmp(a.bytes, b.bytes, a.size); }

/* Whether the bits are those of an image, which is freed. */
static int still(halfstep_optimizer *o, int32_t tensor, void *weight, struct image before)
{
    struct image now = take(o, tensor, weight);
    int same = same_bits(before, now);
    free(before.bytes);
    free(now.bytes);
    return same;
}

/* ---- I-1: lookahead ---------------------------------------------------------------------------------------------- */

/* Length of RAdam's step t for a gradient that is always 1, over lr. */
static double radam_step(int t, double beta2)
{
    double all = 2 / (1 - beta2) - 1, power = pow(beta2, t), now = all - 2 * t * power / (1 - power);
    return now > 5 ? sqrt((now - 4) * (now - 2) * all / ((all - 4) * (all - 2) * now)) : 1;
}

/* optimi's single residual, every operation rounded to BF16: how far weights from 1 to 2 get. */
static double lookahead_peer(double lr, int steps)
{
    enum { N = 512 };
    double moved = 0;
    for (int i = 0; i < N; i++) {
        float start = bf16_nearest(1 + (float)i / N), w = start, slow = start, c = 0;
        for (int t = 1; t <= steps; t++) {
            float old = w;
            c = bf16_nearest(c - (float)(lr * radam_step(t, 0.99)));
            w = bf16_nearest(w + c);
            c = bf16_nearest(c + bf16_nearest(old - w));
            if (t % 6) continue;
            c = bf16_nearest(c + 0.5f * bf16_nearest(w - slow));
            old = slow;
            slow = bf16_nearest(slow + c);
            c = bf16_nearest(c + bf16_nearest(old - slow));
            w = slow;
        }
        moved += (double)start - (double)w;
    }
    return moved / N;
}

static double ranger_moved(const char *format, double lr, int steps)
{
    char recipe[64];
    struct one t;
    snprintf(recipe, sizeof recipe, "ranger/%s", format);
    one_open(&t, recipe, 2, 32, 128, "bf16");
    one_hyper(&t, "lr", lr);
    one_start(&t);
    for (int64_t i = 0; i < t.n; i++) t.room[i] = 1 + (float)i / (float)t.n;
    one_write(&t, HALFSTEP_SLOT_WEIGHT, t.room);
    double start = one_mean(&t, HALFSTEP_SLOT_WEIGHT);
    one_fill(&t, HALFSTEP_SLOT_GRADIENT, 1);
    for (int k = 0; k < steps; k++) MUST(one_step(&t));
    double moved = start - one_mean(&t, HALFSTEP_SLOT_WEIGHT);
    one_close(&t);
    return moved;
}

static void test_lookahead(void)
{
    TEST("I-1 ranger realises slow progress under every 16-bit weight format") {
        int steps = UNLESS_ALL(600, 3000);
        /* Every six fast steps the slow weights go half of the way, and the fast ones start again from there. */
        double exact = 0;
        for (int t = 1; t <= steps; t++) exact += 0.5e-5 * radam_step(t, 0.99);
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            if (!(info.roles & HALFSTEP_ROLE_WEIGHT) || (info.code_bits == 16 && !info.stochastic && !info.extra_bits))
                continue;
            double part = ranger_moved(info.name, 1e-5, steps) / exact;
            printf("     %-10s realised %.4f of the movement\n", info.name, part);
            /* Without a residual, weights wander by half of 2^-7 a rounding. */
            double bound = info.extra_bits || info.code_bits == 32 ? 0.02 : UNLESS_ALL(0.2, 0.08);
            CHECK(fabs(part - 1) < bound, "%s: %.4f", info.name, part);
        }
        double peer = lookahead_peer(1e-5, steps) / exact;
        printf("     one residual for both (the peer) realised %.4f\n", peer);
        CHECK(peer < 0.2, "the counter-check realises %.3f", peer);
    }
}

/* ---- I-2: Adan's decay ------------------------------------------------------------------------------------------- */

static void test_adan(void)
{
    TEST("I-2 adan honours its decay modes, and they differ where lr * decay is large") {
        static const char *const modes[] = {"proximal", "decoupled"};
        static const char *const formats[] = {"f32", "bf16-ecc16"};
        for (int f = 0; f < 2; f++) {
            double w[2], update = 0;
            for (int mode = -1; mode < 2; mode++) {
                char recipe[64];
                struct one t;
                snprintf(recipe, sizeof recipe, "adan/%s/f32", formats[f]);
                one_open(&t, recipe, 2, 1, 64, "f32");
                one_hyper(&t, "lr", 0.25);
                one_hyper(&t, "weight_decay", mode < 0 ? 0 : 2);
                if (mode >= 0) MUST(halfstep_set_choice(t.o, 0, "decay", modes[mode]));
                one_start(&t);
                one_fill(&t, HALFSTEP_SLOT_WEIGHT, 3);
                one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
                MUST(one_step(&t));
                if (mode < 0) update = 3 - one_mean(&t, HALFSTEP_SLOT_WEIGHT);
                else w[mode] = one_mean(&t, HALFSTEP_SLOT_WEIGHT);
                one_close(&t);
            }
            double proximal = (3 - update) / 1.5, decoupled = 3 - update - 0.5 * 3;
            printf("     %s, lr * decay = 0.5: proximal %.6f (%.6f), decoupled %.6f (%.6f)\n", formats[f], w[0],
                   proximal, w[1], decoupled);
            CHECK(fabs(update - 0.25) < 1e-5, "the first update is %g, not lr", update);
            CHECK(fabs(w[0] - proximal) < 1e-5 && fabs(w[1] - decoupled) < 1e-5, "proximal %g, decoupled %g", w[0],
                  w[1]);
            CHECK(fabs(w[0] - w[1]) > 0.1, "the modes agree: %g", w[0]);
        }
        /* The peer's own test, at lr * decay = 2e-5, cannot tell the two apart. */
        CHECK(fabs((1 - 2e-5) - 1 / (1 + 2e-5)) < 1e-9, "the counter-check sees it");
    }
}

/* ---- I-3, I-4: calls without gradients --------------------------------------------------------------------------- */

enum { TENSORS = 3 };
static const int64_t shape[TENSORS][2] = {{1, 1}, {24, 160}, {70, 1}};
static const int dimensions[TENSORS] = {0, 2, 1};

struct model {
    halfstep_optimizer *o;
    void *weight[TENSORS];
    float *gradient[TENSORS];
};

static void model_open(struct model *m, const char *recipe, int empty_step)
{
    int32_t group;
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 42};
    MUST(halfstep_create(&options, &m->o));
    MUST(halfstep_add_group(m->o, recipe, &group));
    if (empty_step) MUST(halfstep_step(m->o, NULL, NULL));
    if (empty_step) MUST(halfstep_end_round(m->o));
    for (int i = 0; i < TENSORS; i++) {
        static const char *const names[TENSORS] = {"scalar", "matrix", "vector"};
        ADD_TENSOR(m->o, .group = group, .name = names[i], .ndim = dimensions[i], .rows = shape[i][0],
                   .row_length = shape[i][1], .gradient = "f32");
    }
    MUST(halfstep_allocate_states(m->o));
    for (int i = 0; i < TENSORS; i++) {
        int64_t n = shape[i][0] * shape[i][1];
        m->weight[i] = zeroed((size_t)n * 4);
        m->gradient[i] = zeroed((size_t)n * 4);
        for (int64_t j = 0; j < n; j++) m->gradient[i][j] = normal(100 + i, j);
        MUST(halfstep_write_slot(m->o, i, HALFSTEP_SLOT_WEIGHT, m->weight[i], 0, shape[i][0], m->gradient[i]));
    }
}

static void model_gradients(struct model *m, int step)
{
    for (int i = 0; i < TENSORS; i++)
        for (int64_t j = 0; j < shape[i][0] * shape[i][1]; j++) m->gradient[i][j] = normal(step, 1000 * i + j);
}

static int model_step(struct model *m)
{
    const void *gradients[TENSORS] = {m->gradient[0], m->gradient[1], m->gradient[2]};
    return halfstep_step(m->o, m->weight, gradients);
}

static void model_close(struct model *m)
{
    halfstep_destroy(m->o);
    for (int i = 0; i < TENSORS; i++) free(m->weight[i]), free(m->gradient[i]);
}

static int models_differ(struct model *a, struct model *b)
{
    int differ = 0;
    for (int i = 0; i < TENSORS; i++) {
        struct image x = take(a->o, i, a->weight[i]);
        differ |= !still(b->o, i, b->weight[i], x);
    }
    return differ;
}

/* Residual and scales included, under a recipe of 16-bit weights and the rule's default states. */
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
            struct model plain, after;
            rule_recipe(rule, recipe);
            MUST(halfstep_set_isa("scalar"));
            model_open(&plain, recipe, 0);
            for (int k = 0; k < 5; k++) {
                model_gradients(&plain, k);
                MUST(model_step(&plain));
            }
            for (int32_t isa = 0; isa < halfstep_isa_count(); isa++) {
                if (!halfstep_isa_available(isa)) continue;
                MUST(halfstep_set_isa(halfstep_isa_name(isa)));
                model_open(&after, recipe, 1);
                for (int k = 0; k < 5; k++) {
                    model_gradients(&after, k);
                    MUST(model_step(&after));
                }
                CHECK(!models_differ(&plain, &after), "%s: an empty step changed what follows on %s", recipe,
                      halfstep_isa_name(isa));
                model_close(&after);
            }
            MUST(halfstep_set_isa(NULL));
            model_close(&plain);
        }
    }
    TEST("I-4 in gradient release a stray step without gradients changes no bit, then or later, under every rule") {
        const void *const none[TENSORS] = {NULL, NULL, NULL};
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            char recipe[64];
            struct model plain, stray;
            if (rule_info(rule).totals) continue; /* it is not released */
            rule_recipe(rule, recipe);
            model_open(&plain, recipe, 0);
            model_open(&stray, recipe, 0);
            for (int k = 0; k < 6; k++) {
                struct image before = take(stray.o, 1, stray.weight[1]);
                halfstep_counters c = {.struct_size = sizeof c}, d = {.struct_size = sizeof d};
                MUST(halfstep_get_counters(stray.o, 1, &c));
                MUST(halfstep_step(stray.o, stray.weight, none));
                MUST(halfstep_get_counters(stray.o, 1, &d));
                CHECK(!memcmp(&c, &d, sizeof c), "%s: a step without gradients is counted", recipe);
                CHECK(still(stray.o, 1, stray.weight[1], before), "%s: a step without gradients changed something",
                      recipe);
                model_gradients(&plain, k);
                model_gradients(&stray, k);
                for (int i = TENSORS - 1; i >= 0; i--) {
                    MUST(halfstep_step_tensor(plain.o, i, plain.weight[i], plain.gradient[i]));
                    MUST(halfstep_step_tensor(stray.o, i, stray.weight[i], stray.gradient[i]));
                    if (i) MUST(halfstep_step(stray.o, stray.weight, none));
                }
                MUST(halfstep_end_round(plain.o));
                MUST(halfstep_end_round(stray.o));
            }
            CHECK(!models_differ(&plain, &stray), "%s: stray steps changed later ones", recipe);
            model_close(&plain);
            model_close(&stray);
        }
    }
}

/* ---- I-10: micro-steps ------------------------------------------------------------------------------------------- */

/* Updates by which a rule moves nothing, not even by decay: 0, or 1 where the first does no more than begin a second
 * moment. */
static int still_updates(const char *recipe)
{
    struct one t;
    one_open(&t, recipe, 1, 64, 1, "f32");
    one_hyper(&t, "weight_decay", 0.1);
    one_start(&t);
    one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
    one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
    MUST(one_step(&t));
    int still = one_mean(&t, HALFSTEP_SLOT_WEIGHT) == 1;
    one_close(&t);
    return still;
}

static void test_micro_steps(void)
{
    TEST("I-10 no rule drops the gradient of a micro-step: it counts, or is refused by name") {
        int refused = 0, counted = 0;
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            halfstep_rule_info info = rule_info(rule);
            char recipe[64];
            double moved[2];
            int result = HALFSTEP_OK;
            snprintf(recipe, sizeof recipe, "%s/f32", info.name);
            for (int with = 0; with < 2; with++) {
                struct one t;
                one_open(&t, recipe, 1, 64, 1, "f32");
                one_start(&t);
                one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
                one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
                for (int k = still_updates(recipe); k; k--) MUST(one_step(&t));
                one_fill(&t, HALFSTEP_SLOT_GRADIENT, with ? 0.5f : 0);
                const void *gradients[1] = {t.gradient};
                struct image before = take(t.o, 0, t.weight);
                float *weight = zeroed(t.weight_bytes);
                memcpy(weight, t.weight, t.weight_bytes);
                result = halfstep_accumulate_states(t.o, gradients);
                CHECK(!memcmp(weight, t.weight, t.weight_bytes), "%s: a micro-step moved the weights", info.name);
                if (result)
                    CHECK(result == HALFSTEP_ERROR_UNSUPPORTED && strstr(halfstep_error_detail(t.o), info.name),
                          "%s: %d, '%s'", info.name, result, halfstep_error_detail(t.o));
                if (result && with) printf("     %s: refused, \"%s\"\n", info.name, halfstep_error_detail(t.o));
                int same = still(t.o, 0, t.weight, before);
                CHECK(result == HALFSTEP_OK || same, "%s: a refused micro-step changed a state", info.name);
                one_fill(&t, HALFSTEP_SLOT_GRADIENT, info.raw_gradient ? 1 : 0);
                MUST(one_step(&t));
                moved[with] = 1 - one_mean(&t, HALFSTEP_SLOT_WEIGHT);
                free(weight);
                one_close(&t);
            }
            refused += result != HALFSTEP_OK;
            counted += result == HALFSTEP_OK;
            CHECK((result == HALFSTEP_OK) == info.accumulates || !strcmp(info.name, "sgd") ||
                      !strcmp(info.name, "rmsprop"),
                  "%s: %d, but accumulates is %d", info.name, result, info.accumulates);
            CHECK(result || fabs(moved[1] - moved[0]) > 1e-8, "%s: the gradient of a micro-step had no effect",
                  info.name);
        }
        printf("     %d rules accumulate, %d refuse with their default hyper-parameters\n", counted, refused);
        struct one t;
        one_open(&t, "sgd/f32", 1, 64, 1, "f32");
        one_hyper(&t, "momentum", 0.9);
        one_start(&t);
        one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
        const void *gradients[1] = {t.gradient};
        CHECK(halfstep_accumulate_states(t.o, gradients) == HALFSTEP_OK, "sgd with momentum: %s",
              halfstep_error_detail(t.o));
        one_close(&t);
    }
    TEST("I-10 l2 decay, which only the last gradient of a step would get, is refused in micro-steps") {
        struct one t;
        one_open(&t, "adam/f32", 1, 64, 1, "f32");
        one_hyper(&t, "weight_decay", 0.1);
        one_start(&t);
        one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
        const void *gradients[1] = {t.gradient};
        int result = halfstep_accumulate_states(t.o, gradients);
        CHECK(result == HALFSTEP_ERROR_UNSUPPORTED && strstr(halfstep_error_detail(t.o), "l2"), "%d: %s", result,
              halfstep_error_detail(t.o));
        CHECK(halfstep_accumulate_states_tensor(t.o, 0, t.gradient) == HALFSTEP_ERROR_UNSUPPORTED,
              "in release it is not");
        one_hyper(&t, "weight_decay", 0);
        CHECK(halfstep_accumulate_states(t.o, gradients) == HALFSTEP_OK, "%s", halfstep_error_detail(t.o));
        one_close(&t);
    }
    TEST("I-10 lookahead counts full steps, also where the accumulation count shares a factor with k") {
        static const int counts[][2] = {{6, 4}, {6, 3}, {2, 4}, {6, 1}};
        for (int c = 0; c < 4; c++) {
            struct one t;
            int k = counts[c][0], micro = counts[c][1], wrong = 0;
            one_open(&t, "ranger/f32", 2, 1, 64, "f32");
            one_hyper(&t, "k", k);
            one_hyper(&t, "lr", 1e-2);
            one_start(&t);
            one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
            double slow = 1;
            for (int full = 1; full <= 3 * k; full++) {
                const void *gradients[1] = {t.gradient};
                one_fill(&t, HALFSTEP_SLOT_GRADIENT, 1);
                for (int i = 1; i < micro; i++) MUST(halfstep_accumulate_states(t.o, gradients));
                MUST(one_step(&t));
                double now = one_mean(&t, HALFSTEP_SLOT_STATE + 2);
                CHECK((now != slow) == (full % k == 0), "k %d, %d gradients a step: the slow weights %s in step %d", k,
                      micro, now != slow ? "moved" : "stayed", full);
                CHECK(full % k || now == one_mean(&t, HALFSTEP_SLOT_WEIGHT), "the fast weights are not the slow ones");
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

/* ---- I-11, I-13, I-14: the first steps, centralizing ------------------------------------------------------------- */

static double first_change(const char *recipe, const char *option, double value, double lr, double decay,
                           float gradient)
{
    struct one t;
    one_open(&t, recipe, 2, 4, 64, "f32");
    one_hyper(&t, "lr", lr);
    one_hyper(&t, "weight_decay", decay);
    if (option) one_hyper(&t, option, value);
    one_start(&t);
    one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
    one_fill(&t, HALFSTEP_SLOT_GRADIENT, gradient);
    MUST(one_step(&t));
    double change = 1 - one_mean(&t, HALFSTEP_SLOT_WEIGHT);
    one_close(&t);
    return change;
}

static void test_first_steps(void)
{
    TEST("I-11 the first steps of compass and lpfadamw are of length lr, not lr / (1 - beta)") {
        for (int published = 0; published < 2; published++) {
            double compass = first_change("compass/f32", "published", published, 1e-3, 0, 0.5f) / 1e-3;
            double lpf = first_change("lpfadamw/f32", "published", published, 1e-3, 0, 0.5f) / 1e-3;
            printf("     %s: first step / lr: compass %.3f, lpfadamw %.3f\n", published ? "published" : "ours", compass,
                   lpf);
            if (!published) CHECK(fabs(compass - 1) < 1e-3 && fabs(lpf - 1) < 1e-3, "%g and %g", compass, lpf);
            else CHECK(compass > 99, "the counter-check's first step is %g lr", compass);
        }
        struct one t;
        one_open(&t, "compass/f32", 2, 16, 64, "f32");
        one_hyper(&t, "lr", 1.0);
        one_start(&t);
        double largest = 0;
        for (int k = 0; k < 100; k++) {
            one_fill(&t, HALFSTEP_SLOT_WEIGHT, 0);
            set_gradient(&t, k, 1e-3);
            MUST(one_step(&t));
            one_read(&t, HALFSTEP_SLOT_WEIGHT, t.room);
            for (int64_t i = 0; i < t.n; i++) largest = fmax(largest, fabs((double)t.room[i]));
        }
        printf("     compass, 100 random gradients: largest step %.2f lr\n", largest);
        /* Of t values the largest root over the root mean square is sqrt(t). */
        CHECK(largest < 10, "a step of %.2f lr", largest);
        one_close(&t);
    }
    TEST("I-11 decay is lr * weight_decay from the first step that moves anything on, under every rule that decays by "
         "it") {
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            halfstep_rule_info info = rule_info(rule);
            /* By design: lumps, shares of the weights' norm, and a rate that needs gradients. ema's gradient is a
             * weight. */
            if (!strcmp(info.name, "adamw-delayed") || !strcmp(info.name, "prodigy") ||
                !strncmp(info.name, "lamb", 4) || info.raw_gradient)
                continue;
            char recipe[64];
            struct one t;
            snprintf(recipe, sizeof recipe, "%s/f32", info.name);
            one_open(&t, recipe, 2, 4, 64, "f32");
            one_hyper(&t, "lr", 1e-2);
            one_hyper(&t, "weight_decay", 0.1);
            MUST(halfstep_set_choice(t.o, 0, "decay", "decoupled"));
            one_start(&t);
            /* Schedule-free decays its sequence z; y, the weight, follows it by 1 - beta1, and wholly in the first
             * step. */
            int steps = !strcmp(info.name, "schedulefree") || !strcmp(info.name, "ranger") ? 1 : 5;
            one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
            for (int k = 0; k < steps; k++) MUST(one_step(&t));
            double left = one_mean(&t, HALFSTEP_SLOT_WEIGHT), expected = pow(1 - 1e-3, steps - still_updates(recipe));
            CHECK(fabs((left - expected) / (1 - expected)) < 1e-3, "%s: %.7f is left after %d steps, expected %.7f",
                  info.name, left, steps, expected);
            one_close(&t);
        }
        double compass = first_change("compass/f32", "published", 1, 1e-3, 0.1, 0) / 1e-4;
        double lpf = first_change("lpfadamw/f32", "published", 1, 1e-3, 0.1, 0) / 1e-4;
        printf("     published, first decay / (lr * weight_decay): compass %.1f, lpfadamw %.1f\n", compass, lpf);
        CHECK(compass > 90 && lpf > 9, "the counter-check decays %g and %g times", compass, lpf);
    }
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
                one_write(&t, HALFSTEP_SLOT_GRADIENT, t.room);
                MUST(one_step(&t));
                mean[centralize] = one_mean(&t, HALFSTEP_SLOT_WEIGHT);
                one_close(&t);
            }
            CHECK(ndim == 2 ? fabs(mean[0] + 4.5) < 1e-6 && fabs(mean[1]) < 1e-6 : mean[0] == mean[1],
                  "%d dimensions: %g, %g", ndim, mean[0], mean[1]);
        }
    }
    TEST("I-14 warm-ups start at 1 / P; the peer's schedule and its uncorrected m are there by name") {
        double first, peak, peer;
        MUST(halfstep_schedule_factor("linear", 0, 100, 1000, 0, 0, 0, &first));
        MUST(halfstep_schedule_factor("linear", 99, 100, 1000, 0, 0, 0, &peak));
        MUST(halfstep_schedule_factor("inverse-power", 0, 100, 0, 0, 0, -0.5, &peer));
        CHECK(first == 0.01 && peak == 1, "linear begins with %g, step 99 has %g", first, peak);
        CHECK(peer == 0.02, "the peer's schedule begins with %g", peer);
        double delayed = first_change("adamw-delayed/f32", NULL, 0, 1e-3, 0, 0.5f) / 1e-3;
        double adamw = first_change("adamw/f32", NULL, 0, 1e-3, 0, 0.5f) / 1e-3;
        printf("     first step / lr: adamw %.4f, adamw-delayed %.4f\n", adamw, delayed);
        CHECK(fabs(adamw - 1) < 1e-3 && fabs(delayed - 0.1) < 1e-3, "adamw %g, adamw-delayed %g", adamw, delayed);
    }
}

/* ---- I-15 to I-19: adamw_bfloat16 -------------------------------------------------------------------------------- */

/* Mean root of a stored second moment over the exact one, after gradients fell tenfold; weights are left alone. */
static double fallen_moment(const char *recipe, int ndim, int64_t rows, int64_t row_length, int before, int after)
{
    struct one t;
    one_open(&t, recipe, ndim, rows, row_length, "f32");
    one_hyper(&t, "lr", 0);
    one_start(&t);
    double *exact = zeroed((size_t)t.n * 8), stored = 0, sum = 0;
    for (int k = 0; k < before + after; k++) {
        double scale = k < before ? 1 : 0.1;
        set_gradient(&t, k, scale);
        for (int64_t i = 0; i < t.n; i++) exact[i] = 0.999 * exact[i] + 0.001 * (double)t.room[i] * (double)t.room[i];
        MUST(one_step(&t));
    }
    one_read(&t, HALFSTEP_SLOT_STATE + 1, t.room);
    for (int64_t i = 0; i < t.n; i++) stored += sqrt((double)t.room[i]), sum += sqrt(exact[i]);
    free(exact);
    one_close(&t);
    return stored / sum;
}

static void test_delayed(void)
{
    int steps = UNLESS_ALL(2000, 10000);
    double each = 0.1 / steps; /* lr * decay */
    TEST("I-15 adamw-delayed: decay of 1e-5 a step is gathered and applied, under every weight format") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            if (!(info.roles & HALFSTEP_ROLE_WEIGHT)) continue;
            char recipe[64];
            struct one t;
            snprintf(recipe, sizeof recipe, "adamw-delayed/%s", info.name);
            one_open(&t, recipe, 2, 16, 256, "bf16");
            one_hyper(&t, "lr", 1e-3);
            one_hyper(&t, "weight_decay", each / 1e-3);
            one_start(&t);
            set_weights(&t, 1);
            float *start = zeroed((size_t)t.n * 4);
            double before = 0, left = 0, a = 0, ideal = 1, pending;
            one_read(&t, HALFSTEP_SLOT_WEIGHT, start);
            for (int k = 0; k < steps; k++) {
                MUST(one_step(&t));
                if (k == 0) {
                    MUST(halfstep_get_scalar(t.o, 0, "accumulated_decay", &a));
                } else {
                    a += each;
                    if (a > 5e-3) ideal *= 1 - a, a = 0;
                }
            }
            MUST(halfstep_get_scalar(t.o, 0, "accumulated_decay", &pending));
            one_read(&t, HALFSTEP_SLOT_WEIGHT, t.room);
            for (int64_t i = 0; i < t.n; i++) {
                before += fabs((double)start[i]);
                left += (double)t.room[i] * (start[i] < 0 ? -1 : 1);
            }
            printf("     %-10s %.4f of the weights left (%.4f by the rule in fp64, %.4f without lumps)\n", info.name,
                   left / before, ideal, exp(-0.1));
            /* To nearest a lump is rounded to half of 2^-8 each time: that it is not lost is all that lumps are for. */
            double bound = info.code_bits == 32 || info.extra_bits ? 2e-4 : info.stochastic ? 4e-3 : 0.02;
            CHECK(fabs(left / before / ideal - 1) < bound, "%s: %.5f left, not %.5f", info.name, left / before, ideal);
            CHECK(fabs(ideal / exp(-0.1) - 1) < 5.1e-3 && fabs(pending - a) < 1e-12, "pending %g, expected %g", pending,
                  a);
            free(start);
            one_close(&t);
        }
        /* Gathered in BF16, as the peer's cudagraph variant does, 1e-5 a step stalls below the threshold. */
        float peer = 0;
        for (int k = 0; k < 10000; k++) peer = bf16_nearest(peer + 1e-5f);
        CHECK(peer == 0.00390625f, "the counter-check gathers %g", (double)peer);
    }
    TEST("I-16 compensation survives the optimizing compiler: steps of 1e-5 on weights of 1 are realised") {
        static const char *const formats[] = {"bf16-kahan", "bf16-ecc8", "bf16-ecc16", "f16-kahan",
                                              "f16-ecc8",   "f16-ecc16", "bf16"};
        int count = 3000;
        for (int f = 0; f < 7; f++) {
            char recipe[64];
            struct one t;
            double expected = 0;
            snprintf(recipe, sizeof recipe, "adamw-delayed/%s", formats[f]);
            one_open(&t, recipe, 2, 16, 256, "bf16");
            one_hyper(&t, "lr", 1e-5);
            one_start(&t);
            one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
            one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
            for (int k = 1; k <= count; k++) {
                MUST(one_step(&t));
                expected += 1e-5 * (1 - pow(0.9, k));
            }
            double moved = (1 - one_mean(&t, HALFSTEP_SLOT_WEIGHT)) / expected;
            printf("     %-10s realised %.4f of the movement\n", formats[f], moved);
            if (strcmp(formats[f], "bf16"))
                CHECK(fabs(moved - 1) < 0.01, "%s: %.4f of the movement", formats[f], moved);
            else CHECK(moved == 0, "plain BF16 should not move");
            one_close(&t);
        }
        /* The peer, with the rounding of the weight elided before the residual is formed. */
        float w = 1, c = 0;
        for (int k = 0; k < count; k++) {
            float old = w, sum;
            c = bf16_nearest(c - 1e-5f);
            sum = w + c;
            w = bf16_nearest(sum);
            c = bf16_nearest(c + (old - sum));
        }
        CHECK(fabsf(w - 1) < 0.01f * 1e-5f * (float)count, "the counter-check moved by %g", (double)(1 - w));
    }
    TEST("I-17 adamw-delayed keeps its second moment with stochastic rounding, so that it falls") {
        char full[64];
        MUST(halfstep_recipe_full("adamw-delayed/bf16-kahan", full, sizeof full));
        CHECK(!strcmp(full, "adamw-delayed/bf16-kahan/bf16-sr"), "the default is %s", full);
        int before = UNLESS_ALL(600, 3000), after = UNLESS_ALL(1500, 6000);
        double ours = fallen_moment("adamw-delayed/bf16-kahan", 2, 16, 64, before, after);
        double peer = fallen_moment("adamw-delayed/bf16-kahan/bf16", 2, 16, 64, before, after);
        printf("     root of v over the exact root after a tenfold fall: %.4f, to nearest %.2f\n", ours, peer);
        CHECK(fabs(ours - 1) < 0.01, "%.4f", ours);
        CHECK(peer > UNLESS_ALL(1.2, 4.5), "the counter-check is only %.2f", peer);
    }
    TEST("I-18 a BF16 weight with a 16-bit error code is an fp32 replica, bit for bit") {
        static const char *const rules[] = {"adamw-delayed", "adamw", "ranger", "sgd"};
        for (int r = 0; r < 4; r++) {
            struct one t[2];
            char recipe[64];
            int moved = 0;
            for (int i = 0; i < 2; i++) {
                snprintf(recipe, sizeof recipe, "%s/%s/f32", rules[r], i ? "bf16-ecc16" : "f32");
                one_open(&t[i], recipe, 2, 16, 64, "f32");
                one_hyper(&t[i], "lr", 1e-4);
                one_hyper(&t[i], "weight_decay", 0.05);
                one_start(&t[i]);
                set_weights(&t[i], 0.02);
                for (int k = 0; k < 200; k++) {
                    set_gradient(&t[i], k, 1e-2);
                    MUST(one_step(&t[i]));
                }
                one_read(&t[i], HALFSTEP_SLOT_WEIGHT, t[i].room);
            }
            for (int64_t j = 0; j < t[0].n; j++) {
                CHECK(to_bits(t[0].room[j]) == to_bits(t[1].room[j]), "%s: element %d is %a, in fp32 %a", rules[r],
                      (int)j, t[1].room[j], t[0].room[j]);
                moved += to_bits(t[0].room[j]) != to_bits(bf16_nearest(t[0].room[j]));
            }
            CHECK(moved > 900, "the counter-check: only %d weights are not BF16 numbers", moved);
            one_close(&t[0]);
            one_close(&t[1]);
        }
    }
    TEST("I-19 adamw-delayed starts each tensor's decay elsewhere, and the same in every run") {
        enum { COUNT = 64 };
        double start[3][COUNT], sum = 0;
        for (int run = 0; run < 3; run++) {
            halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = (uint64_t)run};
            halfstep_optimizer *o;
            int32_t group;
            static float w[COUNT], g[COUNT];
            void *weights[COUNT];
            const void *gradients[COUNT];
            MUST(halfstep_create(&options, &o));
            MUST(halfstep_add_group(o, "adamw-delayed/f32", &group));
            MUST(halfstep_set_hyper(o, group, "weight_decay", 1e-4));
            for (int i = 0; i < COUNT; i++) {
                char name[32];
                snprintf(name, sizeof name, "layers.%d.weight", run == 2 ? COUNT - 1 - i : i);
                ADD_TENSOR(o, .group = group, .name = name, .ndim = 0, .rows = 1, .row_length = 1, .gradient = "f32");
                weights[i] = &w[i];
                gradients[i] = &g[i];
            }
            MUST(halfstep_allocate_states(o));
            MUST(halfstep_step(o, weights, gradients));
            for (int i = 0; i < COUNT; i++)
                MUST(halfstep_get_scalar(o, i, "accumulated_decay", &start[run][run == 2 ? COUNT - 1 - i : i]));
            halfstep_destroy(o);
        }
        for (int i = 0; i < COUNT; i++) {
            CHECK(start[0][i] == start[1][i] && start[0][i] == start[2][i], "tensor %d starts at %g, %g, %g", i,
                  start[0][i], start[1][i], start[2][i]);
            CHECK(start[0][i] >= 0 && start[0][i] <= 5e-3 + 1e-7, "tensor %d starts at %g", i, start[0][i]);
            for (int j = 0; j < i; j++) CHECK(start[0][i] != start[0][j], "tensors %d and %d start alike", i, j);
            sum += start[0][i] / COUNT;
        }
        printf("     64 tensors start at %.3g on average, of a threshold of 5e-3\n", sum);
        CHECK(sum > 1.8e-3 && sum < 3.2e-3, "the mean start is %g", sum);
    }
}

/* ---- I-20 to I-23: LAMB16's states ------------------------------------------------------------------------------- */

/* rows x row_length for about `elements`, in rows long enough for blocks of 128. */
static void lamb16_open(struct one *t, const char *states, int elements)
{
    char recipe[64];
    int64_t rows = elements < 1000 ? 4 : elements < 10000 ? 30 : elements < 100000 ? 150 : 500;
    snprintf(recipe, sizeof recipe, "lamb16/f32/%s", states);
    one_open(t, recipe, 2, rows, (elements + rows - 1) / rows, "f32");
    one_hyper(t, "lr", 0);
    one_start(t);
    for (int i = 0; i < 2; i++) CHECK(!slot_info(t->o, 0, HALFSTEP_SLOT_STATE + i).fell_back, "%s fell back", states);
}

/* The published first moment: the share of codes at +-15 s, and stored over true root mean square. Ours beside it. */
static void momentum_fidelity(const char *states, int elements, double *ratio, double *clipped)
{
    struct one t;
    lamb16_open(&t, states, elements);
    double *exact = zeroed((size_t)t.n * 8), stored = 0, sum = 0, most = 0, at = 0;
    for (int k = 0; k < 20; k++) {
        set_gradient(&t, k, 1e-3);
        for (int64_t i = 0; i < t.n; i++) exact[i] = 0.9 * exact[i] + 0.1 * (double)t.room[i];
        MUST(one_step(&t));
    }
    one_read(&t, HALFSTEP_SLOT_STATE, t.room);
    for (int64_t i = 0; i < t.n; i++) {
        stored += (double)t.room[i] * (double)t.room[i];
        sum += exact[i] * exact[i];
        most = fmax(most, fabs((double)t.room[i]));
    }
    for (int64_t i = 0; i < t.n; i++) at += fabs((double)t.room[i]) > 0.999 * most;
    *ratio = sqrt(stored / sum);
    *clipped = at / (double)t.n;
    free(exact);
    one_close(&t);
}

/* Stored over true sum of second moments at several times. */
static void moment_tracking(const char *states, int elements, const int *times, int count, double *ratio)
{
    struct one t;
    lamb16_open(&t, states, elements);
    float *exact = zeroed((size_t)t.n * 4);
    for (int k = 0, next = 0; next < count; k++) {
        set_gradient(&t, k, 1e-3);
        for (int64_t i = 0; i < t.n; i++) exact[i] = 0.999f * exact[i] + 0.001f * t.room[i] * t.room[i];
        MUST(one_step(&t));
        if (k + 1 != times[next]) continue;
        double stored = 0, sum = 0;
        one_read(&t, HALFSTEP_SLOT_STATE + 1, t.room);
        for (int64_t i = 0; i < t.n; i++) stored += (double)t.room[i], sum += (double)exact[i];
        ratio[next++] = stored / sum;
    }
    free(exact);
    one_close(&t);
}

static void test_lamb16(void)
{
    TEST("I-20 lamb debiases its first update; lamb16, published without, is bounded by its trust ratio") {
        double norm[3], change[3];
        for (int r = 0; r < 3; r++) {
            struct one t;
            one_open(&t, r < 2 ? "lamb/f32" : "lamb16/f32/f32", 2, 16, 256, "f32");
            one_hyper(&t, "lr", 1e-2);
            if (r < 2) one_hyper(&t, "debias", 1 - r);
            one_start(&t);
            set_weights(&t, 0.05);
            float *start = zeroed((size_t)t.n * 4);
            one_read(&t, HALFSTEP_SLOT_WEIGHT, start);
            set_gradient(&t, 1, 1);
            MUST(one_step(&t));
            MUST(halfstep_get_scalar(t.o, 0, "update_norm", &norm[r]));
            one_read(&t, HALFSTEP_SLOT_WEIGHT, t.room);
            change[r] = 0;
            for (int64_t i = 0; i < t.n; i++) change[r] = fmax(change[r], fabs((double)t.room[i] - (double)start[i]));
            free(start);
            one_close(&t);
        }
        printf("     first update's rms: lamb %.3f, debias = 0 %.3f; largest change of lamb16 %.3f lr\n", norm[0] / 64,
               norm[1] / 64, change[2] / 1e-2);
        CHECK(fabs(norm[0] / 64 - 1) < 1e-3, "lamb begins with %g", norm[0] / 64);
        CHECK(fabs(norm[1] / 64 - 3.162) < 1e-2, "the counter-check begins with %g", norm[1] / 64);
        CHECK(change[2] > 0 && change[2] < 2 * 3.17e-2, "lamb16 begins with %g", change[2]);
    }
    TEST("I-21 fp8 states of m use their range: nothing is clipped, and the root mean square is kept") {
        static const int sizes[] = {520, 5010, 25050, 400500};
        for (int i = 0; i < UNLESS_ALL(3, 4); i++) {
            double ratio[3], clipped[3];
            static const char *const states[] = {"fp8-lamb16", "fp8", "fp8-e5m2"};
            for (int f = 0; f < 3; f++) momentum_fidelity(states[f], sizes[i], &ratio[f], &clipped[f]);
            printf("     N = %6d: stored / true rms of m, share at the end of the range: published %.3f %.2f, fp8 %.4f "
                   "%.4f, "
                   "fp8-e5m2 %.4f %.4f\n",
                   sizes[i], ratio[0], clipped[0], ratio[1], clipped[1], ratio[2], clipped[2]);
            for (int f = 1; f < 3; f++) {
                CHECK(fabs(ratio[f] - 1) < 0.01 * f, "%s: %.4f of the root mean square", states[f], ratio[f]);
                CHECK(clipped[f] < 0.02, "%s: %.3f are at the end of the range", states[f], clipped[f]);
            }
            CHECK(ratio[0] < 0.4 && clipped[0] > 0.4, "the counter-check keeps %.3f, clips %.2f", ratio[0], clipped[0]);
        }
    }
    TEST("I-22 fp8 states of v track it for 1500 steps") {
        static const int sizes[] = {520, 5010, 25050}, times[] = {50, 200, 500, 1000, 1500};
        static const char *const states[] = {"fp8-lamb16", "fp8+fp8-e5m2", "fp8"};
        for (int i = UNLESS_ALL(1, 0); i < UNLESS_ALL(2, 3); i++)
            for (int f = 0; f < 3; f++) {
                double ratio[5] = {0};
                int count = UNLESS_ALL(3, 5);
                moment_tracking(states[f], sizes[i], times, count, ratio);
                printf("     N = %5d, %-12s stored / true v after 50, 200, 500, 1000, 1500:", sizes[i], states[f]);
                for (int k = 0; k < count; k++) {
                    printf(" %.3f", ratio[k]);
                    /* Single elements scatter by a fifth or more: that of their mean comes on top. */
                    if (f)
                        CHECK(fabs(ratio[k] - 1) < 0.03 + 0.6 / sqrt(sizes[i]), "%s: %.3f of v after %d steps",
                              states[f], ratio[k], times[k]);
                }
                printf("\n");
                if (!f) CHECK(ratio[2] < 0.5, "the counter-check has %.2f of v after 500 steps", ratio[2]);
            }
    }
    TEST("I-23 a second moment beyond the range saturates: no state becomes infinite, no element freezes") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            if (!info.block) continue;
            char recipe[64];
            struct one t;
            snprintf(recipe, sizeof recipe, "lamb16/f32/%s", info.name);
            one_open(&t, recipe, 2, 100, 256, "f32");
            one_hyper(&t, "lr", 1e-2);
            one_start(&t);
            set_weights(&t, 0.05);
            memset(t.gradient, 0, t.gradient_bytes);
            ((float *)t.gradient)[7] = 100;
            MUST(one_step(&t));
            set_gradient(&t, 1, 1e-3);
            for (int k = 0; k < 20; k++) MUST(one_step(&t));
            float before = ((float *)t.weight)[7];
            MUST(one_step(&t));
            CHECK(((float *)t.weight)[7] != before, "%s: the element is frozen", info.name);
            for (int s = 0; s < 2; s++) {
                one_read(&t, HALFSTEP_SLOT_STATE + s, t.room);
                for (int64_t i = 0; i < t.n; i++)
                    CHECK(isfinite(t.room[i]), "%s: state %d of element %d is %g", info.name, s, (int)i, t.room[i]);
            }
            /* As far as gradients go. */
            for (int64_t i = 0; i < t.n; i++) ((float *)t.gradient)[i] = normal(3, i) < 0 ? -0x1p61f : 0x1.8p61f;
            for (int k = 0; k < 3; k++) MUST(one_step(&t));
            for (int s = 0; s < 3; s++) {
                one_read(&t, s ? HALFSTEP_SLOT_STATE + s - 1 : HALFSTEP_SLOT_WEIGHT, t.room);
                for (int64_t i = 0; i < t.n; i++)
                    CHECK(isfinite(t.room[i]), "%s: slot %d of element %d is %g", info.name, s, (int)i, t.room[i]);
            }
            one_close(&t);
        }
        /* The published conversion of the first step's v: 10 over the scale, beyond the last e5m2 number. */
        double scale = sqrt(10) / 25600 + 1e-6;
        CHECK(10 / scale >= 61440, "the counter-check stays in range: %g", 10 / scale);
    }
}

/* ---- I-26 to I-30: block formats --------------------------------------------------------------------------------- */

static void test_block_states(void)
{
    TEST("I-26 tensors too small for blocks keep their states with stochastic rounding") {
        static const int64_t shapes[][3] = {{0, 1, 1}, {1, 4000, 1}, {2, 31, 31}, {2, 3, 21}};
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            if (!info.block || info.geometry == HALFSTEP_GEOMETRY_TENSOR) continue;
            for (int weight = 0; weight < 2; weight++)
                for (int i = 0; i < 4; i++) {
                    char recipe[64];
                    struct one t;
                    snprintf(recipe, sizeof recipe, "adamw/%s/%s", weight ? "bf16-kahan" : "f32", info.name);
                    one_open(&t, recipe, (int)shapes[i][0], shapes[i][1], shapes[i][2], "f32");
                    one_start(&t);
                    for (int s = 0; s < 2; s++) {
                        halfstep_slot_info slot = slot_info(t.o, 0, HALFSTEP_SLOT_STATE + s);
                        const char *name = format_info(slot.format).name;
                        CHECK(slot.fell_back && !strcmp(name, weight ? "bf16-sr" : "f32"), "%s of %d x %d: %s is %s",
                              recipe, (int)shapes[i][1], (int)shapes[i][2], slot.name, name);
                    }
                    one_close(&t);
                }
        }
        int before = UNLESS_ALL(600, 3000), after = UNLESS_ALL(1500, 6000);
        double ours = fallen_moment("adamw/bf16-sr/dyn8", 2, 31, 31, before, after);
        double peer = fallen_moment("adamw/bf16-sr/bf16", 2, 31, 31, before, after);
        printf("     31 x 31: root of v over the exact root after a tenfold fall: %.4f, to nearest %.2f\n", ours, peer);
        CHECK(fabs(ours - 1) < 0.02, "%.4f", ours);
        CHECK(peer > UNLESS_ALL(1.2, 4.5), "the counter-check is only %.2f", peer);
    }
    TEST("I-27 one NaN or infinity poisons nothing, in every state format") {
        static const uint32_t bad[] = {0x7fc00000, 0x7fffffff, 0xff800000, 0x7f800001};
        int tried = 0;
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            int both = HALFSTEP_ROLE_SIGNED | HALFSTEP_ROLE_NONNEG;
            if ((info.roles & both) != both) continue;
            char recipe[64];
            struct one t[2];
            snprintf(recipe, sizeof recipe, "adamw/bf16-sr/%s", info.name);
            for (int i = 0; i < 2; i++) {
                one_open(&t[i], recipe, 2, 16, 256, "f32");
                one_start(&t[i]);
                set_weights(&t[i], 1);
                for (int k = 0; k < 6; k++) {
                    set_gradient(&t[i], k, 1e-2);
                    for (int b = 0; i && b < 4; b++) {
                        uint32_t old, *place = (uint32_t *)t[i].gradient + (k * 977 + b * 31) % t[i].n;
                        struct image before = take(t[i].o, 0, t[i].weight);
                        memcpy(&old, place, 4);
                        memcpy(place, &bad[b], 4);
                        int result = one_step(&t[i]);
                        CHECK(result == HALFSTEP_NONFINITE, "%s: %08x gives %d", recipe, bad[b], result);
                        CHECK(still(t[i].o, 0, t[i].weight, before), "%s: %08x changed something", recipe, bad[b]);
                        memcpy(place, &old, 4);
                    }
                    MUST(one_step(&t[i]));
                }
            }
            struct image clean = take(t[0].o, 0, t[0].weight);
            CHECK(still(t[1].o, 0, t[1].weight, clean), "%s: refused steps changed later ones", recipe);
            if (info.block) {
                t[1].room[5] = NAN;
                CHECK(halfstep_write_slot(t[1].o, 0, HALFSTEP_SLOT_STATE, NULL, 0, 16, t[1].room) ==
                          HALFSTEP_ERROR_RANGE,
                      "%s: NaN may be written into a block", recipe);
            }
            one_close(&t[0]);
            one_close(&t[1]);
            tried++;
        }
        printf("     %d formats\n", tried);
    }
    TEST("I-28 the dynamic maps are constants, whatever was used first") {
        /* Of torchao's 4-bit maps, as bits; of its 8-bit ones, the closed form. */
        static const uint32_t four[16] = {0xbf633333, 0xbf29999a, 0xbee00000, 0xbe599999, 0xbd9eb852, 0xbd051eb9,
                                          0xbbb43958, 0,          0x3bb43958, 0x3d051eb9, 0x3d9eb852, 0x3e599999,
                                          0x3ee00000, 0x3f29999a, 0x3f633333, 0x3f800000};
        double map[2][256] = {{0}};
        for (int j = 0; j < 7; j++) {
            for (int k = 0; k < 1 << j; k++) {
                double a = pow(10, j - 6) * (0.1 + 0.9 * (k + 0.5) / (1 << j));
                map[0][128 + (1 << j) - 1 + k] = a;
                map[0][126 - ((1 << j) - 1) - k] = -a;
            }
            for (int k = 0; k < 2 << j; k++)
                map[1][1 + (2 << j) - 2 + k] = pow(10, j - 6) * (0.1 + 0.9 * (k + 0.5) / (2 << j));
        }
        map[0][255] = map[1][255] = 1;
        static const char *const recipes[] = {"adamw/bf16-sr/dyn8", "adamw/f32/dyn8", "adamw/bf16-sr/dyn4",
                                              "adamw/f32/dyn4"};
        int coarse = 0;
        for (int32_t isa = 0; isa < halfstep_isa_count(); isa++) {
            if (!halfstep_isa_available(isa)) continue;
            MUST(halfstep_set_isa(halfstep_isa_name(isa)));
            for (int r = 0; r < 4; r++) {
                struct one t;
                one_open(&t, recipes[r], 2, 16, 256, "f32");
                one_start(&t);
                for (int s = 0; s < 2; s++) {
                    halfstep_slot_info info = slot_info(t.o, 0, HALFSTEP_SLOT_STATE + s);
                    const float one = 1;
                    unsigned char *codes = info.code;
                    for (uint64_t i = 0; i < info.code_bytes; i++)
                        codes[i] = (unsigned char)(r < 2 ? i % 256 : (2 * i % 16) << 4 | (2 * i + 1) % 16);
                    for (uint64_t i = 0; i < info.extra_bytes; i += 4) memcpy((char *)info.extra + i, &one, 4);
                    one_read(&t, HALFSTEP_SLOT_STATE + s, t.room);
                    for (int64_t i = 0; i < t.n; i++) {
                        int code = (int)(i % (r < 2 ? 256 : 16));
                        double expected = r < 2 ? map[s][code] : s ? (code + 1) / 16.0 : (double)from_bits(four[code]);
                        double error = fabs((double)t.room[i] - expected),
                               limit = r < 2 ? 4 * 0x1p-24 * fabs(expected) : 0;
                        CHECK(error <= limit, "%s on %s: code %d of %s is %a, expected %a", recipes[r],
                              halfstep_isa_name(isa), code, info.name, t.room[i], expected);
                        coarse += fabs((double)bf16_nearest((float)expected) - expected) > 4 * 0x1p-24 * fabs(expected);
                    }
                }
                one_close(&t);
            }
        }
        MUST(halfstep_set_isa(NULL));
        CHECK(coarse > 0, "the counter-check: a map in BF16 would be the same");
    }
    TEST("I-30 codes are chosen against the stored scale: no systematic error of a block") {
        /* The slope of decoded over true values, without each block's largest, as that goes from 1 to 1 + 2^-7: over
         * all ways that BF16 can round a scale. */
        enum { WAYS = 17 };
        for (int32_t row = -1; row < halfstep_format_count(); row++) {
            halfstep_format_info info =
                row < 0 ? (halfstep_format_info){.name = "the peer", .block = 256} : format_info(row);
            if (!info.block || info.geometry == HALFSTEP_GEOMETRY_TENSOR) continue;
            for (int s = 0; s < (row < 0 ? 1 : 2); s++) {
                double least = 2, greatest = 0;
                for (int k = 0; k < WAYS; k++) {
                    struct one t;
                    struct source random = {19};
                    char recipe[64];
                    double most = 1 + 0x1p-7 * k / (WAYS - 1), xy = 0, xx = 0;
                    snprintf(recipe, sizeof recipe, "adamw/f32/%s", row < 0 ? "f32" : info.name);
                    one_open(&t, recipe, 2, 64, 256, "f32");
                    one_start(&t);
                    float *x = zeroed((size_t)t.n * 4);
                    for (int64_t i = 0; i < t.n; i++) {
                        x[i] = (float)(i % info.block ? next_unit(&random) * 0.99 : most);
                        if (!s && (next64(&random) & 1)) x[i] = -x[i];
                        if (row < 0)
                            t.room[i] = bf16_nearest((float)(most / 127)) * nearbyintf(x[i] / (float)(most / 127));
                    }
                    if (row >= 0) {
                        one_write(&t, HALFSTEP_SLOT_STATE + s, x);
                        one_read(&t, HALFSTEP_SLOT_STATE + s, t.room);
                    }
                    for (int64_t i = 0; i < t.n; i++) {
                        if (i % info.block == 0) continue;
                        xy += (double)x[i] * (double)t.room[i];
                        xx += (double)x[i] * (double)x[i];
                    }
                    least = fmin(least, xy / xx);
                    greatest = fmax(greatest, xy / xx);
                    free(x);
                    one_close(&t);
                }
                printf("     %-8s %s: decoded over true %.5f .. %.5f\n", info.name,
                       row < 0 ? " "
                       : s     ? "v"
                               : "m",
                       least, greatest);
                /* With few codes it shows where their borders fall among the values. */
                double range = greatest - least, bound = strcmp(info.name, "int8") ? 1.5e-3 : 1e-4;
                if (row < 0) CHECK(range > 2e-3, "the counter-check moves by %g", range);
                else CHECK(range < bound, "%s: moves by %g", info.name, range);
            }
        }
    }
}

/* ---- I-32: small learning rates ---------------------------------------------------------------------------------- */

static void test_small_rates(void)
{
    TEST("I-32 no learning rate is refused for the weight's precision, and small steps are realised") {
        int steps = UNLESS_ALL(2000, 10000);
        static const double rates[] = {3e-5, 1e-6};
        for (int r = 0; r < 2; r++) {
            double moved[2];
            for (int f = 0; f < 2; f++) {
                struct one t;
                one_open(&t, f ? "lion/bf16-ecc8" : "lion/f32", 2, 32, 256, "bf16");
                one_hyper(&t, "lr", rates[r]);
                one_start(&t);
                one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1.5f);
                one_fill(&t, HALFSTEP_SLOT_GRADIENT, 1);
                for (int k = 0; k < steps; k++) MUST(one_step(&t));
                moved[f] = (1.5 - one_mean(&t, HALFSTEP_SLOT_WEIGHT)) / (rates[r] * steps);
                one_close(&t);
            }
            /* Steps of 1e-6 are 8.4 units of fp32 there, and the same 8 in both. */
            printf("     lr %g realised %.4f of the movement, fp32 weights %.4f\n", rates[r], moved[1], moved[0]);
            CHECK(fabs(moved[1] / moved[0] - 1) < UNLESS_ALL(0.1, 0.02), "lr %g: %.4f of the movement", rates[r],
                  moved[1]);
        }
        /* The peer's check for 24 bits at a largest weight of 1: as written, and with its sign right. */
        double written = 0 - (15 + log2(0.49)), meant = 0 - 15 + log2(0.49), guarantee = log2(3e-5);
        CHECK(written > guarantee && meant < guarantee, "the counter-check accepts 3e-5: %g, %g, %g", written, meant,
              guarantee);
    }
}

/* ---- I-36, I-37: what is stored, and resuming -------------------------------------------------------------------- */

/* Steps `from` to `to` of a run. */
static void run_steps(struct one *t, int from, int to)
{
    for (int k = from; k < to; k++) {
        set_gradient(t, k, 1e-2);
        MUST(one_step(t));
    }
}

static void resume_open(struct one *t, const char *recipe)
{
    one_open(t, recipe, 2, 16, 256, "f32");
    one_hyper(t, "lr", 1e-3);
    one_hyper(t, "weight_decay", 0.05);
    one_start(t);
}

/* Counters, named scalars, and the group's steps. */
static void copy_counts(struct one *to, struct one *from, int32_t rule)
{
    halfstep_counters c = {.struct_size = sizeof c};
    uint64_t steps;
    halfstep_rule_info info = rule_info(rule);
    MUST(halfstep_get_counters(from->o, 0, &c));
    MUST(halfstep_set_counters(to->o, 0, &c));
    MUST(halfstep_get_group_steps(from->o, 0, &steps));
    MUST(halfstep_set_group_steps(to->o, 0, steps));
    MUST(halfstep_set_seed(to->o, halfstep_get_seed(from->o)));
    for (int i = 0; i < info.scalars; i++) {
        double value;
        MUST(halfstep_get_scalar(from->o, 0, info.scalar_name[i], &value));
        MUST(halfstep_set_scalar(to->o, 0, info.scalar_name[i], value));
    }
    copy_grids(from->o, to->o, 0);
}

/* Whether a run that is stored raw and taken up elsewhere gives the bits of one that goes on. through_bf16: the states
 * pass through BF16, as the peer's files do. */
static int resumes(const char *recipe, int32_t rule, int through_bf16)
{
    struct one whole, part, next;
    resume_open(&whole, recipe);
    resume_open(&part, recipe);
    resume_open(&next, recipe);
    set_weights(&whole, 1);
    set_weights(&part, 1);
    run_steps(&whole, 0, 20);
    run_steps(&part, 0, 10);
    struct image file = take(part.o, 0, part.weight);
    each_stream(next.o, 0, next.weight, file.bytes, 1);
    free(file.bytes);
    copy_counts(&next, &part, rule);
    for (int s = 0; through_bf16 && s < rule_info(rule).states; s++) {
        if (slot_info(next.o, 0, HALFSTEP_SLOT_STATE + s).format < 0) continue;
        one_read(&next, HALFSTEP_SLOT_STATE + s, next.room);
        for (int64_t i = 0; i < next.n; i++) next.room[i] = bf16_nearest(next.room[i]);
        one_write(&next, HALFSTEP_SLOT_STATE + s, next.room);
    }
    run_steps(&next, 10, 20);
    struct image expected = take(whole.o, 0, whole.weight);
    int same = still(next.o, 0, next.weight, expected);
    one_close(&whole);
    one_close(&part);
    one_close(&next);
    return same;
}

static void test_resume(void)
{
    TEST("I-36 states are stored in the format that the recipe says: f32 is fp32 beside 16-bit weights") {
        struct one t;
        one_open(&t, "adamw/bf16-sr/f32", 2, 16, 64, "f32");
        one_start(&t);
        set_weights(&t, 1);
        float *m = zeroed((size_t)t.n * 4), *v = zeroed((size_t)t.n * 4);
        const float new1 = (float)(1 - 0.9), new2 = (float)(1 - 0.999);
        for (int k = 0; k < 50; k++) {
            set_gradient(&t, k, 1e-3);
            for (int64_t i = 0; i < t.n; i++) {
                float g = t.room[i], kept = 0.9f * m[i], added = new1 * g;
                m[i] = kept + added;
                kept = 0.999f * v[i];
                added = new2 * g;
                added = added * g;
                v[i] = kept + added;
            }
            MUST(one_step(&t));
        }
        int exact = 0;
        for (int s = 0; s < 2; s++) {
            halfstep_slot_info info = slot_info(t.o, 0, HALFSTEP_SLOT_STATE + s);
            CHECK(!strcmp(format_info(info.format).name, "f32") && info.code_bytes == 4 * (uint64_t)t.n, "%s is %s",
                  info.name, format_info(info.format).name);
            CHECK(!memcmp(info.code, s ? v : m, (size_t)t.n * 4), "%s is not the fp32 average, bit for bit", info.name);
            for (int64_t i = 0; i < t.n; i++) exact += bf16_nearest((s ? v : m)[i]) == (s ? v : m)[i];
        }
        CHECK(exact < 20, "the counter-check: %d averages are BF16 numbers", exact);
        free(m);
        free(v);
        one_close(&t);
    }
    TEST("I-37 a resumed run gives the bits of one that went on, in every format and under every rule") {
        int tried = 0;
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            char recipe[64];
            int32_t rule = halfstep_rule_find(info.roles & HALFSTEP_ROLE_NONNEG ? "adamw" : "lion");
            if (info.roles & HALFSTEP_ROLE_SIGNED) {
                snprintf(recipe, sizeof recipe, "%s/bf16-sr/%s", rule_info(rule).name, info.name);
                CHECK(resumes(recipe, rule, 0), "%s does not resume", recipe);
                tried++;
            }
            if (info.roles & HALFSTEP_ROLE_WEIGHT) {
                rule = halfstep_rule_find("ranger");
                snprintf(recipe, sizeof recipe, "ranger/%s/int8", info.name);
                CHECK(resumes(recipe, rule, 0), "%s does not resume", recipe);
                tried++;
            }
        }
        for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
            char recipe[64];
            rule_recipe(rule, recipe);
            CHECK(resumes(recipe, rule, 0), "%s does not resume", recipe);
            tried++;
        }
        CHECK(!resumes("adamw/f32/f32", halfstep_rule_find("adamw"), 1), "the counter-check resumes exactly");
        printf("     %d recipes\n", tried);
    }
}

/* ---- I-39: learning rates of groups ------------------------------------------------------------------------------ */

static void test_groups(void)
{
    TEST("I-39 each group has its own lr, schedule and reference, whatever the order of calls") {
        static const double rates[] = {1e-3, 1e-1, 3e-2};
        halfstep_optimizer *o;
        int32_t group;
        float w[3][32], g[32] = {0};
        MUST(halfstep_create(NULL, &o));
        for (int i = 0; i < 3; i++) {
            static const char *const names[] = {"a", "b", "c"};
            MUST(halfstep_add_group(o, "adamw/f32", &group));
            ADD_TENSOR(o, .group = group, .name = names[i], .ndim = 2, .rows = 1, .row_length = 32, .gradient = "f32");
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
        }
        /* A reference that is the constructor's lr would shrink by 1, 100 and 30 times that. */
        for (int i = 0; i < 3; i++)
            CHECK(fabs((double)w[i][5] - left) < 1e-5, "group %d is at %g, expected %g", i, w[i][5], left);
        printf("     left of the weights after 60 steps: %.6f %.6f %.6f, expected %.6f\n", w[0][0], w[1][0], w[2][0],
               left);
        halfstep_destroy(o);
    }
}

/* ---- I-41: replicas and shards ----------------------------------------------------------------------------------- */

enum { ROWS = 16, COLUMNS = 256 };

struct rank {
    halfstep_optimizer *o;
    void *weight;
    float *gradient;
    int64_t first, rows;
};

static void rank_open(struct rank *r, const char *recipe, int64_t first, int64_t rows, int threads, uint64_t seed)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads, .seed = seed};
    int32_t group, index;
    halfstep_tensor d = {.struct_size = sizeof d,
                         .name = "w",
                         .ndim = 2,
                         .rows = ROWS,
                         .row_length = COLUMNS,
                         .first_row = first,
                         .n_rows = rows,
                         .n_columns = COLUMNS,
                         .gradient = "f32"};
    MUST(halfstep_create(&options, &r->o));
    MUST(halfstep_add_group(r->o, recipe, &group));
    MUST(halfstep_set_hyper(r->o, group, "lr", 1e-3));
    MUST(halfstep_set_hyper(r->o, group, "weight_decay", 0.05));
    MUST(halfstep_set_hyper(r->o, HALFSTEP_ALL_GROUPS, "clip_norm", 0.5));
    d.group = group;
    MUST(halfstep_add_tensor(r->o, &d, &index));
    MUST(halfstep_allocate_states(r->o));
    r->first = first;
    r->rows = rows;
    r->weight = zeroed((size_t)(rows * COLUMNS) * 4);
    r->gradient = zeroed((size_t)(rows * COLUMNS) * 4);
    for (int64_t i = 0; i < rows * COLUMNS; i++) r->gradient[i] = normal(7919, first * COLUMNS + i);
    MUST(halfstep_write_slot(r->o, 0, HALFSTEP_SLOT_WEIGHT, r->weight, 0, rows, r->gradient));
}

static void rank_close(struct rank *r)
{
    halfstep_destroy(r->o);
    free(r->weight);
    free(r->gradient);
}

/* One step of ranks that together hold the tensor, with the statistics added as all_reduce would. */
static void ranks_step(struct rank *r, int n, int step)
{
    enum { MOST = 4096 };
    static int64_t own[4][MOST], sum[MOST];
    int64_t count = halfstep_statistics_count(r[0].o), from = halfstep_norms_offset(r[0].o);
    if (count > MOST) exit(1);
    for (int i = 0; i < n; i++) {
        for (int64_t j = 0; j < r[i].rows * COLUMNS; j++)
            r[i].gradient[j] = 1e-2f * normal(step, r[i].first * COLUMNS + j);
        const void *gradients[1] = {r[i].gradient};
        MUST(halfstep_step_begin(r[i].o, gradients, own[i]));
    }
    for (int pass = 0; pass < 2; pass++) {
        int64_t start = pass ? from : 0, end = pass ? count : from;
        for (int64_t j = start; j < end; j++) {
            sum[j] = 0;
            for (int i = 0; i < n; i++) sum[j] += own[i][j];
        }
        if (pass) break;
        for (int i = 0; i < n; i++) {
            const void *gradients[1] = {r[i].gradient};
            memcpy(own[i], sum, (size_t)from * sizeof *sum);
            MUST(halfstep_step_norms(r[i].o, &r[i].weight, gradients, own[i]));
        }
    }
    for (int i = 0; i < n; i++) {
        const void *gradients[1] = {r[i].gradient};
        MUST(halfstep_step_finish(r[i].o, &r[i].weight, gradients, sum));
    }
}

static void test_replicas(void)
{
    TEST("I-41 replicas and shards round alike: the same bits on every rank, with any number of threads") {
        static const char *const recipes[] = {
            "adamw/bf16-sr/int8",      "lion/f16-sr/fp8",       "ranger/bf16-ecc8/int4",
            "lamb/bf16-kahan/bf16-sr", "lamb16/f16-ecc8",       "stableadamw/bf16-sr/fp8-e5m2",
            "adan/f16-kahan/int8",     "adamw/bf16/f16-sr+fp8", "schedulefree/bf16-sr/dyn8"};
        static const int64_t cut[4] = {0, 3, 12, ROWS};
        for (size_t r = 0; r < sizeof recipes / sizeof recipes[0]; r++) {
            struct rank whole, replica, shard[3], other;
            rank_open(&whole, recipes[r], 0, ROWS, 1, 13371337);
            rank_open(&replica, recipes[r], 0, ROWS, 3, 13371337);
            rank_open(&other, recipes[r], 0, ROWS, 1, 13371338);
            for (int i = 0; i < 3; i++) rank_open(&shard[i], recipes[r], cut[i], cut[i + 1] - cut[i], 2, 13371337);
            for (int k = 0; k < 15; k++) {
                ranks_step(&whole, 1, k);
                ranks_step(&replica, 1, k);
                ranks_step(&other, 1, k);
                ranks_step(shard, 3, k);
            }
            struct image image = take(whole.o, 0, whole.weight), differs = take(other.o, 0, other.weight);
            CHECK(!same_bits(image, differs), "%s: the counter-check, another seed for each rank, agrees", recipes[r]);
            free(differs.bytes);
            CHECK(still(replica.o, 0, replica.weight, image), "%s: a replica differs", recipes[r]);
            static float all[ROWS * COLUMNS], part[ROWS * COLUMNS];
            for (int slot = 0; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
                halfstep_slot_info info = {.struct_size = sizeof info};
                int there = halfstep_get_slot_info(whole.o, 0, slot, &info) == HALFSTEP_OK && info.format >= 0;
                if (slot == HALFSTEP_SLOT_GRADIENT || !there) continue;
                MUST(halfstep_read_slot(whole.o, 0, slot, slot ? NULL : whole.weight, 0, ROWS, all));
                for (int i = 0; i < 3; i++)
                    MUST(halfstep_read_slot(shard[i].o, 0, slot, slot ? NULL : shard[i].weight, 0, shard[i].rows,
                                            part + shard[i].first * COLUMNS));
                CHECK(!memcmp(all, part, sizeof all), "%s: %s of three shards differs from the whole", recipes[r],
                      info.name);
            }
            for (int i = 0; i < 3; i++) rank_close(&shard[i]);
            rank_close(&whole);
            rank_close(&replica);
            rank_close(&other);
        }
    }
}

/* ---- I-42: IEEE half, NaN, skipped steps ------------------------------------------------------------------------- */

static void test_half(void)
{
    TEST("I-42 IEEE half weights have stochastic rounding: steps below half a unit are realised") {
        int steps = UNLESS_ALL(2000, 10000);
        for (int f = 0; f < 2; f++) {
            struct one t;
            one_open(&t, f ? "adamw/f16" : "adamw/f16-sr", 2, 16, 256, "f16");
            one_hyper(&t, "lr", 1e-6);
            one_hyper(&t, "weight_decay", 0);
            one_start(&t);
            one_fill(&t, HALFSTEP_SLOT_WEIGHT, 1);
            one_fill(&t, HALFSTEP_SLOT_GRADIENT, 0.5f);
            for (int k = 0; k < steps; k++) MUST(one_step(&t));
            double moved = (1 - one_mean(&t, HALFSTEP_SLOT_WEIGHT)) / (1e-6 * steps);
            printf("     %-6s realised %.4f of the movement\n", f ? "f16" : "f16-sr", moved);
            if (f) CHECK(moved == 0, "the counter-check moved by %g", moved);
            else CHECK(fabs(moved - 1) < UNLESS_ALL(0.1, 0.03), "%.4f of the movement", moved);
            one_close(&t);
        }
    }
    TEST("I-42 a NaN whose payload is in its low bits stays NaN in a 16-bit weight") {
        static const uint32_t bits[] = {0x7f800001, 0xff800001, 0x7f80ffff, 0x7f801fff, 0x7fffffff};
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            halfstep_format_info info = format_info(row);
            if (!(info.roles & HALFSTEP_ROLE_WEIGHT) || info.code_bits != 16) continue;
            char recipe[64];
            struct one t;
            snprintf(recipe, sizeof recipe, "sgd/%s", info.name);
            one_open(&t, recipe, 2, 1, 64, "f32");
            one_start(&t);
            uint32_t *raw = (uint32_t *)(void *)t.room;
            for (int i = 0; i < 64; i++) raw[i] = bits[i % 5];
            one_write(&t, HALFSTEP_SLOT_WEIGHT, t.room);
            one_read(&t, HALFSTEP_SLOT_WEIGHT, t.room);
            for (int i = 0; i < 64; i++)
                CHECK(isnan(t.room[i]), "%s: %08x became %g", info.name, bits[i % 5], t.room[i]);
            one_close(&t);
        }
    }
    TEST("I-42 bias corrections, schedules and random bits do not move on over skipped steps") {
        struct one t[2];
        for (int i = 0; i < 2; i++) {
            one_open(&t[i], "adamw/bf16-sr/int8", 2, 16, 256, "f32");
            MUST(halfstep_set_choice(t[i].o, 0, "schedule", "linear"));
            one_hyper(&t[i], "total_steps", 50);
            one_start(&t[i]);
            set_weights(&t[i], 1);
            for (int k = 0; k < 10; k++) {
                for (int bad = 0; i && bad < 3; bad++) {
                    set_gradient(&t[i], k, 1e-2);
                    ((float *)t[i].gradient)[k] = INFINITY;
                    CHECK(one_step(&t[i]) == HALFSTEP_NONFINITE, "an infinite gradient was stepped");
                }
                set_gradient(&t[i], k, 1e-2);
                MUST(one_step(&t[i]));
            }
        }
        halfstep_counters c = counters_of(t[1].o, 0);
        CHECK(c.state_steps == 10 && c.full_steps == 10 && halfstep_skipped_steps(t[1].o) == 30,
              "%d steps are counted, %d skipped", (int)c.state_steps, (int)halfstep_skipped_steps(t[1].o));
        struct image clean = take(t[0].o, 0, t[0].weight);
        CHECK(still(t[1].o, 0, t[1].weight, clean), "skipped steps changed later ones");
        one_close(&t[0]);
        one_close(&t[1]);
    }
}

/* ---- Weights that a program zeroes and whose error codes it leaves: flashoptim's codes then mean next to nothing, the
 * split pattern of ours would mean a NaN ---- */

static void test_zeroed_weights(void)
{
    static const char *const recipes[] = {"adamw/bf16-ecc8", "adamw/bf16-ecc16", "adamw/f16-ecc8", "adamw/f16-ecc16"};
    for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++) {
        struct one t;
        one_open(&t, recipes[r], 2, 64, 96, strstr(recipes[r], "/f16") ? "f16" : "bf16");
        one_start(&t);
        one_hyper(&t, "lr", 1e-3);
        set_weights(&t, 1.0);
        for (int k = 0; k < 4; k++) {
            set_gradient(&t, k, 1e-2);
            MUST(one_step(&t));
        }
        /* +0 and, as a mask times a negative weight gives it, -0. */
        memset(t.weight, 0, t.weight_bytes);
        for (size_t i = 3; i < t.weight_bytes; i += 4) ((unsigned char *)t.weight)[i] = 0x80;
        one_read(&t, HALFSTEP_SLOT_WEIGHT, t.room);
        int wrong = 0;
        for (int64_t i = 0; i < t.n; i++) wrong += !(fabsf(t.room[i]) < 1e-4f);
        set_gradient(&t, 4, 1e-2);
        MUST(one_step(&t));
        one_read(&t, HALFSTEP_SLOT_WEIGHT, t.room);
        for (int64_t i = 0; i < t.n; i++) wrong += !(fabsf(t.room[i]) < 0.1f);
        CHECK(!wrong, "%s: %d zeroed weights are not near 0", recipes[r], wrong);
        one_close(&t);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_lookahead();
    test_adan();
    test_empty_calls();
    test_micro_steps();
    test_first_steps();
    test_delayed();
    test_lamb16();
    test_block_states();
    test_small_rates();
    test_resume();
    test_groups();
    test_replicas();
    test_half();
    test_zeroed_weights();
    return test_done();
}
