/* Schedule-free AdamW, as the authors' package computes it with r = 0, but with sums per tensor instead of per group.
 *
 * Use: for AdamW without a schedule. The model is evaluated at the average x.
 * Source: Defazio et al. 2024, arXiv:2405.15682
 * Symbols: v exp_avg_sq, z z, S weight_sum, L lr_max
 * Equations:
 *   L = max(L, lr)
 *   S = S + L**weight_lr_power
 *   c = L**weight_lr_power / S
 *   v = beta2 * v + (1 - beta2) * g**2
 *   v_hat = v / (1 - beta2**t)
 *   u = lr * g / (sqrt(v_hat) + eps) + decay * w
 *   change = c * (w - z) + (1 - beta1 * (1 - c)) * u
 *   z = z - u
 *
 * The weight slot w is the paper's y, where gradients are taken. The state z is the sequence of plain steps, in the
 * weight's format. The average x is what to evaluate: x = w + (1 - 1 / beta1) (z - w), for w = (1 - beta1) z + beta1 x.
 *
 * The momentum is in w, so there is no first moment. This step's g^2 is always part of v. It bounds g / sqrt(v),
 * whatever quantization has done to v. With lr = 0 nothing is updated: c is 0 and the sum stays. */
#ifndef HSTEP_SCHEDULEFREE_H
#define HSTEP_SCHEDULEFREE_H

#include "rules/rule.h"

#define schedulefree_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                      \
    RULE("schedulefree", ELEMENTWISE, WHOLE, NOT_CAUTIOUS("its weights are averages, which no update moves alone"), \
         .label = "ScheduleFree", .title = "schedule-free AdamW (Defazio et al. 2024)",                             \
         .lr = 2.5e-3, .decay = "decoupled")                                                                        \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                                    \
    STATE(WEIGHT, "z", .beta = "beta1")                                                                             \
    HYPER(beta1, "interpolation between the average and z", .initial = 0.9, .minimum = 1e-3,                        \
          .maximum = 1.0, .exclusive = 1)                                                                           \
    HYPER(beta2, "decay rate of the second moment", BELOW_1(0.999))                                                 \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)                  \
    HYPER(weight_lr_power, "a step's share of the average: the largest lr so far to this power", .initial = 2.0,    \
          .maximum = 16.0)                                                                                          \
    SCALAR(weight_sum, .maximum = 1e300)                                                                            \
    SCALAR(lr_max, .maximum = 1e6)
HSTEP_NAME_HYPERS(schedulefree)
HSTEP_NAME_SCALARS(schedulefree)

enum { SF_BETA2, SF_NEW2, SF_ROOT, SF_EPS, SF_LR, SF_DECAY, SF_MEAN, SF_STEP, schedulefree_constants };

HSTEP_INLINE void schedulefree_prepare(float *k, struct hstep_prepare *p)
{
    const struct schedulefree_hyper *h = HYPERS(schedulefree, p->hyper);
    struct schedulefree_scalar *scalar = SCALARS(schedulefree, hstep_own(p)->scalar);
    double beta1 = h->beta1, beta2 = h->beta2, mean = 0.0;
    double *sum = &scalar->weight_sum, *most = &scalar->lr_max;
    if (p->lr > 0.0) {
        if (p->lr > *most) *most = p->lr;
        double weight = hstep_pow(*most, h->weight_lr_power);
        *sum = *sum + weight;
        if (*sum > 0.0) mean = weight / *sum;
    }
    k[SF_BETA2] = (float)beta2;
    k[SF_NEW2] = (float)(1.0 - beta2);
    k[SF_ROOT] = (float)(1.0 / sqrt(1.0 - hstep_powi(beta2, p->t)));
    k[SF_EPS] = (float)h->eps;
    k[SF_LR] = (float)p->lr;
    k[SF_DECAY] = (float)p->decay;
    k[SF_MEAN] = (float)mean;
    k[SF_STEP] = (float)(1.0 - beta1 * (1.0 - mean));
}

V_OP vf schedulefree_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode;
    s[0] = v_add(v_mul(k[SF_BETA2], s[0]), v_mul(v_mul(k[SF_NEW2], g), g));
    vf update = v_div0(g, v_add(v_mul(v_sqrt(s[0]), k[SF_ROOT]), k[SF_EPS]));
    vf step = v_add(v_mul(k[SF_LR], update), v_mul(k[SF_DECAY], w)), apart = v_sub(w, s[1]);
    s[1] = step;
    return v_add(v_mul(k[SF_MEAN], apart), v_mul(k[SF_STEP], step));
}

#endif
