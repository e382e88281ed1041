/* A running average of the weights, which come in as gradients. It starts as a copy of the first one. With debias the
 * average is the sum of beta^(t-i) w_i over the sum of beta^(t-i). */
#ifndef HALFSTEP_REF_EMA_H
#define HALFSTEP_REF_EMA_H

#include "ref/ref.h"

static inline void ref_ema(const struct ref_hyper *h, struct ref_tensor *r)
{
    double rate = 1 - h->beta;
    if (h->debias != 0) rate /= 1 - pow(h->beta, r->full);
    if (r->full == 1) rate = 1;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        ref_finish(h, x, h->lr, rate * (x->w - x->g));
    }
}

#define ref_ema_ROWS(X)                  \
    X("ema", ref_ema, 1, "beta=0.99", 1) \
    X("ema", ref_ema, 1, "debias=1", 0)

#endif
