/* Declares small functions that hosts and devices both compile. Device code defines HSTEP_INLINE before it includes
 * this. */
#ifndef HSTEP_INLINE_H
#define HSTEP_INLINE_H

#ifndef HSTEP_INLINE
#define HSTEP_INLINE static inline
#endif

/* Attribute of functions that are quick only if inlined. A build with sanitizers defines it as "unused", because the
 * compiler would take minutes over the checks of everything that is inlined into kernels. */
#ifndef HSTEP_ALWAYS_INLINE
#define HSTEP_ALWAYS_INLINE always_inline
#endif

/* Attribute of named tables that kernels read. */
#ifndef HSTEP_TABLE
#define HSTEP_TABLE
#endif

#endif
