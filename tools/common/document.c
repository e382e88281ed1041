#include "common/document.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"

/* Puts `value` into `in` and takes it over, even if this fails. Returns it, or NULL after marking the document as
 * failed. */
static json_t *put(struct document *document, json_t *in, const char *key, json_t *value)
{
    int bad = !in || !value;
    if (!bad && key) bad = json_object_set_new(in, key, value) != 0;
    else if (!bad) bad = json_array_append_new(in, value) != 0;
    else json_decref(value);
    if (bad) document->failed = 1;
    return bad ? NULL : value;
}

json_t *document_begin(struct document *document)
{
    document->root = json_object();
    document->failed = !document->root;
    return document->root;
}

json_t *put_object(struct document *document, json_t *in, const char *key)
{
    return put(document, in, key, json_object());
}

json_t *put_array(struct document *document, json_t *in, const char *key)
{
    return put(document, in, key, json_array());
}

void put_bytes(struct document *document, json_t *in, const char *key, const void *bytes, size_t n)
{
    hstep_buffer text = {0};
    text_add_utf8(&text, bytes, n);
    put(document, in, key, text.failed ? NULL : json_stringn(n ? text.data : "", text.bytes));
    text_free(&text);
}

void put_text(struct document *document, json_t *in, const char *key, const char *text)
{
    put_bytes(document, in, key, text, strlen(text));
}

void put_integer(struct document *document, json_t *in, const char *key, int64_t number)
{
    put(document, in, key, json_integer(number));
}

void put_seed(struct document *document, json_t *in, uint64_t seed)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRIu64, seed);
    if (seed <= INT64_MAX) put_integer(document, in, "seed", (int64_t)seed);
    else put_text(document, in, "seed", text);
}

void put_number(struct document *document, json_t *in, const char *key, double number)
{
    put(document, in, key, isfinite(number) ? json_real(number) : json_null());
}

void put_flag(struct document *document, json_t *in, const char *key, int flag)
{
    put(document, in, key, json_boolean(flag));
}

void put_null(struct document *document, json_t *in, const char *key) { put(document, in, key, json_null()); }

void put_document(struct document *document, json_t *in, const char *key, const struct document *part)
{
    if (part->failed) document->failed = 1;
    put(document, in, key, json_incref(part->root));
}

/* ---- JSON of other programs -------------------------------------------------------------------------------------- */

static int put_value(struct document *document, json_t *in, const char *key, hstep_json *json, int depth);

static int put_members(struct document *document, json_t *in, hstep_json *json, int depth)
{
    const char *key;
    for (size_t n = 0; hstep_json_member(json, &n, &key);) {
        if (in && json_object_get(in, key)) return hstep_json_fail(json, "a name twice in one object");
        if (!put_value(document, in, key, json, depth)) return 0;
    }
    return !json->problem;
}

static int put_elements(struct document *document, json_t *in, hstep_json *json, int depth)
{
    if (hstep_json_take(json, ']')) return 1;
    do {
        if (!put_value(document, in, NULL, json, depth)) return 0;
    } while (hstep_json_take(json, ','));
    return hstep_json_expect(json, ']');
}

static int put_value(struct document *document, json_t *in, const char *key, hstep_json *json, int depth)
{
    const char *text;
    double number;
    char first = hstep_json_peek(json);
    if ((first == '{' || first == '[') && depth == HSTEP_JSON_DEPTH) return hstep_json_fail(json, "nested too deeply");
    switch (first) {
    case '{': return put_members(document, put_object(document, in, key), json, depth + 1);
    case '[':
        hstep_json_take(json, first);
        return put_elements(document, put_array(document, in, key), json, depth + 1);
    case '"':
        if (!hstep_json_string(json, &text)) return 0;
        put_text(document, in, key, text);
        return 1;
    case 't':
    case 'f':
        if (!hstep_json_word(json, first == 't' ? "true" : "false")) return 0;
        put_flag(document, in, key, first == 't');
        return 1;
    case 'n':
        if (!hstep_json_word(json, "null")) return 0;
        put_null(document, in, key);
        return 1;
    default: {
        size_t start = json->at;
        if (!hstep_json_real(json, &number)) return 0;
        size_t n = json->at - start;
        /* A number that is written as an integer stays one. */
        int whole = !memchr(json->text + start, '.', n) && !memchr(json->text + start, 'e', n) &&
                    !memchr(json->text + start, 'E', n);
        if (whole && fabs(number) <= 0x1p53) put_integer(document, in, key, (int64_t)number);
        else put_number(document, in, key, number);
        return 1;
    }
    }
}

int put_json(struct document *document, json_t *in, const char *key, char *text, size_t n, char *error,
             size_t error_bytes)
{
    hstep_json json = {text, n, 0, NULL};
    if (put_value(document, in, key, &json, 0) && hstep_json_end(&json)) return 0;
    snprintf(error, error_bytes, "byte %zu: %s", json.at, json.problem);
    return -1;
}

/* ---- The end ----------------------------------------------------------------------------------------------------- */

void document_free(struct document *document)
{
    json_decref(document->root);
    memset(document, 0, sizeof *document);
}

/* Returns the tree as *n bytes of JSON, to be freed, or NULL without memory. It does not use json_dumps(), because its
 * growing buffer can fail unnoticed and leave bytes out. Here jansson writes into memory of known size. */
static char *dump(const json_t *root, size_t *n)
{
    const size_t flags = JSON_INDENT(2) | JSON_REAL_PRECISION(10);
    *n = json_dumpb(root, NULL, 0, flags);
    char *text = *n ? malloc(*n) : NULL;
    if (text && json_dumpb(root, text, *n, flags) == *n) return text;
    free(text);
    return NULL;
}

/* Appends JSON with every character escaped that a terminal would obey or hide; jansson escapes only C0. Such
 * characters occur only in strings, where \u means the same. */
static void add_escaped(hstep_buffer *text, const char *json, size_t n)
{
    for (size_t i = 0, length; i < n; i += length) {
        uint32_t number = 0;
        length = hstep_utf8(json + i, n - i, &number);
        if (!length) length = 1;
        if (number == '\n' || hstep_is_plain(number)) {
            size_t from = i;
            while (i + length < n &&
                   (json[i + length] == '\n' || (json[i + length] >= 0x20 && json[i + length] < 0x7f)))
                length++;
            text_add_utf8(text, json + from, length);
        } else if (number < 0x10000) {
            hstep_append_format(text, "\\u%04X", (unsigned)number);
        } else {
            hstep_append_format(text, "\\u%04X\\u%04X", (unsigned)(0xd800 + ((number - 0x10000) >> 10)),
                                (unsigned)(0xdc00 + (number & 0x3ff)));
        }
    }
}

void document_write(struct document *document, hstep_buffer *text)
{
    size_t n;
    char *json = document->failed || !document->root ? NULL : dump(document->root, &n);
    if (json) add_escaped(text, json, n);
    else text->failed = 1;
    if (json) hstep_append_format(text, "\n");
    free(json);
    document_free(document);
}

int document_print(struct document *document)
{
    hstep_buffer text = {0};
    document_write(document, &text);
    int bad = text.failed;
    if (bad) fprintf(stderr, "halfstep: cannot write the results as JSON: out of memory\n");
    else if ((bad = fputs(text.data, stdout) == EOF))
        fprintf(stderr, "halfstep: cannot write to stdout: %s\n", strerror(errno));
    text_free(&text);
    return bad != 0;
}
