/* Stochastic gradient descent, with the momentum of torch.optim.SGD: lr is not in the buffer.
 *
 * Use: for the least memory. Without momentum it has no states.
 * Source: Polyak 1964; Nesterov 1983; Sutskever et al. 2013, "On the importance of initialization and momentum in deep
 *   learning"
 * Symbols: b momentum_buffer
 * Equations:
 *   b = g if t == 1 or momentum == 0 else momentum * b + (1 - dampening) * g
 *   u = g + momentum * b if nesterov else b
 *   change = lr * u + decay * w
 *
 * Without momentum the buffer is g itself and is not stored. */
#ifndef HSTEP_SGD_H
#define HSTEP_SGD_H

#include "rules/rule.h"

#define sgd_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                        \
    RULE("sgd", ELEMENTWISE, PARTS_ROOTLESS(sgd), CAUTIOUS(SGD_DECAY),                                       \
         .label = "SGD", .title = "stochastic gradient descent, with momentum (Polyak 1964; Nesterov 1983)", \
         .lr = 1e-3, .decay = "l2", .keeps = "momentum_buffer")                                              \
    OPTIONAL("momentum", SIGNED, "momentum_buffer", .beta = "momentum")                                      \
    HYPER(momentum, "factor of the momentum buffer; 0 needs no state", .maximum = 1e3)                       \
    HYPER(dampening, "the momentum gets 1 - dampening of each gradient but the first", .minimum = -1e3,      \
          .maximum = 1e3)                                                                                    \
    HYPER(nesterov, "1: the update is one step of the momentum ahead", .maximum = 1.0)
HSTEP_NAME_HYPERS(sgd)

enum { SGD_MOMENTUM, SGD_NEW, SGD_GRADIENT, SGD_BUFFER, SGD_LR, SGD_DECAY, sgd_constants };

HSTEP_INLINE void sgd_prepare(float *k, struct hstep_prepare *p)
{
    const struct sgd_hyper *h = HYPERS(sgd, p->hyper);
    double momentum = h->momentum, dampening = h->dampening;
    int first = p->t == 1 || momentum == 0.0, nesterov = h->nesterov != 0.0 && momentum != 0.0;
    k[SGD_MOMENTUM] = first ? 0.0f : (float)momentum;
    k[SGD_NEW] = first ? 1.0f : (float)(1.0 - dampening);
    k[SGD_GRADIENT] = nesterov ? 1.0f : 0.0f;
    k[SGD_BUFFER] = nesterov ? (float)momentum : 1.0f;
    k[SGD_LR] = (float)p->lr;
    k[SGD_DECAY] = (float)p->decay;
}

V_OP vf sgd_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    (void)mode;
    s[0] = v_add(v_mul(k[SGD_MOMENTUM], s[0]), v_mul(k[SGD_NEW], g));
    *root = g;
    return v_add(v_mul(k[SGD_GRADIENT], g), v_mul(k[SGD_BUFFER], s[0]));
}

V_OP vf sgd_end(const vf *k, vf w, vf update, vf root)
{
    (void)root;
    return v_add(v_mul(k[SGD_LR], update), v_mul(k[SGD_DECAY], w));
}

#endif
