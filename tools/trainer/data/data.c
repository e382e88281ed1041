#include "trainer/data/data.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#include "common/text.h"
#include "trainer/products/rows.h"

/* Makes room for at least one more byte: for `hint` of them, or for a quarter of the old capacity if that is more. */
static int reserve(struct data_file *out, size_t *capacity, size_t hint)
{
    if (out->n < *capacity) return 0;
    size_t wanted = out->n + hint;
    if (wanted < *capacity + *capacity / 4) wanted = *capacity + *capacity / 4;
    uint8_t *bytes = wanted > *capacity ? realloc(out->bytes, wanted) : NULL;
    if (!bytes) return -1;
    out->bytes = bytes;
    *capacity = wanted;
    return 0;
}

static int read_all(FILE *file, const char *path, struct data_file *out, size_t *capacity, char *error,
                    size_t error_bytes)
{
    size_t hint = 1 << 16;
    struct stat status;
    if (fstat(fileno(file), &status) == 0 && S_ISDIR(status.st_mode)) {
        snprintf(error, error_bytes, "%s: is a directory", path);
        return -1;
    }
    if (fstat(fileno(file), &status) == 0 && status.st_size > 0) hint = (size_t)status.st_size + 1;
    for (;;) {
        if (reserve(out, capacity, hint)) {
            snprintf(error, error_bytes, "%s: out of memory after %zu bytes", path, out->n);
            return -1;
        }
        size_t got = fread(out->bytes + out->n, 1, *capacity - out->n, file);
        out->n += got;
        if (ferror(file)) {
            snprintf(error, error_bytes, "%s: cannot be read: %s", path, strerror(errno));
            return -1;
        }
        if (feof(file)) return 0;
    }
}

static int unpack(const char *path, const struct data_file *packed, struct data_file *out, size_t *capacity,
                  char *error, size_t error_bytes)
{
    z_stream stream = {0};
    if (inflateInit2(&stream, 15 + 16) != Z_OK) {
        snprintf(error, error_bytes, "%s: zlib cannot be started", path);
        return -1;
    }
    size_t used = 0;
    const char *wrong = NULL;
    for (;;) {
        if (reserve(out, capacity, packed->n * 4 + 4096)) {
            wrong = "out of memory while unpacking";
            break;
        }
        /* zlib counts in unsigned int. */
        size_t space = *capacity - out->n, input = packed->n - used;
        stream.next_out = out->bytes + out->n;
        stream.avail_out = space > 1 << 30 ? 1 << 30 : (uInt)space;
        stream.next_in = packed->bytes + used;
        stream.avail_in = input > 1 << 30 ? 1 << 30 : (uInt)input;
        uInt in_before = stream.avail_in, out_before = stream.avail_out;
        int status = inflate(&stream, Z_NO_FLUSH);
        used += in_before - stream.avail_in;
        out->n += out_before - stream.avail_out;
        if (status == Z_STREAM_END) {
            if (used == packed->n) break;
            /* Either another member follows, or zeros as padding from tapes and some tools. */
            size_t rest = used;
            while (rest < packed->n && packed->bytes[rest] == 0) rest++;
            if (rest == packed->n) break;
            if (inflateReset(&stream) != Z_OK) wrong = "corrupt gzip data";
        } else if (status == Z_MEM_ERROR) {
            wrong = "out of memory while unpacking";
        } else if (status != Z_OK && status != Z_BUF_ERROR) {
            wrong = "corrupt gzip data";
        } else if (used == packed->n && stream.avail_out) {
            wrong = "truncated gzip data";
        }
        if (wrong) break;
    }
    inflateEnd(&stream);
    if (!wrong) return 0;
    snprintf(error, error_bytes, "%s: %s", path, wrong);
    return -1;
}

/* Files whose bytes are not the text in them, by bytes that they have at a place. zlib reads gzip; each of the others
 * would need a library. */
static const struct kind {
    size_t at;
    const char *magic;
    int bytes;
    const char *name, *advice;
} kinds[] = {
    {4, "1AY&SY", 6, "bzip2 data", "unpack it first: bzip2 -d"},
    {0, "\xFD\x37zXZ", 5, "xz data", "unpack it first: xz -d"},
    {0, "\x28\xB5\x2F\xFD", 4, "zstd data", "unpack it first: zstd -d"},
    {1, "\x2A\x4D\x18", 3, "zstd or lz4 data", "unpack it first: zstd -d, or lz4 -d"},
    {0, "\x04\x22\x4D\x18", 4, "lz4 data", "unpack it first: lz4 -d"},
    {0, "\x1F\x9D", 2, "compress data", "unpack it first: uncompress"},
    {0, "PK\x03\x04", 4, "a zip archive", "unpack it first: unzip"},
    {0, "7z\xBC\xAF\x27\x1C", 6, "a 7z archive", "unpack it first: 7z x"},
    {0, "Rar!\x1A", 5, "a rar archive", "unpack it first: unrar x"},
    {257, "ustar", 5, "a tar archive", "unpack it first: tar -xf"},
    {0, "PAR1", 4, "Parquet data", "write its texts to a file first"},
    {0, "ARROW1\0", 7, "Arrow data", "write its texts to a file first"},
    {8, "\x10\0\0\0\0\0\x0A\0", 8, "Arrow data", "write its texts to a file first"},
    {0, "\x89HDF", 4, "HDF5 data", "write its texts to a file first"},
    {0, "\x93NUMPY", 6, "a NumPy array", "write its texts to a file first"},
    {0, "SQLite format 3", 15, "an SQLite database", "write its texts to a file first"},
    {0, "%PDF-", 5, "a PDF document", "write its text to a file first: pdftotext"},
    {0, "\xFF\xFE", 2, "UTF-16 text", "convert it first: iconv -f UTF-16 -t UTF-8"},
    {0, "\xFE\xFF", 2, "UTF-16 text", "convert it first: iconv -f UTF-16 -t UTF-8"},
};

/* Fails for bytes that are no text, but hold one. */
static int refuse_kind(const char *path, const uint8_t *bytes, size_t n, char *error, size_t error_bytes)
{
    for (const struct kind *k = kinds; k < kinds + COUNT_OF(kinds); k++) {
        if (n < k->at + (size_t)k->bytes || memcmp(bytes + k->at, k->magic, (size_t)k->bytes) != 0) continue;
        snprintf(error, error_bytes, "%s: is %s, whose bytes are not its text; %s", path, k->name, k->advice);
        return -1;
    }
    return 0;
}

int data_append(const char *path, struct data_file *out, size_t *capacity, char *error, size_t error_bytes)
{
    size_t before = out->n;
    FILE *file = fopen(path, "rb");
    if (!file) {
        snprintf(error, error_bytes, "%s: %s", path, strerror(errno));
        return -1;
    }
    int status = read_all(file, path, out, capacity, error, error_bytes);
    fclose(file);
    if (!status && out->n - before >= 2 && out->bytes[before] == 0x1F && out->bytes[before + 1] == 0x8B) {
        struct data_file packed = {malloc(out->n - before), out->n - before};
        if (packed.bytes) {
            memcpy(packed.bytes, out->bytes + before, packed.n);
            out->n = before;
            status = unpack(path, &packed, out, capacity, error, error_bytes);
        } else {
            snprintf(error, error_bytes, "%s: out of memory while unpacking", path);
            status = -1;
        }
        data_free(&packed);
    }
    if (!status) status = refuse_kind(path, out->bytes + before, out->n - before, error, error_bytes);
    if (status) out->n = before;
    return status;
}

int data_load(const char *path, struct data_file *out, char *error, size_t error_bytes)
{
    size_t capacity = 0;
    *out = (struct data_file){0};
    int status = data_append(path, out, &capacity, error, error_bytes);
    if (!status && !out->n) {
        snprintf(error, error_bytes, "%s: is empty", path);
        status = -1;
    }
    if (status) data_free(out);
    return status;
}

void data_free(struct data_file *file)
{
    free(file->bytes);
    file->bytes = NULL;
    file->n = 0;
}

void data_split(const struct data_file *file, struct data_part *train, struct data_part *validation)
{
    size_t last = file->n / 10, first = file->n - last;
    *train = (struct data_part){file->bytes, first};
    *validation = (struct data_part){file->bytes + first, last};
}

int data_check(const struct data_part *part, int context, const char *what, char *error, size_t error_bytes)
{
    if (context >= 1 && part->n >= (size_t)context + 2) return 0;
    snprintf(error, error_bytes, "%s has %zu bytes; a context of %d needs at least %zu", what, part->n, context,
             (size_t)(context < 0 ? 0 : context) + 2);
    return -1;
}

size_t data_window(const struct data_part *part, uint64_t seed, uint64_t step, uint64_t micro_step, uint64_t sequence,
                   int context)
{
    /* Starts are 0 .. n - context - 1. A 64-bit hash modulo a file's length is uneven by less than 1 in 10^10. */
    return (size_t)(hash_counters(seed, step, micro_step, sequence) % (part->n - (size_t)context));
}

void data_batch(const struct data_part *part, uint64_t seed, uint64_t step, uint64_t micro_step, int batch, int context,
                uint8_t *out)
{
    size_t bytes = (size_t)context + 1;
    for (int i = 0; i < batch; i++)
        memcpy(out + (size_t)i * bytes, part->bytes + data_window(part, seed, step, micro_step, (uint64_t)i, context),
               bytes);
}

size_t data_eval_count(const struct data_part *part, int context, size_t limit)
{
    size_t count = part->n / ((size_t)context + 1);
    if (count < 1) count = 1;
    return limit && count > limit ? limit : count;
}

void data_eval_window(const struct data_part *part, size_t index, size_t count, int context, uint8_t *out)
{
    size_t last = part->n - (size_t)context - 1;
    size_t start = count > 1 ? (size_t)((double)last * (double)index / (double)(count - 1)) : last / 2;
    if (start > last) start = last;
    memcpy(out, part->bytes + start, (size_t)context + 1);
}
