#define HALFSTEP_ADVANCED
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/document.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/model_files.h"
#include "trainer/files/packed_list.h"
#include "trainer/files/trainer_file.h"
#include "trainer/run/run.h"

struct inspect {
    int json, quick;
};

static const struct option rows[] = {
    {"quick", OPTION_FLAG, offsetof(struct inspect, quick), NULL, NULL, 0, 0, 0, NULL,
     "do not verify the checksums of a checkpoint"},
    OPTION_JSON(struct inspect),
};

/* ---- One safetensors file ---------------------------------------------------------------------------------------- */

static int tensor_info(const halfstep_safetensors *file, uint64_t index, halfstep_safetensor_info *info)
{
    *info = (halfstep_safetensor_info){.struct_size = sizeof *info};
    return halfstep_get_safetensor_info(file, index, info) == HALFSTEP_OK;
}

/* Reads which tensors are packed weights. A list that is wrong counts as none, and the metadata show it. Fails without
 * memory. */
static int read_packed(const halfstep_safetensors *file, struct packed_list *list, char *error, size_t error_bytes)
{
    int status = packed_list_read(file, "", list, error, error_bytes);
    if (status < 0) packed_list_free(list);
    if (status < 0) error[0] = 0;
    return status > 0 ? -1 : 0;
}

static void put_file(struct document *d, json_t *in, const halfstep_safetensors *file, const struct packed_list *list)
{
    uint64_t elements = 0, bytes = 0;
    json_t *metadata = put_object(d, in, "metadata");
    for (uint64_t i = 0; i < halfstep_safetensors_metadata_count(file); i++) {
        const char *key, *value;
        if (halfstep_get_safetensors_metadata(file, i, &key, &value) == HALFSTEP_OK) put_text(d, metadata, key, value);
    }
    json_t *tensors = put_array(d, in, "tensors");
    for (uint64_t i = 0; i < halfstep_safetensor_count(file); i++) {
        halfstep_safetensor_info info;
        if (!tensor_info(file, i, &info)) continue;
        json_t *tensor = put_object(d, tensors, NULL);
        put_text(d, tensor, "name", info.name);
        put_text(d, tensor, "dtype", info.dtype);
        json_t *shape = put_array(d, tensor, "shape");
        for (uint64_t k = 0; k < info.ndim; k++) put_integer(d, shape, NULL, (int64_t)info.shape[k]);
        put_integer(d, tensor, "bytes", (int64_t)info.bytes);
        const struct packed_weight *packed = packed_list_find(list, info.name);
        if (packed) put_text(d, tensor, "format", packed->format);
        if (packed) put_integer(d, tensor, "columns", packed->columns);
        elements += info.elements;
        bytes += info.bytes;
    }
    put_integer(d, in, "elements", (int64_t)elements);
    put_integer(d, in, "bytes", (int64_t)bytes);
}

int print_words(const char *before, const char *text, const char *after)
{
    printf("%s", before);
    int characters = plain_print(stdout, text);
    printf("%s", after);
    return characters;
}

static void print_shape(const halfstep_safetensor_info *info)
{
    for (uint64_t k = 0; k < info->ndim; k++) printf("%s%llu", k ? " x " : "", (unsigned long long)info->shape[k]);
}

static void print_file(const halfstep_safetensors *file, const struct packed_list *list)
{
    halfstep_safetensor_info info;
    uint64_t elements = 0, bytes = 0, n = halfstep_safetensor_count(file);
    int wide = 4;
    for (uint64_t i = 0; i < halfstep_safetensors_metadata_count(file); i++) {
        const char *key, *value;
        if (halfstep_get_safetensors_metadata(file, i, &key, &value) != HALFSTEP_OK) continue;
        if (list->n && strcmp(key, HALFSTEP_PACKED_KEY) == 0) continue;
        print_words("  ", key, "");
        print_words(" = ", value, "\n");
    }
    for (uint64_t i = 0; i < n; i++)
        if (tensor_info(file, i, &info) && (int)strlen(info.name) > wide) wide = (int)strlen(info.name);
    for (uint64_t i = 0; i < n; i++) {
        if (!tensor_info(file, i, &info)) continue;
        int columns = print_words("  ", info.name, "");
        printf("%*s  %-5s %14llu bytes  ", columns < wide ? wide - columns : 0, "", info.dtype,
               (unsigned long long)info.bytes);
        print_shape(&info);
        const struct packed_weight *packed = packed_list_find(list, info.name);
        if (packed) printf(", %s of %lld columns", packed->format, (long long)packed->columns);
        printf("\n");
        elements += info.elements;
        bytes += info.bytes;
    }
    printf("  %llu tensors, %llu elements, %llu bytes\n", (unsigned long long)n, (unsigned long long)elements,
           (unsigned long long)bytes);
}

static int inspect_file(const char *path, const halfstep_safetensors *file, const struct inspect *inspect)
{
    char error[1024] = "";
    struct packed_list list;
    int status = read_packed(file, &list, error, sizeof error) == 0 ? 0 : failure("inspect", "%s", error);
    if (status == 0 && inspect->json) {
        struct document d;
        document_begin(&d);
        put_file(&d, d.root, file, &list);
        put_text(&d, d.root, "file", path);
        status = document_print(&d);
    } else if (status == 0) {
        print_words("", path, "\n");
        print_file(file, &list);
    }
    packed_list_free(&list);
    return status;
}

/* ---- A checkpoint directory -------------------------------------------------------------------------------------- */

static int has_suffix(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);
    return n >= m && strcmp(name + n - m, suffix) == 0;
}

/* One file of a checkpoint, opened before anything is printed. */
struct part {
    halfstep_checkpoint_file info;
    halfstep_safetensors *file; /* NULL if it is no safetensors file */
    struct packed_list packed;
};

struct checkpoint {
    const halfstep_checkpoint *opened;
    halfstep_checkpoint_info info;
    struct part *part;
    const char *recipe, *seed; /* NULL if the checkpoint does not say */
    struct trainer_file trainer;
    uint64_t bytes;
};

static int open_parts(struct checkpoint *c, char *error, size_t error_bytes)
{
    c->part = calloc(c->info.files ? c->info.files : 1, sizeof *c->part);
    if (!c->part) {
        no_memory(error, error_bytes);
        return -1;
    }
    for (uint64_t i = 0; i < c->info.files; i++) {
        struct part *part = &c->part[i];
        part->info.struct_size = sizeof part->info;
        if (halfstep_get_checkpoint_file(c->opened, i, &part->info) != HALFSTEP_OK) return -1;
        c->bytes += part->info.bytes;
        if (has_suffix(part->info.name, ".safetensors") &&
            (halfstep_open_safetensors(&part->file, part->info.path, error, error_bytes) != HALFSTEP_OK ||
             read_packed(part->file, &part->packed, error, error_bytes) != 0))
            return -1;
        if (strcmp(part->info.name, "trainer.json") == 0) {
            int code = trainer_file_read(c->opened, &c->trainer, error, error_bytes);
            /* The trainer.json of another program has no options that could be listed here. */
            if (code == HALFSTEP_ERROR_FORMAT) trainer_file_free(&c->trainer);
            else if (code != HALFSTEP_OK) return -1;
        }
        if (strcmp(part->info.name, "optimizer.safetensors") != 0) continue;
        c->recipe = halfstep_safetensors_metadata_find(part->file, "recipe");
        if (!c->recipe) c->recipe = halfstep_safetensors_metadata_find(part->file, "rule"); /* of several groups */
        c->seed = halfstep_safetensors_metadata_find(part->file, "seed");
    }
    return 0;
}

static int put_content(struct document *d, json_t *in, const struct checkpoint *c, const struct part *part, char *error,
                       size_t error_bytes)
{
    char why[256];
    size_t bytes;
    char *text = checkpoint_read_text(c->opened, part->info.name, &bytes, error, error_bytes);
    if (!text) return -1;
    int bad = put_json(d, in, "content", text, bytes, why, sizeof why);
    free(text);
    if (bad) snprintf(error, error_bytes, "%s: %s", part->info.path, why);
    return bad;
}

static int put_checkpoint(struct document *d, const struct checkpoint *c, char *error, size_t error_bytes)
{
    json_t *object = document_begin(d);
    put_text(d, object, "directory", c->info.directory);
    put_integer(d, object, "step", (int64_t)c->info.step);
    put_integer(d, object, "saves", (int64_t)c->info.sequence);
    if (c->recipe) put_text(d, object, "recipe", c->recipe);
    if (c->seed) put_text(d, object, "seed", c->seed);
    json_t *options = c->trainer.options ? put_object(d, object, "options") : NULL;
    for (size_t i = 0; i < c->trainer.options; i++)
        put_text(d, options, c->trainer.option[i].name, c->trainer.option[i].value);
    put_integer(d, object, "bytes", (int64_t)c->bytes);
    json_t *files = put_object(d, object, "files");
    for (uint64_t i = 0; i < c->info.files; i++) {
        const struct part *part = &c->part[i];
        char crc[24];
        json_t *entry = put_object(d, files, part->info.name);
        if (part->file) put_file(d, entry, part->file, &part->packed);
        if (has_suffix(part->info.name, ".json") && put_content(d, entry, c, part, error, error_bytes) != 0) return -1;
        put_integer(d, entry, "file_bytes", (int64_t)part->info.bytes);
        snprintf(crc, sizeof crc, "%016" PRIx64, part->info.crc64);
        put_text(d, entry, "crc64", crc);
    }
    return 0;
}

static void print_options(const struct trainer_file *trainer)
{
    int at = 0;
    for (size_t i = 0; i < trainer->options; i++) {
        const struct trainer_option *option = &trainer->option[i];
        if (!option->value[0]) continue;
        int n = (int)(strlen(option->name) + strlen(option->value)) + 4;
        if (at && at + n > 98) at = 0, printf("\n");
        at += printf("%s--", at ? " " : "  ");
        at += print_words("", option->name, " ") + 1;
        at += print_words("", option->value, "");
    }
    if (at) printf("\n");
}

static int print_checkpoint(const struct checkpoint *c)
{
    print_words("", c->info.directory, "\n");
    printf("step %llu", (unsigned long long)c->info.step);
    print_words(", recipe ", c->recipe ? c->recipe : "unknown", "");
    print_words(", seed ", c->seed ? c->seed : "unknown", "");
    printf(", %llu bytes in all\n", (unsigned long long)c->bytes);
    print_options(&c->trainer);
    for (uint64_t i = 0; i < c->info.files; i++) {
        const struct part *part = &c->part[i];
        print_words("\n", part->info.name, "");
        printf(", %llu bytes, CRC-64 %016" PRIx64 "\n", (unsigned long long)part->info.bytes, part->info.crc64);
        if (part->file) print_file(part->file, &part->packed);
    }
    return 0;
}

static int inspect_checkpoint(const halfstep_checkpoint *checkpoint, const struct inspect *inspect)
{
    struct checkpoint c = {.opened = checkpoint, .info = {.struct_size = sizeof c.info}};
    struct document document = {0};
    char error[1024] = "";
    int bad = halfstep_get_checkpoint_info(checkpoint, &c.info) != HALFSTEP_OK ||
              open_parts(&c, error, sizeof error) != 0,
        status;
    if (!bad && inspect->json) bad = put_checkpoint(&document, &c, error, sizeof error) != 0;
    if (bad) status = failure("inspect", "%s", error);
    else if (inspect->json) status = document_print(&document);
    else status = print_checkpoint(&c);
    document_free(&document);
    for (uint64_t i = 0; c.part && i < c.info.files; i++) {
        halfstep_close_safetensors(c.part[i].file);
        packed_list_free(&c.part[i].packed);
    }
    free(c.part);
    trainer_file_free(&c.trainer);
    return status;
}

/* Refuses a model of another program in a folder or behind an index, and names a file of it. Returns 0 if the path
 * leads to none. */
static int refuse_model(const char *path)
{
    char error[1024];
    struct model_files files;
    struct model_tensors model = {NULL, 0, NULL};
    int status = 0;
    if (model_files_find(path, 1, &files, error, sizeof error) != 0) return 0;
    if (model_tensors_open(files.model, &model, error, sizeof error) != 0) status = failure("inspect", "%s", error);
    else
        status = failure("inspect", "%s is a model in %zu file%s, not a checkpoint; inspect a file, such as %s", path,
                         model.parts, model.parts == 1 ? "" : "s", model.part[0].path);
    model_tensors_close(&model);
    model_files_close(&files);
    return status;
}

static int inspect_path(const char *path, const struct inspect *inspect)
{
    char error[1024], why[1024];
    halfstep_checkpoint *checkpoint;
    halfstep_safetensors *file;
    halfstep_open_options options = {.struct_size = sizeof options, .skip_contents = (uint32_t)inspect->quick};
    if (store_file_is(path)) return inspect_store(path, inspect->json);
    int code = halfstep_open_checkpoint(&checkpoint, path, &options, error, sizeof error);
    if (code == HALFSTEP_OK) {
        int status = inspect_checkpoint(checkpoint, inspect);
        halfstep_close_checkpoint(checkpoint);
        return status;
    }
    if (halfstep_open_safetensors(&file, path, why, sizeof why) == HALFSTEP_OK) {
        int status = inspect_file(path, file, inspect);
        halfstep_close_safetensors(file);
        return status;
    }
    struct stat status;
    const int exists = stat(path, &status) == 0, folder = exists && S_ISDIR(status.st_mode);
    if (code == HALFSTEP_ERROR_NAME && (folder || (exists && has_suffix(path, ".json"))) && refuse_model(path))
        return 1;
    return failure("inspect", "%s", folder || code != HALFSTEP_ERROR_NAME ? error : why);
}

static int inspect_word(struct args *args, void *options) { return inspect_path(args->word[0], options); }

const struct command inspect_command = {
    .name = "inspect",
    .usage = "FILE|DIR [options]",
    .summary =
        "Lists the contents of a safetensors file, a checkpoint directory or a file of states, as programs with the "
        "library keep it. These are tensors with types, shapes and sizes, metadata, and the step and settings of the "
        "run. Verifies the checksums of a checkpoint's files. A program may step with its file of states meanwhile.",
    .notes = "  halfstep inspect run\n"
             "  halfstep inspect run/model.safetensors --json\n",
    .min_words = 1,
    .max_words = 1,
    COMMAND_OPTIONS(rows, struct inspect),
    .run = inspect_word,
};
