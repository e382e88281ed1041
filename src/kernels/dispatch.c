/* Detects the processor and chooses the instruction set. No other file asks which processor this is. The build defines
 * HSTEP_HAVE_<name>=1 for each row of vec/isas.def that it has compiled kernels.c for. A new row needs its test
 * hstep_cpu_<name>() here. */
#include "kernels/dispatch.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/api.h"
#include "base/process/detail.h"
#include "base/process/environment.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#else
#include <fenv.h>
#endif

/* ---- Processor features ---- */

struct feature {
    const char *label;
    int on;
};
#define FEATURES 32

/* Unused if the build has not compiled the row. */
#define CPU_TEST static inline __attribute__((unused))

#if defined(__x86_64__)

/* X(name, leaf, register, bit, register state that the operating system must save). Leaves 1 and 7 mean subleaf 0. 71
 * means leaf 7, subleaf 1. */
#define X86_FEATURES(X)               \
    X(sse2, 1, d, 26, 0)              \
    X(sse42, 1, c, 20, 0)             \
    X(popcnt, 1, c, 23, 0)            \
    X(avx, 1, c, 28, STATE_YMM)       \
    X(f16c, 1, c, 29, STATE_YMM)      \
    X(fma, 1, c, 12, STATE_YMM)       \
    X(avx2, 7, b, 5, STATE_YMM)       \
    X(avx512f, 7, b, 16, STATE_ZMM)   \
    X(avx512dq, 7, b, 17, STATE_ZMM)  \
    X(avx512bw, 7, b, 30, STATE_ZMM)  \
    X(avx512vl, 7, b, 31, STATE_ZMM)  \
    X(avx512vbmi, 7, c, 1, STATE_ZMM) \
    X(avx512bf16, 71, a, 5, STATE_ZMM)

#define STATE_YMM 0x06u /* XMM and the upper halves of YMM */
#define STATE_ZMM 0xe6u /* STATE_YMM, mask registers, upper halves of ZMM, ZMM16 to 31 */

enum x86_feature {
#define X(name, ...) x86_##name,
    X86_FEATURES(X)
#undef X
        x86_features
};

/* Returns the features that are usable, bit i for row i of X86_FEATURES. */
static uint32_t x86_detect(void)
{
    struct {
        unsigned a, b, c, d;
    } leaf_1 = {0, 0, 0, 0}, leaf_7 = {0, 0, 0, 0}, leaf_71 = {0, 0, 0, 0};
    unsigned most = __get_cpuid_max(0, NULL), state = 0;
    if (most >= 1) __cpuid(1, leaf_1.a, leaf_1.b, leaf_1.c, leaf_1.d);
    if (most >= 7) {
        __cpuid_count(7, 0, leaf_7.a, leaf_7.b, leaf_7.c, leaf_7.d);
        if (leaf_7.a >= 1) __cpuid_count(7, 1, leaf_71.a, leaf_71.b, leaf_71.c, leaf_71.d);
    }
    if (leaf_1.c >> 27 & 1) { /* OSXSAVE: xgetbv may be used; it tells which registers survive a task switch */
        unsigned high;
        __asm__ volatile("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    }
    uint32_t found = 0;
#define X(name, leaf, reg, bit, needs) \
    if ((leaf_##leaf.reg >> bit & 1) && (state & (needs)) == (needs)) found |= 1u << x86_##name;
    X86_FEATURES(X)
#undef X
    return found;
}

static int x86_has(uint32_t needed) { return (x86_detect() & needed) == needed; }

/* The features that the row's compiler flags allow, including those that they imply. */
#define X86_BASE (1u << x86_sse42 | 1u << x86_popcnt | 1u << x86_avx | 1u << x86_f16c | 1u << x86_avx2)
CPU_TEST int hstep_cpu_avx2(void) { return x86_has(X86_BASE); }
CPU_TEST int hstep_cpu_avx512(void)
{
    return x86_has(X86_BASE | 1u << x86_fma | 1u << x86_avx512f | 1u << x86_avx512dq | 1u << x86_avx512bw |
                   1u << x86_avx512vl);
}

static void cpu_features(struct feature *list)
{
    uint32_t found = x86_detect();
#define X(name, ...) *list++ = (struct feature){#name, (int)(found >> x86_##name & 1)};
    X86_FEATURES(X)
#undef X
}

#elif defined(__aarch64__)

/* NEON is part of the architecture's base. */
CPU_TEST int hstep_cpu_neon(void) { return 1; }

static void cpu_features(struct feature *list)
{
    *list++ = (struct feature){"neon", hstep_cpu_neon()};
#if defined(__linux__)
    unsigned long one = getauxval(AT_HWCAP), two = getauxval(AT_HWCAP2);
    *list++ = (struct feature){"asimdhp", (int)(one >> 10 & 1)};
    *list++ = (struct feature){"sve", (int)(one >> 22 & 1)};
    *list++ = (struct feature){"sve2", (int)(two >> 1 & 1)};
    *list++ = (struct feature){"bf16", (int)(two >> 14 & 1)};
#endif
}

#else

static void cpu_features(struct feature *list) { (void)list; }

#endif

CPU_TEST int hstep_cpu_scalar(void) { return 1; }

void hstep_cpu_features(char *out, size_t n)
{
    struct feature list[FEATURES] = {{NULL, 0}};
    size_t length = 0;
    if (!n) return;
    cpu_features(list);
    for (const struct feature *f = list; f->label; f++) {
        size_t name = strlen(f->label), space = length > 0;
        if (!f->on) continue;
        if (length + space + name + 1 > n) break;
        if (space) out[length++] = ' ';
        memcpy(out + length, f->label, name);
        length += name;
    }
    out[length] = 0;
}

/* ---- Instruction sets ---- */

/* COMPILED(name) is 1 if HSTEP_HAVE_<name> is defined as 1, else 0. One list of rows therefore serves every build. Only
 * a 1 turns the pasted name into ONE_1, whose comma moves the answer into second place. */
#define ONE_1 0,
#define SECOND(first, second, ...) second
#define COMPILED_PASTE(value) COMPILED_TAKE(ONE_##value)
#define COMPILED_TAKE(one_or_junk) SECOND(one_or_junk 1, 0, 0)
#define COMPILED_VALUE(value) COMPILED_PASTE(value)
#define COMPILED(name) COMPILED_VALUE(HSTEP_HAVE_##name)
#define PASTE(a, b) PASTE_NOW(a, b)
#define PASTE_NOW(a, b) a##b

#define DECLARE_0(name)
#define DECLARE_1(name) extern const struct hstep_kernels hstep_kernels_##name;
#define ISA(name, processor, flags) PASTE(DECLARE_, COMPILED(name))(name)
#include "vec/isas.def"
#undef ISA

struct row {
    const char *name;
    const struct hstep_kernels *kernels;
    int (*runs)(void);
};

static const struct row rows[] = {
#define ROW_0(name) NULL, NULL
#define ROW_1(name) &hstep_kernels_##name, hstep_cpu_##name
#define ISA(name, processor, flags) {#name, PASTE(ROW_, COMPILED(name))(name)},
#include "vec/isas.def"
#undef ISA
};
#define ROWS ((int)(sizeof rows / sizeof *rows))

int hstep_isa_count(void) { return ROWS; }

int hstep_isa_find(const char *name)
{
    for (int i = 0; name && i < ROWS; i++)
        if (!strcmp(rows[i].name, name)) return i;
    return -1;
}

const char *hstep_isa_name(int isa) { return isa < 0 || isa >= ROWS ? NULL : rows[isa].name; }

int hstep_isa_available(int isa)
{
    /* Bit i: row i is available. Bit 31: the mask is known. The mask is kept because each cpuid costs microseconds
     * under a hypervisor. Threads that race here find the same value, so the order of their stores does not matter. */
    static _Atomic uint32_t known;
    _Static_assert(sizeof rows / sizeof *rows < 31, "rows do not fit the mask");
    if (isa < 0 || isa >= ROWS) return 0;
    uint32_t mask = atomic_load_explicit(&known, memory_order_relaxed);
    if (!mask) {
        mask = 1u << 31;
        for (int i = 0; i < ROWS; i++)
            if (rows[i].kernels && rows[i].runs()) mask |= 1u << i;
        atomic_store_explicit(&known, mask, memory_order_relaxed);
    }
    return (int)(mask >> isa & 1);
}

const struct hstep_kernels *hstep_isa_kernels(int isa) { return hstep_isa_available(isa) ? rows[isa].kernels : NULL; }

/* Returns the row that HALFSTEP_ISA names, or the last available row if it names none. Writes a sentence to text if the
 * variable cannot be followed, else "". The first thread that finds no fault in it decides for the process. */
static int choose(char *text, size_t size)
{
    static atomic_int decided; /* row + 1 */
    int known = atomic_load_explicit(&decided, memory_order_relaxed), row[ROWS], n = 0;
    char names[32 * sizeof rows / sizeof *rows] = "";
    *text = 0;
    if (known) return known - 1;
    for (int i = 0; i < ROWS; i++) {
        if (!hstep_isa_available(i)) continue;
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", n ? ", " : "", rows[i].name);
        row[n++] = i;
    }
    const struct hstep_variable variable = {"HALFSTEP_ISA", names, 0};
    const int found = hstep_read_variable(&variable, text, size), best = row[found < 0 ? n - 1 : found];
    if (found == HSTEP_MALFORMED) return best;
    return atomic_compare_exchange_strong(&decided, &known, best + 1) ? best : known - 1;
}

int hstep_isa_best(void)
{
    char text[256];
    return choose(text, sizeof text);
}

const char *hstep_isa_warning(void)
{
    static _Thread_local char text[256];
    choose(text, sizeof text);
    return *text ? text : NULL;
}

/* ---- What the process has chosen ---- */

static atomic_int chosen_isa = -1;

static int isa_in_use(void)
{
    int chosen = atomic_load(&chosen_isa);
    return chosen >= 0 ? chosen : hstep_isa_best();
}

const struct hstep_kernels *hstep_isa_in_use(void) { return hstep_isa_kernels(isa_in_use()); }

int32_t halfstep_isa_count(void) { return hstep_isa_count(); }
const char *halfstep_isa_name(int32_t index)
{
    return index < 0 || index >= hstep_isa_count() ? NULL : hstep_isa_name(index);
}
int32_t halfstep_isa_available(int32_t index)
{
    return index >= 0 && index < hstep_isa_count() && hstep_isa_available(index);
}
const char *halfstep_isa_warning(void) { return hstep_isa_warning(); }
const char *halfstep_isa(void) { return hstep_isa_name(isa_in_use()); }
int halfstep_set_isa(const char *name)
{
    int isa = -1;
    if (name) {
        isa = hstep_isa_find(name);
        if (isa < 0)
            return hstep_fail_alone(HALFSTEP_ERROR_NAME,
                                    "unknown instruction set '%s'; 'halfstep info' lists those of this build", name);
        if (!hstep_isa_available(isa))
            return hstep_fail_alone(
                HALFSTEP_ERROR_UNSUPPORTED,
                "this processor or this build does not have %s; 'halfstep info' lists what there is", name);
    }
    atomic_store(&chosen_isa, isa);
    return HALFSTEP_OK;
}

void halfstep_cpu_features(char *text, size_t size)
{
    if (text && size) hstep_cpu_features(text, size);
}

/* ---- Floating-point environment ---- */

#if defined(__x86_64__)

struct hstep_fp hstep_fp_enter(void)
{
    struct hstep_fp fp = {_mm_getcsr()};
    _mm_setcsr(0x1f80);
    return fp;
}

void hstep_fp_leave(struct hstep_fp fp) { _mm_setcsr((unsigned)fp.saved); }

#elif defined(__aarch64__)

struct hstep_fp hstep_fp_enter(void)
{
    struct hstep_fp fp;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fp.saved) : : "memory");
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return fp;
}

void hstep_fp_leave(struct hstep_fp fp) { __asm__ volatile("msr fpcr, %0" : : "r"(fp.saved) : "memory"); }

#else

/* Standard C can set the rounding only. Flushing of subnormals, if the processor has it, stays as the host has set
 * it. */
struct hstep_fp hstep_fp_enter(void)
{
    struct hstep_fp fp = {(uint64_t)fegetround()};
    fesetround(FE_TONEAREST);
    return fp;
}

void hstep_fp_leave(struct hstep_fp fp) { fesetround((int)fp.saved); }

#endif
