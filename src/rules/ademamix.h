/* AdEMAMix: Adam with a second, slow average of the gradients.
 *
 * Use: for runs that are long enough to average over thousands of steps.
 * Source: Pagliardini et al. 2024, arXiv:2409.03137, algorithm 1
 * Symbols: m exp_avg, v exp_avg_sq, a exp_avg_slow
 * Equations:
 *   A = alpha * min(1, t / alpha_warmup) if alpha_warmup > 0 else alpha
 *   x = min(1, t / beta3_warmup) if beta3_warmup > 0 else 1
 *   h = (1 - x) / ln(beta1) + x / ln(beta3)
 *   B = min(exp(1 / h), beta3)
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   a = B * a + (1 - B) * g
 *   u = m / (1 - beta1**t) + A * a
 *   v_hat = v / (1 - beta2**t)
 *   change = lr * u / (sqrt(v_hat) + eps) + decay * w
 *
 * a is not debiased: it starts at zero on purpose. With alpha_warmup, A rises in a straight line from 0. With
 * beta3_warmup, the half-life of B rises in a straight line from that of beta1.
 *
 * Bounds for quantized moments are Adam's. The bound of a takes beta3 and is doubled, because a meets its bound when
 * gradients hardly change. A bound that is not doubled would then cut off half of the noise of stochastic rounding,
 * which lasts 1 / (1 - beta3) updates. While B rises, a gradient may have entered a with up to 1 - beta1 instead of 1 -
 * beta3. The bound is larger by that factor if there is a beta3_warmup. */
#ifndef HSTEP_ADEMAMIX_H
#define HSTEP_ADEMAMIX_H

#include "rules/adamw.h"

#define ademamix_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                      \
    RULE("ademamix", ELEMENTWISE, PARTS(ademamix), CAUTIOUS(ADAMW_DECAY),                                       \
         .label = "AdEMAMix", .title = "AdEMAMix: AdamW with a slow average besides (Pagliardini et al. 2024)", \
         .lr = 1e-3, .decay = "decoupled", .keeps = "exp_avg")                                                  \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.999)                                                                      \
    STATE(SIGNED, "exp_avg_slow", .beta = "beta3")                                                              \
    HYPER(beta3, "decay rate of the slow average", BELOW_1(0.9999))                                             \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)              \
    HYPER(alpha, "factor of the slow average in the sum with the first moment", .initial = 5.0, .maximum = 1e3) \
    HYPER(alpha_warmup, "updates in which alpha rises from 0; 0: none", .maximum = 1e15)                        \
    HYPER(beta3_warmup, "updates in which beta3 rises from beta1, by half-lives; 0: none", .maximum = 1e15)
HSTEP_NAME_HYPERS(ademamix)

enum {
    ADEMAMIX_FAST = adamw_constants, ADEMAMIX_SLOW, ADEMAMIX_BETA3, ADEMAMIX_NEW3, ADEMAMIX_BOUND,
    ademamix_constants
};

/* Returns B of the formula above. `part` is its x. ln 0 is minus infinity, and its reciprocal is 0. */
HSTEP_INLINE double ademamix_beta3(double beta1, double beta3, double part)
{
    if (!(part < 1.0) || beta3 == 0.0 || beta1 >= beta3) return beta3;
    double half_life = part / hstep_log(beta3);
    if (beta1 > 0.0) half_life = half_life + (1.0 - part) / hstep_log(beta1);
    double beta = hstep_exp(1.0 / half_life);
    return beta < beta3 ? beta : beta3;
}

HSTEP_INLINE void ademamix_prepare(float *k, struct hstep_prepare *p)
{
    const struct ademamix_hyper *h = HYPERS(ademamix, p->hyper);
    double beta1 = h->beta1, beta2 = h->beta2, beta3 = h->beta3, alpha = h->alpha, t = (double)p->t;
    double alpha_warmup = h->alpha_warmup, beta3_warmup = h->beta3_warmup, now = beta3;
    double bound = 2.0 * (double)adamw_bound(beta3, beta2, p->t);
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
    if (t < alpha_warmup) alpha = alpha * (t / alpha_warmup);
    if (t < beta3_warmup) now = ademamix_beta3(beta1, beta3, t / beta3_warmup);
    if (beta3_warmup > 0.0 && beta1 < beta3) bound = bound * ((1.0 - beta1) / (1.0 - beta3));
    k[ADAMW_LR] = (float)p->lr;
    k[ADEMAMIX_FAST] = (float)(1.0 / (1.0 - hstep_powi(beta1, p->t)));
    k[ADEMAMIX_SLOW] = (float)alpha;
    k[ADEMAMIX_BETA3] = (float)now;
    k[ADEMAMIX_NEW3] = (float)(1.0 - now);
    k[ADEMAMIX_BOUND] = bound < 1e30 ? (float)bound : 1e30f;
}

V_OP vf ademamix_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    vf slow = v_add(v_mul(k[ADEMAMIX_BETA3], s[2]), v_mul(k[ADEMAMIX_NEW3], g));
    *root = adamw_moments(k, g, s, mode);
    if (mode & RULE_CLAMP) slow = adamw_clamp(slow, v_mul(k[ADEMAMIX_BOUND], *root));
    s[2] = slow;
    return v_add(v_mul(k[ADEMAMIX_FAST], s[0]), v_mul(k[ADEMAMIX_SLOW], slow));
}

V_OP vf ademamix_end(const vf *k, vf w, vf numerator, vf root) { return adamw_end(k, w, numerator, root); }

#endif
