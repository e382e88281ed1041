/* See emulate.h. */
#ifndef _WIN32
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#if defined(__GNUC__) && !defined(__clang__)
/* The compiler cannot know that no format keeps more than 16 bits beside a code. */
#pragma GCC diagnostic ignored "-Wstringop-overflow"
#endif
#define HSTEP_CUDA_EMULATED 1
#include "device/cuda/code/kernels.cu"

#include "cuda/emulate.h"

#include <stdio.h>
#include <stdlib.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

/* ---- Fibers ---- */

enum { THREADS = HSTEP_CUDA_THREADS, STACK = 64 << 10 };

#if defined(__x86_64__)
/* A switch saves the callee-saved registers on the stack it leaves. */
typedef void *fiber;
void hstep_fiber_switch(fiber *from, fiber *to);
__asm__(".text\n.globl hstep_fiber_switch\nhstep_fiber_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov (%rsi),%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
static void fiber_start(fiber *f, char *stack, void (*entry)(void))
{
    void **top = (void **)(void *)(stack + STACK);
    *--top = NULL;
    *--top = (void *)(uintptr_t)entry;
    for (int i = 0; i < 6; i++) *--top = NULL;
    *f = top;
}
#else
typedef ucontext_t fiber;
static void hstep_fiber_switch(fiber *from, fiber *to) { swapcontext(from, to); }
static void fiber_start(fiber *f, char *stack, void (*entry)(void))
{
    getcontext(f);
    f->uc_stack.ss_sp = stack;
    f->uc_stack.ss_size = STACK;
    f->uc_link = NULL;
    makecontext(f, entry, 0);
}
#endif

enum state { READY, AT_EXCHANGE, AT_WARP, AT_BLOCK, DONE };

static fiber threads[THREADS], scheduler;
static char *stacks;
static enum state state[THREADS];
static uint32_t given[2][THREADS];
static unsigned char parity[THREADS];
static int current, block_index, block_count;
static void (*the_run)(void **);
static void **the_parameters;

static void meet(enum state at)
{
    state[current] = at;
    hstep_fiber_switch(&threads[current], &scheduler);
}

int hstep_emulated_thread(void) { return current; }
int hstep_emulated_block(void) { return block_index; }
int hstep_emulated_blocks(void) { return block_count; }
void hstep_emulated_barrier(void) { meet(AT_BLOCK); }
void hstep_emulated_warp_barrier(void) { meet(AT_WARP); }

/* Returns a factor within the error that PTX documents, chosen by the bits of x. Code that is right on every GPU gives
 * the same results with it. */
static double astray(float x, double most)
{
    const uint32_t hash = hstep_pattern(x) * 0x9E3779B9u >> 8;
    return 1.0 + most * ((double)hash * 0x1p-23 - 1.0);
}
float hstep_emulated_rsqrt(float x) { return (float)(astray(x, 0x1p-23) / sqrt((double)x)); }

/* The fast ways of vec/cuda_roots.h, right within a range that the caller must check. A GPU's estimate of the root has
 * been tried with all roots. This one is nearer, because some roots would be wrong with an arbitrary error of that
 * size. GPUs' estimates take subnormal numbers for zero, and so do these. */
float hstep_emulated_root(float a)
{
    const float y = fabsf(a) < 0x1p-126f ? copysignf(INFINITY, a) : 1.0f / sqrtf(a), s = a * fabsf(y);
    return fmaf(fmaf(-s, s, a), 0.5f * y, s);
}
float hstep_emulated_quotient(float a, float b)
{
    const float estimate = (float)(astray(b, 0x1p-24) / (double)b);
    const float y = fmaf(fmaf(-b, estimate, 1.0f), estimate, estimate), q = a * y;
    if (fabsf(b) < 0x1p-126f) return (float)NAN;
    return fabsf(estimate) < 0x1p-126f ? 0.0f * a : fmaf(-fmaf(b, q, -a), y, q);
}

int hstep_emulated_arithmetic(const float *a, const float *b, float *root, float *quotient, float *quotient0)
{
    const vf x = v_load(a), y = v_load(b);
    v_store(root, v_sqrt(x));
    v_store(quotient, v_div(x, y));
    v_store(quotient0, v_div0(x, y));
    return hstep_cuda_is_least(hstep_cuda_roots(x), CUDA_LEAST_ROOT) |
           hstep_cuda_are_quotients(x, hstep_cuda_quotients(x, y)) << 1;
}

/* Uses two arrays in turn, because a lane may give its next word before others have taken its last. */
uint32_t hstep_emulated_shuffle(uint32_t x, int mask)
{
    int p = parity[current] ^= 1;
    given[p][current] = x;
    meet(AT_EXCHANGE);
    return given[p][current ^ mask];
}

static void enter(void)
{
    the_run(the_parameters);
    meet(DONE);
    abort();
}

/* Runs a warp until all its lanes wait for the same thing. */
static enum state run_warp(int first)
{
    for (;;) {
        for (current = first; current < first + LANES; current++) hstep_fiber_switch(&scheduler, &threads[current]);
        enum state at = state[first];
        for (int i = first; i < first + LANES; i++)
            if (state[i] != at) {
                fprintf(stderr, "emulated kernel: lanes %d and %d of a warp have parted\n", first, i);
                abort();
            }
        if (at == AT_BLOCK || at == DONE) return at;
    }
}

static void run_block(void)
{
    for (int i = 0; i < THREADS; i++) {
        fiber_start(&threads[i], stacks + (size_t)i * STACK, enter);
        state[i] = READY;
        parity[i] = 0;
    }
    for (int left = THREADS; left;) {
        int waiting = 0;
        for (int w = 0; w < THREADS; w += LANES) {
            if (state[w] == DONE) continue;
            if (run_warp(w) == DONE) left -= LANES;
            else waiting += LANES;
        }
        /* Others would wait forever for a warp that has left. */
        if (waiting && waiting != THREADS) {
            fprintf(stderr, "emulated kernel: %d of %d threads wait at a barrier\n", waiting, THREADS);
            abort();
        }
    }
}

int hstep_emulate(const struct hstep_emulated_kernel *kernel, int grid, int block, size_t shared, void **parameters)
{
    if (block != THREADS || grid < 1 || shared || (kernel->shape == HSTEP_CUDA_ONE && grid != 1)) return -1;
    if (!stacks) stacks = aligned_alloc(64, (size_t)THREADS * STACK);
    if (!stacks) return -1;
    the_run = kernel->run;
    the_parameters = parameters;
    block_count = grid;
    for (block_index = 0; block_index < grid; block_index++) run_block();
    return 0;
}

/* ---- The list ---- */

#define RUN(type, name)                                                                                \
    static void run_##name(void **parameters)                                                          \
    {                                                                                                  \
        halfstep_cuda_##name(*(struct type *)parameters[0], *(struct hstep_cuda_what *)parameters[1]); \
    }
#define KERNEL(name, shape) RUN(hstep_call, name)
#define KERNEL_SUM(name, shape) RUN(hstep_accumulation, name)
#define KERNEL_ACCESS(name, shape) RUN(hstep_access, name)
#include "device/cuda/code/kernels.def"

const struct hstep_emulated_kernel hstep_emulated_kernels[] = {
#define KERNEL(name, shape) {"halfstep_cuda_" #name, run_##name, shape},
#define KERNEL_SUM KERNEL
#define KERNEL_ACCESS KERNEL
#include "device/cuda/code/kernels.def"
};
const int hstep_emulated_kernel_count = sizeof hstep_emulated_kernels / sizeof *hstep_emulated_kernels;

#endif
