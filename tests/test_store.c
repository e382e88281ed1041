/* Tests files of states (halfstep_io.h, "States in a file"): resuming, refusals, kills, losses of power, disks that fail.
 * engine.c is compiled into this file, with calls that can fail and that remember what a loss of power would undo.
 *
 *   test_store [--short | --all]     50 kills; with --all 1000
 * Runs under sanitizers. */
#define HALFSTEP_ADVANCED
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "halfstep_io.h"
#include "messages.h"
#include "scratch.h"

/* ---- A disk that fails ------------------------------------------------------------------------------------------- */

/* Call number `at` of all that can fail fails with `number`, once. Reads of the page at `bad_page` always fail. */
static struct {
    atomic_long calls;
    long at;
    int number;
    uint64_t bad_page;
} fault = {.bad_page = UINT64_MAX};

static int refuse(void)
{
    if (atomic_fetch_add(&fault.calls, 1) + 1 != fault.at) return 0;
    errno = fault.number;
    return 1;
}

/* While `on`: what is durable of one file, and the writes since the last sync. */
enum { MAX_WRITES = 256 };
static struct {
    int on;
    pthread_mutex_t lock;
    char *image;
    uint64_t bytes;
    struct unsynced {
        uint64_t offset, bytes;
        char *data;
    } writes[MAX_WRITES];
    int count;
    void (*before_sync)(void);
} power = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void apply(char *image, const struct unsynced *w) { memcpy(image + w->offset, w->data, (size_t)w->bytes); }

static ssize_t faulty_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (refuse()) return -1;
    if (power.on) {
        pthread_mutex_lock(&power.lock);
        char *copy = power.count < MAX_WRITES ? malloc(bytes) : NULL;
        if (copy) {
            memcpy(copy, data, bytes);
            power.writes[power.count++] = (struct unsynced){(uint64_t)offset, bytes, copy};
        } else {
            FAIL("more than %d writes between two syncs", MAX_WRITES);
        }
        pthread_mutex_unlock(&power.lock);
    }
    return pwrite(fd, data, bytes, offset);
}

static ssize_t faulty_pread(int fd, void *data, size_t bytes, off_t offset)
{
    if (fault.bad_page - (uint64_t)offset < bytes) {
        errno = EIO;
        return -1;
    }
    return refuse() ? -1 : pread(fd, data, bytes, offset);
}

/* Does not wait for the disk, because a killed process loses nothing, and losses of power are simulated. */
static int faulty_fdatasync(int fd)
{
    (void)fd;
    if (refuse()) return -1;
    if (!power.on) return 0;
    if (power.before_sync) power.before_sync();
    for (int i = 0; i < power.count; i++) {
        apply(power.image, &power.writes[i]);
        free(power.writes[i].data);
    }
    power.count = 0;
    return 0;
}

static int faulty_fallocate(int fd, off_t offset, off_t bytes)
{
    return refuse() ? fault.number : posix_fallocate(fd, offset, bytes);
}

static int faulty_open(const char *path, int flags, mode_t mode) { return refuse() ? -1 : open(path, flags, mode); }
static int faulty_fstat(int fd, struct stat *status) { return refuse() ? -1 : fstat(fd, status); }
static int faulty_ftruncate(int fd, off_t bytes) { return refuse() ? -1 : ftruncate(fd, bytes); }

#define pwrite(fd, data, bytes, offset) faulty_pwrite(fd, data, bytes, offset)
#define pread(fd, data, bytes, offset) faulty_pread(fd, data, bytes, offset)
#define fdatasync(fd) faulty_fdatasync(fd)
#define posix_fallocate(fd, offset, bytes) faulty_fallocate(fd, offset, bytes)
#define open(path, flags, mode) faulty_open(path, flags, mode)
#define fstat(fd, status) faulty_fstat(fd, status)
#define ftruncate(fd, bytes) faulty_ftruncate(fd, bytes)
#include "io/store/engine.c"
#undef pwrite
#undef pread
#undef fdatasync
#undef posix_fallocate
#undef open
#undef fstat
#undef ftruncate

/* ---- A run ------------------------------------------------------------------------------------------------------- */

enum { TENSORS = 5, STEPS = 8, ROOM = 3 * 4096 };
static const struct {
    const char *name, *recipe;
    int ndim;
    int64_t rows, row_length;
    int weight_bytes; /* of an element */
} shapes[TENSORS] = {{"a", "adamw/bf16-ecc8/int8", 2, 40, 96, 2},
                     {"b", "adamw/bf16-sr/f32", 1, 33, 1, 2},
                     {"c", "lion/f32/bf16-sr", 2, 12, 100, 4},
                     {"d/weight", "adamw/bf16-ecc8/int8", 2, 8, 128, 2},
                     {"none", "adamw/bf16-sr/f32", 1, 0, 1, 2}};

typedef struct run {
    halfstep_optimizer *optimizer;
    halfstep_store *store;
    _Alignas(64) char weights[TENSORS][ROOM];
    void *places[TENSORS];
} run;

/* Weights after each step of a run in memory. */
static char expected[STEPS + 2][TENSORS][ROOM];

static const void *const *gradients_of(uint64_t step)
{
    static float gradients[TENSORS][ROOM / 4];
    static const void *places[TENSORS];
    uint64_t state = step * UINT64_C(0x9e3779b97f4a7c15) + 1;
    for (int t = 0; t < TENSORS; t++) {
        for (size_t i = 0; i < COUNT(gradients[t]); i++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            gradients[t][i] = (float)(int32_t)(state >> 32) * 0x1p-31f;
        }
        /* Tensors without a gradient leave their other half stale. */
        places[t] = step % 3 == 2 && t == 0 ? NULL : gradients[t];
    }
    return places;
}

/* Makes an optimizer and the weights that it begins with. */
static void make_run(run *r)
{
    const halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 5};
    memset(r, 0, sizeof *r);
    if (halfstep_create(&options, &r->optimizer)) exit(1);
    for (int t = 0; t < TENSORS; t++) {
        halfstep_tensor tensor = {.struct_size = sizeof tensor,
                                  .name = shapes[t].name,
                                  .gradient = "f32",
                                  .ndim = shapes[t].ndim,
                                  .rows = shapes[t].rows,
                                  .row_length = shapes[t].row_length};
        int32_t index;
        r->places[t] = r->weights[t];
        if (halfstep_add_group(r->optimizer, shapes[t].recipe, &tensor.group) ||
            halfstep_set_hyper(r->optimizer, tensor.group, "lr", 0.01) ||
            halfstep_add_tensor(r->optimizer, &tensor, &index)) {
            fprintf(stderr, "%s\n", halfstep_error_detail(r->optimizer));
            exit(1);
        }
        for (int64_t i = 0; i < shapes[t].rows * shapes[t].row_length; i++) {
            const float value = (float)(i % 64) / 64.0f;
            uint32_t bits;
            memcpy(&bits, &value, sizeof bits);
            if (shapes[t].weight_bytes == 4) memcpy(r->weights[t] + 4 * i, &bits, 4);
            else memcpy(r->weights[t] + 2 * i, (char *)&bits + 2, 2);
        }
    }
}

static void end_run(run *r)
{
    halfstep_store_close(r->store);
    halfstep_destroy(r->optimizer);
}

static uint64_t steps_of(const run *r)
{
    halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_GROUP};
    return halfstep_get_record(r->optimizer, &record) ? UINT64_MAX : record.steps;
}

static int step(run *r) { return halfstep_step(r->optimizer, r->places, gradients_of(steps_of(r))); }

/* Returns 1 if the weights are those after so many steps in memory. */
static int is_at(const run *r, uint64_t steps)
{
    return steps < COUNT(expected) && !memcmp(r->weights, expected[steps], sizeof r->weights);
}

static void make_expected(void)
{
    run r;
    make_run(&r);
    if (halfstep_allocate_states(r.optimizer)) exit(1);
    for (int i = 0; i < (int)COUNT(expected); i++) {
        memcpy(expected[i], r.weights, sizeof r.weights);
        if (step(&r)) exit(1);
    }
    halfstep_destroy(r.optimizer);
}

static int create(run *r, const char *path, const halfstep_store_options *options)
{
    make_run(r);
    return halfstep_store_create(path, r->optimizer, r->places, options, &r->store, TEXT);
}

static int open_run(run *r, const char *path)
{
    make_run(r);
    memset(r->weights, 0, sizeof r->weights);
    return halfstep_store_open(path, r->optimizer, r->places, NULL, &r->store, TEXT);
}

static const char *path_of(const char *name) { return path_in(scratch, name); }

static void test_resume(void)
{
    run r;
    const char *path = path_of("resume");
    WORKS(create(&r, path, NULL));
    for (int i = 0; i < STEPS && !test_group_failed; i++) {
        CHECK(is_at(&r, (uint64_t)i), "other weights before step %d", i);
        CHECK(!step(&r), "step %d: %s", i, halfstep_error_detail(r.optimizer));
        if (i % 2) continue;
        end_run(&r);
        WORKS(open_run(&r, path));
        EQUAL(steps_of(&r), (uint64_t)i + 1);
    }
    CHECK(is_at(&r, STEPS), "other weights at the end");
    end_run(&r);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    make_scratch("store");
    make_expected();
    TEST("a run that is closed and opened has the bits of one that goes on") test_resume();
    return test_done();
}
