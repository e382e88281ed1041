/* A libcuda.so.1 without a GPU: as much of the driver as src/device/cuda/driver/driver.def and graphs need. Its device
 * memory faults when it is touched outside of work. A stream works only when somebody waits for it or for an event
 * behind it, and when memory is freed. So copies to the process's memory come late too, later than a real driver may
 * make them. Kernels are those that it is linked with (cuda/emulate.h): the host's entries by their names, or the
 * kernels themselves.
 *
 * What is to go wrong comes from the environment, or from a test by fake_cuda_control():
 *   FAKE_CUDA_DEVICES=N     GPUs, 0 .. 2 (1)         FAKE_CUDA_DRIVER=N     cuDriverGetVersion() (12080)
 *   FAKE_CUDA_COMPUTE=N     capability, 10 times (90)  FAKE_CUDA_FAIL_ALLOCATION=N  the N-th is out of memory
 *   FAKE_CUDA_FAULT=N       the N-th kernel faults, and the context is lost
 *   FAKE_CUDA_OPEN=1        the process may touch the device's memory, for tests whose tensors lie in it */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

/* What a mutation leaves out or mixes up, for tests that have to notice. */
enum fake_cuda_mutation {
    FAKE_CUDA_NONE,
    FAKE_CUDA_NO_STREAM_SYNCHRONIZE,
    FAKE_CUDA_NO_EVENT_SYNCHRONIZE,
    FAKE_CUDA_NO_EVENT_RECORD,
    FAKE_CUDA_NO_STREAM_WAIT,
    FAKE_CUDA_SWAP_FIELDS,     /* of what a launch is given, the call-th pair: fake_cuda_pair() */
    FAKE_CUDA_SWAP_PARAMETERS, /* the two of a launch */
    FAKE_CUDA_SWAP_SHAPE,      /* blocks and threads */
    FAKE_CUDA_MUTATIONS
};
#define FAKE_CUDA_CALLS FAKE_CUDA_SWAP_FIELDS /* those before it leave calls out */

struct fake_cuda_control {
    int devices, driver, compute, open;
    long fail_allocation, fault, fail_launch; /* counted down, 0: never */
    int mutation, call; /* call: only where it is made for the call-th time from another place; 0: everywhere */
    int strict;         /* nothing is given back while work is on its way, though a driver would wait for that */
    /* Told: */
    long launches, kernels, synchronizations, pageable, copies, allocations; /* kernels: that have run */
    long live, pinned;                                                       /* blocks of either memory */
    int depth;                                                               /* of this thread's contexts */
    int calls[FAKE_CUDA_CALLS]; /* places that call what each mutation leaves out */
    const char *offence;        /* the first misuse, or NULL */
    const char *image;          /* the device code that was taken last; at most 15 characters of it */
};

struct fake_cuda_control *fake_cuda_control(void);
/* Whether no stream has work that is still to be done. */
int fake_cuda_is_idle(void);
/* Two fields of one type in what a launch is given, from 1 on; NULL: there are no more. */
const char *fake_cuda_pair(int n);

/* Work of another library on a stream, in its turn, with a copy of what `argument` points to: at most 512 bytes. */
void fake_cuda_submit(void *stream, void (*work)(void *argument), const void *argument, size_t bytes);

#endif
