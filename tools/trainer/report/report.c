#include "trainer/report/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Below this difference in nats the summary says "within", otherwise "above" or "below". */
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

int report_reference(const struct report *report, int entry)
{
    while (entry > 0 && report->entry[entry - 1].group == report->entry[entry].group) entry--;
    return entry;
}

const struct report_words *report_words(const struct report *report)
{
    static const struct report_words usual = {"validation loss", "val loss", "step", "tokens/s", ""};
    return report->words ? report->words : &usual;
}

const char *report_label(const struct report *report, int entry)
{
    return report->entry[entry].label ? report->entry[entry].label : report->entry[entry].name;
}

/* ---- Statistics -------------------------------------------------------------------------------------------------- */

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

const struct report_run *report_find_run(const struct report *report, int entry, uint64_t seed)
{
    for (int i = 0; i < report->runs; i++)
        if (report->run[i].done && report->run[i].entry == entry && report->run[i].seed == seed) return &report->run[i];
    return NULL;
}

const char *report_error(const struct report *report, int entry)
{
    for (int i = 0; i < report->runs; i++)
        if (report->run[i].error && report->run[i].entry == entry) return report->run[i].error;
    return NULL;
}

/* Returns the step at which a curve first reached `mark`, NAN if it never did. */
static double reached(const struct report_curve *curve, double mark)
{
    for (int i = 0; i < curve->n; i++)
        if (curve->loss[i] >= mark) return curve->step[i];
    return NAN;
}

void report_row(const struct report *report, int entry, struct report_row *row)
{
    memset(row, 0, sizeof *row);
    double value[REPORT_MAX_SEEDS], train[REPORT_MAX_SEEDS], difference[REPORT_MAX_SEEDS], speed[REPORT_MAX_SEEDS];
    double changed[REPORT_MAX_SEEDS], accuracy[REPORT_MAX_SEEDS], mark[REPORT_MAX_SEEDS];
    int n = 0, pairs = 0, known = 0, timed = 0, marks = 0, reference_entry = report_reference(report, entry);
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done || run->entry != entry || n == REPORT_MAX_SEEDS) continue;
        value[n] = run->validation_loss;
        train[n] = run->train_loss;
        accuracy[n] = run->accuracy;
        mark[marks] = reached(&run->accuracies, REPORT_MARK);
        marks += !isnan(mark[marks]);
        if (isfinite(run->tokens_per_s)) speed[timed++] = run->tokens_per_s;
        if (!isnan(run->changed)) changed[known++] = run->changed;
        n++;
        row->skipped += run->skipped;
        row->weights = run->weights;
        row->gradients = run->gradients;
        row->states = run->states;
        row->bytes = run->weights + run->gradients + run->states;
        const struct report_run *reference = report_find_run(report, reference_entry, run->seed);
        if (reference) difference[pairs++] = run->validation_loss - reference->validation_loss;
    }
    mean_of(&row->validation, value, n);
    mean_of(&row->train, train, n);
    mean_of(&row->tokens_per_s, speed, timed);
    mean_of(&row->difference, difference, pairs);
    mean_of(&row->changed, changed, known);
    mean_of(&row->accuracy, accuracy, report->has_accuracies ? n : 0);
    mean_of(&row->reached, mark, marks);
}

int report_done(const struct report *report)
{
    int done = 0;
    for (int i = 0; i < report->runs; i++) done += report->run[i].done;
    return done;
}

/* ---- Checks ------------------------------------------------------------------------------------------------------ */

static int find_entry(const struct report *report, const char *name, size_t length)
{
    for (int i = 0; i < report->entries; i++) {
        const char *names[2] = {report->entry[i].name, report->entry[i].typed};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == length && memcmp(names[k], name, length) == 0) return i;
    }
    return -1;
}

int report_parse_checks(const struct report *report, const char *text, struct report_check *check, int most,
                        int *checks, char *error, size_t error_bytes)
{
    *checks = 0;
    for (const char *at = text; *at; at += *at == ',') {
        size_t length = strcspn(at, ","), name = strcspn(at, "<>~,");
        char *end = NULL;
        if (name == length) {
            snprintf(error, error_bytes, "\"%.*s\" has no >, < or ~; write RECIPE>X, RECIPE<X or RECIPE~X", (int)length,
                     at);
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
            snprintf(error, error_bytes, "more than %d expectations; give fewer", most);
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
        if (report->has_accuracies) {
            struct report_row reference;
            report_row(report, report_reference(report, check->entry), &reference);
            check->value = 100 * (row.accuracy.mean - (check->relation == '~' ? reference.accuracy.mean : 0));
        }
        /* NAN, the value of a run that diverged, fails every check. */
        check->passed = check->relation == '>'   ? check->value > check->bound
                        : check->relation == '<' ? check->value < check->bound
                                                 : fabs(check->value) <= check->bound;
        failed += !check->passed;
    }
    return failed;
}

void report_check_text(const struct report *report, const struct report_check *check, hstep_buffer *out)
{
    const char *wanted = check->relation == '>' ? "more than" : check->relation == '<' ? "less than" : "within";
    const char *reference = report->entry[report_reference(report, check->entry)].name;
    hstep_append_format(out, "%s: ", report->entry[check->entry].name);
    if (report->has_accuracies) {
        if (!isfinite(check->value)) hstep_append_format(out, "diverged");
        else if (check->relation == '~')
            hstep_append_format(out, "%+.3f %% to the accuracy of %s", check->value, reference);
        else hstep_append_format(out, "test accuracy %.3f %%", check->value);
    } else if (isfinite(check->value))
        hstep_append_format(out, "%.4f nat %s %s", fabs(check->value), check->value < 0 ? "below" : "above", reference);
    else hstep_append_format(out, "no finite difference to %s", reference);
    hstep_append_format(out, ", wanted %s %g%s", wanted, check->bound, check->relation == '~' ? " of it" : "");
}

/* ---- The summary
 * -------------------------------------------------------------------------------------------------- */

static void list_separator(hstep_buffer *out, int position, int n)
{
    if (position) hstep_append_format(out, position == n - 1 ? " and " : ", ");
}

/* Names the most accurate recipe of a group, the one with the lowest loss, and the first to reach the mark in all its
 * runs. */
static void add_winners(const struct report *report, int group, const char *before, hstep_buffer *out)
{
    struct report_row row[REPORT_MAX_ENTRIES];
    int accurate = -1, lowest = -1, fastest = -1, n = 0;
    for (int i = 0; i < report->entries; i++) {
        if (report->entry[i].group != group) continue;
        report_row(report, i, &row[i]);
        if (!row[i].validation.n) continue;
        n++;
        double accuracy = row[i].accuracy.mean, loss = row[i].validation.mean;
        int always = row[i].reached.n == row[i].validation.n;
        if (isfinite(accuracy) && (accurate < 0 || accuracy > row[accurate].accuracy.mean)) accurate = i;
        if (isfinite(loss) && (lowest < 0 || loss < row[lowest].validation.mean)) lowest = i;
        if (always && (fastest < 0 || row[i].reached.mean < row[fastest].reached.mean)) fastest = i;
    }
    if (n < 2) return;
    hstep_append_text(out, before);
    if (report->groups > 1) hstep_append_format(out, "With %s, ", report->group[group]);
    if (accurate < 0 || lowest < 0) {
        hstep_append_format(out, "all runs diverged.");
        return;
    }
    hstep_append_format(out, "%s is the most accurate, %.2f %%", report_label(report, accurate),
                        100 * row[accurate].accuracy.mean);
    if (lowest == accurate)
        hstep_append_format(out, ", and ends with the lowest loss, %.4f", row[lowest].validation.mean);
    else
        hstep_append_format(out, "; %s ends with the lowest loss, %.4f", report_label(report, lowest),
                            row[lowest].validation.mean);
    if (fastest >= 0)
        hstep_append_format(out, "; %s is the first to reach %g %%, after %.3g epochs", report_label(report, fastest),
                            100 * REPORT_MARK, row[fastest].reached.mean);
    hstep_append_format(out, ".");
}

void report_sentence(const struct report *report, hstep_buffer *out)
{
    if (report->has_accuracies) {
        for (int g = 0; g < (report->groups > 1 ? report->groups : 1); g++) add_winners(report, g, g ? " " : "", out);
        return;
    }
    struct report_row row[REPORT_MAX_ENTRIES];
    int close[REPORT_MAX_ENTRIES], n_close = 0, clauses = 0;
    double widest = 0;
    for (int i = 0; i < report->entries; i++) report_row(report, i, &row[i]);
    if (report->entries > 1 && !row[0].validation.n && report_error(report, 0))
        hstep_append_format(out, "The reference %s failed.", report->entry[0].name);
    if (report->entries < 2 || !row[0].validation.n) return;
    if (!isfinite(row[0].validation.mean)) {
        hstep_append_format(out, "The reference %s diverged.", report->entry[0].name);
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
        hstep_append_format(out, "%s%s ", clauses++ ? "; " : "", report->entry[i].name);
        if (!isfinite(difference)) hstep_append_format(out, "diverged");
        else
            hstep_append_format(out, "ends %.2f nat %s %s", fabs(difference), difference > 0 ? "above" : "below",
                                report->entry[0].name);
    }
    if (n_close) {
        hstep_append_format(out, "%s", clauses++ ? "; " : "");
        for (int i = 0; i < n_close; i++) {
            list_separator(out, i, n_close);
            hstep_append_text(out, report->entry[close[i]].name);
        }
        hstep_append_format(out, " %s within %.3f nat of %s, with ", n_close > 1 ? "end" : "ends",
                            fmax(ceil(widest * 1000 - 1e-6) / 1000, 0.001), clauses > 1 ? "it" : report->entry[0].name);
        for (int i = 0; i < n_close; i++) {
            list_separator(out, i, n_close);
            hstep_append_format(out, "%.0f %%", 100 * row[close[i]].bytes / row[0].bytes);
        }
        hstep_append_format(out, " of its bytes per parameter");
    }
    if (clauses) hstep_append_format(out, ".");
}

/* ---- The table on a terminal ------------------------------------------------------------------------------------- */

enum column {
    RECIPE,
    COMPUTE,
    GRADIENTS,
    ACCURACY,
    LOSS,
    DIFFERENCE,
    REACHED,
    BYTES,
    SPEED,
    CHANGED,
    SKIPPED,
    COLUMNS
};

/* Returns the title of a column, "" if this report does not have it. */
static const char *heading(const struct report *report, enum column column)
{
    switch (column) {
    case RECIPE: return "recipe";
    case COMPUTE: return "compute";
    case GRADIENTS: return "gradients";
    case ACCURACY: return report->has_accuracies ? "accuracy, %" : "";
    case LOSS: return report_words(report)->short_loss;
    case DIFFERENCE: return "difference";
    case REACHED: return report->has_accuracies ? "epochs to 99 %" : "";
    case BYTES: return "B/param";
    case SPEED: return report_words(report)->speed;
    case CHANGED: return "weights changed, %";
    default: return "skipped steps";
    }
}

static void plus_minus(char *cell, size_t size, const char *format, double mean, double spread, int decimals)
{
    int n = snprintf(cell, size, format, mean);
    if (isfinite(spread) && n > 0 && (size_t)n < size)
        snprintf(cell + n, size - (size_t)n, " ± %.*f", decimals, spread);
}

static void make_cells(const struct report *report, int entry, char cell[COLUMNS][96])
{
    struct report_row row;
    report_row(report, entry, &row);
    for (int c = 0; c < COLUMNS; c++) strcpy(cell[c], "-");
    snprintf(cell[RECIPE], 96, "%s", report_label(report, entry));
    snprintf(cell[COMPUTE], 96, "%s", report->entry[entry].compute);
    snprintf(cell[GRADIENTS], 96, "%s", report->entry[entry].gradients);
    if (!row.validation.n && report_error(report, entry)) strcpy(cell[LOSS], "failed");
    if (!row.validation.n) return;
    if (report->has_accuracies && isfinite(row.accuracy.mean))
        plus_minus(cell[ACCURACY], 96, "%.3f", 100 * row.accuracy.mean, 100 * row.accuracy.deviation, 3);
    else if (report->has_accuracies) strcpy(cell[ACCURACY], "diverged");
    if (isfinite(row.validation.mean))
        plus_minus(cell[LOSS], 96, "%.4f", row.validation.mean, row.validation.deviation, 4);
    else strcpy(cell[LOSS], "diverged");
    if (entry == report_reference(report, entry)) strcpy(cell[DIFFERENCE], "reference");
    else if (isfinite(row.difference.mean))
        plus_minus(cell[DIFFERENCE], 96, "%+.4f", row.difference.mean,
                   row.difference.deviation / sqrt(row.difference.n), 4);
    if (row.reached.n == row.validation.n) snprintf(cell[REACHED], 96, "%.3g", row.reached.mean);
    snprintf(cell[BYTES], 96, "%.3f", row.bytes);
    if (row.tokens_per_s.n) snprintf(cell[SPEED], 96, "%.0f", row.tokens_per_s.mean);
    if (row.changed.n) snprintf(cell[CHANGED], 96, "%.2f", 100 * row.changed.mean);
    snprintf(cell[SKIPPED], 96, "%llu", (unsigned long long)row.skipped);
}

/* Counts characters, as a terminal does. printf() counts bytes. */
static int characters(const char *text)
{
    int n = 0;
    for (; *text; text++) n += ((unsigned char)*text & 0xC0) != 0x80;
    return n;
}

static void add_cell(hstep_buffer *out, const char *cell, int width, int right)
{
    int pad = width - characters(cell);
    hstep_append_format(out, "%*s%s%*s", right ? pad : 0, "", cell, right ? 0 : pad, "");
}

void report_table(const struct report *report, hstep_buffer *out)
{
    char cell[COLUMNS][96];
    int width[COLUMNS], group = -1;
    for (int c = 0; c < COLUMNS; c++) width[c] = characters(heading(report, (enum column)c));
    for (int i = 0; i < report->entries; i++) {
        make_cells(report, i, cell);
        for (int c = 0; c < COLUMNS; c++)
            if (width[c] && characters(cell[c]) > width[c]) width[c] = characters(cell[c]);
    }
    for (int i = -1; i < report->entries; i++) {
        if (i >= 0) make_cells(report, i, cell);
        if (i >= 0 && report->groups > 1 && report->entry[i].group != group) {
            group = report->entry[i].group;
            hstep_append_format(out, "%s:\n", report->group[group]);
        }
        for (int c = 0; c < COLUMNS; c++) {
            if (!width[c]) continue;
            if (c) hstep_append_format(out, "  ");
            add_cell(out, i < 0 ? heading(report, (enum column)c) : cell[c], width[c], c > GRADIENTS);
        }
        while (out->bytes && out->data[out->bytes - 1] == ' ') out->data[--out->bytes] = 0;
        hstep_append_format(out, "\n");
    }
    if (report->seeds > 1)
        hstep_append_format(
            out,
            "%d seeds: %s is mean ± standard deviation; the difference to the reference is taken seed by "
            "seed, mean ± standard error.\n",
            report->seeds, report_words(report)->short_loss);
}
