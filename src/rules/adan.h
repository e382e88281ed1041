/* Adan, with betas as decay rates and debiased moments.
 *
 * Use: for Nesterov momentum with an adaptive step. It has four states.
 * Source: Xie et al. 2022, arXiv:2208.06677, algorithm 1
 * Symbols: m exp_avg, a exp_avg_diff, n exp_avg_sq, p previous
 * Equations:
 *   e = g - p if t > 1 else 0
 *   y = g + beta2 * e
 *   m = beta1 * m + (1 - beta1) * g
 *   a = beta2 * a + (1 - beta2) * e
 *   n = beta3 * n + (1 - beta3) * y**2
 *   p = g
 *   u = m / (1 - beta1**t) + beta2 * a / (1 - beta2**t)
 *   n_hat = n / (1 - beta3**t)
 *   change = lr * u / (sqrt(n_hat) + eps) + decay * w
 *
 * The paper's (w - lr u) / (1 + lr wd) is the decay mode "proximal", whose two factors arrive as lr and decay. The
 * fourth state is the gradient itself; optimi keeps its negative.
 *
 * Bounds for quantized moments. Let r = b2 / (1 + b2), with b for beta. Then g_j = (1 - r) sum of r^i y_(j-i) + r^j
 * y_1. Averages of g are therefore averages of y at all delays i, and n holds the squares of y. Cauchy-Schwarz, by
 * which a delay costs b3^(-i/2), gives
 *
 *   |average of g by b| <= A(b, t) sqrt(n) = (C(b, t) (1 - r) / (1 - q) + E(b, t)) sqrt(n)        q = r / sqrt(b3) < 1
 *
 * C is Adam's bound for b and b3. E is the share of y_1, which stands for the time before it:
 *
 *   E(b, t) = r (1 - b) sqrt(b3) / sqrt(1 - b3) * ((b^2 / b3)^(t/2) - q^t) / (b - r)
 *
 * Summed by parts, a = (1 - b2) (g_t - average of g by b2 up to t - 1 - b2^(t-1) g_1). Hence
 *
 *   |a| <= (1 - b2) sqrt(n) (((1 - r) / sqrt(1 - q^2) + sqrt(b3) q^t + (b2^2 / b3)^((t-1)/2)) / sqrt(1 - b3)
 *                            + A(b2, t - 1) / sqrt(b3)) */
#ifndef HSTEP_ADAN_H
#define HSTEP_ADAN_H

#include "rules/adamw.h"

#define adan_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                    \
    RULE("adan", ELEMENTWISE, PARTS(adan), CAUTIOUS(ADAN_DECAY),                                          \
         .label = "Adan", .title = "Adan, Nesterov momentum from gradient differences (Xie et al. 2022)", \
         .lr = 1e-3, .weight_decay = 2e-2, .decay = "proximal", .keeps = "exp_avg")                       \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                                                             \
    STATE(SIGNED, "exp_avg_diff", .beta = "beta2")                                                        \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta3")                                                          \
    STATE(GRADIENT, "previous")                                                                           \
    HYPER(beta1, "decay rate of the first moment", BELOW_1(0.98))                                         \
    HYPER(beta2, "decay rate of the differences", BELOW_1(0.92))                                          \
    HYPER(beta3, "decay rate of the second moment", BELOW_1(0.99))                                        \
    HYPER(eps, "added to the root of the debiased second moment", .initial = 1e-8, .maximum = 1.0)
HSTEP_NAME_HYPERS(adan)

enum {
    ADAN_BETA1, ADAN_NEW1, ADAN_BETA2, ADAN_NEW2, ADAN_BETA3, ADAN_NEW3, ADAN_SEEN, ADAN_ROOT, ADAN_EPS, ADAN_AVERAGE,
    ADAN_DIFFERENCE, ADAN_DECAY, ADAN_BOUND, ADAN_BOUND_DIFFERENCE,
    adan_constants
};

/* Returns A(beta, t) of the bounds above. */
HSTEP_INLINE double adan_bound(double beta, double r, double beta3, uint64_t t)
{
    double scale = sqrt(beta3), p = beta / scale, q = r / scale;
    double early = beta == r ? (double)t * hstep_powi(q, t) : r * (hstep_powi(p, t) - hstep_powi(q, t)) / (beta - r);
    early = early * (1.0 - beta) * scale / sqrt(1.0 - beta3);
    return (double)adamw_bound(beta, beta3, t) * (1.0 - r) / (1.0 - q) + early;
}

HSTEP_INLINE void adan_prepare(float *k, struct hstep_prepare *p)
{
    const struct adan_hyper *h = HYPERS(adan, p->hyper);
    double beta1 = h->beta1, beta2 = h->beta2, beta3 = h->beta3;
    double correction1 = 1.0 - hstep_powi(beta1, p->t), correction2 = 1.0 - hstep_powi(beta2, p->t);
    k[ADAN_BETA1] = (float)beta1;
    k[ADAN_NEW1] = (float)(1.0 - beta1);
    k[ADAN_BETA2] = (float)beta2;
    k[ADAN_NEW2] = (float)(1.0 - beta2);
    k[ADAN_BETA3] = (float)beta3;
    k[ADAN_NEW3] = (float)(1.0 - beta3);
    k[ADAN_SEEN] = p->t > 1 ? 1.0f : 0.0f;
    k[ADAN_ROOT] = (float)(1.0 / sqrt(1.0 - hstep_powi(beta3, p->t)));
    k[ADAN_EPS] = (float)h->eps;
    k[ADAN_AVERAGE] = (float)(p->lr / correction1);
    k[ADAN_DIFFERENCE] = (float)(p->lr * beta2 / correction2);
    k[ADAN_DECAY] = (float)p->decay;
    k[ADAN_BOUND] = k[ADAN_BOUND_DIFFERENCE] = 1e30f;
    double r = beta2 / (1.0 + beta2), scale = sqrt(beta3), q = beta3 > 0.0 ? r / scale : 1.0;
    if (q < 1.0) {
        double average = adan_bound(beta1, r, beta3, p->t), before = adan_bound(beta2, r, beta3, p->t - 1);
        double ends = (1.0 - r) / sqrt(1.0 - q * q) + scale * hstep_powi(q, p->t) + hstep_powi(beta2 / scale, p->t - 1);
        double difference = (1.0 - beta2) * (ends / sqrt(1.0 - beta3) + before / scale);
        if (average < 1e30) k[ADAN_BOUND] = (float)average;
        if (difference < 1e30) k[ADAN_BOUND_DIFFERENCE] = (float)difference;
    }
}

V_OP vf adan_start(const vf *k, vf g, vf *s, const int mode, vf *divisor)
{
    vf e = v_mul(k[ADAN_SEEN], v_sub(g, s[3])), y = v_add(g, v_mul(k[ADAN_BETA2], e));
    vf m = v_add(v_mul(k[ADAN_BETA1], s[0]), v_mul(k[ADAN_NEW1], g));
    vf a = v_add(v_mul(k[ADAN_BETA2], s[1]), v_mul(k[ADAN_NEW2], e));
    vf n = v_add(v_mul(k[ADAN_BETA3], s[2]), v_mul(v_mul(k[ADAN_NEW3], y), y)), root = v_sqrt(n);
    if (mode & RULE_CLAMP) {
        m = adamw_clamp(m, v_mul(k[ADAN_BOUND], root));
        a = adamw_clamp(a, v_mul(k[ADAN_BOUND_DIFFERENCE], root));
    }
    s[0] = m;
    s[1] = a;
    s[2] = n;
    s[3] = g;
    *divisor = root;
    return v_add(v_mul(k[ADAN_AVERAGE], m), v_mul(k[ADAN_DIFFERENCE], a));
}

V_OP vf adan_end(const vf *k, vf w, vf numerator, vf root)
{
    vf update = v_div0(numerator, v_add(v_mul(root, k[ADAN_ROOT]), k[ADAN_EPS]));
    return v_add(update, v_mul(k[ADAN_DECAY], w));
}

#endif
