/* One optimizer with one tensor, its buffers and values, for tests of the arithmetic. If the library itself fails, the
 * program ends, because later results would mean nothing. */
#ifndef HALFSTEP_TEST_FIXTURE_H
#define HALFSTEP_TEST_FIXTURE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "halfstep.h"
#include "test.h"

#define MUST(call) must((call), #call, __FILE__, __LINE__)
static inline void must(int result, const char *call, const char *file, int line)
{
    if (result == OK) return;
    printf("FAIL %s:%d: %s: %s\n", file, line, call, halfstep_strerror(result));
    exit(1);
}

/* Checks that a call returns `code`. The program goes on either way. */
#define EXPECT(call, code) expect((call), (code), #call, __LINE__)
static inline void expect(int result, int code, const char *call, int line)
{
    CHECK(result == code, "line %d: %s is %d (%s), expected %d (%s)", line, call, result, halfstep_strerror(result),
          code, halfstep_strerror(code));
}

/* Checks that the error text contains `word`. */
#define NAMES(o, word) \
    CHECK(strstr(halfstep_error_detail(o), word), "the detail '%s' lacks '%s'", halfstep_error_detail(o), word)

/* Checks that a call returns `code` and that the error text contains `word`. */
#define EXPECT_NAMED(o, call, code, word) \
    do {                                  \
        EXPECT(call, code);               \
        NAMES(o, word);                   \
    } while (0)

static inline void *zeroed(size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) exit(1);
    return memory;
}

/* Returns a text made as printf() makes it, valid for the next few calls. */
__attribute__((format(printf, 1, 2))) static inline const char *text_of(const char *format, ...)
{
    static char texts[16][192];
    static unsigned turn;
    char *text = texts[turn++ % 16];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof texts[0], format, arguments);
    va_end(arguments);
    return text;
}

/* ---- Random values ----------------------------------------------------------------------------------------------- */

struct source {
    uint64_t state;
};

static inline uint64_t next64(struct source *s)
{
    uint64_t z = s->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline double next_unit(struct source *s) { return ((double)(next64(s) >> 11) + 0.5) * 0x1p-53; }

static inline double next_normal(struct source *s)
{
    double radius = sqrt(-2.0 * log(next_unit(s)));
    return radius * cos(6.283185307179586 * next_unit(s));
}

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* Rounds to BF16 to nearest, ties to even, as peers do. */
static inline float bf16_nearest(float x)
{
    uint32_t u = to_bits(x);
    return from_bits((u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u);
}

/* ---- What the library tells, and tensors ------------------------------------------------------------------------- */

static inline halfstep_rule_info rule_info(int32_t row)
{
    SIZED(halfstep_rule_info, info);
    MUST(halfstep_get_rule_info(row, &info));
    return info;
}

static inline halfstep_format_info format_info(int32_t row)
{
    SIZED(halfstep_format_info, info);
    MUST(halfstep_get_format_info(row, &info));
    return info;
}
/* Returns 1 for a format that stores states in blocks. */
static inline int is_block_format(const halfstep_format_info *info)
{
    return info->block && !(info->roles & HALFSTEP_ROLE_WEIGHT);
}

static inline halfstep_slot_info slot_info(const halfstep_optimizer *o, int32_t tensor, int slot)
{
    SIZED(halfstep_slot_info, info);
    MUST(halfstep_get_slot_info(o, tensor, slot, &info));
    return info;
}

/* Finds the weight or a state of a tensor. Returns 0 for a gradient, and for a state that the tensor does not have. */
static inline int stored_slot(const halfstep_optimizer *o, int32_t tensor, int slot, halfstep_slot_info *info)
{
    return slot != GRADIENT && halfstep_get_slot_info(o, tensor, slot, info) == OK && info->format >= 0;
}

static inline halfstep_record counters_of(const halfstep_optimizer *o, int32_t tensor)
{
    SIZED(halfstep_record, counters);
    MUST(get_counters(o, tensor, &counters));
    return counters;
}

/* Returns an optimizer with one group. */
static inline halfstep_optimizer *new_optimizer(const char *recipe, int threads, uint64_t seed)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads, .seed = seed};
    halfstep_optimizer *o;
    int32_t group;
    MUST(halfstep_create(&options, &o));
    MUST(halfstep_add_group(o, recipe, &group));
    return o;
}

/* Adds the tensor that the members describe, as in ADD_TENSOR(o, .name = "w", .ndim = 2, ...). Returns its index. */
#define ADD_TENSOR(o, ...) add_tensor(o, &(halfstep_tensor){.struct_size = sizeof(halfstep_tensor), __VA_ARGS__})
static inline int32_t add_tensor(halfstep_optimizer *o, const halfstep_tensor *tensor)
{
    int32_t index;
    MUST(halfstep_add_tensor(o, tensor, &index));
    return index;
}

/* Returns an optimizer of one group with one tensor, whose states have memory. */
static inline halfstep_optimizer *optimizer_of(const char *recipe, const halfstep_tensor *tensor)
{
    halfstep_optimizer *o = new_optimizer(recipe, 0, 0);
    add_tensor(o, tensor);
    MUST(halfstep_allocate_states(o));
    return o;
}

static inline double get_hyper(const halfstep_optimizer *o, int32_t group, const char *name)
{
    double value;
    MUST(halfstep_get_hyper(o, group, name, &value));
    return value;
}

/* ---- One tensor -------------------------------------------------------------------------------------------------- */

struct one {
    halfstep_optimizer *o;
    int ndim;
    int64_t rows, row_length, n;
    const char *gradient_format;
    void *weight, *gradient;
    size_t weight_bytes, gradient_bytes;
    float *room; /* n values */
};

static inline void one_open(struct one *t, const char *recipe, int ndim, int64_t rows, int64_t row_length,
                            const char *gradient)
{
    memset(t, 0, sizeof *t);
    t->ndim = ndim;
    t->rows = rows;
    t->row_length = row_length;
    t->n = rows * row_length;
    t->gradient_format = gradient;
    t->o = new_optimizer(recipe, 1, 42);
}

/* Adds the tensor and allocates its states. Call it after the hyper-parameters that decide about states are set. */
static inline void one_start(struct one *t)
{
    ADD_TENSOR(t->o, .name = "w", .ndim = t->ndim, .rows = t->rows, .row_length = t->row_length,
               .gradient = t->gradient_format);
    MUST(halfstep_allocate_states(t->o));
    t->weight_bytes = (size_t)slot_info(t->o, 0, WEIGHT).code_bytes;
    t->gradient_bytes = (size_t)slot_info(t->o, 0, GRADIENT).code_bytes;
    t->weight = zeroed(t->weight_bytes);
    t->gradient = zeroed(t->gradient_bytes);
    t->room = zeroed((size_t)t->n * 4);
}

/* Opens and starts an optimizer with the usual settings. */
static inline void one_new(struct one *t, const char *recipe, int ndim, int64_t rows, int64_t row_length,
                           const char *gradient)
{
    one_open(t, recipe, ndim, rows, row_length, gradient);
    one_start(t);
}

/* Opens and starts an optimizer of this lr and decay. */
static inline void one_with(struct one *t, const char *recipe, int ndim, int64_t rows, int64_t row_length,
                            const char *gradient, double lr, double decay)
{
    one_open(t, recipe, ndim, rows, row_length, gradient);
    MUST(halfstep_set_hyper(t->o, 0, "lr", lr));
    MUST(halfstep_set_hyper(t->o, 0, "weight_decay", decay));
    one_start(t);
}

static inline void one_close(struct one *t)
{
    halfstep_destroy(t->o);
    free(t->weight);
    free(t->gradient);
    free(t->room);
}

static inline void one_hyper(struct one *t, const char *name, double value)
{
    MUST(halfstep_set_hyper(t->o, 0, name, value));
}

/* Returns the rows of a slot. A state that is a vector counts as a matrix of one row or one column. */
static inline int64_t one_rows(const struct one *t, int slot)
{
    return slot < STATE ? t->rows : slot_info(t->o, 0, slot).rows;
}

static inline void one_write(struct one *t, int slot, const float *values)
{
    void *data = slot == WEIGHT ? t->weight : slot == GRADIENT ? t->gradient : NULL;
    MUST(halfstep_write_slot(t->o, 0, slot, data, 0, one_rows(t, slot), values));
}

static inline void one_read(struct one *t, int slot, float *values)
{
    void *data = slot == WEIGHT ? t->weight : slot == GRADIENT ? t->gradient : NULL;
    MUST(halfstep_read_slot(t->o, 0, slot, data, 0, one_rows(t, slot), values));
}

/* Copies the grids of second moments. They belong to the bytes of a state as its scales do. */
static inline void copy_grids(const halfstep_optimizer *from, halfstep_optimizer *to, int32_t tensor)
{
    SIZED(halfstep_slot_info, info);
    for (int32_t s = STATE; s < STATE + HALFSTEP_MAX_STATES; s++) {
        char name[64];
        double value;
        if (halfstep_get_slot_info(from, tensor, s, &info) || !info.grid) continue;
        snprintf(name, sizeof name, "%s.grid", info.name);
        MUST(get_scalar(from, tensor, name, &value));
        MUST(set_scalar(to, tensor, name, value));
    }
}

/* Sets every element of a slot to `value`. */
static inline void one_fill(struct one *t, int slot, float value)
{
    for (int64_t i = 0; i < t->n; i++) t->room[i] = value;
    one_write(t, slot, t->room);
}

static inline int one_step(struct one *t)
{
    void *weights[1] = {t->weight};
    const void *gradients[1] = {t->gradient};
    return halfstep_step(t->o, weights, gradients);
}

static inline void one_steps(struct one *t, int steps)
{
    for (int k = 0; k < steps; k++) MUST(one_step(t));
}

static inline double one_mean(struct one *t, int slot)
{
    double sum = 0;
    one_read(t, slot, t->room);
    for (int64_t i = 0; i < t->n; i++) sum += (double)t->room[i];
    return sum / (double)t->n;
}

/* ---- Names from the tables --------------------------------------------------------------------------------------- */

/* Returns the name of a row's format if it may serve all of `roles`, else NULL. */
static inline const char *format_for(int32_t row, int32_t roles)
{
    SIZED(halfstep_format_info, info);
    return halfstep_get_format_info(row, &info) == OK && (info.roles & roles) == roles ? info.name : NULL;
}

#endif
