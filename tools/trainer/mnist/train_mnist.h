/* One training run of the digit network as a function, beside train.h: the same configuration, progress and result. */
#ifndef HALFSTEP_TRAIN_MNIST_H
#define HALFSTEP_TRAIN_MNIST_H

#include "trainer/data/idx.h"
#include "trainer/run/train.h"

/* The options of such a run, on struct run_config: those of train lm that make sense here, and its own. */
void mnist_options_init(struct run_options *options);
/* After parsing: judges what has to be judged and fills in the defaults. 0, or -1 and one line. */
int mnist_config_check(struct run_config *config, char *error, size_t error_bytes);

struct mnist_data {
    struct image_set train, test;
    uint64_t hash; /* of all pixels and labels */
};

/* The files in --data, or drawn digits without. 0, or -1 and one line. */
int mnist_data_load(const struct run_config *config, struct mnist_data *data, char *error, size_t error_bytes);
void mnist_data_free(struct mnist_data *data);

/* run.history has a point and a validation for each epoch, and a first validation before any; val_loss is the test
 * loss. */
struct mnist_result {
    struct run_result run;
    double *accuracy; /* after each validation: share of the test images that were read right */
    int64_t batch, epochs, steps_per_epoch;
    double images_per_s; /* while training, without the tests */
    int diverged;        /* gradients stayed not finite, and the run ended early */
};

/* As train_run(). A run that diverges ends with status 1 too, and with diverged set. */
int mnist_run(const struct run_config *config, const struct mnist_data *data, struct progress *progress,
              struct mnist_result *result, char *error, size_t error_bytes);

/* Test accuracy at the end, NAN if the run diverged: what is likeliest among numbers that are not finite says
 * nothing. */
double mnist_accuracy(const struct mnist_result *result);
/* The result as a new document. */
void mnist_result_document(struct document *document, const struct mnist_result *result);
void mnist_result_free(struct mnist_result *result);

/* The subcommand. */
int train_mnist(int argc, char **argv);

#endif
