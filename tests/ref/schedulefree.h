/* Defazio et al. 2024, algorithm 1, in the paper's x and z, with y = (1 - beta1) z + beta1 x. The point z makes the
 * step. The point x is the average of z with weights (largest lr so far)^power. The weight is y; x follows from y and
 * z. */
#ifndef HALFSTEP_REF_SCHEDULEFREE_H
#define HALFSTEP_REF_SCHEDULEFREE_H

#include "ref/ref.h"

static inline void ref_schedulefree(const struct ref_hyper *h, struct ref_tensor *r)
{
    double most = fmax(r->scalar[1], h->lr), weight = pow(most, h->weight_lr_power), sum = r->scalar[0] + weight;
    double c = weight / sum, correction2 = 1 - pow(h->beta2, r->t);
    r->scalar[0] = sum;
    r->scalar[1] = most;
    for (int i = 0; i < r->n; i++) {
        struct ref_element *e = &r->x[i];
        double y = e->w, z = e->s[1], x = (y - (1 - h->beta1) * z) / h->beta1, g = ref_gradient(h, e);
        double v = F(h->beta2) * e->s[0] + F(1 - h->beta2) * g * g;
        double z_new = z - h->lr * ref_ratio(g, sqrt(v / correction2) + h->eps) - ref_decay_factor(h) * y;
        double x_new = (1 - c) * x + c * z_new;
        e->s_new[0] = v;
        e->s_new[1] = z_new;
        e->w_new = (1 - h->beta1) * z_new + h->beta1 * x_new;
    }
}

#define ref_schedulefree_ROWS(X) X("schedulefree", ref_schedulefree, 1e-3, "", 1)

#endif
