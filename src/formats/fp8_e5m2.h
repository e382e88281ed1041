/* 8-bit floats e5m2 (5 exponent bits, 2 mantissa bits, bias 15, up to 57344); 1.03 bytes an element. Blocks of 128
 * elements of a row share one fp32 scale. It is fp8.h with 57344 for 448 and steps of 2^-16 below 2^-14. It has 2^14
 * times the range of fp8, and half the precision.
 *
 * Worst case, to nearest: |error of x| <= |x| / 8 down to 2^-14 s, and s 2^-17 below, both enlarged by 2^-19 at most.
 * Stochastically it is twice that. A positive second moment below s 2^-16 decodes as s 2^-16. */
#ifndef HSTEP_FP8_E5M2_H
#define HSTEP_FP8_E5M2_H

#include "formats/fp8_code.h"

#define fp8_e5m2_ROW "fp8-e5m2", "e5m2, fp32 scale per 128", ROWS, U8, F32, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 128, stochastic = 1, root = 1

FP8_BLOCKS(fp8_e5m2, HSTEP_E5M2)

#endif
