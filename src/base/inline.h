/* How small functions are declared that hosts and devices both compile: a device's compiler defines HSTEP_INLINE
 * first. */
#ifndef HSTEP_INLINE_H
#define HSTEP_INLINE_H

#ifndef HSTEP_INLINE
#define HSTEP_INLINE static inline
#endif

/* The attribute of functions that must be inlined to be quick. A build with sanitizers defines it as "unused", because
 * the compiler would take minutes over the checks of everything that is inlined into kernels. */
#ifndef HSTEP_ALWAYS_INLINE
#define HSTEP_ALWAYS_INLINE always_inline
#endif

/* And tables with a name of their own, which kernels look into. */
#ifndef HSTEP_TABLE
#define HSTEP_TABLE
#endif

#endif
