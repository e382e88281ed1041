#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/interrupt.h"
#include "trainer/mnist/mnist.h"
#include "trainer/ranks/ranks.h"
#include "trainer/run/run.h"

/* A command line of train. */
struct training {
    struct run_options table;
    struct run_config config;
    int json;
    struct args args;
    struct option_group groups[3];
};

static int read_options(struct training *t, const struct command *command,
                        void (*options_init)(struct run_options *options), int argc, char **argv)
{
    static const struct option output_rows[] = {OPTION_JSON(struct training)};
    memset(t, 0, sizeof *t); /* options of the other model, and members without an option, stay 0 */
    options_init(&t->table);
    t->groups[0] = (struct option_group){"Recipe", &run_recipe_option, 1, &t->config};
    t->groups[1] = (struct option_group){"Options", t->table.rows, t->table.n, &t->config};
    t->groups[2] = (struct option_group){"Output", output_rows, COUNT_OF(output_rows), t};
    return args_parse(&t->args, command, t->groups, 3, argc, argv);
}

/* ---- train lm ---------------------------------------------------------------------------------------------------- */

static const char lm_notes[] =
    "Results go to stdout, progress and notes to stderr. Without --json the results end with a sample of text that\n"
    "the model writes. train_loss is the mean over the last 20 steps, val_loss the loss of the last validation.\n"
    "\n"
    "Ctrl-C finishes the step, saves (with --checkpoint) and exits; a second Ctrl-C quits at once. SIGTERM does the\n"
    "same. So do a terminal that closes (SIGHUP), a closed pipe (SIGPIPE), and the warnings of batch systems\n"
    "(SIGUSR1, SIGUSR2, SIGXCPU), unless they are ignored, as under nohup.\n"
    "\n"
    "Under mpirun the processes share the micro-steps, and the rows of the optimizer's states. The results have the\n"
    "bits of one process with --accumulator tree. Rank 0 writes progress, log, checkpoint and results; memory and\n"
    "threads in the results are those of rank 0. See docs/scale.md.\n"
    "\n"
    "Exit status: 0 done, 1 failure, 2 wrong usage, 128 + the signal if interrupted (130 Ctrl-C, 143 SIGTERM).\n"
    "\n"
    "  halfstep train lm --data book.txt --recipe adamw/bf16-sr/int8 --steps 2000 --checkpoint run\n"
    "  halfstep train lm --data books/ more.txt.gz --checkpoint run\n"
    "  halfstep train lm --checkpoint run --resume --steps 4000\n"
    "  mpirun -n 4 halfstep train lm --data book.txt --micro-steps 8 --checkpoint run\n";

static const struct command lm_command = {
    .name = "train lm",
    .usage = "--data FILE... [options]",
    .summary = "Trains a byte-level language model of the Llama type. Weights, gradients and optimizer states are "
               "stored in the formats of --recipe and --gradients; the update is computed in fp32.",
    .notes = lm_notes,
    .absent = "store",
    .instead = "save with --checkpoint DIR and --checkpoint-every N; states in a file are for programs that use the "
               "library, such as store=FILE in Python",
};

static void print_bytes_line(const char *what, uint64_t bytes, double params)
{
    printf("  %-10s %8.3f bytes/param  %10.2f MiB\n", what, (double)bytes / params, (double)bytes / 0x1p20);
}

void print_run(const struct run_result *r)
{
    printf("recipe %s, %s gradients, %s products, seed %llu, %lld parameters\n", r->recipe, r->gradients, r->compute,
           (unsigned long long)r->seed, (long long)r->params);
}

void print_held(const struct run_result *r)
{
    if (r->skipped_steps)
        printf("%llu %s skipped: gradients were not finite, or too large\n", (unsigned long long)r->skipped_steps,
               r->tensors_skip ? "tensor updates" : "steps");
    double n = r->params > 0 ? (double)r->params : 1;
    printf("memory held:\n");
    print_bytes_line("weights", r->weight_bytes, n);
    print_bytes_line("gradients", r->gradient_bytes, n);
    print_bytes_line("states", r->state_bytes, n);
    print_bytes_line("total", run_held_bytes(r), n);
    printf("  %-10s %32.2f MiB\n", "data", (double)r->held_data_bytes / 0x1p20);
    if (r->peak_process_bytes) print_bytes_line("process", r->peak_process_bytes, n);
    if (r->fell_back)
        printf("  (%d tensors are too small for the block formats of the recipe and are stored without blocks)\n",
               r->fell_back);
    printf("weights changed %.2f %%, state hash %016llx\n", 100 * r->weights_changed,
           (unsigned long long)r->state_hash);
}

static void print_lm_result(const struct run_result *r)
{
    print_run(r);
    if (r->accumulator[0])
        printf("steps of %lld micro-steps, gradients added up in %s%s\n", (long long)r->micro_steps,
               strcmp(r->accumulator, "states") == 0 ? "the " : "", r->accumulator);
    printf("%lld steps, training loss %.4f, validation loss %.4f nats per byte\n", (long long)r->steps, r->train_loss,
           r->val_loss);
    if (r->steps > r->first_step)
        printf("%.0f tokens/s, %.1f %% of the time in the optimizer; %s, %d threads\n", r->tokens_per_s,
               100 * r->optimizer_seconds / r->seconds, r->isa, r->threads);
    if (r->data_files > 1)
        printf("--data was %llu files, %llu bytes in all\n", (unsigned long long)r->data_files,
               (unsigned long long)r->data_bytes);
    if (r->ranks > 1)
        printf("%d processes, which received %.2f MiB in all; the lines below are about rank 0\n", r->ranks,
               (double)r->job_received / 0x1p20);
    print_held(r);
    if (r->checkpoint[0]) {
        printf("saved in ");
        plain_print(stdout, r->checkpoint);
        printf("\n");
    }
    if (r->sample) {
        printf("\n");
        print_bytes(r->sample, r->sample_bytes);
        printf("\n");
    }
}

/* Runs everything after the command line. If every rank has the same error, rank 0 prints it. A rank that fails alone
 * prints its error and aborts the others. */
static int run_lm(const struct run_config *config, int json, int status, char *error, size_t error_bytes)
{
    struct run_data data = {0};
    struct progress progress;
    struct document document;
    struct run_result result = {0};
    struct dist *dist = config->dist;
    int first = !dist || dist->rank == 0;
    FILE *silent = first ? NULL : fopen("/dev/null", "w");
    if (!status) status = run_data_load(config, &data, error, error_bytes) != 0;
    if (dist) status = ranks_agree(dist, status, error, error_bytes);
    if (!status && dist) status = ranks_compare(dist, config, &data, error, error_bytes);
    result.agreed = status != 0;
    if (!status) {
        interrupt_install();
        progress_open(&progress, silent ? silent : stderr, config->quiet);
        status = train_run(config, &data, &progress, &result, error, error_bytes);
        result.peak_process_bytes = process_peak_bytes();
    }
    if (status && dist && dist->ranks > 1 && !result.agreed) {
        char line[1024];
        snprintf(line, sizeof line, "%.990s", error);
        snprintf(error, error_bytes, "rank %d of %d: %.900s", dist->rank, dist->ranks, line);
        report_failure(lm_command.name, status, error);
        dist->end_job(status);
    }
    if (status && first) report_failure(lm_command.name, status, error);
    else if (first && json) {
        run_result_document(&document, &result);
        status = document_print(&document);
    } else if (first) print_lm_result(&result);
    run_result_free(&result);
    run_data_free(&data);
    if (silent) fclose(silent);
    return status;
}

int train_lm(int argc, char **argv)
{
    struct training t;
    char error[1024] = "";
    int status = read_options(&t, &lm_command, run_options_init, argc - 1, argv + 1);
    if (status != ARGS_RUN) return status;
    if (dist_launched() && !(t.config.dist = dist_open(error, sizeof error))) {
        args_free(&t.args);
        return failure(lm_command.name, "%s", error);
    }
    status = run_config_complete(&t.args, t.groups, 3, &t.config, error, sizeof error);
    status = run_lm(&t.config, t.json, status, error, sizeof error);
    args_free(&t.args);
    if (t.config.dist) t.config.dist->leave();
    return status;
}

/* ---- train mnist ------------------------------------------------------------------------------------------------- */

static const char mnist_notes[] =
    "The network is that of LAMB16's MNIST script: convolutions of 20 and 50 channels, each with ReLU and 2x2\n"
    "pooling, then layers of 500 and 10 outputs; 431080 parameters. Results go to stdout, progress and notes to\n"
    "stderr. The test runs after every epoch. train_loss is the mean over the last epoch, test_accuracy a share\n"
    "between 0 and 1.\n"
    "\n"
    "Exit status: 0 done, 1 failure, 2 wrong usage, 130 and 143 interrupted (Ctrl-C, SIGTERM).\n"
    "\n"
    "  halfstep train mnist --recipe adamw/bf16-sr/int8\n"
    "  halfstep train mnist --data mnist --recipe adam/f32 --batch 1024 --epochs 10 --json\n";

static const struct command mnist_command = {
    .name = "train mnist",
    .usage = "[--data DIR] [options]",
    .summary = "Trains a small convolutional network to read digits: those of MNIST, or without --data digits that it "
               "draws itself. Weights, gradients and optimizer states are stored in the formats of --recipe and "
               "--gradients; the update is computed in fp32.",
    .notes = mnist_notes,
};

static void print_mnist_result(const struct mnist_result *result)
{
    const struct run_result *r = &result->run;
    print_run(r);
    for (size_t i = 1; i < r->history.n_validations; i++)
        printf("  epoch %-4zu training loss %.4f, test loss %.4f, test accuracy %.2f %%\n", i,
               r->history.point[i - 1].train_loss, r->history.validation[i].loss, 100 * result->accuracy[i]);
    printf("%lld epochs of %lld steps of %lld images, test loss %.4f, test accuracy %.2f %%\n",
           (long long)result->epochs, (long long)result->steps_per_epoch, (long long)result->batch, r->val_loss,
           100 * mnist_accuracy(result));
    if (isfinite(result->images_per_s))
        printf("%.0f images/s, %.1f s in all, %.1f %% of it in the optimizer; %s, %d threads\n", result->images_per_s,
               r->seconds, 100 * r->optimizer_seconds / r->seconds, r->isa, r->threads);
    print_held(r);
}

static int run_mnist(const struct run_config *config, int json)
{
    struct mnist_data data;
    struct progress progress;
    struct mnist_result result;
    struct document document;
    char error[1024];
    if (mnist_data_load(config, &data, error, sizeof error) != 0) return failure(mnist_command.name, "%s", error);
    interrupt_install();
    progress_open(&progress, stderr, config->quiet);
    int status = mnist_run(config, &data, &progress, &result, error, sizeof error);
    result.run.peak_process_bytes = process_peak_bytes();
    if (status != 0) {
        report_failure(mnist_command.name, status, error);
    } else if (json) {
        mnist_result_document(&document, &result);
        status = document_print(&document);
    } else {
        print_mnist_result(&result);
    }
    mnist_result_free(&result);
    mnist_data_free(&data);
    return status;
}

int train_mnist(int argc, char **argv)
{
    struct training t;
    char error[1024];
    int status = read_options(&t, &mnist_command, mnist_options_init, argc - 1, argv + 1);
    if (status != ARGS_RUN) return status;
    if (mnist_config_check(&t.config, error, sizeof error) != 0) status = usage_error(mnist_command.name, "%s", error);
    else if ((status = dist_refuse(mnist_command.name)) == 0) status = run_mnist(&t.config, t.json);
    args_free(&t.args);
    return status;
}
