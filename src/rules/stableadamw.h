/* StableAdamW: AdamW whose lr and decay are divided by q, if that is above 1. q is the root mean square, over the
 * tensor, of the update that the newest gradient alone would make.
 *
 * Use: for AdamW with shorter steps where a gradient is far larger than its second moment.
 * Source: Wortsman et al. 2023, arXiv:2304.13013, algorithm 2
 * Symbols: m exp_avg, v exp_avg_sq, q update_rms
 * Equations:
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   m_hat = m / (1 - beta1**t)
 *   v_hat = v / (1 - beta2**t)
 *   q = rms(g / max(sqrt(v_hat), eps))
 *   u = lr * m_hat / (sqrt(v_hat) + eps) + decay * w
 *   change = u / max(1, q)
 *
 * The paper debiases by changing beta1 and beta2 with t, which is the same. Before the norm is known, the constants are
 * those of q = 1. The mean is an exact sum, rounded once, so that no format of the weight makes it coarse. */
#ifndef HSTEP_STABLEADAMW_H
#define HSTEP_STABLEADAMW_H

#include "rules/adamw.h"

#define stableadamw_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                \
    RULE("stableadamw", NORMS(1), PARTS(adamw), NOT_CAUTIOUS("sums over the tensor come before its update"), \
         .label = "StableAdamW", .title = "StableAdamW: AdamW with clipped updates (Wortsman et al. 2023)",  \
         .lr = 1e-3, .weight_decay = 1e-2, .decay = "decoupled", .keeps = "exp_avg")                         \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.99)                                                                    \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-6, .maximum = 1.0)           \
    SCALAR(update_rms, .maximum = 1e300)
HSTEP_NAME_HYPERS(stableadamw)
HSTEP_NAME_SCALARS(stableadamw)

enum { stableadamw_constants = adamw_constants };

HSTEP_INLINE void stableadamw_prepare(float *k, struct hstep_prepare *p)
{
    const struct stableadamw_hyper *h = HYPERS(stableadamw, p->hyper);
    double divisor = 1.0;
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
    if (!p->norm) return;
    const struct hstep_own *own = hstep_own(p);
    struct stableadamw_scalar *scalar = SCALARS(stableadamw, own->scalar);
    scalar->update_rms = p->norm[0] / sqrt(own->elements);
    if (scalar->update_rms > 1.0) divisor = scalar->update_rms;
    k[ADAMW_LR] = (float)(p->lr / (1.0 - hstep_powi(h->beta1, p->t)) / divisor);
    k[ADAMW_DECAY] = (float)(p->decay / divisor);
}

V_OP void stableadamw_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)w;
    adamw_moments(k, g, s, mode);
    x[0] = v_div0(g, v_max(v_mul(v_sqrt(s[1]), k[ADAMW_ROOT]), k[ADAMW_EPS]));
}

#endif
