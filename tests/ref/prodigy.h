/* Mishchenko and Defazio 2023, algorithm 4, as in the authors' package, for one tensor. The step and its decay use the
 * d before the update; eps uses the d after it. */
#ifndef HALFSTEP_REF_PRODIGY_H
#define HALFSTEP_REF_PRODIGY_H

#include "ref/ref.h"

static inline void ref_prodigy(const struct ref_hyper *h, struct ref_tensor *r)
{
    double d = r->scalar[0] > 0 ? r->scalar[0] : h->d0, d_max = r->scalar[0] > 0 ? r->scalar[1] : h->d0;
    double beta3 = h->beta3 == 0 ? sqrt(h->beta2) : h->beta3, next = d, product = 0, length = 0;
    double bias = h->debias != 0 ? sqrt(1 - pow(h->beta2, r->t)) / (1 - pow(h->beta1, r->t)) : 1;
    double dlr = d * h->lr * bias, decay = d * bias * ref_decay_factor(h);
    double fresh = d / h->d0 * (h->safeguard_warmup != 0 ? d : dlr);
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        double g = ref_gradient(h, x);
        int counts = i % (int)h->slice_p == 0;
        if (counts) product += g * (x->s[3] - x->w);
        x->s_new[0] = F(h->beta1) * x->s[0] + (1 - h->beta1) * d * g;
        x->s_new[1] = F(h->beta2) * x->s[1] + (1 - h->beta2) * d * d * g * g;
        x->s_new[2] = F(beta3) * x->s[2] + fresh * g;
        x->s_new[3] = x->s[3];
        if (counts) length += fabs(x->s_new[2]);
    }
    if (length > 0) {
        r->scalar[2] = beta3 * r->scalar[2] + d / h->d0 * dlr * product;
        double d_hat = h->d_coef * r->scalar[2] / length;
        if (d == h->d0) next = fmax(d, d_hat);
        d_max = fmax(d_max, d_hat);
        next = fmin(d_max, next * h->growth_rate);
        r->scalar[0] = next;
        r->scalar[1] = d_max;
    } else {
        dlr = decay = 0;
    }
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        x->w_new = x->w - dlr * ref_ratio(x->s_new[0], sqrt(x->s_new[1]) + next * h->eps) - decay * x->w;
    }
}

/* The options bound the estimate. It would grow without end, because these gradients do not react to the weights. */
#define ref_prodigy_ROWS(X)                                         \
    X("prodigy", ref_prodigy, 1e-3, "d0=1", 1)                      \
    X("prodigy", ref_prodigy, 1e-1, "d0=1e-2 growth_rate=1.001", 0) \
    X("prodigy", ref_prodigy, 1e-3, "d0=1 slice_p=11", 0)

#endif
