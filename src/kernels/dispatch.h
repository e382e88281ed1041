/* Which instruction set runs, and in which floating-point environment. Indices are those of the rows of
 * vec/isas.def. */
#ifndef HSTEP_DISPATCH_H
#define HSTEP_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

struct hstep_kernels;

int hstep_isa_count(void);
/* Returns the row of that name, or -1 if there is none. */
int hstep_isa_find(const char *name);
/* Returns NULL for an index out of range. */
const char *hstep_isa_name(int isa);
/* Returns 1 if the row is compiled in and both the processor and the operating system support it, else 0. An index out
 * of range gives 0. */
int hstep_isa_available(int isa);
/* Returns NULL unless the row is available. */
const struct hstep_kernels *hstep_isa_kernels(int isa);

/* Returns the row that HALFSTEP_ISA names, if it is available, otherwise the last available row. The first call that
 * finds no fault in the variable decides. */
int hstep_isa_best(void);
/* Returns the kernels of the row that halfstep_set_isa() has chosen, or of the best row if it has chosen none. */
const struct hstep_kernels *hstep_isa_in_use(void);
/* Returns a sentence if HALFSTEP_ISA is set but cannot be followed, else NULL. The thread's next call overwrites it. */
const char *hstep_isa_warning(void);

/* hstep_fp_enter() gives the calling thread IEEE's default environment: rounding to nearest even, subnormals kept, no
 * traps. hstep_fp_leave() restores the control word that the thread had before. */
struct hstep_fp {
    uint64_t saved;
};
struct hstep_fp hstep_fp_enter(void);
void hstep_fp_leave(struct hstep_fp fp);
/* Does the same after a call, and returns its result. */
static inline int hstep_fp_return(struct hstep_fp fp, int result)
{
    hstep_fp_leave(fp);
    return result;
}

/* Writes the names of the listed features that both the processor and the operating system offer, space separated. The
 * list is cut to fit n bytes. */
void hstep_cpu_features(char *out, size_t n);

#endif
