/* Runs the GPU kernels as functions of this process, from the same source. Threads are fibers that run until they meet
 * at a barrier or an exchange. Aborts if lanes of a warp exchange while others wait elsewhere or have left. Only one
 * launch may run at a time; it runs on the calling thread. */
#ifndef HSTEP_TESTS_CUDA_EMULATE_H
#define HSTEP_TESTS_CUDA_EMULATE_H

#include <stddef.h>

/* parameters: pointers to the kernel's arguments, as cuLaunchKernel takes them. run: executes one thread. */
struct hstep_emulated_kernel {
    const char *name; /* halfstep_cuda_... */
    void (*run)(void **parameters);
    int shape;
};

extern const struct hstep_emulated_kernel hstep_emulated_kernels[];
extern const int hstep_emulated_kernel_count;

/* Runs all blocks. block must be HSTEP_CUDA_THREADS, and shared, the size of dynamic shared memory, 0. Returns 0, or -1
 * for another shape or without memory for stacks. */
int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **parameters);

/* Computes roots and quotients of four numbers as kernels do (vec/cuda_roots.h). *quotient0 is 0 where b is 0. Returns
 * a mask of what was computed by the way that is right only within a range: 1 for the roots, 2 for the quotients. */
int hstep_emulated_arithmetic(const float *a, const float *b, float *root, float *quotient, float *quotient0);

/* Compute by that way, whatever the range. */
float hstep_emulated_root(float a);
float hstep_emulated_quotient(float a, float b);

#endif
