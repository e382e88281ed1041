/* What the model does between matrix products, one row at a time, in fp32. Only + - * / and square roots in a fixed
 * order (sums run in 16 lanes that are added as a tree; exp is a polynomial), so vector width changes no bit. */
#ifndef HALFSTEP_ROWS_H
#define HALFSTEP_ROWS_H

#include <stdint.h>

/* fp32 from and to a stored type (enum lm_dtype): to nearest even, finite values stay finite, Inf and NaN stay. */
void row_load(float *restrict out, const void *restrict in, int type, int n);
void row_store(void *restrict out, int type, const float *restrict in, int n);

void row_add(float *out, const float *a, const float *b, int n);
void row_add_to(float *restrict sum, const float *restrict in, int n);
void row_scale(float *row, float factor, int n);
float row_dot(const void *restrict weights, int type, const float *restrict x, int n);

/* out = x * r * gain, r = 1 / sqrt(mean(x^2) + eps), which is returned. */
float row_norm(float *restrict out, const float *restrict x, const float *restrict gain, float eps, int n);
void row_norm_again(float *restrict out, const float *restrict x, const float *restrict gain, float r, int n);
/* Adds to dx and to dgain. */
void row_norm_backward(float *restrict dx, float *restrict dgain, const float *restrict dout, const float *restrict x,
                       const float *restrict gain, float r, int n);

/* Rotary positions: element i of a head pairs with i + half. direction -1 turns back. */
void row_rotate(float *restrict row, const float *restrict cosine, const float *restrict sine, float direction,
                int heads, int half);

void row_swiglu(float *restrict out, const float *restrict gate, const float *restrict up, int n);
/* From d(out): out again, dgate and dup. */
void row_swiglu_backward(float *restrict out, float *restrict dgate, float *restrict dup, const float *restrict dout,
                         const float *restrict gate, const float *restrict up, int n);

/* row = softmax(scale * row) in place; returns log(sum(exp(scale * row))) as it was. */
float row_softmax(float *row, float scale, int n);
void row_softmax_again(float *row, float scale, float log_sum, int n);
/* dp = scale * p * (dp - sum(p * dp)) */
void row_softmax_backward(float *restrict dp, const float *restrict p, float scale, int n);

/* Returns -log(softmax(logits)[target]); logits become factor * (softmax - onehot(target)). */
float row_cross_entropy(float *logits, int target, float factor, int n);

/* Natural functions in double by + - * / only: the same bits everywhere. x > 0 and normal; |x| < 1e6; |x| < 700. */
double exact_log(double x);
void exact_sincos(double x, double *sine, double *cosine);
double exact_exp(double x);

/* 64 random bits from three counters. */
uint64_t hash_counters(uint64_t seed, uint64_t a, uint64_t b, uint64_t c);

#endif
