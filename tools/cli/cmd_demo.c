#define HALFSTEP_ADVANCED
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/paths.h"
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
     "training text, any file (default: three plays by Shakespeare that come with the program)"},
    {"out", OPTION_STRING, offsetof(struct demo_options, out), "DIR", "halfstep-demo", 0, 0, 0, NULL,
     "folder of the report"},
    {"threads", OPTION_INTEGER, offsetof(struct demo_options, threads), "N", "0", 0, 1024, 0, NULL,
     "number of threads; 0: HALFSTEP_THREADS, OMP_NUM_THREADS or all processors"},
    {"seed", OPTION_SEED, offsetof(struct demo_options, seed), "N", "1", 0, 0, 0, NULL,
     "seed of initial weights, data order and stochastic rounding"},
    {"quiet", OPTION_FLAG, offsetof(struct demo_options, quiet), NULL, NULL, 0, 0, 0, NULL,
     "print no progress on stderr"},
    OPTION_JSON(struct demo_options),
};

static const char notes[] =
    "At a learning rate of 1e-5 most updates are smaller than half the distance between two BF16 numbers. Weights\n"
    "that are rounded to nearest therefore hardly move. The same 16 bits with stochastic rounding (bf16-sr), or with\n"
    "a residual beside them (bf16-kahan), follow fp32.\n"
    "\n"
    "Exit status: 1 if rounding to nearest ends less than 0.3 nat above fp32, or another recipe more than 0.03 nat\n"
    "from it.\n"
    "\n"
    "  halfstep demo --out report\n";

/* The model is wide and shallow. At a fixed learning rate, width makes the loss fall fast, and depth only costs
 * time. */
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

/* Returns the type of the matrix products. It is bf16 if the processor has instructions for it. Otherwise it is f32,
 * because emulated BF16 has a third of its speed. All five runs use one type, and the report names it. */
static const char *compute_type(void)
{
    char features[1024];
    halfstep_cpu_features(features, sizeof features);
    return strstr(features, "bf16") ? "bf16" : "f32";
}

/* Finds the demo's text beside the program: in ../data of a build or in ../share/halfstep of an installation. Returns 0
 * or -1. */
static int find_text(char *path, size_t path_bytes)
{
    static const char *const places[] = {"../data/demo.txt", "../share/halfstep/demo.txt"};
    char program[PATH_BYTES];
    if (paths_program(program, sizeof program) != 0) return -1;
    char *slash = strrchr(program, '/');
    if (!slash) return -1;
    slash[1] = 0;
    for (int i = 0; i < COUNT_OF(places); i++) {
        int length = snprintf(path, path_bytes, "%s%s", program, places[i]);
        if (length <= 0 || (size_t)length >= path_bytes || access(path, R_OK) != 0) continue;
        /* The resolved path is shorter to read in the report. The other one serves as well. */
        char *resolved = realpath(path, NULL);
        if (resolved && strlen(resolved) < path_bytes) strcpy(path, resolved);
        free(resolved);
        return 0;
    }
    return -1;
}

static int run_demo(struct args *args, void *options)
{
    const struct demo_options *o = options;
    char path[PATH_BYTES], threads[32], seed[32];
    if (!o->data && find_text(path, sizeof path) != 0)
        return failure("demo", "demo.txt is neither in ../data nor in ../share/halfstep beside the program; "
                               "name a text with --data FILE");
    snprintf(threads, sizeof threads, "%lld", (long long)o->threads);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)o->seed);
    const char *words[MAX_WORDS] = {
        "demo",      "--data",      o->data ? o->data : path, "--out", o->out, "--threads", threads, "--seed", seed,
        "--compute", compute_type()};
    int n = 11;
    for (int i = 0; i < COUNT_OF(fixed_words); i++) words[n++] = fixed_words[i];
    if (o->json) words[n++] = "--json";
    if (o->quiet) words[n++] = "--quiet";
    const struct comparison comparison = {"demo", "halfstep demo: BF16 weights at a small learning rate", args->argc,
                                          args->argv};
    return compare_lm(&comparison, n, (char **)words);
}

const struct command demo_command = {
    .name = "demo",
    .usage = "[options]",
    .summary = "Trains a small language model with fp32 weights and under four recipes with BF16 weights, and reports "
               "which of them keep up with fp32.",
    .notes = notes,
    COMMAND_OPTIONS(rows, struct demo_options),
    .run = run_demo,
};
