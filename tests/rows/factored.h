/* For tests/house/new_rows_test.sh: a rule in the manner of CAME (Luo et al. 2023). It has six states, two pairs of
 * vectors and a norm between them:
 *
 *   matrices: r = b2 r + (1 - b2) mean over columns of (g^2 + e), c likewise over rows, v = r c' / mean(r)
 *
 *   the rest: v = b2 v + (1 - b2) (g^2 + e)
 *
 *   u = g / sqrt(v) / max(1, rms over the tensor of g / sqrt(v)),  m = b1 m + (1 - b1) u
 *
 *   matrices: p = b2 p + (1 - b2) mean over columns of (u - m)^2 + e, q likewise, d = lr m / sqrt(p q' / mean(p))
 *
 *   the rest: d = lr m                                                              both + decay w */
#ifndef HSTEP_FACTORED_H
#define HSTEP_FACTORED_H

#include "rules/rule.h"

#define factored_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                \
    RULE("factored", FACTORED(2, 1), WHOLE, NOT_CAUTIOUS("sums over the tensor come before its update"),  \
         .label = "Factored", .title = "vectors over rows and columns", .lr = 1e-3, .decay = "decoupled", \
         .keeps = "exp_avg")                                                                              \
    STATE(SIGNED, "exp_avg", .beta = "beta1")                                                             \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                          \
    STATE(ROWS, "sq_row", .beta = "beta2")                                                                \
    STATE(COLUMNS, "sq_col", .beta = "beta2")                                                             \
    STATE(ROWS, "res_row", .beta = "beta2")                                                               \
    STATE(COLUMNS, "res_col", .beta = "beta2")                                                            \
    HYPER(beta1, "decay rate", .initial = 0.9, .maximum = 1.0, .exclusive = 1)                            \
    HYPER(beta2, "decay rate", .initial = 0.99, .maximum = 1.0, .exclusive = 1)                           \
    HYPER(eps, "added to squares", .initial = 1e-8, .maximum = 1.0)                                       \
    SCALAR(rms, .maximum = 1e300)
HSTEP_NAME_HYPERS(factored)
HSTEP_NAME_SCALARS(factored)

enum {
    FACTORED_BETA1,
    FACTORED_NEW1,
    FACTORED_BETA2,
    FACTORED_NEW2,
    FACTORED_REST,
    FACTORED_EPS,
    FACTORED_PLAIN,
    FACTORED_CLIP,
    FACTORED_LR,
    FACTORED_DECAY,
    factored_constants
};

HSTEP_INLINE void factored_prepare(float *k, struct hstep_prepare *p)
{
    const struct factored_hyper *h = HYPERS(factored, p->hyper);
    const struct hstep_own *own = hstep_own(p);
    struct factored_scalar *scalar = SCALARS(factored, own->scalar);
    double clip = 1.0;
    if (p->norm) scalar->rms = p->norm[0] / sqrt(own->elements);
    if (p->norm && scalar->rms > 1.0) clip = 1.0 / scalar->rms;
    k[FACTORED_BETA1] = (float)h->beta1;
    k[FACTORED_NEW1] = (float)(1.0 - h->beta1);
    k[FACTORED_BETA2] = (float)h->beta2;
    k[FACTORED_NEW2] = (float)(1.0 - h->beta2);
    k[FACTORED_REST] = own->matrix ? 0.0f : k[FACTORED_NEW2];
    k[FACTORED_EPS] = (float)h->eps;
    k[FACTORED_PLAIN] = own->matrix ? 0.0f : 1.0f;
    k[FACTORED_CLIP] = (float)clip;
    k[FACTORED_LR] = (float)p->lr;
    k[FACTORED_DECAY] = (float)p->decay;
}

HSTEP_INLINE double factored_factor(const double *hyper, double mean, int pair)
{
    (void)hyper, (void)pair;
    return 1.0 / mean;
}

/* States: m, v, r / mean(r), c, p / mean(p), q. */
V_OP vf factored_square(const vf *k, vf x) { return v_add(v_mul(x, x), k[FACTORED_EPS]); }

V_OP vf factored_direction(const vf *k, vf g, vf *s)
{
    s[1] = v_add(v_mul(k[FACTORED_BETA2], s[1]), v_mul(k[FACTORED_REST], factored_square(k, g)));
    return v_div0(g, v_sqrt(v_add(s[1], v_mul(s[2], s[3]))));
}

V_OP void factored_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)w, (void)mode;
    x[0] = factored_direction(k, g, s);
}

V_OP vf factored_moment(const vf *k, vf g, vf *s)
{
    vf u = v_mul(factored_direction(k, g, s), k[FACTORED_CLIP]);
    s[0] = v_add(v_mul(k[FACTORED_BETA1], s[0]), v_mul(k[FACTORED_NEW1], u));
    return u;
}

V_OP vf factored_cross(const vf *k, vf w, vf g, vf *s, const int mode, const int pair)
{
    (void)w, (void)mode;
    if (pair == 0) return factored_square(k, g);
    vf u = factored_moment(k, g, s);
    return factored_square(k, v_sub(u, s[0]));
}

V_OP vf factored_vector(const vf *k, vf old, vf mean, const int pair)
{
    (void)pair;
    return v_add(v_mul(k[FACTORED_BETA2], old), v_mul(k[FACTORED_NEW2], mean));
}

V_OP vf factored_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode;
    factored_moment(k, g, s);
    vf divisor = v_add(v_sqrt(v_mul(s[4], s[5])), k[FACTORED_PLAIN]);
    return v_add(v_mul(k[FACTORED_LR], v_div0(s[0], divisor)), v_mul(k[FACTORED_DECAY], w));
}

#endif
