/* Measures the cost of scanning the gradients: scan LIBRARY RECIPE ELEMENTS THREADS PAGES ROUNDS [LIBRARY]. Steps one
 * large tensor with scan "known-finite" and with "scan", by each library. All run in turn in one process on the same
 * weights and gradients, in rotating order. Prints ns per parameter of each and the median of their differences. PAGES
 * is small or huge, for weights, gradients and states. lab/scan.sh runs a list. */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "builds.h"

enum { WARM_UP = 2, COLUMNS = 4096 };

/* Allocates memory with an offset for each number, so that no two buffers are a power of two apart. The library's own
 * states are not, either. */
static char *memory(size_t bytes, int huge, int number)
{
    size_t off = (size_t)number * (4096 + 64);
    char *p = mmap(NULL, bytes + off + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) must(NULL, "out of memory");
    madvise(p, bytes + off, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(p, 0, bytes + off);
    return p + off;
}

static struct build open_subject(const char *path, const char *recipe, int64_t rows, int threads, int huge)
{
    struct build b = open_build(path, recipe, threads);
    uint64_t bytes;
    add_matrix(&b, 0, rows, COLUMNS, gradients_of(recipe));
    if (b.state_bytes(b.o, &bytes)) must(NULL, recipe);
    if (b.bind(b.o, memory(bytes, huge, 2), bytes)) must(NULL, "out of memory for states");
    return b;
}

int main(int argc, char **argv)
{
    if (argc != 7 && argc != 8) must(NULL, "LIBRARY RECIPE ELEMENTS THREADS PAGES ROUNDS [LIBRARY]");
    static const char *const scans[] = {"known-finite", "scan"};
    int builds = argc - 6, cases = 2 * builds, rounds = atoi(argv[6]), wide = is_wide(argv[2]);
    int64_t rows = atoll(argv[3]) / COLUMNS, n = rows * COLUMNS;
    int huge = !strcmp(argv[5], "huge");
    void *weight = memory((size_t)n * 4, huge, 0), *gradient = memory((size_t)n * (wide ? 4 : 2), huge, 1);
    const void *given = gradient;
    fill(gradient, wide, (size_t)n, 1);
    struct build build[2];
    for (int i = 0; i < builds; i++) build[i] = open_subject(argv[i ? 7 : 1], argv[2], rows, atoi(argv[4]), huge);
    double *time[4], *more = must(calloc((size_t)rounds, sizeof *more), "out of memory");
    for (int k = 0; k < 4; k++) time[k] = must(calloc((size_t)rounds + 1, sizeof **time), "out of memory");
    for (int r = -WARM_UP; r < rounds; r++)
        for (int k = 0; k < cases; k++) {
            int c = (k + r + WARM_UP) % cases;
            struct build *b = &build[c / 2];
            if (b->choose(b->o, HALFSTEP_ALL_GROUPS, "scan", scans[c % 2])) must(NULL, "unknown scan");
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
