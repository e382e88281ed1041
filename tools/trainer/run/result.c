#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io/json.h"
#include "trainer/run/run.h"

/* ---- History ----------------------------------------------------------------------------------------------------- */

static int grow(void **items, size_t *capacity, size_t n, size_t item_bytes)
{
    if (n < *capacity) return 0;
    size_t wanted = *capacity ? 2 * *capacity : 256;
    void *grown = realloc(*items, wanted * item_bytes);
    if (!grown) return -1;
    *items = grown;
    *capacity = wanted;
    return 0;
}

int history_add_point(struct run_history *history, const struct run_point *point)
{
    void *items = history->point;
    if (grow(&items, &history->point_capacity, history->n_points, sizeof *point) != 0) return -1;
    history->point = items;
    history->point[history->n_points++] = *point;
    return 0;
}

int history_add_validation(struct run_history *history, double step, double loss)
{
    void *items = history->validation;
    if (grow(&items, &history->validation_capacity, history->n_validations, sizeof *history->validation) != 0)
        return -1;
    history->validation = items;
    history->validation[history->n_validations++] = (struct run_validation){step, loss};
    return 0;
}

void run_result_free(struct run_result *result)
{
    free(result->history.point);
    free(result->history.validation);
    free(result->sample);
    for (size_t i = 0; i < result->n_notes; i++) free(result->note[i]);
    free(result->note);
    memset(result, 0, sizeof *result);
}

int run_result_note(struct run_result *result, const char *note)
{
    for (size_t i = 0; i < result->n_notes; i++)
        if (strcmp(result->note[i], note) == 0) return 0;
    char **grown = realloc(result->note, (result->n_notes + 1) * sizeof *grown), *copy = strdup(note);
    if (grown) result->note = grown;
    if (grown && copy) result->note[result->n_notes++] = copy;
    else free(copy);
    /* Out of memory: the note counts as new, because printing it twice is better than losing it. */
    return 1;
}

/* Reads VmHWM. On Linux getrusage() would include the memory of the parent before exec(). */
uint64_t process_peak_bytes(void)
{
#ifdef __APPLE__
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (uint64_t)usage.ru_maxrss : 0;
#else
    unsigned long long kib = 0;
    char line[128];
    FILE *file = fopen("/proc/self/status", "r");
    while (file && !kib && fgets(line, sizeof line, file)) sscanf(line, "VmHWM: %llu kB", &kib);
    if (file) fclose(file);
    return (uint64_t)kib * 1024;
#endif
}

/* ---- Bytes as text ----------------------------------------------------------------------------------------------- */

void print_bytes(const uint8_t *bytes, size_t n)
{
    if (!isatty(STDOUT_FILENO)) {
        fwrite(bytes, 1, n, stdout);
        return;
    }
    for (size_t i = 0; i < n;) {
        uint32_t number = 0;
        size_t length = hstep_utf8((const char *)bytes + i, n - i, &number);
        if (length && (hstep_is_plain(number) || number == '\n' || number == '\t')) {
            fwrite(bytes + i, 1, length, stdout);
            i += length;
        } else {
            printf("\\x%02x", bytes[i++]);
        }
    }
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

uint64_t run_held_bytes(const struct run_result *r) { return r->weight_bytes + r->gradient_bytes + r->state_bytes; }

void run_result_document(struct document *d, const struct run_result *r)
{
    double n = r->params > 0 ? (double)r->params : 1;
    char text[32];
    json_t *object = document_begin(d);
    put_text(d, object, "recipe", r->recipe);
    put_text(d, object, "gradients", r->gradients);
    put_text(d, object, "compute", r->compute);
    put_flag(d, object, "release", r->release);
    put_integer(d, object, "micro_steps", r->micro_steps);
    if (r->accumulator[0]) put_text(d, object, "accumulator", r->accumulator);
    else put_null(d, object, "accumulator");
    put_seed(d, object, r->seed);
    put_integer(d, object, "steps", r->steps);
    put_integer(d, object, "first_step", r->first_step);
    put_integer(d, object, "params", r->params);
    put_number(d, object, "train_loss", r->train_loss);
    put_number(d, object, "val_loss", r->val_loss);
    put_flag(d, object, "diverged", r->diverged || (r->history.n_validations && !isfinite(r->val_loss)));
    put_number(d, object, "tokens_per_s", r->tokens_per_s);
    put_number(d, object, "seconds", r->seconds);
    put_number(d, object, "optimizer_seconds", r->optimizer_seconds);
    put_integer(d, object, "skipped_steps", (int64_t)r->skipped_steps);
    json_t *bytes = put_object(d, object, "bytes_per_param");
    put_number(d, bytes, "weights", (double)r->weight_bytes / n);
    put_number(d, bytes, "gradients", (double)r->gradient_bytes / n);
    put_number(d, bytes, "states", (double)r->state_bytes / n);
    put_number(d, bytes, "total", (double)run_held_bytes(r) / n);
    put_integer(d, object, "peak_gradient_bytes", (int64_t)r->peak_gradient_bytes);
    put_integer(d, object, "activation_bytes", (int64_t)r->activation_bytes);
    if (r->peak_process_bytes) put_integer(d, object, "peak_process_bytes", (int64_t)r->peak_process_bytes);
    if (r->data_files) {
        put_integer(d, object, "data_files", (int64_t)r->data_files);
        put_integer(d, object, "data_bytes", (int64_t)r->data_bytes);
    }
    put_integer(d, object, "tensors_fell_back", r->fell_back);
    put_number(d, object, "weights_changed_percent", 100 * r->weights_changed);
    put_text(d, object, "isa", r->isa);
    put_integer(d, object, "threads", r->threads);
    put_integer(d, object, "ranks", r->ranks > 0 ? r->ranks : 1);
    put_integer(d, object, "received_bytes", (int64_t)r->job_received);
    snprintf(text, sizeof text, "%016" PRIx64, r->state_hash);
    put_text(d, object, "state_hash", text);
    if (r->checkpoint[0]) put_text(d, object, "checkpoint", r->checkpoint);
    else put_null(d, object, "checkpoint");
    json_t *notes = put_array(d, object, "notes");
    for (size_t i = 0; i < r->n_notes; i++) put_text(d, notes, NULL, r->note[i]);
    json_t *curve = put_array(d, object, "validation");
    for (size_t i = 0; i < r->history.n_validations; i++) {
        json_t *point = put_object(d, curve, NULL);
        put_integer(d, point, "step", (int64_t)r->history.validation[i].step);
        put_number(d, point, "val_loss", r->history.validation[i].loss);
    }
    if (r->sample) put_bytes(d, object, "sample", r->sample, r->sample_bytes);
}
