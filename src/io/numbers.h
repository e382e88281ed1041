/* Numbers in the metadata of files: strict, exact, and the same in every locale. */
#ifndef HALFSTEP_IO_NUMBERS_H
#define HALFSTEP_IO_NUMBERS_H

#include <stdint.h>

enum { HSTEP_NUMBER_BYTES = 64 };

/* Writes a double in 17 digits or in hexadecimal, so that every bit can be read back. */
void hstep_write_double(char text[HSTEP_NUMBER_BYTES], double value, int hexadecimal);
/* Each reads a number at *text, moves *text behind it and returns 1. Returns 0 if there is none, or none that fits. A
 * double may be decimal, hexadecimal, infinite or NaN. */
int hstep_read_double(const char **text, double *value);
int hstep_read_uint64(const char **text, uint64_t *value);
/* Each does the same and returns 1 only if all of the text is the number. */
int hstep_is_double(const char *text, double *value);
int hstep_is_uint64(const char *text, uint64_t *value);

#endif
