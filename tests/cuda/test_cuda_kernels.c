/* Runs the GPU kernels on the processor (tests/cuda/emulate.h), behind a device that launches them one after another.
 * Cases of tests/golden/hashes.txt must have their hashes, some of them in shards of rows and of columns.
 * build/tests/test_cuda_few has the fused kernels of one rule (tests/cuda/few.cu); test_cuda_every has all. Cases whose
 * fused kernels are missing go through the general one. --short and --all change how many cases are run. */
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test.h"

#include "cuda/emulate.h"
#include "cuda/watch.h"
#include "device/cuda/sequence.h"
#include "device/host/host.h"
#include "golden_case.h"
#include "handle/optimizer.h"
#include "ref/fixture.h"
#include "ref/nan_neighbours.h"

/* ---- The device ---- */

static long launches;
static int grid_blocks = 3, leave_out_fused, left_out;

static int launch(const char *name, void *subject, const struct hstep_cuda_what *what)
{
    struct hstep_cuda_what copy = *what;
    void *parameters[] = {subject, &copy};
    for (int i = 0; i < hstep_emulated_kernel_count; i++) {
        const struct hstep_emulated_kernel *kernel = &hstep_emulated_kernels[i];
        if (strcmp(kernel->name, name)) continue;
        launches++;
        int blocks = kernel->shape == HSTEP_CUDA_ONE ? 1 : grid_blocks;
        return hstep_emulate(kernel, blocks, HSTEP_CUDA_THREADS, 0, parameters) ? HALFSTEP_ERROR_MEMORY : HALFSTEP_OK;
    }
    return HALFSTEP_ERROR_NAME;
}

/* Launches without the caller's context, because kernels must not look at how the host wants its work run. */
static int launch_call(const char *name, const struct hstep_call *call, struct hstep_cuda_what what)
{
    struct hstep_call copy = *call;
    copy.context = NULL;
    return launch(name, &copy, &what);
}

static int launch_phase(const struct hstep_call *call, int kernel, struct hstep_cuda_what what)
{
    if (leave_out_fused && kernel >= HSTEP_CUDA_FUSED) return left_out++, HALFSTEP_OK;
    return launch_call(hstep_emulated_kernels[kernel].name, call, what);
}

static int wait_for(const struct hstep_context *c) { return (void)c, HALFSTEP_OK; }
static int find_fused(const struct hstep_context *c, const struct hstep_tensor *t, enum hstep_way way)
{
    const int kernel = way == HSTEP_WAY_COMPARED ? -1 : hstep_cuda_find_fused(t);
    (void)c;
    return kernel >= 0 && hstep_emulated_is_empty(&hstep_emulated_kernels[kernel]) ? -1 : kernel;
}

static size_t workspace(const struct hstep_tensor *t) { return (size_t)hstep_cuda_workspace(t); }

static int zero(const struct hstep_context *c, void *memory, uint64_t bytes)
{
    struct hstep_call call = {.context = c};
    return launch_call("halfstep_cuda_zero", &call, (struct hstep_cuda_what){.to = memory, .bytes = bytes});
}

static int carry(const struct hstep_context *c, int64_t *limbs, int64_t n)
{
    struct hstep_call call = {.context = c};
    return launch_call("halfstep_cuda_carry", &call, (struct hstep_cuda_what){.to = limbs, .n = (int)n});
}

static int scan(const struct hstep_call *call)
{
    int error = launch_call("halfstep_cuda_scan", call, (struct hstep_cuda_what){0});
    return error ? error : carry(call->context, call->statistics, 1);
}

static int decide(const struct hstep_call *call)
{
    return launch_call("halfstep_cuda_decide", call, (struct hstep_cuda_what){0});
}

static int sum(const struct hstep_call *call, int first, int n)
{
    return launch_call("halfstep_cuda_sum", call, (struct hstep_cuda_what){.first = first, .n = n});
}

static int decide_sums(const struct hstep_call *call, int first, int n)
{
    return launch_call("halfstep_cuda_decide_sums", call, (struct hstep_cuda_what){.first = first, .n = n});
}

static int cross(const struct hstep_call *call, int tensor, int pair)
{
    return hstep_cuda_cross(launch_phase, call, tensor, pair);
}

static int update(const struct hstep_call *call, int first, int n, enum hstep_pass pass)
{
    return hstep_cuda_update(launch_phase, call, first, n, pass);
}

static int transform(const struct hstep_call *call, const struct hstep_matrix *m)
{
    return hstep_cuda_transform(launch_phase, call, m, NULL);
}

static int count(const struct hstep_call *call)
{
    return launch_call("halfstep_cuda_count", call, (struct hstep_cuda_what){0});
}

static int close_round(const struct hstep_call *call)
{
    return launch_call("halfstep_cuda_end_round", call, (struct hstep_cuda_what){0});
}

static int add_gradient(const struct hstep_accumulation *a)
{
    struct hstep_accumulation copy = *a;
    copy.context = NULL;
    return launch("halfstep_cuda_accumulate", &copy, &(struct hstep_cuda_what){0});
}

static int access_slot(const char *name, const struct hstep_access *a, struct hstep_cuda_what what)
{
    struct hstep_access copy = *a;
    copy.context = NULL;
    return launch(name, &copy, &what);
}

static int read_slot(const struct hstep_access *a, float *out)
{
    return access_slot("halfstep_cuda_read", a, (struct hstep_cuda_what){.to = out});
}

static int write_slot(const struct hstep_access *a, const float *in)
{
    return access_slot("halfstep_cuda_write", a, (struct hstep_cuda_what){.from = in});
}

static int saturated(const struct hstep_access *a, uint64_t *n)
{
    *n = 0;
    return access_slot("halfstep_cuda_saturated", a, (struct hstep_cuda_what){.to = n});
}

static struct hstep_device emulated = {
    .name = "emulated",
    .shared = 1,
    .allocate = hstep_host_allocate,
    .release = hstep_host_release,
    .zero = zero,
    .copy = hstep_host_copy,
    .wait = wait_for,
    .find_fused = find_fused,
    .workspace = workspace,
    .scan = scan,
    .decide = decide,
    .sum = sum,
    .decide_sums = decide_sums,
    .cross = cross,
    .carry = carry,
    .update = update,
    .transform = transform,
    .count = count,
    .end_round = close_round,
    .accumulate = add_gradient,
    .read = read_slot,
    .write = write_slot,
    .saturated = saturated,
};

/* ---- Tests ---- */

enum { SLICED = 3 * 300 };

/* Makes steps of Prodigy whose estimate uses every slice-th element. Returns the estimate and writes the weights. Rows
 * are longer than a chunk or, in one tensor, shorter than a group. */
static double estimate_slices(const struct hstep_device *device, int64_t row, double slice, float *weights)
{
    const struct hstep_device *before = hstep_default_device;
    struct source s = {11};
    struct one t;
    double d = 0;
    hstep_default_device = device;
    one_open(&t, "prodigy/f32/f32", 2, SLICED / row, row, "f32");
    one_hyper(&t, "d0", 1e-3);
    one_hyper(&t, "slice_p", slice);
    one_start(&t);
    for (int i = 0; i < SLICED; i++) weights[i] = (float)next_normal(&s);
    one_write(&t, HALFSTEP_SLOT_WEIGHT, weights);
    for (int step = 0; step < 8; step++) {
        for (int i = 0; i < SLICED; i++) weights[i] = (float)(0.01 * (i % 7 - 2) * (1 + 0.1 * next_normal(&s)));
        one_write(&t, HALFSTEP_SLOT_GRADIENT, weights);
        MUST(one_step(&t));
    }
    one_read(&t, HALFSTEP_SLOT_WEIGHT, weights);
    MUST(get_scalar(t.o, 0, "d", &d));
    one_close(&t);
    hstep_default_device = before;
    return d;
}

static void check_slices(const struct hstep_device *host)
{
    static float there[SLICED], here[SLICED];
    static const int64_t rows[] = {300, 20};
    for (int i = 0; i < 2; i++) {
        double all = estimate_slices(host, rows[i], 1, here), seen = all;
        for (double slice = 1; slice < 1e4; slice = slice * 7 + 1) {
            double wanted = estimate_slices(host, rows[i], slice, here);
            double found = estimate_slices(&emulated, rows[i], slice, there);
            CHECK(found == wanted && !memcmp(there, here, sizeof here),
                  "rows of %d, every %g-th: d is %.17g, not %.17g", (int)rows[i], slice, found, wanted);
            if (wanted != all) seen = wanted;
        }
        CHECK(all > 1e-3 && seen != all, "rows of %d: the estimate is %g whatever is summed", (int)rows[i], all);
    }
}

/* Values written into second moments on a grid that has moved must be those that the host writes. */
static void check_written(const struct hstep_device *host)
{
    enum { GRIDDED = HALFSTEP_SLOT_STATE + 1, ROWS = 4, COLUMNS = 320 };
    static float values[ROWS * COLUMNS], read[2][ROWS * COLUMNS];
    struct source s = {31};
    for (int i = 0; i < ROWS * COLUMNS; i++) values[i] = (float)next_unit(&s);
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        halfstep_format_info format = format_info(row);
        if (!format.grid) continue;
        for (int far = 0; far < 2; far++) {
            char recipe[64];
            struct one t;
            snprintf(recipe, sizeof recipe, "adam/f32/%s", format.name);
            hstep_default_device = far ? &emulated : host;
            one_open(&t, recipe, 2, ROWS, COLUMNS, "f32");
            one_start(&t);
            MUST(set_scalar(t.o, 0, "exp_avg_sq.grid", 0.75));
            one_write(&t, GRIDDED, values);
            one_read(&t, GRIDDED, read[far]);
            one_close(&t);
        }
        CHECK(!memcmp(read[0], read[1], sizeof read[0]), "%s: written as %g, not %g", format.name, (double)read[1][0],
              (double)read[0][0]);
    }
    hstep_default_device = &emulated;
}

/* Rows of a part need not begin with a tile. Element 65,536, where random words get another key, lies within the first
 * 256 elements of row 60 here. */
enum { PART_COLUMNS = 1024, PART_LEFT = 32, PART_ROWS = 70, PART = PART_ROWS * PART_COLUMNS };

static void step_part(const struct hstep_device *device, uint16_t *weight, float (*states)[PART])
{
    static uint16_t gradient[PART];
    struct source s = {5};
    void *weights[] = {weight};
    const void *gradients[] = {gradient};
    hstep_default_device = device;
    halfstep_optimizer *o = new_optimizer("adamw/bf16-sr/int8", 1, 3);
    MUST(halfstep_set_choice(o, HALFSTEP_ALL_GROUPS, "scan", "known-finite"));
    ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = PART_ROWS, .row_length = PART_COLUMNS + 2 * PART_LEFT,
               .first_column = PART_LEFT, .n_rows = PART_ROWS, .n_columns = PART_COLUMNS, .gradient = "bf16");
    MUST(halfstep_allocate_states(o));
    for (int i = 0; i < PART; i++) {
        weight[i] = (uint16_t)(0x3f80 + (next64(&s) & 0x807f));
        gradient[i] = (uint16_t)(0x3c00 + (next64(&s) & 0x81ff));
    }
    for (int step = 0; step < 3; step++) MUST(halfstep_step(o, weights, gradients));
    for (int j = 0; j < 2; j++) MUST(halfstep_read_slot(o, 0, HALFSTEP_SLOT_STATE + j, NULL, 0, PART_ROWS, states[j]));
    halfstep_destroy(o);
    hstep_default_device = &emulated;
}

static void check_part(const struct hstep_device *host)
{
    static uint16_t weight[2][PART];
    static float states[2][2][PART];
    step_part(host, weight[0], states[0]);
    step_part(&emulated, weight[1], states[1]);
    CHECK(!memcmp(weight[0], weight[1], sizeof *weight) && !memcmp(states[0], states[1], sizeof *states),
          "a part of columns has other bits than on the host");
}

/* No bit of a NaN reaches its neighbours, which are those of the host. */
static void check_beside_nan(const struct hstep_device *host)
{
    static struct neighbours other;
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        const halfstep_format_info format = format_info(row);
        if (!is_block_format(&format)) continue;
        hstep_default_device = host;
        step_neighbours(format.name, 0x7fc00000, 0x7fc00000, 1, &other);
        hstep_default_device = &emulated;
        for (int fused = 0; fused < 2; fused++)
            check_neighbours(format.name, fused, fused ? "fused kernels" : "the general kernel", 0, &other);
    }
}

static float of_pattern(uint32_t pattern)
{
    float x;
    memcpy(&x, &pattern, 4);
    return x;
}

static int same(float x, float y) { return (x != x && y != y) || !memcmp(&x, &y, 4); }

/* Returns an operand. Half of the mantissas are near `like`, where roundings are close. any: 0 takes any exponent, 1
 * those of 100 to 153, 2 those at the ends of the ranges. With 2, few operands are negative. */
static float operand(struct source *s, int any, uint32_t like)
{
    static const int ends[] = {0, 1, 2, 26, 27, 28, 76, 77, 78, 126, 127, 128, 151, 152, 226, 227, 228, 253, 254, 255};
    const uint32_t bits = (uint32_t)next64(s);
    const uint32_t exponent = any == 0   ? bits >> 23 & 255
                              : any == 1 ? 100 + (bits >> 23) % 54
                                         : (uint32_t)ends[(bits >> 23) % 20];
    const uint32_t mantissa = bits & 0x400000 ? like ^ (bits & 15) : bits * 0x9E3779B9u;
    return of_pattern((any < 2 || !(bits >> 27 & 15) ? bits & 0x80000000 : 0) | exponent << 23 | (mantissa & 0x7fffff));
}

enum { PIECE = 1 << 14 };

/* Computes roots and quotients four at a time, with the ends of the ranges among them, and compares with the
 * processor's results. Returns how many fours are beyond the range of the fast ways (vec/cuda_roots.h). */
static int check_piece(struct source *s, int kind)
{
    static float a[PIECE], b[PIECE], found[PIECE];
    const float *second = b;
    float *first = found;
    int beyond = 0;
    for (int i = 0; i < PIECE; i += 4) {
        const uint32_t like = (uint32_t)next64(s);
        int inside = 1;
        for (int j = i; j < i + 4; j++) {
            a[j] = operand(s, kind, like);
            b[j] = j % 256 ? operand(s, kind, like) : 0.0f;
            inside &= fabsf(a[j] / b[j]) >= 0x1p-100f && fabsf(a[j]) >= 0x1p-100f;
        }
        beyond += !inside;
    }
    memcpy(found, a, sizeof a);
    CHECK(!hstep_emulate_entry("quotients", PIECE / 256, (void *[]){&first, &second}), "no kernel of quotients");
    for (int i = 0; i < PIECE; i++)
        CHECK(same(found[i], a[i] / b[i]), "%a / %a is %a", (double)a[i], (double)b[i], (double)found[i]);
    memcpy(found, a, sizeof a);
    CHECK(!hstep_emulate_entry("roots_of", PIECE / 256, (void *[]){&first}), "no kernel of roots");
    for (int i = 0; i < PIECE; i++)
        CHECK(same(found[i], sqrtf(a[i])), "the root of %a is %a", (double)a[i], (double)found[i]);
    return beyond;
}

static void check_arithmetic(int pieces)
{
    struct source s = {21};
    int beyond = 0;
    for (int n = 0; n < pieces; n++) beyond += check_piece(&s, n % 3);
    CHECK(beyond > pieces * 10 && beyond < pieces * (PIECE / 4 - 10), "%d fours are beyond the range", beyond);
}

/* Runs an entry of tests/cuda/faults.ptx in a process of its own. Returns what the machine found: 'f' a fault, 'w' what
 * the watch reports, '-' nothing. */
static char outcome(const char *name)
{
    fflush(NULL);
    const pid_t child = fork();
    int status = 0;
    if (!child) {
        uint32_t *memory = malloc(HSTEP_CUDA_THREADS * sizeof *memory);
        if (!memory || !freopen("/dev/null", "w", stderr)) _exit(2);
        memset(memory, 0, HSTEP_CUDA_THREADS * sizeof *memory);
        hstep_emulation.watch = 1;
        if (hstep_emulate_entry(name, 1, (void *[]){&memory})) _exit(2);
        _exit(hstep_emulated_reports() ? 3 : 0);
    }
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGABRT ? 'f' : '?';
    return WEXITSTATUS(status) == 3 ? 'w' : WEXITSTATUS(status) == 0 ? '-' : '?';
}

static void check_faults(void)
{
    const struct {
        const char *name;
        char expected;
    } rows[] = {{"sound", '-'},
                {"misaligned", 'f'},
                {"shared_as_generic", 'f'},
                {"shared_as_global", 'f'},
                {"beyond_shared", 'f'},
                {"beyond_parameters", 'f'},
                {"meets_in_two_places", 'f'},
                {"leaves_a_warp", 'f'},
                {"leaves_a_block", 'f'},
                {"races_of_writes", 'w'},
                {"races_after_an_exchange", 'w'},
                {"reads_unwritten", 'w'},
                {"beyond_an_allocation", hstep_watch_knows_heap() ? 'w' : '-'}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char found = outcome(rows[i].name);
        CHECK(found == rows[i].expected, "%s: '%c', expected '%c'", rows[i].name, found, rows[i].expected);
    }
    hstep_emulation.most = 5;
    CHECK(outcome("sound") == 'f', "a launch of more than 5 instructions is not ended");
    hstep_emulation.most = 0;
}

int main(int argc, char **argv)
{
    int n = 0;
    test_init(argc, argv);
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    if (!cases) return 1;
    const struct hstep_device *host = hstep_default_device;
    const int is_few = hstep_emulated_is_empty(&hstep_emulated_kernels[HSTEP_CUDA_fused_lion_f32_f32]);
    hstep_default_device = &emulated;
    const struct golden_layout layouts[] = {
        {.threads = 1}, {.threads = 1, .parts = 2, .states_bound = 1}, {.threads = 1, .parts = 3, .by_columns = 1}};
    /* The watch looks at every access of every kernel. A run of all cases leaves it out, because it takes three times
     * as long. */
    const int watch = BY_LENGTH(1, !is_few, 0);
    const char *const names[] = {"golden cases", "in 2 shards of rows", "in 3 shards of columns"};
    for (int l = 0; l < 3; l++)
        TEST(names[l]) {
            int stride = BY_LENGTH(61, is_few ? 29 : 41, 1) * (l ? 17 : 1);
            hstep_emulation.watch = watch;
            for (int i = 0; i < n; i++) {
                /* A stride may leave out the kernel `rows`. */
                const int rows = !l && cases[i].gradients[0] == 'f' && strstr(cases[i].recipe, "=keep-norm");
                if (rows || i % stride == l % stride) check_golden(list, &cases[i], &layouts[l]);
            }
            hstep_emulation.watch = 0;
        }
    TEST("in any order, with any estimates, the bits are the same") {
        for (int i = 0; i < 4; i++) {
            const int stride = BY_LENGTH(601, is_few ? 401 : 301, 61);
            hstep_emulation = (struct hstep_emulation){.watch = watch,
                                                       .order = i % 2 ? HSTEP_ORDER_RANDOM : HSTEP_ORDER_REVERSE,
                                                       .estimates = HSTEP_ESTIMATES_NEAREST + i,
                                                       .seed = (uint64_t)i};
            for (int j = 7 * i; j < n; j += stride) check_golden(list, &cases[j], &layouts[0]);
            check_arithmetic(2);
        }
        hstep_emulation = (struct hstep_emulation){0};
    }
    TEST("no access is a race, out of bounds, or to unwritten memory")
        CHECK(!hstep_emulated_reports(), "the watch has reported %ld accesses", hstep_emulated_reports());
    TEST("roots and quotients within a range and beyond it") check_arithmetic(BY_LENGTH(6, 12, 60));
    TEST("kernels that are wrong are noticed") check_faults();
    TEST("sums over slices") check_slices(host);
    TEST("states on a grid are written as the host writes them") check_written(host);
    TEST("rows that begin within a tile") check_part(host);
    TEST("neighbours of NaNs") check_beside_nan(host);
    TEST("any number of blocks") {
        grid_blocks = 1;
        check_golden(list, &cases[n / 2], &layouts[0]);
        grid_blocks = 7;
        check_golden(list, &cases[n / 2], &layouts[0]);
        grid_blocks = 3;
    }
    /* Shows that the test can fail: without the last launch of a step, counters stand still and all hashes differ. */
    TEST("a launch that is missing is noticed") {
        uint64_t hash = 0, expected = 0;
        char error[300] = "";
        emulated.count = close_round;
        int failed = !golden_expected(list, &cases[0], &expected) ||
                     golden_run(&cases[0], &layouts[0], &hash, error, sizeof error);
        CHECK(failed || hash != expected, "the promised bits without a count");
        emulated.count = count;
    }
    TEST("whole tiles are the fused kernels' alone") {
        int without = 0, of = 0;
        leave_out_fused = 1;
        for (int i = 0; i < n; i += is_few ? 41 : 61) {
            if (is_few && strncmp(cases[i].recipe, "adamw/", 6)) continue;
            left_out = 0;
            uint64_t hash = 0, expected = 0;
            char error[300] = "";
            int differs = !golden_expected(list, &cases[i], &expected) ||
                          golden_run(&cases[i], &layouts[0], &hash, error, sizeof error) || hash != expected;
            of += left_out > 0;
            without += differs && left_out;
        }
        leave_out_fused = 0;
        /* Tensors of a case may have no whole tile, and then the launch does nothing. */
        CHECK(2 * without > of, "%d of %d hashes differ without the fused kernels", without, of);
    }
    printf("     %ld launches\n", launches);
    free(cases);
    free(list);
    return test_done();
}
