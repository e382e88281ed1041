/* Times a step of many small tensors against a step of one tensor with as many elements, in turn in one process: many
 * LIBRARY RECIPE SHAPES THREADS SCAN ROUNDS [LIBRARY]. Each round steps both, in alternating order. Prints both
 * medians, the median over the rounds of the quotient many / one, and the cost of a tensor above that of its elements.
 * The median quotient is what a busy machine disturbs least. A second library also steps the many; its time is printed
 * relative to the first library's. lab/many.sh runs a list.
 *
 * SHAPES: ROWSxCOLUMNS*COUNT and FROM-TOxCOLUMNS*COUNT (rows from FROM to TO in turn), joined by +. Or `model`, the
 * tensors of a small transformer: 12 layers of 64 columns, biases and norms. */
#define _GNU_SOURCE
#include "builds.h"

enum { WARM_UP = 20, MOST = 1 << 16 };

struct shape {
    int64_t rows, columns;
};

struct subject {
    struct build build;
    void **weights;
    const void **gradients;
};

static const char *const model =
    "512x64*1+192x64*12+192x1*12+64x64*12+64x1*12+256x64*12+256x1*12+64x256*12+64x1*60+512x64*1";

static int parse_shapes(const char *text, struct shape *shape)
{
    int n = 0;
    for (const char *at = strcmp(text, "model") ? text : model; *at; at += *at == '+') {
        long long from, to, columns, count;
        int used = 0;
        if (sscanf(at, "%lld-%lldx%lld*%lld%n", &from, &to, &columns, &count, &used) != 4 || !used) {
            used = 0;
            if (sscanf(at, "%lldx%lld*%lld%n", &from, &columns, &count, &used) != 3 || !used) must(NULL, at);
            to = from;
        }
        if (from < 1 || to < from || columns < 1 || count < 1 || count > MOST - n) must(NULL, at);
        for (long long i = 0; i < count; i++) shape[n++] = (struct shape){from + i % (to - from + 1), columns};
        at += used;
    }
    return n;
}

/* Opens a library with an optimizer of these tensors. Weights and gradients are contiguous, each aligned to a cache
 * line, as in a packed model. */
static struct subject open_subject(const char *path, const char *recipe, const struct shape *shape, int tensors,
                                   int threads, const char *scan)
{
    struct subject s = {.build = open_build(path, recipe, threads),
                        .weights = must(calloc((size_t)tensors, sizeof(void *)), "out of memory"),
                        .gradients = must(calloc((size_t)tensors, sizeof(void *)), "out of memory")};
    int wide = is_wide(recipe);
    size_t size = wide ? 4 : 2, bytes = 0;
    if (s.build.choose(s.build.o, HALFSTEP_ALL_GROUPS, "scan", scan)) must(NULL, scan);
    for (int i = 0; i < tensors; i++) bytes += ((size_t)(shape[i].rows * shape[i].columns) * size + 63) / 64 * 64;
    char *weight = must(aligned_alloc(64, bytes), "out of memory"),
         *gradient = must(aligned_alloc(64, bytes), "out of memory");
    memset(weight, 0, bytes);
    fill(gradient, wide, bytes / size, 1);
    for (int i = 0; i < tensors; i++) {
        add_matrix(&s.build, i, shape[i].rows, shape[i].columns, gradients_of(recipe));
        s.weights[i] = weight;
        s.gradients[i] = gradient;
        size_t here = ((size_t)(shape[i].rows * shape[i].columns) * size + 63) / 64 * 64;
        weight += here;
        gradient += here;
    }
    if (s.build.allocate(s.build.o)) must(NULL, "out of memory for states");
    return s;
}

int main(int argc, char **argv)
{
    if (argc != 7 && argc != 8) must(NULL, "LIBRARY RECIPE SHAPES THREADS SCAN ROUNDS [LIBRARY]");
    static struct shape shape[MOST];
    int tensors = parse_shapes(argv[3], shape), threads = atoi(argv[4]), rounds = atoi(argv[6]),
        subjects = argc == 8 ? 3 : 2;
    int64_t elements = 0;
    for (int i = 0; i < tensors; i++) elements += shape[i].rows * shape[i].columns;
    struct shape whole = {elements / 64, 64};
    struct subject subject[3] = {open_subject(argv[1], argv[2], &whole, 1, threads, argv[5]),
                                 open_subject(argv[1], argv[2], shape, tensors, threads, argv[5])};
    if (subjects == 3) subject[2] = open_subject(argv[7], argv[2], shape, tensors, threads, argv[5]);
    double *time[3], *quotient = must(calloc((size_t)rounds, sizeof *quotient), "out of memory");
    double *other = must(calloc((size_t)rounds, sizeof *other), "out of memory");
    for (int i = 0; i < subjects; i++) time[i] = must(calloc((size_t)rounds, sizeof **time), "out of memory");
    for (int r = -WARM_UP; r < rounds; r++) {
        double spent[3] = {0};
        for (int k = 0; k < subjects; k++) {
            int i = ((r & 1 ? subjects - 1 - k : k) + (r >> 1 & 1)) % subjects;
            const struct build *b = &subject[i].build;
            double start = seconds();
            if (b->step(b->o, subject[i].weights, subject[i].gradients)) must(NULL, "a step failed");
            spent[i] = seconds() - start;
        }
        if (r < 0) continue;
        for (int i = 0; i < subjects; i++) time[i][r] = spent[i];
        quotient[r] = spent[1] / spent[0];
        other[r] = spent[2] / spent[1];
    }
    double one = median(time[0], rounds), many = median(time[1], rounds);
    printf("| `%s` | %s | %d | %s | %.1f | %.1f | %.3f | %.0f |", argv[2], argv[3], threads, argv[5], one * 1e6,
           many * 1e6, median(quotient, rounds), (many - one) / tensors * 1e9);
    if (subjects == 3) printf(" %.3f |", median(other, rounds));
    putchar('\n');
    return 0;
}
