/* What every reference works on. */
#ifndef HALFSTEP_REF_H
#define HALFSTEP_REF_H

#include <math.h>

/* A scalar of a step as the library hands it to its kernels: rounded to fp32 once. */
#define F(x) ((double)(float)(x))

enum ref_decay { REF_L2, REF_DECOUPLED, REF_FULLY_DECOUPLED };

struct ref_hyper {
    double lr, weight_decay, reference_lr;
    enum ref_decay decay;
    double beta1, beta2, eps;              /* adam, adamw; lion without eps */
    double momentum, dampening, nesterov;  /* sgd */
};

/* One element: weight, effective gradient and states before, weight and states after; `step` counts from 1. `size` is the
 * magnitude that the error of the weight is measured against. */
struct ref_element {
    double w, g, s[2];
    double w_new, s_new[2], size;
};

static inline double ref_decay_factor(const struct ref_hyper *h)
{
    return h->decay == REF_DECOUPLED ? h->lr * h->weight_decay
           : h->decay == REF_FULLY_DECOUPLED ? h->lr / h->reference_lr * h->weight_decay
                                             : 0;
}

static inline double ref_gradient(const struct ref_hyper *h, const struct ref_element *x)
{
    return h->decay == REF_L2 ? x->g + F(h->weight_decay) * x->w : x->g;
}

static inline void ref_finish(struct ref_element *x, double update)
{
    x->w_new = x->w - update;
    x->size = fmax(fabs(x->w), fabs(x->w_new));
}

#endif
