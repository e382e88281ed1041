#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/compare/compare_internal.h"
#include "trainer/models/cnn.h"

static const char notes[] =
    "Every recipe gets the same first weights, images and order. A learning rate that suits one recipe may not suit\n"
    "another: R@LR gives a recipe its own, R@LR/LR/LR one for each size of --batch; recipes without one take --lr. "
    "Runs are\n"
    "made one after the other, all recipes with one seed before the next seed; the report is rewritten after "
    "each.\n" COMPARE_GOES_ON "\n"
    "  halfstep compare mnist --data mnist --recipes adam/f32@1e-3,lamb/f32@0.01,lamb16@0.01 --batch 128,1024 --seeds "
    "3\n";

static int complete(struct compare *compare, char *error, size_t error_bytes)
{
    return mnist_config_check(&compare->base, error, error_bytes) != 0 ? 2 : 0;
}

static int load(struct compare *compare, char *error, size_t error_bytes)
{
    return mnist_data_load(&compare->base, &compare->data.mnist, error, error_bytes) != 0;
}

static void unload(struct compare *compare) { mnist_data_free(&compare->data.mnist); }

/* Curves count epochs, so that batch sizes can be compared. */
static int keep(struct report_run *run, const struct mnist_result *result)
{
    const struct run_history *history = &result->run.history;
    run->tokens_per_s = result->images_per_s;
    run->accuracy = mnist_accuracy(result);
    for (size_t i = 0; i < history->n_points; i++)
        if (report_curve_add(&run->train, (double)i + 1, history->point[i].train_loss) != 0) return -1;
    for (size_t i = 0; i < history->n_validations; i++)
        if (report_curve_add(&run->validation, (double)i, history->validation[i].loss) != 0 ||
            report_curve_add(&run->accuracies, (double)i, result->accuracy[i]) != 0)
            return -1;
    mnist_result_document(&run->json, result);
    return compare_keep(run, &result->run);
}

static int train(struct compare *compare, const struct run_config *config, struct progress *progress,
                 struct report_run *run, char *error, size_t error_bytes)
{
    struct mnist_result result;
    int status = mnist_run(config, &compare->data.mnist, progress, &result, error, error_bytes);
    if ((status == 0 || result.run.diverged) && keep(run, &result) != 0) status = no_memory(error, error_bytes);
    mnist_result_free(&result);
    return status;
}

static void describe(struct compare *compare, hstep_buffer *subtitle)
{
    const struct run_config *base = &compare->base;
    const struct mnist_data *data = &compare->data.mnist;
    struct cnn_config shape = {.side = data->train.side};
    hstep_buffer text = {0};
    char error[256];
    if (cnn_config_check(&shape, error, sizeof error) == 0) {
        hstep_append_format(subtitle, "a convolutional network of ");
        text_add_count(subtitle, (double)cnn_parameter_count(&shape));
        hstep_append_format(subtitle, " parameters, ");
    }
    hstep_append_format(subtitle, "%lld epochs of ", (long long)base->epochs);
    text_add_count(subtitle, (double)data->train.n);
    hstep_append_format(subtitle, base->digits ? " images of %s" : " %s digits",
                        base->digits ? compare_file_name(base->digits) : "drawn");
    hstep_append_format(&text, "%s, ", base->digits ? base->digits : "drawn digits");
    text_add_count(&text, (double)data->train.n);
    hstep_append_format(&text, " images to learn from, ");
    text_add_count(&text, (double)data->test.n);
    hstep_append_format(&text, " to test with, hash %016llx", (unsigned long long)data->hash);
    compare_fact(compare, "data", &text);
    text_free(&text);
    hstep_append_text(&text, compare->options.batches);
    compare_fact(compare, "batch", &text);
    text_free(&text);
}

int compare_mnist(const struct comparison *comparison, int argc, char **argv)
{
    static const struct report_words words = {"test loss", "test loss", "epoch", "images/s",
                                              "Each point is the mean of an epoch. "};
    static const struct compare_kind kind = {
        .usage = "[--data DIR] --recipes R@LR,R@LR,... [options]",
        .summary = "Trains a network that reads digits under several recipes and batch sizes, and reports test loss "
                   "and accuracy "
                   "by epoch: tables, a sentence, and a page with curves.",
        .notes = notes,
        .recipes = "adamw/f32,adamw/bf16-sr,adamw/bf16-sr/int8",
        .expect = "end with status 1 unless the mean test accuracy of these recipes is more than X %, less than X %, "
                  "within X "
                  "% of the reference's",
        .batches = "128",
        .words = &words,
        .has_accuracies = 1,
        .options_init = mnist_options_init,
        .complete = complete,
        .load = load,
        .unload = unload,
        .train = train,
        .describe = describe,
    };
    return compare_run(&kind, comparison, argc, argv);
}
