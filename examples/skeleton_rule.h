/* Copy this to src/rules/NAME.h and rename. Name it in src/rules/rules.def and rules.h (docs/adding.md).
 *
 * Say here what the rule is. The four fields follow, as docs/adding.md describes them. The site shows them, and
 * tests/python/rules/test_equations.py runs the equations beside the library. This example is Signum.
 *
 * Use: for signs of the momentum in place of its size.
 * Source: Bernstein et al. 2018, arXiv:1802.04434
 * Symbols: m momentum_buffer
 * Equations:
 *   m = momentum * m + (1 - momentum) * g
 *   change = lr * sign(m) + decay * w
 *
 * The state m is signed and starts at zero. */
#ifndef HSTEP_SKELETON_RULE_H
#define HSTEP_SKELETON_RULE_H

#include "rules/rule.h"

/* The row. src/rules/row.h explains its words. */
#define skeleton_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                 \
    RULE("signum", ELEMENTWISE, WHOLE, CAUTIOUS(SKELETON_DECAY), .label = "Signum",                        \
         .title = "Signum (Bernstein et al. 2018)", .lr = 1e-3, .decay = "l2", .keeps = "momentum_buffer") \
    STATE(SIGNED, "momentum_buffer", .beta = "momentum")                                                   \
    HYPER(momentum, "decay rate of the momentum", .initial = 0.9, .maximum = 1.0, .exclusive = 1)
HSTEP_NAME_HYPERS(skeleton)

/* The constants of the kernel. The last member, named after the function prefix, is their number. */
enum { SKELETON_BETA, SKELETON_NEW, SKELETON_LR, SKELETON_DECAY, skeleton_constants };

/* Computes the constants on the host, in double, and rounds each to fp32 once. */
HSTEP_INLINE void skeleton_prepare(float *k, struct hstep_prepare *p)
{
    const struct skeleton_hyper *h = HYPERS(skeleton, p->hyper);
    k[SKELETON_BETA] = (float)h->momentum;
    k[SKELETON_NEW] = (float)(1.0 - h->momentum);
    k[SKELETON_LR] = (float)p->lr;
    k[SKELETON_DECAY] = (float)p->decay;
}

/* Runs in the kernel, so it uses v_... only (src/vec/README.md). Returns the change d, which the weight format
 * subtracts from w. */
V_OP vf skeleton_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode; /* only rules with a second moment can impose its bound */
    s[0] = v_add(v_mul(k[SKELETON_BETA], s[0]), v_mul(k[SKELETON_NEW], g));
    return v_add(v_mul(k[SKELETON_LR], v_sign(s[0])), v_mul(k[SKELETON_DECAY], w));
}

#endif
