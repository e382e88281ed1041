/* What is printed or written as JSON: a tree that is built from the top down. Every failure on the way is kept in the
 * document, and refused when it is written: nothing goes missing unnoticed, and no call needs a check of its own. Only
 * document.c sees jansson, whose own functions can be called without a look at what they return. */
#ifndef HALFSTEP_UI_DOCUMENT_H
#define HALFSTEP_UI_DOCUMENT_H

#include <stddef.h>
#include <stdint.h>

#include "common/text.h"

typedef struct json_t json_t;

struct document {
    json_t *root; /* NULL: nothing has begun */
    int failed;
};

/* Each returns the object or array to put into, which belongs to the document; NULL after a failure, which all
 * functions take. Keys are UTF-8 and unlike in one object; in an array the key is NULL. */
json_t *document_begin(struct document *document); /* zeroed before; the root is an object */
json_t *put_object(struct document *document, json_t *in, const char *key);
json_t *put_array(struct document *document, json_t *in, const char *key);

/* Bytes that are not UTF-8 become U+FFFD. */
void put_text(struct document *document, json_t *in, const char *key, const char *text);
void put_bytes(struct document *document, json_t *in, const char *key, const void *bytes, size_t n);
void put_integer(struct document *document, json_t *in, const char *key, int64_t number);
/* Printed with 10 digits; null where JSON has no word for it. */
void put_number(struct document *document, json_t *in, const char *key, double number);
void put_flag(struct document *document, json_t *in, const char *key, int flag);
void put_null(struct document *document, json_t *in, const char *key);
/* Another document, which must not change any more. */
void put_document(struct document *document, json_t *in, const char *key, const struct document *part);
/* A JSON text of whoever. `text` must end with a zero byte behind its n bytes, and is overwritten. 0, or -1 and what is
 * wrong with it; running out of memory is kept in the document. */
int put_json(struct document *document, json_t *in, const char *key, char *text, size_t n, char *error,
             size_t error_bytes);

void document_free(struct document *document);
/* Appends it to text, and frees it. */
void document_write(struct document *document, struct text *text);
/* Prints it to stdout and frees it. 0, or 1 after a line on stderr. */
int document_print(struct document *document);

#endif
