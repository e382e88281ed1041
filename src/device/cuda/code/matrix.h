/* The transformations of matrices (transforms.def), phase by phase (enum hstep_cuda_transform). All blocks of one phase
 * must be done before the next is launched. Between the phases cuBLAS may make the products, in 16 bits. */
#ifndef HSTEP_CUDA_MATRIX_H
#define HSTEP_CUDA_MATRIX_H

#include "decide/rows.h"
#include "device/cuda/code/kernels.h"
#include "device/cuda/code/lane.h"
#include "rules/transforms.h"

/* A block makes a product in squares of 64 elements. Each thread has 4 by 4 of them. The stretch of both factors that
 * is being multiplied lies in shared memory. */
enum { SQUARE = 64, DEPTH = 16, SIDE = 16, EACH = SQUARE / SIDE };

union matrix_scratch {
    struct {
        float a[DEPTH][SQUARE + 4], b[DEPTH][SQUARE + 4];
    } factors;
    struct exchange e[WARPS];
    double norm;
};

/* A matrix by its strides. */
struct view {
    float *x;
    int64_t row, column;
};

/* Sets part[d][i] = x[(first + i) * outer + (k + d) * inner], and 0 beyond the ends. Neighbouring threads read
 * neighbouring elements. */
CUDA_DEVICE void fetch_factor(float (*part)[SQUARE + 4], const float *x, int64_t outer, int64_t inner, int64_t first,
                              int64_t count, int64_t k, int64_t length)
{
    for (int j = 0; j < SQUARE * DEPTH / HSTEP_CUDA_THREADS; j++) {
        int at = CUDA_THREAD + j * HSTEP_CUDA_THREADS, i = inner == 1 ? at / DEPTH : at % SQUARE,
            d = inner == 1 ? at % DEPTH : at / SQUARE, inside = first + i < count && k + d < length;
        part[d][i] = inside ? x[(first + i) * outer + (k + d) * inner] : 0.0f;
    }
}

/* Makes one square of c = a b from (top, left) on. Every element is one chain of products and sums in the order of the
 * inner index. With coefficients, c becomes coefficients[0] I + coefficients[1] a + coefficients[2] c. mirrored: only
 * the upper triangle is stored, and elements below the diagonal are written with those above. */
CUDA_DEVICE void multiply_square(union matrix_scratch *scratch, struct view c, struct view a, struct view b,
                                 int64_t rows, int64_t columns, int64_t inner, const float *coefficients, int mirrored,
                                 int64_t top, int64_t left)
{
    const int down = CUDA_THREAD / SIDE * EACH, across = CUDA_THREAD % SIDE * EACH;
    float sum[EACH][EACH];
    for (int i = 0; i < EACH; i++)
        for (int j = 0; j < EACH; j++) sum[i][j] = 0.0f;
    for (int64_t k = 0; k < inner; k += DEPTH) {
        const int depth = within(inner - k, DEPTH);
        CUDA_BARRIER();
        fetch_factor(scratch->factors.a, a.x, a.row, a.column, top, rows, k, inner);
        fetch_factor(scratch->factors.b, b.x, b.column, b.row, left, columns, k, inner);
        CUDA_BARRIER();
        for (int d = 0; d < depth; d++)
            for (int i = 0; i < EACH; i++)
                for (int j = 0; j < EACH; j++)
                    sum[i][j] += scratch->factors.a[d][down + i] * scratch->factors.b[d][across + j];
    }
    for (int n = 0; n < EACH * EACH; n++) {
        const int64_t i = top + down + n / EACH, j = left + across + n % EACH;
        float x = sum[n / EACH][n % EACH];
        if (i >= rows || j >= columns || (mirrored && j < i)) continue;
        if (coefficients) {
            x = coefficients[1] * a.x[i * a.row + j * a.column] + coefficients[2] * x;
            if (i == j) x += coefficients[0];
        }
        c.x[i * c.row + j * c.column] = x;
        if (mirrored) c.x[j * c.row + i * c.column] = x;
    }
}

CUDA_DEVICE void multiply(union matrix_scratch *scratch, struct view c, struct view a, struct view b, int64_t rows,
                          int64_t columns, int64_t inner, const float *coefficients, int mirrored)
{
    const int64_t across = (columns + SQUARE - 1) / SQUARE, squares = (rows + SQUARE - 1) / SQUARE * across;
    for (int64_t i = CUDA_BLOCK; i < squares; i += CUDA_BLOCKS) {
        const int64_t top = i / across * SQUARE, left = i % across * SQUARE;
        if (!mirrored || left >= top)
            multiply_square(scratch, c, a, b, rows, columns, inner, coefficients, mirrored, top, left);
    }
}

/* Numbers of threads and warps in the whole grid of blocks. */
CUDA_DEVICE int64_t thread_of_grid(void) { return (int64_t)CUDA_BLOCK * HSTEP_CUDA_THREADS + CUDA_THREAD; }
CUDA_DEVICE int64_t threads_of_grid(void) { return (int64_t)CUDA_BLOCKS * HSTEP_CUDA_THREADS; }
CUDA_DEVICE int64_t warp_of_grid(void) { return thread_of_grid() / LANES; }
CUDA_DEVICE int64_t warps_of_grid(void) { return threads_of_grid() / LANES; }

/* Returns the sum of the squares of the first 256 of n numbers, or of all if they are fewer, to all lanes. */
CUDA_DEVICE double chunk_squares(struct exchange *e, const float *x, int64_t n)
{
    vf mine[2];
    for (int j = 0; j < PLACES; j++) {
        const int64_t at = lane_of_thread() * PLACES + j;
        PLACE(mine, j) = at < n ? x[at] : 0.0f;
    }
    return warp_total(e, mine, 1);
}

CUDA_DEVICE void add_squares(struct exchange *e, const float *u, int64_t n, int64_t *limbs)
{
    for (int64_t i = warp_of_grid() * HSTEP_TILE; i < n; i += warps_of_grid() * HSTEP_TILE) {
        const double total = chunk_squares(e, u + i, n - i);
        if (lane_of_thread() == 0) add_shared(limbs, total);
    }
}

/* Returns the root of the sum of squares, at least eps, or 1 if both are 0. A matrix of zeros then stays zero through
 * all steps. */
CUDA_DEVICE double norm_of(union matrix_scratch *scratch, const int64_t *limbs, double eps)
{
    if (CUDA_THREAD == 0) {
        double norm = sqrt(hstep_exact_round(limbs));
        if (norm < eps) norm = eps;
        scratch->norm = norm == 0.0 ? 1.0 : norm;
    }
    CUDA_BARRIER();
    return scratch->norm;
}

CUDA_DEVICE uint16_t to_bf16(float x)
{
    const uint32_t bits = hstep_pattern(x);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CUDA_DEVICE struct view square_of(float *u, const struct hstep_cuda_parts *parts, int64_t m,
                                  const struct hstep_cuda_what *what, enum hstep_cuda_role role)
{
    return (struct view){u + hstep_cuda_square_place(parts, hstep_cuda_square(what->pair, what->first, role)), m, 1};
}

/* Rounds to BF16, or to FP16. */
CUDA_DEVICE uint16_t to_narrow(float x, int is_half) { return is_half ? hstep_half_encode(x) : to_bf16(x); }

CUDA_DEVICE void newton_schulz(union matrix_scratch *scratch, const struct hstep_cuda_what *what, float *u,
                               int64_t rows, int64_t cols, const float *k)
{
    const struct hstep_cuda_parts parts = hstep_cuda_parts(rows, cols);
    const int64_t m = least(rows, cols), n = rows < cols ? cols : rows, all = rows * cols;
    const struct view places[2] = {{u, rows > cols ? 1 : cols, rows > cols ? cols : 1}, {u + parts.next, n, 1}};
    const int other = what->place & 1;
    const struct view x = places[other], next = places[!other], gram = {u + parts.gram, m, 1},
                      x_transposed = {x.x, x.column, x.row};
    const struct view q = square_of(u, &parts, m, what, HSTEP_CUDA_Q), p = square_of(u, &parts, m, what, HSTEP_CUDA_P),
                      spare = square_of(u, &parts, m, what, HSTEP_CUDA_SPARE);
    const float *abc = hstep_newton_schulz_triple(k, what->n);
    int64_t *limbs = (int64_t *)(void *)(u + parts.limbs);
    uint16_t *narrow = (uint16_t *)(void *)(u + parts.next) + (other ? hstep_cuda_narrow_place(rows, cols) : 0);
    const int is_gram = hstep_newton_schulz_is_gram(k, rows, cols);
    double norm;
    switch (what->pass) {
    case HSTEP_CUDA_CLEAR:
        if (CUDA_BLOCK) break;
        if (CUDA_THREAD < HSTEP_EXACT_LIMBS) limbs[CUDA_THREAD] = 0;
        if (CUDA_THREAD < 2) u[parts.factors + CUDA_THREAD] = CUDA_THREAD ? 0.0f : 1.0f;
        if (CUDA_THREAD < 3 * HSTEP_MAX_TRIPLES)
            u[parts.factors + 2 + CUDA_THREAD] = hstep_newton_schulz_triple(k, CUDA_THREAD / 3)[CUDA_THREAD % 3];
        break;
    case HSTEP_CUDA_SQUARES: add_squares(&scratch->e[warp_of_thread()], u, all, limbs); break;
    case HSTEP_CUDA_DIVIDE:
        norm = norm_of(scratch, limbs, (double)k[newton_schulz_eps]);
        for (int64_t i = thread_of_grid(); i < all; i += threads_of_grid()) u[i] = (float)((double)u[i] / norm);
        break;
    case HSTEP_CUDA_GRAM: multiply(scratch, gram, x, x_transposed, m, m, n, NULL, 1); break;
    case HSTEP_CUDA_POLYNOMIAL: multiply(scratch, p, gram, gram, m, m, m, abc, 1); break;
    case HSTEP_CUDA_GATHER: multiply(scratch, q, p, spare, m, m, m, NULL, 1); break;
    case HSTEP_CUDA_FOLLOW: multiply(scratch, spare, p, gram, m, m, m, NULL, 1); break;
    case HSTEP_CUDA_FOLLOWED: multiply(scratch, gram, p, spare, m, m, m, NULL, 1); break;
    case HSTEP_CUDA_NEXT: multiply(scratch, next, q, x, m, n, m, NULL, 0); break;
    case HSTEP_CUDA_BACK:
        for (int64_t i = thread_of_grid(); i < all; i += threads_of_grid())
            u[i] = x.x[rows > cols ? i % cols * x.row + i / cols : i];
        break;
    case HSTEP_CUDA_NARROW:
        norm = norm_of(scratch, limbs, (double)k[newton_schulz_eps]);
        for (int64_t i = thread_of_grid(); i < all; i += threads_of_grid())
            narrow[i] = to_narrow((float)((double)u[i] / norm), is_gram);
        break;
    case HSTEP_CUDA_LINEAR:
        narrow = (uint16_t *)(void *)u;
        for (int64_t i = thread_of_grid(); i < m * m; i += threads_of_grid()) {
            const float g = hstep_half_decode(narrow[2 * parts.gram + i]), identity = i / m == i % m ? abc[0] : 0.0f;
            narrow[hstep_cuda_narrow_square(&parts, hstep_cuda_square(what->pair, what->first, HSTEP_CUDA_P)) + i] =
                hstep_half_encode(identity + abc[1] * g);
        }
        break;
    case HSTEP_CUDA_WIDEN:
        for (int64_t i = thread_of_grid(); i < all; i += threads_of_grid())
            u[i] = is_gram ? hstep_half_decode(narrow[i]) : hstep_number((uint32_t)narrow[i] << 16);
        break;
    default: break;
    }
}

CUDA_KERNEL void halfstep_cuda_transform(struct hstep_call call, struct hstep_cuda_what what)
{
    CUDA_SHARED union matrix_scratch scratch;
    const struct hstep_tensor *t = &call.plan.tensors[what.tensor];
    const struct hstep_update *u = &call.plan.updates[what.tensor];
    const int64_t rows = hstep_matrix_rows(t, call.matrix);
    if (!hstep_is_transformed(t, u)) return;
    switch (hstep_rules[t->rule].transform) {
#define TRANSFORM(name, ...) \
    case HSTEP_TRANSFORM_##name: name(&scratch, &what, call.plan.workspace, rows, t->row_length, u->k); break;
#include "rules/transforms.def"
#undef TRANSFORM
    default: break;
    }
}

#endif
