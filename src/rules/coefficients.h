/* Coefficients of the Newton-Schulz iteration. A row has a triple (a, b, c) for each iteration. Its last triple goes on
 * for all further ones:
 *
 *   ROW("name", least, triples...)
 *       `least` is the number of iterations that the authors make. There are at least as many, and ns_steps of them if
 *       that is more. A row without triples takes ns_a, ns_b and ns_c in all iterations.
 *
 *   given           ns_a, ns_b, ns_c; at first those of Jordan et al. 2024
 *   polar-express   Amsel et al. 2025 (arXiv:2505.16932), algorithm 1. The authors divide by 1.01 |u| in place of |u|,
 *                   and make each polynomial but the last one of x / 1.01, so that rounding does no harm. Here the
 *                   first polynomial is of x / 1.01 twice
 *   deepseek-v4     DeepSeek-AI 2026: eight iterations that raise small singular values, and two that end at 1
 *   dion            Ahn et al. 2025 (arXiv:2504.05295), as their package dion has them: five polynomials
 *
 * Files store the number of a row. New rows go to the end. */
#ifndef HSTEP_COEFFICIENTS_H
#define HSTEP_COEFFICIENTS_H

#include "base/inline.h"

#define HSTEP_MAX_TRIPLES 10

/* The triple of the polynomial of x / s. */
#define HSTEP_OF_SMALLER(s, a, b, c) \
    {(float)((a) / (s)), (float)((b) / ((s) * (s) * (s))), (float)((c) / ((s) * (s) * (s) * (s) * (s)))}
#define HSTEP_TWICE(...) {__VA_ARGS__}, {__VA_ARGS__}

#define HSTEP_COEFFICIENTS(ROW)                                                                               \
    ROW("given", 0, {0.0f})                                                                                   \
    ROW("polar-express", 5,                                                                                   \
        HSTEP_OF_SMALLER(1.01 * 1.01, 8.28721201814563, -23.595886519098837, 17.300387312530933),             \
        HSTEP_OF_SMALLER(1.01, 4.107059111542203, -2.9478499167379106, 0.5448431082926601),                   \
        HSTEP_OF_SMALLER(1.01, 3.9486908534822946, -2.908902115962949, 0.5518191394370137),                   \
        HSTEP_OF_SMALLER(1.01, 3.3184196573706015, -2.488488024314874, 0.51004894012372),                     \
        HSTEP_OF_SMALLER(1.01, 2.300652019954817, -1.6689039845747493, 0.4188073119525673),                   \
        HSTEP_OF_SMALLER(1.01, 1.891301407787398, -1.2679958271945868, 0.37680408948524835),                  \
        HSTEP_OF_SMALLER(1.01, 1.8750014808534479, -1.2500016453999487, 0.3750001645474248),                  \
        {1.875f, -1.25f, 0.375f})                                                                             \
    ROW("deepseek-v4", 10, HSTEP_TWICE(3.4445f, -4.775f, 2.0315f), HSTEP_TWICE(3.4445f, -4.775f, 2.0315f),    \
        HSTEP_TWICE(3.4445f, -4.775f, 2.0315f), HSTEP_TWICE(3.4445f, -4.775f, 2.0315f),                       \
        HSTEP_TWICE(2.0f, -1.5f, 0.5f))                                                                       \
    ROW("dion", 5, {4.0848f, -6.8946f, 2.9270f}, {3.9505f, -6.3029f, 2.6377f}, {3.7418f, -5.5913f, 2.3037f},  \
        {2.8769f, -3.1427f, 1.2046f}, {2.8366f, -3.0525f, 1.2012f})

struct hstep_coefficients {
    int least, triples;
    float triple[HSTEP_MAX_TRIPLES][3];
};

#define HSTEP_COUNT_TRIPLES(...) ((int)(sizeof((float[][3]){__VA_ARGS__}) / sizeof(float[3])))
#define HSTEP_COEFFICIENTS_NAME(name, ...) name,
#define HSTEP_COEFFICIENTS_MEMBERS(name, least_, ...) \
    {.least = least_, .triples = (least_) ? HSTEP_COUNT_TRIPLES(__VA_ARGS__) : 0, .triple = {__VA_ARGS__}},
static HSTEP_TABLE const struct hstep_coefficients hstep_coefficients[] = {
    HSTEP_COEFFICIENTS(HSTEP_COEFFICIENTS_MEMBERS)};

#endif
