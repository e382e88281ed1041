/* For tests/house/new_rows_test.sh: a rule in the manner of Prodigy (Mishchenko and Defazio 2023). Its step is
 * estimated from sums over all tensors:
 *
 *   a = sum of g (x0 - w), b = sum of |g|, over all tensors;  D = max(D, a / b), from 1e-3;  d = lr D sign(g) + decay w
 *
 * State: x0, the weights it started from, stored as weights are. Scalar: D. */
#ifndef HSTEP_ESTIMATE_H
#define HSTEP_ESTIMATE_H

#include "rules/rule.h"

#define estimate_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                          \
    RULE("estimate", TOTALS(3), WHOLE, NOT_CAUTIOUS("sums over all tensors come before its update"),                \
         .label = "Estimate", .title = "sums over all tensors", .lr = 1e-3, .decay = "decoupled", .share = "share") \
    STATE(WEIGHT, "x0")                                                                                             \
    HYPER(share, "groups of one number share the estimate", .maximum = 1.0)                                         \
    SCALAR(estimate, .maximum = 1e300)
HSTEP_NAME_HYPERS(estimate)
HSTEP_NAME_SCALARS(estimate)

enum { ESTIMATE_LR, ESTIMATE_DECAY, estimate_constants };

HSTEP_INLINE void estimate_prepare(float *k, struct hstep_prepare *p)
{
    const struct hstep_own *own = hstep_own(p);
    struct estimate_scalar *scalar = SCALARS(estimate, own->scalar);
    double now = scalar->estimate > 0.0 ? scalar->estimate : 1e-3;
    if (p->total && p->total[0] > now * p->total[1]) now = p->total[0] / p->total[1];
    scalar->estimate = now;
    k[ESTIMATE_LR] = (float)(p->lr * now);
    k[ESTIMATE_DECAY] = (float)p->decay;
}

V_OP void estimate_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)k, (void)mode;
    x[0] = v_mul(g, v_sub(s[0], w));
    x[1] = v_abs(g);
    x[2] = v_set(0.0f);
}

V_OP vf estimate_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode;
    s[0] = v_set(0.0f); /* change of x0 */
    return v_add(v_mul(k[ESTIMATE_LR], v_sign(g)), v_mul(k[ESTIMATE_DECAY], w));
}

#endif
