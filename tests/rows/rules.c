/* For tests/house/new_rows_test.sh: tests the rules "factored" and "estimate" in the library it is linked with
 * against their equations in double. Bits must be the same on every instruction set and with any number of threads.
 * They must be the same in one call as in parts, and after saving and loading. Prints a line for each; returns 0 if
 * all hold. */
#define HALFSTEP_ADVANCED
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/tools/calls.h"
#include "halfstep.h"
#include "halfstep_io.h"

enum { TENSORS = 4, MOST = 140 * 300, STEPS = 12, STATES = 6 };
static const struct {
    const char *name;
    int ndim, rows, columns;
} shapes[TENSORS] = {{"wide", 2, 140, 300}, {"narrow", 3, 131, 7}, {"bias", 1, 301, 1}, {"row", 2, 1, 64}};

static int is_matrix(int t) { return shapes[t].ndim > 1 && shapes[t].rows > 1; }
static int elements(int t) { return shapes[t].rows * shapes[t].columns; }

static int failures;
#define CHECK(condition, ...)              \
    do {                                   \
        if (!(condition)) {                \
            failures++;                    \
            printf("FAIL %d: ", __LINE__); \
            printf(__VA_ARGS__);           \
            printf("\n");                  \
        }                                  \
    } while (0)
#define MUST(call) CHECK((call) == HALFSTEP_OK, "%s", #call)

static float weights[TENSORS][MOST], gradients[TENSORS][MOST];
static double x[TENSORS][MOST], start[TENSORS][MOST], m[TENSORS][MOST], v[TENSORS][MOST], u[TENSORS][MOST];
static double vectors[TENSORS][4][300];

static float random_number(uint32_t i) { return (float)((double)(i * 2654435761u) / 0x1p32 - 0.5); }

static void draw_gradients(int step)
{
    for (int t = 0; t < TENSORS; t++)
        for (int i = 0; i < elements(t); i++)
            gradients[t][i] =
                random_number((uint32_t)(i + 7919 * step + 31 * t)) * (float)(1 + i % 5) + (float)(i % 3 - 1);
}

static halfstep_optimizer *make(const char *recipe, const char *isa, int threads)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads};
    halfstep_optimizer *o = NULL;
    int32_t index;
    MUST(halfstep_set_isa(isa));
    MUST(halfstep_create(&options, &o));
    MUST(halfstep_add_group(o, recipe, &index));
    for (int t = 0; t < TENSORS; t++) {
        halfstep_tensor d = {.struct_size = sizeof d,
                             .name = shapes[t].name,
                             .ndim = shapes[t].ndim,
                             .rows = shapes[t].rows,
                             .row_length = shapes[t].columns,
                             .gradient = "f32"};
        MUST(halfstep_add_tensor(o, &d, &index));
        for (int i = 0; i < elements(t); i++)
            x[t][i] = start[t][i] = weights[t][i] = random_number((uint32_t)(i * 3 + t));
    }
    MUST(halfstep_allocate_states(o));
    memset(m, 0, sizeof m);
    memset(v, 0, sizeof v);
    memset(vectors, 0, sizeof vectors);
    return o;
}

/* Makes a step, in one call or in parts (begin, norms, finish). */
static void step(halfstep_optimizer *o, int in_parts)
{
    void *w[TENSORS];
    const void *g[TENSORS];
    for (int t = 0; t < TENSORS; t++) w[t] = weights[t], g[t] = gradients[t];
    if (!in_parts) {
        MUST(halfstep_step(o, w, g));
        return;
    }
    int64_t *statistics = calloc((size_t)statistics_count(o), sizeof *statistics);
    MUST(step_begin(o, g, statistics));
    MUST(step_norms(o, w, g, statistics));
    MUST(step_finish(o, w, g, statistics));
    free(statistics);
}

/* ---- The equations ---- */

static const double b1 = 0.9, b2 = 0.97, eps = 1e-8, decay = 0.01, first = 1e-3;
static double lr;

/* Updates vectors 2 pair and 2 pair + 1 of a tensor from values. Returns the mean of the first. */
static double renew(int t, int pair, const double *value)
{
    int rows = shapes[t].rows, columns = shapes[t].columns;
    double mean = 0.0;
    for (int i = 0; i < rows; i++) {
        double sum = 0.0, *r = &vectors[t][2 * pair][i];
        for (int j = 0; j < columns; j++) sum += value[i * columns + j];
        *r = b2 * *r + (1 - b2) * sum / columns;
        mean += *r / rows;
    }
    for (int j = 0; j < columns; j++) {
        double sum = 0.0, *c = &vectors[t][2 * pair + 1][j];
        for (int i = 0; i < rows; i++) sum += value[i * columns + j];
        *c = b2 * *c + (1 - b2) * sum / rows;
    }
    return mean;
}

static void factored(int t)
{
    static double value[MOST];
    int n = elements(t), columns = shapes[t].columns;
    double squares = 0.0, mean = 0.0;
    for (int i = 0; i < n; i++) value[i] = (double)gradients[t][i] * gradients[t][i] + eps;
    if (is_matrix(t)) mean = renew(t, 0, value);
    for (int i = 0; i < n; i++) {
        if (!is_matrix(t)) v[t][i] = b2 * v[t][i] + (1 - b2) * value[i];
        double second = is_matrix(t) ? vectors[t][0][i / columns] * vectors[t][1][i % columns] / mean : v[t][i];
        u[t][i] = gradients[t][i] / sqrt(second);
        squares += u[t][i] * u[t][i];
    }
    for (int i = 0; i < n; i++) {
        u[t][i] /= fmax(1.0, sqrt(squares / n));
        m[t][i] = b1 * m[t][i] + (1 - b1) * u[t][i];
        value[i] = (u[t][i] - m[t][i]) * (u[t][i] - m[t][i]) + eps;
    }
    if (is_matrix(t)) mean = renew(t, 1, value);
    for (int i = 0; i < n; i++) {
        double divisor = is_matrix(t) ? sqrt(vectors[t][2][i / columns] * vectors[t][3][i % columns] / mean) : 1.0;
        x[t][i] -= lr * m[t][i] / divisor + lr * decay * x[t][i];
    }
}

static double estimate(double d)
{
    double a = 0.0, b = 0.0;
    for (int t = 0; t < TENSORS; t++)
        for (int i = 0; i < elements(t); i++) {
            a += gradients[t][i] * (start[t][i] - x[t][i]);
            b += fabs((double)gradients[t][i]);
        }
    d = fmax(d, a / b);
    for (int t = 0; t < TENSORS; t++)
        for (int i = 0; i < elements(t); i++) x[t][i] -= copysign(lr * d, gradients[t][i]) + lr * decay * x[t][i];
    return d;
}

static void judge(const char *rule, double bound)
{
    for (int t = 0; t < TENSORS; t++) {
        double worst = 0.0, moved = 0.0;
        for (int i = 0; i < elements(t); i++) {
            worst = fmax(worst, fabs(weights[t][i] - x[t][i]));
            moved = fmax(moved, fabs(x[t][i] - start[t][i]));
        }
        CHECK(moved > 100 * bound && worst < bound, "%s, %s: moved %g, off by %g", rule, shapes[t].name, moved, worst);
    }
}

static void follow(const char *rule, const char *isa, int threads)
{
    char recipe[64];
    snprintf(recipe, sizeof recipe, "%s/f32", rule);
    halfstep_optimizer *o = make(recipe, isa, threads);
    int is_factored = !strcmp(rule, "factored");
    double d = first;
    lr = is_factored ? 1e-2 : 1.0;
    if (is_factored) {
        MUST(halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "beta1", b1));
        MUST(halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "beta2", b2));
        MUST(halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "eps", eps));
    }
    MUST(halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "lr", lr));
    MUST(halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, "weight_decay", decay));
    for (int s = 0; s < STEPS; s++) {
        draw_gradients(s);
        step(o, 0);
        if (!is_factored) d = estimate(d);
        for (int t = 0; t < TENSORS && is_factored; t++) factored(t);
    }
    judge(rule, 2e-5);
    if (!is_factored) {
        double kept;
        MUST(get_scalar(o, 0, "estimate", &kept));
        CHECK(d > 2 * first && fabs(kept / d - 1) < 1e-5, "the estimate is %g, and should be %g", kept, d);
    }
    for (int t = 0; t < TENSORS && is_factored; t++)
        for (int j = 0; j < 4; j++) {
            float kept[300] = {0};
            halfstep_slot_info info = {.struct_size = sizeof info};
            MUST(halfstep_get_slot_info(o, t, HALFSTEP_SLOT_STATE + 2 + j, &info));
            CHECK((info.format >= 0) == is_matrix(t), "%s has a vector or not", shapes[t].name);
            if (info.format < 0) continue;
            int n = (int)(info.rows * info.columns), expected = j % 2 ? shapes[t].columns : shapes[t].rows;
            CHECK(n == expected && info.code_bytes == 4u * (unsigned)n, "%s: a vector of %d", shapes[t].name, n);
            MUST(halfstep_read_slot(o, t, HALFSTEP_SLOT_STATE + 2 + j, NULL, 0, info.rows, kept));
            for (int i = 0; i < n; i++)
                CHECK(fabs(kept[i] / vectors[t][j][i] - 1) < 1e-4, "%s, vector %d, %d: %g, not %g", shapes[t].name, j,
                      i, (double)kept[i], vectors[t][j][i]);
        }
    halfstep_destroy(o);
}

/* ---- Bits ---- */

static uint64_t hash;
static void add_bytes(const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
}

static void add_all(const halfstep_optimizer *o)
{
    hash = 14695981039346656037u;
    for (int t = 0; t < TENSORS; t++) {
        add_bytes(weights[t], (size_t)elements(t) * 4);
        for (int s = 0; s < STATES; s++) {
            halfstep_slot_info info = {.struct_size = sizeof info};
            if (halfstep_get_slot_info(o, t, HALFSTEP_SLOT_STATE + s, &info) || info.format < 0) continue;
            add_bytes(info.code, (size_t)info.code_bytes);
            add_bytes(info.extra, (size_t)info.extra_bytes);
        }
    }
}

/* Runs all steps. If `saved` is set, saves to that file half-way and goes on with a new handle. */
static uint64_t run(const char *recipe, const char *isa, int threads, int in_parts, const char *saved)
{
    char error[300] = "";
    void *places[TENSORS];
    for (int t = 0; t < TENSORS; t++) places[t] = weights[t];
    halfstep_optimizer *o = make(recipe, isa, threads);
    for (int s = 0; s < STEPS; s++) {
        draw_gradients(s);
        step(o, in_parts);
        if (s != STEPS / 2 || !saved) continue;
        float kept[TENSORS][MOST];
        memcpy(kept, weights, sizeof kept);
        CHECK(!halfstep_write_optimizer(saved, o, places, NULL, error, sizeof error), "%s", error);
        halfstep_destroy(o);
        o = make(recipe, isa, threads);
        CHECK(!halfstep_read_optimizer(saved, o, places, NULL, error, sizeof error), "%s", error);
        memcpy(weights, kept, sizeof kept);
    }
    add_all(o);
    halfstep_destroy(o);
    return hash;
}

static void refusals(void)
{
    halfstep_optimizer *o = make("estimate/f32", "scalar", 1);
    draw_gradients(0);
    CHECK(step_tensor(o, 0, weights[0], gradients[0]) == HALFSTEP_ERROR_UNSUPPORTED &&
              strstr(halfstep_error_detail(o), "sums over all tensors"),
          "a single tensor: %s", halfstep_error_detail(o));
    halfstep_destroy(o);
    o = make("factored/f32", "scalar", 1);
    CHECK(accumulate_states_tensor(o, 0, gradients[0]) == HALFSTEP_ERROR_UNSUPPORTED, "micro-steps");
    halfstep_destroy(o);
    MUST(halfstep_create(NULL, &o));
    int32_t index;
    halfstep_tensor part = {.struct_size = sizeof part,
                            .name = "part",
                            .ndim = 2,
                            .rows = 64,
                            .row_length = 64,
                            .n_rows = 32,
                            .n_columns = 64,
                            .gradient = "f32"};
    MUST(halfstep_add_group(o, "factored/f32", &index));
    CHECK(halfstep_add_tensor(o, &part, &index) == HALFSTEP_ERROR_UNSUPPORTED, "a part of a matrix");
    halfstep_destroy(o);
    char full[80];
    uint64_t states;
    MUST(halfstep_recipe_full("factored/bf16-sr/int8", full, sizeof full));
    CHECK(!strcmp(full, "factored/bf16-sr/int8"), "%s", full);
    MUST(halfstep_recipe_bytes("factored/bf16/bf16-sr", 2, 70, 300, NULL, NULL, &states));
    CHECK(states == 70 * 300 * 2 + 2 * (70 + 300) * 4, "%d bytes of states", (int)states);
}

int main(int argc, char **argv)
{
    static const char *const recipes[] = {"factored/f32/f32", "factored/bf16-sr/int8",
                                          "factored/bf16-ecc8/bf16-sr+int4", "estimate/f32", "estimate/bf16-kahan"};
    const char *saved = argc > 1 ? argv[1] : "saved.safetensors";
    refusals();
    for (int i = 0; i < halfstep_isa_count(); i++) {
        if (!halfstep_isa_available(i)) continue;
        follow("factored", halfstep_isa_name(i), 3);
        follow("estimate", halfstep_isa_name(i), 3);
    }
    for (size_t r = 0; r < sizeof recipes / sizeof *recipes; r++) {
        uint64_t expected = run(recipes[r], "scalar", 1, 0, NULL);
        int isas = 0;
        for (int i = 0; i < halfstep_isa_count(); i++) {
            if (!halfstep_isa_available(i)) continue;
            const char *isa = halfstep_isa_name(i);
            CHECK(run(recipes[r], isa, 1, 0, NULL) == expected, "%s on %s: other bits", recipes[r], isa);
            CHECK(run(recipes[r], isa, 3, 0, NULL) == expected, "%s on %s, three threads: other bits", recipes[r], isa);
            CHECK(run(recipes[r], isa, 3, 1, NULL) == expected, "%s on %s, in parts: other bits", recipes[r], isa);
            isas++;
        }
        CHECK(run(recipes[r], "scalar", 2, 0, saved) == expected, "%s, saved and loaded: other bits", recipes[r]);
        printf("%s %s, on %d instruction sets\n", failures ? "FAIL" : "ok  ", recipes[r], isas);
    }
    return failures != 0;
}
