/* The loops of rows.h in the library's vector vocabulary (src/vec/README.md). Compiled once for each instruction set,
 * with the same bits from all of them. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include HSTEP_VEC_HEADER

#include "trainer/products/row_kernels.h"
#include "trainer/models/llama.h"

/* 16 consecutive values, the same number for all instruction sets. */
enum { LANES = ROW_LANES, PARTS = LANES / VL };
typedef struct {
    vf part[PARTS];
} lanes;

#define EACH_PART(k) for (int k = 0; k < PARTS; k++)
#define EACH(i, n) for (int i = 0; i < (n); i += LANES)

/* ---- values ---- */

V_OP lanes splat(float x)
{
    lanes out;
    EACH_PART(k) out.part[k] = v_set(x);
    return out;
}

#define LANEWISE(name)                                           \
    V_OP lanes l_##name(lanes a, lanes b)                        \
    {                                                            \
        EACH_PART(k) a.part[k] = v_##name(a.part[k], b.part[k]); \
        return a;                                                \
    }
LANEWISE(add)
LANEWISE(sub)
LANEWISE(mul)
LANEWISE(div)
LANEWISE(max)
LANEWISE(min)

V_OP lanes l_mul_add(lanes a, lanes b, lanes c) { return l_add(l_mul(a, b), c); }

/* Sets the lanes from `n` on to 0. */
V_OP lanes first_lanes(lanes x, int n)
{
    if (n >= LANES) return x;
    EACH_PART(k)
    {
        vm in = vi_gt(vi_set((uint32_t)(n - k * VL)), vi_iota());
        x.part[k] = v_select(in, x.part[k], v_set(0.0f));
    }
    return x;
}

V_OP void spread(float out[LANES], lanes x) { EACH_PART(k) v_storeu(out + k * VL, x.part[k]); }

/* Returns the sum of the lanes, added as a tree. */
V_OP float total(lanes x)
{
    float s[LANES], a[8], b[4];
    spread(s, x);
    for (int j = 0; j < 8; j++) a[j] = s[j] + s[j + 8];
    for (int j = 0; j < 4; j++) b[j] = a[j] + a[j + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* ---- memory ---- */

/* Rounds to nearest even. Truncates Inf, NaN, and values that rounding could turn into infinity. NaN becomes quiet. */
V_OP vi to_bf16(vf x)
{
    vi u = v_bits(x), magnitude = vi_and(u, vi_set(0x7FFFFFFF));
    vi rounded = vi_add(vi_add(u, vi_set(0x7FFF)), vi_and(vi_shr(u, 16), vi_set(1)));
    rounded = vi_select(vi_gt(magnitude, vi_set(0x7F7F7FFF)), u, rounded);
    rounded = vi_select(vi_gt(magnitude, vi_set(0x7F800000)), vi_or(rounded, vi_set(0x400000)), rounded);
    return vi_shr(rounded, 16);
}

V_OP vi to_f16(vf x)
{
    vi u = v_bits(x), magnitude = vi_and(u, vi_set(0x7FFFFFFF));
    /* 0.5 is 2^24 subnormal steps; adding it lets the fp32 addition round. */
    vi small = vi_sub(v_bits(v_add(v_from_bits(magnitude), v_set(0.5f))), vi_set(0x3F000000));
    vi half = vi_add(vi_add(magnitude, vi_set(0xFFF)), vi_and(vi_shr(magnitude, 13), vi_set(1)));
    half = vi_shr(vi_sub(half, vi_set(0x38000000)), 13);
    half = vi_select(vi_gt(vi_set(0x38800000), magnitude), small, half);
    half = vi_select(vi_gt(magnitude, vi_set(0x477FDFFF)), vi_set(0x7BFF), half);
    half = vi_select(vi_eq(magnitude, vi_set(0x7F800000)), vi_set(0x7C00), half);
    half = vi_select(vi_gt(magnitude, vi_set(0x7F800000)), vi_set(0x7E00), half);
    return vi_or(vi_and(vi_shr(u, 16), vi_set(0x8000)), half);
}

V_OP vf from_f16(vi h)
{
    vi sign = vi_shl(vi_and(h, vi_set(0x8000)), 16), magnitude = vi_and(h, vi_set(0x7FFF));
    vi small = v_bits(v_mul(v_from_int(magnitude), v_set(0x1p-24f)));
    vi all = vi_add(vi_shl(magnitude, 13), vi_set(0x38000000));
    all = vi_select(vi_gt(vi_set(0x400), magnitude), small, all);
    vi special = vi_or(vi_set(0x7F800000), vi_shl(vi_and(magnitude, vi_set(0x3FF)), 13));
    all = vi_select(vi_gt(magnitude, vi_set(0x7BFF)), special, all);
    return v_from_bits(vi_or(sign, all));
}

V_OP lanes get_whole(const void *row, int type, int i)
{
    lanes x;
    EACH_PART(k)
    {
        int at = i + k * VL;
        if (type == LM_F32) x.part[k] = v_loadu((const float *)row + at);
        else if (type == LM_BF16) x.part[k] = v_from_bits(vi_shl(vi_load_u16((const uint16_t *)row + at), 16));
        else x.part[k] = from_f16(vi_load_u16((const uint16_t *)row + at));
    }
    return x;
}

V_OP void put_whole(void *row, int type, int i, lanes x)
{
    EACH_PART(k)
    {
        int at = i + k * VL;
        if (type == LM_F32) v_storeu((float *)row + at, x.part[k]);
        else if (type == LM_BF16) vi_store_u16((uint16_t *)row + at, to_bf16(x.part[k]));
        else vi_store_u16((uint16_t *)row + at, to_f16(x.part[k]));
    }
}

/* Returns the 16 values from i on of a packed row. They are in one block, and codes past the end of a row are 0. */
V_OP lanes get_packed(const void *row, int i)
{
    const char *block = (const char *)row + i / ROW_BLOCK * ROW_BLOCK_BYTES;
    uint16_t bits;
    memcpy(&bits, block, sizeof bits);
    const vf scale = v_from_bits(vi_set((uint32_t)bits << 16));
    lanes x;
    EACH_PART(k)
    {
        vi code = vi_load_u8(block + sizeof bits + i % ROW_BLOCK + k * VL);
        x.part[k] = v_mul(v_from_int(vi_sra(vi_shl(code, 24), 24)), scale);
    }
    return x;
}

/* Returns the 16 values from i on, with 0 past the end of a row of n. */
V_OP lanes get(const void *row, int type, int i, int n)
{
    if (type == LM_PACKED) return get_packed(row, i);
    if (i + LANES <= n) return get_whole(row, type, i);
    char rest[LANES * sizeof(float)] = {0};
    size_t size = type == LM_F32 ? 4 : 2;
    memcpy(rest, (const char *)row + (size_t)i * size, (size_t)(n - i) * size);
    return get_whole(rest, type, 0);
}

V_OP void put(void *row, int type, int i, int n, lanes x)
{
    if (i + LANES <= n) {
        put_whole(row, type, i, x);
        return;
    }
    char rest[LANES * sizeof(float)];
    size_t size = type == LM_F32 ? 4 : 2;
    put_whole(rest, type, 0, x);
    memcpy((char *)row + (size_t)i * size, rest, (size_t)(n - i) * size);
}

V_OP lanes get_f32(const float *row, int i, int n) { return get(row, LM_F32, i, n); }

V_OP void put_f32(float *row, int i, int n, lanes x) { put(row, LM_F32, i, n, x); }

/* Expands a loop once for each type, so that the loop itself does not branch on it. */
#define FOR_TYPE(LOOP)                 \
    switch (type) {                    \
    case LM_F32: LOOP(LM_F32) break;   \
    case LM_BF16: LOOP(LM_BF16) break; \
    default: LOOP(LM_F16) break;       \
    }

/* Does the same for the type of a weight. */
#define FOR_WEIGHT(LOOP)                   \
    if (type == LM_PACKED) LOOP(LM_PACKED) \
    else FOR_TYPE(LOOP)

/* ---- rows ---- */

static void row_load_(float *restrict out, const void *restrict in, int type, int n)
{
#define LOOP(t) EACH(i, n) put_f32(out, i, n, get(in, t, i, n));
    FOR_WEIGHT(LOOP)
#undef LOOP
}

static void row_store_(void *restrict out, int type, const float *restrict in, int n)
{
#define LOOP(t) EACH(i, n) put(out, t, i, n, get_f32(in, i, n));
    FOR_TYPE(LOOP)
#undef LOOP
}

static void row_add_(float *out, const float *a, const float *b, int n)
{
    EACH(i, n) put_f32(out, i, n, l_add(get_f32(a, i, n), get_f32(b, i, n)));
}

static void row_add_to_(float *restrict sum, const float *restrict in, int n) { row_add_(sum, sum, in, n); }

static void row_scale_(float *row, float factor, int n)
{
    EACH(i, n) put_f32(row, i, n, l_mul(get_f32(row, i, n), splat(factor)));
}

static float row_dot_(const void *restrict weights, int type, const float *restrict x, int n)
{
    lanes s = splat(0.0f);
#define LOOP(t) EACH(i, n) s = l_mul_add(get(weights, t, i, n), get_f32(x, i, n), s);
    FOR_WEIGHT(LOOP)
#undef LOOP
    return total(s);
}

static void row_norm_again_(void *restrict out, int type, const float *restrict x, const float *restrict gain, float r,
                            int n)
{
#define LOOP(t) EACH(i, n) put(out, t, i, n, l_mul(l_mul(get_f32(x, i, n), splat(r)), get_f32(gain, i, n)));
    FOR_TYPE(LOOP)
#undef LOOP
}

static float row_norm_(void *restrict out, int type, const float *restrict x, const float *restrict gain, float eps,
                       int n)
{
    float r = 1.0f / sqrtf(row_dot_(x, LM_F32, x, n) / (float)n + eps);
    row_norm_again_(out, type, x, gain, r, n);
    return r;
}

static void row_norm_backward_(float *restrict dx, float *restrict dgain, const float *restrict dout,
                               const float *restrict x, const float *restrict gain, float r, int n)
{
    lanes s = splat(0.0f);
    EACH(i, n) s = l_mul_add(l_mul(get_f32(dout, i, n), get_f32(gain, i, n)), get_f32(x, i, n), s);
    lanes c = splat(total(s) * r * r * r / (float)n), rate = splat(r);
    EACH(i, n)
    {
        lanes d = get_f32(dout, i, n), v = get_f32(x, i, n);
        put_f32(dgain, i, n, l_add(get_f32(dgain, i, n), l_mul(d, l_mul(v, rate))));
        lanes way = l_sub(l_mul(l_mul(d, get_f32(gain, i, n)), rate), l_mul(v, c));
        put_f32(dx, i, n, l_add(get_f32(dx, i, n), way));
    }
}

static void row_rotate_(void *out, int type, const float *in, const float *cosine, const float *sine, float direction,
                        int heads, int half)
{
#define LOOP(t)                                                                                  \
    EACH(i, half)                                                                                \
    {                                                                                            \
        lanes x = get_f32(in + begin, i, half), y = get_f32(in + begin + half, i, half);         \
        lanes c = get_f32(cosine, i, half), s = l_mul(splat(direction), get_f32(sine, i, half)); \
        put(out, t, begin + i, begin + half, l_sub(l_mul(x, c), l_mul(y, s)));                   \
        put(out, t, begin + half + i, begin + 2 * half, l_add(l_mul(y, c), l_mul(x, s)));        \
    }
    for (int begin = 0; begin < heads * 2 * half; begin += 2 * half) FOR_TYPE(LOOP)
#undef LOOP
}

/* Returns exp to about 2 ulp; below -87 it is exp(-87). NaN stays NaN. */
V_OP lanes exp_of(lanes x)
{
    static const float series[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                   5.0000001201e-1f};
    lanes shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    x = l_min(splat(88.0f), l_max(splat(-87.0f), x));
    lanes t = l_mul_add(x, splat(1.44269504f), shift), n = l_sub(t, shift);
    lanes r = l_add(l_sub(x, l_mul(n, splat(0.693359375f))), l_mul(n, splat(2.12194440e-4f)));
    lanes p = splat(1.9875691500e-4f);
    for (int j = 0; j < 5; j++) p = l_mul_add(p, r, splat(series[j]));
    p = l_add(l_add(l_mul(l_mul(p, r), r), r), splat(1.0f));
    EACH_PART(k)
    {
        vi power = vi_shl(vi_sub(v_bits(t.part[k]), vi_set(0x4B400000u - 127u)), 23);
        p.part[k] = v_mul(p.part[k], v_from_bits(power));
    }
    return p;
}

/* Returns 1 + exp(-x), the denominator of the logistic function. */
V_OP lanes one_and_exp_minus(lanes x)
{
    EACH_PART(k) x.part[k] = v_neg(x.part[k]);
    return l_add(splat(1.0f), exp_of(x));
}

static void row_swiglu_(void *restrict out, const void *restrict gate, const void *restrict up, int type, int n)
{
#define LOOP(t)                                                                     \
    EACH(i, n)                                                                      \
    {                                                                               \
        lanes g = get(gate, t, i, n);                                               \
        put(out, t, i, n, l_mul(l_div(g, one_and_exp_minus(g)), get(up, t, i, n))); \
    }
    FOR_TYPE(LOOP)
#undef LOOP
}

static void row_swiglu_backward_(void *restrict out, void *restrict gate, void *restrict up, const float *restrict dout,
                                 int type, int n){
#define LOOP(t)                                                                                         \
    EACH(i, n)                                                                                          \
    {                                                                                                   \
        lanes one = splat(1.0f), g = get(gate, t, i, n), u = get(up, t, i, n), d = get_f32(dout, i, n); \
        lanes s = l_div(one, one_and_exp_minus(g)), silu = l_mul(g, s);                                 \
        put(out, t, i, n, l_mul(silu, u));                                                              \
        put(up, t, i, n, l_mul(d, silu));                                                               \
        put(gate, t, i, n, l_mul(l_mul(d, u), l_mul_add(silu, l_sub(one, s), s)));                      \
    }
    FOR_TYPE(LOOP)
#undef LOOP
}

V_OP float largest(const float *x, int n)
{
    lanes m = splat(x[0]);
    int whole = n / LANES * LANES;
    EACH(i, whole) m = l_max(get_whole(x, LM_F32, i), m);
    float s[LANES], all;
    spread(s, m);
    for (int i = whole; i < n; i++) s[i - whole] = x[i] > s[i - whole] ? x[i] : s[i - whole];
    all = s[0];
    for (int j = 1; j < LANES; j++) all = s[j] > all ? s[j] : all;
    return all;
}

/* exp(factor * x - offset) */
V_OP lanes exponentials(lanes x, float factor, float offset)
{
    return exp_of(l_sub(l_mul(splat(factor), x), splat(offset)));
}

static void row_softmax_(void *out, int type, float *row, struct row_softmax *kept, float scale, int valid, int n)
{
    lanes s = splat(0.0f);
    kept->largest = scale * largest(row, valid);
    EACH(i, valid)
    {
        lanes e = first_lanes(exponentials(get_whole(row, LM_F32, i), scale, kept->largest), valid - i);
        put_whole(row, LM_F32, i, e);
        s = l_add(s, e);
    }
    kept->inverse_sum = 1.0f / total(s);
    lanes inverse = splat(kept->inverse_sum);
    int written = (valid + LANES - 1) / LANES * LANES;
#define LOOP(t)                                                                       \
    EACH(i, written) put_whole(out, t, i, l_mul(get_whole(row, LM_F32, i), inverse)); \
    for (int i = written; i < n; i += LANES) put_whole(out, t, i, splat(0.0f));
    FOR_TYPE(LOOP)
#undef LOOP
}

static void row_softmax_backward_(void *restrict p, void *restrict ds, int type, float *restrict row,
                                  const float *restrict dp, const struct row_softmax *kept, float scale, int valid,
                                  int n)
{
    lanes s = splat(0.0f), inverse = splat(kept->inverse_sum);
    EACH(i, valid)
    {
        lanes e = first_lanes(exponentials(get_whole(row, LM_F32, i), scale, kept->largest), valid - i);
        e = l_mul(e, inverse);
        put_whole(row, LM_F32, i, e);
        s = l_mul_add(e, first_lanes(get_whole(dp, LM_F32, i), valid - i), s);
    }
    lanes mean = splat(total(s)), factor = splat(scale);
    int written = (valid + LANES - 1) / LANES * LANES;
#define LOOP(t)                                                                           \
    EACH(i, written)                                                                      \
    {                                                                                     \
        lanes e = get_whole(row, LM_F32, i), way = l_sub(get_whole(dp, LM_F32, i), mean); \
        put_whole(p, t, i, e);                                                            \
        put_whole(ds, t, i, first_lanes(l_mul(l_mul(e, way), factor), valid - i));        \
    }                                                                                     \
    for (int i = written; i < n; i += LANES) {                                            \
        put_whole(p, t, i, splat(0.0f));                                                  \
        put_whole(ds, t, i, splat(0.0f));                                                 \
    }
    FOR_TYPE(LOOP)
#undef LOOP
}

static float row_cross_entropy_(float *logits, int target, float factor, int n)
{
    float top = largest(logits, n), aim = logits[target];
    lanes s = splat(0.0f);
    EACH(i, n)
    {
        lanes e = exponentials(get_f32(logits, i, n), 1.0f, top);
        put_f32(logits, i, n, e);
        s = l_add(s, first_lanes(e, n - i));
    }
    float sum = total(s);
    row_scale_(logits, factor / sum, n);
    logits[target] -= factor;
    return top - aim + (float)exact_log(sum);
}

#define ROW(name, parameters, arguments) .name = row_##name##_,
#define ROW_FLOAT ROW
const struct row_kernels ROW_KERNELS(HSTEP_ISA) = {
#include "trainer/products/rows.def"
};
