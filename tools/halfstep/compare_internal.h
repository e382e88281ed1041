/* What the files of the comparison share. */
#ifndef HALFSTEP_COMPARE_INTERNAL_H
#define HALFSTEP_COMPARE_INTERNAL_H

#include "args.h"
#include "compare.h"
#include "train.h"
#include "ui/report.h"

#define MAX_CHECKS 64
#define MAX_PAIRS (RUN_OPTIONS_MAX + 8)
#define PATH_BYTES 4096

struct compare_options {
    const char *recipes, *out, *expect;
    int64_t seeds;
    int json;
};

struct compare {
    const struct comparison *comparison;
    struct run_options table;
    struct args args;
    struct compare_options options;
    struct run_config base, config[REPORT_MAX_ENTRIES];
    struct option_group groups[2];
    struct run_data data;
    struct report report;
    struct report_check check[MAX_CHECKS];
    int checks;
    struct report_pair configuration[MAX_PAIRS], machine[8];
    struct text command, subtitle;
};

/* Title, command, configuration and machine of the report. */
void compare_describe(struct compare *compare);
/* Makes the folder and those above it. 0, or -1 with errno. */
int compare_make_folder(const char *path);
/* Replaces the four files in --out. 0, or -1 and one line. */
int compare_write_report(const struct compare *compare, char *error, size_t error_bytes);
/* The part of a path after the last slash. */
const char *compare_file_name(const char *path);

#endif
