/* What surrounds the matrix products of a convolution of 5x5 taps: unfolding its input, folding the gradient back, and
 * the pooling after it. Planes are squares of side * side values. */
#ifndef HALFSTEP_CONV_H
#define HALFSTEP_CONV_H

#include <stddef.h>
#include <stdint.h>

enum { CONV_KERNEL = 5, CONV_TAPS = CONV_KERNEL * CONV_KERNEL };

/* One image of `channels` planes: row (channel, ky, kx) of col becomes in[channel][y + ky, x + kx] for all output
 * positions (y, x). Rows of col are `stride` elements apart. size: bytes of an element, 4 or 2. */
void conv_unfold(void *restrict col, size_t stride, const void *restrict in, int channels, int side, size_t size);
/* The way back, in fp32: each value of in becomes the sum of its copies. */
void conv_fold(float *restrict in, const float *restrict col, size_t stride, int channels, int side);

/* out = ReLU(the maximum over 2x2 of in + bias), one plane of side * side from one of twice that side. where: which of
 * the four it came from, in reading order, 4 where ReLU lets nothing through. NaN stays NaN. */
void conv_pool(float *restrict out, int32_t *restrict where, const float *restrict in, float bias, int side);
/* From the gradient of out that of in, all four of each square written; returns that of the bias. */
float conv_unpool(float *restrict din, const float *restrict dout, const int32_t *restrict where, int side);

#endif
