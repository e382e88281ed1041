/* The instructions that read and write registers alone (instructions.def), and the table of all. */
#include <math.h>
#include <string.h>

#include "cuda/warp.h"

static F32 canonical(F32 x) { return x == x ? x : __builtin_nanf("0x3fffff"); }
#define RESULT_P(x) (x)
#define RESULT_U16(x) (U16)(x)
#define RESULT_S16(x) (U16)(x)
#define RESULT_U32(x) (x)
#define RESULT_S32(x) (x)
#define RESULT_F32(x) canonical(x)
#define RESULT_U64(x) (x)
#define RESULT_S64(x) (x)
#define RESULT_F64(x) (x)

static U64 extracted(U64 a, U32 position, U32 length, U32 bits, int is_signed)
{
    const U64 x = position < bits ? a >> position : 0, kept = length < bits ? ((U64)1 << length) - 1 : ~(U64)0;
    const U32 last = position + length - 1 < bits - 1 ? position + length - 1 : bits - 1;
    const int negative = is_signed && length && a >> last & 1;
    const U32 have = position < bits ? bits - position : 0; /* bits beyond are the sign's */
    return negative ? (x & kept) | ~(U64)0 << (have < length ? have : length < 63 ? length : 63) : x & kept;
}
static U32 permuted(U32 a, U32 b, U32 how)
{
    const U64 bytes = (U64)b << 32 | a;
    U32 result = 0;
    for (int i = 0; i < 4; i++) {
        const U32 byte = bytes >> (how >> 4 * i & 7) * 8 & 255;
        result |= (how >> 4 * i & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return result;
}
static U32 reversed(U32 x)
{
    U32 result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}
static U32 saturated(S32 x) { return x < 0 ? 0 : x > 255 ? 255 : (U32)x; }
static S32 limited(F64 x) { return x >= 0x1p31 ? 0x7fffffff : x <= -0x1p31 ? -0x7fffffff - 1 : (S32)x; }
/* -0 is smaller than 0. A NaN is no number beside one. */
static F32 smaller(F32 a, F32 b) { return a != a ? b : b != b ? a : a < b || (a == b && __builtin_signbit(a)) ? a : b; }
static F64 smaller_double(F64 a, F64 b)
{
    return a != a ? b : b != b ? a : a < b || (a == b && __builtin_signbit(a)) ? a : b;
}

/* Returns a factor for an estimate: 1 by default, otherwise as far away as `most` allows, up or down or anywhere. */
static F64 astray(F32 x, F64 most)
{
    U32 bits;
    memcpy(&bits, &x, 4);
    switch (hstep_emulation.estimates) {
    case HSTEP_ESTIMATES_HIGH: return 1 + most;
    case HSTEP_ESTIMATES_LOW: return 1 - most;
    case HSTEP_ESTIMATES_ANYWHERE: return 1 + most * ((bits * 0x9E3779B9u >> 8) * 0x1p-23 - 1);
    default: return 1;
    }
}
/* The ISA allows 1 unit in the last place for rcp and 2^-23 for sqrt, of which rounding takes a part. A root's own
 * estimate is the nearest (docs/gpu.md). All take subnormal numbers for zeros. */
static F32 reciprocal(F32 x)
{
    const F64 y = fabsf(x) < 0x1p-126f ? (F64)copysignf(INFINITY, x) : astray(x, 0x1p-24) / (F64)x;
    return fabs(y) < 0x1p-126 ? copysignf(0.0f, x) : (F32)y;
}
static F32 inverse_root(F32 x)
{
    if (fabsf(x) < 0x1p-126f) return copysignf(INFINITY, x);
    return (F32)(1 / sqrt((F64)x));
}

static F32 estimated_root(F32 x)
{
    if (fabsf(x) < 0x1p-126f) return copysignf(0.0f, x);
    return (F32)(astray(x, 0x1p-24) * sqrt((F64)x));
}
/* Between 0 and 1. A NaN becomes 0. */
static F32 saturated_sum(F32 a, F32 b)
{
    const F32 sum = a + b;
    return sum > 0 ? sum < 1 ? sum : 1 : 0;
}

#define ONE(name, D, A, value)                                                   \
    static void run_##name(struct warp *w, const struct row *r)                  \
    {                                                                            \
        D##_lane *d = at(w, r->x[0]);                                            \
        const A##_lane *p = at(w, r->x[1]);                                      \
        EACH_LANE(const A a = (A)p[i]; d[i] = (D##_lane)RESULT_##D((D)(value));) \
    }
#define TWO(name, D, A, B, value)                                                                     \
    static void run_##name(struct warp *w, const struct row *r)                                       \
    {                                                                                                 \
        D##_lane *d = at(w, r->x[0]);                                                                 \
        const A##_lane *p = at(w, r->x[1]);                                                           \
        const B##_lane *q = at(w, r->x[2]);                                                           \
        EACH_LANE(const A a = (A)p[i]; const B b = (B)q[i]; d[i] = (D##_lane)RESULT_##D((D)(value));) \
    }
#define THREE(name, D, A, B, C, value)                                           \
    static void run_##name(struct warp *w, const struct row *r)                  \
    {                                                                            \
        D##_lane *d = at(w, r->x[0]);                                            \
        const A##_lane *p = at(w, r->x[1]);                                      \
        const B##_lane *q = at(w, r->x[2]);                                      \
        const C##_lane *s = at(w, r->x[3]);                                      \
        EACH_LANE(const A a = (A)p[i]; const B b = (B)q[i]; const C c = (C)s[i]; \
                  d[i] = (D##_lane)RESULT_##D((D)(value));)                      \
    }
#define HAND(name)
#include "cuda/instructions.def"
#undef HAND
#undef ONE
#undef TWO
#undef THREE

hstep_instruction *const hstep_instructions[] = {
#define HAND(name) hstep_run_##name,
#define ONE(name, ...) run_##name,
#define TWO ONE
#define THREE ONE
#include "cuda/instructions.def"
};

void hstep_run_special(struct warp *w, const struct row *r)
{
    U32 *d = at(w, r->x[0]);
    const U32 first = (U32)(w - w->block->warps) * LANES;
    const U32 values[] = {first, (U32)w->block->index, (U32)hstep_machine.blocks, HSTEP_CUDA_THREADS};
    EACH_LANE(d[i] = values[r->x[1]] + (r->x[1] ? 0 : (U32)i);)
}

void hstep_run_frame(struct warp *w, const struct row *r)
{
    U64 *d = at(w, r->x[0]);
    const U64 address = (U64)(w->frames[w->depth].local + r->offset);
    EACH_LANE(d[i] = address;)
}

/* Fills a register, which some way through the code reads before it writes. */
void hstep_run_garbage(struct warp *w, const struct row *r)
{
    U32 *d = at(w, r->x[0]);
    for (U32 i = 0; i < r->x[1] / 4 * LANES; i++) d[i] = GARBAGE;
}
