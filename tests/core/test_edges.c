/* Tests limits of the core: sums of enormous length, parts of tensors, the caller's floating-point mode, callers of
 * other versions, and threads that fail. Also counters and moments that no update leaves behind. Over 500 lines because
 * each is a small world of its own. Only --all does what takes gigabytes of gradients. */
#define _GNU_SOURCE
#define HALFSTEP_ADVANCED
#include <fenv.h>
#include <pthread.h>
#include <stddef.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "base/exact.h"
#include "base/squares.h"
#include "decide/prepare.h"
#include "kernels/dispatch.h"
#include "ref/fixture.h"
#include "vec/scalar.h"

#include "rules/adan.h"

/* ---- Sums without end -------------------------------------------------------------------------------------------- */

static void test_sums_without_end(void)
{
    TEST("sums of tasks are merged without end") {
        /* Fills a task of short rows with squares, and merges it until 2^32 of them are summed. */
        int64_t task[HSTEP_EXACT_LIMBS] = {0}, total[HSTEP_EXACT_LIMBS] = {0}, from[HSTEP_EXACT_LIMBS];
        double square = 0x1.fffffffffffffp-3;
        for (int i = 0; i < 32768; i++) hstep_exact_add(task, square);
        for (int i = 0; i < 131072; i++) {
            memcpy(from, task, sizeof from);
            hstep_merge_squares(total, from);
        }
        EQUAL(hstep_exact_round(total), square * 0x1p32);
    }
#if defined(__linux__) && !defined(HSTEP_TEST_EMULATED)
    TEST("two billion gradients in rows of one have a norm") {
        /* One page of gradients, mapped again and again. */
        enum { WINDOW = 1 << 26 };
        const int64_t windows = 66, n = windows * WINDOW / 2;
        int file = test_length < TEST_ALL ? -1 : memfd_create("gradients", 0);
        char *all = file < 0 || ftruncate(file, WINDOW) ? MAP_FAILED
                                                        : mmap(NULL, (size_t)windows * WINDOW, PROT_NONE,
                                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (int64_t i = 0; i < windows && all != MAP_FAILED; i++)
            if (mmap(all + i * WINDOW, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
                munmap(all, (size_t)windows * WINDOW);
                all = MAP_FAILED;
            }
        if (all == MAP_FAILED) {
            printf("     left out: %s\n", test_length < TEST_ALL ? "it is for --all" : "no memory to map");
        } else {
            const float value = 0x1.fep-10f; /* its square fills the top of a limb */
            for (int64_t i = 0; i < WINDOW / 2; i++) ((uint16_t *)all)[i] = (uint16_t)(to_bits(value) >> 16);
            halfstep_tensor d = {
                .struct_size = sizeof d, .name = "long", .ndim = 1, .rows = n, .row_length = 1, .gradient = "bf16"};
            const void *gradients[1] = {all};
            halfstep_optimizer *o = optimizer_of("sgd/bf16", &d);
            MUST(halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", 1));
            int64_t *statistics = zeroed((size_t)statistics_count(o) * 8);
            MUST(step_begin(o, gradients, statistics));
            double norm = sqrt(hstep_exact_round(statistics)), wanted = sqrt((double)n) * (double)value;
            CHECK(fabs(norm - wanted) <= 1e-12 * wanted, "the norm of %lld gradients is %.17g instead of %.17g",
                  (long long)n, norm, wanted);
            free(statistics);
            halfstep_destroy(o);
            munmap(all, (size_t)windows * WINDOW);
        }
        if (file >= 0) close(file);
    }
#endif
    TEST("a norm that is not finite refuses the step") {
        struct one t;
        int64_t *statistics, round[HSTEP_EXACT_LIMBS];
        one_new(&t, "adamw/f32", 2, 4, 64, "f32");
        one_fill(&t, WEIGHT, 1);
        one_fill(&t, GRADIENT, 1);
        MUST(halfstep_set_hyper(t.o, ALL_GROUPS, "clip_norm", 1));
        void *weights[1] = {t.weight}, *before = zeroed(t.weight_bytes);
        const void *gradients[1] = {t.gradient};
        memcpy(before, t.weight, t.weight_bytes);
        statistics = zeroed((size_t)statistics_count(t.o) * 8);
        MUST(step_begin(t.o, gradients, statistics));
        statistics[HSTEP_EXACT_LIMBS - 1] = -1; /* a sum of squares below zero has no root */
        EXPECT_NAMED(t.o, step_finish(t.o, weights, gradients, statistics), HALFSTEP_NONFINITE, "norm");
        CHECK(!*halfstep_nonfinite_tensor(t.o, NULL), "'%s' is to blame", halfstep_nonfinite_tensor(t.o, NULL));
        MUST(halfstep_set_choice(t.o, ALL_GROUPS, "clip", "per-tensor"));
        MUST(step_tensor_begin(t.o, 0, t.gradient, statistics));
        statistics[HSTEP_EXACT_LIMBS - 1] = -1;
        EXPECT(step_tensor_finish(t.o, 0, t.weight, t.gradient, statistics), HALFSTEP_NONFINITE);
        halfstep_record c = counters_of(t.o, 0);
        CHECK(!memcmp(before, t.weight, t.weight_bytes) && c.state_steps == 0 && halfstep_skipped_steps(t.o) == 2,
              "something changed, or the steps are not counted as skipped");
        uint64_t steps;
        MUST(end_round_begin(t.o, round));
        round[HSTEP_EXACT_LIMBS - 1] = -1;
        EXPECT(end_round_finish(t.o, round), HALFSTEP_NONFINITE);
        MUST(get_group_steps(t.o, 0, &steps));
        CHECK(steps == 0 && halfstep_gradient_norm(t.o) == 0, "the round ended all the same");
        EXPECT(one_step(&t), OK);
        free(before);
        free(statistics);
        one_close(&t);
    }
}

/* ---- Parts of tensors -------------------------------------------------------------------------------------------- */

enum { RANKS = 2, TENSORS = 3, MOST_SUMS = 8 };
static const struct {
    int64_t rows, columns;
} part_shapes[TENSORS] = {{6, 512}, {40, 3}, {8, 256}};

/* Ranks that hold parts of the same tensors, or one rank that holds all of them. */
struct ranks {
    int n;
    halfstep_optimizer *o[RANKS];
    float *weight[RANKS][TENSORS], *gradient[RANKS][TENSORS];
    int64_t first[RANKS][TENSORS][2], held[RANKS][TENSORS][2]; /* rows, columns */
};

static float *whole_values(int tensor, uint64_t seed)
{
    int64_t n = part_shapes[tensor].rows * part_shapes[tensor].columns;
    struct source s = {seed * 10 + (uint64_t)tensor};
    float *values = zeroed((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) values[i] = (float)next_normal(&s);
    return values;
}

static void scatter_values(const struct ranks *r, int tensor, const float *whole, int weights)
{
    for (int k = 0; k < r->n; k++)
        for (int64_t i = 0; i < r->held[k][tensor][0]; i++)
            for (int64_t j = 0; j < r->held[k][tensor][1]; j++)
                (weights ? r->weight : r->gradient)[k][tensor][i * r->held[k][tensor][1] + j] =
                    whole[(r->first[k][tensor][0] + i) * part_shapes[tensor].columns + r->first[k][tensor][1] + j];
}

/* Makes the ranks. Tensor 0 is cut by columns, tensor 1 by rows. Tensor 2 is on rank 0 alone; rank 1 has an empty
 * part. */
static void ranks_open(struct ranks *r, const char *recipe, int n)
{
    memset(r, 0, sizeof *r);
    r->n = n;
    for (int k = 0; k < n; k++) {
        r->o[k] = new_optimizer(recipe, 1, 5);
        MUST(halfstep_set_choice(r->o[k], 0, "decay", "decoupled"));
        for (int t = 0; t < TENSORS; t++) {
            char name[2] = {(char)('a' + t), 0};
            int64_t rows = part_shapes[t].rows, columns = part_shapes[t].columns;
            int64_t *first = r->first[k][t], *held = r->held[k][t];
            first[0] = n > 1 && t == 1 ? k * rows / 2 : 0;
            first[1] = n > 1 && t == 0 ? k * columns / 2 : 0;
            held[0] = n > 1 && t == 1 ? rows / 2 : t == 2 && k ? 0 : rows;
            held[1] = n > 1 && t == 0 ? columns / 2 : columns;
            ADD_TENSOR(r->o[k], .name = name, .ndim = 2, .may_be_empty = 1, .rows = rows, .row_length = columns,
                       .first_row = first[0], .n_rows = held[0], .first_column = first[1], .n_columns = held[1],
                       .gradient = "f32");
            r->weight[k][t] = zeroed((size_t)(held[0] * held[1]) * 4);
            r->gradient[k][t] = zeroed((size_t)(held[0] * held[1]) * 4);
        }
        MUST(halfstep_allocate_states(r->o[k]));
    }
    for (int t = 0; t < TENSORS; t++) {
        float *values = whole_values(t, 1);
        scatter_values(r, t, values, 1);
        free(values);
    }
}

static void ranks_close(struct ranks *r)
{
    for (int k = 0; k < r->n; k++) {
        halfstep_destroy(r->o[k]);
        for (int t = 0; t < TENSORS; t++) {
            free(r->weight[k][t]);
            free(r->gradient[k][t]);
        }
    }
}

/* Adds up statistics as all_reduce does. */
static void reduce(int64_t statistics[RANKS][4096], int n, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to && n > 1; i++)
        statistics[0][i] = statistics[1][i] = statistics[0][i] + statistics[1][i];
}

static int release_step(struct ranks *r, int tensor)
{
    static int64_t statistics[RANKS][4096];
    int result = OK;
    if (r->n == 1) return step_tensor(r->o[0], tensor, r->weight[0][tensor], r->gradient[0][tensor]);
    int64_t sums = tensor_norms_offset(r->o[0]), end = tensor_statistics_count(r->o[0], tensor);
    for (int k = 0; k < r->n; k++) MUST(step_tensor_begin(r->o[k], tensor, r->gradient[k][tensor], statistics[k]));
    reduce(statistics, r->n, 0, sums);
    for (int k = 0; k < r->n; k++)
        MUST(step_tensor_norms(r->o[k], tensor, r->weight[k][tensor], r->gradient[k][tensor], statistics[k]));
    reduce(statistics, r->n, sums, end);
    for (int k = 0; k < r->n; k++) {
        int found = step_tensor_finish(r->o[k], tensor, r->weight[k][tensor], r->gradient[k][tensor], statistics[k]);
        CHECK(!k || found == result, "the ranks do not agree: %d and %d", result, found);
        result = found;
    }
    return result;
}

static void finish_round(struct ranks *r)
{
    static int64_t statistics[RANKS][4096];
    if (r->n == 1) {
        MUST(end_round(r->o[0]));
        return;
    }
    for (int k = 0; k < r->n; k++) MUST(end_round_begin(r->o[k], statistics[k]));
    reduce(statistics, r->n, 0, round_statistics_count(r->o[0]));
    for (int k = 0; k < r->n; k++) MUST(end_round_finish(r->o[k], statistics[k]));
}

/* Checks that weights and states of the parts are those of the whole. */
static void compare_ranks(const struct ranks *parts, const struct ranks *whole, const char *recipe)
{
    for (int k = 0; k < parts->n; k++)
        for (int t = 0; t < TENSORS; t++) {
            const int64_t *first = parts->first[k][t], *held = parts->held[k][t];
            int64_t columns = part_shapes[t].columns;
            SIZED(halfstep_slot_info, info);
            for (int slot = 0; slot < 2 + HALFSTEP_MAX_STATES; slot++) {
                if (!stored_slot(whole->o[0], t, slot, &info)) continue;
                float *all = zeroed((size_t)(part_shapes[t].rows * columns) * 4),
                      *mine = zeroed((size_t)(held[0] * held[1]) * 4);
                MUST(halfstep_read_slot(whole->o[0], t, slot, slot ? NULL : whole->weight[0][t], 0, part_shapes[t].rows,
                                        all));
                MUST(halfstep_read_slot(parts->o[k], t, slot, slot ? NULL : parts->weight[k][t], 0, held[0], mine));
                for (int64_t i = 0; i < held[0] * held[1]; i++)
                    CHECK(to_bits(mine[i]) == to_bits(all[(first[0] + i / held[1]) * columns + first[1] + i % held[1]]),
                          "%s: rank %d, tensor %d, slot %d, element %d differs", recipe, k, t, slot, (int)i);
                free(all);
                free(mine);
            }
            halfstep_record a = counters_of(whole->o[0], t);
            halfstep_record b = counters_of(parts->o[k], t);
            CHECK(!memcmp(&a, &b, sizeof a), "%s: rank %d counts tensor %d otherwise", recipe, k, t);
        }
}

static void release_in_parts(const char *recipe, const char *clip, double clip_norm)
{
    struct ranks parts, whole, *both[2] = {&parts, &whole};
    ranks_open(&parts, recipe, RANKS);
    ranks_open(&whole, recipe, 1);
    for (int b = 0; b < 2; b++)
        for (int k = 0; k < both[b]->n; k++) {
            MUST(halfstep_set_choice(both[b]->o[k], ALL_GROUPS, "clip", clip));
            MUST(halfstep_set_hyper(both[b]->o[k], ALL_GROUPS, "clip_norm", clip_norm));
        }
    for (int round = 0; round < 4; round++) {
        for (int t = 0; t < TENSORS; t++) {
            float *values = whole_values(t, 100 + (uint64_t)round);
            /* The gradient is in the half of rank 1. Rank 0 must leave the tensor alone too. */
            int bad = round == 2 && t < 2;
            if (bad) values[part_shapes[t].rows * part_shapes[t].columns - 1] = NAN;
            for (int b = 0; b < 2; b++) {
                scatter_values(both[b], t, values, 0);
                EXPECT(release_step(both[b], t), bad ? HALFSTEP_NONFINITE : OK);
            }
            free(values);
        }
        for (int b = 0; b < 2; b++) finish_round(both[b]);
        for (int k = 0; k < parts.n; k++)
            CHECK(halfstep_gradient_norm(parts.o[k]) == halfstep_gradient_norm(whole.o[0]) &&
                      (clip_norm == 0 || halfstep_gradient_norm(whole.o[0]) > 1),
                  "%s, %s: the norm of round %d is %.17g, in parts %.17g", recipe, clip, round,
                  halfstep_gradient_norm(whole.o[0]), halfstep_gradient_norm(parts.o[k]));
    }
    compare_ranks(&parts, &whole, recipe);
    ranks_close(&parts);
    ranks_close(&whole);
}

static void test_parts(void)
{
    TEST("one call on parts is refused where their other parts have a say") {
        const struct {
            const char *rule, *scan;
            double clip;
            int step, micro, round; /* results */
        } cases[] = {
            {"adamw/f32", "scan", 0, UNSUPPORTED, UNSUPPORTED, OK},
            {"adamw/f32", "per-tensor", 0, UNSUPPORTED, UNSUPPORTED, OK},
            {"adamw/f32", "known-finite", 1, UNSUPPORTED, OK, UNSUPPORTED},
            {"lamb/f32", "known-finite", 0, UNSUPPORTED, OK, OK},
            {"adamw/f32", "known-finite", 0, OK, OK, OK},
        };
        for (size_t i = 0; i < COUNT(cases); i++) {
            struct ranks r;
            ranks_open(&r, cases[i].rule, RANKS);
            for (int k = 0; k < RANKS; k++) {
                void *const *weights = (void *const *)r.weight[k];
                const void *const *gradients = (const void *const *)r.gradient[k];
                MUST(halfstep_set_choice(r.o[k], ALL_GROUPS, "scan", cases[i].scan));
                MUST(halfstep_set_hyper(r.o[k], ALL_GROUPS, "clip_norm", cases[i].clip));
                EXPECT(halfstep_step(r.o[k], weights, gradients), cases[i].step);
                if (cases[i].step) NAMES(r.o[k], "'a'");
                EXPECT(step_tensor(r.o[k], 1, r.weight[k][1], r.gradient[k][1]), cases[i].step);
                EXPECT(accumulate_states(r.o[k], gradients), cases[i].micro);
                EXPECT(accumulate_states_tensor(r.o[k], 1, r.gradient[k][1]), cases[i].micro);
                EXPECT(end_round(r.o[k]), cases[i].round);
                /* The errors do not concern a part that nobody has a gradient for. */
                EXPECT(step_tensor(r.o[k], 1, r.weight[k][1], NULL), OK);
            }
            /* Tensors that this rank holds whole are stepped as always. */
            EXPECT(step_tensor(r.o[0], 2, r.weight[0][2], r.gradient[0][2]), OK);
            ranks_close(&r);
        }
    }
    TEST("released tensors in parts, by begin, norms and finish, have the bits of whole ones") {
        const char *const recipes[] = {"adamw/f32", "adamw/f32/int8",          "lion/f32/bf16-sr",
                                       "lamb/f32",  "stableadamw/f32/bf16-sr", "sgd/f32"};
        for (size_t i = 0; i < COUNT(recipes); i++) {
            release_in_parts(recipes[i], "delayed", 0);
            release_in_parts(recipes[i], "delayed", 3);
            release_in_parts(recipes[i], "per-tensor", 3);
        }
    }
    TEST("finishing a part of a two-pass rule without its norms is refused, and nothing changes") {
        struct ranks r;
        static int64_t statistics[4096];
        ranks_open(&r, "lamb/f32", RANKS);
        MUST(step_tensor_begin(r.o[1], 0, r.gradient[1][0], statistics));
        EXPECT(step_tensor_finish(r.o[1], 0, r.weight[1][0], r.gradient[1][0], statistics), ORDER);
        NAMES(r.o[1], "halfstep_run_norms");
        ranks_close(&r);
    }
    TEST("micro-steps in parts, by begin and finish, have the bits of whole ones") {
        struct ranks parts, whole;
        static int64_t statistics[RANKS][4096];
        ranks_open(&parts, "adamw/f32/int8", RANKS);
        ranks_open(&whole, "adamw/f32/int8", 1);
        for (int step = 0; step < 4; step++) {
            /* At step 2 a gradient of rank 1 is not finite. At step 3 tensors go one by one. */
            int wanted = step == 2 ? HALFSTEP_NONFINITE : OK;
            for (int t = 0; t < TENSORS; t++) {
                float *values = whole_values(t, 300 + (uint64_t)step);
                if (step == 2 && t == 0) values[part_shapes[t].columns - 1] = INFINITY;
                scatter_values(&parts, t, values, 0);
                scatter_values(&whole, t, values, 0);
                free(values);
            }
            for (int t = 0; t < TENSORS && step == 3; t++) {
                MUST(accumulate_states_tensor(whole.o[0], t, whole.gradient[0][t]));
                for (int k = 0; k < RANKS; k++)
                    MUST(accumulate_states_tensor_begin(parts.o[k], t, parts.gradient[k][t], statistics[k]));
                reduce(statistics, RANKS, 0, tensor_statistics_count(parts.o[0], t));
                for (int k = 0; k < RANKS; k++)
                    MUST(accumulate_states_tensor_finish(parts.o[k], t, parts.gradient[k][t], statistics[k]));
            }
            if (step == 3) continue;
            EXPECT(accumulate_states(whole.o[0], (const void *const *)whole.gradient[0]), wanted);
            for (int k = 0; k < RANKS; k++)
                MUST(accumulate_states_begin(parts.o[k], (const void *const *)parts.gradient[k], statistics[k]));
            reduce(statistics, RANKS, 0, statistics_count(parts.o[0]));
            for (int k = 0; k < RANKS; k++)
                EXPECT(accumulate_states_finish(parts.o[k], (const void *const *)parts.gradient[k], statistics[k]),
                       wanted);
        }
        compare_ranks(&parts, &whole, "adamw/f32/int8");
        ranks_close(&parts);
        ranks_close(&whole);
    }
}

/* ---- The caller's floating-point mode ---------------------------------------------------------------------------- */

/* Makes every public call that computes, and writes results to out. The bytes must be the same in any mode. Returns
 * their number. */
static size_t compute_all(unsigned char *out)
{
    static const char *const recipes[] = {"adamw/bf16-kahan/int8+bf16-sr",
                                          "schedulefree/bf16-ecc8/int4",
                                          "sgd/f16-ecc8/f16-sr",
                                          "lamb/f16/fp8",
                                          "adamw/f32/dyn8",
                                          "adamw/bf16-sr/fp8-lamb16",
                                          "adamw/f32/f32"};
    enum { ROWS = 16, COLUMNS = 256, N = ROWS * COLUMNS };
    static float values[N], read[N];
    size_t at = 0;
#define KEEP(data, bytes) (memcpy(out + at, data, bytes), at += (bytes))
    struct source s = {8};
    /* Inputs are made by integers, so that no mode affects them: from subnormals of each format to large numbers. */
    for (int i = 0; i < N; i++) {
        uint32_t bits = (uint32_t)next64(&s);
        uint32_t exponent = i % 7 == 0 ? 0 : i % 7 == 1 ? 100 : 80 + (bits >> 8) % 50;
        bits = (bits & 0x807fffff) | exponent << 23;
        memcpy(&values[i], &bits, 4);
    }
    for (size_t i = 0; i < COUNT(recipes); i++) {
        halfstep_optimizer *o = new_optimizer(recipes[i], 0, 0);
        MUST(halfstep_set_choice(o, ALL_GROUPS, "clip", "delayed"));
        MUST(halfstep_set_choice(o, 0, "schedule", "cosine"));
        MUST(halfstep_set_hyper(o, 0, "lr", 1e-3));
        MUST(halfstep_set_hyper(o, 0, "warmup_steps", 7));
        MUST(halfstep_set_hyper(o, 0, "total_steps", 1000));
        MUST(halfstep_set_hyper(o, ALL_GROUPS, "clip_norm", 0.7));
        ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = ROWS, .row_length = COLUMNS, .gradient = "f32");
        MUST(halfstep_allocate_states(o));
        halfstep_rule_info rule =
            rule_info(halfstep_rule_find(strncmp(recipes[i], "sched", 5) ? "adamw" : "schedulefree"));
        SIZED(halfstep_slot_info, info);
        char *weight = zeroed(N * 4), *sum = zeroed(N * 4);
        for (int slot = 0; slot < 2 + HALFSTEP_MAX_STATES; slot++) {
            if (!stored_slot(o, 0, slot, &info)) continue;
            int nonneg = slot > 1 && rule.state_role[slot - 2] == HALFSTEP_ROLE_NONNEG;
            for (int k = 0; k < N; k++) read[k] = from_bits(to_bits(values[k]) & (nonneg ? 0x7fffffff : 0xffffffff));
            MUST(halfstep_write_slot(o, 0, slot, slot ? NULL : weight, 0, ROWS, read));
            KEEP(slot ? info.code : weight, info.code_bytes);
            if (info.extra_bytes) KEEP(info.extra, info.extra_bytes);
            MUST(halfstep_read_slot(o, 0, slot, slot ? NULL : weight, 0, ROWS, read));
            KEEP(read, sizeof read);
        }
        halfstep_record c = {.struct_size = sizeof c, .state_steps = 16777217 + 2, .full_steps = 3, .writes = 9};
        float step;
        MUST(bind_step(o, 0, &step));
        MUST(set_counters(o, 0, &c));
        KEEP(&step, sizeof step);
        MUST(bind_step(o, 0, NULL));
        MUST(halfstep_read_average(o, 0, weight, 0, ROWS, read));
        KEEP(read, sizeof read);
        const char *const accumulators[] = {"f32", "bf16", "bf16-sr", "f16"};
        for (int a = 0; a < 4; a++) {
            memset(sum, 0, N * 4);
            MUST(halfstep_accumulate(o, 0, sum, accumulators[a], values, "f32", 1.0 / 3));
            MUST(halfstep_accumulate(o, 0, sum, accumulators[a], values, "f32", 0.1));
            KEEP(sum, N * (a ? 2 : 4));
        }
        double lr;
        for (uint64_t steps = 0; steps < 40; steps += 3) {
            MUST(set_group_steps(o, 0, steps));
            MUST(halfstep_current_lr(o, 0, &lr));
            KEEP(&lr, sizeof lr);
        }
        MUST(set_counters(o, 0, &(halfstep_record){.struct_size = sizeof c, .state_steps = 5, .full_steps = 5}));
        EXPECT(step_tensor(o, 0, weight, values), OK);
        MUST(end_round(o));
        lr = halfstep_gradient_norm(o);
        KEEP(&lr, sizeof lr);
        const void *gradients[1] = {values};
        void *weights[1] = {weight};
        EXPECT(halfstep_step(o, weights, gradients), OK);
        KEEP(weight, N * 2);
        for (int k = 0; k < rule.scalars; k++) {
            MUST(get_scalar(o, 0, rule.scalar_name[k], &lr));
            KEEP(&lr, sizeof lr);
        }
        free(weight);
        free(sum);
        halfstep_destroy(o);
    }
    double factor;
    for (int kind = 0; halfstep_choice_value("schedule", kind); kind++)
        for (uint64_t step = 0; step < 50; step += 7) {
            MUST(halfstep_schedule_factor(halfstep_choice_value("schedule", kind), step, 7, 43, 0.1, 0.8, -0.5,
                                          &factor));
            KEEP(&factor, sizeof factor);
        }
    uint16_t codes[N];
    static uint32_t words[N / 2];
    MUST(halfstep_random_words("mixer", 1, 2, 3, 0, 0, words, N / 2));
    MUST(halfstep_bf16_stochastic(values, codes, N, words));
    KEEP(codes, sizeof codes);
#undef KEEP
    return at;
}

static void test_mode(void)
{
    TEST("no public function computes in the caller's floating-point mode, nor changes it") {
        enum { ROOM = 8 << 20 };
        unsigned char *plain = zeroed(ROOM), *moded = zeroed(ROOM);
        size_t bytes = compute_all(plain);
        static const struct {
            const char *name;
            int mode;
        } modes[] = {{"upward", FE_UPWARD}, {"downward", FE_DOWNWARD}, {"toward zero", FE_TOWARDZERO}};
        for (int i = 0; i < 3; i++) {
            fesetround(modes[i].mode);
            size_t n = compute_all(moded);
            int left = fegetround();
            fesetround(FE_TONEAREST);
            size_t k = 0;
            while (k < bytes && plain[k] == moded[k]) k++;
            CHECK(n == bytes && k == bytes, "%s: byte %zu of %zu differs", modes[i].name, k, bytes);
            CHECK(left == modes[i].mode, "%s: the mode is %d afterwards", modes[i].name, left);
        }
        /* Sets FTZ and DAZ of x86, FZ of AArch64. */
        uint64_t flush = hstep_isa_find("neon") >= 0 && hstep_isa_available(hstep_isa_find("neon"))   ? 1u << 24
                         : hstep_isa_find("avx2") >= 0 && hstep_isa_available(hstep_isa_find("avx2")) ? 0x8040u
                                                                                                      : 0;
        if (flush) {
            struct hstep_fp saved = hstep_fp_enter();
            hstep_fp_leave((struct hstep_fp){saved.saved | flush});
            size_t n = compute_all(moded), k = 0;
            hstep_fp_leave(saved);
            while (k < bytes && plain[k] == moded[k]) k++;
            CHECK(n == bytes && k == bytes, "flushing subnormals: byte %zu of %zu differs", k, bytes);
        }
        free(plain);
        free(moded);
    }
}

/* ---- Constants of a step ----------------------------------------------------------------------------------------- */

static void test_constants(void)
{
    TEST("constants that come from the tensor itself are never another's") {
        for (int32_t row = 0; row < HSTEP_RULES; row++) {
            struct hstep_group group = {.recipe.rule = row};
            for (int i = 0; i < hstep_rule_hypers(row); i++) group.own[i] = hstep_rules[row].hyper[i].initial;
            const double norm[HSTEP_MAX_SUMS] = {3, 5};
            for (int pass = 0; pass < 2; pass++) {
                float k[2][HSTEP_MAX_SCALARS] = {{0}};
                int asked[2] = {0};
                for (int i = 0; i < 2; i++) {
                    /* Tensors that have nothing in common but group and count. */
                    double scalar[HSTEP_MAX_NAMED_SCALARS] = {0.001 + i, 0.002 * i, 0.5 - i};
                    struct hstep_own own = {.id = 12345 + 99 * (uint64_t)i,
                                            .rows = 7 + 90 * i,
                                            .row_length = 40 - 30 * i,
                                            .elements = i ? 970 : 280,
                                            .matrix = i,
                                            .scalar = scalar};
                    const struct hstep_shared shared = {group.own, 5};
                    struct hstep_prepare p = {.shared = &shared,
                                              .lr = 0.1,
                                              .decay = 0.01,
                                              .t = 5,
                                              .full = 5,
                                              .norm = pass ? norm : NULL,
                                              .own = &own,
                                              .own_was_asked = &asked[i]};
                    hstep_prepare_rule(&group, &p, k[i]);
                }
                CHECK(asked[0] == asked[1], "%s: looks at one tensor, not at the other", hstep_rules[row].name);
                CHECK(asked[0] || !memcmp(k[0], k[1], sizeof k[0]),
                      "%s: its constants differ by tensor, and nothing tells", hstep_rules[row].name);
            }
        }
    }
}

/* Returns the largest |average| / sqrt(n) that gradients can reach, given the average's share of each y: adan.h. */
static double worst_average(const double *share, int n, double beta3)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += share[i] * share[i] / ((1 - beta3) * pow(beta3, n - 1 - i));
    return sqrt(sum);
}

static void test_bounds(void)
{
    TEST("adan's bounds are of the worst gradients, and not far above") {
        enum { STEPS = 60 };
        static const double betas[][3] = {{0.98, 0.92, 0.99}, {0.9, 0.9, 0.999}, {0.5, 0.99, 0.95}, {0.9, 0, 0.999}};
        for (size_t row = 0; row < COUNT(betas); row++) {
            const double beta1 = betas[row][0], beta2 = betas[row][1], hyper[] = {beta1, beta2, betas[row][2], 0};
            double g[STEPS] = {0}, m[STEPS] = {0}, a[STEPS] = {0};
            for (int t = 1; t <= STEPS; t++) {
                struct hstep_prepare p = {.hyper = hyper, .t = (uint64_t)t, .full = (uint64_t)t};
                float k[HSTEP_MAX_SCALARS] = {0};
                adan_prepare(k, &p);
                for (int i = 0; i < t; i++) {
                    double before = g[i], y = i == t - 1;
                    g[i] = t == 1 ? y : (y + beta2 * before) / (1 + beta2);
                    m[i] = beta1 * m[i] + (1 - beta1) * g[i];
                    a[i] = beta2 * a[i] + (t == 1 ? 0 : (1 - beta2) * (g[i] - before));
                }
                double average = worst_average(m, t, hyper[2]) / (double)k[ADAN_BOUND];
                double difference = worst_average(a, t, hyper[2]) / (double)k[ADAN_BOUND_DIFFERENCE];
                CHECK(average < 1.000001 && average > 0.5, "row %d, update %d: m gets to %g of its bound", (int)row, t,
                      average);
                CHECK(difference < 1.000001 && (t == 1 || difference > 1.0 / 3),
                      "row %d, update %d: a gets to %g of its bound", (int)row, t, difference);
            }
        }
    }
}

/* ---- Values that no update leaves -------------------------------------------------------------------------------- */

static void test_values(void)
{
    TEST("counters beyond HALFSTEP_MAX_COUNT are refused, and one there is survived") {
        struct one t;
        SIZED(halfstep_record, now);
        one_new(&t, "ranger/f32", 2, 4, 64, "f32");
        one_fill(&t, WEIGHT, 1);
        one_fill(&t, GRADIENT, 1);
        for (int i = 0; i < 3; i++) {
            SIZED(halfstep_record, c);
            uint64_t *counts[3] = {&c.state_steps, &c.full_steps, &c.writes};
            static const char *const names[3] = {"state_steps", "full_steps", "writes"};
            *counts[i] = UINT64_MAX;
            EXPECT(set_counters(t.o, 0, &c), RANGE);
            CHECK(strstr(halfstep_error_detail(t.o), names[i]) && strstr(halfstep_error_detail(t.o), "'w'"), "'%s'",
                  halfstep_error_detail(t.o));
            now = counters_of(t.o, 0);
            CHECK(now.state_steps == 0 && now.full_steps == 0 && now.writes == 0, "a refused counter was taken");
            *counts[i] = (uint64_t)HALFSTEP_MAX_COUNT + 1;
            EXPECT(set_counters(t.o, 0, &c), RANGE);
        }
        EXPECT(set_group_steps(t.o, 0, UINT64_MAX), RANGE);
        EXPECT(set_skipped_steps(t.o, UINT64_MAX), RANGE);
        halfstep_record most = {.struct_size = sizeof most,
                                .state_steps = HALFSTEP_MAX_COUNT,
                                .full_steps = HALFSTEP_MAX_COUNT,
                                .writes = HALFSTEP_MAX_COUNT};
        MUST(set_counters(t.o, 0, &most));
        MUST(set_group_steps(t.o, 0, HALFSTEP_MAX_COUNT));
        EXPECT(one_step(&t), OK);
        EXPECT(one_step(&t), OK);
        CHECK(isfinite(one_mean(&t, WEIGHT)), "weights are not finite");
        one_close(&t);
    }
    TEST("scalars are bounded by what updates leave there") {
        for (int32_t row = 0; row < halfstep_rule_count(); row++) {
            halfstep_rule_info rule = rule_info(row);
            struct one t;
            if (!rule.scalars) continue;
            one_new(&t, rule.name, 2, 4, 64, "f32");
            one_fill(&t, WEIGHT, 1);
            one_fill(&t, GRADIENT, 1);
            for (int i = 0; i < rule.scalars; i++) {
                const double bad[] = {!strcmp(rule.scalar_name[i], "d_numerator") ? -1e301 : -1, NAN, INFINITY,
                                      !strcmp(rule.scalar_name[i], "accumulated_decay") ? 0x1p63 : 1e301};
                double value;
                for (int k = 0; k < 4; k++)
                    EXPECT_NAMED(t.o, set_scalar(t.o, 0, rule.scalar_name[i], bad[k]), RANGE, rule.scalar_name[i]);
                MUST(get_scalar(t.o, 0, rule.scalar_name[i], &value));
                CHECK(value == 0, "%s of %s was taken", rule.scalar_name[i], rule.name);
                EXPECT(set_scalar(t.o, 0, rule.scalar_name[i], 1), OK);
            }
            EXPECT(one_step(&t), OK);
            /* Counters that a step leaves can be set again. */
            for (int i = 0; i < rule.scalars; i++) {
                double value;
                MUST(get_scalar(t.o, 0, rule.scalar_name[i], &value));
                EXPECT(set_scalar(t.o, 0, rule.scalar_name[i], value), OK);
            }
            one_close(&t);
        }
    }
    TEST("a second moment of -0 is stored as +0, and one that is not a number is refused, in every format") {
        for (int32_t row = 0; row < halfstep_format_count(); row++) {
            const char *format = format_for(row, HALFSTEP_ROLE_NONNEG);
            if (!format) continue;
            struct one t, zero;
            const char *recipe = text_of("adamw/f32/f32+%s", format);
            one_open(&t, recipe, 2, 16, 256, "f32");
            one_open(&zero, recipe, 2, 16, 256, "f32");
            one_start(&t);
            one_start(&zero);
            for (int64_t i = 0; i < t.n; i++) t.room[i] = i % 3 ? 0.0f : 0.01f;
            one_write(&zero, STATE + 1, t.room);
            for (int64_t i = 0; i < t.n; i++) t.room[i] = i % 3 ? -0.0f : 0.01f;
            one_write(&t, STATE + 1, t.room);
            halfstep_slot_info a = slot_info(t.o, 0, STATE + 1);
            halfstep_slot_info b = slot_info(zero.o, 0, STATE + 1);
            CHECK(!memcmp(a.code, b.code, a.code_bytes) && (!a.extra_bytes || !memcmp(a.extra, b.extra, a.extra_bytes)),
                  "%s: -0 and +0 are stored differently", format);
            one_read(&t, STATE + 1, t.room);
            for (int64_t i = 0; i < t.n; i++) CHECK(!signbit(t.room[i]), "%s: element %d is negative", format, (int)i);
            const float bad[] = {NAN, INFINITY, -1, -0x1p-149f};
            for (int i = 0; i < 4; i++) {
                t.room[9] = bad[i];
                EXPECT_NAMED(t.o, halfstep_write_slot(t.o, 0, STATE + 1, NULL, 0, 16, t.room), RANGE, "element 9 ");
            }
            CHECK(!memcmp(a.code, b.code, a.code_bytes), "%s: a refused write wrote", format);
            one_close(&t);
            one_close(&zero);
        }
    }
}

/* ---- Bytes that no update leaves --------------------------------------------------------------------------------- */

/* Uses scales that are negative or NaN, and any codes, as a file may hold them. ASan proves that nothing else is read.
 * Elsewhere a look-up far outside of a table is likely to fault. */
static void test_bytes(void)
{
    TEST("any bytes in a bound state are safe on every instruction set") {
        const uint32_t scales[] = {0xbf800000, 0xff7fffff, 0x80000001, 0x7f800000,
                                   0xff800000, 0x7fc00000, 0x7f7fffff, 0x00000001};
        struct source s = {99};
        for (int isa = 0; isa < halfstep_isa_count(); isa++) {
            if (!halfstep_isa_available(isa)) continue;
            MUST(halfstep_set_isa(halfstep_isa_name(isa)));
            for (int32_t row = 0; row < halfstep_format_count(); row++) {
                const char *format = format_for(row, HALFSTEP_ROLE_SIGNED);
                struct one t;
                if (!format) continue;
                one_new(&t, text_of("%s/f32/%s", format_for(row, HALFSTEP_ROLE_NONNEG) ? "adamw" : "lion", format), 2,
                        16, 256, "f32");
                one_fill(&t, GRADIENT, 0.5f);
                for (size_t i = 0; i < COUNT(scales); i++) {
                    for (int slot = 2; slot < 4; slot++) {
                        SIZED(halfstep_slot_info, info);
                        if (halfstep_get_slot_info(t.o, 0, slot, &info) || info.format < 0) continue;
                        halfstep_format_info f = format_info(info.format);
                        for (uint64_t k = 0; k < info.code_bytes; k++) ((char *)info.code)[k] = (char)next64(&s);
                        for (uint64_t k = 0; k < info.extra_bytes; k++) ((char *)info.extra)[k] = (char)next64(&s);
                        for (uint64_t k = 0; f.scale_bytes >= 2 && k < info.extra_bytes; k += (uint64_t)f.scale_bytes)
                            memcpy((char *)info.extra + k, (const char *)&scales[i] + 4 - f.scale_bytes,
                                   (size_t)f.scale_bytes);
                    }
                    EXPECT(one_step(&t), OK);
                    one_read(&t, STATE, t.room);
                }
                one_close(&t);
            }
        }
        MUST(halfstep_set_isa(NULL));
    }
}

/* ---- Callers of other versions ----------------------------------------------------------------------------------- */

static void test_versions(void)
{
    TEST("a smaller struct_size means defaults, a larger one is taken while it says nothing") {
        struct {
            halfstep_options known;
            uint64_t unknown[3];
        } newer = {.known = {.struct_size = sizeof newer, .threads = 2, .seed = 77}};
        halfstep_optimizer *o;
        MUST(halfstep_create(&newer.known, &o));
        CHECK(get_seed(o) == 77, "the seed is lost");
        halfstep_destroy(o);
        newer.unknown[2] = 1;
        EXPECT(halfstep_create(&newer.known, &o), ARGUMENT);
        halfstep_options older = {
            .struct_size = offsetof(halfstep_options, device), .threads = 1, .seed = 99, .device = "beyond"};
        MUST(halfstep_create(&older, &o));
        CHECK(get_seed(o) == 99, "the seed is lost");
        /* 4 and 8 are sizes of a field and of a pointer, which a caller may have given in place of the structure's. */
        for (uint32_t size = 0; size < 12; size++) {
            halfstep_optimizer *other = NULL;
            older.struct_size = size;
            EXPECT(halfstep_create(&older, &other), ARGUMENT);
        }
        older.struct_size = UINT32_MAX - 3;
        halfstep_optimizer *other;
        EXPECT(halfstep_create(&older, &other), ARGUMENT);

        int32_t index;
        struct {
            halfstep_tensor known;
            void *unknown;
        } tensor = {
            .known = {
                .struct_size = sizeof tensor, .name = "w", .ndim = 2, .rows = 4, .row_length = 64, .gradient = "f32"}};
        MUST(halfstep_add_group(o, "adamw/f32", &index));
        EXPECT(halfstep_add_tensor(o, &tensor.known, &index), OK);
        tensor.unknown = &tensor;
        tensor.known.name = "v";
        EXPECT(halfstep_add_tensor(o, &tensor.known, &index), ARGUMENT);
        MUST(halfstep_allocate_states(o));

        halfstep_record c = {
            .struct_size = offsetof(halfstep_record, writes), .state_steps = 3, .full_steps = 2, .writes = 9};
        c.kind = HALFSTEP_RECORD_TENSOR;
        MUST(halfstep_set_record(o, &c));
        MUST(halfstep_get_record(o, &c));
        CHECK(c.writes == 9 && c.struct_size == offsetof(halfstep_record, writes),
              "what lies beyond struct_size was written");
        c.struct_size = sizeof c;
        c = counters_of(o, 0);
        CHECK(c.state_steps == 3 && c.full_steps == 2 && c.writes == 0, "the counters are not those set");
        halfstep_destroy(o);
    }
    TEST("information is filled in as far as the caller's structure goes, and zero beyond ours") {
        struct {
            halfstep_rule_info known;
            uint64_t unknown[2];
        } rule = {.known = {.struct_size = sizeof rule}, .unknown = {1, 2}};
        MUST(halfstep_get_rule_info(0, &rule.known));
        CHECK(rule.known.name && rule.known.label && !rule.unknown[0] && !rule.unknown[1],
              "not filled in, or not zeroed");
        halfstep_format_info format = {.struct_size = offsetof(halfstep_format_info, code_dtype), .geometry = -7};
        MUST(halfstep_get_format_info(0, &format));
        CHECK(format.name && !format.code_dtype && format.geometry == -7, "not cut at struct_size");
        halfstep_hyper_info hyper = {.struct_size = offsetof(halfstep_hyper_info, title)};
        MUST(halfstep_get_hyper_info(0, 0, &hyper));
        CHECK(hyper.name && !hyper.title && hyper.struct_size == offsetof(halfstep_hyper_info, title),
              "not cut at struct_size");
        struct one t;
        halfstep_slot_info slot = {.struct_size = offsetof(halfstep_slot_info, blocks_per_row), .blocks_per_row = -7};
        one_new(&t, "adamw/f32", 2, 4, 64, "f32");
        MUST(halfstep_get_slot_info(t.o, 0, 0, &slot));
        CHECK(slot.code_bytes == 1024 && slot.blocks_per_row == -7, "not cut at struct_size");
        slot.struct_size = 0;
        EXPECT(halfstep_get_slot_info(t.o, 0, 0, &slot), ARGUMENT);
        one_close(&t);
    }
}

/* ---- Threads that fail ------------------------------------------------------------------------------------------- */

struct failing {
    halfstep_optimizer *o;
    int tensor, wrong;
};

static void *fail_often(void *argument)
{
    struct failing *f = argument;
    char name[32];
    float gradient[64] = {NAN}, weight[64];
    snprintf(name, sizeof name, "'tensor number %d'", f->tensor);
    for (int i = 0; i < 20000 && !f->wrong; i++) {
        step_tensor(f->o, f->tensor, weight, gradient);
        f->wrong = !strstr(halfstep_error_detail(f->o), name);
    }
    return NULL;
}

static void test_threads(void)
{
    TEST_UNLESS_EMULATED("each thread that fails has a sentence of its own") {
        enum { THREADS = 3 };
        halfstep_optimizer *o, *other;
        pthread_t thread[THREADS];
        struct failing failing[THREADS];
        o = new_optimizer("adamw/f32", 1, 0);
        for (int i = 0; i < THREADS; i++) {
            char name[32];
            snprintf(name, sizeof name, "tensor number %d", i);
            ADD_TENSOR(o, .name = name, .ndim = 2, .rows = 1, .row_length = 64, .gradient = "f32");
        }
        MUST(halfstep_allocate_states(o));
        for (int i = 0; i < THREADS; i++) {
            failing[i] = (struct failing){o, i, 0};
            if (pthread_create(&thread[i], NULL, fail_often, &failing[i])) exit(1);
        }
        for (int i = 0; i < THREADS; i++) {
            pthread_join(thread[i], NULL);
            CHECK(!failing[i].wrong, "thread %d was told of another's error", i);
        }
        NAMES(o, "tensor number");
        EQUAL(halfstep_skipped_steps(o), THREADS * 20000);
        /* A handle at the same address is another handle. */
        halfstep_set_threads(o, -1);
        halfstep_destroy(o);
        MUST(halfstep_create(NULL, &other));
        CHECK(!*halfstep_error_detail(other), "a new handle says '%s'", halfstep_error_detail(other));
        halfstep_destroy(other);
    }
}

#if defined(__linux__)
/* Makes steps of each rule with several formats, and what else a thread may do with an optimizer. */
static void *use_stack(void *steps)
{
    static const char *const weights[] = {"f32", "bf16-kahan", "bf16-ecc8", "int8-ecc4"};
    static const char *const states[] = {"", "/int4", "/bf16-sr", "/dyn8"};
    for (int32_t rule = 0; rule < halfstep_rule_count(); rule++)
        for (size_t i = 0; i < COUNT(weights) * COUNT(states); i++) {
            const char *weight = weights[i / COUNT(states)], *state = states[i % COUNT(states)];
            halfstep_optimizer *o = new_optimizer("sgd/f32", 1, 0);
            int32_t group;
            struct one t;
            const char *recipe = text_of("%s/%s%s", rule_info(rule).name, weight, state);
            const int known = halfstep_add_group(o, recipe, &group) == OK && !rule_info(rule).raw_gradient;
            halfstep_destroy(o);
            if (!known) continue; /* the rule takes other formats */
            one_open(&t, recipe, 2, 70, 64, "f32");
            MUST(halfstep_set_hyper(t.o, ALL_GROUPS, "clip_norm", 1));
            one_start(&t);
            one_fill(&t, GRADIENT, 0.125f);
            one_steps(&t, 2);
            one_read(&t, WEIGHT, t.room);
            MUST(halfstep_accumulate(t.o, 0, t.room, "bf16-sr", t.gradient, "f32", 0.5));
            one_close(&t);
            ++*(int *)steps;
        }
    return NULL;
}
#endif

static void test_stack(void)
{
#if defined(__linux__)
    TEST("a call needs no more stack than docs/c.md promises") {
        enum { ROOM = 4 << 20, PROMISED = 128 << 10 };
        pthread_attr_t attributes;
        pthread_t thread;
        int steps = 0;
        size_t untouched = 0;
        unsigned char *stack = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (stack == MAP_FAILED) exit(1);
        memset(stack, 0xa5, ROOM);
        if (pthread_attr_init(&attributes) || pthread_attr_setstack(&attributes, stack, ROOM) ||
            pthread_create(&thread, &attributes, use_stack, &steps))
            exit(1);
        pthread_join(thread, NULL);
        pthread_attr_destroy(&attributes);
        while (untouched < ROOM && stack[untouched] == 0xa5) untouched++;
        CHECK(steps > 100, "only %d recipes were tried", steps);
        const size_t used = ROOM - untouched;
#if defined(__OPTIMIZE__) /* Frames are larger without optimization, and with checks in between. */
        CHECK(TEST_SANITIZED || used <= PROMISED, "%zu bytes of stack were used, more than %d", used, PROMISED);
#else
        CHECK(used < ROOM, "%zu bytes of stack were used", used);
#endif
        munmap(stack, ROOM);
    }
#endif
}

/* ---- Accumulation, and the choice of the instruction set --------------------------------------------------------- */

#if defined(__linux__)
static int readings;

/* Takes the place of the C library's function. */
char *getenv(const char *name)
{
    const size_t length = strlen(name);
    readings++;
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, length) && (*entry)[length] == '=') return *entry + length + 1;
    return NULL;
}
#endif

static void test_choice(void)
{
#if defined(__linux__)
    TEST("a malformed variable is refused when an optimizer is made") {
        static const char numbers[] = "known: whole numbers from 0 to 1024", bits[] = "known: 0, 1";
        static const struct {
            const char *name, *value, *known; /* known: what the error lists, or NULL for a good value */
        } cases[] = {{"HALFSTEP_ISA", "nonsense", "known: scalar"},
                     {"HALFSTEP_ISA", "", NULL},
                     {"HALFSTEP_ISA", "scalar", NULL},
                     {"HALFSTEP_THREADS", "3x", numbers},
                     {"HALFSTEP_THREADS", "-2", numbers},
                     {"HALFSTEP_THREADS", "1025", numbers},
                     {"HALFSTEP_THREADS", " 1024 ", NULL},
                     {"HALFSTEP_PIN", "yes", bits},
                     {"HALFSTEP_PIN", "0,", bits},
                     {"HALFSTEP_PIN", "1", NULL},
                     {"HALFSTEP_DEVICE_CHECK", "maybe", "known: always, once, never"}};
        for (size_t i = 0; i < COUNT(cases); i++) {
            /* The choice of an instruction set is made once in a process. */
            fflush(stdout);
            pid_t child = fork();
            if (!child) {
                halfstep_optimizer *o;
                char begin[64];
                const char *known = cases[i].known;
                setenv(cases[i].name, cases[i].value, 1);
                const int error = halfstep_create(NULL, &o);
                if (!known) test_leave(error != HALFSTEP_OK);
                snprintf(begin, sizeof begin, "%s is '%s'; ", cases[i].name, cases[i].value);
                const char *text = halfstep_error_detail(NULL);
                int wrong = error != HALFSTEP_ERROR_NAME || strncmp(text, begin, strlen(begin)) || !strstr(text, known);
                unsetenv(cases[i].name);
                test_leave(wrong || halfstep_create(NULL, &o) != HALFSTEP_OK);
            }
            int status = test_child_status(child);
            CHECK(status == 0, "%s='%s': status %d", cases[i].name, cases[i].value, status);
        }
    }
    TEST("a step reads no environment variable") {
        float weight[64] = {0}, gradient[64] = {0};
        void *weights[1] = {weight};
        const void *gradients[1] = {gradient};
        halfstep_optimizer *o = new_optimizer("adamw/f32", 0, 0);
        ADD_TENSOR(o, .name = "w", .ndim = 2, .rows = 1, .row_length = 64, .gradient = "f32");
        MUST(halfstep_allocate_states(o));
        readings = 0;
        MUST(halfstep_step(o, weights, gradients));
        MUST(halfstep_step(o, weights, gradients));
        EQUAL(readings, 0);
        halfstep_destroy(o);
    }
#endif
}

static void test_accumulation(void)
{
    TEST("accumulating does not settle the handle") {
        const int64_t shapes[][2] = {{5, 7}, {3, 40000}, {70000, 1}, {4, 96}};
        for (int i = 0; i < 4; i++) {
            struct one early, late;
            float *sum[2];
            int32_t index;
            struct one *both[2] = {&early, &late};
            for (int b = 0; b < 2; b++) {
                one_open(both[b], "adamw/bf16-sr/int8", shapes[i][1] == 1 ? 1 : 2, shapes[i][0], shapes[i][1], "f32");
                ADD_TENSOR(both[b]->o, .name = "w", .ndim = both[b]->ndim, .rows = shapes[i][0],
                           .row_length = shapes[i][1], .gradient = "f32");
                if (b) MUST(halfstep_allocate_states(both[b]->o));
                both[b]->gradient = zeroed((size_t)both[b]->n * 4);
                struct source s = {3};
                for (int64_t k = 0; k < both[b]->n; k++) ((float *)both[b]->gradient)[k] = (float)next_normal(&s);
                sum[b] = zeroed((size_t)both[b]->n * 2);
                for (int k = 0; k < 2; k++)
                    MUST(halfstep_accumulate(both[b]->o, 0, sum[b], "bf16-sr", both[b]->gradient, "f32", 0.3));
            }
            CHECK(!memcmp(sum[0], sum[1], (size_t)early.n * 2), "%d x %d: other sums", (int)shapes[i][0],
                  (int)shapes[i][1]);
            halfstep_tensor more = {
                .struct_size = sizeof more, .name = "more", .ndim = 2, .rows = 4, .row_length = 64, .gradient = "f32"};
            EXPECT(halfstep_add_tensor(early.o, &more, &index), OK);
            EXPECT(halfstep_add_tensor(late.o, &more, &index), ORDER);
            MUST(halfstep_allocate_states(early.o));
            for (int b = 0; b < 2; b++) {
                free(sum[b]);
                one_close(both[b]);
            }
        }
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    /* Runs first, because its children must make the choice. */
    test_choice();
    test_sums_without_end();
    test_parts();
    test_mode();
    test_constants();
    test_bounds();
    test_values();
    test_bytes();
    test_versions();
    test_threads();
    test_stack();
    test_accumulation();
    return test_done();
}
