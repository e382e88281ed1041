/* Tests arguments that no caller should pass: every pointer of every public function as NULL, and numbers beyond every
 * end. Shapes, parts and ids contradict each other. Nothing may crash, and the code must be the documented one. The
 * handle must go on as if nothing had been asked. Over 500 lines because each function has its own. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED

#include "ref/fixture.h"

/* The handle that refused calls are about, or NULL: there is none, or the call has none. */
static halfstep_optimizer *about;

/* Leaves the text of another failure, on the handle and for calls without one. */
static void leave_text(void)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = -7};
    halfstep_optimizer *none;
    EXPECT(halfstep_create(&options, &none), RANGE);
    if (about) EXPECT(halfstep_set_threads(about, -7), RANGE);
}

/* Fails if the last call of this thread has left the text of a failure before it, or none. */
static void check_text(int line)
{
    const char *alone = halfstep_error_detail(NULL), *text = *alone || !about ? alone : halfstep_error_detail(about);
    CHECK(*text && !strstr(text, "threads = -7"), "line %d: the text is '%s'", line, text);
}

/* Checks a call that is refused: its code, and that the text is its own. */
#define FAILS_WITH(call, code) (leave_text(), EXPECT(call, code), check_text(__LINE__))
#define REFUSED(call) FAILS_WITH(call, ARGUMENT)

static halfstep_tensor tensor(const char *name, int32_t ndim, int64_t rows, int64_t row_length)
{
    return (halfstep_tensor){.struct_size = sizeof(halfstep_tensor),
                             .name = name,
                             .ndim = ndim,
                             .rows = rows,
                             .row_length = row_length,
                             .gradient = "f32"};
}

/* The first rows of a matrix. */
static halfstep_tensor part_of(const char *name, int64_t rows, int64_t row_length, int64_t n_rows)
{
    halfstep_tensor t = tensor(name, 2, rows, row_length);
    t.n_rows = n_rows;
    t.n_columns = row_length;
    return t;
}

/* Makes a handle with one group and, if t is given, one tensor with memory. */
static halfstep_optimizer *make(const char *recipe, const halfstep_tensor *t)
{
    return t ? optimizer_of(recipe, t) : new_optimizer(recipe, 0, 0);
}

static void test_null_handle(void)
{
    float w[64] = {0}, g[64] = {0}, number, *number_place = &number;
    void *weights[1] = {w};
    const void *gradients[1] = {g};
    int64_t statistics[512] = {0};
    int32_t index;
    uint64_t count;
    double value;
    char text[64];
    halfstep_tensor t = tensor("w", 2, 1, 64);
    SIZED(halfstep_slot_info, slot);
    SIZED(halfstep_record, record);
    void *memory;
    TEST("no function takes NULL for a handle") {
        REFUSED(halfstep_set_threads(NULL, 1));
        halfstep_destroy(NULL);
        CHECK(strstr(halfstep_error_detail(NULL), "halfstep_set_threads: optimizer is NULL"), "'%s'",
              halfstep_error_detail(NULL));
        REFUSED(halfstep_synchronize(NULL));
        REFUSED(halfstep_set_stream(NULL, NULL));
        REFUSED(halfstep_bind_hyper(NULL, 0, "lr", NULL));
        REFUSED(halfstep_device_allocate(NULL, 1, &memory));
        halfstep_device_release(NULL, NULL);
        REFUSED(halfstep_device_copy(NULL, w, g, 4));
        REFUSED(halfstep_add_group(NULL, "adamw", &index));
        CHECK(halfstep_group_count(NULL) == 0 && halfstep_tensor_count(NULL) == 0, "counts of no handle");
        REFUSED(halfstep_get_group_recipe(NULL, 0, text, sizeof text));
        REFUSED(halfstep_set_hyper(NULL, 0, "lr", 1));
        REFUSED(halfstep_get_hyper(NULL, 0, "lr", &value));
        REFUSED(halfstep_set_choice(NULL, 0, "decay", "l2"));
        CHECK(!halfstep_get_choice(NULL, 0, "decay"), "a choice of no handle");
        REFUSED(halfstep_current_lr(NULL, 0, &value));
        REFUSED(halfstep_add_tensor(NULL, &t, &index));
        REFUSED(halfstep_get_tensor(NULL, 0, &t));
        CHECK(halfstep_tensor_find(NULL, "w") < 0, "a tensor of no handle");
        REFUSED(halfstep_get_slot_info(NULL, 0, 0, &slot));
        REFUSED(halfstep_state_bytes(NULL, &count));
        REFUSED(halfstep_bind_states(NULL, w, 64));
        REFUSED(halfstep_allocate_states(NULL));
        REFUSED(halfstep_bind_slot(NULL, 0, 2, w, NULL));
        REFUSED(halfstep_read_slot(NULL, 0, 2, NULL, 0, 1, w));
        REFUSED(halfstep_write_slot(NULL, 0, 2, NULL, 0, 1, w));
        REFUSED(halfstep_read_average(NULL, 0, w, 0, 1, g));
        REFUSED(halfstep_read_weights(NULL, weights, &number_place));
        REFUSED(halfstep_write_weights(NULL, weights, &number_place));
        REFUSED(halfstep_step(NULL, weights, gradients));
        CHECK(statistics_count(NULL) == 0 && norms_offset(NULL) == 0 && tensor_statistics_count(NULL, 0) == 0,
              "statistics of no handle");
        REFUSED(step_begin(NULL, gradients, statistics));
        REFUSED(step_norms(NULL, weights, gradients, statistics));
        REFUSED(step_finish(NULL, weights, gradients, statistics));
        REFUSED(step_tensor(NULL, 0, w, g));
        REFUSED(end_round(NULL));
        REFUSED(step_tensor_begin(NULL, 0, g, statistics));
        REFUSED(step_tensor_norms(NULL, 0, w, g, statistics));
        REFUSED(step_tensor_finish(NULL, 0, w, g, statistics));
        REFUSED(end_round_begin(NULL, statistics));
        REFUSED(end_round_finish(NULL, statistics));
        REFUSED(halfstep_accumulate(NULL, 0, w, "f32", g, "f32", 1));
        REFUSED(accumulate_states(NULL, gradients));
        REFUSED(accumulate_states_tensor(NULL, 0, g));
        REFUSED(accumulate_states_begin(NULL, gradients, statistics));
        REFUSED(accumulate_states_finish(NULL, gradients, statistics));
        REFUSED(accumulate_states_tensor_begin(NULL, 0, g, statistics));
        REFUSED(accumulate_states_tensor_finish(NULL, 0, g, statistics));
        CHECK(halfstep_skipped_steps(NULL) == 0 && !halfstep_nonfinite_tensor(NULL, NULL)[0] &&
                  halfstep_gradient_norm(NULL) == 0.0,
              "numbers of no handle");
        REFUSED(halfstep_saturated(NULL, 0, w, &count));
        int32_t too_large = 1;
        CHECK(!*halfstep_nonfinite_tensor(NULL, &too_large) && !too_large, "a refusal of no handle");
        REFUSED(bind_step(NULL, 0, &number));
        for (record.kind = HALFSTEP_RECORD_OPTIMIZER; record.kind <= HALFSTEP_RECORD_TENSOR; record.kind++) {
            REFUSED(halfstep_get_record(NULL, &record));
            REFUSED(halfstep_set_record(NULL, &record));
        }
        REFUSED(halfstep_memory(NULL, &count, &count, &count, &count, &index));
        SIZED(halfstep_storage, storage);
        SIZED(halfstep_piece, piece);
        REFUSED(halfstep_ahead_bytes(NULL, 0, &count));
        CHECK(!halfstep_redone_steps(NULL), "steps of no handle");
        REFUSED(halfstep_bind_storage(NULL, &storage));
        CHECK(halfstep_piece_count(NULL) == 0, "pieces of no handle");
        REFUSED(halfstep_get_piece(NULL, 0, &piece));
        REFUSED(halfstep_write_initial(NULL, weights));
        REFUSED(halfstep_read_bytes(NULL, 0, 2, 0, 0, 1, w));
        REFUSED(halfstep_write_bytes(NULL, 0, 2, 0, 0, 1, w));
        REFUSED(halfstep_flush(NULL, NULL));
    }
}

static void test_null_pointers(void)
{
    float w[64] = {0}, g[64] = {0}, one = 1.0f;
    void *weights[1] = {w};
    const void *gradients[1] = {g};
    int64_t statistics[512] = {0};
    int32_t index;
    uint64_t count;
    double value;
    char text[64];
    uint32_t words[1];
    uint16_t half;
    TEST("no function takes NULL for anything else that it needs") {
        halfstep_tensor t = tensor("w", 2, 1, 64);
        halfstep_optimizer *o = about = make("lamb/bf16-sr", &t);
        float *values[1] = {NULL};
        REFUSED(halfstep_create(NULL, NULL));
        REFUSED(halfstep_bind_hyper(o, 0, NULL, NULL));
        REFUSED(halfstep_device_allocate(o, 1, NULL));
        REFUSED(halfstep_device_copy(o, NULL, text, 1));
        REFUSED(halfstep_device_copy(o, text, NULL, 1));
        EXPECT(halfstep_device_copy(o, NULL, NULL, 0), OK);
        halfstep_device_release(o, NULL);
        REFUSED(halfstep_get_device_info("cuda", NULL));
        REFUSED(halfstep_get_rule_info(0, NULL));
        REFUSED(halfstep_get_format_info(0, NULL));
        REFUSED(halfstep_get_hyper_info(0, 0, NULL));
        CHECK(halfstep_rule_find(NULL) < 0 && halfstep_format_find(NULL) < 0 && !halfstep_choice_value(NULL, 0),
              "found nothing");
        REFUSED(halfstep_recipe_full(NULL, text, sizeof text));
        REFUSED(halfstep_recipe_full("adamw", NULL, 64));
        REFUSED(halfstep_recipe_caveat(NULL, text, sizeof text));
        REFUSED(halfstep_recipe_caveat("muon", NULL, 64));
        REFUSED(halfstep_recipe_caveat("muon", text, 0));
        REFUSED(halfstep_recipe_bytes(NULL, 2, 1, 1, &count, &count, &count));
        EXPECT(halfstep_recipe_bytes("adamw", 2, 1, 1, NULL, NULL, NULL), OK);
        halfstep_tensor sized = {.struct_size = sizeof sized, .ndim = 3, .rows = 24, .row_length = 64};
        SIZED(halfstep_forecast, forecast);
        REFUSED(halfstep_forecast_tensors(NULL, "adamw", &sized, 1));
        REFUSED(halfstep_forecast_tensors(&forecast, NULL, &sized, 1));
        REFUSED(halfstep_forecast_tensors(&forecast, "adamw", NULL, 1));
        REFUSED(halfstep_forecast_tensors(&forecast, "adamw", &sized, 1)); /* its gradient is NULL */
        EXPECT(halfstep_set_isa(NULL), OK);                                /* NULL chooses the best one */
        halfstep_cpu_features(NULL, 3);
        halfstep_cpu_features(text, 0);
        REFUSED(halfstep_add_group(o, NULL, &index));
        REFUSED(halfstep_add_group(o, "adamw", NULL));
        REFUSED(halfstep_get_group_recipe(o, 0, NULL, 64));
        REFUSED(halfstep_set_hyper(o, 0, NULL, 1));
        REFUSED(halfstep_get_hyper(o, 0, NULL, &value));
        REFUSED(halfstep_get_hyper(o, 0, "lr", NULL));
        REFUSED(halfstep_set_choice(o, 0, NULL, "l2"));
        REFUSED(halfstep_set_choice(o, 0, "decay", NULL));
        CHECK(!halfstep_get_choice(o, 0, NULL), "a choice without a name");
        REFUSED(halfstep_current_lr(o, 0, NULL));
        REFUSED(halfstep_add_tensor(o, NULL, &index));
        REFUSED(halfstep_add_tensor(o, &t, NULL));
        REFUSED(halfstep_get_tensor(o, 0, NULL));
        CHECK(halfstep_tensor_find(o, NULL) < 0 && halfstep_name_id(NULL) == 0, "a tensor without a name");
        REFUSED(halfstep_get_slot_info(o, 0, 0, NULL));
        REFUSED(halfstep_state_bytes(o, NULL));
        REFUSED(halfstep_bind_slot(o, 0, 2, NULL, NULL));
        REFUSED(halfstep_read_slot(o, 0, 2, NULL, 0, 1, NULL));
        REFUSED(halfstep_write_slot(o, 0, 2, NULL, 0, 1, NULL));
        REFUSED(halfstep_read_average(o, 0, NULL, 0, 1, w));
        REFUSED(halfstep_read_average(o, 0, w, 0, 1, NULL));
        REFUSED(halfstep_read_weights(o, NULL, values));
        REFUSED(halfstep_read_weights(o, weights, NULL));
        REFUSED(halfstep_read_weights(o, weights, values));
        REFUSED(halfstep_write_weights(o, NULL, values));
        REFUSED(halfstep_write_weights(o, weights, NULL));
        REFUSED(halfstep_write_weights(o, weights, values));
        REFUSED(halfstep_step(o, NULL, gradients));
        REFUSED(halfstep_step(o, weights, NULL));
        REFUSED(step_begin(o, NULL, statistics));
        REFUSED(step_begin(o, gradients, NULL));
        REFUSED(step_norms(o, NULL, gradients, statistics));
        REFUSED(step_norms(o, weights, NULL, statistics));
        REFUSED(step_norms(o, weights, gradients, NULL));
        REFUSED(step_finish(o, NULL, gradients, statistics));
        REFUSED(step_finish(o, weights, gradients, NULL));
        REFUSED(step_tensor(o, 0, NULL, g));
        REFUSED(step_tensor_begin(o, 0, g, NULL));
        REFUSED(step_tensor_norms(o, 0, w, g, NULL));
        REFUSED(step_tensor_finish(o, 0, w, g, NULL));
        REFUSED(end_round_begin(o, NULL));
        REFUSED(end_round_finish(o, NULL));
        REFUSED(halfstep_accumulate(o, 0, NULL, "f32", g, "f32", 1));
        REFUSED(halfstep_accumulate(o, 0, w, NULL, g, "f32", 1));
        REFUSED(halfstep_accumulate(o, 0, w, "f32", NULL, "f32", 1));
        REFUSED(halfstep_accumulate(o, 0, w, "f32", g, NULL, 1));
        REFUSED(accumulate_states(o, NULL));
        REFUSED(accumulate_states_begin(o, gradients, NULL));
        REFUSED(accumulate_states_finish(o, gradients, NULL));
        REFUSED(accumulate_states_tensor_begin(o, 0, g, NULL));
        REFUSED(accumulate_states_tensor_finish(o, 0, g, NULL));
        REFUSED(halfstep_saturated(o, 0, NULL, &count));
        REFUSED(halfstep_saturated(o, 0, w, NULL));
        REFUSED(halfstep_get_record(o, NULL));
        REFUSED(halfstep_set_record(o, NULL));
        EXPECT(halfstep_bind_record(o, 0, NULL), OK); /* ends the binding */
        const halfstep_call with_statistics = {.struct_size = sizeof with_statistics,
                                               .weights = weights,
                                               .gradients = gradients,
                                               .statistics = statistics};
        REFUSED(halfstep_run(o, &with_statistics));
        int (*const runs[])(halfstep_optimizer *, const halfstep_call *) = {halfstep_run, halfstep_run_begin,
                                                                            halfstep_run_norms, halfstep_run_finish};
        REFUSED(halfstep_run(o, NULL));
        REFUSED(halfstep_run_begin(o, NULL));
        REFUSED(halfstep_run_norms(o, NULL));
        REFUSED(halfstep_run_finish(o, NULL));
        for (int part = 0; part < 4; part++) {
            halfstep_call call = {.struct_size = sizeof call, .weights = weights, .gradients = gradients};
            call.statistics = part ? statistics : NULL;
            call.kind = HALFSTEP_CALL_ROUND;
            call.micro = 1;
            EXPECT_NAMED(o, runs[part](o, &call), ARGUMENT, "micro = 1");
            call.kind = HALFSTEP_CALL_STEP;
            call.micro = 2;
            EXPECT_NAMED(o, runs[part](o, &call), ARGUMENT, "micro = 2");
            call.micro = 0;
            for (call.kind = -1; call.kind <= 3; call.kind += 4)
                EXPECT_NAMED(o, runs[part](o, &call), ARGUMENT, "unknown kind");
            CHECK(!halfstep_statistics_count(o, &call) && !halfstep_norms_offset(o, &call) &&
                      !halfstep_statistics_count(o, NULL),
                  "statistics of no call");
        }
        EXPECT(halfstep_memory(o, NULL, NULL, NULL, NULL, NULL), OK);
        REFUSED(halfstep_ahead_bytes(o, 0, NULL));
        SIZED(halfstep_storage, storage);
        REFUSED(halfstep_bind_storage(o, &storage)); /* without functions */
        REFUSED(halfstep_get_piece(o, 0, NULL));
        REFUSED(halfstep_read_bytes(o, 0, 2, 0, 0, 1, NULL));
        REFUSED(halfstep_write_bytes(o, 0, 2, 0, 0, 1, NULL));
        REFUSED(halfstep_schedule_factor(NULL, 0, 0, 1, 0, 0, 1, &value));
        REFUSED(halfstep_schedule_factor("constant", 0, 0, 1, 0, 0, 1, NULL));
        REFUSED(halfstep_random_words(NULL, 0, 1, 0, 0, 0, words, 1));
        REFUSED(halfstep_random_words("mixer", 0, 1, 0, 0, 0, NULL, 1));
        EXPECT(halfstep_random_words("mixer", 0, 1, 0, 0, 0, NULL, 0), OK);
        EXPECT(halfstep_random_words("dice", 0, 1, 0, 0, 0, words, 1), NAME);
        REFUSED(halfstep_bf16_stochastic(NULL, &half, 1, words));
        REFUSED(halfstep_bf16_stochastic(&one, NULL, 1, words));
        REFUSED(halfstep_bf16_stochastic(&one, &half, 1, NULL));
        EXPECT(halfstep_bf16_stochastic(NULL, NULL, 0, NULL), OK);
        /* The refused calls have changed nothing. */
        halfstep_record c = counters_of(o, 0);
        CHECK(c.state_steps == 0 && c.writes == 0 && halfstep_skipped_steps(o) == 0, "a refused call has counted");
        MUST(halfstep_step(o, weights, gradients));
        halfstep_destroy(o);
        about = NULL;
    }
}

static void test_numbers(void)
{
    TEST("groups, tensors, rows and names that are not there") {
        halfstep_tensor t = tensor("w", 2, 1, 64);
        halfstep_optimizer *o = about = make("adamw", &t);
        float w[64] = {0};
        double value;
        char text[64];
        uint64_t count;
        int64_t statistics[512];
        SIZED(halfstep_rule_info, rule);
        SIZED(halfstep_format_info, format);
        SIZED(halfstep_hyper_info, hyper);
        SIZED(halfstep_record, record);
        SIZED(halfstep_slot_info, slot);
        static const int32_t wrong[] = {-2, 1, 1000, INT32_MAX, INT32_MIN};
        for (size_t i = 0; i < COUNT(wrong); i++) {
            int32_t n = wrong[i];
            REFUSED(halfstep_get_group_recipe(o, n, text, sizeof text));
            REFUSED(halfstep_set_hyper(o, n, "lr", 1));
            REFUSED(halfstep_get_hyper(o, n, "lr", &value));
            REFUSED(halfstep_set_choice(o, n, "decay", "l2"));
            CHECK(!halfstep_get_choice(o, n, "decay"), "a choice of group %d", n);
            REFUSED(halfstep_current_lr(o, n, &value));
            REFUSED(halfstep_get_tensor(o, n, &t));
            REFUSED(step_tensor_begin(o, n, w, statistics));
            REFUSED(halfstep_saturated(o, n, w, &count));
            REFUSED(bind_step(o, n, w));
            REFUSED(halfstep_accumulate(o, n, w, "f32", w, "f32", 1));
            REFUSED(halfstep_read_average(o, n, w, 0, 1, w));
            for (int32_t kind = HALFSTEP_RECORD_GROUP; kind <= HALFSTEP_RECORD_TENSOR; kind++) {
                record = (halfstep_record){.struct_size = sizeof record, .kind = kind, .index = n};
                REFUSED(halfstep_get_record(o, &record));
                REFUSED(halfstep_set_record(o, &record));
            }
            record = (halfstep_record){.struct_size = sizeof record, .kind = n == 1 ? 3 : n};
            REFUSED(halfstep_get_record(o, &record));
            REFUSED(halfstep_set_record(o, &record));
            REFUSED(halfstep_get_slot_info(o, n, STATE, &slot));
            REFUSED(halfstep_get_slot_info(o, 0, n == 1 ? STATE + 3 : n, &slot));
            REFUSED(halfstep_bind_slot(o, 0, n == 1 ? STATE + 3 : n, w, NULL));
            REFUSED(halfstep_read_slot(o, 0, n == 1 ? STATE + 3 : n, NULL, 0, 1, w));
            REFUSED(halfstep_write_slot(o, n, STATE, NULL, 0, 1, w));
            CHECK(tensor_statistics_count(o, n) == 0, "statistics of tensor %d", n);
            CHECK(!halfstep_isa_name(n == 1 ? 99 : n) && !halfstep_isa_available(n == 1 ? 99 : n), "instruction set %d",
                  n);
            if (n == 1) continue;
            REFUSED(halfstep_get_rule_info(n, &rule));
            REFUSED(halfstep_get_format_info(n, &format));
            REFUSED(halfstep_get_hyper_info(0, n == -2 ? 1000 : n, &hyper));
            CHECK(!halfstep_choice_value("decay", n), "value %d of a choice", n);
        }
        EXPECT_NAMED(o, halfstep_set_hyper(o, ALL_GROUPS, "momentun", 1), NAME, "momentun");
        EXPECT_NAMED(o, halfstep_get_hyper(o, ALL_GROUPS, "clip_norn", &value), NAME, "clip_norn");
        EXPECT_NAMED(o, halfstep_get_hyper(o, ALL_GROUPS, "lr", &value), NAME, "lr");
        CHECK(!halfstep_choice_value("colour", 0), "a value of no choice");
        EXPECT_NAMED(o, halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", -1), RANGE, "clip_norm");
        EXPECT_NAMED(o, halfstep_set_choice(o, ALL_GROUPS, "scan", "never"), NAME, "never");
        record = (halfstep_record){.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR};
        record.scalar[0] = 1;
        EXPECT_NAMED(o, halfstep_set_record(o, &record), ARGUMENT, "no scalar 0");
        record.scalar[0] = 0;
        record.grid[1] = 1;
        EXPECT_NAMED(o, halfstep_set_record(o, &record), ARGUMENT, "state 1 has no grid");
        record.grid[1] = 0;
        record.reserved = 1;
        EXPECT_NAMED(o, halfstep_set_record(o, &record), ARGUMENT, "reserved");
        FAILS_WITH(halfstep_set_isa("sse9"), NAME);
        FAILS_WITH(halfstep_recipe_bytes("adamw", 2, -1, 1, NULL, NULL, NULL), SHAPE);
        FAILS_WITH(halfstep_recipe_bytes("adamw", 2, 1, -1, NULL, NULL, NULL), SHAPE);
        FAILS_WITH(halfstep_recipe_bytes("adamw", 2, INT64_MAX, 0, &count, NULL, NULL), SHAPE);
        EXPECT(halfstep_recipe_bytes("adamw", 2, (int64_t)1 << 40, 0, &count, NULL, NULL), OK);
        EQUAL(count, 0);
        FAILS_WITH(halfstep_recipe_bytes("adamw", 2, INT64_MAX / 2, 3, NULL, NULL, NULL), SHAPE);
        FAILS_WITH(halfstep_recipe_bytes("adamx", 2, 1, 1, NULL, NULL, NULL), NAME);
        FAILS_WITH(halfstep_recipe_full("adamw/f32/f32+f32+f32+f32", text, sizeof text), UNSUPPORTED);
        FAILS_WITH(halfstep_recipe_full("adamw", text, 3), RANGE);
        FAILS_WITH(halfstep_recipe_caveat("adamw/bf17", text, sizeof text), NAME);
        FAILS_WITH(halfstep_get_group_recipe(o, 0, text, 3), RANGE);
        halfstep_tensor sized = tensor("w", 3, 24, 64);
        for (int i = 0; i < 4; i++) {
            static const int64_t rows[] = {0, 8, 7, -8};
            SIZED(halfstep_forecast, f);
            sized.matrix_rows = rows[i];
            if (i < 2) EXPECT(halfstep_forecast_tensors(&f, "adafactor", &sized, 1), OK);
            else FAILS_WITH(halfstep_forecast_tensors(&f, "adafactor", &sized, 1), SHAPE);
            /* a number for each row, and for each column of each matrix */
            if (i < 2) EQUAL(f.states, 4 * (24 + (i ? 3 : 1) * 64));
            FAILS_WITH(halfstep_forecast_tensors(&f, "adamx", &sized, 1), NAME);
        }
        static const double not_norms[] = {-1.0, INFINITY, NAN};
        for (int i = 0; i < 3; i++) EXPECT(set_gradient_norm(o, not_norms[i]), RANGE);
        static const double not_scales[] = {INFINITY, NAN, -1e31};
        for (int i = 0; i < 3; i++) EXPECT(halfstep_accumulate(o, 0, w, "f32", w, "f32", not_scales[i]), RANGE);
        EXPECT_NAMED(o, halfstep_accumulate(o, 0, w, "f33", w, "f32", 1), NAME, "f33");
        EXPECT_NAMED(o, halfstep_accumulate(o, 0, w, "f32", w, "f34", 1), NAME, "f34");
        /* Formats that would lose or hide part of a sum, and one that gradients never have. */
        static const char *const not_sums[] = {"int8", "bf16-kahan", "f16-sr"};
        for (int i = 0; i < 3; i++)
            EXPECT_NAMED(o, halfstep_accumulate(o, 0, w, not_sums[i], w, "f32", 1), UNSUPPORTED, not_sums[i]);
        EXPECT_NAMED(o, halfstep_accumulate(o, 0, w, "f32", w, "bf16-ecc8", 1), UNSUPPORTED, "bf16-ecc8");
        halfstep_destroy(o);
        about = NULL;
    }
    TEST("schedules out of range") {
        double value;
        /* Warm-up and total steps, final fraction, start of the decay, power. One of them is out of bounds. */
        static const double wrong[][5] = {{-1, 1, 0, 0, 0},       {0, -1, 0, 0, 0},  {0, 1, -1, 0, 0},
                                          {0, 1, 0, -1, 0},       {0, 1, 0, 0, -17}, {1e16, 1, 0, 0, 0},
                                          {0, INFINITY, 0, 0, 0}, {0, 1, 2, 0, 0},   {0, 1, 0, 2, 0},
                                          {0, 1, 0, 0, 0.5},      {0, NAN, 0, 0, 0}};
        value = 7;
        for (size_t i = 0; i < COUNT(wrong); i++)
            FAILS_WITH(halfstep_schedule_factor("cosine", 0, wrong[i][0], wrong[i][1], wrong[i][2], wrong[i][3],
                                                wrong[i][4], &value),
                       RANGE);
        EQUAL(value, 7);
        EXPECT(halfstep_schedule_factor("cosine", 0, 0, 1, 0, 0, 0, &value), OK);
        FAILS_WITH(halfstep_schedule_factor("spiral", 0, 0, 1, 0, 0, 1, &value), NAME);
        FAILS_WITH(halfstep_schedule_factor("linear", 0, 0, 0, 0, 0, 0, &value), RANGE);
        FAILS_WITH(halfstep_schedule_factor("linear", 0, 6, 5, 0, 0, 0, &value), RANGE);
    }
}

static void test_shapes(void)
{
    int32_t index;
    TEST("tensors that contradict themselves, or one another") {
        halfstep_optimizer *o = about = make("adamw", NULL);
        halfstep_tensor t = tensor("", 2, 1, 1);
        REFUSED(halfstep_add_tensor(o, &t, &index));
        t = tensor(NULL, 2, 1, 1);
        REFUSED(halfstep_add_tensor(o, &t, &index));
        t = tensor("vector", 1, 5, 7);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, "vector");
        t = tensor("point", 0, 5, 7);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, "'point': ndim is 0, a scalar, but there are 5 x 7");
        t = tensor("short row", 1, 1, 4095);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, "short row");
        static const int64_t parts[][4] = {{-1, 2, 0, 8}, {0, -2, 0, 8}, {5, 0, 0, 8}, {3, 2, 0, 8},
                                           {0, 2, -1, 8}, {0, 2, 0, -8}, {0, 2, 9, 0}, {0, 2, 1, 8}};
        for (size_t i = 0; i < COUNT(parts); i++) {
            t = tensor("part", 2, 4, 8);
            t.first_row = parts[i][0], t.n_rows = parts[i][1], t.first_column = parts[i][2], t.n_columns = parts[i][3];
            EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, i < 4 ? "'part': rows" : "'part': columns");
        }
        CHECK(halfstep_tensor_count(o) == 0, "a refused tensor was added");
        for (int i = 0; i < 2; i++) { /* tensors that hold nothing may have any shape, and must be asked for */
            t = tensor(i ? "no row" : "no element", i ? 1 : 2, i ? 0 : 7, i ? 7 : 0);
            EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, "has no elements");
            t.may_be_empty = 1;
            add_tensor(o, &t);
        }
        t = tensor("a", 2, 1, 8);
        add_tensor(o, &t);
        t = tensor("b", 2, 1, 8);
        add_tensor(o, &t);
        MUST(halfstep_allocate_states(o));
        halfstep_record c = counters_of(o, 2);
        EXPECT_NAMED(o, set_counters(o, 3, &c), DUPLICATE, "'a'");
        halfstep_destroy(o);
        about = NULL;
    }
    TEST("a rule that steps matrices takes no parts of them") {
        halfstep_optimizer *o = make("muon", NULL);
        halfstep_tensor t = part_of("matrix", 64, 64, 32);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), UNSUPPORTED, "matrix");
        t.n_rows = 64, t.n_columns = 32;
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), UNSUPPORTED, "columns 0 + 32 (first + number) of 64 x 64");
        t.n_columns = 0;
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, "n_rows is 64 and n_columns 0");
        t.may_be_empty = 1;
        add_tensor(o, &t);
        halfstep_destroy(o);
    }
    TEST("blocks of the flattened tensor are written and held whole") {
        float rows[64 * 100] = {0};
        halfstep_tensor t = tensor("flat", 2, 64, 100);
        halfstep_optimizer *o = make("adamw/f32/dyn8", &t);
        EXPECT_NAMED(o, halfstep_write_slot(o, 0, STATE, NULL, 0, 1, rows), RANGE, "flat");
        EXPECT_NAMED(o, halfstep_write_slot(o, 0, STATE, NULL, 1, 63, rows), RANGE, "flat");
        EXPECT(halfstep_write_slot(o, 0, STATE, NULL, 0, 64, rows), OK);
        /* Means over rows need blocks that end with the rows. */
        const void *gradients[1] = {rows};
        void *weights[1] = {rows};
        MUST(halfstep_set_hyper(o, 0, "centralize", 1));
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), UNSUPPORTED, "'flat': centralize needs blocks");
        halfstep_record c = counters_of(o, 0);
        CHECK(c.state_steps == 0, "a refused step has counted");
        halfstep_destroy(o);
        t = tensor("even", 2, 25, 256);
        o = make("adamw/f32/dyn8", &t);
        MUST(halfstep_set_hyper(o, 0, "centralize", 1));
        EXPECT(halfstep_step(o, weights, gradients), OK);
        halfstep_destroy(o);
        o = make("adamw/f32/dyn8", NULL);
        t = part_of("flat", 64, 100, 3);
        EXPECT_NAMED(o, halfstep_add_tensor(o, &t, &index), SHAPE, "flat");
        halfstep_destroy(o);
    }
    TEST("a state with one scale is written at once, and its sums are those of all") {
        float rows[8 * 600] = {0};
        halfstep_tensor t = tensor("scaled", 2, 8, 600);
        halfstep_optimizer *o = make("adamw/f32/fp8-lamb16", &t);
        EXPECT_NAMED(o, halfstep_write_slot(o, 0, STATE, NULL, 0, 4, rows), RANGE, "scaled");
        EXPECT(halfstep_write_slot(o, 0, STATE, NULL, 0, 8, rows), OK);
        halfstep_destroy(o);
        t = part_of("scaled", 8, 600, 4);
        o = make("adamw/f32/fp8-lamb16", &t);
        const void *gradients[1] = {rows};
        EXPECT_NAMED(o, accumulate_states(o, gradients), UNSUPPORTED, "scaled");
        EXPECT_NAMED(o, halfstep_write_slot(o, 0, STATE, NULL, 0, 4, rows), RANGE, "scaled");
        gradients[0] = NULL; /* without a gradient there is nothing to refuse */
        EXPECT(accumulate_states(o, gradients), OK);
        halfstep_destroy(o);
        t = part_of("scaled", 8, 600, 8);
        t.n_columns = 512;
        o = make("adamw/f32/fp8-lamb16", &t);
        EXPECT_NAMED(o, halfstep_write_slot(o, 0, STATE, NULL, 0, 8, rows), RANGE, "scaled");
        halfstep_destroy(o);
    }
    TEST("a gradient is missing where that is an error") {
        float w[8] = {0};
        halfstep_tensor t = tensor("lonely", 2, 1, 8);
        halfstep_optimizer *o = make("sgd", &t);
        void *weights[1] = {w};
        const void *gradients[1] = {NULL};
        EXPECT(halfstep_step(o, weights, gradients), OK);
        MUST(halfstep_set_choice(o, ALL_GROUPS, "missing", "error"));
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), ARGUMENT, "lonely");
        gradients[0] = w;
        EXPECT(halfstep_step(o, weights, gradients), OK);
        weights[0] = NULL;
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), ARGUMENT, "'lonely' has a gradient but NULL weights");
        halfstep_destroy(o);
        /* A tensor without elements needs no weight. */
        t = tensor("empty", 2, 3, 0);
        t.may_be_empty = 1;
        o = make("lamb", &t);
        EXPECT(halfstep_step(o, weights, gradients), OK);
        halfstep_destroy(o);
    }
    TEST("a switch that asks for states which this part cannot have stays where it is") {
        halfstep_tensor t = part_of("odd", 4, 128, 4);
        t.n_columns = 33;
        halfstep_optimizer *o = make("sgd/f32/int8", NULL);
        MUST(halfstep_set_hyper(o, 0, "momentum", 0));
        add_tensor(o, &t);
        EXPECT_NAMED(o, halfstep_set_hyper(o, 0, "momentum", 0.9), SHAPE, "'odd': columns 0 + 33");
        EQUAL(get_hyper(o, 0, "momentum"), 0.0);
        halfstep_destroy(o);
    }
    TEST("what a step cannot do with these settings") {
        float w[8 * 64] = {0}, g[8 * 64];
        for (int i = 0; i < 8 * 64; i++) w[i] = g[i] = 1.0f;
        void *weights[1] = {w};
        const void *gradients[1] = {g};
        halfstep_tensor t = tensor("decayed", 2, 8, 64);
        halfstep_optimizer *o = make("adamw", &t);
        MUST(halfstep_set_choice(o, 0, "decay", "fully-decoupled"));
        MUST(halfstep_set_hyper(o, 0, "weight_decay", 0.1));
        MUST(halfstep_set_hyper(o, 0, "lr", 0));
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), RANGE,
                     "'decayed': fully-decoupled decay needs a reference_lr");
        EXPECT_NAMED(o, step_tensor(o, 0, w, g), RANGE, "'decayed': fully-decoupled decay needs a reference_lr");
        halfstep_record c = counters_of(o, 0);
        CHECK(c.state_steps == 0 && w[0] == 1.0f, "a refused step has counted");
        halfstep_destroy(o);
        t = part_of("halved", 8, 64, 8);
        t.n_columns = 32;
        o = make("adamw", &t);
        MUST(halfstep_set_hyper(o, 0, "centralize", 1));
        MUST(halfstep_set_choice(o, ALL_GROUPS, "scan", "known-finite"));
        EXPECT_NAMED(o, halfstep_step(o, weights, gradients), UNSUPPORTED, "'halved': centralize needs whole rows");
        CHECK(w[0] == 1.0f, "a refused step has changed a weight");
        halfstep_destroy(o);
    }
    TEST("rows that are read and written before there is memory for them") {
        float w[64] = {0};
        halfstep_tensor t = tensor("early", 2, 1, 64);
        halfstep_optimizer *o = make("schedulefree/bf16-kahan", NULL);
        add_tensor(o, &t);
        EXPECT_NAMED(o, halfstep_read_slot(o, 0, STATE, NULL, 0, 1, w), ORDER, "'early'");
        EXPECT_NAMED(o, halfstep_read_slot(o, 0, WEIGHT, w, 0, 1, w), ORDER, "'early': weight has no memory");
        EXPECT_NAMED(o, halfstep_bind_slot(o, 0, WEIGHT, NULL, NULL), ARGUMENT, "'early': memory for weight is NULL");
        halfstep_destroy(o);
        o = make("schedulefree", NULL);
        add_tensor(o, &t);
        halfstep_record c = counters_of(o, 0);
        c.state_steps = c.full_steps = 1;
        MUST(set_counters(o, 0, &c));
        EXPECT_NAMED(o, halfstep_read_average(o, 0, w, 0, 1, w), ORDER, "'early': z has no memory");
        EXPECT(halfstep_read_average(o, 0, w, 0, 0, w), OK);
        EXPECT_NAMED(o, halfstep_bind_states(o, NULL, 4096), ARGUMENT, "memory for the states is NULL");
        halfstep_destroy(o);
        o = make("adamw/f32/int8", NULL);
        add_tensor(o, &t);
        EXPECT_NAMED(o, halfstep_bind_slot(o, 0, STATE, w, NULL), ARGUMENT, "'early': memory for exp_avg is NULL");
        EXPECT_NAMED(o, halfstep_bind_slot(o, 0, STATE, NULL, w), ARGUMENT, "'early': memory for exp_avg is NULL");
        halfstep_destroy(o);
    }
    TEST("states of more bytes than a number holds") {
        halfstep_optimizer *o = make("adan", NULL);
        uint64_t bytes, before = 0;
        for (int i = 0; i < 300; i++) {
            char name[16];
            snprintf(name, sizeof name, "%d", i);
            halfstep_tensor t = tensor(name, 2, (INT64_C(1) << 52) / ((1 << 20) + 31), 1 << 20);
            add_tensor(o, &t);
            MUST(halfstep_state_bytes(o, &bytes));
            CHECK(bytes > before || bytes == UINT64_MAX, "%d tensors need %llu bytes, one fewer %llu", i + 1,
                  (unsigned long long)bytes, (unsigned long long)before);
            before = bytes;
        }
        EQUAL(bytes, UINT64_MAX);
        EXPECT_NAMED(o, halfstep_allocate_states(o), MEMORY, "18446744073709551615 bytes");
        _Alignas(64) static char memory[4096];
        EXPECT_NAMED(o, halfstep_bind_states(o, memory, sizeof memory), RANGE, "4096 were given");
        halfstep_destroy(o);
    }
}

static void test_complete(void)
{
    TEST("every public function that takes a pointer is in this file") {
        int functions = test_calls_all("include/halfstep.h", "tests/core/test_arguments.c");
        CHECK(functions > 55, "the header shows %d functions only", functions);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_null_handle();
    test_null_pointers();
    test_numbers();
    test_shapes();
    test_complete();
    return test_done();
}
