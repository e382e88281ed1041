#define HALFSTEP_ADVANCED
#include "trainer/run/internal.h"

#include <stdio.h>
#include <string.h>

#include "halfstep_io.h"

#include "trainer/files/trainer_file.h"
#include "trainer/ranks/ranks.h"

struct comparing {
    struct run *run;
    const struct trainer_file *saved;
};

static int compare_option(void *context, const struct option *option, const char *here)
{
    struct comparing *c = context;
    const char *checkpoint = c->run->config->checkpoint, *there = trainer_file_option(c->saved, option->name);
    if (!(option->flags & OPTION_IDENTITY)) return 0;
    /* A checkpoint lacks options that came later. It was made with their defaults. */
    if (!there && (option->initial || !here[0])) there = option->initial ? option->initial : "";
    if (!there) return run_fail(c->run, "%s: trainer.json has no value for --%s", checkpoint, option->name);
    if (strcmp(here, there) == 0) return 0;
    if (option->kind == OPTION_FLAG)
        return run_fail(c->run, "--%s is %s here but %s in %s", option->name, here[0] == '1' ? "given" : "not given",
                        there[0] == '1' ? "given" : "not", checkpoint);
    return run_fail(c->run, "--%s is %s here but %s in %s", option->name, here, there, checkpoint);
}

static int same_data(struct run *run, const char *saved, uint64_t hash, const char *option)
{
    char text[24];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    if (strcmp(saved, text) == 0) return 0;
    return run_fail(run, "--%s holds other bytes than the run in %s was trained on; give the same files", option,
                    run->config->checkpoint);
}

/* Fails if the new --steps changes a schedule's factor at a step already made. */
static int same_factors(struct run *run, int64_t saved_steps, const char *schedule, double warmup, double final)
{
    const struct run_config *c = run->config;
    double start = 0, power = 0, before, now;
    halfstep_record group = {.struct_size = sizeof group, .kind = HALFSTEP_RECORD_GROUP, .index = run->decayed};
    halfstep_get_record(run->optimizer, &group);
    halfstep_get_hyper(run->optimizer, run->decayed, "decay_start", &start);
    halfstep_get_hyper(run->optimizer, run->decayed, "power", &power);
    for (uint64_t s = 0; s < group.steps; s++) {
        if (halfstep_schedule_factor(schedule, s, warmup, (double)saved_steps, final, start, power, &before) !=
                HALFSTEP_OK ||
            halfstep_schedule_factor(schedule, s, warmup, (double)c->steps, final, start, power, &now) != HALFSTEP_OK ||
            before != now)
            return run_fail(
                run, "--steps is %lld here but %lld in %s, and the %s schedule of the steps already made depends on it",
                (long long)c->steps, (long long)saved_steps, c->checkpoint, schedule);
    }
    return 0;
}

static int same_rates(struct run *run, int64_t saved_steps)
{
    const struct run_config *c = run->config;
    double final_decay = 0;
    if (saved_steps == c->steps) return 0;
    halfstep_get_hyper(run->optimizer, run->decayed, "final_decay_fraction", &final_decay);
    int status = same_factors(run, saved_steps, c->schedule, (double)c->warmup, c->final_lr);
    return status ? status : same_factors(run, saved_steps, c->decay_schedule, 0, final_decay);
}

/* Compares the model's sizes that have no option. */
static int same_model(struct run *run, const char *path)
{
    struct lm_config saved;
    char note[600];
    if (checkpoint_read_shape(path, run->config->context, &saved, note, sizeof note, run->error, run->error_bytes) != 0)
        return 1;
    const struct lm_config *here = &run->shape;
    const struct {
        const char *name;
        double here, there;
    } numbers[] = {{"intermediate_size", here->intermediate, saved.intermediate},
                   {"rms_norm_eps", here->rms_norm_eps, saved.rms_norm_eps},
                   {"rope_theta", here->rope_theta, saved.rope_theta}};
    for (int i = 0; i < COUNT_OF(numbers); i++)
        if (numbers[i].here != numbers[i].there)
            return run_fail(run, "\"%s\" of the model is %.10g here but %.10g in %s", numbers[i].name, numbers[i].here,
                            numbers[i].there, path);
    return 0;
}

static int load_states(struct run *run, const halfstep_checkpoint *checkpoint)
{
    struct holding whole = run->holding;
    int status = run->dist ? ranks_make_whole(run, 1, &whole) : 0;
    if (!status)
        status = checkpoint_load(checkpoint, &whole, &run->result->history, run->error, run->error_bytes) ? 1 : 0;
    if (!status && run->dist) status = ranks_take_own(run, &whole);
    ranks_drop(run, &whole);
    return status;
}

static int resume_from(struct run *run, const halfstep_checkpoint *checkpoint, const struct trainer_file *saved)
{
    const struct run_config *c = run->config;
    struct comparing comparing = {run, saved};
    int status = run_each_option(c, compare_option, &comparing);
    if (status < 0) return run_fail(run, "out of memory");
    if (!status) status = same_data(run, saved->data_hash, run->data->data_hash, "data");
    if (!status && (saved->val_hash[0] != 0) != (c->val.n != 0))
        status = run_fail(run, "--val is %s here but not in %s", c->val.n ? "given" : "missing", c->checkpoint);
    if (!status && c->val.n) status = same_data(run, saved->val_hash, run->data->val_hash, "val");
    if (!status) status = same_model(run, c->resume_from ? c->resume_from : c->checkpoint);
    if (!status && (uint64_t)c->steps < saved->step)
        status = run_fail(run, "--steps is %lld, but %s is already at step %llu", (long long)c->steps, c->checkpoint,
                          (unsigned long long)saved->step);
    if (!status) status = load_states(run, checkpoint);
    const char *saved_steps = trainer_file_option(saved, "steps");
    double steps = 0;
    if (!status && (!saved_steps || parse_number(saved_steps, &steps) != 0))
        status = run_fail(run, "%s: trainer.json has no value for --steps", c->checkpoint);
    if (!status) status = same_rates(run, (int64_t)steps);
    if (status) return status;
    /* Sums along the tree do not depend on the number of threads. */
    if (saved->threads != (uint64_t)run->threads && !run->by_tree)
        progress_note(run->progress,
                      "note: %s was made with %llu threads, this run has %d: sums may differ in their last bits",
                      c->checkpoint, (unsigned long long)saved->threads, run->threads);
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    halfstep_get_checkpoint_info(checkpoint, &info);
    run->sequence = info.sequence;
    run->released_norm = saved->released_norm;
    run->trained_seconds = saved->seconds;
    run->step = run->saved_step = (int64_t)saved->step;
    return 0;
}

int run_resume(struct run *run)
{
    const struct run_config *c = run->config;
    halfstep_checkpoint *checkpoint;
    struct trainer_file saved;
    if (halfstep_open_checkpoint(&checkpoint, c->resume_from ? c->resume_from : c->checkpoint, NULL, run->error,
                                 run->error_bytes) != HALFSTEP_OK)
        return 1;
    int status = trainer_file_read(checkpoint, &saved, run->error, run->error_bytes) != HALFSTEP_OK;
    if (!status) status = resume_from(run, checkpoint, &saved);
    trainer_file_free(&saved);
    halfstep_close_checkpoint(checkpoint);
    return status;
}
