/* Images are stored as xz files, which CMake itself can make. This takes an eleventh of their bytes. */
#ifndef HSTEP_CUDA_UNPACK_H
#define HSTEP_CUDA_UNPACK_H

#include <stddef.h>

/* Unpacks an xz file to out[0 .. bytes). Returns 0, or -1 if the file is malformed or does not hold exactly that many
 * bytes. Touches nothing outside of both buffers. Needs 32 KB of stack. The file must have one block, whose only filter
 * is LZMA2. What follows the block is not read, so that its checksum does not count. */
int hstep_unpack(void *out, size_t bytes, const void *file, size_t file_bytes);

#endif
