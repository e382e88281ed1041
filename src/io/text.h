/* One-line error texts, a growing byte buffer, and JSON strings. */
#ifndef HALFSTEP_IO_TEXT_H
#define HALFSTEP_IO_TEXT_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HALFSTEP_ADVANCED
#include "halfstep_io.h"

#include "io/json.h"

/* Converts for %llu and %llx, because uint64_t is another type on some systems. */
static inline unsigned long long ull(uint64_t value) { return value; }

/* The place for the text of a failure. `not_found` is 1 if a file does not exist. `incomplete` is 1 if the missing file
 * is one that a manifest lists. */
typedef struct hstep_error {
    char *text;
    size_t size;
    int not_found, incomplete;
} hstep_error;

static inline hstep_error hstep_make_error(char *text, size_t size)
{
    hstep_error error = {text, text ? size : 0, 0, 0};
    if (error.size) text[0] = 0;
    return error;
}

/* Writes an error text and returns code, so that a failure is one statement. Names come from files, so the bytes of
 * characters that are not plain become '?'. */
__attribute__((format(printf, 3, 4))) static inline int io_fail(hstep_error *error, int code, const char *format, ...)
{
    if (error->size) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->text, error->size, format, arguments);
        va_end(arguments);
        size_t left = strlen(error->text), length;
        uint32_t number = 0;
        for (char *c = error->text; left; c += length, left -= length) {
            length = hstep_utf8(c, left, &number);
            int plain = length && hstep_is_plain(number);
            if (!length) length = 1;
            if (!plain) memset(c, '?', length);
        }
    }
    return code;
}

static inline int io_fail_memory(hstep_error *error)
{
    return io_fail(error, HALFSTEP_ERROR_MEMORY, "out of memory; free some and try again");
}

__attribute__((format(printf, 1, 2))) static inline char *hstep_format(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    char *text = length < 0 ? NULL : malloc((size_t)length + 1);
    if (!text) return NULL;
    va_start(arguments, format);
    vsnprintf(text, (size_t)length + 1, format, arguments);
    va_end(arguments);
    return text;
}

static inline char *hstep_copy(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = malloc(bytes);
    if (copy) memcpy(copy, text, bytes);
    return copy;
}

/* Makes room in *array for one more than count elements and returns 1. Returns 0 when memory is short; *array is then
 * unchanged. */
static inline int io_grow(void **array, size_t count, size_t *capacity, size_t element)
{
    if (count < *capacity) return 1;
    size_t wanted = *capacity ? 2 * *capacity : 16;
    if (wanted > SIZE_MAX / element) return 0;
    void *larger = realloc(*array, wanted * element);
    if (!larger) return 0;
    *array = larger;
    *capacity = wanted;
    return 1;
}

/* Texts under keys, which are sorted. */
typedef struct hstep_pair {
    char *key, *value;
} hstep_pair;

typedef struct hstep_pairs {
    hstep_pair *list;
    size_t count, capacity;
} hstep_pairs;

/* Returns the index of the first pair whose key is not before `key`. Sets *found to 1 if that is its key. */
static inline size_t hstep_find_pair(const hstep_pairs *pairs, const char *key, int *found)
{
    size_t low = 0, high = pairs->count;
    *found = 0;
    while (low < high && !*found) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(key, pairs->list[middle].key);
        *found = !order;
        if (order > 0) low = middle + 1;
        else high = middle;
    }
    return high;
}

/* Sets the text under a key to a copy of value, and returns 1. Returns 0 when memory is short. */
static inline int hstep_set_pair(hstep_pairs *pairs, const char *key, const char *value)
{
    int found;
    size_t at = hstep_find_pair(pairs, key, &found);
    hstep_pair pair = {found ? pairs->list[at].key : hstep_copy(key), hstep_copy(value)};
    if (!pair.key || !pair.value ||
        (!found && !io_grow((void **)&pairs->list, pairs->count, &pairs->capacity, sizeof pair))) {
        if (!found) free(pair.key);
        free(pair.value);
        return 0;
    }
    if (found) free(pairs->list[at].value);
    else memmove(pairs->list + at + 1, pairs->list + at, (pairs->count++ - at) * sizeof pair);
    pairs->list[at] = pair;
    return 1;
}

static inline void hstep_free_pairs(hstep_pairs *pairs)
{
    for (size_t i = 0; i < pairs->count; i++) {
        free(pairs->list[i].key);
        free(pairs->list[i].value);
    }
    free(pairs->list);
}

/* A byte buffer that remembers a failed allocation, so that a long series of appends is checked once. */
typedef struct hstep_buffer {
    char *data;
    size_t bytes, capacity;
    int failed;
} hstep_buffer;

/* Makes room for more bytes and returns 1. Returns 0 when memory is short, now or earlier. */
static inline int hstep_reserve(hstep_buffer *buffer, size_t bytes)
{
    if (!buffer->failed && bytes > buffer->capacity - buffer->bytes) {
        size_t capacity = buffer->capacity ? buffer->capacity : 4096;
        while (capacity - buffer->bytes < bytes && capacity <= SIZE_MAX / 2) capacity *= 2;
        char *larger = capacity - buffer->bytes < bytes ? NULL : realloc(buffer->data, capacity);
        buffer->failed = !larger;
        if (!larger) return 0;
        buffer->data = larger;
        buffer->capacity = capacity;
    }
    return !buffer->failed;
}

/* Appends bytes. A zero byte follows them, which does not count. */
static inline void hstep_append(hstep_buffer *buffer, const void *data, size_t bytes)
{
    if (!hstep_reserve(buffer, bytes + 1)) return;
    if (bytes) memcpy(buffer->data + buffer->bytes, data, bytes);
    buffer->bytes += bytes;
    buffer->data[buffer->bytes] = 0;
}

static inline void hstep_append_text(hstep_buffer *buffer, const char *text)
{
    hstep_append(buffer, text, strlen(text));
}

__attribute__((format(printf, 2, 3))) static inline void hstep_append_format(hstep_buffer *buffer, const char *format,
                                                                             ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) buffer->failed = 1;
    if (!hstep_reserve(buffer, (size_t)length + 1)) return;
    va_start(arguments, format);
    vsnprintf(buffer->data + buffer->bytes, (size_t)length + 1, format, arguments);
    va_end(arguments);
    buffer->bytes += (size_t)length;
}

/* Appends the UTF-8 character at text, or U+FFFD for a byte that begins none. Returns how many bytes were taken. */
static inline size_t hstep_append_character(hstep_buffer *buffer, const char *text, size_t bytes)
{
    uint32_t number;
    const size_t length = hstep_utf8(text, bytes, &number);
    hstep_append(buffer, length ? text : "\xef\xbf\xbd", length ? length : 3);
    return length ? length : 1;
}

/* Appends the text as a JSON string, with quotes. */
static inline void hstep_append_json(hstep_buffer *buffer, const char *text)
{
    hstep_append(buffer, "\"", 1);
    for (size_t left = strlen(text), length = 1; left; text += length, left -= length) {
        const unsigned char c = (unsigned char)*text;
        length = 1;
        if (c == '"' || c == '\\') hstep_append_format(buffer, "\\%c", c);
        else if (c < 0x20) hstep_append_format(buffer, "\\u%04x", c);
        else length = hstep_append_character(buffer, text, left);
    }
    hstep_append(buffer, "\"", 1);
}

#endif
