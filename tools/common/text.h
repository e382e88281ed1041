/* Appends to growing strings (io/text.h) in the ways of the program. Running out of memory is recorded, and is reported
 * once, at the end. */
#ifndef HALFSTEP_UI_TEXT_H
#define HALFSTEP_UI_TEXT_H

#include <stddef.h>
#include <stdio.h>

#include "io/text.h"

/* The number of elements of an array. */
#define COUNT_OF(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* Returns what was added so far. Returns "" if that is nothing, or if the first piece failed. */
const char *text_string(const hstep_buffer *text);
/* Marks text as failed if `part`, from which it was made, has failed. */
void text_join_failure(hstep_buffer *text, const hstep_buffer *part);
/* Appends a string as HTML or SVG text, which may stand in a quoted attribute. Each byte that is not UTF-8 becomes
 * U+FFFD. */
void text_add_html(hstep_buffer *text, const char *string);
/* Does the same between two pieces of HTML. */
void text_add_between(hstep_buffer *text, const char *before, const char *string, const char *after);
/* Appends a string as one field of a CSV file, quoted if necessary. */
void text_add_csv(hstep_buffer *text, const char *string);
/* Appends a string as one word of a shell command, quoted if necessary. */
void text_add_shell(hstep_buffer *text, const char *string);
/* Appends bytes as UTF-8. Each byte that is not UTF-8 becomes U+FFFD. */
void text_add_utf8(hstep_buffer *text, const void *bytes, size_t n);
/* Appends a string so that a terminal shows it in one line. Control characters, characters that turn or hide text, and
 * bytes that are not UTF-8 appear as \xNN. */
void text_add_plain(hstep_buffer *text, const char *string);
/* Does the same into a buffer, and cuts the text off if the buffer is full. */
void plain_text(char *out, size_t out_bytes, const char *string);
/* Prints a string in the same way. Returns the number of characters printed. */
int plain_print(FILE *out, const char *string);
/* Appends a number, rounded to an integer, with commas between thousands. */
void text_add_count(hstep_buffer *text, double count);
void text_free(hstep_buffer *text);

/* Appends to a string in a buffer of text_bytes, and cuts off what does not fit. */
__attribute__((format(printf, 3, 4))) void append(char *text, size_t text_bytes, const char *format, ...);
/* Writes a number in the fewest digits that read back exactly. */
void exact_number(double number, char *text, size_t text_bytes);
/* Writes "out of memory" as the error text. Returns 1, an exit status. */
int no_memory(char *error, size_t error_bytes);

#endif
