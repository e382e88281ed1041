#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "halfstep.h"
#include "halfstep_io.h"

#include "common/hash.h"
#include "trainer/files/checkpoint.h"
#include "trainer/files/model_files.h"
#include "trainer/files/trainer_file.h"
#include "trainer/run/run.h"

/* ---- Options ----------------------------------------------------------------------------------------------------- */

static const char *schedule_choice(int32_t i) { return halfstep_choice_value("schedule", i); }
static const char *decay_choice(int32_t i) { return halfstep_choice_value("decay", i); }
static const char *generator_choice(int32_t i) { return halfstep_choice_value("generator", i); }
static const char *compute_choice(int32_t i)
{
    static const char *const names[] = {"bf16", "f32"};
    return i < 2 ? names[i] : NULL;
}
static const char *scan_choice(int32_t i) { return halfstep_choice_value("scan", i); }
static const char *accumulator_choice(int32_t i)
{
    static const char *const names[] = {"f32", "bf16", "bf16-sr", "tree", "states"};
    return i < 5 ? names[i] : NULL;
}

#define AT(member) offsetof(struct run_config, member)
#define SAME (OPTION_IDENTITY | OPTION_SAVED)

const struct option run_recipe_option = {"recipe",
                                         OPTION_RECIPE,
                                         AT(recipe),
                                         "R",
                                         "adamw/bf16-sr",
                                         0,
                                         0,
                                         SAME,
                                         NULL,
                                         "rule/weight format/state format; `halfstep info` lists them"};

#define HEADING(text) {"", OPTION_HEADING, 0, NULL, NULL, 0, 0, 0, NULL, text}

static const struct option fixed_rows[] = {
    HEADING("Data"),
    {"data", OPTION_PATHS, AT(data), "FILE...", NULL, 0, 0, OPTION_SAVED, NULL,
     "any files to learn from, as bytes, joined in this order with nothing in between; gzip is unpacked. A folder "
     "stands for the regular files in it and in its folders, sorted by name, without hidden files, empty files and "
     "links to folders. Repeatable"},
    {"val", OPTION_PATHS, AT(val), "FILE...", NULL, 0, 0, OPTION_SAVED, NULL,
     "the same for the validation loss (default: the last tenth of --data, which is then not trained on)"},
    HEADING("Model (with --init: taken from its files)"),
    {"width", OPTION_INTEGER, AT(width), "N", "128", 2, 65536, SAME, NULL, "width of the model, a multiple of --heads"},
    {"depth", OPTION_INTEGER, AT(depth), "N", "4", 1, 1024, SAME, NULL, "layers"},
    {"heads", OPTION_INTEGER, AT(heads), "N", "4", 1, 1024, SAME, NULL, "attention heads"},
    {"context", OPTION_INTEGER, AT(context), "N", "128", 1, 1 << 20, SAME, NULL, "bytes that the model sees at once"},
    HEADING("Run"),
    {"steps", OPTION_INTEGER, AT(steps), "N", "1000", 0, 1e12, OPTION_SAVED, NULL,
     "steps in all, resumed ones included"},
    {"batch", OPTION_INTEGER, AT(batch), "N", "16", 1, 1 << 20, SAME, NULL,
     "sequences in a micro-step, which is the whole step without --micro-steps"},
    {"micro-steps", OPTION_INTEGER, AT(micro_steps), "N", "1", 1, 1 << 20, SAME, NULL,
     "batches whose gradients are added up for one step: the memory is that of one batch, the step that of N times "
     "--batch"},
    {"seed", OPTION_SEED, AT(seed), "N", "1", 0, 0, SAME, NULL, "seed of first weights, data order and rounding"},
    {"compute", OPTION_CHOICE, AT(compute), "TYPE", "bf16", 0, 0, SAME, compute_choice, "type of the matrix products"},
    {"threads", OPTION_INTEGER, AT(threads), "N", "0", 0, 1024, OPTION_SAVED, NULL,
     "0: HALFSTEP_THREADS, OMP_NUM_THREADS or all processors"},
    {"init", OPTION_STRING, AT(init), "DIR", NULL, 0, 0, OPTION_SAVED, NULL,
     "start from the weights of this checkpoint, whatever its recipe, or of a folder, a safetensors file or an index "
     "of several; the config.json there defines the model"},
    {"val-every", OPTION_INTEGER, AT(val_every), "N", "100", 0, 1e12, OPTION_SAVED, NULL,
     "steps between validations; 0: only at the end"},
    {"eval-batches", OPTION_INTEGER, AT(eval_batches), "N", "8", 1, 1e9, OPTION_SAVED, NULL,
     "batches of a validation, the same ones every time"},
    {"sample-bytes", OPTION_INTEGER, AT(sample_bytes), "N", "200", 0, 1 << 20, OPTION_SAVED, NULL,
     "length of the text that the model writes at the end"},
    HEADING("Storage"),
    {"gradients", OPTION_CHOICE, AT(gradients), "FORMAT", NULL, 0, 0, SAME, gradient_format_name,
     "how gradients are stored (default: f32 with f32 weights, otherwise bf16)"},
    {"release", OPTION_FLAG, AT(release), NULL, NULL, 0, 0, SAME, NULL,
     "update each tensor as soon as its gradient exists, and keep no other"},
    {"accumulator", OPTION_CHOICE, AT(accumulator), "FORMAT", NULL, 0, 0, SAME, accumulator_choice,
     "where micro-steps are added up. f32, bf16, bf16-sr (rounds stochastically): in a buffer of this format; the loss "
     "of each batch is divided by N, so that the sum is the mean. tree: likewise, in f32 along a binary tree of the "
     "micro-steps, in log2 N buffers, as several processes do. states: in the optimizer's states, which see N "
     "gradients undivided (default: f32, under mpirun tree)"},
    {"scan", OPTION_CHOICE, AT(scan), "MODE", "scan", 0, 0, SAME, scan_choice,
     "what happens to gradients that are not finite: look first and skip the whole step (scan), skip only their "
     "tensors (per-tensor), or do not look (known-finite)"},
    {"loss-scale", OPTION_NUMBER, AT(loss_scale), "X", NULL, 0, 0x1p40, SAME, NULL,
     "factor on the loss, divided out of the gradients again; a power of two (default: 1024 with f16 gradients, "
     "otherwise 1)"},
    {"generator", OPTION_CHOICE, AT(generator), "NAME", NULL, 0, 0, SAME, generator_choice,
     "generator of the bits for stochastic rounding (default: the first)"},
    HEADING("Optimizer"),
    {"lr", OPTION_NUMBER, AT(lr), "X", "1e-3", 0, 0, SAME, NULL, "learning rate"},
    {"adamw-lr", OPTION_NUMBER, AT(adamw_lr), "X", "0", 0, 1e6, SAME, NULL,
     "with muon: rate at which AdamW steps embedding, head and norms; 0: muon steps all"},
    {"schedule", OPTION_CHOICE, AT(schedule), "NAME", "constant", 0, 0, SAME, schedule_choice,
     "schedule of the learning rate"},
    {"warmup", OPTION_INTEGER, AT(warmup), "N", "0", 0, 1e12, SAME, NULL, "steps over which the rate rises from 0"},
    {"final-lr", OPTION_NUMBER, AT(final_lr), "FRACTION", "0.1", 0, 1, SAME, NULL,
     "rate at the end of a falling schedule, as a fraction of --lr"},
    {"weight-decay", OPTION_NUMBER, AT(weight_decay), "X", "0", 0, 0, SAME, NULL,
     "coefficient, for matrices and the embedding (not for norms)"},
    {"decay-schedule", OPTION_CHOICE, AT(decay_schedule), "NAME", "constant", 0, 0, SAME, schedule_choice,
     "schedule of the weight decay, without warm-up"},
    {"decay", OPTION_CHOICE, AT(decay), "MODE", NULL, 0, 0, SAME, decay_choice,
     "how weight decay acts (default: the rule's own)"},
    {"clip", OPTION_NUMBER, AT(clip), "X", "0", 0, 0, SAME, NULL,
     "largest norm of all gradients together; 0: no clipping. With --release the norm is that of the step before"},
    {"hyper", OPTION_HYPER, AT(hyper), "NAME=VALUE", NULL, 0, 0, OPTION_SAVED, NULL,
     "any hyper-parameter of the rule by its name; repeatable. Those at the end also have options of their own"},
    HEADING("Files"),
    {"log", OPTION_STRING, AT(log), "FILE", NULL, 0, 0, OPTION_SAVED, NULL, "write one CSV line per step"},
    {"checkpoint", OPTION_STRING, AT(checkpoint), "DIR", NULL, 0, 0, 0, NULL,
     "save weights, states and position here at the end, and when interrupted"},
    {"checkpoint-every", OPTION_INTEGER, AT(checkpoint_every), "N", "0", 0, 1e12, OPTION_SAVED, NULL,
     "also save after every N steps; 0: no"},
    {"keep", OPTION_INTEGER, AT(keep), "N", "1", 1, 1e6, OPTION_SAVED, NULL, "newest checkpoints to keep"},
    {"resume", OPTION_FLAG, AT(resume), NULL, NULL, 0, 0, 0, NULL,
     "continue from --checkpoint, bit for bit; options that are not given keep their saved values"},
    {"quiet", OPTION_FLAG, AT(quiet), NULL, NULL, 0, 0, 0, NULL, "no progress on stderr"},
};

/* Hyper-parameters that have an option above. */
static const struct {
    const char *hyper, *option;
} covered[] = {
    {"lr", "lr"},
    {"weight_decay", "weight-decay"},
    {"clip_norm", "clip"},
    {"warmup_steps", "warmup"},
    {"total_steps", "steps"},
    {"final_fraction", "final-lr"},
    {"gradient_scale", "loss-scale"},
};

static const char *covering_option(const char *hyper)
{
    for (int i = 0; i < COUNT_OF(covered); i++)
        if (strcmp(covered[i].hyper, hyper) == 0) return covered[i].option;
    return NULL;
}

/* Joins a hyper-parameter with the row of another rule that has one of the same name. Takes the wider bounds, because
 * the optimizer checks its own. Appends the default and the title to the help if they differ. */
static void join_hyper(struct option *row, char text[3][256], const char *rule, const halfstep_hyper_info *hyper)
{
    if (strtod(text[1], NULL) != hyper->initial) append(text[1], sizeof text[1], ", %s %.6g", rule, hyper->initial);
    if (!strstr(text[2], hyper->title)) append(text[2], sizeof text[2], "; %s: %s", rule, hyper->title);
    if (hyper->minimum < row->minimum) row->minimum = hyper->minimum;
    if (hyper->maximum < row->maximum || (hyper->maximum == row->maximum && hyper->exclusive_maximum)) return;
    row->maximum = hyper->maximum;
    row->flags = hyper->exclusive_maximum ? OPTION_EXCLUSIVE_MAXIMUM : 0;
}

/* Adds a row for a hyper-parameter, or joins it with a row of the same name. */
static void add_hyper(struct run_options *options, const char *rule, const halfstep_hyper_info *hyper)
{
    if (covering_option(hyper->name)) return;
    char name[96];
    snprintf(name, sizeof name, "%s", hyper->name);
    for (char *c = name; *c; c++)
        if (*c == '_') *c = '-';
    for (int i = 0; i < options->n; i++) {
        if (options->rows[i].kind != OPTION_HYPER_AS || strcmp(options->rows[i].name, name) != 0) continue;
        join_hyper(&options->rows[i], options->text[i], rule, hyper);
        return;
    }
    if (options->n == RUN_OPTIONS_MAX) return;
    int i = options->n++;
    snprintf(options->text[i][0], sizeof options->text[i][0], "%s", name);
    const int named = halfstep_choice_value(hyper->name, 0) != NULL;
    const char *word = named ? halfstep_choice_value(hyper->name, (int32_t)hyper->initial) : NULL;
    if (named) snprintf(options->text[i][1], sizeof options->text[i][1], "%s", word);
    else snprintf(options->text[i][1], sizeof options->text[i][1], "%.6g", hyper->initial);
    snprintf(options->text[i][2], sizeof options->text[i][2], "%s", hyper->title);
    for (int32_t k = 0; named && (word = halfstep_choice_value(hyper->name, k)); k++)
        append(options->text[i][2], sizeof options->text[i][2], "%s %s", k ? "," : ":", word);
    options->rows[i] = (struct option){options->text[i][0],
                                       OPTION_HYPER_AS,
                                       AT(hyper),
                                       named ? "NAME" : "X",
                                       options->text[i][1],
                                       named ? 0 : hyper->minimum,
                                       named ? 0 : hyper->maximum,
                                       hyper->exclusive_maximum ? OPTION_EXCLUSIVE_MAXIMUM : 0,
                                       NULL,
                                       options->text[i][2]};
}

void run_options_init(struct run_options *options)
{
    memset(options, 0, sizeof *options);
    options->n = COUNT_OF(fixed_rows);
    memcpy(options->rows, fixed_rows, sizeof fixed_rows);
    options->rows[options->n++] = (struct option)HEADING("Hyper-parameters, where the rule has them");
    for (int32_t rule = 0; rule < halfstep_rule_count(); rule++) {
        const halfstep_rule_info info = rule_info(rule);
        if (info.raw_gradient) continue;
        for (int32_t i = 0; i < info.hypers; i++) {
            halfstep_hyper_info hyper = {.struct_size = sizeof hyper};
            if (halfstep_get_hyper_info(rule, i, &hyper) == HALFSTEP_OK) add_hyper(options, info.name, &hyper);
        }
    }
}

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
        hstep_buffer text = {0};
        args_text(&group, option, &text);
        status = text.failed ? -1 : visit(context, option, text_string(&text));
        text_free(&text);
    }
    return status;
}

/* ---- From options to a configuration ----------------------------------------------------------------------------- */

void run_config_settle(struct run_config *config)
{
    struct recipe_parts parts;
    recipe_split(config->recipe, &parts);
    if (!config->gradients) config->gradients = format_named(parts.weight).code_bits <= 16 ? "bf16" : "f32";
    if (config->micro_steps > 1 && !config->accumulator)
        config->accumulator = config->dist ? "tree" : accumulator_choice(0);
    if (config->loss_scale == 0) config->loss_scale = strcmp(config->gradients, "f16") == 0 ? 1024 : 1;
    if (!config->generator) config->generator = halfstep_choice_value("generator", 0);
    if (!config->decay) config->decay = rule_info(halfstep_rule_find(parts.rule)).decay;
}

int run_adds_up(const struct run_config *config)
{
    return config->micro_steps > 1 && strcmp(config->accumulator, "states") != 0;
}

/* Adds the hyper-parameters of the checkpoint that the command line does not set. */
static int restore_hypers(struct args *args, const struct option_group *group, const struct option *option,
                          const char *saved, char *error, size_t error_bytes)
{
    const struct string_list *list = (const void *)((const char *)group->target + option->offset);
    while (*saved) {
        size_t n = strcspn(saved, ","), name = strcspn(saved, "=") + 1;
        int there = 0, status = 0;
        for (int i = 0; i < list->n; i++) there |= strncmp(list->item[i], saved, name) == 0;
        const char *word = args_format(args, "%.*s", (int)n, saved);
        if (!word) return no_memory(error, error_bytes);
        if (!there) status = args_set(args, group, option, word, error, error_bytes);
        if (status) return status;
        saved += n;
        if (*saved == ',') saved++;
    }
    return 0;
}

static int restore_options(struct args *args, const struct option_group *groups, int n_groups,
                           struct run_config *config, const struct trainer_file *trainer, char *error,
                           size_t error_bytes)
{
    for (int g = 0; g < n_groups; g++) {
        if (groups[g].target != config) continue;
        for (int i = 0; i < groups[g].n; i++) {
            const struct option *option = &groups[g].rows[i];
            const char *saved = trainer_file_option(trainer, option->name);
            if (!saved || !saved[0] || !(option->flags & (OPTION_SAVED | OPTION_IDENTITY))) continue;
            char why[400];
            int bad = 0;
            if (option->kind == OPTION_HYPER) bad = restore_hypers(args, &groups[g], option, saved, why, sizeof why);
            else if (!args_given(args, option->name)) bad = args_set(args, &groups[g], option, saved, why, sizeof why);
            if (bad) {
                snprintf(error, error_bytes, "%s: trainer.json: %s", config->checkpoint, why);
                return 1;
            }
        }
    }
    return 0;
}

/* Splits --checkpoint DIR/checkpoint-N into the checkpoint to resume and DIR, where the next ones are saved. */
static int split_generation(struct args *args, struct run_config *config, const halfstep_checkpoint *checkpoint)
{
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    halfstep_get_checkpoint_info(checkpoint, &info);
    config->resume_from = config->checkpoint;
    if (strcmp(info.directory, config->checkpoint) != 0) return 0;
    size_t n = strlen(config->checkpoint);
    while (n > 1 && config->checkpoint[n - 1] == '/') n--;
    size_t name = n;
    while (name && config->checkpoint[name - 1] != '/') name--;
    if (strncmp(config->checkpoint + name, "checkpoint-", 11) != 0) return 0;
    size_t end = name;
    while (end > 1 && config->checkpoint[end - 1] == '/') end--;
    config->checkpoint = args_format(args, "%.*s", end ? (int)end : 1, end ? config->checkpoint : ".");
    return config->checkpoint ? 0 : 1;
}

/* Fails if the log that the checkpoint names by a relative path is not here, where a second one would begin. */
static int check_log(const struct args *args, const struct run_config *config, char *error, size_t error_bytes)
{
    const int writes = !config->dist || config->dist->rank == 0;
    if (!config->log || !writes || args_given(args, "log") || access(config->log, F_OK) == 0) return 0;
    snprintf(error, error_bytes,
             "the log of this run, %s, is not here: resume in the folder where the run was started, or give --log FILE",
             config->log);
    return 1;
}

static int restore(struct args *args, const struct option_group *groups, int n_groups, struct run_config *config,
                   char *error, size_t error_bytes)
{
    halfstep_checkpoint *checkpoint;
    struct trainer_file trainer;
    char why[1024];
    int code = checkpoint_open_quickly(&checkpoint, config->checkpoint, why, sizeof why);
    if (code != HALFSTEP_OK) {
        snprintf(error, error_bytes, "%s%s", code == HALFSTEP_ERROR_NAME ? "--resume: " : "", why);
        return 1;
    }
    int status = trainer_file_read(checkpoint, &trainer, error, error_bytes) != HALFSTEP_OK;
    if (!status && split_generation(args, config, checkpoint) != 0) {
        status = no_memory(error, error_bytes);
    }
    halfstep_close_checkpoint(checkpoint);
    if (!status) status = restore_options(args, groups, n_groups, config, &trainer, error, error_bytes);
    if (!status) status = check_log(args, config, error, error_bytes);
    trainer_file_free(&trainer);
    return status ? status : run_shape_resumed(config, error, error_bytes);
}

int run_hyper_check(const struct run_config *config, char *error, size_t error_bytes)
{
    for (int i = 0; i < config->hyper.n; i++) {
        char name[96];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(config->hyper.item[i], "="), config->hyper.item[i]);
        const char *option = covering_option(name);
        if (option) {
            snprintf(error, error_bytes, "--hyper %s: use --%s", name, option);
            return -1;
        }
    }
    return 0;
}

int run_config_complete(struct args *args, const struct option_group *groups, int n_groups, struct run_config *config,
                        char *error, size_t error_bytes)
{
    if (!config->checkpoint && (config->resume || args_given(args, "checkpoint-every") || args_given(args, "keep"))) {
        snprintf(error, error_bytes, "--%s needs --checkpoint DIR",
                 config->resume             ? "resume"
                 : args_given(args, "keep") ? "keep"
                                            : "checkpoint-every");
        return 2;
    }
    /* `compare` gives each run a directory of its own, so nothing is restored here. */
    int trains = groups[0].n > 0 && config->recipe;
    if (config->resume && trains) {
        int status = restore(args, groups, n_groups, config, error, error_bytes);
        if (status != 0) return status;
    } else if (config->init) {
        int status = run_shape_from_init(args, config, error, error_bytes);
        if (status) return status;
    }
    if (!config->data.n) {
        snprintf(error, error_bytes, "--data FILE is missing");
        return 2;
    }
    if (run_hyper_check(config, error, error_bytes) != 0) return 2;
    struct lm_config shape = run_shape(config);
    if (lm_config_check(&shape, error, error_bytes) != 0) return 2;
    if (trains) run_config_settle(config);
    return 0;
}

/* ---- Data -------------------------------------------------------------------------------------------------------- */

void run_data_title(const struct path_list *list, char *text, size_t text_bytes)
{
    if (list->n == 1) snprintf(text, text_bytes, "%.250s", list->item[0]);
    else snprintf(text, text_bytes, "%.250s and %d more", list->item[0], list->n - 1);
}

int run_paths_check(const struct run_config *config, const char *resumed, const struct named_path *outputs,
                    int n_outputs, char *error, size_t error_bytes)
{
    static const char *const names[] = {"--data", "--val"};
    const struct path_list *const lists[] = {&config->data, &config->val};
    struct data_list files[2] = {{0}};
    int status = 0;
    size_t n = 0;
    for (int l = 0; l < 2 && !status; l++) {
        const struct path_list *list = lists[l];
        status = data_list(list->item, list->n, &files[l], error, error_bytes) != 0;
        for (int i = 0; i < list->n && !status; i++)
            status =
                paths_outside((struct named_path){names[l], list->item[i]}, outputs, n_outputs, error, error_bytes);
    }
    /* The run also reads the config.json beside a file of --init, and all files that an index names. */
    char init[MODEL_PATH_BYTES], settings[MODEL_PATH_BYTES];
    if (config->init) model_files_inputs(config->init, init, settings);
    struct named_path *inputs = calloc(files[0].n + files[1].n + 3, sizeof *inputs);
    if (!inputs && !status) {
        status = no_memory(error, error_bytes);
    }
    for (int l = 0; l < 2 && inputs; l++)
        for (size_t i = 0; i < files[l].n; i++) inputs[n++] = (struct named_path){names[l], files[l].file[i].path};
    if (!status) {
        inputs[n++] = (struct named_path){"--init", config->init ? init : NULL};
        inputs[n++] = (struct named_path){"config.json of --init", config->init ? settings : NULL};
        inputs[n++] = (struct named_path){"--resume", resumed};
        status = paths_check(inputs, (int)n, outputs, n_outputs, error, error_bytes);
    }
    free(inputs);
    data_list_free(&files[0]);
    data_list_free(&files[1]);
    return status;
}

static int load(const struct run_config *config, struct run_data *data, char *error, size_t error_bytes)
{
    char what[320], title[280];
    if (data_load_all(config->data.item, config->data.n, &data->data_file, &data->files, error, error_bytes) != 0)
        return -1;
    data->data_hash = hash_finish(hash_bytes(HASH_START, data->data_file.bytes, data->data_file.n));
    if (config->val.n) {
        size_t files;
        if (data_load_all(config->val.item, config->val.n, &data->val_file, &files, error, error_bytes) != 0) return -1;
        data->val_hash = hash_finish(hash_bytes(HASH_START, data->val_file.bytes, data->val_file.n));
        data->train = (struct data_part){data->data_file.bytes, data->data_file.n};
        data->validation = (struct data_part){data->val_file.bytes, data->val_file.n};
    } else {
        data_split(&data->data_file, &data->train, &data->validation);
    }
    run_data_title(&config->data, title, sizeof title);
    snprintf(what, sizeof what, "%s%s", config->val.n ? "" : "training part of ", title);
    if (data_check(&data->train, (int)config->context, what, error, error_bytes) != 0) return -1;
    if (config->val.n) run_data_title(&config->val, title, sizeof title);
    snprintf(what, sizeof what, "%s%s", config->val.n ? "" : "validation part of ", title);
    return data_check(&data->validation, (int)config->context, what, error, error_bytes);
}

int run_data_load(const struct run_config *config, struct run_data *data, char *error, size_t error_bytes)
{
    memset(data, 0, sizeof *data);
    if (load(config, data, error, error_bytes) == 0) return 0;
    run_data_free(data);
    return -1;
}

void run_data_free(struct run_data *data)
{
    data_free(&data->data_file);
    data_free(&data->val_file);
    memset(data, 0, sizeof *data);
}
