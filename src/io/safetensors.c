/* Reader and writer of safetensors files. The reader trusts nothing: it accepts a header only if the header accounts
 * for every byte of the file exactly once. Over 500 lines because reader and writer share the format's limits and its
 * dtype table. */
#include "base/structs.h"
#include "io/files.h"
#include "io/json.h"
#include "io/parts.h"

/* Limits. The format limits the header. The others bound the time and memory that a hostile header may cost: an open
 * file takes about twice its header. 2^20 tensors are ten times the weights of the largest published models. 64
 * dimensions are what numpy can hold. A size takes 8 bytes in memory but as few as 2 in the header, hence the limit on
 * the sum of all sizes of shapes. */
#define HSTEP_MAX_HEADER 100000000u
#define HSTEP_MAX_TENSORS ((size_t)1 << 20)
#define HSTEP_MAX_METADATA ((size_t)1 << 20)
#define HSTEP_MAX_NDIM 64
#define HSTEP_MAX_SIZES(tensors) (((size_t)1 << 20) + 4 * (size_t)(tensors))

/* Bytes requested from a fill function at a time: just under 1 MiB, and whole elements of every dtype. */
#define HSTEP_FILL_BYTES (192u * 5461u)

#define HSTEP_WRITE_PREFIX ".halfstep-write-"

typedef struct dtype_row {
    const char *name;
    uint32_t bits;
} dtype_row;

static const dtype_row dtypes[] = {
#define HSTEP_DTYPE(name, bits) {#name, bits},
#include "base/dtypes.def"
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

/* Computes the elements and bytes of a shape. Returns what is wrong with it, or NULL. */
static const char *measure_shape(const uint64_t *shape, uint64_t ndim, uint32_t bits, uint64_t *elements,
                                 uint64_t *bytes)
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

/* ---- Reader ------------------------------------------------------------------------------------------------------ */

/* An array in pieces of equal length. It grows without copying and wastes less than one piece. */
typedef struct series {
    char **pieces;
    size_t piece_count, piece_capacity, count;
} series;

enum { SERIES_PIECE = 1024 };
_Static_assert(HSTEP_MAX_NDIM <= SERIES_PIECE, "the sizes of one tensor lie in one piece");
_Static_assert(HSTEP_MAX_HEADER <= UINT32_MAX, "32 bits address the header");

static void *series_at(const series *list, size_t element, size_t index)
{
    return list->pieces[index / SERIES_PIECE] + index % SERIES_PIECE * element;
}

/* Adds an element at the end and returns its address, or NULL when memory is short. */
static void *series_add(series *list, size_t element)
{
    if (list->count / SERIES_PIECE == list->piece_count) {
        if (!io_grow((void **)&list->pieces, list->piece_count, &list->piece_capacity, sizeof *list->pieces))
            return NULL;
        if (!(list->pieces[list->piece_count] = malloc(SERIES_PIECE * element))) return NULL;
        list->piece_count++;
    }
    return series_at(list, element, list->count++);
}

static void free_series(series *list)
{
    for (size_t i = 0; i < list->piece_count; i++) free(list->pieces[i]);
    free(list->pieces);
}

/* A tensor of a header. Its end and its number of elements follow from the shape, which agrees with data_offsets. */
typedef struct tensor_entry {
    uint64_t begin;
    uint32_t name;     /* offset in the header */
    uint32_t shape_at; /* index of its first size in `sizes` */
    uint8_t dtype, ndim;
} tensor_entry;

struct halfstep_safetensors {
    hstep_file *file;
    uint64_t file_bytes, data_start;
    char *header;     /* strings are decoded in place and stay there; a metadata value follows its key's zero byte */
    series tensors;   /* tensor_entry, in the order of the header */
    series sizes;     /* uint64_t */
    series by_offset; /* uint32_t: indices in `tensors`, in the order of their bytes. This is the order that callers
                         see */
    series by_name;   /* uint32_t: positions in by_offset, sorted by name */
    series metadata;  /* uint32_t: offsets of keys in the header, sorted by key */
};

static uint32_t number_at(const series *numbers, size_t index)
{
    return *(const uint32_t *)series_at(numbers, sizeof(uint32_t), index);
}

/* Returns the tensor that callers know by this number. */
static const tensor_entry *entry_at(const halfstep_safetensors *file, size_t index)
{
    return series_at(&file->tensors, sizeof(tensor_entry), number_at(&file->by_offset, index));
}

/* Returns the sizes of a tensor, or NULL for a scalar, which has none. */
static const uint64_t *sizes_of(const halfstep_safetensors *file, const tensor_entry *entry)
{
    return entry->ndim ? series_at(&file->sizes, sizeof(uint64_t), entry->shape_at) : NULL;
}

static uint64_t bytes_of(const halfstep_safetensors *file, const tensor_entry *entry)
{
    uint64_t elements = 0, bytes = 0;
    measure_shape(sizes_of(file, entry), entry->ndim, dtypes[entry->dtype].bits, &elements, &bytes);
    return bytes;
}

static const char *name_of(const halfstep_safetensors *file, const tensor_entry *entry)
{
    return file->header + entry->name;
}

/* ---- Sorting numbers ---- */

typedef int (*number_order)(const halfstep_safetensors *file, uint32_t a, uint32_t b);

static void sift_down(const halfstep_safetensors *file, const series *numbers, size_t root, size_t count,
                      number_order compare)
{
    uint32_t moving = number_at(numbers, root);
    for (size_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && compare(file, number_at(numbers, child), number_at(numbers, child + 1)) < 0) child++;
        if (compare(file, moving, number_at(numbers, child)) >= 0) break;
        *(uint32_t *)series_at(numbers, sizeof moving, root) = number_at(numbers, child);
    }
    *(uint32_t *)series_at(numbers, sizeof moving, root) = moving;
}

/* Sorts by heap sort. Unlike qsort it takes no memory, and no order in a hostile header makes it slow. */
static void sort_numbers(const halfstep_safetensors *file, const series *numbers, number_order compare)
{
    size_t count = numbers->count, sorted = 1;
    while (sorted < count && compare(file, number_at(numbers, sorted - 1), number_at(numbers, sorted)) <= 0) sorted++;
    if (sorted >= count) return;
    for (size_t root = count / 2; root-- > 0;) sift_down(file, numbers, root, count, compare);
    for (size_t end = count; end-- > 1;) {
        uint32_t *first = series_at(numbers, sizeof *first, 0), *last = series_at(numbers, sizeof *last, end),
                 swap = *first;
        *first = *last;
        *last = swap;
        sift_down(file, numbers, 0, end, compare);
    }
}

static int compare_offsets(const halfstep_safetensors *file, uint32_t a, uint32_t b)
{
    const tensor_entry *first = series_at(&file->tensors, sizeof *first, a);
    const tensor_entry *second = series_at(&file->tensors, sizeof *second, b);
    if (first->begin != second->begin) return first->begin < second->begin ? -1 : 1;
    uint64_t first_bytes = bytes_of(file, first), second_bytes = bytes_of(file, second);
    if (first_bytes != second_bytes) return first_bytes < second_bytes ? -1 : 1;
    return strcmp(name_of(file, first), name_of(file, second));
}

/* Returns the text that a number of a sorted list stands for. */
typedef const char *record_text(const halfstep_safetensors *file, uint32_t number);

static const char *name_at(const halfstep_safetensors *file, uint32_t position)
{
    return name_of(file, entry_at(file, position));
}

static const char *key_at(const halfstep_safetensors *file, uint32_t offset) { return file->header + offset; }

static int compare_entry_names(const halfstep_safetensors *file, uint32_t a, uint32_t b)
{
    return strcmp(name_at(file, a), name_at(file, b));
}

static int compare_keys(const halfstep_safetensors *file, uint32_t a, uint32_t b)
{
    return strcmp(key_at(file, a), key_at(file, b));
}

/* Returns a text that comes twice in a sorted list, or NULL. */
static const char *find_duplicate(const halfstep_safetensors *file, const series *sorted, record_text *text)
{
    for (size_t i = 1; i < sorted->count; i++) {
        const char *before = text(file, number_at(sorted, i - 1)), *after = text(file, number_at(sorted, i));
        if (!strcmp(before, after)) return after;
    }
    return NULL;
}

/* Finds a text in a sorted list. Returns 1 and sets *number to what stands for it, or returns 0. */
static int find_text(const halfstep_safetensors *file, const series *sorted, record_text *text, const char *wanted,
                     uint32_t *number)
{
    size_t low = 0, high = sorted->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        *number = number_at(sorted, middle);
        int order = strcmp(wanted, text(file, *number));
        if (!order) return 1;
        if (order < 0) high = middle;
        else low = middle + 1;
    }
    return 0;
}

/* ---- Parsing the header ---- */

/* The reading of one header. */
typedef struct header_reader {
    halfstep_safetensors *file;
    const char *path;
    hstep_json json;
    hstep_error *error;
    size_t size_count; /* number of sizes in all shapes so far */
} header_reader;

/* Fails with a text about json.problem. */
static int fail_json(header_reader *reader)
{
    return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: byte %zu of the header: %s", reader->path,
                   reader->json.at, reader->json.problem);
}

static int read_shape(header_reader *reader, tensor_entry *entry)
{
    halfstep_safetensors *file = reader->file;
    if (!hstep_json_expect(&reader->json, '[')) return fail_json(reader);
    if (hstep_json_take(&reader->json, ']')) return HALFSTEP_OK;
    /* Begin a new piece if this one may not hold all sizes of the tensor. */
    if (SERIES_PIECE - file->sizes.count % SERIES_PIECE < HSTEP_MAX_NDIM)
        file->sizes.count += SERIES_PIECE - file->sizes.count % SERIES_PIECE;
    entry->shape_at = (uint32_t)file->sizes.count;
    do {
        uint64_t size, *stored;
        if (!hstep_json_number(&reader->json, &size)) return fail_json(reader);
        if (entry->ndim == HSTEP_MAX_NDIM)
            return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\" has more than %d dimensions",
                           reader->path, name_of(file, entry), HSTEP_MAX_NDIM);
        if (reader->size_count++ == HSTEP_MAX_SIZES(file->tensors.count + 1))
            return io_fail(reader->error, HALFSTEP_ERROR_FORMAT,
                           "%s: the first %zu tensors have more than %zu dimensions", reader->path,
                           file->tensors.count + 1, HSTEP_MAX_SIZES(file->tensors.count + 1));
        if (!(stored = series_add(&file->sizes, sizeof *stored))) return io_fail_memory(reader->error);
        *stored = size;
        entry->ndim++;
    } while (hstep_json_take(&reader->json, ','));
    return hstep_json_expect(&reader->json, ']') ? HALFSTEP_OK : fail_json(reader);
}

static int read_member(header_reader *reader, tensor_entry *entry, uint64_t *end, unsigned *seen)
{
    hstep_json *json = &reader->json;
    const char *key, *dtype;
    if (!hstep_json_key(json, &key)) return fail_json(reader);
    unsigned member = !strcmp(key, "dtype") ? 1 : !strcmp(key, "shape") ? 2 : !strcmp(key, "data_offsets") ? 4 : 0;
    if (*seen & member)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\": duplicate member \"%s\"", reader->path,
                       name_of(reader->file, entry), key);
    /* The reference implementation skips members that it does not know, so writers may add some. */
    if (!member) return hstep_json_skip(json) ? HALFSTEP_OK : fail_json(reader);
    *seen |= member;
    if (member == 2) return read_shape(reader, entry);
    if (member == 4)
        return hstep_json_expect(json, '[') && hstep_json_number(json, &entry->begin) && hstep_json_expect(json, ',') &&
                       hstep_json_number(json, end) && hstep_json_expect(json, ']')
                   ? HALFSTEP_OK
                   : fail_json(reader);
    if (!hstep_json_string(json, &dtype)) return fail_json(reader);
    const dtype_row *row = find_dtype(dtype);
    if (!row)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\": unknown dtype \"%s\"", reader->path,
                       name_of(reader->file, entry), dtype);
    entry->dtype = (uint8_t)(row - dtypes);
    return HALFSTEP_OK;
}

static int read_entry(header_reader *reader, const char *name)
{
    halfstep_safetensors *file = reader->file;
    uint64_t data_bytes = file->file_bytes - file->data_start, end = 0, elements = 0, bytes = 0;
    tensor_entry entry = {.name = (uint32_t)(name - file->header)}, *stored;
    unsigned seen = 0;
    if (!hstep_json_expect(&reader->json, '{')) return fail_json(reader);
    if (!hstep_json_take(&reader->json, '}')) {
        do {
            int code = read_member(reader, &entry, &end, &seen);
            if (code) return code;
        } while (hstep_json_take(&reader->json, ','));
        if (!hstep_json_expect(&reader->json, '}')) return fail_json(reader);
    }
    if (seen != 7)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\" lacks dtype, shape or data_offsets",
                       reader->path, name);
    if (entry.begin > end || end > data_bytes)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT,
                       "%s: tensor \"%s\": data_offsets [%llu, %llu] do not lie within the file's %llu bytes of data",
                       reader->path, name, ull(entry.begin), ull(end), ull(data_bytes));
    const char *problem =
        measure_shape(sizes_of(file, &entry), entry.ndim, dtypes[entry.dtype].bits, &elements, &bytes);
    if (problem)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\": %s", reader->path, name, problem);
    if (bytes != end - entry.begin)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT,
                       "%s: tensor \"%s\": shape and dtype give %llu bytes, data_offsets %llu", reader->path, name,
                       ull(bytes), ull(end - entry.begin));
    if (file->tensors.count == HSTEP_MAX_TENSORS)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: more than %zu tensors", reader->path,
                       HSTEP_MAX_TENSORS);
    if (!(stored = series_add(&file->tensors, sizeof entry))) return io_fail_memory(reader->error);
    *stored = entry;
    return HALFSTEP_OK;
}

static int read_metadata(header_reader *reader)
{
    halfstep_safetensors *file = reader->file;
    const char *key, *value;
    /* Some writers without metadata write null. */
    if (hstep_json_peek(&reader->json) == 'n')
        return hstep_json_word(&reader->json, "null") ? HALFSTEP_OK : fail_json(reader);
    if (!hstep_json_expect(&reader->json, '{')) return fail_json(reader);
    if (hstep_json_take(&reader->json, '}')) return HALFSTEP_OK;
    do {
        uint32_t *stored;
        if (!hstep_json_key(&reader->json, &key) || !hstep_json_string(&reader->json, &value)) return fail_json(reader);
        if (file->metadata.count == HSTEP_MAX_METADATA)
            return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: more than %zu pairs in " HSTEP_METADATA,
                           reader->path, HSTEP_MAX_METADATA);
        if (!(stored = series_add(&file->metadata, sizeof *stored))) return io_fail_memory(reader->error);
        *stored = (uint32_t)(key - file->header);
        /* The value fits behind the key's zero byte, because two quotes and a colon stood between them. */
        memmove(file->header + *stored + strlen(key) + 1, value, strlen(value) + 1);
    } while (hstep_json_take(&reader->json, ','));
    return hstep_json_expect(&reader->json, '}') ? HALFSTEP_OK : fail_json(reader);
}

static int add_numbers(series *numbers, size_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t *stored = series_add(numbers, sizeof *stored);
        if (!stored) return 0;
        *stored = i;
    }
    return 1;
}

/* Sorts tensors by offset, and the names of tensors and of metadata. Fails if a name comes twice. */
static int index_file(header_reader *reader)
{
    halfstep_safetensors *file = reader->file;
    size_t count = file->tensors.count;
    if (!add_numbers(&file->by_offset, count) || !add_numbers(&file->by_name, count))
        return io_fail_memory(reader->error);
    sort_numbers(file, &file->by_offset, compare_offsets);
    sort_numbers(file, &file->by_name, compare_entry_names);
    sort_numbers(file, &file->metadata, compare_keys);
    const char *twice = find_duplicate(file, &file->by_name, name_at);
    if (twice) return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: duplicate tensor \"%s\"", reader->path, twice);
    twice = find_duplicate(file, &file->metadata, key_at);
    if (twice)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: duplicate " HSTEP_METADATA " key \"%s\"",
                       reader->path, twice);
    return HALFSTEP_OK;
}

static int check_coverage(const header_reader *reader)
{
    const halfstep_safetensors *file = reader->file;
    uint64_t data_bytes = file->file_bytes - file->data_start, reached = 0;
    for (size_t i = 0; i < file->tensors.count; i++) {
        const tensor_entry *entry = entry_at(file, i);
        if (entry->begin != reached)
            return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: tensor \"%s\" begins at %llu, but %s %llu",
                           reader->path, name_of(file, entry), ull(entry->begin),
                           entry->begin > reached ? "the bytes before it are unused from" : "the one before it ends at",
                           ull(reached));
        reached += bytes_of(file, entry);
    }
    if (reached != data_bytes)
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: %llu bytes follow the last tensor", reader->path,
                       ull(data_bytes - reached));
    return HALFSTEP_OK;
}

static int read_header(header_reader *reader)
{
    hstep_json *json = &reader->json;
    int seen_metadata = 0, code;
    if (!hstep_json_expect(json, '{')) return fail_json(reader);
    if (!hstep_json_take(json, '}')) {
        do {
            const char *key;
            if (!hstep_json_key(json, &key)) return fail_json(reader);
            if (strcmp(key, HSTEP_METADATA)) code = read_entry(reader, key);
            else if (!seen_metadata++) code = read_metadata(reader);
            else code = io_fail(reader->error, HALFSTEP_ERROR_FORMAT, "%s: duplicate " HSTEP_METADATA, reader->path);
            if (code) return code;
        } while (hstep_json_take(json, ','));
        if (!hstep_json_expect(json, '}')) return fail_json(reader);
    }
    if (!hstep_json_end(json))
        return io_fail(reader->error, HALFSTEP_ERROR_FORMAT,
                       "%s: byte %zu of the header: only blanks may follow its last '}'", reader->path, json->at);
    code = index_file(reader);
    return code ? code : check_coverage(reader);
}

int halfstep_open_safetensors(halfstep_safetensors **file, const char *path, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    unsigned char prefix[8];
    uint64_t length = 0;

    if (file) *file = NULL;
    if (!file || !path) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_open_safetensors: NULL argument");
    halfstep_safetensors *made = calloc(1, sizeof *made);
    if (!made) return io_fail_memory(&error);
    int code = hstep_open_file(&made->file, path, &made->file_bytes, &error);
    if (!code && made->file_bytes < sizeof prefix)
        code = io_fail(&error, HALFSTEP_ERROR_FORMAT, "%s has %llu bytes, too few for a safetensors file", path,
                       ull(made->file_bytes));
    if (!code) code = hstep_read_at(made->file, 0, prefix, sizeof prefix, &error);
    if (!code) {
        for (int i = 7; i >= 0; i--) length = length << 8 | prefix[i];
        if (length > HSTEP_MAX_HEADER)
            code = io_fail(&error, HALFSTEP_ERROR_FORMAT,
                           "%s: a header of %llu bytes is above the limit of 100000000; is this a "
                           "safetensors file?",
                           path, ull(length));
        else if (length > made->file_bytes - sizeof prefix)
            code = io_fail(&error, HALFSTEP_ERROR_FORMAT, "%s: the header's %llu bytes reach beyond the file's %llu",
                           path, ull(length), ull(made->file_bytes));
        else if (length < 2)
            code = io_fail(&error, HALFSTEP_ERROR_FORMAT, "%s: a header of %llu bytes is too small", path, ull(length));
    }
    if (!code && !(made->header = malloc((size_t)length + 1))) code = io_fail_memory(&error);
    if (!code) code = hstep_read_at(made->file, sizeof prefix, made->header, (size_t)length, &error);
    if (!code) {
        made->header[length] = 0;
        header_reader reader = {made, path, {made->header, (size_t)length, 0, NULL}, &error, 0};
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
    if (!file) return;
    free(file->header);
    free_series(&file->tensors);
    free_series(&file->sizes);
    free_series(&file->by_offset);
    free_series(&file->by_name);
    free_series(&file->metadata);
    hstep_close(file->file);
    free(file);
}

uint64_t halfstep_safetensor_count(const halfstep_safetensors *file) { return file ? file->tensors.count : 0; }

int halfstep_get_safetensor_info(const halfstep_safetensors *file, uint64_t index, halfstep_safetensor_info *info)
{
    if (!file || !info || index >= file->tensors.count) return HALFSTEP_ERROR_ARGUMENT;
    const tensor_entry *entry = entry_at(file, (size_t)index);
    const dtype_row *dtype = &dtypes[entry->dtype];
    halfstep_safetensor_info ours = {.dtype_bits = dtype->bits,
                                     .name = name_of(file, entry),
                                     .dtype = dtype->name,
                                     .ndim = entry->ndim,
                                     .shape = sizes_of(file, entry),
                                     .begin = entry->begin};
    measure_shape(ours.shape, ours.ndim, dtype->bits, &ours.elements, &ours.bytes);
    ours.end = ours.begin + ours.bytes;
    return hstep_give_struct(info, &ours, sizeof ours) ? HALFSTEP_OK : HALFSTEP_ERROR_ARGUMENT;
}

int halfstep_safetensor_find(const halfstep_safetensors *file, const char *name, uint64_t *index)
{
    uint32_t position;
    if (!file || !name || !index) return HALFSTEP_ERROR_ARGUMENT;
    if (!find_text(file, &file->by_name, name_at, name, &position)) return HALFSTEP_ERROR_NAME;
    *index = position;
    return HALFSTEP_OK;
}

int halfstep_read_safetensor(const halfstep_safetensors *file, uint64_t index, uint64_t offset, void *data,
                             uint64_t bytes, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    uint64_t size_now = 0;
    if (!file || (!data && bytes))
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_read_safetensor: NULL argument");
    if (index >= file->tensors.count)
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "%s has no tensor number %llu (numbered from 0)",
                       hstep_file_path(file->file), ull(index));
    const tensor_entry *entry = entry_at(file, (size_t)index);
    uint64_t length = bytes_of(file, entry);
    if (offset > length || bytes > length - offset || bytes > SIZE_MAX)
        return io_fail(&error, HALFSTEP_ERROR_RANGE,
                       "%s: tensor \"%s\" has %llu bytes; cannot read %llu from byte %llu on",
                       hstep_file_path(file->file), name_of(file, entry), ull(length), ull(bytes), ull(offset));
    int code = hstep_file_bytes(file->file, &size_now, &error);
    if (code) return code;
    if (size_now != file->file_bytes)
        return io_fail(&error, HALFSTEP_ERROR_FORMAT, "%s changed from %llu to %llu bytes while it was open",
                       hstep_file_path(file->file), ull(file->file_bytes), ull(size_now));
    return hstep_read_at(file->file, file->data_start + entry->begin + offset, data, (size_t)bytes, &error);
}

uint64_t halfstep_safetensors_metadata_count(const halfstep_safetensors *file)
{
    return file ? file->metadata.count : 0;
}

int halfstep_get_safetensors_metadata(const halfstep_safetensors *file, uint64_t index, const char **key,
                                      const char **value)
{
    if (!file || !key || !value || index >= file->metadata.count) return HALFSTEP_ERROR_ARGUMENT;
    *key = key_at(file, number_at(&file->metadata, (size_t)index));
    *value = *key + strlen(*key) + 1;
    return HALFSTEP_OK;
}

const char *halfstep_safetensors_metadata_find(const halfstep_safetensors *file, const char *key)
{
    uint32_t found;
    if (!file || !key || !find_text(file, &file->metadata, key_at, key, &found)) return NULL;
    return key_at(file, found) + strlen(key) + 1;
}

/* ---- Writer ------------------------------------------------------------------------------------------------------ */

typedef struct tensor_plan {
    char *name;
    const dtype_row *dtype;
    uint64_t ndim, *shape, bytes;
    const void *data;
} tensor_plan;

/* A pair of metadata. Pairs are in lists by the checksums of their keys. There are as many lists as there is room for
 * pairs. The numbers of pairs in lists begin at 1; 0 ends a list. */
typedef struct metadata_pair {
    char *key, *value;
    size_t first, next; /* first: pair of the list that has this pair's place as its number */
} metadata_pair;

struct halfstep_safetensors_writer {
    tensor_plan *tensors;
    size_t tensor_count, tensor_capacity, size_count;
    metadata_pair *metadata;
    size_t metadata_count, metadata_capacity;
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
        free(writer->metadata[i].key);
        free(writer->metadata[i].value);
    }
    free(writer->metadata);
    free(writer->tensors);
    free(writer);
}

int halfstep_declare_safetensor(halfstep_safetensors_writer *writer, const char *name, const char *dtype, uint64_t ndim,
                                const uint64_t *shape, const void *data, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    tensor_plan plan = {0};
    uint64_t elements;
    if (!writer || !name || !dtype || (ndim && !shape))
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_declare_safetensor: NULL argument");
    if (!strcmp(name, HSTEP_METADATA) || !hstep_is_utf8(name))
        return io_fail(&error, HALFSTEP_ERROR_NAME,
                       "a tensor cannot be named \"%s\"; names are UTF-8 and not " HSTEP_METADATA, name);
    if (!(plan.dtype = find_dtype(dtype)))
        return io_fail(&error, HALFSTEP_ERROR_NAME, "tensor \"%s\": unknown dtype \"%s\"", name, dtype);
    if (ndim > HSTEP_MAX_NDIM)
        return io_fail(&error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\" has more than %d dimensions", name, HSTEP_MAX_NDIM);
    for (uint64_t i = 0; i < ndim; i++)
        if (shape[i] > INT64_MAX)
            return io_fail(&error, HALFSTEP_ERROR_SHAPE,
                           "tensor \"%s\": dimension %llu is too large; sizes are at most 2^63 - 1", name, ull(i));
    const char *problem = measure_shape(shape, ndim, plan.dtype->bits, &elements, &plan.bytes);
    if (problem) return io_fail(&error, HALFSTEP_ERROR_SHAPE, "tensor \"%s\": %s", name, problem);
    if (writer->tensor_count == HSTEP_MAX_TENSORS)
        return io_fail(&error, HALFSTEP_ERROR_RANGE, "more than %zu tensors in one file", HSTEP_MAX_TENSORS);
    if (ndim > HSTEP_MAX_SIZES(writer->tensor_count + 1) - writer->size_count)
        return io_fail(&error, HALFSTEP_ERROR_RANGE, "%zu tensors with more than %zu dimensions in one file",
                       writer->tensor_count + 1, HSTEP_MAX_SIZES(writer->tensor_count + 1));

    plan.name = hstep_copy(name);
    plan.shape = malloc((ndim + 1) * sizeof *plan.shape);
    if (!plan.name || !plan.shape ||
        !io_grow((void **)&writer->tensors, writer->tensor_count, &writer->tensor_capacity, sizeof plan)) {
        free(plan.name);
        free(plan.shape);
        return io_fail_memory(&error);
    }
    if (ndim) memcpy(plan.shape, shape, ndim * sizeof *plan.shape);
    plan.ndim = ndim;
    plan.data = data;
    writer->size_count += (size_t)ndim;
    writer->tensors[writer->tensor_count++] = plan;
    return HALFSTEP_OK;
}

/* Returns the link of the first pair in the list of a key. The room for pairs is a power of two. */
static size_t *list_of(const halfstep_safetensors_writer *writer, const char *key)
{
    return &writer->metadata[hstep_crc64(0, key, strlen(key)) & (writer->metadata_capacity - 1)].first;
}

static metadata_pair *find_metadata(const halfstep_safetensors_writer *writer, const char *key)
{
    size_t number = writer->metadata_count ? *list_of(writer, key) : 0;
    while (number && strcmp(writer->metadata[number - 1].key, key)) number = writer->metadata[number - 1].next;
    return number ? &writer->metadata[number - 1] : NULL;
}

/* Puts a pair into its list. */
static void enlist(const halfstep_safetensors_writer *writer, size_t place)
{
    size_t *first = list_of(writer, writer->metadata[place].key);
    writer->metadata[place].next = *first;
    *first = place + 1;
}

/* Adds a pair without a value, which keeps the key. Returns NULL when memory is short. Where there is more room than
 * before, all pairs change their lists. */
static metadata_pair *add_metadata(halfstep_safetensors_writer *writer, char *key)
{
    const size_t before = writer->metadata_capacity;
    if (!io_grow((void **)&writer->metadata, writer->metadata_count, &writer->metadata_capacity,
                 sizeof *writer->metadata))
        return NULL;
    if (writer->metadata_capacity != before) {
        for (size_t i = 0; i < writer->metadata_capacity; i++) writer->metadata[i].first = 0;
        for (size_t i = 0; i < writer->metadata_count; i++) enlist(writer, i);
    }
    metadata_pair *added = &writer->metadata[writer->metadata_count];
    added->key = key;
    added->value = NULL;
    enlist(writer, writer->metadata_count++);
    return added;
}

int halfstep_declare_safetensors_metadata(halfstep_safetensors_writer *writer, const char *key, const char *value,
                                          char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    if (!writer || !key || !value)
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_declare_safetensors_metadata: NULL argument");
    if (!hstep_is_utf8(key) || !hstep_is_utf8(value))
        return io_fail(&error, HALFSTEP_ERROR_NAME, "metadata \"%s\" is not UTF-8", key);
    metadata_pair *pair = find_metadata(writer, key);
    if (!pair && writer->metadata_count == HSTEP_MAX_METADATA)
        return io_fail(&error, HALFSTEP_ERROR_RANGE, "more than %zu pairs of metadata in one file", HSTEP_MAX_METADATA);
    char *copy = hstep_copy(value), *name = pair || !copy ? NULL : hstep_copy(key);
    if (name) pair = add_metadata(writer, name);
    if (!copy || !pair) {
        free(name);
        free(copy);
        return io_fail_memory(&error);
    }
    free(pair->value);
    pair->value = copy;
    return HALFSTEP_OK;
}

static uint32_t alignment(const dtype_row *dtype) { return dtype->bits < 8 ? 1 : dtype->bits / 8; }

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
    return strcmp((*(const metadata_pair *const *)a)->key, (*(const metadata_pair *const *)b)->key);
}

/* Appends the metadata, sorted by key. */
static void append_metadata(hstep_buffer *header, const halfstep_safetensors_writer *writer)
{
    const size_t count = writer->metadata_count;
    const metadata_pair **sorted = malloc((count + 1) * sizeof *sorted);
    header->failed |= !sorted;
    for (size_t i = 0; i < count && sorted; i++) sorted[i] = &writer->metadata[i];
    if (sorted) qsort(sorted, count, sizeof *sorted, compare_pairs);
    hstep_append_text(header, "\"" HSTEP_METADATA "\":{");
    for (size_t i = 0; i < count && sorted; i++) {
        if (i) hstep_append_text(header, ",");
        hstep_append_json(header, sorted[i]->key);
        hstep_append_text(header, ":");
        hstep_append_json(header, sorted[i]->value);
    }
    hstep_append_text(header, "}");
    free(sorted);
}

/* Sorts the tensors into *order and writes length and header into *header. The caller frees *order, after a failure
 * too. */
static int plan_file(const halfstep_safetensors_writer *writer, const char *name, tensor_plan ***order,
                     hstep_buffer *header, hstep_error *error)
{
    size_t count = writer->tensor_count;
    uint64_t offset = 0;
    tensor_plan **sorted = malloc((count + 1) * sizeof *sorted);
    *order = sorted;
    if (!sorted) return io_fail_memory(error);
    for (size_t i = 0; i < count; i++) sorted[i] = &writer->tensors[i];
    qsort(sorted, count, sizeof *sorted, compare_plan_names);
    for (size_t i = 1; i < count; i++)
        if (!strcmp(sorted[i - 1]->name, sorted[i]->name))
            return io_fail(error, HALFSTEP_ERROR_DUPLICATE, "%s: two tensors are named \"%s\"", name, sorted[i]->name);
    qsort(sorted, count, sizeof *sorted, compare_plans);

    hstep_append(header, "\0\0\0\0\0\0\0\0{", 9);
    if (writer->metadata_count) append_metadata(header, writer);
    for (size_t i = 0; i < count; i++) {
        const tensor_plan *plan = sorted[i];
        if (i || writer->metadata_count) hstep_append_text(header, ",");
        hstep_append_json(header, plan->name);
        hstep_append_format(header, ":{\"dtype\":\"%s\",\"shape\":[", plan->dtype->name);
        for (uint64_t d = 0; d < plan->ndim; d++)
            hstep_append_format(header, d ? ",%llu" : "%llu", ull(plan->shape[d]));
        if (plan->bytes > INT64_MAX - offset)
            return io_fail(error, HALFSTEP_ERROR_SHAPE, "%s: the tensors are too large for one file", name);
        hstep_append_format(header, "],\"data_offsets\":[%llu,%llu]}", ull(offset), ull(offset + plan->bytes));
        offset += plan->bytes;
    }
    hstep_append_text(header, "}");
    while (!header->failed && header->bytes % 8) hstep_append_text(header, " ");
    if (header->failed) return io_fail_memory(error);
    uint64_t length = header->bytes - 8;
    if (length > HSTEP_MAX_HEADER)
        return io_fail(error, HALFSTEP_ERROR_RANGE, "%s: a header of %llu bytes is above the limit of 100000000", name,
                       ull(length));
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
                return io_fail(error, code < 0 ? code : HALFSTEP_ERROR_ARGUMENT,
                               "%s: the contents of tensor \"%s\" could not be supplied (code %d)", name, plan->name,
                               code);
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
            code = io_fail(error, HALFSTEP_ERROR_ARGUMENT,
                           "%s: tensor \"%s\" has NULL data, and there is no fill function", name,
                           writer->tensors[i].name);
    }
    if (!code) code = plan_file(writer, name, &order, &header, error);
    if (!code && needs_fill && !(piece = malloc(HSTEP_FILL_BYTES))) code = io_fail_memory(error);
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
    if (!writer || !path) return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_write_safetensors: NULL argument");
    int code = hstep_begin_replacement(&replacement, path, HSTEP_WRITE_PREFIX, &error);
    if (code) return code;
    code = hstep_stream_safetensors(writer, path, write_to_file, replacement.file, fill, context, &error);
    return hstep_finish_replacement(&replacement, code, 1, &renamed, &error);
}

int halfstep_write_file_atomic(const char *path, const void *data, uint64_t bytes, char *text, size_t text_size)
{
    hstep_error error = hstep_make_error(text, text_size);
    int renamed;
    if (!path || (!data && bytes))
        return io_fail(&error, HALFSTEP_ERROR_ARGUMENT, "halfstep_write_file_atomic: NULL argument");
    return hstep_replace_file(path, HSTEP_WRITE_PREFIX, data, bytes, 1, &renamed, &error);
}
