#define HALFSTEP_ADVANCED
#include "trainer/run/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/ranks/ranks.h"

int run_fail(struct run *run, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(run->error, run->error_bytes, format, arguments);
    va_end(arguments);
    return 1;
}

int run_fail_in(struct run *run, const halfstep_optimizer *optimizer)
{
    return run_fail(run, "%s", halfstep_error_detail(optimizer));
}

struct lm_tensor run_tensor(const struct run *run, int tensor)
{
    struct lm_tensor info;
    lm_tensor_info(&run->shape, tensor, &info);
    return info;
}

int run_set_hyper(struct run *run, int32_t group, const char *name, double value, const char *option)
{
    if (halfstep_set_hyper(run->optimizer, group, name, value) == HALFSTEP_OK) return 0;
    run_fail(run, "--%s: %s", option, halfstep_error_detail(run->optimizer));
    return 2;
}

static const char *suggest_hyper(void *context, int index)
{
    halfstep_hyper_info info = {.struct_size = sizeof info};
    return halfstep_get_hyper_info(*(const int32_t *)context, index, &info) == HALFSTEP_OK ? info.name : NULL;
}

static int set_listed_hypers(struct run *run)
{
    for (int i = 0; i < run->config->hyper.n; i++) {
        char name[96];
        double value = 0;
        /* args_set() has checked that it reads NAME=VALUE, and that VALUE is a number or one of the names. */
        const char *item = run->config->hyper.item[i];
        size_t n = strcspn(item, "=");
        snprintf(name, sizeof name, "%.*s", (int)n, item);
        int named = parse_number(item + n + 1, &value) != 0;
        int known = 0;
        const char *each;
        for (int32_t k = 0; !known && (each = suggest_hyper(&run->rule, k)) != NULL; k++)
            known = strcmp(each, name) == 0;
        if (!known) {
            const char *near = args_suggest(name, suggest_hyper, &run->rule);
            run_fail(run, "--hyper %s: %s has no such hyper-parameter%s%s%s", name, rule_name(run->rule),
                     near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
            return 2;
        }
        if (named && halfstep_set_choice(run->optimizer, HALFSTEP_ALL_GROUPS, name, item + n + 1) != HALFSTEP_OK) {
            run_fail_in(run, run->optimizer);
            return 2;
        }
        int status = named ? 0 : run_set_hyper(run, HALFSTEP_ALL_GROUPS, name, value, name);
        if (status) return status;
    }
    return 0;
}

static int set_group(struct run *run, int32_t group, double lr, double weight_decay)
{
    const struct run_config *c = run->config;
    int status = run_set_hyper(run, group, "lr", lr, lr == c->lr ? "lr" : "adamw-lr");
    if (!status) status = run_set_hyper(run, group, "weight_decay", weight_decay, "weight-decay");
    if (!status) status = run_set_hyper(run, group, "warmup_steps", (double)c->warmup, "warmup");
    if (!status) status = run_set_hyper(run, group, "total_steps", (double)c->steps, "steps");
    if (!status) status = run_set_hyper(run, group, "final_fraction", c->final_lr, "final-lr");
    if (status) return status;
    if (halfstep_set_choice(run->optimizer, group, "schedule", c->schedule) != HALFSTEP_OK ||
        halfstep_set_choice(run->optimizer, group, "decay_schedule", c->decay_schedule) != HALFSTEP_OK ||
        halfstep_set_choice(run->optimizer, group, "decay", c->decay) != HALFSTEP_OK) {
        run_fail_in(run, run->optimizer);
        return 2;
    }
    double factor;
    if (halfstep_schedule_factor(c->schedule, 0, (double)c->warmup, (double)c->steps, c->final_lr, 1, 0, &factor) !=
        HALFSTEP_OK) {
        run_fail(run, "--warmup %lld is above --steps %lld, so --schedule %s would never reach --lr",
                 (long long)c->warmup, (long long)c->steps, c->schedule);
        return 2;
    }
    return 0;
}

/* Returns the gradient format with the same codes as an accumulator. */
static const char *stored_as(const char *accumulator)
{
    if (strcmp(accumulator, "tree") == 0) return "f32";
    return gradient_format_of(format_named(accumulator).code_dtype);
}

int run_add_tensors(struct run *run)
{
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor tensor = run_tensor(run, i);
        int32_t index;
        struct rows rows = ranks_rows(run, i, run->rank);
        halfstep_tensor t =
            checkpoint_tensor(&tensor, run->adds_up ? stored_as(run->config->accumulator) : run->config->gradients);
        t.group = tensor.is_end ? run->ends : tensor.ndim >= 2 ? run->decayed : run->plain;
        t.first_row = rows.first;
        t.n_rows = rows.n;
        t.n_columns = tensor.row_length;
        if (halfstep_add_tensor(run->optimizer, &t, &index) != HALFSTEP_OK || index != i)
            return run_fail(run, "%s: %s", tensor.name, halfstep_error_detail(run->optimizer));
    }
    return 0;
}

static int check_rule(struct run *run)
{
    run->rule = recipe_rule(run->config->recipe);
    const halfstep_rule_info rule = rule_info(run->rule);
    if (rule.raw_gradient) {
        run_fail(run, "--recipe: %s follows weights that another optimizer trains; choose a rule that trains them",
                 rule.name);
        return 2;
    }
    if (run->config->adamw_lr > 0 && strcmp(rule.name, "muon") != 0) {
        run_fail(run, "--adamw-lr: %s steps all tensors; only muon leaves some to AdamW", rule.name);
        return 2;
    }
    run->has_average = rule.average;
    run->result->tensors_skip = run->config->release || strcmp(run->config->scan, "per-tensor") == 0;
    return 0;
}

/* Makes the recipe of AdamW with the formats of muon, whose states have the same roles. */
static void recipe_of_rest(const char *recipe, char rest[RECIPE_BYTES + 8])
{
    snprintf(rest, RECIPE_BYTES + 8, "adamw%s", recipe + strcspn(recipe, "/"));
}

int run_create_optimizer(struct run *run)
{
    const struct run_config *c = run->config;
    int status = check_rule(run);
    if (status) return status;
    halfstep_options options = {.struct_size = sizeof options, .threads = run->threads, .seed = c->seed};
    int code = halfstep_create(&options, &run->optimizer);
    if (code != HALFSTEP_OK) return run_fail(run, "cannot create an optimizer: %s", halfstep_strerror(code));
    const int splits = c->adamw_lr > 0;
    const double rest_lr = splits ? c->adamw_lr : c->lr;
    char rest[RECIPE_BYTES + 8];
    if (splits) recipe_of_rest(c->recipe, rest);
    if ((code = halfstep_add_group(run->optimizer, c->recipe, &run->decayed)) != HALFSTEP_OK ||
        (code = halfstep_add_group(run->optimizer, splits ? rest : c->recipe, &run->plain)) != HALFSTEP_OK ||
        (splits && (code = halfstep_add_group(run->optimizer, rest, &run->ends)) != HALFSTEP_OK)) {
        run_fail(run, "--recipe: %s", halfstep_error_detail(run->optimizer));
        return code == HALFSTEP_ERROR_MEMORY ? 1 : 2;
    }
    if (!splits) run->ends = run->decayed;
    status = set_group(run, run->decayed, c->lr, c->weight_decay);
    if (!status) status = set_group(run, run->plain, rest_lr, 0);
    if (!status && splits) status = set_group(run, run->ends, rest_lr, c->weight_decay);
    if (!status) status = set_listed_hypers(run);
    /* With release, set_release_scale() clips by the gradient scale. */
    if (!status && !c->release) status = run_set_hyper(run, HALFSTEP_ALL_GROUPS, "clip_norm", c->clip, "clip");
    if (!status) status = run_set_hyper(run, HALFSTEP_ALL_GROUPS, "gradient_scale", 1 / c->loss_scale, "loss-scale");
    if (!status && halfstep_set_choice(run->optimizer, HALFSTEP_ALL_GROUPS, "generator", c->generator) != HALFSTEP_OK) {
        run_fail(run, "--generator: %s", halfstep_error_detail(run->optimizer));
        return 2;
    }
    if (!status && halfstep_set_choice(run->optimizer, HALFSTEP_ALL_GROUPS, "scan", c->scan) != HALFSTEP_OK) {
        run_fail(run, "--scan: %s", halfstep_error_detail(run->optimizer));
        return 2;
    }
    return status;
}

/* Fails if the rule or a setting cannot add up the gradients of micro-steps in its states. Tries one micro-step with an
 * optimizer of two elements, one in each group, so that the error comes before training. */
static int check_accumulation(struct run *run)
{
    static const float zero = 0;
    static const void *const gradients[] = {&zero, &zero};
    struct run trial = {.config = run->config,
                        .result = run->result,
                        .error = run->error,
                        .error_bytes = run->error_bytes,
                        .threads = 1};
    if (run->adds_up || run->config->micro_steps == 1) return 0;
    int status = run_create_optimizer(&trial), code = HALFSTEP_OK;
    for (int i = 0; i < 2 && !status && code == HALFSTEP_OK; i++) {
        int32_t index;
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = i ? trial.plain : trial.decayed,
                             .name = i ? "norms" : "matrices",
                             .ndim = 1,
                             .rows = 1,
                             .row_length = 1,
                             .gradient = "f32"};
        code = halfstep_add_tensor(trial.optimizer, &t, &index);
    }
    if (!status && code == HALFSTEP_OK) code = halfstep_allocate_states(trial.optimizer);
    const halfstep_call call = {.struct_size = sizeof call, .micro = 1, .gradients = gradients};
    if (!status && code == HALFSTEP_OK) code = halfstep_run(trial.optimizer, &call);
    if (!status && code != HALFSTEP_OK) {
        run_fail(run, "--accumulator states: %s", halfstep_error_detail(trial.optimizer));
        status = code == HALFSTEP_ERROR_MEMORY ? 1 : 2;
    }
    halfstep_destroy(trial.optimizer);
    return status;
}

int run_allocate(struct run *run, int32_t slot, size_t stagger, unsigned char **memory, void **pointers,
                 uint64_t *bytes)
{
    const halfstep_optimizer *sizes = run->whole ? run->whole : run->optimizer;
    uint64_t total = stagger, held = 0;
    for (int pass = 0; pass < 2; pass++) {
        uint64_t at = stagger;
        for (int i = 0; i < run->tensors; i++) {
            const halfstep_slot_info info = slot_info(sizes, i, slot);
            if (pass) pointers[i] = *memory + at;
            else held += info.code_bytes;
            at += (info.code_bytes + 63) / 64 * 64;
        }
        total = at;
        if (pass) break;
        *memory = aligned_alloc(64, total ? total : 64);
        if (!*memory) return run_fail(run, "out of memory: %llu bytes", (unsigned long long)total);
        memset(*memory, 0, total);
    }
    *bytes = held;
    return 0;
}

int run_initialize(struct run *run)
{
    if (run->config->init) {
        if (checkpoint_init(run->config->init, &run->holding, run->error, run->error_bytes) != 0) return 1;
        if (run->config->init_note && run->rank == 0) run_tell(run, run->config->init_note);
        return 0;
    }
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor tensor = run_tensor(run, i);
        float *values = malloc((size_t)(tensor.rows * tensor.row_length) * sizeof *values);
        if (!values) return run_fail(run, "out of memory");
        lm_init_tensor(&run->shape, i, run->config->seed, values);
        struct rows own = ranks_rows(run, i, run->rank);
        int code = halfstep_write_slot(run->optimizer, i, HALFSTEP_SLOT_WEIGHT, run->own_weights[i], 0, own.n,
                                       values + own.first * tensor.row_length);
        free(values);
        if (code != HALFSTEP_OK) return run_fail(run, "%s: %s", tensor.name, halfstep_error_detail(run->optimizer));
    }
    return 0;
}

static int build_model(struct run *run)
{
    const struct run_config *c = run->config;
    struct lm_options options = {.batch = (int)c->batch,
                                 .training = 1,
                                 .release = run->hands_out,
                                 .threads = run->threads,
                                 .compute = strcmp(c->compute, "f32") == 0 ? LM_F32 : LM_BF16};
    options.gradients = run->gradient_dtype;
    run->model = lm_create(&run->shape, &options, run->error, run->error_bytes);
    return run->model ? 0 : 1;
}

int run_build(struct run *run)
{
    const struct run_config *c = run->config;
    struct run_result *result = run->result;
    if (c->micro_steps == 1 && c->accumulator) {
        run_fail(run, "--accumulator %s: there is nothing to add up without --micro-steps N", c->accumulator);
        return 2;
    }
    run->shape = run_shape(c);
    run->adds_up = run_adds_up(c);
    run->by_tree = run->adds_up && strcmp(c->accumulator, "tree") == 0;
    run->hands_out = c->release || run->adds_up;
    if (lm_config_check(&run->shape, run->error, run->error_bytes) != 0) return 2;
    if (ranks_check(run) != 0) return 2;
    run->tensors = lm_tensor_count(&run->shape);
    run->threads = ranks_threads(c);
    size_t n = (size_t)run->tensors;
    run->weights = calloc(n, sizeof *run->weights);
    run->gradients = calloc(n, sizeof *run->gradients);
    run->model_weights = calloc(n, sizeof *run->model_weights);
    run->own_weights = calloc(n, sizeof *run->own_weights);
    run->losses = calloc((size_t)(c->micro_steps + run->ranks), sizeof *run->losses);
    run->tokens = malloc((size_t)(c->batch * c->micro_steps) * ((size_t)c->context + 1));
    if (!run->weights || !run->gradients || !run->model_weights || !run->own_weights || !run->losses || !run->tokens)
        return run_fail(run, "out of memory");
    int status = run_create_optimizer(run);
    if (!status) status = ranks_open(run);
    if (!status) status = run_add_tensors(run);
    if (!status && halfstep_allocate_states(run->optimizer) != HALFSTEP_OK) status = run_fail_in(run, run->optimizer);
    if (!status) status = check_accumulation(run);
    if (status) return status;
    run->gradient_dtype = weight_dtype(halfstep_format_find(c->gradients));
    status = run_allocate(run, HALFSTEP_SLOT_WEIGHT, 0, &run->weight_memory, run->weights, &result->weight_bytes);
    if (!status && run->by_tree) status = run_tree_open(run);
    else if (!status && (run->adds_up || !run->hands_out))
        status = run_allocate(run, HALFSTEP_SLOT_GRADIENT, 1088, &run->gradient_memory, run->gradients,
                              &result->gradient_bytes);
    if (status) return status;
    int64_t piece = NORM_PIECE;
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor tensor = run_tensor(run, i);
        const halfstep_slot_info info = slot_info(run->optimizer, i, HALFSTEP_SLOT_WEIGHT);
        run->model_weights[i] = (struct lm_weight){run->weights[i], weight_dtype(info.format)};
        run->own_weights[i] = ranks_own(run, i, run->weights[i], run->model_weights[i].dtype);
        if (tensor.row_length > piece) piece = tensor.row_length;
    }
    run->scratch = malloc((size_t)piece * sizeof *run->scratch);
    if (!run->scratch) return run_fail(run, "out of memory");
    run->holding = (struct holding){&run->shape, run->optimizer, run->own_weights, run->tensors};
    uint64_t extras, states;
    halfstep_memory(run->optimizer, NULL, NULL, &extras, &states, &result->fell_back);
    result->weight_bytes += extras;
    result->state_bytes = states;
    return build_model(run);
}

void run_dismantle(struct run *run)
{
    lm_destroy(run->model);
    run_tree_close(run);
    ranks_close(run);
    halfstep_destroy(run->whole);
    halfstep_destroy(run->optimizer);
    free(run->weight_memory);
    free(run->gradient_memory);
    free(run->weights);
    free(run->gradients);
    free(run->model_weights);
    free(run->own_weights);
    free(run->losses);
    free(run->tokens);
    free(run->scratch);
}
