/* Entries of the device that take several launches. */
#ifndef HSTEP_CUDA_SEQUENCE_H
#define HSTEP_CUDA_SEQUENCE_H

#include "device/cuda/code/kernels.h"

/* Launches a kernel after those before it. */
typedef int hstep_cuda_launch(const struct hstep_call *call, int kernel, struct hstep_cuda_what what);

struct hstep_blas;

/* Returns the kernel that updates whole tiles of the tensor, or -1. */
int hstep_cuda_find_fused(const struct hstep_tensor *t);
/* Launches the general kernel of an update, and each fused kernel that one of these tensors has. */
int hstep_cuda_update(hstep_cuda_launch *launch, const struct hstep_call *call, int first, int n, enum hstep_pass pass);

int hstep_cuda_cross(hstep_cuda_launch *launch, const struct hstep_call *call, int tensor, int pair);

/* Launches the phases of a transformation. Without blas its products are exact, in the contract's order. With blas they
 * are in BF16, or FP16 in the Gram form, with sums in fp32. Their bits are those of cuBLAS on this GPU. The caller has
 * set the stream of blas. */
int hstep_cuda_transform(hstep_cuda_launch *launch, const struct hstep_call *call, const struct hstep_matrix *m,
                         struct hstep_blas *blas);

#endif
