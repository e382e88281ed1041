/* Vectors over the rows and columns of matrices. A pass over the elements makes the means, and the means make the
 * vectors.
 *
 * Sums are in double and do not depend on the threads. The sum of a row adds its chunks of 256 columns exactly, as in
 * norms.c. The sum of a column is added from row to row within blocks of 64 rows of a matrix, and then over the blocks
 * in order. Vectors of different matrices are made by different tasks. The state over rows of a transformed matrix has
 * sums of its own (decide/rows.h). */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "decide/prepare.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "tables/layout.h"

struct cross {
    const struct hstep_call *call;
    int tensor, pair;
    int64_t blocks, blocks_per_task; /* blocks: of the largest matrix. Smaller ones have empty blocks after theirs */
    int64_t matrices_per_task;
    double *rows, *columns; /* sums of each row, and of each column within each block */
};

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t blocks_of(int64_t rows) { return ceil_divide(rows, HSTEP_CROSS_ROWS); }

/* Returns the first row of a block, counted over all matrices. The number after the last block is allowed. */
static int64_t start_of_block(const struct cross *c, const struct hstep_tensor *t, int64_t number)
{
    const int64_t matrix = number / c->blocks, row = number % c->blocks * HSTEP_CROSS_ROWS,
                  start = hstep_matrix_start(t, matrix);
    return row ? start + least(row, hstep_matrix_rows(t, matrix)) : start;
}

size_t hstep_host_cross_workspace(const struct hstep_tensor *t)
{
    const int64_t doubles = t->n_rows + blocks_of(hstep_most_rows(t)) * t->matrices * t->row_length;
    return (size_t)hstep_factor_floats(t) + (size_t)doubles * (sizeof(double) / sizeof(float));
}

/* Returns the sums of the columns in the block of a row. The first blocks of all matrices come first, then the second
 * blocks, so that totals end up next to each other. */
static double *columns_of(const struct cross *c, const struct hstep_tensor *t, int64_t row)
{
    const int64_t matrix = hstep_matrix_of(t, row), block = (row - hstep_matrix_start(t, matrix)) / HSTEP_CROSS_ROWS;
    return c->columns + (block * t->matrices + matrix) * t->row_length;
}

/* Returns the sum of n numbers, at most a tile. What follows them in x, up to a tile, becomes 0. */
static double sum_of(const struct hstep_kernels *kernels, float *x, int64_t n)
{
    double sums[16] = {0};
    if (n <= HSTEP_CELL) { /* as the kernel sums them, without the rest of the tile */
        for (int64_t i = 0; i < n; i++) sums[i / 2] += (double)x[i];
        return hstep_tree_sum(sums);
    }
    memset(x + n, 0, (size_t)(HSTEP_TILE - n) * sizeof *x);
    kernels->format[HSTEP_FORMAT_f32].sums((const char *)x, HSTEP_TILE, sums);
    return hstep_tree_sum(sums);
}

/* An exact sum. Its limbs hold finite numbers only. */
struct exact {
    int64_t limbs[HSTEP_EXACT_LIMBS];
    double nonfinite;
};

static void exact_add(struct exact *e, double sum)
{
    if (isfinite(sum)) hstep_exact_add(e->limbs, sum);
    else e->nonfinite += sum;
}

/* Sums the values of a row, and adds them to `columns`, the sums of the block so far. */
static void sum_row(const struct cross *c, struct hstep_work *w, int64_t row)
{
    struct hstep_stretch s = hstep_row_of(w->t, row);
    struct exact total = {{0}, 0.0};
    double *columns = columns_of(c, w->t, row);
    if (hstep_is_by_rows(w)) w->mean = hstep_centralized(w, s.element);
    for (; s.n > 0; columns += HSTEP_TILE) {
        HSTEP_ALIGNED float x[HSTEP_MAX_SUMS][HSTEP_TILE], chunk[HSTEP_TILE];
        struct hstep_stretch left = hstep_take(&s, HSTEP_TILE);
        const int64_t count = left.n;
        while (left.n > 0) {
            /* A stretch that begins within a grain leaves less room in the tile. */
            const struct hstep_stretch some =
                hstep_take(&left, HSTEP_TILE - hstep_grain_lead(w->t, left.element, left.index));
            int64_t lead = hstep_values(w, some, x);
            memcpy(chunk + (count - left.n - some.n), x[0] + lead, (size_t)some.n * sizeof **x);
        }
        for (int64_t i = 0; i < count; i++) columns[i] += (double)chunk[i];
        exact_add(&total, sum_of(w->context->kernels, chunk, count));
    }
    c->rows[row] = total.nonfinite != 0.0 ? total.nonfinite : hstep_exact_round(total.limbs);
}

/* Sums rows of fewer elements than a cell, as many as fit a tile at a time. They have one chunk of columns each. */
static void sum_short_rows(const struct cross *c, const struct hstep_work *w, int64_t row, int64_t end)
{
    HSTEP_ALIGNED float x[HSTEP_MAX_SUMS][HSTEP_TILE];
    float values[HSTEP_CELL];
    struct hstep_stretch s = hstep_row_of(w->t, row);
    int64_t column = 0;
    s.n = (end - row) * w->t->row_length;
    while (s.n > 0) {
        const struct hstep_stretch some = hstep_take(&s, HSTEP_TILE - hstep_grain_lead(w->t, s.element, s.index));
        const int64_t lead = hstep_values(w, some, x);
        for (int64_t i = lead; i < lead + some.n; i++) {
            values[column++] = x[0][i];
            if (column < w->t->row_length) continue;
            double *columns = columns_of(c, w->t, row);
            for (int64_t j = 0; j < column; j++) columns[j] += (double)values[j];
            c->rows[row++] = sum_of(w->context->kernels, values, column);
            column = 0;
        }
    }
}

/* Sums the rows of consecutive blocks. */
static void sum_blocks(void *argument, int64_t task)
{
    const struct cross *c = argument;
    struct hstep_fp fp = hstep_fp_enter();
    struct hstep_work w;
    hstep_work_start(c->call, c->tensor, HSTEP_PASS_SUMS, c->pair, &w);
    const struct hstep_tensor *t = w.t;
    const int64_t first = task * c->blocks_per_task, last = least(first + c->blocks_per_task, c->blocks * t->matrices),
                  row = start_of_block(c, t, first), end = start_of_block(c, t, last);
    for (int64_t i = first; i < last; i++)
        memset(c->columns + (i % c->blocks * t->matrices + i / c->blocks) * t->row_length, 0,
               (size_t)t->row_length * sizeof(double));
    if (t->row_length < HSTEP_CELL && t->dense && !hstep_is_by_rows(&w)) sum_short_rows(c, &w, row, end);
    else
        for (int64_t i = row; i < end; i++) sum_row(c, &w, i);
    hstep_fp_leave(fp);
}

/* Computes new numbers first .. end - 1 of a vector from `sums`. */
static void renew_vector(const struct cross *c, const struct hstep_slot *slot, const double *sums, int64_t first,
                         int64_t end)
{
    const struct hstep_kernels *kernels = c->call->context->kernels;
    const struct hstep_tensor *t = &c->call->plan.tensors[c->tensor];
    const struct hstep_format_kernels *f32 = &kernels->format[HSTEP_FORMAT_f32];
    const int over_rows = slot->extent == HALFSTEP_EXTENT_ROWS;
    for (int64_t i = first; i < end; i += HSTEP_TILE) {
        HSTEP_ALIGNED float scratch[HSTEP_TILE] = {0}, plain[HSTEP_TILE] = {0}, x[HSTEP_TILE], mean[HSTEP_TILE];
        HSTEP_ALIGNED uint32_t words[HSTEP_TILE_WORDS] = {0};
        const int64_t count = least(end - i, HSTEP_TILE);
        memcpy(scratch, slot->code + i * 4, (size_t)count * 4);
        for (int64_t j = i, next; j < i + count; j = next) {
            const int64_t matrix = over_rows ? 0 : j / t->row_length,
                          of = over_rows ? t->row_length : hstep_matrix_rows(t, matrix);
            next = over_rows ? i + count : least((matrix + 1) * t->row_length, i + count);
            for (int64_t k = j; k < next; k++) plain[k - i] = (float)(sums[k] / (double)of);
        }
        f32->decode[1](x, (const char *)scratch, NULL, HSTEP_TILE);
        kernels->from_plain(plain, mean, HSTEP_TILE);
        kernels->factored[t->rule][c->pair].vector(c->call->plan.updates[c->tensor].k, x, mean, HSTEP_TILE);
        f32->encode[1](x, (char *)scratch, NULL, words, HSTEP_TILE, 1, 1.0f);
        memcpy(slot->code + i * 4, scratch, (size_t)count * 4);
    }
}

/* Returns the sum of n fp32 numbers. Each chunk of 256 is rounded to double before it is added. Chunks whose sum is not
 * finite do not count. */
static double sum_of_vector(const struct hstep_kernels *kernels, const char *numbers, int64_t n)
{
    HSTEP_ALIGNED float x[HSTEP_TILE];
    if (n <= HSTEP_TILE) { /* exact as it is */
        memcpy(x, numbers, (size_t)n * 4);
        const double sum = sum_of(kernels, x, n);
        return isfinite(sum) ? sum : 0.0;
    }
    struct exact total = {{0}, 0.0};
    for (int64_t i = 0; i < n; i += HSTEP_TILE) {
        const int64_t count = least(n - i, HSTEP_TILE);
        memcpy(x, numbers + i * 4, (size_t)count * 4);
        exact_add(&total, sum_of(kernels, x, count));
    }
    return hstep_exact_round(total.limbs);
}

/* Adds up the sums over the columns of consecutive matrices, and makes their vectors and factors. A factor comes from
 * the mean over the new vector of rows. */
static void renew_matrices(void *argument, int64_t task)
{
    const struct cross *c = argument;
    struct hstep_tensor *t = &c->call->plan.tensors[c->tensor];
    const struct hstep_group *g = &c->call->plan.groups[t->group];
    const struct hstep_slot *rows = hstep_vector_of(t, c->pair, HALFSTEP_EXTENT_ROWS);
    const int64_t first = task * c->matrices_per_task, end = least(first + c->matrices_per_task, t->matrices),
                  totals = t->matrices * t->row_length;
    float *factors = c->call->plan.workspace + c->pair * t->matrices;
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t matrix = first; matrix < end; matrix++)
        for (int64_t block = 1; block < blocks_of(hstep_matrix_rows(t, matrix)); block++)
            for (int64_t i = matrix * t->row_length; i < (matrix + 1) * t->row_length; i++)
                c->columns[i] += c->columns[block * totals + i];
    renew_vector(c, hstep_vector_of(t, c->pair, HALFSTEP_EXTENT_COLUMNS), c->columns, first * t->row_length,
                 end * t->row_length);
    renew_vector(c, rows, c->rows, hstep_matrix_start(t, first), hstep_matrix_start(t, end));
    for (int64_t matrix = first; matrix < end; matrix++) {
        const int64_t n = hstep_matrix_rows(t, matrix);
        const char *numbers = rows->code + hstep_matrix_start(t, matrix) * 4;
        factors[matrix] = hstep_factor_of(g, sum_of_vector(c->call->context->kernels, numbers, n) / (double)n, c->pair);
    }
    hstep_fp_leave(fp);
}

int hstep_host_cross(const struct hstep_call *call, int tensor, int pair)
{
    struct hstep_tensor *t = &call->plan.tensors[tensor];
    if (call->plan.updates[tensor].skip) return HALFSTEP_OK;
    double *sums = (double *)(void *)(call->plan.workspace + hstep_factor_floats(t));
    float *later = call->plan.workspace + (pair + 1) * t->matrices;
    const int64_t most = hstep_most_rows(t), of_a_block = least(most, HSTEP_CROSS_ROWS) * t->row_length,
                  of_a_matrix = most + blocks_of(most) * t->row_length;
    struct cross c = {.call = call,
                      .tensor = tensor,
                      .pair = pair,
                      .blocks = blocks_of(most),
                      .blocks_per_task = of_a_block < HSTEP_CHUNK / 2 ? HSTEP_CHUNK / 2 / of_a_block : 1,
                      .matrices_per_task = of_a_matrix < HSTEP_CHUNK / 2 ? HSTEP_CHUNK / 2 / of_a_matrix : 1,
                      .rows = sums,
                      .columns = sums + t->n_rows};
    hstep_run(call->context, sum_blocks, &c, ceil_divide(c.blocks * t->matrices, c.blocks_per_task));
    hstep_run(call->context, renew_matrices, &c, ceil_divide(t->matrices, c.matrices_per_task));
    /* Factors of later pairs are 0 until they are made. */
    for (int64_t i = 0; i < (t->pairs - pair - 1) * t->matrices; i++) later[i] = 0.0f;
    return HALFSTEP_OK;
}

/* ---- The rows of a transformed matrix ---- */

/* The work of one matrix, in two slates: one for the sums over rows, one for the elements. */
struct alike {
    const struct hstep_context *context;
    const struct hstep_rows *rows;
    float *u;
    int64_t n, columns, rows_per_task;
    int64_t *before, *after; /* limbs of the sums of squares before and after the division */
    double factor;
};

static void renew_rows(void *argument, int64_t task)
{
    const struct alike *b = argument;
    const int64_t end = least((task + 1) * b->rows_per_task, b->n);
    int64_t before[HSTEP_EXACT_LIMBS] = {0}, after[HSTEP_EXACT_LIMBS] = {0};
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t row = task * b->rows_per_task; row < end; row++) {
        const float *u = b->u + row * b->columns;
        double squares = 0.0;
        for (int64_t i = 0; i < b->columns; i += HSTEP_TILE)
            squares += hstep_chunk_squares(b->context->kernels, u + i, least(HSTEP_TILE, b->columns - i));
        hstep_rows_renew(b->rows, row, squares, b->columns);
        const double inverse = hstep_rows_inverse(b->rows, row), divided = squares * inverse * inverse;
        if (!isfinite(divided)) continue; /* the limbs hold finite numbers only */
        hstep_exact_add(before, squares);
        hstep_exact_add(after, divided);
    }
    hstep_merge_squares(b->before, before);
    hstep_merge_squares(b->after, after);
    hstep_fp_leave(fp);
}

static void multiply_rows(void *argument, int64_t task)
{
    const struct alike *b = argument;
    const int64_t end = least((task + 1) * b->rows_per_task, b->n);
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t row = task * b->rows_per_task; row < end; row++) {
        const float factor = (float)(hstep_rows_inverse(b->rows, row) * b->factor);
        float *u = b->u + row * b->columns;
        for (int64_t i = 0; i < b->columns; i++) u[i] *= factor;
    }
    hstep_fp_leave(fp);
}

void hstep_host_rows(const struct hstep_context *c, const struct hstep_rows *rows, float *u, int64_t n, int64_t columns)
{
    int64_t before[HSTEP_EXACT_LIMBS] = {0}, after[HSTEP_EXACT_LIMBS] = {0};
    struct alike b = {.context = c,
                      .rows = rows,
                      .u = u,
                      .n = n,
                      .columns = columns,
                      .rows_per_task = columns < HSTEP_CHUNK ? HSTEP_CHUNK / columns : 1,
                      .before = before,
                      .after = after};
    const int64_t tasks = ceil_divide(n, b.rows_per_task);
    hstep_run(c, renew_rows, &b, tasks);
    struct hstep_fp fp = hstep_fp_enter();
    b.factor = hstep_rows_factor(rows, hstep_exact_round(before), hstep_exact_round(after), n, columns);
    hstep_fp_leave(fp);
    hstep_run(c, multiply_rows, &b, tasks);
}
