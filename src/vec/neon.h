/* The vocabulary for AArch64 Advanced SIMD, 4 lanes, little-endian.
 *
 *   Needs:      the base instruction set of ARMv8-A
 *   Slow:       division and square root (one per 10 to 20 cycles on many cores)
 *               vm_any and vi_hmax (across lanes, then to a general register)
 *               sums (the 16 accumulators take 8 registers of 2)
 *               v_gather (every index goes through a general register)
 *   Not used:   fmin and fmax (they return the number if one operand is NaN, and order zeros)
 *               fused multiply-add (another rounding); frecpe and frsqrte (estimates)
 *               half-precision arithmetic; BFCVT (it makes other NaNs)
 *
 * Shifts use the compilers' vector operators, because the intrinsics refuse a shift right by 0. */
#ifndef HSTEP_VEC_NEON_H
#define HSTEP_VEC_NEON_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "base/inline.h"

#define HSTEP_VEC_NAME "neon"
#define VL 4

typedef float32x4_t vf;
typedef uint32x4_t vi;
typedef uint32x4_t vm; /* all bits of a lane, or none */
typedef struct { float64x2_t pair[8]; } va;

#define V_OP static inline __attribute__((HSTEP_ALWAYS_INLINE, unused))
#define V_TABLE static const

V_OP vf v_set(float x) { return vdupq_n_f32(x); }
V_OP vi vi_set(uint32_t x) { return vdupq_n_u32(x); }
V_OP vi v_bits(vf x) { return vreinterpretq_u32_f32(x); }
V_OP vf v_from_bits(vi i) { return vreinterpretq_f32_u32(i); }
V_OP int32x4_t vi_signed(vi x) { return vreinterpretq_s32_u32(x); }

V_OP vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
V_OP vf v_sub(vf a, vf b) { return vsubq_f32(a, b); }
V_OP vf v_mul(vf a, vf b) { return vmulq_f32(a, b); }
V_OP vf v_div(vf a, vf b) { return vdivq_f32(a, b); }
V_OP vf v_div0(vf a, vf b) { return v_from_bits(vbicq_u32(v_bits(vdivq_f32(a, b)), vceqzq_f32(b))); }
V_OP vf v_sqrt(vf a) { return vsqrtq_f32(a); }
V_OP vf v_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
V_OP vf v_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
V_OP vf v_abs(vf a) { return v_from_bits(vbicq_u32(v_bits(a), vi_set(0x80000000u))); }
V_OP vf v_neg(vf a) { return v_from_bits(veorq_u32(v_bits(a), vi_set(0x80000000u))); }
/* Returns 1 with the sign of a, or +0 if a is zero or NaN, for which |a| > |0| is false. */
V_OP vf v_sign(vf a)
{
    vi one = vorrq_u32(vandq_u32(v_bits(a), vi_set(0x80000000u)), vi_set(0x3f800000u));
    return v_from_bits(vandq_u32(vcagtq_f32(a, v_set(0.0f)), one));
}

V_OP vm v_gt(vf a, vf b) { return vcgtq_f32(a, b); }
V_OP vm v_lt(vf a, vf b) { return vcltq_f32(a, b); }
V_OP vm v_eq(vf a, vf b) { return vceqq_f32(a, b); }
V_OP vm vi_gt(vi a, vi b) { return vcgtq_s32(vi_signed(a), vi_signed(b)); }
V_OP vm vi_eq(vi a, vi b) { return vceqq_u32(a, b); }
V_OP vf v_select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }
V_OP vi vi_select(vm m, vi a, vi b) { return vbslq_u32(m, a, b); }
V_OP int vm_any(vm m) { return vmaxvq_u32(m) != 0; }

V_OP vi v_round(vf a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
V_OP vf v_from_int(vi a) { return vcvtq_f32_s32(vi_signed(a)); }

V_OP vi vi_add(vi a, vi b) { return vaddq_u32(a, b); }
V_OP vi vi_sub(vi a, vi b) { return vsubq_u32(a, b); }
V_OP vi vi_mul(vi a, vi b) { return vmulq_u32(a, b); }
V_OP vi vi_mulhi(vi a, vi b)
{
    uint64x2_t low = vmull_u32(vget_low_u32(a), vget_low_u32(b)), high = vmull_high_u32(a, b);
    return vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
}
V_OP vi vi_mul16(vi a, vi b)
{
    return vreinterpretq_u32_u16(vmulq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
V_OP vi vi_add16(vi a, vi b)
{
    return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
}
V_OP vi vi_min16(vi a, vi b)
{
    return vreinterpretq_u32_s16(vminq_s16(vreinterpretq_s16_u32(a), vreinterpretq_s16_u32(b)));
}
V_OP vi vi_negate16(vi a, vi s)
{
    int16x8_t sign = vshrq_n_s16(vreinterpretq_s16_u32(s), 15);
    return vreinterpretq_u32_s16(vsubq_s16(veorq_s16(vreinterpretq_s16_u32(a), sign), sign));
}
V_OP vi vi_join16(vi a, vi b) { return vbslq_u32(vi_set(0xffff), a, b); }
V_OP vi vi_and(vi a, vi b) { return vandq_u32(a, b); }
V_OP vi vi_or(vi a, vi b) { return vorrq_u32(a, b); }
V_OP vi vi_xor(vi a, vi b) { return veorq_u32(a, b); }
V_OP vi vi_andnot(vi a, vi b) { return vbicq_u32(b, a); }
#define vi_shl(x, n) ((vi)((vi)(x) << (n)))
#define vi_shr(x, n) ((vi)((vi)(x) >> (n)))
#define vi_sra(x, n) ((vi)(vi_signed(x) >> (n)))
V_OP vi vi_min(vi a, vi b) { return vreinterpretq_u32_s32(vminq_s32(vi_signed(a), vi_signed(b))); }
V_OP vi vi_max(vi a, vi b) { return vreinterpretq_u32_s32(vmaxq_s32(vi_signed(a), vi_signed(b))); }
V_OP int32_t vi_hmax(vi a) { return vmaxvq_s32(vi_signed(a)); }
V_OP vi vi_iota(void)
{
    const vi lanes = {0, 1, 2, 3};
    return lanes;
}

V_OP vf v_load(const float *p) { return vld1q_f32(p); }
V_OP void v_store(float *p, vf x) { vst1q_f32(p, x); }
V_OP vi vi_load(const uint32_t *p) { return vld1q_u32(p); }
V_OP void vi_store(uint32_t *p, vi x) { vst1q_u32(p, x); }
V_OP vi vi_load_u8(const void *p)
{
    uint32_t bytes;
    memcpy(&bytes, p, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}
V_OP void vi_store_u8(void *p, vi x)
{
    uint16x4_t w = vmovn_u32(x);
    uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(w, w))), 0);
    memcpy(p, &bytes, 4);
}
V_OP vi vi_load_u16(const void *p)
{
    uint64_t words;
    memcpy(&words, p, 8);
    return vmovl_u16(vcreate_u16(words));
}
V_OP void vi_store_u16(void *p, vi x)
{
    uint64_t words = vget_lane_u64(vreinterpret_u64_u16(vmovn_u32(x)), 0);
    memcpy(p, &words, 8);
}
/* Moves the two bytes of each field to its lane, and back. */
V_OP vi vi_load_u12(const char *p, int64_t i)
{
    const uint8x16_t at = {0, 1, 16, 16, 1, 2, 16, 16, 3, 4, 16, 16, 4, 5, 16, 16};
    const int32x4_t shift = {0, -4, 0, -4};
    uint64_t bytes = 0;
    memcpy(&bytes, p + i * 6 / 8, 6);
    vi w = vreinterpretq_u32_u8(vqtbl1q_u8(vcombine_u8(vcreate_u8(bytes), vcreate_u8(0)), at));
    return vandq_u32(vshlq_u32(w, shift), vi_set(0xfff));
}
V_OP void vi_store_u12(char *p, int64_t i, vi x)
{
    const uint8x16_t at = {0, 1, 2, 8, 9, 10, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16};
    const uint64x2_t pairs = vreinterpretq_u64_u32(x), joined = vorrq_u64(pairs, vshrq_n_u64(pairs, 20));
    uint64_t bytes = vgetq_lane_u64(vreinterpretq_u64_u8(vqtbl1q_u8(vreinterpretq_u8_u64(joined), at)), 0);
    memcpy(p + i * 6 / 8, &bytes, 6);
}

V_OP vf v_gather(const float *table, vi index)
{
    vf r = vdupq_n_f32(table[vgetq_lane_u32(index, 0)]);
    r = vld1q_lane_f32(table + vgetq_lane_u32(index, 1), r, 1);
    r = vld1q_lane_f32(table + vgetq_lane_u32(index, 2), r, 2);
    return vld1q_lane_f32(table + vgetq_lane_u32(index, 3), r, 3);
}
/* The instruction looks up bytes, so index i becomes bytes 4i .. 4i + 3. */
V_OP vf v_lookup16(const float *table, vi index)
{
    const uint8_t *t = (const uint8_t *)table;
    const uint8x16x4_t bytes = {{vld1q_u8(t), vld1q_u8(t + 16), vld1q_u8(t + 32), vld1q_u8(t + 48)}};
    vi at = vmlaq_n_u32(vi_set(0x03020100u), index, 0x04040404u);
    return v_from_bits(vreinterpretq_u32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(at))));
}
/* Pairwise maxima put two rows side by side, then four. */
V_OP vi vi_hmax_rows(const uint32_t *p)
{
    int32x4_t ab = vpmaxq_s32(vi_signed(vi_load(p)), vi_signed(vi_load(p + VL)));
    int32x4_t cd = vpmaxq_s32(vi_signed(vi_load(p + 2 * VL)), vi_signed(vi_load(p + 3 * VL)));
    return vreinterpretq_u32_s32(vpmaxq_s32(ab, cd));
}

/* These access unaligned memory as bytes, which promises the compiler nothing about the address. */
V_OP vi v_load_integers(const void *p) { return vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)p)); }
V_OP void v_store_integers(void *p, vi x) { vst1q_u8((uint8_t *)p, vreinterpretq_u8_u32(x)); }
V_OP vf v_loadu(const void *p) { return v_from_bits(v_load_integers(p)); }
V_OP void v_storeu(void *p, vf x) { v_store_integers(p, v_bits(x)); }

V_OP void vp_load_f32(const void *p, vf *e, vf *o)
{
    vf low = v_loadu(p), high = v_loadu((const char *)p + 16);
    *e = vuzp1q_f32(low, high);
    *o = vuzp2q_f32(low, high);
}
V_OP void vp_store_f32(void *p, vf e, vf o)
{
    v_storeu(p, vzip1q_f32(e, o));
    v_storeu((char *)p + 16, vzip2q_f32(e, o));
}

V_OP void vp_load_hi16(const void *p, vi *e, vi *o)
{
    vi w = v_load_integers(p);
    *e = vshlq_n_u32(w, 16);
    *o = vandq_u32(w, vi_set(0xffff0000u));
}
/* Shift-and-insert keeps the other half of its first operand, so one instruction joins a pair. */
V_OP void vp_store_hi16(void *p, vi e, vi o) { v_store_integers(p, vsriq_n_u32(o, e, 16)); }
V_OP void vp_store_hi16_normal(void *p, vi e, vi o)
{
    uint16x8_t codes = vreinterpretq_u16_u32(vsriq_n_u32(o, e, 16));
    uint16x8_t normal = vtstq_u16(codes, vdupq_n_u16(0x7f80));
    v_store_integers(p, vreinterpretq_u32_u16(vandq_u16(codes, normal)));
}
V_OP void vp_load_s16(const void *p, vi *e, vi *o)
{
    vi w = v_load_integers(p);
    *e = vi_sra(vshlq_n_u32(w, 16), 16);
    *o = vi_sra(w, 16);
}
V_OP void vp_store_16(void *p, vi e, vi o) { v_store_integers(p, vsliq_n_u32(e, o, 16)); }
V_OP void vp_load_s8(const void *p, vi *e, vi *o)
{
    vi w = vreinterpretq_u32_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8((const uint8_t *)p))));
    *e = vi_sra(vshlq_n_u32(w, 16), 16);
    *o = vi_sra(w, 16);
}
V_OP void vp_load_u8(const void *p, vi *e, vi *o)
{
    vi w = vreinterpretq_u32_u16(vmovl_u8(vld1_u8((const uint8_t *)p)));
    *e = vandq_u32(w, vi_set(0xffffu));
    *o = vshrq_n_u32(w, 16);
}
V_OP void vp_store_8(void *p, vi e, vi o)
{
    vst1_u8((uint8_t *)p, vmovn_u16(vreinterpretq_u16_u32(vsliq_n_u32(e, o, 16))));
}

V_OP vi vh_load_u8(const void *p) { return vreinterpretq_u32_u16(vmovl_u8(vld1_u8((const uint8_t *)p))); }
V_OP void vh_store_s8(void *p, vi x)
{
    vst1_u8((uint8_t *)p, vreinterpret_u8_s8(vqmovn_s16(vreinterpretq_s16_u32(x))));
}
V_OP void vh_store_u8(void *p, vi x) { vst1_u8((uint8_t *)p, vqmovun_s16(vreinterpretq_s16_u32(x))); }

V_OP void vp_load_f16(const void *p, vf *e, vf *o)
{
    uint16x8_t w = vreinterpretq_u16_u32(v_load_integers(p));
    uint16x4_t low = vget_low_u16(w), high = vget_high_u16(w);
    *e = vcvt_f32_f16(vreinterpret_f16_u16(vuzp1_u16(low, high)));
    *o = vcvt_f32_f16(vreinterpret_f16_u16(vuzp2_u16(low, high)));
}
V_OP void vp_store_f16(void *p, vf e, vf o)
{
    uint16x4_t even = vreinterpret_u16_f16(vcvt_f16_f32(e)), odd = vreinterpret_u16_f16(vcvt_f16_f32(o));
    v_store_integers(p, vreinterpretq_u32_u16(vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd))));
}

V_OP float64x2_t v_low_double(vf x) { return vcvt_f64_f32(vget_low_f32(x)); }
V_OP float64x2_t v_high_double(vf x) { return vcvt_high_f64_f32(x); }

V_OP va va_zero(void)
{
    float64x2_t zero = vdupq_n_f64(0.0);
    return (va){{zero, zero, zero, zero, zero, zero, zero, zero}};
}
V_OP void va_add(va *a, int part, vf x)
{
    float64x2_t *pair = a->pair + 2 * part;
    pair[0] = vaddq_f64(pair[0], v_low_double(x));
    pair[1] = vaddq_f64(pair[1], v_high_double(x));
}
V_OP void va_add_product(va *a, int part, vf x, vf y)
{
    float64x2_t *pair = a->pair + 2 * part;
    pair[0] = vaddq_f64(pair[0], vmulq_f64(v_low_double(x), v_low_double(y)));
    pair[1] = vaddq_f64(pair[1], vmulq_f64(v_high_double(x), v_high_double(y)));
}
V_OP void va_store(va a, double *p)
{
    for (int i = 0; i < 8; i++) vst1q_f64(p + 2 * i, a.pair[i]);
}

#endif
