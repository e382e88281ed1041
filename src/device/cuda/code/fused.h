/* What is a fused kernel's (device/cuda/code/fused_kernels.h): tiles that are whole and aligned, of updates that do
 * nothing out of the ordinary. The general kernel takes all others. */
#ifndef HSTEP_CUDA_FUSED_H
#define HSTEP_CUDA_FUSED_H

#include "device/cuda/code/lane.h"

/* ---- Which tiles ---- */

/* Whether the tensor's update, as it is at this step, is one of its fused kernel's. */
CUDA_DEVICE int is_fused(const struct hstep_call *call, int tensor)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const struct hstep_update *u = &call->plan.updates[tensor];
    uintptr_t bits = 0;
    for (int s = 0; s < t->slots; s++)
        if (t->slot[s].format >= 0)
            bits |=
                (uintptr_t)hstep_code_of(call, tensor, s) | (t->slot[s].extra_bytes ? (uintptr_t)t->slot[s].extra : 0);
    return bits % 16 == 0 && t->fused >= 0 && u->fused && !u->weight_to_slot && !u->slot_to_weight &&
           u->centralize == 0.0;
}

/* Whether all places of the tile of this lane are held, by all lanes. */
CUDA_DEVICE int is_whole(const struct lane *l)
{
    const int64_t start = l->element - lane_of_thread() * PLACES;
    return start >= l->begin && start + HSTEP_TILE <= l->end;
}

#endif
