/* Prodigy (Mishchenko and Defazio 2023, algorithm 4), Adam whose learning rate D is estimated from how far the weights
 * have come, by sums over all tensors of the optimizer. With B = sqrt(1 - b2^t) / (1 - b1^t) where debias is 1, else 1,
 * L = lr D B, and b3 = sqrt(b2) where it is 0:
 *
 *   m = b1 m + (1 - b1) D g        v = b2 v + (1 - b2) (D g)^2
 *   s = b3 s + D / d0 L g          (D / d0 D g where safeguard_warmup is 1)
 *   N = b3 N + D / d0 L sum of g (x0 - w)        E = d_coef N / sum of |s|
 *   d = L m / (sqrt(v) + D' eps) + D B decay * w
 *
 * x0 are the weights it started from, and D' is the next D: max(D, E) while D is d0, then at most the largest E so far
 * and D growth_rate. Where all s are 0 nothing moves and D stays. m, v, s, x0 and the three numbers D, its bound
 * (d_max) and N are as in the authors' code, which counts an update by D before it. The three are kept for each tensor;
 * they agree where all tensors have a gradient in every step, and groups one lr. Both sums are over every slice_p-th
 * element of a tensor alone. */
#ifndef HSTEP_PRODIGY_H
#define HSTEP_PRODIGY_H

#include "rules/adamw.h"

enum { PRODIGY_BETA3 = adamw_constants, PRODIGY_NEW3, prodigy_constants };

HSTEP_INLINE void prodigy_prepare(float *k, struct hstep_prepare *p)
{
    const struct hstep_own *own = hstep_own(p);
    double beta1 = p->hyper[0], beta2 = p->hyper[1], beta3 = p->hyper[2], eps = p->hyper[3], d0 = p->hyper[4];
    int begun = own->scalar[0] > 0.0;
    double d = begun ? own->scalar[0] : d0, most = begun ? own->scalar[1] : d0, next = d, correction = 1.0;
    p->every = (int64_t)p->hyper[9];
    if (beta3 == 0.0) beta3 = sqrt(beta2);
    if (p->hyper[8] != 0.0) correction = sqrt(1.0 - hstep_powi(beta2, p->t)) / (1.0 - hstep_powi(beta1, p->t));
    double step = d * p->lr * correction, decay = d * p->decay * correction;
    if (p->total && p->total[1] > 0.0) {
        double numerator = beta3 * own->scalar[2] + d / d0 * step * p->total[0];
        double estimate = p->hyper[5] * numerator / p->total[1];
        if (d == d0 && estimate > next) next = estimate;
        if (estimate > most) most = estimate;
        next = next * p->hyper[6];
        if (!(next < most)) next = most;
        own->scalar[0] = next;
        own->scalar[1] = most;
        own->scalar[2] = numerator;
    } else if (p->total) {
        step = decay = 0.0;
    }
    k[ADAMW_BETA1] = (float)beta1;
    k[ADAMW_NEW1] = (float)((1.0 - beta1) * d);
    k[ADAMW_BETA2] = (float)beta2;
    k[ADAMW_NEW2] = (float)((1.0 - beta2) * d * d);
    k[ADAMW_ROOT] = 1.0f;
    k[ADAMW_EPS] = (float)(next * eps);
    k[ADAMW_LR] = (float)step;
    k[ADAMW_DECAY] = (float)decay;
    k[ADAMW_BOUND] = adamw_bound(beta1, beta2, p->t);
    k[PRODIGY_BETA3] = (float)beta3;
    k[PRODIGY_NEW3] = (float)(d / d0 * (p->hyper[7] != 0.0 ? d : d * p->lr * correction));
}

V_OP vf prodigy_s(const vf *k, vf g, vf s) { return v_add(v_mul(k[PRODIGY_BETA3], s), v_mul(k[PRODIGY_NEW3], g)); }

V_OP void prodigy_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
{
    (void)mode;
    x[0] = v_mul(g, v_sub(s[3], w));
    x[1] = v_abs(prodigy_s(k, g, s[2]));
}

V_OP vf prodigy_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    vf root = adamw_moments(k, g, s, mode);
    s[2] = prodigy_s(k, g, s[2]);
    s[3] = v_set(0.0f); /* its change */
    return adamw_end(k, w, s[0], root);
}

#endif
