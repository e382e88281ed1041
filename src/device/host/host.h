/* The host as a device: threads, staging and kernels behind the table of device.h. Only this folder includes it. */
#ifndef HSTEP_HOST_H
#define HSTEP_HOST_H

#include "decide/rows.h"
#include "device/device.h"
#include "rules/transforms.h"

/* Runs tasks 0 to n - 1 and returns when all are done. Uses the caller's threads if it set some, otherwise the pool. */
void hstep_run(const struct hstep_context *c, halfstep_task task, void *argument, int64_t n);
/* Does the same, but starts with the last task. Meant for a second pass over the same data, whose end is still in the
 * caches. Callers' own threads get the tasks in this order. */
void hstep_run_backwards(const struct hstep_context *c, halfstep_task task, void *argument, int64_t n);

/* Entries of the table, by file. */
int hstep_host_scan(const struct hstep_call *call);                        /* statistics.c */
int hstep_host_sum(const struct hstep_call *call, int first, int n);       /* norms.c */
int hstep_host_cross(const struct hstep_call *call, int tensor, int pair); /* cross.c */
size_t hstep_host_cross_workspace(const struct hstep_tensor *t);
int hstep_host_update(const struct hstep_call *call, int first, int n, enum hstep_pass pass); /* update.c */
size_t hstep_host_workspace(const struct hstep_tensor *t);                                    /* matrix.c */
int hstep_host_transform(const struct hstep_call *call, const struct hstep_matrix *m);
/* Makes the n rows of a transformed matrix alike (cross.c, decide/rows.h). */
void hstep_host_rows(const struct hstep_context *c, const struct hstep_rows *rows, float *u, int64_t n,
                     int64_t columns);
int hstep_host_accumulate(const struct hstep_accumulation *a); /* accumulate.c */
int hstep_host_read(const struct hstep_access *a, float *out); /* slots.c */
int hstep_host_write(const struct hstep_access *a, const float *in);
int hstep_host_saturated(const struct hstep_access *a, uint64_t *count);
int hstep_host_allocate(const struct hstep_context *c, uint64_t bytes, void **memory); /* memory.c */
void hstep_host_release(const struct hstep_context *c, void *memory);
int hstep_host_zero(const struct hstep_context *c, void *memory, uint64_t bytes);
void hstep_host_touch(const struct hstep_context *c, const struct hstep_plan *plan); /* tile.c */
int hstep_host_copy(const struct hstep_context *c, void *to, const void *from, uint64_t bytes);

/* Transformations of a whole matrix, one for each row of transforms.def. They replace u, a dense matrix of rows x cols,
 * and take the row's constants at k. _workspace() returns how many floats they work in. The bits are the same with any
 * threads and instruction set. No address need be aligned, but a workspace on 64 bytes is fastest. u has to be
 * finite. */
#define TRANSFORM(name, ...)                                                                               \
    void hstep_##name(const struct hstep_context *c, float *u, int64_t rows, int64_t cols, const float *k, \
                      float *workspace);                                                                   \
    size_t hstep_##name##_workspace(int64_t rows, int64_t cols);
#include "rules/transforms.def"
#undef TRANSFORM

extern const struct hstep_device hstep_host_device; /* device.c */

#endif
