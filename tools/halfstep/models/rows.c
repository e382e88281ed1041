#include "rows.h"

#include <math.h>
#include <string.h>

#include "llama.h"

/* The build may compile these loops for several instruction sets at once, for example
 * -DROW_CLONES='__attribute__((target_clones("arch=x86-64-v4","arch=x86-64-v3","default")))'. */
#ifndef ROW_CLONES
#define ROW_CLONES
#endif

enum { LANES = 16 };

#define EACH(j) for (int j = 0; j < LANES; j++)

static inline float total(const float s[LANES])
{
    float a[8], b[4];
    for (int j = 0; j < 8; j++) a[j] = s[j] + s[j + 8];
    for (int j = 0; j < 4; j++) b[j] = a[j] + a[j + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

static inline uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* Where rounding could reach infinity, and for Inf and NaN, the high half is taken as it is. */
static inline uint16_t to_bf16(float x)
{
    uint32_t u = bits_of(x), magnitude = u & 0x7FFFFFFF;
    uint32_t rounded = u + 0x7FFF + (u >> 16 & 1);
    rounded = magnitude > 0x7F7F7FFF ? u : rounded;
    return (uint16_t)((magnitude > 0x7F800000 ? rounded | 0x400000 : rounded) >> 16);
}

static inline uint16_t to_f16(float x)
{
    uint32_t u = bits_of(x), magnitude = u & 0x7FFFFFFF, sign = u >> 16 & 0x8000, half;
    if (magnitude > 0x7F800000) half = 0x7E00;
    else if (magnitude == 0x7F800000) half = 0x7C00;
    else if (magnitude >= 0x477FE000) half = 0x7BFF;
    else if (magnitude >= 0x38800000) {
        uint32_t rounded = magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000;
        half = rounded >> 13;
    } else {
        /* 0.5 is 2^24 subnormal steps; adding it lets the fp32 addition round. */
        half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    }
    return (uint16_t)(sign | half);
}

static inline float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7FFF;
    if (magnitude >= 0x7C00) return float_of(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
    if (magnitude >= 0x400) return float_of(sign | ((magnitude << 13) + 0x38000000));
    return float_of(sign | bits_of((float)magnitude * 0x1p-24f));
}

ROW_CLONES
void row_load(float *restrict out, const void *restrict in, int type, int n)
{
    if (type == LM_F32) {
        memcpy(out, in, (size_t)n * sizeof *out);
    } else if (type == LM_BF16) {
        const uint16_t *stored = in;
        for (int i = 0; i < n; i++) out[i] = float_of((uint32_t)stored[i] << 16);
    } else {
        const uint16_t *stored = in;
        for (int i = 0; i < n; i++) out[i] = from_f16(stored[i]);
    }
}

ROW_CLONES
void row_store(void *restrict out, int type, const float *restrict in, int n)
{
    if (type == LM_F32) {
        memcpy(out, in, (size_t)n * sizeof *in);
    } else if (type == LM_BF16) {
        uint16_t *stored = out;
        for (int i = 0; i < n; i++) stored[i] = to_bf16(in[i]);
    } else {
        uint16_t *stored = out;
        for (int i = 0; i < n; i++) stored[i] = to_f16(in[i]);
    }
}

ROW_CLONES
void row_add(float *out, const float *a, const float *b, int n)
{
    for (int i = 0; i < n; i++) out[i] = a[i] + b[i];
}

ROW_CLONES
void row_add_to(float *restrict sum, const float *restrict in, int n)
{
    for (int i = 0; i < n; i++) sum[i] += in[i];
}

ROW_CLONES
void row_scale(float *row, float factor, int n)
{
    for (int i = 0; i < n; i++) row[i] *= factor;
}

static inline float dot(const float *a, const float *b, int n)
{
    float s[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) EACH(j) s[j] += a[i + j] * b[i + j];
    for (int j = 0; i + j < n; j++) s[j] += a[i + j] * b[i + j];
    return total(s);
}

ROW_CLONES
float row_dot(const void *restrict weights, int type, const float *restrict x, int n)
{
    if (type == LM_F32) return dot(weights, x, n);
    const uint16_t *w = weights;
    float s[LANES] = {0};
    int i = 0;
    if (type == LM_BF16) {
        for (; i + LANES <= n; i += LANES) EACH(j) s[j] += float_of((uint32_t)w[i + j] << 16) * x[i + j];
        for (int j = 0; i + j < n; j++) s[j] += float_of((uint32_t)w[i + j] << 16) * x[i + j];
    } else {
        for (; i + LANES <= n; i += LANES) EACH(j) s[j] += from_f16(w[i + j]) * x[i + j];
        for (int j = 0; i + j < n; j++) s[j] += from_f16(w[i + j]) * x[i + j];
    }
    return total(s);
}

ROW_CLONES
float row_norm(float *restrict out, const float *restrict x, const float *restrict gain, float eps, int n)
{
    float r = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * r * gain[i];
    return r;
}

ROW_CLONES
void row_norm_again(float *restrict out, const float *restrict x, const float *restrict gain, float r, int n)
{
    for (int i = 0; i < n; i++) out[i] = x[i] * r * gain[i];
}

ROW_CLONES
void row_norm_backward(float *restrict dx, float *restrict dgain, const float *restrict dout, const float *restrict x,
                       const float *restrict gain, float r, int n)
{
    float s[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) EACH(j) s[j] += dout[i + j] * gain[i + j] * x[i + j];
    for (int j = 0; i + j < n; j++) s[j] += dout[i + j] * gain[i + j] * x[i + j];
    float c = total(s) * r * r * r / (float)n;
    for (i = 0; i < n; i++) {
        dgain[i] += dout[i] * (x[i] * r);
        dx[i] += dout[i] * gain[i] * r - x[i] * c;
    }
}

ROW_CLONES
void row_rotate(float *restrict row, const float *restrict cosine, const float *restrict sine, float direction,
                int heads, int half)
{
    for (int h = 0; h < heads; h++) {
        float *a = row + (size_t)h * 2 * (size_t)half, *b = a + half;
        for (int i = 0; i < half; i++) {
            float x = a[i], y = b[i], s = direction * sine[i];
            a[i] = x * cosine[i] - y * s;
            b[i] = y * cosine[i] + x * s;
        }
    }
}

/* exp to about 2 ulp; below -87 it stays at exp(-87). NaN stays NaN. */
static inline float exp_of(float x)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float t = x * 1.44269504f + shift;
    float n = t - shift;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * float_of((bits_of(t) - 0x4B400000u + 127u) << 23);
}

ROW_CLONES
void row_swiglu(float *restrict out, const float *restrict gate, const float *restrict up, int n)
{
    for (int i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exp_of(-gate[i])) * up[i];
}

ROW_CLONES
void row_swiglu_backward(float *restrict out, float *restrict dgate, float *restrict dup, const float *restrict dout,
                         const float *restrict gate, const float *restrict up, int n)
{
    for (int i = 0; i < n; i++) {
        float g = gate[i], s = 1.0f / (1.0f + exp_of(-g)), silu = g * s, d = dout[i], u = up[i];
        out[i] = silu * u;
        dup[i] = d * silu;
        dgate[i] = d * u * (s + silu * (1.0f - s));
    }
}

/* x = exp(scale * x - offset); returns their sum. */
static inline float exponentials(float *x, float scale, float offset, int n)
{
    float s[LANES] = {0};
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        EACH(j)
        {
            float e = exp_of(scale * x[i + j] - offset);
            x[i + j] = e;
            s[j] += e;
        }
    }
    for (int j = 0; i + j < n; j++) {
        x[i + j] = exp_of(scale * x[i + j] - offset);
        s[j] += x[i + j];
    }
    return total(s);
}

static inline float largest(const float *x, int n)
{
    float m[LANES];
    EACH(j) m[j] = x[0];
    int i = 0;
    for (; i + LANES <= n; i += LANES) EACH(j) m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
    for (int j = 0; i + j < n; j++) m[j] = x[i + j] > m[j] ? x[i + j] : m[j];
    float all = m[0];
    EACH(j) all = m[j] > all ? m[j] : all;
    return all;
}

ROW_CLONES
float row_softmax(float *row, float scale, int n)
{
    float top = scale * largest(row, n);
    float sum = exponentials(row, scale, top, n), inverse = 1.0f / sum;
    for (int i = 0; i < n; i++) row[i] *= inverse;
    return top + (float)exact_log(sum);
}

ROW_CLONES
void row_softmax_again(float *row, float scale, float log_sum, int n)
{
    for (int i = 0; i < n; i++) row[i] = exp_of(scale * row[i] - log_sum);
}

ROW_CLONES
void row_softmax_backward(float *restrict dp, const float *restrict p, float scale, int n)
{
    float mean = dot(p, dp, n);
    for (int i = 0; i < n; i++) dp[i] = p[i] * (dp[i] - mean) * scale;
}

ROW_CLONES
float row_cross_entropy(float *logits, int target, float factor, int n)
{
    float top = largest(logits, n), aim = logits[target];
    float sum = exponentials(logits, 1.0f, top, n), inverse = factor / sum;
    for (int i = 0; i < n; i++) logits[i] *= inverse;
    logits[target] -= factor;
    return top - aim + (float)exact_log(sum);
}

double exact_log(double x)
{
    if (!(x > 0.0) || x > 1.7e308) return x > 0.0 ? x : x == 0.0 ? -HUGE_VAL : (x - x) / (x - x);
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    int exponent = (int)(u >> 52) - 1023;
    u = (u & UINT64_C(0xFFFFFFFFFFFFF)) | UINT64_C(0x3FF0000000000000);
    double m;
    memcpy(&m, &u, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    static const double series[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                                    1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
    double s = (m - 1.0) / (m + 1.0), q = s * s, p = 1.0 / 23;
    for (size_t i = 0; i < sizeof series / sizeof *series; i++) p = p * q + series[i];
    return (double)exponent * 0.6931471805599453 + 2.0 * s * p;
}

double exact_exp(double x)
{
    if (x < -700.0) return 0.0;
    if (x > 700.0) x = 700.0;
    double n = (double)(int64_t)(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
    double r = x - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10, p = 1.0;
    for (int k = 18; k >= 1; k--) p = 1.0 + p * r / (double)k;
    uint64_t u = (uint64_t)(1023 + (int64_t)n) << 52;
    double scale;
    memcpy(&scale, &u, sizeof scale);
    return p * scale;
}

void exact_sincos(double x, double *sine, double *cosine)
{
    int64_t n = (int64_t)(x * 0.6366197723675814 + (x < 0.0 ? -0.5 : 0.5));
    double r = x - (double)n * 1.57079632673412561417 - (double)n * 6.07710050650619224932e-11, q = r * r;
    double s = 1.0, c = 1.0;
    for (int k = 20; k >= 2; k -= 2) {
        s = 1.0 - s * q / (double)(k * (k + 1));
        c = 1.0 - c * q / (double)(k * (k - 1));
    }
    s *= r;
    switch (n & 3) {
    case 0: *sine = s, *cosine = c; break;
    case 1: *sine = c, *cosine = -s; break;
    case 2: *sine = -s, *cosine = -c; break;
    default: *sine = -c, *cosine = s; break;
    }
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

uint64_t hash_counters(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t step = UINT64_C(0x9E3779B97F4A7C15);
    uint64_t h = mix(seed + step);
    h = mix((h ^ a) + step);
    h = mix((h ^ b) + step);
    return mix((h ^ c) + step);
}
