/* The grid of second moments in block codes (src/base/grid.h). A pure decay rounds nothing, whatever the path, the
 * format and the rate. The number that says where the grid is belongs to the tensor. It moves with what is written and
 * with nothing else, and is read, set, saved and refused as other numbers are. */
#define HALFSTEP_ADVANCED
#include <unistd.h>

#include "fused.h"
#include "halfstep_io.h"
#include "ref/fixture.h"

enum { ROWS = 4, COLUMNS = 320, N = ROWS * COLUMNS };

/* Formats of the table whose second moments lie on a grid. */
enum { MOST_FORMATS = 64 };
static const char *formats[MOST_FORMATS];
static int format_count;

static void list_formats(void)
{
    for (int32_t row = 0; row < halfstep_format_count() && format_count < MOST_FORMATS; row++) {
        halfstep_format_info info = format_info(row);
        if (info.grid) formats[format_count++] = info.name;
    }
}

static void open_grid(struct one *t, const char *rule, const char *states, double beta2)
{
    one_open(t, text_of("%s/f32/%s", rule, states), 2, ROWS, COLUMNS, "f32");
    one_hyper(t, "beta2", beta2);
    one_start(t);
}

static double grid_of(const struct one *t, const char *state)
{
    char name[64];
    double value = -1;
    snprintf(name, sizeof name, "%s.grid", state);
    MUST(get_scalar(t->o, 0, name, &value));
    return value;
}

/* Makes steps with gradients whose squares differ a millionfold within a block, some of them zero. */
static void some_steps(struct one *t, int first, int n)
{
    float *g = t->gradient;
    for (int k = first; k < first + n; k++) {
        struct source s = {(uint64_t)k};
        for (int i = 0; i < N; i++) g[i] = i % 29 ? (float)(next_normal(&s) * pow(10, -(i % 4))) : 0.0f;
        MUST(one_step(t));
    }
}

static void get_slot(const struct one *t, int state, halfstep_slot_info *info)
{
    info->struct_size = sizeof *info;
    MUST(halfstep_get_slot_info(t->o, 0, STATE + state, info));
}

static void *copy_of(const void *bytes, uint64_t n)
{
    void *copy = zeroed((size_t)n);
    memcpy(copy, bytes, (size_t)n);
    return copy;
}

/* Makes steps without gradients, at this rate, from moments that real gradients have left. */
static void judge_decay(const char *format, double beta, int steps, int fused)
{
    struct one t;
    halfstep_slot_info v;
    static float before[N], after[N];
    if (!use_fused(fused)) return;
    open_grid(&t, "adamw", format, 0.999);
    some_steps(&t, 0, 40);
    one_hyper(&t, "beta2", beta);
    get_slot(&t, 1, &v);
    memset(t.gradient, 0, t.gradient_bytes);
    /* The window of a block was chosen for a largest value that was rounded afterwards: it may move once, with all
     * values. */
    one_read(&t, STATE + 1, before);
    MUST(one_step(&t));
    one_read(&t, STATE + 1, after);
    for (int i = 0; i < N; i++)
        CHECK(fabs((double)after[i] - (double)(float)beta * (double)before[i]) <= 0x1p-21 * (double)after[i],
              "%s, beta %g: %a became %a", format, beta, before[i], after[i]);
    memcpy(before, after, sizeof before);
    void *codes = copy_of(v.code, v.code_bytes), *scales = copy_of(v.extra, v.extra_bytes);
    int octaves = 0;
    double grid = grid_of(&t, "exp_avg_sq");
    for (int k = 1; k <= steps; k++) {
        MUST(one_step(&t));
        double now = grid_of(&t, "exp_avg_sq"), decayed = grid * (double)(float)beta;
        int times = 0;
        for (; decayed < 0.25; times++) decayed *= 4;
        CHECK(now == (double)(float)decayed && now >= 0.25 && now <= 1, "%s: step %d took the grid from %.9g to %.9g",
              format, k, grid, now);
        CHECK(!memcmp(codes, v.code, (size_t)v.code_bytes),
              "%s, beta %g, fused %d: step %d of a pure decay changed codes", format, beta, fused, k);
        CHECK(times || !memcmp(scales, v.extra, (size_t)v.extra_bytes), "%s, beta %g: step %d changed scales", format,
              beta, k);
        memcpy(scales, v.extra, (size_t)v.extra_bytes);
        octaves += times;
        grid = now;
        if (test_group_failed) break;
    }
    one_read(&t, STATE + 1, after);
    double rate = pow((double)(float)beta, steps), worst = 0;
    for (int i = 0; i < N; i++)
        if (before[i] > 0) worst = fmax(worst, fabs((double)after[i] / (rate * (double)before[i]) - 1));
    CHECK(worst < steps * 0x1p-23, "%s, beta %g: %d steps are off by %g of the value", format, beta, steps, worst);
    CHECK(octaves > 0, "%s, beta %g: %d steps never came to the end of an octave", format, beta, steps);
    /* A gradient's addition does change the codes. */
    some_steps(&t, 1000, 1);
    CHECK(memcmp(codes, v.code, (size_t)v.code_bytes), "%s: a gradient changed no code", format);
    free(codes);
    free(scales);
    one_close(&t);
    use_fused(1);
}

static void test_decay(void)
{
    static const struct {
        double beta;
        int steps;
    } rates[] = {{0.999, 4000}, {0.9, 300}, {0.5, 40}, {0.1, 12}};
    TEST("a pure decay changes no code and decodes to beta^n v") {
        for (int f = 0; f < format_count; f++)
            for (size_t r = 0; r < COUNT(rates); r++)
                for (int fused = 0; fused < 2; fused++) judge_decay(formats[f], rates[r].beta, rates[r].steps, fused);
    }
}

static void test_rates(void)
{
    TEST("any rate leaves a grid") {
        static const double betas[] = {0, 1e-300, 1e-40, 1e-20, 0.2499, 0.25, 0.9999999999, 0.99999994};
        for (size_t b = 0; b < COUNT(betas); b++) {
            struct one t;
            open_grid(&t, "adamw", "int8", betas[b]);
            for (int k = 0; k < 20; k++) {
                some_steps(&t, k, 1);
                double grid = grid_of(&t, "exp_avg_sq");
                CHECK(grid >= 0.25 && grid <= 1, "beta %g: the grid is %g", betas[b], grid);
            }
            one_read(&t, STATE + 1, t.room);
            for (int i = 0; i < N; i++)
                CHECK(isfinite(t.room[i]) && t.room[i] >= 0, "beta %g: v is %g", betas[b], t.room[i]);
            one_close(&t);
        }
    }
    TEST("the grid follows the rate of each step") {
        struct one t;
        open_grid(&t, "adamw", "int4", 0.999);
        float expected = 1;
        for (int k = 0; k < 60; k++) {
            double beta = 1 - 0.5 / (k + 1);
            one_hyper(&t, "beta2", beta);
            some_steps(&t, k, 1);
            double next = (double)expected * (double)(float)beta;
            while (next < 0.25) next *= 4;
            expected = (float)next;
            CHECK(grid_of(&t, "exp_avg_sq") == (double)expected, "step %d: the grid is %.9g, not %.9g", k,
                  grid_of(&t, "exp_avg_sq"), expected);
        }
        one_close(&t);
    }
}

static void test_writes(void)
{
    TEST("only what writes the state moves its grid") {
        struct one t;
        void *weights[1];
        const void *none[1] = {NULL};
        const float beta = 0.999f;
        open_grid(&t, "adamw", "int8", 0.999);
        weights[0] = t.weight;
        some_steps(&t, 0, 5);
        double grid = grid_of(&t, "exp_avg_sq");
        ((float *)t.gradient)[7] = NAN;
        CHECK(one_step(&t) == HALFSTEP_NONFINITE && grid_of(&t, "exp_avg_sq") == grid, "a refused step moved the grid");
        MUST(halfstep_step(t.o, weights, none));
        CHECK(grid_of(&t, "exp_avg_sq") == grid, "a step without a gradient moved the grid");
        ((float *)t.gradient)[7] = 0;
        const void *gradients[1] = {t.gradient};
        MUST(accumulate_states(t.o, gradients));
        CHECK(grid_of(&t, "exp_avg_sq") == (double)(float)(grid * (double)beta), "a micro-step left the grid");
        grid = grid_of(&t, "exp_avg_sq");
        one_hyper(&t, "lr", 0);
        MUST(one_step(&t));
        CHECK(grid_of(&t, "exp_avg_sq") == (double)(float)(grid * (double)beta), "a step at lr 0 left the grid");
        grid = grid_of(&t, "exp_avg_sq");
        one_read(&t, STATE + 1, t.room);
        one_write(&t, STATE + 1, t.room);
        CHECK(grid_of(&t, "exp_avg_sq") == grid, "writing a slot moved the grid");
        grid = grid_of(&t, "exp_avg_sq");
        CHECK(halfstep_allocate_states(t.o) == ORDER && grid_of(&t, "exp_avg_sq") == grid,
              "states were allocated a second time");
        one_close(&t);
    }
    TEST("a part of no elements keeps pace") {
        static float g[64], w[64];
        halfstep_optimizer *o = new_optimizer("adamw/f32/int8", 0, 0);
        for (int part = 0; part < 2; part++) {
            ADD_TENSOR(o, .name = part ? "b" : "a", .ndim = 2, .may_be_empty = !part, .rows = 2, .row_length = 32,
                       .first_row = part ? 0 : 1, .n_rows = part ? 2 : 0, .n_columns = 32, .gradient = "f32");
        }
        MUST(halfstep_allocate_states(o));
        MUST(halfstep_set_choice(o, ALL_GROUPS, "scan", "known-finite"));
        void *weights[2] = {w, w};
        const void *gradients[2] = {g, g};
        double grid[2];
        for (int k = 0; k < 3; k++) MUST(halfstep_step(o, weights, gradients));
        for (int part = 0; part < 2; part++) MUST(get_scalar(o, part, "exp_avg_sq.grid", &grid[part]));
        CHECK(grid[0] == grid[1] && grid[0] < 1, "grids of %.9g and %.9g", grid[0], grid[1]);
        halfstep_destroy(o);
    }
    TEST("a host's copy of the grid is current at any time") {
        struct one t;
        double shown = -1;
        open_grid(&t, "adamw", "int8", 0.999);
        halfstep_record_places places = {.struct_size = sizeof places, .grid = {&shown}};
        CHECK(halfstep_bind_record(t.o, 0, &places) == ARGUMENT && halfstep_bind_record(t.o, 99, &places) == ARGUMENT &&
                  shown == -1,
              "a slot without a grid was bound");
        places = (halfstep_record_places){.struct_size = sizeof places, .grid = {NULL, &shown}};
        MUST(halfstep_bind_record(t.o, 0, &places));
        EQUAL(shown, 1);
        for (int k = 0; k < 3; k++) {
            some_steps(&t, k, 1);
            CHECK(shown == grid_of(&t, "exp_avg_sq") && shown < 1, "after a step it is %g", shown);
        }
        MUST(set_scalar(t.o, 0, "exp_avg_sq.grid", 0.5));
        EQUAL(shown, 0.5);
        MUST(halfstep_bind_record(t.o, 0, NULL));
        some_steps(&t, 3, 1);
        EQUAL(shown, 0.5);
        one_close(&t);
    }
    TEST("a maximum and what it is of are not in codes, so that they have no grid") {
        struct one t;
        one_open(&t, "adamw/f32/int8", 2, ROWS, COLUMNS, "f32");
        one_hyper(&t, "amsgrad", 1);
        one_start(&t);
        some_steps(&t, 0, 50);
        for (int state = 1; state < 3; state++) {
            halfstep_slot_info info;
            get_slot(&t, state, &info);
            CHECK(info.precise == 1 && info.grid == 0, "%s: precise %d, grid %d", info.name, info.precise, info.grid);
        }
        one_close(&t);
    }
}

static void test_slots(void)
{
    TEST("reading and writing respect the grid") {
        for (int f = 0; f < format_count; f++) {
            struct one t;
            halfstep_slot_info v;
            static float values[N], back[N];
            open_grid(&t, "adamw", formats[f], 0.999);
            some_steps(&t, 0, 400);
            get_slot(&t, 1, &v);
            CHECK(v.grid == 1, "%s: no grid", formats[f]);
            get_slot(&t, 0, &v);
            CHECK(v.grid == 0, "%s: the first moment has a grid", formats[f]);
            get_slot(&t, 1, &v);
            one_read(&t, STATE + 1, values);
            one_write(&t, STATE + 1, values);
            one_read(&t, STATE + 1, back);
            CHECK(!memcmp(values, back, sizeof back), "%s: writing what was read changes values", formats[f]);
            void *codes = copy_of(v.code, v.code_bytes), *scales = copy_of(v.extra, v.extra_bytes);
            one_write(&t, STATE + 1, values);
            CHECK(!memcmp(codes, v.code, (size_t)v.code_bytes) && !memcmp(scales, v.extra, (size_t)v.extra_bytes),
                  "%s: writing what was read changes bytes", formats[f]);
            for (int i = 0; i < N; i++) values[i] = ldexpf(1.0f + (float)(i % 7) / 8.0f, i / COLUMNS - 10);
            one_write(&t, STATE + 1, values);
            one_read(&t, STATE + 1, back);
            for (int i = 0; i < N; i++)
                CHECK(fabsf(back[i] / values[i] - 1) < 0.3f, "%s: %g was read as %g", formats[f], values[i], back[i]);
            /* The ends of fp32, on the finest grid and on the coarsest. */
            for (int end = 0; end < 2; end++) {
                MUST(set_scalar(t.o, 0, "exp_avg_sq.grid", end ? 0.25 : 1));
                one_fill(&t, STATE + 1, 3e38f);
                one_read(&t, STATE + 1, back);
                for (int i = 0; i < N; i++)
                    CHECK(back[i] > 0x1p124f && back[i] < INFINITY, "%s: 3e38 became %a", formats[f], back[i]);
                for (int i = 0; i < N; i++) values[i] = i % 32 == 5 ? 0x1p-126f : 0x1p-149f;
                one_write(&t, STATE + 1, values);
                one_read(&t, STATE + 1, back);
                for (int i = 0; i < N; i++)
                    CHECK(back[i] > 0, "%s: %a became zero beside 2^-126", formats[f], values[i]);
            }
            free(codes);
            free(scales);
            one_close(&t);
        }
    }
    TEST("the number is refused where no step leaves such, or there is none") {
        static const double bad[] = {0, -1, 0.2, 0.2499999, 1.0000001, 4, NAN, INFINITY, 0.3};
        static const char *const names[] = {"exp_avg.grid", "exp_avg_sq", "exp_avg_sq.grids",
                                            "grid",         ".grid",      "max_exp_avg_sq.grid"};
        struct one t;
        double value;
        open_grid(&t, "adamw", "int8", 0.999);
        MUST(set_scalar(t.o, 0, "exp_avg_sq.grid", 0.5));
        for (size_t i = 0; i < COUNT(bad); i++)
            CHECK(set_scalar(t.o, 0, "exp_avg_sq.grid", bad[i]) == RANGE &&
                      strstr(halfstep_error_detail(t.o), "exp_avg_sq.grid") && grid_of(&t, "exp_avg_sq") == 0.5,
                  "%g was taken: %s", bad[i], halfstep_error_detail(t.o));
        for (size_t i = 0; i < COUNT(names); i++)
            CHECK(set_scalar(t.o, 0, names[i], 0.5) == NAME && get_scalar(t.o, 0, names[i], &value) == NAME,
                  "'%s' was taken", names[i]);
        one_close(&t);
        open_grid(&t, "adamw", "bf16-sr", 0.999);
        CHECK(get_scalar(t.o, 0, "exp_avg_sq.grid", &value) == NAME, "BF16 states have a grid");
        one_close(&t);
        static const struct {
            const char *format;
            int grid;
        } all[] = {{"int8", 1}, {"int6", 1}, {"int4", 1},     {"fp8", 1},
                   {"f32", 0},  {"dyn8", 0}, {"fp8-e5m2", 1}, {"fp8-lamb16", 0}};
        for (size_t i = 0; i < COUNT(all); i++) {
            halfstep_format_info info = format_info(halfstep_format_find(all[i].format));
            CHECK(info.grid == all[i].grid, "%s: grid %d", info.name, info.grid);
        }
    }
}

/* Steps, saves, loads and steps again. A file whose grids are missing is refused. */
static void judge_file(const char *format)
{
    char path[] = "/tmp/halfstep-grid-XXXXXX", text[512] = "";
    struct one a, b;
    halfstep_slot_info va, vb;
    int fd = mkstemp(path);
    CHECK(fd >= 0, "no file");
    if (fd < 0) return;
    open_grid(&a, "adamw", format, 0.99);
    open_grid(&b, "adamw", format, 0.99);
    some_steps(&a, 0, 37);
    double grid = grid_of(&a, "exp_avg_sq");
    void *weights[2] = {a.weight, b.weight};
    CHECK(!halfstep_write_optimizer(path, a.o, &weights[0], NULL, text, sizeof text), "%s", text);
    MUST(set_scalar(b.o, 0, "exp_avg_sq.grid", 0.5));
    CHECK(!halfstep_read_optimizer(path, b.o, &weights[1], NULL, text, sizeof text), "%s", text);
    CHECK(grid_of(&b, "exp_avg_sq") == grid, "%s: the grid was %g and is %g", format, grid, grid_of(&b, "exp_avg_sq"));
    some_steps(&a, 37, 37);
    some_steps(&b, 37, 37);
    for (int s = 0; s < 2; s++) {
        get_slot(&a, s, &va);
        get_slot(&b, s, &vb);
        CHECK(!memcmp(va.code, vb.code, (size_t)va.code_bytes) && !memcmp(va.extra, vb.extra, (size_t)va.extra_bytes),
              "%s: state %d goes on otherwise", format, s);
    }
    CHECK(!memcmp(a.weight, b.weight, a.weight_bytes) && grid_of(&a, "exp_avg_sq") == grid_of(&b, "exp_avg_sq"),
          "%s: the weights or the grid go on otherwise", format);
    /* The same file with another key in place of that of the grid, so that the header keeps its length. */
    FILE *file = fopen(path, "r+b");
    static char bytes[1 << 16];
    size_t n = fread(bytes, 1, sizeof bytes, file);
    char *key = memmem(bytes, n, "\"scalars.w\":\"", 13), *end = key ? strchr(key + 13, '"') : NULL;
    CHECK(end && strstr(key, "exp_avg_sq.grid"), "the file has no grid");
    if (end) memcpy(key, "\"elseway.w\"", 11);
    rewind(file);
    fwrite(bytes, 1, n, file);
    fclose(file);
    grid = grid_of(&b, "exp_avg_sq");
    CHECK(halfstep_read_optimizer(path, b.o, &weights[1], NULL, text, sizeof text) == HALFSTEP_ERROR_FORMAT &&
              strstr(text, "scalars.w") && grid_of(&b, "exp_avg_sq") == grid,
          "%s: a file without the grid: \"%s\"", format, text);
    one_close(&a);
    one_close(&b);
    close(fd);
    remove(path);
}

static void test_files(void)
{
    TEST("a file keeps the grid; one without is refused") {
        for (int f = 0; f < format_count; f++) judge_file(formats[f]);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    list_formats();
    test_decay();
    test_rates();
    test_writes();
    test_slots();
    test_files();
    return test_done();
}
