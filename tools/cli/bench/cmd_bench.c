/* Compares halfstep_step with what memory allows: a plain read-modify-write loop over as many bytes, in the best
 * layout, timed before and after each step. The ratio stays valid on a machine whose bandwidth changes by the second; a
 * time alone does not. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"

#include "cli/bench/bench.h"
#include "cli/commands.h"
#include "common/args/args.h"
#include "common/args/recipes.h"
#include "trainer/run/run.h"

struct choice {
    struct bench bench;
    struct string_list recipes;
    const char *csv;
    int grid, json;
};

static const char *generator_name(int32_t index) { return halfstep_choice_value("generator", index); }

#define AT(member) offsetof(struct choice, member)

static const struct option rows[] = {
    {"recipes", OPTION_RECIPES, AT(recipes), "R,R,...", NULL, 0, 0, 0, NULL,
     "recipes to time (default: adamw in the most useful formats, and every kind of rule)"},
    {"grid", OPTION_FLAG, AT(grid), NULL, NULL, 0, 0, 0, NULL,
     "time every rule with every weight format, and with every state format for f32 and bf16-sr weights"},
    {"params", OPTION_NUMBER, AT(bench.params), "N", "67108864", 4096, 1e12, 0, NULL,
     "number of parameters (with --grid 4194304); fewer if memory is short"},
    {"tensors", OPTION_INTEGER, AT(bench.tensors), "N", "1000", 1, 1000000, 0, NULL,
     "also time as many parameters in N small tensors; 1: only one large tensor (so with --grid)"},
    {"threads", OPTION_INTEGER, AT(bench.threads), "N", "0", 0, 1024, 0, NULL,
     "number of threads; 0: as many as a step would use"},
    {"rounds", OPTION_INTEGER, AT(bench.rounds), "N", "11", 1, 1000, 0, NULL,
     "pairs of stream and step (with --grid 3); the results are medians"},
    {"gradients", OPTION_CHOICE, AT(bench.gradients), "FORMAT", NULL, 0, 0, 0, gradient_format_name,
     "gradient format (default: f32, bf16 or f16, as the weights)"},
    {"generator", OPTION_CHOICE, AT(bench.generator), "NAME", NULL, 0, 0, 0, generator_name,
     "source of random bits (default: the library's)"},
    {"device", OPTION_STRING, AT(bench.device), "NAME", "cpu", 0, 0, 0, NULL,
     "cpu, cuda or cuda:N; on a GPU the stream is a copy within its memory"},
    {"csv", OPTION_STRING, AT(csv), "FILE", NULL, 0, 0, 0, NULL, "also write the cases to FILE, as CSV"},
    OPTION_JSON(struct choice),
};

/* ---- Which recipes ----------------------------------------------------------------------------------------------- */

static const char *const usual[] = {
    "adamw/f32/f32",
    "adamw/bf16/bf16",
    "adamw/bf16-sr/bf16-sr",
    "adamw/bf16-kahan/bf16-sr",
    "adamw/bf16-ecc8/bf16-sr",
    "adamw/bf16-ecc16/f32",
    "adamw/f16-sr/bf16-sr",
    "adamw/f16-kahan/bf16-sr",
    "adamw/bf16-sr/int8",
    "adamw/bf16-sr/int8+int4",
    "adamw/bf16-sr/int4",
    "adamw/bf16-ecc8/int8",
    "adamw/bf16-ecc8/int4",
    "adamw/int8-ecc4/int8",
    "adamw/int8-ecc4/int4",
    "adamw/int8-sr/int8",
    "adamw/bf16-sr/fp8",
    "lion/bf16-sr/bf16-sr",
    "lion/bf16-sr/int8",
    "sgd/bf16-sr/bf16-sr",
    "radam/bf16-sr",
    "adan/bf16-sr",
    "ranger/bf16-sr",
    "schedulefree/bf16-sr",
    "stableadamw/bf16-sr",
    "lamb/bf16-sr",
    "lamb16/bf16-sr",
    "ema/bf16-kahan",
    "muon/bf16-sr",
};

/* Adds the full form of a recipe. Adds nothing if there is no such recipe, or if it is in the list. */
static int add(struct args *args, struct bench *b, const char *recipe)
{
    char full[RECIPE_BYTES];
    if (halfstep_recipe_full(recipe, full, sizeof full) != HALFSTEP_OK) return 0;
    for (int i = 0; i < b->recipes; i++)
        if (!strcmp(b->recipe[i], full)) return 0;
    const char **more = realloc(b->recipe, ((size_t)b->recipes + 1) * sizeof *more);
    if (!more) return failure("bench", "out of memory");
    b->recipe = more;
    more[b->recipes] = args_keep(args, full);
    if (!more[b->recipes]) return failure("bench", "out of memory");
    b->recipes++;
    return 0;
}

static int add_grid(struct args *args, struct bench *b)
{
    const char *rule, *weight, *state;
    char recipe[3 * RECIPE_BYTES];
    int status = 0;
    for (int32_t r = 0; (rule = rule_name(r)) != NULL; r++)
        for (int32_t w = 0; (weight = weight_format_name(w)) != NULL && !status; w++) {
            snprintf(recipe, sizeof recipe, "%s/%s", rule, weight);
            status = add(args, b, recipe);
            if (strcmp(weight, "f32") && strcmp(weight, "bf16-sr")) continue;
            for (int32_t s = 0; (state = state_format_name(s)) != NULL && !status; s++) {
                snprintf(recipe, sizeof recipe, "%s/%s/%s", rule, weight, state);
                status = add(args, b, recipe);
            }
        }
    return status;
}

static int choose(struct args *args, struct choice *c)
{
    int status = 0;
    if (c->grid) {
        if (args_given(args, "recipes")) return usage_error("bench", "--grid and --recipes exclude each other");
        if (!args_given(args, "params")) c->bench.params = 1 << 22;
        if (!args_given(args, "tensors")) c->bench.tensors = 1;
        if (!args_given(args, "rounds")) c->bench.rounds = 3;
        return add_grid(args, &c->bench);
    }
    for (int i = 0; i < c->recipes.n && !status; i++) status = add(args, &c->bench, c->recipes.item[i]);
    for (int i = 0; i < COUNT_OF(usual) && !status && !c->recipes.n; i++) status = add(args, &c->bench, usual[i]);
    return status;
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

static const struct result *find_case(const struct result *results, int n, const char *recipe, int64_t tensors)
{
    for (int i = 0; i < n; i++)
        if (!strcmp(results[i].recipe, recipe) && (results[i].tensors == 1) == (tensors == 1)) return &results[i];
    return NULL;
}

/* Returns the time of stochastic rounding over that of rounding to nearest, or 0 if either was not timed. */
static double sr_over_nearest(const struct result *results, int n)
{
    const struct result *sr = find_case(results, n, "adamw/bf16-sr/bf16-sr", 1),
                        *nearest = find_case(results, n, "adamw/bf16/bf16", 1);
    return sr && nearest ? sr->ns / nearest->ns : 0;
}

/* The numbers of a case in JSON and CSV. Those that were not measured are 0 and left out. */
static const struct {
    const char *name, *format;
    size_t offset;
} numbers[] = {
    {"ns_per_param", "%.5g", offsetof(struct result, ns)},
    {"bytes_per_param", "%.6g", offsetof(struct result, bytes)},
    {"gb_per_s", "%.5g", offsetof(struct result, rate)},
    {"stream_fraction", "%.4f", offsetof(struct result, fraction)},
    {"stream_gb_per_s", "%.5g", offsetof(struct result, stream_gbs)},
    {"scan_ns_per_param", "%.5g", offsetof(struct result, scan_ns)},
    {"scan_bytes_per_param", "%.6g", offsetof(struct result, scan_bytes)},
    {"scan_stream_fraction", "%.4f", offsetof(struct result, scan_fraction)},
    {"cache_ns_per_param", "%.5g", offsetof(struct result, cache_ns)},
    {"time_over_one_tensor", "%.4f", offsetof(struct result, over_one)},
    {"gflop_per_s", "%.4g", offsetof(struct result, flops_rate)},
};
enum { NUMBERS = COUNT_OF(numbers) };

static double number_of(const struct result *r, int i)
{
    return *(const double *)((const char *)r + numbers[i].offset);
}

static void put_case(struct document *d, json_t *in, const struct result *r)
{
    json_t *o = put_object(d, in, NULL);
    put_text(d, o, "recipe", r->recipe);
    put_text(d, o, "gradients", r->gradients);
    put_integer(d, o, "params", r->params);
    put_integer(d, o, "tensors", r->tensors);
    for (int i = 0; i < NUMBERS; i++)
        if (number_of(r, i) > 0) put_number(d, o, numbers[i].name, number_of(r, i));
}

static int print_object(const struct result *results, int n, const char *device, int threads)
{
    struct document d;
    json_t *object = document_begin(&d);
    double ratio = sr_over_nearest(results, n);
    put_text(&d, object, "isa", halfstep_isa());
    put_text(&d, object, "device", device);
    put_integer(&d, object, "threads", threads);
    json_t *cases = put_array(&d, object, "cases");
    for (int i = 0; i < n; i++) put_case(&d, cases, &results[i]);
    if (ratio > 0) put_number(&d, object, "sr_over_nearest", ratio);
    return document_print(&d);
}

static void print_heading(void)
{
    printf("%-31s %-5s %7s  %9s %7s %7s %10s %7s %9s %9s\n", "recipe", "grads", "tensors", "ns/param", "B/param",
           "GB/s", "of stream", "scan", "in cache", "over one");
}

static void print_row(const struct result *r)
{
    if (r->flops > 0) return;
    printf("%-31s %-5s %7lld  %9.3f %7.3f %7.1f %10.3f %7.3f", r->recipe, r->gradients, (long long)r->tensors, r->ns,
           r->bytes, r->rate, r->fraction, r->scan_fraction);
    if (r->cache_ns > 0) printf(" %9.3f", r->cache_ns);
    if (r->over_one > 0) printf(" %9s %9.3f", "", r->over_one);
    printf("\n");
    fflush(stdout);
}

static void print_matrices(const struct result *results, int n)
{
    for (int i = 0, first = 1; i < n; i++) {
        const struct result *r = &results[i];
        if (r->flops <= 0) continue;
        if (first) printf("\n%-31s %-5s %7s  %9s %7s\n", "recipe", "grads", "params", "ns/param", "GFLOP/s");
        printf("%-31s %-5s %7lld  %9.2f %7.1f\n", r->recipe, r->gradients, (long long)r->params, r->ns, r->flops_rate);
        first = 0;
    }
}

static int write_csv(FILE *f, const char *path, const struct result *results, int n)
{
    /* Pipes and devices cannot be truncated, and need not be. */
    int bad = ftruncate(fileno(f), 0) != 0 && errno != EINVAL;
    fprintf(f, "recipe,gradients,params,tensors");
    for (int k = 0; k < NUMBERS; k++) fprintf(f, ",%s", numbers[k].name);
    for (int i = 0; i < n; i++) {
        const struct result *r = &results[i];
        fprintf(f, "\n%s,%s,%lld,%lld", r->recipe, r->gradients, (long long)r->params, (long long)r->tensors);
        for (int k = 0; k < NUMBERS; k++) {
            fprintf(f, ",");
            if (number_of(r, k) > 0) fprintf(f, numbers[k].format, number_of(r, k));
        }
    }
    fprintf(f, "\n");
    bad |= ferror(f);
    return fclose(f) || bad ? failure("bench", "cannot write %s", path) : 0;
}

static int run_all(const struct choice *c, struct result *results, int *n, int threads)
{
    const struct bench *b = &c->bench;
    int64_t params = bench_affordable(b);
    if (params < 4096) return failure("bench", "not enough memory for 4096 parameters, the least that can be timed");
    if ((double)params < b->params)
        fprintf(stderr, "halfstep: bench: memory suffices for %lld of %.0f parameters\n", (long long)params, b->params);
    if (!c->json) {
        if (strcmp(b->device, "cpu")) printf("%s, ", b->device);
        else printf("%s kernels, %d thread%s, ", halfstep_isa(), threads, threads == 1 ? "" : "s");
        printf("%.4g M parameters\n\n", (double)params * 1e-6);
        print_heading();
    }
    for (int i = 0; i < b->recipes; i++)
        for (int many = 0; many < (b->tensors > 1 && !bench_is_matrix(b->recipe[i]) ? 2 : 1); many++) {
            struct result *r = &results[*n];
            int status = bench_case(b, b->recipe[i], params, many ? b->tensors : 1, threads, !many, r);
            if (status) return status;
            /* Compares the fractions of the stream, because the machine's bandwidth may have changed between the two
             * cases. */
            if (many) r->over_one = r[-1].fraction / r->fraction * r->bytes / r[-1].bytes;
            ++*n;
            if (!c->json) print_row(r);
        }
    if (!c->json) print_matrices(results, *n);
    return 0;
}

static int run_bench(struct args *args, void *options)
{
    struct choice *c = options;
    int n = 0, status = check_device("bench", c->bench.device);
    if (!status) status = choose(args, c);
    /* Opened before the cases are timed, which takes minutes. Its old content stays until there are results. */
    FILE *csv = !status && c->csv ? fopen(c->csv, "a") : NULL;
    if (!status && c->csv && !csv) status = failure("bench", "cannot write %s: %s", c->csv, strerror(errno));
    int threads = c->bench.threads ? (int)c->bench.threads : halfstep_default_threads();
    struct result *results = calloc(2 * (size_t)c->bench.recipes + 1, sizeof *results);
    if (!status) status = results ? run_all(c, results, &n, threads) : failure("bench", "out of memory");
    double ratio = status ? 0 : sr_over_nearest(results, n);
    if (!status && c->json) status = print_object(results, n, c->bench.device, threads);
    if (ratio > 0 && !c->json)
        printf("\nStochastic rounding takes %.3f times as long as rounding to nearest.\n", ratio);
    if (csv && !status) status = write_csv(csv, c->csv, results, n);
    else if (csv) fclose(csv);
    free(results);
    free(c->bench.recipe);
    return status;
}

const struct command bench_command = {
    .name = "bench",
    .usage = "[options]",
    .summary = "Times one optimizer step of each recipe, in turns with a read-modify-write stream of as many bytes.",
    .notes =
        "Columns:\n"
        "  ns/param    time of a step per parameter, with gradients known to be finite\n"
        "  B/param     bytes that the recipe has to move: weights and states read and written once, gradients read "
        "once.\n"
        "              Rules that need sums over a tensor of more than 32 MB read all of it twice.\n"
        "  GB/s        those bytes over the time of the step\n"
        "  of stream   that rate, as a fraction of the stream's\n"
        "  scan        the same fraction if the gradients are scanned first; their second reading counts\n"
        "  in cache    ns/param of one thread on 16384 parameters: the cost of the arithmetic without the memory\n"
        "  over one    time on --tensors small tensors over the time on one large tensor\n"
        "  GFLOP/s     rate of the matrix products, for rules that have any, on one square matrix of up to 1024 rows\n"
        "\n"
        "  halfstep bench --recipes adamw/f32,adamw/bf16-sr/int8 --threads 8\n",
    COMMAND_OPTIONS(rows, struct choice),
    .run = run_bench,
};
