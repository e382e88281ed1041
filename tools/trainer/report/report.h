/* What a comparison found: one entry per recipe, one run per entry and seed, and everything that is said about them: a
 * table, one sentence, checks, CSV, JSON and one HTML page. The first entry is the reference. Nothing here touches
 * files or trains anything. */
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
    double train_loss, validation_loss, seconds;
    double tokens_per_s;               /* NAN: not known */
    double weights, gradients, states; /* bytes per parameter */
    double changed; /* share of the weights whose stored bits differ from the start, NAN: not known */
    uint64_t skipped;
    struct report_curve train, validation;
    struct document json; /* what train lm prints for this run */
    double accuracy;      /* share of the test that was right, and how it went; where report.has_accuracies */
    struct report_curve accuracies;
};

/* compute, the type of the matrix products, is the same in all of them. */
struct report_entry {
    const char *name;  /* the recipe, with what is special about its runs */
    const char *typed; /* the same as it was typed, or NULL: another name for it */
    const char *recipe, *compute, *gradients;
    int group;         /* entries of one group stand one after the other; the first is their reference */
    const char *label; /* the name where the group is said already, or NULL: the name */
};

/* What the numbers are called. */
struct report_words {
    const char *loss, *short_loss; /* "validation loss", "val loss" */
    const char *step;              /* "step" */
    const char *speed;             /* "tokens/s" */
    const char *learning;          /* what a point of the training loss is: "" or a sentence */
};

struct report_pair {
    const char *name, *value;
};

/* A demand on one entry's difference to the reference, in nat; where report.has_accuracies, on its test accuracy in
 * percent ('>', '<') or on the difference of that ('~'). */
struct report_check {
    int entry;
    char relation; /* '>': more than, '<': less than, '~': within, either way */
    double bound;
    /* filled in by report_judge() */
    double value;
    int passed;
};

struct report {
    const char *title, *subtitle;
    const char *command; /* that makes it again */
    struct report_entry entry[REPORT_MAX_ENTRIES];
    int entries;
    struct report_run *run; /* in the order in which they were made */
    int runs, seeds;        /* runs of one entry: at most REPORT_MAX_SEEDS */
    const struct report_pair *configuration, *machine;
    int configurations, machines;
    struct report_check *check;
    int checks;
    const char *const *group;         /* what the groups are called: "batch 128"; one group needs no name */
    int groups;                       /* 0 and 1: one */
    int has_accuracies;               /* runs have a test accuracy */
    const struct report_words *words; /* NULL: those of the language model */
};

/* Mean and sample standard deviation over the finished runs; deviation is NAN below two of them. */
struct report_mean {
    int n;
    double mean, deviation, low, high;
};

struct report_row {
    struct report_mean validation, train, difference, tokens_per_s, changed, accuracy;
    struct report_mean reached; /* epochs until accuracy was REPORT_MARK; over the runs that came that far */
    double weights, gradients, states, bytes;
    uint64_t skipped;
};

/* The entry that this one is compared with: the first of its group. */
int report_reference(const struct report *report, int entry);
/* The finished run of an entry and seed, or NULL. */
const struct report_run *report_find_run(const struct report *report, int entry, uint64_t seed);
const struct report_words *report_words(const struct report *report);
const char *report_label(const struct report *report, int entry);
/* Differences are taken run by run against the reference's run of the same seed: their deviation is free of what the
 * seeds have in common. */
void report_row(const struct report *report, int entry, struct report_row *row);
int report_done(const struct report *report);

/* Reads "RECIPE>0.3,RECIPE~0.03" into check[0 .. *checks - 1]. 0, or -1 and one line. */
int report_parse_checks(const struct report *report, const char *text, struct report_check *check, int most,
                        int *checks, char *error, size_t error_bytes);
/* Judges all checks; the number that failed. */
int report_judge(struct report *report);
/* "adamw/bf16/bf16-sr: 1.1203 nat above adamw/f32/f32, wanted more than 0.3". */
void report_check_text(const struct report *report, const struct report_check *check, struct text *out);

/* One sentence computed from the table; empty before the reference and one other entry are done. */
void report_sentence(const struct report *report, struct text *out);
void report_table(const struct report *report, struct text *out);
void report_runs_csv(const struct report *report, struct text *out);
void report_history_csv(const struct report *report, struct text *out);
/* The report as a new document. */
void report_document(struct document *document, const struct report *report);
void report_html(const struct report *report, struct text *out);

int report_curve_add(struct report_curve *curve, double step, double loss); /* -1: out of memory */
void report_curve_free(struct report_curve *curve);

#endif
