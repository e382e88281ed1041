/* Tests the matrix machinery of muon. The product kernel of every instruction set and the Newton-Schulz iteration are
 * compared with plain C loops, bit for bit, and with double precision. Then muon runs through the public calls. --short
 * leaves out the largest shapes, --all none. Over 500 lines because the plain loops are here too. */

#include <limits.h>

#include "device/host/host.h"
#include "handle/optimizer.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "ref/fixture.h"
#include "ref/muon.h"

static const float quintic[3] = {3.4445f, -4.775f, 2.0315f};

/* Returns 2^low to 2^high with all bits random, of either sign, and now and then a zero of either sign. */
static float wide(struct source *s, int low, int high)
{
    uint64_t r = next64(s);
    if ((r >> 8 & 31) == 0) return r & 1 ? -0.0f : 0.0f;
    return (float)ldexp((r & 1 ? -1.0 : 1.0) * (1 + next_unit(s)), low + (int)((r >> 16) % (uint64_t)(high - low)));
}

static float *floats(int64_t n) { return zeroed((size_t)n * sizeof(float)); }

static int64_t differences(const float *a, const float *b, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += to_bits(a[i]) != to_bits(b[i]);
    return count;
}

/* ---- The kernel -------------------------------------------------------------------------------------------------- */

static void test_product(void)
{
    enum { MOST = 700, TILE = HSTEP_STRIP * HSTEP_PANEL };
    static float a[MOST * HSTEP_STRIP + 1], b[MOST * HSTEP_PANEL + 1], start[TILE], expected[TILE], c[TILE + 1];
    static const int lengths[] = {0, 1, 2, 3, 7, 64, 513, 700};
    for (int isa = 0; isa < hstep_isa_count(); isa++) {
        const struct hstep_kernels *kernels = hstep_isa_kernels(isa);
        char name[96];
        if (!kernels) continue;
        snprintf(name, sizeof name, "%s: tiles are chains of fp32 products and sums, in order", hstep_isa_name(isa));
        TEST(name) {
            struct source s = {1};
            for (int round = 0; round < 40; round++) {
                /* Kinds of values: of one size as in use; of all sizes, with subnormal products; so large that sums
                 * overflow. */
                static const int range[3][2] = {{-2, 1}, {-80, 10}, {50, 53}};
                int length = lengths[round % 8], low = range[round % 3][0], high = range[round % 3][1];
                int shift = round / 8 % 2; /* off the alignment of vectors */
                for (int i = 0; i < length * HSTEP_STRIP; i++) a[i + shift] = wide(&s, low, high);
                for (int i = 0; i < length * HSTEP_PANEL; i++) b[i + shift] = wide(&s, low, high);
                for (int i = 0; i < TILE; i++) expected[i] = start[i] = round % 2 ? wide(&s, low, high) : 0;
                for (int i = 0; i < HSTEP_STRIP; i++)
                    for (int j = 0; j < HSTEP_PANEL; j++)
                        for (int k = 0; k < length; k++) {
                            float product = a[k * HSTEP_STRIP + i + shift] * b[k * HSTEP_PANEL + j + shift];
                            expected[i * HSTEP_PANEL + j] += product;
                        }
                memcpy(c + shift, start, sizeof start);
                kernels->product(c + shift, a + shift, b + shift, length);
                int64_t wrong = 0;
                for (int i = 0; i < TILE; i++)
                    wrong +=
                        to_bits(c[i + shift]) != to_bits(expected[i]) && !(isnan(c[i + shift]) && isnan(expected[i]));
                CHECK(!wrong, "round %d: %d of %d elements differ", round, (int)wrong, TILE);
            }
        }
        test_close_group();
    }
}

/* ---- The iteration ----------------------------------------------------------------------------------------------- */

/* A form of the iteration: the row of ns_form, and that of ns_coefficients. */
struct form {
    int gram, list;
};

/* Computes c = a b, or a b' if b is stored transposed, in plain loops. a is m x l, b is l x n. If it is symmetric, only
 * the upper triangle is computed, and copied. */
static void plain_product(float *c, const float *a, const float *b, int transposed, int m, int l, int n, int symmetric)
{
    for (int i = 0; i < m; i++)
        for (int j = symmetric ? i : 0; j < n; j++) {
            float sum = 0;
            for (int k = 0; k < l; k++) sum += a[i * l + k] * (transposed ? b[j * l + k] : b[k * n + j]);
            c[i * n + j] = sum;
            if (symmetric) c[j * n + i] = sum;
        }
}

/* Returns how many iterations the Gram form makes of one Gram matrix: as many as multiply small singular values by at
 * most 1024. */
static int stretch_of(const struct ref_hyper *h, int step, int steps)
{
    double product = 1, abc[3];
    for (int first = step; step < steps; step++) {
        ref_lists[(int)h->ns_coefficients].coefficients(h, step, abc);
        product *= fabs(abc[0]) / (step ? 1 : ref_lists[(int)h->ns_coefficients].norm);
        if (step > first && product > 1024) return step - first;
    }
    return INT_MAX;
}

/* Runs the iteration as matrix.c defines it, in plain loops. */
static void plain_newton_schulz(struct form form, float *u, int rows, int columns, int steps, float eps)
{
    const float k[newton_schulz_constants] = {[newton_schulz_a] = quintic[0],
                                              [newton_schulz_b] = quintic[1],
                                              [newton_schulz_c] = quintic[2],
                                              [newton_schulz_row] = (float)form.list};
    const struct ref_hyper h = {.ns_a = quintic[0], .ns_coefficients = form.list};
    int tall = rows > columns, m = tall ? columns : rows, n = tall ? rows : columns;
    float *x = floats(2 * m * n + 5 * m * m), *next = x + m * n, *gram = next + m * n, *p = gram + m * m,
          *q = p + m * m, *product = q + m * m;
    int64_t squares[HSTEP_EXACT_LIMBS] = {0};
    for (int first = 0; first < m * n; first += 256) {
        double lane[16] = {0};
        for (int i = first; i < first + 256 && i < m * n; i++) lane[i % 32 / 2] += (double)u[i] * (double)u[i];
        hstep_exact_add(squares, hstep_tree_sum(lane));
    }
    double norm = fmax(sqrt(hstep_exact_round(squares)), (double)eps);
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            double value = tall ? u[j * m + i] : u[i * n + j];
            x[i * n + j] = norm > 0 ? (float)(value / norm) : 0;
        }
    for (int step = 0, left = 0; step < steps; step++) {
        int starts = left == 0;
        const float *abc = hstep_newton_schulz_triple(k, step);
        if (starts) {
            left = form.gram && n > m * 3 / 2.0 ? stretch_of(&h, step, steps) : 1;
            plain_product(gram, x, x, 1, m, n, m, 1);
        }
        plain_product(product, gram, gram, 0, m, m, m, 1);
        for (int i = 0; i < m * m; i++) p[i] = abc[1] * gram[i] + abc[2] * product[i];
        for (int i = 0; i < m; i++) p[i * m + i] += abc[0];
        plain_product(product, p, q, 0, m, m, m, 1);
        memcpy(q, starts ? p : product, (size_t)(m * m) * sizeof *q);
        plain_product(product, p, gram, 0, m, m, m, 1);
        plain_product(gram, p, product, 0, m, m, m, 1);
        if (--left && step + 1 < steps) continue;
        left = 0;
        plain_product(next, q, x, 0, m, m, n, 0);
        memcpy(x, next, (size_t)(m * n) * sizeof *x);
    }
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) u[tall ? j * m + i : i * n + j] = x[i * n + j];
    free(x);
}

static void newton_schulz_by(struct form form, const struct hstep_kernels *kernels, int threads, float *u, int rows,
                             int columns, int steps, float eps)
{
    struct hstep_context c = {.kernels = kernels, .threads = threads};
    size_t n = hstep_newton_schulz_workspace(rows, columns);
    float *workspace = floats((int64_t)n + 64);
    const float k[] = {
        [newton_schulz_a] = quintic[0],          [newton_schulz_b] = quintic[1], [newton_schulz_c] = quintic[2],
        [newton_schulz_steps] = (float)steps,    [newton_schulz_eps] = eps,      [newton_schulz_row] = (float)form.list,
        [newton_schulz_form] = (float)form.gram,
    };
    /* The output's old contents do not matter, and nothing behind it is written. */
    for (size_t i = 0; i < n + 64; i++) workspace[i] = NAN;
    hstep_newton_schulz(&c, u, rows, columns, k, workspace);
    for (size_t i = n; i < n + 64; i++)
        CHECK(isnan(workspace[i]), "%d x %d writes behind its workspace", rows, columns);
    free(workspace);
}

static void newton_schulz(const struct hstep_kernels *kernels, int threads, float *u, int rows, int columns, int steps,
                          float eps)
{
    newton_schulz_by((struct form){0, 0}, kernels, threads, u, rows, columns, steps, eps);
}

static const struct hstep_kernels *best(void) { return hstep_isa_kernels(hstep_isa_best()); }

static void judge_bits(struct form form, int rows, int columns, int steps)
{
    int n = rows * columns;
    float *in = floats(3 * n), *expected = in + n, *u = expected + n;
    struct source s = {(uint64_t)n};
    for (int i = 0; i < n; i++) in[i] = (float)(1e-3 * next_normal(&s));
    memcpy(expected, in, (size_t)n * sizeof *in);
    plain_newton_schulz(form, expected, rows, columns, steps, 1e-7f);
    for (int isa = 0; isa < hstep_isa_count(); isa++)
        for (int threads = 1; threads <= 4; threads++) {
            if (!hstep_isa_kernels(isa)) continue;
            memcpy(u, in, (size_t)n * sizeof *in);
            newton_schulz_by(form, hstep_isa_kernels(isa), threads, u, rows, columns, steps, 1e-7f);
            CHECK(!differences(u, expected, n), "%d x %d, list %d, %s, %d threads: %d of %d elements differ", rows,
                  columns, form.list, hstep_isa_name(isa), threads, (int)differences(u, expected, n), n);
        }
    free(in);
}

static void test_bits(void)
{
    /* Sizes at the edges of strips, panels and blocks of rows (24, 48, 96), columns (512) and the inner dimension (256,
     * 512), both ways round. From {100, 517} on they take more than one task. */
    static const int shapes[][2] = {{2, 2},      {2, 3},      {3, 2},     {5, 31},    {12, 32},   {13, 33},
                                    {33, 13},    {64, 64},    {31, 97},   {97, 31},   {1, 7},     {7, 1},
                                    {4, 1100},   {1100, 4},   {100, 517}, {521, 100}, {97, 5200}, {300, 3600},
                                    {130, 1090}, {1030, 131}, {97, 7700}};
    TEST("the iteration has the bits of plain loops, on every instruction set and with 1 to 4 threads")
        for (int k = 0; k < BY_LENGTH(14, 18, 21); k++)
            judge_bits((struct form){0, 0}, shapes[k][0], shapes[k][1], k < 14 ? 5 : k < 16 ? 2 : 1);
    TEST("the Gram form has the bits of plain loops, on every instruction set and with 1 to 4 threads") {
        /* Sides of 3 to 2 are iterated in the standard form. Lists of 1 to 10 iterations have one stretch or two. */
        static const int long_shapes[][2] = {{2, 3},     {2, 4},      {33, 13},    {13, 20},   {20, 13},  {40, 61},
                                             {97, 31},   {31, 97},    {1, 7},      {4, 1100},  {1100, 4}, {521, 100},
                                             {100, 517}, {130, 1090}, {1030, 131}, {517, 1040}};
        for (int k = 0; k < BY_LENGTH(13, 14, 16); k++)
            for (int list = 0; list < (k < 11 ? 4 : 1); list++)
                judge_bits((struct form){1, list}, long_shapes[k][0], long_shapes[k][1],
                           list == 2 ? 10
                           : k < 11  ? 5 + list * 2
                                     : 3);
    }
    TEST("the Gram form has the bits of the standard form up to sides of 3 to 2, and no others beyond") {
        for (int columns = 59; columns <= 62; columns++) {
            float u[2][40 * 62];
            struct source s = {(uint64_t)columns};
            for (int i = 0; i < 40 * columns; i++) u[0][i] = u[1][i] = (float)next_normal(&s);
            for (int gram = 0; gram < 2; gram++)
                newton_schulz_by((struct form){gram, 0}, best(), 1, u[gram], 40, columns, 5, 1e-7f);
            CHECK(!differences(u[0], u[1], 40 * columns) == (columns <= 60), "40 x %d", columns);
        }
    }
    TEST("the workspace of a split tensor is that of the matrix that needs most, here the smaller one") {
        static const struct hstep_tensor split = {.rule = HSTEP_RULE_muon,
                                                  .matrix = 1,
                                                  .row_length = 1000,
                                                  .matrices = 2,
                                                  .blocks = 2,
                                                  .block_end = {700, 1360}};
        const size_t large = hstep_newton_schulz_workspace(700, 1000) + 700 * 1000,
                     small = hstep_newton_schulz_workspace(660, 1000) + 660 * 1000;
        CHECK(hstep_host_workspace(&split) == small && small > large, "%zu floats for matrices of %zu and %zu",
              hstep_host_workspace(&split), large, small);
    }
    TEST("the transposed matrix has the transposed result, a power of two times it the same") {
        enum { ROWS = 45, COLUMNS = 71, N = ROWS * COLUMNS };
        static float u[N], transposed[N], scaled[N];
        struct source s = {3};
        for (int i = 0; i < N; i++) u[i] = (float)next_normal(&s);
        for (int i = 0; i < N; i++) transposed[i % COLUMNS * ROWS + i / COLUMNS] = u[i];
        for (int i = 0; i < N; i++) scaled[i] = ldexpf(u[i], 40);
        newton_schulz(best(), 1, u, ROWS, COLUMNS, 5, 1e-7f);
        newton_schulz(best(), 1, scaled, ROWS, COLUMNS, 5, 1e-7f);
        newton_schulz(best(), 1, transposed, COLUMNS, ROWS, 5, 1e-7f);
        CHECK(!differences(u, scaled, N), "2^40 times: %d differ", (int)differences(u, scaled, N));
        /* The norm is that of chunks in another order, so its last place may differ. */
        for (int i = 0; i < N; i++)
            CHECK(fabs((double)(transposed[i % COLUMNS * ROWS + i / COLUMNS] - u[i])) < 1e-4, "transposed: %g, not %g",
                  transposed[i % COLUMNS * ROWS + i / COLUMNS], u[i]);
    }
    TEST("zeros stay zeros, tiny matrices are divided by eps, no step only divides") {
        enum { N = 20 * 40 };
        static float u[N];
        newton_schulz(best(), 1, u, 20, 40, 5, 0.0f);
        for (int i = 0; i < N; i++) CHECK(to_bits(u[i]) == 0, "%a", u[i]);
        for (int i = 0; i < N; i++) u[i] = 0x1p-40f;
        newton_schulz(best(), 1, u, 20, 40, 0, 0x1p-20f);
        for (int i = 0; i < N; i++) CHECK(u[i] == 0x1p-20f, "%a", u[i]);
        for (int i = 0; i < N; i++) u[i] = i % 4 ? 0 : -0x1p100f; /* 200 elements */
        newton_schulz(best(), 1, u, 20, 40, 0, 1e-7f);
        for (int i = 0; i < N; i += 4) CHECK(u[i] == (float)(-1 / sqrt(200)), "%a", u[i]);
    }
}

/* ---- Accuracy ---------------------------------------------------------------------------------------------------- */

/* Makes `count` orthonormal vectors of length n. */
static void orthonormal(struct source *s, double *v, int count, int n)
{
    for (int i = 0; i < count; i++) {
        for (int k = 0; k < n; k++) v[i * n + k] = next_normal(s);
        for (int round = 0; round < 2; round++) {
            for (int j = 0; j < i; j++) {
                double dot = 0;
                for (int k = 0; k < n; k++) dot += v[i * n + k] * v[j * n + k];
                for (int k = 0; k < n; k++) v[i * n + k] -= dot * v[j * n + k];
            }
            double norm = 0;
            for (int k = 0; k < n; k++) norm += v[i * n + k] * v[i * n + k];
            for (int k = 0; k < n; k++) v[i * n + k] /= sqrt(norm);
        }
    }
}

/* Makes a matrix from its singular values, and the same with f(value / norm). Returns the range of the latter. */
static void from_spectrum(struct source *s, int rows, int columns, const double *values, int count, float *u,
                          double *image, double *range)
{
    double *left = zeroed(sizeof *left * (size_t)(count * (rows + columns))), *right = left + count * rows, norm = 0;
    orthonormal(s, left, count, rows);
    orthonormal(s, right, count, columns);
    for (int r = 0; r < count; r++) norm += values[r] * values[r];
    norm = sqrt(norm);
    range[0] = INFINITY;
    range[1] = 0;
    for (int i = 0; i < rows * columns; i++) image[i] = 0;
    double *exact = zeroed(sizeof *exact * (size_t)(rows * columns));
    for (int r = 0; r < count; r++) {
        double x = values[r] / norm;
        for (int step = 0; step < 5; step++) x = 3.4445 * x - 4.775 * x * x * x + 2.0315 * x * x * x * x * x;
        range[0] = fmin(range[0], x);
        range[1] = fmax(range[1], x);
        for (int i = 0; i < rows * columns; i++) {
            double outer = left[r * rows + i / columns] * right[r * columns + i % columns];
            image[i] += x * outer;
            exact[i] += values[r] * outer;
        }
    }
    for (int i = 0; i < rows * columns; i++) u[i] = (float)exact[i];
    free(exact);
    free(left);
}

/* Returns the bound of the error. fp32 rounds to 2^-24 of the largest singular value. The steps multiply that by up to
 * the product of their first coefficients, as they do any small singular value: by 3.4445^5 = 485 in list 0. In the
 * Gram form it is that of a squared singular value that is rounded, so that a stretch multiplies by the square of its
 * product. Measured on the matrices below: in any element at most 0.33 times the bound of the standard form, and 0.05
 * times that of the Gram form. */
static double accuracy(struct form form, const struct ref_hyper *h, int steps)
{
    double all = 1, stretch = 1, squares = 0, abc[3];
    for (int step = 0, left = 0; step < steps; step++) {
        if (!left) left = stretch_of(h, step, steps), stretch = 1;
        ref_lists[form.list].coefficients(h, step, abc);
        all *= abc[0];
        stretch *= abc[0];
        if (!--left || step + 1 == steps) squares += stretch * stretch;
    }
    return 0x1p-24 * (form.gram ? all + squares : all);
}

static void judge_form(struct form form, const char *what, const float *in, int rows, int columns, const double *exact,
                       const double *image, const struct ref_hyper *h, int steps)
{
    int n = rows * columns;
    float *u = floats(n);
    double worst = 0, off = 0, sum = 0, bound = accuracy(form, h, steps), part = form.gram ? 0.05 : 0.33;
    memcpy(u, in, (size_t)n * sizeof *u);
    newton_schulz_by(form, best(), 2, u, rows, columns, steps, 1e-7f);
    for (int i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)u[i] - exact[i]));
        if (image) worst = fmax(worst, fabs((double)u[i] - image[i]));
        off += ((double)u[i] - exact[i]) * ((double)u[i] - exact[i]);
        sum += exact[i] * exact[i];
    }
    printf("     %s, list %d: %-28s %4d x %-4d elements %.3f * %.2g, norm %.1e of its own\n",
           form.gram ? "Gram" : "standard", form.list, what, rows, columns, worst / bound, bound, sqrt(off / sum));
    CHECK(worst <= part * bound, "form %d, list %d, %s, %d x %d: off by %g", form.gram, form.list, what, rows, columns,
          worst);
    free(u);
}

/* image: the exact result of list 0 by its singular vectors, or NULL. */
static void judge_accuracy(const char *what, const float *in, int rows, int columns, const double *image)
{
    int n = rows * columns;
    double *exact = zeroed(sizeof *exact * (size_t)n);
    for (int list = 0; list < (int)(sizeof ref_lists / sizeof ref_lists[0]); list++) {
        const struct ref_hyper h = {
            .ns_a = 3.4445, .ns_b = -4.775, .ns_c = 2.0315, .ns_steps = 5, .ns_eps = 1e-7, .ns_coefficients = list};
        for (int i = 0; i < n; i++) exact[i] = in[i];
        ref_newton_schulz(exact, rows, columns, &h);
        for (int gram = 0; gram <= hstep_newton_schulz_long(rows, columns); gram++)
            judge_form((struct form){gram, list}, what, in, rows, columns, exact, list ? NULL : image, &h,
                       (int)fmax(5, ref_lists[list].least));
    }
    free(exact);
}

static void test_accuracy(void)
{
    static const int shapes[][2] = {{16, 80}, {80, 16}, {64, 64}, {48, 300}, {130, 130}, {400, 60}, {256, 512}};
    TEST("the iteration is as exact as its growth lets it be, in both forms") {
        for (int k = 0; k < BY_LENGTH(4, 5, 7); k++) {
            int rows = shapes[k][0], columns = shapes[k][1], n = rows * columns, m = rows < columns ? rows : columns;
            float *u = floats(n);
            double *image = zeroed(sizeof *image * (size_t)n), *values = zeroed(sizeof *values * (size_t)m), range[2];
            struct source s = {(uint64_t)k + 10};
            for (int i = 0; i < n; i++) u[i] = (float)(1e-4 * next_normal(&s));
            judge_accuracy("normal", u, rows, columns, NULL);
            for (int i = 0; i < n; i++) u[i] = wide(&s, -50, 40);
            judge_accuracy("all magnitudes", u, rows, columns, NULL);
            for (int i = 0; i < n; i++) u[i] = (float)(1 + 1e-6 * next_normal(&s));
            judge_accuracy("all but equal", u, rows, columns, NULL);
            for (int i = 0; i < n; i++) u[i] = (float)((i / columns % 3 + 1) * (i % columns % 5 - 2));
            judge_accuracy("rank one", u, rows, columns, NULL);
            for (int r = 0; r < m; r++) values[r] = pow(10, -6.0 * r / m);
            from_spectrum(&s, rows, columns, values, m, u, image, range);
            judge_accuracy("singular values of 1 to 1e-6", u, rows, columns, image);
            for (int r = 0; r < m; r++) values[r] = pow(r + 1, -2);
            from_spectrum(&s, rows, columns, values, m, u, image, range);
            judge_accuracy("singular values 1/k^2", u, rows, columns, image);
            for (int r = 0; r < 8; r++) values[r] = 1;
            from_spectrum(&s, rows, columns, values, 8, u, image, range);
            judge_accuracy("rank 8", u, rows, columns, image);
            for (int r = 0; r < m; r++) values[r] = 1 + 3.0 * r / m;
            from_spectrum(&s, rows, columns, values, m, u, image, range);
            judge_accuracy("singular values of 1 to 4", u, rows, columns, image);
            CHECK(range[0] > 0.65 && range[1] < 1.25, "%d x %d: singular values of 1 to 4 become %g to %g", rows,
                  columns, range[0], range[1]);
            free(u);
            free(image);
            free(values);
        }
    }
}

/* ---- muon -------------------------------------------------------------------------------------------------------- */

enum { LAYERS = 4, LARGEST = 100 * 150 };
static const int layer[LAYERS][3] = {{2, 60, 90}, {2, 100, 33}, {1, 75, 1}, {3, 100, 150}};

struct model {
    halfstep_optimizer *o;
    char weight[LAYERS][LARGEST * 4];
    float gradient[LAYERS][LARGEST], out[LAYERS][LARGEST];
};

static void model_open(struct model *m, const char *recipe, int isa, int threads)
{
    halfstep_options options = {.struct_size = sizeof options, .threads = threads, .seed = 7};
    struct source s = {5};
    int32_t index;
    MUST(halfstep_create(&options, &m->o));
    if (isa >= 0) m->o->context.kernels = hstep_isa_kernels(isa);
    MUST(halfstep_add_group(m->o, recipe, &index));
    MUST(halfstep_set_hyper(m->o, index, "normalize_rows", strlen(recipe) % 3));
    for (int i = 0; i < LAYERS; i++) {
        char name[8];
        snprintf(name, sizeof name, "w%d", i);
        ADD_TENSOR(m->o, .name = name, .ndim = layer[i][0], .rows = layer[i][1], .row_length = layer[i][2],
                   .gradient = "f32");
    }
    MUST(halfstep_allocate_states(m->o));
    for (int i = 0; i < LAYERS; i++) {
        for (int j = 0; j < layer[i][1] * layer[i][2]; j++) m->out[i][j] = (float)next_normal(&s);
        MUST(halfstep_write_slot(m->o, i, WEIGHT, m->weight[i], 0, layer[i][1], m->out[i]));
    }
}

/* Makes steps with the same gradients for every model. released: one tensor at a time, the last one first. */
static void model_run(struct model *m, int steps, int released)
{
    struct source s = {6};
    for (int step = 0; step < steps; step++) {
        void *weights[LAYERS];
        const void *gradients[LAYERS];
        for (int i = 0; i < LAYERS; i++) {
            weights[i] = m->weight[i];
            gradients[i] = m->gradient[i];
            for (int j = 0; j < layer[i][1] * layer[i][2]; j++) m->gradient[i][j] = (float)(1e-3 * next_normal(&s));
        }
        if (!released) MUST(halfstep_step(m->o, weights, gradients));
        for (int i = LAYERS - 1; released && i >= 0; i--) MUST(step_tensor(m->o, i, weights[i], gradients[i]));
        if (released) MUST(end_round(m->o));
    }
    for (int i = 0; i < LAYERS; i++) MUST(halfstep_read_slot(m->o, i, WEIGHT, m->weight[i], 0, layer[i][1], m->out[i]));
}

static void test_muon(void)
{
    static struct model first, other;
    TEST("muon: the same bits on every instruction set, with 1 to 4 threads, and tensor by tensor") {
        static const char *const recipes[] = {"muon/f32/f32", "muon/bf16-sr/bf16-sr", "muon/bf16-kahan/int8",
                                              "muon/bf16-ecc8/int8+bf16"};
        for (int k = 0; k < 4; k++) {
            model_open(&first, recipes[k], -1, 1);
            model_run(&first, 4, 0);
            for (int isa = 0; isa < hstep_isa_count(); isa++)
                for (int threads = 1; threads <= 4; threads++) {
                    if (!hstep_isa_kernels(isa)) continue;
                    model_open(&other, recipes[k], isa, threads);
                    model_run(&other, 4, threads % 2);
                    for (int i = 0; i < LAYERS; i++) {
                        int n = layer[i][1] * layer[i][2], wrong = (int)differences(first.out[i], other.out[i], n);
                        CHECK(!wrong, "%s, %s, %d threads: w%d: %d of %d differ", recipes[k], hstep_isa_name(isa),
                              threads, i, wrong, n);
                    }
                    halfstep_destroy(other.o);
                }
            halfstep_destroy(first.o);
        }
    }
    TEST("muon: 20 steps follow double precision, with each scale of an update, alike rows and without Nesterov") {
        enum { ROWS = 48, COLUMNS = 30, N = ROWS * COLUMNS };
        static struct ref_element x[N];
        static float w[N], g[N];
        static const double options[][3] = {{0, 1, 0}, {1, 1, 2}, {0, 0, 1}, {2, 1, 0}, {3, 0, 1}};
        for (size_t k = 0; k < COUNT(options); k++) { /* match_rms, nesterov, normalize_rows */
            struct ref_hyper h = {.lr = 1e-2,
                                  .weight_decay = 0.1,
                                  .reference_lr = 1,
                                  .decay = REF_DECOUPLED,
                                  .momentum = 0.95,
                                  .nesterov = options[k][1],
                                  .match_rms = options[k][0],
                                  .normalize_rows = options[k][2],
                                  .row_beta = 0.95,
                                  .ns_steps = 5,
                                  .ns_a = 3.4445,
                                  .ns_b = -4.775,
                                  .ns_c = 2.0315,
                                  .ns_eps = 1e-7};
            struct ref_tensor r = {.n = N, .ndim = 2, .rows = ROWS, .columns = COLUMNS, .x = x};
            struct source s = {11};
            struct one t;
            double worst = 0, moved = 0;
            one_open(&t, "muon/f32/f32", 2, ROWS, COLUMNS, "f32");
            one_hyper(&t, "lr", h.lr);
            one_hyper(&t, "match_rms", h.match_rms);
            one_hyper(&t, "nesterov", h.nesterov);
            one_hyper(&t, "normalize_rows", h.normalize_rows);
            one_start(&t);
            for (int i = 0; i < N; i++) {
                w[i] = (float)next_normal(&s);
                x[i] = (struct ref_element){.w = w[i]};
            }
            one_write(&t, WEIGHT, w);
            for (int step = 1; step <= 20; step++) {
                for (int i = 0; i < N; i++) x[i].g = g[i] = (float)(1e-3 * next_normal(&s));
                one_write(&t, GRADIENT, g);
                MUST(one_step(&t));
                r.t = r.full = step;
                ref_muon(&h, &r);
                for (int i = 0; i < N; i++) {
                    x[i].w = x[i].w_new;
                    for (int j = 0; j < 3; j++) x[i].s[j] = x[i].s_new[j];
                }
            }
            one_read(&t, WEIGHT, t.room);
            for (int i = 0; i < N; i++) {
                worst = fmax(worst, fabs((double)t.room[i] - x[i].w));
                moved = fmax(moved, fabs((double)w[i] - x[i].w));
            }
            printf("     match_rms %g, nesterov %g, normalize_rows %g: off by %.1e, moved by up to %.1e\n", h.match_rms,
                   h.nesterov, h.normalize_rows, worst, moved);
            CHECK(worst <= 1e-4 * moved, "match_rms %g, normalize_rows %g: %g off", h.match_rms, h.normalize_rows,
                  worst);
            one_close(&t);
        }
    }
    TEST("muon: matrices have one state, other tensors take the steps of adamw") {
        enum { N = 100 };
        struct one muon, adamw;
        SIZED(halfstep_slot_info, info);
        one_new(&muon, "muon/f32/f32", 2, 8, 16, "f32");
        CHECK(halfstep_get_slot_info(muon.o, 0, STATE + 1, &info) != OK || info.code_bytes == 0,
              "a matrix has a second moment");
        one_close(&muon);
        for (int shape = 0; shape < 3; shape++) {
            struct source s = {21};
            int64_t rows = shape == 1 ? 1 : N, columns = shape == 1 ? N : 1;
            one_open(&muon, "muon/f32/f32", shape ? 2 : 1, rows, columns, "f32");
            one_open(&adamw, "adamw/f32/f32", shape ? 2 : 1, rows, columns, "f32");
            one_hyper(&adamw, "weight_decay", 0.1);
            one_start(&muon);
            one_start(&adamw);
            one_fill(&muon, WEIGHT, 1.0f);
            one_fill(&adamw, WEIGHT, 1.0f);
            for (int step = 0; step < 5; step++) {
                for (int i = 0; i < N; i++) muon.room[i] = (float)(1e-3 * next_normal(&s));
                one_write(&muon, GRADIENT, muon.room);
                one_write(&adamw, GRADIENT, muon.room);
                MUST(one_step(&muon));
                MUST(one_step(&adamw));
            }
            CHECK(!memcmp(muon.weight, adamw.weight, N * 4), "shape %d differs from adamw", shape);
            one_close(&muon);
            one_close(&adamw);
        }
    }
    TEST("muon: alike rows have equal norms at first, and the norm that normalize_rows says") {
        enum { ROWS = 40, COLUMNS = 24, N = ROWS * COLUMNS };
        static float u[3][N], v[ROWS], again[ROWS], zeros[N];
        double whole[3] = {0}, first = 0;
        for (int words = 0; words < 3; words++) {
            struct source s = {41};
            struct one t;
            one_open(&t, "muon/f32/f32", 2, ROWS, COLUMNS, "f32");
            one_hyper(&t, "lr", 1.0);
            one_hyper(&t, "weight_decay", 0.0);
            one_hyper(&t, "match_rms", 1);
            one_hyper(&t, "normalize_rows", words);
            one_start(&t);
            for (int i = 0; i < N; i++) t.room[i] = (float)(next_normal(&s) * (1 + i / COLUMNS));
            one_write(&t, GRADIENT, t.room);
            MUST(one_step(&t));
            one_read(&t, WEIGHT, u[words]);
            for (int row = 0; row < ROWS; row++) {
                double squares = 0;
                for (int j = 0; j < COLUMNS; j++) squares += pow((double)u[words][row * COLUMNS + j], 2);
                whole[words] += squares;
                if (!row) first = squares;
                if (words) CHECK(fabs(squares / first - 1) < 1e-5, "row %d: %g, not %g", row, squares, first);
            }
            /* Zeros decay the state, which also goes on where lr is 0. */
            if (words) one_read(&t, STATE + 2, v);
            one_hyper(&t, "lr", 0.0);
            one_write(&t, STATE, zeros);
            one_write(&t, GRADIENT, zeros);
            MUST(one_step(&t));
            if (words) one_read(&t, STATE + 2, again);
            for (int row = 0; words && row < ROWS; row++)
                CHECK(again[row] == (float)(0.95 * (double)v[row]) && v[row] > 0, "%g after %g", again[row], v[row]);
            one_read(&t, WEIGHT, t.room);
            CHECK(!differences(u[words], t.room, N), "weights moved with lr 0");
            one_close(&t);
        }
        CHECK(fabs(whole[1] / whole[0] - 1) < 1e-6, "keep-norm: %g, not %g", whole[1], whole[0]);
        CHECK(fabs(sqrt(whole[2] / N) - 0.2) < 1e-7, "full-norm: a root mean square of %g", sqrt(whole[2] / N));
    }
    TEST("muon: a part of a matrix is refused, a part of a vector is not") {
        halfstep_optimizer *o = new_optimizer("muon", 0, 0);
        int32_t index;
        halfstep_tensor d = {
            .struct_size = sizeof d, .name = "half", .ndim = 2, .rows = 8, .row_length = 64, .gradient = "f32"};
        for (int columns = 0; columns < 2; columns++) {
            d.n_rows = columns ? 8 : 4;
            d.n_columns = columns ? 32 : 64;
            EXPECT_NAMED(o, halfstep_add_tensor(o, &d, &index), UNSUPPORTED, "half");
        }
        ADD_TENSOR(o, .name = "vector", .ndim = 1, .rows = 64, .row_length = 1, .n_rows = 32, .n_columns = 1,
                   .gradient = "f32");
        halfstep_destroy(o);
    }
    TEST("muon: micro-steps gather the gradient in the momentum and leave weights alone") {
        enum { N = 6 * 10 };
        struct source s = {31};
        struct one t;
        static float before[N], after[N], g[2][N];
        one_new(&t, "muon/f32/f32", 2, 6, 10, "f32");
        one_fill(&t, WEIGHT, 1.0f);
        one_read(&t, WEIGHT, before);
        for (int step = 0; step < 2; step++) {
            const void *gradients[1] = {t.gradient};
            for (int i = 0; i < N; i++) g[step][i] = (float)next_normal(&s);
            one_write(&t, GRADIENT, g[step]);
            if (step) MUST(one_step(&t));
            else MUST(accumulate_states(t.o, gradients));
            one_read(&t, WEIGHT, after);
            int moved = (int)differences(before, after, N);
            CHECK(!moved == !step, "step %d: %d weights moved", step, moved);
        }
        one_read(&t, STATE, after);
        for (int i = 0; i < N; i++) {
            double expected = 0.95 * 0.05 * (double)g[0][i] + 0.05 * (double)g[1][i];
            CHECK(fabs((double)after[i] - expected) < 1e-7, "momentum %g, expected %g", after[i], expected);
        }
        one_close(&t);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_product();
    test_bits();
    test_accuracy();
    test_muon();
    return test_done();
}
