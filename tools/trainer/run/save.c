/* The directory of checkpoints, and saving in it. */
#define HALFSTEP_ADVANCED
#include "trainer/run/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "halfstep_io.h"

#include "common/paths.h"
#include "trainer/files/trainer_file.h"
#include "trainer/ranks/ranks.h"

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
        hstep_buffer path = {0};
        struct stat file;
        hstep_append_format(&path, "%s/%s", c->checkpoint, name);
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
    hstep_buffer path[OUTPUTS] = {{0}};
    const char *name;
    int n = 1, failed = 0;
    for (int i = -1; c->checkpoint && n < OUTPUTS && (name = i < 0 ? "manifest.json" : checkpoint_file_name(i)) != NULL;
         i++, n++) {
        hstep_append_format(&path[n], "%s/%s", c->checkpoint, name);
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

/* Refuses option values that are not UTF-8, because JSON would change them. */
static int check_text(void *context, const struct option *option, const char *value)
{
    struct run *run = context;
    size_t n = strlen(value), i = 0, length = 1;
    uint32_t number;
    while (i < n && (length = hstep_utf8(value + i, n - i, &number)) != 0) i += length;
    if (length) return 0;
    /* `value` holds one name per line. The error shows the one that is not UTF-8. */
    size_t begin = i;
    while (begin > 0 && value[begin - 1] != '\n') begin--;
    run_fail(run, "--%s %.*s: a checkpoint can only keep it as UTF-8", option->name, (int)strcspn(value + begin, "\n"),
             value + begin);
    return 2;
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
static int trainer_text(const struct run *run, hstep_buffer *text)
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
    hstep_buffer trainer = {0};
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
