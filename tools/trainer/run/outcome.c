/* Fills in the result when a run is over. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "trainer/ranks/ranks.h"

/* Adds to `*changed` the number of weights of one tensor that are no longer what they were first. Returns true on
 * failure, with a text in `why` unless memory is out. */
static int count_changes(struct run *run, const struct holding *whole, int tensor, struct weight_source *source,
                         uint64_t *changed, char *why, size_t why_bytes)
{
    const struct lm_tensor info = run_tensor(run, tensor);
    const halfstep_tensor t = checkpoint_tensor(&info, "f32");
    const halfstep_slot_info now = slot_info(whole->optimizer, tensor, HALFSTEP_SLOT_WEIGHT);
    float *values = source ? NULL : malloc((size_t)(info.rows * info.row_length) * sizeof *values);
    int bad = !source && !values;
    if (values) lm_init_tensor(&run->shape, tensor, run->config->seed, values);
    const struct first_weights first = {source, &info, values};
    if (!bad)
        bad = checkpoint_count_changes(run->config->recipe, &t, &now, whole->weights[tensor], &first, changed, why,
                                       why_bytes) != 0;
    free(values);
    return bad;
}

static double weights_changed(struct run *run, const struct holding *whole)
{
    char why[600] = "", note[700];
    uint64_t changed = 0;
    struct weight_source *source = run->config->init ? weight_source_open(run->config->init, why, sizeof why) : NULL;
    int bad = run->config->init && !source;
    for (int i = 0; i < run->tensors && !bad; i++)
        bad = count_changes(run, whole, i, source, &changed, why, sizeof why);
    weight_source_close(source);
    if (!bad) return (double)changed / (double)run->result->params;
    snprintf(note, sizeof note, "note: cannot count the weights that have changed: %s", *why ? why : "out of memory");
    run_tell(run, note);
    return NAN;
}

void run_fill_common(struct run *run)
{
    struct run_result *r = run->result;
    const struct run_config *c = run->config;
    const struct run_history *history = &r->history;
    snprintf(r->recipe, sizeof r->recipe, "%s", c->recipe);
    snprintf(r->gradients, sizeof r->gradients, "%s", c->gradients);
    snprintf(r->compute, sizeof r->compute, "%s", c->compute);
    snprintf(r->isa, sizeof r->isa, "%s", halfstep_isa());
    r->micro_steps = c->micro_steps;
    r->seed = c->seed;
    r->threads = run->threads;
    r->steps = run->step;
    r->val_loss = history->n_validations ? history->validation[history->n_validations - 1].loss : NAN;
    r->skipped_steps = halfstep_skipped_steps(run->optimizer);
    r->optimizer_seconds = run->optimizer_seconds;
    r->seconds = progress_clock() - run->started;
    r->peak_gradient_bytes = r->gradient_bytes;
}

static void fill_result(struct run *run)
{
    struct run_result *r = run->result;
    const struct run_config *c = run->config;
    run_fill_common(run);
    snprintf(r->accumulator, sizeof r->accumulator, "%s", c->accumulator ? c->accumulator : "");
    r->release = c->release;
    r->params = lm_parameter_count(&run->shape);
    r->train_loss = run_mean_loss(&r->history);
    r->peak_gradient_bytes += lm_gradient_peak_bytes(run->model);
    if (run->hands_out) r->gradient_bytes = r->peak_gradient_bytes;
    r->activation_bytes = lm_activation_bytes(run->model);
    r->ranks = run->ranks;
    r->data_files = run->data->files;
    r->data_bytes = run->data->data_file.n;
    r->held_data_bytes = run->data->data_file.n + run->data->val_file.n;
}

/* Fills in the numbers that need the whole optimizer on rank 0: the hash of the states and the share of changed
 * weights. */
static int fill_whole(struct run *run)
{
    struct holding whole;
    int status = ranks_collect(run, &whole);
    if (!status && run->rank == 0) {
        run->result->state_hash = holding_hash(&whole);
        run->result->weights_changed = weights_changed(run, &whole);
    }
    ranks_drop(run, &whole);
    return status;
}

static int make_sample(struct run *run)
{
    struct run_result *r = run->result;
    size_t n = (size_t)run->config->sample_bytes;
    if (n == 0) return 0;
    r->sample = malloc(n);
    if (!r->sample) return run_fail(run, "out of memory");
    r->sample_bytes = n;
    void *copies;
    const struct lm_weight *weights = run_eval_weights(run, &copies);
    int status = weights ? 0 : 1;
    if (!status && run->rank == 0 &&
        lm_generate(run->model, weights, NULL, 0, 0.8, run->config->seed, r->sample, n) != 0)
        status = run_fail(run, "%s", lm_error(run->model));
    free(copies);
    return status;
}

int run_count_traffic(struct run *run)
{
    int64_t received = run->dist ? (int64_t)run->dist->received() : 0;
    if (run->dist && run->dist->sum(&received, 1) != 0) return run_fail(run, "%s", run->dist->error());
    run->result->job_received = (uint64_t)received;
    return 0;
}

void run_fill_diverged(struct run *run)
{
    struct run_result *r = run->result;
    fill_result(run);
    r->train_loss = r->val_loss = NAN;
    if (run->dist) return;
    r->state_hash = holding_hash(&run->holding);
    r->weights_changed = weights_changed(run, &run->holding);
}

int run_fill_result(struct run *run)
{
    fill_result(run);
    int status = fill_whole(run);
    return status ? status : make_sample(run);
}
