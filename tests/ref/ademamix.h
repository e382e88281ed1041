/* Pagliardini et al. 2024, algorithm 1, with the schedules of alpha and beta3 (its appendix A.1). */
#ifndef HALFSTEP_REF_ADEMAMIX_H
#define HALFSTEP_REF_ADEMAMIX_H

#include "ref/ref.h"

static inline void ref_ademamix(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t);
    double alpha = h->alpha, beta3 = h->beta3;
    if (r->t < h->alpha_warmup) alpha *= r->t / h->alpha_warmup;
    if (r->t < h->beta3_warmup) {
        /* exp(ln b1 ln b3 / ((1 - x) ln b3 + x ln b1)). Both sides of the fraction are divided by ln b1, which may be
         * infinite. */
        double x = r->t / h->beta3_warmup, fast = log(h->beta1), slow = log(h->beta3);
        beta3 = fmin(exp(slow / ((1 - x) * slow / fast + x)), h->beta3);
    }
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x);
        double m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g, v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        double a = F(beta3) * x->s[2] + F(1 - beta3) * g;
        x->s_new[0] = m;
        x->s_new[1] = v;
        x->s_new[2] = a;
        ref_finish(h, x, h->lr, ref_ratio(m / correction1 + alpha * a, sqrt(v / correction2) + h->eps));
    }
}

#define ref_ademamix_ROWS(X)                 \
    X("ademamix", ref_ademamix, 1e-3, "", 1) \
    X("ademamix", ref_ademamix, 1e-3, "alpha_warmup=300 beta3_warmup=600", 0)

#endif
