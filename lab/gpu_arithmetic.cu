/* Roots and quotients as the kernels take them, for gpu_arithmetic.py. */
#include "vec/cuda.h"

#include "host/pair.h"

CUDA_KERNEL void roots(float *x, uint32_t first)
{
    const uint32_t i = (uint32_t)CUDA_BLOCK * 256 + (uint32_t)CUDA_THREAD;
    x[i] = v_sqrt(v_from_bits(first + i));
}

CUDA_KERNEL void quotients(float *x, const float *y)
{
    const size_t i = (size_t)CUDA_BLOCK * 256 + (size_t)CUDA_THREAD;
    x[i] = v_div(x[i], y[i]);
}

/* x: radicands; y: random bits, in the low halves of patterns. */
CUDA_KERNEL void codes(float *x, const float *y)
{
    const size_t i = (size_t)CUDA_BLOCK * 256 + (size_t)CUDA_THREAD;
    const vi r = v_bits(y[i]) & 0xffffu;
    vi even, odd;
    hstep_roots_and(x[i], v_abs(x[i]), r, 0xffffu - r, &even, &odd);
    x[i] = v_from_bits((even >> 16) << 16 | odd >> 16);
}

CUDA_KERNEL void double_roots(double *x)
{
    const size_t i = (size_t)CUDA_BLOCK * 256 + (size_t)CUDA_THREAD;
    x[i] = sqrt(x[i]);
}

CUDA_KERNEL void double_quotients(double *x, const double *y)
{
    const size_t i = (size_t)CUDA_BLOCK * 256 + (size_t)CUDA_THREAD;
    x[i] = x[i] / y[i];
}
