/* Gradient release: the weights of a layer are stepped as soon as the backward pass has the gradient of the layer. One
 * buffer, the size of the largest layer, therefore serves all gradients. A deep linear network y = W8 ... W1 x learns
 * the identity.
 *
 *   cc release.c -lhalfstep -lm */
#include <halfstep.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 8, WIDTH = 32, STEPS = 400 };

static float weights[LAYERS][WIDTH][WIDTH], gradient[WIDTH][WIDTH];
static float at[LAYERS + 1][WIDTH]; /* activations of each layer; at[0] is the input */

static void check(int result, const halfstep_optimizer *optimizer)
{
    if (result == HALFSTEP_OK) return;
    fprintf(stderr, "%s: %s\n", halfstep_strerror(result), optimizer ? halfstep_error_detail(optimizer) : "");
    exit(1);
}

static float uniform(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) * 0x1p-23f - 1.0f;
}

/* Computes the activations and returns the loss. */
static float forward(void)
{
    float loss = 0;
    for (int l = 0; l < LAYERS; l++)
        for (int i = 0; i < WIDTH; i++) {
            float sum = 0;
            for (int j = 0; j < WIDTH; j++) sum += weights[l][i][j] * at[l][j];
            at[l + 1][i] = sum;
        }
    for (int i = 0; i < WIDTH; i++) loss += 0.5f * (at[LAYERS][i] - at[0][i]) * (at[LAYERS][i] - at[0][i]);
    return loss;
}

/* Computes the gradients from the last layer to the first, and steps each layer at once. A layer's gradient is
 * overwritten by that of the next. */
static void backward_and_step(halfstep_optimizer *optimizer)
{
    float back[WIDTH], below[WIDTH];
    for (int i = 0; i < WIDTH; i++) back[i] = at[LAYERS][i] - at[0][i];
    for (int l = LAYERS - 1; l >= 0; l--) {
        for (int j = 0; j < WIDTH; j++) below[j] = 0;
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < WIDTH; j++) {
                gradient[i][j] = back[i] * at[l][j];
                below[j] += back[i] * weights[l][i][j];
            }
        void *weight = weights[l];
        const void *its_gradient = gradient;
        halfstep_call call = {.struct_size = sizeof call,
                              .kind = HALFSTEP_CALL_TENSOR,
                              .tensor = l,
                              .weights = &weight,
                              .gradients = &its_gradient};
        check(halfstep_run(optimizer, &call), optimizer);
        for (int j = 0; j < WIDTH; j++) back[j] = below[j];
    }
    /* Ends the round. Schedules and the norm for delayed clipping advance once per round. */
    halfstep_call round = {.struct_size = sizeof round, .kind = HALFSTEP_CALL_ROUND};
    check(halfstep_run(optimizer, &round), optimizer);
}

int main(void)
{
    halfstep_optimizer *optimizer;
    int32_t group, tensor;
    check(halfstep_create(NULL, &optimizer), NULL);
    check(halfstep_add_group(optimizer, "adamw/f32/int8", &group), optimizer);
    check(halfstep_set_hyper(optimizer, group, "lr", 1e-2), optimizer);
    check(halfstep_set_hyper(optimizer, group, "weight_decay", 0), optimizer);
    check(halfstep_set_choice(optimizer, group, "schedule", "cosine"), optimizer);
    check(halfstep_set_hyper(optimizer, group, "warmup_steps", 20), optimizer);
    check(halfstep_set_hyper(optimizer, group, "total_steps", STEPS), optimizer);
    check(halfstep_set_hyper(optimizer, HALFSTEP_ALL_GROUPS, "clip_norm", 10), optimizer);
    for (int l = 0; l < LAYERS; l++) {
        char name[16];
        snprintf(name, sizeof name, "layer.%d", l);
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = group,
                             .name = name,
                             .ndim = 2,
                             .rows = WIDTH,
                             .row_length = WIDTH,
                             .gradient = "f32"};
        check(halfstep_add_tensor(optimizer, &t, &tensor), optimizer);
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < WIDTH; j++) weights[l][i][j] = 1.7f * uniform() / sqrtf(WIDTH);
    }
    check(halfstep_allocate_states(optimizer), optimizer);

    float first = 0, last = 0;
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < WIDTH; i++) at[0][i] = uniform();
        float loss = forward();
        backward_and_step(optimizer);
        if (step < 20) first += loss / 20;
        if (step >= STEPS - 20) last += loss / 20;
    }
    uint64_t all;
    check(halfstep_memory(optimizer, NULL, &all, NULL, NULL, NULL), optimizer);
    printf("loss %.3f -> %.3f; gradients took %zu bytes instead of %llu\n", first, last, sizeof gradient,
           (unsigned long long)all);
    halfstep_destroy(optimizer);
    return !(last < first);
}
