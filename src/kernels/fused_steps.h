/* Fused steps. Defines the loops of fused.h for every rule with every recipe of fused.def. Finds those of a step, and
 * runs them on a tile in order. For kernels.c. */
#ifndef HSTEP_FUSED_STEPS_H
#define HSTEP_FUSED_STEPS_H

#include "kernels/fused.h"

#if VL > 1
/* ---- Every rule with every recipe ----
 *
 * The macros below make 1,764 functions for rules and recipes. Those that a rule does not need have no body. This is
 * the one for AdamW, bf16 gradients and int8 states, with the constants that the preprocessor leaves computed:
 *
 *   static void fused_adamw_bf16_int8_int8_0(const struct hstep_fused *a, struct fused_scratch *scratch, int64_t t,
 *                                            int64_t n)
 *   {
 *       if (1)
 *           fused_rule(a, scratch,
 *                      (struct fused_what){HSTEP_PARTS_ROOT, 0, HSTEP_FORMAT_bf16, HSTEP_FORMAT_int8,
 *                                          HSTEP_FORMAT_int8, 3, {{SIGNED, NONNEG, NONNEG, 0}, {0, 0, 1, 0}}},
 *                      adamw_rule, adamw_start, fused_load_bf16, fused_start_int8, fused_load_int8, fused_store_int8,
 *                      fused_start_int8, fused_load_int8, fused_store_int8, t, n);
 *   }
 *
 * The roles are those of both moments and of the optional one. fused_rule() (fused.h) is inlined there, and with it all
 * functions that it is given. It is the first of the three loops of a step. The second is fused_end_adamw_bf16_sr() for
 * bf16-sr weights. The third is fused_both_bf16_int8_int8(), which writes the codes of both states. This command shows
 * another:
 *
 *   cc -E -P -mavx2 -Iinclude -Isrc -DHSTEP_ISA=avx2 '-DHSTEP_VEC_HEADER="vec/avx2.h"' src/kernels/kernels.c |
 *       sed 's/__attribute__/\n/g' | grep 'fused_lion_bf16_int8_int8_0(' */

/* 1 if fused loops can serve the rule at all. Others take the tile path. */
#define FUSED_FITS(name) ((int)name##_states <= HSTEP_FUSED_STATES && (int)name##_vectors == 0)
#define FUSED_STRING(x) FUSED_STRING_(x)
#define FUSED_STRING_(x) #x
/* 1 if the rule's loops are its own. Otherwise they are those of the rule whose parts it takes. */
#define FUSED_OWN(name) (!HSTEP_HAS_PARTS(name) || !__builtin_strcmp(#name, FUSED_STRING(HSTEP_PARTS_PREFIX(name))))
/* 0 if another row gives the rule the same loops. */
#define FUSED_WORTH(name, first, second) \
    (HSTEP_FORMAT_##first == HSTEP_FORMAT_##second || ((int)name##_signed > 0 && (int)name##_nonneg > 0))
#define FUSED_IS(name, variant, first, second) \
    (FUSED_OWN(name) && FUSED_FITS(name) && (variant) < 1 << name##_optionals && FUSED_WORTH(name, first, second))
#define FUSED_WHAT(gradient, first, second, parts, name, variant)                                                   \
    (struct fused_what)                                                                                             \
    {                                                                                                               \
        fused_parts(parts, variant), variant, HSTEP_FORMAT_##gradient, HSTEP_FORMAT_##first, HSTEP_FORMAT_##second, \
            (first##_block != 0) | (second##_block != 0) << 1, HSTEP_ROLES_OF(name)                                 \
    }

#define FUSED_START(prefix) FUSED_START_(prefix)
#define FUSED_START_(prefix) prefix##_start
/* Defines fused_lion_bf16_int8_int8_0 for rule lion, bf16 gradients, int8 states and variant 0, and so on for each row
 * of fused.def. */
#define FUSED_FUNCTION(gradient, first, second, name, variant)                                                         \
    __attribute__((unused)) static void fused_##name##_##gradient##_##first##_##second##_##variant(                    \
        const struct hstep_fused *a, struct fused_scratch *scratch, int64_t t, int64_t n)                              \
    {                                                                                                                  \
        if (FUSED_IS(name, variant, first, second))                                                                    \
            fused_rule(a, scratch, FUSED_WHAT(gradient, first, second, HSTEP_PARTS_KIND(name), name, variant),         \
                       name##_rule, FUSED_START(HSTEP_PARTS_PREFIX(name)), fused_load_##gradient, fused_start_##first, \
                       fused_load_##first, fused_store_##first, fused_start_##second, fused_load_##second,             \
                       fused_store_##second, t, n);                                                                    \
    }
#define RULE(id, name)                           \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, name, 0) \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, name, 1) \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, name, 2) \
    HSTEP_FUSED_RECIPES(FUSED_FUNCTION, name, 3)
#include "rules/rules.def"
#undef RULE

#define FUSED_ENTRY(gradient, first, second, name, variant) \
    (FUSED_IS(name, variant, first, second) ? fused_##name##_##gradient##_##first##_##second##_##variant : NULL)
#define FUSED_ROW(gradient, first, second, name)                                                   \
    {FUSED_ENTRY(gradient, first, second, name, 0), FUSED_ENTRY(gradient, first, second, name, 1), \
     FUSED_ENTRY(gradient, first, second, name, 2), FUSED_ENTRY(gradient, first, second, name, 3)},
static fused_tile *const fused_tiles[HSTEP_RULES][HSTEP_FUSED_ROWS][HSTEP_FUSED_VARIANTS] = {
#define RULE(id, name) [HSTEP_RULE_##name] = {HSTEP_FUSED_RECIPES(FUSED_ROW, name)},
#include "rules/rules.def"
#undef RULE
};

/* Defines fused_norms_lamb_bf16_int8_int8 for rule lamb, and so on for each rule with sums of squares. Rules do not
 * share these. Sums over all tensors (TOTALS) are not of squares and take the tile path. */
#define FUSED_NORMS(gradient, first, second, name, count)                                                     \
    __attribute__((unused)) static void fused_norms_##name##_##gradient##_##first##_##second(                 \
        const struct hstep_fused *a, struct fused_scratch *scratch, int64_t t, int64_t n, double *sums)       \
    {                                                                                                         \
        if (!HSTEP_IS_TOTALS(name) && FUSED_FITS(name) && FUSED_WORTH(name, first, second))                   \
            fused_norms(a, scratch, FUSED_WHAT(gradient, first, second, 0, name, 0), name##_norms, count,     \
                        fused_load_##gradient, fused_start_##first, fused_load_##first, fused_start_##second, \
                        fused_load_##second, t, n, sums);                                                     \
    }
#define FUSED_NORMS_ROWS(name, count) HSTEP_FUSED_RECIPES(FUSED_NORMS, name, count)
#define RULE(id, name) HSTEP_IF(HSTEP_SUMS(name), FUSED_NORMS_ROWS, name, HSTEP_SUMS(name))
#include "rules/rules.def"
#undef RULE
#define FUSED_NORMS_ENTRY(gradient, first, second, name)                                                              \
    !HSTEP_IS_TOTALS(name) && FUSED_WORTH(name, first, second) ? fused_norms_##name##_##gradient##_##first##_##second \
                                                               : NULL,
#define FUSED_NORMS_TABLE(name) [HSTEP_RULE_##name] = {HSTEP_FUSED_RECIPES(FUSED_NORMS_ENTRY, name)},
static fused_summer *const fused_summers[HSTEP_RULES][HSTEP_FUSED_ROWS] = {
#define RULE(id, name) HSTEP_IF(HSTEP_SUMS(name), FUSED_NORMS_TABLE, name)
#include "rules/rules.def"
#undef RULE
};

/* The loops that end a rule in parts: the weight by its format, the weight in the order of memory, and the change
 * alone. */
struct fused_ends {
    fused_end_function *format[HSTEP_FORMATS], *plain, *change;
};

/* Defines fused_end_adamw_bf16_sr for rule adamw, and so on for each format, then fused_end_adamw_plain and
 * fused_change_adamw. */
#define FUSED_END(format, name, prefix)                                                                               \
    __attribute__((unused)) static void fused_end_##name##_##format(                                                  \
        const struct hstep_fused *a, struct fused_scratch *scratch, int64_t t, int64_t n)                             \
    {                                                                                                                 \
        if (FUSED_OWN(name)) {                                                                                        \
            IF_ELEMENT(format, fused_end(format##_code_bits, format##_extra_bits, 0, format##_decode, format##_apply, \
                                         prefix##_end, a, scratch, t, n);)                                            \
            IF_PACKED(format, fused_packed(HSTEP_FORMAT_##format, prefix##_end, a, HALFSTEP_SLOT_WEIGHT,              \
                                           scratch->change, scratch->root, t, n);)                                    \
        }                                                                                                             \
    }
#define FUSED_ENDS(name, prefix)                                                                                      \
    HSTEP_FUSED_WEIGHTS(FUSED_END, name, prefix)                                                                      \
    __attribute__((unused)) static void fused_end_##name##_plain(const struct hstep_fused *a,                         \
                                                                 struct fused_scratch *scratch, int64_t t, int64_t n) \
    {                                                                                                                 \
        if (FUSED_OWN(name)) fused_end(32, 0, 1, f32_decode, f32_apply, prefix##_end, a, scratch, t, n);              \
    }                                                                                                                 \
    __attribute__((unused)) static void fused_change_##name(const struct hstep_fused *a,                              \
                                                            struct fused_scratch *scratch, int64_t t, int64_t n)      \
    {                                                                                                                 \
        (void)t;                                                                                                      \
        if (FUSED_OWN(name)) fused_change(prefix##_end, a, scratch, n);                                               \
    }
#define RULE(id, name) HSTEP_IF(HSTEP_HAS_PARTS(name), FUSED_ENDS, name, HSTEP_PARTS_PREFIX(name))
#include "rules/rules.def"
#undef RULE
#define FUSED_END_ROW(format, name) [HSTEP_FORMAT_##format] = FUSED_OWN(name) ? fused_end_##name##_##format : NULL,
#define FUSED_ENDS_ROW(name)                                                           \
    [HSTEP_RULE_##name] = {.format = {HSTEP_FUSED_WEIGHTS(FUSED_END_ROW, name)},       \
                           .plain = FUSED_OWN(name) ? fused_end_##name##_plain : NULL, \
                           .change = FUSED_OWN(name) ? fused_change_##name : NULL},
static const struct fused_ends fused_ends[HSTEP_RULES] = {
#define RULE(id, name) HSTEP_IF(HSTEP_HAS_PARTS(name), FUSED_ENDS_ROW, name)
#include "rules/rules.def"
#undef RULE
};

#define FUSED_BOTH(gradient, first, second, ...)                                                          \
    __attribute__((unused)) static void fused_both_##gradient##_##first##_##second(                       \
        const struct hstep_fused *a, struct fused_scratch *scratch, int j0, int j1, int64_t t, int64_t n) \
    {                                                                                                     \
        if ((first##_block != 0) & (second##_block != 0))                                                 \
            fused_both(HSTEP_FORMAT_##first, HSTEP_FORMAT_##second, a, scratch, j0, j1, t, n);            \
    }
HSTEP_FUSED_RECIPES(FUSED_BOTH, )
#define FUSED_BOTH_ROW(gradient, first, second, ...) \
    ((first##_block != 0) & (second##_block != 0)) ? fused_both_##gradient##_##first##_##second : NULL,
static fused_both_function *const fused_boths[HSTEP_FUSED_ROWS] = {HSTEP_FUSED_RECIPES(FUSED_BOTH_ROW, )};

/* ---- Steps ---- */

static const struct {
    const char *name, *parts; /* parts: the name of the rule whose parts it takes */
    int kind;
    struct hstep_roles states;
} fused_rules[HSTEP_RULES] = {
#define RULE(id, name) \
    [HSTEP_RULE_##name] = {#name, FUSED_STRING(HSTEP_PARTS_PREFIX(name)), HSTEP_PARTS_KIND(name), HSTEP_ROLES_OF(name)},
#include "rules/rules.def"
#undef RULE
};

/* The number of a step, taken apart: its rule, the rule whose loops serve it, the row and the variant. */
struct fused_number {
    int rule, own, row, variant;
};

static int fused_number_of(const struct fused_number *n)
{
    return ((n->rule * HSTEP_RULES + n->own) * HSTEP_FUSED_ROWS + n->row) * HSTEP_FUSED_VARIANTS + n->variant;
}

static struct fused_number fused_of_number(int step)
{
    const int row = step / HSTEP_FUSED_VARIANTS, own = row / HSTEP_FUSED_ROWS;
    return (struct fused_number){.rule = own / HSTEP_RULES,
                                 .own = own % HSTEP_RULES,
                                 .row = row % HSTEP_FUSED_ROWS,
                                 .variant = step % HSTEP_FUSED_VARIANTS};
}

/* Returns the number of the fused step, or -1. The loops are the rule's own or those of the rule whose parts it takes.
 * Both rules must store states of the same roles. */
static int fused_find(int rule, int row, int variant)
{
    for (int own = 0; own < HSTEP_RULES; own++) {
        int same = own == rule || !strcmp(fused_rules[own].name, fused_rules[rule].parts);
        for (int j = 0; j < HSTEP_FUSED_STATES; j++)
            same &=
                fused_role(j, &fused_rules[own].states, variant) == fused_role(j, &fused_rules[rule].states, variant);
        if (same && fused_tiles[own][row][variant])
            return fused_number_of(&(struct fused_number){rule, own, row, variant});
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

/* Returns 1 if fused_adjust() has to write the gradient to scratch memory first. It does so to decode any format. In a
 * step that is all f32, it does so to add l2 decay or to subtract a row mean. */
static int fused_is_adjusted(const struct hstep_fused *a, int row, int plain)
{
    return fused_any[row] || (plain && (a->l2 != 0.0f || a->mean != 0.0f));
}

/* Writes the adjusted gradient to `scratch`. Loops over f32 in the order of memory do not look there. They get the step
 * `seen`, which begins at t and has that gradient as its own. */
static void fused_adjust(const struct hstep_fused *a, struct hstep_fused *seen, struct fused_scratch *scratch,
                         int plain, int64_t t, int64_t n)
{
    if (!plain) {
        fused_formats.gradient[a->format[HALFSTEP_SLOT_GRADIENT]](a, scratch, t, n);
        return;
    }
    fused_gradient_plain(a, scratch, t, n);
    *seen = *a;
    seen->index += (uint64_t)t;
    seen->gradient_scale = 1.0f;
    for (int s = 0; s < HSTEP_SLOTS; s++)
        if (a->format[s] >= 0) seen->code[s] += 4 * t;
    seen->code[HALFSTEP_SLOT_GRADIENT] = (char *)scratch->gradient;
}

static void fused_step(const struct hstep_fused *a, int step)
{
    const struct fused_number number = fused_of_number(step);
    const int variant = number.variant, row = number.row, rule = number.own;
    const int weight = a->format[HALFSTEP_SLOT_WEIGHT];
    struct fused_scratch scratch;
    struct hstep_fused seen;
    /* A cautious step needs the change in scratch memory, beside its gradient and its weight. */
    const int cautious = a->cautious != 0.0f || a->cautious_decay != 0.0f;
    const int plain = !cautious && fused_is_plain(a);
    fused_tile *const tile = fused_tiles[rule][row][variant];
    static const struct fused_ends none;
    const int parts = fused_parts(fused_rules[rule].kind, variant);
    const struct fused_ends *ends = parts ? &fused_ends[rule] : &none;
    /* j0 and j1 are the signed state and the second moment whose codes share a loop, or -1. */
    int j0 = HSTEP_FUSED_STATES, j1 = HSTEP_FUSED_STATES;
    for (int j = 0; fused_boths[row] && j < HSTEP_FUSED_STATES; j++) {
        const int s = HALFSTEP_SLOT_STATE + j;
        if (a->format[s] < 0 || !fused_formats.codes[a->format[s]][0]) continue;
        if (a->nonneg >> s & 1) j1 = j1 < j ? j1 : j;
        else j0 = j0 < j ? j0 : j;
    }
    if (j0 == HSTEP_FUSED_STATES || j1 == HSTEP_FUSED_STATES) j0 = j1 = -1;
    fused_end_function *const end = cautious                    ? NULL
                                    : !plain                    ? ends->format[weight]
                                    : parts == HSTEP_PARTS_ROOT ? ends->plain
                                                                : NULL;
    const int adjusted = fused_is_adjusted(a, row, plain), moved = adjusted && plain,
              weighted = !plain && (!end || a->l2 != 0.0f);
    for (int64_t t = 0; t < a->n; t += FUSED_TILE) {
        int64_t n = a->n - t < FUSED_TILE ? a->n - t : FUSED_TILE;
        for (int j = 0; j < HSTEP_FUSED_STATES; j++) {
            int s = HALFSTEP_SLOT_STATE + j;
            if (!(a->as_weight >> s & 1)) continue;
            if (a->weight_to_slot >> s & 1) fused_copy(a, s, HALFSTEP_SLOT_WEIGHT, t, n);
            if (!plain) fused_decode(a, s, scratch.state[j].old, t, n);
        }
        if (weighted) fused_decode(a, HALFSTEP_SLOT_WEIGHT, scratch.weight, t, n);
        if (adjusted) fused_adjust(a, &seen, &scratch, plain, t, n);
        tile(moved ? &seen : a, &scratch, moved ? 0 : t, n);
        if (end) {
            end(a, &scratch, t, n);
        } else if (!plain) {
            if (ends->change) ends->change(a, &scratch, t, n);
            if (a->cautious != 0.0f)
                cautious_tile(scratch.change, scratch.gradient, scratch.weight, a->cautious, a->decay, n);
            if (a->cautious_decay != 0.0f) decay_tile(scratch.change, scratch.weight, a->cautious_decay, n);
            fused_formats.apply[weight](a, HALFSTEP_SLOT_WEIGHT, scratch.weight, scratch.change, t, n);
        }
        for (int j = 0; j < HSTEP_FUSED_STATES; j++) {
            int s = HALFSTEP_SLOT_STATE + j;
            struct fused_state *state = &scratch.state[j];
            if (a->as_weight >> s & 1) {
                if (!plain) fused_formats.apply[weight](a, s, state->old, state->stash, t, n);
                if (a->slot_to_weight >> s & 1) fused_copy(a, HALFSTEP_SLOT_WEIGHT, s, t, n);
            } else if (j == j0) {
                fused_boths[row](a, &scratch, j0, j1, t, n);
            } else if (j != j1 && a->format[s] >= 0 && fused_formats.codes[a->format[s]][0]) {
                fused_formats.codes[a->format[s]][a->nonneg >> s & 1](a, state, s, t, n);
            }
        }
    }
}

static void fused_sum_up(const struct hstep_fused *a, int step, double *sums)
{
    const struct fused_number number = fused_of_number(step);
    const int row = number.row;
    fused_summer *const summer = fused_summers[number.rule][row];
    const int plain = fused_is_plain(a);
    const int adjusted = fused_is_adjusted(a, row, plain), moved = adjusted && plain;
    struct hstep_fused seen;
    struct fused_scratch scratch;
    for (int64_t t = 0; t < a->n; t += HSTEP_TILE, sums += HSTEP_MAX_NORMS) {
        int64_t n = a->n - t < HSTEP_TILE ? a->n - t : HSTEP_TILE;
        if (!plain) fused_decode(a, HALFSTEP_SLOT_WEIGHT, scratch.weight, t, n);
        if (adjusted) fused_adjust(a, &seen, &scratch, plain, t, n);
        summer(moved ? &seen : a, &scratch, moved ? 0 : t, n, sums);
    }
}

/* Returns how many of n elements in scratch memory have a change that agrees with the gradient. */
static int64_t fused_count(const struct fused_scratch *scratch, int64_t n)
{
    HSTEP_ALIGNED uint32_t lanes[VL];
    int64_t count = 0;
    vi sum = vi_set(0);
    for (int64_t r = 0; r < n; r += VL)
        sum = vi_add(
            sum, vi_select(agrees(v_load(scratch->change + r), v_load(scratch->gradient + r)), vi_set(1), vi_set(0)));
    vi_store(lanes, sum);
    for (int i = 0; i < VL; i++) count += lanes[i];
    return count;
}

/* Returns how many elements agree. Runs the loops up to the weight on copies of the states, so nothing is stored. */
static int64_t fused_agree(const struct hstep_fused *a, int step)
{
    const struct fused_number number = fused_of_number(step);
    const int variant = number.variant, row = number.row, rule = number.own;
    fused_tile *const tile = fused_tiles[rule][row][variant];
    fused_end_function *const change = fused_parts(fused_rules[rule].kind, variant) ? fused_ends[rule].change : NULL;
    struct hstep_fused seen = *a;
    struct fused_scratch scratch;
    HSTEP_ALIGNED char copy[HSTEP_FUSED_STATES][FUSED_TILE * 4];
    int64_t count = 0;
    for (int64_t t = 0; t < a->n; t += FUSED_TILE) {
        const int64_t n = a->n - t < FUSED_TILE ? a->n - t : FUSED_TILE;
        seen.index = a->index + (uint64_t)t;
        for (int j = 0; j < HSTEP_FUSED_STATES; j++) {
            const int s = HALFSTEP_SLOT_STATE + j;
            if (a->format[s] < 0) continue;
            const struct columns c = columns_of(a->format[s]);
            memcpy(copy[j], a->code[s] + t * c.bits / 8, (size_t)(n * c.bits / 8));
            seen.code[s] = copy[j];
            if (c.block) seen.extra[s] = a->extra[s] + t / c.block * hstep_scale_bytes(c.scale);
        }
        fused_decode(a, HALFSTEP_SLOT_WEIGHT, scratch.weight, t, n);
        fused_formats.gradient[a->format[HALFSTEP_SLOT_GRADIENT]](a, &scratch, t, n);
        tile(&seen, &scratch, 0, n);
        if (change) change(&seen, &scratch, 0, n);
        count += fused_count(&scratch, n);
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
