/* What tensors take before any optimizer has them. They are made, laid out and cut by the functions that make those of
 * an optimizer, so that a forecast cannot differ from what happens. */
#include "base/structs.h"
#include "handle/checks.h"
#include "handle/plan.h"
#include "handle/states/storage.h"
#include "handle/tensors.h"
#include "tables/layout.h"

/* The limits of a forecast, which keep all of its numbers within 64 bits. */
#define MOST_ELEMENTS (UINT64_C(1) << 57)
#define MOST_TENSORS ((uint64_t)INT32_MAX)

static uint64_t most(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Adds so many pieces of so many rows, each of which a step reads so often. */
static void add_pieces(halfstep_forecast *f, const struct hstep_tensor *t, int64_t rows, uint64_t pieces, int reads)
{
    const halfstep_piece p = hstep_describe(t, 0, 0, rows, !f->without_weights);
    const uint64_t bytes = p.state_bytes + p.weight_bytes, space = hstep_piece_space(bytes);
    f->pieces += pieces;
    f->stored += pieces * space;
    f->largest_piece = most(f->largest_piece, space);
    f->read += pieces * p.state_bytes * (uint64_t)reads;
    f->written += pieces * bytes;
}

/* Adds what storage takes. Sums over all tensors, and sums over a tensor that is cut, come before the first update. So
 * the states are read twice (hstep_walk()). */
static void add_stored(halfstep_forecast *f, const struct hstep_tensor *t, uint64_t count)
{
    const int64_t rows = hstep_piece_rows(t, f->piece_bytes), n = hstep_count_pieces(t, rows);
    const int reads = hstep_needs_sums(t, 0) && (rows || hstep_rules[t->rule].totals) ? 2 : 1;
    if (n > 1) add_pieces(f, t, rows, (uint64_t)(n - 1) * count, reads);
    add_pieces(f, t, t->n_rows - (n - 1) * rows, count, reads);
    f->memory = hstep_least_memory(f->largest_piece, f->stored, f->piece_bytes);
}

/* Adds what the handle has in memory. */
static void add_held(halfstep_forecast *f, const struct hstep_tensor *t, uint64_t count)
{
    uint64_t sum[HSTEP_BYTES] = {0};
    hstep_add_bytes(t, sum);
    f->weights += count * sum[HSTEP_WEIGHTS];
    f->gradients += count * sum[HSTEP_GRADIENTS];
    f->weight_extras += count * sum[HSTEP_WEIGHT_EXTRAS];
    f->states += count * sum[HSTEP_STATES];
    f->workspace = most(f->workspace, hstep_workspace_floats(hstep_default_device, t) * sizeof(float));
    f->largest_gradient = most(f->largest_gradient, sum[HSTEP_GRADIENTS]);
    f->largest_states = most(f->largest_states, sum[HSTEP_WEIGHT_EXTRAS] + sum[HSTEP_STATES]);
}

/* Counts tensors and their elements. */
static int count_tensors(halfstep_forecast *f, const struct hstep_tensor *t, int32_t count)
{
    const uint64_t elements = (uint64_t)t->n_rows * (uint64_t)t->n_columns;
    if (count < 1) return hstep_fail(NULL, HALFSTEP_ERROR_RANGE, "count is %d; it must be at least 1", (int)count);
    if (f->tensors > MOST_TENSORS || (uint64_t)count > MOST_TENSORS - f->tensors || f->elements >= MOST_ELEMENTS ||
        (elements && (uint64_t)count > (MOST_ELEMENTS - 1 - f->elements) / elements))
        return hstep_fail(NULL, HALFSTEP_ERROR_RANGE,
                          "%llu tensors with %llu elements and %d more of %llu are too many for a forecast; tensors "
                          "must be below 2^31, elements below 2^57",
                          (unsigned long long)f->tensors, (unsigned long long)f->elements, (int)count,
                          (unsigned long long)elements);
    f->tensors += (uint64_t)count;
    f->elements += (uint64_t)count * elements;
    return HALFSTEP_OK;
}

/* Does what halfstep_forecast_tensors() does, with complete structures. */
static int add_tensors(halfstep_forecast *f, const char *recipe, halfstep_tensor *d, int32_t count)
{
    struct hstep_group group;
    struct hstep_tensor t;
    if (f->without_weights < 0 || f->without_weights > 1)
        return hstep_fail(NULL, HALFSTEP_ERROR_ARGUMENT, "forecast: without_weights = %d; allowed: 0, 1",
                          (int)f->without_weights);
    if (!d->name) d->name = "unnamed";
    hstep_complete(d);
    int error = hstep_make_group(NULL, recipe, &group);
    if (!error) error = hstep_make_tensor(NULL, &group, d, &t);
    if (!error) error = count_tensors(f, &t, count);
    if (error) return error;
    hstep_lay_out(&t);
    add_held(f, &t, (uint64_t)count);
    add_stored(f, &t, (uint64_t)count);
    return HALFSTEP_OK;
}

int halfstep_forecast_tensors(halfstep_forecast *forecast, const char *recipe, const halfstep_tensor *tensor,
                              int32_t count)
{
    halfstep_forecast f = {0};
    halfstep_tensor d = {0};
    HSTEP_NEED(NULL, forecast);
    HSTEP_NEED(NULL, recipe);
    HSTEP_NEED(NULL, tensor);
    if (!hstep_take_struct(&f, sizeof f, forecast)) return hstep_fail_struct(NULL, __func__, forecast);
    if (!hstep_take_struct(&d, sizeof d, tensor)) return hstep_fail_struct(NULL, __func__, tensor);
    const int error = add_tensors(&f, recipe, &d, count);
    if (!error) hstep_give_struct(forecast, &f, sizeof f);
    return error;
}

int halfstep_recipe_bytes(const char *recipe, int32_t ndim, int64_t rows, int64_t row_length, uint64_t *weight,
                          uint64_t *weight_extra, uint64_t *states)
{
    halfstep_forecast f = {0};
    halfstep_tensor d = {.ndim = ndim, .rows = rows, .row_length = row_length, .may_be_empty = 1, .gradient = "f32"};
    HSTEP_NEED(NULL, recipe);
    const int error = add_tensors(&f, recipe, &d, 1);
    if (error) return error;
    if (weight) *weight = f.weights;
    if (weight_extra) *weight_extra = f.weight_extras;
    if (states) *states = f.states;
    return HALFSTEP_OK;
}
