/* Times one step of two builds of the library in turn, in one process: two_builds OLD.so NEW.so RECIPE TENSORS ROWS
 * COLUMNS ROUNDS. Settings may follow the recipe, separated by spaces: choices and hyper-parameters by name, and the
 * format of gradients ("adam/bf16-sr/int8 decay=l2 weight_decay=0.01 gradient=f16"). Each round steps both, in
 * alternating order. Prints both medians, and the median over the rounds of the quotient new / old, which a busy
 * machine disturbs least. THREADS in the environment is 1 by default. lab/two_builds.sh runs a list of recipes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "halfstep.h"

enum { WARM_UP = 20 };

/* One build, with an optimizer of its own. */
struct subject {
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

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

/* Fills a gradient. Values of 16 bits are from 0.008 to 0.03 as BF16, with either sign. */
static void fill(void *gradient, int wide, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        if (wide) ((float *)gradient)[i] = (float)(int32_t)seed * 1e-10f;
        else ((uint16_t *)gradient)[i] = (uint16_t)(0x3c00 | (seed >> 16 & 0x80ff));
    }
}

/* Opens a build with an optimizer of these tensors. */
static struct subject open_subject(const char *path, const char *row, int tensors, int64_t rows, int64_t columns)
{
    /* Both builds have the same symbols, so each gets a name space of its own. */
    void *library = must(dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL), path);
#define FUNCTION(name) __typeof__(name) *name##_ = must(dlsym(library, #name), #name)
    FUNCTION(halfstep_create);
    FUNCTION(halfstep_add_group);
    FUNCTION(halfstep_set_choice);
    FUNCTION(halfstep_set_hyper);
    FUNCTION(halfstep_add_tensor);
    FUNCTION(halfstep_allocate_states);
    FUNCTION(halfstep_step);
#undef FUNCTION
    struct subject s = {.step = halfstep_step_,
                        .weights = must(calloc((size_t)tensors, sizeof(void *)), "out of memory"),
                        .gradients = must(calloc((size_t)tensors, sizeof(void *)), "out of memory")};
    const char *threads = getenv("THREADS");
    halfstep_options options = {.struct_size = sizeof options, .threads = threads ? atoi(threads) : 1};
    int32_t index;
    char text[256], *setting;
    snprintf(text, sizeof text, "%s", row);
    const char *recipe = must(strtok(text, " "), "no recipe"), *format = strstr(recipe, "/bf16") ? "bf16" : "f32";
    if (halfstep_create_(&options, &s.o) || halfstep_add_group_(s.o, recipe, &index)) must(NULL, recipe);
    while ((setting = strtok(NULL, " "))) {
        char *value = must(strchr(setting, '='), setting), *end;
        *value++ = '\0';
        double number = strtod(value, &end);
        if (!strcmp(setting, "gradient")) format = value;
        else if (*end ? halfstep_set_choice_(s.o, HALFSTEP_ALL_GROUPS, setting, value) &&
                            halfstep_set_choice_(s.o, 0, setting, value)
                      : halfstep_set_hyper_(s.o, 0, setting, number))
            must(NULL, setting);
    }
    size_t n = (size_t)(rows * columns);
    for (int i = 0; i < tensors; i++) {
        char name[32];
        snprintf(name, sizeof name, "t%d", i);
        halfstep_tensor t = {
            .struct_size = sizeof t, .name = name, .ndim = 2, .rows = rows, .row_length = columns, .gradient = format};
        if (halfstep_add_tensor_(s.o, &t, &index)) must(NULL, name);
        void *gradient = must(aligned_alloc(64, (n * 4 + 127) / 64 * 64), "out of memory");
        fill(gradient, !strcmp(format, "f32"), n, (uint32_t)i);
        s.weights[i] = must(calloc(n + 16, 4), "out of memory");
        s.gradients[i] = gradient;
    }
    if (halfstep_allocate_states_(s.o)) must(NULL, "out of memory for states");
    return s;
}

int main(int argc, char **argv)
{
    if (argc != 8) must(NULL, "OLD.so NEW.so RECIPE TENSORS ROWS COLUMNS ROUNDS");
    int tensors = atoi(argv[4]), rounds = atoi(argv[7]);
    struct subject subject[2];
    double *time[2], *quotient = must(calloc((size_t)rounds, sizeof *quotient), "out of memory");
    for (int i = 0; i < 2; i++) {
        subject[i] = open_subject(argv[1 + i], argv[3], tensors, atoll(argv[5]), atoll(argv[6]));
        time[i] = must(calloc((size_t)rounds, sizeof **time), "out of memory");
    }
    for (int r = -WARM_UP; r < rounds; r++) {
        double spent[2];
        for (int k = 0; k < 2; k++) {
            const struct subject *s = &subject[(r & 1) ^ k];
            double start = seconds();
            if (s->step(s->o, s->weights, s->gradients)) must(NULL, "a step failed");
            spent[(r & 1) ^ k] = seconds() - start;
        }
        if (r < 0) continue;
        for (int i = 0; i < 2; i++) time[i][r] = spent[i];
        quotient[r] = spent[1] / spent[0];
    }
    printf("| `%s` | %d of %s x %s | %.1f | %.1f | %.3f |\n", argv[3], tensors, argv[5], argv[6],
           median(time[0], rounds) * 1e6, median(time[1], rounds) * 1e6, median(quotient, rounds));
    return 0;
}
