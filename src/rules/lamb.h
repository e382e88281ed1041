/* LAMB: Adam with decay, where each tensor's step is as long as a share of its weights.
 *
 * Use: for large batches. Each tensor's step is in proportion to its weights.
 * Source: You et al. 2020, arXiv:1904.00962, algorithm 2; debias = 0 and max_weight_norm: the package LAMB16
 * Symbols: m exp_avg, v exp_avg_sq, W weight_norm, U update_norm, r trust_ratio
 * Equations:
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   m_hat = m / (1 - beta1**t) if debias else m
 *   v_hat = v / (1 - beta2**t) if debias else v
 *   u = m_hat / (sqrt(v_hat) + eps) + decay / lr * w
 *   W = min(norm(w), max_weight_norm) if max_weight_norm > 0 else norm(w)
 *   U = norm(u)
 *   r = 1 if adam or W == 0 or U == 0 else (W / U)**trust_scale
 *   change = lr * r * u
 *
 * Norms are Euclidean, of the whole tensor. All decay modes but l2 enter the ratio as weight decay does in the paper.
 * The widespread implementation of the LAMB16 package has max_weight_norm 10 and debias = 0; trust_scale is its
 * exponent. The scalars are the norms that entered the ratio, and the ratio. If lr times a ratio leaves fp32, it counts
 * as 1e30. */
#ifndef HSTEP_LAMB_H
#define HSTEP_LAMB_H

#include "rules/adamw.h"

#define lamb_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                     \
    RULE("lamb", NORMS(2), PARTS(lamb), NOT_CAUTIOUS("sums over the tensor come before its update"),       \
         .label = "Lamb", .title = "LAMB: Adam with a trust ratio for each tensor (You et al. 2020)",      \
         .lr = 1e-3, .decay = "decoupled", .keeps = "exp_avg")                                             \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.999)                                                                 \
    HYPER(eps, "added to the root of the second moment", .initial = 1e-6, .maximum = 1.0)                  \
    HYPER(max_weight_norm, "the weight's norm counts as at most this; 0: no bound", .initial = 10.0,       \
          .maximum = 1e30)                                                                                 \
    HYPER(trust_scale, "exponent of the trust ratio", .initial = 1.0, .maximum = 1.0)                      \
    HYPER(adam, "1: a trust ratio of 1", .maximum = 1.0)                                                   \
    HYPER(debias, "0: moments as they are, as LAMB16's baseline has them", .initial = 1.0, .maximum = 1.0) \
    SCALAR(weight_norm, .maximum = 1e300)                                                                  \
    SCALAR(update_norm, .maximum = 1e300)                                                                  \
    SCALAR(trust_ratio, .maximum = 1e300)
HSTEP_NAME_HYPERS(lamb)
HSTEP_NAME_SCALARS(lamb)

/* m is multiplied by LAMB_LR * LAMB_MEAN, and LAMB_DECAY is lambda. The other constants are those of adamw.h. */
enum { LAMB_LR = ADAMW_LR, LAMB_DECAY = ADAMW_DECAY, LAMB_MEAN = ADAMW_BOUND + 1, lamb_constants };

/* Returns x^y for a ratio of norms x and y of 0 to 1. Both ends are exact. */
HSTEP_INLINE double lamb_power(double x, double y) { return y == 1.0 ? x : y == 0.0 ? 1.0 : hstep_pow(x, y); }

/* Sets what LAMB's rules have beside AdamW's constants. */
HSTEP_INLINE void lamb_fill(float *k, const struct hstep_prepare *p, double beta1, int debias, double ratio)
{
    double lambda = p->lr != 0.0 ? p->decay / p->lr : 0.0, rate = p->lr * ratio;
    k[LAMB_MEAN] = debias ? (float)(1.0 / (1.0 - hstep_powi(beta1, p->t))) : 1.0f;
    if (!debias) k[ADAMW_ROOT] = 1.0f;
    k[LAMB_DECAY] = (float)lambda;
    k[LAMB_LR] = rate < 1e30 ? (float)rate : 1e30f;
}

HSTEP_INLINE void lamb_prepare(float *k, struct hstep_prepare *p)
{
    const struct lamb_hyper *h = HYPERS(lamb, p->hyper);
    double most = h->max_weight_norm, ratio = 1.0;
    if (p->norm) {
        double weight = most > 0.0 && p->norm[0] > most ? most : p->norm[0], update = p->norm[1];
        if (weight > 0.0 && update > 0.0 && h->adam == 0.0) ratio = lamb_power(weight / update, h->trust_scale);
        struct lamb_scalar *scalar = SCALARS(lamb, hstep_own(p)->scalar);
        scalar->weight_norm = weight;
        scalar->update_norm = update;
        scalar->trust_ratio = ratio;
    }
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
    lamb_fill(k, p, h->beta1, h->debias != 0.0, ratio);
}

V_OP vf lamb_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    *root = adamw_moments(k, g, s, mode);
    return v_mul(k[LAMB_MEAN], s[0]);
}

/* Returns u of the formula above. */
V_OP vf lamb_direction(const vf *k, vf w, vf numerator, vf root)
{
    vf update = v_div0(numerator, v_add(v_mul(root, k[ADAMW_ROOT]), k[ADAMW_EPS]));
    return v_add(update, v_mul(k[LAMB_DECAY], w));
}

V_OP vf lamb_end(const vf *k, vf w, vf numerator, vf root)
{
    return v_mul(k[LAMB_LR], lamb_direction(k, w, numerator, root));
}

V_OP vf lamb_update(const vf *k, vf w, vf g, vf *s, const int mode)
{
    vf root, numerator = lamb_start(k, g, s, mode, &root);
    return lamb_direction(k, w, numerator, root);
}

V_OP void lamb_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    x[0] = w;
    x[1] = lamb_update(k, w, g, s, mode);
}

#endif
