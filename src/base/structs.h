/* Structures of callers, which begin with their struct_size and may be of another version than ours: both libraries
 * read and fill them so. */
#ifndef HSTEP_STRUCTS_H
#define HSTEP_STRUCTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 0 for what no version of a structure can have: they are of whole words and small. */
static inline uint32_t hstep_struct_size(const void *structure)
{
    uint32_t size;
    memcpy(&size, structure, sizeof size);
    return size % sizeof size || size > 4096 ? 0 : size;
}

/* The caller's structure as ours, in a zeroed `ours`: 0 if it asks for something that is unknown here, or has no such
 * size. */
static inline int hstep_take_struct(void *ours, size_t size, const void *theirs)
{
    uint32_t given = hstep_struct_size(theirs);
    for (size_t i = size; i < given; i++)
        if (((const char *)theirs)[i]) return 0;
    memcpy(ours, theirs, given < size ? given : size);
    return given != 0;
}

/* Ours as the caller's: as much as that has bytes for, and zero beyond ours. 0 if it has no such size. */
static inline int hstep_give_struct(void *theirs, const void *ours, size_t size)
{
    uint32_t bytes = hstep_struct_size(theirs), head = sizeof bytes;
    if (!bytes) return 0;
    memset((char *)theirs + head, 0, bytes - head);
    memcpy((char *)theirs + head, (const char *)ours + head, (bytes < size ? bytes : size) - head);
    return 1;
}

#endif
