/* RMSprop, as torch.optim.RMSprop defines its options. debias is torchastic's.
 *
 * Use: to go on with a run of torch's or torchastic's RMSprop.
 * Source: Tieleman & Hinton 2012, "Neural Networks for Machine Learning", lecture 6.5
 * Symbols: v square_avg, b momentum_buffer, c grad_avg
 * Equations:
 *   v = alpha * v + (1 - alpha) * g**2
 *   e = alpha * (1 - alpha) * (g - c)**2
 *   c = alpha * c + (1 - alpha) * g
 *   z = max(v - c**2, e) if centered else v
 *   q = 1 - alpha**t if debias else 1
 *   b = momentum * b + g / (sqrt(z / q) + eps)
 *   change = lr * b + decay * w
 *
 * A centered z obeys z_t = alpha z_(t-1) + e, so it is never below e. That bound takes the place of v - c^2 if the
 * difference has cancelled, or if a quantized state made it too small or negative. In the plain form the g^2 in v
 * bounds the quotient, whatever quantization has done. States that hyper-parameters make needless come in as 0. */
#ifndef HSTEP_RMSPROP_H
#define HSTEP_RMSPROP_H

#include "rules/rule.h"

#define rmsprop_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                  \
    RULE("rmsprop", ELEMENTWISE, PARTS_UNLESS_OPTION(rmsprop), CAUTIOUS(RMSPROP_DECAY),                    \
         .label = "RMSProp", .title = "RMSprop (Tieleman & Hinton 2012), with momentum and centering",     \
         .lr = 1e-2, .decay = "l2", .keeps = "momentum_buffer")                                            \
    STATE(NONNEG, "square_avg", .beta = "alpha", .precise_while = "centered", .precise = HSTEP_FORMAT_f32) \
    OPTIONAL("momentum", SIGNED, "momentum_buffer", .beta = "momentum")                                    \
    OPTIONAL("centered", SIGNED, "grad_avg", .beta = "alpha", .precise_while = "centered",                 \
             .precise = HSTEP_FORMAT_f32)                                                                  \
    HYPER(alpha, "decay rate of the second moment", BELOW_1(0.99))                                         \
    HYPER(eps, "added to the root of the second moment", .initial = 1e-8, .maximum = 1.0)                  \
    HYPER(momentum, "factor of the momentum buffer; 0 needs no state", .maximum = 1e3)                     \
    HYPER(centered, "1: divide by the deviation from the mean gradient", .maximum = 1.0)                   \
    HYPER(debias, "1: debias the second moment, as torchastic does", .maximum = 1.0)
HSTEP_NAME_HYPERS(rmsprop)

enum {
    RMSPROP_ALPHA, RMSPROP_NEW, RMSPROP_CENTERED, RMSPROP_LEAST, RMSPROP_ROOT, RMSPROP_EPS, RMSPROP_MOMENTUM,
    RMSPROP_LR,
    RMSPROP_DECAY,
    rmsprop_constants
};

HSTEP_INLINE void rmsprop_prepare(float *k, struct hstep_prepare *p)
{
    const struct rmsprop_hyper *h = HYPERS(rmsprop, p->hyper);
    double alpha = h->alpha;
    int centered = h->centered != 0.0, debias = h->debias != 0.0;
    k[RMSPROP_ALPHA] = (float)alpha;
    k[RMSPROP_NEW] = (float)(1.0 - alpha);
    k[RMSPROP_CENTERED] = centered ? 1.0f : 0.0f;
    k[RMSPROP_LEAST] = centered ? (float)(alpha * (1.0 - alpha)) : 0.0f;
    k[RMSPROP_ROOT] = debias ? (float)(1.0 / sqrt(1.0 - hstep_powi(alpha, p->t))) : 1.0f;
    k[RMSPROP_EPS] = (float)h->eps;
    k[RMSPROP_MOMENTUM] = (float)h->momentum;
    k[RMSPROP_LR] = (float)p->lr;
    k[RMSPROP_DECAY] = (float)p->decay;
}

/* The parts are the rule without momentum and centering. They leave out zeros that change nothing. */
V_OP vf rmsprop_start(const vf *k, vf g, vf *s, const int mode, vf *root)
{
    (void)mode;
    s[0] = v_add(v_mul(k[RMSPROP_ALPHA], s[0]), v_mul(v_mul(k[RMSPROP_NEW], g), g));
    *root = v_sqrt(v_max(s[0], v_set(0.0f)));
    return g;
}

V_OP vf rmsprop_end(const vf *k, vf w, vf numerator, vf root)
{
    vf scaled = v_div0(numerator, v_add(v_mul(root, k[RMSPROP_ROOT]), k[RMSPROP_EPS]));
    return v_add(v_mul(k[RMSPROP_LR], v_add(scaled, v_set(0.0f))), v_mul(k[RMSPROP_DECAY], w));
}

V_OP vf rmsprop_rule(const vf *k, vf w, vf g, vf *s, const int mode)
{
    if (!(mode & RULE_OPTION)) {
        vf plain, numerator = rmsprop_start(k, g, s, mode, &plain);
        return rmsprop_end(k, w, numerator, plain);
    }
    s[0] = v_add(v_mul(k[RMSPROP_ALPHA], s[0]), v_mul(v_mul(k[RMSPROP_NEW], g), g));
    vf away = v_sub(g, s[2]), least = v_mul(v_mul(k[RMSPROP_LEAST], away), away);
    s[2] = v_add(v_mul(k[RMSPROP_ALPHA], s[2]), v_mul(k[RMSPROP_NEW], g));
    vf mean = v_mul(k[RMSPROP_CENTERED], s[2]), root = v_sqrt(v_max(v_sub(s[0], v_mul(mean, mean)), least));
    vf scaled = v_div0(g, v_add(v_mul(root, k[RMSPROP_ROOT]), k[RMSPROP_EPS]));
    s[1] = v_add(v_mul(k[RMSPROP_MOMENTUM], s[1]), scaled);
    return v_add(v_mul(k[RMSPROP_LR], s[1]), v_mul(k[RMSPROP_DECAY], w));
}

#endif
