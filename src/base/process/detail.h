/* The text of a thread's last failure. Several threads may fail at once, so each has its own. */
#ifndef HSTEP_DETAIL_H
#define HSTEP_DETAIL_H

#include <stdint.h>

#define HSTEP_DETAIL_BYTES 512

struct hstep_detail {
    uint64_t serial; /* of the handle that the failed call was about; 0: it was about none */
    char text[HSTEP_DETAIL_BYTES];
};

/* Returns that of the calling thread. */
struct hstep_detail *hstep_own_detail(void);

/* Sets the text of a failure that is about no handle, and returns the code. */
int hstep_fail_alone(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Writes what is wrong with a structure of the caller that the library cannot take. */
void hstep_describe_struct(char text[HSTEP_DETAIL_BYTES], const char *function, const void *structure);

#endif
