/* Roots and quotients of cuda.h, which includes this file once it has defined its types.
 *
 * These are ptxas's expansions of sqrt.rn and div.rn with one change. A fast way is right only in a range, and one test
 * asks whether all lanes are in it. If some lane is not, the instructions themselves compute all lanes.
 *
 *   root:     y = 1/sqrt(a) (1 + d), s = a |y|, r = s + (a - s s) (y / 2)
 *   quotient: y = 1/b (1 + d), y' = y + y (1 - b y), q = a y', r = q - (b q - a) y'
 *
 * Each operation rounds once; a product and the sum around it are one operation. No intermediate number is subnormal.
 * The errors a - s s and b q - a are exact, because their last place, at least 2^-47 of a, is above 2^-149. The result
 * is therefore equally exact for every exponent. The fast way requires a root of at least 2^-50, and a numerator and a
 * quotient of at least 2^-100.
 *
 * The result is NaN if the estimate is no use (zero, subnormal, negative, infinite, NaN) or if a quotient leaves fp32
 * on its way. A NaN fails the test. The estimate of a negative subnormal number is -inf. Its |y| makes s - inf a NaN,
 * whereas y alone would make the root +inf. lab/gpu_arithmetic.py compares all roots with the processor's. */
#ifndef HSTEP_VEC_CUDA_ROOTS_H
#define HSTEP_VEC_CUDA_ROOTS_H

/* Returns true if the compiler knows that all lanes are equal. The result is then computed once. */
V_OP int hstep_cuda_is_one(vf a)
{
    const uint32_t first = hstep_pattern(a.x[0]);
    const int same = ((first ^ hstep_pattern(a.x[1])) | (first ^ hstep_pattern(a.x[2])) |
                      (first ^ hstep_pattern(a.x[3]))) == 0;
    return __builtin_constant_p(same) && same;
}

#define CUDA_ROOT(r, a)                \
    "rsqrt.approx.ftz.f32 y, " a ";\n" \
    "abs.f32 s, y;\n"                  \
    "mul.rn.f32 s, " a ", s;\n"        \
    "mul.rn.f32 y, y, 0f3F000000;\n"   \
    "neg.f32 e, s;\n"                  \
    "fma.rn.f32 e, e, s, " a ";\n"     \
    "fma.rn.f32 " r ", e, y, s;\n"
#define CUDA_EXACT_ROOT(r, a) "sqrt.rn.f32 " r ", " a ";\n"
#define CUDA_QUOTIENT(r, a, b)        \
    "rcp.approx.ftz.f32 y, " b ";\n"  \
    "neg.f32 s, " b ";\n"             \
    "fma.rn.f32 e, s, y, 0f3F800000;\n" \
    "fma.rn.f32 y, y, e, y;\n"        \
    "mul.rn.f32 " r ", " a ", y;\n"   \
    "fma.rn.f32 e, s, " r ", " a ";\n" \
    "fma.rn.f32 " r ", e, y, " r ";\n"
#define CUDA_EXACT_QUOTIENT(r, a, b) "div.rn.f32 " r ", " a ", " b ";\n"
#define CUDA_EXACT_QUOTIENT0(r, a, b)  \
    "setp.eq.f32 p, " b ", 0f00000000;\n" \
    "div.rn.f32 " r ", " a ", " b ";\n"   \
    "@p mov.f32 " r ", 0f00000000;\n"
/* Sets e to the smaller of e and |x|, or to NaN if one is NaN. */
#define CUDA_LEAST(x)         \
    "abs.f32 s, " x ";\n"     \
    "min.NaN.f32 e, e, s;\n"
#define CUDA_BEGIN "{\n.reg .pred p;\n.reg .f32 y, s, e;\n"
/* Labels are local to their braces. The constants are 2^-50 and 2^-100. */
#define CUDA_ROOT_UNLESS "setp.ge.f32 p, e, 0f26800000;\n@p bra done;\n"
#define CUDA_QUOTIENT_UNLESS "setp.ge.f32 p, e, 0f0D800000;\n@p bra done;\n"
#define CUDA_END "done:\n}"

V_OP float hstep_cuda_root(float a)
{
    float r;
    __asm__(CUDA_BEGIN CUDA_ROOT("%0", "%1") "mov.f32 e, %0;\n" CUDA_ROOT_UNLESS CUDA_EXACT_ROOT("%0", "%1") CUDA_END
            : "=&f"(r)
            : "f"(a));
    return r;
}
V_OP vf hstep_cuda_roots(vf a)
{
    vf r;
    __asm__(CUDA_BEGIN CUDA_ROOT("%0", "%4") CUDA_ROOT("%1", "%5") CUDA_ROOT("%2", "%6") CUDA_ROOT("%3", "%7")
            "min.NaN.f32 e, %0, %1;\n"
            "min.NaN.f32 s, %2, %3;\n"
            "min.NaN.f32 e, e, s;\n"
            CUDA_ROOT_UNLESS
            CUDA_EXACT_ROOT("%0", "%4") CUDA_EXACT_ROOT("%1", "%5") CUDA_EXACT_ROOT("%2", "%6")
            CUDA_EXACT_ROOT("%3", "%7") CUDA_END
            : "=&f"(r.x[0]), "=&f"(r.x[1]), "=&f"(r.x[2]), "=&f"(r.x[3])
            : "f"(a.x[0]), "f"(a.x[1]), "f"(a.x[2]), "f"(a.x[3]));
    return r;
}
V_OP vf v_sqrt(vf a) { return hstep_cuda_is_one(a) ? v_set(hstep_cuda_root(a.x[0])) : hstep_cuda_roots(a); }

#define CUDA_DIVISION(suffix, EXACT)                                                                              \
    V_OP float hstep_cuda_quotient##suffix(float a, float b)                                                      \
    {                                                                                                             \
        float r;                                                                                                  \
        __asm__(CUDA_BEGIN CUDA_QUOTIENT("%0", "%1", "%2") "abs.f32 e, %1;\n" CUDA_LEAST("%0") CUDA_QUOTIENT_UNLESS \
                    EXACT("%0", "%1", "%2") CUDA_END                                                              \
                : "=&f"(r)                                                                                        \
                : "f"(a), "f"(b));                                                                                \
        return r;                                                                                                 \
    }                                                                                                             \
    V_OP vf hstep_cuda_quotients##suffix(vf a, vf b)                                                              \
    {                                                                                                             \
        vf r;                                                                                                     \
        __asm__(CUDA_BEGIN CUDA_QUOTIENT("%0", "%4", "%8") CUDA_QUOTIENT("%1", "%5", "%9")                        \
                    CUDA_QUOTIENT("%2", "%6", "%10") CUDA_QUOTIENT("%3", "%7", "%11") "abs.f32 e, %0;\n"          \
                    CUDA_LEAST("%1") CUDA_LEAST("%2") CUDA_LEAST("%3") CUDA_LEAST("%4") CUDA_LEAST("%5")          \
                    CUDA_LEAST("%6") CUDA_LEAST("%7") CUDA_QUOTIENT_UNLESS                                        \
                    EXACT("%0", "%4", "%8") EXACT("%1", "%5", "%9") EXACT("%2", "%6", "%10")                      \
                    EXACT("%3", "%7", "%11") CUDA_END                                                             \
                : "=&f"(r.x[0]), "=&f"(r.x[1]), "=&f"(r.x[2]), "=&f"(r.x[3])                                      \
                : "f"(a.x[0]), "f"(a.x[1]), "f"(a.x[2]), "f"(a.x[3]), "f"(b.x[0]), "f"(b.x[1]), "f"(b.x[2]),      \
                  "f"(b.x[3]));                                                                                   \
        return r;                                                                                                 \
    }                                                                                                             \
    V_OP vf v_div##suffix(vf a, vf b)                                                                             \
    {                                                                                                             \
        const int is_one = hstep_cuda_is_one(a) && hstep_cuda_is_one(b); \
        return is_one ? v_set(hstep_cuda_quotient##suffix(a.x[0], b.x[0]))              \
                                                : hstep_cuda_quotients##suffix(a, b);                             \
    }
/* A power of two over a BF16 number, or +0 if the number is 0. The product by the power is exact. With each of the 128
 * significands of BF16, y' is right if the estimate is within 8 units in the last place. The steps require a quotient
 * that is not subnormal. */
#define CUDA_POWER_OVER(r, power, b)        \
    "rcp.approx.ftz.f32 y, " b ";\n"        \
    "neg.f32 s, " b ";\n"                   \
    "fma.rn.f32 e, s, y, 0f3F800000;\n"     \
    "fma.rn.f32 y, y, e, y;\n"              \
    "mul.rn.f32 y, y, " power ";\n"         \
    "setp.gt.f32 p, " b ", 0f00000000;\n"   \
    "selp.f32 " r ", y, 0f00000000, p;\n"
/* The constant is 2^125. */
#define CUDA_POWER_UNLESS(b) "setp.le.f32 p, " b ", 0f7E000000;\n@p bra done;\n"
V_OP float hstep_cuda_power_over(float s, const float power)
{
    float r;
    __asm__(CUDA_BEGIN CUDA_POWER_OVER("%0", "%1", "%2") "}" : "=&f"(r) : "f"(power), "f"(s));
    return r;
}
V_OP float hstep_cuda_power_over_any(float s, const float power)
{
    float r;
    __asm__(CUDA_BEGIN CUDA_POWER_OVER("%0", "%1", "%2") CUDA_POWER_UNLESS("%2") CUDA_EXACT_QUOTIENT("%0", "%1", "%2")
                CUDA_END
            : "=&f"(r)
            : "f"(power), "f"(s));
    return r;
}
/* Computes hstep_inverse() (vec/root_code.h). All lanes have one scale. */
V_OP vf hstep_cuda_inverse(vf scale, const float power, const float most)
{
    const float s = scale.x[0];
    return v_set(most > 0x1p125f ? hstep_cuda_power_over_any(s, power) : hstep_cuda_power_over(s, power));
}
#define hstep_inverse hstep_cuda_inverse

CUDA_DIVISION(, CUDA_EXACT_QUOTIENT)
CUDA_DIVISION(0, CUDA_EXACT_QUOTIENT0)

#endif
