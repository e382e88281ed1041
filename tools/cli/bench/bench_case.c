/* One case of `halfstep bench`: a recipe on tensors of its own. Each step is timed between two runs of a stream of as
 * many bytes. */
#define HALFSTEP_ADVANCED
#include "cli/bench/bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"

#include "base/process/limits.h"

#include "common/args/args.h"
#include "common/args/recipes.h"

static double available_bytes(void)
{
    const double limit = hstep_memory_limit("");
    double kilobytes = 0;
    char line[256];
    FILE *f = fopen("/proc/meminfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "MemAvailable: %lf kB", &kilobytes) == 1) break;
    if (f) fclose(f);
    if (kilobytes > 0) return fmin(kilobytes * 1024, limit);
    return fmin((double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE), limit) / 2;
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

/* ---- Properties of a recipe -------------------------------------------------------------------------------------- */

int bench_is_matrix(const char *recipe) { return rule_info(recipe_rule(recipe)).matrix; }

const char *bench_gradients(const struct bench *b, const char *recipe)
{
    struct recipe_parts parts;
    if (b->gradients) return b->gradients;
    recipe_split(recipe, &parts);
    return !strncmp(parts.weight, "f32", 3) ? "f32" : !strncmp(parts.weight, "f16", 3) ? "f16" : "bf16";
}

/* Returns the initial value of a hyper-parameter, or -1 if the rule does not have it. */
static double initial_hyper(const char *recipe, const char *name)
{
    halfstep_hyper_info info = {.struct_size = sizeof info};
    for (int32_t i = 0; halfstep_get_hyper_info(recipe_rule(recipe), i, &info) == HALFSTEP_OK; i++)
        if (!strcmp(info.name, name)) return info.initial;
    return -1;
}

/* Returns the side of a square matrix: a power of two from 64 to 1024. The matrix is so small that a step takes no
 * longer than the steps of other rules. */
static int64_t matrix_side(int64_t params)
{
    int64_t side = 64;
    while (side < 1024 && 4 * side * side <= params / 64) side *= 2;
    return side;
}

/* ---- Tensors ----------------------------------------------------------------------------------------------------- */

struct subject {
    halfstep_optimizer *o;
    struct block weights, gradients;
    void **weight;
    const void **gradient;
    int64_t params;
    int64_t tensors;
    /* on a device: weights and gradients; the memory for the copy that replaces the stream */
    char *there, *copied;
    uint64_t copied_bytes; /* copied from the first half of `copied` to the second */
};

static int on_device(const struct bench *b) { return strcmp(b->device, "cpu") != 0; }

static void subject_close(struct subject *s)
{
    halfstep_device_release(s->o, s->there);
    halfstep_device_release(s->o, s->copied);
    halfstep_destroy(s->o);
    block_close(&s->weights);
    block_close(&s->gradients);
    free(s->weight);
    free(s->gradient);
}

/* Fills memory with random numbers of both signs, from 2^-10 to 2^-2 in magnitude. There are no zeros, subnormals or
 * infinities. `element` is their size, 2 or 4 bytes; `half` makes IEEE halves of 2 bytes, not BF16. The numbers repeat
 * every 64 KiB. */
static void fill(char *out, uint64_t bytes, int element, int half)
{
    enum { PIECE = 1 << 16 };
    static unsigned char piece[PIECE];
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < PIECE; i += (size_t)element) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uint32_t sign = (uint32_t)(state >> 32 & 0x80000000u), fraction = (uint32_t)(state >> 20 & 0x7fffff);
        uint32_t bits = sign | (117 + (uint32_t)(state & 7)) << 23 | fraction;
        uint16_t code =
            half ? (uint16_t)(sign >> 16 | (5 + (uint32_t)(state & 7)) << 10 | fraction >> 13) : (uint16_t)(bits >> 16);
        if (element == 4) memcpy(piece + i, &bits, 4);
        else memcpy(piece + i, &code, 2);
    }
    for (uint64_t i = 0; i < bytes; i += PIECE) memcpy(out + i, piece, bytes - i < PIECE ? bytes - i : PIECE);
}

/* Fills packed weights: in each block the scale 2^-9, a code within the bounds that keep it, and smaller codes. */
static void fill_packed(char *out, uint64_t bytes)
{
    enum { BLOCK_BYTES = 34 };
    for (uint64_t i = 0; i < bytes; i++) {
        const int place = (int)(i % BLOCK_BYTES), code = (int)((uint32_t)i * 2654435761u >> 24) % 201 - 100;
        out[i] = (char)(place == 0 ? 0x00 : place == 1 ? 0x3b : place == 2 ? 114 : code);
    }
}

static int subject_fail(const struct subject *s, const char *recipe, int error)
{
    const char *detail = halfstep_error_detail(s->o);
    return failure("bench", "%s: %s%s%s", recipe, halfstep_strerror(error), *detail ? ": " : "", detail);
}

/* Returns the bytes that all tensors, which are alike, take in a slot. */
static double slot_bytes(const struct subject *s, int slot)
{
    const halfstep_slot_info info = slot_info(s->o, 0, slot);
    return info.format < 0 ? 0 : (double)(info.code_bytes + info.extra_bytes) * (double)s->tensors;
}

/* Fills the codes of a slot, but not its residuals or error codes. Adds their bytes to *used, rounded up to 64. */
static void fill_slot(const struct subject *s, int32_t tensor, int slot, char *at, uint64_t *used)
{
    const halfstep_slot_info info = slot_info(s->o, tensor, slot);
    const halfstep_format_info format = format_info(info.format);
    if (format.geometry == HALFSTEP_GEOMETRY_PACKED) fill_packed(at, info.code_bytes);
    else fill(at, info.code_bytes, format.code_bits / 8, !strcmp(format.code_dtype, "F16"));
    *used += (info.code_bytes + 63) / 64 * 64;
}

/* Copies the weights and gradients, which are filled on the host, to the device, and frees them here. */
static int subject_move(struct subject *s, const char *recipe, uint64_t weights, uint64_t gradients)
{
    void *memory = NULL;
    int error = halfstep_device_allocate(s->o, weights + gradients, &memory);
    s->there = memory;
    if (!error) error = halfstep_device_copy(s->o, s->there, s->weights.memory, weights);
    if (!error) error = halfstep_device_copy(s->o, s->there + weights, s->gradients.memory, gradients);
    for (int64_t t = 0; t < s->tensors && !error; t++) {
        s->weight[t] = s->there + ((char *)s->weight[t] - s->weights.memory);
        s->gradient[t] = s->there + weights + ((const char *)s->gradient[t] - s->gradients.memory);
    }
    block_close(&s->weights);
    block_close(&s->gradients);
    return error ? subject_fail(s, recipe, error) : 0;
}

static int subject_fill(const struct bench *b, struct subject *s, const char *recipe)
{
    uint64_t weights, gradients, w_at = 0, g_at = 0;
    halfstep_memory(s->o, &weights, &gradients, NULL, NULL, NULL);
    if (block_open(&s->weights, weights + 64 * (uint64_t)s->tensors, 3) ||
        block_open(&s->gradients, gradients + 64 * (uint64_t)s->tensors, 4))
        return failure("bench", "%s: not enough memory for %lld parameters", recipe, (long long)s->params);
    for (int32_t t = 0; t < s->tensors; t++) {
        char *weight = s->weights.memory + w_at, *gradient = s->gradients.memory + g_at;
        s->weight[t] = weight;
        s->gradient[t] = gradient;
        fill_slot(s, t, HALFSTEP_SLOT_WEIGHT, weight, &w_at);
        fill_slot(s, t, HALFSTEP_SLOT_GRADIENT, gradient, &g_at);
    }
    return on_device(b) ? subject_move(s, recipe, w_at, g_at) : 0;
}

/* Opens `tensors` equal matrices with rows of whole blocks and about `params` parameters in total. A rule that
 * multiplies matrices gets square ones. */
static int subject_open(const struct bench *b, struct subject *s, const char *recipe, const char *gradients,
                        int64_t params, int64_t tensors, int threads)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads, .seed = 1, .device = b->device};
    const halfstep_rule_info rule = rule_info(recipe_rule(recipe));
    memset(s, 0, sizeof *s);
    int64_t each = params / tensors, length = each >= 65536 ? 4096 : each >= 4096 ? 512 : 64, count = each / length;
    if (rule.matrix) length = count = matrix_side(params);
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
    if (!error && initial_hyper(recipe, "momentum") == 0) error = halfstep_set_hyper(s->o, group, "momentum", 0.9);
    if (!error && !rule.raw_gradient) {
        error = halfstep_set_hyper(s->o, group, "lr", 1e-5);
        if (!error) error = halfstep_set_hyper(s->o, group, "weight_decay", 0.01);
        if (!error && strcmp(rule.decay, "proximal")) error = halfstep_set_choice(s->o, group, "decay", "decoupled");
    }
    for (int64_t t = 0; t < tensors && !error; t++) {
        char name[32];
        snprintf(name, sizeof name, "tensor.%lld", (long long)t);
        halfstep_tensor d = {.struct_size = sizeof d,
                             .group = group,
                             .name = name,
                             .ndim = 2,
                             .rows = count,
                             .row_length = length,
                             .gradient = gradients};
        error = halfstep_add_tensor(s->o, &d, &index);
    }
    if (!error) error = halfstep_allocate_states(s->o);
    return error ? subject_fail(s, recipe, error) : subject_fill(b, s, recipe);
}

/* ---- Timing ------------------------------------------------------------------------------------------------------ */

/* Makes one step. Returns its seconds, or a negative number after one line of error. */
static double subject_step(struct subject *s, const char *recipe)
{
    double start = bench_now();
    int error = halfstep_step(s->o, s->weight, s->gradient);
    if (!error) error = halfstep_synchronize(s->o);
    double seconds = bench_now() - start;
    if (!error) return seconds;
    subject_fail(s, recipe, error);
    return -1;
}

/* Copies as many bytes within the device's memory as a step moves, in place of the stream. Returns as
 * subject_step(). */
static double copy_run(struct subject *s, const char *recipe)
{
    double start = bench_now();
    int error = halfstep_device_copy(s->o, s->copied + s->copied_bytes, s->copied, s->copied_bytes);
    double seconds = bench_now() - start;
    if (!error) return seconds;
    subject_fail(s, recipe, error);
    return -1;
}

static int copy_open(struct subject *s, const char *recipe, double bytes)
{
    void *memory = NULL;
    s->copied_bytes = (uint64_t)(bytes * (double)s->params / 2);
    int error = halfstep_device_allocate(s->o, 2 * s->copied_bytes, &memory);
    s->copied = memory;
    return error ? subject_fail(s, recipe, error) : 0;
}

/* Times stream, step, stream, step, ..., stream. Each step is compared with the two streams beside it. Writes the
 * medians over all rounds. */
static int measure(const struct bench *b, struct subject *subject, struct stream *stream, const char *recipe,
                   double bytes, double *ns, double *fraction, double *stream_gbs)
{
    double *times = calloc(3 * (size_t)b->rounds, sizeof *times);
    if (!times) return failure("bench", "out of memory");
    const int device = on_device(b);
    const double moved = device ? 2.0 * (double)subject->copied_bytes : stream_bytes(stream);
    double *fractions = times + b->rounds, *rates = fractions + b->rounds, before = 0;
    int status = subject_step(subject, recipe) < 0;
    for (int64_t i = -1; i < b->rounds && !status; i++) {
        double step = i < 0 ? 0 : subject_step(subject, recipe),
               after = device ? copy_run(subject, recipe) : stream_run(stream);
        if (step < 0 || after < 0) {
            status = step < 0 || device ? 1 : failure("bench", "cannot start %d threads", stream->threads);
        } else if (i >= 0) {
            times[i] = step;
            rates[i] = moved / (0.5 * (before + after));
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
        double start = bench_now();
        for (int i = 0; i < STEPS && !status; i++) status = subject_step(&s, recipe) < 0;
        least = fmin(least, (bench_now() - start) / STEPS);
    }
    *ns = least * 1e9 / PARAMS;
    subject_close(&s);
    return status;
}

/* Returns 1 if sums over whole tensors come before the update. Either the rule needs them, or a state has one scale for
 * the whole tensor. */
static int is_two_pass(const struct subject *s, const char *recipe)
{
    int two = rule_info(recipe_rule(recipe)).two_pass;
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) {
        const halfstep_format_info format = format_info(slot_info(s->o, 0, HALFSTEP_SLOT_STATE + i).format);
        two |= format.block && format.geometry == HALFSTEP_GEOMETRY_TENSOR;
    }
    return two;
}

/* Counts the bytes per parameter that a step has to move. Weights with their residuals and all states, copies of the
 * weight included, are read and written once. Gradients are read once. A step of two passes reads everything twice,
 * except for tensors of up to 32 MB, which a cache keeps between the passes. That size is fixed, because what a system
 * reports about its caches is not what one process gets. */
static void count_bytes(const struct subject *s, const char *recipe, double *written, double *read_only)
{
    double n = (double)s->params, cache = 32 << 20;
    *read_only = slot_bytes(s, HALFSTEP_SLOT_GRADIENT) / n;
    *written = slot_bytes(s, HALFSTEP_SLOT_WEIGHT) / n;
    for (int i = 0; i < HALFSTEP_MAX_STATES; i++) *written += slot_bytes(s, HALFSTEP_SLOT_STATE + i) / n;
    if (is_two_pass(s, recipe) && (*written + *read_only) * n / (double)s->tensors > cache)
        *read_only += *written + *read_only;
}

/* Returns the floating-point operations of one step's matrix products on a square matrix, per parameter. Each of the
 * ns_steps iterations computes X X', its square, and the product with X. */
static double product_flops(const struct subject *s, const char *recipe)
{
    return initial_hyper(recipe, "ns_steps") * 6 * sqrt((double)s->params);
}

int bench_case(const struct bench *b, const char *recipe, int64_t params, int64_t tensors, int threads, int in_cache,
               struct result *r)
{
    struct subject subject;
    struct stream stream = {0};
    memset(r, 0, sizeof *r);
    r->recipe = recipe;
    r->gradients = bench_gradients(b, recipe);
    int status = subject_open(b, &subject, recipe, r->gradients, params, tensors, threads);
    if (!status) {
        double written, read_only;
        count_bytes(&subject, recipe, &written, &read_only);
        r->params = subject.params;
        r->tensors = tensors;
        r->bytes = 2 * written + read_only;
        r->scan_bytes = r->bytes + slot_bytes(&subject, HALFSTEP_SLOT_GRADIENT) / (double)subject.params;
        if (bench_is_matrix(recipe)) r->flops = product_flops(&subject, recipe);
        if (on_device(b)) status = copy_open(&subject, recipe, r->bytes);
        else if (stream_open(&stream, subject.params, written, read_only, threads))
            status = failure("bench", "%s: not enough memory or threads for the stream", recipe);
    }
    for (int mode = 0; mode < 2 && !status; mode++) {
        double unused;
        if (halfstep_set_choice(subject.o, HALFSTEP_ALL_GROUPS, "scan", mode ? "scan" : "known-finite")) status = 1;
        if (!status)
            status = measure(b, &subject, &stream, recipe, mode ? r->scan_bytes : r->bytes, mode ? &r->scan_ns : &r->ns,
                             mode ? &r->scan_fraction : &r->fraction, mode ? &unused : &r->stream_gbs);
    }
    r->rate = r->bytes / r->ns;
    r->flops_rate = r->flops / r->ns;
    stream_close(&stream);
    subject_close(&subject);
    if (!status && in_cache && !on_device(b) && !bench_is_matrix(recipe))
        status = measure_in_cache(b, recipe, r->gradients, &r->cache_ns);
    return status;
}

int64_t bench_affordable(const struct bench *b)
{
    double most = 0;
    for (int i = 0; i < b->recipes; i++) {
        uint64_t weight, extra, states;
        const char *recipe = b->recipe[i];
        if (bench_is_matrix(recipe) || halfstep_recipe_bytes(recipe, 2, 1, 4096, &weight, &extra, &states)) continue;
        double gradients = strcmp(bench_gradients(b, recipe), "f32") ? 2 : 4;
        double kept = (double)(weight + extra + states) / 4096 + gradients;
        /* The memory of the recipe, and that of its stream, which is twice as much if the recipe reads everything
         * twice. */
        most = fmax(most, kept + (rule_info(recipe_rule(recipe)).two_pass ? 2 : 1) * kept);
    }
    halfstep_device_info info = {.struct_size = sizeof info};
    double available = available_bytes();
    if (on_device(b) && !halfstep_get_device_info(b->device, &info) && (double)info.memory < available)
        available = (double)info.memory;
    double fits = most > 0 ? 0.6 * available / most : b->params;
    return (int64_t)(b->params < fits ? b->params : fits);
}
