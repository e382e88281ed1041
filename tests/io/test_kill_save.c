/* Kills a process at random instants of saving, and opens what it left. That must be the last checkpoint reported as
 * saved, or the one being saved, complete to the last byte. It must never be older than before.
 *
 *   test_kill_save [--all | KILLS [SEED [DIRECTORY]]]     (200 kills; by itself 40)
 *
 * The same seed gives the same instants and sizes, but not the same scheduling. A failure may need some rounds to
 * recur. */
#define HALFSTEP_ADVANCED
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "halfstep_io.h"
#include "test.h"

enum { MAX_BYTES = 8 << 20 };

/* Memory shared by child and parent, which outlives the child. */
typedef struct report {
    _Atomic uint64_t begun, committed, failed;
} report;

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 33) * UINT64_C(0xff51afd7ed558ccd);
    x = (x ^ x >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return x ^ x >> 33;
}

/* Returns the number of words of checkpoint k, 1 to 8 MiB. Number and words follow from k and the seed. */
static uint64_t model_words(uint64_t seed, uint64_t k) { return ((1 << 20) + mix(seed ^ k << 20) % (7 << 20)) / 8; }

static void make_model(uint64_t *words, uint64_t seed, uint64_t k)
{
    uint64_t count = model_words(seed, k), state = mix(seed + k);
    for (uint64_t i = 0; i < count; i++) words[i] = state += UINT64_C(0x9e3779b97f4a7c15);
}

static int save(const char *dir, uint64_t seed, uint64_t k, uint64_t *words, char *text, size_t text_size)
{
    halfstep_safetensors_writer *writer;
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .keep = 1 + (uint32_t)(k % 3), .step = k};
    uint64_t shape = model_words(seed, k);
    char config[64];
    snprintf(config, sizeof config, "{\"k\": %llu}\n", (unsigned long long)k);
    make_model(words, seed, k);
    int code = halfstep_create_safetensors_writer(&writer);
    if (!code) code = halfstep_declare_safetensor(writer, "model", "U64", 1, &shape, words, text, text_size);
    if (!code) code = halfstep_begin_checkpoint(&save, dir, &options, text, text_size);
    if (code) return code;
    halfstep_save_safetensors(save, "model.safetensors", writer, NULL, NULL, text, text_size);
    halfstep_save_file(save, "config.json", config, strlen(config), text, text_size);
    halfstep_save_file(save, "trainer.json", &k, sizeof k, text, text_size);
    code = halfstep_commit_checkpoint(save, text, text_size);
    halfstep_destroy_safetensors_writer(writer);
    return code;
}

static void save_forever(const char *dir, uint64_t seed, uint64_t k, report *shared)
{
    uint64_t *words = malloc(MAX_BYTES);
    char text[512];
    if (!words) _exit(1);
    for (;; k++) {
        shared->begun = k;
        if (save(dir, seed, k, words, text, sizeof text)) {
            fprintf(stderr, "save %llu: %s\n", (unsigned long long)k, text);
            shared->failed = 1;
            _exit(1);
        }
        shared->committed = k;
    }
}

/* Compares all of the checkpoint in dir. Returns its number, or 0 and a text if anything is wrong. */
static uint64_t load(const char *dir, uint64_t seed, char *text, size_t text_size)
{
    static uint64_t expected[MAX_BYTES / 8], found[MAX_BYTES / 8];
    halfstep_checkpoint *checkpoint;
    halfstep_safetensors *file = NULL;
    uint64_t k = 0, index = 0;
    if (halfstep_open_checkpoint(&checkpoint, dir, NULL, text, text_size)) return 0;
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    halfstep_safetensor_info tensor = {.struct_size = sizeof tensor};
    halfstep_get_checkpoint_info(checkpoint, &info);
    if (!halfstep_open_safetensors(&file, halfstep_checkpoint_path(checkpoint, "model.safetensors"), text, text_size) &&
        !halfstep_safetensor_find(file, "model", &index) && !halfstep_get_safetensor_info(file, index, &tensor)) {
        uint64_t bytes = 8 * model_words(seed, info.step);
        make_model(expected, seed, info.step);
        if (tensor.bytes != bytes)
            snprintf(text, text_size, "checkpoint %llu has %llu bytes", (unsigned long long)info.step,
                     (unsigned long long)tensor.bytes);
        else if (!halfstep_read_safetensor(file, index, 0, found, bytes, text, text_size)) {
            if (memcmp(expected, found, bytes)) snprintf(text, text_size, "the model differs");
            else k = info.step;
        }
    }
    uint64_t trainer = 0;
    FILE *stream = fopen(halfstep_checkpoint_path(checkpoint, "trainer.json"), "rb");
    if (!stream || fread(&trainer, sizeof trainer, 1, stream) != 1 || trainer != info.step) {
        snprintf(text, text_size, "trainer.json is of checkpoint %llu", (unsigned long long)trainer);
        k = 0;
    }
    if (stream) fclose(stream);
    halfstep_close_safetensors(file);
    halfstep_close_checkpoint(checkpoint);
    return k;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void remove_all(const char *dir)
{
    pid_t child = fork();
    if (!child) {
        execlp("rm", "rm", "-rf", dir, (char *)NULL);
        _exit(1);
    }
    if (child > 0) waitpid(child, NULL, 0);
}

int main(int argc, char **argv)
{
    int next = test_init(argc, argv);
    long kills = argc > next ? strtol(argv[next], NULL, 10) : UNLESS_ALL(40, 200);
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 20250 + (uint64_t)kills;
    const char *base = getenv("TMPDIR");
    char own[512], dir[600], text[1024] = "";
    report *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    test_filter = "";
    snprintf(own, sizeof own, "%s/halfstep-kill-XXXXXX", argc > 3 ? argv[3] : base && *base ? base : P_tmpdir);
    if (kills < 1 || shared == MAP_FAILED || !mkdtemp(own)) {
        fprintf(stderr, "%s: cannot start in %s: %s\n", argv[0], own, strerror(errno));
        return 1;
    }
    snprintf(dir, sizeof dir, "%s/run", own);
    printf("%ld kills, seed %llu\n", kills, (unsigned long long)seed);

    TEST("a kill at any instant of a save leaves a whole checkpoint") {
        /* The time of one save is the span in which the instants are drawn. */
        uint64_t *words = malloc(MAX_BYTES), last = 1, in_save = 0, new_state = 0, next = 2;
        double start = seconds();
        CHECK(words && !save(dir, seed, 1, words, text, sizeof text), "the first save: %s", text);
        double span = 2.0 * (seconds() - start);
        if (span > 0.15) span = 0.15;
        free(words);
        long round = 0;
        for (; round < kills && !test_group_failed; round++) {
            shared->begun = shared->committed = last;
            pid_t child = fork();
            if (!child) save_forever(dir, seed, next, shared);
            if (child < 0) {
                FAIL("fork: %s", strerror(errno));
                break;
            }
            double wait = span * (double)(mix(seed * 31 + (uint64_t)round) >> 11) / (double)(UINT64_C(1) << 53);
            struct timespec pause = {(time_t)wait, (long)(1e9 * (wait - (double)(time_t)wait))};
            nanosleep(&pause, NULL);
            kill(child, SIGKILL);
            int status = test_child_status(child);
            uint64_t begun = shared->begun, committed = shared->committed;
            CHECK(!shared->failed && WIFSIGNALED(status), "round %ld: a save failed by itself", round);
            uint64_t k = load(dir, seed, text, sizeof text);
            CHECK(k, "round %ld, killed %.6f s after its start in save %llu: %s", round, wait,
                  (unsigned long long)begun, text);
            CHECK(k == committed || k == begun, "round %ld: opened %llu; %llu was saved and %llu begun", round,
                  (unsigned long long)k, (unsigned long long)committed, (unsigned long long)begun);
            CHECK(k >= last, "round %ld: opened %llu after %llu", round, (unsigned long long)k,
                  (unsigned long long)last);
            in_save += begun != committed;
            new_state += begun != committed && k == begun;
            last = k;
            /* Takes a fresh number, so that a half-made save cannot pass for a later whole one. */
            next = begun + 1;
        }
        CHECK(in_save * 2 >= (uint64_t)round, "only %llu of %ld kills hit a save", (unsigned long long)in_save, round);
        printf("     %ld kills, %llu in mid-save, of which %llu after the new state was in place; %llu saves begun; "
               "%.1f s\n",
               round, (unsigned long long)in_save, (unsigned long long)new_state, (unsigned long long)(next - 1),
               seconds() - start);
        if (test_group_failed)
            printf("     reproduce: %s %ld %llu   (the directory is kept: %s)\n", argv[0], kills,
                   (unsigned long long)seed, dir);
    }
    if (!test_group_failed) remove_all(own);
    return test_done();
}
