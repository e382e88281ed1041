/* One training run of the byte-level language model: its configuration (run_config), the run itself (train_run) and its
 * result (run_result). There is no global state, so that `compare` can run once per recipe and seed.
 *
 *   struct run_options table;                        the option rows, hyper-parameters of all rules included
 *   run_options_init(&table);
 *   struct run_config config;
 *   groups[0] = (struct option_group){"...", table.rows, table.n, &config};
 *   args_parse(...); run_config_complete(&args, &groups[0], &config, error, sizeof error);
 *   run_data_load(&config, &data, error, sizeof error);
 *   status = train_run(&config, &data, &progress, &result, error, sizeof error);
 *   run_result_document(&document, &result);
 *   run_result_free(&result); run_data_free(&data); args_free(&args); */
#ifndef HALFSTEP_RUN_H
#define HALFSTEP_RUN_H

#include <stddef.h>
#include <stdint.h>

#include "common/args/args.h"
#include "common/args/recipes.h"
#include "common/document.h"
#include "common/paths.h"
#include "common/progress.h"
#include "trainer/data/data.h"
#include "trainer/models/llama.h"
#include "trainer/ranks/dist.h"

/* ---- Configuration
 * ------------------------------------------------------------------------------------------------ */

struct run_config {
    struct path_list data, val; /* files and folders; without val, validation uses the last tenth of data */
    int64_t width, depth, heads, context;
    /* Set from --init or from the checkpoint of --resume. 0 means the default of struct lm_config. */
    int64_t intermediate;
    double rms_norm_eps, rope_theta;
    int64_t steps, batch, micro_steps; /* a micro-step trains on `batch` sequences */
    uint64_t seed;
    int64_t threads;       /* 0: halfstep_default_threads() */
    const char *recipe;    /* full name: rule/weight format/state format */
    const char *gradients; /* NULL: f32 for f32 weights, otherwise bf16 */
    const char *compute;
    const char *accumulator; /* how micro-steps are added up; NULL: f32, or none if there is one micro-step */
    const char *scan;
    int release;
    double loss_scale; /* 0: 1, or 1024 for f16 gradients */
    double lr, weight_decay, clip, final_lr;
    double adamw_lr;   /* above 0: AdamW steps embedding, head and norms at this rate */
    const char *decay; /* NULL: the rule's default */
    const char *schedule, *decay_schedule, *generator;
    int64_t warmup;
    struct string_list hyper; /* "name=value": the hyper-parameters without a field of their own */
    int64_t val_every, eval_batches;
    const char *init;       /* directory or file with the first weights, or NULL */
    const char *init_note;  /* note for the user about the config.json of --init, or NULL */
    const char *log;        /* CSV file or NULL */
    const char *checkpoint; /* directory or NULL */
    int64_t checkpoint_every, keep;
    int resume;
    const char *resume_from; /* the checkpoint to resume: a directory, or one checkpoint in it. NULL: checkpoint */
    int64_t sample_bytes;    /* length of the text that the trained model generates at the end */
    int quiet;
    const char *digits; /* train mnist only, up to digits_seed: the folder of --data. NULL: the digits are drawn */
    int64_t epochs, train_images, test_images; /* number of images; 0: all */
    uint64_t digits_seed;
    struct dist *dist; /* the job that this run is a process of, NULL: the run is a single process */
};

#define RUN_OPTIONS_MAX 112
struct run_options {
    struct option rows[RUN_OPTIONS_MAX];
    int n;
    char text[RUN_OPTIONS_MAX][3][256]; /* names, defaults and help of the rows made from the library's tables */
};

/* Lists every option of a run except --recipe and --json, which `train` and `compare` define themselves. */
void run_options_init(struct run_options *options);
/* --recipe, which sets `recipe` of struct run_config. */
extern const struct option run_recipe_option;
/* Calls `visit` for each option that a checkpoint keeps, with its value as text. Stops at the first result that is not
 * 0 and returns it. Returns -1 if out of memory. */
typedef int run_option_visitor(void *context, const struct option *option, const char *value);
int run_each_option(const struct run_config *config, run_option_visitor *visit, void *context);

/* Completes the configuration after args_parse(). --resume takes all options that were not given from the checkpoint.
 * --init takes the model's sizes from its files. Then come the defaults that depend on other options. `config` is the
 * target of one of the groups. Returns 0, or the exit status (1 or 2) with an error text. */
int run_config_complete(struct args *args, const struct option_group *groups, int n_groups, struct run_config *config,
                        char *error, size_t error_bytes);
/* Returns -1 with an error text if --hyper sets a hyper-parameter that has an option of its own. */
int run_hyper_check(const struct run_config *config, char *error, size_t error_bytes);
/* Fills in the defaults that depend on the recipe. run_config_complete() calls it last; `compare` calls it for each
 * recipe. */
void run_config_settle(struct run_config *config);
/* True if the gradients of micro-steps are added up in buffers. False if the states add them up, or if there is only
 * one micro-step. */
int run_adds_up(const struct run_config *config);
struct lm_config run_shape(const struct run_config *config);
/* run_shape_from_init() takes the model's sizes from the files of --init, and refuses options that contradict them.
 * run_shape_resumed() takes the sizes that have no option from the checkpoint of --resume. Both return 0, or the exit
 * status with an error text. */
int run_shape_from_init(struct args *args, struct run_config *config, char *error, size_t error_bytes);
int run_shape_resumed(struct run_config *config, char *error, size_t error_bytes);

struct run_data {
    size_t files; /* number of files of --data */
    struct data_file data_file, val_file;
    struct data_part train, validation;
    uint64_t data_hash, val_hash;
};

/* Reads --data and --val. Returns 0, or -1 with an error text. */
int run_data_load(const struct run_config *config, struct run_data *data, char *error, size_t error_bytes);
void run_data_free(struct run_data *data);
/* Writes a title for --data or --val: "a.txt", "a.txt and 2 more". */
void run_data_title(const struct path_list *list, char *text, size_t text_bytes);
/* Fails if an output is a file that the run reads, or is another output. The run reads the files of --data, --val and
 * --init, and `resumed` unless it is NULL. An output also must not lie in a folder of --data or --val, because the next
 * run would train on it. Returns 0, or the exit status with an error text. */
int run_paths_check(const struct run_config *config, const char *resumed, const struct named_path *outputs,
                    int n_outputs, char *error, size_t error_bytes);

/* ---- Result
 * -------------------------------------------------------------------------------------------------------- */

struct run_point {
    double step;       /* number of steps done */
    double train_loss; /* of this step's batch, before the update */
    double lr, gradient_norm, seconds;
};

struct run_validation {
    double step, loss;
};

struct run_history {
    struct run_point *point;
    struct run_validation *validation;
    size_t n_points, n_validations, point_capacity, validation_capacity;
};

struct run_result {
    char recipe[RECIPE_BYTES], gradients[16], compute[16], isa[32];
    char accumulator[16]; /* "" with one micro-step */
    uint64_t seed;
    int64_t steps, first_step, params, micro_steps;
    int threads, release;
    int ranks;             /* number of processes */
    int agreed;            /* all ranks know of the failure; if not, the other ranks still run */
    int diverged;          /* gradients stayed not finite, and the run ended early */
    uint64_t job_received; /* bytes that all ranks together have received in steps */
    int tensors_skip;      /* skipped_steps counts tensors, not steps */
    double train_loss;     /* mean of the last (up to 20) steps, NaN without any */
    double val_loss;
    double tokens_per_s, seconds, optimizer_seconds;
    uint64_t skipped_steps;
    uint64_t weight_bytes, gradient_bytes, state_bytes; /* allocated; gradients include their accumulators */
    uint64_t peak_gradient_bytes, activation_bytes;
    uint64_t data_files, data_bytes; /* number and size of the files of --data (train lm) */
    uint64_t held_data_bytes;        /* of all data, which are in memory */
    uint64_t peak_process_bytes;     /* peak memory of the process; 0: unknown, or several runs shared the process */
    int32_t fell_back;               /* tensors too small for the block format of the recipe */
    double weights_changed;          /* fraction of the weights whose stored bits differ from the start, NaN: unknown */
    uint64_t state_hash;
    char checkpoint[1024]; /* directory of the last save, "" without one */
    char **note;           /* warnings of a run that went on, each once */
    size_t n_notes;
    struct run_history history; /* includes the steps before a resume */
    uint8_t *sample;
    size_t sample_bytes;
};

/* Runs the training. Returns 0 if it finished, 1 if it failed, and 2 for an impossible configuration, with an error
 * text. Returns 128 + n after signal n: the run then ends after a whole step, and saves if --checkpoint was given. The
 * error text says whether the work was saved. A run that diverges ends with 1, and its result is filled in. The caller
 * frees `result` in every case. */
int train_run(const struct run_config *config, const struct run_data *data, struct progress *progress,
              struct run_result *result, char *error, size_t error_bytes);

/* Returns the bytes of weights, gradients and states that memory holds. */
uint64_t run_held_bytes(const struct run_result *result);
/* Builds a new document with the result. */
void run_result_document(struct document *document, const struct run_result *result);
void run_result_free(struct run_result *result);
/* Returns the peak memory (RSS) of this process in bytes, or 0 if the kernel does not report it. */
uint64_t process_peak_bytes(void);

/* Adds a note unless the result has the same one. Returns true if the note is new. */
int run_result_note(struct run_result *result, const char *note);

/* Print for people: print_run() the first line of a result, print_held() the last one with skipped steps, memory and
 * changed weights. */
void print_run(const struct run_result *result);
void print_held(const struct run_result *result);
/* Prints bytes as text. Unprintable bytes are escaped on a terminal and unchanged in a file or pipe. */
void print_bytes(const uint8_t *bytes, size_t n);

/* Append to the history; the checkpoint code uses them, too. Return 0, or -1 if out of memory. */
int history_add_point(struct run_history *history, const struct run_point *point);
int history_add_validation(struct run_history *history, double step, double loss);

#endif
