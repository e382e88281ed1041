#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "common/args/recipes.h"
#include "common/interrupt.h"
#include "trainer/compare/compare_internal.h"
#include "trainer/files/checkpoint.h"
#include "trainer/ranks/dist.h"

enum { RATE_BYTES = 320 };

static const struct option compare_rows[] = {
    {"recipes", OPTION_STRING, offsetof(struct compare_options, recipes), "R,R,...", NULL, 0, 0, 0, NULL,
     "recipes to compare; the first is the reference. R@LR has a learning rate of its own; other options of a recipe "
     "follow it: adamw/bf16-sr:lr=2e-4:clip=1"},
    {"seeds", OPTION_INTEGER, offsetof(struct compare_options, seeds), "N", "1", 1, REPORT_MAX_SEEDS, 0, NULL,
     "runs of each recipe, with seeds from --seed upwards"},
    {"out", OPTION_STRING, offsetof(struct compare_options, out), "DIR", "halfstep-compare", 0, 0, 0, NULL,
     "folder for report.html, report.json, runs.csv and history.csv"},
    {"expect", OPTION_STRING, offsetof(struct compare_options, expect), "R>X,R<X,R~X", NULL, 0, 0, 0, NULL, NULL},
    OPTION_JSON(struct compare_options),
    {"batch", OPTION_STRING, offsetof(struct compare_options, batches), "N,N,...", NULL, 0, 0, 0, NULL,
     "images per step; several sizes get a table and curves each"},
};

/* Options that may differ between the recipes of one comparison, besides the rule's hyper-parameters. All others
 * (shape, data, order, length, type of matrix products) are the same, so that recipes can be compared. */
static const char *const per_recipe[] = {
    "lr",        "schedule", "warmup",     "final-lr",  "weight-decay", "decay",       "decay-schedule", "clip",
    "gradients", "release",  "loss-scale", "generator", "hyper",        "accumulator", "scan",           "adamw-lr"};

/* ---- Recipes and batch sizes ------------------------------------------------------------------------------------- */

static const struct option *find_row(const struct run_options *table, const char *name)
{
    for (int i = 0; i < table->n; i++)
        if (strcmp(table->rows[i].name, name) == 0) return &table->rows[i];
    return NULL;
}

static int may_differ(const struct option *option)
{
    if (option->kind == OPTION_HYPER_AS) return 1;
    for (int i = 0; i < COUNT_OF(per_recipe); i++)
        if (strcmp(option->name, per_recipe[i]) == 0) return 1;
    return 0;
}

/* Sets one "name=value" or flag after a recipe. Like the functions below, it returns 0, or the exit status with an
 * error text. */
static int set_one(struct compare *compare, struct run_config *config, const char *word, char *error,
                   size_t error_bytes)
{
    char name[128];
    const char *equals = strchr(word, '=');
    snprintf(name, sizeof name, "%.*s", (int)(equals ? equals - word : (long)strlen(word)), word);
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
    const struct option *option = find_row(&compare->table, name);
    if (!option || !may_differ(option)) {
        snprintf(error, error_bytes, "\"%s\" is %s", name,
                 option ? "the same for all recipes of a comparison" : "not an option");
        return 2;
    }
    if ((option->kind == OPTION_FLAG) != !equals) {
        snprintf(error, error_bytes, equals ? "\"%s\" takes no value" : "\"%s\" needs a value", name);
        return 2;
    }
    struct option_group group = {"", compare->table.rows, compare->table.n, config};
    return args_set(&compare->args, &group, option, equals ? equals + 1 : "1", error, error_bytes);
}

/* Sets the learning rate of a recipe in one group, from R@LR, or from R@LR/LR/LR with one rate per batch size. */
static int set_rate(struct compare *compare, struct run_config *config, const char *rates, int group,
                    char text[RATE_BYTES], char *error, size_t error_bytes)
{
    int n = 1;
    for (const char *c = rates; *c; c++) n += *c == '/';
    if (n > 1 && n != compare->batches) {
        snprintf(error, error_bytes, "@%s has %d learning rates for %d batch size%s", rates, n, compare->batches,
                 compare->batches == 1 ? "" : "s");
        return 2;
    }
    for (int i = 0; n > 1 && i < group; i++) rates = strchr(rates, '/') + 1;
    size_t length = strcspn(rates, "/");
    if (length > RATE_BYTES - 2) {
        snprintf(error, error_bytes, "@%.20s... is too long for a learning rate", rates);
        return 2;
    }
    char word[RATE_BYTES + 3];
    snprintf(text, RATE_BYTES, "@%.*s", (int)length, rates);
    snprintf(word, sizeof word, "lr=%s", text + 1);
    return set_one(compare, config, word, error, error_bytes);
}

/* Adds one recipe of one group, from "RECIPE@RATES:OPTION:OPTION". */
static int add_entry(struct compare *compare, const char *typed, int group, char *error, size_t error_bytes)
{
    struct report *report = &compare->report;
    if (report->entries == REPORT_MAX_ENTRIES) {
        snprintf(error, error_bytes, "more than %d recipes; compare fewer", REPORT_MAX_ENTRIES);
        return 2;
    }
    struct report_entry *entry = &report->entry[report->entries];
    struct run_config *config = &compare->config[report->entries];
    char full[RECIPE_BYTES], rate[RATE_BYTES] = "", why[400], copy[512];
    if (snprintf(copy, sizeof copy, "%s", typed) >= (int)sizeof copy) {
        snprintf(error, error_bytes, "\"%.20s...\" is too long; a recipe and its options have at most 511 characters",
                 typed);
        return 2;
    }
    const char *name = strchr(typed, ':');
    char *special = strchr(copy, ':');
    if (special) *special++ = 0;
    char *rates = strchr(copy, '@');
    if (rates) *rates++ = 0;
    if (recipe_check(copy, full, why, sizeof why) != 0) {
        snprintf(error, error_bytes, "%s", why);
        return 2;
    }
    *config = compare->base;
    config->recipe = args_keep(&compare->args, full);
    if (!config->recipe) return no_memory(error, error_bytes);
    if (compare->kind->batches) config->batch = compare->batch[group];
    int status = rates ? set_rate(compare, config, rates, group, rate, why, sizeof why) : 0;
    for (char *word = special; word && !status;) {
        char *next = strchr(word, ':');
        if (next) *next++ = 0;
        status = set_one(compare, config, word, why, sizeof why);
        word = next;
    }
    if (status) {
        snprintf(error, error_bytes, "%s: %s", typed, why);
        return status;
    }
    run_config_settle(config);
    char batch[32] = "";
    if (compare->batches > 1) snprintf(batch, sizeof batch, ":batch=%lld", (long long)config->batch);
    entry->label = args_format(&compare->args, "%s%s%s", full, rate, name ? name : "");
    entry->name = args_format(&compare->args, "%s%s%s%s", full, rate, name ? name : "", batch);
    entry->typed = args_format(&compare->args, "%s%s", typed, batch);
    entry->recipe = config->recipe;
    entry->compute = config->compute;
    entry->gradients = config->gradients;
    entry->group = group;
    if (!entry->typed || !entry->name || !entry->label) return no_memory(error, error_bytes);
    for (int i = 0; i < report->entries; i++)
        if (strcmp(report->entry[i].name, entry->name) == 0) {
            snprintf(error, error_bytes, "%s appears twice; remove one", entry->name);
            return 2;
        }
    report->entries++;
    return 0;
}

static int add_entries(struct compare *compare, char *error, size_t error_bytes)
{
    char *list = strdup(compare->options.recipes);
    int status = list ? 0 : no_memory(error, error_bytes);
    for (int group = 0; group < compare->batches && !status; group++) {
        strcpy(list, compare->options.recipes);
        for (char *at = list; at && *at && !status;) {
            char *next = strchr(at, ',');
            if (next) *next++ = 0;
            if (*at) status = add_entry(compare, at, group, error, error_bytes);
            at = next;
        }
    }
    free(list);
    if (!status && compare->report.entries == 0) {
        snprintf(error, error_bytes, "--recipes is empty");
        status = 2;
    }
    return status;
}

/* Parses --batch, such as "128,1024". */
static int add_batches(struct compare *compare, char *error, size_t error_bytes)
{
    compare->batches = 1;
    if (!compare->kind->batches) return 0;
    compare->batches = 0;
    for (const char *at = compare->options.batches; *at; at += *at == ',') {
        char word[32];
        double size;
        size_t n = strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", (int)n, at);
        at += n;
        if (n >= sizeof word || parse_number(word, &size) != 0 || size != floor(size) || size < 1 || size > 1 << 20) {
            snprintf(error, error_bytes, "\"%s\" is not a number of images from 1 to %d", word, 1 << 20);
            return 2;
        }
        for (int i = 0; i < compare->batches; i++)
            if (compare->batch[i] == (int64_t)size) {
                snprintf(error, error_bytes, "%s appears twice; remove one", word);
                return 2;
            }
        if (compare->batches == MAX_GROUPS) {
            snprintf(error, error_bytes, "more than %d batch sizes; compare fewer", MAX_GROUPS);
            return 2;
        }
        compare->batch[compare->batches] = (int64_t)size;
        compare->batch_name[compare->batches] = args_format(&compare->args, "batch %lld", (long long)size);
        if (!compare->batch_name[compare->batches++]) return no_memory(error, error_bytes);
    }
    if (!compare->batches) snprintf(error, error_bytes, "it is empty");
    compare->report.group = compare->batch_name;
    compare->report.groups = compare->batches;
    return compare->batches ? 0 : 2;
}

/* ---- Runs -------------------------------------------------------------------------------------------------------- */

int compare_keep(struct report_run *run, const struct run_result *result)
{
    double params = result->params > 0 ? (double)result->params : 1;
    run->train_loss = result->train_loss;
    run->validation_loss = result->val_loss;
    run->seconds = result->seconds;
    run->weights = (double)result->weight_bytes / params;
    run->gradients = (double)result->gradient_bytes / params;
    run->states = (double)result->state_bytes / params;
    run->changed = result->weights_changed;
    run->skipped = result->skipped_steps;
    run->done = !run->json.failed;
    return run->done ? 0 : -1;
}

/* True if this run has a checkpoint to resume, or one that does not open, which the run then refuses. */
static int has_saved(const char *checkpoint)
{
    char why[512];
    halfstep_checkpoint *saved;
    int code = checkpoint_open_quickly(&saved, checkpoint, why, sizeof why);
    if (code == HALFSTEP_OK) halfstep_close_checkpoint(saved);
    return code != HALFSTEP_ERROR_NAME;
}

/* Sets the run's own log and checkpoint. */
static int set_paths(struct compare *compare, const struct report_run *run, struct run_config *config,
                     struct run_paths *paths, char *error, size_t error_bytes)
{
    if (compare_name_paths(compare, run, paths) != 0) return no_memory(error, error_bytes);
    if (config->log) config->log = paths->log;
    if (!config->checkpoint) return 0;
    config->checkpoint = paths->checkpoint;
    if (config->resume) config->resume = has_saved(config->checkpoint);
    return 0;
}

static void announce(struct compare *compare, struct progress *progress, int at, double started)
{
    const struct report *report = &compare->report;
    hstep_buffer line = {0};
    if (compare->base.quiet) return;
    hstep_append_format(&line, "run %d of %d: %s", at + 1, report->runs, report->entry[report->run[at].entry].name);
    if (report->seeds > 1) hstep_append_format(&line, ", seed %llu", (unsigned long long)report->run[at].seed);
    if (at) {
        long left = lround((progress_clock() - started) / at * (report->runs - at));
        hstep_append_format(&line, " (about %ld:%02ld left in all)", left / 60, left % 60);
    }
    if (line.data) progress_note(progress, "%s", line.data);
    text_free(&line);
}

/* Keeps why a run failed, for the report, and says so if there are others. */
static void keep_failure(struct compare *compare, struct progress *progress, struct report_run *run, const char *error)
{
    run->error = args_keep(&compare->args, error);
    if (!run->error) run->error = "out of memory";
    if (compare->report.runs > 1)
        progress_note(progress, "warning: %s failed: %s", compare->report.entry[run->entry].name, error);
}

/* Says how many runs have failed, and why the first one has. Returns 1, or 0 if none has. */
static int tell_failures(const struct compare *compare)
{
    const struct report *report = &compare->report;
    const struct report_run *first = NULL;
    int failed = 0;
    for (int i = report->runs - 1; i >= 0; i--)
        if (report->run[i].error) first = &report->run[i], failed++;
    if (!failed) return 0;
    return failure(compare->comparison->command, "%d of %d runs failed; %s: %s", failed, report->runs,
                   report->entry[first->entry].name, first->error);
}

static int train_all(struct compare *compare)
{
    struct report *report = &compare->report;
    const char *command = compare->comparison->command;
    struct progress progress;
    char error[1200];
    progress_open(&progress, stderr, compare->base.quiet);
    double started = progress_clock();
    for (int i = 0; i < report->runs; i++) {
        struct report_run *run = &report->run[i];
        struct run_config config = compare->config[run->entry];
        struct run_paths paths;
        config.seed = run->seed;
        int status = set_paths(compare, run, &config, &paths, error, sizeof error);
        if (!status) {
            announce(compare, &progress, i, started);
            progress_label(&progress, report->entry[run->entry].name);
            status = compare->kind->train(compare, &config, &progress, run, error, sizeof error);
        }
        const char *name = report->entry[run->entry].name;
        if (status == 1 && run->done) progress_note(&progress, "%s: diverged: %s", name, error);
        else if (status == 1) keep_failure(compare, &progress, run, error);
        else if (status != 0) {
            failure(command, "%s: %s", name, error);
            if (report_done(report))
                failure(command, "%d of %d runs are in %s/report.html", report_done(report), report->runs,
                        compare->options.out);
            return status;
        }
        /* A later write may succeed, so a failed one only warns. */
        if (i + 1 < report->runs && report_done(report) && compare_write_report(compare, error, sizeof error) != 0)
            progress_note(&progress, "warning: %s; the comparison goes on", error);
    }
    return report_done(report) ? 0 : tell_failures(compare);
}

static int plan_runs(struct compare *compare)
{
    struct report *report = &compare->report;
    report->seeds = (int)compare->options.seeds;
    report->runs = report->seeds * report->entries;
    report->run = calloc((size_t)report->runs, sizeof *report->run);
    if (!report->run) return -1;
    for (int i = 0; i < report->runs; i++) {
        report->run[i].entry = i % report->entries;
        report->run[i].seed = compare->base.seed + (uint64_t)(i / report->entries);
        report->run[i].changed = NAN;
    }
    return 0;
}

/* Reports an error. With status 2 it names the option. */
static int refuse(const struct compare *compare, const char *option, int status, const char *error)
{
    char line[1400];
    snprintf(line, sizeof line, "%s%s%s", status == 2 ? option : "", status == 2 ? ": " : "", error);
    report_failure(compare->comparison->command, status, line);
    return status;
}

static int prepare(struct compare *compare)
{
    const char *command = compare->comparison->command;
    char error[1200];
    int status = compare->kind->complete(compare, error, sizeof error);
    if (status) {
        report_failure(command, status, error);
        return status;
    }
    if ((status = add_batches(compare, error, sizeof error)) != 0) return refuse(compare, "--batch", status, error);
    if ((status = add_entries(compare, error, sizeof error)) != 0) return refuse(compare, "--recipes", status, error);
    if (compare->options.expect && report_parse_checks(&compare->report, compare->options.expect, compare->check,
                                                       MAX_CHECKS, &compare->checks, error, sizeof error) != 0)
        return usage_error(command, "--expect: %s", error);
    if (plan_runs(compare) != 0) return failure(command, "out of memory");
    if ((status = compare_check_paths(compare, error, sizeof error)) != 0) {
        report_failure(command, status, error);
        return status;
    }
    if (compare->kind->load(compare, error, sizeof error) != 0) return failure(command, "%s", error);
    if (compare_make_folder(compare->options.out, error, sizeof error) != 0)
        return failure(command, "--out: %s", error);
    if (compare->base.checkpoint && compare_make_folder(compare->base.checkpoint, error, sizeof error) != 0)
        return failure(command, "--checkpoint: %s", error);
    return compare_describe(compare) == 0 ? 0 : failure(command, "out of memory");
}

/* ---- Conclusion
 * --------------------------------------------------------------------------------------------------- */

/* Returns 0, or -1 if out of memory. */
static int print_outcome(const struct compare *compare, FILE *out)
{
    hstep_buffer text = {0};
    report_table(&compare->report, &text);
    hstep_append_format(&text, "Matrix products in %s for every recipe.\n\nreport: ", compare->base.compute);
    text_add_plain(&text, compare->options.out);
    hstep_append_format(&text, "/report.html\n");
    report_sentence(&compare->report, &text);
    int bad = text.failed;
    if (!bad) fprintf(out, "%s%s", text.data, text.data[text.bytes - 1] == '\n' ? "" : "\n");
    text_free(&text);
    return bad ? -1 : 0;
}

static int print_object(const struct compare *compare)
{
    struct document document;
    hstep_buffer path = {0};
    report_document(&document, &compare->report);
    hstep_append_format(&path, "%s/report.html", compare->options.out);
    put_text(&document, document.root, "report", text_string(&path));
    document.failed |= path.failed;
    text_free(&path);
    return document_print(&document);
}

static int conclude(struct compare *compare)
{
    struct report *report = &compare->report;
    const char *command = compare->comparison->command;
    char error[1200];
    report->check = compare->check;
    report->checks = compare->checks;
    int failed = report_judge(report), status = 0, bad = 0;
    /* The result is printed even if it cannot be written. */
    if (compare_write_report(compare, error, sizeof error) != 0) status = failure(command, "%s", error);
    if (compare->options.json) {
        if (!compare->base.quiet) print_outcome(compare, stderr);
        bad = print_object(compare);
    } else if (print_outcome(compare, stdout) != 0) {
        bad = failure(command, "out of memory");
    }
    fflush(stdout);
    if (bad || tell_failures(compare)) status = 1;
    for (int i = 0; i < report->checks; i++) {
        hstep_buffer line = {0};
        const int entry = report->check[i].entry;
        /* A recipe that failed met nothing, and has been told. */
        if (report->check[i].passed || report_error(report, entry) ||
            report_error(report, report_reference(report, entry)))
            continue;
        report_check_text(report, &report->check[i], &line);
        status = failure(command, "expectation not met: %s", text_string(&line));
        text_free(&line);
    }
    return failed ? 1 : status;
}

/* Lists the options of the comparison itself, and those of every run without --batch if the comparison has its own. */
static void make_options(struct compare *compare)
{
    const struct compare_kind *kind = compare->kind;
    int n = COUNT_OF(compare_rows) - (kind->batches == NULL);
    for (int i = 0; i < n; i++) {
        struct option *row = &compare->own[i];
        *row = compare_rows[i];
        if (strcmp(row->name, "recipes") == 0) row->initial = kind->recipes;
        if (strcmp(row->name, "expect") == 0) row->help = kind->expect;
        if (strcmp(row->name, "batch") == 0) row->initial = kind->batches;
    }
    kind->options_init(&compare->table);
    for (int i = 0; kind->batches && i < compare->table.n; i++) {
        if (strcmp(compare->table.rows[i].name, "batch") != 0) continue;
        memmove(&compare->table.rows[i], &compare->table.rows[i + 1],
                (size_t)(compare->table.n - i - 1) * sizeof compare->table.rows[0]);
        compare->table.n--;
        break;
    }
    compare->groups[0] = (struct option_group){"Comparison", compare->own, n, &compare->options};
    compare->groups[1] = (struct option_group){"Every run", compare->table.rows, compare->table.n, &compare->base};
}

int compare_run(const struct compare_kind *kind, const struct comparison *comparison, int argc, char **argv)
{
    struct compare *compare = calloc(1, sizeof *compare);
    if (!compare) return failure(comparison->command, "out of memory");
    const struct command command = {
        .name = comparison->command, .usage = kind->usage, .summary = kind->summary, .notes = kind->notes};
    compare->comparison = comparison;
    compare->kind = kind;
    compare->report.words = kind->words;
    compare->report.has_accuracies = kind->has_accuracies;
    make_options(compare);
    int status = args_parse(&compare->args, &command, compare->groups, 2, argc, argv);
    if (status == ARGS_RUN) {
        status = dist_refuse(comparison->command);
        if (status == 0) status = prepare(compare);
        /* Until now there was nothing to save, so a signal ended the program. */
        if (status == 0) interrupt_install();
        if (status == 0) status = train_all(compare);
        if (status == 0) status = conclude(compare);
        for (int i = 0; i < compare->report.runs && compare->report.run; i++) {
            report_curve_free(&compare->report.run[i].train);
            report_curve_free(&compare->report.run[i].validation);
            report_curve_free(&compare->report.run[i].accuracies);
            document_free(&compare->report.run[i].json);
        }
        free(compare->report.run);
        kind->unload(compare);
        text_free(&compare->command);
        text_free(&compare->subtitle);
        args_free(&compare->args);
    }
    free(compare);
    return status;
}
