/* LAMB16, the LAMB of the package of that name, made for states of 8 bits. It has no bias correction. A trust ratio
 * with a small exponent takes the place of most of lr.
 *
 * Use: to go on with a run of the package LAMB16.
 * Source: the package LAMB16
 * Symbols: m exp_avg, v exp_avg_sq, W weight_norm, U update_norm, r trust_ratio
 * Equations:
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   u = m / (sqrt(v) + eps) + decay / lr * w
 *   W = sqrt(sum(min(max(w**2, eps), 1))) / elements
 *   U = sqrt(sum(min(max(u**2, eps), 1))) / elements
 *   r = min((1e-3 * W / (lr * U))**trust_scale, 2)
 *   change = lr * r * u
 *
 * So the change grows with lr^(1 - trust_scale). The sums are over the whole tensor. Values are clamped before they are
 * squared, between sqrt(eps) and 1. With eps = 0 a norm can be 0; the ratio is then 1. At lr = 0 the ratio is 2, as in
 * the package, and nothing moves.
 *
 * The format of states scales them for 8 bits. As in every rule, states of blocks are clamped to the bound of adamw.h
 * before they are used, except those of fp8-lamb16. */
#ifndef HSTEP_LAMB16_H
#define HSTEP_LAMB16_H

#include "rules/lamb.h"

#define lamb16_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                  \
    RULE("lamb16", NORMS(2), PARTS(lamb), NOT_CAUTIOUS("sums over the tensor come before its update"),    \
         .label = "Lamb16", .title = "LAMB16: LAMB with an adaptive trust exponent, made for fp8 states", \
         .lr = 1e-3, .decay = "decoupled", .formats = "fp8+fp8-e5m2", .keeps = "exp_avg")                 \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.999)                                                                \
    HYPER(eps, "added to the root of the second moment", .initial = 1e-6, .maximum = 1.0)                 \
    HYPER(trust_scale, "exponent of the trust ratio", .initial = 0.382, .maximum = 1.0)                   \
    SCALAR(weight_norm, .maximum = 1e300)                                                                 \
    SCALAR(update_norm, .maximum = 1e300)                                                                 \
    SCALAR(trust_ratio, .maximum = 1e300)
HSTEP_NAME_HYPERS(lamb16)
HSTEP_NAME_SCALARS(lamb16)

enum { LAMB16_FLOOR = LAMB_MEAN + 1, LAMB16_CEILING, lamb16_constants };

HSTEP_INLINE void lamb16_prepare(float *k, struct hstep_prepare *p)
{
    const struct lamb16_hyper *h = HYPERS(lamb16, p->hyper);
    double ratio = 1.0;
    if (p->norm) {
        const struct hstep_own *own = hstep_own(p);
        struct lamb16_scalar *scalar = SCALARS(lamb16, own->scalar);
        double weight = p->norm[0] / own->elements, update = p->norm[1] / own->elements;
        if (p->lr == 0.0)
            ratio = 2.0;
        else if (weight > 0.0 && update > 0.0)
            ratio = lamb_power(weight / update * 1e-3 / p->lr, h->trust_scale);
        if (ratio > 2.0) ratio = 2.0;
        scalar->weight_norm = weight;
        scalar->update_norm = update;
        scalar->trust_ratio = ratio;
    }
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
    lamb_fill(k, p, h->beta1, 0, ratio);
    k[LAMB16_FLOOR] = (float)sqrt(h->eps);
    k[LAMB16_CEILING] = 1.0f;
}

V_OP vf lamb16_clamp(const vf *k, vf x) { return v_min(v_max(v_abs(x), k[LAMB16_FLOOR]), k[LAMB16_CEILING]); }

V_OP void lamb16_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    x[0] = lamb16_clamp(k, w);
    x[1] = lamb16_clamp(k, lamb_update(k, w, g, s, mode));
}

#endif
