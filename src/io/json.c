#include "io/json.h"

#include "io/numbers.h"
#include "io/text.h"

/* ---- Characters ---- */

int hstep_is_plain(uint32_t number)
{
    return number >= 0x20 && !(number >= 0x7f && number < 0xa0) && number != 0xad && number != 0x61c &&
           !(number >= 0x200b && number <= 0x200f) && !(number >= 0x2028 && number <= 0x202e) &&
           !(number >= 0x2060 && number <= 0x206f) && number != 0xfeff && !(number >= 0xfff9 && number <= 0xfffb) &&
           !(number >= 0xe0000 && number <= 0xe007f);
}

/* ---- Values ---- */

int hstep_json_fail(hstep_json *json, const char *problem)
{
    if (!json->problem) json->problem = problem;
    return 0;
}

static void skip_blanks(hstep_json *json)
{
    while (json->at < json->bytes && memchr(" \t\r\n", json->text[json->at], 4)) json->at++;
}

int hstep_json_take(hstep_json *json, char mark)
{
    if (json->problem) return 0;
    skip_blanks(json);
    if (json->at == json->bytes || json->text[json->at] != mark) return 0;
    json->at++;
    return 1;
}

int hstep_json_expect(hstep_json *json, char mark)
{
    if (hstep_json_take(json, mark)) return 1;
    return hstep_json_fail(json, mark == '{'   ? "expected '{'"
                                 : mark == '}' ? "expected ',' or '}'"
                                 : mark == '[' ? "expected '['"
                                 : mark == ']' ? "expected ',' or ']'"
                                 : mark == ':' ? "expected ':'"
                                               : "expected ','");
}

int hstep_json_number(hstep_json *json, uint64_t *number)
{
    if (json->problem) return 0;
    skip_blanks(json);
    const char *at = json->text + json->at;
    uint64_t value;
    /* The bound is that of signed 64-bit integers, because other readers may have no larger type. */
    if (!hstep_read_uint64(&at, &value) || value > INT64_MAX || (*at && strchr(".eE+-", *at)))
        return hstep_json_fail(json, "expected a plain decimal integer from 0 to 2^63 - 1");
    json->at = (size_t)(at - json->text);
    *number = value;
    return 1;
}

/* Returns the number of the four hexadecimal digits at `at`, or -1 if they are not. */
static long read_hex(const hstep_json *json, size_t at)
{
    long value = 0;
    if (json->bytes - at < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = json->text[at + (size_t)i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        value = value << 4 | digit;
    }
    return value;
}

/* Decodes what follows a backslash at *at to *out, and moves both on. An escape is never shorter than its UTF-8. */
static int read_escape(hstep_json *json, size_t *at, char **out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char c = *at < json->bytes ? json->text[*at] : 0;
    const char *simple = c ? strchr(from, c) : NULL;
    ++*at;
    if (simple) {
        *(*out)++ = to[simple - from];
        return 1;
    }
    long code = c == 'u' ? read_hex(json, *at) : -1;
    if (code <= 0) return hstep_json_fail(json, c == 'u' && !code ? "\\u0000 in a string" : "a malformed escape");
    *at += 4;
    if (code >= 0xd800 && code < 0xe000) {
        long low = code < 0xdc00 && json->bytes - *at >= 6 && json->text[*at] == '\\' && json->text[*at + 1] == 'u'
                       ? read_hex(json, *at + 2)
                       : -1;
        if (low < 0xdc00 || low > 0xdfff) return hstep_json_fail(json, "half a surrogate pair");
        *at += 6;
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        *(*out)++ = (char)(0xf0 | code >> 18);
        *(*out)++ = (char)(0x80 | (code >> 12 & 0x3f));
    } else if (code >= 0x800) {
        *(*out)++ = (char)(0xe0 | code >> 12);
    } else if (code < 0x80) {
        *(*out)++ = (char)code;
        return 1;
    } else {
        *(*out)++ = (char)(0xc0 | code >> 6);
        *(*out)++ = (char)(0x80 | (code & 0x3f));
        return 1;
    }
    *(*out)++ = (char)(0x80 | (code >> 6 & 0x3f));
    *(*out)++ = (char)(0x80 | (code & 0x3f));
    return 1;
}

int hstep_json_string(hstep_json *json, const char **string)
{
    if (json->problem) return 0;
    if (!hstep_json_take(json, '"')) return hstep_json_fail(json, "expected a string");
    char *start = json->text + json->at, *out = start;
    size_t at = json->at;
    for (;;) {
        unsigned char c = at < json->bytes ? (unsigned char)json->text[at] : 0;
        if (c < 0x20)
            return hstep_json_fail(json, at < json->bytes ? "a control character in a string" : "an unfinished string");
        at++;
        if (c == '"') break;
        if (c != '\\') *out++ = (char)c;
        else if (!read_escape(json, &at, &out)) return 0;
    }
    *out = 0;
    if (!hstep_is_utf8(start)) return hstep_json_fail(json, "a string that is not UTF-8");
    json->at = at;
    *string = start;
    return 1;
}

int hstep_json_key(hstep_json *json, const char **key)
{
    return hstep_json_string(json, key) && hstep_json_expect(json, ':');
}

char hstep_json_peek(hstep_json *json)
{
    skip_blanks(json);
    return json->at < json->bytes ? json->text[json->at] : 0;
}

int hstep_json_real(hstep_json *json, double *number)
{
    if (json->problem) return 0;
    skip_blanks(json);
    const char *at = json->text + json->at;
    if (!hstep_read_double(&at, number))
        return hstep_json_fail(json, "expected a number of at most 64 characters that a double can hold");
    json->at = (size_t)(at - json->text);
    return 1;
}

int hstep_json_word(hstep_json *json, const char *word)
{
    size_t n = strlen(word);
    if (json->problem) return 0;
    skip_blanks(json);
    if (json->bytes - json->at < n || memcmp(json->text + json->at, word, n) != 0)
        return hstep_json_fail(json, "expected true, false or null");
    json->at += n;
    return 1;
}

static int skip_plain(hstep_json *json, char first)
{
    const char *text;
    double number;
    if (first == '"') return hstep_json_string(json, &text);
    if (first == 't' || first == 'f' || first == 'n')
        return hstep_json_word(json, first == 't' ? "true" : first == 'f' ? "false" : "null");
    return hstep_json_real(json, &number);
}

int hstep_json_skip(hstep_json *json)
{
    char closing[HSTEP_JSON_DEPTH];
    const char *key;
    int depth = 0;
    do {
        char first = hstep_json_peek(json);
        if (first == '{' || first == '[') {
            if (depth == HSTEP_JSON_DEPTH) return hstep_json_fail(json, "nested too deeply");
            closing[depth] = first == '{' ? '}' : ']';
            json->at++;
            if (!hstep_json_take(json, closing[depth])) {
                if (first == '{' && !hstep_json_key(json, &key)) return 0;
                depth++;
                continue;
            }
        } else if (!skip_plain(json, first)) {
            return 0;
        }
        /* A value is complete. Another one follows, or the end of its list or object. */
        while (depth && !hstep_json_take(json, ',')) {
            if (!hstep_json_expect(json, closing[depth - 1])) return 0;
            depth--;
        }
        if (depth && closing[depth - 1] == '}' && !hstep_json_key(json, &key)) return 0;
    } while (depth);
    return 1;
}

int hstep_json_member(hstep_json *json, size_t *n, const char **name)
{
    int more = *n ? hstep_json_take(json, ',') : hstep_json_expect(json, '{') && !hstep_json_take(json, '}');
    if (!more && *n) hstep_json_expect(json, '}');
    ++*n;
    return more && hstep_json_string(json, name) && hstep_json_expect(json, ':');
}

int hstep_json_end(hstep_json *json)
{
    if (json->problem) return 0;
    skip_blanks(json);
    return json->at == json->bytes ? 1 : hstep_json_fail(json, "more than one value");
}
