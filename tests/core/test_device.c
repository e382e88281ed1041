/* Tests the interface of devices (device.h) with the most distant device possible in one process. Its memory cannot be
 * touched except while it works, and it works only while it is waited for. So a handle that reads without a wait finds
 * nothing, and a pointer of the wrong side faults. Data that the handle submits and changes too early is read as
 * changed. The host does the work behind it, so every case of tests/golden/hashes.txt must have its hash. A run without
 * arguments takes a sixteenth of them; --short: a 61st; --all: all. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <inttypes.h>

#ifdef _WIN32
int main(void) { return 0; }
#else

#include <sys/mman.h>
#include <unistd.h>

#include "device/host/host.h"
#include "golden_case.h"
#include "handle/optimizer.h"
#include "ref/fixture.h"

/* ---- Work that is put off ---- */

enum what {
    ZERO,
    COPY,
    SCAN,
    DECIDE,
    SUM,
    DECIDE_SUMS,
    CROSS,
    CARRY,
    UPDATE,
    TRANSFORM,
    COUNT,
    END_ROUND,
    ACCUMULATE,
    WRITE
};

/* A copy of all that the interface promises to be read before the call returns. */
struct work {
    enum what what;
    const struct hstep_context *context;
    void *to;
    const void *from;
    uint64_t size;
    struct hstep_call call;
    int first, n;
    enum hstep_pass pass;
    struct hstep_accumulation sum;
    struct hstep_access access;
    struct hstep_tensor tensor;
    void *owned[2]; /* copies of arrays, freed with the work */
};

static struct {
    struct work *work[256];
    int n;
    long waits, forgets; /* forgets: number of waits that do nothing */
    long refuses;        /* countdown to the call that is refused */
} queue;

static int refused(void) { return queue.refuses && !--queue.refuses; }
#define REFUSED()                     \
    do {                              \
        if (refused()) return MEMORY; \
    } while (0)

/* One range of pages for everything, so that opening and closing it is one call. Blocks are not reused within a
 * case. */
#define ARENA ((size_t)256 << 20)

static struct {
    char *base;
    size_t used, live;
} arena;

static void touchable(int yes) { mprotect(arena.base, arena.used, yes ? PROT_READ | PROT_WRITE : PROT_NONE); }

static int apart_allocate(const struct hstep_context *c, uint64_t bytes, void **memory)
{
    (void)c;
    REFUSED();
    size_t size = ((size_t)bytes + 4095) / 4096 * 4096 + 4096;
    if (arena.used + size > ARENA) return MEMORY;
    *memory = arena.base + arena.used;
    arena.used += size;
    arena.live++;
    return OK;
}

static int work_off(void);

static void apart_release(const struct hstep_context *c, void *memory)
{
    (void)c;
    if (!memory) return;
    work_off();
    if (--arena.live) return;
    madvise(arena.base, arena.used, MADV_DONTNEED);
    mprotect(arena.base, arena.used, PROT_NONE);
    arena.used = 0;
}

static struct work *put_off(enum what what, const struct hstep_context *context)
{
    if (queue.n == 256) abort();
    struct work *w = calloc(1, sizeof *w);
    if (!w) abort();
    w->what = what;
    w->context = context;
    return queue.work[queue.n++] = w;
}

static void *copy_of(const void *array, size_t bytes)
{
    void *copy = array ? malloc(bytes + 1) : NULL;
    if (copy) memcpy(copy, array, bytes);
    return copy;
}

static struct work *put_off_call(enum what what, const struct hstep_call *call)
{
    struct work *w = put_off(what, call->context);
    w->call = *call;
    w->call.weights = w->owned[0] = copy_of(call->weights, (size_t)call->n * sizeof(void *));
    w->call.gradients = w->owned[1] = copy_of(call->gradients, (size_t)call->n * sizeof(void *));
    return w;
}

static int run(const struct work *w)
{
    const struct hstep_device *host = &hstep_host_device;
    switch (w->what) {
    case ZERO: return host->zero(w->context, w->to, w->size);
    case COPY: return host->copy(w->context, w->to, w->from, w->size);
    case SCAN: return host->scan(&w->call);
    case DECIDE: return host->decide(&w->call);
    case SUM: return host->sum(&w->call, w->first, w->n);
    case DECIDE_SUMS: return host->decide_sums(&w->call, w->first, w->n);
    case CROSS: return host->cross(&w->call, w->first, w->n);
    case CARRY: return host->carry(w->context, w->to, (int64_t)w->size);
    case UPDATE: return host->update(&w->call, w->first, w->n, w->pass);
    case TRANSFORM: return host->transform(&w->call, &(struct hstep_matrix){.tensor = w->first});
    case COUNT: return host->count(&w->call);
    case END_ROUND: return host->end_round(&w->call);
    case ACCUMULATE: return host->accumulate(&w->sum);
    case WRITE: return host->write(&w->access, w->owned[0]);
    }
    return ARGUMENT;
}

static void drop(struct work *w)
{
    for (int j = 0; j < 2; j++) free(w->owned[j]);
    free(w);
}

static int work_off(void)
{
    int error = OK;
    touchable(1);
    for (int i = 0; i < queue.n; i++) {
        if (!error) error = run(queue.work[i]);
        drop(queue.work[i]);
    }
    queue.n = 0;
    touchable(0);
    return error;
}

/* Drops all pending work. */
static void forget(void)
{
    while (queue.n) drop(queue.work[--queue.n]);
}

static int apart_wait(const struct hstep_context *c)
{
    (void)c;
    queue.waits++;
    if (refused()) {
        forget();
        return MEMORY;
    }
    return queue.forgets && queue.forgets-- ? OK : work_off();
}

/* size: bytes, or sums of limbs. */
static int put_off_memory(enum what what, const struct hstep_context *c, void *to, const void *from, uint64_t size)
{
    REFUSED();
    struct work *w = put_off(what, c);
    w->to = to;
    w->from = from;
    w->size = size;
    return OK;
}

static int apart_zero(const struct hstep_context *c, void *memory, uint64_t bytes)
{
    return put_off_memory(ZERO, c, memory, NULL, bytes);
}

static int apart_copy(const struct hstep_context *c, void *to, const void *from, uint64_t bytes)
{
    return put_off_memory(COPY, c, to, from, bytes);
}

static int apart_carry(const struct hstep_context *c, int64_t *limbs, int64_t n)
{
    return put_off_memory(CARRY, c, limbs, NULL, (uint64_t)n);
}

static int put_off_some(enum what what, const struct hstep_call *call, int first, int n, enum hstep_pass pass)
{
    REFUSED();
    struct work *w = put_off_call(what, call);
    w->first = first;
    w->n = n;
    w->pass = pass;
    return OK;
}

static int apart_scan(const struct hstep_call *call) { return put_off_some(SCAN, call, 0, 0, 0); }
static int apart_decide(const struct hstep_call *call) { return put_off_some(DECIDE, call, 0, 0, 0); }
static int apart_sum(const struct hstep_call *call, int first, int n) { return put_off_some(SUM, call, first, n, 0); }
static int apart_decide_sums(const struct hstep_call *call, int first, int n)
{
    return put_off_some(DECIDE_SUMS, call, first, n, 0);
}
static int apart_cross(const struct hstep_call *call, int tensor, int pair)
{
    return put_off_some(CROSS, call, tensor, pair, 0);
}
static int apart_update(const struct hstep_call *call, int first, int n, enum hstep_pass pass)
{
    return put_off_some(UPDATE, call, first, n, pass);
}
static int apart_transform(const struct hstep_call *call, const struct hstep_matrix *m)
{
    return put_off_some(TRANSFORM, call, m->tensor, 1, 0);
}
static int apart_count(const struct hstep_call *call) { return put_off_some(COUNT, call, 0, 0, 0); }
static int apart_end_round(const struct hstep_call *call) { return put_off_some(END_ROUND, call, 0, 0, 0); }

static int apart_accumulate(const struct hstep_accumulation *a)
{
    REFUSED();
    struct work *w = put_off(ACCUMULATE, a->context);
    w->sum = *a;
    w->tensor = *a->tensor;
    w->sum.tensor = &w->tensor;
    w->sum.chunks = w->owned[0] = copy_of(a->chunks, (size_t)a->tensor->chunks * sizeof *a->chunks);
    return OK;
}

static int apart_write(const struct hstep_access *a, const float *in)
{
    REFUSED();
    struct work *w = put_off(WRITE, a->context);
    w->access = *a;
    w->tensor = *a->tensor;
    w->access.tensor = &w->tensor;
    w->owned[0] = copy_of(in, (size_t)(a->end - a->first) * sizeof *in);
    return OK;
}

/* This call and the next return with their result. */
static int apart_read(const struct hstep_access *a, float *out)
{
    REFUSED();
    int error = work_off();
    touchable(1);
    if (!error) error = hstep_host_device.read(a, out);
    touchable(0);
    return error;
}

static int apart_saturated(const struct hstep_access *a, uint64_t *count)
{
    int error = work_off();
    return error ? error : hstep_host_device.saturated(a, count);
}

static struct hstep_device apart = {
    .name = "apart",
    .shared = 0,
    .allocate = apart_allocate,
    .release = apart_release,
    .zero = apart_zero,
    .copy = apart_copy,
    .wait = apart_wait,
    .scan = apart_scan,
    .decide = apart_decide,
    .sum = apart_sum,
    .decide_sums = apart_decide_sums,
    .cross = apart_cross,
    .carry = apart_carry,
    .update = apart_update,
    .transform = apart_transform,
    .count = apart_count,
    .end_round = apart_end_round,
    .accumulate = apart_accumulate,
    .read = apart_read,
    .write = apart_write,
    .saturated = apart_saturated,
};

/* ---- Tests ---- */

static void run_golden(const char *list, const struct golden_case *c, const struct golden_layout *layout)
{
    if (!check_golden(list, c, layout)) return;
    CHECK(!queue.n, "%s: %d calls were never waited for", c->recipe, queue.n);
    work_off();
    CHECK(!arena.live, "%s: %zu blocks of the device were not released", c->recipe, arena.live);
}

/* Steps one tensor by itself in rounds, and all at once. Golden cases do not do that. */
static void test_rounds(void)
{
    float w[2][100], g[100], *weights[2] = {w[0], w[1]};
    double norm[2];
    halfstep_record counters[2];
    for (int far = 0; far < 2; far++) {
        hstep_default_device = far ? &apart : &hstep_host_device;
        for (int i = 0; i < 100; i++) w[far][i] = 1.0f;
        halfstep_optimizer *o = new_optimizer("adamw", 0, 0);
        MUST(halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", 2.0));
        int32_t tensor = ADD_TENSOR(o, .name = "w", .ndim = 1, .rows = 100, .row_length = 1, .gradient = "f32");
        MUST(halfstep_allocate_states(o));
        for (int step = 0; step < 4; step++) {
            for (int i = 0; i < 100; i++) g[i] = (float)(i - 50 + step) / 10.0f;
            if (step == 2) g[7] = NAN;
            int result = step_tensor(o, tensor, weights[far], g);
            CHECK(result == (step == 2 ? HALFSTEP_NONFINITE : OK), "step %d: %s", step, halfstep_error_detail(o));
            MUST(end_round(o));
        }
        norm[far] = halfstep_gradient_norm(o);
        counters[far] = (halfstep_record){.struct_size = sizeof counters[far]};
        MUST(get_counters(o, tensor, &counters[far]));
        EQUAL(halfstep_skipped_steps(o), 1);
        halfstep_destroy(o);
    }
    CHECK(!memcmp(w[0], w[1], sizeof w[0]), "other weights");
    CHECK(norm[0] == norm[1] && norm[0] > 0.0, "norm %g, on the host %g", norm[1], norm[0]);
    CHECK(!memcmp(&counters[0], &counters[1], sizeof counters[0]), "other counters");
}

static void test_waits(void)
{
    static const char *const recipes[] = {"adamw/f32", "lamb/bf16-sr/int8", "muon/f32"};
    float w[64 * 64] = {0}, g[64 * 64];
    void *weights[] = {w};
    const void *gradients[] = {g};
    for (int i = 0; i < 64 * 64; i++) g[i] = (float)(i % 7) - 3.0f;
    hstep_default_device = &apart;
    for (size_t k = 0; k < COUNT(recipes); k++) {
        halfstep_optimizer *o = new_optimizer(recipes[k], 0, 0);
        MUST(halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", 1.0));
        ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = 64, .row_length = 64, .gradient = "f32");
        SIZED(halfstep_storage, storage);
        EXPECT_NAMED(o, halfstep_bind_storage(o, &storage), UNSUPPORTED, "in storage");
        MUST(halfstep_allocate_states(o));
        for (int step = 0; step < 3; step++) {
            long before = queue.waits;
            MUST(halfstep_step(o, weights, gradients));
            CHECK(queue.waits == before + 1, "%s waits %ld times", recipes[k], queue.waits - before);
        }
        halfstep_destroy(o);
    }
}

/* Runs a handle's life once per call that the device refuses. The code must reach the caller, and nothing may be left
 * behind. */
static int live(void)
{
    float w[32 * 64] = {0}, g[32 * 64], values[32 * 64] = {0};
    void *weights[] = {w};
    const void *gradients[] = {g};
    int64_t statistics[512];
    halfstep_optimizer *o;
    int32_t group, tensor;
    halfstep_tensor t = {
        .struct_size = sizeof t, .name = "w", .ndim = 2, .rows = 32, .row_length = 64, .gradient = "f32"};
    for (int i = 0; i < 32 * 64; i++) g[i] = (float)(i % 7) - 3.0f;
    int result = halfstep_create(NULL, &o);
    if (result) return result;
    if (!(result = halfstep_add_group(o, "lamb", &group)) &&
        !(result = halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", 1.0)) &&
        !(result = halfstep_add_tensor(o, &t, &tensor)) && !(result = halfstep_allocate_states(o)) &&
        !(result = halfstep_step(o, weights, gradients)) && !(result = step_begin(o, gradients, statistics)) &&
        !(result = step_norms(o, weights, gradients, statistics)) &&
        !(result = step_finish(o, weights, gradients, statistics)) && !(result = step_tensor(o, tensor, w, g)) &&
        !(result = end_round_begin(o, statistics)) && !(result = end_round_finish(o, statistics)) &&
        !(result = halfstep_accumulate(o, tensor, values, "f32", g, "f32", 1.0)) &&
        !(result = halfstep_write_slot(o, tensor, STATE, NULL, 0, 32, values)))
        result = halfstep_read_slot(o, tensor, STATE, NULL, 0, 32, values);
    halfstep_destroy(o);
    return result;
}

static void test_refusals(void)
{
    hstep_default_device = &apart;
    for (long k = 1, fired = 1; fired; k++) {
        queue.refuses = k;
        int result = live();
        fired = !queue.refuses;
        CHECK(result == (fired ? MEMORY : OK), "call %ld refused: %s", k, halfstep_strerror(result));
        CHECK(!fired || k < 1000, "refused without end");
        queue.refuses = 0;
        work_off();
        CHECK(!arena.live, "call %ld refused: %zu blocks of the device are left", k, arena.live);
        if (!fired) printf("     %ld calls refused\n", k - 1);
    }
}

int main(int argc, char **argv)
{
    int n = 0;
    test_init(argc, argv);
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    arena.base = mmap(NULL, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!cases || arena.base == MAP_FAILED) return 1;
    apart.find_fused = hstep_host_device.find_fused;
    apart.workspace = hstep_host_device.workspace;
    hstep_default_device = &apart;
    const struct golden_layout layouts[] = {{.threads = 1, .states_bound = 1},
                                            {.threads = 3, .parts = 2, .states_bound = 1},
                                            {.threads = 1, .parts = 3, .by_columns = 1, .states_bound = 1}};
    const char *const names[] = {"every golden case, far from the host", "in 2 shards of rows",
                                 "in 3 shards of columns"};
    for (int l = 0; l < 3; l++)
        TEST(names[l]) {
            int stride = BY_LENGTH(61, l ? 61 : 16, l ? 16 : 1);
            for (int i = l % stride; i < n; i += stride) run_golden(list, &cases[i], &layouts[l]);
        }
    TEST("rounds of single tensors") test_rounds();
    TEST("one wait a step") test_waits();
    TEST("what the device refuses comes back as its code") test_refusals();
    /* Shows that the test can fail: a wait that does nothing is noticed, by a fault or by the bits. */
    TEST("a missing wait is noticed") {
        pid_t child = fork();
        if (!child) {
            uint64_t hash = 0, expected = 1;
            char error[300] = "";
            queue.forgets = 40;
            /* The sanitizer's report of the fault must not go to the log. */
            if (freopen("/dev/null", "w", stdout) && freopen("/dev/null", "w", stderr) &&
                !golden_run(&cases[0], &layouts[0], &hash, error, sizeof error))
                golden_expected(list, &cases[0], &expected);
            test_leave(hash != expected);
        }
        CHECK(test_child_status(child) > 0, "40 waits that do nothing give the promised bits");
    }
    free(cases);
    free(list);
    return test_done();
}

#endif
