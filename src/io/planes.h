/* What an optimizer stores for one tensor, as tensors of a safetensors file. docs/checkpoints.md has the layout. */
#ifndef HALFSTEP_IO_PLANES_H
#define HALFSTEP_IO_PLANES_H

#include "io/text.h"

enum { HSTEP_MAX_PLANES = 1 + 2 * HALFSTEP_MAX_STATES };

typedef struct hstep_plane {
    char suffix[64]; /* "exp_avg", "exp_avg.scale", "weight.extra"; empty for a weight in a file of weights */
    const char *dtype;
    uint64_t ndim;
    const uint64_t *shape; /* the caller's, or own_shape, so a plane must not be copied or moved */
    uint64_t own_shape[2];
    int by_element;      /* 1: it has one element for each element of the tensor */
    int flat_scales;     /* 1: scales of a flattened tensor, whose number counts but not their shape */
    int nonnegative;     /* 1: values are neither NaN nor negative */
    int finite;          /* 1: values are not infinite either */
    int32_t slot, extra; /* as halfstep_read_bytes() takes them */
    void *data;          /* NULL: the states are in storage */
    uint64_t bytes;
} hstep_plane;

/* A file being read, and the place of its error texts. */
typedef struct hstep_source {
    halfstep_safetensors *file;
    const char *path;
    hstep_error *error;
} hstep_source;

/* Returns 1 if a tensor consists of several matrices. Its rows may come from several dimensions of a shape, and its
 * vectors over columns have a row for each matrix. */
int hstep_is_stack(const halfstep_tensor *tensor);
/* Returns 1 if sizes are `first`, then sizes with the product `rest`. With `merged`, several sizes may give `first`. */
int hstep_gives(const uint64_t *shape, uint64_t ndim, uint64_t first, uint64_t rest, int merged);
/* Lists the planes of a tensor except its weight's codes and those without a byte. `shape` are the tensor's sizes, or
 * NULL for those that the optimizer knows. Fails if a plane has neither memory nor storage. *in_storage is 0 before
 * the first tensor, and 1 once the optimizer is known to have storage. */
int hstep_list_planes(const halfstep_optimizer *optimizer, int32_t index, const halfstep_tensor *tensor,
                      const halfstep_rule_info *rule, const uint64_t *shape, int *in_storage,
                      hstep_plane planes[HSTEP_MAX_PLANES], int *count, hstep_error *error);
/* Describes the plane of the weight's codes at `data`, which may be NULL if there are none. */
int hstep_weight_plane(const halfstep_optimizer *optimizer, int32_t index, const halfstep_tensor *tensor,
                       const uint64_t *shape, void *data, const char *suffix, hstep_plane *plane, hstep_error *error);

int hstep_declare_plane(halfstep_safetensors_writer *writer, const char *tensor, const hstep_plane *plane,
                        hstep_error *error);
/* Finds the plane in a file and checks its dtype and shape. */
int hstep_find_plane(const hstep_source *source, const halfstep_tensor *tensor, const hstep_plane *plane,
                     uint64_t *index);
/* Reads a tensor through a buffer of piece_bytes and fails if a value is NaN or negative. With must_be_finite, infinite
 * values fail too. */
int hstep_check_values(const hstep_source *source, uint64_t index, int must_be_finite, void *piece, size_t piece_bytes);

#endif
