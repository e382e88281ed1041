/* What every reference works on. A reference is one function
 *
 *   void ref_NAME(const struct ref_hyper *h, struct ref_tensor *r)
 *
 * that gets the whole tensor, so that norms over it can be formed, and from w, g, s[] of every element fills w_new and
 * s_new[] (states it does not have may be left alone: they are 0), and replaces the rule's named per-tensor scalars
 * r->scalar[], which start at 0 and come in the order of the rule's row. States are in the order of the row too; one of
 * role WEIGHT is a value, not a change. Only the published equations, in double: no rounding but F(), no error terms.
 * How exact a result can be is found by the test, which steps the reference again with each input changed a little. */
#ifndef HALFSTEP_REF_H
#define HALFSTEP_REF_H

#include <math.h>
#include <stdint.h>

/* A scalar of a step as the library hands it to its kernels: rounded to fp32 once. It matters for decay rates, whose
 * rounding adds up over the steps: use it for beta and for 1 - beta. */
#define F(x) ((double)(float)(x))

#define REF_STATES 6
#define REF_SCALARS 4

enum ref_decay { REF_L2, REF_DECOUPLED, REF_FULLY_DECOUPLED, REF_PROXIMAL };

/* The rules' own hyper-parameters, by the names that they have in their rows. A new name is added here. */
/* clang-format off */
#define REF_HYPERS(X) \
    X(beta1) X(beta2) X(beta3) X(eps) X(momentum) X(dampening) X(nesterov) X(amsgrad) X(k) X(alpha) X(centered)   \
    X(debias) X(amplify) X(published) X(max_weight_norm) X(trust_scale) X(adam) X(threshold) X(weight_lr_power)     \
    X(beta) X(ns_steps) X(ns_a) X(ns_b) X(ns_c) X(ns_eps) X(exact) X(match_rms)   \
    X(clipped) X(clip_power) X(alpha_warmup) X(beta3_warmup) X(gamma) X(max_norm) X(d0) X(d_coef)      \
    X(growth_rate) X(safeguard_warmup) X(slice_p) X(d_group) X(instability_eps) X(clip_threshold) \
    X(beta2_decay) X(scale_eps) X(d) X(relative_step) X(warmup_init) X(scale_parameter)
/* clang-format on */

struct ref_hyper {
    double lr, weight_decay, reference_lr;
    enum ref_decay decay;
#define X(name) double name;
    REF_HYPERS(X)
#undef X
};

/* One element: weight, effective gradient and states before; weight and states after. */
struct ref_element {
    double w, g, s[REF_STATES];
    double w_new, s_new[REF_STATES];
};

struct ref_tensor {
    int n, ndim, rows, columns;
    struct ref_element *x;
    double t;    /* this update of the states, from 1 */
    double full; /* this update of the weight, from 1 */
    uint64_t id;
    double scalar[REF_SCALARS];
};

/* What multiplies the old weight in the change. */
static inline double ref_decay_factor(const struct ref_hyper *h)
{
    return h->decay == REF_DECOUPLED         ? h->lr * h->weight_decay
           : h->decay == REF_FULLY_DECOUPLED ? h->lr / h->reference_lr * h->weight_decay
                                             : 0;
}

static inline double ref_gradient(const struct ref_hyper *h, const struct ref_element *x)
{
    return h->decay == REF_L2 ? x->g + F(h->weight_decay) * x->w : x->g;
}

/* The new weight from the update u (which lr multiplies) in every decay mode. */
static inline void ref_finish(const struct ref_hyper *h, struct ref_element *x, double lr, double u)
{
    x->w_new = x->w - lr * u - ref_decay_factor(h) * x->w;
    if (h->decay == REF_PROXIMAL) x->w_new = (x->w - lr * u) / (1 + h->lr * h->weight_decay);
}

/* 0 where nothing is to be divided. */
static inline double ref_ratio(double a, double b) { return b == 0 ? 0 : a / b; }

#endif
