#include "trainer/products/rows.h"

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "halfstep.h"

#include "base/rng.h"
#include "common/text.h"
#include "trainer/products/row_kernels.h"

/* The build defines the instruction sets that row_kernels.c was compiled for: -DROW_ISAS="X(scalar) X(avx2)". */
#define X(isa) extern const struct row_kernels ROW_KERNELS(isa);
ROW_ISAS
#undef X

static const struct {
    const char *isa;
    const struct row_kernels *kernels;
} compiled[] = {
#define X(isa) {#isa, &ROW_KERNELS(isa)},
    ROW_ISAS
#undef X
};

const struct row_kernels *row_kernels_of(const char *isa)
{
    for (int i = 0; i < COUNT_OF(compiled); i++)
        if (!strcmp(compiled[i].isa, isa)) return compiled[i].kernels;
    return NULL;
}

/* Returns the functions for the library's instruction set, which HALFSTEP_ISA may name. All give the same bits. */
static const struct row_kernels *kernels(void)
{
    static _Atomic(const struct row_kernels *) chosen;
    const struct row_kernels *use = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (use) return use;
    use = row_kernels_of(halfstep_isa());
    if (!use) use = compiled[0].kernels;
    atomic_store_explicit(&chosen, use, memory_order_relaxed);
    return use;
}

#define ROW(name, parameters, arguments) \
    void row_##name parameters { kernels()->name arguments; }
#define ROW_FLOAT(name, parameters, arguments) \
    float row_##name parameters { return kernels()->name arguments; }
#include "trainer/products/rows.def"

double exact_log(double x)
{
    if (!(x > 0.0) || x > 1.7e308) return x > 0.0 ? x : x == 0.0 ? -HUGE_VAL : (x - x) / (x - x);
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    int exponent = (int)(u >> 52) - 1023;
    u = (u & UINT64_C(0xFFFFFFFFFFFFF)) | UINT64_C(0x3FF0000000000000);
    double m;
    memcpy(&m, &u, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    static const double series[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                                    1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
    double s = (m - 1.0) / (m + 1.0), q = s * s, p = 1.0 / 23;
    for (int i = 0; i < COUNT_OF(series); i++) p = p * q + series[i];
    return (double)exponent * 0.6931471805599453 + 2.0 * s * p;
}

double exact_exp(double x)
{
    if (x < -700.0) return 0.0;
    if (x > 700.0) x = 700.0;
    double n = (double)(int64_t)(x * 1.4426950408889634 + (x < 0.0 ? -0.5 : 0.5));
    double r = x - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10, p = 1.0;
    for (int k = 18; k >= 1; k--) p = 1.0 + p * r / (double)k;
    uint64_t u = (uint64_t)(1023 + (int64_t)n) << 52;
    double scale;
    memcpy(&scale, &u, sizeof scale);
    return p * scale;
}

void exact_sincos(double x, double *sine, double *cosine)
{
    int64_t n = (int64_t)(x * 0.6366197723675814 + (x < 0.0 ? -0.5 : 0.5));
    double r = x - (double)n * 1.57079632673412561417 - (double)n * 6.07710050650619224932e-11, q = r * r;
    double s = 1.0, c = 1.0;
    for (int k = 20; k >= 2; k -= 2) {
        s = 1.0 - s * q / (double)(k * (k + 1));
        c = 1.0 - c * q / (double)(k * (k - 1));
    }
    s *= r;
    switch (n & 3) {
    case 0: *sine = s, *cosine = c; break;
    case 1: *sine = c, *cosine = -s; break;
    case 2: *sine = -s, *cosine = -c; break;
    default: *sine = -c, *cosine = s; break;
    }
}

uint64_t hash_counters(uint64_t seed, uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t step = UINT64_C(0x9E3779B97F4A7C15);
    uint64_t h = hstep_mix(seed + step);
    h = hstep_mix((h ^ a) + step);
    h = hstep_mix((h ^ b) + step);
    return hstep_mix((h ^ c) + step);
}
