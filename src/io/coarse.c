#include "io/coarse.h"

#include "io/numbers.h"

/* Writes the format that a full recipe gives a state, by name or inherited from the last state before it of the same
 * role. */
static void format_in_recipe(const halfstep_rule_info *rule, int32_t state, const char *recipe, char format[24])
{
    const char *part = strrchr(recipe, '/') + 1;
    int many = strchr(part, '+') != NULL;
    for (int32_t i = 0; i <= state && *part; i++) {
        size_t length = strcspn(part, "+");
        if (rule->state_role[i] == HALFSTEP_ROLE_WEIGHT || rule->state_extent[i] != HALFSTEP_EXTENT_ELEMENTS) continue;
        if (!many || i == state || rule->state_role[i] == rule->state_role[state])
            snprintf(format, 24, "%.*s", (int)length, part);
        if (many) part += length + (part[length] == '+');
    }
}

int hstep_find_coarse(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      const halfstep_rule_info *rule, const char *recipe, hstep_coarse *found)
{
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    halfstep_format_info format = {.struct_size = sizeof format};
    if (!stream->precise) return 0;
    *found->format = 0;
    format_in_recipe(rule, stream->state, recipe, found->format);
    if (halfstep_get_format_info(halfstep_format_find(found->format), &format) || !format.block) return 0;
    char *codes = hstep_format("%s/%s", tensor->name, rule->state_name[stream->state]),
         *scales = hstep_format("%s/%s.scale", tensor->name, rule->state_name[stream->state]);
    int there = codes && scales && !halfstep_safetensor_find(source->file, codes, &found->codes) &&
                !halfstep_safetensor_find(source->file, scales, &found->scales) &&
                !halfstep_get_safetensor_info(source->file, found->codes, &info) &&
                !strcmp(info.dtype, format.code_dtype);
    free(codes);
    free(scales);
    return there;
}

/* Makes a decoder: an AdamW optimizer with one tensor of the same shape, whose states have the format. The caller
 * destroys it, after a failure too. */
static int make_decoder(const halfstep_tensor *tensor, const hstep_coarse *coarse, halfstep_optimizer **decoder)
{
    char recipe[48];
    int32_t group, index;
    halfstep_tensor t = {.struct_size = sizeof t,
                         .name = tensor->name,
                         .ndim = tensor->ndim,
                         .rows = tensor->rows,
                         .row_length = tensor->row_length,
                         .gradient = "f32"};
    snprintf(recipe, sizeof recipe, "adamw/f32/%s", coarse->format);
    int code = halfstep_create(NULL, decoder);
    if (!code) code = halfstep_add_group(*decoder, recipe, &group);
    t.group = code ? 0 : group;
    if (!code) code = halfstep_add_tensor(*decoder, &t, &index);
    return code ? code : halfstep_allocate_states(*decoder);
}

static int read_bytes(const hstep_source *source, const halfstep_tensor *tensor, uint64_t index, void *data,
                      uint64_t bytes)
{
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    halfstep_get_safetensor_info(source->file, index, &info);
    if (info.bytes != bytes)
        return hstep_fail(source->error, HALFSTEP_ERROR_MISMATCH, "%s: \"%s\" has %llu bytes, tensor \"%s\" needs %llu",
                          source->path, info.name, (unsigned long long)info.bytes, tensor->name,
                          (unsigned long long)bytes);
    return halfstep_read_safetensor(source->file, index, 0, data, bytes, source->error->text, source->error->size);
}

/* Returns the number of NAME.grid in "NAME VALUE NAME VALUE ...", or 1 if there is none. */
static double grid_among(const char *scalars, const char *state)
{
    char name[72];
    double value = 1.0;
    snprintf(name, sizeof name, "%s.grid ", state);
    for (const char *at = scalars ? strstr(scalars, name) : NULL; at; at = strstr(at + 1, name))
        if ((at == scalars || at[-1] == ' ') && (at += strlen(name), hstep_read_double(&at, &value))) break;
    return value;
}

/* Decodes values, checks them, and writes them to the optimizer unless that is NULL. Values must be finite, and those
 * of a second moment not negative. Works on some rows at a time. */
static int copy_values(const hstep_source *source, halfstep_optimizer *decoder, int32_t from,
                       const halfstep_tensor *tensor, const hstep_stream *stream, halfstep_optimizer *optimizer,
                       int32_t index)
{
    enum { VALUES = 1 << 16 };
    int64_t length = tensor->row_length, some = length < VALUES ? VALUES / (length ? length : 1) : 1;
    float *values = malloc((size_t)(some * length + 1) * sizeof *values);
    int code = values ? HALFSTEP_OK : hstep_fail_memory(source->error);
    for (int64_t row = 0; row < tensor->rows && !code; row += some) {
        int64_t n = tensor->rows - row < some ? tensor->rows - row : some;
        code = halfstep_read_slot(decoder, 0, from, NULL, row, n, values);
        for (int64_t i = 0; i < n * length && !code; i++)
            if (!(values[i] - values[i] == 0.0f) || (from != HALFSTEP_SLOT_STATE && values[i] < 0.0f))
                code = hstep_fail(source->error, HALFSTEP_ERROR_FORMAT,
                                  "%s: element %lld of \"%s/%s\" is negative or not finite", source->path,
                                  (long long)(row * length + i), tensor->name, stream->suffix);
        if (!code && optimizer &&
            (code = halfstep_write_slot(optimizer, index, HALFSTEP_SLOT_STATE + stream->state, NULL, row, n, values)))
            code = hstep_fail(source->error, code, "%s: %s", source->path, halfstep_error_detail(optimizer));
    }
    free(values);
    return code;
}

int hstep_read_coarse(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      const hstep_coarse *coarse, const char *scalars, halfstep_optimizer *optimizer, int32_t index)
{
    halfstep_optimizer *decoder = NULL;
    halfstep_slot_info slot = {.struct_size = sizeof slot};
    /* AdamW has one state of each role: exp_avg, and exp_avg_sq, which is nonnegative. */
    int32_t from = HALFSTEP_SLOT_STATE + stream->nonnegative;
    int code = make_decoder(tensor, coarse, &decoder);
    if (!code) code = halfstep_get_slot_info(decoder, 0, from, &slot);
    if (!code && slot.grid) {
        halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR};
        record.grid[stream->nonnegative] = grid_among(scalars, stream->suffix);
        code = halfstep_set_record(decoder, &record);
    }
    if (code)
        code = hstep_fail(source->error, code, "%s: \"%s/%s\": %s", source->path, tensor->name, stream->suffix,
                          decoder && *halfstep_error_detail(decoder) ? halfstep_error_detail(decoder)
                                                                     : halfstep_strerror(code));
    if (!code) code = read_bytes(source, tensor, coarse->codes, slot.code, slot.code_bytes);
    if (!code) code = read_bytes(source, tensor, coarse->scales, slot.extra, slot.extra_bytes);
    if (!code) code = copy_values(source, decoder, from, tensor, stream, optimizer, index);
    halfstep_destroy(decoder);
    return code;
}
