/* 12-bit weights in packed blocks (packed.h): the 8-bit codes of int8-sr, and a 4-bit error code of each element;
 * 1.5625 bytes an element. A step is 1/16 of the scale. Positions are -2032 .. 2032:
 *
 *   even elements    code = (position + 8) >> 4      position = 16 code + error, error = -8 .. 7
 *   odd elements     code = (position + 7) >> 4      position = 16 code - error
 *
 * The codes and scales alone are the weight rounded to nearest. A position halfway between two codes goes up for even
 * elements and down for odd ones. If all went up, all weights that a model sees would be 1/32 of a scale too large on
 * average, which sums up in layers whose inputs have a mean. The second plane holds the errors in two's complement:
 * those of elements 2k and 2k + 1 in the low and the high half of byte k, 16 bytes for each block. Decoding gives
 * position * scale / 16, exactly. Stochastic rounding is unbiased; its error is below a step, which is at most
 * 1/1616 of the block's largest weight. */
#ifndef HSTEP_INT8_ECC4_H
#define HSTEP_INT8_ECC4_H

#include "formats/packed.h"

#define int8_ecc4_ROW "int8-ecc4", "int8-sr + 4-bit error code: 12 bits, SR", PACKED, U8, U8, \
    roles = WEIGHT, extra_bits = 4, steps = 16, stochastic = 1

V_OP void int8_ecc4_load(const char *codes, const char *errors, vi *e, vi *o)
{
    vi ce, co, pairs = vi_load_u8(errors);
    vp_load_s8(codes, &ce, &co);
    *e = vi_add(vi_shl(ce, 4), vi_sra(vi_shl(pairs, 28), 28));
    *o = vi_sub(vi_shl(co, 4), vi_sra(vi_shl(pairs, 24), 28));
}

V_OP void int8_ecc4_store(char *codes, char *errors, vi e, vi o)
{
    const vi low = vi_set(15), odd_error = vi_sub(vi_set(0), o);
    vp_store_8(codes, vi_sra(vi_add(e, vi_set(8)), 4), vi_sra(vi_add(o, vi_set(7)), 4));
    /* The error is the position modulo 16, or its negative. */
    vi_store_u8(errors, vi_or(vi_and(e, low), vi_shl(vi_and(odd_error, low), 4)));
}

#endif
