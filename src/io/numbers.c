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

void hstep_write_double(char text[HSTEP_NUMBER_BYTES], double value, int hexadecimal)
{
    char point[HSTEP_NUMBER_BYTES];
    size_t bytes = decimal_point(point);
    if (hexadecimal) snprintf(text, HSTEP_NUMBER_BYTES, "%a", value);
    else snprintf(text, HSTEP_NUMBER_BYTES, "%.17g", value);
    char *at = strstr(text, point);
    if (!at) return;
    *at = '.';
    memmove(at + 1, at + bytes, strlen(at + bytes) + 1);
}

/* Copies the number for strtod(), with the locale's point in place of '.'. */
int hstep_read_double(const char **text, double *value)
{
    char copy[2 * HSTEP_NUMBER_BYTES], point[HSTEP_NUMBER_BYTES], *end;
    size_t bytes = decimal_point(point), used = 0, length = strspn(*text, "0123456789abcdefinxpABCDEFINXPty+-.");
    if (!length || length > HSTEP_NUMBER_BYTES) return 0;
    for (size_t i = 0; i < length; i++) {
        const char *from = (*text)[i] == '.' ? point : *text + i;
        size_t n = (*text)[i] == '.' ? bytes : 1;
        if (used + n >= sizeof copy) return 0;
        memcpy(copy + used, from, n);
        used += n;
    }
    copy[used] = 0;
    *value = strtod(copy, &end);
    if (*end) return 0;
    *text += length;
    return 1;
}

int hstep_read_uint64(const char **text, uint64_t *value)
{
    const char *at = *text;
    uint64_t number = 0;
    for (; *at >= '0' && *at <= '9'; at++) {
        unsigned digit = (unsigned)(*at - '0');
        if (number > (UINT64_MAX - digit) / 10) return 0;
        number = number * 10 + digit;
    }
    if (at == *text) return 0;
    *text = at;
    *value = number;
    return 1;
}

int hstep_is_double(const char *text, double *value) { return hstep_read_double(&text, value) && !*text; }

int hstep_is_uint64(const char *text, uint64_t *value) { return hstep_read_uint64(&text, value) && !*text; }
