/* Roots and quotients as the kernels take them, for gpu_arithmetic.py. */
#include "vec/cuda.h"

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
