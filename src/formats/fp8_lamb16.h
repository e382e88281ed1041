/* The published 8-bit states of LAMB16, for its figures only; 1 byte an element. m is e4m3 and v is e5m2. The whole
 * tensor of N elements has one fp32 scale s:
 *
 *   s = sqrt(sum of min(x^2, 10)) / N + 1e-6
 *   m: e4m3(clip(m / s, -15, 15))      v: e5m2(clip(v, 0, 10) / s)      to nearest, ties to even; decode: number * s
 *
 * As published, s shrinks with N beyond the root mean square. So most of m saturates at +-15 s, and v below s 2^-17
 * becomes zero. The error has no bound, and fp8 is the format to use. Two things differ. A v / s from 61440 up became
 * infinite for ever; here it is stored as 57344. The scale gets 1e-6 added, whatever the optimizer's eps is. Memory of
 * zeros (codes and scale) decodes to +0, as with the published scale of 1, and so does the code of -0. A pass sums the
 * squares of fp8_lamb16_norm() instead of taking a maximum. */
#ifndef HSTEP_FP8_LAMB16_H
#define HSTEP_FP8_LAMB16_H

#include "base/inline.h"
#include "formats/fp8_code.h"

#define fp8_lamb16_ROW "fp8-lamb16", "e4m3 or e5m2 by LAMB16's published scale", TENSOR, U8, F32, \
    roles = SIGNED | NONNEG, code_bits = 8, block = 1 << 30, stochastic = 0, root = 0

V_OP vf fp8_lamb16_norm(vf x, const int nonneg)
{
    (void)nonneg;
    return v_min(v_abs(x), v_set(3.16227766f)); /* sqrt 10 */
}

HSTEP_INLINE float fp8_lamb16_tensor_scale(double norm, double elements) { return (float)(norm / elements + 1e-6); }

DIVIDE_BY_SCALE(fp8_lamb16)
STASH_AS_IS(fp8_lamb16)

V_OP vi fp8_lamb16_code(vf stashed, vf inverse, vi random, const int nonneg)
{
    (void)random;
    if (nonneg) {
        vf clipped = v_max(v_min(stashed, v_set(10.0f)), v_set(0.0f));
        return hstep_fp8_nearest_even(v_div(clipped, inverse), HSTEP_E5M2);
    }
    vi sign = vi_shr(vi_and(v_bits(stashed), vi_set(0x80000000)), 24);
    vf t = v_min(v_div(v_abs(stashed), inverse), v_set(15.0f));
    return vi_or(hstep_fp8_nearest_even(t, HSTEP_E4M3), sign);
}

V_OP vf fp8_lamb16_value(vi code, vf scale, const int nonneg)
{
    if (nonneg) return v_mul(hstep_fp8_value(code, HSTEP_E5M2), scale);
    return v_add(hstep_fp8_signed_value(code, scale, HSTEP_E4M3), v_set(0.0f));
}

CODES_ARE_BYTES(fp8_lamb16)

#endif
