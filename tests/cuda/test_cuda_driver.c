/* Tests the CUDA device (src/device/cuda) through a driver without a GPU (fake/). The fake works asynchronously,
 * and never on memory that the process may touch. A sixteenth of the cases of tests/golden/hashes.txt must have their
 * hashes (--short: a 61st; --all: all of them). Errors must come back as one code and one sentence. A test must notice
 * what the fake leaves out or mixes up. FAKE_CUDA names another fake, such as the one with the kernels of
 * src/device/cuda/code. Over 500 lines because all of it shares one small problem, made once for the GPU and once for
 * the host. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include <dlfcn.h>
#include <inttypes.h>
#include <math.h>
#include <sys/resource.h>
#include <unistd.h>

#include "calls.h"
#include "test.h"

#include "device/cuda/driver/images.h"
#include "device/cuda/link.h"
#include "cuda/fake/fake_cuda.h"
#include "golden_case.h"

/* Replaces the embedded device code. The fake accepts code that begins with "fake". As in a build, each is an xz
 * file: its head, a block of one chunk that is not packed, and what is not read. */
#define XZ_HEAD "\xFD\x37zXZ\0\0\4....\2\0\x21\1\x16\0\0\0....\1\0\6"
#define XZ_TAIL "\0checksum, index"
static char code[][52] = {XZ_HEAD "fake 90" XZ_TAIL, XZ_HEAD "fake 89" XZ_TAIL, XZ_HEAD "fake 86" XZ_TAIL,
                          XZ_HEAD "fake 80" XZ_TAIL, XZ_HEAD "fake tx" XZ_TAIL};
enum { TEXTS = COUNT(code), TEXT_AT = sizeof XZ_HEAD - 1, TEXT = 7, PACKED = sizeof *code };
const struct hstep_cuda_image hstep_cuda_images[] = {{90, code[0], TEXT, PACKED}, {89, code[1], TEXT, PACKED},
                                                     {86, code[2], TEXT, PACKED}, {80, code[3], TEXT, PACKED},
                                                     {0, code[4], TEXT, PACKED},  {0, NULL, 0, 0}};
const char hstep_cuda_code[] = "9.0 8.9 8.6 8.0 PTX", hstep_cuda_code_text[] = "those of the test";

static struct fake_cuda_control *fake;
static void *driver;

/* Returns a function of the driver, by its name and type. */
#define DRIVER(name, ...) ((int (*)(__VA_ARGS__))find(name))
static void (*find(const char *name))(void)
{
    void (*found)(void);
    void *symbol = dlsym(driver, name);
    memcpy(&found, &symbol, sizeof found);
    if (!found) exit(1);
    return found;
}

#define MUST(call)                                               \
    do {                                                         \
        int must_ = (call);                                      \
        if (must_) {                                             \
            CHECK(0, "%s: %s", #call, halfstep_strerror(must_)); \
            return;                                              \
        }                                                        \
    } while (0)

/* ---- A small problem ---- */

/* Checks that a call has finished all it promises to finish when it returns. */
static void check_idle(const char *call)
{
    CHECK(DRIVER("fake_cuda_is_idle", void)(), "%s returns, and there is work on its way", call);
}

enum { ROWS = 48, COLUMNS = 64, N = ROWS * COLUMNS, TENSORS = 3 };

struct problem {
    halfstep_optimizer *o;
    int32_t group;
    int rows; /* of all tensors */
    void *weights[TENSORS];
    const void *gradients[TENSORS];
    float values[TENSORS][N];
    const char *device;
};

/* Makes values that have full rank as a matrix. */
static void value_of(float *g, int tensor, int step)
{
    for (int i = 0; i < N; i++) {
        uint32_t x = (uint32_t)(i * 7919 + tensor * 104729 + step * 15485863) * 2654435761u;
        x = (x ^ x >> 15) * 0x85ebca6bu;
        g[i] = (float)((int)((x ^ x >> 13) % 23) - 11) / 8.0f;
    }
}

static int problem_open_as(struct problem *p, const char *device, const char *recipe, void *stream, int rows)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .device = device, .stream = stream};
    memset(p, 0, sizeof *p);
    p->device = device;
    p->rows = rows;
    int error = halfstep_create(&options, &p->o);
    if (error) return error;
    if ((error = halfstep_add_group(p->o, recipe, &p->group)) ||
        (error = halfstep_set_hyper(p->o, ALL_GROUPS, "clip_norm", 10.0)) ||
        (error = halfstep_set_hyper(p->o, 0, "total_steps", 20)) ||
        (error = halfstep_set_choice(p->o, 0, "schedule", "cosine")))
        return error;
    for (int i = 0; i < TENSORS; i++) {
        static const char *const names[TENSORS] = {"a", "b", "c"};
        int32_t tensor;
        halfstep_tensor t = {.struct_size = sizeof t,
                             .name = names[i],
                             .ndim = 2,
                             .rows = rows,
                             .row_length = N / rows,
                             .gradient = "f32"};
        if ((error = halfstep_add_tensor(p->o, &t, &tensor))) return error;
        for (int j = 0; j < 2; j++) {
            void *memory = NULL;
            if (device && (error = halfstep_device_allocate(p->o, N * 4, &memory))) return error;
            if (!device) memory = calloc(N, 4);
            if (j) p->gradients[i] = memory;
            else p->weights[i] = memory;
        }
    }
    if ((error = halfstep_allocate_states(p->o))) return error;
    check_idle("halfstep_allocate_states");
    for (int i = 0; i < TENSORS && !error; i++) {
        for (int j = 0; j < N; j++) p->values[i][j] = 1.0f + (float)(j % 5);
        /* Reads in halves. A later read in one piece needs a larger buffer. */
        for (int half = 0; half < 2 && !error; half++)
            error = halfstep_write_slot(p->o, i, WEIGHT, p->weights[i], half * rows / 2, rows / 2,
                                        p->values[i] + half * N / 2);
    }
    check_idle("halfstep_write_slot");
    return error;
}

static int problem_open(struct problem *p, const char *device, const char *recipe, void *stream)
{
    return problem_open_as(p, device, recipe, stream, ROWS);
}

/* Writes the gradient of one tensor, on the device or here. */
static int put_gradient(struct problem *p, int tensor, const float *values)
{
    void *place = (void *)(uintptr_t)p->gradients[tensor];
    if (p->device) return halfstep_device_copy(p->o, place, values, N * sizeof *values);
    memcpy(place, values, N * sizeof *values);
    return OK;
}

static int problem_gradients(struct problem *p, int step)
{
    static float g[N];
    int error = OK;
    for (int i = 0; i < TENSORS && !error; i++) {
        value_of(g, i, step);
        error = put_gradient(p, i, g);
    }
    if (p->device && !error) check_idle("halfstep_device_copy");
    return error;
}

static uint64_t problem_hash(struct problem *p)
{
    uint64_t hash = HASH_START;
    for (int i = 0; i < TENSORS; i++) {
        SIZED(halfstep_record, c);
        for (int s = 0; s < 4; s++) {
            if (s == GRADIENT) continue;
            if (halfstep_read_slot(p->o, i, s, s ? NULL : p->weights[i], 0, p->rows, p->values[i])) return 1;
            hash = hash_bytes(hash, p->values[i], sizeof p->values[i]);
        }
        if (get_counters(p->o, i, &c)) return 2;
        hash = hash_word(hash_word(hash, c.state_steps), c.writes);
    }
    double norm = halfstep_gradient_norm(p->o);
    uint64_t steps = 0, bits;
    memcpy(&bits, &norm, sizeof bits);
    if (get_group_steps(p->o, 0, &steps)) return 3;
    return hash_finish(hash_word(hash_word(hash, bits), steps));
}

static void problem_close(struct problem *p)
{
    for (int i = 0; i < TENSORS; i++) {
        if (p->device) {
            halfstep_device_release(p->o, p->weights[i]);
            halfstep_device_release(p->o, (void *)(uintptr_t)p->gradients[i]);
        } else {
            free(p->weights[i]);
            free((void *)(uintptr_t)p->gradients[i]);
        }
    }
    halfstep_destroy(p->o);
    p->o = NULL;
}

static void check_clean(const char *where)
{
    CHECK(!fake->live && !fake->pinned, "%s: %ld blocks of the GPU and %ld pinned are left", where, fake->live,
          fake->pinned);
    CHECK(!fake->depth, "%s: %d contexts are left current", where, fake->depth);
    CHECK(!fake->offence, "%s: %s", where, fake->offence);
    fake->offence = NULL;
}

static void check_hashes(const char *what, uint64_t device, uint64_t host)
{
    CHECK(device == host, "%s: %016" PRIx64 ", on the host %016" PRIx64, what, device, host);
}

/* Runs the same steps on the host and on the device, and compares all that is stored. */
static void compare_devices(const char *what, const char *recipe, void (*steps)(struct problem *p))
{
    uint64_t hash[2];
    for (int far = 0; far < 2; far++) {
        struct problem p;
        MUST(problem_open(&p, far ? "cuda" : NULL, recipe, NULL));
        steps(&p);
        hash[far] = problem_hash(&p);
        problem_close(&p);
    }
    check_hashes(what, hash[1], hash[0]);
    check_clean(what);
}

/* ---- The promised bits ---- */

static void run_golden(const char *list, const struct golden_case *c, const struct golden_layout *layout)
{
    if (check_golden(list, c, layout)) check_clean(c->recipe);
}

/* ---- Steps that nobody waits for ---- */

/* Two sets of gradients that take turns, so that every step has pointers of its own. */
static void two_sets(struct problem *p, const void *sets[2][TENSORS], void *owned[TENSORS])
{
    static float g[N];
    for (int i = 0; i < TENSORS; i++) {
        value_of(g, i, 1);
        MUST(halfstep_device_allocate(p->o, sizeof g, &owned[i]));
        MUST(halfstep_device_copy(p->o, owned[i], g, sizeof g));
        sets[0][i] = p->gradients[i];
        sets[1][i] = owned[i];
    }
}

/* Makes 80 steps, more than there are pinned buffers, without a wait. The first counters that are read wait for all. */
static void test_submission(const char *recipe)
{
    struct problem p;
    const void *sets[2][TENSORS];
    void *owned[TENSORS];
    MUST(problem_open(&p, "cuda", recipe, NULL));
    MUST(problem_gradients(&p, 0));
    two_sets(&p, sets, owned);
    MUST(halfstep_synchronize(p.o));
    long waits = fake->synchronizations, ran = fake->kernels, pageable = fake->pageable, allocated = fake->allocations;
    check_idle("halfstep_synchronize");
    for (int step = 0; step < 2; step++) MUST(halfstep_step(p.o, p.weights, sets[step % 2]));
    CHECK(fake->kernels == ran, "%s: %ld kernels have run before somebody waits", recipe, fake->kernels - ran);
    for (int step = 2; step < 80; step++) {
        if (step == 40) MUST(halfstep_set_hyper(p.o, 0, "weight_decay", 0.01));
        MUST(halfstep_step(p.o, p.weights, sets[step % 2]));
    }
    CHECK(fake->synchronizations == waits, "%s: a step waits", recipe);
    CHECK(fake->pageable == pageable, "%s: a step sends memory that is not pinned", recipe);
    CHECK(fake->allocations - allocated <= HSTEP_CUDA_ROOMS, "%s: %ld allocations in steps", recipe,
          fake->allocations - allocated);
    SIZED(halfstep_record, c);
    MUST(get_counters(p.o, 1, &c));
    EQUAL(c.state_steps, 80);
    uint64_t hash = problem_hash(&p);
    struct problem h;
    MUST(problem_open(&h, NULL, recipe, NULL));
    for (int step = 0; step < 80; step++) {
        if (step == 40) MUST(halfstep_set_hyper(h.o, 0, "weight_decay", 0.01));
        MUST(problem_gradients(&h, step % 2));
        MUST(halfstep_step(h.o, h.weights, h.gradients));
    }
    check_hashes(recipe, hash, problem_hash(&h));
    for (int i = 0; i < TENSORS; i++) halfstep_device_release(p.o, owned[i]);
    problem_close(&h);
    problem_close(&p);
    check_clean("submission");
}

/* Returns the number of launches of one step over so many tensors. */
static long launches_of(int tensors, const char *recipe)
{
    enum { MOST = 300, SIZE = 256 };
    static void *weights[MOST];
    static const void *gradients[MOST];
    static const float zero[SIZE];
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .device = "cuda"};
    halfstep_optimizer *o = NULL;
    char name[16];
    int32_t index;
    void *w = NULL, *g = NULL;
    int error = halfstep_create(&options, &o);
    if (!error) error = halfstep_add_group(o, recipe, &index);
    if (!error) error = halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", 1.0);
    for (int i = 0; !error && i < tensors; i++) {
        snprintf(name, sizeof name, "%d", i);
        halfstep_tensor t = {
            .struct_size = sizeof t, .name = name, .ndim = 2, .rows = 4, .row_length = SIZE / 4, .gradient = "f32"};
        error = halfstep_add_tensor(o, &t, &index);
    }
    if (!error) error = halfstep_allocate_states(o);
    if (!error) error = halfstep_device_allocate(o, sizeof zero, &w);
    if (!error) error = halfstep_device_allocate(o, sizeof zero, &g);
    if (!error) error = halfstep_device_copy(o, w, zero, sizeof zero);
    if (!error) error = halfstep_device_copy(o, g, zero, sizeof zero);
    /* All gradients share one piece of memory, because nobody looks at the values. */
    for (int i = 0; i < tensors; i++) weights[i] = w, gradients[i] = g;
    if (!error) error = halfstep_step(o, weights, gradients);
    long before = fake->launches;
    if (!error) error = halfstep_step(o, weights, gradients);
    long launches = fake->launches - before;
    if (!error) error = halfstep_synchronize(o);
    CHECK(!error, "%d tensors of %s: %s", tensors, recipe, halfstep_strerror(error));
    halfstep_device_release(o, w);
    halfstep_device_release(o, g);
    halfstep_destroy(o);
    return launches;
}

static void test_launches(void)
{
    for (int n = 1; n <= 300; n = n == 1 ? 3 : n * 100) {
        long launches = launches_of(n, "adamw/bf16-sr/int8");
        CHECK(launches == 5, "a step of %d tensors is %ld launches: scan, decide, update, that of whole tiles, count",
              n, launches);
        launches = launches_of(n, "lamb/bf16-sr/int8");
        CHECK(launches == launches_of(2, "lamb/bf16-sr/int8"), "lamb: a step of %d tensors is %ld launches", n,
              launches);
    }
    check_clean("launches");
}

static void test_refusal(void)
{
    struct problem p;
    float bad[N];
    float step_shown = -1.0f;
    MUST(problem_open(&p, "cuda", "adamw", NULL));
    MUST(bind_step(p.o, 0, &step_shown));
    for (int step = 0; step < 4; step++) {
        MUST(problem_gradients(&p, step));
        if (step == 1 || step == 2) {
            value_of(bad, step, step);
            bad[7] = NAN;
            MUST(put_gradient(&p, step, bad));
        }
        MUST(halfstep_step(p.o, p.weights, p.gradients));
    }
    CHECK(step_shown == 0.0f, "a count is shown before it is asked for");
    EQUAL(halfstep_skipped_steps(p.o), 2);
    EQUAL_TEXT(halfstep_nonfinite_tensor(p.o, NULL), "c");
    int told = halfstep_synchronize(p.o);
    CHECK(told == HALFSTEP_NONFINITE && strstr(halfstep_error_detail(p.o), "'c'"), "%s: %s", halfstep_strerror(told),
          halfstep_error_detail(p.o));
    CHECK(halfstep_synchronize(p.o) == OK, "it is told twice");
    EQUAL(step_shown, 2.0f);
    problem_close(&p);
    check_clean("refusal");
}

enum question { COUNTERS, GROUP_STEPS, NORM, WEIGHTS, STATES, AVERAGE, SCALAR, SATURATED, QUESTIONS };

/* Readings that come first after the last step. The answer is hashed. */
static uint64_t ask(struct problem *p, enum question question)
{
    static float out[N];
    SIZED(halfstep_record, c);
    uint64_t number = 0;
    double value = 0.0;
    int error = OK;
    memset(out, 0, sizeof out);
    switch (question) {
    case COUNTERS:
        error = get_counters(p->o, 1, &c);
        number = c.state_steps * 1000 + c.writes;
        break;
    case GROUP_STEPS: error = get_group_steps(p->o, 0, &number); break;
    case NORM: value = halfstep_gradient_norm(p->o); break;
    case WEIGHTS: error = halfstep_read_slot(p->o, 1, WEIGHT, p->weights[1], 0, ROWS, out); break;
    case STATES: error = halfstep_read_slot(p->o, 1, STATE, NULL, 0, ROWS, out); break;
    case AVERAGE: error = halfstep_read_average(p->o, 1, p->weights[1], 0, ROWS, out); break;
    case SCALAR: error = get_scalar(p->o, 1, "weight_sum", &value); break;
    case SATURATED: error = halfstep_saturated(p->o, 1, p->weights[1], &number); break;
    case QUESTIONS: break;
    }
    CHECK(!error, "question %d: %s", (int)question, halfstep_strerror(error));
    return hash_finish(hash_bytes(hash_word(hash_bytes(HASH_START, &value, sizeof value), number), out, sizeof out));
}

/* Makes steps of which the last, or the one before it, is refused. Each reading comes first once, and must give what
 * the host gives. Weights at the end of their range get gradients that would take them away from there. */
static void test_refused_readings(void)
{
    static float bad[N], high[N];
    for (int i = 0; i < N; i++) high[i] = 3.3895314e38f;
    for (int question = 0; question < QUESTIONS; question++)
        for (int refused = 1; refused < 3; refused++) {
            uint64_t answer[2], hash[2];
            for (int far = 0; far < 2; far++) {
                struct problem p;
                MUST(problem_open(&p, far ? "cuda" : NULL, "schedulefree/bf16-sr/bf16-sr", NULL));
                for (int step = 0; step < 3; step++) {
                    MUST(problem_gradients(&p, step));
                    if (step == 2) MUST(halfstep_write_slot(p.o, 1, WEIGHT, p.weights[1], 0, 1, high));
                    if (step == refused) {
                        value_of(bad, 0, step);
                        bad[N / 2] = INFINITY;
                        MUST(put_gradient(&p, 0, bad));
                    }
                    int error = halfstep_step(p.o, p.weights, p.gradients);
                    CHECK(error == (step == refused && !far ? HALFSTEP_NONFINITE : OK), "step %d: %s", step,
                          halfstep_strerror(error));
                }
                answer[far] = ask(&p, (enum question)question);
                CHECK(halfstep_skipped_steps(p.o) == 1 && !strcmp(halfstep_nonfinite_tensor(p.o, NULL), "a"),
                      "%d steps are skipped, '%s' offends", (int)halfstep_skipped_steps(p.o),
                      halfstep_nonfinite_tensor(p.o, NULL));
                hash[far] = problem_hash(&p);
                problem_close(&p);
            }
            CHECK(answer[0] == answer[1], "question %d after step %d was refused: another answer than the host's",
                  question, refused);
            check_hashes("a refused step", hash[1], hash[0]);
        }
    check_clean("readings of refused steps");
}

/* Steps single tensors and rounds, with delayed clipping by a norm that only the device knows. */
static void rounds(struct problem *p)
{
    MUST(halfstep_set_hyper(p->o, ALL_GROUPS, "clip_norm", 1.0));
    for (int step = 0; step < 5; step++) {
        MUST(problem_gradients(p, step));
        for (int i = TENSORS - 1; i >= 0; i--) MUST(step_tensor(p->o, i, p->weights[i], p->gradients[i]));
        MUST(end_round(p->o));
    }
}

static void test_rounds(void) { compare_devices("rounds", "adamw/bf16-sr/int8", rounds); }

/* Sets counters, scalars and accumulators between steps. */
static char sums[2][4][2 * N];
static uint64_t saturated[2];

static void between_steps(struct problem *p)
{
    int far = p->device != NULL;
    void *sum = (void *)(uintptr_t)p->gradients[1];
    for (int step = 0; step < 4; step++) {
        SIZED(halfstep_record, c);
        MUST(problem_gradients(p, step));
        MUST(halfstep_step(p->o, p->weights, p->gradients));
        if (step == 1) {
            MUST(get_counters(p->o, 2, &c));
            c.state_steps += 5;
            c.writes += 5;
            MUST(set_counters(p->o, 2, &c));
            MUST(set_group_steps(p->o, 0, 11));
            MUST(halfstep_set_hyper(p->o, ALL_GROUPS, "gradient_scale", 0.5));
        }
        if (step == 2) MUST(halfstep_accumulate(p->o, 0, sum, "bf16-sr", p->gradients[0], "f32", 0.5));
        if (far) MUST(halfstep_device_copy(p->o, sums[far][step], sum, sizeof sums[far][step]));
        else memcpy(sums[far][step], sum, sizeof sums[far][step]);
    }
    uint64_t count = 77;
    /* Three weights are at the end of their range. */
    for (int j = 0; j < 3; j++) p->values[0][j] = 3.3895314e38f;
    MUST(halfstep_write_slot(p->o, 0, WEIGHT, p->weights[0], 0, 1, p->values[0]));
    MUST(halfstep_saturated(p->o, 0, p->weights[0], &count));
    saturated[far] = count; /* later settings come too late */
    /* The device's work memory must grow for the slots that are read next. */
    MUST(halfstep_accumulate(p->o, 0, sum, "bf16-sr", p->gradients[0], "f32", 0.5));
}

static void test_between_steps(void)
{
    compare_devices("between steps", "adamw/bf16-sr/bf16-sr", between_steps);
    CHECK(!memcmp(sums[0], sums[1], sizeof sums[0]), "other sums of gradients than the host's");
    CHECK(saturated[0] >= 3 && saturated[0] == saturated[1], "%d saturated weights, on the host %d", (int)saturated[1],
          (int)saturated[0]);
}

/* Makes steps, single tensors and rounds in halves. Statistics are in the process's memory, or in the device's, where
 * nothing waits. */
static int64_t statistics[2][4096];
static int there; /* statistics are in the device's memory */

static void halves(struct problem *p)
{
    int far = p->device != NULL;
    void *memory = NULL;
    if (far) MUST(halfstep_device_allocate(p->o, sizeof statistics[1], &memory));
    CHECK((uint64_t)statistics_count(p->o) * 8 <= sizeof statistics[far], "too many statistics");
    int64_t *s = far && there ? memory : statistics[far];
    for (int step = 0; step < 2; step++) {
        MUST(problem_gradients(p, step));
        long waits = fake->synchronizations;
        MUST(step_begin(p->o, p->gradients, s));
        if (!there) check_idle("begin");
        MUST(step_norms(p->o, p->weights, p->gradients, s));
        if (!there) check_idle("norms");
        MUST(step_finish(p->o, p->weights, p->gradients, s));
        CHECK(!there || fake->synchronizations == waits, "statistics on the device are waited for");
    }
    for (int i = TENSORS - 1; i >= 0; i--) {
        MUST(step_tensor_begin(p->o, i, p->gradients[i], s));
        if (!there) check_idle("begin of one tensor");
        MUST(step_tensor_norms(p->o, i, p->weights[i], p->gradients[i], s));
        MUST(step_tensor_finish(p->o, i, p->weights[i], p->gradients[i], s));
    }
    MUST(end_round_begin(p->o, s));
    check_idle("begin of the end of a round");
    MUST(end_round_finish(p->o, s));
    halfstep_device_release(p->o, memory);
}

static void test_halves(void)
{
    for (there = 0; there < 2; there++) {
        compare_devices("halves", "lamb/bf16-sr/int8", halves);
        CHECK(there || !memcmp(statistics[0], statistics[1], sizeof statistics[0]), "other statistics than the host's");
    }
}

/* Makes micro-steps, which have no weights, and a step after them. */
static void micro_steps(struct problem *p)
{
    for (int step = 0; step < 4; step++) {
        MUST(problem_gradients(p, step));
        if (step % 2) MUST(halfstep_step(p->o, p->weights, p->gradients));
        else MUST(accumulate_states(p->o, p->gradients));
    }
}

static void test_micro_steps(void) { compare_devices("micro-steps", "adamw/bf16-sr/bf16-sr", micro_steps); }

/* Options that other tests do not use: another generator, one verdict and one norm for each tensor. */
static void choices(struct problem *p)
{
    static float bad[N];
    MUST(halfstep_set_choice(p->o, ALL_GROUPS, "generator", "philox7"));
    MUST(halfstep_set_choice(p->o, ALL_GROUPS, "scan", "per-tensor"));
    for (int step = 0; step < 3; step++) {
        MUST(halfstep_set_choice(p->o, ALL_GROUPS, "clip", "delayed"));
        MUST(problem_gradients(p, step));
        value_of(bad, 1, step);
        if (step == 1) bad[N - 1] = NAN;
        MUST(put_gradient(p, 1, bad));
        int error = halfstep_step(p->o, p->weights, p->gradients);
        CHECK(error == (step == 1 && !p->device ? HALFSTEP_NONFINITE : OK), "step %d: %s", step,
              halfstep_strerror(error));
        /* A round that has had a norm, which clips nothing "per-tensor". */
        if (step == 0) {
            MUST(step_tensor(p->o, 0, p->weights[0], p->gradients[0]));
            MUST(end_round(p->o));
        }
        MUST(halfstep_set_choice(p->o, ALL_GROUPS, "clip", "per-tensor"));
        if (step != 1) MUST(step_tensor(p->o, 2, p->weights[2], p->gradients[2]));
    }
    MUST(halfstep_accumulate(p->o, 0, p->weights[0], "bf16-sr", p->gradients[0], "f32", 0.3));
}

static void test_choices(void) { compare_devices("choices", "adamw/bf16-sr/int8", choices); }

/* Rows of a tensor of 2^40 elements. Keys of their random bits do not fit 32 bits, nor do their places. */
static void test_far_indices(void)
{
    static const int64_t firsts[] = {0, (int64_t)1 << 26, (int64_t)1 << 33, ((int64_t)1 << 34) - ROWS};
    enum { PLACES = COUNT(firsts) };
    static float values[N], g[N], in[N];
    uint64_t hash[PLACES][2];
    for (int place = 0; place < PLACES; place++)
        for (int far = 0; far < 2; far++) {
            halfstep_options options = {.struct_size = sizeof options, .threads = 1, .device = far ? "cuda" : NULL};
            halfstep_tensor t = {.struct_size = sizeof t,
                                 .name = "large",
                                 .ndim = 2,
                                 .rows = (int64_t)1 << 34,
                                 .row_length = COLUMNS,
                                 .first_row = firsts[place],
                                 .n_rows = ROWS,
                                 .n_columns = COLUMNS,
                                 .gradient = "f32"};
            halfstep_optimizer *o;
            int32_t index;
            void *memory[2] = {values, g};
            SIZED(halfstep_record, c);
            MUST(halfstep_create(&options, &o));
            MUST(halfstep_add_group(o, "adamw/bf16-sr/bf16-sr", &index));
            MUST(halfstep_set_choice(o, ALL_GROUPS, "scan", "known-finite"));
            MUST(halfstep_add_tensor(o, &t, &index));
            MUST(halfstep_allocate_states(o));
            for (int i = 0; i < 2 && far; i++) MUST(halfstep_device_allocate(o, sizeof g, &memory[i]));
            for (int i = 0; i < N; i++) in[i] = 1.0f;
            MUST(halfstep_write_slot(o, 0, WEIGHT, memory[0], 0, ROWS, in));
            value_of(g, 0, 0);
            if (far) MUST(halfstep_device_copy(o, memory[1], g, sizeof g));
            const void *gradient = memory[1];
            for (int step = 0; step < 3; step++) MUST(halfstep_step(o, &memory[0], &gradient));
            hash[place][far] = HASH_START;
            for (int slot = 0; slot < 4; slot++) {
                if (slot == GRADIENT) continue;
                MUST(halfstep_read_slot(o, 0, slot, slot ? NULL : memory[0], 0, ROWS, in));
                hash[place][far] = hash_bytes(hash[place][far], in, sizeof in);
            }
            MUST(get_counters(o, 0, &c));
            EQUAL(c.state_steps, 3);
            for (int i = 0; i < 2 && far; i++) halfstep_device_release(o, memory[i]);
            halfstep_destroy(o);
        }
    for (int place = 0; place < PLACES; place++) {
        CHECK(hash[place][0] == hash[place][1], "from row %" PRId64 ": other bits than the host's", firsts[place]);
        for (int other = 0; other < place; other++)
            CHECK(hash[place][1] != hash[other][1], "rows from %" PRId64 " and from %" PRId64 " have the same bits",
                  firsts[place], firsts[other]);
    }
    check_clean("far indices");
}

/* ---- Streams and graphs ---- */

static void *new_stream(void)
{
    void *stream = NULL;
    DRIVER("cuStreamCreate", void **, unsigned)(&stream, 0);
    return stream;
}

static void free_stream(void *stream) { DRIVER("cuStreamDestroy_v2", void *)(stream); }

/* Steps that alternate between two streams run in the order of the calls. */
static void test_streams(void)
{
    void *streams[2] = {new_stream(), new_stream()};
    struct problem p;
    MUST(problem_open(&p, "cuda:0", "adamw/bf16-sr/int8", streams[0]));
    MUST(problem_gradients(&p, 0));
    for (int step = 0; step < 6; step++) {
        MUST(halfstep_set_stream(p.o, streams[step % 2]));
        MUST(halfstep_step(p.o, p.weights, p.gradients));
    }
    uint64_t hash = problem_hash(&p);
    struct problem h;
    MUST(problem_open(&h, NULL, "adamw/bf16-sr/int8", NULL));
    MUST(problem_gradients(&h, 0));
    for (int step = 0; step < 6; step++) MUST(halfstep_step(h.o, h.weights, h.gradients));
    CHECK(hash == problem_hash(&h), "steps on two streams give other bits");
    problem_close(&h);
    problem_close(&p);
    for (int i = 0; i < 2; i++) free_stream(streams[i]);
    check_clean("streams");
}

/* Captures a step once and replays it. Counters, schedule and random bits go on. An lr that is set reaches later
 * replays, and so does an lr in the device's memory. */
static void test_graph(void)
{
    void *stream = new_stream(), *graph = NULL, *place = NULL;
    struct problem p, h;
    double lr = 0.02, scale = 0.5;
    MUST(problem_open(&p, "cuda", "adamw/bf16-sr/int8", stream));
    MUST(problem_open(&h, NULL, "adamw/bf16-sr/int8", NULL));
    MUST(problem_gradients(&p, 0));
    MUST(problem_gradients(&h, 0));
    MUST(halfstep_step(p.o, p.weights, p.gradients));
    MUST(halfstep_step(h.o, h.weights, h.gradients));
    MUST(halfstep_device_allocate(p.o, 64, &place));
    MUST(halfstep_device_copy(p.o, place, &scale, sizeof scale));
    MUST(halfstep_bind_hyper(p.o, ALL_GROUPS, "gradient_scale", place));
    MUST(halfstep_synchronize(p.o));
    DRIVER("cuStreamBeginCapture_v2", void *, int)(stream, 0);
    long ran = fake->kernels;
    MUST(halfstep_step(p.o, p.weights, p.gradients));
    SIZED(halfstep_record, c);
    int refused = get_counters(p.o, 0, &c);
    CHECK(refused == ORDER && strstr(halfstep_error_detail(p.o), "captured"), "reading in a capture: %s",
          halfstep_error_detail(p.o));
    int ended = DRIVER("cuStreamEndCapture", void *, void **)(stream, &graph);
    CHECK(!ended && fake->kernels == ran && graph, "the capture ends with %d", ended);
    for (int step = 0; step < 6; step++) {
        void *context = NULL;
        if (step == 2) {
            MUST(halfstep_set_hyper(p.o, 0, "lr", lr));
            MUST(halfstep_set_hyper(h.o, 0, "lr", lr));
        }
        if (step == 4) {
            scale = 0.25;
            MUST(halfstep_device_copy(p.o, place, &scale, sizeof scale));
        }
        DRIVER("cuDevicePrimaryCtxRetain", void **, int)(&context, 0);
        DRIVER("cuCtxPushCurrent_v2", void *)(context);
        DRIVER("cuGraphLaunch", void *, void *)(graph, stream);
        DRIVER("cuCtxPopCurrent_v2", void **)(&context);
        MUST(halfstep_bind_hyper(h.o, ALL_GROUPS, "gradient_scale", &scale));
        MUST(halfstep_step(h.o, h.weights, h.gradients));
    }
    MUST(get_counters(p.o, 0, &c));
    EQUAL(c.state_steps, 7);
    check_hashes("replays", problem_hash(&p), problem_hash(&h));
    /* A number that is no longer bound has its set value again, though that has not changed. */
    lr = 0.5;
    MUST(halfstep_device_copy(p.o, place, &lr, sizeof lr));
    for (int bound = 1; bound >= 0; bound--) {
        MUST(halfstep_bind_hyper(p.o, 0, "lr", bound ? place : NULL));
        MUST(halfstep_bind_hyper(h.o, 0, "lr", bound ? &lr : NULL));
        if (!bound) MUST(halfstep_bind_hyper(p.o, ALL_GROUPS, "gradient_scale", NULL));
        if (!bound) MUST(halfstep_bind_hyper(h.o, ALL_GROUPS, "gradient_scale", NULL));
        if (bound) MUST(halfstep_bind_hyper(h.o, ALL_GROUPS, "gradient_scale", &lr));
        MUST(halfstep_step(p.o, p.weights, p.gradients));
        MUST(halfstep_step(h.o, h.weights, h.gradients));
    }
    check_hashes("bound no more", problem_hash(&p), problem_hash(&h));
    halfstep_device_release(p.o, place);
    problem_close(&h);
    problem_close(&p);
    DRIVER("cuGraphDestroy", void *)(graph);
    free_stream(stream);
    check_clean("graph");
}

/* ---- Products in BF16 ---- */

/* How a case iterates: rows of ns_coefficients and ns_form. */
struct iteration {
    int list, gram;
};

/* Computes what three steps take from the weights of tensor 0. captured: the last two are replays of one. */
static int taken_by(struct iteration by, float *out, const char *recipe, const char *device, int rows, double exact,
                    int captured)
{
    void *stream = device ? new_stream() : NULL, *graph = NULL, *context = NULL;
    struct problem p;
    int error = problem_open_as(&p, device, recipe, stream, rows);
    if (!error && !strncmp(recipe, "muon", 4)) error = halfstep_set_hyper(p.o, 0, "exact", exact);
    if (!error && by.list) error = halfstep_set_hyper(p.o, 0, "ns_coefficients", by.list);
    if (!error && by.gram) error = halfstep_set_choice(p.o, 0, "ns_form", "gram");
    for (int step = 0; !error && step < (captured ? 1 : 3); step++)
        if (!(error = problem_gradients(&p, 0))) error = halfstep_step(p.o, p.weights, p.gradients);
    if (!error && captured) {
        error = halfstep_synchronize(p.o);
        DRIVER("cuStreamBeginCapture_v2", void *, int)(stream, 0);
        if (!error) error = halfstep_step(p.o, p.weights, p.gradients);
        DRIVER("cuStreamEndCapture", void *, void **)(stream, &graph);
        DRIVER("cuDevicePrimaryCtxRetain", void **, int)(&context, 0);
        DRIVER("cuCtxPushCurrent_v2", void *)(context);
        for (int step = 0; step < 2; step++) DRIVER("cuGraphLaunch", void *, void *)(graph, stream);
        DRIVER("cuCtxPopCurrent_v2", void **)(&context);
    }
    if (!error) error = halfstep_read_slot(p.o, 0, WEIGHT, p.weights[0], 0, rows, out);
    for (int j = 0; j < N; j++) out[j] -= 1.0f + (float)(j % 5);
    problem_close(&p);
    if (graph) DRIVER("cuGraphDestroy", void *)(graph);
    if (stream) free_stream(stream);
    return error;
}

static int taken(float *out, const char *recipe, const char *device, int rows, double exact, int captured)
{
    return taken_by((struct iteration){0, 0}, out, recipe, device, rows, exact, captured);
}

static double distance(const float *a, const float *b)
{
    double apart = 0.0, all = 0.0;
    for (int i = 0; i < N; i++) {
        apart += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        all += (double)b[i] * (double)b[i];
    }
    return sqrt(apart / all);
}

/* If kernels are the host's entries, these do all the work, and the products are not seen. */
static void judge_products(struct iteration by, int rows, int emulated, double *apart)
{
    static float host[N], exact[N], fast[N], replayed[N];
    MUST(taken_by(by, host, "muon/f32/f32", NULL, rows, 0, 0));
    MUST(taken_by(by, exact, "muon/f32/f32", "cuda", rows, 1, 0));
    MUST(taken_by(by, fast, "muon/f32/f32", "cuda", rows, 0, 0));
    MUST(taken_by(by, replayed, "muon/f32/f32", "cuda", rows, 0, 1));
    CHECK(!memcmp(host, exact, sizeof host), "%d rows, list %d, form %d: exact products differ", rows, by.list,
          by.gram);
    CHECK(!memcmp(replayed, fast, sizeof fast), "%d rows, list %d, form %d: replayed products differ", rows, by.list,
          by.gram);
    *apart = distance(fast, host);
    CHECK(emulated ? *apart > 1e-5 && *apart < 0.1 : *apart == 0.0,
          "%d rows, list %d, form %d: 16 bits are %g from exact", rows, by.list, by.gram, *apart);
}

/* Wide, square and tall matrices, each also with another list of coefficients. */
static void test_products(int emulated)
{
    static const int shapes[] = {24, ROWS, 64, 128};
    for (size_t i = 0; i < 2 * COUNT(shapes) - 1; i++) {
        const int list = i < COUNT(shapes) ? 0 : (int)(i - COUNT(shapes)) + 1;
        double apart;
        judge_products((struct iteration){list, 0}, shapes[i % COUNT(shapes)], emulated, &apart);
    }
    check_clean("products");
}

/* The Gram form: with exact products in one stretch or two, in FP16 in two to four. FP16 comes nearer to exact products
 * than the standard form in BF16 does. */
static void test_gram_products(int emulated)
{
    static const int shapes[] = {24, 32, 96, 128};
    for (size_t i = 0; i < COUNT(shapes); i++) {
        double gram, standard;
        judge_products((struct iteration){(int)i, 1}, shapes[i], emulated, &gram);
        judge_products((struct iteration){(int)i, 0}, shapes[i], emulated, &standard);
        CHECK(emulated ? gram < standard / 2 : gram == standard, "%d rows, list %d: FP16 is %g off, BF16 %g", shapes[i],
              (int)i, gram, standard);
    }
    check_clean("products of the Gram form");
}

/* Launches that only matrices need. */
static void test_matrices(void)
{
    static const char *const recipes[] = {"muon/bf16-sr/int8", "came/f32/f32"};
    static float host[N], device[N];
    for (size_t i = 0; i < COUNT(recipes); i++) {
        MUST(taken(host, recipes[i], NULL, 96, 1, 0));
        MUST(taken(device, recipes[i], "cuda", 96, 1, 0));
        CHECK(!memcmp(host, device, sizeof host), "%s: other bits than the host's", recipes[i]);
    }
    check_clean("matrices");
}

/* ---- Errors ---- */

/* Makes every call that takes an address with one that is not the handle's GPU's. says: whose address it is. */
static void check_foreign(struct problem *p, void *bad, const char *says)
{
    static float out[N];
    static int64_t statistics[4096];
    const void *gradients[TENSORS];
    void *weights[TENSORS];
    uint64_t count = 0;
    memcpy(gradients, p->gradients, sizeof gradients);
    memcpy(weights, p->weights, sizeof weights);
    gradients[1] = weights[1] = bad;
#define FOREIGN(call)                                                                                \
    do {                                                                                             \
        int error_ = (call);                                                                         \
        CHECK(error_ == ARGUMENT && strstr(halfstep_error_detail(p->o), says), "%s: %s (%s)", #call, \
              halfstep_strerror(error_), halfstep_error_detail(p->o));                               \
    } while (0)
    FOREIGN(halfstep_step(p->o, weights, p->gradients));
    FOREIGN(halfstep_step(p->o, p->weights, gradients));
    FOREIGN(step_begin(p->o, gradients, statistics));
    FOREIGN(step_tensor(p->o, 1, bad, p->gradients[1]));
    FOREIGN(step_tensor(p->o, 1, p->weights[1], bad));
    FOREIGN(step_tensor_begin(p->o, 1, bad, statistics));
    FOREIGN(halfstep_accumulate(p->o, 1, bad, "f32", p->gradients[1], "f32", 1.0));
    FOREIGN(halfstep_accumulate(p->o, 1, p->weights[1], "f32", bad, "f32", 1.0));
    FOREIGN(accumulate_states(p->o, gradients));
    FOREIGN(accumulate_states_tensor(p->o, 1, bad));
    FOREIGN(halfstep_read_slot(p->o, 1, WEIGHT, bad, 0, 1, out));
    FOREIGN(halfstep_read_average(p->o, 1, bad, 0, 1, out));
    FOREIGN(halfstep_write_slot(p->o, 1, WEIGHT, bad, 0, 1, out));
    FOREIGN(halfstep_saturated(p->o, 1, bad, &count));
    FOREIGN(halfstep_bind_hyper(p->o, 0, "lr", bad));
    FOREIGN(halfstep_bind_slot(p->o, 1, STATE, bad, NULL));
#undef FOREIGN
    const halfstep_options options = {.struct_size = sizeof options, .device = "cuda:0"};
    int32_t group;
    const halfstep_tensor t = {.struct_size = sizeof t, .name = "w", .ndim = 1, .rows = 4, .gradient = "f32"};
    halfstep_optimizer *o;
    MUST(halfstep_create(&options, &o));
    MUST(halfstep_add_group(o, "adamw", &group));
    MUST(halfstep_add_tensor(o, &t, &group));
    const int error = halfstep_bind_states(o, bad, (uint64_t)1 << 30);
    CHECK(error == ARGUMENT && strstr(halfstep_error_detail(o), says), "halfstep_bind_states(): %s",
          halfstep_error_detail(o));
    MUST(halfstep_allocate_states(o));
    halfstep_destroy(o);
}

static void test_pointers(void)
{
    struct problem p, q;
    fake->devices = 2;
    static float here[N];
    void *weights[TENSORS];
    const void *gradients[TENSORS];
    MUST(problem_open(&p, "cuda:0", "adamw/bf16-sr/bf16-sr", NULL));
    MUST(problem_open(&q, "cuda:1", "adamw/bf16-sr/bf16-sr", NULL));
    MUST(problem_gradients(&p, 0));
    MUST(problem_gradients(&q, 0));
    uint64_t before = problem_hash(&p);
    memcpy(weights, p.weights, sizeof weights);
    memcpy(gradients, p.gradients, sizeof gradients);
    weights[1] = here;
    int error = halfstep_step(p.o, weights, gradients);
    CHECK(error == ARGUMENT && strstr(halfstep_error_detail(p.o), "weights of tensor 'b'") &&
              strstr(halfstep_error_detail(p.o), "memory of the process"),
          "weights of the process: %s", halfstep_error_detail(p.o));
    weights[1] = p.weights[1];
    gradients[2] = q.gradients[2];
    error = halfstep_step(p.o, weights, gradients);
    CHECK(error == ARGUMENT && strstr(halfstep_error_detail(p.o), "gradient of tensor 'c'") &&
              strstr(halfstep_error_detail(p.o), "memory of GPU 1"),
          "a gradient of another GPU: %s", halfstep_error_detail(p.o));
    check_foreign(&p, here + (16 - (uintptr_t)here / 4 % 16) % 16, "memory of the process");
    check_foreign(&p, q.weights[0], "memory of GPU 1");
    CHECK(before == problem_hash(&p), "a refused call has changed something");
    MUST(halfstep_step(p.o, p.weights, p.gradients));
    MUST(halfstep_step(q.o, q.weights, q.gradients));
    CHECK(problem_hash(&p) == problem_hash(&q), "after refused calls a step has other bits");
    problem_close(&q);
    problem_close(&p);
    fake->devices = 1;
    check_clean("pointers");
}

/* Runs a handle's life once per allocation that is refused. The code comes back with a sentence, and nothing is left
 * behind. */
static void test_out_of_memory(void)
{
    for (long k = 1, fired = 1; fired; k++) {
        struct problem p;
        fake->fail_allocation = k;
        int error = problem_open(&p, "cuda", "lamb/bf16-sr/int8", NULL);
        if (!error) error = problem_gradients(&p, 0);
        if (!error) error = halfstep_step(p.o, p.weights, p.gradients);
        if (!error) error = step_tensor(p.o, 0, p.weights[0], p.gradients[0]);
        if (!error && problem_hash(&p) < 4) error = MEMORY;
        fired = !fake->fail_allocation;
        CHECK(error == (fired ? MEMORY : OK), "allocation %ld: %s", k, halfstep_strerror(error));
        CHECK(!fired || strstr(halfstep_error_detail(p.o), "memory"), "allocation %ld: '%s'", k,
              halfstep_error_detail(p.o));
        fake->fail_allocation = 0;
        /* The handle that could not allocate goes on. ORDER: its states have memory already. */
        if (p.o && fired && p.weights[TENSORS - 1] && p.gradients[TENSORS - 1]) {
            error = halfstep_allocate_states(p.o);
            CHECK((error == OK || error == ORDER) && !halfstep_step(p.o, p.weights, p.gradients) &&
                      !halfstep_synchronize(p.o),
                  "allocation %ld: the handle does not go on: %s", k, halfstep_error_detail(p.o));
        }
        problem_close(&p);
        check_clean("out of memory");
        if (!fired) printf("     %ld allocations refused\n", k - 1);
    }
}

/* A step without memory, or whose launch is refused before the first update, changes nothing: made again, it has the
 * same results. After the first update, weights and states may not belong together, and the handle says so. */
static void test_step_made_again(void)
{
    static const char recipe[] = "lamb/bf16-sr/int8";
    uint64_t expected = 0;
    for (int launches = 0; launches < 2; launches++) {
        int again = 0, cut = 0;
        for (long k = 0, fired = 1; fired; k++) {
            struct problem p;
            MUST(problem_open(&p, "cuda", recipe, NULL));
            MUST(problem_gradients(&p, 0));
            MUST(halfstep_synchronize(p.o));
            if (launches) fake->fail_launch = k;
            else fake->fail_allocation = k;
            int error = halfstep_step(p.o, p.weights, p.gradients);
            fired = !k || !(launches ? fake->fail_launch : fake->fail_allocation);
            fake->fail_launch = fake->fail_allocation = 0;
            int wanted = !fired || !k ? OK : launches ? DEVICE : MEMORY;
            const char *says = launches ? "OUT_OF_RESOURCES" : "OUT_OF_MEMORY";
            CHECK(error == wanted && (!error || strstr(halfstep_error_detail(p.o), says)), "%s %ld: %s (%s)",
                  launches ? "launch" : "allocation", k, halfstep_strerror(error), halfstep_error_detail(p.o));
            if (error && !(error = halfstep_step(p.o, p.weights, p.gradients))) again++;
            if (error) {
                cut++;
                CHECK(launches && error == DEVICE &&
                          strstr(halfstep_error_detail(p.o), "load a checkpoint into a new handle"),
                      "%ld: %s", k, halfstep_error_detail(p.o));
            } else {
                uint64_t hash = problem_hash(&p);
                if (!k && !launches) expected = hash;
                CHECK(hash == expected, "%s %ld: %016" PRIx64 ", and undisturbed %016" PRIx64,
                      launches ? "launch" : "allocation", k, hash, expected);
            }
            problem_close(&p);
            check_clean(recipe);
        }
        CHECK(again > 0 && (cut > 0) == launches, "%d steps are made again, %d cut short", again, cut);
    }
}

/* Runs in a process of its own, because the library keeps what it found out about the driver. prints: a part of the
 * error text. */
static void in_child(void (*live)(void), const char *name, const char *value, const char *says, int code)
{
    int ends[2];
    char text[400] = "";
    if (pipe(ends)) return;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        if (name) setenv(name, value, 1);
        if (name) fake->devices = -1;
        dup2(ends[1], 3);
        live();
        test_leave(0);
    }
    close(ends[1]);
    size_t got = 0;
    for (ssize_t n; got < sizeof text - 1 && (n = read(ends[0], text + got, sizeof text - 1 - got)) > 0;)
        got += (size_t)n;
    close(ends[0]);
    int status = test_child_status(child);
    CHECK(status == 0, "%s=%s: the process ended with %d", name ? name : "-", value, status);
    CHECK(strstr(text, says) && atoi(text) == code, "%s=%s: '%s'", name ? name : "-", value, text);
}

static void create_and_tell(void)
{
    halfstep_options options = {.struct_size = sizeof options, .device = "cuda"};
    halfstep_optimizer *o;
    int error = halfstep_create(&options, &o);
    dprintf(3, "%d %s", error, halfstep_error_detail(NULL));
    /* The process goes on. */
    if (halfstep_create(NULL, &o)) test_leave(1);
    halfstep_destroy(o);
    SIZED(halfstep_device_info, info);
    if (halfstep_get_device_info("cuda", &info) || info.usable || info.minimum_driver != 12000) test_leave(2);
}

/* No library can be opened: the fake is unloaded, and there is no room for another file. */
static void lose_driver_and_tell(void)
{
    struct rlimit none = {4, 4};
    if (dlclose(driver) || dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) || setrlimit(RLIMIT_NOFILE, &none))
        test_leave(3);
    create_and_tell();
}

static struct {
    const char *compute;
    int refused; /* bits, by place in the table */
} image_case;

/* The device code that is taken is reported, and runs. */
static void load_and_tell(void)
{
    struct problem p;
    setenv("FAKE_CUDA_COMPUTE", image_case.compute, 1);
    for (int i = 0; i < TEXTS; i++)
        if (image_case.refused >> i & 1) code[i][TEXT_AT] = '?';
    int error = problem_open(&p, "cuda", "adamw", NULL);
    if (error) {
        create_and_tell();
        if (fake->depth) test_leave(3);
        return;
    }
    if (problem_gradients(&p, 0) || halfstep_step(p.o, p.weights, p.gradients) || halfstep_synchronize(p.o))
        test_leave(4);
    dprintf(3, "%d %s", error, fake->image);
    problem_close(&p);
}

static void test_images(void)
{
    static const struct {
        const char *compute;
        int refused;
        const char *says;
    } cases[] = {
        {"90", 0, "fake 90"},
        {"89", 0, "fake 89"},
        {"87", 0, "fake 86"},
        {"80", 0, "fake 80"},
        {"89", 2, "fake 86"},
        {"89", 6, "fake 80"},
        {"89", 14, "fake tx"},
        {"90", 1, "fake tx"},
        {"120", 0, "fake tx"},
        {"89", 30, "cuModuleLoadDataEx: CUDA_ERROR_INVALID_IMAGE"},
        {"120", 16, "the device code does not fit this driver"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        image_case.compute = cases[i].compute;
        image_case.refused = cases[i].refused;
        in_child(load_and_tell, "HALFSTEP_CUDA_IMAGE", "", cases[i].says, cases[i].refused & 16 ? DEVICE : OK);
    }
}

/* After a fault of a kernel every handle on the GPU refuses, with the error text. Handles on the processor go on. */
static void fault_and_tell(void)
{
    struct problem p, q, h;
    if (problem_open(&p, "cuda", "adamw", NULL) || problem_open(&q, "cuda", "adamw", NULL) ||
        problem_open(&h, NULL, "adamw", NULL) || problem_gradients(&p, 0))
        test_leave(1);
    fake->fault = 3;
    if (halfstep_step(p.o, p.weights, p.gradients)) test_leave(2);
    int error = halfstep_synchronize(p.o);
    dprintf(3, "%d %s", error, halfstep_error_detail(p.o));
    SIZED(halfstep_record, c);
    if (halfstep_step(p.o, p.weights, p.gradients) != DEVICE) test_leave(3);
    if (halfstep_step(q.o, q.weights, q.gradients) != DEVICE) test_leave(4);
    if (!strstr(halfstep_error_detail(q.o), "ILLEGAL_ADDRESS")) test_leave(5);
    if (get_counters(p.o, 0, &c) != DEVICE) test_leave(6);
    if (halfstep_step(h.o, h.weights, h.gradients)) test_leave(7);
    problem_close(&p);
    problem_close(&q);
    problem_close(&h);
}

/* ---- The test can fail ---- */

/* A handle may be closed during its step. Another handle then frees the memory. */
static void test_closing(void)
{
    struct problem p, q;
    MUST(problem_open(&p, "cuda", "adamw", NULL));
    MUST(problem_open(&q, "cuda", "adamw", NULL));
    MUST(problem_gradients(&p, 0));
    MUST(problem_gradients(&q, 0));
    MUST(halfstep_step(p.o, p.weights, p.gradients));
    halfstep_destroy(p.o);
    p.o = q.o;
    for (int i = 0; i < TENSORS; i++) {
        halfstep_device_release(p.o, p.weights[i]);
        halfstep_device_release(p.o, (void *)(uintptr_t)p.gradients[i]);
    }
    problem_close(&q);
    /* Its link may be closed during a copy, though the handle leaves none there. */
    struct hstep_link *link;
    char sent[64] = "";
    MUST(hstep_link_open(&link, "", NULL));
    int error = hstep_link_enter(link);
    if (!error && !(error = hstep_link_scratch(link, sizeof sent)))
        error = hstep_link_send(link, link->scratch, sent, sizeof sent);
    hstep_link_leave(link);
    hstep_link_close(link);
    CHECK(!error, "a copy: %s", halfstep_strerror(error));
    check_clean("closing");
}

static void all_of_it(void)
{
    test_submission("adamw/bf16-sr/int8");
    test_streams();
    test_rounds();
    test_between_steps();
    test_halves();
    test_micro_steps();
    test_choices();
    test_graph();
    test_matrices();
    test_closing();
}

static void test_mutation(const char *name, enum fake_cuda_mutation mutation, int call)
{
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        fake->mutation = (int)mutation;
        fake->call = call;
        fake->strict = 1;
        if (mutation == FAKE_CUDA_SWAP_FIELDS) alarm(2); /* may be an endless loop */
        if (!freopen("/dev/null", "w", stdout) || !freopen("/dev/null", "w", stderr)) test_leave(0);
        test_group_failed = 0;
        all_of_it();
        test_leave(test_group_failed != 0);
    }
    int noticed = test_child_status(child) > 0;
    CHECK(noticed == (mutation != FAKE_CUDA_NONE), "%s (call %d), and %s is noticed", name, call,
          noticed ? "something" : "nothing");
}

/* A call that the library makes in several places is left out everywhere, and in each place by itself. */
static void test_left_out(const char *name, enum fake_cuda_mutation mutation)
{
    memset(fake->calls, 0, sizeof fake->calls);
    all_of_it();
    CHECK(fake->calls[mutation] > 0, "%s, and nobody has asked for it", name);
    for (int call = 0; call <= fake->calls[mutation]; call++) test_mutation(name, mutation, call);
}

/* Only some of the pairs are swapped. */
static void test_swaps(int stride)
{
    const char *(*pair)(int);
    void *symbol = dlsym(driver, "fake_cuda_pair");
    memcpy(&pair, &symbol, sizeof pair);
    for (int n = 1; pair(n); n += stride) test_mutation(pair(n), FAKE_CUDA_SWAP_FIELDS, n);
}

int main(int argc, char **argv)
{
    int n = 0;
    char path[4096];
    const char *build = getenv("HALFSTEP_BUILD"), *library = getenv("FAKE_CUDA");
    test_init(argc, argv);
    /* After loading by its path, the name means this library. */
    if (library) snprintf(path, sizeof path, "%s", library);
    else snprintf(path, sizeof path, "%s/tests/cuda/fake/libcuda.so.1", build ? build : "build");
    driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        printf("cannot load %s (set HALFSTEP_BUILD to the build, or FAKE_CUDA to a driver)\n", path);
        return 1;
    }
    snprintf(path, sizeof path, "%s/tests/cuda/fake/libcublas.so.12", build ? build : "build");
    if (!dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
        printf("cannot load %s\n", path);
        return 1;
    }
    void *symbol = dlsym(driver, "fake_cuda_control");
    struct fake_cuda_control *(*control)(void);
    memcpy(&control, &symbol, sizeof control);
    fake = control();
    snprintf(path, sizeof path, "%s/tests/cuda/fake/image", build ? build : "build");
    setenv("HALFSTEP_CUDA_IMAGE", path, 1);
    setenv("HALFSTEP_DEVICE_CHECK", "never", 1); /* test_device_check has it */
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    if (!cases) return 1;

    /* Runs first, in children, while nothing is known of the driver yet. */
    TEST("what cannot be used is told by a sentence") {
        in_child(create_and_tell, "FAKE_CUDA_DEVICES", "0", "cuInit: CUDA_ERROR_NO_DEVICE", DEVICE);
        in_child(create_and_tell, "FAKE_CUDA_DRIVER", "11080", "supports CUDA 11.8; it must support 12.0 or newer",
                 DEVICE);
        in_child(create_and_tell, "FAKE_CUDA_COMPUTE", "75", "compute capability 7.5; it must be at least 8.0", DEVICE);
        in_child(create_and_tell, "HALFSTEP_CUDA_IMAGE", "/nowhere", "/nowhere cannot be read", DEVICE);
        in_child(create_and_tell, "HALFSTEP_CUDA_IMAGE", "/dev/null", "INVALID_IMAGE", DEVICE);
    }
    TEST("no driver is told by a sentence")
        in_child(lose_driver_and_tell, NULL, "", "there is no NVIDIA driver", DEVICE);
    TEST("device code that is refused falls back to PTX, and that to a sentence") test_images();
    TEST("a fault is lasting, and the process lives on")
        in_child(fault_and_tell, NULL, "", "CUDA_ERROR_ILLEGAL_ADDRESS", DEVICE);
    const struct golden_layout layouts[] = {
        {.threads = 1, .device = "cuda"},
        {.threads = 1, .parts = 2, .states_bound = 1, .device = "cuda:0"},
        {.threads = 1, .parts = 3, .by_columns = 1, .device = "cuda"},
    };
    const char *const names[] = {"golden cases, through the driver", "in 2 shards of rows", "in 3 shards of columns"};
    for (int l = 0; l < 3; l++)
        TEST(names[l]) {
            int stride = BY_LENGTH(61, l ? 61 : 16, l ? 16 : 1);
            for (int i = (l + 1) % stride; i < n; i += stride) run_golden(list, &cases[i], &layouts[l]);
        }
    TEST("steps are submitted and not waited for") {
        test_submission("adamw/bf16-sr/int8");
        test_submission("lamb/f32/f32");
    }
    TEST("one launch for all tensors of a phase") test_launches();
    TEST("a refused step is told when somebody asks") test_refusal();
    TEST("every reading tells of a refused step") test_refused_readings();
    TEST("rounds of single tensors") test_rounds();
    TEST("what is set between steps reaches the device") test_between_steps();
    TEST("steps and rounds in halves") test_halves();
    TEST("micro-steps") test_micro_steps();
    TEST("another generator, and verdicts and norms of single tensors") test_choices();
    TEST("indices of 64 bits") test_far_indices();
    TEST("streams take turns in order") test_streams();
    TEST("a captured step goes on in replays") test_graph();
    TEST("matrices and their vectors") test_matrices();
    TEST("products of matrices, exact and in BF16") test_products(library != NULL);
    TEST("products of the Gram form, exact and in FP16") test_gram_products(library != NULL);
    TEST("memory of another is refused") test_pointers();
    TEST("out of memory comes back as its code") test_out_of_memory();
    TEST("a step without memory or a launch changes nothing, or says so") test_step_made_again();
    TEST("nothing is noticed where nothing is wrong") test_mutation("all is as it should be", FAKE_CUDA_NONE, 0);
    TEST("a wait for a stream that is left out is noticed")
        test_left_out("no stream is waited for", FAKE_CUDA_NO_STREAM_SYNCHRONIZE);
    TEST("a wait for an event that is left out is noticed")
        test_left_out("no event is waited for", FAKE_CUDA_NO_EVENT_SYNCHRONIZE);
    TEST("an event that is left out is noticed") test_left_out("no event is recorded", FAKE_CUDA_NO_EVENT_RECORD);
    TEST("a stream that does not wait for another is noticed")
        test_left_out("no stream waits for an event", FAKE_CUDA_NO_STREAM_WAIT);
    TEST("fields of a launch in each other's place are noticed") test_swaps(library ? 16 : UNLESS_ALL(16, 1));
    TEST("parameters in each other's place are noticed")
        test_mutation("parameters are swapped", FAKE_CUDA_SWAP_PARAMETERS, 0);
    TEST("blocks and threads in each other's place are noticed")
        test_mutation("blocks and threads are swapped", FAKE_CUDA_SWAP_SHAPE, 0);
    free(cases);
    free(list);
    return test_done();
}
