/* AdamW.
 *
 * Use: first, if nothing speaks for another rule.
 * Source: Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2; amsgrad: Reddi et al. 2018, arXiv:1904.09237,
 *   algorithm 2
 * Symbols: m exp_avg, v exp_avg_sq, x max_exp_avg_sq
 * Equations:
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   x = max(x, v) if amsgrad else v
 *   m_hat = m / (1 - beta1**t)
 *   v_hat = x / (1 - beta2**t)
 *   change = lr * m_hat / (sqrt(v_hat) + eps) + decay * w
 *
 * amsgrad keeps the largest v so far. As in torch these are raw second moments, so that the correction of the current
 * step applies to the largest.
 *
 * States start at zero. A zero denominator (eps = 0 and no gradient yet) gives no update. Decay is in the same
 * expression as the update, so that the format rounds their sum once. */
#ifndef HSTEP_ADAMW_H
#define HSTEP_ADAMW_H

#include "rules/rule.h"

/* The states and decay rates of rules with Adam's two moments. */
#define ADAM_MOMENTS(STATE, HYPER, beta1_, beta2_)                  \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                       \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                    \
    HYPER(beta1, "decay rate of the first moment", BELOW_1(beta1_)) \
    HYPER(beta2, "decay rate of the second moment", BELOW_1(beta2_))

/* Shared with Adam. */
#define ADAMW_STATES_AND_HYPERS(STATE, OPTIONAL, HYPER)                                                        \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                                                                  \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2", .precise_while = "amsgrad", .precise = HSTEP_FORMAT_bf16_sr)  \
    OPTIONAL("amsgrad", NONNEG, "max_exp_avg_sq", .precise_while = "amsgrad", .precise = HSTEP_FORMAT_bf16_sr) \
    HYPER(beta1, "decay rate of the first moment", BELOW_1(0.9))                                               \
    HYPER(beta2, "decay rate of the second moment", BELOW_1(0.999))                                            \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)             \
    HYPER(amsgrad, "1: divide by the largest second moment so far (Reddi et al. 2018)", .maximum = 1.0)

#define adamw_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                            \
    RULE("adamw", ELEMENTWISE, PARTS(adamw), CAUTIOUS(ADAMW_DECAY),                                \
         .label = "AdamW", .title = "Adam with decoupled weight decay (Loshchilov & Hutter 2019)", \
         .lr = 1e-3, .weight_decay = 1e-2, .decay = "decoupled", .keeps = "exp_avg")               \
    ADAMW_STATES_AND_HYPERS(STATE, OPTIONAL, HYPER)
HSTEP_NAME_HYPERS(adamw)

enum {
    ADAMW_BETA1, ADAMW_NEW1, ADAMW_BETA2, ADAMW_NEW2, ADAMW_ROOT, ADAMW_EPS, ADAMW_LR, ADAMW_DECAY, ADAMW_BOUND,
    adamw_constants
};

/* Returns C of the bound m^2 <= C^2 v, by Cauchy-Schwarz on the two sums of t terms. Returns 1e30 if there is no
 * bound. */
HSTEP_INLINE float adamw_bound(double beta1, double beta2, uint64_t t)
{
    double ratio = beta2 > 0.0 ? beta1 * beta1 / beta2 : 2.0, terms = (double)t;
    if (ratio != 1.0) terms = (1.0 - hstep_powi(ratio, t)) / (1.0 - ratio);
    double bound = sqrt((1.0 - beta1) * (1.0 - beta1) / (1.0 - beta2) * terms);
    return bound < 1e30 ? (float)bound : 1e30f;
}

/* Returns m, at least -bound and at most bound. The sign of a zero does not matter: no state keeps it, and no weight
 * depends on it. An instruction set may have its own version. */
#ifndef adamw_clamp
V_OP vf adamw_clamp(vf m, vf bound) { return v_max(v_min(m, bound), v_neg(bound)); }
#endif

/* Sets the constants above. Rules with Adam's two moments share it. */
HSTEP_INLINE void adamw_fill(float *k, const struct hstep_prepare *p, double beta1, double beta2, double eps)
{
    double correction1 = 1.0 - hstep_powi(beta1, p->t), correction2 = 1.0 - hstep_powi(beta2, p->t);
    k[ADAMW_BETA1] = (float)beta1;
    k[ADAMW_NEW1] = (float)(1.0 - beta1);
    k[ADAMW_BETA2] = (float)beta2;
    k[ADAMW_NEW2] = (float)(1.0 - beta2);
    k[ADAMW_ROOT] = (float)(1.0 / sqrt(correction2));
    k[ADAMW_EPS] = (float)eps;
    k[ADAMW_LR] = (float)(p->lr / correction1);
    k[ADAMW_DECAY] = (float)p->decay;
    k[ADAMW_BOUND] = adamw_bound(beta1, beta2, p->t);
}

HSTEP_INLINE void adamw_prepare(float *k, struct hstep_prepare *p)
{
    const struct adamw_hyper *h = HYPERS(adamw, p->hyper);
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
}

/* Updates m and v in s[0] and s[1]. Returns the root of v. */
V_OP vf adamw_moments(const vf *k, vf g, vf *s, const int mode)
{
    vf m = v_add(v_mul(k[ADAMW_BETA1], s[0]), v_mul(k[ADAMW_NEW1], g));
    vf v = v_add(v_mul(k[ADAMW_BETA2], s[1]), v_mul(v_mul(k[ADAMW_NEW2], g), g));
    vf root = v_sqrt(v);
    if (mode & RULE_CLAMP) m = adamw_clamp(m, v_mul(k[ADAMW_BOUND], root));
    s[0] = m;
    s[1] = v;
    return root;
}

V_OP vf adamw_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    *root = adamw_moments(k, g, s, mode);
    if (mode & RULE_OPTION) {
        s[2] = v_max(s[2], s[1]);
        *root = v_sqrt(s[2]);
    }
    return s[0];
}

V_OP vf adamw_end(const vf *k, vf w, vf numerator, vf root)
{
    vf update = v_div0(numerator, v_add(v_mul(root, k[ADAMW_ROOT]), k[ADAMW_EPS]));
    return v_add(v_mul(k[ADAMW_LR], update), v_mul(k[ADAMW_DECAY], w));
}

#endif
