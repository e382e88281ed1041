/* The HTML page of a report: one file, no script, nothing loaded from elsewhere. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/report/report.h"
#include "trainer/report/svg.h"

/* The most points of a line in a chart. More cannot be seen, and would make the page large. */
#define LINE_POINTS 400

static const char style[] =
    ":root{color-scheme:light "
    "dark;--page:#fff;--ink:#1c2430;--soft:#5c6675;--faint:#e3e7ec;--card:#f6f8fa;--code:#eef1f4;"
    "--good:#17703a;--bad:#b3261e;--accent:#1f5fbf;"
    "--s0:#8b94a1;--s1:#d9480f;--s2:#1f6fd6;--s3:#0b8a6a;--s4:#8b3fc7;--s5:#b7860b;--s6:#c2255c;--s7:#3f7d20;"
    "--p0:#2f6db5;--p1:#4d8b3f;--p2:#b57614}\n"
    "@media "
    "(prefers-color-scheme:dark){:root{--page:#11151b;--ink:#e4e8ee;--soft:#9aa5b4;--faint:#2a323d;--card:#181e26;"
    "--code:#1d242e;--good:#5fc983;--bad:#ff8a80;--accent:#7fb2ff;"
    "--s0:#8e99a8;--s1:#ff8a4c;--s2:#66a8ff;--s3:#37c9a0;--s4:#c58bf2;--s5:#e3b53c;--s6:#f2729f;--s7:#86c95d;"
    "--p0:#3f7cc4;--p1:#558f45;--p2:#b57a1c}}\n"
    "*{box-sizing:border-box}\n"
    "body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,\"Segoe UI\",Roboto,"
    "\"Helvetica Neue\",Arial,sans-serif}\n"
    "main{max-width:1120px;margin:0 auto;padding:32px 24px 64px}\n"
    "h1{font-size:28px;line-height:1.2;margin:0 0 4px}\n"
    "h2{font-size:19px;margin:40px 0 4px}\n"
    "p{margin:6px 0 12px}\n"
    ".soft{color:var(--soft)}\n"
    ".lead{margin:20px 0 8px;padding:14px 18px;background:var(--card);border-left:4px solid var(--accent);"
    "border-radius:0 6px 6px 0;font-size:17px}\n"
    "ul.checks{list-style:none;margin:8px 0;padding:0}\n"
    "ul.checks li{margin:2px 0}\n"
    ".good{color:var(--good);font-weight:600}\n"
    ".bad{color:var(--bad);font-weight:600}\n"
    ".wide-box{overflow-x:auto}\n"
    "table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}\n"
    "th,td{padding:7px 8px;text-align:right;border-bottom:1px solid var(--faint);white-space:nowrap}\n"
    "th{color:var(--soft);font-weight:600;vertical-align:bottom}\n"
    "th.name,td.name{text-align:left}\n"
    "tr:first-child th:first-child,td.name:first-child{padding-left:0}\n"
    "tbody tr:hover{background:var(--card)}\n"
    ".note{font-size:14px}\n"
    "table.facts{width:auto}\n"
    "table.facts td{text-align:left;white-space:normal;vertical-align:top;padding:4px 24px 4px 0}\n"
    "table.facts td:first-child{color:var(--soft);white-space:nowrap}\n"
    "code,pre,.code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,\"DejaVu Sans Mono\",monospace}\n"
    "code{font-size:.93em}\n"
    "pre{background:var(--code);padding:12px "
    "16px;border-radius:6px;overflow-x:auto;font-size:13.5px;white-space:pre-wrap;"
    "word-break:break-word}\n"
    ".columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr));gap:0 40px}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:4px 22px;margin:8px 0 2px;font-size:14px}\n"
    ".legend span{display:inline-flex;align-items:center;gap:7px}\n"
    ".swatch{width:28px;height:10px;flex:none}\n"
    ".key{width:13px;height:13px;border-radius:2px;flex:none}\n"
    ".chart svg{display:block;width:100%;min-width:620px;height:auto}\n"
    "svg text{font-size:12.5px;fill:var(--soft)}\n"
    "svg text.axis{font-size:13px}\n"
    "svg text.code{font-size:13px;fill:var(--ink)}\n"
    "svg text.total{font-size:13px;font-weight:600;fill:var(--ink)}\n"
    "svg text.inside{font-size:12px;fill:#fff;font-weight:600}\n"
    ".grid{stroke:var(--faint)}\n"
    ".tick,.zero{stroke:var(--soft)}\n"
    ".line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}\n"
    ".line.wide{stroke-width:7;opacity:.55}\n"
    ".band{stroke:none;opacity:.16}\n"
    ".dot circle{stroke:none}\n"
    ".dot .hit{fill:transparent}\n"
    ".dot:hover .hit{fill:currentColor;opacity:.18}\n"
    "@media print{main{max-width:none;padding:0}.chart,table{break-inside:avoid}}\n";

/* Adds the style classes that the charts use. */
static void add_classes(hstep_buffer *out)
{
    for (int i = 0; i < SVG_COLORS; i++)
        hstep_append_format(
            out,
            ".line.s%d{stroke:var(--s%d)}.band.s%d,.dot.s%d circle{fill:var(--s%d)}.dot.s%d .hit{fill:transparent}\n",
            i, i, i, i, i, i);
    for (int i = 0; i < 3; i++)
        hstep_append_format(out, "rect.p%d,.key.p%d{fill:var(--p%d);background:var(--p%d)}\n", i, i, i, i);
}

/* ---- Curves ------------------------------------------------------------------------------------------------------ */

enum curve_kind { TRAIN, VALIDATION, DIFFERENCE, ERROR, CURVES };

/* One entry's line: mean, lowest and highest value over its runs. */
struct line {
    int n;
    double *step, *mean, *low, *high;
};

static const struct report_curve *curve_of(const struct report_run *run, enum curve_kind kind)
{
    return kind == TRAIN ? &run->train : kind == ERROR ? &run->accuracies : &run->validation;
}

static int in_group(const struct report *report, int entry, int group) { return report->entry[entry].group == group; }

/* Returns the same colour for the same recipe in every group. */
static int color_of(const struct report *report, int entry) { return entry - report_reference(report, entry); }

static const char *group_name(const struct report *report, int group)
{
    return report->groups > 1 ? report->group[group] : "";
}

/* Returns the mean of the last `window` points up to i, or of fewer at the beginning. */
static double smooth(const struct report_curve *curve, int i, int window)
{
    double sum = 0;
    int first = i - window + 1 < 0 ? 0 : i - window + 1;
    for (int k = first; k <= i; k++) sum += curve->loss[k];
    return sum / (i - first + 1);
}

static int window_of(const struct report *report)
{
    int most = 0;
    for (int i = 0; i < report->runs; i++)
        if (report->run[i].train.n > most) most = report->run[i].train.n;
    return most >= 100 ? most / 50 : 1;
}

static double value_at(const struct report *report, const struct report_run *run, enum curve_kind kind, int i,
                       int window)
{
    const struct report_curve *curve = curve_of(run, kind);
    if (kind == TRAIN) return smooth(curve, i, window);
    if (kind == VALIDATION) return curve->loss[i];
    if (kind == ERROR) return 100 * (1 - curve->loss[i]);
    const struct report_run *reference = report_find_run(report, report_reference(report, run->entry), run->seed);
    if (!reference || i >= reference->validation.n || reference->validation.step[i] != curve->step[i]) return NAN;
    return curve->loss[i] - reference->validation.loss[i];
}

static int make_line(const struct report *report, int entry, enum curve_kind kind, int window, struct line *line)
{
    int points = -1;
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->done || run->entry != entry) continue;
        int n = curve_of(run, kind)->n;
        points = points < 0 || n < points ? n : points;
    }
    memset(line, 0, sizeof *line);
    if (points <= 0) return 0;
    int stride = (points + LINE_POINTS - 1) / LINE_POINTS;
    size_t capacity = (size_t)(points / stride + 2);
    double *memory = calloc(4 * capacity, sizeof *memory);
    if (!memory) return -1;
    *line = (struct line){0, memory, memory + capacity, memory + 2 * capacity, memory + 3 * capacity};
    for (int i = (points - 1) % stride; i < points; i += stride) { /* ends at the last point */
        double sum = 0, low = INFINITY, high = -INFINITY;
        int n = 0;
        for (int r = 0; r < report->runs; r++) {
            const struct report_run *run = &report->run[r];
            if (!run->done || run->entry != entry) continue;
            double value = value_at(report, run, kind, i, window);
            line->step[line->n] = curve_of(run, kind)->step[i];
            sum += value;
            low = fmin(low, value);
            high = fmax(high, value);
            n++;
        }
        line->mean[line->n] = sum / n;
        line->low[line->n] = low;
        line->high[line->n++] = high;
    }
    return 0;
}

/* Returns a logarithmic axis if most of the fall happens in the first tenth of the steps, because a linear axis would
 * hide it. */
static enum svg_axis step_axis(const struct line *reference)
{
    int n = reference->n;
    if (n < 20 || !(reference->mean[0] - reference->mean[n - 1] > 0)) return SVG_LINEAR;
    for (int i = 0; i < n; i++)
        if (reference->step[i] >= 0.1 * reference->step[n - 1])
            return reference->mean[0] - reference->mean[i] > 0.6 * (reference->mean[0] - reference->mean[n - 1])
                       ? SVG_LOG
                       : SVG_LINEAR;
    return SVG_LINEAR;
}

static void add_legend(hstep_buffer *out, const struct report *report, int group, int from)
{
    hstep_append_format(out, "<div class=\"legend\">");
    for (int i = 0; i < report->entries; i++) {
        int color = color_of(report, i);
        if (!in_group(report, i, group) || color < from) continue;
        hstep_append_format(out, "<span>");
        svg_swatch(out, color, color == 0);
        hstep_append_format(out, "<code>");
        text_add_html(out, report_label(report, i));
        hstep_append_format(out, "</code>%s</span>\n", color ? "" : " (reference)");
    }
    hstep_append_format(out, "</div>\n");
}

static void make_title(hstep_buffer *out, const struct report *report, enum curve_kind kind, int group)
{
    static const char *const title[CURVES] = {"training loss", NULL, NULL, "test error, 100 % − accuracy"};
    const char *group_is = group_name(report, group);
    hstep_append_format(out, "%s%s%s%s", title[kind] ? title[kind] : report_words(report)->loss,
                        kind == DIFFERENCE ? ", difference to the reference" : "", group_is[0] ? ", " : "", group_is);
    if (out->data && out->data[0] >= 'a' && out->data[0] <= 'z') out->data[0] = (char)(out->data[0] - 'a' + 'A');
}

static void add_curves(hstep_buffer *out, const struct report *report, enum curve_kind kind, int group,
                       enum svg_axis x_axis)
{
    struct line line[REPORT_MAX_ENTRIES];
    struct svg_series series[REPORT_MAX_ENTRIES];
    hstep_buffer title = {0}, label = {0};
    int window = window_of(report), n = 0, band = report->seeds > 1, bad = 0;
    memset(series, 0, sizeof series);
    for (int i = 0; i < report->entries; i++) {
        memset(&line[i], 0, sizeof line[i]);
        if (!in_group(report, i, group)) continue;
        bad |= make_line(report, i, kind, window, &line[i]);
        int color = color_of(report, i);
        if (!line[i].n || (kind == DIFFERENCE && color == 0)) continue;
        struct report_row row;
        report_row(report, i, &row);
        /* The losses of a run that diverged may be so large that they would flatten all other lines. */
        series[n++] = (struct svg_series){.name = report_label(report, i),
                                          .color = color,
                                          .n = line[i].n,
                                          .x = line[i].step,
                                          .y = line[i].mean,
                                          .low = band ? line[i].low : NULL,
                                          .high = band ? line[i].high : NULL,
                                          .wide = color == 0,
                                          .markers = kind != TRAIN,
                                          .loose = !isfinite(row.validation.mean)};
    }
    make_title(&title, report, kind, group);
    if (kind == DIFFERENCE) hstep_append_format(&label, "difference, nat");
    else if (kind == ERROR) hstep_append_format(&label, "test error, %%");
    else hstep_append_format(&label, "%s, nat", kind == TRAIN ? "training loss" : report_words(report)->loss);
    if (bad) out->failed = 1;
    text_join_failure(out, &title);
    text_join_failure(out, &label);
    text_add_between(out, "<h2>", text_string(&title), "</h2>\n<p class=\"soft\">");
    if (kind == TRAIN && window > 1)
        hstep_append_format(out, "Each point is the mean of the %d steps before it. ", window);
    if (kind == TRAIN) hstep_append_text(out, report_words(report)->learning);
    if (kind == DIFFERENCE)
        hstep_append_format(
            out, "The scale is linear within ±0.01 nat and logarithmic beyond, so that small and large differences can "
                 "both be read. ");
    if (band)
        hstep_append_format(out, "Lines are means over %d seeds, bands reach from the lowest to the highest. ",
                            report->seeds);
    if (kind != TRAIN) hstep_append_format(out, "Hover over a point for its value.");
    hstep_append_format(out, "</p>\n");
    add_legend(out, report, group, kind == DIFFERENCE);
    /* Losses and errors that fall by orders of magnitude within few points can only be told apart on a logarithmic
     * axis. */
    enum svg_axis y_axis = kind == DIFFERENCE ? SVG_ASINH : report->has_accuracies ? SVG_LOG : SVG_LINEAR;
    struct svg_chart chart = {.id = CURVES * group + (int)kind,
                              .title = text_string(&title),
                              .x_label = report_words(report)->step,
                              .y_label = text_string(&label),
                              .x_axis = x_axis,
                              .y_axis = y_axis,
                              .knee = 0.01,
                              .height = kind == TRAIN ? 330 : 380,
                              .series = series,
                              .n = n};
    hstep_append_format(out, "<div class=\"chart wide-box\">\n");
    svg_line_chart(out, &chart);
    hstep_append_format(out, "</div>\n");
    for (int i = 0; i < report->entries; i++) free(line[i].step);
    text_free(&title);
    text_free(&label);
}

/* ---- Table, memory, facts ---------------------------------------------------------------------------------------- */

static void add_spread(hstep_buffer *out, int sign, double mean, double spread, int digits)
{
    if (!isfinite(mean)) {
        hstep_append_format(out, "<span class=\"bad\">diverged</span>");
        return;
    }
    if (sign && mean) hstep_append_format(out, mean < 0 ? "−" : "+");
    hstep_append_format(out, "%.*f", digits, sign ? fabs(mean) : mean);
    if (isfinite(spread)) hstep_append_format(out, " <span class=\"soft\">± %.*f</span>", digits, spread);
}

static void add_row(hstep_buffer *out, const struct report *report, int i)
{
    const struct report_entry *entry = &report->entry[i];
    struct report_row row;
    int color = color_of(report, i);
    report_row(report, i, &row);
    hstep_append_format(out, "<tr><td class=\"name\">");
    svg_swatch(out, color, color == 0);
    hstep_append_format(out, " <code>");
    text_add_html(out, report_label(report, i));
    hstep_append_format(out, "</code></td><td class=\"name\">%s</td><td class=\"name\">%s</td><td>", entry->compute,
                        entry->gradients);
    if (!row.validation.n) {
        hstep_append_format(out, "%s%s</td><td>–</td><td>–</td><td>–</td><td>–</td><td>–</td>%s</tr>\n",
                            report->has_accuracies ? "–</td><td>" : "",
                            report_error(report, i) ? "<span class=\"bad\">failed</span>" : "–",
                            report->has_accuracies ? "<td>–</td>" : "");
        return;
    }
    if (report->has_accuracies) {
        add_spread(out, 0, 100 * row.accuracy.mean, 100 * row.accuracy.deviation, 3);
        hstep_append_format(out, "</td><td>");
    }
    add_spread(out, 0, row.validation.mean, row.validation.deviation, 4);
    hstep_append_format(out, "</td><td>");
    if (color == 0) hstep_append_format(out, "reference");
    else if (row.difference.n)
        add_spread(out, 1, row.difference.mean, row.difference.deviation / sqrt(row.difference.n), 4);
    else hstep_append_format(out, "–");
    if (report->has_accuracies) {
        hstep_append_format(out, "</td><td>");
        if (row.reached.n == row.validation.n) hstep_append_format(out, "%.3g", row.reached.mean);
        else hstep_append_format(out, "–");
    }
    hstep_append_format(out, "</td><td>%.3f</td><td>", row.bytes);
    if (row.tokens_per_s.n) text_add_count(out, row.tokens_per_s.mean);
    else hstep_append_format(out, "–");
    hstep_append_format(out, "</td><td>");
    if (row.changed.n) hstep_append_format(out, "%.2f", 100 * row.changed.mean);
    else hstep_append_format(out, "–");
    hstep_append_format(out, "</td><td>%llu</td></tr>\n", (unsigned long long)row.skipped);
}

static void add_table(hstep_buffer *out, const struct report *report)
{
    int group = -1, columns = report->has_accuracies ? 11 : 9;
    hstep_append_format(
        out,
        "<h2>Results</h2>\n<div class=\"wide-box\"><table>\n<thead><tr><th class=\"name\">recipe</th>"
        "<th class=\"name\">compute</th><th class=\"name\">gradients</th>%s<th>%s,<br>nat</th>"
        "<th>difference,<br>nat</th>%s<th>bytes per<br>parameter</th><th>%s</th><th>weights<br>changed, %%</th>"
        "<th>skipped<br>steps</th></tr></thead>\n<tbody>\n",
        report->has_accuracies ? "<th>accuracy,<br>%</th>" : "", report_words(report)->short_loss,
        report->has_accuracies ? "<th>epochs<br>to 99 %</th>" : "", report_words(report)->speed);
    for (int i = 0; i < report->entries; i++) {
        if (report->groups > 1 && report->entry[i].group != group) {
            group = report->entry[i].group;
            hstep_append_format(out, "<tr><th class=\"name\" colspan=\"%d\">", columns);
            text_add_html(out, group_name(report, group));
            hstep_append_format(out, "</th></tr>\n");
        }
        add_row(out, report, i);
    }
    hstep_append_format(out, "</tbody></table></div>\n<p class=\"soft note\">");
    hstep_append_format(
        out,
        "Matrix products run in %s for every recipe, so that only the storage of weights, gradients and states "
        "differs. ",
        report->entry[0].compute);
    hstep_append_format(
        out,
        "Bytes per parameter are those held during training. Weights changed: the share of all weights whose stored "
        "bits differ from the start. ");
    if (report->has_accuracies)
        hstep_append_format(
            out,
            "Epochs to 99 %%: the first test with that accuracy, mean over the seeds, if all of them reached it. ");
    if (report->seeds > 1)
        hstep_append_format(
            out,
            "%c%s is the mean over %d seeds ± standard deviation; the difference to the reference is taken "
            "seed by seed, mean ± standard error.",
            report_words(report)->loss[0] - 'a' + 'A', report_words(report)->loss + 1, report->seeds);
    hstep_append_format(out, "</p>\n");
}

static void add_memory(hstep_buffer *out, const struct report *report)
{
    static const char *const part[] = {"weights", "gradients", "states"};
    struct svg_bar bar[REPORT_MAX_ENTRIES];
    double parts[REPORT_MAX_ENTRIES][3];
    int n = 0;
    for (int i = 0; i < report->entries; i++) {
        struct report_row row;
        /* The other groups need the same memory. */
        if (!in_group(report, i, 0)) continue;
        report_row(report, i, &row);
        if (!row.validation.n) continue;
        parts[n][0] = row.weights;
        parts[n][1] = row.gradients;
        parts[n][2] = row.states;
        bar[n] = (struct svg_bar){report_label(report, i), parts[n]};
        n++;
    }
    hstep_append_format(
        out,
        "<h2>Memory</h2>\n<p class=\"soft\">Bytes per parameter, as held during training.</p>\n<div class=\"legend\">");
    for (int p = 0; p < 3; p++) hstep_append_format(out, "<span><span class=\"key p%d\"></span>%s</span>", p, part[p]);
    hstep_append_format(out, "</div>\n<div class=\"chart wide-box\">\n");
    svg_bar_chart(out, "Bytes per parameter", bar, n, part, 3, "B/param");
    hstep_append_format(out, "</div>\n");
}

static void add_facts(hstep_buffer *out, const char *title, const struct report_pair *pair, int n)
{
    hstep_append_format(out, "<section><h2>%s</h2>\n<table class=\"facts\"><tbody>\n", title);
    for (int i = 0; i < n; i++) {
        text_add_between(out, "<tr><td>", pair[i].name, "</td><td>");
        text_add_html(out, pair[i].value);
        hstep_append_format(out, "</td></tr>\n");
    }
    hstep_append_format(out, "</tbody></table></section>\n");
}

static void add_checks(hstep_buffer *out, const struct report *report)
{
    hstep_append_format(out, "<ul class=\"checks\">\n");
    for (int i = 0; i < report->checks; i++) {
        hstep_buffer line = {0};
        report_check_text(report, &report->check[i], &line);
        hstep_append_format(out, "<li><span class=\"%s\">%s</span> ", report->check[i].passed ? "good" : "bad",
                            report->check[i].passed ? "✓ holds" : "✗ fails");
        text_add_html(out, text_string(&line));
        hstep_append_format(out, "</li>\n");
        text_join_failure(out, &line);
        text_free(&line);
    }
    hstep_append_format(out, "</ul>\n");
}

void report_html(const struct report *report, hstep_buffer *out)
{
    hstep_buffer sentence = {0};
    struct line reference;
    int done = report_done(report);
    report_sentence(report, &sentence);
    text_join_failure(out, &sentence);
    hstep_append_format(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
                             "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n<title>");
    text_add_html(out, report->title);
    hstep_append_format(out, "</title>\n<style>\n%s", style);
    add_classes(out);
    text_add_between(out, "</style>\n</head>\n<body>\n<main>\n<h1>", report->title, "</h1>\n<p class=\"soft\">");
    text_add_html(out, report->subtitle);
    hstep_append_format(out, "</p>\n");
    if (done < report->runs)
        hstep_append_format(out, "<p class=\"bad\">Incomplete: %d of %d runs are done.</p>\n", done, report->runs);
    for (int i = 0; i < report->runs; i++) {
        const struct report_run *run = &report->run[i];
        if (!run->error) continue;
        text_add_between(out, "<p class=\"bad\">", report->entry[run->entry].name, "");
        hstep_append_format(out, ", seed %llu, failed: ", (unsigned long long)run->seed);
        text_add_between(out, "", run->error, "</p>\n");
    }
    if (sentence.bytes) {
        text_add_between(out, "<p class=\"lead\">", sentence.data, "</p>\n");
    }
    if (report->checks && done == report->runs) add_checks(out, report);
    add_table(out, report);
    if (done) {
        if (make_line(report, 0, TRAIN, window_of(report), &reference)) out->failed = 1;
        enum svg_axis x_axis = report->has_accuracies ? SVG_LINEAR : step_axis(&reference);
        free(reference.step);
        for (int g = 0; g < (report->groups > 1 ? report->groups : 1); g++) {
            if (report->has_accuracies) add_curves(out, report, ERROR, g, x_axis);
            add_curves(out, report, VALIDATION, g, x_axis);
            if (report->entries > 1 && !report->has_accuracies) add_curves(out, report, DIFFERENCE, g, x_axis);
            add_curves(out, report, TRAIN, g, x_axis);
        }
        add_memory(out, report);
    }
    hstep_append_format(out, "<div class=\"columns\">\n");
    add_facts(out, "Configuration", report->configuration, report->configurations);
    add_facts(out, "Machine", report->machine, report->machines);
    text_add_between(out, "</div>\n<h2>Command</h2>\n<pre>", report->command, "</pre>\n</main>\n</body>\n</html>\n");
    text_free(&sentence);
}
