/* Tests files of states (halfstep_io.h, "States in a file"): resuming, refusals, kills, losses of power, disks that
 * fail. engine.c is compiled into this file, with calls that can fail and that remember what a loss of power would
 * undo. Over 500 lines because kills, losses and failures are judged by one run.
 *
 *   test_store [--short | --all]     50 kills; with --all 150, and more losses of power
 *   test_store KILLS                 nothing but so many kills */
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
#include "io/store/layout.h"
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

/* While `on`: what is durable of one file, and the writes since the last sync. While `checking`: only the places that
 * are written. */
enum { MAX_WRITES = 256 };
static struct {
    int on, checking;
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

/* Remembers a write, page by page, because a loss of power may tear it. */
static void note_write(const void *data, size_t bytes, off_t offset)
{
    pthread_mutex_lock(&power.lock);
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < HSTEP_PAGE ? bytes - at : HSTEP_PAGE;
        char *copy = power.count < MAX_WRITES ? malloc(n) : NULL;
        if (!copy) {
            FAIL("more than %d pages between two syncs", MAX_WRITES);
            break;
        }
        memcpy(copy, (const char *)data + at, n);
        power.writes[power.count++] = (struct unsynced){(uint64_t)offset + at, n, copy};
    }
    pthread_mutex_unlock(&power.lock);
}

static ssize_t faulty_pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    if (refuse()) return -1;
    if (power.on) note_write(data, bytes, offset);
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
    if (!power.on || power.checking) return 0;
    power.before_sync();
    for (int i = 0; i < power.count; i++) {
        memcpy(power.image + power.writes[i].offset, power.writes[i].data, (size_t)power.writes[i].bytes);
        free(power.writes[i].data);
    }
    power.count = 0;
    return 0;
}

static int reservation_says; /* the answer of a file system without reservations; 0: it has them */
static int faulty_fallocate(int fd, off_t offset, off_t bytes)
{
    return refuse() ? fault.number : reservation_says ? reservation_says : posix_fallocate(fd, offset, bytes);
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

static halfstep_options made_with; /* `run` and `host` of the next run */

/* Makes an optimizer and the weights that it begins with. */
static void make_run(run *r)
{
    const halfstep_options options = {
        .struct_size = sizeof options, .threads = 1, .seed = 5, .run = made_with.run, .host = made_with.host};
    memset(r, 0, sizeof *r);
    if (halfstep_create(&options, &r->optimizer)) exit(1);
    for (int t = 0; t < TENSORS; t++) {
        halfstep_tensor tensor = {.struct_size = sizeof tensor,
                                  .name = shapes[t].name,
                                  .gradient = "f32",
                                  .ndim = shapes[t].ndim,
                                  .may_be_empty = 1,
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

static void test_resume(const char *path, const halfstep_store_options *options)
{
    run r;
    WORKS(create(&r, path, options));
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

/* Makes a file of so many steps. */
static void make_file(const char *path, int steps, const halfstep_store_options *options)
{
    run r;
    WORKS(create(&r, path, options));
    for (int i = 0; i < steps; i++) CHECK(!step(&r), "step %d: %s", i, halfstep_error_detail(r.optimizer));
    end_run(&r);
}

/* Opens a file, checks that it is at one of two steps, and goes on. Returns the step, or UINT64_MAX. */
static uint64_t go_on(const char *path, uint64_t first, uint64_t second)
{
    run r;
    uint64_t found = UINT64_MAX;
    if (open_run(&r, path)) {
        FAIL("%s", message);
    } else {
        found = steps_of(&r);
        CHECK(found == first || found == second, "step %llu; expected %llu or %llu", ull(found), ull(first),
              ull(second));
        CHECK(is_at(&r, found), "other weights than after step %llu", ull(found));
        CHECK(!step(&r), "%s", halfstep_error_detail(r.optimizer));
        CHECK(is_at(&r, found + 1), "other states than after step %llu", ull(found));
    }
    end_run(&r);
    return found;
}

/* ---- Refusals ---------------------------------------------------------------------------------------------------- */

/* Makes a run with a difference, and tries to open the file with it. */
static int open_other(const char *path, int difference)
{
    run r;
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = difference == 1 ? 6 : 5};
    if (halfstep_create(&options, &r.optimizer)) exit(1);
    r.store = NULL;
    for (int i = 0; i < TENSORS + (difference == 7); i++) {
        const int t = difference == 3 && i < 2 ? 1 - i : i;
        halfstep_tensor tensor = {
            .struct_size = sizeof tensor, .name = "more", .gradient = "f32", .rows = 4, .ndim = 1, .may_be_empty = 1};
        int32_t index;
        if (t < TENSORS) {
            tensor.name = difference == 4 && t == 2 ? "another" : shapes[t].name;
            tensor.ndim = shapes[t].ndim;
            tensor.rows = shapes[t].rows + (difference == 5 && t == 2);
            tensor.row_length = shapes[t].row_length;
        }
        if (halfstep_add_group(r.optimizer, difference == 6 && t == 2 ? "lion/f32/f32" : shapes[t % TENSORS].recipe,
                               &tensor.group) ||
            halfstep_add_tensor(r.optimizer, &tensor, &index))
            exit(1);
    }
    if (difference == 2) halfstep_set_choice(r.optimizer, ALL_GROUPS, "generator", "mixer");
    const int code = halfstep_store_open(path, r.optimizer, NULL, NULL, &r.store, TEXT);
    end_run(&r);
    return code;
}

static void change_byte(const char *path, uint64_t offset)
{
    int fd = open(path, O_RDWR);
    char byte = 0;
    if (fd < 0 || pread(fd, &byte, 1, (off_t)offset) != 1) FAIL("%s: %s", path, strerror(errno));
    byte ^= 0x20;
    if (pwrite(fd, &byte, 1, (off_t)offset) != 1) FAIL("%s: %s", path, strerror(errno));
    close(fd);
}

/* Reads where the parts of a file are, and its record. */
static hstep_layout layout_of(const char *path, hstep_commit *record)
{
    hstep_error error = hstep_make_error(TEXT);
    hstep_layout layout;
    hstep_file *file;
    char *json = NULL;
    uint64_t bytes;
    if (hstep_open_file(&file, path, &bytes, &error) || hstep_read_header(file, bytes, &layout, &json, &error) ||
        hstep_read_commit(file, &layout, record, NULL, &error)) {
        printf("%s\n", message);
        exit(1);
    }
    free(json);
    hstep_close(file);
    return layout;
}

static void test_refusals(void)
{
    run r, other;
    hstep_commit record;
    const char *path = path_of("file");
    make_file(path, 3, NULL);
    FAILS(open_other(path, 1), MISMATCH, "seed is 6 here but 5 in");
    FAILS(open_other(path, 2), MISMATCH, "generator is mixer here but lattice in");
    FAILS(open_other(path, 3), MISMATCH, "name is b here but a in the file");
    FAILS(open_other(path, 4), MISMATCH, "name is another here but c in the file");
    FAILS(open_other(path, 5), MISMATCH, "tensor \"c\": shape is 13 here but 12 in the file");
    FAILS(open_other(path, 6), MISMATCH, "tensor \"c\": recipe is lion/f32/f32 here but lion/f32/bf16-sr");
    FAILS(open_other(path, 7), MISMATCH, "tensors is longer here but shorter in the file");
    WORKS(open_other(path, 0));
    FAILS(create(&r, path, NULL), IO, "exists already");
    end_run(&r);
    if (symlink("nowhere", path_of("dangling"))) FAIL("no link");
    FAILS(create(&r, path_of("dangling"), NULL), IO, "dangling: it is a link to nowhere, which does not exist");
    end_run(&r);
    /* Without reservations the file has its length all the same. */
    static const int answers[] = {EOPNOTSUPP, ENOSYS};
    for (size_t i = 0; i < COUNT(answers); i++) {
        const char *sparse = path_of(i ? "sparse1" : "sparse0");
        reservation_says = answers[i];
        make_file(sparse, 3, NULL);
        reservation_says = 0;
        WORKS(open_run(&r, sparse));
        CHECK(!step(&r), "a step in a file without a reservation");
        end_run(&r);
    }
    WORKS(open_run(&r, path));
    FAILS(open_run(&other, path), IO, "in use, by another process");
    end_run(&other);
    CHECK(!step(&r), "a step after the refusals");
    end_run(&r);

    /* The record of step 4 is generation 5. Without it, that of step 3 counts. */
    const hstep_layout layout = layout_of(path, &record);
    EQUAL(record.generation, (uint64_t)5);
    hstep_free_commit(&record);
    change_byte(path, hstep_slot_begin(&layout, 5) + 40);
    EQUAL(go_on(path, 3, 3), (uint64_t)3);
    SAYS("note: one of the two records of");
    layout_of(path, &record);
    const int half = record.halves[0];
    hstep_free_commit(&record);
    /* Now step 4 was made again. A step that is under way writes over what step 3 needs. */
    change_byte(path, hstep_slot_begin(&layout, 5) + 10);
    change_byte(path, hstep_half_begin(&layout, !half));
    FAILS(open_run(&r, path), FORMAT, "the states of the other are not whole any more");
    end_run(&r);
    change_byte(path, hstep_slot_begin(&layout, 4) + 10);
    FAILS(open_run(&r, path), FORMAT, "both of its records are damaged");
    end_run(&r);
    change_byte(path, 200);
    FAILS(open_run(&r, path), FORMAT, "its header is damaged");
    end_run(&r);
    change_byte(path, 3);
    FAILS(open_run(&r, path), FORMAT, "is not a file of states");
    end_run(&r);
    make_file(path_of("short"), 1, NULL);
    CHECK(!truncate(path_of("short"), (off_t)hstep_layout_bytes(&layout) - 4096), "truncate");
    FAILS(open_run(&r, path_of("short")), FORMAT, "it was cut short");
    end_run(&r);
    FAILS(open_run(&r, path_of("missing")), IO, "No such file");
    end_run(&r);
    FAILS(open_run(&r, scratch), IO, "director");
    end_run(&r);
    FAILS(create(&r, path_of("no/folder"), NULL), IO, "cannot create");
    end_run(&r);
}

static void test_options(void)
{
    run r;
    SIZED(halfstep_store_options, options);
    make_run(&r);
    options.reserved = 1;
    FAILS(halfstep_store_create("x", r.optimizer, r.places, &options, &r.store, TEXT), ARGUMENT, "reserved 0");
    options = (halfstep_store_options){.struct_size = sizeof options, .memory = 1};
    FAILS(halfstep_store_create(path_of("x"), r.optimizer, r.places, &options, &r.store, TEXT), RANGE, "memory");
    options = (halfstep_store_options){.struct_size = 3};
    FAILS(halfstep_store_create("x", r.optimizer, r.places, &options, &r.store, TEXT), ARGUMENT, "struct_size");
    EQUAL(count_entries(scratch, "x"), 0);
    end_run(&r);
}

static void test_forecast(void)
{
    static const halfstep_store_options options[] = {
        {.struct_size = sizeof *options},
        {.struct_size = sizeof *options, .without_weights = 1},
        {.struct_size = sizeof *options, .piece_bytes = 2000},
    };
    for (size_t i = 0; i < COUNT(options); i++) {
        run r;
        hstep_file *file = NULL;
        hstep_layout layout = {0};
        hstep_error error = hstep_make_error(TEXT);
        char *json = NULL;
        uint64_t bytes = 0;
        halfstep_forecast f = {.struct_size = sizeof f,
                               .without_weights = options[i].without_weights,
                               .piece_bytes = options[i].piece_bytes};
        const char *path = path_of("forecast");
        WORKS(create(&r, path, &options[i]));
        for (int t = 0; t < TENSORS; t++) {
            SIZED(halfstep_tensor, tensor);
            halfstep_get_tensor(r.optimizer, t, &tensor);
            EQUAL(halfstep_forecast_tensors(&f, shapes[t].recipe, &tensor, 1), HALFSTEP_OK);
        }
        EQUAL(hstep_open_file(&file, path, &bytes, &error), HALFSTEP_OK);
        EQUAL(hstep_read_header(file, bytes, &layout, &json, &error), HALFSTEP_OK);
        CHECK(f.pieces == layout.pieces && f.stored == layout.half_bytes,
              "%d: %llu pieces of %llu bytes, not %llu of %llu", (int)i, ull(layout.pieces), ull(layout.half_bytes),
              ull(f.pieces), ull(f.stored));
        hstep_close(file);
        free(json);
        end_run(&r);
        unlink(path);
    }
}

/* ---- Values, weights elsewhere, other handles -------------------------------------------------------------------- */

static void test_values(void)
{
    run r;
    SIZED(halfstep_store_info, info);
    const char *path = path_of("values"), *odd = "{\"a\": \"\\ \n\xc3\xa9\"}";
    WORKS(create(&r, path, NULL));
    WORKS(halfstep_store_set_value(r.store, "position", "17", TEXT));
    WORKS(halfstep_store_set_value(r.store, "position", odd, TEXT));
    WORKS(halfstep_store_set_value(r.store, "gone", "x", TEXT));
    WORKS(halfstep_store_set_value(r.store, "gone", NULL, TEXT));
    FAILS(halfstep_store_set_value(r.store, "bad", "\xff", TEXT), NAME, "UTF-8");
    char *large = malloc(HSTEP_VALUES + 1);
    memset(large, 1, HSTEP_VALUES);
    large[HSTEP_VALUES] = 0;
    FAILS(halfstep_store_set_value(r.store, "l", large, TEXT), RANGE, "262144 bytes in all");
    /* The longest there may be, of characters that JSON writes with six. */
    large[HSTEP_VALUES - 1 - strlen("position") - strlen(odd)] = 0;
    WORKS(halfstep_store_set_value(r.store, "l", large, TEXT));
    CHECK(!step(&r), "%s", halfstep_error_detail(r.optimizer));
    WORKS(halfstep_store_set_value(r.store, "position", "lost", TEXT));
    end_run(&r);
    WORKS(open_run(&r, path));
    EQUAL_TEXT(halfstep_store_value(r.store, "position"), odd);
    EQUAL_TEXT(halfstep_store_value(r.store, "l"), large);
    CHECK(!halfstep_store_value(r.store, "gone"), "a value that is not there");
    WORKS(halfstep_store_get_info(path, &info, TEXT));
    CHECK(info.has_weights && info.generation == 2 && info.steps == 1 && info.pieces == TENSORS, "wrong info");
    CHECK(strstr(info.header, "\"d/weight\"") && strstr(info.commit, "counters.d/weight"), "wrong texts");
    halfstep_store_free_info(&info);
    /* Without a step. */
    WORKS(halfstep_store_set_value(r.store, "l", NULL, TEXT));
    CHECK(!halfstep_flush(r.optimizer, r.places), "flush");
    end_run(&r);
    WORKS(open_run(&r, path));
    CHECK(!halfstep_store_value(r.store, "l") && steps_of(&r) == 1, "the flush");
    end_run(&r);
    free(large);
}

static void test_without_weights(void)
{
    run r;
    SIZED(halfstep_store_info, info);
    const halfstep_store_options options = {.struct_size = sizeof options, .without_weights = 1};
    const char *path = path_of("hashes");
    make_file(path, 3, &options);
    FAILS(open_run(&r, path), MISMATCH, "the weight of tensor \"a\" is not that of its last step");
    memcpy(r.weights, expected[3], sizeof r.weights);
    r.weights[3][100] ^= 1;
    FAILS(halfstep_store_open(path, r.optimizer, r.places, NULL, &r.store, TEXT), MISMATCH, "\"d/weight\"");
    memcpy(r.weights, expected[3], sizeof r.weights);
    WORKS(halfstep_store_open(path, r.optimizer, r.places, NULL, &r.store, TEXT));
    CHECK(!step(&r) && is_at(&r, 4), "other states");
    end_run(&r);
    /* After a micro-step, whose call has no weights, weights are not known. */
    make_run(&r);
    WORKS(halfstep_store_open(path, r.optimizer, NULL, NULL, &r.store, TEXT));
    CHECK(!accumulate_states(r.optimizer, gradients_of(4)), "%s", halfstep_error_detail(r.optimizer));
    end_run(&r);
    make_run(&r);
    WORKS(halfstep_store_open(path, r.optimizer, r.places, NULL, &r.store, TEXT));
    end_run(&r);
    WORKS(halfstep_store_get_info(path, &info, TEXT));
    CHECK(!info.has_weights && info.steps == 4, "wrong info");
    halfstep_store_free_info(&info);
}

static void copy_records(halfstep_optimizer *to, const halfstep_optimizer *from)
{
    for (int32_t i = 0; i < TENSORS; i++)
        for (int32_t kind = HALFSTEP_RECORD_GROUP; kind <= HALFSTEP_RECORD_TENSOR; kind++) {
            halfstep_record record = {.struct_size = sizeof record, .kind = kind, .index = i};
            CHECK(!halfstep_get_record(from, &record) && !halfstep_set_record(to, &record), "record %d", i);
        }
}

static void test_bind(void)
{
    run r, next;
    WORKS(create(&r, path_of("bind"), NULL));
    CHECK(!step(&r) && !step(&r), "steps");
    make_run(&next);
    WORKS(halfstep_store_bind(r.store, next.optimizer, TEXT));
    copy_records(next.optimizer, r.optimizer);
    memcpy(next.weights, r.weights, sizeof r.weights);
    halfstep_destroy(r.optimizer);
    r.optimizer = NULL;
    CHECK(!step(&next) && is_at(&next, 3), "other states: %s", halfstep_error_detail(next.optimizer));
    halfstep_optimizer *empty;
    CHECK(!halfstep_create(NULL, &empty), "create");
    FAILS(halfstep_store_bind(r.store, empty, TEXT), MISMATCH, "another optimizer");
    halfstep_destroy(empty);
    halfstep_store_close(r.store);
    halfstep_destroy(next.optimizer);
    go_on(path_of("bind"), 3, 3);
}

/* Saves a run in memory and one in a file, compares, and loads each into the other. */
static void test_safetensors(void)
{
    run r, memory;
    const char *path = path_of("states"), *first = path_of("a.safetensors"), *second = path_of("b.safetensors");
    char command[1400];
    WORKS(create(&r, path, NULL));
    make_run(&memory);
    CHECK(!halfstep_allocate_states(memory.optimizer), "states");
    for (int i = 0; i < 3; i++) CHECK(!step(&r) && !step(&memory), "steps");
    WORKS(halfstep_write_optimizer(first, r.optimizer, r.places, NULL, TEXT));
    WORKS(halfstep_write_optimizer(second, memory.optimizer, memory.places, NULL, TEXT));
    snprintf(command, sizeof command, "cmp '%s' '%s'", first, second);
    CHECK(!system(command), "the files differ");
    CHECK(!step(&r) && !step(&r) && is_at(&r, 5), "steps");
    WORKS(halfstep_read_optimizer(second, r.optimizer, r.places, NULL, TEXT));
    CHECK(is_at(&r, 3), "weights that were loaded");
    end_run(&r);
    halfstep_destroy(memory.optimizer);
    go_on(path, 3, 3);
}

/* ---- Disks that fail --------------------------------------------------------------------------------------------- */

/* Makes a file, steps, opens it again and steps. Every call that fails has one sentence, and the last whole step is
 * there. Returns the number of calls that could fail. */
static long live_with(const char *path, long at, int number)
{
    run r;
    uint64_t whole = 0;
    int code = 0;
    unlink(path);
    fault.at = at;
    fault.number = number;
    atomic_store(&fault.calls, 0);
    code = create(&r, path, NULL);
    for (int i = 0; i < 5; i++) {
        if (code) break;
        if (i == 3) {
            end_run(&r);
            code = open_run(&r, path);
            continue;
        }
        code = step(&r);
        whole = steps_of(&r);
        if (!code) continue;
        snprintf(message, sizeof message, "%s", halfstep_error_detail(r.optimizer));
        CHECK(step(&r) == ORDER, "call %ld, %s: a step after a failure", at, strerror(number));
    }
    end_run(&r);
    const long calls = atomic_load(&fault.calls);
    fault.at = 0;
    if (code) {
        CHECK((code == IO || code == MEMORY) && strlen(message) > 20 && !strchr(message, '\n') &&
                  strstr(message, strerror(number)),
              "call %ld, %s: code %d, \"%s\"", at, strerror(number), code, message);
        if (access(path, F_OK)) {
            CHECK(whole == 0, "call %ld, %s: no file after step %llu", at, strerror(number), ull(whole));
            struct stat left;
            CHECK(stat(path_of("fault.new"), &left) || !left.st_size, "call %ld: a file is left", at);
            return calls;
        }
    }
    if (go_on(path, whole, whole + 1) == UINT64_MAX) FAIL("call %ld, %s", at, strerror(number));
    return calls;
}

static void test_errors(void)
{
    static const int numbers[] = {EIO, ENOSPC, EINTR, EINVAL};
    const char *path = path_of("fault");
    const long calls = live_with(path, 0, 0);
    CHECK(calls > 40, "only %ld calls can fail", calls);
    for (long at = 1; at <= calls && !test_group_failed; at++)
        for (size_t i = 0; i < COUNT(numbers); i++) live_with(path, at, numbers[i]);
}

static void test_bad_page(void)
{
    run r;
    hstep_commit record;
    const char *path = path_of("page");
    make_file(path, 3, NULL);
    const hstep_layout layout = layout_of(path, &record);
    WORKS(open_run(&r, path));
    CHECK(is_at(&r, 3), "other weights");
    fault.bad_page = hstep_half_begin(&layout, record.halves[0]);
    hstep_free_commit(&record);
    EQUAL(step(&r), IO);
    snprintf(message, sizeof message, "%s", halfstep_error_detail(r.optimizer));
    SAYS("cannot read");
    SAYS("page: Input/output error");
    EQUAL(step(&r), ORDER);
    end_run(&r);
    FAILS(open_run(&r, path), IO, "page: Input/output error");
    end_run(&r);
    fault.bad_page = UINT64_MAX;
    go_on(path, 3, 3);
}

/* Changes a byte of each piece in turn: in its states, then in its weight, which is in a page that a step reads. The
 * next step fails, and so does opening. */
static void test_changed_bytes(void)
{
    run r;
    hstep_commit record;
    const halfstep_store_options options = {.struct_size = sizeof options, .piece_bytes = 2000};
    const char *path = path_of("changed");
    uint64_t begin = 0;
    int refused = 0;
    make_file(path, 3, &options);
    const hstep_layout layout = layout_of(path, &record);
    for (uint64_t i = 0; i < layout.pieces && !test_group_failed; i++) {
        SIZED(halfstep_piece, piece);
        WORKS(open_run(&r, path));
        EQUAL(halfstep_get_piece(r.optimizer, (int64_t)i, &piece), OK);
        end_run(&r);
        const uint64_t at = hstep_half_begin(&layout, record.halves[i]) + begin,
                       places[] = {at + piece.state_bytes / 2, at + piece.state_bytes};
        begin += hstep_whole_pages(piece.state_bytes + piece.weight_bytes);
        for (int k = 0; k < 2 && piece.state_bytes; k++) {
            WORKS(open_run(&r, path));
            change_byte(path, places[k]);
            EQUAL(step(&r), FORMAT);
            snprintf(message, sizeof message, "%s", halfstep_error_detail(r.optimizer));
            SAYS("have another sum");
            EQUAL(step(&r), ORDER);
            end_run(&r);
            FAILS(open_run(&r, path), FORMAT, "have another sum");
            end_run(&r);
            change_byte(path, places[k]);
            refused++;
        }
    }
    hstep_free_commit(&record);
    CHECK(refused > 2 * TENSORS, "only %d places", refused);
    go_on(path, 3, 3);
}

static void unlink_and_run(void *path, halfstep_task task, void *argument, int64_t n)
{
    unlink(path);
    for (int64_t i = 0; i < n; i++) task(argument, i);
}

/* The file is cut or deleted between two steps, or within one. */
static void test_lost_file(void)
{
    run r;
    char bytes[4];
    const char *path = path_of("lost");
    for (int way = 0; way < 3; way++) {
        unlink(path);
        if (way == 2) made_with = (halfstep_options){.run = unlink_and_run, .host = (void *)(uintptr_t)path};
        WORKS(create(&r, path, NULL));
        made_with = (halfstep_options){0};
        if (way < 2) CHECK(!step(&r), "%s", halfstep_error_detail(r.optimizer));
        if (way == 0) CHECK(!truncate(path, 4096), "truncate");
        if (way == 1) unlink(path);
        for (int i = 0; i < 2 && way < 2; i++) {
            EQUAL(i ? halfstep_flush(r.optimizer, NULL) : step(&r), ORDER);
            snprintf(message, sizeof message, "%s", halfstep_error_detail(r.optimizer));
            SAYS(way ? "lost was deleted while it was in use" : "lost has 4096 bytes instead of");
            SAYS("this call has changed nothing");
            CHECK(is_at(&r, 1) && steps_of(&r) == 1, "other weights or counters");
        }
        if (way == 1) EQUAL(halfstep_read_bytes(r.optimizer, 0, HALFSTEP_SLOT_STATE, 0, 0, sizeof bytes, bytes), OK);
        if (way == 2) {
            EQUAL(step(&r), ORDER);
            snprintf(message, sizeof message, "%s", halfstep_error_detail(r.optimizer));
            SAYS("the weights are those after the step");
            CHECK(is_at(&r, 1) && steps_of(&r) == 0, "other weights or counters");
        }
        end_run(&r);
    }
}

/* ---- Losses of power --------------------------------------------------------------------------------------------- */

static uint64_t random_state = 1, losses, newer;

static uint32_t next_random(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(random_state >> 33);
}

/* The file that a loss of power leaves, which holds power.image between checks, and its last whole step. */
static struct {
    int fd;
    char path[600];
    uint64_t step;
} after;

/* Loses the pages that `lost` marks, opens what is left, and restores the file. */
static void lose(const unsigned char lost[MAX_WRITES])
{
    for (int i = 0; i < power.count; i++)
        if (!lost[i] &&
            pwrite(after.fd, power.writes[i].data, (size_t)power.writes[i].bytes, (off_t)power.writes[i].offset) < 0)
            FAIL("%s", strerror(errno));
    const int pages = power.count;
    power.checking = 1;
    const uint64_t step = go_on(after.path, after.step, after.step + 1);
    power.checking = 0;
    losses++;
    newer += step == after.step + 1;
    for (int i = 0; i < power.count; i++) {
        const struct unsynced *w = &power.writes[i];
        if (pwrite(after.fd, power.image + w->offset, (size_t)w->bytes, (off_t)w->offset) < 0)
            FAIL("%s", strerror(errno));
        if (i >= pages) free(w->data);
    }
    power.count = pages;
}

/* Loses every single page, every page but one, all, none, and random ones. */
static void lose_power(void)
{
    unsigned char lost[MAX_WRITES];
    const int pages = power.count;
    for (int i = 0; i < pages && !test_group_failed; i++)
        for (int others = 0; others < 2; others++) {
            memset(lost, others, sizeof lost);
            lost[i] = (unsigned char)!others;
            lose(lost);
        }
    for (int k = 0; k < BY_LENGTH(3, 8, 60) + 2 && !test_group_failed; k++) {
        for (int i = 0; i < pages; i++) lost[i] = k == 0 ? 1 : k == 1 ? 0 : next_random() & 1;
        lose(lost);
    }
}

static void test_power(void)
{
    run r;
    const char *path = path_of("power");
    WORKS(create(&r, path, NULL));
    struct stat status;
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && !fstat(fd, &status), "%s: %s", path, strerror(errno));
    power.bytes = (uint64_t)status.st_size;
    power.image = malloc(power.bytes);
    snprintf(after.path, sizeof after.path, "%s/after", scratch);
    after.fd = open(after.path, O_RDWR | O_CREAT, 0666);
    if (test_group_failed || pread(fd, power.image, power.bytes, 0) != (ssize_t)power.bytes ||
        pwrite(after.fd, power.image, power.bytes, 0) != (ssize_t)power.bytes) {
        FAIL("the image of the file: %s", strerror(errno));
        return;
    }
    close(fd);
    power.before_sync = lose_power;
    power.on = 1;
    for (after.step = 0; after.step < BY_LENGTH(2, 4, STEPS) && !test_group_failed; after.step++) {
        CHECK(!step(&r), "%s", halfstep_error_detail(r.optimizer));
        /* What is durable now is what the next losses begin with. */
        if (pwrite(after.fd, power.image, power.bytes, 0) < 0) FAIL("%s", strerror(errno));
    }
    power.on = 0;
    printf("     %llu losses, %llu of them after the new step was whole\n", ull(losses), ull(newer));
    CHECK(newer > 1 && newer < losses / 2, "losses hit too few moments");
    close(after.fd);
    free(power.image);
    end_run(&r);
}

/* ---- Kills ------------------------------------------------------------------------------------------------------- */

/* Memory shared by child and parent, which outlives the child. */
typedef struct report {
    _Atomic uint64_t whole, failed;
} report;

static void step_forever(const char *path, report *shared)
{
    run r;
    if (open_run(&r, path)) {
        fprintf(stderr, "%s\n", message);
        shared->failed = 1;
        _exit(1);
    }
    while (!step(&r)) shared->whole = steps_of(&r);
    fprintf(stderr, "%s\n", halfstep_error_detail(r.optimizer));
    shared->failed = 1;
    _exit(1);
}

static void test_kills(int kills)
{
    const char *path = path_of("kills");
    report *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    run r, reference;
    uint64_t whole = 0, steps = 0;
    int late = 0;
    make_run(&reference);
    if (shared == MAP_FAILED || halfstep_allocate_states(reference.optimizer)) exit(1);
    make_file(path, 0, NULL);
    for (int i = 0; i < kills && !test_group_failed; i++) {
        shared->whole = whole;
        pid_t child = fork();
        if (!child) step_forever(path, shared);
        /* Within some steps after the first one, wherever that is. */
        for (int spent = 0; !shared->failed && shared->whole == whole && spent < 10000; spent++)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        nanosleep(&(struct timespec){0, (long)(next_random() % 8000000)}, NULL);
        kill(child, SIGKILL);
        CHECK(WIFSIGNALED(test_child_status(child)) && !shared->failed, "kill %d: the child ended by itself", i);
        WORKS(open_run(&r, path));
        const uint64_t found = steps_of(&r);
        CHECK(found == shared->whole || found == shared->whole + 1, "kill %d: step %llu, but %llu was whole", i,
              ull(found), ull(shared->whole));
        late += found == shared->whole + 1;
        while (steps < found && !step(&reference)) steps++;
        CHECK(!memcmp(r.weights, reference.weights, sizeof r.weights), "kill %d: other weights than after step %llu", i,
              ull(found));
        CHECK(!step(&r) && !step(&reference) && !memcmp(r.weights, reference.weights, sizeof r.weights),
              "kill %d: other states than after step %llu", i, ull(found));
        whole = ++steps;
        end_run(&r);
    }
    CHECK(steps > 2 * (uint64_t)kills, "only %llu steps for %d kills", ull(steps), kills);
    printf("     %d kills in %llu steps, %d of them behind the record\n", kills, ull(steps), late);
    halfstep_destroy(reference.optimizer);
    munmap(shared, sizeof *shared);
}

/* A child of the process that opened a file can neither step nor spoil it. */
static void test_fork(void)
{
    run r;
    const char *path = path_of("fork");
    WORKS(create(&r, path, NULL));
    CHECK(!step(&r), "a step");
    pid_t child = fork();
    if (!child) {
        const int code = step(&r);
        const int says = strstr(halfstep_error_detail(r.optimizer), "belongs to the process that opened it") != NULL;
        halfstep_store_close(r.store);
        test_leave(code == ORDER && says ? 0 : 1);
    }
    EQUAL(test_child_status(child), 0);
    CHECK(!step(&r) && is_at(&r, 2), "a step beside the child");
    run other;
    FAILS(open_run(&other, path), IO, "in use");
    end_run(&other);
    end_run(&r);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    const int kills = atoi(test_filter);
    if (kills) test_filter = "kills";
    make_scratch("store");
    make_expected();
    TEST("a run that is closed and opened has the bits of one that goes on") {
        SIZED(halfstep_store_info, info);
        test_resume(path_of("resume"), NULL);
        test_resume(path_of("cut"), &(halfstep_store_options){.struct_size = sizeof(halfstep_store_options),
                                                              .piece_bytes = 2000,
                                                              .buffered = 1});
        WORKS(halfstep_store_get_info(path_of("cut"), &info, TEXT));
        CHECK(info.pieces > TENSORS + 4, "only %llu pieces", ull(info.pieces));
        halfstep_store_free_info(&info);
    }
    TEST("what is of another optimizer, damaged or in use is refused") test_refusals();
    TEST("options that a store cannot have") test_options();
    TEST("a forecast has the bytes of a file") test_forecast();
    TEST("values, and a description without an optimizer") test_values();
    TEST("weights elsewhere are known by their hash") test_without_weights();
    TEST("an open file moves to another handle") test_bind();
    TEST("to safetensors and back") test_safetensors();
    TEST("every call fails once") test_errors();
    TEST("an unreadable page is one clear error") test_bad_page();
    TEST("bytes that have changed are noticed") test_changed_bytes();
    TEST("a file that is cut or deleted") test_lost_file();
    TEST("a loss of power leaves a whole step") test_power();
    TEST_UNLESS_EMULATED("the child of a fork") test_fork();
    TEST_UNLESS_EMULATED("kills") test_kills(kills ? kills : BY_LENGTH(10, 50, 150));
    return test_done();
}
