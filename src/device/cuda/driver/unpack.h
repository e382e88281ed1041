/* Images are stored as LZ4 frames, made by the program lz4. This takes a third of their bytes. */
#ifndef HSTEP_CUDA_UNPACK_H
#define HSTEP_CUDA_UNPACK_H

#include <stddef.h>

/* Unpacks a frame to out[0 .. bytes). Returns 0, or -1 if the frame is malformed or does not hold exactly that many
 * bytes. Touches nothing outside of both buffers. Format: lz4's lz4_Frame_format.md and lz4_Block_format.md. Checksums
 * are skipped. */
int hstep_unpack(void *out, size_t bytes, const void *frame, size_t frame_bytes);

#endif
