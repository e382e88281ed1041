/* The base of every rule header. A rule is a row, a list of its constants, and two functions or more:
 *
 *   #define NAME_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)
 *       the row: name, states, hyper-parameters and whatever else the tables know of the rule (row.h).
 *
 *   enum { NAME_..., NAME_constants }
 *       the places in k[], and their number, in lower case like the functions.
 *
 *   HSTEP_INLINE void NAME_prepare(float *k, struct hstep_prepare *p)
 *       runs on the host, once per update. It turns hyper-parameters, in double, into the constants k[] of the kernel,
 *       each rounded to fp32 once. It uses only + - * / sqrt and detmath.h.
 *
 *   V_OP vf NAME_rule(const vf *k, vf w, vf g, vf *s, const int mode)
 *       returns the change d from the weight, the effective gradient and the states, which it replaces in place. The
 *       new weight is w - d. A state of role WEIGHT is replaced by its change likewise. All-zero inputs must give
 *       all-zero states, because padding relies on it.
 *
 *   V_OP vf PREFIX_start(const vf *k, vf g, vf *s, const int mode, vf *root)
 *   V_OP vf PREFIX_end(const vf *k, vf w, vf numerator, vf root)
 *       for rules in PARTS (row.h), which have no state of role WEIGHT. The first replaces the states and returns a
 *       numerator, the second returns d. rules.h makes NAME_rule() of them. Rules may share them.
 *
 *   V_OP void NAME_norms(const vf *k, vf w, vf g, vf *s, vf *x, const int mode)
 *       for rules with NORMS(n). It replaces the states as the rule does, and stores n values in x. Their squares are
 *       summed over the whole tensor. The roots of the sums reach a second prepare() as p->norm. The rule then starts
 *       again from the stored states.
 *
 *       With TOTALS(n) the values themselves are summed, over all tensors of the optimizer that have the rule and agree
 *       in the hyper-parameter .share. The sums reach the second prepare() of each as p->total. Tensors without a
 *       gradient, and those whose lr is 0, add nothing. These tensors share the numbers that such a rule keeps. So
 *       prepare() must make the same of them for each tensor, from p->shared and p->total alone.
 *
 *   V_OP vf NAME_cross(const vf *k, vf w, vf g, vf *s, const int mode, const int pair)
 *   V_OP vf NAME_vector(const vf *k, vf old, vf mean, const int pair)
 *       for FACTORED(pairs, n), and tensors that are matrices. The first returns a value of each element. The second
 *       returns the new number of a row or column from its old one and the mean of those values over it. Pair 0 is made
 *       before the sums of NORMS, from gradients alone (w and s[] may be 0). Pair 1 is made after them. In NAME_rule()
 *       and the others, s[] of those states are the numbers of an element's row and column. Changes to them there are
 *       not stored.
 *
 *   HSTEP_INLINE double NAME_factor(const double *hyper, double mean, int pair)
 *       for FACTORED(pairs, n). It returns what the pair's numbers of rows are multiplied by, in fp32, before they
 *       reach s[]. The mean is over the new vector of rows of one matrix. `hyper` is as p->hyper. A stack has a factor
 *       for each of its matrices. */
#ifndef HSTEP_RULE_H
#define HSTEP_RULE_H

#include "base/detmath.h"
#include "rules/row.h"

/* What one loop passes to the next. ROOT: numerator and root. ROOTLESS: the numerator alone, for rules that wait for no
 * divider. UNLESS_OPTION: both, but nothing if the optional state is stored. */
enum { HSTEP_PARTS_ROOT = 1, HSTEP_PARTS_ROOTLESS, HSTEP_PARTS_UNLESS_OPTION };

#define HSTEP_MAX_SCALARS 16
#define HSTEP_MAX_NORMS 4
#define HSTEP_MAX_NAMED_SCALARS 4
#define HSTEP_MAX_PAIRS 2 /* of vectors over rows and columns */

/* mode, a constant at every call. */
#define RULE_CLAMP 1  /* a state is block-quantized: impose the bound |m| <= C sqrt(v) that the exact rule obeys */
#define RULE_OPTION 2 /* the last state, which hyper-parameters may make needless, is stored */
#define RULE_MODES 4

/* The properties of one tensor of a group. */
struct hstep_own {
    uint64_t id;
    int64_t rows, row_length; /* of one matrix of a rule of matrices */
    double elements;    /* of the whole tensor; 1 where there are none */
    int matrix;         /* stepped as a matrix, by a transformation or by vectors over rows and columns */
    double *scalar;     /* for SCALARS(): before the update on entry, after it on return */
};

/* The values that tensors share under TOTALS: those of the first of their groups. */
struct hstep_shared {
    const double *hyper; /* its own, as hstep_prepare has them */
    uint64_t t;          /* its step, from 1 */
};

struct hstep_prepare {
    const double *hyper; /* the rule's own, for HYPERS() */
    double lr;           /* after the schedule */
    double decay;        /* coefficient of the weight in the change; 0 for l2 */
    uint64_t t;          /* this update of the states, from 1; micro-steps count */
    uint64_t full;       /* this update of the weight, from 1 */
    const double *norm;  /* roots of the sums of squares that NORMS asks for; NULL before they are known */
    const double *total; /* the sums that TOTALS asks for, likewise */
    const struct hstep_shared *shared; /* for TOTALS, else NULL */
    int64_t every;       /* out: for TOTALS only every so many-th element is summed; below 2: all */
    int copies_state;    /* out: 1 makes the weight a copy of the first state of role WEIGHT after the update */
    /* For hstep_own() alone. */
    const struct hstep_own *own;
    int *own_was_asked; /* set to 1 by it */
};

/* Returns the properties of the tensor itself. This is the only way to them, because it notes that constants come from
 * there. No other tensor of the group then takes them over. */
HSTEP_INLINE const struct hstep_own *hstep_own(const struct hstep_prepare *p)
{
    *p->own_was_asked = 1;
    return p->own;
}

#endif
