#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "args.h"
#include "checkpoint.h"
#include "commands.h"
#include "train.h"

struct inspect {
    int json, quick;
};

static const struct option rows[] = {
    {"quick", OPTION_FLAG, offsetof(struct inspect, quick), NULL, NULL, 0, 0, 0, NULL, "do not verify checksums"},
    OPTION_JSON(struct inspect),
};

static const struct command command = {
    "inspect", "FILE|DIR [options]",
    "Lists what a safetensors file or a checkpoint directory holds: tensors, types, shapes, sizes, metadata, and the position "
    "and settings of the run. A checkpoint's files are checked against their checksums.",
    NULL, 1, 1};

/* ---- One safetensors file ----------------------------------------------------------------------------------------------- */

static json_t *file_json(const halfstep_safetensors *file, uint64_t *elements, uint64_t *bytes)
{
    json_t *tensors = json_array(), *metadata = json_object();
    *elements = *bytes = 0;
    for (uint64_t i = 0; i < halfstep_safetensor_count(file); i++) {
        halfstep_safetensor_info info = {.struct_size = sizeof info};
        if (halfstep_get_safetensor_info(file, i, &info) != HALFSTEP_OK) continue;
        json_t *shape = json_array();
        for (uint64_t d = 0; d < info.ndim; d++) json_array_append_new(shape, json_integer((json_int_t)info.shape[d]));
        json_array_append_new(tensors, json_pack("{s:s,s:s,s:o,s:I}", "name", info.name, "dtype", info.dtype, "shape", shape,
                                                 "bytes", (json_int_t)info.bytes));
        *elements += info.elements;
        *bytes += info.bytes;
    }
    for (uint64_t i = 0; i < halfstep_safetensors_metadata_count(file); i++) {
        const char *key, *value;
        if (halfstep_get_safetensors_metadata(file, i, &key, &value) == HALFSTEP_OK)
            json_object_set_new(metadata, key, json_string(value));
    }
    return json_pack("{s:o,s:o,s:I,s:I}", "metadata", metadata, "tensors", tensors, "elements", (json_int_t)*elements, "bytes",
                     (json_int_t)*bytes);
}

static void print_metadata(const json_t *metadata)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)metadata, key, value) printf("  %s = %s\n", key, json_string_value(value));
}

static void print_tensors(const json_t *file)
{
    const json_t *tensors = json_object_get(file, "tensors"), *tensor;
    size_t i;
    int wide = 4;
    json_array_foreach(tensors, i, tensor) {
        int n = (int)strlen(json_string_value(json_object_get(tensor, "name")));
        if (n > wide) wide = n;
    }
    json_array_foreach(tensors, i, tensor) {
        const json_t *shape = json_object_get(tensor, "shape"), *size;
        char text[256] = "";
        size_t d, used = 0;
        json_array_foreach(shape, d, size) {
            if (used < sizeof text)
                used += (size_t)snprintf(text + used, sizeof text - used, "%s%" JSON_INTEGER_FORMAT, d ? " x " : "",
                                         json_integer_value(size));
        }
        printf("  %-*s  %-5s %14" JSON_INTEGER_FORMAT " bytes  %s\n", wide, json_string_value(json_object_get(tensor, "name")),
               json_string_value(json_object_get(tensor, "dtype")), json_integer_value(json_object_get(tensor, "bytes")), text);
    }
    printf("  %zu tensors, %" JSON_INTEGER_FORMAT " elements, %" JSON_INTEGER_FORMAT " bytes\n", json_array_size(tensors),
           json_integer_value(json_object_get(file, "elements")), json_integer_value(json_object_get(file, "bytes")));
}

static json_t *open_file(const char *path, char *error, size_t error_bytes)
{
    halfstep_safetensors *file;
    uint64_t elements, bytes;
    if (halfstep_open_safetensors(&file, path, error, error_bytes) != HALFSTEP_OK) return NULL;
    json_t *object = file_json(file, &elements, &bytes);
    halfstep_close_safetensors(file);
    return object;
}

static int inspect_file(const char *path, const struct inspect *inspect)
{
    char error[1024];
    json_t *object = open_file(path, error, sizeof error);
    if (!object) return failure(command.name, "%s", error);
    if (inspect->json) {
        json_object_set_new(object, "file", json_string(path));
        return print_json(object);
    }
    printf("%s\n", path);
    print_metadata(json_object_get(object, "metadata"));
    print_tensors(object);
    json_decref(object);
    return 0;
}

/* ---- A checkpoint directory ---------------------------------------------------------------------------------------------- */

static int has_suffix(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n >= m && strcmp(name + n - m, suffix) == 0;
}

static json_t *checkpoint_json(const halfstep_checkpoint *checkpoint, char *error, size_t error_bytes)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    halfstep_get_checkpoint_info(checkpoint, &info);
    json_t *files = json_object(), *object = json_object();
    json_int_t total = 0;
    for (uint64_t i = 0; i < info.files; i++) {
        halfstep_checkpoint_file file = {.struct_size = sizeof file};
        if (halfstep_get_checkpoint_file(checkpoint, i, &file) != HALFSTEP_OK) continue;
        json_t *entry = NULL;
        if (has_suffix(file.name, ".safetensors")) entry = open_file(file.path, error, error_bytes);
        else if (has_suffix(file.name, ".json")) {
            json_t *content = checkpoint_read_json(checkpoint, file.name, error, error_bytes);
            if (content) entry = json_pack("{s:o}", "content", content);
        } else entry = json_object();
        if (!entry) {
            json_decref(files);
            json_decref(object);
            return NULL;
        }
        char crc[24];
        snprintf(crc, sizeof crc, "%016" PRIx64, file.crc64);
        json_object_set_new(entry, "file_bytes", json_integer((json_int_t)file.bytes));
        json_object_set_new(entry, "crc64", json_string(crc));
        json_object_set_new(files, file.name, entry);
        total += (json_int_t)file.bytes;
    }
    const json_t *trainer = json_object_get(json_object_get(files, "trainer.json"), "content");
    const json_t *settings = json_object_get(json_object_get(files, "optimizer.safetensors"), "metadata");
    json_object_set_new(object, "directory", json_string(info.directory));
    json_object_set_new(object, "step", json_integer((json_int_t)info.step));
    json_object_set_new(object, "saves", json_integer((json_int_t)info.sequence));
    json_object_set(object, "recipe", json_object_get(settings, "recipe"));
    json_object_set(object, "seed", json_object_get(settings, "seed"));
    json_object_set(object, "options", json_object_get(trainer, "options"));
    json_object_set_new(object, "bytes", json_integer(total));
    json_object_set_new(object, "files", files);
    return object;
}

static void print_options(const json_t *options)
{
    const char *key;
    json_t *value;
    int at = 0;
    json_object_foreach((json_t *)options, key, value) {
        const char *text = json_string_value(value);
        if (!text || !text[0]) continue;
        int n = (int)(strlen(key) + strlen(text)) + 4;
        if (at && at + n > 98) at = 0, printf("\n");
        at += printf("%s--%s %s", at ? " " : "  ", key, text);
    }
    if (at) printf("\n");
}

static void print_checkpoint(const json_t *object)
{
    const json_t *files = json_object_get(object, "files");
    const char *recipe = json_string_value(json_object_get(object, "recipe"));
    const char *seed = json_string_value(json_object_get(object, "seed"));
    printf("%s\nstep %" JSON_INTEGER_FORMAT ", recipe %s, seed %s, %" JSON_INTEGER_FORMAT " bytes in all\n",
           json_string_value(json_object_get(object, "directory")), json_integer_value(json_object_get(object, "step")),
           recipe ? recipe : "not told", seed ? seed : "not told", json_integer_value(json_object_get(object, "bytes")));
    print_options(json_object_get(object, "options"));
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)files, name, file) {
        printf("\n%s, %" JSON_INTEGER_FORMAT " bytes, CRC-64 %s\n", name, json_integer_value(json_object_get(file, "file_bytes")),
               json_string_value(json_object_get(file, "crc64")));
        if (!json_object_get(file, "tensors")) continue;
        print_metadata(json_object_get(file, "metadata"));
        print_tensors(file);
    }
}

static int inspect_path(const char *path, const struct inspect *inspect)
{
    char error[1024], why[1024];
    halfstep_checkpoint *checkpoint;
    halfstep_open_options options = {.struct_size = sizeof options, .skip_contents = (uint32_t)inspect->quick};
    int code = halfstep_open_checkpoint(&checkpoint, path, &options, error, sizeof error);
    if (code != HALFSTEP_OK) {
        halfstep_safetensors *file;
        if (halfstep_open_safetensors(&file, path, why, sizeof why) == HALFSTEP_OK) {
            halfstep_close_safetensors(file);
            return inspect_file(path, inspect);
        }
        struct stat status;
        int folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
        return failure(command.name, "%s", folder || code != HALFSTEP_ERROR_NAME ? error : why);
    }
    json_t *object = checkpoint_json(checkpoint, error, sizeof error);
    halfstep_close_checkpoint(checkpoint);
    if (!object) return failure(command.name, "%s", error);
    if (inspect->json) return print_json(object);
    print_checkpoint(object);
    json_decref(object);
    return 0;
}

int cmd_inspect(int argc, char **argv)
{
    struct inspect inspect;
    struct args args;
    const struct option_group groups[] = {{"Options", rows, OPTION_COUNT(rows), &inspect}};
    int status = args_parse(&args, &command, groups, 1, argc, argv);
    if (status != ARGS_RUN) return status;
    status = inspect_path(args.word[0], &inspect);
    args_free(&args);
    return status;
}
