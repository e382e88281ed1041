/* Times halfstep_step against what memory allows: a plain read-modify-write loop over as many bytes, laid out as well as
 * possible, timed before and after each step. A ratio of neighbours survives a machine whose bandwidth changes by the
 * second; a time alone does not. Over 500 lines because the stream, the cases and their three outputs share one state. */
#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "halfstep.h"

#include "args.h"
#include "commands.h"
#include "recipes.h"
#include "train.h"

struct bench {
    struct string_list recipes;
    double params;
    int64_t tensors, threads, rounds;
    const char *gradients, *generator, *csv;
    int json;
};

static const char *generator_name(int32_t index) { return halfstep_choice_value("generator", index); }

#define AT(member) offsetof(struct bench, member)

static const struct option rows[] = {
    {"recipes", OPTION_RECIPES, AT(recipes), "R,R,...",
     "adamw/f32/f32,adamw/bf16/bf16,adamw/bf16-sr/bf16-sr,adamw/bf16-kahan/bf16-sr,adamw/bf16-ecc8/bf16-sr,adamw/bf16-sr/int8,"
     "adamw/bf16-ecc8/int8,lion/bf16-sr/bf16-sr,sgd/bf16-sr/bf16-sr",
     0, 0, 0, NULL, "what to time"},
    {"params", OPTION_NUMBER, AT(params), "N", "67108864", 4096, 1e12, 0, NULL, "parameters; fewer are taken if memory is short"},
    {"tensors", OPTION_INTEGER, AT(tensors), "N", "1000", 1, 1000000, 0, NULL,
     "besides one large tensor, as many parameters in N small ones; 1: only the large one"},
    {"threads", OPTION_INTEGER, AT(threads), "N", "0", 0, 1024, 0, NULL, "0: as many as a step would use"},
    {"rounds", OPTION_INTEGER, AT(rounds), "N", "11", 1, 1000, 0, NULL, "pairs of stream and step; the median counts"},
    {"gradients", OPTION_CHOICE, AT(gradients), "FORMAT", NULL, 0, 0, 0, gradient_format_name,
     "default: bf16 with 16-bit weights, otherwise f32"},
    {"generator", OPTION_CHOICE, AT(generator), "NAME", NULL, 0, 0, 0, generator_name, "source of random bits (default: the library's)"},
    {"csv", OPTION_STRING, AT(csv), "FILE", NULL, 0, 0, 0, NULL, "also write the cases to FILE"},
    OPTION_JSON(struct bench),
};

static const struct command command = {
    "bench", "[options]",
    "Times one optimizer step of each recipe, interleaved with a read-modify-write stream of the same bytes.",
    "  ns/param, GB/s   of the bytes that the recipe has to move: weights and states read and written, gradients read, once\n"
    "  of stream        those bytes over the step's time, by the stream's bytes over its time; gradients known to be finite\n"
    "  scan             the same with the gradients scanned first, their second reading counted\n"
    "  in cache         ns/param of one thread on 16384 parameters: what the arithmetic costs when memory does not\n",
    0, 0};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : 0.5 * (x[n / 2 - 1] + x[n / 2]);
}

/* ---- Memory ------------------------------------------------------------------------------------------------------------ */

/* Slots at equal offsets modulo large powers of two fight for the same cache sets. */
#define STAGGER ((size_t)4096 + 64)
#define HUGE_PAGE ((size_t)2 << 20)

struct block {
    char *mapped, *memory;
    size_t bytes;
};

/* The index-th of several blocks; touched by the caller. */
static int block_open(struct block *b, size_t bytes, int index)
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

static void block_close(struct block *b)
{
    if (b->mapped) munmap(b->mapped, b->bytes);
    b->mapped = NULL;
}

static double available_bytes(void)
{
    double kilobytes = 0;
    char line[256];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lf kB", &kilobytes) == 1) break;
    if (f) fclose(f);
    if (kilobytes > 0) return kilobytes * 1024;
    return (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / 2;
}

/* ---- The stream -------------------------------------------------------------------------------------------------------- */

enum { MAX_ARRAYS = 4, MAX_THREADS = 1024 };

/* `arrays` equal arrays that are read and written, one that is only read, taken in turns of a few kilobytes or, where all
 * are equally long, word by word. */
struct variant {
    int arrays, turn; /* turn: parameters; 0: word by word */
};
static const struct variant variants[] = {{3, 0}, {1, 256}, {1, 2048}, {2, 512}, {3, 256}, {3, 2048}, {4, 1024}};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

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

static void change_woven(uint64_t *restrict a, uint64_t *restrict b, uint64_t *restrict c, const uint64_t *restrict g, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t x = g[i];
        a[i] += x;
        b[i] ^= x;
        c[i] += x;
    }
}

/* Arrays of a variant lie one after another in `changed`, staggered. */
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

struct helper {
    struct stream *s;
    int share;
    cpu_set_t cpus;
};

static void *help(void *argument)
{
    struct helper *h = argument;
    /* Pinning may be forbidden; the stream is then only a little less steady. */
    pthread_setaffinity_np(pthread_self(), sizeof h->cpus, &h->cpus);
    pthread_barrier_wait(&h->s->start);
    stream_share(h->s, h->share);
    return NULL;
}

/* The share-th processor of those that this process may use. */
static cpu_set_t one_cpu(const cpu_set_t *all, int share)
{
    cpu_set_t set;
    int n = CPU_COUNT(all), index = n ? share % n : 0;
    CPU_ZERO(&set);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, all) && index-- == 0) CPU_SET(cpu, &set);
    return set;
}

/* Seconds of one pass, or a negative number. The calling thread takes the first share. */
static double stream_run(struct stream *s)
{
    static struct helper helpers[MAX_THREADS];
    static pthread_t threads[MAX_THREADS];
    cpu_set_t all;
    if (sched_getaffinity(0, sizeof all, &all)) return -1;
    if (pthread_barrier_init(&s->start, NULL, (unsigned)s->threads)) return -1;
    cpu_set_t mine = one_cpu(&all, 0);
    int made = 1;
    for (; made < s->threads; made++) {
        helpers[made] = (struct helper){s, made, one_cpu(&all, made)};
        if (pthread_create(&threads[made], NULL, help, &helpers[made])) break;
    }
    double seconds = -1;
    if (made == s->threads) {
        sched_setaffinity(0, sizeof mine, &mine);
        pthread_barrier_wait(&s->start);
        double start = now();
        stream_share(s, 0);
        for (int i = 1; i < made; i++) pthread_join(threads[i], NULL);
        seconds = now() - start;
        sched_setaffinity(0, sizeof all, &all);
    }
    pthread_barrier_destroy(&s->start);
    return seconds;
}

static double stream_bytes(const struct stream *s) { return (double)s->params * (2 * s->written + s->read_only); }

/* The best variant is the ceiling: a slow one would flatter. */
static int stream_open(struct stream *s, int64_t params, double written, double read_only, int threads)
{
    memset(s, 0, sizeof *s);
    s->params = params;
    s->written = written;
    s->read_only = read_only;
    s->threads = threads;
    s->changed_bytes = (size_t)((double)params * written);
    s->gradient_bytes = (size_t)((double)params * read_only);
    if (block_open(&s->changed, s->changed_bytes + MAX_ARRAYS * (STAGGER + 64), 1) || block_open(&s->gradient, s->gradient_bytes, 2))
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

static void stream_close(struct stream *s)
{
    block_close(&s->changed);
    block_close(&s->gradient);
}

/* ---- One case ---------------------------------------------------------------------------------------------------------- */

struct result {
    const char *recipe, *gradients;
    int64_t params, tensors;
    double bytes, scan_bytes;      /* per parameter */
    double ns, scan_ns;            /* per parameter */
    double fraction, scan_fraction, stream_gbs;
    double cache_ns, over_one;     /* 0: not measured */
};

struct subject {
    halfstep_optimizer *o;
    struct block weights, gradients;
    void **weight;
    const void **gradient;
    int64_t params;
    int64_t tensors;
};

static void subject_close(struct subject *s)
{
    halfstep_destroy(s->o);
    block_close(&s->weights);
    block_close(&s->gradients);
    free(s->weight);
    free(s->gradient);
    memset(s, 0, sizeof *s);
}

/* Numbers around 2^-8, all bits random: no subnormals, no infinities, no two alike. */
static void fill(char *out, uint64_t bytes, int element)
{
    enum { PIECE = 1 << 16 };
    static unsigned char piece[PIECE];
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < PIECE; i += (size_t)element) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uint32_t bits = (uint32_t)(state >> 32 & 0x80000000u) | (117 + (uint32_t)(state & 7)) << 23 | (uint32_t)(state >> 20 & 0x7fffff);
        uint16_t code = (uint16_t)(bits >> 16);
        if (element == 4)
            memcpy(piece + i, &bits, 4);
        else
            memcpy(piece + i, &code, 2);
    }
    for (uint64_t i = 0; i < bytes; i += PIECE) memcpy(out + i, piece, bytes - i < PIECE ? bytes - i : PIECE);
}

static int has_hyper(const char *recipe, const char *name)
{
    struct recipe_parts parts;
    halfstep_hyper_info info = {.struct_size = sizeof info};
    recipe_split(recipe, &parts);
    for (int32_t i = 0; halfstep_get_hyper_info(halfstep_rule_find(parts.rule), i, &info) == HALFSTEP_OK; i++)
        if (!strcmp(info.name, name)) return 1;
    return 0;
}

static int subject_fail(const struct subject *s, const char *recipe, int error)
{
    const char *detail = s->o ? halfstep_error_detail(s->o) : "";
    return failure("bench", "%s: %s%s%s", recipe, halfstep_strerror(error), *detail ? ": " : "", detail);
}

static int subject_fill(struct subject *s, const char *recipe)
{
    uint64_t weights, gradients;
    halfstep_slot_info w = {.struct_size = sizeof w}, g = {.struct_size = sizeof g};
    halfstep_memory(s->o, &weights, &gradients, NULL, NULL, NULL);
    if (block_open(&s->weights, weights + 64 * (uint64_t)s->tensors, 3) ||
        block_open(&s->gradients, gradients + 64 * (uint64_t)s->tensors, 4))
        return failure("bench", "%s: no memory for %lld parameters", recipe, (long long)s->params);
    uint64_t w_at = 0, g_at = 0;
    for (int32_t t = 0; t < s->tensors; t++) {
        halfstep_get_slot_info(s->o, t, HALFSTEP_SLOT_WEIGHT, &w);
        halfstep_get_slot_info(s->o, t, HALFSTEP_SLOT_GRADIENT, &g);
        int64_t n = s->params / s->tensors;
        s->weight[t] = s->weights.memory + w_at;
        s->gradient[t] = s->gradients.memory + g_at;
        fill(s->weight[t], w.code_bytes, (int)((int64_t)w.code_bytes / n));
        fill(s->gradients.memory + g_at, g.code_bytes, (int)((int64_t)g.code_bytes / n));
        w_at += (w.code_bytes + 63) / 64 * 64;
        g_at += (g.code_bytes + 63) / 64 * 64;
    }
    return 0;
}

/* As many parameters as come close to `params` in `tensors` equal matrices whose rows are whole blocks. */
static int subject_open(const struct bench *b, struct subject *s, const char *recipe, const char *gradients, int64_t params,
                        int64_t tensors, int threads)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads, .seed = 1};
    memset(s, 0, sizeof *s);
    int64_t each = params / tensors, length = each >= 65536 ? 4096 : each >= 4096 ? 512 : 64, count = each / length;
    if (count < 1) count = 1;
    s->tensors = tensors;
    s->params = count * length * tensors;
    s->weight = calloc((size_t)tensors, sizeof *s->weight);
    s->gradient = calloc((size_t)tensors, sizeof *s->gradient);
    if (!s->weight || !s->gradient) return failure("bench", "out of memory");
    int32_t group, index;
    int error = halfstep_create(&options, &s->o);
    if (!error && b->generator) error = halfstep_set_choice(s->o, HALFSTEP_ALL_GROUPS, "generator", b->generator);
    if (!error) error = halfstep_add_group(s->o, recipe, &group);
    /* Without momentum there would be no state to time. */
    if (!error && has_hyper(recipe, "momentum")) error = halfstep_set_hyper(s->o, group, "momentum", 0.9);
    if (!error) error = halfstep_set_hyper(s->o, group, "lr", 1e-5);
    if (!error) error = halfstep_set_hyper(s->o, group, "weight_decay", 0.01);
    if (!error) error = halfstep_set_choice(s->o, group, "decay", "decoupled");
    for (int64_t t = 0; t < tensors && !error; t++) {
        char name[32];
        snprintf(name, sizeof name, "tensor.%lld", (long long)t);
        halfstep_tensor d = {.struct_size = sizeof d, .group = group, .name = name, .ndim = 2, .rows = count, .row_length = length,
                             .gradient = gradients};
        error = halfstep_add_tensor(s->o, &d, &index);
    }
    if (!error) error = halfstep_allocate_states(s->o);
    return error ? subject_fail(s, recipe, error) : subject_fill(s, recipe);
}

/* Seconds of one step, or a negative number after a line of error. */
static double subject_step(struct subject *s, const char *recipe)
{
    double start = now();
    int error = halfstep_step(s->o, s->weight, s->gradient);
    double seconds = now() - start;
    if (!error) return seconds;
    subject_fail(s, recipe, error);
    return -1;
}

/* Stream, step, stream, step, ..., stream: each step between its two neighbours. */
static int measure(const struct bench *b, struct subject *subject, struct stream *stream, const char *recipe, double bytes,
                   double *ns, double *fraction, double *stream_gbs)
{
    double *times = calloc(3 * (size_t)b->rounds, sizeof *times);
    if (!times) return failure("bench", "out of memory");
    double *fractions = times + b->rounds, *rates = fractions + b->rounds, before = 0;
    int status = subject_step(subject, recipe) < 0;
    for (int64_t i = -1; i < b->rounds && !status; i++) {
        double step = i < 0 ? 0 : subject_step(subject, recipe), after = stream_run(stream);
        if (step < 0 || after < 0) {
            status = step < 0 ? 1 : failure("bench", "cannot start %d threads", stream->threads);
        } else if (i >= 0) {
            times[i] = step;
            rates[i] = stream_bytes(stream) / (0.5 * (before + after));
            fractions[i] = bytes * (double)subject->params / step / rates[i];
        }
        before = after;
    }
    if (!status) {
        *ns = median(times, (int)b->rounds) * 1e9 / (double)subject->params;
        *fraction = median(fractions, (int)b->rounds);
        *stream_gbs = median(rates, (int)b->rounds) * 1e-9;
    }
    free(times);
    return status;
}

static int measure_in_cache(const struct bench *b, const char *recipe, const char *gradients, double *ns)
{
    enum { PARAMS = 16384, BATCHES = 40, STEPS = 50 };
    struct subject s;
    double least = INFINITY;
    int status = subject_open(b, &s, recipe, gradients, PARAMS, 1, 1);
    if (!status && halfstep_set_choice(s.o, HALFSTEP_ALL_GROUPS, "scan", "known-finite")) status = 1;
    for (int batch = 0; batch < BATCHES && !status; batch++) {
        double start = now();
        for (int i = 0; i < STEPS && !status; i++) status = subject_step(&s, recipe) < 0;
        least = fmin(least, (now() - start) / STEPS);
    }
    *ns = least * 1e9 / PARAMS;
    subject_close(&s);
    return status;
}

static const char *default_gradients(const struct bench *b, const char *recipe)
{
    struct recipe_parts parts;
    if (b->gradients) return b->gradients;
    recipe_split(recipe, &parts);
    return strcmp(parts.weight, "f32") ? "bf16" : "f32";
}

static int run_case(const struct bench *b, const char *recipe, int64_t params, int64_t tensors, int threads, struct result *r)
{
    struct subject subject;
    struct stream stream = {0};
    uint64_t weights, extras, gradients, states;
    memset(r, 0, sizeof *r);
    r->recipe = recipe;
    r->gradients = default_gradients(b, recipe);
    int status = subject_open(b, &subject, recipe, r->gradients, params, tensors, threads);
    if (!status) {
        r->params = subject.params;
        r->tensors = tensors;
        halfstep_memory(subject.o, &weights, &gradients, &extras, &states, NULL);
        double n = (double)subject.params, written = (double)(weights + extras + states) / n, read_only = (double)gradients / n;
        r->bytes = 2 * written + read_only;
        r->scan_bytes = r->bytes + read_only;
        if (stream_open(&stream, subject.params, written, read_only, threads))
            status = failure("bench", "%s: no memory or threads for the stream", recipe);
    }
    for (int mode = 0; mode < 2 && !status; mode++) {
        double unused;
        if (halfstep_set_choice(subject.o, HALFSTEP_ALL_GROUPS, "scan", mode ? "scan" : "known-finite")) status = 1;
        if (!status)
            status = measure(b, &subject, &stream, recipe, mode ? r->scan_bytes : r->bytes, mode ? &r->scan_ns : &r->ns,
                             mode ? &r->scan_fraction : &r->fraction, mode ? &unused : &r->stream_gbs);
    }
    stream_close(&stream);
    subject_close(&subject);
    return status;
}

/* ---- All cases --------------------------------------------------------------------------------------------------------- */

/* The largest number that leaves memory for a case and its stream side by side. */
static int64_t affordable(const struct bench *b)
{
    double most = 0;
    for (int i = 0; i < b->recipes.n; i++) {
        uint64_t weight, extra, states;
        const char *gradients = default_gradients(b, b->recipes.item[i]);
        if (halfstep_recipe_bytes(b->recipes.item[i], 2, 1, 4096, &weight, &extra, &states)) continue;
        double bytes = (double)(weight + extra + states) / 4096 + (strcmp(gradients, "f32") ? 2 : 4);
        most = fmax(most, bytes);
    }
    double fits = 0.6 * available_bytes() / (2 * most);
    return (int64_t)(b->params < fits ? b->params : fits);
}

static const struct result *find_case(const struct result *results, int n, const char *recipe, int64_t tensors)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(results[i].recipe, recipe) && (results[i].tensors == 1) == (tensors == 1)) return &results[i];
    return NULL;
}

/* Time of stochastic over nearest rounding, where both were timed; else 0. */
static double sr_over_nearest(const struct result *results, int n)
{
    const struct result *sr = find_case(results, n, "adamw/bf16-sr/bf16-sr", 1), *nearest = find_case(results, n, "adamw/bf16/bf16", 1);
    return sr && nearest ? sr->ns / nearest->ns : 0;
}

static json_t *case_object(const struct result *r)
{
    json_t *o = json_object();
    json_object_set_new(o, "recipe", json_string(r->recipe));
    json_object_set_new(o, "gradients", json_string(r->gradients));
    json_object_set_new(o, "params", json_integer(r->params));
    json_object_set_new(o, "tensors", json_integer(r->tensors));
    json_object_set_new(o, "ns_per_param", json_real(r->ns));
    json_object_set_new(o, "bytes_per_param", json_real(r->bytes));
    json_object_set_new(o, "gb_per_s", json_real(r->bytes / r->ns));
    json_object_set_new(o, "stream_fraction", json_real(r->fraction));
    json_object_set_new(o, "stream_gb_per_s", json_real(r->stream_gbs));
    json_object_set_new(o, "scan_ns_per_param", json_real(r->scan_ns));
    json_object_set_new(o, "scan_bytes_per_param", json_real(r->scan_bytes));
    json_object_set_new(o, "scan_stream_fraction", json_real(r->scan_fraction));
    if (r->cache_ns > 0) json_object_set_new(o, "cache_ns_per_param", json_real(r->cache_ns));
    if (r->over_one > 0) json_object_set_new(o, "time_over_one_tensor", json_real(r->over_one));
    return o;
}

static int print_object(const struct result *results, int n, int threads)
{
    json_t *object = json_object(), *cases = json_array();
    double ratio = sr_over_nearest(results, n);
    for (int i = 0; i < n; i++) json_array_append_new(cases, case_object(&results[i]));
    json_object_set_new(object, "isa", json_string(halfstep_isa()));
    json_object_set_new(object, "threads", json_integer(threads));
    json_object_set_new(object, "cases", cases);
    if (ratio > 0) json_object_set_new(object, "sr_over_nearest", json_real(ratio));
    return print_json(object);
}

static void print_heading(void)
{
    printf("%-27s %-5s %7s  %9s %7s %7s %10s %7s %9s %9s\n", "recipe", "grads", "tensors", "ns/param", "B/param", "GB/s",
           "of stream", "scan", "in cache", "over one");
}

static void print_row(const struct result *r)
{
    printf("%-27s %-5s %7lld  %9.3f %7.3f %7.1f %10.3f %7.3f ", r->recipe, r->gradients, (long long)r->tensors, r->ns, r->bytes,
           r->bytes / r->ns, r->fraction, r->scan_fraction);
    if (r->cache_ns > 0)
        printf("%9.3f", r->cache_ns);
    else
        printf("%9s", "");
    if (r->over_one > 0) printf(" %9.3f", r->over_one);
    printf("\n");
    fflush(stdout);
}

static int write_csv(const char *path, const struct result *results, int n)
{
    FILE *f = fopen(path, "w");
    if (!f) return failure("bench", "cannot write %s: %s", path, strerror(errno));
    fprintf(f, "recipe,gradients,params,tensors,ns_per_param,bytes_per_param,gb_per_s,stream_fraction,stream_gb_per_s,"
               "scan_ns_per_param,scan_bytes_per_param,scan_stream_fraction,cache_ns_per_param,time_over_one_tensor\n");
    for (int i = 0; i < n; i++) {
        const struct result *r = &results[i];
        fprintf(f, "%s,%s,%lld,%lld,%.5g,%.6g,%.5g,%.4f,%.5g,%.5g,%.6g,%.4f,", r->recipe, r->gradients, (long long)r->params,
                (long long)r->tensors, r->ns, r->bytes, r->bytes / r->ns, r->fraction, r->stream_gbs, r->scan_ns, r->scan_bytes,
                r->scan_fraction);
        if (r->cache_ns > 0) fprintf(f, "%.5g", r->cache_ns);
        fprintf(f, ",");
        if (r->over_one > 0) fprintf(f, "%.4f", r->over_one);
        fprintf(f, "\n");
    }
    int bad = ferror(f);
    if (fclose(f) || bad) return failure("bench", "cannot write %s", path);
    return 0;
}

static int run_all(const struct bench *b, struct result *results, int *n, int threads)
{
    int64_t params = affordable(b);
    if (params < 4096) return failure("bench", "not enough memory for 4096 parameters");
    if ((double)params < b->params)
        fprintf(stderr, "halfstep: bench: memory allows %lld of the %.0f parameters\n", (long long)params, b->params);
    if (!b->json) {
        printf("%s kernels, %d thread%s, %.4g M parameters\n\n", halfstep_isa(), threads, threads == 1 ? "" : "s", (double)params * 1e-6);
        print_heading();
    }
    for (int i = 0; i < b->recipes.n; i++)
        for (int many = 0; many < (b->tensors > 1 ? 2 : 1); many++) {
            struct result *r = &results[*n];
            const char *recipe = b->recipes.item[i];
            int status = run_case(b, recipe, params, many ? b->tensors : 1, threads, r);
            if (!status && !many) status = measure_in_cache(b, recipe, r->gradients, &r->cache_ns);
            if (status) return status;
            /* By the fractions, for the machine's bandwidth may have changed between the two. */
            if (many) r->over_one = r[-1].fraction / r->fraction;
            ++*n;
            if (!b->json) print_row(r);
        }
    return 0;
}

int cmd_bench(int argc, char **argv)
{
    struct bench b;
    struct args args;
    const struct option_group groups[] = {{"Options", rows, OPTION_COUNT(rows), &b}};
    int status = args_parse(&args, &command, groups, 1, argc, argv), n = 0;
    if (status != ARGS_RUN) return status;
    int threads = b.threads ? (int)b.threads : halfstep_default_threads();
    struct result *results = calloc(2 * (size_t)b.recipes.n + 1, sizeof *results);
    status = results ? run_all(&b, results, &n, threads) : failure("bench", "out of memory");
    double ratio = status ? 0 : sr_over_nearest(results, n);
    if (!status && b.json) status = print_object(results, n, threads);
    if (!status && !b.json && ratio > 0) printf("\nStochastic rounding takes %.3f times as long as rounding to nearest.\n", ratio);
    if (!status && b.csv) status = write_csv(b.csv, results, n);
    free(results);
    args_free(&args);
    return status;
}
