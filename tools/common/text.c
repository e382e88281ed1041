#include "common/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_char(hstep_buffer *text, char c) { hstep_append(text, &c, 1); }

void text_add_html(hstep_buffer *text, const char *string)
{
    const size_t n = strlen(string);
    for (size_t i = 0; i < n;) {
        const char *name = string[i] == '&'    ? "&amp;"
                           : string[i] == '<'  ? "&lt;"
                           : string[i] == '>'  ? "&gt;"
                           : string[i] == '"'  ? "&quot;"
                           : string[i] == '\'' ? "&#39;"
                                               : NULL;
        if (name) hstep_append_text(text, name);
        i += name ? 1 : hstep_append_character(text, string + i, n - i);
    }
}

void text_add_between(hstep_buffer *text, const char *before, const char *string, const char *after)
{
    hstep_append_text(text, before);
    text_add_html(text, string);
    hstep_append_text(text, after);
}

void text_add_csv(hstep_buffer *text, const char *string)
{
    if (!strpbrk(string, ",\"\r\n")) {
        hstep_append_text(text, string);
        return;
    }
    add_char(text, '"');
    for (; *string; string++) {
        if (*string == '"') add_char(text, '"');
        add_char(text, *string);
    }
    add_char(text, '"');
}

void text_add_shell(hstep_buffer *text, const char *string)
{
    const char *plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
    if (*string && !string[strspn(string, plain)]) {
        hstep_append_text(text, string);
        return;
    }
    add_char(text, '\'');
    for (; *string; string++) {
        if (*string == '\'') hstep_append_format(text, "'\\''");
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

void text_add_plain(hstep_buffer *text, const char *string)
{
    char shown[20];
    while (*string) {
        plain_character(&string, shown);
        hstep_append_text(text, shown);
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

void text_add_utf8(hstep_buffer *text, const void *bytes, size_t n)
{
    const char *at = bytes;
    for (size_t i = 0; i < n;) i += hstep_append_character(text, at + i, n - i);
}

void text_add_count(hstep_buffer *text, double count)
{
    char digits[64];
    int n = snprintf(digits, sizeof digits, "%.0f", count);
    for (int i = 0; i < n; i++) {
        if (i && (n - i) % 3 == 0 && digits[i - 1] != '-') add_char(text, ',');
        add_char(text, digits[i]);
    }
}

const char *text_string(const hstep_buffer *text) { return text->data ? text->data : ""; }

void text_join_failure(hstep_buffer *text, const hstep_buffer *part) { text->failed |= part->failed; }

void text_free(hstep_buffer *text)
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
