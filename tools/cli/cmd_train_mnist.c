#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/args/args.h"
#include "common/interrupt.h"
#include "trainer/mnist/train_mnist.h"

struct output {
    int json;
};

static const struct option output_rows[] = {OPTION_JSON(struct output)};

static const char notes[] =
    "The network is that of LAMB16's MNIST script: convolutions of 20 and 50 channels, each with ReLU and 2x2\n"
    "pooling, then layers of 500 and 10 outputs; 431080 parameters. Results go to stdout, progress and notes to\n"
    "stderr. The test runs after every epoch. train_loss is the mean over the last epoch, test_accuracy a share\n"
    "between 0 and 1.\n"
    "\n"
    "Exit status: 0 done, 1 failure, 2 wrong usage, 130 and 143 interrupted (Ctrl-C, SIGTERM).\n"
    "\n"
    "  halfstep train mnist --recipe adamw/bf16-sr/int8\n"
    "  halfstep train mnist --data mnist --recipe adam/f32 --batch 1024 --epochs 10 --json\n";

static const struct command command = {
    "train mnist",
    "[--data DIR] [options]",
    "Trains a small convolutional network to read digits: those of MNIST, or without --data digits that it draws "
    "itself. Weights, gradients and optimizer states are stored in the formats of --recipe and --gradients; the update "
    "is computed in fp32.",
    notes,
    0,
    0};

static void print_result(const struct mnist_result *result)
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

static int print_object(const struct mnist_result *result)
{
    struct document document;
    mnist_result_document(&document, result);
    return document_print(&document);
}

static int train(const struct run_config *config, const struct output *output)
{
    struct mnist_data data;
    struct progress progress;
    struct mnist_result result;
    char error[1024];
    if (mnist_data_load(config, &data, error, sizeof error) != 0) return failure(command.name, "%s", error);
    interrupt_install();
    progress_open(&progress, stderr, config->quiet);
    int status = mnist_run(config, &data, &progress, &result, error, sizeof error);
    result.run.peak_process_bytes = process_peak_bytes();
    if (status != 0) report_failure(command.name, status, error);
    else if (output->json) status = print_object(&result);
    else print_result(&result);
    mnist_result_free(&result);
    mnist_data_free(&data);
    return status;
}

int train_mnist(int argc, char **argv)
{
    struct run_options table;
    struct run_config config;
    struct output output;
    struct args args;
    char error[1024];
    memset(&config, 0, sizeof config); /* options of other models stay 0 */
    mnist_options_init(&table);
    const struct option_group groups[] = {
        {"Recipe", &run_recipe_option, 1, &config},
        {"Options", table.rows, table.n, &config},
        {"Output", output_rows, OPTION_COUNT(output_rows), &output},
    };
    int status = args_parse(&args, &command, groups, 3, argc, argv);
    if (status != ARGS_RUN) return status;
    if (mnist_config_check(&config, error, sizeof error) != 0) status = usage_error(command.name, "%s", error);
    else status = train(&config, &output);
    args_free(&args);
    return status;
}
