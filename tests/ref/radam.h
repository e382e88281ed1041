/* Liu et al. 2020, algorithm 2, with eps beside the debiased root. */
#ifndef HALFSTEP_REF_RADAM_H
#define HALFSTEP_REF_RADAM_H

#include "ref/ref.h"

static inline void ref_radam(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t);
    double limit = 2 / (1 - h->beta2) - 1, length = limit - 2 * r->t * pow(h->beta2, r->t) / correction2;
    double rectify = 0;
    if (length > 5) rectify = sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length));
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x);
        double m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g, v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        double u = m / correction1;
        x->s_new[0] = m;
        x->s_new[1] = v;
        if (rectify > 0) u = ref_ratio(rectify * u, sqrt(v / correction2) + h->eps);
        ref_finish(h, x, h->lr, u);
    }
}

#define ref_radam_ROWS(X) X("radam", ref_radam, 1e-3, "", 1)

#endif
