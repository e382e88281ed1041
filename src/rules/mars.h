/* MARS-AdamW: AdamW on gradients that are corrected by their change.
 *
 * Use: for pretraining with large noisy batches.
 * Source: Yuan et al. 2024, arXiv:2411.10438, algorithm 2
 * Symbols: m exp_avg, v exp_avg_sq, p last_grad, q gradient_norm
 * Equations:
 *   c = g + gamma * beta1 / (1 - beta1) * (g - p)
 *   p = g
 *   q = norm(c)
 *   c = c * max_norm / q if 0 < max_norm < q else c
 *   m = beta1 * m + (1 - beta1) * c
 *   v = beta2 * v + (1 - beta2) * c**2
 *   m_hat = m / (1 - beta1**t)
 *   v_hat = v / (1 - beta2**t)
 *   change = lr * m_hat / (sqrt(v_hat) + eps) + decay * w
 *
 * In this form (MARS-approx) the last gradient p is that of the last batch, and 0 before the first update. The first c
 * is larger than g, as in the authors' code. That code steps vectors by AdamW with betas of .9 and .95. Here a group
 * with gamma 0 and max_norm 0 does that. The norm is over the tensor. */
#ifndef HSTEP_MARS_H
#define HSTEP_MARS_H

#include "rules/adamw.h"

#define mars_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                   \
    RULE("mars", NORMS(1), PARTS(mars), NOT_CAUTIOUS("sums over the tensor come before its update"),     \
         .label = "MARS", .title = "MARS-AdamW: AdamW on variance-reduced gradients (Yuan et al. 2024)", \
         .lr = 3e-3, .decay = "decoupled", .keeps = "exp_avg")                                           \
    ADAM_MOMENTS(STATE, HYPER, 0.95, 0.99)                                                               \
    STATE(GRADIENT, "last_grad")                                                                         \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)       \
    HYPER(gamma, "scale of the correction; 0: none", .initial = 0.025, .maximum = 1e3)                   \
    HYPER(max_norm, "largest norm of a tensor's corrected gradient; no bound if 0", .initial = 1.0,      \
          .maximum = 1e30)                                                                               \
    SCALAR(gradient_norm, .maximum = 1e300)
HSTEP_NAME_HYPERS(mars)
HSTEP_NAME_SCALARS(mars)

enum { MARS_AHEAD = adamw_constants, MARS_SCALE, mars_constants };

HSTEP_INLINE void mars_prepare(float *k, struct hstep_prepare *p)
{
    const struct mars_hyper *h = HYPERS(mars, p->hyper);
    double beta1 = h->beta1, max_norm = h->max_norm, scale = 1.0;
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
    if (p->norm) {
        SCALARS(mars, hstep_own(p)->scalar)->gradient_norm = p->norm[0];
        if (max_norm > 0.0 && p->norm[0] > max_norm) scale = max_norm / p->norm[0];
    }
    k[MARS_AHEAD] = (float)(h->gamma * beta1 / (1.0 - beta1));
    k[MARS_SCALE] = (float)scale;
}

V_OP vf mars_correct(const vf *k, vf g, vf last) { return v_add(g, v_mul(k[MARS_AHEAD], v_sub(g, last))); }

V_OP vf mars_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    *root = adamw_moments(k, v_mul(mars_correct(k, g, s[2]), k[MARS_SCALE]), s, mode);
    s[2] = g;
    return s[0];
}

V_OP vf mars_end(const vf *k, vf w, vf numerator, vf root) { return adamw_end(k, w, numerator, root); }

V_OP void mars_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)w, (void)mode;
    x[0] = mars_correct(k, g, s[2]);
}

#endif
