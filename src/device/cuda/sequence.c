#include "device/cuda/sequence.h"

#include "decide/rows.h"
#include "device/cuda/blas.h"
#include "rules/transforms.h"

/* ---- Updates ---- */

static int is_one_of(int format, const int *formats, int n)
{
    while (n && formats[n - 1] != format) n--;
    return n;
}

static int state_fits(int role, int format, int first, int second, int weight)
{
    if (role == HALFSTEP_ROLE_WEIGHT) return format == weight && !hstep_formats[format].block;
    if (role == HALFSTEP_ROLE_NONNEG) return format == second;
    if (role == HALFSTEP_ROLE_GRADIENT && hstep_formats[first].block)
        return format == HSTEP_FORMAT_f32 || format == HSTEP_FORMAT_bf16_sr;
    return format == first;
}

/* Returns 1 if all grains are cells, all tracks begin with a whole cell, and rows consist of whole blocks. */
static int is_regular(const struct hstep_tensor *t)
{
    int regular = t->grain == HSTEP_CELL && t->index0 % HSTEP_CELL == 0 &&
                  (t->dense || (t->n_columns % HSTEP_CELL == 0 && t->index_stride % HSTEP_CELL == 0));
    for (int s = HALFSTEP_SLOT_WEIGHT; regular && s < t->slots; s++)
        regular = t->slot[s].extent == HALFSTEP_EXTENT_ELEMENTS &&
                  (t->slot[s].format < 0 || !hstep_formats[t->slot[s].format].block || t->n_columns % HSTEP_CELL == 0);
    return regular;
}

int hstep_cuda_find_fused(const struct hstep_tensor *t)
{
    static const struct {
        int kernel, rule, first, second;
    } rows[] = {
#define KERNEL_FUSED(rule, one, two) \
    {HSTEP_CUDA_fused_##rule##_##one##_##two, HSTEP_RULE_##rule, HSTEP_FORMAT_##one, HSTEP_FORMAT_##two},
#include "device/cuda/code/kernels.def"
    };
#define NAMED(fn) HSTEP_FORMAT_##fn,
    static const int weights[] = {HSTEP_CUDA_FUSED_WEIGHTS(NAMED)}, gradients[] = {HSTEP_CUDA_FUSED_GRADIENTS(NAMED)};
#undef NAMED
    const struct hstep_rule *rule = &hstep_rules[t->rule];
    const int weight = t->slot[HALFSTEP_SLOT_WEIGHT].format, gradient = t->slot[HALFSTEP_SLOT_GRADIENT].format,
              states = hstep_rule_states(t->rule);
    if (t->matrix || t->pairs || t->cautious || states > HSTEP_CUDA_FUSED_STATES || !is_regular(t) ||
        !is_one_of(weight, weights, sizeof weights / sizeof *weights) ||
        !is_one_of(gradient, gradients, sizeof gradients / sizeof *gradients))
        return -1;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int fits = rows[i].rule == t->rule;
        for (int j = 0; fits && j < states; j++) {
            const int format = t->slot[HALFSTEP_SLOT_STATE + j].format;
            fits = format < 0 ? rule->state[j].unless != NULL
                              : state_fits(rule->state[j].role, format, rows[i].first, rows[i].second, weight);
        }
        if (fits) return rows[i].kernel;
    }
    return -1;
}

int hstep_cuda_update(hstep_cuda_launch *launch, const struct hstep_call *call, int first, int n, enum hstep_pass pass)
{
    const struct hstep_cuda_what what = {.first = first, .n = n, .pass = (int)pass};
    char launched[HSTEP_CUDA_KERNELS] = {0};
    int error = launch(call, HSTEP_CUDA_update, what);
    for (int i = first; !error && pass == HSTEP_PASS_UPDATE && i < first + n; i++) {
        const int kernel = call->tensors[i].fused[HSTEP_WAY_PLAIN];
        if (kernel < 0 || launched[kernel]) continue;
        launched[kernel] = 1;
        error = launch(call, kernel, what);
    }
    return error;
}

/* ---- Matrices ---- */

int hstep_cuda_cross(hstep_cuda_launch *launch, const struct hstep_call *call, int tensor, int pair)
{
    struct hstep_cuda_what what = {.tensor = tensor, .pair = pair};
    int error = HALFSTEP_OK;
    for (what.pass = HSTEP_CUDA_ROWS; !error && what.pass <= HSTEP_CUDA_FACTORS; what.pass++)
        error = launch(call, HSTEP_CUDA_cross, what);
    return error;
}

/* A transformation in progress. Kernels make its products in fp32, in the contract's order, or cuBLAS makes them in 16
 * bits. Addresses are in the GPU's memory. BLAS takes matrices by columns, so it sees a matrix by rows as its
 * transpose. For a matrix with more rows than columns that is X itself, `least` x `most`. Otherwise it is X', `most` x
 * `least`. */
struct progress {
    hstep_cuda_launch *launch;
    const struct hstep_call *call;
    const struct hstep_matrix *m;
    struct hstep_blas *blas; /* NULL: kernels */
    int is_gram, tall;
    int64_t least, most;
    struct hstep_cuda_parts parts;
    int place;                /* 1: X is in its second place */
    int step, left, is_first; /* the iteration, those of its stretch that follow, 1 in the first one of the stretch */
};

static int run_phase(const struct progress *p, enum hstep_cuda_transform phase)
{
    return p->launch(p->call, HSTEP_CUDA_transform,
                     (struct hstep_cuda_what){.tensor = p->m->tensor,
                                              .pass = (int)phase,
                                              .place = p->place,
                                              .n = p->step,
                                              .pair = p->left,
                                              .first = p->is_first});
}

/* Makes a product of 16 bits, c = alpha left right + beta c. */
static int multiply(const struct progress *p, struct hstep_operand c, struct hstep_operand left,
                    struct hstep_operand right, int64_t rows, int64_t columns, int64_t inner, const float *alpha,
                    const float *beta)
{
    const int type = p->is_gram ? HSTEP_BLAS_F16 : HSTEP_BLAS_BF16;
    return hstep_blas_multiply(p->blas, type, c, left, right, rows, columns, inner, alpha, beta);
}

/* Makes a phase by cuBLAS. Terms to be added are in the place of the sum first. */
static int make_narrow(const struct progress *p, enum hstep_cuda_transform phase)
{
    float *work = p->call->plan.workspace;
    const float *one = work + p->parts.factors, *zero = one + 1,
                *abc = one + 2 + 3 * (p->step < HSTEP_MAX_TRIPLES ? p->step : HSTEP_MAX_TRIPLES - 1);
    const int64_t rows = p->tall ? p->least : p->most, columns = p->tall ? p->most : p->least, least = p->least;
    uint16_t *halves = (uint16_t *)(void *)work, *x[2] = {halves + 2 * p->parts.next, halves + 2 * p->parts.next};
    x[1] += hstep_cuda_narrow_place(p->m->rows, p->m->columns);
    const struct hstep_operand gram = {halves + 2 * p->parts.gram, least, 0}, now = {x[p->place], p->m->columns, 0},
                               turned = {now.x, now.stride, 1}, next = {x[!p->place], now.stride, 0};
    struct hstep_operand square[3];
    int error;
    for (int role = 0; role < 3; role++)
        square[role] = (struct hstep_operand){
            halves + hstep_cuda_narrow_square(&p->parts, hstep_cuda_square(p->left, p->is_first, role)), least, 0};
    const struct hstep_operand q = square[HSTEP_CUDA_Q], polynomial = square[HSTEP_CUDA_P],
                               spare = square[HSTEP_CUDA_SPARE];
    switch (phase) {
    case HSTEP_CUDA_GRAM:
        return multiply(p, gram, p->tall ? now : turned, p->tall ? turned : now, least, least, p->most, one, zero);
    case HSTEP_CUDA_POLYNOMIAL: /* without a I in the standard form */
        error = p->is_gram ? run_phase(p, HSTEP_CUDA_LINEAR)
                           : hstep_blas_copy(p->blas, polynomial.x, gram.x, least * least);
        return error ? error
                     : multiply(p, polynomial, gram, gram, least, least, least, abc + 2, p->is_gram ? one : abc + 1);
    case HSTEP_CUDA_GATHER: return multiply(p, q, polynomial, spare, least, least, least, one, zero);
    case HSTEP_CUDA_FOLLOW: return multiply(p, spare, polynomial, gram, least, least, least, one, zero);
    case HSTEP_CUDA_FOLLOWED: return multiply(p, gram, polynomial, spare, least, least, least, one, zero);
    default: /* HSTEP_CUDA_NEXT; in the standard form a X + P X */
        error = p->is_gram ? HALFSTEP_OK : hstep_blas_copy(p->blas, next.x, now.x, p->m->rows * p->m->columns);
        return error ? error
                     : multiply(p, next, p->tall ? q : now, p->tall ? now : q, rows, columns, least, one,
                                p->is_gram ? zero : abc);
    }
}

static int make(const struct progress *p, enum hstep_cuda_transform phase)
{
    return p->blas ? make_narrow(p, phase) : run_phase(p, phase);
}

static int make_iteration(const struct progress *p)
{
    int error = make(p, HSTEP_CUDA_POLYNOMIAL);
    if (!error && !p->is_first) error = make(p, HSTEP_CUDA_GATHER);
    if (!error && p->left && !(error = make(p, HSTEP_CUDA_FOLLOW))) error = make(p, HSTEP_CUDA_FOLLOWED);
    return error || p->left ? error : make(p, HSTEP_CUDA_NEXT);
}

/* Makes the rows of a transformed matrix alike if the tensor has a state over them. */
static int make_rows_alike(const struct progress *p)
{
    struct hstep_cuda_what what = {.tensor = p->m->tensor};
    int error = HALFSTEP_OK, made = !hstep_rows_slot(&p->call->tensors[what.tensor]);
    for (; !error && !made && what.pass <= HSTEP_CUDA_MULTIPLY_ROWS; what.pass++)
        error = p->launch(p->call, HSTEP_CUDA_rows, what);
    return error;
}

int hstep_cuda_transform(hstep_cuda_launch *launch, const struct hstep_call *call, const struct hstep_matrix *m,
                         struct hstep_blas *blas)
{
    const int steps = (int)m->k[newton_schulz_steps], tall = m->rows > m->columns;
    struct progress p = {.launch = launch,
                         .call = call,
                         .m = m,
                         .blas = blas,
                         .is_gram = hstep_newton_schulz_is_gram(m->k, m->rows, m->columns),
                         .tall = tall,
                         .least = tall ? m->columns : m->rows,
                         .most = tall ? m->rows : m->columns,
                         .parts = hstep_cuda_parts(m->rows, m->columns)};
    const float growth = blas ? HSTEP_GROWTH_F16 : HSTEP_GROWTH_F32;
    int error = run_phase(&p, HSTEP_CUDA_CLEAR);
    if (!error) error = run_phase(&p, HSTEP_CUDA_SQUARES);
    if (!error) error = run_phase(&p, blas ? HSTEP_CUDA_NARROW : HSTEP_CUDA_DIVIDE);
    while (!error && p.step < steps) {
        const int start = p.step, end = hstep_newton_schulz_stretch(m->k, m->rows, m->columns, growth, start);
        error = make(&p, HSTEP_CUDA_GRAM);
        for (; !error && p.step < end; p.step++) {
            p.is_first = p.step == start;
            p.left = end - 1 - p.step;
            error = make_iteration(&p);
        }
        p.place = !p.place;
        /* In fp32, squares of the Gram form take the second place of X. */
        if (!error && !blas && p.place && (p.is_gram || end == steps)) {
            error = run_phase(&p, HSTEP_CUDA_BACK);
            p.place = 0;
        }
    }
    if (!error && blas) error = run_phase(&p, HSTEP_CUDA_WIDEN);
    return error ? error : make_rows_alike(&p);
}
