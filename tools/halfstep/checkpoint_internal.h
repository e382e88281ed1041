/* Between checkpoint.c (everything of a run) and weights.c (only the weights, for any recipe). */
#ifndef HALFSTEP_CHECKPOINT_INTERNAL_H
#define HALFSTEP_CHECKPOINT_INTERNAL_H

#include "checkpoint.h"

enum { NAME_BYTES = 192, VALUE_BYTES = 320, MAX_STREAMS = 1 + 2 * HALFSTEP_MAX_STATES };

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

void checkpoint_shape_of(struct stream *stream, const struct lm_tensor *tensor);
/* The streams of tensor `index` of the optimizer beside the weight's own codes. Returns how many. */
int checkpoint_list_streams(const halfstep_optimizer *optimizer, int32_t index, const struct lm_tensor *tensor,
                            struct stream streams[MAX_STREAMS]);
/* Counters, and the numbers of the rule in row `rule`, of tensor `index` from the metadata. */
int checkpoint_load_tensor_counters(struct source *source, halfstep_optimizer *optimizer, int32_t index, const char *name,
                                    int32_t rule);
/* Looks a tensor up and judges its shape; dtype NULL: any. */
int checkpoint_find_stream(struct source *source, const struct stream *want, const char *dtype, uint64_t *index,
                           halfstep_safetensor_info *info);
/* Reads it into stream->data. */
int checkpoint_read_stream(struct source *source, const struct stream *stream);

#endif
