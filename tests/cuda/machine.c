/* See emulate.h. Runs rows that translate.py has made of PTX, for 32 lanes at once, as a GPU does.
 *
 * Lanes of a warp that go different ways form groups. The group that is first in the code runs, so that groups join
 * again where their ways do. An exchange or a barrier waits for all lanes of the warp. It is a fault if some cannot
 * come: they have left, or wait at another place. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda/warp.h"

enum { MOST_BLOCKS = 4 }; /* of a launch in random order, at a time */

struct hstep_emulation hstep_emulation;
struct hstep_machine hstep_machine;
static struct block *blocks[MOST_BLOCKS];
static char **variables;
static const uint64_t FUNCTION_ADDRESS = (uint64_t)1 << 62; /* of function 0; indirect calls take it */
static uint64_t seed;

static uint64_t next_random(void)
{
    seed += 0x9E3779B97F4A7C15;
    uint64_t z = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

void hstep_machine_fault(const struct warp *w, const struct row *r, const char *what, uint64_t address)
{
    fprintf(stderr, "%s: block %d, warp %d, lanes %#x, PTX line %d: %s (%#llx)\n", hstep_machine.entry->name,
            w->block->index, (int)(w - w->block->warps), (unsigned)w->mask, (int)r->line, what,
            (unsigned long long)address);
    abort();
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
        if (f->count > 1) hstep_machine_fault(w, r, "lanes of a warp meet in two places", f->groups[1].pc);
        hstep_machine_fault(w, r, "lanes wait for others, which have left or are elsewhere", f->mask);
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

void hstep_run_bra(struct warp *w, const struct row *r)
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
    if (w->depth + 1 >= DEPTH) hstep_machine_fault(w, r, "calls are too deep", 0);
    g->registers = f->registers + f->function->registers;
    g->local = f->local + f->function->callees;
    if (g->registers + function->registers > w->registers + REGISTERS ||
        g->local + function->frame + PARAMETER_BYTES > LOCAL_BYTES)
        hstep_machine_fault(w, r, "no room for a frame", 0);
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

void hstep_run_call(struct warp *w, const struct row *r) { enter(w, r, (int)r->x[0], w->mask); }

/* Calls the function of the first lane for all lanes that want the same one. The others come again. */
void hstep_run_call_indirect(struct warp *w, const struct row *r)
{
    const U64 *targets = at(w, r->x[0]), target = targets[__builtin_ctz(w->mask)];
    U32 same = 0;
    for (int i = 0; i < LANES; i++) same |= (U32)(targets[i] == target) << i;
    if (target - FUNCTION_ADDRESS >= (U64)ptx_function_count) hstep_machine_fault(w, r, "not a function", target);
    enter(w, r, (int)(target - FUNCTION_ADDRESS), same & w->mask);
}

void hstep_run_ret(struct warp *w, const struct row *r)
{
    (void)r;
    w->frames[w->depth].mask &= ~w->mask;
    w->mask = w->limit = 0;
}

void hstep_run_shfl(struct warp *w, const struct row *r)
{
    U32 *d = at(w, r->x[0]), given[LANES];
    const U32 *x = at(w, r->x[1]), *mask = at(w, r->x[2]);
    if (!is_met(w)) return;
    memcpy(given, x, sizeof given);
    for (int i = 0; i < LANES; i++) {
        if (mask[i] >= LANES) hstep_machine_fault(w, r, "an exchange beyond the warp", mask[i]);
        d[i] = given[(U32)i ^ mask[i]];
    }
}

void hstep_run_vote_any(struct warp *w, const struct row *r)
{
    P *d = at(w, r->x[0]), any = 0;
    const P *x = at(w, r->x[1]);
    if (!is_met(w)) return;
    for (int i = 0; i < LANES; i++) any |= x[i];
    for (int i = 0; i < LANES; i++) d[i] = any;
}

void hstep_run_bar_warp_sync(struct warp *w, const struct row *r)
{
    (void)r;
    if (is_met(w)) w->place.warp_since = hstep_watch_now();
}

void hstep_run_bar_sync(struct warp *w, const struct row *r)
{
    (void)r;
    if (!is_met(w)) return;
    w->state = AT_BARRIER;
}

/* ---- Warps and blocks ---- */

/* Runs a warp until it waits for other warps or has left, or for so many instructions. Returns how many are left. */
static long run_warp(struct warp *w, long most)
{
    while (w->state == RUNNING && most > 0) {
        regroup(w);
        while (w->state == RUNNING && most-- > 0) {
            const struct row *r = &ptx_rows[w->pc++];
            hstep_instructions[r->op](w, r);
            if (w->pc >= w->limit) break;
        }
    }
    return most;
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
        w->bases[1] = hstep_machine.pool;
    }
    return b;
}

static void begin_block(struct block *b, int index)
{
    memset(b->shared, 0xa5, (size_t)hstep_machine.entry->shared);
    memset(b->shared_written, 0, (size_t)hstep_machine.entry->shared * sizeof *b->shared_written);
    if (hstep_emulation.watch) hstep_watch_forget(b->shared, (unsigned)hstep_machine.entry->shared);
    b->index = index;
    for (int i = 0; i < WARPS; i++) {
        struct warp *w = &b->warps[i];
        w->place = (struct hstep_place){(uint32_t)index, (uint32_t)i, 0, 0};
        w->frames[0] = (struct frame){
            .function = hstep_machine.entry, .mask = ALL, .registers = w->registers, .local = LOCAL_FIRST};
        w->bases[0] = w->registers;
        w->depth = 0;
        w->pc = (U32)hstep_machine.entry->first;
        w->mask = ALL;
        w->state = RUNNING;
        if (hstep_emulation.watch)
            memset(w->local_written, 0,
                   (size_t)(LOCAL_FIRST + hstep_machine.entry->frame + PARAMETER_BYTES) * sizeof *w->local_written);
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
        if (done) hstep_machine_fault(w, r, "a barrier that some warps have left (or wait at)", (U64)done);
        if (w->pc != b->warps[0].pc) hstep_machine_fault(w, r, "two barriers of a block", (U64)b->warps[0].pc);
        w->place.block_since = now;
        w->state = RUNNING;
    }
    return 1;
}

static void run_in_order(int grid)
{
    const int reverse = hstep_emulation.order == HSTEP_ORDER_REVERSE;
    long left = hstep_emulation.most ? hstep_emulation.most : LONG_MAX;
    for (int i = 0; i < grid; i++) {
        begin_block(blocks[0], reverse ? grid - 1 - i : i);
        do
            for (int k = 0; k < WARPS; k++) {
                struct warp *w = &blocks[0]->warps[reverse ? WARPS - 1 - k : k];
                left = run_warp(w, left);
                if (left <= 0)
                    hstep_machine_fault(w, &ptx_rows[w->pc], "too many instructions", (U64)hstep_emulation.most);
            }
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
    case A_PARAMETER: return (U64)(uintptr_t)hstep_machine.parameters + x->number;
    default: return x->number;
    }
}

static void initialize(void)
{
    if (hstep_machine.pool) return;
    /* Constants have addresses of their own, global variables the process's. */
    size_t bytes[2] = {0, LOCAL_FIRST};
    for (int i = 0; i < ptx_variable_count; i++)
        bytes[ptx_variables[i].is_constant] += ((size_t)ptx_variables[i].bytes + 63) / 64 * 64;
    char *globals = memory(bytes[0] + 1, PROT_READ | PROT_WRITE);
    hstep_machine.constants = memory(bytes[1], PROT_READ | PROT_WRITE);
    hstep_machine.constant_bytes = (int)bytes[1];
    hstep_machine.windows[SHARED] = (U64)(uintptr_t)memory(NOTHING, PROT_NONE);
    hstep_machine.windows[LOCAL] = (U64)(uintptr_t)memory(NOTHING, PROT_NONE);
    hstep_machine.windows[CONSTANT] = (U64)(uintptr_t)hstep_machine.constants;
    variables = calloc((size_t)ptx_variable_count + 1, sizeof *variables);
    hstep_machine.pool = memory((size_t)ptx_pool_bytes + LANES * sizeof(U64), PROT_READ | PROT_WRITE);
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
        char *p = v->is_constant ? hstep_machine.constants + (uintptr_t)variables[i] : variables[i];
        if (v->n) memcpy(p, v->initial, (size_t)v->n);
        for (const struct pooled *a = v->addresses; a && a->bytes; a++) {
            const int generic = a->of == A_VARIABLE && ptx_variables[a->index].is_constant;
            const U64 value = pooled_value(a) + (generic ? hstep_machine.windows[CONSTANT] : 0);
            memcpy(p + a->place, &value, 8);
        }
    }
    for (int i = 0; i < ptx_pool_count; i++) {
        const struct pooled *x = &ptx_pool[i];
        const U64 value = pooled_value(x);
        for (int lane = 0; lane < LANES; lane++)
            memcpy(hstep_machine.pool + x->place + lane * x->bytes, &value, (size_t)x->bytes);
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
    hstep_machine.entry = find(name);
    if (!hstep_machine.entry) return -1;
    initialize();
    /* Something else lies behind what a launch copies. */
    memset(hstep_machine.parameters, 0xee, sizeof hstep_machine.parameters);
    for (int i = 0; i < hstep_machine.entry->parameter_count; i++)
        memcpy(hstep_machine.parameters + hstep_machine.entry->parameter_places[i], arguments[i],
               (size_t)hstep_machine.entry->parameters[i]);
    hstep_machine.blocks = grid;
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
    return !f || hstep_instructions[ptx_rows[f->first].op] == hstep_run_ret;
}

int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **arguments)
{
    if (block != HSTEP_CUDA_THREADS || grid < 1 || shared || (kernel->shape == HSTEP_CUDA_ONE && grid != 1)) return -1;
    return hstep_emulate_entry(kernel->name, grid, arguments);
}
