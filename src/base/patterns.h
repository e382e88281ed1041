/* Numbers for the problems of `halfstep verify` and of a device's check, made from random words. The hashes of golden
 * cases depend on every bit. */
#ifndef HSTEP_PATTERNS_H
#define HSTEP_PATTERNS_H

#include "base/rng.h"

/* Returns the random word for a place of a tensor. */
static inline uint64_t hstep_pattern_word(uint64_t seed, uint64_t tensor, int64_t place)
{
    return hstep_mix(hstep_mix((uint64_t)place * UINT64_C(0x9e3779b97f4a7c15) + seed) + tensor);
}

/* Returns an fp32 pattern. Most have magnitudes of 2^-4 .. 2^-19. Some are far larger or smaller, subnormals, or zeros
 * of both signs. */
static inline uint32_t hstep_pattern(uint64_t r)
{
    uint32_t sign = (uint32_t)(r >> 63) << 31, mantissa = (uint32_t)(r >> 32) & 0x7fffff;
    switch (r & 63) {
    case 0: return 0;
    case 1: return 0x80000000u;
    case 2: return sign | mantissa >> (r >> 8 & 15);
    case 3: return sign | (uint32_t)(67 + (r >> 8 & 31)) << 23 | mantissa;
    case 4: return sign | (uint32_t)(127 + (r >> 8 & 7)) << 23 | mantissa;
    case 5: return sign | (uint32_t)(123 - (r >> 8 & 15)) << 23;
    default: return sign | (uint32_t)(123 - (r >> 8 & 15)) << 23 | mantissa;
    }
}

/* Returns an fp16 pattern with the same mixture, as far as its range goes. */
static inline uint16_t hstep_half_pattern(uint64_t r)
{
    uint16_t sign = (uint16_t)(r >> 63 << 15), mantissa = (uint16_t)(r >> 32 & 0x3ff);
    switch (r & 63) {
    case 0: return 0;
    case 1: return 0x8000;
    case 2: return (uint16_t)(sign | mantissa);
    case 4: return (uint16_t)(sign | (15 + (r >> 8 & 7)) << 10 | mantissa);
    default: return (uint16_t)(sign | (11 - (r >> 8 & 7)) << 10 | mantissa);
    }
}

#endif
