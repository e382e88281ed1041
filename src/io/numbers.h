/* Numbers in text: strict, exact, and the same in every locale. The JSON reader and the metadata of files have the same
 * ones. docs/checkpoints.md has their grammar, and tests/tools/spellings.def what is one and what is none. */
#ifndef HALFSTEP_IO_NUMBERS_H
#define HALFSTEP_IO_NUMBERS_H

#include <stdint.h>

enum { HSTEP_NUMBER_BYTES = 64 };

/* Writes a finite double in 17 digits, so that every bit can be read back. */
void hstep_write_double(char text[HSTEP_NUMBER_BYTES], double value);
/* Each reads a number at *text, moves *text behind it and returns 1. Returns 0 if there is none, or none that fits. A
 * double has at most HSTEP_NUMBER_BYTES characters and is finite. */
int hstep_read_double(const char **text, double *value);
int hstep_read_uint64(const char **text, uint64_t *value);
/* Each does the same and returns 1 only if all of the text is the number. */
int hstep_is_double(const char *text, double *value);
int hstep_is_uint64(const char *text, uint64_t *value);
/* Reads the 16 hexadecimal digits of a checksum, in lower case, in the same way. */
int hstep_read_sum(const char **text, uint64_t *value);
/* Returns what such a digit stands for, or -1. */
int hstep_hex_digit(char c);

#endif
