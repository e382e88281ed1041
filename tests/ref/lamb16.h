/* Lamb16 as its package computes it, without the scaling of 8-bit states. Squares are clipped, norms are divided by n,
 * the ratio has a factor 1e-3 / lr and lies between 0 and 2. */
#ifndef HALFSTEP_REF_LAMB16_H
#define HALFSTEP_REF_LAMB16_H

#include "ref/ref.h"

static inline double ref_lamb16_square(double x, double eps) { return fmin(fmax(x * x, eps), 1); }

static inline void ref_lamb16(const struct ref_hyper *h, struct ref_tensor *r)
{
    double lambda = ref_decay_factor(h) / h->lr, weights = 0, updates = 0, ratio = 1;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g;
        double v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        x->s_new[0] = m;
        x->s_new[1] = v;
        x->w_new = ref_ratio(m, sqrt(v) + h->eps) + lambda * x->w;
        weights += ref_lamb16_square(x->w, h->eps);
        updates += ref_lamb16_square(x->w_new, h->eps);
    }
    weights = sqrt(weights) / r->n;
    updates = sqrt(updates) / r->n;
    if (weights != 0 && updates != 0) ratio = fmin(pow(weights / updates * 1e-3 / h->lr, h->trust_scale), 2);
    for (int i = 0; i < r->n; i++) r->x[i].w_new = r->x[i].w - h->lr * ratio * r->x[i].w_new;
    r->scalar[0] = weights;
    r->scalar[1] = updates;
    r->scalar[2] = ratio;
}

#define ref_lamb16_ROWS(X) X("lamb16", ref_lamb16, 2e-3, "", 1)

#endif
