/* Ranger: RAdam's change moves the fast weights. After every k-th update of them the slow weights follow (lookahead).
 *
 * Use: for RAdam whose weights return to a slow average every k steps.
 * Source: Wright 2019, "Ranger"; Zhang et al. 2019, "Lookahead", arXiv:1907.08610, algorithm 1
 * Symbols: m exp_avg, v exp_avg_sq, s slow
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
 *   if t % k == 0:
 *       s = s + alpha * (w - change - s)
 *       change = w - s
 *
 * k counts updates of the weight, not micro-steps. The slow weights are a state in the weight's own format, with a
 * residual or error code of their own. One residual for both would lose most of a slow movement. The copy takes code
 * and residual as they are. With lr = 0 nothing is updated, and nothing is synchronised either. */
#ifndef HSTEP_RANGER_H
#define HSTEP_RANGER_H

#include "rules/radam.h"

#define ranger_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                     \
    RULE("ranger", ELEMENTWISE, WHOLE, NOT_CAUTIOUS("its slow weights follow the whole update"),             \
         .label = "Ranger", .title = "Ranger: RAdam with Lookahead (Wright 2019; Zhang et al. 2019)",        \
         .lr = 1e-3, .decay = "decoupled", .keeps = "exp_avg")                                               \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.99)                                                                    \
    STATE(WEIGHT, "slow")                                                                                    \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-6, .maximum = 1.0)           \
    HYPER(k, "updates of the weight between two copies of the slow weights", .initial = 6.0, .minimum = 1.0, \
          .maximum = 1e6)                                                                                    \
    HYPER(alpha, "fraction of the way to the fast weights that the slow weights go", .initial = 0.5, .maximum = 1.0)
HSTEP_NAME_HYPERS(ranger)

enum { RANGER_ALPHA = ADAMW_BOUND + 1, ranger_constants };

HSTEP_INLINE void ranger_prepare(float *k, struct hstep_prepare *p)
{
    const struct ranger_hyper *h = HYPERS(ranger, p->hyper);
    radam_fill(k, p, h->beta1, h->beta2, h->eps);
    p->copies_state = p->lr != 0.0 && p->full % (uint64_t)h->k == 0;
    k[RANGER_ALPHA] = p->copies_state ? (float)h->alpha : 0.0f;
}

V_OP vf ranger_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    vf root = adamw_moments(k, g, s, mode), change = adamw_end(k, w, s[0], root);
    s[2] = v_mul(k[RANGER_ALPHA], v_add(v_sub(s[2], w), change));
    return change;
}

#endif
