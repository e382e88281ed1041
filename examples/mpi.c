/* Data parallel training by MPI, with the optimizer's states shared out over the ranks (ZeRO-1). The weights have the
 * same bits for any number of ranks, because gradients are added in a fixed order and all else that is exchanged is a
 * sum of integers.
 *
 * A small network learns a function. Its weights are BF16 with residuals, its states have 8 bits. The rule needs norms
 * of whole tensors, and the gradients are clipped by their total norm.
 *
 *   mpicc mpi.c -lhalfstep -lm
 *   mpirun -n 3 ./a.out */
#define HALFSTEP_ADVANCED
#include <halfstep.h>
#include <mpi.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 32, HIDDEN = 96, PARTS = 8, SAMPLES = 8, STEPS = 60, TENSORS = 2, MOST = HIDDEN * INPUTS };

static const struct {
    const char *name;
    int rows, row_length;
} shapes[TENSORS] = {{"hidden.weight", HIDDEN, INPUTS}, {"output.weight", INPUTS, HIDDEN}};

static halfstep_optimizer *optimizer;
static int rank, ranks;
static uint16_t stored[TENSORS][MOST]; /* whole weights, in BF16 */
static float values[TENSORS][MOST];
static float gradients[PARTS][TENSORS][MOST]; /* for each part of the batch */

static void check(int code)
{
    if (code == HALFSTEP_OK || code == HALFSTEP_NONFINITE) return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, halfstep_strerror(code), halfstep_error_detail(optimizer));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Returns the first row of rank `of`. Each rank has a stretch of a tensor's rows. Any cut will do that splits no block
 * of a format. */
static int first_row(int tensor, int of) { return shapes[tensor].rows * of / ranks; }
static int own_rows(int tensor, int of) { return first_row(tensor, of + 1) - first_row(tensor, of); }

static float uniform(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(*state >> 40) * 0x1p-23f - 1.0f;
}

static void build(void)
{
    int32_t group, index;
    uint64_t random = 1;
    check(halfstep_create(NULL, &optimizer));
    check(halfstep_add_group(optimizer, "lamb/bf16-kahan/int8", &group));
    check(halfstep_set_hyper(optimizer, group, "lr", 0.02));
    check(halfstep_set_hyper(optimizer, HALFSTEP_ALL_GROUPS, "clip_norm", 1.0));
    for (int i = 0; i < TENSORS; i++) {
        /* n_columns is set even for a rank without rows, because it tells such a part from a whole tensor. */
        halfstep_tensor t = {.struct_size = sizeof t,
                             .group = group,
                             .name = shapes[i].name,
                             .ndim = 2,
                             .rows = shapes[i].rows,
                             .row_length = shapes[i].row_length,
                             .first_row = first_row(i, rank),
                             .n_rows = own_rows(i, rank),
                             .n_columns = shapes[i].row_length,
                             .gradient = "f32"};
        check(halfstep_add_tensor(optimizer, &t, &index));
    }
    check(halfstep_allocate_states(optimizer));
    for (int i = 0; i < TENSORS; i++) {
        int at = first_row(i, rank) * shapes[i].row_length;
        for (int k = 0; k < MOST; k++) values[i][k] = 0.2f * uniform(&random);
        check(halfstep_write_slot(optimizer, i, HALFSTEP_SLOT_WEIGHT, stored[i] + at, 0, own_rows(i, rank),
                                  values[i] + at));
    }
}

/* Sends the rows of every rank to all ranks, and converts the weights to fp32. */
static void gather_weights(void)
{
    for (int i = 0; i < TENSORS; i++) {
        int length = shapes[i].row_length;
        for (int of = 0; of < ranks; of++)
            MPI_Bcast(stored[i] + first_row(i, of) * length, own_rows(i, of) * length * 2, MPI_BYTE, of,
                      MPI_COMM_WORLD);
        for (int k = 0; k < MOST; k++) {
            uint32_t bits = (uint32_t)stored[i][k] << 16;
            memcpy(&values[i][k], &bits, sizeof bits);
        }
    }
}

/* Computes the gradients of one part of the batch. The network learns to square its inputs. */
static void backward(int step, int part)
{
    uint64_t random = (uint64_t)(step * PARTS + part);
    memset(gradients[part], 0, sizeof gradients[part]);
    for (int s = 0; s < SAMPLES; s++) {
        float x[INPUTS], hidden[HIDDEN], back[HIDDEN] = {0};
        for (int i = 0; i < INPUTS; i++) x[i] = uniform(&random);
        for (int h = 0; h < HIDDEN; h++) {
            float sum = 0;
            for (int i = 0; i < INPUTS; i++) sum += values[0][h * INPUTS + i] * x[i];
            hidden[h] = sum > 0 ? sum : 0;
        }
        for (int o = 0; o < INPUTS; o++) {
            float error = -x[o] * x[o];
            for (int h = 0; h < HIDDEN; h++) error += values[1][o * HIDDEN + h] * hidden[h];
            error /= PARTS * SAMPLES;
            for (int h = 0; h < HIDDEN; h++) {
                gradients[part][1][o * HIDDEN + h] += error * hidden[h];
                back[h] += error * values[1][o * HIDDEN + h];
            }
        }
        for (int h = 0; h < HIDDEN; h++)
            for (int i = 0; i < INPUTS && hidden[h] > 0; i++) gradients[part][0][h * INPUTS + i] += back[h] * x[i];
    }
}

/* Adds up statistics over all ranks. They are integers, so the order does not matter. */
static void add_over_ranks(int64_t *statistics, int64_t n)
{
    MPI_Allreduce(MPI_IN_PLACE, statistics, (int)n, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
}

static void step(int number)
{
    void *weights[TENSORS];
    const void *sums[TENSORS];
    /* Rank p * ranks / PARTS computes part p and sends it to all ranks. With a large model it would send each row to
     * the owner of the row. */
    for (int part = 0; part < PARTS; part++) {
        int of = part * ranks / PARTS;
        if (of == rank) backward(number, part);
        MPI_Bcast(gradients[part], TENSORS * MOST, MPI_FLOAT, of, MPI_COMM_WORLD);
    }
    /* Adds 0 + 1, 2 + 3, ...; then 01 + 23, ... The additions are the same for any number of ranks. */
    for (int width = 1; width < PARTS; width *= 2)
        for (int part = 0; part < PARTS; part += 2 * width)
            for (int k = 0; k < TENSORS * MOST; k++)
                gradients[part][k / MOST][k % MOST] += gradients[part + width][k / MOST][k % MOST];
    for (int i = 0; i < TENSORS; i++) {
        int at = first_row(i, rank) * shapes[i].row_length;
        weights[i] = stored[i] + at;
        sums[i] = gradients[0][i] + at;
    }
    halfstep_call call = {.struct_size = sizeof call, .weights = weights, .gradients = sums};
    int64_t n = halfstep_statistics_count(optimizer, &call), norms = halfstep_norms_offset(optimizer, &call);
    call.statistics = calloc((size_t)n, sizeof *call.statistics);
    if (!call.statistics) MPI_Abort(MPI_COMM_WORLD, 1);
    check(halfstep_run_begin(optimizer, &call)); /* statistics: are all gradients finite, and their norm */
    add_over_ranks(call.statistics, n);
    check(halfstep_run_norms(optimizer, &call)); /* statistics: the norms of whole tensors that the rule needs */
    add_over_ranks(call.statistics + norms, n - norms);
    check(halfstep_run_finish(optimizer, &call));
    free(call.statistics);
    gather_weights();
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    build();
    gather_weights();
    for (int number = 0; number < STEPS; number++) step(number);
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; i < TENSORS; i++)
        for (int k = 0; k < MOST; k++) hash = (hash ^ stored[i][k]) * UINT64_C(0x100000001b3);
    if (rank == 0)
        printf("%d steps, norm %.6f, hash %016llx\n", STEPS, halfstep_gradient_norm(optimizer),
               (unsigned long long)hash);
    halfstep_destroy(optimizer);
    MPI_Finalize();
    return 0;
}
