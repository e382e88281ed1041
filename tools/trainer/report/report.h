/* The results of a comparison: one entry per recipe, and one run per entry and seed. They are reported as a table, a
 * sentence, checks, CSV, JSON and an HTML page. The first entry is the reference. Nothing here touches files or
 * trains. */
#ifndef HALFSTEP_UI_REPORT_H
#define HALFSTEP_UI_REPORT_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/document.h"
#include "common/text.h"

#define REPORT_MAX_ENTRIES 64
#define REPORT_MAX_SEEDS 1000
#define REPORT_MARK 0.99

struct report_curve {
    int n;
    double *step, *loss;
};

struct report_run {
    int entry;
    uint64_t seed;
    int done;
    const char *error; /* why the run failed, or NULL */
    double train_loss, validation_loss, seconds;
    double tokens_per_s;               /* NAN: unknown */
    double weights, gradients, states; /* bytes per parameter */
    double changed;                    /* share of the weights whose stored bits differ from the start, NAN: unknown */
    uint64_t skipped;
    struct report_curve train, validation;
    struct document json; /* what train prints with --json for this run */
    /* Share of the test images classified correctly, at the end and by epoch. Only if report.has_accuracies. */
    double accuracy;
    struct report_curve accuracies;
};

/* compute, the type of the matrix products, is the same in all entries. */
struct report_entry {
    const char *name;  /* recipe with the options that only its runs have */
    const char *typed; /* the name as typed, which --expect may use, or NULL */
    const char *recipe, *compute, *gradients;
    int group;         /* entries of a group are consecutive; the first is their reference */
    const char *label; /* name without its group, or NULL: the name */
};

/* The terms for the numbers of a report. */
struct report_words {
    const char *loss, *short_loss; /* "validation loss", "val loss" */
    const char *step;              /* "step" */
    const char *speed;             /* "tokens/s" */
    const char *learning;          /* explains the points of the training loss: "" or a sentence */
};

struct report_pair {
    const char *name, *value;
};

/* A demand on one entry's difference to the reference, in nats. If report.has_accuracies, a demand on its test accuracy
 * in percent ('>', '<') or on the difference of that ('~'). */
struct report_check {
    int entry;
    char relation; /* '>': more than, '<': less than, '~': within, either way */
    double bound;
    /* set by report_judge() */
    double value;
    int passed;
};

struct report {
    const char *title, *subtitle;
    const char *command; /* the command line that repeats the comparison */
    struct report_entry entry[REPORT_MAX_ENTRIES];
    int entries;
    struct report_run *run; /* in the order of training */
    int runs, seeds;        /* seeds: runs of one entry, at most REPORT_MAX_SEEDS */
    const struct report_pair *configuration, *machine;
    int configurations, machines;
    struct report_check *check;
    int checks;
    const char *const *group;         /* names of the groups: "batch 128"; not used with one group */
    int groups;                       /* 0 and 1: one group */
    int has_accuracies;               /* runs have a test accuracy */
    const struct report_words *words; /* NULL: those of the language model */
};

/* Statistics of the finished runs. deviation is the sample standard deviation, NAN for less than two runs. */
struct report_mean {
    int n;
    double mean, deviation, low, high;
};

struct report_row {
    struct report_mean validation, train, difference, tokens_per_s, changed, accuracy;
    struct report_mean reached; /* epochs until the accuracy was REPORT_MARK, over the runs that reached it */
    double weights, gradients, states, bytes;
    uint64_t skipped;
};

/* Returns the entry that this one is compared with: the first of its group. */
int report_reference(const struct report *report, int entry);
/* Returns the finished run of an entry and seed, or NULL. */
const struct report_run *report_find_run(const struct report *report, int entry, uint64_t seed);
/* Returns why a run of an entry failed, or NULL. */
const char *report_error(const struct report *report, int entry);
const struct report_words *report_words(const struct report *report);
const char *report_label(const struct report *report, int entry);
/* Computes the row of an entry in the table. Differences are taken between runs of the same seed, so that their
 * deviation does not include what the seeds have in common. */
void report_row(const struct report *report, int entry, struct report_row *row);
int report_done(const struct report *report);

/* Parses "RECIPE>0.3,RECIPE~0.03" into check[0 .. *checks - 1]. Returns 0, or -1 with an error text. */
int report_parse_checks(const struct report *report, const char *text, struct report_check *check, int most,
                        int *checks, char *error, size_t error_bytes);
/* Evaluates all checks. Returns the number of those that failed. */
int report_judge(struct report *report);
/* Appends a sentence such as "adamw/bf16/bf16-sr: 1.1203 nat above adamw/f32/f32, wanted more than 0.3". */
void report_check_text(const struct report *report, const struct report_check *check, hstep_buffer *out);

/* Appends a summary of the table in one sentence. Appends nothing before the reference and one other entry are done. */
void report_sentence(const struct report *report, hstep_buffer *out);
void report_table(const struct report *report, hstep_buffer *out);
void report_runs_csv(const struct report *report, hstep_buffer *out);
void report_history_csv(const struct report *report, hstep_buffer *out);
/* Builds a new document with the report. */
void report_document(struct document *document, const struct report *report);
void report_html(const struct report *report, hstep_buffer *out);

int report_curve_add(struct report_curve *curve, double step, double loss); /* returns -1 if out of memory */
void report_curve_free(struct report_curve *curve);

#endif
