/* The files of a comparison's runs, and the checks that they overwrite neither each other nor an input. */
#include <stdio.h>
#include <string.h>

#include "common/paths.h"
#include "trainer/compare/compare_internal.h"

/* Appends a name for the run's own files: "adamw-bf16-sr-int8-seed1". */
static void add_run_name(struct text *out, const struct report *report, const struct report_run *run)
{
    size_t first = out->n;
    text_add(out, "%s-seed%llu", report->entry[run->entry].name, (unsigned long long)run->seed);
    for (size_t i = first; i < out->n; i++)
        if (strchr("/:=+@", out->data[i])) out->data[i] = '-';
}

void compare_free_paths(struct run_paths *paths)
{
    text_free(&paths->log);
    text_free(&paths->checkpoint);
}

int compare_name_paths(const struct compare *compare, const struct report_run *run, struct run_paths *paths)
{
    const char *log = compare->base.log, *checkpoint = compare->base.checkpoint;
    memset(paths, 0, sizeof *paths);
    if (log) {
        const char *dot = strrchr(compare_file_name(log), '.');
        text_add(&paths->log, "%.*s-", (int)(dot ? dot - log : (long)strlen(log)), log);
        add_run_name(&paths->log, &compare->report, run);
        text_add(&paths->log, "%s", dot ? dot : "");
    }
    if (checkpoint) {
        text_add(&paths->checkpoint, "%s/", checkpoint);
        add_run_name(&paths->checkpoint, &compare->report, run);
    }
    return paths->log.failed || paths->checkpoint.failed ? -1 : 0;
}

/* Fails if two names differ only in characters that file names cannot have. */
static int check_names(const struct compare *compare, char *error, size_t error_bytes)
{
    const struct report *report = &compare->report;
    int status = 0;
    for (int i = 0; i < report->entries && !status; i++)
        for (int k = 0; k < i && !status; k++) {
            struct text one = {0}, other = {0};
            add_run_name(&one, report, &report->run[i]);
            add_run_name(&other, report, &report->run[k]);
            if (one.failed || other.failed) status = no_memory(error, error_bytes);
            else if (strcmp(one.data, other.data) == 0) status = 2;
            if (status == 2)
                snprintf(error, error_bytes, "%s and %s would write the same files, %s", report->entry[k].name,
                         report->entry[i].name, one.data);
            text_free(&one);
            text_free(&other);
        }
    return status;
}

int compare_check_paths(const struct compare *compare, char *error, size_t error_bytes)
{
    enum { REPORTS = 4 };
    const struct run_config *base = &compare->base;
    const struct named_path digits = {"--data", base->digits};
    struct text report[REPORTS] = {{0}};
    struct named_path outputs[REPORTS + 1];
    int status = base->log || base->checkpoint ? check_names(compare, error, error_bytes) : 0;
    for (int i = 0; i < REPORTS; i++) {
        text_add(&report[i], "%s/%s", compare->options.out, compare_report_file(i));
        if (report[i].failed) status = no_memory(error, error_bytes);
        outputs[i] = (struct named_path){"--out", text_string(&report[i])};
    }
    for (int i = 0; i < compare->report.runs && !status; i++) {
        struct run_paths paths;
        status = compare_name_paths(compare, &compare->report.run[i], &paths) == 0 ? 0 : no_memory(error, error_bytes);
        outputs[REPORTS] = (struct named_path){"--log", paths.log.data};
        if (!status) status = run_paths_check(base, NULL, outputs, REPORTS + 1, error, error_bytes);
        if (!status) status = paths_check(&digits, 1, outputs, REPORTS + 1, error, error_bytes);
        compare_free_paths(&paths);
        if (!base->log) break;
    }
    for (int i = 0; i < REPORTS; i++) text_free(&report[i]);
    return status;
}
