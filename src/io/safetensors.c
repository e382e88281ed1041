/* Reader and writer of safetensors files. The reader trusts nothing: a header is accepted only if it accounts for every
 * byte of the file exactly once. Over 500 lines because reader and writer share the format's limits and its dtype table. */
#include "files.h"
#include "json.h"
#include "safetensors.h"

/* The format's own limit on the header, and ours on the time and memory that a hostile one may cost. 2^20 tensors are ten
 * times the weights of the largest published models; 64 dimensions are what numpy can hold. */
#define HSTEP_MAX_HEADER 100000000u
#define HSTEP_MAX_TENSORS ((size_t)1 << 20)
#define HSTEP_MAX_NDIM 64

/* Bytes asked of a fill function at a time: just under 1 MiB, and whole elements of every dtype. */
#define HSTEP_FILL_BYTES (192u * 5461u)

#define HSTEP_METADATA "__metadata__"

typedef struct dtype_row {
    const char *name;
    uint32_t bits;
} dtype_row;

static const dtype_row dtypes[] = {
#define HSTEP_DTYPE(name, bits) {#name, bits},
#include "../dtypes.def"
#undef HSTEP_DTYPE
};

#define HSTEP_DTYPES (sizeof dtypes / sizeof dtypes[0])

static const dtype_row *find_dtype(const char *name)
{
    for (size_t i = 0; name && i < HSTEP_DTYPES; i++)
        if (!strcmp(dtypes[i].name, name)) return &dtypes[i];
    return NULL;
}

uint32_t halfstep_safetensors_dtype_bits(const char *dtype)
{
    const dtype_row *row = find_dtype(dtype);
    return row ? row->bits : 0;
}

const char *halfstep_safetensors_dtype(uint32_t position)
{
    return position < HSTEP_DTYPES ? dtypes[position].name : NULL;
}

/* Elements and bytes of a shape. Returns what is wrong with it, or NULL. */
static const char *measure_shape(const uint64_t *shape, uint64_t ndim, uint32_t bits, uint64_t *elements, uint64_t *bytes)
{
    uint64_t product = 1;
    for (uint64_t i = 0; i < ndim; i++) {
        if (shape[i] && product > UINT64_MAX / shape[i]) return "its number of elements overflows";
        product *= shape[i];
    }
    if (product > UINT64_MAX / bits) return "its size overflows";
    if (product * bits % 8) return "its size is not a whole number of bytes";
    *elements = product;
    *bytes = product * bits / 8;
    return NULL;
}

/* ---- Reader --------------------------------------------------------------------------------------------------------- */

typedef struct tensor_entry {
    const char *name;
    const dtype_row *dtype;
    size_t shape_at; /* where its sizes begin in `sizes` */
    uint64_t ndim, elements, begin, end;
} tensor_entry;

typedef struct text_pair {
    const char *key, *value;
} text_pair;

struct halfstep_safetensors {
    hstep_file *file;
    uint64_t file_bytes, data_start;
    char *header;          /* its strings are decoded in place, and names point into it */
    tensor_entry *tensors; /* in the order of their bytes */
    size_t tensor_count, tensor_room;
    uint64_t *sizes;
    size_t size_count, size_room;
    size_t *by_name;       /* numbers of tensors, sorted by name */
    text_pair *metadata;
    size_t metadata_count, metadata_room;
};

/* The sizes of a tensor; a file of scalars has none at all, and no array to point into. */
static const uint64_t *sizes_of(const halfstep_safetensors *file, const tensor_entry *entry)
{
    return entry->ndim ? file->sizes + entry->shape_at : NULL;
}

/* One reading of one header. */
typedef struct header_reader {
    halfstep_safetensors *file;
    const char *path;
    hstep_json json;
    hstep_error *error;
} header_reader;

/* json.problem becomes the text of the failure. */
static int fail_json(header_reader *reader)
{
    return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: byte %zu of the header: %s", reader->path, reader->json.at,
                      reader->json.problem);
}

static int read_shape(header_reader *reader, tensor_entry *entry)
{
    halfstep_safetensors *file = reader->file;
    entry->shape_at = file->size_count;
    if (!hstep_json_expect(&reader->json, '[')) return fail_json(reader);
    if (hstep_json_take(&reader->json, ']')) return HALFSTEP_OK;
    do {
        uint64_t size;
        if (!hstep_json_number(&reader->json, &size)) return fail_json(reader);
        if (entry->ndim == HSTEP_MAX_NDIM)
            return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\" has more than %d dimensions",
                              reader->path, entry->name, HSTEP_MAX_NDIM);
        if (!hstep_grow((void **)&file->sizes, file->size_count, &file->size_room, sizeof *file->sizes))
            return hstep_fail_memory(reader->error);
        file->sizes[file->size_count++] = size;
        entry->ndim++;
    } while (hstep_json_take(&reader->json, ','));
    return hstep_json_expect(&reader->json, ']') ? HALFSTEP_OK : fail_json(reader);
}

static int read_member(header_reader *reader, tensor_entry *entry, unsigned *seen)
{
    hstep_json *json = &reader->json;
    const char *key, *dtype;
    if (!hstep_json_string(json, &key) || !hstep_json_expect(json, ':')) return fail_json(reader);
    unsigned member = !strcmp(key, "dtype") ? 1 : !strcmp(key, "shape") ? 2 : !strcmp(key, "data_offsets") ? 4 : 0;
    if (!member || *seen & member)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\": %s member \"%s\"", reader->path,
                          entry->name, member ? "duplicate" : "unexpected", key);
    *seen |= member;
    if (member == 2) return read_shape(reader, entry);
    if (member == 4)
        return hstep_json_expect(json, '[') && hstep_json_number(json, &entry->begin) && hstep_json_expect(json, ',') &&
               hstep_json_number(json, &entry->end) && hstep_json_expect(json, ']') ? HALFSTEP_OK : fail_json(reader);
    if (!hstep_json_string(json, &dtype)) return fail_json(reader);
    entry->dtype = find_dtype(dtype);
    if (!entry->dtype)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\": unknown dtype \"%s\"", reader->path,
                          entry->name, dtype);
    return HALFSTEP_OK;
}

static int read_entry(header_reader *reader, const char *name)
{
    halfstep_safetensors *file = reader->file;
    uint64_t data_bytes = file->file_bytes - file->data_start, bytes = 0;
    tensor_entry entry = {.name = name};
    unsigned seen = 0;
    if (!hstep_json_expect(&reader->json, '{')) return fail_json(reader);
    if (!hstep_json_take(&reader->json, '}')) {
        do {
            int code = read_member(reader, &entry, &seen);
            if (code) return code;
        } while (hstep_json_take(&reader->json, ','));
        if (!hstep_json_expect(&reader->json, '}')) return fail_json(reader);
    }
    if (seen != 7)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\" lacks dtype, shape or data_offsets",
                          reader->path, name);
    if (entry.begin > entry.end || entry.end > data_bytes)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT,
                          "%s: tensor \"%s\": data_offsets [%llu, %llu] do not lie within the file's %llu bytes of data",
                          reader->path, name, ull(entry.begin), ull(entry.end), ull(data_bytes));
    const char *problem = measure_shape(sizes_of(file, &entry), entry.ndim, entry.dtype->bits, &entry.elements, &bytes);
    if (problem)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\": %s", reader->path, name, problem);
    if (bytes != entry.end - entry.begin)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT,
                          "%s: tensor \"%s\": shape and dtype give %llu bytes, data_offsets %llu", reader->path, name,
                          ull(bytes), ull(entry.end - entry.begin));
    if (file->tensor_count == HSTEP_MAX_TENSORS)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: more than %zu tensors", reader->path, HSTEP_MAX_TENSORS);
    if (!hstep_grow((void **)&file->tensors, file->tensor_count, &file->tensor_room, sizeof entry))
        return hstep_fail_memory(reader->error);
    file->tensors[file->tensor_count++] = entry;
    return HALFSTEP_OK;
}

static int read_metadata(header_reader *reader)
{
    halfstep_safetensors *file = reader->file;
    text_pair pair;
    if (!hstep_json_expect(&reader->json, '{')) return fail_json(reader);
    if (hstep_json_take(&reader->json, '}')) return HALFSTEP_OK;
    do {
        if (!hstep_json_string(&reader->json, &pair.key) || !hstep_json_expect(&reader->json, ':') ||
            !hstep_json_string(&reader->json, &pair.value))
            return fail_json(reader);
        if (!hstep_grow((void **)&file->metadata, file->metadata_count, &file->metadata_room, sizeof pair))
            return hstep_fail_memory(reader->error);
        file->metadata[file->metadata_count++] = pair;
    } while (hstep_json_take(&reader->json, ','));
    return hstep_json_expect(&reader->json, '}') ? HALFSTEP_OK : fail_json(reader);
}

static int compare_entries(const void *a, const void *b)
{
    const tensor_entry *first = a, *second = b;
    if (first->begin != second->begin) return first->begin < second->begin ? -1 : 1;
    if (first->end != second->end) return first->end < second->end ? -1 : 1;
    return strcmp(first->name, second->name);
}

typedef struct name_number {
    const char *name;
    size_t number;
} name_number;

static int compare_name_numbers(const void *a, const void *b)
{
    return strcmp(((const name_number *)a)->name, ((const name_number *)b)->name);
}

/* Sorts the names of tensors and of metadata, and finds duplicates on the way. */
static int index_names(header_reader *reader)
{
    halfstep_safetensors *file = reader->file;
    size_t most = file->tensor_count > file->metadata_count ? file->tensor_count : file->metadata_count;
    name_number *list = malloc((most + 1) * sizeof *list);
    int code = HALFSTEP_OK;
    file->by_name = malloc((file->tensor_count + 1) * sizeof *file->by_name);
    if (!list || !file->by_name) code = hstep_fail_memory(reader->error);
    for (int metadata = 0; metadata < 2 && !code; metadata++) {
        size_t count = metadata ? file->metadata_count : file->tensor_count;
        for (size_t i = 0; i < count; i++)
            list[i] = (name_number){metadata ? file->metadata[i].key : file->tensors[i].name, i};
        qsort(list, count, sizeof *list, compare_name_numbers);
        for (size_t i = 0; i < count && !code; i++) {
            if (!metadata) file->by_name[i] = list[i].number;
            if (i && !strcmp(list[i - 1].name, list[i].name))
                code = hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: duplicate %s \"%s\"", reader->path,
                                  metadata ? HSTEP_METADATA " key" : "tensor", list[i].name);
        }
    }
    free(list);
    return code;
}

static int check_coverage(const header_reader *reader)
{
    const halfstep_safetensors *file = reader->file;
    uint64_t data_bytes = file->file_bytes - file->data_start, reached = 0;
    for (size_t i = 0; i < file->tensor_count; i++) {
        const tensor_entry *entry = &file->tensors[i];
        if (entry->begin != reached)
            return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\" begins at %llu, but %s %llu",
                              reader->path, entry->name, ull(entry->begin),
                              entry->begin > reached ? "the bytes before it are unused from" : "the one before it ends at",
                              ull(reached));
        reached = entry->end;
    }
    if (reached != data_bytes)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: %llu bytes follow the last tensor", reader->path,
                          ull(data_bytes - reached));
    return HALFSTEP_OK;
}

static int read_header(header_reader *reader)
{
    halfstep_safetensors *file = reader->file;
    hstep_json *json = &reader->json;
    int seen_metadata = 0, code;
    if (json->text[0] != '{')
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: the header does not start with '{'", reader->path);
    hstep_json_expect(json, '{');
    if (!hstep_json_take(json, '}')) {
        do {
            const char *key;
            if (!hstep_json_string(json, &key) || !hstep_json_expect(json, ':')) return fail_json(reader);
            if (strcmp(key, HSTEP_METADATA)) code = read_entry(reader, key);
            else if (!seen_metadata++) code = read_metadata(reader);
            else code = hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: duplicate " HSTEP_METADATA, reader->path);
            if (code) return code;
        } while (hstep_json_take(json, ','));
        if (!hstep_json_expect(json, '}')) return fail_json(reader);
    }
    while (json->at < json->bytes && json->text[json->at] == ' ') json->at++;
    if (json->at != json->bytes)
        return hstep_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: byte %zu of the header: the header must end with '}' "
                          "and spaces", reader->path, json->at);
    if (file->tensor_count) qsort(file->tensors, file->tensor_count, sizeof *file->tensors, compare_entries);
    code = index_names(reader);
    return code ? code : check_coverage(reader);
}

int halfstep_open_safetensors(halfstep_safetensors **file, const char *path, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    unsigned char prefix[8];
    uint64_t length = 0;

    if (file) *file = NULL;
    if (!file || !path) return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_open_safetensors: NULL argument");
    halfstep_safetensors *made = calloc(1, sizeof *made);
    if (!made) return hstep_fail_memory(&error);
    int code = hstep_open_file(&made->file, path, &made->file_bytes, &error);
    if (!code && made->file_bytes < sizeof prefix)
        code = hstep_fail(&error, HALFSTEP_ERROR_FORMAT, "%s has %llu bytes, too few for a safetensors file", path,
                          ull(made->file_bytes));
    if (!code) code = hstep_read_at(made->file, 0, prefix, sizeof prefix, &error);
    if (!code) {
        for (int i = 7; i >= 0; i--) length = length << 8 | prefix[i];
        if (length > HSTEP_MAX_HEADER)
            code = hstep_fail(&error, HALFSTEP_ERROR_FORMAT, "%s: a header of %llu bytes is not allowed; is this a "
                              "safetensors file?", path, ull(length));
        else if (length > made->file_bytes - sizeof prefix)
            code = hstep_fail(&error, HALFSTEP_ERROR_FORMAT, "%s: the header's %llu bytes reach beyond the file's %llu", path,
                              ull(length), ull(made->file_bytes));
        else if (length < 2)
            code = hstep_fail(&error, HALFSTEP_ERROR_FORMAT, "%s: a header of %llu bytes is too small", path, ull(length));
    }
    if (!code && !(made->header = malloc((size_t)length))) code = hstep_fail_memory(&error);
    if (!code) code = hstep_read_at(made->file, sizeof prefix, made->header, (size_t)length, &error);
    if (!code) {
        header_reader reader = {made, path, {made->header, (size_t)length, 0, NULL}, &error};
        made->data_start = sizeof prefix + length;
        code = read_header(&reader);
    }
    if (code) {
        halfstep_close_safetensors(made);
        return code;
    }
    *file = made;
    return HALFSTEP_OK;
}

void halfstep_close_safetensors(halfstep_safetensors *file)
{
    hstep_error ignored = {0};
    if (!file) return;
    free(file->header);
    free(file->tensors);
    free(file->sizes);
    free(file->metadata);
    free(file->by_name);
    hstep_close(file->file, &ignored);
    free(file);
}

uint64_t halfstep_safetensor_count(const halfstep_safetensors *file)
{
    return file ? file->tensor_count : 0;
}

int halfstep_get_safetensor_info(const halfstep_safetensors *file, uint64_t index, halfstep_safetensor_info *info)
{
    if (!file || !info || info->struct_size != sizeof *info || index >= file->tensor_count) return HALFSTEP_ERROR_ARGUMENT;
    const tensor_entry *entry = &file->tensors[index];
    info->dtype_bits = entry->dtype->bits;
    info->name = entry->name;
    info->dtype = entry->dtype->name;
    info->ndim = entry->ndim;
    info->shape = sizes_of(file, entry);
    info->elements = entry->elements;
    info->bytes = entry->end - entry->begin;
    info->begin = entry->begin;
    info->end = entry->end;
    return HALFSTEP_OK;
}

int halfstep_safetensor_find(const halfstep_safetensors *file, const char *name, uint64_t *index)
{
    if (!file || !name || !index) return HALFSTEP_ERROR_ARGUMENT;
    size_t low = 0, high = file->tensor_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->tensors[file->by_name[middle]].name);
        if (!order) {
            *index = file->by_name[middle];
            return HALFSTEP_OK;
        }
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return HALFSTEP_ERROR_NAME;
}

int halfstep_read_safetensor(const halfstep_safetensors *file, uint64_t index, uint64_t offset, void *data, uint64_t bytes,
                             char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    uint64_t size_now = 0;
    if (!file || (!data && bytes))
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_read_safetensor: NULL argument");
    if (index >= file->tensor_count)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "%s has no tensor number %llu", hstep_file_path(file->file),
                          ull(index));
    const tensor_entry *entry = &file->tensors[index];
    uint64_t length = entry->end - entry->begin;
    if (offset > length || bytes > length - offset || bytes > SIZE_MAX)
        return hstep_fail(&error, HALFSTEP_ERROR_RANGE, "%s: tensor \"%s\" has %llu bytes; %llu from %llu were asked for",
                          hstep_file_path(file->file), entry->name, ull(length), ull(bytes), ull(offset));
    int code = hstep_file_bytes(file->file, &size_now, &error);
    if (code) return code;
    if (size_now != file->file_bytes)
        return hstep_fail(&error, HALFSTEP_ERROR_FORMAT, "%s changed from %llu to %llu bytes while it was open",
                          hstep_file_path(file->file), ull(file->file_bytes), ull(size_now));
    return hstep_read_at(file->file, file->data_start + entry->begin + offset, data, (size_t)bytes, &error);
}

uint64_t halfstep_safetensors_metadata_count(const halfstep_safetensors *file)
{
    return file ? file->metadata_count : 0;
}

int halfstep_get_safetensors_metadata(const halfstep_safetensors *file, uint64_t index, const char **key,
                                      const char **value)
{
    if (!file || !key || !value || index >= file->metadata_count) return HALFSTEP_ERROR_ARGUMENT;
    *key = file->metadata[index].key;
    *value = file->metadata[index].value;
    return HALFSTEP_OK;
}

const char *halfstep_safetensors_metadata_find(const halfstep_safetensors *file, const char *key)
{
    for (size_t i = 0; file && key && i < file->metadata_count; i++)
        if (!strcmp(file->metadata[i].key, key)) return file->metadata[i].value;
    return NULL;
}

/* ---- Writer --------------------------------------------------------------------------------------------------------- */

typedef struct tensor_plan {
    char *name;
    const dtype_row *dtype;
    uint64_t ndim, *shape, bytes;
    const void *data;
} tensor_plan;

struct halfstep_safetensors_writer {
    tensor_plan *tensors;
    size_t tensor_count, tensor_room;
    text_pair *metadata;
    size_t metadata_count, metadata_room;
};

int halfstep_create_safetensors_writer(halfstep_safetensors_writer **writer)
{
    if (!writer) return HALFSTEP_ERROR_ARGUMENT;
    *writer = calloc(1, sizeof **writer);
    return *writer ? HALFSTEP_OK : HALFSTEP_ERROR_MEMORY;
}

void halfstep_destroy_safetensors_writer(halfstep_safetensors_writer *writer)
{
    if (!writer) return;
    for (size_t i = 0; i < writer->tensor_count; i++) {
        free(writer->tensors[i].name);
        free(writer->tensors[i].shape);
    }
    for (size_t i = 0; i < writer->metadata_count; i++) {
        free((char *)writer->metadata[i].key);
        free((char *)writer->metadata[i].value);
    }
    free(writer->tensors);
    free(writer->metadata);
    free(writer);
}

int halfstep_declare_safetensor(halfstep_safetensors_writer *writer, const char *name, const char *dtype, uint64_t ndim,
                                const uint64_t *shape, const void *data, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    tensor_plan plan = {0};
    uint64_t elements;
    if (!writer || !name || !dtype || (ndim && !shape))
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_declare_safetensor: NULL argument");
    if (!strcmp(name, HSTEP_METADATA) || !hstep_is_utf8(name))
        return hstep_fail(&error, HALFSTEP_ERROR_NAME, "a tensor cannot be named \"%s\"", name);
    if (!(plan.dtype = find_dtype(dtype)))
        return hstep_fail(&error, HALFSTEP_ERROR_NAME, "tensor \"%s\": unknown dtype \"%s\"", name, dtype);
    if (ndim > HSTEP_MAX_NDIM)
        return hstep_fail(&error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\" has more than %d dimensions", name, HSTEP_MAX_NDIM);
    for (uint64_t i = 0; i < ndim; i++)
        if (shape[i] > INT64_MAX)
            return hstep_fail(&error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\": dimension %llu is too large", name, ull(i));
    const char *problem = measure_shape(shape, ndim, plan.dtype->bits, &elements, &plan.bytes);
    if (problem) return hstep_fail(&error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\": %s", name, problem);
    if (writer->tensor_count == HSTEP_MAX_TENSORS)
        return hstep_fail(&error, HALFSTEP_ERROR_RANGE, "more than %zu tensors in one file", HSTEP_MAX_TENSORS);

    plan.name = hstep_copy(name);
    plan.shape = malloc((ndim + 1) * sizeof *plan.shape);
    if (!plan.name || !plan.shape ||
        !hstep_grow((void **)&writer->tensors, writer->tensor_count, &writer->tensor_room, sizeof plan)) {
        free(plan.name);
        free(plan.shape);
        return hstep_fail_memory(&error);
    }
    if (ndim) memcpy(plan.shape, shape, ndim * sizeof *plan.shape);
    plan.ndim = ndim;
    plan.data = data;
    writer->tensors[writer->tensor_count++] = plan;
    return HALFSTEP_OK;
}

int halfstep_declare_safetensors_metadata(halfstep_safetensors_writer *writer, const char *key, const char *value, char *text,
                                          size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!writer || !key || !value)
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_declare_safetensors_metadata: NULL argument");
    if (!hstep_is_utf8(key) || !hstep_is_utf8(value))
        return hstep_fail(&error, HALFSTEP_ERROR_NAME, "metadata \"%s\" is not UTF-8", key);
    text_pair pair = {NULL, hstep_copy(value)};
    if (!pair.value) return hstep_fail_memory(&error);
    for (size_t i = 0; i < writer->metadata_count; i++)
        if (!strcmp(writer->metadata[i].key, key)) {
            free((char *)writer->metadata[i].value);
            writer->metadata[i].value = pair.value;
            return HALFSTEP_OK;
        }
    pair.key = hstep_copy(key);
    if (!pair.key || !hstep_grow((void **)&writer->metadata, writer->metadata_count, &writer->metadata_room, sizeof pair)) {
        free((char *)pair.key);
        free((char *)pair.value);
        return hstep_fail_memory(&error);
    }
    writer->metadata[writer->metadata_count++] = pair;
    return HALFSTEP_OK;
}

static uint32_t alignment(const dtype_row *dtype)
{
    return dtype->bits < 8 ? 1 : dtype->bits / 8;
}

static int compare_plans(const void *a, const void *b)
{
    const tensor_plan *first = *(const tensor_plan *const *)a, *second = *(const tensor_plan *const *)b;
    if (alignment(first->dtype) != alignment(second->dtype))
        return alignment(first->dtype) > alignment(second->dtype) ? -1 : 1;
    return strcmp(first->name, second->name);
}

static int compare_plan_names(const void *a, const void *b)
{
    return strcmp((*(const tensor_plan *const *)a)->name, (*(const tensor_plan *const *)b)->name);
}

static int compare_pairs(const void *a, const void *b)
{
    return strcmp(((const text_pair *)a)->key, ((const text_pair *)b)->key);
}

static void append_metadata(hstep_buffer *header, const text_pair *sorted, size_t count)
{
    hstep_append_json(header, HSTEP_METADATA);
    hstep_append_text(header, ":{");
    for (size_t i = 0; i < count; i++) {
        if (i) hstep_append_text(header, ",");
        hstep_append_json(header, sorted[i].key);
        hstep_append_text(header, ":");
        hstep_append_json(header, sorted[i].value);
    }
    hstep_append_text(header, "}");
}

/* Sorts the tensors into *order and writes length and header into *header. */
static int plan_file(const halfstep_safetensors_writer *writer, const char *name, tensor_plan ***order, hstep_buffer *header,
                     hstep_error *error)
{
    size_t count = writer->tensor_count;
    uint64_t offset = 0;
    tensor_plan **sorted = malloc((count + 1) * sizeof *sorted);
    text_pair *pairs = malloc((writer->metadata_count + 1) * sizeof *pairs);
    *order = sorted;
    if (!sorted || !pairs) {
        free(pairs);
        return hstep_fail_memory(error);
    }
    for (size_t i = 0; i < count; i++) sorted[i] = &writer->tensors[i];
    qsort(sorted, count, sizeof *sorted, compare_plan_names);
    for (size_t i = 1; i < count; i++)
        if (!strcmp(sorted[i - 1]->name, sorted[i]->name)) {
            free(pairs);
            return hstep_fail(error, HALFSTEP_ERROR_DUPLICATE, "%s: two tensors are named \"%s\"", name, sorted[i]->name);
        }
    qsort(sorted, count, sizeof *sorted, compare_plans);

    hstep_append(header, "\0\0\0\0\0\0\0\0{", 9);
    if (writer->metadata_count) {
        memcpy(pairs, writer->metadata, writer->metadata_count * sizeof *pairs);
        qsort(pairs, writer->metadata_count, sizeof *pairs, compare_pairs);
        append_metadata(header, pairs, writer->metadata_count);
    }
    free(pairs);
    for (size_t i = 0; i < count; i++) {
        const tensor_plan *plan = sorted[i];
        if (i || writer->metadata_count) hstep_append_text(header, ",");
        hstep_append_json(header, plan->name);
        hstep_append_text(header, ":{\"dtype\":");
        hstep_append_json(header, plan->dtype->name);
        hstep_append_text(header, ",\"shape\":[");
        for (uint64_t d = 0; d < plan->ndim; d++) {
            if (d) hstep_append_text(header, ",");
            hstep_append_number(header, plan->shape[d]);
        }
        hstep_append_text(header, "],\"data_offsets\":[");
        hstep_append_number(header, offset);
        hstep_append_text(header, ",");
        if (plan->bytes > INT64_MAX - offset)
            return hstep_fail(error, HALFSTEP_ERROR_SHAPE, "%s: the tensors are too large for one file", name);
        offset += plan->bytes;
        hstep_append_number(header, offset);
        hstep_append_text(header, "]}");
    }
    hstep_append_text(header, "}");
    while (!header->failed && header->bytes % 8) hstep_append_text(header, " ");
    if (header->failed) return hstep_fail_memory(error);
    uint64_t length = header->bytes - 8;
    if (length > HSTEP_MAX_HEADER)
        return hstep_fail(error, HALFSTEP_ERROR_RANGE, "%s: a header of %llu bytes is not allowed", name, ull(length));
    for (int i = 0; i < 8; i++) header->data[i] = (char)(length >> 8 * i);
    return HALFSTEP_OK;
}

static int stream_tensor(const tensor_plan *plan, uint64_t number, const char *name, void *piece, hstep_sink sink,
                         void *sink_context, halfstep_fill_function fill, void *fill_context, hstep_error *error)
{
    for (uint64_t offset = 0; offset < plan->bytes;) {
        uint64_t left = plan->bytes - offset, bytes = left < HSTEP_FILL_BYTES ? left : HSTEP_FILL_BYTES;
        const void *data;
        if (plan->data) {
            data = (const char *)plan->data + offset;
        } else {
            int code = fill(fill_context, number, offset, piece, bytes);
            if (code)
                return hstep_fail(error, code < 0 ? code : HALFSTEP_ERROR_ARGUMENT,
                                  "%s: the contents of tensor \"%s\" could not be supplied (code %d)", name, plan->name, code);
            data = piece;
        }
        int code = sink(sink_context, data, bytes, error);
        if (code) return code;
        offset += bytes;
    }
    return HALFSTEP_OK;
}

int hstep_stream_safetensors(const halfstep_safetensors_writer *writer, const char *name, hstep_sink sink,
                             void *sink_context, halfstep_fill_function fill, void *fill_context, hstep_error *error)
{
    hstep_buffer header = {0};
    tensor_plan **order = NULL;
    void *piece = NULL;
    int code = HALFSTEP_OK, needs_fill = 0;
    for (size_t i = 0; i < writer->tensor_count && !code; i++) {
        if (writer->tensors[i].data || !writer->tensors[i].bytes) continue;
        needs_fill = 1;
        if (!fill)
            code = hstep_fail(error, HALFSTEP_ERROR_ARGUMENT, "%s: tensor \"%s\" has no data, and there is no fill function",
                              name, writer->tensors[i].name);
    }
    if (!code) code = plan_file(writer, name, &order, &header, error);
    if (!code && needs_fill && !(piece = malloc(HSTEP_FILL_BYTES))) code = hstep_fail_memory(error);
    if (!code) code = sink(sink_context, header.data, header.bytes, error);
    for (size_t i = 0; i < writer->tensor_count && !code; i++)
        code = stream_tensor(order[i], (uint64_t)(order[i] - writer->tensors), name, piece, sink, sink_context, fill,
                             fill_context, error);
    free(piece);
    free(order);
    free(header.data);
    return code;
}

static int write_to_file(void *context, const void *data, uint64_t bytes, hstep_error *error)
{
    return hstep_write(context, data, bytes, error);
}

int halfstep_write_safetensors(const halfstep_safetensors_writer *writer, const char *path, halfstep_fill_function fill,
                               void *context, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    hstep_replacement replacement;
    int renamed;
    if (!writer || !path) return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_write_safetensors: NULL argument");
    int code = hstep_begin_replacement(&replacement, path, ".halfstep-write-", &error);
    if (code) return code;
    code = hstep_stream_safetensors(writer, path, write_to_file, replacement.file, fill, context, &error);
    if (code) {
        hstep_cancel_replacement(&replacement);
        return code;
    }
    return hstep_finish_replacement(&replacement, 1, &renamed, &error);
}

int halfstep_write_file_atomic(const char *path, const void *data, uint64_t bytes, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    hstep_replacement replacement;
    int renamed;
    if (!path || (!data && bytes))
        return hstep_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_write_file_atomic: NULL argument");
    int code = hstep_begin_replacement(&replacement, path, ".halfstep-write-", &error);
    if (code) return code;
    code = hstep_write(replacement.file, data, bytes, &error);
    if (code) {
        hstep_cancel_replacement(&replacement);
        return code;
    }
    return hstep_finish_replacement(&replacement, 1, &renamed, &error);
}
