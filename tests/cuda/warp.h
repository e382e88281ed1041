/* The state of an emulated GPU while a kernel runs, for the sources of machine.h's rows: registers.c, memory.c and
 * machine.c. */
#ifndef HSTEP_TESTS_CUDA_WARP_H
#define HSTEP_TESTS_CUDA_WARP_H

#include <stdint.h>

#include "cuda/emulate.h"
#include "cuda/machine.h"
#include "cuda/watch.h"
#include "device/cuda/code/kernels.h"

enum {
    WARPS = HSTEP_CUDA_THREADS / LANES,
    DEPTH = 24,              /* of calls */
    REGISTERS = 8 << 20,     /* bytes of a warp's frames */
    LOCAL_BYTES = 16 << 10,  /* of a lane */
    LOCAL_WORDS = 4 * LANES, /* a word of local memory lies beside those of the other lanes, as in a GPU's */
    NOTHING = 64 << 10,      /* no memory has an address below */
    LOCAL_FIRST = 64,
    PARAMETER_BYTES = 1024
};
#define ALL 0xffffffffu /* lanes */
#define GARBAGE 0xa5a5a5a5u

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

/* The launch, and where a program's memory lies. */
struct hstep_machine {
    const struct function *entry;
    char *pool, *constants; /* the pool has a register of 64 bits at its end */
    int constant_bytes, blocks;
    _Alignas(16) char parameters[PARAMETER_BYTES];
    /* Generic addresses of shared and local memory, and of constants. Nothing else lies there. */
    uint64_t windows[FRAME];
};
extern struct hstep_machine hstep_machine;

/* Ends the program with a message. */
void hstep_machine_fault(const struct warp *w, const struct row *r, const char *what, uint64_t address);

/* What a row of instructions.def does, for the lanes of the group that runs. */
typedef void hstep_instruction(struct warp *w, const struct row *r);
extern hstep_instruction *const hstep_instructions[];
#define HAND(name) hstep_instruction hstep_run_##name;
#define ONE(name, ...)
#define TWO ONE
#define THREE ONE
#include "cuda/instructions.def"
#undef HAND
/* Their numbers. Those of HAND rows come first. */
enum {
#define HAND(name) HSTEP_ROW_##name,
#include "cuda/instructions.def"
};
#undef HAND
#undef ONE
#undef TWO
#undef THREE

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

static inline void *at(const struct warp *w, uint32_t x)
{
    return (char *)(uintptr_t)w->bases[x >> 31] + (x & 0x7fffffff);
}

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

#endif
