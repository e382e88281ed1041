/* Entries of the device that are several launches. */
#ifndef HSTEP_CUDA_SEQUENCE_H
#define HSTEP_CUDA_SEQUENCE_H

#include "device/cuda/code/kernels.h"

/* One launch after those before it. */
typedef int hstep_cuda_launch(const struct hstep_call *call, int kernel, struct hstep_cuda_what what);

struct hstep_blas;

/* The kernel of whole tiles of a tensor's updates, or -1. */
int hstep_cuda_find_fused(const struct hstep_tensor *t);
/* What the general kernel has of an update, and each of the fused ones that these tensors have. */
int hstep_cuda_update(hstep_cuda_launch *launch, const struct hstep_call *call, int first, int n, enum hstep_pass pass);

int hstep_cuda_cross(hstep_cuda_launch *launch, const struct hstep_call *call, int tensor, int pair);

/* The transformation in the contract's order; or, with blas, its products in BF16 with sums in fp32, whose bits are
 * those of cuBLAS on this GPU. The caller has given blas its stream. */
int hstep_cuda_transform(hstep_cuda_launch *launch, const struct hstep_call *call, const struct hstep_matrix *m,
                         struct hstep_blas *blas);

#endif
