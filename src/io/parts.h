/* What the files of halfstep_io need of each other beyond the public header. */
#ifndef HALFSTEP_IO_PARTS_H
#define HALFSTEP_IO_PARTS_H

#include "io/text.h"

/* Keeps the first failure of a save, which a commit repeats. Returns code. */
int hstep_note_failure(halfstep_checkpoint_save *save, int code, const hstep_error *error);

/* Notes that this process knows the contents of a checkpoint, or with known = 0 that it could not take them. A save
 * removes only what its process knows. */
void hstep_know_checkpoint(const halfstep_checkpoint *checkpoint, int known);

/* Opens one generation. Its sequence number must be `expected`, unless that is 0. Sets error->not_found if the
 * generation is not there. */
int hstep_open_generation(halfstep_checkpoint **checkpoint, const char *directory, uint64_t expected,
                          int check_contents, hstep_error *error);

/* Returns the CRC-64 of more bytes after those whose checksum is crc (0 at the start). */
uint64_t hstep_crc64(uint64_t crc, const void *data, uint64_t bytes);

/* Receives the next bytes of a file. */
typedef int (*hstep_sink)(void *context, const void *data, uint64_t bytes, hstep_error *error);

/* Sends a whole safetensors file to sink, in pieces of at most about 1 MiB except for the header. Error texts call the
 * file `name`. */
int hstep_stream_safetensors(const halfstep_safetensors_writer *writer, const char *name, hstep_sink sink,
                             void *sink_context, halfstep_fill_function fill, void *fill_context, hstep_error *error);

/* Receives one pair of an optimizer's metadata. */
typedef int hstep_put(void *context, const char *key, const char *value, hstep_error *error);

/* Puts all numbers of an optimizer that its later steps depend on, as the metadata of a file. */
int hstep_put_numbers(const halfstep_optimizer *optimizer, hstep_put *put, void *context, hstep_error *error);
/* Sets counters, scalars and grids from such metadata. The optimizer keeps its hyper-parameters. Fails if its tensors,
 * recipes, seed or generator are others, and then changes nothing. Error texts call the file `path`. */
int hstep_take_numbers(halfstep_optimizer *optimizer, const char *path, const hstep_pairs *pairs, hstep_error *error);

#endif
