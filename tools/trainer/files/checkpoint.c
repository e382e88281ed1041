#define HALFSTEP_ADVANCED
#include "trainer/files/checkpoint.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"

/* ---- Slots ------------------------------------------------------------------------------------------------------- */

int weight_dtype(int32_t format) { return lm_dtype_named(format_info(format).code_dtype); }

uint64_t holding_hash(const struct holding *holding)
{
    uint64_t h = HASH_START;
    for (int32_t i = 0; i < holding->tensors; i++) {
        for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
            const halfstep_slot_info info = slot_info(holding->optimizer, i, slot);
            if (slot == HALFSTEP_SLOT_GRADIENT || info.format < 0) continue;
            h = hash_bytes(h, slot == HALFSTEP_SLOT_WEIGHT ? holding->weights[i] : info.code, info.code_bytes);
            if (info.extra_bytes) h = hash_bytes(h, info.extra, info.extra_bytes);
        }
    }
    return hash_finish(h);
}

int checkpoint_open_quickly(halfstep_checkpoint **checkpoint, const char *path, char *error, size_t error_bytes)
{
    const halfstep_open_options quick = {.struct_size = sizeof quick, .skip_contents = 1};
    return halfstep_open_checkpoint(checkpoint, path, &quick, error, error_bytes);
}

/* ---- Saving ------------------------------------------------------------------------------------------------------ */

struct declaring {
    halfstep_safetensors_writer *writer;
    char *error;
    size_t error_bytes;
};

static int declare_table(struct declaring *d, const char *name, const void *data, size_t rows, size_t columns)
{
    uint64_t shape[2] = {rows, columns};
    return rows ? halfstep_declare_safetensor(d->writer, name, "F64", 2, shape, data, d->error, d->error_bytes)
                : HALFSTEP_OK;
}

static int declare_history(struct declaring *d, const struct run_history *history)
{
    int code = halfstep_declare_safetensors_metadata(
        d->writer, "columns.train", "step train_loss lr gradient_norm seconds", d->error, d->error_bytes);
    if (code == 0)
        code = halfstep_declare_safetensors_metadata(d->writer, "columns.validation", "step loss", d->error,
                                                     d->error_bytes);
    if (code == 0)
        code = declare_table(d, "train", history->point, history->n_points, sizeof(struct run_point) / sizeof(double));
    if (code == 0)
        code = declare_table(d, "validation", history->validation, history->n_validations,
                             sizeof(struct run_validation) / sizeof(double));
    return code;
}

/* Returns the type in which torch computes with weights. Packed weights are decoded to BF16. */
static const char *torch_dtype(int dtype)
{
    return dtype == LM_F32 ? "float32" : dtype == LM_F16 ? "float16" : "bfloat16";
}

const char *checkpoint_file_name(int index)
{
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors", "history.safetensors",
                                        "config.json", "trainer.json"};
    return index >= 0 && (size_t)index < sizeof names / sizeof names[0] ? names[index] : NULL;
}

static int save_files(halfstep_checkpoint_save *save, const struct holding *holding, const char *trainer,
                      const char *recipe, struct declaring *past, const struct run_history *history, char *error,
                      size_t error_bytes)
{
    char text[2048];
    int dtype = weight_dtype(slot_info(holding->optimizer, 0, HALFSTEP_SLOT_WEIGHT).format);
    int length = lm_config_json(holding->shape, torch_dtype(dtype), text, sizeof text);
    if (length < 0) return HALFSTEP_ERROR_ARGUMENT;

    int code = halfstep_save_optimizer(save, holding->optimizer, holding->weights, NULL, error, error_bytes);
    if (code == 0) code = declare_history(past, history);
    if (code == 0)
        code = halfstep_save_safetensors(save, checkpoint_file_name(2), past->writer, NULL, NULL, error, error_bytes);
    if (code == 0) code = halfstep_save_file(save, checkpoint_file_name(3), text, (uint64_t)length, error, error_bytes);
    if (code == 0)
        code = halfstep_save_file(save, checkpoint_file_name(4), trainer, strlen(trainer), error, error_bytes);
    if (code == 0) code = halfstep_save_value(save, "recipe", recipe, error, error_bytes);
    return code;
}

int checkpoint_save(const char *directory, const halfstep_save_options *options, const struct holding *holding,
                    const char *recipe, const char *trainer, const struct run_history *history, char *error,
                    size_t error_bytes)
{
    halfstep_checkpoint_save *save = NULL;
    struct declaring past = {NULL, error, error_bytes};
    error[0] = 0;
    int code = halfstep_begin_checkpoint(&save, directory, options, error, error_bytes);
    if (code == 0) code = halfstep_create_safetensors_writer(&past.writer);
    if (code == 0) code = save_files(save, holding, trainer, recipe, &past, history, error, error_bytes);
    halfstep_destroy_safetensors_writer(past.writer);
    if (code == 0) return halfstep_commit_checkpoint(save, error, error_bytes) == HALFSTEP_OK ? 0 : -1;
    halfstep_abandon_checkpoint(save);
    if (!error[0]) snprintf(error, error_bytes, "%s: %s", directory, halfstep_strerror(code));
    return -1;
}

/* ---- Loading ----------------------------------------------------------------------------------------------------- */

/* The file of the history. */
struct source {
    halfstep_safetensors *file;
    const char *path;
    char *error;
    size_t error_bytes;
};

/* Reads a tensor of rows x columns doubles. A missing tensor gives no rows. */
static int load_table(struct source *source, const char *name, uint64_t columns, void **out, size_t *rows)
{
    uint64_t index;
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    *out = NULL;
    *rows = 0;
    if (halfstep_safetensor_find(source->file, name, &index) != HALFSTEP_OK) return 0;
    if (halfstep_get_safetensor_info(source->file, index, &info) != HALFSTEP_OK || strcmp(info.dtype, "F64") != 0 ||
        info.ndim != 2 || info.shape[1] != columns) {
        snprintf(source->error, source->error_bytes, "%s: %s is not a table of %" PRIu64 " columns", source->path, name,
                 columns);
        return -1;
    }
    *out = malloc(info.bytes ? info.bytes : 1);
    if (!*out) {
        snprintf(source->error, source->error_bytes, "out of memory");
        return -1;
    }
    *rows = info.shape[0];
    return halfstep_read_safetensor(source->file, index, 0, *out, info.bytes, source->error, source->error_bytes) ==
                   HALFSTEP_OK
               ? 0
               : -1;
}

static int load_history(struct source *source, struct run_history *history)
{
    void *points, *validations = NULL;
    size_t n_points, n_validations = 0;
    int bad = load_table(source, "train", sizeof(struct run_point) / sizeof(double), &points, &n_points);
    if (!bad)
        bad = load_table(source, "validation", sizeof(struct run_validation) / sizeof(double), &validations,
                         &n_validations);
    history->point = points;
    history->n_points = history->point_capacity = n_points;
    history->validation = validations;
    history->n_validations = history->validation_capacity = n_validations;
    return bad;
}

int checkpoint_load(const halfstep_checkpoint *checkpoint, const struct holding *holding, struct run_history *history,
                    char *error, size_t error_bytes)
{
    /* The trainer compares total_steps itself, because it knows if a new value changes anything. It sets gradient_scale
     * in each step. */
    static const char *const left[] = {"total_steps", "gradient_scale", NULL};
    halfstep_file_options options = {
        .struct_size = sizeof options, .settings = HALFSTEP_SETTINGS_COMPARE, .leave = left};
    struct source past = {NULL, halfstep_checkpoint_path(checkpoint, checkpoint_file_name(2)), error, error_bytes};
    if (!past.path) {
        snprintf(error, error_bytes, "the checkpoint has no history.safetensors");
        return -1;
    }
    if (halfstep_open_safetensors(&past.file, past.path, error, error_bytes) != HALFSTEP_OK) return -1;
    int bad =
        halfstep_load_optimizer(checkpoint, holding->optimizer, holding->weights, &options, error, error_bytes) != 0 ||
        load_history(&past, history) != 0;
    halfstep_close_safetensors(past.file);
    return bad ? -1 : 0;
}
