/* The vocabulary of one CUDA thread, with what kernels need besides: who a thread is, and where threads meet. A vector
 * is four numbers in the registers of the thread, so that one test of a range serves all four. Two compilers read this
 * file: nvcc, which has its own declarations, and clang without a toolkit.
 *
 *   Slow:       conversions to and from integers, and estimates (16 lanes a cycle)
 *               comparisons, shifts and bitwise operations (64; products and sums have 128, of integers too)
 *   Not used:   instructions that round in another way; fused multiply-add, except in roots and quotients
 *
 * Include this header before any other of the project, because it defines how they declare functions and tables. Over
 * 500 lines because the vocabulary is one. */
#ifndef HSTEP_VEC_CUDA_H
#define HSTEP_VEC_CUDA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Clang takes functions without attributes for functions of host and device (kernels.cu), which may call only their
 * kind. */
#ifdef __clang__
#define CUDA_FUNCTION __attribute__((host, device, unused))
#else
#define CUDA_FUNCTION __attribute__((device, unused))
#endif
#define CUDA_SHARED static __attribute__((shared))
#define CUDA_KERNEL extern "C" __attribute__((global, launch_bounds(256)))
/* Limits registers, so that `blocks` blocks share a multiprocessor. */
#define CUDA_KERNEL_SHARED(blocks) extern "C" __attribute__((global, launch_bounds(256, blocks)))
#define CUDA_PREFETCH(from) __asm__ volatile("prefetch.global.L2 [%0];" ::"l"(from))
#define CUDA_DEVICE static CUDA_FUNCTION
#define CUDA_UNROLL _Pragma("unroll")
#define HSTEP_INLINE static inline CUDA_FUNCTION
#define HSTEP_TABLE __attribute__((device))
#define V_OP static inline __attribute__((always_inline)) CUDA_FUNCTION
/* Not constant memory, which serves lanes that read different entries one after another. */
#define V_TABLE extern "C" __attribute__((device))

#ifdef __clang__
#define CUDA_THREAD __nvvm_read_ptx_sreg_tid_x()
#define CUDA_BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define CUDA_BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
#define CUDA_BARRIER() __syncthreads()
#define CUDA_WARP_BARRIER() __nvvm_bar_warp_sync(0xffffffffu)
#define CUDA_SHUFFLE(x, mask) ((uint32_t)__nvvm_shfl_sync_bfly_i32(0xffffffffu, (int)(x), mask, 31))
#define CUDA_ANY(x) __nvvm_vote_any_sync(0xffffffffu, x)
#define CUDA_ADD(to, x) ((void)__nvvm_atom_add_gen_ll((long long *)(to), (long long)(x)))
#else
#define CUDA_THREAD ((int)threadIdx.x)
#define CUDA_BLOCK ((int)blockIdx.x)
#define CUDA_BLOCKS ((int)gridDim.x)
#define CUDA_BARRIER() __syncthreads()
#define CUDA_WARP_BARRIER() __syncwarp()
#define CUDA_SHUFFLE(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define CUDA_ANY(x) __any_sync(0xffffffffu, x)
#define CUDA_ADD(to, x) ((void)atomicAdd((unsigned long long *)(to), (unsigned long long)(x)))
#endif
#define HSTEP_ADD_ATOMIC(to, x) CUDA_ADD(to, x)

/* Device code has no C library, so these replace its functions. */
CUDA_DEVICE int hstep_cuda_compare(const char *a, const char *b)
{
    while (*a && *a == *b) a++, b++;
    return (unsigned char)*a - (unsigned char)*b;
}
CUDA_DEVICE int hstep_cuda_compare_bytes(const void *a, const void *b, size_t n)
{
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    for (size_t i = 0; i < n; i++)
        if (x[i] != y[i]) return x[i] - y[i];
    return 0;
}
CUDA_DEVICE size_t hstep_cuda_length(const char *text)
{
    size_t n = 0;
    while (text[n]) n++;
    return n;
}
#define strcmp hstep_cuda_compare
#define memcmp hstep_cuda_compare_bytes
#define strlen hstep_cuda_length

#if defined(__clang__)
/* Without a toolkit nothing else declares these functions. Each is an instruction that rounds to nearest even and keeps
 * subnormals. */
CUDA_DEVICE float hstep_cuda_sqrtf(float x) { return __nvvm_sqrt_rn_f(x); }
CUDA_DEVICE double hstep_cuda_sqrt(double x) { return __nvvm_sqrt_rn_d(x); }
CUDA_DEVICE long hstep_cuda_lrintf(float x) { return __nvvm_f2i_rn(x); }
CUDA_DEVICE double hstep_cuda_fabs(double x) { return __builtin_fabs(x); }
CUDA_DEVICE float hstep_cuda_fabsf(float x) { return __builtin_fabsf(x); }
#define sqrtf hstep_cuda_sqrtf
#define sqrt hstep_cuda_sqrt
#define lrintf hstep_cuda_lrintf
#define fabs hstep_cuda_fabs
#define fabsf hstep_cuda_fabsf
#define memcpy __builtin_memcpy
#define memset __builtin_memset
#endif

#include "vec/half.h"

#define HSTEP_VEC_NAME "cuda"
#define VL 4

typedef struct { float x[VL]; } vf;
typedef struct { uint32_t x[VL]; } vi;
typedef struct { int x[VL]; } vm;

/* Computes `value` for each lane I, a constant. There is no loop that a compiler might keep. */
#define V_LANE(n, value) \
    {                    \
        enum { I = n };  \
        r.x[I] = value;  \
    }
#define V_LANES(type, value) \
    __extension__({          \
        type r;              \
        V_LANE(0, value)     \
        V_LANE(1, value)     \
        V_LANE(2, value)     \
        V_LANE(3, value)     \
        r;                   \
    })

V_OP vf v_set(float x) { return V_LANES(vf, x); }
V_OP vi vi_set(uint32_t x) { return V_LANES(vi, x); }
V_OP vi v_bits(vf a) { return V_LANES(vi, hstep_pattern(a.x[I])); }
V_OP vf v_from_bits(vi a) { return V_LANES(vf, hstep_number(a.x[I])); }

V_OP vf v_add(vf a, vf b) { return V_LANES(vf, a.x[I] + b.x[I]); }
V_OP vf v_sub(vf a, vf b) { return V_LANES(vf, a.x[I] - b.x[I]); }
V_OP vf v_mul(vf a, vf b) { return V_LANES(vf, a.x[I] * b.x[I]); }

#include "vec/cuda_roots.h"

/* ---- Floats ---- */

/* The instructions for minimum and maximum return the number if one operand is NaN, and they order zeros. Beside a
 * constant that is neither NaN nor zero they agree with the vocabulary. */
#define CUDA_IS_PLAIN(b) (__builtin_constant_p(b) && ((b) > 0.0f || (b) < 0.0f))
V_OP float hstep_cuda_min(float a, float b) { return CUDA_IS_PLAIN(b) ? __builtin_fminf(a, b) : a < b ? a : b; }
V_OP float hstep_cuda_max(float a, float b) { return CUDA_IS_PLAIN(b) ? __builtin_fmaxf(a, b) : a > b ? a : b; }
V_OP vf v_min(vf a, vf b) { return V_LANES(vf, hstep_cuda_min(a.x[I], b.x[I])); }
V_OP vf v_max(vf a, vf b) { return V_LANES(vf, hstep_cuda_max(a.x[I], b.x[I])); }
V_OP vf hstep_cuda_clamp(vf m, vf bound)
{
    return V_LANES(vf, __builtin_fmaxf(__builtin_fminf(m.x[I], bound.x[I]), -bound.x[I]));
}
#define adamw_clamp hstep_cuda_clamp
V_OP vf v_abs(vf a) { return V_LANES(vf, fabsf(a.x[I])); }
V_OP vf v_neg(vf a) { return V_LANES(vf, -a.x[I]); }
V_OP vf v_sign(vf a) { return V_LANES(vf, (float)((a.x[I] > 0.0f) - (a.x[I] < 0.0f))); }

V_OP vm v_gt(vf a, vf b) { return V_LANES(vm, a.x[I] > b.x[I]); }
V_OP vm v_lt(vf a, vf b) { return V_LANES(vm, a.x[I] < b.x[I]); }
V_OP vm v_eq(vf a, vf b) { return V_LANES(vm, a.x[I] == b.x[I]); }
V_OP vm vi_gt(vi a, vi b) { return V_LANES(vm, (int32_t)a.x[I] > (int32_t)b.x[I]); }
V_OP vm vi_eq(vi a, vi b) { return V_LANES(vm, a.x[I] == b.x[I]); }
V_OP vf v_select(vm m, vf a, vf b) { return V_LANES(vf, m.x[I] ? a.x[I] : b.x[I]); }
V_OP vi vi_select(vm m, vi a, vi b) { return V_LANES(vi, m.x[I] ? a.x[I] : b.x[I]); }
V_OP int vm_any(vm m) { return m.x[0] | m.x[1] | m.x[2] | m.x[3]; }

V_OP vi v_round(vf a) { return V_LANES(vi, (uint32_t)(int32_t)lrintf(a.x[I])); }
V_OP vf v_from_int(vi a) { return V_LANES(vf, (float)(int32_t)a.x[I]); }

/* Returns the pattern of the largest magnitude in a pair. */
V_OP float hstep_cuda_larger(float a, float b)
{
    float r;
    __asm__("{\n.reg .f32 x, y;\nabs.f32 x, %1;\nabs.f32 y, %2;\nmax.NaN.f32 %0, x, y;\n}" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
V_OP vf hstep_cuda_larger_of(vf a, vf b) { return V_LANES(vf, hstep_cuda_larger(a.x[I], b.x[I])); }
V_OP uint32_t hstep_cuda_largest(vf e, vf o)
{
    const vf a = hstep_cuda_larger_of(e, o);
    return hstep_pattern(hstep_cuda_larger(hstep_cuda_larger(a.x[0], a.x[1]), hstep_cuda_larger(a.x[2], a.x[3])));
}

/* Returns true if a number of the pair may be 2^127 or more (formats/bf16_round.h). No magnitude exceeds their sum. */
V_OP int hstep_cuda_bf16_special(vi ue, vi uo, const int small)
{
    const vf e = v_from_bits(ue), o = v_from_bits(uo);
    const vf sum = v_add(v_abs(e), v_abs(o));
    (void)small;
    return !((sum.x[0] + sum.x[1]) + (sum.x[2] + sum.x[3]) < 0x1p127f);
}
#define hstep_bf16_special hstep_cuda_bf16_special

/* ---- Integers ---- */

V_OP vi vi_add(vi a, vi b) { return V_LANES(vi, a.x[I] + b.x[I]); }
V_OP vi vi_sub(vi a, vi b) { return V_LANES(vi, a.x[I] - b.x[I]); }
V_OP vi vi_mul(vi a, vi b) { return V_LANES(vi, a.x[I] * b.x[I]); }
V_OP vi vi_mul16(vi a, vi b) { return V_LANES(vi, hstep_halves_mul(a.x[I], b.x[I])); }
V_OP vi vi_add16(vi a, vi b) { return V_LANES(vi, hstep_halves_add(a.x[I], b.x[I])); }
V_OP vi vi_and(vi a, vi b) { return V_LANES(vi, a.x[I] & b.x[I]); }
V_OP vi vi_or(vi a, vi b) { return V_LANES(vi, a.x[I] | b.x[I]); }
V_OP vi vi_xor(vi a, vi b) { return V_LANES(vi, a.x[I] ^ b.x[I]); }
V_OP vi vi_join16(vi a, vi b) { return V_LANES(vi, (a.x[I] & 0xffffu) | (b.x[I] & 0xffff0000u)); }
V_OP vi vi_shl(vi a, const int n) { return V_LANES(vi, a.x[I] << n); }
V_OP vi vi_shr(vi a, const int n) { return V_LANES(vi, a.x[I] >> n); }
V_OP vi vi_sra(vi a, const int n) { return V_LANES(vi, (uint32_t)((int32_t)a.x[I] >> n)); }
V_OP vi vi_min(vi a, vi b) { return V_LANES(vi, (int32_t)a.x[I] < (int32_t)b.x[I] ? a.x[I] : b.x[I]); }
V_OP vi vi_max(vi a, vi b) { return V_LANES(vi, (int32_t)a.x[I] > (int32_t)b.x[I] ? a.x[I] : b.x[I]); }
V_OP vi vi_iota(void) { return V_LANES(vi, I); }

/* ---- Memory: aligned, whole words of a lane's scratch (device/cuda/code/lane.h) ---- */

V_OP uint32_t hstep_cuda_word(const void *p, int at)
{
    uint32_t word;
    memcpy(&word, (const char *)__builtin_assume_aligned(p, 4) + 4 * at, 4);
    return word;
}
V_OP void hstep_cuda_put_word(void *p, int at, uint32_t word)
{
    memcpy((char *)__builtin_assume_aligned(p, 4) + 4 * at, &word, 4);
}
/* Returns byte n of two words, extended by zeros. */
V_OP uint32_t hstep_cuda_byte(const void *p, int n) { return hstep_cuda_word(p, n / 4) >> n % 4 * 8 & 255u; }
V_OP uint32_t hstep_cuda_signed_byte(const void *p, int n) { return (uint32_t)(int32_t)(int8_t)hstep_cuda_byte(p, n); }
/* Returns the low bytes of four words. */
#define CUDA_FOUR_BYTES(name, of_two)                                              \
    V_OP uint32_t name(uint32_t a, uint32_t b, uint32_t c, uint32_t d)             \
    {                                                                              \
        uint32_t low, high, all;                                                   \
        __asm__("prmt.b32 %0, %1, %2, " of_two ";" : "=r"(low) : "r"(a), "r"(b));  \
        __asm__("prmt.b32 %0, %1, %2, " of_two ";" : "=r"(high) : "r"(c), "r"(d)); \
        __asm__("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(all) : "r"(low), "r"(high)); \
        return all;                                                                \
    }
CUDA_FOUR_BYTES(hstep_cuda_bytes, "0x0040")
/* Returns four of the eight bytes of two words. Each of the lower four digits of `which` is the number of a byte. */
V_OP uint32_t hstep_cuda_pick(uint32_t low, uint32_t high, uint32_t which)
{
    uint32_t r;
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(which));
    return r;
}
/* Returns the halves of two words as bytes, saturated to 0 .. 255. */
V_OP uint32_t hstep_cuda_saturated(uint32_t low, uint32_t high)
{
    const int32_t a = hstep_half_low(low), b = hstep_half_high(low);
    const int32_t c = hstep_half_low(high), d = hstep_half_high(high);
    uint32_t part, all;
    __asm__("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(part) : "r"(d), "r"(c));
    __asm__("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(part));
    return all;
}

V_OP vf v_load(const float *p) { return V_LANES(vf, p[I]); }
V_OP void v_store(float *p, vf x) { memcpy(p, x.x, sizeof x.x); }
V_OP vi vi_load_u8(const void *p) { return V_LANES(vi, hstep_cuda_byte(p, I)); }
V_OP void vi_store_u8(void *p, vi x) { hstep_cuda_put_word(p, 0, hstep_cuda_bytes(x.x[0], x.x[1], x.x[2], x.x[3])); }
/* The fields of a lane's scratch, where i is 0. */
V_OP vi vi_load_u12(const char *p, int64_t i)
{
    const uint32_t low = hstep_cuda_word(p, 0), high = hstep_cuda_word(p, 1);
    const vi r = {{low, low >> 12, low >> 24 | high << 8, high >> 4}};
    (void)i;
    return vi_and(r, vi_set(0xfff));
}
V_OP void vi_store_u12(char *p, int64_t i, vi x)
{
    (void)i;
    hstep_cuda_put_word(p, 0, x.x[0] | x.x[1] << 12 | x.x[2] << 24);
    hstep_cuda_put_word(p, 1, x.x[2] >> 8 | x.x[3] << 4);
}

V_OP vf v_gather(const float *table, vi index) { return V_LANES(vf, table[index.x[I]]); }
V_OP vf v_lookup16(const float *table, vi index) { return V_LANES(vf, table[index.x[I]]); }

/* Both elements of a lane are in one word, or in two adjacent words. */
V_OP void vp_load_f32(const void *p, vf *e, vf *o)
{
    const vi even = {{hstep_cuda_word(p, 0), hstep_cuda_word(p, 2), hstep_cuda_word(p, 4), hstep_cuda_word(p, 6)}};
    const vi odd = {{hstep_cuda_word(p, 1), hstep_cuda_word(p, 3), hstep_cuda_word(p, 5), hstep_cuda_word(p, 7)}};
    *e = v_from_bits(even);
    *o = v_from_bits(odd);
}
V_OP void hstep_cuda_put_words(void *p, const int first, const int step, vi x)
{
    hstep_cuda_put_word(p, first, x.x[0]);
    hstep_cuda_put_word(p, first + step, x.x[1]);
    hstep_cuda_put_word(p, first + 2 * step, x.x[2]);
    hstep_cuda_put_word(p, first + 3 * step, x.x[3]);
}
V_OP void vp_store_f32(void *p, vf e, vf o)
{
    hstep_cuda_put_words(p, 0, 2, v_bits(e));
    hstep_cuda_put_words(p, 1, 2, v_bits(o));
}

V_OP vi hstep_cuda_words(const void *p) { return V_LANES(vi, hstep_cuda_word(p, I)); }
V_OP void vp_load_hi16(const void *p, vi *e, vi *o)
{
    const vi words = hstep_cuda_words(p);
    *e = vi_shl(words, 16);
    *o = vi_and(words, vi_set(0xffff0000u));
}
V_OP uint32_t hstep_cuda_high_halves(uint32_t low, uint32_t high)
{
    uint32_t r;
    __asm__("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(r) : "r"(low), "r"(high));
    return r;
}
V_OP void vp_store_hi16(void *p, vi e, vi o)
{
    hstep_cuda_put_words(p, 0, 1, V_LANES(vi, hstep_cuda_high_halves(e.x[I], o.x[I])));
}
V_OP vi hstep_cuda_normal(vi a) { return V_LANES(vi, a.x[I] & 0x7f800000u ? a.x[I] : 0); }
V_OP void vp_store_hi16_normal(void *p, vi e, vi o) { vp_store_hi16(p, hstep_cuda_normal(e), hstep_cuda_normal(o)); }
V_OP void vp_load_s16(const void *p, vi *e, vi *o)
{
    const vi words = hstep_cuda_words(p);
    *e = vi_sra(vi_shl(words, 16), 16);
    *o = vi_sra(words, 16);
}
V_OP void vp_store_16(void *p, vi e, vi o)
{
    hstep_cuda_put_words(p, 0, 1, vi_join16(e, vi_shl(o, 16)));
}

V_OP vi hstep_cuda_signed_bytes(const void *p, const int first)
{
    return V_LANES(vi, hstep_cuda_signed_byte(p, first + 2 * I));
}
V_OP vi hstep_cuda_unsigned_bytes(const void *p, const int first)
{
    return V_LANES(vi, hstep_cuda_byte(p, first + 2 * I));
}
V_OP void vp_load_s8(const void *p, vi *e, vi *o)
{
    *e = hstep_cuda_signed_bytes(p, 0);
    *o = hstep_cuda_signed_bytes(p, 1);
}
V_OP void vp_load_u8(const void *p, vi *e, vi *o)
{
    *e = hstep_cuda_unsigned_bytes(p, 0);
    *o = hstep_cuda_unsigned_bytes(p, 1);
}
V_OP void vp_store_8(void *p, vi e, vi o)
{
    hstep_cuda_put_word(p, 0, hstep_cuda_bytes(e.x[0], o.x[0], e.x[1], o.x[1]));
    hstep_cuda_put_word(p, 1, hstep_cuda_bytes(e.x[2], o.x[2], e.x[3], o.x[3]));
}

V_OP void vh_store_u8(void *p, vi x)
{
    hstep_cuda_put_word(p, 0, hstep_cuda_saturated(x.x[0], x.x[1]));
    hstep_cuda_put_word(p, 1, hstep_cuda_saturated(x.x[2], x.x[3]));
}

V_OP vf hstep_cuda_from_half(vi a) { return V_LANES(vf, hstep_half_decode((uint16_t)a.x[I])); }
V_OP vi hstep_cuda_to_half(vf a) { return V_LANES(vi, hstep_half_encode(a.x[I])); }
V_OP void vp_load_f16(const void *p, vf *e, vf *o)
{
    const vi words = hstep_cuda_words(p);
    *e = hstep_cuda_from_half(words);
    *o = hstep_cuda_from_half(vi_shr(words, 16));
}
V_OP void vp_store_f16(void *p, vf e, vf o) { vp_store_16(p, hstep_cuda_to_half(e), hstep_cuda_to_half(o)); }

/* ---- Codes of roots (vec/root_code.h) ---- */

V_OP uint32_t hstep_cuda_lesser(uint32_t a, uint32_t b) { return a < b ? a : b; }
V_OP vi hstep_cuda_nearest_edge(vi a, vi b) { return V_LANES(vi, hstep_cuda_lesser(a.x[I], b.x[I])); }
V_OP vi hstep_cuda_to_edge(vi estimate) { return vi_shl(vi_add(estimate, vi_set(3)), 16); }

/* Returns 1 + r / 2^23, where r is a half of a word. */
#define CUDA_DRAWN(name, of_halves)                                                            \
    V_OP float name(uint32_t word)                                                             \
    {                                                                                          \
        uint32_t r;                                                                            \
        __asm__("prmt.b32 %0, %1, %2, " of_halves ";" : "=r"(r) : "r"(word), "r"(0x00003f80u)); \
        return hstep_number(r);                                                                \
    }
CUDA_DRAWN(hstep_cuda_drawn_low, "0x5410")
CUDA_DRAWN(hstep_cuda_drawn_high, "0x5432")

/* Returns the pattern of 1 + (root + r) / 2^23 with an estimated root. `drawn` is 1 + r / 2^23. `square` is the number
 * that hstep_radicand() takes r (65536 - r) from, divided by 2^46. Powers of two change no rounding.
 *
 * With u = r - 32768, r (65536 - r) is 2^30 - u u. The fused product therefore rounds the same number as
 * hstep_radicand() does. A difference below zero, or a NaN, becomes 0. */
V_OP uint32_t hstep_cuda_estimate(float drawn, float square)
{
    float sum;
    __asm__("{\n.reg .f32 u, y;\n"
            "add.rn.f32 u, %1, 0fBF808000;\n" /* -(1 + 2^-8) */
            "neg.f32 y, u;\n"
            "fma.rn.f32 u, y, u, 0f37800000;\n" /* 2^-16 */
            "sub.rn.sat.f32 y, %2, u;\n"
            "sqrt.approx.ftz.f32 y, y;\n"
            "add.rn.f32 %0, %1, y;\n}"
            : "=f"(sum)
            : "f"(drawn), "f"(square));
    return hstep_pattern(sum);
}

/* Computes hstep_root_codes() from estimated roots. Only bits 16 to 22 are exact.
 *
 * PTX documents an error of 2^-23 for the estimate. Roots are below 2^23, so this is at most 1, and 1.5 after the sum
 * is rounded. The exact root is rounded twice, by 1/4 and 1/2. The two integers are then at most 2 apart.
 *
 * The bits can only differ if a multiple of 2^16 lies between the sums. If the estimate's sum is within 3 of a
 * multiple, the exact roots are taken. This happens for 6 of 65,536 sums, so for 48 of 65,536 pairs, which have
 * eight. */
V_OP vi hstep_root_and(vf a, vi r);
V_OP vf hstep_radicand(vf x, vf inverse, vi random);
V_OP void hstep_cuda_root_codes(vf e, vf o, vf inverse, vi words, vi *ce, vi *co)
{
    const vf scaled = v_mul(inverse, v_set(0x1p-46f));
    const vf se = v_mul(v_mul(v_abs(e), inverse), scaled), so = v_mul(v_mul(v_abs(o), inverse), scaled);
    const vi fe = V_LANES(vi, hstep_cuda_estimate(hstep_cuda_drawn_low(words.x[I]), se.x[I]));
    const vi fo = V_LANES(vi, hstep_cuda_estimate(hstep_cuda_drawn_high(words.x[I]), so.x[I]));
    const vi edge = hstep_cuda_nearest_edge(hstep_cuda_to_edge(fe), hstep_cuda_to_edge(fo));
    const uint32_t one = hstep_cuda_lesser(edge.x[0], edge.x[1]), two = hstep_cuda_lesser(edge.x[2], edge.x[3]);
    *ce = fe;
    *co = fo;
    if (__builtin_expect(hstep_cuda_lesser(one, two) < 6u << 16, 0)) {
        const vi re = vi_and(words, vi_set(0xffff)), ro = vi_shr(words, 16);
        *ce = hstep_root_and(hstep_radicand(e, inverse, re), re);
        *co = hstep_root_and(hstep_radicand(o, inverse, ro), ro);
    }
}
#define hstep_root_codes hstep_cuda_root_codes

/* Negates those of four codes, by bytes, whose mask in `signs` is set. A code is the low seven bits. -c is ~c + 1,
 * whose carry stays below the top bit of its byte. */
V_OP uint32_t hstep_cuda_negated(uint32_t codes, uint32_t signs)
{
    return (((codes ^ signs) & 0x7f7f7f7fu) + (signs & 0x01010101u)) ^ (signs & 0x80808080u);
}
CUDA_FOUR_BYTES(hstep_cuda_third_bytes, "0x0062")
/* Each byte of the result repeats the sign bit of a word. */
CUDA_FOUR_BYTES(hstep_cuda_signs, "0x00fb")
V_OP void hstep_cuda_store_signed(char *code, vi ce, vi co, vf e, vf o)
{
    const vi se = v_bits(e), so = v_bits(o);
    const uint32_t low = hstep_cuda_third_bytes(ce.x[0], co.x[0], ce.x[1], co.x[1]),
                   high = hstep_cuda_third_bytes(ce.x[2], co.x[2], ce.x[3], co.x[3]);
    hstep_cuda_put_word(code, 0, hstep_cuda_negated(low, hstep_cuda_signs(se.x[0], so.x[0], se.x[1], so.x[1])));
    hstep_cuda_put_word(code, 1, hstep_cuda_negated(high, hstep_cuda_signs(se.x[2], so.x[2], se.x[3], so.x[3])));
}
#define hstep_store_signed hstep_cuda_store_signed

/* Computes max(d, floor(d / 2)) + base with d = x - edge. An edge is even, so that its half can be taken from the half
 * of x. The arguments are edge - base and edge / 2 - base. */
V_OP uint32_t hstep_cuda_above(uint32_t x, uint32_t edge, uint32_t half)
{
    const int32_t whole = (int32_t)(x - edge), halved = (int32_t)((uint32_t)((int32_t)x >> 1) - half);
    return (uint32_t)(whole > halved ? whole : halved);
}
/* These return a + b 2^n and a + b / 2^n. They are hidden from the compiler, which would shift b before it is masked,
 * in an instruction of its own. */
V_OP uint32_t hstep_cuda_add_left(uint32_t a, uint32_t b, const int n)
{
    uint32_t r;
    __asm__("mad.lo.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(b), "n"(1 << n), "r"(a));
    return r;
}
V_OP uint32_t hstep_cuda_add_right(uint32_t a, uint32_t b, const int n)
{
    uint32_t r;
    __asm__("{\n.reg .u32 b;\nshr.u32 b, %1, %2;\nadd.u32 %0, b, %3;\n}" : "=r"(r) : "r"(b), "n"(n), "r"(a));
    return r;
}
V_OP void hstep_cuda_positions(vf e, vf o, vf edge, vi words, const int shift, const uint32_t mask, const uint32_t base,
                               vi *pe, vi *po)
{
    /* All lanes have one edge. */
    const uint32_t pattern = hstep_pattern(edge.x[0]), from = pattern - base, half = pattern / 2 - base;
    const vi fe = V_LANES(vi, hstep_cuda_above(hstep_pattern(e.x[I]), from, half));
    const vi fo = V_LANES(vi, hstep_cuda_above(hstep_pattern(o.x[I]), from, half));
    *pe = V_LANES(vi, hstep_cuda_add_left(fe.x[I], words.x[I] & mask >> shift, shift));
    *po = V_LANES(vi, hstep_cuda_add_right(fo.x[I], words.x[I] & mask << (16 - shift), 16 - shift));
}
#define hstep_positions hstep_cuda_positions

/* Codes below 128 are doubled in all four bytes of a word at once, the others lose their top bit. A byte of ones above
 * a doubled code then takes 256 from it. That makes 2 (c - 128) of the first and c - 128 of the others. */
V_OP uint32_t hstep_cuda_distance(uint32_t doubled, uint32_t below, const int n)
{
    uint32_t r;
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(doubled), "r"(below), "n"((12 + n) << 4 | n));
    return r << 18;
}
V_OP vi hstep_cuda_distances(const uint32_t *doubled, const uint32_t *below, const int first)
{
    return V_LANES(vi, hstep_cuda_distance(doubled[I / 2], below[I / 2], I % 2 * 2 + first));
}
V_OP void hstep_cuda_load_distances(const char *code, vi *e, vi *o)
{
    uint32_t doubled[2], below[2];
    CUDA_UNROLL for (int i = 0; i < 2; i++)
    {
        const uint32_t codes = hstep_cuda_word(code, i);
        uint32_t mask;
        below[i] = ~codes;
        __asm__("prmt.b32 %0, %1, %1, 0xba98;" : "=r"(mask) : "r"(below[i]));
        doubled[i] = (codes & 0x7f7f7f7fu) + (codes & mask);
    }
    *e = hstep_cuda_distances(doubled, below, 0);
    *o = hstep_cuda_distances(doubled, below, 1);
}
#define hstep_load_distances hstep_cuda_load_distances

/* Returns a byte for each of four codes of 4 bits: code + the smaller of code and 6, 0 to 21. A code selects a byte of
 * eight. With its highest bit set it selects the sign of a byte, which is 0. */
V_OP uint32_t hstep_cuda_int4_steps(uint32_t codes)
{
    uint32_t low, high;
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(low) : "r"(0x06040200u), "r"(0x0d0c0a08u), "r"(codes));
    __asm__("prmt.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(0x11100f0eu), "r"(0x15141312u), "r"(codes ^ 0x8888u));
    return low | high;
}
V_OP uint32_t hstep_cuda_int4_root(uint32_t steps, uint32_t edge, const int n)
{
    uint32_t byte;
    __asm__("prmt.b32 %0, %1, 0, %2;" : "=r"(byte) : "r"(steps), "n"(0x4440 | n));
    return hstep_cuda_add_left(edge, byte, 21);
}
V_OP void hstep_cuda_int4_roots(const char *code, vi edge, vi *e, vi *o)
{
    const uint32_t codes = hstep_cuda_word(code, 0), from = edge.x[0] - (12u << 21);
    const uint32_t steps[2] = {hstep_cuda_int4_steps(codes), hstep_cuda_int4_steps(codes >> 16)};
    *e = V_LANES(vi, hstep_cuda_int4_root(steps[I / 2], from, I % 2 * 2));
    *o = V_LANES(vi, hstep_cuda_int4_root(steps[I / 2], from, I % 2 * 2 + 1));
}
#define hstep_int4_roots hstep_cuda_int4_roots

#endif
