/* Times one step of two builds of the library in turn, in one process: two_builds OLD.so NEW.so RECIPE TENSORS ROWS
 * COLUMNS ROUNDS. Each round steps both, the order changing; prints the medians and the median of the quotients new /
 * old of the rounds, which a busy machine disturbs least. lab/two_builds.sh runs a list of recipes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "halfstep.h"

enum { WARM_UP = 20 };

struct build {
    halfstep_optimizer *o;
    int (*step)(halfstep_optimizer *, void *const *, const void *const *);
    void **weights;
    const void **gradients;
};

static void *must(void *result, const char *what)
{
    if (result) return result;
    fprintf(stderr, "two_builds: %s\n", what);
    exit(1);
}

static void *function(void *library, const char *name) { return must(dlsym(library, name), name); }

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* 16-bit gradients are written as BF16, from 0.008 to 0.03 with either sign. */
static void fill(void *gradient, int wide, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        if (wide) ((float *)gradient)[i] = (float)(int32_t)seed * 1e-10f;
        else ((uint16_t *)gradient)[i] = (uint16_t)(0x3c00 | (seed >> 16 & 0x80ff));
    }
}

static struct build open_build(const char *path, const char *recipe, int tensors, int64_t rows, int64_t columns)
{
    /* A name space of its own: both have the same symbols. */
    void *library = must(dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL), path);
    int (*create)(const halfstep_options *, halfstep_optimizer **) = function(library, "halfstep_create");
    int (*add_group)(halfstep_optimizer *, const char *, int32_t *) = function(library, "halfstep_add_group");
    int (*add_tensor)(halfstep_optimizer *, const halfstep_tensor *, int32_t *) =
        function(library, "halfstep_add_tensor");
    int (*allocate)(halfstep_optimizer *) = function(library, "halfstep_allocate_states");
    struct build b = {.step = function(library, "halfstep_step"),
                      .weights = calloc((size_t)tensors, sizeof(void *)),
                      .gradients = calloc((size_t)tensors, sizeof(void *))};
    halfstep_options options = {.struct_size = sizeof options, .threads = 1};
    int32_t index;
    size_t n = (size_t)(rows * columns);
    int wide = !strstr(recipe, "/bf16");
    if (create(&options, &b.o) || add_group(b.o, recipe, &index)) must(NULL, recipe);
    for (int i = 0; i < tensors; i++) {
        char name[32];
        snprintf(name, sizeof name, "t%d", i);
        halfstep_tensor t = {.struct_size = sizeof t,
                             .name = name,
                             .ndim = 2,
                             .rows = rows,
                             .row_length = columns,
                             .gradient = wide ? "f32" : "bf16"};
        void *gradient = must(aligned_alloc(64, n * 4 + 64), "no memory");
        b.weights[i] = must(calloc(n + 16, 4), "no memory");
        b.gradients[i] = gradient;
        fill(gradient, wide, n, (uint32_t)i);
        if (add_tensor(b.o, &t, &index)) must(NULL, name);
    }
    if (allocate(b.o)) must(NULL, "no memory for states");
    return b;
}

int main(int argc, char **argv)
{
    if (argc != 8) must(NULL, "OLD.so NEW.so RECIPE TENSORS ROWS COLUMNS ROUNDS");
    int tensors = atoi(argv[4]), rounds = atoi(argv[7]);
    struct build build[2];
    for (int i = 0; i < 2; i++) build[i] = open_build(argv[1 + i], argv[3], tensors, atoll(argv[5]), atoll(argv[6]));
    double *time[2], *quotient = must(calloc((size_t)rounds, sizeof *quotient), "no memory");
    for (int i = 0; i < 2; i++) time[i] = must(calloc((size_t)rounds, sizeof **time), "no memory");
    for (int r = -WARM_UP; r < rounds; r++) {
        double spent[2];
        for (int k = 0; k < 2; k++) {
            int i = (r & 1) ^ k;
            double start = seconds();
            if (build[i].step(build[i].o, build[i].weights, build[i].gradients)) must(NULL, "a step failed");
            spent[i] = seconds() - start;
        }
        if (r < 0) continue;
        for (int i = 0; i < 2; i++) time[i][r] = spent[i];
        quotient[r] = spent[1] / spent[0];
    }
    for (int i = 0; i < 2; i++) qsort(time[i], (size_t)rounds, sizeof **time, ascending);
    qsort(quotient, (size_t)rounds, sizeof *quotient, ascending);
    printf("| `%s` | %d of %s x %s | %.1f | %.1f | %.3f |\n", argv[3], tensors, argv[5], argv[6],
           time[0][rounds / 2] * 1e6, time[1][rounds / 2] * 1e6, quotient[rounds / 2]);
    return 0;
}
