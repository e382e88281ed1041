/* RAdam (Liu et al. 2020, algorithm 2): Adam whose step is scaled by how well the second moment is known:
 *
 *   rho = 2 / (1 - b2) - 1                       of all time
 *   rho_t = rho - 2 t b2^t / (1 - b2^t)          of t gradients
 *   rho_t > 5:  d = lr r m^ / (sqrt(v^) + eps) + decay * w,
 *               r^2 = (rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t)
 *   else:       d = lr m^ + decay * w
 *
 * The moments are Adam's, debiased. eps is added to the corrected root; torch.optim.RAdam adds it to the raw one. Up to
 * b2 = 2/3 no step is ever scaled. Dividing by 0 sqrt(v) + 1 is the second form, so the kernel is AdamW's. */
#ifndef HSTEP_RADAM_H
#define HSTEP_RADAM_H

#include "rules/adamw.h"

enum { radam_constants = adamw_constants };

HSTEP_INLINE void radam_prepare(float *k, struct hstep_prepare *p)
{
    double beta1 = p->hyper[0], beta2 = p->hyper[1], t = (double)p->t;
    double power = hstep_powi(beta2, p->t), all = 2.0 / (1.0 - beta2) - 1.0;
    double now = all - 2.0 * t * power / (1.0 - power);
    adamw_prepare(k, p);
    if (now > 5.0) {
        double rate = sqrt((now - 4.0) * (now - 2.0) * all / ((all - 4.0) * (all - 2.0) * now));
        k[ADAMW_LR] = (float)(p->lr * rate / (1.0 - hstep_powi(beta1, p->t)));
    } else {
        k[ADAMW_ROOT] = 0.0f;
        k[ADAMW_EPS] = 1.0f;
    }
}

#define radam_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                     \
    RULE("radam", ELEMENTWISE, PARTS(adamw), CAUTIOUS(ADAMW_DECAY),                         \
         .label = "RAdam", .title = "RAdam, Adam with a rectified start (Liu et al. 2020)", \
         .lr = 1e-3, .decay = "l2", .keeps = "exp_avg")                                     \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.999)                                                  \
    HYPER("eps", "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)

#endif
