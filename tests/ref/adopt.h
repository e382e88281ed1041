/* Taniguchi et al. 2024, algorithm 2 with its clipping. Steps are counted as the authors do: the first gradient only
 * makes v. */
#ifndef HALFSTEP_REF_ADOPT_H
#define HALFSTEP_REF_ADOPT_H

#include "ref/ref.h"

static inline void ref_adopt(const struct ref_hyper *h, struct ref_tensor *r)
{
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x);
        if (r->t == 1) {
            x->w_new = x->w;
            x->s_new[0] = 0;
            x->s_new[1] = g * g;
            continue;
        }
        double n = ref_ratio(g, fmax(sqrt(x->s[1]), F(h->eps)));
        if (h->clipped != 0) n = fmax(-pow(r->t - 1, h->clip_power), fmin(n, pow(r->t - 1, h->clip_power)));
        double m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * n;
        x->s_new[0] = m;
        x->s_new[1] = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        ref_finish(h, x, h->lr, m);
    }
}

#define ref_adopt_ROWS(X)              \
    X("adopt", ref_adopt, 1e-3, "", 1) \
    X("adopt", ref_adopt, 1e-3, "clipped=0 beta2=0.99", 0)

#endif
