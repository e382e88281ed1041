/* What translate.py writes for machine.c: PTX as tables. An instruction is a row, which a warp executes for all its
 * lanes at once. Not part of the interface (emulate.h). */
#ifndef HSTEP_TESTS_CUDA_MACHINE_H
#define HSTEP_TESTS_CUDA_MACHINE_H

#include <stdint.h>

enum { LANES = 32 };

/* Where an address points. FRAME is an offset from where the running function's parameters and local memory begin. */
enum space { GENERIC, GLOBAL, SHARED, LOCAL, CONSTANT, PARAMETER, FRAME };

/* op: a row of instructions.def. x: operands, which are places in bytes from the function's registers, or from the pool
 * if the top bit is set. Jumps and calls have the number of a row or function there. how: of a memory instruction, a
 * space and the bits below; of a jump, 0 for always, 1 if the predicate is 1, 2 if it is 0. offset: of an address.
 * line: of the PTX. */
struct row {
    uint16_t op, how;
    uint32_t x[5];
    int32_t offset, line;
};
enum {
    HOW_SPACE = 7,
    HOW_SIZE = 3,  /* a shift: log2 of the bytes */
    HOW_COUNT = 5, /* a shift: log2 of the registers */
    HOW_SIGNED = 1 << 8,
    HOW_WIDE = 1 << 9, /* the registers have 64 bits */
    HOW_CONSTANT = 1 << 10,
    HOW_VOLATILE = 1 << 11
};

/* A frame holds its result and parameters, then the local memory, then the parameters of the function that it calls. */
struct function {
    const char *name;
    int is_entry, first;           /* first: row */
    int registers, frame, callees; /* bytes of registers and of a frame; where the frame of a callee begins */
    int local, local_bytes;        /* where local memory begins in the frame */
    int parameter_count, parameter_places[5], parameters[5]; /* of an entry: places and bytes */
    int shared, variables, variable[12][2];                  /* shared memory: bytes; begin and end of each variable */
};

/* A value that all lanes read: number + address, the address of what `of` says, number `index` of its table. */
struct pooled {
    int place, bytes;
    uint64_t number;
    enum { A_NUMBER, A_VARIABLE, A_FUNCTION, A_PARAMETER } of;
    int index;
};

/* A variable of global or constant memory, with n initial bytes, and with addresses in them. */
struct variable {
    const char *name;
    int bytes, is_constant, n;
    const unsigned char *initial;
    const struct pooled *addresses; /* `place` is in the variable; ends with bytes = 0 */
};

/* A program that is linked with the fake driver sees them too. */
#pragma GCC visibility push(default)
extern const struct row ptx_rows[];
extern const struct function ptx_functions[];
extern const struct pooled ptx_pool[];
extern const struct variable ptx_variables[];
extern const int ptx_row_count, ptx_function_count, ptx_pool_count, ptx_pool_bytes, ptx_variable_count;
#pragma GCC visibility pop

#endif
