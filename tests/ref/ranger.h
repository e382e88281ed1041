/* Wright 2019: RAdam inside Zhang et al. 2019, algorithm 1. The inner steps update the weight itself. */
#ifndef HALFSTEP_REF_RANGER_H
#define HALFSTEP_REF_RANGER_H

#include "ref/radam.h"

static inline void ref_ranger(const struct ref_hyper *h, struct ref_tensor *r)
{
    ref_radam(h, r);
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        x->s_new[2] = x->s[2];
        if (fmod(r->full, h->k) == 0) x->w_new = x->s_new[2] = (1 - h->alpha) * x->s[2] + h->alpha * x->w_new;
    }
}

#define ref_ranger_ROWS(X) X("ranger", ref_ranger, 2e-3, "", 1)

#endif
