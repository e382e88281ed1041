/* The steps before and after the matrix products of a 5x5 convolution: unfolding its input, folding the gradient back,
 * and 2x2 pooling. Planes are squares of side * side values. */
#ifndef HALFSTEP_CONV_H
#define HALFSTEP_CONV_H

#include <stddef.h>
#include <stdint.h>

enum { CONV_KERNEL = 5, CONV_TAPS = CONV_KERNEL * CONV_KERNEL };

/* Unfolds one image of `channels` planes. Row (channel, ky, kx) of col becomes in[channel][y + ky, x + kx] for all
 * output positions (y, x). Rows of col are `stride` elements apart. size: bytes of an element, 4 or 2. */
void conv_unfold(void *restrict col, size_t stride, const void *restrict in, int channels, int side, size_t size);
/* Folds back in fp32: each value of in becomes the sum of its copies in col. */
void conv_fold(float *restrict in, const float *restrict col, size_t stride, int channels, int side);

/* Computes out = ReLU(the maximum over 2x2 of in + bias) for one plane of side * side values, from a plane of twice
 * that side. Sets `where` to the position of each maximum in its square, in reading order, or to 4 if ReLU gives 0. NaN
 * stays NaN. */
void conv_pool(float *restrict out, int32_t *restrict where, const float *restrict in, float bias, int side);
/* Computes the gradient of in from that of out. Writes all four values of each square. Returns the gradient of the
 * bias. */
float conv_unpool(float *restrict din, const float *restrict dout, const int32_t *restrict where, int side);

#endif
