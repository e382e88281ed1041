/* States that version 0.1.0 stored in blocks and that are precise now: a maximum, or a mean that is subtracted. */
#ifndef HALFSTEP_IO_COARSE_H
#define HALFSTEP_IO_COARSE_H

#include "io/streams.h"

/* The codes and scales of such a state in a file, which are its tensors of these numbers. */
typedef struct hstep_coarse {
    uint64_t codes, scales;
    char format[24]; /* that the file's recipe has for the state */
} hstep_coarse;

/* Returns 1 if the stream is of a precise state here and the file has it in blocks. recipe: the full one. */
int hstep_find_coarse(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      const halfstep_rule_info *rule, const char *recipe, hstep_coarse *found);
/* Decodes the state and writes it to `optimizer`, or only judges it where that is NULL. index: of the tensor. scalars:
 * as the file has them, or NULL. */
int hstep_read_coarse(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      const hstep_coarse *coarse, const char *scalars, halfstep_optimizer *optimizer, int32_t index);

#endif
