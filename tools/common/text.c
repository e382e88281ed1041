#include "common/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"

static int reserve(struct text *text, size_t more)
{
    if (text->failed) return 0;
    if (text->n + more + 1 <= text->size) return 1;
    size_t size = text->size ? text->size : 4096;
    while (size < text->n + more + 1) size *= 2;
    char *data = realloc(text->data, size);
    if (!data) {
        text->failed = 1;
        return 0;
    }
    text->data = data;
    text->size = size;
    return 1;
}

void text_add(struct text *text, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int n = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (n < 0) text->failed = 1;
    if (n >= 0 && reserve(text, (size_t)n)) {
        vsnprintf(text->data + text->n, (size_t)n + 1, format, again);
        text->n += (size_t)n;
    }
    va_end(again);
}

static void add_char(struct text *text, char c)
{
    if (!reserve(text, 1)) return;
    text->data[text->n++] = c;
    text->data[text->n] = 0;
}

size_t text_utf8_length(const void *bytes, size_t n)
{
    uint32_t number;
    return hstep_utf8(bytes, n, &number);
}

static void add_bytes(struct text *text, const char *bytes, size_t n)
{
    if (!reserve(text, n)) return;
    memcpy(text->data + text->n, bytes, n);
    text->n += n;
    text->data[text->n] = 0;
}

/* Appends one UTF-8 character, or U+FFFD for a byte that begins none. Returns how many of the bytes that took. */
static size_t add_character(struct text *text, const char *bytes, size_t n)
{
    size_t length = text_utf8_length(bytes, n);
    if (length) add_bytes(text, bytes, length);
    else add_bytes(text, "\xef\xbf\xbd", 3);
    return length ? length : 1;
}

void text_add_html(struct text *text, const char *string)
{
    const size_t n = strlen(string);
    for (size_t i = 0; i < n;) {
        const char *name = string[i] == '&'    ? "&amp;"
                           : string[i] == '<'  ? "&lt;"
                           : string[i] == '>'  ? "&gt;"
                           : string[i] == '"'  ? "&quot;"
                           : string[i] == '\'' ? "&#39;"
                                               : NULL;
        if (name) text_add(text, "%s", name);
        i += name ? 1 : add_character(text, string + i, n - i);
    }
}

void text_add_between(struct text *text, const char *before, const char *string, const char *after)
{
    text_add(text, "%s", before);
    text_add_html(text, string);
    text_add(text, "%s", after);
}

void text_add_csv(struct text *text, const char *string)
{
    if (!strpbrk(string, ",\"\r\n")) {
        text_add(text, "%s", string);
        return;
    }
    add_char(text, '"');
    for (; *string; string++) {
        if (*string == '"') add_char(text, '"');
        add_char(text, *string);
    }
    add_char(text, '"');
}

void text_add_shell(struct text *text, const char *string)
{
    const char *plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
    if (*string && !string[strspn(string, plain)]) {
        text_add(text, "%s", string);
        return;
    }
    add_char(text, '\'');
    for (; *string; string++) {
        if (*string == '\'') text_add(text, "'\\''");
        else add_char(text, *string);
    }
    add_char(text, '\'');
}

/* Writes the character at *string into `shown` as a terminal may show it. Moves *string past it. Returns how many
 * characters that made. */
static int plain_character(const char **string, char shown[20])
{
    uint32_t number = 0;
    size_t length = hstep_utf8(*string, strnlen(*string, 4), &number);
    int plain = length && hstep_is_plain(number);
    if (!length) length = 1;
    for (size_t i = 0; i < length; i++) {
        if (plain) shown[i] = (*string)[i];
        else snprintf(shown + 4 * i, 5, "\\x%02x", (unsigned char)(*string)[i]);
    }
    shown[plain ? length : 4 * length] = 0;
    *string += length;
    return plain ? 1 : (int)(4 * length);
}

void text_add_plain(struct text *text, const char *string)
{
    char shown[20];
    while (*string) {
        plain_character(&string, shown);
        text_add(text, "%s", shown);
    }
}

void plain_text(char *out, size_t out_bytes, const char *string)
{
    char shown[20];
    size_t used = 0;
    while (*string) {
        plain_character(&string, shown);
        if (used + strlen(shown) >= out_bytes) break;
        memcpy(out + used, shown, strlen(shown));
        used += strlen(shown);
    }
    if (out_bytes) out[used] = 0;
}

int plain_print(FILE *out, const char *string)
{
    char shown[20];
    int characters = 0;
    while (*string) {
        characters += plain_character(&string, shown);
        fputs(shown, out);
    }
    return characters;
}

void text_add_utf8(struct text *text, const void *bytes, size_t n)
{
    const char *at = bytes;
    reserve(text, n);
    for (size_t i = 0; i < n;) i += add_character(text, at + i, n - i);
}

void text_add_json(struct text *text, const char *string)
{
    size_t n = strlen(string);
    add_char(text, '"');
    for (size_t i = 0; i < n;) {
        if (string[i] == '"' || string[i] == '\\') text_add(text, "\\%c", string[i++]);
        else if ((unsigned char)string[i] < 0x20) text_add(text, "\\u%04x", (unsigned char)string[i++]);
        else i += add_character(text, string + i, n - i);
    }
    add_char(text, '"');
}

void text_add_count(struct text *text, double count)
{
    char digits[64];
    int n = snprintf(digits, sizeof digits, "%.0f", count);
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0 && digits[i - 1] != '-') add_char(text, ',');
        add_char(text, digits[i]);
    }
}

const char *text_string(const struct text *text) { return text->data ? text->data : ""; }

void text_join_failure(struct text *text, const struct text *part) { text->failed |= part->failed; }

void text_free(struct text *text)
{
    free(text->data);
    memset(text, 0, sizeof *text);
}

void append(char *text, size_t text_bytes, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, text_bytes - used, format, arguments);
    va_end(arguments);
}

void exact_number(double number, char *text, size_t text_bytes)
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, text_bytes, "%.*g", digits, number);
        if (strtod(text, NULL) == number) return;
    }
}

int no_memory(char *error, size_t error_bytes)
{
    snprintf(error, error_bytes, "out of memory");
    return 1;
}
