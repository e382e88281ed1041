/* Chen et al. 2023, algorithm 2. */
#ifndef HALFSTEP_REF_LION_H
#define HALFSTEP_REF_LION_H

#include "ref/ref.h"

static inline void ref_lion(const struct ref_hyper *h, double step, struct ref_element *x)
{
    (void)step;
    double g = ref_gradient(h, x), old = F(h->beta1) * x->s[0], new = F(1 - h->beta1) * g, c = old + new;
    x->s_new[0] = F(h->beta2) * x->s[0] + F(1 - h->beta2) * g;
    x->s_new[1] = 0;
    ref_finish(x, F(h->lr) * ((c > 0) - (c < 0)) + F(ref_decay_factor(h)) * x->w);
    x->size = fmax(x->size, h->lr);
    /* A sum that cancels to the last place has no sign that fp32 could be held to: either is right. */
    if (fabs(c) < 0x1p-22 * (fabs(old) + fabs(new))) x->size = INFINITY;
}

#endif
