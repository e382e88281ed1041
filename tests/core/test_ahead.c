/* Tests steps in advance. The cases of tests/golden/hashes.txt must have their hashes, whatever becomes of each result.
 * Also: which results stand, that nothing can be read of them before the step, threads, and what is refused. A run
 * without arguments takes a ninth of the cases; --short: a 61st; --all: all.
 * Over 500 lines because all groups share the memory of results. */
#define HALFSTEP_ADVANCED
#include <pthread.h>
#include <stdatomic.h>

#include "golden_case.h"
#include "ref/fixture.h"

/* ---- Memory of results ------------------------------------------------------------------------------------------- */

enum { MOST_TENSORS = 32 };

/* A call about all tensors of a handle, and memory for their results. */
struct results {
    halfstep_optimizer *o;
    int n;
    halfstep_ahead place[MOST_TENSORS]; /* where there is memory */
    halfstep_ahead ahead[MOST_TENSORS]; /* what the call gets of it */
    uint64_t weight_bytes[MOST_TENSORS], state_bytes[MOST_TENSORS];
    int code[MOST_TENSORS]; /* 0, or why there are no results */
};

/* Windows has other names for aligned memory, and free() does not take it. */
#ifdef _WIN32
#include <malloc.h>
#define aligned_alloc(alignment, bytes) _aligned_malloc(bytes, alignment)
#define free_aligned _aligned_free
#else
#define free_aligned free
#endif

static void *aligned(uint64_t bytes)
{
    void *memory = aligned_alloc(64, (size_t)(bytes / 64 + 1) * 64);
    if (!memory) exit(1);
    return memory;
}

static void open_results(struct results *r, halfstep_optimizer *o)
{
    memset(r, 0, sizeof *r);
    r->o = o;
    r->n = halfstep_tensor_count(o);
    if (r->n > MOST_TENSORS) abort();
    for (int i = 0; i < r->n; i++) {
        r->weight_bytes[i] = slot_info(o, i, WEIGHT).code_bytes;
        r->code[i] = halfstep_ahead_bytes(o, i, &r->state_bytes[i]);
        r->place[i] = (halfstep_ahead){aligned(r->weight_bytes[i]), aligned(r->state_bytes[i])};
    }
}

static void free_results(struct results *r)
{
    for (int i = 0; i < r->n; i++) {
        free_aligned(r->place[i].weight);
        free_aligned(r->place[i].states);
    }
    r->n = 0;
}

/* Steps a tensor in advance. */
static int advance(struct results *r, int i, int micro, void *const *weights, const void *gradient)
{
    const halfstep_call call = {.struct_size = sizeof call,
                                .kind = HALFSTEP_CALL_TENSOR,
                                .tensor = i,
                                .micro = micro,
                                .weights = micro ? NULL : weights + i,
                                .gradients = &gradient,
                                .ahead = &r->place[i]};
    return halfstep_run(r->o, &call);
}

/* Fills the memory of a result with rubbish. */
static void spoil(struct results *r, int i)
{
    memset(r->place[i].weight, 0x5a, (size_t)r->weight_bytes[i]);
    memset(r->place[i].states, 0x5a, (size_t)r->state_bytes[i]);
}

/* Returns a hash of all that can be read of a handle, except its refusals, and of some weights. */
static uint64_t hash_of(const halfstep_optimizer *o, void *const *weights)
{
    uint64_t hash = HASH_START;
    SIZED(halfstep_slot_info, info);
    for (int32_t i = 0; i < halfstep_tensor_count(o); i++) {
        halfstep_record record = record_of(o, HALFSTEP_RECORD_TENSOR, i);
        hash = hash_bytes(hash, &record, sizeof record);
        for (int s = 0; !halfstep_get_slot_info(o, i, s, &info); s++) {
            const void *code = s == WEIGHT ? weights[i] : info.code;
            if (code) hash = hash_bytes(hash, code, (size_t)info.code_bytes);
            if (info.extra) hash = hash_bytes(hash, info.extra, (size_t)info.extra_bytes);
        }
    }
    for (int32_t g = 0; g < halfstep_group_count(o); g++) {
        halfstep_record record = record_of(o, HALFSTEP_RECORD_GROUP, g);
        hash = hash_bytes(hash, &record, sizeof record);
    }
    halfstep_record record = record_of(o, HALFSTEP_RECORD_OPTIMIZER, 0);
    return hash_bytes(hash, &record, sizeof record);
}

/* ---- Golden cases ------------------------------------------------------------------------------------------------ */

/* What becomes of a result. From SPOILED on the memory holds rubbish afterwards, because it may not be used. One made
 * with another LR or SCALE may stand if the update does not depend on it. */
enum way { PLAIN, STANDS, NEVER, TWICE, LR, SCALE, SPOILED, LOST = SPOILED, RECORD, MICRO, OTHER_GRADIENT, WAYS };

/* The results of a case's handles, and hashes of their weights before the step. */
static struct {
    struct results results[GOLDEN_MAX_PARTS];
    uint64_t weight[GOLDEN_MAX_PARTS][MOST_TENSORS];
    int n;
    uint64_t steps, made;
} golden;

static struct results *golden_results(halfstep_optimizer *o, int *number)
{
    for (*number = 0; *number < golden.n; ++*number)
        if (golden.results[*number].o == o) return &golden.results[*number];
    open_results(&golden.results[golden.n++], o);
    return &golden.results[*number];
}

static uint64_t hash_weight(const struct results *r, int i, void *const *weights)
{
    return hash_bytes(HASH_START, weights[i], (size_t)r->weight_bytes[i]);
}

/* Makes a result in one of the ways. Returns its code. */
static int make_result(struct results *r, int i, enum way way, const halfstep_call *step)
{
    halfstep_optimizer *o = r->o;
    SIZED(halfstep_tensor, tensor);
    MUST(halfstep_get_tensor(o, i, &tensor));
    const char *hyper = way == LR ? "lr" : "gradient_scale";
    const int32_t group = way == LR ? tensor.group : ALL_GROUPS;
    const void *gradient = step->gradients[i];
    const size_t bytes = (size_t)(tensor.n_rows * tensor.n_columns) * (strcmp(tensor.gradient, "f32") ? 2 : 4);
    double value = 0;
    void *other = NULL;
    if (way == LR || way == SCALE) {
        MUST(halfstep_get_hyper(o, group, hyper, &value));
        MUST(halfstep_set_hyper(o, group, hyper, value + 0.5));
    }
    if (way == TWICE || way == OTHER_GRADIENT) gradient = other = zeroed(bytes);
    if (way == OTHER_GRADIENT) memcpy(other, step->gradients[i], bytes);
    int code = advance(r, i, way == MICRO, step->weights, gradient);
    if (way == LR || way == SCALE) MUST(halfstep_set_hyper(o, group, hyper, value));
    if (way == TWICE) code = advance(r, i, 0, step->weights, step->gradients[i]);
    if (way == RECORD) {
        halfstep_record record = record_of(o, HALFSTEP_RECORD_TENSOR, i);
        MUST(halfstep_set_record(o, &record));
    }
    free(other);
    return code;
}

/* Makes results, each in a way of its own. */
static void before_golden(halfstep_optimizer *o, halfstep_call *call)
{
    int number;
    struct results *r = golden_results(o, &number);
    const uint64_t hash = hash_of(o, call->weights);
    for (int i = 0; i < r->n; i++) {
        struct source s = {golden.steps * 100 + (uint64_t)i};
        enum way way = (enum way)(next64(&s) % WAYS);
        r->ahead[i] = way == PLAIN ? (halfstep_ahead){NULL, NULL} : r->place[i];
        golden.weight[number][i] = hash_weight(r, i, call->weights);
        spoil(r, i);
        if (way == PLAIN || way == NEVER || !call->gradients[i]) continue;
        const int code = make_result(r, i, way, call);
        CHECK(code == OK || code == HALFSTEP_NONFINITE || code == UNSUPPORTED, "tensor %d: %s", i,
              halfstep_error_detail(o));
        CHECK((code == UNSUPPORTED) == (r->code[i] == UNSUPPORTED) || way == MICRO, "tensor %d: %d", i, code);
        golden.made += code == OK;
        if (way == LOST) r->ahead[i].states = NULL;
        if (way >= SPOILED) spoil(r, i);
    }
    CHECK(hash_of(o, call->weights) == hash, "a step in advance changed something");
    call->ahead = r->ahead;
    golden.steps++;
}

/* Checks that weights are as they were, and brings in the new ones. */
static void after_golden(halfstep_optimizer *o, const halfstep_call *call)
{
    int number;
    struct results *r = golden_results(o, &number);
    for (int i = 0; i < r->n; i++) {
        if (!r->ahead[i].weight) continue;
        CHECK(hash_weight(r, i, call->weights) == golden.weight[number][i], "tensor %d: the weight was written", i);
        memcpy(call->weights[i], r->ahead[i].weight, (size_t)r->weight_bytes[i]);
    }
}

static void test_golden(void)
{
    static const struct {
        const char *name;
        struct golden_layout layout;
    } ways[] = {
        {"golden cases, 2 threads", {.threads = 2}},
        {"golden cases, one thread", {.threads = 1}},
        {"golden cases, 2 shards of rows", {.threads = 2, .parts = 2}},
        {"golden cases, 3 shards of columns", {.threads = 3, .parts = 3, .by_columns = 1}},
    };
    int n = 0;
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    if (!cases) exit(1);
    for (size_t w = 0; w < COUNT(ways); w++)
        TEST(ways[w].name) {
            const int stride = BY_LENGTH(61, w ? 61 : 9, w ? 16 : 1);
            struct golden_layout layout = ways[w].layout;
            layout.before = before_golden;
            layout.after = after_golden;
            golden.made = 0;
            for (int i = (int)w * 7 % stride; i < n; i += stride) {
                golden.n = 0;
                golden.steps = (uint64_t)i * 1000 + w;
                check_golden(list, &cases[i], &layout);
                for (int p = 0; p < golden.n; p++) free_results(&golden.results[p]);
            }
            CHECK(golden.made > 100, "only %llu results", (unsigned long long)golden.made);
        }
    free(cases);
    free(list);
}

/* ---- One model --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int ndim;
    int64_t rows, row_length;
} layers[] = {{"a", 2, 20, 96}, {"b", 1, 700, 1},   {"c", 3, 12, 300},
              {"d", 2, 0, 40},  {"e", 2, 1, 70001}, {"f", 0, 1, 1}};
enum { LAYERS = COUNT(layers) };

/* Two handles with the same values. One makes plain steps, and one makes steps with results. */
struct pair {
    halfstep_optimizer *o[2];
    void *weight[2][LAYERS];
    float *gradient[LAYERS];
    const void *gradients[LAYERS];
    struct results r;
    struct source source;
};

enum { PLAINLY, AHEAD };

static int64_t elements_of(int i) { return layers[i].rows * layers[i].row_length; }

static void new_gradients(struct pair *p)
{
    for (int i = 0; i < LAYERS; i++)
        for (int64_t j = 0; j < elements_of(i); j++) p->gradient[i][j] = (float)next_unit(&p->source) - 0.5f;
}

static void open_pair(struct pair *p, const char *recipe, int threads)
{
    memset(p, 0, sizeof *p);
    for (int h = 0; h < 2; h++) {
        p->o[h] = new_optimizer(recipe, threads, 7);
        if (!strncmp(recipe, "sgd", 3)) MUST(halfstep_set_hyper(p->o[h], 0, "momentum", 0.9));
        for (int i = 0; i < LAYERS; i++)
            ADD_TENSOR(p->o[h], .name = layers[i].name, .ndim = layers[i].ndim, .may_be_empty = 1,
                       .rows = layers[i].rows, .row_length = layers[i].row_length, .n_rows = layers[i].rows,
                       .n_columns = layers[i].row_length, .gradient = "f32");
        MUST(halfstep_allocate_states(p->o[h]));
        for (int i = 0; i < LAYERS; i++) p->weight[h][i] = zeroed(slot_info(p->o[h], i, WEIGHT).code_bytes);
    }
    for (int i = 0; i < LAYERS; i++) p->gradients[i] = p->gradient[i] = zeroed((size_t)elements_of(i) * 4);
    open_results(&p->r, p->o[AHEAD]);
    new_gradients(p);
}

static void close_pair(struct pair *p)
{
    for (int h = 0; h < 2; h++) {
        halfstep_destroy(p->o[h]);
        for (int i = 0; i < LAYERS; i++) free(p->weight[h][i]);
    }
    for (int i = 0; i < LAYERS; i++) free(p->gradient[i]);
    free_results(&p->r);
}

static void set_both(struct pair *p, const char *name, double value)
{
    for (int h = 0; h < 2; h++) MUST(halfstep_set_hyper(p->o[h], ALL_GROUPS, name, value));
}

/* Makes the results of all tensors that have a gradient. */
static void advance_all(struct pair *p, int micro)
{
    for (int i = 0; i < LAYERS; i++)
        if (p->gradients[i]) MUST(advance(&p->r, i, micro, p->weight[AHEAD], p->gradients[i]));
}

/* Makes a step with both handles. Expects a code, and the same bits. Returns how many steps were made again. */
static uint64_t step_both(struct pair *p, int micro, int code)
{
    halfstep_call call = all_call(micro, p->weight[PLAINLY], p->gradients, NULL);
    const uint64_t before = halfstep_redone_steps(p->o[AHEAD]);
    EXPECT(halfstep_run(p->o[PLAINLY], &call), code);
    call.weights = p->weight[AHEAD];
    call.ahead = p->r.place;
    EXPECT(halfstep_run(p->o[AHEAD], &call), code);
    if (!micro)
        for (int i = 0; i < LAYERS; i++)
            memcpy(p->weight[AHEAD][i], p->r.place[i].weight, (size_t)p->r.weight_bytes[i]);
    CHECK(hash_of(p->o[PLAINLY], p->weight[PLAINLY]) == hash_of(p->o[AHEAD], p->weight[AHEAD]), "the bits differ");
    EQUAL(halfstep_redone_steps(p->o[PLAINLY]), 0);
    return halfstep_redone_steps(p->o[AHEAD]) - before;
}

static void test_recipe(const char *recipe)
{
    struct pair p;
    open_pair(&p, recipe, 2);
    TEST(text_of("%s: results that stand", recipe)) {
        for (int step = 0; step < 3; step++) {
            new_gradients(&p);
            advance_all(&p, 0);
            EQUAL(step_both(&p, 0, OK), 0);
        }
    }
    TEST(text_of("%s: made again if lr, scale or clipping differ", recipe)) {
        const struct {
            const char *name;
            double value;
            uint64_t redone;
        } changes[] = {{"lr", 0.02, 1},       {"lr", 0.02, 0},        {"gradient_scale", 0.5, 1}, {"clip_norm", 1e9, 0},
                       {"clip_norm", 0.1, 1}, {"weight_decay", 0, 1}, {"clip_norm", 0, 0}};
        for (size_t i = 0; i < COUNT(changes); i++) {
            new_gradients(&p);
            advance_all(&p, 0);
            set_both(&p, changes[i].name, changes[i].value);
            const uint64_t redone = step_both(&p, 0, OK);
            CHECK(redone == changes[i].redone, "%s = %g: %d made again", changes[i].name, changes[i].value,
                  (int)redone);
        }
        set_both(&p, "clip_norm", 1e9);
        advance_all(&p, 0);
        EQUAL(step_both(&p, 0, OK), 0);
        CHECK(halfstep_gradient_norm(p.o[AHEAD]) > 0.0, "no norm");
    }
    TEST(text_of("%s: a gradient that is not finite", recipe)) {
        const float before = p.gradient[2][5];
        p.gradient[2][5] = INFINITY;
        for (int i = 0; i < LAYERS; i++)
            EXPECT(advance(&p.r, i, 0, p.weight[AHEAD], p.gradients[i]), i == 2 ? HALFSTEP_NONFINITE : OK);
        NAMES(p.o[AHEAD], "'c'");
        EQUAL_TEXT(halfstep_nonfinite_tensor(p.o[AHEAD], NULL), "");
        EQUAL(step_both(&p, 0, HALFSTEP_NONFINITE), 0);
        EQUAL_TEXT(halfstep_nonfinite_tensor(p.o[AHEAD], NULL), "c");
        MUST(halfstep_set_choice(p.o[AHEAD], ALL_GROUPS, "scan", "per-tensor"));
        MUST(halfstep_set_choice(p.o[PLAINLY], ALL_GROUPS, "scan", "per-tensor"));
        advance(&p.r, 0, 0, p.weight[AHEAD], p.gradients[0]);
        EQUAL(step_both(&p, 0, HALFSTEP_NONFINITE), 0);
        p.gradient[2][5] = before;
        advance_all(&p, 0);
        EQUAL(step_both(&p, 0, OK), 0);
    }
    TEST(text_of("%s: a tensor without a gradient", recipe)) {
        p.gradients[0] = NULL;
        advance_all(&p, 0);
        EQUAL(step_both(&p, 0, OK), 0);
        p.gradients[0] = p.gradient[0];
    }
    TEST(text_of("%s: micro-steps", recipe)) {
        advance_all(&p, 1);
        EQUAL(step_both(&p, 1, OK), 0);
        advance_all(&p, 1);
        EQUAL(step_both(&p, 0, OK), 1);
        advance_all(&p, 0);
        EQUAL(step_both(&p, 1, OK), 1);
        advance_all(&p, 0);
        EQUAL(step_both(&p, 0, OK), 0);
    }
    close_pair(&p);
}

/* ---- What a result is lost by, and used for ---------------------------------------------------------------------- */

static void test_used(void)
{
    struct pair p;
    open_pair(&p, "adamw/bf16-sr/int8", 1);
    halfstep_optimizer *o = p.o[AHEAD];
    TEST("a result that stands is not computed again") {
        advance_all(&p, 0);
        const float was = p.gradient[0][0];
        p.gradient[0][0] = NAN; /* neither scanned nor used */
        ((char *)p.r.place[0].states)[0] ^= 1;
        halfstep_call call = all_call(0, p.weight[AHEAD], p.gradients, NULL);
        call.ahead = p.r.place;
        EXPECT(halfstep_run(o, &call), OK);
        CHECK(!memcmp(slot_info(o, 0, STATE).code, p.r.place[0].states, 64), "other states");
        p.gradient[0][0] = was;
    }
    TEST("every STEP, and whatever changes a tensor, forgets its result") {
        const char *const changes[] = {"a step", "a record", "a state", "a slot", "a tensor's step", "a micro-step"};
        for (size_t i = 0; i < COUNT(changes); i++) {
            halfstep_slot_info slot = slot_info(o, 0, STATE);
            halfstep_record record = record_of(o, HALFSTEP_RECORD_TENSOR, 0);
            float values[96] = {0};
            uint64_t steps = 0;
            advance_all(&p, 0);
            spoil(&p.r, 0);
            switch (i) {
            case 0: MUST(halfstep_step(o, p.weight[AHEAD], p.gradients)); break;
            case 1: MUST(halfstep_set_record(o, &record)); break;
            case 2: MUST(halfstep_write_slot(o, 0, STATE, NULL, 0, 1, values)); break;
            case 3: MUST(halfstep_bind_slot(o, 0, STATE, slot.code, slot.extra)); break;
            case 4: MUST(step_tensor(o, 0, p.weight[AHEAD][0], p.gradients[0])); break;
            case 5: MUST(accumulate_states_tensor(o, 0, p.gradients[0])); break;
            }
            MUST(get_group_steps(o, 0, &steps));
            halfstep_call call = all_call(0, p.weight[AHEAD], p.gradients, NULL);
            call.ahead = p.r.place;
            const uint64_t redone = halfstep_redone_steps(o);
            MUST(halfstep_run(o, &call));
            slot = slot_info(o, 0, STATE);
            CHECK(memcmp(slot.code, p.r.place[0].states, slot.code_bytes), "%s leaves the result", changes[i]);
            EQUAL(halfstep_redone_steps(o), redone);
        }
    }
    close_pair(&p);
}

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

static void *advance_some(void *argument)
{
    struct pair *p = argument;
    static atomic_int next;
    for (int i; (i = atomic_fetch_add(&next, 1) % (2 * LAYERS)) < LAYERS;)
        MUST(advance(&p->r, i, 0, p->weight[AHEAD], p->gradients[i]));
    return NULL;
}

static void test_threads(void)
{
    TEST("steps in advance on four threads") {
        struct pair p;
        open_pair(&p, "adamw/bf16-sr/int8", 2);
        pthread_t thread[4];
        for (int i = 0; i < 4; i++)
            if (pthread_create(&thread[i], NULL, advance_some, &p)) exit(1);
        for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
        EQUAL(step_both(&p, 0, OK), 0);
        close_pair(&p);
    }
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

static int no_io(void *host, int64_t piece, void *memory, uint64_t bytes)
{
    (void)host, (void)piece, (void)memory, (void)bytes;
    return OK;
}
static int no_write(void *host, int64_t piece, const void *memory, uint64_t bytes)
{
    (void)host, (void)piece, (void)memory, (void)bytes;
    return OK;
}
static int no_wait(void *host) { return host ? OK : OK; }
static int no_flush(void *host, void *const *weights) { return host && weights ? OK : OK; }

static void test_refusals(void)
{
    static const struct {
        const char *recipe, *cautious, *why;
    } rows[] = {{"lamb/f32", "0", "sums over the tensor"},
                {"prodigy/f32", "0", "sums over all tensors"},
                {"muon/f32", "0", "matrices"},
                {"adafactor/f32", "0", "matrices"},
                {"came/f32", "0", "matrices"},
                {"adamw/f32/fp8-lamb16", "0", "one scale"},
                {"adamw/f32", "1", "cautious"}};
    for (size_t i = 0; i < COUNT(rows); i++)
        TEST(text_of("not stepped in advance: %s, cautious %s", rows[i].recipe, rows[i].cautious)) {
            halfstep_optimizer *o = new_optimizer(rows[i].recipe, 1, 1);
            MUST(halfstep_set_hyper(o, 0, "cautious", atof(rows[i].cautious)));
            ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = 8, .row_length = 64, .n_rows = 8, .n_columns = 64,
                       .gradient = "f32");
            float weight[512] = {0}, new_weight[512], gradient[512] = {1.0f};
            void *weights[] = {weight}, *states = aligned(1 << 16);
            uint64_t bytes;
            for (int settled = 0; settled < 2; settled++) {
                EXPECT_NAMED(o, halfstep_ahead_bytes(o, 0, &bytes), UNSUPPORTED, rows[i].why);
                NAMES(o, "'w'");
                if (!settled) MUST(halfstep_allocate_states(o));
            }
            const halfstep_ahead place = {new_weight, states};
            const void *gradients[] = {gradient};
            halfstep_call call = all_call(0, weights, gradients, NULL);
            call.ahead = &place;
            call.kind = HALFSTEP_CALL_TENSOR;
            EXPECT(halfstep_run(o, &call), UNSUPPORTED);
            /* Its new weight goes to another place all the same. */
            call.kind = HALFSTEP_CALL_STEP;
            EXPECT(halfstep_run(o, &call), OK);
            EQUAL(weight[0], 0.0);
            CHECK(new_weight[0] != 0.0f, "no step");
            free_aligned(states);
            halfstep_destroy(o);
        }
    struct pair p;
    open_pair(&p, "adamw/bf16-sr/int8", 1);
    halfstep_optimizer *o = p.o[AHEAD];
    TEST("calls with ahead that are refused") {
        int64_t statistics[1024];
        halfstep_ahead place = p.r.place[0];
        halfstep_call call = {.struct_size = sizeof call,
                              .kind = HALFSTEP_CALL_TENSOR,
                              .weights = p.weight[AHEAD],
                              .gradients = p.gradients,
                              .ahead = &place};
        place.states = (char *)place.states + 32;
        EXPECT_NAMED(o, halfstep_run(o, &call), ARGUMENT, "64 bytes");
        place.states = NULL;
        EXPECT_NAMED(o, halfstep_run(o, &call), ARGUMENT, "NULL memory");
        place = (halfstep_ahead){NULL, p.r.place[0].states};
        EXPECT_NAMED(o, halfstep_run(o, &call), ARGUMENT, "NULL memory");
        place = p.r.place[0];
        const void *none = NULL;
        call.gradients = &none;
        EXPECT_NAMED(o, halfstep_run(o, &call), ARGUMENT, "no gradient");
        call.gradients = p.gradients;
        call.statistics = statistics;
        EXPECT_NAMED(o, halfstep_run_begin(o, &call), ARGUMENT, "parts of a call");
        call.kind = HALFSTEP_CALL_ROUND;
        call.statistics = NULL;
        EXPECT_NAMED(o, halfstep_run(o, &call), ARGUMENT, "a round");
        uint64_t bytes;
        EXPECT(halfstep_ahead_bytes(o, LAYERS, &bytes), ARGUMENT);
        EXPECT(halfstep_ahead_bytes(o, 0, NULL), ARGUMENT);
        EQUAL(halfstep_redone_steps(NULL), 0);
    }
    TEST("states in a storage are not stepped in advance") {
        const halfstep_storage storage = {
            .struct_size = sizeof storage, .read = no_io, .write = no_write, .wait = no_wait, .flush = no_flush};
        uint64_t bytes;
        MUST(halfstep_bind_storage(o, &storage));
        EXPECT_NAMED(o, halfstep_ahead_bytes(o, 0, &bytes), UNSUPPORTED, "in a storage");
        halfstep_call call = all_call(0, p.weight[AHEAD], p.gradients, NULL);
        call.ahead = p.r.place;
        EXPECT_NAMED(o, halfstep_run(o, &call), UNSUPPORTED, "in a storage");
    }
    close_pair(&p);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_golden();
    const char *const recipes[] = {"adamw/bf16-sr/int8", "lion/f32", "sgd/bf16-kahan/bf16-sr",
                                   "ademamix/bf16-ecc8/int4", "adamw/int8-ecc4/int8"};
    for (size_t i = 0; i < COUNT(recipes); i++) test_recipe(recipes[i]);
    test_used();
    test_threads();
    test_refusals();
    return test_done();
}
