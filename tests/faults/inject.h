/* Makes calls into the C library fail on purpose, and counts them. See inject.c. */
#ifndef HSTEP_TESTS_FAULTS_INJECT_H
#define HSTEP_TESTS_FAULTS_INJECT_H

#include <stddef.h>
#include <stdint.h>

enum inject_call {
#define CALL(kind, name, ...) INJECT_##name,
#define CALL_BY_HAND(kind, name, errors) INJECT_##name,
#include "calls.def"
#undef CALL
#undef CALL_BY_HAND
    INJECT_CALLS
};

/* Names, and the errors that each is made to fail with, separated by spaces; NULL ends both. */
extern const char *const inject_names[INJECT_CALLS + 1];
extern const char *const inject_errors[INJECT_CALLS + 1];

/* "NAME:ERROR:K[+][:WHO]": the K-th call of NAME (or of a kind, such as FILES) from now on fails with ERROR; with "+"
 * all after it too. WHO is the caller's module: ours, jansson, onednn, zlib, openmp, python, libc, other (default:
 * any). Returns 0 if the text is not understood. NULL ends it. */
int inject_arm(const char *fault);
/* Between inject_hold(1) and inject_hold(0) nothing fails and nothing counts. */
void inject_hold(int on);
/* How many calls the last fault that was armed has made fail. */
uint64_t inject_struck(void);

/* Counts the calls of one module, "any" for all, as inject_arm() would, and notes for each at which numbers a chain of
 * callers was first seen. Starts anew; NULL stops. Returns 0 for an unknown module. */
int inject_record(const char *who);
uint64_t inject_count(enum inject_call call);
/* Numbers of the calls that came from a new place, ascending; returns how many there are, writes at most `capacity`. */
size_t inject_places(enum inject_call call, uint64_t *numbers, size_t capacity);

/* Blocks of memory that were allocated through the wrapped calls and not freed (only where calls are wrapped by the
 * linker). */
uint64_t inject_live_blocks(void);

#endif
