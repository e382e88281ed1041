/* All rules. Include a vocabulary of vectors first (vec/). */
#ifndef HSTEP_RULES_H
#define HSTEP_RULES_H

#include "base/api.h"
#include "rules/adafactor.h"
#include "rules/adam.h"
#include "rules/adamw.h"
#include "rules/adan.h"
#include "rules/ademamix.h"
#include "rules/adopt.h"
#include "rules/came.h"
#include "rules/compass.h"
#include "rules/delayed.h"
#include "rules/ema.h"
#include "rules/lamb.h"
#include "rules/lamb16.h"
#include "rules/lion.h"
#include "rules/lpfadamw.h"
#include "rules/mars.h"
#include "rules/muon.h"
#include "rules/prodigy.h"
#include "rules/radam.h"
#include "rules/ranger.h"
#include "rules/rmsprop.h"
#include "rules/schedulefree.h"
#include "rules/sgd.h"
#include "rules/stableadamw.h"

/* Numbers that the compiler computes from a row, for each rule. Those of lion:
 *
 *   lion_states                               states that its functions get
 *   lion_optionals                            those of them that may be needless
 *   lion_kept                                 states that they do not get: 1 over rows of a transformed matrix
 *
 *   lion_signed, lion_nonneg, lion_weights    states of the three roles
 *   lion_vectors                              1 for each state over rows, plus 8 for each over columns
 *
 *   lion_hypers, lion_scalars                 its hyper-parameters and scalars */
#define HSTEP_NUMBERS(rule, STATE, OPTIONAL) 0 rule##_ROW(HSTEP_NOTHING, STATE, OPTIONAL, HSTEP_NOTHING, HSTEP_NOTHING)
#define HSTEP_IF_SIGNED(role, ...) +(HSTEP_ROLE_OF_##role == HALFSTEP_ROLE_SIGNED)
#define HSTEP_IF_NONNEG(role, ...) +(HSTEP_ROLE_OF_##role == HALFSTEP_ROLE_NONNEG)
#define HSTEP_IF_WEIGHT(role, ...) +(HSTEP_ROLE_OF_##role == HALFSTEP_ROLE_WEIGHT)
#define HSTEP_IF_VECTOR(role, ...)                         \
    +(HSTEP_EXTENT_OF_##role == HALFSTEP_EXTENT_ROWS) + 8 * \
        (HSTEP_EXTENT_OF_##role == HALFSTEP_EXTENT_COLUMNS)
#define HSTEP_IF_ELEMENTS(unless, role, ...) +(HSTEP_EXTENT_OF_##role == HALFSTEP_EXTENT_ELEMENTS)
#define HSTEP_IF_OPTIONAL_VECTOR(unless, ...) HSTEP_IF_VECTOR(__VA_ARGS__)
#define HSTEP_IF_OPTIONAL_SIGNED(unless, ...) HSTEP_IF_SIGNED(__VA_ARGS__)
#define HSTEP_IF_OPTIONAL_NONNEG(unless, ...) HSTEP_IF_NONNEG(__VA_ARGS__)
#define RULE(id, rule)                                                                                       \
    enum {                                                                                                   \
        rule##_states = HSTEP_NUMBERS(rule, HSTEP_ONE, HSTEP_IF_ELEMENTS),                                   \
        rule##_optionals = HSTEP_NUMBERS(rule, HSTEP_NOTHING, HSTEP_IF_ELEMENTS),                            \
        rule##_kept = HSTEP_NUMBERS(rule, HSTEP_NOTHING, HSTEP_IF_OPTIONAL_VECTOR),                          \
        rule##_signed = HSTEP_NUMBERS(rule, HSTEP_IF_SIGNED, HSTEP_IF_OPTIONAL_SIGNED),                      \
        rule##_nonneg = HSTEP_NUMBERS(rule, HSTEP_IF_NONNEG, HSTEP_IF_OPTIONAL_NONNEG),                      \
        rule##_weights = HSTEP_NUMBERS(rule, HSTEP_IF_WEIGHT, HSTEP_NOTHING),                                \
        rule##_vectors = HSTEP_NUMBERS(rule, HSTEP_IF_VECTOR, HSTEP_NOTHING),                                \
        rule##_hypers = 0 rule##_ROW(HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_ONE, HSTEP_NOTHING), \
        rule##_scalars = 0 rule##_ROW(HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_ONE) \
    };
#include "rules/rules.def"
#undef RULE
#undef HSTEP_IF_SIGNED
#undef HSTEP_IF_NONNEG
#undef HSTEP_IF_WEIGHT
#undef HSTEP_IF_VECTOR
#undef HSTEP_IF_ELEMENTS
#undef HSTEP_IF_OPTIONAL_VECTOR
#undef HSTEP_IF_OPTIONAL_SIGNED
#undef HSTEP_IF_OPTIONAL_NONNEG
#undef HSTEP_NUMBERS

/* Defines NAME_rule() for each rule that is its two parts. A rule without optional states is not told RULE_OPTION. */
#define RULE_OF_PARTS(rule, prefix)                                                             \
    V_OP vf rule##_rule(const vf *k, vf w, vf g, vf *s, const int mode)                         \
    {                                                                                           \
        vf root;                                                                                \
        const int own_mode = rule##_optionals ? mode : mode & RULE_CLAMP;                       \
        vf numerator = prefix##_start(k, g, s, own_mode, &root);                                \
        return prefix##_end(k, w, numerator, root);                                             \
    }
#define RULE(id, rule) HSTEP_IF(HSTEP_IS_OF_PARTS(rule), RULE_OF_PARTS, rule, HSTEP_PARTS_PREFIX(rule))
#include "rules/rules.def"
#undef RULE
#undef RULE_OF_PARTS

/* The states of a rule as a constant: HSTEP_ROLES_OF(lion). A loop that takes it by value leaves nothing of it in
 * machine code. */
struct hstep_roles {
    int role[HALFSTEP_MAX_STATES + 1], optional[HALFSTEP_MAX_STATES + 1];
};
#define HSTEP_ROLES_OF(rule) {{HSTEP_ROLES(rule) 0}, {HSTEP_OPTIONALS(rule) 0}}

#endif
