/* Declares small functions that hosts and devices both compile. Device code defines HSTEP_INLINE before it includes
 * this. */
#ifndef HSTEP_INLINE_H
#define HSTEP_INLINE_H

/* The promised bits need IEEE's arithmetic. CMake undoes options that give it up; here a build by hand is refused. */
#if defined __FAST_MATH__ || __FINITE_MATH_ONLY__ || defined __ASSOCIATIVE_MATH__ || defined __RECIPROCAL_MATH__ || \
    defined __NO_SIGNED_ZEROS__
#error "halfstep needs IEEE's arithmetic: leave out -ffast-math, -Ofast, -funsafe-math-optimizations and their kin"
#elif __FLT_EVAL_METHOD__ < 0 || __FLT_EVAL_METHOD__ == 1 || __FLT_EVAL_METHOD__ == 2
#error "halfstep needs float computed as float: leave out -mfpmath=387, or compile with -msse2 -mfpmath=sse"
#endif
#ifndef __cplusplus
_Static_assert(sizeof 0.5 == 8, "halfstep needs constants of type double: leave out -fsingle-precision-constant");
#endif

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
