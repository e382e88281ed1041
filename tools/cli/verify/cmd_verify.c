#define HALFSTEP_ADVANCED
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "cli/verify/golden.h"
#include "common/args/args.h"
#include "common/hash.h"
#include "trainer/run/run.h"

/* tests/golden/hashes.txt, embedded by the build. */
extern const char hstep_golden_hashes[];

struct verify {
    const char *isa, *write, *device;
    int64_t threads, every;
    int list, json;
};

static const char *available_isa(int32_t index)
{
    for (int32_t i = 0; i < halfstep_isa_count(); i++)
        if (halfstep_isa_available(i) && index-- == 0) return halfstep_isa_name(i);
    return NULL;
}

static const struct option rows[] = {
    {"isa", OPTION_CHOICE, offsetof(struct verify, isa), "NAME", NULL, 0, 0, 0, available_isa,
     "kernels to check (default: those in use)"},
    {"threads", OPTION_INTEGER, offsetof(struct verify, threads), "N", "0", 0, 1024, 0, NULL,
     "number of threads; 0: as many as a step would use"},
    {"device", OPTION_STRING, offsetof(struct verify, device), "NAME", "cpu", 0, 0, 0, NULL,
     "cpu, cuda or cuda:N; a GPU has to compute the same bits"},
    {"every", OPTION_INTEGER, offsetof(struct verify, every), "N", "1", 1, 1000000, 0, NULL,
     "check one case of N, for tools under which a case takes long"},
    {"list", OPTION_FLAG, offsetof(struct verify, list), NULL, NULL, 0, 0, 0, NULL,
     "print every case with the hash computed"},
    {"write", OPTION_STRING, offsetof(struct verify, write), "FILE", NULL, 0, 0, 0, NULL,
     "write the computed hashes to FILE instead of checking them"},
    OPTION_JSON(struct verify),
};

struct outcome {
    uint64_t hash;
    int listed, matches; /* the list has a hash for the case; the computed hash is that one */
};

/* The file of --write. It has another name until it is complete. It is opened before the hashes are computed, because
 * that takes a while. */
struct list {
    char *partial;
    FILE *file;
};

static int open_list(struct list *list, const char *path)
{
    list->partial = malloc(strlen(path) + 5);
    if (!list->partial) return failure("verify", "out of memory");
    sprintf(list->partial, "%s.new", path);
    list->file = fopen(list->partial, "w");
    return list->file ? 0 : failure("verify", "cannot write %s: %s", path, strerror(errno));
}

static int write_list(struct list *list, const char *path, const struct golden_case *cases,
                      const struct outcome *outcomes, int n)
{
    int bad = 0;
    for (int i = 0; i < n && !bad; i++)
        bad = fprintf(list->file, "%s %s %s %016" PRIx64 "\n", cases[i].recipe, cases[i].gradients, cases[i].generator,
                      outcomes[i].hash) < 0;
    bad |= fclose(list->file) != 0;
    list->file = NULL;
    if (!bad && rename(list->partial, path) == 0) return 0;
    failure("verify", "cannot write %s: %s", path, strerror(errno));
    unlink(list->partial);
    return 1;
}

/* Closes the file, and removes it if it is not complete. */
static void close_list(struct list *list)
{
    if (list->file) {
        fclose(list->file);
        unlink(list->partial);
    }
    free(list->partial);
}

/* Prints the results as JSON. Cases of the same recipe must be neighbours in the list. */
static int print_object(const struct golden_case *cases, const struct outcome *outcomes, int n, const char *device,
                        int threads, int passed)
{
    struct document d;
    json_t *object = document_begin(&d);
    put_text(&d, object, "isa", halfstep_isa());
    put_text(&d, object, "device", device);
    put_integer(&d, object, "threads", threads);
    put_integer(&d, object, "passed", passed);
    put_integer(&d, object, "failed", n - passed);
    json_t *hashes = put_object(&d, object, "hashes");
    for (int i = 0; i < n;) {
        char text[24];
        uint64_t hash = HASH_START;
        int first = i;
        for (; i < n && !strcmp(cases[i].recipe, cases[first].recipe); i++) hash = hash_word(hash, outcomes[i].hash);
        snprintf(text, sizeof text, "%016" PRIx64, hash_finish(hash));
        put_text(&d, hashes, cases[first].recipe, text);
    }
    return document_print(&d);
}

static int compute(const struct verify *v, const struct golden_case *cases, struct outcome *outcomes, int n)
{
    struct golden_layout layout = {.threads = (int32_t)v->threads, .device = v->device};
    int live = isatty(2);
    for (int i = 0; i < n; i++) {
        char error[300];
        uint64_t expected;
        if (golden_run(&cases[i], &layout, &outcomes[i].hash, error, sizeof error)) {
            if (live) fprintf(stderr, "\r\033[K");
            return failure("verify", "%s", error);
        }
        outcomes[i].listed = golden_expected(hstep_golden_hashes, &cases[i], &expected);
        outcomes[i].matches = outcomes[i].listed && expected == outcomes[i].hash;
        if (live && (i % 16 == 0 || i == n - 1)) fprintf(stderr, "\r%d of %d", i + 1, n);
    }
    if (live) fprintf(stderr, "\r\033[K");
    return 0;
}

static int report(const struct verify *v, const struct golden_case *cases, const struct outcome *outcomes, int n)
{
    int passed = 0, threads = v->threads ? (int)v->threads : halfstep_default_threads();
    for (int i = 0; i < n; i++) {
        passed += outcomes[i].matches;
        if (v->json) continue;
        const char *word = outcomes[i].matches ? "ok" : outcomes[i].listed ? "DIFFERS" : "NOT LISTED";
        if (v->list || !outcomes[i].matches)
            printf("%-10s %s %s %s %016" PRIx64 "\n", word, cases[i].recipe, cases[i].gradients, cases[i].generator,
                   outcomes[i].hash);
    }
    if (v->json && print_object(cases, outcomes, n, v->device, threads, passed)) return 1;
    if (!v->json && strcmp(v->device, "cpu"))
        printf("%s: %d of %d cases give the promised bits (%s)\n", passed == n ? "ok" : "FAILED", passed, n, v->device);
    else if (!v->json)
        printf("%s: %d of %d cases give the promised bits (%s kernels, %d thread%s)\n", passed == n ? "ok" : "FAILED",
               passed, n, halfstep_isa(), threads, threads == 1 ? "" : "s");
    return passed != n;
}

/* Keeps one of `every` cases. Returns the number of cases kept. */
static int thin(struct golden_case *cases, int n, int64_t every)
{
    int kept = 0;
    for (int64_t i = 0; i < n; i += every) cases[kept++] = cases[i];
    return kept;
}

static int check_cases(struct args *args, void *options)
{
    const struct verify *v = options;
    static char no_check[] = "HALFSTEP_DEVICE_CHECK=never";
    int status, n = 0;
    (void)args;
    struct golden_case *cases = golden_cases(&n);
    struct outcome *outcomes = cases ? calloc((size_t)n, sizeof *outcomes) : NULL;
    struct list list = {NULL, NULL};
    if (cases) n = thin(cases, n, v->every);
    if (!outcomes) status = failure("verify", "out of memory");
    else if (v->write && v->every > 1)
        status = failure("verify", "--write and --every exclude each other, because --write needs every case");
    else if (v->isa && halfstep_set_isa(v->isa) != HALFSTEP_OK)
        status = failure("verify", "this processor cannot run the kernels for %s", v->isa);
    /* A device that fails the library's own check is what this command is for. */
    else if (putenv(no_check)) status = failure("verify", "out of memory");
    else if (check_device("verify", v->device)) status = 1;
    else if (v->write && open_list(&list, v->write) != 0) status = 1;
    else if ((status = compute(v, cases, outcomes, n)) == 0)
        status = v->write ? write_list(&list, v->write, cases, outcomes, n) : report(v, cases, outcomes, n);
    close_list(&list);
    free(outcomes);
    free(cases);
    return status;
}

const struct command verify_command = {
    .name = "verify",
    .usage = "[options]",
    .summary =
        "Steps a fixed problem under every rule, weight format, state format and gradient format. Checks that all "
        "weights and states have the bits that every machine has to compute.",
    .notes = "Exit status: 1 if the bits of any case differ. In the JSON a recipe has one hash for all its cases.\n"
             "\n"
             "  halfstep verify --threads 1\n"
             "  HALFSTEP_ISA=scalar halfstep verify --every 50 --list\n",
    COMMAND_OPTIONS(rows, struct verify),
    .run = check_cases,
};
