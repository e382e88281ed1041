#include "ui/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

void text_add_html(struct text *text, const char *string)
{
    for (; *string; string++) {
        switch (*string) {
        case '&': text_add(text, "&amp;"); break;
        case '<': text_add(text, "&lt;"); break;
        case '>': text_add(text, "&gt;"); break;
        case '"': text_add(text, "&quot;"); break;
        case '\'': text_add(text, "&#39;"); break;
        default: add_char(text, *string);
        }
    }
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

size_t text_utf8_length(const void *bytes, size_t n)
{
    const unsigned char *s = bytes;
    if (s[0] < 0x80) return 1;
    size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : s[0] >= 0xc2 ? 2 : 0;
    if (length == 0 || length > n || s[0] > 0xf4) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return length;
}

static void add_bytes(struct text *text, const char *bytes, size_t n)
{
    if (!reserve(text, n)) return;
    memcpy(text->data + text->n, bytes, n);
    text->n += n;
    text->data[text->n] = 0;
}

/* One character, or a byte that is none. Returns how many bytes that took. */
static size_t add_character(struct text *text, const char *bytes, size_t n)
{
    size_t length = text_utf8_length(bytes, n);
    if (length) add_bytes(text, bytes, length);
    else add_bytes(text, "\xef\xbf\xbd", 3);
    return length ? length : 1;
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
