/* The multi-compiled file: once per row of vec/isas.def, with HSTEP_VEC_HEADER naming the vocabulary and HSTEP_ISA the
 * table's suffix. Rules and formats are inlined here in two ways, tile by tile (any combination) and as fused loops
 * (the rows of fused.def), from the same functions. */
#include "kernels/kernels.h"

/* Scheduling before registers are given out, which gcc leaves off for x86, gains up to 7 % where roots and quotients of
 * long loops overlap. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("schedule-insns", "sched-pressure")
#endif

#include HSTEP_VEC_HEADER

#include "kernels/fused_steps.h"
#include "kernels/product.h"

#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)

/* Tables within a table. */
/* clang-format off */
const struct hstep_kernels CONCATENATE(hstep_kernels_, HSTEP_ISA) = {
    .name = HSTEP_VEC_NAME,
    .lanes = VL,
    .format = {
#define ELEMENT_FORMAT(id, name, fn, ...)                                                                          \
    [HSTEP_FORMAT_##fn] = {.decode = {decode_##fn##_0, decode_##fn##_0},                                           \
                           .encode = {encode_##fn##_0, encode_##fn##_0},                                           \
                           .apply = apply_##fn, .maximum = maximum_##fn, .squares = squares_##fn, .sums = sums_##fn},
#define SCALE_ROWS(fn)
#define SCALE_FLAT(fn)
#define SCALE_TENSOR(fn) .norm = {norm_##fn##_0, norm_##fn##_1}
#define BLOCK_FORMAT(id, name, fn, title, roles, bits, dtype, block, scale, geometry, ...)                         \
    [HSTEP_FORMAT_##fn] = {.decode = {decode_##fn##_0, decode_##fn##_1},                                           \
                           .encode = {encode_##fn##_0, encode_##fn##_1},                                           \
                           SCALE_##geometry(fn)},
#include "formats/formats.def"
#undef ELEMENT_FORMAT
#undef BLOCK_FORMAT
    },
    .rule = {
#define RULE(id, ...) [HSTEP_RULE_ROW_##id] = {rule_##id##_0, rule_##id##_1, rule_##id##_2, rule_##id##_3},
#include "rules/rules.def"
#undef RULE
    },
    .norms = {
#define NO_NORMS(id)
#define NORMS_1(id) [HSTEP_RULE_ROW_##id] = {norms_##id##_0, norms_##id##_1},
#define NORMS_2(id) [HSTEP_RULE_ROW_##id] = {norms_##id##_0, norms_##id##_1},
#define NORMS_3 NORMS_2
#define TOTALS_3(share) NORMS_3
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, ...) norms(id)
#include "rules/rules.def"
#undef RULE
    },
    .matrix = {
#define ELEMENTWISE(id)
#define RAW_GRADIENT(id)
#define FACTORED_1(id)
#define FACTORED_2(id)
#define MATRIX(name) MATRIX_ROW
#define MATRIX_ROW(id) [HSTEP_RULE_ROW_##id] = {{direction_##id##_0, direction_##id##_1}, change_##id},
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign)    \
    kind(id)
#include "rules/rules.def"
#undef RULE
    },
    .factored = {
#undef MATRIX
#undef FACTORED_1
#undef FACTORED_2
#define MATRIX(name) ELEMENTWISE
#define FACTORED_PAIR(id, pair) [pair] = {{cross_##id##_##pair##_0, cross_##id##_##pair##_1}, vector_##id##_##pair},
#define FACTORED_1(id) [HSTEP_RULE_ROW_##id] = {FACTORED_PAIR(id, 0)},
#define FACTORED_2(id) [HSTEP_RULE_ROW_##id] = {FACTORED_PAIR(id, 0) FACTORED_PAIR(id, 1)},
#define RULE(id, name, fn, label, title, lr, wd, decay, states, formats, hypers, norms, scalars, keeps, kind, sign)    \
    kind(id)
#include "rules/rules.def"
#undef RULE
    },
    .product = product_tile,
    .gradient = gradient_tile,
    .agreement = agreement_tile,
    .cautious = cautious_tile,
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
