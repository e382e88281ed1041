#include "device/cuda/driver/unpack.h"

#include <stdint.h>
#include <string.h>

struct reader {
    const uint8_t *at, *end;
};

struct writer {
    uint8_t *begin, *at, *end;
};

static uint32_t little(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Reads the rest of a length whose first four bits are in the token. Returns SIZE_MAX if the input ends within it. */
static size_t length(struct reader *in, unsigned bits)
{
    size_t n = bits;
    for (uint8_t more = bits == 15 ? 255 : 0; more == 255; n += more) {
        if (in->at == in->end) return SIZE_MAX;
        more = *in->at++;
    }
    return n;
}

static int copy_literals(struct reader *in, struct writer *out, size_t n)
{
    if (n > (size_t)(in->end - in->at) || n > (size_t)(out->end - out->at)) return -1;
    memcpy(out->at, in->at, n);
    in->at += n;
    out->at += n;
    return 0;
}

/* Copies n bytes from `back` bytes before the end of the output. Source and target may overlap, and then bytes that
 * were just written are read again. */
static int copy_match(struct writer *out, size_t back, size_t n)
{
    if (!back || back > (size_t)(out->at - out->begin) || n > (size_t)(out->end - out->at)) return -1;
    for (; n; n--, out->at++) *out->at = out->at[-(ptrdiff_t)back];
    return 0;
}

static int unpack_block(struct reader in, struct writer *out)
{
    while (in.at < in.end) {
        unsigned token = *in.at++;
        if (copy_literals(&in, out, length(&in, token >> 4))) return -1;
        if (in.at == in.end) return 0; /* the last sequence has no match */
        if (in.end - in.at < 2) return -1;
        size_t back = in.at[0] | (size_t)in.at[1] << 8;
        in.at += 2;
        size_t n = length(&in, token & 15);
        if (n == SIZE_MAX || copy_match(out, back, n + 4)) return -1;
    }
    return -1;
}

int hstep_unpack(void *to, size_t bytes, const void *frame, size_t frame_bytes)
{
    enum { MAGIC = 0x184D2204, DICTIONARY = 1, SIZE = 8, BLOCK_CHECKSUM = 16, VERSION = 0xC0 };
    struct reader in = {frame, (const uint8_t *)frame + frame_bytes};
    struct writer out = {to, to, (uint8_t *)to + bytes};
    if (frame_bytes < 7 || little(in.at) != MAGIC) return -1;
    unsigned flags = in.at[4];
    size_t header = 7 + (flags & SIZE ? 8 : 0), tail = flags & BLOCK_CHECKSUM ? 4 : 0;
    if ((flags & VERSION) != 0x40 || flags & DICTIONARY || frame_bytes < header) return -1;
    in.at += header;
    while (in.end - in.at >= 4) {
        uint32_t size = little(in.at), n = size & 0x7FFFFFFF;
        in.at += 4;
        if (!size) return out.at == out.end ? 0 : -1;
        if ((size_t)(in.end - in.at) < n + tail) return -1;
        struct reader block = {in.at, in.at + n};
        if (size >> 31 ? copy_literals(&block, &out, n) : unpack_block(block, &out)) return -1;
        in.at += n + tail;
    }
    return -1;
}
