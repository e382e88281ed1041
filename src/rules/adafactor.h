/* Adafactor. The second moment of a matrix is in two vectors. Updates are clipped by their root mean square, and steps
 * are relative to the weights.
 *
 * Use: for training where only memory counts.
 * Source: Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 to 8; published = 0: torch.optim.Adafactor
 * Symbols: v variance, r row_var, c col_var, m exp_avg, U update_rms, W weight_rms
 * Equations:
 *   b = 1 - t**beta2_decay
 *   x = g**2 + eps if published else g**2
 *   f = 0 if published else eps
 *   if matrix:
 *       r = b * r + (1 - b) * row_mean(x)
 *       c = b * c + (1 - b) * column_mean(x)
 *       v = outer(r, c) / max(mean(r), f)
 *   else:
 *       v = b * v + (1 - b) * x
 *   u = g / max(sqrt(v), f)
 *   U = rms(u)
 *   u = u / max(1, U / d) if d > 0 else u
 *   L = min(lr, 1 / sqrt(t)) if relative_step else lr
 *   L = min(L, 1e-6 * t) if relative_step and warmup_init else L
 *   W = rms(w)
 *   L = L * max(W, scale_eps) if scale_parameter else L
 *   if published:
 *       m = beta1 * m + (1 - beta1) * L * u
 *       change = m + L / lr * decay * w
 *   else:
 *       m = beta1 * m + (1 - beta1) * u
 *       change = L * m + decay * w
 *
 * The default form is torch.optim.Adafactor's; published is that of the paper and of transformers. rms is the root mean
 * square over the tensor. If a square is 0, so is its quotient. A matrix has two rows and two columns or more. It does
 * not store v. In a stack of matrices each has vectors of its own. */
#ifndef HSTEP_ADAFACTOR_H
#define HSTEP_ADAFACTOR_H

#include <float.h>

#include "rules/rule.h"

#define adafactor_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                          \
    RULE("adafactor", FACTORED(1, 2), WHOLE, NOT_CAUTIOUS("sums over the tensor come before its update"),            \
         .label = "Adafactor", .title = "Adafactor: factored second moments, relative steps (Shazeer & Stern 2018)", \
         .lr = 1e-2, .decay = "decoupled")                                                                           \
    STATE(NONNEG, "variance")                                                                                        \
    STATE(ROWS, "row_var")                                                                                           \
    STATE(COLUMNS, "col_var")                                                                                        \
    OPTIONAL("beta1", SIGNED, "exp_avg", .beta = "beta1")                                                            \
    HYPER(beta1, "decay rate of the first moment, of updates without lr; 0 needs no state", BELOW_1(0.0))            \
    HYPER(beta2_decay, "beta2 is 1 - t^beta2_decay in update t", .initial = -0.8, .minimum = -1e3,                   \
          .maximum = 0.0)                                                                                            \
    HYPER(eps, "smallest root of a second moment; published: added to squares of gradients", .initial = 0x1p-23,     \
          .maximum = 1.0)                                                                                            \
    HYPER(scale_eps, "smallest root mean square of a weight that scales its step", .initial = 1e-3,                  \
          .maximum = 1e30)                                                                                           \
    HYPER(d, "largest root mean square of a tensor's quotients; no bound if 0", .initial = 1.0, .maximum = 1e30)     \
    HYPER(relative_step, "1: lr is 1 / sqrt(t) in update t, and at most the lr that is set", .initial = 1.0,         \
          .maximum = 1.0)                                                                                            \
    HYPER(warmup_init, "1: relative steps are at most 1e-6 t in update t", .maximum = 1.0)                           \
    HYPER(scale_parameter, "1: steps are times the weight's root mean square", .initial = 1.0, .maximum = 1.0)       \
    HYPER(published, "1: eps, decay and a first moment of whole steps, as transformers has them", .maximum = 1.0)    \
    SCALAR(update_rms, .maximum = 1e300)                                                                             \
    SCALAR(weight_rms, .maximum = 1e300)
HSTEP_NAME_HYPERS(adafactor)
HSTEP_NAME_SCALARS(adafactor)

enum {
    ADAFACTOR_BETA1,
    ADAFACTOR_NEW1, /* factor of the newest update in m: 1 - b1, the clip, and L if m holds whole steps */
    ADAFACTOR_BETA2,
    ADAFACTOR_NEW2,
    ADAFACTOR_NEW2_REST, /* 0 for matrices, which have no v for each element */
    ADAFACTOR_ADDED,
    ADAFACTOR_FLOOR,
    ADAFACTOR_STEP, /* L, or 1 if m holds whole steps */
    ADAFACTOR_DECAY,
    adafactor_constants
};

/* Returns 1 / x, at most the largest fp32 number. Returns 0 for 0, because all that it multiplies is then 0. */
HSTEP_INLINE double adafactor_reciprocal(double x) { return x > 1.0 / FLT_MAX ? 1.0 / x : x > 0.0 ? FLT_MAX : 0.0; }

HSTEP_INLINE void adafactor_prepare(float *k, struct hstep_prepare *p)
{
    const struct adafactor_hyper *h = HYPERS(adafactor, p->hyper);
    const struct hstep_own *own = hstep_own(p);
    struct adafactor_scalar *scalar = SCALARS(adafactor, own->scalar);
    double beta1 = h->beta1, eps = h->eps, threshold = h->d, t = (double)p->t;
    /* Without a first moment both forms agree, and m is the change. m then includes L too. */
    int published = h->published != 0.0, whole = published || beta1 == 0.0;
    double fresh = hstep_pow(t, h->beta2_decay), step = p->lr, clip = 1.0, floor = published ? 0.0 : eps;
    if (h->relative_step != 0.0 && step > 1.0 / sqrt(t)) step = 1.0 / sqrt(t);
    if (h->relative_step != 0.0 && h->warmup_init != 0.0 && step > 1e-6 * t) step = 1e-6 * t;
    if (p->norm) {
        double root = sqrt(own->elements);
        scalar->update_rms = p->norm[0] / root;
        scalar->weight_rms = p->norm[1] / root;
        if (threshold > 0.0 && scalar->update_rms > threshold) clip = threshold / scalar->update_rms;
    }
    double least = h->scale_eps;
    if (h->scale_parameter != 0.0) step = step * (scalar->weight_rms > least ? scalar->weight_rms : least);
    k[ADAFACTOR_BETA1] = (float)beta1;
    k[ADAFACTOR_NEW1] = (float)((1.0 - beta1) * (whole ? step : 1.0) * clip);
    k[ADAFACTOR_STEP] = whole ? 1.0f : (float)step;
    k[ADAFACTOR_BETA2] = (float)(1.0 - fresh);
    k[ADAFACTOR_NEW2] = (float)fresh;
    k[ADAFACTOR_NEW2_REST] = own->matrix ? 0.0f : k[ADAFACTOR_NEW2];
    k[ADAFACTOR_ADDED] = published ? (float)eps : 0.0f;
    k[ADAFACTOR_FLOOR] = (float)floor;
    k[ADAFACTOR_DECAY] = (float)(published && p->lr > 0.0 ? p->decay * (step / p->lr) : p->decay);
}

/* Returns 1 / max(mean(r), f). */
HSTEP_INLINE double adafactor_factor(const double *hyper, double mean, int pair)
{
    const struct adafactor_hyper *h = HYPERS(adafactor, hyper);
    const double floor = h->published != 0.0 ? 0.0 : h->eps;
    (void)pair;
    return adafactor_reciprocal(mean > floor ? mean : floor);
}

/* Updates v and returns g / max(sqrt(v), f). s[] holds v, r / max(mean(r), f), c and m. */
V_OP vf adafactor_quotient(const vf *k, vf g, vf *s)
{
    vf square = v_add(v_mul(g, g), k[ADAFACTOR_ADDED]);
    s[0] = v_add(v_mul(k[ADAFACTOR_BETA2], s[0]), v_mul(k[ADAFACTOR_NEW2_REST], square));
    vf root = v_sqrt(v_add(s[0], v_mul(s[1], s[2])));
    return v_div0(g, v_max(root, k[ADAFACTOR_FLOOR]));
}

V_OP void adafactor_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)mode;
    x[0] = adafactor_quotient(k, g, s);
    x[1] = w;
}

V_OP vf adafactor_cross(const vf *k, vf w, vf g, vf *s, const int mode, const int pair)
{
    (void)w, (void)s, (void)mode, (void)pair;
    return v_add(v_mul(g, g), k[ADAFACTOR_ADDED]);
}

V_OP vf adafactor_vector(const vf *k, vf old, vf mean, const int pair)
{
    (void)pair;
    return v_add(v_mul(k[ADAFACTOR_BETA2], old), v_mul(k[ADAFACTOR_NEW2], mean));
}

V_OP vf adafactor_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    (void)mode;
    vf u = adafactor_quotient(k, g, s);
    s[3] = v_add(v_mul(k[ADAFACTOR_BETA1], s[3]), v_mul(k[ADAFACTOR_NEW1], u));
    return v_add(v_mul(k[ADAFACTOR_STEP], s[3]), v_mul(k[ADAFACTOR_DECAY], w));
}

#endif
