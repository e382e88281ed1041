/* RAdam: Adam whose step is scaled by how well t gradients tell the second moment.
 *
 * Use: for Adam without a warm-up. Its first steps are those of momentum alone.
 * Source: Liu et al. 2020, arXiv:1908.03265, algorithm 2
 * Symbols: m exp_avg, v exp_avg_sq
 * Equations:
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   m_hat = m / (1 - beta1**t)
 *   v_hat = v / (1 - beta2**t)
 *   rho = 2 / (1 - beta2) - 1
 *   rho_t = rho - 2 * t * beta2**t / (1 - beta2**t)
 *   if rho_t > 5:
 *       r = sqrt((rho_t - 4) * (rho_t - 2) * rho / ((rho - 4) * (rho - 2) * rho_t))
 *       change = lr * r * m_hat / (sqrt(v_hat) + eps) + decay * w
 *   else:
 *       change = lr * m_hat + decay * w
 *
 * eps is added to the corrected root; torch.optim.RAdam adds it to the raw one. Up to beta2 = 2/3 no step is ever
 * scaled. Dividing by 0 sqrt(v) + 1 is the second form, so the kernel is AdamW's. */
#ifndef HSTEP_RADAM_H
#define HSTEP_RADAM_H

#include "rules/adamw.h"

#define radam_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                     \
    RULE("radam", ELEMENTWISE, PARTS(adamw), CAUTIOUS(ADAMW_DECAY),                         \
         .label = "RAdam", .title = "RAdam, Adam with a rectified start (Liu et al. 2020)", \
         .lr = 1e-3, .decay = "l2", .keeps = "exp_avg")                                     \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.999)                                                  \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)
HSTEP_NAME_HYPERS(radam)

enum { radam_constants = adamw_constants };

HSTEP_INLINE void radam_fill(float *k, const struct hstep_prepare *p, double beta1, double beta2, double eps)
{
    double t = (double)p->t, power = hstep_powi(beta2, p->t), all = 2.0 / (1.0 - beta2) - 1.0;
    double now = all - 2.0 * t * power / (1.0 - power);
    adamw_fill(k, p, beta1, beta2, eps);
    if (now > 5.0) {
        double rate = sqrt((now - 4.0) * (now - 2.0) * all / ((all - 4.0) * (all - 2.0) * now));
        k[ADAMW_LR] = (float)(p->lr * rate / (1.0 - hstep_powi(beta1, p->t)));
    } else {
        k[ADAMW_ROOT] = 0.0f;
        k[ADAMW_EPS] = 1.0f;
    }
}

HSTEP_INLINE void radam_prepare(float *k, struct hstep_prepare *p)
{
    const struct radam_hyper *h = HYPERS(radam, p->hyper);
    radam_fill(k, p, h->beta1, h->beta2, h->eps);
}

#endif
