/* The GPU's device table (device.h). Every entry puts work on the handle's stream, with one launch for all tensors of a
 * phase. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/blas.h"
#include "device/cuda/link.h"
#include "device/cuda/sequence.h"
#include "device/cuda/trust.h"
#include "rules/transforms.h"

static struct hstep_link *link_of(const struct hstep_context *c) { return c->link; }

/* ---- Streams ---- */

static int cuda_open(struct hstep_context *c, const char *name, void *stream)
{
    return hstep_link_open(&c->link, name, stream);
}

static void cuda_close(struct hstep_context *c)
{
    if (c->link) hstep_link_close(c->link);
    c->link = NULL;
}

static int cuda_follow(const struct hstep_context *c, void *stream)
{
    struct hstep_link *l = link_of(c);
    if (stream == l->stream) return HALFSTEP_OK;
    int error = hstep_link_enter(l), before = 0;
    if (error) return error;
    /* A capture cannot wait for work outside of it, and no work can wait for a capture. */
    before = hstep_link_records(l);
    void *old = l->stream;
    l->stream = stream;
    if (!before && !hstep_link_records(l)) {
        error = HSTEP_GPU(l->gpu, cuEventRecord, l->event, old);
        if (!error) error = HSTEP_GPU(l->gpu, cuStreamWaitEvent, stream, l->event, 0);
        if (error) l->stream = old;
    }
    hstep_link_leave(l);
    return error;
}

static int cuda_records(const struct hstep_context *c)
{
    struct hstep_link *l = link_of(c);
    if (hstep_link_enter(l)) return 0;
    int records = hstep_link_records(l);
    hstep_link_leave(l);
    return records;
}

static int cuda_owns(const struct hstep_context *c, const void *const *memory, int n, int *error)
{
    struct hstep_link *l = link_of(c);
    int i = 0;
    *error = hstep_link_enter(l);
    if (*error) return 0;
    while (i < n && (!memory[i] || !(*error = hstep_link_owns(l, memory[i])))) i++;
    hstep_link_leave(l);
    return i;
}

static int cuda_trusted(const struct hstep_context *c, int fused) { return hstep_cuda_trusted(link_of(c)->gpu, fused); }
static void cuda_trust(const struct hstep_context *c, int fused) { hstep_cuda_trust(link_of(c)->gpu, fused); }

/* ---- Memory ---- */

static int cuda_allocate(const struct hstep_context *c, uint64_t bytes, void **memory)
{
    struct hstep_link *l = link_of(c);
    uint64_t found;
    int error = hstep_link_enter(l);
    if (error) return error;
    error = HSTEP_GPU(l->gpu, cuMemAlloc, &found, (size_t)(bytes ? bytes : 1));
    if (!error) *memory = (void *)(uintptr_t)found;
    hstep_link_leave(l);
    return error;
}

static void cuda_release(const struct hstep_context *c, void *memory)
{
    struct hstep_link *l = link_of(c);
    if (!memory || !l || hstep_link_enter(l)) return;
    l->gpu->driver->cuStreamSynchronize(l->stream);
    memset(l->range, 0, sizeof l->range);
    l->gpu->driver->cuMemFree((uint64_t)(uintptr_t)memory);
    hstep_link_leave(l);
}

static int cuda_zero(const struct hstep_context *c, void *memory, uint64_t bytes)
{
    struct hstep_link *l = link_of(c);
    if (!bytes) return HALFSTEP_OK;
    int error = hstep_link_enter(l);
    if (error) return error;
    error = HSTEP_GPU(l->gpu, cuMemsetD8Async, (uint64_t)(uintptr_t)memory, 0, (size_t)bytes, l->stream);
    hstep_link_leave(l);
    return error;
}

static int cuda_copy(const struct hstep_context *c, void *to, const void *from, uint64_t bytes)
{
    struct hstep_link *l = link_of(c);
    uint64_t target = (uint64_t)(uintptr_t)to;
    if (!bytes) return HALFSTEP_OK;
    int error = hstep_link_enter(l);
    if (error) return error;
    error = hstep_link_owns(l, from);
    if (error == HALFSTEP_ERROR_ARGUMENT) error = hstep_link_send(l, target, from, bytes);
    else if (!error)
        error = HSTEP_GPU(l->gpu, cuMemcpyAsync, target, (uint64_t)(uintptr_t)from, (size_t)bytes, l->stream);
    hstep_link_leave(l);
    return error;
}

static int cuda_wait(const struct hstep_context *c)
{
    struct hstep_link *l = link_of(c);
    int error = hstep_link_enter(l);
    if (error) return error;
    error = HSTEP_GPU(l->gpu, cuStreamSynchronize, l->stream);
    hstep_link_leave(l);
    return error;
}

static int cuda_settle(const struct hstep_context *c, const struct hstep_plan *plan)
{
    struct hstep_link *l = link_of(c);
    int error = hstep_link_enter(l);
    if (error) return error;
    error = hstep_link_settle(l, plan->n_tensors);
    hstep_link_leave(l);
    return error;
}

/* ---- Steps ---- */

/* A tensor has one fused kernel for all updates that have one. */
static int cuda_find_fused(const struct hstep_context *c, const struct hstep_tensor *t, enum hstep_way way)
{
    (void)c;
    return way == HSTEP_WAY_COMPARED ? -1 : hstep_cuda_find_fused(t);
}

static size_t cuda_workspace(const struct hstep_tensor *t) { return (size_t)hstep_cuda_workspace(t); }

/* Launches a kernel for a call. A step must be completed once it has changed tensors, because the counters would not
 * match them otherwise. An error in between therefore makes the link refuse all later steps. */
static int run(const struct hstep_call *call, int kernel, struct hstep_cuda_what what)
{
    struct hstep_link *l = link_of(call->context);
    struct hstep_call pointed;
    int changes = kernel == HSTEP_CUDA_update || kernel == HSTEP_CUDA_transform || kernel == HSTEP_CUDA_cross ||
                  kernel >= HSTEP_CUDA_FUSED;
    int error = hstep_link_enter(l);
    if (error) return error;
    if (l->incomplete)
        error = hstep_cuda_fail(HALFSTEP_ERROR_DEVICE,
                                "an earlier step was cut short, so weights and states do not belong together; load a "
                                "checkpoint into a new handle");
    else if (!(error = hstep_link_point(l, call, &pointed))) error = hstep_link_launch(l, kernel, &pointed, &what);
    if (error && (changes || kernel == HSTEP_CUDA_count)) l->incomplete = 1;
    hstep_link_leave(l);
    return error;
}

static int cuda_scan(const struct hstep_call *call) { return run(call, HSTEP_CUDA_scan, (struct hstep_cuda_what){0}); }
static int cuda_decide(const struct hstep_call *call)
{
    return run(call, HSTEP_CUDA_decide, (struct hstep_cuda_what){0});
}
static int cuda_sum(const struct hstep_call *call, int first, int n)
{
    return run(call, HSTEP_CUDA_sum, (struct hstep_cuda_what){.first = first, .n = n, .pass = HSTEP_PASS_SUMS});
}
static int cuda_decide_sums(const struct hstep_call *call, int first, int n)
{
    return run(call, HSTEP_CUDA_decide_sums, (struct hstep_cuda_what){.first = first, .n = n});
}
static int cuda_cross(const struct hstep_call *call, int tensor, int pair)
{
    return hstep_cuda_cross(run, call, tensor, pair);
}
static int cuda_update(const struct hstep_call *call, int first, int n, enum hstep_pass pass)
{
    return hstep_cuda_update(run, call, first, n, pass);
}

/* Returns cuBLAS, or NULL if the transformation has to be exact or cuBLAS cannot be used. A capture cannot wait until
 * cuBLAS is opened. A capture before any other step of the handle therefore has exact products. */
static struct hstep_blas *blas_for(struct hstep_link *l, const struct hstep_matrix *m)
{
    const int64_t limit = INT_MAX;
    if (m->k[newton_schulz_exact] != 0.0f || m->rows > limit || m->columns > limit || hstep_link_enter(l)) return NULL;
    if (!l->blas && !l->blas_missing && !hstep_link_records(l)) {
        l->blas = hstep_blas_open(l->gpu);
        l->blas_missing = !l->blas;
    }
    struct hstep_blas *blas = l->blas && !hstep_blas_follow(l->blas, l->stream) ? l->blas : NULL;
    hstep_link_leave(l);
    return blas;
}

static int cuda_transform(const struct hstep_call *call, const struct hstep_matrix *m)
{
    struct hstep_link *l = link_of(call->context);
    int error = hstep_cuda_transform(run, call, m, blas_for(l, m));
    if (error) l->incomplete = 1;
    return error;
}
static int cuda_count(const struct hstep_call *call)
{
    return run(call, HSTEP_CUDA_count, (struct hstep_cuda_what){0});
}
static int cuda_end_round(const struct hstep_call *call)
{
    return run(call, HSTEP_CUDA_end_round, (struct hstep_cuda_what){0});
}

static int cuda_carry(const struct hstep_context *c, int64_t *limbs, int64_t n)
{
    struct hstep_link *l = link_of(c);
    struct hstep_call none = {.n = 0};
    struct hstep_cuda_what what = {.n = (int)n, .bytes = (uint64_t)n * HSTEP_EXACT_LIMBS * sizeof *limbs, .to = limbs};
    int error = hstep_link_enter(l);
    if (error) return error;
    error = hstep_link_launch(l, HSTEP_CUDA_carry, &none, &what);
    hstep_link_leave(l);
    return error;
}

/* ---- Single tensors. Each call sends the tensor, because a handle that is not settled has none on the device ---- */

static uint64_t rounded(uint64_t bytes) { return (bytes + 255) / 256 * 256; }
#define TENSOR_BYTES rounded(sizeof(struct hstep_tensor))

static int cuda_accumulate(const struct hstep_accumulation *a)
{
    struct hstep_link *l = link_of(a->context);
    struct hstep_accumulation there = *a;
    struct hstep_cuda_what what = {0};
    uint64_t bytes = (uint64_t)a->tensor->chunks * sizeof *a->chunks;
    int error = hstep_link_enter(l);
    if (error) return error;
    error = hstep_link_scratch(l, TENSOR_BYTES + bytes);
    if (!error) error = hstep_link_send(l, l->scratch, a->tensor, sizeof *a->tensor);
    if (!error) error = hstep_link_send(l, l->scratch + TENSOR_BYTES, a->chunks, bytes);
    there.context = NULL;
    there.tensor = (const struct hstep_tensor *)(uintptr_t)l->scratch;
    there.chunks = (const struct hstep_chunk *)(uintptr_t)(l->scratch + TENSOR_BYTES);
    if (!error) error = hstep_link_launch(l, HSTEP_CUDA_accumulate, &there, &what);
    hstep_link_leave(l);
    return error;
}

/* Makes room for the tensor of an access and for `bytes` after it in scratch memory, and sends the tensor. `there` is
 * the access with the tensor's place there. */
static int begin_access(struct hstep_link *l, const struct hstep_access *a, uint64_t bytes, struct hstep_access *there)
{
    int error = hstep_link_scratch(l, TENSOR_BYTES + bytes);
    if (!error) error = hstep_link_send(l, l->scratch, a->tensor, sizeof *a->tensor);
    *there = *a;
    there->context = NULL;
    there->tensor = (const struct hstep_tensor *)(uintptr_t)l->scratch;
    return error;
}

/* Most elements of one piece of a read or a write. */
#define PIECE ((int64_t)4 << 20)

static int read_piece(struct hstep_link *l, const struct hstep_access *a, float *out)
{
    struct hstep_access there;
    const uint64_t bytes = (uint64_t)(a->end - a->first) * sizeof *out;
    int error = begin_access(l, a, bytes, &there);
    uint64_t values = l->scratch + TENSOR_BYTES;
    struct hstep_cuda_what what = {.bytes = bytes, .to = (void *)(uintptr_t)values};
    if (!error) error = hstep_link_launch(l, HSTEP_CUDA_read, &there, &what);
    if (!error) error = HSTEP_GPU(l->gpu, cuMemcpyAsync, (uint64_t)(uintptr_t)out, values, (size_t)bytes, l->stream);
    return error ? error : HSTEP_GPU(l->gpu, cuStreamSynchronize, l->stream);
}

/* Pieces end with rows, because blocks begin with them. */
static int cuda_read(const struct hstep_access *a, float *out)
{
    struct hstep_link *l = link_of(a->context);
    struct hstep_access piece = *a;
    const int64_t columns = a->tensor->n_columns > 0 ? a->tensor->n_columns : 1;
    const int64_t most = columns < PIECE ? PIECE / columns * columns : columns;
    int error = hstep_link_enter(l);
    if (error) return error;
    for (; !error && piece.first < a->end; piece.first = piece.end) {
        piece.end = a->end - piece.first < most ? a->end : piece.first + most;
        error = read_piece(l, &piece, out + (piece.first - a->first));
    }
    hstep_link_leave(l);
    return error;
}

static int write_piece(struct hstep_link *l, const struct hstep_access *a, const float *in)
{
    struct hstep_access there;
    const uint64_t bytes = (uint64_t)(a->end - a->first) * sizeof *in;
    int error = begin_access(l, a, bytes, &there);
    struct hstep_cuda_what what = {.bytes = bytes, .from = (const void *)(uintptr_t)(l->scratch + TENSOR_BYTES)};
    if (error || (error = hstep_link_send(l, l->scratch + TENSOR_BYTES, in, bytes))) return error;
    return hstep_link_launch(l, HSTEP_CUDA_write, &there, &what);
}

/* A write is not split into pieces if blocks, or the whole tensor, share a scale. */
static int cuda_write(const struct hstep_access *a, const float *in)
{
    struct hstep_link *l = link_of(a->context);
    struct hstep_access piece = *a;
    const int64_t most = hstep_formats[a->tensor->slot[a->slot].format].block ? a->end - a->first : PIECE;
    int error = hstep_link_enter(l);
    if (error) return error;
    for (; !error && piece.first < a->end; piece.first = piece.end) {
        piece.end = a->end - piece.first < most ? a->end : piece.first + most;
        error = write_piece(l, &piece, in + (piece.first - a->first));
    }
    hstep_link_leave(l);
    return error;
}

static int cuda_saturated(const struct hstep_access *a, uint64_t *count)
{
    struct hstep_link *l = link_of(a->context);
    struct hstep_access there;
    int error = hstep_link_enter(l);
    if (error) return error;
    error = begin_access(l, a, sizeof *count, &there);
    uint64_t place = l->scratch + TENSOR_BYTES;
    struct hstep_cuda_what what = {.bytes = sizeof *count, .to = (void *)(uintptr_t)place};
    if (!error) error = HSTEP_GPU(l->gpu, cuMemsetD8Async, place, 0, sizeof *count, l->stream);
    if (!error) error = hstep_link_launch(l, HSTEP_CUDA_saturated, &there, &what);
    if (!error) error = HSTEP_GPU(l->gpu, cuMemcpyAsync, (uint64_t)(uintptr_t)count, place, sizeof *count, l->stream);
    if (!error) error = HSTEP_GPU(l->gpu, cuStreamSynchronize, l->stream);
    hstep_link_leave(l);
    return error;
}

const struct hstep_device hstep_cuda_device = {
    .name = "cuda",
    .shared = 0,
    .asynchronous = 1,
    .open = cuda_open,
    .close = cuda_close,
    .follow = cuda_follow,
    .records = cuda_records,
    .owns = cuda_owns,
    .inform = hstep_gpu_inform,
    .code = hstep_gpu_code,
    .why = hstep_cuda_why,
    .trusted = cuda_trusted,
    .trust = cuda_trust,
    .settle = cuda_settle,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .zero = cuda_zero,
    .copy = cuda_copy,
    .wait = cuda_wait,
    .find_fused = cuda_find_fused,
    .workspace = cuda_workspace,
    .scan = cuda_scan,
    .decide = cuda_decide,
    .sum = cuda_sum,
    .decide_sums = cuda_decide_sums,
    .cross = cuda_cross,
    .carry = cuda_carry,
    .update = cuda_update,
    .transform = cuda_transform,
    .count = cuda_count,
    .end_round = cuda_end_round,
    .accumulate = cuda_accumulate,
    .read = cuda_read,
    .write = cuda_write,
    .saturated = cuda_saturated,
};
