/* Error texts, and the checks that all public functions share. */
#ifndef HSTEP_CHECKS_H
#define HSTEP_CHECKS_H

#include <string.h>

#include "handle/optimizer.h"

/* Sets the error text of the handle and the thread, and returns the code. o is NULL in a call without a handle. */
int hstep_fail(const halfstep_optimizer *o, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Returns from a public function if one of its arguments is NULL. The handle is called o in the code. */
#define HSTEP_NEED(o, pointer)                                                        \
    do {                                                                              \
        if (!(pointer))                                                               \
            return hstep_fail(o, HALFSTEP_ERROR_ARGUMENT, "%s: %s is NULL", __func__, \
                              strcmp(#pointer, "o") ? #pointer : "optimizer");        \
    } while (0)
/* Fails with ARGUMENT, because a structure of the caller cannot be taken. */
int hstep_fail_struct(const halfstep_optimizer *o, const char *function, const void *structure);

/* Fails with MEMORY, because `what` needs so many bytes. */
int hstep_fail_memory(const halfstep_optimizer *o, uint64_t bytes, const char *what, ...)
    __attribute__((format(printf, 3, 4)));
/* Adds a name to a list of names in an error text. */
void hstep_add_name(char names[HSTEP_DETAIL_BYTES], const char *name);
/* Lists the formats with one of the roles. */
void hstep_list_formats(char names[HSTEP_DETAIL_BYTES], int roles);

/* Returns NONFINITE with the text of a refused step. The gradient of `tensor` is too large if too_large is set,
 * otherwise not finite. If tensor is -1, the norm is not finite. */
int hstep_fail_gradient(const halfstep_optimizer *o, int tensor, int too_large);
/* Fail with ARGUMENT unless there is such a tensor or group. */
int hstep_check_tensor(const halfstep_optimizer *o, int32_t tensor);
int hstep_check_group(const halfstep_optimizer *o, int32_t group);
/* Waits for the device and returns `error`, or the wait's own error if `error` is 0. Waits after an error too, because
 * earlier work may still write to memory of the caller. */
int hstep_wait(const halfstep_optimizer *o, int error);
/* Returns `error`. Sets the device's own error text if it has one. */
int hstep_why(const halfstep_optimizer *o, int error);

/* Returns ARGUMENT unless memory may be the device's. The caller then gets the text from the device (hstep_why). */
int hstep_check_owned(const halfstep_optimizer *o, const void *memory);

/* Makes room in an array for one more than count elements. After a failure the array is unchanged. */
int hstep_grow(void **array, int count, int *capacity, size_t size);

#endif
