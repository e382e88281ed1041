/* Measures the time per byte of every rule, in cache on one thread, relative to AdamW in the same formats: every_rule
 * [ROUNDS [RULES]].
 *
 *   cc -O2 -Iinclude lab/every_rule.c -o every_rule -Lbuild -lhalfstep
 *   HALFSTEP_ISA=avx2 LD_LIBRARY_PATH=build ./every_rule
 *
 * Each round steps AdamW and the rule in turn, in alternating order. The result is the median over the rounds of the
 * quotient, which a busy machine disturbs least. Bytes are counted as in bench/README.md: weights, their extra streams
 * and states twice, gradients once. For tensors of this size that holds for rules of two passes, too. Optional states
 * are measured in rows of their own. The aim is 1.4, and 2.4 for rules of two passes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "halfstep.h"

enum { ELEMENTS = 16384, WARM_UP = 10 };

static const char *const formats[] = {"f32/f32",      "bf16-sr/bf16-sr", "bf16-sr/int8",      "bf16-ecc8/int8",
                                      "bf16-sr/int4", "bf16/bf16",       "bf16-kahan/bf16-sr"};
enum { FORMATS = sizeof formats / sizeof *formats };

/* Options that add states which the defaults leave out. */
static const struct {
    const char *rule, *option;
    double value;
} options[] = {
    {"sgd", "momentum", 0.9}, {"adamw", "amsgrad", 1}, {"rmsprop", "momentum", 0.9}, {"rmsprop", "centered", 1}};

struct subject {
    halfstep_optimizer *o;
    void *weight, *gradient;
    double bytes;
};

static void must(int result, const char *what)
{
    if (!result) return;
    fprintf(stderr, "every_rule: %s: %s\n", what, halfstep_strerror(result));
    exit(1);
}

static double seconds(void)
{
    struct timespec t;
    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void *aligned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!memory) exit(1);
    return memset(memory, 0, bytes);
}

static struct subject begin(const char *rule, const char *recipe, const char *option, double value)
{
    struct subject s = {0};
    halfstep_options how = {.struct_size = sizeof how, .threads = 1};
    halfstep_rule_info info = {.struct_size = sizeof info};
    char text[80];
    int32_t index;
    int wide = !strncmp(recipe, "f32", 3);
    must(halfstep_get_rule_info(halfstep_rule_find(rule), &info), rule);
    /* A rule without states is followed by the weight format only. */
    snprintf(text, sizeof text, "%s/%.*s", rule, (int)(info.states ? strlen(recipe) : strcspn(recipe, "/")), recipe);
    must(halfstep_create(&how, &s.o), "create");
    must(halfstep_set_choice(s.o, HALFSTEP_ALL_GROUPS, "scan", "known-finite"), "scan");
    must(halfstep_add_group(s.o, text, &index), text);
    if (option) must(halfstep_set_hyper(s.o, 0, option, value), option);
    /* Rules for matrices step a vector, because the cost of muon's matrix products is not per byte. */
    halfstep_tensor t = {.struct_size = sizeof t,
                         .name = "w",
                         .ndim = info.matrix ? 1 : 2,
                         .rows = info.matrix ? 1 : ELEMENTS / 512,
                         .row_length = info.matrix ? ELEMENTS : 512,
                         .gradient = wide ? "f32" : "bf16"};
    must(halfstep_add_tensor(s.o, &t, &index), text);
    must(halfstep_allocate_states(s.o), "states");
    for (int32_t slot = 0; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
        halfstep_slot_info i = {.struct_size = sizeof i};
        if (halfstep_get_slot_info(s.o, 0, slot, &i)) continue;
        s.bytes += (slot == HALFSTEP_SLOT_GRADIENT ? 1.0 : 2.0) * (double)(i.code_bytes + i.extra_bytes);
    }
    s.weight = aligned(ELEMENTS * 4);
    s.gradient = aligned(ELEMENTS * 4);
    uint32_t seed = 1;
    for (int i = 0; i < ELEMENTS; i++) {
        seed = seed * 1664525 + 1013904223;
        if (wide) ((float *)s.gradient)[i] = (float)(int32_t)seed * 1e-10f;
        else ((uint16_t *)s.gradient)[i] = (uint16_t)(0x3c00 | (seed >> 16 & 0x80ff));
    }
    return s;
}

static double step(struct subject *s)
{
    void *weights[1] = {s->weight};
    const void *gradients[1] = {s->gradient};
    double start = seconds();
    for (int i = 0; i < 4; i++) must(halfstep_step(s->o, weights, gradients), "step");
    return (seconds() - start) / s->bytes;
}

/* Returns the median of the rule's time per byte divided by AdamW's. */
static double compare(const char *rule, const char *recipe, const char *option, double value, int rounds)
{
    double *quotient = malloc((size_t)rounds * sizeof *quotient);
    struct subject s[2] = {begin("adamw", recipe, NULL, 0), begin(rule, recipe, option, value)};
    for (int r = -WARM_UP; r < rounds; r++) {
        double spent[2];
        for (int k = 0; k < 2; k++) spent[(r & 1) ^ k] = step(&s[(r & 1) ^ k]);
        if (r >= 0) quotient[r] = spent[1] / spent[0];
    }
    qsort(quotient, (size_t)rounds, sizeof *quotient, ascending);
    double median = quotient[rounds / 2];
    for (int i = 0; i < 2; i++) {
        halfstep_destroy(s[i].o);
        free(s[i].weight);
        free(s[i].gradient);
    }
    free(quotient);
    return median;
}

static void row(const char *rule, const char *option, double value, int rounds)
{
    printf("| `%s`%s%s |", rule, option ? ", " : "", option ? option : "");
    for (int f = 0; f < FORMATS; f++) {
        printf(" %.2f |", compare(rule, formats[f], option, value, rounds));
        fflush(stdout);
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 101;
    printf("%s kernels, %d elements, one thread; time of a byte over AdamW's\n\n| rule |", halfstep_isa(), ELEMENTS);
    for (int f = 0; f < FORMATS; f++) printf(" %s |", formats[f]);
    printf("\n| --- |");
    for (int f = 0; f < FORMATS; f++) printf(" ---: |");
    printf("\n");
    for (int32_t i = 0; i < halfstep_rule_count(); i++) {
        halfstep_rule_info info = {.struct_size = sizeof info};
        int wanted = argc < 3;
        must(halfstep_get_rule_info(i, &info), "rule");
        for (int j = 2; j < argc; j++) wanted |= !strcmp(argv[j], info.name);
        if (!wanted) continue;
        row(info.name, NULL, 0, rounds);
        for (size_t k = 0; k < sizeof options / sizeof *options; k++)
            if (!strcmp(options[k].rule, info.name)) row(info.name, options[k].option, options[k].value, rounds);
    }
    return 0;
}
