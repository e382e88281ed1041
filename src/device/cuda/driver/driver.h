/* NVIDIA's driver, libcuda, found when it is first asked for: the library is not linked with it, and is the same file
 * on machines that have none. Errors become one of our codes and a sentence that names the call and what to do. */
#ifndef HSTEP_CUDA_DRIVER_H
#define HSTEP_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* The oldest driver that is taken, as cuDriverGetVersion() tells: of CUDA 12.0, which the images are made for. */
#define HSTEP_CUDA_MINIMUM_DRIVER 12000
/* The oldest GPU, as compute capability: what the PTX is made for. */
#define HSTEP_CUDA_MINIMUM_COMPUTE 80

/* Numbers of cuda.h, which is not needed to build. */
enum {
    HSTEP_CU_SUCCESS = 0,
    HSTEP_CU_OUT_OF_MEMORY = 2,
    HSTEP_CU_ATTRIBUTE_MULTIPROCESSORS = 16,
    HSTEP_CU_ATTRIBUTE_COMPUTE_MAJOR = 75,
    HSTEP_CU_ATTRIBUTE_COMPUTE_MINOR = 76,
    HSTEP_CU_POINTER_MEMORY_TYPE = 2,
    HSTEP_CU_POINTER_DEVICE_ORDINAL = 9,
    HSTEP_CU_MEMORY_DEVICE = 2,
    HSTEP_CU_EVENT_DISABLE_TIMING = 2,
    HSTEP_CU_CAPTURE_ACTIVE = 1
};

#define FUNCTION(name, symbol, since, parameters) typedef int hstep_##name##_call parameters;
#include "device/cuda/driver/driver.def"
#undef FUNCTION

struct hstep_cuda_driver {
#define FUNCTION(name, symbol, since, parameters) hstep_##name##_call *name;
#include "device/cuda/driver/driver.def"
#undef FUNCTION
    int version; /* 0: there is none */
};

/* The driver, or NULL and a sentence. *version: what it speaks, where it could be asked, else 0. */
const struct hstep_cuda_driver *hstep_cuda_driver(int *version);

/* Sets the thread's sentence and returns the code. */
int hstep_cuda_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *hstep_cuda_why(void);
/* HALFSTEP_OK, or the code and sentence of what a call has returned; lasting: whether no call will succeed again. */
int hstep_cuda_result(const struct hstep_cuda_driver *d, int result, const char *call, int *lasting);

#endif
