/* One training run of the digit network, with the same configuration, progress and result as run.h. */
#ifndef HALFSTEP_MNIST_H
#define HALFSTEP_MNIST_H

#include "trainer/data/idx.h"
#include "trainer/run/run.h"

/* Lists the options of such a run: its own, and those of train lm that make sense here. They set struct run_config. */
void mnist_options_init(struct run_options *options);
/* Checks the configuration after parsing and fills in the defaults. Returns 0, or -1 with an error text. */
int mnist_config_check(struct run_config *config, char *error, size_t error_bytes);

struct mnist_data {
    struct image_set train, test;
    uint64_t hash; /* of all pixels and labels */
};

/* Reads the files in --data, or draws digits without it. Returns 0, or -1 with an error text. */
int mnist_data_load(const struct run_config *config, struct mnist_data *data, char *error, size_t error_bytes);
void mnist_data_free(struct mnist_data *data);

/* run.history has a point and a validation for each epoch, and one validation before the first. val_loss is the test
 * loss. */
struct mnist_result {
    struct run_result run;
    double *accuracy; /* after each validation: share of the test images that were classified correctly */
    int64_t batch, epochs, steps_per_epoch;
    double images_per_s; /* of training, without the tests */
};

/* Runs the training like train_run(). */
int mnist_run(const struct run_config *config, const struct mnist_data *data, struct progress *progress,
              struct mnist_result *result, char *error, size_t error_bytes);

/* Returns the test accuracy at the end. NAN if the run diverged, because then the likeliest class means nothing. */
double mnist_accuracy(const struct mnist_result *result);
/* Builds a new document with the result. */
void mnist_result_document(struct document *document, const struct mnist_result *result);
void mnist_result_free(struct mnist_result *result);

#endif
