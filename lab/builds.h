/* For programs that step builds of the library in turn in one process: many.c, scan.c, two_builds.c. They define
 * _GNU_SOURCE first. Whatever fails ends the program with a line that names it. */
#ifndef BUILDS_H
#define BUILDS_H

#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "halfstep.h"

/* One build with an optimizer of its own. */
struct build {
    halfstep_optimizer *o;
    int (*step)(halfstep_optimizer *, void *const *, const void *const *);
    int (*choose)(halfstep_optimizer *, int32_t, const char *, const char *);
    int (*set)(halfstep_optimizer *, int32_t, const char *, double);
    int (*add_tensor)(halfstep_optimizer *, const halfstep_tensor *, int32_t *);
    int (*allocate)(halfstep_optimizer *);
    int (*state_bytes)(halfstep_optimizer *, uint64_t *);
    int (*bind)(halfstep_optimizer *, void *, uint64_t);
};

static inline void *must(void *result, const char *what)
{
    if (result) return result;
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, what);
    exit(1);
}

static inline double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

/* Gradients are BF16 beside BF16 weights. */
static inline int is_wide(const char *recipe) { return !strstr(recipe, "/bf16"); }
static inline const char *gradients_of(const char *recipe) { return is_wide(recipe) ? "f32" : "bf16"; }

/* 16-bit gradients are from 0.008 to 0.03 with either sign. */
static inline void fill(void *gradient, int wide, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        if (wide) ((float *)gradient)[i] = (float)(int32_t)seed * 1e-10f;
        else ((uint16_t *)gradient)[i] = (uint16_t)(0x3c00 | (seed >> 16 & 0x80ff));
    }
}

/* Without tensors yet. */
static inline struct build open_build(const char *path, const char *recipe, int threads)
{
    /* A name space of its own: all builds have the same symbols. */
    void *library = must(dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL), path);
#define FUNCTION(name) must(dlsym(library, #name), #name)
    int (*create)(const halfstep_options *, halfstep_optimizer **) = FUNCTION(halfstep_create);
    int (*add_group)(halfstep_optimizer *, const char *, int32_t *) = FUNCTION(halfstep_add_group);
    struct build b = {.step = FUNCTION(halfstep_step),
                      .choose = FUNCTION(halfstep_set_choice),
                      .set = FUNCTION(halfstep_set_hyper),
                      .add_tensor = FUNCTION(halfstep_add_tensor),
                      .allocate = FUNCTION(halfstep_allocate_states),
                      .state_bytes = FUNCTION(halfstep_state_bytes),
                      .bind = FUNCTION(halfstep_bind_states)};
#undef FUNCTION
    halfstep_options options = {.struct_size = sizeof options, .threads = threads};
    int32_t group;
    if (create(&options, &b.o) || add_group(b.o, recipe, &group)) must(NULL, recipe);
    return b;
}

static inline void add_matrix(const struct build *b, int number, int64_t rows, int64_t columns, const char *gradients)
{
    char name[32];
    int32_t index;
    snprintf(name, sizeof name, "t%d", number);
    halfstep_tensor t = {
        .struct_size = sizeof t, .name = name, .ndim = 2, .rows = rows, .row_length = columns, .gradient = gradients};
    if (b->add_tensor(b->o, &t, &index)) must(NULL, name);
}

#endif
