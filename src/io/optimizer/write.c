/* Writing an optimizer into a checkpoint or a file of its own. */
#include "io/numbers.h"
#include "io/optimizer/record.h"

/* A plane that is in storage. */
typedef struct stored {
    int32_t tensor, slot, extra;
} stored;

/* The writers of states and weights, and the place of error texts. `model` is NULL if weights go to the states. With
 * `put`, the pairs of metadata go there, and there are no writers. */
typedef struct declaring {
    halfstep_safetensors_writer *states, *model;
    const record *record;
    stored *planes; /* for each tensor of `states`: where it is if it has no memory */
    size_t count, capacity;
    hstep_put *put;
    void *context;
    hstep_error *error;
} declaring;

static int declare(const declaring *d, char *key, const char *value)
{
    int code = !key || !value ? io_fail_memory(d->error)
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
    if (rules.failed) code = io_fail_memory(d->error);
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
            hstep_write_double(number, *hstep_scalar_of(t, k, HERE));
            hstep_append_format(&scalars, "%s%s %s", k ? " " : "", t->scalar[k].name, number);
        }
        hstep_append(&scalars, "", 1);
        code = scalars.failed ? io_fail_memory(d->error)
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
    int code = hstep_describe_optimizer(&r, optimizer, 1, error);
    if (!code) code = declare_numbers(&d, &r);
    hstep_free_record(&r);
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
    if (list.failed) code = io_fail_memory(d->error);
    if (!code && packed)
        code = halfstep_declare_safetensors_metadata(d->model, HALFSTEP_PACKED_KEY, list.data, d->error->text,
                                                     d->error->size);
    free(list.data);
    return code;
}

static int declare_plane(void *context, tensor_record *t, const hstep_plane *plane, int is_weight)
{
    declaring *d = context;
    const stored place = {(int32_t)(t - d->record->tensors), plane->slot, plane->extra};
    if (is_weight && d->model) return hstep_declare_plane(d->model, t->info.name, plane, d->error);
    if (!io_grow((void **)&d->planes, d->count, &d->capacity, sizeof place)) return io_fail_memory(d->error);
    d->planes[d->count++] = place;
    return hstep_declare_plane(d->states, t->info.name, plane, d->error);
}

/* Reads from storage. */
static int fill_plane(void *context, uint64_t number, uint64_t offset, void *data, uint64_t bytes)
{
    const declaring *d = context;
    const stored *from = &d->planes[number];
    return halfstep_read_bytes(d->record->optimizer, from->tensor, from->slot, from->extra, offset, bytes, data);
}

/* Writes the optimizer into a checkpoint, or into the file at path if save is NULL. */
static int write_files(halfstep_checkpoint_save *save, const char *path, const halfstep_optimizer *optimizer,
                       void *const *weights, const halfstep_file_options *options, hstep_error *error)
{
    record r;
    declaring d = {.record = &r, .error = error};
    char *text = error->text;
    int code = hstep_describe_optimizer(&r, optimizer, 0, error);
    if (!code && (halfstep_create_safetensors_writer(&d.states) ||
                  (save && weights && halfstep_create_safetensors_writer(&d.model))))
        code = io_fail_memory(error);
    if (!code) code = declare_numbers(&d, &r);
    if (!code && d.model) code = halfstep_declare_safetensors_metadata(d.model, "format", "pt", text, error->size);
    if (!code && d.model) code = declare_packed(&d, &r);
    if (!code) code = hstep_each_plane(&r, weights, d.model != NULL, options, declare_plane, &d, error);
    if (!code && d.model)
        code = halfstep_save_safetensors(save, hstep_model_file(options), d.model, NULL, NULL, text, error->size);
    if (!code && save)
        code =
            halfstep_save_safetensors(save, hstep_optimizer_file(options), d.states, fill_plane, &d, text, error->size);
    if (!code && !save) code = halfstep_write_safetensors(d.states, path, fill_plane, &d, text, error->size);
    free(d.planes);
    halfstep_destroy_safetensors_writer(d.states);
    halfstep_destroy_safetensors_writer(d.model);
    hstep_free_record(&r);
    return code;
}

int halfstep_save_optimizer(halfstep_checkpoint_save *save, const halfstep_optimizer *optimizer, void *const *weights,
                            const halfstep_file_options *options, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_file_options ours;
    if (!save || !optimizer) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_save_optimizer: NULL argument");
    int code = hstep_take_options(&ours, &options, 1, "halfstep_save_optimizer", &error);
    return hstep_note_failure(save, code ? code : write_files(save, NULL, optimizer, weights, options, &error), &error);
}

int halfstep_write_optimizer(const char *path, const halfstep_optimizer *optimizer, void *const *weights,
                             const halfstep_file_options *options, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    halfstep_file_options ours;
    if (!path || !optimizer) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_write_optimizer: NULL argument");
    int code = hstep_take_options(&ours, &options, 0, "halfstep_write_optimizer", &error);
    return code ? code : write_files(NULL, path, optimizer, weights, options, &error);
}
