/* You et al. 2020, algorithm 2, with the exponent and options of the LAMB16 package's baseline. Those are an upper
 * bound of the weight's norm, no bias correction, and a ratio of 1. */
#ifndef HALFSTEP_REF_LAMB_H
#define HALFSTEP_REF_LAMB_H

#include "ref/ref.h"

static inline void ref_lamb(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1, correction2 = 1;
    if (h->debias != 0) {
        correction1 = 1 - pow(h->beta1, r->t);
        correction2 = 1 - pow(h->beta2, r->t);
    }
    double lambda = ref_decay_factor(h) / h->lr, weights = 0, updates = 0, ratio = 1;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g;
        double v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        x->s_new[0] = m;
        x->s_new[1] = v;
        x->w_new = ref_ratio(m / correction1, sqrt(v / correction2) + h->eps) + lambda * x->w;
        weights += x->w * x->w;
        updates += x->w_new * x->w_new;
    }
    weights = sqrt(weights);
    updates = sqrt(updates);
    if (h->max_weight_norm != 0) weights = fmin(weights, h->max_weight_norm);
    if (weights != 0 && updates != 0 && h->adam == 0) ratio = pow(weights / updates, h->trust_scale);
    for (int i = 0; i < r->n; i++) r->x[i].w_new = r->x[i].w - h->lr * ratio * r->x[i].w_new;
    r->scalar[0] = weights;
    r->scalar[1] = updates;
    r->scalar[2] = ratio;
}

#define ref_lamb_ROWS(X)             \
    X("lamb", ref_lamb, 2e-3, "", 1) \
    X("lamb", ref_lamb, 2e-3, "debias=0 trust_scale=0.5", 0)

#endif
