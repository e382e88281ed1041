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

#ifndef HSTEP_CUDA_EMULATED

/* What a GPU has one instruction for, or none: the sign is changed as an operand is read. */
V_OP vf hstep_cuda_v_abs(vf a) { return fabsf(a); }
V_OP vf hstep_cuda_v_neg(vf a) { return -a; }
V_OP void hstep_cuda_store_s8(void *p, vi x)
{
    vi packed;
    int32_t low = hstep_half_low(x), high = hstep_half_high(x);
    __asm__("cvt.pack.sat.s8.s32.b32 %0, %1, %2, 0;" : "=r"(packed) : "r"(high), "r"(low));
    vp_store_8(p, packed, packed >> 8);
}
V_OP void hstep_cuda_store_u8(void *p, vi x)
{
    vi packed;
    int32_t low = hstep_half_low(x), high = hstep_half_high(x);
    __asm__("cvt.pack.sat.u8.s32.b32 %0, %1, %2, 0;" : "=r"(packed) : "r"(high), "r"(low));
    vp_store_8(p, packed, packed >> 8);
}
#define v_abs hstep_cuda_v_abs
#define v_neg hstep_cuda_v_neg
#define vh_store_s8 hstep_cuda_store_s8
#define vh_store_u8 hstep_cuda_store_u8

#endif

#endif
