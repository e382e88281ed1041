/* convert --to checkpoint, optimizer, store: a whole optimizer in another form. */
#define HALFSTEP_ADVANCED
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep_io.h"

#include "cli/commands.h"
#include "common/args/args.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/store_file.h"
#include "trainer/files/trainer_file.h"

static const char to_checkpoint[] = "checkpoint", to_optimizer[] = "optimizer", to_store[] = "store";

const char *convert_whole_target(int32_t position)
{
    static const char *const names[] = {to_checkpoint, to_optimizer, to_store};
    return position < COUNT_OF(names) ? names[position] : NULL;
}

static int print_result(const char *path, const char *target, const halfstep_optimizer *optimizer, uint64_t step,
                        int json)
{
    const int32_t tensors = halfstep_tensor_count(optimizer);
    struct document d;
    if (json) {
        json_t *object = document_begin(&d);
        put_text(&d, object, "file", path);
        put_text(&d, object, "format", target);
        put_integer(&d, object, "step", (int64_t)step);
        put_integer(&d, object, "tensors", tensors);
        return document_print(&d);
    }
    plain_print(stdout, path);
    printf(": %d tensors with all states, at step %llu\n", tensors, (unsigned long long)step);
    return 0;
}

/* ---- From a file of states --------------------------------------------------------------------------------------- */

/* Saves the checkpoint of a run of train lm, which --resume continues. */
static int save_run(const struct store_file *file, const char *from, const char *to, const char *trainer, uint64_t step,
                    char *error, size_t error_bytes)
{
    struct lm_config shape;
    struct run_history history = {0};
    char note[600];
    const char *recipe = store_pairs_find(&file->about.metadata, "recipe");
    const char *past = store_pairs_find(&file->about.values, STORE_HISTORY);
    const halfstep_save_options options = {.struct_size = sizeof options, .step = step};
    int bad = checkpoint_read_shape(from, 0, &shape, note, sizeof note, error, error_bytes) != 0;
    if (!bad && past && history_read(&history, past) != 0)
        bad = snprintf(error, error_bytes, "%s: its history cannot be read", from) >= 0;
    const struct holding holding = {&shape, file->optimizer, file->weights, halfstep_tensor_count(file->optimizer)};
    if (!bad)
        bad = checkpoint_save(to, &options, &holding, recipe ? recipe : file->about.tensor[0].recipe, trainer, &history,
                              error, error_bytes) != 0;
    free(history.point);
    free(history.validation);
    return bad ? -1 : 0;
}

/* Saves a checkpoint with the two files that every program's has. */
static int save_files(const struct store_file *file, const char *to, uint64_t step, char *error, size_t error_bytes)
{
    halfstep_checkpoint_save *save;
    const halfstep_save_options options = {.struct_size = sizeof options, .step = step};
    if (halfstep_begin_checkpoint(&save, to, &options, error, error_bytes) != HALFSTEP_OK) return -1;
    if (halfstep_save_optimizer(save, file->optimizer, file->weights, NULL, error, error_bytes) == HALFSTEP_OK)
        return halfstep_commit_checkpoint(save, error, error_bytes) == HALFSTEP_OK ? 0 : -1;
    halfstep_abandon_checkpoint(save);
    return -1;
}

static int from_store(const char *from, const char *to, const char *target, int json)
{
    struct store_file file;
    char error[1024] = "";
    int bad = store_file_open(from, &file, error, sizeof error) != 0;
    const uint64_t step = file.about.info.steps;
    const char *trainer = bad ? NULL : store_pairs_find(&file.about.values, STORE_TRAINER);
    if (!bad && store_pairs_find(&file.about.values, STORE_MICRO_STEPS))
        bad = snprintf(error, sizeof error, "%s is in the middle of a step; go on with the run until a step is whole",
                       from) >= 0;
    if (bad) {
    } else if (target == to_optimizer) {
        bad = halfstep_write_optimizer(to, file.optimizer, file.weights, NULL, error, sizeof error) != HALFSTEP_OK;
    } else if (trainer) {
        bad = save_run(&file, from, to, trainer, step, error, sizeof error) != 0;
    } else {
        bad = save_files(&file, to, step, error, sizeof error) != 0;
    }
    if (bad && !error[0]) snprintf(error, sizeof error, "%s cannot be read", from);
    int status = bad ? failure("convert", "%s", error) : print_result(to, target, file.optimizer, step, json);
    store_file_close(&file);
    return status;
}

/* ---- From a checkpoint ------------------------------------------------------------------------------------------- */

/* A checkpoint on its way into a file of states. */
struct moving {
    halfstep_checkpoint *checkpoint;
    halfstep_safetensors *states; /* its optimizer.safetensors */
    struct lm_config shape;
    struct store_pairs metadata;
    halfstep_optimizer *optimizer;
    void **weights;
    halfstep_store *store;
    char *trainer, *config;
    char error[1024];
};

static int open_checkpoint(struct moving *m, const char *from)
{
    char note[600];
    size_t bytes;
    if (halfstep_open_checkpoint(&m->checkpoint, from, NULL, m->error, sizeof m->error) != HALFSTEP_OK) return -1;
    const char *states = halfstep_checkpoint_path(m->checkpoint, "optimizer.safetensors");
    m->trainer = checkpoint_read_text(m->checkpoint, STORE_TRAINER, &bytes, m->error, sizeof m->error);
    if (!states || !m->trainer) {
        snprintf(m->error, sizeof m->error,
                 "%s: --to store takes checkpoints of train lm; in Python, load_safetensors() of an optimizer with "
                 "store= reads others",
                 from);
        return -1;
    }
    m->config = checkpoint_read_text(m->checkpoint, STORE_CONFIG, &bytes, m->error, sizeof m->error);
    if (!m->config || checkpoint_read_shape(from, 0, &m->shape, note, sizeof note, m->error, sizeof m->error) != 0 ||
        halfstep_open_safetensors(&m->states, states, m->error, sizeof m->error) != HALFSTEP_OK)
        return -1;
    m->metadata.n = halfstep_safetensors_metadata_count(m->states);
    m->metadata.pair = calloc(m->metadata.n + 1, sizeof *m->metadata.pair);
    if (!m->metadata.pair) return -no_memory(m->error, sizeof m->error);
    for (size_t i = 0; i < m->metadata.n; i++) {
        struct store_pair *pair = &m->metadata.pair[i];
        halfstep_get_safetensors_metadata(m->states, i, &pair->key, &pair->value);
    }
    return 0;
}

static int make_store(struct moving *m, const char *from, const char *to)
{
    const int n = lm_tensor_count(&m->shape);
    struct lm_tensor *named = calloc((size_t)n, sizeof *named); /* holds the names */
    halfstep_tensor *tensors = calloc((size_t)n, sizeof *tensors);
    int bad = !named || !tensors ? no_memory(m->error, sizeof m->error) : 0;
    for (int i = 0; i < n && !bad; i++) {
        bad = lm_tensor_info(&m->shape, i, &named[i]) != 0;
        tensors[i] = checkpoint_tensor(&named[i], "f32");
    }
    if (!bad)
        bad =
            store_make_optimizer(&m->metadata, tensors, (size_t)n, from, &m->optimizer, m->error, sizeof m->error) != 0;
    free(named);
    free(tensors);
    if (bad) return -1;
    if (!(m->weights = store_make_weights(m->optimizer))) return -no_memory(m->error, sizeof m->error);
    return halfstep_store_create(to, m->optimizer, m->weights, NULL, &m->store, m->error, sizeof m->error) ==
                   HALFSTEP_OK
               ? 0
               : -1;
}

/* Fills the new file: states, then weights, then what train lm keeps beside them. */
static int fill_store(struct moving *m)
{
    struct run_history history = {0};
    struct text past = {0};
    const int n = lm_tensor_count(&m->shape);
    const struct holding holding = {&m->shape, m->optimizer, m->weights, n};
    int bad = checkpoint_load(m->checkpoint, &holding, &history, m->error, sizeof m->error) != 0;
    for (int i = 0; i < n && !bad; i++) {
        const uint64_t bytes = slot_info(m->optimizer, i, HALFSTEP_SLOT_WEIGHT).code_bytes;
        bad = halfstep_write_bytes(m->optimizer, i, HALFSTEP_SLOT_WEIGHT, 0, 0, bytes, m->weights[i]) != HALFSTEP_OK;
        if (bad) snprintf(m->error, sizeof m->error, "%s", halfstep_error_detail(m->optimizer));
    }
    history_write(&history, NULL, &past);
    const struct store_pair values[] = {
        {STORE_TRAINER, m->trainer}, {STORE_CONFIG, m->config}, {STORE_HISTORY, text_string(&past)}};
    for (int i = 0; i < COUNT_OF(values) && !bad; i++)
        bad = halfstep_store_set_value(m->store, values[i].key, values[i].value, m->error, sizeof m->error) !=
              HALFSTEP_OK;
    if (!bad && halfstep_flush(m->optimizer, m->weights) != HALFSTEP_OK) {
        snprintf(m->error, sizeof m->error, "%s", halfstep_error_detail(m->optimizer));
        bad = 1;
    }
    free(history.point);
    free(history.validation);
    text_free(&past);
    return bad ? -1 : 0;
}

static int from_checkpoint(const char *from, const char *to, int json)
{
    struct moving m = {0};
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    int bad = open_checkpoint(&m, from) != 0 || make_store(&m, from, to) != 0 || fill_store(&m) != 0;
    if (!bad) halfstep_get_checkpoint_info(m.checkpoint, &info);
    int status = bad ? failure("convert", "%s", m.error) : print_result(to, to_store, m.optimizer, info.step, json);
    if (bad && m.store) unlink(to);
    halfstep_store_close(m.store);
    if (m.optimizer) store_free_weights(m.optimizer, m.weights);
    halfstep_destroy(m.optimizer);
    free(m.metadata.pair);
    halfstep_close_safetensors(m.states);
    halfstep_close_checkpoint(m.checkpoint);
    free(m.trainer);
    free(m.config);
    return status;
}

int convert_whole(const char *from, const char *to, const char *target, int json)
{
    const int is_store = store_file_is(from);
    if (strcmp(target, to_store) == 0)
        return is_store ? failure("convert", "%s is a file of states already", from) : from_checkpoint(from, to, json);
    if (!is_store) return failure("convert", "%s is no file of states (--store); --to %s needs one", from, target);
    return from_store(from, to, strcmp(target, to_optimizer) == 0 ? to_optimizer : to_checkpoint, json);
}
