/* Momentum as torch.optim.SGD documents it: the first update fills the buffer with the gradient, undampened. */
#ifndef HALFSTEP_REF_SGD_H
#define HALFSTEP_REF_SGD_H

#include "ref/ref.h"

static inline void ref_sgd(const struct ref_hyper *h, double step, struct ref_element *x)
{
    double g = ref_gradient(h, x), old = 0, new = g;
    if (h->momentum != 0 && step > 1) {
        old = F(h->momentum) * x->s[0];
        new = F(1 - h->dampening) * g;
    }
    double b = old + new, u = b, size = fabs(old) + fabs(new);
    if (h->momentum != 0 && h->nesterov != 0) {
        u = g + F(h->momentum) * b;
        size = fabs(g) + F(h->momentum) * size;
    }
    x->s_new[0] = b;
    x->s_new[1] = 0;
    ref_finish(x, F(h->lr) * u + F(ref_decay_factor(h)) * x->w);
    x->size = fmax(x->size, h->lr * size);
}

#endif
