/* The device code that the build has embedded, in order of preference, with PTX last. */
#ifndef HSTEP_CUDA_IMAGES_H
#define HSTEP_CUDA_IMAGES_H

#include <stddef.h>

struct hstep_cuda_image {
    int compute;          /* compute capability of the machine code, 10 * major + minor; 0: PTX, or a file of several */
    const void *data;     /* packed */
    size_t bytes, packed; /* packed: the size of `data` (device/cuda/driver/unpack.h) */
};

/* What a user of a build without device code does. */
#define HSTEP_CUDA_MAKE_CODE                                                                                        \
    "install clang (Debian: apt-get install clang) and build again, by make or pip; a build with tests also needs " \
    "-DHALFSTEP_CUDA=ON (docs/gpu.md)"

extern const struct hstep_cuda_image hstep_cuda_images[]; /* ends with an image of 0 bytes */
extern const char hstep_cuda_code[];                      /* halfstep_device_info.code */
extern const char hstep_cuda_code_text[];                 /* halfstep_device_code() */

#endif
