/* The functions of rows.h for one instruction set. */
#ifndef HALFSTEP_ROW_KERNELS_H
#define HALFSTEP_ROW_KERNELS_H

#include "trainer/products/rows.h"

#define ROW(name, parameters, arguments) void(*name) parameters;
#define ROW_FLOAT(name, parameters, arguments) float(*name) parameters;
struct row_kernels {
#include "trainer/products/rows.def"
};
#undef ROW
#undef ROW_FLOAT

/* Returns the functions for the instruction set of this name, or NULL if the build has none. */
const struct row_kernels *row_kernels_of(const char *isa);

/* The name of the table for an instruction set, a row of src/vec/isas.def. */
#define ROW_KERNELS(isa) ROW_KERNELS_PASTE(isa)
#define ROW_KERNELS_PASTE(isa) row_kernels_##isa

#endif
