/* Sums of squares that several threads add to. */
#ifndef HSTEP_SQUARES_H
#define HSTEP_SQUARES_H

#include "base/exact.h"

/* A device's compiler brings its own. */
#ifndef HSTEP_ADD_ATOMIC
#define HSTEP_ADD_ATOMIC(to, x) (void)__atomic_fetch_add(to, x, __ATOMIC_RELAXED)
#endif

/* Carries in `from` and adds it, safe against other threads that do the same. 2^31 merges fit. */
HSTEP_INLINE void hstep_merge_squares(int64_t *to, int64_t *from)
{
    /* Carried first, a task adds less than 2^32 to a limb however many squares it has summed. */
    hstep_exact_normalize(from);
    for (int i = 0; i < HSTEP_EXACT_LIMBS; i++)
        if (from[i]) HSTEP_ADD_ATOMIC(&to[i], from[i]);
}

#endif
