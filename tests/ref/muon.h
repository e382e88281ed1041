/* torch.optim.Muon in double: momentum by lerp, Nesterov by lerp, division by the norm, the quintic iteration on the
 * smaller Gram matrix, the adjustments of lr. normalize_rows is NorMuon of Li et al. 2025. Tensors that are not
 * matrices take AdamW's step. */
#ifndef HALFSTEP_REF_MUON_H
#define HALFSTEP_REF_MUON_H

#include <stdlib.h>

#include "ref/adamw.h"

/* Computes c = a b, or a b' if the right matrix is stored transposed. a is m x k, b is k x n. */
static inline void ref_product(double *c, const double *a, const double *b, int transposed, int m, int k, int n)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int l = 0; l < k; l++) sum += a[i * k + l] * (transposed ? b[j * k + l] : b[l * n + j]);
            c[i * n + j] = sum;
        }
}

/* Coefficients of an iteration, as each paper or package has them. */
static inline void ref_given(const struct ref_hyper *h, int step, double *abc)
{
    (void)step;
    abc[0] = h->ns_a, abc[1] = h->ns_b, abc[2] = h->ns_c;
}

/* Algorithm 1 of Amsel et al. 2025. The matrix is divided by 1.01 times its norm first: see ref_newton_schulz(). */
static inline void ref_polar_express(const struct ref_hyper *h, int step, double *abc)
{
    static const double list[8][3] = {
        {8.28721201814563, -23.595886519098837, 17.300387312530933},
        {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
        {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
        {3.3184196573706015, -2.488488024314874, 0.51004894012372},
        {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
        {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
        {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
        {1.875, -1.25, 0.375},
    };
    (void)h;
    for (int i = 0; i < 3; i++) abc[i] = list[step < 7 ? step : 7][i] / (step < 7 ? pow(1.01, 2 * i + 1) : 1);
}

/* DeepSeek-AI 2026: eight iterations with the coefficients of Jordan et al., then 2, -1.5, 0.5. */
static inline void ref_deepseek(const struct ref_hyper *h, int step, double *abc)
{
    (void)h;
    abc[0] = step < 8 ? 3.4445 : 2, abc[1] = step < 8 ? -4.775 : -1.5, abc[2] = step < 8 ? 2.0315 : 0.5;
}

/* newton_schulz_triton.py of microsoft/dion. */
static inline void ref_dion(const struct ref_hyper *h, int step, double *abc)
{
    static const double list[5][3] = {{4.0848, -6.8946, 2.9270},
                                      {3.9505, -6.3029, 2.6377},
                                      {3.7418, -5.5913, 2.3037},
                                      {2.8769, -3.1427, 1.2046},
                                      {2.8366, -3.0525, 1.2012}};
    (void)h;
    for (int i = 0; i < 3; i++) abc[i] = list[step < 5 ? step : 4][i];
}

/* By the number of ns_coefficients. */
static const struct {
    void (*coefficients)(const struct ref_hyper *h, int step, double *abc);
    int least;
    double norm; /* the matrix is divided by its norm times this */
} ref_lists[] = {{ref_given, 0, 1}, {ref_polar_express, 5, 1.01}, {ref_deepseek, 10, 1}, {ref_dion, 5, 1}};

/* Runs the iteration on u, a matrix of rows x columns, in place. */
static inline void ref_newton_schulz(double *u, int rows, int columns, const struct ref_hyper *h)
{
    int list = (int)h->ns_coefficients, steps = (int)fmax(h->ns_steps, ref_lists[list].least);
    int tall = rows > columns, m = tall ? columns : rows, n = tall ? rows : columns;
    double *room = malloc(sizeof *room * (size_t)(2 * m * n + 2 * m * m)), norm = 0;
    if (!room) abort();
    double *x = room, *next = x + m * n, *gram = next + m * n, *square = gram + m * m;
    for (int i = 0; i < m * n; i++) norm += u[i] * u[i];
    norm = fmax(sqrt(norm), h->ns_eps) * ref_lists[list].norm;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) x[i * n + j] = ref_ratio(tall ? u[j * m + i] : u[i * n + j], norm);
    for (int step = 0; step < steps; step++) {
        double abc[3];
        ref_lists[list].coefficients(h, step, abc);
        ref_product(gram, x, x, 1, m, n, m);
        ref_product(square, gram, gram, 0, m, m, m);
        for (int i = 0; i < m * m; i++) gram[i] = abc[1] * gram[i] + abc[2] * square[i];
        ref_product(next, gram, x, 0, m, m, n);
        for (int i = 0; i < m * n; i++) x[i] = abc[0] * x[i] + next[i];
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) u[tall ? j * m + i : i * n + j] = x[i * n + j];
    free(room);
}

/* NorMuon: divides each row by the root of its second moment, then gives the matrix its norm. */
static inline void ref_normalize_rows(double *u, const struct ref_hyper *h, struct ref_tensor *r)
{
    double before = 0, after = 0;
    for (int i = 0; i < r->rows; i++) {
        double mean = 0, *row = u + i * r->columns;
        for (int j = 0; j < r->columns; j++) mean += row[j] * row[j] / r->columns;
        double v = h->row_beta * r->x[i * r->columns].s[2] + (1 - h->row_beta) * mean;
        for (int j = 0; j < r->columns; j++) {
            r->x[i * r->columns + j].s_new[2] = v;
            before += row[j] * row[j];
            row[j] /= sqrt(v) + 1e-10;
            after += row[j] * row[j];
        }
    }
    if (h->normalize_rows == 2) before = fmin(r->rows, r->columns);
    for (int i = 0; i < r->n; i++) u[i] *= ref_ratio(sqrt(before), sqrt(after));
}

static inline void ref_muon(const struct ref_hyper *h, struct ref_tensor *r)
{
    if (r->ndim < 2 || r->rows < 2 || r->columns < 2) {
        struct ref_hyper rest = *h;
        rest.amsgrad = 0;
        ref_adamw(&rest, r);
        return;
    }
    double *u = malloc(sizeof *u * (size_t)r->n), rows = r->rows, columns = r->columns;
    if (!u) abort();
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        double g = ref_gradient(h, x), buffer = F(h->momentum) * x->s[0] + F(1 - h->momentum) * g;
        u[i] = h->nesterov != 0 ? F(1 - h->momentum) * g + F(h->momentum) * buffer : buffer;
        x->s_new[0] = buffer;
    }
    ref_newton_schulz(u, r->rows, r->columns, h);
    if (h->normalize_rows != 0) ref_normalize_rows(u, h, r);
    const double scales[] = {sqrt(fmax(1, rows / columns)), 0.2 * sqrt(fmax(rows, columns)), sqrt(rows / columns), 1};
    double adjusted = h->lr * scales[(int)h->match_rms];
    for (int i = 0; i < r->n; i++) r->x[i].w_new = r->x[i].w - adjusted * u[i] - ref_decay_factor(h) * r->x[i].w;
    free(u);
}

#define ref_muon_ROWS(X) X("muon", ref_muon, 1e-2, "", 1)

#endif
