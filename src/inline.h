/* How small functions are declared that hosts and devices both compile: a device's compiler defines HSTEP_INLINE
 * first. */
#ifndef HSTEP_INLINE_H
#define HSTEP_INLINE_H

#ifndef HSTEP_INLINE
#define HSTEP_INLINE static inline
#endif

/* And tables with a name of their own, which kernels look into. */
#ifndef HSTEP_TABLE
#define HSTEP_TABLE
#endif

#endif
