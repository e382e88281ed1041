/* Charts as inline SVG: lines with bands, and stacked horizontal bars. They use no script and no outside resource. The
 * page's style sheet defines the colours by class. Series i is drawn in class "s<i>" for the first SVG_COLORS series,
 * then again in the same classes with dashes. Part p of a bar has class "p<p>". */
#ifndef HALFSTEP_UI_SVG_H
#define HALFSTEP_UI_SVG_H

#include "common/text.h"

#define SVG_COLORS 8

enum svg_axis {
    SVG_LINEAR,
    SVG_LOG,
    SVG_ASINH /* linear around zero, logarithmic far from it, both signs */
};

struct svg_series {
    const char *name;
    int color; /* index of the series in the whole report */
    int n;
    const double *x, *y; /* the line breaks at values that are not finite or, on a logarithmic axis, not positive */
    const double *low, *high; /* edges of a band around the line, or NULL */
    int wide;                 /* a broad pale line below the others */
    int markers;              /* a dot with a hover text at each point */
    int loose;                /* the axis of y need not reach its values, unless all series are loose */
};

struct svg_chart {
    int id;            /* unique in the page */
    const char *title; /* for screen readers */
    const char *x_label, *y_label;
    enum svg_axis x_axis, y_axis;
    double knee; /* of SVG_ASINH: where it turns from linear to logarithmic */
    int height;
    const struct svg_series *series;
    int n;
};

void svg_line_chart(hstep_buffer *out, const struct svg_chart *chart);

/* Appends a sample of a line for a legend. */
void svg_swatch(hstep_buffer *out, int color, int wide);

struct svg_bar {
    const char *name;
    const double *parts; /* n_parts values, none negative */
};

/* Hover texts show part_names and, after each number, `unit`. */
void svg_bar_chart(hstep_buffer *out, const char *title, const struct svg_bar *bars, int n,
                   const char *const *part_names, int n_parts, const char *unit);

#endif
