/* How a block format stores its scales, by the dtype in its row (formats.h). In kernels a scale is an fp32 pattern.
 * NAME_scale() returns only patterns that the dtype represents exactly, so that storing them loses nothing:
 *
 *   F32        any pattern
 *   BF16       low half zero
 *   F8_E8M0    powers of two, 2^-127 .. 2^127 (OCP Microscaling Formats 1.0). 0 is stored as 2^-127, with which
 *              all-zero codes are still 0. Numbers that are not finite are stored as NaN
 *   F8_E4M3    non-negative multiples of 2^-9 with 3 bits after the leading one, up to 448 (OCP OFP8). Larger numbers
 *              are stored as NaN */
#ifndef HSTEP_SCALE_H
#define HSTEP_SCALE_H

#include <stdint.h>
#include <string.h>

#include "base/inline.h"

/* The dtypes of scales. A row with another dtype finds no constant here, and does not compile. */
enum { HSTEP_SCALE_F32, HSTEP_SCALE_BF16, HSTEP_SCALE_F8_E8M0, HSTEP_SCALE_F8_E4M3 };

HSTEP_INLINE int hstep_scale_bytes(const int dtype)
{
    return dtype == HSTEP_SCALE_F32 ? 4 : dtype == HSTEP_SCALE_BF16 ? 2 : 1;
}

HSTEP_INLINE uint32_t hstep_e4m3_load(uint32_t code)
{
    uint32_t exponent = code >> 3 & 15, mantissa = code & 7, pattern;
    if (exponent) return (code & 0x7f) == 0x7f ? 0x7fc00000 : (exponent + 120) << 23 | mantissa << 20;
    float small = (float)mantissa * 0x1p-9f;
    memcpy(&pattern, &small, 4);
    return pattern;
}

HSTEP_INLINE uint32_t hstep_e4m3_store(uint32_t pattern)
{
    float x;
    memcpy(&x, &pattern, 4);
    if (!(x <= 448.0f)) return 0x7f;
    return x < 0x1p-6f ? (uint32_t)(x * 0x1p9f) : (pattern >> 20) - (120 << 3);
}

/* Returns scale number i of a plane, as an fp32 pattern. */
HSTEP_INLINE uint32_t hstep_scale_load(const int dtype, const char *scales, int64_t i)
{
    uint32_t wide;
    uint16_t half;
    uint8_t byte;
    switch (dtype) {
    case HSTEP_SCALE_F32: memcpy(&wide, scales + 4 * i, 4); return wide;
    case HSTEP_SCALE_BF16: memcpy(&half, scales + 2 * i, 2); return (uint32_t)half << 16;
    default:
        memcpy(&byte, scales + i, 1);
        if (dtype == HSTEP_SCALE_F8_E4M3) return hstep_e4m3_load(byte);
        return byte == 0 ? 0x00400000 : byte == 255 ? 0x7fc00000 : (uint32_t)byte << 23;
    }
}

HSTEP_INLINE void hstep_scale_store(const int dtype, char *scales, int64_t i, uint32_t pattern)
{
    uint16_t half = (uint16_t)(pattern >> 16);
    uint8_t byte = (uint8_t)(dtype == HSTEP_SCALE_F8_E4M3 ? hstep_e4m3_store(pattern) : pattern >> 23);
    switch (dtype) {
    case HSTEP_SCALE_F32: memcpy(scales + 4 * i, &pattern, 4); break;
    case HSTEP_SCALE_BF16: memcpy(scales + 2 * i, &half, 2); break;
    default: memcpy(scales + i, &byte, 1);
    }
}

#endif
