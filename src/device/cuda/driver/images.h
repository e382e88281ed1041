/* Device code: what the build has embedded, best first, and PTX last. */
#ifndef HSTEP_CUDA_IMAGES_H
#define HSTEP_CUDA_IMAGES_H

#include <stddef.h>

struct hstep_cuda_image {
    int compute; /* compute capability, 10 * major + minor, that it is machine code of; 0: PTX, or a file of several */
    const void *data;
    size_t bytes, stored; /* stored: fewer where it is packed (device/cuda/driver/unpack.h) */
};

extern const struct hstep_cuda_image hstep_cuda_images[]; /* up to one of no bytes */

#endif
