#include "trainer/report/svg.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Sizes in the units of the view box, which the page scales to its width. */
#define WIDTH 960
#define LEFT 70
#define RIGHT 14
#define TOP 10
#define BOTTOM 44
#define MAX_TICKS 32

struct axis {
    enum svg_axis kind;
    double knee;
    double low, high; /* data values at the ends */
    double from, to;  /* their positions */
    double tick[MAX_TICKS];
    int ticks;
};

static double transform(const struct axis *axis, double value)
{
    switch (axis->kind) {
    case SVG_LOG: return log10(value);
    case SVG_ASINH: return asinh(value / axis->knee);
    default: return value;
    }
}

static double place(const struct axis *axis, double value)
{
    double low = transform(axis, axis->low), high = transform(axis, axis->high);
    return axis->from + (axis->to - axis->from) * (transform(axis, value) - low) / (high - low);
}

static void add_tick(struct axis *axis, double value)
{
    double slack = 1e-9 * (fabs(axis->low) + fabs(axis->high));
    if (axis->ticks < MAX_TICKS && value >= axis->low - slack && value <= axis->high + slack)
        axis->tick[axis->ticks++] = value;
}

/* Returns a step of 1, 2 or 5 times a power of ten that splits the span into about the wanted number of parts. */
static double round_step(double span, int wanted)
{
    double raw = span / wanted, power = pow(10, floor(log10(raw))), mantissa = raw / power;
    return power * (mantissa <= 1 ? 1 : mantissa <= 2 ? 2 : mantissa <= 5 ? 5 : 10);
}

static void linear_ticks(struct axis *axis, int wanted)
{
    double step = round_step(axis->high - axis->low, wanted);
    axis->ticks = 0;
    for (double i = ceil(axis->low / step - 1e-9); i * step <= axis->high + 1e-9 * step && axis->ticks < MAX_TICKS; i++)
        add_tick(axis, i * step);
}

static void log_ticks(struct axis *axis)
{
    static const double fine[] = {1, 2, 5}, coarse[] = {1};
    double decades = log10(axis->high / axis->low);
    const double *mantissa = decades > 3.5 ? coarse : fine;
    int n = decades > 3.5 ? 1 : 3;
    axis->ticks = 0;
    for (double e = floor(log10(axis->low)); e <= ceil(log10(axis->high)); e++)
        for (int i = 0; i < n; i++) add_tick(axis, mantissa[i] * pow(10, e));
    if (axis->ticks < 2) linear_ticks(axis, 5);
}

/* Adds ticks at zero and, on both sides, at 1, 3, 10, 30 ... times the power of ten near the knee. Leaves out ticks
 * that are too close to the last one. */
static void asinh_ticks(struct axis *axis, double apart)
{
    double unit = pow(10, floor(log10(axis->knee) + 0.5)), last = place(axis, 0);
    axis->ticks = 0;
    add_tick(axis, 0);
    for (int sign = -1; sign <= 1; sign += 2) {
        double previous = last;
        for (int i = 0; i < 24; i++) {
            double value = sign * unit * pow(10, i / 2) * (i % 2 ? 3 : 1);
            if (value < axis->low || value > axis->high) continue;
            if (fabs(place(axis, value) - previous) < apart) continue;
            add_tick(axis, value);
            previous = place(axis, value);
        }
    }
}

static void set_axis(struct axis *axis, double low, double high, int wanted)
{
    if (!(low <= high)) low = axis->kind == SVG_LOG ? 1 : 0, high = low + 1; /* nothing to draw */
    if (axis->kind == SVG_LOG) {
        if (high / low < 1.01) high = low * 1.01;
        axis->low = low;
        axis->high = high;
        log_ticks(axis);
    } else if (axis->kind == SVG_ASINH) {
        double margin = 1.15;
        axis->low = fmin(low, -axis->knee) * margin;
        axis->high = fmax(high, axis->knee) * margin;
        asinh_ticks(axis, 24);
    } else {
        double span = high - low;
        if (span <= 1e-9 * fabs(high)) span = fabs(high) > 0 ? 0.01 * fabs(high) : 1;
        axis->low = low;
        axis->high = low + span;
        linear_ticks(axis, wanted);
    }
}

static void number(char *text, size_t size, double value, double step)
{
    if (value == 0) {
        snprintf(text, size, "0");
    } else if (fabs(value) >= 1e6) {
        snprintf(text, size, "%gM", value / 1e6);
    } else if (fabs(value) >= 1e4) {
        snprintf(text, size, "%gk", value / 1e3);
    } else if (step > 0) {
        int decimals = step < 1 ? (int)ceil(-log10(step) - 1e-9) : 0;
        snprintf(text, size, "%.*f", decimals > 9 ? 9 : decimals, value);
    } else {
        snprintf(text, size, "%g", value);
    }
}

static int drawable(const struct svg_chart *chart, double x, double y)
{
    return isfinite(x) && isfinite(y) && (chart->x_axis != SVG_LOG || x > 0) && (chart->y_axis != SVG_LOG || y > 0);
}

static void find_range(const struct svg_chart *chart, double range[4])
{
    int all_loose = 1;
    range[0] = range[2] = INFINITY;
    range[1] = range[3] = -INFINITY;
    for (int s = 0; s < chart->n; s++) all_loose &= chart->series[s].loose;
    for (int s = 0; s < chart->n; s++) {
        const struct svg_series *series = &chart->series[s];
        for (int i = 0; i < series->n; i++) {
            if (!drawable(chart, series->x[i], series->y[i])) continue;
            double low = series->low && isfinite(series->low[i]) ? series->low[i] : series->y[i];
            double high = series->high && isfinite(series->high[i]) ? series->high[i] : series->y[i];
            range[0] = fmin(range[0], series->x[i]);
            range[1] = fmax(range[1], series->x[i]);
            if (series->loose && !all_loose) continue;
            range[2] = fmin(range[2], low);
            range[3] = fmax(range[3], high);
        }
    }
}

static void draw_axes(hstep_buffer *out, const struct svg_chart *chart, const struct axis *x, const struct axis *y)
{
    char label[64];
    double step = y->kind == SVG_LINEAR && y->ticks > 1 ? y->tick[1] - y->tick[0] : 0;
    for (int i = 0; i < y->ticks; i++) {
        double at = place(y, y->tick[i]);
        number(label, sizeof label, y->tick[i], step);
        const char *sign = y->kind == SVG_ASINH && y->tick[i] > 0 ? "+" : "";
        hstep_append_format(out, "<line class=\"%s\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>",
                            y->kind == SVG_ASINH && y->tick[i] == 0 ? "zero" : "grid", LEFT, WIDTH - RIGHT, at, at);
        hstep_append_format(out, "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s%s</text>\n", LEFT - 8, at + 4, sign,
                            label);
    }
    step = x->kind == SVG_LINEAR && x->ticks > 1 ? x->tick[1] - x->tick[0] : 0;
    for (int i = 0; i < x->ticks; i++) {
        double at = place(x, x->tick[i]);
        number(label, sizeof label, x->tick[i], step);
        hstep_append_format(out, "<line class=\"tick\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", at, at,
                            y->from, y->from + 5);
        hstep_append_format(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%s</text>\n", at, y->from + 19,
                            label);
    }
    hstep_append_format(out, "<line class=\"tick\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>", LEFT, WIDTH - RIGHT,
                        y->from, y->from);
    hstep_append_format(out, "<text class=\"axis\" x=\"%d\" y=\"%d\" text-anchor=\"middle\">",
                        (LEFT + WIDTH - RIGHT) / 2, chart->height - 6);
    text_add_html(out, chart->x_label);
    hstep_append_format(
        out, "%s</text>\n<text class=\"axis\" transform=\"translate(13 %.1f) rotate(-90)\" text-anchor=\"middle\">",
        x->kind == SVG_LOG ? " (logarithmic)" : "", (y->from + y->to) / 2);
    text_add_html(out, chart->y_label);
    hstep_append_format(out, "%s</text>\n", y->kind == SVG_LOG ? " (logarithmic)" : "");
}

static void draw_band(hstep_buffer *out, const struct svg_chart *chart, const struct svg_series *series,
                      const struct axis *x, const struct axis *y)
{
    if (!series->low || !series->high) return;
    for (int i = 0; i < series->n;) {
        int end = i;
        while (end < series->n && drawable(chart, series->x[end], series->low[end]) &&
               drawable(chart, series->x[end], series->high[end]))
            end++;
        if (end - i > 1) {
            hstep_append_format(out, "<path class=\"band s%d\" d=\"", series->color % SVG_COLORS);
            for (int k = i; k < end; k++)
                hstep_append_format(out, "%s%.1f %.1f", k == i ? "M" : "L", place(x, series->x[k]),
                                    place(y, series->high[k]));
            for (int k = end - 1; k >= i; k--)
                hstep_append_format(out, "L%.1f %.1f", place(x, series->x[k]), place(y, series->low[k]));
            hstep_append_format(out, "Z\"/>\n");
        }
        i = end > i ? end : i + 1;
    }
}

static const char *dashes(int color)
{
    static const char *const pattern[] = {"", " stroke-dasharray=\"7 4\"", " stroke-dasharray=\"2 3\""};
    return pattern[color / SVG_COLORS % 3];
}

static void draw_line(hstep_buffer *out, const struct svg_chart *chart, const struct svg_series *series,
                      const struct axis *x, const struct axis *y)
{
    int open = 0;
    hstep_append_format(out, "<path class=\"line%s s%d\"%s d=\"", series->wide ? " wide" : "",
                        series->color % SVG_COLORS, dashes(series->color));
    for (int i = 0; i < series->n; i++) {
        int good = drawable(chart, series->x[i], series->y[i]);
        if (good)
            hstep_append_format(out, "%s%.1f %.2f", open ? "L" : "M", place(x, series->x[i]), place(y, series->y[i]));
        open = good;
    }
    text_add_between(out, "\"><title>", series->name, "</title></path>\n");
}

/* Draws dots if there are few points. A larger invisible disc around each point makes it easier to hit. */
static void draw_markers(hstep_buffer *out, const struct svg_chart *chart, const struct svg_series *series,
                         const struct axis *x, const struct axis *y)
{
    for (int i = 0; i < series->n; i++) {
        if (!drawable(chart, series->x[i], series->y[i])) continue;
        double cx = place(x, series->x[i]), cy = place(y, series->y[i]);
        hstep_append_format(out, "<g class=\"dot s%d\">", series->color % SVG_COLORS);
        if (series->n <= 60)
            hstep_append_format(out, "<circle cx=\"%.1f\" cy=\"%.2f\" r=\"%s\"/>", cx, cy,
                                series->wide ? "4.5" : "2.6");
        hstep_append_format(out, "<circle class=\"hit\" cx=\"%.1f\" cy=\"%.2f\" r=\"8\"/><title>", cx, cy);
        text_add_html(out, series->name);
        hstep_append_format(out, "\n%.0f: ", series->x[i]);
        hstep_append_format(out, chart->y_axis == SVG_ASINH ? "%+.4f" : "%.4f", series->y[i]);
        if (series->low && series->high) hstep_append_format(out, " (%.4f to %.4f)", series->low[i], series->high[i]);
        hstep_append_format(out, "</title></g>\n");
    }
}

void svg_line_chart(hstep_buffer *out, const struct svg_chart *chart)
{
    double range[4];
    find_range(chart, range);
    struct axis x = {.kind = chart->x_axis, .from = LEFT, .to = WIDTH - RIGHT};
    struct axis y = {.kind = chart->y_axis, .knee = chart->knee, .from = chart->height - BOTTOM, .to = TOP};
    set_axis(&x, range[0], range[1], 8);
    double margin = chart->y_axis == SVG_LINEAR ? 0.04 * (range[3] - range[2]) : 0;
    set_axis(&y, range[2] - margin, range[3] + margin, 6);

    hstep_append_format(out, "<svg viewBox=\"0 0 %d %d\" role=\"img\" aria-label=\"", WIDTH, chart->height);
    text_add_html(out, chart->title);
    hstep_append_format(
        out, "\">\n<clipPath id=\"plot%d\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/></clipPath>\n",
        chart->id, LEFT, TOP - 4, WIDTH - LEFT - RIGHT + 4, chart->height - TOP - BOTTOM + 8);
    draw_axes(out, chart, &x, &y);
    hstep_append_format(out, "<g clip-path=\"url(#plot%d)\">\n", chart->id);
    for (int wide = 1; wide >= 0; wide--)
        for (int i = 0; i < chart->n; i++)
            if (chart->series[i].wide == wide) draw_band(out, chart, &chart->series[i], &x, &y);
    for (int wide = 1; wide >= 0; wide--)
        for (int i = 0; i < chart->n; i++)
            if (chart->series[i].wide == wide) draw_line(out, chart, &chart->series[i], &x, &y);
    for (int wide = 1; wide >= 0; wide--)
        for (int i = 0; i < chart->n; i++)
            if (chart->series[i].wide == wide && chart->series[i].markers)
                draw_markers(out, chart, &chart->series[i], &x, &y);
    hstep_append_format(out, "</g>\n</svg>\n");
}

void svg_swatch(hstep_buffer *out, int color, int wide)
{
    hstep_append_format(
        out,
        "<svg class=\"swatch\" viewBox=\"0 0 28 10\" aria-hidden=\"true\"><path class=\"line%s s%d\"%s d=\"M2 "
        "5H26\"/></svg>",
        wide ? " wide" : "", color % SVG_COLORS, dashes(color));
}

void svg_bar_chart(hstep_buffer *out, const char *title, const struct svg_bar *bars, int n,
                   const char *const *part_names, int n_parts, const char *unit)
{
    enum { ROW = 32, BAR = 20, LETTER = 8 };
    double most = 0;
    size_t longest = 0;
    for (int i = 0; i < n; i++) {
        double total = 0;
        for (int p = 0; p < n_parts; p++) total += bars[i].parts[p];
        most = fmax(most, total);
        size_t length = strlen(bars[i].name);
        longest = length > longest ? length : longest;
    }
    if (!(most > 0)) most = 1;
    double left = 12 + LETTER * (double)longest, right = WIDTH - 70, height = n * ROW + 4;
    if (left > WIDTH / 2) left = WIDTH / 2;
    hstep_append_format(out, "<svg viewBox=\"0 0 %d %.0f\" role=\"img\" aria-label=\"", WIDTH, height);
    text_add_html(out, title);
    hstep_append_format(out, "\">\n");
    for (int i = 0; i < n; i++) {
        double top = i * ROW + (ROW - BAR) / 2.0, at = left, total = 0;
        hstep_append_format(out, "<text class=\"code\" x=\"0\" y=\"%.1f\">", top + BAR - 5.5);
        text_add_html(out, bars[i].name);
        hstep_append_format(out, "</text>");
        for (int p = 0; p < n_parts; p++) {
            double width = (right - left) * bars[i].parts[p] / most;
            total += bars[i].parts[p];
            if (width <= 0) continue;
            hstep_append_format(out, "<g><rect class=\"p%d\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%d\"/>", p,
                                at, top, fmax(width - 1.5, 0.5), BAR);
            if (width > 44)
                hstep_append_format(out,
                                    "<text class=\"inside\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%.4g</text>",
                                    at + width / 2, top + BAR - 5.5, bars[i].parts[p]);
            hstep_append_format(out, "<title>");
            text_add_html(out, bars[i].name);
            hstep_append_format(out, "\n%s: %.4g %s</title></g>", part_names[p], bars[i].parts[p], unit);
            at += width;
        }
        hstep_append_format(out, "<text class=\"total\" x=\"%.1f\" y=\"%.1f\">%.4g</text>\n", at + 6, top + BAR - 5.5,
                            total);
    }
    hstep_append_format(out, "</svg>\n");
}
