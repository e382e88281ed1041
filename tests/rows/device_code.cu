/* For tests/cuda/device_code_test.sh: compiles every rule, every format, random words, exact sums and prepare
 * functions as device code. The scalar vocabulary stands in for a device's own. Nothing is run. */
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Declarations that a device's own headers would bring. */
#define DEVICE __attribute__((device))
DEVICE double sqrt(double x);
DEVICE float sqrtf(float x);
DEVICE long lrintf(float x);
DEVICE void *memcpy(void *to, const void *from, size_t n);

#pragma clang force_cuda_host_device begin
#include "vec/scalar.h"
#pragma clang force_cuda_host_device end

#define HSTEP_INLINE static inline __attribute__((host, device, unused))
#undef V_OP
#define V_OP static inline __attribute__((host, device, unused))
#undef V_TABLE
#define V_TABLE static __attribute__((device)) const

#include "base/exact.h"
#include "base/grid.h"
#include "kernels/pair.h"

#include "rules/rules.h"

#define KERNEL __attribute__((global))
#define RULE(id, name)                                                                      \
    KERNEL void prepare_##name(float *k, struct hstep_prepare *p) { name##_prepare(k, p); } \
    KERNEL void rule_##name(const vf *k, vf w, vf g, vf *s, vf *d)                          \
    {                                                                                       \
        for (int mode = 0; mode < RULE_MODES; mode++) *d = name##_rule(k, w, g, s, mode);   \
    }
#include "rules/rules.def"
#undef RULE

#define ELEMENT_KERNEL(fn)                                                   \
    KERNEL void format_##fn(char *code, char *extra, vf *e, vf *o, vi words) \
    {                                                                        \
        load_any(HSTEP_FORMAT_##fn, 0, code, extra, 0, e, o);                \
        store_any(HSTEP_FORMAT_##fn, code, extra, 0, *e, *o, words, 1);      \
        apply_any(HSTEP_FORMAT_##fn, code, extra, 0, *e, *o, *e, *o, words); \
    }
#define BLOCK_KERNEL(fn)                                                               \
    KERNEL void format_##fn(char *code, char *extra, vf *e, vf *o, vi words, float *x) \
    {                                                                                  \
        load_any(HSTEP_FORMAT_##fn, 1, code, extra, 0, e, o);                          \
        x[0] = stash_any(HSTEP_FORMAT_##fn, *e, 1);                                    \
        x[1] = stash_any(HSTEP_FORMAT_##fn, *o, 0);                                    \
        encode_codes(HSTEP_FORMAT_##fn, 1, x, x + 2, code, 0, words);                  \
    }
#define PACKED_KERNEL(fn)                                                                  \
    KERNEL void format_##fn(char *code, char *extra, vf *e, vf *o, vi *x, vi words)        \
    {                                                                                      \
        load_any(HSTEP_FORMAT_##fn, 0, code, extra, 0, e, o);                              \
        load_positions(HSTEP_FORMAT_##fn, code, extra, 0, &x[0], &x[1]);                   \
        x[0] = hstep_packed_moved(x[0], *e, *o);                                           \
        x[1] = hstep_packed_placed(*o, hstep_packed_scale(x[1]), *e);                      \
        store_positions(HSTEP_FORMAT_##fn, code, extra, 0, hstep_packed_even(x[0], words), \
                        hstep_packed_odd(x[1], words));                                    \
    }
#define FORMAT(id, fn) \
    IF_ELEMENT(fn, ELEMENT_KERNEL(fn)) IF_PACKED(fn, PACKED_KERNEL(fn)) IF_BLOCK(fn, BLOCK_KERNEL(fn))
#include "formats/formats.def"
#undef FORMAT

KERNEL void words(uint32_t *out, struct hstep_key *key)
{
    hstep_random_words(HSTEP_GENERATOR_LATTICE, key, 0, 64, out);
}
KERNEL void sums(int64_t *limbs, double *x)
{
    hstep_exact_add(limbs, *x);
    *x = hstep_exact_round(limbs);
}
