/* What an optimizer stores for one tensor, as tensors of a safetensors file: docs/checkpoints.md has the layout. */
#ifndef HALFSTEP_IO_STREAMS_H
#define HALFSTEP_IO_STREAMS_H

#include "io/text.h"

enum { HSTEP_MAX_STREAMS = 1 + 2 * HALFSTEP_MAX_STATES };

typedef struct hstep_stream {
    char suffix[64]; /* "exp_avg", "exp_avg.scale", "weight.extra"; empty for a weight in a file of weights */
    const char *dtype;
    uint64_t ndim;
    const uint64_t *shape; /* the caller's, or own_shape: a stream stays where it was made */
    uint64_t own_shape[2];
    int by_element;  /* one element for each of the tensor's */
    int flat_scales; /* scales of a flattened tensor: their shape does not matter, only their number */
    int nonnegative; /* neither NaN nor negative, */
    int finite;      /* nor infinite */
    int32_t state;   /* of the rule, -1 of a weight, */
    int precise;     /* which has a finer format here than the recipe's */
    void *data;
    uint64_t bytes;
} hstep_stream;

/* A file that is read, and where its failures go. */
typedef struct hstep_source {
    halfstep_safetensors *file;
    const char *path;
    hstep_error *error;
} hstep_source;

/* The streams of a tensor beside its weight's own codes, those without a byte left out; shape: its sizes, or NULL for
 * what the optimizer knows. Fails where one has no memory yet. */
int hstep_list_streams(const halfstep_optimizer *optimizer, int32_t index, const halfstep_tensor *tensor,
                       const halfstep_rule_info *rule, const uint64_t *shape, hstep_stream streams[HSTEP_MAX_STREAMS],
                       int *count, hstep_error *error);
/* The weight's codes. data may be NULL if there are none. */
int hstep_weight_stream(const halfstep_optimizer *optimizer, int32_t index, const halfstep_tensor *tensor,
                        const uint64_t *shape, void *data, const char *suffix, hstep_stream *stream,
                        hstep_error *error);

int hstep_declare_stream(halfstep_safetensors_writer *writer, const char *tensor, const hstep_stream *stream,
                         hstep_error *error);
/* Finds the stream in a file and judges dtype and shape. */
int hstep_find_stream(const hstep_source *source, const halfstep_tensor *tensor, const hstep_stream *stream,
                      uint64_t *index);
/* Reads values that may be neither NaN nor negative, and where must_be_finite not infinite either, through a buffer of
 * piece_bytes, and judges them. */
int hstep_check_values(const hstep_source *source, uint64_t index, int must_be_finite, void *piece, size_t piece_bytes);

#endif
