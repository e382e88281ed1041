#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/model_files.h"
#include "trainer/run/run.h"

struct generate {
    const char *checkpoint, *prompt;
    int64_t bytes, threads;
    double temperature;
    uint64_t seed;
    int json;
};

#define AT(member) offsetof(struct generate, member)

static const struct option rows[] = {
    {"checkpoint", OPTION_STRING, AT(checkpoint), "PATH", NULL, 0, 0, OPTION_REQUIRED, NULL,
     "what train lm --init takes: a checkpoint of train lm, or a folder, file or index of safetensors with its "
     "config.json"},
    {"prompt", OPTION_STRING, AT(prompt), "TEXT", "", 0, 0, 0, NULL, "text to continue"},
    {"bytes", OPTION_INTEGER, AT(bytes), "N", "200", 0, 1 << 24, 0, NULL, "number of bytes to generate"},
    {"temperature", OPTION_NUMBER, AT(temperature), "X", "0.8", 0, 100, 0, NULL,
     "sampling temperature; 0: always the likeliest byte"},
    {"seed", OPTION_SEED, AT(seed), "N", "1", 0, 0, 0, NULL, "seed of the sampling"},
    {"threads", OPTION_INTEGER, AT(threads), "N", "0", 0, 1024, 0, NULL,
     "number of threads; 0: as many as there are processors"},
    OPTION_JSON(struct generate),
};

/* Returns 1 if the checkpoint's rule evaluates an average of the weights that it trains. Files of another program, NULL
 * here, say nothing of a rule. */
static int uses_averages(const halfstep_checkpoint *checkpoint)
{
    const char *recipe = halfstep_checkpoint_value(checkpoint, "recipe");
    return recipe && rule_info(recipe_rule(recipe)).average;
}

/* Loads the averages that the rule evaluates, in fp32. Returns 0, or -1 with one line in error. */
static int load_averages(const char *checkpoint, const struct lm_config *shape, struct lm_weight *weights, char *error,
                         size_t error_bytes)
{
    struct weight_source *source = weight_source_open(checkpoint, error, error_bytes);
    int bad = !source;
    for (int i = 0; !bad && i < lm_tensor_count(shape); i++) {
        struct lm_tensor tensor;
        lm_tensor_info(shape, i, &tensor);
        float *values = malloc((size_t)(tensor.rows * tensor.row_length) * sizeof *values);
        weights[i] = (struct lm_weight){values, LM_F32};
        if (!values) no_memory(error, error_bytes);
        bad = !values || weight_source_read(source, &tensor, values, error, error_bytes) != 0;
    }
    weight_source_close(source);
    return bad ? -1 : 0;
}

/* Loads the weights in the types in which they are stored. Returns 0, or -1 with one line in error. */
static int load_weights(const struct model_tensors *model, const struct lm_config *shape, struct lm_weight *weights,
                        char *error, size_t error_bytes)
{
    for (int i = 0; i < lm_tensor_count(shape); i++) {
        struct lm_tensor tensor;
        const struct model_part *part;
        uint64_t index;
        halfstep_safetensor_info info;
        lm_tensor_info(shape, i, &tensor);
        if (model_tensors_find(model, &tensor, &part, &index, &info, error, error_bytes) != 0) return -1;
        int dtype = model_tensor_dtype(part->path, &info, &tensor, error, error_bytes);
        if (dtype < 0) return -1;
        void *data = malloc(info.bytes);
        weights[i] = (struct lm_weight){data, dtype};
        if (!data) {
            no_memory(error, error_bytes);
            return -1;
        }
        if (halfstep_read_safetensor(part->file, index, 0, data, info.bytes, error, error_bytes) != HALFSTEP_OK)
            return -1;
    }
    return 0;
}

static int print_text(const struct generate *g, const uint8_t *text, size_t n)
{
    if (g->json) {
        struct document d;
        json_t *object = document_begin(&d);
        put_text(&d, object, "prompt", g->prompt);
        put_bytes(&d, object, "text", text, n);
        put_integer(&d, object, "bytes", (int64_t)n);
        return document_print(&d);
    }
    print_bytes((const uint8_t *)g->prompt, strlen(g->prompt));
    print_bytes(text, n);
    putchar('\n');
    return 0;
}

static int write_text(const struct generate *g, const struct lm_config *shape, const struct lm_weight *weights,
                      char *error, size_t error_bytes)
{
    struct lm_options options = {.compute = LM_F32, .gradients = LM_F32, .threads = (int)g->threads};
    uint8_t *text = malloc((size_t)g->bytes + 1);
    struct lm *model = text ? lm_create(shape, &options, error, error_bytes) : NULL;
    int status = model ? 0 : 1;
    if (!text) no_memory(error, error_bytes);
    if (model && lm_generate(model, weights, (const uint8_t *)g->prompt, strlen(g->prompt), g->temperature, g->seed,
                             text, (size_t)g->bytes) != 0) {
        snprintf(error, error_bytes, "%s", lm_error(model));
        status = 1;
    }
    if (status == 0) status = print_text(g, text, (size_t)g->bytes);
    lm_destroy(model);
    free(text);
    return status;
}

static int generate(struct args *args, void *options)
{
    const struct generate *g = options;
    (void)args;
    char error[1024] = "", note[600];
    struct model_files files = {0};
    struct model_tensors model = {NULL, 0, NULL};
    struct lm_config shape;
    struct lm_weight *weights = NULL;
    int status = 1, tensors = 0;
    int bad = model_files_find(g->checkpoint, 0, &files, error, sizeof error);
    if (!bad) bad = checkpoint_read_shape(g->checkpoint, 0, &shape, note, sizeof note, error, sizeof error);
    if (bad > 0)
        snprintf(error, sizeof error,
                 "%.300s has no config.json beside it, which says how many heads the model has; put it there, or make "
                 "a checkpoint by train lm --init",
                 g->checkpoint);
    if (!bad && note[0]) {
        plain_print(stderr, note);
        fputc('\n', stderr);
    }
    if (!bad) bad = model_tensors_open(files.model, &model, error, sizeof error);
    if (!bad) bad = model_tensors_check(&model, &shape, error, sizeof error);
    if (!bad) {
        tensors = lm_tensor_count(&shape);
        weights = calloc((size_t)tensors, sizeof *weights);
        if (!weights) no_memory(error, sizeof error);
        else if ((uses_averages(files.checkpoint) ? load_averages(g->checkpoint, &shape, weights, error, sizeof error)
                                                  : load_weights(&model, &shape, weights, error, sizeof error)) == 0)
            status = write_text(g, &shape, weights, error, sizeof error);
    }
    for (int i = 0; weights && i < tensors; i++) free((void *)weights[i].data);
    free(weights);
    model_tensors_close(&model);
    model_files_close(&files);
    return status && error[0] ? failure("generate", "%s", error) : status;
}

const struct command generate_command = {
    .name = "generate",
    .usage = "--checkpoint PATH [options]",
    .summary =
        "Continues a text with a trained language model. The model computes in fp32 from the stored weights, so every "
        "machine writes the same bytes.",
    .notes = "  halfstep generate --checkpoint run --prompt 'To be' --bytes 500\n",
    COMMAND_OPTIONS(rows, struct generate),
    .run = generate,
};
