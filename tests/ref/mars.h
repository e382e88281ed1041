/* Yuan et al. 2024, algorithm 2 (MARS-AdamW) with the gradient of the last batch in the place of a second one. */
#ifndef HALFSTEP_REF_MARS_H
#define HALFSTEP_REF_MARS_H

#include "ref/ref.h"

static inline void ref_mars(const struct ref_hyper *h, struct ref_tensor *r)
{
    double correction1 = 1 - pow(h->beta1, r->t), correction2 = 1 - pow(h->beta2, r->t), sum = 0;
    double ahead = h->gamma * h->beta1 / (1 - h->beta1);
    for (int i = 0; i < r->n; i++) {
        double g = ref_gradient(h, &r->x[i]), c = g + ahead * (g - r->x[i].s[2]);
        sum += c * c;
    }
    r->scalar[0] = sqrt(sum);
    double scale = h->max_norm > 0 && sqrt(sum) > h->max_norm ? h->max_norm / sqrt(sum) : 1;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), c = scale * (g + ahead * (g - x->s[2]));
        x->s_new[0] = F(h->beta1) * x->s[0] + F(1 - h->beta1) * c;
        x->s_new[1] = F(h->beta2) * x->s[1] + F(1 - h->beta2) * c * c;
        x->s_new[2] = g;
        ref_finish(h, x, h->lr, ref_ratio(x->s_new[0] / correction1, sqrt(x->s_new[1] / correction2) + h->eps));
    }
}

#define ref_mars_ROWS(X)             \
    X("mars", ref_mars, 1e-3, "", 1) \
    X("mars", ref_mars, 1e-3, "max_norm=0", 0)

#endif
