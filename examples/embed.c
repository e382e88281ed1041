/* Embeds halfstep in a program that owns every byte and every thread. The library allocates no memory for states and
 * starts no thread. Weights, gradients and states lie in one arena.
 *
 *   cc embed.c -lhalfstep */
#include <halfstep.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 256, COLUMNS = 512, STEPS = 50 };

/* Runs the n tasks in a loop. A host with threads of its own would hand the tasks to them. */
static void run_tasks(void *host, halfstep_task task, void *argument, int64_t n)
{
    *(int64_t *)host += n;
    for (int64_t i = 0; i < n; i++) task(argument, i);
}

static void check(int result, const halfstep_optimizer *optimizer)
{
    if (result == HALFSTEP_OK) return;
    fprintf(stderr, "%s: %s\n", halfstep_strerror(result), optimizer ? halfstep_error_detail(optimizer) : "");
    exit(1);
}

int main(void)
{
    int64_t tasks = 0;
    halfstep_options options = {.struct_size = sizeof options, .seed = 1, .run = run_tasks, .host = &tasks};
    halfstep_optimizer *optimizer;
    int32_t group, tensor;
    check(halfstep_create(&options, &optimizer), NULL);
    check(halfstep_add_group(optimizer, "adamw/bf16-ecc8/int8", &group), optimizer);
    check(halfstep_set_hyper(optimizer, group, "lr", 0.01), optimizer);
    halfstep_tensor t = {.struct_size = sizeof t,
                         .group = group,
                         .name = "weight",
                         .ndim = 2,
                         .rows = ROWS,
                         .row_length = COLUMNS,
                         .gradient = "bf16"};
    check(halfstep_add_tensor(optimizer, &t, &tensor), optimizer);

    uint64_t states;
    size_t n = (size_t)ROWS * COLUMNS;
    check(halfstep_state_bytes(optimizer, &states), optimizer);
    size_t bytes = ((size_t)states + 4 * n + 63) / 64 * 64;
    char *arena = aligned_alloc(64, bytes);
    float *values = malloc(n * sizeof *values);
    if (!arena || !values) return 1;
    void *weight = arena + states;
    uint16_t *gradient = (uint16_t *)(arena + states + 2 * n);
    check(halfstep_bind_states(optimizer, arena, states), optimizer);
    for (size_t i = 0; i < n; i++) values[i] = 1;
    check(halfstep_write_slot(optimizer, tensor, HALFSTEP_SLOT_WEIGHT, weight, 0, ROWS, values), optimizer);

    /* The loss is half the squared distance to 0.5, so the gradient is w - 0.5. */
    for (int step = 0; step < STEPS; step++) {
        check(halfstep_read_slot(optimizer, tensor, HALFSTEP_SLOT_WEIGHT, weight, 0, ROWS, values), optimizer);
        for (size_t i = 0; i < n; i++) values[i] -= 0.5f;
        check(halfstep_write_slot(optimizer, tensor, HALFSTEP_SLOT_GRADIENT, gradient, 0, ROWS, values), optimizer);
        check(halfstep_step(optimizer, (void *[]){weight}, (const void *[]){gradient}), optimizer);
    }
    check(halfstep_read_slot(optimizer, tensor, HALFSTEP_SLOT_WEIGHT, weight, 0, ROWS, values), optimizer);
    printf("w = %.3f after %d steps, %.3f bytes a parameter, %lld tasks\n", values[0], STEPS, (double)bytes / (double)n,
           (long long)tasks);
    halfstep_destroy(optimizer);
    int bad = !(values[0] > 0.4f && values[0] < 0.7f) || tasks == 0;
    free(values);
    free(arena);
    return bad;
}
