/* The vocabulary in plain C, one lane. It is the portable build, and the reference for every other header. gcc may turn
 * its loops into vector code, which changes the speed but never the bits. */
#ifndef HSTEP_VEC_SCALAR_H
#define HSTEP_VEC_SCALAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/inline.h"

#define HSTEP_VEC_NAME "scalar"
#define VL 1

typedef float vf;
typedef uint32_t vi;
typedef int vm;
typedef struct { double lane[16]; } va;

#define V_OP static inline __attribute__((HSTEP_ALWAYS_INLINE, unused))
#define V_TABLE static const

#include "vec/half.h"

V_OP vf v_set(float x) { return x; }
V_OP vi vi_set(uint32_t x) { return x; }
V_OP vi v_bits(vf x) { vi i; memcpy(&i, &x, 4); return i; }
V_OP vf v_from_bits(vi i) { vf x; memcpy(&x, &i, 4); return x; }

V_OP vf v_add(vf a, vf b) { return a + b; }
V_OP vf v_sub(vf a, vf b) { return a - b; }
V_OP vf v_mul(vf a, vf b) { return a * b; }
V_OP vf v_div(vf a, vf b) { return a / b; }
V_OP vf v_div0(vf a, vf b) { return b == 0.0f ? 0.0f : a / b; }
V_OP vf v_sqrt(vf a) { return sqrtf(a); }
V_OP vf v_min(vf a, vf b) { return a < b ? a : b; }
V_OP vf v_max(vf a, vf b) { return a > b ? a : b; }
V_OP vf v_abs(vf a) { return v_from_bits(v_bits(a) & 0x7fffffffu); }
V_OP vf v_neg(vf a) { return v_from_bits(v_bits(a) ^ 0x80000000u); }
V_OP vf v_sign(vf a) { return (float)((a > 0.0f) - (a < 0.0f)); }

V_OP vm v_gt(vf a, vf b) { return a > b; }
V_OP vm v_lt(vf a, vf b) { return a < b; }
V_OP vm v_eq(vf a, vf b) { return a == b; }
V_OP vm vi_gt(vi a, vi b) { return (int32_t)a > (int32_t)b; }
V_OP vm vi_eq(vi a, vi b) { return a == b; }
V_OP vf v_select(vm m, vf a, vf b) { return m ? a : b; }
V_OP vi vi_select(vm m, vi a, vi b) { return m ? a : b; }
V_OP int vm_any(vm m) { return m; }

/* lrintf rounds by the current mode; the step sets it to nearest even. */
V_OP vi v_round(vf a) { return (vi)(int32_t)lrintf(a); }
V_OP vf v_from_int(vi a) { return (float)(int32_t)a; }

V_OP vi vi_add(vi a, vi b) { return a + b; }
V_OP vi vi_sub(vi a, vi b) { return a - b; }
V_OP vi vi_mul(vi a, vi b) { return a * b; }
V_OP vi vi_mulhi(vi a, vi b) { return (vi)(((uint64_t)a * b) >> 32); }
V_OP vi vi_mul16(vi a, vi b) { return hstep_halves_mul(a, b); }
V_OP vi vi_add16(vi a, vi b) { return hstep_halves_add(a, b); }
V_OP vi vi_and(vi a, vi b) { return a & b; }
V_OP vi vi_or(vi a, vi b) { return a | b; }
V_OP vi vi_xor(vi a, vi b) { return a ^ b; }
V_OP vi vi_min16(vi a, vi b) { return hstep_halves_min(a, b); }
V_OP vi vi_negate16(vi a, vi s) { return hstep_halves_negate(a, s); }
V_OP vi vi_join16(vi a, vi b) { return (a & 0xffffu) | (b & 0xffff0000u); }
V_OP vi vi_andnot(vi a, vi b) { return ~a & b; }
#define vi_shl(x, n) ((vi)((vi)(x) << (n)))
#define vi_shr(x, n) ((vi)((vi)(x) >> (n)))
#define vi_sra(x, n) ((vi)((int32_t)(x) >> (n)))
V_OP vi vi_min(vi a, vi b) { return (int32_t)a < (int32_t)b ? a : b; }
V_OP vi vi_max(vi a, vi b) { return (int32_t)a > (int32_t)b ? a : b; }
V_OP int32_t vi_hmax(vi a) { return (int32_t)a; }
V_OP vi vi_hmax_rows(const uint32_t *p) { return *p; }
V_OP vi vi_iota(void) { return 0; }

V_OP vf v_load(const float *p) { return *p; }
V_OP void v_store(float *p, vf x) { *p = x; }
V_OP vf v_loadu(const void *p) { vf x; memcpy(&x, p, 4); return x; }
V_OP void v_storeu(void *p, vf x) { memcpy(p, &x, 4); }
V_OP vi vi_load(const uint32_t *p) { return *p; }
V_OP void vi_store(uint32_t *p, vi x) { *p = x; }
V_OP vi vi_load_u8(const void *p) { return *(const uint8_t *)p; }
V_OP void vi_store_u8(void *p, vi x) { *(uint8_t *)p = (uint8_t)x; }
V_OP vi vi_load_u16(const void *p)
{
    uint16_t word;
    memcpy(&word, p, 2);
    return word;
}
V_OP void vi_store_u16(void *p, vi x)
{
    uint16_t word = (uint16_t)x;
    memcpy(p, &word, 2);
}
/* Every other field begins within a byte, behind the end of the one before. */
V_OP vi vi_load_u12(const char *p, int64_t i) { return (vi_load_u16(p + i * 6 / 8) >> i * 6 % 8) & 0xfff; }
V_OP void vi_store_u12(char *p, int64_t i, vi x)
{
    char *at = p + i * 6 / 8;
    vi_store_u16(at, i * 6 % 8 ? vi_or(vi_and(vi_load_u8(at), 15), x << 4) : x);
}

V_OP vf v_gather(const float *table, vi index) { return table[index]; }
V_OP vf v_lookup16(const float *table, vi index) { return table[index]; }

V_OP void vp_load_f32(const void *p, vf *e, vf *o) { memcpy(e, p, 4); memcpy(o, (const char *)p + 4, 4); }
V_OP void vp_store_f32(void *p, vf e, vf o) { memcpy(p, &e, 4); memcpy((char *)p + 4, &o, 4); }

V_OP void vp_load_hi16(const void *p, vi *e, vi *o)
{
    uint16_t c[2];
    memcpy(c, p, 4);
    *e = (vi)c[0] << 16;
    *o = (vi)c[1] << 16;
}
V_OP void vp_store_hi16(void *p, vi e, vi o)
{
    uint16_t c[2] = {(uint16_t)(e >> 16), (uint16_t)(o >> 16)};
    memcpy(p, c, 4);
}
V_OP void vp_store_hi16_normal(void *p, vi e, vi o)
{
    vp_store_hi16(p, e & 0x7f800000u ? e : 0, o & 0x7f800000u ? o : 0);
}
V_OP void vp_load_s16(const void *p, vi *e, vi *o)
{
    int16_t c[2];
    memcpy(c, p, 4);
    *e = (vi)(int32_t)c[0];
    *o = (vi)(int32_t)c[1];
}
V_OP void vp_store_16(void *p, vi e, vi o)
{
    uint16_t c[2] = {(uint16_t)e, (uint16_t)o};
    memcpy(p, c, 4);
}
V_OP void vp_load_s8(const void *p, vi *e, vi *o)
{
    int8_t c[2];
    memcpy(c, p, 2);
    *e = (vi)(int32_t)c[0];
    *o = (vi)(int32_t)c[1];
}
V_OP void vp_load_u8(const void *p, vi *e, vi *o)
{
    uint8_t c[2];
    memcpy(c, p, 2);
    *e = c[0];
    *o = c[1];
}
V_OP void vp_store_8(void *p, vi e, vi o)
{
    uint8_t c[2] = {(uint8_t)e, (uint8_t)o};
    memcpy(p, c, 2);
}

V_OP vi vh_load_u8(const void *p)
{
    uint8_t c[2];
    memcpy(c, p, 2);
    return c[0] | (vi)c[1] << 16;
}
V_OP void vh_store_s8(void *p, vi x)
{
    int32_t low = hstep_saturated(hstep_half_low(x), -128, 127), high = hstep_saturated(hstep_half_high(x), -128, 127);
    vp_store_8(p, (vi)low, (vi)high);
}
V_OP void vh_store_u8(void *p, vi x)
{
    vp_store_8(p, (vi)hstep_saturated(hstep_half_low(x), 0, 255), (vi)hstep_saturated(hstep_half_high(x), 0, 255));
}

V_OP void vp_load_f16(const void *p, vf *e, vf *o)
{
    uint16_t c[2];
    memcpy(c, p, 4);
    *e = hstep_half_decode(c[0]);
    *o = hstep_half_decode(c[1]);
}
V_OP void vp_store_f16(void *p, vf e, vf o)
{
    uint16_t c[2] = {hstep_half_encode(e), hstep_half_encode(o)};
    memcpy(p, c, 4);
}

V_OP va va_zero(void) { va a; memset(&a, 0, sizeof a); return a; }
V_OP void va_add(va *a, int part, vf x) { a->lane[part] += (double)x; }
V_OP void va_add_product(va *a, int part, vf x, vf y) { a->lane[part] += (double)x * (double)y; }
V_OP void va_store(va a, double *p) { memcpy(p, a.lane, sizeof a.lane); }

#endif
