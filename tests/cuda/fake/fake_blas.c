/* A libcublas.so.12 for the fake driver. It has the products that src/device/cuda/blas.def asks for, as work on the
 * stream of its handle. It refuses some calls that cuBLAS accepts. These have factors on the host, or lack the caller's
 * workspace, which cuBLAS would then allocate itself, also in captures. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "fake_cuda.h"

#define V_OP static inline
#include "vec/half.h"

#define EXPORT __attribute__((visibility("default")))

enum { F16 = 2, BF16 = 14, SUMS_IN_FP32 = 68, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };

struct handle {
    void *stream, *workspace;
    int pointers_on_device;
};

struct product {
    int type, turned[2], rows, columns, inner, ld[3];
    const float *alpha, *beta;
    const uint16_t *a, *b;
    uint16_t *c;
};

EXPORT int cublasCreate_v2(void **handle)
{
    *handle = calloc(1, sizeof(struct handle));
    return 0;
}

EXPORT int cublasDestroy_v2(void *handle)
{
    free(handle);
    return 0;
}

EXPORT int cublasSetStream_v2(void *handle, void *stream)
{
    struct handle *h = handle;
    h->stream = stream;
    h->workspace = NULL;
    return 0;
}

EXPORT int cublasSetWorkspace_v2(void *handle, void *memory, size_t bytes)
{
    ((struct handle *)handle)->workspace = memory;
    return bytes < 1 << 20 ? INVALID_VALUE : 0;
}

EXPORT int cublasSetPointerMode_v2(void *handle, int mode)
{
    ((struct handle *)handle)->pointers_on_device = mode == 1;
    return 0;
}

EXPORT int cublasSetMathMode(void *handle, int mode)
{
    (void)handle, (void)mode;
    return 0;
}

static float widened(int type, uint16_t code)
{
    const uint32_t bits = (uint32_t)code << 16;
    float x;
    if (type == F16) return hstep_half_decode(code);
    memcpy(&x, &bits, 4);
    return x;
}

static uint16_t narrowed(int type, float x)
{
    uint32_t bits;
    if (type == F16) return hstep_half_encode(x);
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void multiply(void *argument)
{
    const struct product *p = argument;
    for (int j = 0; j < p->columns; j++)
        for (int i = 0; i < p->rows; i++) {
            float sum = 0.0f;
            uint16_t *c = p->c + i + (size_t)j * (size_t)p->ld[2];
            for (int k = 0; k < p->inner; k++) {
                size_t a =
                    p->turned[0] ? (size_t)k + (size_t)i * (size_t)p->ld[0] : (size_t)i + (size_t)k * (size_t)p->ld[0];
                size_t b =
                    p->turned[1] ? (size_t)j + (size_t)k * (size_t)p->ld[1] : (size_t)k + (size_t)j * (size_t)p->ld[1];
                sum += widened(p->type, p->a[a]) * widened(p->type, p->b[b]);
            }
            /* Does not read c if beta is 0, like BLAS. */
            sum *= *p->alpha;
            *c = narrowed(p->type, *p->beta != 0.0f ? sum + *p->beta * widened(p->type, *c) : sum);
        }
}

EXPORT int cublasGemmEx(void *handle, int turn_a, int turn_b, int rows, int columns, int inner, const void *alpha,
                        const void *a, int type_a, int lda, const void *b, int type_b, int ldb, const void *beta,
                        void *c, int type_c, int ldc, int compute, int algorithm)
{
    const struct handle *h = handle;
    const struct product p = {type_a, {turn_a, turn_b}, rows, columns, inner, {lda, ldb, ldc}, alpha, beta, a, b, c};
    void (*submit)(void *, void (*)(void *), const void *, size_t);
    void *symbol = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_cuda_submit");
    (void)algorithm;
    if (!symbol) return NOT_SUPPORTED;
    if ((type_a != BF16 && type_a != F16) || type_b != type_a || type_c != type_a || compute != SUMS_IN_FP32)
        return NOT_SUPPORTED;
    if (lda < (turn_a ? inner : rows) || ldb < (turn_b ? columns : inner) || ldc < rows || !h->workspace ||
        !h->pointers_on_device || c == a || c == b)
        return INVALID_VALUE;
    memcpy(&submit, &symbol, sizeof submit);
    submit(h->stream, multiply, &p, sizeof p);
    return 0;
}
