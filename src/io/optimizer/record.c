#include "io/optimizer/record.h"

#include "base/structs.h"

void hstep_free_record(record *r)
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
    if (!io_grow((void **)&r->settings, r->setting_count, &r->setting_capacity, sizeof *added))
        return io_fail_memory(error);
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
    return code ? io_fail(error, code, "%s", halfstep_strerror(code)) : HALFSTEP_OK;
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
        if (code) return io_fail(error, code, "group %d: %s", g, halfstep_strerror(code));
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

double *hstep_scalar_of(tensor_record *t, int32_t k, int side)
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
    if (code) return io_fail(error, code, "tensor %d: %s", index, halfstep_strerror(code));
    int whole = t->info.n_rows == t->info.rows && t->info.n_columns == t->info.row_length;
    if (!whole && t->info.rows && t->info.row_length && !r->takes_parts)
        return io_fail(error, HALFSTEP_ERROR_UNSUPPORTED,
                       "only a part of tensor \"%s\" is here, %lld x %lld of %lld x %lld; files hold whole tensors",
                       t->info.name, (long long)t->info.n_rows, (long long)t->info.n_columns, (long long)t->info.rows,
                       (long long)t->info.row_length);
    r->by_name[index] = (named_tensor){t->info.name, index};
    return HALFSTEP_OK;
}

static int compare_tensor_names(const void *a, const void *b)
{
    return strcmp(((const named_tensor *)a)->name, ((const named_tensor *)b)->name);
}

int hstep_describe_optimizer(record *r, const halfstep_optimizer *optimizer, int takes_parts, hstep_error *error)
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
    int code = r->groups && r->tensors && r->by_name ? HALFSTEP_OK : io_fail_memory(error);
    if (!code && (code = describe_numbers(r, r->numbers, HALFSTEP_RECORD_OPTIMIZER, 0)))
        return io_fail(error, code, "%s", halfstep_strerror(code));
    if (!code) code = describe_groups(r, error);
    for (int32_t i = 0; i < r->tensor_count && !code; i++) code = describe_tensor(r, i, error);
    if (code) return code;
    qsort(r->by_name, (size_t)r->tensor_count, sizeof *r->by_name, compare_tensor_names);
    return HALFSTEP_OK;
}

/* ---- Arguments --------------------------------------------------------------------------------------------------- */

int hstep_take_options(halfstep_file_options *ours, const halfstep_file_options **options, int has_checkpoint,
                       const char *function, hstep_error *error)
{
    memset(ours, 0, sizeof *ours);
    if (!*options) return HALFSTEP_OK;
    if (!hstep_take_struct(ours, sizeof *ours, *options))
        return io_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: wrong struct_size", function);
    *options = ours;
    if (ours->settings > HALFSTEP_SETTINGS_COMPARE || ours->reserved)
        return io_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: invalid options; settings must be 0 or 1, and reserved 0",
                       function);
    if (!has_checkpoint && (ours->optimizer_file || ours->model_file))
        return io_fail(error, HALFSTEP_ERROR_ARGUMENT,
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
    return io_fail(error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\": its shape does not give %lld rows of %lld elements",
                   t->name, (long long)t->rows, (long long)t->row_length);
}

int hstep_each_plane(const record *r, void *const *weights, int has_model_file, const halfstep_file_options *options,
                     plane_visitor *visit, void *context, hstep_error *error)
{
    int code = HALFSTEP_OK, in_storage = 0;
    for (int32_t i = 0; i < r->tensor_count && !code; i++) {
        tensor_record *t = &r->tensors[i];
        hstep_plane planes[HSTEP_MAX_PLANES], weight;
        const uint64_t *shape;
        const halfstep_rule_info *rule = &r->groups[t->info.group].rule;
        int count = 0;
        code = shape_of(r, i, options, &shape, error);
        if (!code) code = hstep_list_planes(r->optimizer, i, &t->info, rule, shape, &in_storage, planes, &count, error);
        for (int k = 0; k < count && !code; k++) code = visit(context, t, &planes[k], 0);
        if (code || !weights) continue;
        code = hstep_weight_plane(r->optimizer, i, &t->info, shape, weights[i], has_model_file ? "" : HSTEP_WEIGHT,
                                  &weight, error);
        if (!code) code = visit(context, t, &weight, 1);
    }
    return code;
}

const char *hstep_optimizer_file(const halfstep_file_options *options)
{
    return options && options->optimizer_file ? options->optimizer_file : "optimizer.safetensors";
}

const char *hstep_model_file(const halfstep_file_options *options)
{
    return options && options->model_file ? options->model_file : "model.safetensors";
}

const named_tensor *hstep_find_tensor(const record *r, const char *name)
{
    named_tensor wanted = {.name = name};
    return r->tensor_count ? bsearch(&wanted, r->by_name, (size_t)r->tensor_count, sizeof wanted, compare_tensor_names)
                           : NULL;
}
