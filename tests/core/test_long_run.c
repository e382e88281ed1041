/* Many steps: no memory is gained, and what is stored stays within its bound of exact arithmetic.
 *
 *   test_long_run [--short | STEPS]     (30000, fewer, or for example 1000000)
 *
 * SGD with a constant gradient per element moves a weight along a line that exact arithmetic knows. A format that loses
 * small updates stays behind: plain BF16 does, which shows that the check can fail. */
#include <math.h>
#include <stdint.h>

#include "halfstep.h"
#include "test.h"

enum { ELEMENTS = 4096 };

static double exact[ELEMENTS];
static float gradient[ELEMENTS], plain[ELEMENTS];

/* Returns the pages in memory. 0 under a sanitizer, whose shadow and quarantine would be counted with them. */
static long resident(void)
{
    long size = 0, pages = 0;
    if (TEST_SANITIZED) return 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%ld %ld", &size, &pages) != 2) pages = 0;
    if (file) fclose(file);
    return pages;
}

/* Makes so many steps. Writes the sum of the signed errors of all elements, and the root of the sum of their
 * squares. */
static int run(const char *recipe, long steps, double *sum, double *norm, long *grown)
{
    halfstep_optimizer *optimizer;
    halfstep_options options = {.struct_size = sizeof options, .threads = 1, .seed = 11};
    halfstep_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "w",
                              .ndim = 2,
                              .rows = 16,
                              .row_length = ELEMENTS / 16,
                              .gradient = "f32"};
    int32_t index;
    static _Alignas(64) char weight[4 * ELEMENTS];
    void *weights[1] = {weight};
    const void *gradients[1] = {gradient};
    const double lr = 0x1p-20;
    if (halfstep_create(&options, &optimizer)) return -1;
    int code = halfstep_add_group(optimizer, recipe, &tensor.group);
    if (!code) code = halfstep_set_hyper(optimizer, tensor.group, "lr", lr);
    if (!code) code = halfstep_add_tensor(optimizer, &tensor, &index);
    if (!code) code = halfstep_allocate_states(optimizer);
    memset(weight, 0, sizeof weight);
    for (int i = 0; i < ELEMENTS; i++) plain[i] = 1.0f + (float)(i % 64) / 64.0f;
    if (!code) code = halfstep_write_slot(optimizer, 0, HALFSTEP_SLOT_WEIGHT, weight, 0, 16, plain);
    for (int i = 0; i < ELEMENTS; i++) {
        gradient[i] = (float)(i % 17 - 8) / 16.0f;
        exact[i] = (double)plain[i] - lr * (double)gradient[i] * (double)steps;
    }
    long before = 0;
    for (long step = 0; !code && step < steps; step++) {
        if (step == steps / 10) before = resident();
        code = halfstep_step(optimizer, weights, gradients);
    }
    *grown = resident() - before;
    if (!code) code = halfstep_read_slot(optimizer, 0, HALFSTEP_SLOT_WEIGHT, weight, 0, 16, plain);
    *sum = *norm = 0;
    for (int i = 0; i < ELEMENTS; i++) {
        double error = (double)plain[i] - exact[i];
        *sum += error;
        *norm += error * error;
    }
    *norm = sqrt(*norm);
    halfstep_destroy(optimizer);
    return code;
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    long given = atol(test_filter), steps = given > 0 ? given : BY_LENGTH(3000, 30000, 30000);
    if (given) test_filter = "";
    /* Weights up to 2: an update is at most u = 2^-21, an ulp of fp32 2^-23, of BF16 2^-7, of an 8-bit error code
     * 2^-15. The new weight is computed in fp32, which errs by half an ulp at most, always to one side at worst. A
     * stochastic rounding errs by at most an ulp with probability u / ulp: variance u ulp a step, without bias. */
    const double n = (double)steps, root = sqrt((double)ELEMENTS), u = 0x1p-21;
    static const struct {
        const char *recipe;
        double stochastic; /* ulp of what is rounded so, or 0 */
    } cases[] = {{"sgd/f32", 0},
                 {"sgd/bf16-ecc16", 0},
                 {"sgd/bf16-sr", 0x1p-7},
                 {"sgd/bf16-ecc8", 0x1p-15},
                 {"sgd/bf16-kahan", 0x1p-15},
                 {"sgd/f16-ecc16", 0},
                 {"sgd/f16-sr", 0x1p-10}};
    TEST("steps without growth of memory or drift") {
        for (size_t i = 0; i < COUNT(cases); i++) {
            double sum, norm;
            long grown;
            int code = run(cases[i].recipe, steps, &sum, &norm, &grown);
            CHECK(!code, "%s: %s", cases[i].recipe, halfstep_strerror(code));
            /* Six deviations, and one rounding. */
            double ulp = cases[i].stochastic, sigma = sqrt(n * u * ulp);
            double bound = root * (n * 0x1p-24 + 2 * sigma + ulp);
            CHECK(norm <= bound, "%s: norm of the error %g, bound %g", cases[i].recipe, norm, bound);
            if (ulp > 0)
                CHECK(fabs(sum) <= 6 * root * sigma + ELEMENTS * (n * 0x1p-24 + ulp / 64),
                      "%s: sum of the errors %g, bound %g", cases[i].recipe, sum,
                      6 * root * sigma + ELEMENTS * (n * 0x1p-24 + ulp / 64));
            CHECK(grown <= 64, "%s: %ld pages more", cases[i].recipe, grown);
            printf("     %s: %ld steps, norm of the error %.3g (bound %.3g), %ld pages more\n", cases[i].recipe, steps,
                   norm, bound, grown);
        }
    }
    TEST("updates that a format loses are seen as drift") {
        double sum, norm;
        long grown;
        CHECK(!run("sgd/bf16", steps, &sum, &norm, &grown), "no run");
        double moved = 0;
        for (int i = 0; i < ELEMENTS; i++) moved += pow(u * 2 * (double)gradient[i] * n, 2);
        CHECK(norm > 0.2 * sqrt(moved), "plain BF16 errs by %g of %g", norm, sqrt(moved));
    }
    return test_done();
}
