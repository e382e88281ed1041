/* Normal numbers for a tensor, and an image of all that it stores. */
#ifndef HALFSTEP_TESTS_IMAGES_H
#define HALFSTEP_TESTS_IMAGES_H

#include "ref/fixture.h"

/* Returns normal numbers for step k, element i, from a long table that is read at another place at each step. */
enum { TABLE = 1 << 20 };
static inline float normal(int64_t k, int64_t i)
{
    static float *table;
    if (!table) {
        struct source s = {41};
        table = zeroed(TABLE * sizeof *table);
        for (int j = 0; j < TABLE; j++) table[j] = (float)next_normal(&s);
    }
    return table[(k * 104729 + i) & (TABLE - 1)];
}

static inline void set_gradient(struct one *t, int step, double scale)
{
    for (int64_t i = 0; i < t->n; i++) t->room[i] = (float)(scale * (double)normal(step, i));
    one_write(t, GRADIENT, t->room);
}

static inline void set_weights(struct one *t, double scale)
{
    for (int64_t i = 0; i < t->n; i++) t->room[i] = (float)(scale * (double)normal(7919, i));
    one_write(t, WEIGHT, t->room);
}

/* ---- All that a tensor stores ------------------------------------------------------------------------------------ */

struct image {
    unsigned char *bytes;
    size_t size;
    int slots;
};
enum { WEIGHT_ONLY = 1, WHOLE = STATE + HALFSTEP_MAX_STATES };

/* Copies every plane of the first `slots` slots except the gradient's: weights (whose codes the caller has),
 * residuals, states, scales. */
static inline struct image take(halfstep_optimizer *o, int32_t tensor, void *weight, int slots)
{
    struct image image = {zeroed(1 << 20), 0, slots};
    for (int slot = 0; slot < slots; slot++) {
        SIZED(halfstep_slot_info, info);
        if (!stored_slot(o, tensor, slot, &info)) continue;
        if (image.size + info.code_bytes + info.extra_bytes > 1 << 20) exit(1);
        memcpy(image.bytes + image.size, slot ? info.code : weight, (size_t)info.code_bytes);
        image.size += (size_t)info.code_bytes;
        if (info.extra_bytes) memcpy(image.bytes + image.size, info.extra, (size_t)info.extra_bytes);
        image.size += (size_t)info.extra_bytes;
    }
    return image;
}

/* Compares with an image and frees it. Returns 1 if all bits are the same. */
static inline int still(halfstep_optimizer *o, int32_t tensor, void *weight, struct image before)
{
    struct image now = take(o, tensor, weight, before.slots);
    int same = before.size == now.size && !memcmp(before.bytes, now.bytes, now.size);
    free(before.bytes);
    free(now.bytes);
    return same;
}

#endif
