/* The table of what happens if a field, a name or a call is forgotten, misspelt, zero, said twice, too early or too
 * late. REFUSED: the call fails with a code and a text that names the mistake, and no weight changes. TAKEN: it is no
 * mistake, and means what the row says. Each field that a caller fills in, and each function that takes an argument,
 * has a row. The last group reads the headers and checks that. test_arguments.c passes NULL for every pointer. Over 500
 * lines because it is one table. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include <stddef.h>
#include <sys/stat.h>
#include <unistd.h>

#include "halfstep_io.h"
#include "messages.h"
#include "ref/fixture.h"
#include "scratch.h"

/* ---- A scene: an optimizer of one matrix and one vector, made as far as a row needs it --------------------------- */

enum { EMPTY, GROUPED, ADDED, PLACED };
enum { ROWS = 2, COLUMNS = 64, N = ROWS * COLUMNS };

static halfstep_optimizer *o;
static halfstep_tensor matrix, vector;
static float weight[2][N], gradient[2][N], values[2][N];
static void *weights[2] = {weight[0], weight[1]};
static const void *gradients[2] = {gradient[0], gradient[1]};
static float *numbers[2] = {values[0], values[1]};
static int64_t statistics[1024];
static int32_t g, i;
static double number;

static void open_scene(int stage)
{
    matrix = (halfstep_tensor){.struct_size = sizeof matrix,
                               .name = "matrix",
                               .ndim = 2,
                               .rows = ROWS,
                               .row_length = COLUMNS,
                               .gradient = "f32"};
    vector = (halfstep_tensor){
        .struct_size = sizeof vector, .name = "vector", .ndim = 1, .rows = N, .row_length = 1, .gradient = "f32"};
    memset(weight, 0, sizeof weight);
    memset(values, 0, sizeof values);
    memset(statistics, 0, sizeof statistics);
    for (int t = 0; t < 2; t++)
        for (int k = 0; k < N; k++) gradient[t][k] = 1.0f;
    MUST(halfstep_create(NULL, &o));
    if (stage >= GROUPED) MUST(halfstep_add_group(o, "adamw/f32/int8", &g));
    if (stage >= ADDED) MUST(halfstep_add_tensor(o, &matrix, &i));
    if (stage >= ADDED) MUST(halfstep_add_tensor(o, &vector, &i));
    if (stage >= PLACED) MUST(halfstep_allocate_states(o));
    message[0] = 0;
}

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

static char listed[1 << 14]; /* what has a row: " of" for each */

static void begin_row(const char *of, int stage)
{
    size_t used = strlen(listed);
    snprintf(listed + used, sizeof listed - used, " %s ", of);
    open_scene(stage);
}

/* Checks a refusal. Its text is in `message` for calls of halfstep_io, else the handle's or the thread's. */
static void judge(const char *of, const char *how, int code, int expected, const char *says)
{
    const char *text = *message ? message : halfstep_error_detail(NULL);
    if (!*text) text = halfstep_error_detail(o);
    CHECK(code == expected, "%s, %s: %d (%s), not %d: '%s'", of, how, code, halfstep_strerror(code), expected, text);
    CHECK(strstr(text, says), "%s, %s: the text '%s' lacks '%s'", of, how, text, says);
    CHECK(weight[0][0] == 0.0f && weight[1][0] == 0.0f, "%s, %s: a refused call has changed a weight", of, how);
    halfstep_destroy(o);
}

/* A row whose last statement is the refused call. */
#define REFUSED(of, how, stage, expected, says, ...) \
    do {                                             \
        int code;                                    \
        begin_row(of, stage);                        \
        __VA_ARGS__;                                 \
        judge(of, how, code, expected, says);        \
    } while (0)
/* A row that succeeds. `means` says what it means, and `holds` checks that. */
#define TAKEN(of, how, means, stage, holds, ...)                                                             \
    do {                                                                                                     \
        int code;                                                                                            \
        begin_row(of, stage);                                                                                \
        __VA_ARGS__;                                                                                         \
        CHECK(code == OK, "%s, %s: %d: '%s'", of, how, code, *message ? message : halfstep_error_detail(o)); \
        CHECK(holds, "%s, %s: it does not mean: %s", of, how, means);                                        \
        halfstep_destroy(o);                                                                                 \
    } while (0)

/* A row of a function that returns its answer, and no code. */
#define ANSWERS(of, how, means, stage, holds) TAKEN(of, how, means, stage, holds, code = OK)

#define ADD_CHANGED(tensor, ...) \
    halfstep_tensor t = tensor;  \
    __VA_ARGS__;                 \
    code = halfstep_add_tensor(o, &t, &i)
#define CREATE(...)                                                                \
    const halfstep_options options = {.struct_size = sizeof options, __VA_ARGS__}; \
    halfstep_optimizer *other;                                                     \
    code = halfstep_create(&options, &other);                                      \
    if (!code) halfstep_destroy(other)
#define CALL(function, ...)                                               \
    const halfstep_ahead place[2] = {{0}};                                \
    const halfstep_call call = {.struct_size = sizeof call, __VA_ARGS__}; \
    (void)place;                                                          \
    code = function(o, &call)
#define RECORD(...)                                                             \
    const halfstep_record record = {.struct_size = sizeof record, __VA_ARGS__}; \
    code = halfstep_set_record(o, &record)

static void run_all(void *host, halfstep_task task, void *argument, int64_t n)
{
    (void)host;
    for (int64_t k = 0; k < n; k++) task(argument, k);
}

static void test_options(void)
{
    REFUSED("halfstep_options.struct_size", "forgotten", EMPTY, ARGUMENT, "halfstep_create: wrong struct_size 0",
            const halfstep_options bad = {.seed = 1};
            halfstep_optimizer * none; code = halfstep_create(&bad, &none));
    REFUSED("halfstep_options.struct_size", "that of a pointer", EMPTY, ARGUMENT, "wrong struct_size 8",
            const halfstep_options bad = {.struct_size = sizeof(void *)};
            halfstep_optimizer * none; code = halfstep_create(&bad, &none));
    REFUSED("halfstep_options.threads", "negative", EMPTY, RANGE, "threads = -1", CREATE(.threads = -1));
    TAKEN("halfstep_options.threads", "zero", "the default number", EMPTY, 1, CREATE(.threads = 0));
    TAKEN("halfstep_options.seed", "zero", "seed 0", EMPTY, get_seed(o) == 0, CREATE(.seed = 0));
    REFUSED("halfstep_options.run", "forgotten beside host", EMPTY, ARGUMENT, "host is the first argument of run",
            CREATE(.host = weight));
    TAKEN("halfstep_options.host", "forgotten", "run gets NULL", EMPTY, 1, CREATE(.run = run_all));
    REFUSED("halfstep_options.device", "misspelt", EMPTY, NAME, "unknown device 'gpu'; known: cpu, cuda",
            CREATE(.device = "gpu"));
    REFUSED("halfstep_options.device", "empty", EMPTY, NAME, "unknown device ''", CREATE(.device = ""));
    REFUSED("halfstep_options.stream", "without a device", EMPTY, ARGUMENT, "no streams", CREATE(.stream = weight));
}

static void test_groups(void)
{
    REFUSED("halfstep_add_group", "misspelt", EMPTY, NAME, "unknown rule 'adamx'",
            code = halfstep_add_group(o, "adamx/f32", &g));
    REFUSED("halfstep_add_group", "too late: after the states", PLACED, ORDER, "before the states exist",
            code = halfstep_add_group(o, "lion", &g));
    REFUSED("halfstep_add_group", "too late: after an lr was bound", GROUPED, ORDER, "before the lr of one is bound",
            MUST(halfstep_bind_hyper(o, ALL_GROUPS, "lr", &number));
            code = halfstep_add_group(o, "lion", &g));
    TAKEN("halfstep_add_group", "twice", "two groups", GROUPED, g == 1,
          code = halfstep_add_group(o, "adamw/f32/int8", &g));
    REFUSED("halfstep_set_hyper", "misspelt", GROUPED, NAME,
            "adamw has no hyper-parameter 'betas'; it has: beta1, beta2, eps, amsgrad, lr,",
            code = halfstep_set_hyper(o, g, "betas", 0.9));
    REFUSED("halfstep_set_hyper", "misspelt, for all groups", GROUPED, NAME, "no group has a hyper-parameter 'betas'",
            code = halfstep_set_hyper(o, ALL_GROUPS, "betas", 0.9));
    REFUSED("halfstep_set_hyper", "too early: no group", EMPTY, ORDER, "no group yet that could take 'lr'",
            code = halfstep_set_hyper(o, ALL_GROUPS, "lr", 0.9));
    REFUSED("halfstep_set_hyper", "of the optimizer, for a group", GROUPED, ARGUMENT,
            "'clip_norm' belongs to the optimizer", code = halfstep_set_hyper(o, g, "clip_norm", 1));
    REFUSED("halfstep_get_hyper", "of the optimizer, for a group", GROUPED, ARGUMENT,
            "'clip_norm' belongs to the optimizer", code = halfstep_get_hyper(o, g, "clip_norm", &number));
    REFUSED("halfstep_get_hyper", "misspelt", GROUPED, NAME, "it has: beta1,",
            code = halfstep_get_hyper(o, g, "betas", &number));
    REFUSED("halfstep_get_hyper", "of a group, for all", GROUPED, NAME, "it has: gradient_scale, clip_norm",
            code = halfstep_get_hyper(o, ALL_GROUPS, "lr", &number));
    TAKEN("halfstep_set_hyper", "twice", "the last value", GROUPED, get_hyper(o, g, "lr") == 0.25,
          MUST(halfstep_set_hyper(o, g, "lr", 0.5));
          code = halfstep_set_hyper(o, g, "lr", 0.25));
    TAKEN("halfstep_set_hyper", "for all groups, before the second", "the first group", GROUPED,
          get_hyper(o, 0, "lr") == 0.5 && get_hyper(o, 1, "lr") != 0.5,
          MUST(halfstep_set_hyper(o, ALL_GROUPS, "lr", 0.5));
          code = halfstep_add_group(o, "adamw", &g));
    REFUSED("halfstep_set_choice", "too early: no group", EMPTY, ORDER, "no group yet that could take 'schedule'",
            code = halfstep_set_choice(o, ALL_GROUPS, "schedule", "cosine"));
    REFUSED("halfstep_set_choice", "misspelt", GROUPED, NAME, "unknown choice 'scheduler'; known: decay, schedule,",
            code = halfstep_set_choice(o, g, "scheduler", "cosine"));
    REFUSED("halfstep_set_choice", "a misspelt value", GROUPED, NAME,
            "unknown value 'cos' of 'schedule'; known: constant,", code = halfstep_set_choice(o, g, "schedule", "cos"));
    REFUSED("halfstep_set_choice", "of the optimizer, for a group", GROUPED, ARGUMENT,
            "'scan' belongs to the optimizer", code = halfstep_set_choice(o, g, "scan", "scan"));
    TAKEN("halfstep_set_choice", "too early, of the optimizer", "it has no group", EMPTY,
          !strcmp(halfstep_get_choice(o, ALL_GROUPS, "missing"), "error"),
          code = halfstep_set_choice(o, ALL_GROUPS, "missing", "error"));
    static const char *const falling[] = {"linear", "cosine", "wsd"}, *const kinds[] = {"schedule", "decay_schedule"};
    for (size_t k = 0; k < COUNT(falling) * COUNT(kinds); k++) {
        REFUSED("total_steps", "never set", PLACED, RANGE, "needs a length; set total_steps",
                MUST(halfstep_set_choice(o, g, kinds[k % 2], falling[k / 2]));
                code = halfstep_step(o, weights, gradients));
        REFUSED("total_steps", "never set, one tensor", PLACED, RANGE, "group 0: the schedule",
                MUST(halfstep_set_choice(o, g, kinds[k % 2], falling[k / 2]));
                code = step_tensor(o, 1, weight[1], gradient[1]));
    }
    REFUSED("total_steps", "never set, the rate asked for", GROUPED, RANGE, "needs a length; set total_steps",
            MUST(halfstep_set_choice(o, g, "schedule", "linear"));
            code = halfstep_current_lr(o, g, &number));
    REFUSED("total_steps", "shorter than the warm-up", PLACED, RANGE, "warmup_steps = 30 is above total_steps = 20",
            MUST(halfstep_set_choice(o, g, "schedule", "cosine"));
            MUST(halfstep_set_hyper(o, g, "total_steps", 20)); MUST(halfstep_set_hyper(o, g, "warmup_steps", 30));
            code = halfstep_step(o, weights, gradients));
    TAKEN("total_steps", "zero in a schedule without an end", "no end", PLACED, weight[0][0] != 0.0f,
          MUST(halfstep_set_choice(o, g, "schedule", "inverse-power"));
          MUST(halfstep_set_choice(o, g, "decay_schedule", "constant")); code = halfstep_step(o, weights, gradients));
    REFUSED("halfstep_bind_hyper", "misspelt", GROUPED, NAME, "'rate' cannot be bound; known: lr",
            code = halfstep_bind_hyper(o, g, "rate", &number));
    REFUSED("halfstep_bind_hyper", "too early: no group", EMPTY, ORDER, "no group yet",
            code = halfstep_bind_hyper(o, ALL_GROUPS, "lr", &number));
    REFUSED("halfstep_set_threads", "negative", GROUPED, RANGE, "threads = -1", code = halfstep_set_threads(o, -1));
    TAKEN("halfstep_set_threads", "zero", "the default number", GROUPED, 1, code = halfstep_set_threads(o, 0));
    REFUSED("halfstep_set_stream", "on the processor", GROUPED, ARGUMENT, "no streams",
            code = halfstep_set_stream(o, weight));
    TAKEN("halfstep_synchronize", "too early", "nothing to wait for", EMPTY, 1, code = halfstep_synchronize(o));
    REFUSED("halfstep_schedule_factor", "no length", EMPTY, RANGE, "the schedule linear needs a length",
            code = halfstep_schedule_factor("linear", 0, 0, 0, 0, 0, 0, &number));
    REFUSED("halfstep_set_isa", "misspelt", EMPTY, NAME, "unknown instruction set 'avx'",
            code = halfstep_set_isa("avx"));
}

static void test_tensors(void)
{
    REFUSED("halfstep_tensor.struct_size", "forgotten", GROUPED, ARGUMENT, "halfstep_add_tensor: wrong struct_size 0",
            ADD_CHANGED(matrix, t.struct_size = 0));
    REFUSED("halfstep_tensor.struct_size", "that of a pointer", GROUPED, ARGUMENT, "wrong struct_size 8",
            ADD_CHANGED(matrix, t.struct_size = sizeof(void *)));
    TAKEN("halfstep_tensor.group", "forgotten", "the first group", GROUPED, 1, ADD_CHANGED(matrix, t.group = 0));
    REFUSED("halfstep_tensor.group", "too early", EMPTY, ARGUMENT, "there is no group 0",
            ADD_CHANGED(matrix, t.group = 0));
    REFUSED("halfstep_tensor.name", "forgotten", GROUPED, ARGUMENT, "tensor number 0 has no name",
            ADD_CHANGED(matrix, t.name = NULL));
    REFUSED("halfstep_tensor.name", "empty", GROUPED, ARGUMENT, "has no name", ADD_CHANGED(matrix, t.name = ""));
    REFUSED("halfstep_tensor.name", "not UTF-8", GROUPED, NAME, "cannot be named 'w\xe9ight'",
            ADD_CHANGED(matrix, t.name = "w\xe9ight"));
    REFUSED("halfstep_tensor.name", "kept by files", GROUPED, NAME, "cannot be named '__metadata__'",
            ADD_CHANGED(matrix, t.name = "__metadata__"));
    REFUSED("halfstep_tensor.name", "twice", ADDED, DUPLICATE, "two tensors are named 'matrix'",
            ADD_CHANGED(matrix, (void)0));
    REFUSED("halfstep_tensor.name", "twice, with another id", ADDED, DUPLICATE, "two tensors are named 'matrix'",
            ADD_CHANGED(matrix, t.id = 77));
    TAKEN("halfstep_tensor.id", "zero", "a hash of the name", ADDED, counters_of(o, 0).id == halfstep_name_id("matrix"),
          code = OK);
    REFUSED("halfstep_tensor.id", "twice", ADDED, DUPLICATE, "'vector' and 'third' have the same id",
            ADD_CHANGED(matrix, t.name = "third"; t.id = halfstep_name_id("vector")));
    REFUSED("halfstep_tensor.ndim", "forgotten, of a matrix", GROUPED, SHAPE, "'matrix': ndim is 0, a scalar",
            ADD_CHANGED(matrix, t.ndim = 0));
    REFUSED("halfstep_tensor.ndim", "forgotten, of a vector", GROUPED, SHAPE, "'vector': ndim is 0, a scalar",
            ADD_CHANGED(vector, t.ndim = 0));
    REFUSED("halfstep_tensor.ndim", "negative", GROUPED, SHAPE, "'matrix': invalid shape",
            ADD_CHANGED(matrix, t.ndim = -1));
    REFUSED("halfstep_tensor.may_be_empty", "misspelt", GROUPED, ARGUMENT, "may_be_empty = 7",
            ADD_CHANGED(matrix, t.may_be_empty = 7));
    TAKEN("halfstep_tensor.may_be_empty", "set, with elements", "nothing", GROUPED, 1,
          ADD_CHANGED(matrix, t.may_be_empty = 1));
    for (int ndim = 0; ndim < 4; ndim++) {
        REFUSED("halfstep_tensor.rows", "forgotten", GROUPED, SHAPE, "has no elements: rows is 0",
                ADD_CHANGED(matrix, t.ndim = ndim; t.rows = 0; t.row_length = ndim > 1 ? COLUMNS : 1));
        TAKEN(
            "halfstep_tensor.rows", "zero and asked for", "a tensor without elements", GROUPED, 1,
            ADD_CHANGED(matrix, t.ndim = ndim; t.may_be_empty = 1; t.rows = 0; t.row_length = ndim > 1 ? COLUMNS : 1));
    }
    REFUSED("halfstep_tensor.row_length", "forgotten, of a matrix", GROUPED, SHAPE, "row_length 0",
            ADD_CHANGED(matrix, t.row_length = 0));
    TAKEN("halfstep_tensor.row_length", "forgotten, of a vector", "1", PLACED, weight[1][N - 1] != 0.0f,
          halfstep_destroy(o);
          open_scene(GROUPED); vector.row_length = 0; MUST(halfstep_add_tensor(o, &vector, &i));
          MUST(halfstep_allocate_states(o)); code = halfstep_step(o, weights + 1, gradients + 1));
    TAKEN("halfstep_tensor.row_length", "forgotten, of a scalar", "1", GROUPED, 1,
          ADD_CHANGED(vector, t.ndim = 0; t.rows = 1; t.row_length = 0));
    REFUSED("halfstep_tensor.n_rows", "forgotten", GROUPED, SHAPE,
            "has no elements, because n_rows is 0 and n_columns 64", ADD_CHANGED(matrix, t.n_columns = COLUMNS));
    REFUSED("halfstep_tensor.n_columns", "forgotten", GROUPED, SHAPE,
            "has no elements, because n_rows is 2 and n_columns 0", ADD_CHANGED(matrix, t.n_rows = ROWS));
    REFUSED("halfstep_tensor.first_row", "without n_rows and n_columns", GROUPED, SHAPE, "n_rows is 0 and n_columns 0",
            ADD_CHANGED(matrix, t.first_row = 1));
    REFUSED("halfstep_tensor.first_column", "without n_rows and n_columns", GROUPED, SHAPE,
            "n_rows is 0 and n_columns 0", ADD_CHANGED(matrix, t.first_column = 32));
    REFUSED("halfstep_tensor.gradient", "forgotten", GROUPED, ARGUMENT, "gradient is NULL; set it to the format of its",
            ADD_CHANGED(matrix, t.gradient = NULL));
    REFUSED("halfstep_tensor.gradient", "misspelt", GROUPED, NAME, "unknown gradient format 'fp32'; known: f32,",
            ADD_CHANGED(matrix, t.gradient = "fp32"));
    halfstep_tensor told = {.struct_size = sizeof told};
    TAKEN("halfstep_tensor.matrix_rows", "zero", "one matrix", ADDED, told.matrix_rows == ROWS,
          code = halfstep_get_tensor(o, 0, &told));
    REFUSED("halfstep_tensor.matrix_rows", "no divisor", GROUPED, SHAPE, "matrix_rows is 3",
            ADD_CHANGED(matrix, t.matrix_rows = 3));
    REFUSED("halfstep_tensor.split", "too short", GROUPED, SHAPE, "split is 1", ADD_CHANGED(matrix, t.split[0] = 1));
    REFUSED("halfstep_tensor.split", "begins late", GROUPED, SHAPE, "not a list that begins",
            ADD_CHANGED(matrix, t.split[1] = 2));
    REFUSED("halfstep_add_tensor", "too late", PLACED, ORDER, "'late': tensors must be added before the states exist",
            ADD_CHANGED(matrix, t.name = "late"));
    SIZED(halfstep_forecast, f);
    REFUSED("halfstep_forecast.struct_size", "forgotten", EMPTY, ARGUMENT, "wrong struct_size 0", f.struct_size = 0;
            code = halfstep_forecast_tensors(&f, "adamw", &matrix, 1));
    f.struct_size = sizeof f;
    REFUSED("halfstep_forecast.without_weights", "too large", EMPTY, ARGUMENT, "without_weights = 2",
            f.without_weights = 2;
            code = halfstep_forecast_tensors(&f, "adamw", &matrix, 1));
    f.without_weights = 0;
    TAKEN("halfstep_forecast.piece_bytes", "forgotten", "16 MiB", EMPTY, f.memory == f.stored && f.pieces == 1,
          code = halfstep_forecast_tensors(&f, "adamw", &matrix, 1));
    REFUSED("halfstep_forecast_tensors", "row_length forgotten", EMPTY, SHAPE, "row_length 0", matrix.row_length = 0;
            code = halfstep_forecast_tensors(&f, "adamw", &matrix, 1));
    REFUSED("halfstep_forecast_tensors", "gradient forgotten", EMPTY, ARGUMENT, "gradient is NULL",
            matrix.gradient = NULL;
            code = halfstep_forecast_tensors(&f, "adamw", &matrix, 1));
    REFUSED("halfstep_forecast_tensors", "count forgotten", EMPTY, RANGE, "count is 0",
            code = halfstep_forecast_tensors(&f, "adamw", &matrix, 0));
    TAKEN("halfstep_forecast_tensors", "row_length of a vector forgotten", "1", EMPTY, f.weights == 4 * N * 2,
          vector.row_length = 0;
          code = halfstep_forecast_tensors(&f, "adamw", &vector, 1));
}

static void test_states(void)
{
    static _Alignas(64) char memory[1 << 14];
    uint64_t bytes;
    TAKEN("halfstep_state_bytes", "too early", "0 bytes", EMPTY, bytes == 0, code = halfstep_state_bytes(o, &bytes));
    REFUSED("halfstep_allocate_states", "twice", PLACED, ORDER, "have memory already",
            code = halfstep_allocate_states(o));
    REFUSED("halfstep_allocate_states", "after halfstep_bind_states()", ADDED, ORDER, "have memory already",
            MUST(halfstep_bind_states(o, memory, sizeof memory));
            code = halfstep_allocate_states(o));
    REFUSED("halfstep_allocate_states", "after halfstep_bind_slot()", ADDED, ORDER, "have memory already",
            MUST(halfstep_bind_slot(o, 0, STATE, memory, memory + 512));
            code = halfstep_allocate_states(o));
    REFUSED("halfstep_bind_states", "twice", ADDED, ORDER, "have memory already",
            MUST(halfstep_bind_states(o, memory, sizeof memory));
            code = halfstep_bind_states(o, memory, sizeof memory));
    REFUSED("halfstep_bind_states", "after halfstep_allocate_states()", PLACED, ORDER, "have memory already",
            code = halfstep_bind_states(o, memory, sizeof memory));
    REFUSED("halfstep_bind_states", "NULL", ADDED, ARGUMENT, "memory for the states is NULL",
            code = halfstep_bind_states(o, NULL, sizeof memory));
    REFUSED("halfstep_bind_states", "too few bytes", ADDED, RANGE, "1 were given",
            code = halfstep_bind_states(o, memory, 1));
    TAKEN("halfstep_allocate_states", "too early: no tensor", "a process without tensors", GROUPED,
          halfstep_add_tensor(o, &matrix, &i) == ORDER, code = halfstep_allocate_states(o));
    TAKEN("halfstep_allocate_states", "after a failed halfstep_bind_states()", "the first time", ADDED, 1,
          EXPECT(halfstep_bind_states(o, memory, 1), RANGE);
          code = halfstep_allocate_states(o));
    REFUSED("halfstep_bind_slot", "no second plane", ADDED, ARGUMENT, "memory for exp_avg is NULL",
            code = halfstep_bind_slot(o, 0, STATE, memory, NULL));
    TAKEN("halfstep_bind_slot", "twice", "the last memory", PLACED, slot_info(o, 0, STATE).code == memory,
          MUST(halfstep_bind_slot(o, 0, STATE, memory + 1024, memory + 2048));
          code = halfstep_bind_slot(o, 0, STATE, memory, memory + 512));
    REFUSED("halfstep_write_slot", "too early", ADDED, ORDER, "exp_avg has no memory yet",
            code = halfstep_write_slot(o, 0, STATE, NULL, 0, ROWS, values[0]));
    REFUSED("halfstep_write_slot", "data forgotten", PLACED, ARGUMENT, "NULL data",
            code = halfstep_write_slot(o, 0, WEIGHT, NULL, 0, ROWS, values[0]));
    TAKEN("halfstep_write_slot", "data of a state", "not read", PLACED, weight[0][0] == 0.0f,
          code = halfstep_write_slot(o, 0, STATE, weight[0], 0, ROWS, values[0]));
    REFUSED("halfstep_write_weights", "a weight forgotten", PLACED, ARGUMENT, "'vector': NULL data",
            void *some[2] = {weight[0]};
            values[0][0] = 1; code = halfstep_write_weights(o, some, numbers));
    REFUSED("halfstep_write_weights", "too early: no tensor", GROUPED, ORDER, "no tensor that has a weight",
            code = halfstep_write_weights(o, weights, numbers));
    REFUSED("halfstep_write_bytes", "too early", ADDED, ORDER, "has no memory yet",
            code = halfstep_write_bytes(o, 0, STATE, 0, 0, 4, memory));
    REFUSED("halfstep_accumulate", "a misspelt format", ADDED, NAME, "unknown format 'fp32'",
            code = halfstep_accumulate(o, 0, values[0], "fp32", gradient[0], "f32", 1));
    TAKEN("halfstep_accumulate", "too early", "sums need no states", ADDED, values[0][0] == 1.0f,
          code = halfstep_accumulate(o, 0, values[0], "f32", gradient[0], "f32", 1));
    halfstep_record_places places = {.struct_size = sizeof places};
    REFUSED("halfstep_record_places.struct_size", "forgotten", ADDED, ARGUMENT,
            "halfstep_bind_record: wrong struct_size 0", places.struct_size = 0;
            code = halfstep_bind_record(o, 0, &places));
    places.struct_size = sizeof places;
    REFUSED("halfstep_record_places.reserved", "set", ADDED, ARGUMENT, "reserved must be 0", places.reserved = 1;
            code = halfstep_bind_record(o, 0, &places));
    places.reserved = 0;
    REFUSED("halfstep_record_places.scalar", "that the rule does not have", ADDED, ARGUMENT, "no scalar 0",
            places.scalar[0] = &number;
            code = halfstep_bind_record(o, 0, &places));
    places.scalar[0] = NULL;
    REFUSED("halfstep_record_places.grid", "that the state does not have", ADDED, ARGUMENT, "state 0 has no grid",
            places.grid[0] = &number;
            code = halfstep_bind_record(o, 0, &places));
    static const char *const copied[] = {"step", "state_steps", "full_steps", "writes"};
    places = (halfstep_record_places){.struct_size = sizeof places};
    for (size_t k = 0; k < COUNT(copied); k++)
        TAKEN(text_of("halfstep_record_places.%s", copied[k]), "forgotten", "no copy", ADDED, 1,
              code = halfstep_bind_record(o, 0, &places));
    TAKEN("halfstep_bind_record", "twice", "the last places", PLACED, number == 0,
          code = halfstep_bind_record(o, 0, &places));
}

static int refuse(void *host, int64_t piece, void *memory, uint64_t bytes)
{
    (void)host, (void)piece, (void)memory, (void)bytes;
    return HALFSTEP_ERROR_IO;
}
static int refuse_write(void *host, int64_t piece, const void *memory, uint64_t bytes)
{
    (void)host, (void)piece, (void)memory, (void)bytes;
    return HALFSTEP_ERROR_IO;
}
static int succeed(void *host) { return host != NULL; }
static int flush(void *host, void *const *some) { return host != NULL || (some && !some[0]); }

static void test_storage(void)
{
    const halfstep_storage good = {
        .struct_size = sizeof good, .read = refuse, .write = refuse_write, .wait = succeed, .flush = flush};
    halfstep_storage s;
    REFUSED("halfstep_storage.struct_size", "forgotten", ADDED, ARGUMENT, "halfstep_bind_storage: wrong struct_size 0",
            s = good;
            s.struct_size = 0; code = halfstep_bind_storage(o, &s));
    REFUSED("halfstep_storage.read", "forgotten", ADDED, ARGUMENT, "read, write, wait and flush", s = good;
            s.read = NULL; code = halfstep_bind_storage(o, &s));
    REFUSED("halfstep_storage.write", "forgotten", ADDED, ARGUMENT, "read, write, wait and flush", s = good;
            s.write = NULL; code = halfstep_bind_storage(o, &s));
    REFUSED("halfstep_storage.wait", "forgotten", ADDED, ARGUMENT, "read, write, wait and flush", s = good;
            s.wait = NULL; code = halfstep_bind_storage(o, &s));
    REFUSED("halfstep_storage.flush", "forgotten", ADDED, ARGUMENT, "read, write, wait and flush", s = good;
            s.flush = NULL; code = halfstep_bind_storage(o, &s));
    REFUSED("halfstep_storage.memory", "too little", ADDED, RANGE, "memory", s = good; s.memory = 1;
            code = halfstep_bind_storage(o, &s));
    static const char *const may_be_zero[] = {"weights", "host", "piece_bytes", "why", "begin"};
    for (size_t k = 0; k < COUNT(may_be_zero); k++)
        TAKEN(text_of("halfstep_storage.%s", may_be_zero[k]), "forgotten", "its default", ADDED, 1,
              code = halfstep_bind_storage(o, &good));
    TAKEN("halfstep_bind_storage", "twice", "the last storage", ADDED, 1, MUST(halfstep_bind_storage(o, &good));
          code = halfstep_bind_storage(o, &good));
    REFUSED("halfstep_write_initial", "too early", ADDED, ORDER, "there is no storage; bind it first",
            code = halfstep_write_initial(o, weights));
    REFUSED("halfstep_allocate_states", "with a storage", ADDED, ORDER, "the states are in storage",
            MUST(halfstep_bind_storage(o, &good));
            code = halfstep_allocate_states(o));
    TAKEN("halfstep_flush", "without a storage", "nothing", ADDED, 1, code = halfstep_flush(o, weights));
}

static void test_steps(void)
{
    static const struct {
        const char *of;
        int (*make)(halfstep_optimizer *optimizer, const halfstep_call *call);
        int32_t kind, micro, has_statistics;
    } calls[] = {{"halfstep_run", halfstep_run, HALFSTEP_CALL_STEP, 0, 0},
                 {"halfstep_run", halfstep_run, HALFSTEP_CALL_STEP, 1, 0},
                 {"halfstep_run", halfstep_run, HALFSTEP_CALL_TENSOR, 0, 0},
                 {"halfstep_run", halfstep_run, HALFSTEP_CALL_ROUND, 0, 0},
                 {"halfstep_run_begin", halfstep_run_begin, HALFSTEP_CALL_STEP, 0, 1},
                 {"halfstep_run_begin", halfstep_run_begin, HALFSTEP_CALL_ROUND, 0, 1},
                 {"halfstep_run_norms", halfstep_run_norms, HALFSTEP_CALL_STEP, 0, 1},
                 {"halfstep_run_finish", halfstep_run_finish, HALFSTEP_CALL_STEP, 0, 1},
                 {"halfstep_run_finish", halfstep_run_finish, HALFSTEP_CALL_ROUND, 0, 1}};
    for (int stage = EMPTY; stage < PLACED; stage++) {
        const char *says = stage < ADDED ? "there is no tensor to step" : "the states have no memory yet";
        REFUSED("halfstep_step", "too early", stage, ORDER, says, code = halfstep_step(o, weights, gradients));
        REFUSED("halfstep_step", "too early, without arrays", stage, ORDER, says, code = halfstep_step(o, NULL, NULL));
        for (size_t k = 0; k < COUNT(calls); k++)
            REFUSED(calls[k].of, "too early", stage, ORDER, says,
                    const halfstep_call call = {.struct_size = sizeof call,
                                                .kind = calls[k].kind,
                                                .micro = calls[k].micro,
                                                .weights = weights,
                                                .gradients = calls[k].kind == HALFSTEP_CALL_ROUND ? NULL : gradients,
                                                .statistics = calls[k].has_statistics ? statistics : NULL};
                    code = calls[k].make(o, &call); uint64_t steps = 0;
                    if (stage > EMPTY) MUST(get_group_steps(o, g, &steps));
                    CHECK(!steps, "a refused step has counted"));
    }
    REFUSED("halfstep_step", "no gradients", PLACED, ARGUMENT, "the array of gradients is NULL",
            code = halfstep_step(o, weights, NULL));
    REFUSED("halfstep_step", "no weights", PLACED, ARGUMENT, "the array of weights is NULL",
            code = halfstep_step(o, NULL, gradients));
    REFUSED("halfstep_step", "a weight forgotten", PLACED, ARGUMENT, "'vector' has a gradient but NULL weights",
            void *some[2] = {weight[0]};
            code = halfstep_step(o, some, gradients));
    TAKEN("halfstep_step", "a gradient forgotten", "the tensor is left alone", PLACED,
          weight[0][0] != 0.0f && weight[1][0] == 0.0f, const void *some[2] = {gradient[0]};
          code = halfstep_step(o, weights, some));
    REFUSED("halfstep_step", "a gradient forgotten, missing = error", PLACED, ARGUMENT, "'vector' has no gradient",
            MUST(halfstep_set_choice(o, ALL_GROUPS, "missing", "error"));
            const void *some[2] = {gradient[0]}; code = halfstep_step(o, weights, some));
    REFUSED("halfstep_call.struct_size", "forgotten", PLACED, ARGUMENT, "halfstep_run: wrong struct_size 0",
            const halfstep_call bad = {.weights = weights, .gradients = gradients};
            code = halfstep_run(o, &bad));
    REFUSED("halfstep_call.kind", "forgotten", PLACED, ARGUMENT, "tensor = 1, but kind is 0",
            CALL(halfstep_run, .tensor = 1, .weights = weights + 1, .gradients = gradients + 1));
    REFUSED("halfstep_call.kind", "misspelt", PLACED, ARGUMENT, "unknown kind 3",
            CALL(halfstep_run, .kind = 3, .weights = weights, .gradients = gradients));
    TAKEN("halfstep_call.tensor", "forgotten", "the first tensor", PLACED, weight[0][0] != 0.0f && weight[1][0] == 0.0f,
          CALL(halfstep_run, .kind = HALFSTEP_CALL_TENSOR, .weights = weights, .gradients = gradients));
    REFUSED("halfstep_call.tensor", "beyond the last", PLACED, ARGUMENT, "there is no tensor 2",
            CALL(halfstep_run, .kind = HALFSTEP_CALL_TENSOR, .tensor = 2, .weights = weights, .gradients = gradients));
    REFUSED("halfstep_call.micro", "of a round", PLACED, ARGUMENT, "micro = 1",
            CALL(halfstep_run, .kind = HALFSTEP_CALL_ROUND, .micro = 1));
    REFUSED("halfstep_call.weights", "forgotten", PLACED, ARGUMENT,
            "the array of weights is NULL; give an array of pointers, "
            "one for each tensor",
            CALL(halfstep_run, .gradients = gradients));
    REFUSED("halfstep_call.weights", "forgotten, of one tensor", PLACED, ARGUMENT, "one for the tensor",
            CALL(halfstep_run, .kind = HALFSTEP_CALL_TENSOR, .gradients = gradients));
    TAKEN("halfstep_call.weights", "of a micro-step", "not read", PLACED, weight[0][0] == 0.0f,
          CALL(halfstep_run, .micro = 1, .weights = weights, .gradients = gradients));
    REFUSED("halfstep_call.gradients", "forgotten", PLACED, ARGUMENT, "the array of gradients is NULL",
            CALL(halfstep_run, .weights = weights));
    REFUSED("halfstep_call.gradients", "of a round", PLACED, ARGUMENT, "the end of a round reads no gradients",
            CALL(halfstep_run, .kind = HALFSTEP_CALL_ROUND, .gradients = gradients));
    REFUSED("halfstep_call.statistics", "given to a whole call", PLACED, ARGUMENT, "statistics must be NULL",
            CALL(halfstep_run, .weights = weights, .gradients = gradients, .statistics = statistics));
    REFUSED("halfstep_call.statistics", "forgotten", PLACED, ARGUMENT, "statistics must not be NULL",
            CALL(halfstep_run_begin, .gradients = gradients));
    REFUSED("halfstep_call.ahead", "of a round", PLACED, ARGUMENT, "ahead must be NULL for a round",
            CALL(halfstep_run, .kind = HALFSTEP_CALL_ROUND, .ahead = place));
    REFUSED(
        "halfstep_ahead.states", "forgotten", PLACED, ARGUMENT, "NULL memory for a result of tensor 'matrix'",
        CALL(halfstep_run, .kind = HALFSTEP_CALL_TENSOR, .weights = weights, .gradients = gradients, .ahead = place));
    TAKEN("halfstep_ahead.weight", "forgotten, of a whole step", "a plain step", PLACED, weight[0][0] != 0.0f,
          CALL(halfstep_run, .weights = weights, .gradients = gradients, .ahead = place));
}

static void test_records(void)
{
    REFUSED("halfstep_record.struct_size", "forgotten", PLACED, ARGUMENT, "halfstep_set_record: wrong struct_size 0",
            const halfstep_record bad = {.kind = HALFSTEP_RECORD_TENSOR};
            code = halfstep_set_record(o, &bad));
    REFUSED("halfstep_record.kind", "misspelt", PLACED, ARGUMENT, "unknown kind 9", RECORD(.kind = 9));
    REFUSED("halfstep_record.kind", "forgotten", PLACED, ARGUMENT,
            "a field of another kind, is set, but kind is 0 (optimizer)", RECORD(.state_steps = 5));
    TAKEN("halfstep_record.index", "forgotten", "the first tensor", PLACED, counters_of(o, 0).state_steps == 5,
          RECORD(.kind = HALFSTEP_RECORD_TENSOR, .state_steps = 5, .grid = {0, 1}));
    REFUSED("halfstep_record.grid", "forgotten", PLACED, RANGE, "exp_avg_sq.grid = 0 is not",
            RECORD(.kind = HALFSTEP_RECORD_TENSOR, .state_steps = 5));
    REFUSED("halfstep_record.index", "beyond the last", PLACED, ARGUMENT, "there is no group 1",
            RECORD(.kind = HALFSTEP_RECORD_GROUP, .index = 1));
    /* Each field belongs to one kind, and is refused in a record of another. */
    static const struct {
        const char *name;
        int kind;
        size_t offset;
    } fields[] = {{"reserved", -1, offsetof(halfstep_record, reserved)},
                  {"seed", HALFSTEP_RECORD_OPTIMIZER, offsetof(halfstep_record, seed)},
                  {"skipped_steps", HALFSTEP_RECORD_OPTIMIZER, offsetof(halfstep_record, skipped_steps)},
                  {"gradient_norm", HALFSTEP_RECORD_OPTIMIZER, offsetof(halfstep_record, gradient_norm)},
                  {"steps", HALFSTEP_RECORD_GROUP, offsetof(halfstep_record, steps)},
                  {"id", HALFSTEP_RECORD_TENSOR, offsetof(halfstep_record, id)},
                  {"state_steps", HALFSTEP_RECORD_TENSOR, offsetof(halfstep_record, state_steps)},
                  {"full_steps", HALFSTEP_RECORD_TENSOR, offsetof(halfstep_record, full_steps)},
                  {"writes", HALFSTEP_RECORD_TENSOR, offsetof(halfstep_record, writes)},
                  {"scalar", HALFSTEP_RECORD_TENSOR, offsetof(halfstep_record, scalar)},
                  {"grid", HALFSTEP_RECORD_TENSOR, offsetof(halfstep_record, grid)}};
    for (size_t f = 0; f < COUNT(fields); f++)
        for (int kind = 0; kind < 3; kind++)
            if (kind != fields[f].kind)
                REFUSED(text_of("halfstep_record.%s", fields[f].name), "of another kind", PLACED, ARGUMENT,
                        "a field of another kind, is set", halfstep_record r = {.struct_size = sizeof r, .kind = kind};
                        ((char *)&r)[fields[f].offset] = 1; code = halfstep_set_record(o, &r));
    TAKEN("halfstep_set_record", "too early", "counters need no states", ADDED, counters_of(o, 1).state_steps == 5,
          RECORD(.kind = HALFSTEP_RECORD_TENSOR, .index = 1, .state_steps = 5));
}

/* ---- halfstep_io ------------------------------------------------------------------------------------------------- */

static const char *at(const char *name) { return path_in(scratch, name); }

static halfstep_checkpoint_save *save;
static halfstep_checkpoint *checkpoint;
static halfstep_store *store;

#define SAVE_WITH(...)                                                                                \
    const halfstep_save_options options = {.struct_size = sizeof options, .no_sync = 1, __VA_ARGS__}; \
    code = halfstep_begin_checkpoint(&save, at("run"), &options, TEXT)
/* Saves the optimizer at a step, and forgets the directory that was there. */
#define SAVED(number)                                                                                                 \
    remove_tree(at("run"));                                                                                           \
    MUST(halfstep_begin_checkpoint(                                                                                   \
        &save, at("run"),                                                                                             \
        &(halfstep_save_options){.struct_size = sizeof(halfstep_save_options), .step = number, .no_sync = 1}, TEXT)); \
    MUST(halfstep_save_optimizer(save, o, weights, NULL, TEXT));                                                      \
    MUST(halfstep_commit_checkpoint(save, TEXT))
#define FILE_OPTIONS(...) const halfstep_file_options files = {.struct_size = sizeof files, __VA_ARGS__}
#define LOADED                                                            \
    MUST(halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT));   \
    code = halfstep_load_optimizer(checkpoint, o, weights, &files, TEXT); \
    halfstep_close_checkpoint(checkpoint)

static void test_checkpoints(void)
{
    REFUSED("halfstep_save_options.struct_size", "forgotten", PLACED, ARGUMENT, "wrong struct_size",
            const halfstep_save_options bad = {.step = 3};
            code = halfstep_begin_checkpoint(&save, at("run"), &bad, TEXT));
    REFUSED("halfstep_save_options.newest", "without prune_if", PLACED, ARGUMENT, "newest counts only with prune_if",
            SAVE_WITH(.newest = 3));
    TAKEN("halfstep_save_options.keep", "forgotten", "1", PLACED, access(at("run/checkpoint-1"), F_OK), SAVED(1);
          SAVE_WITH(.step = 2); MUST(halfstep_save_value(save, "k", "v", TEXT));
          code = halfstep_commit_checkpoint(save, TEXT));
    TAKEN("halfstep_save_options.step", "forgotten", "step 0", PLACED, !access(at("run/checkpoint-0"), F_OK),
          remove_tree(at("run"));
          SAVE_WITH(.keep = 2); MUST(halfstep_save_value(save, "k", "v", TEXT));
          code = halfstep_commit_checkpoint(save, TEXT));
    TAKEN("halfstep_save_options.step", "twice", "two checkpoints", PLACED, !access(at("run/checkpoint-0-2"), F_OK),
          SAVE_WITH(.keep = 2);
          MUST(halfstep_save_value(save, "k", "v", TEXT)); code = halfstep_commit_checkpoint(save, TEXT));
    TAKEN("halfstep_save_options.no_links", "forgotten", "links", PLACED, !access(at("run/model.safetensors"), F_OK),
          SAVED(1);
          code = OK);
    TAKEN("halfstep_save_options.no_sync", "forgotten", "a durable save", PLACED, !access(at("run/checkpoint-3"), F_OK),
          const halfstep_save_options options = {.struct_size = sizeof options, .step = 3};
          MUST(halfstep_begin_checkpoint(&save, at("run"), &options, TEXT));
          MUST(halfstep_save_value(save, "k", "v", TEXT)); code = halfstep_commit_checkpoint(save, TEXT));
    TAKEN("halfstep_save_options.prune_if", "forgotten", "a higher step stays", PLACED,
          !access(at("run/checkpoint-3"), F_OK) && strstr(message, "such as checkpoint-3,"), SAVE_WITH(.step = 2);
          MUST(halfstep_save_value(save, "k", "v", TEXT)); code = halfstep_commit_checkpoint(save, TEXT));
    REFUSED("halfstep_begin_checkpoint", "twice", PLACED, IO, "another save there is under way",
            halfstep_checkpoint_save * first;
            remove_tree(at("run")); MUST(halfstep_begin_checkpoint(&first, at("run"), NULL, TEXT));
            code = halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT);
            CHECK(!save, "a handle in spite of the error"); halfstep_abandon_checkpoint(first));
    REFUSED(
        "halfstep_commit_checkpoint", "too early: nothing saved", PLACED, ORDER, "has no file and no value", SAVED(4);
        MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT)); code = halfstep_commit_checkpoint(save, TEXT);
        CHECK(!access(at("run/checkpoint-4/model.safetensors"), F_OK), "the checkpoint of before is gone"));
    REFUSED("halfstep_save_file", "twice", PLACED, DUPLICATE, "two files are named \"a\"", remove_tree(at("run"));
            MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
            MUST(halfstep_save_file(save, "a", "x", 1, TEXT)); code = halfstep_save_file(save, "a", "x", 1, TEXT);
            halfstep_abandon_checkpoint(save));
    REFUSED("halfstep_save_optimizer", "twice", PLACED, DUPLICATE, "optimizer_file and model_file",
            remove_tree(at("run"));
            MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
            MUST(halfstep_save_optimizer(save, o, weights, NULL, TEXT));
            code = halfstep_save_optimizer(save, o, weights, NULL, TEXT); halfstep_abandon_checkpoint(save));
    REFUSED("halfstep_save_optimizer", "too early", ADDED, ORDER, "has no memory yet", remove_tree(at("run"));
            MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
            code = halfstep_save_optimizer(save, o, weights, NULL, TEXT); halfstep_abandon_checkpoint(save));
    REFUSED("halfstep_save_optimizer", "a weight forgotten", PLACED, ARGUMENT, "\"vector\": its weight is NULL",
            remove_tree(at("run"));
            MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT)); void *some[2] = {weight[0]};
            code = halfstep_save_optimizer(save, o, some, NULL, TEXT); halfstep_abandon_checkpoint(save));
    TAKEN("halfstep_save_value", "twice", "the last value", PLACED, 1, remove_tree(at("run"));
          MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
          MUST(halfstep_save_value(save, "k", "1", TEXT)); code = halfstep_save_value(save, "k", "2", TEXT);
          MUST(halfstep_commit_checkpoint(save, TEXT));
          MUST(halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT));
          EQUAL_TEXT(halfstep_checkpoint_value(checkpoint, "k"), "2"); halfstep_close_checkpoint(checkpoint));
    TAKEN("halfstep_abandon_checkpoint", "NULL, after a failed begin", "nothing", PLACED, 1,
          halfstep_abandon_checkpoint(NULL);
          code = OK);
    REFUSED("halfstep_open_options.struct_size", "forgotten", PLACED, ARGUMENT, "wrong struct_size", SAVED(0);
            const halfstep_open_options options = {.fallback = 1};
            code = halfstep_open_checkpoint(&checkpoint, at("run"), &options, TEXT));
    const halfstep_open_options plain = {.struct_size = sizeof plain};
    REFUSED("halfstep_open_options.fallback", "forgotten, and a file is damaged", PLACED, FORMAT,
            "is corrupt: it has 3", SAVED(0);
            put_file(at("run/checkpoint-0/model.safetensors"), "bad", 3);
            code = halfstep_open_checkpoint(&checkpoint, at("run"), &plain, TEXT));
    REFUSED("halfstep_open_options.skip_contents", "forgotten, and a sum is wrong", PLACED, FORMAT, "its checksum is",
            SAVED(0);
            struct stat status; stat(at("run/checkpoint-0/model.safetensors"), &status);
            put_file(at("run/checkpoint-0/model.safetensors"), listed, (size_t)status.st_size);
            code = halfstep_open_checkpoint(&checkpoint, at("run"), &plain, TEXT));
    REFUSED("halfstep_open_checkpoint", "too early", PLACED, NAME, "no checkpoint in", remove_tree(at("run"));
            code = halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT);
            CHECK(!checkpoint, "a handle in spite of the error"));
    REFUSED("halfstep_open_checkpoint", "the pointer is lost", PLACED, FORMAT, "there is another checkpoint", SAVED(1);
            const halfstep_save_options two = {.struct_size = sizeof two, .step = 2, .keep = 2};
            MUST(halfstep_begin_checkpoint(&save, at("run"), &two, TEXT));
            MUST(halfstep_save_optimizer(save, o, weights, NULL, TEXT)); MUST(halfstep_commit_checkpoint(save, TEXT));
            unlink(at("run/manifest.json")); code = halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT));
    TAKEN("halfstep_close_checkpoint", "NULL, after a failed open", "nothing", PLACED, 1,
          halfstep_close_checkpoint(NULL);
          code = OK);
    REFUSED("halfstep_file_options.struct_size", "forgotten", PLACED, ARGUMENT, "wrong struct_size", SAVED(0);
            const halfstep_file_options files = {.subset = 1}; LOADED);
    REFUSED("halfstep_file_options.settings", "misspelt", PLACED, ARGUMENT, "settings must be 0 or 1", SAVED(0);
            FILE_OPTIONS(.settings = 2); LOADED);
    TAKEN("halfstep_file_options.settings", "forgotten", "the file's", PLACED, get_hyper(o, g, "lr") == 0.5,
          MUST(halfstep_set_hyper(o, g, "lr", 0.5));
          SAVED(0); MUST(halfstep_set_hyper(o, g, "lr", 0.25)); FILE_OPTIONS(); LOADED);
    static const char *const misspelt[] = {"total_steps", "total_step", NULL}, *const lr[] = {"lr", NULL};
    for (uint32_t settings = 0; settings < 2; settings++)
        REFUSED("halfstep_file_options.leave", "misspelt", PLACED, ARGUMENT, "leave names \"total_step\"", SAVED(0);
                FILE_OPTIONS(.leave = misspelt, .settings = settings); LOADED);
    TAKEN("halfstep_file_options.leave", "a name", "the value here", PLACED, get_hyper(o, g, "lr") == 0.25,
          MUST(halfstep_set_hyper(o, g, "lr", 0.5));
          SAVED(0); MUST(halfstep_set_hyper(o, g, "lr", 0.25)); FILE_OPTIONS(.leave = lr); LOADED);
    REFUSED("halfstep_file_options.subset", "forgotten", PLACED, MISMATCH,
            "\"vector\" that this optimizer does not have", SAVED(0);
            halfstep_destroy(o); open_scene(GROUPED); MUST(halfstep_add_tensor(o, &matrix, &i));
            MUST(halfstep_allocate_states(o)); FILE_OPTIONS(); LOADED);
    REFUSED("halfstep_file_options.reserved", "set", PLACED, ARGUMENT, "reserved 0", SAVED(0);
            FILE_OPTIONS(.reserved = 1); LOADED);
    static const uint64_t other_shape[] = {3, COLUMNS};
    static const uint64_t *const shapes[] = {other_shape, NULL};
    REFUSED("halfstep_file_options.shapes", "of another tensor", PLACED, SHAPE,
            "\"matrix\": its shape does not give 2 rows", FILE_OPTIONS(.shapes = shapes);
            code = halfstep_write_optimizer(at("file"), o, weights, &files, TEXT));
    REFUSED("halfstep_file_options.model_file", "that of the optimizer", PLACED, DUPLICATE, "give one another name",
            remove_tree(at("run"));
            MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
            FILE_OPTIONS(.model_file = "optimizer.safetensors");
            code = halfstep_save_optimizer(save, o, weights, &files, TEXT); halfstep_abandon_checkpoint(save));
    REFUSED("halfstep_file_options.model_file", "misspelt", PLACED, MISMATCH, "has no modl.safetensors", SAVED(0);
            FILE_OPTIONS(.model_file = "modl.safetensors"); LOADED);
    REFUSED("halfstep_file_options.optimizer_file", "misspelt", PLACED, MISMATCH, "has no optim.safetensors", SAVED(0);
            FILE_OPTIONS(.optimizer_file = "optim.safetensors"); LOADED);
    REFUSED("halfstep_write_optimizer", "with names of a checkpoint's files", PLACED, ARGUMENT, "leave them NULL",
            FILE_OPTIONS(.model_file = "m");
            code = halfstep_write_optimizer(at("file"), o, weights, &files, TEXT);
            CHECK(access(at("file"), F_OK), "a refused call has written a file"));
    REFUSED("halfstep_read_optimizer", "too early", ADDED, ORDER, "has no memory yet", halfstep_destroy(o);
            open_scene(PLACED); MUST(halfstep_write_optimizer(at("file"), o, weights, NULL, TEXT)); halfstep_destroy(o);
            open_scene(ADDED); code = halfstep_read_optimizer(at("file"), o, weights, NULL, TEXT); unlink(at("file")));
    REFUSED("halfstep_load_optimizer", "too early", PLACED, ORDER, "has no memory yet", SAVED(0); halfstep_destroy(o);
            open_scene(ADDED); FILE_OPTIONS(); LOADED);
    TAKEN("halfstep_load_optimizer", "too late: after steps", "the file's state", PLACED,
          counters_of(o, 0).state_steps == 0, SAVED(0);
          MUST(halfstep_step(o, weights, gradients)); FILE_OPTIONS(); LOADED);
}

static void test_stores(void)
{
    halfstep_store_options options = {.struct_size = sizeof options};
#define STORED code = halfstep_store_create(at("states"), o, weights, &options, &store, TEXT)
    REFUSED("halfstep_store_options.struct_size", "forgotten", ADDED, ARGUMENT, "wrong struct_size",
            options.struct_size = 0;
            STORED);
    options.struct_size = sizeof options;
    REFUSED("halfstep_store_options.without_weights", "misspelt", ADDED, ARGUMENT, "without_weights",
            options.without_weights = 2;
            STORED);
    options.without_weights = 0;
    REFUSED("halfstep_store_options.buffered", "misspelt", ADDED, ARGUMENT, "buffered", options.buffered = 2; STORED);
    options.buffered = 0;
    REFUSED("halfstep_store_options.reserved", "set", ADDED, ARGUMENT, "reserved 0", options.reserved = 1; STORED);
    options.reserved = 0;
    REFUSED("halfstep_store_options.memory", "too little", ADDED, RANGE, "memory", options.memory = 1; STORED);
    options.memory = 0;
    TAKEN("halfstep_store_options.piece_bytes", "forgotten", "16 MiB", ADDED, 1, STORED; halfstep_store_close(store);
          store = NULL; unlink(at("states")));
    REFUSED("halfstep_store_create", "too early: no tensor", GROUPED, ORDER, "has no tensor; add all of them first",
            STORED);
    REFUSED("halfstep_store_create", "too late: the states have memory", PLACED, ORDER, "have memory already", STORED;
            CHECK(access(at("states"), F_OK) && slot_info(o, 0, STATE).code, "a refused call has done something"));
    REFUSED("halfstep_store_open", "too early: no file", ADDED, IO, "states",
            code = halfstep_store_open(at("states"), o, weights, NULL, &store, TEXT);
            CHECK(!store, "a handle in spite of the error"));
    REFUSED("halfstep_store_open", "too late: the states have memory", PLACED, ORDER, "have memory already",
            halfstep_destroy(o);
            open_scene(ADDED); MUST(halfstep_store_create(at("states"), o, weights, NULL, &store, TEXT));
            halfstep_store_close(store); halfstep_destroy(o); open_scene(PLACED);
            code = halfstep_store_open(at("states"), o, weights, NULL, &store, TEXT);
            CHECK(slot_info(o, 0, STATE).code != NULL, "a refused call has taken the memory away"));
    REFUSED("halfstep_store_create", "twice", ADDED, IO, "states", STORED);
    REFUSED("halfstep_store_bind", "to a handle whose states have memory", ADDED, ORDER, "have memory already",
            MUST(halfstep_store_open(at("states"), o, weights, NULL, &store, TEXT));
            halfstep_optimizer *first = o; open_scene(PLACED); code = halfstep_store_bind(store, o, TEXT);
            halfstep_store_close(store); halfstep_destroy(first));
    REFUSED("halfstep_store_set_value", "not UTF-8", ADDED, NAME, "UTF-8",
            MUST(halfstep_store_open(at("states"), o, weights, NULL, &store, TEXT));
            code = halfstep_store_set_value(store, "\xff", "v", TEXT); halfstep_store_close(store));
    TAKEN("halfstep_store_close", "NULL, after a failed open", "nothing", ADDED, 1, halfstep_store_close(NULL);
          code = OK);
}

static void test_safetensors(void)
{
    halfstep_safetensors_writer *writer;
    halfstep_safetensors *file = (void *)weight;
    const uint64_t three = 3;
#define WRITER MUST(halfstep_create_safetensors_writer(&writer))
#define DECLARED(name, dtype, data) halfstep_declare_safetensor(writer, name, dtype, 1, &three, data, TEXT)
    REFUSED("halfstep_declare_safetensor", "a misspelt dtype", EMPTY, NAME, "unknown dtype \"f32\"", WRITER;
            code = DECLARED("a", "f32", weight); halfstep_destroy_safetensors_writer(writer));
    REFUSED("halfstep_declare_safetensor", "twice", EMPTY, DUPLICATE, "two tensors are named \"a\"", WRITER;
            MUST(DECLARED("a", "F32", weight)); MUST(DECLARED("a", "F32", weight));
            code = halfstep_write_safetensors(writer, at("file"), NULL, NULL, TEXT);
            halfstep_destroy_safetensors_writer(writer));
    TAKEN("halfstep_create_safetensors_writer", "twice", "two writers", EMPTY, 1, halfstep_safetensors_writer * first;
          MUST(halfstep_create_safetensors_writer(&first)); code = halfstep_create_safetensors_writer(&writer);
          halfstep_destroy_safetensors_writer(first); halfstep_destroy_safetensors_writer(writer));
    REFUSED("halfstep_write_safetensors", "neither data nor fill", EMPTY, ARGUMENT, "\"a\"", WRITER;
            MUST(DECLARED("a", "F32", NULL)); code = halfstep_write_safetensors(writer, at("file"), NULL, NULL, TEXT);
            CHECK(access(at("file"), F_OK), "a refused call has written a file");
            halfstep_destroy_safetensors_writer(writer));
    REFUSED("halfstep_save_safetensors", "neither data nor fill", EMPTY, ARGUMENT, "\"a\"", WRITER;
            MUST(DECLARED("a", "F32", NULL)); remove_tree(at("run"));
            MUST(halfstep_begin_checkpoint(&save, at("run"), NULL, TEXT));
            code = halfstep_save_safetensors(save, "a", writer, NULL, NULL, TEXT); halfstep_abandon_checkpoint(save);
            halfstep_destroy_safetensors_writer(writer));
    TAKEN("halfstep_declare_safetensors_metadata", "twice", "the last value", EMPTY, 1, WRITER;
          MUST(halfstep_declare_safetensors_metadata(writer, "k", "1", TEXT));
          code = halfstep_declare_safetensors_metadata(writer, "k", "2", TEXT);
          halfstep_destroy_safetensors_writer(writer));
    REFUSED("halfstep_open_safetensors", "too early", EMPTY, IO, "file",
            code = halfstep_open_safetensors(&file, at("file"), TEXT);
            CHECK(!file, "a handle in spite of the error"));
    REFUSED("halfstep_write_file_atomic", "data forgotten", EMPTY, ARGUMENT, "NULL argument",
            code = halfstep_write_file_atomic(at("file"), NULL, 1, TEXT));
}

/* ---- Functions that tell something ------------------------------------------------------------------------------- */

static void test_questions(void)
{
    char text[64];
    uint64_t bytes;
    uint32_t word;
    uint16_t half = 0;
    SIZED(halfstep_rule_info, rule);
    SIZED(halfstep_format_info, format);
    SIZED(halfstep_hyper_info, hyper);
    SIZED(halfstep_slot_info, slot);
    SIZED(halfstep_piece, piece);
    SIZED(halfstep_record, record);
    SIZED(halfstep_device_info, device);
    const halfstep_call step = {.struct_size = sizeof step}, other = {.struct_size = sizeof other, .kind = 3};
    REFUSED("halfstep_create", "the optimizer forgotten", EMPTY, ARGUMENT, "halfstep_create: optimizer is NULL",
            code = halfstep_create(NULL, NULL));
    TAKEN("halfstep_create", "twice", "two optimizers", EMPTY, 1, halfstep_optimizer * second;
          code = halfstep_create(NULL, &second); halfstep_destroy(second));
    ANSWERS("halfstep_destroy", "NULL, after a failed create", "nothing", EMPTY, (halfstep_destroy(NULL), 1));
    ANSWERS("halfstep_error_detail", "too early", "no text", EMPTY, !*halfstep_error_detail(o));
    ANSWERS("halfstep_strerror", "an unknown code", "a text all the same", EMPTY, *halfstep_strerror(-9999));
    ANSWERS("halfstep_group_count", "too early", "0", EMPTY, halfstep_group_count(o) == 0);
    ANSWERS("halfstep_tensor_count", "too early", "0", GROUPED, halfstep_tensor_count(o) == 0);
    ANSWERS("halfstep_tensor_find", "misspelt", "-1", ADDED, halfstep_tensor_find(o, "matrx") == -1);
    ANSWERS("halfstep_rule_find", "misspelt", "-1", EMPTY, halfstep_rule_find("adamx") == -1);
    ANSWERS("halfstep_format_find", "misspelt", "-1", EMPTY, halfstep_format_find("fp32") == -1);
    ANSWERS("halfstep_choice_value", "misspelt", "NULL", EMPTY, !halfstep_choice_value("schedul", 0));
    ANSWERS("halfstep_get_choice", "misspelt", "NULL", GROUPED, !halfstep_get_choice(o, g, "schedul"));
    ANSWERS("halfstep_get_choice", "too early", "NULL", EMPTY, !halfstep_get_choice(o, 0, "schedule"));
    ANSWERS("halfstep_name_id", "empty", "the hash of no byte", EMPTY, halfstep_name_id("") != halfstep_name_id("a"));
    ANSWERS("halfstep_isa_name", "beyond the last", "NULL", EMPTY, !halfstep_isa_name(99));
    ANSWERS("halfstep_isa_available", "beyond the last", "0", EMPTY, !halfstep_isa_available(99));
    ANSWERS("halfstep_cpu_features", "no room", "nothing is written", EMPTY, (halfstep_cpu_features(text, 0), 1));
    ANSWERS("halfstep_skipped_steps", "too early", "0", EMPTY, halfstep_skipped_steps(o) == 0);
    ANSWERS("halfstep_redone_steps", "too early", "0", EMPTY, halfstep_redone_steps(o) == 0);
    ANSWERS("halfstep_gradient_norm", "too early", "0", EMPTY, halfstep_gradient_norm(o) == 0);
    ANSWERS("halfstep_nonfinite_tensor", "too early", "no name", EMPTY, !*halfstep_nonfinite_tensor(o, NULL));
    ANSWERS("halfstep_piece_count", "too early", "0", GROUPED, halfstep_piece_count(o) == 0);
    ANSWERS("halfstep_statistics_count", "of an unknown kind", "0", PLACED, halfstep_statistics_count(o, &other) == 0);
    ANSWERS("halfstep_statistics_count", "too early", "room for a step without tensors", EMPTY,
            halfstep_statistics_count(o, &step) > 0);
    ANSWERS("halfstep_norms_offset", "of an unknown kind", "0", PLACED, halfstep_norms_offset(o, &other) == 0);
    ANSWERS("halfstep_device_release", "NULL", "nothing", EMPTY, (halfstep_device_release(o, NULL), 1));
    TAKEN("halfstep_device_allocate", "0 bytes", "memory to release", EMPTY, 1, void *memory;
          code = halfstep_device_allocate(o, 0, &memory); halfstep_device_release(o, memory));
    REFUSED("halfstep_device_copy", "a source forgotten", EMPTY, ARGUMENT, "halfstep_device_copy: from is NULL",
            code = halfstep_device_copy(o, text, NULL, 4));
    REFUSED("halfstep_get_device_info", "misspelt", EMPTY, NAME, "unknown device 'gpu'",
            code = halfstep_get_device_info("gpu", &device));
    REFUSED("halfstep_get_device_info", "the processor", EMPTY, NAME, "the processor is not described here",
            code = halfstep_get_device_info("cpu", &device));
    REFUSED("halfstep_get_rule_info", "no such row", EMPTY, ARGUMENT, "there is no row -1",
            code = halfstep_get_rule_info(halfstep_rule_find("adamx"), &rule));
    REFUSED("halfstep_get_format_info", "no such row", EMPTY, ARGUMENT, "there is no row -1",
            code = halfstep_get_format_info(halfstep_format_find("fp32"), &format));
    REFUSED("halfstep_get_hyper_info", "beyond the last", EMPTY, ARGUMENT, "there is no row 999",
            code = halfstep_get_hyper_info(0, 999, &hyper));
    REFUSED("halfstep_get_hyper_info", "struct_size forgotten", EMPTY, ARGUMENT, "wrong struct_size 0",
            hyper.struct_size = 0;
            code = halfstep_get_hyper_info(0, 0, &hyper));
    REFUSED("halfstep_recipe_full", "misspelt", EMPTY, NAME, "unknown format 'fp32'",
            code = halfstep_recipe_full("adamw/fp32", text, sizeof text));
    REFUSED("halfstep_recipe_full", "too little room", EMPTY, RANGE, "a buffer of 4 bytes is too small; 64",
            code = halfstep_recipe_full("adamw", text, 4));
    REFUSED("halfstep_recipe_caveat", "misspelt", EMPTY, NAME, "unknown rule 'adamx'",
            code = halfstep_recipe_caveat("adamx", text, sizeof text));
    REFUSED("halfstep_recipe_bytes", "misspelt", EMPTY, NAME, "unknown rule 'adamx'",
            code = halfstep_recipe_bytes("adamx", 2, 1, 1, &bytes, NULL, NULL));
    TAKEN("halfstep_recipe_bytes", "rows forgotten", "0 bytes", EMPTY, bytes == 0,
          code = halfstep_recipe_bytes("adamw", 2, 0, 64, &bytes, NULL, NULL));
    REFUSED("halfstep_get_group_recipe", "too early", EMPTY, ARGUMENT, "there is no group 0",
            code = halfstep_get_group_recipe(o, 0, text, sizeof text));
    REFUSED("halfstep_current_lr", "too early", EMPTY, ARGUMENT, "there is no group 0",
            code = halfstep_current_lr(o, 0, &number));
    REFUSED("halfstep_get_tensor", "too early", GROUPED, ARGUMENT, "there is no tensor 0",
            code = halfstep_get_tensor(o, 0, &matrix));
    REFUSED("halfstep_get_slot_info", "no such state", ADDED, ARGUMENT, "slot",
            code = halfstep_get_slot_info(o, 0, 99, &slot));
    TAKEN("halfstep_get_slot_info", "too early", "no memory", ADDED, !slot.code,
          code = halfstep_get_slot_info(o, 0, STATE, &slot));
    REFUSED("halfstep_get_piece", "beyond the last", ADDED, ARGUMENT, "no piece 2; there are 2",
            code = halfstep_get_piece(o, 2, &piece));
    TAKEN("halfstep_get_record", "too early", "zeros", EMPTY, record.skipped_steps == 0,
          code = halfstep_get_record(o, &record));
    REFUSED("halfstep_get_record", "no such tensor", GROUPED, ARGUMENT, "there is no tensor 0",
            record.kind = HALFSTEP_RECORD_TENSOR;
            code = halfstep_get_record(o, &record));
    REFUSED("halfstep_ahead_bytes", "too early", GROUPED, ARGUMENT, "there is no tensor 0",
            code = halfstep_ahead_bytes(o, 0, &bytes));
    TAKEN("halfstep_memory", "too early", "0 bytes", EMPTY, bytes == 0,
          code = halfstep_memory(o, &bytes, NULL, NULL, NULL, NULL));
    REFUSED("halfstep_read_slot", "too early", ADDED, ORDER, "exp_avg has no memory yet",
            code = halfstep_read_slot(o, 0, STATE, NULL, 0, ROWS, values[0]));
    TAKEN("halfstep_read_slot", "a weight, too early", "weights are the caller's", ADDED, 1,
          code = halfstep_read_slot(o, 0, WEIGHT, weight[0], 0, ROWS, values[0]));
    REFUSED("halfstep_read_bytes", "too early", ADDED, ORDER, "has no memory yet",
            code = halfstep_read_bytes(o, 0, STATE, 0, 0, 4, text));
    REFUSED("halfstep_read_weights", "too early: no tensor", GROUPED, ORDER, "no tensor that has a weight",
            code = halfstep_read_weights(o, weights, numbers));
    REFUSED("halfstep_read_average", "data forgotten", PLACED, ARGUMENT, "NULL data",
            code = halfstep_read_average(o, 0, NULL, 0, ROWS, values[0]));
    TAKEN("halfstep_saturated", "of 32 bits", "0", PLACED, bytes == 0,
          code = halfstep_saturated(o, 0, weight[0], &bytes));
    REFUSED("halfstep_random_words", "misspelt", EMPTY, NAME, "unknown value 'latice' of 'generator'; known: lattice,",
            code = halfstep_random_words("latice", 0, 0, 0, 0, 0, &word, 1));
    REFUSED("halfstep_bf16_stochastic", "random words forgotten", EMPTY, ARGUMENT, "words is NULL",
            code = halfstep_bf16_stochastic(values[0], &half, 1, NULL));
}

static void test_io_questions(void)
{
    const char *key, *value;
    char data[8];
    uint64_t index;
    halfstep_safetensors *file;
    SIZED(halfstep_checkpoint_info, about);
    SIZED(halfstep_checkpoint_file, one);
    SIZED(halfstep_safetensor_info, tensor);
    SIZED(halfstep_store_info, states);
    open_scene(PLACED);
    SAVED(1);
    halfstep_destroy(o);
    MUST(halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT));
    MUST(halfstep_open_safetensors(&file, at("run/model.safetensors"), TEXT));
    REFUSED("halfstep_get_checkpoint_info", "struct_size forgotten", EMPTY, ARGUMENT, "", about.struct_size = 0;
            code = halfstep_get_checkpoint_info(checkpoint, &about));
    REFUSED("halfstep_get_checkpoint_file", "beyond the last", EMPTY, ARGUMENT, "",
            code = halfstep_get_checkpoint_file(checkpoint, 2, &one));
    REFUSED("halfstep_get_checkpoint_value", "beyond the last", EMPTY, ARGUMENT, "",
            code = halfstep_get_checkpoint_value(checkpoint, 0, &key, &value));
    ANSWERS("halfstep_checkpoint_path", "misspelt", "NULL", EMPTY,
            !halfstep_checkpoint_path(checkpoint, "modl.safetensors"));
    ANSWERS("halfstep_checkpoint_value", "misspelt", "NULL", EMPTY, !halfstep_checkpoint_value(checkpoint, "k"));
    ANSWERS("halfstep_safetensor_count", "NULL, after a failed open", "0", EMPTY, halfstep_safetensor_count(NULL) == 0);
    REFUSED("halfstep_get_safetensor_info", "beyond the last", EMPTY, ARGUMENT, "",
            code = halfstep_get_safetensor_info(file, 2, &tensor));
    REFUSED("halfstep_safetensor_find", "misspelt", EMPTY, NAME, "",
            code = halfstep_safetensor_find(file, "matrx", &index));
    REFUSED("halfstep_read_safetensor", "beyond the last byte", EMPTY, RANGE, "has 512 bytes; cannot read 1",
            code = halfstep_read_safetensor(file, 0, 4 * N, data, 1, TEXT));
    ANSWERS("halfstep_safetensors_metadata_count", "NULL, after a failed open", "0", EMPTY,
            halfstep_safetensors_metadata_count(NULL) == 0);
    REFUSED("halfstep_get_safetensors_metadata", "beyond the last", EMPTY, ARGUMENT, "",
            code = halfstep_get_safetensors_metadata(file, 99, &key, &value));
    ANSWERS("halfstep_safetensors_metadata_find", "misspelt", "NULL", EMPTY,
            !halfstep_safetensors_metadata_find(file, "k"));
    ANSWERS("halfstep_safetensors_dtype_bits", "misspelt", "0", EMPTY, halfstep_safetensors_dtype_bits("f32") == 0);
    ANSWERS("halfstep_safetensors_dtype", "beyond the last", "NULL", EMPTY, !halfstep_safetensors_dtype(999));
    ANSWERS("halfstep_close_safetensors", "NULL, after a failed open", "nothing", EMPTY,
            (halfstep_close_safetensors(NULL), 1));
    ANSWERS("halfstep_destroy_safetensors_writer", "NULL", "nothing", EMPTY,
            (halfstep_destroy_safetensors_writer(NULL), 1));
    REFUSED("halfstep_store_get_info", "too early: no file", EMPTY, IO, "none",
            code = halfstep_store_get_info(at("none"), &states, TEXT));
    REFUSED("halfstep_store_get_info", "another file", EMPTY, FORMAT, "model.safetensors",
            code = halfstep_store_get_info(at("run/model.safetensors"), &states, TEXT));
    ANSWERS("halfstep_store_free_info", "NULL", "nothing", EMPTY, (halfstep_store_free_info(NULL), 1));
    ANSWERS("halfstep_store_value", "NULL, after a failed open", "NULL", EMPTY, !halfstep_store_value(NULL, "k"));
    halfstep_close_safetensors(file);
    halfstep_close_checkpoint(checkpoint);
}

/* ---- Completeness ------------------------------------------------------------------------------------------------ */

/* Fails for each name in a header that has no row. */
static void need(const char *name) { CHECK(strstr(listed, text_of(" %s ", name)), "%s has no row", name); }

/* Returns the end of the C identifier that ends before `end`, which it copies to `name`. */
static void word_before(const char *end, char name[80])
{
    const char *begin = end;
    while (begin[-1] == '_' || (begin[-1] >= 'a' && begin[-1] <= 'z') || (begin[-1] >= '0' && begin[-1] <= '9'))
        begin--;
    snprintf(name, 80, "%.*s", (int)(end - begin), begin);
}

/* Checks that each field has a row. `at_field` is behind the name of the structure. Declarators end before , ; [ and ).
 */
static int check_fields(const char *at_field, const char *structure)
{
    char name[80];
    int count = 0;
    for (at_field++; *at_field != '}'; at_field++) {
        if (!strncmp(at_field, "/*", 2)) {
            at_field = strstr(at_field, "*/") + 1;
        } else if (!strncmp(at_field, "(*", 2) || strchr(",;[", *at_field)) {
            const int is_function = *at_field == '('; /* its name is in the first parentheses */
            word_before(is_function ? strchr(at_field, ')') : at_field, name);
            need(text_of("%s.%s", structure, name));
            if (*at_field == '[') at_field = strchr(at_field, ']') + 1;
            else if (is_function) at_field = strchr(at_field, ';');
            count++;
        }
    }
    return count;
}

/* Returns 1 if a function takes the structure, which callers fill in. */
static int is_taken(char *const texts[2], const char *structure)
{
    const char *parameter = text_of("const %s *", structure);
    return strstr(texts[0], parameter) || strstr(texts[1], parameter);
}

static const struct {
    const char *name;
    void (*make_rows)(void);
} groups[] = {
    {"options of an optimizer", test_options},
    {"groups, hyper-parameters, choices, schedules", test_groups},
    {"tensors", test_tensors},
    {"states", test_states},
    {"storage", test_storage},
    {"steps", test_steps},
    {"records", test_records},
    {"checkpoints", test_checkpoints},
    {"stores", test_stores},
    {"safetensors", test_safetensors},
    {"functions that tell something", test_questions},
    {"functions of halfstep_io that tell something", test_io_questions},
};

static void test_complete(void)
{
    const int is_alone = !*listed; /* the reader asked for this group only */
    for (size_t k = 0; is_alone && k < COUNT(groups); k++) groups[k].make_rows();
    char *texts[2] = {test_source_text("include/halfstep.h"), test_source_text("include/halfstep_io.h")}, name[80];
    int fields = 0, functions = 0;
    for (int k = 0; k < 2; k++) {
        for (const char *at_type = texts[k]; (at_type = strstr(at_type, "\ntypedef struct ")) != NULL; at_type++) {
            const char *end = at_type + strcspn(at_type, "{;");
            word_before(end - 1, name);
            if (*end == '{' && is_taken(texts, name)) fields += check_fields(end, name);
        }
        for (const char *at_call = texts[k]; (at_call = strstr(at_call, "\nHALFSTEP_API ")) != NULL; at_call++) {
            const char *open = strchr(at_call, '(');
            if (!strncmp(open, "(void)", 6)) continue;
            word_before(open, name);
            need(name);
            functions++;
        }
    }
    free(texts[0]), free(texts[1]);
    CHECK(fields > 70 && functions > 100, "%d fields and %d functions only", fields, functions);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch("mistakes");
    for (size_t k = 0; k < COUNT(groups); k++)
        TEST(groups[k].name) groups[k].make_rows();
    TEST("every function and every field that a caller fills in has a row") test_complete();
    return test_done();
}
