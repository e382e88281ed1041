/* Which tiles the fused kernels take (device/cuda/code/fused_kernels.h): whole, aligned tiles of ordinary
 * updates (is_fused()). The general kernel takes all others. */
#ifndef HSTEP_CUDA_FUSED_H
#define HSTEP_CUDA_FUSED_H

#include "device/cuda/code/lane.h"

/* ---- Which tiles ---- */

/* Returns 1 if the tensor's update at this step can go through its fused kernel. */
CUDA_DEVICE int is_fused(const struct hstep_call *call, int tensor)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const struct hstep_update *u = &call->plan.updates[tensor];
    uintptr_t bits = 0;
    for (int s = 0; s < t->slots; s++)
        if (t->slot[s].format >= 0)
            bits |=
                (uintptr_t)hstep_code_of(call, tensor, s) | (t->slot[s].extra_bytes ? (uintptr_t)t->slot[s].extra : 0);
    return bits % 16 == 0 && u->fused && !u->weight_to_slot && !u->slot_to_weight && u->centralize == 0.0;
}

/* Returns 1 if every place of the tile is held, in this lane and in all others. */
CUDA_DEVICE int is_whole(const struct lane *l)
{
    const int64_t start = l->element - lane_of_thread() * PLACES;
    return start >= l->begin && start + HSTEP_TILE <= l->end;
}

#endif
