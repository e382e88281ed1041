#include "train_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "halfstep_io.h"

static json_t *options_json(const struct run_config *config)
{
    struct run_options table;
    struct run_config copy = *config;
    run_options_init(&table);
    const struct option_group group = {"", table.rows, table.n, &copy}, recipe = {"", &run_recipe_option, 1, &copy};
    json_t *options = json_object();
    char text[4096];
    args_text(&recipe, &run_recipe_option, text, sizeof text);
    json_object_set_new(options, run_recipe_option.name, json_string(text));
    for (int i = 0; i < table.n; i++) {
        if (!(table.rows[i].flags & (OPTION_SAVED | OPTION_IDENTITY))) continue;
        args_text(&group, &table.rows[i], text, sizeof text);
        json_object_set_new(options, table.rows[i].name, json_string(text));
    }
    return options;
}

static json_t *trainer_json(const struct run *run)
{
    json_t *trainer = json_object();
    char hash[2][24];
    snprintf(hash[0], sizeof hash[0], "%016llx", (unsigned long long)run->data->data_hash);
    snprintf(hash[1], sizeof hash[1], "%016llx", (unsigned long long)run->data->val_hash);
    json_object_set_new(trainer, "format", json_integer(1));
    json_object_set_new(trainer, "step", json_integer(run->step));
    json_object_set_new(trainer, "options", options_json(run->config));
    json_object_set_new(trainer, "data_bytes", json_integer((json_int_t)run->data->data_file.n));
    json_object_set_new(trainer, "data_hash", json_string(hash[0]));
    json_object_set_new(trainer, "val_hash", json_string(run->config->val ? hash[1] : ""));
    json_object_set_new(trainer, "threads", json_integer(run->threads));
    json_object_set_new(trainer, "released_norm", json_real(run->released_norm));
    json_object_set_new(trainer, "seconds", json_real(run->trained_seconds));
    return trainer;
}

static int differs(struct run *run, const json_t *saved_options)
{
    json_t *options = options_json(run->config);
    struct run_options table;
    run_options_init(&table);
    int status = 0;
    for (int i = -1; i < table.n && !status; i++) {
        const struct option *option = i < 0 ? &run_recipe_option : &table.rows[i];
        if (!(option->flags & OPTION_IDENTITY)) continue;
        const char *here = json_string_value(json_object_get(options, option->name));
        const char *there = json_string_value(json_object_get(saved_options, option->name));
        /* A checkpoint from before there was such an option is one that was made with its default. */
        if (!there && (option->initial || !here[0])) there = option->initial ? option->initial : "";
        if (!there) status = run_fail(run, "%s: trainer.json does not say --%s", run->config->checkpoint, option->name);
        else if (option->kind == OPTION_FLAG && strcmp(here, there) != 0)
            status = run_fail(run, "--%s is %s here but %s in %s", option->name, here[0] == '1' ? "given" : "not given",
                          there[0] == '1' ? "given" : "not", run->config->checkpoint);
        else if (strcmp(here, there) != 0)
            status = run_fail(run, "--%s is %s here but %s in %s", option->name, here, there, run->config->checkpoint);
    }
    json_decref(options);
    return status;
}

static int same_data(struct run *run, const json_t *trainer, const char *key, uint64_t hash, const char *option)
{
    char text[24];
    const char *saved = json_string_value(json_object_get(trainer, key));
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    if (saved && strcmp(saved, text) == 0) return 0;
    return run_fail(run, "--%s holds other bytes than the run in %s was trained on", option, run->config->checkpoint);
}

/* A new --steps is fine as long as no step already made would have had another rate. */
static int same_rates(struct run *run, int64_t saved_steps)
{
    const struct run_config *c = run->config;
    if (saved_steps == c->steps) return 0;
    double start = 0, power = 0, before, now;
    uint64_t accepted = 0;
    halfstep_get_group_steps(run->optimizer, run->decayed, &accepted);
    halfstep_get_hyper(run->optimizer, run->decayed, "decay_start", &start);
    halfstep_get_hyper(run->optimizer, run->decayed, "power", &power);
    for (uint64_t s = 0; s < accepted; s++) {
        if (halfstep_schedule_factor(c->schedule, s, (double)c->warmup, (double)saved_steps, c->final_lr, start, power,
                                     &before) != HALFSTEP_OK ||
            halfstep_schedule_factor(c->schedule, s, (double)c->warmup, (double)c->steps, c->final_lr, start, power, &now) !=
                HALFSTEP_OK ||
            before != now)
            return run_fail(run, "--steps is %lld here but %lld in %s, and the %s schedule of the steps already made depends on it",
                        (long long)c->steps, (long long)saved_steps, c->checkpoint, c->schedule);
    }
    return 0;
}

static int resume_from(struct run *run, const halfstep_checkpoint *checkpoint, const json_t *trainer)
{
    const struct run_config *c = run->config;
    const json_t *options = json_object_get(trainer, "options");
    json_int_t step = json_integer_value(json_object_get(trainer, "step"));
    if (!json_is_object(options) || !json_is_integer(json_object_get(trainer, "step")) || step < 0)
        return run_fail(run, "%s: trainer.json is not what this program writes", c->checkpoint);
    int status = differs(run, options);
    if (!status) status = same_data(run, trainer, "data_hash", run->data->data_hash, "data");
    const char *val = json_string_value(json_object_get(trainer, "val_hash"));
    if (!status && (val && val[0]) != (c->val != NULL))
        status = run_fail(run, "--val is %s here but not in %s", c->val ? "given" : "missing", c->checkpoint);
    if (!status && c->val) status = same_data(run, trainer, "val_hash", run->data->val_hash, "val");
    if (!status && c->steps < step)
        status = run_fail(run, "--steps is %lld, but %s is already at step %lld", (long long)c->steps, c->checkpoint, (long long)step);
    if (!status) status = checkpoint_load(checkpoint, &run->holding, &run->result->history, run->error, run->error_bytes) ? 1 : 0;
    const char *saved_steps = json_string_value(json_object_get(options, "steps"));
    double steps;
    if (!status && (!saved_steps || parse_number(saved_steps, &steps) != 0))
        status = run_fail(run, "%s: trainer.json does not say --steps", c->checkpoint);
    if (!status) status = same_rates(run, (int64_t)steps);
    if (status) return status;
    json_int_t threads = json_integer_value(json_object_get(trainer, "threads"));
    if (threads != run->threads)
        progress_note(run->progress, "note: %s was made with %lld threads, this run has %d: sums may differ in their last bits",
                      c->checkpoint, (long long)threads, run->threads);
    run->released_norm = json_number_value(json_object_get(trainer, "released_norm"));
    run->trained_seconds = json_number_value(json_object_get(trainer, "seconds"));
    run->step = run->saved_step = step;
    return 0;
}

int run_resume(struct run *run)
{
    halfstep_checkpoint *checkpoint;
    int code = halfstep_open_checkpoint(&checkpoint, run->config->checkpoint, NULL, run->error, run->error_bytes);
    if (code == HALFSTEP_ERROR_NAME) return run_fail(run, "--resume: there is no checkpoint in %s", run->config->checkpoint);
    if (code != HALFSTEP_OK) return 1;
    json_t *trainer = checkpoint_read_json(checkpoint, "trainer.json", run->error, run->error_bytes);
    int status = trainer ? resume_from(run, checkpoint, trainer) : 1;
    json_decref(trainer);
    halfstep_close_checkpoint(checkpoint);
    return status;
}

int run_check_outputs(struct run *run)
{
    const struct run_config *c = run->config;
    if (c->checkpoint) {
        halfstep_checkpoint *there;
        halfstep_open_options quick = {.struct_size = sizeof quick, .skip_contents = 1};
        int code = c->resume ? HALFSTEP_ERROR_NAME
                             : halfstep_open_checkpoint(&there, c->checkpoint, &quick, run->error, run->error_bytes);
        if (code == HALFSTEP_OK) {
            halfstep_checkpoint_info info = {.struct_size = sizeof info};
            halfstep_get_checkpoint_info(there, &info);
            run_fail(run, "%s already holds a checkpoint of step %llu: add --resume to continue it, or choose another directory",
                 c->checkpoint, (unsigned long long)info.step);
            halfstep_close_checkpoint(there);
            return 1;
        }
        if (code != HALFSTEP_ERROR_NAME) return 1;
        halfstep_checkpoint_save *probe;
        if (halfstep_begin_checkpoint(&probe, c->checkpoint, NULL, run->error, run->error_bytes) != HALFSTEP_OK) return 1;
        halfstep_abandon_checkpoint(probe);
    }
    if (!c->log) return 0;
    run->log = log_open(c->log, c->resume ? run->step : -1, run->error, run->error_bytes);
    return run->log ? 0 : 1;
}

int run_save(struct run *run)
{
    json_t *trainer = trainer_json(run);
    int bad = checkpoint_save(run->config->checkpoint, (uint32_t)run->config->keep, (uint64_t)run->step, &run->holding,
                              trainer, &run->result->history, run->error, run->error_bytes);
    json_decref(trainer);
    if (bad) return 1;
    run->saved_step = run->step;
    snprintf(run->result->checkpoint, sizeof run->result->checkpoint, "%s", run->config->checkpoint);
    return 0;
}
