/* A growing piece of text. Running out of memory is remembered and told once, at the end. */
#ifndef HALFSTEP_UI_TEXT_H
#define HALFSTEP_UI_TEXT_H

#include <stddef.h>

struct text {
    char *data;      /* NUL-terminated once anything was added */
    size_t n, size;
    int failed;      /* memory ran out: the rest is missing */
};

__attribute__((format(printf, 2, 3))) void text_add(struct text *text, const char *format, ...);
/* As text inside HTML or SVG, also inside a quoted attribute. */
void text_add_html(struct text *text, const char *string);
/* As one field of a CSV file: quoted where it has to be. */
void text_add_csv(struct text *text, const char *string);
/* As one word of a shell command: quoted where it has to be. */
void text_add_shell(struct text *text, const char *string);
/* A number with commas between thousands. */
void text_add_count(struct text *text, double count);
void text_free(struct text *text);

#endif
