/* The model's operations between matrix products, on one row at a time, in fp32. They use only + - * / and square roots
 * in a fixed order. Sums run in 16 lanes, which are added as a tree; exp is a polynomial. So the vector width changes
 * no bit. */
#ifndef HALFSTEP_ROWS_H
#define HALFSTEP_ROWS_H

#include <stdint.h>

/* Types are those of enum lm_dtype. Stored values are rounded to nearest even. Finite values stay finite; Inf and NaN
 * stay, too. Only load and dot take LM_PACKED. Each ROW_BLOCK values then have ROW_BLOCK_BYTES: a scale in BF16 and
 * codes.
 *
 * load, store      fp32 from and to a stored type
 * add              out = a + b
 * add_to           sum += in
 * scale            row *= factor
 * dot              returns the sum of weights * x
 * norm             out = x * r * gain; returns r = 1 / sqrt(mean(x^2) + eps)
 * norm_again       out = x * r * gain with a known r
 * norm_backward    adds the gradients to dx and dgain
 * rotate           rotary positions: pairs element i of a head with i + half; direction -1 turns back; out may be in
 * swiglu           out = gate / (1 + exp(-gate)) * up
 * swiglu_backward  computes out again; replaces gate and up by their gradients, from d(out)
 * softmax          out = softmax(scale * row) over the first `valid` values, 0 after them; overwrites row, which may be
 *                  out if the type is fp32
 * softmax_backward p = softmax(scale * row) again from `kept`; ds = scale * p * (dp - sum(p * dp)), 0 from `valid` on;
 *                  overwrites row
 * cross_entropy    returns -log(softmax(logits)[target]); logits become factor * (softmax - onehot(target))
 *
 * Rows of the two softmaxes have room for n rounded up to ROW_LANES values, and all of it is written. */
enum { ROW_LANES = 16, ROW_BLOCK = 32, ROW_BLOCK_BYTES = 34 };

struct row_softmax {
    float largest, inverse_sum; /* of scale * row; 1 / the sum of exp(scale * row - largest) */
};

#define ROW(name, parameters, arguments) void row_##name parameters;
#define ROW_FLOAT(name, parameters, arguments) float row_##name parameters;
#include "trainer/products/rows.def"
#undef ROW
#undef ROW_FLOAT

/* Elementary functions in double by + - * / only, so with the same bits everywhere. Ranges, in this order: x > 0 and
 * normal; |x| < 1e6; |x| < 700. */
double exact_log(double x);
void exact_sincos(double x, double *sine, double *cosine);
double exact_exp(double x);

/* Returns 64 random bits that depend on the seed and three counters only. */
uint64_t hash_counters(uint64_t seed, uint64_t a, uint64_t b, uint64_t c);

#endif
