#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "trainer/data/digits.h"
#include "trainer/mnist/mnist.h"

enum { DRAWN_TRAIN = 60000, DRAWN_TEST = 10000, TRAIN_PART = 0, TEST_PART = 1 };

#define AT(member) offsetof(struct run_config, member)
#define SAME (OPTION_IDENTITY | OPTION_SAVED)

static const struct option own_rows[] = {
    {"data", OPTION_STRING, AT(digits), "DIR", NULL, 0, 0, SAME, NULL,
     "folder with the four IDX files of MNIST, as they are or as gzip (default: digits are drawn)"},
    {"train-images", OPTION_INTEGER, AT(train_images), "N", "0", 0, 1e8, SAME, NULL,
     "number of training images, the first of --data; 0: all, or 60000 drawn ones"},
    {"test-images", OPTION_INTEGER, AT(test_images), "N", "0", 0, 1e8, SAME, NULL,
     "number of test images, the first of --data; 0: all, or 10000 drawn ones"},
    {"digits-seed", OPTION_SEED, AT(digits_seed), "N", "1", 0, 0, SAME, NULL, "seed of the drawn digits"},
    {"epochs", OPTION_INTEGER, AT(epochs), "N", "5", 0, 1e6, SAME, NULL, "passes over the training images"},
};

/* The order of --help: headings, and options by name with the defaults and texts that differ here. */
static const struct {
    const char *name, *initial, *help;
} order[] = {
    {"", NULL, "Data"},
    {"data", NULL, NULL},
    {"train-images", NULL, NULL},
    {"test-images", NULL, NULL},
    {"digits-seed", NULL, NULL},
    {"", NULL, "Run"},
    {"epochs", NULL, NULL},
    {"batch", "128", "images per step; the last step of an epoch takes what is left"},
    {"seed", NULL, NULL},
    {"compute", "f32", NULL},
    {"threads", NULL, NULL},
    {"", NULL, "Storage"},
    {"gradients", NULL, NULL},
    {"scan", NULL, NULL},
    {"loss-scale", NULL, NULL},
    {"generator", NULL, NULL},
    {"", NULL, "Optimizer"},
    {"lr", NULL, NULL},
    {"schedule", NULL, NULL},
    {"warmup", NULL, NULL},
    {"final-lr", NULL, NULL},
    {"weight-decay", NULL, "coefficient, for all tensors"},
    {"decay-schedule", NULL, NULL},
    {"decay", NULL, NULL},
    {"clip", NULL, "largest norm of all gradients together; 0: no clipping"},
    {"hyper", NULL, NULL},
    {"", NULL, "Files"},
    {"log", NULL,
     "write one CSV line per epoch, with the rule's numbers for each tensor (lamb: trust ratio and norms)"},
    {"quiet", NULL, NULL},
};

static const struct option *find_row(const struct option *rows, int n, const char *name)
{
    for (int i = 0; i < n; i++)
        if (strcmp(rows[i].name, name) == 0) return &rows[i];
    return NULL;
}

void mnist_options_init(struct run_options *options)
{
    struct option all[RUN_OPTIONS_MAX];
    run_options_init(options);
    int n = options->n;
    memcpy(all, options->rows, sizeof all);
    options->n = 0;
    for (int i = 0; i < COUNT_OF(order); i++) {
        struct option *row = &options->rows[options->n];
        const struct option *found = find_row(own_rows, COUNT_OF(own_rows), order[i].name);
        if (!found) found = find_row(all, n, order[i].name);
        if (!found) continue;
        *row = *found;
        if (order[i].initial) row->initial = order[i].initial;
        if (order[i].help) row->help = order[i].help;
        options->n++;
    }
    /* The hyper-parameters of the rules come last, with their heading. */
    for (int i = 1; i < n; i++) {
        int last_heading = all[i].kind == OPTION_HEADING && i + 1 < n && all[i + 1].kind == OPTION_HYPER_AS;
        if (all[i].kind == OPTION_HYPER_AS || last_heading) options->rows[options->n++] = all[i];
    }
}

int mnist_config_check(struct run_config *config, char *error, size_t error_bytes)
{
    if (run_hyper_check(config, error, error_bytes) != 0) return -1;
    if (config->recipe) run_config_settle(config);
    return 0;
}

/* ---- Data -------------------------------------------------------------------------------------------------------- */

static int keep_first(struct image_set *set, int64_t n, const char *option, char *error, size_t error_bytes)
{
    if (n > set->n) {
        snprintf(error, error_bytes, "--%s is %lld; there are only %lld images", option, (long long)n,
                 (long long)set->n);
        return -1;
    }
    if (n) set->n = n;
    return 0;
}

static int load(const struct run_config *config, struct mnist_data *data, char *error, size_t error_bytes)
{
    if (config->digits)
        return idx_load(config->digits, &data->train, &data->test, error, error_bytes) ||
               keep_first(&data->train, config->train_images, "train-images", error, error_bytes) ||
               keep_first(&data->test, config->test_images, "test-images", error, error_bytes);
    int64_t train = config->train_images ? config->train_images : DRAWN_TRAIN;
    int64_t test = config->test_images ? config->test_images : DRAWN_TEST;
    if (digits_render(config->digits_seed, TRAIN_PART, train, &data->train) == 0 &&
        digits_render(config->digits_seed, TEST_PART, test, &data->test) == 0)
        return 0;
    snprintf(error, error_bytes, "out of memory for %lld images", (long long)(train + test));
    return -1;
}

int mnist_data_load(const struct run_config *config, struct mnist_data *data, char *error, size_t error_bytes)
{
    memset(data, 0, sizeof *data);
    if (load(config, data, error, error_bytes) != 0) {
        mnist_data_free(data);
        return -1;
    }
    uint64_t h = HASH_START;
    const struct image_set *sets[] = {&data->train, &data->test};
    for (int i = 0; i < 2; i++) {
        h = hash_bytes(h, sets[i]->images, (size_t)(sets[i]->n * sets[i]->side * sets[i]->side));
        h = hash_bytes(h, sets[i]->labels, (size_t)sets[i]->n);
    }
    data->hash = hash_finish(h);
    return 0;
}

void mnist_data_free(struct mnist_data *data)
{
    image_set_free(&data->train);
    image_set_free(&data->test);
    memset(data, 0, sizeof *data);
}
