/* Prodigy: Adam whose learning rate D is estimated from how far the weights have come. The estimate takes sums over all
 * tensors of the optimizer whose groups have one d_group.
 *
 * Use: for a new model, if no learning rate is known. Leave lr at 1.
 * Source: Mishchenko & Defazio 2023, arXiv:2306.06101, algorithm 4
 * Symbols: m exp_avg, v exp_avg_sq, s s, x p0, D d, M d_max, N d_numerator
 * Equations:
 *   D = d0 if t == 1 else D
 *   M = d0 if t == 1 else M
 *   k = sqrt(1 - beta2**t) / (1 - beta1**t) if debias else 1
 *   b = sqrt(beta2) if beta3 == 0 else beta3
 *   L = lr * D * k
 *   y = D if safeguard_warmup else L
 *   c = D * k * decay
 *   m = beta1 * m + (1 - beta1) * D * g
 *   v = beta2 * v + (1 - beta2) * (D * g)**2
 *   s = b * s + D / d0 * y * g
 *   N = b * N + D / d0 * L * total(g * (x - w))
 *   E = d_coef * N / total(abs(s))
 *   F = max(D, E) if D == d0 else D
 *   M = max(M, E)
 *   D = min(M, growth_rate * F)
 *   change = L * m / (sqrt(v) + D * eps) + c * w
 *
 * x is the weight before a tensor's first step, and D the estimate. Totals are over all these tensors. As in the
 * authors' code, the tensors have one D, one bound M and one N. The first of their groups gives b, d0, d_coef,
 * growth_rate and k, and t counts its steps.
 *
 * A tensor without a gradient leaves D to the others and uses their D when it moves again. If lr is 0, nothing of a
 * tensor changes or is summed. If all gradients are 0, D stays. If all s are 0, D stays and nothing moves. The sums
 * take only every slice_p-th element of a tensor. */
#ifndef HSTEP_PRODIGY_H
#define HSTEP_PRODIGY_H

#include "rules/adamw.h"

#define prodigy_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                           \
    RULE("prodigy", TOTALS(3), WHOLE, NOT_CAUTIOUS("sums over all tensors come before its update"),                 \
         .label = "Prodigy", .title = "Prodigy: Adam that estimates its learning rate (Mishchenko & Defazio 2023)", \
         .lr = 1.0, .decay = "decoupled", .share = "d_group")                                                       \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                                                                       \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                                    \
    STATE(SIGNED, "s", .beta = "beta2")                                                                             \
    STATE(WEIGHT, "p0")                                                                                             \
    HYPER(beta1, "decay rate of the first moment", BELOW_1(0.9))                                                    \
    HYPER(beta2, "decay rate of the second moment", BELOW_1(0.999))                                                 \
    HYPER(beta3, "decay rate of the estimate's sums; the root of beta2 if 0", BELOW_1(0.0))                         \
    HYPER(eps, "added to the root of the second moment, times the estimate", .initial = 1e-8, .maximum = 1.0)       \
    HYPER(d0, "first estimate of the learning rate", .initial = 1e-6, .minimum = 1e-30, .maximum = 1e6)             \
    HYPER(d_coef, "scale of the estimate", .initial = 1.0, .maximum = 1e6)                                          \
    HYPER(growth_rate, "the estimate grows by at most this factor in a step", .initial = 1e300, .minimum = 1.0,     \
          .maximum = 1e300)                                                                                         \
    HYPER(safeguard_warmup, "1: lr is left out of the estimate's divisor, for a warm-up", .maximum = 1.0)           \
    HYPER(debias, "1: debias the moments", .maximum = 1.0)                                                          \
    HYPER(slice_p, "one element in so many counts in the sums of the estimate", .initial = 1.0, .minimum = 1.0,     \
          .maximum = 1e9)                                                                                           \
    HYPER(d_group, "groups with the same number share one estimate; their lr are equal or 0", .maximum = 1e6)       \
    SCALAR(d, .maximum = 1e300)                                                                                     \
    SCALAR(d_max, .maximum = 1e300)                                                                                 \
    SCALAR(d_numerator, .minimum = -1e300, .maximum = 1e300)
HSTEP_NAME_HYPERS(prodigy)
HSTEP_NAME_SCALARS(prodigy)

enum { PRODIGY_BETA3 = adamw_constants, PRODIGY_NEW3, PRODIGY_NUMERATOR, prodigy_constants };

/* Stores what a step with these sums leaves: D, its bound and N. Before the step D is `d`, and its bound is `most`. */
HSTEP_INLINE void prodigy_estimate(const struct prodigy_hyper *all, double beta3, double d, double most,
                                   const double *total, struct prodigy_scalar *scalar)
{
    double numerator = beta3 * scalar->d_numerator + total[0], next = d;
    if (total[2] > 0.0) {
        double estimate = all->d_coef * numerator / total[1];
        if (d == all->d0 && estimate > next) next = estimate;
        if (estimate > most) most = estimate;
        next = next * all->growth_rate;
        if (!(next < most)) next = most;
    }
    scalar->d = next;
    scalar->d_max = most;
    scalar->d_numerator = numerator;
}

HSTEP_INLINE void prodigy_prepare(float *k, struct hstep_prepare *p)
{
    const struct prodigy_hyper *h = HYPERS(prodigy, p->hyper);
    const struct prodigy_hyper *all = HYPERS(prodigy, p->shared->hyper);
    struct prodigy_scalar *scalar = SCALARS(prodigy, hstep_own(p)->scalar);
    double beta1 = h->beta1, beta2 = h->beta2, beta3 = all->beta3 == 0.0 ? sqrt(all->beta2) : all->beta3, d0 = all->d0;
    int begun = scalar->d > 0.0, still = p->lr == 0.0;
    double d = begun ? scalar->d : d0, most = begun ? scalar->d_max : d0, correction = 1.0;
    p->every = (int64_t)h->slice_p;
    if (all->debias != 0.0)
        correction = sqrt(1.0 - hstep_powi(all->beta2, p->shared->t)) / (1.0 - hstep_powi(all->beta1, p->shared->t));
    double step = d * p->lr * correction, decay = d * p->decay * correction, ratio = d / d0;
    k[PRODIGY_NUMERATOR] = (float)(ratio * step);
    k[PRODIGY_BETA3] = still ? 1.0f : (float)beta3;
    k[PRODIGY_NEW3] = still ? 0.0f : (float)(ratio * (h->safeguard_warmup != 0.0 ? d : step));
    if (p->total && p->total[1] > 0.0) prodigy_estimate(all, beta3, d, most, p->total, scalar);
    else if (p->total) step = decay = 0.0;
    k[ADAMW_BETA1] = still ? 1.0f : (float)beta1;
    k[ADAMW_NEW1] = still ? 0.0f : (float)((1.0 - beta1) * d);
    k[ADAMW_BETA2] = still ? 1.0f : (float)beta2;
    k[ADAMW_NEW2] = still ? 0.0f : (float)((1.0 - beta2) * d * d);
    k[ADAMW_ROOT] = 1.0f;
    k[ADAMW_EPS] = (float)((scalar->d > 0.0 ? scalar->d : d) * h->eps);
    k[ADAMW_LR] = (float)step;
    k[ADAMW_DECAY] = (float)decay;
    k[ADAMW_BOUND] = adamw_bound(beta1, beta2, p->t);
}

V_OP vf prodigy_s(const vf *k, vf g, vf s) { return v_add(v_mul(k[PRODIGY_BETA3], s), v_mul(k[PRODIGY_NEW3], g)); }

V_OP void prodigy_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)mode;
    x[0] = v_mul(k[PRODIGY_NUMERATOR], v_mul(g, v_sub(s[3], w)));
    x[1] = v_abs(prodigy_s(k, g, s[2]));
    x[2] = v_abs(g);
}

V_OP vf prodigy_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    vf root = adamw_moments(k, g, s, mode);
    s[2] = prodigy_s(k, g, s[2]);
    s[3] = v_set(0.0f); /* the change of x0 */
    return adamw_end(k, w, s[0], root);
}

#endif
