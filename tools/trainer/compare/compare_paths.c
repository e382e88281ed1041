/* The files of a comparison's runs, and the checks that they overwrite neither each other nor an input. */
#include <stdio.h>
#include <string.h>

#include "common/paths.h"
#include "trainer/compare/compare_internal.h"

/* Returns a name for the run's own files, such as "adamw-bf16-sr-int8-seed1", or NULL without memory. */
static const char *run_name(struct compare *compare, const struct report_run *run)
{
    char *name = args_format(&compare->args, "%s-seed%llu", compare->report.entry[run->entry].name,
                             (unsigned long long)run->seed);
    for (char *c = name; c && *c; c++)
        if (strchr("/:=+@", *c)) *c = '-';
    return name;
}

int compare_name_paths(struct compare *compare, const struct report_run *run, struct run_paths *paths)
{
    const char *log = compare->base.log, *checkpoint = compare->base.checkpoint, *name = run_name(compare, run);
    *paths = (struct run_paths){NULL, NULL};
    if (!name) return -1;
    if (log) {
        const char *dot = strrchr(compare_file_name(log), '.');
        paths->log = args_format(&compare->args, "%.*s-%s%s", (int)(dot ? dot - log : (long)strlen(log)), log, name,
                                 dot ? dot : "");
    }
    if (checkpoint) paths->checkpoint = args_format(&compare->args, "%s/%s", checkpoint, name);
    return (log && !paths->log) || (checkpoint && !paths->checkpoint) ? -1 : 0;
}

/* Fails if two names differ only in characters that file names cannot have. */
static int check_names(struct compare *compare, char *error, size_t error_bytes)
{
    const struct report *report = &compare->report;
    const char *name[REPORT_MAX_ENTRIES];
    for (int i = 0; i < report->entries; i++) {
        name[i] = run_name(compare, &report->run[i]);
        if (!name[i]) return no_memory(error, error_bytes);
        for (int k = 0; k < i; k++) {
            if (strcmp(name[i], name[k]) != 0) continue;
            snprintf(error, error_bytes, "%s and %s would write the same files, %s", report->entry[k].name,
                     report->entry[i].name, name[i]);
            return 2;
        }
    }
    return 0;
}

int compare_check_paths(struct compare *compare, char *error, size_t error_bytes)
{
    enum { REPORTS = 4 };
    const struct run_config *base = &compare->base;
    const struct named_path digits = {"--data", base->digits};
    struct named_path outputs[REPORTS + 1];
    int status = base->log || base->checkpoint ? check_names(compare, error, error_bytes) : 0;
    for (int i = 0; i < REPORTS; i++) {
        const char *path = args_format(&compare->args, "%s/%s", compare->options.out, compare_report_file(i));
        if (!path) status = no_memory(error, error_bytes);
        outputs[i] = (struct named_path){"--out", path};
    }
    for (int i = 0; i < compare->report.runs && !status; i++) {
        struct run_paths paths;
        status = compare_name_paths(compare, &compare->report.run[i], &paths) == 0 ? 0 : no_memory(error, error_bytes);
        outputs[REPORTS] = (struct named_path){"--log", paths.log};
        if (!status) status = run_paths_check(base, NULL, outputs, REPORTS + 1, error, error_bytes);
        if (!status) status = paths_check(&digits, 1, outputs, REPORTS + 1, error, error_bytes);
        if (!base->log) break;
    }
    return status;
}
