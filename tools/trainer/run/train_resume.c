#define HALFSTEP_ADVANCED
#include "trainer/run/train_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "halfstep_io.h"

#include "common/paths.h"
#include "trainer/files/trainer_file.h"
#include "trainer/ranks/train_ranks.h"

/* ---- Options ----------------------------------------------------------------------------------------------------- */

int run_each_option(const struct run_config *config, run_option_visitor *visit, void *context)
{
    struct run_options table;
    struct run_config copy = *config;
    run_options_init(&table);
    const struct option_group group = {"", table.rows, table.n, &copy};
    int status = 0;
    for (int i = -1; i < table.n && !status; i++) {
        const struct option *option = i < 0 ? &run_recipe_option : &table.rows[i];
        if (!(option->flags & (OPTION_SAVED | OPTION_IDENTITY))) continue;
        struct text text = {0};
        args_text(&group, option, &text);
        status = text.failed ? -1 : visit(context, option, text_string(&text));
        text_free(&text);
    }
    return status;
}

struct saving {
    struct trainer_file *file;
    size_t capacity;
};

static int keep_option(void *context, const struct option *option, const char *value)
{
    struct saving *saving = context;
    struct trainer_file *file = saving->file;
    if (file->options == saving->capacity) {
        saving->capacity = saving->capacity ? 2 * saving->capacity : 64;
        struct trainer_option *grown = realloc(file->option, saving->capacity * sizeof *grown);
        if (!grown) return -1;
        file->option = grown;
    }
    char *copy = strdup(value);
    if (!copy) return -1;
    file->option[file->options++] = (struct trainer_option){option->name, copy};
    return 0;
}

/* Writes trainer.json for the current state of the run. Returns 0, or -1 if out of memory. */
static int trainer_text(const struct run *run, struct text *text)
{
    char hash[2][24];
    snprintf(hash[0], sizeof hash[0], "%016llx", (unsigned long long)run->data->data_hash);
    snprintf(hash[1], sizeof hash[1], "%016llx", (unsigned long long)run->data->val_hash);
    struct trainer_file file = {.step = (uint64_t)run->step,
                                .threads = (uint64_t)run->threads,
                                .data_bytes = run->data->data_file.n,
                                .data_hash = hash[0],
                                .val_hash = run->config->val.n ? hash[1] : "",
                                .released_norm = run->released_norm,
                                .seconds = run->trained_seconds};
    struct saving saving = {&file, 0};
    int bad = run_each_option(run->config, keep_option, &saving) != 0;
    if (!bad) trainer_file_write(&file, text);
    for (size_t i = 0; i < file.options; i++) free((char *)file.option[i].value);
    free(file.option);
    return bad || text->failed ? -1 : 0;
}

/* Refuses option values that are not UTF-8, because JSON would change them. */
static int check_text(void *context, const struct option *option, const char *value)
{
    struct run *run = context;
    size_t n = strlen(value), i = 0, length = 1;
    while (i < n && (length = text_utf8_length(value + i, n - i)) != 0) i += length;
    if (length) return 0;
    /* `value` holds one name per line. The error shows the one that is not UTF-8. */
    size_t begin = i;
    while (begin > 0 && value[begin - 1] != '\n') begin--;
    run_fail(run, "--%s %.*s: a checkpoint can only keep it as UTF-8", option->name, (int)strcspn(value + begin, "\n"),
             value + begin);
    return 2;
}

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

/* ---- Resuming ---------------------------------------------------------------------------------------------------- */

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

/* ---- The directory ----------------------------------------------------------------------------------------------- */

void run_tell(struct run *run, const char *note)
{
    if (run_result_note(run->result, note)) progress_note(run->progress, "%s", note);
}

/* Fails if the directory of a new run holds a checkpoint, or a file with the name of a checkpoint's file. */
static int refuse_occupied(struct run *run)
{
    const struct run_config *c = run->config;
    halfstep_checkpoint *there;
    int code = checkpoint_open_quickly(&there, c->checkpoint, run->error, run->error_bytes);
    if (code == HALFSTEP_OK) {
        halfstep_checkpoint_info info = {.struct_size = sizeof info};
        halfstep_get_checkpoint_info(there, &info);
        run_fail(run,
                 "%s already holds a checkpoint of step %llu: add --resume to continue it, or choose another directory",
                 c->checkpoint, (unsigned long long)info.step);
        halfstep_close_checkpoint(there);
        return 1;
    }
    if (code != HALFSTEP_ERROR_NAME) return 1;
    int status = 0;
    const char *name;
    for (int i = 0; !status && (name = checkpoint_file_name(i)) != NULL; i++) {
        struct text path = {0};
        struct stat file;
        text_add(&path, "%s/%s", c->checkpoint, name);
        if (path.failed) status = run_fail(run, "out of memory");
        else if (lstat(path.data, &file) == 0)
            status = run_fail(
                run, "%s is in the way of a checkpoint, which has a file of that name: choose another directory",
                path.data);
        text_free(&path);
    }
    return status;
}

/* Fails if an output is an input or another output. */
static int check_paths(struct run *run)
{
    enum { OUTPUTS = 16 };
    const struct run_config *c = run->config;
    struct named_path outputs[OUTPUTS] = {{"--log", c->log}};
    struct text path[OUTPUTS] = {{0}};
    const char *name;
    int n = 1, failed = 0;
    for (int i = -1; c->checkpoint && n < OUTPUTS && (name = i < 0 ? "manifest.json" : checkpoint_file_name(i)) != NULL;
         i++, n++) {
        text_add(&path[n], "%s/%s", c->checkpoint, name);
        failed |= path[n].failed;
        outputs[n] = (struct named_path){"--checkpoint", text_string(&path[n])};
    }
    int status = failed ? run_fail(run, "out of memory") : 0;
    /* A resumed run reads the files of its checkpoint and replaces the links to them. Only the log could overwrite
     * them. */
    const char *resumed = c->resume ? c->resume_from : NULL;
    if (!status) status = run_paths_check(c, resumed, outputs, 1, run->error, run->error_bytes);
    if (!status) status = run_paths_check(c, NULL, outputs, n, run->error, run->error_bytes);
    for (int i = 1; i < n; i++) text_free(&path[i]);
    return status;
}

int run_open_directory(struct run *run)
{
    const struct run_config *c = run->config;
    if (run->rank != 0) return 0;
    if (!c->checkpoint) return check_paths(run);
    int status = run_each_option(c, check_text, run);
    if (status) return status < 0 ? run_fail(run, "out of memory") : status;
    char note[1024];
    run->lock = run_lock_take(c->checkpoint, note, sizeof note);
    if (!run->lock) return run_fail(run, "%s", note);
    if (note[0]) run_tell(run, note);
    if (!c->resume) status = refuse_occupied(run);
    if (!status) status = check_paths(run);
    if (status) return status;
    halfstep_checkpoint_save *probe;
    if (halfstep_begin_checkpoint(&probe, c->checkpoint, NULL, run->error, run->error_bytes) != HALFSTEP_OK) return 1;
    halfstep_abandon_checkpoint(probe);
    return 0;
}

int run_open_log(struct run *run)
{
    const struct run_config *c = run->config;
    if (!c->log || run->rank != 0) return 0;
    run->log = log_open(c->log, c->resume ? run->step : -1, run->error, run->error_bytes);
    return run->log ? 0 : 1;
}

/* ---- Saving ------------------------------------------------------------------------------------------------------ */

/* Sets directory_shared if the newest checkpoint in the directory is not the one that this run saved or resumed. The
 * run then removes no older checkpoints, because they may belong to another run. The lock keeps out other runs, but not
 * other programs, and it does not work on every file system. Changes between this check and the save are noticed when
 * the save is committed (prune_if). */
static void look_for_others(struct run *run)
{
    halfstep_checkpoint *there;
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    char why[1024];
    int code = checkpoint_open_quickly(&there, run->config->checkpoint, why, sizeof why), others;
    if (code == HALFSTEP_OK) {
        halfstep_get_checkpoint_info(there, &info);
        int known = info.sequence == run->sequence && info.step == (uint64_t)run->saved_step;
        others = !known && !(run->unread && info.step == run->unread_step && info.sequence == run->sequence + 1);
        if (!others) run->sequence = info.sequence;
        halfstep_close_checkpoint(there);
    } else {
        others = code != HALFSTEP_ERROR_NAME || run->sequence != 0;
    }
    if (!others || run->directory_shared) return;
    run->directory_shared = 1;
    snprintf(why, sizeof why,
             "note: %s holds checkpoints of another run: this run removes none there, whatever --keep says",
             run->config->checkpoint);
    run_tell(run, why);
}

/* Opens the saved checkpoint, verifies all checksums, and compares its trainer.json with what was saved. */
static int read_back(struct run *run, const char *trainer)
{
    const char *directory = run->config->checkpoint;
    halfstep_checkpoint *saved;
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    char why[900];
    size_t bytes;
    if (halfstep_open_checkpoint(&saved, directory, NULL, why, sizeof why) != HALFSTEP_OK)
        return run_fail(run, "saved in %s, but it cannot be read back: %s", directory, why);
    halfstep_get_checkpoint_info(saved, &info);
    char *text = checkpoint_read_text(saved, "trainer.json", &bytes, why, sizeof why);
    int status = 0;
    if (!text) status = run_fail(run, "saved in %s, but it cannot be read back: %s", directory, why);
    else if (strcmp(text, trainer) != 0)
        status = run_fail(run, "%s: another program has saved there at the same time", directory);
    else {
        run->directory_shared |= info.sequence != run->sequence + 1;
        run->sequence = info.sequence;
    }
    free(text);
    halfstep_close_checkpoint(saved);
    return status;
}

static int save(struct run *run, const struct holding *whole)
{
    const struct run_config *c = run->config;
    struct text trainer = {0};
    char note[1024];
    int status = trainer_text(run, &trainer) == 0 ? 0 : run_fail(run, "out of memory");
    if (!status) {
        look_for_others(run);
        halfstep_save_options options = {.struct_size = sizeof options,
                                         .step = (uint64_t)run->step,
                                         .keep = (uint32_t)c->keep,
                                         .prune_if = !run->directory_shared,
                                         .newest = run->directory_shared ? 0 : run->sequence};
        if (run->directory_shared) options.keep = UINT32_MAX;
        status = checkpoint_save(c->checkpoint, &options, whole, c->recipe, trainer.data, &run->result->history, note,
                                 sizeof note) != 0;
        if (status) run_fail(run, "%s", note);
        else if (note[0]) run_tell(run, note);
    }
    if (!status) {
        run->unread = 1;
        run->unread_step = (uint64_t)run->step;
        status = read_back(run, trainer.data);
        run->unread = status != 0;
    }
    text_free(&trainer);
    return status;
}

int run_save(struct run *run)
{
    struct holding whole;
    if (ranks_collect(run, &whole) != 0) {
        ranks_drop(run, &whole);
        return 1;
    }
    int status = run->rank == 0 ? save(run, &whole) : 0;
    ranks_drop(run, &whole);
    status = run_agree(run, status);
    if (status) return 1;
    run->saved_step = run->step;
    snprintf(run->result->checkpoint, sizeof run->result->checkpoint, "%s", run->config->checkpoint);
    return 0;
}
