/* Reads states that version 0.1.0 stored in blocks and that now have a precise format: a running maximum, or a mean
 * that is subtracted. */
#ifndef HALFSTEP_IO_COARSE_H
#define HALFSTEP_IO_COARSE_H

#include "io/streams.h"

/* A state in blocks in a file: the numbers of the tensors that hold its codes and its scales. */
typedef struct hstep_coarse {
    uint64_t codes, scales;
    char format[24]; /* of the state in the file's recipe */
} hstep_coarse;

/* Returns 1, and fills *found, if this optimizer has the stream's state in a precise format but the file has it in
 * blocks. `recipe` is the full recipe. */
int hstep_find_coarse(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      const halfstep_rule_info *rule, const char *recipe, hstep_coarse *found);
/* Decodes the state and writes it to tensor `index` of `optimizer`. If `optimizer` is NULL, only checks the values.
 * `scalars` are the tensor's scalars in the file, or NULL. */
int hstep_read_coarse(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      const hstep_coarse *coarse, const char *scalars, halfstep_optimizer *optimizer, int32_t index);

#endif
