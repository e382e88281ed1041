/* Exact sums, deterministic mathematics, schedules and the thread pool. Over 500 lines, because each of the four is too
 * small for a test program of its own and brings its own slow reference. */
#define _GNU_SOURCE
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <time.h>

#ifndef _WIN32
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>
#endif
#include <stdatomic.h>

#include "base/detmath.h"
#include "base/exact.h"
#include "base/lock.h"
#include "base/rng.h"
#include "base/schedule.h"
#include "device/host/threads.h"
#include "test.h"

/* One test starts threads in the child of a process with threads. TSan refuses that unless it is told otherwise. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "die_after_fork=0"; }

static uint64_t random_state = 1;
static uint64_t random64(void)
{
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
static double random_unit(void) { return (double)(random64() >> 11) * 0x1p-53; }

/* Returns a finite double of any exponent, subnormals included. */
static double random_double(void)
{
    for (;;) {
        double x = hstep_from_bits64(random64());
        if (isfinite(x)) return x;
    }
}

/* ---- Exact sums: an independent reference that adds bit by bit --------------------------------------------------- */

enum { BIG_BITS = 2200 };
/* An exact number as sign and magnitude, one bit per byte, bit 0 = 2^-1074. It is slow and obvious. */
struct big {
    int negative;
    unsigned char bit[BIG_BITS];
};

static int big_compare(const struct big *a, const struct big *b)
{
    for (int k = BIG_BITS - 1; k >= 0; k--)
        if (a->bit[k] != b->bit[k]) return a->bit[k] < b->bit[k] ? -1 : 1;
    return 0;
}

static void big_add(struct big *a, double x)
{
    static struct big b;
    int exponent;
    memset(&b, 0, sizeof b);
    if (x == 0) return;
    b.negative = x < 0;
    double m = frexp(fabs(x), &exponent);
    uint64_t mantissa = (uint64_t)ldexp(m, 53);
    for (int k = 0; k < 53; k++)
        if (mantissa >> k & 1) b.bit[exponent - 53 + 1074 + k] = 1;
    if (a->negative == b.negative) {
        int carry = 0;
        for (int k = 0; k < BIG_BITS; k++) {
            int sum = a->bit[k] + b.bit[k] + carry;
            a->bit[k] = sum & 1;
            carry = sum >> 1;
        }
        return;
    }
    if (big_compare(a, &b) < 0) {
        struct big swap = *a;
        *a = b;
        b = swap;
    }
    int borrow = 0;
    for (int k = 0; k < BIG_BITS; k++) {
        int difference = a->bit[k] - b.bit[k] - borrow;
        a->bit[k] = difference & 1;
        borrow = difference < 0;
    }
}

static double big_round(const struct big *a)
{
    int top = BIG_BITS - 1;
    while (top >= 0 && !a->bit[top]) top--;
    if (top < 0) return 0;
    int lowest = top - 52 > 0 ? top - 52 : 0;
    uint64_t mantissa = 0;
    for (int k = top; k >= lowest; k--) mantissa = mantissa << 1 | a->bit[k];
    if (lowest > 0 && a->bit[lowest - 1]) {
        int rest = 0;
        for (int k = 0; k < lowest - 1; k++) rest |= a->bit[k];
        if (rest || (mantissa & 1)) mantissa++;
    }
    double value = ldexp((double)mantissa, lowest - 1074);
    return a->negative ? -value : value;
}

static int same(double a, double b) { return hstep_bits64(a) == hstep_bits64(b); }

static void test_exact(void)
{
    enum { MANY = 400 };
    TEST("exact: random sums in any order, split and merged, equal the reference") {
        for (int round = 0; round < 300; round++) {
            static double x[MANY];
            static struct big reference;
            int n = 1 + (int)(random64() % MANY), kind = round % 6;
            memset(&reference, 0, sizeof reference);
            for (int j = 0; j < n; j++) {
                double u = random_unit() - 0.5;
                switch (kind) {
                case 0: x[j] = random_double(); break;
                case 1: x[j] = u; break;
                case 2: x[j] = hstep_from_bits64(random64() & 0x800FFFFFFFFFFFFFu); break;
                case 3: x[j] = j & 1 ? -x[j - 1] : random_double(); break;
                case 4: x[j] = ldexp(u, (int)(random64() % 120) - 60); break;
                default: x[j] = ldexp(u, 1000 + (int)(random64() % 24)); break;
                }
                big_add(&reference, x[j]);
            }
            double expected = big_round(&reference);
            for (int order = 0; order < 4; order++) {
                int64_t part[3][HSTEP_EXACT_LIMBS] = {{0}}, total[HSTEP_EXACT_LIMBS] = {0};
                for (int j = n - 1; j > 0; j--) {
                    int other = (int)(random64() % (uint64_t)(j + 1));
                    double swap = x[j];
                    x[j] = x[other];
                    x[other] = swap;
                }
                for (int j = 0; j < n; j++) hstep_exact_add(part[random64() % 3], x[j]);
                if (order & 1) hstep_exact_normalize(part[order % 3]);
                for (int k = 0; k < 3; k++) hstep_exact_merge(total, part[(k + order) % 3]);
                if (order & 2) hstep_exact_normalize(total);
                double value = hstep_exact_round(total);
                CHECK(same(value, expected), "round %d order %d: %a, expected %a", round, order, value, expected);
            }
        }
    }
    TEST("exact: one value comes back bit for bit") {
        for (int j = 0; j < 200000; j++) {
            double x = j < 4096 ? hstep_from_bits64((uint64_t)(j >> 1) << 52 | (j & 1 ? 0xFFFFFFFFFFFFFu : 0))
                                : random_double();
            if (!isfinite(x) || x == 0) continue;
            int64_t a[HSTEP_EXACT_LIMBS] = {0};
            hstep_exact_add(a, x);
            double value = hstep_exact_round(a);
            CHECK(same(value, x), "%a came back as %a", x, value);
            hstep_exact_add(a, -x);
            CHECK(same(hstep_exact_round(a), 0.0), "%a - itself = %a", x, hstep_exact_round(a));
        }
    }
    TEST("exact: ties to even, overflow, cancellation") {
        static const struct {
            double term[4], sum;
        } cases[] = {
            {{1, 0x1p-53, 0, 0}, 1},
            {{1, 0x1p-53, 0x1p-1074, 0}, 0x1.0000000000001p0},
            {{1, 0x1p-53, -0x1p-1074, 0}, 1},
            {{0x1.0000000000001p0, 0x1p-53, 0, 0}, 0x1.0000000000002p0},
            {{0x1.fffffffffffffp0, 0x1p-53, 0, 0}, 2},
            {{-0x1.0000000000001p0, -0x1p-53, 0, 0}, -0x1.0000000000002p0},
            {{DBL_MAX, 0x1p969, 0, 0}, DBL_MAX},
            {{DBL_MAX, 0x1p970, 0, 0}, INFINITY},
            {{-DBL_MAX, -DBL_MAX, -DBL_MAX, 0}, -INFINITY},
            {{DBL_MAX, DBL_MAX, -DBL_MAX, -DBL_MAX}, 0},
            {{DBL_MAX, 0x1p-1074, -DBL_MAX, 0}, 0x1p-1074},
            {{-0x1p-1074, 0, 0, 0}, -0x1p-1074},
            {{0x1p-1022, -0x1p-1074, 0, 0}, 0x0.fffffffffffffp-1022},
            {{0x1p32, -1, 0, 0}, 0x1.fffffffep31},
            {{-0.0, -0.0, 0, 0}, 0},
        };
        for (size_t k = 0; k < COUNT(cases); k++) {
            int64_t a[HSTEP_EXACT_LIMBS] = {0};
            for (int j = 0; j < 4; j++) hstep_exact_add(a, cases[k].term[j]);
            double value = hstep_exact_round(a);
            CHECK(same(value, cases[k].sum), "case %d: %a, expected %a", (int)k, value, cases[k].sum);
        }
    }
    TEST("exact: headroom of 2^30 additions, and normal form is unique") {
        int64_t a[HSTEP_EXACT_LIMBS] = {0}, b[HSTEP_EXACT_LIMBS] = {0};
        double x = -0x1.fffffffffffffp3;
        hstep_exact_add(a, x);
        /* Sums 2^30 copies of one value by doubling. A merge adds limbs as additions do. */
        for (int k = 0; k < 30; k++) hstep_exact_merge(a, a);
        CHECK(same(hstep_exact_round(a), x * 0x1p30), "2^30 times %a gave %a", x, hstep_exact_round(a));
        hstep_exact_add(b, x * 0x1p31);
        hstep_exact_add(b, -x * 0x1p30);
        hstep_exact_normalize(a);
        hstep_exact_normalize(b);
        CHECK(memcmp(a, b, sizeof a) == 0, "equal sums have different limbs");
        for (int k = 0; k < HSTEP_EXACT_LIMBS - 1; k++)
            CHECK(a[k] >= 0 && a[k] < (int64_t)1 << 32, "limb %d is %lld", k, (long long)a[k]);
    }
}

/* ---- Deterministic mathematics, against long double (64-bit mantissa) -------------------------------------------- */

/* Returns the distance in units of the last place of the exact result. */
static double ulps(double value, long double exact)
{
    double rounded = (double)exact;
    if (!isfinite(rounded) || !isfinite(value)) return same(value, rounded) ? 0 : 1e300;
    int exponent;
    frexp(rounded, &exponent);
    if (exponent < -1021) exponent = -1021;
    return (double)(fabsl((long double)value - exact) / ldexpl(1, exponent - 53));
}

static void test_math(void)
{
    double worst, at;
    enum { POINTS = 400000 };
    TEST("detmath: log within 0.51 ulp") {
        worst = at = 0;
        for (int j = 0; j < POINTS; j++) {
            double x = j % 3 == 0   ? fabs(random_double())
                       : j % 3 == 1 ? 1 + ldexp(random_unit() - 0.5, -(int)(random64() % 52))
                                    : random_unit() * 8;
            if (x == 0) continue;
            double u = ulps(hstep_log(x), logl(x));
            if (u > worst) worst = u, at = x;
        }
        CHECK(worst <= 0.51, "worst %g ulp at %a", worst, at);
        CHECK(same(hstep_log(1.0), 0.0), "log 1 = %a", hstep_log(1.0));
    }
    TEST("detmath: exp within 1 ulp, 2 where subnormal") {
        worst = at = 0;
        for (int j = 0; j < POINTS; j++) {
            double x = j & 1 ? (random_unit() - 0.5) * 1420 : ldexp(random_unit() - 0.5, -(int)(random64() % 60));
            double u = ulps(hstep_exp(x), expl(x));
            if (x > 709.78) continue;
            if (u > worst) worst = u, at = x;
        }
        CHECK(worst <= 1, "worst %g ulp at %a", worst, at);
        worst = at = 0;
        for (int j = 0; j < POINTS / 8; j++) {
            double x = -708 - random_unit() * 38, u = ulps(hstep_exp(x), expl(x));
            if (u > worst) worst = u, at = x;
        }
        CHECK(worst <= 2, "worst subnormal %g ulp at %a", worst, at);
        CHECK(same(hstep_exp(0.0), 1.0), "exp 0 = %a", hstep_exp(0.0));
        CHECK(same(hstep_exp(-0.0), 1.0), "exp -0 = %a", hstep_exp(-0.0));
        CHECK(hstep_exp(1e300) == INFINITY && hstep_exp(INFINITY) == INFINITY, "exp does not overflow to infinity");
        CHECK(same(hstep_exp(-1e300), 0.0) && same(hstep_exp(-INFINITY), 0.0), "exp does not underflow to 0");
        CHECK(isnan(hstep_exp(NAN)), "exp NaN = %a", hstep_exp(NAN));
        CHECK(hstep_exp(709.7827128933840) <= DBL_MAX, "exp near its upper end = %a", hstep_exp(709.7827128933840));
    }
    TEST("detmath: pow within 2 ulp") {
        worst = at = 0;
        double at_power = 0;
        for (int j = 0; j < POINTS; j++) {
            double x = j % 3 == 0   ? fabs(random_double())
                       : j % 3 == 1 ? 1 + ldexp(random_unit() - 0.5, -(int)(random64() % 40))
                                    : random_unit() * 1e5;
            if (x == 0) continue;
            double limit = 700 / fabs(log(x) + (x == 1)),
                   y = (2 * random_unit() - 1) * (j & 1 ? limit : fmin(limit, 3));
            if (!isfinite(y)) continue;
            /* powl itself loses bits for large exponents. It is asked only where 64 bits leave enough. */
            double u = ulps(hstep_pow(x, y), powl(x, y));
            if (u > worst) worst = u, at = x, at_power = y;
        }
        CHECK(worst <= 2, "worst %g ulp at %a ^ %a", worst, at, at_power);
        CHECK(same(hstep_pow(4, -0.5), 0.5) && same(hstep_pow(10, 3), 1000) && same(hstep_pow(7, 0), 1) &&
                  same(hstep_pow(1, 123.25), 1),
              "exact powers are not exact");
        CHECK(hstep_pow(2, 1e308) == INFINITY && same(hstep_pow(2, -1e308), 0.0), "pow does not saturate");
    }
    TEST("detmath: cos within 1 ulp") {
        worst = at = 0;
        for (int j = 0; j < POINTS; j++) {
            double x = j & 1 ? random_unit() * HSTEP_PI : (random_unit() - 0.5) * 0x1p20;
            if (j % 16 == 0) x = HSTEP_PI / 2 * (double)(random64() % 300000) * (1 + (random_unit() - 0.5) * 1e-12);
            double u = ulps(hstep_cos(x), cosl(x));
            if (u > worst) worst = u, at = x;
        }
        CHECK(worst <= 1, "worst %g ulp at %a", worst, at);
        CHECK(same(hstep_cos(0.0), 1.0) && same(hstep_cos(HSTEP_PI), -1.0), "cos 0 = %a, cos pi = %a", hstep_cos(0.0),
              hstep_cos(HSTEP_PI));
    }
    TEST("detmath: powi within n / 2 ulp") {
        for (int j = 0; j < 20000; j++) {
            double x = 1 - ldexp(random_unit(), -(int)(random64() % 20));
            uint64_t n = random64() % (j & 1 ? 40 : 1000000);
            long double exact = powl(x, (long double)n);
            if (exact < 0x1p-1020L) continue;
            double relative = (double)(fabsl(hstep_powi(x, n) - exact) / exact);
            CHECK(relative <= (double)n * 0x1p-53 + 0x1p-63, "%a ^ %llu is off by %g", x, (unsigned long long)n,
                  relative);
        }
        CHECK(same(hstep_powi(0.9, 0), 1.0) && same(hstep_powi(0.0, 0), 1.0) && same(hstep_powi(0.0, 5), 0.0),
              "powers of 0 and to the 0");
        CHECK(same(hstep_powi(0.999, UINT64_MAX), 0.0), "0.999 ^ (2^64 - 1) = %a", hstep_powi(0.999, UINT64_MAX));
    }
    TEST("detmath: pinned bits") {
        uint64_t hash = 0xCBF29CE484222325u;
        for (int j = 1; j <= 10000; j++) {
            double x = j * 0.0137, value[5];
            value[0] = hstep_log(x);
            value[1] = hstep_exp(x - 60);
            value[2] = hstep_pow(x, -0.37);
            value[3] = hstep_cos(x);
            value[4] = hstep_powi(1 - 0x1p-14 * x, (uint64_t)j);
            for (int k = 0; k < 5; k++) hash = (hash ^ hstep_bits64(value[k])) * 0x100000001B3u;
        }
        CHECK(hash == 0xC796D1B65ADB59FAu, "hash of 50,000 results is 0x%016llX", (unsigned long long)hash);
    }
}

/* ---- Schedules --------------------------------------------------------------------------------------------------- */

static void close_to(const char *what, double value, double expected)
{
    CHECK(fabs(value - expected) <= 4e-16 * fmax(1, fabs(expected)), "%s: %.17g, expected %.17g", what, value,
          expected);
}

static void test_schedules(void)
{
    TEST("schedules: names and ids") {
        CHECK(HSTEP_SCHEDULE_COUNT >= 5, "only %d schedules", (int)HSTEP_SCHEDULE_COUNT);
        for (int k = 0; k < HSTEP_SCHEDULE_COUNT; k++) {
            CHECK(hstep_schedule_find(hstep_schedule_name(k)) == k, "%s is not found", hstep_schedule_name(k));
            CHECK(hstep_schedule_title(k)[0], "%s has no title", hstep_schedule_name(k));
        }
        CHECK(hstep_schedule_find("cosines") == -1 && hstep_schedule_find("") == -1, "a wrong name is found");
        CHECK(!hstep_schedule_name(-1) && !hstep_schedule_name(HSTEP_SCHEDULE_COUNT), "a name outside the table");
    }
    TEST("schedules: values") {
        struct hstep_schedule s = {HSTEP_SCHEDULE_CONSTANT, 10, 110, 0.1, 0.8, -0.5};
        close_to("constant 0", hstep_schedule_factor(&s, 0), 0.1);
        close_to("constant 9", hstep_schedule_factor(&s, 9), 1);
        close_to("constant late", hstep_schedule_factor(&s, 1000), 1);
        s.kind = HSTEP_SCHEDULE_LINEAR;
        close_to("linear 0", hstep_schedule_factor(&s, 0), 0.1);
        close_to("linear 10", hstep_schedule_factor(&s, 10), 1);
        close_to("linear 60", hstep_schedule_factor(&s, 60), 0.55);
        close_to("linear 109", hstep_schedule_factor(&s, 109), 0.109);
        close_to("linear 110", hstep_schedule_factor(&s, 110), 0.1);
        close_to("linear late", hstep_schedule_factor(&s, UINT64_MAX), 0.1);
        s.kind = HSTEP_SCHEDULE_COSINE;
        close_to("cosine 4", hstep_schedule_factor(&s, 4), 0.5);
        close_to("cosine 10", hstep_schedule_factor(&s, 10), 1);
        close_to("cosine 60", hstep_schedule_factor(&s, 60), 0.55);
        close_to("cosine 35", hstep_schedule_factor(&s, 35), 0.1 + 0.9 * 0.5 * (1 + sqrt(0.5)));
        close_to("cosine late", hstep_schedule_factor(&s, 111), 0.1);
        s.kind = HSTEP_SCHEDULE_WSD;
        close_to("wsd 87", hstep_schedule_factor(&s, 87), 1);
        close_to("wsd 88", hstep_schedule_factor(&s, 88), 1);
        close_to("wsd 99", hstep_schedule_factor(&s, 99), 0.1 + 0.9 * (1 - sqrt(0.5)));
        close_to("wsd 110", hstep_schedule_factor(&s, 110), 0.1);
        s.decay_start = 1.5;
        close_to("wsd that never decays", hstep_schedule_factor(&s, 109), 1);
        s.decay_start = -1;
        close_to("wsd that decays from the start", hstep_schedule_factor(&s, 27), 0.1 + 0.9 * (1 - sqrt(27 / 110.0)));
    }
    TEST("schedules: inverse-power is adamw_bfloat16's") {
        /* The package's own values for preheat 3000 and lr 1e-3 by its step count t, which includes the present
         * step. */
        static const struct {
            uint64_t t;
            double lr;
        } known[] = {{1, 6.6666666666666667e-7},
                     {2998, 9.9966666666666667e-4},
                     {2999, 1e-3},
                     {3000, 9.998333749884293e-4},
                     {12000, 4.999791679686596e-4}};
        struct hstep_schedule s = {HSTEP_SCHEDULE_INVERSE_POWER, 3000, 0, 0, 0, -0.5};
        for (size_t k = 0; k < COUNT(known); k++) {
            double lr = 1e-3 * hstep_schedule_factor(&s, known[k].t - 1);
            CHECK(fabs(lr / known[k].lr - 1) < 1e-12, "t = %d: %.15g, expected %.15g", (int)known[k].t, lr,
                  known[k].lr);
        }
        s.warmup = 0;
        close_to("no preheat", hstep_schedule_factor(&s, 2), 0.5);
    }
    TEST("schedules: finite, never above 1 nor below the end, for any input") {
        for (int j = 0; j < 200000; j++) {
            uint64_t mask = UINT64_MAX >> random64() % 64;
            struct hstep_schedule s;
            s.kind = (int)(random64() % HSTEP_SCHEDULE_COUNT);
            s.warmup = random64() & mask;
            s.total = random64() & mask;
            s.final = random_unit();
            s.decay_start = random_unit() * 1.2 - 0.1;
            s.power = -random_unit();
            uint64_t step = random64() & mask;
            double f = hstep_schedule_factor(&s, step);
            double least = s.kind == HSTEP_SCHEDULE_INVERSE_POWER || step < s.warmup ? 0 : fmin(s.final, 1);
            CHECK(f >= least - 1e-15 && f <= 1, "%s warmup %llu total %llu step %llu final %g: %g",
                  hstep_schedule_name(s.kind), (unsigned long long)s.warmup, (unsigned long long)s.total,
                  (unsigned long long)step, s.final, f);
        }
        struct hstep_schedule open = {HSTEP_SCHEDULE_COSINE, 0, 0, 0.1, 0.8, -0.5};
        close_to("no total: the rate stays", hstep_schedule_factor(&open, 12345), 1);
    }
}

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

struct counts {
    _Atomic int *done;
    int64_t n;
};

static void count_task(void *arg, int64_t i)
{
    struct counts *c = arg;
    if (i >= 0 && i < c->n) atomic_fetch_add_explicit(&c->done[i], 1, memory_order_relaxed);
}

static int64_t run_and_count(int threads, int64_t n)
{
    _Atomic int *done = calloc((size_t)n + 1, sizeof *done);
    struct counts c = {done, n};
    int64_t wrong = 0;
    hstep_run_tasks(threads, count_task, &c, n);
    for (int64_t i = 0; i < n; i++) wrong += done[i] != 1;
    free((void *)done);
    return wrong;
}

static _Thread_local int is_caller;

/* Records which tasks ran, and how many of the caller's ran after one with a higher number. */
struct order {
    int64_t last, falls;
    atomic_int ran[1000];
};

static void order_task(void *arg, int64_t i)
{
    struct order *o = arg;
    atomic_fetch_add(&o->ran[i], 1);
    if (!is_caller) return;
    o->falls += i < o->last;
    o->last = i;
}

/* The first tasks of the caller and of the other thread. Each waits for the other, so that neither takes the other's
 * tasks before both have begun. */
struct meeting {
    int first[2];
    atomic_int met[2], alone; /* alone: no other thread came for a second or two */
};

static void meeting_task(void *arg, int64_t i)
{
    struct meeting *m = arg;
    int self = !is_caller;
    if (atomic_load(&m->met[self])) return;
    m->first[self] = (int)i;
    atomic_store(&m->met[self], 1);
    time_t start = time(NULL);
    while (!atomic_load(&m->met[!self]) && !atomic_load(&m->alone)) {
        if (!self && time(NULL) - start > 1) atomic_store(&m->alone, 1);
        hstep_yield();
    }
}

static void plain_write(void *arg, int64_t i) { ((int *)arg)[i]++; }

static void nested_task(void *arg, int64_t i)
{
    (void)i;
    if (run_and_count(4, 50)) atomic_fetch_add((atomic_int *)arg, 1);
}

static void slow_first(void *arg, int64_t i)
{
    /* Task 0 is long. The others must not wait behind it in thread 0's share. */
    volatile double x = 1;
    if (i == 0)
        for (int k = 0; k < 3000000; k++) x = x * 1.0000001;
    ((int *)arg)[i] = 1;
}

#ifndef _WIN32
static void *stepping_thread(void *arg)
{
    for (int k = 0; k < 300; k++)
        if (run_and_count(3, 40 + k % 7)) atomic_fetch_add((atomic_int *)arg, 1);
    return NULL;
}

static int child_runs(void)
{
    pid_t child = fork();
    if (child == 0) test_leave(run_and_count(4, 1000) == 0 && run_and_count(2, 10) == 0 ? 0 : 1);
    return test_child_status(child) == 0;
}

/* Runs in a child whose address space has no room for hundreds of stacks. */
static int runs_with_few_threads(void)
{
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {256u << 20, 256u << 20};
        setrlimit(RLIMIT_AS, &limit);
        test_leave(run_and_count(500, 3000) == 0 && run_and_count(500, 3000) == 0 && run_and_count(2, 100) == 0 ? 0
                                                                                                                : 1);
    }
    return test_child_status(child) == 0;
}

static void *forking_thread(void *arg)
{
    for (int k = 0; k < 5; k++)
        if (!child_runs()) atomic_fetch_add((atomic_int *)arg, 1);
    return NULL;
}
#endif

static void environment(const char *name, const char *value)
{
#ifdef _WIN32
    static char text[128];
    snprintf(text, sizeof text, "%s=%s", name, value ? value : "");
    _putenv(text);
#else
    if (value) setenv(name, value, 1);
    else unsetenv(name);
#endif
}

static void test_threads(void)
{
    TEST("threads: every task once, any number of threads and tasks") {
        static const int threads[] = {-3, 0, 1, 2, 3, 4, 8, 33, 5000};
        static const int64_t tasks[] = {0, 1, 2, 3, 7, 8, 64, 1000, 20011};
        for (size_t a = 0; a < COUNT(threads); a++)
            for (size_t b = 0; b < COUNT(tasks); b++) {
                if (threads[a] > 100 && tasks[b] > 100) continue;
                int64_t wrong = run_and_count(threads[a], tasks[b]);
                CHECK(wrong == 0, "%d threads, %lld tasks: %lld not done once", threads[a], (long long)tasks[b],
                      (long long)wrong);
            }
    }
    is_caller = 1;
    TEST("threads: backwards, every task once, and a lone thread's last first") {
        static const int threads[] = {1, 2, 3, 8};
        static const int64_t tasks[] = {0, 1, 2, 7, 64, 1000};
        for (size_t a = 0; a < COUNT(threads); a++)
            for (size_t b = 0; b < COUNT(tasks); b++) {
                struct order o = {.last = INT64_MAX};
                int64_t wrong = 0;
                hstep_run_tasks_backwards(threads[a], order_task, &o, tasks[b]);
                for (int64_t i = 0; i < tasks[b]; i++) wrong += o.ran[i] != 1;
                CHECK(!wrong, "%d threads, %lld tasks: %lld not done once", threads[a], (long long)tasks[b],
                      (long long)wrong);
                CHECK(threads[a] > 1 || o.falls == tasks[b], "%lld of %lld tasks came before a lower one",
                      (long long)o.falls, (long long)tasks[b]);
            }
    }
    TEST("threads: a thread goes through its share in the direction that was asked for") {
        struct meeting forward = {.alone = 0}, backward = {.alone = 0};
        hstep_run_tasks(2, meeting_task, &forward, 64);
        CHECK(forward.first[0] == 0 && (forward.alone || forward.first[1] == 32), "forwards: tasks %d and %d first",
              forward.first[0], forward.first[1]);
        hstep_run_tasks_backwards(2, meeting_task, &backward, 64);
        CHECK(backward.first[0] == 31 && (backward.alone || backward.first[1] == 63),
              "backwards: tasks %d and %d first", backward.first[0], backward.first[1]);
    }
    TEST("threads: what tasks wrote is seen by the caller, run after run") {
        static int value[257];
        memset(value, 0, sizeof value);
        for (int k = 0; k < 3000; k++) hstep_run_tasks(1 + k % 5, plain_write, value, 257);
        for (int i = 0; i < 257; i++) CHECK(value[i] == 3000, "task %d ran %d times", i, value[i]);
    }
    TEST("threads: a long task does not hold up its thread's share") {
        static int value[64];
        memset(value, 0, sizeof value);
        hstep_run_tasks(2, slow_first, value, 64);
        for (int i = 0; i < 64; i++) CHECK(value[i], "task %d did not run", i);
    }
    TEST("threads: a task that runs tasks") {
        atomic_int failures = 0;
        hstep_run_tasks(4, nested_task, &failures, 40);
        EQUAL(failures, 0);
    }
    TEST("threads: shutdown and start again") {
        for (int k = 0; k < 20; k++) {
            CHECK(run_and_count(3, 100) == 0, "run %d", k);
            hstep_pool_shutdown();
            if (k % 3 == 0) hstep_pool_shutdown();
        }
    }
#ifndef _WIN32
    TEST("threads: several threads step at once") {
        pthread_t thread[4];
        atomic_int failures = 0;
        for (int k = 0; k < 4; k++) pthread_create(&thread[k], NULL, stepping_thread, &failures);
        for (int k = 0; k < 4; k++) pthread_join(thread[k], NULL);
        EQUAL(failures, 0);
    }
    TEST_UNLESS_EMULATED("threads: the child of a fork has a pool of its own") {
        CHECK(run_and_count(4, 100) == 0, "run before");
        CHECK(child_runs(), "child failed");
        CHECK(run_and_count(4, 100) == 0, "run after");
        pthread_t thread[3];
        atomic_int failures = 0;
        pthread_create(&thread[0], NULL, forking_thread, &failures);
        pthread_create(&thread[1], NULL, stepping_thread, &failures);
        pthread_create(&thread[2], NULL, stepping_thread, &failures);
        for (int k = 0; k < 3; k++) pthread_join(thread[k], NULL);
        EQUAL(failures, 0);
    }
    TEST_UNLESS_EMULATED("threads: threads that cannot be created are done without") {
        /* Sanitizers die without address space of their own. */
        CHECK(TEST_SANITIZED || runs_with_few_threads(), "500 threads in 256 MiB of address space");
    }
#endif
    TEST("threads: default number") {
        environment("HALFSTEP_THREADS", NULL);
        environment("OMP_NUM_THREADS", NULL);
        int natural = hstep_default_threads();
        CHECK(natural >= 1 && natural <= HSTEP_MAX_THREADS, "%d threads", natural);
        static const struct {
            const char *own, *omp;
            int expected;
        } cases[] = {{"3", NULL, 3},
                     {"3", "5", 3},
                     {NULL, "5", 5},
                     {NULL, "5,2", 5},
                     {" 7 ", "5", 7},
                     {"x", "5", 5},
                     {"3x", NULL, 0},
                     {"", "6", 6},
                     {"0", "6", 6},
                     {"-2", "6", 6},
                     {"99999999999999999999", NULL, 0},
                     {NULL, "99999999999999999999", HSTEP_MAX_THREADS},
                     {"3,4", "2", 2},
                     {NULL, "4 , 2", 4},
                     {NULL, ",4", 0},
                     {"1e3", NULL, 0},
                     {"+4", NULL, 0}};
        for (size_t k = 0; k < COUNT(cases); k++) {
            environment("HALFSTEP_THREADS", cases[k].own);
            environment("OMP_NUM_THREADS", cases[k].omp);
            int expected = cases[k].expected ? cases[k].expected : natural, value = hstep_default_threads();
            CHECK(value == expected, "HALFSTEP_THREADS=%s OMP_NUM_THREADS=%s: %d, expected %d",
                  cases[k].own ? cases[k].own : "(unset)", cases[k].omp ? cases[k].omp : "(unset)", value, expected);
        }
        environment("HALFSTEP_THREADS", NULL);
        environment("OMP_NUM_THREADS", NULL);
    }
}

int main(int argc, char **argv)
{
    test_init(argc, argv);
    test_exact();
    test_math();
    test_schedules();
    test_threads();
    hstep_pool_shutdown();
    return test_done();
}
