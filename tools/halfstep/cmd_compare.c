#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "commands.h"
#include "compare_internal.h"
#include "interrupt.h"
#include "recipes.h"

static const struct option compare_rows[] = {
    {"recipes", OPTION_STRING, offsetof(struct compare_options, recipes), "R,R,...",
     "adamw/f32,adamw/bf16,adamw/bf16-sr,adamw/bf16-kahan,adamw/bf16-sr/int8", 0, 0, 0, NULL,
     "what to compare; the first is the reference. Options of one recipe follow it: adamw/bf16-sr:lr=2e-4:release"},
    {"seeds", OPTION_INTEGER, offsetof(struct compare_options, seeds), "N", "1", 1, 1000, 0, NULL,
     "runs of each recipe, with seeds from --seed upwards"},
    {"out", OPTION_STRING, offsetof(struct compare_options, out), "DIR", "halfstep-compare", 0, 0, 0, NULL,
     "folder for report.html, report.json, runs.csv and history.csv"},
    {"expect", OPTION_STRING, offsetof(struct compare_options, expect), "R>X,R<X,R~X", NULL, 0, 0, 0, NULL,
     "end with status 1 unless these recipes end more than X nat above the reference, less than X above, within X of it"},
    OPTION_JSON(struct compare_options),
};

static const char notes[] =
    "Every recipe gets the same first weights, data, order and type of matrix products, so that only the storage differs.\n"
    "Runs follow one another, all recipes under one seed before the next seed; the report is renewed after each. With\n"
    "--checkpoint DIR every run saves into a folder of its own in DIR, and --resume goes on where each of them stopped.\n";

/* What may differ between the recipes of one comparison, beside the hyper-parameters of the rule. The rest (shape, data,
 * order, length, type of matrix products) is what makes them comparable. */
static const char *const per_recipe[] = {"lr",     "schedule",  "warmup",  "final-lr",   "weight-decay", "decay",
                                         "clip",   "gradients", "release", "loss-scale", "generator",    "hyper"};

/* ---- What is to be compared -------------------------------------------------------------------------------------------- */

static const struct option *find_row(const struct run_options *table, const char *name)
{
    for (int i = 0; i < table->n; i++)
        if (strcmp(table->rows[i].name, name) == 0) return &table->rows[i];
    return NULL;
}

static int may_differ(const struct option *option)
{
    if (option->kind == OPTION_HYPER_AS) return 1;
    for (size_t i = 0; i < sizeof per_recipe / sizeof per_recipe[0]; i++)
        if (strcmp(option->name, per_recipe[i]) == 0) return 1;
    return 0;
}

/* One "name=value" or flag after a recipe. */
static int set_one(struct compare *compare, struct run_config *config, const char *word, char *error, size_t error_bytes)
{
    char name[128];
    const char *equals = strchr(word, '=');
    snprintf(name, sizeof name, "%.*s", (int)(equals ? equals - word : (long)strlen(word)), word);
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
    const struct option *option = find_row(&compare->table, name);
    if (!option || !may_differ(option)) {
        snprintf(error, error_bytes, "\"%s\" is %s", name, option ? "the same for all recipes of a comparison" : "not an option");
        return -1;
    }
    if ((option->kind == OPTION_FLAG) != !equals) {
        snprintf(error, error_bytes, equals ? "\"%s\" takes no value" : "\"%s\" needs a value", name);
        return -1;
    }
    struct option_group group = {"", compare->table.rows, compare->table.n, config};
    return args_set(&compare->args, &group, option, equals ? equals + 1 : "1", error, error_bytes);
}

static int add_entry(struct compare *compare, char *typed, char *error, size_t error_bytes)
{
    struct report *report = &compare->report;
    if (report->entries == REPORT_MAX_ENTRIES) {
        snprintf(error, error_bytes, "more than %d recipes", REPORT_MAX_ENTRIES);
        return -1;
    }
    struct report_entry *entry = &report->entry[report->entries];
    struct run_config *config = &compare->config[report->entries];
    char full[RECIPE_BYTES], name[256], why[400];
    entry->typed = args_keep(&compare->args, typed);
    char *special = strchr(typed, ':');
    snprintf(name, sizeof name, "%s", special ? special : "");
    if (special) *special++ = 0;
    if (recipe_check(typed, full, why, sizeof why) != 0) {
        snprintf(error, error_bytes, "%s", why);
        return -1;
    }
    *config = compare->base;
    config->recipe = args_keep(&compare->args, full);
    for (char *word = special; word; ) {
        char *next = strchr(word, ':');
        if (next) *next++ = 0;
        if (set_one(compare, config, word, why, sizeof why) != 0) {
            snprintf(error, error_bytes, "%s: %s", typed, why);
            return -1;
        }
        word = next;
    }
    run_config_settle(config);
    struct text label = {0};
    text_add(&label, "%s%s", full, name);
    entry->name = label.failed ? NULL : args_keep(&compare->args, label.data);
    text_free(&label);
    entry->recipe = config->recipe;
    entry->compute = config->compute;
    entry->gradients = config->gradients;
    if (!entry->typed || !entry->recipe || !entry->name) {
        snprintf(error, error_bytes, "out of memory");
        return -1;
    }
    for (int i = 0; i < report->entries; i++)
        if (strcmp(report->entry[i].name, entry->name) == 0) {
            snprintf(error, error_bytes, "%s is there twice", entry->name);
            return -1;
        }
    report->entries++;
    return 0;
}

static int add_entries(struct compare *compare, char *error, size_t error_bytes)
{
    char *list = strdup(compare->options.recipes);
    int bad = list == NULL;
    if (bad) snprintf(error, error_bytes, "out of memory");
    for (char *at = list; at && *at && !bad;) {
        char *next = strchr(at, ',');
        if (next) *next++ = 0;
        bad = *at && add_entry(compare, at, error, error_bytes) != 0;
        at = next;
    }
    free(list);
    if (!bad && compare->report.entries == 0) {
        snprintf(error, error_bytes, "--recipes is empty");
        bad = 1;
    }
    return bad ? -1 : 0;
}

/* ---- Runs --------------------------------------------------------------------------------------------------------------- */

/* A name for a run's own files: "adamw-bf16-sr-int8-seed1". */
static void run_name(const struct report *report, const struct report_run *run, char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "%s-seed%llu", report->entry[run->entry].name, (unsigned long long)run->seed);
    for (char *c = text; *c; c++)
        if (strchr("/:=+", *c)) *c = '-';
}

static int keep_result(struct report_run *run, const struct run_result *result)
{
    double params = result->params > 0 ? (double)result->params : 1;
    run->train_loss = result->train_loss;
    run->validation_loss = result->val_loss;
    run->tokens_per_s = result->tokens_per_s;
    run->seconds = result->seconds;
    run->weights = (double)result->weight_bytes / params;
    run->gradients = (double)result->gradient_bytes / params;
    run->states = (double)result->state_bytes / params;
    run->changed = result->weights_changed;
    run->skipped = result->skipped_steps;
    for (size_t i = 0; i < result->history.n_points; i++)
        if (report_curve_add(&run->train, result->history.point[i].step, result->history.point[i].train_loss) != 0) return -1;
    for (size_t i = 0; i < result->history.n_validations; i++)
        if (report_curve_add(&run->validation, result->history.validation[i].step, result->history.validation[i].loss) != 0)
            return -1;
    run->json = run_result_json(result);
    run->done = run->json != NULL;
    return run->done ? 0 : -1;
}

/* Files that belong to one run of many: DIR/NAME, and FILE.csv as FILE-NAME.csv. */
static int set_paths(struct compare *compare, const struct report_run *run, struct run_config *config, char paths[2][PATH_BYTES],
                     char *error, size_t error_bytes)
{
    char name[320], why[512];
    run_name(&compare->report, run, name, sizeof name);
    if (config->log) {
        const char *dot = strrchr(compare_file_name(config->log), '.');
        int stem = (int)(dot ? dot - config->log : (long)strlen(config->log));
        if (snprintf(paths[0], PATH_BYTES, "%.*s-%s%s", stem, config->log, name, dot ? dot : "") >= PATH_BYTES) {
            snprintf(error, error_bytes, "--log: name too long");
            return -1;
        }
        config->log = paths[0];
    }
    if (!config->checkpoint) return 0;
    if (compare_make_folder(config->checkpoint) != 0) {
        snprintf(error, error_bytes, "%s: %s", config->checkpoint, strerror(errno));
        return -1;
    }
    if (snprintf(paths[1], PATH_BYTES, "%s/%s", config->checkpoint, name) >= PATH_BYTES) {
        snprintf(error, error_bytes, "--checkpoint: name too long");
        return -1;
    }
    config->checkpoint = paths[1];
    if (config->resume) {
        halfstep_checkpoint *saved;
        halfstep_open_options quick = {.struct_size = sizeof quick, .skip_contents = 1};
        int code = halfstep_open_checkpoint(&saved, config->checkpoint, &quick, why, sizeof why);
        if (code == HALFSTEP_OK) halfstep_close_checkpoint(saved);
        config->resume = code != HALFSTEP_ERROR_NAME; /* this run had not saved anything yet */
    }
    return 0;
}

static void announce(struct compare *compare, struct progress *progress, int at, double started)
{
    const struct report *report = &compare->report;
    const struct report_run *run = &report->run[at];
    struct text line = {0};
    if (compare->base.quiet) return;
    text_add(&line, "run %d of %d: %s", at + 1, report->runs, report->entry[run->entry].name);
    if (report->seeds > 1) text_add(&line, ", seed %llu", (unsigned long long)run->seed);
    if (at) {
        long left = lround((progress_clock() - started) / at * (report->runs - at));
        text_add(&line, " (about %ld:%02ld left in all)", left / 60, left % 60);
    }
    if (line.data) progress_note(progress, "%s", line.data);
    text_free(&line);
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
        struct run_result result;
        char paths[2][PATH_BYTES];
        config.seed = run->seed;
        if (set_paths(compare, run, &config, paths, error, sizeof error) != 0) return failure(command, "%s", error);
        announce(compare, &progress, i, started);
        progress_label(&progress, report->entry[run->entry].name);
        int status = train_run(&config, &compare->data, &progress, &result, error, sizeof error);
        if (status == 0 && keep_result(run, &result) != 0) {
            snprintf(error, sizeof error, "out of memory");
            status = 1;
        }
        run_result_free(&result);
        if (status != 0) {
            fprintf(stderr, "halfstep: %s: %s: %s\n", command, report->entry[run->entry].name, error);
            if (report_done(report))
                fprintf(stderr, "halfstep: %s: %d of %d runs are in %s/report.html\n", command, report_done(report),
                        report->runs, compare->options.out);
            return status;
        }
        if (i + 1 < report->runs && compare_write_report(compare, error, sizeof error) != 0) return failure(command, "%s", error);
    }
    return 0;
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

static int prepare(struct compare *compare)
{
    const char *command = compare->comparison->command;
    char error[1200];
    int status = run_config_complete(&compare->args, compare->groups, 2, &compare->base, error, sizeof error);
    if (status == 2) return usage_error(command, "%s", error);
    if (status != 0) return failure(command, "%s", error);
    /* Samples have no place in a report, so they are written only where asked for. */
    if (!args_given(&compare->args, "sample-bytes")) compare->base.sample_bytes = 0;
    if (add_entries(compare, error, sizeof error) != 0) return usage_error(command, "--recipes: %s", error);
    if (compare->options.expect && report_parse_checks(&compare->report, compare->options.expect, compare->check, MAX_CHECKS,
                                                       &compare->checks, error, sizeof error) != 0)
        return usage_error(command, "--expect: %s", error);
    if (run_data_load(&compare->base, &compare->data, error, sizeof error) != 0) return failure(command, "%s", error);
    if (plan_runs(compare) != 0) return failure(command, "out of memory");
    if (compare_make_folder(compare->options.out) != 0) return failure(command, "--out %s: %s", compare->options.out, strerror(errno));
    compare_describe(compare);
    return 0;
}

/* ---- The end ------------------------------------------------------------------------------------------------------------ */

static void print_outcome(const struct compare *compare, FILE *out)
{
    struct text text = {0};
    report_table(&compare->report, &text);
    text_add(&text, "Matrix products in %s for every recipe.\n\nreport: %s/report.html\n", compare->base.compute,
             compare->options.out);
    report_sentence(&compare->report, &text);
    if (text.data) fprintf(out, "%s%s", text.data, text.data[text.n - 1] == '\n' ? "" : "\n");
    text_free(&text);
}

static int conclude(struct compare *compare)
{
    struct report *report = &compare->report;
    const char *command = compare->comparison->command;
    char error[1200];
    report->check = compare->check;
    report->checks = compare->checks;
    int failed = report_judge(report), status = 0;
    if (compare_write_report(compare, error, sizeof error) != 0) return failure(command, "%s", error);
    if (compare->options.json) {
        if (!compare->base.quiet) print_outcome(compare, stderr);
        struct text path = {0};
        json_t *object = report_json(report);
        text_add(&path, "%s/report.html", compare->options.out);
        json_object_set_new(object, "report", json_string(path.data ? path.data : ""));
        text_free(&path);
        status = print_json(object);
    } else {
        print_outcome(compare, stdout);
        fflush(stdout);
    }
    for (int i = 0; i < report->checks; i++) {
        struct text line = {0};
        if (report->check[i].passed) continue;
        report_check_text(report, &report->check[i], &line);
        status = failure(command, "expectation not met: %s", line.data ? line.data : "");
        text_free(&line);
    }
    return failed ? 1 : status;
}

int compare_lm(const struct comparison *comparison, int argc, char **argv)
{
    struct compare *compare = calloc(1, sizeof *compare);
    if (!compare) return failure(comparison->command, "out of memory");
    const struct command command = {comparison->command, "--data FILE --recipes R,R,... [options]",
                                    "Trains the same model under several recipes and reports what the storage does to it: a "
                                    "table, one sentence, and a page with curves.",
                                    notes, 0, 0};
    compare->comparison = comparison;
    run_options_init(&compare->table);
    compare->groups[0] = (struct option_group){"Comparison", compare_rows, OPTION_COUNT(compare_rows), &compare->options};
    compare->groups[1] = (struct option_group){"Every run", compare->table.rows, compare->table.n, &compare->base};
    int status = args_parse(&compare->args, &command, compare->groups, 2, argc, argv);
    if (status == ARGS_RUN) {
        interrupt_install();
        status = prepare(compare);
        if (status == 0) status = train_all(compare);
        if (status == 0) status = conclude(compare);
        for (int i = 0; i < compare->report.runs && compare->report.run; i++) {
            report_curve_free(&compare->report.run[i].train);
            report_curve_free(&compare->report.run[i].validation);
            json_decref(compare->report.run[i].json);
        }
        free(compare->report.run);
        run_data_free(&compare->data);
        text_free(&compare->command);
        text_free(&compare->subtitle);
        args_free(&compare->args);
    }
    free(compare);
    return status;
}

int cmd_compare(int argc, char **argv)
{
    int help = argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0);
    if (!help && (argc < 2 || strcmp(argv[1], "lm") != 0))
        return argc < 2 ? usage_error("compare", "what to train is missing: halfstep compare lm")
                        : usage_error("compare", "unknown model %s; there is: lm", argv[1]);
    struct comparison comparison = {"compare lm", "halfstep compare lm", argc, argv};
    return help ? compare_lm(&comparison, argc, argv) : compare_lm(&comparison, argc - 1, argv + 1);
}
