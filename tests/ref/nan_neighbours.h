/* Steps a tensor with a NaN among its weights and one among its gradients, for tests that no bit of a NaN reaches
 * another element of its block. */
#ifndef HALFSTEP_TEST_NAN_NEIGHBOURS_H
#define HALFSTEP_TEST_NAN_NEIGHBOURS_H

#include "decide/prepare.h"
#include "ref/fixture.h"

enum {
    NAN_ROWS = 2,
    NAN_COLUMNS = 512,
    NAN_ALL = NAN_ROWS * NAN_COLUMNS,
    NAN_WEIGHT = 37,     /* the element whose weight is a NaN */
    NAN_GRADIENT = 717,  /* the element whose gradient is one */
    NAN_SCALES = NAN_ALL /* room for a state's scales */
};

/* All that the other elements hold after some steps. */
struct neighbours {
    float weight[NAN_ALL], state[2][NAN_ALL];
    char scales[2][NAN_SCALES];
};

static inline void leave_out(float *values) { values[NAN_WEIGHT] = values[NAN_GRADIENT] = 0.0f; }

/* Steps adam with l2 decay and states in `format`. */
static inline void step_neighbours(const char *format, uint32_t weight, uint32_t gradient, int fused,
                                   struct neighbours *found)
{
    char recipe[64];
    struct one t;
    struct source s = {7};
    snprintf(recipe, sizeof recipe, "adam/f32/%s", format);
    memset(found, 0, sizeof *found);
    one_open(&t, recipe, 2, NAN_ROWS, NAN_COLUMNS, "f32");
    one_hyper(&t, "weight_decay", 0.1);
    MUST(halfstep_set_choice(t.o, HALFSTEP_ALL_GROUPS, "scan", "known-finite"));
    one_start(&t);
    float *w = t.weight, *g = t.gradient;
    for (int i = 0; i < NAN_ALL; i++) w[i] = (float)next_normal(&s);
    hstep_use_fused = fused;
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < NAN_ALL; i++) g[i] = (float)next_normal(&s) * 0.01f;
        memcpy(&w[NAN_WEIGHT], &weight, 4);
        memcpy(&g[NAN_GRADIENT], &gradient, 4);
        MUST(one_step(&t));
    }
    hstep_use_fused = 1;
    memcpy(found->weight, w, sizeof found->weight);
    leave_out(found->weight);
    for (int j = 0; j < 2; j++) {
        const halfstep_slot_info info = slot_info(t.o, 0, HALFSTEP_SLOT_STATE + j);
        one_read(&t, HALFSTEP_SLOT_STATE + j, found->state[j]);
        leave_out(found->state[j]);
        if (info.extra_bytes) memcpy(found->scales[j], info.extra, (size_t)info.extra_bytes);
    }
    one_close(&t);
}

/* Checks that elements have the same bits beside NaNs of any pattern, and numbers. Compares them with *other as well,
 * what another machine has. `first` fills *other. */
static inline void check_neighbours(const char *format, int fused, const char *where, int first,
                                    struct neighbours *other)
{
    static const uint32_t patterns[] = {0x7fc00000, 0x7fffffff, 0x7f800001, 0xffc00000,
                                        0xffffffff, 0xff800001, 0x7fff0001, 0x7fbfffff};
    struct neighbours now;
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        for (size_t j = 0; j < sizeof patterns / sizeof *patterns; j++) {
            if (i && j && i != j) continue;
            step_neighbours(format, patterns[i], patterns[j], fused, &now);
            if (first && !i && !j) *other = now;
            CHECK(!memcmp(&now, other, sizeof now), "%s, %s: NaNs %08x and %08x change other elements", where, format,
                  patterns[i], patterns[j]);
        }
    int bad = 0;
    for (int i = 0; i < NAN_ALL; i++)
        bad += !isfinite(now.weight[i]) || !isfinite(now.state[0][i]) || !isfinite(now.state[1][i]);
    CHECK(!bad, "%s, %s: %d elements beside NaNs are not finite", where, format, bad);
}

#endif
