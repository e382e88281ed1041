/* One GPU: its primary context, which other libraries of the process share, and the device code loaded into it. Made
 * when a handle first asks for it and kept until the process ends: graphs that were captured refer to its kernels. */
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
    unsigned blocks[HSTEP_CUDA_KERNELS]; /* of a launch */
    atomic_int broken;                   /* by a lasting error, whose sentence is */
    char why[256];
};

/* GPU number `name` in decimal ("": 0), or NULL with a code and a sentence. */
struct hstep_gpu *hstep_gpu_open(const char *name, int *error);
/* As much as there is to tell. */
void hstep_gpu_inform(const char *name, halfstep_device_info *info);

/* HALFSTEP_OK, or what hstep_cuda_result() says, remembered if it is lasting. */
int hstep_gpu_result(struct hstep_gpu *g, int result, const char *call);
/* A call with the context current already: HSTEP_GPU(g, cuMemFree, memory). */
#define HSTEP_GPU(g, name, ...) hstep_gpu_result(g, (g)->driver->name(__VA_ARGS__), #name)

/* Makes the context current on this thread, and what was current again. enter() refuses a GPU that is broken. */
int hstep_gpu_enter(struct hstep_gpu *g);
void hstep_gpu_leave(struct hstep_gpu *g);

#endif
