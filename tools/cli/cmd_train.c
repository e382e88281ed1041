#include <stdio.h>
#include <string.h>

#include "cli/commands.h"
#include "common/args/args.h"
#include "common/interrupt.h"
#include "trainer/mnist/train_mnist.h"
#include "trainer/ranks/train_ranks.h"
#include "trainer/run/train.h"

struct output {
    int json;
};

static const struct option output_rows[] = {OPTION_JSON(struct output)};

static const char notes[] =
    "Results go to stdout, progress and notes to stderr. Without --json the results end with a sample of text that\n"
    "the model writes. train_loss is the mean over the last 20 steps, val_loss the loss of the last validation.\n"
    "\n"
    "Ctrl-C finishes the step, saves (with --checkpoint) and exits; a second Ctrl-C quits at once. SIGTERM does the\n"
    "same. So do a terminal that closes (SIGHUP) and a closed pipe (SIGPIPE), unless they are ignored, as under\n"
    "nohup.\n"
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

static const struct command command = {
    "train lm",
    "--data FILE... [options]",
    "Trains a byte-level language model of the Llama type. Weights, gradients and optimizer states are stored in the "
    "formats of --recipe and --gradients; the update is computed in fp32.",
    notes,
    0,
    0};

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
    print_bytes_line("total", r->weight_bytes + r->gradient_bytes + r->state_bytes, n);
    if (r->peak_process_bytes) print_bytes_line("process", r->peak_process_bytes, n);
    if (r->fell_back)
        printf("  (%d tensors are too small for the block format of the recipe and have states without blocks)\n",
               r->fell_back);
    printf("weights changed %.2f %%, state hash %016llx\n", 100 * r->weights_changed,
           (unsigned long long)r->state_hash);
}

static void print_result(const struct run_result *r)
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

static int print_object(const struct run_result *result)
{
    struct document document;
    run_result_document(&document, result);
    return document_print(&document);
}

/* Runs everything after the command line. If every rank has the same error, rank 0 prints it. A rank that fails alone
 * prints its error and aborts the others. */
static int train(const struct run_config *config, const struct output *output, int status, char *error,
                 size_t error_bytes)
{
    struct run_data data = {0};
    struct progress progress;
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
        report_failure(command.name, status, error);
        dist->end_job(status);
    }
    if (status && first) report_failure(command.name, status, error);
    else if (first && output->json) status = print_object(&result);
    else if (first) print_result(&result);
    run_result_free(&result);
    run_data_free(&data);
    if (silent) fclose(silent);
    return status;
}

static int train_lm(int argc, char **argv)
{
    struct run_options table;
    struct run_config config;
    struct output output;
    struct args args;
    char error[1024] = "";
    memset(&config, 0, sizeof config); /* members without an option stay 0 */
    run_options_init(&table);
    const struct option_group groups[] = {
        {"Recipe", &run_recipe_option, 1, &config},
        {"Options", table.rows, table.n, &config},
        {"Output", output_rows, OPTION_COUNT(output_rows), &output},
    };
    int status = args_parse(&args, &command, groups, 3, argc, argv);
    if (status != ARGS_RUN) return status;
    if (dist_launched() && !(config.dist = dist_open(error, sizeof error))) {
        args_free(&args);
        return failure(command.name, "%s", error);
    }
    status = run_config_complete(&args, groups, 3, &config, error, sizeof error);
    status = train(&config, &output, status, error, sizeof error);
    args_free(&args);
    if (config.dist) config.dist->leave();
    return status;
}

int cmd_train(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "lm") == 0) return train_lm(argc - 1, argv + 1);
    if (argc > 1 && strcmp(argv[1], "mnist") == 0) return train_mnist(argc - 1, argv + 1);
    if (argc > 1 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("Usage: halfstep train lm --data FILE... [options]\n"
               "       halfstep train mnist [--data DIR] [options]\n\n"
               "Trains a model with the storage formats of one recipe.\n\n"
               "  lm      a byte-level language model; see halfstep train lm --help\n"
               "  mnist   a network that reads digits; see halfstep train mnist --help\n\n"
               "  halfstep train lm --data book.txt --recipe adamw/bf16-sr/int8\n");
        return 0;
    }
    if (argc > 1 && argv[1][0] != '-') return usage_error("train", "unknown model '%s'; known: lm, mnist", argv[1]);
    return usage_error("train", "the model is missing; known: lm, mnist");
}
