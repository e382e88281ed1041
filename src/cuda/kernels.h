/* What launches the kernels of kernels.cu: plain data, for C and device code alike. Everything that a call points to
 * lies in the device's memory; its context is NULL. A launch follows the one before it in the stream; nothing else
 * orders them. */
#ifndef HSTEP_CUDA_KERNELS_H
#define HSTEP_CUDA_KERNELS_H

#include "device.h"

/* Threads of a block: all kernels are written for this number. */
#define HSTEP_CUDA_THREADS 256

/* How many blocks a kernel may have: any number, for they share out what there is, or one. */
enum hstep_cuda_shape { HSTEP_CUDA_GRID, HSTEP_CUDA_ONE };

/* What a kernel is told beside the call; kernels.def says which of these it reads. */
struct hstep_cuda_what {
    int first, n;     /* tensors, or sums of limbs */
    int pass;         /* enum hstep_pass */
    int tensor, pair; /* of cross and transform */
    uint64_t bytes;
    void *to;
    const void *from;
};

#endif
