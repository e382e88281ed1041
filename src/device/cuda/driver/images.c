/* The table of a build without device code. HALFSTEP_CUDA makes the build generate another one (cmake/images.cmake). */
#include "device/cuda/driver/images.h"

const struct hstep_cuda_image hstep_cuda_images[] = {{0, 0, 0, 0}};
const char hstep_cuda_code[] = "";
const char hstep_cuda_code_text[] = "none in this build; " HSTEP_CUDA_MAKE_CODE;
