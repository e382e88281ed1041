/* Double-precision functions with the same bits on every machine. They use only + - * / sqrt, comparisons and integers,
 * in a fixed order. They use no table, and no libm beyond sqrt, which IEEE 754 defines exactly. This header must be
 * compiled without contraction into fused multiply-adds. If a product's error matters, it is computed explicitly.
 *
 * Error bounds are in units of the last place of the exact result. tests/core/test_base.c checks them against a wider
 * format. */
#ifndef HSTEP_DETMATH_H
#define HSTEP_DETMATH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/inline.h"

#define HSTEP_PI 0x1.921fb54442d18p+1

HSTEP_INLINE double hstep_from_bits64(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

HSTEP_INLINE uint64_t hstep_bits64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

/* The number high + low, an unevaluated sum. |low| is at most half a unit in the last place of high. */
struct hstep_two {
    double high, low;
};

HSTEP_INLINE struct hstep_two hstep_two_sum(double a, double b)
{
    struct hstep_two r;
    r.high = a + b;
    double b_part = r.high - a;
    double a_part = r.high - b_part;
    double a_error = a - a_part;
    double b_error = b - b_part;
    r.low = a_error + b_error;
    return r;
}

/* Returns a * b exactly, by Dekker's splitting. Requires |a|, |b| < 2^990 and a product that is not near the
 * subnormals. */
HSTEP_INLINE struct hstep_two hstep_two_product(double a, double b)
{
    struct hstep_two r;
    double a_wide = a * 134217729.0, b_wide = b * 134217729.0;
    double a_rest = a_wide - a, b_rest = b_wide - b;
    double a_high = a_wide - a_rest, b_high = b_wide - b_rest;
    double a_low = a - a_high, b_low = b - b_high;
    double high_high = a_high * b_high, high_low = a_high * b_low, low_high = a_low * b_high, low_low = a_low * b_low;
    r.high = a * b;
    double error = high_high - r.high;
    error = error + high_low;
    error = error + low_high;
    r.low = error + low_low;
    return r;
}

/* Returns an integer nearest to x, either one if x is half-way between two. Requires |x| < 2^31. */
HSTEP_INLINE double hstep_nearest(double x) { return (double)(int32_t)(x < 0 ? x - 0.5 : x + 0.5); }

/* Returns x^n, by squaring. For 0 < x <= 1 the relative error is below n * 2^-53 as long as the result is normal. */
HSTEP_INLINE double hstep_powi(double x, uint64_t n)
{
    double result = 1.0;
    for (; n; n >>= 1) {
        if (n & 1) result = result * x;
        x = x * x;
    }
    return result;
}

/* Returns log x with a relative error of about 2^-63. Requires a finite x > 0. The series uses x = m 2^k with m in
 * [sqrt(1/2), sqrt(2)), and s = (m - 1) / (m + 1):
 *
 *   log m = 2 s + 2/3 s^3 + 2/5 s^5 + ...
 *
 * The first two terms are kept in two doubles. */
HSTEP_INLINE struct hstep_two hstep_log_two(double x)
{
    int k = -1023;
    uint64_t bits = hstep_bits64(x);
    if (bits < (uint64_t)1 << 52) {
        bits = hstep_bits64(x * 0x1p54);
        k -= 54;
    }
    /* Makes the exponent field step at sqrt(2) times powers of two, instead of at powers of two. */
    bits += 0x3FF0000000000000u - 0x3FE6A09E667F3BCDu;
    k += (int)(bits >> 52);
    double m = hstep_from_bits64((bits & 0xFFFFFFFFFFFFFu) + 0x3FE6A09E667F3BCDu);

    double f = m - 1.0;
    struct hstep_two d = hstep_two_sum(1.0, m);
    double s = f / d.high;
    struct hstep_two back = hstep_two_product(s, d.high);
    double rest = f - back.high;
    rest = rest - back.low;
    double d_part = s * d.low;
    rest = rest - d_part;
    double s_low = rest / d.high;

    struct hstep_two z = hstep_two_product(s, s);
    double cross = 2.0 * s * s_low;
    z.low = z.low + cross;

    struct hstep_two cube = hstep_two_product(z.high, s);
    double cube_low = z.low * s;
    double cube_cross = z.high * s_low;
    cube.low = cube.low + cube_low;
    cube.low = cube.low + cube_cross;
    struct hstep_two third = hstep_two_product(cube.high, 0x1.5555555555555p-1);
    double third_low = cube.low * 0x1.5555555555555p-1;
    double third_rest = cube.high * 0x1.5555555555555p-55;
    third.low = third.low + third_low;
    third.low = third.low + third_rest;

    double tail = 2.0 / 23.0;
    int j;
    for (j = 21; j >= 5; j -= 2) {
        tail = tail * z.high;
        tail = tail + 2.0 / (double)j;
    }
    tail = tail * z.high;
    tail = tail * cube.high;

    /* k ln 2 in two parts. The first constant ends in 24 zero bits, so that its product with k is exact. */
    double k_high = (double)k * 0x1.62e42fep-1;
    double k_low = (double)k * 0x1.f473de6af278fp-30;
    struct hstep_two sum = hstep_two_sum(k_high, 2.0 * s);
    struct hstep_two next = hstep_two_sum(sum.high, third.high);
    struct hstep_two last = hstep_two_sum(next.high, k_low);
    double low = 2.0 * s_low;
    low = low + third.low;
    low = low + tail;
    low = low + sum.low;
    low = low + next.low;
    low = low + last.low;
    return hstep_two_sum(last.high, low);
}

/* Returns e^(high + low) within 1 unit, or 2 if the result is subnormal. Requires |low| small against |high|. */
HSTEP_INLINE double hstep_exp_two(double high, double low)
{
    if (high != high) return high;
    if (high > 710.0) return hstep_from_bits64((uint64_t)2047 << 52);
    if (high < -746.0) return 0.0;
    double k = hstep_nearest(high * 0x1.71547652b82fep+0);
    double k_high = k * 0x1.62e42fep-1, k_low = k * 0x1.f473de6af278fp-30;
    double first = high - k_high;
    struct hstep_two reduced = hstep_two_sum(first, -k_low);
    reduced.low = reduced.low + low;
    struct hstep_two r = hstep_two_sum(reduced.high, reduced.low);

    double x = r.high, rest = r.low, series = 1.0 / 6227020800.0, factorial = 6227020800.0;
    int j;
    for (j = 13; j > 2; j--) {
        factorial = factorial / (double)j;
        series = series * x;
        series = series + 1.0 / factorial;
    }
    series = series * x;
    series = series * x;
    double slope = 1.0 + x;
    rest = rest * slope;
    series = series + rest;
    series = series + x;
    series = series + 1.0;
    /* Scales by two factors, because 2^k itself may lie outside the range. Only the second product can round. */
    int half = (int)k / 2, other = (int)k - half;
    series = series * hstep_from_bits64((uint64_t)(half + 1023) << 52);
    return series * hstep_from_bits64((uint64_t)(other + 1023) << 52);
}

/* Returns the natural logarithm within 0.51 units. Requires a finite x > 0. */
HSTEP_INLINE double hstep_log(double x) { return hstep_log_two(x).high; }

/* Returns e^x within 1 unit, or 2 if it is subnormal. Gives infinity above 709.79, 0 below -745.14, and NaN for NaN. */
HSTEP_INLINE double hstep_exp(double x) { return hstep_exp_two(x, 0.0); }

/* Returns x^y within 2 units. Requires finite x > 0 and finite y. */
HSTEP_INLINE double hstep_pow(double x, double y)
{
    struct hstep_two l = hstep_log_two(x);
    double estimate = y * l.high;
    if (!(estimate < 800.0 && estimate > -800.0)) return hstep_exp_two(estimate, 0.0);
    struct hstep_two p = hstep_two_product(y, l.high);
    double low = y * l.low;
    low = p.low + low;
    return hstep_exp_two(p.high, low);
}

/* Returns cos x within 1 unit. Requires |x| <= 2^19. */
HSTEP_INLINE double hstep_cos(double x)
{
    if (x < 0) x = -x;
    /* Computes x - n pi/2 with pi/2 in three parts. The first two end in 20 zero bits, so that their products are
     * exact. */
    double n = hstep_nearest(x * 0x1.45f306dc9c883p-1);
    double n_high = n * 0x1.921fb544p+0, n_middle = n * 0x1.0b4611a6p-34, n_low = n * 0x1.3198a2e037073p-69;
    double first = x - n_high;
    struct hstep_two reduced = hstep_two_sum(first, -n_middle);
    reduced.low = reduced.low - n_low;
    struct hstep_two r = hstep_two_sum(reduced.high, reduced.low);
    double a = r.high, rest = r.low, z = a * a;
    int quadrant = (int)n & 3, j;
    double series, result;
    if (quadrant & 1) {
        /* sin(a + rest) = a - a^3/6 + ... + rest cos a */
        series = 0.0;
        for (j = 17; j >= 3; j -= 2) {
            series = 1.0 - series;
            series = series * z;
            series = series / (double)(j * (j - 1));
        }
        double slope = 1.0 - 0.5 * z;
        rest = rest * slope;
        series = series * a;
        series = rest - series;
        result = a + series;
        return quadrant == 1 ? -result : result;
    }
    /* cos(a + rest) = 1 - z/2 + z^2/24 - ... - rest a. The rounding error of 1 - z/2 is kept. */
    series = 0.0;
    for (j = 16; j >= 4; j -= 2) {
        series = 1.0 - series;
        series = series * z;
        series = series / (double)(j * (j - 1));
    }
    double half = 0.5 * z;
    series = series * half;
    double lead = 1.0 - half;
    double error = 1.0 - lead;
    error = error - half;
    rest = rest * a;
    series = series - rest;
    series = series + error;
    result = lead + series;
    return quadrant == 2 ? -result : result;
}

#endif
