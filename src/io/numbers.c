#include "io/numbers.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Finds the decimal point of the program's locale, which may have several bytes, and returns its length. It is what the
 * C library writes between the digits of 0.5. */
static size_t decimal_point(char point[HSTEP_NUMBER_BYTES])
{
    int length = snprintf(point, HSTEP_NUMBER_BYTES, "%.1f", 0.5);
    if (length < 3 || length >= HSTEP_NUMBER_BYTES) {
        memcpy(point, ".", 2);
        return 1;
    }
    memmove(point, point + 1, (size_t)length - 2);
    point[length - 2] = 0;
    return (size_t)length - 2;
}

void hstep_write_double(char text[HSTEP_NUMBER_BYTES], double value)
{
    char point[HSTEP_NUMBER_BYTES];
    size_t bytes = decimal_point(point);
    snprintf(text, HSTEP_NUMBER_BYTES, "%.17g", value);
    char *at = strstr(text, point);
    if (!at) return;
    *at = '.';
    memmove(at + 1, at + bytes, strlen(at + bytes) + 1);
}

static size_t digits(const char *text) { return strspn(text, "0123456789"); }

/* Returns the length of the number that the text begins with, or 0 if there is none. */
static size_t number_length(const char *text)
{
    const char *at = text + (*text == '-');
    size_t n = digits(at);
    if (!n || (n > 1 && *at == '0')) return 0;
    at += n;
    if (*at == '.') {
        if (!(n = digits(at + 1))) return 0;
        at += 1 + n;
    }
    if (*at == 'e' || *at == 'E') {
        at += 1 + (at[1] == '-' || at[1] == '+');
        if (!(n = digits(at))) return 0;
        at += n;
    }
    return (size_t)(at - text);
}

/* Copies the number for strtod(), with the locale's point in place of '.'. */
int hstep_read_double(const char **text, double *value)
{
    char copy[2 * HSTEP_NUMBER_BYTES], point[HSTEP_NUMBER_BYTES], *end;
    const size_t length = number_length(*text), bytes = decimal_point(point);
    size_t used = 0;
    if (!length || length > HSTEP_NUMBER_BYTES) return 0;
    for (size_t i = 0; i < length; i++) {
        const char *from = (*text)[i] == '.' ? point : *text + i;
        size_t n = (*text)[i] == '.' ? bytes : 1;
        memcpy(copy + used, from, n);
        used += n;
    }
    copy[used] = 0;
    const double found = strtod(copy, &end);
    if (*end || found - found != 0) return 0;
    *text += length;
    *value = found;
    return 1;
}

int hstep_read_uint64(const char **text, uint64_t *value)
{
    const size_t length = digits(*text);
    uint64_t number = 0;
    if (!length || (length > 1 && **text == '0')) return 0;
    for (size_t i = 0; i < length; i++) {
        unsigned digit = (unsigned)((*text)[i] - '0');
        if (number > (UINT64_MAX - digit) / 10) return 0;
        number = number * 10 + digit;
    }
    *text += length;
    *value = number;
    return 1;
}

int hstep_hex_digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

int hstep_read_sum(const char **text, uint64_t *value)
{
    uint64_t number = 0;
    for (int i = 0; i < 16; i++) {
        const int digit = hstep_hex_digit((*text)[i]);
        if (digit < 0) return 0;
        number = number << 4 | (uint64_t)digit;
    }
    *text += 16;
    *value = number;
    return 1;
}

int hstep_is_double(const char *text, double *value) { return hstep_read_double(&text, value) && !*text; }

int hstep_is_uint64(const char *text, uint64_t *value) { return hstep_read_uint64(&text, value) && !*text; }
