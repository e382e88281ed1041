/* The report for programs: CSV and JSON. */
#include <math.h>
#include <string.h>

#include "ui/report.h"

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
                  "weights_changed%s\n", report->accuracies ? ",group,test_accuracy" : "");
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done) continue;
        const struct report_entry *entry = &report->entry[run->entry];
        const struct report_run *reference = report_find_run(report, report_reference(report, run->entry), run->seed);
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
        if (report->accuracies) {
            text_add(out, ",%s,", report->groups > 1 ? report->group[entry->group] : "");
            add_number(out, "%.9g", run->accuracy);
        }
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
        add_history(out, &report->entry[run->entry], run, "accuracy", &run->accuracies);
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
    if (report->accuracies) {
        json_object_set_new(object, "group", json_string(report->groups > 1 ? report->group[entry->group] : ""));
        json_object_set_new(object, "test_accuracy", mean_json(&row.accuracy));
        json_object_set_new(object, "epochs_to_99_percent", mean_json(&row.reached));
    }
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
