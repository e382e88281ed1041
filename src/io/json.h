/* A strict JSON reader that builds no tree and allocates nothing. Safetensors headers and manifests hold only strings
 * and non-negative integers. The other kinds of value are for the JSON files of a checkpoint, which the tools read with
 * it too.
 *
 * The tools write JSON with jansson, which is not used for reading. After a failed reallocation inside a string,
 * jansson 2.14 accepts the text with bytes of the string missing. Its tree of a hostile header takes twenty times the
 * header's size. */
#ifndef HALFSTEP_IO_JSON_H
#define HALFSTEP_IO_JSON_H

#include <stddef.h>
#include <stdint.h>

#include "base/structs.h"

/* A reader. A zero byte must follow the text. The reader decodes strings in place, so it overwrites text behind the
 * cursor, and text must outlive the strings. */
typedef struct hstep_json {
    char *text;
    size_t bytes, at;
    const char *problem; /* the first error, at byte `at`; NULL so far */
} hstep_json;

/* Each of these returns 1, or 0 and leaves the cursor. A 0 from hstep_json_take() is an answer; from the others it is
 * an error. */
int hstep_json_take(hstep_json *json, char mark);   /* takes the next mark if it is this one */
int hstep_json_expect(hstep_json *json, char mark); /* the next mark must be this one */
int hstep_json_string(hstep_json *json, const char **string);
int hstep_json_key(hstep_json *json, const char **key); /* a string and the colon behind it */
int hstep_json_number(hstep_json *json, uint64_t *number);
int hstep_json_fail(hstep_json *json, const char *problem);

/* Returns the character that the next value or mark begins with, or 0 at the end. It tells a string from a list. */
char hstep_json_peek(hstep_json *json);
/* Reads any number that hstep_read_double() reads. */
int hstep_json_real(hstep_json *json, double *number);
/* Takes the given word: true, false or null. */
int hstep_json_word(hstep_json *json, const char *word);
/* Goes to the next member of an object, or to the first one if *n is 0, and counts it in *n. Returns 1 with its name.
 * Returns 0 behind the end of the object, and after an error, also one in the value of the last member. */
int hstep_json_member(hstep_json *json, size_t *n, const char **name);
/* Skips one value of any kind, nested at most HSTEP_JSON_DEPTH deep. */
int hstep_json_skip(hstep_json *json);
/* Returns 1 if nothing but blanks is left. */
int hstep_json_end(hstep_json *json);

/* The nesting that the reference reader of safetensors allows. */
#define HSTEP_JSON_DEPTH 128

/* Returns 1 for a character that a terminal shows. Returns 0 for those that it obeys (C0, delete, C1). Returns 0 also
 * for those that break lines, turn text around or are invisible, because they can make one name look like another. */
int hstep_is_plain(uint32_t number);

#endif
