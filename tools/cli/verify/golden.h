/* The promised bits: a fixed problem that is stepped under many recipes. Each case is condensed to a hash of every
 * weight, state and counter bit. Every machine has to find the hashes in tests/golden/hashes.txt, with any kernels,
 * threads and shards. Uses the public interface only. */
#ifndef HALFSTEP_GOLDEN_H
#define HALFSTEP_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

#include "halfstep.h"

/* Bytes of a recipe with its final 0. */
enum { GOLDEN_RECIPE = 160 };

#define GOLDEN_CAUTIOUS ":cautious"
#define GOLDEN_CAUTIOUS_DECAY ":decay=cautious"
#define GOLDEN_STACKS ":stacks"
#define GOLDEN_SPLITS ":splits"

struct golden_case {
    /* Ends with GOLDEN_CAUTIOUS if all groups are cautious, with ":NAME=VALUE" if they all have this choice, with
     * GOLDEN_STACKS if the problem has stacks of matrices, and with GOLDEN_SPLITS if it has split ones. */
    char recipe[GOLDEN_RECIPE];
    const char *gradients, *generator;
    int large; /* the problem has tensors that span several chunks and segments of random words */
};

/* How the problem is computed, which may not change the hash. All zero: one handle with the default threads. */
struct golden_layout {
    int32_t threads;
    halfstep_run_tasks run; /* or NULL */
    void *host;
    int parts;          /* handles that share every tensor; 0 means 1 */
    int by_columns;     /* tensors are cut by columns instead of rows */
    int states_bound;   /* states lie in memory of the caller */
    const char *device; /* as in halfstep_options, or NULL */
    /* place() gives the states of a handle their place, end() brings them into memory after the last step. Return 0 or
     * an error code. NULL: the states are in memory. */
    int (*place)(halfstep_optimizer *o);
    int (*end)(halfstep_optimizer *o);
    /* before() may change the call of a step, and step tensors in advance. after() brings the new weights to where the
     * call had them. NULL: plain steps. */
    void (*before)(halfstep_optimizer *o, halfstep_call *call);
    void (*after)(halfstep_optimizer *o, const halfstep_call *call);
};

enum { GOLDEN_MAX_PARTS = 4 };

/* Returns all cases and their number, made from the tables of the library. A new row adds cases and takes none away.
 * The caller frees the list. Returns NULL without memory. */
struct golden_case *golden_cases(int *n);

/* Computes the hash of a case. Returns 0, or -1 with one line in error. */
int golden_run(const struct golden_case *c, const struct golden_layout *layout, uint64_t *hash, char *error,
               size_t error_bytes);

/* Finds the hash of a case in a list in the format of hashes.txt. Returns 1 if the list has one, otherwise 0. */
int golden_expected(const char *list, const struct golden_case *c, uint64_t *hash);

#endif
