/* Muon (Jordan et al. 2024): for a matrix, a step of the same length in every direction that the momentum has,
 *
 *   b = mu b + (1 - mu) g
 *   u = (1 - mu) g + mu b (Nesterov), b
 *   d = lr * adjust * O + decay * w           O: u by Newton-Schulz steps, nearly its orthogonal factor
 *                                             (transforms.def)
 *   adjust = sqrt(max(1, rows / columns)), or with match_rms 0.2 sqrt(max(rows, columns))
 *
 * as torch.optim.Muon has it, in whose buffer gradients weigh 1 - mu (O does not depend on that), with adjust_lr_fn
 * "original" and "match_rms_adamw" (Liu et al. 2025). torch runs the steps in BF16; here they are fp32. A matrix is a
 * tensor of at least two dimensions with more than one row and column; any other is stepped by AdamW with beta1, beta2
 * and eps, its first moment in the place of the momentum. */
#ifndef HSTEP_MUON_H
#define HSTEP_MUON_H

#include "rules/adamw.h"
#include "rules/transforms.h"

/* Of a matrix; any other tensor has those of adamw. */
enum {
    MUON_OLD = newton_schulz_constants, MUON_NEW, MUON_GRADIENT, MUON_BUFFER, MUON_SCALE, MUON_DECAY,
    muon_matrix_constants,
    muon_constants =
        (int)muon_matrix_constants > (int)adamw_constants ? (int)muon_matrix_constants : (int)adamw_constants
};

HSTEP_INLINE void muon_prepare(float *k, struct hstep_prepare *p)
{
    const struct hstep_own *own = hstep_own(p);
    const double *hyper = p->hyper;
    if (!own->matrix) {
        struct hstep_prepare rest = *p;
        rest.hyper = hyper + 7;
        adamw_prepare(k, &rest);
        return;
    }
    double momentum = hyper[0], rows = (double)own->rows, columns = (double)own->row_length;
    double most = rows > columns ? rows : columns;
    double adjust = hyper[6] != 0.0 ? 0.2 * sqrt(most) : sqrt(most / columns);
    int nesterov = hyper[1] != 0.0;
    k[MUON_OLD] = (float)momentum;
    k[MUON_NEW] = (float)(1.0 - momentum);
    k[MUON_GRADIENT] = nesterov ? (float)(1.0 - momentum) : 0.0f;
    k[MUON_BUFFER] = nesterov ? (float)momentum : 1.0f;
    k[MUON_SCALE] = (float)(p->lr * adjust);
    k[MUON_DECAY] = (float)p->decay;
    k[newton_schulz_steps] = (float)hyper[2];
    k[newton_schulz_a] = (float)hyper[3];
    k[newton_schulz_b] = (float)hyper[4];
    k[newton_schulz_c] = (float)hyper[5];
    k[newton_schulz_eps] = (float)hyper[10];
    k[newton_schulz_exact] = (float)hyper[11];
}

V_OP vf muon_direction(const vf *k, vf g, vf *s, const int mode)
{
    (void)mode;
    s[0] = v_add(v_mul(k[MUON_OLD], s[0]), v_mul(k[MUON_NEW], g));
    return v_add(v_mul(k[MUON_GRADIENT], g), v_mul(k[MUON_BUFFER], s[0]));
}

V_OP vf muon_change(const vf *k, vf w, vf o) { return v_add(v_mul(k[MUON_SCALE], o), v_mul(k[MUON_DECAY], w)); }

#define muon_PARTS HSTEP_PARTS(adamw)

V_OP vf muon_rule(const vf *k, vf w, vf g, vf *s, const int mode) { return adamw_rule(k, w, g, s, mode & RULE_CLAMP); }

#endif
