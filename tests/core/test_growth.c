/* Tests that no call's work grows with the square of the number of tensors or groups. The sources of src/handle, src/io
 * and src/tables are compiled into this program once more, with a call at the beginning of each basic block
 * (cmake/tests.cmake). The calls and the bytes that are moved are counted, so nothing depends on a clock. */
#define HALFSTEP_ADVANCED
#include <stdatomic.h>

#include "halfstep_io.h"
#include "messages.h"
#include "ref/fixture.h"
#include "scratch.h"

static atomic_ullong work;

void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_pc(void) { atomic_fetch_add_explicit(&work, 1, memory_order_relaxed); }

/* The linker puts these before the C library. 16 bytes count as much as a basic block. */
void *__real_memmove(void *to, const void *from, size_t bytes),
    *__real_memcpy(void *to, const void *from, size_t bytes), *__real_memset(void *to, int value, size_t bytes);
void *__wrap_memmove(void *to, const void *from, size_t bytes),
    *__wrap_memcpy(void *to, const void *from, size_t bytes), *__wrap_memset(void *to, int value, size_t bytes);
static void count_bytes(size_t bytes) { atomic_fetch_add_explicit(&work, bytes / 16, memory_order_relaxed); }
void *__wrap_memmove(void *to, const void *from, size_t bytes)
{
    count_bytes(bytes);
    return __real_memmove(to, from, bytes);
}
void *__wrap_memcpy(void *to, const void *from, size_t bytes)
{
    count_bytes(bytes);
    return __real_memcpy(to, from, bytes);
}
void *__wrap_memset(void *to, int value, size_t bytes)
{
    count_bytes(bytes);
    return __real_memset(to, value, bytes);
}

/* Four times as many tensors may cost six times as much, which leaves room for sorting. A square costs sixteen times
 * as much. */
enum { FEW = 512, TIMES = 4, MOST = FEW * TIMES, LENGTH = 32, MORE = 6 };

static float weight[MOST][LENGTH], gradient[MOST][LENGTH];
static void *weights[MOST];
static const void *gradients[MOST];
static halfstep_optimizer *optimizer;
static int tensors;

/* Names tensors so that their order is not that of their names. */
static const char *name_of(int tensor)
{
    static char name[32];
    snprintf(name, sizeof name, "layers.%d.weight", tensor);
    return name;
}

static const char *at(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s-%d", scratch, name, tensors);
    return path;
}

/* ---- The calls --------------------------------------------------------------------------------------------------- */

/* ids: the tensors have these ids, k steps apart, in place of those of their names. own_groups: each has a group. */
static void add(uint64_t apart, int own_groups)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1};
    int32_t group = 0, index;
    MUST(halfstep_create(&options, &optimizer));
    for (int i = 0; i < (own_groups ? tensors : 1); i++)
        MUST(halfstep_add_group(optimizer, "adamw/f32/bf16-sr", &group));
    for (int i = 0; i < tensors; i++) {
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = own_groups ? i : 0,
                             .name = name_of(i),
                             .id = apart * (uint64_t)(i + 1),
                             .ndim = 1,
                             .rows = LENGTH,
                             .row_length = 1,
                             .gradient = "f32"};
        MUST(halfstep_add_tensor(optimizer, &t, &index));
    }
}
static void add_named(void) { add(0, 0); }
static void add_counted(void) { add(1, 0); }
static void add_far(void) { add((uint64_t)1 << 50, 0); }
static void add_groups(void) { add(0, 1); }

static void find(void)
{
    for (int i = 0; i < tensors; i++) EQUAL(halfstep_tensor_find(optimizer, name_of(i)), i);
    EQUAL(halfstep_tensor_find(optimizer, "no tensor"), -1);
}

static void set_groups(void)
{
    for (int i = 0; i < halfstep_group_count(optimizer); i++) {
        MUST(halfstep_set_hyper(optimizer, i, "lr", 0.01));
        MUST(halfstep_set_choice(optimizer, i, "decay", "cautious"));
    }
}

static void allocate(void) { MUST(halfstep_allocate_states(optimizer)); }
static void step(void) { MUST(halfstep_step(optimizer, weights, gradients)); }

static void step_each(void)
{
    for (int i = 0; i < tensors; i++) MUST(step_tensor(optimizer, i, weights[i], gradients[i]));
    MUST(end_round(optimizer));
}

/* Gives tensors other ids. */
static void set_records(void)
{
    for (int i = 0; i < tensors; i++) {
        halfstep_record r = {.struct_size = sizeof r, .kind = HALFSTEP_RECORD_TENSOR, .index = i};
        MUST(halfstep_get_record(optimizer, &r));
        r.id = (uint64_t)i + 1;
        MUST(halfstep_set_record(optimizer, &r));
    }
}

static void write_states(void) { MUST(halfstep_write_optimizer(at("states"), optimizer, NULL, NULL, TEXT)); }
static void read_states(void) { MUST(halfstep_read_optimizer(at("states"), optimizer, NULL, NULL, TEXT)); }

static void save(void)
{
    halfstep_checkpoint_save *saving;
    halfstep_save_options options = {.struct_size = sizeof options, .step = 1};
    MUST(halfstep_begin_checkpoint(&saving, at("run"), &options, TEXT));
    MUST(halfstep_save_optimizer(saving, optimizer, weights, NULL, TEXT));
    MUST(halfstep_commit_checkpoint(saving, TEXT));
}

static void load(void)
{
    halfstep_checkpoint *checkpoint;
    MUST(halfstep_open_checkpoint(&checkpoint, at("run"), NULL, TEXT));
    MUST(halfstep_load_optimizer(checkpoint, optimizer, weights, NULL, TEXT));
    halfstep_close_checkpoint(checkpoint);
}

static halfstep_store *store;
static const halfstep_store_options through_cache = {.struct_size = sizeof through_cache, .buffered = 1};
static void make_store(void)
{
    MUST(halfstep_store_create(at("store"), optimizer, weights, &through_cache, &store, TEXT));
}
static void open_store(void)
{
    MUST(halfstep_store_open(at("store"), optimizer, weights, &through_cache, &store, TEXT));
}

static void end(void)
{
    halfstep_destroy(optimizer);
    halfstep_store_close(store);
    store = NULL;
}

/* Declares many pairs of metadata, in an order that is not that of their keys. */
static void declare(void)
{
    halfstep_safetensors_writer *writer;
    MUST(halfstep_create_safetensors_writer(&writer));
    for (int i = 0, n = 8 * tensors; i < n; i++)
        MUST(halfstep_declare_safetensors_metadata(writer, name_of(i * 7919 % n), "value", TEXT));
    MUST(halfstep_write_safetensors(writer, at("declared"), NULL, NULL, TEXT));
    halfstep_destroy_safetensors_writer(writer);
}

/* ---- Counting ---------------------------------------------------------------------------------------------------- */

struct call {
    const char *name;
    void (*make)(void);
};
#define CALL(name) {#name, name}

enum { CALLS = 12 };
static const struct life {
    const char *name;
    struct call calls[CALLS];
} lives[] = {
    {"tensors, steps and files",
     {CALL(add_named), CALL(find), CALL(allocate), CALL(step), CALL(step_each), CALL(write_states), CALL(set_records),
      CALL(read_states), CALL(save), CALL(load), CALL(end)}},
    {"ids that are counted", {CALL(add_counted), CALL(find), CALL(end)}},
    {"ids that differ in their highest bits", {CALL(add_far), CALL(find), CALL(end)}},
    {"a group for each tensor",
     {CALL(add_groups), CALL(set_groups), CALL(allocate), CALL(step), CALL(write_states), CALL(read_states),
      CALL(end)}},
    {"states in a file",
     {CALL(add_named), CALL(make_store), CALL(step), CALL(end), CALL(add_named), CALL(open_store), CALL(end)}},
    {"metadata", {CALL(declare)}},
};

/* Makes the calls of a life one after the other, and notes the work of each. */
static void live(const struct call *calls, int n, unsigned long long cost[CALLS])
{
    tensors = n;
    for (int i = 0; calls[i].make; i++) {
        atomic_store(&work, 0);
        calls[i].make();
        cost[i] = atomic_load(&work);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch("growth");
    for (int i = 0; i < MOST; i++) {
        weights[i] = weight[i];
        gradients[i] = gradient[i];
        for (int k = 0; k < LENGTH; k++) weight[i][k] = gradient[i][k] = (float)(i % 7 + k - 3);
    }
    for (const struct life *life = lives; life < lives + COUNT(lives); life++) {
        char name[100];
        snprintf(name, sizeof name, "no work grows with the square: %s", life->name);
        TEST(name) {
            unsigned long long few[CALLS], many[CALLS];
            live(life->calls, FEW, few);
            live(life->calls, MOST, many);
            for (int k = 0; life->calls[k].make; k++)
                CHECK(few[k] > FEW && many[k] < MORE * few[k], "%s: %llu for %d tensors, %llu for %d",
                      life->calls[k].name, few[k], FEW, many[k], MOST);
        }
    }
    return test_done();
}
