/* Shared by the files of the comparison: compare.c runs it, compare_report.c writes the report, and compare_lm.c and
 * compare_mnist.c each define a kind of model. */
#ifndef HALFSTEP_COMPARE_INTERNAL_H
#define HALFSTEP_COMPARE_INTERNAL_H

#include "common/args/args.h"
#include "trainer/compare/compare.h"
#include "trainer/mnist/mnist.h"
#include "trainer/report/report.h"
#include "trainer/run/run.h"

#define MAX_CHECKS 64
#define MAX_PAIRS (RUN_OPTIONS_MAX + 8)
#define MAX_GROUPS 16
#define MAX_OWN_OPTIONS 8
#define PATH_BYTES 4096

struct compare_options {
    const char *recipes, *out, *expect, *batches;
    int64_t seeds;
    int json;
};

struct compare;

/* A line of --help. */
#define COMPARE_GOES_ON                                                                                              \
    "A run that diverges is reported as such. If one fails, such as for lack of memory, the others go on, and the\n" \
    "status is 1.\n"

/* One kind of model. Functions return 0, or the exit status with an error text. A run that diverges is done, and its
 * training returns 1. */
struct compare_kind {
    const char *usage, *summary, *notes; /* of --help */
    const char *recipes;                 /* default of --recipes */
    const char *expect;                  /* help of --expect */
    const char *batches;                 /* default of --batch if it takes several sizes; NULL if it takes one */
    const struct report_words *words;
    int has_accuracies;
    void (*options_init)(struct run_options *options);
    /* Called after parsing, for defaults that depend on each other. */
    int (*complete)(struct compare *compare, char *error, size_t error_bytes);
    int (*load)(struct compare *compare, char *error, size_t error_bytes);
    void (*unload)(struct compare *compare);
    int (*train)(struct compare *compare, const struct run_config *config, struct progress *progress,
                 struct report_run *run, char *error, size_t error_bytes);
    /* Describes the model and the training in the report's second line, and the origin of the data by
     * compare_fact(). */
    void (*describe)(struct compare *compare, hstep_buffer *subtitle);
};

struct compare {
    const struct comparison *comparison;
    const struct compare_kind *kind;
    struct option own[MAX_OWN_OPTIONS];
    struct run_options table;
    struct args args;
    struct compare_options options;
    struct run_config base, config[REPORT_MAX_ENTRIES];
    struct option_group groups[2];
    int64_t batch[MAX_GROUPS];
    const char *batch_name[MAX_GROUPS];
    int batches; /* number of sizes in --batch, 1 if it takes one only */
    union {
        struct run_data lm;
        struct mnist_data mnist;
    } data;
    struct report report;
    struct report_check check[MAX_CHECKS];
    int checks;
    struct report_pair configuration[MAX_PAIRS], machine[8];
    hstep_buffer command, subtitle;
};

int compare_run(const struct compare_kind *kind, const struct comparison *comparison, int argc, char **argv);

/* Copies what all kinds have in common: losses, times, bytes, shares. Requires run->json. Returns 0, or -1 if out of
 * memory. */
int compare_keep(struct report_run *run, const struct run_result *result);

/* Fills in title, command, configuration and machine of the report. Returns 0, or -1 if out of memory. */
int compare_describe(struct compare *compare);
/* Adds a line to the report's configuration. compare_describe() reports a failure. */
void compare_fact(struct compare *compare, const char *name, const hstep_buffer *value);
/* The files of one run among many: DIR/NAME, and FILE-NAME.csv for FILE.csv. */
struct run_paths {
    const char *log, *checkpoint; /* NULL without --log or --checkpoint */
};

/* Builds the paths, which live as long as the command line. Returns 0, or -1 if out of memory. */
int compare_name_paths(struct compare *compare, const struct report_run *run, struct run_paths *paths);
/* Fails if an output is also an input, or if two runs would write the same file. Returns 0, or an exit status with an
 * error text. */
int compare_check_paths(struct compare *compare, char *error, size_t error_bytes);

/* Creates a folder and those above it. Returns 0, or another number with an error text. */
int compare_make_folder(const char *path, char *error, size_t error_bytes);
/* Returns the name of a file in --out by its number, 0 .. 3. */
const char *compare_report_file(int index);
/* Replaces the four files in --out. Returns 0, or -1 with an error text. */
int compare_write_report(const struct compare *compare, char *error, size_t error_bytes);
/* Returns the part of a path after the last slash. */
const char *compare_file_name(const char *path);

#endif
