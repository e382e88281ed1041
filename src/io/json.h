/* A strict JSON reader that builds no tree and allocates nothing: strings and non-negative integers, which is all that
 * safetensors headers and manifests hold, and the other kinds of value for the JSON files of a checkpoint, which the
 * tools read with it too.
 *
 * Not jansson, with which the tools write what they print: after a failed reallocation inside a string, 2.14 accepts
 * the text with bytes of the string missing, and its tree of a hostile header takes twenty times the header's size. */
#ifndef HALFSTEP_IO_JSON_H
#define HALFSTEP_IO_JSON_H

#include <stddef.h>
#include <stdint.h>

/* Strings are decoded in place, so text is overwritten behind the cursor and must outlive them. */
typedef struct hstep_json {
    char *text;
    size_t bytes, at;
    const char *problem; /* the first thing that was wrong, at byte `at`; NULL so far */
} hstep_json;

/* Each returns 1, or 0 and leaves the cursor. A failed hstep_json_take is a question answered; the others are
 * errors. */
int hstep_json_take(hstep_json *json, char mark);   /* the next mark, if it is this one */
int hstep_json_expect(hstep_json *json, char mark); /* the next mark must be this one */
int hstep_json_string(hstep_json *json, const char **string);
int hstep_json_number(hstep_json *json, uint64_t *number);
int hstep_json_fail(hstep_json *json, const char *problem);

/* The character that the next value or mark begins with, 0 at the end: tells a string from a list. */
char hstep_json_peek(hstep_json *json);
/* Any number; a zero byte must follow the text. What is too large for a double is an error. */
int hstep_json_real(hstep_json *json, double *number);
/* true, false or null. */
int hstep_json_word(hstep_json *json, const char *word);
/* Passes over one value of any kind, nested at most HSTEP_JSON_DEPTH deep. */
int hstep_json_skip(hstep_json *json);
/* Nothing is left but blanks. */
int hstep_json_end(hstep_json *json);

/* As deep as the reference reader of safetensors goes. */
#define HSTEP_JSON_DEPTH 128

/* Length of the UTF-8 character at text, of n bytes, and its number; 0 if none begins there. Well-formed is the
 * shortest form, no surrogates, nothing above U+10FFFF. */
size_t hstep_utf8(const char *text, size_t n, uint32_t *number);
int hstep_is_utf8(const char *text);
/* True of a character that a terminal shows. False of those that it obeys (C0, delete, C1), and of those that break
 * lines, turn text around or are invisible, with which a name can look like another one. */
int hstep_is_plain(uint32_t number);

#endif
