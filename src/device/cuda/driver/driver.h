/* NVIDIA's driver, libcuda, which is loaded on first use. The library is not linked with it, so one file serves
 * machines with and without it. Errors become an error code of the library and a text that names the call and what to
 * do. */
#ifndef HSTEP_CUDA_DRIVER_H
#define HSTEP_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

/* The oldest driver that works, as cuDriverGetVersion() counts: CUDA 12.0, which the images are made for. */
#define HSTEP_CUDA_MINIMUM_DRIVER 12000
/* The lowest compute capability of a GPU that works, for which the PTX is made. */
#define HSTEP_CUDA_MINIMUM_COMPUTE 80

/* Constants of cuda.h, which is not needed to build. */
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
    int version; /* 0: not loaded */
};

/* Returns the driver, or NULL with an error text. Sets *version to the driver's CUDA version, or to 0 if it could not
 * be queried. */
const struct hstep_cuda_driver *hstep_cuda_driver(int *version);

/* Sets the thread's error text and returns the code. */
int hstep_cuda_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *hstep_cuda_why(void);
/* Returns HALFSTEP_OK, or the error code of a call's result with its text. Sets *lasting, unless it
 * is NULL, if no later call can succeed. */
int hstep_cuda_result(const struct hstep_cuda_driver *d, int result, const char *call, int *lasting);

#endif
