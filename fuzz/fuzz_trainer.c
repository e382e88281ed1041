/* Fuzzes one file of a training checkpoint, with checksums that match. The commands are inspect, generate, train --init
 * and train --resume. Each must end with status 0, or with 1 or 2 and one sentence.
 *
 * The first byte of an input selects the checkpoint (its recipe). The second selects the file: trainer.json,
 * config.json, or the header of a safetensors file, whose tensors stay as they are. The rest is the file's contents. */
#define FUZZ_NAME "fuzz_trainer"
#define HALFSTEP_ADVANCED
#include "fuzz.h"

#include "files.h"
#include "halfstep_io.h"
#include "program.h"

#include <jansson.h>

static const char *const recipes[] = {"adamw/bf16-kahan/int8", "schedulefree/f32", "adamw-delayed/bf16-ecc8/bf16-sr",
                                      "lamb/f16/dyn8"};
static const char *const names[] = {"trainer.json", "config.json", "optimizer.safetensors", "history.safetensors",
                                    "model.safetensors"};
enum { RECIPES = 4, FILES_OF_RUN = 5, ROOM = 1 << 17 };

static struct {
    uint8_t data[ROOM];
    size_t bytes, header; /* header: where the tensors begin; 0 for JSON */
} files[RECIPES][FILES_OF_RUN];
static char values[RECIPES][8][2][256];

#define WORDS(...) \
    (char *[]) { "halfstep", __VA_ARGS__, NULL }
#define COUNT(...) (int)(sizeof((char *[]){"halfstep", __VA_ARGS__}) / sizeof(char *))
#define PROGRAM(...) judge_program(COUNT(__VA_ARGS__), WORDS(__VA_ARGS__))

static void prepare(void)
{
    if (scratch[0]) return;
    make_scratch();
    demand(!chdir(scratch), "no folder");
    char text[1000], name[64];
    for (size_t i = 0; i < sizeof text; i++) text[i] = (char)(32 + i * i % 91);
    put_file("text", text, sizeof text);
    for (int r = 0; r < RECIPES; r++) {
        int status =
            PROGRAM("train", "lm", "--data", "text", "--recipe", (char *)(uintptr_t)recipes[r], "--width", "8",
                    "--depth", "1", "--heads", "2", "--context", "4", "--batch", "1", "--steps", "2", "--quiet",
                    "--sample-bytes", "1", "--eval-batches", "1", "--threads", "1", "--checkpoint", "good");
        demand(!status, program_errors);
        halfstep_checkpoint *checkpoint;
        demand(!halfstep_open_checkpoint(&checkpoint, "good", NULL, text, sizeof text), text);
        const char *key, *value;
        for (uint64_t v = 0; v < 8 && !halfstep_get_checkpoint_value(checkpoint, v, &key, &value); v++) {
            snprintf(values[r][v][0], sizeof values[r][v][0], "%s", key);
            snprintf(values[r][v][1], sizeof values[r][v][1], "%s", value);
        }
        halfstep_close_checkpoint(checkpoint);
        for (int f = 0; f < FILES_OF_RUN; f++) {
            snprintf(name, sizeof name, "good/%s", names[f]);
            files[r][f].bytes = get_file(name, files[r][f].data, ROOM);
            if (f < 2) continue;
            for (int i = 7; i >= 0; i--) files[r][f].header = files[r][f].header << 8 | files[r][f].data[i];
            files[r][f].header += 8;
        }
        remove_tree("good");
    }
}

/* Returns 1 for valid settings that take long or much memory, because running them shows nothing. Also for a log, which
 * would be written to any path. */
static int takes_long(const char *data, size_t bytes)
{
    static const char *const counts[] = {"batch",
                                         "micro-steps",
                                         "eval-batches",
                                         "sample-bytes",
                                         "val-every",
                                         "threads",
                                         "context",
                                         "width",
                                         "depth",
                                         "max_position_embeddings",
                                         "num_hidden_layers",
                                         "hidden_size"};
    json_t *object = json_loadb(data, bytes, 0, NULL);
    int found = 0;
    for (int level = 0; level < 2; level++) {
        const json_t *at = level ? json_object_get(object, "options") : object;
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            const json_t *value = json_object_get(at, counts[i]);
            found |= (json_is_string(value) ? strtod(json_string_value(value), NULL) : json_number_value(value)) > 64;
        }
        /* a log's path may be anywhere */
        const char *log = json_string_value(json_object_get(at, "log"));
        found |= log && log[0];
    }
    json_decref(object);
    return found;
}

static void save(int recipe, int changed, const uint8_t *data, size_t bytes)
{
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .step = 2, .no_sync = 1};
    char error[512];
    static uint8_t whole[2 * ROOM];
    demand(!halfstep_begin_checkpoint(&save, "run", &options, error, sizeof error), error);
    for (int f = 0; f < FILES_OF_RUN; f++) {
        const uint8_t *from = files[recipe][f].data;
        size_t count = files[recipe][f].bytes, header = files[recipe][f].header;
        if (f == changed && header) {
            for (int i = 0; i < 8; i++) whole[i] = (uint8_t)((uint64_t)bytes >> 8 * i);
            memcpy(whole + 8, data, bytes);
            memcpy(whole + 8 + bytes, from + header, count - header);
            from = whole;
            count = 8 + bytes + count - header;
        } else if (f == changed) {
            from = data;
            count = bytes;
        }
        demand(!halfstep_save_file(save, names[f], from, count, error, sizeof error), error);
    }
    for (int v = 0; v < 8 && values[recipe][v][0][0]; v++)
        demand(!halfstep_save_value(save, values[recipe][v][0], values[recipe][v][1], error, sizeof error), error);
    demand(!halfstep_commit_checkpoint(save, error, sizeof error), error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    prepare();
    if (size < 2 || size > ROOM) return 0;
    int recipe = data[0] % RECIPES, changed = data[1] % FILES_OF_RUN;
    if (changed < 2 && takes_long((const char *)data + 2, size - 2)) return 0;
    save(recipe, changed, data + 2, size - 2);
    int failed = PROGRAM("inspect", "run", "--json") != 0;
    failed |= PROGRAM("generate", "--checkpoint", "run", "--bytes", "2", "--threads", "1") != 0;
    failed |= PROGRAM("train", "lm", "--data", "text", "--init", "run", "--steps", "0", "--batch", "1",
                      "--eval-batches", "1", "--quiet", "--sample-bytes", "1", "--threads", "1") != 0;
    failed |= PROGRAM("train", "lm", "--data", "text", "--checkpoint", "run", "--resume", "--steps", "3", "--quiet",
                      "--threads", "1") != 0;
    if (failed) fuzz_rejected++;
    else fuzz_accepted++;
    remove_tree("run");
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER
static size_t make_input(uint8_t *data, size_t room)
{
    prepare();
    int recipe = (int)draw(RECIPES), file = (int)draw(FILES_OF_RUN);
    size_t header = files[recipe][file].header, bytes = header ? header - 8 : files[recipe][file].bytes;
    data[0] = (uint8_t)recipe;
    data[1] = (uint8_t)file;
    demand(bytes + 2 < room, "no room");
    memcpy(data + 2, files[recipe][file].data + (header ? 8 : 0), bytes);
    uint64_t kind = draw(4);
    /* Replaces a number by another one, so that the file stays JSON. */
    if (kind < 2) {
        static const char *const numbers[] = {"-1",     "0",   "1e308", "18446744073709551615", "9223372036854775808",
                                              "3.5",    "nan", "1",     "4294967296",           "-0",
                                              "1e-320", "inf", "99"};
        size_t at = draw(bytes), end;
        while (at < bytes && (data[2 + at] < '0' || data[2 + at] > '9')) at++;
        for (end = at; end < bytes && data[2 + end] && strchr("0123456789.e-", data[2 + end]);) end++;
        const char *number = numbers[draw(sizeof numbers / sizeof *numbers)];
        size_t length = strlen(number);
        memmove(data + 2 + at + length, data + 2 + end, bytes - end);
        memcpy(data + 2 + at, number, length);
        bytes = bytes - end + at + length;
    }
    return 2 + (kind ? bytes : mutate(data + 2, bytes, room - 2, "{}[]\",:0123456789-.e\\u/ abcdef_"));
}
#endif
