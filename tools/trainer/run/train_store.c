/* Runs whose states are in a file (--store). The file is the checkpoint: each step makes itself durable there, with the
 * weights and with the texts that a checkpoint has in files of its own. They are set before the step. */
#define HALFSTEP_ADVANCED
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "halfstep_io.h"

#include "trainer/files/store_file.h"
#include "trainer/run/train_internal.h"

static const char trainer_key[] = STORE_TRAINER, config_key[] = STORE_CONFIG, history_key[] = STORE_HISTORY,
                  micro_key[] = STORE_MICRO_STEPS;

static int set(struct run *run, const char *key, struct text *text)
{
    const char *value = text && text->n ? text->data : NULL;
    int code = text && text->failed ? HALFSTEP_ERROR_MEMORY
                                    : halfstep_store_set_value(run->store, key, value, run->error, run->error_bytes);
    if (text && text->failed) run_fail(run, "out of memory");
    if (text) text_free(text);
    return code != HALFSTEP_OK;
}

/* ---- What the next step keeps ------------------------------------------------------------------------------------ */

void history_write(const struct run_history *history, const struct run_point *now, struct text *text)
{
    const size_t room = LOSS_MEAN_STEPS - (now != NULL);
    const size_t first = history->n_points > room ? history->n_points - room : 0;
    text_add(text, "%zu", history->n_points - first + (now != NULL));
    for (size_t i = first; i < history->n_points; i++)
        text_add(text, " %.0f %.17g", history->point[i].step, history->point[i].train_loss);
    if (now) text_add(text, " %.0f %.17g", now->step, now->train_loss);
    if (history->n_validations) {
        const struct run_validation *last = &history->validation[history->n_validations - 1];
        text_add(text, " %.0f %.17g", last->step, last->loss);
    }
}

static int set_history(struct run *run, const struct run_point *now)
{
    struct text text = {0};
    history_write(&run->result->history, now, &text);
    return set(run, history_key, &text);
}

static int set_trainer(struct run *run, int64_t step)
{
    struct text text = {0};
    if (run_trainer_text(run, step, &text) != 0) text.failed = 1;
    return set(run, trainer_key, &text);
}

int run_store_note(struct run *run, const struct run_point *now)
{
    if (!run->store) return 0;
    int status = set_trainer(run, now ? (int64_t)now->step : run->step);
    if (!status) status = set_history(run, now);
    return status ? status : set(run, micro_key, NULL);
}

int run_store_note_micro(struct run *run)
{
    if (!run->store) return 0;
    struct text text = {0};
    text_add(&text, "%lld", (long long)run->micro_step + 1);
    for (int64_t i = 0; i <= run->micro_step; i++) text_add(&text, " %.17g", run->losses[i]);
    return set(run, micro_key, &text);
}

int run_store_keep(struct run *run)
{
    if (run_store_note(run, NULL) != 0) return 1;
    return halfstep_flush(run->optimizer, run->own_weights) == HALFSTEP_OK ? 0 : run_fail_in(run, run->optimizer);
}

/* ---- A new file -------------------------------------------------------------------------------------------------- */

/* A new file has this name until the first weights are in it, so that FILE is never a run that cannot go on. */
static const char *start_name(struct run *run, struct text *name)
{
    text_add(name, "%s.start", run->config->store);
    if (name->failed) run_fail(run, "out of memory");
    return name->failed ? NULL : name->data;
}

/* Removes what a killed run has left, unless a run has it. */
static void remove_left(const char *path)
{
    int fd = store_file_is(path) ? open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW) : -1;
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0) unlink(path);
    if (fd >= 0) close(fd);
}

/* Makes a name in the folder of `path` durable. File systems that cannot sync folders say so by an error. */
static int sync_folder(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    int fd = folder ? open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    int bad = fd < 0 || (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP);
    if (fd >= 0) close(fd);
    free(folder);
    return bad ? -1 : 0;
}

/* Gives the file its own name and opens it under that. */
static int publish(struct run *run, const char *start)
{
    const char *path = run->config->store;
    halfstep_store_close(run->store);
    run->store = NULL;
    if (link(start, path) != 0 || unlink(start) != 0 || sync_folder(path) != 0)
        return run_fail(run, "cannot rename %s to %s: %s", start, path, strerror(errno));
    return run_store_open(run);
}

static int create(struct run *run, const char *start)
{
    struct text config = {0};
    char text[2048];
    remove_left(start);
    if (halfstep_store_create(start, run->optimizer, run->own_weights, NULL, &run->store, run->error,
                              run->error_bytes) != HALFSTEP_OK)
        return 1;
    if (checkpoint_config_text(&run->holding, text, sizeof text) < 0) return run_fail(run, "config.json is too long");
    text_add(&config, "%s", text);
    return set(run, config_key, &config);
}

int run_store_create(struct run *run)
{
    struct text name = {0};
    const char *start = start_name(run, &name);
    int status = start ? create(run, start) : 1;
    text_free(&name);
    return status;
}

int run_store_begin(struct run *run)
{
    struct text name = {0};
    for (int i = 0; i < run->tensors; i++) {
        const halfstep_slot_info weight = slot_info(run->optimizer, i, HALFSTEP_SLOT_WEIGHT);
        if (halfstep_write_bytes(run->optimizer, i, HALFSTEP_SLOT_WEIGHT, 0, 0, weight.code_bytes,
                                 run->own_weights[i]) != HALFSTEP_OK)
            return run_fail_in(run, run->optimizer);
    }
    if (run_store_keep(run) != 0) return 1;
    const char *start = start_name(run, &name);
    int status = start ? publish(run, start) : 1;
    text_free(&name);
    return status;
}

void run_store_abandon(struct run *run)
{
    struct text name = {0};
    char error[1];
    if (!run->store) return;
    halfstep_store_close(run->store);
    run->store = NULL;
    struct run silent = {.config = run->config, .error = error, .error_bytes = sizeof error};
    const char *start = start_name(&silent, &name);
    if (start) unlink(start);
    text_free(&name);
}

/* ---- An existing file -------------------------------------------------------------------------------------------- */

/* Reads a number of a text and moves behind it. */
static double next_number(const char **text, int *bad)
{
    char *end;
    const double number = strtod(*text, &end);
    *bad |= end == *text;
    *text = end;
    return number;
}

int history_read(struct run_history *history, const char *text)
{
    int bad = 0, lacking = 0;
    const double points = next_number(&text, &bad);
    for (double i = 0; i < points && i < LOSS_MEAN_STEPS && !bad && !lacking; i++) {
        struct run_point point = {.lr = NAN, .gradient_norm = NAN, .seconds = NAN};
        point.step = next_number(&text, &bad);
        point.train_loss = next_number(&text, &bad);
        if (!bad) lacking = history_add_point(history, &point);
    }
    if (*text && !bad && !lacking) {
        const double step = next_number(&text, &bad);
        const double loss = next_number(&text, &bad);
        if (!bad) lacking = history_add_validation(history, step, loss);
    }
    return bad || lacking ? -1 : 0;
}

/* Goes on in the middle of a step, if the states have some of its micro-steps already. */
static int take_micro_steps(struct run *run, const char *text)
{
    const int64_t all = run->config->micro_steps;
    int bad = 0;
    const double made = next_number(&text, &bad);
    bad |= !(made > 0 && made < (double)all);
    for (int64_t i = 0; !bad && i < (int64_t)made; i++) run->losses[i] = next_number(&text, &bad);
    if (bad) return run_fail(run, "%s: its losses of micro-steps are damaged", run->config->store);
    run->first_micro_step = (int64_t)made;
    return 0;
}

int run_store_open(struct run *run)
{
    struct text name = {0};
    const char *start = start_name(run, &name);
    if (start) remove_left(start); /* a kill may have left both names */
    text_free(&name);
    if (!start) return 1;
    if (halfstep_store_open(run->config->store, run->optimizer, run->own_weights, NULL, &run->store, run->error,
                            run->error_bytes) != HALFSTEP_OK)
        return 1;
    const char *history = halfstep_store_value(run->store, history_key);
    const char *micro = halfstep_store_value(run->store, micro_key);
    int status = 0;
    if (history && history_read(&run->result->history, history) != 0)
        status = run_fail(run, "%s: its history cannot be read", run->config->store);
    return status || !micro ? status : take_micro_steps(run, micro);
}

int run_store_read(const char *path, struct trainer_file *file, char *error, size_t error_bytes)
{
    char *text = store_file_text(path, trainer_key, error, error_bytes);
    return trainer_file_take(text, text ? strlen(text) : 0, path, file, error, error_bytes);
}
