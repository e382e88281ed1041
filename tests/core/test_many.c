/* Tests many small tensors: chunks that share a task, updates made after the one before, and what is only counted once.
 * Every step of all is compared with steps of one tensor at a time, which share nothing. */

#include "ref/fixture.h"
#include "tables/layout.h"

/* ---- Tasks ---- */

/* Cuts a list of lengths. Tasks must cover it in order, and each is about a chunk or a single one. */
static void join(const int64_t *lengths, int64_t n, int64_t most)
{
    struct hstep_chunk *chunks = zeroed((size_t)n * sizeof *chunks);
    int64_t *tasks = zeroed((size_t)(n + 1) * sizeof *tasks);
    for (int64_t i = 0; i < n; i++)
        chunks[i] = (struct hstep_chunk){.tensor = (int)i, .tracks = 2, .length = lengths[i] / 2};
    int64_t count = hstep_join_chunks(chunks, n, tasks);
    CHECK(count <= most, "%lld chunks in %lld tasks, not %lld", (long long)n, (long long)count, (long long)most);
    CHECK(tasks[count] == n && (!n || tasks[0] == 0), "tasks begin at %lld and end at %lld", (long long)tasks[0],
          (long long)tasks[count]);
    for (int64_t k = 0; k < count; k++) {
        int64_t elements = 0;
        CHECK(tasks[k] < tasks[k + 1], "task %lld is empty", (long long)k);
        for (int64_t i = tasks[k]; i < tasks[k + 1]; i++) {
            CHECK(chunks[i].task == k, "chunk %lld is of task %lld, not %lld", (long long)i, (long long)chunks[i].task,
                  (long long)k);
            elements += lengths[i];
        }
        CHECK(tasks[k + 1] == tasks[k] + 1 || elements <= HSTEP_CHUNK, "task %lld has %lld elements", (long long)k,
              (long long)elements);
        CHECK(tasks[k + 1] - tasks[k] <= HSTEP_CHUNK / HSTEP_CHUNK_COST, "task %lld has %lld chunks", (long long)k,
              (long long)(tasks[k + 1] - tasks[k]));
    }
    free(chunks);
    free(tasks);
}

/* Cuts a tensor of `runs` long or short runs, at `first` in index space. Chunks must cover it in order. Those of long
 * runs must not cross a multiple of a chunk. */
static void cut(int64_t runs, int64_t length, uint64_t first)
{
    const struct hstep_tensor t = {
        .tracks = runs, .track_length = length, .grain = HSTEP_CELL, .index0 = first, .index_stride = length};
    int64_t n = hstep_cut_tensor(&t, 0, NULL), next = 0, wrong = 0;
    struct hstep_chunk *chunks = zeroed((size_t)n * sizeof *chunks);
    CHECK(hstep_cut_tensor(&t, 0, chunks) == n, "counted and cut differ");
    for (int64_t i = 0; i < n; i++) {
        int64_t start = chunks[i].track * length + chunks[i].offset, elements = chunks[i].tracks * chunks[i].length;
        int64_t at = (int64_t)first % HSTEP_CHUNK + start;
        wrong += start != next || elements < 1 || elements > HSTEP_CHUNK;
        wrong += length >= HSTEP_CHUNK && at / HSTEP_CHUNK != (at + elements - 1) / HSTEP_CHUNK;
        next = start + elements;
    }
    CHECK(!wrong && next == runs * length, "%lld runs of %lld from %llu: %lld of %lld chunks are wrong",
          (long long)runs, (long long)length, (unsigned long long)first, (long long)wrong, (long long)n);
    free(chunks);
}

static void test_tasks(void)
{
    TEST("chunks cover a tensor, and long runs are cut at multiples of one") {
        static const int64_t lengths[] = {1, 100, HSTEP_CHUNK - 1, HSTEP_CHUNK, HSTEP_CHUNK + 1, 3 * HSTEP_CHUNK + 7};
        static const uint64_t firsts[] = {0, 64, HSTEP_CHUNK - 1, 5 * HSTEP_CHUNK + 3};
        for (size_t i = 0; i < 24; i++)
            for (int64_t runs = 1; runs < 400; runs = runs * 7 + 1) cut(runs, lengths[i % 6], firsts[i / 6]);
    }
    TEST("tasks: small chunks share one, whole chunks have one each") {
        int64_t lengths[4000] = {0};
        struct source s = {5};
        join(lengths, 0, 0);
        for (int i = 0; i < 4000; i++) lengths[i] = HSTEP_CHUNK;
        join(lengths, 4000, 4000);
        for (int i = 0; i < 4000; i++) lengths[i] = 64;
        join(lengths, 4000, 4000 * (64 + HSTEP_CHUNK_COST) / HSTEP_CHUNK + 2);
        for (int i = 0; i < 4000; i++) lengths[i] = (int64_t)(next64(&s) % (uint64_t)HSTEP_CHUNK / 2 * 2);
        join(lengths, 4000, 4000);
        for (int i = 0; i < 4000; i++) lengths[i] = i % 100 ? 128 : HSTEP_CHUNK;
        join(lengths, 4000, 40 * 3 + 1);
    }
}

/* ---- Steps ---- */

enum { TENSORS = 150, STEPS = 3, WORST = 40000 };

struct many {
    halfstep_optimizer *o;
    void *weight[TENSORS], *gradient[TENSORS];
    int64_t elements[TENSORS]; /* every array has room for as many floats */
};

/* Opens tensors of one element to more than a chunk, in two groups in turn. Those too small for blocks fall back. */
static void open_many(struct many *m, const char *const recipe[2], const char *gradients, int threads)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads, .seed = 9};
    int32_t group;
    struct source s = {11};
    MUST(halfstep_create(&options, &m->o));
    for (int i = 0; i < 2; i++) MUST(halfstep_add_group(m->o, recipe[i], &group));
    for (int i = 0; i < TENSORS; i++) {
        static const int64_t columns[] = {1, 3, 64, 100, 128, 256, 1024, 4096};
        int64_t length = columns[next64(&s) % 8], rows = 1 + (int64_t)(next64(&s) % 12);
        if (i == 70) rows = WORST, length = 1;
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = i / 5 % 2,
                             .name = name,
                             .ndim = 2,
                             .rows = rows,
                             .row_length = length,
                             .gradient = gradients};
        add_tensor(m->o, &t);
        m->elements[i] = rows * length;
        m->weight[i] = zeroed((size_t)m->elements[i] * 4 + 64);
        m->gradient[i] = zeroed((size_t)m->elements[i] * 4 + 64);
    }
    MUST(halfstep_allocate_states(m->o));
    MUST(halfstep_set_choice(m->o, ALL_GROUPS, "scan", "per-tensor"));
}

/* Gives every seventh tensor other grids than its neighbours have. */
static void set_grids(struct many *m)
{
    for (int i = 3; i < TENSORS; i += 7)
        for (int slot = STATE; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
            SIZED(halfstep_slot_info, info);
            char name[64];
            if (halfstep_get_slot_info(m->o, i, slot, &info) || !info.grid) continue;
            snprintf(name, sizeof name, "%s.grid", info.name);
            MUST(set_scalar(m->o, i, name, 0.75));
        }
}

static void close_many(struct many *m)
{
    halfstep_destroy(m->o);
    for (int i = 0; i < TENSORS; i++) {
        free(m->weight[i]);
        free(m->gradient[i]);
    }
}

/* Makes the gradients of one step. That of tensor 33 is not finite in step 2. */
static void give(struct many *m, int wide, int step)
{
    for (int i = 0; i < TENSORS; i++) {
        struct source s = {(uint64_t)(1000 * step + i)};
        for (int64_t j = 0; j < m->elements[i]; j++) {
            float x = i == 33 && step == 2 && j == 0 ? NAN : (float)(0.01 * next_normal(&s));
            uint32_t bits = to_bits(x);
            if (wide) ((float *)m->gradient[i])[j] = x;
            else ((uint16_t *)m->gradient[i])[j] = (uint16_t)(bits >> 16);
        }
    }
}

static int same_bits(const struct many *a, const struct many *b, int tensor)
{
    for (int slot = 0; slot < STATE + HALFSTEP_MAX_STATES; slot++) {
        halfstep_slot_info x = {.struct_size = sizeof x}, y = {.struct_size = sizeof y};
        if (!stored_slot(a->o, tensor, slot, &x)) continue;
        y = slot_info(b->o, tensor, slot);
        if ((x.code && memcmp(x.code, y.code, x.code_bytes)) || (x.extra && memcmp(x.extra, y.extra, x.extra_bytes)))
            return 0;
    }
    return !memcmp(a->weight[tensor], b->weight[tensor], (size_t)a->elements[tensor] * 4);
}

/* Tensors 20 and 21 are left out of step 1, so they are one step behind their neighbours from then on. */
static int is_left_out(int tensor, int step) { return step == 1 && (tensor == 20 || tensor == 21); }

static void step_all(struct many *m, int step)
{
    const void *gradients[TENSORS];
    for (int i = 0; i < TENSORS; i++) gradients[i] = is_left_out(i, step) ? NULL : m->gradient[i];
    EXPECT(halfstep_step(m->o, m->weight, gradients), step == 2 ? HALFSTEP_NONFINITE : OK);
}

static void step_each(struct many *m, int step)
{
    for (int i = TENSORS - 1; i >= 0; i--)
        if (!is_left_out(i, step))
            EXPECT(step_tensor(m->o, i, m->weight[i], m->gradient[i]), step == 2 && i == 33 ? HALFSTEP_NONFINITE : OK);
    MUST(end_round(m->o));
}

static void steps_of(const char *first, const char *second, const char *gradients, int threads, const char *hyper)
{
    const char *const recipe[2] = {first, second};
    struct many a, b;
    open_many(&a, recipe, gradients, threads);
    open_many(&b, recipe, gradients, threads);
    set_grids(&a);
    set_grids(&b);
    if (hyper) {
        MUST(halfstep_set_hyper(a.o, 1, hyper, 1.0));
        MUST(halfstep_set_hyper(b.o, 1, hyper, 1.0));
    }
    for (int step = 0; step < STEPS; step++) {
        give(&a, !strcmp(gradients, "f32"), step);
        give(&b, !strcmp(gradients, "f32"), step);
        step_all(&a, step);
        step_each(&b, step);
        int wrong = 0;
        for (int i = 0; i < TENSORS; i++) wrong += !same_bits(&a, &b, i);
        CHECK(!wrong, "%s, %s, %d threads, step %d: %d of %d tensors differ", first, second, threads, step, wrong,
              TENSORS);
    }
    close_many(&a);
    close_many(&b);
}

static void test_steps(void)
{
    TEST("a step of many tensors is as many steps of one, bit for bit") {
        for (int threads = 1; threads <= 3; threads++) {
            steps_of("adamw/f32/f32", "sgd/f32", "f32", threads, NULL);
            steps_of("adamw/bf16-sr/bf16-sr", "adamw/bf16-sr/int8", "bf16", threads, NULL);
            steps_of("adamw/bf16-kahan/int8", "lion/bf16-ecc8/int4", "bf16", threads, "centralize");
            steps_of("lamb/bf16-sr/int8", "lamb/bf16-sr/fp8-lamb16", "bf16", threads, NULL);
            steps_of("muon/bf16-sr", "stableadamw/bf16-kahan/fp8", "bf16", threads, NULL);
        }
    }
    TEST("what is remembered of tensors does not hide what is wrong with one") {
        const char *const recipe[2] = {"adamw/f32", "adamw/f32"};
        const void *gradients[TENSORS];
        struct many m;
        open_many(&m, recipe, "f32", 1);
        give(&m, 1, 0);
        step_all(&m, 0);
        /* A handle that has stepped before also refuses. */
        void *weight = m.weight[7];
        for (int i = 0; i < TENSORS; i++) gradients[i] = m.gradient[i];
        m.weight[7] = NULL;
        EXPECT_NAMED(m.o, halfstep_step(m.o, m.weight, gradients), ARGUMENT, "'t7'");
        m.weight[7] = weight;
        MUST(halfstep_set_hyper(m.o, 1, "lr", 0.0));
        MUST(halfstep_set_choice(m.o, 1, "decay", "fully-decoupled"));
        MUST(halfstep_set_hyper(m.o, 1, "weight_decay", 0.1));
        EXPECT_NAMED(m.o, halfstep_step(m.o, m.weight, gradients), RANGE, "reference_lr");
        close_many(&m);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_tasks();
    test_steps();
    return test_done();
}
