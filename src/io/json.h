/* A strict JSON reader for file headers: it builds no tree, allocates nothing, and knows strings and non-negative integers
 * only, which is all that safetensors headers and manifests hold.
 *
 * Not jansson, which the tools use: after a failed reallocation inside a string, 2.14 accepts the text with bytes of the
 * string missing, and its tree of a hostile header takes twenty times the header's size. */
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

/* Each returns 1, or 0 and leaves the cursor. A failed hstep_json_take is a question answered; the others are errors. */
int hstep_json_take(hstep_json *json, char mark);   /* the next mark, if it is this one */
int hstep_json_expect(hstep_json *json, char mark); /* the next mark must be this one */
int hstep_json_string(hstep_json *json, const char **string);
int hstep_json_number(hstep_json *json, uint64_t *number);
int hstep_json_fail(hstep_json *json, const char *problem);

#endif
