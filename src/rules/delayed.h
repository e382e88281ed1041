/* The rule of the adamw_bfloat16 package: AdamW with weight decay in lumps that BF16 can hold.
 *
 * Use: to go on with a run of adamw_bfloat16. No other rule needs lumps, unless weights are bf16 or f16.
 * Source: the package adamw_bfloat16
 * Symbols: m exp_avg, v exp_avg_sq, a accumulated_decay
 * Equations:
 *   a = decay + threshold * start if t == 1 else decay + a
 *   c = a if a > threshold else 0
 *   a = a - c
 *   m = beta1 * m + (1 - beta1) * g
 *   v = beta2 * v + (1 - beta2) * g**2
 *   change = lr * sqrt(1 - beta2**t) * m / (sqrt(v) + eps) + c * w
 *
 * m is not debiased, so the first steps are shorter by 1 - beta1^t. The package takes the lump from the rounded weight
 * after the step. Here it is part of the one change. The sum a is kept per tensor, in double. Its start, from 0 to 1,
 * is a hash of the tensor's id, the top 53 bits of splitmix64's finalizer. Tensors therefore do not all decay in the
 * same step. A hash makes runs repeatable and ranks agree. */
#ifndef HSTEP_DELAYED_H
#define HSTEP_DELAYED_H

#include "base/rng.h"
#include "rules/adamw.h"

#define delayed_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                           \
    RULE("adamw-delayed", ELEMENTWISE, PARTS(adamw), CAUTIOUS(ADAMW_DECAY),                                         \
         .label = "AdamWDelayed", .title = "AdamW with lumped decay, for weights with a residual (adamw_bfloat16)", \
         .lr = 1e-3, .decay = "decoupled", .keeps = "exp_avg", .no_cautious_decay = "its decay comes in lumps")     \
    ADAM_MOMENTS(STATE, HYPER, 0.9, 0.999)                                                                          \
    HYPER(eps, "added to the root of the second moment", .initial = 1e-8, .maximum = 1.0)                           \
    HYPER(threshold, "decay is gathered until it is above this, then applied", .initial = 5e-3, .maximum = 1.0)     \
    SCALAR(accumulated_decay, .maximum = 1.0)
HSTEP_NAME_HYPERS(delayed)
HSTEP_NAME_SCALARS(delayed)

enum { delayed_constants = adamw_constants };

HSTEP_INLINE double delayed_start(uint64_t id) { return (double)(hstep_mix(id) >> 11) * 0x1p-53; }

HSTEP_INLINE void delayed_prepare(float *k, struct hstep_prepare *p)
{
    const struct delayed_hyper *h = HYPERS(delayed, p->hyper);
    double threshold = h->threshold, lump = 0.0;
    double *gathered = &SCALARS(delayed, hstep_own(p)->scalar)->accumulated_decay;
    if (p->full == 1) *gathered = threshold * delayed_start(hstep_own(p)->id);
    *gathered = *gathered + p->decay;
    if (*gathered > threshold) {
        lump = *gathered;
        *gathered = 0.0;
    }
    adamw_fill(k, p, h->beta1, h->beta2, h->eps);
    k[ADAMW_ROOT] = 1.0f;
    k[ADAMW_LR] = (float)(p->lr * sqrt(1.0 - hstep_powi(h->beta2, p->t)));
    k[ADAMW_DECAY] = (float)lump;
}

#endif
