/* Compiled once per row of vec/isas.def. HSTEP_VEC_HEADER names the vocabulary and HSTEP_ISA the suffix of the table.
 * Rules and formats are inlined from the same functions in two ways. Tiles serve any combination. Fused loops serve the
 * rows of fused.def. */
#include "kernels/kernels.h"

/* Turns on instruction scheduling before register allocation, which gcc leaves off for x86. It gains up to 7 % in long
 * loops where roots and quotients overlap. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("schedule-insns", "sched-pressure")
#endif

#include HSTEP_VEC_HEADER

#include "kernels/fused_steps.h"
#include "kernels/product.h"

#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

/* The nested tables are laid out by hand. */
/* clang-format off */
const struct hstep_kernels CONCATENATE(hstep_kernels_, HSTEP_ISA) = {
    .name = HSTEP_VEC_NAME,
    .lanes = VL,
    .format = {
#define FORMAT(id, fn)                                                                                             \
    [HSTEP_FORMAT_##fn] = {                                                                                        \
        IF_ELEMENT(fn, .decode = {decode_##fn##_0, decode_##fn##_0}, .encode = {encode_##fn##_0, encode_##fn##_0}, \
                   .apply = apply_##fn, .maximum = maximum_##fn, .squares = squares_##fn, .sums = sums_##fn)       \
        IF_PACKED(fn, .decode = {decode_##fn##_0}, .encode = {encode_##fn##_0}, .apply = apply_##fn,)              \
        IF_BLOCK(fn, .decode = {decode_##fn##_0, decode_##fn##_1}, .encode = {encode_##fn##_0, encode_##fn##_1},)  \
        IF_TENSOR(fn, .norm = {norm_##fn##_0, norm_##fn##_1})},
#include "formats/formats.def"
#undef FORMAT
    },
    .rule = {
#define RULE(id, name) [HSTEP_RULE_##name] = {rule_##name##_0, rule_##name##_1, rule_##name##_2, rule_##name##_3},
#include "rules/rules.def"
#undef RULE
    },
    .norms = {
#define NORMS_ROW(name) [HSTEP_RULE_##name] = {norms_##name##_0, norms_##name##_1},
#define RULE(id, name) HSTEP_IF(HSTEP_SUMS(name), NORMS_ROW, name)
#include "rules/rules.def"
#undef RULE
    },
    .matrix = {
#define MATRIX_ROW(name) [HSTEP_RULE_##name] = {{direction_##name##_0, direction_##name##_1}, change_##name},
#define RULE(id, name) HSTEP_IF(HSTEP_IS_MATRIX(name), MATRIX_ROW, name)
#include "rules/rules.def"
#undef RULE
    },
    .factored = {
#define PAIR_ROW(name, pair) {{cross_##name##_##pair##_0, cross_##name##_##pair##_1}, vector_##name##_##pair}
#define FACTORED_ROW_1(name) [HSTEP_RULE_##name] = {PAIR_ROW(name, 0)},
#define FACTORED_ROW_2(name) [HSTEP_RULE_##name] = {PAIR_ROW(name, 0), PAIR_ROW(name, 1)},
#define FACTORED_ROW(name, pairs) FACTORED_ROW_##pairs(name)
#define RULE(id, name) HSTEP_IF(HSTEP_PAIRS(name), FACTORED_ROW, name, HSTEP_PAIRS(name))
#include "rules/rules.def"
#undef RULE
    },
    .product = product_tile,
    .gradient = gradient_tile,
    .agreement = agreement_tile,
    .cautious = cautious_tile,
    .decay = decay_tile,
    .accumulate = accumulate_tile,
    .scale = scale_tile,
    .to_plain = to_plain,
    .from_plain = from_plain,
    .random = {
#define GENERATOR(constant, id, name, title) random_##constant,
        HSTEP_GENERATORS(GENERATOR)
#undef GENERATOR
    },
    .find_fused = FUSED_FIND,
    .fused = FUSED_STEP,
    .fused_sums = FUSED_SUM,
    .fused_agreement = FUSED_AGREEMENT,
};
