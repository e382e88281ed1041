/* Checks the promised bits: every case of tests/golden/hashes.txt, on every instruction set of this machine, with every
 * way of sharing the work. All cases run on one thread of the widest instruction set. A fifth of them run on one thread
 * of each other set, and a 31st in each other variant. With --all, all cases run on one thread and a quarter in each
 * other variant. With --short, these are a 61st and a 211th. Reads the list from the source tree. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define HALFSTEP_ADVANCED
#include <inttypes.h>

#ifndef _WIN32
#include <unistd.h>
#endif

#include "fused.h"
#include "test.h"
/* Compiled in rather than linked. The test then needs the core library only, and runs where the program is not
 * built. */
#include "golden_case.h"

/* ThreadSanitizer sees nothing in one thread, and the same in every instruction set. */
#ifdef __SANITIZE_THREAD__
enum { THREADS_ONLY = 1 };
#else
enum { THREADS_ONLY = 0 };
#endif

/* A host whose "threads" are one loop that starts at the far end. Tasks that wait for each other hang here. */
static void run_backwards(void *host, halfstep_task task, void *argument, int64_t n)
{
    (void)host;
    while (n-- > 0) task(argument, n);
}

static const struct variant {
    const char *name;
    int threads, serial, parts, by_columns, tiles;
} variants[] = {
    {"1 thread", 1, 0, 1, 0, 0},
    {"3 threads", 3, 0, 1, 0, 0},
    {"8 threads", 8, 0, 1, 0, 0},
    {"host's serial loop", 0, 1, 1, 0, 0},
    {"tiles only, 3 threads", 3, 0, 1, 0, 1},
    {"2 shards of rows", 1, 0, 2, 0, 0},
    {"3 shards of rows, 3 threads", 3, 0, 3, 0, 0},
    {"3 shards of rows, tiles only, host's serial loop", 0, 1, 3, 0, 1},
    {"2 shards of columns", 1, 0, 2, 1, 0},
    {"3 shards of columns, tiles only, 8 threads", 8, 0, 3, 1, 1},
};

#ifndef _WIN32
/* Uses children, because the library looks at the environment once, when it first counts. */
static void test_environment(void)
{
    TEST("HALFSTEP_ISA chooses the kernels") {
        for (int32_t i = 0; i < halfstep_isa_count(); i++) {
            if (!halfstep_isa_available(i)) continue;
            pid_t child = fork();
            if (!child) {
                setenv("HALFSTEP_ISA", halfstep_isa_name(i), 1);
                test_leave(strcmp(halfstep_isa(), halfstep_isa_name(i)) != 0);
            }
            CHECK(test_child_status(child) == 0, "HALFSTEP_ISA=%s was not followed", halfstep_isa_name(i));
        }
    }
}
#endif

/* Returns 1 if a line of hashes.txt belongs to one of the cases. */
static int listed(const struct golden_case *cases, int n, const char *line)
{
    for (int i = 0; i < n; i++) {
        char key[GOLDEN_RECIPE + 64];
        int length = snprintf(key, sizeof key, "%s %s %s ", cases[i].recipe, cases[i].gradients, cases[i].generator);
        if (!strncmp(line, key, (size_t)length)) return 1;
    }
    return 0;
}

int main(int argc, char **argv)
{
    int n = 0;
    test_init(argc, argv);
#ifndef _WIN32
    test_environment();
#endif
    char *list = test_source_text("tests/golden/hashes.txt");
    struct golden_case *cases = golden_cases(&n);
    const char *widest = halfstep_isa();
    int variant_count = COUNT(variants);
    TEST("every case is listed once, and every line is a case") {
        CHECK(cases && n > 0, "no cases");
        int lacking = 0, lines = 0, lost = 0;
        for (int i = 0; i < n; i++) {
            uint64_t hash;
            if (!golden_expected(list, &cases[i], &hash) && !lacking++)
                printf("     not listed: %s %s %s\n", cases[i].recipe, cases[i].gradients, cases[i].generator);
        }
        CHECK(!lacking,
              "tests/golden/hashes.txt lacks %d of %d cases: after a new row 'make golden' adds them (docs/adding.md)",
              lacking, n);
        for (const char *line = list; *line; line += strcspn(line, "\n"), line += *line == '\n', lines++) {
            if (listed(cases, n, line)) continue;
            if (!lost++) printf("     no case: %.*s\n", (int)strcspn(line, "\n"), line);
        }
        CHECK(!lost,
              "%d lines of tests/golden/hashes.txt are no case: a new row takes no promise away (docs/adding.md)",
              lost);
        EQUAL(lines - lost, n - lacking);
    }
    for (int32_t isa = 0; isa < halfstep_isa_count(); isa++) {
        const int is_widest = !strcmp(halfstep_isa_name(isa), widest);
        if (!halfstep_isa_available(isa) || (THREADS_ONLY && !is_widest)) continue;
        for (int v = 0; v < variant_count; v++) {
            const struct variant *variant = &variants[v];
            if ((THREADS_ONLY && variant->threads == 1) || !use_fused(!variant->tiles)) continue;
            char name[128];
            snprintf(name, sizeof name, "%s: %s", halfstep_isa_name(isa), variant->name);
            TEST(name) {
                struct golden_layout layout = {.threads = variant->threads,
                                               .run = variant->serial ? run_backwards : NULL,
                                               .parts = variant->parts,
                                               .by_columns = variant->by_columns};
                CHECK(halfstep_set_isa(halfstep_isa_name(isa)) == HALFSTEP_OK, "halfstep_set_isa");
                int stride = BY_LENGTH(v ? 211 : 61, v ? 31 : is_widest ? 1 : 5, v ? 4 : 1);
                for (int i = (v + isa * variant_count) % stride; i < n; i += stride)
                    check_golden(list, &cases[i], &layout);
            }
            test_close_group();
        }
    }
    free(cases);
    free(list);
    return test_done();
}
