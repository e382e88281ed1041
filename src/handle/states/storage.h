/* States in storage. */
#ifndef HSTEP_STORAGE_H
#define HSTEP_STORAGE_H

#include "handle/optimizer.h"

enum { HSTEP_BUFFERS = 3 };

/* A piece of states in storage. */
struct hstep_stored_piece {
    int tensor;
    int resident; /* 1: stays at `place` */
    int loaded;   /* 1: the memory of a resident piece holds its value */
    int64_t first_row, n_rows, first_chunk, end_chunk, bundle;
    uint64_t state_bytes, weight_bytes;
    char *place;
};

/* Pieces that follow one another and are worked on together. All pieces of a tensor that is not cut are in one bundle.
 * Those of a tensor that is cut, and a tensor with pairs of vectors, have bundles of their own. */
struct hstep_bundle {
    int64_t first, end;
    uint64_t bytes; /* of the pieces with their padding */
};

struct hstep_storage {
    halfstep_storage table;
    struct hstep_stored_piece *pieces;
    struct hstep_bundle *bundles;
    int64_t *first_piece; /* of each tensor, and the end */
    int64_t n_pieces, n_bundles;
    void *memory;
    char *buffer[HSTEP_BUFFERS];
    int64_t held; /* the piece that functions about slots have in memory, or -1 */
    int dirty;    /* 1: they have changed it */
    atomic_int broken;
    atomic_flag lock;
    /* Counters as they were before a step: */
    struct hstep_tensor *tensors;
    struct hstep_group *groups;
    double gradient_norm, round_norm;
    uint_least64_t skipped;
};

/* Some bytes of a piece. */
struct hstep_range {
    uint64_t offset, bytes;
};
/* Returns where a piece has the codes of a slot, or its extra plane. */
struct hstep_range hstep_range_of(const halfstep_piece *p, int slot, int extra);
/* Returns the rows of a piece of a laid out tensor, or 0 if the tensor is one piece. piece_bytes 0: the default. */
int64_t hstep_piece_rows(const struct hstep_tensor *t, uint64_t piece_bytes);
/* Returns the number of pieces of so many rows. */
int64_t hstep_count_pieces(const struct hstep_tensor *t, int64_t rows);
/* Describes the piece of some rows. Rows that are not all rows belong to a tensor that may be cut. */
halfstep_piece hstep_describe(const struct hstep_tensor *t, int tensor, int64_t first_row, int64_t n_rows, int weights);

/* Describes piece number `number` of the storage. */
halfstep_piece hstep_describe_bound(const halfstep_optimizer *o, int64_t number);
/* Returns the bytes of memory that a piece of so many bytes takes. */
uint64_t hstep_piece_space(uint64_t bytes);
/* Returns the memory of pieces that is enough, by the space of the largest piece and of all. */
uint64_t hstep_least_memory(uint64_t largest, uint64_t all, uint64_t piece_bytes);
/* Returns the bytes of memory that a piece takes. */
uint64_t hstep_space_of(const struct hstep_stored_piece *p);
/* Takes the addresses from all planes that are in pieces. */
void hstep_clear_addresses(halfstep_optimizer *o, int first, int n);
/* Fails with the code and the text of the storage. Waits for all that is under way. changed: 1 if a step or a write may
 * be half done. */
int hstep_fail_storage(const halfstep_optimizer *o, int code, int changed);
/* Fails with ORDER if the storage has failed since it was bound. Succeeds without storage. */
int hstep_check_storage(const halfstep_optimizer *o);
/* Fails like hstep_check_storage(), or if the storage refuses a step. Nothing has changed then. */
int hstep_begin_storage(const halfstep_optimizer *o);
void hstep_close_storage(halfstep_optimizer *o);

#endif
