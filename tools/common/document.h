/* JSON output: a tree that is built from the root down. A failure on the way marks the document as failed, and a failed
 * document is not written. So nothing goes missing unnoticed, and no call needs a check of its own. Only document.c
 * includes jansson, because jansson lets a caller ignore what its functions return. */
#ifndef HALFSTEP_UI_DOCUMENT_H
#define HALFSTEP_UI_DOCUMENT_H

#include <stddef.h>
#include <stdint.h>

#include "common/text.h"

typedef struct json_t json_t;

struct document {
    json_t *root; /* NULL before document_begin() */
    int failed;
};

/* Each returns the object or array to put into, which belongs to the document, or NULL after a failure. All functions
 * accept NULL in its place. Keys are UTF-8 and unique in an object. The key is NULL in an array. */
json_t *document_begin(struct document *document); /* the root is an object */
json_t *put_object(struct document *document, json_t *in, const char *key);
json_t *put_array(struct document *document, json_t *in, const char *key);

/* Put a string. Bytes that are not UTF-8 become U+FFFD. */
void put_text(struct document *document, json_t *in, const char *key, const char *text);
void put_bytes(struct document *document, json_t *in, const char *key, const void *bytes, size_t n);
void put_integer(struct document *document, json_t *in, const char *key, int64_t number);
/* Puts "seed". One above 2^63 - 1 does not fit a JSON integer, so it becomes a string. */
void put_seed(struct document *document, json_t *in, uint64_t seed);
/* Puts a number with 10 digits. NaN and infinities become null, because JSON cannot write them. */
void put_number(struct document *document, json_t *in, const char *key, double number);
void put_flag(struct document *document, json_t *in, const char *key, int flag);
void put_null(struct document *document, json_t *in, const char *key);
/* Puts the tree of another document, which must not change any more. A failure of that document is taken over. */
void put_document(struct document *document, json_t *in, const char *key, const struct document *part);
/* Puts the value of a JSON text from another program. `text` must end with a zero byte after its n bytes, and is
 * overwritten. Returns 0, or -1 with the place and the problem in error. Running out of memory only marks the document
 * as failed. */
int put_json(struct document *document, json_t *in, const char *key, char *text, size_t n, char *error,
             size_t error_bytes);

void document_free(struct document *document);
/* Appends the JSON to text and frees the document. Marks text as failed if the document has failed. */
void document_write(struct document *document, hstep_buffer *text);
/* Prints the JSON to stdout and frees the document. Returns 0, or 1 after one line on stderr. */
int document_print(struct document *document);

#endif
