/* Tests stacks of matrices: tensors of E * M rows of N whose matrix_rows is M, and those whose matrices are split into
 * blocks of unequal rows. One handle with the stack has the bits of handles that each hold one matrix as their part,
 * for every rule of matrices and every format. In f32 it also has the bits of tensors of one matrix. --short leaves out
 * most shapes and formats, --all none. */
#include "ref/fixture.h"

enum { MOST = 3 * 130 * 300, MATRICES = 40, LIMBS = 4096, STEPS = 3 };

/* Rows within and beyond a group of 32; matrices that begin within a group; more than one block of 64 rows, one chunk
 * of 256 columns, one chunk of 32,768 elements; many small matrices; splits of one matrix and of several, whose largest
 * block stands first, last and between, with blocks of more and fewer rows than columns. */
struct shape {
    int stack, rows, columns, split[5]; /* rows: of each of the stack, which the split divides */
};
static const struct shape shapes[] = {{3, 70, 96, {0}},
                                      {1, 200, 96, {130, 40, 30}},
                                      {3, 5, 7, {0}},
                                      {4, 6, 40, {0}},
                                      {2, 40, 256, {0}},
                                      {3, 16, 96, {4, 12}},
                                      {4, 16, 96, {0}},
                                      {3, 130, 300, {0}},
                                      {40, 2, 3, {0}},
                                      {5, 11, 7, {2, 7, 2}},
                                      {1, 9, 33, {0}},
                                      {12, 3, 3, {0}},
                                      {1, 390, 300, {64, 326}},
                                      {2, 64, 31, {0}},
                                      {2, 100, 64, {2, 66, 32}},
                                      {3, 70, 64, {0}}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static int blocks_of(const struct shape *s)
{
    int n = 0;
    while (s->split[n]) n++;
    return n ? n : 1;
}

static int matrices_of(const struct shape *s) { return s->stack * blocks_of(s); }

/* Returns the first row of a matrix. The number after the last one is allowed. */
static int row_of(const struct shape *s, int matrix)
{
    int row = matrix / blocks_of(s) * s->rows;
    for (int i = 0; i < matrix % blocks_of(s); i++) row += s->split[i];
    return row;
}

struct held {
    halfstep_optimizer *o;
    char *weight;
    float *gradient;
    int64_t *statistics;
    int first, n; /* rows of the stack */
};

/* What a test changes of a handle before its states exist. */
struct settings {
    const char *recipe;
    double clip, centralize;
    int threads, isolated; /* isolated: without sums over the tensor, where hyper-parameters allow it */
    int normalize_rows;    /* where the rule has it */
    int released, micro;   /* tensor by tensor; the first step goes into the states */
};

/* Sets a hyper-parameter of group 0 if its rule has it. */
static void set_if_any(halfstep_optimizer *o, const char *name, double value)
{
    double old;
    if (halfstep_get_hyper(o, 0, name, &old) == OK) MUST(halfstep_set_hyper(o, 0, name, value));
}

static void open_held(struct held *h, const struct settings *s)
{
    memset(h, 0, sizeof *h);
    h->o = new_optimizer(s->recipe, s->threads, 17);
    MUST(halfstep_set_hyper(h->o, -1, "clip_norm", s->clip));
    MUST(halfstep_set_hyper(h->o, 0, "weight_decay", 0.1));
    MUST(halfstep_set_hyper(h->o, 0, "centralize", s->centralize));
    set_if_any(h->o, "beta1", 0.8);
    set_if_any(h->o, "normalize_rows", s->normalize_rows);
    if (s->isolated) {
        set_if_any(h->o, "d", 0.0);
        set_if_any(h->o, "scale_parameter", 0.0);
        set_if_any(h->o, "clip_threshold", 0.0);
    }
}

static void start_held(struct held *h, int64_t elements)
{
    MUST(halfstep_allocate_states(h->o));
    h->weight = zeroed((size_t)elements * 4);
    h->gradient = zeroed((size_t)elements * 4);
    h->statistics = zeroed(sizeof(int64_t) * LIMBS);
}

static void close_held(struct held *h)
{
    halfstep_destroy(h->o);
    free(h->weight);
    free(h->gradient);
    free(h->statistics);
}

/* Opens a handle with matrices first .. first + n - 1 of a stack. n may be 0. */
static void open_stack(struct held *h, const struct settings *s, const struct shape *shape, int first, int n)
{
    open_held(h, s);
    h->first = row_of(shape, first);
    h->n = row_of(shape, first + n) - h->first;
    halfstep_tensor d = {.struct_size = sizeof d,
                         .name = "w",
                         .ndim = shape->stack > 1 ? 3 : 2,
                         .may_be_empty = !n,
                         .rows = shape->stack * shape->rows,
                         .row_length = shape->columns,
                         .matrix_rows = shape->rows,
                         .first_row = h->first,
                         .n_rows = h->n,
                         .n_columns = shape->columns,
                         .gradient = "f32"};
    for (int i = 0; shape->split[i]; i++) d.split[i] = shape->split[i];
    int32_t index;
    MUST(halfstep_add_tensor(h->o, &d, &index));
    start_held(h, (int64_t)h->n * shape->columns);
}

static float weights[MOST], gradients[STEPS][MOST];

static void draw(uint64_t seed)
{
    struct source s = {seed};
    for (int i = 0; i < MOST; i++) weights[i] = (float)next_normal(&s);
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < MOST; i++) gradients[step][i] = (float)(1e-2 * next_normal(&s));
}

static void write_weights(struct held *h, int64_t first, int64_t rows)
{
    MUST(halfstep_write_slot(h->o, 0, WEIGHT, h->weight, 0, rows, weights + first));
}

/* Makes a step of handles that hold parts of one tensor. Their statistics are added in between. */
static void step_parts(struct held *h, int n)
{
    static int64_t sum[LIMBS];
    const int64_t count = statistics_count(h[0].o);
    void *w[MATRICES][1];
    const void *g[MATRICES][1];
    if (count > LIMBS) abort();
    for (int stage = 0; stage < 3; stage++) {
        for (int e = 0; e < n; e++) {
            w[e][0] = h[e].weight;
            g[e][0] = h[e].gradient;
            if (stage == 0) MUST(step_begin(h[e].o, g[e], h[e].statistics));
            if (stage == 1) MUST(step_norms(h[e].o, w[e], g[e], h[e].statistics));
            if (stage == 2) MUST(step_finish(h[e].o, w[e], g[e], h[e].statistics));
        }
        const int64_t from = stage ? norms_offset(h[0].o) : 0;
        memset(sum, 0, sizeof sum);
        for (int e = 0; e < n; e++)
            for (int64_t i = from; i < count; i++) sum[i] += h[e].statistics[i];
        for (int e = 0; e < n; e++) memcpy(h[e].statistics + from, sum + from, (size_t)(count - from) * sizeof *sum);
    }
}

static int64_t unequal(const char *a, const char *b, uint64_t n)
{
    int64_t count = 0;
    for (uint64_t i = 0; i < n; i++) count += a[i] != b[i];
    return count;
}

/* Checks that a part of a stack has the bytes of its place in the whole. `matrix` is its first. */
static void compare_part(const struct held *whole, const struct held *part, int matrix, const char *what)
{
    const halfstep_record ours = counters_of(whole->o, 0), theirs = counters_of(part->o, 0);
    CHECK(!memcmp(&ours, &theirs, sizeof ours), "%s: the counters or scalars of part %d differ", what, part->first);
    for (int slot = 0; slot < STATE + HALFSTEP_MAX_STATES && part->n; slot++) {
        SIZED(halfstep_slot_info, all);
        SIZED(halfstep_slot_info, some);
        if (!stored_slot(whole->o, 0, slot, &all) || !stored_slot(part->o, 0, slot, &some)) continue;
        const int once = whole->n > part->n && all.extra_bytes == some.extra_bytes; /* one scale for the tensor */
        const int by_matrix = some.rows != part->n; /* a vector over columns has a row for each matrix */
        const uint64_t first = (uint64_t)(by_matrix ? matrix : part->first), n = (uint64_t)some.rows;
        const char *a = slot ? all.code : whole->weight, *b = slot ? some.code : part->weight;
        int64_t wrong = unequal(a + first * some.code_bytes / n, b, some.code_bytes);
        CHECK(!wrong, "%s: %s of the part from row %d: %lld of %lld bytes differ", what, all.name, part->first,
              (long long)wrong, (long long)some.code_bytes);
        if (!some.extra_bytes) continue;
        wrong = unequal((char *)all.extra + (once ? 0 : first * some.extra_bytes / n), some.extra, some.extra_bytes);
        CHECK(!wrong, "%s: the second plane of %s of part %d: %lld bytes differ", what, all.name, part->first,
              (long long)wrong);
    }
}

enum cut { SINGLY, UNEVENLY, WHOLLY, AS_TENSORS };

/* Makes step number `step` of a handle with one tensor. */
static void make_step(struct held *h, const struct settings *s, int step)
{
    void *w[1] = {h->weight};
    const void *g[1] = {h->gradient};
    const int micro = s->micro && !step;
    if (micro && s->released) MUST(accumulate_states_tensor(h->o, 0, h->gradient));
    else if (micro) MUST(accumulate_states(h->o, g));
    else if (s->released) MUST(step_tensor(h->o, 0, h->weight, h->gradient));
    else MUST(halfstep_step(h->o, w, g));
    if (s->released && !micro) MUST(end_round(h->o));
}

/* Compares a stack with parts of it: each matrix; the first one, none, and all others; or all and none. AS_TENSORS
 * compares with tensors of one matrix. */
static void compare_shape(const struct settings *s, const struct shape *shape, enum cut cut)
{
    static struct held whole, part[MATRICES];
    const int matrices = matrices_of(shape), columns = shape->columns, rows = row_of(shape, matrices),
              parts = cut == UNEVENLY ? 3
                      : cut == WHOLLY ? 2
                                      : matrices;
    int first[MATRICES];
    char what[128];
    snprintf(what, sizeof what, "%.63s, %d matrices in %d x %d", s->recipe, matrices, rows, columns);
    struct settings one = *s;
    one.threads = 1;
    open_stack(&whole, s, shape, 0, matrices);
    write_weights(&whole, 0, rows);
    for (int e = 0; e < parts; e++) {
        first[e] = cut == UNEVENLY ? e > 0 : e;
        if (cut == AS_TENSORS) {
            open_held(&part[e], &one);
            part[e].first = row_of(shape, e);
            part[e].n = row_of(shape, e + 1) - part[e].first;
            ADD_TENSOR(part[e].o, .name = text_of("w%d", e), .ndim = 2, .rows = part[e].n, .row_length = columns,
                       .gradient = "f32");
            start_held(&part[e], (int64_t)part[e].n * columns);
        } else if (cut == SINGLY) {
            open_stack(&part[e], &one, shape, e, 1);
        } else if (cut == WHOLLY) {
            first[e] = 0;
            open_stack(&part[e], &one, shape, 0, e ? 0 : matrices);
        } else {
            open_stack(&part[e], &one, shape, first[e], e == 0 ? 1 : e == 1 ? 0 : matrices - 1);
        }
        write_weights(&part[e], (int64_t)part[e].first * columns, part[e].n);
    }
    for (int step = 0; step < STEPS; step++) {
        memcpy(whole.gradient, gradients[step], (size_t)rows * (size_t)columns * 4);
        for (int e = 0; e < parts; e++)
            memcpy(part[e].gradient, gradients[step] + part[e].first * columns,
                   (size_t)part[e].n * (size_t)columns * 4);
        make_step(&whole, s, step);
        if (cut != AS_TENSORS) step_parts(part, parts);
        for (int e = 0; cut == AS_TENSORS && e < parts; e++) make_step(&part[e], &one, step);
    }
    for (int e = 0; e < parts; e++) {
        if (cut == AS_TENSORS) {
            int64_t wrong = unequal(whole.weight + (int64_t)part[e].first * columns * 4, part[e].weight,
                                    (uint64_t)part[e].n * (uint64_t)columns * 4);
            CHECK(!wrong, "%s: %lld bytes of weight %d differ", what, (long long)wrong, e);
        } else {
            compare_part(&whole, &part[e], first[e], what);
        }
        close_held(&part[e]);
    }
    close_held(&whole);
}

/* ---- Every rule of matrices -------------------------------------------------------------------------------------- */

/* Returns the number of recipes of a rule: each format of weights, then each format of states. */
static int list_recipes(const char *rule, char (*list)[64])
{
    int n = 0;
    for (int states = 0; states < 2; states++)
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *format = format_info(row).name;
            char text[64];
            snprintf(text, sizeof text, states ? "%s/f32/%s" : "%s/%s", rule, format);
            if (halfstep_recipe_full(text, list[n], sizeof *list) == OK) n++;
        }
    return n;
}

static void test_rule(const char *rule)
{
    static char recipe[64][64];
    const int n = list_recipes(rule, recipe);
    char plain[64], random[64], coarse[64];
    snprintf(plain, sizeof plain, "%s/f32/f32", rule);
    snprintf(random, sizeof random, "%s/bf16-sr/bf16-sr", rule);
    snprintf(coarse, sizeof coarse, "%s/f32/int8", rule);
    TEST(text_of("%s: a stack has the bits of its matrices as parts, in every format", rule)) {
        for (int i = 0; i < n; i++)
            for (int j = i % BY_LENGTH(5, 2, 1); j < SHAPES; j += BY_LENGTH(5, 2, 1))
                compare_shape(&(struct settings){.recipe = recipe[i],
                                                 .threads = 1 + i % 3,
                                                 .clip = i % 2 ? 0.5 : 0.0,
                                                 .normalize_rows = (i + 2 * j) % 3},
                              &shapes[j],
                              (i + j) % 3 == 1                              ? SINGLY
                              : (i + j) % 3 || matrices_of(&shapes[j]) == 1 ? WHOLLY
                                                                            : UNEVENLY);
    }
    TEST(text_of("%s: likewise with row means taken from the gradient", rule)) {
        for (int j = 0; j < SHAPES; j += BY_LENGTH(4, 1, 1))
            compare_shape(&(struct settings){.recipe = random, .threads = 2, .centralize = 1.0}, &shapes[j], SINGLY);
    }
    TEST(text_of("%s: in f32 a stack has the bits of its matrices as tensors", rule)) {
        for (int j = 0; j < SHAPES; j += BY_LENGTH(4, 1, 1))
            compare_shape(&(struct settings){.recipe = plain, .threads = 2, .isolated = 1, .normalize_rows = 1 + j % 2},
                          &shapes[j], AS_TENSORS);
    }
    TEST(text_of("%s: likewise tensor by tensor, and with micro-steps where there are any", rule)) {
        const int micro = !rule_info(halfstep_rule_find(rule)).two_pass; /* factors take none */
        for (int j = 0; j < SHAPES; j += BY_LENGTH(4, 2, 1))
            for (int i = 0; i <= micro; i++)
                compare_shape(
                    &(struct settings){
                        .recipe = plain, .threads = 2, .isolated = 1, .released = !i || j % 2, .micro = i},
                    &shapes[j], AS_TENSORS);
    }
    TEST(text_of("%s: a NaN in one matrix leaves every bit of the stack alone", rule)) {
        static struct held h;
        static char before[3 * 70 * 96 * 4];
        const struct settings s = {.recipe = coarse, .threads = 2};
        void *w[1];
        const void *g[1];
        open_stack(&h, &s, &shapes[0], 0, 3);
        write_weights(&h, 0, 210);
        w[0] = h.weight;
        g[0] = h.gradient;
        memcpy(h.gradient, gradients[0], sizeof before);
        MUST(halfstep_step(h.o, w, g));
        memcpy(before, h.weight, sizeof before);
        const halfstep_record record = counters_of(h.o, 0);
        static char states[HALFSTEP_MAX_STATES][sizeof before];
        for (int i = 0; i < 2; i++) {
            for (int slot = STATE; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
                SIZED(halfstep_slot_info, info);
                if (!stored_slot(h.o, 0, slot, &info)) continue;
                if (!i) memcpy(states[slot - STATE], info.code, info.code_bytes);
                else CHECK(!memcmp(states[slot - STATE], info.code, info.code_bytes), "%s changed", info.name);
            }
            if (i) break;
            h.gradient[2 * 70 * 96 + 5] = NAN;
            EXPECT_NAMED(h.o, halfstep_step(h.o, w, g), HALFSTEP_NONFINITE, "'w'");
        }
        CHECK(!memcmp(before, h.weight, sizeof before), "weights changed");
        const halfstep_record after = counters_of(h.o, 0);
        CHECK(!memcmp(&record, &after, sizeof after), "counters changed");
        close_held(&h);
    }
    TEST(text_of("%s: parts of matrices and wrong matrix_rows are refused by name", rule)) {
        halfstep_optimizer *o = new_optimizer(rule, 0, 0);
        int32_t index;
        const halfstep_tensor good = {.struct_size = sizeof good,
                                      .name = "experts",
                                      .ndim = 3,
                                      .rows = 24,
                                      .row_length = 64,
                                      .matrix_rows = 8,
                                      .gradient = "f32"};
        halfstep_tensor d = good;
        d.matrix_rows = 7;
        EXPECT_NAMED(o, halfstep_add_tensor(o, &d, &index), SHAPE, "'experts': matrix_rows is 7");
        d.matrix_rows = -8;
        EXPECT_NAMED(o, halfstep_add_tensor(o, &d, &index), SHAPE, "'experts': matrix_rows is -8");
        for (int i = 0; i < 3; i++) {
            d = good;
            d.first_row = i == 1 ? 4 : 0;
            d.n_rows = i == 0 ? 12 : 8;
            d.n_columns = i == 2 ? 32 : 64;
            EXPECT_NAMED(o, halfstep_add_tensor(o, &d, &index), UNSUPPORTED, "'experts'");
        }
        static const struct {
            int64_t split[HALFSTEP_MAX_SPLIT];
            const char *found;
        } wrong[] = {{{5, 4}, "split is 5 + 4;"},      {{5, 2}, "split is 5 + 2;"}, {{7, 1}, "split is 7 + 1;"},
                     {{10, -2}, "split is 10 + -2;"},  {{24}, "split is 24;"},      {{0, 8}, "split is not a list"},
                     {{4, 4, 0, 2}, "split is 4 + 4;"}};
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
            d = good;
            memcpy(d.split, wrong[i].split, sizeof d.split);
            EXPECT_NAMED(o, halfstep_add_tensor(o, &d, &index), SHAPE, text_of("'experts': %s", wrong[i].found));
            SIZED(halfstep_forecast, f);
            CHECK(halfstep_forecast_tensors(&f, rule, &d, 1) == SHAPE, "%s has bytes", wrong[i].found);
        }
        d = good;
        d.split[0] = 5;
        d.split[1] = 3;
        d.n_columns = 64;
        for (int i = 0; i < 2; i++) { /* rows 0 .. 6 and 7 .. 23: cut within a block */
            d.first_row = i ? 7 : 0;
            d.n_rows = i ? 17 : 7;
            EXPECT_NAMED(o, halfstep_add_tensor(o, &d, &index), UNSUPPORTED, "or the blocks of its split");
        }
        d.first_row = 5;
        d.n_rows = 19;
        MUST(halfstep_add_tensor(o, &d, &index));
        SIZED(halfstep_tensor, told);
        MUST(halfstep_get_tensor(o, index, &told));
        CHECK(told.matrix_rows == 8 && told.split[0] == 5 && told.split[1] == 3 && !told.split[2],
              "matrix_rows is %lld, split is %lld + %lld", (long long)told.matrix_rows, (long long)told.split[0],
              (long long)told.split[1]);
        d.name = "in one piece";
        d.split[0] = 8;
        d.split[1] = 0;
        d.first_row = 8;
        d.n_rows = 16;
        MUST(halfstep_add_tensor(o, &d, &index));
        MUST(halfstep_get_tensor(o, index, &told));
        CHECK(told.matrix_rows == 8 && !told.split[0], "a split into one block is %lld", (long long)told.split[0]);
        halfstep_destroy(o);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    draw(3);
    for (int32_t row = 0; row < halfstep_rule_count(); row++)
        if (rule_info(row).matrix) test_rule(rule_info(row).name);
    TEST("other rules ignore matrix_rows and split") {
        halfstep_optimizer *o = new_optimizer("adamw/f32/int8", 0, 0);
        SIZED(halfstep_tensor, told);
        ADD_TENSOR(o, .name = "w", .ndim = 3, .rows = 24, .row_length = 64, .matrix_rows = 8, .split = {6, 2},
                   .n_rows = 5, .n_columns = 64, .gradient = "f32");
        MUST(halfstep_get_tensor(o, 0, &told));
        CHECK(told.matrix_rows == 24 && !told.split[0], "matrix_rows is %lld, split[0] %lld",
              (long long)told.matrix_rows, (long long)told.split[0]);
        halfstep_destroy(o);
    }
    return test_done();
}
