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
    if (role == HALFSTEP_ROLE_WEIGHT) return format == weight;
    if (role == HALFSTEP_ROLE_NONNEG) return format == second;
    if (role == HALFSTEP_ROLE_GRADIENT && hstep_formats[first].block)
        return format == HSTEP_FORMAT_f32 || format == HSTEP_FORMAT_bf16_sr;
    return format == first;
}

/* Returns 1 if all units are groups, all runs begin with a whole group, and rows consist of whole blocks. */
static int is_regular(const struct hstep_tensor *t)
{
    int regular = t->unit == HSTEP_GROUP && t->index0 % HSTEP_GROUP == 0 &&
                  (t->dense || (t->n_columns % HSTEP_GROUP == 0 && t->index_stride % HSTEP_GROUP == 0));
    for (int s = HALFSTEP_SLOT_STATE; regular && s < t->slots; s++)
        regular = t->slot[s].extent == HALFSTEP_EXTENT_ELEMENTS &&
                  (t->slot[s].format < 0 || !hstep_formats[t->slot[s].format].block || t->n_columns % HSTEP_GROUP == 0);
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

/* The arguments that all launches of a transformation have in common. */
struct phase {
    hstep_cuda_launch *launch;
    const struct hstep_call *call;
    int tensor;
};

static int run_phase(const struct phase *p, enum hstep_cuda_transform phase, int place)
{
    return p->launch(p->call, HSTEP_CUDA_transform,
                     (struct hstep_cuda_what){.tensor = p->tensor, .pass = (int)phase, .place = place});
}

static int transform_exactly(const struct phase *p, int steps)
{
    int error = run_phase(p, HSTEP_CUDA_DIVIDE, 0);
    for (int step = 0; !error && step < steps; step++)
        if (!(error = run_phase(p, HSTEP_CUDA_GRAM, step)) && !(error = run_phase(p, HSTEP_CUDA_POLYNOMIAL, step)))
            error = run_phase(p, HSTEP_CUDA_NEXT, step);
    return error || steps % 2 == 0 ? error : run_phase(p, HSTEP_CUDA_BACK, steps);
}

/* Transforms with products in BF16. BLAS takes matrices by columns, so it sees a matrix by rows as its transpose. For a
 * matrix with more rows than columns that is X itself, `least` x `most`. Otherwise it is X', `most` x `least`.
 * Addresses are in the GPU's memory. */
static int transform_in_bf16(const struct phase *p, const struct hstep_matrix *m, struct hstep_blas *blas)
{
    const struct hstep_cuda_parts parts = hstep_cuda_parts(m->rows, m->columns);
    const int tall = m->rows > m->columns;
    const int64_t least = tall ? m->columns : m->rows, most = tall ? m->rows : m->columns,
                  all = hstep_cuda_bf16_place(m->rows, m->columns);
    float *work = p->call->plan.workspace;
    uint16_t *x = (uint16_t *)(void *)(work + parts.next), *next = x + all;
    const struct hstep_operand gram = {work + parts.gram, least, 0}, polynomial = {work + parts.polynomial, least, 0};
    const float *one = work + parts.factors, *zero = one + 1;
    int error = run_phase(p, HSTEP_CUDA_NARROW, 0), place = 0;
    for (int step = 0; !error && step < (int)m->k[newton_schulz_steps]; step++, place = !place) {
        const float *a = one + 2 + 3 * (step < HSTEP_MAX_TRIPLES ? step : HSTEP_MAX_TRIPLES - 1);
        const struct hstep_operand now = {place ? next : x, m->columns, 0}, turned = {now.x, m->columns, 1},
                                   then = {place ? x : next, m->columns, 0};
        /* G = X X', P = b G + c G G, a X + P X. Terms to be added are copied to the place of the sum first. */
        if (!(error = hstep_blas_multiply(blas, gram, tall ? now : turned, tall ? turned : now, least, least, most, one,
                                          zero)) &&
            !(error = hstep_blas_copy(blas, polynomial.x, gram.x, least * least)) &&
            !(error = hstep_blas_multiply(blas, polynomial, gram, gram, least, least, least, a + 2, a + 1)) &&
            !(error = hstep_blas_copy(blas, then.x, now.x, m->rows * m->columns)))
            error = hstep_blas_multiply(blas, then, tall ? polynomial : now, tall ? now : polynomial,
                                        tall ? least : most, tall ? most : least, least, one, a);
    }
    return error ? error : run_phase(p, HSTEP_CUDA_WIDEN, place);
}

/* Makes the rows of a transformed matrix alike if the tensor has a state over them. */
static int make_rows_alike(const struct phase *p)
{
    struct hstep_cuda_what what = {.tensor = p->tensor};
    int error = HALFSTEP_OK, made = !hstep_rows_slot(&p->call->tensors[p->tensor]);
    for (; !error && !made && what.pass <= HSTEP_CUDA_MULTIPLY_ROWS; what.pass++)
        error = p->launch(p->call, HSTEP_CUDA_rows, what);
    return error;
}

int hstep_cuda_transform(hstep_cuda_launch *launch, const struct hstep_call *call, const struct hstep_matrix *m,
                         struct hstep_blas *blas)
{
    const struct phase p = {launch, call, m->tensor};
    int error = run_phase(&p, HSTEP_CUDA_CLEAR, 0);
    if (!error) error = run_phase(&p, HSTEP_CUDA_SQUARES, 0);
    if (!error) error = blas ? transform_in_bf16(&p, m, blas) : transform_exactly(&p, (int)m->k[newton_schulz_steps]);
    return error ? error : make_rows_alike(&p);
}
