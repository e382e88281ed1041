/* For tests that run the program in their own process, in a folder of their own. Command lines are texts, and
 * checkpoints are made from others. */
#ifndef HALFSTEP_TESTS_PROGRAM_LINES_H
#define HALFSTEP_TESTS_PROGRAM_LINES_H

#define HALFSTEP_ADVANCED
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>

#include "halfstep_io.h"
#include "test.h"

static void demand(int condition, const char *what)
{
    if (condition) return;
    printf("FAIL %s\n", what);
    exit(1);
}

#include "fuzz/files.h"
#include "fuzz/program.h"

static char printed[1 << 17];

/* Runs the program with the words of a line; "_" is an empty word. Leaves its output in `printed` and
 * program_errors. */
static int program(const char *line)
{
    static char copy[1 << 15];
    static char *words[400];
    int n = 0;
    demand(strlen(line) < sizeof copy, "a long line");
    strcpy(copy, line);
    words[n++] = (char *)(uintptr_t)"halfstep";
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " "))
        words[n++] = strcmp(word, "_") ? word : word + 1;
    words[n] = NULL;
    int status = run_program(n, words);
    ssize_t got = pread(taken[0], printed, sizeof printed - 1, 0);
    printed[got > 0 ? got : 0] = 0;
    return status;
}

/* Makes a file that keeps the states of two tensors, after two steps. The second tensor has a group of its own, with
 * `second` for its recipe. */
static inline void put_store(const char *name, const char *first, const char *second)
{
    static uint16_t weight[2][64 * 128];
    static float gradient[64 * 128];
    static void *weights[] = {weight[0], weight[1]};
    static const void *const gradients[] = {gradient, gradient};
    halfstep_optimizer *optimizer;
    halfstep_store *store;
    char error[600];
    int32_t index;
    const halfstep_options options = {.struct_size = sizeof options, .seed = 1};
    const halfstep_call step = {.struct_size = sizeof step, .weights = weights, .gradients = gradients};
    demand(!halfstep_create(&options, &optimizer), "no optimizer");
    for (int i = 0; i < 2; i++) {
        halfstep_tensor tensor = {.struct_size = sizeof tensor,
                                  .name = i ? "norm.weight" : "lm_head.weight",
                                  .ndim = 2 - i,
                                  .rows = i ? 8 : 64,
                                  .row_length = i ? 1 : 128,
                                  .gradient = "f32"};
        demand(!halfstep_add_group(optimizer, i ? second : first, &tensor.group), "a group");
        const int failed = halfstep_add_tensor(optimizer, &tensor, &index);
        demand(!failed, halfstep_error_detail(optimizer));
    }
    demand(!halfstep_store_create(name, optimizer, weights, NULL, &store, error, sizeof error), error);
    for (int i = 0; i < 2; i++) demand(!halfstep_run(optimizer, &step), "a step");
    halfstep_store_close(store);
    halfstep_destroy(optimizer);
}

static const char *const names[] = {"trainer.json", "config.json", "optimizer.safetensors", "history.safetensors",
                                    "model.safetensors"};

/* Saves the checkpoint `from` again as `to`, with one file changed and valid checksums. The first `old` in the file
 * becomes `new`; if `old` is NULL the file is left out. */
static inline void forge(const char *from, const char *to, const char *changed, const char *old, const char *new)
{
    static uint8_t data[1 << 18];
    char error[600], path[300];
    halfstep_checkpoint *good;
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .step = 2, .no_sync = 1};
    remove_tree(to);
    demand(!halfstep_open_checkpoint(&good, from, NULL, error, sizeof error), error);
    demand(!halfstep_begin_checkpoint(&save, to, &options, error, sizeof error), error);
    for (size_t f = 0; f < COUNT(names); f++) {
        int here = !strcmp(names[f], changed);
        if (here && !old) continue;
        snprintf(path, sizeof path, "%s/%s", from, names[f]);
        size_t bytes = get_file(path, data, sizeof data / 2);
        if (here) {
            size_t length = strlen(old), at = 0, instead = strlen(new);
            while (at + length <= bytes && memcmp(data + at, old, length)) at++;
            demand(at + length <= bytes, old);
            /* A safetensors header must keep its length. */
            demand(f < 2 || length == instead, new);
            memmove(data + at + instead, data + at + length, bytes - at - length);
            memcpy(data + at, new, instead);
            bytes = bytes - length + instead;
        }
        demand(!halfstep_save_file(save, names[f], data, bytes, error, sizeof error), error);
    }
    const char *key, *value;
    for (uint64_t v = 0; !halfstep_get_checkpoint_value(good, v, &key, &value); v++)
        demand(!halfstep_save_value(save, key, value, error, sizeof error), error);
    demand(!halfstep_commit_checkpoint(save, error, sizeof error), error);
    halfstep_close_checkpoint(good);
}

#endif
