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
#define RULE(id, name) \
    case HSTEP_RULE_##name: EACH_VECTOR(v->change[i] = name##_rule(k, v->weight[i], v->gradient[i], s, mode));
#include "rules/rules.def"
#undef RULE
    }
}

/* The values of the rule's sums. */
CUDA_DEVICE void step_norms(int rule, int mode, const vf *k, struct values *v, vf (*x)[2])
{
    switch (rule) {
#define NORMS_CASE(name, count)                                                                       \
    case HSTEP_RULE_##name:                                                                           \
        EACH_VECTOR(vf y[HSTEP_MAX_NORMS]; name##_norms(k, v->weight[i], v->gradient[i], s, y, mode); \
                    for (int j = 0; j < count; j++) x[j][i] = y[j]);
#define RULE(id, name) HSTEP_IF(HSTEP_SUMS(name), NORMS_CASE, name, HSTEP_SUMS(name))
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

CUDA_DEVICE void step_direction(int rule, int mode, const vf *k, struct values *v)
{
    switch (rule) {
#define DIRECTION_CASE(name) \
    case HSTEP_RULE_##name: EACH_VECTOR(v->change[i] = name##_direction(k, v->gradient[i], s, mode));
#define RULE(id, name) HSTEP_IF(HSTEP_IS_MATRIX(name), DIRECTION_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

/* The transformed direction is in the place of the gradient. */
CUDA_DEVICE void step_change(int rule, const vf *k, struct values *v)
{
    switch (rule) {
#define CHANGE_CASE(name) \
    case HSTEP_RULE_##name: EACH_VECTOR(v->change[i] = name##_change(k, v->weight[i], v->gradient[i]));
#define RULE(id, name) HSTEP_IF(HSTEP_IS_MATRIX(name), CHANGE_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

CUDA_DEVICE void step_cross(int rule, int pair, int mode, const vf *k, struct values *v, vf *x)
{
    (void)pair, (void)mode, (void)k, (void)v, (void)x; /* there may be no such rule */
    switch (rule) {
#define CROSS_CASE(name) \
    case HSTEP_RULE_##name: EACH_VECTOR(x[i] = name##_cross(k, v->weight[i], v->gradient[i], s, mode, pair));
#define RULE(id, name) HSTEP_IF(HSTEP_PAIRS(name), CROSS_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

CUDA_DEVICE vf step_vector(int rule, int pair, const vf *k, vf old, vf mean)
{
    (void)pair, (void)k, (void)mean;
    switch (rule) {
#define VECTOR_CASE(name) \
    case HSTEP_RULE_##name: return name##_vector(k, old, mean, pair);
#define RULE(id, name) HSTEP_IF(HSTEP_PAIRS(name), VECTOR_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: return old;
    }
}

#endif
