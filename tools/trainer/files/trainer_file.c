#define HALFSTEP_ADVANCED
#include "trainer/files/trainer_file.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "io/json.h"

#define TEXT_LIMIT ((uint64_t)64 << 20)

/* ---- Reading ----------------------------------------------------------------------------------------------------- */

static char *read_whole(const char *path, uint64_t bytes, char *error, size_t error_bytes)
{
    FILE *file = fopen(path, "rb");
    char *text = file ? malloc((size_t)bytes + 1) : NULL;
    if (!file || !text) {
        snprintf(error, error_bytes, "%s: %s", path, file ? "out of memory" : strerror(errno));
    } else if (fread(text, 1, (size_t)bytes, file) != bytes || getc(file) != EOF || ferror(file)) {
        snprintf(error, error_bytes, "%s: %s", path,
                 ferror(file) ? strerror(errno) : "the file changed while it was read");
        free(text);
        text = NULL;
    } else {
        text[bytes] = 0;
    }
    if (file) fclose(file);
    return text;
}

static char *read_limited(const char *path, uint64_t size, size_t *bytes, char *error, size_t error_bytes)
{
    *bytes = (size_t)size;
    if (size <= TEXT_LIMIT) return read_whole(path, size, error, error_bytes);
    snprintf(error, error_bytes, "%s: %llu bytes are too many; at most 64 MiB are read", path,
             (unsigned long long)size);
    return NULL;
}

char *text_file_read(const char *path, size_t *bytes, char *error, size_t error_bytes)
{
    struct stat status;
    if (stat(path, &status) == 0 && S_ISREG(status.st_mode))
        return read_limited(path, (uint64_t)status.st_size, bytes, error, error_bytes);
    snprintf(error, error_bytes, "%s: %s", path, stat(path, &status) == 0 ? "is not a regular file" : strerror(errno));
    return NULL;
}

char *checkpoint_read_text(const halfstep_checkpoint *checkpoint, const char *name, size_t *bytes, char *error,
                           size_t error_bytes)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    halfstep_checkpoint_file file = {.struct_size = sizeof file};
    if (halfstep_get_checkpoint_info(checkpoint, &info) != HALFSTEP_OK) return NULL;
    for (uint64_t i = 0; i < info.files; i++)
        if (halfstep_get_checkpoint_file(checkpoint, i, &file) == HALFSTEP_OK && strcmp(file.name, name) == 0)
            return read_limited(file.path, file.bytes, bytes, error, error_bytes);
    snprintf(error, error_bytes, "%s: the checkpoint has no %s", info.directory, name);
    return NULL;
}

enum {
    FORMAT = 1,
    STEP = 2,
    OPTIONS = 4,
    DATA_BYTES = 8,
    DATA_HASH = 16,
    VAL_HASH = 32,
    THREADS = 64,
    NORM = 128,
    SECONDS = 256
};

/* Reads the options. Returns 0, or -1 if out of memory. Sets json->problem if the text is invalid. */
static int read_options(hstep_json *json, struct trainer_file *file)
{
    size_t capacity = 0;
    struct trainer_option option;
    for (size_t n = 0; hstep_json_member(json, &n, &option.name);) {
        if (hstep_json_peek(json) != '"') {
            hstep_json_skip(json);
            continue;
        }
        if (!hstep_json_string(json, &option.value)) return 0;
        if (trainer_file_option(file, option.name)) {
            hstep_json_fail(json, "an option twice");
            return 0;
        }
        if (file->options == capacity) {
            capacity = capacity ? 2 * capacity : 64;
            struct trainer_option *grown = realloc(file->option, capacity * sizeof *grown);
            if (!grown) return -1;
            file->option = grown;
        }
        file->option[file->options++] = option;
    }
    return 0;
}

/* Reads the value of one member. Returns the member's bit, or 0 for an unknown member, which is skipped. Sets
 * json->problem if the value is invalid, and `*lacking` if memory is out. */
static unsigned read_member(hstep_json *json, const char *key, struct trainer_file *file, uint64_t *format,
                            int *lacking)
{
    if (strcmp(key, "format") == 0) return hstep_json_number(json, format), FORMAT;
    if (strcmp(key, "step") == 0) return hstep_json_number(json, &file->step), STEP;
    if (strcmp(key, "data_bytes") == 0) return hstep_json_number(json, &file->data_bytes), DATA_BYTES;
    if (strcmp(key, "threads") == 0) return hstep_json_number(json, &file->threads), THREADS;
    if (strcmp(key, "data_hash") == 0) return hstep_json_string(json, &file->data_hash), DATA_HASH;
    if (strcmp(key, "val_hash") == 0) return hstep_json_string(json, &file->val_hash), VAL_HASH;
    if (strcmp(key, "released_norm") == 0) return hstep_json_real(json, &file->released_norm), NORM;
    if (strcmp(key, "seconds") == 0) return hstep_json_real(json, &file->seconds), SECONDS;
    if (strcmp(key, "options") == 0) return *lacking = read_options(json, file) != 0, OPTIONS;
    return hstep_json_skip(json), 0;
}

static int parse(hstep_json *json, struct trainer_file *file, int *lacking)
{
    const unsigned all = FORMAT | STEP | OPTIONS | DATA_BYTES | DATA_HASH | VAL_HASH | THREADS | NORM | SECONDS;
    unsigned seen = 0;
    uint64_t format = 0;
    const char *key;
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        unsigned member = read_member(json, key, file, &format, lacking);
        if (json->problem || *lacking) return -1;
        if (seen & member) return hstep_json_fail(json, "a name twice"), -1;
        seen |= member;
    }
    if (!hstep_json_end(json)) return -1;
    return seen == all && format == 1 ? 0 : -1;
}

int trainer_file_read(const halfstep_checkpoint *checkpoint, struct trainer_file *file, char *error, size_t error_bytes)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    size_t bytes;
    int lacking = 0;
    memset(file, 0, sizeof *file);
    file->memory = checkpoint_read_text(checkpoint, "trainer.json", &bytes, error, error_bytes);
    if (!file->memory) return HALFSTEP_ERROR_IO;
    hstep_json json = {file->memory, bytes, 0, NULL};
    if (parse(&json, file, &lacking) == 0) return HALFSTEP_OK;
    if (lacking) {
        no_memory(error, error_bytes);
        return HALFSTEP_ERROR_MEMORY;
    }
    halfstep_get_checkpoint_info(checkpoint, &info);
    if (json.problem)
        snprintf(error, error_bytes, "%s/trainer.json: byte %zu: %s", info.directory, json.at, json.problem);
    else snprintf(error, error_bytes, "%s/trainer.json lacks members or has an unknown format", info.directory);
    return HALFSTEP_ERROR_FORMAT;
}

void trainer_file_free(struct trainer_file *file)
{
    free(file->option);
    free(file->memory);
    memset(file, 0, sizeof *file);
}

const char *trainer_file_option(const struct trainer_file *file, const char *name)
{
    for (size_t i = 0; i < file->options; i++)
        if (strcmp(file->option[i].name, name) == 0) return file->option[i].value;
    return NULL;
}

/* ---- Writing ----------------------------------------------------------------------------------------------------- */

static void add_number(hstep_buffer *text, const char *key, double number)
{
    /* JSON cannot hold numbers that are not finite, and no run has one to keep. */
    if (!isfinite(number)) text->failed = 1;
    hstep_append_format(text, ",\n  \"%s\": %.17g", key, number);
}

static void add_string(hstep_buffer *text, const char *key, const char *string)
{
    hstep_append_format(text, ",\n  \"%s\": ", key);
    hstep_append_json(text, string);
}

void trainer_file_write(const struct trainer_file *file, hstep_buffer *text)
{
    hstep_append_format(text, "{\n  \"format\": 1,\n  \"step\": %llu,\n  \"options\": {",
                        (unsigned long long)file->step);
    for (size_t i = 0; i < file->options; i++) {
        hstep_append_format(text, i ? ",\n    " : "\n    ");
        hstep_append_json(text, file->option[i].name);
        hstep_append_format(text, ": ");
        hstep_append_json(text, file->option[i].value);
    }
    hstep_append_format(text, "\n  },\n  \"data_bytes\": %llu", (unsigned long long)file->data_bytes);
    add_string(text, "data_hash", file->data_hash);
    add_string(text, "val_hash", file->val_hash);
    hstep_append_format(text, ",\n  \"threads\": %llu", (unsigned long long)file->threads);
    add_number(text, "released_norm", file->released_norm);
    add_number(text, "seconds", file->seconds);
    hstep_append_format(text, "\n}\n");
}
