#define HALFSTEP_ADVANCED
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif
#include <unistd.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "io/files.h"
#include "trainer/compare/compare_internal.h"

/* ---- Configuration and machine
 * ------------------------------------------------------------------------------------ */

static void add_pair(struct compare *compare, struct report_pair *pair, int most, int *n, const char *name,
                     const char *value)
{
    if (!value) compare->subtitle.failed = 1;
    else if (*n < most) pair[(*n)++] = (struct report_pair){name, value};
}

const char *compare_file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

void compare_fact(struct compare *compare, const char *name, const hstep_buffer *value)
{
    const char *kept = value->failed ? NULL : args_keep(&compare->args, text_string(value));
    add_pair(compare, compare->configuration, MAX_PAIRS, &compare->report.configurations, name, kept);
}

static void describe_configuration(struct compare *compare)
{
    struct report *report = &compare->report;
    struct option_group group = {"", compare->table.rows, compare->table.n, &compare->base};
    for (int i = 0; i < group.n; i++) {
        const struct option *option = &group.rows[i];
        hstep_buffer value = {0};
        if (option->kind == OPTION_HYPER_AS || !(option->flags & (OPTION_SAVED | OPTION_IDENTITY))) continue;
        if (strcmp(option->name, "data") == 0 || strcmp(option->name, "val") == 0 ||
            strcmp(option->name, "threads") == 0)
            continue;
        args_text(&group, option, &value);
        if (strcmp(option->name, "seed") == 0 && report->seeds > 1)
            hstep_append_format(&value, " to %llu",
                                (unsigned long long)compare->base.seed + (unsigned long long)report->seeds - 1);
        const char *text = text_string(&value);
        if (value.failed || option->initial || (text[0] && strcmp(text, "0") != 0))
            compare_fact(compare, option->name, &value);
        text_free(&value);
    }
}

static void processor_name(char *text, size_t text_bytes)
{
    text[0] = 0;
#ifdef __APPLE__
    if (sysctlbyname("machdep.cpu.brand_string", text, &text_bytes, NULL, 0) != 0) text[0] = 0;
#else
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[512];
    if (!file) return;
    while (!text[0] && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (!colon || strncmp(line, "model name", 10) != 0) continue;
        colon += strspn(colon, ": ");
        snprintf(text, text_bytes, "%.*s", (int)strcspn(colon, "\n"), colon);
    }
    fclose(file);
#endif
}

/* Adds a line to the description of the machine. */
static void machine_fact(struct compare *compare, const char *name, const char *value)
{
    add_pair(compare, compare->machine, COUNT_OF(compare->machine), &compare->report.machines, name, value);
}

static void describe_machine(struct compare *compare)
{
    struct args *args = &compare->args;
    int32_t version = halfstep_version();
    char value[1024];
    compare->report.machine = compare->machine;
    processor_name(value, sizeof value);
    if (value[0]) machine_fact(compare, "processor", args_keep(args, value));
    halfstep_cpu_features(value, sizeof value);
    machine_fact(compare, "features", args_keep(args, value));
    machine_fact(compare, "instruction set in use", halfstep_isa());
    int threads = compare->base.threads ? (int)compare->base.threads : halfstep_default_threads();
    machine_fact(compare, "threads", args_format(args, "%d", threads));
    machine_fact(
        compare, "halfstep",
        args_format(args, "%d.%d.%d, ABI %d", version / 10000, version / 100 % 100, version % 100, halfstep_abi()));
}

int compare_describe(struct compare *compare)
{
    struct report *report = &compare->report;
    report->title = compare->comparison->title;
    hstep_append_format(&compare->command, "halfstep");
    for (int i = 0; i < compare->comparison->argc; i++) {
        hstep_append_format(&compare->command, " ");
        text_add_shell(&compare->command, compare->comparison->argv[i]);
    }
    report->command = text_string(&compare->command);
    hstep_buffer *subtitle = &compare->subtitle;
    int recipes = report->entries / compare->batches;
    hstep_append_format(subtitle, "%d recipe%s, ", recipes, recipes == 1 ? "" : "s");
    if (compare->batches > 1) hstep_append_format(subtitle, "%d batch sizes, ", compare->batches);
    if (report->seeds > 1) hstep_append_format(subtitle, "%d seeds, ", report->seeds);
    report->configuration = compare->configuration;
    compare->kind->describe(compare, subtitle);
    report->subtitle = text_string(subtitle);
    describe_configuration(compare);
    describe_machine(compare);
    return compare->command.failed || subtitle->failed ? -1 : 0;
}

/* ---- Files ------------------------------------------------------------------------------------------------------- */

int compare_make_folder(const char *path, char *error, size_t error_bytes)
{
    char part[PATH_BYTES];
    hstep_error failure = hstep_make_error(error, error_bytes);
    int made;
    errno = path[0] ? ENAMETOOLONG : ENOENT;
    if (!path[0] || strlen(path) >= sizeof part) return hstep_fail_system(&failure, "write in the folder", path);
    snprintf(part, sizeof part, "%s", path);
    for (char *end = part; *end;) {
        end += strspn(end, "/");
        end += strcspn(end, "/");
        const char kept = *end;
        *end = 0;
        const int code = hstep_make_directory(part, &made, &failure);
        if (code) return code;
        *end = kept;
    }
    return access(part, W_OK | X_OK) ? hstep_fail_system(&failure, "write in the folder", path) : 0;
}

const char *compare_report_file(int index)
{
    static const char *const names[] = {"runs.csv", "history.csv", "report.json", "report.html"};
    return names[index];
}

static int write_one(const struct compare *compare, int index, hstep_buffer *text, char *error, size_t error_bytes)
{
    hstep_buffer path = {0};
    hstep_append_format(&path, "%s/%s", compare->options.out, compare_report_file(index));
    int bad = text->failed || path.failed;
    if (bad) snprintf(error, error_bytes, "%s: out of memory", compare_report_file(index));
    if (!bad) bad = halfstep_write_file_atomic(path.data, text->data, text->bytes, error, error_bytes) != HALFSTEP_OK;
    text_free(&path);
    text_free(text);
    return bad ? -1 : 0;
}

int compare_write_report(const struct compare *compare, char *error, size_t error_bytes)
{
    const struct report *report = &compare->report;
    hstep_buffer html = {0}, runs = {0}, history = {0}, object = {0};
    report_html(report, &html);
    report_runs_csv(report, &runs);
    report_history_csv(report, &history);
    struct document document;
    report_document(&document, report);
    document_write(&document, &object);
    int bad = write_one(compare, 0, &runs, error, error_bytes);
    if (!bad) bad = write_one(compare, 1, &history, error, error_bytes);
    if (!bad) bad = write_one(compare, 2, &object, error, error_bytes);
    if (!bad) bad = write_one(compare, 3, &html, error, error_bytes);
    /* Left over after an error. */
    text_free(&html);
    text_free(&object);
    text_free(&history);
    return bad;
}
