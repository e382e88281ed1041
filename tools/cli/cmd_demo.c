#define HALFSTEP_ADVANCED
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "trainer/compare/compare.h"

#define PATH_BYTES 4096
#define MAX_WORDS 64

struct demo_options {
    const char *data, *out;
    int64_t threads;
    uint64_t seed;
    int json, quiet;
};

static const struct option rows[] = {
    {"data", OPTION_STRING, offsetof(struct demo_options, data), "FILE", NULL, 0, 0, 0, NULL,
     "any file to learn from (default: three plays by Shakespeare that come with the program)"},
    {"out", OPTION_STRING, offsetof(struct demo_options, out), "DIR", "halfstep-demo", 0, 0, 0, NULL,
     "folder for the report"},
    {"threads", OPTION_INTEGER, offsetof(struct demo_options, threads), "N", "0", 0, 1024, 0, NULL,
     "0: HALFSTEP_THREADS, OMP_NUM_THREADS or all processors"},
    {"seed", OPTION_SEED, offsetof(struct demo_options, seed), "N", "1", 0, 0, 0, NULL,
     "of first weights, data order and rounding"},
    {"quiet", OPTION_FLAG, offsetof(struct demo_options, quiet), NULL, NULL, 0, 0, 0, NULL, "no progress on stderr"},
    OPTION_JSON(struct demo_options),
};

static const char notes[] = "At a learning rate of 1e-5 most updates are smaller than half the distance between two "
                            "BF16 numbers, so weights that are\n"
                            "rounded to nearest hardly move. The same 16 bits with stochastic rounding, or with a "
                            "residual beside them, follow fp32.\n"
                            "The demo ends with status 1 if nearest is not at least 0.3 nat behind fp32, or another "
                            "recipe not within 0.03 nat of it.\n";

/* Wide and shallow: at a fixed rate, width is what makes the loss fall fast, and depth only costs time. */
static const char *const fixed_words[] = {
    "--recipes",      "adamw/f32,adamw/bf16,adamw/bf16-sr,adamw/bf16-kahan,adamw/bf16-sr/int8",
    "--expect",       "adamw/bf16>0.3,adamw/bf16-sr~0.03,adamw/bf16-kahan~0.03,adamw/bf16-sr/int8~0.03",
    "--lr",           "1e-5",
    "--weight-decay", "0.01",
    "--width",        "512",
    "--depth",        "2",
    "--heads",        "8",
    "--context",      "64",
    "--batch",        "4",
    "--steps",        "200",
    "--val-every",    "25",
    "--eval-batches", "16",
};

/* BF16 products where the processor has instructions for them; elsewhere they are emulated, at a third of the speed of
 * fp32. It is one type for all five runs either way, and the report names it. */
static const char *compute_type(void)
{
    char features[1024];
    halfstep_cpu_features(features, sizeof features);
    return strstr(features, "bf16") ? "bf16" : "f32";
}

/* The demo's text, from where the program was built or installed: build/../data, bin/../share/halfstep. 0, or -1. */
static int find_text(char *path, size_t path_bytes)
{
    static const char *const places[] = {"../data/demo.txt", "../share/halfstep/demo.txt"};
    char program[PATH_BYTES];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) return -1;
    program[n] = 0;
    char *slash = strrchr(program, '/');
    if (!slash) return -1;
    slash[1] = 0;
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        int length = snprintf(path, path_bytes, "%s%s", program, places[i]);
        if (length <= 0 || (size_t)length >= path_bytes || access(path, R_OK) != 0) continue;
        /* Shorter to read in the report; the unresolved path serves as well. */
        char *resolved = realpath(path, NULL);
        if (resolved && strlen(resolved) < path_bytes) strcpy(path, resolved);
        free(resolved);
        return 0;
    }
    return -1;
}

int cmd_demo(int argc, char **argv)
{
    static const struct command command = {
        "demo",
        "[options]",
        "Trains a small language model five times, with fp32 and with BF16 weights rounded "
        "in four ways, and reports who keeps up.",
        notes,
        0,
        0};
    struct demo_options options;
    struct args args;
    const struct option_group groups[] = {{"Options", rows, OPTION_COUNT(rows), &options}};
    int status = args_parse(&args, &command, groups, 1, argc, argv);
    if (status != ARGS_RUN) return status;
    char path[PATH_BYTES], threads[32], seed[32];
    if (!options.data && find_text(path, sizeof path) != 0) {
        args_free(&args);
        return failure("demo", "demo.txt is neither in ../data nor in ../share/halfstep beside the program; "
                               "name a text with --data FILE");
    }
    snprintf(threads, sizeof threads, "%lld", (long long)options.threads);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)options.seed);
    const char *words[MAX_WORDS] = {"demo",      "--data",      options.data ? options.data : path,
                                    "--out",     options.out,   "--threads",
                                    threads,     "--seed",      seed,
                                    "--compute", compute_type()};
    int n = 11;
    for (size_t i = 0; i < sizeof fixed_words / sizeof fixed_words[0]; i++) words[n++] = fixed_words[i];
    if (options.json) words[n++] = "--json";
    if (options.quiet) words[n++] = "--quiet";
    struct comparison comparison = {"demo", "halfstep demo: BF16 weights at a small learning rate", argc, argv};
    status = compare_lm(&comparison, n, (char **)words);
    args_free(&args);
    return status;
}
