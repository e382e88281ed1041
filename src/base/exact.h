/* Exact sums of doubles. A sum is a fixed-point number wide enough for every finite double, in int64 limbs of 32 bits
 * each. No addition rounds. The order of additions therefore does not matter, nor how they are split over threads,
 * shards or ranks. Any tree of merges (integer atomics, MPI_SUM, all_reduce) gives the same number. It is rounded to
 * double once.
 *
 * acc[k] counts units of 2^(32 k - 1074). An addition puts less than 2^32 into a limb. So 2^30 additions, counting
 * those inside merged sums, are safe before hstep_exact_normalize() must carry. Afterwards every limb but the top one
 * is below 2^32. The total may reach 2^1100. */
#ifndef HSTEP_EXACT_H
#define HSTEP_EXACT_H

#include <stdint.h>
#include <string.h>

#include "base/inline.h"

#define HSTEP_EXACT_LIMBS 68

/* Splits x into its contributions to three limbs. Returns the first of these limbs, 0 to HSTEP_EXACT_LIMBS - 3.
 * Requires a finite x; for any other the parts have no meaning. */
HSTEP_INLINE int hstep_exact_parts(double x, int64_t part[3])
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    uint64_t exponent = bits >> 52 & 2047;
    uint64_t normal = exponent != 0;
    uint64_t mantissa = (bits & 0xFFFFFFFFFFFFFu) | normal << 52;
    uint64_t position = exponent - normal;
    uint64_t shift = position & 31;
    int64_t sign = -(int64_t)(bits >> 63);
    part[0] = ((int64_t)(mantissa << shift & 0xFFFFFFFFu) ^ sign) - sign;
    part[1] = ((int64_t)(mantissa >> (32 - shift) & 0xFFFFFFFFu) ^ sign) - sign;
    part[2] = ((int64_t)(mantissa >> 32 >> (32 - shift)) ^ sign) - sign;
    return (int)(position >> 5);
}

/* Adds x. Requires a finite x; any other makes the sum meaningless, but touches no memory outside acc. */
HSTEP_INLINE void hstep_exact_add(int64_t acc[HSTEP_EXACT_LIMBS], double x)
{
    int64_t part[3], *limb = acc + hstep_exact_parts(x, part);
    for (int k = 0; k < 3; k++) limb[k] += part[k];
}

HSTEP_INLINE void hstep_exact_merge(int64_t acc[HSTEP_EXACT_LIMBS], const int64_t other[HSTEP_EXACT_LIMBS])
{
    int k;
    for (k = 0; k < HSTEP_EXACT_LIMBS; k++) acc[k] += other[k];
}

/* Carries, so that limbs become 0 .. 2^32 - 1 and the top one takes the sign. The value does not change. Equal values
 * get equal limbs. */
HSTEP_INLINE void hstep_exact_normalize(int64_t acc[HSTEP_EXACT_LIMBS])
{
    int64_t carry = 0;
    int k;
    for (k = 0; k < HSTEP_EXACT_LIMBS - 1; k++) {
        int64_t sum = acc[k] + carry;
        int64_t digit = sum & 0xFFFFFFFF;
        carry = (sum - digit) / ((int64_t)1 << 32);
        acc[k] = digit;
    }
    acc[k] += carry;
}

/* Returns the sum as a double, rounded once to nearest even. Returns +0 for zero, and infinity beyond the largest
 * double. */
HSTEP_INLINE double hstep_exact_round(const int64_t acc[HSTEP_EXACT_LIMBS])
{
    int64_t digits[HSTEP_EXACT_LIMBS + 1];
    uint64_t result = 0;
    double value;
    int k, top;
    memcpy(digits, acc, sizeof(int64_t) * HSTEP_EXACT_LIMBS);
    hstep_exact_normalize(digits);
    if (digits[HSTEP_EXACT_LIMBS - 1] < 0) {
        for (k = 0; k < HSTEP_EXACT_LIMBS; k++) digits[k] = -digits[k];
        hstep_exact_normalize(digits);
        result = (uint64_t)1 << 63;
    }
    digits[HSTEP_EXACT_LIMBS] = 0;
    for (top = HSTEP_EXACT_LIMBS - 1; top > 0 && digits[top] == 0; top--) {
    }
    int width = 0;
    while (digits[top] >> width) width++;
    /* Bit `lowest` is the unit in the last place of a 53-bit result. Bit 0 is the smallest subnormal. */
    int lowest = 32 * top + width - 53;
    if (lowest <= 0) {
        result |= (uint64_t)digits[1] << 32 | (uint64_t)digits[0];
    } else if (lowest >= 2046) {
        result |= (uint64_t)2047 << 52;
    } else {
        int limb = (lowest - 1) / 32, shift = (lowest - 1) % 32;
        uint64_t low = (uint64_t)digits[limb] | (uint64_t)digits[limb + 1] << 32;
        /* The 53 bits of the result and the next lower bit. */
        uint64_t window = low >> shift | (uint64_t)digits[limb + 2] << 1 << (63 - shift);
        uint64_t rest = low & (((uint64_t)1 << shift) - 1);
        for (k = 0; k < limb; k++) rest |= (uint64_t)digits[k];
        uint64_t mantissa = window >> 1;
        mantissa += (window & 1) && (rest || (mantissa & 1));
        /* Adds instead of inserting, so that bit 52 and a carry out of the rounding run into the exponent, up to
         * infinity. */
        result |= ((uint64_t)lowest << 52) + mantissa;
    }
    memcpy(&value, &result, 8);
    return value;
}

#endif
