#include "trainer/run/run.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/interrupt.h"
#include "trainer/ranks/ranks.h"

enum { SKIPS_IN_A_ROW = 20, LOSS_MEAN_STEPS = 20 };

/* ---- Steps ------------------------------------------------------------------------------------------------------- */

static double sum_of_squares(struct run *run, int tensor, const void *gradient)
{
    const struct lm_tensor info = run_tensor(run, tensor);
    int64_t piece = NORM_PIECE / (info.row_length > 0 ? info.row_length : 1);
    if (piece < 1) piece = 1;
    double sum = 0;
    for (int64_t row = 0; row < info.rows; row += piece) {
        int64_t rows = info.rows - row < piece ? info.rows - row : piece;
        if (halfstep_read_slot(run->optimizer, tensor, HALFSTEP_SLOT_GRADIENT, gradient, row, rows, run->scratch) !=
            HALFSTEP_OK)
            return NAN;
        for (int64_t i = 0; i < rows * info.row_length; i++) sum += (double)run->scratch[i] * (double)run->scratch[i];
    }
    return sum;
}

/* Returns the end of this rank's range of micro-steps. */
static int64_t end_of_micro_steps(const struct run *run)
{
    return tree_first_leaf(run->config->micro_steps, run->ranks, run->rank + 1);
}

static int last_micro_step(const struct run *run) { return run->micro_step + 1 == end_of_micro_steps(run); }

static const char *offender(const struct run *run)
{
    return run->dist ? run->offender : halfstep_nonfinite_tensor(run->optimizer, NULL);
}

/* Returns the reason for which the last step's gradient was refused. */
static const char *refused(const struct run *run)
{
    int32_t too_large;
    halfstep_nonfinite_tensor(run->optimizer, &too_large);
    return too_large ? "too large (2^62 or more)" : "not finite";
}

static void warn_skip(struct run *run)
{
    run->skipped_now = 1;
    if (run->skip_warned) return;
    run->skip_warned = 1;
    progress_note(run->progress, "warning: step %lld: the gradient of %s is %s; %s left unchanged, training goes on",
                  (long long)run->step + 1, offender(run), refused(run),
                  run->result->tensors_skip ? "that tensor is"
                  : last_micro_step(run)    ? "all weights are"
                                            : "all states are");
}

int run_judge(struct run *run, int code)
{
    if (code == HALFSTEP_NONFINITE) warn_skip(run);
    else if (code != HALFSTEP_OK) return run_fail_in(run, run->optimizer);
    return 0;
}

/* Consumes the gradient of one tensor when the model keeps none. It is added up, applied in a step, or both in this
 * order. */
static int take_gradient(struct run *run, int tensor, const void *gradient)
{
    const struct run_config *c = run->config;
    if (run->by_tree) {
        if (run_tree_take(run, tensor, gradient) != 0) return 1;
        if (run->dist && last_micro_step(run)) return ranks_exchange(run, tensor);
        gradient = run->gradients[tensor];
    } else if (run->adds_up) {
        void *sum = run->gradients[tensor];
        if (run->micro_step == 0) memset(sum, 0, slot_info(run->optimizer, tensor, HALFSTEP_SLOT_GRADIENT).code_bytes);
        if (run_judge(run,
                      halfstep_accumulate(run->optimizer, tensor, sum, c->accumulator, gradient, c->gradients, 1)) != 0)
            return 1;
        gradient = sum;
    }
    const halfstep_call call = {.struct_size = sizeof call,
                                .kind = HALFSTEP_CALL_TENSOR,
                                .tensor = tensor,
                                .micro = !run->adds_up && !last_micro_step(run),
                                .weights = &run->weights[tensor],
                                .gradients = &gradient};
    if (call.micro) return run_judge(run, halfstep_run(run->optimizer, &call));
    if (!c->release || !last_micro_step(run)) return 0;
    run->squares += sum_of_squares(run, tensor, gradient);
    return run_judge(run, halfstep_run(run->optimizer, &call));
}

static void on_gradient(void *arg, int tensor, const void *gradient)
{
    struct run *run = arg;
    double begun = progress_clock();
    if (!run->gradient_failed) run->gradient_failed = take_gradient(run, tensor, gradient);
    run->optimizer_seconds += progress_clock() - begun;
}

/* Sets the scale that clips gradients with --release. The norm of a step is known only when most of it has been
 * applied, so the norm of the previous step is used. The run keeps that norm, not the optimizer, so that a resumed run
 * has it. Micro-steps that are added up in states are not clipped, because the library does not clip them without
 * release either. */
static int set_release_scale(struct run *run)
{
    const struct run_config *c = run->config;
    double factor = c->clip > 0 && (run->adds_up || last_micro_step(run)) ? c->clip / (run->released_norm + 1e-6) : 1;
    return run_set_hyper(run, HALFSTEP_ALL_GROUPS, "gradient_scale", (factor < 1 ? factor : 1) / c->loss_scale, "clip");
}

/* Runs forward and backward for one batch, and passes the gradients on. */
static int micro_step(struct run *run, double *loss)
{
    const struct run_config *c = run->config;
    const uint8_t *tokens = run->tokens + (size_t)(run->micro_step * c->batch) * ((size_t)c->context + 1);
    *loss = lm_forward(run->model, run->model_weights, tokens, (int)c->batch, (int)c->context);
    if (*loss < 0) return run_fail(run, "%s", lm_error(run->model));
    struct lm_sink sink = {run->gradients, NULL, NULL};
    if (run->hands_out) sink = (struct lm_sink){NULL, on_gradient, run};
    double scale = run->adds_up ? c->loss_scale / (double)c->micro_steps : c->loss_scale;
    if (lm_backward(run->model, run->model_weights, scale, &sink) != 0)
        return run_fail(run, "%s", lm_error(run->model));
    if (run->gradient_failed) return 1;
    if (run->hands_out || last_micro_step(run)) return 0;
    double begun = progress_clock();
    const halfstep_call call = {
        .struct_size = sizeof call, .micro = 1, .gradients = (const void *const *)run->gradients};
    int status = run_judge(run, halfstep_run(run->optimizer, &call));
    run->optimizer_seconds += progress_clock() - begun;
    return status;
}

/* Steps, and sets the point's norm to that of the gradients that the step used. With --accumulator states it is the
 * norm of the last batch only. */
static int finish_step(struct run *run, struct run_point *point)
{
    const struct run_config *c = run->config;
    double *norm = &point->gradient_norm;
    if (c->release) {
        const halfstep_call round = {.struct_size = sizeof round, .kind = HALFSTEP_CALL_ROUND};
        *norm = sqrt(run->squares) / c->loss_scale;
        if (isfinite(*norm)) run->released_norm = *norm;
        if (halfstep_run(run->optimizer, &round) != HALFSTEP_OK) return run_fail_in(run, run->optimizer);
    } else {
        double begun = progress_clock();
        int code;
        if (ranks_finish_exchange(run) != 0 || ranks_step(run, &code) != 0 || run_judge(run, code) != 0) return 1;
        run->optimizer_seconds += progress_clock() - begun;
        if (c->clip > 0 && code == HALFSTEP_OK) {
            *norm = halfstep_gradient_norm(run->optimizer);
        } else if (run->by_tree) {
            if (ranks_sum_of_squares(run, &run->squares) != 0) return 1;
            *norm = sqrt(run->squares) / c->loss_scale;
        } else {
            for (int i = 0; i < run->tensors; i++) run->squares += sum_of_squares(run, i, run->gradients[i]);
            *norm = sqrt(run->squares) / c->loss_scale;
        }
    }
    return run_count_skip(run);
}

int run_count_skip(struct run *run)
{
    run->skips_in_a_row = run->skipped_now ? run->skips_in_a_row + 1 : 0;
    if (run->skips_in_a_row < SKIPS_IN_A_ROW) return 0;
    run->result->agreed = run->result->diverged = 1;
    return run_fail(run, "%d steps in a row had gradients that are %s (last: %s); stopped at step %lld", SKIPS_IN_A_ROW,
                    refused(run), offender(run), (long long)run->step + 1);
}

static int update(struct run *run, struct run_point *point)
{
    const struct run_config *c = run->config;
    double sum = 0;
    run->skipped_now = 0;
    run->squares = 0;
    memset(run->losses, 0, (size_t)c->micro_steps * sizeof *run->losses);
    for (int64_t i = tree_first_leaf(c->micro_steps, run->ranks, run->rank); i < end_of_micro_steps(run); i++) {
        run->micro_step = i;
        if (c->release && set_release_scale(run) != 0) return 1;
        if (last_micro_step(run) && ranks_begin_exchange(run) != 0) return 1;
        if (micro_step(run, &run->losses[i]) != 0) return 1;
    }
    if (ranks_share_losses(run, run->losses) != 0) return 1;
    for (int64_t i = 0; i < c->micro_steps; i++) sum += run->losses[i];
    point->train_loss = sum / (double)c->micro_steps;
    return finish_step(run, point);
}

const struct lm_weight *run_eval_weights(struct run *run, void **copies)
{
    *copies = NULL;
    if (!run->has_average) return run->model_weights;
    size_t heads = ((size_t)run->tensors * sizeof(struct lm_weight) + 63) / 64 * 64;
    unsigned char *memory = malloc(heads + (size_t)lm_parameter_count(&run->shape) * sizeof(float));
    struct lm_weight *weights = *copies = memory;
    if (!memory) {
        run_fail(run, "out of memory");
        return NULL;
    }
    float *at = (float *)(memory + heads);
    for (int i = 0; i < run->tensors; i++) {
        const struct lm_tensor info = run_tensor(run, i);
        weights[i] = (struct lm_weight){at, LM_F32};
        if (halfstep_read_average(run->optimizer, i, run->own_weights[i], 0, ranks_rows(run, i, run->rank).n,
                                  ranks_own(run, i, at, LM_F32)) != HALFSTEP_OK) {
            run_fail_in(run, run->optimizer);
            return NULL;
        }
        if (ranks_hand_out_floats(run, i, at) != 0) return NULL;
        at += info.rows * info.row_length;
    }
    return ranks_wait(run) == 0 ? weights : NULL;
}

static int validation_loss(struct run *run, const struct lm_weight *weights, double *loss)
{
    const struct run_config *c = run->config;
    const struct data_part *part = &run->data->validation;
    size_t count = data_eval_count(part, (int)c->context, (size_t)(c->eval_batches * c->batch));
    size_t window = (size_t)c->context + 1, batches = (count + (size_t)c->batch - 1) / (size_t)c->batch;
    double sum = 0, *losses = calloc(batches, sizeof *losses);
    if (!losses) return run_fail(run, "out of memory");
    for (size_t b = (size_t)run->rank; b < batches; b += (size_t)run->ranks) {
        size_t first = b * (size_t)c->batch;
        size_t n = count - first < (size_t)c->batch ? count - first : (size_t)c->batch;
        for (size_t i = 0; i < n; i++)
            data_eval_window(part, first + i, count, (int)c->context, run->tokens + i * window);
        losses[b] = lm_eval(run->model, weights, run->tokens, (int)n, (int)c->context);
        if (losses[b] < 0) {
            free(losses);
            return run_fail(run, "%s", lm_error(run->model));
        }
        losses[b] *= (double)n;
    }
    int status = ranks_share_numbers(run, losses, batches);
    for (size_t b = 0; b < batches; b++) sum += losses[b];
    free(losses);
    *loss = sum / (double)count;
    return status;
}

static int validate(struct run *run, double *loss)
{
    void *copies;
    const struct lm_weight *weights = run_eval_weights(run, &copies);
    int status = weights ? validation_loss(run, weights, loss) : 1;
    free(copies);
    if (status) return status;
    return history_add_validation(&run->result->history, (double)run->step, *loss) == 0
               ? 0
               : run_fail(run, "out of memory");
}

double run_mean_loss(const struct run_history *history)
{
    size_t n = history->n_points < LOSS_MEAN_STEPS ? history->n_points : LOSS_MEAN_STEPS;
    double sum = 0;
    for (size_t i = history->n_points - n; i < history->n_points; i++) sum += history->point[i].train_loss;
    return n ? sum / (double)n : NAN;
}

static int record(struct run *run, const struct run_point *point, double val_loss, double tokens_per_s)
{
    uint64_t skipped = halfstep_skipped_steps(run->optimizer);
    if (run->log) {
        struct log_row row = {.step = run->step,
                              .train_loss = point->train_loss,
                              .val_loss = val_loss,
                              .lr = point->lr,
                              .gradient_norm = point->gradient_norm,
                              .tokens_per_s = tokens_per_s,
                              .seconds = point->seconds,
                              .skipped_steps = skipped};
        if (log_write(run->log, &row) != 0 && !run->log_lost) {
            run->log_lost = 1;
            progress_note(run->progress, "warning: %s: %s; training goes on", run->config->log, strerror(errno));
        }
    }
    const struct run_history *history = &run->result->history;
    struct progress_values values = {.loss = run_mean_loss(history),
                                     .val_loss = val_loss,
                                     .gradient_norm = point->gradient_norm,
                                     .lr = point->lr,
                                     .tokens_per_s = tokens_per_s,
                                     .skipped = skipped};
    int important = !isnan(val_loss) || run->step == run->config->steps;
    if (isnan(val_loss) && history->n_validations)
        values.val_loss = history->validation[history->n_validations - 1].loss;
    progress_update(run->progress, run->step, &values, important);
    return 0;
}

static int train_step(struct run *run)
{
    const struct run_config *c = run->config;
    struct run_point point = {.step = (double)run->step + 1};
    double begun = progress_clock(), val_loss = NAN;
    int64_t sequences = c->batch * c->micro_steps;
    data_batch(&run->data->train, c->seed, (uint64_t)run->step, 0, (int)sequences, (int)c->context, run->tokens);
    halfstep_current_lr(run->optimizer, run->decayed, &point.lr);
    int status = update(run, &point);
    if (status) return status;
    run->step++;
    double took = progress_clock() - begun;
    run->trained_seconds += took;
    point.seconds = run->trained_seconds;
    if (history_add_point(&run->result->history, &point) != 0) return run_fail(run, "out of memory");
    int last = run->step == c->steps;
    if (last || (c->val_every && run->step % c->val_every == 0)) status = validate(run, &val_loss);
    if (!status) status = record(run, &point, val_loss, took > 0 ? (double)(sequences * c->context) / took : NAN);
    if (!status && c->checkpoint && c->checkpoint_every && run->step % c->checkpoint_every == 0 && !last) {
        /* A later save may succeed, so a failed one only warns. The save at the end must succeed. */
        if (run_save(run) != 0) {
            char why[1200];
            if (run->dist && !run->result->agreed) return 1;
            run->result->agreed = 0;
            snprintf(why, sizeof why, "warning: not saved: %s; training goes on", run->error);
            run_tell(run, why);
        }
    }
    return status;
}

static int interrupted(struct run *run, int number)
{
    const struct run_config *c = run->config;
    progress_end(run->progress);
    if (!c->checkpoint) {
        run_fail(run, "interrupted after step %lld; nothing was saved (no --checkpoint)", (long long)run->step);
    } else if (run->saved_step != run->step && run_save(run) != 0) {
        char why[600];
        if (run->dist && !run->result->agreed) return 1;
        snprintf(why, sizeof why, "%.599s", run->error);
        run_fail(run, "interrupted after step %lld, and not saved: %s", (long long)run->step, why);
    } else {
        run_fail(run, "interrupted after step %lld; saved in %s, --resume continues it", (long long)run->step,
                 c->checkpoint);
    }
    run->result->agreed = 1;
    return 128 + number;
}

/* ---- The run ----------------------------------------------------------------------------------------------------- */

static int loop(struct run *run)
{
    const struct run_config *c = run->config;
    struct run_result *r = run->result;
    double before = run->trained_seconds;
    int status = 0, number;
    r->first_step = run->step;
    run->started = progress_clock();
    /* The first point of every curve is the untrained model. */
    double loss;
    if (run->step == 0 && !r->history.n_validations) status = validate(run, &loss);
    while (!status && run->step < c->steps) {
        if ((number = run->dist ? run->signal : interrupt_pending()) != 0) return interrupted(run, number);
        status = train_step(run);
    }
    if (r->diverged) run_fill_diverged(run);
    if (status) return status;
    if ((number = run->dist ? run->signal : interrupt_pending()) != 0 && run->saved_step != run->step && c->checkpoint)
        return interrupted(run, number);
    double trained = run->trained_seconds - before;
    int64_t made = run->step - r->first_step;
    if (run_count_traffic(run) != 0) return 1;
    r->tokens_per_s = made && trained > 0 ? (double)(made * c->batch * c->micro_steps * c->context) / trained : NAN;
    progress_end(run->progress);
    if (c->checkpoint && run->saved_step != run->step && run_save(run) != 0) return 1;
    if (c->checkpoint) snprintf(r->checkpoint, sizeof r->checkpoint, "%s", c->checkpoint);
    return run_fill_result(run);
}

int run_agree(struct run *run, int status)
{
    if (!run->dist) return status;
    status = ranks_agree(run->dist, status, run->error, run->error_bytes);
    if (status) run->result->agreed = 1;
    return status;
}

int train_run(const struct run_config *config, const struct run_data *data, struct progress *progress,
              struct run_result *result, char *error, size_t error_bytes)
{
    struct run run = {.config = config,
                      .dist = config->dist && config->dist->ranks > 1 ? config->dist : NULL,
                      .ranks = 1,
                      .data = data,
                      .progress = progress,
                      .result = result,
                      .error = error,
                      .error_bytes = error_bytes,
                      .saved_step = -1};
    memset(result, 0, sizeof *result);
    result->weights_changed = result->tokens_per_s = NAN;
    error[0] = 0;
    if (run.dist) {
        run.rank = run.dist->rank;
        run.ranks = run.dist->ranks;
    }
    int status = run_agree(&run, run_open_directory(&run));
    if (!status) status = run_agree(&run, run_build(&run));
    if (!status) status = run_agree(&run, config->resume ? run_resume(&run) : run_initialize(&run));
    if (!status) status = run_agree(&run, run_open_log(&run));
    if (!status) status = ranks_hand_out(&run);
    if (!status) {
        progress_begin(progress, run.step, config->steps);
        status = loop(&run);
        progress_end(progress);
    }
    if (log_close(run.log) != 0 && status == 0) status = run_fail(&run, "the log %s is not complete", config->log);
    run_lock_release(run.lock);
    run_dismantle(&run);
    return status;
}
