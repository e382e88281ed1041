/* The rows of a transformed matrix O, made alike (NorMuon: Li et al. 2025, arXiv:2510.05491). A rule of kind MATRIX may
 * have an optional state v over rows. While it is stored, the transformation of a matrix ends with
 *
 *   v = b v + (1 - b) mean over columns of O^2       b is the state's .beta
 *   P = O / (sqrt(v) + 1e-10)                        each row by its own number of v
 *   O = P |O| / |P|, or P sqrt(min(rows, columns)) / |P|        |P| is the root of the sum of all squares
 *
 * The hyper-parameter of the state's .unless is 1 for the first norm and 2 for the second, which is that of a matrix
 * whose singular values are 1. Numbers of v are fp32, and everything else is in double. The sum over a row adds its
 * chunks of 256 columns in order. The sum over all rows is exact, because |P| follows from the sums over rows. Devices
 * compile this header. */
#ifndef HSTEP_ROWS_H
#define HSTEP_ROWS_H

#include <math.h>

#include "decide/prepare.h"
#include "tables/layout.h"

enum { HSTEP_ROWS_KEEP_NORM = 1, HSTEP_ROWS_FULL_NORM };

/* What the rows of one matrix need. */
struct hstep_rows {
    char *numbers; /* of v; NULL: the tensor does not store it */
    double beta;
    int norm; /* HSTEP_ROWS_* */
};

/* Returns the slot of v, or 0 if the tensor does not store it. */
HSTEP_INLINE int hstep_rows_slot(const struct hstep_tensor *t)
{
    for (int s = HALFSTEP_SLOT_STATE; t->matrix && s < t->slots; s++)
        if (t->slot[s].extent == HALFSTEP_EXTENT_ROWS) return s;
    return 0;
}

/* Returns what the matrix call->matrix of a tensor needs. */
HSTEP_INLINE struct hstep_rows hstep_rows_of(const struct hstep_call *call, int tensor)
{
    const struct hstep_tensor *t = &call->plan.tensors[tensor];
    const struct hstep_group *g = &call->plan.groups[t->group];
    const int s = hstep_rows_slot(t);
    struct hstep_rows r = {NULL, 0.0, 0};
    if (!s) return r;
    r.numbers = t->slot[s].code + hstep_matrix_start(t, call->matrix) * (int64_t)sizeof(float);
    r.beta = hstep_state_beta(g, s - HALFSTEP_SLOT_STATE);
    r.norm = (int)hstep_state_option(g, s - HALFSTEP_SLOT_STATE);
    return r;
}

/* Returns 1 if a device has matrices to transform. Their state over rows goes on where lr is 0. */
HSTEP_INLINE int hstep_is_transformed(const struct hstep_tensor *t, const struct hstep_update *u)
{
    return !u->skip && (!u->zero_lr || hstep_rows_slot(t));
}

/* Renews number `row` of v from the sum of the row's squares. */
HSTEP_INLINE void hstep_rows_renew(const struct hstep_rows *r, int64_t row, double squares, int64_t columns)
{
    float v;
    memcpy(&v, r->numbers + row * (int64_t)sizeof v, sizeof v);
    v = (float)(r->beta * (double)v + (1.0 - r->beta) * (squares / (double)columns));
    if (v < 0x1p-126f) v = 0.0f; /* as every fp32 state */
    memcpy(r->numbers + row * (int64_t)sizeof v, &v, sizeof v);
}

/* Returns 1 / (sqrt(v) + 1e-10) for a row. */
HSTEP_INLINE double hstep_rows_inverse(const struct hstep_rows *r, int64_t row)
{
    float v;
    memcpy(&v, r->numbers + row * (int64_t)sizeof v, sizeof v);
    return 1.0 / (sqrt((double)v) + 1e-10);
}

/* Returns what all rows are multiplied by after the division, from the sums of squares before and after it. */
HSTEP_INLINE double hstep_rows_factor(const struct hstep_rows *r, double before, double after, int64_t rows,
                                      int64_t columns)
{
    if (r->norm == HSTEP_ROWS_FULL_NORM) before = (double)(rows < columns ? rows : columns);
    return after > 0.0 ? sqrt(before / after) : 0.0;
}

#endif
