/* Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2. For amsgrad Reddi et al. 2018, algorithm 2: the
 * maximum is of raw second moments and is debiased afterwards, as in torch.optim. */
#ifndef HALFSTEP_REF_ADAMW_H
#define HALFSTEP_REF_ADAMW_H

#include "ref/ref.h"

static inline void ref_adamw(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t);
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x);
        double m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g, v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        double most = h->amsgrad != 0 ? fmax(x->s[2], v) : v;
        x->s_new[0] = m;
        x->s_new[1] = v;
        if (h->amsgrad != 0) x->s_new[2] = most;
        ref_finish(h, x, h->lr, ref_ratio(m / correction1, sqrt(most / correction2) + h->eps));
    }
}

#define ref_adamw_ROWS(X) X("adamw", ref_adamw, 1e-3, "", 1)

#endif
