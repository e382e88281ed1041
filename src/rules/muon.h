/* Muon (Jordan et al. 2024): a matrix takes a step of the same length in every direction that its momentum has:
 *
 *   b = mu b + (1 - mu) g
 *   u = (1 - mu) g + mu b (Nesterov), b
 *   d = lr * adjust * O + decay * w           O: u by Newton-Schulz steps, nearly its orthogonal factor
 *                                             (transforms.def)
 *   adjust, by match_rms:
 *     original          sqrt(max(1, rows / columns))
 *     match_rms_adamw   0.2 sqrt(max(rows, columns))   Liu et al. 2025
 *     spectral_norm     sqrt(rows / columns)           microsoft/dion
 *     none              1
 *
 * ns_coefficients is the row of coefficients.h. ns_form "gram" iterates on the Gram matrix of a long matrix
 * (device/host/matrix.c). normalize_rows makes the rows of O alike (decide/rows.h), as NorMuon does (Li et al. 2025).
 * "keep-norm" is the authors' code. "full-norm" with match_rms "match_rms_adamw" is the paper's algorithm, whose
 * updates have a root mean square of 0.2 lr.
 *
 * torch.optim.Muon has this form. In its buffer gradients weigh 1 - mu, on which O does not depend. Its adjust_lr_fn is
 * "original" or "match_rms_adamw". torch runs the Newton-Schulz steps in BF16; here they are fp32. A matrix is a tensor
 * of at least two dimensions with more than one row and column. Any other tensor is stepped by AdamW with beta1, beta2
 * and eps. Its first moment takes the place of the momentum. */
#ifndef HSTEP_MUON_H
#define HSTEP_MUON_H

#include "rules/adamw.h"
#include "rules/transforms.h"

/* Constants of a matrix; any other tensor has those of adamw. */
enum {
    MUON_OLD = newton_schulz_constants, MUON_NEW, MUON_GRADIENT, MUON_BUFFER, MUON_SCALE, MUON_DECAY,
    muon_matrix_constants,
    muon_constants =
        (int)muon_matrix_constants > (int)adamw_constants ? (int)muon_matrix_constants : (int)adamw_constants
};

/* Returns what O is multiplied by, by the value of match_rms. */
HSTEP_INLINE double muon_adjust(int match_rms, double rows, double columns)
{
    const double most = rows > columns ? rows : columns;
    switch (match_rms) {
    case 0: return sqrt(most / columns);
    case 1: return 0.2 * sqrt(most);
    case 2: return sqrt(rows / columns);
    default: return 1.0;
    }
}

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
    double momentum = hyper[0], adjust = muon_adjust((int)hyper[6], (double)own->rows, (double)own->row_length);
    int nesterov = hyper[1] != 0.0, least = hstep_coefficients[(int)hyper[12]].least;
    k[MUON_OLD] = (float)momentum;
    k[MUON_NEW] = (float)(1.0 - momentum);
    k[MUON_GRADIENT] = nesterov ? (float)(1.0 - momentum) : 0.0f;
    k[MUON_BUFFER] = nesterov ? (float)momentum : 1.0f;
    k[MUON_SCALE] = (float)(p->lr * adjust);
    k[MUON_DECAY] = (float)p->decay;
    k[newton_schulz_steps] = hyper[2] < least ? (float)least : (float)hyper[2];
    k[newton_schulz_a] = (float)hyper[3];
    k[newton_schulz_b] = (float)hyper[4];
    k[newton_schulz_c] = (float)hyper[5];
    k[newton_schulz_eps] = (float)hyper[10];
    k[newton_schulz_exact] = (float)hyper[11];
    k[newton_schulz_row] = (float)(int)hyper[12];
    k[newton_schulz_form] = (float)(int)hyper[13];
}

V_OP vf muon_direction(const vf *k, vf g, vf *s, const int mode)
{
    (void)mode;
    s[0] = v_add(v_mul(k[MUON_OLD], s[0]), v_mul(k[MUON_NEW], g));
    return v_add(v_mul(k[MUON_GRADIENT], g), v_mul(k[MUON_BUFFER], s[0]));
}

V_OP vf muon_change(const vf *k, vf w, vf o) { return v_add(v_mul(k[MUON_SCALE], o), v_mul(k[MUON_DECAY], w)); }

#define muon_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                                \
    RULE("muon", MATRIX(newton_schulz), PARTS(adamw),                                                                 \
         CAUTIOUS_DECAY("the update of a matrix is made of all its elements at once"),                                \
         .label = "Muon",                                                                                             \
         .title = "Muon: orthogonalized momentum for matrices, AdamW for the rest (Jordan et al. 2024)",              \
         .lr = 1e-3, .weight_decay = 1e-1, .decay = "decoupled", .keeps = "momentum_buffer")                          \
    STATE(SIGNED, "momentum_buffer", .beta = "momentum", .fewest_bits = 8,                                            \
          .coarse = "ends 0.01 nat or more behind fp32's from scratch; int8 does not")                                \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                                      \
    OPTIONAL("normalize_rows", ROWS, "second_momentum_buffer", .beta = "row_beta")                                    \
    HYPER("momentum", "decay rate of the momentum of matrices", .initial = 0.95, .maximum = 1e3)                      \
    HYPER("nesterov", "1: the update is one step of the momentum ahead", .initial = 1.0, .maximum = 1.0)              \
    HYPER("ns_steps", "Newton-Schulz iterations", .initial = 5.0, .minimum = 1.0, .maximum = 100.0)                   \
    HYPER("ns_a", "coefficient of X", .initial = 3.4445, .minimum = -100.0, .maximum = 100.0)                         \
    HYPER("ns_b", "coefficient of X X' X", .initial = -4.775, .minimum = -100.0, .maximum = 100.0)                    \
    HYPER("ns_c", "coefficient of (X X')^2 X", .initial = 2.0315, .minimum = -100.0, .maximum = 100.0)                \
    HYPER("match_rms", "scale of a matrix's update, 0.2 sqrt(max(rows, columns)) or another", .maximum = 3.0,         \
          .words = {"original", "match_rms_adamw", "spectral_norm", "none"})                                          \
    HYPER("beta1", "decay rate of the first moment of the rest", BELOW_1(0.9))                                        \
    HYPER("beta2", "decay rate of the second moment of the rest", BELOW_1(0.999))                                     \
    HYPER("eps", "added to the root of the second moment of the rest", .initial = 1e-8, .maximum = 1.0)               \
    HYPER("ns_eps", "least norm that the momentum of a matrix is divided by", .initial = 1e-7, .maximum = 1.0)        \
    HYPER("exact", "1: a GPU multiplies matrices to the bits of every machine, not by its units for BF16",            \
          .maximum = 1.0)                                                                                             \
    HYPER("ns_coefficients", "coefficients of the iterations: ns_a, ns_b and ns_c, or a published list",              \
          .maximum = (HSTEP_COEFFICIENTS(HSTEP_ONE)) - 1, .words = {HSTEP_COEFFICIENTS(HSTEP_COEFFICIENTS_NAME)})     \
    HYPER("ns_form", "form of the iterations: gram has fewer products, for matrices with a side 1.5 times the other", \
          .maximum = 1.0, .words = {"standard", "gram"})                                                              \
    HYPER("normalize_rows", "NorMuon: rows of an update are divided by the root of their second moment",              \
          .maximum = 2.0, .words = {"off", "keep-norm", "full-norm"})                                                 \
    HYPER("row_beta", "decay rate of the second moment of rows", BELOW_1(0.95))

#endif
