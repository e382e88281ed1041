/* The hash behind "state_hash". It takes bytes eight at a time as little-endian words, then the remaining bytes as one
 * word, then the length. Every step is a bijection of the running value, so a single changed bit always changes the
 * result. It is not meant for security. */
#ifndef HALFSTEP_HASH_H
#define HALFSTEP_HASH_H

#include <stddef.h>
#include <stdint.h>

#define HASH_START UINT64_C(0x6a09e667f3bcc908)

static inline uint64_t hash_word(uint64_t h, uint64_t word)
{
    h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ (h >> 29);
}

static inline uint64_t hash_bytes(uint64_t h, const void *data, size_t n)
{
    const unsigned char *p = data;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t w = 0;
        for (int b = 7; b >= 0; b--) w = w << 8 | p[i + (size_t)b];
        h = hash_word(h, w);
    }
    uint64_t tail = 0;
    for (size_t j = n; j > i; j--) tail = tail << 8 | p[j - 1];
    return hash_word(hash_word(h, tail), (uint64_t)n);
}

static inline uint64_t hash_finish(uint64_t h)
{
    h = (h ^ (h >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    h = (h ^ (h >> 32)) * UINT64_C(0xd6e8feb86659fd93);
    return h ^ (h >> 32);
}

#endif
