/* Which kernels of a GPU have shown the library's bits. This is remembered for the process, and in a file of the user's
 * cache folder for later ones: one file for each image of device code, version of the driver, version of the library
 * and GPU. HALFSTEP_DEVICE_CHECK says what counts: "once", the default; "always": not the file; "never": no check is
 * needed. */
#ifndef HSTEP_CUDA_TRUST_H
#define HSTEP_CUDA_TRUST_H

#include "device/cuda/gpu.h"

/* Returns 1 if a fused kernel may be used, or with -1 all others; 0 if it must be checked. */
int hstep_cuda_trusted(struct hstep_gpu *g, int fused);
/* Remembers that a fused kernel, or with -1 all others, gave the right bits. Where no file can be written, only this
 * process remembers it. */
void hstep_cuda_trust(struct hstep_gpu *g, int fused);

#endif
