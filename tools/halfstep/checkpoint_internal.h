/* Between checkpoint.c (everything of a run) and weights.c (only the weights, for any recipe). */
#ifndef HALFSTEP_CHECKPOINT_INTERNAL_H
#define HALFSTEP_CHECKPOINT_INTERNAL_H

#include "checkpoint.h"

enum { NAME_BYTES = 192, VALUE_BYTES = 160 };

/* One stored stream of bytes, as it is called and shaped in a file. */
struct stream {
    char name[NAME_BYTES];
    const char *dtype;
    uint64_t ndim, shape[2];
    void *data;
    uint64_t bytes;
};

/* A file being read, and where its errors go. */
struct source {
    halfstep_safetensors *file;
    const char *path;
    char *error;
    size_t error_bytes;
};

/* Zeroed for a row that does not exist. */
halfstep_format_info checkpoint_format(int32_t row);
void checkpoint_shape_of(struct stream *stream, const struct lm_tensor *tensor);
/* Looks a tensor up and judges its shape; dtype NULL: any. */
int checkpoint_find_stream(struct source *source, const struct stream *want, const char *dtype, uint64_t *index,
                           halfstep_safetensor_info *info);
/* Reads it into stream->data. */
int checkpoint_read_stream(struct source *source, const struct stream *stream);

#endif
