/* Compass, as torchastic describes it. published = 1 is what its code does; 0 debiases the average where it is used and
 * changes nothing else. */
#ifndef HALFSTEP_REF_COMPASS_H
#define HALFSTEP_REF_COMPASS_H

#include "ref/ref.h"

static inline void ref_compass(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t);
    struct ref_hyper now = *h;
    if (h->published != 0) now.lr = h->lr / correction1;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g;
        double amplified = g + h->amplify * (h->published != 0 ? m : m / correction1);
        double v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * amplified * amplified;
        x->s_new[0] = m;
        x->s_new[1] = v;
        ref_finish(&now, x, now.lr, ref_ratio(amplified, sqrt(v / correction2) + h->eps));
    }
}

#define ref_compass_ROWS(X)                \
    X("compass", ref_compass, 1e-3, "", 1) \
    X("compass", ref_compass, 1e-3, "published=1", 0)

#endif
