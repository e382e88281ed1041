/* Luo et al. 2023, algorithm 2, as in the authors' package. The gradient is divided by the root of the factored second
 * moment, clipped by its root mean square, and averaged. Its squared distance from the average is factored likewise,
 * and the root of that divides the average. */
#ifndef HALFSTEP_REF_CAME_H
#define HALFSTEP_REF_CAME_H

#include <stdlib.h>

#include "ref/ref.h"

static inline int ref_is_matrix(const struct ref_tensor *r) { return r->ndim > 1 && r->rows > 1 && r->columns > 1; }

/* Updates states `state` and `state + 1`, averages of the means over columns and over rows. Every element stores its
 * row's and its column's value. Returns the mean of state `state` over the rows. */
static inline double ref_vectors(struct ref_tensor *r, const double *value, int state, double keep, double add)
{
    double mean = 0;
    for (int i = 0; i < r->rows; i++) {
        double sum = 0;
        for (int j = 0; j < r->columns; j++) sum += value[i * r->columns + j];
        for (int j = 0; j < r->columns; j++) {
            struct ref_element *x = &r->x[i * r->columns + j];
            x->s_new[state] = keep * x->s[state] + add * sum / r->columns;
        }
        mean += r->x[i * r->columns].s_new[state] / r->rows;
    }
    for (int j = 0; j < r->columns; j++) {
        double sum = 0;
        for (int i = 0; i < r->rows; i++) sum += value[i * r->columns + j];
        for (int i = 0; i < r->rows; i++) {
            struct ref_element *x = &r->x[i * r->columns + j];
            x->s_new[state + 1] = keep * x->s[state + 1] + add * sum / r->rows;
        }
    }
    return mean;
}

static inline void ref_came(const struct ref_hyper *h, struct ref_tensor *r)
{
    int matrix = ref_is_matrix(r);
    double *value = malloc(sizeof *value * (size_t)r->n), *u = malloc(sizeof *u * (size_t)r->n), squares = 0, mean = 0;
    if (!value || !u) abort();
    for (int i = 0; i < r->n; i++) {
        double g = ref_gradient(h, &r->x[i]);
        value[i] = g * g + h->eps;
    }
    if (matrix) mean = ref_vectors(r, value, 2, F(h->beta2), 1 - h->beta2);
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        double second =
            matrix ? ref_ratio(x->s_new[2], mean) * x->s_new[3] : F(h->beta2) * x->s[1] + (1 - h->beta2) * value[i];
        if (!matrix) x->s_new[1] = second;
        u[i] = ref_ratio(ref_gradient(h, x), sqrt(second));
        squares += u[i] * u[i];
    }
    r->scalar[0] = sqrt(squares / r->n);
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        if (h->clip_threshold > 0) u[i] /= fmax(1, r->scalar[0] / h->clip_threshold);
        x->s_new[0] = F(h->beta1) * x->s[0] + F(1 - h->beta1) * u[i];
        value[i] = (u[i] - x->s_new[0]) * (u[i] - x->s_new[0]) + h->instability_eps;
    }
    if (matrix) mean = ref_vectors(r, value, 4, F(h->beta3), 1 - h->beta3);
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double divisor = matrix ? sqrt(ref_ratio(x->s_new[4], mean) * x->s_new[5]) : 1;
        ref_finish(h, x, h->lr, ref_ratio(x->s_new[0], divisor));
    }
    free(value);
    free(u);
}

#define ref_came_ROWS(X)             \
    X("came", ref_came, 1e-3, "", 1) \
    X("came", ref_came, 1e-3, "clip_threshold=0 beta3=0.99", 0)

#endif
