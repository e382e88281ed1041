/* ADOPT. Each gradient is divided by the root of the second moment before it, and only then averaged. Any beta2 then
 * converges.
 *
 * Use: for runs of AdamW whose result depends on beta2.
 * Source: Taniguchi et al. 2024, arXiv:2411.02853, algorithm 2
 * Symbols: m exp_avg, v exp_avg_sq
 * Equations:
 *   if t == 1:
 *       v = g**2
 *       change = 0
 *   else:
 *       n = g / max(sqrt(v), eps)
 *       c = (t - 1)**clip_power
 *       n = max(min(n, c), -c) if clipped else n
 *       m = beta1 * m + (1 - beta1) * n
 *       v = beta2 * v + (1 - beta2) * g**2
 *       change = lr * m + decay * w
 *
 * t - 1 is the number of averaged gradients, as in the authors' code, whose clip_lambda is `step ** 0.25`. Without the
 * clip the bound is the largest float, so that a first gradient of almost zero makes no infinity. A zero denominator
 * (eps = 0 and no gradient yet) gives n = 0. The first moment m is no average of g, so the root of v does not bound it.
 * It needs no bound, because it is never divided. */
#ifndef HSTEP_ADOPT_H
#define HSTEP_ADOPT_H

#include <float.h>

#include "rules/rule.h"

#define adopt_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                          \
    RULE("adopt", ELEMENTWISE, WHOLE, CAUTIOUS(ADOPT_DECAY),                                                     \
         .label = "ADOPT",                                                                                       \
         .title = "ADOPT: gradients divided by the second moment before them (Taniguchi et al. 2024)",           \
         .lr = 1e-3, .decay = "l2", .keeps = "exp_avg")                                                          \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                                                                    \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                                 \
    HYPER(beta1, "decay rate of the average of normalized gradients", BELOW_1(0.9))                              \
    HYPER(beta2, "decay rate of the second moment", BELOW_1(0.9999))                                             \
    HYPER(eps, "least root of the second moment that a gradient is divided by", .initial = 1e-6, .maximum = 1.0) \
    HYPER(clip_power, "normalized gradients are bounded by the number of updates before to this power",          \
          .initial = 0.25, .maximum = 16.0)                                                                      \
    HYPER(clipped, "0: normalized gradients have no bound", .initial = 1.0, .maximum = 1.0)
HSTEP_NAME_HYPERS(adopt)

enum {
    ADOPT_BETA1, ADOPT_NEW1, ADOPT_BETA2, ADOPT_NEW2, ADOPT_EPS, ADOPT_CLIP, ADOPT_LR, ADOPT_DECAY,
    adopt_constants
};

HSTEP_INLINE void adopt_prepare(float *k, struct hstep_prepare *p)
{
    const struct adopt_hyper *h = HYPERS(adopt, p->hyper);
    double beta1 = h->beta1, beta2 = h->beta2, averaged = (double)(p->t - 1), most = FLT_MAX;
    int first = p->t == 1;
    if (h->clipped != 0.0 && !first) most = hstep_pow(averaged, h->clip_power);
    k[ADOPT_BETA1] = (float)beta1;
    k[ADOPT_NEW1] = (float)(1.0 - beta1);
    k[ADOPT_BETA2] = first ? 0.0f : (float)beta2;
    k[ADOPT_NEW2] = first ? 1.0f : (float)(1.0 - beta2);
    k[ADOPT_EPS] = (float)h->eps;
    k[ADOPT_CLIP] = first ? 0.0f : most < FLT_MAX ? (float)most : FLT_MAX;
    k[ADOPT_LR] = first ? 0.0f : (float)p->lr;
    k[ADOPT_DECAY] = first ? 0.0f : (float)p->decay;
}

V_OP vf adopt_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode;
    vf n = v_div0(g, v_max(v_sqrt(s[1]), k[ADOPT_EPS]));
    n = v_max(v_min(n, k[ADOPT_CLIP]), v_neg(k[ADOPT_CLIP]));
    s[0] = v_add(v_mul(k[ADOPT_BETA1], s[0]), v_mul(k[ADOPT_NEW1], n));
    s[1] = v_add(v_mul(k[ADOPT_BETA2], s[1]), v_mul(v_mul(k[ADOPT_NEW2], g), g));
    return v_add(v_mul(k[ADOPT_LR], s[0]), v_mul(k[ADOPT_DECAY], w));
}

#endif
