/* The vocabulary of one CUDA thread: that of scalar.h, one lane, as device code; and what threads have beyond it: who
 * they are, and where they meet. Three compilers read it: one of device code that brings its own declarations (nvcc),
 * clang without any toolkit, and a C compiler for the emulation of tests/cuda, which defines HSTEP_CUDA_EMULATED and
 * runs the same source with fibers as threads.
 *
 * To be included before any other header of this project, for it says how these declare their functions and tables. */
#ifndef HSTEP_VEC_CUDA_H
#define HSTEP_VEC_CUDA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef HSTEP_CUDA_EMULATED

int hstep_emulated_thread(void);
int hstep_emulated_block(void);
int hstep_emulated_blocks(void);
void hstep_emulated_barrier(void);
void hstep_emulated_warp_barrier(void);
uint32_t hstep_emulated_shuffle(uint32_t x, int mask);

#define CUDA_THREAD hstep_emulated_thread()
#define CUDA_BLOCK hstep_emulated_block()
#define CUDA_BLOCKS hstep_emulated_blocks()
#define CUDA_BARRIER() hstep_emulated_barrier()
#define CUDA_WARP_BARRIER() hstep_emulated_warp_barrier()
#define CUDA_SHUFFLE(x, mask) hstep_emulated_shuffle(x, mask)
/* Threads of the emulation change places only where they meet. */
#define CUDA_ADD(to, x) ((void)(*(to) += (x)))
#define CUDA_SHARED static
#define CUDA_KERNEL static
#define CUDA_KERNEL_SHARED(blocks) static
#define CUDA_UNROLL
#define CUDA_DEVICE static
/* Constants are arguments here: inlined as on a GPU, the fused kernels take a compiler minutes. */
#define V_OP static inline __attribute__((unused))
#define V_TABLE static const

#else

/* Clang takes functions that say nothing for functions of both sides (kernels.cu), and lets these call no other. */
#ifdef __clang__
#define CUDA_FUNCTION __attribute__((host, device, unused))
#else
#define CUDA_FUNCTION __attribute__((device, unused))
#endif
#define CUDA_SHARED static __attribute__((shared))
#define CUDA_KERNEL extern "C" __attribute__((global, launch_bounds(256)))
/* With so few registers that this many blocks share a multiprocessor. */
#define CUDA_KERNEL_SHARED(blocks) extern "C" __attribute__((global, launch_bounds(256, blocks)))
#define CUDA_DEVICE static CUDA_FUNCTION
#define CUDA_UNROLL _Pragma("unroll")
#define HSTEP_INLINE static inline CUDA_FUNCTION
#define HSTEP_TABLE __attribute__((device))
#define V_OP static inline __attribute__((always_inline)) CUDA_FUNCTION
#define V_TABLE static __attribute__((device)) const

#ifdef __clang__
#define CUDA_THREAD __nvvm_read_ptx_sreg_tid_x()
#define CUDA_BLOCK __nvvm_read_ptx_sreg_ctaid_x()
#define CUDA_BLOCKS __nvvm_read_ptx_sreg_nctaid_x()
#define CUDA_BARRIER() __syncthreads()
#define CUDA_WARP_BARRIER() __nvvm_bar_warp_sync(0xffffffffu)
#define CUDA_SHUFFLE(x, mask) ((uint32_t)__nvvm_shfl_sync_bfly_i32(0xffffffffu, (int)(x), mask, 31))
#define CUDA_ADD(to, x) ((void)__nvvm_atom_add_gen_ll((long long *)(to), (long long)(x)))
#else
#define CUDA_THREAD ((int)threadIdx.x)
#define CUDA_BLOCK ((int)blockIdx.x)
#define CUDA_BLOCKS ((int)gridDim.x)
#define CUDA_BARRIER() __syncthreads()
#define CUDA_WARP_BARRIER() __syncwarp()
#define CUDA_SHUFFLE(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
#define CUDA_ADD(to, x) ((void)atomicAdd((unsigned long long *)(to), (unsigned long long)(x)))
#endif
#define HSTEP_ADD_ATOMIC(to, x) CUDA_ADD(to, x)

/* No device has the library's. */
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
/* Without a toolkit nothing else declares these: the instructions, rounded to nearest even, subnormals kept. */
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

#endif

#include "vec/scalar.h"

/* A GPU takes lanes apart for it. */
#define HSTEP_HALVES 0

/* 1 / sqrt(x) of a normal x, within 2^-22 of itself: what PTX documents is 2^-22.9. */
#ifdef HSTEP_CUDA_EMULATED
float hstep_emulated_rsqrt(float x);
#define CUDA_RSQRT(x) hstep_emulated_rsqrt(x)
#else
V_OP float hstep_cuda_rsqrt(float x)
{
    float y;
    __asm__("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define CUDA_RSQRT(x) hstep_cuda_rsqrt(x)
#endif

/* hstep_root_and() of an estimated root, to the bits from 16 up (formats/root_code.h).
 *
 * Below 2^23, twice the estimate's error with the product's rounding, 2^-22 + 2^-24 of the root, is 2.5, and to an
 * integer 3; the exact root is rounded twice, by 1/4 and 1/2. So the two integers are at most 3 apart (3.75 in
 * numbers), and so are their sums with r. Bits from 16 up may differ only where a multiple of 2^16 lies between; where
 * the estimate's sum is that near one, the exact roots are taken: in 12 of 65,536 pairs. Radicands below 2^-100 have
 * roots that round to 0, as that of 2^-100 does; NaN is none that is greater. */
V_OP vi hstep_cuda_estimate(vf a, vi r)
{
    const float most = v_max(a, 0x1p-100f);
    return v_round(most * CUDA_RSQRT(most)) + r;
}
V_OP vi hstep_cuda_to_edge(vi estimate) { return (estimate + 3) << 16; }
V_OP vi hstep_root_and(vf a, vi r);
V_OP void hstep_cuda_roots_and(vf e, vf o, vi re, vi ro, vi *ce, vi *co)
{
    const vi fe = hstep_cuda_estimate(e, re), fo = hstep_cuda_estimate(o, ro);
    const vi te = hstep_cuda_to_edge(fe), to = hstep_cuda_to_edge(fo);
    *ce = fe;
    *co = fo;
    if (__builtin_expect((te < to ? te : to) < 6u << 16, 0)) {
        *ce = hstep_root_and(e, re);
        *co = hstep_root_and(o, ro);
    }
}
#define hstep_roots_and hstep_cuda_roots_and

#ifndef HSTEP_CUDA_EMULATED

/* What a GPU has one instruction for, or none: the sign is changed as an operand is read. */
V_OP vf hstep_cuda_v_abs(vf a) { return fabsf(a); }
V_OP vf hstep_cuda_v_neg(vf a) { return -a; }
/* Two bytes in one piece: what is put together of pieces is not taken apart first. */
V_OP void hstep_cuda_store_16(void *p, vi x)
{
    uint16_t low = (uint16_t)x;
    memcpy(p, &low, 2);
}
V_OP void hstep_cuda_store_8(void *p, vi e, vi o)
{
    vi packed;
    __asm__("prmt.b32 %0, %1, %2, 0x0040;" : "=r"(packed) : "r"(e), "r"(o));
    hstep_cuda_store_16(p, packed);
}
V_OP void hstep_cuda_store_s8(void *p, vi x)
{
    vi packed;
    int32_t low = hstep_half_low(x), high = hstep_half_high(x);
    __asm__("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(packed) : "r"(high), "r"(low));
    hstep_cuda_store_16(p, packed);
}
V_OP void hstep_cuda_store_u8(void *p, vi x)
{
    vi packed;
    int32_t low = hstep_half_low(x), high = hstep_half_high(x);
    __asm__("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(packed) : "r"(high), "r"(low));
    hstep_cuda_store_16(p, packed);
}
#define v_abs hstep_cuda_v_abs
#define v_neg hstep_cuda_v_neg
#define vp_store_8 hstep_cuda_store_8
#define vh_store_s8 hstep_cuda_store_s8
#define vh_store_u8 hstep_cuda_store_u8

#endif

#endif
