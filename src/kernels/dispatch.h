/* Which instruction set runs, and in which floating-point environment. Rows are those of vec/isas.def, in its order. */
#ifndef HSTEP_DISPATCH_H
#define HSTEP_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

struct hstep_kernels;

int hstep_isa_count(void);
/* The row of that name; -1 where there is none. */
int hstep_isa_find(const char *name);
/* NULL for an index out of range. */
const char *hstep_isa_name(int isa);
/* Compiled in, and the processor and the operating system support it. 0 for an index out of range. */
int hstep_isa_available(int isa);
/* NULL unless available. */
const struct hstep_kernels *hstep_isa_kernels(int isa);

/* The row that HALFSTEP_ISA names, if it is available; otherwise the last available row. Decided at the first call. */
int hstep_isa_best(void);
/* Of what halfstep_set_isa() has chosen, else of the best. */
const struct hstep_kernels *hstep_isa_in_use(void);
/* One line if HALFSTEP_ISA is set but could not be followed, else NULL. */
const char *hstep_isa_warning(void);

/* Control word of the calling thread. Between the calls it is IEEE's default: to nearest even, subnormals kept, no
 * traps. */
struct hstep_fp {
    uint64_t saved;
};
struct hstep_fp hstep_fp_enter(void);
void hstep_fp_leave(struct hstep_fp fp);

/* What this processor and operating system offer of the features that matter here, space separated; cut to fit n
 * bytes. */
void hstep_cpu_features(char *out, size_t n);

#endif
