/* How a rule's header writes its row, and the macros that read it.
 *
 *   #define NAME_ROW(RULE, STATE, OPTIONAL, HYPER, SCALAR)
 *       RULE("name", SHAPE, PARTS, CAUTION, .label = ..., ...)   members of struct hstep_rule (tables/tables.h)
 *       STATE(ROLE, "name", .beta = ...)                         members of struct hstep_state
 *       OPTIONAL("hyper", ROLE, "name", ...)                     a state that is needless while "hyper" is 0. They
 *                                                                come last. With MATRIX, the last may be of ROWS: its
 *                                                                words 1 and 2 are those of decide/rows.h
 *       HYPER(name, "title", .initial = ..., ...)                members of struct hstep_hyper
 *       SCALAR(name, .maximum = ...)                             members of struct hstep_scalar
 *
 * Members that are left out are 0. STATE and OPTIONAL are in the order of s[]. BELOW_1(x) are the members of a decay
 * rate. It is x at first, at least 0, and below 1.
 *
 *   HSTEP_NAME_HYPERS(NAME)       lets functions read the rule's hyper-parameters and scalars by their names, after:
 *   HSTEP_NAME_SCALARS(NAME)          const struct NAME_hyper *h = HYPERS(NAME, p->hyper);
 *                                     struct NAME_scalar *scalar = SCALARS(NAME, hstep_own(p)->scalar);
 *
 * SHAPE    ELEMENTWISE               one pass over independent elements
 *          NORMS(n)                  n sums of squares over the tensor come before its update: NAME_norms()
 *          TOTALS(n)                 n sums over all tensors of the optimizer that agree in the hyper-parameter
 *                                    .share. These tensors share one set of scalars. The first scalar never falls
 *          RAW_GRADIENT              the gradient slot holds a weight, which is taken as it is
 *          MATRIX(transformation)    tensors of two or more dimensions are stepped as matrices. The transformation is
 *                                    a row of transforms.def
 *          FACTORED(pairs, n)        likewise, by pairs of vectors over rows and columns. n sums as with NORMS
 *
 * PARTS    PARTS(PREFIX)             the rule is PREFIX_end() after PREFIX_start() (rule.h). A step may take roots in
 *                                    one loop and quotients in the next
 *          PARTS_ROOTLESS(PREFIX)    likewise. No loop waits for a divider, and PREFIX_end() needs no root
 *          PARTS_UNLESS_OPTION(PREFIX)    the parts are for modes without RULE_OPTION. NAME_rule() is for all modes
 *          WHOLE                     the rule has no parts, only NAME_rule()
 *
 * CAUTION  CAUTIOUS(DECAY)           a group may be cautious, and so may its decay unless .no_cautious_decay says why
 *                                    not: the change is an update plus k[DECAY] times the weight, and one pass finds
 *                                    the sign of the update
 *          NOT_CAUTIOUS("why")       neither a group nor its decay may be cautious; the reason is the end of a sentence
 *          CAUTIOUS_DECAY("why")     only its decay may be cautious; the reason is why a group may not be
 *
 * ROLE     SIGNED                    a state of either sign
 *          NONNEG                    a second moment, never negative. Beside ROWS and COLUMNS, only tensors that are
 *                                    no matrices have it
 *          GRADIENT                  stored as the gradient is
 *          WEIGHT                    stored as the weight is. It starts as a copy of the weight
 *          ROWS, COLUMNS             fp32 vectors over the rows and the columns of a matrix, never negative. With
 *                                    FACTORED, the first of each are pair 0, the second pair 1 */
#ifndef HSTEP_ROW_H
#define HSTEP_ROW_H

#define HSTEP_MEMBER(name, ...) double name;
#define HSTEP_NAME_HYPERS(rule) \
    struct rule##_hyper { rule##_ROW(HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_MEMBER, HSTEP_NOTHING) };
#define HSTEP_NAME_SCALARS(rule) \
    struct rule##_scalar { rule##_ROW(HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_MEMBER) };
#define HYPERS(rule, numbers) ((const struct rule##_hyper *)(numbers))
#define SCALARS(rule, numbers) ((struct rule##_scalar *)(numbers))

#define BELOW_1(initial_) .initial = initial_, .maximum = 1.0, .exclusive = 1

/* Drop a part of a row, or count it. */
#define HSTEP_NOTHING(...)
#define HSTEP_ONE(...) +1

#define HSTEP_ROLE_OF_SIGNED HALFSTEP_ROLE_SIGNED
#define HSTEP_ROLE_OF_NONNEG HALFSTEP_ROLE_NONNEG
#define HSTEP_ROLE_OF_GRADIENT HALFSTEP_ROLE_GRADIENT
#define HSTEP_ROLE_OF_WEIGHT HALFSTEP_ROLE_WEIGHT
#define HSTEP_ROLE_OF_ROWS HALFSTEP_ROLE_NONNEG
#define HSTEP_ROLE_OF_COLUMNS HALFSTEP_ROLE_NONNEG

#define HSTEP_EXTENT_OF_SIGNED HALFSTEP_EXTENT_ELEMENTS
#define HSTEP_EXTENT_OF_NONNEG HALFSTEP_EXTENT_ELEMENTS
#define HSTEP_EXTENT_OF_GRADIENT HALFSTEP_EXTENT_ELEMENTS
#define HSTEP_EXTENT_OF_WEIGHT HALFSTEP_EXTENT_ELEMENTS
#define HSTEP_EXTENT_OF_ROWS HALFSTEP_EXTENT_ROWS
#define HSTEP_EXTENT_OF_COLUMNS HALFSTEP_EXTENT_COLUMNS

/* The words of a row as lists. SHAPE: number of sums, whether they are over all tensors, pairs of vectors, whether a
 * matrix is transformed. PARTS: prefix, whether there are any, their kind, whether they are the rule in every mode. */
#define HSTEP_SHAPE_ELEMENTWISE 0, 0, 0, 0
#define HSTEP_SHAPE_RAW_GRADIENT 0, 0, 0, 0
#define HSTEP_SHAPE_NORMS(n) n, 0, 0, 0
#define HSTEP_SHAPE_TOTALS(n) n, 1, 0, 0
#define HSTEP_SHAPE_MATRIX(transformation) 0, 0, 0, 1
#define HSTEP_SHAPE_FACTORED(pairs, n) n, 0, pairs, 0
#define HSTEP_WORD_WHOLE whole, 0, 0, 0
#define HSTEP_WORD_PARTS(prefix) prefix, 1, HSTEP_PARTS_ROOT, 1
#define HSTEP_WORD_PARTS_ROOTLESS(prefix) prefix, 1, HSTEP_PARTS_ROOTLESS, 1
#define HSTEP_WORD_PARTS_UNLESS_OPTION(prefix) prefix, 1, HSTEP_PARTS_UNLESS_OPTION, 0
#define HSTEP_SHAPE_WORD(name, shape, ...) HSTEP_SHAPE_##shape
#define HSTEP_PARTS_WORD(name, shape, parts, ...) HSTEP_WORD_##parts
#define HSTEP_OF_ROW(rule, WORD) rule##_ROW(WORD, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING, HSTEP_NOTHING)

#define HSTEP_SUMS(rule) HSTEP_PICK(HSTEP_FIRST, HSTEP_OF_ROW(rule, HSTEP_SHAPE_WORD))
#define HSTEP_IS_TOTALS(rule) HSTEP_PICK(HSTEP_SECOND, HSTEP_OF_ROW(rule, HSTEP_SHAPE_WORD))
#define HSTEP_PAIRS(rule) HSTEP_PICK(HSTEP_THIRD, HSTEP_OF_ROW(rule, HSTEP_SHAPE_WORD))
#define HSTEP_IS_MATRIX(rule) HSTEP_PICK(HSTEP_FOURTH, HSTEP_OF_ROW(rule, HSTEP_SHAPE_WORD))
#define HSTEP_PARTS_PREFIX(rule) HSTEP_PICK(HSTEP_FIRST, HSTEP_OF_ROW(rule, HSTEP_PARTS_WORD))
#define HSTEP_HAS_PARTS(rule) HSTEP_PICK(HSTEP_SECOND, HSTEP_OF_ROW(rule, HSTEP_PARTS_WORD))
#define HSTEP_PARTS_KIND(rule) HSTEP_PICK(HSTEP_THIRD, HSTEP_OF_ROW(rule, HSTEP_PARTS_WORD))
#define HSTEP_IS_OF_PARTS(rule) HSTEP_PICK(HSTEP_FOURTH, HSTEP_OF_ROW(rule, HSTEP_PARTS_WORD))
#define HSTEP_PICK(which, ...) which(__VA_ARGS__, )
#define HSTEP_FIRST(a, ...) a
#define HSTEP_SECOND(a, b, ...) b
#define HSTEP_THIRD(a, b, c, ...) c
#define HSTEP_FOURTH(a, b, c, d, ...) d

/* Calls X(...) if `number`, one of those above, is not 0. X may not use HSTEP_IF. */
#define HSTEP_IF(number, X, ...) HSTEP_IF_(number, X, __VA_ARGS__)
#define HSTEP_IF_(number, X, ...) HSTEP_IF_##number(X, __VA_ARGS__)
#define HSTEP_IF_0(X, ...)
#define HSTEP_IF_1(X, ...) X(__VA_ARGS__)
#define HSTEP_IF_2(X, ...) X(__VA_ARGS__)
#define HSTEP_IF_3(X, ...) X(__VA_ARGS__)
#define HSTEP_IF_4(X, ...) X(__VA_ARGS__)

/* The roles of a rule's states, and whether each is optional. Both are lists with a comma after each item. The items of
 * an optional vector are 0, because loops over elements do not see it. */
#define HSTEP_ROLE_ITEM(role, ...) HSTEP_ROLE_OF_##role,
#define HSTEP_OPTIONAL_ROLE_ITEM(unless, role, ...) HSTEP_OPTIONAL_ITEM(unless, role, ) * HSTEP_ROLE_OF_##role,
#define HSTEP_ITEM_0(...) 0,
#define HSTEP_OPTIONAL_ITEM(unless, role, ...) (HSTEP_EXTENT_OF_##role == HALFSTEP_EXTENT_ELEMENTS)
#define HSTEP_ITEM_1(...) HSTEP_OPTIONAL_ITEM(__VA_ARGS__),
#define HSTEP_ROLES(rule) \
    rule##_ROW(HSTEP_NOTHING, HSTEP_ROLE_ITEM, HSTEP_OPTIONAL_ROLE_ITEM, HSTEP_NOTHING, HSTEP_NOTHING)
#define HSTEP_OPTIONALS(rule) rule##_ROW(HSTEP_NOTHING, HSTEP_ITEM_0, HSTEP_ITEM_1, HSTEP_NOTHING, HSTEP_NOTHING)

#endif
