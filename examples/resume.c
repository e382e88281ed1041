/* A trainer that may be killed at any instant. It saves every few steps. When it is started again, it continues from
 * the last checkpoint and computes the bits of a run that was never stopped. A small network learns a function; its
 * weights are BF16 with residuals, its states have 8 bits.
 *
 *   cc resume.c -lhalfstep_io -lhalfstep -lm
 *   ./a.out run 2000            kill it, start it again, as often as you like */
#include <halfstep_io.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 8, HIDDEN = 64, BATCH = 32, TENSORS = 4, MOST = HIDDEN * INPUTS, SAVE_EVERY = 20 };

static const struct {
    const char *name;
    int32_t ndim;
    int64_t rows, row_length;
} shapes[TENSORS] = {{"hidden.weight", 2, HIDDEN, INPUTS},
                     {"hidden.bias", 1, HIDDEN, 1},
                     {"output.weight", 2, 1, HIDDEN},
                     {"output.bias", 1, 1, 1}};

static halfstep_optimizer *optimizer;
static uint16_t stored[TENSORS][MOST]; /* BF16, as it is saved */
static float values[TENSORS][MOST], gradients[TENSORS][MOST];
static void *weights[TENSORS] = {stored[0], stored[1], stored[2], stored[3]};

static void check(int code, const char *error)
{
    if (code == HALFSTEP_OK) return;
    fprintf(stderr, "%s: %s\n", halfstep_strerror(code), error ? error : halfstep_error_detail(optimizer));
    exit(1);
}

/* Returns a random number from -1 to 1, and advances the state. */
static float uniform(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(*state >> 40) * 0x1p-23f - 1.0f;
}

/* Builds the optimizer, the same at every start. A checkpoint holds only what the steps have changed. */
static void build(void)
{
    halfstep_options options = {.struct_size = sizeof options, .seed = 1};
    int32_t matrices, biases, index;
    uint64_t random = 1;
    check(halfstep_create(&options, &optimizer), "");
    check(halfstep_add_group(optimizer, "adamw/bf16-kahan/int8", &matrices), NULL);
    check(halfstep_add_group(optimizer, "adamw/bf16-kahan/f32", &biases), NULL);
    check(halfstep_set_hyper(optimizer, HALFSTEP_ALL_GROUPS, "lr", 0.003), NULL);
    check(halfstep_set_hyper(optimizer, biases, "weight_decay", 0.0), NULL);
    for (int i = 0; i < TENSORS; i++) {
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = shapes[i].ndim == 2 ? matrices : biases,
                             .name = shapes[i].name,
                             .ndim = shapes[i].ndim,
                             .rows = shapes[i].rows,
                             .row_length = shapes[i].row_length,
                             .gradient = "f32"};
        check(halfstep_add_tensor(optimizer, &t, &index), NULL);
    }
    check(halfstep_allocate_states(optimizer), NULL);
    for (int i = 0; i < TENSORS; i++) {
        for (int64_t k = 0; k < shapes[i].rows * shapes[i].row_length; k++) values[i][k] = 0.3f * uniform(&random);
        check(halfstep_write_slot(optimizer, i, HALFSTEP_SLOT_WEIGHT, weights[i], 0, shapes[i].rows, values[i]), NULL);
    }
}

/* Computes the gradients of the mean squared error over a batch, and returns the error. The batch follows from the
 * step, so a resumed run continues with the right data. */
static double backward(uint64_t step)
{
    uint64_t random = step;
    double loss = 0.0;
    memset(gradients, 0, sizeof gradients);
    for (int b = 0; b < BATCH; b++) {
        float x[INPUTS], hidden[HIDDEN], y = values[3][0], target = 0.0f;
        for (int i = 0; i < INPUTS; i++) x[i] = uniform(&random);
        for (int i = 0; i < INPUTS; i++) target += sinf(3.0f * x[i]) * x[(i + 1) % INPUTS];
        for (int h = 0; h < HIDDEN; h++) {
            float sum = values[1][h];
            for (int i = 0; i < INPUTS; i++) sum += values[0][h * INPUTS + i] * x[i];
            hidden[h] = tanhf(sum);
            y += values[2][h] * hidden[h];
        }
        float error = (y - target) / BATCH;
        loss += 0.5 * (y - target) * (y - target) / BATCH;
        gradients[3][0] += error;
        for (int h = 0; h < HIDDEN; h++) {
            float below = error * values[2][h] * (1.0f - hidden[h] * hidden[h]);
            gradients[2][h] += error * hidden[h];
            gradients[1][h] += below;
            for (int i = 0; i < INPUTS; i++) gradients[0][h * INPUTS + i] += below * x[i];
        }
    }
    return loss;
}

static void save(const char *dir, uint64_t step)
{
    halfstep_checkpoint_save *saving;
    halfstep_save_options options = {.struct_size = sizeof options, .step = step};
    char error[512];
    check(halfstep_begin_checkpoint(&saving, dir, &options, error, sizeof error), error);
    check(halfstep_save_optimizer(saving, optimizer, weights, NULL, error, sizeof error), error);
    check(halfstep_commit_checkpoint(saving, error, sizeof error), error);
    if (*error) fprintf(stderr, "%s\n", error); /* a note */
}

/* Loads the last checkpoint and returns its step, or 0 if there is none. */
static uint64_t resume(const char *dir)
{
    halfstep_checkpoint *checkpoint;
    halfstep_checkpoint_info info = {.struct_size = sizeof info};
    char error[512];
    int code = halfstep_open_checkpoint(&checkpoint, dir, NULL, error, sizeof error);
    if (code == HALFSTEP_ERROR_NAME) return 0;
    check(code, error);
    check(halfstep_load_optimizer(checkpoint, optimizer, weights, NULL, error, sizeof error), error);
    check(halfstep_get_checkpoint_info(checkpoint, &info), "");
    halfstep_close_checkpoint(checkpoint);
    printf("resumed at step %llu\n", (unsigned long long)info.step);
    return info.step;
}

static uint64_t hash_bytes(uint64_t hash, const void *data, uint64_t bytes)
{
    const unsigned char *next = data;
    for (uint64_t i = 0; i < bytes; i++) hash = (hash ^ next[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* Returns a hash of every stored bit of weights and states. */
static uint64_t fingerprint(void)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; i < TENSORS; i++) {
        hash = hash_bytes(hash, stored[i], sizeof stored[i]);
        for (int32_t slot = HALFSTEP_SLOT_WEIGHT; slot < HALFSTEP_SLOT_STATE + 2; slot++) {
            halfstep_slot_info info = {.struct_size = sizeof info};
            check(halfstep_get_slot_info(optimizer, i, slot, &info), NULL);
            if (info.code) hash = hash_bytes(hash, info.code, info.code_bytes);
            if (info.extra) hash = hash_bytes(hash, info.extra, info.extra_bytes);
        }
    }
    return hash;
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "resume-run";
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 400;
    double loss = 0.0;
    build();
    uint64_t step = resume(dir);
    while (step < steps) {
        for (int i = 0; i < TENSORS; i++)
            check(halfstep_read_slot(optimizer, i, HALFSTEP_SLOT_WEIGHT, weights[i], 0, shapes[i].rows, values[i]),
                  NULL);
        loss = backward(step);
        check(
            halfstep_step(optimizer, weights, (const void *[]){gradients[0], gradients[1], gradients[2], gradients[3]}),
            NULL);
        if (++step % SAVE_EVERY == 0 || step == steps) save(dir, step);
    }
    printf("step %llu loss %.4f hash %016llx\n", (unsigned long long)step, loss, (unsigned long long)fingerprint());
    halfstep_destroy(optimizer);
    return 0;
}
