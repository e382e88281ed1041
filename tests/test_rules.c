/* Every rule against plain double precision (ref/), every format against the error that its header states, and stochastic
 * rounding by enumeration. Prints the largest errors it met. --short samples where the full run enumerates. */
#include <math.h>

#include "ref/fixture.h"
#include "ref/rules.h"
#include "test.h"

static int short_run;

static const struct reference {
    const char *rule;
    void (*step)(const struct ref_hyper *h, double step, struct ref_element *x);
    int states;
} references[] = {{"sgd", ref_sgd, 1}, {"adam", ref_adamw, 2}, {"adamw", ref_adamw, 2}, {"lion", ref_lion, 1}};
enum { REFERENCES = sizeof references / sizeof references[0] };

static double ulp_of(double x)
{
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, (exponent < -125 ? -125 : exponent) - 24);
}

static void set_hyper(struct one *t, const char *rule, const struct ref_hyper *h)
{
    static const char *const decays[] = {"l2", "decoupled", "fully-decoupled"};
    one_hyper(t, "lr", h->lr);
    one_hyper(t, "weight_decay", h->weight_decay);
    one_hyper(t, "reference_lr", h->reference_lr);
    MUST(halfstep_set_choice(t->o, 0, "decay", decays[h->decay]));
    if (!strcmp(rule, "sgd")) {
        one_hyper(t, "momentum", h->momentum);
        one_hyper(t, "dampening", h->dampening);
        one_hyper(t, "nesterov", h->nesterov);
    } else {
        one_hyper(t, "beta1", h->beta1);
        one_hyper(t, "beta2", h->beta2);
        if (strcmp(rule, "lion")) one_hyper(t, "eps", h->eps);
    }
}

static struct ref_hyper random_hyper(struct source *s)
{
    static const double lrs[] = {1e-5, 3e-4, 0.1, 1}, decays[] = {0, 1e-2, 0.3}, beta1[] = {0.9, 0.95, 0, 0.5},
                        beta2[] = {0.999, 0.95, 0.9, 0.9999}, eps[] = {1e-8, 1e-6, 0, 1e-12};
    return (struct ref_hyper){.lr = lrs[next64(s) % 4], .weight_decay = decays[next64(s) % 3], .reference_lr = 0.05,
                              .decay = (enum ref_decay)(next64(s) % 3), .beta1 = beta1[next64(s) % 4],
                              .beta2 = beta2[next64(s) % 4], .eps = eps[next64(s) % 4],
                              .momentum = (double)(next64(s) % 3) * 0.45, .dampening = (double)(next64(s) % 2) * 0.3,
                              .nesterov = (double)(next64(s) % 2)};
}

/* 0, or 2^low to 2^high with all bits random, either sign. */
static float wide(struct source *s, int low, int high)
{
    uint64_t r = next64(s);
    if ((r >> 8 & 31) == 0) return 0;
    return (float)ldexp((r & 1 ? -1.0 : 1.0) * (1 + next_unit(s)), low + (int)((r >> 16) % (uint64_t)(high - low)));
}

/* ---- Rules -------------------------------------------------------------------------------------------------------------- */

/* One step of n elements from given stored values, each element judged. kind: 0 like training, 1 any magnitudes, 2 terms that
 * cancel. Gradients stay where their squares are fp32 numbers. */
static void judge_step(const struct reference *r, struct source *s, int kind, double *worst, double *worst_state)
{
    enum { ROWS = 16, COLUMNS = 80, N = ROWS * COLUMNS };
    static float w[N], g[N], state[2][N], w_new[N], state_new[2][N];
    struct ref_hyper h = random_hyper(s);
    uint64_t step = 1 + (next64(s) % 4 == 0 ? 0 : next64(s) % (next64(s) % 2 ? 10 : 100000));
    char recipe[64];
    struct one t;
    snprintf(recipe, sizeof recipe, "%s/f32/f32", r->rule);
    one_open(&t, recipe, 2, ROWS, COLUMNS, "f32");
    set_hyper(&t, r->rule, &h);
    one_start(&t);
    int states = r->step == ref_sgd && h.momentum == 0 ? 0 : r->states;
    for (int i = 0; i < N; i++) {
        w[i] = kind ? wide(s, -60, 60) : (float)next_normal(s);
        g[i] = kind ? wide(s, -50, 40) : (float)(1e-3 * next_normal(s));
        state[0][i] = kind ? wide(s, -50, 40) : (float)(1e-3 * next_normal(s));
        state[1][i] = kind ? fabsf(wide(s, -100, 80)) : (float)(1e-6 * (0.1 + next_unit(s)));
        if (kind == 2) state[0][i] = (float)(-(1 - h.beta1) * (double)g[i] / (h.beta1 > 0 ? h.beta1 : 1) * (1 + 1e-6 * next_normal(s)));
        /* A first step meets initial states. */
        if (step == 1) state[0][i] = state[1][i] = 0;
        /* Adam's bound |m| <= 7.3 sqrt(v) or so: states that no gradients make would only overflow. */
        if (r->states == 2 && fabs((double)state[0][i]) > 4 * sqrt((double)state[1][i]))
            state[1][i] = (float)((double)state[0][i] * (double)state[0][i]);
    }
    one_write(&t, HALFSTEP_SLOT_WEIGHT, w);
    one_write(&t, HALFSTEP_SLOT_GRADIENT, g);
    for (int j = 0; j < states; j++) one_write(&t, HALFSTEP_SLOT_STATE + j, state[j]);
    halfstep_counters c = {.struct_size = sizeof c, .state_steps = step - 1};
    MUST(halfstep_set_counters(t.o, 0, &c));
    MUST(one_step(&t));
    one_read(&t, HALFSTEP_SLOT_WEIGHT, w_new);
    for (int j = 0; j < states; j++) one_read(&t, HALFSTEP_SLOT_STATE + j, state_new[j]);
    for (int i = 0; i < N; i++) {
        struct ref_element x = {.w = w[i], .g = g[i], .s = {state[0][i], state[1][i]}};
        double terms = fabs(x.g) + F(h.weight_decay) * fabs(x.w), effective = fabs(ref_gradient(&h, &x));
        /* Under l2 the gradient is a sum of its own. Where that cancels, or its square leaves fp32, nothing after it can be
         * more exact than it is. */
        if (h.decay == REF_L2 && effective < fmax(0.5 * terms, 0x1p-55) && terms > 0) continue;
        r->step(&h, (double)step, &x);
        double error = fabs((double)w_new[i] - x.w_new) / ulp_of(x.size);
        if (isinf(x.size)) error = 0;
        *worst = fmax(*worst, error);
        CHECK(error <= 8, "%s: w %a g %a s %a %a -> %a, expected %a: %.2f ulp (lr %g, decay %d %g, step %d)", r->rule, w[i], g[i],
              state[0][i], state[1][i], w_new[i], x.w_new, error, h.lr, h.decay, h.weight_decay, (int)step);
        for (int j = 0; j < states; j++) {
            /* Errors of a state are judged against the larger of what it was and what went in. */
            double size = fmax(fabs(x.s_new[j]), fabs(x.s[j]));
            double in = fabs(x.g) + (h.decay == REF_L2 ? h.weight_decay * fabs(x.w) : 0);
            size = fmax(size, j == 0 ? in : (1 - h.beta2) * in * in);
            double off = fabs((double)state_new[j][i] - x.s_new[j]);
            int flushed = state_new[j][i] == 0 && fabs(x.s_new[j]) < 0x1p-125;
            if (flushed) continue;
            double ulps = off / ulp_of(size);
            *worst_state = fmax(*worst_state, ulps);
            CHECK(ulps <= 8, "%s: state %d of w %a g %a s %a is %a, expected %a: %.2f ulp", r->rule, j, w[i], g[i], state[j][i],
                  state_new[j][i], x.s_new[j], ulps);
        }
    }
    one_close(&t);
}

static void test_steps(void)
{
    for (int k = 0; k < REFERENCES; k++) {
        char name[96];
        snprintf(name, sizeof name, "%s: every element within 8 ulp of a double-precision step", references[k].rule);
        TEST(name) {
            struct source s = {(uint64_t)k + 100};
            double worst[3] = {0}, worst_state[3] = {0};
            for (int round = 0; round < (short_run ? 60 : 1500); round++)
                judge_step(&references[k], &s, round % 3, &worst[round % 3], &worst_state[round % 3]);
            printf("     %-5s largest error in ulp: weights %.2f %.2f %.2f, states %.2f %.2f %.2f (typical, wide, cancelling)\n",
                   references[k].rule, worst[0], worst[1], worst[2], worst_state[0], worst_state[1], worst_state[2]);
        }
        test_close_group();
    }
}

static void test_trajectories(void)
{
    enum { ROWS = 8, COLUMNS = 100, N = ROWS * COLUMNS, STEPS = 1000 };
    for (int k = 0; k < REFERENCES; k++) {
        const struct reference *r = &references[k];
        char name[96], recipe[64];
        snprintf(name, sizeof name, "%s: %d steps within 32 ulp of the largest weight", r->rule, STEPS);
        snprintf(recipe, sizeof recipe, "%s/f32/f32", r->rule);
        TEST(name) {
            static struct ref_element x[N];
            static float w[N], g[N];
            static char excused[N];
            struct source s = {55};
            struct one t;
            struct ref_hyper h = {.lr = 1e-3, .weight_decay = 0.1, .reference_lr = 1, .decay = REF_DECOUPLED, .beta1 = 0.9,
                                  .beta2 = 0.999, .eps = 1e-8, .momentum = 0.9, .nesterov = 1};
            memset(excused, 0, sizeof excused);
            one_open(&t, recipe, 2, ROWS, COLUMNS, "f32");
            set_hyper(&t, r->rule, &h);
            one_start(&t);
            for (int i = 0; i < N; i++) {
                w[i] = (float)(0.02 * next_normal(&s));
                x[i] = (struct ref_element){.w = w[i]};
            }
            one_write(&t, HALFSTEP_SLOT_WEIGHT, w);
            for (int step = 1; step <= STEPS; step++) {
                for (int i = 0; i < N; i++) {
                    g[i] = (float)(0.01 * (next_normal(&s) + 0.3));
                    x[i].g = g[i];
                    r->step(&h, step, &x[i]);
                    excused[i] |= isinf(x[i].size) != 0;
                    x[i].w = x[i].w_new;
                    x[i].s[0] = x[i].s_new[0];
                    x[i].s[1] = x[i].s_new[1];
                }
                one_write(&t, HALFSTEP_SLOT_GRADIENT, g);
                MUST(one_step(&t));
            }
            one_read(&t, HALFSTEP_SLOT_WEIGHT, w);
            double largest = 0, worst = 0;
            for (int i = 0; i < N; i++) largest = fmax(largest, fabs(x[i].w));
            for (int i = 0; i < N; i++)
                if (!excused[i]) worst = fmax(worst, fabs((double)w[i] - x[i].w) / ulp_of(largest));
            printf("     %-5s off by at most %.2f ulp of the largest weight, %.3g\n", r->rule, worst, largest);
            CHECK(worst <= 32, "%.2f ulp", worst);
            one_close(&t);
        }
        test_close_group();
    }
}

/* ---- Formats ------------------------------------------------------------------------------------------------------------ */

/* Writes values of all magnitudes through a slot and judges what comes back, by what the format's header promises. */
static double element_error(const char *format, double value, double back)
{
    double magnitude = fabs(value), off = fabs(back - value);
    if (!strcmp(format, "f32") || !strcmp(format, "bf16-ecc16")) return off == 0 ? 0 : INFINITY;
    if (!strcmp(format, "f16")) return off / fmax(ldexp(magnitude, -11), 0x1p-25);
    /* A residual is a BF16 number itself, whose last place is 2^-133. */
    if (!strcmp(format, "bf16-kahan")) return off / fmax(ldexp(magnitude, -16), 0x1p-134);
    double bits = !strcmp(format, "bf16") || !strcmp(format, "bf16-sr") ? 8 : 16;
    /* The error of rounding to so many significant bits is half a unit; below 2^-126 units no longer shrink. */
    return off / ldexp(fmax(magnitude, 0x1p-126), (int)-bits);
}

static void judge_elements(const char *format, const char *recipe, const char *gradient, int slot, int low, int high)
{
    enum { ROWS = 64, COLUMNS = 100, N = ROWS * COLUMNS };
    static float in[N], out[N];
    struct source s = {77};
    struct one t;
    double worst = 0;
    one_open(&t, recipe, 2, ROWS, COLUMNS, gradient);
    one_start(&t);
    for (int round = 0; round < (short_run ? 4 : 40); round++) {
        for (int i = 0; i < N; i++) in[i] = wide(&s, low, high);
        one_write(&t, slot, in);
        one_read(&t, slot, out);
        for (int i = 0; i < N; i++) {
            double error = element_error(format, in[i], out[i]);
            worst = fmax(worst, error);
            CHECK(error <= 1, "%s: %a came back as %a", format, in[i], out[i]);
        }
    }
    for (int i = 0; i < N; i++) in[i] = (i & 1 ? -1.0f : 1.0f) * 0x1.fffffep127f;
    one_write(&t, slot, in);
    one_read(&t, slot, out);
    CHECK(isfinite(out[0]) || !strcmp(format, "f16"), "%s: the largest finite number became %g", format, out[0]);
    CHECK(out[1] == -out[0], "%s: the largest of either sign are %g and %g", format, out[0], out[1]);
    printf("     %-10s slot %d: at most %.4f of the error allowed\n", format, slot, worst);
    one_close(&t);
}

/* Blocks of one magnitude with elements far below it, written to nearest: roots of signed values are at most half of their
 * block's step off, those of second moments 2^-6 of themselves, down to the smallest code; none of them becomes zero. */
static void judge_block(struct source *s, int nonneg, int exponent, double *worst)
{
    enum { N = 4 * 32 };
    static float in[N], out[N];
    struct one t;
    one_open(&t, "adamw/f32/int8", 2, 4, 32, "f32");
    one_start(&t);
    for (int i = 0; i < N; i++) {
        double unit = pow(next_unit(s), 1 + (double)(i % 5));
        in[i] = (float)ldexp(unit * (nonneg || next64(s) & 1 ? 1 : -1), exponent);
        if (i % 11 == 3) in[i] = 0;
    }
    one_write(&t, HALFSTEP_SLOT_STATE + nonneg, in);
    one_read(&t, HALFSTEP_SLOT_STATE + nonneg, out);
    for (int b = 0; b < N; b += 32) {
        double most = 0;
        for (int i = b; i < b + 32; i++) most = fmax(most, fabs((double)in[i]));
        double step = sqrt(most) / (nonneg ? 252 : 127) * (1 + 0x1p-7);
        for (int i = b; i < b + 32; i++) {
            double root = copysign(sqrt(fabs((double)in[i])), (double)in[i]);
            double back = copysign(sqrt(fabs((double)out[i])), (double)out[i]);
            if (most < 0x1p-126) {
                CHECK(out[i] == 0, "a block below 2^-126 decodes to %a", out[i]);
                continue;
            }
            double allowed = !nonneg ? step / 2 : root < step ? step : root * 0x1p-6, error = fabs(back - root) / allowed;
            *worst = fmax(*worst, error);
            CHECK(error <= 1.0001, "int8 %s: %a in a block of %a came back as %a", nonneg ? "non-negative" : "signed", in[i], most,
                  out[i]);
            CHECK(!nonneg || in[i] == 0 || out[i] > 0, "int8: the second moment %a became zero beside %a", in[i], most);
        }
    }
    one_close(&t);
}

static void test_formats(void)
{
    TEST("formats keep values to their documented error") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            char recipe[64];
            const char *weight = format_for(row, HALFSTEP_ROLE_WEIGHT), *gradient = format_for(row, HALFSTEP_ROLE_GRADIENT);
            const char *state = format_for(row, HALFSTEP_ROLE_SIGNED);
            halfstep_format_info info = {.struct_size = sizeof info};
            MUST(halfstep_get_format_info(row, &info));
            if (weight) {
                snprintf(recipe, sizeof recipe, "adamw/%s", weight);
                judge_elements(weight, recipe, "f32", HALFSTEP_SLOT_WEIGHT, -140, 126);
            }
            if (gradient)
                judge_elements(gradient, "adamw", gradient, HALFSTEP_SLOT_GRADIENT, -30, strcmp(gradient, "f16") ? 120 : 15);
            if (state && !info.block) {
                snprintf(recipe, sizeof recipe, "lion/f32/%s", state);
                judge_elements(state, recipe, "f32", HALFSTEP_SLOT_STATE, -125, 126);
            }
        }
    }
    TEST("block formats keep roots to their documented error, at every magnitude") {
        struct source s = {78};
        double worst[2] = {0};
        for (int exponent = -135; exponent <= 127; exponent++)
            for (int nonneg = 0; nonneg < 2; nonneg++) judge_block(&s, nonneg, exponent, &worst[nonneg]);
        printf("     int8 signed %.4f, non-negative %.4f of the error allowed\n", worst[0], worst[1]);
    }
    TEST("states below 2^-126 are stored as +0, zero bytes are +0") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *format = format_for(row, HALFSTEP_ROLE_SIGNED);
            if (!format) continue;
            char recipe[64];
            struct one t;
            snprintf(recipe, sizeof recipe, "lion/f32/%s", format);
            one_open(&t, recipe, 2, 2, 64, "f32");
            one_start(&t);
            one_read(&t, HALFSTEP_SLOT_STATE, t.room);
            for (int i = 0; i < t.n; i++) CHECK(to_bits(t.room[i]) == 0, "%s: zero bytes decode to %a", format, t.room[i]);
            one_fill(&t, HALFSTEP_SLOT_STATE, -0x1p-128f);
            one_read(&t, HALFSTEP_SLOT_STATE, t.room);
            for (int i = 0; i < t.n; i++) CHECK(to_bits(t.room[i]) == 0, "%s: -2^-128 came back as %a", format, t.room[i]);
            one_close(&t);
        }
    }
}

/* ---- Stochastic rounding -------------------------------------------------------------------------------------------------- */

/* How often the 131,072 roundings of one pattern, with each random half word once in either place, went away from zero. */
static uint32_t count_away(uint32_t bits, const uint32_t *words)
{
    enum { PIECE = 4096 };
    static float in[PIECE];
    static uint16_t out[PIECE];
    uint32_t away = 0, strange = 0, kept = bits >> 16;
    for (int i = 0; i < PIECE; i++) memcpy(&in[i], &bits, 4);
    for (int at = 0; at < 131072; at += PIECE) {
        MUST(halfstep_bf16_stochastic(in, out, PIECE, words + at / 2));
        uint32_t sum = 0, bad = 0;
        for (int i = 0; i < PIECE; i++) {
            uint32_t d = (uint32_t)(uint16_t)(out[i] - kept);
            sum += d;
            bad |= d & 0xfffe;
        }
        away += sum;
        strange |= bad;
    }
    return strange ? UINT32_MAX : away;
}

static void test_stochastic(void)
{
    static uint32_t words[65536];
    for (uint32_t i = 0; i < 65536; i++) words[i] = i | (i * 40503 + 12345) % 65536 << 16;
    TEST("stochastic rounding goes away from zero with probability exactly low half / 65536") {
        /* Both signs, odd and even, subnormal, the smallest normal, the last before the range ends: the first two whole. */
        static const uint16_t high[] = {0x3f80, 0xc2ff, 0x0000, 0x8000, 0x007f, 0x0080, 0x80ff, 0x7f7e, 0xff7d, 0x4000};
        for (int k = 0; k < 10; k++) {
            uint32_t stride = short_run ? 2047 : k < 2 ? 1 : 127;
            for (uint32_t low = 0; low < 65536; low = low + stride < 65536 || low == 65535 ? low + stride : 65535) {
                uint32_t bits = (uint32_t)high[k] << 16 | low, away = count_away(bits, words);
                CHECK(away == 2 * low, "%08x went away %u times of 131072, expected %u", bits, away, 2 * low);
            }
        }
    }
    TEST("stochastic rounding: NaN stay NaN, infinities stay, the largest finite numbers stay finite") {
        static const uint32_t in[] = {0x7fffffff, 0xffffffff, 0x7f800001, 0xff800001, 0x7fc00000, 0x7f80ffff, 0x7f800000,
                                      0xff800000, 0x7f7fffff, 0xff7fffff, 0x7f7f0001, 0x7f7f0000, 0x00000001, 0x80000001,
                                      0x0000ffff, 0x00000000, 0x80000000};
        for (size_t k = 0; k < sizeof in / sizeof in[0]; k++)
            for (uint32_t i = 0; i < 65536; i += short_run ? 255 : 1) {
                float pair[2];
                uint16_t out[2];
                uint32_t high = in[k] >> 16;
                memcpy(&pair[0], &in[k], 4);
                memcpy(&pair[1], &in[k], 4);
                MUST(halfstep_bf16_stochastic(pair, out, 2, &words[i]));
                for (int j = 0; j < 2; j++) {
                    uint32_t r = words[i] >> 16 * j & 0xffff, expected = (in[k] + r) >> 16;
                    if ((in[k] & 0x7fffffff) > 0x7f800000) expected = high | 0x40;
                    else if ((in[k] & 0x7fffffff) == 0x7f800000) expected = high;
                    else if ((expected & 0x7fff) > 0x7f7f) expected = (high & 0x8000) | 0x7f7f;
                    CHECK(out[j] == expected, "%08x with %04x became %04x, expected %04x", in[k], r, out[j], expected);
                }
            }
    }
}

int main(int argc, char **argv)
{
    short_run = argc > 1 && !strcmp(argv[1], "--short");
    test_init(argc - short_run, argv + short_run);
    test_program = argv[0];
    test_steps();
    test_trajectories();
    test_formats();
    test_stochastic();
    return test_done();
}
