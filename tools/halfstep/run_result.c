#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "train.h"

/* ---- History ---------------------------------------------------------------------------------------------------------- */

static int grow(void **items, size_t *room, size_t n, size_t item_bytes)
{
    if (n < *room) return 0;
    size_t wanted = *room ? 2 * *room : 256;
    void *grown = realloc(*items, wanted * item_bytes);
    if (!grown) return -1;
    *items = grown;
    *room = wanted;
    return 0;
}

int history_add_point(struct run_history *history, const struct run_point *point)
{
    void *items = history->point;
    if (grow(&items, &history->point_room, history->n_points, sizeof *point) != 0) return -1;
    history->point = items;
    history->point[history->n_points++] = *point;
    return 0;
}

int history_add_validation(struct run_history *history, double step, double loss)
{
    void *items = history->validation;
    if (grow(&items, &history->validation_room, history->n_validations, sizeof *history->validation) != 0) return -1;
    history->validation = items;
    history->validation[history->n_validations++] = (struct run_validation){step, loss};
    return 0;
}

void run_result_free(struct run_result *result)
{
    free(result->history.point);
    free(result->history.validation);
    free(result->sample);
    memset(result, 0, sizeof *result);
}

/* ---- Bytes as text ------------------------------------------------------------------------------------------------------ */

/* Length of the UTF-8 character that begins here, or 0. */
static size_t utf8_length(const uint8_t *s, size_t n)
{
    if (s[0] < 0x80) return 1;
    size_t length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : s[0] >= 0xc2 ? 2 : 0;
    if (length == 0 || length > n || s[0] > 0xf4) return 0;
    for (size_t i = 1; i < length; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
        (s[0] == 0xf4 && s[1] > 0x8f))
        return 0;
    return length;
}

json_t *json_bytes(const uint8_t *bytes, size_t n)
{
    char *text = malloc(3 * n + 1);
    if (!text) return NULL;
    size_t used = 0;
    for (size_t i = 0; i < n;) {
        size_t length = utf8_length(bytes + i, n - i);
        if (length == 0) {
            memcpy(text + used, "\xef\xbf\xbd", 3);
            used += 3;
            i++;
        } else {
            memcpy(text + used, bytes + i, length);
            used += length;
            i += length;
        }
    }
    json_t *string = json_stringn(text, used);
    free(text);
    return string;
}

void print_bytes(const uint8_t *bytes, size_t n)
{
    if (!isatty(STDOUT_FILENO)) {
        fwrite(bytes, 1, n, stdout);
        return;
    }
    for (size_t i = 0; i < n;) {
        size_t length = utf8_length(bytes + i, n - i);
        int control = length == 1 && bytes[i] != '\n' && bytes[i] != '\t' && (bytes[i] < 0x20 || bytes[i] == 0x7f);
        /* The C1 controls, which some terminals obey, are U+0080 to U+009F. */
        if (length == 2 && bytes[i] == 0xc2 && bytes[i + 1] < 0xa0) control = 1;
        if (length == 0 || control) {
            printf("\\x%02x", bytes[i]);
            i++;
        } else {
            fwrite(bytes + i, 1, length, stdout);
            i += length;
        }
    }
}

/* ---- JSON -------------------------------------------------------------------------------------------------------------- */

json_t *json_double(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

int print_json(json_t *object)
{
    int bad = !object || json_dumpf(object, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(10)) != 0;
    if (!bad) putchar('\n');
    else fprintf(stderr, "halfstep: cannot write the results as JSON\n");
    json_decref(object);
    return bad;
}

json_t *run_result_json(const struct run_result *r)
{
    double n = r->params > 0 ? (double)r->params : 1;
    char hash[24];
    snprintf(hash, sizeof hash, "%016" PRIx64, r->state_hash);
    json_t *object = json_object(), *bytes = json_object(), *curve = json_array();
    json_object_set_new(bytes, "weights", json_double((double)r->weight_bytes / n));
    json_object_set_new(bytes, "gradients", json_double((double)r->gradient_bytes / n));
    json_object_set_new(bytes, "states", json_double((double)r->state_bytes / n));
    json_object_set_new(bytes, "total", json_double((double)(r->weight_bytes + r->gradient_bytes + r->state_bytes) / n));
    for (size_t i = 0; i < r->history.n_validations; i++)
        json_array_append_new(curve, json_pack("{s:I,s:o}", "step", (json_int_t)r->history.validation[i].step, "val_loss",
                                               json_double(r->history.validation[i].loss)));

    json_object_set_new(object, "recipe", json_string(r->recipe));
    json_object_set_new(object, "gradients", json_string(r->gradients));
    json_object_set_new(object, "compute", json_string(r->compute));
    json_object_set_new(object, "release", json_boolean(r->release));
    json_object_set_new(object, "micro_steps", json_integer(r->micro_steps));
    json_object_set_new(object, "accumulator", r->accumulator[0] ? json_string(r->accumulator) : json_null());
    /* A seed above 2^63 - 1 has no place in a JSON integer. */
    if (r->seed <= INT64_MAX) json_object_set_new(object, "seed", json_integer((json_int_t)r->seed));
    else json_object_set_new(object, "seed", json_sprintf("%" PRIu64, r->seed));
    json_object_set_new(object, "steps", json_integer(r->steps));
    json_object_set_new(object, "first_step", json_integer(r->first_step));
    json_object_set_new(object, "params", json_integer(r->params));
    json_object_set_new(object, "train_loss", json_double(r->train_loss));
    json_object_set_new(object, "val_loss", json_double(r->val_loss));
    json_object_set_new(object, "tokens_per_s", json_double(r->tokens_per_s));
    json_object_set_new(object, "seconds", json_double(r->seconds));
    json_object_set_new(object, "optimizer_seconds", json_double(r->optimizer_seconds));
    json_object_set_new(object, "skipped_steps", json_integer((json_int_t)r->skipped_steps));
    json_object_set_new(object, "bytes_per_param", bytes);
    json_object_set_new(object, "peak_gradient_bytes", json_integer((json_int_t)r->peak_gradient_bytes));
    json_object_set_new(object, "activation_bytes", json_integer((json_int_t)r->activation_bytes));
    json_object_set_new(object, "tensors_fell_back", json_integer(r->fell_back));
    json_object_set_new(object, "weights_changed_percent", json_double(100 * r->weights_changed));
    json_object_set_new(object, "isa", json_string(r->isa));
    json_object_set_new(object, "threads", json_integer(r->threads));
    json_object_set_new(object, "state_hash", json_string(hash));
    json_object_set_new(object, "checkpoint", r->checkpoint[0] ? json_string(r->checkpoint) : json_null());
    json_object_set_new(object, "validation", curve);
    if (r->sample) json_object_set_new(object, "sample", json_bytes(r->sample, r->sample_bytes));
    return object;
}
