/* The kernels for GPUs as functions of this process: the same source, its threads as fibers that run until they
 * meet (a barrier, an exchange). What meets in the wrong company aborts: lanes of a warp that exchange while others
 * wait elsewhere or have left. One launch at a time, of the thread that calls. */
#ifndef HSTEP_TESTS_CUDA_EMULATE_H
#define HSTEP_TESTS_CUDA_EMULATE_H

#include <stddef.h>

/* parameters: pointers to the kernel's arguments, as cuLaunchKernel takes them. run: one thread of it. */
struct hstep_emulated_kernel {
    const char *name; /* halfstep_cuda_... */
    void (*run)(void **parameters);
    int shape;
};

extern const struct hstep_emulated_kernel hstep_emulated_kernels[];
extern const int hstep_emulated_kernel_count;

/* Returns when all blocks are done. block: HSTEP_CUDA_THREADS. shared: dynamic shared memory, which no kernel has.
 * 0, or -1 for a shape that the kernels are not written for, or without memory for stacks. */
int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **parameters);

/* Roots and quotients of four numbers as the kernels take them (vec/cuda_roots.h): a / b, and that with 0 where b is.
 * Returns whether they are by the way that is right within a range alone: 1 of the roots, 2 of the quotients. */
int hstep_emulated_arithmetic(const float *a, const float *b, float *root, float *quotient, float *quotient0);

/* That way, whatever the range. */
float hstep_emulated_root(float a);
float hstep_emulated_quotient(float a, float b);

#endif
