/* Charts as inline SVG: lines with bands, and stacked horizontal bars. No script, no outside resource; colours come
 * from the page's style sheet by class: series i is drawn in class "s<i>" (SVG_COLORS of them, then again with dashes),
 * part p of a bar in class "p<p>". */
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
    const double *x, *y;      /* what is not finite, or not positive on a logarithmic axis, breaks the line */
    const double *low, *high; /* edges of a band around the line, or NULL */
    int wide;                 /* a broad pale line for others to lie on */
    int markers;              /* a dot with a hover text at each point */
};

struct svg_chart {
    int id;            /* unique in the page */
    const char *title; /* for screen readers */
    const char *x_label, *y_label;
    enum svg_axis x_axis, y_axis;
    double knee; /* of SVG_ASINH */
    int height;
    const struct svg_series *series;
    int n;
};

void svg_line_chart(struct text *out, const struct svg_chart *chart);

/* A line or dash sample for a legend. */
void svg_swatch(struct text *out, int color, int wide);

struct svg_bar {
    const char *name;
    const double *parts; /* n_parts of them, none negative */
};

/* part_names: for the hover texts; unit: after each number in them. */
void svg_bar_chart(struct text *out, const char *title, const struct svg_bar *bars, int n,
                   const char *const *part_names, int n_parts, const char *unit);

#endif
