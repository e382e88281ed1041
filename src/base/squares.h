/* Exact sums of squares to which several threads add. */
#ifndef HSTEP_SQUARES_H
#define HSTEP_SQUARES_H

#include "base/exact.h"

/* Device code defines its own atomic addition first. */
#ifndef HSTEP_ADD_ATOMIC
#define HSTEP_ADD_ATOMIC(to, x) (void)__atomic_fetch_add(to, x, __ATOMIC_RELAXED)
#endif

/* Carries in `from`, then adds it to `to`. Other threads may add to `to` at the same time. Up to 2^31 merges fit. */
HSTEP_INLINE void hstep_merge_squares(int64_t *to, int64_t *from)
{
    /* After the carry a task adds less than 2^32 to a limb, however many squares it has summed. */
    hstep_exact_normalize(from);
    for (int i = 0; i < HSTEP_EXACT_LIMBS; i++)
        if (from[i]) HSTEP_ADD_ATOMIC(&to[i], from[i]);
}

#endif
