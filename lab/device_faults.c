/* How much the check on first use (docs/gpu.md) notices: changes single instructions of the kernels' PTX, by a seed,
 * and lets the library check the emulated GPU.
 *
 *   cmake --build BUILD --target device_faults
 *   BUILD/tests/device_faults 300 1 2 [FILE]
 *
 * The arguments are the number of changes that count, the seed, and the number of processes. The file keeps what golden
 * cases have noticed, so that a later run with other cases of the check need not ask them again. A change is another
 * instruction of the same types, a jump that is inverted, or an address that is off by one element. It counts if a
 * golden case notices it: with the change, the hash differs, the launch is a fault, or it does not end.
 *
 * First, all golden cases run on the kernels as they are. Each drawn row also tries its change, and remembers the cases
 * in which that gives another result. Only these cases can notice the change. They run with the change, one after
 * another, until one notices it. A change is left out if 24 do not. Then the check runs: that of the fused kernel that
 * the row is in, or of all other code. Prints each change that counts and that the check does not refuse, with its line
 * of BUILD/tests/cuda/every.ptx.
 *
 * A number of 0 draws one change of each row and makes none. It prints the changes of which a 16th of the golden cases
 * sees another result and the check does not. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tests/cuda/change.h>
#include <tests/cuda/emulate.h>
#include <tests/tools/test.h>
#include <tools/cli/verify/golden.c>

/* ---- Changes ---- */

static const struct operation {
    const char *name, *types, *meaning;
} operations[] = {
#define HAND(name) {#name, "", ""},
#define ONE(name, D, A, value) {#name, #D #A, #value},
#define TWO(name, D, A, B, value) {#name, #D #A #B, #value},
#define THREE(name, D, A, B, C, value) {#name, #D #A #B #C, #value},
#include <tests/cuda/instructions.def>
#undef HAND
#undef ONE
#undef TWO
#undef THREE
};
enum { OPERATIONS = sizeof operations / sizeof *operations };

/* The kernels that are checked by themselves, and recipes that use them. */
static const struct fused {
    const char *kernel, *rule, *states;
} fused[] = {
#define KERNEL_FUSED(rule, first, second) {"halfstep_cuda_fused_" #rule "_" #first "_" #second, #rule, #first},
#include <device/cuda/code/kernels.def>
};
enum { FUSED = sizeof fused / sizeof *fused };

static uint64_t seed;

static uint64_t next_random(void)
{
    uint64_t z = seed += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static int is_operation(uint16_t op, const char *name) { return !strcmp(operations[op].name, name); }

/* Changes a row. Returns 0 if it has no change. */
static int change_row(struct hstep_change *c, int row)
{
    *c = (struct hstep_change){.row = row, .before = ptx_rows[row], .after = ptx_rows[row]};
    const uint16_t op = c->before.op;
    int others[OPERATIONS], n = 0;
    if (is_operation(op, "bra") && c->before.how) {
        c->after.how = 3 - c->before.how;
        return 1;
    }
    if (is_operation(op, "ld") || is_operation(op, "st")) {
        c->after.offset += 1 << (c->before.how >> HOW_SIZE & 3);
        return 1;
    }
    for (int i = 0; i < OPERATIONS && *operations[op].types; i++)
        if (!strcmp(operations[i].types, operations[op].types) && strcmp(operations[i].meaning, operations[op].meaning))
            others[n++] = i;
    if (n) c->after.op = (uint16_t)others[next_random() % (uint64_t)n];
    return n > 0;
}

static const char *function_of(int row)
{
    const struct function *found = ptx_functions;
    for (const struct function *f = ptx_functions; f < ptx_functions + ptx_function_count; f++)
        if (f->first <= row && f->first > found->first) found = f;
    return found->name;
}

/* Returns the fused kernel that a row is in, or FUSED. */
static int fused_of(int row)
{
    const char *name = function_of(row);
    int i = 0;
    while (i < FUSED && strcmp(fused[i].kernel, name)) i++;
    return i;
}

static void print_change(const struct hstep_change *c, const char *why)
{
    const char *before = operations[c->before.op].name, *after = operations[c->after.op].name;
    printf("%s, line %d: ", function_of(c->row), (int)c->before.line);
    if (c->before.op != c->after.op) printf("%s for %s", after, before);
    else if (c->before.how != c->after.how) printf("an inverted jump");
    else printf("%s at %d bytes more", before, (int)(c->after.offset - c->before.offset));
    printf("; %s\n", why);
    fflush(stdout);
}

/* ---- What the processes share ---- */

static struct golden_case *cases;
static char *list;
static int n_cases, n_changes;
static struct hstep_change *changes;
static struct shared {
    int next_case, equal, next_check, next_golden, next_change, counted;
} *shared;
static unsigned char *seen[2]; /* by golden cases, and by checks: of each change, in each case or check */
enum { GOLDEN, CHECKS, CHECKED = FUSED + 1 };
static unsigned char *noticed[2]; /* for each change */

static void *shared_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) perror("mmap"), exit(1);
    return p;
}

static int take(int *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

/* Runs `body` in so many processes. */
static void in_processes(int n, void (*body)(void))
{
    fflush(stdout);
    for (int i = 0; i < n; i++)
        if (!fork()) {
            body();
            fflush(stdout);
            _exit(0);
        }
    for (int status; n && wait(&status) > 0; n--)
        if (status) fprintf(stderr, "a process has failed, status %#x\n", status), exit(1);
}

/* ---- Runs ---- */

/* Runs a golden case. Returns 1 if it has its hash. */
static int is_equal(int i)
{
    const struct golden_layout layout = {.threads = 1, .device = "cuda"};
    uint64_t hash = 0, expected = 0;
    char error[300] = "another hash";
    setenv("HALFSTEP_DEVICE_CHECK", "never", 1);
    if (golden_expected(list, &cases[i], &expected) && !golden_run(&cases[i], &layout, &hash, error, sizeof error) &&
        hash == expected)
        return 1;
    printf("%s %s %s: %s\n", cases[i].recipe, cases[i].gradients, cases[i].generator, error);
    return 0;
}

/* Checks a fused kernel, or with FUSED all other code. Returns 1 if it is not refused. */
static int is_trusted(int kernel)
{
    const halfstep_options options = {.struct_size = sizeof options, .device = "cuda"};
    const halfstep_tensor
        t = {.struct_size = sizeof t, .name = "w", .ndim = 1, .rows = 1, .row_length = 4096, .gradient = "f32"},
        matrix = {.struct_size = sizeof t, .name = "m", .ndim = 2, .rows = 16, .row_length = 256, .gradient = "f32"};
    halfstep_optimizer *o;
    int32_t group, index;
    setenv("HALFSTEP_DEVICE_CHECK", kernel == FUSED ? "always" : "never", 1);
    int error = halfstep_create(&options, &o);
    if (kernel < FUSED && !error) {
        const struct fused *f = &fused[kernel];
        char recipe[96];
        snprintf(recipe, sizeof recipe, "%s/bf16-sr/%s", strcmp(f->rule, "delayed") ? f->rule : "adamw-delayed",
                 strcmp(f->states, "bf16_sr") ? f->states : "bf16-sr");
        error = halfstep_add_group(o, recipe, &group);
        /* A rule without states has kernels by the format of its weights. */
        if (error) *strrchr(recipe, '/') = 0, error = halfstep_add_group(o, recipe, &group);
        halfstep_set_hyper(o, group, "momentum", 0.9); /* without it, sgd has no state */
        if (!error) error = halfstep_add_tensor(o, &t, &index);
        if (!error) error = halfstep_add_tensor(o, &matrix, &index);
        setenv("HALFSTEP_DEVICE_CHECK", "always", 1);
        if (!error) error = halfstep_allocate_states(o);
        if (error) printf("%s: %s\n", recipe, halfstep_error_detail(o));
    }
    if (!error) halfstep_destroy(o);
    return !error;
}

static void record(int what, int run)
{
    for (int c = 0; c < n_changes; c++) {
        unsigned char *to = &seen[what][(size_t)run * (size_t)n_changes + (size_t)c];
        if (changes[c].seen & ~*to) __atomic_fetch_or(to, changes[c].seen, __ATOMIC_RELAXED);
    }
}

static void watch_changes(void)
{
    for (int c = 0; c < n_changes; c++) changes[c].seen = 0;
    hstep_watch_changes(changes, n_changes);
}

enum { MOST_CASES = 24 }; /* with one change */
enum { STRIDE = 16 };     /* of golden cases, if one change of each row is watched */
static int is_every;

static void watch_cases(void)
{
    int i;
    while ((i = take(&shared->next_case) * (is_every ? STRIDE : 1)) < n_cases) {
        watch_changes();
        if (is_equal(i)) __atomic_fetch_add(&shared->equal, 1, __ATOMIC_RELAXED);
        record(GOLDEN, is_every ? 0 : i);
    }
}

static void watch_checks(void)
{
    int i;
    while ((i = take(&shared->next_check)) < CHECKED) {
        watch_changes();
        if (!is_trusted(i)) printf("The check refuses %s as it is.\n", i < FUSED ? fused[i].kernel : "general code");
        record(CHECKS, is_every ? i == FUSED : i);
    }
}

enum { NO, YES, UNDECIDED, UNKNOWN };

/* Runs golden cases that see the change, until one notices it. */
static int run_cases(int change)
{
    for (int i = 0, n = 0; i < n_cases; i++) {
        const int any = (int)((unsigned)i * 1009u % (unsigned)n_cases); /* 1009 is prime, and no divisor of n_cases */
        const int sees = seen[GOLDEN][(size_t)any * (size_t)n_changes + (size_t)change];
        if (!(sees & HSTEP_DIFFERS)) continue;
        if (n++ == MOST_CASES) return UNDECIDED;
        if (!is_equal(any)) return YES;
    }
    return NO;
}

static int run_check(int change)
{
    const int kernel = fused_of(changes[change].row);
    const int sees = seen[CHECKS][(size_t)kernel * (size_t)n_changes + (size_t)change];
    return sees & HSTEP_DIFFERS && !is_trusted(kernel) ? YES : NO;
}

/* Lets a run look for the change in a process of its own, which the change may end. */
static unsigned char notices(int (*run)(int), int change)
{
    int status = 0;
    const pid_t child = fork();
    if (!child) {
        const int null = open("/dev/null", O_WRONLY);
        dup2(null, 1);
        dup2(null, 2);
        hstep_make_change(&changes[change], 0);
        _exit(run(change));
    }
    if (child < 0 || waitpid(child, &status, 0) != child) perror("fork"), exit(1);
    return WIFEXITED(status) ? (unsigned char)WEXITSTATUS(status) : YES;
}

static int wanted;

/* Tries changes with golden cases until so many are noticed. */
static void try_golden(void)
{
    int c;
    while (__atomic_load_n(&shared->counted, __ATOMIC_RELAXED) < wanted &&
           (c = take(&shared->next_golden)) < n_changes) {
        noticed[GOLDEN][c] = notices(run_cases, c);
        if (noticed[GOLDEN][c] == YES) __atomic_fetch_add(&shared->counted, 1, __ATOMIC_RELAXED);
    }
}

static void try_checks(void)
{
    int c;
    while ((c = take(&shared->next_change)) < n_changes)
        if (noticed[GOLDEN][c] == YES) noticed[CHECKS][c] = notices(run_check, c);
}

/* Moves what golden cases have noticed to or from a file. Returns 0 if there is no file to read. */
static int keep(const char *path, const char *how)
{
    FILE *file = path ? fopen(path, how) : NULL;
    if (!file) return 0;
    const size_t n = *how == 'r' ? fread(noticed[GOLDEN], 1, (size_t)n_changes, file)
                                 : fwrite(noticed[GOLDEN], 1, (size_t)n_changes, file);
    return !fclose(file) && n == (size_t)n_changes;
}

/* ---- Reports ---- */

static const char *why_it_survives(int c)
{
    const int kernel = fused_of(changes[c].row);
    const int sees = is_every ? seen[CHECKS][(size_t)(kernel == FUSED) * (size_t)n_changes + (size_t)c]
                              : seen[CHECKS][(size_t)kernel * (size_t)n_changes + (size_t)c];
    return sees & HSTEP_DIFFERS    ? "the check's results do not show it"
           : sees & HSTEP_EXECUTED ? "it makes no difference to the check's numbers"
                                   : "the check does not execute it";
}

static void report_every(void)
{
    int golden = 0, both = 0;
    for (int c = 0; c < n_changes; c++) {
        if (!(seen[GOLDEN][c] & HSTEP_DIFFERS)) continue;
        golden++;
        const int kernel = fused_of(changes[c].row);
        if (seen[CHECKS][(size_t)(kernel == FUSED) * (size_t)n_changes + (size_t)c] & HSTEP_DIFFERS) both++;
        else print_change(&changes[c], why_it_survives(c));
    }
    printf("%d changes make a difference to golden cases, %d of them to the check.\n", golden, both);
}

static void report(void)
{
    int tried = 0, count = 0, refused = 0, undecided = 0;
    for (; tried < n_changes && count < wanted; tried++) {
        undecided += noticed[GOLDEN][tried] == UNDECIDED;
        if (noticed[GOLDEN][tried] != YES) continue;
        count++;
        refused += noticed[CHECKS][tried] == YES;
        if (noticed[CHECKS][tried] != YES) print_change(&changes[tried], why_it_survives(tried));
    }
    printf(
        "%d changes. Golden cases notice %d of them; %d more are left out, because %d cases saw them without notice.\n",
        tried, count, undecided, MOST_CASES);
    printf("The check refuses %d of %d, %.1f %%.\n", refused, count, 100.0 * refused / (count ? count : 1));
}

static void tell_time(const char *what)
{
    static double before;
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    const double now = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec);
    printf("%s: %.0f s of processors\n", what, now - before);
    fflush(stdout);
    before = now;
}

int main(int argc, char **argv)
{
    if ((argc != 4 && argc != 5) || !strchr(argv[0], '/')) {
        fprintf(stderr, "BUILD/tests/device_faults NUMBER SEED PROCESSES [FILE]\n");
        return 1;
    }
    wanted = atoi(argv[1]);
    seed = strtoull(argv[2], NULL, 0);
    is_every = !wanted;
    const int processes = atoi(argv[3]);
    list = test_source_text("tests/golden/hashes.txt");
    cases = golden_cases(&n_cases);
    setenv("FAKE_CUDA_OPEN", "1", 1);
    char image[4096];
    snprintf(image, sizeof image, "%.*scuda/fake/image", (int)(strrchr(argv[0], '/') - argv[0] + 1), argv[0]);
    setenv("HALFSTEP_CUDA_IMAGE", image, 1);
    hstep_emulation.most = 1L << 27;

    const int room = is_every ? ptx_row_count : 3 * wanted;
    changes = calloc((size_t)room, sizeof *changes);
    if (!list || !cases || !changes) return 1;
    for (int row = 0; is_every && row < ptx_row_count; row++) n_changes += change_row(&changes[n_changes], row);
    while (n_changes < room && !is_every) {
        const int row = (int)(next_random() % (uint64_t)ptx_row_count);
        int i = 0;
        while (i < n_changes && changes[i].row != row) i++;
        if (i == n_changes) n_changes += change_row(&changes[n_changes], row);
    }
    shared = shared_memory(sizeof *shared);
    seen[GOLDEN] = shared_memory((is_every ? 1 : (size_t)n_cases) * (size_t)n_changes);
    seen[CHECKS] = shared_memory((is_every ? 2 : (size_t)CHECKED) * (size_t)n_changes);
    for (int i = 0; i < 2; i++) noticed[i] = memset(shared_memory((size_t)n_changes), UNKNOWN, (size_t)n_changes);

    in_processes(processes, watch_checks);
    tell_time("Checks");
    if (!keep(argc > 4 ? argv[4] : NULL, "r")) {
        in_processes(processes, watch_cases);
        printf("%d of %d golden cases are equal.\n", shared->equal, n_cases);
        tell_time("Golden cases");
        in_processes(is_every ? 0 : processes, try_golden);
        tell_time("Golden cases with changes");
        if (argc > 4 && !keep(argv[4], "w")) perror(argv[4]);
    }
    in_processes(is_every ? 0 : processes, try_checks);
    tell_time("Checks with changes");
    if (is_every) report_every();
    else report();
    return 0;
}
