/* Vectors over the rows and columns of a matrix. A pass over its elements makes the means, and the means make the
 * vectors.
 *
 * Sums are in double and do not depend on the threads. The sum of a row adds its chunks of 256 columns exactly, as in
 * norms.c. The sum of a column is added from row to row within blocks of 64 rows, and then over the blocks in order. */
#include <math.h>
#include <string.h>

#include "decide/prepare.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

struct cross {
    const struct hstep_call *call;
    int tensor, pair;
    double *rows, *blocks; /* sums of each row, and of each column within each block */
};

static int64_t blocks_of(const struct hstep_tensor *t) { return (t->rows + HSTEP_CROSS_ROWS - 1) / HSTEP_CROSS_ROWS; }

static size_t doubles_of(const struct hstep_tensor *t)
{
    return (size_t)t->rows + (size_t)blocks_of(t) * (size_t)t->row_length;
}

size_t hstep_host_cross_workspace(const struct hstep_tensor *t)
{
    return doubles_of(t) * (sizeof(double) / sizeof(float));
}

static double sum_of(const struct hstep_kernels *kernels, float *x, int64_t n)
{
    double sums[16];
    memset(x + n, 0, (size_t)(HSTEP_TILE - n) * sizeof *x);
    kernels->format[HSTEP_FORMAT_f32].sums((const char *)x, HSTEP_TILE, sums);
    return hstep_tree_sum(sums);
}

/* Sums the values of a row, and adds them to `columns`, the sums of the block so far. */
static void sum_row(const struct cross *c, struct hstep_work *w, int64_t row, double *columns)
{
    struct hstep_stretch s = hstep_row_of(w->t, row);
    int64_t limbs[HSTEP_EXACT_LIMBS] = {0};
    double nonfinite = 0.0; /* the limbs hold finite sums only */
    if (hstep_is_by_rows(w)) w->mean = hstep_centralized(w, s.element);
    for (; s.n > 0; columns += HSTEP_TILE) {
        HSTEP_ALIGNED float x[HSTEP_MAX_SUMS][HSTEP_TILE], chunk[HSTEP_TILE];
        struct hstep_stretch left = hstep_take(&s, HSTEP_TILE);
        const int64_t count = left.n;
        while (left.n > 0) {
            /* A stretch that begins within a unit leaves less room in the tile. */
            const struct hstep_stretch some =
                hstep_take(&left, HSTEP_TILE - hstep_unit_lead(w->t, left.element, left.index));
            int64_t lead = hstep_values(w, some, x);
            memcpy(chunk + (count - left.n - some.n), x[0] + lead, (size_t)some.n * sizeof **x);
        }
        for (int64_t i = 0; i < count; i++) columns[i] += (double)chunk[i];
        double sum = sum_of(w->context->kernels, chunk, count);
        if (isfinite(sum)) hstep_exact_add(limbs, sum);
        else nonfinite += sum;
    }
    c->rows[row] = nonfinite != 0.0 ? nonfinite : hstep_exact_round(limbs);
}

static void sum_block(void *argument, int64_t block)
{
    const struct cross *c = argument;
    struct hstep_fp fp = hstep_fp_enter();
    struct hstep_work w;
    hstep_work_start(c->call, c->tensor, HSTEP_PASS_SUMS, c->pair, &w);
    double *columns = c->blocks + block * w.t->row_length;
    memset(columns, 0, (size_t)w.t->row_length * sizeof *columns);
    for (int64_t row = block * HSTEP_CROSS_ROWS; row < (block + 1) * HSTEP_CROSS_ROWS && row < w.t->rows; row++)
        sum_row(c, &w, row, columns);
    hstep_fp_leave(fp);
}

/* Computes the n new numbers of a vector from `sums`, each of which is over `elements_each` elements. Returns the sum
 * of the new numbers, for which each chunk of 256 is rounded to double before it is added. */
static double renew_vector(const struct hstep_call *call, int tensor, int pair, struct hstep_slot *slot,
                           const double *sums, int64_t n, int64_t elements_each)
{
    const struct hstep_kernels *kernels = call->context->kernels;
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    int64_t limbs[HSTEP_EXACT_LIMBS] = {0};
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        HSTEP_ALIGNED float scratch[HSTEP_TILE] = {0}, plain[HSTEP_TILE] = {0}, x[HSTEP_TILE], mean[HSTEP_TILE];
        HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS] = {0};
        int64_t count = n - i < HSTEP_TILE ? n - i : HSTEP_TILE;
        const struct hstep_format_kernels *f32 = &kernels->format[HSTEP_FORMAT_f32];
        memcpy(scratch, slot->code + i * 4, (size_t)count * 4);
        for (int64_t j = 0; j < count; j++) plain[j] = (float)(sums[i + j] / (double)elements_each);
        f32->decode[1](x, (const char *)scratch, NULL, HSTEP_TILE);
        kernels->from_plain(plain, mean, HSTEP_TILE);
        kernels->factored[t->rule][pair].vector(call->plan.updates[tensor].k, x, mean, HSTEP_TILE);
        f32->encode[1](x, (char *)scratch, NULL, words, HSTEP_TILE, 1, 1.0f);
        memcpy(slot->code + i * 4, scratch, (size_t)count * 4);
        double sum = sum_of(kernels, scratch, count);
        if (isfinite(sum)) hstep_exact_add(limbs, sum);
    }
    return hstep_exact_round(limbs);
}

int hstep_host_cross(const struct hstep_call *call, int tensor, int pair)
{
    struct hstep_tensor *t = &call->plan.tensors[tensor];
    if (call->plan.updates[tensor].skip) return HALFSTEP_OK;
    double *sums = (double *)(void *)call->plan.workspace;
    struct cross c = {call, tensor, pair, sums, sums + t->rows};
    hstep_run(call->context, sum_block, &c, blocks_of(t));
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t block = 1; block < blocks_of(t); block++)
        for (int64_t i = 0; i < t->row_length; i++) c.blocks[i] += c.blocks[block * t->row_length + i];
    struct hstep_slot *rows = hstep_vector_of(t, pair, HALFSTEP_EXTENT_ROWS);
    struct hstep_slot *columns = hstep_vector_of(t, pair, HALFSTEP_EXTENT_COLUMNS);
    renew_vector(call, tensor, pair, columns, c.blocks, t->row_length, t->rows);
    double sum = renew_vector(call, tensor, pair, rows, c.rows, t->rows, t->row_length);
    double room[HSTEP_MAX_SUMS];
    int error = hstep_decide_mean(call, tensor, pair, sum / (double)t->rows, room);
    hstep_fp_leave(fp);
    return error;
}
