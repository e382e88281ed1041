/* Chen et al. 2023, algorithm 2. */
#ifndef HALFSTEP_REF_LION_H
#define HALFSTEP_REF_LION_H

#include "ref/ref.h"

static inline void ref_lion(const struct ref_hyper *h, struct ref_tensor *r)
{
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), c = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g;
        x->s_new[0] = F(h->beta2) * x->s[0] + F(1 - h->beta2) * g;
        ref_finish(h, x, h->lr, (c > 0) - (c < 0));
    }
}

#define ref_lion_ROWS(X) X("lion", ref_lion, 1e-3, "", 1)

#endif
