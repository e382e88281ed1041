/* The sizes of a run's model: from options, from the files of --init, from the checkpoint of --resume. */
#include <stdio.h>

#include "trainer/files/checkpoint.h"
#include "trainer/run/run.h"

struct lm_config run_shape(const struct run_config *config)
{
    struct lm_config shape = {0};
    shape.width = (int)config->width;
    shape.depth = (int)config->depth;
    shape.heads = (int)config->heads;
    shape.context = (int)config->context;
    shape.intermediate = (int)config->intermediate;
    shape.rms_norm_eps = config->rms_norm_eps;
    shape.rope_theta = config->rope_theta;
    return shape;
}

static void take_numbers(struct run_config *config, const struct lm_config *shape)
{
    config->intermediate = shape->intermediate;
    config->rms_norm_eps = shape->rms_norm_eps;
    config->rope_theta = shape->rope_theta;
}

/* Completes the model of a safetensors file without config.json. The file defines all sizes but the number of heads,
 * rms_norm_eps and rope_theta. */
static int shape_without_config(struct args *args, struct run_config *config, char *note, size_t note_bytes,
                                char *error, size_t error_bytes)
{
    if (!args_given(args, "heads")) {
        snprintf(error, error_bytes,
                 "--heads is missing: --init %s has no config.json beside it; give the number of heads", config->init);
        return 2;
    }
    struct lm_config shape = run_shape(config);
    if (lm_config_check(&shape, error, error_bytes) != 0) return 2;
    snprintf(note, note_bytes,
             "note: --init %.300s has no config.json beside it: assuming %d heads, rms_norm_eps %g "
             "and rope_theta %g",
             config->init, shape.heads, shape.rms_norm_eps, shape.rope_theta);
    return 0;
}

int run_shape_from_init(struct args *args, struct run_config *config, char *error, size_t error_bytes)
{
    char note[800] = "";
    struct lm_config shape;
    int status = checkpoint_read_shape(config->init, args_given(args, "context") ? config->context : 0, &shape, note,
                                       sizeof note, error, error_bytes);
    if (status < 0) return 1;
    if (status > 0) {
        status = shape_without_config(args, config, note, sizeof note, error, error_bytes);
        if (status) return status;
    } else {
        const struct {
            const char *option;
            int64_t *value;
            int in_config;
        } sizes[] = {{"width", &config->width, shape.width},
                     {"depth", &config->depth, shape.depth},
                     {"heads", &config->heads, shape.heads}};
        for (int i = 0; i < COUNT_OF(sizes); i++) {
            if (args_given(args, sizes[i].option) && *sizes[i].value != sizes[i].in_config) {
                snprintf(error, error_bytes, "--%s is %lld, but the config.json of --init %s says %d; leave --%s out",
                         sizes[i].option, (long long)*sizes[i].value, config->init, sizes[i].in_config,
                         sizes[i].option);
                return 2;
            }
            *sizes[i].value = sizes[i].in_config;
        }
        config->context = shape.context;
        take_numbers(config, &shape);
    }
    if (note[0] && !(config->init_note = args_keep(args, note))) return no_memory(error, error_bytes);
    return 0;
}

int run_shape_resumed(struct run_config *config, char *error, size_t error_bytes)
{
    char note[600];
    struct lm_config shape;
    if (checkpoint_read_shape(config->resume_from, config->context, &shape, note, sizeof note, error, error_bytes) != 0)
        return 1;
    take_numbers(config, &shape);
    return 0;
}
