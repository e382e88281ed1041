/* 8-bit floats e4m3 (4 exponent bits, 3 mantissa bits, bias 7, up to 448); 1.03 bytes an element. Blocks of 128
 * elements of a row share one fp32 scale s:
 *
 *   s = max |x| / 448, one unit in the last place up; for second moments up to a power of two
 *       It is at least 2^-126. But if max |x| is below 2^-126, s is 0 and all codes are 0.
 *
 *   t = |x| * (1 / s)      code = t to 4 significant bits, or to a multiple of 2^-9 below 2^-6; bit 7 = sign of x,
 *                          but never that of a zero
 *   decode: x = e4m3(code) * s
 *
 * A second moment uses the same codes with bit 7 clear. A positive one gets at least code 1, because a zero beside a
 * first moment makes updates thousands of times too large. For a second moment, x is the stored value: the moment
 * divided by the state's grid, which decays with it (grid.h). Stochastically t is rounded away from zero with
 * probability (dropped part) to within 2^-16. Otherwise it is rounded to nearest, ties away from zero.
 *
 * Worst case, to nearest: |error of x| <= |x| / 16 down to 2^-6 s, and s / 1024 below, both enlarged by 2^-19 at most.
 * Stochastically it is twice that. A positive second moment below s / 512 decodes as s / 512. */
#ifndef HSTEP_FP8_H
#define HSTEP_FP8_H

#include "formats/fp8_code.h"

#define fp8_ROW "fp8", "e4m3, fp32 scale per 128", ROWS, U8, F32, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 128, stochastic = 1, root = 1

FP8_BLOCKS(fp8, HSTEP_E4M3)

#endif
