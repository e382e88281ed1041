/* Whole steps by the loops of fused.h, for the recipes of fused.def under every rule: which loops there are, what finds
 * them, and the order in which they go over a tile. For kernels.c. */
#ifndef HSTEP_FUSED_STEPS_H
#define HSTEP_FUSED_STEPS_H

#include "kernels/fused.h"

#if VL > 1
/* ---- Every rule with every recipe ---- */

/* Columns of STATES(...) become one byte for each state: its role, and FUSED_CONDITIONAL where hyper-parameters may
 * make it needless. A rule with vectors, or with more than HSTEP_FUSED_STATES states, takes tiles. */
enum { FUSED_TILES_ONLY = 0x40 };
#define FUSED_ROLE_0 0
#define FUSED_ROLE_SIGNED HALFSTEP_ROLE_SIGNED
#define FUSED_ROLE_NONNEG HALFSTEP_ROLE_NONNEG
#define FUSED_ROLE_GRADIENT HALFSTEP_ROLE_GRADIENT
#define FUSED_ROLE_WEIGHT HALFSTEP_ROLE_WEIGHT
#undef STATE
#undef PRECISE_STATE
#undef ROW_STATE
#undef COLUMN_STATE
#undef STATES
#define ROW_STATE(...) FUSED_TILES_ONLY
#define COLUMN_STATE(...) FUSED_TILES_ONLY
#define STATE(name, role, beta, unless) (FUSED_ROLE_##role | _Generic((unless), char *: FUSED_CONDITIONAL, default: 0))
#define PRECISE_STATE(name, role, beta, unless, option, format) STATE(name, role, beta, unless)
#define STATES(...) FUSED_BYTES(__VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define FUSED_BYTES(s0, s1, s2, s3, s4, s5, ...) \
    ((s0) | (s1) << 8 | (s2) << 16 | (s3) << 24 | ((s4) || (s5) ? FUSED_TILES_ONLY : 0))
#define FUSED_CONDITIONALS(states) \
    (((states) >> 4 & 1) + ((states) >> 12 & 1) + ((states) >> 20 & 1) + ((states) >> 28 & 1))
#define FUSED_ANY(states, role) \
    ((((states) | (states) >> 8 | (states) >> 16 | (states) >> 24) & HALFSTEP_ROLE_##role) != 0)

/* Of PREFIX_PARTS, which a rule may lack: the prefix of its parts, whether there are any, and of what kind. */
#define FUSED_SECOND(a, b, ...) b
#define FUSED_THIRD(a, b, c, ...) c
#define FUSED_FOURTH(a, b, c, d, ...) d
#define FUSED_PICK(which, ...) which(__VA_ARGS__)
#define FUSED_PREFIX(fn) FUSED_PICK(FUSED_SECOND, fn##_PARTS, whole, 0, 0, )
#define FUSED_PARTS(fn) FUSED_PICK(FUSED_THIRD, fn##_PARTS, whole, 0, 0, )
#define FUSED_KIND(fn) FUSED_PICK(FUSED_FOURTH, fn##_PARTS, whole, 0, 0, )
#define FUSED_STRING(x) FUSED_STRING_(x)
#define FUSED_STRING_(x) #x
#define FUSED_IF_0(X, ...)
#define FUSED_IF_1(X, ...) X(__VA_ARGS__)
#define FUSED_IF_(has, X, ...) FUSED_IF_##has(X, __VA_ARGS__)
#define FUSED_IF(has, X, ...) FUSED_IF_(has, X, __VA_ARGS__)

/* Whether a rule's loops are its own: those of the rule whose parts it takes serve it too. */
#define FUSED_OWN(fn) (!FUSED_PARTS(fn) || !__builtin_strcmp(#fn, FUSED_STRING(FUSED_PREFIX(fn))))
/* Not where another row is the same. */
#define FUSED_WORTH(states, first, second) \
    (HSTEP_FORMAT_##first == HSTEP_FORMAT_##second || (FUSED_ANY(states, SIGNED) && FUSED_ANY(states, NONNEG)))
#define FUSED_IS(fn, states, variant, first, second)                                             \
    (FUSED_OWN(fn) && !((states) & 0x40404040) && (variant) < 1 << FUSED_CONDITIONALS(states) && \
     FUSED_WORTH(states, first, second))
#define FUSED_WHAT(gradient, first, second, parts, states, variant) \
    (struct fused_what){fused_parts(parts, variant),                \
                        states,                                     \
                        variant,                                    \
                        HSTEP_FORMAT_##gradient,                    \
                        HSTEP_FORMAT_##first,                       \
                        HSTEP_FORMAT_##second,                      \
                        (FUSED_BLOCK_##first != 0) | (FUSED_BLOCK_##second != 0) << 1}

#define FUSED_START(prefix) FUSED_START_(prefix)
#define FUSED_START_(prefix) prefix##_start
#define FUSED_FUNCTION(gradient, first, second, id, fn, states, variant)                                              \
    __attribute__((unused)) static void fused_##id##_##gradient##_##first##_##second##_##variant(                     \
        const struct hstep_fused *a, struct fused_room *room, int64_t t, int64_t n)                                   \
    {                                                                                                                 \
        if (FUSED_IS(fn, states, variant, first, second))                                                             \
            fused_rule(a, room, FUSED_WHAT(gradient, first, second, FUSED_KIND(fn), states, variant), fn##_rule,      \
                       FUSED_START(FUSED_PREFIX(fn)), fused_load_##gradient, fused_start_##first, fused_load_##first, \
                       fused_store_##first, fused_start_##second, fused_load_##second, fused_store_##second, t, n);   \
    }
#define RULE(id, name, fn, label, title, lr, wd, decay, states, ...) \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 0)           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 1)           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 2)           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, id, fn, states, 3)
#include "rules/rules.def"
#undef RULE

#define FUSED_ENTRY(gradient, first, second, id, fn, states, variant) \
    (FUSED_IS(fn, states, variant, first, second) ? fused_##id##_##gradient##_##first##_##second##_##variant : NULL)
#define FUSED_ROW(gradient, first, second, id, fn, states)                                                             \
    {FUSED_ENTRY(gradient, first, second, id, fn, states, 0), FUSED_ENTRY(gradient, first, second, id, fn, states, 1), \
     FUSED_ENTRY(gradient, first, second, id, fn, states, 2),                                                          \
     FUSED_ENTRY(gradient, first, second, id, fn, states, 3)},
static fused_tile *const fused_tiles[HSTEP_RULES][HSTEP_FUSED_ROWS][HSTEP_FUSED_VARIANTS] = {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, ...) \
    [HSTEP_RULE_ROW_##id] = {HSTEP_FUSED_RECIPES(FUSED_ROW, id, fn, states)},
#include "rules/rules.def"
#undef RULE
};

/* Sums of rules of two passes, which are not shared. */
#define FUSED_COUNT_NO_NORMS 0
#define FUSED_COUNT_NORMS_1 1
#define FUSED_COUNT_NORMS_2 1
#define FUSED_NORMS_OF_NO_NORMS 0
#define FUSED_NORMS_OF_NORMS_1 1
#define FUSED_NORMS_OF_NORMS_2 2
/* Sums over all tensors are not of squares, and take tiles. */
#define FUSED_COUNT_TOTALS_3(share) 0
#define FUSED_NORMS_OF_TOTALS_3(share) 0
#define FUSED_NORMS(gradient, first, second, id, fn, states, count)                                           \
    __attribute__((unused)) static void fused_norms_##id##_##gradient##_##first##_##second(                   \
        const struct hstep_fused *a, struct fused_room *room, int64_t t, int64_t n, double *sums)             \
    {                                                                                                         \
        if (!((states) & 0x40404040) && FUSED_WORTH(states, first, second))                                   \
            fused_norms(a, room, FUSED_WHAT(gradient, first, second, 0, states, 0), fn##_norms, count,        \
                        fused_load_##gradient, fused_start_##first, fused_load_##first, fused_start_##second, \
                        fused_load_##second, t, n, sums);                                                     \
    }
#define FUSED_NORMS_ROWS(id, fn, states, count) HSTEP_FUSED_RECIPES(FUSED_NORMS, id, fn, states, count)
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, ...) \
    FUSED_IF(FUSED_COUNT_##norms, FUSED_NORMS_ROWS, id, fn, states, FUSED_NORMS_OF_##norms)
#include "rules/rules.def"
#undef RULE
#define FUSED_NORMS_ENTRY(gradient, first, second, id, states) \
    FUSED_WORTH(states, first, second) ? fused_norms_##id##_##gradient##_##first##_##second : NULL,
#define FUSED_NORMS_TABLE(id, states) [HSTEP_RULE_ROW_##id] = {HSTEP_FUSED_RECIPES(FUSED_NORMS_ENTRY, id, states)},
static fused_summer *const fused_summers[HSTEP_RULES][HSTEP_FUSED_ROWS] = {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, ...) \
    FUSED_IF(FUSED_COUNT_##norms, FUSED_NORMS_TABLE, id, states)
#include "rules/rules.def"
#undef RULE
};

/* The weight under rules in parts: by format, in the order of memory, and the change alone. */
struct fused_ends {
    fused_end_function *format[HSTEP_FORMATS], *plain, *change;
};

#define FUSED_END(format, id, fn, prefix)                                                                        \
    __attribute__((unused)) static void fused_end_##id##_##format(const struct hstep_fused *a,                   \
                                                                  struct fused_room *room, int64_t t, int64_t n) \
    {                                                                                                            \
        if (FUSED_OWN(fn))                                                                                       \
            fused_end(columns_of(HSTEP_FORMAT_##format).bits, columns_of(HSTEP_FORMAT_##format).extra_bits, 0,   \
                      format##_decode, format##_apply, prefix##_end, a, room, t, n);                             \
    }
#define FUSED_ENDS(id, fn, prefix)                                                                                   \
    HSTEP_FUSED_WEIGHTS(FUSED_END, id, fn, prefix)                                                                   \
    __attribute__((unused)) static void fused_end_##id##_plain(const struct hstep_fused *a, struct fused_room *room, \
                                                               int64_t t, int64_t n)                                 \
    {                                                                                                                \
        if (FUSED_OWN(fn)) fused_end(32, 0, 1, f32_decode, f32_apply, prefix##_end, a, room, t, n);                  \
    }                                                                                                                \
    __attribute__((unused)) static void fused_change_##id(const struct hstep_fused *a, struct fused_room *room,      \
                                                          int64_t t, int64_t n)                                      \
    {                                                                                                                \
        (void)t;                                                                                                     \
        if (FUSED_OWN(fn)) fused_change(prefix##_end, a, room, n);                                                   \
    }
#define RULE(id, name, fn, ...) FUSED_IF(FUSED_PARTS(fn), FUSED_ENDS, id, fn, FUSED_PREFIX(fn))
#include "rules/rules.def"
#undef RULE
#define FUSED_END_ROW(format, id, fn) [HSTEP_FORMAT_##format] = FUSED_OWN(fn) ? fused_end_##id##_##format : NULL,
#define FUSED_ENDS_ROW(id, fn)                                                       \
    [HSTEP_RULE_ROW_##id] = {.format = {HSTEP_FUSED_WEIGHTS(FUSED_END_ROW, id, fn)}, \
                             .plain = FUSED_OWN(fn) ? fused_end_##id##_plain : NULL, \
                             .change = FUSED_OWN(fn) ? fused_change_##id : NULL},
static const struct fused_ends fused_ends[HSTEP_RULES] = {
#define RULE(id, name, fn, ...) FUSED_IF(FUSED_PARTS(fn), FUSED_ENDS_ROW, id, fn)
#include "rules/rules.def"
#undef RULE
};

#define FUSED_BOTH(gradient, first, second, ...)                                                    \
    __attribute__((unused)) static void fused_both_##gradient##_##first##_##second(                 \
        const struct hstep_fused *a, struct fused_room *room, int j0, int j1, int64_t t, int64_t n) \
    {                                                                                               \
        if ((FUSED_BLOCK_##first != 0) & (FUSED_BLOCK_##second != 0))                               \
            fused_both(HSTEP_FORMAT_##first, HSTEP_FORMAT_##second, a, room, j0, j1, t, n);         \
    }
HSTEP_FUSED_RECIPES(FUSED_BOTH, )
#define FUSED_BOTH_ROW(gradient, first, second, ...) \
    ((FUSED_BLOCK_##first != 0) & (FUSED_BLOCK_##second != 0)) ? fused_both_##gradient##_##first##_##second : NULL,
static fused_both_function *const fused_boths[HSTEP_FUSED_ROWS] = {HSTEP_FUSED_RECIPES(FUSED_BOTH_ROW, )};

/* ---- Steps ---- */

static const struct {
    const char *prefix, *parts;
    int kind, states;
} fused_rules[HSTEP_RULES] = {
#define RULE(id, name, fn, label, title, lr, wd, decay, states, ...) \
    [HSTEP_RULE_ROW_##id] = {#fn, FUSED_STRING(FUSED_PREFIX(fn)), FUSED_KIND(fn), states},
#include "rules/rules.def"
#undef RULE
};

/* A step's number: its rule, the rule whose loops serve it, row and variant. */
static int fused_find(int rule, int row, int variant)
{
    for (int own = 0; own < HSTEP_RULES; own++) {
        int same = own == rule || !strcmp(fused_rules[own].prefix, fused_rules[rule].parts);
        for (int j = 0; j < HSTEP_FUSED_STATES; j++)
            same &= fused_role(j, fused_rules[own].states, variant) == fused_role(j, fused_rules[rule].states, variant);
        if (same && fused_tiles[own][row][variant])
            return ((rule * HSTEP_RULES + own) * HSTEP_FUSED_ROWS + row) * HSTEP_FUSED_VARIANTS + variant;
    }
    return -1;
}

static const int fused_any[HSTEP_FUSED_ROWS] = {
#define FUSED_ANY_ROW(gradient, ...) HSTEP_FORMAT_##gradient == HSTEP_FORMAT_any,
    HSTEP_FUSED_RECIPES(FUSED_ANY_ROW, )
#undef FUSED_ANY_ROW
};

static int fused_is_plain(const struct hstep_fused *a)
{
    int plain = 1;
    for (int s = 0; s < HSTEP_SLOTS; s++)
        plain &= a->format[s] == HSTEP_FORMAT_NONE || a->format[s] == HSTEP_FORMAT_f32;
    return plain;
}

/* What a gradient may need before the rule sees it. */
static int fused_is_adjusted(const struct hstep_fused *a, int row, int plain)
{
    return fused_any[row] || (plain && (a->l2 != 0.0f || a->mean != 0.0f));
}

/* The gradient to the room. Loops over f32 in the order of memory know of no room: they are to look at `seen`, where
 * the gradient is said to be in its place. */
static const struct hstep_fused *fused_adjust(const struct hstep_fused *a, struct hstep_fused *seen,
                                              struct fused_room *room, int plain, int64_t t, int64_t n)
{
    if (!plain) {
        fused_gradients[a->format[HALFSTEP_SLOT_GRADIENT]](a, room, t, n);
        return a;
    }
    fused_gradient_plain(a, room, t, n);
    *seen = *a;
    seen->gradient_scale = 1.0f;
    seen->code[HALFSTEP_SLOT_GRADIENT] = (char *)((uintptr_t)room->gradient - (uintptr_t)(4 * t));
    return seen;
}

static void fused_step(const struct hstep_fused *a, int step)
{
    const int variant = step % HSTEP_FUSED_VARIANTS, row = step / HSTEP_FUSED_VARIANTS % HSTEP_FUSED_ROWS;
    const int rule = step / HSTEP_FUSED_VARIANTS / HSTEP_FUSED_ROWS % HSTEP_RULES;
    const int weight = a->format[HALFSTEP_SLOT_WEIGHT];
    struct fused_room room;
    struct hstep_fused seen;
    /* A cautious change has to be in the room, beside its gradient. */
    const int plain = a->cautious == 0.0f && fused_is_plain(a);
    fused_tile *const tile = fused_tiles[rule][row][variant];
    static const struct fused_ends none;
    const int parts = fused_parts(fused_rules[rule].kind, variant);
    const struct fused_ends *ends = parts ? &fused_ends[rule] : &none;
    /* The signed state and the second moment whose codes share a loop. */
    int j0 = HSTEP_FUSED_STATES, j1 = HSTEP_FUSED_STATES;
    for (int j = 0; fused_boths[row] && j < HSTEP_FUSED_STATES; j++) {
        const int s = HALFSTEP_SLOT_STATE + j;
        if (a->format[s] < 0 || !fused_coders[a->format[s]][0]) continue;
        if (a->nonneg >> s & 1) j1 = j1 < j ? j1 : j;
        else j0 = j0 < j ? j0 : j;
    }
    if (j0 == HSTEP_FUSED_STATES || j1 == HSTEP_FUSED_STATES) j0 = j1 = -1;
    fused_end_function *const end = a->cautious != 0.0f         ? NULL
                                    : !plain                    ? ends->format[weight]
                                    : parts == HSTEP_PARTS_ROOT ? ends->plain
                                                                : NULL;
    const int adjusted = fused_is_adjusted(a, row, plain), weighted = !plain && (!end || a->l2 != 0.0f);
    for (int64_t t = 0; t < a->n; t += FUSED_TILE) {
        int64_t n = a->n - t < FUSED_TILE ? a->n - t : FUSED_TILE;
        for (int j = 0; j < HSTEP_FUSED_STATES; j++) {
            int s = HALFSTEP_SLOT_STATE + j;
            if (!(a->as_weight >> s & 1)) continue;
            if (a->weight_to_slot >> s & 1) fused_copy(a, s, HALFSTEP_SLOT_WEIGHT, t, n);
            if (!plain) fused_decode(a, s, room.state[j].old, t, n);
        }
        if (weighted) fused_decode(a, HALFSTEP_SLOT_WEIGHT, room.weight, t, n);
        tile(adjusted ? fused_adjust(a, &seen, &room, plain, t, n) : a, &room, t, n);
        if (end) {
            end(a, &room, t, n);
        } else if (!plain) {
            if (ends->change) ends->change(a, &room, t, n);
            if (a->cautious != 0.0f) cautious_tile(room.change, room.gradient, room.weight, a->cautious, a->decay, n);
            fused_appliers[weight](a, HALFSTEP_SLOT_WEIGHT, room.weight, room.change, t, n);
        }
        for (int j = 0; j < HSTEP_FUSED_STATES; j++) {
            int s = HALFSTEP_SLOT_STATE + j;
            struct fused_state *state = &room.state[j];
            if (a->as_weight >> s & 1) {
                if (!plain) fused_appliers[weight](a, s, state->old, state->stash, t, n);
                if (a->slot_to_weight >> s & 1) fused_copy(a, HALFSTEP_SLOT_WEIGHT, s, t, n);
            } else if (j == j0) {
                fused_boths[row](a, &room, j0, j1, t, n);
            } else if (j != j1 && a->format[s] >= 0 && fused_coders[a->format[s]][0]) {
                fused_coders[a->format[s]][a->nonneg >> s & 1](a, state, s, t, n);
            }
        }
    }
}

static void fused_sum_up(const struct hstep_fused *a, int step, double *sums)
{
    const int row = step / HSTEP_FUSED_VARIANTS % HSTEP_FUSED_ROWS;
    fused_summer *const summer = fused_summers[step / HSTEP_FUSED_VARIANTS / HSTEP_FUSED_ROWS / HSTEP_RULES][row];
    const int plain = fused_is_plain(a);
    const int adjusted = fused_is_adjusted(a, row, plain);
    struct hstep_fused seen;
    struct fused_room room;
    for (int64_t t = 0; t < a->n; t += HSTEP_TILE, sums += HSTEP_MAX_NORMS) {
        int64_t n = a->n - t < HSTEP_TILE ? a->n - t : HSTEP_TILE;
        if (!plain) fused_decode(a, HALFSTEP_SLOT_WEIGHT, room.weight, t, n);
        summer(adjusted ? fused_adjust(a, &seen, &room, plain, t, n) : a, &room, t, n, sums);
    }
}

static int64_t fused_count(const struct fused_room *room, int64_t n)
{
    HSTEP_ALIGNED uint32_t lanes[VL];
    int64_t count = 0;
    vi sum = vi_set(0);
    for (int64_t r = 0; r < n; r += VL)
        sum =
            vi_add(sum, vi_select(agrees(v_load(room->change + r), v_load(room->gradient + r)), vi_set(1), vi_set(0)));
    vi_store(lanes, sum);
    for (int i = 0; i < VL; i++) count += lanes[i];
    return count;
}

/* How many elements agree: the loops of the step before the weight, on copies of what they would write. */
static int64_t fused_agree(const struct hstep_fused *a, int step)
{
    const int variant = step % HSTEP_FUSED_VARIANTS, row = step / HSTEP_FUSED_VARIANTS % HSTEP_FUSED_ROWS;
    const int rule = step / HSTEP_FUSED_VARIANTS / HSTEP_FUSED_ROWS % HSTEP_RULES;
    fused_tile *const tile = fused_tiles[rule][row][variant];
    fused_end_function *const change = fused_parts(fused_rules[rule].kind, variant) ? fused_ends[rule].change : NULL;
    struct hstep_fused seen = *a;
    struct fused_room room;
    HSTEP_ALIGNED char copy[HSTEP_FUSED_STATES][FUSED_TILE * 4];
    int64_t count = 0;
    for (int64_t t = 0; t < a->n; t += FUSED_TILE) {
        const int64_t n = a->n - t < FUSED_TILE ? a->n - t : FUSED_TILE;
        for (int j = 0; j < HSTEP_FUSED_STATES; j++) {
            const int s = HALFSTEP_SLOT_STATE + j;
            if (a->format[s] < 0) continue;
            const int bits = columns_of(a->format[s]).bits;
            memcpy(copy[j], a->code[s] + t * bits / 8, (size_t)(n * bits / 8));
            seen.code[s] = (char *)((uintptr_t)copy[j] - (uintptr_t)(t * bits / 8));
        }
        fused_decode(a, HALFSTEP_SLOT_WEIGHT, room.weight, t, n);
        fused_gradients[a->format[HALFSTEP_SLOT_GRADIENT]](a, &room, t, n);
        tile(&seen, &room, t, n);
        if (change) change(&seen, &room, t, n);
        count += fused_count(&room, n);
    }
    return count;
}

#define FUSED_FIND fused_find
#define FUSED_STEP fused_step
#define FUSED_SUM fused_sum_up
#define FUSED_AGREEMENT fused_agree
#else
#define FUSED_FIND NULL
#define FUSED_STEP NULL
#define FUSED_SUM NULL
#define FUSED_AGREEMENT NULL
#endif
#endif
