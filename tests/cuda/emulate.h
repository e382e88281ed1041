/* Runs GPU kernels on the processor: the PTX that clang makes of them, which translate.py turns into tables. machine.c
 * runs these. Aborts with a message at what is a fault on a GPU. Only one launch may run at a time; it runs on the
 * calling thread. */
#ifndef HSTEP_TESTS_CUDA_EMULATE_H
#define HSTEP_TESTS_CUDA_EMULATE_H

#include <stddef.h>
#include <stdint.h>

/* How kernels are run. All 0 by default. */
extern __attribute__((visibility("default"))) struct hstep_emulation {
    int watch; /* 1: looks at each access to memory (watch.h) */
    enum { HSTEP_ORDER_FORWARD, HSTEP_ORDER_REVERSE, HSTEP_ORDER_RANDOM } order; /* of blocks, warps and lanes */
    /* Estimates of reciprocals and of roots of codes: the nearest, or off by what the PTX ISA allows. */
    enum { HSTEP_ESTIMATES_NEAREST, HSTEP_ESTIMATES_HIGH, HSTEP_ESTIMATES_LOW, HSTEP_ESTIMATES_ANYWHERE } estimates;
    uint64_t seed; /* of a random order */
    long most;     /* instructions of a launch in order, for a warp at a time; more are a fault. 0: any number */
} hstep_emulation;

/* Returns how often the watch has found something. */
long hstep_emulated_reports(void);

/* run: executes one thread; NULL if the kernel is translated. */
struct hstep_emulated_kernel {
    const char *name; /* halfstep_cuda_... */
    void (*run)(void **parameters);
    int shape;
};

extern const struct hstep_emulated_kernel hstep_emulated_kernels[];
extern const int hstep_emulated_kernel_count;

/* Runs all blocks. parameters: pointers to the kernel's arguments, as cuLaunchKernel takes them. block must be
 * HSTEP_CUDA_THREADS, and shared, the size of dynamic shared memory, 0. Returns 0, or -1 for another shape and for a
 * kernel that was not translated. */
int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **parameters);

/* Returns 1 if the kernel does nothing, because it was left out of what was translated. */
int hstep_emulated_is_empty(const struct hstep_emulated_kernel *kernel);

/* Runs any entry that was translated, of blocks of HSTEP_CUDA_THREADS. Returns -1 for an unknown name. */
int hstep_emulate_entry(const char *name, int grid, void **parameters);

#endif
