/* Images are stored as frames of LZ4, which the program lz4 writes: a third of their bytes. */
#ifndef HSTEP_CUDA_UNPACK_H
#define HSTEP_CUDA_UNPACK_H

#include <stddef.h>

/* What a frame holds into out[0 .. bytes), all of it. 0, or -1 if it is no such frame or holds another number of bytes;
 * nothing outside of both is touched then either. (lz4's lz4_Frame_format.md and lz4_Block_format.md; checksums are
 * skipped.) */
int hstep_unpack(void *out, size_t bytes, const void *frame, size_t frame_bytes);

#endif
