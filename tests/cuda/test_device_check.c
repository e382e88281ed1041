/* Tests the check of a GPU before its first use (src/handle/devices/device_check.c, src/device/cuda/trust.c), through
 * the fake driver. Each group runs in a child process, because a process checks a GPU once. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include <dirent.h>
#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"
#include "test.h"

#include "device/cuda/code/kernels.h"
#include "cuda/fake/fake_cuda.h"
#include "handle/optimizer.h"

static struct fake_cuda_control *fake;
static char cache[256];

enum { LIMIT = 16 << 20 };

/* ---- What a child does ---- */

static int create(halfstep_optimizer **o)
{
    const halfstep_options options = {.struct_size = sizeof options, .threads = 1, .device = "cuda"};
    return halfstep_create(&options, o);
}

/* Adds a tensor whose recipe has a fused kernel, and allocates its states. */
static int settle(halfstep_optimizer *o, const char *recipe)
{
    const halfstep_tensor t = {
        .struct_size = sizeof t, .name = "w", .ndim = 2, .rows = 64, .row_length = 256, .gradient = "bf16"};
    int32_t group, index;
    int error = halfstep_add_group(o, recipe, &group);
    if (!error) error = halfstep_add_tensor(o, &t, &index);
    return error ? error : halfstep_allocate_states(o);
}

/* Creates a handle and allocates the states of one tensor, and returns the first error. *launches is the number of
 * launches that this took. */
static int use(const char *recipe, long *launches)
{
    halfstep_optimizer *o;
    const long before = fake->launches;
    int error = create(&o);
    if (!error) {
        error = settle(o, recipe);
        halfstep_destroy(o);
    }
    if (launches) *launches = fake->launches - before;
    return error;
}

/* Runs `body` in a child with variables of its own, and counts its failures as this process's. */
static void in_child(void (*body)(void))
{
    fflush(stdout);
    int status = 1;
    const pid_t child = fork();
    if (!child) {
        body();
        fflush(stdout);
        test_leave(test_group_failed > 0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status),
          "the child failed, status %d", status);
}

/* ---- The file ---- */

/* Writes the path of the only file of the cache to `path`. Returns how many there are. */
static int find_file(char *path, size_t size)
{
    char folder[300];
    int n = 0;
    snprintf(folder, sizeof folder, "%s/halfstep", cache);
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.') n++, snprintf(path, size, "%s/%.200s", folder, e->d_name);
    if (d) closedir(d);
    return n;
}

static int file_has(const char *kernel)
{
    char path[600], text[4096] = "\n", line[128];
    FILE *file = find_file(path, sizeof path) == 1 ? fopen(path, "r") : NULL;
    if (!file) return 0;
    text[1 + fread(text + 1, 1, sizeof text - 2, file)] = 0;
    fclose(file);
    snprintf(line, sizeof line, "\n%s\n", kernel);
    return strstr(text, line) != NULL;
}

static void forget(void)
{
    char path[600];
    while (find_file(path, sizeof path)) remove(path);
}

/* ---- Children ---- */

static void first_use(void)
{
    long launches;
    CHECK(!use("adamw/bf16-sr/int8", &launches), "%s", halfstep_error_detail(NULL));
    CHECK(launches > 100, "only %ld launches", launches);
    CHECK(file_has("general") && file_has("fused_adamw_int8_int8") && !file_has("fused_lion_int8_int8"),
          "the file lacks a kernel that was checked, or has another");
    CHECK(!fake->live, "%ld blocks are left", fake->live);
    CHECK(fake->most_bytes <= LIMIT, "the check takes %ld bytes", fake->most_bytes);
    CHECK(!use("adamw/bf16-sr/int8", &launches) && launches < 10, "it is checked twice in one process");
    CHECK(!fake->offence, "%s", fake->offence);
}

static void later_use(void)
{
    long launches;
    CHECK(!use("adamw/bf16-sr/int8", &launches) && launches < 10, "%ld launches in a later process", launches);
    CHECK(!use("lion/bf16-sr/int8", &launches) && launches > 10, "another kernel was not checked");
    CHECK(file_has("fused_adamw_int8_int8") && file_has("fused_lion_int8_int8"), "a kernel was forgotten");
}

static void checked_again(void)
{
    long launches;
    CHECK(!use("adamw/bf16-sr/int8", &launches) && launches > 100, "%ld launches", launches);
}

static void always(void)
{
    setenv("HALFSTEP_DEVICE_CHECK", "always", 1);
    checked_again();
}

static void another_driver(void)
{
    fake->driver = 12090;
    checked_again();
    char path[600];
    CHECK(find_file(path, sizeof path) == 2, "both drivers share a file");
}

static void no_folder(void)
{
    char path[600];
    snprintf(path, sizeof path, "%s/file", getenv("HALFSTEP_CUDA_IMAGE")); /* the image is no folder */
    setenv("XDG_CACHE_HOME", path, 1);
    checked_again();
}

static void unknown_folder(void)
{
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    checked_again();
}

static void never(void)
{
    long launches;
    setenv("HALFSTEP_DEVICE_CHECK", "never", 1);
    CHECK(!use("adamw/bf16-sr/int8", &launches) && launches < 10, "%ld launches", launches);
}

static void unknown_word(void)
{
    setenv("HALFSTEP_DEVICE_CHECK", "maybe", 1);
    const int error = use("adamw/bf16-sr/int8", NULL);
    CHECK(error == HALFSTEP_ERROR_NAME && strstr(halfstep_error_detail(NULL), "known: always, once, never"), "%d %s",
          error, halfstep_error_detail(NULL));
}

/* Each kernel in turn does nothing, and then the update of a fused kernel's check. The fake updates whole tiles in the
 * kernel `update` too. */
static void wrong_kernels(void)
{
    halfstep_optimizer *o;
    for (int k = 0; k < HSTEP_CUDA_FUSED; k++) {
        if (k == HSTEP_CUDA_zero) continue; /* no step has it */
        fake->lose = k + 1;
        const int error = create(&o);
        const char *text = halfstep_error_detail(NULL);
        CHECK(error == HALFSTEP_ERROR_DEVICE && strstr(text, "wrong bits") && strstr(text, "halfstep verify"),
              "kernel %d does nothing: %d %s", k, error, text);
        if (!error) return halfstep_destroy(o);
    }
    CHECK(!file_has("general") && !fake->live, "a GPU with wrong bits is trusted, or memory is left");
    fake->lose = 0;
    if (create(&o)) return test_fail(__FILE__, __LINE__, "%s", halfstep_error_detail(NULL));
    fake->lose = HSTEP_CUDA_update + 1;
    const int error = settle(o, "lion/bf16-sr/int8");
    CHECK(error == HALFSTEP_ERROR_DEVICE && strstr(halfstep_error_detail(o), "wrong bits"), "%d %s", error,
          halfstep_error_detail(o));
    halfstep_destroy(o);
    CHECK(file_has("general") && !file_has("fused_lion_int8_int8"), "the file does not tell what was right");
}

static void in_a_capture(void)
{
    halfstep_optimizer *o;
    int (*begin)(void *, int), (*end)(void *, void **);
    int (*stream)(void **, unsigned);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *s, *graph;
    *(void **)&begin = dlsym(driver, "cuStreamBeginCapture_v2");
    *(void **)&end = dlsym(driver, "cuStreamEndCapture");
    *(void **)&stream = dlsym(driver, "cuStreamCreate");
    if (create(&o)) exit(1);
    CHECK(!stream(&s, 0) && !halfstep_set_stream(o, s) && !begin(s, 0), "no capture");
    const int error = settle(o, "adamw/bf16-sr/int8");
    CHECK(error == HALFSTEP_ERROR_ORDER, "%d %s", error, halfstep_error_detail(o));
    end(s, &graph);
    halfstep_destroy(o);
}

static void out_of_memory(void)
{
    for (long at = 1; at < 40; at += 3) {
        fake->fail_allocation = at;
        const int error = use("adamw/bf16-sr/int8", NULL);
        CHECK(error == HALFSTEP_ERROR_MEMORY || error == HALFSTEP_OK, "allocation %ld: %d %s", at, error,
              halfstep_error_detail(NULL));
        CHECK(!fake->live, "allocation %ld: %ld blocks are left", at, fake->live);
    }
}

/* ---- Cases are finite ---- */

static struct hstep_device looking;
static const struct hstep_device *real;
static int not_finite, looked;

/* Looks at all weights and states after a step. */
static int look(const struct hstep_call *call)
{
    const int error = real->count(call);
    halfstep_optimizer *o =
        (halfstep_optimizer *)(void *)((char *)(uintptr_t)call->context - offsetof(halfstep_optimizer, context));
    for (int i = call->first; call->weights && i < call->first + call->n; i++)
        for (int slot = HALFSTEP_SLOT_WEIGHT; slot < HSTEP_SLOTS; slot++) {
            halfstep_slot_info info = {.struct_size = sizeof info};
            if (slot == HALFSTEP_SLOT_GRADIENT || halfstep_get_slot_info(o, i, slot, &info) || info.format < 0)
                continue;
            const int64_t n = info.rows * info.columns;
            float *values = calloc((size_t)n + 1, sizeof *values);
            const void *weight = slot == HALFSTEP_SLOT_WEIGHT ? call->weights[i - call->first] : NULL;
            int bad = !values || halfstep_read_slot(o, i, slot, weight, 0, info.rows, values), before = not_finite;
            for (int64_t j = 0; !bad && j < n; j++) not_finite += !isfinite(values[j]), looked++;
            CHECK(!bad, "%s", halfstep_error_detail(o));
            CHECK(not_finite == before, "%s, slot %d: not finite", o->labels[i].name, slot);
            free(values);
        }
    return error;
}

/* Code that is not fused is checked once. */
static int not_trusted(const struct hstep_context *c, int fused)
{
    static int asked;
    (void)c;
    return fused < 0 && asked++;
}

static void trust(const struct hstep_context *c, int fused) { (void)c, (void)fused; }
static int records(const struct hstep_context *c)
{
    (void)c;
    return 0;
}

/* A NaN may have other bits on a GPU, so no case may have one. */
static void finite_cases(void)
{
    real = hstep_default_device;
    looking = *real;
    looking.name = "cpu";
    looking.count = look;
    looking.trusted = not_trusted;
    looking.trust = trust;
    looking.records = records;
    hstep_default_device = &looking;
    for (int32_t r = 0; r < halfstep_rule_count(); r++) {
        char recipe[64];
        halfstep_rule_info rule = {.struct_size = sizeof rule};
        halfstep_get_rule_info(r, &rule);
        snprintf(recipe, sizeof recipe, "%s/bf16-sr%s", rule.name, rule.states ? "/int8" : "");
        halfstep_optimizer *o;
        const int error = halfstep_create(NULL, &o);
        CHECK(!error && !settle(o, recipe), "%s: %s", recipe, halfstep_error_detail(error ? NULL : o));
        if (!error) halfstep_destroy(o);
    }
    CHECK(looked > 1000000, "only %d values were looked at", looked);
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    char path[512];
    const char *build = getenv("HALFSTEP_BUILD");
    snprintf(path, sizeof path, "%s/tests/cuda/fake/libcuda.so.1", build ? build : "build");
    setenv("FAKE_CUDA_OPEN", "1", 1); /* the fake is slower when it protects its memory */
    void *driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    struct fake_cuda_control *(*control)(void);
    *(void **)&control = dlsym(driver, "fake_cuda_control");
    fake = control();
    snprintf(path, sizeof path, "%s/tests/cuda/fake/image", build ? build : "build");
    setenv("HALFSTEP_CUDA_IMAGE", path, 1);
    unsetenv("HALFSTEP_DEVICE_CHECK");
    snprintf(cache, sizeof cache, "%s/halfstep-check-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
    if (!mkdtemp(cache)) return 1;
    setenv("XDG_CACHE_HOME", cache, 1);
    TEST("a first use is checked, and written down") in_child(first_use);
    TEST("a later process is not checked again") in_child(later_use);
    TEST("another driver is checked") in_child(another_driver);
    forget();
    TEST("always: every process is checked") in_child(always), in_child(always);
    TEST("never: nothing is checked") in_child(never);
    TEST("another word is refused") in_child(unknown_word);
    TEST("a folder that cannot be made costs a check") in_child(no_folder);
    TEST("no folder costs a check") in_child(unknown_folder);
    forget();
    TEST("a wrong kernel is refused and not trusted") in_child(wrong_kernels);
    forget();
    TEST("a capture refuses a kernel that was not checked") in_child(in_a_capture);
    forget();
    TEST("out of memory comes back as its code") in_child(out_of_memory);
    TEST("cases are finite") in_child(finite_cases);
    forget();
    snprintf(path, sizeof path, "%s/halfstep", cache);
    rmdir(path);
    rmdir(cache);
    return test_done();
}
