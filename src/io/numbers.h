/* Numbers in the metadata of files: strict, exact, and the same whatever the program's locale. */
#ifndef HALFSTEP_IO_NUMBERS_H
#define HALFSTEP_IO_NUMBERS_H

#include <stdint.h>

enum { HSTEP_NUMBER_BYTES = 64 };

/* 17 digits, or hexadecimal: every bit comes back. */
void hstep_write_double(char text[HSTEP_NUMBER_BYTES], double value, int hexadecimal);
/* Each reads a number at *text and moves it behind the number; 0 if there is none, or none that fits. A double may be
 * decimal, hexadecimal, infinite or NaN. */
int hstep_read_double(const char **text, double *value);
int hstep_read_uint64(const char **text, uint64_t *value);
/* All of the text is the number. */
int hstep_is_double(const char *text, double *value);
int hstep_is_uint64(const char *text, uint64_t *value);

#endif
