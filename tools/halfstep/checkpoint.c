#include "checkpoint_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"

/* ---- Slots ------------------------------------------------------------------------------------------------------------ */

static int slot_info(const halfstep_optimizer *optimizer, int32_t tensor, int32_t slot, halfstep_slot_info *info)
{
    memset(info, 0, sizeof *info);
    info->struct_size = sizeof *info;
    return halfstep_get_slot_info(optimizer, tensor, slot, info);
}

int weight_dtype(int32_t format)
{
    static const struct {
        const char *name;
        int dtype;
    } types[] = {{"F32", LM_F32}, {"BF16", LM_BF16}, {"F16", LM_F16}};
    halfstep_format_info info = checkpoint_format(format);
    for (size_t i = 0; info.code_dtype && i < sizeof types / sizeof types[0]; i++)
        if (strcmp(info.code_dtype, types[i].name) == 0) return types[i].dtype;
    return -1;
}

uint64_t holding_hash(const struct holding *holding)
{
    uint64_t h = HASH_START;
    for (int32_t i = 0; i < holding->tensors; i++) {
        halfstep_slot_info info;
        for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
            if (slot == HALFSTEP_SLOT_GRADIENT || slot_info(holding->optimizer, i, slot, &info) != HALFSTEP_OK || info.format < 0)
                continue;
            h = hash_bytes(h, slot == HALFSTEP_SLOT_WEIGHT ? holding->weights[i] : info.code, info.code_bytes);
            if (info.extra_bytes) h = hash_bytes(h, info.extra, info.extra_bytes);
        }
    }
    return hash_finish(h);
}

/* Streams are shaped by what they hold: the tensor's own shape where there is one element of the dtype for each of its; rows
 * of what a row takes up where blocks lie along rows; otherwise flat. */
static void shape_stream(struct stream *stream, const struct lm_tensor *tensor, int along_rows)
{
    uint64_t rows = (uint64_t)tensor->rows, elements = stream->bytes * 8 / halfstep_safetensors_dtype_bits(stream->dtype);
    checkpoint_shape_of(stream, tensor);
    if (elements == rows * (uint64_t)tensor->row_length) return;
    along_rows = along_rows && rows && elements % rows == 0;
    stream->ndim = along_rows ? 2 : 1;
    stream->shape[0] = along_rows ? rows : elements;
    stream->shape[1] = along_rows ? elements / rows : 1;
}

int checkpoint_list_streams(const halfstep_optimizer *optimizer, int32_t index, const struct lm_tensor *tensor,
                            struct stream streams[MAX_STREAMS])
{
    int n = 0;
    for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + HALFSTEP_MAX_STATES; slot++) {
        halfstep_slot_info info;
        if (slot == HALFSTEP_SLOT_GRADIENT || slot_info(optimizer, index, slot, &info) != HALFSTEP_OK || info.format < 0) continue;
        halfstep_format_info format = checkpoint_format(info.format);
        if (slot != HALFSTEP_SLOT_WEIGHT) {
            struct stream *code = &streams[n++];
            *code = (struct stream){.dtype = format.code_dtype, .data = info.code, .bytes = info.code_bytes};
            snprintf(code->name, sizeof code->name, "%s/%s", tensor->name, info.name);
            shape_stream(code, tensor, format.geometry == HALFSTEP_GEOMETRY_ROWS);
        }
        if (!info.extra_bytes) continue;
        struct stream *extra = &streams[n++];
        *extra = (struct stream){.dtype = format.extra_dtype, .data = info.extra, .bytes = info.extra_bytes};
        snprintf(extra->name, sizeof extra->name, "%s/%s.%s", tensor->name, info.name, format.block ? "scale" : "extra");
        if (format.block && format.geometry == HALFSTEP_GEOMETRY_ROWS) {
            extra->ndim = 2;
            extra->shape[0] = (uint64_t)tensor->rows;
            extra->shape[1] = (uint64_t)info.blocks_per_row;
        } else {
            shape_stream(extra, tensor, 0);
        }
    }
    return n;
}

static int weight_stream(const struct holding *holding, int32_t index, const struct lm_tensor *tensor, struct stream *stream)
{
    halfstep_slot_info info;
    if (slot_info(holding->optimizer, index, HALFSTEP_SLOT_WEIGHT, &info) != HALFSTEP_OK) return -1;
    snprintf(stream->name, sizeof stream->name, "%s", tensor->name);
    stream->dtype = checkpoint_format(info.format).code_dtype;
    stream->data = holding->weights[index];
    stream->bytes = info.code_bytes;
    checkpoint_shape_of(stream, tensor);
    return 0;
}

/* ---- What identifies an optimizer -------------------------------------------------------------------------------------- */

typedef int setting_visitor(void *context, const char *key, const char *value, const char *initial);

/* Every setting that decides bits of later steps, as strings: its key, its value, and the value it has where nobody sets
 * it (a checkpoint from before there was such a setting), or NULL. Stops at the first non-zero result.
 * total_steps is judged by the trainer, which knows whether it changes anything; gradient_scale is set at each step. */
static int each_setting(const struct holding *holding, setting_visitor *visit, void *context)
{
    static const char *const choices[] = {"decay", "schedule"}, *const global_choices[] = {"generator", "scan", "clip"};
    halfstep_optimizer *optimizer = holding->optimizer;
    char key[NAME_BYTES], value[VALUE_BYTES], initial[VALUE_BYTES];
    int status = 0;
    snprintf(value, sizeof value, "%" PRIu64, halfstep_get_seed(optimizer));
    status = visit(context, "seed", value, NULL);
    for (size_t i = 0; i < sizeof global_choices / sizeof global_choices[0] && !status; i++) {
        const char *chosen = halfstep_get_choice(optimizer, HALFSTEP_ALL_GROUPS, global_choices[i]);
        if (chosen) status = visit(context, global_choices[i], chosen, halfstep_choice_value(global_choices[i], 0));
    }
    for (int32_t row = 0; row < halfstep_rule_count() && !status; row++) {
        halfstep_rule_info rule = {.struct_size = sizeof rule};
        if (halfstep_get_rule_info(row, &rule) != HALFSTEP_OK) continue;
        for (int32_t group = 0; group < holding->groups && !status; group++)
            for (int32_t i = 0; i < rule.hypers && !status; i++) {
                halfstep_hyper_info hyper = {.struct_size = sizeof hyper};
                double number;
                if (halfstep_get_hyper_info(row, i, &hyper) != HALFSTEP_OK || strcmp(hyper.name, "total_steps") == 0 ||
                    strcmp(hyper.name, "gradient_scale") == 0)
                    continue;
                /* The same name in another rule is the same value: visited again, it only overwrites itself. */
                if (halfstep_get_hyper(optimizer, hyper.per_optimizer ? HALFSTEP_ALL_GROUPS : group, hyper.name, &number) !=
                    HALFSTEP_OK)
                    continue;
                if (hyper.per_optimizer) snprintf(key, sizeof key, "%s", hyper.name);
                else snprintf(key, sizeof key, "group.%d.%s", group, hyper.name);
                snprintf(value, sizeof value, "%.17g", number);
                snprintf(initial, sizeof initial, "%.17g", hyper.initial);
                status = visit(context, key, value, initial);
            }
    }
    for (int32_t group = 0; group < holding->groups && !status; group++)
        for (size_t i = 0; i < sizeof choices / sizeof choices[0] && !status; i++) {
            const char *chosen = halfstep_get_choice(optimizer, group, choices[i]);
            if (!chosen) continue;
            snprintf(key, sizeof key, "group.%d.%s", group, choices[i]);
            status = visit(context, key, chosen, NULL);
        }
    return status;
}

/* ---- Saving ------------------------------------------------------------------------------------------------------------ */

struct declaring {
    halfstep_safetensors_writer *writer;
    char *error;
    size_t error_bytes;
};

static int declare_setting(void *context, const char *key, const char *value, const char *initial)
{
    struct declaring *d = context;
    (void)initial;
    return halfstep_declare_safetensors_metadata(d->writer, key, value, d->error, d->error_bytes);
}

static int declare(struct declaring *d, const char *key, const char *value)
{
    return declare_setting(d, key, value, NULL);
}

static int declare_stream(struct declaring *d, const struct stream *s)
{
    return halfstep_declare_safetensor(d->writer, s->name, s->dtype, s->ndim, s->shape, s->data, d->error, d->error_bytes);
}

/* Hexadecimal, so that every bit comes back. */
static int declare_scalars(struct declaring *d, const struct holding *holding, int32_t index, const char *name)
{
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    char key[NAME_BYTES], value[VALUE_BYTES];
    if (halfstep_get_rule_info(holding->rule, &rule) != HALFSTEP_OK || !rule.scalars) return 0;
    size_t used = 0;
    for (int32_t i = 0; i < rule.scalars && used < sizeof value; i++) {
        double number;
        if (halfstep_get_scalar(holding->optimizer, index, rule.scalar_name[i], &number) != HALFSTEP_OK)
            return HALFSTEP_ERROR_ARGUMENT;
        used += (size_t)snprintf(value + used, sizeof value - used, "%s%s %a", i ? " " : "", rule.scalar_name[i], number);
    }
    if (used >= sizeof value) return HALFSTEP_ERROR_ARGUMENT;
    snprintf(key, sizeof key, "scalars.%s", name);
    return declare(d, key, value);
}

static int declare_counters(struct declaring *d, const struct holding *holding, const char *recipe)
{
    char key[NAME_BYTES], value[VALUE_BYTES];
    int code = declare(d, "format", "halfstep optimizer 1");
    if (code == 0) code = declare(d, "recipe", recipe);
    snprintf(value, sizeof value, "%" PRIu64, halfstep_skipped_steps(holding->optimizer));
    if (code == 0) code = declare(d, "skipped_steps", value);
    for (int32_t group = 0; group < holding->groups && code == 0; group++) {
        uint64_t steps = 0;
        if (halfstep_get_group_steps(holding->optimizer, group, &steps) != HALFSTEP_OK) return HALFSTEP_ERROR_ARGUMENT;
        snprintf(key, sizeof key, "group.%d.steps", group);
        snprintf(value, sizeof value, "%" PRIu64, steps);
        code = declare(d, key, value);
    }
    for (int32_t i = 0; i < holding->tensors && code == 0; i++) {
        halfstep_counters counters = {.struct_size = sizeof counters};
        struct lm_tensor tensor;
        if (lm_tensor_info(holding->shape, i, &tensor) != 0 ||
            halfstep_get_counters(holding->optimizer, i, &counters) != HALFSTEP_OK)
            return HALFSTEP_ERROR_ARGUMENT;
        snprintf(key, sizeof key, "counters.%s", tensor.name);
        snprintf(value, sizeof value, "state_steps %" PRIu64 " full_steps %" PRIu64 " writes %" PRIu64 " id %" PRIu64,
                 counters.state_steps, counters.full_steps, counters.writes, counters.id);
        code = declare(d, key, value);
        if (code == 0) code = declare_scalars(d, holding, i, tensor.name);
    }
    return code;
}

static int declare_tensors(struct declaring *model, struct declaring *states, const struct holding *holding)
{
    int code = declare(model, "format", "pt");
    for (int32_t i = 0; i < holding->tensors && code == 0; i++) {
        struct lm_tensor tensor;
        struct stream weight, streams[MAX_STREAMS];
        if (lm_tensor_info(holding->shape, i, &tensor) != 0 || weight_stream(holding, i, &tensor, &weight) != 0)
            return HALFSTEP_ERROR_ARGUMENT;
        code = declare_stream(model, &weight);
        int n = checkpoint_list_streams(holding->optimizer, i, &tensor, streams);
        for (int k = 0; k < n && code == 0; k++) code = declare_stream(states, &streams[k]);
    }
    return code;
}

static int declare_history(struct declaring *d, const struct run_history *history)
{
    struct stream points = {"train", "F64", 2, {history->n_points, sizeof(struct run_point) / sizeof(double)},
                            history->point, 0};
    struct stream validations = {"validation", "F64", 2,
                                 {history->n_validations, sizeof(struct run_validation) / sizeof(double)},
                                 history->validation, 0};
    int code = declare(d, "columns.train", "step train_loss lr gradient_norm seconds");
    if (code == 0) code = declare(d, "columns.validation", "step loss");
    if (code == 0 && history->n_points) code = declare_stream(d, &points);
    if (code == 0 && history->n_validations) code = declare_stream(d, &validations);
    return code;
}

static const char *torch_dtype(int dtype)
{
    return dtype == LM_F32 ? "float32" : dtype == LM_BF16 ? "bfloat16" : "float16";
}

const char *checkpoint_file_name(int index)
{
    static const char *const names[] = {"model.safetensors", "optimizer.safetensors", "history.safetensors", "config.json",
                                        "trainer.json"};
    return index >= 0 && (size_t)index < sizeof names / sizeof names[0] ? names[index] : NULL;
}

static int save_files(halfstep_checkpoint_save *save, const struct holding *holding, const char *trainer, const char *recipe,
                      struct declaring writers[3], const struct run_history *history, char *error, size_t error_bytes)
{
    halfstep_slot_info info;
    char text[2048];
    if (slot_info(holding->optimizer, 0, HALFSTEP_SLOT_WEIGHT, &info) != HALFSTEP_OK) return HALFSTEP_ERROR_ARGUMENT;
    int length = lm_config_json(holding->shape, torch_dtype(weight_dtype(info.format)), text, sizeof text);
    if (length < 0) return HALFSTEP_ERROR_ARGUMENT;

    int code = declare_tensors(&writers[0], &writers[1], holding);
    if (code == 0) code = declare_counters(&writers[1], holding, recipe);
    if (code == 0) code = each_setting(holding, declare_setting, &writers[1]);
    if (code == 0) code = declare_history(&writers[2], history);
    for (int i = 0; i < 3 && code == 0; i++)
        code = halfstep_save_safetensors(save, checkpoint_file_name(i), writers[i].writer, NULL, NULL, error, error_bytes);
    if (code == 0) code = halfstep_save_file(save, checkpoint_file_name(3), text, (uint64_t)length, error, error_bytes);
    if (code == 0) code = halfstep_save_file(save, checkpoint_file_name(4), trainer, strlen(trainer), error, error_bytes);
    if (code == 0) code = halfstep_save_value(save, "recipe", recipe, error, error_bytes);
    return code;
}

int checkpoint_save(const char *directory, uint32_t keep, uint64_t step, const struct holding *holding, const char *recipe,
                    const char *trainer, const struct run_history *history, char *error, size_t error_bytes)
{
    halfstep_save_options options = {.struct_size = sizeof options, .keep = keep, .step = step};
    halfstep_checkpoint_save *save = NULL;
    struct declaring writers[3] = {{NULL, error, error_bytes}, {NULL, error, error_bytes}, {NULL, error, error_bytes}};
    error[0] = 0;
    int code = halfstep_begin_checkpoint(&save, directory, &options, error, error_bytes);
    for (int i = 0; i < 3 && code == 0; i++) code = halfstep_create_safetensors_writer(&writers[i].writer);
    if (code == 0)
        code = save_files(save, holding, trainer, recipe, writers, history, error, error_bytes);
    for (int i = 0; i < 3; i++) halfstep_destroy_safetensors_writer(writers[i].writer);
    if (code == 0) return halfstep_commit_checkpoint(save, error, error_bytes) == HALFSTEP_OK ? 0 : -1;
    halfstep_abandon_checkpoint(save);
    if (!error[0]) snprintf(error, error_bytes, "%s: %s", directory, halfstep_strerror(code));
    return -1;
}

/* ---- Loading ----------------------------------------------------------------------------------------------------------- */

static int open_source(struct source *source, const halfstep_checkpoint *checkpoint, const char *name)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    source->file = NULL;
    source->path = halfstep_checkpoint_path(checkpoint, name);
    if (!source->path) {
        int known = halfstep_get_checkpoint_info(checkpoint, &info) == HALFSTEP_OK;
        snprintf(source->error, source->error_bytes, "%s: the checkpoint has no %s", known ? info.directory : "?", name);
        return -1;
    }
    return halfstep_open_safetensors(&source->file, source->path, source->error, source->error_bytes) == HALFSTEP_OK ? 0 : -1;
}

static int check_setting(void *context, const char *key, const char *value, const char *initial)
{
    struct source *source = context;
    const char *saved = halfstep_safetensors_metadata_find(source->file, key);
    if (!saved) saved = initial;
    if (saved && strcmp(saved, value) == 0) return 0;
    const char *shown = strncmp(key, "group.", 6) == 0 ? strchr(key + 6, '.') + 1 : key;
    double here, there;
    if (!saved) snprintf(source->error, source->error_bytes, "%s does not say its %s", source->path, key);
    else if (parse_number(value, &here) == 0 && parse_number(saved, &there) == 0)
        snprintf(source->error, source->error_bytes, "%s is %.10g here but %.10g in %s", shown, here, there, source->path);
    else snprintf(source->error, source->error_bytes, "%s is %s here but %s in %s", shown, value, saved, source->path);
    return -1;
}

static int missing(struct source *source, const char *key)
{
    snprintf(source->error, source->error_bytes, "%s: the metadata \"%s\" is missing or malformed", source->path, key);
    return -1;
}

static int read_u64(struct source *source, const char *key, uint64_t *value)
{
    const char *text = halfstep_safetensors_metadata_find(source->file, key);
    char tail;
    return text && sscanf(text, "%" SCNu64 "%c", value, &tail) == 1 ? 0 : missing(source, key);
}

static int load_scalars(struct source *source, halfstep_optimizer *optimizer, int32_t index, const char *name,
                        const halfstep_rule_info *rule)
{
    char key[NAME_BYTES], *end;
    snprintf(key, sizeof key, "scalars.%s", name);
    const char *at = halfstep_safetensors_metadata_find(source->file, key);
    for (int32_t i = 0; i < rule->scalars; i++) {
        size_t n = strlen(rule->scalar_name[i]);
        if (!at || strncmp(at, rule->scalar_name[i], n) != 0 || at[n] != ' ') return missing(source, key);
        double number = strtod(at + n + 1, &end);
        if (end == at + n + 1 || halfstep_set_scalar(optimizer, index, rule->scalar_name[i], number) != HALFSTEP_OK)
            return missing(source, key);
        at = end + (*end == ' ');
    }
    return at && *at ? missing(source, key) : 0;
}

int checkpoint_load_tensor_counters(struct source *source, halfstep_optimizer *optimizer, int32_t index, const char *name,
                                    int32_t rule)
{
    char key[NAME_BYTES], tail;
    halfstep_counters counters = {.struct_size = sizeof counters};
    halfstep_rule_info info = {.struct_size = sizeof info};
    snprintf(key, sizeof key, "counters.%s", name);
    const char *text = halfstep_safetensors_metadata_find(source->file, key);
    if (!text || sscanf(text, "state_steps %" SCNu64 " full_steps %" SCNu64 " writes %" SCNu64 " id %" SCNu64 "%c",
                        &counters.state_steps, &counters.full_steps, &counters.writes, &counters.id, &tail) != 4)
        return missing(source, key);
    if (halfstep_set_counters(optimizer, index, &counters) != HALFSTEP_OK ||
        halfstep_get_rule_info(rule, &info) != HALFSTEP_OK)
        return missing(source, key);
    return info.scalars ? load_scalars(source, optimizer, index, name, &info) : 0;
}

static int load_counters(struct source *source, const struct holding *holding)
{
    char key[NAME_BYTES];
    uint64_t number;
    if (read_u64(source, "skipped_steps", &number) != 0) return -1;
    if (halfstep_set_skipped_steps(holding->optimizer, number) != HALFSTEP_OK) return missing(source, "skipped_steps");
    for (int32_t group = 0; group < holding->groups; group++) {
        snprintf(key, sizeof key, "group.%d.steps", group);
        if (read_u64(source, key, &number) != 0) return -1;
        if (halfstep_set_group_steps(holding->optimizer, group, number) != HALFSTEP_OK) return missing(source, key);
    }
    for (int32_t i = 0; i < holding->tensors; i++) {
        struct lm_tensor tensor;
        if (lm_tensor_info(holding->shape, i, &tensor) != 0 ||
            checkpoint_load_tensor_counters(source, holding->optimizer, i, tensor.name, holding->rule) != 0)
            return -1;
    }
    return 0;
}

static int load_slots(struct source *model, struct source *states, const struct holding *holding)
{
    for (int32_t i = 0; i < holding->tensors; i++) {
        struct lm_tensor tensor;
        struct stream weight, streams[MAX_STREAMS];
        if (lm_tensor_info(holding->shape, i, &tensor) != 0 || weight_stream(holding, i, &tensor, &weight) != 0) return -1;
        if (checkpoint_read_stream(model, &weight) != 0) return -1;
        int n = checkpoint_list_streams(holding->optimizer, i, &tensor, streams);
        for (int k = 0; k < n; k++)
            if (checkpoint_read_stream(states, &streams[k]) != 0) return -1;
    }
    return 0;
}

/* rows x columns doubles, or nothing where the file has no such tensor. */
static int load_table(struct source *source, const char *name, uint64_t columns, void **out, size_t *rows)
{
    uint64_t index;
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    *out = NULL;
    *rows = 0;
    if (halfstep_safetensor_find(source->file, name, &index) != HALFSTEP_OK) return 0;
    if (halfstep_get_safetensor_info(source->file, index, &info) != HALFSTEP_OK || strcmp(info.dtype, "F64") != 0 ||
        info.ndim != 2 || info.shape[1] != columns) {
        snprintf(source->error, source->error_bytes, "%s: %s is not a table of %" PRIu64 " columns", source->path, name, columns);
        return -1;
    }
    *out = malloc(info.bytes ? info.bytes : 1);
    if (!*out) {
        snprintf(source->error, source->error_bytes, "out of memory");
        return -1;
    }
    *rows = info.shape[0];
    return halfstep_read_safetensor(source->file, index, 0, *out, info.bytes, source->error, source->error_bytes) == HALFSTEP_OK
               ? 0
               : -1;
}

static int load_history(struct source *source, struct run_history *history)
{
    void *points, *validations = NULL;
    size_t n_points, n_validations = 0;
    int bad = load_table(source, "train", sizeof(struct run_point) / sizeof(double), &points, &n_points);
    if (!bad)
        bad = load_table(source, "validation", sizeof(struct run_validation) / sizeof(double), &validations, &n_validations);
    history->point = points;
    history->n_points = history->point_room = n_points;
    history->validation = validations;
    history->n_validations = history->validation_room = n_validations;
    return bad;
}

int checkpoint_load(const halfstep_checkpoint *checkpoint, const struct holding *holding, struct run_history *history,
                    char *error, size_t error_bytes)
{
    struct source model = {NULL, NULL, error, error_bytes}, states = model, past = model;
    error[0] = 0;
    int bad = open_source(&model, checkpoint, "model.safetensors") != 0 ||
              open_source(&states, checkpoint, "optimizer.safetensors") != 0 ||
              open_source(&past, checkpoint, "history.safetensors") != 0;
    if (!bad) bad = each_setting(holding, check_setting, &states) != 0;
    if (!bad) bad = load_slots(&model, &states, holding) != 0;
    if (!bad) bad = load_counters(&states, holding) != 0;
    if (!bad) bad = load_history(&past, history) != 0;
    halfstep_close_safetensors(model.file);
    halfstep_close_safetensors(states.file);
    halfstep_close_safetensors(past.file);
    if (bad && !error[0]) snprintf(error, error_bytes, "the checkpoint does not fit this model");
    return bad ? -1 : 0;
}
