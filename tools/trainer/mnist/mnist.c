#include "trainer/mnist/mnist.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/interrupt.h"
#include "common/paths.h"
#include "common/text.h"
#include "trainer/products/rows.h"
#include "trainer/models/cnn.h"
#include "trainer/run/internal.h"

enum { TEST_BATCH = 1000 };

struct mnist_run {
    struct run run; /* shared with train lm; the fields of the language model stay empty */
    const struct mnist_data *data;
    struct mnist_result *result;
    struct cnn_config shape;
    struct cnn *model;
    uint32_t *order;               /* order of the training images in this epoch, or of the test images */
    int weight_dtype[CNN_TENSORS]; /* type of the codes, -1 if they are packed or need their extra codes */
    int has_trained_weights;       /* the model holds the trained weights, not their average */
    int64_t epoch;
    double loss_sum; /* sum over this epoch's images so far */
    int64_t images, images_in_all;
};

/* ---- Building ---------------------------------------------------------------------------------------------------- */

static halfstep_tensor describe(const struct mnist_run *m, int tensor, int32_t group, const char *gradient)
{
    struct cnn_tensor info;
    cnn_tensor_info(&m->shape, tensor, &info);
    return (halfstep_tensor){.struct_size = sizeof(halfstep_tensor),
                             .group = group,
                             .name = info.name,
                             .ndim = info.ndim,
                             .rows = info.rows,
                             .row_length = info.row_length,
                             .gradient = gradient};
}

static int add_tensors(struct mnist_run *m)
{
    struct run *run = &m->run;
    for (int i = 0; i < run->tensors; i++) {
        int32_t index;
        const halfstep_tensor t = describe(m, i, run->decayed, run->config->gradients);
        if (halfstep_add_tensor(run->optimizer, &t, &index) != HALFSTEP_OK || index != i)
            return run_fail(run, "%s: %s", t.name, halfstep_error_detail(run->optimizer));
    }
    if (halfstep_allocate_states(run->optimizer) == HALFSTEP_OK) return 0;
    return run_fail_in(run, run->optimizer);
}

/* Sets the first weights. */
static int initialize(struct mnist_run *m)
{
    struct run *run = &m->run;
    for (int i = 0; i < run->tensors; i++) {
        struct cnn_tensor info;
        cnn_tensor_info(&m->shape, i, &info);
        float *values = cnn_weights(m->model, i);
        cnn_init_tensor(&m->shape, i, run->config->seed, values);
        if (halfstep_write_slot(run->optimizer, i, HALFSTEP_SLOT_WEIGHT, run->weights[i], 0, info.rows, values))
            return run_fail(run, "%s: %s", info.name, halfstep_error_detail(run->optimizer));
        const halfstep_slot_info slot = slot_info(run->optimizer, i, HALFSTEP_SLOT_WEIGHT);
        m->weight_dtype[i] = weight_dtype(slot.format);
        if (slot.extra_bytes || m->weight_dtype[i] == LM_PACKED) m->weight_dtype[i] = -1;
    }
    return 0;
}

static int open_log(struct mnist_run *m)
{
    struct run *run = &m->run;
    hstep_buffer header = {0};
    const halfstep_rule_info rule = rule_info(run->rule);
    hstep_append_format(
        &header, "epoch,step,train_loss,test_loss,test_accuracy,lr,gradient_norm,images_per_s,seconds,skipped_steps");
    for (int i = 0; i < run->tensors; i++) {
        struct cnn_tensor info;
        cnn_tensor_info(&m->shape, i, &info);
        for (int s = 0; s < rule.scalars; s++) hstep_append_format(&header, ",%s/%s", info.name, rule.scalar_name[s]);
    }
    if (header.failed) run_fail(run, "out of memory");
    else run->log = log_create(run->config->log, header.data, run->error, run->error_bytes);
    text_free(&header);
    return run->log ? 0 : 1;
}

static int build(struct mnist_run *m)
{
    struct run *run = &m->run;
    const struct run_config *c = run->config;
    int64_t most = m->data->train.n > m->data->test.n ? m->data->train.n : m->data->test.n;
    m->shape = (struct cnn_config){.side = m->data->train.side};
    if (cnn_config_check(&m->shape, run->error, run->error_bytes) != 0) return 1;
    run->tensors = CNN_TENSORS;
    run->threads = c->threads ? (int)c->threads : halfstep_default_threads();
    run->weights = calloc(CNN_TENSORS, sizeof *run->weights);
    run->gradients = calloc(CNN_TENSORS, sizeof *run->gradients);
    run->scratch = malloc(NORM_PIECE * sizeof *run->scratch);
    m->order = malloc((size_t)most * sizeof *m->order);
    if (!run->weights || !run->gradients || !run->scratch || !m->order) return run_fail(run, "out of memory");
    int status = run_create_optimizer(run);
    if (!status) status = add_tensors(m);
    if (status) return status;
    run->gradient_dtype = weight_dtype(halfstep_format_find(c->gradients));
    status = run_allocate(run, HALFSTEP_SLOT_WEIGHT, 0, &run->weight_memory, run->weights, &run->result->weight_bytes);
    if (!status)
        status = run_allocate(run, HALFSTEP_SLOT_GRADIENT, 1088, &run->gradient_memory, run->gradients,
                              &run->result->gradient_bytes);
    if (status) return status;
    run->holding = (struct holding){.optimizer = run->optimizer, .weights = run->weights, .tensors = run->tensors};
    uint64_t extras, states;
    halfstep_memory(run->optimizer, NULL, NULL, &extras, &states, &run->result->fell_back);
    run->result->weight_bytes += extras;
    run->result->state_bytes = states;
    int64_t batch = c->batch < m->data->train.n ? c->batch : m->data->train.n;
    struct cnn_options options = {.batch = batch > TEST_BATCH ? (int)batch : TEST_BATCH,
                                  .threads = run->threads,
                                  .compute = strcmp(c->compute, "f32") == 0 ? LM_F32 : LM_BF16};
    m->model = cnn_create(&m->shape, &options, run->error, run->error_bytes);
    if (!m->model) return 1;
    status = initialize(m);
    const struct named_path data = {"--data", c->digits}, log = {"--log", c->log};
    if (!status) status = paths_check(&data, 1, &log, 1, run->error, run->error_bytes);
    if (!status && c->log) status = open_log(m);
    return status;
}

static void dismantle(struct mnist_run *m)
{
    cnn_destroy(m->model);
    free(m->order);
    run_dismantle(&m->run);
}

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

/* Gives the model the trained weights in full precision, or their average if the rule keeps one and `average` is
 * set. */
static int load_weights(struct mnist_run *m, int average)
{
    struct run *run = &m->run;
    average = average && run->has_average;
    if (m->has_trained_weights && !average) return 0;
    for (int i = 0; i < run->tensors; i++) {
        struct cnn_tensor info;
        cnn_tensor_info(&m->shape, i, &info);
        float *values = cnn_weights(m->model, i);
        int code = HALFSTEP_OK;
        if (average) code = halfstep_read_average(run->optimizer, i, run->weights[i], 0, info.rows, values);
        else if (m->weight_dtype[i] >= 0)
            row_load(values, run->weights[i], m->weight_dtype[i], (int)(info.rows * info.row_length));
        else code = halfstep_read_slot(run->optimizer, i, HALFSTEP_SLOT_WEIGHT, run->weights[i], 0, info.rows, values);
        if (code != HALFSTEP_OK) return run_fail(run, "%s: %s", info.name, halfstep_error_detail(run->optimizer));
    }
    m->has_trained_weights = !average;
    return 0;
}

/* Puts the images in a random order that depends on (seed, epoch) only. */
static void shuffle(struct mnist_run *m)
{
    int64_t n = m->data->train.n;
    for (int64_t i = 0; i < n; i++) m->order[i] = (uint32_t)i;
    for (int64_t i = n - 1; i > 0; i--) {
        /* A 64-bit hash modulo a count is uneven by less than 1 in 10^11. */
        uint64_t j =
            hash_counters(m->run.config->seed, (uint64_t)m->epoch, (uint64_t)i, 0x6d6e697374) % ((uint64_t)i + 1);
        uint32_t image = m->order[i];
        m->order[i] = m->order[j];
        m->order[j] = image;
    }
}

static int judge(struct mnist_run *m, int code)
{
    struct run *run = &m->run;
    run->skipped_now = 0;
    if (run_judge(run, code) != 0) return 1;
    return run_count_skip(run);
}

static void show_progress(struct mnist_run *m, int important)
{
    struct run *run = &m->run;
    const struct run_history *history = &run->result->history;
    const struct run_validation *last =
        history->n_validations ? &history->validation[history->n_validations - 1] : NULL;
    char extra[96] = "";
    if (last) append(extra, sizeof extra, "accuracy %.2f %%  ", 100 * m->result->accuracy[history->n_validations - 1]);
    if (run->trained_seconds > 0)
        append(extra, sizeof extra, "%.1f kimages/s", 1e-3 * (double)m->images_in_all / run->trained_seconds);
    struct progress_values values = {.loss = m->images ? m->loss_sum / (double)m->images : NAN,
                                     .val_loss = last ? last->loss : NAN,
                                     .gradient_norm = NAN,
                                     .lr = NAN,
                                     .tokens_per_s = NAN,
                                     .skipped = halfstep_skipped_steps(run->optimizer),
                                     .extra = extra};
    progress_update(run->progress, run->step, &values, important);
}

static int train_step(struct mnist_run *m, int64_t first, int64_t n)
{
    struct run *run = &m->run;
    double begun = progress_clock();
    struct cnn_batch batch = {m->data->train.images, m->data->train.labels, m->order + first, (int)n};
    struct cnn_score score;
    if (load_weights(m, 0) != 0) return 1;
    if (cnn_train(m->model, &batch, run->config->loss_scale, run->gradients, run->gradient_dtype, &score) != 0)
        return run_fail(run, "%s", cnn_error(m->model));
    double stepping = progress_clock();
    int status = judge(m, halfstep_step(run->optimizer, run->weights, (const void *const *)run->gradients));
    double now = progress_clock();
    m->has_trained_weights = 0;
    run->optimizer_seconds += now - stepping;
    run->trained_seconds += now - begun;
    if (status) return status;
    run->step++;
    m->loss_sum += score.loss * (double)n;
    m->images += n;
    m->images_in_all += n;
    show_progress(m, 0);
    return 0;
}

static int test(struct mnist_run *m)
{
    struct run *run = &m->run;
    const struct image_set *set = &m->data->test;
    struct run_history *history = &run->result->history;
    double loss = 0;
    int64_t correct = 0;
    if (load_weights(m, 1) != 0) return 1;
    for (int64_t i = 0; i < set->n; i++) m->order[i] = (uint32_t)i;
    for (int64_t first = 0; first < set->n; first += TEST_BATCH) {
        struct cnn_batch batch = {set->images, set->labels, m->order + first,
                                  (int)(set->n - first < TEST_BATCH ? set->n - first : TEST_BATCH)};
        struct cnn_score score;
        if (cnn_eval(m->model, &batch, &score) != 0) return run_fail(run, "%s", cnn_error(m->model));
        loss += score.loss * batch.n;
        correct += score.correct;
    }
    double *grown = realloc(m->result->accuracy, (history->n_validations + 1) * sizeof *grown);
    if (!grown) return run_fail(run, "out of memory");
    m->result->accuracy = grown;
    grown[history->n_validations] = (double)correct / (double)set->n;
    if (history_add_validation(history, (double)run->step, loss / (double)set->n) != 0)
        return run_fail(run, "out of memory");
    return 0;
}

/* Returns the norm of the last step's gradients, with the loss scale taken out. */
static double gradient_norm(struct mnist_run *m)
{
    struct run *run = &m->run;
    double sum = 0;
    for (int i = 0; i < run->tensors; i++) {
        struct cnn_tensor info;
        cnn_tensor_info(&m->shape, i, &info);
        int64_t n = info.rows * info.row_length;
        for (int64_t at = 0; at < n; at += NORM_PIECE) {
            int piece = (int)(n - at < NORM_PIECE ? n - at : NORM_PIECE);
            const char *from = (const char *)run->gradients[i] + (size_t)at * lm_dtype_bytes(run->gradient_dtype);
            row_load(run->scratch, from, run->gradient_dtype, piece);
            for (int k = 0; k < piece; k++) sum += (double)run->scratch[k] * (double)run->scratch[k];
        }
    }
    return sqrt(sum) / run->config->loss_scale;
}

static void add_number(hstep_buffer *line, double value, int digits)
{
    if (isnan(value)) hstep_append_format(line, ",");
    else hstep_append_format(line, ",%.*g", digits, value);
}

static void write_log(struct mnist_run *m, const struct run_point *point)
{
    struct run *run = &m->run;
    size_t last = run->result->history.n_validations - 1;
    hstep_buffer line = {0};
    const halfstep_rule_info rule = rule_info(run->rule);
    hstep_append_format(&line, "%lld,%lld", (long long)m->epoch, (long long)run->step);
    add_number(&line, point->train_loss, 8);
    add_number(&line, run->result->history.validation[last].loss, 8);
    add_number(&line, m->result->accuracy[last], 8);
    add_number(&line, point->lr, 8);
    add_number(&line, m->epoch ? gradient_norm(m) : NAN, 8);
    add_number(&line, run->trained_seconds > 0 ? (double)m->images_in_all / run->trained_seconds : NAN, 6);
    hstep_append_format(&line, ",%.3f,%llu", point->seconds,
                        (unsigned long long)halfstep_skipped_steps(run->optimizer));
    halfstep_record record = {.struct_size = sizeof record, .kind = HALFSTEP_RECORD_TENSOR};
    for (record.index = 0; record.index < run->tensors; record.index++) {
        if (m->epoch) halfstep_get_record(run->optimizer, &record);
        for (int s = 0; s < rule.scalars; s++) add_number(&line, m->epoch ? record.scalar[s] : NAN, 8);
    }
    if ((line.failed || log_line(run->log, line.data) != 0) && !run->log_lost) {
        run->log_lost = 1;
        progress_note(run->progress, "warning: %s: %s; training goes on", run->config->log,
                      line.failed ? "out of memory" : strerror(errno));
    }
    text_free(&line);
}

/* Tests after an epoch or before the first one, and reports it: history, log, progress. */
static int end_epoch(struct mnist_run *m)
{
    struct run *run = &m->run;
    struct run_point point = {.step = (double)run->step,
                              .seconds = run->trained_seconds,
                              .gradient_norm = NAN,
                              .train_loss = m->images ? m->loss_sum / (double)m->images : NAN};
    halfstep_current_lr(run->optimizer, run->decayed, &point.lr);
    if (test(m) != 0) return 1;
    if (m->epoch && history_add_point(&run->result->history, &point) != 0) return run_fail(run, "out of memory");
    if (run->log) write_log(m, &point);
    show_progress(m, m->epoch > 0);
    m->loss_sum = 0;
    m->images = 0;
    return 0;
}

static int train_epoch(struct mnist_run *m)
{
    struct run *run = &m->run;
    int64_t n = m->data->train.n;
    int number;
    shuffle(m);
    for (int64_t first = 0; first < n; first += run->config->batch) {
        if ((number = interrupt_pending()) != 0) {
            progress_end(run->progress);
            run_fail(run, "interrupted after step %lld; nothing was saved", (long long)run->step);
            return 128 + number;
        }
        int status = train_step(m, first, n - first < run->config->batch ? n - first : run->config->batch);
        if (status) return status;
    }
    m->epoch++;
    return end_epoch(m);
}

/* ---- Results ----------------------------------------------------------------------------------------------------- */

/* Makes the first weights again, in the memory of the model. */
static double weights_changed(struct mnist_run *m)
{
    struct run *run = &m->run;
    uint64_t changed = 0;
    m->has_trained_weights = 0;
    for (int i = 0; i < run->tensors; i++) {
        const halfstep_tensor t = describe(m, i, 0, "f32");
        const halfstep_slot_info slot = slot_info(run->optimizer, i, HALFSTEP_SLOT_WEIGHT);
        cnn_init_tensor(&m->shape, i, run->config->seed, cnn_weights(m->model, i));
        const struct first_weights first = {.values = cnn_weights(m->model, i)};
        if (checkpoint_count_changes(run->config->recipe, &t, &slot, run->weights[i], &first, &changed, NULL, 0) == 0)
            continue;
        run_tell(run, "note: cannot count the weights that have changed: out of memory");
        return NAN;
    }
    return (double)changed / (double)run->result->params;
}

static void fill_result(struct mnist_run *m)
{
    struct run *run = &m->run;
    struct run_result *r = run->result;
    const struct run_history *history = &r->history;
    run_fill_common(run);
    r->params = cnn_parameter_count(&m->shape);
    r->train_loss = history->n_points ? history->point[history->n_points - 1].train_loss : NAN;
    if (r->diverged) r->train_loss = r->val_loss = NAN;
    r->activation_bytes = cnn_activation_bytes(m->model);
    for (int i = 0; i < 2; i++) {
        const struct image_set *set = i ? &m->data->test : &m->data->train;
        r->held_data_bytes += (uint64_t)set->n * (uint64_t)(set->side * set->side + 1);
    }
    r->state_hash = holding_hash(&run->holding);
    r->weights_changed = weights_changed(m);
    m->result->batch = run->config->batch;
    m->result->epochs = m->epoch;
    if (run->trained_seconds > 0) m->result->images_per_s = (double)m->images_in_all / run->trained_seconds;
}

static int loop(struct mnist_run *m)
{
    struct run *run = &m->run;
    run->started = progress_clock();
    int status = end_epoch(m);
    while (!status && m->epoch < run->config->epochs) status = train_epoch(m);
    if (status && !run->result->diverged) return status;
    fill_result(m);
    return status;
}

int mnist_run(const struct run_config *config, const struct mnist_data *data, struct progress *progress,
              struct mnist_result *result, char *error, size_t error_bytes)
{
    struct run_config counted = *config;
    memset(result, 0, sizeof *result);
    result->run.weights_changed = result->run.tokens_per_s = result->images_per_s = NAN;
    result->steps_per_epoch = (data->train.n + config->batch - 1) / config->batch;
    counted.steps = config->epochs * result->steps_per_epoch; /* schedules need the number of steps */
    struct mnist_run m = {.data = data, .result = result};
    counted.micro_steps = 1;
    m.run.config = &counted;
    m.run.ranks = 1;
    m.run.progress = progress;
    m.run.result = &result->run;
    m.run.error = error;
    m.run.error_bytes = error_bytes;
    error[0] = 0;
    int status = build(&m);
    if (!status) {
        progress_begin(progress, 0, counted.steps);
        status = loop(&m);
        progress_end(progress);
    }
    if (log_close(m.run.log) != 0 && status == 0) status = run_fail(&m.run, "the log %s is not complete", config->log);
    dismantle(&m);
    return status;
}

double mnist_accuracy(const struct mnist_result *result)
{
    size_t n = result->run.history.n_validations;
    return n && !result->run.diverged && isfinite(result->run.val_loss) ? result->accuracy[n - 1] : NAN;
}

void mnist_result_document(struct document *d, const struct mnist_result *result)
{
    const struct run_history *history = &result->run.history;
    run_result_document(d, &result->run);
    json_t *object = d->root;
    put_integer(d, object, "batch", result->batch);
    put_number(d, object, "test_loss", result->run.val_loss);
    put_number(d, object, "test_accuracy", mnist_accuracy(result));
    put_number(d, object, "images_per_s", result->images_per_s);
    json_t *epochs = put_object(d, object, "epochs");
    json_t *train = put_array(d, epochs, "train_loss");
    for (size_t i = 0; i < history->n_points; i++) put_number(d, train, NULL, history->point[i].train_loss);
    json_t *losses = put_array(d, epochs, "test_loss");
    for (size_t i = 1; i < history->n_validations; i++) put_number(d, losses, NULL, history->validation[i].loss);
    json_t *accuracies = put_array(d, epochs, "test_accuracy");
    for (size_t i = 1; i < history->n_validations; i++) put_number(d, accuracies, NULL, result->accuracy[i]);
}

void mnist_result_free(struct mnist_result *result)
{
    run_result_free(&result->run);
    free(result->accuracy);
    memset(result, 0, sizeof *result);
}
