/* What the model does between matrix products, one row at a time, in fp32. Only + - * / and square roots in a fixed
 * order (sums run in 16 lanes that are added as a tree; exp is a polynomial), so vector width changes no bit. */
#ifndef HALFSTEP_ROWS_H
#define HALFSTEP_ROWS_H

#include <stdint.h>

/* Types are those of enum lm_dtype. Stored values are rounded to nearest even; finite ones stay so, Inf and NaN too.
 *
 * load, store      fp32 from and to a stored type
 * add              out = a + b
 * add_to           sum += in
 * scale            row *= factor
 * dot              the sum of weights * x
 * norm             out = x * r * gain, r = 1 / sqrt(mean(x^2) + eps), which is returned
 * norm_again       the same with the r of before
 * norm_backward    adds to dx and to dgain
 * rotate           rotary positions: element i of a head pairs with i + half; direction -1 turns back; out may be in
 * swiglu           out = gate / (1 + exp(-gate)) * up
 * swiglu_backward  from d(out): out again; gate and up become their gradients
 * softmax          out = softmax(scale * row) over the first `valid`, 0 after them; row is overwritten, and may be out
 *                  where the type is fp32
 * softmax_backward p = softmax(scale * row) again by what was kept, ds = scale * p * (dp - sum(p * dp)), 0 from `valid`
 *                  on; row is overwritten
 * cross_entropy    returns -log(softmax(logits)[target]); logits become factor * (softmax - onehot(target))
 *
 * Rows of the two softmaxes have room for n rounded up to ROW_LANES values, and all of it is written. */
enum { ROW_LANES = 16 };

struct row_softmax {
    float largest, inverse_sum; /* of scale * row; 1 / the sum of exp(scale * row - largest) */
};

#define ROW(name, parameters, arguments) void row_##name parameters;
#define ROW_FLOAT(name, parameters, arguments) float row_##name parameters;
#include "trainer/loops/rows.def"
#undef ROW
#undef ROW_FLOAT

/* Natural functions in double by + - * / only: the same bits everywhere. x > 0 and normal; |x| < 1e6; |x| < 700. */
double exact_log(double x);
void exact_sincos(double x, double *sine, double *cosine);
double exact_exp(double x);

/* 64 random bits from three counters. */
uint64_t hash_counters(uint64_t seed, uint64_t a, uint64_t b, uint64_t c);

#endif
