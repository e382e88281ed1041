/* Fuzzes the safetensors reader. A file that it accepts must be consistent, readable in full, and writable again by our
 * own writer. fuzz.h says how to run it. */
#define FUZZ_NAME "fuzz_safetensors"
#define HALFSTEP_ADVANCED
#include "fuzz.h"

#include <fcntl.h>

#include "halfstep_io.h"

/* Opens a file in memory and writes its path to `path`. Returns the descriptor. */
static int memory_file(char *path, size_t room)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    demand(fd >= 0, "no memory file");
    snprintf(path, room, "/proc/self/fd/%d", fd);
    return fd;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int copy_tensor(void *context, uint64_t tensor, uint64_t offset, void *data, uint64_t bytes)
{
    return halfstep_read_safetensor(context, tensor, offset, data, bytes, NULL, 0);
}

/* Writes the tensors of `file` to another file, opens that, and compares. */
static void check_copy(halfstep_safetensors *file)
{
    halfstep_safetensors_writer *writer;
    halfstep_safetensors *copy;
    halfstep_safetensor_info info = {.struct_size = sizeof info}, other = info;
    uint64_t count = halfstep_safetensor_count(file), pairs = halfstep_safetensors_metadata_count(file), index;
    const char *key, *value;
    char path[600], error[1024];
    demand(!halfstep_create_safetensors_writer(&writer), "no writer");
    for (uint64_t i = 0; i < count; i++) {
        demand(!halfstep_get_safetensor_info(file, i, &info), "no info");
        demand(!halfstep_declare_safetensor(writer, info.name, info.dtype, info.ndim, info.shape, NULL, error,
                                            sizeof error),
               "a tensor that was read cannot be declared");
    }
    for (uint64_t i = 0; i < pairs; i++) {
        demand(!halfstep_get_safetensors_metadata(file, i, &key, &value), "no metadata");
        demand(!halfstep_declare_safetensors_metadata(writer, key, value, error, sizeof error),
               "metadata cannot be declared");
    }
    /* A memory file's folder takes no temporary beside it, so a real folder is used. */
    const char *base = getenv("TMPDIR");
    snprintf(path, sizeof path, "%.500s/halfstep-fuzz-%ld", base && *base ? base : P_tmpdir, (long)getpid());
    demand(!halfstep_write_safetensors(writer, path, copy_tensor, file, error, sizeof error),
           "the copy cannot be written");
    demand(!halfstep_open_safetensors(&copy, path, error, sizeof error), "the copy cannot be opened");
    unlink(path);
    demand(halfstep_safetensor_count(copy) == count && halfstep_safetensors_metadata_count(copy) == pairs,
           "counts differ");
    for (uint64_t i = 0; i < count; i++) {
        halfstep_get_safetensor_info(file, i, &info);
        demand(!halfstep_safetensor_find(copy, info.name, &index), "a name is lost");
        halfstep_get_safetensor_info(copy, index, &other);
        demand(info.bytes == other.bytes && info.ndim == other.ndim && !strcmp(info.dtype, other.dtype),
               "a tensor differs");
        demand(!info.ndim || !memcmp(info.shape, other.shape, info.ndim * sizeof *info.shape), "a shape differs");
        unsigned char *first = malloc(info.bytes + 1), *second = malloc(info.bytes + 1);
        demand(first && second, "out of memory");
        demand(!halfstep_read_safetensor(file, i, 0, first, info.bytes, error, sizeof error) &&
                   !halfstep_read_safetensor(copy, index, 0, second, info.bytes, error, sizeof error) &&
                   !memcmp(first, second, info.bytes),
               "the contents differ");
        free(first);
        free(second);
    }
    for (uint64_t i = 0; i < pairs; i++) {
        halfstep_get_safetensors_metadata(file, i, &key, &value);
        const char *copied = halfstep_safetensors_metadata_find(copy, key);
        demand(copied && !strcmp(copied, value), "metadata differs");
    }
    halfstep_close_safetensors(copy);
    halfstep_destroy_safetensors_writer(writer);
}

static void check_accepted(halfstep_safetensors *file, size_t size)
{
    halfstep_safetensor_info info = {.struct_size = sizeof info};
    uint64_t count = halfstep_safetensor_count(file), reached = 0, index;
    const char **names = malloc((count + 1) * sizeof *names);
    demand(names != NULL, "out of memory");
    for (uint64_t i = 0; i < count; i++) {
        demand(!halfstep_get_safetensor_info(file, i, &info), "no info");
        demand(info.begin == reached && info.end - info.begin == info.bytes && info.end <= size,
               "a hole or an overlap");
        demand(!halfstep_safetensor_find(file, info.name, &index) && index == i, "a name is not found");
        demand(halfstep_safetensors_dtype_bits(info.dtype) == info.dtype_bits, "dtype");
        demand((unsigned __int128)info.elements * info.dtype_bits == (unsigned __int128)info.bytes * 8,
               "shape and bytes");
        names[i] = info.name;
        reached = info.end;
    }
    if (count) qsort(names, count, sizeof *names, compare_names);
    for (uint64_t i = 1; i < count; i++) demand(strcmp(names[i - 1], names[i]), "a duplicate name");
    free(names);
}

/* Only some accepted inputs are copied, because a copy costs two syncs. */
enum { COPY_EVERY = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    halfstep_safetensors *file;
    char path[64], error[512];
    int fd = memory_file(path, sizeof path);
    demand(write(fd, data, size) == (ssize_t)size, "short write");
    int code = halfstep_open_safetensors(&file, path, error, sizeof error);
    demand((code == HALFSTEP_OK) == (file != NULL), "code and handle disagree");
    if (file) {
        check_accepted(file, size);
        if (fuzz_accepted++ % COPY_EVERY == 0) check_copy(file);
    } else {
        fuzz_rejected++;
        demand(code == HALFSTEP_ERROR_FORMAT && strlen(error) > 20 && !strchr(error, '\n'), "an odd failure");
    }
    halfstep_close_safetensors(file);
    close(fd);
    return 0;
}

#ifndef HALFSTEP_LIBFUZZER

/* Makes a good file, which now and then has one defect. */
static size_t make_file(uint8_t *out, size_t room)
{
    static const char *const oddities[] = {
        "-1", "1.0", "1e3", "01", "18446744073709551615", "9223372036854775807", "null", "\"1\"", "[]", "4294967296"};
    char header[4096];
    size_t used = 0, offset = 0, tensors = draw(6);
    int odd = draw(3) == 0;
#define PUT(...) (used += (size_t)snprintf(header + used, sizeof header - used, __VA_ARGS__))
    PUT("%s{", draw(8) ? "" : " \n");
    if (draw(8) == 0) PUT("\"__metadata__\":null%s", tensors ? "," : "");
    else if (draw(3) == 0) PUT("\"__metadata__\":{\"k%u\":\"v\\u00e9\\n\"}%s", (unsigned)draw(9), tensors ? "," : "");
    for (size_t i = 0; i < tensors; i++) {
        uint32_t kinds = 0;
        while (halfstep_safetensors_dtype(kinds)) kinds++;
        const char *dtype = halfstep_safetensors_dtype((uint32_t)draw(kinds));
        size_t ndim = draw(4), elements = 8;
        PUT("%s\"t%u\":{\"dtype\":\"%s\",\"shape\":[8", i ? "," : "", (unsigned)(odd ? draw(6) : i), dtype);
        for (size_t d = 0; d < ndim; d++) {
            size_t size = draw(4);
            if (odd && draw(8) == 0) PUT(",%s", oddities[draw(10)]);
            else PUT(",%u", (unsigned)size);
            elements *= size;
        }
        size_t bytes = elements * halfstep_safetensors_dtype_bits(dtype) / 8;
        if (odd && draw(6) == 0) bytes += draw(3);
        if (draw(8) == 0) PUT("],\"more\":[1,{\"shape\":null}");
        PUT("],\"data_offsets\":[%u,%u]}", (unsigned)offset, (unsigned)(offset + bytes));
        offset += bytes;
    }
    PUT("}");
    while (used % 8) PUT(" ");
#undef PUT
    uint64_t length = used;
    if (odd && draw(6) == 0) length += draw(5) - 2;
    if (8 + used + offset > room) offset = 0;
    for (int i = 0; i < 8; i++) out[i] = (uint8_t)(length >> 8 * i);
    memcpy(out + 8, header, used);
    memset(out + 8 + used, 7, offset);
    return 8 + used + offset;
}

static size_t make_input(uint8_t *data, size_t room)
{
    size_t size = make_file(data, room);
    return draw(2) ? mutate(data, size, room, "{}[]\",:0123456789\\u ") : size;
}

#endif
