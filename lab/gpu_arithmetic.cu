/* Roots and quotients as the kernels take them, for gpu_arithmetic.py. */
#include "vec/cuda.h"

#include "kernels/pair.h"

CUDA_DEVICE size_t thread_of_grid(void) { return (size_t)CUDA_BLOCK * 256 + (size_t)CUDA_THREAD; }

/* Every fourth thread has the numbers of four: what is not in range is not alone in being taken another way. The last
 * of four is taken as what is the same in all lanes. */
CUDA_KERNEL void roots(float *x, uint32_t first)
{
    const size_t i = thread_of_grid();
    if (i % VL) return;
    const uint32_t from = first + (uint32_t)i;
    v_store(x + i, v_sqrt(v_from_bits(vi_add(vi_set(from), vi_iota()))));
    x[i + VL - 1] = v_sqrt(v_set(hstep_number(from + VL - 1))).x[0];
}

CUDA_KERNEL void roots_of(float *x)
{
    const size_t i = thread_of_grid();
    if (i % VL == 0) v_store(x + i, v_sqrt(v_load(x + i)));
}

CUDA_KERNEL void quotients(float *x, const float *y)
{
    const size_t i = thread_of_grid();
    if (i % VL) return;
    const vf a = v_load(x + i), b = v_load(y + i);
    v_store(x + i, v_div(a, b));
    x[i + VL - 1] = v_div(v_set(a.x[VL - 1]), v_set(b.x[VL - 1])).x[0];
}

/* x: squares of codes, times 2^32; y: random bits, in the low halves of patterns. */
CUDA_KERNEL void codes(float *x, const float *y)
{
    const size_t i = thread_of_grid();
    if (i % VL) return;
    const vf square = v_load(x + i);
    const vi r = vi_and(v_bits(v_load(y + i)), vi_set(0xffffu));
    vi even, odd;
    hstep_root_codes(square, square, v_set(1.0f), vi_or(r, vi_shl(vi_sub(vi_set(0xffffu), r), 16)), &even, &odd);
    v_store(x + i, v_from_bits(vi_and(vi_join16(vi_shr(odd, 16), even), vi_set(0x7f007fu))));
}

CUDA_KERNEL void double_roots(double *x)
{
    const size_t i = thread_of_grid();
    x[i] = sqrt(x[i]);
}

CUDA_KERNEL void double_quotients(double *x, const double *y)
{
    const size_t i = thread_of_grid();
    x[i] = x[i] / y[i];
}
