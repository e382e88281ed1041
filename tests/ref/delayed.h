/* The rule of the adamw_bfloat16 package. Decay is summed per tensor; once the sum is above the threshold, all of it is
 * applied. The sum starts at a fraction of the threshold that depends on the tensor's id. The fraction is the top 53
 * bits of the id's splitmix64 hash without the increment (Steele et al. 2014). */
#ifndef HALFSTEP_REF_DELAYED_H
#define HALFSTEP_REF_DELAYED_H

#include "ref/ref.h"

static inline void ref_delayed(const struct ref_hyper *h, struct ref_tensor *r)
{
    uint64_t z = r->id;
    z ^= z >> 30, z *= 0xbf58476d1ce4e5b9u;
    z ^= z >> 27, z *= 0x94d049bb133111ebu;
    z ^= z >> 31;
    double sum = r->full == 1 ? h->threshold * ldexp((double)(z >> 11), -53) : r->scalar[0], applied = 0;
    sum += ref_decay_factor(h);
    if (sum > h->threshold) {
        applied = sum;
        sum = 0;
    }
    r->scalar[0] = sum;
    for (struct ref_element *x = r->x; x < r->x + r->n; x++) {
        double g = ref_gradient(h, x);
        double m = F(h->beta1) * x->s[0] + F(1 - h->beta1) * g, v = F(h->beta2) * x->s[1] + F(1 - h->beta2) * g * g;
        x->s_new[0] = m;
        x->s_new[1] = v;
        x->w_new = x->w - h->lr * sqrt(1 - pow(h->beta2, r->t)) * ref_ratio(m, sqrt(v) + h->eps) - applied * x->w;
    }
}

#define ref_delayed_ROWS(X) X("adamw-delayed", ref_delayed, 1e-3, "", 1)

#endif
