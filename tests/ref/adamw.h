/* Kingma & Ba 2015, algorithm 1, and Loshchilov & Hutter 2019, algorithm 2. */
#ifndef HALFSTEP_REF_ADAMW_H
#define HALFSTEP_REF_ADAMW_H

#include "ref/ref.h"

static inline void ref_adamw(const struct ref_hyper *h, double step, struct ref_element *x)
{
    double g = ref_gradient(h, x), old = F(h->beta1) * x->s[0], new = F(1 - h->beta1) * g;
    double m = old + new, v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
    double lr = F(h->lr / (1 - pow(h->beta1, step)));
    double denominator = sqrt(v) * F(1 / sqrt(1 - pow(h->beta2, step))) + F(h->eps);
    x->s_new[0] = m;
    x->s_new[1] = v;
    ref_finish(x, (denominator > 0 ? lr * m / denominator : 0) + F(ref_decay_factor(h)) * x->w);
    /* m may cancel: its error is that of its two terms. */
    if (denominator > 0) x->size = fmax(x->size, lr * (fabs(old) + fabs(new)) / denominator);
}

#endif
