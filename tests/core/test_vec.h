/* The functions of test_vec_unit.c, once per instruction set: every op of src/vec/README.md on plain arrays. All use
 * one order of elements, so that units with different numbers of lanes can be compared. Arrays are 64-byte aligned
 * patterns. */
#ifndef HALFSTEP_TEST_VEC_H
#define HALFSTEP_TEST_VEC_H

#include <stdint.h>

/* How two results compare. EXACT: bit by bit. FLOAT: all NaNs are equal. SMALL: bit by bit where |a| < 2^31. */
enum vec_kind { EXACT, FLOAT, SMALL };

/* n is a multiple of 256. Ops across lanes leave one result per 16 inputs, and zeros. */
struct vec_lane {
    const char *name;
    enum vec_kind kind;
    void (*run)(const uint32_t *a, const uint32_t *b, const uint32_t *c, uint32_t *out, int64_t n);
};
/* Loads or stores a group of 32 elements of the given size at any address; e and o hold 16 each. */
struct vec_load {
    const char *name;
    int bytes;
    void (*run)(const char *p, uint32_t *e, uint32_t *o);
};
struct vec_store {
    const char *name;
    int bytes;
    void (*run)(char *p, const uint32_t *e, const uint32_t *o);
};
/* Sums groups of 32: 16 even elements, then 16 odd ones. */
struct vec_sum {
    const char *name;
    void (*run)(const uint32_t *x, const uint32_t *y, int64_t groups, double *out);
};

/* Tables end with a NULL name. */
struct vec_unit {
    const char *name;
    int lanes;
    const struct vec_lane *lane;
    const struct vec_load *load;
    const struct vec_store *store;
    const struct vec_sum *sum;
};

#endif
