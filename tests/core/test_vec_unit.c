/* Compiled once per row of vec/isas.def, as kernels.c is, with HSTEP_VEC_HEADER, HSTEP_ISA and the row's flags. No
 * function here has external linkage. The linker could otherwise take one that the processor cannot run. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include HSTEP_VEC_HEADER
#include "test_vec.h"

#define ALIGNED __attribute__((aligned(64)))

/* clang-format off */
#define REPEAT_32(X, op)                                                                                          \
    X(op, 0) X(op, 1) X(op, 2) X(op, 3) X(op, 4) X(op, 5) X(op, 6) X(op, 7) X(op, 8) X(op, 9) X(op, 10) X(op, 11) \
    X(op, 12) X(op, 13) X(op, 14) X(op, 15) X(op, 16) X(op, 17) X(op, 18) X(op, 19) X(op, 20) X(op, 21) X(op, 22) \
    X(op, 23) X(op, 24) X(op, 25) X(op, 26) X(op, 27) X(op, 28) X(op, 29) X(op, 30) X(op, 31)
/* clang-format on */

#define TRUTH(mask) vi_select(mask, vi_set(1), vi_set(0))

/* X(name, kind, integer vector): fa, fb, fc are the inputs as floats, ia, ib, ic as integers. The last ones are chains
 * that a compiler might contract, or replace by estimates or by instructions with other special cases. */
#define LANE_OPS(X)                                                                \
    X(v_add, FLOAT, v_bits(v_add(fa, fb)))                                         \
    X(v_sub, FLOAT, v_bits(v_sub(fa, fb)))                                         \
    X(v_mul, FLOAT, v_bits(v_mul(fa, fb)))                                         \
    X(v_div, FLOAT, v_bits(v_div(fa, fb)))                                         \
    X(v_div0, FLOAT, v_bits(v_div0(fa, fb)))                                       \
    X(v_sqrt, FLOAT, v_bits(v_sqrt(fa)))                                           \
    X(v_min, EXACT, v_bits(v_min(fa, fb)))                                         \
    X(v_max, EXACT, v_bits(v_max(fa, fb)))                                         \
    X(v_abs, EXACT, v_bits(v_abs(fa)))                                             \
    X(v_neg, EXACT, v_bits(v_neg(fa)))                                             \
    X(v_sign, EXACT, v_bits(v_sign(fa)))                                           \
    X(v_gt, EXACT, TRUTH(v_gt(fa, fb)))                                            \
    X(v_lt, EXACT, TRUTH(v_lt(fa, fb)))                                            \
    X(v_eq, EXACT, TRUTH(v_eq(fa, fb)))                                            \
    X(vi_gt, EXACT, TRUTH(vi_gt(ia, ib)))                                          \
    X(vi_eq, EXACT, TRUTH(vi_eq(ia, ib)))                                          \
    X(v_select_float, EXACT, v_bits(v_select(v_gt(fa, fb), fc, fa)))               \
    X(v_select_integer, EXACT, v_bits(v_select(vi_gt(ia, ib), fc, fa)))            \
    X(vi_select_float, EXACT, vi_select(v_lt(fa, fb), ic, ia))                     \
    X(vi_select_integer, EXACT, vi_select(vi_eq(ia, ib), ic, ia))                  \
    X(v_round, SMALL, v_round(fa))                                                 \
    X(v_from_int, EXACT, v_bits(v_from_int(ia)))                                   \
    X(vi_add, EXACT, vi_add(ia, ib))                                               \
    X(vi_sub, EXACT, vi_sub(ia, ib))                                               \
    X(vi_mul, EXACT, vi_mul(ia, ib))                                               \
    X(vi_mulhi, EXACT, vi_mulhi(ia, ib))                                           \
    X(vi_mul16, EXACT, vi_mul16(ia, ib))                                           \
    X(vi_add16, EXACT, vi_add16(ia, ib))                                           \
    X(vi_min16, EXACT, vi_min16(ia, ib))                                           \
    X(vi_negate16, EXACT, vi_negate16(ia, ib))                                     \
    X(vi_join16, EXACT, vi_join16(ia, ib))                                         \
    X(vi_and, EXACT, vi_and(ia, ib))                                               \
    X(vi_or, EXACT, vi_or(ia, ib))                                                 \
    X(vi_xor, EXACT, vi_xor(ia, ib))                                               \
    X(vi_andnot, EXACT, vi_andnot(ia, ib))                                         \
    X(vi_min, EXACT, vi_min(ia, ib))                                               \
    X(vi_max, EXACT, vi_max(ia, ib))                                               \
    X(vi_iota, EXACT, vi_add(vi_set((uint32_t)i), vi_iota()))                      \
    X(product_plus, FLOAT, v_bits(v_add(v_mul(fa, fb), fc)))                       \
    X(product_minus, FLOAT, v_bits(v_sub(v_mul(fa, fb), fc)))                      \
    X(minus_product, FLOAT, v_bits(v_sub(fc, v_mul(fa, fb))))                      \
    X(over_root, FLOAT, v_bits(v_div(fa, v_sqrt(v_abs(fb)))))                      \
    X(root_of_product, FLOAT, v_bits(v_mul(v_sqrt(v_abs(fa)), v_sqrt(v_abs(fb))))) \
    X(over_constant, FLOAT, v_bits(v_div(fa, v_set(3.0f))))                        \
    X(plus_zero, FLOAT, v_bits(v_add(fa, v_set(0.0f))))                            \
    X(clamp, EXACT, v_bits(v_max(v_min(fa, v_abs(fb)), v_neg(v_abs(fb)))))         \
    X(select_lesser, EXACT, v_bits(v_select(v_lt(fa, fb), fa, fb)))                \
    X(div0_of_sum, FLOAT, v_bits(v_div0(fa, v_add(v_sqrt(v_abs(fb)), v_abs(fc)))))

#define LANE(op, kind, result)                                                                               \
    static void lane_##op(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n) \
    {                                                                                                        \
        for (int64_t i = 0; i < n; i += VL) {                                                                \
            vi ia = vi_load(a + i), ib = vi_load(b + i), ic = vi_load(c + i);                                \
            vf fa = v_from_bits(ia), fb = v_from_bits(ib), fc = v_from_bits(ic);                             \
            (void)fa, (void)fb, (void)fc;                                                                    \
            vi_store(out + i, result);                                                                       \
        }                                                                                                    \
    }
LANE_OPS(LANE)

#define SHIFT(op, count) LANE(op##_##count, EXACT, op(ia, count))
REPEAT_32(SHIFT, vi_shl)
REPEAT_32(SHIFT, vi_shr)
REPEAT_32(SHIFT, vi_sra)

/* Makes the mask by every op that makes one. */
static void lane_vm_any(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)c;
    memset(out, 0, (size_t)n * 4);
    for (int64_t i = 0; i < n; i += VL) {
        vi ia = vi_load(a + i), ib = vi_load(b + i);
        vf fa = v_from_bits(ia), fb = v_from_bits(ib);
        uint32_t *any = out + i / 16 * 16;
        any[0] |= vm_any(vi_eq(ia, ib)) != 0;
        any[1] |= vm_any(vi_gt(ia, ib)) != 0;
        any[2] |= vm_any(v_eq(fa, fb)) != 0;
        any[3] |= vm_any(v_gt(fa, fb)) != 0;
        any[4] |= vm_any(v_lt(fa, fb)) != 0;
    }
}

static void lane_vi_hmax(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)b, (void)c;
    memset(out, 0, (size_t)n * 4);
    for (int64_t i = 0; i < n; i += VL) {
        int32_t largest = vi_hmax(vi_load(a + i)), before = (int32_t)out[i / 16 * 16];
        if (i % 16 == 0 || largest > before) out[i / 16 * 16] = (uint32_t)largest;
    }
}

/* Rows of 16 are first brought to the width of a vector: the maxima of 16 rows at the start of each 256. */
static void lane_vi_hmax_rows(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)b, (void)c;
    memset(out, 0, (size_t)n * 4);
    for (int64_t i = 0; i < n; i += 256)
        for (int first = 0; first < 16; first += VL) {
            ALIGNED uint32_t rows[VL * VL];
            for (int k = 0; k < VL; k++) {
                const uint32_t *row = a + i + 16 * (first + k);
                vi m = vi_load(row);
                for (int j = VL; j < 16; j += VL) m = vi_max(m, vi_load(row + j));
                vi_store(rows + k * VL, m);
            }
            vi_store(out + i + first, vi_hmax_rows(rows));
        }
}

static void lane_vi_set(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)b, (void)c;
    for (int64_t i = 0; i < n; i += VL) vi_store(out + i, vi_set(a[i / 16 * 16]));
}

static void lane_v_set(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)b, (void)c;
    for (int64_t i = 0; i < n; i += VL) {
        float x;
        memcpy(&x, a + i / 16 * 16, 4);
        vi_store(out + i, v_bits(v_set(x)));
    }
}

static void lane_v_load_store(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)b, (void)c;
    for (int64_t i = 0; i < n; i += 16) {
        ALIGNED float x[16], y[16];
        memcpy(x, a + i, sizeof x);
        for (int j = 0; j < 16; j += VL) v_store(y + j, v_load(x + j));
        memcpy(out + i, y, sizeof y);
    }
}

/* Tables are 256 patterns of b; indices the low bits of a. */
static void lane_v_gather(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)c;
    for (int64_t i = 0; i < n; i += 256) {
        float table[256];
        memcpy(table, b + i, sizeof table);
        for (int64_t j = i; j < i + 256; j += VL)
            vi_store(out + j, v_bits(v_gather(table, vi_and(vi_load(a + j), vi_set(255)))));
    }
}

static void lane_v_lookup16(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n)
{
    (void)c;
    for (int64_t i = 0; i < n; i += 16) {
        float table[16];
        memcpy(table, b + i, sizeof table);
        for (int64_t j = i; j < i + 16; j += VL)
            vi_store(out + j, v_bits(v_lookup16(table, vi_and(vi_load(a + j), vi_set(15)))));
    }
}

static const struct vec_lane lane_table[] = {
#define ROW(op, kind, result) {#op, kind, lane_##op},
    LANE_OPS(ROW)
#define SHIFT_ROW(op, count) {#op " by " #count, EXACT, lane_##op##_##count},
        REPEAT_32(SHIFT_ROW, vi_shl) REPEAT_32(SHIFT_ROW, vi_shr)
            REPEAT_32(SHIFT_ROW, vi_sra){"vm_any", EXACT, lane_vm_any},
    {"vi_hmax", EXACT, lane_vi_hmax},
    {"vi_hmax_rows", EXACT, lane_vi_hmax_rows},
    {"v_gather", EXACT, lane_v_gather},
    {"v_lookup16", EXACT, lane_v_lookup16},
    {"vi_set", EXACT, lane_vi_set},
    {"v_set", FLOAT, lane_v_set},
    {"v_load, v_store", EXACT, lane_v_load_store},
    {NULL, EXACT, NULL},
};

/* X(op, bytes of an element) */
#define LOADS_OF_INTEGERS(X) X(vp_load_hi16, 2) X(vp_load_s16, 2) X(vp_load_s8, 1) X(vp_load_u8, 1) X(load_halves, 1)
#define LOADS_OF_FLOATS(X) X(vp_load_f32, 4) X(vp_load_f16, 2)
#define STORES_OF_INTEGERS(X) \
    X(vp_store_hi16, 2)       \
    X(vp_store_hi16_normal, 2) X(vp_store_16, 2) X(vp_store_8, 1) X(store_halves_s8, 1) X(store_halves_u8, 1)
#define STORES_OF_FLOATS(X) X(vp_store_f32, 4) X(vp_store_f16, 2)

#define LOAD(op, bytes, type, bits)                                \
    static void load_##op(const char *p, uint32_t *e, uint32_t *o) \
    {                                                              \
        for (int i = 0; i < 16; i += VL) {                         \
            type even, odd;                                        \
            op(p + 2 * i * bytes, &even, &odd);                    \
            vi_store(e + i, bits(even));                           \
            vi_store(o + i, bits(odd));                            \
        }                                                          \
    }
#define STORE(op, bytes, from_bits)                                                                                   \
    static void store_##op(char *p, const uint32_t *e, const uint32_t *o)                                             \
    {                                                                                                                 \
        for (int i = 0; i < 16; i += VL) op(p + 2 * i * bytes, from_bits(vi_load(e + i)), from_bits(vi_load(o + i))); \
    }
#define LOAD_INTEGERS(op, bytes) LOAD(op, bytes, vi, )
#define LOAD_FLOATS(op, bytes) LOAD(op, bytes, vf, v_bits)
#define STORE_INTEGERS(op, bytes) STORE(op, bytes, )
#define STORE_FLOATS(op, bytes) STORE(op, bytes, v_from_bits)
/* Halves as pairs: a lane's low half belongs to e, the high half to o. Stores take their halves from the high ones. */
V_OP void load_halves(const char *p, vi *e, vi *o)
{
    vi x = vh_load_u8(p);
    *e = vi_and(x, vi_set(0xffff));
    *o = vi_shr(x, 16);
}
V_OP void store_halves_s8(char *p, vi e, vi o) { vh_store_s8(p, vi_join16(vi_shr(e, 16), o)); }
V_OP void store_halves_u8(char *p, vi e, vi o) { vh_store_u8(p, vi_join16(vi_shr(e, 16), o)); }

LOADS_OF_INTEGERS(LOAD_INTEGERS)
LOADS_OF_FLOATS(LOAD_FLOATS)
STORES_OF_INTEGERS(STORE_INTEGERS)
STORES_OF_FLOATS(STORE_FLOATS)

/* These do not deal out pairs: e takes the first 16 elements, o the others. */
static void load_v_loadu(const char *p, uint32_t *e, uint32_t *o)
{
    for (int i = 0; i < 16; i += VL) {
        vi_store(e + i, v_bits(v_loadu(p + 4 * i)));
        vi_store(o + i, v_bits(v_loadu(p + 4 * (i + 16))));
    }
}
static void store_v_storeu(char *p, const uint32_t *e, const uint32_t *o)
{
    for (int i = 0; i < 16; i += VL) {
        v_storeu(p + 4 * i, v_from_bits(vi_load(e + i)));
        v_storeu(p + 4 * (i + 16), v_from_bits(vi_load(o + i)));
    }
}

#define IN_ORDER(size, bytes)                                                        \
    static void load_vi_load_##size(const char *p, uint32_t *e, uint32_t *o)         \
    {                                                                                \
        for (int i = 0; i < 16; i += VL) {                                           \
            vi_store(e + i, vi_load_##size(p + bytes * i));                          \
            vi_store(o + i, vi_load_##size(p + bytes * (i + 16)));                   \
        }                                                                            \
    }                                                                                \
    static void store_vi_store_##size(char *p, const uint32_t *e, const uint32_t *o) \
    {                                                                                \
        for (int i = 0; i < 16; i += VL) {                                           \
            vi_store_##size(p + bytes * i, vi_load(e + i));                          \
            vi_store_##size(p + bytes * (i + 16), vi_load(o + i));                   \
        }                                                                            \
    }
IN_ORDER(u8, 1)
IN_ORDER(u16, 2)

/* Two groups of 16 fields, in bytes 0 to 23 and 8 to 31. A store of the second overwrites part of the first. */
static void load_vi_load_u12(const char *p, uint32_t *e, uint32_t *o)
{
    for (int i = 0; i < 16; i += VL) {
        vi_store(e + i, vi_load_u12(p, 2 * i));
        vi_store(o + i, vi_load_u12(p + 8, 2 * i));
    }
}
static void store_vi_store_u12(char *p, const uint32_t *e, const uint32_t *o)
{
    for (int i = 0; i < 16; i += VL) vi_store_u12(p, 2 * i, vi_and(vi_load(e + i), vi_set(0xfff)));
    for (int i = 0; i < 16; i += VL) vi_store_u12(p + 8, 2 * i, vi_and(vi_load(o + i), vi_set(0xfff)));
}

static const struct vec_load load_table[] = {
#define LOAD_ROW(op, bytes) {#op, bytes, load_##op},
    LOADS_OF_INTEGERS(LOAD_ROW) LOADS_OF_FLOATS(LOAD_ROW) LOAD_ROW(v_loadu, 4) LOAD_ROW(vi_load_u8, 1)
        LOAD_ROW(vi_load_u16, 2) LOAD_ROW(vi_load_u12, 1){NULL, 0, NULL},
};

static const struct vec_store store_table[] = {
#define STORE_ROW(op, bytes) {#op, bytes, store_##op},
    STORES_OF_INTEGERS(STORE_ROW) STORES_OF_FLOATS(STORE_ROW) STORE_ROW(v_storeu, 4) STORE_ROW(vi_store_u8, 1)
        STORE_ROW(vi_store_u16, 2) STORE_ROW(vi_store_u12, 1){NULL, 0, NULL},
};

#define SUM(op, add)                                                                        \
    static void sum_##op(const uint32_t *x, const uint32_t *y, int64_t groups, double *out) \
    {                                                                                       \
        va sum = va_zero();                                                                 \
        (void)y;                                                                            \
        for (int64_t g = 0; g < groups; g++)                                                \
            for (int part = 0; part < 16 / VL; part++)                                      \
                for (int odd = 0; odd < 2; odd++) {                                         \
                    int64_t i = 32 * g + 16 * odd + part * VL;                              \
                    add;                                                                    \
                }                                                                           \
        va_store(sum, out);                                                                 \
    }
SUM(va_add, va_add(&sum, part, v_from_bits(vi_load(x + i))))
SUM(va_add_product, va_add_product(&sum, part, v_from_bits(vi_load(x + i)), v_from_bits(vi_load(y + i))))

static const struct vec_sum sum_table[] = {
    {"va_add", sum_va_add},
    {"va_add_product", sum_va_add_product},
    {NULL, NULL},
};

#define PASTE_NOW(a, b) a##b
#define PASTE(a, b) PASTE_NOW(a, b)
extern const struct vec_unit PASTE(vec_unit_, HSTEP_ISA);
const struct vec_unit PASTE(vec_unit_, HSTEP_ISA) = {
    HSTEP_VEC_NAME, VL, lane_table, load_table, store_table, sum_table,
};
