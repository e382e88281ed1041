/* Follows every rule in every state format and with several weight formats over 1000 steps. The reference is plain
 * double precision (ref/), whose states are never rounded. Both see the same gradients, which do not react to the
 * weights, so that nothing corrects an error. That is --all; a run without arguments takes only the first 48 steps.
 * --table prints the measurements, for the bounds below, over all steps. */

#include "ref/table.h"

enum { FULL = 1000, SHORT = 48, ROWS = 8 };

static int steps = FULL, table;

/* Makes gradients. Each element has a mean that turns slowly, and noise. Its size is log-normal (sigma 1/2) and falls
 * tenfold over the run, which second moments must follow. */
static void make_gradients(float *g, int n, int raw, const float *start)
{
    struct source s = {7};
    double *size = zeroed((size_t)n * sizeof *size), *phase = zeroed((size_t)n * sizeof *phase);
    for (int i = 0; i < n; i++) {
        size[i] = 0.01 * exp(0.5 * next_normal(&s));
        phase[i] = 6.283185307179586 * next_unit(&s);
    }
    for (int step = 0; step < steps; step++)
        for (int i = 0; i < n; i++) {
            double fall = pow(10, -(double)step / FULL), mean = sin(phase[i] + 3 * (double)step / FULL);
            float *at = &g[(size_t)step * (size_t)n + (size_t)i];
            *at = (float)(size[i] * fall * (0.5 * mean + 0.5 * next_normal(&s)));
            /* A live weight, for rules that average weights. It walks. */
            if (raw) *at = (step ? at[-n] : start[i]) - *at / 10;
        }
    free(size);
    free(phase);
}

/* One run of a reference: starting weights, gradients, its end, and the distance between start and end. */
struct course {
    const struct reference *ref;
    halfstep_rule_info info;
    int32_t row;
    struct ref_hyper h;
    int n, columns;
    float *start, *gradients;
    struct ref_element *x;
    double travelled;
};

static void course_run(struct course *c, uint64_t id)
{
    struct ref_tensor r = {.n = c->n, .ndim = 2, .rows = ROWS, .columns = c->columns, .x = c->x, .id = id};
    for (int i = 0; i < c->n; i++) {
        c->x[i].w = (double)c->start[i];
        for (int j = 0; j < c->info.states; j++)
            if (c->info.state_role[j] == HALFSTEP_ROLE_WEIGHT) c->x[i].s[j] = c->x[i].w;
    }
    for (int step = 0; step < steps; step++) {
        for (int i = 0; i < c->n; i++) c->x[i].g = (double)c->gradients[(size_t)step * (size_t)c->n + (size_t)i];
        r.t = r.full = step + 1;
        c->ref->step(&c->h, &r);
        ref_advance(&r);
    }
}

static double distance(const struct course *c, const float *w)
{
    double sum = 0;
    for (int i = 0; i < c->n; i++) sum += ((double)w[i] - c->x[i].w) * ((double)w[i] - c->x[i].w);
    return sqrt(sum);
}

static void course_open(struct course *c, const struct reference *ref, int columns, uint64_t id)
{
    struct source s = {3};
    memset(c, 0, sizeof *c);
    c->ref = ref;
    c->row = halfstep_rule_find(ref->rule);
    c->info = rule_info(c->row);
    c->h = ref_defaults(c->row);
    c->h.lr = ref->lr;
    /* Under l2, decay passes through the learning rate and the moments. It is a tenth of a gradient. */
    c->h.weight_decay = c->h.decay == REF_L2 ? 3e-3 : 0.1;
    ref_options(&c->h, ref->options);
    c->columns = columns;
    c->n = ROWS * columns;
    c->start = zeroed((size_t)c->n * 4);
    c->gradients = zeroed((size_t)c->n * (size_t)steps * 4);
    c->x = zeroed((size_t)c->n * sizeof *c->x);
    /* BF16 numbers, which every weight format stores exactly. */
    for (int i = 0; i < c->n; i++) c->start[i] = bf16_nearest((float)(0.3 * next_normal(&s)));
    make_gradients(c->gradients, c->n, c->info.raw_gradient, c->start);
    course_run(c, id);
    c->travelled = distance(c, c->start);
}

static void course_close(struct course *c)
{
    free(c->start);
    free(c->gradients);
    free(c->x);
}

/* Returns the distance between the library's end and the reference's, relative to how far that went. It covers weights
 * and, if those are others, the weights to evaluate. */
static double follow(const struct course *c, const char *recipe)
{
    struct one t;
    double off;
    one_open(&t, recipe, 2, ROWS, c->columns, "f32");
    MUST(halfstep_set_choice(t.o, ALL_GROUPS, "scan", "known-finite"));
    ref_apply(&t, c->row, &c->h);
    one_start(&t);
    for (int j = 0; j < c->info.states; j++) {
        halfstep_slot_info slot = slot_info(t.o, 0, STATE + j);
        CHECK(!slot.fell_back, "%s: %s fell back to another format", recipe, c->info.state_name[j]);
    }
    one_write(&t, WEIGHT, c->start);
    for (int step = 0; step < steps; step++) {
        void *weights[1] = {t.weight};
        const void *gradients[1] = {c->gradients + (size_t)step * (size_t)c->n};
        MUST(halfstep_step(t.o, weights, gradients));
    }
    one_read(&t, WEIGHT, t.room);
    off = distance(c, t.room);
    if (c->info.average) {
        /* y = (1 - b1) z + b1 x */
        double sum = 0;
        MUST(halfstep_read_average(t.o, 0, t.weight, 0, ROWS, t.room));
        for (int i = 0; i < c->n; i++) {
            double x = (c->x[i].w - (1 - c->h.beta1) * c->x[i].s[1]) / c->h.beta1 - (double)t.room[i];
            sum += x * x;
        }
        off = fmax(off, sqrt(sum));
    }
    one_close(&t);
    return off / c->travelled;
}

/* Writes a recipe in which every state that can be is in the format of a row; the others are f32. Returns 0 if none can
 * be. */
static int recipe_with(char *recipe, size_t size, const halfstep_rule_info *rule, const char *weight, int32_t row)
{
    SIZED(halfstep_format_info, format);
    int served = 0, length = snprintf(recipe, size, "%s/%s", rule->name, weight), named = 0;
    MUST(halfstep_get_format_info(row, &format));
    for (int j = 0; j < rule->states; j++) {
        int role = rule->state_role[j];
        if (role == HALFSTEP_ROLE_WEIGHT || rule->state_extent[j]) continue;
        int serves = role == HALFSTEP_ROLE_GRADIENT ? (format.roles & HALFSTEP_ROLE_SIGNED) && !format.block
                                                    : (format.roles & role) != 0;
        served |= serves;
        length +=
            snprintf(recipe + length, size - (size_t)length, "%c%s", named++ ? '+' : '/', serves ? format.name : "f32");
    }
    /* A rule that stores no states is run once. */
    return served || (!named && !strcmp(format.name, "f32"));
}

/* ---- Bounds ------------------------------------------------------------------------------------------------------ */

/* The most that a format of weights, and one of states, may be off: a part of the way, after 1000 steps and after 48.
 * Both add up. They are about twice the error of the worst rule (--table). Noise of unbiased roundings grows as the
 * root of the steps, and the way as the steps. So weights are worse off early; states begin at zero and are better
 * off. */
struct bound {
    const char *format;
    double bound[2];
    const char *reason;
};
static const struct bound weights[] = {
    {"f32", {4e-6, 6e-5}, "roundings of the weight, half a unit each: steps are 1e-3 of it"},
    {"bf16-sr", {0.2, 1.2}, "unbiased, but one unit of the weight is several steps long"},
    {"bf16-kahan", {4e-4, 6e-3}, "the same 2^-8 finer"},
    {"bf16-ecc8", {1.2e-3, 2e-2}, "16 bits of significand, unbiased"},
    {"bf16-ecc16", {4e-6, 6e-5}, "is fp32"},
    {"int8-sr", {0.5, 3}, "unbiased, but one step of a code is many steps long"},
    {"int8-ecc4", {0.06, 0.36}, "the same 2^-4 finer"},
    /* Without a bound: not followed. */
    {"bf16", {0, 0}, "most steps are below half a unit, and are lost"},
    {"f16", {0, 0}, "the same at 2^-11"},
    {"f16-sr", {0, 0}, "as bf16-sr, 2^-3 finer; test_f16_formats.c has its mean"},
    {"f16-kahan", {0, 0}, "as bf16-kahan, 2^-6 finer; likewise"},
    {"f16-ecc8", {0, 0}, "as bf16-ecc8, 2^-2 finer; likewise"},
    {"f16-ecc16", {0, 0}, "as bf16-ecc16; likewise"},
};
static const struct bound states[] = {
    {"f32", {0, 0}, "what the weights' bound is measured with"},
    {"bf16", {0.1, 0.012}, "second moments with 1 - beta2 < 2^-9 stand still while gradients fall"},
    {"bf16-sr", {0.03, 0.015}, "2^-8 of a state, unbiased, averaged over the steps"},
    {"bf16-kahan", {2.5e-4, 2e-5}, "2^-16, averaged; Lion's sign turns where its sum is that small"},
    {"bf16-ecc8", {4e-4, 6e-5}, "2^-15, likewise"},
    {"bf16-ecc16", {0, 0}, "is fp32"},
    {"f16", {2.5e-3, 6e-3}, "2^-11, likewise"},
    {"f16-sr", {3e-3, 7e-3}, "2^-10, likewise"},
    {"f16-kahan", {1e-6, 1e-6}, "2^-22"},
    {"f16-ecc8", {2.5e-4, 1e-5}, "2^-18, averaged; Lion as above"},
    {"f16-ecc16", {1e-6, 1e-6}, "2^-24 above 2^-17, then absolute"},
    {"int8", {0.15, 0.05}, "codes of 1/127 and 1/32 of the root: second moments a little large within a block"},
    {"int6", {0.4, 0.2}, "codes of 1/31 and 1/16 of the root, as int4's"},
    {"int4", {0.9, 0.6}, "codes of 1/7 and 1/4: second moments far below their block's largest are too large"},
    {"fp8", {0.25, 0.12}, "3 bits of mantissa"},
    {"fp8-e5m2", {0.35, 0.25}, "2 bits of mantissa"},
    {"dyn8",
     {0.8, 0.08},
     "always to nearest: averages with a small 1 - beta change by less than half a code, and stick"},
    {"dyn4", {2, 1}, "as dyn8, with a tenth of the codes"},
    {"fp8-lamb16", {2, 1.7}, "the published scale cuts off most of a moment: no more than the direction is left"},
};
/* Exceptions for rules that need more than the format has. */
static const struct {
    const char *rule;
    struct bound state;
} exceptions[] = {
    {"adan",
     {"int4", {3, 0.7}, "its 1 - beta of 0.02 and 0.08 count as fast, so codes are written to nearest, and stick"}},
    {"adan", {"fp8-e5m2", {1.4, 0.25}, "the same"}},
    {"ademamix",
     {"bf16", {0.12, 0.012}, "what enters its slow average, 1e-4 of a gradient, is soon less than half a unit of it"}},
    {"ademamix", {"f16", {0.022, 6e-3}, "the same at 2^-11"}},
    {"ademamix",
     {"f16-sr", {4.5e-3, 7e-3}, "2^-10, unbiased, but each rounding of its slow average lasts 10,000 updates"}},
    {"prodigy", {"fp8-lamb16", {5, 1.7}, "the sums that the estimate is divided by are cut off too"}},
};

enum { WEIGHTS = COUNT(weights), STATES = COUNT(states) };

static const struct bound *bound_of(const struct bound *bounds, int n, const char *format)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(bounds[i].format, format)) return &bounds[i];
    return NULL;
}

static const struct bound *state_bound(const char *rule, const char *format)
{
    for (size_t i = 0; i < COUNT(exceptions); i++)
        if (!strcmp(exceptions[i].rule, rule) && !strcmp(exceptions[i].state.format, format))
            return &exceptions[i].state;
    return bound_of(states, STATES, format);
}

static void follow_reference(const struct reference *ref, int32_t geometry, int columns, uint64_t id)
{
    struct course c;
    course_open(&c, ref, columns, id);
    if (table) printf("     %s %s, %d weights, travelled %.3g:", ref->rule, ref->options, c.n, c.travelled);
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        SIZED(halfstep_format_info, format);
        char recipe[96];
        MUST(halfstep_get_format_info(row, &format));
        if ((format.block && format.geometry == HALFSTEP_GEOMETRY_FLAT) != (geometry == HALFSTEP_GEOMETRY_FLAT))
            continue;
        if (format.block && !ref->blocks) continue;
        const struct bound *state = state_bound(ref->rule, format.name);
        for (int k = 0; state && k < WEIGHTS && recipe_with(recipe, sizeof recipe, &c.info, weights[k].format, row);
             k++) {
            if (weights[k].bound[0] == 0) continue;
            int early = steps == SHORT;
            double off = follow(&c, recipe), allowed = weights[k].bound[early] + state->bound[early];
            if (table && !k) printf("\n       %-11s", format.name);
            if (table) printf(" %9.2g", off);
            CHECK(off <= allowed,
                  "%s %s: %.3g of the way off after %d steps, %.3g allowed (%s; %s); a rule that asks more of a format "
                  "has "
                  "a row in exceptions[]",
                  recipe, ref->options, off, steps, allowed, weights[k].reason, state->reason);
        }
    }
    if (table) printf("\n");
    course_close(&c);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    table = !strcmp(test_filter, "--table");
    if (table) test_filter = "";
    if (BY_LENGTH(1, !table, 0)) steps = SHORT;
    struct one probe;
    SIZED(halfstep_record, counters);
    one_new(&probe, "sgd", 2, ROWS, 128, "f32");
    MUST(get_counters(probe.o, 0, &counters));
    one_close(&probe);
    TEST("every format has a bound") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *weight = format_for(row, HALFSTEP_ROLE_WEIGHT), *state = format_for(row, HALFSTEP_ROLE_SIGNED);
            if (!state) state = format_for(row, HALFSTEP_ROLE_NONNEG);
            CHECK(!weight || bound_of(weights, WEIGHTS, weight),
                  "weights[] of tests/core/test_trajectories.c has no bound for '%s' "
                  "(docs/adding.md)",
                  weight);
            CHECK(!state || bound_of(states, STATES, state),
                  "states[] of tests/core/test_trajectories.c has no bound for '%s' "
                  "(docs/adding.md)",
                  state);
        }
    }
    for (int32_t row = 0; row < halfstep_rule_count(); row++) {
        const char *rule = rule_info(row).name;
        char name[96];
        snprintf(name, sizeof name, "%s follows double precision in every format", rule);
        TEST(name) {
            CHECK(reference_of(rule), "tests/ref/table.h has no reference for the rule '%s' (docs/adding.md)", rule);
            for (int k = 0; k < REFERENCES; k++)
                if (!strcmp(references[k].rule, rule)) {
                    follow_reference(&references[k], HALFSTEP_GEOMETRY_ROWS, 128, counters.id);
                    if (references[k].blocks)
                        follow_reference(&references[k], HALFSTEP_GEOMETRY_FLAT, 512, counters.id);
                }
        }
        test_close_group();
    }
    return test_done();
}
