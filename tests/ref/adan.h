/* Xie et al. 2022, algorithm 1, with decay rates for its 1 - beta, and debiased moments. */
#ifndef HALFSTEP_REF_ADAN_H
#define HALFSTEP_REF_ADAN_H

#include "ref/ref.h"

static inline void ref_adan(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t),
           correction3 = 1 - pow(h->beta3, r->t);
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), difference = r->t > 1 ? g - x->s[3] : 0, ahead = g + F(h->beta2) * difference;
        double m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g,
               v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * difference;
        double n = F(h->beta3) * x->s[2] + F(1 - h->beta3) * ahead * ahead;
        x->s_new[0] = m;
        x->s_new[1] = v;
        x->s_new[2] = n;
        x->s_new[3] = g;
        ref_finish(h, x, h->lr,
                   ref_ratio(m / correction1 + h->beta2 * v / correction2, sqrt(n / correction3) + h->eps));
    }
}

#define ref_adan_ROWS(X) X("adan", ref_adan, 1e-3, "", 1)

#endif
