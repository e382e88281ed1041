/* The parts of `halfstep bench`. bench_stream.c holds memory and the stream that a step is compared with. bench_case.c
 * times one case. cmd_bench.c holds options, lists and output. */
#ifndef HALFSTEP_BENCH_H
#define HALFSTEP_BENCH_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

double bench_now(void);

/* ---- Memory and the stream ---- */

struct block {
    char *mapped, *memory;
    size_t bytes;
};

/* Allocates the index-th of several blocks, at a distance that keeps their cache sets apart. The caller touches the
 * memory first. Returns 0 or -1. */
int block_open(struct block *b, size_t bytes, int index);
void block_close(struct block *b);

/* A layout of the stream: `arrays` equal arrays that are read and written, and one array that is only read. The loop
 * takes `turn` parameters of each array in turn, or single words if turn is 0. */
struct variant {
    int arrays, turn;
};

struct stream {
    double written, read_only; /* bytes per parameter */
    int64_t params;
    int threads;
    struct block changed, gradient;
    size_t changed_bytes, gradient_bytes; /* of all parameters */
    struct variant variant;
    int arrived; /* threads that are ready for the current pass */
    atomic_uint_least64_t sink;
};

/* Allocates the arrays and chooses the fastest layout, because a slow one would flatter the step. Returns 0, or -1
 * without memory or threads. stream_close() is needed in either case. */
int stream_open(struct stream *s, int64_t params, double written, double read_only, int threads);
void stream_close(struct stream *s);
/* Runs one pass. Returns its seconds, or a negative number on failure. The calling thread takes the first share. */
double stream_run(struct stream *s);
double stream_bytes(const struct stream *s);

/* ---- Cases ---- */

struct bench {
    const char **recipe; /* full forms */
    int recipes;
    double params;
    int64_t tensors, threads, rounds;
    const char *gradients, *generator, *device;
};

struct result {
    const char *recipe, *gradients;
    int64_t params, tensors;
    double bytes, scan_bytes; /* per parameter */
    double ns, scan_ns;       /* per parameter */
    double fraction, scan_fraction, stream_gbs;
    double rate;               /* GB/s of a step */
    double cache_ns, over_one; /* 0: not measured */
    double flops;              /* of the matrix products of a step, per parameter; 0: none */
    double flops_rate;         /* GFLOP/s of a step; 0: none */
};

/* Returns the gradient format that a recipe is timed with. */
const char *bench_gradients(const struct bench *b, const char *recipe);
/* Returns 1 if the rule multiplies matrices. Such a rule is timed on one square matrix. */
int bench_is_matrix(const char *recipe);
/* Returns the largest number of parameters, up to b->params, for which memory can hold each case beside its stream. */
int64_t bench_affordable(const struct bench *b);
/* Times a recipe with and without the scan. in_cache: also times one thread on data that stays in the cache. Returns 0,
 * or 1 after one line of error. */
int bench_case(const struct bench *b, const char *recipe, int64_t params, int64_t tensors, int threads, int in_cache,
               struct result *r);

#endif
