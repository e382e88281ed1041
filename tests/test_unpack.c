/* Tests unpacking of LZ4 frames made by hand. Each kind of sequence is unpacked. A frame that is damaged or of another
 * length is refused, and no byte outside is touched. (cuda_ptx_test unpacks what the program lz4 has written.)
 * Runs under sanitizers. */
#include "device/cuda/driver/unpack.h"
#include "test.h"

enum { MOST = 4096 };

struct frame {
    unsigned char bytes[MOST];
    size_t n, block; /* the place of the size of the block that is being written */
};

static void put(struct frame *f, const void *bytes, size_t n)
{
    memcpy(f->bytes + f->n, bytes, n);
    f->n += n;
}

static void begin(struct frame *f, unsigned flags)
{
    const unsigned char header[] = {0x04, 0x22, 0x4D, 0x18, (unsigned char)flags, 0x70, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    f->n = 0;
    put(f, header, flags & 8 ? 15 : 7);
}

static void open_block(struct frame *f)
{
    f->block = f->n;
    f->n += 4;
}

static void close_block(struct frame *f, unsigned stored_as_is)
{
    size_t n = f->n - f->block - 4;
    const unsigned char size[] = {(unsigned char)n, (unsigned char)(n >> 8), 0, (unsigned char)(stored_as_is << 7)};
    memcpy(f->bytes + f->block, size, 4);
}

static void end(struct frame *f) { put(f, "\0\0\0\0", 4); }

/* A text of 20 letters, of which 300 are made by overlapping matches, "tail", and a block that is not packed. */
static size_t make(struct frame *f, unsigned flags, char *expected)
{
    char *at = expected;
    begin(f, flags);
    open_block(f);
    /* 20 literals: 15 and 5 more. A match of 300 at distance 3: 4 + 15 + 255 + 26. */
    put(f, "\xFF\x05", 2);
    put(f, "abcdefghijklmnopqrst", 20);
    put(f, "\x03\x00\xFF\x1A", 4);
    put(f, "\x40tail", 5);
    close_block(f, 0);
    if (flags & 16) put(f, "????", 4);
    open_block(f);
    put(f, "as it is", 8);
    close_block(f, 1);
    if (flags & 16) put(f, "????", 4);
    end(f);
    memcpy(at, "abcdefghijklmnopqrst", 20), at += 20;
    for (int i = 0; i < 300; i++, at++) *at = at[-3];
    memcpy(at, "tailas it is", 12), at += 12;
    return (size_t)(at - expected);
}

/* Unpacks in memory of exactly these sizes, where sanitizers see one byte too many. Elsewhere a byte on each side shows
 * it. */
static int unpack(char *expected, size_t n, const unsigned char *bytes, size_t frame_bytes)
{
    unsigned char *out = malloc(n + 2), *frame = malloc(frame_bytes + 1);
    out[0] = out[n + 1] = 0x5A;
    memcpy(frame, bytes, frame_bytes);
    int error = hstep_unpack(out + 1, n, frame, frame_bytes);
    CHECK(out[0] == 0x5A && out[n + 1] == 0x5A, "a byte outside was written");
    if (!error && expected) CHECK(!memcmp(out + 1, expected, n), "another text");
    free(out);
    free(frame);
    return error;
}

int main(int argc, char **argv)
{
    static struct frame f, damaged;
    static char expected[MOST];
    test_init(argc, argv);

    TEST("literals, matches that overlap, blocks that are not packed, sizes and checksums of blocks") {
        static const unsigned flags[] = {0x40, 0x60, 0x48, 0x50, 0x58};
        for (int i = 0; i < 5; i++) {
            size_t n = make(&f, flags[i], expected);
            CHECK(!unpack(expected, n, f.bytes, f.n), "flags %x: refused", flags[i]);
            CHECK(unpack(NULL, n - 1, f.bytes, f.n), "flags %x: one byte less was taken", flags[i]);
            CHECK(unpack(NULL, n + 1, f.bytes, f.n), "flags %x: one byte more was taken", flags[i]);
        }
    }
    TEST("a frame that ends early is refused, wherever it ends") {
        size_t n = make(&f, 0x48, expected);
        for (size_t k = 0; k < f.n; k++) CHECK(unpack(NULL, n, f.bytes, k), "%d bytes of a frame were taken", (int)k);
    }
    TEST("no damage leads outside") {
        size_t n = make(&f, 0x40, expected);
        for (size_t k = 0; k < f.n; k++)
            for (int bit = 0; bit < 256; bit++) {
                damaged = f;
                damaged.bytes[k] = (unsigned char)bit;
                int error = unpack(NULL, n, damaged.bytes, f.n);
                if (k < 4 && damaged.bytes[k] != f.bytes[k]) CHECK(error, "another magic number was taken");
            }
    }
    TEST("matches of what was not there yet, and of distance 0") {
        begin(&f, 0x40);
        open_block(&f);
        put(&f, "\x10x\x02\x00\x50yyyyy", 10);
        close_block(&f, 0);
        end(&f);
        CHECK(unpack(NULL, 10, f.bytes, f.n), "a match before the beginning was taken");
        f.bytes[f.block + 6] = 1;
        CHECK(!unpack("xxxxxyyyyy", 10, f.bytes, f.n), "a match of distance 1 was refused");
        f.bytes[f.block + 6] = 0;
        CHECK(unpack(NULL, 10, f.bytes, f.n), "a match of distance 0 was taken");
    }
    return test_done();
}
