#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "compare_internal.h"

/* ---- What the report says about the circumstances ----------------------------------------------------------------------- */

static void add_pair(struct compare *compare, struct report_pair *pair, int most, int *n, const char *name, const char *value)
{
    const char *kept = args_keep(&compare->args, value);
    if (kept && *n < most) pair[(*n)++] = (struct report_pair){name, kept};
}

const char *compare_file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

void compare_fact(struct compare *compare, const char *name, const char *value)
{
    add_pair(compare, compare->configuration, MAX_PAIRS, &compare->report.configurations, name, value);
}

static void describe_configuration(struct compare *compare)
{
    struct report *report = &compare->report;
    struct option_group group = {"", compare->table.rows, compare->table.n, &compare->base};
    for (int i = 0; i < group.n; i++) {
        const struct option *option = &group.rows[i];
        char value[1024];
        if (option->kind == OPTION_HYPER_AS || !(option->flags & (OPTION_SAVED | OPTION_IDENTITY))) continue;
        if (strcmp(option->name, "data") == 0 || strcmp(option->name, "val") == 0 || strcmp(option->name, "threads") == 0) continue;
        args_text(&group, option, value, sizeof value);
        if (!option->initial && (!value[0] || strcmp(value, "0") == 0)) continue;
        if (strcmp(option->name, "seed") == 0 && report->seeds > 1)
            snprintf(value, sizeof value, "%llu to %llu", (unsigned long long)compare->base.seed,
                     (unsigned long long)compare->base.seed + (unsigned long long)report->seeds - 1);
        compare_fact(compare, option->name, value);
    }
}

static void processor_name(char *text, size_t text_bytes)
{
    char line[512];
    text[0] = 0;
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file) return;
    while (!text[0] && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (!colon || strncmp(line, "model name", 10) != 0) continue;
        colon += strspn(colon, ": ");
        snprintf(text, text_bytes, "%.*s", (int)strcspn(colon, "\n"), colon);
    }
    fclose(file);
}

static void describe_machine(struct compare *compare)
{
    struct report *report = &compare->report;
    int most = (int)(sizeof compare->machine / sizeof compare->machine[0]);
    int32_t version = halfstep_version();
    char value[1024];
    report->machine = compare->machine;
    processor_name(value, sizeof value);
    if (value[0]) add_pair(compare, compare->machine, most, &report->machines, "processor", value);
    halfstep_cpu_features(value, sizeof value);
    add_pair(compare, compare->machine, most, &report->machines, "features", value);
    add_pair(compare, compare->machine, most, &report->machines, "instruction set in use", halfstep_isa());
    snprintf(value, sizeof value, "%d", compare->base.threads ? (int)compare->base.threads : (int)halfstep_default_threads());
    add_pair(compare, compare->machine, most, &report->machines, "threads", value);
    snprintf(value, sizeof value, "%d.%d.%d, ABI %d", version / 10000, version / 100 % 100, version % 100, halfstep_abi());
    add_pair(compare, compare->machine, most, &report->machines, "halfstep", value);
}

void compare_describe(struct compare *compare)
{
    struct report *report = &compare->report;
    report->title = compare->comparison->title;
    text_add(&compare->command, "halfstep");
    for (int i = 0; i < compare->comparison->argc; i++) {
        text_add(&compare->command, " ");
        text_add_shell(&compare->command, compare->comparison->argv[i]);
    }
    report->command = compare->command.data ? compare->command.data : "";
    struct text *subtitle = &compare->subtitle;
    int recipes = report->entries / compare->batches;
    text_add(subtitle, "%d recipe%s, ", recipes, recipes == 1 ? "" : "s");
    if (compare->batches > 1) text_add(subtitle, "%d batch sizes, ", compare->batches);
    if (report->seeds > 1) text_add(subtitle, "%d seeds, ", report->seeds);
    report->configuration = compare->configuration;
    compare->kind->describe(compare, subtitle);
    report->subtitle = subtitle->data ? subtitle->data : "";
    describe_configuration(compare);
    describe_machine(compare);
}

/* ---- Files -------------------------------------------------------------------------------------------------------------- */

int compare_make_folder(const char *path)
{
    char part[PATH_BYTES];
    if (strlen(path) >= sizeof part) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(part, path);
    for (char *c = part + 1; *c; c++) {
        if (*c != '/') continue;
        *c = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST) return -1;
        *c = '/';
    }
    if (mkdir(part, 0777) != 0 && errno != EEXIST) return -1;
    struct stat status;
    if (stat(part, &status) != 0) return -1;
    if (!S_ISDIR(status.st_mode)) {
        errno = ENOTDIR;
        return -1;
    }
    return access(part, W_OK | X_OK);
}

static int write_one(const struct compare *compare, const char *name, struct text *text, char *error, size_t error_bytes)
{
    char path[PATH_BYTES];
    int bad = text->failed;
    if (bad) snprintf(error, error_bytes, "%s: out of memory", name);
    snprintf(path, sizeof path, "%s/%s", compare->options.out, name);
    if (!bad) bad = halfstep_write_file_atomic(path, text->data, text->n, error, error_bytes) != HALFSTEP_OK;
    text_free(text);
    return bad ? -1 : 0;
}

int compare_write_report(const struct compare *compare, char *error, size_t error_bytes)
{
    const struct report *report = &compare->report;
    struct text html = {0}, runs = {0}, history = {0}, object = {0};
    report_html(report, &html);
    report_runs_csv(report, &runs);
    report_history_csv(report, &history);
    json_t *json = report_json(report);
    char *dump = json_dumps(json, JSON_INDENT(2) | JSON_REAL_PRECISION(10));
    json_decref(json);
    if (dump) text_add(&object, "%s\n", dump);
    else object.failed = 1;
    free(dump);
    /* Each call frees its text, so all four are made whatever becomes of the first. */
    int bad = write_one(compare, "runs.csv", &runs, error, error_bytes);
    if (!bad) bad = write_one(compare, "history.csv", &history, error, error_bytes);
    if (!bad) bad = write_one(compare, "report.json", &object, error, error_bytes);
    if (!bad) bad = write_one(compare, "report.html", &html, error, error_bytes);
    text_free(&html);
    text_free(&object);
    text_free(&history);
    return bad;
}
