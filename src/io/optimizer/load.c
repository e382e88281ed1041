/* Loading an optimizer: its planes are checked, then its numbers are set and its planes read. Numbers come first,
 * because they can be set back. */
#include "io/optimizer/read.h"

/* ---- Planes ----------------------------------------------------------------------------------------------------- */

enum { HSTEP_CHECK_BYTES = 1 << 18 };

static int load_planes(loading *l, plane_visitor *visit)
{
    return hstep_each_plane(l->record, l->weights, l->has_model_file, l->options, visit, l, l->error);
}

static int check_plane(void *context, tensor_record *t, const hstep_plane *plane, int is_weight)
{
    loading *l = context;
    const hstep_source *source = is_weight ? &l->model : &l->states;
    uint64_t index;
    if (!plane->bytes || (t->has_no_steps && !is_weight)) return HALFSTEP_OK;
    int code = hstep_find_plane(source, &t->info, plane, &index);
    if (!code && !io_grow((void **)&l->places, l->place_count, &l->place_capacity, sizeof *l->places))
        code = io_fail_memory(l->error);
    if (code) return code;
    l->places[l->place_count++] = index;
    if (source->file == l->states.file) l->known[index] = 1;
    return plane->nonnegative ? hstep_check_values(source, index, plane->finite, l->piece, HSTEP_CHECK_BYTES)
                              : HALFSTEP_OK;
}

static int fail_taking(const loading *l, int code)
{
    const char *detail = halfstep_error_detail(l->record->optimizer);
    return io_fail(l->error, code, "%s: %s", l->states.path, *detail ? detail : halfstep_strerror(code));
}

/* Copies tensor `place` of the file to a plane in storage. UINT64_MAX: writes zeros. */
static int fill_storage(const loading *l, const tensor_record *t, const hstep_plane *plane, uint64_t place)
{
    const int32_t index = (int32_t)(t - l->record->tensors);
    int code = HALFSTEP_OK;
    char *piece = calloc(1, HSTEP_CHECK_BYTES);
    if (!piece) return io_fail_memory(l->error);
    for (uint64_t at = 0, bytes; at < plane->bytes && !code; at += bytes) {
        bytes = plane->bytes - at < HSTEP_CHECK_BYTES ? plane->bytes - at : HSTEP_CHECK_BYTES;
        if (place != UINT64_MAX)
            code = halfstep_read_safetensor(l->states.file, place, at, piece, bytes, l->error->text, l->error->size);
        if (code) break;
        code = halfstep_write_bytes(l->record->optimizer, index, plane->slot, plane->extra, at, bytes, piece);
        if (code) code = fail_taking(l, code);
    }
    free(piece);
    return code;
}

/* Copies a weight that was loaded to the storage, if that keeps weights. */
static int store_weight(const loading *l, const tensor_record *t, const hstep_plane *plane)
{
    const int32_t index = (int32_t)(t - l->record->tensors);
    halfstep_optimizer *const o = l->record->optimizer;
    /* A storage without weights, and memory, refuse even no bytes. */
    if (halfstep_write_bytes(o, index, HALFSTEP_SLOT_WEIGHT, 0, 0, 0, NULL)) return HALFSTEP_OK;
    const int code = halfstep_write_bytes(o, index, HALFSTEP_SLOT_WEIGHT, 0, 0, plane->bytes, plane->data);
    return code ? fail_taking(l, code) : HALFSTEP_OK;
}

static int read_plane(void *context, tensor_record *t, const hstep_plane *plane, int is_weight)
{
    loading *l = context;
    if (!plane->bytes) return HALFSTEP_OK;
    if (t->has_no_steps && !is_weight) {
        if (!plane->data) return fill_storage(l, t, plane, UINT64_MAX);
        memset(plane->data, 0, (size_t)plane->bytes);
        return HALFSTEP_OK;
    }
    const uint64_t place = l->places[l->place_count++];
    if (!plane->data) return fill_storage(l, t, plane, place);
    int code = halfstep_read_safetensor(is_weight ? l->model.file : l->states.file, place, 0, plane->data, plane->bytes,
                                        l->error->text, l->error->size);
    return code || !is_weight ? code : store_weight(l, t, plane);
}

/* Fails if the file holds states that this optimizer does not have. Either it was saved with other settings, or a
 * tensor's counters are missing. */
static int check_unknown_planes(const loading *l)
{
    uint64_t count = halfstep_safetensor_count(l->states.file);
    for (uint64_t i = 0; i < count; i++) {
        halfstep_safetensor_info info = {.struct_size = sizeof info};
        if (l->known[i] || halfstep_get_safetensor_info(l->states.file, i, &info) || !info.bytes) continue;
        const char *slash = strrchr(info.name, '/');
        char *name = slash ? hstep_format("%.*s", (int)(slash - info.name), info.name) : hstep_copy(info.name);
        if (!name) return io_fail_memory(l->error);
        const named_tensor *ours = slash ? hstep_find_tensor(l->record, name) : NULL;
        free(name);
        if (ours ? !strcmp(slash + 1, HSTEP_WEIGHT) : l->options && l->options->subset) continue;
        if (ours && l->record->tensors[ours->index].has_no_steps) return hstep_fail_value(l, "counters.", ours->name);
        return io_fail(l->error, HALFSTEP_ERROR_MISMATCH, "%s has \"%s\", which this optimizer does not store",
                       l->states.path, info.name);
    }
    return HALFSTEP_OK;
}

static int check_planes(loading *l)
{
    l->piece = malloc(HSTEP_CHECK_BYTES);
    l->known = calloc((size_t)halfstep_safetensor_count(l->states.file) + 1, 1);
    int code = l->piece && l->known ? load_planes(l, check_plane) : io_fail_memory(l->error);
    if (!code) code = check_unknown_planes(l);
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
 * format, its plane was refused before. */
static int take_numbers(const loading *l)
{
    for (int32_t i = 0; i < l->record->tensor_count; i++)
        if (l->record->tensors[i].lacks_grid) return hstep_fail_value(l, "scalars.", l->record->tensors[i].info.name);
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
    code = load_planes(l, read_plane);
    if (!code && (code = halfstep_flush(l->record->optimizer, l->weights))) code = fail_taking(l, code);
    l->error = l->states.error = l->model.error = told;
    /* The same bytes were read once without an error, so the disk or the file is failing right now. */
    if (code) io_fail(told, code, "%s; the optimizer is only partly loaded: load it again", detail);
    return code;
}

/* Loads what a file says, or l->pairs if they are set, which are numbers only. */
static int load(loading *l, const halfstep_optimizer *optimizer, hstep_error *error)
{
    record r;
    l->record = &r;
    l->error = l->states.error = l->model.error = error;
    int code = hstep_describe_optimizer(&r, optimizer, l->pairs != NULL, error);
    if (!code) code = hstep_make_key(l);
    if (!code) code = hstep_read_numbers(l);
    if (!code && !l->pairs) code = check_planes(l);
    if (!code) code = l->pairs ? take_numbers(l) : take(l);
    free(l->key);
    free(l->places);
    hstep_free_record(&r);
    return code;
}

int hstep_take_numbers(halfstep_optimizer *optimizer, const char *path, const hstep_pairs *pairs, hstep_error *error)
{
    loading l = {.states = {.path = path}, .pairs = pairs};
    return load(&l, optimizer, error);
}

static int open_source(hstep_source *source, const halfstep_checkpoint *checkpoint, const char *name,
                       hstep_error *error)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    source->path = halfstep_checkpoint_path(checkpoint, name);
    if (source->path) return halfstep_open_safetensors(&source->file, source->path, error->text, error->size);
    halfstep_get_checkpoint_info(checkpoint, &info);
    return io_fail(error, HALFSTEP_ERROR_MISMATCH,
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
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "%s: NULL argument", function);
    int code = hstep_take_options(&ours, &options, checkpoint != NULL, function, &error);
    l.options = options;
    if (!code && checkpoint) {
        code = open_source(&l.states, checkpoint, hstep_optimizer_file(options), &error);
        if (!code && weights) code = open_source(&l.model, checkpoint, hstep_model_file(options), &error);
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
