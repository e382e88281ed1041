/* A libcuda.so.1 without a GPU, with as much of the driver as src/device/cuda/driver/driver.def and graphs need. Its
 * device memory faults if it is touched outside of work. A stream works only when somebody waits for it or for an event
 * behind it, and when memory is freed. So copies to the process's memory also come late, later than a real driver may
 * make them. Its kernels are those it is linked with (cuda/emulate.h): host entries of the same names, or the kernels
 * themselves.
 *
 * Faults to make come from the environment, or from a test by fake_cuda_control():
 *   FAKE_CUDA_DEVICES=N          GPUs, 0 .. 2 (1).
 *   FAKE_CUDA_DRIVER=N           cuDriverGetVersion() (12080).
 *   FAKE_CUDA_COMPUTE=N          Capability, 10 times (90).
 *   FAKE_CUDA_FAIL_ALLOCATION=N  The N-th allocation is out of memory.
 *   FAKE_CUDA_FAULT=N            The N-th kernel faults, and the context is lost.
 *   FAKE_CUDA_LOSE=N             Kernel number N of kernels.def, counted from 1, does nothing.
 *   FAKE_CUDA_OPEN=1             The process may touch the device's memory, for tests whose tensors lie in it. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* Mutations: what the driver leaves out or mixes up. Tests must notice each. */
enum fake_cuda_mutation {
    FAKE_CUDA_NONE,
    FAKE_CUDA_NO_STREAM_SYNCHRONIZE,
    FAKE_CUDA_NO_EVENT_SYNCHRONIZE,
    FAKE_CUDA_NO_EVENT_RECORD,
    FAKE_CUDA_NO_STREAM_WAIT,
    FAKE_CUDA_SWAP_FIELDS,     /* of a launch's arguments, the call-th pair of fake_cuda_pair() */
    FAKE_CUDA_SWAP_PARAMETERS, /* the two parameters of a launch */
    FAKE_CUDA_SWAP_SHAPE,      /* blocks and threads */
    FAKE_CUDA_MUTATIONS
};
#define FAKE_CUDA_CALLS FAKE_CUDA_SWAP_FIELDS /* those before it leave calls out */

struct fake_cuda_control {
    int devices, driver, compute, open;
    long fail_allocation, fault, fail_launch; /* counted down; 0: never */
    int lose;                                 /* 1 + a kernel that does nothing, in the order of kernels.def; 0: none */
    int mutation, call;                       /* call: only the call-th place in the library; 0: everywhere */
    int strict; /* freeing memory while work is pending is misuse, though a driver would wait */
    /* Results: */
    long launches, kernels, synchronizations, pageable, copies, allocations; /* kernels: those that have run */
    long live, pinned;                                                       /* blocks of either memory */
    long bytes, most_bytes;     /* of the device's memory, now and at most */
    int depth;                  /* of this thread's contexts */
    int calls[FAKE_CUDA_CALLS]; /* places in the library whose call each mutation leaves out */
    const char *offence;        /* the first misuse, or NULL */
    const char *image;          /* device code loaded last; at most 15 characters of it */
};

struct fake_cuda_control *fake_cuda_control(void);
/* Returns 1 if no stream has work to do. */
int fake_cuda_is_idle(void);
/* Returns the names of the n-th pair of fields of one type in a launch's arguments, from 1; NULL beyond the last. */
const char *fake_cuda_pair(int n);

/* Submits work of another library to a stream, with a copy of at most 512 bytes of `argument`. */
void fake_cuda_submit(void *stream, void (*work)(void *argument), const void *argument, size_t bytes);

#endif
