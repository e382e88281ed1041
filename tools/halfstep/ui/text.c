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

void text_add_count(struct text *text, double count)
{
    char digits[64];
    int n = snprintf(digits, sizeof digits, "%.0f", count);
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0 && digits[i - 1] != '-') add_char(text, ',');
        add_char(text, digits[i]);
    }
}

void text_free(struct text *text)
{
    free(text->data);
    memset(text, 0, sizeof *text);
}
