/* The loops of rows.h over vectors of 16 lanes. Compiled once for each instruction set, without the fusing of products and
 * sums, so that all of them give the same bits. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "llama.h"
#include "row_kernels.h"
#include "rows.h"

enum { LANES = ROW_LANES };

typedef float vf __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

/* Vectors are values here, never arguments of a call between files. */
#define INLINE static inline __attribute__((always_inline))

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vu choose_u(vi mask, vu a, vu b) { return (vu)((mask & (vi)a) | (~mask & (vi)b)); }

/* Lanes from `n` on are 0. */
INLINE vf first_lanes(vf x, int n)
{
    static const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)((vi)x & (lane < n));
}

/* The sum of the lanes, as a tree. */
INLINE float total(vf s)
{
    vf8 half[2];
    vf4 quarter[2];
    memcpy(half, &s, sizeof half);
    half[0] += half[1];
    memcpy(quarter, half, sizeof quarter);
    quarter[0] += quarter[1];
    return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}

/* Where rounding could reach infinity, and for Inf and NaN, the high half is taken as it is. */
INLINE vh to_bf16(vf x)
{
    vu u = (vu)x, magnitude = u & 0x7FFFFFFF, rounded = u + 0x7FFF + (u >> 16 & 1);
    rounded = choose_u(magnitude > 0x7F7F7FFF, u, rounded);
    return __builtin_convertvector(choose_u(magnitude > 0x7F800000, rounded | 0x400000, rounded) >> 16, vh);
}

INLINE vf from_bf16(vh h) { return (vf)(__builtin_convertvector(h, vu) << 16); }

INLINE vh to_f16(vf x)
{
    vu u = (vu)x, magnitude = u & 0x7FFFFFFF;
    /* 0.5 is 2^24 subnormal steps; adding it lets the fp32 addition round. */
    vu small = (vu)((vf)magnitude + 0.5f) - 0x3F000000;
    vu half = (magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000) >> 13;
    half = choose_u(magnitude < 0x38800000, small, half);
    half = choose_u(magnitude >= 0x477FE000, (vu){0} + 0x7BFF, half);
    half = choose_u(magnitude == 0x7F800000, (vu){0} + 0x7C00, half);
    half = choose_u(magnitude > 0x7F800000, (vu){0} + 0x7E00, half);
    return __builtin_convertvector((u >> 16 & 0x8000) | half, vh);
}

INLINE vf from_f16(vh h)
{
    vu u = __builtin_convertvector(h, vu), sign = (u & 0x8000) << 16, magnitude = u & 0x7FFF;
    vu small = (vu)(__builtin_convertvector((vi)magnitude, vf) * 0x1p-24f);
    vu all = choose_u(magnitude < 0x400, small, (magnitude << 13) + 0x38000000);
    all = choose_u(magnitude >= 0x7C00, 0x7F800000 | (magnitude & 0x3FF) << 13, all);
    return (vf)(sign | all);
}

/* The next n values, all 16 of them where n allows; lanes beyond are 0. */
INLINE vf get(const void *row, int type, int i, int n)
{
    int size = type == LM_F32 ? 4 : 2, count = n - i < LANES ? n - i : LANES;
    const char *from = (const char *)row + (ptrdiff_t)i * size;
    vf x = {0};
    vh h = {0};
    void *to = type == LM_F32 ? (void *)&x : (void *)&h;
    if (count == LANES) memcpy(to, from, (size_t)(LANES * size));
    else memcpy(to, from, (size_t)(count * size));
    return type == LM_F32 ? x : type == LM_BF16 ? from_bf16(h) : from_f16(h);
}

INLINE void put(void *row, int type, int i, int n, vf x)
{
    int size = type == LM_F32 ? 4 : 2, count = n - i < LANES ? n - i : LANES;
    char *to = (char *)row + (ptrdiff_t)i * size;
    vh h = {0};
    if (type != LM_F32) h = type == LM_BF16 ? to_bf16(x) : to_f16(x);
    const void *from = type == LM_F32 ? (void *)&x : (void *)&h;
    if (count == LANES) memcpy(to, from, (size_t)(LANES * size));
    else memcpy(to, from, (size_t)(count * size));
}

INLINE vf get_f32(const float *row, int i, int n) { return get(row, LM_F32, i, n); }

INLINE void put_f32(float *row, int i, int n, vf x) { put(row, LM_F32, i, n, x); }

/* A function's body once for each type, so that no loop asks for it. */
#define FOR_TYPE(call)                              \
    switch (type) {                                 \
    case LM_F32: call(LM_F32); break;               \
    case LM_BF16: call(LM_BF16); break;             \
    default: call(LM_F16); break;                   \
    }

#define EACH(i, n) for (int i = 0; i < (n); i += LANES)

static void load(float *restrict out, const void *restrict in, int type, int n)
{
#define BODY(t) EACH (i, n) put_f32(out, i, n, get(in, t, i, n))
    FOR_TYPE(BODY)
#undef BODY
}

static void store(void *restrict out, int type, const float *restrict in, int n)
{
#define BODY(t) EACH (i, n) put(out, t, i, n, get_f32(in, i, n))
    FOR_TYPE(BODY)
#undef BODY
}

static void add(float *out, const float *a, const float *b, int n)
{
    EACH (i, n) put_f32(out, i, n, get_f32(a, i, n) + get_f32(b, i, n));
}

static void add_to(float *restrict sum, const float *restrict in, int n)
{
    EACH (i, n) put_f32(sum, i, n, get_f32(sum, i, n) + get_f32(in, i, n));
}

static void scale(float *row, float factor, int n)
{
    EACH (i, n) put_f32(row, i, n, get_f32(row, i, n) * factor);
}

static float dot(const void *restrict weights, int type, const float *restrict x, int n)
{
    vf s = {0};
#define BODY(t) EACH (i, n) s += get(weights, t, i, n) * get_f32(x, i, n)
    FOR_TYPE(BODY)
#undef BODY
    return total(s);
}

static void norm_again(void *restrict out, int type, const float *restrict x, const float *restrict gain, float r, int n)
{
#define BODY(t) EACH (i, n) put(out, t, i, n, get_f32(x, i, n) * r * get_f32(gain, i, n))
    FOR_TYPE(BODY)
#undef BODY
}

static float norm(void *restrict out, int type, const float *restrict x, const float *restrict gain, float eps, int n)
{
    float r = 1.0f / sqrtf(dot(x, LM_F32, x, n) / (float)n + eps);
    norm_again(out, type, x, gain, r, n);
    return r;
}

static void norm_backward(float *restrict dx, float *restrict dgain, const float *restrict dout, const float *restrict x,
                          const float *restrict gain, float r, int n)
{
    vf s = {0};
    EACH (i, n) s += get_f32(dout, i, n) * get_f32(gain, i, n) * get_f32(x, i, n);
    float c = total(s) * r * r * r / (float)n;
    EACH (i, n) {
        vf d = get_f32(dout, i, n), v = get_f32(x, i, n);
        put_f32(dgain, i, n, get_f32(dgain, i, n) + d * (v * r));
        put_f32(dx, i, n, get_f32(dx, i, n) + (d * get_f32(gain, i, n) * r - v * c));
    }
}

static void rotate(void *out, int type, const float *in, const float *cosine, const float *sine, float direction, int heads,
                   int half)
{
#define BODY(t)                                                                                           \
    EACH (i, half) {                                                                                      \
        vf x = get_f32(a, i, half), y = get_f32(a + half, i, half);                                         \
        vf c = get_f32(cosine, i, half), s = direction * get_f32(sine, i, half);                            \
        put(out, t, first + i, first + half, x * c - y * s);                                               \
        put(out, t, first + half + i, first + 2 * half, y * c + x * s);                                 \
    }
    for (int h = 0; h < heads; h++) {
        int first = h * 2 * half;
        const float *a = in + first;
        FOR_TYPE(BODY)
    }
#undef BODY
}

/* exp to about 2 ulp; below -87 it stays at exp(-87). NaN stays NaN. */
INLINE vf exp_of(vf x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = choose(x < -87.0f, splat(-87.0f), x);
    x = choose(x > 88.0f, splat(88.0f), x);
    vf t = x * 1.44269504f + shift;
    vf n = t - shift;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vf)(((vu)t - 0x4B400000u + 127u) << 23);
}

static void swiglu(void *restrict out, const void *restrict gate, const void *restrict up, int type, int n)
{
#define BODY(t)                                                                       \
    EACH (i, n) {                                                                     \
        vf g = get(gate, t, i, n);                                                  \
        put(out, t, i, n, g / (1.0f + exp_of(-g)) * get(up, t, i, n));            \
    }
    FOR_TYPE(BODY)
#undef BODY
}

static void swiglu_backward(void *restrict out, void *restrict gate, void *restrict up, const float *restrict dout, int type,
                            int n)
{
#define BODY(t)                                                                                  \
    EACH (i, n) {                                                                                \
        vf g = get(gate, t, i, n), u = get(up, t, i, n), d = get_f32(dout, i, n);          \
        vf s = 1.0f / (1.0f + exp_of(-g)), silu = g * s;                                         \
        put(out, t, i, n, silu * u);                                                           \
        put(up, t, i, n, d * silu);                                                            \
        put(gate, t, i, n, d * u * (s + silu * (1.0f - s)));                                   \
    }
    FOR_TYPE(BODY)
#undef BODY
}

INLINE float largest(const float *x, int n)
{
    vf m = splat(x[0]);
    EACH (i, n) {
        /* Lanes beyond the end see x[0] again. */
        vf v = m;
        if (n - i >= LANES) v = get_f32(x, i, n);
        else memcpy(&v, x + i, (size_t)(n - i) * sizeof *x);
        m = choose(v > m, v, m);
    }
    float all = m[0];
    for (int j = 1; j < LANES; j++) all = m[j] > all ? m[j] : all;
    return all;
}

/* x = exp(scale * x - offset); returns their sum. */
INLINE float exponentials(float *x, float factor, float offset, int n)
{
    vf s = {0};
    EACH (i, n) {
        vf e = exp_of(factor * get_f32(x, i, n) - offset);
        put_f32(x, i, n, e);
        s += first_lanes(e, n - i);
    }
    return total(s);
}

static float softmax(void *out, int type, float *row, float factor, int valid, int n)
{
    float top = factor * largest(row, valid);
    float sum = exponentials(row, factor, top, valid), inverse = 1.0f / sum;
#define BODY(t)                                                                                                      \
    for (int i = 0; i < n; i += LANES)                                                                               \
        put(out, t, i, i + LANES, first_lanes(get_f32(row, i, i + LANES) * inverse, valid - i))
    FOR_TYPE(BODY)
#undef BODY
    return top + (float)exact_log(sum);
}

static void softmax_backward(void *restrict p, void *restrict ds, int type, float *restrict row, const float *restrict dp,
                             float factor, float log_sum, int valid, int n)
{
    vf s = {0};
    for (int i = 0; i < n; i += LANES) {
        vf e = first_lanes(exp_of(factor * get_f32(row, i, i + LANES) - log_sum), valid - i);
        put_f32(row, i, i + LANES, e);
        s += e * first_lanes(get_f32(dp, i, i + LANES), valid - i);
    }
    float mean = total(s);
#define BODY(t)                                                                                                    \
    for (int i = 0; i < n; i += LANES) {                                                                           \
        vf e = get_f32(row, i, i + LANES);                                                                         \
        put(p, t, i, i + LANES, e);                                                                                \
        put(ds, t, i, i + LANES, first_lanes(e * (get_f32(dp, i, i + LANES) - mean) * factor, valid - i));         \
    }
    FOR_TYPE(BODY)
#undef BODY
}

static float cross_entropy(float *logits, int target, float factor, int n)
{
    float top = largest(logits, n), aim = logits[target];
    float sum = exponentials(logits, 1.0f, top, n);
    scale(logits, factor / sum, n);
    logits[target] -= factor;
    return top - aim + (float)exact_log(sum);
}

#define ROW(name, parameters, arguments) .name = name,
#define ROW_FLOAT(name, parameters, arguments) .name = name,
const struct row_kernels ROW_KERNELS(HSTEP_ISA) = {
#include "rows.def"
};
