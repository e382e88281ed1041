/* The vocabulary for AVX-512, 16 lanes.
 *
 *   Needs:      F, BW, DQ, VL, and F16C by name (its conversions at this width belong to F)
 *   Slow:       division and square root (one per 10 to 24 cycles); vi_mul on Intel (two multiplier passes)
 *               v*_f32 and v*_f16 pairs (a cross-lane permutation per vector; 16-bit pairs take a shift or a mask)
 *               v_gather (one load per lane)
 *   Not used:   AVX512-BF16 (its conversion flushes subnormals); vrcp14 and vrsqrt14 (estimates)
 *               fused multiply-add (another rounding); embedded rounding (the step sets MXCSR once)
 *               VBMI and VBMI2 (they save at most one shift in byte loads, and the first processors lack them) */
#ifndef HSTEP_VEC_AVX512_H
#define HSTEP_VEC_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#include "base/inline.h"

#define HSTEP_VEC_NAME "avx512"
#define VL 16

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;
typedef struct { __m512d half[2]; } va;

#define V_OP static inline __attribute__((HSTEP_ALWAYS_INLINE, unused))
#define V_TABLE static const

/* The mask of the odd 16-bit elements of a vector. */
#define V_ODD16 ((__mmask32)0xAAAAAAAAu)

V_OP vf v_set(float x) { return _mm512_set1_ps(x); }
V_OP vi vi_set(uint32_t x) { return _mm512_set1_epi32((int)x); }
V_OP vi v_bits(vf x) { return _mm512_castps_si512(x); }
V_OP vf v_from_bits(vi i) { return _mm512_castsi512_ps(i); }

V_OP vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
V_OP vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
V_OP vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
V_OP vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
V_OP vf v_div0(vf a, vf b)
{
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(b, _mm512_setzero_ps(), _CMP_NEQ_UQ), a, b);
}
V_OP vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }
/* The instructions return the second operand on NaN and equal zeros. The vocabulary's definition follows them. */
V_OP vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
V_OP vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
V_OP vf v_abs(vf a) { return v_from_bits(_mm512_and_si512(v_bits(a), vi_set(0x7fffffffu))); }
V_OP vf v_neg(vf a) { return v_from_bits(_mm512_xor_si512(v_bits(a), vi_set(0x80000000u))); }
/* Returns 1 with the sign of a, or +0 if a is zero or NaN. The ternary logic is (a & sign) | one. */
V_OP vf v_sign(vf a)
{
    __mmask16 nonzero = _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    return v_from_bits(
        _mm512_maskz_ternarylogic_epi32(nonzero, v_bits(a), vi_set(0x80000000u), vi_set(0x3f800000u), 0xEA));
}

V_OP vm v_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
V_OP vm v_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
V_OP vm v_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
V_OP vm vi_gt(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b); }
V_OP vm vi_eq(vi a, vi b) { return _mm512_cmpeq_epi32_mask(a, b); }
V_OP vf v_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
V_OP vi vi_select(vm m, vi a, vi b) { return _mm512_mask_blend_epi32(m, b, a); }
V_OP int vm_any(vm m) { return m != 0; }

V_OP vi v_round(vf a) { return _mm512_cvtps_epi32(a); }
V_OP vf v_from_int(vi a) { return _mm512_cvtepi32_ps(a); }

V_OP vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
V_OP vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
V_OP vi vi_mul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
/* The multiplier takes even lanes. Odd lanes are shifted down first; the high halves of their products are already in
 * place. */
V_OP vi vi_mulhi(vi a, vi b)
{
    vi even = _mm512_mul_epu32(a, b);
    vi odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    return _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}
V_OP vi vi_mul16(vi a, vi b) { return _mm512_mullo_epi16(a, b); }
V_OP vi vi_add16(vi a, vi b) { return _mm512_add_epi16(a, b); }
V_OP vi vi_min16(vi a, vi b) { return _mm512_min_epi16(a, b); }
V_OP vi vi_negate16(vi a, vi s)
{
    return _mm512_mask_sub_epi16(a, _mm512_movepi16_mask(s), _mm512_setzero_si512(), a);
}
V_OP vi vi_join16(vi a, vi b) { return _mm512_mask_blend_epi16(V_ODD16, a, b); }
V_OP vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
V_OP vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
V_OP vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
V_OP vi vi_andnot(vi a, vi b) { return _mm512_andnot_si512(a, b); }
#define vi_shl(x, n) _mm512_slli_epi32((x), (n))
#define vi_shr(x, n) _mm512_srli_epi32((x), (n))
#define vi_sra(x, n) _mm512_srai_epi32((x), (n))
V_OP vi vi_min(vi a, vi b) { return _mm512_min_epi32(a, b); }
V_OP vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
V_OP int32_t vi_hmax(vi a) { return _mm512_reduce_max_epi32(a); }
V_OP vi vi_iota(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

V_OP vf v_load(const float *p) { return _mm512_load_ps(p); }
V_OP void v_store(float *p, vf x) { _mm512_store_ps(p, x); }
V_OP vf v_loadu(const void *p) { return _mm512_loadu_ps(p); }
V_OP void v_storeu(void *p, vf x) { _mm512_storeu_ps(p, x); }
V_OP vi vi_load(const uint32_t *p) { return _mm512_load_si512(p); }
V_OP void vi_store(uint32_t *p, vi x) { _mm512_store_si512(p, x); }
V_OP vi vi_load_u8(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }
V_OP void vi_store_u8(void *p, vi x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(x)); }
V_OP vi vi_load_u16(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
V_OP void vi_store_u16(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x)); }
/* Moves three 16-bit words to each 128 bits, then the two bytes of each field to its lane, and back. */
V_OP vi vi_load_u12(const char *p, int64_t i)
{
    const vi words = _mm512_setr_epi64(0x000200010000, 0, 0x000500040003, 0, 0x000800070006, 0, 0x000b000a0009, 0);
    const vi at = _mm512_broadcast_i32x4(_mm_setr_epi16(0x0100, -1, 0x0201, -1, 0x0403, -1, 0x0504, -1));
    const vi shift = _mm512_set1_epi64((int64_t)4 << 32);
    vi w = _mm512_maskz_loadu_epi32(0x3f, p + i * 6 / 8);
    w = _mm512_shuffle_epi8(_mm512_permutexvar_epi16(words, w), at);
    return _mm512_and_si512(_mm512_srlv_epi32(w, shift), vi_set(0xfff));
}
V_OP void vi_store_u12(char *p, int64_t i, vi x)
{
    const vi at = _mm512_broadcast_i32x4(_mm_setr_epi16(0x0100, 0x0802, 0x0a09, -1, -1, -1, -1, -1));
    const vi words = _mm512_castsi256_si512(_mm256_setr_epi16(0, 1, 2, 8, 9, 10, 16, 17, 18, 24, 25, 26, 0, 0, 0, 0));
    vi w = _mm512_shuffle_epi8(_mm512_or_si512(x, _mm512_srli_epi64(x, 20)), at);
    _mm512_mask_storeu_epi32(p + i * 6 / 8, 0x3f, _mm512_permutexvar_epi16(words, w));
}

V_OP vf v_gather(const float *table, vi index) { return _mm512_i32gather_ps(index, table, 4); }
V_OP vf v_lookup16(const float *table, vi index) { return _mm512_permutexvar_ps(index, _mm512_loadu_ps(table)); }
/* Reduces by a transposing tree. Each step halves the vectors and doubles the rows in them. */
V_OP vi vi_hmax_rows(const uint32_t *p)
{
    vi quad[4], half[2];
    for (int q = 0; q < 4; q++) {
        vi a = vi_load(p + (4 * q + 0) * VL), b = vi_load(p + (4 * q + 1) * VL);
        vi c = vi_load(p + (4 * q + 2) * VL), d = vi_load(p + (4 * q + 3) * VL);
        vi ab = vi_max(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        vi cd = vi_max(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        quad[q] = vi_max(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    }
    for (int h = 0; h < 2; h++)
        half[h] = vi_max(_mm512_shuffle_i32x4(quad[2 * h], quad[2 * h + 1], 0x88),
                         _mm512_shuffle_i32x4(quad[2 * h], quad[2 * h + 1], 0xDD));
    return vi_max(_mm512_shuffle_i32x4(half[0], half[1], 0x88), _mm512_shuffle_i32x4(half[0], half[1], 0xDD));
}

/* Uses one two-source permutation per result, which is fewer instructions than any chain of in-lane shuffles. */
V_OP void v_split(vf low, vf high, vf *e, vf *o)
{
    const vi even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const vi odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    *e = _mm512_permutex2var_ps(low, even, high);
    *o = _mm512_permutex2var_ps(low, odd, high);
}
V_OP vf v_join_low(vf e, vf o)
{
    const vi order = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(e, order, o);
}
V_OP vf v_join_high(vf e, vf o)
{
    const vi order = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(e, order, o);
}

V_OP void vp_load_f32(const void *p, vf *e, vf *o)
{
    v_split(_mm512_loadu_ps(p), _mm512_loadu_ps((const char *)p + 64), e, o);
}
V_OP void vp_store_f32(void *p, vf e, vf o)
{
    _mm512_storeu_ps(p, v_join_low(e, o));
    _mm512_storeu_ps((char *)p + 64, v_join_high(e, o));
}

V_OP void vp_load_hi16(const void *p, vi *e, vi *o)
{
    vi w = _mm512_loadu_si512(p);
    *e = _mm512_slli_epi32(w, 16);
    *o = _mm512_and_si512(w, vi_set(0xffff0000u));
}
V_OP void vp_store_hi16(void *p, vi e, vi o)
{
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(V_ODD16, _mm512_srli_epi32(e, 16), o));
}
V_OP void vp_store_hi16_normal(void *p, vi e, vi o)
{
    __m512i codes = _mm512_mask_blend_epi16(V_ODD16, _mm512_srli_epi32(e, 16), o);
    __mmask32 normal = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(0x7f80));
    _mm512_storeu_si512(p, _mm512_maskz_mov_epi16(normal, codes));
}
V_OP void vp_load_s16(const void *p, vi *e, vi *o)
{
    vi w = _mm512_loadu_si512(p);
    *e = _mm512_srai_epi32(_mm512_slli_epi32(w, 16), 16);
    *o = _mm512_srai_epi32(w, 16);
}
V_OP void vp_store_16(void *p, vi e, vi o)
{
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(V_ODD16, e, _mm512_slli_epi32(o, 16)));
}
V_OP void vp_load_s8(const void *p, vi *e, vi *o)
{
    vi w = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
    *e = _mm512_srai_epi32(_mm512_slli_epi32(w, 16), 16);
    *o = _mm512_srai_epi32(w, 16);
}
V_OP void vp_load_u8(const void *p, vi *e, vi *o)
{
    vi w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p));
    *e = _mm512_and_si512(w, vi_set(0xffffu));
    *o = _mm512_srli_epi32(w, 16);
}
V_OP void vp_store_8(void *p, vi e, vi o)
{
    vi w = _mm512_mask_blend_epi16(V_ODD16, e, _mm512_slli_epi32(o, 16));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi16_epi8(w));
}

V_OP vi vh_load_u8(const void *p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)); }
V_OP void vh_store_s8(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtsepi16_epi8(x)); }
V_OP void vh_store_u8(void *p, vi x)
{
    vi positive = _mm512_max_epi16(x, _mm512_setzero_si512());
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtusepi16_epi8(positive));
}

/* Converts in memory order first. The conversion can read memory, and the permutation cannot separate 16-bit halves. */
V_OP void vp_load_f16(const void *p, vf *e, vf *o)
{
    vf low = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
    vf high = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const char *)p + 32)));
    v_split(low, high, e, o);
}
V_OP void vp_store_f16(void *p, vf e, vf o)
{
    __m256i low = _mm512_cvtps_ph(v_join_low(e, o), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i high = _mm512_cvtps_ph(v_join_high(e, o), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256((__m256i *)p, low);
    _mm256_storeu_si256((__m256i *)((char *)p + 32), high);
}

V_OP __m512d v_low_double(vf x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }
V_OP __m512d v_high_double(vf x) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }

V_OP va va_zero(void) { return (va){{_mm512_setzero_pd(), _mm512_setzero_pd()}}; }
V_OP void va_add(va *a, int part, vf x)
{
    (void)part;
    a->half[0] = _mm512_add_pd(a->half[0], v_low_double(x));
    a->half[1] = _mm512_add_pd(a->half[1], v_high_double(x));
}
V_OP void va_add_product(va *a, int part, vf x, vf y)
{
    (void)part;
    a->half[0] = _mm512_add_pd(a->half[0], _mm512_mul_pd(v_low_double(x), v_low_double(y)));
    a->half[1] = _mm512_add_pd(a->half[1], _mm512_mul_pd(v_high_double(x), v_high_double(y)));
}
V_OP void va_store(va a, double *p)
{
    _mm512_storeu_pd(p, a.half[0]);
    _mm512_storeu_pd(p + 8, a.half[1]);
}

#endif
