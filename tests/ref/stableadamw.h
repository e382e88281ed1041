/* Wortsman et al. 2023, algorithm 2. AdamW's moments are debiased where they are used, which equals the paper's
 * debiased decay rates. For the root mean square, eps is a lower bound of the root. */
#ifndef HALFSTEP_REF_STABLEADAMW_H
#define HALFSTEP_REF_STABLEADAMW_H

#include "ref/ref.h"

static inline void ref_stableadamw(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t), sum = 0;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        double share = ref_ratio(g, fmax(sqrt(v / correction2), h->eps));
        sum += share * share;
        x->s_new[0] = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g;
        x->s_new[1] = v;
    }
    double rms = sqrt(sum / r->n), clip = 1 / fmax(1, rms);
    r->scalar[0] = rms;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double u = ref_ratio(x->s_new[0] / correction1, sqrt(x->s_new[1] / correction2) + h->eps);
        x->w_new = x->w - clip * (h->lr * u + ref_decay_factor(h) * x->w);
    }
}

#define ref_stableadamw_ROWS(X) X("stableadamw", ref_stableadamw, 1e-3, "", 1)

#endif
