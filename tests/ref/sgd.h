/* Momentum as torch.optim.SGD documents it: the first update fills the buffer with the gradient, undampened. */
#ifndef HALFSTEP_REF_SGD_H
#define HALFSTEP_REF_SGD_H

#include "ref/ref.h"

static inline void ref_sgd(const struct ref_hyper *h, struct ref_tensor *r)
{
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), u = g;
        if (h->momentum != 0) {
            double b = r->t == 1 ? g : F(h->momentum) * x->s[0] + F(1 - h->dampening) * g;
            x->s_new[0] = b;
            u = h->nesterov != 0 ? g + F(h->momentum) * b : b;
        }
        ref_finish(h, x, h->lr, u);
    }
}

#define ref_sgd_ROWS(X)                                   \
    X("sgd", ref_sgd, 3e-2, "momentum=0.9 nesterov=1", 1) \
    X("sgd", ref_sgd, 1e-1, "", 0)

#endif
