#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/args/recipes.h"
#include "trainer/files/checkpoint.h"
#include "trainer/run/run.h"

struct plan {
    double params;
    uint64_t memory;
    const char *gradients, *rule, *checkpoint;
    struct string_list recipes;
    int64_t width, depth, heads, context, layers;
    int release, store, all, json;
    double bandwidth, step_time; /* GB/s and seconds; 0: not given */
};

#define AT(member) offsetof(struct plan, member)

static const struct option option_rows[] = {
    {"params", OPTION_NUMBER, AT(params), "N", NULL, 1, 1e15, 0, NULL, "parameters of the model, such as 7e9 or 7B"},
    {"memory", OPTION_BYTES, AT(memory), "BYTES", NULL, 0, 0, 0, NULL, "memory to fit into; 24G is 24 * 2^30 bytes"},
    {"rule", OPTION_CHOICE, AT(rule), "NAME", "adamw", 0, 0, 0, rule_name, "rule whose recipes are listed"},
    {"recipes", OPTION_RECIPES, AT(recipes), "R,R,...", NULL, 0, 0, 0, NULL, "list only these recipes, of any rule"},
    {"all", OPTION_FLAG, AT(all), NULL, NULL, 0, 0, 0, NULL,
     "list every weight format with every state format that holds all states of the rule (default: a short list)"},
    {"gradients", OPTION_CHOICE, AT(gradients), "FORMAT", NULL, 0, 0, 0, gradient_format_name,
     "gradient format (default: f32 with f32 weights, otherwise bf16)"},
    {"release", OPTION_FLAG, AT(release), NULL, NULL, 0, 0, 0, NULL,
     "gradient release: gradients exist for one layer at a time"},
    {"layers", OPTION_INTEGER, AT(layers), "N", "32", 1, 1e6, 0, NULL,
     "with --release and --params: number of equal layers"},
    {"store", OPTION_FLAG, AT(store), NULL, NULL, 0, 0, 0, NULL,
     "states are in a file, as store= keeps them in Python: what that takes of the disk, and of each step"},
    {"bandwidth", OPTION_NUMBER, AT(bandwidth), "GB/S", NULL, 1e-3, 1e6, 0, NULL,
     "with --store: 10^9 bytes that the disk reads and writes a second, both together"},
    {"step-time", OPTION_NUMBER, AT(step_time), "S", NULL, 1e-6, 1e9, 0, NULL,
     "with --store: seconds between two steps, for the terabytes written a day (default: what the disk needs)"},
    {"checkpoint", OPTION_STRING, AT(checkpoint), "DIR", NULL, 0, 0, 0, NULL,
     "in place of --params: take the model's shape from a checkpoint or a folder with config.json"},
    {"width", OPTION_INTEGER, AT(width), "N", NULL, 2, 65536, 0, NULL,
     "in place of --params: width of a train lm model, with --depth, --heads, --context"},
    {"depth", OPTION_INTEGER, AT(depth), "N", "4", 1, 1024, 0, NULL, "number of layers"},
    {"heads", OPTION_INTEGER, AT(heads), "N", "4", 1, 1024, 0, NULL, "number of attention heads"},
    {"context", OPTION_INTEGER, AT(context), "N", "128", 1, 1 << 20, 0, NULL, "context length in bytes"},
    OPTION_JSON(struct plan),
};

struct forecast {
    char recipe[RECIPE_BYTES];
    const char *gradients;
    double weights, extras, states, gradient_bytes, total; /* bytes */
    /* With --store, which puts `buffers`, the pieces in memory, into the total in place of extras and states. half: all
     * pieces, once; read, written: in a step. */
    double half, buffers, read, written;
};

/* ---- A file of states -------------------------------------------------------------------------------------------- */

/* Returns the seconds in which the disk reads and writes what a step needs. */
static double disk_seconds(const struct plan *plan, const struct forecast *f)
{
    return (f->read + f->written) / (plan->bandwidth * 1e9);
}

/* Returns the terabytes that steps write in a day. A step takes at least what the disk needs. NaN if nothing says how
 * long it takes. */
static double terabytes_a_day(const struct plan *plan, const struct forecast *f)
{
    const double step = fmax(plan->step_time, plan->bandwidth > 0 ? disk_seconds(plan, f) : 0);
    return step > 0 ? f->written / step * 86400 / 1e12 : NAN;
}

/* ---- Sizes ------------------------------------------------------------------------------------------------------- */

/* Adds up a model of known shape, tensor by tensor, because small tensors may fall back from block formats. Writes the
 * most bytes of gradients that there are at once. */
static int add_shape(const struct lm_config *shape, const struct forecast *f, int release, halfstep_forecast *all,
                     double *gradients)
{
    halfstep_forecast layer = {.struct_size = sizeof layer};
    int code = HALFSTEP_OK;
    for (int i = 0; i < lm_tensor_count(shape) && !code; i++) {
        struct lm_tensor t;
        lm_tensor_info(shape, i, &t);
        const halfstep_tensor tensor = checkpoint_tensor(&t, f->gradients);
        code = halfstep_forecast_tensors(all, f->recipe, &tensor, 1);
        if (!code && strncmp(t.name, "model.layers.0.", 15) == 0)
            code = halfstep_forecast_tensors(&layer, f->recipe, &tensor, 1);
    }
    /* All layers are alike. An embedding may be larger than a layer. */
    *gradients = (double)(release ? layer.gradients : all->gradients);
    if (release && layer.gradients < all->largest_gradient) *gradients = (double)all->largest_gradient;
    return code;
}

/* Estimates a model of which only the size is known, as matrices of 4096 x 4096. */
static int add_params(const struct plan *plan, const struct forecast *f, halfstep_forecast *all, double *gradients)
{
    const struct lm_tensor matrix = {.name = "matrix", .ndim = 2, .rows = 4096, .row_length = 4096};
    const halfstep_tensor tensor = checkpoint_tensor(&matrix, f->gradients);
    const int code = halfstep_forecast_tensors(all, f->recipe, &tensor, (int32_t)ceil(plan->params / (4096 * 4096)));
    *gradients = (double)all->gradients / (plan->release ? (double)plan->layers : 1);
    return code;
}

/* Returns 0, or an error code if the recipe does not exist or cannot train such a model. */
static int make_forecast(const struct plan *plan, const struct lm_config *shape, const char *recipe, struct forecast *f)
{
    struct run_config config = {.recipe = recipe, .gradients = plan->gradients};
    halfstep_forecast all = {.struct_size = sizeof all};
    double gradients;
    memset(f, 0, sizeof *f);
    snprintf(f->recipe, sizeof f->recipe, "%s", recipe);
    run_config_settle(&config);
    f->gradients = config.gradients;
    const int code =
        shape ? add_shape(shape, f, plan->release, &all, &gradients) : add_params(plan, f, &all, &gradients);
    if (code) return code;
    const double scale = shape ? 1 : plan->params / (double)all.elements;
    f->weights = scale * (double)all.weights;
    f->extras = scale * (double)all.weight_extras;
    f->states = scale * (double)all.states;
    f->gradient_bytes = scale * gradients;
    f->half = scale * (double)all.stored;
    f->read = scale * (double)all.read;
    f->written = scale * (double)all.written;
    if (plan->store) f->buffers = fmin((double)all.memory, f->half);
    const uint64_t kept = all.weights + (plan->store ? 0 : all.weight_extras + all.states);
    f->total = scale * ((double)kept + gradients) + f->buffers;
    return HALFSTEP_OK;
}

/* ---- Which recipes ----------------------------------------------------------------------------------------------- */

/* Returns 0 for weight formats that are nobody's first choice. 16-bit weights rounded to nearest lose small updates.
 * IEEE halves take as many bytes as BF16. */
static int worth_a_look(const char *weight)
{
    const halfstep_format_info info = format_named(weight);
    return (info.code_bits > 16 || info.stochastic || info.extra_bits) && strcmp(info.code_dtype, "F16") != 0;
}

struct listing {
    const struct plan *plan;
    const struct lm_config *shape;
    struct forecast *list;
    int n, capacity;
};

/* Adds a recipe, unless it does not exist or is in the list. */
static void add_recipe(struct listing *l, const char *weight, const char *states)
{
    char recipe[3 * RECIPE_BYTES], full[RECIPE_BYTES];
    snprintf(recipe, sizeof recipe, "%s/%s%s%s", l->plan->rule, weight, states ? "/" : "", states ? states : "");
    if (halfstep_recipe_full(recipe, full, sizeof full) != HALFSTEP_OK || l->n == l->capacity) return;
    for (int i = 0; i < l->n; i++)
        if (strcmp(l->list[i].recipe, full) == 0) return;
    if (make_forecast(l->plan, l->shape, full, &l->list[l->n]) == 0) l->n++;
}

/* Lists the recipes of the rule. With --all, every weight format is combined with every state format. Otherwise, weight
 * formats that keep small updates are combined with their default states, and with those of 8, 6 and 4 bits. */
static void list_recipes(struct listing *l)
{
    static const char *const compact[] = {"int8", "int6", "int4"};
    const char *weight, *state;
    for (int32_t w = 0; (weight = weight_format_name(w)) != NULL; w++) {
        if (!l->plan->all && !worth_a_look(weight)) continue;
        add_recipe(l, weight, NULL);
        if (l->plan->all)
            for (int32_t s = 0; (state = state_format_name(s)) != NULL; s++) add_recipe(l, weight, state);
        else
            for (int i = 0; i < COUNT_OF(compact); i++) add_recipe(l, weight, compact[i]);
    }
}

static int by_size(const void *a, const void *b)
{
    const struct forecast *x = a, *y = b;
    const double lead = (x->total - x->buffers) - (y->total - y->buffers);
    if (lead != 0) return lead < 0 ? -1 : 1;
    if (x->half != y->half) return x->half < y->half ? -1 : 1;
    return strcmp(x->recipe, y->recipe);
}

/* ---- Output ------------------------------------------------------------------------------------------------------ */

static int fits(const struct plan *plan, const struct forecast *f)
{
    return plan->memory > 0 && f->total <= (double)plan->memory;
}

static void put_store(struct document *d, json_t *object, const struct plan *plan, const struct forecast *f)
{
    put_integer(d, object, "disk_bytes", (int64_t)(2 * f->half + 0.5));
    put_integer(d, object, "memory_bytes", (int64_t)(f->buffers + 0.5));
    put_integer(d, object, "read_bytes", (int64_t)(f->read + 0.5));
    put_integer(d, object, "written_bytes", (int64_t)(f->written + 0.5));
    put_number(d, object, "step_seconds", plan->bandwidth > 0 ? disk_seconds(plan, f) : NAN);
    put_number(d, object, "terabytes_a_day", terabytes_a_day(plan, f));
}

static int print_object(const struct plan *plan, double params, const struct forecast *list, int n)
{
    struct document d;
    json_t *object = document_begin(&d);
    put_integer(&d, object, "params", (int64_t)(params + 0.5));
    if (plan->memory) put_integer(&d, object, "memory", (int64_t)plan->memory);
    else put_null(&d, object, "memory");
    put_flag(&d, object, "release", plan->release);
    json_t *recipes = put_array(&d, object, "recipes");
    for (int i = 0; i < n; i++) {
        const struct forecast *f = &list[i];
        json_t *row = put_object(&d, recipes, NULL);
        put_text(&d, row, "recipe", f->recipe);
        put_text(&d, row, "gradients", f->gradients);
        json_t *bytes = put_object(&d, row, "bytes_per_param");
        put_number(&d, bytes, "weights", f->weights / params);
        put_number(&d, bytes, "weight_extras", f->extras / params);
        put_number(&d, bytes, "gradients", f->gradient_bytes / params);
        put_number(&d, bytes, "states", f->states / params);
        put_number(&d, bytes, "total", f->total / params);
        put_integer(&d, row, "total_bytes", (int64_t)(f->total + 0.5));
        if (plan->memory) put_flag(&d, row, "fits", fits(plan, f));
        if (plan->store) put_store(&d, put_object(&d, row, "store"), plan, f);
        char caveat[256];
        if (halfstep_recipe_caveat(f->recipe, caveat, sizeof caveat) == HALFSTEP_OK && *caveat)
            put_text(&d, row, "caveat", caveat);
    }
    return document_print(&d);
}

static void size_text(double bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 5) bytes /= 1024, unit++;
    snprintf(text, 32, "%.2f %s", bytes, units[unit]);
}

/* Prints what the file of each recipe takes, and what a step does with it. */
static void print_stores(const struct plan *plan, const struct forecast *list, int n, int width)
{
    printf("%-*s   on disk  in memory  read a step   written", width, "states in a file");
    if (plan->bandwidth > 0) printf("   seconds");
    if (plan->bandwidth > 0 || plan->step_time > 0) printf("  TB a day");
    printf("\n");
    for (int i = 0; i < n; i++) {
        const struct forecast *f = &list[i];
        char size[4][32];
        const double bytes[] = {2 * f->half, f->buffers, f->read, f->written};
        for (int k = 0; k < 4; k++) size_text(bytes[k], size[k]);
        printf("%-*s  %10s %10s %11s %10s", width, f->recipe, size[0], size[1], size[2], size[3]);
        if (plan->bandwidth > 0) printf(" %9.3g", disk_seconds(plan, f));
        if (plan->bandwidth > 0 || plan->step_time > 0) printf(" %9.3g", terabytes_a_day(plan, f));
        printf("\n");
    }
    printf(
        "\nThe file holds all twice, weights too: the last whole step, and the one that is being written. Its records\n"
        "take a few MiB more. States in memory are the pieces that are on their way.\n");
    printf("Without weights in the file (Python: halfstep.Store(path, weights=False)), their bytes are spared twice\n"
           "on the disk and once in each step.\n");
    printf("Rules with sums over all tensors read the file twice a step, those with sums over a tensor its large "
           "tensors.\n");
}

/* Prints a bar for each recipe, whose length is the memory of the recipe. A | marks the memory of --memory. */
static void print_bars(const struct plan *plan, const struct forecast *list, int n, int width)
{
    enum { WIDTH = 48, PARTS = 4 };
    const struct {
        const char *sign, *name;
        size_t bytes;
    } parts[PARTS] = {
        {"█", "weights", offsetof(struct forecast, weights)},
        {"▓", "extras", plan->store ? 0 : offsetof(struct forecast, extras)},
        {"▒", "gradients", offsetof(struct forecast, gradient_bytes)},
        {"░", "states", plan->store ? offsetof(struct forecast, buffers) : offsetof(struct forecast, states)}};
    int used[PARTS] = {0};
    char size[32];
    double longest = plan->memory ? (double)plan->memory : 1;
    for (int i = 0; i < n; i++)
        if (list[i].total > longest) longest = list[i].total;
    int limit = plan->memory ? (int)((double)plan->memory / longest * WIDTH + 0.5) : -1;
    for (int i = 0; i < n; i++) {
        const char *cells[WIDTH + 1] = {NULL};
        double sum = 0;
        int at = 0;
        for (int part = 0; part < PARTS; part++) {
            if (!parts[part].bytes) continue;
            double bytes = *(const double *)((const char *)&list[i] + parts[part].bytes);
            sum += bytes;
            used[part] |= bytes > 0;
            while (at < (int)(sum / longest * WIDTH + 0.5)) cells[at++] = parts[part].sign;
        }
        printf("%-*s  ", width, list[i].recipe);
        for (int cell = 0; cell < at || cell <= limit; cell++)
            printf("%s%s", cell == limit ? "|" : "", cell < at ? cells[cell] : cell < limit ? " " : "");
        printf("\n");
    }
    printf("%*s", width, "");
    for (int part = 0; part < PARTS; part++)
        if (used[part]) printf("  %s %s", parts[part].sign, parts[part].name);
    if (plan->memory) {
        size_text((double)plan->memory, size);
        printf("  | %s", size);
    }
    printf("\n\n");
}

/* Prints a line for each listed rule that does not store all states in the block format of a recipe. */
static void print_precise_states(const struct forecast *list, int n)
{
    for (int32_t row = 0; row < halfstep_rule_count(); row++) {
        const halfstep_rule_info info = rule_info(row);
        char text[200];
        precise_states_text(&info, text, sizeof text);
        int listed = 0;
        for (int i = 0; i < n && *text && !listed; i++) listed = recipe_rule(list[i].recipe) == row;
        if (listed) printf("%s: %s.\n", info.name, text);
    }
}

/* Returns the name of the format that replaces packed weights where blocks do not fit, or "" without memory. */
static const char *fallback_of(const char *format)
{
    static const struct lm_tensor vector = {.name = "vector", .ndim = 1, .rows = 1, .row_length = 1};
    char recipe[RECIPE_BYTES];
    halfstep_optimizer *decoder;
    const halfstep_tensor t = checkpoint_tensor(&vector, "f32");
    snprintf(recipe, sizeof recipe, "sgd/%s", format);
    int code = checkpoint_decoder(recipe, &t, &decoder);
    const char *name = code ? "" : format_info(slot_info(decoder, 0, HALFSTEP_SLOT_WEIGHT).format).name;
    halfstep_destroy(decoder);
    return name;
}

/* Prints a line for each listed format of packed weights. */
static void print_fallbacks(const struct forecast *list, int n)
{
    struct recipe_parts parts;
    for (int32_t row = 0; row < halfstep_format_count(); row++) {
        const halfstep_format_info format = format_info(row);
        int listed = 0;
        for (int i = 0; i < n && format.geometry == HALFSTEP_GEOMETRY_PACKED && !listed; i++) {
            recipe_split(list[i].recipe, &parts);
            listed = strcmp(parts.weight, format.name) == 0;
        }
        if (listed)
            printf("%s: the weights of vectors, and of rows with fewer than %d elements, are in %s.\n", format.name,
                   format.block, fallback_of(format.name));
    }
}

/* Prints what listed recipes are known to cost. Those that differ only in their weights share a line. */
static void print_caveats(const struct forecast *list, int n)
{
    char text[256], other[256];
    for (int i = 0; i < n; i++) {
        int first = 0;
        if (halfstep_recipe_caveat(list[i].recipe, text, sizeof text) != HALFSTEP_OK || !*text) continue;
        do halfstep_recipe_caveat(list[first].recipe, other, sizeof other);
        while (strcmp(text, other) && ++first < i);
        if (first == i) printf("%s.\n", text);
    }
}

static int print_table(const struct plan *plan, double params, const struct forecast *list, int n)
{
    int fitting = 0, width = plan->store ? 16 : 6;
    char size[32], lacking[32];
    for (int i = 0; i < n; i++)
        if ((int)strlen(list[i].recipe) > width) width = (int)strlen(list[i].recipe);
    printf("%.0f parameters%s%s. Bytes per parameter:\n\n", params, plan->release ? ", gradients released" : "",
           plan->store ? ", extras and states in a file" : "");
    printf("%-*s  weights   extra  gradients   states    total  %12s%s\n", width, "recipe", "in all",
           plan->memory ? "  fits" : "");
    for (int i = 0; i < n; i++) {
        const struct forecast *f = &list[i];
        printf("%-*s  %7.3f %7.3f  %4.3f %-4s %8.3f %8.3f  ", width, f->recipe, f->weights / params, f->extras / params,
               f->gradient_bytes / params, f->gradients, f->states / params, f->total / params);
        size_text(f->total, size);
        printf("%12s", size);
        if (plan->memory) printf("  %s", fits(plan, f) ? "yes" : "no");
        printf("\n");
        fitting += fits(plan, f);
    }
    printf("\n");
    if (n > 0) print_bars(plan, list, n, width);
    if (n > 0 && plan->store) print_stores(plan, list, n, width);
    if (plan->memory) {
        size_text((double)plan->memory, size);
        printf("%d of %d recipes fit into %s.", fitting, n, size);
        if (fitting == 0 && n > 0) {
            size_text(list[0].total - (double)plan->memory, lacking);
            printf(" The smallest lacks %s%s.", lacking, plan->release ? "" : "; --release may help");
        }
        printf("\n");
    }
    print_precise_states(list, n);
    print_fallbacks(list, n);
    print_caveats(list, n);
    printf("Activations need memory besides; it depends on batch and context, not on the recipe.\n");
    printf("Device code for GPUs: %s.\n", halfstep_device_code());
    if (!plan->recipes.n && !plan->all) printf("Other rules: --rule; other formats: --all; any recipes: --recipes.\n");
    return 0;
}

static int plan_all(struct args *args, void *options)
{
    const struct plan *plan = options;
    enum { CAPACITY = 1024 };
    char error[600];
    struct lm_config shape = {
        .width = (int)plan->width, .depth = (int)plan->depth, .heads = (int)plan->heads, .context = (int)plan->context};
    if (!plan->store && (plan->bandwidth > 0 || plan->step_time > 0))
        return usage_error("plan", "--%s needs --store", plan->bandwidth > 0 ? "bandwidth" : "step-time");
    if (args_given(args, "params") + args_given(args, "checkpoint") + args_given(args, "width") != 1)
        return usage_error("plan", "give the size of the model by one of --params, --checkpoint, --width");
    if (plan->checkpoint) {
        char note[600];
        int status = checkpoint_read_shape(plan->checkpoint, 0, &shape, note, sizeof note, error, sizeof error);
        if (status > 0)
            snprintf(error, sizeof error, "%.500s: there is neither a checkpoint nor a config.json", plan->checkpoint);
        if (status) return failure("plan", "%s", error);
    }
    if (plan->width && lm_config_check(&shape, error, sizeof error) != 0) return usage_error("plan", "%s", error);
    for (int i = plan->recipes.n ? 0 : -1; i < plan->recipes.n; i++) {
        const char *recipe = i < 0 ? plan->rule : plan->recipes.item[i];
        const halfstep_rule_info rule = rule_info(recipe_rule(recipe));
        if (rule.raw_gradient)
            return usage_error("plan", "--%s: %s follows weights that another optimizer trains; name a rule that does",
                               i < 0 ? "rule" : "recipes", rule.name);
        if (plan->release && rule.totals)
            return usage_error("plan", "--release: %s needs the gradients of all tensors before it steps any", recipe);
    }
    int shaped = !args_given(args, "params"), n = 0;
    double params = shaped ? (double)lm_parameter_count(&shape) : plan->params;
    struct forecast *list = calloc(CAPACITY, sizeof *list);
    if (!list) return failure("plan", "out of memory");
    for (; n < plan->recipes.n; n++)
        if (make_forecast(plan, shaped ? &shape : NULL, plan->recipes.item[n], &list[n])) {
            free(list);
            return failure("plan", "%s", halfstep_error_detail(NULL));
        }
    if (plan->recipes.n == 0) {
        struct listing listing = {plan, shaped ? &shape : NULL, list, 0, CAPACITY};
        list_recipes(&listing);
        n = listing.n;
    }
    qsort(list, (size_t)n, sizeof *list, by_size);
    int status = plan->json ? print_object(plan, params, list, n) : print_table(plan, params, list, n);
    free(list);
    return status;
}

const struct command plan_command = {
    .name = "plan",
    .usage = "--params N [--memory BYTES] [options]",
    .summary =
        "Forecasts the memory for weights, gradients and optimizer states under each recipe. Activations need memory "
        "besides; it depends on batch and context, not on the recipe. The models have no stacks of matrices: python -m "
        "halfstep plan FILE takes the shapes of any safetensors file.",
    .notes = "  halfstep plan --params 7e9 --memory 24G --release\n"
             "  halfstep plan --params 7e9 --memory 24G --store --bandwidth 3 --step-time 60\n",
    COMMAND_OPTIONS(option_rows, struct plan),
    .run = plan_all,
};
