/* What the look through the gradients costs: scan LIBRARY RECIPE ELEMENTS THREADS PAGES ROUNDS [LIBRARY]. Steps one
 * large tensor with scan "known-finite" and with "scan", by each library, in turn in one process and on the same weights
 * and gradients, the order changing; prints ns per parameter of each and the median of their differences. PAGES: small
 * or huge, of weights, gradients and states. lab/scan.sh runs a list. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "halfstep.h"

enum { WARM_UP = 2, COLUMNS = 4096 };

struct build {
    halfstep_optimizer *o;
    int (*step)(halfstep_optimizer *, void *const *, const void *const *);
    int (*choose)(halfstep_optimizer *, int32_t, const char *, const char *);
};

static void *must(void *result, const char *what)
{
    if (result) return result;
    fprintf(stderr, "scan: %s\n", what);
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

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

/* Off powers of two, as the library's own states are. */
static char *memory(size_t bytes, int huge, int number)
{
    size_t off = (size_t)number * (4096 + 64);
    char *p = mmap(NULL, bytes + off + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) must(NULL, "no memory");
    madvise(p, bytes + off, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(p, 0, bytes + off);
    return p + off;
}

static struct build open_build(const char *path, const char *recipe, int64_t rows, int threads, int huge,
                               const char *gradients)
{
    /* A name space of its own: both have the same symbols. */
    void *library = must(dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL), path);
    int (*create)(const halfstep_options *, halfstep_optimizer **) = function(library, "halfstep_create");
    int (*add_group)(halfstep_optimizer *, const char *, int32_t *) = function(library, "halfstep_add_group");
    int (*add_tensor)(halfstep_optimizer *, const halfstep_tensor *, int32_t *) =
        function(library, "halfstep_add_tensor");
    int (*state_bytes)(halfstep_optimizer *, uint64_t *) = function(library, "halfstep_state_bytes");
    int (*bind)(halfstep_optimizer *, void *, uint64_t) = function(library, "halfstep_bind_states");
    struct build b = {.step = function(library, "halfstep_step"), .choose = function(library, "halfstep_set_choice")};
    halfstep_options options = {.struct_size = sizeof options, .threads = threads};
    halfstep_tensor t = {
        .struct_size = sizeof t, .name = "w", .ndim = 2, .rows = rows, .row_length = COLUMNS, .gradient = gradients};
    int32_t index;
    uint64_t bytes;
    if (create(&options, &b.o) || add_group(b.o, recipe, &index) || add_tensor(b.o, &t, &index) ||
        state_bytes(b.o, &bytes))
        must(NULL, recipe);
    if (bind(b.o, memory(bytes, huge, 2), bytes)) must(NULL, "no memory for states");
    return b;
}

int main(int argc, char **argv)
{
    if (argc != 7 && argc != 8) must(NULL, "LIBRARY RECIPE ELEMENTS THREADS PAGES ROUNDS [LIBRARY]");
    static const char *const scans[] = {"known-finite", "scan"};
    int builds = argc - 6, cases = 2 * builds, rounds = atoi(argv[6]), wide = !strstr(argv[2], "/bf16");
    int64_t rows = atoll(argv[3]) / COLUMNS, n = rows * COLUMNS;
    int huge = !strcmp(argv[5], "huge");
    void *weight = memory((size_t)n * 4, huge, 0), *gradient = memory((size_t)n * (wide ? 4 : 2), huge, 1);
    const void *given = gradient;
    uint32_t seed = 1;
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525 + 1013904223;
        if (wide) ((float *)gradient)[i] = (float)(int32_t)seed * 1e-10f;
        else ((uint16_t *)gradient)[i] = (uint16_t)(0x3c00 | (seed >> 16 & 0x80ff));
    }
    struct build build[2];
    for (int i = 0; i < builds; i++)
        build[i] = open_build(argv[i ? 7 : 1], argv[2], rows, atoi(argv[4]), huge, wide ? "f32" : "bf16");
    double *time[4], *more = must(calloc((size_t)rounds, sizeof *more), "no memory");
    for (int k = 0; k < 4; k++) time[k] = must(calloc((size_t)rounds + 1, sizeof **time), "no memory");
    for (int r = -WARM_UP; r < rounds; r++)
        for (int k = 0; k < cases; k++) {
            int c = (k + r + WARM_UP) % cases;
            struct build *b = &build[c / 2];
            if (b->choose(b->o, HALFSTEP_ALL_GROUPS, "scan", scans[c % 2])) must(NULL, "no such scan");
            double start = seconds();
            if (b->step(b->o, &weight, &given)) must(NULL, "a step failed");
            if (r >= 0) time[c][r] = (seconds() - start) / (double)n * 1e9;
        }
    printf("| `%s` | %s | %s |", argv[2], argv[4], argv[5]);
    for (int i = 0; i < builds; i++) {
        for (int r = 0; r < rounds; r++) more[r] = time[2 * i + 1][r] - time[2 * i][r];
        double scan = median(more, rounds), finite = median(time[2 * i], rounds);
        printf(" %.3f | %.3f | %.3f |", finite, median(time[2 * i + 1], rounds), scan);
    }
    putchar('\n');
    return 0;
}
