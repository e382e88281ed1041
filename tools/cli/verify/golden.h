/* The promised bits: a fixed problem stepped under many recipes, each condensed to a hash of every weight, state and
 * counter bit. The same program on any machine, with any kernels, threads and shards, has to find the hashes in
 * tests/golden/hashes.txt. Uses the public interface only. */
#ifndef HALFSTEP_GOLDEN_H
#define HALFSTEP_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"

/* Bytes of a recipe and the 0 after it. */
enum { GOLDEN_RECIPE = 160 };

#define GOLDEN_CAUTIOUS ":cautious"

struct golden_case {
    char recipe[GOLDEN_RECIPE]; /* at its end GOLDEN_CAUTIOUS where all groups are */
    const char *gradients, *generator;
    int large; /* with tensors that span several chunks and segments of random words */
};

/* How the problem is computed; none of it may change the hash. All zero: one handle, the default threads. */
struct golden_layout {
    int32_t threads;
    halfstep_run_tasks run; /* or NULL */
    void *host;
    int parts;          /* handles that share every tensor; 0 is 1 */
    int by_columns;     /* cut columns instead of rows */
    int states_bound;   /* states in memory of the caller */
    const char *device; /* as in halfstep_options, or NULL */
};

enum { GOLDEN_MAX_PARTS = 4 };

/* All cases, from the tables of the library: a new row adds some and takes none away. NULL when memory is out. The
 * caller frees them. */
struct golden_case *golden_cases(int *n);

/* 0, or -1 and one line. */
int golden_run(const struct golden_case *c, const struct golden_layout *layout, uint64_t *hash, char *error,
               size_t error_bytes);

/* The hash that a list in the format of hashes.txt gives for a case: 1 if it has one. */
int golden_expected(const char *list, const struct golden_case *c, uint64_t *hash);

#endif
