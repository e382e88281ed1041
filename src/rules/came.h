/* CAME: Adafactor's second moment in two vectors, and a first moment of its quotients. A second pair of vectors
 * measures how far quotient and first moment are apart, so that uncertain elements move less.
 *
 * Use: for the memory of Adafactor with a first moment, and shorter steps where updates disagree.
 * Source: Luo et al. 2023, arXiv:2307.02047, algorithm 2
 * Symbols: m exp_avg, v exp_avg_sq, r exp_avg_sq_row, c exp_avg_sq_col, p exp_avg_res_row, q exp_avg_res_col, y
 *   update_rms
 * Equations:
 *   x = g**2 + eps
 *   if matrix:
 *       r = beta2 * r + (1 - beta2) * row_mean(x)
 *       c = beta2 * c + (1 - beta2) * column_mean(x)
 *       v = outer(r, c) / mean(r)
 *   else:
 *       v = beta2 * v + (1 - beta2) * x
 *   u = g / sqrt(v)
 *   y = rms(u)
 *   u = u / max(1, y / clip_threshold) if clip_threshold > 0 else u
 *   m = beta1 * m + (1 - beta1) * u
 *   if matrix:
 *       e = (u - m)**2 + instability_eps
 *       p = beta3 * p + (1 - beta3) * row_mean(e)
 *       q = beta3 * q + (1 - beta3) * column_mean(e)
 *       z = outer(p, q) / mean(p)
 *       change = lr * m / sqrt(z) + decay * w
 *   else:
 *       change = lr * m + decay * w
 *
 * As in the authors' code, no moment is debiased. If a square is 0, so is its quotient. rms is the root mean square
 * over the tensor. A matrix has two rows and two columns or more. It does not store v. In a stack of matrices each has
 * vectors of its own. */
#ifndef HSTEP_CAME_H
#define HSTEP_CAME_H

#include "rules/adafactor.h"

#define came_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                           \
    RULE("came", FACTORED(2, 1), WHOLE, NOT_CAUTIOUS("sums over the tensor come before its update"),             \
         .label = "CAME", .title = "CAME: confidence-guided updates, factored second moments (Luo et al. 2023)", \
         .lr = 2e-4, .decay = "decoupled")                                                                       \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                                                                    \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                                 \
    STATE(ROWS, "exp_avg_sq_row", .beta = "beta2")                                                               \
    STATE(COLUMNS, "exp_avg_sq_col", .beta = "beta2")                                                            \
    STATE(ROWS, "exp_avg_res_row", .beta = "beta3")                                                              \
    STATE(COLUMNS, "exp_avg_res_col", .beta = "beta3")                                                           \
    HYPER(beta1, "decay rate of the first moment, of clipped quotients", BELOW_1(0.9))                           \
    HYPER(beta2, "decay rate of the second moments", BELOW_1(0.999))                                             \
    HYPER(beta3, "decay rate of the instability", BELOW_1(0.9999))                                               \
    HYPER(eps, "added to squares of gradients", .initial = 1e-30, .maximum = 1.0)                                \
    HYPER(instability_eps, "added to squares of the instability", .initial = 1e-16, .maximum = 1.0)              \
    HYPER(clip_threshold, "largest root mean square of a tensor's quotients; no bound if 0", .initial = 1.0,     \
          .maximum = 1e30)                                                                                       \
    SCALAR(update_rms, .maximum = 1e300)
HSTEP_NAME_HYPERS(came)
HSTEP_NAME_SCALARS(came)

enum {
    CAME_BETA1,
    CAME_NEW1,
    CAME_BETA2,
    CAME_NEW2,
    CAME_BETA3,
    CAME_NEW3,
    CAME_NEW2_REST, /* 0 for matrices, which have no v for each element */
    CAME_EPS,
    CAME_INSTABILITY_EPS,
    CAME_REST, /* added to the divisor of m: 1 for the rest, 0 for matrices */
    CAME_CLIP,
    CAME_LR,
    CAME_DECAY,
    came_constants
};

HSTEP_INLINE void came_prepare(float *k, struct hstep_prepare *p)
{
    const struct came_hyper *h = HYPERS(came, p->hyper);
    const struct hstep_own *own = hstep_own(p);
    struct came_scalar *scalar = SCALARS(came, own->scalar);
    double beta1 = h->beta1, beta2 = h->beta2, beta3 = h->beta3, threshold = h->clip_threshold, clip = 1.0;
    if (p->norm) {
        scalar->update_rms = p->norm[0] / sqrt(own->elements);
        if (threshold > 0.0 && scalar->update_rms > threshold) clip = threshold / scalar->update_rms;
    }
    k[CAME_BETA1] = (float)beta1;
    k[CAME_NEW1] = (float)(1.0 - beta1);
    k[CAME_BETA2] = (float)beta2;
    k[CAME_NEW2] = (float)(1.0 - beta2);
    k[CAME_BETA3] = (float)beta3;
    k[CAME_NEW3] = (float)(1.0 - beta3);
    k[CAME_NEW2_REST] = own->matrix ? 0.0f : k[CAME_NEW2];
    k[CAME_EPS] = (float)h->eps;
    k[CAME_INSTABILITY_EPS] = (float)h->instability_eps;
    k[CAME_REST] = own->matrix ? 0.0f : 1.0f;
    k[CAME_CLIP] = (float)clip;
    k[CAME_LR] = (float)p->lr;
    k[CAME_DECAY] = (float)p->decay;
}

/* Returns 1 / mean(r) and 1 / mean(p). */
HSTEP_INLINE double came_factor(const double *hyper, double mean, int pair)
{
    (void)hyper, (void)pair;
    return adafactor_reciprocal(mean);
}

/* Updates v and returns g / sqrt(v). s[] holds m, v, r / mean(r), c, p / mean(p) and q. */
V_OP vf came_quotient(const vf *k, vf g, vf *s)
{
    vf square = v_add(v_mul(g, g), k[CAME_EPS]);
    s[1] = v_add(v_mul(k[CAME_BETA2], s[1]), v_mul(k[CAME_NEW2_REST], square));
    return v_div0(g, v_sqrt(v_add(s[1], v_mul(s[2], s[3]))));
}

V_OP void came_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)w, (void)mode;
    x[0] = came_quotient(k, g, s);
}

/* Returns u, and updates m in s[0]. */
V_OP vf came_moment(const vf *k, vf g, vf *s)
{
    vf u = v_mul(came_quotient(k, g, s), k[CAME_CLIP]);
    s[0] = v_add(v_mul(k[CAME_BETA1], s[0]), v_mul(k[CAME_NEW1], u));
    return u;
}

V_OP vf came_cross(const vf *k, vf w, vf g, vf *s, const int mode, const int pair)
{
    (void)w, (void)mode;
    if (pair == 0) return v_add(v_mul(g, g), k[CAME_EPS]);
    vf u = came_moment(k, g, s), apart = v_sub(u, s[0]);
    return v_add(v_mul(apart, apart), k[CAME_INSTABILITY_EPS]);
}

V_OP vf came_vector(const vf *k, vf old, vf mean, const int pair)
{
    return v_add(v_mul(k[pair ? CAME_BETA3 : CAME_BETA2], old), v_mul(k[pair ? CAME_NEW3 : CAME_NEW2], mean));
}

V_OP vf came_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode;
    came_moment(k, g, s);
    vf divisor = v_add(v_sqrt(v_mul(s[4], s[5])), k[CAME_REST]);
    return v_add(v_mul(k[CAME_LR], v_div0(s[0], divisor)), v_mul(k[CAME_DECAY], w));
}

#endif
