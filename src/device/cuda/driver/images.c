/* The table of a build without device code; with HALFSTEP_CUDA the build makes another one (cmake/images.cmake). */
#include "device/cuda/driver/images.h"

const struct hstep_cuda_image hstep_cuda_images[] = {{0, 0, 0, 0}};
