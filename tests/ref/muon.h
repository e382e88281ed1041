/* torch.optim.Muon in double: momentum by lerp, Nesterov by lerp, division by the norm, the quintic iteration on the
 * smaller Gram matrix, both adjustments of lr. Tensors that are not matrices take AdamW's step. */
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

/* Runs the iteration on u, a matrix of rows x columns, in place. */
static inline void ref_newton_schulz(double *u, int rows, int columns, double a, double b, double c, int steps,
                                     double eps)
{
    int tall = rows > columns, m = tall ? columns : rows, n = tall ? rows : columns;
    double *room = malloc(sizeof *room * (size_t)(2 * m * n + 2 * m * m)), norm = 0;
    if (!room) abort();
    double *x = room, *next = x + m * n, *gram = next + m * n, *square = gram + m * m;
    for (int i = 0; i < m * n; i++) norm += u[i] * u[i];
    norm = fmax(sqrt(norm), eps);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) x[i * n + j] = ref_ratio(tall ? u[j * m + i] : u[i * n + j], norm);
    for (int step = 0; step < steps; step++) {
        ref_product(gram, x, x, 1, m, n, m);
        ref_product(square, gram, gram, 0, m, m, m);
        for (int i = 0; i < m * m; i++) gram[i] = b * gram[i] + c * square[i];
        ref_product(next, gram, x, 0, m, m, n);
        for (int i = 0; i < m * n; i++) x[i] = a * x[i] + next[i];
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) u[tall ? j * m + i : i * n + j] = x[i * n + j];
    free(room);
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
    ref_newton_schulz(u, r->rows, r->columns, h->ns_a, h->ns_b, h->ns_c, (int)h->ns_steps, h->ns_eps);
    double adjusted = h->lr * (h->match_rms != 0 ? 0.2 * sqrt(fmax(rows, columns)) : sqrt(fmax(1, rows / columns)));
    for (int i = 0; i < r->n; i++) r->x[i].w_new = r->x[i].w - adjusted * u[i] - ref_decay_factor(h) * r->x[i].w;
    free(u);
}

#define ref_muon_ROWS(X) X("muon", ref_muon, 1e-2, "", 1)

#endif
