#include "io/planes.h"

#include <inttypes.h>

static int format_of(int32_t row, halfstep_format_info *format)
{
    *format = (halfstep_format_info){.struct_size = sizeof *format};
    return halfstep_get_format_info(row, format);
}

static uint64_t elements_of(const halfstep_tensor *tensor)
{
    return (uint64_t)tensor->rows * (uint64_t)tensor->row_length;
}

int hstep_is_stack(const halfstep_tensor *tensor) { return tensor->matrix_rows < tensor->rows || tensor->split[0] > 0; }

static uint64_t product(const uint64_t *shape, uint64_t ndim)
{
    uint64_t n = 1;
    for (uint64_t i = 0; i < ndim; i++) n = shape[i] && n > UINT64_MAX / shape[i] ? UINT64_MAX : n * shape[i];
    return n;
}

int hstep_gives(const uint64_t *shape, uint64_t ndim, uint64_t first, uint64_t rest, int merged)
{
    for (uint64_t i = 1; i <= ndim && (i == 1 || merged); i++)
        if (product(shape, i) == first && product(shape + i, ndim - i) == rest) return 1;
    return 0;
}

/* Gives a plane the shape of the tensor, with one element of the dtype for each of the tensor's. */
static void shape_as_tensor(hstep_plane *plane, const halfstep_tensor *tensor, const uint64_t *shape)
{
    plane->by_element = 1;
    plane->ndim = shape ? (uint64_t)tensor->ndim : tensor->ndim > 1 ? 2 : (uint64_t)tensor->ndim;
    plane->shape = shape ? shape : plane->own_shape;
    plane->own_shape[0] = tensor->ndim == 1 ? elements_of(tensor) : (uint64_t)tensor->rows;
    plane->own_shape[1] = (uint64_t)tensor->row_length;
}

static void shape_as(hstep_plane *plane, uint64_t ndim, uint64_t first, uint64_t second)
{
    plane->ndim = ndim;
    plane->shape = plane->own_shape;
    plane->own_shape[0] = first;
    plane->own_shape[1] = second;
}

static int is_packed(const halfstep_format_info *format) { return format->geometry == HALFSTEP_GEOMETRY_PACKED; }

/* Returns 1 if the second plane of a slot holds scales. That of packed weights holds error codes. */
static int has_scales(const halfstep_format_info *format) { return format->block && !is_packed(format); }

/* Returns 1 if the planes of a slot have rows of their own, whose bytes are not those of single elements. */
static int is_by_row(const halfstep_format_info *format)
{
    return format->geometry == HALFSTEP_GEOMETRY_ROWS || is_packed(format);
}

static void make_codes(hstep_plane *plane, const halfstep_tensor *tensor, const halfstep_format_info *format,
                       const halfstep_slot_info *slot, const uint64_t *shape)
{
    uint64_t rows = (uint64_t)tensor->rows;
    uint64_t elements = slot->code_bytes * 8 / halfstep_safetensors_dtype_bits(format->code_dtype);
    plane->dtype = format->code_dtype;
    plane->data = slot->code;
    plane->bytes = slot->code_bytes;
    if ((uint64_t)slot->rows * (uint64_t)slot->columns != elements_of(tensor)) shape_as(plane, 1, elements, 0);
    else if (elements == elements_of(tensor)) shape_as_tensor(plane, tensor, shape);
    else if (is_by_row(format) && elements % rows == 0) shape_as(plane, 2, rows, elements / rows);
    else shape_as(plane, 1, elements, 0);
}

static void make_extra(hstep_plane *plane, const halfstep_tensor *tensor, const halfstep_format_info *format,
                       const halfstep_slot_info *slot, const uint64_t *shape)
{
    plane->dtype = format->extra_dtype;
    plane->data = slot->extra;
    plane->bytes = slot->extra_bytes;
    plane->nonnegative = has_scales(format);
    plane->flat_scales = format->block && !is_by_row(format);
    const uint64_t elements = slot->extra_bytes * 8 / halfstep_safetensors_dtype_bits(format->extra_dtype);
    if (!format->block) shape_as_tensor(plane, tensor, shape);
    else if (plane->flat_scales) shape_as(plane, 1, elements, 0);
    else shape_as(plane, 2, (uint64_t)tensor->rows, elements / (uint64_t)tensor->rows);
}

int hstep_list_planes(const halfstep_optimizer *optimizer, int32_t index, const halfstep_tensor *tensor,
                      const halfstep_rule_info *rule, const uint64_t *shape, int *in_storage,
                      hstep_plane planes[HSTEP_MAX_PLANES], int *count, hstep_error *error)
{
    static const char *const floats[] = {"F32", "BF16", "F16"};
    int n = 0;
    for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + rule->states; slot++) {
        halfstep_slot_info info = {.struct_size = sizeof info};
        halfstep_format_info format;
        if (slot == HALFSTEP_SLOT_GRADIENT) continue;
        int code = halfstep_get_slot_info(optimizer, index, slot, &info);
        if (!code && info.format < 0) continue;
        if (!code) code = format_of(info.format, &format);
        if (code) return io_fail(error, code, "tensor \"%s\": %s", tensor->name, halfstep_strerror(code));
        int has_codes = slot != HALFSTEP_SLOT_WEIGHT && info.code_bytes;
        const int lacks_memory = (has_codes && !info.code) || (info.extra_bytes && !info.extra);
        /* Without memory, only what is in storage can be read. */
        char byte;
        if (lacks_memory && !*in_storage)
            *in_storage = !halfstep_read_bytes(optimizer, index, slot, !has_codes, 0, 1, &byte);
        if (lacks_memory && !*in_storage)
            return io_fail(error, HALFSTEP_ERROR_ORDER,
                           "tensor \"%s\": %s has no memory yet; allocate or bind the states "
                           "first",
                           tensor->name, info.name);
        if (has_codes) {
            hstep_plane *codes = &planes[n++];
            memset(codes, 0, sizeof *codes);
            codes->slot = slot;
            snprintf(codes->suffix, sizeof codes->suffix, "%s", info.name);
            make_codes(codes, tensor, &format, &info, shape);
            int is_positive = rule->state_role[slot - HALFSTEP_SLOT_STATE] == HALFSTEP_ROLE_NONNEG;
            for (size_t i = 0; i < sizeof floats / sizeof *floats && is_positive; i++)
                codes->nonnegative = codes->finite |= !strcmp(format.code_dtype, floats[i]);
        }
        if (!info.extra_bytes) continue;
        hstep_plane *extra = &planes[n++];
        memset(extra, 0, sizeof *extra);
        extra->slot = slot;
        extra->extra = 1;
        snprintf(extra->suffix, sizeof extra->suffix, "%s.%s", info.name, has_scales(&format) ? "scale" : "extra");
        make_extra(extra, tensor, &format, &info, shape);
    }
    *count = n;
    return HALFSTEP_OK;
}

int hstep_weight_plane(const halfstep_optimizer *optimizer, int32_t index, const halfstep_tensor *tensor,
                       const uint64_t *shape, void *data, const char *suffix, hstep_plane *plane, hstep_error *error)
{
    halfstep_slot_info info = {.struct_size = sizeof info};
    halfstep_format_info format;
    int code = halfstep_get_slot_info(optimizer, index, HALFSTEP_SLOT_WEIGHT, &info);
    if (!code) code = format_of(info.format, &format);
    if (code) return io_fail(error, code, "tensor \"%s\": %s", tensor->name, halfstep_strerror(code));
    if (info.code_bytes && !data)
        return io_fail(error, HALFSTEP_ERROR_ARGUMENT, "tensor \"%s\": its weight is NULL", tensor->name);
    memset(plane, 0, sizeof *plane);
    snprintf(plane->suffix, sizeof plane->suffix, "%s", suffix);
    info.code = data;
    make_codes(plane, tensor, &format, &info, shape);
    return HALFSTEP_OK;
}

/* Returns the name of a plane in a file, "tensor/suffix", for the caller to free. */
static char *name_in_file(const char *tensor, const hstep_plane *plane)
{
    return hstep_format("%s%s%s", tensor, *plane->suffix ? "/" : "", plane->suffix);
}

int hstep_declare_plane(halfstep_safetensors_writer *writer, const char *tensor, const hstep_plane *plane,
                        hstep_error *error)
{
    char *name = name_in_file(tensor, plane);
    int code = name ? halfstep_declare_safetensor(writer, name, plane->dtype, plane->ndim, plane->shape, plane->data,
                                                  error->text, error->size)
                    : io_fail_memory(error);
    free(name);
    return code;
}

static void describe_shape(const uint64_t *shape, uint64_t ndim, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (uint64_t i = 0; i < ndim && used < size; i++)
        used += (size_t)snprintf(text + used, size - used, "%s%" PRIu64, i ? ", " : "", shape[i]);
    if (used < size) snprintf(text + used, size - used, "]");
}

/* Tells whether a tensor of a file has the shape of the plane. The optimizer knows only the first size, so a tensor of
 * more dimensions may have any sizes that give its rows and elements. In a stack of matrices, other planes of rows may
 * have such sizes too. */
static int fits(const hstep_plane *plane, const halfstep_tensor *tensor, const halfstep_safetensor_info *found)
{
    int same = found->ndim == plane->ndim;
    for (uint64_t i = 0; same && i < found->ndim; i++) same = found->shape[i] == plane->shape[i];
    if (same) return 1;
    if (hstep_is_stack(tensor) && !plane->flat_scales) {
        const uint64_t first = plane->by_element ? (uint64_t)tensor->rows : plane->shape[0],
                       all = product(plane->shape, plane->ndim);
        return first && hstep_gives(found->shape, found->ndim, first, all / first, 1);
    }
    if (plane->flat_scales) return found->elements == plane->own_shape[0];
    return plane->by_element && tensor->ndim > 1 && found->ndim > 1 && found->shape[0] == (uint64_t)tensor->rows &&
           found->elements == elements_of(tensor);
}

int hstep_find_plane(const hstep_source *source, const halfstep_tensor *tensor, const hstep_plane *plane,
                     uint64_t *index)
{
    halfstep_safetensor_info found = {.struct_size = sizeof found};
    char *name = name_in_file(tensor->name, plane), there[256], here[256];
    if (!name) return io_fail_memory(source->error);
    int code = halfstep_safetensor_find(source->file, name, index);
    if (!code) code = halfstep_get_safetensor_info(source->file, *index, &found);
    const char *advice = hstep_is_stack(tensor)
                             ? "; if the file is from before stacks of matrices, describe the tensor "
                               "as one matrix to go on"
                             : "";
    if (code) {
        code = io_fail(source->error, HALFSTEP_ERROR_MISMATCH, "%s: there is no tensor \"%s\"%s", source->path, name,
                       advice);
    } else if (!fits(plane, tensor, &found)) {
        describe_shape(found.shape, found.ndim, there, sizeof there);
        describe_shape(plane->shape, plane->ndim, here, sizeof here);
        code = io_fail(source->error, HALFSTEP_ERROR_MISMATCH, "%s: \"%s\" has shape %s, this optimizer needs %s%s",
                       source->path, name, there, here, advice);
    } else if (strcmp(found.dtype, plane->dtype)) {
        code = io_fail(source->error, HALFSTEP_ERROR_MISMATCH, "%s: \"%s\" is %s, this optimizer needs %s%s",
                       source->path, name, found.dtype, plane->dtype, advice);
    }
    free(name);
    return code;
}

/* Returns the index of the first value that is negative or NaN, or infinite if must_be_finite, or `count` if there is
 * none. Works on the bits: without the sign, IEEE numbers compare as integers, with NaN above infinity. -0 counts as
 * zero. */
static size_t find_bad(const void *piece, size_t count, const char *dtype, int must_be_finite)
{
    size_t i = 0;
    if (!strcmp(dtype, "F32")) {
        const uint32_t *values = piece;
        const uint32_t sign = 0x80000000u, largest = 0x7f800000u - (uint32_t)must_be_finite;
        while (i < count && (values[i] & ~sign) <= largest && values[i] <= sign) i++;
    } else {
        const uint16_t *values = piece;
        const uint32_t sign = 0x8000, largest = (!strcmp(dtype, "BF16") ? 0x7f80u : 0x7c00u) - (uint32_t)must_be_finite;
        while (i < count && (values[i] & ~sign) <= largest && values[i] <= sign) i++;
    }
    return i;
}

int hstep_check_values(const hstep_source *source, uint64_t index, int must_be_finite, void *piece, size_t piece_bytes)
{
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    int code = halfstep_get_safetensor_info(source->file, index, &info);
    if (code) return io_fail(source->error, code, "%s: %s", source->path, halfstep_strerror(code));
    for (uint64_t offset = 0; offset < info.bytes;) {
        uint64_t left = info.bytes - offset, bytes = left < piece_bytes ? left : piece_bytes,
                 width = info.dtype_bits / 8;
        code = halfstep_read_safetensor(source->file, index, offset, piece, bytes, source->error->text,
                                        source->error->size);
        if (code) return code;
        uint64_t bad = find_bad(piece, (size_t)(bytes / width), info.dtype, must_be_finite);
        if (bad < bytes / width)
            return io_fail(source->error, HALFSTEP_ERROR_FORMAT, "%s: element %" PRIu64 " of \"%s\" is negative or %s",
                           source->path, offset / width + bad, info.name,
                           must_be_finite ? "not finite" : "not a number");
        offset += bytes;
    }
    return HALFSTEP_OK;
}
