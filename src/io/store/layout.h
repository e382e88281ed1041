/* The bytes of a file of states: its header and its records. docs/checkpoints.md has the layout. */
#ifndef HALFSTEP_IO_STORE_LAYOUT_H
#define HALFSTEP_IO_STORE_LAYOUT_H

#include "io/files.h"
#include "io/parts.h"

enum {
    HSTEP_PAGE = 4096,       /* every part of the file begins on a multiple of it */
    HSTEP_VALUES = 256 << 10 /* bytes that keys and texts of the caller may have */
};

static inline uint64_t hstep_whole_pages(uint64_t bytes) { return (bytes + HSTEP_PAGE - 1) / HSTEP_PAGE * HSTEP_PAGE; }

/* What the header says beside its JSON. */
typedef struct hstep_layout {
    int has_weights;
    uint64_t piece_bytes; /* as the options gave them */
    uint64_t pieces;
    uint64_t json_bytes;
    uint64_t slot_bytes; /* of a record */
    uint64_t half_bytes; /* of all pieces, once */
} hstep_layout;

uint64_t hstep_header_bytes(const hstep_layout *layout);
uint64_t hstep_slot_begin(const hstep_layout *layout, uint64_t generation);
uint64_t hstep_half_begin(const hstep_layout *layout, int half);
uint64_t hstep_layout_bytes(const hstep_layout *layout);

/* Writes the whole header, padded, to memory of hstep_header_bytes(). */
void hstep_write_header(const hstep_layout *layout, const char *json, void *memory);
/* Reads and checks the header, and that the file has its size. The caller frees *json, which is not checked. */
int hstep_read_header(const hstep_file *file, uint64_t file_bytes, hstep_layout *layout, char **json,
                      hstep_error *error);

/* Hashes bytes in eight lanes, so that it is as fast as memory. Guards against accidents only. Never returns 0. */
uint64_t hstep_hash(const void *data, uint64_t bytes, uint64_t seed);

/* The sum of some bytes, modulo 2^64: over their stretches of so many bytes, the last one shorter, the hash with the
 * stretch's place as its seed. */
enum { HSTEP_STRETCH = 4 << 20 };

/* Sums of a piece: of all its bytes, and of those that a step reads. */
typedef struct hstep_sums {
    uint64_t all, head;
    uint64_t head_bytes;
} hstep_sums;

/* Adds a stretch of a piece, from byte `at` on. */
void hstep_add_stretch(hstep_sums *sums, const void *stretch, uint64_t at, uint64_t bytes);

/* What one record says. Strings lie in `text`. */
typedef struct hstep_commit {
    uint64_t generation;
    char *text;
    hstep_pairs metadata, values; /* sorted */
    unsigned char *halves;        /* for each piece, which half is current */
    uint64_t *sums;               /* of each piece */
    uint64_t *hashes;             /* of each weight; 0: not known */
    uint64_t hash_count;
    int fell_back; /* 1: the other record is damaged */
} hstep_commit;

/* Writes a record around its JSON, padded, to memory of slot_bytes. Returns the bytes to write, or 0 if it has no
 * room. */
uint64_t hstep_write_commit(const hstep_layout *layout, uint64_t generation, const hstep_buffer *json, void *memory);
/* Reads the newest sound record. The caller frees it with hstep_free_commit(), also after a failure. With `json`, the
 * record's JSON is copied there. */
int hstep_read_commit(const hstep_file *file, const hstep_layout *layout, hstep_commit *commit, char **json,
                      hstep_error *error);
void hstep_free_commit(hstep_commit *commit);

/* Finds the first difference between two JSON texts that describe a file, and says in `text` what it is: of which
 * tensor, which member, the value here and in the file. Returns 0 if the file's is not such a text. */
int hstep_name_difference(char *here, size_t here_bytes, char *in_file, size_t in_file_bytes, char *text, size_t size);

#endif
