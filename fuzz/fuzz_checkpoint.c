/* Fuzzes the manifest of a checkpoint directory, or of one checkpoint in it. If it opens, every file it lists must
 * exist inside the directory with the listed size.
 *
 * The first byte of an input selects the manifest and the way to open the directory. */
#define FUZZ_NAME "fuzz_checkpoint"
#define HALFSTEP_ADVANCED
#include "fuzz.h"

#include "files.h"
#include "halfstep_io.h"

static char directory[600];

static void save(uint64_t step, const char *content)
{
    halfstep_checkpoint_save *save;
    halfstep_save_options options = {.struct_size = sizeof options, .keep = 2, .step = step, .no_sync = 1};
    char error[512];
    demand(!halfstep_begin_checkpoint(&save, directory, &options, error, sizeof error), error);
    demand(!halfstep_save_file(save, "model.bin", content, strlen(content), error, sizeof error), error);
    demand(!halfstep_save_file(save, "empty", "", 0, error, sizeof error), error);
    demand(!halfstep_save_value(save, "recipe", "adamw/f32", error, sizeof error), error);
    demand(!halfstep_commit_checkpoint(save, error, sizeof error), error);
}

static uint8_t outer[8192], inner[8192];
static size_t outer_bytes, inner_bytes;

static void prepare(void)
{
    if (directory[0]) return;
    make_scratch();
    snprintf(directory, sizeof directory, "%s/run", scratch);
    save(3, "three");
    save(4, "fours");
    outer_bytes = get_file("run/manifest.json", outer, sizeof outer);
    inner_bytes = get_file("run/checkpoint-4/manifest.json", inner, sizeof inner);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    halfstep_checkpoint *checkpoint;
    char error[1024];
    if (!size) return 0;
    prepare();
    int which = data[0] & 1;
    halfstep_open_options options = {
        .struct_size = sizeof options, .fallback = data[0] >> 1 & 1, .skip_contents = data[0] >> 2 & 1};
    const char *name = which ? "run/checkpoint-4/manifest.json" : "run/manifest.json";
    put_file(name, data + 1, size - 1);
    int code = halfstep_open_checkpoint(&checkpoint, directory, &options, error, sizeof error);
    demand((code == HALFSTEP_OK) == (checkpoint != NULL), "code and handle disagree");
    if (checkpoint) {
        fuzz_accepted++;
        halfstep_checkpoint_info info = {.struct_size = sizeof info};
        halfstep_checkpoint_file file = {.struct_size = sizeof file};
        const char *key, *value;
        demand(!halfstep_get_checkpoint_info(checkpoint, &info), "no info");
        demand(!strncmp(info.directory, directory, strlen(directory)), "a directory elsewhere");
        demand(!error[0] || !strncmp(error, "note: ", 6), "success with an error");
        demand(!info.fell_back || options.fallback, "an unwanted fallback");
        for (uint64_t i = 0; i < info.files; i++) {
            struct stat status;
            demand(!halfstep_get_checkpoint_file(checkpoint, i, &file), "no file");
            demand(!strchr(file.name, '/') && file.name[0] != '.', "a file elsewhere");
            demand(!stat(file.path, &status) && (uint64_t)status.st_size == file.bytes, "a file of another size");
            const char *path = halfstep_checkpoint_path(checkpoint, file.name);
            demand(path && !strcmp(path, file.path), "a file is not found by its name");
        }
        for (uint64_t i = 0; i < info.values; i++) {
            demand(!halfstep_get_checkpoint_value(checkpoint, i, &key, &value), "no value");
            demand(halfstep_checkpoint_value(checkpoint, key) != NULL, "a value is not found by its key");
        }
    } else {
        fuzz_rejected++;
        demand(strlen(error) > 20 && !strchr(error, '\n'), "no sentence");
        demand(code == HALFSTEP_ERROR_FORMAT || code == HALFSTEP_ERROR_IO || code == HALFSTEP_ERROR_NAME,
               "an odd failure");
    }
    halfstep_close_checkpoint(checkpoint);
    put_file(name, which ? inner : outer, which ? inner_bytes : outer_bytes);
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER
static size_t make_input(uint8_t *data, size_t room)
{
    prepare();
    data[0] = (uint8_t)draw(8);
    size_t bytes = data[0] & 1 ? inner_bytes : outer_bytes;
    memcpy(data + 1, data[0] & 1 ? inner : outer, bytes);
    /* Blanks change nothing, so some of these inputs are accepted. */
    if (draw(3) == 0) data[1 + bytes++] = " \n\t"[draw(3)];
    return 1 + mutate(data + 1, bytes, room - 1, "{}[]\",:0123456789-.e\\u/ ");
}
#endif
