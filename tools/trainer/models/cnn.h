/* A small convolutional network for square grey images, the one of LAMB16's MNIST script. Twice a 5x5 convolution, ReLU
 * and 2x2 maximum pooling; then a fully connected layer with ReLU, one to the classes, and log-softmax. Names and
 * layouts of the tensors are torch's: conv1.weight [channels1, 1, 5, 5] to fc2.bias [classes].
 *
 * The network computes with fp32 copies of the weights, which the caller fills in before each call (cnn_weights).
 * Products run in `compute` and accumulate in fp32. A batch is split into slices of 32 images, and the slices'
 * gradients are added in order. So on one machine the bits do not depend on the number of threads. One thread at a
 * time may use a network. */
#ifndef HALFSTEP_CNN_H
#define HALFSTEP_CNN_H

#include <stddef.h>
#include <stdint.h>

enum { CNN_TENSORS = 8 };

/* Zero means the default. */
struct cnn_config {
    int side;      /* 28: side of the images */
    int channels1; /* 20 */
    int channels2; /* 50 */
    int hidden;    /* 500 */
    int classes;   /* 10 */
};

/* Fills in the defaults and checks the shape. Returns 0, or -1 with an error text. */
int cnn_config_check(struct cnn_config *config, char *error, size_t error_bytes);

struct cnn_tensor {
    const char *name;
    int ndim;
    int64_t rows, row_length;
    double bound; /* initial values are uniform within +- this: 1 / sqrt(inputs of one output) */
};
/* Describes a tensor of a checked config. Returns 0, or -1 for a tensor that does not exist. */
int cnn_tensor_info(const struct cnn_config *config, int tensor, struct cnn_tensor *out);
int64_t cnn_parameter_count(const struct cnn_config *config);
/* Computes torch's default initial values. They depend on (config, seed, tensor) only. */
void cnn_init_tensor(const struct cnn_config *config, int tensor, uint64_t seed, float *out);

struct cnn_options {
    int batch;   /* most images in one call */
    int compute; /* LM_F32 or LM_BF16 */
    int threads; /* 0: one per processor this process may use */
};

struct cnn;
struct cnn *cnn_create(const struct cnn_config *config, const struct cnn_options *options, char *error,
                       size_t error_bytes);
void cnn_destroy(struct cnn *model);
/* Returns the fp32 weights of a tensor, rows * row_length values, for the caller to fill in. */
float *cnn_weights(struct cnn *model, int tensor);
size_t cnn_activation_bytes(const struct cnn *model);
const char *cnn_error(const struct cnn *model);

/* Image i of the batch is number order[i] of images and labels. An image has side * side pixels of one byte. The
 * network's input is (pixel / 255 - 0.1307) / 0.3081. */
struct cnn_batch {
    const uint8_t *images, *labels;
    const uint32_t *order;
    int n;
};

struct cnn_score {
    double loss; /* mean, in nats */
    int correct; /* images whose likeliest class is the label */
};

/* Computes the loss and the number of correct images. Returns 0, or -1 with the reason in cnn_error(). */
int cnn_eval(struct cnn *model, const struct cnn_batch *batch, struct cnn_score *score);
/* Does the same, and writes the gradients of scale times the mean loss: one buffer for each tensor, in `type` (enum
 * lm_dtype, rounded to nearest even, saturating). */
int cnn_train(struct cnn *model, const struct cnn_batch *batch, double scale, void *const *gradients, int type,
              struct cnn_score *score);

#endif
