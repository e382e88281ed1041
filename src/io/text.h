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
__attribute__((format(printf, 3, 4))) static inline int hstep_fail(hstep_error *error, int code, const char *format,
                                                                   ...)
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

static inline int hstep_fail_memory(hstep_error *error)
{
    return hstep_fail(error, HALFSTEP_ERROR_MEMORY, "out of memory");
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
static inline int hstep_grow(void **array, size_t count, size_t *capacity, size_t element)
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

/* A byte buffer that remembers a failed allocation, so that a long series of appends is checked once. */
typedef struct hstep_buffer {
    char *data;
    size_t bytes, capacity;
    int failed;
} hstep_buffer;

static inline void hstep_append(hstep_buffer *buffer, const void *data, size_t bytes)
{
    if (buffer->failed) return;
    if (bytes > buffer->capacity - buffer->bytes) {
        size_t capacity = buffer->capacity ? buffer->capacity : 4096;
        while (capacity - buffer->bytes < bytes && capacity <= SIZE_MAX / 2) capacity *= 2;
        char *larger = capacity - buffer->bytes < bytes ? NULL : realloc(buffer->data, capacity);
        if (!larger) {
            buffer->failed = 1;
            return;
        }
        buffer->data = larger;
        buffer->capacity = capacity;
    }
    if (bytes) memcpy(buffer->data + buffer->bytes, data, bytes);
    buffer->bytes += bytes;
}

static inline void hstep_append_text(hstep_buffer *buffer, const char *text)
{
    hstep_append(buffer, text, strlen(text));
}

static inline void hstep_append_number(hstep_buffer *buffer, uint64_t number)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    hstep_append_text(buffer, digits);
}

/* Appends the text as a JSON string, with quotes. */
static inline void hstep_append_json(hstep_buffer *buffer, const char *text)
{
    hstep_append(buffer, "\"", 1);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        char escape[8];
        if (c == '"' || c == '\\') {
            escape[0] = '\\';
            escape[1] = (char)c;
            hstep_append(buffer, escape, 2);
        } else if (c < 0x20) {
            snprintf(escape, sizeof escape, "\\u%04x", c);
            hstep_append(buffer, escape, 6);
        } else {
            hstep_append(buffer, text, 1);
        }
    }
    hstep_append(buffer, "\"", 1);
}

#endif
