#include "device/cuda/blas.h"

#include <limits.h>
#include <stdlib.h>

#include "base/lock.h"
#include "device/cuda/driver/library.h"
#include "device/cuda/gpu.h"

/* Numbers of cublas_api.h. */
enum { POINTERS_ON_DEVICE = 1, NO_SUMS_BELOW_FP32 = 16, SUMS_IN_FP32 = 68, ANY_ALGORITHM = -1 };

/* Workspace for products. cuBLAS's manual recommends this size for the largest GPUs. cuBLAS would allocate its own
 * while a stream is captured. */
#define WORKSPACE ((size_t)32 << 20)

#define FUNCTION(name, symbol, parameters) typedef int hstep_##name##_call parameters;
#include "device/cuda/blas.def"
#undef FUNCTION

static struct {
#define FUNCTION(name, symbol, parameters) hstep_##name##_call *name;
#include "device/cuda/blas.def"
#undef FUNCTION
} blas;

struct hstep_blas {
    struct hstep_gpu *gpu;
    void *handle, *stream;
    uint64_t workspace;
};

/* Loads cuBLAS and its functions. Returns 0 if it or one of the functions is missing. */
static int load(void)
{
#ifdef _WIN32
    static const char *const names[] = {"cublas64_13.dll", "cublas64_12.dll", NULL};
#else
    static const char *const names[] = {"libcublas.so.13", "libcublas.so.12", NULL};
#endif
    const struct {
        const char *symbol;
        void *place;
    } functions[] = {
#define FUNCTION(name, symbol, parameters) {symbol, (void *)&blas.name},
#include "device/cuda/blas.def"
#undef FUNCTION
    };
    void *library = hstep_library_open(names);
    for (size_t i = 0; library && i < sizeof functions / sizeof *functions; i++) {
        void *found;
        hstep_library_find(library, functions[i].symbol, functions[i].place);
        hstep_library_find(library, functions[i].symbol, &found);
        if (!found) {
            hstep_library_close(library);
            library = NULL;
        }
    }
    return library != NULL;
}

static int is_loaded(void)
{
    static atomic_flag lock = ATOMIC_FLAG_INIT;
    static int loaded = -1;
    hstep_lock(&lock);
    if (loaded < 0) loaded = load();
    int result = loaded;
    hstep_unlock(&lock);
    return result;
}

struct hstep_blas *hstep_blas_open(struct hstep_gpu *g)
{
    struct hstep_blas *b = is_loaded() ? calloc(1, sizeof *b) : NULL;
    if (!b) return NULL;
    b->gpu = g;
    if (!blas.cublasCreate(&b->handle)) {
        if (!g->driver->cuMemAlloc(&b->workspace, WORKSPACE) &&
            !blas.cublasSetPointerMode(b->handle, POINTERS_ON_DEVICE) &&
            !blas.cublasSetMathMode(b->handle, NO_SUMS_BELOW_FP32) && !hstep_blas_follow(b, NULL))
            return b;
        hstep_blas_close(b);
    } else {
        free(b);
    }
    return NULL;
}

void hstep_blas_close(struct hstep_blas *b)
{
    blas.cublasDestroy(b->handle);
    if (b->workspace) b->gpu->driver->cuMemFree(b->workspace);
    free(b);
}

static int result_of(int status, const char *call)
{
    return status ? hstep_cuda_fail(HALFSTEP_ERROR_DEVICE, "%s: cuBLAS failed with status %d; start a new process",
                                    call, status)
                  : HALFSTEP_OK;
}

int hstep_blas_follow(struct hstep_blas *b, void *stream)
{
    int status = blas.cublasSetStream(b->handle, stream);
    /* cublasSetStream() goes back to a workspace of cuBLAS's own, so ours is set again. */
    if (!status) status = blas.cublasSetWorkspace(b->handle, (void *)(uintptr_t)b->workspace, WORKSPACE);
    b->stream = stream;
    return result_of(status, "cublasSetStream");
}

int hstep_blas_multiply(struct hstep_blas *b, int type, struct hstep_operand c, struct hstep_operand left,
                        struct hstep_operand right, int64_t rows, int64_t columns, int64_t inner, const float *alpha,
                        const float *beta)
{
    int error = hstep_gpu_enter(b->gpu);
    if (error) return error;
    int status = blas.cublasGemmEx(b->handle, left.turned, right.turned, (int)rows, (int)columns, (int)inner, alpha,
                                   left.x, type, (int)left.stride, right.x, type, (int)right.stride, beta, c.x, type,
                                   (int)c.stride, SUMS_IN_FP32, ANY_ALGORITHM);
    hstep_gpu_leave(b->gpu);
    return result_of(status, "cublasGemmEx");
}

int hstep_blas_copy(struct hstep_blas *b, void *to, const void *from, int64_t n)
{
    int error = hstep_gpu_enter(b->gpu);
    if (error) return error;
    error =
        HSTEP_GPU(b->gpu, cuMemcpyAsync, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, (size_t)n * 2, b->stream);
    hstep_gpu_leave(b->gpu);
    return error;
}
