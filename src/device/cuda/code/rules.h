/* Rules on one vector of a lane's places. The rule and its mode are arguments, the same for all lanes. */
#ifndef HSTEP_CUDA_RULES_H
#define HSTEP_CUDA_RULES_H

#include "device/cuda/code/lane.h"

/* A lane's values. The values of the rule's sums take the place of what they are computed from (sum_of()). */
enum { SUMS_BEFORE_STATES = 3 };
struct values {
    union {
        struct {
            vf weight[2], gradient[2], change[2];
        };
        vf sum[SUMS_BEFORE_STATES][2];
    };
    vf state[HALFSTEP_MAX_STATES][2];
};

/* Returns the values of sum number j, counted from the end of what is not a state. Those of a rule with more sums than
 * that stand in the last states, which it does not have. */
CUDA_DEVICE vf *sum_of(struct values *v, int j)
{
    return j < SUMS_BEFORE_STATES ? v->sum[j] : v->state[HALFSTEP_MAX_STATES - 1 - (j - SUMS_BEFORE_STATES)];
}

struct constants {
    vf k[HSTEP_MAX_SCALARS];
};

V_OP struct constants constants_of(const float *k)
{
    struct constants c;
    CUDA_UNROLL for (int i = 0; i < HSTEP_MAX_SCALARS; i++) c.k[i] = v_set(k[i]);
    return c;
}

CUDA_DEVICE vf step_rule(int rule, int mode, const vf *k, vf w, vf g, vf *s)
{
    switch (rule) {
#define RULE(id, name) \
    case HSTEP_RULE_##name: return name##_rule(k, w, g, s, mode);
#include "rules/rules.def"
#undef RULE
    default: return v_set(0.0f);
    }
}

/* Computes the values of the rule's sums. */
CUDA_DEVICE void step_norms(int rule, int mode, const vf *k, vf w, vf g, vf *s, vf *x)
{
    switch (rule) {
#define NORMS_CASE(name) \
    case HSTEP_RULE_##name: name##_norms(k, w, g, s, x, mode); break;
#define RULE(id, name) HSTEP_IF(HSTEP_SUMS(name), NORMS_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: break;
    }
}

CUDA_DEVICE vf step_direction(int rule, int mode, const vf *k, vf g, vf *s)
{
    switch (rule) {
#define DIRECTION_CASE(name) \
    case HSTEP_RULE_##name: return name##_direction(k, g, s, mode);
#define RULE(id, name) HSTEP_IF(HSTEP_IS_MATRIX(name), DIRECTION_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: return v_set(0.0f);
    }
}

CUDA_DEVICE vf step_change(int rule, const vf *k, vf w, vf u)
{
    switch (rule) {
#define CHANGE_CASE(name) \
    case HSTEP_RULE_##name: return name##_change(k, w, u);
#define RULE(id, name) HSTEP_IF(HSTEP_IS_MATRIX(name), CHANGE_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: return v_set(0.0f);
    }
}

CUDA_DEVICE vf step_cross(int rule, int pair, int mode, const vf *k, vf w, vf g, vf *s)
{
    (void)pair, (void)mode, (void)k, (void)w, (void)g, (void)s; /* unused if no rule has pairs */
    switch (rule) {
#define CROSS_CASE(name) \
    case HSTEP_RULE_##name: return name##_cross(k, w, g, s, mode, pair);
#define RULE(id, name) HSTEP_IF(HSTEP_PAIRS(name), CROSS_CASE, name)
#include "rules/rules.def"
#undef RULE
    default: return v_set(0.0f);
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
