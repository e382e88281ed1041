/* See emulate.h. Runs rows that translate.py has made of PTX, for 32 lanes at once, as a GPU does.
 *
 * Lanes of a warp that go different ways form groups. The group that is first in the code runs, so that groups join
 * again where their ways do. An exchange or a barrier waits for all lanes of the warp. It is a fault if some cannot
 * come: they have left, or wait at another place. */
#ifndef _WIN32
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda/machine.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/emulate.h"
#include "cuda/watch.h"
#include "device/cuda/code/kernels.h"

enum {
    WARPS = HSTEP_CUDA_THREADS / LANES,
    MOST_BLOCKS = 4,         /* of a launch in random order, at a time */
    DEPTH = 24,              /* of calls */
    REGISTERS = 8 << 20,     /* bytes of a warp's frames */
    LOCAL_BYTES = 16 << 10,  /* of a lane */
    LOCAL_WORDS = 4 * LANES, /* a word of local memory lies beside those of the other lanes, as in a GPU's */
    NOTHING = 64 << 10,      /* no memory has an address below */
    LOCAL_FIRST = 64,
    PARAMETER_BYTES = 1024
};
static const uint32_t ALL = 0xffffffff;
static const uint64_t GARBAGE = 0x5bd1e995a5a5a5a5;

struct hstep_emulation hstep_emulation;

struct group {
    uint32_t pc, mask;
    enum { FREE, AT_CALL, AT_MEETING } parked;
};
struct frame {
    const struct function *function;
    uint32_t mask;        /* lanes that have not returned */
    struct group resumes; /* in the caller, when all have */
    struct group groups[LANES];
    int count;
    char *registers;
    int local;
};
enum state { RUNNING, AT_BARRIER, DONE };
struct warp {
    uint32_t pc, mask;       /* of the group that runs */
    uint32_t limit;          /* the place of another group that is free */
    int calls;               /* the group need not wait for others at a call */
    const char *bases[2];    /* of operands: registers and the pool */
    char *local;             /* of all lanes */
    uint32_t *local_written; /* for each byte, the lanes that have written it */
    struct block *block;
    struct frame frames[DEPTH];
    int depth;
    enum state state;
    char *registers;
    struct hstep_place place; /* for the watch */
};
struct block {
    struct warp warps[WARPS];
    char *shared;
    uint32_t *shared_written; /* for each byte: not 0 if a lane has written it */
    int index;
};

static struct block *blocks[MOST_BLOCKS];
static const struct function *entry;
static char *pool, *constants, **variables;
static int constant_bytes, grid_blocks;
static _Alignas(16) char parameters[PARAMETER_BYTES];
static const uint64_t FUNCTION_ADDRESS = (uint64_t)1 << 62; /* of function 0; indirect calls take it */
/* Generic addresses of shared and local memory, and of constants. Nothing else lies there. */
static uint64_t windows[FRAME];
static uint64_t seed;

static uint64_t next_random(void)
{
    seed += 0x9E3779B97F4A7C15;
    uint64_t z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

static void fault(const struct warp *w, const struct row *r, const char *what, uint64_t address)
{
    fprintf(stderr, "%s: block %d, warp %d, lanes %#x, PTX line %d: %s (%#llx)\n", entry->name, w->block->index,
            (int)(w - w->block->warps), (unsigned)w->mask, (int)r->line, what, (unsigned long long)address);
    abort();
}

/* ---- Instructions of registers ---- */

typedef uint8_t U8;
typedef int8_t S8;
typedef uint16_t U16;
typedef int16_t S16;
typedef uint32_t U32, P;
typedef int32_t S32;
typedef float F32;
typedef uint64_t U64;
typedef int64_t S64;
typedef double F64;
/* What a lane of a register holds. */
typedef U32 U8_lane, S8_lane, U16_lane, S16_lane, U32_lane, P_lane;
typedef S32 S32_lane;
typedef F32 F32_lane;
typedef U64 U64_lane;
typedef S64 S64_lane;
typedef F64 F64_lane;

static void *at(const struct warp *w, uint32_t x) { return (char *)(uintptr_t)w->bases[x >> 31] + (x & 0x7fffffff); }

#if defined(__clang__)
#define LANES_APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define LANES_APART _Pragma("GCC ivdep")
#endif
/* Executes statements for each lane i of the group. A register is the same one in all its uses or shares no bytes. */
#define EACH_LANE(...)                                              \
    if (w->mask == ALL) {                                           \
        LANES_APART for (int i = 0; i < LANES; i++) { __VA_ARGS__ } \
    } else {                                                        \
        for (U32 left = w->mask; left; left &= left - 1) {          \
            const int i = __builtin_ctz(left);                      \
            __VA_ARGS__                                             \
        }                                                           \
    }

static F32 canonical(F32 x) { return x == x ? x : __builtin_nanf("0x3fffff"); }
#define RESULT_P(x) (x)
#define RESULT_U16(x) (U16)(x)
#define RESULT_S16(x) (U16)(x)
#define RESULT_U32(x) (x)
#define RESULT_S32(x) (x)
#define RESULT_F32(x) canonical(x)
#define RESULT_U64(x) (x)
#define RESULT_S64(x) (x)
#define RESULT_F64(x) (x)

static U64 extracted(U64 a, U32 position, U32 length, U32 bits, int is_signed)
{
    const U64 x = position < bits ? a >> position : 0, kept = length < bits ? ((U64)1 << length) - 1 : ~(U64)0;
    const U32 last = position + length - 1 < bits - 1 ? position + length - 1 : bits - 1;
    const int negative = is_signed && length && a >> last & 1;
    const U32 have = position < bits ? bits - position : 0; /* bits beyond are the sign's */
    return negative ? (x & kept) | ~(U64)0 << (have < length ? have : length < 63 ? length : 63) : x & kept;
}
static U32 permuted(U32 a, U32 b, U32 how)
{
    const U64 bytes = (U64)b << 32 | a;
    U32 result = 0;
    for (int i = 0; i < 4; i++) {
        const U32 byte = bytes >> (how >> 4 * i & 7) * 8 & 255;
        result |= (how >> 4 * i & 8 ? (byte >> 7) * 255 : byte) << 8 * i;
    }
    return result;
}
static U32 reversed(U32 x)
{
    U32 result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}
static U32 saturated(S32 x) { return x < 0 ? 0 : x > 255 ? 255 : (U32)x; }
static S32 limited(F64 x) { return x >= 0x1p31 ? 0x7fffffff : x <= -0x1p31 ? -0x7fffffff - 1 : (S32)x; }
/* -0 is smaller than 0. A NaN is no number beside one. */
static F32 smaller(F32 a, F32 b) { return a != a ? b : b != b ? a : a < b || (a == b && __builtin_signbit(a)) ? a : b; }
static F64 smaller_double(F64 a, F64 b)
{
    return a != a ? b : b != b ? a : a < b || (a == b && __builtin_signbit(a)) ? a : b;
}

/* Returns a factor for an estimate: 1 by default, otherwise as far away as `most` allows, up or down or anywhere. */
static F64 astray(F32 x, F64 most)
{
    U32 bits;
    memcpy(&bits, &x, 4);
    switch (hstep_emulation.estimates) {
    case HSTEP_ESTIMATES_HIGH: return 1 + most;
    case HSTEP_ESTIMATES_LOW: return 1 - most;
    case HSTEP_ESTIMATES_ANYWHERE: return 1 + most * ((bits * 0x9E3779B9u >> 8) * 0x1p-23 - 1);
    default: return 1;
    }
}
/* The ISA allows 1 unit in the last place for rcp and 2^-22.9 for rsqrt, of which rounding takes a part. Both take
 * subnormal numbers for zeros. */
static F32 reciprocal(F32 x)
{
    const F64 y = fabsf(x) < 0x1p-126f ? (F64)copysignf(INFINITY, x) : astray(x, 0x1p-24) / (F64)x;
    return fabs(y) < 0x1p-126 ? copysignf(0.0f, x) : (F32)y;
}
static F32 inverse_root(F32 x, int is_free)
{
    if (fabsf(x) < 0x1p-126f) return copysignf(INFINITY, x);
    return (F32)((is_free ? astray(x, exp2(-22.9) - 0x1p-25) : 1) / sqrt((F64)x));
}

#define ONE(name, D, A, value)                                                   \
    static void run_##name(struct warp *w, const struct row *r)                  \
    {                                                                            \
        D##_lane *d = at(w, r->x[0]);                                            \
        const A##_lane *p = at(w, r->x[1]);                                      \
        EACH_LANE(const A a = (A)p[i]; d[i] = (D##_lane)RESULT_##D((D)(value));) \
    }
#define TWO(name, D, A, B, value)                                                                     \
    static void run_##name(struct warp *w, const struct row *r)                                       \
    {                                                                                                 \
        D##_lane *d = at(w, r->x[0]);                                                                 \
        const A##_lane *p = at(w, r->x[1]);                                                           \
        const B##_lane *q = at(w, r->x[2]);                                                           \
        EACH_LANE(const A a = (A)p[i]; const B b = (B)q[i]; d[i] = (D##_lane)RESULT_##D((D)(value));) \
    }
#define THREE(name, D, A, B, C, value)                                           \
    static void run_##name(struct warp *w, const struct row *r)                  \
    {                                                                            \
        D##_lane *d = at(w, r->x[0]);                                            \
        const A##_lane *p = at(w, r->x[1]);                                      \
        const B##_lane *q = at(w, r->x[2]);                                      \
        const C##_lane *s = at(w, r->x[3]);                                      \
        EACH_LANE(const A a = (A)p[i]; const B b = (B)q[i]; const C c = (C)s[i]; \
                  d[i] = (D##_lane)RESULT_##D((D)(value));)                      \
    }
#define HAND(name)
#include "cuda/instructions.def"
#undef ONE
#undef TWO
#undef THREE
#undef HAND

static void run_special(struct warp *w, const struct row *r)
{
    U32 *d = at(w, r->x[0]);
    const U32 first = (U32)(w - w->block->warps) * LANES;
    const U32 values[] = {first, (U32)w->block->index, (U32)grid_blocks, HSTEP_CUDA_THREADS};
    EACH_LANE(d[i] = values[r->x[1]] + (r->x[1] ? 0 : (U32)i);)
}

static void run_frame(struct warp *w, const struct row *r)
{
    U64 *d = at(w, r->x[0]);
    const U64 address = (U64)(w->frames[w->depth].local + r->offset);
    EACH_LANE(d[i] = address;)
}

/* Fills a register, which some way through the code reads before it writes. */
static void run_garbage(struct warp *w, const struct row *r)
{
    char *d = at(w, r->x[0]);
    for (U32 i = 0; i < r->x[1] * LANES; i += 4) memcpy(d + i, &GARBAGE, 4);
}

/* ---- Memory ---- */

static int is_parameter(U64 place, unsigned n)
{
    for (int i = 0; i < entry->parameter_count; i++) {
        const U64 first = (U64)entry->parameter_places[i];
        if (place >= first && place + n <= first + (U64)entry->parameters[i]) return 1;
    }
    return 0;
}

/* The address of a memory instruction in its space, for n bytes of each lane. */
struct reach {
    enum space space;
    enum hstep_access_kind kind;
    unsigned n;
};

/* Turns a generic address into one of shared or local memory if it is one. Returns the space. */
static enum space space_of(enum space space, U64 *a)
{
    if (space != GENERIC) return space;
    if (*a - windows[SHARED] < NOTHING) space = SHARED;
    else if (*a - windows[LOCAL] < NOTHING) space = LOCAL;
    else return GLOBAL;
    *a -= windows[space];
    return space;
}

/* Returns where lane i finds its bytes; lanes of `lanes` have the same address. The checks are those that every access
 * must pass. The watch knows more (watch.h). */
static char *locate(struct warp *w, const struct row *r, const struct reach *x, U64 a, int i, U32 lanes)
{
    const unsigned n = x->n;
    const struct frame *f = &w->frames[w->depth];
    const int watched_lane = lanes & (lanes - 1) ? HSTEP_LANES : i, watch = hstep_emulation.watch;
    if (a & (n - 1)) fault(w, r, "a misaligned address", a);
    switch (space_of(x->space, &a)) {
    case SHARED:
        if (a >= (U64)entry->shared || a + n > (U64)entry->shared) fault(w, r, "beyond shared memory", a);
        if (watch) {
            int inside = 0;
            for (int v = 0; v < entry->variables; v++)
                inside |= a >= (U64)entry->variable[v][0] && a + n <= (U64)entry->variable[v][1];
            if (!inside) fault(w, r, "beyond a variable of shared memory", a);
            hstep_watch_written(w->block->shared_written + a, n, ALL, x->kind, &w->place, i, r->line);
            hstep_watch(w->block->shared + a, n, x->kind, &w->place, watched_lane, r->line);
        }
        return w->block->shared + a;
    case LOCAL:
        if (a < LOCAL_FIRST || a + n > (U64)(f->local + f->function->frame + PARAMETER_BYTES))
            fault(w, r, "beyond local memory", a);
        if (watch) hstep_watch_written(w->local_written + a, n, lanes, x->kind, &w->place, i, r->line);
        return w->local + a / 4 * LOCAL_WORDS + (U64)i * 4 + a % 4;
    case CONSTANT:
        if (a < LOCAL_FIRST || a + n > (U64)constant_bytes) fault(w, r, "beyond constant memory", a);
        return constants + a;
    case PARAMETER:
        a -= (U64)(uintptr_t)parameters;
        if (!is_parameter(a, n)) fault(w, r, "beyond the parameters", a);
        return parameters + a;
    default:
        if (a < NOTHING) fault(w, r, "NULL, or an address of another kind of memory", a);
        if (a - windows[SHARED] < NOTHING || a - windows[LOCAL] < NOTHING)
            fault(w, r, "a global access to another kind of memory", a);
        if (watch) hstep_watch((char *)(uintptr_t)a, n, x->kind, &w->place, watched_lane, r->line);
        return (char *)(uintptr_t)a;
    }
}

/* Takes the next lane out of a set. Lanes that write to one place write in this order. */
static int take_lane(U32 *lanes)
{
    const int i = hstep_emulation.order == HSTEP_ORDER_REVERSE ? 31 - __builtin_clz(*lanes) : __builtin_ctz(*lanes);
    *lanes &= ~((U32)1 << i);
    return i;
}

/* Where lanes find their bytes. */
struct places {
    char *of[LANES];
    int same;   /* all lanes find the same bytes */
    int beside; /* all find their words beside each other in local memory, from of[0] on */
    U32 local;  /* lanes that find them in local memory */
};

static void locate_all(struct warp *w, const struct row *r, struct reach *x, const U64 *addresses, struct places *p)
{
    const int first = __builtin_ctz(w->mask);
    const U64 offset = (U64)(S64)r->offset;
    U64 a = x->space == FRAME ? (U64)w->frames[w->depth].local + offset : addresses[first] + offset, differ = 0;
    p->same = p->beside = 0;
    p->local = 0;
    if (x->space == FRAME) {
        x->space = LOCAL;
    } else if (w->mask == ALL) {
        for (int i = 0; i < LANES; i++) differ |= addresses[i] ^ addresses[0];
    } else {
        for (U32 left = w->mask; left; left &= left - 1) differ |= addresses[__builtin_ctz(left)] ^ addresses[first];
    }
    if (!differ) {
        U64 inside = a;
        if (space_of(x->space, &inside) == LOCAL) {
            p->of[0] = locate(w, r, x, a, first, w->mask) - first * 4;
            p->beside = 1;
            return;
        }
        if (x->kind < HSTEP_WRITES) {
            p->of[0] = locate(w, r, x, a, first, w->mask);
            p->same = 1;
            return;
        }
    } else if (w->mask == ALL && x->space <= GLOBAL && !hstep_emulation.watch) {
        U64 bad = 0;
        for (int i = 0; i < LANES; i++) {
            a = addresses[i] + offset;
            p->of[i] = (char *)(uintptr_t)a;
            bad |= (a & (x->n - 1)) | (U64)(a < NOTHING) | (U64)(a - windows[SHARED] < NOTHING) |
                   (U64)(a - windows[LOCAL] < NOTHING);
        }
        if (!bad) return;
    } else if (w->mask == ALL && x->space == SHARED && !hstep_emulation.watch) {
        U64 bad = 0;
        for (int i = 0; i < LANES; i++) {
            a = addresses[i] + offset;
            p->of[i] = w->block->shared + a;
            bad |= (a & (x->n - 1)) | (U64)(a > (U64)entry->shared) | (U64)(a + x->n > (U64)entry->shared);
        }
        if (!bad) return;
    }
    for (U32 left = w->mask; left;) {
        const int i = take_lane(&left);
        U64 inside = a = x->space == LOCAL && !differ ? a : addresses[i] + offset;
        p->of[i] = locate(w, r, x, a, i, (U32)1 << i);
        p->local |= (U32)(space_of(x->space, &inside) == LOCAL) << i;
    }
}

/* Returns where byte n of a lane's bytes is. */
static char *byte_of(const struct places *p, int i, int n)
{
    return p->of[i] + (p->local >> i & 1 ? n / 4 * LOCAL_WORDS + n % 4 : n);
}

/* Reads a number of 1, 2 or 4 bytes. */
static inline __attribute__((always_inline)) U64 number_at(const char *p, int size)
{
    U8 byte;
    U16 half;
    U32 word;
    switch (size) {
    case 1: memcpy(&byte, p, 1); return byte;
    case 2: memcpy(&half, p, 2); return half;
    default: memcpy(&word, p, 4); return word;
    }
}

/* Moves a number between a register's lane and memory. Numbers of 8 bytes lie in two words. */
static inline __attribute__((always_inline)) void move_lane(char *lane, char *low, char *high, int size, int how,
                                                            int is_store)
{
    const int part = size < 4 ? size : 4, unused = how & HOW_SIGNED ? 64 - 8 * size : 0;
    if (is_store) {
        memcpy(low, lane, (size_t)part);
        if (size == 8) memcpy(high, lane + 4, 4);
        return;
    }
    U64 value = number_at(low, part);
    if (size == 8) value |= number_at(high, 4) << 32;
    value = (U64)((S64)(value << unused) >> unused);
    if (how & HOW_WIDE) memcpy(lane, &value, 8);
    else memcpy(lane, &(U32){(U32)value}, 4);
}

/* flags: HOW_SIGNED and HOW_WIDE, which are constants where they are usual. */
static inline __attribute__((always_inline)) void move(struct warp *w, const struct row *r, int size, int flags,
                                                       int is_store)
{
    const int count = 1 << (r->how >> HOW_COUNT & 3), wide = flags & HOW_WIDE ? 8 : 4;
    const enum hstep_access_kind reads = r->how & HOW_CONSTANT   ? HSTEP_READS_CONSTANT
                                         : r->how & HOW_VOLATILE ? HSTEP_READS_VOLATILE
                                                                 : HSTEP_READS;
    struct reach x = {r->how & HOW_SPACE, is_store ? HSTEP_WRITES : reads, (unsigned)(size * count)};
    struct places p;
    locate_all(w, r, &x, at(w, r->x[4]), &p);
    for (int k = 0; k < count; k++) {
        char *lanes = at(w, r->x[k]), *words = p.of[0];
        if (p.beside) {
            words += k * size / 4 * LOCAL_WORDS + k * size % 4;
            EACH_LANE(move_lane(lanes + i * wide, words + i * 4, words + i * 4 + LOCAL_WORDS, size, flags, is_store);)
        } else if (p.same) {
            words += k * size;
            EACH_LANE(move_lane(lanes + i * wide, words, words + 4, size, flags, 0);)
        } else if (!is_store && !p.local) {
            EACH_LANE(char *place = p.of[i] + k * size; move_lane(lanes + i * wide, place, place + 4, size, flags, 0);)
        } else {
            for (U32 left = w->mask; left;) {
                const int i = take_lane(&left);
                move_lane(lanes + i * wide, byte_of(&p, i, k * size), byte_of(&p, i, k * size + 4), size, flags,
                          is_store);
            }
        }
    }
}

static inline __attribute__((always_inline)) void move_any(struct warp *w, const struct row *r, int is_store)
{
    const int flags = r->how & (HOW_SIGNED | HOW_WIDE), size = r->how >> HOW_SIZE & 3;
    if (size == 0) move(w, r, 1, flags, is_store);
    else if (size == 1) move(w, r, 2, flags, is_store);
    else if (size == 3) move(w, r, 8, HOW_WIDE, is_store);
    else if (flags) move(w, r, 4, flags, is_store);
    else move(w, r, 4, 0, is_store);
}

static void run_ld(struct warp *w, const struct row *r) { move_any(w, r, 0); }
static void run_st(struct warp *w, const struct row *r) { move_any(w, r, 1); }

static void run_atom_add(struct warp *w, const struct row *r)
{
    U64 *d = at(w, r->x[0]);
    const U64 *terms = at(w, r->x[1]);
    struct places p;
    locate_all(w, r, &(struct reach){r->how & HOW_SPACE, HSTEP_ADDS, 8}, at(w, r->x[2]), &p);
    if (p.beside || p.local) fault(w, r, "an atomic addition to local memory", 0);
    for (U32 left = w->mask; left;) {
        const int i = take_lane(&left);
        U64 before, after;
        memcpy(&before, p.of[i], 8);
        after = before + terms[i];
        memcpy(p.of[i], &after, 8);
        d[i] = before;
    }
}

/* ---- Ways of lanes ---- */

static void add_group(struct frame *f, struct group g)
{
    if (!g.mask) return;
    for (int k = 0; k < f->count; k++)
        if (f->groups[k].pc == g.pc && f->groups[k].parked == g.parked) {
            f->groups[k].mask |= g.mask;
            return;
        }
    f->groups[f->count++] = g;
}

/* Returns the first group in the code that is no further than `parked`, or -1. */
static int first_group(const struct frame *f, int parked)
{
    int first = -1;
    for (int k = 0; k < f->count; k++)
        if ((int)f->groups[k].parked <= parked && (first < 0 || f->groups[k].pc < f->groups[first].pc)) first = k;
    return first;
}

/* Chooses the group that runs: a free one before one at a call, so that lanes make a call together. If all groups are
 * at a meeting, it must be one for the whole warp. A function that all its lanes have left goes back to its caller. */
static void regroup(struct warp *w)
{
    struct frame *f = &w->frames[w->depth];
    add_group(f, (struct group){w->pc, w->mask, FREE});
    while (!f->count) {
        if (!w->depth) {
            w->state = DONE;
            return;
        }
        const struct group resumes = f->resumes;
        f = &w->frames[--w->depth];
        w->bases[0] = f->registers;
        add_group(f, resumes);
    }
    int first = FREE;
    for (int parked = FREE; (first = first_group(f, parked)) < 0; parked++) continue;
    const struct group g = f->groups[first];
    w->pc = g.pc;
    w->mask = g.mask;
    if (g.parked == AT_MEETING && g.mask != ALL) {
        const struct row *r = &ptx_rows[g.pc];
        if (f->count > 1) fault(w, r, "lanes of a warp meet in two places", f->groups[1].pc);
        fault(w, r, "lanes wait for others, which have left or are elsewhere", f->mask);
    }
    w->calls = g.parked == AT_CALL;
    f->groups[first] = f->groups[--f->count];
    first = first_group(f, FREE);
    w->limit = first < 0 ? UINT32_MAX : f->groups[first].pc;
}

/* Lets the group wait for others at the instruction that it has come to. */
static void park(struct warp *w, int parked)
{
    add_group(&w->frames[w->depth], (struct group){w->pc - 1, w->mask, parked});
    w->mask = w->limit = 0;
}

/* Returns 1 if the whole warp is here. Otherwise the group waits for the others. */
static int is_met(struct warp *w)
{
    if (w->mask != ALL) park(w, AT_MEETING);
    return w->mask == ALL;
}

static void run_bra(struct warp *w, const struct row *r)
{
    U32 taken = w->mask;
    if (r->how) {
        const P *p = at(w, r->x[1]);
        U32 ones = 0;
        for (int i = 0; i < LANES; i++) ones |= (p[i] & 1) << i; /* other lanes may hold anything */
        taken &= r->how == 1 ? ones : ~ones;
    }
    if (taken == w->mask) {
        w->pc = r->x[0];
    } else if (taken) {
        add_group(&w->frames[w->depth], (struct group){r->x[0], taken, FREE});
        w->mask &= ~taken;
        w->limit = w->limit < r->x[0] ? w->limit : r->x[0];
    }
}

static void enter(struct warp *w, const struct row *r, int index, U32 lanes)
{
    struct frame *f = &w->frames[w->depth], *g = f + 1;
    const struct function *function = &ptx_functions[index];
    if (f->count && !w->calls) {
        park(w, AT_CALL);
        return;
    }
    if (w->depth + 1 >= DEPTH) fault(w, r, "calls are too deep", 0);
    g->registers = f->registers + f->function->registers;
    g->local = f->local + f->function->callees;
    if (g->registers + function->registers > w->registers + REGISTERS ||
        g->local + function->frame + PARAMETER_BYTES > LOCAL_BYTES)
        fault(w, r, "no room for a frame", 0);
    g->function = function;
    g->mask = lanes;
    g->resumes = (struct group){w->pc, lanes, FREE};
    g->count = 0;
    if (w->mask != lanes) add_group(f, (struct group){w->pc - 1, w->mask & ~lanes, FREE});
    w->depth++;
    w->bases[0] = g->registers;
    w->pc = (U32)function->first;
    w->mask = lanes;
    w->limit = UINT32_MAX;
    if (hstep_emulation.watch)
        for (int i = g->local + function->local; i < g->local + function->frame + PARAMETER_BYTES; i++)
            w->local_written[i] &= ~lanes;
}

static void run_call(struct warp *w, const struct row *r) { enter(w, r, (int)r->x[0], w->mask); }

/* Calls the function of the first lane for all lanes that want the same one. The others come again. */
static void run_call_indirect(struct warp *w, const struct row *r)
{
    const U64 *targets = at(w, r->x[0]), target = targets[__builtin_ctz(w->mask)];
    U32 same = 0;
    for (int i = 0; i < LANES; i++) same |= (U32)(targets[i] == target) << i;
    if (target - FUNCTION_ADDRESS >= (U64)ptx_function_count) fault(w, r, "not a function", target);
    enter(w, r, (int)(target - FUNCTION_ADDRESS), same & w->mask);
}

static void run_ret(struct warp *w, const struct row *r)
{
    (void)r;
    w->frames[w->depth].mask &= ~w->mask;
    w->mask = w->limit = 0;
}

static void run_shfl(struct warp *w, const struct row *r)
{
    U32 *d = at(w, r->x[0]), given[LANES];
    const U32 *x = at(w, r->x[1]), *mask = at(w, r->x[2]);
    if (!is_met(w)) return;
    memcpy(given, x, sizeof given);
    for (int i = 0; i < LANES; i++) {
        if (mask[i] >= LANES) fault(w, r, "an exchange beyond the warp", mask[i]);
        d[i] = given[(U32)i ^ mask[i]];
    }
}

static void run_bar_warp_sync(struct warp *w, const struct row *r)
{
    (void)r;
    if (is_met(w)) w->place.warp_since = hstep_watch_now();
}

static void run_bar_sync(struct warp *w, const struct row *r)
{
    (void)r;
    if (!is_met(w)) return;
    w->state = AT_BARRIER;
}

/* ---- Warps and blocks ---- */

typedef void instruction(struct warp *, const struct row *);
static instruction *const instructions[] = {
#define HAND(name) run_##name,
#define ONE(name, ...) run_##name,
#define TWO ONE
#define THREE ONE
#include "cuda/instructions.def"
};

/* Runs a warp until it waits for other warps or has left, or for so many instructions. */
static void run_warp(struct warp *w, long most)
{
    while (w->state == RUNNING && most > 0) {
        regroup(w);
        while (w->state == RUNNING && most-- > 0) {
            const struct row *r = &ptx_rows[w->pc++];
            instructions[r->op](w, r);
            if (w->pc >= w->limit) break;
        }
    }
}

static char *memory(size_t bytes, int protection)
{
    char *p = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        abort();
    }
    return p;
}

static struct block *new_block(void)
{
    enum { LOCALS = LANES * LOCAL_BYTES };
    struct block *b = calloc(1, sizeof *b);
    if (!b) abort();
    b->shared = memory(NOTHING, PROT_READ | PROT_WRITE);
    b->shared_written = (uint32_t *)(void *)memory(NOTHING * sizeof(uint32_t), PROT_READ | PROT_WRITE);
    for (int i = 0; i < WARPS; i++) {
        struct warp *w = &b->warps[i];
        w->block = b;
        w->registers = memory(REGISTERS, PROT_READ | PROT_WRITE);
        w->local = memory(LOCALS, PROT_READ | PROT_WRITE);
        w->local_written = (uint32_t *)(void *)memory(LOCAL_BYTES * sizeof(uint32_t), PROT_READ | PROT_WRITE);
        w->bases[1] = pool;
    }
    return b;
}

static void begin_block(struct block *b, int index)
{
    memset(b->shared, 0xa5, (size_t)entry->shared);
    memset(b->shared_written, 0, (size_t)entry->shared * sizeof *b->shared_written);
    if (hstep_emulation.watch) hstep_watch_forget(b->shared, (unsigned)entry->shared);
    b->index = index;
    for (int i = 0; i < WARPS; i++) {
        struct warp *w = &b->warps[i];
        w->place = (struct hstep_place){(uint32_t)index, (uint32_t)i, 0, 0};
        w->frames[0] = (struct frame){.function = entry, .mask = ALL, .registers = w->registers, .local = LOCAL_FIRST};
        w->bases[0] = w->registers;
        w->depth = 0;
        w->pc = (U32)entry->first;
        w->mask = ALL;
        w->state = RUNNING;
        if (hstep_emulation.watch)
            memset(w->local_written, 0,
                   (size_t)(LOCAL_FIRST + entry->frame + PARAMETER_BYTES) * sizeof *w->local_written);
    }
}

/* Lets the warps of a block go on if all wait at its barrier. Returns 1 if some warp can run. */
static int release(struct block *b)
{
    int waiting = 0, done = 0;
    for (int i = 0; i < WARPS; i++) {
        waiting += b->warps[i].state == AT_BARRIER;
        done += b->warps[i].state == DONE;
    }
    if (waiting + done < WARPS) return 1;
    if (!waiting) return 0;
    const uint64_t now = hstep_watch_now();
    for (int i = 0; i < WARPS; i++) {
        struct warp *w = &b->warps[i];
        const struct row *r = &ptx_rows[w->pc - 1];
        if (done) fault(w, r, "a barrier that some warps have left (or wait at)", (U64)done);
        if (w->pc != b->warps[0].pc) fault(w, r, "two barriers of a block", (U64)b->warps[0].pc);
        w->place.block_since = now;
        w->state = RUNNING;
    }
    return 1;
}

static void run_in_order(int grid)
{
    const int reverse = hstep_emulation.order == HSTEP_ORDER_REVERSE;
    for (int i = 0; i < grid; i++) {
        begin_block(blocks[0], reverse ? grid - 1 - i : i);
        do
            for (int k = 0; k < WARPS; k++) run_warp(&blocks[0]->warps[reverse ? WARPS - 1 - k : k], LONG_MAX);
        while (release(blocks[0]));
    }
}

static void run_in_any_order(int grid)
{
    for (int first = 0; first < grid; first += MOST_BLOCKS) {
        const int n = grid - first < MOST_BLOCKS ? grid - first : MOST_BLOCKS;
        int alive = n;
        for (int i = 0; i < n; i++) {
            if (!blocks[i]) blocks[i] = new_block();
            begin_block(blocks[i], first + i);
        }
        while (alive) {
            const uint64_t x = next_random();
            struct block *b = blocks[x % (uint64_t)n];
            struct warp *w = &b->warps[x >> 16 & (WARPS - 1)];
            if (w->state != RUNNING) continue;
            run_warp(w, (long)(1 + (x >> 32) % 64));
            if (w->state != RUNNING && !release(b)) alive--;
        }
    }
}

/* ---- Launches ---- */

static U64 pooled_value(const struct pooled *x)
{
    switch (x->of) {
    case A_VARIABLE: return (U64)(uintptr_t)variables[x->index] + x->number;
    case A_FUNCTION: return FUNCTION_ADDRESS + (U64)x->index;
    case A_PARAMETER: return (U64)(uintptr_t)parameters + x->number;
    default: return x->number;
    }
}

static void initialize(void)
{
    if (pool) return;
    /* Constants have addresses of their own, global variables the process's. */
    size_t bytes[2] = {0, LOCAL_FIRST};
    for (int i = 0; i < ptx_variable_count; i++)
        bytes[ptx_variables[i].is_constant] += ((size_t)ptx_variables[i].bytes + 63) / 64 * 64;
    char *globals = memory(bytes[0] + 1, PROT_READ | PROT_WRITE);
    constants = memory(bytes[1], PROT_READ | PROT_WRITE);
    constant_bytes = (int)bytes[1];
    windows[SHARED] = (U64)(uintptr_t)memory(NOTHING, PROT_NONE);
    windows[LOCAL] = (U64)(uintptr_t)memory(NOTHING, PROT_NONE);
    windows[CONSTANT] = (U64)(uintptr_t)constants;
    variables = calloc((size_t)ptx_variable_count + 1, sizeof *variables);
    pool = memory((size_t)ptx_pool_bytes + 1, PROT_READ | PROT_WRITE);
    if (!variables) abort();
    bytes[0] = 0;
    bytes[1] = LOCAL_FIRST;
    for (int i = 0; i < ptx_variable_count; i++) {
        const struct variable *v = &ptx_variables[i];
        variables[i] = v->is_constant ? (char *)(uintptr_t)bytes[1] : globals + bytes[0];
        bytes[v->is_constant] += ((size_t)v->bytes + 63) / 64 * 64;
    }
    for (int i = 0; i < ptx_variable_count; i++) {
        const struct variable *v = &ptx_variables[i];
        char *p = v->is_constant ? constants + (uintptr_t)variables[i] : variables[i];
        if (v->n) memcpy(p, v->initial, (size_t)v->n);
        for (const struct pooled *a = v->addresses; a && a->bytes; a++) {
            const int generic = a->of == A_VARIABLE && ptx_variables[a->index].is_constant;
            const U64 value = pooled_value(a) + (generic ? windows[CONSTANT] : 0);
            memcpy(p + a->place, &value, 8);
        }
    }
    for (int i = 0; i < ptx_pool_count; i++) {
        const struct pooled *x = &ptx_pool[i];
        const U64 value = pooled_value(x);
        for (int lane = 0; lane < LANES; lane++) memcpy(pool + x->place + lane * x->bytes, &value, (size_t)x->bytes);
    }
    blocks[0] = new_block();
}

static const struct function *find(const char *name)
{
    for (int i = 0; i < ptx_function_count; i++)
        if (ptx_functions[i].is_entry && !strcmp(ptx_functions[i].name, name)) return &ptx_functions[i];
    return NULL;
}

__attribute__((visibility("default"))) int hstep_emulate_entry(const char *name, int grid, void **arguments)
{
    entry = find(name);
    if (!entry) return -1;
    initialize();
    /* Something else lies behind what a launch copies. */
    memset(parameters, 0xee, sizeof parameters);
    for (int i = 0; i < entry->parameter_count; i++)
        memcpy(parameters + entry->parameter_places[i], arguments[i], (size_t)entry->parameters[i]);
    grid_blocks = grid;
    hstep_watch_launch(name);
    seed = hstep_emulation.seed + hstep_watch_now();
    if (hstep_emulation.order == HSTEP_ORDER_RANDOM) run_in_any_order(grid);
    else run_in_order(grid);
    return 0;
}

/* ---- The interface ---- */

#define KERNEL(name, shape) {"halfstep_cuda_" #name, NULL, shape},
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
const struct hstep_emulated_kernel hstep_emulated_kernels[] = {
#include "device/cuda/code/kernels.def"
};
const int hstep_emulated_kernel_count = sizeof hstep_emulated_kernels / sizeof *hstep_emulated_kernels;

int hstep_emulated_is_empty(const struct hstep_emulated_kernel *kernel)
{
    const struct function *f = find(kernel->name);
    return !f || instructions[ptx_rows[f->first].op] == run_ret;
}

int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **arguments)
{
    if (block != HSTEP_CUDA_THREADS || grid < 1 || shared || (kernel->shape == HSTEP_CUDA_ONE && grid != 1)) return -1;
    return hstep_emulate_entry(kernel->name, grid, arguments);
}

#endif
