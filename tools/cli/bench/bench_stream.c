/* The speed that memory allows. Plain loops read and write as many bytes as a recipe has to move, in the best of
 * several layouts. */
#include "cli/bench/bench.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "common/text.h"

double bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* Slots at equal offsets modulo large powers of two compete for the same cache sets. */
#define STAGGER ((size_t)4096 + 64)
#define HUGE_PAGE ((size_t)2 << 20)

int block_open(struct block *b, size_t bytes, int index)
{
    b->bytes = bytes + HUGE_PAGE + (size_t)(index + 1) * STAGGER;
    b->mapped = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->mapped == MAP_FAILED) {
        b->mapped = NULL;
        return -1;
    }
#ifdef MADV_HUGEPAGE
    madvise(b->mapped, b->bytes, MADV_HUGEPAGE);
#endif
    size_t to_page = (HUGE_PAGE - (uintptr_t)b->mapped % HUGE_PAGE) % HUGE_PAGE;
    b->memory = b->mapped + to_page + (size_t)index * STAGGER;
    return 0;
}

void block_close(struct block *b)
{
    if (b->mapped) munmap(b->mapped, b->bytes);
    b->mapped = NULL;
}

/* ---- The stream -------------------------------------------------------------------------------------------------- */

enum { MAX_ARRAYS = 4, MAX_THREADS = 1024 };

static const struct variant variants[] = {{3, 0}, {1, 256}, {1, 2048}, {2, 512}, {3, 256}, {3, 2048}, {4, 1024}};
enum { VARIANTS = COUNT_OF(variants) };

static uint64_t read_words(const uint64_t *restrict g, size_t n)
{
    uint64_t a = 0, b = 0, c = 0, d = 0;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) a ^= g[i], b ^= g[i + 1], c ^= g[i + 2], d ^= g[i + 3];
    for (; i < n; i++) a ^= g[i];
    return a ^ b ^ c ^ d;
}

static void change_words(uint64_t *restrict a, size_t n, uint64_t x)
{
    for (size_t i = 0; i < n; i++) a[i] += x;
}

static void change_woven(uint64_t *restrict a, uint64_t *restrict b, uint64_t *restrict c, const uint64_t *restrict g,
                         size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t x = g[i];
        a[i] += x;
        b[i] ^= x;
        c[i] += x;
    }
}

/* Returns the start of an array of the variant. The arrays lie one after another in `changed`, staggered. */
static uint64_t *array_start(const struct stream *s, int index)
{
    size_t each = s->changed_bytes / (size_t)s->variant.arrays / 64 * 64;
    return (uint64_t *)(s->changed.memory + (size_t)index * (each + STAGGER));
}

static void stream_share(struct stream *s, int share)
{
    int arrays = s->variant.arrays;
    size_t words = s->changed_bytes / (size_t)arrays / 64 * 8, gradient_words = s->gradient_bytes / 64 * 8;
    size_t first = words * (size_t)share / (size_t)s->threads, end = words * ((size_t)share + 1) / (size_t)s->threads;
    size_t g_first = gradient_words * (size_t)share / (size_t)s->threads;
    size_t g_end = gradient_words * ((size_t)share + 1) / (size_t)s->threads;
    uint64_t *at[MAX_ARRAYS];
    const uint64_t *g = (const uint64_t *)s->gradient.memory;
    for (int k = 0; k < arrays; k++) at[k] = array_start(s, k);
    if (!s->variant.turn) {
        change_woven(at[0] + first, at[1] + first, at[2] + first, g + first, end - first);
        return;
    }
    size_t turn = (size_t)((double)s->variant.turn * s->written / arrays / 8) + 1;
    size_t g_turn = (size_t)((double)s->variant.turn * s->read_only / 8) + 1;
    uint64_t x = 1;
    while (first < end || g_first < g_end) {
        size_t n = end - first < turn ? end - first : turn, m = g_end - g_first < g_turn ? g_end - g_first : g_turn;
        x ^= read_words(g + g_first, m);
        for (int k = 0; k < arrays; k++) change_words(at[k] + first, n, x);
        first += n;
        g_first += m;
    }
    atomic_fetch_xor(&s->sink, x);
}

#ifdef __linux__
typedef cpu_set_t processors;

static int get_processors(processors *all) { return sched_getaffinity(0, sizeof *all, all); }

/* Lets the calling thread run on these processors only. This may be forbidden. The stream is then only a little less
 * steady. */
static void pin(const processors *set) { sched_setaffinity(0, sizeof *set, set); }

/* Returns one of the processors, a different one for each share as far as they suffice. */
static processors one_processor(const processors *all, int share)
{
    cpu_set_t set;
    int n = CPU_COUNT(all), index = n ? share % n : 0;
    CPU_ZERO(&set);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, all) && index-- == 0) CPU_SET(cpu, &set);
    return set;
}
#else
/* Nothing pins a thread on macOS. */
typedef char processors;

static int get_processors(processors *all) { return *all = 0; }
static void pin(const processors *set) { (void)set; }
static processors one_processor(const processors *all, int share) { return (void)share, *all; }
#endif

struct helper {
    struct stream *s;
    int share;
    processors processor;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t complete = PTHREAD_COND_INITIALIZER;

/* Waits until all threads of the pass have arrived, of whom this call announces some. macOS has no barriers. */
static void arrive(struct stream *s, int threads)
{
    pthread_mutex_lock(&lock);
    s->arrived += threads;
    if (s->arrived == s->threads) pthread_cond_broadcast(&complete);
    while (s->arrived < s->threads) pthread_cond_wait(&complete, &lock);
    pthread_mutex_unlock(&lock);
}

static void *help(void *argument)
{
    struct helper *h = argument;
    pin(&h->processor);
    arrive(h->s, 1);
    stream_share(h->s, h->share);
    return NULL;
}

double stream_run(struct stream *s)
{
    static struct helper helpers[MAX_THREADS];
    static pthread_t threads[MAX_THREADS];
    processors all;
    if (get_processors(&all)) return -1;
    processors mine = one_processor(&all, 0);
    s->arrived = 0;
    int made = 1;
    for (; made < s->threads; made++) {
        helpers[made] = (struct helper){s, made, one_processor(&all, made)};
        if (pthread_create(&threads[made], NULL, help, &helpers[made])) break;
    }
    pin(&mine);
    /* Stands in for threads that could not be started, so that the others end. */
    arrive(s, 1 + s->threads - made);
    double start = bench_now();
    stream_share(s, 0);
    for (int i = 1; i < made; i++) pthread_join(threads[i], NULL);
    double seconds = bench_now() - start;
    pin(&all);
    return made == s->threads ? seconds : -1;
}

double stream_bytes(const struct stream *s) { return (double)s->params * (2 * s->written + s->read_only); }

int stream_open(struct stream *s, int64_t params, double written, double read_only, int threads)
{
    memset(s, 0, sizeof *s);
    s->params = params;
    s->written = written;
    s->read_only = read_only;
    s->threads = threads;
    s->changed_bytes = (size_t)((double)params * written);
    s->gradient_bytes = (size_t)((double)params * read_only);
    if (block_open(&s->changed, s->changed_bytes + MAX_ARRAYS * (STAGGER + 64), 1) ||
        block_open(&s->gradient, s->gradient_bytes, 2))
        return -1;
    memset(s->gradient.memory, 1, s->gradient_bytes);
    memset(s->changed.memory, 1, s->changed_bytes + MAX_ARRAYS * (STAGGER + 64));
    struct variant best = {0, 0};
    double least = INFINITY;
    for (int pass = 0; pass < 3; pass++)
        for (int v = 0; v < VARIANTS; v++) {
            if (!variants[v].turn && fabs(written - 3 * read_only) > 1e-9) continue;
            s->variant = variants[v];
            double seconds = stream_run(s);
            if (seconds < 0) return -1;
            if (seconds < least && pass) least = seconds, best = variants[v];
        }
    s->variant = best;
    return 0;
}

void stream_close(struct stream *s)
{
    block_close(&s->changed);
    block_close(&s->gradient);
}
