#include "trainer/models/cnn.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "trainer/products/conv.h"
#include "trainer/products/rows.h"

int cnn_config_check(struct cnn_config *c, char *error, size_t error_bytes)
{
    if (!c->side) c->side = 28;
    if (!c->channels1) c->channels1 = 20;
    if (!c->channels2) c->channels2 = 50;
    if (!c->hidden) c->hidden = 500;
    if (!c->classes) c->classes = 10;
    int first = c->side - CONV_KERNEL + 1, second = first / 2 - CONV_KERNEL + 1;
    if (c->side > 4096 || second < 2 || first % 2 || second % 2) {
        snprintf(error, error_bytes, "images of %d x %d do not divide evenly through two convolutions and two poolings",
                 c->side, c->side);
        return -1;
    }
    const int counts[] = {c->channels1, c->channels2, c->hidden, c->classes};
    for (int i = 0; i < 4; i++)
        if (counts[i] < 1 || counts[i] > 65536 || (i == 3 && counts[i] > 256)) {
            snprintf(error, error_bytes, "a layer cannot have %d outputs; allowed are 1..65536, for classes 1..256",
                     counts[i]);
            return -1;
        }
    return 0;
}

int cnn_tensor_info(const struct cnn_config *c, int tensor, struct cnn_tensor *out)
{
    static const char *const names[CNN_TENSORS] = {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias",
                                                   "fc1.weight",   "fc1.bias",   "fc2.weight",   "fc2.bias"};
    if (tensor < 0 || tensor >= CNN_TENSORS) return -1;
    int64_t last = ((c->side - CONV_KERNEL + 1) / 2 - CONV_KERNEL + 1) / 2;
    const int64_t square = CONV_KERNEL * CONV_KERNEL;
    const int64_t inputs[] = {square, c->channels1 * square, c->channels2 * last * last, c->hidden};
    const int64_t outputs[] = {c->channels1, c->channels2, c->hidden, c->classes};
    int layer = tensor / 2, bias = tensor % 2;
    *out = (struct cnn_tensor){names[tensor],
                               bias        ? 1
                               : layer < 2 ? 4
                                           : 2,
                               outputs[layer], bias ? 1 : inputs[layer], 1 / sqrt((double)inputs[layer])};
    return 0;
}

int64_t cnn_parameter_count(const struct cnn_config *c)
{
    int64_t sum = 0;
    struct cnn_tensor info;
    for (int i = 0; cnn_tensor_info(c, i, &info) == 0; i++) sum += info.rows * info.row_length;
    return sum;
}

void cnn_init_tensor(const struct cnn_config *c, int tensor, uint64_t seed, float *out)
{
    struct cnn_tensor info;
    if (cnn_tensor_info(c, tensor, &info) != 0) return;
    for (int64_t i = 0; i < info.rows * info.row_length; i++) {
        double uniform = (double)(hash_counters(seed, (uint64_t)tensor, (uint64_t)i, 0x636e6e) >> 11) * 0x1p-53;
        out[i] = (float)((2 * uniform - 1) * info.bound);
    }
}
