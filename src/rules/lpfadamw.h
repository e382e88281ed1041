/* LPFAdamW: AdamW on gradients to which their own low-passed version is added.
 *
 * Use: to go on with a run of torchastic's LPFAdamW.
 * Source: the package torchastic
 * Symbols: h smoothing, m exp_avg, v exp_avg_sq
 * Equations:
 *   h = beta1 * h + (1 - beta1) * g
 *   h_hat = h if published else h / (1 - beta1**t)
 *   y = g + amplify * h_hat
 *   m = beta2 * m + (1 - beta2) * y
 *   v = beta3 * v + (1 - beta3) * y**2
 *   m_hat = m / (1 - beta2**t)
 *   v_hat = v / (1 - beta3**t)
 *   c = decay / (1 - beta2**t) if published else decay
 *   change = lr * m_hat / (sqrt(v_hat) + eps) + c * w
 *
 * published = 1 is the form of the package. Its decay is ten times too strong in the first step. Squares of y must stay
 * in fp32: |g| < 2^62 / (1 + amplify). */
#ifndef HSTEP_LPFADAMW_H
#define HSTEP_LPFADAMW_H

#include "rules/adamw.h"

#define lpfadamw_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                              \
    RULE("lpfadamw", ELEMENTWISE, PARTS(lpfadamw), CAUTIOUS(ADAMW_DECAY),                               \
         .label = "LPFAdamW", .title = "LPFAdamW: AdamW on a low-pass amplified gradient (torchastic)", \
         .lr = 1e-3, .decay = "decoupled", .keeps = "exp_avg")                                          \
    STATE(SIGNED, "smoothing", .beta = "beta1")                                                         \
    STATE(SIGNED, "exp_avg", .beta = "beta2")                                                           \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta3")                                                        \
    HYPER(beta1, "decay rate of the low pass", BELOW_1(0.9))                                            \
    HYPER(beta2, "decay rate of the first moment", BELOW_1(0.9))                                        \
    HYPER(beta3, "decay rate of the second moment", BELOW_1(0.999))                                     \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)      \
    HYPER(amplify, "factor of the low pass added to the gradient", .initial = 2.0, .maximum = 1e3)      \
    HYPER(published, "1: torchastic's scaling, decay 1 / (1 - beta2) too strong at first", .maximum = 1.0)
HSTEP_NAME_HYPERS(lpfadamw)

enum { LPF_BETA = ADAMW_BOUND + 1, LPF_NEW, LPF_AMPLIFY, lpfadamw_constants };

HSTEP_INLINE void lpfadamw_prepare(float *k, struct hstep_prepare *p)
{
    const struct lpfadamw_hyper *h = HYPERS(lpfadamw, p->hyper);
    double beta = h->beta1, amplify = h->amplify;
    int published = h->published != 0.0;
    struct hstep_prepare inner = *p;
    if (published) inner.decay = p->decay / (1.0 - hstep_powi(h->beta2, p->t));
    adamw_fill(k, &inner, h->beta2, h->beta3, h->eps);
    k[LPF_BETA] = (float)beta;
    k[LPF_NEW] = (float)(1.0 - beta);
    k[LPF_AMPLIFY] = (float)(published ? amplify : amplify / (1.0 - hstep_powi(beta, p->t)));
}

V_OP vf lpfadamw_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    s[0] = v_add(v_mul(k[LPF_BETA], s[0]), v_mul(k[LPF_NEW], g));
    return adamw_start(k, v_add(g, v_mul(k[LPF_AMPLIFY], s[0])), s + 1, mode & RULE_CLAMP, root);
}

V_OP vf lpfadamw_end(const vf *k, vf w, vf numerator, vf root) { return adamw_end(k, w, numerator, root); }

#endif
