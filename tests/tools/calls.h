/* Short forms of halfstep_run(), of records, of error codes and of slots, for the many lines of tests that need them.
 * They make a call about one tensor, and read or set one number of a record by its name. */
#ifndef HALFSTEP_TEST_CALLS_H
#define HALFSTEP_TEST_CALLS_H

#ifndef HALFSTEP_ADVANCED
#define HALFSTEP_ADVANCED
#endif
#include <stdio.h>
#include <string.h>

#include "halfstep.h"

/* ---- Short names ------------------------------------------------------------------------------------------------- */

enum {
    ARGUMENT = HALFSTEP_ERROR_ARGUMENT,
    NAME = HALFSTEP_ERROR_NAME,
    RANGE = HALFSTEP_ERROR_RANGE,
    SHAPE = HALFSTEP_ERROR_SHAPE,
    DUPLICATE = HALFSTEP_ERROR_DUPLICATE,
    ORDER = HALFSTEP_ERROR_ORDER,
    UNSUPPORTED = HALFSTEP_ERROR_UNSUPPORTED,
    MEMORY = HALFSTEP_ERROR_MEMORY,
    DEVICE = HALFSTEP_ERROR_DEVICE,
    FORMAT = HALFSTEP_ERROR_FORMAT,
    MISMATCH = HALFSTEP_ERROR_MISMATCH,
    IO = HALFSTEP_ERROR_IO,
};
enum { ALL_GROUPS = HALFSTEP_ALL_GROUPS, OK = HALFSTEP_OK };
enum { WEIGHT = HALFSTEP_SLOT_WEIGHT, GRADIENT = HALFSTEP_SLOT_GRADIENT, STATE = HALFSTEP_SLOT_STATE };

/* Declares a structure of the library that holds nothing but its size. */
#define SIZED(type, name) type name = {.struct_size = sizeof name}

/* ---- Calls. STEP, in parts and in one piece -------------------------------------------------------------------- */

static inline halfstep_call all_call(int micro, void *const *weights, const void *const *gradients, int64_t *statistics)
{
    return (halfstep_call){.struct_size = sizeof(halfstep_call),
                           .micro = micro,
                           .weights = weights,
                           .gradients = gradients,
                           .statistics = statistics};
}

static inline int64_t statistics_count(const halfstep_optimizer *o)
{
    const halfstep_call call = {.struct_size = sizeof call};
    return halfstep_statistics_count(o, &call);
}

static inline int64_t norms_offset(const halfstep_optimizer *o)
{
    const halfstep_call call = {.struct_size = sizeof call};
    return halfstep_norms_offset(o, &call);
}

static inline int step_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    const halfstep_call call = all_call(0, NULL, gradients, statistics);
    return halfstep_run_begin(o, &call);
}

static inline int step_norms(halfstep_optimizer *o, void *const *weights, const void *const *gradients,
                             int64_t *statistics)
{
    const halfstep_call call = all_call(0, weights, gradients, statistics);
    return halfstep_run_norms(o, &call);
}

static inline int step_finish(halfstep_optimizer *o, void *const *weights, const void *const *gradients,
                              int64_t *statistics)
{
    const halfstep_call call = all_call(0, weights, gradients, statistics);
    return halfstep_run_finish(o, &call);
}

static inline int accumulate_states(halfstep_optimizer *o, const void *const *gradients)
{
    const halfstep_call call = all_call(1, NULL, gradients, NULL);
    return halfstep_run(o, &call);
}

static inline int accumulate_states_begin(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    const halfstep_call call = all_call(1, NULL, gradients, statistics);
    return halfstep_run_begin(o, &call);
}

static inline int accumulate_states_finish(halfstep_optimizer *o, const void *const *gradients, int64_t *statistics)
{
    const halfstep_call call = all_call(1, NULL, gradients, statistics);
    return halfstep_run_finish(o, &call);
}

/* ---- TENSOR ------------------------------------------------------------------------------------------------------ */

typedef int run_function(halfstep_optimizer *, const halfstep_call *);

static inline int run_tensor(run_function *run, halfstep_optimizer *o, int32_t tensor, int micro, void *weight,
                             const void *gradient, int64_t *statistics)
{
    const halfstep_call call = {.struct_size = sizeof call,
                                .kind = HALFSTEP_CALL_TENSOR,
                                .tensor = tensor,
                                .micro = micro,
                                .weights = micro ? NULL : &weight,
                                .gradients = &gradient,
                                .statistics = statistics};
    return run(o, &call);
}

static inline int step_tensor(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient)
{
    return run_tensor(halfstep_run, o, tensor, 0, weight, gradient, NULL);
}

static inline int step_tensor_begin(halfstep_optimizer *o, int32_t tensor, const void *gradient, int64_t *statistics)
{
    return run_tensor(halfstep_run_begin, o, tensor, 0, NULL, gradient, statistics);
}

static inline int step_tensor_norms(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient,
                                    int64_t *statistics)
{
    return run_tensor(halfstep_run_norms, o, tensor, 0, weight, gradient, statistics);
}

static inline int step_tensor_finish(halfstep_optimizer *o, int32_t tensor, void *weight, const void *gradient,
                                     int64_t *statistics)
{
    return run_tensor(halfstep_run_finish, o, tensor, 0, weight, gradient, statistics);
}

static inline int accumulate_states_tensor(halfstep_optimizer *o, int32_t tensor, const void *gradient)
{
    return run_tensor(halfstep_run, o, tensor, 1, NULL, gradient, NULL);
}

static inline int accumulate_states_tensor_begin(halfstep_optimizer *o, int32_t tensor, const void *gradient,
                                                 int64_t *statistics)
{
    return run_tensor(halfstep_run_begin, o, tensor, 1, NULL, gradient, statistics);
}

static inline int accumulate_states_tensor_finish(halfstep_optimizer *o, int32_t tensor, const void *gradient,
                                                  int64_t *statistics)
{
    return run_tensor(halfstep_run_finish, o, tensor, 1, NULL, gradient, statistics);
}

static inline int64_t tensor_statistics_count(const halfstep_optimizer *o, int32_t tensor)
{
    const halfstep_call call = {.struct_size = sizeof call, .kind = HALFSTEP_CALL_TENSOR, .tensor = tensor};
    return halfstep_statistics_count(o, &call);
}

static inline int64_t tensor_norms_offset(const halfstep_optimizer *o)
{
    const halfstep_call call = {.struct_size = sizeof call, .kind = HALFSTEP_CALL_TENSOR};
    return halfstep_norms_offset(o, &call);
}

/* ---- ROUND ------------------------------------------------------------------------------------------------------- */

static inline int run_round(run_function *run, halfstep_optimizer *o, int64_t *statistics)
{
    const halfstep_call call = {.struct_size = sizeof call, .kind = HALFSTEP_CALL_ROUND, .statistics = statistics};
    return run(o, &call);
}

static inline int end_round(halfstep_optimizer *o) { return run_round(halfstep_run, o, NULL); }

static inline int end_round_begin(halfstep_optimizer *o, int64_t *statistics)
{
    return run_round(halfstep_run_begin, o, statistics);
}

static inline int end_round_finish(halfstep_optimizer *o, int64_t *statistics)
{
    return run_round(halfstep_run_finish, o, statistics);
}

static inline int64_t round_statistics_count(const halfstep_optimizer *o)
{
    const halfstep_call call = {.struct_size = sizeof call, .kind = HALFSTEP_CALL_ROUND};
    return halfstep_statistics_count(o, &call);
}

/* ---- Records ----------------------------------------------------------------------------------------------------- */

static inline halfstep_record record_of(const halfstep_optimizer *o, int32_t kind, int32_t index)
{
    halfstep_record record = {.struct_size = sizeof record, .kind = kind, .index = index};
    halfstep_get_record(o, &record);
    return record;
}

/* Sets the id and the counters of a tensor. Its numbers stay. */
static inline int set_counters(halfstep_optimizer *o, int32_t tensor, const halfstep_record *counters)
{
    halfstep_record record = record_of(o, HALFSTEP_RECORD_TENSOR, tensor);
    record.id = counters->id;
    record.state_steps = counters->state_steps;
    record.full_steps = counters->full_steps;
    record.writes = counters->writes;
    return halfstep_set_record(o, &record);
}

static inline int get_counters(const halfstep_optimizer *o, int32_t tensor, halfstep_record *record)
{
    record->kind = HALFSTEP_RECORD_TENSOR;
    record->index = tensor;
    return halfstep_get_record(o, record);
}

/* Returns the place of a scalar in a record, or of a grid named "STATE.grid". NULL if the tensor has none of that
 * name. */
static inline double *record_place(const halfstep_optimizer *o, halfstep_record *record, const char *name)
{
    halfstep_tensor tensor = {.struct_size = sizeof tensor};
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    char recipe[64], grid[64];
    if (halfstep_get_tensor(o, record->index, &tensor)) return NULL;
    if (halfstep_get_group_recipe(o, tensor.group, recipe, sizeof recipe)) return NULL;
    *strchr(recipe, '/') = 0;
    halfstep_get_rule_info(halfstep_rule_find(recipe), &rule);
    for (int i = 0; i < rule.scalars; i++)
        if (!strcmp(rule.scalar_name[i], name)) return &record->scalar[i];
    for (int i = 0; i < rule.states; i++) {
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        snprintf(grid, sizeof grid, "%s.grid", rule.state_name[i]);
        if (strcmp(grid, name)) continue;
        return halfstep_get_slot_info(o, record->index, HALFSTEP_SLOT_STATE + i, &slot) || !slot.grid
                   ? NULL
                   : &record->grid[i];
    }
    return NULL;
}

static inline int get_scalar(const halfstep_optimizer *o, int32_t tensor, const char *name, double *value)
{
    halfstep_record record = {.struct_size = sizeof record};
    int error = get_counters(o, tensor, &record);
    double *place = error ? NULL : record_place(o, &record, name);
    if (!error && !place) return HALFSTEP_ERROR_NAME;
    if (place) *value = *place;
    return error;
}

static inline int set_scalar(halfstep_optimizer *o, int32_t tensor, const char *name, double value)
{
    halfstep_record record = {.struct_size = sizeof record};
    int error = get_counters(o, tensor, &record);
    double *place = error ? NULL : record_place(o, &record, name);
    if (!error && !place) return HALFSTEP_ERROR_NAME;
    if (place) *place = value;
    return error ? error : halfstep_set_record(o, &record);
}

static inline int get_group_steps(const halfstep_optimizer *o, int32_t group, uint64_t *steps)
{
    halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_GROUP, .index = group};
    int error = halfstep_get_record(o, &record);
    if (!error) *steps = record.steps;
    return error;
}

static inline int set_group_steps(halfstep_optimizer *o, int32_t group, uint64_t steps)
{
    const halfstep_record record = {
        .struct_size = sizeof record, .kind = HALFSTEP_RECORD_GROUP, .index = group, .steps = steps};
    return halfstep_set_record(o, &record);
}

static inline uint64_t get_seed(const halfstep_optimizer *o) { return record_of(o, HALFSTEP_RECORD_OPTIMIZER, 0).seed; }

static inline int set_seed(halfstep_optimizer *o, uint64_t seed)
{
    halfstep_record record = record_of(o, HALFSTEP_RECORD_OPTIMIZER, 0);
    record.seed = seed;
    return halfstep_set_record(o, &record);
}

static inline int set_skipped_steps(halfstep_optimizer *o, uint64_t skipped)
{
    halfstep_record record = record_of(o, HALFSTEP_RECORD_OPTIMIZER, 0);
    record.skipped_steps = skipped;
    return halfstep_set_record(o, &record);
}

static inline int set_gradient_norm(halfstep_optimizer *o, double norm)
{
    halfstep_record record = record_of(o, HALFSTEP_RECORD_OPTIMIZER, 0);
    record.gradient_norm = norm;
    return halfstep_set_record(o, &record);
}

/* Binds the step counter alone. */
static inline int bind_step(halfstep_optimizer *o, int32_t tensor, float *step)
{
    const halfstep_record_places places = {.struct_size = sizeof places, .step = step};
    return halfstep_bind_record(o, tensor, &places);
}

#endif
