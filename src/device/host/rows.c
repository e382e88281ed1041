/* Makes the rows of a transformed matrix alike (decide/rows.h), in two passes: one for the sums over rows, one for the
 * elements. */
#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "device/host/host.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"

/* Elements of a task. */
#define STRETCH ((int64_t)32768)

struct batch {
    const struct hstep_context *context;
    const struct hstep_rows *rows;
    float *u;
    int64_t n, columns, rows_per_task;
    int64_t *before, *after; /* limbs of the sums of squares before and after the division */
    double factor;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static double squares_of(const struct batch *b, int64_t row)
{
    double squares = 0.0;
    for (int64_t i = 0; i < b->columns; i += HSTEP_TILE) {
        HSTEP_ALIGNED float chunk[HSTEP_TILE] = {0};
        double sums[16];
        uint32_t maximum;
        const int64_t n = least(HSTEP_TILE, b->columns - i);
        memcpy(chunk, b->u + row * b->columns + i, (size_t)n * sizeof *chunk);
        b->context->kernels->format[HSTEP_FORMAT_f32].squares(
            (const char *)chunk, (n + HSTEP_GROUP - 1) / HSTEP_GROUP * HSTEP_GROUP, sums, &maximum);
        squares += hstep_tree_sum(sums);
    }
    return squares;
}

static void renew_rows(void *argument, int64_t task)
{
    const struct batch *b = argument;
    const int64_t end = least((task + 1) * b->rows_per_task, b->n);
    int64_t before[HSTEP_EXACT_LIMBS] = {0}, after[HSTEP_EXACT_LIMBS] = {0};
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t row = task * b->rows_per_task; row < end; row++) {
        const double squares = squares_of(b, row);
        hstep_rows_renew(b->rows, row, squares, b->columns);
        const double inverse = hstep_rows_inverse(b->rows, row);
        if (!isfinite(squares)) continue; /* the limbs hold finite numbers only */
        hstep_exact_add(before, squares);
        hstep_exact_add(after, squares * inverse * inverse);
    }
    hstep_merge_squares(b->before, before);
    hstep_merge_squares(b->after, after);
    hstep_fp_leave(fp);
}

static void multiply_rows(void *argument, int64_t task)
{
    const struct batch *b = argument;
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
    struct batch b = {.context = c,
                      .rows = rows,
                      .u = u,
                      .n = n,
                      .columns = columns,
                      .rows_per_task = columns < STRETCH ? STRETCH / columns : 1,
                      .before = before,
                      .after = after};
    const int64_t tasks = (n + b.rows_per_task - 1) / b.rows_per_task;
    hstep_run(c, renew_rows, &b, tasks);
    struct hstep_fp fp = hstep_fp_enter();
    b.factor = hstep_rows_factor(rows, hstep_exact_round(before), hstep_exact_round(after), n, columns);
    hstep_fp_leave(fp);
    hstep_run(c, multiply_rows, &b, tasks);
}
