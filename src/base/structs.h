/* Reads and fills structures of callers for both libraries. Such a structure begins with its struct_size. It may be of
 * another version than ours. */
#ifndef HSTEP_STRUCTS_H
#define HSTEP_STRUCTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Returns the size of a structure, or 0 if no version can have that size. Structures are small and consist of whole
 * words. */
static inline uint32_t hstep_struct_size(const void *structure)
{
    uint32_t size;
    memcpy(&size, structure, sizeof size);
    return size % sizeof size || size > 4096 ? 0 : size;
}

/* Copies the caller's structure to `ours`, which must be zeroed. Returns 0 if the caller sets a field that is unknown
 * here, or if the size is invalid; else 1. */
static inline int hstep_take_struct(void *ours, size_t size, const void *theirs)
{
    uint32_t given = hstep_struct_size(theirs);
    for (size_t i = size; i < given; i++)
        if (((const char *)theirs)[i]) return 0;
    memcpy(ours, theirs, given < size ? given : size);
    return given != 0;
}

/* Copies ours to the caller's structure, as far as that has room, and zeroes its bytes beyond ours. Returns 0 if the
 * caller's size is invalid, else 1. */
static inline int hstep_give_struct(void *theirs, const void *ours, size_t size)
{
    uint32_t bytes = hstep_struct_size(theirs), head = sizeof bytes;
    if (!bytes) return 0;
    memset((char *)theirs + head, 0, bytes - head);
    memcpy((char *)theirs + head, (const char *)ours + head, (bytes < size ? bytes : size) - head);
    return 1;
}

#endif
