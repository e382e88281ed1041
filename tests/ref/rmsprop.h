/* Tieleman & Hinton 2012. The centered form (Graves 2013) and momentum are as torch.optim.RMSprop documents them.
 * debias divides the second moment by 1 - alpha^t, as torchastic does. */
#ifndef HALFSTEP_REF_RMSPROP_H
#define HALFSTEP_REF_RMSPROP_H

#include "ref/ref.h"

static inline void ref_rmsprop(const struct ref_hyper *h, struct ref_tensor *r)
{
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x), v = F(h->alpha) * x->s[0] + F(1 - h->alpha) * g * g, spread = v;
        x->s_new[0] = v;
        if (h->centered != 0) {
            x->s_new[2] = F(h->alpha) * x->s[2] + F(1 - h->alpha) * g;
            spread = fmax(v - x->s_new[2] * x->s_new[2], 0);
        }
        if (h->debias != 0) spread /= 1 - pow(h->alpha, r->t);
        double u = ref_ratio(g, sqrt(spread) + h->eps);
        if (h->momentum != 0) u = x->s_new[1] = F(h->momentum) * x->s[1] + u;
        ref_finish(h, x, h->lr, u);
    }
}

/* Blocks are not followed if centered, because coarse codes leave nothing of the difference v - mean^2. */
#define ref_rmsprop_ROWS(X)                            \
    X("rmsprop", ref_rmsprop, 1e-4, "momentum=0.9", 1) \
    X("rmsprop", ref_rmsprop, 1e-3, "debias=1", 0)     \
    X("rmsprop", ref_rmsprop, 1e-4, "momentum=0.9 centered=1", 0)

#endif
