/* The link of one handle to its GPU: its stream, the arrays of pointers of its calls, and pinned memory. All that the
 * GPU reads of the process's memory goes through pinned memory. */
#ifndef HSTEP_CUDA_LINK_H
#define HSTEP_CUDA_LINK_H

#include "device/cuda/gpu.h"

/* Pinned memory, and the event after the last copy from it. */
struct hstep_pinned {
    void *memory, *event;
    uint64_t bytes;
    int used;
};

enum { HSTEP_CUDA_ROOMS = 32, HSTEP_CUDA_RANGES = 32 };

/* The pointers of a captured call. Replays read them, so they stay as long as the handle lives. */
struct hstep_kept {
    struct hstep_kept *next;
    uint64_t memory; /* of the device */
    void *pinned;
    int n; /* pointers */
};

struct hstep_link {
    struct hstep_gpu *gpu;
    void *stream, *event; /* event: marks earlier work on the old stream */
    atomic_flag lock;
    int incomplete; /* a step has begun and could not be completed */

    struct hstep_pinned pinned[HSTEP_CUDA_ROOMS];
    int next;

    /* pointers: in the device's memory. The weights and the gradients of calls about all tensors stand first. Then
     * comes a pair for each tensor alone. sent: a copy of what was sent there. */
    int n_tensors;
    void **pointers, **sent;
    struct hstep_kept *kept, *spare;

    struct hstep_blas *blas; /* opened for the first matrix that can use it */
    int blas_missing;        /* cuBLAS could not be opened */

    uint64_t scratch, scratch_bytes; /* room in the device's memory for the arguments of single calls */

    /* Allocations that are known to be the GPU's, because it is slow to ask the driver. */
    struct {
        uint64_t base, bytes;
    } range[HSTEP_CUDA_RANGES];
    int next_range, last_range; /* last_range: the one that was found last */
};

int hstep_link_open(struct hstep_link **link, const char *name, void *stream);
void hstep_link_close(struct hstep_link *l);

/* hstep_link_enter() takes the link's lock and makes its GPU's context current. hstep_link_leave() undoes both. All
 * functions below, and any other use of a link, must stand between the two. */
int hstep_link_enter(struct hstep_link *l);
void hstep_link_leave(struct hstep_link *l);

/* Returns 1 while the stream is captured. */
int hstep_link_records(struct hstep_link *l);
/* Returns HALFSTEP_OK if the address is memory of this GPU, ARGUMENT if it is not, or another error. */
int hstep_link_owns(struct hstep_link *l, const void *memory);
/* Sends bytes of the process's memory to the GPU. They have been read when it returns. */
int hstep_link_send(struct hstep_link *l, uint64_t to, const void *from, uint64_t bytes);
/* Makes the scratch memory at least this large. Its contents may be lost. */
int hstep_link_scratch(struct hstep_link *l, uint64_t bytes);
/* Makes room for the pointers of n_tensors tensors. */
int hstep_link_settle(struct hstep_link *l, int n_tensors);
/* Makes *pointed a copy of the call whose arrays of pointers are in the GPU's memory. */
int hstep_link_point(struct hstep_link *l, const struct hstep_call *call, struct hstep_call *pointed);
int hstep_link_launch(struct hstep_link *l, int kernel, void *about, struct hstep_cuda_what *what);

#endif
