/* Writes endless raw random words to stdout, for statistical testers: random_stream GENERATOR KIND [SEED].
 *   elements  Pairs 0, 1, 2, ... of one strand.
 *   writes    One pair of one tensor, write 0, 1, 2, ...; for "lattice" writes 100, 357, 614, ..., because words are
 *             related within 256 writes by design.
 *   tensors   One pair of tensors "layers.0.weight", "layers.1.weight", ... with ids as hashed by default.
 *   slots     8 slots of one tensor, taken in turns, pair by pair. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

enum { CHUNK = 8192, SLOTS = 8 };

static uint32_t at(int generator, struct hstep_key key, uint64_t pair)
{
    uint32_t word;
    hstep_random_words(generator, &key, pair, 1, &word);
    return word;
}

int main(int argc, char **argv)
{
    static const char *const kinds[] = {"elements", "writes", "tensors", "slots"};
    static uint32_t words[CHUNK], slot_words[CHUNK / SLOTS];
    int generator = argc > 2 ? hstep_generator_find(argv[1]) : 0, kind = 0;
    while (kind < 4 && (argc < 3 || strcmp(argv[2], kinds[kind]) != 0)) kind++;
    if (generator == 0 || kind == 4) {
        fprintf(stderr, "usage: random_stream GENERATOR elements|writes|tensors|slots [SEED]\ngenerators:");
        for (int row = 0; row < HSTEP_GENERATOR_COUNT; row++)
            fprintf(stderr, " %s", hstep_generator_name(hstep_generator_id(row)));
        fprintf(stderr, "\n");
        return 2;
    }
    int lattice = generator == HSTEP_GENERATOR_LATTICE;
    uint64_t apart = lattice ? 257 : 1, start = lattice ? 100 : 0;
    uint64_t seed = argc > 3 ? strtoull(argv[3], NULL, 0) : 1, id = hstep_hash_name("layers.0.weight");
    for (uint64_t n = 0;; n += CHUNK) {
        struct hstep_key key = hstep_key_write(generator, seed, id, start, 0);
        if (kind == 0) {
            hstep_random_words(generator, &key, n, CHUNK, words);
        } else if (kind == 1) {
            for (int j = 0; j < CHUNK; j++)
                words[j] =
                    at(generator, hstep_key_write(generator, seed, id, start + apart * (n + (uint64_t)j), 0), 12345);
        } else if (kind == 2) {
            for (int j = 0; j < CHUNK; j++) {
                char name[64];
                snprintf(name, sizeof name, "layers.%llu.weight", (unsigned long long)(n + (uint64_t)j));
                words[j] = at(generator, hstep_key_write(generator, seed, hstep_hash_name(name), start, 0), 12345);
            }
        } else {
            for (uint32_t slot = 0; slot < SLOTS; slot++) {
                key = hstep_key_write(generator, seed, id, start, slot);
                hstep_random_words(generator, &key, n / SLOTS, CHUNK / SLOTS, slot_words);
                for (uint32_t j = 0; j < CHUNK / SLOTS; j++) words[j * SLOTS + slot] = slot_words[j];
            }
        }
        if (fwrite(words, sizeof words, 1, stdout) != 1) return 0;
    }
}
