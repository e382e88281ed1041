/* The host: threads, staging and kernels behind the table of device.h. Only what is in this folder sees them. */
#ifndef HSTEP_HOST_H
#define HSTEP_HOST_H

#include "device/device.h"
#include "rules/transforms.h"

/* n tasks on the caller's threads or the pool. */
void hstep_run(const struct hstep_context *c, halfstep_task task, void *argument, int64_t n);
/* From the last task on, for a pass over what another pass has just gone through: caches hold its end. Hosts that lend
 * threads are given the tasks in that order. */
void hstep_run_backwards(const struct hstep_context *c, halfstep_task task, void *argument, int64_t n);

/* Entries of the table, by file. */
int hstep_host_scan(const struct hstep_call *call);                        /* statistics.c */
int hstep_host_sum(const struct hstep_call *call, int first, int n);       /* norms.c */
int hstep_host_cross(const struct hstep_call *call, int tensor, int pair); /* cross.c */
size_t hstep_host_cross_workspace(const struct hstep_tensor *t);
int hstep_host_update(const struct hstep_call *call, int first, int n, enum hstep_pass pass); /* update.c */
size_t hstep_host_workspace(const struct hstep_tensor *t);                                    /* matrix.c */
int hstep_host_transform(const struct hstep_call *call, const struct hstep_matrix *m);
int hstep_host_accumulate(const struct hstep_accumulation *a); /* accumulate.c */
int hstep_host_read(const struct hstep_access *a, float *out); /* slots.c */
int hstep_host_write(const struct hstep_access *a, const float *in);
int hstep_host_saturated(const struct hstep_access *a, uint64_t *count);
int hstep_host_allocate(const struct hstep_context *c, uint64_t bytes, void **memory); /* memory.c */
void hstep_host_release(const struct hstep_context *c, void *memory);
int hstep_host_zero(const struct hstep_context *c, void *memory, uint64_t bytes);
void hstep_host_touch(const struct hstep_context *c, const struct hstep_plan *plan); /* tile.c */
int hstep_host_copy(const struct hstep_context *c, void *to, const void *from, uint64_t bytes);

/* Transformations of a whole matrix, one for each row of transforms.def. Replaces u, rows x cols and dense, with the
 * row's constants at k. _workspace: floats that it works in. Same bits with any threads and instruction set. No address
 * need be aligned; the workspace is fastest on 64 bytes. u has to be finite. */
#define TRANSFORM(name, ...)                                                                               \
    void hstep_##name(const struct hstep_context *c, float *u, int64_t rows, int64_t cols, const float *k, \
                      float *workspace);                                                                   \
    size_t hstep_##name##_workspace(int64_t rows, int64_t cols);
#include "rules/transforms.def"
#undef TRANSFORM

extern const struct hstep_device hstep_host_device; /* device.c */

#endif
