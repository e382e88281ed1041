/* What stands behind the rows of transforms.def on the host. */
#ifndef HSTEP_HOST_TRANSFORM_H
#define HSTEP_HOST_TRANSFORM_H

#include <stddef.h>
#include <stdint.h>

#include "transforms.h"

struct hstep_context;

/* Of a row: replaces u, rows x cols and dense, with the row's constants at k; floats that it works in. Same bits with
 * any threads and instruction set. No address need be aligned; the workspace is fastest on 64 bytes. u has to be
 * finite. */
#define TRANSFORM(name, ...)                                                                               \
    void hstep_##name(const struct hstep_context *c, float *u, int64_t rows, int64_t cols, const float *k, \
                      float *workspace);                                                                   \
    size_t hstep_##name##_workspace(int64_t rows, int64_t cols);
#include "transforms.def"
#undef TRANSFORM

#endif
