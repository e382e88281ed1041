/* One GPU: its primary context, which other libraries of the process share, and the device code that is loaded into it.
 * A GPU is opened when a handle first asks for it. It stays until the process ends, because captured graphs refer to
 * its kernels. */
#ifndef HSTEP_CUDA_GPU_H
#define HSTEP_CUDA_GPU_H

#include <stdatomic.h>

#include "device/cuda/code/kernels.h"
#include "device/cuda/driver/driver.h"

struct hstep_gpu {
    const struct hstep_cuda_driver *driver;
    int ordinal, device, compute, multiprocessors;
    uint64_t memory;
    char name[100];
    void *context, *module;
    void *function[HSTEP_CUDA_KERNELS];
    unsigned blocks[HSTEP_CUDA_KERNELS];     /* of each kernel's launch */
    uint64_t image;                          /* hash of the device code that was loaded */
    atomic_char trusted[HSTEP_CUDA_KERNELS]; /* trust.h */
    atomic_int broken;                       /* set by a lasting error, with its text in why */
    char why[256];
};

/* Returns GPU number `name`, in decimal, where "" is 0. Returns NULL with *error and an error text if it cannot be
 * used. */
struct hstep_gpu *hstep_gpu_open(const char *name, int *error);
/* Fills in all that can be found out about the GPU. */
void hstep_gpu_inform(const char *name, halfstep_device_info *info);
const char *hstep_gpu_code(void);

/* Returns what hstep_cuda_result() says of a result. A lasting error marks the GPU as broken. */
int hstep_gpu_result(struct hstep_gpu *g, int result, const char *call);
/* Makes a call of the driver while the context is current. Example: HSTEP_GPU(g, cuMemFree, memory). */
#define HSTEP_GPU(g, name, ...) hstep_gpu_result(g, (g)->driver->name(__VA_ARGS__), #name)

/* hstep_gpu_enter() makes the context current on this thread. It refuses a GPU that is broken. hstep_gpu_leave()
 * restores the context of before. */
int hstep_gpu_enter(struct hstep_gpu *g);
void hstep_gpu_leave(struct hstep_gpu *g);

#endif
