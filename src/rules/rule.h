/* What every rule header builds on. A rule is two functions:
 *
 *   static inline void NAME_prepare(float *k, const struct hstep_prepare *p)
 *       on the host, once per distinct (group, step count): hyper-parameters in double to the constants k[] of the
 *       kernel, each rounded to fp32 once, with + - * / sqrt and detmath.h only;
 *   V_OP vf NAME_rule(const vf *k, vf w, vf g, vf *s, const int clamp)
 *       the arithmetic: from the weight, the effective gradient and the states (replaced in place) to the change d; the
 *       new weight is w - d. All-zero inputs must give all-zero states: padding relies on it.
 *       clamp: a state is block-quantized, and the bound |m| <= C sqrt(v) that exact Adam obeys has to be imposed. */
#ifndef HSTEP_RULE_H
#define HSTEP_RULE_H

#include "detmath.h"

#define HSTEP_MAX_SCALARS 16

struct hstep_prepare {
    const double *hyper; /* the rule's own, in the order of its row */
    double lr;           /* after the schedule */
    double decay;        /* coefficient of the weight in the change: decoupled modes; 0 for l2 */
    uint64_t t;          /* this update's number, from 1 */
};

#endif
