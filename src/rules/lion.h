/* Lion. The sign uses the momentum before this gradient; sign(0) = 0.
 *
 * Use: for half the states of AdamW. Its lr is smaller, because every element moves by lr.
 * Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2
 * Symbols: m exp_avg
 * Equations:
 *   u = sign(beta1 * m + (1 - beta1) * g)
 *   m = beta2 * m + (1 - beta2) * g
 *   change = lr * u + decay * w */
#ifndef HSTEP_LION_H
#define HSTEP_LION_H

#include "rules/rule.h"

#define lion_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                              \
    RULE("lion", ELEMENTWISE, PARTS_ROOTLESS(lion), CAUTIOUS(LION_DECAY),                           \
         .label = "Lion", .title = "Lion, the sign of an interpolated momentum (Chen et al. 2023)", \
         .lr = 1e-4, .decay = "decoupled", .keeps = "exp_avg")                                      \
    STATE(SIGNED, "exp_avg", .beta = "beta2")                                                       \
    HYPER(beta1, "share of the momentum in the update", BELOW_1(0.9))                               \
    HYPER(beta2, "decay rate of the momentum", BELOW_1(0.99))
HSTEP_NAME_HYPERS(lion)

enum { LION_BETA1, LION_NEW1, LION_BETA2, LION_NEW2, LION_LR, LION_DECAY, lion_constants };

HSTEP_INLINE void lion_prepare(float *k, struct hstep_prepare *p)
{
    const struct lion_hyper *h = HYPERS(lion, p->hyper);
    k[LION_BETA1] = (float)h->beta1;
    k[LION_NEW1] = (float)(1.0 - h->beta1);
    k[LION_BETA2] = (float)h->beta2;
    k[LION_NEW2] = (float)(1.0 - h->beta2);
    k[LION_LR] = (float)p->lr;
    k[LION_DECAY] = (float)p->decay;
}

V_OP vf lion_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    (void)mode;
    vf mixed = v_add(v_mul(k[LION_BETA1], s[0]), v_mul(k[LION_NEW1], g));
    s[0] = v_add(v_mul(k[LION_BETA2], s[0]), v_mul(k[LION_NEW2], g));
    *root = mixed;
    return mixed;
}

V_OP vf lion_end(const vf *k, vf w, vf mixed, vf root)
{
    (void)root;
    return v_add(v_mul(k[LION_LR], v_sign(mixed)), v_mul(k[LION_DECAY], w));
}

#endif
