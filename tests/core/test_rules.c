/* Tests every rule against plain double precision (ref/), every format against the error that its header states, and
 * stochastic rounding by enumeration. Prints the largest errors it met. Only --all enumerates everything; the other
 * runs, of which --short is the shortest, sample by fixed strides. Long runs are in test_trajectories.c. Over 500 lines
 * because all of them judge by the same reference. */
#define HALFSTEP_ADVANCED

#include "ref/table.h"

/* Returns 0, or 2^low to 2^high with all bits random, of either sign. */
static float wide(struct source *s, int low, int high)
{
    uint64_t r = next64(s);
    if ((r >> 8 & 31) == 0) return 0;
    return (float)ldexp((r & 1 ? -1.0 : 1.0) * (1 + next_unit(s)), low + (int)((r >> 16) % (uint64_t)(high - low)));
}

/* ---- Rules ------------------------------------------------------------------------------------------------------- */

/* Values for a rule's own hyper-parameters. With none it keeps its default. Every name of rules.def has a row. */
static const struct {
    const char *name;
    int n;
    double value[4];
} choices[] = {
    {"beta1", 4, {0.9, 0.95, 0, 0.5}},
    {"beta2", 4, {0.999, 0.95, 0.9, 0.9999}},
    {"beta3", 4, {0.999, 0.95, 0.9, 0.9999}},
    {"beta", 3, {0.999, 0.5, 0}},
    {"eps", 4, {1e-8, 1e-6, 0, 1e-12}},
    {"momentum", 3, {0, 0.45, 0.9}},
    {"dampening", 2, {0, 0.3}},
    {"nesterov", 2, {0, 1}},
    {"amsgrad", 2, {0, 1}},
    {"k", 3, {1, 2, 6}},
    {"alpha", 3, {0.5, 0.9, 0.99}},
    {"centered", 2, {0, 1}},
    {"debias", 2, {0, 1}},
    {"amplify", 3, {0, 2, 5}},
    {"published", 2, {0, 1}},
    {"max_weight_norm", 3, {10, 0, 1e9}},
    {"trust_scale", 4, {1, 0.382, 0, 0.5}},
    {"adam", 2, {0, 1}},
    {"threshold", 3, {5e-3, 0, 1e-3}},
    {"weight_lr_power", 3, {2, 0, 3}},
    {"ns_steps", 2, {5, 1}},
    {"ns_coefficients", 4, {0, 1, 2, 3}},
    {"ns_form", 2, {0, 1}},
    {"exact", 2, {0, 1}},
    {"match_rms", 4, {0, 1, 2, 3}},
    {"normalize_rows", 3, {0, 1, 2}},
    {"row_beta", 3, {0.95, 0, 0.5}},
    {"clipped", 2, {1, 0}},
    {"clip_power", 3, {0.25, 0, 1}},
    {"alpha_warmup", 3, {0, 7, 2000}},
    {"beta3_warmup", 3, {0, 7, 2000}},
    {"gamma", 3, {0.025, 0, 1}},
    {"max_norm", 3, {1, 0, 1e-3}},
    {"d0", 2, {1e-6, 1e-3}},
    {"d_coef", 2, {1, 0.5}},
    {"growth_rate", 2, {1e300, 1.02}},
    {"safeguard_warmup", 2, {0, 1}},
    {"instability_eps", 3, {1e-16, 0, 1e-3}},
    {"clip_threshold", 3, {1, 0, 1e-3}},
    {"beta2_decay", 3, {-0.8, -0.5, 0}},
    {"scale_eps", 2, {1e-3, 1}},
    {"d", 3, {1, 0, 2}},
    {"relative_step", 2, {1, 0}},
    {"warmup_init", 2, {0, 1}},
    {"scale_parameter", 2, {1, 0}},
    /* What a sum of few elements keeps of one is no matter of that one alone: test_trajectories. */
    {"slice_p", 0, {0}},
    {"d_group", 0, {0}},
    {"ns_a", 0, {0}},
    {"ns_b", 0, {0}},
    {"ns_c", 0, {0}},
    {"ns_eps", 0, {0}},
};

static struct ref_hyper random_hyper(struct source *s, int32_t row)
{
    static const double lrs[] = {1e-5, 3e-4, 0.1, 1}, decays[] = {0, 1e-2, 0.3};
    halfstep_rule_info info = rule_info(row);
    struct ref_hyper h = ref_defaults(row);
    h.lr = lrs[next64(s) % 4];
    h.weight_decay = decays[next64(s) % 3];
    h.reference_lr = 0.5;
    /* Proximal decay is Adan's. A rule on weights has no gradient for l2 to be added to. */
    enum ref_decay decay = (enum ref_decay)(next64(s) % (h.decay == REF_PROXIMAL ? 4 : 3));
    if (!info.raw_gradient || decay != REF_L2) h.decay = decay;
    for (int32_t i = common_hypers(); i < info.hypers; i++) {
        halfstep_hyper_info hyper = hyper_info(row, i);
        for (size_t c = 0; c < COUNT(choices); c++)
            if (choices[c].n && !strcmp(choices[c].name, hyper.name))
                *ref_hyper_at(&h, hyper.name) =
                    fmax(choices[c].value[next64(s) % (uint64_t)choices[c].n], hyper.minimum);
    }
    return h;
}

enum { COLUMNS = 80, MOST = 16 * COLUMNS };
enum { TYPICAL, WIDE, CANCELLING, KINDS };

/* One step of a tensor from given stored values. TYPICAL: like training. WIDE: any magnitudes whose squares are fp32
 * numbers. CANCELLING: the same, with terms that cancel. */
struct drawn {
    struct ref_hyper h;
    struct ref_tensor r;
    float w[MOST], g[MOST], state[REF_STATES][MOST];
    int stored[REF_STATES];
};

/* Returns the first element that shares its number of state j with element i. Vectors are over rows or columns. */
static int first_with(const halfstep_rule_info *info, int j, const struct ref_tensor *r, int i)
{
    return info->state_extent[j] == HALFSTEP_EXTENT_ROWS      ? i - i % r->columns
           : info->state_extent[j] == HALFSTEP_EXTENT_COLUMNS ? i % r->columns
                                                              : i;
}

/* Convert the numbers of a state from one per element to those of a slot, and back. */
static void write_state(struct one *t, const halfstep_rule_info *info, int j, const struct drawn *d)
{
    static float numbers[MOST];
    int n = 0;
    for (int i = 0; i < d->r.n; i++)
        if (first_with(info, j, &d->r, i) == i) numbers[n++] = d->state[j][i];
    one_write(t, STATE + j, numbers);
}

static void read_state(struct one *t, const halfstep_rule_info *info, int j, const struct ref_tensor *r, float *out)
{
    static float numbers[MOST];
    one_read(t, STATE + j, numbers);
    for (int i = 0, n = 0; i < r->n; i++) {
        int first = first_with(info, j, r, i);
        out[i] = first == i ? numbers[n++] : out[first];
    }
}

static void draw(struct source *s, const halfstep_rule_info *info, int kind, struct drawn *d)
{
    int first = d->r.full == 1;
    /* A gradient may be multiplied by max_norm over the largest, or by an estimate, before it is squared. */
    int bound_norm = d->h.max_norm > 0, least = bound_norm || d->h.d0 > 0 ? -25 : -50, most = bound_norm ? 12 : 40;
    double beta = d->h.beta1 > 0 ? d->h.beta1 : 1;
    for (int i = 0; i < d->r.n; i++) {
        float w = kind ? (bound_norm ? wide(s, least, most) : wide(s, -60, 60)) : (float)next_normal(s),
              g = kind ? wide(s, least, most) : (float)(1e-3 * next_normal(s));
        if (info->raw_gradient) g = kind == CANCELLING ? (float)((double)w * (1 + 1e-6 * next_normal(s))) : w + g;
        /* Under l2 the sum is squared, in fp32. */
        if (d->h.decay == REF_L2 && fabs((double)g + d->h.weight_decay * (double)w) < ldexp(1, least - 5)) w = 0;
        double signs = 0;
        for (int j = 0; j < info->states; j++) {
            int role = info->state_role[j];
            float x = kind ? wide(s, least, most) : (float)(1e-3 * next_normal(s));
            if (role == HALFSTEP_ROLE_NONNEG)
                x = kind ? fabsf(wide(s, -100, 80)) : (float)(1e-6 * (0.1 + next_unit(s)));
            if (role == HALFSTEP_ROLE_WEIGHT)
                x = kind == WIDE ? wide(s, -60, 60) : (float)((double)w + 1e-3 * next_normal(s));
            /* Adan's look-ahead g + b (g - x) cancels where x is about 2 g, and so may its numerator. Both cancel by
             * roundings that changes of an input do not show. */
            int twice = role == HALFSTEP_ROLE_GRADIENT && fabs((double)x - 2 * (double)g) < fabs((double)g);
            if (twice || (role == HALFSTEP_ROLE_GRADIENT && kind == CANCELLING))
                x = (float)((double)g * (1 + 1e-6 * next_normal(s)));
            if (j == 0 && role == HALFSTEP_ROLE_SIGNED && kind == CANCELLING)
                x = (float)(-(1 - d->h.beta1) * (double)g / beta * (1 + 1e-6 * next_normal(s)));
            if (d->r.t == 1 || !d->stored[j]) x = 0;
            if (role == HALFSTEP_ROLE_WEIGHT && first) x = w;
            if (role == HALFSTEP_ROLE_SIGNED) signs = fmax(signs, fabs((double)x));
            d->state[j][i] = x;
        }
        /* Averages obey |m| <= C sqrt(v), with 7.3 for Adam's and 1 for the two of a centered RMSprop. States that no
         * gradients make would only overflow. */
        double bound = d->h.centered != 0 ? 0.98 : 4;
        for (int j = 0; j < info->states; j++)
            if (info->state_role[j] == HALFSTEP_ROLE_NONNEG && d->stored[j] && !info->state_extent[j] &&
                signs > bound * sqrt((double)d->state[j][i]))
                d->state[j][i] = (float)(1.1 * signs * signs);
        d->w[i] = w;
        d->g[i] = g;
    }
    for (int j = 0; j < info->states; j++)
        for (int i = 0; info->state_extent[j] && i < d->r.n; i++)
            d->state[j][i] = d->state[j][first_with(info, j, &d->r, i)];
}

/* Runs the reference with input `which` of every element (0 weight, 1 gradient, then states) larger by a 2^22th, of
 * either sign. */
static void run_reference(const struct reference *ref, const struct drawn *d, int which, double sign,
                          struct ref_element *x, double *scalar)
{
    struct ref_tensor r = d->r;
    r.x = x;
    for (int i = 0; i < r.n; i++) {
        double change = 1 + sign * (i % 3 == 1 ? -0x1p-22 : 0x1p-22);
        x[i] = (struct ref_element){.w = d->w[i], .g = d->g[i]};
        for (int j = 0; j < REF_STATES; j++) x[i].s[j] = d->state[j][i];
        if (which == 0) x[i].w *= change;
        if (which == 1) x[i].g *= change;
        if (which >= 2) x[i].s[which - 2] *= change;
    }
    ref->step(&d->h, &r);
    memcpy(scalar, r.scalar, sizeof r.scalar);
}

/* Returns how many units of 2^-24 of what goes into it a state may be off by. Squares of a transformed matrix, whose
 * state over rows stands alone, have the errors of all its products. */
static double units_of(const halfstep_rule_info *info, int state)
{
    for (int j = 0; j < info->states; j++)
        if (info->state_extent[j] == HALFSTEP_EXTENT_COLUMNS) return 8;
    return info->state_extent[state] == HALFSTEP_EXTENT_ROWS ? 64 : 8;
}

static void judge_step(const struct reference *ref, int32_t row, struct source *s, int kind, double *worst,
                       double *worst_state)
{
    static struct ref_element exact[MOST], near[MOST];
    static double size[1 + REF_STATES][MOST];
    static struct drawn d;
    static float out[MOST];
    halfstep_rule_info info = rule_info(row);
    double scalar[REF_SCALARS], moved[REF_SCALARS], scalar_size[REF_SCALARS];
    struct one t;
    uint64_t step = 1 + (next64(s) % 4 == 0 ? 0 : next64(s) % (next64(s) % 2 ? 10 : 100000));
    uint64_t full = next64(s) % 2 ? step : 1 + next64(s) % step;
    /* Matrices of any magnitudes have singular values that are rounding errors. Only typical ones are tested. */
    int matrix = info.matrix && kind == TYPICAL && next64(s) % 2, rows = info.matrix && !matrix ? MOST : 16;
    d.h = random_hyper(s, row);
    d.r = (struct ref_tensor){.n = MOST,
                              .ndim = rows == 16 ? 2 : 1,
                              .rows = rows,
                              .columns = MOST / rows,
                              .t = (double)step,
                              .full = (double)full};
    one_open(&t, text_of(info.states ? "%s/f32/f32" : "%s/f32", ref->rule), d.r.ndim, rows, MOST / rows, "f32");
    ref_apply(&t, row, &d.h);
    one_start(&t);
    for (int j = 0; j < REF_STATES; j++) d.stored[j] = j < info.states && state_stored(&t, j);
    draw(s, &info, kind, &d);
    one_write(&t, WEIGHT, d.w);
    one_write(&t, GRADIENT, d.g);
    for (int j = 0; j < info.states; j++)
        if (d.stored[j]) write_state(&t, &info, j, &d);
    halfstep_record c = counters_of(t.o, 0);
    d.r.id = c.id;
    c.state_steps = step - 1;
    c.full_steps = full - 1;
    MUST(set_counters(t.o, 0, &c));
    MUST(set_group_steps(t.o, 0, step - 1));
    for (int j = 0; j < info.scalars; j++) {
        d.r.scalar[j] = full == 1 ? 0 : next_unit(s) * pow(0.1, (double)(next64(s) % 4));
        MUST(set_scalar(t.o, 0, info.scalar_name[j], d.r.scalar[j]));
    }
    MUST(one_step(&t));

    /* A result's size is the sum of what each input contributes. A contribution is how far the result moves if the
     * input moves by 2^-22 of itself. The old value counts too, because a change is taken from it. A weight may become
     * a copy of a state. */
    run_reference(ref, &d, -1, 0, exact, scalar);
    for (int j = 0; j < REF_SCALARS; j++) scalar_size[j] = fabs(scalar[j]);
    for (int i = 0; i < MOST; i++) {
        size[0][i] = fabs(exact[i].w) + fabs(exact[i].w - exact[i].w_new);
        for (int j = 0; j < info.states; j++) {
            double was = info.state_role[j] == HALFSTEP_ROLE_WEIGHT ? fabs(exact[i].s[j]) : 0;
            size[1 + j][i] = fabs(exact[i].s_new[j]) + was;
            size[0][i] += was;
        }
    }
    for (int which = 0; which < 2 + info.states; which++)
        for (int sign = -1; sign <= 1; sign += 2) {
            if (which >= 2 && !d.stored[which - 2]) continue;
            run_reference(ref, &d, which, sign, near, moved);
            for (int j = 0; j < REF_SCALARS; j++) scalar_size[j] += fabs(moved[j] - scalar[j]) * 0x1p21;
            for (int i = 0; i < MOST; i++) {
                size[0][i] += fabs(near[i].w_new - exact[i].w_new) * 0x1p21;
                for (int j = 0; j < info.states; j++)
                    size[1 + j][i] += fabs(near[i].s_new[j] - exact[i].s_new[j]) * 0x1p21;
            }
        }
    for (int slot = 0; slot <= info.states; slot++) {
        if (slot && !d.stored[slot - 1]) continue;
        if (slot) read_state(&t, &info, slot - 1, &d.r, out);
        else one_read(&t, WEIGHT, out);
        double *most = slot ? worst_state : worst, largest = 0, units = slot ? units_of(&info, slot - 1) : 8;
        /* Every element of an orthogonalized matrix depends on all of them. */
        for (int i = 0; i < MOST; i++) largest = fmax(largest, size[slot][i]);
        for (int i = 0; matrix && i < MOST; i++) size[slot][i] = largest;
        for (int i = 0; i < MOST; i++) {
            double expected = slot ? exact[i].s_new[slot - 1] : exact[i].w_new, off = fabs((double)out[i] - expected);
            /* Below 2^-126 fp32 has fewer bits, and states none. */
            double error = fmax(off - 0x1p-126, 0) / (size[slot][i] * 0x1p-24);
            if (off <= 0x1p-126) error = 0;
            *most = fmax(*most, error);
            CHECK(error <= units,
                  "%s: w %a g %a s %a %a %a %a: slot %d is %a, expected %a: %.2f units of %a (lr %g, decay %d %g, "
                  "t %d)",
                  ref->rule, d.w[i], d.g[i], d.state[0][i], d.state[1][i], d.state[2][i], d.state[3][i], slot, out[i],
                  expected, error, size[slot][i] * 0x1p-24, d.h.lr, d.h.decay, d.h.weight_decay, (int)step);
        }
    }
    for (int j = 0; j < info.scalars; j++) {
        double value;
        MUST(get_scalar(t.o, 0, info.scalar_name[j], &value));
        /* Summands are fp32, whose range ends. */
        if (fabs(scalar[j]) > 0x1p127) continue;
        CHECK(fabs(value - scalar[j]) <= 8 * 0x1p-24 * scalar_size[j], "%s: %s is %.9g, expected %.9g", ref->rule,
              info.scalar_name[j], value, scalar[j]);
    }
    one_close(&t);
}

static int has_choice(const char *hyper)
{
    for (size_t c = 0; c < COUNT(choices); c++)
        if (!strcmp(choices[c].name, hyper)) return 1;
    return 0;
}

static void test_steps(void)
{
    TEST("every rule has a reference") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            halfstep_rule_info info = rule_info(row);
            CHECK(reference_of(info.name), "tests/ref/table.h has no reference for the rule '%s' (docs/adding.md)",
                  info.name);
            for (int32_t i = common_hypers(); i < info.hypers; i++)
                CHECK(has_choice(hyper_info(row, i).name),
                      "choices[] of tests/core/test_rules.c has no values for '%s' of the rule '%s' "
                      "(docs/adding.md)",
                      hyper_info(row, i).name, info.name);
        }
        for (int k = 0; k < REFERENCES; k++)
            CHECK(halfstep_rule_find(references[k].rule) >= 0, "tests/ref/table.h: there is no rule '%s'",
                  references[k].rule);
    }
    for (int32_t row = 0; row < halfstep_rule_count(); row++) {
        const struct reference *ref = reference_of(rule_info(row).name);
        if (!ref) continue;
        char name[96];
        snprintf(name, sizeof name, "%s: one step within 8 units of 2^-24 of what goes into each result", ref->rule);
        TEST(name) {
            struct source s = {(uint64_t)row + 100};
            double worst[KINDS] = {0}, worst_state[KINDS] = {0};
            for (int round = 0; round < BY_LENGTH(60, 100, 600); round++)
                judge_step(ref, row, &s, round % KINDS, &worst[round % KINDS], &worst_state[round % KINDS]);
            printf("     %-13s weights %.2f %.2f %.2f, states %.2f %.2f %.2f (typical, wide, cancelling)\n", ref->rule,
                   worst[0], worst[1], worst[2], worst_state[0], worst_state[1], worst_state[2]);
        }
        test_close_group();
    }
}

/* ---- Formats ----------------------------------------------------------------------------------------------------- */

/* Bounds of formats of single elements, rounded to nearest. The error is at most 2^-bits of the value, or the floor. An
 * element format of formats.def needs a row here. */
static const struct kept {
    const char *format;
    int bits; /* 0: every bit of fp32 */
    double floor;
    int half; /* has another range; formats[] of test_f16_formats.c judges it as a weight or state */
} kept[] = {
    /* Rounding to so many significant bits errs by half a unit. Below 2^-126 units no longer shrink. */
    {"f32", 0, 0, 0},
    {"bf16", 8, 0x1p-134, 0},
    {"bf16-sr", 8, 0x1p-134, 0},
    /* A residual is a BF16 number itself, whose last place is 2^-133. */
    {"bf16-kahan", 16, 0x1p-134, 0},
    {"bf16-ecc8", 16, 0x1p-142, 0},
    {"bf16-ecc16", 0, 0, 0},
    {"f16", 11, 0x1p-25, 1},
    {"f16-sr", 0, 0, 1},
    {"f16-kahan", 0, 0, 1},
    {"f16-ecc8", 0, 0, 1},
    {"f16-ecc16", 0, 0, 1},
};

static const struct kept *kept_of(const char *format)
{
    for (size_t i = 0; i < COUNT(kept); i++)
        if (!strcmp(kept[i].format, format)) return &kept[i];
    return NULL;
}

/* Writes values of all magnitudes through a slot and judges the values read back by the format's header. */
static double element_error(const char *format, double value, double back)
{
    const struct kept *k = kept_of(format);
    double off = fabs(back - value);
    return k->bits ? off / fmax(ldexp(fabs(value), -k->bits), k->floor) : off == 0 ? 0 : INFINITY;
}

static void judge_elements(const char *format, const char *recipe, const char *gradient, int slot, int low, int high)
{
    enum { ROWS = 64, COLUMNS = 100, N = ROWS * COLUMNS };
    static float in[N], out[N];
    struct source s = {77};
    struct one t;
    double worst = 0;
    one_new(&t, recipe, 2, ROWS, COLUMNS, gradient);
    for (int round = 0; round < BY_LENGTH(4, 6, 40); round++) {
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

/* Judges blocks of one magnitude with elements far below it, written to nearest. Roots of signed values are off by at
 * most the root of half of their block's step. Roots of second moments are off by 2^-6 of themselves down to a 14th of
 * the largest or 2^-65. Below that they are off by 2^-5, down to the smallest code, 2^-11 of the largest or 2^-73. None
 * of them becomes zero. Below 2^-126 a square has a last place of its own. */
static void judge_block(struct source *s, int nonneg, int exponent, double *worst)
{
    enum { N = 4 * 32 };
    static float in[N], out[N];
    struct one t;
    one_new(&t, "adamw/f32/int8", 2, 4, 32, "f32");
    for (int i = 0; i < N; i++) {
        double unit = pow(next_unit(s), 1 + (double)(i % 5));
        in[i] = (float)ldexp(unit * (nonneg || next64(s) & 1 ? 1 : -1), exponent);
        if (i % 11 == 3) in[i] = 0;
    }
    one_write(&t, STATE + nonneg, in);
    one_read(&t, STATE + nonneg, out);
    for (int b = 0; b < N; b += 32) {
        double most = 0;
        for (int i = b; i < b + 32; i++) most = fmax(most, fabs((double)in[i]));
        double step = sqrt(most) / 127 * (1 + 0x1p-7), smallest = fmax(sqrt(most) * 0x1p-11, 0x1p-73);
        for (int i = b; i < b + 32; i++) {
            double root = copysign(sqrt(fabs((double)in[i])), (double)in[i]);
            double back = copysign(sqrt(fabs((double)out[i])), (double)out[i]);
            if (most < 0x1p-126) {
                CHECK(out[i] == 0, "a block below 2^-126 decodes to %a", out[i]);
                continue;
            }
            double allowed =
                !nonneg ? step * sqrt(0.5) : root * (root > fmax(sqrt(most) / 14, 0x1p-65) ? 0x1p-6 : 0x1p-5);
            if (nonneg) allowed = fmax(allowed, root < smallest ? smallest : 0) + 0x1p-150 / fmax(root, 0x1p-75);
            double error = fabs(back - root) / allowed;
            *worst = fmax(*worst, error);
            CHECK(error <= 1.0001, "int8 %s: %a in a block of %a came back as %a", nonneg ? "non-negative" : "signed",
                  in[i], most, out[i]);
            CHECK(!nonneg || in[i] == 0 || out[i] > 0, "int8: the second moment %a became zero beside %a", in[i], most);
        }
    }
    one_close(&t);
}

static void test_formats(void)
{
    TEST("formats keep values to their documented error") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *weight = format_for(row, HALFSTEP_ROLE_WEIGHT),
                       *gradient = format_for(row, HALFSTEP_ROLE_GRADIENT);
            const char *state = format_for(row, HALFSTEP_ROLE_SIGNED);
            halfstep_format_info info = format_info(row);
            if (info.block) continue; /* test_block_formats.c and test_packed.c have them */
            const struct kept *k = kept_of(info.name);
            CHECK(k, "kept[] of tests/core/test_rules.c has no bound for '%s' (docs/adding.md)", info.name);
            if (!k) continue;
            if (weight && !k->half) judge_elements(weight, text_of("adamw/%s", weight), "f32", WEIGHT, -140, 126);
            if (gradient) judge_elements(gradient, "adamw", gradient, GRADIENT, -30, k->half ? 15 : 120);
            if (state && !k->half) judge_elements(state, text_of("lion/f32/%s", state), "f32", STATE, -125, 126);
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
            struct one t;
            one_new(&t, text_of("lion/f32/%s", format), 2, 2, 64, "f32");
            one_read(&t, STATE, t.room);
            for (int i = 0; i < t.n; i++)
                CHECK(to_bits(t.room[i]) == 0, "%s: zero bytes decode to %a", format, t.room[i]);
            one_fill(&t, STATE, -0x1p-128f);
            one_read(&t, STATE, t.room);
            for (int i = 0; i < t.n; i++)
                CHECK(to_bits(t.room[i]) == 0, "%s: -2^-128 came back as %a", format, t.room[i]);
            one_close(&t);
        }
    }
}

/* ---- Stochastic rounding ----------------------------------------------------------------------------------------- */

/* Counts how often the 131,072 roundings of one pattern, with each random half word once in either place, went away
 * from zero. */
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
        /* Both signs, odd and even, subnormal, the smallest normal, the last before the range ends. The first two are
         * whole. */
        static const uint16_t high[] = {0x3f80, 0xc2ff, 0x0000, 0x8000, 0x007f, 0x0080, 0x80ff, 0x7f7e, 0xff7d, 0x4000};
        for (int k = 0; k < 10; k++) {
            uint32_t stride = BY_LENGTH(2047, k < 2 ? 31 : 509, k < 2 ? 1 : 127);
            for (uint32_t low = 0; low < 65536; low = low + stride < 65536 || low == 65535 ? low + stride : 65535) {
                uint32_t bits = (uint32_t)high[k] << 16 | low, away = count_away(bits, words);
                CHECK(away == 2 * low, "%08x went away %u times of 131072, expected %u", bits, away, 2 * low);
            }
        }
    }
    TEST("I-12, I-31 stochastic rounding: NaN stay NaN, infinities stay, the largest finite numbers stay finite") {
        static const uint32_t in[] = {0x7fffffff, 0xffffffff, 0x7f800001, 0xff800001, 0x7fc00000, 0x7f80ffff,
                                      0x7f800000, 0xff800000, 0x7f7fffff, 0xff7fffff, 0x7f7f0001, 0x7f7f0000,
                                      0x00000001, 0x80000001, 0x0000ffff, 0x00000000, 0x80000000};
        int peer_lost = 0;
        for (size_t k = 0; k < COUNT(in); k++)
            for (uint32_t i = 0; i < 65536; i += BY_LENGTH(255, 31, 1)) {
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
                    /* Add and drop, as torchao and torchastic do. */
                    peer_lost += (in[k] & 0x7fffffff) > 0x7f800000 && ((in[k] + r) >> 16 & 0x7fff) <= 0x7f80;
                }
            }
        CHECK(peer_lost > 0, "the counter-check lost no NaN");
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_steps();
    test_formats();
    test_stochastic();
    return test_done();
}
