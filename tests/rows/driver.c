/* For tests/house/new_rows_test.sh: tests the formats named on the command line, in the library it is linked with.
 * Written values must be read back within the bound of linear codes. Steps must leave the same bytes on every
 * instruction set. Every scale must have one byte. Prints a line for each format; returns 0 if all hold. */
#define HALFSTEP_ADVANCED
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"

enum { ROWS = 3, COLUMNS = 515, N = ROWS * COLUMNS, STEPS = 20, BYTES = 1 << 16 };

static float value_of(uint32_t i)
{
    return (float)((double)(i * 2654435761u) / 0x1p32 - 0.5) * (i % 7 ? 2.0f : 2000.0f);
}

static int must(int result, const char *what)
{
    if (result != HALFSTEP_OK) printf("%s: %s\n", what, halfstep_strerror(result));
    return result == HALFSTEP_OK;
}
#define MUST(call)                        \
    do {                                  \
        if (!must(call, #call)) return 0; \
    } while (0)

static int run(const char *format, const char *isa, unsigned char *bytes, size_t *n)
{
    halfstep_optimizer *o;
    int32_t group, tensor;
    char recipe[64];
    static float weight[N], gradient[N], state[N];
    halfstep_tensor d = {
        .struct_size = sizeof d, .name = "w", .ndim = 2, .rows = ROWS, .row_length = COLUMNS, .gradient = "f32"};
    snprintf(recipe, sizeof recipe, "adamw/f32/%s", format);
    MUST(halfstep_set_isa(isa));
    MUST(halfstep_create(NULL, &o));
    MUST(halfstep_add_group(o, recipe, &group));
    MUST(halfstep_add_tensor(o, &d, &tensor));
    MUST(halfstep_allocate_states(o));
    for (int slot = 2; slot < 4; slot++) {
        halfstep_slot_info info = {.struct_size = sizeof info};
        MUST(halfstep_get_slot_info(o, 0, slot, &info));
        float largest = 0;
        for (uint32_t i = 0; i < N; i++) {
            state[i] = slot == 2 ? value_of(i) : fabsf(value_of(i));
            largest = fmaxf(largest, fabsf(state[i]));
        }
        MUST(halfstep_write_slot(o, 0, slot, NULL, 0, ROWS, state));
        static float back[N];
        MUST(halfstep_read_slot(o, 0, slot, NULL, 0, ROWS, back));
        for (int i = 0; i < N; i++)
            if (!(fabsf(back[i] - state[i]) <= largest / 60)) {
                printf("%s on %s: element %d of slot %d: %g came back as %g\n", format, isa, i, slot, (double)state[i],
                       (double)back[i]);
                return 0;
            }
        if (info.fell_back || info.extra_bytes != (uint64_t)info.blocks_per_row * ROWS) {
            printf("%s: %d bytes of scales for %d blocks\n", format, (int)info.extra_bytes,
                   (int)info.blocks_per_row * ROWS);
            return 0;
        }
    }
    for (uint32_t step = 0; step < STEPS; step++) {
        void *weights[1] = {weight};
        const void *gradients[1] = {gradient};
        for (uint32_t i = 0; i < N; i++) gradient[i] = value_of(i + step * 977);
        MUST(halfstep_step(o, weights, gradients));
    }
    *n = 0;
    for (int slot = 2; slot < 4; slot++) {
        halfstep_slot_info info = {.struct_size = sizeof info};
        MUST(halfstep_get_slot_info(o, 0, slot, &info));
        memcpy(bytes + *n, info.code, (size_t)info.code_bytes);
        memcpy(bytes + *n + info.code_bytes, info.extra, (size_t)info.extra_bytes);
        *n += (size_t)(info.code_bytes + info.extra_bytes);
    }
    memcpy(bytes + *n, weight, sizeof weight);
    *n += sizeof weight;
    memset(weight, 0, sizeof weight);
    halfstep_destroy(o);
    return 1;
}

int main(int argc, char **argv)
{
    static unsigned char bytes[2][BYTES];
    int failed = argc < 2;
    for (int f = 1; f < argc; f++) {
        size_t n[2] = {0};
        int isas = 0, good = 1;
        for (int i = 0; i < halfstep_isa_count() && good; i++) {
            if (!halfstep_isa_available(i)) continue;
            good = run(argv[f], halfstep_isa_name(i), bytes[isas > 0], &n[isas > 0]);
            if (good && isas && (n[0] != n[1] || memcmp(bytes[0], bytes[1], n[0]))) {
                printf("%s: other bytes on %s\n", argv[f], halfstep_isa_name(i));
                good = 0;
            }
            isas++;
        }
        printf("%s %s, on %d instruction sets\n", good ? "ok  " : "FAIL", argv[f], isas);
        failed |= !good;
    }
    return failed;
}
