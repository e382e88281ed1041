/* The instructions that reach memory. A generic address is the process's own, except for shared and local memory, which
 * have windows of addresses where nothing lies. */
#include <string.h>

#include "cuda/warp.h"

static int is_parameter(U64 place, unsigned n)
{
    for (int i = 0; i < hstep_machine.entry->parameter_count; i++) {
        const U64 first = (U64)hstep_machine.entry->parameter_places[i];
        if (place >= first && place + n <= first + (U64)hstep_machine.entry->parameters[i]) return 1;
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
    if (*a - hstep_machine.windows[SHARED] < NOTHING) space = SHARED;
    else if (*a - hstep_machine.windows[LOCAL] < NOTHING) space = LOCAL;
    else return GLOBAL;
    *a -= hstep_machine.windows[space];
    return space;
}

/* Returns where lane i finds its bytes; lanes of `lanes` have the same address. The checks are those that every access
 * must pass. The watch knows more (watch.h). */
static char *locate(struct warp *w, const struct row *r, const struct reach *x, U64 a, int i, U32 lanes)
{
    const unsigned n = x->n;
    const struct frame *f = &w->frames[w->depth];
    const int watched_lane = lanes & (lanes - 1) ? HSTEP_LANES : i, watch = hstep_emulation.watch;
    if (a & (n - 1)) hstep_machine_fault(w, r, "a misaligned address", a);
    switch (space_of(x->space, &a)) {
    case SHARED:
        if (a >= (U64)hstep_machine.entry->shared || a + n > (U64)hstep_machine.entry->shared)
            hstep_machine_fault(w, r, "beyond shared memory", a);
        if (watch) {
            int inside = 0;
            for (int v = 0; v < hstep_machine.entry->variables; v++)
                inside |=
                    a >= (U64)hstep_machine.entry->variable[v][0] && a + n <= (U64)hstep_machine.entry->variable[v][1];
            if (!inside) hstep_machine_fault(w, r, "beyond a variable of shared memory", a);
            hstep_watch_written(w->block->shared_written + a, n, ALL, x->kind, &w->place, i, r->line);
            hstep_watch(w->block->shared + a, n, x->kind, &w->place, watched_lane, r->line);
        }
        return w->block->shared + a;
    case LOCAL:
        if (a < LOCAL_FIRST || a + n > (U64)(f->local + f->function->frame + PARAMETER_BYTES))
            hstep_machine_fault(w, r, "beyond local memory", a);
        if (watch) hstep_watch_written(w->local_written + a, n, lanes, x->kind, &w->place, i, r->line);
        return w->local + a / 4 * LOCAL_WORDS + (U64)i * 4 + a % 4;
    case CONSTANT:
        if (a < LOCAL_FIRST || a + n > (U64)hstep_machine.constant_bytes)
            hstep_machine_fault(w, r, "beyond constant memory", a);
        return hstep_machine.constants + a;
    case PARAMETER:
        a -= (U64)(uintptr_t)hstep_machine.parameters;
        if (!is_parameter(a, n)) hstep_machine_fault(w, r, "beyond the parameters", a);
        return hstep_machine.parameters + a;
    default:
        if (a < NOTHING) hstep_machine_fault(w, r, "NULL, or an address of another kind of memory", a);
        if (a - hstep_machine.windows[SHARED] < NOTHING || a - hstep_machine.windows[LOCAL] < NOTHING)
            hstep_machine_fault(w, r, "a global access to another kind of memory", a);
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
            bad |= (a & (x->n - 1)) | (U64)(a < NOTHING) | (U64)(a - hstep_machine.windows[SHARED] < NOTHING) |
                   (U64)(a - hstep_machine.windows[LOCAL] < NOTHING);
        }
        if (!bad) return;
    } else if (w->mask == ALL && x->space == SHARED && !hstep_emulation.watch) {
        U64 bad = 0;
        for (int i = 0; i < LANES; i++) {
            a = addresses[i] + offset;
            p->of[i] = w->block->shared + a;
            bad |= (a & (x->n - 1)) | (U64)(a > (U64)hstep_machine.entry->shared) |
                   (U64)(a + x->n > (U64)hstep_machine.entry->shared);
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

void hstep_run_ld(struct warp *w, const struct row *r) { move_any(w, r, 0); }
void hstep_run_st(struct warp *w, const struct row *r) { move_any(w, r, 1); }

void hstep_run_atom_add(struct warp *w, const struct row *r)
{
    U64 *d = at(w, r->x[0]);
    const U64 *terms = at(w, r->x[1]);
    struct places p;
    locate_all(w, r, &(struct reach){r->how & HOW_SPACE, HSTEP_ADDS, 8}, at(w, r->x[2]), &p);
    if (p.beside || p.local) hstep_machine_fault(w, r, "an atomic addition to local memory", 0);
    for (U32 left = w->mask; left;) {
        const int i = take_lane(&left);
        U64 before, after;
        memcpy(&before, p.of[i], 8);
        after = before + terms[i];
        memcpy(p.of[i], &after, 8);
        d[i] = before;
    }
}
