/* Tests what a comparison says about made-up runs, so that the right answer is known. */
#include <math.h>

#include "test.h"
#include "trainer/report/report.h"
#include "trainer/report/svg.h"

#define ENTRIES 4
#define SEEDS 3

static struct report_run runs[ENTRIES * SEEDS];

/* Entry e ends at 2 + seed / 10 + end[e] + jitter of the seed where e is 2. */
static void make(struct report *report, const double end[ENTRIES])
{
    static const char *const names[ENTRIES] = {"adamw/f32/f32", "adamw/bf16/bf16-sr", "adamw/bf16-sr/bf16-sr",
                                               "lion/bf16/<int8>&"};
    static const double bytes[ENTRIES][3] = {{4, 4, 8}, {2, 2, 4}, {2, 2, 4}, {2, 2, 1.0625}};
    memset(report, 0, sizeof *report);
    report->title = "a \"title\" & <more>";
    report->subtitle = "made up";
    report->command = "halfstep compare lm";
    for (int i = 0; i < ENTRIES; i++)
        report->entry[i] = (struct report_entry){.name = names[i],
                                                 .typed = i == 1 ? "adamw/bf16" : NULL,
                                                 .recipe = names[i],
                                                 .compute = "bf16",
                                                 .gradients = i ? "bf16" : "f32"};
    report->entries = ENTRIES;
    report->seeds = SEEDS;
    report->runs = ENTRIES * SEEDS;
    report->run = runs;
    for (int i = 0; i < report->runs; i++) {
        struct report_run *run = &runs[i];
        report_curve_free(&run->train);
        report_curve_free(&run->validation);
        int e = i % ENTRIES, seed = i / ENTRIES;
        *run = (struct report_run){.entry = e,
                                   .seed = (uint64_t)seed + 7,
                                   .done = 1,
                                   .tokens_per_s = 1000 + seed,
                                   .changed = 0.25,
                                   .weights = bytes[e][0],
                                   .gradients = bytes[e][1],
                                   .states = bytes[e][2],
                                   .skipped = (uint64_t)e};
        run->validation_loss = 2 + 0.1 * seed + end[e] + (e == 2 ? 0.003 * (seed - 1) : 0);
        run->train_loss = run->validation_loss - 0.5;
        for (int step = 0; step <= 1000; step++) {
            double loss = run->validation_loss + 3 * exp(-step / 100.0);
            CHECK(report_curve_add(&run->train, step, loss) == 0, "out of memory");
            if (step % 100 == 0) CHECK(report_curve_add(&run->validation, step, loss) == 0, "out of memory");
        }
    }
}

static int has(const hstep_buffer *text, const char *part) { return text->data && strstr(text->data, part) != NULL; }

/* Checks that `text` has this part. */
#define HAS(part) CHECK(has(&text, part), "\"%s\" is not in %s", part, text.data)

static int count(const hstep_buffer *text, const char *part)
{
    int n = 0;
    for (const char *at = text->data; at && (at = strstr(at, part)) != NULL; at += strlen(part)) n++;
    return n;
}

/* Returns what is wrong if an element is not closed in the right order, else NULL. Skips void elements and "/>". */
static const char *unbalanced(const char *html)
{
    static char open[64][32], problem[128];
    int depth = 0;
    const char *at = strstr(html, "<html");
    while (at && (at = strchr(at, '<')) != NULL) {
        int closing = at[1] == '/';
        char name[32];
        size_t n = strcspn(at + 1 + closing, " >/\n");
        snprintf(name, sizeof name, "%.*s", (int)n, at + 1 + closing);
        const char *end = strchr(at, '>');
        if (!end) return "a tag is not closed";
        if (closing) {
            if (depth == 0 || strcmp(open[depth - 1], name) != 0) {
                snprintf(problem, sizeof problem, "</%.31s> closes <%.31s>", name, depth ? open[depth - 1] : "");
                return problem;
            }
            depth--;
        } else if (end[-1] != '/' && strcmp(name, "meta") != 0 && strcmp(name, "br") != 0) {
            if (depth == 64) return "too deep";
            snprintf(open[depth++], sizeof open[0], "%s", name);
        }
        at = end;
    }
    return depth ? open[depth - 1] : NULL;
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    struct report report;
    struct report_row row;
    const double usual[ENTRIES] = {0, 1.12, 0.002, -0.2};

    TEST("means, spreads and differences by seed") {
        make(&report, usual);
        report_row(&report, 2, &row);
        CHECK(row.validation.n == 3 && fabs(row.validation.mean - 2.102) < 1e-12, "mean %g", row.validation.mean);
        CHECK(fabs(row.validation.deviation - 0.103) < 1e-12, "deviation %g", row.validation.deviation);
        CHECK(fabs(row.difference.mean - 0.002) < 1e-12, "difference %g", row.difference.mean);
        CHECK(fabs(row.difference.deviation - 0.003) < 1e-12, "deviation of differences %g", row.difference.deviation);
        CHECK(row.bytes == 8 && row.skipped == 6, "bytes %g, skipped %d", row.bytes, (int)row.skipped);
        report_row(&report, 0, &row);
        CHECK(row.difference.mean == 0 && row.difference.deviation == 0, "the reference differs from itself");
        runs[0].done = 0;
        report_row(&report, 2, &row);
        CHECK(row.validation.n == 3 && row.difference.n == 2, "%d differences without a partner's run",
              row.difference.n);
    }

    TEST("the sentence") {
        hstep_buffer text = {0};
        make(&report, usual);
        report_sentence(&report, &text);
        HAS("adamw/bf16/bf16-sr ends 1.12 nat above adamw/f32/f32");
        HAS("adamw/bf16-sr/bf16-sr ends within 0.002 nat of it, with 50 % of its bytes per parameter.");
        HAS("lion/bf16/<int8>& ends 0.20 nat below");
        text_free(&text);
        make(&report, (const double[ENTRIES]){0, NAN, 0.0214, 0.0011});
        report_sentence(&report, &text);
        HAS("adamw/bf16/bf16-sr diverged; ");
        HAS(" and lion/bf16/<int8>& end within 0.022 nat of it, with 50 % and 32 %");
        text_free(&text);
        make(&report, (const double[ENTRIES]){INFINITY, 0, 0, 0});
        report_sentence(&report, &text);
        HAS("The reference adamw/f32/f32 diverged.");
        text_free(&text);
        make(&report, usual);
        report.entries = 1;
        report_sentence(&report, &text);
        CHECK(text.bytes == 0, "a sentence about one recipe: %s", text.data);
        text_free(&text);
    }

    TEST("expectations") {
        struct report_check check[8];
        char error[300];
        int n;
        make(&report, usual);
        CHECK(report_parse_checks(&report,
                                  "adamw/bf16>0.3,adamw/bf16/bf16-sr>1.2,adamw/bf16-sr/bf16-sr~0.03,"
                                  "lion/bf16/<int8>&<0.1",
                                  check, 8, &n, error, sizeof error) != 0,
              "a name with < was read");
        CHECK(report_parse_checks(&report,
                                  "adamw/bf16>0.3,adamw/bf16/bf16-sr>1.2,adamw/bf16-sr/bf16-sr~0.03,"
                                  "adamw/bf16-sr/bf16-sr<-0.001",
                                  check, 8, &n, error, sizeof error) == 0,
              "%s", error);
        report.check = check;
        report.checks = n;
        CHECK(n == 4 && report_judge(&report) == 2, "%d checks, %d failed", n, report_judge(&report));
        CHECK(check[0].passed && !check[1].passed && check[2].passed && !check[3].passed, "%d %d %d %d",
              check[0].passed, check[1].passed, check[2].passed, check[3].passed);
        hstep_buffer text = {0};
        report_check_text(&report, &check[1], &text);
        HAS("1.1200 nat above adamw/f32/f32, wanted more than 1.2");
        text_free(&text);
        static const char *const bad[] = {"adamw/bf16", "adamw/bf16>", "adamw/bf16>x",  "adamw/bf16>1x",
                                          "sgd>1",      ">1",          "adamw/bf16>nan"};
        for (size_t i = 0; i < COUNT(bad); i++)
            CHECK(report_parse_checks(&report, bad[i], check, 8, &n, error, sizeof error) != 0 && error[0],
                  "\"%s\" was read", bad[i]);
        make(&report, (const double[ENTRIES]){0, NAN, NAN, NAN});
        CHECK(report_parse_checks(&report, "adamw/bf16>0.3,adamw/bf16<0.3,adamw/bf16~9", check, 8, &n, error,
                                  sizeof error) == 0,
              "%s", error);
        report.check = check;
        report.checks = n;
        CHECK(report_judge(&report) == 3, "a run that diverged satisfies an expectation");
    }

    TEST("a run that failed, and one that diverged, beside others") {
        hstep_buffer text = {0};
        make(&report, (const double[ENTRIES]){0, NAN, 0.002, -0.2});
        for (int i = 0; i < report.runs; i++) {
            if (runs[i].entry == 2) runs[i].done = 0, runs[i].error = "out of <memory>";
            for (int k = 500; k < runs[i].train.n && runs[i].entry == 1; k++) runs[i].train.loss[k] = 1e9;
        }
        runs[2 * ENTRIES + 3].done = 0; /* one seed of an entry whose others are done */
        runs[2 * ENTRIES + 3].error = "a disk";
        report_table(&report, &text);
        HAS(" failed  ");
        HAS("diverged");
        text_free(&text);
        report_sentence(&report, &text);
        HAS("adamw/bf16/bf16-sr diverged; lion/bf16/<int8>& ends 0.20 nat below");
        text_free(&text);
        struct document document;
        report_document(&document, &report);
        document_write(&document, &text);
        HAS("\"complete\": false");
        EQUAL(count(&text, "\"error\": \"out of <memory>\""), SEEDS);
        EQUAL(count(&text, "\"error\": \"a disk\""), 1);
        text_free(&text);
        report_html(&report, &text);
        HAS("Incomplete: 8 of 12 runs are done.");
        HAS("<p class=\"bad\">adamw/bf16-sr/bf16-sr, seed 8, failed: out of &lt;memory&gt;</p>");
        EQUAL(count(&text, "<span class=\"bad\">failed</span>"), 1);
        /* The axes are those of the other runs. */
        CHECK(!has(&text, "M</text>") && !has(&text, "nan") && !unbalanced(text.data), "%s", unbalanced(text.data));
        text_free(&text);
        for (int i = 0; i < report.runs; i++)
            if (runs[i].entry == 0) runs[i].done = 0, runs[i].error = "a disk";
        report_sentence(&report, &text);
        HAS("The reference adamw/f32/f32 failed.");
        text_free(&text);
    }

    TEST("table, CSV and JSON") {
        hstep_buffer text = {0};
        make(&report, usual);
        report_table(&report, &text);
        HAS("+0.0020 ± 0.0017");
        CHECK(has(&text, "2.1020 ± 0.1030") && has(&text, "5.062") && has(&text, "25.00") && has(&text, "1001"), "%s",
              text.data);
        text_free(&text);
        report_runs_csv(&report, &text);
        EQUAL(count(&text, "\n"), 1 + ENTRIES * SEEDS);
        text_free(&text);
        report_history_csv(&report, &text);
        EQUAL(count(&text, "\n"), 1 + ENTRIES * SEEDS * (1001 + 11));
        CHECK(has(&text, "adamw/f32/f32,7,validation,1000,"), "no last validation");
        text_free(&text);
        make(&report, (const double[ENTRIES]){0, NAN, INFINITY, 0});
        struct document document;
        report_document(&document, &report);
        document_write(&document, &text);
        CHECK(!text.failed && has(&text, "\"mean\": null"), "NaN in JSON: %s", text_string(&text));
        CHECK(has(&text, "\"command\": \"halfstep compare lm\""), "no command: %s", text_string(&text));
        text_free(&text);
        text_add_csv(&text, "a,\"b\"\nc");
        CHECK(text.data && strcmp(text.data, "\"a,\"\"b\"\"\nc\"") == 0, "%s", text.data);
        text_free(&text);
        text_add_html(&text, "caf\xe9 <\xc3\xa9>");
        CHECK(text.data && strcmp(text.data, "caf\xef\xbf\xbd &lt;\xc3\xa9&gt;") == 0, "%s", text.data);
        text_free(&text);
        text_add_shell(&text, "it's >1");
        CHECK(text.data && strcmp(text.data, "'it'\\''s >1'") == 0, "%s", text.data);
        text_free(&text);
    }

    TEST("the page is whole, self-contained and escaped") {
        static const double ends[][ENTRIES] = {
            {0, 1.12, 0.002, -0.2}, {0, NAN, INFINITY, 0}, {NAN, NAN, NAN, NAN}, {0, 0, 0, 0}};
        for (int kind = 0; kind < 4; kind++)
            for (int done = 0; done <= ENTRIES * SEEDS; done += 3) {
                hstep_buffer text = {0};
                make(&report, ends[kind]);
                for (int i = done; i < report.runs; i++) runs[i].done = 0;
                report_html(&report, &text);
                const char *problem = text.data ? unbalanced(text.data) : "nothing written";
                CHECK(!text.failed && !problem, "kind %d, %d runs done: %s", kind, done, problem);
                CHECK(!has(&text, "<int8>") && !has(&text, "<more>") &&
                          has(&text, "a &quot;title&quot; &amp; &lt;more&gt;"),
                      "kind %d, %d runs done: not escaped", kind, done);
                CHECK(!has(&text, "http") && !has(&text, "<script") && !has(&text, "@import") && !has(&text, "src="),
                      "kind %d, %d runs done: loads something", kind, done);
                CHECK(!has(&text, "nan\"") && !has(&text, "\"nan") && !has(&text, "Mnan") && !has(&text, "Lnan") &&
                          !has(&text, "inf ") && !has(&text, " nan"),
                      "kind %d, %d runs done: NaN as a coordinate", kind, done);
                CHECK(has(&text, "Incomplete") == (done < report.runs), "kind %d, %d runs done: completeness", kind,
                      done);
                if (kind == 0 && done == report.runs)
                    CHECK(count(&text, "class=\"band") == 4 + 3 + 4 && count(&text, "class=\"line") >= 11,
                          "%d bands, %d lines", count(&text, "class=\"band"), count(&text, "class=\"line"));
                text_free(&text);
            }
    }

    TEST("groups and accuracies") {
        static const char *const groups[] = {"batch 128", "batch <512>"};
        static const struct report_words words = {"test loss", "test loss", "epoch", "images/s", ""};
        hstep_buffer text = {0};
        struct report_row row;
        struct report_check check[4];
        char error[300];
        int n;
        make(&report, usual);
        report.has_accuracies = 1;
        report.groups = 2;
        report.group = groups;
        report.words = &words;
        for (int i = 0; i < ENTRIES; i++) {
            report.entry[i].group = i / 2;
            report.entry[i].label = i % 2 ? "second" : "first";
        }
        for (int i = 0; i < report.runs; i++) {
            runs[i].accuracy = 0.98 + 0.0045 * runs[i].entry + 0.0001 * ((double)runs[i].seed - 8);
            for (int epoch = 0; epoch <= 4; epoch++)
                CHECK(report_curve_add(&runs[i].accuracies, epoch, runs[i].accuracy - 0.001 * (4 - epoch)) == 0,
                      "out of memory");
        }
        report_row(&report, 3, &row);
        CHECK(fabs(row.accuracy.mean - 0.9935) < 1e-12 && fabs(row.accuracy.deviation - 0.0001) < 1e-12, "%g ± %g",
              row.accuracy.mean, row.accuracy.deviation);
        CHECK(report_reference(&report, 3) == 2 && fabs(row.difference.mean - (usual[3] - usual[2])) < 1e-12,
              "the reference of the second group is %d, %g away", report_reference(&report, 3), row.difference.mean);
        CHECK(row.reached.n == 3 && row.reached.mean == 1, "99 %% after %g epochs", row.reached.mean);
        report_row(&report, 0, &row);
        CHECK(row.reached.n == 0, "98 %% counts as 99 %%");
        report_sentence(&report, &text);
        HAS("With batch 128, second is the most accurate, 98.45 %; first ends with the lowest loss, 2.1000.");
        HAS("With batch <512>, second is the most accurate, 99.35 %, and ends with the lowest loss, 1.9000; "
            "second is the first to reach 99 %, after 1 epochs.");
        text_free(&text);
        report_table(&report, &text);
        CHECK(has(&text, "batch 128:\n") && has(&text, "99.350 ± 0.010") && has(&text, "images/s") &&
                  has(&text, "epochs to 99 %"),
              "%s", text.data);
        text_free(&text);
        report_runs_csv(&report, &text);
        CHECK(has(&text, ",group,test_accuracy\n") && has(&text, ",batch 128,0.9799\n"), "%s", text.data);
        text_free(&text);
        CHECK(report_parse_checks(&report,
                                  "adamw/bf16>98.44,adamw/bf16<98.44,adamw/bf16-sr/bf16-sr~0.5,adamw/bf16~0.39", check,
                                  4, &n, error, sizeof error) == 0,
              "%s", error);
        report.check = check;
        report.checks = n;
        CHECK(report_judge(&report) == 2 && check[0].passed && !check[1].passed && check[2].passed && !check[3].passed,
              "accuracies are judged wrongly: %g", check[0].value);
        report_check_text(&report, &check[0], &text);
        HAS("test accuracy 98.450 %, wanted more than 98.44");
        text_free(&text);
        report_html(&report, &text);
        const char *problem = text.data ? unbalanced(text.data) : "nothing written";
        CHECK(!text.failed && !problem, "%s", problem);
        CHECK(has(&text, "batch &lt;512&gt;") && !has(&text, "<512>") &&
                  has(&text, "Test error, 100 % − accuracy, batch 128"),
              "the page lacks a group");
        EQUAL(count(&text, "<svg viewBox=\"0 0 960"), 2 * 3 + 1);
        text_free(&text);
        for (int i = 0; i < report.runs; i++) report_curve_free(&runs[i].accuracies);
    }

    TEST("axes") {
        double x[64], y[64];
        static const double scales[] = {1e-6, 0.03, 1, 700, 2e7};
        for (size_t s = 0; s < COUNT(scales); s++)
            for (int axis = SVG_LINEAR; axis <= SVG_ASINH; axis++) {
                for (int i = 0; i < 64; i++) x[i] = i + 1, y[i] = scales[s] * (1 + i / 20.0);
                struct svg_series series = {.name = "s", .n = 64, .x = x, .y = y, .markers = 1};
                struct svg_chart chart = {0, "t", "x", "y", SVG_LINEAR, axis, 0.01, 300, &series, 1};
                hstep_buffer text = {0};
                svg_line_chart(&text, &chart);
                int ticks = count(&text, "class=\"grid\"") + count(&text, "class=\"zero\"");
                CHECK(ticks >= 2 && ticks <= 16, "scale %g, axis %d: %d lines across", scales[s], axis, ticks);
                text_free(&text);
            }
    }

    for (int i = 0; i < ENTRIES * SEEDS; i++) {
        report_curve_free(&runs[i].train);
        report_curve_free(&runs[i].validation);
    }
    return test_done();
}
