#include "trainer/files/model_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "io/files.h"
#include "io/json.h"
#include "trainer/files/trainer_file.h"

static const char whole_name[] = "model.safetensors", index_name[] = "model.safetensors.index.json",
                  config_name[] = "config.json";

static int exists(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0;
}

static int is_folder(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static int join(char path[MODEL_PATH_BYTES], const char *folder, const char *name)
{
    int n = snprintf(path, MODEL_PATH_BYTES, "%s/%s", folder, name);
    return n < 0 || n >= MODEL_PATH_BYTES ? -1 : 0;
}

/* Sets `folder` to the folder of a file, or to the path itself if that is a folder. */
static void folder_of(const char *path, char folder[MODEL_PATH_BYTES])
{
    const char *slash = is_folder(path) ? NULL : strrchr(path, '/');
    if (is_folder(path)) snprintf(folder, MODEL_PATH_BYTES, "%s", path);
    else if (!slash) snprintf(folder, MODEL_PATH_BYTES, ".");
    else snprintf(folder, MODEL_PATH_BYTES, "%.*s", slash == path ? 1 : (int)(slash - path), path);
}

static int is_index(const char *path)
{
    size_t n = strlen(path);
    return n >= 5 && strcmp(path + n - 5, ".json") == 0;
}

int store_file_is(const char *path)
{
    static const char magic[] = "halfstep states\n";
    char begin[sizeof magic - 1];
    FILE *file = fopen(path, "rb");
    const int is = file && fread(begin, sizeof begin, 1, file) == 1 && memcmp(begin, magic, sizeof begin) == 0;
    if (file) fclose(file);
    return is;
}

void model_files_inputs(const char *path, char files[MODEL_PATH_BYTES], char config[MODEL_PATH_BYTES])
{
    folder_of(path, files);
    if (join(config, files, config_name) != 0) config[0] = 0;
    if (!is_index(path)) snprintf(files, MODEL_PATH_BYTES, "%s", path);
}

/* ---- Finding ----------------------------------------------------------------------------------------------------- */

static int find_in_checkpoint(struct model_files *files, const char *path, char *error, size_t error_bytes)
{
    const char *model = halfstep_checkpoint_path(files->checkpoint, whole_name);
    if (!model) {
        snprintf(error, error_bytes, "%s: the checkpoint has no %s", path, whole_name);
        return -1;
    }
    snprintf(files->model, sizeof files->model, "%s", model);
    const char *config = halfstep_checkpoint_path(files->checkpoint, config_name);
    if (!config) {
        snprintf(error, error_bytes, "%s: the checkpoint has no %s", path, config_name);
        return -1;
    }
    snprintf(files->config, sizeof files->config, "%s", config);
    return 0;
}

/* Finds files of another program. why: the reason for which the path is no checkpoint. */
static int find_others(struct model_files *files, const char *path, const char *why, char *error, size_t error_bytes)
{
    char folder[MODEL_PATH_BYTES], trainer[MODEL_PATH_BYTES];
    folder_of(path, folder);
    int bad = strlen(path) >= MODEL_PATH_BYTES || join(files->config, folder, config_name) != 0 ||
              join(trainer, folder, "trainer.json") != 0;
    if (!bad && is_folder(path)) {
        bad = join(files->model, folder, whole_name) != 0;
        if (!bad && !exists(files->model)) bad = join(files->model, folder, index_name) != 0;
        /* A checkpoint directory of train lm without its manifest.json is refused, because its weights may need other
         * files of the checkpoint. */
        if (!bad && (exists(trainer) || !exists(files->model))) {
            snprintf(error, error_bytes, "%s%s", why, exists(trainer) ? "" : ", nor a model.safetensors or its index");
            return -1;
        }
    } else if (!bad && store_file_is(path)) {
        snprintf(error, error_bytes,
                 "%s is a file of states, which only the program that steps with it can read: save the weights there, "
                 "as a safetensors file",
                 path);
        return -1;
    } else if (!bad) {
        if (!exists(path)) {
            char why[600];
            snprintf(error, error_bytes, "cannot open %s: %s", path, hstep_reason(path, why, sizeof why));
            return -1;
        }
        snprintf(files->model, sizeof files->model, "%s", path);
    }
    if (bad) {
        snprintf(error, error_bytes, "%.200s...: the path is too long", path);
        return -1;
    }
    if (!exists(files->config)) files->config[0] = 0;
    return 0;
}

int model_files_find(const char *path, int quick, struct model_files *files, char *error, size_t error_bytes)
{
    char why[1024];
    halfstep_open_options options = {.struct_size = sizeof options, .skip_contents = (uint32_t)quick};
    memset(files, 0, sizeof *files);
    int code = halfstep_open_checkpoint(&files->checkpoint, path, &options, why, sizeof why);
    if (code == HALFSTEP_OK) {
        int status = find_in_checkpoint(files, path, error, error_bytes);
        if (status) model_files_close(files);
        return status;
    }
    if (code == HALFSTEP_ERROR_NAME) return find_others(files, path, why, error, error_bytes);
    snprintf(error, error_bytes, "%s", why);
    return -1;
}

void model_files_close(struct model_files *files)
{
    halfstep_close_checkpoint(files->checkpoint);
    files->checkpoint = NULL;
}

/* ---- Opening ----------------------------------------------------------------------------------------------------- */

/* Adds and opens a file, and takes ownership of its path. Returns the number of the part, or -1. */
static long add_part(struct model_tensors *tensors, char *path, char *error, size_t error_bytes)
{
    struct model_part *grown = path ? realloc(tensors->part, (tensors->parts + 1) * sizeof *grown) : NULL;
    if (!grown) {
        free(path);
        no_memory(error, error_bytes);
        return -1;
    }
    tensors->part = grown;
    struct model_part *part = &grown[tensors->parts];
    *part = (struct model_part){NULL, path};
    tensors->parts++;
    if (halfstep_open_safetensors(&part->file, path, error, error_bytes) != HALFSTEP_OK) return -1;
    return (long)tensors->parts - 1;
}

/* Returns the number of the part with this file name. Opens the file when it is named first. */
static long part_named(struct model_tensors *tensors, const char *folder, const char *name, char *error,
                       size_t error_bytes)
{
    enum { MOST = 4096 };
    char path[MODEL_PATH_BYTES];
    if (!name[0] || strchr(name, '/') || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        snprintf(error, error_bytes, "%s: \"weight_map\" names \"%s\"; it must be a file in the folder of the index",
                 tensors->path, name);
        return -1;
    }
    if (join(path, folder, name) != 0 || tensors->parts == MOST) {
        snprintf(error, error_bytes, "%s: \"weight_map\" names more than %d files, or a file name that is too long",
                 tensors->path, MOST);
        return -1;
    }
    for (size_t i = 0; i < tensors->parts; i++)
        if (strcmp(tensors->part[i].path, path) == 0) return (long)i;
    return add_part(tensors, strdup(path), error, error_bytes);
}

/* Reads the member "weight_map", which says what file a tensor is in, and opens the files. Leaves error empty if only
 * the JSON is malformed. */
static int open_map(hstep_json *json, struct model_tensors *tensors, const char *folder, char *error,
                    size_t error_bytes)
{
    const char *name, *file;
    uint64_t index;
    for (size_t n = 0; hstep_json_member(json, &n, &name);) {
        if (!hstep_json_string(json, &file)) return -1;
        long part = part_named(tensors, folder, file, error, error_bytes);
        if (part < 0) return -1;
        if (halfstep_safetensor_find(tensors->part[part].file, name, &index) == HALFSTEP_OK) continue;
        snprintf(error, error_bytes, "%s: \"weight_map\" has the tensor \"%s\" in %s, which does not hold it",
                 tensors->path, name, file);
        return -1;
    }
    return json->problem ? -1 : 0;
}

static int open_index(struct model_tensors *tensors, char *error, size_t error_bytes)
{
    char folder[MODEL_PATH_BYTES];
    size_t bytes;
    const char *key;
    int maps = 0, bad = 0;
    char *text = text_file_read(tensors->path, &bytes, error, error_bytes);
    if (!text) return -1;
    hstep_json json = {text, bytes, 0, NULL};
    folder_of(tensors->path, folder);
    error[0] = 0;
    for (size_t n = 0; !bad && hstep_json_member(&json, &n, &key);) {
        if (strcmp(key, "weight_map") != 0) hstep_json_skip(&json);
        else if (maps++) hstep_json_fail(&json, "a name twice");
        else bad = open_map(&json, tensors, folder, error, error_bytes) != 0;
    }
    if (!bad) bad = !hstep_json_end(&json);
    if (json.problem) snprintf(error, error_bytes, "%s: byte %zu: %s", tensors->path, json.at, json.problem);
    else if (!bad && !tensors->parts) snprintf(error, error_bytes, "%s: \"weight_map\" names no file", tensors->path);
    bad |= !tensors->parts;
    free(text);
    return bad ? -1 : 0;
}

int model_tensors_open(const char *path, struct model_tensors *tensors, char *error, size_t error_bytes)
{
    *tensors = (struct model_tensors){NULL, 0, strdup(path)};
    if (!tensors->path) {
        no_memory(error, error_bytes);
        return -1;
    }
    if (is_index(path)) return open_index(tensors, error, error_bytes);
    return add_part(tensors, strdup(path), error, error_bytes) < 0 ? -1 : 0;
}

void model_tensors_close(struct model_tensors *tensors)
{
    for (size_t i = 0; i < tensors->parts; i++) {
        halfstep_close_safetensors(tensors->part[i].file);
        free(tensors->part[i].path);
    }
    free(tensors->part);
    free(tensors->path);
    memset(tensors, 0, sizeof *tensors);
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

static void describe_shape(const uint64_t *shape, uint64_t ndim, char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "[");
    for (uint64_t i = 0; i < ndim; i++) append(text, text_bytes, "%s%" PRIu64, i ? ", " : "", shape[i]);
    append(text, text_bytes, "]");
}

int model_tensor_dtype(const char *path, const halfstep_safetensor_info *info, const struct lm_tensor *tensor,
                       char *error, size_t error_bytes)
{
    int dtype = lm_dtype_named(info->dtype);
    if (dtype >= 0 && (dtype != LM_PACKED || tensor->ndim == 2)) return dtype;
    snprintf(error, error_bytes, "%s: %s has dtype %s; weights have F32, BF16 or F16, and matrices in 8 bits U8", path,
             info->name, info->dtype);
    return -1;
}

int model_tensor_fits(const char *path, const char *name, const halfstep_safetensor_info *info,
                      const struct lm_tensor *tensor, uint64_t columns, char *error, size_t error_bytes)
{
    const uint64_t shape[2] = {(uint64_t)tensor->rows, columns ? columns : (uint64_t)tensor->row_length};
    int same = info->ndim == (uint64_t)tensor->ndim;
    for (uint64_t i = 0; same && i < info->ndim; i++) same = info->shape[i] == shape[i];
    if (same) return 0;
    char there[128], here[128];
    describe_shape(info->shape, info->ndim, there, sizeof there);
    describe_shape(shape, (uint64_t)tensor->ndim, here, sizeof here);
    snprintf(error, error_bytes, "%s: %s has shape %s, this model needs %s", path, name, there, here);
    return -1;
}

int model_tensors_find(const struct model_tensors *tensors, const struct lm_tensor *tensor,
                       const struct model_part **part, uint64_t *index, halfstep_safetensor_info *info, char *error,
                       size_t error_bytes)
{
    info->struct_size = sizeof *info;
    for (size_t i = 0; i < tensors->parts; i++) {
        *part = &tensors->part[i];
        if (halfstep_safetensor_find((*part)->file, tensor->name, index) != HALFSTEP_OK) continue;
        if (halfstep_get_safetensor_info((*part)->file, *index, info) != HALFSTEP_OK) return -1;
        int packed = tensor->ndim == 2 && lm_dtype_named(info->dtype) == LM_PACKED;
        return model_tensor_fits((*part)->path, tensor->name, info, tensor,
                                 packed ? lm_row_bytes(LM_PACKED, tensor->row_length) : 0, error, error_bytes);
    }
    char whole[MODEL_PATH_BYTES], folder[MODEL_PATH_BYTES];
    folder_of(tensors->path, folder);
    /* One of several files of a model was named. */
    if (!is_index(tensors->path) && join(whole, folder, index_name) == 0 && exists(whole))
        snprintf(error, error_bytes, "%.400s: there is no tensor %s; the whole model is %.400s", tensors->path,
                 tensor->name, whole);
    else
        snprintf(error, error_bytes, "%s: there is no tensor %s; `halfstep inspect FILE` lists the tensors of a file",
                 tensors->path, tensor->name);
    return -1;
}

/* Fails if this part has a tensor that the model does not have, or one that an earlier part has, too. */
static int check_part(const struct model_tensors *tensors, size_t number, const struct lm_config *shape, char *error,
                      size_t error_bytes)
{
    const struct model_part *part = &tensors->part[number];
    uint64_t n = halfstep_safetensor_count(part->file), index, more = 0;
    char *taken = calloc(n ? (size_t)n : 1, 1), other[200] = "";
    if (!taken) {
        no_memory(error, error_bytes);
        return -1;
    }
    int bad = 0;
    for (int i = 0; !bad && i < lm_tensor_count(shape); i++) {
        struct lm_tensor tensor;
        lm_tensor_info(shape, i, &tensor);
        if (halfstep_safetensor_find(part->file, tensor.name, &index) != HALFSTEP_OK) continue;
        taken[index] = 1;
        for (size_t before = 0; !bad && before < number; before++) {
            bad = halfstep_safetensor_find(tensors->part[before].file, tensor.name, &index) == HALFSTEP_OK;
            if (bad)
                snprintf(error, error_bytes, "%s: %s is in %s as well; remove one of them", part->path, tensor.name,
                         tensors->part[before].path);
        }
    }
    for (uint64_t i = 0; !bad && i < n; i++) {
        halfstep_safetensor_info info = {.struct_size = sizeof info};
        if (taken[i] || halfstep_get_safetensor_info(part->file, i, &info) != HALFSTEP_OK) continue;
        if (more++ == 0) snprintf(other, sizeof other, "%s", info.name);
    }
    free(taken);
    if (bad || !more) return bad ? -1 : 0;
    snprintf(error, error_bytes,
             "%s: %" PRIu64
             " tensor%s no part of a Llama without biases of %d layer%s, the first is %s; choose another "
             "file",
             part->path, more, more == 1 ? " is" : "s are", shape->depth, shape->depth == 1 ? "" : "s", other);
    return -1;
}

int model_tensors_check(const struct model_tensors *tensors, const struct lm_config *shape, char *error,
                        size_t error_bytes)
{
    for (int i = 0; i < lm_tensor_count(shape); i++) {
        struct lm_tensor tensor;
        const struct model_part *part;
        halfstep_safetensor_info info;
        uint64_t index;
        lm_tensor_info(shape, i, &tensor);
        if (model_tensors_find(tensors, &tensor, &part, &index, &info, error, error_bytes) != 0) return -1;
    }
    for (size_t i = 0; i < tensors->parts; i++)
        if (check_part(tensors, i, shape, error, error_bytes) != 0) return -1;
    return 0;
}
