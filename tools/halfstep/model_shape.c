/* The shape of a model from the config.json beside its weights. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/io/json.h"
#include "checkpoint.h"
#include "trainer_file.h"

enum { NUMBERS = 8, WHOLE = 6 };

/* The numbers of a shape, the whole ones first. What else the file holds is passed over; 0 where a key is missing. */
static int parse(hstep_json *json, const char *const *keys, double *numbers)
{
    const char *key;
    if (!hstep_json_expect(json, '{')) return -1;
    if (hstep_json_take(json, '}')) return 0;
    do {
        int i = 0;
        if (!hstep_json_string(json, &key) || !hstep_json_expect(json, ':')) return -1;
        while (i < NUMBERS && strcmp(keys[i], key) != 0) i++;
        char first = hstep_json_peek(json);
        int number = first == '-' || (first >= '0' && first <= '9');
        if (!(i < NUMBERS && number ? hstep_json_real(json, &numbers[i]) : hstep_json_skip(json))) return -1;
    } while (hstep_json_take(json, ','));
    return hstep_json_expect(json, '}') && hstep_json_end(json) ? 0 : -1;
}

static int shape_of(const char *path, char *text, size_t bytes, struct lm_config *shape, char *error,
                    size_t error_bytes)
{
    static const char *const keys[NUMBERS] = {
        "vocab_size",        "hidden_size",  "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
        "intermediate_size", "rms_norm_eps", "rope_theta"};
    int *const values[WHOLE] = {&shape->vocab, &shape->width,   &shape->depth,
                                &shape->heads, &shape->context, &shape->intermediate};
    double numbers[NUMBERS] = {0};
    hstep_json json = {text, bytes, 0, NULL};
    memset(shape, 0, sizeof *shape);
    if (parse(&json, keys, numbers) != 0) {
        snprintf(error, error_bytes, "%s: config.json: byte %zu: %s", path, json.at,
                 json.problem ? json.problem : "malformed");
        return -1;
    }
    for (int i = 0; i < WHOLE; i++) {
        if (!(numbers[i] >= 1 && numbers[i] <= 1 << 24) || numbers[i] != (int)numbers[i]) {
            snprintf(error, error_bytes, "%s: config.json: no sensible \"%s\"", path, keys[i]);
            return -1;
        }
        *values[i] = (int)numbers[i];
    }
    shape->rms_norm_eps = numbers[WHOLE];
    shape->rope_theta = numbers[WHOLE + 1];
    char why[300];
    if (lm_config_check(shape, why, sizeof why) == 0) return 0;
    snprintf(error, error_bytes, "%s: config.json: %s", path, why);
    return -1;
}

int checkpoint_read_shape(const char *path, struct lm_config *shape, char *error, size_t error_bytes)
{
    halfstep_checkpoint *checkpoint;
    halfstep_open_options quick = {.struct_size = sizeof quick, .skip_contents = 1};
    size_t bytes;
    if (halfstep_open_checkpoint(&checkpoint, path, &quick, error, error_bytes) != HALFSTEP_OK) return -1;
    char *text = checkpoint_read_text(checkpoint, "config.json", &bytes, error, error_bytes);
    halfstep_close_checkpoint(checkpoint);
    if (!text) return -1;
    int bad = shape_of(path, text, bytes, shape, error, error_bytes);
    free(text);
    return bad;
}
