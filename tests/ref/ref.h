/* The types that every reference works on. A reference is one function
 *
 *   void ref_NAME(const struct ref_hyper *h, struct ref_tensor *r)
 *
 * It gets the whole tensor, so that it can form norms. From w, g and s[] of every element it fills w_new and s_new[].
 * States that a rule does not have are 0 and may be left alone. It also replaces the rule's named scalars r->scalar[],
 * which start at 0. States and scalars are in the order of the rule's row. A state of role WEIGHT is a value, not a
 * change.
 *
 * References hold the published equations only, in double: no rounding but F(), no error terms. The test finds how
 * exact a result can be. It steps the reference again with each input changed a little. */
#ifndef HALFSTEP_REF_H
#define HALFSTEP_REF_H

#include <math.h>
#include <stdint.h>

/* Rounds a scalar of a step to fp32 once, as the library does before it hands it to kernels. Use it for beta and 1 -
 * beta, because the rounding of a decay rate adds up over the steps. */
#define F(x) ((double)(float)(x))

#define REF_STATES 6
#define REF_SCALARS 4

enum ref_decay { REF_L2, REF_DECOUPLED, REF_FULLY_DECOUPLED, REF_PROXIMAL };

/* The rules' own hyper-parameters, named as in their rows. Add new names here. */
/* clang-format off */
#define REF_HYPERS(X) \
    X(beta1) X(beta2) X(beta3) X(eps) X(momentum) X(dampening) X(nesterov) X(amsgrad) X(k) X(alpha) X(centered)   \
    X(debias) X(amplify) X(published) X(max_weight_norm) X(trust_scale) X(adam) X(threshold) X(weight_lr_power)     \
    X(beta) X(ns_steps) X(ns_a) X(ns_b) X(ns_c) X(ns_eps) X(ns_coefficients) X(ns_form) X(exact) X(match_rms)   \
    X(normalize_rows) X(row_beta)                                                                       \
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

/* Returns the factor of the old weight in the change. */
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

/* Sets the new weight from the update u, which is multiplied by lr, in every decay mode. */
static inline void ref_finish(const struct ref_hyper *h, struct ref_element *x, double lr, double u)
{
    x->w_new = x->w - lr * u - ref_decay_factor(h) * x->w;
    if (h->decay == REF_PROXIMAL) x->w_new = (x->w - lr * u) / (1 + h->lr * h->weight_decay);
}

/* Returns a / b, or 0 if b is 0. */
static inline double ref_ratio(double a, double b) { return b == 0 ? 0 : a / b; }

#endif
