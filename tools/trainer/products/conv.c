#include "trainer/products/conv.h"

#include <string.h>

/* Four lanes in the compilers' own vector types. Neither gcc nor clang vectorizes the plain loops below, which branch
 * on unpredictable values. */
typedef float lanes __attribute__((vector_size(16)));
typedef int32_t marks __attribute__((vector_size(16)));

static inline lanes load(const float *p)
{
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(void *p, const void *v) { memcpy(p, v, 16); }

static inline lanes choose(marks take, lanes a, lanes b) { return (lanes)((take & (marks)a) | (~take & (marks)b)); }

/* Inlined with constant sizes for the common shapes, so that each copy is a single move. */
static inline __attribute__((always_inline)) void unfold(char *restrict col, size_t stride, const char *restrict in,
                                                         int channels, size_t side, size_t size)
{
    size_t out = side - CONV_KERNEL + 1;
    for (int c = 0; c < channels; c++, in += side * side * size)
        for (size_t ky = 0; ky < CONV_KERNEL; ky++)
            for (size_t kx = 0; kx < CONV_KERNEL; kx++, col += stride * size)
                for (size_t y = 0; y < out; y++)
                    memcpy(col + y * out * size, in + ((y + ky) * side + kx) * size, out * size);
}

void conv_unfold(void *restrict col, size_t stride, const void *restrict in, int channels, int side, size_t size)
{
    if (side == 28 && size == 4) unfold(col, stride, in, channels, 28, 4);
    else if (side == 28 && size == 2) unfold(col, stride, in, channels, 28, 2);
    else if (side == 12 && size == 4) unfold(col, stride, in, channels, 12, 4);
    else if (side == 12 && size == 2) unfold(col, stride, in, channels, 12, 2);
    else unfold(col, stride, in, channels, (size_t)side, size);
}

static inline __attribute__((always_inline)) void fold(float *restrict in, const float *restrict col, size_t stride,
                                                       int channels, size_t side)
{
    size_t out = side - CONV_KERNEL + 1;
    memset(in, 0, (size_t)channels * side * side * sizeof *in);
    for (int c = 0; c < channels; c++, in += side * side)
        for (size_t ky = 0; ky < CONV_KERNEL; ky++)
            for (size_t kx = 0; kx < CONV_KERNEL; kx++, col += stride)
                for (size_t y = 0; y < out; y++) {
                    float *to = in + (y + ky) * side + kx;
                    const float *from = col + y * out;
                    for (size_t x = 0; x < out; x++) to[x] += from[x];
                }
}

void conv_fold(float *restrict in, const float *restrict col, size_t stride, int channels, int side)
{
    if (side == 12) fold(in, col, stride, channels, 12);
    else fold(in, col, stride, channels, (size_t)side);
}

/* The first of two equal values wins. */
static void pool_one(float *out, int32_t *where, const float *upper, const float *lower, float bias)
{
    int right = upper[1] > upper[0], below = lower[1] > lower[0];
    float top = upper[right], bottom = lower[below];
    float value = (bottom > top ? bottom : top) + bias;
    *where = value <= 0 ? 4 : bottom > top ? 2 + below : right;
    *out = value <= 0 ? 0 : value;
}

static void pool_four(float *out, int32_t *where, const float *upper, const float *lower, float bias)
{
    lanes a0 = load(upper), a1 = load(upper + 4), b0 = load(lower), b1 = load(lower + 4), zero = {0};
    lanes left = __builtin_shufflevector(a0, a1, 0, 2, 4, 6), right = __builtin_shufflevector(a0, a1, 1, 3, 5, 7);
    lanes left_below = __builtin_shufflevector(b0, b1, 0, 2, 4, 6),
          right_below = __builtin_shufflevector(b0, b1, 1, 3, 5, 7);
    marks in_right = right > left, in_right_below = right_below > left_below;
    lanes top = choose(in_right, right, left), bottom = choose(in_right_below, right_below, left_below);
    marks in_bottom = bottom > top;
    lanes value = choose(in_bottom, bottom, top) + bias;
    marks dead = value <= zero;
    marks from = (in_bottom & (2 - in_right_below)) | (~in_bottom & -in_right);
    value = choose(dead, zero, value);
    from = (dead & 4) | (~dead & from);
    store(out, &value);
    store(where, &from);
}

void conv_pool(float *restrict out, int32_t *restrict where, const float *restrict in, float bias, int side)
{
    for (int y = 0; y < side; y++, in += 4 * side, out += side, where += side) {
        const float *lower = in + 2 * side;
        int x = 0;
        for (; x + 4 <= side; x += 4) pool_four(out + x, where + x, in + 2 * x, lower + 2 * x, bias);
        for (; x < side; x++) pool_one(out + x, where + x, in + 2 * x, lower + 2 * x, bias);
    }
}

float conv_unpool(float *restrict din, const float *restrict dout, const int32_t *restrict where, int side)
{
    lanes sums = {0};
    float sum = 0;
    for (int y = 0; y < side; y++, din += 4 * side, dout += side, where += side) {
        float *lower = din + 2 * side;
        int x = 0;
        for (; x + 4 <= side; x += 4) {
            marks from, d = (marks)load(dout + x);
            memcpy(&from, where + x, sizeof from);
            lanes part[4];
            for (int i = 0; i < 4; i++) part[i] = (lanes)(d & (from == i));
            lanes upper0 = __builtin_shufflevector(part[0], part[1], 0, 4, 1, 5);
            lanes upper1 = __builtin_shufflevector(part[0], part[1], 2, 6, 3, 7);
            lanes lower0 = __builtin_shufflevector(part[2], part[3], 0, 4, 1, 5);
            lanes lower1 = __builtin_shufflevector(part[2], part[3], 2, 6, 3, 7);
            store(din + 2 * x, &upper0);
            store(din + 2 * x + 4, &upper1);
            store(lower + 2 * x, &lower0);
            store(lower + 2 * x + 4, &lower1);
            sums += (lanes)(d & (from != 4));
        }
        for (; x < side; x++) {
            float *four[4] = {din + 2 * x, din + 2 * x + 1, lower + 2 * x, lower + 2 * x + 1};
            for (int i = 0; i < 4; i++) *four[i] = where[x] == i ? dout[x] : 0;
            if (where[x] != 4) sum += dout[x];
        }
    }
    return sum + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
