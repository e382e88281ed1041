/* What the files of the comparison share: compare.c is the comparison, compare_report.c writes what it found, and
 * compare_lm.c and compare_mnist.c say what is trained. */
#ifndef HALFSTEP_COMPARE_INTERNAL_H
#define HALFSTEP_COMPARE_INTERNAL_H

#include "common/args/args.h"
#include "trainer/compare/compare.h"
#include "trainer/mnist/train_mnist.h"
#include "trainer/report/report.h"
#include "trainer/run/train.h"

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

/* One kind of model. Functions return 0, or the exit status and one line in error. */
struct compare_kind {
    const char *usage, *summary, *notes; /* of --help */
    const char *recipes;                 /* default of --recipes */
    const char *expect;                  /* help of --expect */
    const char *batches;                 /* default of a --batch that takes several sizes, NULL: it takes one */
    const struct report_words *words;
    int has_accuracies;
    void (*options_init)(struct run_options *options);
    /* After parsing: defaults that depend on each other. */
    int (*complete)(struct compare *compare, char *error, size_t error_bytes);
    int (*load)(struct compare *compare, char *error, size_t error_bytes);
    void (*unload)(struct compare *compare);
    int (*train)(struct compare *compare, const struct run_config *config, struct progress *progress,
                 struct report_run *run, char *error, size_t error_bytes);
    /* What was trained, for the report's second line, and where the data came from (compare_fact). */
    void (*describe)(struct compare *compare, struct text *subtitle);
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
    int batches; /* 1 where --batch takes one */
    union {
        struct run_data lm;
        struct mnist_data mnist;
    } data;
    struct report report;
    struct report_check check[MAX_CHECKS];
    int checks;
    struct report_pair configuration[MAX_PAIRS], machine[8];
    struct text command, subtitle;
};

int compare_run(const struct compare_kind *kind, const struct comparison *comparison, int argc, char **argv);

/* What is the same in every kind: costs, bytes, shares; run->json is made already. 0, or -1 when memory is out. */
int compare_keep(struct report_run *run, const struct run_result *result);

/* Title, command, configuration and machine of the report. 0, or -1 when memory is out. */
int compare_describe(struct compare *compare);
/* A line of its configuration. Fails as `subtitle` does: compare_describe() tells. */
void compare_fact(struct compare *compare, const char *name, const struct text *value);
/* Files that belong to one run of many: DIR/NAME, and FILE.csv as FILE-NAME.csv. */
struct run_paths {
    struct text log, checkpoint; /* empty where there is none */
};

/* 0, or -1 when memory is out. After either compare_free_paths(). */
int compare_name_paths(const struct compare *compare, const struct report_run *run, struct run_paths *paths);
void compare_free_paths(struct run_paths *paths);
/* 0, or an exit status and one line where a file would be written that is read, or that another run writes. */
int compare_check_paths(const struct compare *compare, char *error, size_t error_bytes);

/* Makes the folder and those above it. 0, or -1 with errno. */
int compare_make_folder(const char *path);
/* The four files in --out, by number. */
const char *compare_report_file(int index);
/* Replaces the four files in --out. 0, or -1 and one line. */
int compare_write_report(const struct compare *compare, char *error, size_t error_bytes);
/* The part of a path after the last slash. */
const char *compare_file_name(const char *path);

#endif
