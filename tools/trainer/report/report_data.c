/* The report for programs: CSV and JSON. */
#include <math.h>
#include <string.h>

#include "trainer/report/report.h"

static void add_number(hstep_buffer *out, const char *format, double value)
{
    if (isfinite(value)) hstep_append_format(out, format, value);
    else if (!isnan(value)) hstep_append_format(out, value > 0 ? "inf" : "-inf");
    else hstep_append_format(out, "nan");
}

void report_runs_csv(const struct report *report, hstep_buffer *out)
{
    hstep_append_format(
        out,
        "run,recipe,compute,gradients,seed,train_loss,val_loss,difference,tokens_per_s,seconds,skipped_steps,"
        "weights_bytes_per_param,gradients_bytes_per_param,states_bytes_per_param,total_bytes_per_param,"
        "weights_changed%s\n",
        report->has_accuracies ? ",group,test_accuracy" : "");
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done) continue;
        const struct report_entry *entry = &report->entry[run->entry];
        const struct report_run *reference = report_find_run(report, report_reference(report, run->entry), run->seed);
        text_add_csv(out, entry->name);
        hstep_append_format(out, ",%s,%s,%s,%llu,", entry->recipe, entry->compute, entry->gradients,
                            (unsigned long long)run->seed);
        add_number(out, "%.9g", run->train_loss);
        hstep_append_format(out, ",");
        add_number(out, "%.9g", run->validation_loss);
        hstep_append_format(out, ",");
        if (reference) add_number(out, "%.9g", run->validation_loss - reference->validation_loss);
        hstep_append_format(out, ",");
        if (isfinite(run->tokens_per_s)) hstep_append_format(out, "%.1f", run->tokens_per_s);
        hstep_append_format(out, ",%.3f,%llu,%.6g,%.6g,%.6g,%.6g,", run->seconds, (unsigned long long)run->skipped,
                            run->weights, run->gradients, run->states, run->weights + run->gradients + run->states);
        if (!isnan(run->changed)) hstep_append_format(out, "%.9g", run->changed);
        if (report->has_accuracies) {
            hstep_append_format(out, ",%s,", report->groups > 1 ? report->group[entry->group] : "");
            add_number(out, "%.9g", run->accuracy);
        }
        hstep_append_format(out, "\n");
    }
}

static void add_history(hstep_buffer *out, const struct report_entry *entry, const struct report_run *run,
                        const char *kind, const struct report_curve *curve)
{
    for (int i = 0; i < curve->n; i++) {
        text_add_csv(out, entry->name);
        hstep_append_format(out, ",%llu,%s,%.0f,", (unsigned long long)run->seed, kind, curve->step[i]);
        add_number(out, "%.9g", curve->loss[i]);
        hstep_append_format(out, "\n");
    }
}

void report_history_csv(const struct report *report, hstep_buffer *out)
{
    hstep_append_format(out, "run,seed,kind,step,loss\n");
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done) continue;
        add_history(out, &report->entry[run->entry], run, "train", &run->train);
        add_history(out, &report->entry[run->entry], run, "validation", &run->validation);
        add_history(out, &report->entry[run->entry], run, "accuracy", &run->accuracies);
    }
}

static void put_mean(struct document *d, json_t *in, const char *key, const struct report_mean *mean)
{
    json_t *object = put_object(d, in, key);
    put_integer(d, object, "n", mean->n);
    put_number(d, object, "mean", mean->mean);
    put_number(d, object, "standard_deviation", mean->deviation);
    put_number(d, object, "standard_error", mean->n ? mean->deviation / sqrt(mean->n) : NAN);
    put_number(d, object, "low", mean->low);
    put_number(d, object, "high", mean->high);
}

static void put_row(struct document *d, json_t *in, const struct report *report, int i)
{
    const struct report_entry *entry = &report->entry[i];
    struct report_row row;
    report_row(report, i, &row);
    json_t *object = put_object(d, in, NULL);
    put_text(d, object, "name", entry->name);
    put_text(d, object, "recipe", entry->recipe);
    put_text(d, object, "compute", entry->compute);
    put_text(d, object, "gradients", entry->gradients);
    put_mean(d, object, "val_loss", &row.validation);
    put_mean(d, object, "train_loss", &row.train);
    put_mean(d, object, "difference", &row.difference);
    json_t *bytes = put_object(d, object, "bytes_per_param");
    put_number(d, bytes, "weights", row.weights);
    put_number(d, bytes, "gradients", row.gradients);
    put_number(d, bytes, "states", row.states);
    put_number(d, bytes, "total", row.bytes);
    put_mean(d, object, "tokens_per_s", &row.tokens_per_s);
    put_mean(d, object, "weights_changed", &row.changed);
    put_integer(d, object, "skipped_steps", (int64_t)row.skipped);
    if (!report->has_accuracies) return;
    put_text(d, object, "group", report->groups > 1 ? report->group[entry->group] : "");
    put_mean(d, object, "test_accuracy", &row.accuracy);
    put_mean(d, object, "epochs_to_99_percent", &row.reached);
}

static void put_pairs(struct document *d, json_t *in, const char *key, const struct report_pair *pair, int n)
{
    json_t *object = put_object(d, in, key);
    for (int i = 0; i < n; i++) put_text(d, object, pair[i].name, pair[i].value);
}

static void put_check(struct document *d, json_t *in, const struct report *report, const struct report_check *check)
{
    json_t *object = put_object(d, in, NULL);
    char relation[2] = {check->relation, 0};
    put_text(d, object, "recipe", report->entry[check->entry].name);
    put_text(d, object, "relation", relation);
    put_number(d, object, "bound", check->bound);
    put_number(d, object, "difference", check->value);
    put_flag(d, object, "passed", check->passed);
}

void report_document(struct document *d, const struct report *report)
{
    hstep_buffer sentence = {0};
    json_t *object = document_begin(d);
    report_sentence(report, &sentence);
    put_text(d, object, "command", report->command);
    put_text(d, object, "sentence", text_string(&sentence));
    if (sentence.failed) d->failed = 1;
    text_free(&sentence);
    put_text(d, object, "reference", report->entry[0].name);
    put_flag(d, object, "complete", report_done(report) == report->runs);
    json_t *failed = put_array(d, object, "failed");
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->error) continue;
        json_t *one = put_object(d, failed, NULL);
        put_text(d, one, "recipe", report->entry[run->entry].name);
        put_seed(d, one, run->seed);
        put_text(d, one, "error", run->error);
    }
    put_pairs(d, object, "configuration", report->configuration, report->configurations);
    put_pairs(d, object, "machine", report->machine, report->machines);
    json_t *table = put_array(d, object, "table");
    for (int i = 0; i < report->entries; i++) put_row(d, table, report, i);
    json_t *checks = put_array(d, object, "checks");
    for (int i = 0; i < report->checks; i++) put_check(d, checks, report, &report->check[i]);
    json_t *runs = put_array(d, object, "runs");
    for (int i = 0; i < report->runs; i++)
        if (report->run[i].done && report->run[i].json.root) put_document(d, runs, NULL, &report->run[i].json);
}
