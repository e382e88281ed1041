/* Turns fused kernels off and on, for tests that compare the bits of both paths. A test that is compiled for a shared
 * library (HSTEP_TEST_SHARED) cannot, because such a library exports its interface only. */
#ifndef HALFSTEP_TEST_FUSED_H
#define HALFSTEP_TEST_FUSED_H

#ifdef HSTEP_TEST_SHARED
/* Returns 1 if the next steps take the wanted path, which here is the library's own choice. */
static inline int use_fused(int fused) { return fused; }
#else
#include "decide/prepare.h"

static inline int use_fused(int fused)
{
    hstep_use_fused = fused;
    return 1;
}
#endif

#endif
