/* Converts an IEEE half, and computes on the two halves of a lane, in integer arithmetic. These functions serve
 * vocabularies without instructions for it. A header must define V_OP before it includes this file. */
#ifndef HSTEP_VEC_HALF_H
#define HSTEP_VEC_HALF_H

#include <stdint.h>
#include <string.h>

V_OP uint32_t hstep_pattern(float x)
{
    uint32_t pattern;
    memcpy(&pattern, &x, 4);
    return pattern;
}
V_OP float hstep_number(uint32_t pattern)
{
    float x;
    memcpy(&x, &pattern, 4);
    return x;
}

V_OP float hstep_half_decode(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) /* Inf stays Inf; NaN becomes quiet, as in the hardware's conversions */
        return hstep_number(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13 | (magnitude > 0x7c00u ? 0x400000u : 0));
    /* A half below 2^-14 is subnormal or zero. Scaling its integer is exact. */
    if (magnitude < 0x400u) return hstep_number(sign | hstep_pattern((float)magnitude * 0x1p-24f));
    return hstep_number(sign | ((magnitude << 13) + 0x38000000u));
}
V_OP uint16_t hstep_half_encode(float x)
{
    uint32_t u = hstep_pattern(x), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x1ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) /* adding 0.5 rounds units of 2^-24 to even and leaves them in the low mantissa bits */
        return (uint16_t)(sign | (hstep_pattern(hstep_number(magnitude) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13));
}

V_OP int32_t hstep_half_low(uint32_t a) { return (int16_t)a; }
V_OP int32_t hstep_half_high(uint32_t a) { return (int32_t)a >> 16; }
V_OP uint32_t hstep_halves(int32_t low, int32_t high) { return ((uint32_t)low & 0xffffu) | (uint32_t)high << 16; }
V_OP uint32_t hstep_halves_mul(uint32_t a, uint32_t b)
{
    return ((a >> 16) * (b >> 16)) << 16 | ((a & 65535u) * (b & 65535u) & 65535u);
}
V_OP uint32_t hstep_halves_add(uint32_t a, uint32_t b)
{
    return ((a & 0xffff0000u) + (b & 0xffff0000u)) | ((a + b) & 65535u);
}
V_OP uint32_t hstep_halves_min(uint32_t a, uint32_t b)
{
    int32_t al = hstep_half_low(a), ah = hstep_half_high(a), bl = hstep_half_low(b), bh = hstep_half_high(b);
    return hstep_halves(al < bl ? al : bl, ah < bh ? ah : bh);
}
V_OP uint32_t hstep_halves_negate(uint32_t a, uint32_t s)
{
    int32_t low = hstep_half_low(a), high = hstep_half_high(a);
    return hstep_halves(hstep_half_low(s) < 0 ? -low : low, hstep_half_high(s) < 0 ? -high : high);
}
V_OP int32_t hstep_saturated(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

#endif
