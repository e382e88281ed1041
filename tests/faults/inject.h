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

/* Names of calls, and the errors to inject for each, separated by spaces. NULL ends both lists. */
extern const char *const inject_names[INJECT_CALLS + 1];
extern const char *const inject_errors[INJECT_CALLS + 1];

/* Arms one fault: "NAME:ERROR:K[+][:WHO]". The K-th call of NAME (or of a kind, such as FILES) from now on fails with
 * ERROR; with "+", all later ones too. WHO is the caller's module: ours, jansson, onednn, zlib, openmp, python, libc,
 * other (default: any). "POLISH" is the fault of some network file systems, where every call that only polishes fails:
 * modes, links, syncs of folders, and a folder that is there cannot be made. Returns 0 if the text is invalid. NULL
 * disarms. */
int inject_arm(const char *fault);
/* Between inject_hold(1) and inject_hold(0) nothing fails and nothing counts. */
void inject_hold(int on);
/* Returns how many calls the last armed fault has made fail. */
uint64_t inject_struck(void);

/* Counts the calls of one module ("any" for all) from now on. Notes the number of the first call from each chain of
 * callers. NULL stops. Returns 0 for an unknown module. */
int inject_record(const char *who);
uint64_t inject_count(enum inject_call call);
/* Writes the numbers of the calls that came from a new place, ascending, at most `capacity`. Returns how many there
 * are. */
size_t inject_places(enum inject_call call, uint64_t *numbers, size_t capacity);

/* Returns the number of blocks that were allocated through wrapped calls and not freed. 0 in the preloaded library. */
uint64_t inject_live_blocks(void);

#endif
