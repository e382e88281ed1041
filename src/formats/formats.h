/* Every storage format: its functions, and the members of its row as constants. Include a vocabulary first
 * (vec/README.md). formats.def lists the formats. src/formats/NAME.h holds one, where NAME is the function prefix. Its
 * row stands under its first comment. Element formats keep each number by itself, some with a second plane. Block
 * formats keep codes that share scales, for states. Packed formats are for weights (packed.h):
 *
 *   #define NAME_ROW "name", "title", ELEMENTS, dtype, dtype of the second plane or NONE, \
 *       roles = ..., stochastic = ...
 *   #define NAME_ROW "name", "title", GEOMETRY, dtype of the codes, dtype of the scales, \
 *       roles = ..., code_bits = ..., block = ..., stochastic = ..., root = ...
 *   #define NAME_ROW "name", "title", PACKED, U8, U8 for error codes or NONE, \
 *       roles = WEIGHT, extra_bits = ..., steps = ..., stochastic = 1
 *
 *   GEOMETRY     ROWS: blocks of a row; FLAT: blocks of the flattened tensor; TENSOR: one scale, from a sum over the
 *                tensor
 *
 *   dtypes       those of dtypes.def. Codes of 4 and 6 bits are packed in U8. A scale is F32, BF16, F8_E8M0 or F8_E4M3
 *                (scale.h)
 *
 *   roles        what it may store: WEIGHT, GRADIENT; SIGNED and NONNEG states
 *   code_bits    8, 6 or 4
 *   block        elements that share a scale; 1 << 30 for a whole tensor
 *
 *   extra_bits   0, or 4 for error codes
 *   steps        in a scale: positions count steps
 *
 *   stochastic   1: written with random bits. Otherwise codes as coarse as those of blocks would hardly ever change
 *
 *   root         of the grid. 0: the state itself is stored. 1 or 2: a second moment is stored on a grid that decays
 *                with it (grid.h). Codes are of its value for 1, and of its square root for 2
 *
 * All of these are constants here: NAME_roles, NAME_code_bits and so on. So are the values that follow from dtypes and
 * geometry. tables.c refuses a row that the kernels could not serve. */
#ifndef HSTEP_FORMATS_H
#define HSTEP_FORMATS_H

#include "base/api.h"
#include "base/scale.h"

#include "formats/bf16.h"
#include "formats/bf16_ecc16.h"
#include "formats/bf16_ecc8.h"
#include "formats/bf16_kahan.h"
#include "formats/bf16_sr.h"
#include "formats/dyn4.h"
#include "formats/dyn8.h"
#include "formats/f16.h"
#include "formats/f16_ecc16.h"
#include "formats/f16_ecc8.h"
#include "formats/f16_kahan.h"
#include "formats/f16_sr.h"
#include "formats/f32.h"
#include "formats/fp8.h"
#include "formats/fp8_e5m2.h"
#include "formats/fp8_lamb16.h"
#include "formats/int4.h"
#include "formats/int6.h"
#include "formats/int8.h"
#include "formats/int8_ecc4.h"
#include "formats/int8_sr.h"

/* Roles, as rows name them. */
enum {
    WEIGHT = HALFSTEP_ROLE_WEIGHT,
    GRADIENT = HALFSTEP_ROLE_GRADIENT,
    SIGNED = HALFSTEP_ROLE_SIGNED,
    NONNEG = HALFSTEP_ROLE_NONNEG
};

/* Bits of an element of each dtype. NONE is a missing plane. */
enum {
    HSTEP_BITS_NONE,
#define HSTEP_DTYPE(name, bits) HSTEP_BITS_##name = bits,
#include "base/dtypes.def"
#undef HSTEP_DTYPE
};

/* Calls X(...) with a row among its arguments. */
#define FORMAT_ROW(X, ...) X(__VA_ARGS__)

/* Define the constants of a row. a, b, ... are its members, each a name and a value. */
#define FORMAT_ELEMENTS(fn, code, extra, a, b)                                                        \
    enum {                                                                                            \
        fn##_##a, fn##_##b, fn##_code_bits = HSTEP_BITS_##code, fn##_extra_bits = HSTEP_BITS_##extra, \
        fn##_block = 0, fn##_geometry = 0, fn##_scale_dtype = 0, fn##_scale_bits = 0, fn##_root = 0,  \
        fn##_steps = 0                                                                                \
    };
#define FORMAT_BLOCKS(fn, geometry, code, scale, a, b, c, d, e)                                       \
    enum {                                                                                            \
        fn##_##a, fn##_##b, fn##_##c, fn##_##d, fn##_##e, fn##_extra_bits = 0, fn##_steps = 0,        \
        fn##_geometry = HALFSTEP_GEOMETRY_##geometry, fn##_scale_dtype = HSTEP_SCALE_##scale,         \
        fn##_scale_bits = HSTEP_BITS_##scale                                                          \
    };
#define FORMAT_PACKED(fn, code, extra, a, b, c, d)                                                    \
    enum {                                                                                            \
        fn##_##a, fn##_##b, fn##_##c, fn##_##d, fn##_code_bits = 8, fn##_block = HSTEP_PACKED_BLOCK,  \
        fn##_geometry = HALFSTEP_GEOMETRY_PACKED, fn##_scale_dtype = HSTEP_SCALE_BF16,                \
        fn##_scale_bits = 8 * HSTEP_PACKED_SCALE, fn##_root = 0                                       \
    };
#define FORMAT_ROWS(fn, ...) FORMAT_BLOCKS(fn, ROWS, __VA_ARGS__)
#define FORMAT_FLAT(fn, ...) FORMAT_BLOCKS(fn, FLAT, __VA_ARGS__)
#define FORMAT_TENSOR(fn, ...) FORMAT_BLOCKS(fn, TENSOR, __VA_ARGS__)
#define FORMAT_CONSTANTS(fn, name, title, kind, ...) FORMAT_##kind(fn, __VA_ARGS__)
#define FORMAT(id, fn) FORMAT_ROW(FORMAT_CONSTANTS, fn, fn##_ROW)
#include "formats/formats.def"
#undef FORMAT

/* The case of a format in a switch. */
#define FORMAT_CASE(fn) case HSTEP_FORMAT_##fn:

/* Expand to the arguments after `fn` if that format is of one kind, else to nothing. The kinds are single elements,
 * packed weights, blocks, blocks whose scale is made of their largest number, and one scale for the tensor. */
#define IF_ELEMENT(fn, ...) FORMAT_PICK(FORMAT_KEEP, FORMAT_DROP, FORMAT_DROP, FORMAT_DROP, fn##_ROW)(__VA_ARGS__)
#define IF_PACKED(fn, ...) FORMAT_PICK(FORMAT_DROP, FORMAT_KEEP, FORMAT_DROP, FORMAT_DROP, fn##_ROW)(__VA_ARGS__)
#define IF_BLOCK(fn, ...) FORMAT_PICK(FORMAT_DROP, FORMAT_DROP, FORMAT_KEEP, FORMAT_KEEP, fn##_ROW)(__VA_ARGS__)
#define IF_LARGEST(fn, ...) FORMAT_PICK(FORMAT_DROP, FORMAT_DROP, FORMAT_KEEP, FORMAT_DROP, fn##_ROW)(__VA_ARGS__)
#define IF_TENSOR(fn, ...) FORMAT_PICK(FORMAT_DROP, FORMAT_DROP, FORMAT_DROP, FORMAT_KEEP, fn##_ROW)(__VA_ARGS__)
#define FORMAT_KEEP(...) __VA_ARGS__
#define FORMAT_DROP(...)
#define FORMAT_PICK(...) FORMAT_PICK_(__VA_ARGS__)
#define FORMAT_PICK_(elements, packed, blocks, tensor, name, title, kind, ...) \
    FORMAT_PICK_##kind(elements, packed, blocks, tensor)
#define FORMAT_PICK_ELEMENTS(elements, packed, blocks, tensor) elements
#define FORMAT_PICK_PACKED(elements, packed, blocks, tensor) packed
#define FORMAT_PICK_ROWS(elements, packed, blocks, tensor) blocks
#define FORMAT_PICK_FLAT(elements, packed, blocks, tensor) blocks
#define FORMAT_PICK_TENSOR(elements, packed, blocks, tensor) tensor

#endif
