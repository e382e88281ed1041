/* 8-bit weights in packed blocks (packed.h); 1.0625 bytes an element. A step is the scale. Codes are -127 .. 127; -128
 * is never written. Decoding gives code * scale, exactly. Stochastic rounding is unbiased; its error is below a step,
 * which is at most 1/101 of the block's largest weight. */
#ifndef HSTEP_INT8_SR_H
#define HSTEP_INT8_SR_H

#include "formats/packed.h"

#define int8_sr_ROW "int8-sr", "8-bit codes, BF16 scale per 32, SR", PACKED, U8, NONE, \
    roles = WEIGHT, extra_bits = 0, steps = 1, stochastic = 1

V_OP void int8_sr_load(const char *codes, const char *errors, vi *e, vi *o)
{
    (void)errors;
    vp_load_s8(codes, e, o);
}

V_OP void int8_sr_store(char *codes, char *errors, vi e, vi o)
{
    (void)errors;
    vp_store_8(codes, e, o);
}

#endif
