/* Compass: the gradient, amplified by its average, over the root of its own second moment.
 *
 * Use: to go on with a run of torchastic's Compass.
 * Source: the package torchastic
 * Symbols: m exp_avg, v exp_avg_sq
 * Equations:
 *   c = 1 - beta1**t
 *   m = beta1 * m + (1 - beta1) * g
 *   y = g + amplify * m if published else g + amplify * m / c
 *   v = beta2 * v + (1 - beta2) * y**2
 *   v_hat = v / (1 - beta2**t)
 *   u = lr * y / (sqrt(v_hat) + eps) + decay * w
 *   change = u / c if published else u
 *
 * published = 1 is the form of the package. It makes the first step a hundred times too long for beta1 = 0.99.
 *
 * v always holds this step's y^2. So |y| / sqrt(v) <= 1 / sqrt(1 - beta2) whatever quantization has done to the states,
 * and nothing is clamped. Squares of y must stay in fp32: |g| < 2^62 / (1 + amplify). */
#ifndef HSTEP_COMPASS_H
#define HSTEP_COMPASS_H

#include "rules/adamw.h"

#define compass_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                             \
    RULE("compass", ELEMENTWISE, PARTS(compass), CAUTIOUS(COMPASS_DECAY),                             \
         .label = "Compass", .title = "Compass: the gradient amplified by its momentum (torchastic)", \
         .lr = 1e-3, .decay = "decoupled", .keeps = "exp_avg")                                        \
    ADAM_MOMENTS(STATE, HYPER, 0.99, 0.999)                                                           \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)    \
    HYPER(amplify, "factor of the momentum added to the gradient", .initial = 5.0, .maximum = 1e3)    \
    HYPER(published, "1: torchastic's scaling, 1 / (1 - beta1) too large at first", .maximum = 1.0)
HSTEP_NAME_HYPERS(compass)

enum {
    COMPASS_BETA1, COMPASS_NEW1, COMPASS_BETA2, COMPASS_NEW2, COMPASS_AMPLIFY, COMPASS_ROOT, COMPASS_EPS, COMPASS_LR,
    COMPASS_DECAY, compass_constants
};

HSTEP_INLINE void compass_prepare(float *k, struct hstep_prepare *p)
{
    const struct compass_hyper *h = HYPERS(compass, p->hyper);
    double beta1 = h->beta1, beta2 = h->beta2, amplify = h->amplify, correction1 = 1.0 - hstep_powi(beta1, p->t);
    int published = h->published != 0.0;
    k[COMPASS_BETA1] = (float)beta1;
    k[COMPASS_NEW1] = (float)(1.0 - beta1);
    k[COMPASS_BETA2] = (float)beta2;
    k[COMPASS_NEW2] = (float)(1.0 - beta2);
    k[COMPASS_AMPLIFY] = (float)(published ? amplify : amplify / correction1);
    k[COMPASS_ROOT] = (float)(1.0 / sqrt(1.0 - hstep_powi(beta2, p->t)));
    k[COMPASS_EPS] = (float)h->eps;
    k[COMPASS_LR] = (float)(published ? p->lr / correction1 : p->lr);
    k[COMPASS_DECAY] = (float)(published ? p->decay / correction1 : p->decay);
}

V_OP vf compass_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    (void)mode;
    s[0] = v_add(v_mul(k[COMPASS_BETA1], s[0]), v_mul(k[COMPASS_NEW1], g));
    g = v_add(g, v_mul(k[COMPASS_AMPLIFY], s[0]));
    s[1] = v_add(v_mul(k[COMPASS_BETA2], s[1]), v_mul(v_mul(k[COMPASS_NEW2], g), g));
    *root = v_sqrt(s[1]);
    return g;
}

V_OP vf compass_end(const vf *k, vf w, vf numerator, vf root)
{
    vf update = v_div0(numerator, v_add(v_mul(root, k[COMPASS_ROOT]), k[COMPASS_EPS]));
    return v_add(v_mul(k[COMPASS_LR], update), v_mul(k[COMPASS_DECAY], w));
}

#endif
