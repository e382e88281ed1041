/* Rules on the places of a lane: which one, and in what mode, is an argument that all lanes share. Values are pairs
 * (device/cuda/code/lane.h). */
#ifndef HSTEP_CUDA_RULES_H
#define HSTEP_CUDA_RULES_H

#include "device/cuda/code/lane.h"

struct values {
    vf weight[2], gradient[2], change[2], state[HALFSTEP_MAX_STATES][2];
};

struct constants {
    vf k[HSTEP_MAX_SCALARS];
};

V_OP struct constants constants_of(const float *k)
{
    struct constants c;
    CUDA_UNROLL for (int i = 0; i < HSTEP_MAX_SCALARS; i++) c.k[i] = v_set(k[i]);
    return c;
}

/* For both vectors of the pair: a statement on s[], their states, which are stored back. */
#define EACH_VECTOR(statement)                                               \
    for (int i = 0; i < 2; i++) {                                            \
        vf s[HALFSTEP_MAX_STATES];                                           \
        for (int j = 0; j < HALFSTEP_MAX_STATES; j++) s[j] = v->state[j][i]; \
        statement;                                                           \
        for (int j = 0; j < HALFSTEP_MAX_STATES; j++) v->state[j][i] = s[j]; \
    }                                                                        \
    break

CUDA_DEVICE void step_rule(int rule, int mode, const vf *k, struct values *v)
{
    switch (rule) {
#define RULE(id, name, fn, ...) \
    case HSTEP_RULE_ROW_##id: EACH_VECTOR(v->change[i] = fn##_rule(k, v->weight[i], v->gradient[i], s, mode));
#include "rules/rules.def"
#undef RULE
    }
}

/* The values of the rule's sums. */
#define NO_NORMS(id, fn)
#define NORMS(id, fn, count)                                                                        \
    case HSTEP_RULE_ROW_##id:                                                                       \
        EACH_VECTOR(vf y[HSTEP_MAX_NORMS]; fn##_norms(k, v->weight[i], v->gradient[i], s, y, mode); \
                    for (int j = 0; j < count; j++) x[j][i] = y[j]);
#define NORMS_1(id, fn) NORMS(id, fn, 1)
#define NORMS_2(id, fn) NORMS(id, fn, 2)
#define NORMS_3(id, fn) NORMS(id, fn, 3)
#define TOTALS_3(share) NORMS_3
CUDA_DEVICE void step_norms(int rule, int mode, const vf *k, struct values *v, vf (*x)[2])
{
    switch (rule) {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign) \
    norms(id, fn)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}
#undef NO_NORMS
#undef NORMS
#undef NORMS_1
#undef NORMS_2
#undef NORMS_3
#undef TOTALS_3

#define ELEMENTWISE(id, fn)
#define RAW_GRADIENT(id, fn)
#define FACTORED_1(id, fn)
#define FACTORED_2(id, fn)
#define MATRIX(name) MATRIX_RULE
#define MATRIX_RULE(id, fn) \
    case HSTEP_RULE_ROW_##id: EACH_VECTOR(v->change[i] = fn##_direction(k, v->gradient[i], s, mode));
CUDA_DEVICE void step_direction(int rule, int mode, const vf *k, struct values *v)
{
    switch (rule) {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign) \
    kind(id, fn)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

#undef MATRIX_RULE
#define MATRIX_RULE(id, fn) \
    case HSTEP_RULE_ROW_##id: EACH_VECTOR(v->change[i] = fn##_change(k, v->weight[i], v->gradient[i]));
/* The transformed direction is in the place of the gradient. */
CUDA_DEVICE void step_change(int rule, const vf *k, struct values *v)
{
    switch (rule) {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign) \
    kind(id, fn)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

#undef MATRIX
#undef MATRIX_RULE
#undef FACTORED_1
#undef FACTORED_2
#define MATRIX(name) ELEMENTWISE
#define FACTORED_1(id, fn) \
    case HSTEP_RULE_ROW_##id: EACH_VECTOR(x[i] = fn##_cross(k, v->weight[i], v->gradient[i], s, mode, pair));
#define FACTORED_2 FACTORED_1
CUDA_DEVICE void step_cross(int rule, int pair, int mode, const vf *k, struct values *v, vf *x)
{
    (void)pair, (void)mode, (void)k, (void)v, (void)x; /* there may be no such rule */
    switch (rule) {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign) \
    kind(id, fn)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

#undef FACTORED_1
#undef FACTORED_2
#define FACTORED_1(id, fn) \
    case HSTEP_RULE_ROW_##id: return fn##_vector(k, old, mean, pair);
#define FACTORED_2 FACTORED_1
CUDA_DEVICE vf step_vector(int rule, int pair, const vf *k, vf old, vf mean)
{
    (void)pair, (void)k, (void)mean;
    switch (rule) {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign) \
    kind(id, fn)
#include "rules/rules.def"
#undef RULE
    default: return old;
    }
}
#undef ELEMENTWISE
#undef RAW_GRADIENT
#undef MATRIX
#undef FACTORED_1
#undef FACTORED_2

#endif
