/* The parts of `halfstep bench`: memory and the stream that a step is compared with (bench_stream.c), one timed case
 * (bench_case.c), options, lists and output (cmd_bench.c). */
#ifndef HALFSTEP_BENCH_H
#define HALFSTEP_BENCH_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

double bench_now(void);

/* ---- Memory and the stream ---- */

struct block {
    char *mapped, *memory;
    size_t bytes;
};

/* The index-th of several blocks, at a distance that keeps their cache sets apart; touched by the caller. 0 or -1. */
int block_open(struct block *b, size_t bytes, int index);
void block_close(struct block *b);

/* `arrays` equal arrays that are read and written, one that is only read, taken in turns of so many parameters or (turn
 * 0) word by word. */
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
    pthread_barrier_t start;
    atomic_uint_least64_t sink;
};

/* 0, or -1 without memory or threads; to be closed in any case. The best variant is the ceiling: a slow one would
 * flatter. */
int stream_open(struct stream *s, int64_t params, double written, double read_only, int threads);
void stream_close(struct stream *s);
/* Seconds of one pass, or a negative number. The calling thread takes the first share. */
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
    double cache_ns, over_one; /* 0: not measured */
    double flops;              /* of a step's matrix products, per parameter; 0: none */
};

/* Which gradients a recipe is timed with. */
const char *bench_gradients(const struct bench *b, const char *recipe);
/* Rules that multiply matrices are timed on one square matrix. */
int bench_is_matrix(const char *recipe);
/* The largest number of parameters, up to b->params, that leaves memory for every case and its stream side by side. */
int64_t bench_affordable(const struct bench *b);
/* Times a recipe with and without the scan; in_cache: also one thread's instructions. 0, or 1 after a line of error. */
int bench_case(const struct bench *b, const char *recipe, int64_t params, int64_t tensors, int threads, int in_cache,
               struct result *r);

#endif
