/* What one handle has on its GPU: a stream, pinned memory through which everything that the GPU reads of the process's
 * memory goes, and the arrays of pointers of its calls. */
#ifndef HSTEP_CUDA_LINK_H
#define HSTEP_CUDA_LINK_H

#include "device/cuda/gpu.h"

/* Pinned memory, and the event after the copy from it that was asked for last. */
struct hstep_pinned {
    void *memory, *event;
    uint64_t bytes;
    int used;
};

enum { HSTEP_CUDA_ROOMS = 32, HSTEP_CUDA_RANGES = 32 };

/* The pointers of a call that was captured, which replays read for as long as the handle lives. */
struct hstep_kept {
    struct hstep_kept *next;
    uint64_t memory; /* of the device */
    void *pinned;
    int n; /* pointers */
};

struct hstep_link {
    struct hstep_gpu *gpu;
    void *stream, *event; /* event: after what was asked for on the stream before */
    atomic_flag lock;
    int cut; /* a step was begun and could not be asked for to its end */

    struct hstep_pinned pinned[HSTEP_CUDA_ROOMS];
    int next;

    /* Pointers as they lie in the device's memory, and what was put there: weights and gradients of calls about all
     * tensors, then a pair for each tensor alone. */
    int n_tensors;
    void **pointers, **sent;
    struct hstep_kept *kept, *spare;

    struct hstep_blas *blas; /* once a matrix wants it */
    int no_blas;             /* there is none */

    uint64_t scratch, scratch_bytes; /* room in the device's memory for what single calls bring */

    /* Allocations that were found to be the GPU's: asking the driver is slow. */
    struct {
        uint64_t base, bytes;
    } range[HSTEP_CUDA_RANGES];
    int next_range, last_range; /* last_range: that was found last */
};

int hstep_link_open(struct hstep_link **link, const char *name, void *stream);
void hstep_link_close(struct hstep_link *l);

/* Around whatever follows here, and all use of a link: its lock and its GPU's context. */
int hstep_link_enter(struct hstep_link *l);
void hstep_link_leave(struct hstep_link *l);

int hstep_link_records(struct hstep_link *l);
int hstep_link_owns(struct hstep_link *l, const void *memory);
/* Bytes of the process to the GPU, read when it returns. */
int hstep_link_send(struct hstep_link *l, uint64_t to, const void *from, uint64_t bytes);
/* At least so much scratch memory; what was there may go. */
int hstep_link_scratch(struct hstep_link *l, uint64_t bytes);
/* Room for the pointers of so many tensors. */
int hstep_link_settle(struct hstep_link *l, int n_tensors);
/* The call with its arrays of pointers in the GPU's memory. */
int hstep_link_point(struct hstep_link *l, const struct hstep_call *call, struct hstep_call *pointed);
int hstep_link_launch(struct hstep_link *l, int kernel, void *about, struct hstep_cuda_what *what);

#endif
