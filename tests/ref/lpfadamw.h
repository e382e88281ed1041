/* LPFAdamW, as torchastic describes it. published = 1 is what its code does; 0 debiases the low pass and decays by
 * lr. */
#ifndef HALFSTEP_REF_LPFADAMW_H
#define HALFSTEP_REF_LPFADAMW_H

#include "ref/ref.h"

static inline void ref_lpfadamw(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t),
           correction3 = 1 - pow(h->beta3, r->t);
    struct ref_hyper now = *h;
    if (h->published != 0) now.weight_decay = h->weight_decay / correction2;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), low = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g;
        double amplified = g + h->amplify * (h->published != 0 ? low : low / correction1);
        double m = F(h->beta2) * x->s[1] + F(1 - h->beta2) * amplified;
        double v = F(h->beta3) * x->s[2] + F(1 - h->beta3) * amplified * amplified;
        x->s_new[0] = low;
        x->s_new[1] = m;
        x->s_new[2] = v;
        ref_finish(&now, x, h->lr, ref_ratio(m / correction2, sqrt(v / correction3) + h->eps));
    }
}

#define ref_lpfadamw_ROWS(X)                 \
    X("lpfadamw", ref_lpfadamw, 1e-3, "", 1) \
    X("lpfadamw", ref_lpfadamw, 1e-3, "published=1", 0)

#endif
