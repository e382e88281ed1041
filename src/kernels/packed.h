/* Loops over packed weights (formats/packed.h), block by block. For kernels.c. */
#ifndef HSTEP_KERNELS_PACKED_H
#define HSTEP_KERNELS_PACKED_H

#include "kernels/pair.h"

/* A block of 32 positions as pairs, even and odd. */
struct positions {
    vi x[2 * PAIRS];
};

V_OP struct positions load_block(const int format, const char *block, const char *extra)
{
    struct positions p;
    for (int j = 0; j < PAIRS; j++) load_positions(format, block, extra, j * PAIR, &p.x[2 * j], &p.x[2 * j + 1]);
    return p;
}

/* Rounds 2^16 times the positions of a block and stores them. */
V_OP void store_block(const int format, char *block, char *extra, const struct positions *placed, const vi *words)
{
    for (int j = 0; j < PAIRS; j++)
        store_positions(format, block, extra, j * PAIR, hstep_packed_even(placed->x[2 * j], words[j]),
                        hstep_packed_odd(placed->x[2 * j + 1], words[j]));
}

V_OP vi largest_of(const vi *x)
{
    vi largest = x[0];
    for (int j = 1; j < 2 * PAIRS; j++) largest = vi_max(largest, x[j]);
    return largest;
}

/* Stores a block on a new scale. */
V_OP void replace_block(const int format, char *block, char *extra, const vf *weights, const vi *words)
{
    const int steps = columns_of(format).steps;
    HSTEP_ALIGNED uint32_t pattern[VL];
    vi magnitudes[2 * PAIRS];
    struct positions placed;
    for (int j = 0; j < 2 * PAIRS; j++) magnitudes[j] = v_bits(v_abs(weights[j]));
    const vi scale = hstep_packed_scale(vi_set((uint32_t)vi_hmax(largest_of(magnitudes))));
    const vf factor = hstep_packed_factor(v_from_bits(scale), steps);
    for (int j = 0; j < 2 * PAIRS; j++) placed.x[j] = hstep_packed_placed(weights[j], scale, factor);
    vi_store(pattern, scale);
    hstep_scale_store(columns_of(format).scale, block, 0, pattern[0]);
    store_block(format, block, extra, &placed, words);
}

/* Subtracts the changes from a block's weights. unit, factor: those of its scale. */
V_OP void change_block(const int format, char *block, char *extra, const struct positions *p, vf unit, vf factor,
                       const vf *changes, const vi *words)
{
    const int steps = columns_of(format).steps;
    struct positions moved;
    vi magnitudes[2 * PAIRS];
    for (int j = 0; j < 2 * PAIRS; j++) {
        moved.x[j] = hstep_packed_moved(p->x[j], changes[j], factor);
        magnitudes[j] = hstep_packed_magnitude(moved.x[j]);
    }
    const vi largest = largest_of(magnitudes);
    if (__builtin_expect(vm_any(hstep_packed_reaches(largest, steps)) & !vm_any(hstep_packed_exceeds(largest, steps)),
                         1)) {
        store_block(format, block, extra, &moved, words);
        return;
    }
    vf weights[2 * PAIRS];
    for (int j = 0; j < 2 * PAIRS; j++) weights[j] = v_sub(hstep_packed_value(p->x[j], unit), changes[j]);
    replace_block(format, block, extra, weights, words);
}

/* The units and factors of up to 16 blocks. */
struct packed_scales {
    HSTEP_ALIGNED float unit[16], factor[16];
};

V_OP struct packed_scales packed_scales_of(const int format, const char *code, int64_t n)
{
    const struct columns c = columns_of(format);
    struct packed_scales s;
    HSTEP_ALIGNED uint32_t patterns[16] = {0};
    for (int64_t b = 0; b * HSTEP_PACKED_BLOCK < n; b++)
        patterns[b] = hstep_scale_load(c.scale, code + b * HSTEP_PACKED_BYTES, 0);
    for (int b = 0; b < 16; b += VL) {
        const vf scale = v_from_bits(vi_load(patterns + b));
        v_store(s.unit + b, hstep_packed_unit(scale, c.steps));
        v_store(s.factor + b, hstep_packed_factor(scale, c.steps));
    }
    return s;
}

/* Changes a packed weight. Its stored positions are more than the decoded weight tells. */
V_OP void packed_apply(const int format, const float *d, char *code, char *extra, const uint32_t *words, int64_t n)
{
    const struct columns c = columns_of(format);
    const struct packed_scales scales = packed_scales_of(format, code, n);
    for (int64_t b = 0; b < n; b += HSTEP_PACKED_BLOCK) {
        char *block = code + code_place(c, b), *errors = extra + extra_place(c, b);
        const struct positions p = load_block(format, block, errors);
        vf changes[2 * PAIRS];
        vi drawn[PAIRS];
        for (int j = 0; j < 2 * PAIRS; j++) changes[j] = v_load(d + b + j * VL);
        for (int j = 0; j < PAIRS; j++) drawn[j] = vi_load(words + (b + j * PAIR) / 2);
        change_block(format, block, errors, &p, v_set(scales.unit[b / HSTEP_PACKED_BLOCK]),
                     v_set(scales.factor[b / HSTEP_PACKED_BLOCK]), changes, drawn);
    }
}

#endif
