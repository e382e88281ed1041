/* Tests states in storage with the latest table possible. It reads and writes only while it is waited for, and fills
 * memory with rubbish as soon as a read begins. So a step that works on a piece before it is there, or changes one
 * before it is written, gives other bits. The cases of tests/golden/hashes.txt must have their hashes. A run without
 * arguments takes a sixteenth of them; --short: a 61st; --all: a fourth. Over 500 lines because all groups share one
 * store and one model. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include <pthread.h>
#include <sched.h>

#include "golden_case.h"
#include "ref/fixture.h"

/* ---- A storage in memory ----------------------------------------------------------------------------------------- */

enum { MOST_PIECES = 512, MOST_PENDING = 1024 };

struct store {
    halfstep_optimizer *o;
    int64_t n;
    pthread_t owner; /* the thread that has begun what is pending */
    uint64_t bytes[MOST_PIECES];
    char *now[MOST_PIECES], *current[MOST_PIECES]; /* as last written, and as last flushed */
    struct pending {
        int64_t piece;
        char *to;
        const char *from;
        uint64_t bytes;
        uint64_t hash; /* of what is written */
    } pending[MOST_PENDING];
    int n_pending;
    long calls, fails_at; /* the call, counted from 1, that fails; 0: none */
    long reads, writes, flushes;
    uint64_t read, written; /* bytes */
    uintptr_t low, high;    /* the memory that pieces have been in */
    int with_weights;       /* the last flush had weights */
    uint64_t steps;         /* of group 0, as the last flush saw them */
    const char *failed;
};

static int begin_call(struct store *st, const char *name)
{
    if (++st->calls != st->fails_at) return OK;
    st->failed = name;
    return IO;
}

static struct pending *put_off(struct store *st, int64_t piece, uint64_t bytes)
{
    if (st->n_pending == MOST_PENDING || piece < 0 || piece >= st->n || !bytes || bytes > st->bytes[piece]) abort();
    if (!st->n_pending) st->owner = pthread_self();
    CHECK(pthread_equal(st->owner, pthread_self()), "two threads use the storage at once");
    st->pending[st->n_pending] = (struct pending){.piece = piece, .bytes = bytes};
    return &st->pending[st->n_pending++];
}

static void note_place(struct store *st, const void *memory, uint64_t bytes)
{
    const uintptr_t place = (uintptr_t)memory, end = place + (bytes + 4095) / 4096 * 4096;
    CHECK(place % 4096 == 0, "a piece in memory that is not aligned");
    if (!st->high || place < st->low) st->low = place;
    if (end > st->high) st->high = end;
}

static int late_read(void *host, int64_t piece, void *memory, uint64_t bytes)
{
    struct store *st = host;
    const int error = begin_call(st, "read");
    if (error) return error;
    note_place(st, memory, bytes);
    st->reads++;
    st->read += bytes;
    put_off(st, piece, bytes)->to = memory;
    memset(memory, 0xa5, (size_t)(bytes + 4095) / 4096 * 4096);
    return OK;
}

static int late_write(void *host, int64_t piece, const void *memory, uint64_t bytes)
{
    struct store *st = host;
    const int error = begin_call(st, "write");
    if (error) return error;
    note_place(st, memory, bytes);
    CHECK(bytes == st->bytes[piece], "a write of %llu bytes of %llu", (unsigned long long)bytes,
          (unsigned long long)st->bytes[piece]);
    st->writes++;
    st->written += bytes;
    struct pending *p = put_off(st, piece, bytes);
    p->from = memory;
    p->hash = hash_bytes(HASH_START, memory, (size_t)bytes);
    return OK;
}

static int late_wait(void *host)
{
    struct store *st = host;
    const int error = begin_call(st, "wait");
    sched_yield();
    for (int i = 0; i < st->n_pending; i++) {
        const struct pending *p = &st->pending[i];
        if (p->to) {
            if (!error) memcpy(p->to, st->now[p->piece], (size_t)p->bytes);
            continue;
        }
        CHECK(hash_bytes(HASH_START, p->from, (size_t)p->bytes) == p->hash, "a piece is changed while it is written");
        memcpy(st->now[p->piece], p->from, (size_t)p->bytes);
    }
    st->n_pending = 0;
    return error;
}

static uint64_t steps_of(const halfstep_optimizer *o)
{
    halfstep_record r = {.struct_size = sizeof r, .kind = HALFSTEP_RECORD_GROUP};
    MUST(halfstep_get_record(o, &r));
    return r.steps;
}

static int late_flush(void *host, void *const *weights)
{
    struct store *st = host;
    const int error = begin_call(st, "flush");
    if (error) return error;
    CHECK(!st->n_pending, "a flush before the wait");
    for (int64_t i = 0; i < st->n; i++) memcpy(st->current[i], st->now[i], (size_t)st->bytes[i]);
    st->flushes++;
    st->with_weights = weights != NULL;
    st->steps = steps_of(st->o);
    return OK;
}

static const char *late_why(void *host) { return text_of("cannot %s", ((struct store *)host)->failed); }

static halfstep_storage table_of(struct store *st, int weights, uint64_t piece_bytes, uint64_t memory)
{
    return (halfstep_storage){.struct_size = sizeof(halfstep_storage),
                              .weights = weights,
                              .host = st,
                              .piece_bytes = piece_bytes,
                              .memory = memory,
                              .read = late_read,
                              .write = late_write,
                              .wait = late_wait,
                              .flush = late_flush,
                              .why = late_why};
}

static halfstep_piece piece_of(const halfstep_optimizer *o, int64_t number)
{
    SIZED(halfstep_piece, piece);
    MUST(halfstep_get_piece(o, number, &piece));
    return piece;
}

/* Returns the bytes of three of the largest pieces of a bound handle. */
static uint64_t three_largest(const halfstep_optimizer *o)
{
    uint64_t largest = 0;
    for (int64_t i = 0; i < halfstep_piece_count(o); i++) {
        const halfstep_piece piece = piece_of(o, i);
        const uint64_t bytes = (piece.state_bytes + piece.weight_bytes + 4095) / 4096 * 4096;
        if (bytes > largest) largest = bytes;
    }
    return 3 * largest;
}

static void fill_store(struct store *st, const halfstep_optimizer *o)
{
    st->n = halfstep_piece_count(o);
    if (st->n > MOST_PIECES) abort();
    for (int64_t i = 0; i < st->n; i++) {
        const halfstep_piece piece = piece_of(o, i);
        st->bytes[i] = piece.state_bytes + piece.weight_bytes;
        st->now[i] = zeroed((size_t)st->bytes[i]);
        st->current[i] = zeroed((size_t)st->bytes[i]);
        memset(st->now[i], 0xa5, (size_t)st->bytes[i]);
    }
}

/* Binds a handle to a new store, whose pieces hold rubbish until they are written. stay: bytes of memory beside the
 * least. */
static void bind_store(struct store *st, halfstep_optimizer *o, int weights, uint64_t piece_bytes, uint64_t stay)
{
    memset(st, 0, sizeof *st);
    st->o = o;
    halfstep_storage table = table_of(st, weights, piece_bytes, 0);
    MUST(halfstep_bind_storage(o, &table));
    table.memory = three_largest(o) + stay;
    if (table.memory) MUST(halfstep_bind_storage(o, &table));
    fill_store(st, o);
}

static void free_store(struct store *st)
{
    for (int64_t i = 0; i < st->n; i++) {
        free(st->now[i]);
        free(st->current[i]);
    }
}

/* ---- Golden cases ------------------------------------------------------------------------------------------------ */

/* The stores of a case's handles, and the sizes of their pieces. */
static struct {
    struct store store[GOLDEN_MAX_PARTS];
    int n;
    uint64_t piece_bytes, stay;
} golden;

static int place_golden(halfstep_optimizer *o)
{
    struct store *st = &golden.store[golden.n++];
    bind_store(st, o, 0, golden.piece_bytes, golden.stay);
    return halfstep_write_initial(o, NULL);
}

/* Calls visit for every plane of states and of weights' residuals and codes. */
static void each_stream(halfstep_optimizer *o, void (*visit)(void *, int32_t, int, int, uint64_t), void *argument)
{
    SIZED(halfstep_slot_info, info);
    for (int32_t i = 0; i < halfstep_tensor_count(o); i++)
        for (int s = 0; !halfstep_get_slot_info(o, i, s, &info); s++) {
            if (s >= STATE && info.code_bytes) visit(argument, i, s, 0, info.code_bytes);
            if (s != GRADIENT && info.extra_bytes) visit(argument, i, s, 1, info.extra_bytes);
        }
}

struct moving {
    halfstep_optimizer *o;
    char *memory;
    uint64_t used;
    int writes;
};

static void move_stream(void *argument, int32_t tensor, int slot, int extra, uint64_t bytes)
{
    struct moving *m = argument;
    if (m->memory) {
        if (m->writes) MUST(halfstep_write_bytes(m->o, tensor, slot, extra, 0, bytes, m->memory + m->used));
        else MUST(halfstep_read_bytes(m->o, tensor, slot, extra, 0, bytes, m->memory + m->used));
    }
    m->used += bytes;
}

/* Copies all planes of a handle to new memory, or back from it. */
static struct moving read_all(halfstep_optimizer *o)
{
    struct moving size = {.o = o}, m = {.o = o};
    each_stream(o, move_stream, &size);
    m.memory = zeroed((size_t)size.used);
    each_stream(o, move_stream, &m);
    return m;
}

/* Brings states from the storage into memory. Their grids go with them. */
static int end_golden(halfstep_optimizer *o)
{
    halfstep_record record[64];
    const int32_t n = halfstep_tensor_count(o);
    struct moving m = read_all(o);
    if (n > 64) abort();
    for (int32_t i = 0; i < n; i++) record[i] = counters_of(o, i);
    MUST(halfstep_bind_storage(o, NULL));
    MUST(halfstep_allocate_states(o));
    m.used = 0;
    m.writes = 1;
    each_stream(o, move_stream, &m);
    free(m.memory);
    for (int32_t i = 0; i < n; i++) {
        record[i].kind = HALFSTEP_RECORD_TENSOR;
        record[i].index = i;
        MUST(halfstep_set_record(o, &record[i]));
    }
    return OK;
}

static void test_golden(void)
{
    static const struct {
        const char *name;
        struct golden_layout layout;
        uint64_t piece_bytes, stay;
    } ways[] = {
        {"golden cases, small pieces", {.threads = 3}, 600, 0},
        {"golden cases, one thread, some pieces in memory", {.threads = 1}, 4096, 100000},
        {"golden cases, 2 shards of rows", {.threads = 2, .parts = 2}, 1000, 0},
        {"golden cases, 3 shards of columns", {.threads = 1, .parts = 3, .by_columns = 1}, 300, 0},
    };
    int n = 0;
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    if (!cases) exit(1);
    for (size_t w = 0; w < COUNT(ways); w++)
        TEST(ways[w].name) {
            const int stride = BY_LENGTH(61, w ? 61 : 16, w ? 16 : 4);
            struct golden_layout layout = ways[w].layout;
            layout.place = place_golden;
            layout.end = end_golden;
            golden.piece_bytes = ways[w].piece_bytes;
            golden.stay = ways[w].stay;
            for (int i = (int)w * 7 % stride; i < n; i += stride) {
                golden.n = 0;
                check_golden(list, &cases[i], &layout);
                for (int p = 0; p < golden.n; p++) free_store(&golden.store[p]);
            }
        }
    free(cases);
    free(list);
}

/* ---- A model in memory and in storage ---------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int ndim;
    int64_t rows, row_length;
} layers[] = {{"a", 2, 64, 96},  {"b", 1, 700, 1}, {"c", 3, 12, 300}, {"d", 2, 3, 33},
              {"e", 2, 16, 512}, {"f", 2, 0, 40},  {"g", 1, 1, 5000}, {"h", 1, 3, 1}};
enum { TENSORS = COUNT(layers), IN_MEMORY = 0, IN_STORAGE = 1, ROUND_OF = 4 };

struct model {
    halfstep_optimizer *o;
    struct store store; /* of the one in storage */
    void *weight[TENSORS];
    uint64_t weight_bytes[TENSORS];
    float *gradient[TENSORS];
    int64_t *statistics;
};

static int64_t elements_of(int t) { return layers[t].rows * layers[t].row_length; }

static void fill_gradients(struct model *m, int step, const void **gradients, int bad)
{
    struct source source = {(uint64_t)step * 77 + 1};
    for (int t = 0; t < TENSORS; t++) {
        for (int64_t i = 0; i < elements_of(t); i++) m->gradient[t][i] = (float)next_unit(&source) - 0.45f;
        gradients[t] = (t + step) % 7 == 3 ? NULL : m->gradient[t];
    }
    if (bad) m->gradient[0][17] = NAN;
}

/* Brings the weights of a storage up to those of the caller. */
static int bring_weights(struct model *m)
{
    for (int t = 0; t < TENSORS; t++) {
        const int error = halfstep_write_bytes(m->o, t, WEIGHT, 0, 0, m->weight_bytes[t], m->weight[t]);
        if (error) return error;
    }
    return halfstep_flush(m->o, m->weight);
}

static void add_layers(struct model *m, const char *gradients)
{
    for (int t = 0; t < TENSORS; t++) {
        ADD_TENSOR(m->o, .name = layers[t].name, .ndim = layers[t].ndim, .may_be_empty = 1, .rows = layers[t].rows,
                   .row_length = layers[t].row_length, .gradient = gradients);
        m->weight_bytes[t] = slot_info(m->o, t, WEIGHT).code_bytes;
        m->weight[t] = zeroed((size_t)m->weight_bytes[t]);
        m->gradient[t] = zeroed((size_t)elements_of(t) * 4);
    }
}

static void set_weights(struct model *m)
{
    struct source source = {5};
    float *values = zeroed(8192 * 4);
    for (int t = 0; t < TENSORS; t++) {
        for (int64_t i = 0; i < elements_of(t); i++) values[i] = (float)next_unit(&source) - 0.5f;
        MUST(halfstep_write_slot(m->o, t, WEIGHT, m->weight[t], 0, layers[t].rows, values));
    }
    free(values);
}

struct setting {
    const char *recipe;
    int threads, cautious;
    uint64_t piece_bytes, stay;
};

static void open_model(struct model *m, const struct setting *s, int place)
{
    memset(m, 0, sizeof *m);
    m->o = new_optimizer(s->recipe, s->threads, 3);
    MUST(halfstep_set_hyper(m->o, ALL_GROUPS, "lr", 0.01));
    /* A record has one norm, so it does not bring back that of the last round beside that of the last step. */
    MUST(halfstep_set_choice(m->o, ALL_GROUPS, "clip", "per-tensor"));
    if (s->cautious) MUST(halfstep_set_hyper(m->o, ALL_GROUPS, "cautious", 1));
    add_layers(m, "f32");
    if (place == IN_MEMORY) {
        MUST(halfstep_allocate_states(m->o));
    } else {
        bind_store(&m->store, m->o, 1, s->piece_bytes, s->stay);
        MUST(halfstep_write_initial(m->o, m->weight));
    }
    set_weights(m);
    if (place == IN_STORAGE) MUST(bring_weights(m));
    m->statistics = zeroed((size_t)statistics_count(m->o) * sizeof *m->statistics);
}

static void close_model(struct model *m)
{
    halfstep_destroy(m->o);
    for (int t = 0; t < TENSORS; t++) {
        free(m->weight[t]);
        free(m->gradient[t]);
    }
    free(m->statistics);
    free_store(&m->store);
}

/* Steps tensors one by one, some of them with a micro-step before, and ends the round. */
static int make_round(struct model *m, const void **gradients)
{
    int result = OK;
    for (int t = 0; t < TENSORS && !result; t++) {
        if (!gradients[t]) continue;
        if (t % 3 == 1) result = accumulate_states_tensor(m->o, t, gradients[t]);
        if (!result) result = step_tensor(m->o, t, m->weight[t], gradients[t]);
    }
    const halfstep_call round = {.struct_size = sizeof round, .kind = HALFSTEP_CALL_ROUND, .weights = m->weight};
    return result ? result : halfstep_run(m->o, &round);
}

/* Tells whether one tensor is refused in a step. */
static int is_partial(int step) { return step % 8 == 2; }

/* Makes step number `step`: whole, a micro-step, a round or in parts. */
static int step_model(struct model *m, int step)
{
    const void *gradients[TENSORS];
    int result;
    fill_gradients(m, step, gradients, step == 6);
    MUST(halfstep_set_hyper(m->o, ALL_GROUPS, "clip_norm", step % 5 == 2 || step == 3 ? 0.5 : 0.0));
    MUST(halfstep_set_choice(m->o, ALL_GROUPS, "scan", is_partial(step) ? "per-tensor" : "scan"));
    if (is_partial(step)) m->gradient[2][0] = INFINITY;
    switch (step % ROUND_OF) {
    case 1: return accumulate_states(m->o, gradients);
    case 3: return make_round(m, gradients);
    case 2:
        if (step % 3 == 0) return halfstep_step(m->o, m->weight, gradients);
        if ((result = step_begin(m->o, gradients, m->statistics)) ||
            (result = step_norms(m->o, m->weight, gradients, m->statistics)))
            return result;
        return step_finish(m->o, m->weight, gradients, m->statistics);
    default: return halfstep_step(m->o, m->weight, gradients);
    }
}

/* Checks that the weights, states and records of two models are equal. */
static void check_equal(struct model *a, struct model *b, const char *what)
{
    struct moving x = read_all(a->o), y = read_all(b->o);
    CHECK(x.used == y.used && !memcmp(x.memory, y.memory, (size_t)x.used), "%s: other states", what);
    free(x.memory);
    free(y.memory);
    for (int t = 0; t < TENSORS; t++) {
        const halfstep_record one = counters_of(a->o, t), other = counters_of(b->o, t);
        CHECK(!memcmp(&one, &other, sizeof one), "%s: other records of '%s'", what, layers[t].name);
        CHECK(!memcmp(a->weight[t], b->weight[t], (size_t)a->weight_bytes[t]), "%s: other weights of '%s'", what,
              layers[t].name);
    }
    const halfstep_record one = record_of(a->o, HALFSTEP_RECORD_OPTIMIZER, 0),
                          other = record_of(b->o, HALFSTEP_RECORD_OPTIMIZER, 0);
    CHECK(!memcmp(&one, &other, sizeof one) && steps_of(a->o) == steps_of(b->o), "%s: other records", what);
}

/* Checks that the storage holds the weights of the caller. */
static void check_weights(struct model *m, const char *what)
{
    char *stored = zeroed(8192 * 4);
    for (int t = 0; t < TENSORS; t++) {
        MUST(halfstep_read_bytes(m->o, t, WEIGHT, 0, 0, m->weight_bytes[t], stored));
        CHECK(!memcmp(stored, m->weight[t], (size_t)m->weight_bytes[t]), "%s: '%s' is stored with other weights", what,
              layers[t].name);
    }
    free(stored);
}

static void compare(const struct setting *s)
{
    struct model m[2];
    const char *what = text_of("%s%s, %d threads, pieces of %llu", s->recipe, s->cautious ? " cautious" : "",
                               s->threads, (unsigned long long)s->piece_bytes);
    for (int i = 0; i < 2; i++) open_model(&m[i], s, i);
    struct store *st = &m[IN_STORAGE].store;
    for (int step = 0; step < 12; step++) {
        const long writes = st->writes, flushes = st->flushes;
        const int expected = step_model(&m[IN_MEMORY], step), result = step_model(&m[IN_STORAGE], step);
        CHECK(result == expected, "%s: step %d: %d, in memory %d (%s)", what, step, result, expected,
              halfstep_error_detail(m[IN_STORAGE].o));
        CHECK(result || st->flushes == flushes + 1, "%s: step %d flushes %ld times", what, step, st->flushes - flushes);
        CHECK(result || st->steps == steps_of(m[IN_STORAGE].o), "%s: a flush sees other steps", what);
        CHECK(result || st->with_weights == (step % ROUND_OF != 1), "%s: weights of a flush", what);
        if (step == 6)
            CHECK(result == HALFSTEP_NONFINITE && st->writes == writes && st->flushes == flushes,
                  "%s: a refused step writes", what);
        if (is_partial(step)) CHECK(st->flushes == flushes + 1, "%s: a step of some tensors is not flushed", what);
    }
    check_equal(&m[IN_MEMORY], &m[IN_STORAGE], what);
    check_weights(&m[IN_STORAGE], what);
    for (int i = 0; i < 2; i++) close_model(&m[i]);
}

static void test_steps(void)
{
    static const char *const formats[] = {
        "",         "/f32",          "/bf16-sr/int8", "/bf16-ecc8/int4", "/int8-ecc4/int8", "/bf16-kahan",
        "/f32/fp8", "/bf16-sr/dyn8", "/f32/dyn4"};
    /* Each turn has other threads and pieces for a recipe. */
    TEST("every kind of step has the bits of states in memory")
        for (int32_t row = 0, n = 0; row < halfstep_rule_count(); row++) {
            const halfstep_rule_info rule = rule_info(row);
            for (size_t f = 0; f < COUNT(formats); f++, n++)
                for (int turn = n; turn < n + BY_LENGTH(1, 1, 4); turn++) {
                    char recipe[64], full[64];
                    snprintf(recipe, sizeof recipe, "%s%s", rule.name, formats[f]);
                    if (halfstep_recipe_full(recipe, full, sizeof full)) continue;
                    compare(
                        &(struct setting){.recipe = recipe,
                                          .threads = 1 + turn % 2 * 2,
                                          .cautious = rule.cautious && turn % 3 == 1,
                                          .piece_bytes = turn % 4 == 3 ? 0 : (700u + 64u * (unsigned)row) << turn % 4,
                                          .stay = turn % 5 == 4 ? 60000 : 0});
                }
        }
}

/* Steps every second tensor of a model, from the first or the second on. */
struct half {
    struct model *m;
    const void **gradients;
    int first;
};

static void *step_half(void *argument)
{
    const struct half *h = argument;
    for (int t = h->first; t < TENSORS; t += 2)
        if (h->gradients[t]) MUST(step_tensor(h->m->o, t, h->m->weight[t], h->gradients[t]));
    return NULL;
}

static void test_threads(void)
{
    TEST("single tensors are stepped from two threads at once") {
        struct model m[2];
        for (int i = 0; i < 2; i++) {
            open_model(&m[i], &(struct setting){.recipe = "lamb/bf16-sr/int8", .threads = 1, .piece_bytes = 3000}, i);
            for (int step = 0; step < 20; step++) {
                const void *gradients[TENSORS];
                pthread_t other;
                fill_gradients(&m[i], step, gradients, 0);
                struct half half[2] = {{&m[i], gradients, 0}, {&m[i], gradients, 1}};
                if (pthread_create(&other, NULL, step_half, &half[1])) exit(1);
                step_half(&half[0]);
                pthread_join(other, NULL);
                MUST(end_round(m[i].o));
            }
        }
        check_equal(&m[0], &m[1], "two threads");
        for (int i = 0; i < 2; i++) close_model(&m[i]);
    }
    TEST("states in storage are not stepped in advance") {
        struct model m;
        uint64_t bytes;
        open_model(&m, &(struct setting){.recipe = "adamw", .threads = 1}, IN_STORAGE);
        EXPECT_NAMED(m.o, halfstep_ahead_bytes(m.o, 0, &bytes), UNSUPPORTED, "in a storage");
        close_model(&m);
    }
}

/* ---- Failures ---------------------------------------------------------------------------------------------------- */

/* What a caller keeps with the last flush: how many steps there were, and the records. */
struct kept {
    int step;
    halfstep_record tensor[TENSORS], group, optimizer;
};

static void keep(struct kept *k, const struct model *m, int step)
{
    k->step = step;
    for (int t = 0; t < TENSORS; t++) k->tensor[t] = record_of(m->o, HALFSTEP_RECORD_TENSOR, t);
    k->group = record_of(m->o, HALFSTEP_RECORD_GROUP, 0);
    k->optimizer = record_of(m->o, HALFSTEP_RECORD_OPTIMIZER, 0);
}

/* Binds a failed handle again, and goes back to what was kept. */
static void recover(struct model *m, const struct setting *s, const struct kept *k)
{
    struct store *st = &m->store;
    halfstep_storage table = table_of(st, 1, s->piece_bytes, 0);
    for (int64_t i = 0; i < st->n; i++) memcpy(st->now[i], st->current[i], (size_t)st->bytes[i]);
    MUST(halfstep_bind_storage(m->o, &table));
    for (int t = 0; t < TENSORS; t++) {
        MUST(halfstep_read_bytes(m->o, t, WEIGHT, 0, 0, m->weight_bytes[t], m->weight[t]));
        MUST(halfstep_set_record(m->o, &k->tensor[t]));
    }
    MUST(halfstep_set_record(m->o, &k->group));
    MUST(halfstep_set_record(m->o, &k->optimizer));
}

/* The last step is a round, whose norm its record keeps. */
enum { LIFE = 4 };

/* Fails every call of the table once, in one step after another. */
static void test_failures(void)
{
    static const char *const recipes[] = {"adamw/bf16-sr/int8", "lamb/bf16-ecc8/int8", "muon/f32"};
    TEST("what the storage refuses comes back, and the last flush goes on")
        for (size_t r = 0; r < COUNT(recipes); r++) {
            const struct setting s = {
                .recipe = recipes[r], .threads = 1, .piece_bytes = 5000, .stay = r == 1 ? 50000 : 0};
            struct model whole;
            struct kept kept;
            long fired = 1, k = 1;
            open_model(&whole, &s, IN_MEMORY);
            for (int step = 0; step < LIFE; step++) step_model(&whole, step);
            for (; fired; k++) {
                struct model m;
                open_model(&m, &s, IN_STORAGE);
                keep(&kept, &m, 0);
                m.store.calls = 0;
                m.store.fails_at = k;
                fired = 0;
                for (int step = 0; step < LIFE; step++) {
                    const int result = step_model(&m, step);
                    if (!result || result == HALFSTEP_NONFINITE) {
                        keep(&kept, &m, step + 1);
                        continue;
                    }
                    CHECK(!fired && result == IO, "call %ld: step %d: %s", k, step, halfstep_error_detail(m.o));
                    NAMES(m.o, text_of("cannot %s", m.store.failed));
                    struct kept after;
                    keep(&after, &m, kept.step);
                    CHECK(!memcmp(&after.group, &kept.group, sizeof after.group) &&
                              !memcmp(&after.optimizer, &kept.optimizer, sizeof after.optimizer),
                          "call %ld: a failed step counts", k);
                    CHECK(step == 3 || !memcmp(after.tensor, kept.tensor, sizeof after.tensor),
                          "call %ld: other records", k);
                    if (fired++) break;
                    EXPECT_NAMED(m.o, step_model(&m, step), ORDER, "bind it again");
                    float x[96];
                    EXPECT(halfstep_read_slot(m.o, 0, STATE, NULL, 0, 1, x), ORDER);
                    EXPECT(halfstep_flush(m.o, NULL), ORDER);
                    EXPECT(end_round(m.o), ORDER);
                    recover(&m, &s, &kept);
                    step--;
                }
                m.store.fails_at = 0;
                check_equal(&whole, &m, text_of("%s, call %ld", recipes[r], k));
                check_weights(&m, recipes[r]);
                close_model(&m);
                if (k > 2000) abort();
            }
            printf("     %s: %ld calls refused\n", recipes[r], k - 2);
            CHECK(k > 40, "%ld calls only", k);
            close_model(&whole);
        }
}

/* ---- Pieces, memory and slots ------------------------------------------------------------------------------------ */

static void test_pieces(void)
{
    TEST("pieces hold every byte once") {
        struct model m;
        uint64_t held[TENSORS] = {0}, rows[TENSORS] = {0};
        open_model(&m, &(struct setting){.recipe = "adamw/bf16-ecc8/int8", .threads = 1, .piece_bytes = 2000}, 1);
        CHECK(m.store.n > 2 * TENSORS, "%lld pieces only", (long long)m.store.n);
        for (int64_t i = 0; i < m.store.n; i++) {
            const halfstep_piece p = piece_of(m.o, i);
            uint64_t end = 0;
            EQUAL((uint64_t)p.first_row, rows[p.tensor]);
            rows[p.tensor] += (uint64_t)p.n_rows;
            held[p.tensor] += p.weight_bytes;
            for (int s = 0; s < 2 + HALFSTEP_MAX_STATES; s++)
                for (int extra = 0; extra < 2; extra++) {
                    const uint64_t offset = extra ? p.slot[s].extra_offset : p.slot[s].code_offset,
                                   bytes = extra ? p.slot[s].extra_bytes : p.slot[s].code_bytes;
                    if (!bytes) continue;
                    CHECK(offset == end && offset % 64 == 0, "a stream at %llu", (unsigned long long)offset);
                    end = (offset + bytes + 63) / 64 * 64;
                    held[p.tensor] += bytes;
                }
            EQUAL(p.state_bytes, end);
        }
        for (int t = 0; t < TENSORS; t++) {
            uint64_t sum = m.weight_bytes[t];
            for (int s = 0; s < 4; s++) {
                const halfstep_slot_info info = slot_info(m.o, t, s);
                CHECK(!info.code && !info.extra, "an address of a stored slot");
                if (s >= STATE) sum += info.code_bytes;
                if (s != GRADIENT) sum += info.extra_bytes;
            }
            EQUAL(held[t], sum);
            EQUAL(rows[t], (uint64_t)layers[t].rows);
        }
        close_model(&m);
    }
    TEST("pieces are known before a storage is bound") {
        halfstep_optimizer *o = new_optimizer("adamw/f32/int8", 1, 0);
        ADD_TENSOR(o, .name = "large", .ndim = 2, .rows = 40000, .row_length = 512, .gradient = "f32");
        ADD_TENSOR(o, .name = "small", .ndim = 1, .rows = 7, .row_length = 1, .gradient = "f32");
        const int64_t n = halfstep_piece_count(o);
        halfstep_piece before[8];
        EQUAL(n, 4);
        for (int64_t i = 0; i < n; i++) before[i] = piece_of(o, i);
        CHECK(before[0].state_bytes <= 16 << 20 && before[2].first_row + before[2].n_rows == 40000, "other pieces");
        const halfstep_storage table = table_of(NULL, 1, 0, 0);
        MUST(halfstep_bind_storage(o, &table));
        EQUAL(halfstep_piece_count(o), n);
        for (int64_t i = 0; i < n; i++) {
            const halfstep_piece after = piece_of(o, i);
            CHECK(!memcmp(&before[i], &after, sizeof after), "piece %lld changes", (long long)i);
        }
        SIZED(halfstep_piece, none);
        EXPECT_NAMED(o, halfstep_get_piece(o, n, &none), ARGUMENT, "there are 4");
        EXPECT(halfstep_get_piece(o, -1, &none), ARGUMENT);
        halfstep_destroy(o);
    }
}

static long reads_of_a_step(const struct setting *s, int weights_step)
{
    struct model m;
    open_model(&m, s, IN_STORAGE);
    for (int step = 0; step < 12; step += 2 * ROUND_OF) MUST(step_model(&m, step)); /* every piece was read once */
    const long before = m.store.reads;
    MUST(step_model(&m, weights_step));
    const long reads = m.store.reads - before;
    close_model(&m);
    return reads;
}

static void test_memory(void)
{
    TEST("pieces for which there is memory are read once") {
        struct setting s = {.recipe = "adamw/f32/f32", .threads = 1, .piece_bytes = 8000};
        const long all = reads_of_a_step(&s, 0);
        s.stay = 60000;
        const long some = reads_of_a_step(&s, 0);
        s.stay = 1 << 30;
        const long none = reads_of_a_step(&s, 0);
        CHECK(all > some && some > 0 && none == 0, "%ld, %ld, %ld reads", all, some, none);
    }
    TEST("sums read twice what is cut") {
        struct setting s = {.recipe = "adamw/f32/f32", .threads = 1, .piece_bytes = 8000};
        const long once = reads_of_a_step(&s, 0);
        s.recipe = "lamb/f32/f32";
        const long more = reads_of_a_step(&s, 0);
        CHECK(more > once && more < 2 * once, "%ld reads, %ld with sums", once, more);
    }
    TEST("too little memory is refused, and nothing changes") {
        struct model m;
        const struct setting s = {.recipe = "adamw", .threads = 1, .piece_bytes = 3000};
        open_model(&m, &s, IN_STORAGE);
        halfstep_storage table = table_of(&m.store, 1, 0, 4096);
        EXPECT_NAMED(m.o, halfstep_bind_storage(m.o, &table), RANGE, "three pieces need");
        table.read = NULL;
        EXPECT_NAMED(m.o, halfstep_bind_storage(m.o, &table), ARGUMENT, "must not be NULL");
        EQUAL(halfstep_piece_count(m.o), m.store.n);
        struct model other;
        open_model(&other, &s, IN_MEMORY);
        for (int step = 0; step < 2; step++) {
            MUST(step_model(&m, step));
            MUST(step_model(&other, step));
        }
        check_equal(&m, &other, "after a refused storage");
        close_model(&m);
        close_model(&other);
    }
}

static void test_slots(void)
{
    static const struct setting settings[] = {{"schedulefree/bf16-ecc8/bf16", 1, 0, 2000, 0},
                                              {"adamw/f32/int4", 1, 0, 500, 10000},
                                              {"adamw/bf16-sr/dyn8", 3, 0, 600, 0},
                                              {"adamw/f32/fp8-lamb16+f32", 1, 0, 2000, 0}};
    TEST("slots are read and written in storage")
        for (size_t i = 0; i < COUNT(settings); i++) {
            struct model m[2];
            float *values = zeroed(8192 * 4), *seen[2] = {zeroed(8192 * 4), zeroed(8192 * 4)};
            struct source source = {9};
            for (int k = 0; k < 2; k++) {
                open_model(&m[k], &settings[i], k);
                MUST(step_model(&m[k], 0));
            }
            for (int t = 0; t < TENSORS; t++) {
                const int64_t rows = layers[t].rows;
                for (int64_t j = 0; j < elements_of(t); j++) values[j] = (float)next_unit(&source);
                for (int k = 0; k < 2; k++) {
                    for (int s = STATE; s < STATE + 2; s++)
                        MUST(halfstep_write_slot(m[k].o, t, s, NULL, 0, rows, values));
                    MUST(halfstep_write_slot(m[k].o, t, WEIGHT, m[k].weight[t], 0, rows, values));
                    MUST(halfstep_read_average(m[k].o, t, m[k].weight[t], 0, rows, seen[k]));
                }
                CHECK(!memcmp(seen[0], seen[1], (size_t)elements_of(t) * 4), "%s: other averages", settings[i].recipe);
                for (int s = STATE; s < STATE + 2; s++) {
                    for (int k = 0; k < 2; k++)
                        MUST(halfstep_read_slot(m[k].o, t, s, NULL, rows / 3, rows - rows / 3, seen[k]));
                    CHECK(!memcmp(seen[0], seen[1], (size_t)elements_of(t) * 4), "%s: other values",
                          settings[i].recipe);
                }
            }
            /* Nothing is current before a flush. */
            const long flushes = m[1].store.flushes;
            MUST(halfstep_flush(m[1].o, m[1].weight));
            EQUAL(m[1].store.flushes, flushes + 1);
            for (int k = 0; k < 2; k++) MUST(step_model(&m[k], 8));
            check_equal(&m[0], &m[1], settings[i].recipe);
            for (int k = 0; k < 2; k++) close_model(&m[k]);
            free(values);
            free(seen[0]);
            free(seen[1]);
        }
    TEST("bytes, in parts and wrong") {
        struct model m;
        open_model(&m, &(struct setting){.recipe = "adamw/bf16-ecc8/int8", .threads = 1, .piece_bytes = 1500}, 1);
        const uint64_t bytes = slot_info(m.o, 4, STATE).code_bytes;
        unsigned char *in = zeroed(bytes), *out = zeroed(bytes);
        for (uint64_t i = 0; i < bytes; i++) in[i] = (unsigned char)(i * 7 + i / 251);
        const long writes = m.store.writes;
        for (uint64_t i = 0; i < bytes; i += 100)
            MUST(halfstep_write_bytes(m.o, 4, STATE, 0, i, bytes - i < 100 ? bytes - i : 100, in + i));
        MUST(halfstep_read_bytes(m.o, 4, STATE, 0, 0, bytes, out));
        CHECK(!memcmp(in, out, bytes), "other bytes");
        CHECK(m.store.writes - writes < 20, "%ld writes", m.store.writes - writes);
        EXPECT_NAMED(m.o, halfstep_read_bytes(m.o, 4, STATE, 0, bytes, 1, out), RANGE, "are not among");
        EXPECT(halfstep_read_bytes(m.o, 4, STATE, 0, 1, UINT64_MAX, out), RANGE);
        EXPECT_NAMED(m.o, halfstep_read_bytes(m.o, 4, GRADIENT, 0, 0, 1, out), ARGUMENT, "gradient");
        EXPECT(halfstep_read_bytes(m.o, 4, 9, 0, 0, 1, out), ARGUMENT);
        EXPECT_NAMED(m.o, halfstep_read_bytes(m.o, 4, STATE, 2, 0, 1, out), ARGUMENT, "extra = 2");
        EXPECT(halfstep_write_bytes(m.o, 4, STATE, 0, 0, 1, NULL), ARGUMENT);
        /* A read that fails leaves the handle as it is. */
        MUST(halfstep_flush(m.o, NULL));
        m.store.fails_at = m.store.calls + 1;
        EXPECT_NAMED(m.o, halfstep_read_bytes(m.o, 2, STATE, 0, 0, 1, out), IO, "cannot read");
        EXPECT(halfstep_read_bytes(m.o, 2, STATE, 0, 0, 1, out), OK);
        MUST(step_model(&m, 0));
        free(in);
        free(out);
        close_model(&m);
        halfstep_optimizer *o = new_optimizer("adamw/bf16-ecc8", 1, 0);
        ADD_TENSOR(o, .name = "w", .ndim = 1, .rows = 64, .row_length = 1, .gradient = "f32");
        EXPECT_NAMED(o, halfstep_read_bytes(o, 0, STATE, 0, 0, 1, &m), ORDER, "no memory");
        EXPECT_NAMED(o, halfstep_read_bytes(o, 0, WEIGHT, 0, 0, 1, &m), ARGUMENT, "outside of storage");
        EXPECT(halfstep_flush(o, NULL), OK);
        halfstep_destroy(o);
    }
    TEST("states are in storage or in memory") {
        struct model m;
        char memory[64];
        open_model(&m, &(struct setting){.recipe = "adamw/bf16-ecc8/int8", .threads = 1}, IN_STORAGE);
        EXPECT_NAMED(m.o, halfstep_allocate_states(m.o), ORDER, "in storage");
        EXPECT(halfstep_bind_slot(m.o, 0, STATE, memory, memory), ORDER);
        EXPECT_NAMED(m.o, halfstep_write_initial(m.o, NULL), ARGUMENT, "NULL weights");
        MUST(halfstep_bind_storage(m.o, NULL));
        EXPECT_NAMED(m.o, step_model(&m, 0), ORDER, "no memory yet");
        EXPECT_NAMED(m.o, halfstep_write_initial(m.o, m.weight), ORDER, "no storage");
        MUST(halfstep_allocate_states(m.o));
        MUST(step_model(&m, 0));
        close_model(&m);
    }
}

/* ---- Forecasts --------------------------------------------------------------------------------------------------- */

static void compare_memory(const char *recipe, const halfstep_optimizer *o, const halfstep_forecast *f,
                           uint64_t workspace)
{
    uint64_t weights, gradients, extras, states;
    MUST(halfstep_memory(o, &weights, &gradients, &extras, &states, NULL));
    CHECK(weights == f->weights && gradients == f->gradients && extras == f->weight_extras &&
              states == f->states + workspace,
          "%s: %llu %llu %llu %llu bytes, not those of the forecast", recipe, (unsigned long long)weights,
          (unsigned long long)gradients, (unsigned long long)extras, (unsigned long long)states);
}

/* Makes an optimizer with two tensors of each shape, and one step of it in storage. A forecast has its bytes. Pieces
 * are larger than piece_bytes because of their weights, so that no memory is left in which any could stay. */
static void check_forecast(const char *recipe)
{
    enum { EACH = 2, SHAPES = 4, PIECE = 20000 };
    static const struct {
        int ndim;
        int64_t rows, row_length;
    } shapes[SHAPES] = {{2, 300, 96}, {1, 4500, 1}, {2, 128, 64}, {2, 7, 20}};
    halfstep_optimizer *o = new_optimizer(recipe, 1, 0);
    halfstep_forecast f = {.struct_size = sizeof f, .piece_bytes = PIECE};
    void *weight[SHAPES * EACH], *gradient[SHAPES * EACH];
    uint64_t elements = 0, largest = 0;
    for (int i = 0; i < SHAPES * EACH; i++) {
        halfstep_tensor t = {.struct_size = sizeof t,
                             .name = text_of("%d", i),
                             .ndim = shapes[i / EACH].ndim,
                             .rows = shapes[i / EACH].rows,
                             .row_length = shapes[i / EACH].row_length,
                             .gradient = "bf16"};
        add_tensor(o, &t);
        t.name = NULL;
        if (i % EACH == 0) MUST(halfstep_forecast_tensors(&f, recipe, &t, EACH));
        const uint64_t n = (uint64_t)(t.rows * t.row_length);
        elements += n;
        if (2 * n > largest) largest = 2 * n;
        weight[i] = zeroed((size_t)slot_info(o, i, WEIGHT).code_bytes + 1);
        gradient[i] = zeroed((size_t)(2 * n));
        for (uint64_t k = 0; k < n; k++) ((uint16_t *)gradient[i])[k] = 0x3c00;
    }
    EQUAL(f.tensors, SHAPES * EACH);
    EQUAL(f.elements, elements);
    EQUAL(f.largest_gradient, largest);
    compare_memory(recipe, o, &f, 0);
    struct store st = {.o = o};
    halfstep_storage table = table_of(&st, 1, PIECE, f.memory - 1);
    CHECK(f.memory < f.stored, "%s: all pieces stay", recipe);
    EXPECT_NAMED(o, halfstep_bind_storage(o, &table), RANGE, "three pieces need");
    table.memory = 0;
    MUST(halfstep_bind_storage(o, &table));
    compare_memory(recipe, o, &f, f.workspace);
    fill_store(&st, o);
    EQUAL(f.pieces, (uint64_t)st.n);
    uint64_t stored = 0;
    for (int64_t i = 0; i < st.n; i++) stored += (st.bytes[i] + 4095) / 4096 * 4096;
    EQUAL(f.stored, stored);
    EQUAL(f.memory, three_largest(o));
    MUST(halfstep_write_initial(o, weight));
    EQUAL(f.written, st.written);
    st.read = st.written = 0;
    MUST(halfstep_step(o, weight, (const void *const *)gradient));
    CHECK(f.read == st.read && f.written == st.written, "%s: %llu bytes read and %llu written, not %llu and %llu",
          recipe, (unsigned long long)st.read, (unsigned long long)st.written, (unsigned long long)f.read,
          (unsigned long long)f.written);
    const uint64_t used = (uint64_t)(st.high - st.low);
    CHECK(used <= f.memory && used > f.memory / 3 * 2, "%s: pieces were in %llu bytes of %llu", recipe,
          (unsigned long long)used, (unsigned long long)f.memory);
    free_store(&st);
    halfstep_destroy(o);
    for (int i = 0; i < SHAPES * EACH; i++) free(weight[i]), free(gradient[i]);
}

static void test_forecasts(void)
{
    static const char *const recipes[] = {"adamw/f32/f32",       "adamw/bf16-ecc8/int8",      "adamw/bf16-kahan/dyn8",
                                          "lamb/f32/fp8",        "lamb/bf16-sr/int8",         "prodigy/bf16-sr",
                                          "muon/f32/int8",       "adafactor/bf16-sr/bf16-sr", "lamb16/f16/fp8-lamb16",
                                          "sgd/int8-ecc4",       "adan/int8-sr/int4",         "stableadamw/f32/int6",
                                          "schedulefree/bf16-sr"};
    TEST("a forecast is what an optimizer and its storage take")
        for (size_t i = 0; i < COUNT(recipes); i++) check_forecast(recipes[i]);
    TEST("a forecast of a part, of none and of too many") {
        halfstep_tensor t = {.struct_size = sizeof t,
                             .ndim = 2,
                             .rows = 1000,
                             .row_length = 64,
                             .n_rows = 250,
                             .n_columns = 64,
                             .gradient = "f32"};
        SIZED(halfstep_forecast, f);
        MUST(halfstep_forecast_tensors(&f, "adamw/f32/int8", &t, 1));
        CHECK(f.elements == 250 * 64 && f.weights == 4 * f.elements && f.states == 2 * 250 * (64 + 4), "a part");
        const halfstep_forecast before = f;
        t.n_columns = 50;
        EXPECT_NAMED(NULL, halfstep_forecast_tensors(&f, "adamw/f32/int8", &t, 1), SHAPE, "do not fall on blocks");
        EXPECT_NAMED(NULL, halfstep_forecast_tensors(&f, "muon", &t, 1), UNSUPPORTED, "'unnamed'");
        t.n_columns = 64;
        EXPECT_NAMED(NULL, halfstep_forecast_tensors(&f, "adamw", &t, 0), RANGE, "count is 0");
        EXPECT_NAMED(NULL, halfstep_forecast_tensors(&f, "adamw", &t, INT32_MAX), RANGE, "too many");
        t.rows = t.n_rows = (int64_t)1 << 40;
        EXPECT_NAMED(NULL, halfstep_forecast_tensors(&f, "adamw", &t, 1 << 20), RANGE, "too many");
        CHECK(!memcmp(&f, &before, sizeof f), "a refused call has changed the forecast");
        t.n_rows = 0;
        t.may_be_empty = 1;
        MUST(halfstep_forecast_tensors(&f, "adafactor", &t, 1));
        CHECK(f.elements == before.elements && f.states == before.states && f.stored == before.stored, "an empty part");
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_golden();
    test_steps();
    test_threads();
    test_failures();
    test_pieces();
    test_memory();
    test_forecasts();
    test_slots();
    return test_done();
}
