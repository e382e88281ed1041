/* What checkpoint.c needs from the safetensors writer beyond the public header. */
#ifndef HALFSTEP_IO_SAFETENSORS_H
#define HALFSTEP_IO_SAFETENSORS_H

#include "io/text.h"

/* Receives the next bytes of a file. */
typedef int (*hstep_sink)(void *context, const void *data, uint64_t bytes, hstep_error *error);

/* Sends a whole safetensors file to sink, in pieces of at most about 1 MiB except for the header. Error texts call the
 * file `name`. */
int hstep_stream_safetensors(const halfstep_safetensors_writer *writer, const char *name, hstep_sink sink,
                             void *sink_context, halfstep_fill_function fill, void *fill_context, hstep_error *error);

#endif
