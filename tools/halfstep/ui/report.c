#include "ui/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Below this many nat the sentence speaks of "within", above of "above" and "below". */
#define CLOSE 0.03

int report_curve_add(struct report_curve *curve, double step, double loss)
{
    if ((curve->n & (curve->n - 1)) == 0) { /* full at every power of two */
        size_t size = (curve->n ? 2 * (size_t)curve->n : 1) * sizeof(double);
        double *steps = realloc(curve->step, size);
        if (steps) curve->step = steps;
        double *losses = realloc(curve->loss, size);
        if (losses) curve->loss = losses;
        if (!steps || !losses) return -1;
    }
    curve->step[curve->n] = step;
    curve->loss[curve->n++] = loss;
    return 0;
}

void report_curve_free(struct report_curve *curve)
{
    free(curve->step);
    free(curve->loss);
    memset(curve, 0, sizeof *curve);
}

/* ---- Statistics ------------------------------------------------------------------------------------------------------ */

static void mean_of(struct report_mean *out, const double *value, int n)
{
    double sum = 0, squares = 0;
    *out = (struct report_mean){n, NAN, NAN, NAN, NAN};
    if (!n) return;
    out->low = out->high = value[0];
    for (int i = 0; i < n; i++) {
        sum += value[i];
        if (!(value[i] >= out->low)) out->low = value[i];
        if (!(value[i] <= out->high)) out->high = value[i];
    }
    out->mean = sum / n;
    for (int i = 0; i < n; i++) squares += (value[i] - out->mean) * (value[i] - out->mean);
    if (n > 1) out->deviation = sqrt(squares / (n - 1));
}

static const struct report_run *find_run(const struct report *report, int entry, uint64_t seed)
{
    for (int i = 0; i < report->runs; i++)
        if (report->run[i].done && report->run[i].entry == entry && report->run[i].seed == seed) return &report->run[i];
    return NULL;
}

void report_row(const struct report *report, int entry, struct report_row *row)
{
    memset(row, 0, sizeof *row);
    size_t most = (size_t)report->runs + 1;
    double *value = calloc(5 * most, sizeof *value);
    if (!value) return;
    double *train = value + most, *difference = value + 2 * most, *speed = value + 3 * most, *changed = value + 4 * most;
    int n = 0, pairs = 0, known = 0, timed = 0;
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done || run->entry != entry) continue;
        value[n] = run->validation_loss;
        train[n] = run->train_loss;
        if (isfinite(run->tokens_per_s)) speed[timed++] = run->tokens_per_s;
        if (!isnan(run->changed)) changed[known++] = run->changed;
        n++;
        row->skipped += run->skipped;
        row->weights = run->weights;
        row->gradients = run->gradients;
        row->states = run->states;
        row->bytes = run->weights + run->gradients + run->states;
        const struct report_run *reference = find_run(report, 0, run->seed);
        if (reference) difference[pairs++] = run->validation_loss - reference->validation_loss;
    }
    mean_of(&row->validation, value, n);
    mean_of(&row->train, train, n);
    mean_of(&row->tokens_per_s, speed, timed);
    mean_of(&row->difference, difference, pairs);
    mean_of(&row->changed, changed, known);
    free(value);
}

int report_done(const struct report *report)
{
    int done = 0;
    for (int i = 0; i < report->runs; i++) done += report->run[i].done;
    return done;
}

/* ---- Checks ---------------------------------------------------------------------------------------------------------- */

static int find_entry(const struct report *report, const char *name, size_t length)
{
    for (int i = 0; i < report->entries; i++) {
        const char *names[2] = {report->entry[i].name, report->entry[i].typed};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == length && memcmp(names[k], name, length) == 0) return i;
    }
    return -1;
}

int report_parse_checks(const struct report *report, const char *text, struct report_check *check, int most, int *checks,
                        char *error, size_t error_bytes)
{
    *checks = 0;
    for (const char *at = text; *at; at += *at == ',') {
        size_t length = strcspn(at, ","), name = strcspn(at, "<>~,");
        char *end = NULL;
        if (name == length) {
            snprintf(error, error_bytes, "\"%.*s\" has no >, < or ~", (int)length, at);
            return -1;
        }
        double bound = strtod(at + name + 1, &end);
        if (end == at + name + 1 || end != at + length || !isfinite(bound)) {
            snprintf(error, error_bytes, "\"%.*s\" does not end in a number", (int)length, at);
            return -1;
        }
        int entry = find_entry(report, at, name);
        if (entry < 0) {
            snprintf(error, error_bytes, "\"%.*s\" is not one of the recipes of this comparison", (int)name, at);
            return -1;
        }
        if (*checks == most) {
            snprintf(error, error_bytes, "more than %d demands", most);
            return -1;
        }
        check[(*checks)++] = (struct report_check){entry, at[name], bound, NAN, 0};
        at += length;
    }
    return 0;
}

int report_judge(struct report *report)
{
    int failed = 0;
    for (int i = 0; i < report->checks; i++) {
        struct report_check *check = &report->check[i];
        struct report_row row;
        report_row(report, check->entry, &row);
        check->value = row.difference.mean;
        /* NAN, the value of a run that diverged, satisfies none of them. */
        check->passed = check->relation == '>' ? check->value > check->bound
                      : check->relation == '<' ? check->value < check->bound
                                               : fabs(check->value) <= check->bound;
        failed += !check->passed;
    }
    return failed;
}

void report_check_text(const struct report *report, const struct report_check *check, struct text *out)
{
    const char *wanted = check->relation == '>' ? "more than" : check->relation == '<' ? "less than" : "within";
    text_add(out, "%s: ", report->entry[check->entry].name);
    if (isfinite(check->value))
        text_add(out, "%.4f nat %s %s", fabs(check->value), check->value < 0 ? "below" : "above", report->entry[0].name);
    else
        text_add(out, "no finite difference to %s", report->entry[0].name);
    text_add(out, ", wanted %s %g%s", wanted, check->bound, check->relation == '~' ? " of it" : "");
}

/* ---- The sentence ---------------------------------------------------------------------------------------------------- */

static void list_separator(struct text *out, int position, int n)
{
    if (position) text_add(out, position == n - 1 ? " and " : ", ");
}

void report_sentence(const struct report *report, struct text *out)
{
    struct report_row row[REPORT_MAX_ENTRIES];
    int close[REPORT_MAX_ENTRIES], n_close = 0, clauses = 0;
    double widest = 0;
    for (int i = 0; i < report->entries; i++) report_row(report, i, &row[i]);
    if (report->entries < 2 || !row[0].validation.n) return;
    if (!isfinite(row[0].validation.mean)) {
        text_add(out, "The reference %s diverged.", report->entry[0].name);
        return;
    }
    for (int i = 1; i < report->entries; i++) {
        double difference = row[i].difference.mean;
        if (!row[i].difference.n) continue;
        if (isfinite(difference) && fabs(difference) < CLOSE) {
            close[n_close++] = i;
            widest = fmax(widest, fabs(difference));
            continue;
        }
        text_add(out, "%s%s ", clauses++ ? "; " : "", report->entry[i].name);
        if (!isfinite(difference)) text_add(out, "diverged");
        else text_add(out, "ends %.2f nat %s %s", fabs(difference), difference > 0 ? "above" : "below", report->entry[0].name);
    }
    if (n_close) {
        text_add(out, "%s", clauses++ ? "; " : "");
        for (int i = 0; i < n_close; i++) {
            list_separator(out, i, n_close);
            text_add(out, "%s", report->entry[close[i]].name);
        }
        text_add(out, " %s within %.3f nat of %s, with ", n_close > 1 ? "end" : "ends",
                 fmax(ceil(widest * 1000 - 1e-6) / 1000, 0.001), clauses > 1 ? "it" : report->entry[0].name);
        for (int i = 0; i < n_close; i++) {
            list_separator(out, i, n_close);
            text_add(out, "%.0f %%", 100 * row[close[i]].bytes / row[0].bytes);
        }
        text_add(out, " of its bytes per parameter");
    }
    if (clauses) text_add(out, ".");
}

/* ---- The table on a terminal ------------------------------------------------------------------------------------------ */

static const char *const headings[] = {"recipe",  "compute", "gradients",        "val loss", "difference", "B/param",
                                       "tokens/s", "weights changed, %", "skipped steps"};
#define COLUMNS ((int)(sizeof headings / sizeof headings[0]))

static void plus_minus(char *cell, size_t size, const char *format, double mean, double spread, int decimals)
{
    int n = snprintf(cell, size, format, mean);
    if (isfinite(spread) && n > 0 && (size_t)n < size) snprintf(cell + n, size - (size_t)n, " ± %.*f", decimals, spread);
}

static void make_cells(const struct report *report, int entry, char cell[COLUMNS][96])
{
    struct report_row row;
    report_row(report, entry, &row);
    for (int c = 0; c < COLUMNS; c++) strcpy(cell[c], "-");
    snprintf(cell[0], 96, "%s", report->entry[entry].name);
    snprintf(cell[1], 96, "%s", report->entry[entry].compute);
    snprintf(cell[2], 96, "%s", report->entry[entry].gradients);
    if (!row.validation.n) return;
    plus_minus(cell[3], 96, "%.4f", row.validation.mean, row.validation.deviation, 4);
    if (entry == 0) strcpy(cell[4], "reference");
    else if (row.difference.n)
        plus_minus(cell[4], 96, "%+.4f", row.difference.mean, row.difference.deviation / sqrt(row.difference.n), 4);
    snprintf(cell[5], 96, "%.3f", row.bytes);
    if (row.tokens_per_s.n) snprintf(cell[6], 96, "%.0f", row.tokens_per_s.mean);
    if (row.changed.n) snprintf(cell[7], 96, "%.2f", 100 * row.changed.mean);
    snprintf(cell[8], 96, "%llu", (unsigned long long)row.skipped);
}

/* printf counts bytes, a terminal counts characters. */
static int characters(const char *text)
{
    int n = 0;
    for (; *text; text++) n += ((unsigned char)*text & 0xC0) != 0x80;
    return n;
}

static void add_cell(struct text *out, const char *cell, int width, int right)
{
    int pad = width - characters(cell);
    text_add(out, "%*s%s%*s", right ? pad : 0, "", cell, right ? 0 : pad, "");
}

void report_table(const struct report *report, struct text *out)
{
    char cell[COLUMNS][96];
    int width[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) width[c] = characters(headings[c]);
    for (int i = 0; i < report->entries; i++) {
        make_cells(report, i, cell);
        for (int c = 0; c < COLUMNS; c++)
            if (characters(cell[c]) > width[c]) width[c] = characters(cell[c]);
    }
    for (int i = -1; i < report->entries; i++) {
        if (i >= 0) make_cells(report, i, cell);
        for (int c = 0; c < COLUMNS; c++) {
            if (c) text_add(out, "  ");
            add_cell(out, i < 0 ? headings[c] : cell[c], width[c], c > 2);
        }
        while (out->n && out->data[out->n - 1] == ' ') out->data[--out->n] = 0;
        text_add(out, "\n");
    }
    if (report->seeds > 1)
        text_add(out, "%d seeds: val loss is mean ± standard deviation; the difference to the reference is taken seed by "
                      "seed, mean ± standard error.\n", report->seeds);
}

/* ---- CSV and JSON ----------------------------------------------------------------------------------------------------- */

static void add_number(struct text *out, const char *format, double value)
{
    if (isfinite(value)) text_add(out, format, value);
    else if (!isnan(value)) text_add(out, value > 0 ? "inf" : "-inf");
    else text_add(out, "nan");
}

void report_runs_csv(const struct report *report, struct text *out)
{
    text_add(out, "run,recipe,compute,gradients,seed,train_loss,val_loss,difference,tokens_per_s,seconds,skipped_steps,"
                  "weights_bytes_per_param,gradients_bytes_per_param,states_bytes_per_param,total_bytes_per_param,"
                  "weights_changed\n");
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done) continue;
        const struct report_entry *entry = &report->entry[run->entry];
        const struct report_run *reference = find_run(report, 0, run->seed);
        text_add_csv(out, entry->name);
        text_add(out, ",%s,%s,%s,%llu,", entry->recipe, entry->compute, entry->gradients, (unsigned long long)run->seed);
        add_number(out, "%.9g", run->train_loss);
        text_add(out, ",");
        add_number(out, "%.9g", run->validation_loss);
        text_add(out, ",");
        if (reference) add_number(out, "%.9g", run->validation_loss - reference->validation_loss);
        text_add(out, ",");
        if (isfinite(run->tokens_per_s)) text_add(out, "%.1f", run->tokens_per_s);
        text_add(out, ",%.3f,%llu,%.6g,%.6g,%.6g,%.6g,", run->seconds, (unsigned long long)run->skipped, run->weights,
                 run->gradients, run->states, run->weights + run->gradients + run->states);
        if (!isnan(run->changed)) text_add(out, "%.9g", run->changed);
        text_add(out, "\n");
    }
}

static void add_history(struct text *out, const struct report_entry *entry, const struct report_run *run, const char *kind,
                        const struct report_curve *curve)
{
    for (int i = 0; i < curve->n; i++) {
        text_add_csv(out, entry->name);
        text_add(out, ",%llu,%s,%.0f,", (unsigned long long)run->seed, kind, curve->step[i]);
        add_number(out, "%.9g", curve->loss[i]);
        text_add(out, "\n");
    }
}

void report_history_csv(const struct report *report, struct text *out)
{
    text_add(out, "run,seed,kind,step,loss\n");
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done) continue;
        add_history(out, &report->entry[run->entry], run, "train", &run->train);
        add_history(out, &report->entry[run->entry], run, "validation", &run->validation);
    }
}

/* JSON has no NaN and no infinity. */
static json_t *real(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *mean_json(const struct report_mean *mean)
{
    json_t *object = json_object();
    json_object_set_new(object, "n", json_integer(mean->n));
    json_object_set_new(object, "mean", real(mean->mean));
    json_object_set_new(object, "standard_deviation", real(mean->deviation));
    json_object_set_new(object, "standard_error", real(mean->n ? mean->deviation / sqrt(mean->n) : NAN));
    json_object_set_new(object, "low", real(mean->low));
    json_object_set_new(object, "high", real(mean->high));
    return object;
}

static json_t *row_json(const struct report *report, int i)
{
    const struct report_entry *entry = &report->entry[i];
    struct report_row row;
    report_row(report, i, &row);
    json_t *object = json_object(), *bytes = json_object();
    json_object_set_new(object, "name", json_string(entry->name));
    json_object_set_new(object, "recipe", json_string(entry->recipe));
    json_object_set_new(object, "compute", json_string(entry->compute));
    json_object_set_new(object, "gradients", json_string(entry->gradients));
    json_object_set_new(object, "val_loss", mean_json(&row.validation));
    json_object_set_new(object, "train_loss", mean_json(&row.train));
    json_object_set_new(object, "difference", mean_json(&row.difference));
    json_object_set_new(bytes, "weights", real(row.weights));
    json_object_set_new(bytes, "gradients", real(row.gradients));
    json_object_set_new(bytes, "states", real(row.states));
    json_object_set_new(bytes, "total", real(row.bytes));
    json_object_set_new(object, "bytes_per_param", bytes);
    json_object_set_new(object, "tokens_per_s", mean_json(&row.tokens_per_s));
    json_object_set_new(object, "weights_changed", mean_json(&row.changed));
    json_object_set_new(object, "skipped_steps", json_integer((json_int_t)row.skipped));
    return object;
}

static json_t *pairs_json(const struct report_pair *pair, int n)
{
    json_t *object = json_object();
    for (int i = 0; i < n; i++) json_object_set_new(object, pair[i].name, json_string(pair[i].value));
    return object;
}

static json_t *check_json(const struct report *report, const struct report_check *check)
{
    json_t *object = json_object();
    char relation[2] = {check->relation, 0};
    json_object_set_new(object, "recipe", json_string(report->entry[check->entry].name));
    json_object_set_new(object, "relation", json_string(relation));
    json_object_set_new(object, "bound", json_real(check->bound));
    json_object_set_new(object, "difference", real(check->value));
    json_object_set_new(object, "passed", json_boolean(check->passed));
    return object;
}

json_t *report_json(const struct report *report)
{
    struct text sentence = {0};
    json_t *object = json_object(), *table = json_array(), *checks = json_array(), *runs = json_array();
    report_sentence(report, &sentence);
    for (int i = 0; i < report->entries; i++) json_array_append_new(table, row_json(report, i));
    for (int i = 0; i < report->checks; i++) json_array_append_new(checks, check_json(report, &report->check[i]));
    for (int i = 0; i < report->runs; i++)
        if (report->run[i].done && report->run[i].json) json_array_append(runs, report->run[i].json);
    json_object_set_new(object, "command", json_string(report->command));
    json_object_set_new(object, "sentence", json_string(sentence.n ? sentence.data : ""));
    json_object_set_new(object, "reference", json_string(report->entry[0].name));
    json_object_set_new(object, "complete", json_boolean(report_done(report) == report->runs));
    json_object_set_new(object, "configuration", pairs_json(report->configuration, report->configurations));
    json_object_set_new(object, "machine", pairs_json(report->machine, report->machines));
    json_object_set_new(object, "table", table);
    json_object_set_new(object, "checks", checks);
    json_object_set_new(object, "runs", runs);
    text_free(&sentence);
    return object;
}
