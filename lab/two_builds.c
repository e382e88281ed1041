/* Times one step of two builds of the library in turn, in one process: two_builds OLD.so NEW.so RECIPE TENSORS ROWS
 * COLUMNS ROUNDS. Settings may follow the recipe, separated by spaces: choices and hyper-parameters by name, and the
 * format of gradients ("adam/bf16-sr/int8 decay=l2 weight_decay=0.01 gradient=f16"). Each round steps both, in
 * alternating order. Prints both medians, and the median over the rounds of the quotient new / old, which a busy
 * machine disturbs least. lab/two_builds.sh runs a list of recipes. */
#define _GNU_SOURCE
#include "builds.h"

enum { WARM_UP = 20 };

struct subject {
    struct build build;
    void **weights;
    const void **gradients;
};

/* Applies one setting, NAME=VALUE. */
static void apply(const struct build *b, char *setting)
{
    char *value = must(strchr(setting, '='), setting), *end;
    *value++ = '\0';
    double number = strtod(value, &end);
    if (*end ? b->choose(b->o, HALFSTEP_ALL_GROUPS, setting, value) && b->choose(b->o, 0, setting, value)
             : b->set(b->o, 0, setting, number))
        must(NULL, setting);
}

static struct subject open_subject(const char *path, const char *row, int tensors, int64_t rows, int64_t columns)
{
    char text[256];
    snprintf(text, sizeof text, "%s", row);
    const char *recipe = strtok(text, " "), *gradients = gradients_of(must((void *)(uintptr_t)recipe, "no recipe"));
    struct subject s = {.build = open_build(path, recipe, 1),
                        .weights = must(calloc((size_t)tensors, sizeof(void *)), "out of memory"),
                        .gradients = must(calloc((size_t)tensors, sizeof(void *)), "out of memory")};
    for (char *setting; (setting = strtok(NULL, " "));)
        if (!strncmp(setting, "gradient=", 9)) gradients = setting + 9;
        else apply(&s.build, setting);
    size_t n = (size_t)(rows * columns);
    for (int i = 0; i < tensors; i++) {
        void *gradient = must(aligned_alloc(64, n * 4 + 64), "out of memory");
        s.weights[i] = must(calloc(n + 16, 4), "out of memory");
        s.gradients[i] = gradient;
        fill(gradient, !strcmp(gradients, "f32"), n, (uint32_t)i);
        add_matrix(&s.build, i, rows, columns, gradients);
    }
    if (s.build.allocate(s.build.o)) must(NULL, "out of memory for states");
    return s;
}

int main(int argc, char **argv)
{
    if (argc != 8) must(NULL, "OLD.so NEW.so RECIPE TENSORS ROWS COLUMNS ROUNDS");
    int tensors = atoi(argv[4]), rounds = atoi(argv[7]);
    struct subject subject[2];
    for (int i = 0; i < 2; i++)
        subject[i] = open_subject(argv[1 + i], argv[3], tensors, atoll(argv[5]), atoll(argv[6]));
    double *time[2], *quotient = must(calloc((size_t)rounds, sizeof *quotient), "out of memory");
    for (int i = 0; i < 2; i++) time[i] = must(calloc((size_t)rounds, sizeof **time), "out of memory");
    for (int r = -WARM_UP; r < rounds; r++) {
        double spent[2];
        for (int k = 0; k < 2; k++) {
            int i = (r & 1) ^ k;
            const struct build *b = &subject[i].build;
            double start = seconds();
            if (b->step(b->o, subject[i].weights, subject[i].gradients)) must(NULL, "a step failed");
            spent[i] = seconds() - start;
        }
        if (r < 0) continue;
        for (int i = 0; i < 2; i++) time[i][r] = spent[i];
        quotient[r] = spent[1] / spent[0];
    }
    printf("| `%s` | %d of %s x %s | %.1f | %.1f | %.3f |\n", argv[3], tensors, argv[5], argv[6],
           median(time[0], rounds) * 1e6, median(time[1], rounds) * 1e6, median(quotient, rounds));
    return 0;
}
