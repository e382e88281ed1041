/* Reads our environment variables, for the library and the program. getenv() is not safe beside a thread of the host
 * that sets variables. So the library reads them when an optimizer is created or a default is asked for, and never in
 * a step. */
#ifndef HSTEP_ENVIRONMENT_H
#define HSTEP_ENVIRONMENT_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A variable. Its values are words, "a, b, c", or with NULL whole numbers from 0 to `most`. */
struct hstep_variable {
    const char *name, *words;
    int most;
};

enum { HSTEP_NOT_SET = -1, HSTEP_MALFORMED = -2 };

/* Returns the number that `text` begins with, or most + 1 if it is larger than that. Blanks may surround it, and then
 * comes the end of the text or `stop`. Returns HSTEP_MALFORMED for any other text. */
static inline int hstep_parse_number(const char *text, int most, char stop)
{
    int value = 0;
    text += strspn(text, " \t");
    const char *first = text;
    for (; *text >= '0' && *text <= '9'; text++)
        if (value <= most) value = value * 10 + (*text - '0');
    const int digits = text != first;
    text += strspn(text, " \t");
    if (!digits || (*text && *text != stop)) return HSTEP_MALFORMED;
    return value > most ? most + 1 : value;
}

/* Returns the value of a variable: the number, or the index of the word. Returns HSTEP_NOT_SET if it is not set or
 * empty, and HSTEP_MALFORMED with a sentence in text for any other value. */
static inline int hstep_read_variable(const struct hstep_variable *variable, char *text, size_t size)
{
    const char *value = getenv(variable->name), *word = variable->words;
    char numbers[64];
    if (!value || !*value) return HSTEP_NOT_SET;
    for (int i = 0; word; i++) {
        const size_t length = strcspn(word, ",");
        if (strlen(value) == length && !strncmp(value, word, length)) return i;
        word = word[length] ? word + length + 2 : NULL;
    }
    const int number = variable->words ? HSTEP_MALFORMED : hstep_parse_number(value, variable->most, 0);
    if (number >= 0 && number <= variable->most) return number;
    snprintf(numbers, sizeof numbers, "whole numbers from 0 to %d", variable->most);
    snprintf(text, size, "%s is '%.40s'; known: %s", variable->name, value,
             variable->words ? variable->words : numbers);
    return HSTEP_MALFORMED;
}

/* The library's variables beside HALFSTEP_ISA, which the choice of kernels reads. */
enum hstep_setting { HSTEP_SET_THREADS, HSTEP_SET_PIN, HSTEP_SET_DEVICE_CHECK, HSTEP_SETTINGS };

/* Reads these variables. Returns 0, or HSTEP_MALFORMED with a sentence in text. */
int hstep_read_environment(char *text, size_t size);
/* Returns a variable as hstep_read_environment() last found it. */
int hstep_setting(enum hstep_setting setting);

#endif
