/* Times muon's transformation of a matrix on one thread, in turns with oneDNN's products of 1024^3.
 *
 *   cc -O2 -Isrc -Iinclude lab/products.c build/libhalfstep.a -o products -ldnnl -lm -lpthread
 *   OMP_NUM_THREADS=1 taskset -c 1 ./products [ROWS [COLUMNS [ROUNDS]]]      1024 1024 9
 *
 * The clock is that of the process's processor time, because machines are shared. A line has the best and the median of
 * each form's GFLOP/s, counted as `halfstep bench` counts: all products of the standard form, in full. `part` is the
 * median ratio to oneDNN in the same round. */
#define _POSIX_C_SOURCE 199309L
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/host/host.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"

enum { STANDARD, GRAM, ONEDNN, TIMED, SIDE = 1024, STEPS = 5, MOST_ROUNDS = 99 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float *floats(size_t n)
{
    float *x = aligned_alloc(64, (n * sizeof *x + 63) / 64 * 64);
    if (!x) exit(1);
    for (size_t i = 0; i < n; i++) x[i] = (float)(rand() / (double)RAND_MAX - 0.5);
    return x;
}

int main(int argc, char **argv)
{
    const int64_t rows = argc > 1 ? atoi(argv[1]) : SIDE, columns = argc > 2 ? atoi(argv[2]) : rows;
    const int rounds = argc > 3 ? atoi(argv[3]) : 9;
    if (rows < 1 || columns < 1 || rows > 16384 || columns > 65536 || rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "products: ROWS and COLUMNS must be from 1 to 16384 and 65536, ROUNDS from 1 to %d\n",
                MOST_ROUNDS);
        return 2;
    }
    const size_t n = (size_t)(rows * columns);
    const struct hstep_context context = {.kernels = hstep_isa_kernels(hstep_isa_best()), .threads = 1};
    const double least = (double)(rows < columns ? rows : columns), most = (double)n / least,
                 of_form = STEPS * (4 * least * least * most + 2 * least * least * least),
                 flops[TIMED] = {of_form, of_form, 2.0 * SIDE * SIDE * SIDE};
    float *u = floats(n), *start = floats(n), *work = floats(hstep_newton_schulz_workspace(rows, columns)),
          *a = floats(SIDE * SIDE), *b = floats(SIDE * SIDE), *c = floats(SIDE * SIDE);
    static double rate[TIMED][MOST_ROUNDS], part[TIMED][MOST_ROUNDS];
    for (int round = -1; round < rounds; round++)
        for (int i = 0; i < TIMED; i++) {
            const float k[newton_schulz_constants] = {
                [newton_schulz_a] = 3.4445f,   [newton_schulz_b] = -4.775f, [newton_schulz_c] = 2.0315f,
                [newton_schulz_steps] = STEPS, [newton_schulz_eps] = 1e-7f, [newton_schulz_form] = (float)(i == GRAM)};
            memcpy(u, start, n * sizeof *u);
            const double begun = now();
            if (i != ONEDNN) hstep_newton_schulz(&context, u, rows, columns, k, work);
            else if (dnnl_sgemm('N', 'N', SIDE, SIDE, SIDE, 1, a, SIDE, b, SIDE, 0, c, SIDE)) return 1;
            if (round >= 0) rate[i][round] = 1e-9 * flops[i] / (now() - begun);
        }
    for (int i = 0; i < TIMED; i++)
        for (int round = 0; round < rounds; round++) part[i][round] = rate[i][round] / rate[ONEDNN][round];
    for (int i = 0; i < TIMED; i++) {
        static const char *const names[TIMED] = {"standard", "gram", "oneDNN"};
        qsort(rate[i], (size_t)rounds, sizeof(double), by_size);
        qsort(part[i], (size_t)rounds, sizeof(double), by_size);
        printf("%-9s %6.1f best %6.1f median, part %.2f\n", names[i], rate[i][rounds - 1], rate[i][rounds / 2],
               part[i][rounds / 2]);
    }
    return 0;
}
