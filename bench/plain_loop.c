/* Times one fp32 step of AdamW on one thread, in turns with the plain loop that a C trainer would have.
 *
 *     cc -O3 -ffast-math -march=native -DPLAIN -c bench/plain_loop.c -o plain.o
 *     cc -O2 -Iinclude bench/plain_loop.c plain.o -o plain_loop -Lbuild -lhalfstep -Wl,-rpath,$PWD/build -lm
 *     ./plain_loop [ROUNDS [ELEMENTS]]
 *
 * The clock is that of the process's processor time, because machines are shared. bench/README.md has a table of it. */
#include <math.h>

void plain_step(float *w, const float *g, float *m, float *v, long n, float lr, float decay, int step);

#ifdef PLAIN
void plain_step(float *w, const float *g, float *m, float *v, long n, float lr, float decay, int step)
{
    const float correction1 = 1 - powf(0.9f, (float)step), correction2 = 1 - powf(0.999f, (float)step);
    for (long i = 0; i < n; i++) {
        m[i] = 0.9f * m[i] + 0.1f * g[i];
        v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
        w[i] -= lr * (m[i] / correction1 / (sqrtf(v[i] / correction2) + 1e-8f) + decay * w[i]);
    }
}
#else
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "halfstep.h"

enum { TENSORS = 40, PLAIN_LOOP = 0, PLAIN_PLACED, SCANNED, KNOWN_FINITE, WAYS };
static const char *const ways[WAYS] = {"plain loop", "plain loop, our memory", "halfstep", "halfstep, known finite"};

/* A model and both of its optimizers. */
struct model {
    int tensors;
    long each; /* elements of a tensor */
    void *weights[TENSORS];
    const void *gradients[TENSORS];
    float *m[TENSORS], *v[TENSORS]; /* moments of the plain loop */
    float *states[TENSORS][2];      /* those of the library, which the second way steps too */
    halfstep_optimizer *o;
};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Ends the program if a call has failed. */
static void check(int code)
{
    if (!code) return;
    fprintf(stderr, "%s: %s\n", halfstep_strerror(code), halfstep_error_detail(NULL));
    exit(1);
}

/* Makes n elements of random numbers in [-size, size]. */
static float *array(long n, float size)
{
    float *a = malloc((size_t)n * sizeof *a);
    if (!a) check(HALFSTEP_ERROR_MEMORY);
    for (long i = 0; i < n; i++) a[i] = size * ((float)rand() / (float)RAND_MAX * 2 - 1);
    return a;
}

static struct model make(int tensors, long each, long row)
{
    struct model x = {.tensors = tensors, .each = each / row * row};
    const halfstep_options options = {.struct_size = sizeof options, .threads = 1};
    int32_t group, index;
    check(halfstep_create(&options, &x.o));
    check(halfstep_add_group(x.o, "adamw/f32/f32", &group));
    for (int i = 0; i < tensors; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        check(halfstep_add_tensor(x.o,
                                  &(halfstep_tensor){.struct_size = sizeof(halfstep_tensor),
                                                     .name = name,
                                                     .gradient = "f32",
                                                     .ndim = 2,
                                                     .rows = each / row,
                                                     .row_length = row},
                                  &index));
        x.weights[i] = array(each, 1);
        x.gradients[i] = array(each, 1e-2f);
        x.m[i] = array(each, 0);
        x.v[i] = array(each, 0);
    }
    check(halfstep_allocate_states(x.o));
    for (int i = 0; i < 2 * tensors; i++) {
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        check(halfstep_get_slot_info(x.o, i / 2, HALFSTEP_SLOT_STATE + i % 2, &slot));
        x.states[i / 2][i % 2] = slot.code;
    }
    return x;
}

/* Steps a model once in one of the ways. Returns the milliseconds that it took. */
static double step(struct model *x, int way, int number)
{
    if (way >= SCANNED)
        check(halfstep_set_choice(x->o, HALFSTEP_ALL_GROUPS, "scan", way == SCANNED ? "scan" : "known-finite"));
    const double begin = now();
    if (way >= SCANNED) {
        check(halfstep_step(x->o, x->weights, x->gradients));
    } else {
        for (int i = 0; i < x->tensors; i++)
            plain_step(x->weights[i], x->gradients[i], way == PLAIN_LOOP ? x->m[i] : x->states[i][0],
                       way == PLAIN_LOOP ? x->v[i] : x->states[i][1], x->each, 1e-3f, 1e-2f, number);
    }
    return now() - begin;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Prints the least time of each way for an element, and the median of its ratios to the plain loop of the same round.
 * `repeat` steps count as one. */
static void compare(const char *where, struct model x, int rounds, int repeat)
{
    double least[WAYS], *ratio = calloc((size_t)rounds * WAYS, sizeof *ratio);
    if (!ratio) check(HALFSTEP_ERROR_MEMORY);
    for (int r = -3; r < rounds; r++) {
        double time[WAYS] = {0};
        for (int k = 0; k < WAYS; k++) {
            for (int i = 0; i < repeat; i++) time[k] += step(&x, k, r + 4);
            if (r < 0) continue;
            if (!r || time[k] < least[k]) least[k] = time[k];
            ratio[k * rounds + r] = time[k] / time[PLAIN_LOOP];
        }
    }
    for (int k = 0; k < WAYS; k++) {
        qsort(ratio + k * rounds, (size_t)rounds, sizeof *ratio, by_size);
        printf("%-24s %-24s %7.3f ns/element %6.2f\n", where, ways[k],
               least[k] * 1e6 / ((double)x.tensors * (double)x.each * repeat), ratio[k * rounds + rounds / 2]);
    }
    free(ratio);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 40;
    const long each = (argc > 2 ? atol(argv[2]) : 10000000) / TENSORS;
    if (rounds < 1 || each < 1024) return 2;
    printf("%s, 1 thread, %d tensors of %ld elements, %d rounds\n", halfstep_isa(), TENSORS, each, rounds);
    compare("rows of 1024", make(TENSORS, each, 1024), rounds, 1);
    compare("rows of 1000", make(TENSORS, each, 1000), rounds, 1);
    compare("rows of 1024, in cache", make(1, 16384, 1024), rounds, 200);
    return 0;
}
#endif
