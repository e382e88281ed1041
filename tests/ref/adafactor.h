/* torch.optim.Adafactor with a first moment of the updates without lr. published = 1 is the form of Shazeer and Stern
 * 2018 and of transformers. */
#ifndef HALFSTEP_REF_ADAFACTOR_H
#define HALFSTEP_REF_ADAFACTOR_H

#include <stdlib.h>

#include "ref/came.h"

static inline void ref_adafactor(const struct ref_hyper *h, struct ref_tensor *r)
{
    int matrix = ref_is_matrix(r), published = h->published != 0, whole = published || h->beta1 == 0;
    double *value = malloc(sizeof *value * (size_t)r->n), *u = malloc(sizeof *u * (size_t)r->n), mean = 0;
    double fresh = pow(r->t, h->beta2_decay), squares = 0, weights = 0, lr = h->lr;
    if (!value || !u) abort();
    for (int i = 0; i < r->n; i++) {
        double g = ref_gradient(h, &r->x[i]);
        value[i] = g * g + (published ? h->eps : 0);
        weights += r->x[i].w * r->x[i].w;
    }
    if (matrix) mean = ref_vectors(r, value, 1, 1 - fresh, fresh);
    if (!published) mean = fmax(mean, h->eps);
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        double second = matrix ? ref_ratio(x->s_new[1], mean) * x->s_new[2] : (1 - fresh) * x->s[0] + fresh * value[i];
        if (!matrix) x->s_new[0] = second;
        u[i] = ref_ratio(ref_gradient(h, x), fmax(sqrt(second), published ? 0 : h->eps));
        squares += u[i] * u[i];
    }
    r->scalar[0] = sqrt(squares / r->n);
    r->scalar[1] = sqrt(weights / r->n);
    if (h->relative_step != 0) {
        lr = fmin(lr, 1 / sqrt(r->t));
        if (h->warmup_init != 0) lr = fmin(lr, 1e-6 * r->t);
    }
    if (h->scale_parameter != 0) lr *= fmax(h->scale_eps, r->scalar[1]);
    double clip = h->d > 0 ? fmax(1, r->scalar[0] / h->d) : 1, decay = ref_decay_factor(h);
    if (published && h->lr > 0) decay *= lr / h->lr;
    for (int i = 0; i < r->n; i++) {
        struct ref_element *x = &r->x[i];
        x->s_new[3] = F(h->beta1) * x->s[3] + (1 - h->beta1) * (whole ? lr : 1) * u[i] / clip;
        x->w_new = x->w - (whole ? 1 : lr) * x->s_new[3] - decay * x->w;
    }
    free(value);
    free(u);
}

#define ref_adafactor_ROWS(X)                                           \
    X("adafactor", ref_adafactor, 1e-2, "relative_step=0 beta1=0.9", 1) \
    X("adafactor", ref_adafactor, 1e-2, "published=1 eps=1e-30 scale_parameter=0", 0)

#endif
