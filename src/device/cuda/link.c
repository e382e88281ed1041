#include "device/cuda/link.h"

#include <stdlib.h>
#include <string.h>

#include "base/lock.h"
#include "device/cuda/blas.h"

/* Most bytes of one copy from pinned memory. */
#define PIECE ((uint64_t)4 << 20)

/* ---- Beginning and end ---- */

int hstep_link_open(struct hstep_link **link, const char *name, void *stream)
{
    int error;
    struct hstep_gpu *gpu = hstep_gpu_open(name, &error);
    if (!gpu) return error;
    struct hstep_link *l = calloc(1, sizeof *l);
    if (!l) return hstep_cuda_fail(HALFSTEP_ERROR_MEMORY, "no memory for a handle on the GPU");
    l->gpu = gpu;
    l->stream = stream;
    atomic_flag_clear(&l->lock);
    error = hstep_gpu_enter(gpu);
    if (!error) {
        error = HSTEP_GPU(gpu, cuEventCreate, &l->event, HSTEP_CU_EVENT_DISABLE_TIMING);
        hstep_gpu_leave(gpu);
    }
    if (error) free(l);
    else *link = l;
    return error;
}

static void free_kept(struct hstep_link *l, struct hstep_kept *k)
{
    for (struct hstep_kept *next; k; k = next) {
        next = k->next;
        l->gpu->driver->cuMemFree(k->memory);
        l->gpu->driver->cuMemFreeHost(k->pinned);
        free(k);
    }
}

/* Memory of a broken GPU cannot be freed. */
void hstep_link_close(struct hstep_link *l)
{
    const struct hstep_cuda_driver *d = l->gpu->driver;
    if (!hstep_gpu_enter(l->gpu)) {
        d->cuStreamSynchronize(l->stream);
        for (int i = 0; i < HSTEP_CUDA_ROOMS; i++) {
            if (l->pinned[i].event) d->cuEventDestroy(l->pinned[i].event);
            if (l->pinned[i].memory) d->cuMemFreeHost(l->pinned[i].memory);
        }
        free_kept(l, l->kept);
        free_kept(l, l->spare);
        if (l->pointers) d->cuMemFree((uint64_t)(uintptr_t)l->pointers);
        if (l->scratch) d->cuMemFree(l->scratch);
        if (l->blas) hstep_blas_close(l->blas);
        d->cuEventDestroy(l->event);
        hstep_gpu_leave(l->gpu);
    }
    free((void *)l->sent);
    free(l);
}

int hstep_link_enter(struct hstep_link *l)
{
    hstep_lock(&l->lock);
    int error = hstep_gpu_enter(l->gpu);
    if (error) hstep_unlock(&l->lock);
    return error;
}

void hstep_link_leave(struct hstep_link *l)
{
    hstep_gpu_leave(l->gpu);
    hstep_unlock(&l->lock);
}

int hstep_link_records(struct hstep_link *l)
{
    int status = 0;
    return !l->gpu->driver->cuStreamIsCapturing(l->stream, &status) && status == HSTEP_CU_CAPTURE_ACTIVE;
}

/* ---- Whose memory ---- */

int hstep_link_owns(struct hstep_link *l, const void *memory)
{
    const struct hstep_cuda_driver *d = l->gpu->driver;
    uint64_t at = (uint64_t)(uintptr_t)memory, base;
    size_t bytes;
    if (at - l->range[l->last_range].base < l->range[l->last_range].bytes) return HALFSTEP_OK;
    for (int i = 0; i < HSTEP_CUDA_RANGES; i++)
        if (at - l->range[i].base < l->range[i].bytes) {
            l->last_range = i;
            return HALFSTEP_OK;
        }
    /* Ordinary memory of the process has type 0. cuPointerGetAttribute() would report it as an error, which tools
     * show. */
    unsigned type = 0;
    int ordinal = -1, attributes[] = {HSTEP_CU_POINTER_MEMORY_TYPE, HSTEP_CU_POINTER_DEVICE_ORDINAL};
    void *values[] = {&type, &ordinal};
    int error = HSTEP_GPU(l->gpu, cuPointerGetAttributes, 2, attributes, values, at);
    if (error) return error;
    if (type != HSTEP_CU_MEMORY_DEVICE)
        return hstep_cuda_fail(HALFSTEP_ERROR_ARGUMENT, "%p is memory of the process; it must be memory of GPU %d",
                               memory, l->gpu->ordinal);
    if (ordinal != l->gpu->ordinal)
        return hstep_cuda_fail(HALFSTEP_ERROR_ARGUMENT, "%p is memory of GPU %d; it must be memory of GPU %d", memory,
                               ordinal, l->gpu->ordinal);
    if (!d->cuMemGetAddressRange(&base, &bytes, at)) {
        l->range[l->next_range].base = base;
        l->range[l->next_range].bytes = bytes;
        l->next_range = (l->next_range + 1) % HSTEP_CUDA_RANGES;
    }
    return HALFSTEP_OK;
}

/* ---- From the process to the GPU ---- */

/* Takes the next pinned buffer, which no copy reads any more, with room for `bytes`. */
static int take_pinned(struct hstep_link *l, uint64_t bytes, struct hstep_pinned **pinned)
{
    struct hstep_gpu *g = l->gpu;
    struct hstep_pinned *p = *pinned = &l->pinned[l->next];
    int error = HALFSTEP_OK;
    if (!p->event) error = HSTEP_GPU(g, cuEventCreate, &p->event, HSTEP_CU_EVENT_DISABLE_TIMING);
    if (!error && p->used) error = HSTEP_GPU(g, cuEventSynchronize, p->event);
    if (error) return error;
    p->used = 0;
    l->next = (l->next + 1) % HSTEP_CUDA_ROOMS;
    if (p->bytes >= bytes) return HALFSTEP_OK;
    if (p->memory) g->driver->cuMemFreeHost(p->memory);
    p->memory = NULL;
    p->bytes = 0;
    uint64_t wanted = 4096;
    while (wanted < bytes) wanted *= 2;
    error = HSTEP_GPU(g, cuMemHostAlloc, &p->memory, (size_t)wanted, 0);
    if (!error) p->bytes = wanted;
    return error;
}

int hstep_link_send(struct hstep_link *l, uint64_t to, const void *from, uint64_t bytes)
{
    struct hstep_gpu *g = l->gpu;
    if (hstep_link_records(l))
        return hstep_cuda_fail(
            HALFSTEP_ERROR_ORDER,
            "the stream is being captured, and replays could not read memory of the process again; make this "
            "call before the capture");
    for (uint64_t done = 0; done < bytes; done += PIECE) {
        uint64_t n = bytes - done < PIECE ? bytes - done : PIECE;
        struct hstep_pinned *pinned;
        int error = take_pinned(l, n, &pinned);
        if (error) return error;
        memcpy(pinned->memory, (const char *)from + done, (size_t)n);
        if ((error =
                 HSTEP_GPU(g, cuMemcpyAsync, to + done, (uint64_t)(uintptr_t)pinned->memory, (size_t)n, l->stream)) ||
            (error = HSTEP_GPU(g, cuEventRecord, pinned->event, l->stream)))
            return error;
        pinned->used = 1;
    }
    return HALFSTEP_OK;
}

int hstep_link_scratch(struct hstep_link *l, uint64_t bytes)
{
    struct hstep_gpu *g = l->gpu;
    if (l->scratch_bytes >= bytes) return HALFSTEP_OK;
    /* Work under way may still use the old scratch memory. */
    int error = HSTEP_GPU(g, cuStreamSynchronize, l->stream);
    if (error) return error;
    if (l->scratch) g->driver->cuMemFree(l->scratch);
    l->scratch = l->scratch_bytes = 0;
    if (!(error = HSTEP_GPU(g, cuMemAlloc, &l->scratch, (size_t)bytes))) l->scratch_bytes = bytes;
    return error;
}

/* ---- Pointers ---- */

/* Allocates memory for n pointers of a call that will be captured, because nothing can be allocated during a
 * capture. */
static int keep_another(struct hstep_link *l, int n)
{
    struct hstep_gpu *g = l->gpu;
    struct hstep_kept *k = calloc(1, sizeof *k);
    if (!k) return hstep_cuda_fail(HALFSTEP_ERROR_MEMORY, "no memory for the pointers of a captured step");
    int error = HSTEP_GPU(g, cuMemAlloc, &k->memory, (size_t)n * sizeof(void *));
    if (!error && (error = HSTEP_GPU(g, cuMemHostAlloc, &k->pinned, (size_t)n * sizeof(void *), 0)))
        g->driver->cuMemFree(k->memory);
    if (error) {
        free(k);
        return error;
    }
    k->n = n;
    k->next = l->spare;
    l->spare = k;
    return HALFSTEP_OK;
}

int hstep_link_settle(struct hstep_link *l, int n_tensors)
{
    uint64_t count = 4 * (uint64_t)n_tensors, memory;
    if (!count) return HALFSTEP_OK;
    /* Left by an earlier attempt that was refused. */
    if (l->pointers) l->gpu->driver->cuMemFree((uint64_t)(uintptr_t)l->pointers);
    l->pointers = NULL;
    free((void *)l->sent);
    if (!(l->sent = (void **)calloc((size_t)count, sizeof *l->sent)))
        return hstep_cuda_fail(HALFSTEP_ERROR_MEMORY, "no memory for the pointers of %d tensors", n_tensors);
    int error = HSTEP_GPU(l->gpu, cuMemAlloc, &memory, (size_t)count * sizeof *l->sent);
    if (error) return error;
    l->pointers = (void **)(uintptr_t)memory;
    l->n_tensors = n_tensors;
    /* No pointer is all ones, so the first call sends all of its own. */
    memset((void *)l->sent, 0xff, (size_t)count * sizeof *l->sent);
    return keep_another(l, 2 * n_tensors);
}

/* Keeps the pointers that replays will read. If an earlier capture has the same, its memory is used. Otherwise the copy
 * becomes part of the graph, from pinned memory that stays. */
static int keep_pointers(struct hstep_link *l, void *const *pointers, int n, uint64_t *memory)
{
    const size_t bytes = (size_t)n * sizeof *pointers;
    for (struct hstep_kept *k = l->kept; k; k = k->next)
        if (k->n >= n && !memcmp(k->pinned, pointers, bytes)) {
            *memory = k->memory;
            return HALFSTEP_OK;
        }
    struct hstep_kept *k = l->spare;
    if (!k)
        return hstep_cuda_fail(HALFSTEP_ERROR_ORDER,
                               "a second step in one capture must have the pointers of the first; capture it by "
                               "itself, after a step outside of captures");
    memset(k->pinned, 0xff, (size_t)k->n * sizeof *pointers);
    memcpy(k->pinned, pointers, bytes);
    int error = HSTEP_GPU(l->gpu, cuMemcpyAsync, k->memory, (uint64_t)(uintptr_t)k->pinned, bytes, l->stream);
    if (error) return error;
    l->spare = k->next;
    k->next = l->kept;
    l->kept = k;
    *memory = k->memory;
    return HALFSTEP_OK;
}

/* Keeps the pointers of a call in a captured step: those of its weights, then those of its gradients. */
static int keep_call(struct hstep_link *l, const struct hstep_call *call, uint64_t *memory)
{
    const size_t n = (size_t)call->n, bytes = n * sizeof(void *);
    void **wanted = (void **)calloc(2 * n, sizeof *wanted);
    if (!wanted) return hstep_cuda_fail(HALFSTEP_ERROR_MEMORY, "no memory for the pointers of a captured step");
    if (call->weights) memcpy((void *)wanted, call->weights, bytes);
    memcpy((void *)(wanted + n), call->gradients, bytes);
    int error = keep_pointers(l, wanted, 2 * call->n, memory);
    free((void *)wanted);
    return error;
}

/* Sends pointers, unless the GPU's memory has these already. `sent` is what it has. */
static int send_changed(struct hstep_link *l, uint64_t memory, void **sent, const void *pointers, size_t bytes)
{
    if (!memcmp((const void *)sent, pointers, bytes)) return HALFSTEP_OK;
    int error = hstep_link_send(l, memory, pointers, bytes);
    if (!error) memcpy((void *)sent, pointers, bytes);
    return error;
}

int hstep_link_point(struct hstep_link *l, const struct hstep_call *call, struct hstep_call *pointed)
{
    const int n = call->n;
    *pointed = *call;
    pointed->context = NULL;
    pointed->tensors = NULL;
    if (!n) return HALFSTEP_OK;
    const size_t bytes = (size_t)n * sizeof(void *);
    int at = call->single ? 2 * l->n_tensors + 2 * call->first : 0, error = HALFSTEP_OK;
    void **sent = l->sent + at;
    uint64_t memory = (uint64_t)(uintptr_t)(l->pointers + at);
    if (hstep_link_records(l)) {
        error = keep_call(l, call, &memory);
    } else {
        if (call->weights) error = send_changed(l, memory, sent, call->weights, bytes);
        if (!error) error = send_changed(l, memory + bytes, sent + n, call->gradients, bytes);
        if (!error && !l->spare) error = keep_another(l, 2 * l->n_tensors);
    }
    if (call->weights) pointed->weights = (void *const *)(uintptr_t)memory;
    pointed->gradients = (const void *const *)(uintptr_t)(memory + bytes);
    return error;
}

int hstep_link_launch(struct hstep_link *l, int kernel, void *about, struct hstep_cuda_what *what)
{
    struct hstep_gpu *g = l->gpu;
    void *parameters[] = {about, what};
    return HSTEP_GPU(g, cuLaunchKernel, g->function[kernel], g->blocks[kernel], 1, 1, HSTEP_CUDA_THREADS, 1, 1, 0,
                     l->stream, parameters, NULL);
}
