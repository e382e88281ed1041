/* A running average of weights. The gradient slot holds the live weight g, and the weight slot is the average w.
 *
 * Use: for an average of the weights, to evaluate or to publish.
 * Source: Polyak & Juditsky 1992; torch.optim.swa_utils
 * Equations:
 *   b = (1 - beta) / (1 - beta**t) if debias else 1 - beta
 *   f = 1 if t == 1 else b
 *   change = lr * f * (w - g) + decay * w
 *
 * So the first update copies the live weight. debias makes the average that of all t weights so far. For beta near 1
 * this is their plain mean, until t nears 1 / (1 - beta). An average in BF16 must move by less than its last place. It
 * does so only if the weight's format has a residual, an error code or stochastic rounding. */
#ifndef HSTEP_EMA_H
#define HSTEP_EMA_H

#include "rules/rule.h"

#define ema_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                            \
    RULE("ema", RAW_GRADIENT, PARTS_ROOTLESS(ema), NOT_CAUTIOUS("it follows weights, not gradients"),            \
         .label = "EMA", .title = "exponential moving average of weights; the gradient slot is the live weight", \
         .lr = 1.0, .decay = "decoupled")                                                                        \
    HYPER(beta, "decay rate of the average", BELOW_1(0.999))                                                     \
    HYPER(debias, "1: an average of what was seen, from the first step on", .maximum = 1.0)
HSTEP_NAME_HYPERS(ema)

enum { EMA_RATE, EMA_DECAY, ema_constants };

HSTEP_INLINE void ema_prepare(float *k, struct hstep_prepare *p)
{
    const struct ema_hyper *h = HYPERS(ema, p->hyper);
    double beta = h->beta, rate = 1.0 - beta;
    if (h->debias != 0.0) rate = rate / (1.0 - hstep_powi(beta, p->full));
    if (p->full == 1) rate = 1.0;
    k[EMA_RATE] = (float)(p->lr * rate);
    k[EMA_DECAY] = (float)p->decay;
}

V_OP vf ema_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    (void)k;
    (void)s;
    (void)mode;
    *root = g;
    return g;
}

V_OP vf ema_end(const vf *k, vf w, vf g, vf root)
{
    (void)root;
    return v_add(v_mul(k[EMA_RATE], v_sub(w, g)), v_mul(k[EMA_DECAY], w));
}

#endif
