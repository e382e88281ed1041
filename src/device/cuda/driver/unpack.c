/* The formats are those of xz-file-format.txt (XZ Utils) and lzma-specification.txt (LZMA SDK). LZMA2 cuts LZMA data
 * into chunks, and its only description is XZ Utils' decoder (lzma2_decoder.c). */
#include "device/cuda/driver/unpack.h"

#include <stdint.h>
#include <string.h>

enum {
    STATES = 12,      /* what the last symbols were: literals, matches, matches at earlier distances */
    PLACES = 16,      /* most values of the lowest bits of a position */
    LENGTHS = 4,      /* of matches, that have slots of distances of their own */
    MODELLED = 14,    /* slots of distances whose bits all have probabilities */
    LITERAL = 0x300,  /* probabilities of one literal */
    CONTEXTS = 1 << 4 /* most contexts of a literal */
};

/* Each number is the probability of a 0 bit, times 2048. */
struct lengths {
    uint16_t above_low, above_middle, low[PLACES][8], middle[PLACES][8], high[256];
};

struct model {
    uint16_t match[STATES][PLACES], repeat[STATES], repeat_later[STATES], repeat_third[STATES], repeat_fourth[STATES];
    uint16_t repeat_long[STATES][PLACES], slot[LENGTHS][64], middle[128], low_four[16], literal[CONTEXTS][LITERAL];
    struct lengths match_length, repeat_length;
};

struct unpacker {
    const uint8_t *in, *in_end;   /* of the chunk */
    uint8_t *begin, *out, *limit; /* of the output, and where the chunk ends */
    uint32_t range, code;
    uint32_t back[4]; /* latest distances, less 1 */
    unsigned state, context_bits, place_bits, literal_place_bits;
    struct model model;
};

static void reset(struct unpacker *u)
{
    uint16_t *p = (uint16_t *)&u->model;
    for (size_t i = 0; i < sizeof u->model / sizeof *p; i++) p[i] = 1024;
    memset(u->back, 0, sizeof u->back);
    u->state = 0;
}

/* ---- Bits ---- */

/* Makes room for the next bit. Behind the end of the chunk are zeros. */
static void refill(struct unpacker *u)
{
    if (u->range >> 24) return;
    u->range <<= 8;
    u->code = u->code << 8 | (u->in < u->in_end ? *u->in++ : 0);
}

static unsigned bit(struct unpacker *u, uint16_t *probability)
{
    refill(u);
    const uint32_t bound = (u->range >> 11) * *probability;
    if (u->code < bound) {
        u->range = bound;
        *probability += (2048 - *probability) >> 5;
        return 0;
    }
    u->range -= bound;
    u->code -= bound;
    *probability -= *probability >> 5;
    return 1;
}

/* Reads n bits, the highest first, whose probabilities depend on the bits before. */
static unsigned tree(struct unpacker *u, uint16_t *probability, int n)
{
    unsigned found = 1;
    for (int i = 0; i < n; i++) found = found << 1 | bit(u, &probability[found]);
    return found - (1u << n);
}

/* The same, with the lowest first. */
static uint32_t reverse_tree(struct unpacker *u, uint16_t *probability, int n)
{
    unsigned found = 1;
    uint32_t value = 0;
    for (int i = 0; i < n; i++) {
        const unsigned next = bit(u, &probability[found]);
        found = found << 1 | next;
        value |= (uint32_t)next << i;
    }
    return value;
}

/* Reads n bits of even odds. */
static uint32_t direct(struct unpacker *u, int n)
{
    uint32_t value = 0;
    while (n--) {
        refill(u);
        u->range >>= 1;
        const uint32_t next = u->code >= u->range;
        u->code -= next ? u->range : 0;
        value = value << 1 | next;
    }
    return value;
}

/* ---- Symbols ---- */

static void read_literal(struct unpacker *u)
{
    const size_t at = (size_t)(u->out - u->begin);
    const unsigned last = at ? u->out[-1] : 0;
    const unsigned place = (unsigned)at & ((1u << u->literal_place_bits) - 1);
    uint16_t *p = u->model.literal[place << u->context_bits | last >> (8 - u->context_bits)];
    unsigned found = 1;
    /* After a match, the byte that would have continued it is unlikely. */
    unsigned unlikely = u->state < 7 ? 0 : u->out[-(ptrdiff_t)u->back[0] - 1];
    for (int same = u->state >= 7; same && found < 0x100; unlikely <<= 1) {
        const unsigned expected = unlikely >> 7 & 1, next = bit(u, &p[(1 + expected) * 0x100 + found]);
        found = found << 1 | next;
        same = next == expected;
    }
    while (found < 0x100) found = found << 1 | bit(u, &p[found]);
    *u->out++ = (uint8_t)found;
    u->state = u->state < 4 ? 0 : u->state < 10 ? u->state - 3 : u->state - 6;
}

static size_t read_length(struct unpacker *u, struct lengths *l, unsigned place)
{
    if (!bit(u, &l->above_low)) return 2 + tree(u, l->low[place], 3);
    if (!bit(u, &l->above_middle)) return 10 + tree(u, l->middle[place], 3);
    return 18 + tree(u, l->high, 8);
}

static uint32_t read_distance(struct unpacker *u, size_t length)
{
    const unsigned slot = tree(u, u->model.slot[length < 2 + LENGTHS ? length - 2 : LENGTHS - 1], 6);
    if (slot < 4) return slot;
    const int bits = (int)(slot >> 1) - 1;
    const uint32_t high = (2 | (slot & 1)) << bits;
    if (slot < MODELLED) return high + reverse_tree(u, &u->model.middle[high - slot], bits);
    const uint32_t middle = direct(u, bits - 4) << 4;
    return high + middle + reverse_tree(u, u->model.low_four, 4);
}

/* Moves a distance to the front. */
static void use_distance(struct unpacker *u, int which, uint32_t back)
{
    for (; which; which--) u->back[which] = u->back[which - 1];
    u->back[0] = back;
}

/* Reads which of the latest distances is used again, and moves it to the front. */
static void read_repeat(struct unpacker *u)
{
    struct model *m = &u->model;
    int which = 1;
    if (bit(u, &m->repeat_third[u->state])) which = 2 + (int)bit(u, &m->repeat_fourth[u->state]);
    use_distance(u, which, u->back[which]);
}

static int read_match(struct unpacker *u, unsigned place)
{
    struct model *m = &u->model;
    const int after_literal = u->state < 7;
    size_t length = 1;
    if (!bit(u, &m->repeat[u->state])) {
        length = read_length(u, &m->match_length, place);
        use_distance(u, 3, read_distance(u, length));
        u->state = after_literal ? 7 : 10;
    } else {
        const int later = (int)bit(u, &m->repeat_later[u->state]);
        if (later) read_repeat(u);
        if (!later && !bit(u, &m->repeat_long[u->state][place])) {
            u->state = after_literal ? 9 : 11;
        } else {
            length = read_length(u, &m->repeat_length, place);
            u->state = after_literal ? 8 : 11;
        }
    }
    if (u->back[0] >= (size_t)(u->out - u->begin) || length > (size_t)(u->limit - u->out)) return -1;
    /* Source and target may overlap, and then bytes that were just written are read again. */
    for (; length; length--, u->out++) *u->out = u->out[-(ptrdiff_t)u->back[0] - 1];
    return 0;
}

/* ---- Chunks ---- */

static int unpack_chunk(struct unpacker *u)
{
    if (u->in_end - u->in < 5 || *u->in++) return -1;
    u->range = 0xFFFFFFFF;
    u->code = 0;
    for (int i = 0; i < 4; i++) u->code = u->code << 8 | *u->in++;
    while (u->out < u->limit) {
        const unsigned place = (unsigned)(u->out - u->begin) & ((1u << u->place_bits) - 1);
        if (!bit(u, &u->model.match[u->state][place])) read_literal(u);
        else if (read_match(u, place)) return -1;
    }
    refill(u);
    return u->code || u->in != u->in_end ? -1 : 0;
}

static int set_properties(struct unpacker *u, unsigned byte)
{
    if (byte >= 9 * 5 * 5) return -1;
    u->context_bits = byte % 9;
    u->literal_place_bits = byte / 9 % 5;
    u->place_bits = byte / 45;
    return 1u << (u->context_bits + u->literal_place_bits) > CONTEXTS ? -1 : 0;
}

/* Unpacks the chunks of LZMA2 data. The first byte of a chunk is its kind. 0 ends the data. The first chunk must be
 * AFRESH or FIRST, so that no match reaches what was not there. */
static int unpack_chunks(struct unpacker *u, const uint8_t *in, const uint8_t *end, const uint8_t *out_end)
{
    enum { AFRESH = 1, AS_IT_IS, PACKED = 0x80, WITH_RESET = 0xA0, WITH_PROPERTIES = 0xC0, FIRST = 0xE0 };
    unsigned least = FIRST; /* kind of a packed chunk, which must reset at least so much */
    while (end - in >= 6) {
        const unsigned kind = in[0];
        const size_t head = kind < PACKED ? 3 : kind < WITH_PROPERTIES ? 5 : 6;
        size_t n = ((size_t)in[1] << 8 | in[2]) + 1, packed = n;
        if (!kind) break;
        if (kind >= PACKED) {
            n += (size_t)(kind & 0x1F) << 16;
            packed = ((size_t)in[3] << 8 | in[4]) + 1;
        }
        if ((size_t)(end - in) < head + packed || (size_t)(out_end - u->out) < n) return -1;
        if (kind >= WITH_PROPERTIES && set_properties(u, in[5])) return -1;
        in += head;
        if (kind == AFRESH || kind >= FIRST) u->begin = u->out;
        if (kind < PACKED) {
            if (kind > AS_IT_IS || (kind == AS_IT_IS && least == FIRST)) return -1;
            memcpy(u->out, in, n);
            u->out += n;
            if (kind == AFRESH) least = WITH_PROPERTIES;
        } else {
            if (kind < least) return -1;
            if (kind >= WITH_RESET) reset(u);
            u->in = in;
            u->in_end = in + packed;
            u->limit = u->out + n;
            if (unpack_chunk(u)) return -1;
            least = PACKED;
        }
        in += packed;
    }
    return in < end && !*in && u->out == out_end ? 0 : -1;
}

int hstep_unpack(void *to, size_t bytes, const void *file, size_t file_bytes)
{
    static const uint8_t magic[] = {0xFD, '7', 'z', 'X', 'Z', 0};
    enum { HEADER = 12, LZMA2 = 0x21 };
    const uint8_t *in = file;
    struct unpacker u = {.begin = to, .out = to};
    if (file_bytes < HEADER + 12 || memcmp(in, magic, sizeof magic)) return -1;
    const uint8_t *block = in + HEADER;
    const size_t header = 4 * ((size_t)block[0] + 1);
    /* Flags of 0: one filter, whose number follows, and no sizes. */
    if (block[1] || block[2] != LZMA2 || file_bytes - HEADER < header) return -1;
    return unpack_chunks(&u, block + header, in + file_bytes, (uint8_t *)to + bytes);
}
