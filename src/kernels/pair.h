/* The functions that one pair of vectors goes through, even elements and odd ones. They have no loops and touch no
 * memory but the planes passed to them. For kernels.c, and for other code that compiles rules and formats, after its
 * vocabulary (vec/README.md). */
#ifndef HSTEP_PAIR_H
#define HSTEP_PAIR_H

#include "formats/formats.h"
#include "kernels/kernels.h"

#define PAIR (2 * VL)
#define PAIRS (16 / VL) /* pairs in a cell of 32 */

/* The functions below switch on constants. Every caller is inlined with a constant format or rule, so only one case is
 * left. */

/* Constants of a format's row (formats.h). block: elements that share a scale, or 0 for element formats. extra_bits:
 * bits of an element's second plane. steps: of a packed format, else 0. */
struct columns {
    int bits, extra_bits, block, scale, stochastic, root, steps;
};

V_OP struct columns columns_of(const int format)
{
    switch (format) {
#define FORMAT(id, fn)                                            \
    FORMAT_CASE(fn)                                               \
    return (struct columns){.bits = fn##_code_bits,               \
                            .extra_bits = fn##_extra_bits,        \
                            .block = fn##_steps ? 0 : fn##_block, \
                            .scale = fn##_scale_dtype,            \
                            .stochastic = fn##_stochastic,        \
                            .root = fn##_root,                    \
                            .steps = fn##_steps};
#include "formats/formats.def"
#undef FORMAT
    default: return (struct columns){0};
    }
}

V_OP int is_block(const int format) { return columns_of(format).block != 0; }

/* Return how far element t lies from the start of the main plane, and of a second plane of residuals or error codes.
 * t is a multiple of 32. */
V_OP int64_t code_place(const struct columns c, int64_t t)
{
    return c.steps ? t / HSTEP_PACKED_BLOCK * HSTEP_PACKED_BYTES : t * c.bits / 8;
}
V_OP int64_t extra_place(const struct columns c, int64_t t) { return t * c.extra_bits / 8; }

/* 1 if a state lies on a grid that decays with it. */
V_OP int has_grid(const int format, const int nonneg) { return nonneg && columns_of(format).root != 0; }

/* A format that decodes or encodes a pair at once defines NAME_DECODE or NAME_ENCODE as HSTEP_PAIR(PAIRED). Others take
 * one vector after the other. */
#define HSTEP_PAIR(way) , way
#define PAIR_WAY(what, marked) PAIR_PICK(what, marked, SINGLY, )
#define PAIR_PICK(what, ...) PAIR_SECOND(what, __VA_ARGS__)
#define PAIR_SECOND(what, a, b, ...) what##_##b
#define DECODE_PAIRED(fn) fn##_decode_pair(code, i, scale, e, o, nonneg)
#define DECODE_SINGLY(fn)                     \
    do {                                      \
        vi ce, co;                            \
        fn##_load(code, i, &ce, &co, nonneg); \
        *e = fn##_value(ce, scale, nonneg);   \
        *o = fn##_value(co, scale, nonneg);   \
    } while (0)
#define ENCODE_PAIRED(fn) fn##_encode_pair(code, i, v_load(stash + i), v_load(stash + i + VL), inverse, words, nonneg)
#define ENCODE_SINGLY(fn)                                                                             \
    fn##_store(code, i, fn##_code(v_load(stash + i), inverse, vi_and(words, vi_set(0xffff)), nonneg), \
               fn##_code(v_load(stash + i + VL), inverse, vi_shr(words, 16), nonneg))

/* Loads elements i .. i + PAIR - 1 of a block format, which share a scale. */
V_OP void load_scaled(const int format, const int nonneg, const char *code, vf scale, int64_t i, vf *e, vf *o)
{
    switch (format) {
#define FORMAT(id, fn) IF_BLOCK(fn, FORMAT_CASE(fn) PAIR_WAY(DECODE, fn##_DECODE)(fn); break;)
#include "formats/formats.def"
#undef FORMAT
    default: *e = *o = v_set(0.0f);
    }
}

/* Load and store the positions of a packed format: a pair from element i on, whose block begins at `block`. */
V_OP void load_positions(const int format, const char *block, const char *extra, int64_t i, vi *e, vi *o)
{
    const char *codes = block + HSTEP_PACKED_SCALE + i % HSTEP_PACKED_BLOCK;
    switch (format) {
#define FORMAT(id, fn) IF_PACKED(fn, FORMAT_CASE(fn) fn##_load(codes, extra + i * fn##_extra_bits / 8, e, o); break;)
#include "formats/formats.def"
#undef FORMAT
    default: *e = *o = vi_set(0);
    }
}

V_OP void store_positions(const int format, char *block, char *extra, int64_t i, vi e, vi o)
{
    char *codes = block + HSTEP_PACKED_SCALE + i % HSTEP_PACKED_BLOCK;
    switch (format) {
#define FORMAT(id, fn) IF_PACKED(fn, FORMAT_CASE(fn) fn##_store(codes, extra + i * fn##_extra_bits / 8, e, o); break;)
#include "formats/formats.def"
#undef FORMAT
    default: break;
    }
}

V_OP void load_any(const int format, const int nonneg, const char *code, const char *extra, int64_t i, vf *e, vf *o)
{
    const struct columns c = columns_of(format);
    if (c.block) {
        load_scaled(format, nonneg, code, v_from_bits(vi_set(hstep_scale_load(c.scale, extra, i / c.block))), i, e, o);
        return;
    }
    if (c.steps) {
        const char *block = hstep_packed_block(code, i);
        const vf unit = hstep_packed_unit(v_from_bits(vi_set(hstep_scale_load(c.scale, block, 0))), c.steps);
        vi pe, po;
        load_positions(format, block, extra, i, &pe, &po);
        *e = hstep_packed_value(pe, unit);
        *o = hstep_packed_value(po, unit);
        return;
    }
    switch (format) {
#define FORMAT(id, fn) IF_ELEMENT(fn, FORMAT_CASE(fn) fn##_decode(code, extra, i, e, o); break;)
#include "formats/formats.def"
#undef FORMAT
    default: *e = *o = v_set(0.0f);
    }
}

V_OP void store_any(const int format, char *code, char *extra, int64_t i, vf e, vf o, vi words, const int state)
{
    switch (format) {
#define FORMAT(id, fn) IF_ELEMENT(fn, FORMAT_CASE(fn) fn##_encode(code, extra, i, e, o, words, state); break;)
#include "formats/formats.def"
#undef FORMAT
    default: break;
    }
}

V_OP void apply_any(const int format, char *code, char *extra, int64_t i, vf we, vf wo, vf de, vf d_o, vi words)
{
    /* Subtracting -0 would turn a weight of -0 into +0, but a change of zero must change nothing. */
    de = v_add(de, v_set(0.0f));
    d_o = v_add(d_o, v_set(0.0f));
    switch (format) {
#define FORMAT(id, fn) IF_ELEMENT(fn, FORMAT_CASE(fn) fn##_apply(code, extra, i, we, wo, de, d_o, words); break;)
#include "formats/formats.def"
#undef FORMAT
    default: break;
    }
}

V_OP vf stash_any(const int format, vf x, const int nonneg)
{
    switch (format) {
#define FORMAT(id, fn) IF_BLOCK(fn, FORMAT_CASE(fn) return fn##_stash(x, nonneg);)
#include "formats/formats.def"
#undef FORMAT
    default: return x;
    }
}

/* Puts the stashed value of a second moment on its grid. The bound keeps the largest code of a block, which may be
 * rounded up, decodable to a finite number. */
V_OP vf onto_grid(const int root, vf stashed, vf factor)
{
    return v_min(v_mul(stashed, factor), v_set(root == 2 ? 0x1.6a09e6p63f : 0x1p127f));
}

/* Returns the magnitude that a block's maximum is taken over: the stashed value of a second moment on a grid, otherwise
 * that of the value itself. A NaN may have either sign, but onto_grid() leaves none. */
V_OP vi magnitude_of(vf x, vf stashed, const int gridded) { return v_bits(gridded ? stashed : v_abs(x)); }

/* Returns the maximum of blocks from the patterns of their largest magnitudes. A NaN or an infinity counts as the
 * largest finite number. No scale then depends on the bits of a NaN, which differ between machines, and neighbours
 * stay finite. */
V_OP vf block_maximum_of(vi largest) { return v_from_bits(vi_min(largest, vi_set(0x7f7fffff))); }

/* Encodes the stashed elements i .. i + PAIR - 1. */
V_OP void encode_codes(const int format, const int nonneg, const float *stash, const float *inverses, char *code,
                       int64_t i, vi words)
{
    vf inverse;
    switch (format) {
#define FORMAT(id, fn) \
    IF_BLOCK(fn, FORMAT_CASE(fn) inverse = v_set(inverses[i / fn##_block]); PAIR_WAY(ENCODE, fn##_ENCODE)(fn); break;)
#include "formats/formats.def"
#undef FORMAT
    default: break;
    }
}

/* ---- The gradient that a rule takes ---- */

struct gradient_terms {
    vf scale, mean, l2;
    int centered, decayed; /* 0: the mean or l2 is 0 and left out, because adding it could turn -0 into +0 */
};

V_OP struct gradient_terms gradient_terms(float scale, float mean, float l2)
{
    return (struct gradient_terms){v_set(scale), v_set(mean), v_set(l2), mean != 0.0f, l2 != 0.0f};
}

/* Returns the raw gradient times its scale, less the mean of its row, plus l2 times the weight. The order of the three
 * is part of the promise of bits. */
V_OP vf effective_gradient(struct gradient_terms terms, vf raw, vf w)
{
    vf g = v_mul(raw, terms.scale);
    if (terms.centered) g = v_sub(g, terms.mean);
    if (terms.decayed) g = v_add(g, v_mul(terms.l2, w));
    return g;
}

/* ---- Cautious updates (Liang et al. 2024, algorithm 1) ---- */

/* True where the update and the gradient have the same sign and neither is 0. Uses the sign of the update because the
 * product of the two might underflow. */
V_OP vm agrees(vf update, vf g) { return v_gt(v_mul(v_sign(update), g), v_set(0.0f)); }

/* Returns the update times `scale` where it agrees with the gradient, else 0, plus decay * w. */
V_OP vf cautious_change(vf update, vf g, vf w, vf scale, vf decay)
{
    return v_add(v_select(agrees(update, g), v_mul(update, scale), v_set(0.0f)), v_mul(decay, w));
}

/* Returns the update plus decay * w. Leaves decay out where the update alone moves the weight away from 0 (Chen et al.
 * 2025). */
V_OP vf decay_change(vf update, vf w, vf decay)
{
    const vm away = v_gt(v_set(0.0f), v_mul(v_sign(update), w));
    return v_add(update, v_select(away, v_set(0.0f), v_mul(decay, w)));
}

/* ---- Random words ---- */

/* mixer_start() and mixer_next() compute hstep_mixer_word() on VL consecutive words. Each call of mixer_next() advances
 * `x` by VL words. */
V_OP vi mixer_start(const struct hstep_key *key, uint64_t pair)
{
    uint32_t first = (uint32_t)pair & (HSTEP_SEGMENT_WORDS - 1);
    return vi_add(vi_set(key->k[0]), vi_mul(vi_add(vi_set(first), vi_iota()), vi_set(HSTEP_MIXER_STEP)));
}

V_OP vi mixer_next(vi *x, vi k1)
{
    vi y = *x;
    *x = vi_add(y, vi_set(HSTEP_MIXER_STEP * VL));
    y = vi_xor(y, vi_shr(y, 16));
    y = vi_mul(y, vi_set(HSTEP_MIXER_MUL1));
    y = vi_xor(y, vi_xor(vi_shr(y, 15), k1));
    y = vi_mul(y, vi_set(HSTEP_MIXER_MUL2));
    return vi_xor(y, vi_shr(y, 16));
}

/* Computes hstep_lattice_word() on VL mixer words. */
V_OP vi lattice_of(vi h, vi factor, vi offset) { return vi_add16(vi_mul16(h, factor), offset); }

#endif
