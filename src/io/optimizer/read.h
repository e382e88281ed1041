/* Reading an optimizer's file. All that the file says is read and checked before the first change to the optimizer. */
#ifndef HALFSTEP_IO_READ_H
#define HALFSTEP_IO_READ_H

#include "io/optimizer/record.h"

/* The loading of one optimizer. */
typedef struct loading {
    record *record;
    const halfstep_file_options *options;
    void *const *weights;
    hstep_source states, model; /* model: the file that holds the weights, if they are loaded */
    const hstep_pairs *pairs;   /* metadata that is not of a safetensors file, for a handle of the same settings */
    int has_model_file;         /* 1: model is a file of its own */
    void *piece;                /* HSTEP_CHECK_BYTES for values while they are checked */
    unsigned char *known;       /* for each tensor in the file of states: 1 if the optimizer stores it */
    uint64_t *places;           /* numbers of the planes in their files, in the order of hstep_each_plane() */
    size_t place_count, place_capacity;
    char *key; /* buffer for any key that is looked up */
    size_t key_bytes;
    hstep_error *error;
} loading;

int hstep_make_key(loading *l);
int hstep_fail_value(const loading *l, const char *prefix, const char *name);
int hstep_read_numbers(const loading *l);

#endif
