/* The Newton-Schulz iteration of muon (Jordan et al. 2024, rules/coefficients.h). Products of matrices are slates of
 * independent tasks that use the kernels' one tile function.
 *
 * A slate of its own first copies the right matrix of a product into panels of 32 columns, so that the result may
 * replace it. A task then takes a block of rows and of columns. It goes through the inner dimension in stretches that
 * are short enough for the caches, and keeps unfinished sums in the result. It copies the rows of the left matrix into
 * strips of 12 as it comes to them. Edges are padded with zeros and not stored. None of this affects the bits, because
 * every element is one chain of products and sums in the order of the inner index.
 *
 * Only the upper triangle of a small square is computed, and copied below the diagonal. For the Gram matrix and its
 * square these are the bits of the full product: products commute, and both sides of the diagonal add in the order of
 * the inner index. In exact arithmetic the polynomials of one Gram matrix commute, so that their products are
 * symmetric too. In fp32 the triangle is what makes them so. A matrix with more rows than columns is transposed by
 * exchanging its strides.
 *
 * The standard form makes a Gram matrix G for each iteration, and multiplies the matrix X by a polynomial of it. The
 * Gram form (ns_form) makes G once for a stretch of iterations. It follows what the iterations make of G, gathers their
 * polynomials in a small square Q, and multiplies X by Q at the end of the stretch. It serves matrices of which one
 * side is more than 1.5 times the other. At a ratio of 4, five iterations take 2.24 times fewer multiplications.
 *
 * Error: every step multiplies small singular values by its coefficient a, and with them the rounding errors of fp32.
 * An element of the result is therefore within the product of all a times 2^-24 of the exact one: 2.9e-5 by default,
 * 5.8e-5 for "polar-express", 4.7e-3 for the ten steps of "deepseek-v4". By default, measured up to 512
 * columns: a fifth of that, and 2e-6 of the result's norm for random matrices.
 *
 * Error of the Gram form: G holds squares of singular values, so a stretch multiplies an error by the square of the
 * product of its a. An element is within 2^-24 times (the product of all a + the sum of these squares): 1.4e-2 by
 * default, 5.6e-2 for "polar-express", 2.0e-2 for "deepseek-v4", 1.5e-2 for "dion". Measured on singular values of
 * 1/k^2, rank 8 and condition 1e6: 0.03 of that, which is 2.7e-4, 1.5e-3, 4.7e-4 and 4.2e-4.
 *
 * Stretches end before their product exceeds 1024 (hstep_newton_schulz_stretch()): after the fifth iteration in all
 * lists. Without that restart, ten iterations diverge on matrices of low rank. */

#include <math.h>
#include <string.h>

#include "base/squares.h"
#include "device/host/host.h"
#include "device/host/tile.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "tables/layout.h"

/* A block has 2 to 8 strips of rows. More of them use a panel more often before it leaves the second cache, which
 * matters where all panels do not fit the last one. Fewer make more tasks. */
#define LEAST_ROWS (2 * HSTEP_STRIP)
#define MOST_ROWS (8 * HSTEP_STRIP)
#define COLUMN_BLOCK (16 * HSTEP_PANEL)
#define ENOUGH_BLOCKS 32
/* Elements of the strips of a stretch, of which each has at most INNER_BLOCK terms. */
#define STRIPS (MOST_ROWS * 256)
#define INNER_BLOCK 512
/* Elements of a task that only reads and writes memory. */
#define STRETCH ((int64_t)32768)
/* Products with fewer multiplications run as one task, which costs less than waking threads. */
#define SMALL ((int64_t)1 << 20)

/* A matrix by its strides. */
struct view {
    float *x;
    int64_t row, column;
};

/* One slate of tasks. `unit` does one unit, and a task does `units_per_task` of them. */
struct slate {
    const struct hstep_context *context;
    void (*unit)(const struct slate *b, int64_t i);
    int64_t units, units_per_task;
    struct view c, a, b; /* c = a b */
    int64_t rows, columns, inner, row_block;
    float *panels;
    /* symmetric: c equals its transpose. coefficients: c becomes coefficients[0] I + coefficients[1] a +
     * coefficients[2] c. NULL leaves it as it is. */
    int symmetric;
    const float *coefficients;
    /* For the tasks that go through u: */
    float *u;
    int64_t n, *squares;
    double norm;
};

static int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void run_units(void *argument, int64_t task)
{
    const struct slate *b = argument;
    int64_t end = least((task + 1) * b->units_per_task, b->units);
    struct hstep_fp fp = hstep_fp_enter();
    for (int64_t i = task * b->units_per_task; i < end; i++) b->unit(b, i);
    hstep_fp_leave(fp);
}

/* Runs the units, one task for each or, if in_one, one task for all. */
static void run_slate(struct slate *b, void (*unit)(const struct slate *, int64_t), int64_t units, int in_one)
{
    b->unit = unit;
    b->units = units;
    b->units_per_task = in_one ? units : 1;
    hstep_run(b->context, run_units, b, ceil_divide(units, b->units_per_task));
}

/* ---- Products ---- */

/* Sets to[k * width + i] = from[i * outer + k * inner], and to 0 for i from `count` on. */
static void pack(float *to, int64_t width, const float *from, int64_t outer, int64_t inner, int64_t count,
                 int64_t length)
{
    if (inner != 1) {
        for (int64_t k = 0; k < length; k++, to += width) {
            for (int64_t i = 0; i < count; i++) to[i] = from[i * outer + k * inner];
            for (int64_t i = count; i < width; i++) to[i] = 0.0f;
        }
        return;
    }
    /* Copies whole cache lines of each row. With rows at a power of two, more than a few lines would evict each
     * other. */
    for (int64_t first = 0; first < length; first += 16) {
        int64_t some = least(16, length - first);
        for (int64_t i = 0; i < width; i++)
            for (int64_t k = first; k < first + some; k++) to[k * width + i] = i < count ? from[i * outer + k] : 0.0f;
    }
}

static void pack_panel(const struct slate *b, int64_t i)
{
    int64_t j = i * HSTEP_PANEL;
    pack(b->panels + j * b->inner, HSTEP_PANEL, b->b.x + j * b->b.column, b->b.column, b->b.row,
         least(HSTEP_PANEL, b->columns - j), b->inner);
}

/* Loads the part of c that the tile at (i, j) covers and that c stores, which excludes what is below the diagonal of a
 * symmetric c. */
static void load_tile(const struct slate *b, int64_t i, int64_t j, float *tile)
{
    int64_t rows = least(HSTEP_STRIP, b->rows - i), columns = least(HSTEP_PANEL, b->columns - j);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t s = b->symmetric && i + r > j ? i + r - j : 0; s < columns; s++)
            tile[r * HSTEP_PANEL + s] = b->c.x[(i + r) * b->c.row + (j + s) * b->c.column];
}

/* Stores what load_tile() loads. If `mirror` is set, also stores it transposed, below the diagonal. */
static void store_tile(const struct slate *b, int64_t i, int64_t j, const float *tile, int mirror)
{
    int64_t rows = least(HSTEP_STRIP, b->rows - i), columns = least(HSTEP_PANEL, b->columns - j);
    float *c = b->c.x + i * b->c.row + j * b->c.column;
    if (b->c.column == 1)
        for (int64_t r = 0; r < rows; r++) {
            int64_t s = b->symmetric && i + r > j ? i + r - j : 0;
            if (s < columns)
                memcpy(c + r * b->c.row + s, tile + r * HSTEP_PANEL + s, (size_t)(columns - s) * sizeof *c);
        }
    else
        for (int64_t s = 0; s < columns; s++)
            for (int64_t r = 0; r < rows; r++) c[r * b->c.row + s * b->c.column] = tile[r * HSTEP_PANEL + s];
    if (mirror)
        for (int64_t s = 0; s < columns; s++)
            for (int64_t r = 0; r < rows && i + r < j + s; r++)
                b->c.x[(j + s) * b->c.row + (i + r) * b->c.column] = tile[r * HSTEP_PANEL + s];
}

/* Replaces c by coefficients[0] I + coefficients[1] a + coefficients[2] c. a and c are dense and have the same
 * shape. */
static void finish_tile(const struct slate *b, int64_t i, int64_t j, float *tile)
{
    int64_t rows = least(HSTEP_STRIP, b->rows - i), columns = least(HSTEP_PANEL, b->columns - j);
    for (int64_t r = 0; r < rows; r++) {
        const float *a = b->a.x + (i + r) * b->a.row + j;
        float *c = tile + r * HSTEP_PANEL;
        for (int64_t s = 0; s < columns; s++) c[s] = b->coefficients[1] * a[s] + b->coefficients[2] * c[s];
        if (i + r >= j && i + r < j + columns) c[i + r - j] += b->coefficients[0];
    }
}

/* Computes one block of c, stretch by stretch of the inner dimension. */
static void multiply_block(const struct slate *b, int64_t unit)
{
    HSTEP_ALIGNED float strips[STRIPS], tile[HSTEP_STRIP * HSTEP_PANEL];
    int64_t blocks = ceil_divide(b->columns, COLUMN_BLOCK);
    int64_t top = unit / blocks * b->row_block, bottom = least(top + b->row_block, b->rows);
    int64_t left = unit % blocks * COLUMN_BLOCK, right = least(left + COLUMN_BLOCK, b->columns);
    if (b->symmetric && right <= top) return;
    const int64_t most = least(INNER_BLOCK, STRIPS / b->row_block);
    for (int64_t k = 0; k < b->inner; k += most) {
        int64_t length = least(most, b->inner - k);
        int last = k + length == b->inner;
        for (int64_t i = top; i < bottom; i += HSTEP_STRIP)
            pack(strips + (i - top) * length, HSTEP_STRIP, b->a.x + i * b->a.row + k * b->a.column, b->a.row,
                 b->a.column, least(HSTEP_STRIP, bottom - i), length);
        for (int64_t j = left; j < right; j += HSTEP_PANEL) {
            const float *panel = b->panels + j * b->inner + k * HSTEP_PANEL;
            for (int64_t i = top; i < bottom; i += HSTEP_STRIP) {
                if (b->symmetric && j + HSTEP_PANEL <= i) continue;
                memset(tile, 0, sizeof tile);
                if (k) load_tile(b, i, j, tile);
                b->context->kernels->product(tile, strips + (i - top) * length, panel, length);
                if (last && b->coefficients) finish_tile(b, i, j, tile);
                store_tile(b, i, j, tile, last && b->symmetric);
            }
        }
    }
}

static int64_t blocks_of(const struct slate *b)
{
    return ceil_divide(b->rows, b->row_block) * ceil_divide(b->columns, COLUMN_BLOCK);
}

static void multiply(struct slate *b, struct view c, struct view a, struct view right, int64_t rows, int64_t columns,
                     int64_t inner)
{
    int in_one = rows * columns <= SMALL / inner;
    b->c = c;
    b->a = a;
    b->b = right;
    b->rows = rows;
    b->columns = columns;
    b->inner = inner;
    b->row_block = MOST_ROWS;
    while (b->row_block > LEAST_ROWS && blocks_of(b) < ENOUGH_BLOCKS) b->row_block /= 2;
    run_slate(b, pack_panel, ceil_divide(columns, HSTEP_PANEL), in_one);
    run_slate(b, multiply_block, blocks_of(b), in_one);
}

/* ---- The iteration ---- */

/* Adds the squares of one stretch of u, in chunks of 256 elements as all sums of squares (docs/numerics.md 4). */
static void add_squares(const struct slate *b, int64_t unit)
{
    int64_t squares[HSTEP_EXACT_LIMBS] = {0}, end = least((unit + 1) * STRETCH, b->n);
    for (int64_t i = unit * STRETCH; i < end; i += HSTEP_TILE)
        hstep_exact_add(squares, hstep_chunk_squares(b->context->kernels, b->u + i, least(HSTEP_TILE, end - i)));
    hstep_merge_squares(b->squares, squares);
}

static void divide_by_norm(const struct slate *b, int64_t unit)
{
    int64_t end = least((unit + 1) * STRETCH, b->n);
    for (int64_t i = unit * STRETCH; i < end; i++) b->u[i] = (float)((double)b->u[i] / b->norm);
}

/* Sizes of the parts of the workspace, in floats. They are rounded up so that each part starts on a cache line if the
 * first one does. */
static size_t square_floats(int64_t m) { return ((size_t)m * (size_t)m + 15) / 16 * 16; }
static size_t panel_floats(int64_t columns, int64_t inner)
{
    return (size_t)ceil_divide(columns, HSTEP_PANEL) * HSTEP_PANEL * (size_t)inner;
}

static size_t most_floats(size_t a, size_t b) { return a > b ? a : b; }

/* In the Gram form, Q takes the end of the panels, which products of small squares leave. */
size_t hstep_newton_schulz_workspace(int64_t rows, int64_t cols)
{
    int64_t m = least(rows, cols), n = rows < cols ? cols : rows;
    size_t whole = most_floats(panel_floats(m, n), panel_floats(n, m)), small = panel_floats(m, m) + square_floats(m);
    return 2 * square_floats(m) + (hstep_newton_schulz_long(rows, cols) ? most_floats(whole, small) : whole);
}

/* Makes c = a b of squares whose product is symmetric. c may be b. */
static void multiply_symmetric(struct slate *b, struct view c, struct view a, struct view right, int64_t side,
                               int64_t inner, const float *coefficients)
{
    b->symmetric = 1;
    b->coefficients = coefficients;
    multiply(b, c, a, right, side, side, inner);
    b->symmetric = 0;
    b->coefficients = NULL;
}

/* Computes, in place:
 *
 *   X = u / max(|u|, eps), transposed if rows > cols
 *   for each stretch of iterations:
 *     G = X X^T
 *     for each iteration, with its own a, b, c:
 *       P = a I + b G + c G G
 *       Q = P Q, or P in the first iteration
 *       G = P (P G), unless it is the last iteration
 *     X = Q X
 *   u = X, transposed back
 *
 * Of every product but Q X, the upper triangle is computed and copied below the diagonal. |u| is the root of the sum
 * of squares. Products and sums are fp32 in the order of the inner index. The norm comes from an exact sum. */
void hstep_newton_schulz(const struct hstep_context *c, float *u, int64_t rows, int64_t cols, const float *k,
                         float *workspace)
{
    const float eps = k[newton_schulz_eps];
    int steps = (int)k[newton_schulz_steps];
    int64_t m = least(rows, cols), n = rows < cols ? cols : rows, squares[HSTEP_EXACT_LIMBS] = {0};
    if (m <= 0) return;
    struct view x = rows > cols ? (struct view){u, 1, cols} : (struct view){u, cols, 1};
    struct view x_transposed = {u, x.column, x.row};
    struct view gram = {workspace, m, 1}, polynomial = {workspace + square_floats(m), m, 1};
    struct view gathered = {workspace + hstep_newton_schulz_workspace(rows, cols) - square_floats(m), m, 1};
    struct slate b = {.context = c, .panels = polynomial.x + square_floats(m), .u = u, .n = m * n, .squares = squares};
    struct hstep_fp fp = hstep_fp_enter();

    run_slate(&b, add_squares, ceil_divide(b.n, STRETCH), b.n <= SMALL / 16);
    b.norm = fmax(sqrt(hstep_exact_round(squares)), (double)eps);
    /* All elements are 0. Any divisor keeps u at 0 through all steps. */
    if (b.norm == 0.0) b.norm = 1.0;
    run_slate(&b, divide_by_norm, ceil_divide(b.n, STRETCH), b.n <= SMALL / 16);

    for (int start = 0, end; start < steps; start = end) {
        struct view q = gram;
        end = hstep_newton_schulz_stretch(k, rows, cols, HSTEP_GROWTH_F32, start);
        multiply_symmetric(&b, gram, x, x_transposed, m, n, NULL);
        for (int step = start; step < end; step++) {
            /* Q X needs all panels. Q is then in the place of P or of G. */
            const int is_first = step == start, is_last = step + 1 == end;
            struct view p = is_first && !is_last ? gathered : polynomial, before = q;
            multiply_symmetric(&b, p, gram, gram, m, m, hstep_newton_schulz_triple(k, step));
            q = is_first ? p : is_last ? gram : gathered;
            if (!is_first) multiply_symmetric(&b, q, p, before, m, m, NULL);
            for (int side = 0; !is_last && side < 2; side++) multiply_symmetric(&b, gram, p, gram, m, m, NULL);
        }
        multiply(&b, x, q, x, m, n, m);
    }
    hstep_fp_leave(fp);
}

/* ---- The rows of transforms.def ---- */

static const struct {
    void (*apply)(const struct hstep_context *c, float *u, int64_t rows, int64_t cols, const float *k,
                  float *workspace);
    size_t (*workspace)(int64_t rows, int64_t cols);
} transforms[HSTEP_TRANSFORMS] = {
#define TRANSFORM(name, ...) [HSTEP_TRANSFORM_##name] = {hstep_##name, hstep_##name##_workspace},
#include "rules/transforms.def"
#undef TRANSFORM
};

/* Returns the most floats of one matrix and of what its transformation works in. */
size_t hstep_host_workspace(const struct hstep_tensor *t)
{
    size_t most = 0;
    for (int i = 0; i < t->blocks; i++) {
        const int64_t rows = hstep_matrix_rows(t, i);
        most = most_floats(most, transforms[hstep_rules[t->rule].transform].workspace(rows, t->row_length) +
                                     (size_t)(rows * t->row_length));
    }
    return most;
}

/* Products on a processor are always exact, even if the group allows others. */
int hstep_host_transform(const struct hstep_call *call, const struct hstep_matrix *m)
{
    const struct hstep_tensor *t = &call->plan.tensors[m->tensor];
    const struct hstep_update *u = &call->plan.updates[m->tensor];
    const int64_t rows = hstep_matrix_rows(t, call->matrix);
    float *matrix = call->plan.workspace;
    if (!hstep_is_transformed(t, u)) return HALFSTEP_OK;
    const struct hstep_rows alike = hstep_rows_of(call, m->tensor);
    transforms[hstep_rules[t->rule].transform].apply(call->context, matrix, rows, t->row_length, u->k,
                                                     matrix + rows * t->row_length);
    if (alike.numbers) hstep_host_rows(call->context, &alike, matrix, rows, t->row_length);
    return HALFSTEP_OK;
}
