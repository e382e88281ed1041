/* A growing piece of text. Running out of memory is remembered and told once, at the end. */
#ifndef HALFSTEP_UI_TEXT_H
#define HALFSTEP_UI_TEXT_H

#include <stddef.h>
#include <stdio.h>

struct text {
    char *data; /* NUL-terminated once anything was added */
    size_t n, size;
    int failed; /* memory ran out: the rest is missing */
};

__attribute__((format(printf, 2, 3))) void text_add(struct text *text, const char *format, ...);
/* What was added so far; "" for nothing, or where the first piece failed. */
const char *text_string(const struct text *text);
/* Takes over the failure of a text that this one was made from. */
void text_join_failure(struct text *text, const struct text *part);
/* As text inside HTML or SVG, also inside a quoted attribute. */
void text_add_html(struct text *text, const char *string);
/* As one field of a CSV file: quoted where it has to be. */
void text_add_csv(struct text *text, const char *string);
/* As one word of a shell command: quoted where it has to be. */
void text_add_shell(struct text *text, const char *string);
/* As a JSON string, quotes included. What is not UTF-8 becomes U+FFFD. */
void text_add_json(struct text *text, const char *string);
/* Bytes as UTF-8, with U+FFFD in the place of each that is none. */
void text_add_utf8(struct text *text, const void *bytes, size_t n);
/* As a terminal may show it, in one line: bytes of control characters, of characters that turn or hide text, and those
 * that are not UTF-8 become \xNN. */
void text_add_plain(struct text *text, const char *string);
/* The same into a buffer, cut where it is full. */
void plain_text(char *out, size_t out_bytes, const char *string);
/* The same, printed. Returns the number of characters. */
int plain_print(FILE *out, const char *string);
/* Length of the UTF-8 character that begins at bytes, or 0. */
size_t text_utf8_length(const void *bytes, size_t n);
/* A number with commas between thousands. */
void text_add_count(struct text *text, double count);
void text_free(struct text *text);

#endif
