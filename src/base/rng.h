/* Random bits for stochastic rounding. They are a pure function of (seed, tensor id, write counter, slot, element
 * index).
 *
 * This is the scalar definition. Vector kernels and GPUs must produce the same words. It is plain 32-bit integer
 * arithmetic in the common subset of C, C++ and CUDA. Device code defines HSTEP_INLINE before it includes this header.
 *
 * One 32-bit word serves the two elements 2p and 2p + 1 of pair p. Its low half is the even element's. */
#ifndef HSTEP_RNG_H
#define HSTEP_RNG_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/inline.h"

/* X(CONSTANT, pinned id, "name", "one line for people"). Files store the ids, and no id is ever reused. The first row
 * is the default, chosen by the tests that docs/random.md reports. */
#define HSTEP_GENERATORS(X)                                                                     \
    X(LATTICE, 3, "lattice", "the mixer's words on lattices over time: rounding errors cancel") \
    X(MIXER, 2, "mixer", "keyed two-multiply mixer, a Philox key per 65,536 elements")          \
    X(PHILOX7, 1, "philox7", "Philox4x32 with 7 rounds (Salmon et al. 2011)")

enum hstep_generator {
#define HSTEP_GENERATOR_ENUM(constant, id, name, title) HSTEP_GENERATOR_##constant = id,
    HSTEP_GENERATORS(HSTEP_GENERATOR_ENUM)
#undef HSTEP_GENERATOR_ENUM
        HSTEP_GENERATOR_NONE = 0
};

enum {
#define HSTEP_GENERATOR_ONE(constant, id, name, title) +1
    HSTEP_GENERATOR_COUNT = 0 HSTEP_GENERATORS(HSTEP_GENERATOR_ONE)
#undef HSTEP_GENERATOR_ONE
};

/* Returns the id of a row, 0 to HSTEP_GENERATOR_COUNT - 1 in the order of the table. Returns 0 past the end. The
 * functions below return NULL for id 0. */
HSTEP_INLINE int hstep_generator_id(int row)
{
#define HSTEP_GENERATOR_ROW(constant, id, name, title) \
    if (row-- == 0) return id;
    HSTEP_GENERATORS(HSTEP_GENERATOR_ROW)
#undef HSTEP_GENERATOR_ROW
    return 0;
}

static inline const char *hstep_generator_name(int generator)
{
    switch (generator) {
#define HSTEP_GENERATOR_CASE(constant, id, name, title) \
    case id: return name;
        HSTEP_GENERATORS(HSTEP_GENERATOR_CASE)
#undef HSTEP_GENERATOR_CASE
    default: return NULL;
    }
}

static inline const char *hstep_generator_title(int generator)
{
    switch (generator) {
#define HSTEP_GENERATOR_CASE(constant, id, name, title) \
    case id: return title;
        HSTEP_GENERATORS(HSTEP_GENERATOR_CASE)
#undef HSTEP_GENERATOR_CASE
    default: return NULL;
    }
}

/* Returns the pinned id of a name, or 0 if the name is unknown. */
static inline int hstep_generator_find(const char *text)
{
#define HSTEP_GENERATOR_IF(constant, id, name, title) \
    if (strcmp(text, name) == 0) return id;
    HSTEP_GENERATORS(HSTEP_GENERATOR_IF)
#undef HSTEP_GENERATOR_IF
    return 0;
}

/* Mixes the bits of a number, so that differences spread over all of them. This is the last step of splitmix64 (Steele,
 * Lea, Flood: Fast splittable pseudorandom number generators; OOPSLA 2014), which is D. Stafford's mix 13. */
HSTEP_INLINE uint64_t hstep_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Computes Philox4x32 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC'11). `out` may be
 * `ctr`. */
HSTEP_INLINE void hstep_philox4x32(uint32_t out[4], const uint32_t ctr[4], const uint32_t key[2], int rounds)
{
    uint32_t a = ctr[0], b = ctr[1], c = ctr[2], d = ctr[3], k = key[0], l = key[1];
    int i;
    for (i = 0; i < rounds; i++) {
        uint64_t p = (uint64_t)0xD2511F53u * a;
        uint64_t q = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(q >> 32) ^ b ^ k;
        b = (uint32_t)q;
        c = (uint32_t)(p >> 32) ^ d ^ l;
        d = (uint32_t)p;
        k += 0x9E3779B9u;
        l += 0xBB67AE85u;
    }
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
}

/* The key of a strand of words. "lattice" multiplies both halves of a mixer word by `factor` and adds `offset`. These
 * hold the same 16 bits in both halves. 1 and 0 leave the word as it is. */
struct hstep_key {
    uint32_t k[4], factor, offset;
};

/* Returns the key for one write of one slot of one tensor. Requires write < 2^56 and slot < 256. */
HSTEP_INLINE struct hstep_key hstep_key_strand(uint64_t seed, uint64_t tensor_id, uint64_t write, uint32_t slot)
{
    struct hstep_key result;
    uint32_t ctr[4], key[2];
    key[0] = (uint32_t)seed;
    key[1] = (uint32_t)(seed >> 32);
    ctr[0] = (uint32_t)tensor_id;
    ctr[1] = (uint32_t)(tensor_id >> 32);
    ctr[2] = (uint32_t)write;
    ctr[3] = (uint32_t)(write >> 32) << 8 | (slot & 255u);
    hstep_philox4x32(result.k, ctr, key, 10);
    result.factor = 0x00010001u;
    result.offset = 0;
    return result;
}

/* "lattice": an element keeps its half h of a mixer word for 256 writes of its slot. In each write h becomes
 *
 *   u = h + 2^8 t (8h + 3) = h (1 + 2^11 t) + 3 2^8 t  mod 2^16,  t = write mod 256
 *
 * The high byte walks through all its 256 values in odd steps of 3 + 8j, which differ between elements. No step is 1,
 * because that would be slow. The factor is odd, so that for every t the map from h to u is a bijection. u is therefore
 * as uniform as h. `write` counts the writes of the slot itself, below 2^63. Bit 55 of the strand's write number
 * separates these strands from those of independent words, whose write number never reaches it. */
#define HSTEP_LATTICE_SHIFT 8
#define HSTEP_LATTICE_DOMAIN ((uint64_t)1 << 55)

HSTEP_INLINE struct hstep_key hstep_key_lattice(uint64_t seed, uint64_t tensor_id, uint64_t write, uint32_t slot)
{
    struct hstep_key result =
        hstep_key_strand(seed, tensor_id, write >> HSTEP_LATTICE_SHIFT | HSTEP_LATTICE_DOMAIN, slot);
    uint32_t t = (uint32_t)write & ((1u << HSTEP_LATTICE_SHIFT) - 1);
    result.factor = ((1u + (t << 11)) & 65535u) * 0x00010001u;
    result.offset = (3u * t << 8 & 65535u) * 0x00010001u;
    return result;
}

HSTEP_INLINE uint32_t hstep_lattice_word(const struct hstep_key *strand, uint32_t h)
{
    /* The low 16 bits of each sum count. They depend only on the low halves of the factor and the offset. */
    uint32_t high = (h >> 16) * strand->factor + strand->offset, low = h * strand->factor + strand->offset;
    return high << 16 | (low & 65535u);
}

/* Returns the key from which a generator makes the words of write number `write` of a slot. */
HSTEP_INLINE struct hstep_key hstep_key_write(int generator, uint64_t seed, uint64_t tensor_id, uint64_t write,
                                              uint32_t slot)
{
    return generator == HSTEP_GENERATOR_LATTICE ? hstep_key_lattice(seed, tensor_id, write, slot)
                                                : hstep_key_strand(seed, tensor_id, write, slot);
}

/* "philox7": computes the four words of pairs 4 * block .. 4 * block + 3. */
HSTEP_INLINE void hstep_philox_block(const struct hstep_key *strand, uint64_t block, uint32_t out[4])
{
    uint32_t ctr[4];
    ctr[0] = (uint32_t)block;
    ctr[1] = (uint32_t)(block >> 32);
    ctr[2] = strand->k[2];
    ctr[3] = strand->k[3];
    hstep_philox4x32(out, ctr, strand->k, 7);
}

/* "mixer": 32,768 words (65,536 elements) share a key, so that its cost is negligible and an index has 15 bits. */
#define HSTEP_SEGMENT_SHIFT 15
#define HSTEP_SEGMENT_WORDS (1u << HSTEP_SEGMENT_SHIFT)

HSTEP_INLINE struct hstep_key hstep_key_segment(const struct hstep_key *strand, uint64_t segment)
{
    struct hstep_key result;
    uint32_t ctr[4];
    ctr[0] = (uint32_t)segment;
    ctr[1] = (uint32_t)(segment >> 32);
    ctr[2] = strand->k[2];
    ctr[3] = strand->k[3];
    hstep_philox4x32(result.k, ctr, strand->k, 10);
    result.factor = strand->factor;
    result.offset = strand->offset;
    return result;
}

/* Returns word i (0 .. 32767) of a segment. A Weyl sequence from a keyed start goes through a two-multiply mixer. The
 * shifts and multipliers are those of C. Wellons' lowbias32. A second key word enters between the multiplies. A loop
 * over i needs no multiply for the first line. If the second key word only moved the start, every segment would be a
 * window of the same sequence. Between the multiplies, it makes segments different functions. */
#define HSTEP_MIXER_STEP 0x9E3779B9u
#define HSTEP_MIXER_MUL1 0x7FEB352Du
#define HSTEP_MIXER_MUL2 0x846CA68Bu

HSTEP_INLINE uint32_t hstep_mixer_word(const struct hstep_key *segment_key, uint32_t i)
{
    uint32_t x = segment_key->k[0] + i * HSTEP_MIXER_STEP;
    x ^= x >> 16;
    x *= HSTEP_MIXER_MUL1;
    x ^= (x >> 15) ^ segment_key->k[1];
    x *= HSTEP_MIXER_MUL2;
    x ^= x >> 16;
    return x;
}

/* Writes n words of a strand to `out`, from pair first_pair on. The key must come from the same generator. "lattice"
 * takes any key, and makes independent words from one of hstep_key_strand(). */
HSTEP_INLINE void hstep_random_words(int generator, const struct hstep_key *strand, uint64_t first_pair, size_t n,
                                     uint32_t *out)
{
    size_t j;
    if (generator == HSTEP_GENERATOR_PHILOX7) {
        uint32_t block[4] = {0, 0, 0, 0};
        for (j = 0; j < n; j++) {
            uint64_t p = first_pair + j;
            if (j == 0 || (p & 3) == 0) hstep_philox_block(strand, p >> 2, block);
            out[j] = block[p & 3];
        }
    } else {
        struct hstep_key key = *strand;
        for (j = 0; j < n; j++) {
            uint64_t p = first_pair + j;
            uint32_t i = (uint32_t)p & (HSTEP_SEGMENT_WORDS - 1);
            if (j == 0 || i == 0) key = hstep_key_segment(strand, p >> HSTEP_SEGMENT_SHIFT);
            out[j] = hstep_mixer_word(&key, i);
            if (generator == HSTEP_GENERATOR_LATTICE) out[j] = hstep_lattice_word(&key, out[j]);
        }
    }
}

/* Returns the default id of a tensor, a hash of its name. FNV-1a leaves names that differ in their last letters close
 * together, so a finaliser follows it. The id is never 0, which means "no id given". */
HSTEP_INLINE uint64_t hstep_hash_name(const char *name)
{
    uint64_t h = 0xCBF29CE484222325u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001B3u;
    h = hstep_mix(h);
    return h ? h : 1;
}

#endif
