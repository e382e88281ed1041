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

/* What rounding needs to know of a sum whose limbs come one by one, from the lowest up. A digit is a limb after
 * carries. */
struct hstep_exact_top {
    int64_t carry;
    int limb;                          /* the highest limb whose digit is not 0, or 0 */
    int64_t high, middle, low, rest;   /* its digit, the two below it, and the OR of all lower ones */
    int64_t last, last_but_one, below; /* the last two digits, and the OR of all lower ones */
};

/* Takes limb k of a sum. */
HSTEP_INLINE void hstep_exact_take(struct hstep_exact_top *t, int k, int64_t limb)
{
    int64_t sum = limb + t->carry, digit = k < HSTEP_EXACT_LIMBS - 1 ? sum & 0xFFFFFFFF : sum;
    t->carry = (sum - digit) / ((int64_t)1 << 32);
    if (digit) {
        t->limb = k;
        t->high = digit;
        t->middle = t->last;
        t->low = t->last_but_one;
        t->rest = t->below;
    }
    t->below |= t->last_but_one;
    t->last_but_one = t->last;
    t->last = digit;
}

/* Returns the sum without its sign as the pattern of a double. */
HSTEP_INLINE uint64_t hstep_exact_pattern(const struct hstep_exact_top *t)
{
    uint64_t high = (uint64_t)t->high, middle = (uint64_t)t->middle, low = (uint64_t)t->low, rest = (uint64_t)t->rest;
    int width = 0;
    while (high >> width) width++;
    /* Bit `lowest` is the unit in the last place of a 53-bit result. Bit 0 is the smallest subnormal. */
    int lowest = 32 * t->limb + width - 53;
    if (lowest <= 0) return t->limb ? high << 32 | middle : high;
    if (lowest >= 2046) return (uint64_t)2047 << 52;
    /* The lowest of the digits that hold the result is two below the highest, or one below it. */
    if ((lowest - 1) / 32 != t->limb - 2) {
        rest |= low;
        low = middle;
        middle = high;
        high = 0;
    }
    int shift = (lowest - 1) % 32;
    uint64_t both = low | middle << 32;
    /* The 53 bits of the result and the next lower bit. */
    uint64_t window = both >> shift | high << 1 << (63 - shift), mantissa = window >> 1;
    rest |= both & (((uint64_t)1 << shift) - 1);
    mantissa += (window & 1) && (rest || (mantissa & 1));
    /* Adds instead of inserting, so that bit 52 and a carry out of the rounding run into the exponent, up to
     * infinity. */
    return ((uint64_t)lowest << 52) + mantissa;
}

/* A sum whose limbs come one by one, and its negative. Only one of the two has no negative digit. */
struct hstep_exact_rounding {
    struct hstep_exact_top plus, minus;
};

HSTEP_INLINE void hstep_exact_next(struct hstep_exact_rounding *r, int k, int64_t limb)
{
    hstep_exact_take(&r->plus, k, limb);
    hstep_exact_take(&r->minus, k, -limb);
}

/* Returns the sum as a double, rounded once to nearest even. Returns +0 for zero, and infinity beyond the largest
 * double. Requires all limbs to be taken. */
HSTEP_INLINE double hstep_exact_end(const struct hstep_exact_rounding *r)
{
    uint64_t bits =
        r->plus.last < 0 ? (uint64_t)1 << 63 | hstep_exact_pattern(&r->minus) : hstep_exact_pattern(&r->plus);
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

/* Returns the sum as hstep_exact_end() does. Keeps no copy of the limbs, because a GPU's threads have little memory of
 * their own. */
HSTEP_INLINE double hstep_exact_round(const int64_t acc[HSTEP_EXACT_LIMBS])
{
    struct hstep_exact_rounding r = {{0}, {0}};
    int k = 0, end = HSTEP_EXACT_LIMBS;
    /* Most limbs are 0. Those below the first other one change nothing. Those above the last leave a carry, whose sign
     * is that of the sum. */
    while (end > 1 && !acc[end - 1]) end--;
    while (k < end - 1 && !acc[k]) k++;
    for (; k < end; k++) hstep_exact_next(&r, k, acc[k]);
    if (end < HSTEP_EXACT_LIMBS) {
        hstep_exact_next(&r, end, 0);
        if (r.plus.carry < 0) r.plus.last = -1;
    }
    return hstep_exact_end(&r);
}

#endif
