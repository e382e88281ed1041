/* Optimizers in files. All that a file says is read and checked before the first change to the optimizer. Its numbers
 * are set before its streams, because numbers can be set back. docs/checkpoints.md has the layout. Over 500 lines
 * because what is saved, compared and loaded must be one list. */
#include "base/structs.h"
#include "io/numbers.h"
#include "io/parts.h"
#include "io/streams.h"

#define HSTEP_OPTIMIZER_FORMAT "halfstep optimizer 1"
#define HSTEP_WEIGHT "weight"

/* Indices of values that both sides have: this optimizer's, and the file's. */
enum { HERE, IN_FILE, SIDES };

typedef struct setting {
    int32_t group; /* or HALFSTEP_ALL_GROUPS */
    const char *name;
    const char *choice[SIDES];  /* value of a choice; NULL for hyper-parameters */
    halfstep_hyper_info limits; /* bounds of a hyper-parameter */
    double number[SIDES];
} setting;

typedef struct group_record {
    char recipe[64];
    halfstep_rule_info rule;
    int32_t row;    /* row of the rule */
    int64_t source; /* number of the file's group that it continues; -1 while unknown */
    halfstep_record numbers[SIDES];
} group_record;

/* A scalar or a grid of a tensor's record, under its name in files. */
typedef struct scalar_record {
    char name[64];
    int is_grid;
    int32_t place; /* index in the record's array */
} scalar_record;

typedef struct tensor_record {
    halfstep_tensor info;
    halfstep_record numbers[SIDES];
    scalar_record scalar[HALFSTEP_MAX_SCALARS + HALFSTEP_MAX_STATES];
    int32_t scalars;
    int has_no_steps; /* 1: the file lists the tensor, but without any step */
    int lacks_grid;   /* 1: the file has no grid of a state that has one here */
} tensor_record;

typedef struct named_tensor {
    const char *name;
    int32_t index;
} named_tensor;

typedef struct record {
    halfstep_optimizer *optimizer;
    int32_t group_count, tensor_count;
    group_record *groups;
    tensor_record *tensors;
    named_tensor *by_name;
    setting *settings;
    size_t setting_count, setting_capacity;
    halfstep_record numbers[SIDES];
    uint64_t *ids;   /* all ids of tensors, here and in the file, sorted; NULL before they are read */
    int takes_parts; /* 1: tensors of which only a part is here are allowed */
} record;

static void free_record(record *r)
{
    free(r->groups);
    free(r->tensors);
    free(r->by_name);
    free(r->settings);
    free(r->ids);
}

/* ---- What the optimizer has -------------------------------------------------------------------------------------- */

static int add_setting(record *r, const setting *added, hstep_error *error)
{
    if (!hstep_grow((void **)&r->settings, r->setting_count, &r->setting_capacity, sizeof *added))
        return hstep_fail_memory(error);
    r->settings[r->setting_count++] = *added;
    return HALFSTEP_OK;
}

/* Adds the choices of one group, or those of the optimizer, to the settings. */
static int describe_choices(record *r, int32_t group, hstep_error *error)
{
    static const char *const of_group[] = {"decay", "schedule", "decay_schedule", NULL};
    static const char *const of_optimizer[] = {"generator", "scan", "clip", "missing", NULL};
    const char *const *names = group == HALFSTEP_ALL_GROUPS ? of_optimizer : of_group;
    int code = HALFSTEP_OK;
    for (; *names && !code; names++) {
        setting s = {.group = group, .name = *names, .choice = {halfstep_get_choice(r->optimizer, group, *names)}};
        if (s.choice[HERE]) code = add_setting(r, &s, error);
    }
    return code;
}

/* Adds hyper-parameters to the settings: those of the rule in this row for a group, or the optimizer's own for
 * HALFSTEP_ALL_GROUPS. */
static int describe_hypers(record *r, int32_t group, int32_t row, hstep_error *error)
{
    halfstep_rule_info rule = {.struct_size = sizeof rule};
    int code = halfstep_get_rule_info(row, &rule);
    for (int32_t i = 0; i < rule.hypers && !code; i++) {
        setting s = {.group = group, .limits = {.struct_size = sizeof s.limits}};
        code = halfstep_get_hyper_info(row, i, &s.limits);
        if (code || s.limits.per_optimizer != (group == HALFSTEP_ALL_GROUPS)) continue;
        s.name = s.limits.name;
        code = halfstep_get_hyper(r->optimizer, group, s.name, &s.number[HERE]);
        if (!code && (code = add_setting(r, &s, error))) return code;
    }
    return code ? hstep_fail(error, code, "%s", halfstep_strerror(code)) : HALFSTEP_OK;
}

/* Reads a record of the optimizer, and prepares the one that the file will fill. */
static int describe_numbers(const record *r, halfstep_record *numbers, int32_t kind, int32_t index)
{
    numbers[HERE] = (halfstep_record){.struct_size = sizeof *numbers, .kind = kind, .index = index};
    numbers[IN_FILE] = numbers[HERE];
    return halfstep_get_record(r->optimizer, &numbers[HERE]);
}

static int describe_groups(record *r, hstep_error *error)
{
    int code = describe_choices(r, HALFSTEP_ALL_GROUPS, error);
    if (!code) code = describe_hypers(r, HALFSTEP_ALL_GROUPS, 0, error);
    for (int32_t g = 0; g < r->group_count && !code; g++) {
        group_record *group = &r->groups[g];
        group->source = -1;
        group->rule.struct_size = sizeof group->rule;
        code = halfstep_get_group_recipe(r->optimizer, g, group->recipe, sizeof group->recipe);
        char rule[sizeof group->recipe];
        snprintf(rule, sizeof rule, "%.*s", (int)strcspn(group->recipe, "/"), group->recipe);
        group->row = halfstep_rule_find(rule);
        if (!code) code = halfstep_get_rule_info(group->row, &group->rule);
        if (!code) code = describe_numbers(r, group->numbers, HALFSTEP_RECORD_GROUP, g);
        if (code) return hstep_fail(error, code, "group %d: %s", g, halfstep_strerror(code));
        code = describe_hypers(r, g, group->row, error);
        if (!code) code = describe_choices(r, g, error);
    }
    return code;
}

static void describe_scalar(tensor_record *t, const char *name, int is_grid, int32_t place)
{
    scalar_record *s = &t->scalar[t->scalars++];
    snprintf(s->name, sizeof s->name, "%s%s", name, is_grid ? ".grid" : "");
    s->is_grid = is_grid;
    s->place = place;
}

/* Returns the address of scalar number k in the optimizer's or the file's record. */
static double *scalar_of(tensor_record *t, int32_t k, int side)
{
    halfstep_record *numbers = &t->numbers[side];
    return &(t->scalar[k].is_grid ? numbers->grid : numbers->scalar)[t->scalar[k].place];
}

static int describe_tensor(record *r, int32_t index, hstep_error *error)
{
    tensor_record *t = &r->tensors[index];
    t->info.struct_size = sizeof t->info;
    int code = halfstep_get_tensor(r->optimizer, index, &t->info);
    if (!code) code = describe_numbers(r, t->numbers, HALFSTEP_RECORD_TENSOR, index);
    const halfstep_rule_info *rule = code ? NULL : &r->groups[t->info.group].rule;
    for (int32_t i = 0; !code && i < rule->scalars; i++) describe_scalar(t, rule->scalar_name[i], 0, i);
    for (int32_t i = 0; !code && i < rule->states; i++) {
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        code = halfstep_get_slot_info(r->optimizer, index, HALFSTEP_SLOT_STATE + i, &slot);
        if (!code && slot.grid) describe_scalar(t, slot.name, 1, i);
    }
    if (code) return hstep_fail(error, code, "tensor %d: %s", index, halfstep_strerror(code));
    int whole = t->info.n_rows == t->info.rows && t->info.n_columns == t->info.row_length;
    if (!whole && t->info.rows && t->info.row_length && !r->takes_parts)
        return hstep_fail(error, HALFSTEP_ERROR_UNSUPPORTED,
                          "only a part of tensor \"%s\" is here, %lld x %lld of %lld x %lld; files hold whole tensors",
                          t->info.name, (long long)t->info.n_rows, (long long)t->info.n_columns,
                          (long long)t->info.rows, (long long)t->info.row_length);
    r->by_name[index] = (named_tensor){t->info.name, index};
    return HALFSTEP_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const named_tensor *)a)->name, ((const named_tensor *)b)->name);
}

static int describe(record *r, const halfstep_optimizer *optimizer, int takes_parts, hstep_error *error)
{
    memset(r, 0, sizeof *r);
    r->takes_parts = takes_parts;
    /* Only functions that read are called with it if the caller's is const. */
    r->optimizer = (halfstep_optimizer *)optimizer;
    r->group_count = halfstep_group_count(optimizer);
    r->tensor_count = halfstep_tensor_count(optimizer);
    r->groups = calloc((size_t)r->group_count + 1, sizeof *r->groups);
    r->tensors = calloc((size_t)r->tensor_count + 1, sizeof *r->tensors);
    r->by_name = calloc((size_t)r->tensor_count + 1, sizeof *r->by_name);
    int code = r->groups && r->tensors && r->by_name ? HALFSTEP_OK : hstep_fail_memory(error);
    if (!code && (code = describe_numbers(r, r->numbers, HALFSTEP_RECORD_OPTIMIZER, 0)))
        return hstep_fail(error, code, "%s", halfstep_strerror(code));
    if (!code) code = describe_groups(r, error);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = describe_tensor(r, i, error);
    if (code) return code;
    qsort(r->by_name, (size_t)r->tensor_count, sizeof *r->by_name, compare_names);
    return HALFSTEP_OK;
}

/* ---- Arguments --------------------------------------------------------------------------------------------------- */

/* Copies the caller's options to *ours and points *options there. Fields that the caller's header lacks have their
 * defaults. A NULL *options stays NULL. has_checkpoint: 0 for a file by itself. */
static int take_options(halfstep_file_options *ours, const halfstep_file_options **options, int has_checkpoint,
                        const char *function, hstep_error *error)
{
    memset(ours, 0, sizeof *ours);
    if (!*options) return HALFSTEP_OK;
    if (!hstep_take_struct(ours, sizeof *ours, *options))
        return hstep_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: wrong struct_size", function);
    *options = ours;
    if (ours->settings > HALFSTEP_SETTINGS_COMPARE || ours->reserved)
        return hstep_fail(error, HALFSTEP_ERROR_ARGUMENT,
                          "%s: invalid options; settings must be 0 or 1, and reserved 0", function);
    if (!has_checkpoint && (ours->optimizer_file || ours->model_file))
        return hstep_fail(error, HALFSTEP_ERROR_ARGUMENT,
                          "%s: optimizer_file and model_file name files of a checkpoint; leave them NULL, because path "
                          "names this file",
                          function);
    return HALFSTEP_OK;
}

/* Points *shape to the sizes that the caller gives for a tensor of more than one dimension, or sets it to NULL. Fails
 * if they do not give the tensor's rows and elements. */
static int shape_of(const record *r, int32_t index, const halfstep_file_options *options, const uint64_t **shape,
                    hstep_error *error)
{
    const halfstep_tensor *t = &r->tensors[index].info;
    *shape = options && options->shapes && t->ndim > 1 ? options->shapes[index] : NULL;
    if (!*shape) return HALFSTEP_OK;
    if (hstep_gives(*shape, (uint64_t)t->ndim, (uint64_t)t->rows, (uint64_t)t->row_length, hstep_is_stack(t)))
        return HALFSTEP_OK;
    return hstep_fail(error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\": its shape does not give %lld rows of %lld elements",
                      t->name, (long long)t->rows, (long long)t->row_length);
}

/* Called for each stream of the tensors. A weight's stream may have no byte. */
typedef int stream_visitor(void *context, tensor_record *t, const hstep_stream *stream, int is_weight);

/* Calls visit for every stream, in the order of the tensors: first a tensor's states, then its weight unless `weights`
 * is NULL. Weights have the tensors' own names in a file of weights, and a suffix in a file of states. */
static int each_stream(const record *r, void *const *weights, int has_model_file, const halfstep_file_options *options,
                       stream_visitor *visit, void *context, hstep_error *error)
{
    int code = HALFSTEP_OK, in_storage = 0;
    for (int32_t i = 0; i < r->tensor_count && !code; i++) {
        tensor_record *t = &r->tensors[i];
        hstep_stream streams[HSTEP_MAX_STREAMS], weight;
        const uint64_t *shape;
        const halfstep_rule_info *rule = &r->groups[t->info.group].rule;
        int count = 0;
        code = shape_of(r, i, options, &shape, error);
        if (!code)
            code = hstep_list_streams(r->optimizer, i, &t->info, rule, shape, &in_storage, streams, &count, error);
        for (int k = 0; k < count && !code; k++) code = visit(context, t, &streams[k], 0);
        if (code || !weights) continue;
        code = hstep_weight_stream(r->optimizer, i, &t->info, shape, weights[i], has_model_file ? "" : HSTEP_WEIGHT,
                                   &weight, error);
        if (!code) code = visit(context, t, &weight, 1);
    }
    return code;
}

static const char *optimizer_file(const halfstep_file_options *options)
{
    return options && options->optimizer_file ? options->optimizer_file : "optimizer.safetensors";
}

static const char *model_file(const halfstep_file_options *options)
{
    return options && options->model_file ? options->model_file : "model.safetensors";
}

/* ---- Writing ----------------------------------------------------------------------------------------------------- */

/* A stream that is in storage. */
typedef struct stored {
    int32_t tensor, slot, extra;
} stored;

/* The writers of states and weights, and the place of error texts. `model` is NULL if weights go to the states. With
 * `put`, the pairs of metadata go there, and there are no writers. */
typedef struct declaring {
    halfstep_safetensors_writer *states, *model;
    const record *record;
    stored *streams; /* for each tensor of `states`: where it is if it has no memory */
    size_t count, capacity;
    hstep_put *put;
    void *context;
    hstep_error *error;
} declaring;

static int declare(const declaring *d, char *key, const char *value)
{
    int code = !key || !value ? hstep_fail_memory(d->error)
               : d->put       ? d->put(d->context, key, value, d->error)
                        : halfstep_declare_safetensors_metadata(d->states, key, value, d->error->text, d->error->size);
    free(key);
    return code;
}

static int declare_uint64(const declaring *d, char *key, uint64_t value)
{
    char text[HSTEP_NUMBER_BYTES];
    snprintf(text, sizeof text, "%llu", ull(value));
    return declare(d, key, text);
}

static char *setting_key(const setting *s)
{
    return s->group == HALFSTEP_ALL_GROUPS ? hstep_copy(s->name) : hstep_format("group.%d.%s", s->group, s->name);
}

static int declare_settings(const declaring *d, const record *r)
{
    int code = declare_uint64(d, hstep_copy("seed"), r->numbers[HERE].seed);
    for (size_t i = 0; i < r->setting_count && !code; i++) {
        const setting *s = &r->settings[i];
        char number[HSTEP_NUMBER_BYTES];
        if (!s->choice[HERE]) hstep_write_double(number, s->number[HERE]);
        code = declare(d, setting_key(s), s->choice[HERE] ? s->choice[HERE] : number);
    }
    for (int32_t g = 0; g < r->group_count && !code; g++)
        code = declare_uint64(d, hstep_format("group.%d.steps", g), r->groups[g].numbers[HERE].steps);
    return code;
}

/* Declares the names of all rules, and the recipe if all groups share it. They serve readers that know only one of
 * each. */
static int declare_recipe(const declaring *d, const record *r)
{
    hstep_buffer rules = {0};
    int same = r->group_count > 0, code = HALFSTEP_OK;
    for (int32_t g = 0; g < r->group_count; g++) {
        int seen = 0;
        for (int32_t i = 0; i < g && !seen; i++) seen = r->groups[i].row == r->groups[g].row;
        same &= !strcmp(r->groups[g].recipe, r->groups[0].recipe);
        if (!seen) hstep_append_format(&rules, "%s%s", g ? ", " : "", r->groups[g].rule.name);
    }
    hstep_append(&rules, "", 1);
    if (rules.failed) code = hstep_fail_memory(d->error);
    if (!code && r->group_count) code = declare(d, hstep_copy("rule"), rules.data);
    if (!code && same) code = declare(d, hstep_copy("recipe"), r->groups[0].recipe);
    free(rules.data);
    return code;
}

static int declare_tensor_numbers(const declaring *d, const record *r)
{
    int code = HALFSTEP_OK;
    for (int32_t i = 0; i < r->tensor_count && !code; i++) {
        tensor_record *t = &r->tensors[i];
        const group_record *g = &r->groups[t->info.group];
        const halfstep_record *c = &t->numbers[HERE];
        char text[4 * HSTEP_NUMBER_BYTES + 64];
        snprintf(text, sizeof text, "state_steps %llu full_steps %llu writes %llu id %llu", ull(c->state_steps),
                 ull(c->full_steps), ull(c->writes), ull(c->id));
        code = declare(d, hstep_format("counters.%s", t->info.name), text);
        if (!code) code = declare(d, hstep_format("recipe.%s", t->info.name), g->recipe);
        if (!code) code = declare_uint64(d, hstep_format("group_of.%s", t->info.name), (uint64_t)t->info.group);
        if (code || !t->scalars) continue;
        hstep_buffer scalars = {0};
        for (int32_t k = 0; k < t->scalars; k++) {
            char number[HSTEP_NUMBER_BYTES];
            hstep_write_double(number, *scalar_of(t, k, HERE));
            hstep_append_format(&scalars, "%s%s %s", k ? " " : "", t->scalar[k].name, number);
        }
        hstep_append(&scalars, "", 1);
        code = scalars.failed ? hstep_fail_memory(d->error)
                              : declare(d, hstep_format("scalars.%s", t->info.name), scalars.data);
        free(scalars.data);
    }
    return code;
}

static int declare_numbers(const declaring *d, const record *r)
{
    char norm[HSTEP_NUMBER_BYTES];
    hstep_write_double(norm, r->numbers[HERE].gradient_norm);
    int code = declare(d, hstep_copy("format"), HSTEP_OPTIMIZER_FORMAT);
    if (!code) code = declare_recipe(d, r);
    if (!code) code = declare_uint64(d, hstep_copy("skipped_steps"), r->numbers[HERE].skipped_steps);
    if (!code) code = declare(d, hstep_copy("gradient_norm"), norm);
    if (!code) code = declare_settings(d, r);
    return code ? code : declare_tensor_numbers(d, r);
}

int hstep_put_numbers(const halfstep_optimizer *optimizer, hstep_put *put, void *context, hstep_error *error)
{
    const declaring d = {.put = put, .context = context, .error = error};
    record r;
    int code = describe(&r, optimizer, 1, error);
    if (!code) code = declare_numbers(&d, &r);
    free_record(&r);
    return code;
}

/* Declares which weights are packed, with their format and the columns that are left of the last block. */
static int declare_packed(const declaring *d, const record *r)
{
    hstep_buffer list = {0};
    int packed = 0, code = HALFSTEP_OK;
    for (int32_t i = 0; i < r->tensor_count; i++) {
        const named_tensor *tensor = &r->by_name[i];
        halfstep_slot_info slot = {.struct_size = sizeof slot};
        halfstep_format_info format = {.struct_size = sizeof format};
        if (halfstep_get_slot_info(r->optimizer, tensor->index, HALFSTEP_SLOT_WEIGHT, &slot) ||
            halfstep_get_format_info(slot.format, &format) || format.geometry != HALFSTEP_GEOMETRY_PACKED)
            continue;
        hstep_append_text(&list, packed++ ? ", " : "{");
        hstep_append_json(&list, tensor->name);
        hstep_append_format(&list, ": {\"format\": \"%s\", \"columns\": %lld}", format.name,
                            (long long)r->tensors[tensor->index].info.row_length);
    }
    hstep_append(&list, "}", 2);
    if (list.failed) code = hstep_fail_memory(d->error);
    if (!code && packed)
        code = halfstep_declare_safetensors_metadata(d->model, HALFSTEP_PACKED_KEY, list.data, d->error->text,
                                                     d->error->size);
    free(list.data);
    return code;
}

static int declare_stream(void *context, tensor_record *t, const hstep_stream *stream, int is_weight)
{
    declaring *d = context;
    const stored place = {(int32_t)(t - d->record->tensors), stream->slot, stream->extra};
    if (is_weight && d->model) return hstep_declare_stream(d->model, t->info.name, stream, d->error);
    if (!hstep_grow((void **)&d->streams, d->count, &d->capacity, sizeof place)) return hstep_fail_memory(d->error);
    d->streams[d->count++] = place;
    return hstep_declare_stream(d->states, t->info.name, stream, d->error);
}

/* Reads from storage. */
static int fill_stream(void *context, uint64_t number, uint64_t offset, void *data, uint64_t bytes)
{
    const declaring *d = context;
    const stored *from = &d->streams[number];
    return halfstep_read_bytes(d->record->optimizer, from->tensor, from->slot, from->extra, offset, bytes, data);
}

/* Writes the optimizer into a checkpoint, or into the file at path if save is NULL. */
static int write_files(halfstep_checkpoint_save *save, const char *path, const halfstep_optimizer *optimizer,
                       void *const *weights, const halfstep_file_options *options, hstep_error *error)
{
    record r;
    declaring d = {.record = &r, .error = error};
    char *text = error->text;
    int code = describe(&r, optimizer, 0, error);
    if (!code && (halfstep_create_safetensors_writer(&d.states) ||
                  (save && weights && halfstep_create_safetensors_writer(&d.model))))
        code = hstep_fail_memory(error);
    if (!code) code = declare_numbers(&d, &r);
    if (!code && d.model) code = halfstep_declare_safetensors_metadata(d.model, "format", "pt", text, error->size);
    if (!code && d.model) code = declare_packed(&d, &r);
    if (!code) code = each_stream(&r, weights, d.model != NULL, options, declare_stream, &d, error);
    if (!code && d.model)
        code = halfstep_save_safetensors(save, model_file(options), d.model, NULL, NULL, text, error->size);
    if (!code && save)
        code = halfstep_save_safetensors(save, optimizer_file(options), d.states, fill_stream, &d, text, error->size);
    if (!code && !save) code = halfstep_write_safetensors(d.states, path, fill_stream, &d, text, error->size);
    free(d.streams);
    halfstep_destroy_safetensors_writer(d.states);
    halfstep_destroy_safetensors_writer(d.model);
    free_record(&r);
    return code;
}

int halfstep_save_optimizer(halfstep_checkpoint_save *save, const halfstep_optimizer *optimizer, void *const *weights,
                            const halfstep_file_options *options, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_file_options ours;
    if (!save || !optimizer)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_optimizer: NULL argument");
    int code = take_options(&ours, &options, 1, "halfstep_save_optimizer", &error);
    return hstep_note_failure(save, code ? code : write_files(save, NULL, optimizer, weights, options, &error), &error);
}

int halfstep_write_optimizer(const char *path, const halfstep_optimizer *optimizer, void *const *weights,
                             const halfstep_file_options *options, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_file_options ours;
    if (!path || !optimizer)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_write_optimizer: NULL argument");
    int code = take_options(&ours, &options, 0, "halfstep_write_optimizer", &error);
    return code ? code : write_files(NULL, path, optimizer, weights, options, &error);
}

/* ---- Reading: numbers -------------------------------------------------------------------------------------------- */

/* The loading of one optimizer. */
typedef struct loading {
    record *record;
    const halfstep_file_options *options;
    void *const *weights;
    hstep_source states, model; /* model: the file that holds the weights, if they are loaded */
    const hstep_pairs *pairs;   /* metadata that is not of a safetensors file, for a handle of the same settings */
    int has_model_file;         /* 1: model is a file of its own */
    void *piece;                /* HSTEP_CHECK_BYTES for values while they are checked */
    unsigned char *known;       /* for each tensor in the file of states: 1 if the optimizer stores it */
    uint64_t *places;           /* numbers of the streams in their files, in the order of each_stream() */
    size_t place_count, place_capacity;
    char *key; /* buffer for any key that is looked up */
    size_t key_bytes;
    hstep_error *error;
} loading;

static const char *find_value(const loading *l, const char *prefix, const char *name)
{
    snprintf(l->key, l->key_bytes, "%s%s", prefix, name);
    if (!l->pairs) return halfstep_safetensors_metadata_find(l->states.file, l->key);
    int found;
    size_t at = hstep_find_pair(l->pairs, l->key, &found);
    return found ? l->pairs->list[at].value : NULL;
}

static int make_key(loading *l)
{
    l->key_bytes = 128;
    for (int32_t i = 0; i < l->record->tensor_count; i++) {
        size_t bytes = strlen(l->record->tensors[i].info.name) + 32;
        if (bytes > l->key_bytes) l->key_bytes = bytes;
    }
    l->key = malloc(l->key_bytes);
    return l->key ? HALFSTEP_OK : hstep_fail_memory(l->error);
}

static int fail_value(const loading *l, const char *prefix, const char *name)
{
    return hstep_fail(l->error, HALFSTEP_ERROR_FORMAT, "%s: the metadata \"%s%s\" is missing or malformed",
                      l->states.path, prefix, name);
}

/* Reads a whole number of at most INT64_MAX. */
static int read_count(const loading *l, const char *prefix, const char *name, uint64_t *value)
{
    const char *text = find_value(l, prefix, name);
    return text && hstep_is_uint64(text, value) && *value <= INT64_MAX ? HALFSTEP_OK : fail_value(l, prefix, name);
}

/* Moves *text behind "WORD " and returns 1, or returns 0 if *text does not begin with that. */
static int take_word(const char **text, const char *word)
{
    size_t length = strlen(word);
    if (strncmp(*text, word, length) || (*text)[length] != ' ') return 0;
    *text += length + 1;
    return 1;
}

static int take_counter(const char **text, const char *name, uint64_t *value)
{
    if (!take_word(text, name) || !hstep_read_uint64(text, value)) return 0;
    if (**text == ' ' && (*text)[1]) ++*text;
    return 1;
}

static int read_counters(const loading *l, tensor_record *t)
{
    halfstep_record *c = &t->numbers[IN_FILE];
    const char *text = find_value(l, "counters.", t->info.name);
    const char *group = find_value(l, "group_of.", t->info.name);
    if (!text && group) {
        t->has_no_steps = 1;
        c->id = t->numbers[HERE].id;
        return HALFSTEP_OK;
    }
    if (!text)
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s does not have tensor \"%s\"", l->states.path,
                          t->info.name);
    if (!take_counter(&text, "state_steps", &c->state_steps) || !take_counter(&text, "full_steps", &c->full_steps) ||
        !take_counter(&text, "writes", &c->writes) || !take_counter(&text, "id", &c->id) || *text || !c->id ||
        c->state_steps > INT64_MAX || c->full_steps > INT64_MAX || c->writes > INT64_MAX)
        return fail_value(l, "counters.", t->info.name);
    return HALFSTEP_OK;
}

/* Takes the name of a grid that this optimizer does not have, because a hyper-parameter leaves its state out. If the
 * file has the state itself, that is refused later, by the name of the state. */
static int take_other_grid(const char **text, const halfstep_rule_info *rule)
{
    for (int32_t i = 0; i < rule->states; i++) {
        char name[sizeof((scalar_record *)0)->name];
        if (rule->state_role[i] != HALFSTEP_ROLE_NONNEG) continue;
        snprintf(name, sizeof name, "%s.grid", rule->state_name[i]);
        if (take_word(text, name)) return 1;
    }
    return 0;
}

/* Parses "NAME VALUE NAME VALUE ..." and returns 1 if it took all of the text. A name may come once at most. Sets bit i
 * of *found for scalar i. */
static int parse_scalars(const char *text, const halfstep_rule_info *rule, tensor_record *t, unsigned *found)
{
    *found = 0;
    while (*text) {
        int32_t i = 0;
        double value;
        while (i < t->scalars && !take_word(&text, t->scalar[i].name)) i++;
        if (i == t->scalars ? !take_other_grid(&text, rule) : (int)(*found >> i & 1)) return 0;
        if (!hstep_read_double(&text, &value)) return 0;
        if (i < t->scalars) {
            *scalar_of(t, i, IN_FILE) = value;
            *found |= 1u << i;
        }
        if (*text == ' ' && text[1]) text++;
        else if (*text) return 0;
    }
    return 1;
}

static int read_scalars(const loading *l, tensor_record *t)
{
    const char *text = find_value(l, "scalars.", t->info.name);
    unsigned found = 0, needed = 0, all = (1u << t->scalars) - 1;
    for (int32_t i = 0; i < t->scalars; i++) {
        *scalar_of(t, i, IN_FILE) = t->scalar[i].is_grid;
        needed |= (unsigned)!t->scalar[i].is_grid << i;
    }
    if (t->has_no_steps) return HALFSTEP_OK;
    /* Python writes none for a parameter without elements or without a step. */
    if (!text && (!t->scalars || !t->numbers[IN_FILE].state_steps || !t->info.rows || !t->info.row_length))
        return HALFSTEP_OK;
    if ((!text && needed) || (text && !parse_scalars(text, &l->record->groups[t->info.group].rule, t, &found)) ||
        (found & needed) != needed)
        return fail_value(l, "scalars.", t->info.name);
    t->lacks_grid = found != all;
    return HALFSTEP_OK;
}

/* Reads the recipe of a tensor and its group in the file. Fails unless the recipe is the same here, and unless tensors
 * of one group here are in one group there. */
static int read_group_of(const loading *l, tensor_record *t)
{
    group_record *g = &l->record->groups[t->info.group];
    uint64_t number;
    char there[64];
    const char *recipe = find_value(l, "recipe.", t->info.name);
    if (!recipe && !t->has_no_steps) return fail_value(l, "recipe.", t->info.name);
    if (recipe && halfstep_recipe_full(recipe, there, sizeof there))
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH,
                          "%s: tensor \"%s\" has the recipe %s, which this library does "
                          "not know",
                          l->states.path, t->info.name, recipe);
    if (recipe && strcmp(there, g->recipe))
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "the recipe of tensor \"%s\" is %s here but %s in %s",
                          t->info.name, g->recipe, there, l->states.path);
    const char *text = find_value(l, "group_of.", t->info.name);
    if (!text || !hstep_is_uint64(text, &number) || number > INT32_MAX) return fail_value(l, "group_of.", t->info.name);
    if (g->source >= 0 && (uint64_t)g->source != number)
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH,
                          "%s: tensor \"%s\" is in group %llu of the file, others of its group "
                          "here are in group %lld",
                          l->states.path, t->info.name, ull(number), (long long)g->source);
    g->source = (int64_t)number;
    return HALFSTEP_OK;
}

static int is_left(const loading *l, const char *name)
{
    if (l->pairs) return strcmp(name, "generator") && strcmp(name, "seed");
    const char *const *left = l->options ? l->options->leave : NULL;
    while (left && *left && strcmp(*left, name)) left++;
    return left && *left;
}

static int is_compared(const loading *l)
{
    return l->pairs || (l->options && l->options->settings == HALFSTEP_SETTINGS_COMPARE);
}

/* Returns the default of a choice. A file lacks choices that came later, and was written with their defaults. */
static const char *usual_choice(const loading *l, const setting *s)
{
    if (!strcmp(s->name, "decay")) return l->record->groups[s->group].rule.decay;
    return halfstep_choice_value(s->name, 0);
}

static int fail_setting(const loading *l, const setting *s)
{
    char group[32] = "";
    if (s->group != HALFSTEP_ALL_GROUPS && l->record->group_count > 1)
        snprintf(group, sizeof group, ", group %d", s->group);
    if (s->choice[HERE])
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s is %s here but %s in %s%s", s->name, s->choice[HERE],
                          s->choice[IN_FILE], l->states.path, group);
    char here[32] = "", in_file[32] = "";
    for (int digits = 10; digits <= 17 && !strcmp(here, in_file); digits += 7) {
        snprintf(here, sizeof here, "%.*g", digits, s->number[HERE]);
        snprintf(in_file, sizeof in_file, "%.*g", digits, s->number[IN_FILE]);
    }
    return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s is %s here but %s in %s%s", s->name, here, in_file,
                      l->states.path, group);
}

/* Returns the library's own copy of a choice's value, which outlives the file, or NULL for an unknown value. */
static const char *known_choice(const char *choice, const char *value)
{
    const char *known;
    for (int32_t i = 0; (known = halfstep_choice_value(choice, i)) != NULL; i++)
        if (!strcmp(known, value)) break;
    return known;
}

static int read_setting(const loading *l, setting *s)
{
    const int compare = is_compared(l);
    const int64_t source = s->group == HALFSTEP_ALL_GROUPS ? 0 : l->record->groups[s->group].source;
    s->choice[IN_FILE] = s->choice[HERE];
    s->number[IN_FILE] = s->number[HERE];
    /* A group without tensors continues no group of the file. */
    if (is_left(l, s->name) || source < 0) return HALFSTEP_OK;
    char prefix[32] = "";
    if (s->group != HALFSTEP_ALL_GROUPS) snprintf(prefix, sizeof prefix, "group.%lld.", (long long)source);
    const char *value = find_value(l, prefix, s->name);
    int code = HALFSTEP_OK;
    /* As with the seed, other random bits would follow from another one. */
    if (!value && !strcmp(s->name, "generator")) return fail_value(l, prefix, s->name);
    if (s->choice[HERE]) {
        if (value || compare) s->choice[IN_FILE] = known_choice(s->name, value ? value : usual_choice(l, s));
        if (!s->choice[IN_FILE])
            code = hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s: %s%s is %s, which this library does not have",
                              l->states.path, prefix, s->name, value);
        else if (compare && strcmp(s->choice[HERE], s->choice[IN_FILE])) code = fail_setting(l, s);
    } else {
        if (!value && compare) s->number[IN_FILE] = s->limits.initial;
        double number = s->number[IN_FILE];
        if (value && !hstep_is_double(value, &number)) code = fail_value(l, prefix, s->name);
        s->number[IN_FILE] = number;
        if (!code && compare && s->number[HERE] != number) code = fail_setting(l, s);
        if (!code && value &&
            !(number >= s->limits.minimum &&
              (number < s->limits.maximum || (number == s->limits.maximum && !s->limits.exclusive_maximum))))
            code = hstep_fail(l->error, HALFSTEP_ERROR_RANGE, "%s: %s%s is %s, not in [%g, %g%c", l->states.path,
                              prefix, s->name, value, s->limits.minimum, s->limits.maximum,
                              s->limits.exclusive_maximum ? ')' : ']');
    }
    return code;
}

static int read_seed(const loading *l)
{
    record *r = l->record;
    const int compare = is_compared(l);
    const char *text = find_value(l, "seed", "");
    r->numbers[IN_FILE].seed = r->numbers[HERE].seed;
    if (is_left(l, "seed")) return HALFSTEP_OK;
    if (!text || !hstep_is_uint64(text, &r->numbers[IN_FILE].seed)) return fail_value(l, "seed", "");
    if (compare && r->numbers[HERE].seed != r->numbers[IN_FILE].seed)
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "seed is %llu here but %llu in %s",
                          ull(r->numbers[HERE].seed), ull(r->numbers[IN_FILE].seed), l->states.path);
    return HALFSTEP_OK;
}

static int read_steps(const loading *l)
{
    record *r = l->record;
    for (int32_t g = 0; g < r->group_count; g++) {
        group_record *group = &r->groups[g];
        group->numbers[IN_FILE].steps = group->numbers[HERE].steps;
        if (group->source < 0) continue;
        char name[32];
        snprintf(name, sizeof name, "group.%lld.steps", (long long)group->source);
        int code = read_count(l, name, "", &group->numbers[IN_FILE].steps);
        if (code) return code;
    }
    int code = read_count(l, "skipped_steps", "", &r->numbers[IN_FILE].skipped_steps);
    const char *text = find_value(l, "gradient_norm", "");
    double *norm = &r->numbers[IN_FILE].gradient_norm;
    if (!code && (!text || !hstep_is_double(text, norm) || !(*norm >= 0.0))) return fail_value(l, "gradient_norm", "");
    return code;
}

static const named_tensor *find_tensor(const record *r, const char *name)
{
    named_tensor wanted = {.name = name};
    return r->tensor_count ? bsearch(&wanted, r->by_name, (size_t)r->tensor_count, sizeof wanted, compare_names) : NULL;
}

/* Fails if the file has a tensor that this optimizer does not have, unless options.subset allows it. */
static int check_unknown_tensors(const loading *l)
{
    static const char *const prefixes[] = {"counters.", "group_of."};
    uint64_t count = l->pairs ? l->pairs->count : halfstep_safetensors_metadata_count(l->states.file);
    if (l->options && l->options->subset) return HALFSTEP_OK;
    for (uint64_t i = 0; i < count; i++) {
        const char *key = "", *value;
        if (l->pairs) key = l->pairs->list[i].key;
        else halfstep_get_safetensors_metadata(l->states.file, i, &key, &value);
        for (size_t k = 0; k < sizeof prefixes / sizeof *prefixes; k++) {
            size_t length = strlen(prefixes[k]);
            if (!strncmp(key, prefixes[k], length) && !find_tensor(l->record, key + length))
                return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH,
                                  "%s has a tensor \"%s\" that this optimizer does not have", l->states.path,
                                  key + length);
        }
    }
    return HALFSTEP_OK;
}

typedef struct numbered_id {
    uint64_t id;
    int32_t index;
} numbered_id;

static int compare_ids(const void *a, const void *b)
{
    const uint64_t first = *(const uint64_t *)a, second = *(const uint64_t *)b;
    return first < second ? -1 : first > second;
}

static int compare_numbered(const void *a, const void *b)
{
    return compare_ids(&((const numbered_id *)a)->id, &((const numbered_id *)b)->id);
}

/* Lists all ids of tensors, here and in the file. */
static int list_ids(const loading *l)
{
    record *r = l->record;
    size_t n = 0;
    r->ids = malloc((2 * (size_t)r->tensor_count + 1) * sizeof *r->ids);
    if (!r->ids) return hstep_fail_memory(l->error);
    for (int32_t i = 0; i < r->tensor_count; i++)
        for (int side = 0; side < SIDES; side++) r->ids[n++] = r->tensors[i].numbers[side].id;
    qsort(r->ids, n, sizeof *r->ids, compare_ids);
    return HALFSTEP_OK;
}

/* Fails if the file gives two tensors one id, because they would share their random bits. */
static int check_ids(const loading *l)
{
    const record *r = l->record;
    numbered_id *ids = malloc(((size_t)r->tensor_count + 1) * sizeof *ids);
    int code = ids ? HALFSTEP_OK : hstep_fail_memory(l->error);
    for (int32_t i = 0; i < r->tensor_count && ids; i++) ids[i] = (numbered_id){r->tensors[i].numbers[IN_FILE].id, i};
    if (ids && r->tensor_count) qsort(ids, (size_t)r->tensor_count, sizeof *ids, compare_numbered);
    for (int32_t i = 1; i < r->tensor_count && !code; i++)
        if (ids[i - 1].id == ids[i].id)
            code = hstep_fail(l->error, HALFSTEP_ERROR_DUPLICATE, "%s: tensors \"%s\" and \"%s\" have the same id %llu",
                              l->states.path, r->tensors[ids[i - 1].index].info.name,
                              r->tensors[ids[i].index].info.name, ull(ids[i].id));
    free(ids);
    return code;
}

/* Fails if a name in `leave` is not one of a setting here, because it would leave nothing. */
static int check_left(const loading *l)
{
    const record *r = l->record;
    for (const char *const *name = l->options ? l->options->leave : NULL; name && *name; name++) {
        int known = !strcmp(*name, "seed");
        for (size_t i = 0; i < r->setting_count && !known; i++) known = !strcmp(r->settings[i].name, *name);
        if (!known)
            return hstep_fail(
                l->error, HALFSTEP_ERROR_ARGUMENT,
                "options: leave names \"%s\", which is no hyper-parameter or choice of this optimizer, nor "
                "\"seed\"",
                *name);
    }
    return HALFSTEP_OK;
}

static int read_numbers(const loading *l)
{
    record *r = l->record;
    const char *format = find_value(l, "format", "");
    if (!format || strcmp(format, HSTEP_OPTIMIZER_FORMAT))
        return hstep_fail(l->error, HALFSTEP_ERROR_FORMAT,
                          "%s is not an optimizer file of halfstep: its format is not \"" HSTEP_OPTIMIZER_FORMAT "\"",
                          l->states.path);
    int code = check_left(l);
    if (!code) code = check_unknown_tensors(l);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = read_counters(l, &r->tensors[i]);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = read_group_of(l, &r->tensors[i]);
    if (!code) code = read_seed(l);
    for (size_t i = 0; i < r->setting_count && !code; i++) code = read_setting(l, &r->settings[i]);
    if (!code) code = read_steps(l);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = read_scalars(l, &r->tensors[i]);
    if (!code) code = check_ids(l);
    return code ? code : list_ids(l);
}

/* ---- Reading: streams -------------------------------------------------------------------------------------------- */

enum { HSTEP_CHECK_BYTES = 1 << 18 };

static int load_streams(loading *l, stream_visitor *visit)
{
    return each_stream(l->record, l->weights, l->has_model_file, l->options, visit, l, l->error);
}

static int check_stream(void *context, tensor_record *t, const hstep_stream *stream, int is_weight)
{
    loading *l = context;
    const hstep_source *source = is_weight ? &l->model : &l->states;
    uint64_t index;
    if (!stream->bytes || (t->has_no_steps && !is_weight)) return HALFSTEP_OK;
    int code = hstep_find_stream(source, &t->info, stream, &index);
    if (!code && !hstep_grow((void **)&l->places, l->place_count, &l->place_capacity, sizeof *l->places))
        code = hstep_fail_memory(l->error);
    if (code) return code;
    l->places[l->place_count++] = index;
    if (source->file == l->states.file) l->known[index] = 1;
    return stream->nonnegative ? hstep_check_values(source, index, stream->finite, l->piece, HSTEP_CHECK_BYTES)
                               : HALFSTEP_OK;
}

static int fail_taking(const loading *l, int code)
{
    const char *detail = halfstep_error_detail(l->record->optimizer);
    return hstep_fail(l->error, code, "%s: %s", l->states.path, *detail ? detail : halfstep_strerror(code));
}

/* Copies tensor `place` of the file to a stream in storage. UINT64_MAX: writes zeros. */
static int fill_storage(const loading *l, const tensor_record *t, const hstep_stream *stream, uint64_t place)
{
    const int32_t index = (int32_t)(t - l->record->tensors);
    int code = HALFSTEP_OK;
    char *piece = calloc(1, HSTEP_CHECK_BYTES);
    if (!piece) return hstep_fail_memory(l->error);
    for (uint64_t at = 0, bytes; at < stream->bytes && !code; at += bytes) {
        bytes = stream->bytes - at < HSTEP_CHECK_BYTES ? stream->bytes - at : HSTEP_CHECK_BYTES;
        if (place != UINT64_MAX)
            code = halfstep_read_safetensor(l->states.file, place, at, piece, bytes, l->error->text, l->error->size);
        if (code) break;
        code = halfstep_write_bytes(l->record->optimizer, index, stream->slot, stream->extra, at, bytes, piece);
        if (code) code = fail_taking(l, code);
    }
    free(piece);
    return code;
}

/* Copies a weight that was loaded to the storage, if that keeps weights. */
static int store_weight(const loading *l, const tensor_record *t, const hstep_stream *stream)
{
    const int32_t index = (int32_t)(t - l->record->tensors);
    halfstep_optimizer *const o = l->record->optimizer;
    /* A storage without weights, and memory, refuse even no bytes. */
    if (halfstep_write_bytes(o, index, HALFSTEP_SLOT_WEIGHT, 0, 0, 0, NULL)) return HALFSTEP_OK;
    const int code = halfstep_write_bytes(o, index, HALFSTEP_SLOT_WEIGHT, 0, 0, stream->bytes, stream->data);
    return code ? fail_taking(l, code) : HALFSTEP_OK;
}

static int read_stream(void *context, tensor_record *t, const hstep_stream *stream, int is_weight)
{
    loading *l = context;
    if (!stream->bytes) return HALFSTEP_OK;
    if (t->has_no_steps && !is_weight) {
        if (!stream->data) return fill_storage(l, t, stream, UINT64_MAX);
        memset(stream->data, 0, (size_t)stream->bytes);
        return HALFSTEP_OK;
    }
    const uint64_t place = l->places[l->place_count++];
    if (!stream->data) return fill_storage(l, t, stream, place);
    int code = halfstep_read_safetensor(is_weight ? l->model.file : l->states.file, place, 0, stream->data,
                                        stream->bytes, l->error->text, l->error->size);
    return code || !is_weight ? code : store_weight(l, t, stream);
}

/* Fails if the file holds states that this optimizer does not have. Either it was saved with other settings, or a
 * tensor's counters are missing. */
static int check_unknown_streams(const loading *l)
{
    uint64_t count = halfstep_safetensor_count(l->states.file);
    for (uint64_t i = 0; i < count; i++) {
        halfstep_safetensor_info info = {.struct_size = sizeof info};
        if (l->known[i] || halfstep_get_safetensor_info(l->states.file, i, &info) || !info.bytes) continue;
        const char *slash = strrchr(info.name, '/');
        char *name = slash ? hstep_format("%.*s", (int)(slash - info.name), info.name) : hstep_copy(info.name);
        if (!name) return hstep_fail_memory(l->error);
        const named_tensor *ours = slash ? find_tensor(l->record, name) : NULL;
        free(name);
        if (ours ? !strcmp(slash + 1, HSTEP_WEIGHT) : l->options && l->options->subset) continue;
        if (ours && l->record->tensors[ours->index].has_no_steps) return fail_value(l, "counters.", ours->name);
        return hstep_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s has \"%s\", which this optimizer does not store",
                          l->states.path, info.name);
    }
    return HALFSTEP_OK;
}

static int check_streams(loading *l)
{
    l->piece = malloc(HSTEP_CHECK_BYTES);
    l->known = calloc((size_t)halfstep_safetensor_count(l->states.file) + 1, 1);
    int code = l->piece && l->known ? load_streams(l, check_stream) : hstep_fail_memory(l->error);
    if (!code) code = check_unknown_streams(l);
    free(l->piece);
    free(l->known);
    return code;
}

/* ---- Taking what was read ---------------------------------------------------------------------------------------- */

/* Sets the records of tensors. Ids must differ at every moment, but tensors may have exchanged theirs. Those that
 * change are therefore set to unused ids first: to numbers from 1 on that are not in the sorted list. */
static int set_tensor_records(const record *r, int side)
{
    const uint64_t *known = r->ids, *end = r->ids + 2 * (size_t)r->tensor_count;
    uint64_t parked = 0;
    int code = HALFSTEP_OK;
    for (int32_t i = 0; i < r->tensor_count && !code; i++) {
        const tensor_record *t = &r->tensors[i];
        halfstep_record c = t->numbers[side];
        if (t->numbers[HERE].id == t->numbers[IN_FILE].id) continue;
        for (parked++; known < end && *known <= parked; known++) parked += *known == parked;
        c.id = parked;
        code = halfstep_set_record(r->optimizer, &c);
    }
    for (int32_t i = 0; i < r->tensor_count && !code; i++)
        code = halfstep_set_record(r->optimizer, &r->tensors[i].numbers[side]);
    return code;
}

static int set_settings(const record *r, int side)
{
    int code = HALFSTEP_OK;
    for (size_t i = 0; i < r->setting_count && !code; i++) {
        const setting *s = &r->settings[i];
        double number;
        if (s->choice[HERE]) {
            if (strcmp(s->choice[HERE], s->choice[IN_FILE]))
                code = halfstep_set_choice(r->optimizer, s->group, s->name, s->choice[side]);
        } else if (!(code = halfstep_get_hyper(r->optimizer, s->group, s->name, &number)) &&
                   number != s->number[side]) {
            /* Sets it only if it changes, because the lr that is set first is the reference of fully decoupled
             * decay. */
            code = halfstep_set_hyper(r->optimizer, s->group, s->name, s->number[side]);
        }
    }
    return code;
}

static int set_numbers(const record *r, int side)
{
    int code = set_settings(r, side);
    if (!code) code = set_tensor_records(r, side);
    if (!code) code = halfstep_set_record(r->optimizer, &r->numbers[side]);
    for (int32_t g = 0; g < r->group_count && !code; g++)
        code = halfstep_set_record(r->optimizer, &r->groups[g].numbers[side]);
    return code;
}

/* Sets the numbers of the file, or none. Fails for a grid that is missing; where the file has the state in another
 * format, its stream was refused before. */
static int take_numbers(const loading *l)
{
    for (int32_t i = 0; i < l->record->tensor_count; i++)
        if (l->record->tensors[i].lacks_grid) return fail_value(l, "scalars.", l->record->tensors[i].info.name);
    int code = set_numbers(l->record, IN_FILE);
    if (!code) return HALFSTEP_OK;
    code = fail_taking(l, code);
    set_numbers(l->record, HERE);
    return code;
}

static int take(loading *l)
{
    int code = take_numbers(l);
    if (code) return code;
    char detail[900];
    hstep_error trouble = hstep_make_error(detail, sizeof detail), *told = l->error;
    l->error = l->states.error = l->model.error = &trouble;
    l->place_count = 0;
    code = load_streams(l, read_stream);
    if (!code && (code = halfstep_flush(l->record->optimizer, l->weights))) code = fail_taking(l, code);
    l->error = l->states.error = l->model.error = told;
    /* The same bytes were read once without an error, so the disk or the file is failing right now. */
    if (code) hstep_fail(told, code, "%s; the optimizer is only partly loaded: load it again", detail);
    return code;
}

static int load(loading *l, const halfstep_optimizer *optimizer, hstep_error *error)
{
    record r;
    l->record = &r;
    l->error = l->states.error = l->model.error = error;
    int code = describe(&r, optimizer, 0, error);
    if (!code) code = make_key(l);
    if (!code) code = read_numbers(l);
    if (!code) code = check_streams(l);
    if (!code) code = take(l);
    free(l->key);
    free(l->places);
    free_record(&r);
    return code;
}

int hstep_take_numbers(halfstep_optimizer *optimizer, const char *path, const hstep_pairs *pairs, hstep_error *error)
{
    record r;
    loading l = {.record = &r, .states = {.path = path, .error = error}, .pairs = pairs, .error = error};
    int code = describe(&r, optimizer, 1, error);
    if (!code) code = make_key(&l);
    if (!code) code = read_numbers(&l);
    if (!code) code = take_numbers(&l);
    free(l.key);
    free_record(&r);
    return code;
}

static int open_source(hstep_source *source, const halfstep_checkpoint *checkpoint, const char *name,
                       hstep_error *error)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    source->path = halfstep_checkpoint_path(checkpoint, name);
    if (source->path) return halfstep_open_safetensors(&source->file, source->path, error->text, error->size);
    halfstep_get_checkpoint_info(checkpoint, &info);
    return hstep_fail(error, HALFSTEP_ERROR_MISMATCH,
                      "%s: the checkpoint is sound, but has no %s; it was saved without it, or under another name",
                      info.directory, name);
}

/* Loads an optimizer from a checkpoint, or from the file at path if checkpoint is NULL. Error texts name `function`. */
static int load_files(const char *function, const halfstep_checkpoint *checkpoint, const char *path,
                      halfstep_optimizer *optimizer, void *const *weights, const halfstep_file_options *options,
                      char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_file_options ours;
    loading l = {.weights = weights, .has_model_file = checkpoint != NULL};
    if ((!checkpoint && !path) || !optimizer)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "%s: NULL argument", function);
    int code = take_options(&ours, &options, checkpoint != NULL, function, &error);
    l.options = options;
    if (!code && checkpoint) {
        code = open_source(&l.states, checkpoint, optimizer_file(options), &error);
        if (!code && weights) code = open_source(&l.model, checkpoint, model_file(options), &error);
    } else if (!code) {
        code = halfstep_open_safetensors(&l.states.file, path, error.text, error.size);
        l.states.path = path;
        l.model = l.states;
    }
    if (!code) code = load(&l, optimizer, &error);
    if (checkpoint) hstep_know_checkpoint(checkpoint, !code);
    halfstep_close_safetensors(l.states.file);
    if (checkpoint) halfstep_close_safetensors(l.model.file);
    return code;
}

int halfstep_load_optimizer(const halfstep_checkpoint *checkpoint, halfstep_optimizer *optimizer, void *const *weights,
                            const halfstep_file_options *options, char *text, size_t text_size)
{
    return load_files("halfstep_load_optimizer", checkpoint, NULL, optimizer, weights, options, text, text_size);
}

int halfstep_read_optimizer(const char *path, halfstep_optimizer *optimizer, void *const *weights,
                            const halfstep_file_options *options, char *text, size_t text_size)
{
    return load_files("halfstep_read_optimizer", NULL, path, optimizer, weights, options, text, text_size);
}
