/* The vocabulary for AVX2, 8 lanes.
 *
 *   Needs:      AVX2 and F16C
 *   Slow:       division and square root (one per 5 to 10 cycles); vi_mul on Intel (two multiplier passes)
 *               selects (two or three micro-operations, because there are no mask registers)
 *               v*_f32 and v*_f16 pairs (shuffles across the two 128-bit halves)
 *               v_gather (one load per lane, more if the microcode guards against Downfall)
 *   Not used:   fused multiply-add (another rounding); rcpps and rsqrtps (estimates) */
#ifndef HSTEP_VEC_AVX2_H
#define HSTEP_VEC_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "base/inline.h"

#define HSTEP_VEC_NAME "avx2"
#define VL 8

typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm; /* all bits of a lane, or none */
typedef struct { __m256d quarter[4]; } va;

#define V_OP static inline __attribute__((HSTEP_ALWAYS_INLINE, unused))
#define V_TABLE static const

V_OP vf v_set(float x) { return _mm256_set1_ps(x); }
V_OP vi vi_set(uint32_t x) { return _mm256_set1_epi32((int)x); }
V_OP vi v_bits(vf x) { return _mm256_castps_si256(x); }
V_OP vf v_from_bits(vi i) { return _mm256_castsi256_ps(i); }

V_OP vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
V_OP vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
V_OP vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
V_OP vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
V_OP vf v_div0(vf a, vf b)
{
    return _mm256_and_ps(_mm256_cmp_ps(b, _mm256_setzero_ps(), _CMP_NEQ_UQ), _mm256_div_ps(a, b));
}
V_OP vf v_sqrt(vf a) { return _mm256_sqrt_ps(a); }
/* The instructions return the second operand on NaN and equal zeros. The vocabulary's definition follows them. */
V_OP vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
V_OP vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
V_OP vf v_abs(vf a) { return _mm256_and_ps(a, v_from_bits(vi_set(0x7fffffffu))); }
V_OP vf v_neg(vf a) { return _mm256_xor_ps(a, v_from_bits(vi_set(0x80000000u))); }
/* Returns 1 with the sign of a, or +0 if a is zero or NaN. */
V_OP vf v_sign(vf a)
{
    vf one = _mm256_or_ps(_mm256_and_ps(a, v_from_bits(vi_set(0x80000000u))), v_set(1.0f));
    return _mm256_and_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_OQ), one);
}

V_OP vm v_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
V_OP vm v_lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
V_OP vm v_eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
V_OP vm vi_gt(vi a, vi b) { return v_from_bits(_mm256_cmpgt_epi32(a, b)); }
V_OP vm vi_eq(vi a, vi b) { return v_from_bits(_mm256_cmpeq_epi32(a, b)); }
V_OP vf v_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
V_OP vi vi_select(vm m, vi a, vi b) { return _mm256_blendv_epi8(b, a, v_bits(m)); }
V_OP int vm_any(vm m) { return _mm256_movemask_ps(m) != 0; }

V_OP vi v_round(vf a) { return _mm256_cvtps_epi32(a); }
V_OP vf v_from_int(vi a) { return _mm256_cvtepi32_ps(a); }

V_OP vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
V_OP vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
V_OP vi vi_mul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
/* The multiplier takes even lanes. Odd lanes are shifted down first; the high halves of their products are already in
 * place. */
V_OP vi vi_mulhi(vi a, vi b)
{
    vi even = _mm256_mul_epu32(a, b);
    vi odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}
V_OP vi vi_mul16(vi a, vi b) { return _mm256_mullo_epi16(a, b); }
V_OP vi vi_add16(vi a, vi b) { return _mm256_add_epi16(a, b); }
V_OP vi vi_min16(vi a, vi b) { return _mm256_min_epi16(a, b); }
/* Sets a bit of s in each half, because the instruction returns 0 if its second operand is 0. */
V_OP vi vi_negate16(vi a, vi s) { return _mm256_sign_epi16(a, _mm256_or_si256(s, _mm256_set1_epi16(1))); }
V_OP vi vi_join16(vi a, vi b) { return _mm256_blend_epi16(a, b, 0xAA); }
V_OP vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
V_OP vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
V_OP vi vi_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
V_OP vi vi_andnot(vi a, vi b) { return _mm256_andnot_si256(a, b); }
#define vi_shl(x, n) _mm256_slli_epi32((x), (n))
#define vi_shr(x, n) _mm256_srli_epi32((x), (n))
#define vi_sra(x, n) _mm256_srai_epi32((x), (n))
V_OP vi vi_min(vi a, vi b) { return _mm256_min_epi32(a, b); }
V_OP vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
V_OP int32_t vi_hmax(vi a)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(1, 0, 3, 2)));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, _MM_SHUFFLE(2, 3, 0, 1)));
    return _mm_cvtsi128_si32(m);
}
V_OP vi vi_iota(void) { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

V_OP vf v_load(const float *p) { return _mm256_load_ps(p); }
V_OP void v_store(float *p, vf x) { _mm256_store_ps(p, x); }
V_OP vf v_loadu(const void *p) { return _mm256_loadu_ps((const float *)p); }
V_OP void v_storeu(void *p, vf x) { _mm256_storeu_ps((float *)p, x); }
V_OP vi vi_load(const uint32_t *p) { return _mm256_load_si256((const __m256i *)p); }
V_OP void vi_store(uint32_t *p, vi x) { _mm256_store_si256((__m256i *)p, x); }
V_OP vi vi_load_u8(const void *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
/* Moves the low bytes of each 128 bits to their first word. */
V_OP void vi_store_u8(void *p, vi x)
{
    const vi bytes = _mm256_broadcastsi128_si256(_mm_setr_epi32(0x0c080400, -1, -1, -1));
    vi words = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x, bytes), _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1));
    _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(words));
}
V_OP vi vi_load_u16(const void *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
/* Moves the low words of each 128 bits to their first half. */
V_OP void vi_store_u16(void *p, vi x)
{
    const vi words = _mm256_broadcastsi128_si256(_mm_setr_epi32(0x05040100, 0x0d0c0908, -1, -1));
    vi halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x, words), 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(halves));
}
/* Moves the two bytes of each field to its lane, and back. Each 128 bits have six bytes. */
V_OP vi vi_load_u12(const char *p, int64_t i)
{
    const vi at = _mm256_setr_epi16(0x0100, -1, 0x0201, -1, 0x0403, -1, 0x0504, -1, 0x0706, -1, 0x0807, -1, 0x0a09, -1,
                                    0x0b0a, -1);
    const vi shift = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
    int32_t last;
    memcpy(&last, p + i * 6 / 8 + 8, 4);
    __m128i bytes = _mm_insert_epi32(_mm_loadl_epi64((const __m128i *)(p + i * 6 / 8)), last, 2);
    vi w = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), at);
    return _mm256_and_si256(_mm256_srlv_epi32(w, shift), vi_set(0xfff));
}
V_OP void vi_store_u12(char *p, int64_t i, vi x)
{
    const vi at = _mm256_setr_epi16(0x0100, 0x0802, 0x0a09, -1, -1, -1, -1, -1, -1, -1, -1, 0x0100, 0x0802, 0x0a09, -1,
                                    -1);
    vi w = _mm256_shuffle_epi8(_mm256_or_si256(x, _mm256_srli_epi64(x, 20)), at);
    __m128i bytes = _mm_or_si128(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
    const int32_t last = _mm_extract_epi32(bytes, 2);
    _mm_storel_epi64((__m128i *)(p + i * 6 / 8), bytes);
    memcpy(p + i * 6 / 8 + 8, &last, 4);
}

V_OP vf v_gather(const float *table, vi index) { return _mm256_i32gather_ps(table, index, 4); }
/* A permutation uses the lower three bits of an index. The fourth, moved to the sign, chooses the half of the table. */
V_OP vf v_lookup16(const float *table, vi index)
{
    vf low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
    vf high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, v_from_bits(_mm256_slli_epi32(index, 28)));
}
/* Takes maxima and transposes at once. Every step halves the rest of each row and puts two rows side by side. */
V_OP vi vi_hmax_rows(const uint32_t *p)
{
    vi quad[2];
    for (int q = 0; q < 2; q++) {
        vi a = vi_load(p + (4 * q + 0) * VL), b = vi_load(p + (4 * q + 1) * VL);
        vi c = vi_load(p + (4 * q + 2) * VL), d = vi_load(p + (4 * q + 3) * VL);
        vi ab = vi_max(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        vi cd = vi_max(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        quad[q] = vi_max(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    }
    return vi_max(_mm256_permute2x128_si256(quad[0], quad[1], 0x20), _mm256_permute2x128_si256(quad[0], quad[1], 0x31));
}

V_OP vi v_load_integers(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
V_OP void v_store_integers(void *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }

/* Shuffles stay within 128 bits, so the halves are exchanged first. */
V_OP void v_split(vf low, vf high, vf *e, vf *o)
{
    vf first = _mm256_permute2f128_ps(low, high, 0x20), second = _mm256_permute2f128_ps(low, high, 0x31);
    *e = _mm256_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0));
    *o = _mm256_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1));
}

V_OP void vp_load_f32(const void *p, vf *e, vf *o) { v_split(v_loadu(p), v_loadu((const char *)p + 32), e, o); }
V_OP void vp_store_f32(void *p, vf e, vf o)
{
    vf first = _mm256_unpacklo_ps(e, o), second = _mm256_unpackhi_ps(e, o);
    v_storeu(p, _mm256_permute2f128_ps(first, second, 0x20));
    v_storeu((char *)p + 32, _mm256_permute2f128_ps(first, second, 0x31));
}

V_OP void vp_load_hi16(const void *p, vi *e, vi *o)
{
    vi w = v_load_integers(p);
    *e = _mm256_slli_epi32(w, 16);
    *o = _mm256_and_si256(w, vi_set(0xffff0000u));
}
V_OP void vp_store_hi16(void *p, vi e, vi o)
{
    v_store_integers(p, _mm256_blend_epi16(_mm256_srli_epi32(e, 16), o, 0xAA));
}
V_OP void vp_store_hi16_normal(void *p, vi e, vi o)
{
    vi codes = _mm256_blend_epi16(_mm256_srli_epi32(e, 16), o, 0xAA);
    vi exponent = _mm256_and_si256(codes, vi_set(0x7f807f80u));
    v_store_integers(p, _mm256_andnot_si256(_mm256_cmpeq_epi16(exponent, _mm256_setzero_si256()), codes));
}
V_OP void vp_load_s16(const void *p, vi *e, vi *o)
{
    vi w = v_load_integers(p);
    *e = _mm256_srai_epi32(_mm256_slli_epi32(w, 16), 16);
    *o = _mm256_srai_epi32(w, 16);
}
V_OP void vp_store_16(void *p, vi e, vi o)
{
    v_store_integers(p, _mm256_blend_epi16(e, _mm256_slli_epi32(o, 16), 0xAA));
}
V_OP void vp_load_s8(const void *p, vi *e, vi *o)
{
    vi w = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
    *e = _mm256_srai_epi32(_mm256_slli_epi32(w, 16), 16);
    *o = _mm256_srai_epi32(w, 16);
}
V_OP void vp_load_u8(const void *p, vi *e, vi *o)
{
    vi w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
    *e = _mm256_and_si256(w, vi_set(0xffffu));
    *o = _mm256_srli_epi32(w, 16);
}
/* The pack saturates, so all but the low bytes is cleared first. */
V_OP void vp_store_8(void *p, vi e, vi o)
{
    vi w = _mm256_blend_epi16(e, _mm256_slli_epi32(o, 16), 0xAA);
    w = _mm256_and_si256(w, vi_set(0x00ff00ffu));
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

V_OP vi vh_load_u8(const void *p) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)); }
V_OP void vh_store_s8(void *p, vi x)
{
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
V_OP void vh_store_u8(void *p, vi x)
{
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

V_OP void vp_load_f16(const void *p, vf *e, vf *o)
{
    vf low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    vf high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const char *)p + 16)));
    v_split(low, high, e, o);
}
V_OP void vp_store_f16(void *p, vf e, vf o)
{
    __m128i even = _mm256_cvtps_ph(e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m128i odd = _mm256_cvtps_ph(o, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128((__m128i *)p, _mm_unpacklo_epi16(even, odd));
    _mm_storeu_si128((__m128i *)((char *)p + 16), _mm_unpackhi_epi16(even, odd));
}

V_OP __m256d v_low_double(vf x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
V_OP __m256d v_high_double(vf x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }

V_OP va va_zero(void)
{
    __m256d zero = _mm256_setzero_pd();
    return (va){{zero, zero, zero, zero}};
}
V_OP void va_add(va *a, int part, vf x)
{
    __m256d *quarter = a->quarter + 2 * part;
    quarter[0] = _mm256_add_pd(quarter[0], v_low_double(x));
    quarter[1] = _mm256_add_pd(quarter[1], v_high_double(x));
}
V_OP void va_add_product(va *a, int part, vf x, vf y)
{
    __m256d *quarter = a->quarter + 2 * part;
    quarter[0] = _mm256_add_pd(quarter[0], _mm256_mul_pd(v_low_double(x), v_low_double(y)));
    quarter[1] = _mm256_add_pd(quarter[1], _mm256_mul_pd(v_high_double(x), v_high_double(y)));
}
V_OP void va_store(va a, double *p)
{
    for (int i = 0; i < 4; i++) _mm256_storeu_pd(p + 4 * i, a.quarter[i]);
}

#endif
