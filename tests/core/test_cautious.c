/* Tests cautious groups against plain double precision. The authors' own two optimizers are one reference (Liang et al.
 * 2024; c_adamw.py and c_lion.py of their code). Every rule whose table row has a sign is held to its own reference.
 * Other tests are about handles, parts, hyper-parameters and cautious decay.
 *
 * Over 500 lines because each of these needs the references and tensors of the others. */

#include "handle/optimizer.h"
#include "ref/table.h"

enum { ROWS = 24, COLUMNS = 80, N = ROWS * COLUMNS };

static int is_cautious(int32_t row) { return rule_info(row).cautious && reference_of(rule_info(row).name); }

/* ---- References -------------------------------------------------------------------------------------------------- */

/* Returns the factor of elements that agree: mask / clamp(mean(mask), 1e-3). */
static double scale_of(const double *update, const double *gradient, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += update[i] * gradient[i] > 0;
    return 1 / fmax(sum / n, 1e-3);
}

/* Makes a cautious step from two runs of the rule's reference. Weights of 0 without decay give its update alone;
 * weights of 1 without gradients give its decay. */
static void ref_cautious(const struct reference *ref, const struct ref_hyper *h, struct ref_tensor *r)
{
    static struct ref_element alone[N], whole[N];
    static double update[N], gradient[N];
    struct ref_hyper none = *h;
    struct ref_tensor without = *r, with = *r;
    double decay, scale;
    none.weight_decay = 0;
    without.x = alone;
    with.x = whole;
    for (int i = 0; i < r->n; i++) {
        whole[i] = (struct ref_element){.w = 1};
        alone[i] = r->x[i];
        alone[i].w = 0;
        alone[i].g = gradient[i] = ref_gradient(h, &r->x[i]);
    }
    ref->step(h, &with);
    ref->step(&none, &without);
    decay = h->decay == REF_L2 ? 0 : 1 - whole[0].w_new;
    for (int i = 0; i < r->n; i++) update[i] = -alone[i].w_new;
    scale = scale_of(update, gradient, r->n);
    if (h->decay == REF_PROXIMAL) scale /= 1 + h->lr * h->weight_decay;
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        x->w_new = x->w - (update[i] * gradient[i] > 0 ? scale * update[i] : 0) - decay * x->w;
        memcpy(x->s_new, alone[i].s_new, sizeof x->s_new);
    }
    memcpy(r->scalar, with.scalar, sizeof r->scalar);
}

/* c_adamw.py, but eps is beside the debiased root and decay is of the weight before the step, as in torch's AdamW. */
static void c_adamw(struct ref_element *x, double t, double lr, double wd)
{
    static double m[N], gradient[N];
    double step = lr * sqrt(1 - pow(F(0.999), t)) / (1 - pow(F(0.9), t)), scale;
    for (int i = 0; i < N; i++) {
        x[i].s_new[0] = m[i] = F(0.9) * x[i].s[0] + F(0.1) * x[i].g;
        x[i].s_new[1] = F(0.999) * x[i].s[1] + F(0.001) * x[i].g * x[i].g;
        gradient[i] = x[i].g;
    }
    scale = scale_of(m, gradient, N);
    for (int i = 0; i < N; i++) {
        double mask = m[i] * gradient[i] > 0 ? scale : 0, correction = sqrt(1 - pow(F(0.999), t));
        x[i].w_new = x[i].w - step * m[i] * mask / (sqrt(x[i].s_new[1]) + 1e-8 * correction);
        x[i].w_new -= lr * wd * x[i].w;
    }
}

/* c_lion.py. */
static void c_lion(struct ref_element *x, double t, double lr, double wd)
{
    static double update[N], gradient[N];
    (void)t;
    for (int i = 0; i < N; i++) {
        double c = F(0.9) * x[i].s[0] + F(0.1) * x[i].g;
        update[i] = (c > 0) - (c < 0);
        gradient[i] = x[i].g;
        x[i].s_new[0] = F(0.99) * x[i].s[0] + F(0.01) * x[i].g;
    }
    double scale = scale_of(update, gradient, N);
    for (int i = 0; i < N; i++)
        x[i].w_new = x[i].w * (1 - lr * wd) - lr * update[i] * (update[i] * gradient[i] > 0 ? scale : 0);
}

/* ---- One tensor -------------------------------------------------------------------------------------------------- */

static void open_cautious(struct one *t, const char *recipe)
{
    one_open(t, recipe, 2, ROWS, COLUMNS, "f32");
    one_hyper(t, "cautious", 1);
}

static void test_authors(void)
{
    static const struct {
        const char *recipe;
        void (*step)(struct ref_element *x, double t, double lr, double wd);
        double lr, wd;
    } authors[] = {{"adamw/f32/f32", c_adamw, 1e-2, 0.1}, {"lion/f32/f32", c_lion, 1e-3, 0.3}};
    static struct ref_element x[N];
    static float values[N];
    for (int k = 0; k < 2; k++) {
        char name[96];
        snprintf(name, sizeof name, "%s: 200 steps as the authors' code in double", authors[k].recipe);
        TEST(name) {
            struct source s = {7};
            struct one t;
            double worst = 0;
            open_cautious(&t, authors[k].recipe);
            one_hyper(&t, "lr", authors[k].lr);
            one_hyper(&t, "weight_decay", authors[k].wd);
            if (k == 0) one_hyper(&t, "beta2", 0.999);
            one_start(&t);
            for (int i = 0; i < N; i++) values[i] = (float)next_normal(&s);
            one_write(&t, WEIGHT, values);
            for (int i = 0; i < N; i++) x[i] = (struct ref_element){.w = (double)values[i]};
            for (int step = 1; step <= 200; step++) {
                for (int i = 0; i < N; i++) values[i] = (float)(1e-2 * (0.3 + next_normal(&s)));
                one_write(&t, GRADIENT, values);
                for (int i = 0; i < N; i++) x[i].g = (double)values[i];
                authors[k].step(x, step, authors[k].lr, authors[k].wd);
                for (int i = 0; i < N; i++) {
                    x[i].w = x[i].w_new;
                    memcpy(x[i].s, x[i].s_new, sizeof x[i].s);
                }
                MUST(one_step(&t));
            }
            one_read(&t, WEIGHT, values);
            for (int i = 0; i < N; i++) worst = fmax(worst, fabs((double)values[i] - x[i].w));
            printf("     %s: %.2g from the authors' weights of about 1\n", authors[k].recipe, worst);
            CHECK(worst < 2e-5, "%s: a weight is %g away", authors[k].recipe, worst);
            one_close(&t);
        }
    }
}

/* Multiplies an element's input `which` (0 the weight, 1 the gradient, then states) by 1 + change. */
static void change_input(struct ref_element *x, int which, double change)
{
    double *place = which == 0 ? &x->w : which == 1 ? &x->g : &x->s[which - 2];
    *place *= 1 + change;
}

static void draw(struct source *s, const struct one *t, const halfstep_rule_info *info, const struct ref_hyper *h,
                 const struct ref_tensor *r)
{
    double agree = next_unit(s);
    for (int i = 0; i < N; i++) {
        double w = next_normal(s), g = i % 17 ? 1e-2 * next_normal(s) : 0;
        r->x[i] = (struct ref_element){.w = (double)(float)w, .g = (double)(float)g};
        double seen = ref_gradient(h, &r->x[i]);
        for (int j = 0; j < info->states && r->t > 1; j++) {
            double sign = next_unit(s) < agree ? 1 : -1, away = 2 + next_unit(s);
            double x = info->state_role[j] == HALFSTEP_ROLE_NONNEG   ? seen * seen * away * away
                       : info->state_role[j] == HALFSTEP_ROLE_SIGNED ? sign * seen * away * 4
                                                                     : seen * 0.7;
            if (state_stored(t, j)) r->x[i].s[j] = (double)(float)x;
        }
    }
}

static void write_input(struct one *t, const struct ref_tensor *r, int which)
{
    static float values[N];
    for (int i = 0; i < N; i++) {
        const struct ref_element *x = &r->x[i];
        values[i] = (float)(which == 0 ? x->w : which == 1 ? x->g : x->s[which - 2]);
    }
    one_write(t, which, values);
}

/* Makes one step from given states, with a cautious group and with another one. */
static void judge(int32_t row, struct source *s, enum ref_decay decay, double *worst)
{
    static struct ref_element given[N], x[N], near[N];
    static double size[N];
    static float out[2][N];
    const struct reference *ref = reference_of(rule_info(row).name);
    halfstep_rule_info info = rule_info(row);
    struct ref_hyper h = ref_defaults(row);
    struct ref_tensor r = {.n = N, .ndim = 2, .rows = ROWS, .columns = COLUMNS, .x = given};
    struct one t[2];
    char recipe[64];
    ref_options(&h, ref->options);
    h.lr = 1e-2;
    h.weight_decay = 0.1;
    h.reference_lr = 0.05;
    h.decay = decay;
    r.t = r.full = 1 + (double)(next64(s) % 50);
    snprintf(recipe, sizeof recipe, "%s/f32/f32", ref->rule);
    for (int k = 0; k < 2; k++) {
        SIZED(halfstep_record, c);
        one_open(&t[k], recipe, 2, ROWS, COLUMNS, "f32");
        one_hyper(&t[k], "cautious", k);
        ref_apply(&t[k], row, &h);
        one_start(&t[k]);
        if (!k) draw(s, &t[k], &info, &h, &r);
        for (int which = 0; which < 2 + info.states; which++)
            if (which < 2 || state_stored(&t[k], which - 2)) write_input(&t[k], &r, which);
        MUST(get_counters(t[k].o, 0, &c));
        r.id = c.id;
        c.state_steps = c.full_steps = (uint64_t)r.t - 1;
        MUST(set_counters(t[k].o, 0, &c));
        MUST(one_step(&t[k]));
    }
    memcpy(x, given, sizeof x);
    r.x = x;
    ref_cautious(ref, &h, &r);
    for (int i = 0; i < N; i++) size[i] = fabs(x[i].w) + fabs(x[i].w - x[i].w_new);
    for (int which = 0; which < 2 + info.states; which++) {
        struct ref_tensor moved = r;
        memset(moved.scalar, 0, sizeof moved.scalar);
        moved.x = near;
        memcpy(near, given, sizeof near);
        for (int i = 0; i < N; i++) change_input(&near[i], which, 0x1p-22);
        ref_cautious(ref, &h, &moved);
        for (int i = 0; i < N; i++) size[i] += fabs(near[i].w_new - x[i].w_new) * 0x1p22;
    }
    one_read(&t[1], WEIGHT, out[0]);
    for (int i = 0; i < N; i++) {
        double units = fabs((double)out[0][i] - x[i].w_new) / (size[i] * 0x1p-24);
        *worst = fmax(*worst, units);
        CHECK(units <= 8, "%s, decay %d, t %g: weight %d is %.9g, expected %.9g from %.9g with gradient %g: %.1f units",
              ref->rule, (int)decay, r.t, i, out[0][i], x[i].w_new, x[i].w, x[i].g, units);
    }
    for (int j = 0; j < info.states; j++) {
        if (!state_stored(&t[0], j)) continue;
        for (int k = 0; k < 2; k++) one_read(&t[k], STATE + j, out[k]);
        CHECK(!memcmp(out[0], out[1], sizeof out[0]), "%s: state %d has other bits", ref->rule, j);
    }
    one_close(&t[0]);
    one_close(&t[1]);
}

static void test_rules(void)
{
    int cautious = 0;
    for (int32_t row = 0; row < halfstep_rule_count(); row++) {
        if (!is_cautious(row)) continue;
        char name[96];
        snprintf(name, sizeof name, "%s: one step as its reference, masked and scaled", rule_info(row).name);
        cautious++;
        TEST(name) {
            struct source s = {(uint64_t)row + 1};
            double worst = 0;
            for (int k = 0; k < 40; k++)
                for (int decay = REF_L2; decay <= REF_PROXIMAL; decay++) {
                    if (decay == REF_PROXIMAL && ref_defaults(row).decay != REF_PROXIMAL) continue;
                    judge(row, &s, (enum ref_decay)decay, &worst);
                }
            printf("     %s: %.2f units of 2^-24 of what goes into the result\n", rule_info(row).name, worst);
        }
    }
    TEST("the table has rules of either kind") {
        CHECK(cautious >= 10 && cautious < halfstep_rule_count(), "%d of %d rules", cautious, halfstep_rule_count());
    }
}

/* ---- What a mean of almost nothing is taken for ------------------------------------------------------------------ */

static void test_ends(void)
{
    static float w[N], g[N], m[N];
    TEST("one element of 1920 that agrees is scaled by 1000, and decay by nothing") {
        struct one t;
        open_cautious(&t, "sgd/f32/f32");
        one_hyper(&t, "momentum", 0.5);
        one_hyper(&t, "lr", 0.25);
        one_hyper(&t, "weight_decay", 0.5);
        MUST(halfstep_set_choice(t.o, 0, "decay", "decoupled"));
        one_start(&t);
        for (int i = 0; i < N; i++) {
            w[i] = 8;
            g[i] = 1;
            m[i] = i == 7 ? 2.0f : -4.0f;
        }
        halfstep_record c = counters_of(t.o, 0);
        c.state_steps = c.full_steps = 1;
        MUST(set_counters(t.o, 0, &c));
        one_write(&t, WEIGHT, w);
        one_write(&t, GRADIENT, g);
        one_write(&t, STATE, m);
        MUST(one_step(&t));
        one_read(&t, WEIGHT, w);
        EQUAL((double)w[7], 8 - 0.25 * 2 * 1000 - 1);
        CHECK((double)w[8] == 7 && (double)w[N - 1] == 7, "others are %g and %g", w[8], (double)w[N - 1]);
        one_close(&t);
    }
    TEST("where all agree nothing is changed") {
        struct one t[2];
        static float out[2][N];
        struct source s = {3};
        for (int i = 0; i < N; i++) w[i] = (float)next_normal(&s), g[i] = 0.5f + (float)next_unit(&s);
        for (int k = 0; k < 2; k++) {
            one_open(&t[k], "adamw/f32/f32", 2, ROWS, COLUMNS, "f32");
            if (k) one_hyper(&t[k], "cautious", 1);
            one_hyper(&t[k], "weight_decay", 0);
            one_start(&t[k]);
            one_write(&t[k], WEIGHT, w);
            one_write(&t[k], GRADIENT, g);
            for (int step = 0; step < 5; step++) MUST(one_step(&t[k]));
            one_read(&t[k], WEIGHT, out[k]);
            one_close(&t[k]);
        }
        CHECK(!memcmp(out[0], out[1], sizeof out[0]), "other bits");
    }
}

/* ---- Handles ----------------------------------------------------------------------------------------------------- */

enum { TENSORS = 4 };

struct several {
    halfstep_optimizer *o;
    float w[TENSORS][N], g[TENSORS][N];
};

/* Opens a handle. Tensors whose bit in `cautious` is set are in a cautious group. only: mask of the tensors to add. */
static void open_several(struct several *m, int cautious, int only)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 2, .seed = 5};
    int32_t group[2];
    MUST(halfstep_create(&options, &m->o));
    for (int k = 0; k < 2; k++) {
        MUST(halfstep_add_group(m->o, "adamw/f32/int8", &group[k]));
        MUST(halfstep_set_hyper(m->o, group[k], "cautious", k));
    }
    for (int i = 0; i < TENSORS; i++) {
        char name[8];
        snprintf(name, sizeof name, "t%d", i);
        if (only >> i & 1)
            ADD_TENSOR(m->o, .group = group[cautious >> i & 1], .name = name, .ndim = 2, .rows = ROWS,
                       .row_length = COLUMNS, .gradient = "f32");
    }
    MUST(halfstep_allocate_states(m->o));
    struct source s = {11};
    for (int i = 0; i < TENSORS; i++)
        for (int j = 0; j < N; j++) m->w[i][j] = (float)next_normal(&s);
}

static void step_several(struct several *m, int step, int only, int singly)
{
    void *weights[TENSORS];
    const void *gradients[TENSORS];
    struct source s = {(uint64_t)step + 100};
    int n = 0;
    for (int i = 0; i < TENSORS; i++) {
        for (int j = 0; j < N; j++) m->g[i][j] = (float)next_normal(&s);
        if (!(only >> i & 1)) continue;
        weights[n] = m->w[i];
        gradients[n++] = m->g[i];
    }
    if (!singly) MUST(halfstep_step(m->o, weights, gradients));
    for (int i = n; singly && i-- > 0;) MUST(step_tensor(m->o, i, weights[i], gradients[i]));
}

static void test_handles(void)
{
    static struct several all, part[2], single;
    TEST("groups that are cautious and groups that are not, together, apart and tensor by tensor") {
        open_several(&all, 0x5, 0xf);
        open_several(&part[0], 0x5, 0x5);
        open_several(&part[1], 0x5, 0xa);
        open_several(&single, 0x5, 0xf);
        for (int step = 0; step < 6; step++) {
            step_several(&all, step, 0xf, 0);
            step_several(&part[0], step, 0x5, 0);
            step_several(&part[1], step, 0xa, 0);
            step_several(&single, step, 0xf, 1);
        }
        for (int i = 0; i < TENSORS; i++) {
            CHECK(!memcmp(all.w[i], part[i & 1].w[i], sizeof all.w[i]), "tensor %d has other bits with others", i);
            CHECK(!memcmp(all.w[i], single.w[i], sizeof all.w[i]), "tensor %d has other bits by itself", i);
        }
        CHECK(memcmp(all.w[0], all.w[1], sizeof all.w[0]), "cautious makes no difference");
        int64_t n = statistics_count(all.o), without = statistics_count(part[1].o);
        CHECK(n - norms_offset(all.o) == 2 * round_statistics_count(all.o) && without == norms_offset(part[1].o),
              "a sum for each cautious tensor, and none for others");
        halfstep_destroy(all.o);
        halfstep_destroy(part[0].o);
        halfstep_destroy(part[1].o);
        halfstep_destroy(single.o);
    }
    TEST("a part of a tensor is stepped by begin, norms and finish alone") {
        static float w[N], g[N];
        halfstep_optimizer *o;
        void *weights[1] = {w};
        const void *gradients[1] = {g};
        int64_t statistics[200];
        o = new_optimizer("lion/f32/f32", 1, 0);
        MUST(halfstep_set_hyper(o, 0, "cautious", 1));
        ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = 2 * ROWS, .row_length = COLUMNS, .n_rows = ROWS,
                   .n_columns = COLUMNS, .gradient = "f32");
        MUST(halfstep_allocate_states(o));
        CHECK(statistics_count(o) <= 200, "more statistics than the test has room for");
        MUST(halfstep_set_choice(o, ALL_GROUPS, "scan", "known-finite"));
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), UNSUPPORTED, "sums over all of it");
        MUST(step_begin(o, gradients, statistics));
        EXPECT_NAMED(o, step_finish(o, weights, gradients, statistics), ORDER, "halfstep_run_norms");
        MUST(step_norms(o, weights, gradients, statistics));
        MUST(step_finish(o, weights, gradients, statistics));
        /* Micro-steps need no count of agreeing elements, and they take parts. */
        MUST(accumulate_states(o, gradients));
        halfstep_destroy(o);
    }
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

static void test_refusals(void)
{
    TEST("rules without a sign refuse with the reason of their row, and nothing is changed") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            halfstep_options options = {.struct_size = sizeof options, .threads = 1};
            halfstep_optimizer *o;
            int32_t group;
            double value = -1;
            char recipe[64];
            MUST(halfstep_create(&options, &o));
            snprintf(recipe, sizeof recipe, "%s/f32", rule_info(row).name);
            MUST(halfstep_add_group(o, recipe, &group));
            if (rule_info(row).cautious) {
                MUST(halfstep_set_hyper(o, group, "cautious", 1));
            } else {
                EXPECT_NAMED(o, halfstep_set_hyper(o, group, "cautious", 1), UNSUPPORTED, " cannot be cautious: ");
                MUST(halfstep_set_hyper(o, group, "cautious", 0));
                MUST(halfstep_get_hyper(o, group, "cautious", &value));
                CHECK(value == 0, "%s: %g", rule_info(row).name, value);
                MUST(halfstep_add_group(o, "adamw/f32", &group));
                EXPECT(halfstep_set_hyper(o, ALL_GROUPS, "cautious", 1), UNSUPPORTED);
                MUST(halfstep_get_hyper(o, group, "cautious", &value));
                CHECK(value == 0, "of two groups one took what the other refused");
            }
            halfstep_destroy(o);
        }
    }
    TEST("it is chosen before the states exist") {
        struct one t;
        open_cautious(&t, "adamw/f32");
        one_start(&t);
        MUST(halfstep_set_hyper(t.o, 0, "cautious", 1));
        EXPECT_NAMED(t.o, halfstep_set_hyper(t.o, 0, "cautious", 0), ORDER, "once the states exist");
        EXPECT(halfstep_set_hyper(t.o, 0, "cautious", 2), RANGE);
        one_close(&t);
    }
}

/* ---- Cautious decay (Chen et al. 2025) --------------------------------------------------------------------------- */

enum { UNDECAYED, DECOUPLED, CAUTIOUS, MODES };

/* Sets weights and states to those of another tensor of the same recipe. */
static void copy_values(const struct one *from, struct one *to)
{
    for (int slot = 0; slot < HSTEP_SLOTS; slot++) {
        const struct hstep_slot *p = &from->o->tensors[0].slot[slot], *q = &to->o->tensors[0].slot[slot];
        if (p->format < 0 || slot == GRADIENT) continue;
        memcpy(slot ? q->code : to->weight, slot ? p->code : from->weight, (size_t)p->code_bytes);
        if (p->extra_bytes) memcpy(q->extra, p->extra, (size_t)p->extra_bytes);
    }
    memcpy(to->o->tensors[0].scalar, from->o->tensors[0].scalar, sizeof to->o->tensors[0].scalar);
}

/* Compares each weight after a step with that of a step without decay, if the update alone moves it away from 0, and
 * else with that of a step with decoupled decay. */
static void judge_decay(const char *recipe, int ndim, struct source *s)
{
    static float gradient[N], before[N], after[MODES][N];
    struct one t[MODES];
    int64_t away = 0, towards = 0;
    for (int k = 0; k < MODES; k++) {
        one_open(&t[k], recipe, ndim, ndim == 2 ? ROWS : N, ndim == 2 ? COLUMNS : 1, "f32");
        MUST(halfstep_set_choice(t[k].o, 0, "decay", k == CAUTIOUS ? "cautious" : "decoupled"));
        one_hyper(&t[k], "lr", 1e-2);
        one_hyper(&t[k], "weight_decay", k == UNDECAYED ? 0 : 0.1);
        one_start(&t[k]);
    }
    for (int64_t i = 0; i < t[0].n; i++) before[i] = (float)next_normal(s);
    one_write(&t[CAUTIOUS], WEIGHT, before);
    for (int step = 0; step < 6; step++) {
        for (int64_t i = 0; i < t[0].n; i++) gradient[i] = (float)next_normal(s);
        one_read(&t[CAUTIOUS], WEIGHT, before);
        for (int k = 0; k < MODES; k++) {
            if (k != CAUTIOUS) copy_values(&t[CAUTIOUS], &t[k]);
            one_write(&t[k], GRADIENT, gradient);
        }
        for (int k = 0; k < MODES; k++) {
            MUST(one_step(&t[k]));
            one_read(&t[k], WEIGHT, after[k]);
        }
        for (int64_t i = 0; i < t[0].n; i++) {
            float moved = after[UNDECAYED][i] - before[i],
                  expected = after[moved * before[i] > 0 ? UNDECAYED : DECOUPLED][i];
            if (after[UNDECAYED][i] == after[DECOUPLED][i]) continue;
            CHECK(after[CAUTIOUS][i] == expected || (!moved && after[CAUTIOUS][i] == after[UNDECAYED][i]),
                  "%s, step %d: weight %lld became %.9g of %.9g, expected %.9g", recipe, step, (long long)i,
                  after[CAUTIOUS][i], before[i], expected);
            away += moved * before[i] > 0;
            towards += moved * before[i] < 0;
        }
    }
    CHECK(away > 100 && towards > 100, "%s: %lld weights moved away from 0 and %lld towards it", recipe,
          (long long)away, (long long)towards);
    for (int k = 0; k < MODES; k++) one_close(&t[k]);
}

static void test_decay(void)
{
    static const char *const formats[] = {"f32/f32", "bf16-sr/bf16-sr", "bf16-kahan/int8"};
    for (int32_t row = 0; row < halfstep_rule_count(); row++) {
        const char *rule = rule_info(row).name;
        if (rule_info(row).cautious_decay) {
            TEST(text_of("%s: cautious decay leaves out what moves away from 0", rule)) {
                struct source s = {(uint64_t)row + 1};
                for (size_t k = 0; k < COUNT(formats); k++) {
                    judge_decay(text_of("%s/%s", rule, formats[k]), 2, &s);
                    judge_decay(text_of("%s/%s", rule, formats[k]), 1, &s);
                }
            }
            continue;
        }
        TEST(text_of("%s: cautious decay is refused, and nothing is changed", rule)) {
            halfstep_optimizer *o = new_optimizer("adamw/f32", 1, 0);
            int32_t group;
            MUST(halfstep_add_group(o, text_of("%s/f32", rule), &group));
            EXPECT_NAMED(o, halfstep_set_choice(o, group, "decay", "cautious"), UNSUPPORTED, " cannot be cautious: ");
            EXPECT(halfstep_set_choice(o, ALL_GROUPS, "decay", "cautious"), UNSUPPORTED);
            CHECK(!strcmp(halfstep_get_choice(o, 0, "decay"), "decoupled"), "one group took what the other refused");
            MUST(halfstep_set_choice(o, 0, "decay", "cautious"));
            halfstep_destroy(o);
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_authors();
    test_rules();
    test_ends();
    test_handles();
    test_refusals();
    test_decay();
    return test_done();
}
