/* Each kernel as the host's entry of its name. Tests of the driver run these, whatever the device code does. */
#include <stddef.h>

#include "cuda/emulate.h"
#include "decide/prepare.h"
#include "device/cuda/code/kernels.h"
#include "device/host/host.h"
#include "kernels/dispatch.h"

static struct hstep_context context;

static const struct hstep_context *host(void)
{
    context.kernels = hstep_isa_in_use();
    context.threads = 1;
    return &context;
}

static struct hstep_call call_of(void **parameters)
{
    struct hstep_call call = *(const struct hstep_call *)parameters[0];
    call.context = host();
    return call;
}

static struct hstep_access access_of(void **parameters)
{
    struct hstep_access access = *(const struct hstep_access *)parameters[0];
    access.context = host();
    return access;
}

static const struct hstep_cuda_what *what_of(void **parameters) { return parameters[1]; }

#define CALL_KERNEL(name, ...)                                 \
    static void run_##name(void **parameters)                  \
    {                                                          \
        struct hstep_call call = call_of(parameters);          \
        const struct hstep_cuda_what *w = what_of(parameters); \
        (void)w;                                               \
        hstep_host_device.name(&call __VA_ARGS__);             \
    }
CALL_KERNEL(scan)
CALL_KERNEL(decide)
CALL_KERNEL(decide_sums, , w->first, w->n)
CALL_KERNEL(count)
CALL_KERNEL(end_round)

/* Returns the call without fused marks, because the device's fused kernels are not the host's. */
static struct hstep_call unfused(void **parameters)
{
    struct hstep_call call = call_of(parameters);
    const struct hstep_cuda_what *w = what_of(parameters);
    for (int i = w->first; i < w->first + w->n; i++) call.plan.updates[i].fused = 0;
    return call;
}

static void run_sum(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    struct hstep_call call = unfused(parameters);
    hstep_host_device.sum(&call, w->first, w->n);
}

/* Updates whole tiles too. The fused kernels then find nothing left to do. */
static void run_update(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    struct hstep_call call = unfused(parameters);
    hstep_host_device.update(&call, w->first, w->n, (enum hstep_pass)w->pass);
}

static void run_nothing(void **parameters) { (void)parameters; }

/* For kernels in phases, the first phase that has all inputs does all the work. */
static void run_cross(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    struct hstep_call call = call_of(parameters);
    if (w->pass == HSTEP_CUDA_ROWS) hstep_host_device.cross(&call, w->tensor, w->pair);
}

static void run_transform(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    struct hstep_call call = call_of(parameters);
    const int rows = hstep_rows_slot(&call.plan.tensors[w->tensor]);
    if (w->pass == HSTEP_CUDA_CLEAR && !rows)
        hstep_host_device.transform(&call, &(struct hstep_matrix){.tensor = w->tensor});
}

/* The host makes rows alike at the end of transform(). */
static void run_rows(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    struct hstep_call call = call_of(parameters);
    if (w->pass == HSTEP_CUDA_CLEAR_SUMS)
        hstep_host_device.transform(&call, &(struct hstep_matrix){.tensor = w->tensor});
}

static void run_carry(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    hstep_host_device.carry(host(), w->to, w->n);
}

static void run_accumulate(void **parameters)
{
    struct hstep_accumulation a = *(const struct hstep_accumulation *)parameters[0];
    a.context = host();
    hstep_host_device.accumulate(&a);
}

static void run_read(void **parameters)
{
    struct hstep_access a = access_of(parameters);
    hstep_host_device.read(&a, what_of(parameters)->to);
}

static void run_write(void **parameters)
{
    struct hstep_access a = access_of(parameters);
    hstep_host_device.write(&a, what_of(parameters)->from);
}

static void run_saturated(void **parameters)
{
    struct hstep_access a = access_of(parameters);
    hstep_host_device.saturated(&a, what_of(parameters)->to);
}

static void run_zero(void **parameters)
{
    const struct hstep_cuda_what *w = what_of(parameters);
    hstep_host_device.zero(host(), w->to, w->bytes);
}

const struct hstep_emulated_kernel hstep_emulated_kernels[] = {
#define KERNEL(name, shape) {"halfstep_cuda_" #name, run_##name, shape},
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#define KERNEL_FUSED(rule, first, second) \
    {"halfstep_cuda_fused_" #rule "_" #first "_" #second, run_nothing, HSTEP_CUDA_GRID},
#include "device/cuda/code/kernels.def"
};
const int hstep_emulated_kernel_count = sizeof hstep_emulated_kernels / sizeof *hstep_emulated_kernels;

int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **parameters)
{
    if (block != HSTEP_CUDA_THREADS || grid < 1 || (kernel->shape == HSTEP_CUDA_ONE && grid != 1) || shared) return -1;
    kernel->run(parameters);
    return 0;
}
