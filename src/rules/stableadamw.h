/* StableAdamW (Wortsman et al. 2023, algorithm 2): AdamW whose lr is divided by rms, if that is above 1. This is the
 * root mean square, over the tensor, of the update that the newest gradient alone would make:
 *
 *   rms = sqrt(mean((g / max(sqrt(v) / sqrt(1 - b2^t), eps))^2))         v with this gradient, as in adamw.h
 *   d = lr / max(1, rms) / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps) + decay / max(1, rms) * w
 *
 * The paper debiases by changing b1 and b2 with t, which is the same. Before the norm is known, the constants are those
 * of rms = 1. The mean is an exact sum, rounded once, so that no format of the weight makes it coarse. */
#ifndef HSTEP_STABLEADAMW_H
#define HSTEP_STABLEADAMW_H

#include "rules/adamw.h"

enum { stableadamw_constants = adamw_constants };

HSTEP_INLINE void stableadamw_prepare(float *k, struct hstep_prepare *p)
{
    double divisor = 1.0;
    adamw_prepare(k, p);
    if (!p->norm) return;
    const struct hstep_own *own = hstep_own(p);
    own->scalar[0] = p->norm[0] / sqrt(own->elements);
    if (own->scalar[0] > 1.0) divisor = own->scalar[0];
    k[ADAMW_LR] = (float)(p->lr / (1.0 - hstep_powi(p->hyper[0], p->t)) / divisor);
    k[ADAMW_DECAY] = (float)(p->decay / divisor);
}

V_OP void stableadamw_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)w;
    adamw_moments(k, g, s, mode);
    x[0] = v_div0(g, v_max(v_mul(v_sqrt(s[1]), k[ADAMW_ROOT]), k[ADAMW_EPS]));
}

#define stableadamw_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                \
    RULE("stableadamw", NORMS(1), PARTS(adamw), NOT_CAUTIOUS("sums over the tensor come before its update"), \
         .label = "StableAdamW", .title = "StableAdamW: AdamW with clipped updates (Wortsman et al. 2023)",  \
         .lr = 1e-3, .weight_decay = 1e-2, .decay = "decoupled", .keeps = "exp_avg")                         \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.99)                                                                    \
    HYPER("eps", "added to the root of the debiased second moment", .initial = 1e-6, .maximum = 1.0)         \
    SCALAR("update_rms", .maximum = 1e300)

#endif
