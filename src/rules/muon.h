/* Muon: a matrix takes a step of the same length in every direction that its momentum has.
 *
 * Use: for the matrices of a network. Its authors leave embeddings and the output layer to AdamW.
 * Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; match_rms_adamw: Liu et al.
 *   2025, arXiv:2502.16982; normalize_rows: Li et al. 2025, "NorMuon", arXiv:2510.05491
 * Symbols: b momentum_buffer, v exp_avg_sq, r second_momentum_buffer
 * Equations:
 *   if matrix:
 *       b = momentum * b + (1 - momentum) * g
 *       u = (1 - momentum) * g + momentum * b if nesterov else b
 *       X = u / max(norm(u), ns_eps)
 *       for p, q, s in coefficients:
 *           G = X @ X.T
 *           X = p * X + (q * G + s * G @ G) @ X
 *       if normalize_rows != "off":
 *           r = row_beta * r + (1 - row_beta) * row_mean(X**2)
 *           Y = X / (sqrt(r) + 1e-10)
 *           k = sqrt(min(rows, columns)) if normalize_rows == "full-norm" else norm(X)
 *           X = k * Y / norm(Y)
 *       if match_rms == "original":
 *           a = sqrt(max(1, rows / columns))
 *       elif match_rms == "match_rms_adamw":
 *           a = 0.2 * sqrt(max(rows, columns))
 *       elif match_rms == "spectral_norm":
 *           a = sqrt(rows / columns)
 *       else:
 *           a = 1
 *       change = lr * a * X + decay * w
 *   else:
 *       b = beta1 * b + (1 - beta1) * g
 *       v = beta2 * v + (1 - beta2) * g**2
 *       b_hat = b / (1 - beta1**t)
 *       v_hat = v / (1 - beta2**t)
 *       change = lr * b_hat / (sqrt(v_hat) + eps) + decay * w
 *
 * ns_coefficients is the row of coefficients.h. ns_form "gram" iterates on the Gram matrix of a long matrix
 * (device/host/matrix.c). normalize_rows makes the rows of X alike (decide/rows.h), as NorMuon does. "keep-norm" is the
 * authors' code. "full-norm" with match_rms "match_rms_adamw" is the paper's algorithm, whose updates have a root mean
 * square of 0.2 lr. match_rms "spectral_norm" is microsoft/dion's.
 *
 * torch.optim.Muon has this form. In its buffer gradients weigh 1 - momentum, on which X does not depend. Its
 * adjust_lr_fn is "original" or "match_rms_adamw". torch runs the Newton-Schulz steps in BF16; here they are fp32. A
 * matrix is a tensor of at least two dimensions with more than one row and column. Any other tensor is stepped by AdamW
 * with beta1, beta2 and eps. Its first moment takes the place of the momentum. */
#ifndef HSTEP_MUON_H
#define HSTEP_MUON_H

#include "rules/adamw.h"
#include "rules/transforms.h"

#define muon_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)                                                              \
    RULE("muon", MATRIX(newton_schulz), PARTS(adamw),                                                               \
         CAUTIOUS_DECAY("the update of a matrix is made of all its elements at once"),                              \
         .label = "Muon",                                                                                           \
         .title = "Muon: orthogonalized momentum for matrices, AdamW for the rest (Jordan et al. 2024)",            \
         .lr = 1e-3, .weight_decay = 1e-1, .decay = "decoupled", .keeps = "momentum_buffer")                        \
    STATE(SIGNED, "momentum_buffer", .beta = "momentum", .fewest_bits = 8,                                          \
          .coarse = "ends 0.01 nat or more behind fp32's from scratch; int8 does not")                              \
    STATE(NONNEG, "exp_avg_sq", .beta = "beta2")                                                                    \
    OPTIONAL("normalize_rows", ROWS, "second_momentum_buffer", .beta = "row_beta")                                  \
    HYPER(momentum, "decay rate of the momentum of matrices", .initial = 0.95, .maximum = 1e3)                      \
    HYPER(nesterov, "1: the update is one step of the momentum ahead", .initial = 1.0, .maximum = 1.0)              \
    HYPER(ns_steps, "Newton-Schulz iterations", .initial = 5.0, .minimum = 1.0, .maximum = 100.0)                   \
    HYPER(ns_a, "coefficient of X", .initial = 3.4445, .minimum = -100.0, .maximum = 100.0)                         \
    HYPER(ns_b, "coefficient of X X' X", .initial = -4.775, .minimum = -100.0, .maximum = 100.0)                    \
    HYPER(ns_c, "coefficient of (X X')^2 X", .initial = 2.0315, .minimum = -100.0, .maximum = 100.0)                \
    HYPER(match_rms, "scale of a matrix's update, 0.2 sqrt(max(rows, columns)) or another", .maximum = 3.0,         \
          .words = {"original", "match_rms_adamw", "spectral_norm", "none"})                                        \
    HYPER(beta1, "decay rate of the first moment of the rest", BELOW_1(0.9))                                        \
    HYPER(beta2, "decay rate of the second moment of the rest", BELOW_1(0.999))                                     \
    HYPER(eps, "added to the root of the second moment of the rest", .initial = 1e-8, .maximum = 1.0)               \
    HYPER(ns_eps, "least norm that the momentum of a matrix is divided by", .initial = 1e-7, .maximum = 1.0)        \
    HYPER(exact, "1: a GPU multiplies matrices to the bits of every machine, not by its units for BF16",            \
          .maximum = 1.0)                                                                                           \
    HYPER(ns_coefficients, "coefficients of the iterations: ns_a, ns_b and ns_c, or a published list",              \
          .maximum = (HSTEP_COEFFICIENTS(HSTEP_ONE)) - 1, .words = {HSTEP_COEFFICIENTS(HSTEP_COEFFICIENTS_NAME)})   \
    HYPER(ns_form, "form of the iterations: gram has fewer products, for matrices with a side 1.5 times the other", \
          .maximum = 1.0, .words = {"standard", "gram"})                                                            \
    HYPER(normalize_rows, "NorMuon: rows of an update are divided by the root of their second moment",              \
          .maximum = 2.0, .words = {"off", "keep-norm", "full-norm"})                                               \
    HYPER(row_beta, "decay rate of the second moment of rows", BELOW_1(0.95))
HSTEP_NAME_HYPERS(muon)

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
    const struct muon_hyper *h = HYPERS(muon, p->hyper);
    const struct hstep_own *own = hstep_own(p);
    if (!own->matrix) {
        adamw_fill(k, p, h->beta1, h->beta2, h->eps);
        return;
    }
    double momentum = h->momentum, adjust = muon_adjust((int)h->match_rms, (double)own->rows, (double)own->row_length);
    int nesterov = h->nesterov != 0.0, least = hstep_coefficients[(int)h->ns_coefficients].least;
    k[MUON_OLD] = (float)momentum;
    k[MUON_NEW] = (float)(1.0 - momentum);
    k[MUON_GRADIENT] = nesterov ? (float)(1.0 - momentum) : 0.0f;
    k[MUON_BUFFER] = nesterov ? (float)momentum : 1.0f;
    k[MUON_SCALE] = (float)(p->lr * adjust);
    k[MUON_DECAY] = (float)p->decay;
    k[newton_schulz_steps] = h->ns_steps < least ? (float)least : (float)h->ns_steps;
    k[newton_schulz_a] = (float)h->ns_a;
    k[newton_schulz_b] = (float)h->ns_b;
    k[newton_schulz_c] = (float)h->ns_c;
    k[newton_schulz_eps] = (float)h->ns_eps;
    k[newton_schulz_exact] = (float)h->exact;
    k[newton_schulz_row] = (float)(int)h->ns_coefficients;
    k[newton_schulz_form] = (float)(int)h->ns_form;
}

V_OP vf muon_direction(const vf *k, vf g, vf *s, const int mode)
{
    (void)mode;
    s[0] = v_add(v_mul(k[MUON_OLD], s[0]), v_mul(k[MUON_NEW], g));
    return v_add(v_mul(k[MUON_GRADIENT], g), v_mul(k[MUON_BUFFER], s[0]));
}

V_OP vf muon_change(const vf *k, vf w, vf o) { return v_add(v_mul(k[MUON_SCALE], o), v_mul(k[MUON_DECAY], w)); }

#endif
