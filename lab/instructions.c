/* Counts exactly the instructions that a step executes in the library, on any processor, however busy it is:
 *
 *   instructions LIBRARY.so [--isa NAME]... [--single-step] ROW...
 *   instructions LIBRARY.so --list | --isas
 *
 * A row is a recipe followed by settings, separated by spaces. Settings are choices and hyper-parameters of the library
 * by name (scan=scan, ns_steps=1). rows=R makes the tensor a matrix of R rows. The output is "row,isa" and three
 * counts of instructions: per element, per additional tensor of 128 elements, and per step of one tensor of any size.
 * Without --isa every instruction set that runs here is counted. --list prints the rows of every rule, --isas the
 * instruction sets.
 *
 * A single step costs 10 to 20 us under a hypervisor. The program therefore stops at branches only (branches.h), at
 * 2 us each. With --single-step it counts by the processor's trap flag instead, and must find the same (x86-64;
 * tests/house/instructions_test.sh). Instructions of the C library are not counted, because they differ from machine to
 * machine. An instruction with a repeat prefix counts as one. On x86-64 objdump finds where instructions begin. */
#define _GNU_SOURCE
#define HALFSTEP_ADVANCED
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "halfstep.h"

#include "branches.h"

/* The difference of two sizes leaves out the cost that does not grow with the size. Both sizes are whole tiles of one
 * chunk; chunks and segments of random words add less than one per cent to large tensors. Rules for matrices take a
 * vector, which may be one row from 4096 elements on. The sixth step updates ranger's slow weights. */
enum { SIZE = 1024, VECTOR = 4096, MORE = 2048, STEP = 6, MANY = 3 };

/* ---- The library ---- */

/* clang-format off */
#define FUNCTIONS(X)                                                                                                   \
    X(halfstep_create) X(halfstep_destroy) X(halfstep_add_group) X(halfstep_add_tensor) X(halfstep_allocate_states)    \
    X(halfstep_set_hyper) X(halfstep_get_hyper) X(halfstep_set_choice) X(halfstep_step) X(halfstep_recipe_full)        \
    X(halfstep_rule_count) X(halfstep_rule_find) X(halfstep_get_rule_info) X(halfstep_isa_count) X(halfstep_isa_name)  \
    X(halfstep_isa_available) X(halfstep_set_isa) X(halfstep_error_detail)
/* clang-format on */
static struct {
#define X(name) __typeof__(name) *name;
    FUNCTIONS(X)
#undef X
} call;

static void open_library(const char *path)
{
    /* RTLD_NOW binds every address before the code is changed. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) stop("%s", dlerror());
#define X(name) *(void **)&call.name = must(dlsym(library, #name), #name " is missing");
    FUNCTIONS(X)
#undef X
    read_code(path, *(void **)&call.halfstep_step);
}

/* ---- Steps ---- */

struct row {
    char recipe[64];
    const char *settings; /* NULL or what follows the recipe */
    const char *gradients;
    int64_t rows; /* 0: a vector */
    int64_t size; /* the smaller one */
};

static uint32_t random_word(uint32_t *seed) { return *seed = *seed * 1664525 + 1013904223; }

/* Allocates n values. Values of 32 bits are at most 0.22 in magnitude. Gradients of 16 bits are 0.008 to 0.03 as BF16
 * and 1 to 1.25 as IEEE half, with either sign. Weights of 16 bits lie on both sides of 2, like those of norms and
 * embeddings. None of them is special, and no step may take longer for them. */
static void *filled(int bits, int64_t n, uint32_t seed, int weights)
{
    char *memory = must(aligned_alloc(4096, ((size_t)n * 4 / 4096 + 2) * 4096), "out of memory");
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = random_word(&seed);
        if (bits == 32) ((float *)memory)[i] = (float)(int32_t)word * 1e-10f;
        else
            ((uint16_t *)memory)[i] = (uint16_t)((!weights        ? 0x3c00
                                                  : word & 0x8000 ? 0x3f00
                                                                  : 0x4000) |
                                                 (word >> 16 & 0x80ff));
    }
    return memory;
}

static void set(halfstep_optimizer *o, const char *name, const char *value)
{
    char *end;
    double number = strtod(value, &end);
    int error = *end ? call.halfstep_set_choice(o, HALFSTEP_ALL_GROUPS, name, value)
                     : call.halfstep_set_hyper(o, HALFSTEP_ALL_GROUPS, name, number);
    /* Some choices are set for each group. */
    if (error && *end) error = call.halfstep_set_choice(o, 0, name, value);
    if (error) stop("%s=%s: %s", name, value, call.halfstep_error_detail(o));
}

static halfstep_rule_info rule_of(const char *recipe)
{
    halfstep_rule_info info = {.struct_size = sizeof info};
    char rule[64];
    snprintf(rule, sizeof rule, "%.*s", (int)strcspn(recipe, "/"), recipe);
    if (call.halfstep_get_rule_info(call.halfstep_rule_find(rule), &info) || !info.decay)
        stop("this program was compiled with the header of another library version");
    return info;
}

/* Creates an optimizer with the settings of `halfstep bench`: gradients known to be finite, decoupled decay, and
 * momentum if the rule has it. */
static halfstep_optimizer *open_optimizer(const struct row *row)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = 1};
    halfstep_optimizer *o;
    int32_t group;
    double momentum;
    halfstep_rule_info info = rule_of(row->recipe);
    if (call.halfstep_create(&options, &o) || call.halfstep_add_group(o, row->recipe, &group))
        stop("cannot create an optimizer for %s", row->recipe);
    set(o, "scan", "known-finite");
    if (!info.raw_gradient) {
        set(o, "lr", "1e-5");
        set(o, "weight_decay", "0.01");
        if (strcmp(info.decay, "proximal")) set(o, "decay", "decoupled");
    }
    if (!call.halfstep_get_hyper(o, 0, "momentum", &momentum) && momentum == 0) set(o, "momentum", "0.9");
    char *settings = strdup(row->settings ? row->settings : ""), *rest = settings, *setting;
    while ((setting = strsep(&rest, " ")) != NULL) {
        char *value = strchr(setting, '=');
        if (!*setting || !strncmp(setting, "rows=", 5)) continue;
        if (!value) stop("invalid setting %s; write NAME=VALUE", setting);
        *value = 0;
        set(o, setting, value + 1);
    }
    free(settings);
    return o;
}

/* Returns the number of instructions in one step of this many tensors. */
static int64_t count_step(const struct row *row, int tensors, int64_t rows, int64_t columns)
{
    halfstep_optimizer *o = open_optimizer(row);
    void *weight[MANY];
    const void *gradient[MANY];
    int weight_bits = strstr(row->recipe, "/f32") == strchr(row->recipe, '/') ? 32 : 16;
    int gradient_bits = strcmp(row->gradients, "f32") ? 16 : 32;
    for (int i = 0; i < tensors; i++) {
        char name[16];
        int32_t index;
        snprintf(name, sizeof name, "t%d", i);
        halfstep_tensor t = {.struct_size = sizeof t,
                             .name = name,
                             .ndim = row->rows ? 2 : 1,
                             .rows = rows,
                             .row_length = columns,
                             .gradient = row->gradients};
        if (call.halfstep_add_tensor(o, &t, &index)) stop("%s: %s", row->recipe, call.halfstep_error_detail(o));
        weight[i] = filled(weight_bits, rows * columns, 2 * (uint32_t)i, 1);
        gradient[i] = filled(gradient_bits, rows * columns, 2 * (uint32_t)i + 1, 0);
    }
    if (call.halfstep_allocate_states(o)) stop("%s: cannot allocate the states", row->recipe);
    int status = 0;
    for (int i = 1; i < STEP && !status; i++) status = call.halfstep_step(o, weight, gradient);
    now.count = 0;
    now.entered = address_of((uint64_t)*(uintptr_t *)&call.halfstep_step);
    if (now.single) {
        now.entered = 0;
        trap_flag(1);
    } else {
        arm(1);
    }
    if (!status) status = call.halfstep_step(o, weight, gradient);
    if (now.single) trap_flag(0);
    else arm(0);
    if (status) stop("%s: a step failed: %s", row->recipe, call.halfstep_error_detail(o));
    call.halfstep_destroy(o);
    for (int i = 0; i < tensors; i++) free(weight[i]), free((void *)gradient[i]);
    return now.count;
}

static void print_row(const char *text, const struct row *row, const char *isa)
{
    int64_t rows = row->rows ? row->rows : 1;
    int64_t small = count_step(row, 1, rows, row->size / rows);
    int64_t large = count_step(row, 1, rows, (row->size + MORE) / rows);
    int64_t few = row->rows ? 2 : 128, one = count_step(row, 1, few, 128 / few),
            many = count_step(row, MANY, few, 128 / few);
    double element = (double)(large - small) / MORE;
    printf("%s,%s,%.3f,%.0f,%.0f\n", text, isa, element, (double)(many - one) / (MANY - 1),
           (double)small - (double)row->size * element);
}

/* Counts in a process of its own, so that one row does not affect the next. */
static void count_row(const char *text, const char *isa)
{
    struct row row = {.settings = strchr(text, ' ')};
    char recipe[64];
    snprintf(recipe, sizeof recipe, "%.*s", (int)strcspn(text, " "), text);
    if (call.halfstep_recipe_full(recipe, row.recipe, sizeof row.recipe)) {
        fprintf(stderr, "instructions: this library has no recipe %s\n", recipe);
        return;
    }
    const char *weight = strchr(row.recipe, '/') + 1, *rows = row.settings ? strstr(row.settings, " rows=") : NULL;
    row.gradients = !strncmp(weight, "bf16", 4) ? "bf16" : !strncmp(weight, "f16", 3) ? "f16" : "f32";
    int vector = !rows && rule_of(row.recipe).matrix;
    row.rows = rows ? atoll(rows + 6) : !vector;
    row.size = vector ? VECTOR : SIZE;
    if (!vector && (row.rows < 1 || row.rows > 64 || SIZE % row.rows)) stop("rows=R: R must be 1, 2, 4 ... 64");
    fflush(stdout);
    pid_t child = fork();
    int status = 0;
    if (!child) {
        if (call.halfstep_set_isa(isa)) stop("cannot choose the instruction set %s", isa);
        prepare_counting();
        print_row(text, &row, isa);
        exit(fflush(stdout) ? 1 : 0);
    }
    if (child < 0 || waitpid(child, &status, 0) < 0) stop("cannot start a process for %s", text);
    if (WIFSIGNALED(status)) stop("%s, %s: signal %d", text, isa, WTERMSIG(status));
    if (WEXITSTATUS(status)) exit(WEXITSTATUS(status));
}

/* Prints every rule in four formats. Rules for matrices also get a matrix of few rows, whose products cost little. Then
 * come decay in the gradient, gradients that are scanned first, and a cautious group. */
static void print_list(void)
{
    static const char *const formats[] = {"f32/f32", "bf16-sr/bf16-sr", "bf16-sr/int8", "bf16-ecc8/int8"};
    for (int32_t r = 0; r < call.halfstep_rule_count(); r++)
        for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
            halfstep_rule_info info = {.struct_size = sizeof info};
            char recipe[128], full[64];
            call.halfstep_get_rule_info(r, &info);
            snprintf(recipe, sizeof recipe, "%s/%s", info.name, formats[f]);
            /* A rule without states gets one row per weight format. */
            if (!info.states) *strrchr(recipe, '/') = 0;
            if (!info.states && f == 2) continue;
            if (call.halfstep_recipe_full(recipe, full, sizeof full)) continue;
            puts(full);
            if (info.matrix && f == 1) printf("%s rows=8\n", full);
        }
    puts("adam/bf16-sr/bf16-sr decay=l2");
    puts("adamw/f32/f32 scan=scan\nadamw/bf16-sr/bf16-sr scan=scan\nadamw/f16-sr/bf16-sr scan=scan\nadamw/bf16-sr/int8 "
         "cautious=1");
}

int main(int argc, char **argv)
{
    const char *isa[16];
    int isas = 0, list = 0, names = 0, at = 2;
    if (argc < 3) stop("LIBRARY.so [--isa NAME]... [--single-step] ROW...");
    open_library(argv[1]);
    for (; at < argc && !strncmp(argv[at], "--", 2); at++) {
        if (!strcmp(argv[at], "--list")) list = 1;
        else if (!strcmp(argv[at], "--isas")) names = 1;
        else if (!strcmp(argv[at], "--single-step")) now.single = 1;
        else if (!strcmp(argv[at], "--isa") && at + 1 < argc && isas < 16) isa[isas++] = argv[++at];
        else stop("unknown option %s", argv[at]);
    }
    if (list) {
        print_list();
        return 0;
    }
    for (int32_t i = 0, all = !isas; all && i < call.halfstep_isa_count() && isas < 16; i++)
        if (call.halfstep_isa_available(i)) isa[isas++] = call.halfstep_isa_name(i);
    for (int i = 0; names && i < isas; i++) puts(isa[i]);
    if (names) return 0;
    find_instructions(argv[1]);
    for (; at < argc; at++)
        for (int i = 0; i < isas; i++) count_row(argv[at], isa[i]);
    return 0;
}
