/* One training run of the byte-level language model as a function: what it is told (run_config), what it leaves behind
 * (run_result). There is no global state, so that `compare` can call it once per recipe and seed.
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
#ifndef HALFSTEP_TRAIN_H
#define HALFSTEP_TRAIN_H

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

/* ---- What a run is told ------------------------------------------------------------------------------------------ */

struct run_config {
    struct path_list data, val; /* files and folders; no val: the last tenth of data */
    int64_t width, depth, heads, context;
    /* Of the model, from --init or the checkpoint of --resume: 0, the defaults of struct lm_config. */
    int64_t intermediate;
    double rms_norm_eps, rope_theta;
    int64_t steps, batch, micro_steps; /* batch sequences in each micro-step */
    uint64_t seed;
    int64_t threads;       /* 0: what halfstep_default_threads() says */
    const char *recipe;    /* full form */
    const char *gradients; /* NULL: bf16 for 16-bit weights, otherwise f32 */
    const char *compute;
    const char *accumulator; /* where micro-steps add up; NULL: f32, or without micro-steps nowhere */
    const char *scan;
    int release;
    double loss_scale; /* 0: 1, or 1024 for f16 gradients */
    double lr, weight_decay, clip, final_lr;
    const char *decay; /* NULL: the rule's own */
    const char *schedule, *generator;
    int64_t warmup;
    struct string_list hyper; /* "name=value", all other hyper-parameters */
    int64_t val_every, eval_batches;
    const char *init;       /* directory or file whose weights to start from, or NULL */
    const char *init_note;  /* what people are told of its config.json, or NULL */
    const char *log;        /* CSV file or NULL */
    const char *checkpoint; /* directory or NULL */
    int64_t checkpoint_every, keep;
    int resume;
    const char *resume_from; /* what to open then: checkpoint, or one of those in it. NULL: checkpoint */
    int64_t sample_bytes;    /* text the trained model writes at the end */
    int quiet;
    const char *digits; /* of train mnist, like what follows: the folder that is its --data, NULL: they are drawn */
    int64_t epochs, train_images, test_images; /* images: 0: all of them */
    uint64_t digits_seed;
    struct dist *dist; /* the processes of the job that the run is, NULL: it is alone */
};

#define RUN_OPTIONS_MAX 112
struct run_options {
    struct option rows[RUN_OPTIONS_MAX];
    int n;
    char text[RUN_OPTIONS_MAX][3][256]; /* names, defaults and help of rows that were made from the library's tables */
};

/* Every option of a run except --recipe and --json, which `train` and `compare` each name for themselves. */
void run_options_init(struct run_options *options);
/* --recipe, on struct run_config. */
extern const struct option run_recipe_option;

/* After parsing: with --resume, whatever the command line did not give comes from the checkpoint; with --init, the
 * shape comes from the checkpoint it names; the rest of the defaults that depend on others. `group` is the one whose
 * target is config. 0, or the exit status (1 or 2) and one line. */
int run_config_complete(struct args *args, const struct option_group *groups, int n_groups, struct run_config *config,
                        char *error, size_t error_bytes);
/* -1 and one line where --hyper names what has an option of its own. */
int run_hyper_check(const struct run_config *config, char *error, size_t error_bytes);
/* The defaults that depend on the recipe. run_config_complete() ends with it; `compare` calls it for each recipe. */
void run_config_settle(struct run_config *config);
/* Whether the gradients of micro-steps are added up in buffers, and not in the states. */
int run_adds_up(const struct run_config *config);
struct lm_config run_shape(const struct run_config *config);
/* Take the model from the files of --init, and refuse options that contradict them; take the numbers of the model that
 * no option tells from the checkpoint of --resume. 0, or the exit status and one line. */
int run_shape_from_init(struct args *args, struct run_config *config, char *error, size_t error_bytes);
int run_shape_resumed(struct run_config *config, char *error, size_t error_bytes);

struct run_data {
    size_t files; /* of --data */
    struct data_file data_file, val_file;
    struct data_part train, validation;
    uint64_t data_hash, val_hash;
};

/* 0, or -1 and one line. */
int run_data_load(const struct run_config *config, struct run_data *data, char *error, size_t error_bytes);
void run_data_free(struct run_data *data);
/* A name for what --data or --val is: "a.txt", "a.txt and 2 more". */
void run_data_title(const struct path_list *list, char *text, size_t text_bytes);
/* No output may be a file that the run reads (those of --data, --val and --init and what `resumed` names, which may be
 * NULL), nor another output, nor lie in a folder of --data or --val, whose next reader would take it for text. 0, or
 * the exit status and one line. */
int run_paths_check(const struct run_config *config, const char *resumed, const struct named_path *outputs,
                    int n_outputs, char *error, size_t error_bytes);

/* ---- What it leaves behind --------------------------------------------------------------------------------------- */

struct run_point {
    double step;       /* this many steps were done */
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
    char accumulator[16]; /* "" without micro-steps */
    uint64_t seed;
    int64_t steps, first_step, params, micro_steps;
    int threads, release;
    int ranks;             /* processes */
    int agreed;            /* how it failed is known to all of them; otherwise the others go on */
    uint64_t job_received; /* bytes that all of them have received in steps */
    int tensors_skip;      /* skipped_steps counts tensors, not steps */
    double train_loss;     /* mean over the last (up to 20) steps, NaN without any */
    double val_loss;
    double tokens_per_s, seconds, optimizer_seconds;
    uint64_t skipped_steps;
    uint64_t weight_bytes, gradient_bytes, state_bytes; /* held; gradients with their accumulators */
    uint64_t peak_gradient_bytes, activation_bytes;
    uint64_t data_files, data_bytes; /* of --data of train lm */
    uint64_t peak_process_bytes;     /* most memory that the process has had, 0: not known, or of several runs */
    int32_t fell_back;               /* tensors too small for the block format asked for */
    double weights_changed; /* fraction of the weights whose stored bits differ from the start, NaN: not known */
    uint64_t state_hash;
    char checkpoint[1024]; /* where it was saved last, "" if nowhere */
    char **note;           /* what went wrong beside the saves that succeeded, each once */
    size_t n_notes;
    struct run_history history; /* resumed runs include what went before */
    uint8_t *sample;
    size_t sample_bytes;
};

/* 0: done. 1: failed, 2: impossible configuration, one line in error. 128 + n: ended by signal n after a whole step
 * (and a save, where --checkpoint was given); error says what became of the work. result is to be freed in every
 * case. */
int train_run(const struct run_config *config, const struct run_data *data, struct progress *progress,
              struct run_result *result, char *error, size_t error_bytes);

/* The result as a new document. */
void run_result_document(struct document *document, const struct run_result *result);
void run_result_free(struct run_result *result);
/* The most memory that this process has had in RAM since it started; 0 where the kernel does not say. */
uint64_t process_peak_bytes(void);

/* Adds a note unless it is there already. Whether it is a new one. */
int run_result_note(struct run_result *result, const char *note);

/* For people: the first line of a result; and its last, what was skipped, held and changed. */
void print_run(const struct run_result *result);
void print_held(const struct run_result *result);
/* Bytes as text for people: as they are into a file, with everything unprintable escaped on a terminal. */
void print_bytes(const uint8_t *bytes, size_t n);

/* History, shared with the checkpoint code. 0, or -1 when memory is out. */
int history_add_point(struct run_history *history, const struct run_point *point);
int history_add_validation(struct run_history *history, double step, double loss);

#endif
